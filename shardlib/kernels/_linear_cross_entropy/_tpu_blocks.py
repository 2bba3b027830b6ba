"""How many rows of `x` and of the kernel a block has, so that blocks fit in fast memory."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardlib.kernels._choice import device_here
from shardlib.kernels._tpu import LANES, cores, vmem_bytes

LOGIT_BYTES = 16  # of fast memory for each logit of a block, and for what is computed of it
COLUMNS_AT_ONCE = 512  # columns of a gradient that are computed at a time
# Rows of the kernel that a block of backward may have. For each block the gradient to `x` is read
# and written once. With fewer than 512 rows that takes longer than the products, and the reference,
# whose products are XLA's, is as fast.
VOCAB_ROWS = range(512, 2049, 128)
SLOTS = 3  # buffers for the gradient to `x`: one is read, one is added to, one is written


class Blocks(NamedTuple):
    """How many rows of `x` and of the kernel a block has, and the fast memory that it takes."""

    rows: int  # of `x`
    vocab: int  # rows of the kernel
    used: int  # bytes


def forward_blocks(x: Any, kernel: Any) -> Iterator[Blocks]:
    """Sizes of blocks for forward, the best first.

    The kernel is read once for every block of rows: the more rows the better.
    """
    (rows, width), vocab = x.shape, kernel.shape[0]
    x_row, kernel_row, cast_row = _row_bytes(x, kernel, width)
    for most_rows in (2048, 1024, 512, 256, 128):
        for most_vocab in (512, 256, 128):
            r, v = min(most_rows, rows), min(most_vocab, vocab)
            # Operands have two buffers each.
            operands = r * 2 * x_row + v * (2 * kernel_row + cast_row)
            yield Blocks(r, v, operands + r * v * LOGIT_BYTES)


def backward_blocks(x: Any, kernel: Any) -> Iterator[Blocks]:
    """Sizes of blocks for backward, the best first.

    `x` is read, and its gradient read and written, once for every block of the vocabulary: the
    larger these are the better. All cores should have equally many.
    """
    (rows, width), vocab = x.shape, kernel.shape[0]
    x_row, kernel_row, cast_row = _row_bytes(x, kernel, width)
    float32_row = 4 * _padded_to_lanes(width)
    sum_row = float32_row if kernel.dtype != jnp.float32 else 0

    def by_preference(vocab_rows: int) -> tuple[bool, int]:
        # Sizes whose blocks the cores divide evenly come first, the larger ones before others.
        return math.ceil(vocab / vocab_rows) % cores() != 0, -vocab_rows

    for most_vocab in sorted(VOCAB_ROWS, key=by_preference):
        for most_rows in (256, 128):
            r, v = min(most_rows, rows), min(most_vocab, vocab)
            # The kernel and its gradient have two buffers each, and `x` has two.
            x_bytes = r * (2 * x_row + SLOTS * float32_row)
            kernel_bytes = v * (4 * kernel_row + cast_row + sum_row)
            products = (r + v) * COLUMNS_AT_ONCE * 4
            yield Blocks(r, v, x_bytes + kernel_bytes + r * v * LOGIT_BYTES + products)


def first_fitting(candidates: Iterator[Blocks]) -> Blocks | None:
    """The first of the candidates that a core has room for; None if there is none."""
    room = vmem_bytes(device_here().kind)
    for blocks in candidates:
        if blocks.used <= room:
            return blocks
    return None


def _row_bytes(x: Any, kernel: Any, width: int) -> tuple[int, int, int]:
    """The bytes in fast memory of a row of `x`, of one of the kernel, and of the latter as `x`.

    The last is for the kernel's row in the dtype of `x`, and zero where both have the same.
    """
    numbers = _padded_to_lanes(width)
    x_row = numbers * jnp.dtype(x.dtype).itemsize
    kernel_row = numbers * jnp.dtype(kernel.dtype).itemsize
    cast_row = x_row if x.dtype != kernel.dtype else 0
    return x_row, kernel_row, cast_row


def _padded_to_lanes(width: int) -> int:
    return math.ceil(width / LANES) * LANES
