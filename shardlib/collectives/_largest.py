"""The largest elements of gradients, with what is left out sent later (top-k with error feedback).

    each worker      gradient + what it is owed  ->  its k largest elements: values and places
    everybody        gathers those of all workers, and adds them up where they belong

It is a gather and no sum, since workers choose different places. So it sends
`(workers - 1) * k` values and places, and pays where k times the number of workers is far below the
number of elements.
"""

import math
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

# Places are counted in 32 bits, within a device's shard.
_MOST_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class TopK(Lossy):
    """The largest elements of each gradient, with all others added to the next gradient.

    - `axis`: over which of the data axes, or a tuple of them; over the others sums are exact.
    - `part`: which part of the elements is sent, of each device's shard, at least one.
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
        means, errors = [], []
        for gradient, parameter, shared, before in zip(
            gradients, parameters, inputs.shared, inputs.errors, strict=True
        ):
            if self.feedback:
                gradient = gradient + before.error
            chosen = self._chosen(gradient, parameter)
            gathered = _gathered(chosen, self.over(parameter), shared)
            workers = lax.axis_size(self.over(parameter))
            means.append(_placed(gathered, gradient.shape) / workers)
            error = None
            if self.feedback:
                error = gradient - _placed(chosen, gradient.shape)
            errors.append(Feedback(error, None))
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


def _gathered(chosen: _Elements, over: tuple[str, ...], shared: tuple[str, ...]) -> _Elements:
    """The elements of all workers, one after the other.

    Of devices of a worker that have chosen the same, each sends a part, and all gather these.
    """
    parts = lax.axis_size(shared)
    padding = -chosen.values.size % parts
    # Added twice at one place, zeros change nothing.
    elements = jax.tree.map(lambda x: jnp.pad(x, (0, padding)).reshape(parts, -1), chosen)
    own = elements
    if shared:
        own = jax.tree.map(lambda x: x[lax.axis_index(shared)], elements)
    gathered = jax.tree.map(lambda x: lax.all_gather(x.reshape(-1), over, tiled=True), own)
    if shared:
        gathered = jax.tree.map(lambda x: lax.all_gather(x, shared, tiled=True), gathered)
    return gathered


def _placed(elements: _Elements, shape: tuple[int, ...]) -> jax.Array:
    """An array of a shape with the sums of elements where they belong, and zeros elsewhere."""
    flat = jnp.zeros(math.prod(shape), elements.values.dtype)
    return flat.at[elements.places].add(elements.values).reshape(shape)
