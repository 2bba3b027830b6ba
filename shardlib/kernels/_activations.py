"""Activations between the matrices of an MLP: gated ones, and those of a sum with a bias.

They are elementwise, which compilers fuse into one pass by themselves, so that plain JAX is all
there is of them on every machine. What they have beyond it is a derivative of their own:

    saved for backward    the arguments, in their dtypes; autodiff keeps each step of the formula
    computed in           float32, or float64 for that
    rounded               once, and a bias's gradient after all devices have added up theirs

The derivative of an activation is written with arguments bounded to where it still changes. At
infinity it is its limit, where autodiff would multiply zero by infinity.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._choice import device_here
from shardlib.kernels._rows import compute_dtype
from shardlib.kernels._shards import as_varying, varying, varying_alike

ActivationName: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "sigmoid"]

# Beyond this every activation is zero, one or its argument, and every slope zero or one, in float64
# too. The cube of this is finite in float32.
BOUND = 1000.0
# GELU's approximation, x * (1 + tanh(ROOT * (x + CUBIC * x^3))) / 2.
ROOT = math.sqrt(2 / math.pi)
CUBIC = 0.044715


def glu(gate: jax.Array, up: jax.Array, activation: ActivationName = "silu") -> jax.Array:
    """A gated linear unit, `activation(gate) * up`: SwiGLU, GeGLU, ReGLU or GLU.

    Args:
        gate: float32, bfloat16, float16 or float64. It is computed in float32 or wider and rounded
            once.
        up: of the shape and dtype of `gate`.
        activation: "silu", which is SwiGLU, "gelu" or its approximation "gelu_tanh", GeGLU, "relu"
            or "sigmoid".

    Backward, only `gate` and `up` are needed. Elementwise, it needs no names: it runs under any
    sharding, and in any `shard_map`.

    >>> import jax.numpy as jnp
    >>> glu(jnp.array([1.0, -2.0]), jnp.array([3.0, 3.0]), "relu")
    Array([3., 0.], dtype=float32)
    """
    gate = check_arrays.as_array("glu", "gate", gate)
    up = check_arrays.as_array("glu", "up", up)
    _check_activation("glu", activation)
    _check_floats("glu", "gate", gate)
    # Neither is rounded or broadcast without being asked to be.
    if (up.shape, up.dtype) != (gate.shape, gate.dtype):
        raise ValueError(
            f"`glu`: `up` is {up.dtype}{list(up.shape)} and `gate` is "
            f"{gate.dtype}{list(gate.shape)}: they are multiplied, in one dtype; `astype` the one "
            "that is to be rounded."
        )
    gate, up = varying_alike(gate, up)
    return _gated(activation, gate, up)


def activate(
    x: jax.Array, bias: jax.Array | None = None, activation: ActivationName = "gelu_tanh"
) -> jax.Array:
    """`activation(x + bias)`: the bias-GELU of GPT, and likewise of other activations.

    Args:
        x: float32, bfloat16, float16 or float64. It is computed in float32 or wider and rounded
            once: the sum is not rounded.
        bias: of the last dim's size, of any float dtype.
        activation: "gelu_tanh", GELU's approximation as GPT has it, "gelu", "silu", "relu" or
            "sigmoid".

    Backward, only `x` and `bias` are needed. Elementwise, it needs no names: it runs under any
    sharding, and in any `shard_map`.

    >>> import jax.numpy as jnp
    >>> activate(jnp.array([1.0, -2.0]), jnp.array([1.0, 1.0]), "relu")
    Array([2., 0.], dtype=float32)
    """
    x = check_arrays.as_array("activate", "x", x)
    _check_activation("activate", activation)
    _check_floats("activate", "x", x)
    if bias is not None:
        bias = _checked_bias(bias, x)
        x = as_varying(x, varying(bias))
    return _biased(activation, x, bias)


def _gated_value(activation: ActivationName, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The unit of arrays of one shape and dtype."""
    value = ACTIVATIONS[activation].value(_wide(gate))
    return (value * _wide(up)).astype(gate.dtype)


