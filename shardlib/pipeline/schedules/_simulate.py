"""What a schedule takes: a table played through with costs, without JAX.

There are two clocks. Stages that are free to run ahead start an op as soon as all it waits for has
come: that is how papers count, and what `simulate` does. An executor that is one program goes in
*ticks*, each of which takes as long as its slowest stage; `pack` puts ops into these.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardlib.checks import _arguments as check
from shardlib.pipeline.schedules._table import Op, Table

_TAKES_COSTS = "`Costs`, such as `Costs(forward=1, backward=2)`"


@dataclass(frozen=True)
class Costs:
    """What one microbatch takes, in any unit of time.

    - `forward`, `backward`, `weights`: of a whole stage, shared evenly by its parts; or one number
      for each part. `backward` is that of the input's gradient, `weights` of the weights'; where a
      table does not split them, its `B` takes both.
    - `send`: from one stage to the next.
    - `kept`: what share of a microbatch's activations is still held between `B` and `W`.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 1.0
    weights: float | Sequence[float] = 1.0
    send: float = 0.0
    kept: float = 1.0

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "weights"):
            check.assign(self, **{name: _checked_cost(name, getattr(self, name))})
        send = check.number("Costs", "send", self.send, "a cost", least=0)
        kept = check.number("Costs", "kept", self.kept, "a share", least=0, most=1)
        check.assign(self, send=float(send), kept=float(kept))

    def of(self, table: Table, op: Op) -> float:
        """The time that an op of a table takes on its stage."""
        if op.kind == "F":
            return _share(self.forward, table, op.part, "forward")
        weights = _share(self.weights, table, op.part, "weights")
        if op.kind == "W":
            return weights
        backward = _share(self.backward, table, op.part, "backward")
        if table.splits:
            return backward
        # One backward pass makes both gradients where the table does not split them.
        return backward + weights


def _checked_cost(name: str, value: Any) -> float | tuple[float, ...]:
    """A cost as a float, or as a tuple of floats where it is given for each part."""
    # A list of an array's numbers is checked one by one, as any other.
    if hasattr(value, "tolist") and not isinstance(value, type):  # an array
        value = value.tolist()
    if isinstance(value, tuple | list) and value:
        costs = []
        for cost in value:
            costs.append(float(check.number("Costs", name, cost, "a cost", least=0)))
        return tuple(costs)
    takes = "a cost, or a tuple of one for each part"
    return float(check.number("Costs", name, value, takes, least=0))


def _share(cost: float | Sequence[float], table: Table, part: int, name: str) -> float:
    """What a part takes of a cost, which the parts of a stage share evenly unless it says more."""
    if not isinstance(cost, Sequence):
        return cost / table.placement.count(table.placement[part])
    # A cost for each part says how unevenly the model is cut, so that nothing is shared out.
    if len(cost) != table.parts:
        raise ValueError(
            f"`Costs({name}=...)` has {len(cost)} numbers, and the table has {table.parts} parts."
        )
    return cost[part]


UNIT = Costs()
"""Forward, backward and weights all take one, and sending nothing."""


def _most_work(table: Table, costs: Costs) -> float:
    """What the stage with the most to do would take without a pause."""
    return max(sum(costs.of(table, op) for op in order) for order in table.orders)


@dataclass(frozen=True)
class Timeline:
    """A table played through: when each op starts and ends on its stage.

    Stages are free to run ahead.
    """

    table: Table
    costs: Costs
    start: dict[Op, float] = field(repr=False)
    end: dict[Op, float] = field(repr=False)

    @property
    def elapsed(self) -> float:
        """The time from the first op of all to the last."""
        return max(self.end.values())

    @cached_property
    def makespan(self) -> float:
        """What the busiest stage takes from its own first op to its own last.

        That is what papers count, for a stage that is done early may begin the next step early.
        """
        return max(self.end[order[-1]] - self.start[order[0]] for order in self.table.orders)

    @cached_property
    def work(self) -> float:
        """What the stage with the most to do would take without a pause."""
        return _most_work(self.table, self.costs)

    @property
    def gap(self) -> float:
        """The makespan less the work: the time that stages wait, if all are alike."""
        return self.makespan - self.work

    @property
    def bubble(self) -> float:
        """The gap's share of the makespan; 0 where nothing takes any time."""
        if not self.makespan:
            return 0.0
        return self.gap / self.makespan

    @cached_property
    def live(self) -> tuple[float, ...]:
        """How many microbatches' activations each stage holds at its fullest.

        All activations of one microbatch on the stage count as one, whatever their size.
        """
        return tuple(max(held) for held in self.held)

    @cached_property
    def held(self) -> tuple[tuple[float, ...], ...]:
        """How many microbatches' activations each stage holds after each of its ops."""
        return tuple(_held(self.table, order, self.costs.kept) for order in self.table.orders)

    @property
    def sends(self) -> int:
        """How often an activation, or the gradient of one, goes from stage to stage."""
        return sum(self.sends_of)

    @cached_property
    def sends_of(self) -> tuple[int, ...]:
        """How often each stage sends an activation, or the gradient of one.

        `bytes * timeline.sends_of[stage]` is what it puts on the wire in a step.
        """
        counts = []
        for order in self.table.orders:
            counts.append(sum(_is_sent_away(self.table, op) for op in order))
        return tuple(counts)


