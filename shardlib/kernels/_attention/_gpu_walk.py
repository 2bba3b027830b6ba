"""What our kernels for attention on GPUs of the Hopper generation walk over, and with what memory.

A program has some neighbouring rows of the scores of one head: queries, or keys for gradients to
keys. Each of its first warpgroups has `ROWS` of them, whose operands stay in shared memory. The
last warpgroup copies the operands of blocks of columns, one block after the other:

    warpgroup 0   64 rows          ring: k v | k v | ...   <-  warpgroup 2, from memory
    warpgroup 1   64 rows

    kernel                rows      columns                   results, from registers
    attention_forward     queries   keys, values              outputs, log-sum-exps
    attention_dq          queries   keys, values              the gradient to queries
    attention_dkv         keys      queries, their gradient   the gradients to keys and values

Blocks that the band of the mask hides are neither copied nor computed, and only those of which it
hides a part are masked. Where rows are keys, the columns are those of all query heads that the key
head serves, head by head.
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
SHARED_BYTES = 224 * KIB  # of shared memory; the remainder is for barriers and Mosaic
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
        like: the matrix for whose rows it has rows; None if it has one number for each row.
    """

    shape: tuple[int, ...]
    dtype: Any
    like: str | None = None


class Buffer(NamedTuple):
    """A part of a program's shared memory.

    With three dims or more it is laid out for the matrix unit.
    """

    shape: tuple[int, ...]
    dtype: Any

    @property
    def size_bytes(self) -> int:
        """The bytes that it takes, up to where the next buffer may start."""
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
    """The rows and the columns of a kernel, and the arrays that it reads and makes.

    Attributes:
        attention: which attention.
        arrays: by the names of `MATRICES` and `VECTORS`, padded; `starts`, and `sinks` if there
            are any.
        side: whether rows are `QUERIES` or `KEYS`; columns are the other ones.
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
        """The names of arrays that belong to rows or to columns, of those named in `sides`."""
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
        """The arrays with one number for each row, which are in registers."""
        return self._names(VECTORS, True)

    @property
    def column_arrays(self) -> list[str]:
        """The arrays of the columns, in the order of the ring's buffers."""
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

        Neighbours have different heads and the same rows, so they compute equally many blocks.
        """
        sequences, length, heads, _ = self.arrays[self.row_matrices[0]].shape
        return {"head": heads, "tile": length // TILE, "sequence": sequences}

    @property
    def band(self) -> Band:
        """Which columns a row sees by the mask."""
        return Band.of_mask(self.attention.mask, self.rows_are_keys)

    @property
    def columns(self) -> Columns:
        """The columns, in blocks none of which is all padding.

        Queries that are padding add nothing to gradients, and need no mask; see `_gpu._gradients`.
        """
        count = -(-self.real_columns // self.block)
        if self.rows_are_keys:
            return Columns(self.block, count, self.block * count)
        return Columns(self.block, count, self.real_columns)

    @property
    def stages(self) -> int:
        """How many blocks the ring has buffers for, in the shared memory that rows leave."""
        # One buffer always fits, since sizes of heads are bounded. With more of them, blocks are
        # copied while another one is computed.
        room = SHARED_BYTES
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
        """Shared memory for so many blocks of columns."""
        return [self._buffer(name, stages, self.block) for name in self.column_arrays]

    @property
    def staging(self) -> list[Buffer]:
        """Shared memory for results that are not staged where rows were."""
        buffers = []
        for result in self.results:
            if result.like is None:
                buffers.append(Buffer((GROUPS, ROWS), result.dtype))
            elif not self.is_staged_in_rows(result):
                buffers.append(Buffer((GROUPS, ROWS, result.shape[-1]), result.dtype))
        return buffers

    def is_staged_in_rows(self, result: Result) -> bool:
        """Whether a result is copied to memory from the buffer of the rows that it is like.

        They have been used up by then, and the buffer is of the right size.
        """
        if result.like is None:
            return False
        return self.arrays[result.like].shape[-1] == result.shape[-1]

    def _buffer(self, name: str, copies: int, rows: int) -> Buffer:
        """Shared memory for `copies` times some rows of an array."""
        x = self.arrays[name]
        if name in VECTORS:
            return Buffer((copies, rows), x.dtype)
        return Buffer((copies, rows, x.shape[-1]), x.dtype)