def _gated_forward(activation: ActivationName, gate: jax.Array, up: jax.Array) -> tuple[Any, Any]:
    """The unit, and what backward needs of it: the arguments alone.

    It is the formula itself, not the function with a derivative of its own, so that a gradient has
    derivatives in both modes.
    """
    return _gated_value(activation, gate, up), (gate, up)


def _gated_backward(activation: ActivationName, saved: Any, gradient: jax.Array) -> tuple[Any, Any]:
    """The gradients to the gate and to what it multiplies.

    Both are made wide from the arguments, and rounded once.
    """
    gate, up = saved
    one = ACTIVATIONS[activation]
    z, g = _wide(gate), _wide(gradient)
    # In this order: a slope of zero makes zero of any finite gradient.
    gate_gradient = g * (_wide(up) * one.slope(_bounded(z)))
    up_gradient = g * one.value(z)
    gradients = gate_gradient.astype(gate.dtype), up_gradient.astype(up.dtype)
    # Two products read each of them. Without a barrier the TPU's compiler computes it in both.
    return lax.optimization_barrier(gradients)


_gated: Any = jax.custom_vjp(_gated_value, nondiff_argnums=(0,))
_gated.defvjp(_gated_forward, _gated_backward)


def _biased_value(activation: ActivationName, x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The activation of a sum, or of `x` alone where there is no bias.

    The sum is wide, and never in memory.
    """
    return ACTIVATIONS[activation].value(_sum(x, bias)).astype(x.dtype)


def _biased_forward(
    activation: ActivationName, x: jax.Array, bias: jax.Array | None
) -> tuple[Any, Any]:
    """The activation, and what backward needs of it: the arguments alone.

    As for the gated unit, it is the formula itself.
    """
    return _biased_value(activation, x, bias), (x, bias)


def _biased_backward(
    activation: ActivationName, saved: Any, gradient: jax.Array
) -> tuple[Any, Any]:
    """The gradients to `x` and to the bias, which all rows share.

    The gradient to the bias is a wide sum over all rows. Where JAX tracks over which axes arrays
    vary, these include the rows of other devices.
    """
    x, bias = saved
    z = _sum(x, bias)
    z_gradient = _wide(gradient) * ACTIVATIONS[activation].slope(_bounded(z))
    x_gradient = z_gradient.astype(x.dtype)
    if bias is None:
        return x_gradient, None
    # The GPU's compiler would write the wide gradient to memory for the sum over rows. On a GPU the
    # sum is therefore over the rounded gradient, which is in memory anyway.
    if device_here().platform == "gpu":
        x_gradient = lax.optimization_barrier(x_gradient)
        z_gradient = _wide(x_gradient)
    bias_gradient = z_gradient.sum(tuple(range(x.ndim - 1)))
    # JAX would add up over devices after rounding.
    others = tuple(sorted(varying(bias_gradient) - varying(bias)))
    if others:
        bias_gradient = lax.psum(bias_gradient, others)
    return x_gradient, bias_gradient.astype(bias.dtype)


_biased: Any = jax.custom_vjp(_biased_value, nondiff_argnums=(0,))
_biased.defvjp(_biased_forward, _biased_backward)


def _wide(x: jax.Array) -> jax.Array:
    """An array in the dtype to compute in."""
    return x.astype(compute_dtype(x.dtype))


def _sum(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    """The argument of the activation, wide."""
    z = _wide(x)
    if bias is not None:
        z = z + bias.astype(z.dtype)
    return z


def _bounded(z: jax.Array) -> jax.Array:
    """Numbers with the same slopes as the given ones, at which no factor of a slope is infinite.

    A nan stays one, and so do its slopes, except for that of ReLU.
    """
    return jnp.clip(z, -BOUND, BOUND)


def _above(z: jax.Array) -> jax.Array:
    """Numbers to be multiplied by a factor that is zero below `-BOUND`.

    At minus infinity the product is then zero, its limit; elsewhere it is not changed.
    """
    return jnp.maximum(z, -BOUND)


class Activation(NamedTuple):
    """A function of numbers, and its derivative at numbers that `_bounded` gives."""

    value: Callable[[jax.Array], jax.Array]
    slope: Callable[[jax.Array], jax.Array]


def _silu(z: jax.Array) -> jax.Array:
    """Each number times its sigmoid."""
    return _above(z) * jax.nn.sigmoid(z)


def _silu_slope(z: jax.Array) -> jax.Array:
    """`s + z s (1 - s)`, with the sigmoid `s`.

    `1 - s` is the sigmoid of the other sign, where nothing cancels.
    """
    return jax.nn.sigmoid(z) * (1 + z * jax.nn.sigmoid(-z))


def _gelu(z: jax.Array) -> jax.Array:
    """Each number times the normal distribution function at it."""
    return _above(z) * _normal_cdf(z)


def _gelu_slope(z: jax.Array) -> jax.Array:
    """The normal distribution function, plus the number times its density."""
    density = jnp.exp(-0.5 * jnp.square(z)) / math.sqrt(2 * math.pi)
    return _normal_cdf(z) + z * density


def _normal_cdf(z: jax.Array) -> jax.Array:
    """The cumulative distribution function of the standard normal distribution."""
    return 0.5 * lax.erfc(-z / math.sqrt(2))


def _gelu_tanh(z: jax.Array) -> jax.Array:
    """GELU with its distribution function approximated by a hyperbolic tangent.

    It is `jax.nn.gelu(z, approximate=True)`, which is GPT's. The approximation `(1 + tanh(u)) / 2`
    is computed as the sigmoid of `2 u`, where nothing cancels.
    """
    return _above(z) * jax.nn.sigmoid(_approximate(z))


def _gelu_tanh_slope(z: jax.Array) -> jax.Array:
    """`s + z s (1 - s) a'`, with the sigmoid `s` of the approximation `a`.

    It is the derivative of the approximation, not an approximation of GELU's.
    """
    a = _approximate(z)
    a_slope = 2 * ROOT * (1 + 3 * CUBIC * jnp.square(z))
    return jax.nn.sigmoid(a) * (1 + z * jax.nn.sigmoid(-a) * a_slope)


def _approximate(z: jax.Array) -> jax.Array:
    """The number whose sigmoid is about the normal distribution function at `z`."""
    return 2 * ROOT * (z + CUBIC * (z * z * z))


def _relu_slope(z: jax.Array) -> jax.Array:
    """One above zero, and zero elsewhere, also at nan, like the slope of `jax.nn.relu`."""
    return (z > 0).astype(z.dtype)


def _sigmoid_slope(z: jax.Array) -> jax.Array:
    """`s (1 - s)`, with the sigmoid `s`."""
    return jax.nn.sigmoid(z) * jax.nn.sigmoid(-z)


ACTIVATIONS: dict[ActivationName, Activation] = {
    "silu": Activation(_silu, _silu_slope),
    "gelu": Activation(_gelu, _gelu_slope),
    "gelu_tanh": Activation(_gelu_tanh, _gelu_tanh_slope),
    "relu": Activation(jax.nn.relu, _relu_slope),
    "sigmoid": Activation(jax.nn.sigmoid, _sigmoid_slope),
}


def _check_activation(op: str, activation: Any) -> None:
    """Refuse what is no name of an activation.

    The error lists the names that there are.
    """
    check.choice(op, "activation", activation, get_args(ActivationName))


def _check_floats(op: str, argument: str, x: jax.Array) -> None:
    """Refuse an array that is not of floats.

    An array of integers would have to be rounded to them.
    """
    if not check_arrays.is_float(x.dtype):
        raise ValueError(
            f"`{op}`: `{argument}` is {x.dtype}{list(x.shape)}: give it floats of 16 bits or more."
        )


def _checked_bias(bias: Any, x: jax.Array) -> jax.Array:
    """A bias as an array, if it has a float for each number of a row of `x`.

    It is not broadcast otherwise, since its gradient is a sum over rows.
    """
    bias = check_arrays.as_array("activate", "bias", bias)
    if x.ndim < 1 or bias.shape != x.shape[-1:] or not check_arrays.is_float(bias.dtype):
        raise ValueError(
            f"`activate`: `bias` is {bias.dtype}{list(bias.shape)}; it has a float for each number "
            f"of a row of `x`, which is {x.dtype}{list(x.shape)}."
        )
    return bias
