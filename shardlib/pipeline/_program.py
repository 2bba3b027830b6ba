"""Ticks as numbers, for an executor that is one program: what each stage does, and in which slots.

Whatever waits has a slot in a buffer:

    buffer         holds                                  from           until
    activations    what another part sent forward         it arrives     its last reader
    kept           residuals of a forward pass            F              B, or W where passes split
    gradients      what another part sent backward        it arrives     B
    left           what a split B leaves for the weights  B              W

All stages run one program, so that a buffer is as large on every stage as on the fullest. Those for
what is sent have one slot more, into which goes what arrives and nobody reads.
"""

import heapq
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np

from shardlib.pipeline.schedules._schedule import Schedule
from shardlib.pipeline.schedules._simulate import Ticks, pack
from shardlib.pipeline.schedules._table import KINDS, Op, Table

BUFFERS = ("activations", "kept", "gradients", "left")
"""Sent forward, kept by a forward pass, sent backward, left for the gradients of weights."""

Pairs = tuple[tuple[int, int], ...]

# A microbatch and a part: what one thing in a buffer is called.
Item: TypeAlias = tuple[int, int]
# From when to when something waits, in ticks and fractions of ticks.
Span: TypeAlias = tuple[float, float]

# Which buffers the passes of each kind read or write.
_USES = {
    "F": ("activations", "kept", "gradients"),
    "B": ("activations", "kept", "gradients", "left"),
    "W": ("kept", "left"),
}
# A tick has moments: a stage goes forward, then backward, then makes gradients of weights; then
# what was sent arrives. What a forward and a backward pass of one tick use has different slots, so
# that they may also run at once.
_MOMENTS = {"F": 0.0, "B": 0.25, "W": 0.5}
_ARRIVAL = 0.75


