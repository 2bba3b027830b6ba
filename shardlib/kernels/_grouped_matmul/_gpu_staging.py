"""How a kernel for GPUs writes some rows of a tile: from registers, through shared memory.

A tile goes to memory in quarters. Where all rows of a quarter belong to the tile's group it is
copied as a whole. Elsewhere as many rows as a sum of powers of two are, each power by a copy:

    quarter of 64 rows, of which rows 3 to 24 count:   copies of 16, 4 and 1 rows, from 3, 19, 23
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
    """Some columns of an array from a row on."""

    array: Any
    first: jax.Array
    columns: Any

    def part(self, offset: Any, count: int) -> Any:
        """A number of rows, `offset` rows after the first."""
        return self.array.at[pl.ds(self.first + offset, count), self.columns]


@dataclass(frozen=True)
class Staging:
    """Shared memory of a warpgroup, from which results are copied to memory.

    - `swizzled`: laid out such that registers reach it fast; it is copied as a whole.
    - `plain`: laid out row by row, so that any rows of it can be copied.
    """

    swizzled: Any
    plain: Any

    def write(self, z: jax.Array, out: Any) -> None:
        """Copy a quarter of a result to memory."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # what is still on its way from here
        self.swizzled[...] = z.astype(self.swizzled.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.swizzled, out)

    def write_rows(self, z: jax.Array, out: SomeColumns, begin: jax.Array, end: jax.Array) -> None:
        """Copy the rows of a quarter from `begin` to `end`, of which it may have some or none."""
        whole = (begin <= 0) & (end >= QUARTER)
        pl.when(whole)(lambda: self.write(z, out.part(0, QUARTER)))
        begin, end = jnp.maximum(begin, 0), jnp.minimum(end, QUARTER)

        @pl.when(jnp.logical_not(whole) & (begin < end))
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.plain[...] = z.astype(self.plain.dtype)
            plgpu.commit_smem()
            # A copy has a fixed length: any number of rows is a sum of powers of two.
            first, count = begin, QUARTER // 2
            while count:
                is_copied = ((end - begin) & count) != 0

                @pl.when(is_copied)
                def _(first: jax.Array = first, count: int = count) -> None:
                    rows = self.plain.at[pl.ds(first, count)]
                    plgpu.copy_smem_to_gmem(rows, out.part(first, count))

                first = first + jnp.where(is_copied, count, 0)
                count //= 2
