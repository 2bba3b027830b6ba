"""Whose memory it is: every byte that a compiled step takes of a device, by kind.

Arguments and outputs are known exactly. All else is in a heap that the compiler lays out:

    place  ^  | activation | gradient        |
           |  | copy of parameters | temporary |
           +--------------------------------------> moment, by the number of the instruction
                        ^ the fullest

This file finds the moment when most of the heap is in use and says of each value there what it is,
from the name stack it was traced under and from where it flows:

- a *gradient* is what the optimizer reads, and what that was moved, summed or accumulated from;
- a *copy of parameters* is made from parameters by moving alone: gathered, converted, sliced;
- an *activation* is made in the forward pass and still there for the backward pass;
- a *temporary* is anything else of known origin.

What the heap takes beyond the values of its fullest moment is *fragmentation*.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlib.compiled._compile import Allocation, Compiled, Value
from shardlib.compiled._flow import Flow
from shardlib.machine._targets import Platform

KINDS = (
    "parameters",
    "optimizer state",
    "other state",
    "inputs",
    "outputs",
    "gradients",
    "activations",
    "copies of parameters",
    "temporaries",
    "unattributed",
    "fragmentation",
    "constants",
    "program",
)
_HOST = 5  # the compilers' number of the host's memory


@dataclass(frozen=True)
class Piece:
    """A value at the fullest moment of a program, with where it came from.

    - `kind`: what it is, one of the kinds of `Memory`, such as `activations`.
    - `size`: the bytes that it takes of a device.
    - `type`: its dtype and its shape there, such as `bf16[16,4096,4096]`.
    - `op_name`: JAX's name stack of the operation that made it; empty where it is not known.
    - `source`: the line of Python that it comes from, `file:line`; empty where it is not known.
    """

    kind: str
    size: int
    type: str
    op_name: str
    source: str


@dataclass(frozen=True)
class Memory:
    """Bytes that a compiled program takes of each device, by kind.

    - `kinds`: bytes by kind, such as `parameters`, `optimizer state`, `gradients` and
      `activations`, at the fullest moment. They add up to `total_bytes`.
    - `most`: the most bytes of each kind at any moment, which need not be the fullest.
    - `pieces`: the values of the heap at the fullest moment, largest first.
    - `host_bytes`: what is in the memory of the host, and not among `kinds`.
    - `aliased_bytes`: outputs that take the place of arguments, counted once, as those.
    - `heap_bytes`: the heap, which has all but arguments, outputs, constants and the program.
    - `stated_bytes`: the same as `total_bytes`, as the compiler itself accounts for it; None where
      it does not.
    """

    kinds: dict[str, int]
    most: dict[str, int]
    pieces: tuple[Piece, ...]
    host_bytes: int
    aliased_bytes: int
    heap_bytes: int
    stated_bytes: int | None

    @property
    def total_bytes(self) -> int:
        """What the program needs of a device to run, in bytes."""
        return sum(self.kinds.values())

    @property
    def unattributed(self) -> float:
        """The share of the whole of which nothing is known."""
        return self.kinds["unattributed"] / max(self.total_bytes, 1)


def attribute(compiled: Compiled, platform: Platform, kinds_by_path: Mapping[str, str]) -> Memory:
    """What each byte is, of a program as its compiler laid it out.

    `kinds_by_path` has the kinds of arguments by the paths that they were traced by.
    """
    account = _Account(Flow(compiled, kinds_by_path))
    for allocation in compiled.allocations:
        if not _is_elsewhere(allocation, compiled, platform):
            account.add(allocation)
    account.kinds["program"] = compiled.program_bytes
    # The largest first: reports name only a few.
    account.pieces.sort(key=lambda piece: -piece.size)
    return Memory(
        account.kinds,
        {**account.kinds, **account.most},
        tuple(account.pieces),
        account.host_bytes,
        account.aliased_bytes,
        account.heap_bytes,
        compiled.stated_bytes,
    )


def peak_bytes(compiled: Any, platform: str) -> int:
    """The bytes that a compiled function takes of each device, as JAX tells them.

    The sizes of arguments, new results and temporaries add up to the most that it can be. The TPU's
    compiler also tells the most that is in use at any moment, which may be less, but counts what
    is in the host's memory too.
    """
    memory = compiled.memory_analysis()
    outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
    sizes = memory.argument_size_in_bytes + outputs + memory.temp_size_in_bytes
    if platform != "tpu":
        return sizes
    on_host = memory.host_argument_size_in_bytes
    on_host += memory.host_output_size_in_bytes - memory.host_alias_size_in_bytes
    most = min(sizes, memory.peak_memory_in_bytes - on_host)
    return most + memory.generated_code_size_in_bytes


def _is_elsewhere(allocation: Allocation, compiled: Compiled, platform: Platform) -> bool:
    """Whether an allocation takes nothing of the memory of a device or of its host."""
    if allocation.color == _HOST or allocation.parameter is not None:
        return False
    # On the stack of a kernel, or on the chip itself.
    if allocation.what == "thread-local" or (platform == "tpu" and allocation.color):
        return True
    return allocation.what == "temporary" and compiled.heapless


class _Account:
    """The sums over the allocations of a program, while these are gone through."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
        self.most: dict[str, int] = defaultdict(int)
        self.pieces: list[Piece] = []
        self.host_bytes = 0
        self.aliased_bytes = 0
        self.heap_bytes = 0

    def add(self, allocation: Allocation) -> None:
        """Add an allocation to the kind that it is, or to those of its values if it is a heap."""
        size = allocation.size
        if allocation.color == _HOST:
            self.host_bytes += size
        elif allocation.parameter is not None:
            self.kinds[self.flow.kind_of_argument(allocation.parameter)] += size
            if allocation.aliased:
                self.aliased_bytes += size
        elif allocation.what == "output":
            self.kinds["outputs"] += size
        elif allocation.what == "constant":
            self.kinds["constants"] += size
        else:
            self._add_heap(allocation)

    def _add_heap(self, allocation: Allocation) -> None:
        """Add what a heap has at its fullest moment, by kind; what is left is fragmentation."""
        self.heap_bytes += allocation.size
        used = 0
        for piece in _share_out(_fullest_moment(allocation), self.flow):
            self.kinds[piece.kind] += piece.size
            self.pieces.append(piece)
            used += piece.size
        self.kinds["fragmentation"] += allocation.size - used
        for kind, size in _most_of_each(allocation, self.flow).items():
            self.most[kind] += size


