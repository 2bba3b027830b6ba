"""ZB-V, made in rounds: each stage goes backward, then forward, and gradients of weights fill the
time that it would wait.

Two parts are on each stage, part s and part 2S - 1 - s. Passes are named by their kind and by
which of the two they go through: a 0 is the first part, which a microbatch meets on its way there,
a 1 the second, on its way back. On three stages a microbatch goes

    stage 0   F0                  F1  B1                  B0
    stage 1       F0          F1          B1          B0
    stage 2           F0  F1                  B1  B0

`B1` is thus the first to come backward.
"""

from collections import deque
from dataclasses import dataclass, field

from shardlib.pipeline.schedules._simulate import Costs
from shardlib.pipeline.schedules._table import Kind, Op, Table
from shardlib.pipeline.schedules._weave import one_microbatch

# Sums of floats that should be equal may differ by this much.
_SLACK = 1e-9
# The passes of a microbatch on a stage, but for the gradients of weights.
_NAMES = ("F0", "F1", "B0", "B1")


def rounds(stages: int, microbatches: int, limit: float, costs: Costs) -> Table:
    """The schedule in which no stage ever holds more than `limit` microbatches' activations.

    It is made twice, once with gradients of weights in every gap and once only in those that are
    long enough, and the one that takes less time is the result.
    """
    candidates = []
    for fills_gaps in (True, False):
        candidate = _Rounds(stages, microbatches, limit, costs, fills_gaps)
        candidate.build()
        candidates.append(candidate)
    return min(candidates, key=_Rounds.makespan).table()


@dataclass
class _Stage:
    """A stage while the schedule is made.

    - `first` and `now` are when its first pass starts, and when its last one ends.
    - `held` is what it holds now, in microbatches' activations.
    - `waited` is for how long it has had nothing to do since its first pass.
    - `pending` are gradients of weights that can be made now, as the backward passes before them.
    - `done` counts its passes by name.
    """

    order: list[Op] = field(default_factory=list)
    first: float = 0.0
    now: float = 0.0
    held: float = 0.0
    waited: float = 0.0
    pending: deque[Op] = field(default_factory=deque)
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_NAMES, 0))

    @property
    def forwards(self) -> int:
        """How many forward passes it has done, through both parts together."""
        return self.done["F0"] + self.done["F1"]


