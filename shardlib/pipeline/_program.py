"""Ticks as numbers, for an executor that is one program: what each stage does in each tick, and
where things lie.

Whatever waits has a slot in a buffer: what another part sent, what a forward pass keeps for its
backward pass, what a split backward pass leaves for the gradients of weights. A buffer is as large
on every stage as on the fullest; those for what is sent have one slot more, into which goes what
nobody reads.
"""

import heapq
import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardlib.pipeline.schedules._schedule import Schedule
from shardlib.pipeline.schedules._simulate import Ticks, pack
from shardlib.pipeline.schedules._table import KINDS, Op, Table

BUFFERS = ("activations", "kept", "gradients", "left")
"""Sent forward, kept by a forward pass, sent backward, left for the gradients of weights."""

Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Program:
    """What an executor reads: `rows` of numbers, by name, each of ticks by stages.

    Of each kind of pass, such as `F`: whether there is one (`F`), its `F.microbatch`, its part
    among those of the stage, `F.chunk`, and among all, `F.part`. Of each buffer the slot that a
    pass reads or writes, `F.kept`; and under the name of a channel where what comes through it
    goes. `channels` has, for `F` and for `B`, from which stages to which it is sent: one channel
    for each distance; of distance 0 a stage hands on to itself.

    A model with several loops over layers has as many parts of each. What passes of different loops
    keep and leave differs, and so does the number of `slots`, which are counted loop by loop.
    """

    table: Table
    rows: dict[str, np.ndarray]
    slots: dict[str, tuple[int, ...]]
    channels: dict[str, dict[int, Pairs]]
    loops: int = 1
    recompute: bool = False

    @property
    def ticks(self) -> int:
        """How many there are."""
        return len(self.rows["F"])


@lru_cache(maxsize=64)
def table_of(schedule: Schedule) -> Table:
    """Its table, made once."""
    return schedule.table()


@lru_cache(maxsize=64)
def program_of(
    schedule: Schedule, *, loops: int = 1, recompute: bool = False, trains: bool = True
) -> "Program":
    """Its program; or, to measure and not to train, of its forward passes alone."""
    table = table_of(schedule)
    if trains:
        return program(pack(table, schedule.paired), loops, recompute)
    orders = tuple(tuple(op for op in order if op.kind == "F") for order in table.orders)
    return program(pack(Table(orders, table.placement), paired=False), loops, recompute)


def channel(kind: str, distance: int) -> str:
    """The name under which `rows` says where what comes through a channel goes."""
    return f"{kind}{distance:+d}"


