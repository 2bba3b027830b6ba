"""The published schedules. Each is a value that makes a table, with the closed formulas of its
paper beside it.

Stage numbers s run from 0 to S - 1; of M microbatches. Costs F, B and W are those of a whole stage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlib.checks import _arguments as check
from shardlib.pipeline.schedules._rounds import rounds
from shardlib.pipeline.schedules._schedule import (
    MOST_PASSES,
    Schedule,
    check_costs,
    check_schedule,
    checked_stages,
    equal_cost,
    require_for_formula,
    single_costs,
    total_cost,
)
from shardlib.pipeline.schedules._search import search
from shardlib.pipeline.schedules._simulate import UNIT, Costs
from shardlib.pipeline.schedules._table import Kind, Op, Table
from shardlib.pipeline.schedules._weave import weave


@dataclass(frozen=True)
class _Plain:
    """One part on each stage."""

    stages: int
    microbatches: int
    paired: bool = False

    def __post_init__(self) -> None:
        check_schedule(self)


def _in_turn(
    forwards: list[tuple[int, int]],
    backwards: list[tuple[int, int]],
    ahead: int,
    weights_behind: int | None,
) -> list[Op]:
    """The order of a stage: `ahead` forward passes, then a backward and a forward pass in turn.

    Passes are given by microbatch and part; what is left of them comes at the end. If backward
    passes are split, the gradients of weights follow `weights_behind` backward passes behind.
    """
    order = [Op("F", *item) for item in forwards[:ahead]]
    weights = []
    for number, item in enumerate(backwards):
        order.append(Op("B", *item))
        weights.append(Op("W", *item))
        if weights_behind is not None and number >= weights_behind:
            order.append(weights.pop(0))
        if ahead + number < len(forwards):
            order.append(Op("F", *forwards[ahead + number]))
    if weights_behind is not None:
        order += weights
    return order


def _table_in_turn(
    schedule: Schedule, ahead: Sequence[int], weights_behind: Sequence[int] | None = None
) -> Table:
    """The table of a schedule with one part on each stage, whose passes go in turn.

    `ahead` and `weights_behind` are the numbers of `_in_turn`, for each stage.
    """
    orders = []
    for stage in range(schedule.stages):
        items = [(microbatch, stage) for microbatch in range(schedule.microbatches)]
        behind = None if weights_behind is None else weights_behind[stage]
        order = _in_turn(items, items, min(ahead[stage], len(items)), behind)
        orders.append(tuple(order))
    return Table(tuple(orders), tuple(range(schedule.stages)))


@dataclass(frozen=True)
class GPipe(_Plain):
    """All forward passes, then all backward passes.

    With one microbatch it is naive model parallelism, in which one stage works at a time.

    >>> [str(op) for op in GPipe(2, 2).table().orders[0]]
    ['F0@0', 'F1@0', 'B0@0', 'B1@0']
    """

    def table(self) -> Table:
        """What each stage does."""
        return _table_in_turn(self, [self.microbatches] * self.stages)

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B + W)."""
        return (self.stages - 1) * total_cost(costs)

    def live(self, stage: int) -> float:
        """M at each stage."""
        return self.microbatches


@dataclass(frozen=True)
class OneFOneB(_Plain):
    """PipeDream-Flush, 1F1B: a backward pass as soon as there is one.

    A stage then holds no more microbatches than there are stages from it on.

    >>> [str(op) for op in OneFOneB(2, 3).table().orders[0]]
    ['F0@0', 'F1@0', 'B0@0', 'F2@0', 'B1@0', 'B2@0']
    """

    def table(self) -> Table:
        """What each stage does."""
        return _table_in_turn(self, range(self.stages, 0, -1))

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B + W)."""
        return (self.stages - 1) * total_cost(costs)

    def live(self, stage: int) -> float:
        """S - s."""
        return min(self.stages - stage, self.microbatches)


@dataclass(frozen=True)
class Eager1F1B(_Plain):
    """1F1B with forward passes early enough that what is sent has a tick to travel.

    A stage holds nearly twice as many microbatches.

    Paired, a tick has a forward and a backward pass, and there are M + 2 (S - 1) of them.

    >>> from shardlib.pipeline import pack
    >>> len(pack(Eager1F1B(4, 8).table(), paired=True).rows)
    14
    """

    paired: bool = True

    def table(self) -> Table:
        """What each stage does."""
        return _table_in_turn(self, range(2 * self.stages - 1, 0, -2))

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B + W)."""
        return (self.stages - 1) * total_cost(costs)

    def live(self, stage: int) -> float:
        """2 (S - s) - 1."""
        return min(2 * (self.stages - stage) - 1, self.microbatches)


