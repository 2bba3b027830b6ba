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
from shardlib.step._state import State, shapes_together, state_shardings, together
from shardlib.step._workers import Workers, repeated, spread, workers_in

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
    own = alone.params, alone.opt_state, alone.rest
    has_as_many = state.workers is not None and stored == state.layout.workers
    # Workers of another number are read whole by every device along their axes.
    split_over = state.layout.strategy.apart if has_as_many else None
    kept: dict[str, Any] = {}
    for name in _kept_names(shapes):
        kept[name] = jax.tree.map(_like_kept, alone.params)
    workers = Workers(*jax.tree.map(lambda x: _with_workers(x, stored, split_over), own), kept)
    return alone.replaced(opt_state=(), rest=(), workers=workers)


def with_these_workers(state: State, like: State) -> State:
    """The state that was read, with as many workers as `like` has, or with none."""
    if like.workers is None:
        return together(state) if state.workers is None else _mean_as(state, like)
    shardings = state_shardings(like).workers
    count = like.layout.workers
    if state.workers is None:
        own = state.params, state.opt_state, state.rest
        made = jax.jit(
            lambda own: repeated(own, count),
            out_shardings=(shardings.params, shardings.opt_state, shardings.rest),
        )(own)
        kept: dict[str, Any] = {}
    else:
        own = state.workers.params, state.workers.opt_state, state.workers.rest
        made, kept = own, state.workers.kept
        if jax.tree.leaves(own)[0].shape[0] != count:
            made = jax.jit(
                lambda own: spread(own, count),
                out_shardings=(shardings.params, shardings.opt_state, shardings.rest),
            )(own)
    kept = {name: _kept_or_zeros(kept, name, like, shardings) for name in like.workers.kept}
    return state.replaced(opt_state=(), rest=(), workers=Workers(*made, kept))


def _mean_as(state: State, like: State) -> State:
    """The mean of workers that were read, for a run that has none."""
    assert state.workers is not None
    own = state.workers.params, state.workers.opt_state, state.workers.rest
    shardings = state_shardings(like)
    mean = jax.jit(
        lambda own: jax.tree.map(lambda x: x[0], spread(own, 1)),
        out_shardings=(shardings.params, shardings.opt_state, shardings.rest),
    )
    params, opt_state, rest = mean(own)
    return state.replaced(params=params, opt_state=opt_state, rest=rest, workers=None)


def _kept_or_zeros(kept: Mapping[str, Any], name: str, like: State, shardings: Any) -> Any:
    """What meetings have kept under a name; zeros if those of the checkpoint kept no such thing."""
    if name in kept:
        return kept[name]
    assert like.workers is not None
    shapes = like.workers.kept[name]
    zeros = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes),
        out_shardings=shardings.kept[name],
    )
    return zeros()


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
