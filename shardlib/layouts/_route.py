"""The cheapest way from one layout of an array to another, found as a shortest path.

A layout says which mesh axes split which dim, major to minor, and over which axes the array is a
partial sum. A few moves lead from layout to layout, each one collective or none, and each with a
known number of elements that a device receives. The shortest path through the layouts is the plan.

An axis whose size is a multiple of another's is cut into digits that can move one by one. On a
mesh of x=2, y=4, the axis y is two digits of size 2, called y' (major) and y" (minor) here. The
plan from P("x", "y") to P(None, "x") first renumbers the tiles, then gathers:

    dim 0   dim 1
    x       y' y"      split as P("x", "y")
      |  collective-permute: the same number of tiles, on other devices
    y'      x y"
      |  all-gather over y' and y", the most minor pieces of their dims
    -       x          split as P(None, "x")

This file computes with shapes and names of axes only; `_reshard` executes its plans.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import PartitionSpec

from shardlib.layouts._specs import as_tuple


class Piece(NamedTuple):
    """A mesh axis, or a digit of one.

    Along a piece a device has the number `index // stride % size`, where `index` is its index
    along the axis. The whole axis is the piece of stride 1 and of the axis' size.
    """

    axis: str
    stride: int
    size: int


Tiles: TypeAlias = tuple[tuple[Piece, ...], ...]
"""The pieces that split each dim, major to minor."""


class Layout(NamedTuple):
    """How every dim is split, and over which pieces the array is a partial sum.

    A piece is in one entry of `tiles`, in `partial`, or in neither: then the devices along it hold
    the same values.
    """

    tiles: Tiles
    partial: frozenset[Piece] = frozenset()


class Step(NamedTuple):
    """One move between layouts.

    It is a collective over groups of devices, or a slice that each device cuts from what it has.
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
    """The steps from `source` to `to` in which a device receives least.

    Each collective counts as much as receiving a quarter of the smaller shard, so that a further
    one must save at least that. The result depends on the arguments only: every process of a run
    finds the same steps.

    >>> P = PartitionSpec
    >>> [step.kind for step in plan(P("x", "y"), P(None, "x"), {"x": 2, "y": 4}, (8, 8))]
    ['collective-permute', 'all-gather']
    """
    source_axes, partial = spec_entries(source, len(shape))
    target_axes, _ = spec_entries(to, len(shape))
    start = _splitting_axes(source_axes, mesh_shape)
    end = _splitting_axes(target_axes, mesh_shape)
    shape_within = _leave_out_common_axes(start, end, mesh_shape, shape)

    used = {*itertools.chain(*start, *end), *partial}
    sizes: dict[str, int] = {}
    for axis, size in mesh_shape.items():
        if size > 1 and axis in used:
            sizes[axis] = size
    pieces_of = _pieces_of_axes(sizes, partial)

    # The axes of a partial sum are never cut: each is one piece.
    sums: set[Piece] = set()
    for axis in partial & pieces_of.keys():
        sums.update(pieces_of[axis])
    moves = _Moves(
        end=Layout(_tiles(end, pieces_of)),
        pieces=tuple(itertools.chain(*pieces_of.values())),
        shape=shape_within,
    )
    return _shortest_path(Layout(_tiles(start, pieces_of), frozenset(sums)), moves)


def _leave_out_common_axes(
    start: list[list[str]],
    end: list[list[str]],
    mesh_shape: Mapping[str, int],
    shape: tuple[int, ...],
) -> tuple[int, ...]:
    """Remove the major axes that stay where they are from both lists of each dim.

    They need no part in the search: what they split is planned for as an array of its own, smaller
    in that dim. Returns its shape.
    """
    shape_within = list(shape)
    for dim, (before, after) in enumerate(zip(start, end, strict=True)):
        while before and after and before[0] == after[0]:
            shape_within[dim] //= mesh_shape[before[0]]
            del before[0], after[0]
    return tuple(shape_within)


def _splitting_axes(
    entries: Iterable[tuple[str, ...]], mesh_shape: Mapping[str, int]
) -> list[list[str]]:
    """The axes of each dim that split it, in lists that the caller may change.

    An axis of one device splits nothing, and is left out.
    """
    splitting: list[list[str]] = []
    for entry in entries:
        splitting.append([axis for axis in entry if mesh_shape[axis] > 1])
    return splitting


