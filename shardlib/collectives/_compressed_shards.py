"""Gathers and scatters of arrays that are sent as codes, for use inside any `shard_map`.

    all_gather      one part on each device  ->  the whole on every device
    psum_scatter    the whole on each device ->  the sum, of which each device keeps a part

Each is one collective of bytes, and compresses each number once. Backward they do what their exact
kin do, and send numbers as they are: `all_gather` is followed by a `psum_scatter`, and the other
way around. The functions that end in `_bytes` say by a formula what a device sends.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.collectives._codecs import Codec
from shardlib.collectives._compressed import check_codec, check_dim, manual_axes
from shardlib.layouts._specs import Axes


def all_gather(x: jax.Array, axis: Axes, codec: Codec, dim: int = 0) -> jax.Array:
    """Every device's array, concatenated along `dim` and sent as codes: a compressed all-gather.

    Its derivative is that of an exact gather: a sum that is scattered, sent as it is.

    Args:
        x: an array of floats, the part of this device. The result has its dtype.
        axis: an axis of the surrounding `shard_map`, or a tuple of several: those of the devices.
        codec: what turns numbers into bytes, such as `Integers(8)`. Each part is compressed once.
        dim: the dim along which parts are concatenated; negative ones count from the end.

    >>> import shardlib as sl
    >>> P, mesh = jax.sharding.PartitionSpec, sl.make_mesh("data=8")
    >>> gather = jax.shard_map(
    ...     lambda x: all_gather(x, "data", sl.collectives.Integers(8)),
    ...     mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False,
    ... )
    >>> jax.jit(gather)(jnp.arange(8.0)).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    over = manual_axes("all_gather", "axis", axis)
    check_codec("all_gather", codec)
    return _all_gather(x, over, codec, check_dim(x, dim, "all_gather"))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _all_gather(x: jax.Array, over: tuple[str, ...], codec: Codec, dim: int) -> jax.Array:
    """The gather, of an array as one row of numbers: all of it shares blocks of scales."""
    # A row for each device, in the order of the axes.
    codes = lax.all_gather(codec.encode(x.reshape(1, -1)).code, over, axis=0, tiled=True)
    parts = codec.decode(codes, math.prod(x.shape)).astype(x.dtype).reshape(-1, *x.shape)
    shape = (*x.shape[:dim], parts.shape[0] * x.shape[dim], *x.shape[dim + 1 :])
    return jnp.moveaxis(parts, 0, dim).reshape(shape)


def _gather_forward(
    x: jax.Array, over: tuple[str, ...], codec: Codec, dim: int
) -> tuple[jax.Array, None]:
    return _all_gather(x, over, codec, dim), None


def _gather_backward(
    over: tuple[str, ...], codec: Codec, dim: int, _: None, g: jax.Array
) -> tuple[jax.Array]:
    return (lax.psum_scatter(g, over, scatter_dimension=dim, tiled=True),)


_all_gather.defvjp(_gather_forward, _gather_backward)


def all_gather_bytes(elements: int, devices: int, codec: Codec) -> int:
    """What a device sends for `all_gather` of its array of so many elements, in bytes.

    That is n-1 codes of n devices, as it is with an exact gather on a ring.
    """
    devices = _check_numbers("all_gather_bytes", elements, devices, codec)
    return (devices - 1) * codec.size(elements)


def psum_scatter(x: jax.Array, axis: Axes, codec: Codec, dim: int = 0) -> jax.Array:
    """The sum over devices, of which each keeps its part of `dim`: a compressed reduce-scatter.

    Codes of the parts go to their owners, and are added there. So each number is compressed once,
    whatever the number of devices. The derivative is that of the exact sum.

    Args:
        x: an array of floats, what this device adds. The result has its dtype.
        axis: an axis of the surrounding `shard_map`, or a tuple of several: those of the devices.
        codec: what turns numbers into bytes, such as `Integers(8)`.
        dim: the dim that is split; negative ones count from the end. If the number of devices does
            not divide it, that is a `ValueError`.

    >>> import shardlib as sl
    >>> P, mesh = jax.sharding.PartitionSpec, sl.make_mesh("data=8")
    >>> scatter = jax.shard_map(
    ...     lambda x: psum_scatter(x, "data", sl.collectives.Integers(8)),
    ...     mesh=mesh, in_specs=P(), out_specs=P("data"), check_vma=False,
    ... )
    >>> jax.jit(scatter)(jnp.arange(8.0)).tolist()
    [0.0, 8.0, 16.0, 24.0, 32.0, 40.0, 48.0, 56.0]
    """
    over, dim = manual_axes("psum_scatter", "axis", axis), check_dim(x, dim, "psum_scatter")
    check_codec("psum_scatter", codec)
    parts = lax.axis_size(over)
    if x.shape[dim] % parts:
        raise ValueError(
            f"`psum_scatter`: dim {dim} of an array of shape {x.shape} does not divide into "
            f"{parts} parts."
        )
    return _psum_scatter(x, over, codec, dim)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _psum_scatter(x: jax.Array, over: tuple[str, ...], codec: Codec, dim: int) -> jax.Array:
    """The scatter: a row for each owner goes there as a code, and the decoded rows are added."""
    parts = lax.axis_size(over)
    shape = (*x.shape[:dim], x.shape[dim] // parts, *x.shape[dim + 1 :])
    # The dim is cut in two, of which the first counts the owners and comes first.
    rows = jnp.moveaxis(x.reshape(*shape[:dim], parts, *shape[dim:]), dim, 0).reshape(parts, -1)
    codes = lax.all_to_all(codec.encode(rows).code, over, 0, 0, tiled=True)
    return jnp.sum(codec.decode(codes, rows.shape[1]), 0).astype(x.dtype).reshape(shape)


def _scatter_forward(
    x: jax.Array, over: tuple[str, ...], codec: Codec, dim: int
) -> tuple[jax.Array, None]:
    return _psum_scatter(x, over, codec, dim), None


def _scatter_backward(
    over: tuple[str, ...], codec: Codec, dim: int, _: None, g: jax.Array
) -> tuple[jax.Array]:
    # The last axis is the innermost one: its parts follow each other.
    for name in reversed(over):
        g = lax.all_gather(g, name, axis=dim, tiled=True)
    return (g,)


_psum_scatter.defvjp(_scatter_forward, _scatter_backward)


def psum_scatter_bytes(elements: int, devices: int, codec: Codec) -> int:
    """What a device sends for `psum_scatter` of its array of so many elements, in bytes.

    That is n-1 codes of a part of n devices.
    """
    devices = _check_numbers("psum_scatter_bytes", elements, devices, codec)
    return (devices - 1) * codec.size(elements // devices)


def _check_numbers(name: str, elements: Any, devices: Any, codec: Any) -> int:
    """Check what a formula is given, on behalf of `name`, and return the number of devices."""
    check_codec(name, codec)
    check.whole(name, "elements", elements, "a number of elements", least=0)
    return check.whole(name, "devices", devices, "a number of devices", least=1)