class _Rounds:
    """A schedule in the making: a beginning, and then a backward and a forward round in turn.

    Passes are appended stage by stage, each as early as it can start. `end` has when each ends.
    """

    def __init__(
        self, stages: int, microbatches: int, limit: float, costs: Costs, fills_gaps: bool
    ) -> None:
        self.microbatches, self.limit, self.costs = microbatches, limit, costs
        self.fills_gaps = fills_gaps
        self.placement = (*range(stages), *reversed(range(stages)))
        # One microbatch says who waits for whom, and what takes how long.
        self.microbatch = one_microbatch(stages, self.placement)
        self.stages = [_Stage() for _ in range(stages)]
        self.end: dict[Op, float] = {}

    def build(self) -> None:
        """Make the schedule."""
        self._begin()
        self._even_out()
        # Each microbatch goes through both parts of every stage, so there are two rounds for each.
        for _ in range(2 * self.microbatches):
            self._backward_round()
            self._forward_round()
        for number, stage in enumerate(self.stages):
            while stage.pending:
                self._do_weights(number)

    def makespan(self) -> float:
        """What the busiest stage takes from its first pass to the end of its last."""
        return max(stage.now - stage.first for stage in self.stages)

    def table(self) -> Table:
        """The schedule as a table."""
        orders = tuple(tuple(stage.order) for stage in self.stages)
        return Table(orders, self.placement)

    # Single passes.

    def _next(self, number: int, name: str) -> Op | None:
        """The next pass of a name on stage `number`, or None if there are no more."""
        done = self.stages[number].done[name]
        if done == self.microbatches:
            return None
        kind: Kind = "F" if name[0] == "F" else "B"
        part = number
        if name[1] == "1":
            part = 2 * len(self.stages) - 1 - number
        return Op(kind, done, part)

    def _can(self, number: int, name: str) -> bool:
        """Whether it is known when the next pass of a name can start."""
        op = self._next(number, name)
        if op is None:
            return False
        return all(needed in self.end for needed in self.microbatch.before(op))

    def _arrival(self, op: Op) -> float:
        """When all has come that a pass needs; it is known already when that ends."""
        arrival = 0.0
        for needed in self.microbatch.before(op):
            comes_from_far = self.placement[needed.part] != self.placement[op.part]
            arrival = max(arrival, self.end[needed] + self.costs.send * comes_from_far)
        return arrival

    def _append(self, number: int, op: Op, start: float) -> None:
        """Write down a pass that starts at a time."""
        stage = self.stages[number]
        if not stage.order:
            stage.first = start
        stage.order.append(op)
        stage.now = self.end[op] = start + self.costs.of(self.microbatch, op)
        # A part is half of what a stage has, and so are its activations.
        change = {"F": 1.0, "B": self.costs.kept - 1.0, "W": -self.costs.kept}[op.kind]
        stage.held += change / 2

    def _do(self, number: int, name: str) -> None:
        """Do the next pass of a name, as soon as what it needs has come."""
        stage, op = self.stages[number], self._next(number, name)
        assert op is not None
        start = max(stage.now, self._arrival(op))
        # Before its first pass a stage does not wait: it may still be busy with the step before.
        if stage.order:
            stage.waited += start - stage.now
        self._append(number, op, start)
        stage.done[name] += 1
        if op.kind == "B":
            stage.pending.append(op)

    def _do_weights(self, number: int) -> None:
        """Make the gradients of weights that have waited longest."""
        stage = self.stages[number]
        backward = stage.pending.popleft()
        self._append(number, backward._replace(kind="W"), stage.now)

    def _do_after_weights(self, number: int, name: str) -> None:
        """Do a pass, and before it gradients of weights: to make room, and where it would wait."""
        stage, op = self.stages[number], self._next(number, name)
        assert op is not None
        weights_take = self.costs.of(self.microbatch, Op("W", 0, op.part))
        while op.kind == "F" and stage.pending and stage.held + 0.5 > self.limit + _SLACK:
            self._do_weights(number)
        arrival = self._arrival(op)
        while stage.pending and arrival >= stage.now + weights_take - _SLACK:
            self._do_weights(number)
        # One more that does not quite fit delays the stage. That does no harm to one which has
        # waited less than another.
        spare = max(other.waited for other in self.stages) - stage.waited
        if self.fills_gaps and stage.pending and arrival - stage.now > spare + _SLACK:
            self._do_weights(number)
        self._do(number, name)

    # The beginning.

    def _begin(self) -> None:
        """The first microbatch there and back; meanwhile others go there, as far as there is room.

        Room is left for all of them to come back.
        """
        for number in range(len(self.stages)):
            self._do(number, "F0")
        for number in reversed(range(len(self.stages))):
            while self._may_start_another(number):
                # Another one goes to this stage, through all those before it.
                for before in range(number + 1):
                    self._do(before, "F0")
            self._do(number, "F1")

    def _may_start_another(self, number: int) -> bool:
        """Whether a stage has room and time for an `F0` before its first `F1`."""
        if number == len(self.stages) - 1 or self._next(number, "F0") is None:
            return False
        stage, back = self.stages[number], self._next(number, "F1")
        assert back is not None
        takes = self.costs.of(self.microbatch, Op("F", 0, number))
        has_room = stage.held + 1 + number <= self.limit + _SLACK
        return has_room and stage.now + takes <= self._arrival(back) + _SLACK

    def _even_out(self) -> None:
        """Go forward until no stage has done so less often than the one before it."""
        turn = 0
        for number in range(1, len(self.stages)):
            # The two parts take turns, so that neither runs out of microbatches.
            while self._is_behind(number):
                name = f"F{turn}"
                for later in reversed(range(number, len(self.stages))):
                    if self._can(later, name):
                        self._do(later, name)
                turn = 1 - turn

    def _is_behind(self, number: int) -> bool:
        """Whether a stage has gone forward less often than the one before it, in all or as `F1`."""
        stage, before = self.stages[number], self.stages[number - 1]
        if stage.forwards < before.forwards:
            return True
        return stage.done["F1"] <= before.done["F1"] < self.microbatches

    # The rounds.

    def _backward_round(self) -> None:
        """A backward pass of every stage that has one, in the order in which gradients travel.

        `B0`s go from the last stage to the first, `B1`s from the first to the last.
        """
        first_parts, second_parts = [], []
        for number, stage in enumerate(self.stages):
            if stage.done["B1"] < self.microbatches and not self._can(number, "B0"):
                second_parts.append(number)
            elif stage.done["B0"] < self.microbatches:
                first_parts.append(number)
        # Gradients of first parts come from the stage after, those of second parts from the one
        # before.
        for number in reversed(first_parts):
            self._do_after_weights(number, "B0")
        for number in second_parts:
            self._do_after_weights(number, "B1")

    def _forward_round(self) -> None:
        """A forward pass of every stage that can do one; those on their way back come first."""
        for number in range(len(self.stages)):
            if self._can(number, "F1"):
                self._do_after_weights(number, "F1")
            elif self._can(number, "F0"):
                self._do_after_weights(number, "F0")
