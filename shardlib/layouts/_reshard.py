"""From one layout of an array to another by the cheapest collectives.

XLA's partitioner picks collectives too, but sometimes more of them than are needed. Here `_route`
plans the steps and a `shard_map` takes them, one after another, on what each device has.

Where a step splits or gathers several dims at once, there still is one collective, along one dim.
A collective over pieces of sizes 2 and 3 has groups of 6 members, and member number 3 a + b gets
block 3 a + b along that dim. Blocks along one dim become blocks along two by a local transpose of
digits, which are dims of an intermediate shape:

    along one dim    [a b rows] [cols]      the digits a, b are the major ones of dim 0
    along two dims   [a rows]   [b cols]    the digit b has moved to dim 1
"""

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.layouts._annotate import constrain, mesh_of_shards
from shardlib.layouts._route import Layout, Piece, Step, Tiles, plan, spec_entries, tile_count
from shardlib.layouts._specs import check_spec, parts_over


def reshard(x: jax.Array, to: PartitionSpec, *, source: PartitionSpec | None = None) -> jax.Array:
    """Lay out an array as `to` says, by exactly the collectives that this takes.

    The layout it comes from must be known. A concrete array knows its own, and so does the type of
    an array on a mesh with explicit axes. In a jitted function over automatic axes the layout is
    the partitioner's until it is told: by `source`, which the array is laid out as before anything
    else. Without `source` this is a constraint there, and the partitioner picks the collectives,
    which between two axes may be more than are needed.

    Over axes of n devices together, with L the bytes of a device's larger shard, before or after:

    | from                      | to                        | compiles to            | bytes       |
    | ------------------------- | ------------------------- | ---------------------- | ----------- |
    | whole                     | split                     | a slice on each device | 0           |
    | split                     | whole                     | one all-gather         | L (n-1)/n   |
    | split on some dims        | split on others           | one all-to-all         | L (n-1)/n   |
    | split over some axes      | split as much over others | one collective-permute | L           |
    | partial sums, `unreduced` | whole                     | one all-reduce         | 2 L (n-1)/n |
    | partial sums, `unreduced` | split over the same axes  | one reduce-scatter     | L (n-1)/n   |

    Anything else is a sequence of these, the one in which a device receives least, where a further
    collective must save a quarter of the smaller shard. A device never holds more than before or
    after. The search leaves out what is rarely of use, such as a permute before an all-to-all: on a
    mesh of 2x4 it finds the best sequence there is, on one of 2x2x2 for nearly every pair.

    Partial sums are spelt as JAX spells them, `PartitionSpec(..., unreduced={"model"})`, and exist
    only on explicit axes. The gradient of a reshard is the reshard back, and of a partial sum the
    whole cotangent for every part; there is no forward-mode differentiation (write `jax.jacrev` for
    `jax.jacfwd`). Inside a `shard_map`, `reshard` is for the axes that are not manual.

    >>> import jax.numpy as jnp
    >>> import shardlib as sl
    >>> P, mesh = PartitionSpec, sl.make_mesh("data=2,model=4")
    >>> x = jax.device_put(jnp.zeros((8, 16)), NamedSharding(mesh, P("data", "model")))
    >>> sl.reshard(x, P(None, ("model", "data"))).sharding.spec
    P(None, ('model', 'data'))

    In a jitted function over automatic axes `source` says where the array comes from:

    >>> step = jax.jit(lambda x: sl.reshard(2 * x, P("model", "data"), source=P("data", "model")))
    >>> with jax.set_mesh(mesh):
    ...     step(x).sharding.spec
    P('model', 'data')
    """
    check.kind("reshard", "x", x, jax.Array, "a `jax.Array`")
    check.kind("reshard", "to", to, PartitionSpec, "a `PartitionSpec`")
    check.kind("reshard", "source", source, PartitionSpec, "a `PartitionSpec`", optional=True)
    mesh, known = _mesh_and_layout(x)
    _check_not_manual(mesh)
    _check_spec_of_argument("to", to, mesh, x.shape)
    if source is not None:
        _check_spec_of_argument("source", source, mesh, x.shape)
    # A layout that is known need not be told, but may be told again.
    if known is not None:
        if source is not None and spec_entries(source, x.ndim) != spec_entries(known, x.ndim):
            raise ValueError(
                f"`reshard(x, source={source})`, and `x` is laid out as {known}. "
                "Leave `source` out."
            )
        source = known
    _check_partial_sums(source, to, mesh)
    if source is None:
        # Only the partitioner knows where the array comes from, so it picks the way.
        return constrain(x, to)
    moved = _compiled_move(mesh, source, to, x.shape)(x)
    if 0 in x.shape and isinstance(mesh, Mesh):
        # XLA leaves whole what has no entries, whatever a program says of it.
        moved = jax.device_put(moved, NamedSharding(mesh, to))
    return moved


