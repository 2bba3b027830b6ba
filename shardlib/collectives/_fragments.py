"""Parameters divided into fragments of nearly equal size, which are exchanged in turn.

Layers that are stacked in one array are dealt out one by one, so that each fragment has layers of
all depths, and so are the rows of matrices. What cannot be dealt out so, since devices have rows
that do not take turns evenly, and vectors, go whole to the fragment that has least.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax

from shardlib.collectives._exact import Parameter
from shardlib.layouts._specs import as_tuple, parts_over


@dataclass(frozen=True)
class FragmentPart:
    """What a fragment has of one parameter.

    Attributes:
        position: of the parameter among all.
        parameter: what there is of it, as a parameter.
        rows: which rows along dim 0; None for all.
    """

    position: int
    parameter: Parameter
    rows: slice | None

    def of(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """What the fragment has of the parameter, from the arrays of all parameters."""
        x = arrays[self.position]
        return x if self.rows is None else x[self.rows]

    def put(self, arrays: list[jax.Array], value: jax.Array) -> None:
        """Put another value in the place of that, in the dtype of the array."""
        x = arrays[self.position]
        value = value.astype(x.dtype)
        arrays[self.position] = value if self.rows is None else x.at[self.rows].set(value)


Fragment: TypeAlias = tuple[FragmentPart, ...]


def fragments(
    parameters: Sequence[Parameter], count: int, sizes: Mapping[str, int]
) -> tuple[Fragment, ...]:
    """The fragments of some parameters, as many as asked for.

    `sizes` are those of the mesh's axes.

    >>> layers = Parameter("layers", (4, 8), jax.P(), (), jax.P(), stacked=1)
    >>> bias = Parameter("bias", (64,), jax.P(), (), jax.P())
    >>> first, second = fragments([layers, bias], 2, {})
    >>> [(part.parameter.path, part.parameter.shape) for part in first]
    [('layers', (2, 8)), ('bias', (64,))]
    >>> [(part.parameter.path, part.rows) for part in second]
    [('layers', slice(1, None, 2))]
    """
    dealt: list[list[FragmentPart]] = [[] for _ in range(count)]
    whole: list[int] = []
    loads = [0] * count
    for position, parameter in enumerate(parameters):
        if not _is_dealt(parameter, count, sizes):
            whole.append(position)
            continue
        rows, *others = parameter.shape
        for number in range(count):
            own_rows = slice(number, None, count) if count > 1 else None
            own = len(range(number, rows, count))
            part = parameter._replace(shape=(own, *others))
            dealt[number].append(FragmentPart(position, part, own_rows))
            loads[number] += math.prod(part.shape)
    whole.sort(key=lambda position: -math.prod(parameters[position].shape))
    for position in whole:
        least = loads.index(min(loads))
        dealt[least].append(FragmentPart(position, parameters[position], None))
        loads[least] += math.prod(parameters[position].shape)
    found: list[Fragment] = []
    for parts in dealt:
        parts.sort(key=lambda part: part.position)
        found.append(tuple(parts))
    return tuple(found)


def _is_dealt(parameter: Parameter, count: int, sizes: Mapping[str, int]) -> bool:
    """Whether the rows of a parameter are dealt out, one after the other."""
    is_vector = len(parameter.shape) < 2 and not parameter.stacked
    if is_vector:
        return False
    rows, parts = math.prod(parameter.shape[:1]), 1
    for entry in parameter.stored[:1]:
        parts = parts_over(sizes, as_tuple(entry))
    # A device's first row must be the first in turn, wherever its rows begin.
    return rows >= count and (parts == 1 or rows % (parts * count) == 0)
