"""Masked, scaled softmax on a GPU: a row in the registers of a warpgroup, read once and written
once.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp

from shardlib.kernels._gpu_rows import Numbers, Piece, Rows, each, over_rows, parts, refuses, wide
from shardlib.kernels._rows import batched, rows

__all__ = ["backward", "forward", "refuses"]


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
        of = Rows.of(x.shape[-1], [x.dtype], x.dtype, simulated)
        # A lane finds its row's part of a mask where it finds its row.
        if where is not None and of.apart:
            where = jnp.broadcast_to(where, x.shape)
        shapes = rows(x.shape, None if where is None else where.shape, apart=causal)
        *lead, row = shapes.x
        of_mask = shapes.where
        operands = [of.flat(x)]
        if where is not None:
            mask = where.astype(jnp.int8)
            operands.append(of.flat(mask) if of.apart else mask.reshape(-1, where.shape[-1]))
        if first is not None:
            operands.append(first)

        def left(index: jax.Array, *refs: Any) -> Numbers:
            """What the mask leaves of a row."""
            beside = index if of.apart or of_mask is None else _beside(index, lead, of_mask)
            alike = of_mask is not None and of_mask[-1] < row
            mask = of.load(refs[0], beside) if of_mask is not None and not alike else None

            def kept(piece: Piece) -> jax.Array:
                found = None
                if alike:
                    found = jnp.broadcast_to(
                        refs[0][beside, 0].astype(jnp.int32) != 0, (piece.size,)
                    )
                elif mask is not None:
                    found = mask(piece).astype(jnp.int32) != 0
                if not causal:
                    return cast(jax.Array, found)
                seen = of.places(piece) + refs[-1][1] <= of.indices(index) % lead[-1] + refs[-1][0]
                return seen if found is None else found & seen

            return functools.cache(kept)

        def softmax_forward(group: Any, indices: list[jax.Array], *refs: Any) -> None:
            del group
            (x_ref,), masks, (y_ref,), space = parts(refs, 1, len(operands) - 1, 1)
            loaded = [of.load(x_ref, index) for index in indices]
            for index, x in zip(indices, loaded, strict=True):
                z = each(lambda x: wide(x) * scale, of.keep(x, space))
                kept = left(index, *masks) if masks else None
                if kept is not None:
                    z = each(lambda z, kept: jnp.where(kept, z, -jnp.inf), z, kept)
                highest = of.highest(z)
                e = each(lambda z, highest: jnp.exp(z - highest), z, highest)
                y = each(jnp.divide, e, of.total(e))
                if kept is not None:
                    y = each(lambda y, kept: jnp.where(kept, y, jnp.zeros_like(y)), y, kept)
                of.store((y_ref, index, y))

        outs = jax.ShapeDtypeStruct(operands[0].shape, x.dtype)
        run = over_rows(softmax_forward, of, 1, len(operands[0]), outs, of.room(x.dtype))
        return of.unflat(run(*operands), x.shape)

    return batched(here, "rows", "beside", "same")(x, where, first)


def backward(
    y: jax.Array, gradient: jax.Array, *, scale: float, simulated: bool = False
) -> jax.Array:
    """As the reference's, of whole rows."""

    def here(depth: int, y: jax.Array, gradient: jax.Array) -> jax.Array:
        del depth
        of = Rows.of(y.shape[-1], [y.dtype, gradient.dtype], simulated=simulated)

        def softmax_backward(group: Any, indices: list[jax.Array], *refs: Any) -> None:
            del group
            inputs, (x_ref,), space = parts(refs, 2, 1)
            loaded = [[of.load(ref, index) for ref in inputs] for index in indices]
            for index, pair in zip(indices, loaded, strict=True):
                y, g = (each(wide, of.keep(x, space[k : k + 1])) for k, x in enumerate(pair))
                total = of.total(each(jnp.multiply, y, g))
                of.store(
                    (x_ref, index, each(lambda y, g, total: scale * y * (g - total), y, g, total))
                )

        operands = of.flat(y), of.flat(gradient)
        outs = jax.ShapeDtypeStruct(operands[0].shape, y.dtype)
        room = of.room(y.dtype, gradient.dtype)
        return of.unflat(
            over_rows(softmax_backward, of, 1, len(operands[0]), outs, room)(*operands), y.shape
        )

    return batched(here, "rows", "rows")(y, gradient)


def _beside(index: jax.Array, lead: list[int], of_mask: tuple[int, ...]) -> jax.Array:
    """Which row of the mask lies beside a row."""
    beside, rest, stride = jnp.int32(0), index, 1
    for size, masked in zip(reversed(lead), reversed(of_mask[:-1]), strict=True):
        if masked > 1:
            beside += rest % size * stride
            stride *= masked
        rest //= size
    return beside
