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

from dataclasses import dataclass
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
    q = _grouped(q, k)
    walk = _Walk(attention, q, k, beside)
    wide = compute_dtype(q.dtype)
    batch, _, groups, per_group, _ = q.shape
    rows = (batch, groups, per_group, walk.queries.padded_length)
    totals = jnp.zeros(rows, wide)
    highest = jnp.full(rows, -jnp.inf, wide)
    if beside.sinks is not None:
        # A sink is a score that was seen before all others, and has no value.
        sinks = beside.sinks.astype(wide).reshape(1, groups, per_group, 1)
        highest, totals = jnp.broadcast_to(sinks, rows), totals + 1
    y = jnp.zeros((batch, walk.queries.padded_length, groups, per_group, v.shape[-1]), wide)
    q, k, v = walk.queries_of(q), walk.keys_of(k), walk.keys_of(v)

    def add_pair(sums: Any, pair: Any) -> Any:
        highest, totals, y = sums
        at_queries, at_keys = walk.at(pair)
        z, kept = walk.scores(q, k, pair)
        if kept is not None:
            z = jnp.where(kept, z, -jnp.inf)
        old_highest = at_queries(highest, 3)
        new_highest = jnp.maximum(old_highest, z.max(-1))
        # Where nothing was seen yet, the difference of two infinities would be no number.
        reference = jnp.where(new_highest == -jnp.inf, 0, new_highest)
        rescale = jnp.exp(old_highest - reference)
        e = jnp.exp(z - reference[..., None])
        product = _product("bgrqk,bkgv->bqgrv", e.astype(v.dtype), at_keys(v, 1))
        y_block = at_queries(y, 1) * rescale.transpose(0, 3, 1, 2)[..., None] + product
        total = at_queries(totals, 3) * rescale + e.sum(-1)
        highest = walk.put_queries(highest, new_highest, 3, pair)
        totals = walk.put_queries(totals, total, 3, pair)
        return highest, totals, walk.put_queries(y, y_block, 1, pair)

    differing = varying(q)
    start = tuple(as_varying(x, differing) for x in (highest, totals, y))
    highest, totals, y = _fold(add_pair, start, walk.pairs)
    length = walk.queries.length
    y, highest, totals = y[:, :length], highest[..., :length], totals[..., :length]
    seen = totals != 0
    divisor = jnp.where(seen, totals, 1)
    y = y / divisor.transpose(0, 3, 1, 2)[..., None]
    lse = jnp.where(seen, highest + jnp.log(divisor), -jnp.inf)
    heads = groups * per_group
    y = y.astype(q.dtype).reshape(batch, length, heads, -1)
    return y, lse.transpose(0, 3, 1, 2).reshape(batch, length, heads)


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
    q, y, y_gradient = (_grouped(x, k) for x in (q, results[0], gradients[0]))
    lse, lse_gradient = (_grouped(x, k).transpose(0, 2, 3, 1) for x in (results[1], gradients[1]))
    walk = _Walk(attention, q, k, beside)
    wide = lse.dtype
    # dy . y - dlse, one number for each query and head.
    delta = jnp.einsum("bqgrv,bqgrv->bgrq", y.astype(wide), y_gradient.astype(wide))
    delta -= lse_gradient
    # A query that saw nothing has no exponentials that are to be made again.
    lse = jnp.where(lse == -jnp.inf, 0, lse)
    whole = (q, k, v)
    q, y_gradient = walk.queries_of(q), walk.queries_of(y_gradient)
    k, v = walk.keys_of(k), walk.keys_of(v)
    padded_lse, padded_delta = walk.queries_of(lse, 3), walk.queries_of(delta, 3)

    def add_pair(sums: Any, pair: Any) -> Any:
        q_sum, k_sum, v_sum = sums
        at_queries, at_keys = walk.at(pair)
        z, kept = walk.scores(q, k, pair)
        p = jnp.exp(z - at_queries(padded_lse, 3)[..., None])
        if kept is not None:
            p = jnp.where(kept, p, 0)
        dy = at_queries(y_gradient, 1)
        v_gradient = _product("bgrqk,bqgrv->bkgv", p.astype(dy.dtype), dy)
        dp = _product("bqgrv,bkgv->bgrqk", dy, at_keys(v, 1))
        dz = p * (dp - at_queries(padded_delta, 3)[..., None])
        if attention.cap is not None:
            dz *= 1 - (z / attention.cap) ** 2  # the derivative of cap * tanh(. / cap)
        dz = (dz * attention.scale).astype(q.dtype)
        q_gradient = _product("bgrqk,bkgd->bqgrd", dz, at_keys(k, 1))
        k_gradient = _product("bgrqk,bqgrd->bkgd", dz, at_queries(q, 1))
        q_sum = walk.put_queries(q_sum, at_queries(q_sum, 1) + q_gradient, 1, pair)
        k_sum = walk.put_keys(k_sum, at_keys(k_sum, 1) + k_gradient, 1, pair)
        v_sum = walk.put_keys(v_sum, at_keys(v_sum, 1) + v_gradient, 1, pair)
        return q_sum, k_sum, v_sum

    start = tuple(as_varying(jnp.zeros(x.shape, wide), varying(q)) for x in (q, k, v))
    sums = _fold(add_pair, start, walk.pairs)
    rounded: list[Any] = []
    for x, total in zip(whole, sums, strict=True):
        rounded.append(total[:, : x.shape[1]].astype(x.dtype))
    q_sum, k_sum, v_sum = rounded
    q_sum = q_sum.reshape(*q_sum.shape[:2], -1, q_sum.shape[-1])
    if beside.sinks is None:
        return q_sum, k_sum, v_sum, None
    # A sink's share of a query, exp(sink - lse), takes part in no value.
    sinks = _grouped(beside.sinks.astype(wide)[None, None], k).transpose(0, 2, 3, 1)
    sinks_gradient = -(jnp.exp(sinks - lse) * delta).sum((0, 3))
    return q_sum, k_sum, v_sum, sinks_gradient.reshape(-1)


