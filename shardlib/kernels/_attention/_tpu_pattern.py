"""Patterns of blocks as our kernels for TPUs read them.

A kernel takes scores in blocks of its own, which need not be those of the pattern. For a block of
keys it reads which of the pattern's blocks each query sees, as the bits of words: these are rows,
with a lane for each query. For each key it reads which of the bits is the key's:

    bit of each key       0 0 0 0 1 1 1 1 2 2 ..     a column: the pattern's block that has the key
    word of a query       ..10110                    a lane of a row: blocks 1, 2 and 4 are seen

A table says of which pairs of the kernel's blocks anything is computed at all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

WORD = 32  # bits of a word
HALF_BITS = WORD // 2
HALF = 2**HALF_BITS - 1


class PatternBits(NamedTuple):
    """A pattern of blocks for queries and keys that start somewhere.

    Attributes:
        words: `(heads or 1, blocks of keys, words, queries)`.
        bits: which bit of the words is that of each key, `(keys,)`.
    """

    words: jax.Array
    bits: jax.Array


class KeyBlocks(NamedTuple):
    """How many blocks of keys there are, and how many keys each has."""

    number: int
    size: int


def pattern_bits(
    pattern: jax.Array, size: int, starts: jax.Array, queries: int, keys: KeyBlocks
) -> PatternBits:
    """The bits of a pattern.

    What the pattern does not cover is not seen.

    Args:
        pattern: `(heads or 1, query blocks, key blocks)`, bools.
        size: how many positions a block of the pattern has.
        starts: the positions of the first query and of the first key.
        queries: how many queries there are.
        keys: the kernel's blocks of keys.
    """
    # A block of keys touches at most so many blocks of the pattern, wherever it begins.
    most = -(-(keys.size - 1) // size) + 1
    words = -(-most // WORD)
    key_blocks = (starts[1] + jnp.arange(keys.number * keys.size)) // size
    first = key_blocks[:: keys.size]
    columns = first[:, None] + jnp.arange(words * WORD)
    seen = pattern.at[:, :, columns].get(mode="fill", fill_value=False)
    # A negative number would count from the end.
    seen = jnp.logical_and(seen, columns >= 0)
    seen = seen.reshape(*seen.shape[:3], words, WORD).astype(jnp.uint32)
    # The sum of different bits is the word that has all of them.
    packed = (seen << jnp.arange(WORD, dtype=jnp.uint32)).sum(-1, dtype=jnp.uint32)
    query_blocks = (starts[0] + jnp.arange(queries)) // size
    rows = packed.at[:, query_blocks].get(mode="fill", fill_value=0)
    rows = jnp.where((query_blocks >= 0)[None, :, None, None], rows, 0)
    words_of_queries = lax.bitcast_convert_type(rows, jnp.int32).transpose(0, 2, 3, 1)
    bits = key_blocks.reshape(keys.number, keys.size) - first[:, None]
    return PatternBits(words_of_queries, bits.reshape(-1).astype(jnp.int32))


def seen_pairs(words: jax.Array, query_blocks: int) -> jax.Array:
    """Which pairs of blocks a pattern leaves anything of, `(heads or 1, query, key blocks)`.

    Args:
        words: those of `PatternBits`.
        query_blocks: into how many blocks the queries are cut.
    """
    heads, key_blocks, count, queries = words.shape
    blocks = (heads, key_blocks, count, query_blocks, queries // query_blocks)
    return (words.reshape(blocks) != 0).any((2, 4)).swapaxes(1, 2)


def next_seen(seen: jax.Array) -> jax.Array:
    """For each entry of a row the index of the next one that is seen, which may be itself.

    After the last one that is seen it is the last one, and in a row without any it is -1.

    >>> next_seen(jnp.array([[0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool)).tolist()
    [[1, 1, 3, 3, 3], [-1, -1, -1, -1, -1]]
    """
    row = seen.ndim - 1
    number = lax.broadcasted_iota(jnp.int32, seen.shape, row)
    none = seen.shape[row]
    # Running minima from the end, and running maxima from the beginning.
    following = lax.cummin(jnp.where(seen, number, none), axis=row, reverse=True)
    before = lax.cummax(jnp.where(seen, number, -1), axis=row)
    return jnp.where(following < none, following, before)


def packed(table: jax.Array) -> jax.Array:
    """The entries of a table, two of them in each word, for `unpacked`.

    A core has little scalar memory.

    >>> table = packed(jnp.array([[1, 3, -1], [0, 2, 5]]))
    >>> [int(unpacked(table, entry)) for entry in range(6)]
    [1, 3, -1, 0, 2, 5]
    """
    entries = table.reshape(-1).astype(jnp.int32)
    pairs = jnp.pad(entries, (0, entries.size % 2)).reshape(-1, 2)
    return (pairs[:, 0] & HALF) | (pairs[:, 1] << HALF_BITS)


def unpacked(table: Any, entry: Any) -> Any:
    """An entry of a table that `packed` made, by its index in row-major order.

    `table` may be a reference to it, inside a kernel.
    """
    pair = table[lax.shift_right_logical(entry, 1)]
    # Shifted to the top and back down, a number gets the bits of its sign again.
    at_top = lax.shift_left(pair, HALF_BITS * (1 - (entry & 1)))
    return lax.shift_right_arithmetic(at_top, HALF_BITS)


def seen_by_bits(words: jax.Array, bits: jax.Array) -> jax.Array:
    """Which keys queries see, `(keys, queries)`, inside a kernel.

    Args:
        words: `(words, queries)`, of one block of keys.
        bits: of each key, a column `(keys, 1)`.
    """
    # Mostly one word has the bits of all blocks of the pattern, and nothing is selected.
    word = words[:1]
    for number in range(1, words.shape[0]):
        word = jnp.where(bits >= number * WORD, words[number : number + 1], word)
    shape = (bits.shape[0], words.shape[1])
    word = jnp.broadcast_to(word, shape)
    shift = jnp.broadcast_to(bits & (WORD - 1), shape)
    return (lax.shift_right_logical(word, shift) & 1) != 0
