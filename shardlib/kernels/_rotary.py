"""Rotary positions: pairs of a head's numbers, turned by the angle of their position.

For a number `a` in the first half of a head, and the number `b` at the same index in the second:

    a cos - b sin        b cos + a sin

With the halves exchanged, this is elementwise. The compiler for TPUs cannot exchange halves of a
row of lanes inside a fusion, and writes both to memory first. So on a TPU they are exchanged by a
product with a permutation matrix, which is exact, and small beside the projection before it.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._choice import device_here
from shardlib.kernels._rows import compute_dtype
from shardlib.kernels._shards import as_varying, varying

OP = "rotate"


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary positions (RoPE): each pair of a head's numbers, turned by an angle.

    Args:
        x: queries or keys, `(..., size)`, of float32, bfloat16, float16 or float64. Numbers `i` and
            `i + size / 2` are a pair, as in Llama. It is computed in float32 or wider and rounded
            once.
        cos: the cosines of the angles, of a shape that broadcasts to `(..., size / 2)`, such as
            `(positions, 1, size / 2)` for `x` of `(batch, positions, heads, size)`.
        sin: the sines, of the shape of `cos`.

    The backward pass turns the gradient back, and keeps only the angles. No names are needed: it
    runs under any sharding that leaves heads whole, and in any `shard_map`. On a TPU, one number
    that is not finite makes all numbers of its head nonfinite.

    >>> import jax.numpy as jnp
    >>> rotate(jnp.array([1.0, 2.0]), jnp.array([0.0]), jnp.array([1.0]))
    Array([-2.,  1.], dtype=float32)
    """
    x = check_arrays.as_array(OP, "x", x)
    cos, sin = (check_arrays.as_array(OP, name, a) for name, a in (("cos", cos), ("sin", sin)))
    for name, array in (("x", x), ("cos", cos), ("sin", sin)):
        if not check_arrays.is_float(array.dtype):
            raise ValueError(
                f"`{OP}`: `{name}` is {array.dtype}{list(array.shape)}: give it floats of 16 bits "
                "or more."
            )
    if not x.ndim or x.shape[-1] % 2:
        raise ValueError(
            f"`{OP}`: `x` is {x.dtype}{list(x.shape)}: its last dim is a head's, and an even "
            "number of them makes pairs."
        )
    pairs = (*x.shape[:-1], x.shape[-1] // 2)
    if cos.shape != sin.shape or not _broadcasts(cos.shape, pairs):
        raise ValueError(
            f"`{OP}`: `cos` is {list(cos.shape)} and `sin` {list(sin.shape)}, of an `x` of "
            f"{list(x.shape)}: give both one shape that broadcasts to {list(pairs)}, an angle for "
            "each pair."
        )
    # Only `x` is made varying: from the axes over which angles do not vary, backward knows over
    # which their gradients are summed.
    return _rotated(as_varying(x, varying(cos) | varying(sin)), cos, sin)


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether an array of one shape can be broadcast to another, with a last dim of its own."""
    if not shape or len(shape) > len(wanted) or shape[-1] != wanted[-1]:
        return False
    own = wanted[len(wanted) - len(shape) :]
    return all(a in (1, b) for a, b in zip(shape, own, strict=True))


def _value(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The pairs of `x`, turned."""
    dtype = compute_dtype(x.dtype)
    cos, sin = cos.astype(dtype), sin.astype(dtype)
    # Angles for both halves. There are few of them, since all heads of a position share theirs.
    cos, sin = jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)
    return (x.astype(dtype) * cos + _exchanged(x) * sin).astype(x.dtype)


def _exchanged(x: jax.Array) -> jax.Array:
    """The array with the halves of its last dim exchanged, in the dtype to compute in."""
    dtype = compute_dtype(x.dtype)
    if device_here().platform != "tpu" or dtype == jnp.float64:
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([b, a], axis=-1).astype(dtype)
    # A matrix unit multiplies numbers of more than 16 bits in parts; at the highest precision, all
    # of these. Each sum has one product that is not zero, so it is exact.
    operand = x if x.dtype == jnp.bfloat16 else x.astype(dtype)
    size = x.shape[-1]
    permutation = jnp.roll(jnp.eye(size, dtype=operand.dtype), size // 2, 1)
    return jnp.einsum(
        "...i,ij->...j",
        operand,
        permutation,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )


def _forward(x: Any, cos: Any, sin: Any) -> tuple[jax.Array, Any]:
    """The pairs, turned, and what backward needs: the angles, and `x` only for theirs.

    Each argument is a `CustomVJPPrimal`: its value, and whether it is differentiated, `perturbed`.
    """
    # Angles are hardly ever trained: without this, queries would be kept for gradients of theirs.
    kept = x.value if cos.perturbed or sin.perturbed else None
    arrays = (x.value, cos.value, sin.value)
    # Not `_value`, whose product on a TPU would be kept by whoever keeps results of products.
    return _rotated(*arrays), (kept, cos.value, sin.value)


def _backward(saved: Any, gradient: Any) -> tuple[Any, Any, Any]:
    """The gradients to `x` and to the cosines and sines."""
    x, cos, sin = saved
    # JAX may give a symbolic zero; here it becomes an array.
    if isinstance(gradient, SymbolicZero):
        aval: Any = gradient.aval
        gradient = jnp.zeros(aval.shape, aval.dtype)
    x_gradient = _value(gradient, cos, -sin)
    if x is None:
        return x_gradient, None, None
    dtype = compute_dtype(x.dtype)
    # The cosine scales `a` and `b`; the sine exchanges them, one with its sign changed.
    (a, b), (da, db) = (jnp.split(array.astype(dtype), 2, -1) for array in (x, gradient))
    return x_gradient, _summed(da * a + db * b, cos), _summed(db * a - da * b, sin)


def _summed(gradient: jax.Array, angles: jax.Array) -> jax.Array:
    """A gradient for each pair, added up over those that share an angle.

    Where JAX tracks over which axes arrays vary, the sum over devices is taken before rounding.
    """
    first = gradient.ndim - angles.ndim
    summed = gradient.sum(tuple(range(first)))
    for dim, size in enumerate(angles.shape):
        if size != summed.shape[dim]:
            summed = summed.sum(dim, keepdims=True)
    others = tuple(sorted(varying(summed) - varying(angles)))
    if others:
        summed = lax.psum(summed, others)
    return summed.astype(angles.dtype)


_rotated: Any = jax.custom_vjp(_value)
_rotated.defvjp(_forward, _backward, symbolic_zeros=True)
