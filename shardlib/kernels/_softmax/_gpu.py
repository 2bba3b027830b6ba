"""Masked, scaled softmax on a GPU: a row in the registers of a warpgroup, read once and written once."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.kernels import _gpu
from shardlib.kernels._choice import Task
from shardlib.kernels._rows import batched, rows


def refuses(task: Task) -> str | None:
    """Why it cannot do a task, if it cannot."""
    if task.summed:
        return f"adds up nothing between devices, and the last dim is split over `{', '.join(task.summed)}`"
    x = task.arrays["x"]
    return _gpu.refuses_rows(task, x.shape[-1], x.dtype)


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

    def here(depth: int, x: jax.Array, where: jax.Array | None, first: jax.Array | None) -> jax.Array:
        del depth
        shapes = rows(x.shape, None if where is None else where.shape, apart=causal)
        *lead, row = shapes.x
        count, of_mask = math.prod(lead), shapes.where
        cut = _gpu.cut(row, x.dtype)
        operands = [x.reshape(count, row)]
        if where is not None:
            operands.append(where.astype(jnp.int8).reshape(-1, where.shape[-1]))
        if first is not None:
            operands.append(first)

        def left(index: jax.Array, piece: _gpu.Piece, *refs: Any) -> jax.Array | None:
            """What the mask leaves of a piece."""
            kept = None
            if of_mask is not None:
                beside = _beside(index, lead, of_mask)
                if of_mask[-1] == 1:
                    kept = jnp.broadcast_to(refs[0][beside, 0].astype(jnp.int32) != 0, (piece.size,))
                else:
                    kept = _gpu.load(refs[0], beside, piece, cut.vector, simulated).astype(jnp.int32) != 0
            if causal:
                keys = _gpu.numbers(piece, cut.vector, simulated) + refs[-1][1]
                seen = keys <= index % lead[-1] + refs[-1][0]
                kept = seen if kept is None else kept & seen
            return kept

        def softmax_forward(indices: list[jax.Array], x_ref: Any, *refs: Any) -> None:
            *masks, y_ref = refs
            loaded = [
                [_gpu.load(x_ref, index, piece, cut.vector, simulated) for piece in cut.pieces] for index in indices
            ]
            for index, parts in zip(indices, loaded, strict=True):
                kept = [left(index, piece, *masks) for piece in cut.pieces]
                z = [part.astype(jnp.float32) * scale for part in parts]
                z = [part if k is None else jnp.where(k, part, -jnp.inf) for part, k in zip(z, kept, strict=True)]
                highest = _highest(z)
                e = [jnp.exp(part - highest) for part in z]
                counted = [
                    _gpu.once(part, piece, cut.vector, simulated) for part, piece in zip(e, cut.pieces, strict=True)
                ]
                total = _gpu.total(counted)
                for part, k, piece in zip(e, kept, cut.pieces, strict=True):
                    y = part / total
                    y = y if k is None else jnp.where(k, y, jnp.zeros_like(y))
                    _gpu.store(y_ref, index, piece, y)

        outs = jax.ShapeDtypeStruct((count, row), x.dtype)
        return _gpu.over_rows(softmax_forward, count, row, outs, simulated)(*operands).reshape(x.shape)

    return batched(here, "rows", "beside", "same")(x, where, first)


def backward(y: jax.Array, gradient: jax.Array, *, scale: float, simulated: bool = False) -> jax.Array:
    """As the reference's, of whole rows."""

    def here(depth: int, y: jax.Array, gradient: jax.Array) -> jax.Array:
        del depth
        row = y.shape[-1]
        count, cut = y.size // row, _gpu.cut(row, y.dtype)

        def softmax_backward(indices: list[jax.Array], y_ref: Any, gradient_ref: Any, x_ref: Any) -> None:
            loaded = [
                [
                    [_gpu.load(ref, index, piece, cut.vector, simulated) for piece in cut.pieces]
                    for ref in (y_ref, gradient_ref)
                ]
                for index in indices
            ]
            for index, (y_parts, g_parts) in zip(indices, loaded, strict=True):
                y = [part.astype(jnp.float32) for part in y_parts]
                g = [part.astype(jnp.float32) for part in g_parts]
                products = [a * b for a, b in zip(y, g, strict=True)]
                total = _gpu.total(
                    [
                        _gpu.once(part, piece, cut.vector, simulated)
                        for part, piece in zip(products, cut.pieces, strict=True)
                    ]
                )
                for a, b, piece in zip(y, g, cut.pieces, strict=True):
                    _gpu.store(x_ref, index, piece, scale * a * (b - total))

        outs = jax.ShapeDtypeStruct((count, row), y.dtype)
        operands = y.reshape(count, row), gradient.reshape(count, row)
        return _gpu.over_rows(softmax_backward, count, row, outs, simulated)(*operands).reshape(y.shape)

    return batched(here, "rows", "rows")(y, gradient)


def _highest(parts: list[jax.Array]) -> jax.Array:
    highest = parts[0]
    for part in parts[1:]:
        highest = jnp.maximum(highest, part)
    return jnp.max(highest)


def _beside(index: jax.Array, lead: list[int], of_mask: tuple[int, ...]) -> jax.Array:
    """Which row of the mask lies beside a row."""
    beside, rest, stride = jnp.int32(0), index, 1
    for size, masked in zip(reversed(lead), reversed(of_mask[:-1]), strict=True):
        if masked > 1:
            beside += rest % size * stride
            stride *= masked
        rest //= size
    return beside
