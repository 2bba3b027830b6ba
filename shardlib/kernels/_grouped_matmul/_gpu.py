"""Grouped products on Hopper GPUs.

A result is computed in tiles of 128 x 256, each of one group:

    rows       y[rows of a tile]  =  x[rows of a tile]  @  w[group]           a step: 64 features
    matrices   of_w[group]        =  x[rows of group].T @  gradient[rows]     a step: 64 rows

A program takes one tile after another. Its warpgroups share the work: two multiply, each 128
columns, and one copies the operands of the next steps to shared memory, across the end of a tile to
the steps of the next one.

Copies start at a multiple of eight rows, and groups start anywhere. So the first tile of a group
starts up to seven rows before the group. Rows of other groups are left out: as rows of a tile they
are not written, and in sums over rows they are replaced by zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels._choice import Task
from shardlib.kernels._gpu import INDEX, call, generation, refuses_device
from shardlib.kernels._gpu_ring import FEW_REGISTERS, MANY_REGISTERS, Ring, set_registers
from shardlib.kernels._grouped_matmul._gpu_staging import QUARTER, SomeColumns, Staging
from shardlib.kernels._grouped_matmul._places import only_grouped

ROWS = COLUMNS = 128  # of a warpgroup's part of a tile
MULTIPLYING = 2  # warpgroups, side by side
STEP = 64  # features or rows that are multiplied at a time: 128 bytes of each row
ALIGNED = 8  # rows: copies start at a multiple of these
STAGES = 4
SNAKE_WIDTH = 8  # tiles above each other that are computed at the same time: they share matrices
PROGRAMS = 132  # as many as a Hopper GPU has multiprocessors


def refuses(task: Task) -> str | None:
    """Why the kernel does not take a task; None if it does.

    The text continues a sentence that begins with the kernel's name.
    """
    wrong_device = refuses_device(task)
    if wrong_device:
        return wrong_device
    assert task.device is not None
    if generation(task.device.kind) != "hopper":
        return f"is for GPUs of the generation Hopper, and this is {task.device.kind}"
    x, w = task.arrays["x"], task.arrays["w"]
    if str(x.dtype) not in ("bfloat16", "float16"):
        return f"multiplies bfloat16 and float16, and `x` is {x.dtype}"
    features, columns = w.shape[1:]
    if features % COLUMNS or columns % COLUMNS:
        return f"takes multiples of {COLUMNS} features and columns, and `w` is {list(w.shape)}"
    return None


def forward(x: jax.Array, w: jax.Array, sizes: jax.Array, *, simulated: bool = False) -> jax.Array:
    """The product of each row with the matrix of its group."""
    run = jax.custom_batching.sequential_vmap(partial(_rows, simulated, False))
    return run(x, w, sizes)


def backward(
    x: jax.Array,
    w: jax.Array,
    sizes: jax.Array,
    gradient: jax.Array,
    *,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The gradients to the rows and to the matrices."""
    of_rows = jax.custom_batching.sequential_vmap(partial(_rows, simulated, True))
    of_matrices = jax.custom_batching.sequential_vmap(partial(_matrices, simulated))
    return of_rows(gradient, w, sizes), of_matrices(x, gradient, sizes)


def _rows(
    simulated: bool, transposed: bool, x: jax.Array, w: jax.Array, sizes: jax.Array
) -> jax.Array:
    """The product of each row with the matrix of its group, or with that matrix transposed."""
    count, rows = x.shape[0], _whole_rows(x)
    columns = w.shape[1 if transposed else 2]
    tiles = _row_tiles(sizes, rows.shape[0])
    product = _RowProduct(
        tiles.shape[0], columns, w.shape[2 if transposed else 1] // STEP, transposed
    )
    shape = (COLUMNS, STEP) if transposed else (STEP, COLUMNS)
    out = jax.ShapeDtypeStruct((rows.shape[0], columns), x.dtype)
    name = "grouped_rows_transposed" if transposed else "grouped_rows"
    y = _run(product, name, (ROWS, STEP), shape, out, simulated)(tiles, rows, w)
    return only_grouped(y[:count], sizes)


