"""The published schedules with two parts on each stage: through the stages and back, as a V.

Stage s of S has part s, which microbatches meet on their way there, and part 2 S - 1 - s, on their
way back. The last part is on the first stage, where the backward pass thus begins:

    stage 0   F0                F7  B7                B0
    stage 1       F1        F6          B6        B1
    ...           (on four stages, by the number of the part)

Costs F, B and W in the formulas are those of a whole stage; M is the number of microbatches.
"""

from dataclasses import dataclass, field

from shardlib.pipeline.schedules._rounds import rounds
from shardlib.pipeline.schedules._schedule import (
    check_costs,
    check_schedule,
    checked_stages,
    equal_cost,
)
from shardlib.pipeline.schedules._simulate import UNIT, Costs
from shardlib.pipeline.schedules._table import Kind, Op, Table
from shardlib.pipeline.schedules._weave import weave

# The pattern of a microbatch of V-Min and V-Half is repeated after so many units of time: in these,
# each of the six passes of a stage (two of each kind) takes one.
_PERIOD = 6


@dataclass(frozen=True)
class _Pattern:
    """When the four passes of microbatch 0 start on a stage with two parts, in units of time.

    The *first* part is the one on the way through the stages, part s; the *second* the one on the
    way back, part 2 S - 1 - s.
    """

    forward_first: int
    forward_second: int
    backward_second: int
    backward_first: int


def _v_table(schedule: "VMin | VHalf") -> Table:
    """The table of a schedule that goes through the stages and back, as a V.

    The pattern of one microbatch, repeated every six units of time, decides the order of passes,
    and with it how long activations are held. The gradients of weights go where a stage would wait.
    """
    stages = schedule.stages
    orders = []
    for stage in range(stages):
        starts = _starts(schedule, stage)
        # No two passes of a stage start at once: the patterns see to that.
        # The order of passes is that of an endless pipeline in which each pattern is repeated.
        orders.append(sorted(starts, key=lambda op: starts[op]))
    placement = (*range(stages), *reversed(range(stages)))
    # The limit is the same for all stages.
    return weave(orders, placement, max(map(schedule.live, range(stages))))


def _starts(schedule: "VMin | VHalf", stage: int) -> dict[Op, int]:
    """When the forward and backward passes of a stage start, if nothing ever waited."""
    first, second = stage, 2 * schedule.stages - 1 - stage
    pattern = schedule.pattern(stage)
    starts: dict[Op, int] = {}
    for microbatch in range(schedule.microbatches):
        # Every microbatch does what the first does, a period later.
        begin = _PERIOD * microbatch
        starts[Op("F", microbatch, first)] = begin + pattern.forward_first
        starts[Op("F", microbatch, second)] = begin + pattern.forward_second
        starts[Op("B", microbatch, second)] = begin + pattern.backward_second
        starts[Op("B", microbatch, first)] = begin + pattern.backward_first
    return starts


@dataclass(frozen=True)
class VMin:
    """V-Min: a third of the memory of 1F1B, for two thirds of its gap.

    Two parts are on each stage, part s and part 2 S - 1 - s: through the stages, and back.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, into which the examples of a device are split; any number.
    - `paired`: whether a tick takes a pass of each kind, or only one pass.
    """

    stages: int
    microbatches: int
    paired: bool = False

    def __post_init__(self) -> None:
        check_schedule(self, parts=2)

    def table(self) -> Table:
        """What each stage does, in order; `W`s are where it would wait."""
        return _v_table(self)

    def pattern(self, stage: int) -> _Pattern:
        """When the passes of microbatch 0 start, such that no two of a stage fall on one unit.

        A delay of two before the backward passes sees to that where 3 divides S.
        """
        stages = self.stages
        # With a multiple of three stages, passes of two microbatches would fall on one unit:
        # backward passes start later.
        delay = 0 if stages % 3 else 2
        return _Pattern(
            forward_first=stage,
            forward_second=2 * stages - 1 - stage,
            backward_second=2 * stages + delay + stage,
            backward_first=4 * stages + delay - 1 - stage,
        )

    def gap(self, costs: Costs) -> float:
        """2 (S - 1)(F + B + W) / 3, for F = B = W, less half an F.

        Where 3 divides S it is half an F more instead.
        """
        forward = equal_cost(costs)
        if self.stages == 1:
            return 0.0
        more = -forward / 2
        if self.stages % 3 == 0:
            more = forward / 2
        return 2 * (self.stages - 1) * forward + more

    def live(self, stage: int) -> float:
        """S / 3, and at most two more."""
        return min(self.stages / 3 + 2, self.microbatches)


