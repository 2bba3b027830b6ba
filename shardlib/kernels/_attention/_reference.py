"""Attention block by block, in plain JAX: the specification.

For a query `q` and the keys `k_j` that it sees, with the score `z_j = scale * q . k_j`, softly
capped to `cap * tanh(z_j / cap)` where there is a cap:

    lse = log(sum_j exp z_j + exp sink)        y = sum_j exp(z_j - lse) v_j

A query that sees nothing has `y = 0` and `lse = -inf`. Products are taken of numbers in the dtype
of the arrays, and summed in float32, or in float64 for arrays of that: in this dtype, called *wide*
here, everything else is computed.

One loop walks over the pairs of blocks in which a query may see a key (`_pairs`), and keeps three
sums for each query, relative to its highest score so far (online softmax, Milakov and Gimelshein,
2018; its use in attention is FlashAttention's, Dao et al., 2022):

    highest   the highest score
    total     sum_j exp(z_j - highest)
    y         sum_j exp(z_j - highest) v_j

Backward walks over the same pairs and makes the scores again. With `p_j = exp(z_j - lse)`, and
`delta = dy . y - dlse`, which is one number for each query:

    dz_j = p_j (dy . v_j - delta)              with a cap, times 1 - (z_j / cap)^2
    dv_j = sum over queries of p_j dy          dq = scale * sum_j dz_j k_j
    dk_j = scale * sum over queries of dz_j q  dsink = - sum over queries of exp(sink - lse) delta

so that memory is linear in the lengths, forward and backward.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardlib.kernels._attention._mask import Mask
from shardlib.kernels._attention._pairs import BlockPairs, PairMask
from shardlib.kernels._rows import compute_dtype
from shardlib.kernels._shards import as_varying, varying

# Kernels compute exponentials to the base of two.
LOG2_E = math.log2(math.e)
# The largest score whose exponent, `score / log(2)`, is finite. Larger scores count as this one.
LARGEST_SCORE = float(jnp.finfo(jnp.float32).max) / LOG2_E


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
    same_segment_ids: bool = False  # whether one array is the segments of queries and of keys
    with_lse: bool = False  # whether the caller is given the log-sum-exp


class SideInputs(NamedTuple):
    """The arrays of an attention besides queries, keys and values, on one device.

    Each may be None.
    """

    query_segments: Any = None  # (batch, queries), whole numbers
    key_segments: Any = None  # (batch, keys)
    sinks: Any = None  # (heads,), a score for each that has no value
    starts: Any = None  # two whole numbers, where `Attention.starts` is None
    pattern: Any = None  # (heads or one, query blocks, key blocks), of the block mask


# Letters of the products: b batch, g key heads, r query heads of each, q and k the positions of
# queries and keys, d the size of a head, v that of a value.
def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, side: SideInputs, *, attention: Attention
) -> tuple[jax.Array, jax.Array]:
    """The output of each query and head, and its log-sum-exp.

    Args:
        q: (batch, queries, heads, size).
        k: (batch, keys, key heads, size), where each key head serves as many query heads.
        v: (batch, keys, key heads, size of a value).
        side: the other arrays.
        attention: which attention.

    Returns:
        `(batch, queries, heads, size of a value)` in the dtype of `q`, and `(batch, queries,
        heads)`, wide.
    """
    grouped = _grouped(q, k)
    scores = _Scores(attention, grouped, k, side)
    blocks = scores.blocks
    padded = _Padded(blocks.pad_queries(grouped), blocks.pad_keys(k), blocks.pad_keys(v))
    before = _initial_sums(padded, side)
    sums = blocks.fold(partial(_add_pair, scores, padded), before)
    y, lse = _results(_Sums(*(x[:, : q.shape[1]] for x in sums)))
    heads = q.shape[2]
    return y.astype(q.dtype).reshape(*q.shape[:3], -1), lse.reshape(*lse.shape[:2], heads)


class _Padded(NamedTuple):
    """Queries, keys and values, padded to whole blocks."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


class _Sums(NamedTuple):
    """What is kept for each query and head while its scores come, block by block; all bqgr...

    Exponentials relative to the highest score do not overflow.
    """

    highest: jax.Array  # score so far, -inf where there is none
    total: jax.Array  # of exp(z - highest)
    y: jax.Array  # the sum of exp(z - highest) v


def _initial_sums(padded: _Padded, side: SideInputs) -> _Sums:
    """The sums before any key is seen."""
    q = padded.q
    wide = compute_dtype(q.dtype)
    shape = q.shape[:4]
    highest, total = jnp.full(shape, -jnp.inf, wide), jnp.zeros(shape, wide)
    # A sink is a score that was seen before all others, and has no value.
    if side.sinks is not None:
        sinks = side.sinks.astype(wide).reshape(shape[2:])
        highest, total = jnp.broadcast_to(sinks, shape), total + 1
    sums = (highest, total, jnp.zeros((*shape, padded.v.shape[-1]), wide))
    return _Sums._make(as_varying(x, varying(q)) for x in sums)


