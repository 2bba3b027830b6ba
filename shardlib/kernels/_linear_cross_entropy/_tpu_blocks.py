"""How many rows of `x` and of the kernel a block has: what a core's fast memory has room for."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from shardlib.kernels._choice import device_here
from shardlib.kernels._tpu import LANES, cores, vmem_bytes

LOGIT = 16  # bytes of fast memory for each logit of a block, and for what is computed of it
SOME = 512  # columns of a gradient that are made at a time
# Rows of the kernel in a block of backward. For each block the gradient to `x` is read and written
# once, and below 512 rows that takes longer than the products; the reference's products, which are
# XLA's, are no slower then.
PARTS = range(512, 2049, 128)
SLOTS = 3  # buffers for the gradient to `x`: one is read, one is added to, one is written


class Blocks(NamedTuple):
    """How many rows of `x` and of the kernel a block has, and the fast memory that it takes.

    Candidates come in order of preference, and the first that fits is taken.
    """

    rows: int
    vocab: int
    used: int  # bytes


def forward_blocks(x: Any, kernel: Any) -> Iterator[Blocks]:
    """Sizes of blocks for forward, the best first.

    The kernel is read once for every block of rows: the more rows the better.
    """
    (rows, width), vocab = x.shape, kernel.shape[0]
    x_gradient, kernel_gradient, cast = _row_bytes(x, kernel, width)
    for most_rows in (2048, 1024, 512, 256, 128):
        for most_vocab in (512, 256, 128):
            r, v = min(most_rows, rows), min(most_vocab, vocab)
            # Blocks are there twice, so that one is on its way while the other is used.
            yield Blocks(
                r, v, 2 * r * x_gradient + v * (2 * kernel_gradient + cast) + r * v * LOGIT
            )


def backward_blocks(x: Any, kernel: Any) -> Iterator[Blocks]:
    """Sizes of blocks for backward, the best first.

    `x` is read, and its gradient read and written, once for every block of the vocabulary: the
    larger those the better. All cores should have as many.
    """
    (rows, width), vocab = x.shape, kernel.shape[0]
    x_gradient, kernel_gradient, cast = _row_bytes(x, kernel, width)
    float32_row = 4 * _padded_to_lanes(width)
    total = float32_row if kernel.dtype != jnp.float32 else 0

    def by_preference(part: int) -> tuple[bool, int]:
        # Parts that the cores divide evenly come first, and then the larger ones.
        return math.ceil(vocab / part) % cores() != 0, -part

    for most_vocab in sorted(PARTS, key=by_preference):
        for most_rows in (256, 128):
            r, v = min(most_rows, rows), min(most_vocab, vocab)
            blocks = r * (2 * x_gradient + SLOTS * float32_row) + v * (
                4 * kernel_gradient + cast + total
            )
            products = (r + v) * SOME * 4
            yield Blocks(r, v, blocks + r * v * LOGIT + products)


def first_fitting(candidates: Iterator[Blocks]) -> Blocks | None:
    """The first, hence best, sizes of blocks that a core has room for; None if there are none."""
    room = vmem_bytes(device_here().kind)
    for blocks in candidates:
        if blocks.used <= room:
            return blocks
    return None


def _row_bytes(x: Any, kernel: Any, width: int) -> tuple[int, int, int]:
    """The bytes in fast memory of a row of `x`, of one of the kernel, and of its cast to `x`'s.

    The last is zero where both have the same dtype.
    """
    numbers = _padded_to_lanes(width)
    x_gradient = numbers * jnp.dtype(x.dtype).itemsize
    kernel_gradient = numbers * jnp.dtype(kernel.dtype).itemsize
    return x_gradient, kernel_gradient, x_gradient if x.dtype != kernel.dtype else 0


def _padded_to_lanes(width: int) -> int:
    return math.ceil(width / LANES) * LANES
