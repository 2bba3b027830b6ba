"""Parameters divided into fragments of nearly equal size, which are exchanged in turn.

Layers that are stacked in one array are dealt out one by one, so that each fragment has layers of
all depths; all other parameters go whole, the largest first, to the fragment that has least.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax

from shardlib.collectives._exact import Parameter


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


def fragments(parameters: Sequence[Parameter], count: int) -> tuple[Fragment, ...]:
    """The fragments of some parameters, as many as asked for.

    >>> layers = Parameter("layers", (4, 8), jax.P(), (), jax.P(), stacked=1)
    >>> head = Parameter("head", (64,), jax.P(), (), jax.P())
    >>> first, second = fragments([layers, head], 2)
    >>> [(part.parameter.path, part.parameter.shape) for part in first]
    [('layers', (2, 8)), ('head', (64,))]
    >>> [(part.parameter.path, part.rows) for part in second]
    [('layers', slice(1, None, 2))]
    """
    dealt: list[list[FragmentPart]] = [[] for _ in range(count)]
    whole: list[int] = []
    sizes = [0] * count
    for position, parameter in enumerate(parameters):
        if not _is_dealt(parameter, count):
            whole.append(position)
            continue
        rows, *others = parameter.shape
        for number in range(count):
            own_rows = slice(number, None, count) if count > 1 else None
            own = len(range(number, rows, count))
            part = parameter._replace(shape=(own, *others))
            dealt[number].append(FragmentPart(position, part, own_rows))
            sizes[number] += math.prod(part.shape)
    whole.sort(key=lambda position: -math.prod(parameters[position].shape))
    for position in whole:
        least = sizes.index(min(sizes))
        dealt[least].append(FragmentPart(position, parameters[position], None))
        sizes[least] += math.prod(parameters[position].shape)
    found: list[Fragment] = []
    for parts in dealt:
        parts.sort(key=lambda part: part.position)
        found.append(tuple(parts))
    return tuple(found)


def _is_dealt(parameter: Parameter, count: int) -> bool:
    """Whether the rows of a parameter are layers, of which each fragment gets some."""
    if not parameter.stacked or parameter.shape[0] < count:
        return False
    # Layers that devices have different ones of are not dealt out.
    return not parameter.stored or parameter.stored[0] is None
