"""What a schedule takes: a table played through with costs, without JAX.

Two clocks. Stages that are free to run ahead start an op as soon as all it waits for has come: that
is how papers count. An executor that is one program goes in *ticks*, each of which takes as long as
its slowest stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from shardlib.checks import _arguments as check
from shardlib.pipeline.schedules._table import Op, Table


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
            value = getattr(self, name)
            if hasattr(value, "tolist") and not isinstance(value, type):  # an array
                value = value.tolist()
            if isinstance(value, tuple | list) and value:
                of_parts = tuple(
                    float(check.number("Costs", name, one, "a cost", least=0)) for one in value
                )
                check.assign(self, **{name: of_parts})
            else:
                takes = "a cost, or a tuple of one for each part"
                check.assign(
                    self, **{name: float(check.number("Costs", name, value, takes, least=0))}
                )
        send = check.number("Costs", "send", self.send, "a cost", least=0)
        kept = check.number("Costs", "kept", self.kept, "a share", least=0, most=1)
        check.assign(self, send=float(send), kept=float(kept))

    def of(self, table: Table, op: Op) -> float:
        """What an op takes."""
        if op.kind == "F":
            return _share(self.forward, table, op.part, "forward")
        weights = _share(self.weights, table, op.part, "weights")
        if op.kind == "W":
            return weights
        return _share(self.backward, table, op.part, "backward") + (
            0.0 if table.splits else weights
        )


def _share(cost: float | Sequence[float], table: Table, part: int, name: str) -> float:
    if not isinstance(cost, Sequence):
        return cost / table.placement.count(table.placement[part])
    if len(cost) != table.parts:
        raise ValueError(
            f"`Costs({name}=...)` has {len(cost)} numbers, and the table has {table.parts} parts."
        )
    return cost[part]


UNIT = Costs()
"""Forward, backward and weights all take one, and sending nothing."""


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
        """From the first op of all to the last."""
        return max(self.end.values())

    @cached_property
    def makespan(self) -> float:
        """What the busiest stage takes from its own first op to its own last: what papers count,
        for a stage that is done early may begin the next step early.
        """
        return max(self.end[order[-1]] - self.start[order[0]] for order in self.table.orders)

    @cached_property
    def work(self) -> float:
        """What the stage with the most to do would take without a pause."""
        return max(
            sum(self.costs.of(self.table, op) for op in order) for order in self.table.orders
        )

    @property
    def gap(self) -> float:
        """The makespan less that work: what stages that are all alike wait."""
        return self.makespan - self.work

    @property
    def bubble(self) -> float:
        """The gap's share of the makespan."""
        return self.gap / self.makespan if self.makespan else 0.0

    @cached_property
    def live(self) -> tuple[float, ...]:
        """How many microbatches' activations each stage holds at its fullest, a stage's own being
        one.
        """
        return tuple(max(held) for held in self.held)

    @cached_property
    def held(self) -> tuple[tuple[float, ...], ...]:
        """The same after each op of each stage."""
        return tuple(_held(self.table, order, self.costs.kept) for order in self.table.orders)

    @property
    def sends(self) -> int:
        """How often an activation, or the gradient of one, goes from stage to stage."""
        return sum(self.sends_of)

    @cached_property
    def sends_of(self) -> tuple[int, ...]:
        """How often each stage sends one: `bytes * timeline.sends_of[stage]` is what it puts on the
        wire in a step.
        """
        table = self.table

        def is_sent_away(op: Op) -> bool:
            if op.kind == "W":
                return False
            to = op.part + {"F": 1, "B": -1}[op.kind]
            return 0 <= to < table.parts and table.placement[to] != table.placement[op.part]

        return tuple(sum(is_sent_away(op) for op in order) for order in table.orders)


def _held(table: Table, order: Sequence[Op], kept: float) -> tuple[float, ...]:
    of_stage = table.placement.count(table.placement[order[0].part])
    change = {"F": 1.0, "B": kept - 1.0 if table.splits else -1.0, "W": -kept}
    now, held = 0.0, []
    for op in order:
        now += change[op.kind] / of_stage
        held.append(now)
    return tuple(held)


