"""From one layout to another by the cheapest collectives, planned instead of left to the partitioner.

A layout says which mesh axes split which dim, major to minor, and over which axes the array is a partial sum. A few
moves lead from layout to layout, each one collective or none, and each with a known number of bytes that a device
receives. The cheapest way through the layouts is a shortest path, and the shortest path is the plan.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib._annotate import constrain
from shardlib._rules import as_tuple, check_spec


def reshard(x: jax.Array, to: PartitionSpec, *, source: PartitionSpec | None = None) -> jax.Array:
    """Lay out an array as `to` says, by exactly the collectives that this takes.

    The layout it comes from must be known. A concrete array knows its own, and so does the type of an array on a mesh
    with explicit axes. In a jitted function over automatic axes the layout is the partitioner's until it is told: by
    `source`, which the array is laid out as before anything else. Without `source` this is a constraint there, and the
    partitioner picks the collectives, which between two axes may be more than are needed.

    With L the bytes of the result of a slice, a gather or an all-reduce, and else of the shard that a device has at
    the start, over axes of n devices together:

    | from                         | to                          | compiles to                       | bytes received |
    | ---------------------------- | --------------------------- | --------------------------------- | -------------- |
    | whole                        | split                       | a slice on every device           | 0              |
    | split                        | whole                       | one all-gather                    | L (n-1)/n      |
    | split on one dim             | split on another            | one all-to-all                    | L (n-1)/n      |
    | split over some axes         | split as finely over others | one collective-permute            | L              |
    | partial sums, `unreduced`    | whole                       | one all-reduce                    | 2 L (n-1)/n    |
    | partial sums, `unreduced`    | split over the same axes    | one reduce-scatter                | L (n-1)/n      |

    Anything else is the sequence of these with the fewest bytes received and, of those, the fewest collectives. The
    search is over the axes that change place, whole or cut once where their sizes differ, and only over even splits.
    Slices come before gathers, so nothing is ever larger than the array at the start or at the end.

    Partial sums are spelt as JAX spells them, `PartitionSpec(..., unreduced={"model"})`, and exist on explicit axes
    only. The gradient of a reshard is the reshard back, that of a partial sum the whole cotangent for every part;
    forward-mode differentiation is not supported.

    >>> import jax.numpy as jnp
    >>> from shardlib._mesh import make_mesh
    >>> P = PartitionSpec
    >>> x = jax.device_put(jnp.zeros((8, 16)), NamedSharding(make_mesh("data=2,model=4"), P("data", "model")))
    >>> reshard(x, P(None, ("model", "data"))).sharding.spec
    PartitionSpec(None, ('model', 'data'))

    In a jitted function over automatic axes `source` says where the array comes from:

    >>> step = jax.jit(lambda x: reshard(2 * x, P("model"), source=P("data")))
    >>> with jax.set_mesh(make_mesh("data=2,model=4")):
    ...     text = step.lower(x).compile().as_text()
    >>> "all-gather" in text, "collective-permute" in text
    (False, True)
    """
    mesh, known = _mesh_and_layout(x)
    for name, spec in (("to", to), ("source", source)):
        if spec is not None:
            _check(name, spec, mesh, x.shape)
    if known is not None:
        if source is not None and _entries(source, x.ndim) != _entries(known, x.ndim):
            raise ValueError(f"`reshard(x, source={source})`, and `x` is laid out as {known}. Leave `source` out.")
        source = known
    if to.unreduced or to.reduced or (source is not None and source.reduced):
        raise ValueError(
            f"`reshard` from {source} to {to}: `unreduced` is for the layout an array comes from, which `reshard` sums, "
            "and `reduced` is for cotangents. Between such types use `jax.sharding.reshard`."
        )
    if source is None:
        return constrain(x, to)
    if source.unreduced and set(mesh.axis_names) != set(mesh.explicit_axes):
        raise ValueError(
            f"`reshard(x, source={source})`: partial sums are a type of explicit axes, and these are automatic. Make "
            "the mesh with `AxisType.Explicit`, or sum inside a `jax.shard_map` with `jax.lax.psum` or `psum_scatter`."
        )
    return _mover(mesh, source, to, x.shape)(x)


def _mesh_and_layout(x: jax.Array) -> tuple[Mesh | AbstractMesh, PartitionSpec | None]:
    """The mesh an array is on, and how it is laid out there if anything but the partitioner knows."""
    mesh = jax.sharding.get_abstract_mesh()
    if isinstance(x, jax.core.Tracer):
        typed = jax.typeof(x).sharding
        if typed.mesh.explicit_axes:
            return typed.mesh, None if typed.mesh.auto_axes else typed.spec
    elif isinstance(x.sharding, NamedSharding) and not mesh.manual_axes:
        return x.sharding.mesh, x.sharding.spec
    if mesh.empty:
        raise ValueError(
            "`reshard` has no mesh in scope, and `x` is on none: trace it under `with jax.set_mesh(mesh):`."
        )
    return mesh, None


def _check(name: str, spec: PartitionSpec, mesh: Mesh | AbstractMesh, shape: tuple[int, ...]) -> None:
    if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec):
        raise ValueError(f"`reshard(x, {name}={spec})` leaves a dim to the partitioner: say where every dim is.")
    named = [*itertools.chain(*_entries(spec, len(spec))[0]), *spec.unreduced, *spec.reduced]
    if manual := [axis for axis in named if axis in mesh.manual_axes]:
        raise ValueError(
            f"`reshard(x, {name}={spec})` names `{manual[0]}`, over which the surrounding `shard_map` is manual: each "
            "device has its own part. Use the collectives of `jax.lax` over it; a partial sum there is the local value."
        )
    check_spec(mesh.shape, spec, shape, what="the array to reshard")
    if unknown := [axis for axis in named if axis not in mesh.shape]:
        raise ValueError(f"`reshard(x, {name}={spec})` sums over `{unknown[0]}`; the mesh has {(*mesh.shape,)}.")


def _entries(spec: PartitionSpec, ndim: int) -> tuple[tuple[tuple[str, ...], ...], frozenset[str]]:
    """What a spec means, however it is spelt: the axes of every dim, and those that the array is a partial sum over."""
    entries = tuple(as_tuple(entry) for entry in spec)
    return entries + ((),) * (ndim - len(entries)), frozenset(spec.unreduced)


@functools.lru_cache(maxsize=1024)
def _mover(mesh: Mesh | AbstractMesh, source: PartitionSpec, to: PartitionSpec, shape: tuple[int, ...]) -> Any:
    steps = plan(source, to, dict(mesh.shape), shape)
    whole = PartitionSpec(*source)  # without partial sums
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=source, out_specs=to, axis_names=automatic, check_vma=False)
    def moved(shard: jax.Array) -> jax.Array:
        for step in steps:
            shard = _take(step, shard, mesh.shape)
        return shard

    # JAX would transpose the collectives one by one. Not knowing (`check_vma=False`) which values are the same on
    # several devices, it would add up what it should not; and `check_vma=True` has no rules to slice a partial sum.
    @jax.custom_vjp
    def move(x: jax.Array) -> jax.Array:
        return moved(x)

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        cotangent = _mover(mesh, to, whole, shape)(cotangent)
        if source.unreduced:  # the type JAX gives the cotangent of a partial sum; nothing moves
            dual = PartitionSpec(*source, reduced=source.unreduced)
            cotangent = jax.sharding.reshard(cotangent, NamedSharding(mesh, dual))
        return (cotangent,)

    move.defvjp(lambda x: (moved(x), None), backward)
    return move


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
    """One move between layouts: a collective over groups of devices, or a slice of what each device has."""

    kind: str  # HLO's name
    pieces: tuple[Piece, ...]  # the group, in the order of its members
    dim: int  # that is gathered, sliced, scattered, or split before an all-to-all; -1 for none
    to_dim: int  # split after an all-to-all
    before: Layout
    after: Layout
    received: int  # elements that a device receives


def plan(
    source: PartitionSpec, to: PartitionSpec, mesh_shape: Mapping[str, int], shape: tuple[int, ...]
) -> tuple[Step, ...]:
    """The steps with the fewest bytes received and, of those, the fewest collectives.

    >>> P = PartitionSpec
    >>> [step.kind for step in plan(P("x", "y"), P(None, "x"), {"x": 2, "y": 4}, (8, 8))]
    ['all-gather', 'collective-permute', 'all-gather']
    """
    (start, partial), (end, _) = (_entries(spec, len(shape)) for spec in (source, to))
    # An axis of one device splits nothing. Major axes that stay where they are need no part in the search, nor do axes
    # that are used neither here nor there.
    start, end = ([[axis for axis in axes if mesh_shape[axis] > 1] for axes in entries] for entries in (start, end))
    left = list(shape)
    for dim, (here, there) in enumerate(zip(start, end, strict=True)):
        while here and there and here[0] == there[0]:
            left[dim] //= mesh_shape[here.pop(0)]
            there.pop(0)
    used = {*itertools.chain(*start, *end), *partial}
    axes = {axis: size for axis, size in mesh_shape.items() if size > 1 and axis in used}  # every process in one order
    whole = {axis: (Piece(axis, 1, size),) for axis, size in axes.items()}
    cut = {axis: whole[axis] if axis in partial else _cut(axis, axes) for axis in axes}
    plans = []
    for parts in (whole, cut) if cut != whole else (whole,):
        before, after = (
            tuple(tuple(p for axis in entry for p in parts[axis]) for entry in tiles) for tiles in (start, end)
        )
        sums = frozenset(p for axis in partial & axes.keys() for p in parts[axis])
        pieces = tuple(itertools.chain(*parts.values()))
        plans.append(_search(Layout(before, sums), Layout(after), pieces, tuple(left)))
    return min(plans)[1]


def _cut(axis: str, axes: Mapping[str, int]) -> tuple[Piece, ...]:
    """An axis in digits that can move one by one: the minor one is as large as what it has more than another axis."""
    size = axes[axis]
    strides = [1, size]
    for other in sorted({size // math.gcd(size, other) for other in axes.values()}):
        if strides[-2] < other < size and other % strides[-2] == 0:
            strides.insert(-1, other)
    return tuple(Piece(axis, minor, major // minor) for minor, major in itertools.pairwise(strides))[::-1]


def _search(
    start: Layout, end: Layout, pieces: tuple[Piece, ...], shape: tuple[int, ...]
) -> tuple[Any, tuple[Step, ...]]:
    """The cheapest way from layout to layout, with its cost: Dijkstra's algorithm."""
    order = itertools.count()  # ties go to what was found first, never to a comparison of layouts
    queue: list[Any] = [((0, 0, 0), next(order), start, ())]
    done = set()
    while queue:
        (received, collectives, steps), _, layout, path = heapq.heappop(queue)
        if layout == end:
            return (received, collectives, steps), path
        if layout in done:
            continue
        done.add(layout)
        for step in _steps(layout, pieces, shape):
            if step.after not in done:
                cost = (received + step.received, collectives + (step.kind != "slice"), steps + 1)
                heapq.heappush(queue, (cost, next(order), step.after, (*path, step)))
    raise AssertionError(f"no way from {start} to {end}")  # gathering everything and slicing always is one


