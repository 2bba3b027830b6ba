"""RMSNorm and LayerNorm on a GPU: a row in the registers of a warpgroup, each array read once and written once."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels import _gpu
from shardlib.kernels._choice import Task
from shardlib.kernels._gpu import Cut, once, store
from shardlib.kernels._rows import batched, grouped

WARPGROUPS = 4 * 132  # that sum gradients over rows, each its own: enough to keep any GPU's memory busy


def refuses(task: Task) -> str | None:
    """Why it cannot do a task, if it cannot."""
    if task.summed:
        return f"adds up nothing between devices, and the last dim is split over `{', '.join(task.summed)}`"
    x = task.arrays["x"]
    return _gpu.refuses_rows(task, x.shape[-1], jnp.float32)


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
        row = x.shape[-1]
        count = x.size // row
        of_group = [len(one) > 1 for one in beside if one is not None]
        of_rows = [one.reshape(count, row) for one in (x, residual) if one is not None]
        of_all = [one for one in beside if one is not None]
        cut = _gpu.cut(row, *(one.dtype for one in (*of_rows, *of_all)))

        def read(ref: Any, index: Any) -> list[jax.Array]:
            return [_gpu.load(ref, index, piece, cut.vector, simulated).astype(jnp.float32) for piece in cut.pieces]

        def norm_forward(indices: list[jax.Array], *refs: Any) -> None:
            inputs, outs = refs[: len(of_rows) + len(of_all)], refs[len(of_rows) + len(of_all) :]
            loaded = [[read(ref, index) for ref in inputs[: len(of_rows)]] for index in indices]
            same = [
                None if apart else read(ref, 0) for ref, apart in zip(inputs[len(of_rows) :], of_group, strict=True)
            ]
            for index, parts in zip(indices, loaded, strict=True):
                h = parts[0]
                if residual is not None:
                    h = [(a + b).astype(x.dtype).astype(jnp.float32) for a, b in zip(*parts, strict=True)]
                unit, _ = _unit(h, cut, row, epsilon, centred, simulated)
                shared = [
                    read(ref, index // (count // groups)) if all_ is None else all_
                    for ref, all_ in zip(inputs[len(of_rows) :], same, strict=True)
                ]
                for k, piece in enumerate(cut.pieces):
                    y, given = unit[k], iter(shared)
                    y = y * next(given)[k] if scale is not None else y
                    y = y + next(given)[k] if bias is not None else y
                    store(outs[0], index, piece, y)
                    if residual is not None:
                        store(outs[1], index, piece, h[k])

        outs = [jax.ShapeDtypeStruct((count, row), x.dtype)] * len(of_rows)
        results = _gpu.over_rows(norm_forward, count, row, outs, simulated)(*of_rows, *of_all)
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
    """As the reference's, of whole rows; each warpgroup adds up the gradients of what rows share in its shared memory."""

    def here(depth: int, h: Any, scale: Any, gradient: Any, of_h: Any) -> tuple[Any, ...]:
        groups, (scale,) = grouped(depth, h, scale)
        row = h.shape[-1]
        count = h.size // row // groups
        of_rows = [one.reshape(groups * count, row) for one in (h, gradient, of_h) if one is not None]
        given = [*of_rows, *([] if scale is None else [scale])]
        kinds = (scale is not None) + biased
        cut, blocks = _gpu.cut(row, *(one.dtype for one in given)), _share(count)

        def read(ref: Any, index: Any) -> list[jax.Array]:
            return [_gpu.load(ref, index, piece, cut.vector, simulated).astype(jnp.float32) for piece in cut.pieces]

        def norm_backward(*refs: Any) -> None:
            inputs, (x_ref, *sum_refs) = refs[: len(given)], refs[len(given) : len(given) + 1 + kinds]
            scratch = refs[-1]
            group, block = lax.axis_index("group"), lax.axis_index("block")
            for which in range(kinds):
                for piece in cut.pieces:
                    store(scratch, which, piece, _gpu.full(piece, cut.vector, 0.0, simulated))

            def of_row(k: jax.Array, _: None) -> None:
                at = block + k * blocks
                index = group * count + jnp.minimum(at, count - 1)
                parts = [read(ref, index) for ref in inputs[: len(of_rows)]]
                scales = None if scale is None else read(inputs[-1], group if len(scale) > 1 else 0)
                unit, inverse = _unit(parts[0], cut, row, epsilon, centred, simulated)
                g = parts[1]
                of_unit = g if scales is None else [a * b for a, b in zip(g, scales, strict=True)]
                mean = _mean([a * b for a, b in zip(of_unit, unit, strict=True)], cut, row, simulated)
                of_x = [a - b * mean for a, b in zip(of_unit, unit, strict=True)]
                if centred:
                    middle = _mean(of_unit, cut, row, simulated)
                    of_x = [a - middle for a in of_x]
                counts = jnp.where(at < count, 1.0, 0.0)  # the last rows may be done twice, and count once
                for n, piece in enumerate(cut.pieces):
                    part = of_x[n] * inverse
                    store(x_ref, index, piece, part if of_h is None else part + parts[2][n])
                    sums: list[Any] = [*([g[n] * unit[n]] if scale is not None else []), *([g[n]] if biased else [])]
                    for which, one in enumerate(sums):
                        before = _gpu.load(scratch, which, piece, cut.vector, simulated)
                        new = once(one, piece, cut.vector, simulated) * counts
                        store(scratch, which, piece, before + new)

            lax.fori_loop(0, -(-count // blocks), of_row, None)
            for which, ref in enumerate(sum_refs):
                for piece in cut.pieces:
                    store(ref, group * blocks + block, piece, _gpu.load(scratch, which, piece, cut.vector, simulated))

        sums = jax.ShapeDtypeStruct((groups * blocks, row), jnp.float32)
        of_x, *of_sums = _gpu.call(
            norm_backward, "norm_backward", [jax.ShapeDtypeStruct((groups * count, row), h.dtype), *[sums] * kinds], simulated,
            scratch_types=[plgpu.SMEM((kinds, row), jnp.float32)] if kinds else [],
            grid=(groups, blocks), grid_names=("group", "block"),
        )(*given)  # fmt: skip
        summed = (one.reshape(groups, blocks, row).sum(1).reshape(*h.shape[:depth], row) for one in of_sums)
        return of_x.reshape(h.shape), *summed

    of_x, *of_rows = batched(here, "rows", "beside", "rows", "rows")(h, scale, gradient, of_h)
    return of_x, of_rows.pop(0) if scale is not None else None, of_rows.pop() if biased else None


def _share(count: int) -> int:
    """How many warpgroups share so many rows, each about as many as the others."""
    turns = -(-count // WARPGROUPS)
    return -(-count // turns)


def _unit(
    h: list[jax.Array], cut: Cut, row: int, epsilon: float, centred: bool, simulated: bool
) -> tuple[list[jax.Array], jax.Array]:
    if centred:
        mean = _mean(h, cut, row, simulated)
        h = [part - mean for part in h]
    inverse = lax.rsqrt(_mean([part * part for part in h], cut, row, simulated) + epsilon)
    return [part * inverse for part in h], inverse


def _mean(parts: list[jax.Array], cut: Cut, row: int, simulated: bool) -> jax.Array:
    counted = [once(part, piece, cut.vector, simulated) for part, piece in zip(parts, cut.pieces, strict=True)]
    return _gpu.total(counted) * (1 / row)
