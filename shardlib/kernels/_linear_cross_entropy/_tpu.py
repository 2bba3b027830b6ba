"""A linear head's cross-entropy on a TPU: logits are computed block by block in fast memory.

The rows of `x` are along the lanes of a block of logits. So sums over the vocabulary are added lane
by lane, and the numbers of each row, such as its target, are a row of lanes:

                  rows of x ->
    vocabulary    +--------------+
        |         |  logits      |      sums down the columns: one number for each row
        v         +--------------+

Forward walks over the vocabulary for each block of rows. Backward walks over the rows for each
block of the vocabulary, whose gradient stays in fast memory meanwhile. Every block of the
vocabulary also adds to the gradient to all rows of `x`. That is therefore read from memory, added
to and written back, through a ring of buffers: while a block is added to, the next is read and the
one before is written.

Where fast memory holds too little of the vocabulary for that (on v4, from a width of some thousand)
backward is the reference's, whose products XLA computes.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardlib.kernels._choice import Task
from shardlib.kernels._linear_cross_entropy import _reference
from shardlib.kernels._linear_cross_entropy._reference import (
    Loss,
    Sums,
    capped,
    logit_gradients,
    losses_of_sums,
    product,
    rescaling,
    row_gradients,
)
from shardlib.kernels._linear_cross_entropy._tpu_blocks import (
    COLUMNS_AT_ONCE,
    SLOTS,
    Blocks,
    backward_blocks,
    first_fitting,
    forward_blocks,
)
from shardlib.kernels._rows import merged
from shardlib.kernels._tpu import (
    MIB,
    cores,
    interpreted,
    parameters,
    refuses_dtypes,
    shaped,
    vmem_bytes,
)


def refuses(task: Task) -> str | None:
    """Why the kernel does not take a task; None if it does.

    The text continues a sentence that begins with the kernel's name.
    """
    x, kernel = task.arrays["x"], task.arrays["kernel"]
    wrong_dtypes = refuses_dtypes(task)
    if wrong_dtypes:
        return wrong_dtypes
    assert task.device is not None
    # Kernels see the rows of `x` in one dim.
    flat = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    room = vmem_bytes(task.device.kind)
    least = min(blocks.used for blocks in forward_blocks(flat, kernel))
    if least <= room:
        return None
    return (
        f"holds blocks of whole rows in a core's fast memory: the least, of {x.shape[-1]} numbers "
        f"a row, take {least / MIB:.0f} MiB, and a core of {task.device.kind} has {room / MIB:.0f} "
        "for a kernel"
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


def _sums(
    loss: Loss, simulated: bool, x: Any, kernel: Any, targets: Any, vocab_offset: Any
) -> tuple[jax.Array, ...]:
    """The four sums over the logits of each row; see `Sums`.

    Args:
        loss: which loss.
        simulated: whether an interpreter runs the kernel.
        x: (rows, width).
        kernel: (vocabulary, width).
        targets: a token for each row.
        vocab_offset: the token of the kernel's first row.
    """
    (rows, width), vocab = x.shape, kernel.shape[0]
    blocks = first_fitting(forward_blocks(x, kernel))
    assert blocks is not None, "see `refuses`"
    row_spec = pl.BlockSpec((1, blocks.rows), lambda i, j: (0, i))
    results = pl.pallas_call(
        partial(head_forward, loss=loss, vocab=vocab),
        # The inner loop is over the vocabulary, so that a block of rows stays in fast memory.
        grid=(math.ceil(rows / blocks.rows), math.ceil(vocab / blocks.vocab)),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((blocks.rows, width), lambda i, j: (i, 0)),
            pl.BlockSpec((blocks.vocab, width), lambda i, j: (j, 0)),
            row_spec,
        ],
        out_specs=[row_spec] * 4,
        out_shape=[shaped((1, rows), jnp.float32, x)] * 4,
        compiler_params=parameters(("parallel", "arbitrary"), blocks.used),
        interpret=interpreted(simulated, x),
        name="head_forward",
    )(vocab_offset.reshape(1), x, kernel, targets.reshape(1, rows).astype(jnp.int32))
    return tuple(result.reshape(rows) for result in results)


def head_forward(
    offset_ref: Any,
    x_ref: Any,
    kernel_ref: Any,
    targets_ref: Any,
    *sums_refs: Any,
    loss: Loss,
    vocab: int,
) -> None:
    """Add a block of the vocabulary to the sums of a block of rows.

    Args:
        offset_ref: the token of the first row of this device's kernel.
        x_ref: the block of rows.
        kernel_ref: the block of the vocabulary.
        targets_ref: a token for each row.
        sums_refs: to the fields of `Sums`, in its order.
        loss: which loss.
        vocab: how many rows this device's kernel has.
    """
    highest_ref, total_ref, of_target_ref, sum_ref = sums_refs
    begin = pl.program_id(1) * kernel_ref.shape[0]

    @pl.when(begin == 0)
    def _() -> None:
        highest_ref[...] = jnp.full_like(highest_ref, -jnp.inf)
        for ref in (total_ref, of_target_ref, sum_ref):
            ref[...] = jnp.zeros_like(ref)

    z, token, valid = _logits(x_ref[...], kernel_ref[...], begin, offset_ref[0], loss, vocab)
    old_highest = highest_ref[...]
    highest = jnp.maximum(old_highest, jnp.where(valid, z, -jnp.inf).max(0, keepdims=True))
    highest_ref[...] = highest
    total = jnp.where(valid, jnp.exp(z - highest), 0).sum(0, keepdims=True)
    # The total so far is relative to the highest logit of the blocks before.
    total_ref[...] = total_ref[...] * rescaling(old_highest, highest) + total
    of_target_ref[...] += jnp.where(token == targets_ref[...], z, 0).sum(0, keepdims=True)
    if loss.smoothing:
        sum_ref[...] += jnp.where(valid, z, 0).sum(0, keepdims=True)


def _logits(
    x: jax.Array, kernel: jax.Array, begin: jax.Array, offset: jax.Array, loss: Loss, vocab: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The logits (vocabulary, rows) of two blocks, their tokens, and which are of real tokens.

    Args:
        x: a block of rows.
        kernel: a block of the kernel's rows.
        begin: the row of this device's kernel at which the block begins.
        offset: the token of the first row of this device's kernel.
        loss: which loss.
        vocab: how many rows this device's kernel has.
    """
    z = capped(product(kernel.astype(x.dtype), x, 1, 1), loss)
    kernel_row = lax.broadcasted_iota(jnp.int32, z.shape, 0) + begin
    # The last block may reach beyond the kernel, where another device's tokens would begin.
    token = jnp.where(kernel_row < vocab, kernel_row + offset, loss.vocab)
    return z, token, token < loss.vocab


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

    Where fast memory holds too little of the vocabulary at a time, they are the reference's.
    Arguments are those of the reference; `simulated` runs the kernel in Pallas's interpreter.
    """
    blocks = first_fitting(backward_blocks(x, kernel))
    if blocks is None:
        return _reference.backward(x, kernel, targets, vocab_offset, log_z, gradient, loss=loss)
    gradient, log_z_gradient = row_gradients(targets, log_z, gradient, loss)
    run = jax.custom_batching.sequential_vmap(partial(_gradients, blocks, loss, simulated))
    return run(x, kernel, targets, vocab_offset, log_z, log_z_gradient, gradient)


@dataclass(frozen=True)
class _Walk:
    """The sizes of backward's grid `(cores, vocabulary blocks of a core, row blocks)`."""

    loss: Loss
    rows: int  # of `x`
    vocab: int  # rows of the kernel
    vocab_blocks: int  # of one core
    row_blocks: int

    @property
    def last(self) -> int:
        """The number of a core's last step."""
        return self.vocab_blocks * self.row_blocks - 1

    @property
    def lag(self) -> int:
        """After how many steps the write from a buffer is waited for.

        It is zero where there is only one block of rows, which stays in its buffer from the first
        step to the last.
        """
        return min(SLOTS, self.row_blocks) - 1


