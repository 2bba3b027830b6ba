"""How a checkpoint of workers that train apart is read by as many workers, by others, or by none.

A checkpoint has what each worker has, exactly, with a dim of workers in front. As many workers as
there were get back what they had. Otherwise the mean is kept:

    workers -> other workers    each new worker starts from the mean of all that were
    workers -> one run          its parameters, and its optimizer's state, are the mean
    one run -> workers          each worker starts from what the run had

The center stays what it was; what meetings keep is read if these keep it too, and is zero if not.
A server has one copy of the parameters and of the optimizer's state. Any other run reads its
checkpoint as that of a run without workers: new workers start from the server's copy.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.collectives._meetings import wide
from shardlib.step._state import State, shapes_without_workers, state_shardings
from shardlib.step._workers import (
    Workers,
    mean_of_workers,
    repeated,
    spread,
    workers_in,
    workers_of,
)

_KEPT, _VERSIONS = "workers/kept/", "workers/versions"


def like_saved_workers(state: State, shapes: Mapping[str, tuple[int, ...]]) -> State:
    """What to read from a checkpoint to make a state like this one of it, as far as workers go.

    Args:
        state: the state that is wanted, of which only shapes and shardings are used.
        shapes: the shapes of all arrays of the checkpoint, by path.
    """
    stored = workers_in(shapes)
    alone = shapes_without_workers(state)
    if stored is None:
        return alone
    had_server = _VERSIONS in shapes
    has_as_many = bool(state.layout.apart) and stored == state.layout.workers
    if state.workers is not None and has_as_many and had_server and state.layout.has_server:
        return state
    # Workers of another number are read whole by every device along their axes.
    split_over = state.layout.apart if has_as_many else None
    kept: dict[str, Any] = {}
    for name in _kept_names(shapes):
        kept[name] = jax.tree.map(_like_kept, alone.params)

    def with_workers(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: _with_workers(leaf, stored, split_over), tree)

    workers = Workers(
        params=with_workers(alone.params),
        opt_state=with_workers(alone.opt_state),
        rest=with_workers(alone.rest),
        kept=kept,
    )
    if not had_server:
        return alone.replaced(opt_state=(), rest=(), workers=workers)
    # A server has the optimizer's state, and counts its updates as the steps are counted.
    workers = workers._replace(opt_state=(), versions=with_workers(_of_step(alone)))
    return alone.replaced(rest=(), workers=workers)


def with_these_workers(state: State, like: State) -> State:
    """The state that was read, with as many workers as `like` has, or with none."""
    read, wanted = state.workers, like.workers
    if read is not None and wanted is not None and read.has_server == wanted.has_server:
        count = like.layout.workers
        if workers_of(read.params) == count:
            return state.replaced(workers=_with_kept(read, like))
        if not wanted.has_server:
            shardings: Any = state_shardings(like).workers
            own = jax.jit(lambda own: spread(own, count), out_shardings=shardings.own)(read.own)
            params, opt_state, rest = own
            spread_out = Workers(params, opt_state, rest, read.kept)
            return state.replaced(workers=_with_kept(spread_out, like))
    state = _without_workers(state, like)
    if wanted is None:
        return state
    versions: Any = ()
    if read is not None and wanted.has_server:
        versions = read.versions
    return _with_workers_of(state, like, versions)


def _without_workers(state: State, like: State) -> State:
    """What was read, as the state of one run: the mean of workers, or what their server has."""
    workers = state.workers
    if workers is None:
        return state
    alone = shapes_without_workers(like)
    own: Any = workers.own
    shapes: Any = alone.params, alone.opt_state, alone.rest
    if workers.has_server:
        own, shapes = workers.rest, alone.rest
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    mean = jax.jit(mean_of_workers, out_shardings=shardings)(own)
    if workers.has_server:
        return state.replaced(rest=mean, workers=None)
    params, opt_state, rest = mean
    return state.replaced(params=params, opt_state=opt_state, rest=rest, workers=None)


def _with_workers_of(state: State, like: State, versions: Any) -> State:
    """A run without workers with as many as `like` has, which all begin with what it has.

    `versions` are those of the workers that the same server had before, or empty.
    """

    def begun(params: Any, opt_state: Any, rest: Any, versions: Any) -> tuple[Any, Any, Any]:
        workers: Any = like.layout.first_workers(params, opt_state, rest)
        if jax.tree.leaves(versions):
            # The last worker has seen all updates, which new ones are given too.
            workers = workers._replace(versions=repeated(versions[-1], like.layout.workers))
        return params, opt_state if like.layout.has_server else (), workers

    shardings = state_shardings(like)
    program = jax.jit(
        begun, out_shardings=(shardings.params, shardings.opt_state, shardings.workers)
    )
    params, opt_state, workers = program(state.params, state.opt_state, state.rest, versions)
    return state.replaced(params=params, opt_state=opt_state, rest=(), workers=workers)


def _with_kept(workers: Workers, like: State) -> Workers:
    """Workers with what the meetings of `like` keep: as it was read, or zeros."""
    shardings: Any = state_shardings(like).workers
    wanted: Any = like.workers
    kept: dict[str, Any] = {}
    for name, shapes in wanted.kept.items():
        kept[name] = workers.kept.get(name)
        if kept[name] is None:
            kept[name] = _zeros(shapes, shardings.kept[name])
    return workers._replace(kept=kept)


def _zeros(shapes: Any, shardings: Any) -> Any:
    """Zeros of some shapes, made where they are laid out."""

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return jax.jit(zeros, out_shardings=shardings)()


def _kept_names(shapes: Mapping[str, Any]) -> list[str]:
    """The names of what the meetings of a checkpoint have kept."""
    names: dict[str, None] = {}
    for path in shapes:
        if path.startswith(_KEPT):
            names[path.removeprefix(_KEPT).partition("/")[0]] = None
    return list(names)


def _of_step(state: State) -> jax.ShapeDtypeStruct:
    sharding = state_shardings(state).step
    return jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)


def _like_kept(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    dtype = jax.eval_shape(wide, leaf).dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)


def _with_workers(
    leaf: jax.ShapeDtypeStruct, workers: int, split_over: tuple[str, ...] | None
) -> jax.ShapeDtypeStruct:
    sharding: Any = leaf.sharding
    spec = PartitionSpec(split_over, *sharding.spec)
    return jax.ShapeDtypeStruct(
        (workers, *leaf.shape), leaf.dtype, sharding=NamedSharding(sharding.mesh, spec)
    )
