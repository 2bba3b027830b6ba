"""RMSNorm and LayerNorm with a residual added, in plain JAX: the specification.

For each row

    h = x + residual                                rounded to the dtype of `x`
    y = (h - m) * rsqrt(mean((h - m)^2) + epsilon) * scale + bias

in float32 or wider, rounded once. `m` is the mean of the row if the norm is centred, which is
LayerNorm, and zero if it is not, which is RMSNorm.

Backward, with `u = (h - m) * r` the row of mean square one, `r` the factor that made it so, and
`g = gradient * scale`, the gradient to `h` is `r * (g - u * mean(g * u) - mean(g))`, without the
last term if the norm is not centred.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._rows import compute_dtype


@dataclass(frozen=True)
class Norm:
    """Which norm: what is added to the mean square, and whether rows are centred first."""

    epsilon: float
    centred: bool


def forward(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array]:
    """The norm of the rows of `h = x + residual`, and `h`, which backward needs.

    Args:
        x: rows, with any dims before them.
        residual: of the same shape and dtype, or None.
        scale: a row by which units are multiplied, or None.
        bias: a row that is added to them, or None.
        epsilon: what is added to the mean square.
        centred: whether the mean is subtracted first.
        axes: the mesh axes over which devices have parts of a row.
    """
    h = x
    if residual is not None:
        h = x + residual.astype(x.dtype)
    unit, _ = _unit_rows(h, Norm(epsilon, centred), axes)
    y = unit
    if scale is not None:
        y = y * scale.astype(unit.dtype)
    if bias is not None:
        y = y + bias.astype(unit.dtype)
    return y.astype(x.dtype), h


def backward(
    h: jax.Array,
    scale: jax.Array | None,
    gradient: jax.Array,
    h_gradient: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
    biased: bool,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The gradients to `x` (which is also that to the residual), to `scale` and to `bias`.

    Those to `scale` and `bias` are sums over the rows of this device, in float32 or wider; None
    where there is no such array.

    Args:
        h: the rows that were normed, as forward returned them.
        scale: as in forward.
        gradient: that to the norm's output.
        h_gradient: the gradient to `h` from elsewhere, which is added; None if `h` was not
            returned.
        epsilon: as in forward.
        centred: as in forward.
        biased: whether forward had a bias.
        axes: the mesh axes over which devices have parts of a row.
    """
    unit, inverse = _unit_rows(h, Norm(epsilon, centred), axes)
    g = gradient.astype(unit.dtype)
    unit_gradient = g
    if scale is not None:
        unit_gradient = g * scale.astype(unit.dtype)
    mean = _row_mean(unit_gradient * unit, axes)
    x_gradient = unit_gradient - unit * mean
    if centred:
        x_gradient -= _row_mean(unit_gradient, axes)
    x_gradient = x_gradient * inverse
    if h_gradient is not None:
        x_gradient += h_gradient.astype(unit.dtype)
    x_gradient = x_gradient.astype(h.dtype)
    # Sums over rows stay wide: they are rounded after devices have added theirs.
    over_rows = tuple(range(h.ndim - 1))
    scale_gradient = None
    if scale is not None:
        scale_gradient = (g * unit).sum(over_rows)
    bias_gradient = None
    if biased:
        bias_gradient = g.sum(over_rows)
    return x_gradient, scale_gradient, bias_gradient


def _unit_rows(h: jax.Array, norm: Norm, axes: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """Rows of mean square one, and the factor that made them so, in the dtype of computation."""
    z: Any = h.astype(compute_dtype(h.dtype))
    if norm.centred:
        z -= _row_mean(z, axes)
    inverse = lax.rsqrt(_row_mean(jnp.square(z), axes) + norm.epsilon)
    return z * inverse, inverse


def _row_mean(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The mean of each row, whose parts are of equal size on all devices of the axes."""
    mean = x.mean(-1, keepdims=True)
    if axes:
        mean = lax.pmean(mean, axes)
    return mean
