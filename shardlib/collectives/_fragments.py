"""Parameters divided into fragments of nearly equal size, which are exchanged in turn.

Layers that are stacked in one array are dealt out one by one, so that each fragment has layers of
all depths, and so are the rows of matrices. Vectors, and what has fewer rows than there are
fragments, go whole to the fragment that has least.

Which fragment has a row is told by global shapes alone, so that runs are the same on all meshes. If
devices have rows of their own that do not take turns evenly, some have fewer of a fragment than
others, and send zeros for those that they lack.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.collectives._exact import Parameter
from shardlib.layouts._specs import as_tuple, parts_over


@dataclass(frozen=True)
class FragmentPart:
    """What a fragment has of one parameter.

    Attributes:
        position: of the parameter among all.
        parameter: what devices send of it, as a parameter.
        rows: which of its rows along dim 0; None for all.
        uneven: the axes that split these, if a device's first row is not always the first in turn.
    """

    position: int
    parameter: Parameter
    rows: slice | None
    uneven: tuple[str, ...] = ()

    def of(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """What the fragment has of the parameter, from a device's shards of all parameters."""
        x = arrays[self.position]
        if self.rows is None:
            return x
        if not self.uneven:
            return x[self.rows]
        return x.at[self._own_rows(self.rows, len(x))].get(mode="fill", fill_value=0)

    def put(self, arrays: list[jax.Array], value: jax.Array) -> None:
        """Put another value in the place of that, in the dtype of the array."""
        x = arrays[self.position]
        value = value.astype(x.dtype)
        if self.rows is None:
            arrays[self.position] = value
        elif not self.uneven:
            arrays[self.position] = x.at[self.rows].set(value)
        else:
            own = self._own_rows(self.rows, len(x))
            arrays[self.position] = x.at[own].set(value, mode="drop")

    def _own_rows(self, rows: slice, length: int) -> jax.Array:
        """Which rows of a device's shard are among some rows of the whole.

        There are as many on every device: the last may lie beyond the shard.
        """
        first = (rows.start - lax.axis_index(self.uneven) * length) % rows.step
        return first + rows.step * jnp.arange(-(-length // rows.step))


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
    # In elements of the whole arrays, which no mesh changes.
    loads = [0] * count
    for position, parameter in enumerate(parameters):
        if not _is_dealt(parameter, count):
            whole.append(position)
            continue
        row_size = math.prod(parameter.shape[1:])
        for number in range(count):
            dealt[number].append(_part(position, parameter, number, count, sizes))
            loads[number] += len(range(number, parameter.shape[0], count)) * row_size
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


def _is_dealt(parameter: Parameter, count: int) -> bool:
    """Whether the rows of a parameter are dealt out, one after the other."""
    is_vector = len(parameter.shape) < 2 and not parameter.stacked
    return not is_vector and math.prod(parameter.shape[:1]) >= count


def _part(
    position: int, parameter: Parameter, number: int, count: int, sizes: Mapping[str, int]
) -> FragmentPart:
    """Every so many of the rows of a parameter, from one of them on."""
    if count == 1:
        return FragmentPart(position, parameter, None)
    rows, *others = parameter.shape
    every = slice(number, None, count)
    axes = as_tuple(parameter.stored[0]) if parameter.stored else ()
    devices = parts_over(sizes, axes)
    if devices == 1:
        own = len(range(number, rows, count))
        return FragmentPart(position, parameter._replace(shape=(own, *others)), every)
    own = -(-rows // devices // count)
    sent = parameter._replace(shape=(devices * own, *others))
    uneven = axes if rows // devices % count else ()
    return FragmentPart(position, sent, every, uneven)
