"""RMSNorm and LayerNorm on a TPU: whole rows at a time in fast memory, each array read once and
written once.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from shardlib.kernels._choice import Task
from shardlib.kernels._rows import batched, grouped
from shardlib.kernels._tpu import (
    fits,
    interpreted,
    padded,
    parameters,
    rows_at_once,
    shaped,
    supported,
    tile_rows,
)


def refuses(task: Task) -> str | None:
    """Why it cannot do a task, if it cannot."""
    if task.summed:
        return (
            "adds up nothing between devices, and the last dim is split over "
            f"`{', '.join(task.summed)}`"
        )
    x = task.arrays["x"]
    return supported(task) or fits(
        _row_bytes(x.shape[-1], x.dtype), tile_rows(x.dtype), x.shape[-1], task
    )


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
    """As the reference's, of whole rows."""

    def here(depth: int, x: Any, residual: Any, scale: Any, bias: Any) -> tuple[Any, Any]:
        groups, beside = grouped(depth, x, scale, bias)
        groups = groups if any(one is not None and len(one) > 1 for one in beside) else 1
        shape, block, blocks = _blocks(x, groups)
        row, blocks_each = shape[-1], blocks // shape[1]
        of_rows = pl.BlockSpec(
            (None, None, block, row),
            lambda group, at: (group, at // blocks_each, at % blocks_each, 0),
        )
        given = [(one.reshape(shape), of_rows) for one in (x, residual) if one is not None]
        given += [(one[:, None], _of_group(one)) for one in beside if one is not None]
        outs = [shaped(shape, x.dtype, x)] * (1 if residual is None else 2)
        results = pl.pallas_call(
            partial(
                norm_forward, epsilon=epsilon, centred=centred,
                added=residual is not None, scaled=scale is not None, biased=bias is not None,
            ),
            grid=(groups, blocks),
            in_specs=[spec for _, spec in given],
            out_specs=[of_rows for _ in outs],
            out_shape=outs,
            compiler_params=parameters(("parallel", "parallel"), block * _row_bytes(row, x.dtype)),
            interpret=interpreted(simulated, x),
            name="norm_forward",
        )(*(one for one, _ in given))  # fmt: skip
        y, *sums = (one.reshape(x.shape) for one in results)
        return y, sums[0] if sums else x

    return batched(here, "rows", "rows", "beside", "beside")(x, residual, scale, bias)


def backward(
    h: jax.Array,
    scale: jax.Array | None,
    gradient: jax.Array,
    of_h: jax.Array | None,
    *,
    epsilon: float,
    centred: bool,
    biased: bool,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """As the reference's, of whole rows."""

    def here(depth: int, h: Any, scale: Any, gradient: Any, of_h: Any) -> tuple[Any, ...]:
        groups, (scale,) = grouped(depth, h, scale)
        shape, block, blocks = _blocks(h, groups)
        row, blocks_each = shape[-1], blocks // shape[1]
        # Of a chip whose two cores are one device: each sums by itself.
        cores = 2 if blocks % 2 == 0 else 1

        def place(group: Any, core: Any, at: Any) -> tuple[Any, ...]:
            at = core * (blocks // cores) + at
            return group, at // blocks_each, at % blocks_each, 0

        of_block = pl.BlockSpec((None, None, block, row), place)
        of_sums = pl.BlockSpec((None, None, 8, row), lambda group, core, at: (group, core, 0, 0))
        given = [(one.reshape(shape), of_block) for one in (h, gradient, of_h) if one is not None]
        given += [] if scale is None else [(scale[:, None], _of_group(scale))]
        sums = (scale is not None) + biased
        of_x, *of_rows = pl.pallas_call(
            partial(
                norm_backward,
                epsilon=epsilon,
                centred=centred,
                added=of_h is not None,
                scaled=scale is not None,
                biased=biased,
                rows=shape[2],
                block=block,
                blocks=blocks // cores,
            ),
            grid=(groups, cores, blocks // cores),
            in_specs=[spec for _, spec in given],
            out_specs=[of_block, *[of_sums] * sums],
            out_shape=[
                shaped(shape, h.dtype, h),
                *[shaped((groups, cores, 8, row), jnp.float32, h)] * sums,
            ],
            compiler_params=parameters(
                ("parallel", "parallel", "arbitrary"), block * _row_bytes(row, h.dtype)
            ),
            interpret=interpreted(simulated, h),
            name="norm_backward",
        )(*(one for one, _ in given))
        return of_x.reshape(h.shape), *(
            one.sum((1, 2)).reshape(*h.shape[:depth], row) for one in of_rows
        )

    of_x, *of_rows = batched(here, "rows", "beside", "rows", "rows")(h, scale, gradient, of_h)
    return of_x, of_rows.pop(0) if scale is not None else None, of_rows.pop() if biased else None


def _blocks(x: jax.Array, groups: int) -> tuple[tuple[int, int, int, int], int, int]:
    """How rows are seen, `(groups, _, rows, row)`, how many make a block, and how many blocks a
    group has.
    """
    row = x.shape[-1]
    count = x.size // row // groups
    rows = x.shape[-2] if padded(x) else count
    block = rows_at_once(rows, _row_bytes(row, x.dtype), tile_rows(x.dtype))
    return (groups, count // rows, rows, row), block, count // rows * math.ceil(rows / block)


def _of_group(one: jax.Array) -> pl.BlockSpec:
    """The row that belongs to a group, or to all."""
    return pl.BlockSpec(
        (None, 1, one.shape[-1]), lambda group, *_: (group if len(one) > 1 else 0, 0, 0)
    )


def norm_forward(
    *refs: Any, epsilon: float, centred: bool, added: bool, scaled: bool, biased: bool
) -> None:
    """One block of rows."""
    given = iter(refs)
    h = next(given)[...]
    if added:
        h = (h.astype(jnp.float32) + next(given)[...].astype(jnp.float32)).astype(h.dtype)
    y, _ = _unit(h, epsilon, centred)
    y = y * next(given)[...].astype(jnp.float32) if scaled else y
    y = y + next(given)[...].astype(jnp.float32) if biased else y
    y_ref = next(given)
    y_ref[...] = y.astype(y_ref.dtype)
    if added:
        next(given)[...] = h


def norm_backward(
    *refs: Any,
    epsilon: float,
    centred: bool,
    added: bool,
    scaled: bool,
    biased: bool,
    rows: int,
    block: int,
    blocks: int,
) -> None:
    """One block of rows; sums over rows stay in fast memory from block to block."""
    arrays = iter(refs)
    h, gradient = next(arrays)[...], next(arrays)[...].astype(jnp.float32)
    of_h = next(arrays)[...].astype(jnp.float32) if added else 0.0
    unit, inverse = _unit(h, epsilon, centred)
    of_unit = gradient * next(arrays)[...].astype(jnp.float32) if scaled else gradient
    of_x = of_unit - unit * (of_unit * unit).mean(-1, keepdims=True)
    if centred:
        of_x -= of_unit.mean(-1, keepdims=True)
    x_ref = next(arrays)
    x_ref[...] = (of_x * inverse + of_h).astype(x_ref.dtype)
    sums = [*([gradient * unit] if scaled else []), *([gradient] if biased else [])]
    pairs = list(zip(arrays, sums, strict=True))

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        for ref, _ in pairs:
            ref[...] = jnp.zeros_like(ref)

    begin = (pl.program_id(1) * blocks + pl.program_id(2)) % math.ceil(rows / block) * block
    # Rows beyond the last are whatever was there.
    there = lax.broadcasted_iota(jnp.int32, h.shape, 0) + begin < rows

    for ref, x in pairs:
        ref[...] += jnp.where(there, x, 0).reshape(-1, 8, h.shape[-1]).sum(0)


def _unit(h: jax.Array, epsilon: float, centred: bool) -> tuple[jax.Array, jax.Array]:
    z = h.astype(jnp.float32)
    if centred:
        z -= z.mean(-1, keepdims=True)
    inverse = lax.rsqrt(jnp.square(z).mean(-1, keepdims=True) + epsilon)
    return z * inverse, inverse


def _row_bytes(row: int, dtype: Any) -> int:
    """Of four blocks, each there twice so that one is on its way, and of what is computed of
    them.
    """
    return row * (2 * 4 * jnp.dtype(dtype).itemsize + 5 * 4)