def _is_sent_away(table: Table, op: Op) -> bool:
    """Whether what an op makes goes to another stage; gradients of weights never do."""
    if op.kind == "W":
        return False
    # What the first part makes backward, and the last one forward, goes nowhere.
    to = op.part + {"F": 1, "B": -1}[op.kind]
    return 0 <= to < table.parts and table.placement[to] != table.placement[op.part]


def _held(table: Table, order: Sequence[Op], kept: float) -> tuple[float, ...]:
    """What a stage holds after each of its ops, in microbatches' activations."""
    # Each of a stage's parts holds an even share of a microbatch's activations.
    parts = table.placement.count(table.placement[order[0].part])
    # Where passes are split, `W` still needs a share of what `F` kept.
    backward = kept - 1.0 if table.splits else -1.0
    change = {"F": 1.0, "B": backward, "W": -kept}
    now, held = 0.0, []
    for op in order:
        now += change[op.kind] / parts
        held.append(now)
    return tuple(held)


def simulate(table: Table, costs: Costs = UNIT) -> Timeline:
    """Play a table through, each stage as fast as it can; gives a `Timeline`.

    - `table`: the table; of a schedule it is `schedule.table()`.
    - `costs`: what each pass takes; by default all take one, and sending takes nothing.

    A table in which an op can never start is refused with an error that names the stage and the op.

    >>> from shardlib.pipeline.schedules._table import Table
    >>> timeline = simulate(Table.parse('''
    ...     F0 F1 B0 B1
    ...     F0 B0 F1 B1
    ... '''), Costs(forward=1, backward=1, weights=0))
    >>> timeline.makespan, timeline.live
    (6.0, (2.0, 1.0))
    """
    check.kind("simulate", "table", table, Table, "a table; of a schedule it is `schedule.table()`")
    check.kind("simulate", "costs", costs, Costs, _TAKES_COSTS)
    play = _Play(table, costs)
    # A stage goes on until it waits for another one, and is taken up again when that has come.
    # Stages are taken up in any order: when an op starts depends only on what it waits for.
    ready = list(range(table.stages))
    # Each op is played once, and each stage taken up again at most once for each of its ops.
    while ready:
        stage = ready.pop()
        while play.next_op(stage) is not None and play.can_start(stage):
            op = play.do_next(stage)
            if op in play.waiting:
                ready.append(play.waiting.pop(op))
    play.check_done()
    return Timeline(table, costs, play.start, play.end)


class _Play:
    """A table while it is played through.

    `position` and `clock` are those of each stage: its next op, and when its last one ended.
    `waiting` has, by the op that it waits for, each stage that cannot go on.
    """

    def __init__(self, table: Table, costs: Costs) -> None:
        self.table, self.costs = table, costs
        self.start: dict[Op, float] = {}
        self.end: dict[Op, float] = {}
        self.position = [0] * table.stages
        self.clock = [0.0] * table.stages
        self.waiting: dict[Op, int] = {}

    def next_op(self, stage: int) -> Op | None:
        """The next op of a stage, or None when it is done."""
        order = self.table.orders[stage]
        if self.position[stage] == len(order):
            return None
        return order[self.position[stage]]

    def can_start(self, stage: int) -> bool:
        """Whether all that the next op of a stage needs is done; if not, the stage waits."""
        op = self.table.orders[stage][self.position[stage]]
        for needed in self.table.before(op):
            if needed in self.end:
                continue
            if self.table.placement[needed.part] == stage:
                raise ValueError(
                    f"Stage {stage} does `{op}`, its op {self.position[stage]}, before "
                    f"`{needed}`, which that needs."
                )
            self.waiting[needed] = stage
            return False
        return True

    def do_next(self, stage: int) -> Op:
        """Play the next op of a stage, and say which it was."""
        op = self.table.orders[stage][self.position[stage]]
        start = max(self.clock[stage], 0.0)
        for needed in self.table.before(op):
            arrives = self.end[needed]
            if self.table.placement[needed.part] != stage:
                arrives += self.costs.send
            start = max(start, arrives)
        self.start[op] = start
        self.end[op] = self.clock[stage] = start + self.costs.of(self.table, op)
        self.position[stage] += 1
        return op

    def check_done(self) -> None:
        """Refuse a table in which some stage still waits."""
        for missing, stage in self.waiting.items():
            other = self.table.placement[missing.part]
            raise ValueError(
                f"The schedule comes to a halt: stage {stage} cannot do `{self.next_op(stage)}`, "
                f"its op {self.position[stage]}, before `{missing}`, which is op "
                f"{self.table.orders[other].index(missing)} of stage {other}; and that stage waits "
                f"at its op {self.position[other]}, `{self.next_op(other)}`."
            )