def _fold(add: Any, start: Any, pairs: np.ndarray) -> Any:
    """What is left of the sums after all pairs; a single one needs no loop."""
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
    return jnp.einsum(letters, x, y, preferred_element_type=compute_dtype(x.dtype))


class _Walk:
    """The pairs of blocks that a loop walks over, and what belongs to each of them."""

    def __init__(self, attention: Attention, q: jax.Array, k: jax.Array, beside: Beside) -> None:
        batch, queries, groups, per_group, _ = q.shape
        size = _block_size(batch * groups * per_group)
        self.attention = attention
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

    def queries_of(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """An array whose dim is that of the queries, filled up to whole blocks with zeros."""
        return _filled(x, dim, self.queries.padded_length)

    def keys_of(self, x: jax.Array, dim: int = 1) -> jax.Array:
        """An array whose dim is that of the keys, filled up to whole blocks with zeros."""
        return _filled(x, dim, self.keys.padded_length)

    def at(self, pair: Any) -> tuple[Any, Any]:
        """Two functions of an array and a dim, which take the pair's queries and its keys of it."""

        def queries(x: jax.Array, dim: int) -> jax.Array:
            return _block(x, self.queries, pair[0], dim)

        def keys(x: jax.Array, dim: int) -> jax.Array:
            return _block(x, self.keys, pair[1], dim)

        return queries, keys

    def put_queries(self, x: jax.Array, block: jax.Array, dim: int, pair: Any) -> jax.Array:
        """The array with another block for the pair's queries."""
        return _with_block(x, self.queries, pair[0], dim, block)

    def put_keys(self, x: jax.Array, block: jax.Array, dim: int, pair: Any) -> jax.Array:
        """The array with another block for the pair's keys."""
        return _with_block(x, self.keys, pair[1], dim, block)

    def scores(self, q: jax.Array, k: jax.Array, pair: Any) -> tuple[jax.Array, Any]:
        """The scores of a pair of blocks, bgrqk, and which of them count; None if all do."""
        at_queries, at_keys = self.at(pair)
        z = _product("bqgrd,bkgd->bgrqk", at_queries(q, 1), at_keys(k, 1)) * self.attention.scale
        if self.attention.cap is not None:
            z = self.attention.cap * jnp.tanh(z / self.attention.cap)
        return z, self._kept(pair)

    def _kept(self, pair: Any) -> jax.Array | None:
        """Which scores of a pair of blocks count, with dims of one where they do not differ."""
        at_queries, at_keys = self.at(pair)
        query_numbers = pair[0] * self.queries.size + jnp.arange(self.queries.size)
        key_numbers = pair[1] * self.keys.size + jnp.arange(self.keys.size)
        queries, keys = query_numbers + self.starts[0], key_numbers + self.starts[1]
        kept: list[jax.Array] = []
        band = self.attention.mask.band(queries, keys)
        if band is not None:
            kept.append(band)
        if self.keys.padded_length != self.keys.length:
            kept.append((key_numbers < self.keys.length)[None, :])
        if self.query_segments is not None:
            own, other = at_queries(self.query_segments, 1), at_keys(self.key_segments, 1)
            kept.append((own[:, :, None] == other[:, None, :])[:, None, None])
        blocks = self.attention.mask.blocks
        if blocks is not None:
            pattern = pattern_at(self.pattern, blocks.size, queries, keys)
            by_group = (self.groups, -1) if len(pattern) > 1 else (1, 1)
            kept.append(pattern.reshape(1, *by_group, *pattern.shape[1:]))
        if not kept:
            return None
        together = kept[0]
        for further in kept[1:]:
            together = together & further
        return together


def _block(x: jax.Array, blocks: Blocks, number: Any, dim: int) -> jax.Array:
    """One block of an array, along a dim."""
    if blocks.count == 1:
        return x
    return lax.dynamic_slice_in_dim(x, number * blocks.size, blocks.size, dim)


def _with_block(x: jax.Array, blocks: Blocks, number: Any, dim: int, block: Any) -> jax.Array:
    """The array with another block along a dim."""
    if blocks.count == 1:
        return block
    return lax.dynamic_update_slice_in_dim(x, block, number * blocks.size, dim)


def _block_size(heads: int) -> int:
    """How many queries, and how many keys, a block has, so that its scores are not too many.

    Args:
        heads: of all sequences of the batch.
    """
    size = BLOCK
    while size > 128 and heads * size * size * 4 > SCORES_BYTES:
        size //= 2
    return size


def _filled(x: jax.Array, dim: int, length: int) -> jax.Array:
    """The array with zeros behind it along a dim, up to a length."""
    if x.shape[dim] == length:
        return x
    widths = [(0, 0)] * x.ndim
    widths[dim] = (0, length - x.shape[dim])
    return jnp.pad(x, widths)
