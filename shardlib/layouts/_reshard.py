"""From one layout to another by the cheapest collectives, planned instead of left to the
partitioner.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.layouts._annotate import constrain, mesh_of_shards
from shardlib.layouts._route import Piece, Step, Tiles, plan, spec_entries, tile_count
from shardlib.layouts._rules import check_spec


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
    on explicit axes alone. The gradient of a reshard is the reshard back, and of a partial sum the
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
    if set(mesh.manual_axes) == set(mesh.axis_names):
        raise ValueError(
            "`reshard` inside a `shard_map` that is manual over every axis: each device has its "
            "own part, and there is no layout left to change. Use the collectives of `jax.lax`; a "
            "partial sum is the local value there."
        )
    for name, spec in (("to", to), ("source", source)):
        if spec is not None:
            _check(name, spec, mesh, x.shape)
    if known is not None:
        if source is not None and spec_entries(source, x.ndim) != spec_entries(known, x.ndim):
            raise ValueError(
                f"`reshard(x, source={source})`, and `x` is laid out as {known}. "
                "Leave `source` out."
            )
        source = known
    if to.unreduced or to.reduced or (source is not None and source.reduced):
        raise ValueError(
            f"`reshard` from {source} to {to}: `unreduced` is for the layout an array comes from, "
            "which `reshard` sums, and `reduced` is for cotangents. Between such types use "
            "`jax.sharding.reshard`."
        )
    if source is None:
        return constrain(x, to)
    # JAX 0.12 knows partial maxima and minima beside partial sums, 0.10 does not.
    if (
        source.unreduced
        and (kind := getattr(source, "unreduced_kind", None)) is not None
        and kind.name != "sum"
    ):
        raise ValueError(
            f"`reshard` sums partial sums; {source} is a partial {kind.name}. Use "
            "`jax.sharding.reshard`."
        )
    if source.unreduced and set(mesh.axis_names) != set(mesh.explicit_axes):
        raise ValueError(
            f"`reshard(x, source={source})`: partial sums are a type of explicit axes, and these "
            "are automatic. Make the mesh with `AxisType.Explicit`, or sum inside a "
            "`jax.shard_map` with `jax.lax.psum` or `psum_scatter`."
        )
    return _mover(mesh, source, to, x.shape)(x)


def _mesh_and_layout(x: jax.Array) -> tuple[Mesh | AbstractMesh, PartitionSpec | None]:
    """The mesh an array is on, and how it is laid out there if anything but the partitioner
    knows.
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


def _check(
    name: str, spec: PartitionSpec, mesh: Mesh | AbstractMesh, shape: tuple[int, ...]
) -> None:
    if any(entry is PartitionSpec.UNCONSTRAINED for entry in spec.partitions):
        raise ValueError(
            f"`reshard(x, {name}={spec})` leaves a dim to the partitioner: say where every dim is."
        )
    named = [*itertools.chain(*spec_entries(spec, 0)[0]), *spec.unreduced, *spec.reduced]
    if manual := [axis for axis in named if axis in mesh.manual_axes]:
        raise ValueError(
            f"`reshard(x, {name}={spec})` names `{manual[0]}`, over which the surrounding "
            "`shard_map` is manual: each device has its own part. Use the collectives of `jax.lax` "
            "over it; a partial sum there is the local value."
        )
    check_spec(mesh.shape, PartitionSpec(*spec.partitions), shape, what="the array to reshard")
    if unknown := [axis for axis in named if axis not in mesh.shape]:
        raise ValueError(
            f"`reshard(x, {name}={spec})` sums over `{unknown[0]}`; the mesh has {(*mesh.shape,)}."
        )


