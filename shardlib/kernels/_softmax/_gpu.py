"""Masked, scaled softmax on a GPU: a row in registers, each array read once and written once.

A mask is read as int8, and is not broadcast: where several rows share a row of the mask,
`_mask_row` says which row of the mask belongs to a row of `x`. Only where each lane has a row of
its own, the mask is broadcast to all rows first, and has the same indices as the rows. A causal
mask is computed from positions.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.kernels._gpu_rows import (
    Numbers,
    Piece,
    RowBlocks,
    RowLayout,
    as_float32,
    over_rows,
    piecewise,
    refuses,
    split_refs,
)
from shardlib.kernels._rows import batched, row_shapes

__all__ = ["backward", "forward", "refuses"]


def forward(
    x: jax.Array,
    where: jax.Array | None,
    offsets: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    simulated: bool = False,
) -> jax.Array:
    """The softmax of the rows of `x`, which must be whole on the device.

    Arguments are those of the reference. `simulated` runs the kernel in Pallas's interpreter.
    """
    run = partial(_forward_of_rows, scale, causal, simulated)
    return batched(run, "rows", "broadcast", "shared")(x, where, offsets)


def _forward_of_rows(
    scale: float, causal: bool, simulated: bool, depth: int, x: Any, where: Any, offsets: Any
) -> jax.Array:
    """The forward of rows with any dims before them.

    Args:
        scale: a factor for `x`.
        causal: whether a query sees no later key.
        simulated: whether an interpreter runs the kernel.
        depth: how many dims `vmap` added in front, which makes no difference here.
        x: rows.
        where: a mask with as many dims, or None.
        offsets: the positions of the first query and key, or None.
    """
    del depth
    layout = RowLayout.choose(x.shape[-1], [x.dtype], x.dtype, simulated)
    if where is not None and layout.one_row_per_lane:
        where = jnp.broadcast_to(where, x.shape)
    where_shape = None if where is None else where.shape
    shapes = row_shapes(x.shape, where_shape, keep_last=causal)
    operands = [layout.flatten(x)]
    if where is not None:
        # Masks are handed over as bytes, since a kernel loads no bools.
        mask = where.astype(jnp.int8)
        if layout.one_row_per_lane:
            operands.append(layout.flatten(mask))
        else:
            operands.append(mask.reshape(-1, where.shape[-1]))
    if offsets is not None:
        operands.append(offsets)
    kernel = _ForwardKernel(
        _Mask(layout, shapes.x[:-1], shapes.where, causal), scale, len(operands) - 1
    )
    rows = operands[0]
    result = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    blocks = RowBlocks(layout, 1, len(rows))
    run = over_rows(kernel, "softmax_forward", blocks, result, layout.scratch(x.dtype))
    return layout.unflatten(run(*operands), x.shape)


@dataclass(frozen=True)
class _Mask:
    """The mask of rows: an array, the causal mask, or both.

    The mask of a row is loaded and computed piece by piece, like the row.
    """

    layout: RowLayout
    lead: tuple[int, ...]  # the dims of `x` before the numbers of a row; the last has the queries
    where_shape: tuple[int, ...] | None
    causal: bool

    def load(self, index: jax.Array, refs: Sequence[Any]) -> Numbers:
        """The bools of a row, from references to the array and to the offsets, if any."""
        layout, one_bool_a_row, mask_index, array = self.layout, False, index, None
        if self.where_shape is not None:
            if not layout.one_row_per_lane:
                mask_index = _mask_row(index, self.lead, self.where_shape)
            # A mask of one column says for each row whether all of it is kept or nothing.
            one_bool_a_row = self.where_shape[-1] < layout.length
            if not one_bool_a_row:
                array = layout.load(refs[0], mask_index)

        def keep(piece: Piece) -> jax.Array:
            kept: Any = None
            if one_bool_a_row:
                bool_of_row = refs[0][mask_index, 0].astype(jnp.int32) != 0
                kept = jnp.broadcast_to(bool_of_row, (piece.size,))
            elif array is not None:
                kept = array(piece).astype(jnp.int32) != 0
            if not self.causal:
                return kept
            visible = self._is_visible(piece, index, refs[-1])
            return visible if kept is None else kept & visible

        return functools.cache(keep)

    def _is_visible(self, piece: Piece, index: jax.Array, offsets_ref: Any) -> jax.Array:
        """Whether the keys of a piece stand at or before the query of its row."""
        key = self.layout.columns(piece) + offsets_ref[1]
        query = self.layout.row_indices(index) % self.lead[-1] + offsets_ref[0]
        return key <= query


@dataclass(frozen=True)
class _ForwardKernel:
    """The program that makes the softmax of a block of rows.

    Its references are to rows, to the mask and the offsets as far as there are such, to the
    result, and to shared memory for streamed rows.
    """

    mask: _Mask
    scale: float
    masks: int  # how many references the mask has: to an array, to offsets, or both

    def __call__(self, group: Any, indices: list[jax.Array], *refs: Any) -> None:
        """Trace the program for the rows with these indices."""
        del group
        layout = self.mask.layout
        (x_ref,), mask_refs, (y_ref,), staging = split_refs(refs, 1, self.masks, 1)
        # Loads come first: those of the second row are on their way while the first is computed.
        loaded = [layout.load(x_ref, index) for index in indices]
        for index, x in zip(indices, loaded, strict=True):
            z = piecewise(lambda x: as_float32(x) * self.scale, layout.stage(x, staging))
            kept = None
            if self.masks:
                kept = self.mask.load(index, mask_refs)
                z = piecewise(lambda z, kept: jnp.where(kept, z, -jnp.inf), z, kept)
            # It is subtracted before `exp`, which then is at most one.
            highest = layout.maximum(z)
            e = piecewise(lambda z, highest: jnp.exp(z - highest), z, highest)
            y = piecewise(jnp.divide, e, layout.total(e))
            if kept is not None:
                # A row that is masked as a whole is nan so far.
                y = piecewise(lambda y, kept: jnp.where(kept, y, jnp.zeros_like(y)), y, kept)
            layout.store((y_ref, index, y))


def backward(
    y: jax.Array, gradient: jax.Array, *, scale: float, simulated: bool = False
) -> jax.Array:
    """The gradient to `x` from the softmax and the gradient to it, both of whole rows.

    Arguments are those of the reference. `simulated` runs the kernel in Pallas's interpreter.
    """
    return batched(partial(_backward_of_rows, scale, simulated), "rows", "rows")(y, gradient)


def _backward_of_rows(
    scale: float, simulated: bool, depth: int, y: jax.Array, gradient: jax.Array
) -> jax.Array:
    """The backward of rows with any dims before them; `depth` of these are of a `vmap`."""
    del depth
    layout = RowLayout.choose(y.shape[-1], [y.dtype, gradient.dtype], simulated=simulated)

    def softmax_backward(group: Any, indices: list[jax.Array], *refs: Any) -> None:
        del group
        inputs, (x_ref,), staging = split_refs(refs, 2, 1)
        loaded = [[layout.load(ref, index) for ref in inputs] for index in indices]
        for index, (y, g) in zip(indices, loaded, strict=True):
            y = piecewise(as_float32, layout.stage(y, staging[0:1]))
            g = piecewise(as_float32, layout.stage(g, staging[1:2]))
            dot = layout.total(piecewise(jnp.multiply, y, g))
            x_gradient = piecewise(lambda y, g, dot: scale * y * (g - dot), y, g, dot)
            layout.store((x_ref, index, x_gradient))

    operands = layout.flatten(y), layout.flatten(gradient)
    result = jax.ShapeDtypeStruct(operands[0].shape, y.dtype)
    blocks = RowBlocks(layout, 1, len(operands[0]))
    scratch = layout.scratch(y.dtype, gradient.dtype)
    run = over_rows(softmax_backward, "softmax_backward", blocks, result, scratch)
    return layout.unflatten(run(*operands), y.shape)


def _mask_row(index: jax.Array, lead: Sequence[int], where_shape: tuple[int, ...]) -> jax.Array:
    """Which row of the mask belongs to a row of `x`.

    The row's index is split into an index along each dim, from the last dim to the first. Those
    along which the mask changes make the index in the mask.
    """
    mask_index, quotient, stride = jnp.int32(0), index, 1
    for size, where_size in zip(reversed(lead), reversed(where_shape[:-1]), strict=True):
        if where_size > 1:
            mask_index += quotient % size * stride
            stride *= where_size
        quotient //= size
    return mask_index
