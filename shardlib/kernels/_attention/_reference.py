"""Attention block by block, in plain JAX: the specification.

For a query `q` and the keys `k_j` that it sees, with `z_j = scale * q . k_j`, softly capped to
`cap * tanh(z_j / cap)`:

    lse = log(sum_j exp z_j + exp sink)        y = sum_j exp(z_j - lse) v_j

A query that sees nothing has `y = 0` and `lse = -inf`. Products are taken in the dtype of the
arrays and added up in float32 or wider, in which everything else is computed.

Queries and keys are cut into blocks. One loop walks over the pairs of blocks in which a query may
see a key, and keeps for each query three things, relative to its highest score so far (online
softmax, Milakov and Gimelshein, 2018; its use in attention is FlashAttention's, Dao et al., 2022):

             key blocks            highest   the highest score
           0   1   2   3           total     sum_j exp(z_j - highest)
     0   [ x           ]           y         sum_j exp(z_j - highest) v_j
     1   [ x   x       ]
     2   [ x   x   x   ]           x: the pairs of a causal mask
     3   [ x   x   x   x ]

Backward walks over the same pairs, makes the scores again from `lse`, and adds up

    dz_j = p_j (dy . v_j - dy . y + dlse)      p_j = exp(z_j - lse)

so that memory is linear in the lengths, forward and backward.
"""

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.kernels._attention._mask import Blocks, Mask, pattern_at
from shardlib.kernels._rows import compute_dtype
from shardlib.kernels._shards import as_varying, varying

BLOCK = 512  # queries or keys of a block, at most
SCORES_BYTES = 2**26  # of the scores that are in memory at a time


@dataclass(frozen=True)
class Attention:
    """Everything that defines an attention, except for its arrays.

    It is hashable and static: a program is compiled for each.
    """

    scale: float
    mask: Mask
    cap: float | None = None
    # The positions of the first query and of the first key; None if arrays say them.
    starts: tuple[int, int] | None = (0, 0)
    own_segments: bool = False  # whether queries and keys have the same segments
    with_lse: bool = False  # whether the caller is given the log-sum-exp


class Beside(NamedTuple):
    """The arrays of an attention besides queries, keys and values; each may be None."""

    query_segments: Any = None  # (batch, queries), whole numbers
    key_segments: Any = None  # (batch, keys)
    sinks: Any = None  # (heads,), a score for each that has no value
    starts: Any = None  # two whole numbers, where `Attention.starts` is None
    pattern: Any = None  # (heads or one, query blocks, key blocks), of the mask's blocks


# Letters of the products: b batch, g key heads, r query heads of each, q and k the positions of
# queries and keys, d the size of a head, v that of a value.
def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, beside: Beside, *, attention: Attention
) -> tuple[jax.Array, jax.Array]:
    """What each query takes from the values, and its log-sum-exp.

    Args:
        q: (batch, queries, heads, size).
        k: (batch, keys, key heads, size), where each key head serves as many query heads.
        v: (batch, keys, key heads, size of a value).
        beside: the other arrays.
        attention: which attention.

    Returns:
        `(batch, queries, heads, size of a value)` in the dtype of `q`, and `(batch, queries,
        heads)`, wide.
    """
    grouped = _grouped(q, k)
    walk = _Walk(attention, grouped, k, beside)
    blocks = (walk.queries_of(grouped), walk.keys_of(k), walk.keys_of(v))
    start = walk.nothing_seen(grouped, v, beside)
    sums = _fold(partial(_add_pair, walk, blocks), start, walk.pairs)
    y, lse = _results(_Sums(*(x[:, : walk.queries.length] for x in sums)))
    heads = q.shape[2]
    return y.astype(q.dtype).reshape(*q.shape[:3], -1), lse.reshape(*lse.shape[:2], heads)


class _Sums(NamedTuple):
    """What is kept for each query and head while its scores come, block by block; all bqgr...

    Exponentials relative to the highest score do not overflow.
    """

    highest: jax.Array  # score so far, -inf where there is none
    total: jax.Array  # of exp(z - highest)
    y: jax.Array  # the sum of exp(z - highest) v


def _add_pair(walk: "_Walk", blocks: tuple[jax.Array, ...], sums: _Sums, pair: Any) -> _Sums:
    """The sums with the scores of another pair of blocks.

    Args:
        walk: all pairs.
        blocks: queries, keys and values, filled up to whole blocks.
        sums: of all queries.
        pair: the number of the block of queries, and that of keys.
    """
    q, k, v = blocks
    at_queries, at_keys = walk.at(pair)
    z, kept = walk.scores(q, k, pair)
    if kept is not None:
        z = jnp.where(kept, z, -jnp.inf)
    # Only a block of the sums is read and written: the loop updates them in place.
    added = _with_scores(_Sums(*(at_queries(x) for x in sums)), z, at_keys(v))
    return _Sums(*map(partial(walk.put_queries, pair), sums, added))


