"""A linear head's cross-entropy on a GPU: a tile of logits is used as it leaves the matrix unit.

    x (rows, width)  @  chunk of the kernel (vocabulary, width)
          |
          v  each tile of 128 x 128 logits, in registers
    forward:   for each row the highest logit, two sums, and the target's logit
    backward:  the gradient to these logits, in the dtype of `x`

Forward writes four numbers for each row of each tile, which XLA combines. Backward writes the
gradient to a chunk of logits, from which XLA's own products make the gradients to `x` and to the
kernel. A `vmap` adds rows to forward, and is a loop in backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._choice import Task
from shardlib.kernels._gpu import generation, refuses_device
from shardlib.kernels._gpu_tiles import (
    COLUMNS,
    ROWS,
    Epilogue,
    ProductKernel,
    Result,
    Tile,
    over_tiles,
    padded,
)
from shardlib.kernels._linear_cross_entropy._reference import (
    Chunk,
    Loss,
    Sums,
    capped,
    combine_sums,
    fold_chunks,
    logit_gradients,
    losses_of_sums,
    product,
    rescaling,
    row_gradients,
    varying_zeros,
)
from shardlib.kernels._rows import merged

# Bytes of the gradient to logits that are in memory at a time. The gradient to `x` is read and
# written for each chunk: the fewer and larger chunks are, the less that costs.
CHUNK_BYTES = 2**28


def refuses(task: Task) -> str | None:
    """Why the kernel does not take a task; None if it does.

    The matrix unit takes 16-bit floats, and float32 as TF32 on Hopper if JAX's precision of
    products allows for it. The text continues a sentence that begins with the kernel's name.
    """
    wrong_device = refuses_device(task)
    if wrong_device:
        return wrong_device
    assert task.device is not None
    taken = {"bfloat16", "float16"}
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    tf32_allowed = precision in (None, "default", "tensorfloat32")
    if tf32_allowed and generation(task.device.kind) == "hopper":
        taken |= {"float32"}
    # The kernel is cast to the dtype of `x`, and may be float32 whatever that is.
    x, kernel = task.arrays["x"], task.arrays["kernel"]
    if str(x.dtype) in taken and str(kernel.dtype) in taken | {"float32"}:
        return None
    return (
        f"multiplies {' and '.join(sorted(taken))} here, by a kernel of these dtypes or float32, "
        "and float32 as TF32 alone, on Hopper, if `jax_default_matmul_precision` allows that; it "
        f"is {precision!r}, `x` {x.dtype} and `kernel` {kernel.dtype}"
    )


def forward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    vocab_offset: jax.Array,
    *,
    loss: Loss,
    axes: tuple[str, ...] = (),
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The loss of each row and its `log Z`.

    Arguments are those of the reference. `simulated` runs the kernel in Pallas's interpreter.
    """
    run = merged(partial(_sums, loss, simulated), "rows", "shared", "rows", "shared")
    sums = run(x, kernel, targets, vocab_offset)
    return losses_of_sums(Sums(*sums), targets, loss, axes)


@dataclass(frozen=True)
class _Chunks:
    """The products of the rows of `x` with chunks of the kernel, for forward or for backward.

    These differ in the epilogue and its results.
    """

    loss: Loss
    product: ProductKernel
    results: Sequence[Result]
    x: jax.Array  # whole tiles

    def padded(self, rows: jax.Array) -> jax.Array:
        """Rows of the kernel with zeros for whole tiles, in the dtype of `x`."""
        return padded(rows, COLUMNS, self.x.dtype)

    def run(self, epilogue: Epilogue, rows: jax.Array, inputs: Sequence[jax.Array]) -> Any:
        """Call an epilogue for each tile of logits of a chunk's padded rows."""
        return over_tiles(epilogue, self.x, rows, inputs, self.results, self.product)

    def limits(self, chunk: Chunk, vocab_offset: jax.Array) -> jax.Array:
        """The token at which a chunk begins, and its rows that count: first, and after the last.

        Rows before these are repeated from the chunk before. Rows after these are beyond the kernel
        or the vocabulary.
        """
        offset = vocab_offset + chunk.begin
        end = jnp.minimum(chunk.rows.shape[0], self.loss.vocab - offset)
        return jnp.stack([offset, chunk.repeated, end]).astype(jnp.int32)

    @property
    def wanted(self) -> int:
        """How many rows of the kernel make `CHUNK_BYTES` of logits."""
        return CHUNK_BYTES // (self.x.dtype.itemsize * self.x.shape[0])


def _sums(
    loss: Loss, simulated: bool, x: Any, kernel: Any, targets: Any, vocab_offset: Any
) -> tuple[jax.Array, ...]:
    """The four sums over the logits of each row.

    Args:
        loss: which loss.
        simulated: whether an interpreter runs the kernel.
        x: (rows, width).
        kernel: (vocabulary, width).
        targets: a token for each row.
        vocab_offset: the token of the kernel's first row.
    """
    rows = x.shape[0]
    x, targets = _pad_rows(x, targets)
    # Without a cap the only exponential is that of the softmax, for which the GPU's unit will do.
    kind = ProductKernel("head_forward", simulated, approx_math=loss.cap is None)
    chunks = _Chunks(loss, kind, [("row", jnp.float32)] * 4, x)
    head_forward = partial(_sum_tile, loss)

    def add_chunk(sums: Sums, chunk: Chunk) -> Sums:
        limits = chunks.limits(chunk, vocab_offset)
        by_tile = chunks.run(head_forward, chunks.padded(chunk.rows), (targets, limits))
        # Tiles side by side have different tokens of the same rows.
        highest = by_tile[0].max(0)
        total = (by_tile[1] * rescaling(by_tile[0], highest)).sum(0)
        return combine_sums(sums, Sums(highest, total, by_tile[2].sum(0), by_tile[3].sum(0)))

    zeros = varying_zeros(jnp.zeros(x.shape[0], jnp.float32), x, kernel, targets)
    empty = Sums(zeros - jnp.inf, zeros, zeros, zeros)
    sums = fold_chunks(add_chunk, empty, kernel, chunks.wanted)
    return tuple(array[:rows] for array in sums)


