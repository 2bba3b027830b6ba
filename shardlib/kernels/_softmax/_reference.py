"""Masked, scaled softmax in plain JAX: the specification.

For each row, `exp(z - max z) / sum exp(z - max z)` with `z = scale * x`, in float32 or wider
whatever the dtype of `x`. What the mask leaves out counts for nothing and is zero; a row of which
nothing is left is zero. NaN and infinity propagate within their row, as the formula says.
"""

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._rows import wide


def forward(
    x: jax.Array,
    where: jax.Array | None,
    first: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    axes: tuple[str, ...] = (),
) -> jax.Array:
    """The softmax of the rows of `x`.

    `where` has as many dims, of its size or one. If `causal`, query `first[0]` and key `first[1]`
    are the first of their dims here. Over `axes` devices have parts of a row.
    """
    z = x.astype(wide(x.dtype)) * scale
    kept = left(x, where, first, causal)
    if kept is not None:
        z = jnp.where(kept, z, -jnp.inf)
    highest = z.max(-1, keepdims=True)
    highest = lax.pmax(highest, axes) if axes else highest
    e = jnp.exp(z - highest)
    total = e.sum(-1, keepdims=True)
    total = lax.psum(total, axes) if axes else total
    y = e / total
    return (y if kept is None else jnp.where(kept, y, 0)).astype(x.dtype)


def backward(
    y: jax.Array, gradient: jax.Array, *, scale: float, axes: tuple[str, ...] = ()
) -> jax.Array:
    """The gradient to `x`, from the softmax and the gradient to it: what is masked is zero in `y`,
    hence here.
    """
    y_, g = y.astype(wide(y.dtype)), gradient.astype(wide(y.dtype))
    dot = (y_ * g).sum(-1, keepdims=True)
    dot = lax.psum(dot, axes) if axes else dot
    return (scale * y_ * (g - dot)).astype(y.dtype)


def left(
    x: jax.Array, where: jax.Array | None, first: jax.Array | None, causal: bool
) -> jax.Array | None:
    """What the mask leaves; None where there is none."""
    if not causal:
        return where
    assert first is not None
    query = lax.broadcasted_iota(jnp.int32, x.shape[-2:], 0) + first[0]
    key = lax.broadcasted_iota(jnp.int32, x.shape[-2:], 1) + first[1]
    return key <= query if where is None else where & (key <= query)
