"""Norms of gradients whose shards are on many devices, and sketches to estimate norms by."""

from collections.abc import Mapping, Sequence
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.layouts._specs import axes_without, parts_over
from shardlib.modeling._random import scrambled
from shardlib.step._precision import wider

# The number of sums in a sketch, by which a norm is estimated. Elements that are this far apart
# share a sum. It is a prime, so that those of one column of a matrix, often the largest, do not.
SKETCH_SIZE = 2039


def sketch(x: jax.Array, number: int) -> jax.Array:
    """Sums of the elements of an array, each with a sign that `number` and its place decide.

    Signs are the same in every step. So while the direction of a gradient does not change, the
    estimate of its norm errs by the same share.
    """
    flat = jnp.pad(x.astype(jnp.float32).reshape(-1), (0, -x.size % SKETCH_SIZE))
    rows = flat.reshape(-1, SKETCH_SIZE)
    seed = jnp.uint32(0x9E3779B1 * (number + 1) % 2**32)
    word = lax.broadcasted_iota(jnp.uint32, rows.shape, 0) * jnp.uint32(SKETCH_SIZE)
    word += lax.broadcasted_iota(jnp.uint32, rows.shape, 1) + seed
    is_positive = scrambled(word) & 1 == 1
    return jnp.sum(jnp.where(is_positive, rows, -rows), 0)


def squares(
    shards: Sequence[jax.Array], axes: Sequence[tuple[str, ...]], mesh_shape: Mapping[str, int]
) -> jax.Array:
    """The square of the norm of each array, from the shards of all devices, by one sum.

    `axes` are those that split each array.
    """
    every = _all_axes(axes, mesh_shape)
    found: list[jax.Array] = []
    for x, own_axes in zip(shards, axes, strict=True):
        # Devices along an axis that does not split an array all have it, and all are summed.
        copies = parts_over(mesh_shape, axes_without(every, own_axes))
        found.append(sum_of_squares(x) / copies)
    # In the widest of their dtypes, which strict promotion would not find by itself.
    widest = reduce(wider, [square.dtype for square in found])
    # Stacked, so that there is one small sum over devices for all arrays.
    stacked = jnp.stack([square.astype(widest) for square in found])
    if not every:
        return stacked
    return lax.psum(stacked, every)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """The sum of the squares of an array, in 32 bits or in its own, if these are more.

    In 16 bits, a sum of thousands of squares stops growing long before it is done.
    """
    wide = x.astype(wider(x.dtype, jnp.float32))
    return jnp.sum(_square(wide))


def _all_axes(axes: Sequence[tuple[str, ...]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of several devices that split any of some arrays, in order of first use."""
    used: dict[str, None] = {}
    for own_axes in axes:
        for axis in own_axes:
            if mesh_shape[axis] > 1:
                used[axis] = None
    return tuple(used)


def _square(x: jax.Array) -> jax.Array:
    """The square of the absolute value of each element."""
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)