def _matrices(simulated: bool, x: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
    """For each group the product of its rows, transposed, with the gradients of these."""
    rows, gradient = _whole_rows(x), _whole_rows(gradient)
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    groups = jnp.stack([starts // ALIGNED * ALIGNED, starts, ends], axis=1)
    product = _MatrixProduct(sizes.shape[0], x.shape[1], gradient.shape[1])
    out = jax.ShapeDtypeStruct((sizes.shape[0], x.shape[1], gradient.shape[1]), x.dtype)
    run = _run(product, "grouped_matrices", (STEP, ROWS), (STEP, COLUMNS), out, simulated)
    return run(groups, rows, gradient)


def _whole_rows(x: jax.Array) -> jax.Array:
    """The rows, padded with zeros to a tile at least, and to a multiple of `ALIGNED`."""
    count = x.shape[0]
    missing = max(ROWS, count + -count % ALIGNED) - count
    return jnp.pad(x, ((0, missing), (0, 0))) if missing else x


def _row_tiles(sizes: jax.Array, rows: int) -> jax.Array:
    """The tiles of rows, (tiles, 4): the group, the first row, and which rows are the group's.

    The last two columns are the first row of the group and the one after its last, both counted
    from the first row of the tile. The number of tiles is the most that any sizes need; tiles that
    are not needed have no rows.
    """
    count = sizes.shape[0]
    # A group's first tile begins up to `ALIGNED - 1` rows early, and its last tile may lack all
    # rows but one.
    most = (rows + count * (ROWS + ALIGNED - 2)) // ROWS
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    aligned_starts = starts // ALIGNED * ALIGNED
    tile_counts = jnp.where(sizes > 0, -(-(ends - aligned_starts) // ROWS), 0)
    tile_ends = jnp.cumsum(tile_counts)
    tile = jnp.arange(most, dtype=jnp.int32)
    group = jnp.searchsorted(tile_ends, tile, side="right").astype(jnp.int32)
    exists = group < count
    group = jnp.minimum(group, count - 1)
    tile_of_group = tile - tile_ends[group] + tile_counts[group]
    first_own = aligned_starts[group] + ROWS * tile_of_group
    # No tile goes beyond the last row. It begins earlier instead, with rows of the tile before.
    row = jnp.minimum(first_own, rows - ROWS)
    begin = jnp.maximum(starts[group], first_own) - row
    end = jnp.where(exists, jnp.minimum(ends[group] - row, ROWS), begin)
    return jnp.stack([group, row, begin, end], axis=1).astype(jnp.int32)


@dataclass(frozen=True)
class _Tile:
    """A tile that a program computes.

    - `steps`: how many steps it takes; zero if there is nothing to compute.
    - `column`: its index among tiles that are side by side.
    - `parts`: called with the index of a step; gives the parts of the operands that the step
      multiplies: one of the first, and one of the second for each multiplying warpgroup.
    - `write`: called with a warpgroup's number, its result and shared memory.
    - `exists`: whether it has anything to write.
    - `group_rows`: called with the index of a step; gives the first of the step's rows that is the
      group's, and the one after the last. None where all are summed over.
    """

    steps: jax.Array
    column: jax.Array
    parts: Callable[[jax.Array], Sequence[Any]]
    write: Callable[[int, jax.Array, Staging], None]
    exists: Any = True
    group_rows: Callable[[jax.Array], tuple[jax.Array, jax.Array]] | None = None

    def first_column(self, warpgroup: int) -> jax.Array:
        """The first column of a warpgroup's part."""
        return _first_column(self.column, warpgroup)


@dataclass(frozen=True)
class _RowProduct:
    """Rows with the matrices of their groups."""

    row_tiles: int
    columns: int
    steps: int
    transposed: bool  # the matrices
    a_is_transposed = False

    @property
    def b_is_transposed(self) -> bool:
        """Whether the second operand is multiplied transposed."""
        return self.transposed

    @property
    def tiles(self) -> int:
        """How many tiles the result has."""
        return self.row_tiles * pl.cdiv(self.columns, MULTIPLYING * COLUMNS)

    def tile(self, number: jax.Array, tiles: Any, x: Any, w: Any, y: Any) -> _Tile:
        """A tile by its number; the other arguments are the references of the kernel."""
        column_tiles = pl.cdiv(self.columns, MULTIPLYING * COLUMNS)
        shape = (self.row_tiles, column_tiles)
        index, column = plgpu.planar_snake(number, shape, 0, SNAKE_WIDTH)
        group, row, begin, end = (tiles[index, k] for k in range(4))
        row = pl.multiple_of(row, ALIGNED)
        exists = begin < end

        def parts(k: jax.Array) -> list[Any]:
            features = pl.ds(k * STEP, STEP)
            operands = [x.at[pl.ds(row, ROWS), features]]
            for warpgroup in range(MULTIPLYING):
                columns = _columns(column, warpgroup, self.columns)
                where = (columns, features) if self.transposed else (features, columns)
                operands.append(w.at[(group, *where)])
            return operands

        def write(warpgroup: int, z: jax.Array, staging: Staging) -> None:
            for i in range(0, ROWS, QUARTER):
                for j in range(0, COLUMNS, QUARTER):
                    columns = pl.ds(_first_column(column, warpgroup) + j, QUARTER)
                    out = SomeColumns(y, row + i, columns)
                    part = z[i : i + QUARTER, j : j + QUARTER]
                    staging.write_rows(part, out, begin - i, end - i)

        return _Tile(jnp.where(exists, self.steps, 0), column, parts, write, exists)


@dataclass(frozen=True)
class _MatrixProduct:
    """For each group its rows, transposed, with the gradients of these."""

    groups: int
    features: int
    columns: int
    a_is_transposed = True
    b_is_transposed = False

    @property
    def group_shape(self) -> tuple[int, int]:
        """How many tiles a group's matrix has along its features, and along its columns."""
        return pl.cdiv(self.features, ROWS), pl.cdiv(self.columns, MULTIPLYING * COLUMNS)

    @property
    def tiles(self) -> int:
        """How many tiles the result has."""
        feature_tiles, column_tiles = self.group_shape
        return self.groups * feature_tiles * column_tiles

    def tile(self, number: jax.Array, groups: Any, x: Any, gradient: Any, of_w: Any) -> _Tile:
        """A tile by its number; the other arguments are the references of the kernel."""
        feature_tiles, column_tiles = self.group_shape
        tiles_per_group = feature_tiles * column_tiles
        group = lax.div(number, tiles_per_group)
        number_in_group = lax.rem(number, tiles_per_group)
        shape = (feature_tiles, column_tiles)
        feature, column = plgpu.planar_snake(number_in_group, shape, 0, SNAKE_WIDTH)
        first, start, end = (groups[group, k] for k in range(3))

        def row_of(k: jax.Array) -> jax.Array:
            # No step goes beyond the last row: it begins earlier instead.
            row = jnp.minimum(first + k * STEP, x.shape[0] - STEP)
            return pl.multiple_of(row, ALIGNED)

        def parts(k: jax.Array) -> list[Any]:
            rows = pl.ds(row_of(k), STEP)
            operands = [x.at[rows, pl.ds(feature * ROWS, ROWS)]]
            for warpgroup in range(MULTIPLYING):
                operands.append(gradient.at[rows, _columns(column, warpgroup, self.columns)])
            return operands

        def write(warpgroup: int, z: jax.Array, staging: Staging) -> None:
            for i in range(0, ROWS, QUARTER):
                for j in range(0, COLUMNS, QUARTER):
                    columns = pl.ds(_first_column(column, warpgroup) + j, QUARTER)
                    rows = pl.ds(feature * ROWS + i, QUARTER)
                    part = z[i : i + QUARTER, j : j + QUARTER]
                    staging.write(part, of_w.at[group, rows, columns])

        def group_rows(k: jax.Array) -> tuple[jax.Array, jax.Array]:
            row = row_of(k)
            # A step that begins earlier has rows of the step before, which are not summed again.
            return jnp.maximum(start, first + k * STEP) - row, end - row

        steps = jnp.where(start < end, lax.div(end - first + (STEP - 1), STEP), 0)
        return _Tile(steps, column, parts, write, group_rows=group_rows)


def _first_column(column: jax.Array, warpgroup: int) -> jax.Array:
    """The first column of a warpgroup's part of a tile."""
    return (column * MULTIPLYING + warpgroup) * COLUMNS


def _columns(column: jax.Array, warpgroup: int, count: int) -> Any:
    """The columns that a warpgroup reads for its part of a tile.

    Where it has none, because the last tile is only half as wide, it reads the last columns.
    """
    return pl.ds(jnp.minimum(_first_column(column, warpgroup), count - COLUMNS), COLUMNS)


def _run(
    product: _RowProduct | _MatrixProduct,
    name: str,
    a_shape: tuple[int, int],
    b_shape: tuple[int, int],
    out: jax.ShapeDtypeStruct,
    simulated: bool,
) -> Callable[..., jax.Array]:
    """The kernel of a product, as a function of its tiles or groups and of both operands.

    Args:
        product: what is multiplied.
        name: of the kernel.
        a_shape: the shape of a step's part of the first operand.
        b_shape: that of the second operand, for each multiplying warpgroup.
        out: the shape and dtype of the result.
        simulated: whether an interpreter runs the kernel.
    """
    transforms = plgpu.TilingTransform((8, STEP)), plgpu.SwizzleTransform(2 * STEP)
    quarter = (MULTIPLYING, QUARTER, QUARTER)
    # Scratch is allocated in the alphabetical order of these names.
    scratch = {
        "a_smem": plgpu.SMEM((STAGES, *a_shape), out.dtype, transforms=transforms),
        "b_smem": [
            plgpu.SMEM((STAGES, *b_shape), out.dtype, transforms=transforms)
            for _ in range(MULTIPLYING)
        ],
        "ready": plgpu.Barrier(num_arrivals=1 + MULTIPLYING, num_barriers=STAGES),
        "free": plgpu.Barrier(num_arrivals=MULTIPLYING, num_barriers=STAGES),
        "rows_zeroed": plgpu.Barrier(num_arrivals=MULTIPLYING),
        "swizzled": plgpu.SMEM(quarter, out.dtype, transforms=transforms),
        "plain": plgpu.SMEM(quarter, out.dtype),
    }
    return call(
        partial(_program, product, simulated),
        name,
        out,
        simulated,
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=1 + MULTIPLYING,
        thread_name="group",
        scratch_types=scratch,
    )


def _program(
    product: _RowProduct | _MatrixProduct, simulated: bool, *refs: Any, **shared: Any
) -> None:
    """The body of a kernel: every 132nd tile, one after the other."""
    ring = Ring((shared["a_smem"], *shared["b_smem"]), shared["ready"], shared["free"], STAGES)
    program, group = lax.axis_index("program"), lax.axis_index("group")
    own_tiles = lax.div(product.tiles - program + (PROGRAMS - 1), PROGRAMS)

    def over_tiles(compute: Callable[[_Tile, jax.Array], None]) -> None:
        """Call a function with each of the program's tiles, and the number of steps before it."""

        def take_tile(k: jax.Array, before: jax.Array) -> jax.Array:
            tile = product.tile(program + k * PROGRAMS, *refs)
            compute(tile, before)
            return before + tile.steps

        lax.fori_loop(0, own_tiles, take_tile, jnp.int32(0))

    @pl.when(group == MULTIPLYING)
    def _() -> None:
        set_registers(simulated, FEW_REGISTERS)
        over_tiles(lambda tile, before: ring.copy_in(tile.steps, tile.parts, before))

    for warpgroup in range(MULTIPLYING):

        @pl.when(group == warpgroup)
        def _(warpgroup: int = warpgroup) -> None:
            set_registers(simulated, MANY_REGISTERS)
            staging = Staging(shared["swizzled"].at[warpgroup], shared["plain"].at[warpgroup])
            multiply = _Multiply(product, ring, warpgroup, shared["rows_zeroed"], simulated)

            def compute(tile: _Tile, before: jax.Array) -> None:
                @pl.when(tile.exists)
                def _() -> None:
                    z = pl.run_scoped(
                        lambda total: multiply.run(total, tile, before),
                        plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32),
                    )
                    has_columns = tile.first_column(warpgroup) < product.columns
                    pl.when(has_columns)(lambda: tile.write(warpgroup, z, staging))

            over_tiles(compute)
            plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Multiply:
    """What a multiplying warpgroup does with a tile."""

    product: _RowProduct | _MatrixProduct
    ring: Ring
    warpgroup: int
    rows_zeroed: Any  # a barrier: both warpgroups have set the rows of other groups to zero
    simulated: bool

    def run(self, total: Any, tile: _Tile, before: jax.Array) -> jax.Array:
        """The warpgroup's part of a tile, accumulated in registers.

        The next step is issued while the matrix unit works on one, so a step's buffer is freed only
        after the next step is issued, and the last one's after all steps.
        """
        ring = self.ring
        a_smem, b_smem = ring.buffers[0], ring.buffers[1 + self.warpgroup]

        @pl.loop(0, tile.steps)
        def _(k: jax.Array) -> None:
            slot = ring.slot(before + k)
            plgpu.barrier_wait(ring.ready.at[slot])
            a, b = a_smem.at[slot], b_smem.at[slot]
            if tile.group_rows is not None:
                self._zero_other_groups(a, b, *tile.group_rows(k))
            if self.product.a_is_transposed:
                a = a.transpose((1, 0))
            if self.product.b_is_transposed:
                b = b.transpose((1, 0))
            plgpu.wgmma(total, a, b)
            plgpu.wgmma_wait(1)  # the step before is done
            # The buffer of the step before may be filled again.
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(ring.free.at[ring.slot(before + k - 1)]))

        # Reading the sum waits for the last step.
        z = total[...]
        last = ring.slot(before + tile.steps - 1)
        pl.when(tile.steps > 0)(lambda: plgpu.barrier_arrive(ring.free.at[last]))
        return z

    def _zero_other_groups(self, a: Any, b: Any, begin: jax.Array, end: jax.Array) -> None:
        """Set rows that are not the group's to zero, in both operands.

        They may hold anything, even nan, so zeros in one operand are not enough. Both warpgroups
        read the first operand: the first warpgroup sets its rows, and the other one waits for it.
        """

        @pl.when((begin > 0) | (end < STEP))
        def _() -> None:
            # Products that are not complete may still read shared memory.
            plgpu.wgmma_wait(0)
            self._zero_outside(b, begin, end)
            if self.warpgroup == 0:
                self._zero_outside(a, begin, end)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.rows_zeroed)
            plgpu.barrier_wait(self.rows_zeroed)

    def _zero_outside(self, ref: Any, begin: jax.Array, end: jax.Array) -> None:
        """Set the rows of an operand before `begin` and from `end` on to zero."""
        if self.simulated:
            x, row = ref[...], lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        else:
            layout = plgpu.Layout.WGMMA
            x = plgpu.load(ref, *INDEX, layout=layout)
            row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=layout)
        is_kept = (row >= begin) & (row < end)
        ref[...] = jnp.where(is_kept, x, jnp.zeros_like(x))
