"""Along which dims an array of a traced loss holds examples, and how that changes with its
shape.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Coupling:
    """A reduction over examples, and where something other than a mean is made of it."""

    operation: str
    line: str
    reduced: str  # the line of the reduction


Factor = tuple[int, bool]
"""A size that a dim is a multiple of, and whether it counts examples."""


Rows = tuple[tuple[Factor, ...], ...]
"""For each dim the factors of its size, the slowest first."""


@dataclass(frozen=True)
class Fact:
    """What is known of a value: nothing of these, if it does not depend on the examples."""

    rows: Rows | None = None  # it holds examples along some dims
    single: bool = False  # it belongs to one example, of which a loop takes one after the other
    total: str = ""  # the kind of reduction over examples that it is: "sum", "max" or "min"
    scaled: bool = True  # of a sum, whether it has been divided or multiplied
    reduced: str = ""  # the line of that reduction
    coupled: Coupling | None = None

    @property
    def varies(self) -> bool:
        return self.rows is not None or self.single

    @property
    def dims(self) -> frozenset[int]:
        """The dims that hold examples."""
        if self.rows is None:
            return frozenset()
        return frozenset(
            dim for dim, factors in enumerate(self.rows) if any(row for _, row in factors)
        )

    @property
    def several(self) -> frozenset[int]:
        """The dims that hold more than one example; one alone is not paired with others."""
        if self.rows is None:
            return frozenset()
        return frozenset(
            dim
            for dim, factors in enumerate(self.rows)
            if any(row and size > 1 for size, row in factors)
        )


CONSTANT = Fact()


def with_examples(shape: Sequence[int]) -> Fact:
    """The fact of an array of a batch: its first dim holds the examples."""
    if not shape:
        return Fact(single=True)
    return Fact(rows=(((shape[0], True),), *plain(shape[1:])))


def joined(old: Fact, new: Fact, over_examples: bool) -> Fact:
    """What a value is that may be either; of a loop over examples, what it carries from one to the
    next.
    """
    if old.coupled or new.coupled:
        return old if old.coupled else new
    if over_examples and new.varies and old == CONSTANT:
        # Assume that examples are added up, and see in the next round whether that holds.
        return Fact(total="sum", scaled=False)
    if new == CONSTANT or old.total:
        return old
    if new.total or old == CONSTANT or old.rows is None:
        return new
    if new.rows is None or new.dims <= old.dims:
        return old
    return new


def one_of(fact: Fact) -> Fact:
    """What a loop gets of an array in each round."""
    if fact.rows is None:
        return fact
    return with_rows(fact, fact.rows[1:])


def stacked(fact: Fact, length: int, over_examples: bool) -> Fact:
    """What a loop makes of a value of each round."""
    if fact.coupled or fact.total or not fact.varies:
        return fact
    if over_examples and fact.single:
        rest = fact.rows or ()
        return Fact(rows=(((length, True),), *rest))
    if fact.rows is None:
        return fact
    return replace(fact, rows=(((length, False),), *fact.rows))


def with_rows(fact: Fact, rows: Rows | None) -> Fact:
    """The fact with its examples elsewhere; without a dim for them it is of one example."""
    if fact.rows is None:
        return fact
    if rows is None:  # lost from sight
        return CONSTANT
    if any(map(has_row, rows)):
        return replace(fact, rows=rows)
    had_rows = bool(fact.dims) or fact.single
    return Fact(single=had_rows)


def reshaped(rows: Rows | None, shape: Sequence[int]) -> Rows | None:
    """The same factors in other dims, or None where they do not fall into dims."""
    if rows is None:
        return None
    left = [factor for factors in rows for factor in factors if factor != (1, False)]
    found: list[tuple[Factor, ...]] = []
    for size in shape:
        factors: list[Factor] = []
        here = 1
        while here < size and left:
            length, row = left.pop(0)
            wanted = size // here
            if length > wanted:
                if length % wanted:
                    return None
                left.insert(0, (length // wanted, row))
                length = wanted
            elif size % (here * length):
                return None
            factors.append((length, row))
            here *= length
        if size == 1 and left and left[0] == (1, True):
            factors.append(left.pop(0))
        found.append(tuple(factors) or ((size, False),))
    return tuple(found)


def plain(shape: Sequence[int]) -> Rows:
    return tuple(((size, False),) for size in shape)


def factors_of(fact: Fact, dim: int, shape: Sequence[int]) -> tuple[Factor, ...]:
    return ((shape[dim], False),) if fact.rows is None else fact.rows[dim]


def has_row(factors: Sequence[Factor]) -> bool:
    return any(row for _, row in factors)


def resized(fact: Fact, aval: Any) -> Fact:
    """The fact of an array of another size in the same dims."""
    shape = getattr(aval, "shape", ())
    if fact.rows is None or len(fact.rows) != len(shape):
        return fact
    rows = [
        factors
        if math.prod(size for size, _ in factors) == length
        else ((length, has_row(factors)),)
        for factors, length in zip(fact.rows, shape, strict=True)
    ]
    return replace(fact, rows=tuple(rows))
