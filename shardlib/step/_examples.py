"""Along which dims an array of a traced loss holds examples, and how that changes with its shape.

A dim may hold examples together with something else, after a reshape. So each dim is a product of
factors, the slowest first, of which each counts examples or does not:

    [8 examples, 16]       rows (((8, True),), ((16, False),))
    reshaped to [128]      rows (((8, True), (16, False)),)
    and to [8, 4, 4]       rows (((8, True),), ((4, False),), ((4, False),))

A `Fact` has these rows, or says that the value is a total over examples, belongs to a single one,
or couples them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Coupling:
    """A reduction over examples, and where something other than a mean is made of it.

    Lines are places in the user's code as text, and empty where they are unknown.
    """

    operation: str  # the name of the primitive that takes the reduction
    line: str  # the line of that operation
    reduced: str  # the line of the reduction


Factor = tuple[int, bool]
"""A size that a dim is a multiple of, and whether it counts examples."""


Rows = tuple[tuple[Factor, ...], ...]
"""For each dim the factors of its size, the slowest first."""


@dataclass(frozen=True)
class Fact:
    """What is known of a value: nothing of these, if it does not depend on the examples.

    A value has rows, is single, is a total, or is coupled. Rows and `single` together are a value
    inside a loop over examples that has dims of other examples besides.
    """

    rows: Rows | None = None  # it holds examples along some dims
    moved: bool = False  # its examples are in another order than that of the batch
    single: bool = False  # it belongs to one example, of which a loop takes one after the other
    total: str = ""  # the kind of reduction over examples that it is: "sum", "max" or "min"
    scaled: bool = True  # of a sum, whether it has been divided or multiplied
    summed: int = 0  # how many elements a sum is of, if that is known
    divisor: float = 0.0  # the constant by which a sum was divided, if that is all that was done
    reduced: str = ""  # the line of that reduction
    coupled: Coupling | None = None

    @property
    def varies(self) -> bool:
        """Whether the value differs from example to example."""
        return self.rows is not None or self.single

    @property
    def dims(self) -> frozenset[int]:
        """The dims that hold examples."""
        if self.rows is None:
            return frozenset()
        return frozenset(dim for dim, factors in enumerate(self.rows) if has_row(factors))

    @property
    def several(self) -> frozenset[int]:
        """The dims that hold more than one example.

        A dim of a single example couples nothing, whatever it is paired with.
        """
        dims: set[int] = set()
        for dim, factors in enumerate(self.rows or ()):
            if any(row and size > 1 for size, row in factors):
                dims.add(dim)
        return frozenset(dims)


CONSTANT = Fact()


def with_examples(shape: Sequence[int]) -> Fact:
    """The fact of an array of a batch: its first dim holds the examples.

    A scalar has no such dim, and belongs to one example.
    """
    if not shape:
        return Fact(single=True)
    return Fact(rows=(((shape[0], True),), *plain(shape[1:])))


def joined(old: Fact, new: Fact, over_examples: bool) -> Fact:
    """What a value is that may be either, as the result of a branch or the carry of a loop.

    The fact that says more wins: coupled before total, and total before rows. Between two facts
    with rows, `new` wins only if it has dims of examples that `old` lacks. `over_examples` says
    that the value is carried by a loop that takes one example after the other.
    """
    if old.coupled:
        return old
    if new.coupled:
        return new
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
    """What a loop gets of a scanned array in each round: the array without its dim 0.

    If dim 0 was the only one with examples, the element belongs to a single one.
    """
    if fact.rows is None:
        return fact
    return with_rows(fact, fact.rows[1:])


def stacked(fact: Fact, length: int, over_examples: bool) -> Fact:
    """What a loop stacks up of the values of all its rounds, along a new dim 0 of size `length`.

    The new dim counts examples if the loop takes one after the other, and rounds otherwise.
    """
    if fact.coupled or fact.total or not fact.varies:
        return fact
    if over_examples and fact.single:
        other_dims = fact.rows or ()
        return Fact(rows=(((length, True),), *other_dims))
    if fact.rows is None:
        return fact
    return replace(fact, rows=(((length, False),), *fact.rows))


def with_rows(fact: Fact, rows: Rows | None) -> Fact:
    """The fact with its examples along other dims.

    If no dim of `rows` holds them, the value belongs to a single example, provided that it had
    dims of them before. If `rows` is None, the examples are lost from sight, and the value is
    taken for a constant: in doubt there is no warning.
    """
    if fact.rows is None:
        return fact
    if rows is None:
        return CONSTANT
    if any(map(has_row, rows)):
        return replace(fact, rows=rows)
    # An array of the batch whose dims of examples are all gone is of one of them.
    had_rows = bool(fact.dims) or fact.single
    return Fact(single=had_rows)


def reshaped(rows: Rows | None, shape: Sequence[int]) -> Rows | None:
    """The same factors in the dims of another shape, or None where they do not fall into dims.

    The factors of all dims, the slowest first, are dealt out to the new dims in order. A factor
    that is larger than what a dim still needs is split, its slower part first.
    """
    if rows is None:
        return None
    remaining = [factor for factors in rows for factor in factors if factor != (1, False)]
    new_rows: list[tuple[Factor, ...]] = []
    for size in shape:
        factors = _factors_for(size, remaining)
        if factors is None:
            return None
        # A batch of one example keeps its dim.
        if size == 1 and remaining and remaining[0] == (1, True):
            factors.append(remaining.pop(0))
        new_rows.append(tuple(factors) or ((size, False),))
    return tuple(new_rows)


def _factors_for(size: int, remaining: list[Factor]) -> list[Factor] | None:
    """Take factors off the front of `remaining` whose product is `size`.

    None if a factor neither divides what is missing of the size nor is a multiple of it.
    """
    factors: list[Factor] = []
    # The product of the factors taken so far, which grows up to the size.
    product = 1
    while product < size and remaining:
        length, row = remaining.pop(0)
        missing = size // product
        if length > missing:
            if length % missing:
                return None
            remaining.insert(0, (length // missing, row))
            length = missing
        elif size % (product * length):
            return None
        factors.append((length, row))
        product *= length
    return factors


def plain(shape: Sequence[int]) -> Rows:
    """The rows of an array of this shape that holds no examples."""
    return tuple(((size, False),) for size in shape)


def factors_of(fact: Fact, dim: int, shape: Sequence[int]) -> tuple[Factor, ...]:
    """The factors of one dim of a value of this shape, also where the fact has no rows."""
    if fact.rows is None:
        return ((shape[dim], False),)
    return fact.rows[dim]


def has_row(factors: Sequence[Factor]) -> bool:
    """Whether one of the factors of a dim counts examples."""
    return any(row for _, row in factors)


def resized(fact: Fact, aval: Any) -> Fact:
    """The fact of an array of another size in the same dims.

    A dim of another size than its factors make gets a single factor, since nothing says which of
    them became smaller. An array of another rank keeps the fact as it is.
    """
    shape = getattr(aval, "shape", ())
    if fact.rows is None or len(fact.rows) != len(shape):
        return fact
    rows: list[tuple[Factor, ...]] = []
    for factors, length in zip(fact.rows, shape, strict=True):
        if math.prod(size for size, _ in factors) == length:
            rows.append(factors)
        else:
            rows.append(((length, has_row(factors)),))
    return replace(fact, rows=tuple(rows))
