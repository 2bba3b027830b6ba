"""What our kernels for attention on GPUs compute of rows and a block of columns; see `_gpu_walk`.

The formulas are those at the top of the reference. Exponentials are powers of two, which the GPU's
unit makes: scores are in units of `log 2`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardlib.kernels._attention._gpu_walk import Block, Body, Rows

LOG2E = math.log2(math.e)


def _scores(rows: Rows, block: Block, x: str, y: str) -> jax.Array:
    """The scores of a warpgroup's rows and a block's columns.

    Args:
        rows: the rows.
        block: the columns.
        x: the matrix of the rows, queries or keys.
        y: the matrix of the columns, the other ones.
    """
    z = rows.product(rows.matrices[x], block.matrix(y)) * rows.attention.scale
    cap = rows.attention.cap
    if cap is None:
        return z
    return cap * _tanh(z / cap)


def _tanh(x: jax.Array) -> jax.Array:
    """The hyperbolic tangent by an exponential: the GPU's own is exact to 11 bits only."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2E)))


class _Sums(NamedTuple):
    """What forward carries: three sums of each row."""

    highest: jax.Array  # the highest score so far, in units of log 2
    total: jax.Array  # of exponentials
    y: jax.Array  # of values


def _start_forward(rows: Rows) -> _Sums:
    """Sums without any key. A sink is a score that was seen before all others, of no value."""
    width = rows.walk.arrays["v"].shape[-1]
    if rows.sink is None:
        return _Sums(rows.full(-jnp.inf), rows.full(0), rows.full(0, width))
    highest = rows.full(rows.sink * LOG2E)
    return _Sums(highest, rows.full(1), rows.full(0, width))


def _add_keys(rows: Rows, block: Block, sums: _Sums) -> _Sums:
    """Add a block of keys to the sums of queries, which are rescaled to the new highest score."""
    z = _scores(rows, block, "q", "k") * LOG2E
    seen = block.seen()
    if seen is not None:
        z = jnp.where(seen, z, -jnp.inf)
    highest = jnp.maximum(sums.highest, z.max(1))
    # Where nothing was seen yet, the difference of two infinities would be no number.
    reference = jnp.where(highest == -jnp.inf, 0, highest)
    rescale = jnp.exp2(sums.highest - reference)
    e = jnp.exp2(z - block.across(reference))
    total = sums.total * rescale + e.sum(1)
    y = sums.y * jax.lax.broadcast_in_dim(rescale, sums.y.shape, [0])
    return _Sums(highest, total, rows.add_product(y, e, block.matrix("v")))


def _finish_forward(rows: Rows, sums: _Sums) -> tuple[jax.Array, jax.Array]:
    """The outputs and log-sum-exps; a query that saw nothing has zeros and minus infinity."""
    divisor = jnp.where(sums.total == 0, 1, sums.total)
    y = sums.y / jax.lax.broadcast_in_dim(divisor, sums.y.shape, [0])
    lse = sums.highest / LOG2E + jnp.log(divisor)
    return y, jnp.where(sums.total == 0, -jnp.inf, lse)


class _ScoreGradients(NamedTuple):
    """The shares of keys in queries, and the gradients to scores before their scale."""

    p: jax.Array
    dz: jax.Array


def _gradients(
    block: Block, z: jax.Array, dp: jax.Array, lse: jax.Array, delta: jax.Array, cap: float | None
) -> _ScoreGradients:
    """Shares, and gradients to scores.

    Args:
        block: the columns.
        z: the scores.
        dp: the products of values with the gradients to outputs.
        lse: the log-sum-exp for each score.
        delta: likewise.
        cap: of the scores, or None.
    """
    p = jnp.exp2((z - lse) * LOG2E)
    seen = block.seen()
    if seen is not None:
        p = jnp.where(seen, p, 0)
    dz = p * (dp - delta)
    if cap is not None:
        share = z / cap
        dz *= 1 - share * share
    return _ScoreGradients(p, dz)


def _start_dq(rows: Rows) -> jax.Array:
    """The gradient to queries without any key."""
    return rows.full(0, rows.walk.arrays["q"].shape[-1])


def _add_keys_to_dq(rows: Rows, block: Block, total: jax.Array) -> jax.Array:
    """Add a block of keys to the gradient to queries."""
    z = _scores(rows, block, "q", "k")
    dp = rows.product(rows.matrices["y_gradient"], block.matrix("v"))
    lse, delta = (block.across(rows.vectors[name]) for name in ("lse", "delta"))
    _, dz = _gradients(block, z, dp, lse, delta, rows.attention.cap)
    return rows.add_product(total, dz, block.matrix("k"))


def _finish_dq(rows: Rows, total: jax.Array) -> list[jax.Array]:
    """The gradient to queries."""
    return [total * rows.attention.scale]


def _gradients_of_keys(rows: Rows, block: Block) -> _ScoreGradients:
    """Shares and gradients where rows are keys and columns are queries."""
    z = _scores(rows, block, "k", "q")
    dp = rows.product(rows.matrices["v"], block.matrix("y_gradient"))
    return _gradients(
        block, z, dp, block.vector("lse"), block.vector("delta"), rows.attention.cap
    )


def _start_dkv(rows: Rows) -> tuple[jax.Array, jax.Array]:
    """The gradients to keys and to values without any query."""
    widths = (rows.walk.arrays[name].shape[-1] for name in ("k", "v"))
    k, v = (rows.full(0, width) for width in widths)
    return k, v


def _add_queries_to_dkv(
    rows: Rows, block: Block, totals: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Add a block of queries to the gradients to keys and to values."""
    p, dz = _gradients_of_keys(rows, block)
    k = rows.add_product(totals[0], dz, block.matrix("q"))
    return k, rows.add_product(totals[1], p, block.matrix("y_gradient"))


def _finish_dkv(
    rows: Rows, totals: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """The gradients to keys and to values."""
    return totals[0] * rows.attention.scale, totals[1]


def _start_dk(rows: Rows) -> jax.Array:
    """The gradient to keys without any query."""
    return rows.full(0, rows.walk.arrays["k"].shape[-1])


def _add_queries_to_dk(rows: Rows, block: Block, total: jax.Array) -> jax.Array:
    """Add a block of queries to the gradient to keys."""
    return rows.add_product(total, _gradients_of_keys(rows, block).dz, block.matrix("q"))


def _start_dv(rows: Rows) -> jax.Array:
    """The gradient to values without any query."""
    return rows.full(0, rows.walk.arrays["v"].shape[-1])


def _add_queries_to_dv(rows: Rows, block: Block, total: jax.Array) -> jax.Array:
    """Add a block of queries to the gradient to values, which needs no products with values."""
    z = _scores(rows, block, "k", "q")
    p = jnp.exp2((z - block.vector("lse")) * LOG2E)
    seen = block.seen()
    if seen is not None:
        p = jnp.where(seen, p, 0)
    return rows.add_product(total, p, block.matrix("y_gradient"))


def _finish_dv(rows: Rows, total: jax.Array) -> list[jax.Array]:
    """The gradient to values."""
    return [total]


FORWARD = Body("attention_forward", _start_forward, _add_keys, _finish_forward)
DQ = Body("attention_dq", _start_dq, _add_keys_to_dq, _finish_dq)
DKV = Body("attention_dkv", _start_dkv, _add_queries_to_dkv, _finish_dkv)
DK = Body("attention_dk", _start_dk, _add_queries_to_dk, _finish_dq)
DV = Body("attention_dv", _start_dv, _add_queries_to_dv, _finish_dv)
