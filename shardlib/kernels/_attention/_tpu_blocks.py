"""How large the blocks are that our kernels for attention on TPUs walk over.

Two of each block must fit in a core's fast memory, together with their scores. With a pattern of
blocks there is also a table of all pairs, in a core's scalar memory. Larger blocks are fetched less
often, and smaller ones skip more of what the mask hides.
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
SCORE_BYTES = 20
# The same for a pattern: of the word of bits for each score, and of how far it is shifted.
PATTERN_BYTES = 8


class Blocks(NamedTuple):
    """The most positions that a block of the outer loop has, and one of the inner loop."""

    outer: int
    inner: int


class Lengths(NamedTuple):
    """How many queries and keys a device has."""

    queries: int
    keys: int


# In order of preference. The larger a block of the outer loop is, the less often those of the inner
# loop are fetched.
BLOCKS = (
    Blocks(1024, 512),
    Blocks(512, 512),
    Blocks(512, 256),
    Blocks(256, 256),
    Blocks(256, 128),
    Blocks(128, 128),
)
# The time of a step that computes nothing, as the number of scores that take as long.
EMPTY_STEP_COST = 2**16
# Scalar memory has room for so many entries of the table of a pattern's pairs. A row of it has so
# many blocks at most, since their indices are signed and of 16 bits.
MOST_TABLE_ENTRIES = 2**18
MOST_BLOCKS = 2**15


def fitting_blocks(q: Any, v: Any, mask: Mask, kind: str) -> list[Blocks]:
    """The blocks that fit in the fast memory of a kind of device, in order of preference.

    Args:
        q: queries, or their shape and dtype, with the size of a head last.
        v: values likewise.
        mask: the mask.
        kind: the kind of device.
    """
    # More than `COMFORTABLE` is asked for with 4 MiB for the compiler: see `parameters`.
    room = max(COMFORTABLE, vmem_bytes(kind) - 4 * MIB)
    fitting = []
    for blocks in BLOCKS:
        if used_bytes(blocks, q, v, mask) > room:
            continue
        # Under a narrow band, smaller inner blocks compute and fetch less of what is hidden.
        if _band_width(mask) < blocks.outer:
            blocks = Blocks(blocks.outer, min(blocks.inner, 256))
        fitting.append(blocks)
    return fitting


def _band_width(mask: Mask) -> float:
    """How many keys a query sees by the band, besides the one at its own position."""
    if mask.left is None or mask.right is None:
        return math.inf
    return mask.left + mask.right


def pattern_blocks(
    fitting: list[Blocks], lengths: Lengths, attention: Attention, heads: int
) -> Blocks | None:
    """The fastest blocks for a pattern; None if scalar memory has no room for its table of pairs.

    Smaller blocks compute fewer scores that the pattern hides, and take more steps.

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
    """The blocks, of these choices, with which a pattern is computed fastest.

    The other arguments are as for `pattern_blocks`. Queries are taken for the outer loop. Patterns
    are mostly symmetric, so the same blocks will do where keys are the outer loop.
    """
    work = []
    for blocks in choices:
        queries = Tiling(lengths.queries, block_size(lengths.queries, blocks.outer))
        keys = Tiling(lengths.keys, block_size(lengths.keys, blocks.inner))
        # All scores of a pair are computed if any of them is seen.
        scores = len(mask.pairs(queries, keys, starts)) * queries.size * keys.size
        work.append(scores + EMPTY_STEP_COST * queries.count * keys.count)
    return choices[work.index(min(work))]


def _block_counts(blocks: Blocks, lengths: Lengths) -> list[tuple[int, int]]:
    """How many blocks of queries and of keys there are, in each of the two orders of loops."""
    counts = []
    for queries, keys in (blocks, reversed(blocks)):
        query_blocks = lengths.queries // block_size(lengths.queries, queries)
        counts.append((query_blocks, lengths.keys // block_size(lengths.keys, keys)))
    return counts


def used_bytes(blocks: Blocks, q: Any, v: Any, mask: Mask) -> int:
    """The bytes of fast memory that blocks and their scores take, in the kernel that takes most."""
    # A position has a row of `q` or `k` and one of `v` or `y`. Rows fill whole tiles of lanes.
    numbers = sum(x.shape[3] + -x.shape[3] % LANES for x in (q, v))
    itemsize = jnp.dtype(q.dtype).itemsize
    # Each block has two buffers. The outer loop has operands, results, and sums in float32.
    outer_row = numbers * (4 * itemsize + 4)
    inner_row = numbers * 2 * itemsize
    score = SCORE_BYTES
    if mask.block_mask is not None:
        score += PATTERN_BYTES
    scores = score * blocks.outer * blocks.inner
    return scores + outer_row * blocks.outer + inner_row * blocks.inner


def block_size(length: int, limit: int) -> int:
    """How many queries or keys a block has: the most whole tiles that divide the length evenly.

    Args:
        length: how many queries or keys there are, a multiple of `LANES`.
        limit: the most that a block may have.
    """
    tiles = length // LANES
    for count in range(limit // LANES, 1, -1):
        if tiles % count == 0:
            return count * LANES
    return LANES
