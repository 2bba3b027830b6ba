"""Gradients of weights put where a stage would wait: the last step in making a schedule that splits
backward passes.
"""

import heapq
from collections.abc import Sequence

from shardlib.pipeline.schedules._simulate import UNIT, Costs
from shardlib.pipeline.schedules._table import KINDS, Op, Table


def weave(
    orders: Sequence[Sequence[Op]], placement: Sequence[int], limit: float, costs: Costs = UNIT
) -> Table:
    """The table of these forward and backward passes, each stage in its order, with a `W` wherever
    a stage would wait.

    And before a forward pass for which a stage would hold more than `limit` microbatches'
    activations.
    """
    stages = len(orders)
    lone = [
        tuple(Op(kind, 0, part) for part, on in enumerate(placement) if on == s for kind in KINDS)
        for s in range(stages)
    ]
    # One microbatch: who waits for whom, and what takes how long.
    table = Table(tuple(lone), tuple(placement))
    share = [1 / table.placement.count(stage) for stage in range(stages)]
    at, held, end = [0] * stages, [0.0] * stages, {}
    pending: list[list[Op]] = [[] for _ in range(stages)]
    made: list[list[Op]] = [[] for _ in range(stages)]
    asleep: dict[Op, list[int]] = {}  # stages that wait for an op that is not done
    queue = [(0.0, stage) for stage in range(stages)]

    def put(stage: int, op: Op, now: float) -> None:
        made[stage].append(op)
        end[op] = now + costs.of(table, op)
        held[stage] += share[stage] * {"F": 1.0, "B": costs.kept - 1.0, "W": -costs.kept}[op.kind]
        heapq.heappush(queue, (end[op], stage))
        for one in asleep.pop(op, ()):
            heapq.heappush(queue, (end[op], one))

    while queue:
        now, stage = heapq.heappop(queue)
        if made[stage] and end[made[stage][-1]] > now:
            continue  # woken while at work
        op = orders[stage][at[stage]] if at[stage] < len(orders[stage]) else None
        missing = [one for one in table.before(op) if one not in end] if op else []
        arrives = now
        if op and not missing:
            sent = [
                end[one] + (costs.send if placement[one.part] != stage else 0.0)
                for one in table.before(op)
            ]
            arrives = max([now, *sent])
        full = op is not None and op.kind == "F" and held[stage] + share[stage] > limit + 1e-9
        if op and not missing and arrives <= now and not (full and pending[stage]):
            at[stage] += 1
            if op.kind == "B":
                pending[stage].append(op)
            put(stage, op, now)
        elif pending[stage]:
            put(stage, pending[stage].pop(0)._replace(kind="W"), now)
        elif missing:
            asleep.setdefault(missing[0], []).append(stage)
        elif op:
            heapq.heappush(queue, (arrives, stage))
    return Table(tuple(map(tuple, made)), tuple(placement))
