"""Our kernels for attention on TPUs, each step of which adds one pair of blocks; see `_tpu`.

Forward, the queries of a pair are taken in chunks, and each phase is written for all chunks before
the next phase. So the compiler's scheduler can overlap the products of one chunk with the
exponentials of another. If chunks were written one after the other, it would have to move
operations from one chunk to the end of the one before, which it does not do. Backward, products are
most of the work, and there are no chunks.

    chunk 0    scores ..      softmax ..      products with values ..
    chunk 1          scores ..       softmax ..          products with values ..

Exponentials are powers of two, as a TPU computes them. One multiplication makes `score / log(2)` of
a product of a query and a key, since the scale of scores is part of the factor.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from shardlib.kernels._attention._reference import LARGEST_SCORE, LOG2_E
from shardlib.kernels._attention._tpu_grid import Prefetched, Steps, distance_of
from shardlib.kernels._attention._tpu_pattern import seen_by_bits
from shardlib.kernels._tpu import LANES

# Queries of a chunk in the forward pass.
CHUNK = 2 * LANES


class Exponents(NamedTuple):
    """Scores whose exponentials are powers of two.

    Attributes:
        exponent: `score / log(2)`, `(keys, queries)`.
        capped: the hyperbolic tangents in capped scores; None without a cap.
    """

    exponent: jax.Array
    capped: jax.Array | None


class BlockPair:
    """What a kernel knows of the pair of blocks in one of its steps.

    Attributes:
        attention: which attention.
        is_first: whether the pair is the first of the inner loop.
        is_last: whether the pair is the last of the inner loop.
        sink: the sink of the pair's head, or None.
    """

    def __init__(self, steps: Steps, prefetched: Prefetched, side: dict[str, Any]) -> None:
        step = [pl.program_id(dim) for dim in range(4)]
        inner_steps = pl.num_programs(3)
        self.attention = steps.call.attention
        self.is_first, self.is_last = step[3] == 0, step[3] == inner_steps - 1
        _, _, i, j = steps.pair(*step)
        call = steps.call
        self._keys, self._queries = call.key_block, call.query_block
        self._distance = distance_of(prefetched.starts, i, j, call)
        self._side = side
        self.sink = side["sinks"][0, :, :1] if "sinks" in side else None
        self._is_seen = steps.is_seen(prefetched, *step)

    def chunks(self) -> list[slice]:
        """The slices in which a pair's queries are taken in the forward pass."""
        slices = []
        for start in range(0, self._queries, CHUNK):
            slices.append(slice(start, min(start + CHUNK, self._queries)))
        return slices

    def when_seen(self, add: Callable[[bool], None]) -> None:
        """Add the pair if the mask leaves anything of it.

        `add` is called with whether scores must be masked. Most pairs that a band touches are
        entirely within it. For these `add` is traced a second time, without a mask.
        """
        if "query_segments" in self._side or "words" in self._side:
            pl.when(self._is_seen)(lambda: add(True))
            return
        whole = self._is_whole()
        if whole is None:
            add(False)
            return
        pl.when(self._is_seen & whole)(lambda: add(False))
        pl.when(self._is_seen & ~whole)(lambda: add(True))

    def _is_whole(self) -> jax.Array | None:
        """Whether the band leaves all of the pair; None without a band."""
        mask, whole = self.attention.mask, None
        if mask.right is not None:
            whole = self._distance + self._keys - 1 <= mask.right
        if mask.left is not None:
            within = self._distance - (self._queries - 1) >= -mask.left
            whole = within if whole is None else whole & within
        return whole

    def exponents(self, product: jax.Array) -> Exponents:
        """The exponents that products of keys and queries become."""
        attention = self.attention
        if attention.cap is None:
            return Exponents(product * (attention.scale * LOG2_E), None)
        capped = jnp.tanh(product * (attention.scale / attention.cap))
        return Exponents(capped * (min(attention.cap, LARGEST_SCORE) * LOG2_E), capped)

    def masked(self, x: jax.Array, queries: slice, instead: float) -> jax.Array:
        """An array `(keys, queries)` with another number where a key is not seen.

        Args:
            x: the array.
            queries: which queries of the pair's block the array has.
            instead: the number.
        """
        kept, side = [], self._side
        in_band = self._in_band(queries)
        if in_band is not None:
            kept.append(in_band)
        if "query_segments" in side:
            ids = _column(side["key_segments"][0])
            kept.append(ids == side["query_segments"][0, :, queries])
        if "words" in side:
            kept.append(seen_by_bits(side["words"][0, 0, :, queries], _column(side["bits"][0])))
        return jnp.where(functools.reduce(jnp.logical_and, kept), x, instead)

    def _in_band(self, queries: slice) -> jax.Array | None:
        """Which keys some of the queries see by the band; None without a band."""
        mask, seen = self.attention.mask, None
        count = queries.stop - queries.start
        key = lax.broadcasted_iota(jnp.int32, (self._keys, count), 0)
        query = lax.broadcasted_iota(jnp.int32, (1, count), 1) + queries.start
        # A bound is added to the row of queries, so that the only operation for each score is a
        # comparison. A bound that hides nothing of the pair is replaced by another one that does
        # not: the difference might overflow 32 bits.
        if mask.right is not None:
            crosses = self._distance + self._keys - 1 > mask.right
            bound = jnp.where(crosses, mask.right - self._distance, self._keys)
            seen = key <= query + bound
        if mask.left is not None:
            crosses = self._distance - (self._queries - 1) < -mask.left
            bound = jnp.where(crosses, -mask.left - self._distance, -self._queries)
            within = key >= query + bound
            seen = within if seen is None else seen & within
        return seen


