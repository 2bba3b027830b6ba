"""A linear head's cross-entropy on a TPU: logits are made block by block in fast memory and gone
with it.

Logits lie there with the rows of `x` along the lanes, so that what is summed over the vocabulary is
added lane by lane, and what each row has is a vector of lanes. Forward walks over the vocabulary
for each block of rows. Backward walks over the rows for each block of the vocabulary, whose
gradient stays in fast memory meanwhile; the gradient to `x`, of which every block of the vocabulary
has a part, comes and goes through the memory, one block ahead and one behind. Where fast memory
holds too little of the vocabulary for that, on v4 from a width of some thousand, backward is the
reference's, whose products XLA makes well.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardlib.kernels._choice import Task, device_here
from shardlib.kernels._linear_cross_entropy import _reference
from shardlib.kernels._linear_cross_entropy._reference import (
    Loss,
    Sums,
    capped,
    of_logits,
    of_rows,
    of_sums,
    product,
    scale,
)
from shardlib.kernels._rows import merged
from shardlib.kernels._tpu import (
    LANES,
    MIB,
    cores,
    interpreted,
    parameters,
    shaped,
    supported,
    vmem_bytes,
)

LOGIT = 16  # bytes of fast memory for each logit of a block, and for what is computed of it
SOME = 512  # numbers of a row whose gradients are made at a time
# Rows of the kernel in a block of backward: for each block the gradient to `x` goes there and back,
# and below 512 rows that takes longer than the products; the reference's, of XLA, are no slower
# then.
PARTS = range(512, 2049, 128)
SLOTS = 3  # of blocks of the gradient to `x`: one comes, one is added to, one goes


class Blocks(NamedTuple):
    """How many rows of `x` and of the kernel a block has, and the bytes of fast memory that
    takes.
    """

    rows: int
    vocab: int
    used: int


def refuses(task: Task) -> str | None:
    """Why it cannot do a task, if it cannot."""
    x, kernel = task.arrays["x"], task.arrays["kernel"]
    if reason := supported(task):
        return reason
    assert task.device is not None
    flat = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    room = vmem_bytes(task.device.kind)
    least = min(one.used for one in _forward_blocks(flat, kernel))
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
    first: jax.Array,
    *,
    loss: Loss,
    axes: tuple[str, ...] = (),
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As the reference's."""
    sums = merged(partial(_sums, loss, simulated), "rows", "same", "rows", "same")(
        x, kernel, targets, first
    )
    return of_sums(Sums(*sums), targets, loss, axes)


def _sums(
    loss: Loss, simulated: bool, x: Any, kernel: Any, targets: Any, first: Any
) -> tuple[jax.Array, ...]:
    (rows, width), vocab = x.shape, kernel.shape[0]
    blocks = _fitting(_forward_blocks(x, kernel))
    assert blocks is not None, "see `refuses`"
    per_row = pl.BlockSpec((1, blocks.rows), lambda i, j: (0, i))
    results = pl.pallas_call(
        partial(head_forward, loss=loss, vocab=vocab),
        grid=(math.ceil(rows / blocks.rows), math.ceil(vocab / blocks.vocab)),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((blocks.rows, width), lambda i, j: (i, 0)),
            pl.BlockSpec((blocks.vocab, width), lambda i, j: (j, 0)),
            per_row,
        ],
        out_specs=[per_row] * 4,
        out_shape=[shaped((1, rows), jnp.float32, x)] * 4,
        compiler_params=parameters(("parallel", "arbitrary"), blocks.used),
        interpret=interpreted(simulated, x),
        name="head_forward",
    )(first.reshape(1), x, kernel, targets.reshape(1, rows).astype(jnp.int32))
    return tuple(result.reshape(rows) for result in results)


def head_forward(
    first_ref: Any,
    x_ref: Any,
    kernel_ref: Any,
    targets_ref: Any,
    *sums_refs: Any,
    loss: Loss,
    vocab: int,
) -> None:
    highest_ref, total_ref, of_target_ref, sum_ref = sums_refs
    here = pl.program_id(1) * kernel_ref.shape[0]

    @pl.when(here == 0)
    def _() -> None:
        highest_ref[...] = jnp.full_like(highest_ref, -jnp.inf)
        for ref in (total_ref, of_target_ref, sum_ref):
            ref[...] = jnp.zeros_like(ref)

    z, place, counts = _logits(x_ref[...], kernel_ref[...], here, first_ref[0], loss, vocab)
    highest = highest_ref[...]
    now = jnp.maximum(highest, jnp.where(counts, z, -jnp.inf).max(0, keepdims=True))
    highest_ref[...] = now
    total = jnp.where(counts, jnp.exp(z - now), 0).sum(0, keepdims=True)
    total_ref[...] = total_ref[...] * scale(highest, now) + total
    of_target_ref[...] += jnp.where(place == targets_ref[...], z, 0).sum(0, keepdims=True)
    if loss.smoothing:
        sum_ref[...] += jnp.where(counts, z, 0).sum(0, keepdims=True)