def _with_scores(sums: _Sums, z: jax.Array, v: jax.Array) -> _Sums:
    """The sums of some queries with scores of further keys, bgrqk, and the values of these."""
    highest = jnp.maximum(sums.highest, _queries_second(z.max(-1)))
    # Where nothing was seen yet, the difference of two infinities would be no number.
    reference = jnp.where(highest == -jnp.inf, 0, highest)
    # What was summed up so far was relative to a lower score.
    rescale = jnp.exp(sums.highest - reference)
    e = jnp.exp(z - _queries_last(reference)[..., None])
    total = sums.total * rescale + _queries_second(e.sum(-1))
    product = _product("bgrqk,bkgv->bqgrv", e.astype(v.dtype), v)
    return _Sums(highest, total, sums.y * rescale[..., None] + product)


def _results(sums: _Sums) -> tuple[jax.Array, jax.Array]:
    """What each query takes from the values, and its log-sum-exp, from the sums of all its keys."""
    seen = sums.total != 0
    divisor = jnp.where(seen, sums.total, 1)
    lse = jnp.where(seen, sums.highest + jnp.log(divisor), -jnp.inf)
    return sums.y / divisor[..., None], lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beside: Beside,
    results: tuple[jax.Array, jax.Array],
    gradients: tuple[jax.Array, jax.Array],
    *,
    attention: Attention,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients to queries, keys, values and sinks.

    That to the sinks, a sum over queries, is wide.

    Args:
        q: as in forward, and so are the next three.
        k: keys.
        v: values.
        beside: the other arrays.
        results: what forward gave.
        gradients: those to the results.
        attention: which attention.
    """
    grouped, y, y_gradient = (_grouped(x, k) for x in (q, results[0], gradients[0]))
    lse, lse_gradient = (_grouped(x, k) for x in (results[1], gradients[1]))
    walk = _Walk(attention, grouped, k, beside)
    # dy . y - dlse, one number for each query and head.
    delta = jnp.einsum("bqgrv,bqgrv->bqgr", y.astype(lse.dtype), y_gradient.astype(lse.dtype))
    delta -= lse_gradient
    # A query that saw nothing has no exponentials that are to be made again.
    lse = jnp.where(lse == -jnp.inf, 0, lse)
    of_queries = [walk.queries_of(x) for x in (grouped, y_gradient, lse, delta)]
    blocks = _Blocks._make([*of_queries, walk.keys_of(k), walk.keys_of(v)])
    q_gradient, k_gradient, v_gradient = _all_gradients(walk, blocks)
    q_gradient = q_gradient.reshape(*q.shape).astype(q.dtype)
    sinks_gradient = None
    if beside.sinks is not None:
        # A sink's share of a query, exp(sink - lse), takes part in no value.
        sinks = _grouped(beside.sinks.astype(lse.dtype)[None, None], k)
        sinks_gradient = -(jnp.exp(sinks - lse) * delta).sum((0, 1)).reshape(-1)
    return q_gradient, k_gradient.astype(k.dtype), v_gradient.astype(v.dtype), sinks_gradient


class _Blocks(NamedTuple):
    """What backward reads of each block: of queries, filled up to whole blocks, then of keys."""

    q: jax.Array
    y_gradient: jax.Array
    lse: jax.Array
    delta: jax.Array
    k: jax.Array
    v: jax.Array


def _all_gradients(walk: "_Walk", blocks: _Blocks) -> list[jax.Array]:
    """The gradients to queries, keys and values over all pairs, wide."""
    start = []
    for x in (blocks.q, blocks.k, blocks.v):
        start.append(as_varying(jnp.zeros(x.shape, blocks.lse.dtype), varying(x)))
    q_sum, k_sum, v_sum = _fold(partial(_add_gradients, walk, blocks), tuple(start), walk.pairs)
    length = walk.keys.length
    return [q_sum[:, : walk.queries.length], k_sum[:, :length], v_sum[:, :length]]


def _add_gradients(walk: "_Walk", blocks: _Blocks, sums: Any, pair: Any) -> Any:
    """The gradients to queries, keys and values with those of another pair of blocks.

    Args:
        walk: all pairs.
        blocks: what they are made from.
        sums: the gradients so far, wide.
        pair: the number of the block of queries, and that of keys.
    """
    q_sum, k_sum, v_sum = sums
    at_queries, at_keys = walk.at(pair)
    p, dz = _score_gradients(walk, blocks, pair)
    dy = at_queries(blocks.y_gradient)
    v_gradient = _product("bgrqk,bqgrv->bkgv", p.astype(dy.dtype), dy)
    q_gradient = _product("bgrqk,bkgd->bqgrd", dz, at_keys(blocks.k))
    k_gradient = _product("bgrqk,bqgrd->bkgd", dz, at_queries(blocks.q))
    return (
        walk.put_queries(pair, q_sum, at_queries(q_sum) + q_gradient),
        walk.put_keys(pair, k_sum, at_keys(k_sum) + k_gradient),
        walk.put_keys(pair, v_sum, at_keys(v_sum) + v_gradient),
    )


def _score_gradients(walk: "_Walk", blocks: _Blocks, pair: Any) -> tuple[jax.Array, jax.Array]:
    """The shares of a pair's keys in its queries, and the gradients to their products, bgrqk."""
    at_queries, at_keys = walk.at(pair)
    z, kept = walk.scores(blocks.q, blocks.k, pair)
    # Relative to the log-sum-exp, exponentials are shares: no sum of them is needed again.
    p = jnp.exp(z - _queries_last(at_queries(blocks.lse))[..., None])
    if kept is not None:
        p = jnp.where(kept, p, 0)
    dp = _product("bqgrv,bkgv->bgrqk", at_queries(blocks.y_gradient), at_keys(blocks.v))
    dz = p * (dp - _queries_last(at_queries(blocks.delta))[..., None])
    cap = walk.attention.cap
    if cap is not None:
        dz *= 1 - (z / cap) ** 2  # the derivative of cap * tanh(. / cap)
    return p, (dz * walk.attention.scale).astype(blocks.q.dtype)


