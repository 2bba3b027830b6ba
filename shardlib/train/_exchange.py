"""What happens to gradients between the devices that computed them: one pluggable value.

An exchange is given the gradient of each device's own total and the weight of the whole batch: the gradient is the sum
of the one, divided by the other, in whichever order suits the exchange. It runs manual over every axis of the mesh, on
each device's own shard, and returns the gradient, laid out as `spec` says, once per step however many microbatches
there were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib._rules import keep_axes, spec_axes


class Exchange(Protocol):
    """How contributions become gradients; implementations are frozen dataclasses."""

    def spec(self, spec: PartitionSpec, shape: tuple[int, ...], axes: tuple[str, ...]) -> PartitionSpec:
        """How the gradient of a parameter that is laid out as `spec`, reduced over `axes`, will be laid out."""
        ...

    def reduce(
        self, contributions: Sequence[jax.Array], weight: jax.Array, axes: Sequence[tuple[str, ...]]
    ) -> list[jax.Array]:
        """Sum each contribution over its axes and divide by the weight, which is the same on every device.

        Shapes are local: each device's own shard, manual over all axes.
        """
        ...


@dataclass(frozen=True)
class AllReduce:
    """The exact sum, whole on every device that holds the parameter."""

    def spec(self, spec: PartitionSpec, shape: tuple[int, ...], axes: tuple[str, ...]) -> PartitionSpec:
        """As the parameter."""
        return spec

    def reduce(
        self, contributions: Sequence[jax.Array], weight: jax.Array, axes: Sequence[tuple[str, ...]]
    ) -> list[jax.Array]:
        """One all-reduce for all parameters that are reduced over the same axes.

        The division comes after it: there it is one more factor in the optimizer's own pass over the gradient, and no
        device waits for the weight before it goes backward.
        """
        reduced = list(contributions)
        for group in dict.fromkeys(axes):
            members = [i for i, those in enumerate(axes) if those == group]
            if group:
                for i, total in zip(members, lax.psum([contributions[i] for i in members], group), strict=True):
                    reduced[i] = total
        each = inverse(weight)
        return [total * each for total in reduced]


def exchange_gradients(
    exchange: Exchange, gradients: Any, weight: jax.Array, specs: Any, data_axes: tuple[str, ...]
) -> Any:
    """Reduce every gradient over the data axes absent from its parameter's spec. Runs manual over the data axes."""
    leaves, treedef = jax.tree.flatten(gradients)
    flat_specs = treedef.flatten_up_to(specs)
    axes = [reduced_axes(spec, data_axes) for spec in flat_specs]
    automatic = jax.sharding.get_abstract_mesh().auto_axes
    inner = [keep_axes(spec, automatic) for spec in flat_specs]
    if not automatic:
        return treedef.unflatten(exchange.reduce(leaves, weight, axes))
    after = [exchange.spec(spec, leaf.shape, group) for spec, leaf, group in zip(flat_specs, leaves, axes, strict=True)]
    reduce = jax.shard_map(
        lambda shards, weight: exchange.reduce(shards, weight, axes),
        in_specs=(inner, PartitionSpec()),
        out_specs=[keep_axes(spec, automatic) for spec in after],
        axis_names=set(automatic),
        check_vma=False,
    )
    return treedef.unflatten(reduce(leaves, weight))


def inverse(weight: jax.Array) -> jax.Array:
    """One over the weight; of a batch of which nothing counts zero, so that loss and gradient are zero and not nan."""
    return jnp.where(weight == 0, 0.0, 1 / jnp.where(weight == 0, 1.0, weight))


def reduced_axes(spec: PartitionSpec, data_axes: tuple[str, ...]) -> tuple[str, ...]:
    """The data axes over which a parameter's gradient is a sum of contributions: those that do not split it."""
    return tuple(axis for axis in data_axes if axis not in spec_axes(spec))