def _column(row: jax.Array) -> jax.Array:
    """A row of numbers, one for each key, as a column: keys are along the rows of scores.

    A TPU transposes whole tiles, so the row is first repeated.
    """
    return jnp.broadcast_to(row, (LANES, row.shape[1])).T[:, :1]


def run_pair(
    body: Callable[..., None], steps: Steps, names: list[str], prefetched: int, *refs: Any
) -> None:
    """Call a kernel's body with what it knows of its pair, and with its references.

    Args:
        body: the kernel.
        steps: which pair each step is for.
        names: of the side arrays, such as segments.
        prefetched: how many references there are to what was prefetched.
        refs: to what was prefetched, to the side arrays, and to operands, results and scratch.
    """
    first = prefetched + len(names)
    side = dict(zip(names, (ref[...] for ref in refs[prefetched:first]), strict=True))
    body(BlockPair(steps, Prefetched(*refs[:prefetched]), side), *refs[first:])


class _ForwardRefs(NamedTuple):
    """References of `attention_forward`: to three operands, two results, and three sums."""

    q: Any  # queries, as rows
    k: Any  # keys, as rows
    v: Any  # values, as rows
    y: Any  # outputs, as rows
    lse: Any  # log-sum-exps, a row
    highest: Any  # the highest exponents so far, a row
    total: Any  # the sums of exponentials so far, a row
    sum: Any  # the sums of values so far, as columns


def attention_forward(pair: BlockPair, *refs: Any) -> None:
    """Add a block of keys to the sums of a block of queries; see the reference."""
    at = _ForwardRefs(*refs)

    @pl.when(pair.is_first)
    def _() -> None:
        highest, total = jnp.full_like(at.highest, -jnp.inf), jnp.zeros_like(at.total)
        # A sink is a score that was seen before all others, and has no value.
        if pair.sink is not None:
            sink = jnp.minimum(pair.sink, LARGEST_SCORE) * LOG2_E
            highest, total = jnp.broadcast_to(sink, highest.shape), total + 1
        at.highest[...], at.total[...] = highest, total
        at.sum[...] = jnp.zeros_like(at.sum)

    pair.when_seen(lambda is_masked: _add_keys(pair, at, is_masked))

    @pl.when(pair.is_last)
    def _() -> None:
        total = at.total[...]
        divisor = jnp.where(total == 0, 1, total)
        at.y[0, 0] = (at.sum[...] / divisor).T.astype(at.y.dtype)
        lse = at.highest[...] / LOG2_E + jnp.log(divisor)
        at.lse[0, 0] = jnp.where(total == 0, -jnp.inf, lse)


def _add_keys(pair: BlockPair, at: _ForwardRefs, is_masked: bool) -> None:
    """Add the scores of a block of keys, and their values, to the sums of a block of queries.

    Sums so far are relative to the highest score so far, and are rescaled to the new one.
    """
    chunks = pair.chunks()
    k, v = at.k[0, 0], at.v[0, 0]
    products, weights = [], []
    for chunk in chunks:
        products.append(_product(k, at.q[0, 0, chunk], 1, 1))
    for chunk, product in zip(chunks, products, strict=True):
        exponent = pair.exponents(product).exponent
        if is_masked:
            exponent = pair.masked(exponent, chunk, -jnp.inf)
        weights.append(_softmax_weights(at, chunk, exponent))
    for chunk, (rescale, e) in zip(chunks, weights, strict=True):
        added = _product(v, e.astype(v.dtype), 0, 0)
        at.sum[:, chunk] = at.sum[:, chunk] * rescale + added


