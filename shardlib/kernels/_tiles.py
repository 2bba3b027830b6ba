"""A function of tokens, computed tile by tile: for some of each device's tokens at a time.

The function's intermediate values, such as an MLP's wide hidden activations or what it gathers, are
in memory for one tile at a time, forward and backward:

    x (rows, tokens, features)    tile 0 | tile 1 | ... | the rest
                                    |        |              |
    function                     loop ---> loop --->     once more

    backward                     computes each tile again

Every tile has some of each device's own tokens, so that nothing is sent to cut it. Where the
partitioner sees a dim that is split over devices as one, the dim is split by devices first.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._shards import ArrayLayout, Names, layout_of
from shardlib.layouts._annotate import shard
from shardlib.tracing._jaxpr import keeps_arguments

OP = "in_tiles"


def in_tiles(
    function: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    tiles: int,
    *,
    names: Names | None = None,
) -> jax.Array:
    """The result of a function of tokens, computed for some of the tokens at a time.

    The function must treat each token by itself, as an MLP does, and draw no random numbers. Its
    intermediate values are in memory for one tile at a time: in the backward pass each tile is
    computed again, except for what a `Remat` around it keeps by name. Gradients to the weights that
    it reads are added up over tiles in the dtype in which it reads them.

    Args:
        function: of an array like `x` with fewer rows or fewer tokens. Its result has a token for
            each of these, of any number of features.
        x: `(..., features)`: rows, or rows of tokens.
        tiles: how many tiles there are. The function cuts the first dim whose size on each device
            is a multiple of this; if there is none, the longest dim, whose last tile is smaller.
        names: of the dims of `x`, and of the result's, where they are split over devices.

    >>> import jax.numpy as jnp
    >>> in_tiles(lambda x: 2 * x, jnp.ones((3, 4, 8)), 2).shape
    (3, 4, 8)
    """
    check.function(OP, "function", function)
    x = check_arrays.as_array(OP, "x", x)
    tiles = check.whole(OP, "tiles", tiles, least=1)
    if x.ndim < 2:
        raise ValueError(
            f"`{OP}`: `x` is {x.dtype}{list(x.shape)}: it takes rows of features, or rows of "
            "tokens, `(..., features)`."
        )
    cut = _cut_of(layout_of(OP, x, names), tiles)

    def checked(tile: jax.Array) -> jax.Array:
        made = function(tile)
        if jnp.shape(made)[:-1] != tile.shape[:-1]:
            raise ValueError(
                f"`{OP}`: the function makes {list(jnp.shape(made))} of a tile "
                f"{list(tile.shape)}: it gives features for each token, so that all dims but the "
                "last are those of the tile."
            )
        return made

    if cut.count == 1 and not cut.rest:
        return checked(x)
    # By this policy it is no block of the model: a `Remat` around it finds the names in it.
    recomputed = jax.checkpoint(checked, prevent_cse=False, policy=keeps_arguments)
    stacked = cut.tiles(x)
    if names is not None:
        stacked = shard(stacked, None, *names)
    made = lax.map(recomputed, stacked)
    if names is not None:
        made = shard(made, None, *names)
    rest = recomputed(cut.remainder(x)) if cut.rest else None
    return cut.joined(made, rest)


@dataclass(frozen=True)
class _Cut:
    """How one dim of an array is cut into tiles.

    The dim has the parts of several devices, one after the other. Each part has some tiles of one
    size, and a rest.
    """

    dim: int
    parts: int
    count: int  # tiles
    size: int  # of a tile in each part
    rest: int  # what tiles leave of each part

    def tiles(self, x: jax.Array) -> jax.Array:
        """The tiles, in a new first dim."""
        lead, features = x.shape[: self.dim], x.shape[self.dim + 1 :]
        x = self._between(x, 0, self.count * self.size)
        x = x.reshape(*lead, self.parts, self.count, self.size, *features)
        x = jnp.moveaxis(x, self.dim + 1, 0)
        return x.reshape(self.count, *lead, self.parts * self.size, *features)

    def remainder(self, x: jax.Array) -> jax.Array:
        """The part of the array that is in no tile."""
        lead, features = x.shape[: self.dim], x.shape[self.dim + 1 :]
        begin = self.count * self.size
        x = self._between(x, begin, begin + self.rest)
        return x.reshape(*lead, self.parts * self.rest, *features)

    def joined(self, tiles: jax.Array, rest: jax.Array | None) -> jax.Array:
        """The array from its tiles and its remainder: undoes the cut."""
        lead, features = tiles.shape[1 : self.dim + 1], tiles.shape[self.dim + 2 :]
        tiles = tiles.reshape(self.count, *lead, self.parts, self.size, *features)
        tiles = jnp.moveaxis(tiles, 0, self.dim + 1)
        x = tiles.reshape(*lead, self.parts, self.count * self.size, *features)
        if rest is not None:
            rest = rest.reshape(*lead, self.parts, self.rest, *features)
            x = jnp.concatenate([x, rest], self.dim + 1)
        local = self.count * self.size + self.rest
        return x.reshape(*lead, self.parts * local, *features)

    def _between(self, x: jax.Array, begin: int, end: int) -> jax.Array:
        """A slice of each device's part of the dim, which becomes two dims: devices, and slice."""
        shape = x.shape
        local = shape[self.dim] // self.parts
        x = x.reshape(*shape[: self.dim], self.parts, local, *shape[self.dim + 1 :])
        return cast(jax.Array, lax.slice_in_dim(x, begin, end, axis=self.dim + 1))


def _cut_of(layout: ArrayLayout, tiles: int) -> _Cut:
    """The cut of an array into so many tiles, or into fewer where it has fewer tokens."""
    local = layout.local_shape[:-1]
    even = [dim for dim, size in enumerate(local) if size % tiles == 0]
    dim = even[0] if even else local.index(max(local))
    size = max(1, math.ceil(local[dim] / tiles))
    count, rest = divmod(local[dim], size)
    parts = layout.shape[dim] // local[dim] if local[dim] else 1
    return _Cut(dim, parts, count, size, rest)
