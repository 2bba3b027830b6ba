"""The cheapest way from one layout of an array to another: a shortest path, over shapes and axes
alone.

A layout says which mesh axes split which dim, major to minor, and over which axes the array is a
partial sum. A few moves lead from layout to layout, each one collective or none, and each with a
known number of elements that a device receives. The shortest path through the layouts is the plan.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import PartitionSpec

from shardlib.layouts._rules import as_tuple


class Piece(NamedTuple):
    """A mesh axis, or a digit of one: along it a device is number `index // stride % size`."""

    axis: str
    stride: int
    size: int


Tiles: TypeAlias = tuple[tuple[Piece, ...], ...]
"""The pieces that split each dim, major to minor."""


class Layout(NamedTuple):
    """How every dim is split, and over what the array is a partial sum."""

    tiles: Tiles
    partial: frozenset[Piece] = frozenset()


class Step(NamedTuple):
    """One move between layouts: a collective over groups of devices, or a slice of what each device
    has.
    """

    kind: str  # HLO's name
    pieces: tuple[Piece, ...]  # what the groups run over, in the order of their members
    before: Layout
    after: Layout
    received: int  # elements that a device receives


# In all, for axes to be cut: a search over as many takes half a second, over seven ten or more.
_MOST_PIECES = 5


def plan(
    source: PartitionSpec, to: PartitionSpec, mesh_shape: Mapping[str, int], shape: tuple[int, ...]
) -> tuple[Step, ...]:
    """The steps in which a device receives least, counting a collective as a quarter of the smaller
    shard.

    >>> P = PartitionSpec
    >>> [step.kind for step in plan(P("x", "y"), P(None, "x"), {"x": 2, "y": 4}, (8, 8))]
    ['collective-permute', 'all-gather']
    """
    (start, partial), (end, _) = (spec_entries(spec, len(shape)) for spec in (source, to))
    # An axis of one device splits nothing. Major axes that stay where they are need no part in the
    # search, nor do axes that are used neither here nor there.
    start, end = (
        [[axis for axis in entry if mesh_shape[axis] > 1] for entry in tiles]
        for tiles in (start, end)
    )
    left = list(shape)
    for dim, (here, there) in enumerate(zip(start, end, strict=True)):
        while here and there and here[0] == there[0]:
            left[dim] //= mesh_shape[here.pop(0)]
            there.pop(0)
    used = {*itertools.chain(*start, *end), *partial}
    sizes = {axis: size for axis, size in mesh_shape.items() if size > 1 and axis in used}
    whole = {axis: (Piece(axis, 1, size),) for axis, size in sizes.items()}
    cut = {axis: whole[axis] if axis in partial else _cut(axis, sizes) for axis in sizes}
    if sum(map(len, cut.values())) > _MOST_PIECES:
        cut = whole
    before, after = (
        tuple(tuple(p for axis in entry for p in cut[axis]) for entry in tiles)
        for tiles in (start, end)
    )
    sums = frozenset(cut[axis][0] for axis in partial & cut.keys())
    return _search(
        Layout(before, sums), Layout(after), tuple(itertools.chain(*cut.values())), tuple(left)
    )


def _cut(axis: str, sizes: Mapping[str, int]) -> tuple[Piece, ...]:
    """An axis in digits that can move one by one: a minor one is as large as what it has more than
    another axis.
    """
    strides = [1, sizes[axis]]
    for stride in sorted({sizes[axis] // math.gcd(sizes[axis], size) for size in sizes.values()}):
        if strides[-2] < stride < sizes[axis] and stride % strides[-2] == 0:
            strides.insert(-1, stride)
    return tuple(
        Piece(axis, minor, major // minor) for minor, major in itertools.pairwise(strides)
    )[::-1]


def _search(
    start: Layout, end: Layout, pieces: tuple[Piece, ...], shape: tuple[int, ...]
) -> tuple[Step, ...]:
    """The cheapest way from layout to layout: A*, for a device must still receive what it has less
    than at the end.
    """
    fee = max(1, min(_local(start, shape), _local(end, shape)) // 4)
    # Ties go to what was found first: every process of a run must find the same way.
    found = itertools.count()
    queue: list[Any] = [((0, 0), next(found), 0, start, ())]
    done = set()
    while queue:
        (_, steps), _, spent, layout, path = heapq.heappop(queue)
        if layout == end:
            return path
        if layout in done:
            continue
        done.add(layout)
        for step in _steps(layout, end, pieces, shape):
            if step.after not in done:
                cost = spent + step.received + fee * (step.kind != "slice")
                lacking = max(0, _local(end, shape) - _local(step.after, shape))
                heapq.heappush(
                    queue,
                    ((cost + lacking, steps + 1), next(found), cost, step.after, (*path, step)),
                )
    # There always is one: sum and gather everything, and slice.
    raise AssertionError(f"no way from {start} to {end}")


def _steps(
    layout: Layout, end: Layout, pieces: tuple[Piece, ...], shape: tuple[int, ...]
) -> Iterator[Step]:
    """Every step from a layout. Only the most minor pieces of a dim can leave it, and only as such
    can others come.
    """
    tiles, partial = layout
    local = _local(layout, shape)
    dims = [dim for dim, here in enumerate(tiles) if here or end.tiles[dim]]
    splitting = {*itertools.chain(*tiles)}

    def to(kind: str, group: tuple[Piece, ...], after: Tiles, received: int) -> Step:
        return Step(kind, group, layout, Layout(after, partial - {*group}), received)

    def placed(
        group: tuple[Piece, ...], tiles: Tiles, dims: Sequence[int]
    ) -> Iterator[tuple[tuple[Piece, ...], Tiles]]:
        """Every way to share out pieces over dims, with the order of the members. On a dim they
        come as at the end.
        """
        for homes in itertools.product(dims, repeat=len(group)):
            home = dict(zip(group, homes, strict=True))
            added = [
                tuple(
                    sorted(
                        (p for p in group if home[p] == dim),
                        key=lambda p: ((*last, p).index(p), pieces.index(p)),
                    )
                )
                for dim, last in enumerate(end.tiles)
            ]
            after = tuple(entry + more for entry, more in zip(tiles, added, strict=True))
            if all(size % tile_count(entry) == 0 for size, entry in zip(shape, after, strict=True)):
                yield tuple(itertools.chain(*added)), after

    for piece in pieces:
        if piece not in splitting and piece not in partial:
            yield from (
                to("slice", group, after, 0) for group, after in placed((piece,), tiles, dims)
            )
    for group in _subsets([piece for piece in pieces if piece in partial]):
        received = local - local // tile_count(group)
        yield to("all-reduce", group, tiles, 2 * received)
        yield from (
            to("reduce-scatter", order, after, received)
            for order, after in placed(group, tiles, dims)
        )
    for kept in itertools.product(*(range(len(entry) + 1) for entry in tiles)):
        without = tuple(entry[:k] for entry, k in zip(tiles, kept, strict=True))
        if without == tiles:
            continue
        group = tuple(itertools.chain(*(entry[k:] for entry, k in zip(tiles, kept, strict=True))))
        yield to("all-gather", group, without, local * (tile_count(group) - 1))
        others = [dim for dim in dims if without[dim] == tiles[dim]]
        received = local - local // tile_count(group)
        yield from (
            to("all-to-all", order, after, received)
            for order, after in placed(group, without, others)
        )
    # Who has which tile is put right once, when tiles have the size they will have until the end or
    # until the gathers that lead there.
    if not partial:
        for after in _finer(end.tiles, tuple(map(tile_count, tiles)), pieces):
            yield to("collective-permute", pieces, after, local)


def _subsets(pieces: list[Piece]) -> Iterator[tuple[Piece, ...]]:
    return itertools.chain(
        *(itertools.combinations(pieces, count) for count in range(1, len(pieces) + 1))
    )


def _finer(tiles: Tiles, counts: tuple[int, ...], pieces: tuple[Piece, ...]) -> Iterator[Tiles]:
    """Every way to go on splitting dims, with pieces that split none of them, until they are in so
    many tiles.
    """
    if not tiles:
        yield ()
        return
    free = [piece for piece in pieces if not any(piece in entry for entry in tiles)]
    for more in ((), *itertools.chain(*map(itertools.permutations, _subsets(free)))):
        if tile_count(tiles[0] + more) == counts[0]:
            left = tuple(piece for piece in pieces if piece not in tiles[0] + more)
            yield from ((tiles[0] + more, *rest) for rest in _finer(tiles[1:], counts[1:], left))


def tile_count(pieces: Iterable[Piece]) -> int:
    return math.prod(piece.size for piece in pieces)


def _local(layout: Layout, shape: tuple[int, ...]) -> int:
    return math.prod(shape) // tile_count(itertools.chain(*layout.tiles))


def spec_entries(
    spec: PartitionSpec, ndim: int
) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
    """What a spec means, however it is spelt: the axes of every dim, and those that the array is a
    partial sum over.
    """
    entries = tuple(as_tuple(entry) for entry in spec.partitions)
    return entries + ((),) * (ndim - len(entries)), frozenset(spec.unreduced)
