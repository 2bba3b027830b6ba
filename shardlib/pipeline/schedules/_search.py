"""Schedules found by a search from costs, under a limit of memory: zero bubble's ZB-1p and
ZB-2p.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardlib.pipeline.schedules._simulate import Costs, simulate
from shardlib.pipeline.schedules._table import Op, Table


@dataclass
class _Stage:
    """A stage while a schedule is being made."""

    order: list[Op] = field(default_factory=list)
    clock: float = 0.0
    held: float = 0.0
    waited: float = 0.0
    done: dict[str, int] = field(default_factory=lambda: dict.fromkeys("FBW", 0))


def search(stages: int, microbatches: int, costs: Costs, limit: float) -> Table:
    """The best of the schedules that a few rules make, each of which holds at most `limit`
    microbatches on a stage.
    """
    best: tuple[float, Table] | None = None
    for early, spare, yields in itertools.product((True, False), repeat=3):
        table = _made(stages, microbatches, costs, limit, early, spare, yields)
        makespan = simulate(table, costs).makespan
        if best is None or makespan < best[0]:
            best = makespan, table
    assert best is not None
    return best[1]


def _made(
    stages: int, count: int, costs: Costs, limit: float, early: bool, spare: bool, yields: bool
) -> Table:
    """Rounds of a forward and a backward pass of every stage, after as many forward passes as there
    is room and time for.

    A gap that is long enough takes a `W`; so does one that is not, if the stage would wait more
    than any has yet, or if `spare`. With `early`, a forward pass may still start when the first
    backward pass has come. With `yields`, a stage lets a forward pass be where its next has enough
    to do.
    """
    all_stages = [_Stage() for _ in range(stages)]
    plain = Table(
        tuple((Op("F", 0, s), Op("B", 0, s), Op("W", 0, s)) for s in range(stages)),
        tuple(range(stages)),
    )
    cost = [{op.kind: costs.of(plain, op) for op in plain.orders[stage]} for stage in range(stages)]
    end: dict[Op, float] = {}

    def arrival(stage: int, kind: str) -> float:
        """When what the stage's next op of this kind needs has come."""
        number, here = all_stages[stage].done[kind], all_stages[stage]
        other = stage - 1 if kind == "F" else stage + 1
        if not 0 <= other < stages:
            return here.clock
        return end[Op("F" if kind == "F" else "B", number, other)] + costs.send

    def put(stage: int, kind: str) -> None:
        here = all_stages[stage]
        starts = here.clock if kind == "W" else max(here.clock, arrival(stage, kind))
        if here.order:
            here.waited += starts - here.clock
        op = Op(kind, here.done[kind], stage)  # type: ignore[arg-type]
        end[op] = here.clock = starts + cost[stage][kind]
        here.held += {"F": 1.0, "B": costs.kept - 1.0, "W": -costs.kept}[kind]
        here.done[kind] += 1
        here.order.append(op)

    def fill(stage: int, kind: str) -> None:
        """Weights' gradients before the next op of a kind: for its memory, and in the gap before
        it.
        """
        here = all_stages[stage]
        pending = lambda: here.done["B"] - here.done["W"]  # noqa: E731
        while kind == "F" and here.held + 1 > limit + 1e-9 and pending():
            put(stage, "W")
        while pending() and here.clock + cost[stage]["W"] <= arrival(stage, kind):
            put(stage, "W")
        gap = arrival(stage, kind) - here.clock
        most = max(one.waited for one in all_stages)
        if pending() and gap > 0 and (spare or gap > most - here.waited):
            put(stage, "W")

    _warm_up(all_stages, cost, costs.send, count, limit, early, put)
    for number in range(count):
        if number:
            for stage in _going_forward(all_stages, cost, costs.send, count, limit, yields):
                fill(stage, "F")
                put(stage, "F")
        for stage in reversed(range(stages)):
            if number:
                fill(stage, "B")
            here = all_stages[stage]
            while stage == 0 and here.done["F"] == count and here.done["W"] < here.done["B"]:
                put(stage, "W")
            put(stage, "B")
    for stage, here in enumerate(all_stages):
        while here.done["W"] < count:
            put(stage, "W")
    return Table(tuple(tuple(one.order) for one in all_stages), tuple(range(stages)))


def _warm_up(
    all_stages: list[_Stage],
    cost: Sequence[dict[str, float]],
    send: float,
    count: int,
    limit: float,
    early: bool,
    put,
) -> None:
    """Forward passes before the first backward pass: as many as there is room for, and time."""
    stages = len(all_stages)
    for stage in range(stages):
        put(stage, "F")
    ahead = [1] * stages
    comes = all_stages[-1].clock + cost[-1]["B"]
    for stage in reversed(range(stages - 1)):
        clock, comes = all_stages[stage].clock, comes + send
        while ahead[stage] < count and ahead[stage] + 1 <= limit + 1e-9:
            if clock >= comes if early else clock + cost[stage]["F"] > comes:
                break
            ahead[stage] += 1
            clock += cost[stage]["F"]
        comes = max(clock, comes) + cost[stage]["B"]
    for stage in range(1, stages):  # at least one ahead of the next
        ahead[stage] = max(1, min(ahead[stage], ahead[stage - 1] - 1))
    for stage in range(stages):
        for _ in range(ahead[stage] - 1):
            put(stage, "F")


def _going_forward(
    all_stages: list[_Stage],
    cost: Sequence[dict[str, float]],
    send: float,
    count: int,
    limit: float,
    yields: bool,
) -> list[int]:
    """The stages that do a forward pass in this round: of each, all after it too."""
    wanted = []
    most = max(one.waited for one in all_stages)
    for stage, here in enumerate(all_stages):
        wants = here.done["F"] < count
        if (
            wants
            and yields
            and stage + 1 < len(all_stages)
            and here.done["F"] >= all_stages[stage + 1].done["F"] + 2
        ):
            after, of_next = all_stages[stage + 1], cost[stage + 1]
            needed = after.clock + of_next["F"] + of_next["B"] + send
            weights, held = 0.0, here.held + 1
            for _ in range(here.done["B"] - here.done["W"]):
                if held <= limit + 1e-9:
                    break
                weights, held = weights + cost[stage]["W"], held - 1
            late = here.clock + cost[stage]["F"] + weights > needed
            wants = not (
                here.clock >= needed or (late and needed - here.clock <= most - here.waited)
            )
        wanted.append(wants)
    for stage in reversed(range(len(all_stages) - 1)):
        left = all_stages[stage + 1].done["F"] < count
        wanted[stage] = wanted[stage] and (wanted[stage + 1] or not left)
    return [stage for stage, wants in enumerate(wanted) if wants]
