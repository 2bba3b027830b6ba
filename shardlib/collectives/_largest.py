"""The largest elements of gradients, with what is left out sent later (top-k with error feedback).

    each worker      gradient + what it is owed  ->  its k largest elements: values and places
    everybody        gathers those of all workers, and adds them up where they belong

It is a gather and no sum, since workers choose different places. So it sends
`(workers - 1) * k` values and places, and pays where k times the number of workers is far below the
number of elements.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.collectives._exact import ExchangeInputs, Parameter
from shardlib.collectives._exchanges import Lossy
from shardlib.collectives._feedback import Feedback, local_shape, of_one_worker, zeros
from shardlib.collectives._sums import ROW_TILE

# Places are counted in 32 bits, within a device's shard.
_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class TopK(Lossy):
    """Top-k sparsification: the largest elements of each gradient; the others are sent later.

    - `axis`: over which of the data axes, or a tuple of them; over the others sums are exact.
    - `part`: the share of elements that is sent, above 0 and below 1, of each device's shard: at
      least one element.
    - `feedback`: what is not sent of a gradient is added to the next. It is kept in the state,
      `State.errors`.
    - `exact`: patterns of whole paths of parameters whose gradients are summed exactly over these
      axes too.

    Of devices that hold shards of one parameter each sends the largest elements of its own, so what
    is sent depends on how the parameter is sharded.

    >>> import shardlib as sl
    >>> parameter = sl.collectives.Parameter("w", (64, 64), jax.P(), ("pod",), jax.P())
    >>> TopK("pod", part=0.01).over(parameter)
    ('pod',)
    """

    part: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        part = check.number("TopK", "part", self.part, "a part of the elements", above=0, below=1)
        check.assign(self, part=part)

    def count(self, elements: int) -> int:
        """How many of so many elements are sent."""
        return max(1, round(self.part * elements))

    def first_errors(self, parameter: Parameter, sizes: Mapping[str, int]) -> Feedback:
        """What a device has left over of a parameter before the first step: zeros."""
        return Feedback(zeros(local_shape(parameter, sizes)), None)

    def average(
        self,
        gradients: Sequence[jax.Array],
        parameters: Sequence[Parameter],
        inputs: ExchangeInputs,
    ) -> tuple[list[jax.Array], Sequence[Any]]:
        """The mean of what workers send of each gradient, and what each of them has not sent."""
        if all(lax.axis_size(self.over(parameter)) == 1 for parameter in parameters):
            # Nothing is sent between workers, so nothing is left out.
            return of_one_worker(gradients, inputs.errors)
        own = list(gradients)
        if self.feedback:
            own = [x + before.error for x, before in zip(gradients, inputs.errors, strict=True)]
        chosen = [self._chosen(x, one) for x, one in zip(own, parameters, strict=True)]
        groups: dict[Any, list[int]] = defaultdict(list)
        for position, (parameter, shared) in enumerate(zip(parameters, inputs.shared, strict=True)):
            groups[self.over(parameter), shared].append(position)
        means = list(own)
        for (over, shared), positions in groups.items():
            gathered = _gathered([chosen[i] for i in positions], over, shared)
            for i, elements in zip(positions, gathered, strict=True):
                means[i] = _placed(elements, own[i].shape) / lax.axis_size(over)
        errors = [Feedback(None, None)] * len(own)
        if self.feedback:
            for i, elements in enumerate(chosen):
                errors[i] = Feedback(own[i] - _placed(elements, own[i].shape), None)
        return means, errors

    def _chosen(self, gradient: jax.Array, parameter: Parameter) -> "_Elements":
        """The largest elements of an array."""
        flat = gradient.reshape(-1)
        if flat.size > _MOST_ELEMENTS:
            raise ValueError(
                f"`{self}` counts places in 32 bits, and a device's shard of `{parameter.path}` "
                f"has {flat.size:,} elements: split it further, by `zero` or by its names, or have "
                f"it summed exactly, `exact=({parameter.path!r},)`."
            )
        # A sort of all elements on CPUs and GPUs; on TPUs nearly all of the largest are found in
        # one pass, and those that are missed are owed.
        _, places = lax.approx_max_k(jnp.abs(flat), self.count(flat.size))
        return _Elements(flat[places], places)


class _Elements(NamedTuple):
    """Some elements of an array, and where they are in it."""

    values: jax.Array
    places: jax.Array


def _gathered(
    chosen: Sequence[_Elements], over: tuple[str, ...], shared: tuple[str, ...]
) -> list[_Elements]:
    """Of each array the elements of all workers, one worker after the other.

    Those of all arrays go together. Of devices of a worker that have chosen the same, each sends a
    part, and all gather these.
    """
    sizes = [elements.places.size for elements in chosen]
    joined = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *chosen)
    rows = jax.tree.map(lambda row: _rows_of_workers(row, over, shared), joined)
    gathered, first = [], 0
    for size in sizes:
        last = first + size
        own = jax.tree.map(lambda x, a=first, b=last: x[:, a:b].reshape(-1), rows)
        gathered.append(own)
        first = last
    return gathered


def _rows_of_workers(row: jax.Array, over: tuple[str, ...], shared: tuple[str, ...]) -> jax.Array:
    """The rows of all workers, one below the other, filled up with zeros at their ends."""
    parts = lax.axis_size(shared)
    unit = parts
    # Of rows that do not fill tiles, compilers for TPUs make sums of all of them, twice the bytes.
    if row.size >= parts * ROW_TILE:
        unit = parts * ROW_TILE
    own = jnp.pad(row, (0, -row.size % unit))
    if shared:
        own = own.reshape(parts, -1)[lax.axis_index(shared)]
    workers = lax.axis_size(over)
    rows = lax.all_gather(own, over, tiled=True)
    if not shared:
        return rows.reshape(workers, -1)
    rows = lax.all_gather(rows, shared, tiled=True).reshape(parts, workers, -1)
    return rows.swapaxes(0, 1).reshape(workers, -1)


def _placed(elements: _Elements, shape: tuple[int, ...]) -> jax.Array:
    """An array of a shape with the sums of elements where they belong, and zeros elsewhere."""
    flat = jnp.zeros(math.prod(shape), elements.values.dtype)
    return flat.at[elements.places].add(elements.values).reshape(shape)
