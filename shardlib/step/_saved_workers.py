"""How a checkpoint of workers that train apart is read by as many workers, by others, or by none.

A checkpoint has what each worker has, exactly, with a dim of workers in front. As many workers as
there were get back what they had. Otherwise the mean is kept:

    workers -> other workers    each new worker starts from the mean of all that were
    workers -> one run          its parameters, and its optimizer's state, are the mean
    one run -> workers          each worker starts from what the run had

The center stays what it was; what meetings keep is read if these keep it too, and is zero if not.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.collectives._meetings import wide
from shardlib.step._state import State, shapes_together, state_shardings
from shardlib.step._workers import (
    Workers,
    mean_of_workers,
    repeated,
    spread,
    workers_in,
    workers_of,
)

_KEPT = "workers/kept/"


def like_saved_workers(state: State, shapes: Mapping[str, tuple[int, ...]]) -> State:
    """What to read from a checkpoint to make a state like this one of it, as far as workers go.

    Args:
        state: the state that is wanted, of which only shapes and shardings are used.
        shapes: the shapes of all arrays of the checkpoint, by path.
    """
    stored = workers_in(shapes)
    if stored is None:
        return shapes_together(state)
    alone = shapes_together(state)
    has_as_many = state.workers is not None and stored == state.layout.workers
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
    return alone.replaced(opt_state=(), rest=(), workers=workers)


def with_these_workers(state: State, like: State) -> State:
    """The state that was read, with as many workers as `like` has, or with none."""
    if like.workers is None:
        return state if state.workers is None else _mean(state, like)
    count = like.layout.workers
    shardings: Any = state_shardings(like).workers
    read, kept = state.workers, {}
    if read is None:
        own = state.params, state.opt_state, state.rest
        own = jax.jit(lambda own: repeated(own, count), out_shardings=shardings.own)(own)
    else:
        own, kept = read.own, read.kept
        if workers_of(own) != count:
            own = jax.jit(lambda own: spread(own, count), out_shardings=shardings.own)(own)
    all_kept: dict[str, Any] = {}
    for name, shapes in like.workers.kept.items():
        all_kept[name] = kept.get(name, _zeros(shapes, shardings.kept[name]))
    params, opt_state, rest = own
    workers = Workers(params, opt_state, rest, all_kept)
    return state.replaced(opt_state=(), rest=(), workers=workers)


def _mean(state: State, like: State) -> State:
    """The mean of workers that were read, for a run that has none."""
    workers: Any = state.workers
    shardings = state_shardings(like)
    out_shardings = shardings.params, shardings.opt_state, shardings.rest
    mean = jax.jit(mean_of_workers, out_shardings=out_shardings)
    params, opt_state, rest = mean(workers.own)
    return state.replaced(params=params, opt_state=opt_state, rest=rest, workers=None)


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
