"""RMSNorm and LayerNorm on a TPU: whole rows in fast memory, each array read and written once.

The grid has a dim for groups, each of which has its own scale and bias (a `vmap` makes them), and
one for the blocks of rows of a group. In backward the blocks are taken one after the other, and the
gradients to scale and bias, sums over rows, stay in fast memory from block to block. Each of these
sums has eight rows, the height of a tile of float32, which XLA adds up afterwards.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from shardlib.kernels._choice import Task
from shardlib.kernels._norm._reference import Norm
from shardlib.kernels._rows import batched, grouped
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

TILE_ROWS = 8  # of float32


def refuses(task: Task) -> str | None:
    """Why the kernel does not take a task; None if it does.

    The text continues a sentence that begins with the kernel's name.
    """
    if task.summed:
        return (
            "adds up nothing between devices, and the last dim is split over "
            f"`{', '.join(task.summed)}`"
        )
    x = task.arrays["x"]
    wrong_dtypes = refuses_dtypes(task)
    if wrong_dtypes:
        return wrong_dtypes
    length = x.shape[-1]
    return refuses_long_rows(_row_bytes(length, x.dtype), tile_rows(x.dtype), length, task)


@dataclass(frozen=True)
class _Kernel:
    """Which norm a kernel computes, and which arrays it is given besides the rows.

    The references of a kernel are positional; the flags say which of them are there.
    """

    norm: Norm
    added: bool  # forward: a residual; backward: a gradient to `h` from elsewhere
    scaled: bool
    biased: bool


@dataclass(frozen=True)
class _Blocks:
    """How a kernel sees rows: as `(groups, parts, rows, length)`, in blocks of some of the rows.

    A group has one part, except where merging the dim before into the rows would move them in
    memory; see `has_padded_rows`.
    """

    shape: tuple[int, int, int, int]
    size: int  # rows of a block
    dtype: Any

    @property
    def of_part(self) -> int:
        """How many blocks a part has, of which the last may be ragged."""
        return math.ceil(self.shape[2] / self.size)

    @property
    def of_group(self) -> int:
        """How many blocks a group has."""
        return self.shape[1] * self.of_part

    @property
    def bytes(self) -> int:
        """What a block takes of fast memory."""
        return self.size * _row_bytes(self.shape[-1], self.dtype)

    def spec(self, index: Any) -> pl.BlockSpec:
        """The spec of a block, from a function of the grid's indices to its index."""
        return pl.BlockSpec((None, None, self.size, self.shape[-1]), index)

    def index(self, group: Any, block: Any) -> tuple[Any, ...]:
        """The index of a block of a group."""
        return group, block // self.of_part, block % self.of_part, 0


