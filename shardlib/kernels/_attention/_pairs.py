"""The pairs of blocks that attention in plain JAX walks over, and what it masks in each of them.

Queries and keys are cut into blocks of one size. A pair is a block of queries with a block of keys
in which some query may see some key:

             key blocks
           0   1   2   3
     0   [ x           ]
     1   [ x   x       ]         x: the pairs of a causal mask
     2   [ x   x   x   ]
     3   [ x   x   x   x ]

Scores of a pair have the dims `bgrqk`: batch, key heads, query heads of each, queries, keys.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._attention._mask import Mask, Tiling, pattern_at

BLOCK = 512  # queries or keys of a block, at most
SCORES_BYTES = 2**26  # of the scores that are in memory at a time


class BlockPairs:
    """Queries and keys cut into blocks, and the pairs of blocks in which a key may be seen.

    Attributes:
        queries: how the queries are cut.
        keys: how the keys are.
        pairs: for each pair the index of its block of queries and that of its block of keys.
    """

    def __init__(
        self,
        mask: Mask,
        starts: tuple[int, int] | None,
        lengths: tuple[int, int],
        heads: int,
    ) -> None:
        """Cut queries and keys into blocks.

        Args:
            mask: which keys a query sees, by position.
            starts: the positions of the first query and of the first key, if they are known.
            lengths: how many queries and how many keys there are.
            heads: of all sequences of the batch.
        """
        size = _block_size(heads)
        # A short sequence is one block of its own length, which needs no padding.
        self.queries, self.keys = (Tiling(length, min(size, length)) for length in lengths)
        self.pairs = mask.pairs(self.queries, self.keys, starts)

    def pad_queries(self, x: jax.Array) -> jax.Array:
        """An array whose second dim is that of the queries, padded to whole blocks."""
        return _padded(x, self.queries)

    def pad_keys(self, x: jax.Array) -> jax.Array:
        """An array whose second dim is that of the keys, padded to whole blocks."""
        return _padded(x, self.keys)

    def query_block(self, x: jax.Array, pair: Any) -> jax.Array:
        """The pair's queries of a padded array."""
        return _block(x, self.queries, pair[0])

    def key_block(self, x: jax.Array, pair: Any) -> jax.Array:
        """The pair's keys of a padded array."""
        return _block(x, self.keys, pair[1])

    def with_query_block(self, x: jax.Array, pair: Any, block: jax.Array) -> jax.Array:
        """A padded array with another block for the pair's queries."""
        return _with_block(x, self.queries, pair[0], block)

    def with_key_block(self, x: jax.Array, pair: Any, block: jax.Array) -> jax.Array:
        """A padded array with another block for the pair's keys."""
        return _with_block(x, self.keys, pair[1], block)

    def fold(self, add: Any, sums: Any) -> Any:
        """The sums after `add(sums, pair)` of every pair."""
        # One pair needs no loop: the compiler then sees plain attention.
        if len(self.pairs) == 1:
            return add(sums, self.pairs[0])
        return lax.scan(lambda sums, pair: (add(sums, pair), None), sums, self.pairs)[0]


class PairMask:
    """Which keys of a pair of blocks its queries see: by the band, the pattern and segments."""

    def __init__(
        self,
        mask: Mask,
        starts: Any,
        pattern: jax.Array | None,
        segments: tuple[jax.Array, jax.Array] | None,
        blocks: BlockPairs,
        groups: int,
    ) -> None:
        """Keep all that masks the attention, with segments padded to whole blocks.

        Args:
            mask: the band, and the size of the blocks of the pattern.
            starts: the positions of the first query and of the first key, numbers or traced.
            pattern: of the block mask, `(heads or one, query blocks, key blocks)`, or None.
            segments: of the queries and of the keys, `(batch, positions)`, or None.
            blocks: the pairs.
            groups: the number of key heads.
        """
        self.mask, self.starts, self.pattern = mask, starts, pattern
        self.blocks, self.groups = blocks, groups
        self.segments = None
        if segments is not None:
            self.segments = blocks.pad_queries(segments[0]), blocks.pad_keys(segments[1])

    def seen(self, pair: Any) -> jax.Array | None:
        """Which scores of a pair are seen, of dims that broadcast to `bgrqk`; None if all are."""
        queries, keys = self.blocks.queries, self.blocks.keys
        query_indices = pair[0] * queries.size + jnp.arange(queries.size)
        key_indices = pair[1] * keys.size + jnp.arange(keys.size)
        query_positions = query_indices + self.starts[0]
        key_positions = key_indices + self.starts[1]
        not_padding = None
        if keys.padded_length != keys.length:
            not_padding = (key_indices < keys.length)[None, :]
        parts = [
            self.mask.band(query_positions, key_positions),
            not_padding,
            self._same_segment(pair),
            self._in_pattern(query_positions, key_positions),
        ]
        present = [part for part in parts if part is not None]
        if not present:
            return None
        return functools.reduce(jnp.logical_and, present)

    def _same_segment(self, pair: Any) -> jax.Array | None:
        """Which keys are in the segment of each query; None without segments."""
        if self.segments is None:
            return None
        of_queries = self.blocks.query_block(self.segments[0], pair)
        of_keys = self.blocks.key_block(self.segments[1], pair)
        return (of_queries[:, :, None] == of_keys[:, None, :])[:, None, None]

    def _in_pattern(self, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        """Which keys queries see by the pattern, from their positions; None without a pattern."""
        if self.mask.block_mask is None or self.pattern is None:
            return None
        kept = pattern_at(self.pattern, self.mask.block_mask.size, queries, keys)
        by_group = (self.groups, -1) if len(kept) > 1 else (1, 1)
        return kept.reshape(1, *by_group, *kept.shape[1:])


def _block_size(heads: int) -> int:
    """How many queries, and how many keys, a block has, so that its scores fit `SCORES_BYTES`.

    Args:
        heads: of all sequences of the batch.
    """
    size = BLOCK
    while size > 128 and heads * size * size * 4 > SCORES_BYTES:
        size //= 2
    return size


def _block(x: jax.Array, tiling: Tiling, number: Any) -> jax.Array:
    """One block of an array, along its second dim."""
    if tiling.count == 1:
        return x
    return lax.dynamic_slice_in_dim(x, number * tiling.size, tiling.size, 1)


def _with_block(x: jax.Array, tiling: Tiling, number: Any, block: jax.Array) -> jax.Array:
    """The array with another block along its second dim."""
    if tiling.count == 1:
        return block
    return lax.dynamic_update_slice_in_dim(x, block, number * tiling.size, 1)


def _padded(x: jax.Array, tiling: Tiling) -> jax.Array:
    """The array with zeros added at the end of its second dim, up to whole blocks."""
    missing = tiling.padded_length - x.shape[1]
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, missing)
    return jnp.pad(x, widths)