@dataclass(frozen=True)
class ZBH1(_Plain):
    """Zero bubble H1: 1F1B, with the weights' gradients left for the gaps.

    They come as late as 1F1B's memory allows.
    """

    def table(self) -> Table:
        """What each stage does."""
        return _table_in_turn(self, range(self.stages, 0, -1), range(self.stages))

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B - W), when M is at least S, and F at least W."""
        forward, backward, weights = single_costs(costs)
        require_for_formula(
            weights <= forward and self.microbatches >= self.stages,
            "W at most F, and M at least S",
            costs,
        )
        return (self.stages - 1) * (forward + backward - weights)

    def live(self, stage: int) -> float:
        """S at each stage."""
        return min(self.stages, self.microbatches)


@dataclass(frozen=True)
class ZBH2(_Plain):
    """Zero bubble H2: H1 with forward passes that fill the gap before the first backward pass.

    That takes twice the memory.
    """

    def table(self) -> Table:
        """What each stage does."""
        return _table_in_turn(self, range(2 * self.stages - 1, 0, -2), range(0, 2 * self.stages, 2))

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B - 2 W), when M is at least 2 S - 1, F at least W, and F + B at least 2
        W.
        """
        forward, backward, weights = single_costs(costs)
        enough = self.microbatches >= 2 * self.stages - 1
        in_order = weights <= forward and 2 * weights <= forward + backward
        require_for_formula(
            enough and in_order, "W at most F, 2 W at most F + B, and M at least 2 S - 1", costs
        )
        return (self.stages - 1) * (forward + backward - 2 * weights)

    def live(self, stage: int) -> float:
        """2 S - 1 at each stage."""
        return min(2 * self.stages - 1, self.microbatches)