@dataclass(frozen=True)
class VHalf:
    """V-Half: half the memory of 1F1B, for half its gap.

    Two parts are on each stage, part s and part 2 S - 1 - s: through the stages, and back.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, into which the examples of a device are split; any number.
    - `paired`: whether a tick takes a pass of each kind, or only one pass.
    """

    stages: int
    microbatches: int
    paired: bool = False

    def __post_init__(self) -> None:
        check_schedule(self, parts=2)

    def table(self) -> Table:
        """What each stage does, in order; `W`s are where it would wait."""
        return _v_table(self)

    def pattern(self, stage: int) -> _Pattern:
        """When the passes of microbatch 0 start, such that no two of a stage fall on one unit.

        A delay of three before the backward passes sees to that for an even S.
        """
        stages = self.stages
        # With an even number of stages, passes of two microbatches would fall on one unit.
        delay = 0 if stages % 2 else 3
        return _Pattern(
            forward_first=2 * stage,
            forward_second=3 * stages - 2 - stage,
            backward_second=3 * stages - 1 + delay + 2 * stage,
            backward_first=6 * stages - 2 + delay - stage,
        )

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B + W) / 2, for F = B = W and an even S; half an F less for an odd one."""
        forward = equal_cost(costs)
        less = 0.0
        if self.stages % 2 and self.stages > 1:
            less = forward / 2
        return (self.stages - 1) * 3 * forward / 2 - less

    def live(self, stage: int) -> float:
        """S / 2 and one."""
        return min(self.stages // 2 + 1, self.microbatches)


@dataclass(frozen=True)
class ZBV:
    """ZB-V: no bubble at all for the memory of 1F1B.

    That holds where forward passes, backward passes and `W` take equally long, and M is at least
    2 S. Two parts are on each stage, part s and part 2 S - 1 - s: through the stages, and back.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, into which the examples of a device are split; at least S.
    - `costs`: what the passes take, for which the order is made; other costs leave some of the gap.
    - `paired`: whether a tick takes a pass of each kind, or only one pass.
    """

    stages: int
    microbatches: int
    costs: Costs = UNIT
    paired: bool = False

    def __post_init__(self) -> None:
        check_costs(self)
        check_schedule(self, checked_stages(self), why=", as many as there are stages", parts=2)

    def table(self) -> Table:
        """What each stage does."""
        return rounds(self.stages, self.microbatches, self.live(0), self.costs)

    def gap(self, costs: Costs) -> float:
        """0, for F = B = W and M at least 2 S; (S - 1) F / 2 for M = S."""
        forward, count = equal_cost(costs), self.microbatches
        # In between, stages wait for each other in ways that no short formula says.
        if self.stages < count < 2 * self.stages:
            raise ValueError(
                f"The closed formula is for M = S and for M at least 2 S; got {self}. `simulate` "
                "takes any."
            )
        if count >= 2 * self.stages:
            return 0.0
        return (self.stages - 1) * forward / 2

    def live(self, stage: int) -> float:
        """S at each stage."""
        return min(self.stages, self.microbatches)


@dataclass(frozen=True)
class DualPipeV:
    """DualPipeV: DeepSeek's DualPipe cut in half, with two parts on each stage.

    In most steps a stage has a forward and a backward pass, of different microbatches.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, into which the examples of a device are split; at least 2 S.
    - `paired`: whether a tick takes both; with False it takes one pass. The two are run one after
      the other, or a layer of each at a time with `Strategy(combine_passes=True)`, so that what one
      sends may go while the other computes.
    """

    stages: int
    microbatches: int
    paired: bool = True

    def __post_init__(self) -> None:
        check_schedule(
            self, 2 * checked_stages(self), why=", twice as many as there are stages", parts=2
        )

    def table(self) -> Table:
        """What each stage does."""
        return Table(
            tuple(self._order(stage) for stage in range(self.stages)),
            (*range(self.stages), *reversed(range(self.stages))),
        )

    def _order(self, stage: int) -> tuple[Op, ...]:
        """The order of a stage, in eight phases, which are those of DeepSeek's code."""
        after = self.stages - stage - 1  # stages behind this one
        order = _Order(stage, 2 * self.stages - 1 - stage)
        order.put("F0", times=2 * after)
        order.put("F0 F1", times=stage + 1)
        for _ in range(after):
            order.put("B1", split=True)
            order.put("W F1")
        order.put("F0 B1 F1 B0", times=self.microbatches - 2 * self.stages + stage + 1)
        order.put("B1 F1 B0", times=after)
        # Half of the last backward passes leave the gradients of weights for later.
        for number in range(2 * (stage + 1)):
            name = "B0" if number % 2 else "B1"
            order.put(name, split=number > stage)
        for _ in range(after):
            order.put("W")
            order.put("B0", split=True)
        order.put("W", times=len(order.postponed))
        return tuple(order.ops)

    def gap(self, costs: Costs) -> float:
        """(S - 1) F / 2, for F = B = W."""
        return (self.stages - 1) * equal_cost(costs) / 2

    def live(self, stage: int) -> float:
        """S and a half."""
        return min(self.stages + 0.5, self.microbatches)


@dataclass
class _Order:
    """The order of a stage of DualPipeV while it is written down.

    Passes are named as in `F0` and `B1`: their kind, and whether they go through the `first` or the
    `second` part of the stage. `postponed` are gradients of weights that are still to be made.
    """

    first: int
    second: int
    ops: list[Op] = field(default_factory=list)
    postponed: list[Op] = field(default_factory=list)
    done: dict[str, int] = field(default_factory=dict)

    def put(self, names: str, *, times: int = 1, split: bool = False) -> None:
        """Append the next passes of some names, all of them so many times.

        `W` is the oldest of the postponed ones. A backward pass makes the gradients of weights at
        once, or if it is `split` leaves them for later.
        """
        for name in names.split() * times:
            if name == "W":
                self.ops.append(self.postponed.pop(0))
                continue
            op = self._next(name)
            self.ops.append(op)
            if op.kind == "F":
                continue
            # A backward pass that is not split makes the gradients of weights at once.
            weights = op._replace(kind="W")
            if split:
                self.postponed.append(weights)
            else:
                self.ops.append(weights)

    def _next(self, name: str) -> Op:
        """The next pass of a name: each goes through the microbatches in order."""
        kind: Kind = "F" if name[0] == "F" else "B"
        part = self.first if name[1] == "0" else self.second
        microbatch = self.done.get(name, 0)
        self.done[name] = microbatch + 1
        return Op(kind, microbatch, part)
