"""Gradients of weights put where a stage would wait: how a schedule splits its backward passes.

It is the last step in making such a schedule. Forward and backward passes are in order already; the
stages are played through with costs, and wherever one would wait, it makes gradients of weights.
"""

import heapq
from collections.abc import Sequence

from shardlib.pipeline.schedules._simulate import UNIT, Costs
from shardlib.pipeline.schedules._table import KINDS, Op, Table

# Sums of floats that should be equal may differ by this much.
_SLACK = 1e-9


def weave(
    orders: Sequence[Sequence[Op]], placement: Sequence[int], limit: float, costs: Costs = UNIT
) -> Table:
    """The table of these forward and backward passes, with a `W` wherever a stage would wait.

    Each stage keeps its order. A `W` also comes before a forward pass for which a stage would hold
    more than `limit` microbatches' activations.
    """
    weaving = _Weaving(orders, placement, limit, costs)
    while weaving.queue:
        weaving.step()
    return Table(tuple(map(tuple, weaving.made)), tuple(placement))


def one_microbatch(stages: int, placement: Sequence[int]) -> Table:
    """The table of one microbatch through all parts: it says who waits for whom, and what costs."""
    orders: list[list[Op]] = [[] for _ in range(stages)]
    for part, stage in enumerate(placement):
        for kind in KINDS:
            orders[stage].append(Op(kind, 0, part))
    return Table(tuple(map(tuple, orders)), tuple(placement))


class _Weaving:
    """The stages while they are played through, with a queue of who looks for work when.

    A stage is in the queue with the time at which it is free, or at which what it waits for
    arrives; if that is not known yet, the stage is asleep until the op that it waits for is done.
    """

    def __init__(
        self,
        orders: Sequence[Sequence[Op]],
        placement: Sequence[int],
        limit: float,
        costs: Costs,
    ) -> None:
        stages = len(orders)
        self.orders, self.placement, self.limit, self.costs = orders, placement, limit, costs
        self.table = one_microbatch(stages, placement)
        # What one microbatch's activations of a part count for in what a stage holds.
        self.share = [1 / self.table.placement.count(stage) for stage in range(stages)]
        self.held_after = {"F": 1.0, "B": costs.kept - 1.0, "W": -costs.kept}
        self.position = [0] * stages
        self.held = [0.0] * stages
        self.end: dict[Op, float] = {}
        self.pending: list[list[Op]] = [[] for _ in range(stages)]
        self.made: list[list[Op]] = [[] for _ in range(stages)]
        self.asleep: dict[Op, list[int]] = {}
        # All stages look for work at the beginning. Of equal times, the lower stage comes first.
        self.queue = [(0.0, stage) for stage in range(stages)]

    def _is_at_work(self, stage: int, now: float) -> bool:
        """Whether the last op of a stage still runs."""
        ops = self.made[stage]
        return bool(ops) and self.end[ops[-1]] > now

    def step(self) -> None:
        """Let the next stage of the queue do something, or wait."""
        now, stage = heapq.heappop(self.queue)
        if self._is_at_work(stage, now):
            return
        op = self._next(stage)
        if op is not None and self._starts_now(stage, op, now):
            self.position[stage] += 1
            if op.kind == "B":
                self.pending[stage].append(op)
            self._do(stage, op, now)
        elif self.pending[stage]:
            # The stage would wait, or hold too much: it makes gradients of weights.
            self._do(stage, self.pending[stage].pop(0)._replace(kind="W"), now)
        elif op is not None:
            self._wait_for(stage, op, now)

    def _starts_now(self, stage: int, op: Op, now: float) -> bool:
        """Whether all has come that the next op of a stage needs, and there is room for it.

        If there is no room and nothing that would make some, the op is done all the same.
        """
        if self._missing(op) is not None or self._arrival(stage, op) > now:
            return False
        return not (self._is_full(stage, op) and self.pending[stage])

    def _wait_for(self, stage: int, op: Op, now: float) -> None:
        """Have a stage look for work when what its next op needs arrives, or is at least done."""
        missing = self._missing(op)
        if missing is not None:
            self.asleep.setdefault(missing, []).append(stage)
            return
        arrives = max(now, self._arrival(stage, op))
        heapq.heappush(self.queue, (arrives, stage))

    def _missing(self, op: Op) -> Op | None:
        """The first op that another one needs and that is not done yet, or None."""
        for needed in self.table.before(op):
            if needed not in self.end:
                return needed
        return None

    def _next(self, stage: int) -> Op | None:
        """The next op in the order of a stage, if there is one more."""
        if self.position[stage] == len(self.orders[stage]):
            return None
        return self.orders[stage][self.position[stage]]

    def _arrival(self, stage: int, op: Op) -> float:
        """When all has come that an op needs; it is done already."""
        arrival = 0.0
        for needed in self.table.before(op):
            comes = self.end[needed]
            if self.placement[needed.part] != stage:
                comes += self.costs.send
            arrival = max(arrival, comes)
        return arrival

    def _is_full(self, stage: int, op: Op) -> bool:
        """Whether a stage would hold more than the limit after an op."""
        return op.kind == "F" and self.held[stage] + self.share[stage] > self.limit + _SLACK

    def _do(self, stage: int, op: Op, now: float) -> None:
        """Write down an op that starts now, and wake those that wait for it when it ends."""
        self.made[stage].append(op)
        self.end[op] = now + self.costs.of(self.table, op)
        self.held[stage] += self.share[stage] * self.held_after[op.kind]
        heapq.heappush(self.queue, (self.end[op], stage))
        # What is sent takes a while yet: those that are woken wait for its arrival then.
        for waiting in self.asleep.pop(op, ()):
            heapq.heappush(self.queue, (self.end[op], waiting))
