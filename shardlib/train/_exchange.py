"""What happens to gradients between the devices that computed them: one pluggable value.

An exchange is given the gradient of each device's own total and the weight of the whole batch: the gradient is the sum
of the one, divided by the other, in whichever order suits the exchange. It runs manual over every axis of the mesh, on
each device's own shard, and returns the gradient, laid out as `spec` says, once per step however many microbatches
there were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib._rules import keep_axes, spec_axes
from shardlib._tree import map_named


class Parameter(NamedTuple):
    """What an exchange knows of a parameter: where it is, its global shape, how it lies, and over what to reduce it."""

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    axes: tuple[str, ...]  # the data axes that do not split it: its gradient is a sum of contributions over these


class Exchange(Protocol):
    """How contributions become gradients; implementations are frozen dataclasses."""

    def spec(self, parameter: Parameter) -> PartitionSpec:
        """How the gradient of a parameter will be laid out: as the parameter, or split further over its `axes`."""
        ...

    def reduce(
        self, contributions: Sequence[jax.Array], weight: jax.Array, parameters: Sequence[Parameter]
    ) -> list[jax.Array]:
        """Sum each contribution over its parameter's axes and divide by the weight, the same on every device.

        Shapes are local: each device's own shard, manual over all axes.
        """
        ...


@dataclass(frozen=True)
class AllReduce:
    """The exact sum, whole on every device that holds the parameter."""

    def spec(self, parameter: Parameter) -> PartitionSpec:
        """As the parameter."""
        return parameter.spec

    def reduce(
        self, contributions: Sequence[jax.Array], weight: jax.Array, parameters: Sequence[Parameter]
    ) -> list[jax.Array]:
        """One all-reduce for all parameters that are reduced over the same axes.

        The division comes after it: there it is one more factor in the optimizer's own pass over the gradient, and no
        device waits for the weight before it goes backward.
        """
        reduced = list(contributions)
        for group in dict.fromkeys(parameter.axes for parameter in parameters):
            members = [i for i, parameter in enumerate(parameters) if parameter.axes == group]
            if group:
                for i, total in zip(members, lax.psum([contributions[i] for i in members], group), strict=True):
                    reduced[i] = total
        each = inverse(weight)
        return [total * each for total in reduced]


def exchange_gradients(exchange: Exchange, gradients: Any, weight: jax.Array, parameters: Any) -> Any:
    """Turn every device's own gradients into the batch's. Runs manual over the data axes."""
    leaves, treedef = jax.tree.flatten(gradients)
    described = treedef.flatten_up_to(parameters)
    automatic = jax.sharding.get_abstract_mesh().auto_axes
    if not automatic:
        return treedef.unflatten(exchange.reduce(leaves, weight, described))
    reduce = jax.shard_map(
        lambda shards, weight: exchange.reduce(shards, weight, described),
        in_specs=([keep_axes(parameter.spec, automatic) for parameter in described], PartitionSpec()),
        out_specs=[keep_axes(exchange.spec(parameter), automatic) for parameter in described],
        axis_names=set(automatic),
        check_vma=False,
    )
    return treedef.unflatten(reduce(leaves, weight))


def describe_parameters(params: Any, specs: Any, data_axes: tuple[str, ...]) -> Any:
    """A tree of `Parameter`s, from global arrays and their specs."""

    def described(path: str, leaf: Any, spec: PartitionSpec) -> Parameter:
        return Parameter(path, leaf.shape, spec, tuple(axis for axis in data_axes if axis not in spec_axes(spec)))

    return map_named(described, params, specs)


def inverse(weight: jax.Array) -> jax.Array:
    """One over the weight; of a batch of which nothing counts zero, so that loss and gradient are zero and not nan."""
    return jnp.where(weight == 0, 0.0, 1 / jnp.where(weight == 0, 1.0, weight))
