"""Which rows each tile of a grouped product has: as many tiles as rows in groups of any size need.

    group 0       group 1            group 2
    [ 0 ][ 0 ]    [ 1 ][ 1 ][ 1 ]    [ 2 ]        [ - ]   nothing left for the last tile

A tile has rows of one group alone, so that it is one product with one matrix. The last tile of a
group may begin rows of the next one, which are masked. How many tiles there are follows from how
many rows and groups there are, so that loops over them have a fixed length.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# A group of average size has this many tiles, of which half a tile is masked, on average.
TILES_PER_GROUP = 8
# Where that makes tiles smaller, a product takes longer to begin than to be done; where it makes
# them larger, nothing is gained.
FEWEST_ROWS = 16
MOST_ROWS = 1024


class Tiles(NamedTuple):
    """For each tile its group, and its rows from `first` up to, and without, `last`."""

    group: jax.Array
    first: jax.Array
    last: jax.Array


def rows_of_tile(rows: int, groups: int) -> int:
    """How many rows a tile has: a power of two, or all rows where these are few or of one group."""
    if groups == 1:
        return rows
    wanted = max(1, rows // (groups * TILES_PER_GROUP))
    power = 1 << (wanted.bit_length() - 1)
    return min(rows, max(FEWEST_ROWS, min(power, MOST_ROWS)))


def tiles_of(sizes: jax.Array, rows: int) -> Tiles:
    """The tiles of groups of these sizes, in the order of rows.

    Args:
        sizes: (groups,), how many rows each group has, one group after the other.
        rows: how many there are, in groups or not.
    """
    groups, tile = sizes.shape[0], rows_of_tile(rows, sizes.shape[0])
    sizes = sizes.astype(jnp.int32)
    tiles = (sizes + tile - 1) // tile
    # Up to and including each group.
    rows_up_to, tiles_up_to = jnp.cumsum(sizes), jnp.cumsum(tiles)
    most = (rows + groups * (tile - 1)) // tile
    number = jnp.arange(most, dtype=jnp.int32)
    # Tiles that are left over belong to the last group that has rows, and have none.
    used = jnp.minimum(number, tiles_up_to[-1] - 1)
    group = jnp.searchsorted(tiles_up_to, used, side="right").astype(jnp.int32)
    group = jnp.minimum(group, groups - 1)
    within = number - (tiles_up_to - tiles)[group]
    end = rows_up_to[group]
    first = end - sizes[group] + within * tile
    return Tiles(group, jnp.minimum(first, end), jnp.minimum(first + tile, end))


class Window(NamedTuple):
    """Where the rows of one tile are in an array: from `start`, and which of these are its own."""

    start: jax.Array
    own: jax.Array  # (rows of a tile, 1), booleans


def window(tile: Tiles, rows: int, groups: int) -> Window:
    """The rows of an array that one tile reads; they do not go beyond its end."""
    length = rows_of_tile(rows, groups)
    start = jnp.minimum(tile.first, rows - length)
    row = start + lax.broadcasted_iota(jnp.int32, (length, 1), 0)
    return Window(start, (row >= tile.first) & (row < tile.last))


def read(x: jax.Array, window: Window) -> jax.Array:
    """The rows of a window, with zeros for those that are not its own."""
    rows = lax.dynamic_slice_in_dim(x, window.start, window.own.shape[0])
    return jnp.where(window.own, rows, jnp.zeros_like(rows))


def write(y: jax.Array, window: Window, rows: jax.Array) -> jax.Array:
    """The array with new rows for a window's own; the others of the window stay."""
    before = lax.dynamic_slice_in_dim(y, window.start, window.own.shape[0])
    rows = jnp.where(window.own, rows.astype(y.dtype), before)
    return lax.dynamic_update_slice_in_dim(y, rows, window.start, 0)