def _changes(values: Iterable[Value]) -> dict[int, list[tuple[Value, int]]]:
    """By moment the values that are born then, with 1, and those that are gone by then, with -1."""
    changes: dict[int, list[tuple[Value, int]]] = defaultdict(list)
    for value in values:
        changes[value.born].append((value, 1))
        # At the moment at which it is read for the last time, it is still there.
        changes[value.dies + 1].append((value, -1))
    return changes


def _fullest_moment(allocation: Allocation) -> list[Value]:
    """The values alive when the most bytes are in use.

    Values that share their place count once: a compiler gives one place to several names of the
    same bytes.
    """
    changes = _changes(allocation.values)
    alive: dict[tuple[int, int], int] = defaultdict(int)  # how many values have a place
    most, fullest = -1, 0
    for moment in sorted(changes):
        for value, change in changes[moment]:
            place = (value.offset, value.offset + value.size)
            alive[place] += change
            if not alive[place]:
                del alive[place]
        used = _covered(alive)
        if used > most:
            most, fullest = used, moment
    return _alive_at(allocation.values, fullest)


def _alive_at(values: Iterable[Value], moment: int) -> list[Value]:
    """The values that are in use at a moment."""
    return [value for value in values if value.born <= moment <= value.dies]


def _most_of_each(allocation: Allocation, flow: Flow) -> dict[str, int]:
    """The most bytes of each kind that are in use at one moment.

    Values that are tiny compared to the whole are left out: there are many of them.
    """
    values = [value for value in allocation.values if value.size > 1e-4 * allocation.size]
    labels = {value: flow.label(value)[0] for value in values}
    most: dict[str, int] = defaultdict(int)
    for moment in {value.born for value in values}:
        for kind, size in _bytes_by_kind(_alive_at(values, moment), labels).items():
            most[kind] = max(most[kind], size)
    return most


def _bytes_by_kind(alive: Sequence[Value], labels: Mapping[Value, str]) -> dict[str, int]:
    """The bytes of each kind; a place is of the kind that says most of those that share it."""
    kinds: dict[tuple[int, int], str] = {}
    for value in alive:
        place = (value.offset, value.size)
        if kinds.get(place) in (None, "temporaries", "unattributed"):
            kinds[place] = labels[value]
    totals: dict[str, int] = defaultdict(int)
    for (_, size), kind in kinds.items():
        totals[kind] += size
    return totals


def _covered(places: Iterable[tuple[int, int]]) -> int:
    """How many bytes some places cover, each byte once; places are pairs of first and last."""
    total, end = 0, -1
    for first, last in sorted(places):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def _share_out(alive: list[Value], flow: Flow) -> Iterator[Piece]:
    """Attribute each byte in use to one value.

    Where several values share a place, it goes to the one of which most is known, and to the
    larger one.
    """
    labelled = [(flow.label(value), value) for value in alive]

    def how_vague(pair: tuple[tuple[str, str, str], Value]) -> tuple[bool, bool, int]:
        (kind, _, _), value = pair
        return kind == "unattributed", kind == "temporaries", -value.size

    labelled.sort(key=how_vague)
    attributed: list[tuple[int, int]] = []
    for (kind, op_name, source), value in labelled:
        before = _covered(attributed)
        attributed.append((value.offset, value.offset + value.size))
        size = _covered(attributed) - before
        if size:
            yield Piece(kind, size, _plain_type(value.type), op_name, source)


def _plain_type(text: str) -> str:
    """The type of a value for a report, without its layout, which says little to most readers.

    A tuple has no numbers of its own: its memory has pointers to its arrays.

    >>> _plain_type("bf16[16,4096]{1,0}"), _plain_type("(f32[4096]{0}, s32[])")
    ('bf16[16,4096]', 'pointers')
    """
    return "pointers" if text.startswith("(") else re.sub(r"\{[^}]*\}", "", text)
