"""A linear head's cross-entropy on a GPU: what is made of a tile of logits is made as it leaves the
matrix unit.

Forward writes four numbers for each row of each tile. Backward writes the gradient to a chunk of
logits, in the dtype of `x`, of which XLA's products make the gradients to `x` and to the kernel.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._choice import Task
from shardlib.kernels._gpu import generation, refuses_device
from shardlib.kernels._gpu_tiles import COLUMNS, ROWS, Tile, over_tiles, padded
from shardlib.kernels._linear_cross_entropy._reference import (
    Loss,
    Sums,
    capped,
    like,
    of_logits,
    of_rows,
    of_sums,
    over_chunks,
    product,
    scale,
    together,
)
from shardlib.kernels._rows import merged

# Of the gradient to logits that is there at a time: what is added up for each chunk costs the less.
CHUNK_BYTES = 2**28


def refuses(task: Task) -> str | None:
    """Why it cannot do a task, if it cannot."""
    if reason := refuses_device(task):
        return reason
    assert task.device is not None
    takes = {"bfloat16", "float16"}
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision in (None, "default", "tensorfloat32") and generation(task.device.kind) == "hopper":
        takes |= {"float32"}
    if str(task.arrays["x"].dtype) in takes and str(task.arrays["kernel"].dtype) in takes | {
        "float32"
    }:
        return None
    return (
        f"multiplies {' and '.join(sorted(takes))} here, by a kernel of these dtypes or float32, "
        "and float32 as TF32 alone, on Hopper, if `jax_default_matmul_precision` allows that; it "
        f"is {precision!r}, `x` {task.arrays['x'].dtype} and `kernel` {task.arrays['kernel'].dtype}"
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
    rows, (x, targets) = x.shape[0], _whole_rows(x, targets)

    def head_forward(tile: Tile, targets_ref: Any, at_ref: Any) -> tuple[jax.Array, ...]:
        z, place, counts = _logits(tile, at_ref, loss)
        highest = jnp.where(counts, z, jnp.full_like(z, -jnp.inf)).max(1)
        e = jnp.where(counts, jnp.exp(z - tile.across(highest)), jnp.zeros_like(z))
        is_target = place == tile.across(tile.of_rows(targets_ref))
        of_target = jnp.where(is_target, z, jnp.zeros_like(z)).sum(1)
        sum_z = (
            jnp.where(counts, z, jnp.zeros_like(z)).sum(1)
            if loss.smoothing
            else jnp.zeros_like(of_target)
        )
        return highest, e.sum(1), of_target, sum_z

    def of_chunk(sums: Sums, part: jax.Array, begin: jax.Array) -> Sums:
        beside = targets, _limits(part, first + begin, loss)
        results = [("row", jnp.float32)] * 4
        parts = over_tiles(
            head_forward,
            x,
            padded(part, COLUMNS, x.dtype),
            beside,
            results,
            name="head_forward",
            simulated=simulated,
            rough=loss.cap is None,
        )
        highest = parts[0].max(0)
        total = (parts[1] * scale(parts[0], highest)).sum(0)
        return together(sums, Sums(highest, total, parts[2].sum(0), parts[3].sum(0)))

    zeros = like(x, jnp.zeros(x.shape[0], jnp.float32), kernel, targets)
    sums = over_chunks(of_chunk, Sums(zeros - jnp.inf, zeros, zeros, zeros), kernel, _at_once(x))
    return tuple(one[:rows] for one in sums)


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
    """As the reference's."""
    gradient, of_log_z = of_rows(targets, log_z, gradient, loss)
    arrays = (x, kernel, targets, first, log_z, of_log_z, gradient)
    return jax.custom_batching.sequential_vmap(partial(_gradients, loss, simulated))(*arrays)


def _gradients(
    loss: Loss, simulated: bool, x: Any, kernel: Any, targets: Any, first: Any, *of_row: Any
) -> tuple[jax.Array, jax.Array]:
    (rows, width), (x, *columns) = x.shape, _whole_rows(x, targets, *of_row)

    def head_backward(
        tile: Tile,
        targets_ref: Any,
        log_z_ref: Any,
        of_log_z_ref: Any,
        gradient_ref: Any,
        at_ref: Any,
    ) -> tuple[jax.Array]:
        z, place, counts = _logits(tile, at_ref, loss)
        is_target = place == tile.across(tile.of_rows(targets_ref))
        log_z, of_log_z, gradient = (
            tile.across(tile.of_rows(ref)) for ref in (log_z_ref, of_log_z_ref, gradient_ref)
        )
        of_z = of_logits(z, is_target, log_z, of_log_z, gradient, loss)
        return (jnp.where(counts, of_z, jnp.zeros_like(z)),)

    def of_chunk(gradients: Any, part: jax.Array, begin: jax.Array) -> Any:
        (of_x, of_kernel), whole = gradients, padded(part, COLUMNS, x.dtype)
        beside, results = (*columns, _limits(part, first + begin, loss)), [("tile", x.dtype)]
        (of_z,) = over_tiles(
            head_backward,
            x,
            whole,
            beside,
            results,
            name="head_backward",
            simulated=simulated,
            rough=loss.cap is None,
        )
        of_part = product(of_z, x, 0, 0).astype(kernel.dtype)[: part.shape[0], :width]
        return of_x + product(of_z, whole, 1, 0), lax.dynamic_update_slice_in_dim(
            of_kernel, of_part, begin, 0
        )

    zeros = tuple(
        like(x, one, kernel, columns[0])
        for one in (jnp.zeros(x.shape, jnp.float32), jnp.zeros_like(kernel))
    )
    of_x, of_kernel = over_chunks(of_chunk, zeros, kernel, _at_once(x))
    return of_x[:rows, :width], of_kernel


def _logits(tile: Tile, at_ref: Any, loss: Loss) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Logits, their places in the vocabulary, and which count."""
    local = tile.places(1)
    return capped(tile.z, loss), local + at_ref[0], local < at_ref[1]


def _limits(part: jax.Array, at: jax.Array, loss: Loss) -> jax.Array:
    """Where a chunk begins in the vocabulary, and how many of its rows count."""
    return jnp.stack([at, jnp.minimum(part.shape[0], loss.vocab - at)]).astype(jnp.int32)


def _whole_rows(x: jax.Array, *columns: jax.Array) -> list[jax.Array]:
    """Rows and what lies beside them for whole tiles of two warpgroups."""
    more = -x.shape[0] % (2 * ROWS)
    return [padded(x, 2 * ROWS, x.dtype), *(jnp.pad(one, (0, more)) for one in columns)]


def _at_once(x: jax.Array) -> int:
    return CHUNK_BYTES // (x.dtype.itemsize * x.shape[0])
