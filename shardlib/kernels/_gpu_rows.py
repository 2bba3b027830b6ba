"""Rows of any length on a GPU, and what a kernel computes of them in a warpgroup's registers.

A warpgroup is 128 lanes in step. It holds a row of 128 numbers or more in pieces, of which each
lane holds `vector` neighbouring numbers, loaded at once. With `vector = 2`:

    row      0 1 2 3 4 5 6 7 ...       ... 255 | 256 ...                 ... 511 | ...
    lane     0 0 1 1 2 2 3 3 ...       ... 127 |   0 0 1 1 ...       ... 127 127 | ...
             '------------ piece 0 ----------' '------------ piece 1 -----------'

Where the row is no multiple of a piece, the last piece reaches back, and what it repeats is counted
once.

Rows shorter than 128 numbers are held 128 at a time, one in each lane; a piece is then `vector`
numbers of each of the 128 rows.

A row that fits in registers is read once. A longer one, or one of more than 64 numbers in a single
lane, is streamed: every reduction over all of it reads it once more, from shared memory, or from
the GPU's cache and memory where it is too long for that too. Nothing is padded, except that fewer
than 128 short rows become 128. No load reaches beyond the rows.

What is computed of a row is written as a function of its pieces (`Numbers`), which remembers the
values of a piece while that piece is in registers.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels._choice import Task
from shardlib.kernels._gpu import INDEX, STORE, call, refuses_device

LANES = 128
# Bytes of a row that fit in a warpgroup's registers together with what is computed of the row.
RESIDENT_BYTES = 32 * 2**10
SHARED_BYTES = 224 * 2**10  # of shared memory that rows may take; the remainder is Mosaic's
LOAD_BYTES = 16  # that a lane loads at once, at most
NUMBERS_AT_ONCE = 2**12  # that a warpgroup loads at once: enough to hide the latency of memory
MOST_IN_A_LANE = 64  # numbers of a row that one lane holds by itself
MOST_UNROLLED = 8  # rows that are unrolled one after the other in a program
KIB = 2**10


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of a row, or of the 128 rows that the lanes hold.

    Pieces are compared by identity: the values that are cached for a piece disappear with it.
    """

    begin: Any  # the column of its first number, traced where rows are streamed
    size: int
    repeated: Any = 0  # how many of its first numbers an earlier piece has too; may be negative


Numbers: TypeAlias = Callable[[Piece], jax.Array]


def piecewise(function: Callable[..., jax.Array], *operands: Numbers | jax.Array) -> Numbers:
    """Apply a function to the numbers of rows, piece by piece.

    An operand is either numbers of a row or an array that is the same for all pieces. Nothing is
    computed here: a piece is computed when it is first asked for, and then remembered.
    """

    def compute(piece: Piece) -> jax.Array:
        values = []
        for operand in operands:
            values.append(operand(piece) if callable(operand) else operand)
        return function(*values)

    return functools.cache(compute)


def as_float32(x: jax.Array) -> jax.Array:
    """Numbers in the dtype in which kernels compute."""
    return x.astype(jnp.float32)