def _check_not_manual(mesh: Mesh | AbstractMesh) -> None:
    """Refuse a mesh of which every axis is manual."""
    if set(mesh.manual_axes) == set(mesh.axis_names):
        raise ValueError(
            "`reshard` inside a `shard_map` that is manual over every axis: each device has its "
            "own part, and there is no layout left to change. Use the collectives of `jax.lax`; a "
            "partial sum is the local value there."
        )


def _mesh_and_layout(x: jax.Array) -> tuple[Mesh | AbstractMesh, PartitionSpec | None]:
    """The mesh that an array is on, and its spec there.

    The spec is None where only the partitioner knows it: in a jitted function over automatic axes.
    """
    mesh = mesh_of_shards()
    if isinstance(x, Tracer):
        typed = jax.typeof(x).sharding
        if typed.mesh.explicit_axes:
            return typed.mesh, None if typed.mesh.auto_axes else typed.spec
    elif isinstance(x.sharding, NamedSharding) and not mesh.manual_axes:
        return x.sharding.mesh, x.sharding.spec
    if mesh.empty:
        raise ValueError(
            "`reshard` has no mesh in scope, and `x` is on none: trace it under `with "
            "jax.set_mesh(mesh):`."
        )
    return mesh, None


def _check_spec_of_argument(
    argument: str, spec: PartitionSpec, mesh: Mesh | AbstractMesh, shape: tuple[int, ...]
) -> None:
    """Refuse a spec that does not say where every dim is, or whose axes are not free to use.

    `argument` is the argument of `reshard` that it was given as.
    """
    if PartitionSpec.UNCONSTRAINED in spec.partitions:
        raise ValueError(
            f"`reshard(x, {argument}={spec})` leaves a dim to the partitioner: "
            "say where every dim is."
        )
    entries, _ = spec_entries(spec, 0)
    named = [*itertools.chain(*entries), *spec.unreduced, *spec.reduced]
    _check_automatic(argument, spec, named, mesh)
    check_spec(mesh.shape, PartitionSpec(*spec.partitions), shape, what="the array to reshard")
    # Axes that split a dim are known to the mesh by now: these are of partial sums.
    for axis in named:
        if axis not in mesh.shape:
            raise ValueError(
                f"`reshard(x, {argument}={spec})` sums over `{axis}`; the mesh has "
                f"{(*mesh.shape,)}."
            )


def _check_automatic(
    argument: str, spec: PartitionSpec, axes: Iterable[Any], mesh: Mesh | AbstractMesh
) -> None:
    """Refuse axes over which a surrounding `shard_map` is manual.

    Args:
        argument: the argument of `reshard` that has the spec.
        spec: the spec, for the message.
        axes: all axes that it names.
        mesh: the mesh, with the axes that are manual around the call.
    """
    for axis in axes:
        if axis in mesh.manual_axes:
            raise ValueError(
                f"`reshard(x, {argument}={spec})` names `{axis}`, over which the surrounding "
                "`shard_map` is manual: each device has its own part. Use the collectives of "
                "`jax.lax` over it; a partial sum there is the local value."
            )


def _check_partial_sums(
    source: PartitionSpec | None, to: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    """Refuse specs whose partial sums `reshard` does not know how to sum.

    It sums those of `source`, on a mesh with explicit axes, and makes none.
    """
    if to.unreduced or to.reduced or (source is not None and source.reduced):
        raise ValueError(
            f"`reshard` from {source} to {to}: `unreduced` is for the layout an array comes from, "
            "which `reshard` sums, and `reduced` is for cotangents. Between such types use "
            "`jax.sharding.reshard`."
        )
    if source is None or not source.unreduced:
        return
    # JAX 0.12 knows partial maxima and minima besides partial sums, 0.10 does not.
    kind = getattr(source, "unreduced_kind", None)
    if kind is not None and kind.name != "sum":
        raise ValueError(
            f"`reshard` sums partial sums; {source} is a partial {kind.name}. Use "
            "`jax.sharding.reshard`."
        )
    if set(mesh.axis_names) != set(mesh.explicit_axes):
        raise ValueError(
            f"`reshard(x, source={source})`: partial sums are a type of explicit axes, and these "
            "are automatic. Make the mesh with `AxisType.Explicit`, or sum inside a "
            "`jax.shard_map` with `jax.lax.psum` or `psum_scatter`."
        )


@functools.lru_cache(maxsize=1024)
def _compiled_move(
    mesh: Mesh | AbstractMesh, source: PartitionSpec, to: PartitionSpec, shape: tuple[int, ...]
) -> Any:
    """The function that takes an array of this shape from `source` to `to`, with its gradient.

    It is kept, so that `jax.jit` compiles the same move once.
    """
    steps = plan(source, to, dict(mesh.shape), shape)
    whole = PartitionSpec(*source.partitions)
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)
    entries, _ = spec_entries(to, len(shape))
    parts = [parts_over(mesh.shape, entry) for entry in entries]
    moved_shape = [size // over for size, over in zip(shape, parts, strict=True)]

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=source,
        out_specs=to,
        axis_names=automatic,
        check_vma=False,
    )
    def moved(shard: jax.Array) -> jax.Array:
        if 0 in shape:
            # There is nothing to send, and no collective takes a dim of no entries.
            return shard.reshape(moved_shape)
        for step in steps:
            shard = _execute(step, shard, mesh.shape)
        return shard

    # JAX would transpose the collectives one by one. Not knowing (`check_vma=False`) which values
    # are the same on several devices, it would add up what it should not; and `check_vma=True` has
    # no rules to slice a partial sum.
    @jax.custom_vjp
    def move(x: jax.Array) -> jax.Array:
        return moved(x)

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        cotangent = _compiled_move(mesh, to, whole, shape)(cotangent)
        if source.unreduced:  # the type JAX gives the cotangent of a partial sum; nothing moves
            dual = PartitionSpec(*source.partitions, reduced=source.unreduced)
            cotangent = jax.sharding.reshard(cotangent, NamedSharding(mesh, dual))
        return (cotangent,)

    move.defvjp(lambda x: (moved(x), None), backward)
    return move


