"""RMSNorm and LayerNorm by Tokamax, whose kernels for GPUs are Triton's.

Where a residual is added, the gradient to it and that through the norm are rounded before they are
added too.
"""

from typing import Any

import jax
import jax.numpy as jnp

from shardlib.kernels._choice import Task
from shardlib.kernels._tokamax import imported, refuses_absence


def refuses(task: Task) -> str | None:
    """Why Tokamax cannot do a task; None if it can.

    The text continues a sentence that begins with the implementation's name.
    """
    absence = refuses_absence()
    if absence is not None:
        return absence
    if jax.default_backend() != "gpu":
        return (
            "is Tokamax's, which fits its kernels to the GPU that is there, and JAX has "
            f"{jax.default_backend()} here"
        )
    if task.summed:
        return (
            "adds up nothing between devices, and the last dim is split over "
            f"`{', '.join(task.summed)}`"
        )
    if task.differing:
        return (
            "keeps no account of what differs between devices, and here that is known over "
            f"`{', '.join(sorted(task.differing))}`: `shard_map(..., check_vma=False)` wants none"
        )
    # Its kernels are written for these three.
    unknown = {str(x.dtype) for x in task.arrays.values()} - {"float32", "bfloat16", "float16"}
    if unknown:
        return f"takes float32, bfloat16 and float16; not {', '.join(sorted(unknown))}"
    return None


def forward(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
) -> tuple[jax.Array, jax.Array]:
    """The norm of the rows of `h = x + residual`, and `h`; rows must be whole on the device.

    XLA adds the residual. Arguments are those of the reference.
    """
    h = x if residual is None else x + residual
    return _norm(h, scale, bias, epsilon, centred), h


def backward(
    h: jax.Array,
    scale: jax.Array | None,
    gradient: jax.Array,
    h_gradient: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
    biased: bool,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The gradients to `x`, scale and bias; rows must be whole on the device.

    Tokamax's backward needs what its forward saved, so that forward runs a second time. Arguments
    are those of the reference.
    """
    bias = jnp.zeros(h.shape[-1:], jnp.float32) if biased else None
    if scale is not None:
        # Gradients have the dtype of their array, and that to the scale is still to be added up.
        scale = scale.astype(jnp.float32)
    _, pullback = jax.vjp(
        lambda h, scale, bias: _norm(h, scale, bias, epsilon, centred), h, scale, bias
    )
    x_gradient, scale_gradient, bias_gradient = pullback(gradient)
    return (
        x_gradient if h_gradient is None else x_gradient + h_gradient,
        scale_gradient,
        bias_gradient,
    )


def _norm(h: jax.Array, scale: Any, bias: Any, epsilon: float, centred: bool) -> jax.Array:
    return imported().layer_norm(
        h, scale, bias, epsilon=epsilon, subtract_mean=centred, implementation="triton"
    )