@dataclass(frozen=True)
class Ticks:
    """A table packed into ticks.

    `rows` has, by tick and then by stage, what the stage does in it, in order.
    """

    table: Table
    rows: tuple[tuple[tuple[Op, ...], ...], ...]

    def makespan(self, costs: Costs = UNIT) -> float:
        """What the table takes in ticks.

        Every tick takes as long as its slowest stage, and all send before the next one begins.
        """
        check.kind("makespan", "costs", costs, Costs, _TAKES_COSTS)
        ticks = [self._slowest(row, costs) for row in self.rows]
        return sum(ticks) + costs.send * (len(self.rows) - 1)

    def _slowest(self, row: Sequence[Sequence[Op]], costs: Costs) -> float:
        """What a tick takes on the stage that has the most to do in it."""
        return max(sum(costs.of(self.table, op) for op in ops) for ops in row)

    def bubble(self, costs: Costs = UNIT) -> float:
        """The share of the makespan beyond the work of the stage with the most to do."""
        check.kind("bubble", "costs", costs, Costs, _TAKES_COSTS)
        # Without any cost there is no share to speak of.
        work = _most_work(self.table, costs)
        makespan = self.makespan(costs)
        if not makespan:
            return 0.0
        return 1 - work / makespan


def pack(table: Table, paired: bool) -> Ticks:
    """Put each op into the first tick that it can have, in the order of its stage.

    A tick takes one op; where ticks are `paired`, an `F`, a `B` and a `W`, in any order.
    What comes from another stage comes in a later tick.

    >>> from shardlib.pipeline.schedules._table import Table
    >>> table = Table.parse('''
    ...     F0 F1 B0 B1
    ...     F0 B0 F1 B1
    ... ''')
    >>> len(pack(table, paired=False).rows), len(pack(table, paired=True).rows)
    (6, 4)
    """
    check.kind("pack", "table", table, Table, "a table; of a schedule it is `schedule.table()`")
    check.boolean("pack", "paired", paired)
    simulate(table)  # which says why, where it comes to a halt
    tick_of: dict[Op, int] = {}
    position = [0] * table.stages
    rows: list[tuple[tuple[Op, ...], ...]] = []
    left = sum(len(order) for order in table.orders)
    while left > 0:
        row = []
        for stage, order in enumerate(table.orders):
            ops = _ops_of_tick(table, order[position[stage] :], tick_of, paired)
            position[stage] += len(ops)
            row.append(ops)
        # Only now, so that what a stage makes is not there for others in the same tick.
        for op in _flat(row):
            tick_of[op] = len(rows)
            left -= 1
        rows.append(tuple(row))
    return Ticks(table, tuple(rows))


def _ops_of_tick(
    table: Table, rest: Sequence[Op], earlier: dict[Op, int], paired: bool
) -> tuple[Op, ...]:
    """The ops that a stage does in a tick, of the `rest` of its order: as many as there can be."""
    ops: list[Op] = []
    for op in rest:
        if not _fits(table, op, ops, earlier, paired):
            break
        ops.append(op)
    return tuple(ops)


def _flat(row: Sequence[Sequence[Op]]) -> Iterator[Op]:
    """The ops of all stages in a tick."""
    for ops in row:
        yield from ops


def _fits(
    table: Table, op: Op, in_tick: Sequence[Op], earlier: dict[Op, int], paired: bool
) -> bool:
    """Whether an op can follow those that its stage does in a tick already.

    What it needs has to come from an earlier tick, or from this one on the same stage.
    """
    if in_tick and not paired:
        return False
    if any(op.kind == other.kind for other in in_tick):
        return False
    return all(needed in earlier or needed in in_tick for needed in table.before(op))
