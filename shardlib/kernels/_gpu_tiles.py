"""Products of matrices on GPUs whose results no memory sees: each tile of one goes to a function as
it leaves the matrix unit.

On Hopper two warpgroups have a tile of their own each, in registers (`wgmma`), and a third copies
what they multiply; on Blackwell one copies, one multiplies into tensor memory (`tcgen05`), and one
takes the tile from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels._choice import device_here
from shardlib.kernels._gpu import INDEX, call, generation

ROWS = COLUMNS = 128  # of a tile
SWIZZLE = 128  # bytes of a row of what is multiplied at once
TOGETHER = 8  # tiles side by side in a turn, whose operands the cache keeps
SHARED = 227 * 2**10 - 2**11  # bytes of shared memory, and some for barriers
MOST_STAGES = 6

Result: TypeAlias = tuple[str, Any]  # "row" or "tile", and a dtype


@dataclass(frozen=True)
class Tile:
    """Some rows and columns of a product, in float32."""

    z: jax.Array
    index: tuple[jax.Array, jax.Array]  # which tile, along both
    layout: Any  # in registers; None where a simulator runs, which knows none

    def places(self, dim: int) -> jax.Array:
        """The places of its numbers in the product along a dim."""
        shape, first = self.z.shape, self.index[dim] * (ROWS, COLUMNS)[dim]
        if self.layout is None:
            return lax.broadcasted_iota(jnp.int32, shape, dim) + first
        return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=self.layout) + first

    def of_rows(self, ref: Any) -> jax.Array:
        """What an array has for each row."""
        part = ref.at[pl.ds(self.index[0] * ROWS, ROWS)]
        if self.layout is None:
            return part[...]
        return plgpu.load(part, *INDEX, layout=self.layout.reduce(1), optimized=False)

    def across(self, x: jax.Array) -> jax.Array:
        """What each row has, in all its columns."""
        return lax.broadcast_in_dim(x, self.z.shape, [0])


Epilogue: TypeAlias = Callable[..., Sequence[jax.Array]]  # (tile, *references to what is beside)


def over_tiles(
    epilogue: Epilogue,
    a: jax.Array,
    b: jax.Array,
    beside: Sequence[jax.Array],
    results: Sequence[Result],
    *,
    name: str,
    simulated: bool,
    rough: bool,
) -> list[jax.Array]:
    """Call a function for each tile of `a @ b.T` with what lies beside; what it gives is written.

    A `"row"` result is a number for each row of each tile, `(tiles side by side, rows)`; a `"tile"`
    is as large as the product. What is `rough`, see `call`. Rows of both are whole tiles, and their
    widths whole steps: see `padded`.
    """
    (rows, width), columns = a.shape, b.shape[0]
    assert rows % (2 * ROWS) == columns % COLUMNS == width % step(a.dtype) == 0, (a.shape, b.shape)
    shapes = {"row": (columns // COLUMNS, rows), "tile": (rows, columns)}
    outs = [jax.ShapeDtypeStruct(shapes[kind], dtype) for kind, dtype in results]
    make = {"hopper": _hopper, "blackwell": _blackwell}[generation(device_here().kind)]
    body, options = make(epilogue, results, (rows, columns, width), a.dtype, simulated)
    return call(
        body, name, outs, simulated, rough, grid_names=("tile",), thread_name="group", **options
    )(a, b, *beside)


def step(dtype: Any) -> int:
    """How many numbers of a row are multiplied at once."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def padded(x: jax.Array, rows: int, dtype: Any) -> jax.Array:
    """A matrix with zeros for whole tiles and steps."""
    more = [(0, -x.shape[0] % rows), (0, -x.shape[1] % step(dtype))]
    return jnp.pad(x, more).astype(dtype) if any(size for _, size in more) else x.astype(dtype)


def _transforms(dtype: Any) -> tuple[Any, ...]:
    return plgpu.TilingTransform((8, step(dtype))), plgpu.SwizzleTransform(SWIZZLE)