def _softmax_weights(
    at: _ForwardRefs, queries: slice, exponent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The factor by which the sums so far are rescaled, and the exponentials of new scores.

    It also updates the highest exponents and the sums of exponentials.

    Args:
        at: the references.
        queries: which queries of the block.
        exponent: the exponents of the scores, `(keys, queries)`.
    """
    before = at.highest[:, queries]
    highest = jnp.maximum(before, exponent.max(0, keepdims=True))
    # Where nothing was seen yet, the difference of two infinities would be nan.
    reference = jnp.where(highest == -jnp.inf, 0, highest)
    rescale = jnp.exp2(before - reference)
    e = jnp.exp2(exponent - reference)
    at.highest[:, queries] = highest
    at.total[:, queries] = at.total[:, queries] * rescale + e.sum(0, keepdims=True)
    return rescale, e


class BackwardRefs(NamedTuple):
    """References to the operands of both kernels of backward."""

    q: Any  # queries, as rows
    y_gradient: Any  # the gradient to their outputs, as rows
    lse: Any  # their log-sum-exps, a row
    delta: Any  # `dy . y - dlse` of each, a row
    k: Any  # keys, as rows
    v: Any  # values, as rows


def _score_gradients(
    pair: BlockPair, at: BackwardRefs, is_masked: bool
) -> tuple[jax.Array, jax.Array]:
    """The softmax weights, and the gradients to the scores before their scale, `(keys, queries)`.

    The formulas are those at the top of the reference, except for the scale: gradients are
    multiplied by it once, when their sums are complete.
    """
    q, y_gradient, lse, delta, k, v = (ref[0, 0] for ref in at)
    z = pair.exponents(_product(k, q, 1, 1))
    p = jnp.exp2(z.exponent - lse * LOG2_E)
    if is_masked:
        p = pair.masked(p, slice(0, q.shape[0]), 0)
    dz = p * (_product(v, y_gradient, 1, 1) - delta)
    if z.capped is not None:
        dz *= 1 - z.capped**2
    return p, dz


def attention_dq(pair: BlockPair, *refs: Any) -> None:
    """Add a block of keys to the gradient to a block of queries."""
    *operands, gradient_ref, sum_ref = refs
    at = BackwardRefs(*operands)

    @pl.when(pair.is_first)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(is_masked: bool) -> None:
        k = at.k[0, 0]
        _, dz = _score_gradients(pair, at, is_masked)
        # The sum has queries as columns: keys are the rows of scores.
        sum_ref[...] += _product(k, dz.astype(k.dtype), 0, 0)

    pair.when_seen(add)

    @pl.when(pair.is_last)
    def _() -> None:
        gradient = sum_ref[...] * pair.attention.scale
        gradient_ref[0, 0] = gradient.T.astype(gradient_ref.dtype)


def attention_dkv(pair: BlockPair, *refs: Any) -> None:
    """Add a block of a head's queries to the gradients to a block of keys and values."""
    *operands, k_gradient_ref, v_gradient_ref, k_sum_ref, v_sum_ref = refs
    at = BackwardRefs(*operands)

    @pl.when(pair.is_first)
    def _() -> None:
        k_sum_ref[...] = jnp.zeros_like(k_sum_ref)
        v_sum_ref[...] = jnp.zeros_like(v_sum_ref)

    def add(is_masked: bool) -> None:
        q, dy = at.q[0, 0], at.y_gradient[0, 0]
        p, dz = _score_gradients(pair, at, is_masked)
        k_sum_ref[...] += _product(dz.astype(q.dtype), q, 1, 0)
        v_sum_ref[...] += _product(p.astype(dy.dtype), dy, 1, 0)

    pair.when_seen(add)

    @pl.when(pair.is_last)
    def _() -> None:
        k_gradient = k_sum_ref[...] * pair.attention.scale
        k_gradient_ref[0, 0] = k_gradient.astype(k_gradient_ref.dtype)
        v_gradient_ref[0, 0] = v_sum_ref[...].astype(v_gradient_ref.dtype)


def _product(x: jax.Array, y: jax.Array, x_dim: int, y_dim: int) -> jax.Array:
    """The product of two blocks over a dim of each, in float32.

    The product of two numbers of 16 bits is exact in float32, and only sums are rounded.
    """
    dims = (((x_dim,), (y_dim,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
