"""Exact sums over devices, in shapes that machines are good at."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

BUCKET_BYTES = 32 * 2**20
"""How large one collective is about, where that can be chosen."""

_LANES = 128  # the last dim of an array lies in tiles of as many on a TPU


def sum_scatter(x: jax.Array, dim: int, axes: tuple[str, ...]) -> jax.Array:
    """`psum_scatter`, of an array in a shape that TPUs scatter: a row for each device, of whole
    tiles.

    Of a scatter along either of the last two dims, or of one into less than whole tiles, their
    compiler makes an all-reduce, of twice the bytes.
    """
    front = jnp.moveaxis(x, dim, 0)
    parts = math.prod(lax.axis_size(axis) for axis in axes)
    shape = (front.shape[0] // parts, *front.shape[1:])
    size = math.prod(shape)
    rows = front.reshape((parts, size // _LANES, _LANES) if size % _LANES == 0 else (parts, size))
    # One after the other, the fast networks first: each axis is a dim of a torus, or a network, of
    # its own.
    for name in axes:
        rows = lax.psum_scatter(rows, name, scatter_dimension=0, tiled=True)
    return jnp.moveaxis(rows.reshape(shape), 0, dim)


def in_pieces(
    collective: Callable[[jax.Array, int], jax.Array], x: jax.Array, dim: int, count: int
) -> jax.Array:
    """A collective along `dim`, not the first, of an array in `count` pieces of its first, one
    after the other.

    Collectives along any but the first dim of a large array are turned around it: GPUs would copy
    all of it, twice.
    """
    rows = -(-x.shape[0] // min(count, x.shape[0]))
    count = -(-x.shape[0] // rows)

    def piece(first: jax.Array | int) -> jax.Array:
        # A single row goes without the first dim, so that it may have the collective's dim as its
        # first.
        part = lax.dynamic_slice_in_dim(x, first, rows)
        return collective(part[0], dim - 1)[None] if rows == 1 else collective(part, dim)

    def put(number: jax.Array, made: jax.Array) -> jax.Array:
        # The last begins with rows of the one before.
        first = jnp.minimum(number * rows, x.shape[0] - rows)
        # As it is numbered: else compilers lay all rows out as the collective gives one, and turn
        # all of them later.
        one = with_layout_constraint(piece(first), Layout(tuple(range(x.ndim))))
        return lax.dynamic_update_slice_in_dim(made, one, first, 0)

    # All of it is overwritten. Of zeros, compilers would keep one array for all that start as zeros
    # of this shape.
    anything, shape = x[(0,) * x.ndim], jax.eval_shape(lambda: piece(0)).shape
    return lax.fori_loop(0, count, put, jnp.broadcast_to(anything, (x.shape[0], *shape[1:])))