def _staging(results: Sequence[Result], groups: int) -> list[Any]:
    """Shared memory from which results are copied: of a row's whole, of a tile's some columns at a
    time.
    """
    return [
        plgpu.SMEM((groups, ROWS), dtype)
        if kind == "row"
        else plgpu.SMEM((groups, ROWS, step(dtype)), dtype, transforms=_transforms(dtype))
        for kind, dtype in results
    ]


def _stages(results: Sequence[Result], groups: int, stage: int, steps: int) -> int:
    """How many steps may be on their way at once."""
    staged = sum(
        groups * ROWS * (jnp.dtype(dtype).itemsize if kind == "row" else SWIZZLE)
        for kind, dtype in results
    )
    return min((SHARED - staged) // stage, MOST_STAGES, steps)


def _write(
    given: Sequence[jax.Array],
    results: Sequence[Result],
    tile: Tile,
    staging: Sequence[Any],
    outs: Any,
) -> None:
    """Copy what a tile gave to its places, through shared memory."""
    row, column = tile.index
    for x, (kind, dtype), stage, out in zip(given, results, staging, outs, strict=True):
        rows = pl.ds(row * ROWS, ROWS)
        if kind == "row":
            stage[...] = x.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, out.at[column, rows])
            continue
        some, x = step(dtype), x.astype(dtype)
        for begin in range(0, COLUMNS, some):
            if begin:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            stage[...] = x[:, begin : begin + some]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stage, out.at[rows, pl.ds(column * COLUMNS + begin, some)])
    plgpu.wait_smem_to_gmem(0)


def _registers(simulated: bool, count: int) -> None:
    """Give this warpgroup's threads so many registers: who copies needs few, who computes all that
    others leave.
    """
    if not simulated:
        plgpu.set_max_registers(count, action="decrease" if count < 128 else "increase")


