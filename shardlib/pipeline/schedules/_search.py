"""Schedules found by a search from costs, under a limit of memory: zero bubble's ZB-1p and ZB-2p.

The search is over three rules of thumb, each of which may be followed or not. For each of the eight
choices a schedule is made greedily, and the one that takes the least time is the result:

    early    in the warm-up, a forward pass may still start when the first backward pass has come
    spare    any gap takes a `W`, even if that delays the stage
    yields   a stage skips a forward pass while its next stage has enough to do
"""

import itertools
from dataclasses import dataclass, field

from shardlib.pipeline.schedules._simulate import Costs, simulate
from shardlib.pipeline.schedules._table import Kind, Op, Table
from shardlib.pipeline.schedules._weave import one_microbatch

# Sums of floats that should be equal may differ by this much.
_SLACK = 1e-9


@dataclass(frozen=True)
class _Problem:
    """What a schedule is searched for: its size, its costs, and the limit of what stages hold.

    `limit` is in microbatches' activations.
    """

    stages: int
    microbatches: int
    costs: Costs
    limit: float


@dataclass(frozen=True)
class _Rules:
    """One choice of the rules of thumb that the module's docstring names."""

    early: bool
    spare: bool
    yields: bool


@dataclass
class _Stage:
    """A stage while a schedule is being made.

    `held` is in microbatches' activations, `waited` the time that the stage has had nothing to do
    since its first op, and `done` counts its ops by kind. `cost` has what each kind takes.
    """

    cost: dict[str, float]
    order: list[Op] = field(default_factory=list)
    clock: float = 0.0
    held: float = 0.0
    waited: float = 0.0
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys("FBW", 0))

    @property
    def pending(self) -> int:
        """How many gradients of weights could be made now."""
        return self.done["B"] - self.done["W"]


def search(stages: int, microbatches: int, costs: Costs, limit: float) -> Table:
    """The best of the schedules that the rules make.

    In each of them a stage holds at most `limit` microbatches' activations. Of schedules that take
    equally long the first is chosen.
    """
    problem = _Problem(stages, microbatches, costs, limit)
    tables = []
    for choice in itertools.product((True, False), repeat=3):
        tables.append(_Builder(problem, _Rules(*choice)).build())
    return min(tables, key=lambda table: simulate(table, costs).makespan)