def _tiles(axes_of_dims: Iterable[list[str]], pieces_of: Mapping[str, tuple[Piece, ...]]) -> Tiles:
    """The same split with each axis replaced by its pieces.

    Pieces are major to minor, as axes are, so the order of the tiles stays the same.
    """
    tiles: list[tuple[Piece, ...]] = []
    for axes in axes_of_dims:
        tiles.append(tuple(itertools.chain.from_iterable(map(pieces_of.__getitem__, axes))))
    return tuple(tiles)


def _pieces_of_axes(
    sizes: Mapping[str, int], partial: frozenset[str]
) -> dict[str, tuple[Piece, ...]]:
    """The pieces that the search moves, axis by axis, major to minor.

    Axes of a partial sum stay whole, and all axes do where their pieces would be too many to search
    through.
    """
    whole: dict[str, tuple[Piece, ...]] = {}
    cut: dict[str, tuple[Piece, ...]] = {}
    for axis, size in sizes.items():
        whole[axis] = (Piece(axis, 1, size),)
        if axis in partial:
            cut[axis] = whole[axis]
        else:
            cut[axis] = _cut(axis, sizes)
    if sum(map(len, cut.values())) > _MOST_PIECES:
        return whole
    return cut


def _cut(axis: str, sizes: Mapping[str, int]) -> tuple[Piece, ...]:
    """Cut an axis into digits that can move one by one, major to minor.

    A minor digit is as large as the factor by which this axis exceeds another one: of y=4 beside
    x=2, the minor digit has 4 / gcd(4, 2) = 2 members, and the major one is as large as x.
    """
    size = sizes[axis]
    # From the stride of the most minor digit to the size of the whole axis.
    strides = [1]
    for stride in sorted({size // math.gcd(size, other) for other in sizes.values()}):
        # Digits nest: each stride is a multiple of the one before.
        if strides[-1] < stride < size and stride % strides[-1] == 0:
            strides.append(stride)
    strides.append(size)
    digits: list[Piece] = []
    for minor, major in itertools.pairwise(strides):
        digits.append(Piece(axis, minor, major // minor))
    return tuple(reversed(digits))


def _shortest_path(start: Layout, moves: "_Moves") -> tuple[Step, ...]:
    """The cheapest way from a layout to the end of `moves`, by A*.

    What a device still lacks of its shard at the end it must receive, so that is a lower bound of
    what is left to pay. Of ways that cost the same, the one with fewer steps is taken.
    """
    end = moves.end
    end_size = moves.local_size(end)
    fee = max(1, min(moves.local_size(start), end_size) // 4)
    # Remaining ties go to what was found first: every process of a run must find the same way.
    serial = itertools.count()
    # Entries: (lower bound of the cost, steps), serial number, cost so far, layout, path.
    queue: list[Any] = [((0, 0), next(serial), 0, start, ())]
    visited: set[Layout] = set()
    while queue:
        (_, steps), _, spent, layout, path = heapq.heappop(queue)
        if layout == end:
            return path
        if layout in visited:
            continue
        visited.add(layout)
        for step in moves.steps(layout):
            if step.after in visited:
                continue
            # A slice is no collective: it costs nothing at all.
            cost = spent + step.received
            if step.kind != "slice":
                cost += fee
            lacking = max(0, end_size - moves.local_size(step.after))
            entry = ((cost + lacking, steps + 1), next(serial), cost, step.after, (*path, step))
            heapq.heappush(queue, entry)
    # There always is one: sum and gather everything, and slice.
    raise AssertionError(f"no way from {start} to {end}")


@dataclass(frozen=True)
class _Moves:
    """Every move that a search may make on its way to the layout `end`.

    Only the most minor pieces of a dim can leave it, and a piece that comes to a dim becomes its
    most minor one: that is what one collective along a dim can do.
    """

    end: Layout
    pieces: tuple[Piece, ...]  # that may split dims
    shape: tuple[int, ...]

    def local_size(self, layout: Layout) -> int:
        """The elements of the array that a device holds in a layout."""
        return math.prod(self.shape) // tile_count(itertools.chain(*layout.tiles))

    def steps(self, layout: Layout) -> Iterator[Step]:
        """Every step from a layout.

        Their order decides between ways of equal cost, so it must not depend on the process.
        """
        yield from self._slices(layout)
        yield from self._reductions(layout)
        yield from self._gathers_and_exchanges(layout)
        yield from self._permutes(layout)

    def _slices(self, layout: Layout) -> Iterator[Step]:
        """Slices: a piece along which devices hold the same begins to split a dim.

        Each device keeps its own tile of what it has, and nothing is sent.
        """
        splitting = {*itertools.chain(*layout.tiles)}
        dims = self._dims_in_play(layout)
        for piece in self.pieces:
            if piece in splitting or piece in layout.partial:
                continue
            for group, after in self._distributed((piece,), layout.tiles, dims):
                yield _step("slice", group, layout, after, received=0)

    def _reductions(self, layout: Layout) -> Iterator[Step]:
        """All-reduces and reduce-scatters over each set of pieces of the partial sum."""
        local = self.local_size(layout)
        dims = self._dims_in_play(layout)
        for group in _subsets([piece for piece in self.pieces if piece in layout.partial]):
            received = local - local // tile_count(group)
            # An all-reduce is a reduce-scatter and an all-gather, each as large.
            yield _step("all-reduce", group, layout, layout.tiles, 2 * received)
            for order, after in self._distributed(group, layout.tiles, dims):
                yield _step("reduce-scatter", order, layout, after, received)

    def _gathers_and_exchanges(self, layout: Layout) -> Iterator[Step]:
        """All-gathers and all-to-alls of every choice of minor pieces that leave their dims.

        After an all-gather the pieces split nothing, after an all-to-all they split other dims.
        """
        tiles = layout.tiles
        local = self.local_size(layout)
        dims = self._dims_in_play(layout)
        for remaining, group in _departures(tiles):
            count = tile_count(group)
            yield _step("all-gather", group, layout, remaining, local * (count - 1))
            # An all-to-all splits dims that lose nothing in the same step.
            others = [dim for dim in dims if remaining[dim] == tiles[dim]]
            received = local - local // count
            for order, after in self._distributed(group, remaining, others):
                yield _step("all-to-all", order, layout, after, received)

    def _permutes(self, layout: Layout) -> Iterator[Step]:
        """Permutes to layouts with as many tiles from which only gathers lead to the end.

        Which device has which tile is put right once, when tiles have the size that they will have
        until the end, or until the gathers that lead there. Partial sums are summed before.
        """
        if layout.partial:
            return
        counts = tuple(map(tile_count, layout.tiles))
        for after in _refinements(self.end.tiles, counts, self.pieces):
            yield _step("collective-permute", self.pieces, layout, after, self.local_size(layout))

    def _dims_in_play(self, layout: Layout) -> list[int]:
        """The dims that are split now or at the end.

        To split any other one on the way never helps, and would make the search longer.
        """
        dims: list[int] = []
        for dim, (entry, last) in enumerate(zip(layout.tiles, self.end.tiles, strict=True)):
            if entry or last:
                dims.append(dim)
        return dims

    def _distributed(
        self, group: tuple[Piece, ...], tiles: Tiles, dims: Sequence[int]
    ) -> Iterator[tuple[tuple[Piece, ...], Tiles]]:
        """Every way to distribute the pieces of a group over dims that they divide evenly.

        Yields the pieces dim by dim, which is the order of a group's members, and the tiles with
        them. Pieces that come to one dim together stand there in the order of the end.
        """
        for homes in itertools.product(dims, repeat=len(group)):
            added = self._added(group, homes)
            # What comes to a dim is more minor than all that splits it already.
            after = tuple((*entry, *more) for entry, more in zip(tiles, added, strict=True))
            if self._splits_evenly(after):
                yield tuple(itertools.chain(*added)), after

    def _added(self, group: tuple[Piece, ...], homes: tuple[int, ...]) -> list[list[Piece]]:
        """The pieces that come to each dim, in their order, where each piece goes to its home."""
        added: list[list[Piece]] = [[] for _ in self.shape]
        for piece, dim in zip(group, homes, strict=True):
            added[dim].append(piece)
        for dim, pieces in enumerate(added):
            pieces.sort(key=functools.partial(self._rank, dim))
        return added

    def _rank(self, dim: int, piece: Piece) -> tuple[int, int]:
        """The key by which pieces that come to a dim are ordered.

        Those that split the dim at the end come first, as they are there; others follow in the
        order of `pieces`.
        """
        last = self.end.tiles[dim]
        rank = len(last)
        if piece in last:
            rank = last.index(piece)
        return rank, self.pieces.index(piece)

    def _splits_evenly(self, tiles: Tiles) -> bool:
        for size, entry in zip(self.shape, tiles, strict=True):
            if size % tile_count(entry):
                return False
        return True


def _step(kind: str, group: tuple[Piece, ...], layout: Layout, after: Tiles, received: int) -> Step:
    """A step from a layout to the tiles `after`.

    Where the array is a partial sum over pieces of the group, the step completes the sum over them.
    """
    return Step(kind, group, layout, Layout(after, layout.partial - {*group}), received)


def _departures(tiles: Tiles) -> Iterator[tuple[Tiles, tuple[Piece, ...]]]:
    """Every way for minor pieces to leave their dims, with the tiles that remain.

    One or more pieces leave. Of each dim the first few stay, from none of them to all.
    """
    for kept in itertools.product(*(range(len(entry) + 1) for entry in tiles)):
        remaining, leaving = _without_minor(tiles, kept)
        if leaving:
            yield remaining, leaving


def _without_minor(tiles: Tiles, kept: tuple[int, ...]) -> tuple[Tiles, tuple[Piece, ...]]:
    """Let the minor pieces leave their dims, all but the first `kept` of each dim.

    Returns the tiles that remain, and the pieces that leave, dim by dim.
    """
    remaining: list[tuple[Piece, ...]] = []
    leaving: list[Piece] = []
    for entry, count in zip(tiles, kept, strict=True):
        remaining.append(entry[:count])
        leaving.extend(entry[count:])
    return tuple(remaining), tuple(leaving)


def _subsets(pieces: list[Piece]) -> Iterator[tuple[Piece, ...]]:
    """Every set of one or more of the pieces, small ones first.

    Within a set the pieces are in the order of `pieces`.
    """
    for count in range(1, len(pieces) + 1):
        yield from itertools.combinations(pieces, count)


def _refinements(
    tiles: Tiles, counts: tuple[int, ...], pieces: tuple[Piece, ...]
) -> Iterator[Tiles]:
    """Every way to split dims further until each is in as many tiles as `counts` says.

    Only pieces that split none of the dims are added, as minor ones, in any order. The first dim is
    refined here and the others by recursion, with the pieces that are left.
    """
    if not tiles:
        yield ()
        return
    splitting = {*itertools.chain(*tiles)}
    unused = [piece for piece in pieces if piece not in splitting]
    for added in _arrangements(unused):
        entry = tiles[0] + added
        if tile_count(entry) != counts[0]:
            continue
        # Each piece splits one dim.
        left = tuple(piece for piece in pieces if piece not in entry)
        for others in _refinements(tiles[1:], counts[1:], left):
            yield (entry, *others)


def _arrangements(pieces: list[Piece]) -> Iterator[tuple[Piece, ...]]:
    """No piece, then every set of the pieces in every order."""
    yield ()
    for subset in _subsets(pieces):
        yield from itertools.permutations(subset)


def tile_count(pieces: Iterable[Piece]) -> int:
    """The number of tiles that pieces together split a dim into.

    It is also the number of devices in a group over these pieces.
    """
    return math.prod(piece.size for piece in pieces)


def spec_entries(
    spec: PartitionSpec, ndim: int
) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
    """What a spec means, in one form for all its spellings.

    Returns the axes of each of `ndim` dims, where a spec may leave out the last ones, and the axes
    over which the array is a partial sum.
    """
    entries = tuple(map(as_tuple, spec.partitions))
    return entries + ((),) * (ndim - len(entries)), frozenset(spec.unreduced)