def shared_bytes(*arrays: Any) -> int:
    """The bytes that arrays take of shared memory, each rounded up to whole KiB."""
    kib = 0
    for array in arrays:
        size = math.prod(array.shape) * jnp.dtype(array.dtype).itemsize
        kib += -(-size // KIB)
    return kib * KIB


def split_refs(refs: Sequence[Any], *sizes: int) -> Iterator[Sequence[Any]]:
    """Split a kernel's references into groups of the given sizes, followed by the remainder.

    >>> list(split_refs("abcd", 1, 2))
    ['a', 'bc', 'd']
    """
    for size in sizes:
        yield refs[:size]
        refs = refs[size:]
    yield refs


@dataclass(frozen=True)
class RowLayout:
    """How a warpgroup holds rows of one length in its registers.

    It holds either one long row in pieces or 128 short rows, one in each lane. The methods that
    take `Numbers` trace operations into the kernel that is being built.

    >>> rows = RowLayout.choose(1001, [jnp.float32])
    >>> [(piece.begin, piece.size, piece.repeated) for piece in rows.pieces()][-1]
    (873, 128, 23)
    """

    length: int  # numbers of a row
    vector: int  # neighbouring numbers in a lane
    passes: int  # in which the pieces of a row are loaded; 1 where the row stays in registers
    simulated: bool  # by an interpreter, which knows no layouts of registers

    @staticmethod
    def choose(
        length: int, loaded: Sequence[Any], kept: Any = jnp.float32, simulated: bool = False
    ) -> "RowLayout":
        """The layout for rows that are loaded from arrays of some dtypes and kept in another.

        The vector is the widest load that divides the row and leaves every lane something to do.
        """
        vector = LOAD_BYTES // max(jnp.dtype(dtype).itemsize for dtype in loaded)
        # Loads are aligned only where the vector divides the row, and a piece must fit in the row.
        while vector > 1 and (length % vector or LANES * vector > length >= LANES):
            vector //= 2
        if length < LANES:
            is_resident = length <= MOST_IN_A_LANE
            numbers_per_pass = MOST_IN_A_LANE
        else:
            is_resident = length * jnp.dtype(kept).itemsize <= RESIDENT_BYTES
            numbers_per_pass = NUMBERS_AT_ONCE
        passes = 1 if is_resident else -(-length // numbers_per_pass)
        return RowLayout(length, vector, passes, simulated)

    @property
    def one_row_per_lane(self) -> bool:
        """Whether each of the 128 lanes holds a row of its own."""
        return self.length < LANES

    @property
    def rows_held(self) -> int:
        """How many rows a warpgroup holds at a time."""
        return LANES if self.one_row_per_lane else 1

    def pieces(self, turn: Any = 0) -> list[Piece]:
        """The pieces of a row that are in registers in one pass, by the number of the pass.

        All passes over a streamed row have the same number of pieces: the last pass begins early
        enough to be full, and its pieces say how much of them the pass before had.
        """
        size = self.piece_shape[-1]
        if self.passes > 1:
            numbers = MOST_IN_A_LANE if self.one_row_per_lane else NUMBERS_AT_ONCE
            begin = jnp.minimum(turn * numbers, self.length - numbers)
            streamed = []
            for offset in range(0, numbers, size):
                repeated = turn * numbers - begin - offset
                streamed.append(Piece(begin + offset, size, repeated))
            return streamed
        pieces = [Piece(begin, size) for begin in range(0, self.length - size + 1, size)]
        remainder = self.length % size
        if remainder:
            # One more piece reaches back from the end of the row.
            pieces.append(Piece(self.length - size, size, size - remainder))
        return pieces

    @functools.cached_property
    def resident_pieces(self) -> list[Piece]:
        """The pieces of a row that stays in registers.

        They are the same objects at every use, so that values cached for a piece are found.
        """
        return self.pieces()

    def fold(self, function: Callable[[Piece, Any], Any], carry: Any = None) -> Any:
        """Call a function for every piece, with its result for the piece before.

        The pieces of a resident row are unrolled; the passes over a streamed row are a loop in the
        kernel.
        """

        def fold_pieces(pieces: list[Piece], carry: Any) -> Any:
            for piece in pieces:
                carry = function(piece, carry)
            return carry

        if self.passes == 1:
            return fold_pieces(self.resident_pieces, carry)
        return lax.fori_loop(
            0, self.passes, lambda turn, carry: fold_pieces(self.pieces(turn), carry), carry
        )

    def load(self, ref: Any, index: Any, now: bool = True) -> Numbers:
        """The row at an index of an array in memory, or the 128 rows from there on.

        With `now`, a row that stays in registers is loaded here, so that all its loads are issued
        before anything waits for one. Otherwise each piece is loaded where it is first used.
        """

        def load_piece(piece: Piece) -> jax.Array:
            part = ref.at[self._slices(index, piece)]
            if self.simulated:
                return part[...]
            return plgpu.load(part, *INDEX, layout=self.register_layout, optimized=False)

        numbers = functools.cache(load_piece)
        if now and self.passes == 1:
            for piece in self.resident_pieces:
                numbers(piece)
        return numbers

    def load_shared(self, ref: Any, index: Any) -> Numbers:
        """A row that all rows of a warpgroup share, such as a norm's scale.

        Where each lane has a row, it is loaded once for all lanes and broadcast in registers.
        """
        if not self.one_row_per_lane:
            return self.load(ref, index)

        def load_piece(piece: Piece) -> jax.Array:
            part = ref.at[index, pl.ds(piece.begin, piece.size)]
            if self.simulated:
                x = part[...]
            else:
                # Every lane needs the same numbers: their layout is that of a piece without rows.
                layout = self.register_layout.reduce(0)
                x = plgpu.load(part, *INDEX, layout=layout, optimized=False)
            return self._cast(lax.broadcast_in_dim(x, self.piece_shape, [1]))

        return functools.cache(load_piece)

    def scratch(self, *dtypes: Any, reserved: Sequence[Any] = ()) -> list[Any]:
        """Shared memory for a row of each dtype, or none.

        There is none where rows stay in registers or are one per lane, and where it does not fit
        beside the arrays that are `reserved` already.
        """
        arrays = [plgpu.SMEM((1, self.length), dtype) for dtype in dtypes]
        streamed = self.passes > 1 and not self.one_row_per_lane
        if streamed and shared_bytes(*reserved, *arrays) <= SHARED_BYTES:
            return arrays
        return []

    def stage(self, numbers: Numbers, scratch: Sequence[Any]) -> Numbers:
        """Copy a row to shared memory, from which later passes read it.

        Without scratch, as where rows stay in registers, the row is returned as it is.
        """
        if not scratch:
            return numbers
        self.store((scratch[0], 0, numbers))
        return self.load(scratch[0], 0)

    def store(self, *writes: tuple[Any, Any, Numbers]) -> None:
        """Write a row at an index, or 128 rows from there on, piece by piece.

        Each write is `(array, index, numbers)`. They share one pass over the row, so that numbers
        that several of them use are computed once.
        """

        def store_piece(piece: Piece, _: None) -> None:
            for ref, index, numbers in writes:
                slices, x = self._slices(index, piece), numbers(piece).astype(ref.dtype)
                if self.simulated or not self.one_row_per_lane or STORE is None:
                    ref[slices] = x
                else:
                    # Lanes with a row each do not write neighbouring numbers; see `STORE`.
                    STORE(ref.at[slices], x, optimized=False)

        self.fold(store_piece)

    def without_repeats(self, numbers: Numbers) -> Numbers:
        """Numbers of a row, with zeros where an earlier piece has the same columns."""

        def mask_piece(piece: Piece) -> jax.Array:
            x = numbers(piece)
            # What a resident piece repeats is known while tracing; for a streamed one it is traced.
            if isinstance(piece.repeated, int) and not piece.repeated:
                return x
            is_repeated = self.columns(piece) < piece.begin + piece.repeated
            return jnp.where(is_repeated, jnp.zeros_like(x), x)

        return functools.cache(mask_piece)

    def total(self, numbers: Numbers) -> jax.Array:
        """The sum of all numbers of a row; those that pieces repeat count once.

        For one long row it is a scalar that all lanes have. Where each lane has a row, it has the
        shape of a piece.
        """
        return self._reduce(self.without_repeats(numbers), jnp.add, jnp.sum, 0.0)

    def maximum(self, numbers: Numbers) -> jax.Array:
        """The greatest number of a row, in the same shape; repeated numbers do not change it."""
        return self._reduce(numbers, jnp.maximum, jnp.max, -jnp.inf)

    def _reduce(self, numbers: Numbers, combine: Any, reduce_lanes: Any, start: float) -> jax.Array:
        """Reduce a row: pieces elementwise first, then the lanes of what remains.

        One reduction across lanes costs more than many operations within them.
        """

        def add_piece(piece: Piece, so_far: Any) -> jax.Array:
            if so_far is None:
                return numbers(piece)
            return combine(so_far, numbers(piece))

        # The loop of a streamed row needs a first carry, of the shape of those that follow.
        carry = None if self.passes == 1 else self.full(start)
        by_lane = self.fold(add_piece, carry)
        if not self.one_row_per_lane:
            # All lanes hold parts of the same row.
            return reduce_lanes(by_lane)
        by_row = reduce_lanes(by_lane, axis=1)
        return self._cast(lax.broadcast_in_dim(by_row, self.piece_shape, [0]))

    def columns(self, piece: Piece) -> Any:
        """The columns of a piece's numbers in their row."""
        return self._iota(-1) + piece.begin

    def row_indices(self, index: Any) -> Any:
        """The index of the row that is held, or of each of the 128."""
        if self.one_row_per_lane:
            return self._iota(0) + index
        return index

    def full(self, value: float) -> jax.Array:
        """A piece of equal numbers."""
        return self._cast(jnp.full(self.piece_shape, value, jnp.float32))

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """The shape of a piece in registers: `(rows, columns)`, or `(columns,)` of a single row."""
        if self.one_row_per_lane:
            return LANES, self.vector
        return (LANES * self.vector,)

    @property
    def pitch(self) -> int:
        """The distance from row to row in shared memory.

        It is an odd number of vectors where each lane has a row, so that lanes that read the same
        column are at different banks of the memory.
        """
        if self.one_row_per_lane and self.length // self.vector % 2 == 0:
            return self.length + self.vector
        return self.length

    @property
    def register_layout(self) -> Any:
        """Mosaic's name for how a piece is laid out in the registers of a warpgroup."""
        if self.one_row_per_lane:
            return plgpu.Layout.TCGEN05_TMEM_NATIVE(self.vector)
        return plgpu.Layout.WG_STRIDED(self.piece_shape, vec_size=self.vector)

    def _iota(self, dim: int) -> jax.Array:
        shape = self.piece_shape
        return self._cast(lax.broadcasted_iota(jnp.int32, shape, dim % len(shape)))

    def _cast(self, x: jax.Array) -> jax.Array:
        """Say in which layout an array is; the interpreter has no layouts."""
        if self.simulated:
            return x
        return plgpu.layout_cast(x, self.register_layout)

    def _slices(self, index: Any, piece: Piece) -> tuple[Any, Any]:
        rows = pl.ds(index, LANES) if self.one_row_per_lane else index
        return rows, pl.ds(piece.begin, piece.size)

    def flatten(self, x: jax.Array, groups: int = 1, **pad_options: Any) -> jax.Array:
        """Groups of rows as one array `(rows, length)`, as a kernel takes them.

        Groups with fewer rows than a warpgroup holds are padded to that many, by `jnp.pad` with
        `pad_options`.
        """
        x = x.reshape(groups, -1, self.length)
        missing = max(self.rows_held - x.shape[1], 0)
        if missing:
            x = jnp.pad(x, ((0, 0), (0, missing), (0, 0)), **pad_options)
        return x.reshape(-1, self.length)

    def unflatten(self, x: jax.Array, shape: tuple[int, ...], groups: int = 1) -> jax.Array:
        """Undo `flatten`: the rows as an array of this shape, without the padding."""
        rows_of_group = math.prod(shape[:-1]) // groups
        return x.reshape(groups, -1, self.length)[:, :rows_of_group].reshape(shape)


@dataclass(frozen=True)
class RowBlocks:
    """The blocks of rows that the programs of a kernel take: `groups` times `rows` of them.

    The grid is `(groups, blocks of a group)`, and no block has rows of two groups.
    """

    layout: RowLayout
    groups: int
    rows: int  # of each group

    @property
    def unrolled(self) -> int:
        """How many rows, or how many times 128 short ones, a program takes.

        Of rows that a warpgroup holds one at a time it takes more the shorter they are, so that
        enough loads are issued at once.
        """
        if self.layout.rows_held > 1:
            return 1
        return min(max(NUMBERS_AT_ONCE // self.layout.length, 1), MOST_UNROLLED, self.rows)


def over_rows(
    kernel: Any, name: str, blocks: RowBlocks, results: Any, scratch: Sequence[Any] = ()
) -> Any:
    """A function of arrays of rows that runs `kernel(group, indices, *refs)` for blocks of rows.

    Args:
        kernel: it is called with the group of rows that a program works on, with the index of each
            row (or of the first of 128) in the block, and with references to operands, results,
            and scratch, in this order.
        name: of the kernel, which profiles show.
        blocks: how many rows there are. The last block of a group begins early enough to be full:
            some of its rows are then computed twice, with the same result.
        results: the shapes and dtypes of the results.
        scratch: the shared memory of the kernel.
    """
    layout, unrolled = blocks.layout, blocks.unrolled
    step = unrolled * layout.rows_held
    grid = (blocks.groups, -(-blocks.rows // step))

    def run_block(*refs: Any) -> None:
        group = lax.axis_index("group")
        # The last block begins earlier, to be full.
        begin_in_group = jnp.minimum(lax.axis_index("block") * step, blocks.rows - step)
        begin = group * blocks.rows + begin_in_group
        kernel(group, [begin + offset for offset in range(unrolled)], *refs)

    return call(
        run_block,
        name,
        results,
        layout.simulated,
        scratch_types=scratch,
        grid=grid,
        grid_names=("group", "block"),
    )


def refuses(task: Task) -> str | None:
    """Why a kernel for rows does not take a task; None if it does.

    The text continues a sentence that begins with the kernel's name.
    """
    if task.summed:
        return (
            "adds up nothing between devices, and the last dim is split over "
            f"`{', '.join(task.summed)}`"
        )
    wrong_device = refuses_device(task)
    if wrong_device:
        return wrong_device
    # Masks come as bools and go to the kernel as int8.
    known = {"float32", "bfloat16", "float16", "bool", "int32", "int8"}
    unknown = {str(x.dtype) for x in task.arrays.values()} - known
    if unknown:
        return f"takes float32, bfloat16 and float16; not {', '.join(sorted(unknown))}"
    return None
