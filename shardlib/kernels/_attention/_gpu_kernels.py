"""What our kernels for attention on GPUs compute of rows and a block of columns; see `_gpu_walk`.

The formulas are those at the top of the reference. Exponentials are powers of two, as the GPU
computes them: scores are multiplied by `log2(e)` first.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib.kernels._attention._gpu_rows import Block, Body, Rows
from shardlib.kernels._attention._reference import LARGEST_SCORE, LOG2_E


def _scores(rows: Rows, block: Block, x: str, y: str) -> jax.Array:
    """The scores of a warpgroup's rows and a block's columns.

    Args:
        rows: the rows.
        block: the columns.
        x: the name of the rows' matrix, of queries or keys.
        y: the name of the columns' matrix, of the other ones.
    """
    z = rows.product(rows.matrices[x], block.matrix(y)) * rows.attention.scale
    cap = rows.attention.cap
    if cap is None:
        return z
    return cap * _tanh(z / cap)


def _tanh(x: jax.Array) -> jax.Array:
    """The hyperbolic tangent by an exponential: the GPU's own is exact to 11 bits only."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))


class _Sums(NamedTuple):
    """What forward carries of each row: the highest score, and sums relative to it."""

    highest: jax.Array  # the highest score so far, times log2(e)
    total: jax.Array  # the sum of exponentials
    y: jax.Array  # the sum of values, weighted by these


def _start_forward(rows: Rows) -> _Sums:
    """The sums before any key.

    A sink is a score that was seen before all others, and has no value.
    """
    width = rows.walk.arrays["v"].shape[-1]
    if rows.sink is None:
        return _Sums(rows.full(-jnp.inf), rows.full(0), rows.full(0, width))
    highest = rows.full(jnp.minimum(rows.sink, LARGEST_SCORE) * LOG2_E)
    return _Sums(highest, rows.full(1), rows.full(0, width))


def _add_keys(rows: Rows, block: Block, sums: _Sums) -> _Sums:
    """Add a block of keys to the sums of queries.

    Sums so far are relative to the highest score so far, and are rescaled to the new one.
    """
    z = _scores(rows, block, "q", "k") * LOG2_E
    seen = block.seen()
    if seen is not None:
        z = jnp.where(seen, z, -jnp.inf)
    highest = jnp.maximum(sums.highest, z.max(1))
    # Where nothing was seen yet, the difference of two infinities would be nan.
    reference = jnp.where(highest == -jnp.inf, 0, highest)
    rescale = jnp.exp2(sums.highest - reference)
    e = jnp.exp2(z - block.across(reference))
    total = sums.total * rescale + e.sum(1)
    y = sums.y * jax.lax.broadcast_in_dim(rescale, sums.y.shape, [0])
    return _Sums(highest, total, rows.add_product(y, e, block.matrix("v")))


def _finish_forward(rows: Rows, sums: _Sums) -> tuple[jax.Array, jax.Array]:
    """The outputs and the log-sum-exps.

    A query that sees nothing has an output of zeros, and a log-sum-exp of minus infinity.
    """
    divisor = jnp.where(sums.total == 0, 1, sums.total)
    y = sums.y / jax.lax.broadcast_in_dim(divisor, sums.y.shape, [0])
    lse = sums.highest / LOG2_E + jnp.log(divisor)
    return y, jnp.where(sums.total == 0, -jnp.inf, lse)


def _softmax_weights(block: Block, z: jax.Array, lse: jax.Array) -> jax.Array:
    """The softmax weights, made again from scores; zero where a key is not seen.

    Args:
        block: the columns.
        z: the scores.
        lse: the log-sum-exp of the query of each score.
    """
    p = jnp.exp2((z - lse) * LOG2_E)
    seen = block.seen()
    if seen is None:
        return p
    return jnp.where(seen, p, 0)


class _ScoreGradients(NamedTuple):
    """What the gradients are made of: two numbers for each score."""

    p: jax.Array  # the softmax weight
    dz: jax.Array  # the gradient to the score before its scale