class _Builder:
    """A schedule in the making, for one choice of rules.

    Rounds of a forward and a backward pass of every stage follow a warm-up of as many forward
    passes as there is room and time for. A gap that is long enough takes a `W`; so does one that is
    not, if the stage would otherwise have waited longer than any has yet.
    """

    def __init__(self, problem: _Problem, rules: _Rules) -> None:
        self.problem, self.rules = problem, rules
        # What a pass takes is the same for all microbatches.
        lone = one_microbatch(problem.stages, range(problem.stages))
        self.stages = []
        for order in lone.orders:
            self.stages.append(_Stage({op.kind: problem.costs.of(lone, op) for op in order}))
        self.end: dict[Op, float] = {}

    def build(self) -> Table:
        """Make the schedule."""
        self._warm_up()
        self._backward_round(fills_gaps=False)
        # From then on every round has a backward pass of each stage, and a forward pass as long as
        # there are microbatches.
        for _ in range(self.problem.microbatches - 1):
            for stage in self._going_forward():
                self._fill_gap(stage, "F")
                self._do(stage, "F")
            self._backward_round(fills_gaps=True)
        for stage in range(self.problem.stages):
            self._do_pending(stage)
        orders = tuple(tuple(stage.order) for stage in self.stages)
        return Table(orders, tuple(range(self.problem.stages)))

    def _backward_round(self, fills_gaps: bool) -> None:
        """A backward pass of every stage, from the last to the first.

        Before the first of these rounds there are no gradients of weights to fill gaps with.
        """
        for stage in reversed(range(self.problem.stages)):
            if fills_gaps:
                self._fill_gap(stage, "B")
            if stage == 0 and self.stages[0].done["F"] == self.problem.microbatches:
                # Nobody waits for the first stage any more.
                self._do_pending(0)
            self._do(stage, "B")

    def _arrival(self, stage: int, kind: Kind) -> float:
        """When what the next op of a kind needs from another stage has come."""
        other = stage - 1 if kind == "F" else stage + 1
        if not 0 <= other < self.problem.stages:
            return self.stages[stage].clock
        needed = Op(kind, self.stages[stage].done[kind], other)
        return self.end[needed] + self.problem.costs.send

    def _do(self, stage: int, kind: Kind) -> None:
        """Append the next op of a kind to the order of a stage."""
        target = self.stages[stage]
        start = target.clock
        if kind != "W":
            start = max(start, self._arrival(stage, kind))
        if target.order:
            # Before its first op a stage waits for the pipeline to fill, which no order can change.
            target.waited += start - target.clock
        op = Op(kind, target.done[kind], stage)
        self.end[op] = target.clock = start + target.cost[kind]
        kept = self.problem.costs.kept
        # A forward pass takes a microbatch's activations in, a backward pass gives up what only it
        # needs, and gradients of weights give up the rest.
        target.held += {"F": 1.0, "B": kept - 1.0, "W": -kept}[kind]
        target.done[kind] += 1
        target.order.append(op)

    def _do_pending(self, stage: int) -> None:
        """Make all gradients of weights that a stage can make."""
        while self.stages[stage].pending:
            self._do(stage, "W")

    def _fill_gap(self, stage: int, kind: Kind) -> None:
        """Make gradients of weights before the next op of a kind.

        First as many as its memory needs, then as many as fit before it can start, and then perhaps
        one that does not quite fit.
        """
        target, limit = self.stages[stage], self.problem.limit
        while kind == "F" and target.held + 1 > limit + _SLACK and target.pending:
            self._do(stage, "W")
        while target.pending and target.clock + target.cost["W"] <= self._arrival(stage, kind):
            self._do(stage, "W")
        # One more that does not quite fit delays the stage. It is done if the stage would otherwise
        # have waited longer than any other.
        gap = self._arrival(stage, kind) - target.clock
        if not target.pending or gap <= 0:
            return
        if self.rules.spare or gap > self._most_waited() - target.waited:
            self._do(stage, "W")

    def _most_waited(self) -> float:
        """For how long the stage has waited that has waited longest."""
        return max(stage.waited for stage in self.stages)

    def _warm_up(self) -> None:
        """Do forward passes before the first backward pass, as there is room and time for them."""
        for stage in range(self.problem.stages):
            self._do(stage, "F")
        # The first forward pass of each stage decides when its first backward pass can come.
        ahead = self._forwards_ahead()
        for stage in range(self.problem.stages):
            for _ in range(ahead[stage] - 1):
                self._do(stage, "F")

    def _forwards_ahead(self) -> list[int]:
        """How many forward passes each stage does before its first backward pass.

        `comes` is when the first backward pass reaches a stage, which is found from the last stage
        on.
        """
        problem = self.problem
        ahead = [1] * problem.stages
        comes = self.stages[-1].clock + self.stages[-1].cost["B"]
        for stage in reversed(range(problem.stages - 1)):
            cost, clock = self.stages[stage].cost, self.stages[stage].clock
            comes += problem.costs.send
            while (
                ahead[stage] < problem.microbatches and ahead[stage] + 1 <= problem.limit + _SLACK
            ):
                # Either it may start until the backward pass has come, or must end before that.
                is_too_late = clock + cost["F"] > comes
                if self.rules.early:
                    is_too_late = clock >= comes
                if is_too_late:
                    break
                ahead[stage] += 1
                clock += cost["F"]
            comes = max(clock, comes) + cost["B"]
        # Each stage is at least one ahead of the next, as far as there are microbatches.
        for stage in range(1, problem.stages):
            ahead[stage] = max(1, min(ahead[stage], ahead[stage - 1] - 1))
        return ahead

    def _going_forward(self) -> list[int]:
        """The stages that do a forward pass in this round.

        A stage does one only if all stages after it do, except those that are done with theirs:
        what it made would only wait there.
        """
        count = self.problem.microbatches
        # Asked of all stages before any of them does something in this round.
        wants = [self._wants_forward(stage) for stage in range(self.problem.stages)]
        for stage in reversed(range(self.problem.stages - 1)):
            next_has_more = self.stages[stage + 1].done["F"] < count
            if next_has_more and not wants[stage + 1]:
                wants[stage] = False
        return [stage for stage, wanted in enumerate(wants) if wanted]

    def _wants_forward(self, stage: int) -> bool:
        """Whether a stage would do a forward pass now, if it were for it only.

        A stage that yields does none while the next one has two waiting and will be busy until the
        result of another could be there.
        """
        target = self.stages[stage]
        if target.done["F"] == self.problem.microbatches:
            return False
        if not self.rules.yields or stage + 1 == self.problem.stages:
            return True
        after = self.stages[stage + 1]
        # The next stage is about to run out of microbatches.
        if target.done["F"] < after.done["F"] + 2:
            return True
        # When the gradient of what the next stage has now can be here, at the earliest.
        needed = after.clock + after.cost["F"] + after.cost["B"] + self.problem.costs.send
        if target.clock >= needed:
            return False
        is_late = target.clock + target.cost["F"] + self._time_to_make_room(target) > needed
        can_wait = needed - target.clock <= self._most_waited() - target.waited
        return not (is_late and can_wait)

    def _time_to_make_room(self, target: _Stage) -> float:
        """What the gradients of weights take that have to come first for another forward pass.

        Each of them lets go of one microbatch's activations.
        """
        time, held = 0.0, target.held + 1
        for _ in range(target.pending):
            if held <= self.problem.limit + _SLACK:
                break
            time += target.cost["W"]
            held -= 1
        return time
