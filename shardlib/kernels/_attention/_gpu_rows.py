"""What the warpgroups of our kernels for attention on GPUs do; see `_gpu_walk`.

Scores are laid out in registers as the matrix unit leaves them. One number for each row is laid out
like their sum over columns, and one for each column like their sum over rows. A simulator has no
layouts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels._attention._gpu_band import Blocks, Part, Span
from shardlib.kernels._attention._gpu_walk import GROUPS, MATRICES, ROWS, TILE, Walk
from shardlib.kernels._gpu import INDEX, call
from shardlib.kernels._gpu_ring import FEW_REGISTERS, MANY_REGISTERS, Ring, set_registers


@dataclass(frozen=True)
class Body:
    """What a kernel computes of rows, a block of columns at a time.

    Attributes:
        name: of the kernel.
        start: called with the rows; gives the carry before the first block.
        add: called with the rows, a block and the carry; gives the carry with the block added.
        finish: called with the rows and the last carry; gives an array for each result.
    """

    name: str
    start: Callable[["Rows"], Any]
    add: Callable[["Rows", "Block", Any], Any]
    finish: Callable[["Rows", Any], Sequence[jax.Array]]


def run(body: Body, walk: Walk) -> list[jax.Array]:
    """Run a kernel.

    Args:
        body: what it computes.
        walk: what it walks over.

    Returns:
        An array for each result of the walk.
    """
    stages = walk.stages
    # Scratch is allocated in the alphabetical order of these names.
    scratch = {
        "kept_rows": [buffer.type() for buffer in walk.row_buffers],
        "moving_columns": [buffer.type() for buffer in walk.ring_buffers(stages)],
        "staging": [buffer.type() for buffer in walk.staging],
        "arrived": plgpu.Barrier(num_arrivals=len(walk.row_matrices), num_barriers=GROUPS),
        "ready": plgpu.Barrier(num_arrivals=len(walk.column_arrays), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=GROUPS, num_barriers=stages),
    }
    kernel = call(
        partial(_program, body, walk, stages),
        body.name,
        [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in walk.results],
        walk.simulated,
        approx_math=True,
        grid=tuple(walk.grid.values()),
        grid_names=tuple(walk.grid),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types=scratch,
    )
    return list(kernel(*walk.arrays.values()))


class _Memory(NamedTuple):
    """The references of a program: to arrays by name, to results, and to shared memory."""

    arrays: dict[str, Any]
    results: Sequence[Any]
    ring: Ring
    rows: Sequence[Any]  # shared memory for the rows of each matrix
    staging: Sequence[Any]
    arrived: Any  # barriers: the rows of a warpgroup are in shared memory


def _program(body: Body, walk: Walk, stages: int, *refs: Any, **shared: Any) -> None:
    """The program of a kernel: its warpgroups compute rows, or copy columns.

    Args:
        body: what the kernel computes.
        walk: what it walks over.
        stages: how many blocks the ring has buffers for.
        refs: references to arrays and to results.
        shared: the scratch of `run`.
    """
    # References to results follow those to arrays.
    arrays = dict(zip(walk.arrays, refs, strict=False))
    ring = Ring(shared["moving_columns"], shared["ready"], shared["free"], stages)
    rows, staging, arrived = shared["kept_rows"], shared["staging"], shared["arrived"]
    memory = _Memory(arrays, refs[len(arrays) :], ring, rows, staging, arrived)
    program = Program(walk, memory)
    group = lax.axis_index("group")

    # Each warpgroup takes one of the two branches, and they meet at barriers only.
    @pl.when(group < GROUPS)
    def _() -> None:
        set_registers(walk.simulated, MANY_REGISTERS)
        Rows(program, group).compute(body)

    @pl.when(group == GROUPS)
    def _() -> None:
        set_registers(walk.simulated, FEW_REGISTERS)
        program.copy_columns()


class Program:
    """Where a program is in the grid, and which blocks its rows see.

    Attributes:
        walk: what the kernel walks over.
        memory: the references of the program.
        begin: the index of its first row.
        distance: the position of the first of all rows, less that of the first column.
        blocks: the blocks that its rows see.
    """

    def __init__(self, walk: Walk, memory: _Memory) -> None:
        self.walk, self.memory = walk, memory
        self.sequence, self.head = lax.axis_index("sequence"), lax.axis_index("head")
        self.begin = lax.axis_index("tile") * TILE
        starts = memory.arrays["starts"]
        distance = starts[0] - starts[1]
        self.distance = -distance if walk.rows_are_keys else distance

    @property
    def blocks(self) -> Blocks:
        """The blocks that the program's rows see.

        Segments may hide some of any block: with them no block is known to be whole.
        """
        span = Span(TILE, self.distance + self.begin)
        return self.walk.band.blocks(span, self.walk.columns, not self.walk.has_segments)

    def copy_columns(self) -> None:
        """Copy all blocks that the program's rows see to shared memory, as buffers get free."""
        blocks, group = self.blocks, self.walk.group
        count = blocks.end - blocks.begin

        def columns(k: jax.Array) -> list[Any]:
            if not self.walk.rows_are_keys:
                return self._columns(lax.div(self.head, jnp.int32(group)), blocks.begin + k)
            # The query heads that the key head serves come one after the other.
            head = self.head * group + lax.div(k, count)
            return self._columns(head, blocks.begin + lax.rem(k, count))

        heads = group if self.walk.rows_are_keys else 1
        self.memory.ring.copy_in(count * heads, columns)

    def _columns(self, head: Any, index: Any) -> list[Any]:
        """References to one block of each of the columns' arrays, of one head."""
        columns = pl.ds(index * self.walk.block, self.walk.block)
        return [self.part(name, columns, head) for name in self.walk.column_arrays]

    def part(self, name: str, positions: Any, head: Any) -> Any:
        """A reference to some positions of an array, of one head if it has heads.

        Matrices are `(sequence, position, head, number)`, and vectors have their positions last.
        """
        ref = self.memory.arrays[name]
        if name in MATRICES:
            return ref.at[self.sequence, positions, head]
        if len(ref.shape) == 3:
            return ref.at[self.sequence, head, positions]
        return ref.at[self.sequence, positions]