def simulate(table: Table, costs: Costs = UNIT) -> Timeline:
    """Play a table through. What can never start is an error, with the stage and the op.

    >>> from shardlib.pipeline.schedules._table import Table
    >>> timeline = simulate(Table.parse('''
    ...     F0 F1 B0 B1
    ...     F0 B0 F1 B1
    ... '''), Costs(forward=1, backward=1, weights=0))
    >>> timeline.makespan, timeline.live
    (6.0, (2.0, 1.0))
    """
    check.kind("simulate", "table", table, Table, "a table; of a schedule it is `schedule.table()`")
    check.kind("simulate", "costs", costs, Costs, "`Costs`, such as `Costs(forward=1, backward=2)`")
    start: dict[Op, float] = {}
    end: dict[Op, float] = {}
    at, clock = [0] * table.stages, [0.0] * table.stages
    waiting: dict[Op, int] = {}  # for whom a stage waits
    ready = list(range(table.stages))
    while ready:
        stage = ready.pop()
        while at[stage] < len(table.orders[stage]):
            op = table.orders[stage][at[stage]]
            if missing := next((one for one in table.before(op) if one not in end), None):
                if table.placement[missing.part] == stage:
                    raise ValueError(
                        f"Stage {stage} does `{op}`, its op {at[stage]}, before `{missing}`, which "
                        "that needs."
                    )
                waiting[missing] = stage
                break
            arrived = (
                end[one] + (costs.send if table.placement[one.part] != stage else 0.0)
                for one in table.before(op)
            )
            start[op] = max(clock[stage], *arrived, 0.0)
            end[op] = clock[stage] = start[op] + costs.of(table, op)
            at[stage] += 1
            if op in waiting:
                ready.append(waiting.pop(op))
    for missing, stage in waiting.items():
        other, op = table.placement[missing.part], table.orders[stage][at[stage]]
        raise ValueError(
            f"The schedule comes to a halt: stage {stage} cannot do `{op}`, its op {at[stage]}, "
            f"before `{missing}`, which is op {table.orders[other].index(missing)} of stage "
            f"{other}; and that stage waits at its op {at[other]}, "
            f"`{table.orders[other][at[other]]}`."
        )
    return Timeline(table, costs, start, end)


@dataclass(frozen=True)
class Ticks:
    """A table packed into ticks: what each stage does in each, in order."""

    table: Table
    rows: tuple[tuple[tuple[Op, ...], ...], ...]  # by tick, then by stage

    def makespan(self, costs: Costs = UNIT) -> float:
        """What it takes if every tick takes as long as its slowest stage, and all send before the
        next.
        """
        check.kind(
            "makespan", "costs", costs, Costs, "`Costs`, such as `Costs(forward=1, backward=2)`"
        )
        ticks = (
            max(sum(costs.of(self.table, op) for op in ops) for ops in row) for row in self.rows
        )
        return sum(ticks) + costs.send * (len(self.rows) - 1)

    def bubble(self, costs: Costs = UNIT) -> float:
        """The share of that beyond the work of the stage with the most to do."""
        check.kind(
            "bubble", "costs", costs, Costs, "`Costs`, such as `Costs(forward=1, backward=2)`"
        )
        work = max(sum(costs.of(self.table, op) for op in order) for order in self.table.orders)
        makespan = self.makespan(costs)
        return 1 - work / makespan if makespan else 0.0


def pack(table: Table, paired: bool) -> Ticks:
    """Put each op into the first tick that it can have, in the order of its stage.

    A tick takes one op; where ticks are `paired`, an `F` and a `B`, whichever comes first, and the
    `W`s beside them. What comes from another stage comes in a later tick.

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
    done: dict[Op, int] = {}
    at, rows = [0] * table.stages, []
    while any(at[stage] < len(order) for stage, order in enumerate(table.orders)):
        row: list[tuple[Op, ...]] = []
        for stage, order in enumerate(table.orders):
            taken: list[Op] = []
            while at[stage] < len(order):
                op = order[at[stage]]
                if any(op.kind == one.kind for one in taken) or (taken and not paired):
                    break
                here = lambda one, stage=stage: table.placement[one.part] == stage  # noqa: E731
                if not all(
                    done.get(one, len(rows)) < len(rows) or (here(one) and one in taken)
                    for one in table.before(op)
                ):
                    break
                taken.append(op)
                at[stage] += 1
            row.append(tuple(taken))
        for ops in row:
            done.update(dict.fromkeys(ops, len(rows)))
        rows.append(tuple(row))
    return Ticks(table, tuple(rows))
