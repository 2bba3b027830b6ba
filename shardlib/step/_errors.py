"""What an exchange has left over, as a checkpoint has it: by worker and in the parameter's shape,
whatever the mesh.

In a state each device has its own pieces. Saved, the errors of a parameter are an array with its
dims behind one of workers, `worker`, and one of its shape, `server`. Read by as many workers as
saved them they are what they were, however the rest of the mesh has changed. What the mean of
messages is owed is the mean of the workers' errors and the servers': so of another number of
workers each gets the mean of what those before had, and the same is owed.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.collectives._compressed import Errors
from shardlib.collectives._exact import Parameter
from shardlib.layouts._rules import spec_axes
from shardlib.step._exchange import pieces
from shardlib.step._layer_order import Mover, reordered, stacked_dim
from shardlib.step._state import Layout, State
from shardlib.step._strategy import Strategy


def saved(state: State) -> State:
    """A state as a checkpoint has it: layers in the model's order, errors by worker."""
    state = reordered(state, natural=True)
    if not state.errors:
        return state
    taken = _taken(state)
    errors = _converter(state.layout.strategy, tuple(taken.values()), True)(state.errors)
    return state.replaced(errors=_moved(state.layout, errors, natural=True))


def saved_like(state: State, shapes: Mapping[str, tuple[int, ...]]) -> State:
    """What is to be read from a checkpoint, which has these shapes by path, for `from_saved` to
    make such a state of.
    """
    if not state.errors:
        return state
    if not any(path.startswith("errors/") for path in shapes):  # of a run that left nothing over
        return state.replaced(errors={})
    mesh, exchange, errors = state.layout.strategy.device_mesh, state.layout.strategy.exchange, {}
    for path, parameter in _taken(state).items():
        over = exchange.over(parameter)
        workers = math.prod(mesh.shape[axis] for axis in over)
        there = shapes.get(f"errors/{path}/worker", ())
        count = there[0] if there[1:] == parameter.shape and there else workers
        by_worker = PartitionSpec(over if count % workers == 0 else None, *parameter.stored)
        errors[path] = Errors(
            _abstract((count, *parameter.shape), NamedSharding(mesh, by_worker)),
            _abstract(parameter.shape, NamedSharding(mesh, parameter.stored)),
        )
    return state.replaced(errors=errors)


def from_saved(state: State, like: State) -> State:
    """The state that `saved` made this of; or, were there other workers then, one that owes as
    much.
    """
    state = reordered(state, natural=False)
    if not like.errors:
        return state
    taken = _taken(like)
    if not state.errors:
        to = jax.tree.map(lambda x: x.sharding, like.errors)
        zeros = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.errors),
            out_shardings=to,
        )
        return state.replaced(errors=zeros())
    errors = _moved(state.layout, state.errors, natural=False)
    return state.replaced(
        errors=_converter(state.layout.strategy, tuple(taken.values()), False)(errors)
    )


def _abstract(shape: tuple[int, ...], sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def _taken(state: State) -> dict[str, Parameter]:
    """The parameters of which the exchange has errors."""
    return {
        path: one
        for path, one in state.layout.parameters(state.params).items()
        if path in state.errors
    }


@lru_cache(maxsize=64)
def _converter(strategy: Strategy, taken: tuple[Parameter, ...], natural: bool) -> Any:
    """A program that lays errors out by worker, or, if not `natural`, from there as devices have
    them.
    """
    mesh, exchange, sizes = strategy.device_mesh, strategy.exchange, strategy.device_mesh.shape
    own, by_worker = PartitionSpec(strategy.every_axis), {}
    for parameter in taken:
        over = exchange.over(parameter)
        by_worker[parameter.path] = Errors(PartitionSpec(over, *parameter.stored), parameter.stored)

    def convert(parameter: Parameter, errors: Errors) -> Errors:
        over, cut = exchange.over(parameter), pieces(exchange, parameter, sizes)
        shared = tuple(axis for axis in sizes if axis not in (*over, *spec_axes(parameter.stored)))
        mine = lax.axis_index(shared) if shared else 0
        if not natural:
            worker, server = cut.all_rows(errors.worker)[mine], cut.all_rows(errors.server)[mine]
            return Errors(worker[None], server[lax.axis_index(over)][None])

        def gather(x: Any, axes: tuple[str, ...]) -> Any:
            return lax.all_gather(x, axes, axis=0, tiled=True) if axes else x

        stored = NamedSharding(mesh, parameter.stored).shard_shape(parameter.shape)
        worker = gather(errors.worker, shared)
        server = gather(gather(errors.server, over)[None], shared)
        return Errors(cut.whole(worker, stored)[None], cut.whole(server, stored))

    def converted(errors: dict[str, Errors]) -> dict[str, Errors]:
        return {parameter.path: convert(parameter, errors[parameter.path]) for parameter in taken}

    before = by_worker if not natural else jax.tree.map(lambda _: own, by_worker, is_leaf=_is_spec)
    after = by_worker if natural else jax.tree.map(lambda _: own, by_worker, is_leaf=_is_spec)
    mapped = jax.shard_map(
        converted, mesh=mesh, in_specs=(before,), out_specs=after, check_vma=False
    )

    def by_so_many(errors: dict[str, Errors]) -> dict[str, Errors]:
        """Where there were other workers, each has what the mean of those was owed."""
        if natural:
            return mapped(errors)
        spread = {}
        for parameter in taken:
            worker, server = errors[parameter.path]
            workers = math.prod(sizes[axis] for axis in exchange.over(parameter))
            if worker.shape[0] != workers:
                worker = jnp.broadcast_to(jnp.mean(worker, 0), (workers, *worker.shape[1:]))
            spread[parameter.path] = Errors(worker, server)
        return mapped(spread)

    return jax.jit(by_so_many)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _moved(layout: Layout, errors: dict[str, Errors], natural: bool) -> dict[str, Errors]:
    """Errors by worker, with layers in the model's order or in that of the stages."""
    if layout.strategy.pipeline is None:
        return errors
    names = dict(layout.names)
    move, found = Mover(layout.strategy, names, natural), {}
    for path, (worker, server) in errors.items():
        dim = stacked_dim(names.get(path))
        found[path] = Errors(
            move(worker, path, None if dim is None else dim + 1), move(server, path, dim)
        )
    return found
