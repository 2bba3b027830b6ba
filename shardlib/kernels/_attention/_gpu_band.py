"""Which blocks of columns some rows of scores see, where positions are known to the program only.

Scores have queries along their rows and keys along their columns, or the other way round. A band
lets a row see the columns of which `column - row`, in positions, is within its bounds:

    columns ->         first     whole_first   whole_last     last
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
    """Neighbouring blocks of columns, from `begin` to before `end`.

    They are whole if all rows see all of their columns, so that nothing need be masked.
    """

    begin: Any
    end: Any
    is_whole: bool


class Blocks(NamedTuple):
    """The blocks of columns that some rows see anything of, from `begin` to before `end`.

    Parts are neighbours that together are these blocks; a part may be empty.
    """

    begin: Any
    end: Any
    parts: list[Part]


class Span(NamedTuple):
    """Some neighbouring rows, and where they stand to the columns.

    Positions are known to the running program only, and so is the distance.
    """

    rows: int
    distance: Any  # the position of the first row, less that of the first column of all


@dataclass(frozen=True)
class Columns:
    """The columns that there are, block by block.

    The last block may have some that are padding, and that nobody sees.
    """

    block: int  # how many a block has
    count: int  # of blocks
    real: int  # how many columns are not padding


@dataclass(frozen=True)
class Band:
    """The least and the greatest `column - row` that is seen; None is no bound.

    >>> Band.of_mask(Mask(left=4, right=0), rows_are_keys=True)
    Band(lower=0, upper=4)
    """

    lower: int | None
    upper: int | None

    @classmethod
    def of_mask(cls, mask: Mask, rows_are_keys: bool) -> "Band":
        """The band of a mask, which speaks of `key - query`.

        Where rows are keys and columns are queries, its bounds change places and signs.
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
            whole_parts: whether blocks that are seen as a whole are worth a part of their own.
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
        """The blocks from the first to the last in up to three parts, the middle one seen whole.

        Without a bound on a side, and without padding, there is no part on that side.
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
    """The sum of a traced number and a known one, or the nearest to which more can be added."""
    least, greatest = -GREATEST - min(bound, 0), GREATEST - MARGIN - max(bound, 0)
    return jnp.clip(distance, least, greatest) + bound


def _block_of(column: Any, block: int) -> Any:
    """The block of a column; the first one for columns before it."""
    return lax.div(jnp.maximum(column, 0), jnp.int32(block))
