"""A step of workers with a parameter server, which makes one update for each worker's gradient.

[manual over the axes of the workers
   one worker's examples and parameters  ->  its gradient, as a step without others has it]
[manual over all axes
   gradients of workers, each whole      ->  those of all workers, each a part]
[automatic
   one update after the other: clip, optimizer, and what the parameters are then]
[manual over all axes
   the parameters after each update      ->  each worker's, whole]
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.collectives._server import ServerAxes, to_server, to_workers
from shardlib.layouts._specs import keep_axes
from shardlib.step._apart import layout_of_worker
from shardlib.step._exchange import Gradient
from shardlib.step._gradient import BatchGradient, Metrics
from shardlib.step._optimizer_update import update_of
from shardlib.step._scopes import EXCHANGE, OPTIMIZER
from shardlib.step._state import Layout, State, drop_weak_types, state_specs
from shardlib.step._strategy import Strategy
from shardlib.step._workers import Workers, of_one, with_dim

Differentiate = Callable[[State, Any], BatchGradient]


def step_around_server(
    differentiate: Differentiate, strategy: Strategy, state: State, batch: Any
) -> tuple[State, Metrics]:
    """One step of every worker, and the server's update with each of their gradients.

    Args:
        differentiate: the gradient of one worker, from a state and the examples that it has alone.
            Its metrics are of all workers.
        strategy: that of the step.
        state: the state before, of the server and of the workers.
        batch: the examples of all workers.
    """
    layout, workers = state.layout, state.workers
    assert workers is not None
    found = _gradients(differentiate, state, batch)
    exchanged = _Exchanged(layout, state.params)
    with jax.named_scope(EXCHANGE):
        values = exchanged.to_server(found.gradient.values)
    with jax.named_scope(OPTIMIZER), jax.numpy_dtype_promotion("standard"):
        gradients = found.gradient._replace(values=values)
        served, given = _updated(strategy, state, gradients, found.metrics)
    with jax.named_scope(EXCHANGE):
        params = exchanged.to_workers(given.params)
    taken = jnp.ones_like(given.nonfinite)
    if strategy.skips:
        taken -= given.nonfinite
    # The last worker has seen all updates so far.
    versions = workers.versions[-1] + jnp.cumsum(taken)
    rest = found.rest
    if strategy.skips:
        rest = jax.tree.map(partial(_of_finite, given.nonfinite == 0), rest, workers.rest)
    after = served.replaced(
        step=state.step + 1,
        workers=Workers(params, (), rest, {}, versions),
        streams=found.streams,
        nonfinite=state.nonfinite + jnp.max(given.nonfinite),
    )
    metrics = found.metrics | {
        "grad_norm": jnp.sqrt(jnp.mean(found.gradient.square)),
        "first_nonfinite": jnp.max(given.first_nonfinite),
    }
    return after, metrics


def _of_finite(is_finite: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """The new values of workers whose gradient is finite, and the old ones of all others."""
    return jnp.where(is_finite.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def _gradients(differentiate: Differentiate, state: State, batch: Any) -> BatchGradient:
    """What every worker finds by itself, its gradient and the model's state with a dim of workers.

    Streams and metrics are the same for all.
    """
    layout, apart = state.layout, state.layout.apart
    specs = jax.tree.map(lambda spec: keep_axes(spec, apart), state_specs(state))
    # What the server has is not needed here.
    specs = specs.replaced(params=(), opt_state=())
    state = state.replaced(params=(), opt_state=())

    def on_worker(state: State, batch: Any) -> BatchGradient:
        workers = state.workers
        assert workers is not None
        alone = state.replaced(
            params=of_one(workers.params),
            rest=of_one(workers.rest),
            workers=None,
            layout=layout_of_worker(layout),
        )
        found = differentiate(alone, batch)
        return found._replace(gradient=with_dim(found.gradient), rest=with_dim(found.rest))

    replicated: Any = PartitionSpec()
    split: Any = PartitionSpec(apart)
    on_workers = jax.shard_map(
        on_worker,
        in_specs=(specs, split),
        out_specs=BatchGradient(split, replicated, split, replicated),
        axis_names=set(apart),
        check_vma=False,
    )
    return on_workers(state, batch)


class _Given(NamedTuple):
    """What the server's update with each worker's gradient gives, with a dim of workers."""

    params: Any
    nonfinite: jax.Array
    first_nonfinite: jax.Array


def _updated(
    strategy: Strategy, state: State, gradients: Gradient, metrics: Metrics
) -> tuple[State, _Given]:
    """The server's state after an update with each gradient, and what was given to each worker.

    Args:
        strategy: that of the step.
        state: the state before.
        gradients: those of all workers, in the order in which they are used.
        metrics: of the step, for optimizers that ask for the loss.
    """

    def update(server: tuple[Any, Any], gradient: Gradient) -> tuple[tuple[Any, Any], _Given]:
        params, opt_state = server
        before = state.replaced(params=params, opt_state=opt_state)
        # Only optimizers that say themselves what is sent are told of single parameters.
        update = update_of(before, gradient, None, metrics["loss"], strategy)
        after = drop_weak_types((update.params, update.opt_state))
        first = update.metrics["first_nonfinite"]
        return after, _Given(after[0], update.nonfinite, first)

    server, given = lax.scan(update, (state.params, state.opt_state), gradients)
    params, opt_state = server
    return state.replaced(params=params, opt_state=opt_state), given


class _Exchanged:
    """What workers and the server send each other of each parameter, on global arrays."""

    def __init__(self, layout: Layout, params: Any) -> None:
        self.strategy = layout.strategy
        self.axes = ServerAxes(layout.apart, layout.strategy.device_mesh.shape)
        self.treedef = jax.tree.structure(params)
        self.splits = list(layout.splits_of_server(params).values())
        self.of_workers, self.of_server = [], []
        for worker, server in zip(layout.splits(params).values(), self.splits, strict=True):
            self.of_workers.append(PartitionSpec(layout.apart, *worker.spec))
            self.of_server.append(PartitionSpec(None, *server.spec))

    def to_server(self, tree: Any) -> Any:
        """What workers have, with a dim of workers that is split, as the server's devices have it:
        of all workers.
        """

        def on_device(arrays: list[jax.Array]) -> list[jax.Array]:
            return to_server(of_one(arrays), self.splits, self.axes, self._bucket_bytes)

        return self._on_shards(on_device, tree, self.of_workers, self.of_server)

    def to_workers(self, tree: Any) -> Any:
        """The way back."""

        def on_device(arrays: list[jax.Array]) -> list[jax.Array]:
            return with_dim(to_workers(arrays, self.splits, self.axes, self._bucket_bytes))

        return self._on_shards(on_device, tree, self.of_server, self.of_workers)

    @property
    def _bucket_bytes(self) -> int:
        return self.strategy.exchange.within.bucket_bytes

    def _on_shards(
        self, function: Any, tree: Any, before: list[PartitionSpec], after: list[PartitionSpec]
    ) -> Any:
        """Call a function of a device's shards of all parameters."""
        on_shards = jax.shard_map(
            function,
            in_specs=(before,),
            out_specs=after,
            axis_names=set(self.strategy.every_axis),
            check_vma=False,
        )
        return self.treedef.unflatten(on_shards(self.treedef.flatten_up_to(tree)))
