"""Our kernels for attention on TPUs, each of which adds one pair of blocks; see `_tpu`."""

from collections.abc import Callable
from typing import Any

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

    def score_gradients(
        self, q: Any, y_gradient: Any, lse: Any, delta: Any, k: Any, v: Any
    ) -> tuple[jax.Array, jax.Array]:
        """The shares of keys in queries, and the gradients to their products, `(keys, queries)`.

        Args:
            q: the queries, as rows.
            y_gradient: the gradient to their outputs.
            lse: a row of their log-sum-exps.
            delta: a row of `dy . y - dlse`.
            k: the keys, as rows.
            v: their values.
        """
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


def attention_forward(
    pair: BlockPair,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    y_ref: Any,
    lse_ref: Any,
    highest_ref: Any,
    total_ref: Any,
    sum_ref: Any,
) -> None:
    """Add a block of keys to the sums of a block of queries; see the reference.

    Args:
        pair: of blocks.
        q_ref: to the queries, as rows.
        k_ref: to the keys, as rows.
        v_ref: to the values, as rows.
        y_ref: to the outputs, as columns.
        lse_ref: to the log-sum-exps, a row.
        highest_ref: to the highest scores so far, a row.
        total_ref: to the sums of exponentials, a row.
        sum_ref: to the sums of values, as columns.
    """

    @pl.when(pair.is_first)
    def _() -> None:
        highest, total = jnp.full_like(highest_ref, -jnp.inf), jnp.zeros_like(total_ref)
        # A sink is a score that was seen before all others, and has no value.
        if pair.sink is not None:
            highest, total = jnp.broadcast_to(pair.sink, highest.shape), total + 1
        highest_ref[...], total_ref[...] = highest, total
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(pair.is_seen)
    def _() -> None:
        z, seen = pair.scores(q_ref[0, 0], k_ref[0, 0])
        if seen is not None:
            z = jnp.where(seen, z, -jnp.inf)
        before = highest_ref[...]
        highest = jnp.maximum(before, z.max(0, keepdims=True))
        # Where nothing was seen yet, the difference of two infinities would be no number.
        reference = jnp.where(highest == -jnp.inf, 0, highest)
        rescale = jnp.exp(before - reference)
        e = jnp.exp(z - reference)
        v = v_ref[0, 0]
        highest_ref[...] = highest
        total_ref[...] = total_ref[...] * rescale + e.sum(0, keepdims=True)
        sum_ref[...] = sum_ref[...] * rescale + _product(v, e.astype(v.dtype), 0, 0)

    @pl.when(pair.is_last)
    def _() -> None:
        total = total_ref[...]
        divisor = jnp.where(total == 0, 1, total)
        y_ref[0, 0] = (sum_ref[...] / divisor).astype(y_ref.dtype)
        lse_ref[0, 0] = jnp.where(total == 0, -jnp.inf, highest_ref[...] + jnp.log(divisor))


def attention_dq(
    pair: BlockPair,
    q_ref: Any,
    y_gradient_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_gradient_ref: Any,
    sum_ref: Any,
) -> None:
    """Add a block of keys to the gradient to a block of queries.

    Args:
        pair: of blocks.
        q_ref: to the queries, as rows.
        y_gradient_ref: to the gradient to their outputs, as rows.
        lse_ref: to their log-sum-exps, a row.
        delta_ref: to `dy . y - dlse`, a row.
        k_ref: to the keys, as rows.
        v_ref: to the values, as rows.
        q_gradient_ref: to the gradient to queries, as columns.
        sum_ref: to the same, so far.
    """

    @pl.when(pair.is_first)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(pair.is_seen)
    def _() -> None:
        refs = (q_ref, y_gradient_ref, lse_ref, delta_ref, k_ref, v_ref)
        _, dz = pair.score_gradients(*(ref[0, 0] for ref in refs))
        k = k_ref[0, 0]
        sum_ref[...] += _product(k, dz.astype(k.dtype), 0, 0)

    @pl.when(pair.is_last)
    def _() -> None:
        q_gradient_ref[0, 0] = sum_ref[...].astype(q_gradient_ref.dtype)


def attention_dkv(
    pair: BlockPair,
    q_ref: Any,
    y_gradient_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    k_ref: Any,
    v_ref: Any,
    k_gradient_ref: Any,
    v_gradient_ref: Any,
    k_sum_ref: Any,
    v_sum_ref: Any,
) -> None:
    """Add a block of queries of a head to the gradients to a block of keys and values.

    Args:
        pair: of blocks.
        q_ref: to the queries, as rows.
        y_gradient_ref: to the gradient to their outputs, as rows.
        lse_ref: to their log-sum-exps, a row.
        delta_ref: to `dy . y - dlse`, a row.
        k_ref: to the keys, as rows.
        v_ref: to the values, as rows.
        k_gradient_ref: to the gradient to keys, as rows.
        v_gradient_ref: to the gradient to values, as rows.
        k_sum_ref: to the gradient to keys, so far.
        v_sum_ref: to the gradient to values, so far.
    """

    @pl.when(pair.is_first)
    def _() -> None:
        k_sum_ref[...] = jnp.zeros_like(k_sum_ref)
        v_sum_ref[...] = jnp.zeros_like(v_sum_ref)

    @pl.when(pair.is_seen)
    def _() -> None:
        refs = (q_ref, y_gradient_ref, lse_ref, delta_ref, k_ref, v_ref)
        p, dz = pair.score_gradients(*(ref[0, 0] for ref in refs))
        q, dy = q_ref[0, 0], y_gradient_ref[0, 0]
        k_sum_ref[...] += _product(dz.astype(q.dtype), q, 1, 0)
        v_sum_ref[...] += _product(p.astype(dy.dtype), dy, 1, 0)

    @pl.when(pair.is_last)
    def _() -> None:
        k_gradient_ref[0, 0] = k_sum_ref[...].astype(k_gradient_ref.dtype)
        v_gradient_ref[0, 0] = v_sum_ref[...].astype(v_gradient_ref.dtype)


def _product(x: jax.Array, y: jax.Array, x_dim: int, y_dim: int) -> jax.Array:
    """The product of two blocks over a dim of each, in float32."""
    dims = (((x_dim,), (y_dim,)), ((), ()))
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)