def _steps(layout: Layout, pieces: tuple[Piece, ...], shape: tuple[int, ...]) -> Iterator[Step]:
    """Every step from a layout. Only the most minor axes of a dim can leave it, and only as such can others come."""
    tiles, partial = layout
    placed = {*itertools.chain(*tiles)}
    absent = [piece for piece in pieces if piece not in placed and piece not in partial]
    summed = [piece for piece in pieces if piece in partial]
    local = math.prod(shape) // _size(placed)

    def added(tiles: Tiles, dim: int, group: tuple[Piece, ...]) -> Tiles | None:
        entry = tiles[dim] + group
        return None if shape[dim] % _size(entry) else (*tiles[:dim], entry, *tiles[dim + 1 :])

    for dim, entry in enumerate(tiles):
        for piece in absent:
            if after := added(tiles, dim, (piece,)):
                yield Step("slice", (piece,), dim, -1, layout, Layout(after, partial), 0)
        for group in _ordered_subsets(summed):
            if after := added(tiles, dim, group):
                received = local - local // _size(group)
                yield Step("reduce-scatter", group, dim, -1, layout, Layout(after, partial - {*group}), received)
        for kept in range(len(entry)):
            group, size = entry[kept:], _size(entry[kept:])
            without = (*tiles[:dim], entry[:kept], *tiles[dim + 1 :])
            yield Step("all-gather", group, dim, -1, layout, Layout(without, partial), local * (size - 1))
            for to_dim in (other for other in range(len(tiles)) if other != dim):
                for ordered in itertools.permutations(group):
                    if after := added(without, to_dim, ordered):
                        received = local - local // size
                        yield Step("all-to-all", ordered, dim, to_dim, layout, Layout(after, partial), received)
    for count in range(1, len(summed) + 1):
        for group in itertools.combinations(summed, count):
            received = 2 * (local - local // _size(group))
            yield Step("all-reduce", group, -1, -1, layout, Layout(tiles, partial - {*group}), received)
    if not partial:
        for after in _arrangements(pieces, tuple(map(_size, tiles))):
            yield Step("collective-permute", pieces, -1, -1, layout, Layout(after), local)


def _ordered_subsets(pieces: list[Piece]) -> Iterator[tuple[Piece, ...]]:
    for count in range(1, len(pieces) + 1):
        yield from itertools.permutations(pieces, count)


@functools.lru_cache(maxsize=1024)
def _arrangements(pieces: tuple[Piece, ...], counts: tuple[int, ...]) -> tuple[Tiles, ...]:
    """Every way to split dims into that many tiles each."""
    if not counts:
        return ((),)
    return tuple(
        (entry, *rest)
        for entry in ((), *_ordered_subsets([*pieces]))
        if _size(entry) == counts[0]
        for rest in _arrangements(tuple(piece for piece in pieces if piece not in entry), counts[1:])
    )


def _size(pieces: Iterable[Piece]) -> int:
    return math.prod(piece.size for piece in pieces)


def _take(step: Step, shard: jax.Array, mesh_shape: Mapping[str, int]) -> jax.Array:
    """Take one step on what a device has. Manual over every axis of the step; shapes are local."""
    pieces, dim = step.pieces, step.dim
    match step.kind:
        case "slice":
            size = shard.shape[dim] // _size(pieces)
            index = _rank(pieces, {piece.axis: lax.axis_index(piece.axis) for piece in pieces})
            return lax.dynamic_slice_in_dim(shard, index * size, size, dim)
        case "all-gather":
            return lax.all_gather(shard, **_groups(pieces, mesh_shape), axis=dim, tiled=True)
        case "all-to-all":
            shard = lax.all_to_all(
                shard, **_groups(pieces, mesh_shape), split_axis=step.to_dim, concat_axis=dim, tiled=True
            )
            # What came is in the order of the members, which may differ from the order in which they split `dim`.
            order = sorted(range(len(pieces)), key=lambda k: step.before.tiles[dim].index(pieces[k]))
            return _reordered(shard, dim, [piece.size for piece in pieces], order)
        case "all-reduce":
            return lax.psum(shard, **_groups(pieces, mesh_shape))
        case "reduce-scatter":
            return lax.psum_scatter(shard, **_groups(pieces, mesh_shape), scatter_dimension=dim, tiled=True)
        case _:
            axes = tuple(dict.fromkeys(piece.axis for piece in pieces))
            return lax.ppermute(shard, axes, _pairs(step, axes, mesh_shape))


def _reordered(shard: jax.Array, dim: int, sizes: list[int], order: list[int]) -> jax.Array:
    """Put the blocks along a dim, numbered by digits of these sizes, into another order of the digits."""
    if order == sorted(order):
        return shard
    split = [*shard.shape[:dim], *sizes, shard.shape[dim] // math.prod(sizes), *shard.shape[dim + 1 :]]
    axes = [*range(dim), *(dim + k for k in order), *range(dim + len(order), len(split))]
    return shard.reshape(split).transpose(axes).reshape(shard.shape)


def _groups(pieces: tuple[Piece, ...], mesh_shape: Mapping[str, int]) -> dict[str, Any]:
    """What `jax.lax` is told to run a collective over some pieces: axes, and groups within them if any is cut."""
    if all(piece.size == mesh_shape[piece.axis] for piece in pieces):
        return {"axis_name": tuple(piece.axis for piece in pieces)}
    axes = tuple(dict.fromkeys(piece.axis for piece in pieces))
    index = _indices(axes, mesh_shape)
    rest = {axis: index[axis].copy() for axis in axes}
    for axis, stride, size in pieces:
        rest[axis] -= index[axis] // stride % size * stride
    order = np.lexsort((_rank(pieces, index), *rest.values()))
    return {"axis_name": axes, "axis_index_groups": order.reshape(-1, _size(pieces)).tolist()}


def _pairs(step: Step, axes: tuple[str, ...], mesh_shape: Mapping[str, int]) -> list[tuple[int, int]]:
    """Who sends to whom: devices that have what they want keep it, and others get it from one that has no use for it."""
    index = _indices(axes, mesh_shape)
    has, wants = (_rank(tuple(itertools.chain(*tiles)), index) for tiles in (step.before.tiles, step.after.tiles))
    [stays], [moves] = np.nonzero(has == wants), np.nonzero(has != wants)
    senders, receivers = (moves[np.argsort(tile[moves], kind="stable")] for tile in (has, wants))
    return [*zip(stays.tolist(), stays.tolist()), *zip(senders.tolist(), receivers.tolist())]


def _indices(axes: tuple[str, ...], mesh_shape: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The index along each axis of every device, in the order in which JAX counts devices over several axes."""
    return dict(zip(axes, np.indices([mesh_shape[axis] for axis in axes]).reshape(len(axes), -1)))


def _rank(pieces: tuple[Piece, ...], index: Mapping[str, Any]) -> Any:
    """The number of a device among those along some pieces, the first of them major."""
    rank = 0
    for axis, stride, size in pieces:
        rank = rank * size + index[axis] // stride % size
    return rank
