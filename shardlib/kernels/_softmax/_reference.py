"""Masked, scaled softmax in plain JAX: the specification.

For each row, with `z = scale * x`,

    y = exp(z - max z) / sum exp(z - max z)

in float32 or wider, whatever the dtype of `x`. What the mask leaves out is not part of the sum and
is zero in `y`; a row of which nothing is left is zero. NaN and infinity propagate within their row,
as the formula says. Backward is `scale * y * (g - sum(y * g))` for the gradient `g` to `y`.
"""

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._rows import compute_dtype


def forward(
    x: jax.Array,
    where: jax.Array | None,
    offsets: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    axes: tuple[str, ...] = (),
) -> jax.Array:
    """The softmax of the rows of `x`, in its dtype.

    Args:
        x: rows, with any dims before them.
        where: bools, true for what is left in, with as many dims as `x`, of its sizes or one.
        offsets: if causal, the positions of the first query and of the first key of this device.
        scale: a factor for `x`.
        causal: whether a query sees no later key.
        axes: the mesh axes over which devices have parts of a row.
    """
    z = x.astype(compute_dtype(x.dtype)) * scale
    kept = combined_mask(x, where, offsets, causal)
    if kept is not None:
        z = jnp.where(kept, z, -jnp.inf)
    highest = z.max(-1, keepdims=True)
    if axes:
        highest = lax.pmax(highest, axes)
    e = jnp.exp(z - highest)
    total = e.sum(-1, keepdims=True)
    if axes:
        total = lax.psum(total, axes)
    y = e / total
    if kept is not None:
        # A row of which nothing is left is nan so far.
        y = jnp.where(kept, y, 0)
    return y.astype(x.dtype)


def backward(
    y: jax.Array, gradient: jax.Array, *, scale: float, axes: tuple[str, ...] = ()
) -> jax.Array:
    """The gradient to `x`, from the softmax `y` and the gradient to it.

    It needs no mask: what is masked is zero in `y`, and hence in the gradient. Over `axes` devices
    have parts of a row.
    """
    dtype = compute_dtype(y.dtype)
    y_wide, g = y.astype(dtype), gradient.astype(dtype)
    dot = (y_wide * g).sum(-1, keepdims=True)
    if axes:
        dot = lax.psum(dot, axes)
    return (scale * y_wide * (g - dot)).astype(y.dtype)


def combined_mask(
    x: jax.Array, where: jax.Array | None, offsets: jax.Array | None, causal: bool
) -> jax.Array | None:
    """The mask that was given and the causal one together; None where there is neither.

    A causal mask is `key <= query`, by positions in the whole sequence, of which `offsets` says
    where this device's part begins.
    """
    if not causal:
        return where
    assert offsets is not None
    query = lax.broadcasted_iota(jnp.int32, x.shape[-2:], 0) + offsets[0]
    key = lax.broadcasted_iota(jnp.int32, x.shape[-2:], 1) + offsets[1]
    if where is None:
        return key <= query
    return where & (key <= query)