def _bring(
    operands: Sequence[Any], staging: Sequence[Any], there: Any, free: Any, steps: int, stages: int
) -> None:
    """Copy what is multiplied to shared memory step by step, as far ahead as stages are free."""

    @pl.loop(0, steps)
    def _(k: jax.Array) -> None:
        slot = lax.rem(k, stages)
        pl.when(k >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        for operand, stage in zip(operands, staging, strict=True):
            some = stage.shape[-1]
            plgpu.copy_gmem_to_smem(
                operand.at[:, pl.ds(k * some, some)], stage.at[slot], there.at[slot]
            )


def _place(rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """Which tile a program has: neighbours in time share operands."""
    return plgpu.planar_snake(lax.axis_index("tile"), (rows, columns), 0, TOGETHER)


def _hopper(
    epilogue: Epilogue,
    results: Sequence[Result],
    size: tuple[int, int, int],
    dtype: Any,
    simulated: bool,
) -> tuple[Any, dict[str, Any]]:
    rows, columns, width = size
    some, layout = step(dtype), None if simulated else plgpu.Layout.WGMMA
    steps = width // some
    stages = _stages(results, 2, (2 * ROWS + COLUMNS) * SWIZZLE, steps)

    def kernel(
        a: Any, b: Any, *rest: Any, a_smem: Any, b_smem: Any, there: Any, free: Any, staging: Any
    ) -> None:
        beside, out_refs = rest[: -len(results)], rest[-len(results) :]
        group, registers = lax.axis_index("group"), partial(_registers, simulated)
        row, column = _place(rows // (2 * ROWS), columns // COLUMNS)

        @pl.when(group == 2)
        def _() -> None:
            registers(40)
            mine = a.at[pl.ds(row * 2 * ROWS, 2 * ROWS)], b.at[pl.ds(column * COLUMNS, COLUMNS)]
            _bring(mine, (a_smem, b_smem), there, free, steps, stages)

        @pl.when(group < 2)
        def _() -> None:
            registers(232)

            def multiply(total: Any) -> jax.Array:
                @pl.loop(0, steps)
                def _(k: jax.Array) -> None:
                    slot = lax.rem(k, stages)
                    plgpu.barrier_wait(there.at[slot])
                    mine = a_smem.at[slot, pl.ds(group * ROWS, ROWS)]
                    plgpu.wgmma(total, mine, b_smem.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(1)  # the step before is done
                    pl.when(k > 0)(
                        lambda: plgpu.barrier_arrive(free.at[lax.rem(k + stages - 1, stages)])
                    )

                return total[...]

            z = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32))
            tile = Tile(z, (row * 2 + group, column), layout)
            _write(
                epilogue(tile, *beside),
                results,
                tile,
                [stage.at[group] for stage in staging],
                out_refs,
            )

    return kernel, {
        "grid": (rows // (2 * ROWS) * (columns // COLUMNS),),
        "num_threads": 3,
        "scratch_types": {
            "a_smem": plgpu.SMEM((stages, 2 * ROWS, some), dtype, transforms=_transforms(dtype)),
            "b_smem": plgpu.SMEM((stages, COLUMNS, some), dtype, transforms=_transforms(dtype)),
            "there": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "staging": _staging(results, 2),
        },
    }


def _blackwell(
    epilogue: Epilogue,
    results: Sequence[Result],
    size: tuple[int, int, int],
    dtype: Any,
    simulated: bool,
) -> tuple[Any, dict[str, Any]]:
    rows, columns, width = size
    some, layout = step(dtype), None if simulated else plgpu.Layout.TCGEN05
    steps = width // some
    stages = _stages(results, 1, (ROWS + COLUMNS) * SWIZZLE, steps)

    def kernel(
        a: Any,
        b: Any,
        *rest: Any,
        a_smem: Any,
        b_smem: Any,
        total: Any,
        there: Any,
        free: Any,
        done: Any,
        staging: Any,
    ) -> None:
        beside, out_refs = rest[: -len(results)], rest[-len(results) :]
        group, registers = lax.axis_index("group"), partial(_registers, simulated)
        row, column = _place(rows // ROWS, columns // COLUMNS)

        @pl.when(group == 0)
        def _() -> None:
            registers(40)
            mine = a.at[pl.ds(row * ROWS, ROWS)], b.at[pl.ds(column * COLUMNS, COLUMNS)]
            _bring(mine, (a_smem, b_smem), there, free, steps, stages)

        @pl.when(group == 1)
        def _() -> None:
            registers(40)

            @pl.loop(0, steps)
            def _(k: jax.Array) -> None:
                slot = lax.rem(k, stages)
                plgpu.barrier_wait(there.at[slot])
                operands = a_smem.at[slot], b_smem.at[slot].transpose((1, 0))
                plgpu.tcgen05_mma(total, *operands, free.at[slot], accumulate=k > 0)
                pl.when(k == steps - 1)(lambda: plgpu.tcgen05_commit_arrive(done))

        @pl.when(group == 2)
        def _() -> None:
            registers(232)
            plgpu.barrier_wait(done)
            tile = Tile(
                plgpu.async_load_tmem(total, **({"layout": layout} if layout else {})),
                (row, column),
                layout,
            )
            _write(
                epilogue(tile, *beside), results, tile, [stage.at[0] for stage in staging], out_refs
            )

    return kernel, {
        "grid": (rows // ROWS * (columns // COLUMNS),),
        "num_threads": 3,
        "scratch_types": {
            "a_smem": plgpu.SMEM((stages, ROWS, some), dtype, transforms=_transforms(dtype)),
            "b_smem": plgpu.SMEM((stages, COLUMNS, some), dtype, transforms=_transforms(dtype)),
            "total": plgpu.TMEM((ROWS, COLUMNS), jnp.float32),
            "there": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "free": plgpu.Barrier(num_arrivals=1, num_barriers=stages, orders_tensor_core=True),
            "done": plgpu.Barrier(num_arrivals=1, orders_tensor_core=True),
            "staging": _staging(results, 1),
        },
    }
