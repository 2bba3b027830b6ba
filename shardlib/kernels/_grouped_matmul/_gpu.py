"""Grouped products on Hopper GPUs.

A result is computed in tiles of 128 x 256, each of one group:

    rows       y[rows of a tile]  =  x[rows of a tile]  @  w[group]           a step: 64 features
    matrices   of_w[group]        =  x[rows of group].T @  gradient[rows]     a step: 64 rows

A program takes a tile after another. Its warpgroups share the work: one copies the operands of the
next steps to shared memory, also those of its next tile, and two multiply, each 128 columns.

Copies start at a multiple of eight rows, and groups start anywhere. So the first tile of a group
starts up to seven rows before it, and rows of other groups are left out: as rows of a tile they are
not written, and in sums over rows they are replaced by zeros.
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
TOGETHER = 8  # tiles above each other that are computed at the same time: they share matrices
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
    """The rows, with zeros after them: a tile at least, and a multiple of what copies start at."""
    count = x.shape[0]
    missing = max(ROWS, count + -count % ALIGNED) - count
    return jnp.pad(x, ((0, missing), (0, 0))) if missing else x


def _row_tiles(sizes: jax.Array, rows: int) -> jax.Array:
    """The tiles of rows, (tiles, 4): the group, the first row, and which rows are the group's.

    The latter are the first one and the one after the last, counted from the first row of the tile.
    There are as many tiles as any sizes need; those that are left have no rows.
    """
    count = sizes.shape[0]
    most = (rows + count * (ROWS + ALIGNED - 2)) // ROWS
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first = starts // ALIGNED * ALIGNED
    tiles = jnp.where(sizes > 0, -(-(ends - first) // ROWS), 0)
    last = jnp.cumsum(tiles)
    tile = jnp.arange(most, dtype=jnp.int32)
    group = jnp.searchsorted(last, tile, side="right").astype(jnp.int32)
    exists = group < count
    group = jnp.minimum(group, count - 1)
    first_own = first[group] + ROWS * (tile - last[group] + tiles[group])
    # A tile does not go beyond the last row: it begins earlier, and has rows of the one before.
    row = jnp.minimum(first_own, rows - ROWS)
    begin = jnp.maximum(starts[group], first_own) - row
    end = jnp.where(exists, jnp.minimum(ends[group] - row, ROWS), begin)
    return jnp.stack([group, row, begin, end], axis=1).astype(jnp.int32)


@dataclass(frozen=True)
class _Tile:
    """A tile that a program computes.

    - `steps`: in how many steps; none if there is nothing to compute.
    - `column`: its place among tiles that are side by side.
    - `parts`: from a step to the parts of the operands that it multiplies: one of the first, and
      one of the second for each multiplying warpgroup.
    - `write`: called with a warpgroup's number, its result and shared memory.
    - `exists`: whether it has anything to write.
    - `counts`: from a step to the first of its rows that counts, and the one after the last; None
      where all do.
    """

    steps: jax.Array
    column: jax.Array
    parts: Callable[[jax.Array], Sequence[Any]]
    write: Callable[[int, jax.Array, Staging], None]
    exists: Any = True
    counts: Callable[[jax.Array], tuple[jax.Array, jax.Array]] | None = None

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
        """A tile by its number; the others are the references of the kernel."""
        beside = pl.cdiv(self.columns, MULTIPLYING * COLUMNS)
        index, column = plgpu.planar_snake(number, (self.row_tiles, beside), 0, TOGETHER)
        group, row, begin, end = (tiles[index, k] for k in range(4))
        row = pl.multiple_of(row, ALIGNED)
        exists = begin < end

        def parts(k: jax.Array) -> list[Any]:
            features = pl.ds(k * STEP, STEP)
            found = [x.at[pl.ds(row, ROWS), features]]
            for one in range(MULTIPLYING):
                columns = _columns(column, one, self.columns)
                where = (columns, features) if self.transposed else (features, columns)
                found.append(w.at[(group, *where)])
            return found

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
    def of_group(self) -> tuple[int, int]:
        """How many tiles a group's matrix has, above each other and side by side."""
        return pl.cdiv(self.features, ROWS), pl.cdiv(self.columns, MULTIPLYING * COLUMNS)

    @property
    def tiles(self) -> int:
        """How many tiles the result has."""
        above, beside = self.of_group
        return self.groups * above * beside

    def tile(self, number: jax.Array, groups: Any, x: Any, gradient: Any, of_w: Any) -> _Tile:
        """A tile by its number; the others are the references of the kernel."""
        above, beside = self.of_group
        group = lax.div(number, above * beside)
        feature, column = plgpu.planar_snake(
            lax.rem(number, above * beside), (above, beside), 0, TOGETHER
        )
        first, start, end = (groups[group, k] for k in range(3))

        def row_of(k: jax.Array) -> jax.Array:
            # A step does not go beyond the last row: it begins earlier.
            row = jnp.minimum(first + k * STEP, x.shape[0] - STEP)
            return pl.multiple_of(row, ALIGNED)

        def parts(k: jax.Array) -> list[Any]:
            rows = pl.ds(row_of(k), STEP)
            found = [x.at[rows, pl.ds(feature * ROWS, ROWS)]]
            for one in range(MULTIPLYING):
                found.append(gradient.at[rows, _columns(column, one, self.columns)])
            return found

        def write(warpgroup: int, z: jax.Array, staging: Staging) -> None:
            for i in range(0, ROWS, QUARTER):
                for j in range(0, COLUMNS, QUARTER):
                    columns = pl.ds(_first_column(column, warpgroup) + j, QUARTER)
                    rows = pl.ds(feature * ROWS + i, QUARTER)
                    part = z[i : i + QUARTER, j : j + QUARTER]
                    staging.write(part, of_w.at[group, rows, columns])

        def counts(k: jax.Array) -> tuple[jax.Array, jax.Array]:
            row = row_of(k)
            return jnp.maximum(start, first + k * STEP) - row, end - row

        steps = jnp.where(start < end, lax.div(end - first + (STEP - 1), STEP), 0)
        return _Tile(steps, column, parts, write, counts=counts)


