"""Grouped products on a TPU, by the kernels `megablox` that come with JAX.

A tile of rows that two groups share is multiplied with both matrices, and of each product only the
rows of its group are stored. Tiles after the last group are not computed.
"""

import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.kernels._choice import Task
from shardlib.kernels._grouped_matmul._places import only_grouped
from shardlib.kernels._tpu import refuses_dtypes

# The module is imported by its full name, since the package has a function `gmm` too.
_megablox: Any = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")

# Rows, features and columns of a tile, at most. In bfloat16 these take 11 MiB of fast memory, with
# two buffers for each operand.
TILE = (512, 1024, 1024)
# The same for float32, whose numbers take twice as much.
WIDE_TILE = (512, 512, 512)
LANES = 128


def refuses(task: Task) -> str | None:
    """Why the kernel does not take a task; None if it does.

    The text continues a sentence that begins with the kernel's name.
    """
    wrong_dtypes = refuses_dtypes(task)
    if wrong_dtypes:
        return wrong_dtypes
    if task.differing:
        return (
            "comes with JAX, and does not tell over which axes its results differ: take "
            "`shard_map(..., check_vma=False)`"
        )
    return None


def forward(x: jax.Array, w: jax.Array, sizes: jax.Array, *, simulated: bool = False) -> jax.Array:
    """The product of each row with the matrix of its group."""
    y = _product(x, w, sizes, simulated)
    return only_grouped(y, sizes)


def backward(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    gradient: jax.Array,
    *,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The gradients to the rows and to the matrices."""
    of_x = _product(gradient, w, sizes, simulated, transposed=True)
    of_w = _sums_by_group(x, gradient, sizes, w.dtype, simulated)
    return only_grouped(of_x, sizes), of_w


def _product(
    x: jax.Array, w: jax.Array, sizes: jax.Array, simulated: bool, transposed: bool = False
) -> jax.Array:
    """The product of each row with the matrix of its group, or with that matrix transposed."""
    columns = w.shape[1 if transposed else 2]
    rows = _whole_tiles(x)
    tile = _tile(rows, x.shape[1], columns)
    y = _megablox.gmm(
        rows,
        w,
        sizes.astype(jnp.int32),
        x.dtype,
        tile,
        transpose_rhs=transposed,
        interpret=simulated,
    )
    return y[: x.shape[0]]


def _sums_by_group(
    x: jax.Array, gradient: jax.Array, sizes: jax.Array, dtype: Any, simulated: bool
) -> jax.Array:
    """For each group the product of its rows, transposed, with the gradients of these."""
    rows = _whole_tiles(x)
    tile = _tile(rows, x.shape[1], gradient.shape[1])
    return _megablox.tgmm(
        rows.swapaxes(0, 1),
        _whole_tiles(gradient),
        sizes.astype(jnp.int32),
        dtype,
        tile,
        interpret=simulated,
    )


def _whole_tiles(x: jax.Array) -> jax.Array:
    """The rows, with zeros after them up to a multiple of the smallest tile."""
    missing = -x.shape[0] % LANES
    return jnp.pad(x, ((0, missing), (0, 0))) if missing else x


def _tile(x: jax.Array, features: int, columns: int) -> tuple[int, int, int]:
    """The rows, features and columns of a tile."""
    most_rows, most_features, most_columns = TILE if x.dtype.itemsize == 2 else WIDE_TILE
    # Tiles must divide the rows.
    rows = math.gcd(x.shape[0], most_rows)
    return rows, min(features, most_features), min(columns, most_columns)
