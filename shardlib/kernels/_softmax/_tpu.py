"""Masked, scaled softmax on a TPU: whole rows in fast memory, each array read and written once.

Rows are seen as `(..., rows, length)`, merged as far as the mask allows. The dims along which the
mask is the same are the innermost ones of the grid: steps that follow each other along them need
the same block of the mask, which is read once.

    grid:  dims along which the mask changes  x  blocks of rows  x  dims along which it does not
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardlib.kernels._choice import Task
from shardlib.kernels._rows import RowShapes, batched, row_shapes
from shardlib.kernels._tpu import (
    has_padded_rows,
    interpreted,
    parameters,
    refuses_dtypes,
    refuses_long_rows,
    rows_at_once,
    shaped,
    tile_rows,
)


def refuses(task: Task) -> str | None:
    """Why the kernel does not take a task; None if it does.

    The text continues a sentence that begins with the kernel's name.
    """
    if task.summed:
        return (
            "adds up nothing between devices, and the last dim is split over "
            f"`{', '.join(task.summed)}`"
        )
    wrong_dtypes = refuses_dtypes(task)
    if wrong_dtypes:
        return wrong_dtypes
    x, masked = task.arrays["x"], "where" in task.arrays
    length = x.shape[-1]
    return refuses_long_rows(
        _row_bytes(length, x.dtype, masked), _tile_rows(x.dtype, masked), length, task
    )


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
    where_shape = None
    if where is not None:
        where_shape = where.shape
    shapes = row_shapes(x.shape, where_shape, keep_last=causal or has_padded_rows(x))
    masks = []
    if where is not None:
        # On a TPU a kernel's bools take 32 bits each.
        masks.append(where.astype(jnp.int8).reshape(shapes.where or ()))
    kernel = partial(softmax_forward, scale=scale, causal=causal, masked=where is not None)
    inputs = _Inputs([x.reshape(shapes.x)], masks, offsets)
    return _over_rows(kernel, "softmax_forward", shapes, inputs, simulated).reshape(x.shape)


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
    shapes = row_shapes(y.shape, None, keep_last=has_padded_rows(y))
    inputs = _Inputs([y.reshape(shapes.x), gradient.reshape(shapes.x)], [], None)
    kernel = partial(softmax_backward, scale=scale)
    return _over_rows(kernel, "softmax_backward", shapes, inputs, simulated).reshape(y.shape)


@dataclass(frozen=True)
class _Inputs:
    """What a kernel is given: arrays of rows, a mask or none, and the offsets of a causal one."""

    rows: list[jax.Array]
    masks: list[jax.Array]
    offsets: jax.Array | None


@dataclass(frozen=True)
class _Grid:
    """The order in which the blocks of rows are taken.

    Dims are those of the rows' shape before its last; `block` is of the last of them.
    """

    shapes: RowShapes
    block: int  # rows of a block

    @property
    def order(self) -> list[int]:
        """The dims in the order of the grid, those along which the mask is the same last.

        The last axis of a grid changes fastest, and a block whose index stays the same is
        not copied again.
        """
        lead = len(self.shapes.x) - 2
        where = self.shapes.where
        constant = []
        if where is not None:
            constant = [dim for dim in range(lead) if where[dim] == 1]
        changing = [dim for dim in range(lead) if dim not in constant]
        return [*changing, lead, *constant]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes of the grid."""
        *lead, rows, _ = self.shapes.x
        sizes = [*lead, math.ceil(rows / self.block)]
        return tuple(sizes[dim] for dim in self.order)

    @property
    def rows_axis(self) -> int:
        """The axis of the grid along which blocks of rows follow each other."""
        return self.order.index(len(self.shapes.x) - 2)

    def spec(self, shape: Sequence[int]) -> pl.BlockSpec:
        """The spec for an array of rows, or for a mask with dims of size one."""
        order, lead = self.order, len(shape) - 2

        def index(*grid_indices: Any) -> tuple[Any, ...]:
            by_dim = dict(zip(order, grid_indices, strict=True))
            # Along a dim of size one, a mask has one block for all rows.
            blocks = []
            for dim in range(lead + 1):
                blocks.append(by_dim[dim] if shape[dim] > 1 else 0)
            return (*blocks, 0)

        rows = 1
        if shape[-2] > 1:
            rows = self.block
        return pl.BlockSpec((*[None] * lead, rows, shape[-1]), index)


