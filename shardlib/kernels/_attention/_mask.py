"""Which keys each query of an attention sees, as far as it is known while tracing.

A mask has two parts, and a key is seen where both let it be seen:

    a band          key - query is at least `-left` and at most `right`; causal is `right = 0`
    a block mask    a table of bools, for blocks of positions: `BlockMask`

Both speak of positions in the whole sequence, which need not begin where an array begins.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.checks import _arguments as check


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Which blocks of keys each block of queries sees, for block-sparse attention.

    Query `i` sees key `j` where `pattern[..., i // size, j // size]` is true. What else masks the
    attention (causal, a window, segments) masks it too.

    Args:
        pattern: bools, `(query blocks, key blocks)` or `(heads, query blocks, key blocks)`, of
            NumPy: it is part of the program.
        size: how many positions a block has. Blocks of fewer than 128 positions save little:
            no smaller block is computed.

    >>> BlockMask(np.tri(4, dtype=bool), 128).lengths
    (512, 512)
    """

    pattern: np.ndarray
    size: int

    def __post_init__(self) -> None:
        takes = (
            "bools of NumPy, `(query blocks, key blocks)` or `(heads, query blocks, key blocks)`"
        )
        check.kind("BlockMask", "pattern", self.pattern, np.ndarray, takes)
        if self.pattern.dtype != bool or self.pattern.ndim not in (2, 3) or not self.pattern.size:
            raise check.refusal("BlockMask", "pattern", self.pattern, takes)
        check.whole("BlockMask", "size", self.size, least=1)
        # What the caller changes later must not change the mask, which is a key of caches.
        pattern = self.pattern.copy()
        pattern.setflags(write=False)
        object.__setattr__(self, "pattern", pattern)

    # A mask is a key of several caches, and is looked up in them once for each head.
    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.size, self.pattern.shape, self.pattern.tobytes()

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockMask) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @property
    def heads(self) -> int | None:
        """How many heads have a pattern each; None if all have the same."""
        if self.pattern.ndim == 2:
            return None
        return len(self.pattern)

    @property
    def lengths(self) -> tuple[int, int]:
        """How many positions of queries and of keys the pattern covers."""
        queries, keys = self.pattern.shape[-2:]
        return queries * self.size, keys * self.size


