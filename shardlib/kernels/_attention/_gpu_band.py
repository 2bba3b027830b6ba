"""Which blocks of columns some rows of scores see, where positions are known to the program only.

Scores have queries along their rows and keys along their columns, or the other way round. A band
lets a row see the columns of which `column - row`, in positions, is within its bounds:

    columns ->         first     full_first    full_last      last
    rows    |            | partly     |    whole   |   partly   |
            v  nothing   |  seen      |    seen    |    seen    |   nothing

Bounds and positions may be anywhere among whole numbers of 32 bits, and no sum here leaves them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from shardlib.kernels._attention._mask import Mask

GREATEST = 2**31 - 1
MARGIN = 2**12  # more than the rows and the columns of a block


class Part(NamedTuple):
    """Neighbouring blocks of columns, and whether all rows see all of them."""

    begin: Any
    end: Any
    is_whole: bool


class Blocks(NamedTuple):
    """The blocks of columns that some rows see anything of, and their parts."""

    begin: Any
    end: Any
    parts: list[Part]


class Span(NamedTuple):
    """Some neighbouring rows, and where they stand to the columns."""

    rows: int
    distance: Any  # the position of the first row, less that of the first column of all


class Columns(NamedTuple):
    """The columns that there are, block by block."""

    block: int  # how many a block has
    count: int  # of blocks
    real: int  # how many columns are not padding


@dataclass(frozen=True)
class Band:
    """The least and the greatest `column - row` that is seen; None is no bound."""

    lower: int | None
    upper: int | None

    @classmethod
    def of_mask(cls, mask: Mask, rows_are_keys: bool) -> "Band":
        """The band of a mask, which speaks of `key - query`."""
        left, right = mask.left, mask.right
        if rows_are_keys:
            left, right = right, left
        return cls(None if left is None else -left, right)

    def blocks(self, span: Span, columns: Columns, whole_parts: bool) -> Blocks:
        """The blocks that some rows see, in order.

        Args:
            span: the rows.
            columns: the columns.
            whole_parts: whether blocks that are seen as a whole are worth a part of their own.
        """
        first = self._lower_block(span, columns, 0)
        last = self._upper_block(span, columns, span.rows - 1)
        first = jnp.minimum(first, columns.count)
        last = jnp.clip(last, first, columns.count)
        if not whole_parts:
            return Blocks(first, last, [Part(first, last, False)])
        parts = []
        full_first = first
        if self.lower is not None:
            reached = self._lower_block(span, columns, span.rows - 1 + columns.block - 1)
            full_first = jnp.clip(reached, first, last)
            parts.append(Part(first, full_first, False))
        full_last = last
        if self.upper is not None:
            full_last = self._upper_block(span, columns, 1 - columns.block)
        if columns.real < columns.block * columns.count:
            full_last = jnp.minimum(full_last, columns.real // columns.block)
        if full_last is last:
            return Blocks(first, last, [*parts, Part(full_first, last, True)])
        full_last = jnp.clip(full_last, full_first, last)
        parts += [Part(full_first, full_last, True), Part(full_last, last, False)]
        return Blocks(first, last, parts)

    def _lower_block(self, span: Span, columns: Columns, reach: int) -> Any:
        """The block of the column at the lower bound of the first row, moved by `reach`."""
        if self.lower is None:
            return jnp.int32(0)
        return _block_of(_sum(span.distance, self.lower) + reach, columns.block)

    def _upper_block(self, span: Span, columns: Columns, reach: int) -> Any:
        """The block behind that of the column at the upper bound of the first row, moved by
        `reach`.
        """
        if self.upper is None:
            return jnp.int32(columns.count)
        return _block_of(_sum(span.distance, self.upper) + reach + columns.block, columns.block)


def _sum(distance: Any, bound: int) -> Any:
    """The sum of a traced number and a known one, or the nearest that leaves a margin."""
    least, greatest = -GREATEST + MARGIN, GREATEST - MARGIN
    return jnp.clip(distance, least - min(bound, 0), greatest - max(bound, 0)) + bound


def _block_of(column: Any, block: int) -> Any:
    """The block of a column; the first one for columns before it."""
    return lax.div(jnp.maximum(column, 0), jnp.int32(block))
