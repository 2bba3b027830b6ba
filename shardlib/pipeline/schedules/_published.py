"""The published schedules, each a value that makes a table, with the closed formulas of its paper.

Those that go through the stages and back, as a V, are in `_v_shaped`. In formulas S is the number
of stages, s that of one of them, from 0 on, and M the number of microbatches. Costs F, B and W are
those of a whole stage. `gap` is for how long stages wait in a step, and `live` how many
microbatches' activations a stage holds at its fullest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlib.checks import _arguments as check
from shardlib.pipeline.schedules._schedule import (
    MOST_PASSES,
    Schedule,
    check_costs,
    check_schedule,
    checked_stages,
    require_for_formula,
    single_costs,
    total_cost,
)
from shardlib.pipeline.schedules._search import search
from shardlib.pipeline.schedules._simulate import UNIT, Costs
from shardlib.pipeline.schedules._table import Op, Table
from shardlib.pipeline.schedules._v_shaped import ZBV, DualPipeV, VHalf, VMin


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
    # Gradients of weights whose backward pass is done, the oldest first.
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
        behind = None
        if weights_behind is not None:
            behind = weights_behind[stage]
        # With fewer microbatches than that, all forward passes come first.
        order = _in_turn(items, items, min(ahead[stage], len(items)), behind)
        orders.append(tuple(order))
    return Table(tuple(orders), tuple(range(schedule.stages)))


@dataclass(frozen=True)
class GPipe(_Plain):
    """GPipe: all forward passes, then all backward passes.

    With one microbatch it is naive model parallelism, in which one stage works at a time. Each
    stage holds all M microbatches.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, into which the examples of a device are split; any number.
    - `paired`: whether a tick takes a pass of each kind, or only one pass.

    >>> [str(op) for op in GPipe(2, 2).table().orders[0]]
    ['F0@0', 'F1@0', 'B0@0', 'B1@0']
    """

    def table(self) -> Table:
        """What each stage does."""
        return _table_in_turn(self, [self.microbatches] * self.stages)

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B + W).

        >>> GPipe(4, 8).gap(UNIT)
        9.0
        """
        return (self.stages - 1) * total_cost(costs)

    def live(self, stage: int) -> float:
        """M at each stage."""
        return self.microbatches


@dataclass(frozen=True)
class OneFOneB(_Plain):
    """1F1B (PipeDream-Flush): each stage goes backward as soon as it can.

    Stage s of S then holds at most S - s microbatches.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, into which the examples of a device are split; any number.
    - `paired`: whether a tick takes a forward and a backward pass, or one of the two.

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
        """S - s.

        >>> [OneFOneB(4, 8).live(stage) for stage in range(4)]
        [4, 3, 2, 1]
        """
        return min(self.stages - stage, self.microbatches)


@dataclass(frozen=True)
class Eager1F1B(_Plain):
    """1F1B for one program: a tick has a forward and a backward pass of each stage.

    There are M + 2 (S - 1) ticks, and stage s holds up to 2 (S - s) - 1 microbatches, nearly twice
    as many as under `OneFOneB`. Begin with this schedule.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, into which the examples of a device are split; any number.
    - `paired`: as described; with False a tick takes one of the two passes.

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
        """2 (S - s) - 1.

        >>> [Eager1F1B(4, 8).live(stage) for stage in range(4)]
        [7, 5, 3, 1]
        """
        return min(2 * (self.stages - stage) - 1, self.microbatches)


@dataclass(frozen=True)
class ZBH1(_Plain):
    """Zero bubble H1 (ZB-H1): 1F1B, with the weights' gradients left for the gaps.

    They come as late as 1F1B's memory allows: a stage holds at most S microbatches.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, into which the examples of a device are split; any number.
    - `paired`: whether a tick takes a pass of each kind, or only one pass.
    """

    def table(self) -> Table:
        """What each stage does."""
        return _table_in_turn(self, range(self.stages, 0, -1), range(self.stages))

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B - W), when M is at least S, and F at least W.

        >>> ZBH1(4, 8).gap(UNIT), OneFOneB(4, 8).gap(UNIT)
        (3.0, 9.0)
        """
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
    """Zero bubble H2 (ZB-H2): ZB-H1 with forward passes that fill the gap at the beginning.

    That takes twice the memory: a stage holds up to 2 S - 1 microbatches.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, into which the examples of a device are split; any number.
    - `paired`: whether a tick takes a pass of each kind, or only one pass.
    """

    def table(self) -> Table:
        """What each stage does."""
        return _table_in_turn(self, range(2 * self.stages - 1, 0, -2), range(0, 2 * self.stages, 2))

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B - 2 W).

        That holds when M is at least 2 S - 1, F at least W, and F + B at least 2 W.
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
    """Megatron-LM's interleaved 1F1B.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, a multiple of S: they go through in groups of S.
    - `chunks`: how many parts of the model each stage has (virtual stages). Part p is on stage
      p mod S.
    - `paired`: whether a tick takes a forward and a backward pass, or one of the two.
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
        # Parts are handed out group by group: with fewer microbatches than stages a group is not
        # full.
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
            forwards, backwards = [], []
            for turn in range(count):
                # Each group of S microbatches goes through all chunks before the next group does.
                microbatch = turn // (stages * chunks) * stages + turn % stages
                chunk = turn // stages % chunks
                forwards.append((microbatch, chunk * stages + stage))
                # Backward, the chunks come in the opposite order.
                backwards.append((microbatch, (chunks - 1 - chunk) * stages + stage))
            # Megatron's warm-up: until the first microbatch comes back from all chunks.
            ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
            orders.append(tuple(_in_turn(forwards, backwards, min(ahead, count), None)))
        return Table(tuple(orders), tuple(part % stages for part in range(stages * chunks)))

    def gap(self, costs: Costs) -> float:
        """(S - 1)(F + B + W) / chunks.

        >>> Interleaved(4, 8, chunks=1).gap(UNIT), Interleaved(4, 8, chunks=3).gap(UNIT)
        (9.0, 3.0)
        """
        return (self.stages - 1) * total_cost(costs) / self.chunks

    def live(self, stage: int) -> float:
        """(2 (S - s - 1) + (chunks - 1) S + 1) / chunks."""
        most = 2 * (self.stages - stage - 1) + (self.chunks - 1) * self.stages + 1
        return min(most / self.chunks, self.microbatches)


@dataclass(frozen=True)
class ZeroBubble:
    """ZB-1p and ZB-2p: the best zero-bubble schedule that a search from costs finds.

    - `stages`: S, the size of the mesh axis that has the stages.
    - `microbatches`: M, into which the examples of a device are split; any number.
    - `costs`: what the passes take, for which the order is made; by default the same for all.
    - `limit`: the most microbatches whose activations a stage holds, at least 1. None is S, as in
      1F1B, which is the paper's ZB-1p; 2 S is its ZB-2p.
    - `paired`: whether a tick takes a pass of each kind, or only one pass.
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
        # With few microbatches a stage never gets to its limit.
        return min(self._limit, self.microbatches)

    def table(self) -> Table:
        """What each stage does."""
        return search(self.stages, self.microbatches, self.costs, self._limit)

    @property
    def _limit(self) -> float:
        """How many microbatches' activations a stage may hold: as many as there are stages."""
        if self.limit is None:
            return self.stages
        return self.limit


def _zb_2p(stages: int, microbatches: int, costs: Costs = UNIT) -> ZeroBubble:
    """ZB-2p: the search with twice the memory of 1F1B."""
    # `replace`, so that errors about stages come from the schedule and not from this product.
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