def _choose_blocks(x: jax.Array, groups: int) -> _Blocks:
    """The blocks in which a kernel takes the rows of `x`."""
    length = x.shape[-1]
    count = x.size // length // groups
    # Rows that do not fill their tiles are not merged with the dim before.
    rows = count
    if has_padded_rows(x):
        rows = x.shape[-2]
    size = rows_at_once(rows, _row_bytes(length, x.dtype), tile_rows(x.dtype))
    return _Blocks((groups, count // rows, rows, length), size, x.dtype)


def forward(
    x: jax.Array,
    residual: jax.Array | None,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The norm of the rows of `h = x + residual`, and `h`; rows must be whole on the device.

    Arguments are those of the reference. `simulated` runs the kernel in Pallas's interpreter.
    """
    kernel = _Kernel(
        Norm(epsilon, centred), residual is not None, scale is not None, bias is not None
    )
    run = partial(_forward_of_groups, kernel, simulated)
    return batched(run, "rows", "rows", "broadcast", "broadcast")(x, residual, scale, bias)


def _forward_of_groups(
    kernel: _Kernel, simulated: bool, depth: int, x: Any, residual: Any, scale: Any, bias: Any
) -> tuple[Any, Any]:
    """The forward of rows with `depth` batch dims first, each with a scale and a bias of its own.

    Args:
        kernel: which kernel.
        simulated: whether an interpreter runs it.
        depth: how many dims `vmap` added in front.
        x: rows.
        residual: what is added to them, or None.
        scale: a row for each element of the batch dims, or one for all, or None.
        bias: as `scale`.
    """
    groups, aligned = grouped(depth, x, scale, bias)
    shared = [array for array in aligned if array is not None]
    # Where all rows have the same scale and bias they are one group, so that blocks can be larger.
    if all(len(array) == 1 for array in shared):
        groups = 1
    blocks = _choose_blocks(x, groups)
    row_spec = blocks.spec(blocks.index)
    inputs = [x.reshape(blocks.shape)]
    if kernel.added:
        inputs.append(residual.reshape(blocks.shape))
    # There is a result `h` only where a residual makes it differ from `x`.
    results = [shaped(blocks.shape, x.dtype, x)] * len(inputs)
    outputs = pl.pallas_call(
        partial(norm_forward, kernel=kernel),
        grid=(groups, blocks.of_group),
        in_specs=[row_spec] * len(inputs) + [_spec_of_group(array) for array in shared],
        out_specs=[row_spec] * len(results),
        out_shape=results,
        compiler_params=parameters(("parallel", "parallel"), blocks.bytes),
        interpret=interpreted(simulated, x),
        name="norm_forward",
    )(*inputs, *(array[:, None] for array in shared))
    y, *h = (array.reshape(x.shape) for array in outputs)
    if kernel.added:
        return y, h[0]
    return y, x


def backward(
    h: jax.Array,
    scale: jax.Array | None,
    gradient: jax.Array,
    h_gradient: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
    biased: bool,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The gradients to `x`, scale and bias; rows must be whole on the device.

    Arguments are those of the reference. `simulated` runs the kernel in Pallas's interpreter.
    """
    kernel = _Kernel(Norm(epsilon, centred), h_gradient is not None, scale is not None, biased)
    run = partial(_backward_of_groups, kernel, simulated)
    run_batched = batched(run, "rows", "broadcast", "rows", "rows")
    x_gradient, *sums = run_batched(h, scale, gradient, h_gradient)
    scale_gradient = bias_gradient = None
    # The sum for the scale comes first, if there is one.
    if scale is not None:
        scale_gradient = sums.pop(0)
    if biased:
        bias_gradient = sums.pop()
    return x_gradient, scale_gradient, bias_gradient


def _backward_of_groups(
    kernel: _Kernel, simulated: bool, depth: int, h: Any, scale: Any, gradient: Any, h_gradient: Any
) -> tuple[Any, ...]:
    """The backward of rows with `depth` batch dims first: the gradient to `x`, and sums over rows.

    Args:
        kernel: which kernel.
        simulated: whether an interpreter runs it.
        depth: how many dims `vmap` added in front.
        h: the rows that were normed.
        scale: a row for each element of the batch dims, or one for all, or None.
        gradient: that to the norm's output.
        h_gradient: the gradient to `h` from elsewhere, or None.
    """
    groups, (scale,) = grouped(depth, h, scale)
    blocks = _choose_blocks(h, groups)
    length = blocks.shape[-1]
    # On chips whose two cores are one device each core takes half of the blocks, with sums of its
    # own. A single core takes both halves, one after the other.
    cores = 1
    if blocks.of_group % 2 == 0:
        cores = 2
    blocks_of_core = blocks.of_group // cores
    row_spec = blocks.spec(
        lambda group, core, block: blocks.index(group, core * blocks_of_core + block)
    )
    sum_spec = pl.BlockSpec(
        (None, None, TILE_ROWS, length), lambda group, core, block: (group, core, 0, 0)
    )
    inputs = [h.reshape(blocks.shape), gradient.reshape(blocks.shape)]
    if h_gradient is not None:
        inputs.append(h_gradient.reshape(blocks.shape))
    # The scale comes after the arrays of rows, and its block is one row.
    in_specs = [row_spec] * len(inputs)
    if scale is not None:
        inputs.append(scale[:, None])
        in_specs.append(_spec_of_group(scale))
    sum_count = kernel.scaled + kernel.biased
    sums = shaped((groups, cores, TILE_ROWS, length), jnp.float32, h)
    x_gradient, *core_sums = pl.pallas_call(
        partial(norm_backward, kernel=kernel, blocks=blocks, blocks_of_core=blocks_of_core),
        grid=(groups, cores, blocks_of_core),
        in_specs=in_specs,
        out_specs=[row_spec, *[sum_spec] * sum_count],
        out_shape=[shaped(blocks.shape, h.dtype, h), *[sums] * sum_count],
        compiler_params=parameters(("parallel", "parallel", "arbitrary"), blocks.bytes),
        interpret=interpreted(simulated, h),
        name="norm_backward",
    )(*inputs)
    batch = h.shape[:depth]
    x_gradient = x_gradient.reshape(h.shape)
    return x_gradient, *(array.sum((1, 2)).reshape(*batch, length) for array in core_sums)


def _spec_of_group(shared: jax.Array) -> pl.BlockSpec:
    """The spec of an array `(groups or 1, length)` with a row for each group, or one for all."""
    by_group = len(shared) > 1
    return pl.BlockSpec(
        (None, 1, shared.shape[-1]), lambda group, *_: (group if by_group else 0, 0, 0)
    )


def norm_forward(*refs: Any, kernel: _Kernel) -> None:
    """The norm of one block of rows.

    References are to `x`, to the residual, scale and bias as far as there are such, to `y`, and to
    `h` if there is a residual.
    """
    remaining = iter(refs)
    h = next(remaining)[...]
    if kernel.added:
        # The sum is rounded before its norm is taken: backward reads it rounded.
        total = h.astype(jnp.float32) + _in_float32(next(remaining))
        h = total.astype(h.dtype)
    y, _ = _unit_rows(h, kernel.norm)
    if kernel.scaled:
        y = y * _in_float32(next(remaining))
    if kernel.biased:
        y = y + _in_float32(next(remaining))
    y_ref = next(remaining)
    y_ref[...] = y.astype(y_ref.dtype)
    if kernel.added:
        next(remaining)[...] = h


def _in_float32(ref: Any) -> jax.Array:
    """What a reference holds, in the dtype in which a kernel computes."""
    return ref[...].astype(jnp.float32)


def norm_backward(*refs: Any, kernel: _Kernel, blocks: _Blocks, blocks_of_core: int) -> None:
    """The gradient to one block of rows; sums over rows stay in fast memory from block to block.

    References are to `h`, the gradient, the gradient to `h` from elsewhere and the scale as far as
    there are such, to the gradient to `x`, and to the sums.
    """
    remaining = iter(refs)
    h, gradient = next(remaining)[...], _in_float32(next(remaining))
    h_gradient: Any = 0.0
    if kernel.added:
        h_gradient = _in_float32(next(remaining))
    unit, inverse = _unit_rows(h, kernel.norm)
    unit_gradient = gradient
    if kernel.scaled:
        unit_gradient = gradient * _in_float32(next(remaining))
    # Multiples of a row have the same norm, so the gradient has no part along the row.
    x_gradient = unit_gradient - unit * (unit_gradient * unit).mean(-1, keepdims=True)
    if kernel.norm.centred:
        x_gradient -= unit_gradient.mean(-1, keepdims=True)
    x_ref = next(remaining)
    x_ref[...] = (x_gradient * inverse + h_gradient).astype(x_ref.dtype)
    summands = []
    if kernel.scaled:
        summands.append(gradient * unit)
    if kernel.biased:
        summands.append(gradient)
    _add_to_sums(list(remaining), summands, blocks, blocks_of_core)


def _add_to_sums(
    refs: list[Any], summands: list[jax.Array], blocks: _Blocks, blocks_of_core: int
) -> None:
    """Add a block's rows to the sums of its core, which begin at zero with its first block.

    Every eighth row is added to the same row of the sum: so nothing is reduced within a tile.
    """

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for ref in refs:
            ref[...] = jnp.zeros_like(ref)

    block = pl.program_id(1) * blocks_of_core + pl.program_id(2)
    begin = block % blocks.of_part * blocks.size
    rows, length = blocks.shape[2], blocks.shape[-1]
    # Beyond the last row a block holds whatever was in memory.
    exists = lax.broadcasted_iota(jnp.int32, (blocks.size, length), 0) + begin < rows
    for ref, x in zip(refs, summands, strict=True):
        ref[...] += jnp.where(exists, x, 0).reshape(-1, TILE_ROWS, length).sum(0)


def _unit_rows(h: jax.Array, norm: Norm) -> tuple[jax.Array, jax.Array]:
    """Rows of mean square one, and the factor that made them so, in float32."""
    z = h.astype(jnp.float32)
    if norm.centred:
        z -= z.mean(-1, keepdims=True)
    inverse = lax.rsqrt(jnp.square(z).mean(-1, keepdims=True) + norm.epsilon)
    return z * inverse, inverse


def _row_bytes(length: int, dtype: Any) -> int:
    """The bytes of fast memory that a row takes.

    It is in up to four arrays, whose blocks have two buffers each. What is computed from it takes
    about five rows of float32.
    """
    buffers = 2 * 4 * jnp.dtype(dtype).itemsize
    computed = 5 * 4
    return length * (buffers + computed)