def program(ticks: Ticks, loops: int = 1, recompute: bool = False) -> Program:
    """Number what ticks do, and find a slot for all that waits.

    Within a tick a stage goes forward, then backward, then makes gradients of weights. The parts
    are those of `loops`, as many of each. If a stage is to `recompute`, it keeps what was sent to
    it and nothing else, until it goes backward.

    >>> from shardlib.pipeline import OneFOneB, pack
    >>> made = program(pack(OneFOneB(4, 8).table(), paired=False))
    >>> made.ticks, made.slots["kept"], made.channels["F"][1]
    (22, (4,), ((0, 1), (1, 2), (2, 3)))
    """
    table = ticks.table
    when = {op: tick for tick, row in enumerate(ticks.rows) for ops in row for op in ops}
    lives = _lives(table, when, loops, recompute)
    slots, size = {}, {}
    for buffer, spans in lives.items():
        apart = loops if buffer in ("kept", "left") else 1
        counts = [0] * apart
        for stage, loop in itertools.product(range(table.stages), range(apart)):
            mine = {
                of: span
                for of, span in spans.items()
                if table.placement[of[1]] == stage and of[1] * apart // table.parts == loop
            }
            found, used = _colour(mine)
            slots.update({(buffer, *of): slot for of, slot in found.items()})
            counts[loop] = max(counts[loop], used)
        size[buffer] = tuple(counts)

    shape = (len(ticks.rows), table.stages)
    rows: dict[str, np.ndarray] = {}

    def row(name: str, otherwise: int) -> np.ndarray:
        return rows.setdefault(name, np.full(shape, otherwise, np.int32))

    def slot(buffer: str, op: Op) -> int:
        return slots.get((buffer, op.microbatch, op.part), nobody(buffer))

    def nobody(buffer: str) -> int:
        return size[buffer][0]

    uses = {
        "F": ("activations", "kept", "gradients"),
        "B": ("activations", "kept", "gradients", "left"),
        "W": ("kept", "left"),
    }
    for kind in KINDS:
        for name in ("", ".microbatch", ".chunk", ".part"):
            row(kind + name, 0)
        for buffer in uses[kind]:
            row(f"{kind}.{buffer}", nobody(buffer))
    channels: dict[str, dict[int, set[tuple[int, int]]]] = {"F": {}, "B": {}}
    for op, tick in when.items():
        stage, kind = table.placement[op.part], op.kind
        rows[kind][tick, stage] = 1
        rows[f"{kind}.microbatch"][tick, stage] = op.microbatch
        rows[f"{kind}.part"][tick, stage] = op.part
        rows[f"{kind}.chunk"][tick, stage] = table.chunk(op.part)
        for buffer in uses[kind]:
            if kind != "F" or buffer != "gradients" or op.part == table.parts - 1:
                rows[f"{kind}.{buffer}"][tick, stage] = slot(buffer, op)
        if (to := sent_to(table, op)) is not None:
            there = table.placement[to.part]
            distance = (there - stage + table.stages // 2) % table.stages - table.stages // 2
            # With two, -1 is as far as +1.
            distance = -distance if table.stages == 2 and there > stage else distance
            channels[kind].setdefault(distance, set()).add((stage, there))
            buffer = "activations" if kind == "F" else "gradients"
            row(channel(kind, distance), nobody(buffer))[tick, there] = slot(buffer, to)
    sorted_channels = {
        kind: {far: tuple(sorted(pairs)) for far, pairs in of.items()}
        for kind, of in channels.items()
    }
    return Program(table, rows, size, sorted_channels, loops, recompute)


def sent_to(table: Table, op: Op) -> Op | None:
    """For which pass an op makes something, if for any but a later one of its own part."""
    part = op.part + {"F": 1, "B": -1, "W": table.parts}[op.kind]
    return op._replace(part=part) if 0 <= part < table.parts else None


def _lives(
    table: Table, when: dict[Op, int], loops: int, recompute: bool
) -> dict[str, dict[tuple[int, int], tuple[float, float]]]:
    """From when to when each thing waits, by microbatch and part. A tick has moments: F, B, W, and
    what arrives.
    """
    lives: dict[str, dict[tuple[int, int], tuple[float, float]]] = {
        buffer: {} for buffer in BUFFERS
    }
    moment = {"F": 0.0, "B": 0.25, "W": 0.5}
    arrival = 0.75
    at = {op: tick + moment[op.kind] for op, tick in when.items()}
    last = "W" if table.splits else "B"
    for (kind, microbatch, part), forward in at.items():
        of = microbatch, part
        if kind != "F":
            continue
        back = at[Op("B", *of)] if table.trains else forward
        if part:
            # What goes into a loop is made of what came out of the one before, forward and
            # backward.
            again = recompute or not part % (table.parts // loops)
            lives["activations"][of] = (
                when[Op("F", microbatch, part - 1)] + arrival,
                back if again else forward,
            )
        if not table.trains:
            continue
        end = at[Op(last, *of)]
        if not recompute:
            lives["kept"][of] = forward, end
        elif table.splits:
            lives["kept"][of] = back, end
        if part == table.parts - 1:
            lives["gradients"][of] = forward, back
        else:
            lives["gradients"][of] = when[Op("B", microbatch, part + 1)] + arrival, back
        if table.splits:
            lives["left"][of] = back, end
    return lives


def _colour(
    spans: dict[tuple[int, int], tuple[float, float]],
) -> tuple[dict[tuple[int, int], int], int]:
    """A slot for each span, such that no two which overlap share one; and how many there are, which
    is the least.
    """
    found: dict[tuple[int, int], int] = {}
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    used = 0
    for of, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, used)
            used += 1
        found[of] = heapq.heappop(free)
        heapq.heappush(busy, (end, found[of]))
    return found, used
