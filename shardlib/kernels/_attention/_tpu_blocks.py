"""How large the blocks are that our kernels for attention on TPUs walk over.

Blocks must fit a core's fast memory, two of each with their scores. With a pattern of blocks there
is a table of all pairs besides, in a core's memory for whole numbers. Larger blocks are fetched
less often, and smaller ones leave out more of what nobody sees.
"""

import functools
import math
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardlib.kernels._attention._mask import Mask, Tiling
from shardlib.kernels._attention._reference import Attention
from shardlib.kernels._tpu import COMFORTABLE, LANES, MIB, vmem_bytes

# Bytes of fast memory for each score of a block: of z, p and the gradients to both, in float32, and
# of the mask.
SCORE = 20


class Blocks(NamedTuple):
    """How many positions the blocks of the outer loop and those of the inner loop have, at most."""

    outer: int
    inner: int


class Lengths(NamedTuple):
    """How many queries and keys a device has."""

    queries: int
    keys: int


# In the order of preference. The larger a block of the outer loop is, the less often those of the
# inner loop are fetched.
BLOCKS = (
    Blocks(1024, 512),
    Blocks(512, 512),
    Blocks(512, 256),
    Blocks(256, 256),
    Blocks(256, 128),
    Blocks(128, 128),
)
# The cost of a step that computes nothing, as the number of scores that take as long.
EMPTY_STEP_COST = 2**16
# How many entries the table of a pattern's pairs may have in a core's memory for whole numbers, and
# how many blocks a row of it: their numbers have 16 bits.
MOST_TABLE_ENTRIES = 2**18
MOST_BLOCKS = 2**15


def fitting_blocks(q: Any, v: Any, mask: Mask, kind: str) -> list[Blocks]:
    """The blocks that fit the fast memory of a kind of device, in the order of preference.

    Args:
        q: queries, or their shape and dtype, with the size of a head last.
        v: values likewise.
        mask: the mask.
        kind: the kind of device.
    """
    # More than `COMFORTABLE` is asked for with some for the compiler, of what a core has.
    room = max(COMFORTABLE, vmem_bytes(kind) - 4 * MIB)
    fitting = []
    for blocks in BLOCKS:
        if used_bytes(blocks, q, v, mask) > room:
            continue
        # Of a narrow band, smaller inner blocks compute and fetch less that nobody sees.
        if _width(mask) < blocks.outer:
            blocks = Blocks(blocks.outer, min(blocks.inner, 256))
        fitting.append(blocks)
    return fitting


def _width(mask: Mask) -> float:
    """How many keys besides the one at its own position a query sees of a band."""
    if mask.left is None or mask.right is None:
        return math.inf
    return mask.left + mask.right


def pattern_blocks(
    fitting: list[Blocks], lengths: Lengths, attention: Attention, heads: int
) -> Blocks | None:
    """The blocks with which a pattern is computed soonest: not too large for it, nor too small.

    It is None where a core's memory for whole numbers holds no table of the pattern's pairs.

    Args:
        fitting: blocks that fit fast memory.
        lengths: how many queries and keys there are.
        attention: which attention.
        heads: how many heads there are.
    """
    block_mask = attention.mask.block_mask
    assert block_mask is not None
    patterns = 1 if block_mask.heads is None else heads
    choices = []
    for blocks in fitting:
        rows, columns = _block_counts(blocks, lengths)
        fits = patterns * max(rows[0] * rows[1], columns[0] * columns[1]) <= MOST_TABLE_ENTRIES
        if fits and max(*rows, *columns) <= MOST_BLOCKS:
            choices.append(blocks)
    if not choices:
        return None
    return _least_work(tuple(choices), lengths, attention.mask, attention.starts)


@functools.lru_cache(maxsize=256)
def _least_work(
    choices: tuple[Blocks, ...], lengths: Lengths, mask: Mask, starts: tuple[int, int] | None
) -> Blocks:
    """Those of some blocks with which a pattern is computed soonest.

    Arguments are those of `pattern_blocks`. Patterns of queries and keys are mostly alike, so that
    both orders of loops may have the same blocks.
    """
    work = []
    for blocks in choices:
        queries = Tiling(lengths.queries, block_size(lengths.queries, blocks.outer))
        keys = Tiling(lengths.keys, block_size(lengths.keys, blocks.inner))
        # Whatever is seen of a pair, all of its scores are computed.
        scores = len(mask.pairs(queries, keys, starts)) * queries.size * keys.size
        work.append(scores + EMPTY_STEP_COST * queries.count * keys.count)
    return choices[work.index(min(work))]


def _block_counts(blocks: Blocks, lengths: Lengths) -> list[tuple[int, int]]:
    """How many blocks of queries and of keys there are, in both orders of loops."""
    counts = []
    for queries, keys in (blocks, reversed(blocks)):
        query_blocks = lengths.queries // block_size(lengths.queries, queries)
        counts.append((query_blocks, lengths.keys // block_size(lengths.keys, keys)))
    return counts


def used_bytes(blocks: Blocks, q: Any, v: Any, mask: Mask) -> int:
    """The bytes of fast memory that blocks and their scores take, in the kernel that takes most."""
    # Rows of a block fill whole tiles of lanes.
    row = sum(x.shape[3] + -x.shape[3] % LANES for x in (q, v))
    itemsize = jnp.dtype(q.dtype).itemsize
    # Everything is there twice, while one is computed on and the other copied. The outer loop has
    # results and sums in float32, too.
    outer = row * (4 * itemsize + 4)
    inner = row * 2 * itemsize
    # A pattern's words and bits are shifted for each score.
    score = SCORE if mask.block_mask is None else SCORE + 8
    return score * blocks.outer * blocks.inner + outer * blocks.outer + inner * blocks.inner


def block_size(length: int, limit: int) -> int:
    """How many queries or keys a block has: whole tiles, as many as divide the length evenly.

    Args:
        length: how many queries or keys there are, a multiple of `LANES`.
        limit: the most that a block may have.
    """
    tiles = length // LANES
    for count in range(limit // LANES, 1, -1):
        if tiles % count == 0:
            return count * LANES
    return LANES
