"""RMSNorm and LayerNorm over the last dim, with a residual added."""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._choice import Chosen, Implementation, Task, choose, device_here
from shardlib.kernels._shards import (
    ArrayLayout,
    Names,
    layout_of,
    partitioned,
    per_shard,
    varying,
    varying_alike,
)
from shardlib.layouts._rules import as_tuple

IMPLEMENTATIONS = (
    Implementation("reference", None, f"{__name__}._reference"),
    Implementation("tpu", "tpu", f"{__name__}._tpu"),
    Implementation("gpu", "gpu", f"{__name__}._gpu"),
    Implementation("tokamax", "gpu", f"{__name__}._tokamax", ours=False),
)


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    names: Names | None = None,
    epsilon: float = 1e-6,
    implementation: str | None = None,
) -> Any:
    """`x * rsqrt(mean(x^2) + epsilon) * scale` over the last dim.

    Args:
        x: float32, bfloat16 or float16. It is computed in float32 and rounded once.
        scale: of the last dim's size, of any float dtype.
        residual: of the shape of `x`. It is added first: the norm is that of `h = x + residual`,
            and `(y, h)` is given.
        names: of the dims of `x`, where they are split over devices. Where the last is, devices
            exchange a sum for each row.
        epsilon: is added to the mean of squares.
        implementation: None takes what is fastest here; by name, that or an error. See `explain`.

    Backward needs `h` alone, which is `x` if there is no residual.

    >>> import jax.numpy as jnp
    >>> rms_norm(jnp.array([[3.0, 3.0]]), jnp.array([1.0, 2.0]), epsilon=0)
    Array([[1., 2.]], dtype=float32)
    """
    return _norm("rms_norm", x, scale, None, residual, names, epsilon, implementation)


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    residual: jax.Array | None = None,
    names: Names | None = None,
    epsilon: float = 1e-5,
    implementation: str | None = None,
) -> Any:
    """`(x - mean(x)) * rsqrt(var(x) + epsilon) * scale + bias` over the last dim.

    Args:
        x: float32, bfloat16 or float16. It is computed in float32 and rounded once.
        scale: of the last dim's size, of any float dtype.
        bias: as `scale`.
        residual: of the shape of `x`. It is added first: the norm is that of `h = x + residual`,
            and `(y, h)` is given.
        names: of the dims of `x`, where they are split over devices. Where the last is, devices
            exchange two sums for each row.
        epsilon: is added to the variance.
        implementation: None takes what is fastest here; by name, that or an error. See `explain`.

    Backward needs `h` alone, which is `x` if there is no residual.

    >>> import jax.numpy as jnp
    >>> layer_norm(jnp.array([[1.0, 3.0]]), epsilon=0)
    Array([[-1.,  1.]], dtype=float32)
    """
    return _norm("layer_norm", x, scale, bias, residual, names, epsilon, implementation)


def _norm(
    op: str,
    x: Any,
    scale: Any,
    bias: Any,
    residual: Any,
    names: Names | None,
    epsilon: float,
    asked: str | None,
) -> Any:
    x = check_arrays.as_array(op, "x", x)
    scale, bias, residual = (
        None if one is None else check_arrays.as_array(op, name, one)
        for name, one in (("scale", scale), ("bias", bias), ("residual", residual))
    )
    epsilon = check.number(op, "epsilon", epsilon, "a number", least=0)
    _check(op, x, scale, bias, residual)
    of_x = layout_of(op, x, names)
    arrays = {"x": (x, of_x), "residual": (residual, of_x)}
    arrays |= {"scale": (scale, of_x.of(x.ndim - 1)), "bias": (bias, of_x.of(x.ndim - 1))}
    here = {
        name: jax.ShapeDtypeStruct(of.here, one.dtype)
        for name, (one, of) in arrays.items()
        if one is not None
    }
    differing = frozenset().union(
        *(varying(one) for one in (x, residual, scale, bias) if one is not None)
    )
    task = Task(op, here, partitioned(of_x), of_x.axes[-1], differing, device_here())
    call = Call(choose(IMPLEMENTATIONS, task, asked), of_x, float(epsilon), op == "layer_norm")
    if x.size == 0:
        return x if residual is None else (x, x)
    y, h = cast(Any, _normed)(call, *varying_alike(x, residual, scale, bias))
    return y if residual is None else (y, h)


@dataclass(frozen=True)
class Call:
    """What is known of a call before its numbers are."""

    chosen: Chosen
    of_x: ArrayLayout
    epsilon: float
    centred: bool

    @property
    def options(self) -> dict[str, Any]:
        axes = {"axes": self.of_x.axes[-1]} if self.of_x.axes[-1] else {}
        return {"epsilon": self.epsilon, "centred": self.centred, **axes, **self.chosen.options}

    @property
    def of_row(self) -> ArrayLayout:
        return self.of_x.of(len(self.of_x.shape) - 1)

    @property
    def over_rows(self) -> tuple[str, ...]:
        """The automatic axes that split rows: over them gradients of what all rows share are added
        up here.
        """
        return (
            ()
            if self.of_x.spec is None
            else tuple(axis for e in self.of_x.spec[:-1] for axis in as_tuple(e))
        )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(call: Call, x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
    here = partial(call.chosen.implementation.forward, **call.options)
    layouts = (call.of_x, call.of_x, call.of_row, call.of_row)
    return per_shard(here, (x, residual, scale, bias), layouts, (call.of_x, call.of_x))


def _forward(call: Call, x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
    y, h = cast(Any, _normed)(call, x, residual, scale, bias)
    return (y, h), (h, scale, bias, residual is not None)


def _backward(call: Call, saved: Any, gradients: tuple[Any, Any]) -> tuple[Any, ...]:
    h, scale, bias, added = saved
    gradient, of_h = gradients

    def here(h: Any, scale: Any, gradient: Any, of_h: Any) -> tuple[Any, ...]:
        biased = {"biased": bias is not None}
        of_x, *of_rows = call.chosen.implementation.backward(
            h, scale, gradient, of_h, **biased, **call.options
        )
        return of_x, *(
            lax.psum(one, call.over_rows) if call.over_rows and one is not None else one
            for one in of_rows
        )

    layouts = (call.of_x, call.of_row, call.of_x, call.of_x)
    operands = (h, scale, gradient, of_h if added else None)
    results = (call.of_x, *(None if one is None else call.of_row for one in (scale, bias)))
    of_x, *of_rows = per_shard(here, operands, layouts, results)
    rounded = (
        None if one is None else of.astype(one.dtype)
        for one, of in zip((scale, bias), of_rows, strict=True)
    )
    return of_x, of_x if added else None, *rounded


_normed.defvjp(_forward, _backward)


def _check(op: str, x: Any, scale: Any, bias: Any, residual: Any) -> None:
    if not check_arrays.is_float(x.dtype) or x.ndim < 1:
        raise ValueError(
            f"`{op}` of {x.dtype}{list(x.shape)}: give it floats of 16 bits or more, with a dim "
            "for the numbers of a row."
        )
    for name, one in (("scale", scale), ("bias", bias)):
        if one is not None and (one.shape != x.shape[-1:] or not check_arrays.is_float(one.dtype)):
            raise ValueError(
                f"`{op}`: `{name}` is {one.dtype}{list(one.shape)}; it has a float for each of the "
                f"{x.shape[-1]} numbers of a row of `x`, which is {x.dtype}{list(x.shape)}."
            )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"`{op}`: `residual` is {residual.dtype}{list(residual.shape)} and `x` is "
            f"{x.dtype}{list(x.shape)}: they are added, in one dtype; `astype` the one that is to "
            "be rounded."
        )
