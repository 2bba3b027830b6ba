"""The part of a checkpoint that is the model: what a run under another optimizer begins with.

    params/..., frozen/...     parameters, which another run may freeze otherwise
    streams/..., rest/...      what else the model carries
    workers/params, rest       the same of each worker, of which the mean is read

The optimizer's state, errors of an exchange, and where the run was, are not read.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shardlib._tree import map_named, named_leaves
from shardlib.step._first_optimizer_state import with_first_optimizer_state
from shardlib.step._state import State, combine, shapes_without_workers, state_shardings
from shardlib.step._workers import Workers, repeated

_MODEL = (
    "params/",
    "frozen/",
    "streams/",
    "rest/",
    "workers/params/",
    "workers/rest/",
    # By it a reader sees that workers were around a server, which has the parameters.
    "workers/versions/",
)


def of_model(described: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a checkpoint, by path, that are the model's."""
    # A model that is a single array has no path below `params`.
    return {path: leaf for path, leaf in described.items() if f"{path}/".startswith(_MODEL)}


def parameters_of(state: State) -> Any:
    """All parameters of a state, as a tree: those of workers too."""
    return state.params, state.frozen, state.workers and state.workers.params


def model_alone(like: State, described: Mapping[str, Any]) -> State:
    """A state to read a model into: like another one, without an optimizer and without workers.

    Parameters are trained or frozen, and of the dtypes, as in the checkpoint, of which the leaves
    are `described`.
    """
    alone = shapes_without_workers(like).replaced(opt_state=(), errors={})
    parameters = combine(alone.params, alone.frozen)

    def is_frozen(path: str) -> bool:
        return _below("frozen", path) in described

    def trained(path: str, leaf: Any) -> Any:
        return None if is_frozen(path) else _as_saved(leaf, described.get(_below("params", path)))

    def frozen(path: str, leaf: Any) -> Any:
        return _as_saved(leaf, described[_below("frozen", path)]) if is_frozen(path) else None

    return alone.replaced(
        params=map_named(trained, parameters),
        frozen=map_named(frozen, parameters),
        step=None,
        key=None,
        nonfinite=None,
    )


def _below(field: str, path: str) -> str:
    """The path of a parameter in a state."""
    return f"{field}/{path}" if path else field


def _as_saved(leaf: Any, saved: Mapping[str, Any] | None) -> Any:
    """The shape of a parameter, with the dtype that it has in a checkpoint.

    Only from one floating-point dtype to another; anything else is of another model.
    """
    dtype = leaf.dtype if saved is None else jnp.dtype(saved["dtype"])
    is_cast = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.floating)
    dtype = dtype if is_cast else leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def with_model(state: State, model: State) -> State:
    """A state with the model that was read into `model_alone(state, ...)`."""
    read = dict(named_leaves(combine(model.params, model.frozen)))

    def put(path: str, leaf: Any) -> Any:
        return jax.device_put(read[path].astype(leaf.dtype), leaf.sharding)

    params = map_named(put, state.params)
    changed = state.replaced(
        params=params, frozen=map_named(put, state.frozen), streams=model.streams
    )
    changed = with_first_optimizer_state(changed)
    if changed.workers is None:
        return changed.replaced(rest=model.rest)
    return changed.replaced(workers=_workers_with(state, changed.workers, params, model.rest))


def _workers_with(state: State, workers: Workers, params: Any, rest: Any) -> Workers:
    """Workers that all begin with one model."""
    count = state.layout.workers
    shardings: Any = state_shardings(state).workers
    params, rest = jax.jit(
        lambda params, rest: (repeated(params, count), repeated(rest, count)),
        out_shardings=(shardings.params, shardings.rest),
    )(params, rest)
    return workers._replace(params=params, rest=rest)
