"""RMSNorm and LayerNorm with a residual added, in plain JAX: the specification.

Of each row `h = x + residual`, rounded to the dtype of `x`, then `y = (h - m) * rsqrt(mean((h -
m)^2) + epsilon) * scale + bias`, in float32 or wider, rounded once; `m` is the mean of the row if
the norm is centred, which is LayerNorm, and zero if not.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._rows import wide


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
    """The norm of the rows of `h`, and `h`. Over `axes` devices have parts of a row."""
    h = x if residual is None else x + residual.astype(x.dtype)
    unit, _ = _unit(h, epsilon, centred, axes)
    y = unit if scale is None else unit * scale.astype(unit.dtype)
    y = y if bias is None else y + bias.astype(unit.dtype)
    return y.astype(x.dtype), h


def backward(
    h: jax.Array,
    scale: jax.Array | None,
    gradient: jax.Array,
    of_h: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
    biased: bool,
    axes: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The gradients to `x`, which is that to the residual, to `scale` and to `bias`: of these, if
    there, the sums over rows here.

    `of_h` is the gradient to `h` from elsewhere.
    """
    unit, inverse = _unit(h, epsilon, centred, axes)
    g = gradient.astype(unit.dtype)
    of_unit = g if scale is None else g * scale.astype(unit.dtype)
    mean = _mean(of_unit * unit, axes)
    of_x = of_unit - unit * mean
    if centred:
        of_x -= _mean(of_unit, axes)
    of_x = of_x * inverse
    if of_h is not None:
        of_x += of_h.astype(unit.dtype)
    rows = tuple(range(h.ndim - 1))
    return (
        of_x.astype(h.dtype),
        None if scale is None else (g * unit).sum(rows),
        g.sum(rows) if biased else None,
    )


def _unit(
    h: jax.Array, epsilon: float, centred: bool, axes: tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Rows of mean square one, and by what they were multiplied to be that."""
    z: Any = h.astype(wide(h.dtype))
    if centred:
        z -= _mean(z, axes)
    inverse = lax.rsqrt(_mean(jnp.square(z), axes) + epsilon)
    return z * inverse, inverse


def _mean(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    return lax.pmean(mean, axes) if axes else mean