def _sum_tile(loss: Loss, tile: Tile, targets_ref: Any, limits_ref: Any) -> tuple[jax.Array, ...]:
    """The four sums over the logits of a tile, for each of its rows; see `Sums`."""
    z, token, valid = _logits(tile, limits_ref, loss)
    # Repeated rows were counted with the chunk before.
    valid &= tile.positions(1) >= limits_ref[1]
    highest = jnp.where(valid, z, jnp.full_like(z, -jnp.inf)).max(1)
    e = _or_zero(valid, jnp.exp(z - tile.across(highest)))
    is_target = token == tile.across(tile.row_values(targets_ref))
    of_target = _or_zero(is_target & valid, z).sum(1)
    sum_z = jnp.zeros_like(of_target)  # only read with smoothing
    if loss.smoothing:
        sum_z = _or_zero(valid, z).sum(1)
    return highest, e.sum(1), of_target, sum_z


def _or_zero(mask: jax.Array, x: jax.Array) -> jax.Array:
    """An array with zeros outside a mask; in Mosaic, `where` takes no scalar in their place."""
    return jnp.where(mask, x, jnp.zeros_like(x))


def backward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    vocab_offset: jax.Array,
    log_z: jax.Array,
    gradient: jax.Array,
    *,
    loss: Loss,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The gradients to `x` and to the kernel, of this device's part of the logits only.

    Arguments are those of the reference. `simulated` runs the kernel in Pallas's interpreter.
    """
    gradient, log_z_gradient = row_gradients(targets, log_z, gradient, loss)
    run = jax.custom_batching.sequential_vmap(partial(_gradients, loss, simulated))
    return run(x, kernel, targets, vocab_offset, log_z, log_z_gradient, gradient)


def _gradients(
    loss: Loss,
    simulated: bool,
    x: Any,
    kernel: Any,
    targets: Any,
    vocab_offset: Any,
    *row_columns: Any,
) -> tuple[jax.Array, jax.Array]:
    """The gradients to `x`, in float32, and to the kernel, in its dtype.

    Args:
        loss: which loss.
        simulated: whether an interpreter runs the kernel.
        x: (rows, width).
        kernel: (vocabulary, width).
        targets: a token for each row.
        vocab_offset: the token of the kernel's first row.
        row_columns: for each row `log Z`, the gradient to it, and the gradient to the loss.
    """
    rows, width = x.shape
    x, *columns = _pad_rows(x, targets, *row_columns)
    kind = ProductKernel("head_backward", simulated, approx_math=loss.cap is None)
    chunks = _Chunks(loss, kind, [("tile", x.dtype)], x)
    head_backward = partial(_differentiate_tile, loss)

    def add_chunk(gradients: Any, chunk: Chunk) -> Any:
        x_gradient, kernel_gradient = gradients
        inputs = (*columns, chunks.limits(chunk, vocab_offset))
        (z_gradient,) = chunks.run(head_backward, chunks.padded(chunk.rows), inputs)
        # Rows and columns that pad the kernel to whole tiles have a gradient of zero: cut them off.
        chunk_gradient = product(z_gradient, x, 0, 0).astype(kernel.dtype)
        chunk_gradient = chunk_gradient[: chunk.rows.shape[0], :width]
        x_gradient = x_gradient + product(z_gradient, chunks.padded(chunk.new_rows), 1, 0)
        return x_gradient, lax.dynamic_update_slice_in_dim(
            kernel_gradient, chunk_gradient, chunk.begin, 0
        )

    zeros = (jnp.zeros(x.shape, jnp.float32), jnp.zeros_like(kernel))
    varying = tuple(varying_zeros(array, x, kernel, columns[0]) for array in zeros)
    x_gradient, kernel_gradient = fold_chunks(add_chunk, varying, kernel, chunks.wanted)
    return x_gradient[:rows, :width], kernel_gradient


def _differentiate_tile(loss: Loss, tile: Tile, targets_ref: Any, *refs: Any) -> tuple[jax.Array]:
    """The gradient to the logits of a tile.

    The other references are to `log Z`, the gradient to it, that to the loss, and the limits.
    """
    *column_refs, limits_ref = refs
    z, token, valid = _logits(tile, limits_ref, loss)
    is_target = token == tile.across(tile.row_values(targets_ref))
    log_z, log_z_gradient, gradient = (tile.across(tile.row_values(ref)) for ref in column_refs)
    z_gradient = logit_gradients(z, is_target, log_z, log_z_gradient, gradient, loss)
    return (_or_zero(valid, z_gradient),)


def _logits(tile: Tile, limits_ref: Any, loss: Loss) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The logits of a tile, their tokens, and which of these are in the vocabulary."""
    column = tile.positions(1)
    return capped(tile.z, loss), column + limits_ref[0], column < limits_ref[2]


def _pad_rows(x: jax.Array, *columns: jax.Array) -> list[jax.Array]:
    """Rows, and arrays with a number for each, padded with zeros to two whole tiles."""
    missing = -x.shape[0] % (2 * ROWS)
    padded_rows = padded(x, 2 * ROWS, x.dtype)
    return [padded_rows, *(jnp.pad(column, (0, missing)) for column in columns)]
