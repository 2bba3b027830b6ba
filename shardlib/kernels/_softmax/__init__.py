"""Masked, scaled softmax over the last dim."""

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
    place,
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
    """The softmax of `scale * x` over the last dim, of what the mask leaves.

    Args:
        x: float32, bfloat16 or float16, of one dim or more. It is computed in float32 and rounded
            once.
        names: of the dims of `x`, where they are split over devices. Where the last is split,
            devices exchange a maximum and a sum for each row, and one number for each backward.
        where: what to leave in, bools that broadcast to `x`; only what is there of it is read (on
            GPUs, of rows of 128 numbers or more). What is left out is zero, and a row of which
            nothing is left.
        scale: a number.
        causal: leave to each query, of the dim before the last, the keys up to its own place.
            Nothing is read for it.
        implementation: None takes what is fastest here; by name, that or an error. See `explain`.

    Backward, only what it gave is needed: it saves no other array.

    >>> softmax(jnp.array([[0.0, 0.0, 5.0]]), where=jnp.array([True, True, False]))
    Array([[0.5, 0.5, 0. ]], dtype=float32)
    """
    x = check_arrays.as_array("softmax", "x", x)
    causal = check.boolean("softmax", "causal", causal)
    scale = check.number(
        "softmax", "scale", scale, "a Python number; multiply `x` by what has a gradient"
    )
    where = _checked(x, where, causal)
    of_x = layout_of("softmax", x, names)
    if causal and of_x.whole[-1] != of_x.whole[-2]:
        raise ValueError(
            f"`softmax(causal=True)` of {list(of_x.whole)}: {of_x.whole[-2]} queries and "
            f"{of_x.whole[-1]} keys, and it is not said which stand at the same place. Name the "
            "dims if they are parts, or say what each query sees: `where=...`."
        )
    of_where = None if where is None else of_x.like(where.shape)
    task = Task(
        "softmax",
        {"x": _here(x, of_x)}
        | ({} if where is None or of_where is None else {"where": _here(where, of_where)}),
        partitioned=partitioned(of_x),
        summed=of_x.axes[-1],
        device=device_here(),
    )
    call = Call(choose(IMPLEMENTATIONS, task, implementation), of_x, of_where, float(scale), causal)
    if x.size == 0:
        return x
    x, where = varying_alike(x, where)
    return cast(jax.Array, _softmax(call, x, where))


@dataclass(frozen=True)
class Call:
    """What is known of a call before its numbers are."""

    chosen: Chosen
    of_x: ArrayLayout
    of_where: ArrayLayout | None
    scale: float
    causal: bool

    @property
    def options(self) -> dict[str, Any]:
        axes = self.of_x.axes[-1]
        return {"scale": self.scale, **({"axes": axes} if axes else {}), **self.chosen.options}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _softmax(call: Call, x: jax.Array, where: jax.Array | None) -> jax.Array:
    def here(x: jax.Array, where: jax.Array | None) -> jax.Array:
        first = None
        if call.causal:
            first = jnp.stack(
                [
                    place(axes, size)
                    for axes, size in zip(call.of_x.axes[-2:], x.shape[-2:], strict=True)
                ]
            )
        return call.chosen.implementation.forward(
            x, where, first, causal=call.causal, **call.options
        )

    return per_shard(here, (x, where), (call.of_x, call.of_where), call.of_x)


def _forward(call: Call, x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    y = cast(jax.Array, _softmax(call, x, where))
    return y, y


def _backward(call: Call, y: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    here = partial(call.chosen.implementation.backward, **call.options)
    return per_shard(here, (y, gradient), (call.of_x, call.of_x), call.of_x), None


_softmax.defvjp(_forward, _backward)


def _here(x: jax.Array, of_x: ArrayLayout) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(of_x.here, x.dtype)


def _checked(x: jax.Array, where: Any, causal: bool) -> jax.Array | None:
    """The mask with a dim for each of `x`, if what was given can be meant."""
    if not check_arrays.is_float(x.dtype) or x.ndim < 1 + causal:
        raise ValueError(
            f"`softmax` of {x.dtype}{list(x.shape)}: give it floats of 16 bits or more, with a dim "
            "for the rows' numbers"
            + (", and, as it is `causal`, one for the queries before." if causal else ".")
        )
    if where is None:
        return None
    where = check_arrays.as_array("softmax", "where", where, "an array of bools")
    if where.dtype != bool:
        raise ValueError(
            f"`softmax(where={where.dtype}{list(where.shape)})`: bools, true where `x` is left in."
        )
    try:
        fits = jnp.broadcast_shapes(where.shape, x.shape) == x.shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            f"`softmax`: `where` of shape {where.shape} does not broadcast to `x` of "
            f"shape {x.shape}."
        )
    return where.reshape((1,) * (x.ndim - where.ndim) + where.shape)
