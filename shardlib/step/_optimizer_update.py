"""The update of a step: clipping, the optimizer, and steps that are skipped.

It runs outside the manual region, on global arrays that are laid out in shards. So whatever an
optax transformation reduces over, a global norm or a factor of Adafactor, it reduces over all of
it.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardlib._tree import named_leaves
from shardlib.layouts._host import is_on_host
from shardlib.layouts._specs import as_tuple, parts_over
from shardlib.optimizers._local import Local
from shardlib.step._exchange import Gradient
from shardlib.step._optimizer_call import updated
from shardlib.step._state import State
from shardlib.step._strategy import Strategy
from shardlib.step._streamed_update import Owner, streamed_update


class Update(NamedTuple):
    """What a step makes of a gradient."""

    params: Any
    opt_state: Any
    errors: Any
    nonfinite: jax.Array  # 1 if the gradient was not finite, else 0
    metrics: dict[str, jax.Array]


class Averaged(NamedTuple):
    """What a step knows of gradients that an optimizer has averaged now and then.

    Attributes:
        in_this_step: whether they are in this step.
        workers: how many workers there are.
    """

    in_this_step: jax.Array
    workers: int

    def limit(self, clip: float) -> jax.Array:
        """The norm above which a gradient is clipped, for a limit of that of the mean.

        A worker's own gradient is larger: if all of it is noise, by the root of the number of
        workers. What is above that is clipped. To clip all as the mean is would leave the momentum
        of workers shorter than the variance of means says.
        """
        return jnp.where(self.in_this_step, clip, clip * math.sqrt(self.workers))


def update_of(
    state: State,
    gradient: Gradient,
    trained: Any,
    loss: jax.Array,
    strategy: Strategy,
    averaged: Averaged | None = None,
) -> Update:
    """Clip a gradient and let the optimizer move the parameters.

    Args:
        state: the state before the step.
        gradient: the gradient of the whole batch, with the square of its norm and, for each
            parameter, whether it is finite.
        trained: a `StepParameter` for each trained parameter.
        loss: the loss of the whole batch, for optimizers that ask for it.
        strategy: the strategy of the step.
        averaged: whether the gradient is the mean of workers that have parameters of their own, if
            the optimizer asks for such means.
    """
    optimizer = state.layout.optimizer
    norm, all_finite = jnp.sqrt(gradient.square), jnp.all(gradient.finite)
    metrics = {
        "grad_norm": norm,
        "first_nonfinite": jnp.where(all_finite, -1, jnp.argmin(gradient.finite)),
    }
    # A `Local` optimizer is told which leaves are the means of what it sent itself.
    extra: dict[str, Any] = {}
    if isinstance(optimizer, Local):
        extra["sent"] = jax.tree.map(
            lambda parameter: bool(strategy.exchange.over(parameter.exchanged)), trained
        )
        metrics["compressed"] = optimizer.sends(state.opt_state)
    limit: Any = strategy.clip
    if averaged is not None:
        extra["averaged"] = averaged.in_this_step
        # A transformation is refused beside such an optimizer.
        if limit is not None:
            limit = averaged.limit(limit)

    def moved(params: Any, opt_state: Any, values: Any, scalars: Any) -> tuple[Any, Any, Any]:
        norm, all_finite, loss = scalars
        values = jax.tree.map(lambda g, p: g.astype(p.dtype), values, params)
        values = _clipped(values, norm, params, limit, extra, metrics)
        updates, new_state = updated(optimizer, values, opt_state, params, loss, extra)
        # The sum has the dtype of the parameters, whatever that of the updates is.
        new_params = optax.apply_updates(params, updates)
        if strategy.skips:
            before = params, opt_state
            new_params, new_state = _where(all_finite, (new_params, new_state), before)
        return new_params, new_state, ()

    arguments = state.params, state.opt_state, gradient.values, (norm, all_finite, loss)
    if strategy.offloaded is None:
        params, opt_state, _ = moved(*arguments)
    else:
        by = strategy.offloaded.update
        params, opt_state, _ = streamed_update(moved, *arguments, _owners(state, trained), by)
    # Errors are not skipped by choice: what is left over of a gradient that is not finite would be
    # added to every gradient after it.
    errors = _where(all_finite, gradient.errors, state.errors)
    return Update(params, opt_state, errors, 1 - all_finite.astype(jnp.int32), metrics)


def _owners(state: State, trained: Any) -> list[Owner]:
    """The parameters that have arrays in the host's memory, with what is updated along with them.

    Args:
        state: the state, traced.
        trained: a `StepParameter` for each trained parameter.
    """
    relations = dict(state.layout.relations)
    arrays = [*jax.tree.leaves(state.params), *jax.tree.leaves(state.opt_state)]
    parameters = jax.tree.leaves(trained)
    positions: dict[str, list[int]] = {}
    for position, parameter in enumerate(parameters):
        positions[parameter.path] = [position]
    for number, (path, _) in enumerate(named_leaves(state.opt_state)):
        relation = relations[path]
        if relation.kind == "same":
            positions[str(relation.parameter)].append(len(parameters) + number)
    owners = []
    for position, parameter in enumerate(parameters):
        updated = positions[parameter.path]
        if any(is_on_host(arrays[at]) for at in updated):
            owners.append(_owner(parameter, position, updated))
    return owners


def _owner(parameter: Any, position: int, updated: list[int]) -> Owner:
    """A parameter as the streamed update takes it."""
    mesh = parameter.strategy.device_mesh.shape
    spec = parameter.split.spec
    entries = [*spec, *[None] * (len(parameter.shape) - len(spec))]
    parts = tuple(parts_over(mesh, as_tuple(entry)) for entry in entries)
    return Owner(parameter.path, parameter.shape, parts, position, tuple(updated))


def _clipped(
    values: Any,
    norm: jax.Array,
    params: Any,
    limit: Any,
    extra: dict[str, Any],
    metrics: dict[str, jax.Array],
) -> Any:
    """A gradient clipped by a transformation, by the global norm, or not at all.

    Args:
        values: the gradient.
        norm: the global norm of it.
        params: the parameters, for a transformation that looks at them.
        limit: the largest norm, or the transformation; None for neither.
        extra: what a `Local` optimizer is told, `sent` among it.
        metrics: the metrics so far, with `compressed` for such an optimizer.
    """
    if isinstance(limit, optax.GradientTransformation):
        return _clipped_by(limit, values, params)
    if limit is None:
        return values
    # One if the norm is small enough, and finite for a norm of zero.
    scale = limit / jnp.maximum(norm, limit)
    return _scaled(values, scale, extra.get("sent"), metrics.get("compressed"))


def _where(condition: jax.Array, new: Any, old: Any) -> Any:
    """New values or old ones; a `select`, since both are there already."""
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _scaled(gradient: Any, scale: jax.Array, sent: Any, compressed: Any) -> Any:
    """A gradient scaled down to a norm.

    What an optimizer sent itself in this step was clipped before it was sent, and is left as it is.
    """
    scales = jax.tree.map(lambda _: scale, gradient)
    if sent is not None:
        scales = jax.tree.map(lambda was_sent: jnp.where(compressed & was_sent, 1, scale), sent)
    return jax.tree.map(lambda g, scale: g * scale.astype(g.real.dtype), gradient, scales)


def _clipped_by(clip: optax.GradientTransformation, gradient: Any, params: Any) -> Any:
    """A gradient after an optax transformation that keeps no state."""
    state = clip.init(params)
    if jax.tree.leaves(state):
        raise ValueError(
            "`Strategy(clip=...)` takes a transformation without state; this one has some. Put it "
            "into the optimizer: `optax.chain(clip, optimizer)`."
        )
    return clip.update(gradient, state, params)[0]