class Rows:
    """The rows of a computing warpgroup.

    Attributes:
        walk: what the kernel walks over.
        attention: which attention.
        begin: the index of the first row.
        matrices: by name, the rows in shared memory.
        vectors: by name, numbers for each row, in registers.
    """

    def __init__(self, program: Program, group: jax.Array) -> None:
        self.program, self.walk = program, program.walk
        self.attention = program.walk.attention
        self.begin = program.begin + group * ROWS
        self._group = group
        buffers = [buffer.at[group] for buffer in program.memory.rows]
        self.matrices = dict(zip(self.walk.row_matrices, buffers, strict=True))
        self.vectors: dict[str, jax.Array] = {}

    @property
    def sink(self) -> Any:
        """The sink of the head; None without sinks."""
        sinks = self.program.memory.arrays.get("sinks")
        if sinks is None:
            return None
        return sinks[self.program.head]

    def compute(self, body: Body) -> None:
        """Compute the rows over all blocks that they see, and write the results."""
        self._fetch()
        carry = self._over_blocks(body, body.start(self))
        self._write(body.finish(self, carry))

    def _fetch(self) -> None:
        """Fetch the rows: matrices to shared memory, and meanwhile vectors to registers."""
        program, positions = self.program, pl.ds(self.begin, ROWS)
        arrived = program.memory.arrived.at[self._group]
        for name, buffer in self.matrices.items():
            plgpu.copy_gmem_to_smem(program.part(name, positions, program.head), buffer, arrived)
        for name in self.walk.row_vectors:
            part = program.part(name, positions, program.head)
            self.vectors[name] = self._in_registers(part)
        plgpu.barrier_wait(arrived)

    def _in_registers(self, ref: Any) -> jax.Array:
        """A number for each row, loaded from memory."""
        if self.walk.simulated:
            return ref[...]
        layout = plgpu.Layout.WGMMA.reduce(1)
        return plgpu.load(ref, *INDEX, layout=layout, optimized=False)

    def _over_blocks(self, body: Body, carry: Any) -> Any:
        """Add all blocks to what is carried, in the order in which they are copied."""
        blocks = self.program.blocks
        count = blocks.end - blocks.begin

        def add_head(head: Any, carry: Any) -> Any:
            for part in blocks.parts:
                add = partial(self._add, body, part, head * count - blocks.begin)
                carry = lax.fori_loop(part.begin, part.end, add, carry)
            return carry

        # Rows of queries have the columns of one key head, and no loop over heads.
        if not self.walk.rows_are_keys or self.walk.group == 1:
            return add_head(0, carry)
        return lax.fori_loop(0, self.walk.group, add_head, carry)

    def _add(self, body: Body, part: Part, offset: Any, index: jax.Array, carry: Any) -> Any:
        """Add a block to what is carried.

        Args:
            body: what the kernel computes.
            part: the part that has the block.
            offset: the step of the ring that has a block, less the block's index.
            index: of the block.
            carry: what is carried.
        """
        ring = self.program.memory.ring
        slot = ring.slot(index + offset)
        plgpu.barrier_wait(ring.ready.at[slot])
        carry = body.add(self, Block(self, index, slot, part.is_whole), carry)
        # Loads of vectors to registers must be complete before a copy may write to the buffer. What
        # the matrix unit reads it has read when its product is there.
        if self.walk.simulated or len(self.walk.column_arrays) > 2:
            plgpu.commit_smem()
        plgpu.barrier_arrive(ring.free.at[slot])
        return carry

    def _write(self, values: Sequence[jax.Array]) -> None:
        """Copy results to memory, through shared memory.

        A result is staged in the buffer of the rows, which are no longer needed, if it fits there.
        """
        staging = list(self.program.memory.staging)
        buffers = []
        for value, result in zip(values, self.walk.results, strict=True):
            if self.walk.is_staged_in_rows(result):
                assert result.like is not None
                buffer = self.matrices[result.like]
            else:
                buffer = staging.pop(0).at[self._group]
            buffer[...] = value.astype(result.dtype)
            buffers.append(buffer)
        # What is in registers must reach shared memory before copies start.
        plgpu.commit_smem()
        for buffer, ref in zip(buffers, self.program.memory.results, strict=True):
            plgpu.copy_smem_to_gmem(buffer, self._place(ref))
        plgpu.wait_smem_to_gmem(0)

    def _place(self, ref: Any) -> Any:
        """The rows' part of a result, which is a matrix or has one number for each row."""
        program, rows = self.program, pl.ds(self.begin, ROWS)
        if len(ref.shape) == 3:
            return ref.at[program.sequence, program.head, rows]
        return ref.at[program.sequence, rows, program.head]

    def full(self, value: Any, width: int | None = None) -> jax.Array:
        """The same number for each row, or for `width` columns of each.

        It is laid out like products of the matrix unit, so that they can be added to it.
        """
        shape = (ROWS,) if width is None else (ROWS, width)
        x = jnp.full(shape, value, jnp.float32)
        if self.walk.simulated:
            return x
        layout = plgpu.Layout.WGMMA
        return plgpu.layout_cast(x, layout.reduce(1) if width is None else layout)

    def product(self, x: Any, y: Any) -> jax.Array:
        """`x @ y.T` of two matrices in shared memory, in float32.

        The matrix unit reads both where they are, and leaves the product in registers.
        """

        def multiply(total: Any) -> jax.Array:
            plgpu.wgmma(total, x, y.transpose((1, 0)))
            return total[...]

        shape = (x.shape[0], y.shape[0])
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def add_product(self, total: jax.Array, x: jax.Array, y: Any) -> jax.Array:
        """`total + x @ y`, where `x` is in registers, and `y` in shared memory.

        `x` is rounded to the dtype of `y`; products are summed in float32.
        """
        x = x.astype(y.dtype)
        if self.walk.simulated:
            # JAX's simulator has no products with operands in registers.
            return total + jnp.dot(x, y[...], preferred_element_type=jnp.float32)

        def multiply(total: Any) -> None:
            plgpu.wgmma(total, x, y)

        accumulator: Any = plgpu.WGMMAAccumulatorRef.init(total)
        return pl.run_state(multiply)(accumulator)


