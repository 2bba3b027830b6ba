"""Rows on a GPU: what a kernel computes of them, in the registers of a warpgroup, whatever their
length.

A warpgroup is 128 lanes in step. It has a row of 128 numbers or more in pieces, of which each lane
holds `vector` neighbouring numbers, loaded at once; the last piece reaches back where they do not
fill it, and what it repeats is counted once. A row that registers do not hold passes by as often as
something is asked of all of it, from shared memory, or from the GPU's cache and memory where it is
too long for that too. Of shorter rows it has 128, one in each lane, and a piece is `vector` numbers
of each; above 64 they pass by too. Nothing is padded but few short rows, to 128, and no load
reaches beyond the rows.

What is computed of a row is a function of its pieces, remembered while a piece is in registers.
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
LONGEST = 32 * 2**10  # bytes of a row that a warpgroup's registers hold, and what is computed of it
SHARED = 224 * 2**10  # bytes of shared memory that rows may take; some is Mosaic's
WIDEST = 16  # bytes that a lane loads at once
ENOUGH = 2**12  # numbers that keep a warpgroup's loads busy
MOST_IN_A_LANE = 64  # numbers of a row of its own
MOST = 8  # rows that are written out one after the other in a program


@dataclass(frozen=True, eq=False)  # each for itself: what is remembered of it is gone with it
class Piece:
    """A part of a row, or of 128: where it begins, how many numbers it has, how many of the first
    an earlier piece has too.
    """

    begin: Any
    size: int
    again: Any = 0


Numbers: TypeAlias = Callable[[Piece], jax.Array]


def each(function: Callable[..., jax.Array], *of: Numbers | jax.Array) -> Numbers:
    """What a function makes of numbers of a row, piece by piece, and of what is the same for all
    pieces.
    """
    return functools.cache(
        lambda piece: function(*(one(piece) if callable(one) else one for one in of))
    )


def wide(x: jax.Array) -> jax.Array:
    """In the dtype in which kernels compute."""
    return x.astype(jnp.float32)


def shared_bytes(*arrays: Any) -> int:
    """What arrays take of shared memory, each in whole KiB."""
    return (
        sum(-(-math.prod(one.shape) * jnp.dtype(one.dtype).itemsize // 2**10) for one in arrays)
        * 2**10
    )


def parts(refs: Sequence[Any], *sizes: int) -> Iterator[Sequence[Any]]:
    """So many references, so many, and so on, and the rest."""
    for size in sizes:
        yield refs[:size]
        refs = refs[size:]
    yield refs


@dataclass(frozen=True)
class Rows:
    """How a warpgroup has rows of so many numbers: one row in pieces, or 128, which lie `apart`, a
    row in each lane.

    >>> rows = Rows.of(1001, [jnp.float32])
    >>> [(piece.begin, piece.size, piece.again) for piece in rows.pieces()][-1]
    (873, 128, 23)
    """

    row: int
    vector: int  # neighbouring numbers in a lane
    turns: int  # in which all pieces of a row come by
    simulated: bool  # by what knows no layouts of registers

    @staticmethod
    def of(
        row: int, loaded: Sequence[Any], kept: Any = jnp.float32, simulated: bool = False
    ) -> "Rows":
        """Rows that are loaded from arrays of some dtypes, and kept in one."""
        vector = WIDEST // max(jnp.dtype(dtype).itemsize for dtype in loaded)
        while vector > 1 and (row % vector or LANES * vector > row >= LANES):
            vector //= 2
        stays = row <= MOST_IN_A_LANE if row < LANES else row * jnp.dtype(kept).itemsize <= LONGEST
        turn = MOST_IN_A_LANE if row < LANES else ENOUGH
        return Rows(row, vector, 1 if stays else -(-row // turn), simulated)

    @property
    def apart(self) -> bool:
        return self.row < LANES

    @property
    def held(self) -> int:
        """How many rows a warpgroup has at a time."""
        return LANES if self.apart else 1

    def pieces(self, turn: Any = 0) -> list[Piece]:
        """What is in registers in a turn."""
        size = self.shape[-1]
        if self.turns > 1:
            many = MOST_IN_A_LANE if self.apart else ENOUGH
            begin = jnp.minimum(turn * many, self.row - many)
            return [
                Piece(begin + at, size, turn * many - begin - at) for at in range(0, many, size)
            ]
        rest = self.row % size
        pieces = [Piece(at, size) for at in range(0, self.row - size + 1, size)]
        return [*pieces, *[Piece(self.row - size, size, size - rest)] * (rest > 0)]

    @functools.cached_property
    def kept(self) -> list[Piece]:
        """The pieces of a row that stays."""
        return self.pieces()

    def over(self, function: Callable[[Piece, Any], Any], carry: Any = None) -> Any:
        """Call a function for every piece with what it gave for the one before."""

        def of_turn(pieces: list[Piece], carry: Any) -> Any:
            return functools.reduce(lambda carry, piece: function(piece, carry), pieces, carry)

        if self.turns == 1:
            return of_turn(self.kept, carry)
        return lax.fori_loop(
            0, self.turns, lambda turn, carry: of_turn(self.pieces(turn), carry), carry
        )

    def load(self, ref: Any, index: Any, now: bool = True) -> Numbers:
        """A row of an array in the GPU's memory, or 128 from there on; what stays is loaded `now`,
        or where it is wanted.
        """

        def of(piece: Piece) -> jax.Array:
            part = ref.at[self._place(index, piece)]
            if self.simulated:
                return part[...]
            return plgpu.load(part, *INDEX, layout=self.layout, optimized=False)

        numbers = functools.cache(of)
        if now and self.turns == 1:
            for piece in self.kept:
                numbers(piece)
        return numbers

    def load_shared(self, ref: Any, index: Any) -> Numbers:
        """A row that is the same for all rows that a warpgroup has."""
        if not self.apart:
            return self.load(ref, index)

        def of(piece: Piece) -> jax.Array:
            part = ref.at[index, pl.ds(piece.begin, piece.size)]
            x = (
                part[...]
                if self.simulated
                else plgpu.load(part, *INDEX, layout=self.layout.reduce(0), optimized=False)
            )
            return self._cast(lax.broadcast_in_dim(x, self.shape, [1]))

        return functools.cache(of)

    def room(self, *dtypes: Any, beside: Sequence[Any] = ()) -> list[Any]:
        """Shared memory for a row of each dtype, if a row does not stay in registers and there is
        enough.
        """
        arrays = [plgpu.SMEM((1, self.row), dtype) for dtype in dtypes]
        wanted = self.turns > 1 and not self.apart
        return arrays if wanted and shared_bytes(*beside, *arrays) <= SHARED else []

    def keep(self, numbers: Numbers, room: Sequence[Any]) -> Numbers:
        """Numbers of a row, put where the passes to come find them, if there is `room`."""
        if not room:
            return numbers
        self.store((room[0], 0, numbers))
        return self.load(room[0], 0)

    def store(self, *writes: tuple[Any, Any, Numbers]) -> None:
        """Write rows of arrays, or 128 from there on, piece by piece: `(array, index, numbers)`."""

        def of(piece: Piece, _: None) -> None:
            for ref, index, numbers in writes:
                place, x = self._place(index, piece), numbers(piece).astype(ref.dtype)
                if self.simulated or not self.apart or STORE is None:
                    ref[place] = x
                else:
                    STORE(ref.at[place], x, optimized=False)

        self.over(of)

    def once(self, numbers: Numbers) -> Numbers:
        """Numbers of a row, and zeros where an earlier piece has them too."""

        def of(piece: Piece) -> jax.Array:
            x = numbers(piece)
            if isinstance(piece.again, int) and not piece.again:
                return x
            return jnp.where(self.places(piece) < piece.begin + piece.again, jnp.zeros_like(x), x)

        return functools.cache(of)

    def total(self, numbers: Numbers) -> jax.Array:
        """The sum of all numbers of a row."""
        return self._reduced(self.once(numbers), jnp.add, jnp.sum, 0.0)

    def highest(self, numbers: Numbers) -> jax.Array:
        """The greatest number of a row."""
        return self._reduced(numbers, jnp.maximum, jnp.max, -jnp.inf)

    def _reduced(self, numbers: Numbers, two: Any, across: Any, start: float) -> jax.Array:
        first = None if self.turns == 1 else self.full(start)
        of_lanes = self.over(
            lambda piece, x: numbers(piece) if x is None else two(x, numbers(piece)), first
        )
        if not self.apart:
            return across(of_lanes)
        return self._cast(lax.broadcast_in_dim(across(of_lanes, axis=1), self.shape, [0]))

    def places(self, piece: Piece) -> Any:
        """The places of a piece's numbers in its row."""
        return self._counted(-1) + piece.begin

    def indices(self, index: Any) -> Any:
        """Which row it is, or which the 128 are."""
        return self._counted(0) + index if self.apart else index

    def full(self, value: float) -> jax.Array:
        """A piece of equal numbers."""
        return self._cast(jnp.full(self.shape, value, jnp.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a piece in registers."""
        return (LANES, self.vector) if self.apart else (LANES * self.vector,)

    @property
    def pitch(self) -> int:
        """From row to row in shared memory, so that lanes with a row each are at different banks of
        it.
        """
        return self.row + self.vector * (self.apart and self.row // self.vector % 2 == 0)

    @property
    def layout(self) -> Any:
        """How a piece lies in the registers of a warpgroup."""
        if self.apart:
            return plgpu.Layout.TCGEN05_TMEM_NATIVE(self.vector)
        return plgpu.Layout.WG_STRIDED(self.shape, vec_size=self.vector)

    def _counted(self, dim: int) -> jax.Array:
        return self._cast(lax.broadcasted_iota(jnp.int32, self.shape, dim % len(self.shape)))

    def _cast(self, x: jax.Array) -> jax.Array:
        return x if self.simulated else plgpu.layout_cast(x, self.layout)

    def _place(self, index: Any, piece: Piece) -> tuple[Any, Any]:
        return (pl.ds(index, LANES) if self.apart else index), pl.ds(piece.begin, piece.size)

    def flat(self, x: jax.Array, groups: int = 1, **how: Any) -> jax.Array:
        """Groups of rows as one array of rows, of which there are as many in each as a warpgroup
        has.
        """
        x = x.reshape(groups, -1, self.row)
        few = max(self.held - x.shape[1], 0)
        x = jnp.pad(x, ((0, 0), (0, few), (0, 0)), **how) if few else x
        return x.reshape(-1, self.row)

    def unflat(self, x: jax.Array, shape: tuple[int, ...], groups: int = 1) -> jax.Array:
        """What `flat` was given."""
        return x.reshape(groups, -1, self.row)[:, : math.prod(shape[:-1]) // groups].reshape(shape)


def over_rows(
    kernel: Any, rows: Rows, groups: int, count: int, outs: Any, room: Sequence[Any] = ()
) -> Any:
    """Call `kernel(group, indices, *refs)` for blocks of rows of each group; the last may have some
    of the one before.

    The references are to operands, results, and `room` in shared memory.
    """
    block = min(max(ENOUGH // rows.row, 1), MOST, count) if rows.held == 1 else 1
    step = block * rows.held
    blocks = -(-count // step)

    def of_block(*refs: Any) -> None:
        group = lax.axis_index("group")
        begin = group * count + jnp.minimum(lax.axis_index("block") * step, count - step)
        kernel(group, [begin + k for k in range(block)], *refs)

    return call(
        of_block,
        kernel.__name__,
        outs,
        rows.simulated,
        scratch_types=room,
        grid=(groups, blocks),
        grid_names=("group", "block"),
    )


def refuses(task: Task) -> str | None:
    """Why a kernel for rows does not take a task, if it does not."""
    if task.summed:
        return (
            "adds up nothing between devices, and the last dim is split over "
            f"`{', '.join(task.summed)}`"
        )
    if reason := refuses_device(task):
        return reason
    odd = {str(x.dtype) for x in task.arrays.values()} - {
        "float32",
        "bfloat16",
        "float16",
        "bool",
        "int32",
        "int8",
    }
    return f"takes float32, bfloat16 and float16; not {', '.join(sorted(odd))}" if odd else None
