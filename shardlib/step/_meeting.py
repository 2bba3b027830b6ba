"""Meetings of workers that train apart, on the shards of each device.

    own parameters - center  -> moves, averaged over workers, exactly or as codes
                             -> a new center, and what each worker goes on with

A step in which none is due takes the other branch, which sends nothing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.collectives._exact import Parameter
from shardlib.collectives._meetings import Meeting, wide
from shardlib.layouts._specs import axes_without, keep_axes, parts_over
from shardlib.step._exchange import ErrorsByPath, LocalExchange
from shardlib.step._scopes import EXCHANGE
from shardlib.step._strategy import Strategy
from shardlib.step._worker_sums import axes_of_workers, summed_over_workers


class Shared(NamedTuple):
    """What a meeting reads and writes, one worker's.

    Attributes:
        center: the parameters on which workers met last.
        own: this worker's parameters.
        kept: by name, what the last meeting has kept, each a tree like the parameters.
        errors: what codes have left out, by the path of the parameter.
    """

    center: Any
    own: Any
    kept: dict[str, Any]
    errors: ErrorsByPath


def meet(strategy: Strategy, parameters: Any, shared: Shared, steps: jax.Array) -> Shared:
    """What workers have after a step, with a meeting at its end if one is due.

    It is called where the axes of the workers are manual, and makes all others manual too, so that
    no array is gathered along these before it is sent.

    Args:
        strategy: the strategy, whose exchange says when workers meet and how.
        parameters: a `Parameter` for each parameter, a tree like them.
        shared: what workers have before.
        steps: the number of steps taken, this one included.
    """
    exchange = strategy.exchange
    assert isinstance(exchange, Meeting)
    described, treedef = jax.tree.flatten(parameters, is_leaf=_is_parameter)
    meeting = _Meeting(strategy, exchange, described, treedef)

    def on_shards(shared: Shared, steps: jax.Array) -> Shared:
        return lax.cond(exchange.is_due(steps), meeting, lambda shared: shared, shared)

    others = axes_without(strategy.every_axis, strategy.apart)
    if not others:
        return on_shards(shared, steps)
    stored = treedef.unflatten([keep_axes(each.stored, others) for each in described])
    specs = Shared(
        center=stored,
        own=stored,
        kept=dict.fromkeys(shared.kept, stored),
        errors=jax.tree.map(lambda _: PartitionSpec(others), shared.errors),
    )
    return jax.shard_map(
        on_shards,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        axis_names=set(others),
        check_vma=False,
    )(shared, steps)


class _Meeting:
    """A meeting, as one device takes part in it, where every axis is manual."""

    def __init__(
        self,
        strategy: Strategy,
        exchange: Meeting,
        parameters: Sequence[Parameter],
        treedef: Any,
    ) -> None:
        self.exchange, self.parameters, self.treedef = exchange, parameters, treedef
        self.sizes = dict(strategy.device_mesh.shape)
        self.workers = parts_over(self.sizes, strategy.apart)
        self.coded = LocalExchange(exchange.by, parameters, self.sizes)

    def __call__(self, shared: Shared) -> Shared:
        """What workers have after it."""
        with jax.named_scope(EXCHANGE):
            return self._met(shared)

    def _met(self, shared: Shared) -> Shared:
        center, own = self._leaves(shared.center), self._leaves(shared.own)
        moves = [wide(mine) - wide(ours) for mine, ours in zip(own, center, strict=True)]
        means, errors = self._means(moves, shared.errors)
        kept = {name: self._leaves(tree) for name, tree in shared.kept.items()}
        for number, mean in enumerate(means):
            met = self.exchange.met(
                wide(center[number]),
                wide(own[number]),
                mean,
                {name: leaves[number] for name, leaves in kept.items()},
                self.workers,
            )
            center[number] = met.center.astype(center[number].dtype)
            own[number] = met.own.astype(own[number].dtype)
            for name, value in met.kept.items():
                kept[name][number] = value.astype(kept[name][number].dtype)
        return Shared(
            self.treedef.unflatten(center),
            self.treedef.unflatten(own),
            {name: self.treedef.unflatten(leaves) for name, leaves in kept.items()},
            errors,
        )

    def _leaves(self, tree: Any) -> list[jax.Array]:
        return self.treedef.flatten_up_to(tree)

    def _means(
        self, moves: list[jax.Array], errors: ErrorsByPath
    ) -> tuple[list[jax.Array], ErrorsByPath]:
        """The means over workers: of what is sent as codes, and exactly of all else."""
        means = list(moves)
        exact = []
        for position, parameter in enumerate(self.parameters):
            if position not in self.coded.averaged_positions and parameter.axes:
                exact.append(position)
        axes = [
            axes_of_workers(
                self.exchange.met_over(self.parameters[i]), self.parameters[i], self.sizes
            )
            for i in exact
        ]
        totals = summed_over_workers(
            [moves[i] for i in exact], axes, self.sizes, self.exchange.within.bucket_bytes
        )
        for position, total in zip(exact, totals, strict=True):
            means[position] = total / self.workers
        if not self.coded.averaged_positions:
            return means, errors
        own = [moves[i].astype(jnp.float32) for i in self.coded.averaged_positions]
        unknown = [None] * len(own)
        return self.coded.average(means, own, errors, unknown)


def _is_parameter(node: Any) -> bool:
    return isinstance(node, Parameter)
