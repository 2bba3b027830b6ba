"""What happens to gradients between the devices that computed them: one pluggable value.

An exchange is given each device's own contribution to the gradient, already divided by the weight of the whole batch:
the gradient is their sum. It runs manual over every axis of the mesh, on each device's own shard, and returns the
gradient, laid out as `spec` says, once per step however many microbatches there were.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax import lax
from jax.sharding import PartitionSpec

from shardlib._batch import manual_over_all
from shardlib._rules import keep_axes, spec_axes


class Exchange(Protocol):
    """How contributions become gradients; implementations are frozen dataclasses."""

    def spec(self, spec: PartitionSpec, shape: tuple[int, ...], axes: tuple[str, ...]) -> PartitionSpec:
        """How the gradient of a parameter that is laid out as `spec`, reduced over `axes`, will be laid out."""
        ...

    def reduce(self, contributions: Sequence[jax.Array], axes: Sequence[tuple[str, ...]]) -> list[jax.Array]:
        """Sum each contribution over its axes. Shapes are local: each device's own shard, manual over all axes."""
        ...


@dataclass(frozen=True)
class AllReduce:
    """The exact sum, whole on every device that holds the parameter."""

    def spec(self, spec: PartitionSpec, shape: tuple[int, ...], axes: tuple[str, ...]) -> PartitionSpec:
        """As the parameter."""
        return spec

    def reduce(self, contributions: Sequence[jax.Array], axes: Sequence[tuple[str, ...]]) -> list[jax.Array]:
        """One all-reduce for all parameters that are reduced over the same axes."""
        reduced = list(contributions)
        for group in dict.fromkeys(axes):
            members = [i for i, those in enumerate(axes) if those == group]
            if group:
                for i, total in zip(members, lax.psum([contributions[i] for i in members], group), strict=True):
                    reduced[i] = total
        return reduced


def exchange_gradients(exchange: Exchange, gradients: Any, specs: Any, data_axes: tuple[str, ...]) -> Any:
    """Reduce every gradient over the data axes absent from its parameter's spec. Runs manual over the data axes."""
    leaves, treedef = jax.tree.flatten(gradients)
    flat_specs = treedef.flatten_up_to(specs)
    axes = [reduced_axes(spec, data_axes) for spec in flat_specs]
    if not any(axes):
        return gradients
    automatic = jax.sharding.get_abstract_mesh().auto_axes
    inner = [keep_axes(spec, automatic) for spec in flat_specs]
    return treedef.unflatten(manual_over_all(lambda shards: exchange.reduce(shards, axes), inner)(leaves))


def reduced_axes(spec: PartitionSpec, data_axes: tuple[str, ...]) -> tuple[str, ...]:
    """The data axes over which a parameter's gradient is a sum of contributions: those that do not split it."""
    return tuple(axis for axis in data_axes if axis not in spec_axes(spec))
