"""How a kernel for GPUs writes some rows of a tile: from registers, through shared memory.

A tile is copied to memory in quarters. A quarter whose rows all belong to the tile's group is
copied as a whole. Of another one the group's rows are copied, in several copies whose numbers of
rows are powers of two, since a copy has a fixed length:

    of a quarter's 64 rows, 3 to 23 are the group's:   copies of 16, 4 and 1 rows, from 3, 19, 23
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

QUARTER = 64  # rows and columns that are written at a time


@dataclass(frozen=True)
class SomeColumns:
    """Some columns of an array, from its row `first` on."""

    array: Any
    first: jax.Array
    columns: Any

    def part(self, offset: Any, count: int) -> Any:
        """`count` rows, from `offset` rows after the first."""
        return self.array.at[pl.ds(self.first + offset, count), self.columns]


@dataclass(frozen=True)
class Staging:
    """Shared memory of a warpgroup, from which results are copied to memory.

    - `swizzled`: laid out so that registers are written to it fast; it is copied as a whole.
    - `plain`: laid out row by row, so that any of its rows can be copied.
    """

    swizzled: Any
    plain: Any

    def write(self, z: jax.Array, out: Any) -> None:
        """Copy a quarter of a result to memory."""
        # Earlier copies from shared memory must have read it.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.swizzled[...] = z.astype(self.swizzled.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.swizzled, out)

    def write_rows(self, z: jax.Array, out: SomeColumns, begin: jax.Array, end: jax.Array) -> None:
        """Copy the rows of a quarter from `begin` to before `end`.

        Both may be outside the quarter, of which then only some rows are copied, or none.
        """
        whole = (begin <= 0) & (end >= QUARTER)
        pl.when(whole)(lambda: self.write(z, out.part(0, QUARTER)))
        begin, end = jnp.maximum(begin, 0), jnp.minimum(end, QUARTER)

        @pl.when(jnp.logical_not(whole) & (begin < end))
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.plain[...] = z.astype(self.plain.dtype)
            plgpu.commit_smem()
            # The bits of the number of rows say which copies are made.
            first, count = begin, QUARTER // 2
            while count:
                is_copied = ((end - begin) & count) != 0

                @pl.when(is_copied)
                def _(first: jax.Array = first, count: int = count) -> None:
                    rows = self.plain.at[pl.ds(first, count)]
                    plgpu.copy_smem_to_gmem(rows, out.part(first, count))

                first = first + jnp.where(is_copied, count, 0)
                count //= 2