@dataclass(frozen=True)
class Program:
    """What an executor reads: `rows` of numbers, by name, each of ticks by stages.

    Of each kind of pass, such as `F`, there are these rows:

    - `F`: whether there is one.
    - `F.microbatch`, `F.part`, and `F.chunk`, the number of the part among those of its stage.
    - `F.kept` and the like: the slot of a buffer that the pass reads or writes.
    - Under the name of a channel: the slot into which goes what comes through it.

    `channels` has, for `F` and for `B`, from which stages to which is sent: one channel for each
    distance; at distance 0 a stage hands on to itself.

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
    def parts_per_loop(self) -> int:
        """How many parts each loop over layers is cut into."""
        return self.table.parts // self.loops

    @property
    def ticks(self) -> int:
        """How many ticks there are in a step."""
        return len(self.rows["F"])

    @property
    def passes(self) -> int:
        """How many passes of each kind a stage has; `step/_layer_order` refuses unequal numbers."""
        return self.table.microbatches * self.table.parts // self.table.stages

    @cached_property
    def combinable(self) -> np.ndarray:
        """Where a stage has a forward and a backward pass that do not wait for each other.

        Of ticks by stages. A backward pass through the last part may be of the microbatch that has
        just come out of it: its gradient is not there before that.
        """
        last = self.table.parts - 1
        rows = self.rows
        same = rows["F.microbatch"] == rows["B.microbatch"]
        through_last = (rows["F.part"] == last) & (rows["B.part"] == last)
        return (rows["F"] == 1) & (rows["B"] == 1) & ~(same & through_last)

    @property
    def combined_passes(self) -> int:
        """How many passes of each kind can be combined, on the stage with fewest of them.

        A tick takes as long as its slowest stage.
        """
        return int(self.combinable.sum(axis=0).min())


@lru_cache(maxsize=64)
def table_of(schedule: Schedule) -> Table:
    """The table of a schedule, made once for each schedule."""
    return schedule.table()


@lru_cache(maxsize=64)
def program_of(
    schedule: Schedule, *, loops: int = 1, recompute: bool = False, trains: bool = True
) -> "Program":
    """The program of a schedule, made once for each choice of options.

    To measure rather than to train, it is made of the schedule's forward passes only.
    """
    # A schedule makes its table anew each time that it is asked.
    table = table_of(schedule)
    if trains:
        return program(pack(table, schedule.paired), loops, recompute)
    orders = []
    for order in table.orders:
        orders.append(tuple(op for op in order if op.kind == "F"))
    return program(pack(Table(tuple(orders), table.placement), paired=False), loops, recompute)


def channel(kind: str, distance: int) -> str:
    """The name under which `rows` says where what comes through a channel goes."""
    return f"{kind}{distance:+d}"


def program(ticks: Ticks, loops: int = 1, recompute: bool = False) -> Program:
    """Number what ticks do, and find a slot for all that waits.

    The parts are those of `loops`, as many of each. If a stage is to `recompute`, it keeps what was
    sent to it and nothing else, until it goes backward.

    >>> from shardlib.pipeline import OneFOneB, pack
    >>> made = program(pack(OneFOneB(4, 8).table(), paired=False))
    >>> made.ticks, made.slots["kept"], made.channels["F"][1]
    (22, (4,), ((0, 1), (1, 2), (2, 3)))
    """
    table = ticks.table
    tick_of: dict[Op, int] = {}
    for tick, row in enumerate(ticks.rows):
        for ops in row:
            tick_of.update(dict.fromkeys(ops, tick))
    slots = _assigned_slots(table, tick_of, loops, recompute)
    rows = _Rows(table, slots, len(ticks.rows))
    # Each pass is written down where it happens, and where what it makes arrives.
    for op, tick in tick_of.items():
        rows.add_pass(op, tick)
        rows.add_arrival(op, tick)
    return Program(table, rows.rows, slots.counts, rows.sorted_channels(), loops, recompute)


@dataclass(frozen=True)
class _Slots:
    """The slot of each thing that waits, by buffer, microbatch and part.

    `counts` has for each buffer how many slots it has: one number, or for what differs between
    loops over layers one for each loop.
    """

    slots: dict[tuple[str, int, int], int]
    counts: dict[str, tuple[int, ...]]

    def unread(self, buffer: str) -> int:
        """The slot after the last, where passes write that have nothing to write for anybody."""
        return self.counts[buffer][0]

    def of(self, buffer: str, op: Op) -> int:
        """The slot of a pass in a buffer, or the one that nobody reads."""
        return self.slots.get((buffer, op.microbatch, op.part), self.unread(buffer))


def _assigned_slots(table: Table, tick_of: dict[Op, int], loops: int, recompute: bool) -> _Slots:
    """Slots for all that waits, as few as can be, and as many on every stage as on the fullest.

    All stages run one program, so that a buffer has the same number of slots on each.
    """
    slots: dict[tuple[str, int, int], int] = {}
    counts: dict[str, tuple[int, ...]] = {}
    for buffer, spans in _lifetimes(table, tick_of, loops, recompute).items():
        # What passes keep and leave has another shape in each loop, and hence buffers of its own.
        kinds = loops if buffer in ("kept", "left") else 1
        used = [0] * kinds
        for (_, loop), sharing in _grouped(table, spans, kinds).items():
            slot_of, count = _coloured(sharing)
            used[loop] = max(used[loop], count)
            for (microbatch, part), slot in slot_of.items():
                slots[buffer, microbatch, part] = slot
        counts[buffer] = tuple(used)
    return _Slots(slots, counts)


def _grouped(
    table: Table, spans: dict[Item, Span], loops: int
) -> dict[tuple[int, int], dict[Item, Span]]:
    """The spans that share one array of slots: those of one stage and one loop, by these two."""
    groups: dict[tuple[int, int], dict[Item, Span]] = {}
    for (microbatch, part), span in spans.items():
        group = table.placement[part], part * loops // table.parts
        groups.setdefault(group, {})[microbatch, part] = span
    return groups


class _Rows:
    """The rows of a program and its channels, while they are filled in pass by pass."""

    def __init__(self, table: Table, slots: _Slots, ticks: int) -> None:
        self.table, self.slots = table, slots
        self.shape = (ticks, table.stages)
        # All rows exist from the start: a program has the same ones whatever the schedule does.
        self.rows: dict[str, np.ndarray] = {}
        self.channels: dict[str, dict[int, set[tuple[int, int]]]] = {"F": {}, "B": {}}
        for kind in KINDS:
            for name in ("", ".microbatch", ".chunk", ".part"):
                self._row(kind + name, 0)
            for buffer in _USES[kind]:
                self._row(f"{kind}.{buffer}", slots.unread(buffer))

    def _row(self, name: str, default: int) -> np.ndarray:
        """A row by its name, with the same number everywhere if it is new."""
        return self.rows.setdefault(name, np.full(self.shape, default, np.int32))

    def add_pass(self, op: Op, tick: int) -> None:
        """Write down a pass of a tick, and the slots that it reads and writes.

        It goes into the rows of its kind, where the tick and the pass' stage meet.
        """
        kind, table = op.kind, self.table
        at = tick, table.placement[op.part]
        # Rows are zero where a stage has no pass of this kind.
        self.rows[kind][at] = 1
        self.rows[f"{kind}.microbatch"][at] = op.microbatch
        self.rows[f"{kind}.part"][at] = op.part
        self.rows[f"{kind}.chunk"][at] = table.chunk(op.part)
        for buffer in _USES[kind]:
            if self._uses(op, buffer):
                self.rows[f"{kind}.{buffer}"][at] = self.slots.of(buffer, op)

    def _uses(self, op: Op, buffer: str) -> bool:
        """Whether a pass reads or writes a buffer that passes of its kind use."""
        if op.kind == "F" and buffer == "gradients":
            # Among forward passes, only that through the last part writes a gradient: the head's.
            return op.part == self.table.parts - 1
        return True

    def add_arrival(self, op: Op, tick: int) -> None:
        """Write down where what a pass sends arrives, and through which channel, if it sends.

        A channel is a distance between stages: all that is sent over it in a tick is one
        permutation.
        """
        table, kind = self.table, op.kind
        receiver = sent_to(table, op)
        if receiver is None:
            return
        sender, target = table.placement[op.part], table.placement[receiver.part]
        distance = _distance(table.stages, sender, target)
        self.channels[kind].setdefault(distance, set()).add((sender, target))
        buffer = "activations" if kind == "F" else "gradients"
        # A stage that expects nothing through a channel writes what comes to the unread slot.
        row = self._row(channel(kind, distance), self.slots.unread(buffer))
        row[tick, target] = self.slots.of(buffer, receiver)

    def sorted_channels(self) -> dict[str, dict[int, Pairs]]:
        """The channels with the pairs of stages of each in order."""
        channels: dict[str, dict[int, Pairs]] = {}
        for kind, by_distance in self.channels.items():
            channels[kind] = {far: tuple(sorted(pairs)) for far, pairs in by_distance.items()}
        return channels


def _distance(stages: int, sender: int, target: int) -> int:
    """How far a stage sends, the shorter way round a ring of stages.

    With two stages, -1 is as far as +1: stage 0 sends by +1 to stage 1, and that by -1 back.
    """
    # Stages form a ring: the last one may be next to the first.
    half = stages // 2
    distance = (target - sender + half) % stages - half
    if stages == 2 and target > sender:
        return -distance
    return distance


def sent_to(table: Table, op: Op) -> Op | None:
    """The pass for which an op makes something, if it is of another part than its own.

    A forward pass makes the input of the next part, a backward pass the gradient of the part
    before; gradients of weights are for nobody.
    """
    if op.kind == "W":
        return None
    part = op.part + {"F": 1, "B": -1}[op.kind]
    if not 0 <= part < table.parts:
        return None
    return op._replace(part=part)


def _lifetimes(
    table: Table, tick_of: dict[Op, int], loops: int, recompute: bool
) -> dict[str, dict[Item, Span]]:
    """From when to when each thing waits, by buffer, microbatch and part.

    Args:
        table: what each stage does.
        tick_of: when it does it.
        loops: over how many loops of layers the parts are spread.
        recompute: whether a backward pass makes again what a forward pass would have kept.
    """
    lives: dict[str, dict[Item, Span]] = {buffer: {} for buffer in BUFFERS}
    parts_per_loop = table.parts // loops
    for op in tick_of:
        if op.kind != "F":
            continue
        # What goes into a loop is made of what came out of the one before, forward and backward.
        read_again = recompute or op.part % parts_per_loop == 0
        spans = _activation_span(table, tick_of, op, read_again)
        if table.trains:
            spans |= _training_spans(table, tick_of, op, recompute)
        for buffer, span in spans.items():
            lives[buffer][op.microbatch, op.part] = span
    return lives


def _moment(tick_of: dict[Op, int], op: Op) -> float:
    """When a pass reads and writes, in ticks and fractions of ticks."""
    return tick_of[op] + _MOMENTS[op.kind]


def _activation_span(
    table: Table, tick_of: dict[Op, int], forward: Op, read_again: bool
) -> dict[str, Span]:
    """How long the input of a forward pass waits, if it was sent; nothing for the first part.

    It waits for the backward pass too where that has to `read_again` what arrived.
    """
    if forward.part == 0:
        return {}
    arrives = tick_of[forward._replace(part=forward.part - 1)] + _ARRIVAL
    reader = forward
    if read_again and table.trains:
        reader = forward._replace(kind="B")
    return {"activations": (arrives, _moment(tick_of, reader))}


def _training_spans(
    table: Table, tick_of: dict[Op, int], forward: Op, recompute: bool
) -> dict[str, Span]:
    """How long that waits, by buffer, which only training needs of a microbatch and a part.

    - "kept": what the forward pass keeps for the backward pass.
    - "left": what the first half of a split backward pass leaves to the second.
    - "gradients": what arrived, of the part's output.
    """
    spans: dict[str, Span] = {}
    begin = _moment(tick_of, forward)
    backward = _moment(tick_of, forward._replace(kind="B"))
    end = backward
    if table.splits:
        end = _moment(tick_of, forward._replace(kind="W"))
        spans["left"] = backward, end
    if not recompute:
        spans["kept"] = begin, end
    elif table.splits:
        # It is made again by B, and waits for W.
        spans["kept"] = backward, end
    if forward.part == table.parts - 1:
        # The head makes the first gradients together with the forward pass.
        spans["gradients"] = begin, backward
    else:
        after = tick_of[Op("B", forward.microbatch, forward.part + 1)]
        spans["gradients"] = after + _ARRIVAL, backward
    return spans


def _coloured(spans: dict[Item, Span]) -> tuple[dict[Item, int], int]:
    """A slot for each span, such that no two that overlap share one; and how many slots there are.

    Spans are taken by their beginning, and each gets the lowest slot that is free: the number of
    slots is then the least that there can be.
    """
    slot_of: dict[Item, int] = {}
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    used = 0
    for item, (begin, end) in sorted(spans.items(), key=lambda entry: entry[1]):
        # A slot is free again at the moment at which its last reader has read it.
        while busy and busy[0][0] <= begin:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, used)
            used += 1
        slot_of[item] = heapq.heappop(free)
        heapq.heappush(busy, (end, slot_of[item]))
    return slot_of, used