def _over_rows(
    kernel: Any, name: str, shapes: RowShapes, inputs: _Inputs, simulated: bool
) -> jax.Array:
    """Run a kernel over blocks of rows.

    Args:
        kernel: it is called with references to the offsets, if any, to the inputs and masks, and
            to the result, which has the shape and dtype of the first input.
        name: of the kernel, which profiles show.
        shapes: of the inputs and of the mask.
        inputs: the arrays.
        simulated: whether an interpreter runs the kernel.
    """
    first, masked = inputs.rows[0], bool(inputs.masks)
    count, length = shapes.x[-2:]
    row_bytes = _row_bytes(length, first.dtype, masked)
    block = rows_at_once(count, row_bytes, _tile_rows(first.dtype, masked))
    grid = _Grid(shapes, block)
    scalars = []
    if inputs.offsets is not None:
        # A causal kernel computes the positions of its rows from where its block begins.
        scalars.append(inputs.offsets)
        kernel = partial(kernel, rows_axis=grid.rows_axis, block=block)
    in_specs = [pl.BlockSpec(memory_space=pltpu.SMEM)] * len(scalars)
    in_specs += [grid.spec(shapes.x)] * len(inputs.rows)
    in_specs += [grid.spec(mask.shape) for mask in inputs.masks]
    return pl.pallas_call(
        kernel,
        grid=grid.sizes,
        in_specs=in_specs,
        out_specs=grid.spec(shapes.x),
        out_shape=shaped(shapes.x, first.dtype, first),
        compiler_params=parameters(("parallel",) * len(grid.sizes), block * row_bytes),
        interpret=interpreted(simulated, first),
        name=name,
    )(*scalars, *inputs.rows, *inputs.masks)


def softmax_forward(
    *refs: Any, scale: float, causal: bool, masked: bool, rows_axis: int = 0, block: int = 0
) -> None:
    """The softmax of one block of rows.

    Args:
        refs: to the offsets (if causal), to `x`, to the mask (if masked), and to the result.
        scale: a factor for `x`.
        causal: whether a query sees no later key.
        masked: whether there is a mask.
        rows_axis: the axis of the grid along which blocks follow each other, if causal.
        block: how many rows a block has, if causal.
    """
    *scalars, x_ref = refs[: 1 + causal]
    y_ref = refs[-1]
    z = x_ref[...].astype(jnp.float32) * scale
    kept = None
    if masked:
        # A TPU compares numbers of 32 bits only.
        kept = jnp.broadcast_to(refs[-2][...].astype(jnp.int32) != 0, z.shape)
    if causal:
        (offsets_ref,) = scalars
        visible = _visible_keys(z.shape, offsets_ref, rows_axis, block)
        kept = visible if kept is None else kept & visible
    if kept is not None:
        z = jnp.where(kept, z, -jnp.inf)
    # Exponentials relative to the highest are at most one, so that none overflows.
    e = jnp.exp(z - z.max(-1, keepdims=True))
    y = e / e.sum(-1, keepdims=True)
    if kept is not None:
        # A row that is masked as a whole is nan so far.
        y = jnp.where(kept, y, 0)
    y_ref[...] = y.astype(y_ref.dtype)


def _visible_keys(
    shape: tuple[int, ...], offsets_ref: Any, rows_axis: int, block: int
) -> jax.Array:
    """Which keys of a block `(queries, keys)` stand at or before their query."""
    query = lax.broadcasted_iota(jnp.int32, shape, 0) + (
        offsets_ref[0] + pl.program_id(rows_axis) * block
    )
    return lax.broadcasted_iota(jnp.int32, shape, 1) + offsets_ref[1] <= query


def softmax_backward(y_ref: Any, gradient_ref: Any, x_ref: Any, *, scale: float) -> None:
    """The gradient to one block of rows; it needs no mask, as `y` is zero where it was masked."""
    y, gradient = y_ref[...].astype(jnp.float32), gradient_ref[...].astype(jnp.float32)
    x_gradient = scale * y * (gradient - (y * gradient).sum(-1, keepdims=True))
    x_ref[...] = x_gradient.astype(x_ref.dtype)


def _tile_rows(dtype: Any, masked: bool) -> int:
    """The fewest rows that a block may have; a mask, in int8, has the highest tiles."""
    if masked:
        return tile_rows(dtype, jnp.int8)
    return tile_rows(dtype)


def _row_bytes(length: int, dtype: Any, masked: bool) -> int:
    """The bytes of fast memory that a row takes.

    It is in up to three arrays and perhaps a mask, whose blocks have two buffers each. What is
    computed from it takes about four rows of float32.
    """
    buffers = 2 * (3 * jnp.dtype(dtype).itemsize + masked)
    computed = 4 * 4
    return length * (buffers + computed)