def _add_pair(scores: "_Scores", padded: _Padded, sums: _Sums, pair: Any) -> _Sums:
    """The sums with the scores of another pair of blocks.

    Args:
        scores: of all pairs.
        padded: queries, keys and values.
        sums: of all queries.
        pair: the number of the block of queries, and that of keys.
    """
    blocks = scores.blocks
    z, seen = scores.of(padded.q, padded.k, pair)
    if seen is not None:
        z = jnp.where(seen, z, -jnp.inf)
    # Only a block of the sums is read and written: the loop updates them in place.
    before = _Sums(*(blocks.query_block(x, pair) for x in sums))
    after = _with_scores(before, z, blocks.key_block(padded.v, pair))
    updated = []
    for x, block in zip(sums, after, strict=True):
        updated.append(blocks.with_query_block(x, pair, block))
    return _Sums._make(updated)


def _with_scores(sums: _Sums, z: jax.Array, v: jax.Array) -> _Sums:
    """The sums of some queries with scores of further keys, bgrqk, and the values of these."""
    highest = jnp.maximum(sums.highest, _queries_second(z.max(-1)))
    # Where nothing was seen yet, the difference of two infinities would be nan.
    reference = jnp.where(highest == -jnp.inf, 0, highest)
    # What was summed up so far was relative to a lower score.
    rescale = jnp.exp(sums.highest - reference)
    e = jnp.exp(z - _queries_last(reference)[..., None])
    total = sums.total * rescale + _queries_second(e.sum(-1))
    product = _product("bgrqk,bkgv->bqgrv", e.astype(v.dtype), v)
    return _Sums(highest, total, sums.y * rescale[..., None] + product)


def _results(sums: _Sums) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp of each query, wide, from the sums over all its keys."""
    seen = sums.total != 0
    divisor = jnp.where(seen, sums.total, 1)
    lse = jnp.where(seen, sums.highest + jnp.log(divisor), -jnp.inf)
    return sums.y / divisor[..., None], lse


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    side: SideInputs,
    results: tuple[jax.Array, jax.Array],
    gradients: tuple[jax.Array, jax.Array],
    *,
    attention: Attention,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients to queries, keys, values and sinks.

    The gradient to the sinks is wide: the caller adds up those of all devices, then rounds.

    Args:
        q: as in forward, and so are the next three.
        k: keys.
        v: values.
        side: the other arrays.
        results: what forward gave.
        gradients: those to the results.
        attention: which attention.
    """
    lse, delta = softmax_residuals(results, gradients)
    grouped, y_gradient = _grouped(q, k), _grouped(gradients[0], k)
    scores = _Scores(attention, grouped, k, side)
    blocks = scores.blocks
    operands = _BackwardOperands(
        q=blocks.pad_queries(grouped),
        y_gradient=blocks.pad_queries(y_gradient),
        lse=blocks.pad_queries(_grouped(lse, k)),
        delta=blocks.pad_queries(_grouped(delta, k)),
        k=blocks.pad_keys(k),
        v=blocks.pad_keys(v),
    )
    sums = blocks.fold(partial(_add_gradients, scores, operands), _zero_gradients(operands))
    q_gradient = sums.q[:, : q.shape[1]].reshape(*q.shape).astype(q.dtype)
    k_gradient, v_gradient = sums.k[:, : k.shape[1]], sums.v[:, : k.shape[1]]
    sinks_gradient = sink_gradient(side.sinks, lse, delta)
    return q_gradient, k_gradient.astype(k.dtype), v_gradient.astype(v.dtype), sinks_gradient