def _first_column(column: jax.Array, warpgroup: int) -> jax.Array:
    """The first column of a warpgroup's part of a tile."""
    return (column * MULTIPLYING + warpgroup) * COLUMNS


def _columns(column: jax.Array, warpgroup: int, count: int) -> Any:
    """The columns that a warpgroup reads for its part of a tile.

    Where it has none, because a last tile is half of one, it reads the last ones.
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
        a_shape: of what a step has of the first operand.
        b_shape: of what it has of the second, for each multiplying warpgroup.
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
        "replaced": plgpu.Barrier(num_arrivals=MULTIPLYING),
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
        """Call a function with each tile, and with the number of steps before it."""

        def one(k: jax.Array, before: jax.Array) -> jax.Array:
            tile = product.tile(program + k * PROGRAMS, *refs)
            compute(tile, before)
            return before + tile.steps

        lax.fori_loop(0, own_tiles, one, jnp.int32(0))

    @pl.when(group == MULTIPLYING)
    def _() -> None:
        set_registers(simulated, FEW_REGISTERS)
        over_tiles(lambda tile, before: ring.copy_in(tile.steps, tile.parts, before))

    for one in range(MULTIPLYING):

        @pl.when(group == one)
        def _(one: int = one) -> None:
            set_registers(simulated, MANY_REGISTERS)
            staging = Staging(shared["swizzled"].at[one], shared["plain"].at[one])
            multiply = _Multiply(product, ring, one, shared["replaced"], simulated)

            def compute(tile: _Tile, before: jax.Array) -> None:
                @pl.when(tile.exists)
                def _() -> None:
                    z = pl.run_scoped(
                        lambda total: multiply.run(total, tile, before),
                        plgpu.WGMMAAccumulatorRef((ROWS, COLUMNS), jnp.float32),
                    )
                    has_columns = tile.first_column(one) < product.columns
                    pl.when(has_columns)(lambda: tile.write(one, z, staging))

            over_tiles(compute)
            plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Multiply:
    """What a multiplying warpgroup does with a tile."""

    product: _RowProduct | _MatrixProduct
    ring: Ring
    warpgroup: int
    replaced: Any  # a barrier: both warpgroups have replaced the rows of other groups
    simulated: bool

    def run(self, total: Any, tile: _Tile, before: jax.Array) -> jax.Array:
        """The warpgroup's part of a tile, accumulated in registers.

        The matrix unit works on one step while the next is issued, so that a buffer is free only
        when the step after it has begun.
        """
        ring = self.ring
        a_smem, b_smem = ring.buffers[0], ring.buffers[1 + self.warpgroup]

        @pl.loop(0, tile.steps)
        def _(k: jax.Array) -> None:
            slot = ring.slot(before + k)
            plgpu.barrier_wait(ring.ready.at[slot])
            a, b = a_smem.at[slot], b_smem.at[slot]
            if tile.counts is not None:
                self._replace_others(a, b, *tile.counts(k))
            if self.product.a_is_transposed:
                a = a.transpose((1, 0))
            if self.product.b_is_transposed:
                b = b.transpose((1, 0))
            plgpu.wgmma(total, a, b)
            plgpu.wgmma_wait(1)  # the step before is done
            # The buffer of the step before may be filled again.
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(ring.free.at[ring.slot(before + k - 1)]))

        z = total[...]
        # The last step is done too.
        last = ring.slot(before + tile.steps - 1)
        pl.when(tile.steps > 0)(lambda: plgpu.barrier_arrive(ring.free.at[last]))
        return z

    def _replace_others(self, a: Any, b: Any, begin: jax.Array, end: jax.Array) -> None:
        """Replace rows that are not the group's by zeros, in both operands.

        They may hold anything, so that zeros in one operand would not do. The first operand is that
        of both warpgroups: the first one replaces its rows, and both wait.
        """

        @pl.when((begin > 0) | (end < STEP))
        def _() -> None:
            # Products that are on their way may read what is in shared memory.
            plgpu.wgmma_wait(0)
            self._replace(b, begin, end)
            if self.warpgroup == 0:
                self._replace(a, begin, end)
            plgpu.commit_smem()
            plgpu.barrier_arrive(self.replaced)
            plgpu.barrier_wait(self.replaced)

    def _replace(self, ref: Any, begin: jax.Array, end: jax.Array) -> None:
        """Replace the rows of one operand before `begin` and from `end` on."""
        if self.simulated:
            x, row = ref[...], lax.broadcasted_iota(jnp.int32, ref.shape, 0)
        else:
            layout = plgpu.Layout.WGMMA
            x = plgpu.load(ref, *INDEX, layout=layout)
            row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=layout)
        counts = (row >= begin) & (row < end)
        ref[...] = jnp.where(counts, x, jnp.zeros_like(x))
