"""Products of matrices on GPUs whose results are used tile by tile and never written as a whole.

Each 128 x 128 tile of `a @ b.T` goes to a function, the epilogue, as it leaves the matrix unit. The
warpgroups of a program share the work:

    Hopper                                       Blackwell
    group 2:  memory -> shared memory            group 0:  memory -> shared memory
    group 0:  wgmma -> its tile, epilogue        group 1:  tcgen05 -> tensor memory
    group 1:  wgmma -> its tile, epilogue        group 2:  tensor memory -> registers, epilogue

On Hopper a tile is accumulated in registers (`wgmma`), and two warpgroups have a tile each, of the
same columns. On Blackwell it is accumulated in tensor memory (`tcgen05`).

Operands come step by step, 128 bytes of each row at a time, into a ring of `stages` buffers. See
`_gpu_ring`.
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
from shardlib.kernels._gpu_ring import FEW_REGISTERS, MANY_REGISTERS, Ring, set_registers

ROWS = COLUMNS = 128  # of a tile
SWIZZLE = 128  # bytes of a row that are multiplied in a step
SNAKE_WIDTH = 8  # tiles above each other that are computed at the same time; see `_tile_index`
SHARED_BYTES = 227 * 2**10 - 2**11  # of shared memory, less some for barriers
MOST_STAGES = 6

Result: TypeAlias = tuple[str, Any]  # "row" or "tile", and a dtype


@dataclass(frozen=True)
class ProductKernel:
    """What a kernel is called, and how it is run."""

    name: str
    simulated: bool  # by an interpreter
    approx_math: bool  # see `call`


@dataclass(frozen=True)
class Tile:
    """Some rows and columns of a product, in float32, as an epilogue is given them.

    Its methods load and lay out what belongs to the tile's rows.
    """

    z: jax.Array
    index: tuple[jax.Array, jax.Array]  # which tile, along rows and along columns
    layout: Any  # in registers; None where an interpreter runs, which has no layouts

    def positions(self, dim: int) -> jax.Array:
        """The row (dim 0) or column (dim 1) that each number has in the whole product."""
        shape, first = self.z.shape, self.index[dim] * (ROWS, COLUMNS)[dim]
        if self.layout is None:
            return lax.broadcasted_iota(jnp.int32, shape, dim) + first
        return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=self.layout) + first

    def row_values(self, ref: Any) -> jax.Array:
        """The tile's part of an array that has one number for each row of the product."""
        part = ref.at[pl.ds(self.index[0] * ROWS, ROWS)]
        if self.layout is None:
            return part[...]
        return plgpu.load(part, *INDEX, layout=self.layout.reduce(1), optimized=False)

    def across(self, x: jax.Array) -> jax.Array:
        """Repeat a number for each row over the tile's columns."""
        return lax.broadcast_in_dim(x, self.z.shape, [0])


# Called as `(tile, *references to the other inputs)`; returns an array for each result.
Epilogue: TypeAlias = Callable[..., Sequence[jax.Array]]