@functools.lru_cache(maxsize=1024)
def _mover(
    mesh: Mesh | AbstractMesh, source: PartitionSpec, to: PartitionSpec, shape: tuple[int, ...]
) -> Any:
    steps = plan(source, to, dict(mesh.shape), shape)
    whole = PartitionSpec(*source.partitions)
    automatic = set(mesh.axis_names) - set(mesh.manual_axes)

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
        for step in steps:
            shard = _take(step, shard, mesh.shape)
        return shard

    # JAX would transpose the collectives one by one. Not knowing (`check_vma=False`) which values
    # are the same on several devices, it would add up what it should not; and `check_vma=True` has
    # no rules to slice a partial sum.
    @jax.custom_vjp
    def move(x: jax.Array) -> jax.Array:
        return moved(x)

    def backward(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        cotangent = _mover(mesh, to, whole, shape)(cotangent)
        if source.unreduced:  # the type JAX gives the cotangent of a partial sum; nothing moves
            dual = PartitionSpec(*source.partitions, reduced=source.unreduced)
            cotangent = jax.sharding.reshard(cotangent, NamedSharding(mesh, dual))
        return (cotangent,)

    move.defvjp(lambda x: (moved(x), None), backward)
    return move


def _take(step: Step, shard: jax.Array, mesh_shape: Mapping[str, int]) -> jax.Array:
    """Take one step on what a device has. Runs manual over every axis of the step; shapes are
    local.

    Collectives gather and split along one dim. Where several dims take part, digits move to and
    from that one locally.
    """
    pieces = step.pieces
    axes = tuple(dict.fromkeys(piece.axis for piece in pieces))
    index = _indices(step.pieces, mesh_shape)
    groups = {"axis_name": axes, "axis_index_groups": _groups(pieces, index)}
    leaves, comes = (
        next((dim for dim, entry in enumerate(layout.tiles) if pieces[0] in entry), -1)
        for layout in (step.before, step.after)
    )
    match step.kind:
        case "slice":
            size = shard.shape[comes] // tile_count(pieces)
            number = _number(pieces, {axis: lax.axis_index(axis) for axis in axes})
            return lax.dynamic_slice_in_dim(shard, number * size, size, comes)
        case "all-gather":
            shard = lax.all_gather(shard, axis=leaves, tiled=True, **groups)
            return _from_one_dim(shard, leaves, pieces, step.before.tiles)
        case "all-to-all":
            shard = _to_one_dim(shard, comes, pieces, step.after.tiles)
            shard = lax.all_to_all(
                shard, split_axis=comes, concat_axis=leaves, tiled=True, **groups
            )
            return _from_one_dim(shard, leaves, pieces, step.before.tiles)
        case "all-reduce":
            return lax.psum(shard, **groups)
        case "reduce-scatter":
            shard = _to_one_dim(shard, comes, pieces, step.after.tiles)
            return lax.psum_scatter(shard, scatter_dimension=comes, tiled=True, **groups)
        case _:
            return lax.ppermute(shard, axes, _pairs(step, index))


def _from_one_dim(shard: jax.Array, at: int, pieces: tuple[Piece, ...], tiles: Tiles) -> jax.Array:
    """From blocks along the dim `at`, numbered by pieces, to blocks along the dims that `tiles`
    says pieces split.
    """
    order, sizes = _digits(at, pieces, tiles)
    if order == sorted(order):
        return shard
    count = math.prod(sizes)
    digits = [*shard.shape[:at], *sizes, shard.shape[at] // count, *shard.shape[at + 1 :]]
    shape = list(shard.shape)
    shape[at] //= count
    for dim, entry in enumerate(tiles):
        shape[dim] *= tile_count(piece for piece in entry if piece in pieces)
    return shard.reshape(digits).transpose(order).reshape(shape)


def _to_one_dim(shard: jax.Array, at: int, pieces: tuple[Piece, ...], tiles: Tiles) -> jax.Array:
    """The inverse: pieces become the major digits along the dim `at`, in their order."""
    order, sizes = _digits(at, pieces, tiles)
    if order == sorted(order):
        return shard
    own = [[piece.size for piece in entry if piece in pieces] for entry in tiles]
    local = [size // math.prod(blocks) for size, blocks in zip(shard.shape, own, strict=True)]
    digits = [size for blocks, rest in zip(own, local, strict=True) for size in (*blocks, rest)]
    local[at] *= math.prod(sizes)
    return shard.reshape(digits).transpose(np.argsort(order)).reshape(local)


def _digits(at: int, pieces: tuple[Piece, ...], tiles: Tiles) -> tuple[list[int], list[int]]:
    """Where the digits of all dims are while pieces are at `at`, dim by dim as `tiles` has them;
    and their sizes.
    """
    order = []
    for dim, entry in enumerate(tiles):
        order += [at + pieces.index(piece) for piece in entry if piece in pieces]
        order.append(dim + len(pieces) * (dim >= at))
    return order, [piece.size for piece in pieces]


def _groups(pieces: tuple[Piece, ...], index: Mapping[str, np.ndarray]) -> list[list[int]] | None:
    """The groups over some pieces, by the numbers of devices along their axes; None if that is all
    of them in order.
    """
    number = _number(pieces, index)
    if (number == np.arange(number.size)).all():
        return None
    rest = {axis: along.copy() for axis, along in index.items()}
    for axis, stride, size in pieces:
        rest[axis] -= index[axis] // stride % size * stride
    return np.lexsort((number, *rest.values())).reshape(-1, tile_count(pieces)).tolist()


def _pairs(step: Step, index: Mapping[str, np.ndarray]) -> list[tuple[int, int]]:
    """Who sends to whom: a device that has what it wants keeps it, another gets it from one that
    has no use for it.
    """
    has, wants = (
        _number(tuple(itertools.chain(*tiles)), index)
        for tiles in (step.before.tiles, step.after.tiles)
    )
    [stay], [move] = np.nonzero(has == wants), np.nonzero(has != wants)
    senders, receivers = (move[np.argsort(tile[move], kind="stable")] for tile in (has, wants))
    return [
        *zip(stay.tolist(), stay.tolist(), strict=True),
        *zip(senders.tolist(), receivers.tolist(), strict=True),
    ]


def _indices(pieces: tuple[Piece, ...], mesh_shape: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The index of every device along each axis, in the order in which JAX counts devices over
    several axes.
    """
    axes = tuple(dict.fromkeys(piece.axis for piece in pieces))
    return dict(
        zip(
            axes,
            np.indices([mesh_shape[axis] for axis in axes]).reshape(len(axes), -1),
            strict=True,
        )
    )


def _number(pieces: tuple[Piece, ...], index: Mapping[str, Any]) -> Any:
    """The number of a device among those along some pieces, the first of them major."""
    number = 0
    for axis, stride, size in pieces:
        number = number * size + index[axis] // stride % size
    return number
