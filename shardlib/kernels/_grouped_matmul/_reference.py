"""Grouped products in plain JAX, as a loop over tiles of rows: the specification of the op.

A tile has rows of one group, and is multiplied with the matrix of that group. Backward the loop
adds up the gradient to one matrix while tiles of its group follow each other.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._grouped_matmul._tiles import Tiles, read, tiles_of, window, write
from shardlib.kernels._shards import as_varying, varying


def forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """The product of each row with the matrix of its group, and zeros for rows of no group.

    Args:
        x: (rows, features).
        w: (groups, features, columns).
        sizes: (groups,), how many rows each group has, one group after the other.
    """
    groups, _, columns = w.shape
    rows = x.shape[0]

    def multiply(y: jax.Array, tile: Tiles) -> tuple[jax.Array, None]:
        here = window(tile, rows, groups)
        product = _product(read(x, here), w[tile.group])
        return write(y, here, product), None

    start = jnp.zeros((rows, columns), x.dtype)
    y, _ = lax.scan(multiply, _varying_as(start, x, w, sizes), tiles_of(sizes, rows))
    return y


def backward(
    x: jax.Array, w: jax.Array, sizes: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients to the rows and to the matrices."""
    groups, features, columns = w.shape
    rows = x.shape[0]

    def multiply(carry: Any, tile: Tiles) -> tuple[Any, None]:
        of_x, of_w, sum_of_group, last_group = carry
        here = window(tile, rows, groups)
        of_y = read(gradient, here)
        of_x = write(of_x, here, _product(of_y, w[tile.group].T))
        started = jnp.where(tile.group == last_group, sum_of_group, jnp.zeros_like(sum_of_group))
        sum_of_group = started + _product(read(x, here).T, of_y)
        of_w = lax.dynamic_update_index_in_dim(of_w, sum_of_group.astype(w.dtype), tile.group, 0)
        return (of_x, of_w, sum_of_group, tile.group), None

    start = (
        jnp.zeros_like(x),
        jnp.zeros_like(w),
        jnp.zeros((features, columns), jnp.promote_types(w.dtype, jnp.float32)),
        jnp.int32(-1),
    )
    start = _varying_as(start, x, w, sizes, gradient)
    (of_x, of_w, _, _), _ = lax.scan(multiply, start, tiles_of(sizes, rows))
    return of_x, of_w


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of two matrices, summed in float32 at least."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a, b, preferred_element_type=wide)


def _varying_as(tree: Any, *arrays: jax.Array) -> Any:
    """Arrays declared to vary over all axes that any of some others varies over.

    What a loop starts from must vary as what it makes.
    """
    axes = frozenset().union(*map(varying, arrays))
    return jax.tree.map(lambda x: as_varying(x, axes), tree)