@dataclass(frozen=True)
class _Product:
    """A product and its epilogue: all that a generation's program depends on."""

    epilogue: Epilogue
    results: Sequence[Result]
    rows: int
    columns: int
    width: int
    dtype: Any  # of both operands
    simulated: bool

    @property
    def steps(self) -> int:
        """How many steps the product of a tile takes."""
        return self.width // step(self.dtype)

    def split(self, refs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Split references into those to inputs other than the operands, and those to results."""
        return refs[: -len(self.results)], refs[-len(self.results) :]

    def finish(self, tile: Tile, refs: Sequence[Any], staging: Sequence[Any]) -> None:
        """Call the epilogue for a tile and write what it returns.

        `refs` are to the inputs other than the operands, and to the results.
        """
        input_refs, result_refs = self.split(refs)
        _write(self.epilogue(tile, *input_refs), self.results, tile, staging, result_refs)


@dataclass(frozen=True)
class _Program:
    """The body of a kernel, and the options that it is called with."""

    body: Any
    options: dict[str, Any]


def over_tiles(
    epilogue: Epilogue,
    a: jax.Array,
    b: jax.Array,
    inputs: Sequence[jax.Array],
    results: Sequence[Result],
    kernel: ProductKernel,
) -> list[jax.Array]:
    """Call a function for each tile of `a @ b.T`, and return what it makes of the tiles.

    Args:
        epilogue: called as `(tile, *references)`; it returns an array for each result.
        a: (rows, width). Its rows are a multiple of two tiles, and its width one of a step: see
            `padded`.
        b: (columns, width). Its rows are a multiple of a tile.
        inputs: arrays to which the epilogue is given references.
        results: a `"row"` result has a number for each row of each tile, `(tiles side by side,
            rows)`; a `"tile"` result has the shape of the product.
        kernel: its name, and how it is run.
    """
    (rows, width), columns = a.shape, b.shape[0]
    assert rows % (2 * ROWS) == columns % COLUMNS == width % step(a.dtype) == 0, (a.shape, b.shape)
    shapes = {"row": (columns // COLUMNS, rows), "tile": (rows, columns)}
    outs = [jax.ShapeDtypeStruct(shapes[kind], dtype) for kind, dtype in results]
    product = _Product(epilogue, results, rows, columns, width, a.dtype, kernel.simulated)
    make_program = {"hopper": _hopper, "blackwell": _blackwell}[generation(device_here().kind)]
    program = make_program(product)
    run = call(
        program.body,
        kernel.name,
        outs,
        kernel.simulated,
        kernel.approx_math,
        grid_names=("tile",),
        thread_name="group",
        **program.options,
    )
    return run(a, b, *inputs)


def step(dtype: Any) -> int:
    """How many numbers of a row are multiplied in a step."""
    return SWIZZLE // jnp.dtype(dtype).itemsize


def padded(x: jax.Array, rows: int, dtype: Any) -> jax.Array:
    """A matrix in a dtype, padded with zeros to a multiple of `rows` and to whole steps."""
    missing_rows, missing_width = -x.shape[0] % rows, -x.shape[1] % step(dtype)
    # A pad of nothing would still be an operation in the program.
    if missing_rows or missing_width:
        x = jnp.pad(x, [(0, missing_rows), (0, missing_width)])
    return x.astype(dtype)


def _transforms(dtype: Any) -> tuple[Any, ...]:
    """The layout of shared memory that the matrix unit and the copies agree on."""
    return plgpu.TilingTransform((8, step(dtype))), plgpu.SwizzleTransform(SWIZZLE)


def _staging(results: Sequence[Result], groups: int) -> list[Any]:
    """Shared memory from which results are copied to memory, for `groups` warpgroups.

    A `"row"` result is staged as a whole, and a `"tile"` some columns at a time.
    """
    buffers = []
    for kind, dtype in results:
        if kind == "row":
            buffers.append(plgpu.SMEM((groups, ROWS), dtype))
        else:
            shape = (groups, ROWS, step(dtype))
            buffers.append(plgpu.SMEM(shape, dtype, transforms=_transforms(dtype)))
    return buffers


def _count_stages(results: Sequence[Result], groups: int, stage_bytes: int, steps: int) -> int:
    """How many steps the ring has buffers for, in the shared memory that staging leaves."""
    staged = 0
    for kind, dtype in results:
        row_bytes = jnp.dtype(dtype).itemsize if kind == "row" else SWIZZLE
        staged += groups * ROWS * row_bytes
    return min((SHARED_BYTES - staged) // stage_bytes, MOST_STAGES, steps)


def _write(
    arrays: Sequence[jax.Array],
    results: Sequence[Result],
    tile: Tile,
    staging: Sequence[Any],
    outs: Any,
) -> None:
    """Copy what the epilogue returned for a tile to the results, through shared memory.

    Args:
        arrays: what it returned.
        results: the kind and dtype of each.
        tile: the tile.
        staging: shared memory for each.
        outs: the references to which they are copied.
    """
    row, column = tile.index
    for x, (kind, dtype), buffer, out in zip(arrays, results, staging, outs, strict=True):
        rows = pl.ds(row * ROWS, ROWS)
        if kind == "row":
            buffer[...] = x.astype(dtype)
            # What is in registers must reach shared memory before the copy starts.
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer, out.at[column, rows])
            continue
        width, x = step(dtype), x.astype(dtype)
        for begin in range(0, COLUMNS, width):
            if begin:
                # The copy of the columns before must have read the buffer.
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            buffer[...] = x[:, begin : begin + width]
            plgpu.commit_smem()
            columns = pl.ds(column * COLUMNS + begin, width)
            plgpu.copy_smem_to_gmem(buffer, out.at[rows, columns])
    plgpu.wait_smem_to_gmem(0)


def _columns_of_step(operands: Sequence[Any], dtype: Any, k: jax.Array) -> list[Any]:
    """The columns of each operand that a step multiplies."""
    width = step(dtype)
    return [operand.at[:, pl.ds(k * width, width)] for operand in operands]


def _tile_index(rows: int, columns: int) -> tuple[jax.Array, jax.Array]:
    """The index of a program's tile, such that programs that run at the same time share operands.

    Programs go down `SNAKE_WIDTH` tiles of a column, and on to the next column. At the end of
    these rows they come back over the rows below. So the cache has most of what a program reads.
    """
    return plgpu.planar_snake(lax.axis_index("tile"), (rows, columns), 0, SNAKE_WIDTH)


def _operand_buffers(product: _Product, stages: int, a_rows: int) -> dict[str, Any]:
    """Shared memory for the operands of a program, which has `a_rows` rows of the first."""
    dtype, width = product.dtype, step(product.dtype)
    transforms = _transforms(dtype)
    return {
        "a_smem": plgpu.SMEM((stages, a_rows, width), dtype, transforms=transforms),
        "b_smem": plgpu.SMEM((stages, COLUMNS, width), dtype, transforms=transforms),
    }


def _hopper(product: _Product) -> _Program:
    """The program for Hopper: two warpgroups multiply, each a tile, and a third one copies.

    The two tiles are above each other and share the rows of `b`, so a program has `2 * ROWS` rows
    of `a`.
    """
    layout = None if product.simulated else plgpu.Layout.WGMMA
    steps, a_rows = product.steps, 2 * ROWS
    stages = _count_stages(product.results, 2, (a_rows + COLUMNS) * SWIZZLE, steps)
    grid = (product.rows // a_rows, product.columns // COLUMNS)

    def kernel(a: Any, b: Any, *refs: Any, **shared: Any) -> None:
        ring = Ring(
            (shared["a_smem"], shared["b_smem"]), shared["step_ready"], shared["free"], stages
        )
        group = lax.axis_index("group")
        row, column = _tile_index(*grid)

        @pl.when(group == 2)
        def _() -> None:
            set_registers(product.simulated, FEW_REGISTERS)
            a_part = a.at[pl.ds(row * a_rows, a_rows)]
            b_part = b.at[pl.ds(column * COLUMNS, COLUMNS)]
            ring.copy_in(steps, partial(_columns_of_step, (a_part, b_part), product.dtype))

        @pl.when(group < 2)
        def _() -> None:
            set_registers(product.simulated, MANY_REGISTERS)
            z = pl.run_scoped(
                lambda total: _multiply_on_hopper(total, group, ring, steps),
                plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32),
            )
            tile = Tile(z, (row * 2 + group, column), layout)
            product.finish(tile, refs, [buffer.at[group] for buffer in shared["staging"]])

    # Scratch is allocated in the alphabetical order of these names.
    scratch = {
        **_operand_buffers(product, stages, a_rows),
        "step_ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "staging": _staging(product.results, 2),
    }
    options = {"grid": (grid[0] * grid[1],), "num_threads": 3, "scratch_types": scratch}
    return _Program(kernel, options)


def _multiply_on_hopper(total: Any, group: jax.Array, ring: Ring, steps: int) -> jax.Array:
    """The product of a warpgroup's tile, accumulated in registers.

    The next step is issued while the matrix unit works on one, so a step's buffer is freed only
    after the next step is issued. The last step's need not be: nothing more is copied.
    """
    a_smem, b_smem = ring.buffers
    stages = ring.stages

    @pl.loop(0, steps)
    def _(k: jax.Array) -> None:
        slot = ring.slot(k)
        plgpu.barrier_wait(ring.ready.at[slot])
        a_part = a_smem.at[slot, pl.ds(group * ROWS, ROWS)]
        plgpu.wgmma(total, a_part, b_smem.at[slot].transpose((1, 0)))
        plgpu.wgmma_wait(1)  # the step before is done
        # The buffer of the step before may be filled again.
        pl.when(k > 0)(lambda: plgpu.barrier_arrive(ring.free.at[lax.rem(k + stages - 1, stages)]))

    return total[...]


def _blackwell(product: _Product) -> _Program:
    """The program for Blackwell: one warpgroup copies, one multiplies, one runs the epilogue.

    The last one waits at the barrier `done` until the whole tile is in tensor memory.
    """
    layout = None if product.simulated else plgpu.Layout.TCGEN05
    steps = product.steps
    stages = _count_stages(product.results, 1, (ROWS + COLUMNS) * SWIZZLE, steps)
    grid = (product.rows // ROWS, product.columns // COLUMNS)

    def kernel(a: Any, b: Any, *refs: Any, **shared: Any) -> None:
        ring = Ring(
            (shared["a_smem"], shared["b_smem"]), shared["step_ready"], shared["free"], stages
        )
        total, done = shared["total"], shared["done"]
        group = lax.axis_index("group")
        row, column = _tile_index(*grid)

        @pl.when(group == 0)
        def _() -> None:
            set_registers(product.simulated, FEW_REGISTERS)
            a_part = a.at[pl.ds(row * ROWS, ROWS)]
            b_part = b.at[pl.ds(column * COLUMNS, COLUMNS)]
            ring.copy_in(steps, partial(_columns_of_step, (a_part, b_part), product.dtype))

        @pl.when(group == 1)
        def _() -> None:
            set_registers(product.simulated, FEW_REGISTERS)
            _multiply_on_blackwell(total, done, ring, steps)

        @pl.when(group == 2)
        def _() -> None:
            set_registers(product.simulated, MANY_REGISTERS)
            plgpu.barrier_wait(done)
            z = plgpu.async_load_tmem(total, **_layout_option(layout))
            tile = Tile(z, (row, column), layout)
            product.finish(tile, refs, [buffer.at[0] for buffer in shared["staging"]])

    # Scratch is allocated in the alphabetical order of these names.
    scratch = {
        **_operand_buffers(product, stages, ROWS),
        "total": plgpu.TMEM((ROWS, COLUMNS), jnp.float32),
        # The matrix unit itself arrives at `free` and `done`: when it has read, and has written.
        "step_ready": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=1, num_barriers=stages, orders_tensor_core=True),
        "done": plgpu.Barrier(num_arrivals=1, orders_tensor_core=True),
        "staging": _staging(product.results, 1),
    }
    options = {"grid": (grid[0] * grid[1],), "num_threads": 3, "scratch_types": scratch}
    return _Program(kernel, options)


def _multiply_on_blackwell(total: Any, done: Any, ring: Ring, steps: int) -> None:
    """Accumulate the product of a tile in tensor memory, and arrive at `done`.

    The matrix unit itself arrives at the barrier `free` of each step, and at `done` after the last.
    """
    a_smem, b_smem = ring.buffers

    @pl.loop(0, steps)
    def _(k: jax.Array) -> None:
        slot = ring.slot(k)
        plgpu.barrier_wait(ring.ready.at[slot])
        operands = a_smem.at[slot], b_smem.at[slot].transpose((1, 0))
        plgpu.tcgen05_mma(total, *operands, ring.free.at[slot], accumulate=k > 0)
        pl.when(k == steps - 1)(lambda: plgpu.tcgen05_commit_arrive(done))


def _layout_option(layout: Any) -> dict[str, Any]:
    """The layout as a keyword argument; no argument for an interpreter, which has no layouts."""
    return {} if layout is None else {"layout": layout}
