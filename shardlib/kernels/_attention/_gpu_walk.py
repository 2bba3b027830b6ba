"""What our kernels for attention on GPUs of the Hopper generation walk over, and with what memory.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from shardlib.kernels._attention._gpu_band import Band, Columns
from shardlib.kernels._attention._reference import Attention

ROWS = 64  # of a warpgroup: the fewest that the matrix unit multiplies
GROUPS = 2  # warpgroups that compute
TILE = GROUPS * ROWS  # rows of a program; lengths are padded to multiples
WIDTH = 64  # numbers of 16 bits that a row has in a step: sizes are padded to multiples
KIB = 2**10
SHARED = 224 * KIB  # bytes of shared memory; the remainder is for barriers and Mosaic
MOST_STAGES = 4

QUERIES, KEYS = "queries", "keys"
# What belongs to queries, and what to keys: matrices, and then one number for each.
MATRICES = {"q": QUERIES, "y_gradient": QUERIES, "k": KEYS, "v": KEYS}
VECTORS = {"lse": QUERIES, "delta": QUERIES, "query_segments": QUERIES, "key_segments": KEYS}


class Result(NamedTuple):
    """An array that a kernel makes.

    Attributes:
        shape: of the array.
        dtype: likewise.
        like: the matrix whose rows its rows are like; None for one number for each row.
    """

    shape: tuple[int, ...]
    dtype: Any
    like: str | None = None


class Buffer(NamedTuple):
    """Shared memory of a program.

    Those of three dims and more are laid out for the matrix unit.
    """

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size_bytes(self) -> int:
        """What it takes, up to where the next one may start."""
        size = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize
        return -(-size // KIB) * KIB

    def type(self) -> Any:
        """The buffer as Pallas allocates it."""
        if len(self.shape) < 3:
            return plgpu.SMEM(self.shape, self.dtype)
        # The layout that the matrix unit and the copies agree on.
        transforms = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(2 * WIDTH))
        return plgpu.SMEM(self.shape, self.dtype, transforms=transforms)


@dataclass(frozen=True, eq=False)
class Walk:
    """The rows and the columns of a kernel, and what it reads and makes.

    Attributes:
        attention: which attention.
        arrays: by the names of `MATRICES` and `VECTORS`, padded; `starts`, and `sinks` if there
            are any.
        side: of which the rows are, queries or keys; columns are the other ones.
        block: how many columns a block has.
        real_columns: how many columns are not padding.
        results: what the kernel makes.
        simulated: whether an interpreter runs it.
    """

    attention: Attention
    arrays: dict[str, jax.Array]
    side: str
    block: int
    real_columns: int
    results: Sequence[Result]
    simulated: bool

    @property
    def rows_are_keys(self) -> bool:
        """Whether rows are keys and columns queries, and not the other way round."""
        return self.side == KEYS

    def _names(self, sides: dict[str, str], is_row: bool) -> list[str]:
        """The arrays that there are of those of a kind, of the rows or of the columns."""
        names = []
        for name in self.arrays:
            if name in sides and (sides[name] == self.side) == is_row:
                names.append(name)
        return names

    @property
    def row_matrices(self) -> list[str]:
        """The matrices of which a program has some rows, in shared memory."""
        return self._names(MATRICES, True)

    @property
    def row_vectors(self) -> list[str]:
        """The arrays that have a number for each row, which is in registers."""
        return self._names(VECTORS, True)

    @property
    def passing(self) -> list[str]:
        """The arrays that pass by, in the order of the ring's buffers."""
        return self._names(MATRICES, False) + self._names(VECTORS, False)

    @property
    def has_segments(self) -> bool:
        """Whether rows see columns of their own segment only."""
        return "query_segments" in self.arrays

    @property
    def group(self) -> int:
        """How many query heads a key head serves."""
        return self.arrays["q"].shape[2] // self.arrays["k"].shape[2]

    @property
    def grid(self) -> dict[str, int]:
        """How many programs there are along each dim.

        Neighbours have other heads and the same rows, and thus as many blocks to compute.
        """
        sequences, length, heads, _ = self.arrays[self.row_matrices[0]].shape
        return {"head": heads, "tile": length // TILE, "sequence": sequences}

    @property
    def band(self) -> Band:
        """Which columns a row sees by the mask."""
        return Band.of_mask(self.attention.mask, self.rows_are_keys)

    @property
    def columns(self) -> Columns:
        """The columns, in blocks of which none is all padding.

        Queries that are padding have no share in anything, and need no mask.
        """
        count = -(-self.real_columns // self.block)
        if self.rows_are_keys:
            return Columns(self.block, count, self.block * count)
        return Columns(self.block, count, self.real_columns)

    @property
    def stages(self) -> int:
        """How many blocks may be on their way at once, in the shared memory that rows leave."""
        # One block may come while another is computed, but a single one must always fit: sizes of
        # heads are bounded so that it does.
        room = SHARED
        for buffer in self.row_buffers + self.staging:
            room -= buffer.size_bytes
        stages = min(MOST_STAGES, self.columns.count * self.group)
        while stages > 1 and sum(x.size_bytes for x in self.ring_buffers(stages)) > room:
            stages -= 1
        return stages

    @property
    def row_buffers(self) -> list[Buffer]:
        """Shared memory for the rows of each matrix."""
        return [self._buffer(name, GROUPS, ROWS) for name in self.row_matrices]

    def ring_buffers(self, stages: int) -> list[Buffer]:
        """Shared memory for so many blocks of what passes by."""
        return [self._buffer(name, stages, self.block) for name in self.passing]

    @property
    def staging(self) -> list[Buffer]:
        """Shared memory for results that cannot leave through that of rows."""
        buffers = []
        for result in self.results:
            if result.like is None:
                buffers.append(Buffer((GROUPS, ROWS), result.dtype))
            elif not self.leaves_through_rows(result):
                buffers.append(Buffer((GROUPS, ROWS, result.shape[-1]), result.dtype))
        return buffers

    def leaves_through_rows(self, result: Result) -> bool:
        """Whether a result is copied to memory from where the rows were that it is like."""
        if result.like is None:
            return False
        return self.arrays[result.like].shape[-1] == result.shape[-1]

    def _buffer(self, name: str, copies: int, rows: int) -> Buffer:
        """Shared memory for some rows of an array, several times over."""
        x = self.arrays[name]
        if name in VECTORS:
            return Buffer((copies, rows), x.dtype)
        return Buffer((copies, rows, x.shape[-1]), x.dtype)
