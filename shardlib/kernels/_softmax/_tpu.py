"""Masked, scaled softmax on a TPU: whole rows at a time in fast memory, read once and written
once.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardlib.kernels._choice import Task
from shardlib.kernels._rows import Rows, batched, rows
from shardlib.kernels._tpu import (
    fits,
    interpreted,
    padded,
    parameters,
    rows_at_once,
    shaped,
    supported,
    tile_rows,
)


def refuses(task: Task) -> str | None:
    """Why it cannot do a task, if it cannot."""
    if task.summed:
        return (
            "adds up nothing between devices, and the last dim is split over "
            f"`{', '.join(task.summed)}`"
        )
    x, where = task.arrays["x"], task.arrays.get("where")
    row_bytes = _row_bytes(x.shape[-1], x.dtype, where is not None)
    tile = _tile(x.dtype, where is not None)
    return supported(task) or fits(row_bytes, tile, x.shape[-1], task)


def forward(
    x: jax.Array,
    where: jax.Array | None,
    first: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    simulated: bool = False,
) -> jax.Array:
    """As the reference's, of whole rows."""

    def here(
        depth: int, x: jax.Array, where: jax.Array | None, first: jax.Array | None
    ) -> jax.Array:
        del depth
        shapes = rows(x.shape, None if where is None else where.shape, apart=causal or padded(x))
        masks = (
            []
            if where is None
            else [(where.astype(jnp.int8).reshape(shapes.where or ()), shapes.where)]
        )
        kernel = partial(softmax_forward, scale=scale, causal=causal, masked=where is not None)
        return _over_rows(kernel, shapes, [x.reshape(shapes.x)], masks, first, simulated).reshape(
            x.shape
        )

    return batched(here, "rows", "beside", "same")(x, where, first)


def backward(
    y: jax.Array, gradient: jax.Array, *, scale: float, simulated: bool = False
) -> jax.Array:
    """As the reference's, of whole rows."""

    def here(depth: int, y: jax.Array, gradient: jax.Array) -> jax.Array:
        del depth
        shapes = rows(y.shape, None, apart=padded(y))
        operands = [y.reshape(shapes.x), gradient.reshape(shapes.x)]
        return _over_rows(
            partial(softmax_backward, scale=scale), shapes, operands, [], None, simulated
        ).reshape(y.shape)

    return batched(here, "rows", "rows")(y, gradient)


def _over_rows(
    kernel: Any,
    shapes: Rows,
    operands: list[jax.Array],
    masks: list[Any],
    first: jax.Array | None,
    simulated: bool,
) -> jax.Array:
    """Run a kernel over blocks of rows. Where a mask serves several in turn, it is read once."""
    *lead, count, row = shapes.x
    dtype, of_mask = operands[0].dtype, shapes.where
    row_bytes = _row_bytes(row, dtype, bool(masks))
    block = rows_at_once(count, row_bytes, _tile(dtype, bool(masks)))
    again = [dim for dim in range(len(lead)) if of_mask is not None and of_mask[dim] == 1]
    # The grid: dims along which the mask changes, blocks of rows, dims along which it does not.
    order = [*(dim for dim in range(len(lead)) if dim not in again), len(lead), *again]
    sizes = [*lead, math.ceil(count / block)]

    def spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        def index(*at: Any) -> tuple[Any, ...]:
            place = dict(zip(order, at, strict=True))
            return (*(place[dim] if shape[dim] > 1 else 0 for dim in range(len(lead) + 1)), 0)

        return pl.BlockSpec((*[None] * len(lead), block if shape[-2] > 1 else 1, shape[-1]), index)

    scalars = [] if first is None else [first]
    return pl.pallas_call(
        partial(kernel, rows_axis=order.index(len(lead)), block=block) if scalars else kernel,
        grid=tuple(sizes[dim] for dim in order),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM) for _ in scalars]
        + [spec(shapes.x) for _ in operands]
        + [spec(shape) for _, shape in masks],
        out_specs=spec(shapes.x),
        out_shape=shaped(shapes.x, dtype, operands[0]),
        compiler_params=parameters(("parallel",) * len(sizes), block * row_bytes),
        interpret=interpreted(simulated, operands[0]),
        name=kernel.func.__name__,
    )(*scalars, *operands, *(mask for mask, _ in masks))


def softmax_forward(
    *refs: Any, scale: float, causal: bool, masked: bool, rows_axis: int = 0, block: int = 0
) -> None:
    *scalars, x_ref = refs[: 1 + causal]
    y_ref = refs[-1]
    z = x_ref[...].astype(jnp.float32) * scale
    kept = None
    if masked:
        kept = jnp.broadcast_to(refs[-2][...].astype(jnp.int32) != 0, z.shape)
    if causal:
        (first_ref,) = scalars
        query = lax.broadcasted_iota(jnp.int32, z.shape, 0) + (
            first_ref[0] + pl.program_id(rows_axis) * block
        )
        seen = lax.broadcasted_iota(jnp.int32, z.shape, 1) + first_ref[1] <= query
        kept = seen if kept is None else kept & seen
    if kept is not None:
        z = jnp.where(kept, z, -jnp.inf)
    e = jnp.exp(z - z.max(-1, keepdims=True))
    y = e / e.sum(-1, keepdims=True)
    y_ref[...] = (y if kept is None else jnp.where(kept, y, 0)).astype(y_ref.dtype)


def softmax_backward(y_ref: Any, gradient_ref: Any, x_ref: Any, *, scale: float) -> None:
    y, gradient = y_ref[...].astype(jnp.float32), gradient_ref[...].astype(jnp.float32)
    x_ref[...] = (scale * y * (gradient - (y * gradient).sum(-1, keepdims=True))).astype(
        x_ref.dtype
    )


def _tile(dtype: Any, masked: bool) -> int:
    return tile_rows(dtype, *[jnp.int8] * masked)


def _row_bytes(row: int, dtype: Any, masked: bool) -> int:
    """Of three blocks, each there twice so that one is on its way, and of what is computed of
    them.
    """
    return row * (2 * (3 * jnp.dtype(dtype).itemsize + masked) + 4 * 4)