def _gradients(
    blocks: Blocks,
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
        blocks: the sizes of blocks.
        loss: which loss.
        simulated: whether an interpreter runs the kernel.
        x: (rows, width).
        kernel: (vocabulary, width).
        targets: a token for each row.
        vocab_offset: the token of the kernel's first row.
        row_columns: for each row `log Z`, the gradient to it, and the gradient to the loss.
    """
    (rows, width), vocab = x.shape, kernel.shape[0]
    row_blocks, vocab_blocks = math.ceil(rows / blocks.rows), math.ceil(vocab / blocks.vocab)
    # Each core of a device adds up a gradient to `x` of its own, over its blocks of the vocabulary.
    used_cores = cores() if vocab_blocks % cores() == 0 else 1
    # The inner loop is over the rows, so that a block of the vocabulary stays in fast memory.
    walk = _Walk(loss, rows, vocab, vocab_blocks // used_cores, row_blocks)
    row_spec = pl.BlockSpec((1, blocks.rows), lambda core, j, i: (0, i))
    vocab_spec = pl.BlockSpec(
        (blocks.vocab, width), lambda core, j, i: (core * walk.vocab_blocks + j, 0)
    )
    columns = [column.reshape(1, rows) for column in (targets.astype(jnp.int32), *row_columns)]
    x_gradient, kernel_gradient = pl.pallas_call(
        partial(head_backward, walk=walk),
        grid=(used_cores, walk.vocab_blocks, row_blocks),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((blocks.rows, width), lambda core, j, i: (i, 0)),
            vocab_spec,
            *[row_spec] * 4,
        ],
        out_specs=[pl.BlockSpec(memory_space=pl.ANY), vocab_spec],
        out_shape=[
            shaped((used_cores, row_blocks * blocks.rows, width), jnp.float32, x),
            shaped((vocab, width), kernel.dtype, x),
        ],
        scratch_shapes=_backward_scratch(blocks, width, kernel.dtype),
        compiler_params=parameters(("parallel", "arbitrary", "arbitrary"), blocks.used),
        interpret=interpreted(simulated, x),
        name="head_backward",
    )(vocab_offset.reshape(1), x, kernel, *columns)
    return x_gradient.sum(0)[:rows], kernel_gradient


def _backward_scratch(blocks: Blocks, width: int, kernel_dtype: Any) -> list[Any]:
    """Fast memory of backward besides its blocks; see `_BackwardRefs`."""
    scratch = [
        pltpu.VMEM((SLOTS, blocks.rows, width), jnp.float32),
        pltpu.SemaphoreType.DMA((SLOTS,)),
        pltpu.SemaphoreType.DMA((SLOTS,)),
    ]
    if kernel_dtype != jnp.float32:
        # The gradient to the kernel is added up in float32 and rounded once.
        scratch.append(pltpu.VMEM((blocks.vocab, width), jnp.float32))
    return scratch


class _BackwardRefs(NamedTuple):
    """The references of `head_backward`, in their order.

    Inputs come first, then results, then scratch. All inputs are blocks in fast memory except
    the offset, which is a scalar.
    """

    offset: Any  # the token of the first row of this device's kernel
    x: Any
    kernel: Any
    targets: Any
    log_z: Any
    log_z_gradient: Any
    gradient: Any
    x_gradient: Any  # result, in the device's memory, one for each core
    kernel_gradient: Any  # result, the block of this step
    x_gradient_buffers: Any  # a ring of `SLOTS` blocks
    reads: Any  # semaphores of the copies to the buffers
    writes: Any  # semaphores of the copies from the buffers
    total: Any = None  # the gradient to the kernel in float32, where it has another dtype


@dataclass(frozen=True)
class _BackwardStep:
    """A step of backward: its indices in the grid, and the references of the kernel.

    Its methods make the copies of the gradient to `x` between memory and the ring of buffers.
    """

    walk: _Walk
    refs: _BackwardRefs
    core: jax.Array
    j: jax.Array  # which of the core's blocks of the vocabulary
    i: jax.Array  # which block of rows
    number: jax.Array  # how many steps the core took before

    def read(self, step: jax.Array) -> Any:
        """The copy that brings a step's block of the gradient to `x` to its buffer."""
        slot, in_memory, buffer = self._copy_ends(step)
        return pltpu.make_async_copy(in_memory, buffer, self.refs.reads.at[slot])

    def write(self, step: jax.Array) -> Any:
        """The copy that takes a step's block of the gradient to `x` back to memory."""
        slot, in_memory, buffer = self._copy_ends(step)
        return pltpu.make_async_copy(buffer, in_memory, self.refs.writes.at[slot])

    def _copy_ends(self, step: jax.Array) -> tuple[jax.Array, Any, Any]:
        """The slot of a step, its block of the gradient in memory, and its buffer."""
        refs, size = self.refs, self.refs.x.shape[0]
        slot = lax.rem(step, SLOTS)
        rows = pl.ds(lax.rem(step, self.walk.row_blocks) * size, size)
        return slot, refs.x_gradient.at[self.core, rows], refs.x_gradient_buffers.at[slot]


def head_backward(*all_refs: Any, walk: _Walk) -> None:
    """One step of backward: a block of rows with a block of the vocabulary.

    In this order it copies the gradient to `x` and computes, for `lag = 2`:

        step k:   wait for the write of step k - 2, start to read for step k + 1,
                  make the logits' gradient, wait for the read of step k,
                  add the products, start the write of step k
    """
    refs = _BackwardRefs(*all_refs)
    core, j, i = (pl.program_id(axis) for axis in range(3))
    step = _BackwardStep(walk, refs, core, j, i, j * walk.row_blocks + i)
    number, lag = step.number, walk.lag
    begin = (core * walk.vocab_blocks + j) * refs.kernel.shape[0]

    # The next step reads what was written `row_blocks` steps before it, to the buffer of `SLOTS`
    # steps before it. The later one of these two writes is waited for here: see `lag`.
    if lag:
        pl.when(number >= lag)(lambda: step.write(number - lag).wait())
        pl.when((number + 1 >= walk.row_blocks) & (number < walk.last))(
            lambda: step.read(number + 1).start()
        )
    z_gradient = _step_logit_gradients(step, begin)
    # A single block of rows stays in the first buffer.
    slot = lax.rem(number, SLOTS) if lag else 0
    if lag:
        pl.when(j > 0)(lambda: step.read(number).wait())
    _add_products(step, z_gradient, begin, slot)
    if refs.total is not None:

        @pl.when(i == walk.row_blocks - 1)
        def _() -> None:
            refs.kernel_gradient[...] = refs.total[...].astype(refs.kernel_gradient.dtype)

    if lag:
        step.write(number).start()

    @pl.when(number == walk.last)
    def _() -> None:
        # Nothing may be on its way when the program ends.
        if not lag:
            step.write(jnp.int32(0)).start()
            step.write(jnp.int32(0)).wait()
        for behind in range(lag):
            step.write(number - behind).wait()


def _step_logit_gradients(step: _BackwardStep, begin: jax.Array) -> jax.Array:
    """The gradient to the logits of a step, in the dtype of `x`; zero beyond either array."""
    refs, walk = step.refs, step.walk
    block = refs.x.shape[0]
    z, token, valid = _logits(
        refs.x[...], refs.kernel[...], begin, refs.offset[0], walk.loss, walk.vocab
    )
    row = lax.broadcasted_iota(jnp.int32, (1, block), 1) + step.i * block
    columns = (refs.log_z[...], refs.log_z_gradient[...], refs.gradient[...])
    z_gradient = logit_gradients(z, token == refs.targets[...], *columns, walk.loss)
    return jnp.where(valid & (row < walk.rows), z_gradient, 0).astype(refs.x.dtype)


def _add_products(step: _BackwardStep, z_gradient: jax.Array, begin: jax.Array, slot: Any) -> None:
    """Add a step's parts of the gradients to the kernel and to `x`, some columns at a time.

    The product with `x` is added to the sum of this block of the vocabulary, and the product with
    the kernel to the buffer of this block of rows.
    """
    refs, walk = step.refs, step.walk
    block, width = refs.x.shape
    vocab_block = refs.kernel.shape[0]
    total = refs.kernel_gradient if refs.total is None else refs.total
    for first_column in range(0, width, COLUMNS_AT_ONCE):
        columns = slice(first_column, min(first_column + COLUMNS_AT_ONCE, width))
        # Beyond an array a block holds anything, even numbers that times zero are nan.
        x = _zero_from(refs.x[:, columns], walk.rows - step.i * block, walk.rows % block)
        kernel = _zero_from(
            refs.kernel[:, columns].astype(x.dtype), walk.vocab - begin, walk.vocab % vocab_block
        )
        _accumulate(total.at[:, columns], product(z_gradient, x, 1, 0), step.i == 0)
        _accumulate(
            refs.x_gradient_buffers.at[slot, :, columns],
            product(z_gradient, kernel, 0, 0),
            step.j == 0,
        )


def _accumulate(ref: Any, x: jax.Array, first: jax.Array) -> None:
    """Add to a sum, or begin it: before that its memory holds anything."""

    @pl.when(first)
    def _() -> None:
        ref[...] = x

    @pl.when(~first)
    def _() -> None:
        ref[...] += x


def _zero_from(x: jax.Array, size: jax.Array, ragged: int) -> jax.Array:
    """The first `size` rows of a block, and zeros for the others.

    `ragged` is how many rows the last block has, or zero where all blocks are full: then the block
    is returned as it is.
    """
    if not ragged:
        return x
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) < size, x, jnp.zeros_like(x))