def _gradients(
    block: Block, z: jax.Array, dp: jax.Array, lse: jax.Array, delta: jax.Array, cap: float | None
) -> _ScoreGradients:
    """The softmax weights, and the gradients to scores before their scale.

    Args:
        block: the columns.
        z: the scores.
        dp: the products of values with the gradients to outputs.
        lse: the log-sum-exp for each score.
        delta: likewise.
        cap: of the scores, or None.
    """
    p = _softmax_weights(block, z, lse)
    dz = p * (dp - delta)
    if cap is not None:
        tanh = z / cap
        dz *= 1 - tanh * tanh
    return _ScoreGradients(p, dz)


def _zeros(*names: str) -> Callable[[Rows], Any]:
    """The `start` of a body: sums of zeros, each as wide as the rows of a matrix.

    For a single name it gives the sum itself, and no tuple.
    """

    def start(rows: Rows) -> Any:
        sums = [rows.full(0, rows.walk.arrays[name].shape[-1]) for name in names]
        return sums[0] if len(sums) == 1 else tuple(sums)

    return start


def _add_keys_to_dq(rows: Rows, block: Block, total: jax.Array) -> jax.Array:
    """Add a block of keys to the gradient to queries."""
    z = _scores(rows, block, "q", "k")
    dp = rows.product(rows.matrices["y_gradient"], block.matrix("v"))
    lse, delta = (block.across(rows.vectors[name]) for name in ("lse", "delta"))
    _, dz = _gradients(block, z, dp, lse, delta, rows.attention.cap)
    return rows.add_product(total, dz, block.matrix("k"))


def _finish_scaled(rows: Rows, total: jax.Array) -> list[jax.Array]:
    """The gradient to queries, or to keys, multiplied by the scale of the scores."""
    return [total * rows.attention.scale]


def _gradients_of_keys(rows: Rows, block: Block) -> _ScoreGradients:
    """The softmax weights, and the gradients to scores, where rows are keys."""
    z = _scores(rows, block, "k", "q")
    dp = rows.product(rows.matrices["v"], block.matrix("y_gradient"))
    return _gradients(block, z, dp, block.vector("lse"), block.vector("delta"), rows.attention.cap)


def _add_queries_to_dkv(
    rows: Rows, block: Block, totals: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Add a block of queries to the gradients to keys and to values."""
    p, dz = _gradients_of_keys(rows, block)
    k = rows.add_product(totals[0], dz, block.matrix("q"))
    return k, rows.add_product(totals[1], p, block.matrix("y_gradient"))


def _finish_dkv(rows: Rows, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The gradients to keys and to values."""
    return totals[0] * rows.attention.scale, totals[1]


def _add_queries_to_dk(rows: Rows, block: Block, total: jax.Array) -> jax.Array:
    """Add a block of queries to the gradient to keys."""
    return rows.add_product(total, _gradients_of_keys(rows, block).dz, block.matrix("q"))


def _add_queries_to_dv(rows: Rows, block: Block, total: jax.Array) -> jax.Array:
    """Add a block of queries to the gradient to values, which needs no products with values."""
    z = _scores(rows, block, "k", "q")
    p = _softmax_weights(block, z, block.vector("lse"))
    return rows.add_product(total, p, block.matrix("y_gradient"))


def _finish_dv(rows: Rows, total: jax.Array) -> list[jax.Array]:
    """The gradient to values."""
    return [total]


FORWARD = Body("attention_forward", _start_forward, _add_keys, _finish_forward)
DQ = Body("attention_dq", _zeros("q"), _add_keys_to_dq, _finish_scaled)
DKV = Body("attention_dkv", _zeros("k", "v"), _add_queries_to_dkv, _finish_dkv)
DK = Body("attention_dk", _zeros("k"), _add_queries_to_dk, _finish_scaled)
DV = Body("attention_dv", _zeros("v"), _add_queries_to_dv, _finish_dv)
