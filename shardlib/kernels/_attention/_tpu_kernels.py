"""Our kernels for attention on TPUs, each of which adds one pair of blocks; see `_tpu`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from shardlib.kernels._attention._tpu_grid import Steps, distance_of
from shardlib.kernels._tpu import LANES


class BlockPair:
    """What a kernel knows of the pair of blocks in one of its steps.

    Attributes:
        attention: which attention.
        is_first: whether it is the first of the inner loop.
        is_last: whether it is the last.
        is_seen: whether the band leaves anything of it.
        sink: of its head, or None.
    """

    def __init__(self, steps: Steps, starts_ref: Any, side: dict[str, Any]) -> None:
        step = [pl.program_id(dim) for dim in range(4)]
        inner_steps = pl.num_programs(3)
        self.attention = steps.call.attention
        self.is_first, self.is_last = step[3] == 0, step[3] == inner_steps - 1
        _, _, i, j = steps.pair(*step)
        call = steps.call
        self._shape = call.key_block, call.query_block
        self._distance = distance_of(starts_ref, i, j, call)
        self._segments = None
        if "query_segments" in side:
            self._segments = side["query_segments"], side["key_segments"]
        self.sink = side["sinks"][0, :, :1] if "sinks" in side else None
        self.is_seen = call.sees(self._distance)

    def scores(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """The scores `(keys, queries)`, and which of them count; None if all do."""
        z = _product(k, q, 1, 1) * self.attention.scale
        if self.attention.cap is not None:
            z = self.attention.cap * jnp.tanh(z / self.attention.cap)
        return z, self._seen()

    def _seen(self) -> jax.Array | None:
        """Which keys each query sees, `(keys, queries)`; None if that is all."""
        mask, seen = self.attention.mask, None
        if mask.left is not None or mask.right is not None:
            key = lax.broadcasted_iota(jnp.int32, self._shape, 0)
            query = lax.broadcasted_iota(jnp.int32, self._shape, 1)
            distance = key - query + self._distance
            if mask.right is not None:
                seen = distance <= mask.right
            if mask.left is not None:
                within = distance >= -mask.left
                seen = within if seen is None else seen & within
        if self._segments is not None:
            queries, keys = self._segments
            # Keys are along the rows of scores: their ids are turned into a column.
            column = jnp.broadcast_to(keys[0], (LANES, self._shape[0])).T[:, :1]
            same = column == queries[0]
            seen = same if seen is None else seen & same
        return seen

    def score_gradients(self, at: "BackwardRefs") -> tuple[jax.Array, jax.Array]:
        """The shares of keys in queries, and the gradients to their products, `(keys, queries)`.

        The formulas are those at the top of the reference.
        """
        q, y_gradient, lse, delta, k, v = (ref[0, 0] for ref in at)
        z, seen = self.scores(q, k)
        p = jnp.exp(z - lse)
        if seen is not None:
            p = jnp.where(seen, p, 0)
        dz = p * (_product(v, y_gradient, 1, 1) - delta)
        cap = self.attention.cap
        if cap is not None:
            dz *= 1 - (z / cap) ** 2
        return p, dz * self.attention.scale


def run_pair(
    body: Callable[..., None], steps: Steps, names: tuple[str, ...], starts_ref: Any, *refs: Any
) -> None:
    """Call a kernel's body with what it knows of its pair, and with its references.

    Args:
        body: the kernel.
        steps: which pair each step is for.
        names: of the first references, which are to segments and sinks.
        starts_ref: to the positions of the first query and of the first key.
        refs: to these, and then to operands, results and scratch.
    """
    count = len(names)
    side = dict(zip(names, (ref[...] for ref in refs[:count]), strict=True))
    body(BlockPair(steps, starts_ref, side), *refs[count:])


class _ForwardRefs(NamedTuple):
    """References of `attention_forward`: to three operands, two results, and three sums."""

    q: Any  # queries, as rows
    k: Any  # keys, as rows
    v: Any  # values, as rows
    y: Any  # outputs, as columns
    lse: Any  # log-sum-exps, a row
    highest: Any  # the highest scores so far, a row
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
            highest, total = jnp.broadcast_to(pair.sink, highest.shape), total + 1
        at.highest[...], at.total[...] = highest, total
        at.sum[...] = jnp.zeros_like(at.sum)

    @pl.when(pair.is_seen)
    def _() -> None:
        _add_keys(pair, at)

    @pl.when(pair.is_last)
    def _() -> None:
        total = at.total[...]
        divisor = jnp.where(total == 0, 1, total)
        at.y[0, 0] = (at.sum[...] / divisor).astype(at.y.dtype)
        at.lse[0, 0] = jnp.where(total == 0, -jnp.inf, at.highest[...] + jnp.log(divisor))


def _add_keys(pair: BlockPair, at: _ForwardRefs) -> None:
    """Add the scores of a block of keys, and their values, to the sums of a block of queries.

    Sums so far are relative to the highest score so far, and are rescaled to the new one.
    """
    z, seen = pair.scores(at.q[0, 0], at.k[0, 0])
    if seen is not None:
        z = jnp.where(seen, z, -jnp.inf)
    before = at.highest[...]
    highest = jnp.maximum(before, z.max(0, keepdims=True))
    # Where nothing was seen yet, the difference of two infinities would be no number.
    reference = jnp.where(highest == -jnp.inf, 0, highest)
    rescale = jnp.exp(before - reference)
    e = jnp.exp(z - reference)
    v = at.v[0, 0]
    at.highest[...] = highest
    at.total[...] = at.total[...] * rescale + e.sum(0, keepdims=True)
    at.sum[...] = at.sum[...] * rescale + _product(v, e.astype(v.dtype), 0, 0)


class BackwardRefs(NamedTuple):
    """References to the operands of both kernels of backward."""

    q: Any  # queries, as rows
    y_gradient: Any  # the gradient to their outputs, as rows
    lse: Any  # their log-sum-exps, a row
    delta: Any  # `dy . y - dlse` of each, a row
    k: Any  # keys, as rows
    v: Any  # values, as rows


def attention_dq(pair: BlockPair, *refs: Any) -> None:
    """Add a block of keys to the gradient to a block of queries."""
    *operands, gradient_ref, sum_ref = refs
    at = BackwardRefs(*operands)

    @pl.when(pair.is_first)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(pair.is_seen)
    def _() -> None:
        _, dz = pair.score_gradients(at)
        k = at.k[0, 0]
        # As columns: keys are the rows of scores.
        sum_ref[...] += _product(k, dz.astype(k.dtype), 0, 0)

    @pl.when(pair.is_last)
    def _() -> None:
        gradient_ref[0, 0] = sum_ref[...].astype(gradient_ref.dtype)


def attention_dkv(pair: BlockPair, *refs: Any) -> None:
    """Add a block of queries of a head to the gradients to a block of keys and values."""
    *operands, k_gradient_ref, v_gradient_ref, k_sum_ref, v_sum_ref = refs
    at = BackwardRefs(*operands)

    @pl.when(pair.is_first)
    def _() -> None:
        k_sum_ref[...] = jnp.zeros_like(k_sum_ref)
        v_sum_ref[...] = jnp.zeros_like(v_sum_ref)

    @pl.when(pair.is_seen)
    def _() -> None:
        p, dz = pair.score_gradients(at)
        q, dy = at.q[0, 0], at.y_gradient[0, 0]
        k_sum_ref[...] += _product(dz.astype(q.dtype), q, 1, 0)
        v_sum_ref[...] += _product(p.astype(dy.dtype), dy, 1, 0)

    @pl.when(pair.is_last)
    def _() -> None:
        k_gradient_ref[0, 0] = k_sum_ref[...].astype(k_gradient_ref.dtype)
        v_gradient_ref[0, 0] = v_sum_ref[...].astype(v_gradient_ref.dtype)


def _product(x: jax.Array, y: jax.Array, x_dim: int, y_dim: int) -> jax.Array:
    """The product of two blocks over a dim of each, in float32.

    Of 16 bits each product of two numbers is exact, and only their sums are rounded.
    """
    dims = (((x_dim,), (y_dim,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