def softmax_residuals(
    results: tuple[jax.Array, jax.Array], gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The log-sum-exp and `delta = dy . y - dlse`, for backward; both (batch, queries, heads).

    For a query that saw nothing both are zero. Its log-sum-exp is minus infinity, from which no
    exponentials can be made again, and the gradient to that may be nan, which must reach no key.

    Args:
        results: the output and the log-sum-exp.
        gradients: those to the results.
    """
    y, lse = results
    y_gradient, lse_gradient = gradients
    delta = jnp.einsum("bqhv,bqhv->bqh", y.astype(lse.dtype), y_gradient.astype(lse.dtype))
    delta -= lse_gradient
    sees_nothing = lse == -jnp.inf
    return jnp.where(sees_nothing, 0, lse), jnp.where(sees_nothing, 0, delta)


def sink_gradient(sinks: jax.Array | None, lse: jax.Array, delta: jax.Array) -> jax.Array | None:
    """The gradient to the sinks, wide; None without sinks.

    A sink's softmax weight, `exp(sink - lse)`, has no value to be multiplied by.

    Args:
        sinks: (heads,), or None.
        lse: the log-sum-exp, (batch, queries, heads).
        delta: as of `softmax_residuals`.
    """
    if sinks is None:
        return None
    weight = jnp.exp(sinks.astype(lse.dtype) - lse)
    return -(weight * delta).sum((0, 1))


class _BackwardOperands(NamedTuple):
    """What backward reads of each pair of blocks, padded: four of queries, then two of keys."""

    q: jax.Array
    y_gradient: jax.Array
    lse: jax.Array
    delta: jax.Array
    k: jax.Array
    v: jax.Array


class _Gradients(NamedTuple):
    """The gradients to queries, keys and values so far, padded and wide."""

    q: jax.Array
    k: jax.Array
    v: jax.Array


def _zero_gradients(operands: _BackwardOperands) -> _Gradients:
    """The gradients before any pair."""
    zeros = []
    for x in (operands.q, operands.k, operands.v):
        zeros.append(as_varying(jnp.zeros(x.shape, operands.lse.dtype), varying(x)))
    return _Gradients._make(zeros)


def _add_gradients(
    scores: "_Scores", operands: _BackwardOperands, sums: _Gradients, pair: Any
) -> _Gradients:
    """The gradients with those of another pair of blocks.

    Args:
        scores: of all pairs.
        operands: what they are made from.
        sums: the gradients so far.
        pair: the number of the block of queries, and that of keys.
    """
    blocks = scores.blocks
    p, dz = _score_gradients(scores, operands, pair)
    dy = blocks.query_block(operands.y_gradient, pair)
    q, k = blocks.query_block(operands.q, pair), blocks.key_block(operands.k, pair)
    v_gradient = _product("bgrqk,bqgrv->bkgv", p.astype(dy.dtype), dy)
    q_gradient = _product("bgrqk,bkgd->bqgrd", dz, k)
    k_gradient = _product("bgrqk,bqgrd->bkgd", dz, q)
    q_gradient += blocks.query_block(sums.q, pair)
    k_gradient += blocks.key_block(sums.k, pair)
    v_gradient += blocks.key_block(sums.v, pair)
    return _Gradients(
        blocks.with_query_block(sums.q, pair, q_gradient),
        blocks.with_key_block(sums.k, pair, k_gradient),
        blocks.with_key_block(sums.v, pair, v_gradient),
    )


def _score_gradients(
    scores: "_Scores", operands: _BackwardOperands, pair: Any
) -> tuple[jax.Array, jax.Array]:
    """The softmax weights of a pair, and the gradients to products of queries and keys, bgrqk."""
    blocks = scores.blocks
    z, seen = scores.of(operands.q, operands.k, pair)
    # Relative to the log-sum-exp, exponentials are the softmax weights: no sum is needed again.
    p = jnp.exp(z - _queries_last(blocks.query_block(operands.lse, pair))[..., None])
    if seen is not None:
        p = jnp.where(seen, p, 0)
    dy = blocks.query_block(operands.y_gradient, pair)
    dp = _product("bqgrv,bkgv->bgrqk", dy, blocks.key_block(operands.v, pair))
    dz = p * (dp - _queries_last(blocks.query_block(operands.delta, pair))[..., None])
    attention = scores.attention
    if attention.cap is not None:
        dz *= 1 - (z / attention.cap) ** 2  # the derivative of cap * tanh(. / cap)
    return p, (dz * attention.scale).astype(operands.q.dtype)


class _Scores:
    """The scores of each pair of blocks, and which of them count.

    Attributes:
        attention: which attention.
        blocks: the pairs.
    """

    def __init__(self, attention: Attention, q: jax.Array, k: jax.Array, side: SideInputs) -> None:
        batch, queries, groups, per_group, _ = q.shape
        self.attention = attention
        lengths, heads = (queries, k.shape[1]), batch * groups * per_group
        self.blocks = BlockPairs(attention.mask, attention.starts, lengths, heads)
        starts = side.starts
        if attention.starts is not None:
            starts = np.array(attention.starts, np.int32)
        segments = None
        if side.query_segments is not None:
            segments = side.query_segments, side.key_segments
        self._mask = PairMask(
            attention.mask, starts, side.pattern, segments, self.blocks, groups=groups
        )

    def of(self, q: jax.Array, k: jax.Array, pair: Any) -> tuple[jax.Array, jax.Array | None]:
        """The scores of a pair of blocks, bgrqk, and which of them count; None if all do."""
        query_block, key_block = self.blocks.query_block(q, pair), self.blocks.key_block(k, pair)
        z = _product("bqgrd,bkgd->bgrqk", query_block, key_block) * self.attention.scale
        if self.attention.cap is not None:
            z = self.attention.cap * jnp.tanh(z / self.attention.cap)
        return z, self._mask.seen(pair)


def _queries_last(x: jax.Array) -> jax.Array:
    """An array of queries with the dims in the order of scores: bqgr as bgrq."""
    return x.transpose(0, 2, 3, 1)


def _queries_second(x: jax.Array) -> jax.Array:
    """An array of queries with the dims in the order of results: bgrq as bqgr."""
    return x.transpose(0, 3, 1, 2)


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
    # A product of two numbers of 16 bits is exact in float32, and only sums are rounded.
    return jnp.einsum(letters, x, y, preferred_element_type=compute_dtype(x.dtype))