class Block:
    """A block of columns, which is in shared memory while rows are computed with it."""

    def __init__(self, rows: Rows, index: jax.Array, slot: jax.Array, is_whole: bool) -> None:
        self._rows, self._walk, self._is_whole = rows, rows.walk, is_whole
        self._begin, self._slot = index * rows.walk.block, slot
        buffers = rows.program.memory.ring.buffers
        self._buffers = dict(zip(rows.walk.column_arrays, buffers, strict=True))
        self._shape = (ROWS, rows.walk.block)

    def matrix(self, name: str) -> Any:
        """A matrix's rows of this block, in shared memory."""
        return self._buffers[name].at[self._slot]

    def vector(self, name: str) -> jax.Array:
        """A number for each column, repeated along the rows, in registers."""
        ref = self._buffers[name].at[self._slot]
        if self._walk.simulated:
            return lax.broadcast_in_dim(ref[...], self._shape, [1])
        layout = plgpu.Layout.WGMMA.reduce(0)
        return lax.broadcast_in_dim(plgpu.load(ref, *INDEX, layout=layout), self._shape, [1])

    def across(self, x: jax.Array) -> jax.Array:
        """A number for each row, repeated along the columns."""
        return lax.broadcast_in_dim(x, self._shape, [0])

    def seen(self) -> jax.Array | None:
        """Which columns each row sees, by the band and by segments; None if it sees all."""
        tests = [] if self._is_whole else self._band_tests()
        if self._walk.has_segments:
            own, other = "query_segments", "key_segments"
            if self._walk.rows_are_keys:
                own, other = other, own
            tests.append(self.across(self._rows.vectors[own]) == self.vector(other))
        seen = None
        for test in tests:
            seen = test if seen is None else seen & test
        return seen

    def _band_tests(self) -> list[jax.Array]:
        """The tests by which a row sees a column: it is in the band, and it is no padding."""
        tests, band, columns = [], self._walk.band, self._walk.columns
        column = self._iota(1) + self._begin
        if columns.real < columns.block * columns.count:
            tests.append(column < columns.real)
        # The position of the column, less that of the row.
        difference = column - self._iota(0) - (self._rows.program.distance + self._rows.begin)
        if band.upper is not None:
            tests.append(difference <= band.upper)
        if band.lower is not None:
            tests.append(difference >= band.lower)
        return tests

    def _iota(self, dim: int) -> jax.Array:
        """The index of each score's row or column within the block."""
        if self._walk.simulated:
            return lax.broadcasted_iota(jnp.int32, self._shape, dim)
        return plgpu.broadcasted_iota(jnp.int32, self._shape, dim, layout=plgpu.Layout.WGMMA)
