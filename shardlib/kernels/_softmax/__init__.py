"""Masked, scaled softmax over the last dim.

The public function checks its arguments, finds out how they are laid out, chooses an implementation
and calls it on each device's own shard. Forward and backward are one `custom_vjp`, since backward
needs only what forward returned.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._choice import Chosen, Implementation, Task, choose, device_here
from shardlib.kernels._shards import (
    ArrayLayout,
    Names,
    layout_of,
    partitioned,
    per_shard,
    shard_offset,
    varying_alike,
)

IMPLEMENTATIONS = (
    Implementation("reference", None, f"{__name__}._reference"),
    Implementation("tpu", "tpu", f"{__name__}._tpu"),
    Implementation("gpu", "gpu", f"{__name__}._gpu"),
)


def softmax(
    x: jax.Array,
    *,
    names: Names | None = None,
    where: jax.Array | None = None,
    scale: float = 1.0,
    causal: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """The softmax of `scale * x` over the last dim, with masks.

    Args:
        x: float32, bfloat16 or float16, of one dim or more. It is computed in float32 and rounded
            once.
        names: the names of the dims of `x`, if they are split over devices. If the last dim is
            split, devices exchange a maximum and a sum for each row, and in the backward pass one
            number for each row.
        where: bools that broadcast to `x`, true for elements that take part. The mask is read in
            its own shape (on GPUs, for rows of 128 numbers or more). Elements that are masked are
            zero in the result, and so is a row that is masked completely.
        scale: a number.
        causal: mask keys (the last dim) after the position of the query (the dim before it),
            without reading a mask from memory.
        implementation: None chooses the fastest one here. A name chooses that one, or raises an
            error if it cannot run. See `explain`.

    The backward pass needs only the result: no other array is saved.

    >>> softmax(jnp.array([[0.0, 0.0, 5.0]]), where=jnp.array([True, True, False]))
    Array([[0.5, 0.5, 0. ]], dtype=float32)
    """
    x = check_arrays.as_array("softmax", "x", x)
    causal = check.boolean("softmax", "causal", causal)
    scale = check.number(
        "softmax", "scale", scale, "a Python number; multiply `x` by what has a gradient"
    )
    where = _checked_mask(x, where, causal)
    # Of causal scores the last two dims are positions; any other row is the same wherever it is.
    rows = x.ndim - (2 if causal else 1)
    x_layout = layout_of("softmax", x, names, in_any_order=tuple(range(rows)))
    if causal:
        _check_square(x_layout)
    local = {"x": x_layout.local(x.dtype)}
    where_layout = None
    if where is not None:
        where_layout = x_layout.broadcasting(where.shape)
        local["where"] = where_layout.local(where.dtype)
    task = Task(
        "softmax",
        local,
        partitioned=partitioned(x_layout),
        summed=x_layout.axes[-1],
        device=device_here(),
    )
    chosen = choose(IMPLEMENTATIONS, task, implementation)
    call = Call(chosen, x_layout, where_layout, float(scale), causal)
    if x.size == 0:
        return x  # no kernel takes arrays without numbers
    x, where = varying_alike(x, where)
    return cast(jax.Array, _softmax(call, x, where))


def _check_square(x_layout: ArrayLayout) -> None:
    """Refuse a causal mask where it is not known which query and key are at the same place."""
    *_, queries, keys = x_layout.global_shape
    if queries != keys:
        raise ValueError(
            f"`softmax(causal=True)` of {list(x_layout.global_shape)}: {queries} queries and "
            f"{keys} keys, and it is not said which stand at the same place. Name the "
            "dims if they are parts, or say what each query sees: `where=...`."
        )


@dataclass(frozen=True)
class Call:
    """What is known of a call before its numbers are: the static argument of the `custom_vjp`."""

    chosen: Chosen
    x_layout: ArrayLayout
    where_layout: ArrayLayout | None
    scale: float
    causal: bool

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that forward and backward of the implementation both take."""
        options: dict[str, Any] = {"scale": self.scale}
        summed = self.x_layout.axes[-1]
        if summed:
            # Only implementations that add up over devices know `axes`; others refused the task.
            options["axes"] = summed
        return options | self.chosen.options


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(call: Call, x: jax.Array, where: jax.Array | None) -> jax.Array:
    """The softmax of each device's shard."""

    def run_shard(x: jax.Array, where: jax.Array | None) -> jax.Array:
        offsets = None
        if call.causal:
            offsets = _first_positions(call, x)
        return call.chosen.implementation.forward(
            x, where, offsets, causal=call.causal, **call.options
        )

    return per_shard(run_shard, (x, where), (call.x_layout, call.where_layout), call.x_layout)


def _first_positions(call: Call, x: jax.Array) -> jax.Array:
    """The positions of a shard's first query and first key."""
    axes_and_sizes = zip(call.x_layout.axes[-2:], x.shape[-2:], strict=True)
    return jnp.stack([shard_offset(axes, size) for axes, size in axes_and_sizes])


def _forward(call: Call, x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The softmax, which is also all that backward needs."""
    y = cast(jax.Array, _softmax(call, x, where))
    return y, y


def _backward(call: Call, y: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    """The gradient to `x`; a mask has none."""
    run_shard = partial(call.chosen.implementation.backward, **call.options)
    layouts = (call.x_layout, call.x_layout)
    return per_shard(run_shard, (y, gradient), layouts, call.x_layout), None


_softmax.defvjp(_forward, _backward)


def _checked_mask(x: jax.Array, where: Any, causal: bool) -> jax.Array | None:
    """The mask with as many dims as `x`, or None.

    Refuses an `x` that has no softmax, and a mask that is not one of bools for it.
    """
    if not check_arrays.is_float(x.dtype) or x.ndim < 1 + causal:
        ending = "."
        if causal:
            ending = ", and, as it is `causal`, one for the queries before."
        raise ValueError(
            f"`softmax` of {x.dtype}{list(x.shape)}: give it floats of 16 bits or more, with a dim "
            f"for the rows' numbers{ending}"
        )
    if where is None:
        return None
    where = check_arrays.as_array("softmax", "where", where, "an array of bools")
    _check_where(where, x.shape)
    return where.reshape((1,) * (x.ndim - where.ndim) + where.shape)


def _check_where(where: jax.Array, shape: tuple[int, ...]) -> None:
    """Refuse a mask that is not of bools, or does not broadcast to what it masks."""
    if where.dtype != bool:
        raise ValueError(
            f"`softmax(where={where.dtype}{list(where.shape)})`: bools, true where `x` is left in."
        )
    try:
        fits = jnp.broadcast_shapes(where.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`softmax`: `where` of shape {where.shape} does not broadcast to `x` of shape {shape}."
        )