def _queries_last(x: jax.Array) -> jax.Array:
    """An array of queries as those of scores are: bqgr as bgrq."""
    return x.transpose(0, 2, 3, 1)


def _queries_second(x: jax.Array) -> jax.Array:
    """An array of queries as those of results are: bgrq as bqgr."""
    return x.transpose(0, 3, 1, 2)


def _fold(add: Any, start: Any, pairs: np.ndarray) -> Any:
    """What is left of the sums after all pairs; a single one needs no loop."""
    # The compiler sees through a single one, and makes plain attention of it.
    if len(pairs) == 1:
        return add(start, pairs[0])
    return lax.scan(lambda sums, pair: (add(sums, pair), None), start, pairs)[0]


def _grouped(x: jax.Array, k: jax.Array) -> jax.Array:
    """An array of heads, with two dims for them: key heads, and the heads of each.

    Args:
        x: (batch, queries, heads, ...).
        k: the keys.
    """
    batch, queries, heads, *rest = x.shape
    groups = k.shape[2]
    return x.reshape(batch, queries, groups, heads // groups, *rest)


def _product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product of two blocks, added up wide."""
    # Of 16 bits each product is exact in float32, and is rounded once, as a part of a sum.
    return jnp.einsum(letters, x, y, preferred_element_type=compute_dtype(x.dtype))


class _Walk:
    """The pairs of blocks that a loop walks over, and what belongs to each of them."""

    def __init__(self, attention: Attention, q: jax.Array, k: jax.Array, beside: Beside) -> None:
        batch, queries, groups, per_group, _ = q.shape
        size = _block_size(batch * groups * per_group)
        self.attention = attention
        # Short sequences are a single block of their own length, without anything to fill up.
        self.queries = Blocks(queries, min(size, queries))
        self.keys = Blocks(k.shape[1], min(size, k.shape[1]))
        self.pairs = attention.mask.pairs(self.queries, self.keys, attention.starts)
        self.query_segments = self.key_segments = None
        if beside.query_segments is not None:
            self.query_segments = self.queries_of(beside.query_segments)
            self.key_segments = self.keys_of(beside.key_segments)
        self.starts = beside.starts
        if attention.starts is not None:
            self.starts = np.array(attention.starts, np.int32)
        self.pattern = beside.pattern
        self.groups = groups

    def nothing_seen(self, q: jax.Array, v: jax.Array, beside: Beside) -> _Sums:
        """The sums before any key is seen."""
        wide = compute_dtype(q.dtype)
        batch, _, groups, per_group, _ = q.shape
        shape = (batch, self.queries.padded_length, groups, per_group)
        highest, total = jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide)
        # A sink is a score that was seen before all others, and has no value.
        if beside.sinks is not None:
            sinks = beside.sinks.astype(wide)
            highest, total = highest.at[:].set(sinks.reshape(groups, per_group)), total + 1
        sums = (highest, total, jnp.zeros((*shape, v.shape[-1]), wide))
        return _Sums._make(as_varying(x, varying(q)) for x in sums)

    def queries_of(self, x: jax.Array) -> jax.Array:
        """An array whose second dim is that of the queries, filled up to whole blocks."""
        return _filled(x, self.queries)

    def keys_of(self, x: jax.Array) -> jax.Array:
        """An array whose second dim is that of the keys, filled up to whole blocks."""
        return _filled(x, self.keys)

    def at(self, pair: Any) -> tuple[Any, Any]:
        """Two functions of an array, which take the pair's queries and the pair's keys of it."""

        def queries(x: jax.Array) -> jax.Array:
            return _block(x, self.queries, pair[0])

        def keys(x: jax.Array) -> jax.Array:
            return _block(x, self.keys, pair[1])

        return queries, keys

    def put_queries(self, pair: Any, x: jax.Array, block: jax.Array) -> jax.Array:
        """The array with another block for the pair's queries."""
        return _with_block(x, self.queries, pair[0], block)

    def put_keys(self, pair: Any, x: jax.Array, block: jax.Array) -> jax.Array:
        """The array with another block for the pair's keys."""
        return _with_block(x, self.keys, pair[1], block)

    def scores(self, q: jax.Array, k: jax.Array, pair: Any) -> tuple[jax.Array, Any]:
        """The scores of a pair of blocks, bgrqk, and which of them count; None if all do."""
        at_queries, at_keys = self.at(pair)
        z = _product("bqgrd,bkgd->bgrqk", at_queries(q), at_keys(k)) * self.attention.scale
        if self.attention.cap is not None:
            z = self.attention.cap * jnp.tanh(z / self.attention.cap)
        masks = [mask for mask in self._masks(pair) if mask is not None]
        if not masks:
            return z, None
        return z, functools.reduce(jnp.logical_and, masks)

    def _masks(self, pair: Any) -> list[jax.Array | None]:
        """What each part of the mask leaves of a pair's scores, with dims of one."""
        query_numbers = pair[0] * self.queries.size + jnp.arange(self.queries.size)
        key_numbers = pair[1] * self.keys.size + jnp.arange(self.keys.size)
        queries, keys = query_numbers + self.starts[0], key_numbers + self.starts[1]
        inside = None
        if self.keys.padded_length != self.keys.length:
            inside = (key_numbers < self.keys.length)[None, :]
        return [
            self.attention.mask.band(queries, keys),
            inside,
            self._same_segment(pair),
            self._in_pattern(queries, keys),
        ]

    def _same_segment(self, pair: Any) -> jax.Array | None:
        """Which keys of a pair are of the segment of its queries; None if there are no segments."""
        if self.query_segments is None:
            return None
        at_queries, at_keys = self.at(pair)
        own, other = at_queries(self.query_segments), at_keys(self.key_segments)
        return (own[:, :, None] == other[:, None, :])[:, None, None]

    def _in_pattern(self, queries: jax.Array, keys: jax.Array) -> jax.Array | None:
        """Which keys the pattern leaves to queries, by their positions; None if there is none."""
        blocks = self.attention.mask.blocks
        if blocks is None:
            return None
        pattern = pattern_at(self.pattern, blocks.size, queries, keys)
        by_group = (self.groups, -1) if len(pattern) > 1 else (1, 1)
        return pattern.reshape(1, *by_group, *pattern.shape[1:])


def _block(x: jax.Array, blocks: Blocks, number: Any) -> jax.Array:
    """One block of an array, along its second dim."""
    if blocks.count == 1:
        return x
    return lax.dynamic_slice_in_dim(x, number * blocks.size, blocks.size, 1)


def _with_block(x: jax.Array, blocks: Blocks, number: Any, block: jax.Array) -> jax.Array:
    """The array with another block along its second dim."""
    if blocks.count == 1:
        return block
    return lax.dynamic_update_slice_in_dim(x, block, number * blocks.size, 1)


def _block_size(heads: int) -> int:
    """How many queries, and how many keys, a block has, so that its scores are not too many.

    Args:
        heads: of all sequences of the batch.
    """
    size = BLOCK
    while size > 128 and heads * size * size * 4 > SCORES_BYTES:
        size //= 2
    return size


def _filled(x: jax.Array, blocks: Blocks) -> jax.Array:
    """The array with zeros behind it along its second dim, up to whole blocks."""
    missing = blocks.padded_length - x.shape[1]
    if not missing:
        return x
    widths = [(0, 0)] * x.ndim
    widths[1] = (0, missing)
    return jnp.pad(x, widths)
