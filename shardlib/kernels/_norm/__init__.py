"""RMSNorm and LayerNorm over the last dim, with a residual added.

The two public functions are one op, which subtracts the mean or does not. It checks its arguments,
finds out how they are laid out, chooses an implementation and calls it on each device's own shard.
Forward and backward are one `custom_vjp`: backward needs `h`, the sum of `x` and the residual, and
makes the norm's statistics again, which is cheaper than to keep them.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

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

IMPLEMENTATIONS = (
    Implementation("reference", None, f"{__name__}._reference"),
    Implementation("tpu", "tpu", f"{__name__}._tpu"),
    Implementation("gpu", "gpu", f"{__name__}._gpu"),
    Implementation("tokamax", "gpu", f"{__name__}._tokamax", has_simulator=False),
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
        names: the names of the dims of `x`, if they are split over devices. If the last dim is
            split, devices exchange a sum for each row.
        epsilon: is added to the mean of squares.
        implementation: None chooses the fastest one here. A name chooses that one, or raises an
            error if it cannot run. See `explain`.

    Backward needs only `h`, which is `x` if there is no residual.

    >>> import jax.numpy as jnp
    >>> rms_norm(jnp.array([[3.0, 3.0]]), jnp.array([1.0, 2.0]), epsilon=0)
    Array([[1., 2.]], dtype=float32)
    """
    arrays = _Arrays(x, residual, scale, None)
    return _norm("rms_norm", arrays, names, epsilon, implementation)


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
        names: the names of the dims of `x`, if they are split over devices. If the last dim is
            split, devices exchange two sums for each row.
        epsilon: is added to the variance.
        implementation: None chooses the fastest one here. A name chooses that one, or raises an
            error if it cannot run. See `explain`.

    Backward needs only `h`, which is `x` if there is no residual.

    >>> import jax.numpy as jnp
    >>> layer_norm(jnp.array([[1.0, 3.0]]), epsilon=0)
    Array([[-1.,  1.]], dtype=float32)
    """
    arrays = _Arrays(x, residual, scale, bias)
    return _norm("layer_norm", arrays, names, epsilon, implementation)


class _Arrays(NamedTuple):
    """The arrays of a norm, in the order in which forward takes them; all but `x` may be None."""

    x: Any
    residual: Any
    scale: Any
    bias: Any


def _norm(
    op: str, arrays: _Arrays, names: Names | None, epsilon: float, requested: str | None
) -> Any:
    """Check a call of either norm, choose an implementation, and run it.

    Args:
        op: the public function.
        arrays: what it was given.
        names: of the dims of `x`, or None.
        epsilon: what is added to the mean square.
        requested: the implementation that was asked for by name, or None.
    """
    arrays, epsilon = _checked(op, arrays, epsilon)
    x, residual = arrays.x, arrays.residual
    # A row is normed wherever it is.
    x_layout = layout_of(op, x, names, in_any_order=tuple(range(x.ndim - 1)))
    row_layout = x_layout.select(x.ndim - 1)
    layouts = _Arrays(x_layout, x_layout, row_layout, row_layout)
    # Kernels are chosen by what one device sees.
    local, differing = {}, frozenset[str]()
    for name, array, layout in zip(_Arrays._fields, arrays, layouts, strict=True):
        if array is not None:
            local[name] = layout.local(array.dtype)
            differing |= varying(array)
    task = Task(op, local, partitioned(x_layout), x_layout.axes[-1], differing, device_here())
    chosen = choose(IMPLEMENTATIONS, task, requested)
    call = Call(chosen, x_layout, float(epsilon), op == "layer_norm")
    # No kernel takes arrays without numbers.
    y, h = x, x
    if x.size:
        y, h = cast(Any, _normed)(call, *varying_alike(*arrays))
    if residual is None:
        return y
    return y, h


@dataclass(frozen=True)
class Call:
    """What is known of a call before its numbers are: the static argument of the `custom_vjp`."""

    chosen: Chosen
    x_layout: ArrayLayout
    epsilon: float
    centred: bool

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that forward and backward of the implementation both take."""
        options: dict[str, Any] = {"epsilon": self.epsilon, "centred": self.centred}
        summed = self.x_layout.axes[-1]
        if summed:
            # Only implementations that add up over devices know `axes`; others refused the task.
            options["axes"] = summed
        return options | self.chosen.options

    @property
    def row_layout(self) -> ArrayLayout:
        """The layout of what has the numbers of one row: scale and bias."""
        return self.x_layout.select(len(self.x_layout.shape) - 1)

    @property
    def rows_axes(self) -> tuple[str, ...]:
        """The automatic axes that split rows.

        Over these, gradients of scale and bias are added up inside the `shard_map` of the op.
        """
        return self.x_layout.automatic_axes(*range(len(self.x_layout.shape) - 1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normed(call: Call, x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
    """The norm of each device's shard, and `h`."""
    run_shard = partial(call.chosen.implementation.forward, **call.options)
    layouts = (call.x_layout, call.x_layout, call.row_layout, call.row_layout)
    results = (call.x_layout, call.x_layout)
    return per_shard(run_shard, (x, residual, scale, bias), layouts, results)


def _forward(call: Call, x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
    """The norm and `h`, and what backward needs of them."""
    y, h = cast(Any, _normed)(call, x, residual, scale, bias)
    return (y, h), (h, scale, bias, residual is not None)


def _backward(call: Call, saved: Any, gradients: tuple[Any, Any]) -> tuple[Any, ...]:
    """The gradients to `x`, the residual, scale and bias.

    `x` and the residual have the same gradient. Those of scale and bias are sums over rows, and
    are added up over the devices that have other rows.
    """
    # Statistics are made again from `h`: they cost less than a read of memory.
    h, scale, bias, added = saved
    gradient, h_gradient = gradients
    if not added:
        h_gradient = None  # nobody was given `h`

    def run_shard(h: Any, scale: Any, gradient: Any, h_gradient: Any) -> tuple[Any, ...]:
        x_gradient, *row_gradients = call.chosen.implementation.backward(
            h, scale, gradient, h_gradient, biased=bias is not None, **call.options
        )
        if call.rows_axes:
            for k, row_gradient in enumerate(row_gradients):
                if row_gradient is not None:
                    row_gradients[k] = lax.psum(row_gradient, call.rows_axes)
        return x_gradient, *row_gradients

    layouts = (call.x_layout, call.row_layout, call.x_layout, call.x_layout)
    row_results: list[ArrayLayout | None] = []
    for array in (scale, bias):
        row_results.append(None if array is None else call.row_layout)
    x_gradient, *row_gradients = per_shard(
        run_shard, (h, scale, gradient, h_gradient), layouts, (call.x_layout, *row_results)
    )
    # Sums over rows come wide: they are rounded once, after devices have added up theirs.
    rounded: list[Any] = []
    for array, row_gradient in zip((scale, bias), row_gradients, strict=True):
        if array is not None:
            row_gradient = row_gradient.astype(array.dtype)
        rounded.append(row_gradient)
    residual_gradient = None
    if added:
        residual_gradient = x_gradient
    return x_gradient, residual_gradient, *rounded


_normed.defvjp(_forward, _backward)


def _checked(op: str, arrays: _Arrays, epsilon: Any) -> tuple[_Arrays, Any]:
    """The arguments of a norm, as arrays, if they fit each other.

    Raises an error that names the argument which does not fit.
    """
    x = check_arrays.as_array(op, "x", arrays.x)
    given: dict[str, Any] = {"scale": arrays.scale, "bias": arrays.bias}
    given["residual"] = arrays.residual
    for name, array in given.items():
        if array is not None:
            given[name] = check_arrays.as_array(op, name, array)
    residual = given["residual"]
    epsilon = check.number(op, "epsilon", epsilon, "a number", least=0)
    if not check_arrays.is_float(x.dtype) or x.ndim < 1:
        raise ValueError(
            f"`{op}` of {x.dtype}{list(x.shape)}: give it floats of 16 bits or more, with a dim "
            "for the numbers of a row."
        )
    for name in ("scale", "bias"):
        _check_row(op, name, given[name], x)
    # Neither is rounded or broadcast without being asked to be.
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ValueError(
            f"`{op}`: `residual` is {residual.dtype}{list(residual.shape)} and `x` is "
            f"{x.dtype}{list(x.shape)}: they are added, in one dtype; `astype` the one that is to "
            "be rounded."
        )
    return _Arrays(x, residual, given["scale"], given["bias"]), epsilon


def _check_row(op: str, name: str, array: Any, x: Any) -> None:
    """Refuse a scale or bias that has not a float for each number of a row.

    None is a scale or bias that was not given.
    """
    if array is None:
        return
    if array.shape != x.shape[-1:] or not check_arrays.is_float(array.dtype):
        raise ValueError(
            f"`{op}`: `{name}` is {array.dtype}{list(array.shape)}; it has a float for each of the "
            f"{x.shape[-1]} numbers of a row of `x`, which is {x.dtype}{list(x.shape)}."
        )
