"""Where the rows of groups are multiplied: in places, equally many for each group, or in tiles.

    group 0   [ . . . . ]
    group 1   [ . . . . ]  . . . .  . .        rows beyond a group's places are tiles of their own
    group 2   [ . .     ]

Every group has as many places as it would have rows under an even load. So the first rows of all
groups are one batched product with all matrices, as large as the product of all rows. Further rows
of a group are multiplied in tiles, which are as long as its places: there are none where loads are
even.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# The places of a group are rounded up to a multiple of this, but never beyond the rows there are.
ROUND = 8


def only_grouped(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """The rows that belong to groups, and zeros for those after them."""
    row = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where(row < sizes.sum(), x, jnp.zeros_like(x))


@dataclass(frozen=True)
class Places:
    """The places of all groups, by their sizes.

    - `sizes`: (groups,), how many rows each group has, one group after the other.
    - `rows`: how many rows there are, in groups or not.
    """

    sizes: jax.Array
    rows: int

    @property
    def per_group(self) -> int:
        """How many places a group has."""
        even = -(-self.rows // self.sizes.shape[0])
        return min(self.rows, -(-even // ROUND) * ROUND)

    @property
    def ends(self) -> jax.Array:
        """The number of the row after each group's last one."""
        return jnp.cumsum(self.sizes.astype(jnp.int32))

    @property
    def starts(self) -> jax.Array:
        """The number of each group's first row."""
        return self.ends - self.sizes.astype(jnp.int32)

    @property
    def _is_one_group(self) -> bool:
        """Whether there is one group, whose rows are in their places already."""
        return self.sizes.shape[0] == 1

    def placed(self, x: jax.Array) -> jax.Array:
        """The rows in their places, (groups, places, width), with zeros in places without a row."""
        if self._is_one_group:
            return only_grouped(x, self.sizes)[None]
        place = jnp.arange(self.per_group, dtype=jnp.int32)
        row = self.starts[:, None] + place
        taken = place < self.sizes[:, None]
        rows = x.at[row].get(mode="clip")
        return jnp.where(taken[..., None], rows, jnp.zeros_like(rows))

    def by_row(self, placed: jax.Array) -> jax.Array:
        """What is in the place of each row; zeros for a row without a place."""
        if self._is_one_group:
            return only_grouped(placed[0], self.sizes)
        row = jnp.arange(self.rows, dtype=jnp.int32)
        group = jnp.searchsorted(self.ends, row, side="right").astype(jnp.int32)
        group = jnp.minimum(group, self.sizes.shape[0] - 1)
        place = row - self.starts[group]
        has_place = (row < self.ends[-1]) & (place < self.per_group)
        found = placed.at[group, place].get(mode="clip")
        return jnp.where(has_place[:, None], found, jnp.zeros_like(found))

    @property
    def tile_ends(self) -> jax.Array:
        """The number of the tile after each group's last one, of tiles of rows without places."""
        left = jnp.maximum(self.sizes.astype(jnp.int32) - self.per_group, 0)
        return jnp.cumsum(-(-left // self.per_group))

    def tile(self, number: jax.Array) -> "Tile":
        """A tile of rows that have no place, by its number."""
        tile_ends = self.tile_ends
        group = jnp.searchsorted(tile_ends, number, side="right").astype(jnp.int32)
        first_tile = jnp.where(group > 0, tile_ends[group - 1], 0)
        # The first rows of the group, as many as a tile has, are in its places.
        first = self.starts[group] + self.per_group * (1 + number - first_tile)
        end = jnp.minimum(first + self.per_group, self.ends[group])
        # A slice must not go beyond the end of an array.
        start = jnp.minimum(first, self.rows - self.per_group)
        row = start + lax.broadcasted_iota(jnp.int32, (self.per_group, 1), 0)
        return Tile(group, start, (row >= first) & (row < end))


class Tile(NamedTuple):
    """Rows of one group that have no place.

    - `group`: the index of the group.
    - `start`: the first row of the slice of an array that has the tile's rows.
    - `own`: (rows of the slice, 1), which rows of the slice are the tile's.
    """

    group: jax.Array
    start: jax.Array
    own: jax.Array

    def read(self, x: jax.Array) -> jax.Array:
        """The tile's rows of an array, with zeros for other rows of the slice."""
        rows = lax.dynamic_slice_in_dim(x, self.start, self.own.shape[0])
        return jnp.where(self.own, rows, jnp.zeros_like(rows))

    def write(self, y: jax.Array, rows: jax.Array) -> jax.Array:
        """The array with the tile's rows replaced; other rows of the slice stay as they are."""
        before = lax.dynamic_slice_in_dim(y, self.start, self.own.shape[0])
        rows = jnp.where(self.own, rows.astype(y.dtype), before)
        return lax.dynamic_update_slice_in_dim(y, rows, self.start, 0)