@dataclass(frozen=True)
class Mask:
    """The part of a mask that is known while tracing: a band around the query, and blocks.

    Attributes:
        left: how many positions before its own a query sees; None for all of them.
        right: how many positions after its own; 0 is causal, None is all of them.
        block_mask: which blocks of keys each block of queries sees; None for all of them.
    """

    left: int | None = None
    right: int | None = None
    block_mask: BlockMask | None = None

    @property
    def everything(self) -> bool:
        """Whether every query sees every key."""
        return self == Mask()

    def without_needless_bounds(self, nearest: int, farthest: int) -> "Mask":
        """The same mask, where a bound that hides nothing is None.

        Args:
            nearest: the smallest `key - query` of any pair of positions.
            farthest: the largest.
        """
        left, right = self.left, self.right
        if left is not None and -left <= nearest:
            left = None
        if right is not None and right >= farthest:
            right = None
        return Mask(left, right, self.block_mask)

    def band(self, queries: Any, keys: Any) -> Any:
        """Which keys each query sees by the band, `(queries, keys)`; None if it sees all.

        Args:
            queries: the positions of the queries, an array of NumPy or of JAX.
            keys: the positions of the keys, likewise.
        """
        distance = keys[None, :] - queries[:, None]
        kept = None
        if self.right is not None:
            kept = distance <= self.right
        if self.left is not None:
            within = distance >= -self.left
            kept = within if kept is None else kept & within
        return kept

    def of_each_head(self) -> "list[Mask]":
        """The mask of each head; a single one if all heads have the same."""
        if self.block_mask is None or self.block_mask.heads is None:
            return [self]
        masks = []
        for pattern in self.block_mask.pattern:
            masks.append(Mask(self.left, self.right, BlockMask(pattern, self.block_mask.size)))
        return masks

    def seen(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Which keys each query sees, `(queries, keys)`, by their positions.

        The mask must be that of all heads, or of one of them.
        """
        kept = np.ones((len(queries), len(keys)), bool)
        if self.block_mask is not None:
            size = self.block_mask.size
            kept = self.block_mask.pattern[np.ix_(queries // size, keys // size)]
        band = self.band(queries, keys)
        if band is None:
            return kept
        return kept & band

    def pairs(self, queries: "Tiling", keys: "Tiling", starts: tuple[int, int] | None) -> Any:
        """The pairs of a block of queries and a block of keys in which some key may be seen.

        Pairs with the same block of queries follow each other. Where only the running program knows
        at which positions queries and keys start, they are all pairs.

        Args:
            queries: how the queries are cut into blocks.
            keys: how the keys are.
            starts: the positions of the first query and of the first key, if they are known.
        """
        seen = np.ones((queries.count, keys.count), bool)
        if starts is not None:
            edges = (*queries.positions(starts[0]), *keys.positions(starts[1]))
            seen &= self._in_band(*edges)
            if self.block_mask is not None:
                seen &= self._in_pattern(*edges)
        # In row-major order, so that all pairs of a block of queries follow each other.
        return np.argwhere(seen).astype(np.int32)

    def _in_band(self, *edges: np.ndarray) -> np.ndarray | bool:
        """Whether the band has anything in each pair of a block of queries and one of keys.

        Edges are the first and the last positions of blocks of queries, and of those of keys.
        """
        first_query, last_query, first_key, last_key = edges
        seen: np.ndarray | bool = True
        # The smallest `key - query` of a pair of blocks is that of the first key and the last
        # query, the largest that of the last key and the first query.
        if self.right is not None:
            seen = first_key[None, :] - last_query[:, None] <= self.right
        if self.left is not None:
            seen = seen & (last_key[None, :] - first_query[:, None] >= -self.left)
        return seen

    def _in_pattern(self, *edges: np.ndarray) -> np.ndarray:
        """Whether the pattern has anything in each pair of a block of queries and one of keys.

        Edges are the first and the last positions of blocks of queries, and of those of keys.
        """
        assert self.block_mask is not None
        pattern: Any = self.block_mask.pattern
        if pattern.ndim == 3:
            pattern = pattern.any(0)
        # Sums of all entries above and left of each, so that the sum of a rectangle is four reads.
        sums = np.zeros((pattern.shape[0] + 1, pattern.shape[1] + 1), int)
        sums[1:, 1:] = pattern.cumsum(0).cumsum(1)
        first_query, last_query, first_key, last_key = (
            edge // self.block_mask.size for edge in edges
        )
        below, right = last_query[:, None] + 1, last_key[None, :] + 1
        above, left = first_query[:, None], first_key[None, :]
        inside = sums[below, right] - sums[above, right] - sums[below, left] + sums[above, left]
        return inside > 0


@dataclass(frozen=True)
class Tiling:
    """A length that is cut into blocks of a size, of which the last may be shorter."""

    length: int
    size: int

    @property
    def count(self) -> int:
        """How many there are."""
        return math.ceil(self.length / self.size)

    @property
    def padded_length(self) -> int:
        """The length with which the last block is as long as the others."""
        return self.count * self.size

    def positions(self, start: int) -> tuple[np.ndarray, np.ndarray]:
        """The first and last position of each block, for a sequence that starts at `start`."""
        first = np.arange(self.count) * self.size
        last = np.minimum(first + self.size, self.length) - 1
        return first + start, last + start


def pattern_at(pattern: jax.Array, size: int, queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Which keys queries see by the pattern of each head: `(heads, queries, keys)`.

    Nothing is seen where the pattern does not cover a position, of `queries` or of `keys`.
    """
    of_queries = pattern.at[:, queries // size].get(mode="fill", fill_value=False)
    kept = of_queries.at[:, :, keys // size].get(mode="fill", fill_value=False)
    # A negative number would count from the end.
    inside = (queries >= 0)[:, None] & (keys >= 0)[None, :]
    return jnp.logical_and(kept, inside)