@dataclass(frozen=True)
class Interleaved:
    """Megatron's interleaved schedule: each stage has `chunks` parts, S apart.

    The microbatches go through in groups of S.
    """

    stages: int
    microbatches: int
    chunks: int = 2
    paired: bool = False

    def __post_init__(self) -> None:
        chunks = check.whole(
            "Interleaved",
            "chunks",
            self.chunks,
            "a number of parts on each stage",
            least=1,
            most=MOST_PASSES,
        )
        check.assign(self, chunks=chunks)
        stages = checked_stages(self)
        check_schedule(
            self,
            stages,
            stages,
            ": its microbatches go in groups as many as there are stages",
            parts=chunks,
        )

    def table(self) -> Table:
        """What each stage does."""
        stages, chunks, count = self.stages, self.chunks, self.microbatches * self.chunks
        orders = []
        for stage in range(stages):
            turns = [
                (k // (stages * chunks) * stages + k % stages, k // stages % chunks)
                for k in range(count)
            ]
            forwards = [(m, chunk * stages + stage) for m, chunk in turns]
            backwards = [(m, (chunks - 1 - chunk) * stages + stage) for m, chunk in turns]
            ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
            orders.append(tuple(_in_turn(forwards, backwards, min(ahead, count), None)))
        return Table(tuple(orders), tuple(part % stages for part in range(stages * chunks)))

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B + W) / chunks."""
        return (self.stages - 1) * total_cost(costs) / self.chunks

    def live(self, stage: int) -> float:
        """(2 (S - s - 1) + (chunks - 1) S + 1) / chunks."""
        most = 2 * (self.stages - stage - 1) + (self.chunks - 1) * self.stages + 1
        return min(most / self.chunks, self.microbatches)


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
    stages, orders = schedule.stages, []
    for stage in range(stages):
        first, second = stage, 2 * stages - 1 - stage
        pattern = schedule._pattern(stage)
        timed = []
        for microbatch in range(schedule.microbatches):
            start = 6 * microbatch
            timed += [
                (start + pattern.forward_first, Op("F", microbatch, first)),
                (start + pattern.forward_second, Op("F", microbatch, second)),
                (start + pattern.backward_second, Op("B", microbatch, second)),
                (start + pattern.backward_first, Op("B", microbatch, first)),
            ]
        orders.append([op for _, op in sorted(timed)])
    placement = (*range(stages), *reversed(range(stages)))
    return weave(orders, placement, max(map(schedule.live, range(stages))))


@dataclass(frozen=True)
class VMin:
    """V-Min: a third of the memory of 1F1B, for two thirds of its gap.

    Two parts are on each stage, part s and part 2 S - 1 - s: through the stages, and back.
    """

    stages: int
    microbatches: int
    paired: bool = False

    def __post_init__(self) -> None:
        check_schedule(self, parts=2)

    def table(self) -> Table:
        """What each stage does, in order; `W`s are where it would wait."""
        return _v_table(self)

    def _pattern(self, stage: int) -> _Pattern:
        """When the passes of microbatch 0 start, such that no two of a stage fall on one unit.

        A delay of two before the backward passes sees to that where 3 divides S.
        """
        stages = self.stages
        delay = 0 if stages % 3 else 2
        return _Pattern(
            forward_first=stage,
            forward_second=2 * stages - 1 - stage,
            backward_second=2 * stages + delay + stage,
            backward_first=4 * stages + delay - 1 - stage,
        )

    def gap(self, costs: Costs) -> float:
        """2 (S - 1)(F + B + W) / 3, for F = B = W, half an F less; or half an F more, where 3
        divides S.
        """
        forward = equal_cost(costs)
        more = forward / 2 if self.stages % 3 == 0 else -forward / 2
        return 2 * (self.stages - 1) * forward + more if self.stages > 1 else 0.0

    def live(self, stage: int) -> float:
        """S / 3, and at most two more."""
        return min(self.stages / 3 + 2, self.microbatches)


@dataclass(frozen=True)
class VHalf:
    """V-Half: half the memory of 1F1B, for half its gap.

    Two parts are on each stage, part s and part 2 S - 1 - s: through the stages, and back.
    """

    stages: int
    microbatches: int
    paired: bool = False

    def __post_init__(self) -> None:
        check_schedule(self, parts=2)

    def table(self) -> Table:
        """What each stage does, in order; `W`s are where it would wait."""
        return _v_table(self)

    def _pattern(self, stage: int) -> _Pattern:
        """When the passes of microbatch 0 start, such that no two of a stage fall on one unit.

        A delay of three before the backward passes sees to that for an even S.
        """
        stages = self.stages
        delay = 0 if stages % 2 else 3
        return _Pattern(
            forward_first=2 * stage,
            forward_second=3 * stages - 2 - stage,
            backward_second=3 * stages - 1 + delay + 2 * stage,
            backward_first=6 * stages - 2 + delay - stage,
        )

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B + W) / 2, for F = B = W and an even S; half an F less for an odd one."""
        less = equal_cost(costs) / 2 if self.stages % 2 and self.stages > 1 else 0.0
        return (self.stages - 1) * 3 * equal_cost(costs) / 2 - less

    def live(self, stage: int) -> float:
        """S / 2 and one."""
        return min(self.stages // 2 + 1, self.microbatches)


@dataclass(frozen=True)
class ZBV:
    """ZB-V: no bubble at all for the memory of 1F1B.

    That holds where forward passes, backward passes and `W` take equally long.

    Two parts on each stage, through the stages and back. Made for `costs`; other costs leave some
    of the gap.
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
        if self.stages < count < 2 * self.stages:
            raise ValueError(
                f"The closed formula is for M = S and for M at least 2 S; got {self}. `simulate` "
                "takes any."
            )
        return 0.0 if count >= 2 * self.stages else (self.stages - 1) * forward / 2

    def live(self, stage: int) -> float:
        """S at each stage."""
        return min(self.stages, self.microbatches)


@dataclass(frozen=True)
class DualPipeV:
    """DeepSeek's DualPipe cut in half: two parts on each stage.

    In most steps a forward pass runs beside a backward one.

    Paired, a tick has both, so that what one sends may go while the other computes.
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
        after = self.stages - stage - 1  # stages behind this one
        order: list[Op] = []
        late: list[Op] = []  # gradients of weights, not made yet
        done: dict[str, int] = dict.fromkeys(("F0", "F1", "B0", "B1"), 0)

        def put(names: str, *, split: bool = False) -> None:
            for name in names.split():
                if name == "W":
                    order.append(late.pop(0))
                    continue
                kind: Kind = "F" if name[0] == "F" else "B"
                part = stage if name[1] == "0" else 2 * self.stages - 1 - stage
                op = Op(kind, done[name], part)
                done[name] += 1
                order.append(op)
                if kind == "B":
                    (late if split else order).append(op._replace(kind="W"))

        for _ in range(2 * after):
            put("F0")
        for _ in range(stage + 1):
            put("F0 F1")
        for _ in range(after):
            put("B1", split=True)
            put("W F1")
        for _ in range(self.microbatches - 2 * self.stages + stage + 1):
            put("F0 B1 F1 B0")
        for _ in range(after):
            put("B1 F1 B0")
        # Of the last backward passes half leave the gradients of weights for later.
        for number in range(2 * (stage + 1)):
            put("B0" if number % 2 else "B1", split=number > stage)
        for _ in range(after):
            put("W")
            put("B0", split=True)
        while late:
            put("W")
        return tuple(order)

    def gap(self, costs: Costs) -> float:
        """(S - 1) F / 2, for F = B = W."""
        return (self.stages - 1) * equal_cost(costs) / 2

    def live(self, stage: int) -> float:
        """S and a half."""
        return min(self.stages + 0.5, self.microbatches)


@dataclass(frozen=True)
class ZeroBubble:
    """The best schedule that a search from costs finds.

    Each stage holds at most `limit` microbatches' activations.

    With S, the default, it is the paper's ZB-1p, with 2 S its ZB-2p.
    """

    stages: int
    microbatches: int
    costs: Costs = UNIT
    limit: float | None = None
    paired: bool = False

    def __post_init__(self) -> None:
        check_schedule(self, most=MOST_PASSES // 4)  # it makes and compares eight tables
        check_costs(self)
        takes = "a number of microbatches that a stage holds"
        check.number(
            "ZeroBubble", "limit", self.limit, takes, least=1, infinite=True, optional=True
        )

    def live(self, stage: int) -> float:
        """The limit, at most."""
        return min(self.stages if self.limit is None else self.limit, self.microbatches)

    def table(self) -> Table:
        """What each stage does."""
        return search(
            self.stages,
            self.microbatches,
            self.costs,
            self.stages if self.limit is None else self.limit,
        )


def _zb_2p(stages: int, microbatches: int, costs: Costs = UNIT) -> ZeroBubble:
    return replace(ZeroBubble(stages, microbatches, costs), limit=2 * stages)


SCHEDULES: dict[str, Callable[..., Any]] = {
    "gpipe": GPipe,
    "1f1b": OneFOneB,
    "eager-1f1b": Eager1F1B,
    "interleaved": Interleaved,
    "zb-h1": ZBH1,
    "zb-h2": ZBH2,
    "zb-v": ZBV,
    "v-half": VHalf,
    "v-min": VMin,
    "dualpipe-v": DualPipeV,
    "zb-1p": ZeroBubble,
    "zb-2p": _zb_2p,
}
"""Schedules by the names that papers have for them, each made from stages and microbatches."""
COSTED = ("zb-v", "zb-1p", "zb-2p")
"""Those that are made for `costs`, the third argument."""
