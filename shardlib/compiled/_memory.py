"""Whose memory it is: every byte that a compiled step takes of a device, by kind.

Arguments and outputs are known exactly. What lies in between lives in a heap that the compiler lays
out: this file finds the moment when most of it is in use and says of each value there what it is,
from the name stack it was traced under and from where it flows:

- a *gradient* is what the optimizer reads, and what that was moved, summed or accumulated from;
- a *copy of parameters* is made from parameters by moving alone: gathered, converted, sliced;
- an *activation* is made in the forward pass and still there for the backward pass;
- a *temporary* is anything else of known origin.

What the heap takes beyond the values of its fullest moment is *fragmentation*.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
    """A value at the fullest moment of a program, with where it came from."""

    kind: str
    size: int
    type: str  # "bf16[16,4096,4096]"
    op_name: str
    source: str


@dataclass(frozen=True)
class Memory:
    """Bytes on each device, by kind.

    They add up to `total_bytes`, which is what a program needs to run.
    """

    kinds: dict[str, int]
    most: dict[str, int]  # of each kind at any moment, which need not be the fullest
    pieces: tuple[Piece, ...]  # of the heap, largest first
    host_bytes: int
    aliased_bytes: int  # outputs that take the place of arguments, counted once, as those
    heap_bytes: int
    # The same as `total_bytes`, as the compiler itself accounts for it, where it does.
    stated_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return sum(self.kinds.values())

    @property
    def unattributed(self) -> float:
        """The share of the whole of which nothing is known."""
        return self.kinds["unattributed"] / max(self.total_bytes, 1)


def attribute(compiled: Compiled, platform: Platform, kinds_by_path: Mapping[str, str]) -> Memory:
    """What each byte is, of a program as its compiler laid it out; arguments have kinds by the
    paths they were traced by.
    """
    kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
    flow = Flow(compiled, kinds_by_path)
    heap_bytes = host_bytes = aliased_bytes = 0
    pieces: list[Piece] = []
    most: dict[str, int] = defaultdict(int)
    for allocation in compiled.allocations:
        if allocation.color == _HOST:
            host_bytes += allocation.size
        elif allocation.parameter is not None:
            kinds[flow.kind_of_argument(allocation.parameter)] += allocation.size
            aliased_bytes += allocation.size * allocation.aliased
        elif allocation.what == "thread-local" or (platform == "tpu" and allocation.color):
            continue  # on the chip, or on the stack of a kernel
        elif allocation.what == "temporary" and compiled.heapless:
            continue
        elif allocation.what == "output":
            kinds["outputs"] += allocation.size
        elif allocation.what == "constant":
            kinds["constants"] += allocation.size
        else:
            heap_bytes += allocation.size
            alive = _fullest_moment(allocation)
            found = list(_share_out(alive, flow))
            for piece in found:
                kinds[piece.kind] += piece.size
            kinds["fragmentation"] += allocation.size - sum(piece.size for piece in found)
            pieces += found
            for kind, size in _most_of_each(allocation, flow).items():
                most[kind] += size
    kinds["program"] = compiled.program_bytes
    pieces.sort(key=lambda piece: -piece.size)
    return Memory(
        kinds,
        {**kinds, **most},
        tuple(pieces),
        host_bytes,
        aliased_bytes,
        heap_bytes,
        compiled.stated_bytes,
    )


def _fullest_moment(allocation: Allocation) -> list[Value]:
    """The values alive when the most bytes are in use; values that share their place count once."""
    changes = defaultdict(list)
    for value in allocation.values:
        changes[value.born].append((value, 1))
        changes[value.dies + 1].append((value, -1))
    alive: dict[tuple[int, int], int] = defaultdict(int)  # by place
    most, at = -1, 0
    for moment in sorted(changes):
        for value, change in changes[moment]:
            place = (value.offset, value.offset + value.size)
            alive[place] += change
            if not alive[place]:
                del alive[place]
        if (used := _covered(alive)) > most:
            most, at = used, moment
    return [value for value in allocation.values if value.born <= at <= value.dies]


def _most_of_each(allocation: Allocation, flow: "Flow") -> dict[str, int]:
    """The most bytes of each kind that are in use at one moment; what is tiny beside the whole is
    left out.
    """
    values = [value for value in allocation.values if value.size > 1e-4 * allocation.size]
    labels = {value: flow.label(value)[0] for value in values}
    most: dict[str, int] = defaultdict(int)
    for moment in {value.born for value in values}:
        places: dict[tuple[int, int], str] = {}
        for value in values:
            place = (value.offset, value.size)
            if value.born <= moment <= value.dies and places.get(place) in (
                None,
                "temporaries",
                "unattributed",
            ):
                places[place] = labels[value]
        now: dict[str, int] = defaultdict(int)
        for (_, size), kind in places.items():
            now[kind] += size
        for kind, size in now.items():
            most[kind] = max(most[kind], size)
    return most


def _covered(places: Sequence[tuple[int, int]] | dict[tuple[int, int], int]) -> int:
    total, end = 0, -1
    for first, last in sorted(places):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total


def _share_out(alive: list[Value], flow: "Flow") -> Iterator[Piece]:
    """Each byte to one value: where several share a place, to the one of which most is known, and
    the larger.
    """
    labelled = [(flow.label(value), value) for value in alive]
    labelled.sort(
        key=lambda pair: (pair[0][0] == "unattributed", pair[0][0] == "temporaries", -pair[1].size)
    )
    taken: list[tuple[int, int]] = []
    for (kind, op_name, source), value in labelled:
        before = _covered(taken)
        taken.append((value.offset, value.offset + value.size))
        if size := _covered(taken) - before:
            yield Piece(kind, size, re.sub(r"\{[^}]*\}", "", value.type), op_name, source)