def _execute(step: Step, shard: jax.Array, mesh_shape: Mapping[str, int]) -> jax.Array:
    """Take one step of a plan on what a device has.

    It runs where every axis of the step is manual, so shapes are those of the device's shard.
    Collectives gather and split along one dim, that of the group's first piece; where several dims
    take part, digits move to and from that one locally.
    """
    pieces = step.pieces
    axes = _axes(pieces)
    # The coordinates of every device, from which groups and pairs are computed.
    index = _indices(pieces, mesh_shape)
    groups = {"axis_name": axes, "axis_index_groups": _groups(pieces, index)}
    # The dim that is gathered, and the dim that is split.
    before = _dim_split_by(pieces[0], step.before.tiles)
    after = _dim_split_by(pieces[0], step.after.tiles)
    match step.kind:
        case "slice":
            # Every device has all of it, and keeps the block of its own number.
            size = shard.shape[after] // tile_count(pieces)
            number = _number(pieces, {axis: lax.axis_index(axis) for axis in axes})
            return lax.dynamic_slice_in_dim(shard, number * size, size, after)
        case "all-gather":
            shard = lax.all_gather(shard, axis=before, tiled=True, **groups)
            return _from_one_dim(shard, before, pieces, step.before.tiles)
        case "all-to-all":
            shard = _to_one_dim(shard, after, pieces, step.after.tiles)
            shard = lax.all_to_all(
                shard, split_axis=after, concat_axis=before, tiled=True, **groups
            )
            return _from_one_dim(shard, before, pieces, step.before.tiles)
        case "all-reduce":
            return lax.psum(shard, **groups)
        case "reduce-scatter":
            # What is scattered must be in blocks along one dim first.
            shard = _to_one_dim(shard, after, pieces, step.after.tiles)
            return lax.psum_scatter(shard, scatter_dimension=after, tiled=True, **groups)
        case _:  # a permute: which tile each device has changes, but not how it is shaped
            return lax.ppermute(shard, axes, _pairs(step, index))


def _axes(pieces: tuple[Piece, ...]) -> tuple[str, ...]:
    """The axes that pieces are digits of, in order and each once."""
    return tuple(dict.fromkeys(piece.axis for piece in pieces))


def _dim_split_by(piece: Piece, tiles: Tiles) -> int:
    """The dim that a piece splits, or -1 where it splits none."""
    for dim, entry in enumerate(tiles):
        if piece in entry:
            return dim
    return -1


def _from_one_dim(
    shard: jax.Array, one_dim: int, pieces: tuple[Piece, ...], tiles: Tiles
) -> jax.Array:
    """Turn blocks along one dim, numbered by pieces, into blocks along all dims of the pieces.

    Args:
        shard: what a device has; the pieces are the major digits along `one_dim`, in their order.
        one_dim: the dim that a collective gathered.
        pieces: what its groups run over.
        tiles: which pieces split which dim; others than `pieces` are left out of account.
    """
    order = _digit_order(one_dim, pieces, tiles)
    if order == sorted(order):  # the pieces are all of that dim, and in order
        return shard
    shape = list(shard.shape)
    shape[one_dim] //= tile_count(pieces)
    sizes = [piece.size for piece in pieces]
    # With a dim for every digit, which are moved to their dims and joined there.
    digits = [*shape[:one_dim], *sizes, *shape[one_dim:]]
    for dim, own in enumerate(_pieces_by_dim(pieces, tiles)):
        shape[dim] *= tile_count(own)
    return shard.reshape(digits).transpose(order).reshape(shape)