def _logits(
    x: jax.Array, kernel: jax.Array, here: jax.Array, first: jax.Array, loss: Loss, vocab: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, (vocabulary, rows), their places in the vocabulary, and which count."""
    z = capped(product(kernel.astype(x.dtype), x, 1, 1), loss)
    at = lax.broadcasted_iota(jnp.int32, z.shape, 0) + here
    place = jnp.where(at < vocab, at + first, loss.vocab)  # the last block may reach beyond
    return z, place, place < loss.vocab


def backward(
    x: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    first: jax.Array,
    log_z: jax.Array,
    gradient: jax.Array,
    *,
    loss: Loss,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As the reference's, and by it where fast memory holds too little of the vocabulary at a
    time.
    """
    if (blocks := _fitting(_backward_blocks(x, kernel))) is None:
        return _reference.backward(x, kernel, targets, first, log_z, gradient, loss=loss)
    gradient, of_log_z = of_rows(targets, log_z, gradient, loss)
    arrays = (x, kernel, targets, first, log_z, of_log_z, gradient)
    return jax.custom_batching.sequential_vmap(partial(_gradients, blocks, loss, simulated))(
        *arrays
    )


def _gradients(
    blocks: Blocks,
    loss: Loss,
    simulated: bool,
    x: Any,
    kernel: Any,
    targets: Any,
    first: Any,
    *of_row: Any,
) -> tuple[jax.Array, jax.Array]:
    (rows, width), vocab = x.shape, kernel.shape[0]
    row_blocks, vocab_blocks = math.ceil(rows / blocks.rows), math.ceil(vocab / blocks.vocab)
    walkers = cores() if vocab_blocks % cores() == 0 else 1
    each = vocab_blocks // walkers
    per_row = pl.BlockSpec((1, blocks.rows), lambda core, j, i: (0, i))
    of_part = pl.BlockSpec((blocks.vocab, width), lambda core, j, i: (core * each + j, 0))
    columns = [one.reshape(1, rows) for one in (targets.astype(jnp.int32), *of_row)]
    of_x, of_kernel = pl.pallas_call(
        partial(head_backward, loss=loss, rows=rows, vocab=vocab, steps=(each, row_blocks)),
        grid=(walkers, each, row_blocks),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec((blocks.rows, width), lambda core, j, i: (i, 0)),
            of_part,
            *[per_row] * 4,
        ],
        out_specs=[pl.BlockSpec(memory_space=pl.ANY), of_part],
        out_shape=[
            shaped((walkers, row_blocks * blocks.rows, width), jnp.float32, x),
            shaped((vocab, width), kernel.dtype, x),
        ],
        scratch_shapes=[
            pltpu.VMEM((SLOTS, blocks.rows, width), jnp.float32),
            pltpu.SemaphoreType.DMA((SLOTS,)),
            pltpu.SemaphoreType.DMA((SLOTS,)),
            *[pltpu.VMEM((blocks.vocab, width), jnp.float32)] * (kernel.dtype != jnp.float32),
        ],
        compiler_params=parameters(("parallel", "arbitrary", "arbitrary"), blocks.used),
        interpret=interpreted(simulated, x),
        name="head_backward",
    )(first.reshape(1), x, kernel, *columns)
    return of_x.sum(0)[:rows], of_kernel


