"""What each worker has of its own, where workers train apart, and what they have together.

Along the axes that an exchange keeps apart (`LocalSGD`, `DiLoCo`), or those of the exchange under
an optimizer that lets workers differ (0/1 Adam), each worker has its own parameters, state of the
optimizer, and other state of the model. In a `State` these are arrays with
a dim of workers in front, split over those axes:

    state.params                 the center: the parameters on which workers met last
    state.workers.params         (workers, *shape), each worker's own
    state.workers.opt_state      the same of the optimizer's state; `state.opt_state` is empty
    state.workers.rest           the same of the model's other state; `state.rest` is empty
    state.workers.kept           what meetings keep for the next one, like the parameters

Workers around a server (`ParameterServer`) have parameters of their own too, which it gave them:

    state.params, opt_state      the server's, split over the workers' devices
    state.workers.params         those that each worker was given, and `rest` as above
    state.workers.versions       (workers,), after how many updates of the server

Evaluation, exports, and runs that go on with all workers together use the mean over workers, or
what the server has.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from shardlib.modeling._random import is_key
from shardlib.step._precision import wider


class Workers(NamedTuple):
    """The arrays that each worker of a run has for itself, and what their meetings keep.

    Attributes:
        params: the trained parameters of each worker, with a dim of workers in front.
        opt_state: the state of each worker's optimizer, likewise.
        rest: what else each worker's model carries, likewise.
        kept: by name, what meetings keep for the next one: a tree like the parameters, without a
            dim of workers.
        versions: after how many updates a server gave each worker its parameters; empty without a
            server, which has the optimizer's state as well.
    """

    params: Any
    opt_state: Any
    rest: Any
    kept: dict[str, Any]
    versions: Any = ()

    @property
    def has_server(self) -> bool:
        """Whether they are around a server."""
        return bool(jax.tree.leaves(self.versions))

    @property
    def own(self) -> tuple[Any, Any, Any]:
        """All that has a dim of workers."""
        return self.params, self.opt_state, self.rest


def repeated(tree: Any, workers: int) -> Any:
    """Arrays with a dim of workers in front, of which all have the same."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (workers, *x.shape)), tree)


def of_one(tree: Any) -> Any:
    """What one worker has, on its own devices, where the axes of the workers are manual."""
    return jax.tree.map(lambda x: x[0], tree)


def with_dim(tree: Any) -> Any:
    """What one worker has, with a dim of workers in front: undoes `of_one`."""
    return jax.tree.map(lambda x: x[None], tree)


def shapes_of_one(tree: Any) -> Any:
    """The shapes of what one worker has, from arrays or shapes with a dim of workers in front."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), tree)


def specs_with_dim(specs: Any, apart: tuple[str, ...]) -> Any:
    """Specs of what one worker has, as specs with a dim of workers that is split over `apart`."""
    return jax.tree.map(lambda spec: PartitionSpec(apart, *spec), specs)


def spread(tree: Any, workers: int) -> Any:
    """Arrays of some number of workers, as arrays of another number of them.

    Each of the new workers starts from the mean of all. What has no mean, such as counts and keys,
    is that of the worker with its number, counted around.
    """
    return jax.tree.map(partial(_spread, workers=workers), tree)


def mean_of_workers(tree: Any) -> Any:
    """The mean over the workers of each array, or the first worker's where there is no mean."""
    return of_one(spread(tree, 1))


def _spread(x: jax.Array, workers: int) -> jax.Array:
    count = x.shape[0]
    if workers == count:
        return x
    if is_key(x) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[np.arange(workers) % count]
    # In float32 at least: a sum of many numbers of 16 bits would round away what they differ in.
    wide = x.astype(wider(x.dtype, jnp.float32))
    mean = jnp.mean(wide, 0, keepdims=True).astype(x.dtype)
    return jnp.broadcast_to(mean, (workers, *x.shape[1:]))


def workers_of(tree: Any) -> int:
    """How many workers there are in a tree of arrays with a dim of workers."""
    return jax.tree.leaves(tree)[0].shape[0]


def workers_in(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """How many workers a checkpoint has, or None if it has none.

    `shapes` are those of its arrays, by path.
    """
    for path, shape in shapes.items():
        # A model of one array has no path within its parameters.
        if path == "workers/params" or path.startswith("workers/params/"):
            return shape[0]
    return None
