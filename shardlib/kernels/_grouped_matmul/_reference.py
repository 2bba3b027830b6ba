"""Grouped products in plain JAX: the specification of the op.

The first rows of all groups are multiplied at once, as many of each as under an even load. Further
rows are multiplied in a loop, which does not run where loads are even: see `_places`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.compiled._source_lines import IF_UNEVEN
from shardlib.kernels._grouped_matmul._places import Places, Tile
from shardlib.kernels._shards import as_varying, varying


def forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """The product of each row with the matrix of its group, and zeros for rows of no group.

    Args:
        x: (rows, features).
        w: (groups, features, columns).
        sizes: (groups,), how many rows each group has, one group after the other.
    """
    places = Places(sizes, x.shape[0])

    def add_tile(tile: Tile, y: jax.Array) -> jax.Array:
        return tile.write(y, _product("rf,fc->rc", tile.read(x), w[tile.group]))

    placed = _product("gpf,gfc->gpc", places.placed(x), w).astype(x.dtype)
    return _add_further_tiles(places, add_tile, places.by_row(placed))


def backward(
    x: jax.Array, w: jax.Array, sizes: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients to the rows and to the matrices."""
    places = Places(sizes, x.shape[0])

    def add_tile(tile: Tile, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        of_x, of_w = carry
        of_y = tile.read(gradient)
        of_x = tile.write(of_x, _product("rc,fc->rf", of_y, w[tile.group]))
        added = _product("rf,rc->fc", tile.read(x), of_y)
        return of_x, of_w.at[tile.group].add(added)

    of_y = places.placed(gradient)
    of_x = _product("gpc,gfc->gpf", of_y, w).astype(x.dtype)
    of_w = _product("gpf,gpc->gfc", places.placed(x), of_y)
    of_x, of_w = _add_further_tiles(places, add_tile, (places.by_row(of_x), of_w))
    return of_x, of_w.astype(w.dtype)


def _product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of matrices, or of stacks of these, summed in float32 at least."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(subscripts, a, b, preferred_element_type=wide)


def _add_further_tiles(places: Places, add_tile: Callable[[Tile, Any], Any], carry: Any) -> Any:
    """The result of all places, with what each tile of rows beyond them adds to it."""
    if places.per_group == places.rows:
        return carry
    count = places.tile_ends[-1]
    axes = varying(count).union(*map(varying, jax.tree.leaves(carry)))

    def add(state: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        k, carry = state
        return k + 1, add_tile(places.tile(k), carry)

    start = jax.tree.map(lambda x: as_varying(x, axes), (jnp.int32(0), carry))
    with jax.named_scope(IF_UNEVEN):
        _, carry = lax.while_loop(lambda state: state[0] < count, add, start)
    return carry