def head_backward(
    first_ref: Any,
    x_ref: Any,
    kernel_ref: Any,
    targets_ref: Any,
    log_z_ref: Any,
    of_log_z_ref: Any,
    gradient_ref: Any,
    of_x_ref: Any,
    of_kernel_ref: Any,
    parts: Any,
    reads: Any,
    writes: Any,
    *wider: Any,
    loss: Loss,
    rows: int,
    vocab: int,
    steps: tuple[int, int],
) -> None:
    core, j, i = (pl.program_id(k) for k in range(3))
    step, (each, row_blocks) = j * steps[1] + i, steps
    block = x_ref.shape[0]
    here = (core * each + j) * kernel_ref.shape[0]
    last = each * row_blocks - 1
    total = wider[0] if wider else of_kernel_ref

    def moving(step: jax.Array, there: bool) -> Any:
        """The copy that brings a step's part of the gradient to `x`, or takes it back."""
        slot = lax.rem(step, SLOTS)
        at = of_x_ref.at[core, pl.ds(lax.rem(step, row_blocks) * block, block)]
        part = parts.at[slot]
        return pltpu.make_async_copy(
            *((part, at) if there else (at, part)), (writes if there else reads).at[slot]
        )

    # What a step reads was written `row_blocks` steps before: it must be there, and the slot free.
    # One block never leaves.
    behind = min(SLOTS, row_blocks) - 1
    if behind:
        pl.when(step >= behind)(lambda: moving(step - behind, True).wait())
        pl.when((step + 1 >= row_blocks) & (step < last))(lambda: moving(step + 1, False).start())

    z, place, counts = _logits(x_ref[...], kernel_ref[...], here, first_ref[0], loss, vocab)
    row = lax.broadcasted_iota(jnp.int32, (1, block), 1) + i * block
    columns = (log_z_ref[...], of_log_z_ref[...], gradient_ref[...])
    of_z = of_logits(z, place == targets_ref[...], *columns, loss)
    of_z = jnp.where(counts & (row < rows), of_z, 0).astype(x_ref.dtype)
    slot = lax.rem(step, SLOTS) if behind else 0
    if behind:
        pl.when(j > 0)(lambda: moving(step, False).wait())
    for begin in range(0, x_ref.shape[1], SOME):
        some = slice(begin, min(begin + SOME, x_ref.shape[1]))
        # What is beyond an array is anything, and times zero it may be no number.
        x = _until(x_ref[:, some], rows - i * block, rows % block)
        kernel = _until(
            kernel_ref[:, some].astype(x.dtype), vocab - here, vocab % kernel_ref.shape[0]
        )
        _add(total.at[:, some], product(of_z, x, 1, 0), i == 0)
        _add(parts.at[slot, :, some], product(of_z, kernel, 0, 0), j == 0)
    if wider:

        @pl.when(i == row_blocks - 1)
        def _() -> None:
            of_kernel_ref[...] = total[...].astype(of_kernel_ref.dtype)

    if behind:
        moving(step, True).start()

    @pl.when(step == last)
    def _() -> None:
        if not behind:
            moving(jnp.int32(0), True).start()
        for k in range(max(behind, 1)):
            moving(step - k if behind else jnp.int32(0), True).wait()


def _add(ref: Any, x: jax.Array, first: jax.Array) -> None:
    """Add to what is there, which at first is nothing."""

    @pl.when(first)
    def _() -> None:
        ref[...] = x

    @pl.when(~first)
    def _() -> None:
        ref[...] += x


def _until(x: jax.Array, size: jax.Array, ragged: int) -> jax.Array:
    """So many rows of a block, and zeros."""
    return (
        jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 0) < size, x, jnp.zeros_like(x))
        if ragged
        else x
    )


def _forward_blocks(x: Any, kernel: Any) -> Iterator[Blocks]:
    """The kernel is read once for every block of rows: the more rows the better."""
    (rows, width), vocab = x.shape, kernel.shape[0]
    of_x, of_kernel, cast = _row_bytes(x, kernel, width)
    for some in (2048, 1024, 512, 256, 128):
        for part in (512, 256, 128):
            r, v = min(some, rows), min(part, vocab)
            yield Blocks(r, v, 2 * r * of_x + v * (2 * of_kernel + cast) + r * v * LOGIT)


def _backward_blocks(x: Any, kernel: Any) -> Iterator[Blocks]:
    """`x` is read, and its gradient there and back, once for every block of the vocabulary; all
    cores should have as many.
    """
    (rows, width), vocab = x.shape, kernel.shape[0]
    of_x, of_kernel, cast = _row_bytes(x, kernel, width)
    wide = 4 * _lanes(width)
    total = wide if kernel.dtype != jnp.float32 else 0
    for part in sorted(PARTS, key=lambda part: (math.ceil(vocab / part) % cores() != 0, -part)):
        for some in (256, 128):
            r, v = min(some, rows), min(part, vocab)
            used = r * (2 * of_x + SLOTS * wide) + v * (4 * of_kernel + cast + total)
            yield Blocks(r, v, used + r * v * LOGIT + (r + v) * SOME * 4)


def _fitting(candidates: Iterator[Blocks]) -> Blocks | None:
    """The first, hence best, that a core has room for."""
    room = vmem_bytes(device_here().kind)
    return next((blocks for blocks in candidates if blocks.used <= room), None)


def _row_bytes(x: Any, kernel: Any, width: int) -> tuple[int, int, int]:
    """Of a row of each, and of one of the kernel in the dtype of `x`, if it has another."""
    of_x, of_kernel = (_lanes(width) * jnp.dtype(one.dtype).itemsize for one in (x, kernel))
    return of_x, of_kernel, of_x if x.dtype != kernel.dtype else 0


def _lanes(width: int) -> int:
    return math.ceil(width / LANES) * LANES