def _to_one_dim(
    shard: jax.Array, one_dim: int, pieces: tuple[Piece, ...], tiles: Tiles
) -> jax.Array:
    """Turn blocks along all dims of the pieces into blocks along one dim, numbered by pieces.

    This is the inverse of `_from_one_dim`, with the same arguments. A collective that splits
    `one_dim` of the result gives each member of a group its block.
    """
    order = _digit_order(one_dim, pieces, tiles)
    if order == sorted(order):
        return shard
    shape: list[int] = []
    digits: list[int] = []
    for size, own in zip(shard.shape, _pieces_by_dim(pieces, tiles), strict=True):
        local_size = size // tile_count(own)
        shape.append(local_size)
        digits += [*(piece.size for piece in own), local_size]
    shape[one_dim] *= tile_count(pieces)
    return shard.reshape(digits).transpose(np.argsort(order)).reshape(shape)


def _pieces_by_dim(pieces: tuple[Piece, ...], tiles: Tiles) -> list[list[Piece]]:
    """For each dim those of the pieces that split it, major to minor."""
    by_dim: list[list[Piece]] = []
    for entry in tiles:
        by_dim.append([piece for piece in entry if piece in pieces])
    return by_dim


def _digit_order(one_dim: int, pieces: tuple[Piece, ...], tiles: Tiles) -> list[int]:
    """The transpose that takes digits from one dim to the dims that `tiles` says they split.

    Before it the shape is dim by dim what a device holds, with the pieces in front of `one_dim`.
    Entry k of the result says where the k-th dim after the transpose is before it.
    """
    order: list[int] = []
    for dim, own in enumerate(_pieces_by_dim(pieces, tiles)):
        for piece in own:
            order.append(one_dim + pieces.index(piece))
        # The dim itself, behind the digits if these stand before it.
        if dim >= one_dim:
            order.append(dim + len(pieces))
        else:
            order.append(dim)
    return order


def _groups(pieces: tuple[Piece, ...], index: Mapping[str, np.ndarray]) -> list[list[int]] | None:
    """The groups over some pieces, in JAX's numbers of the devices along the pieces' axes.

    Members are in the order of their numbers along the pieces. The result is None, which JAX takes
    for one group of all devices, where that is what it would be.
    """
    number = _number(pieces, index)
    if (number == np.arange(number.size)).all():
        return None
    # Members of a group differ in the digits of the pieces only.
    other_digits = {axis: along.copy() for axis, along in index.items()}
    for axis, stride, size in pieces:
        other_digits[axis] -= index[axis] // stride % size * stride
    # `lexsort` sorts by its last key first: group by group, and within one by number.
    devices = np.lexsort((number, *other_digits.values()))
    return devices.reshape(-1, tile_count(pieces)).tolist()


def _pairs(step: Step, index: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
    """The pairs (sender, receiver) of a permute.

    A device that already has the tile it wants keeps it. Every other one gets it from a device that
    has no use for it, so that nobody sends twice.
    """
    has, wants = _tile_numbers(step.before, index), _tile_numbers(step.after, index)
    [stay] = np.nonzero(has == wants)
    [move] = np.nonzero(has != wants)
    # Every tile is had as often as it is wanted: both layouts have as many tiles. Sorted by tile,
    # those that have it and those that want it meet.
    senders = np.concatenate([stay, move[np.argsort(has[move], kind="stable")]])
    receivers = np.concatenate([stay, move[np.argsort(wants[move], kind="stable")]])
    return list(zip(senders.tolist(), receivers.tolist(), strict=True))


def _tile_numbers(layout: Layout, index: Mapping[str, np.ndarray]) -> np.ndarray:
    """The number of the tile that each device has in a layout."""
    return _number(tuple(itertools.chain(*layout.tiles)), index)


def _indices(pieces: tuple[Piece, ...], mesh_shape: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The index of every device along each axis of the pieces.

    Devices are in the order in which JAX counts them over several axes, the first axis major.
    """
    axes = _axes(pieces)
    indices = np.indices([mesh_shape[axis] for axis in axes]).reshape(len(axes), -1)
    return dict(zip(axes, indices, strict=True))


def _number(pieces: tuple[Piece, ...], index: Mapping[str, Any]) -> Any:
    """The number of a device among those along some pieces, the first of them major.

    `index` has its index along each axis: numbers, arrays of them for all devices, or tracers.
    """
    number = 0
    for axis, stride, size in pieces:
        number = number * size + index[axis] // stride % size
    return number
