"""How our kernels for attention walk over blocks on GPUs of the Hopper generation.

A program has some neighbouring rows of the scores of one head: queries, or keys where gradients to
keys are made. Each of its first warpgroups has `ROWS` of them, and what they are made of, in shared
memory; the last warpgroup copies blocks of columns, which pass by:

    warpgroup 0   64 rows          ring: k v | k v | ...   <-  warpgroup 2, from memory
    warpgroup 1   64 rows

    kernel                rows      columns pass by           results, from registers
    attention_forward     queries   keys, values              outputs, log-sum-exps
    attention_dq          queries   keys, values              the gradient to queries
    attention_dkv         keys      queries, their gradient   the gradients to keys and values

Blocks in which the band of the mask leaves nothing are neither copied nor computed, and only those
of which it leaves a part are masked. A key head is passed by all query heads that it serves.
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

from shardlib.kernels._attention._gpu_band import Band, Blocks, Columns, Part, Span
from shardlib.kernels._attention._reference import Attention
from shardlib.kernels._gpu import INDEX, call
from shardlib.kernels._gpu_ring import FEW_REGISTERS, MANY_REGISTERS, Ring, set_registers

ROWS = 64  # of a warpgroup: the fewest that the matrix unit multiplies
GROUPS = 2  # warpgroups that compute
TILE = GROUPS * ROWS  # rows of a program; lengths are padded to multiples
WIDTH = 64  # numbers of 16 bits that a row has in a step: sizes are padded to multiples
SHARED = 227 * 2**10 - 2**11  # bytes of shared memory, less some for barriers
MOST_STAGES = 4

# What belongs to queries, and what to keys: matrices, and then one number for each.
MATRICES = {"q": "queries", "y_gradient": "queries", "k": "keys", "v": "keys"}
VECTORS = {
    "lse": "queries",
    "delta": "queries",
    "query_segments": "queries",
    "key_segments": "keys",
}


class Result(NamedTuple):
    """An array that a kernel makes: `like` a matrix, or one number for each row."""

    shape: tuple[int, ...]
    dtype: Any
    like: str | None = None


@dataclass(frozen=True)
class Body:
    """What a kernel computes of rows, a block of columns at a time.

    Attributes:
        name: of the kernel.
        start: from rows to what is carried from block to block.
        add: from rows, a block and what is carried to that with the block.
        finish: from rows and what was carried to the results, an array for each.
    """

    name: str
    start: Callable[["Rows"], Any]
    add: Callable[["Rows", "Block", Any], Any]
    finish: Callable[["Rows", Any], Sequence[jax.Array]]


@dataclass(frozen=True, eq=False)
class Walk:
    """A kernel over the rows and columns of an attention.

    Attributes:
        body: what it computes.
        attention: which attention.
        arrays: by the names of `MATRICES` and `VECTORS`, padded; `starts`, and `sinks` if there
            are any.
        side: of which the rows are, `"queries"` or `"keys"`.
        block: how many columns a block has.
        real_columns: how many columns are not padding.
        results: what it makes.
        simulated: whether an interpreter runs it.
    """

    body: Body
    attention: Attention
    arrays: dict[str, jax.Array]
    side: str
    block: int
    real_columns: int
    results: Sequence[Result]
    simulated: bool

    def run(self) -> list[jax.Array]:
        """The results, computed."""
        outs = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in self.results]
        rows = self.arrays[self.row_matrices[0]]
        # Neighbouring programs have other heads of the same rows, whose blocks are as many.
        grid = {"head": rows.shape[2], "tile": rows.shape[1] // TILE, "sequence": rows.shape[0]}
        run = call(
            self.kernel,
            self.body.name,
            outs,
            self.simulated,
            rough=True,
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=GROUPS + 1,
            thread_name="group",
            scratch_types=self._scratch(),
        )
        return list(run(*self.arrays.values()))

    def kernel(self, *refs: Any, **shared: Any) -> None:
        """What the warpgroups of a program do."""
        arrays = dict(zip(self.arrays, refs, strict=False))
        ring = Ring(shared["passing"], shared["ready"], shared["free"], self.stages)
        rows = Rows(self, arrays, refs[len(arrays) :], ring, shared)
        computing = lax.axis_index("group") < GROUPS

        @pl.when(computing)
        def _() -> None:
            set_registers(self.simulated, MANY_REGISTERS)
            rows.compute()

        @pl.when(jnp.logical_not(computing))
        def _() -> None:
            set_registers(self.simulated, FEW_REGISTERS)
            rows.copy_columns()

    def _of_side(self, names: dict[str, str], is_rows: bool) -> list[str]:
        """Which arrays the rows have, or the columns, of those that are there."""
        return [
            name for name in self.arrays if name in names and (names[name] == self.side) == is_rows
        ]

    @property
    def row_matrices(self) -> list[str]:
        """The matrices of which a program has some rows."""
        return self._of_side(MATRICES, True)

    @property
    def row_vectors(self) -> list[str]:
        """The arrays that have a number for each row."""
        return self._of_side(VECTORS, True)

    @property
    def passing(self) -> list[str]:
        """The arrays that pass by, in the order of the ring's buffers."""
        return self._of_side(MATRICES, False) + self._of_side(VECTORS, False)

    @property
    def group(self) -> int:
        """How many query heads a key head serves."""
        return self.arrays["q"].shape[2] // self.arrays["k"].shape[2]

    @property
    def columns(self) -> Columns:
        """The columns, in blocks."""
        length = self.arrays[self.passing[0]].shape[1]
        return Columns(self.block, length // self.block, self.real_columns)

    @property
    def stages(self) -> int:
        """How many blocks may be on their way at once, in the shared memory that rows leave."""
        own = sum(GROUPS * ROWS * self._row_bytes(name) for name in self.row_matrices)
        own += sum(GROUPS * ROWS * self._staged_bytes(result) for result in self.results)
        block = sum(self.block * self._row_bytes(name) for name in self.passing)
        return max(1, min((SHARED - own) // block, MOST_STAGES, self.columns.count * self.group))

    def _row_bytes(self, name: str) -> int:
        """The bytes that a row of an array takes."""
        x = self.arrays[name]
        return x.shape[-1] * x.dtype.itemsize if name in MATRICES else x.dtype.itemsize

    def _staged_bytes(self, result: Result) -> int:
        """The bytes of a row of a result that has shared memory of its own."""
        if self._is_staged_in_rows(result):
            return 0
        width = 1 if result.like is None else result.shape[-1]
        return width * jnp.dtype(result.dtype).itemsize

    def _is_staged_in_rows(self, result: Result) -> bool:
        """Whether a result leaves through the shared memory of the rows that it is like."""
        if result.like is None:
            return False
        return self.arrays[result.like].shape[-1] == result.shape[-1]

    def _scratch(self) -> dict[str, Any]:
        """The shared memory and the barriers of a program, in the order of these names."""
        own = [self._buffer(name, (GROUPS, ROWS)) for name in self.row_matrices]
        passing = [self._buffer(name, (self.stages, self.block)) for name in self.passing]
        staging = []
        for result in self.results:
            shape: tuple[int, ...] = (GROUPS, ROWS)
            if result.like is not None:
                shape = (*shape, result.shape[-1])
            if not self._is_staged_in_rows(result):
                staging.append(_shared(shape, result.dtype))
        ring = {"num_barriers": self.stages}
        return {
            "own": own,
            "passing": passing,
            "staging": staging,
            "arrived": plgpu.Barrier(num_arrivals=len(own), num_barriers=GROUPS),
            "ready": plgpu.Barrier(num_arrivals=len(passing), **ring),
            "free": plgpu.Barrier(num_arrivals=GROUPS, **ring),
        }

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Any:
        """Shared memory for some rows of an array."""
        x = self.arrays[name]
        if name in MATRICES:
            shape = (*shape, x.shape[-1])
        return _shared(shape, x.dtype)


def _shared(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory, laid out for the matrix unit where it has matrices."""
    if len(shape) < 3:
        return plgpu.SMEM(shape, dtype)
    transforms = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(2 * WIDTH))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class Rows:
    """The rows of a program, and in a computing warpgroup its own of them.

    Attributes:
        walk: the kernel.
        attention: which attention.
        matrices: by name, this warpgroup's rows in shared memory.
        sink: of the head; None without sinks.
    """

    def __init__(
        self,
        walk: Walk,
        arrays: dict[str, Any],
        result_refs: Sequence[Any],
        ring: Ring,
        shared: dict[str, Any],
    ) -> None:
        self.walk, self.attention = walk, walk.attention
        self._arrays, self._result_refs, self._ring, self._shared = (
            arrays,
            result_refs,
            ring,
            shared,
        )
        self._group = lax.axis_index("group")
        self._sequence, self._head = lax.axis_index("sequence"), lax.axis_index("head")
        self._tile_begin = lax.axis_index("tile") * TILE
        self._begin = self._tile_begin + self._group * ROWS
        starts = [arrays["starts"][k] for k in range(2)]
        if walk.side == "keys":
            starts.reverse()
        self._distance = starts[0] - starts[1]  # the first row's position less the first column's

    @property
    def sink(self) -> Any:
        """The sink of the head; None without sinks."""
        if "sinks" not in self._arrays:
            return None
        return self._arrays["sinks"][self._head]

    def compute(self) -> None:
        """Compute this warpgroup's rows over all blocks, and write the results."""
        buffers = [buffer.at[self._group] for buffer in self._shared["own"]]
        self.matrices = dict(zip(self.walk.row_matrices, buffers, strict=True))
        arrived = self._shared["arrived"].at[self._group]
        for name, buffer in self.matrices.items():
            rows = pl.ds(self._begin, ROWS)
            part = self._arrays[name].at[self._sequence, rows, self._head]
            plgpu.copy_gmem_to_smem(part, buffer, arrived)
        self.vectors = {name: self._vector(name) for name in self.walk.row_vectors}
        plgpu.barrier_wait(arrived)
        carry = self._over_blocks(self.walk.body.start(self))
        self._write(self.walk.body.finish(self, carry))

    def _vector(self, name: str) -> jax.Array:
        """The numbers that an array has for this warpgroup's rows, in registers."""
        ref = self._arrays[name]
        rows = pl.ds(self._begin, ROWS)
        part = ref.at[self._sequence, self._head, rows] if len(ref.shape) == 3 else None
        if part is None:
            part = ref.at[self._sequence, rows]
        if self.walk.simulated:
            return part[...]
        layout = plgpu.Layout.WGMMA.reduce(1)
        return plgpu.load(part, *INDEX, layout=layout, optimized=False)

    def _blocks(self) -> Blocks:
        """The blocks that the program's rows see."""
        is_keys = self.walk.side == "keys"
        band = Band.of_mask(self.attention.mask, is_keys)
        span = Span(TILE, self._distance + self._tile_begin)
        # Segments may hide some of any block.
        whole_parts = "query_segments" not in self._arrays
        columns = self.walk.columns
        if is_keys:
            # Queries that are padding have no share in anything.
            columns = columns._replace(real=columns.block * columns.count)
        return band.blocks(span, columns, whole_parts)

    def _over_blocks(self, carry: Any) -> Any:
        """Add all blocks to what is carried, in the order in which they come."""
        blocks = self._blocks()
        count = blocks.end - blocks.begin

        def add_head(head: Any, carry: Any) -> Any:
            for part in blocks.parts:
                add = partial(self._add, head * count - blocks.begin, part)
                carry = lax.fori_loop(part.begin, part.end, add, carry)
            return carry

        if self.walk.side == "queries" or self.walk.group == 1:
            return add_head(0, carry)
        return lax.fori_loop(0, self.walk.group, add_head, carry)

    def _add(self, offset: Any, part: Part, index: jax.Array, carry: Any) -> Any:
        """Add a block to what is carried.

        Args:
            offset: the step in which a block comes, less its index.
            part: in which the block is.
            index: of the block.
            carry: what is carried.
        """
        slot = self._ring.slot(index + offset)
        plgpu.barrier_wait(self._ring.ready.at[slot])
        block = Block(self, index, slot, part.is_whole)
        carry = self.walk.body.add(self, block, carry)
        plgpu.barrier_arrive(self._ring.free.at[slot])
        return carry

    def copy_columns(self) -> None:
        """Copy all blocks that the program's rows see to shared memory, as room gets free."""
        blocks = self._blocks()
        count = blocks.end - blocks.begin
        steps = count if self.walk.side == "queries" else count * self.walk.group

        def parts(k: jax.Array) -> list[Any]:
            if self.walk.side == "queries":
                head = lax.div(self._head, jnp.int32(self.walk.group))
                return self._parts(head, blocks.begin + k)
            head = self._head * self.walk.group + lax.div(k, count)
            return self._parts(head, blocks.begin + lax.rem(k, count))

        self._ring.copy_in(steps, parts)

    def _parts(self, head: Any, index: Any) -> list[Any]:
        """What passes by in a block: of matrices and vectors with heads those of one head."""
        columns = pl.ds(index * self.walk.block, self.walk.block)
        parts = []
        for name in self.walk.passing:
            ref = self._arrays[name]
            if name in MATRICES:
                parts.append(ref.at[self._sequence, columns, head])
            elif len(ref.shape) == 3:
                parts.append(ref.at[self._sequence, head, columns])
            else:
                parts.append(ref.at[self._sequence, columns])
        return parts

    def _write(self, values: Sequence[jax.Array]) -> None:
        """Copy results to memory, through shared memory."""
        staging = list(self._shared["staging"])
        rows = pl.ds(self._begin, ROWS)
        copies = []
        for value, result, ref in zip(values, self.walk.results, self._result_refs, strict=True):
            if self.walk._is_staged_in_rows(result):
                assert result.like is not None
                buffer = self.matrices[result.like]
            else:
                buffer = staging.pop(0).at[self._group]
            buffer[...] = value.astype(result.dtype)
            place = (self._sequence, rows, self._head)
            if result.like is None:
                place = (self._sequence, self._head, rows)
            copies.append((buffer, ref.at[place]))
        # What is in registers must reach shared memory before copies start.
        plgpu.commit_smem()
        for buffer, target in copies:
            plgpu.copy_smem_to_gmem(buffer, target)
        plgpu.wait_smem_to_gmem(0)

    def full(self, value: Any, width: int | None = None) -> jax.Array:
        """The same number for each row, or for `width` columns of each."""
        shape = (ROWS,) if width is None else (ROWS, width)
        x = jnp.full(shape, value, jnp.float32)
        if self.walk.simulated:
            return x
        layout = plgpu.Layout.WGMMA
        return plgpu.layout_cast(x, layout.reduce(1) if width is None else layout)

    def product(self, x: Any, y: Any) -> jax.Array:
        """`x @ y.T` of two matrices in shared memory, in float32."""

        def multiply(total: Any) -> jax.Array:
            plgpu.wgmma(total, x, y.transpose((1, 0)))
            return total[...]

        shape = (x.shape[0], y.shape[0])
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))

    def add_product(self, total: jax.Array, x: jax.Array, y: Any) -> jax.Array:
        """`total + x @ y`, where `x` is in registers, and `y` in shared memory."""
        x = x.astype(y.dtype)
        if self.walk.simulated:
            # JAX's simulator multiplies no registers.
            return total + jnp.dot(x, y[...], preferred_element_type=jnp.float32)

        def multiply(total: Any) -> None:
            plgpu.wgmma(total, x, y)

        return pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(total))


class Block:
    """A block of columns, which is in shared memory while rows are computed with it."""

    def __init__(self, rows: Rows, index: jax.Array, slot: jax.Array, is_whole: bool) -> None:
        self._rows, self._is_whole = rows, is_whole
        self._begin = index * rows.walk.block
        buffers = rows._ring.buffers
        self._buffers = dict(zip(rows.walk.passing, buffers, strict=True))
        self._slot = slot

    def matrix(self, name: str) -> Any:
        """A matrix's rows of this block, in shared memory."""
        return self._buffers[name].at[self._slot]

    def vector(self, name: str) -> jax.Array:
        """A number for each column, repeated along the rows, in registers."""
        ref = self._buffers[name].at[self._slot]
        shape = (ROWS, self._rows.walk.block)
        if self._rows.walk.simulated:
            return lax.broadcast_in_dim(ref[...], shape, [1])
        layout = plgpu.Layout.WGMMA.reduce(0)
        return lax.broadcast_in_dim(plgpu.load(ref, *INDEX, layout=layout), shape, [1])

    def across(self, x: jax.Array) -> jax.Array:
        """A number for each row, repeated along the columns."""
        return lax.broadcast_in_dim(x, (ROWS, self._rows.walk.block), [0])

    def seen(self) -> jax.Array | None:
        """Which columns each row sees; None if that is all."""
        rows, tests = self._rows, []
        band = Band.of_mask(rows.attention.mask, rows.walk.side == "keys")
        if not self._is_whole:
            column = self._iota(1) + self._begin
            if rows.walk.side == "queries" and rows.walk.real_columns % rows.walk.block:
                tests.append(column < rows.walk.real_columns)
            away = column - self._iota(0) - (rows._distance + rows._begin)
            if band.upper is not None:
                tests.append(away <= band.upper)
            if band.lower is not None:
                tests.append(away >= band.lower)
        own, other = "query_segments", "key_segments"
        if own in self._rows._arrays:
            if rows.walk.side == "keys":
                own, other = other, own
            tests.append(self.across(rows.vectors[own]) == self.vector(other))
        seen = None
        for test in tests:
            seen = test if seen is None else seen & test
        return seen

    def _iota(self, dim: int) -> jax.Array:
        """The index of each score's row or column within the block."""
        shape = (ROWS, self._rows.walk.block)
        if self._rows.walk.simulated:
            return lax.broadcasted_iota(jnp.int32, shape, dim)
        return plgpu.broadcasted_iota(jnp.int32, shape, dim, layout=plgpu.Layout.WGMMA)
