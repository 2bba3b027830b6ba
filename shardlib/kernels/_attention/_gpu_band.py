"""Which blocks of columns some rows of scores see, where positions may be traced.

Scores have queries along their rows and keys along their columns, or the other way round. By a band
a row sees the columns for which `column - row`, in positions, is within its bounds:

    columns ->         first     whole_first   whole_last     last
    rows    |            | partly     |    whole   |   partly   |
            v  nothing   |  seen      |    seen    |    seen    |   nothing

Bounds and positions may be any whole numbers of 32 bits. The results do not overflow.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from shardlib.kernels._attention._mask import Mask

GREATEST = 2**31 - 1  # whole number of 32 bits
MARGIN = 2**12  # more than the rows and the columns of a block


class Part(NamedTuple):
    """Neighbouring blocks of columns, from `begin` to before `end`.

    They are whole if all rows see all of their columns: then nothing is masked.
    """

    begin: Any
    end: Any
    is_whole: bool


class Blocks(NamedTuple):
    """The blocks of columns of which some rows see anything, from `begin` to before `end`.

    The parts are these blocks, one part after the other; a part may be empty.
    """

    begin: Any
    end: Any
    parts: list[Part]


class Span(NamedTuple):
    """Some neighbouring rows, and how far they are from the columns."""

    rows: int
    # The position of the first row, less that of the first of all columns; it is traced.
    distance: Any


@dataclass(frozen=True)
class Columns:
    """All columns, in blocks.

    The last block may have some that are padding, which no row sees.
    """

    block: int  # how many a block has
    count: int  # of blocks
    real: int  # how many columns are not padding


@dataclass(frozen=True)
class Band:
    """The least and the greatest `column - row` that is seen; None where there is no bound.

    >>> Band.of_mask(Mask(left=4, right=0), rows_are_keys=True)
    Band(lower=0, upper=4)
    """

    lower: int | None
    upper: int | None

    @classmethod
    def of_mask(cls, mask: Mask, rows_are_keys: bool) -> "Band":
        """The band of a mask, whose bounds are of `key - query`.

        Where rows are keys and columns are queries, the bounds change places and signs.
        """
        left, right = mask.left, mask.right
        if rows_are_keys:
            left, right = right, left
        return cls(None if left is None else -left, right)

    def blocks(self, span: Span, columns: Columns, whole_parts: bool) -> Blocks:
        """The blocks that some rows see, in order.

        Args:
            span: the rows.
            columns: the columns.
            whole_parts: whether blocks that all rows see whole are a part of their own.
        """
        first = self._lower_block(span, columns, 0)
        last = self._upper_block(span, columns, span.rows - 1)
        first = jnp.minimum(first, columns.count)
        last = jnp.clip(last, first, columns.count)
        parts = [Part(first, last, False)]
        if whole_parts:
            parts = self._parts(span, columns, first, last)
        return Blocks(first, last, parts)

    def _parts(self, span: Span, columns: Columns, first: Any, last: Any) -> list[Part]:
        """The blocks from the first to the last in up to three parts; the middle one is whole.

        There is no part before it without a lower bound, and none after it without an upper bound
        and without padding.
        """
        parts = []
        whole_first, whole_last = first, last
        if self.lower is not None:
            reached = self._lower_block(span, columns, span.rows - 1 + columns.block - 1)
            whole_first = jnp.clip(reached, first, last)
            parts.append(Part(first, whole_first, False))
        if self.upper is not None:
            whole_last = self._upper_block(span, columns, 1 - columns.block)
        if columns.real < columns.block * columns.count:
            whole_last = jnp.minimum(whole_last, columns.real // columns.block)
        if whole_last is last:
            return [*parts, Part(whole_first, last, True)]
        whole_last = jnp.clip(whole_last, whole_first, last)
        return [*parts, Part(whole_first, whole_last, True), Part(whole_last, last, False)]

    def _lower_block(self, span: Span, columns: Columns, reach: int) -> Any:
        """The block of the column that is `reach` after the lower bound of the first row."""
        if self.lower is None:
            return jnp.int32(0)
        return _block_of(_sum(span.distance, self.lower) + reach, columns.block)

    def _upper_block(self, span: Span, columns: Columns, reach: int) -> Any:
        """The block after that of the column that is `reach` after the first row's upper bound."""
        if self.upper is None:
            return jnp.int32(columns.count)
        return _block_of(_sum(span.distance, self.upper) + reach + columns.block, columns.block)


def _sum(distance: Any, bound: int) -> Any:
    """The sum of a traced distance and a bound, clipped so that up to `MARGIN` can be added."""
    least, greatest = -GREATEST - min(bound, 0), GREATEST - MARGIN - max(bound, 0)
    return jnp.clip(distance, least, greatest) + bound


def _block_of(column: Any, block: int) -> Any:
    """The block of a column; the first one for columns before it."""
    return lax.div(jnp.maximum(column, 0), jnp.int32(block))
