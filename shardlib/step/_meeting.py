"""Meetings of workers that train apart, on the shards of each device.

    of an exchange      own parameters - center   -> moves, averaged    -> a new center, and own
    of an optimizer     what it has gathered      -> messages, averaged -> both, and its state

Each is averaged over workers as the exchange says, exactly or as codes. A step in which no meeting
is due takes the other branch of the program, which sends nothing.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.collectives._exact import Exact, Exchange, Parameter, averaged_axes
from shardlib.collectives._meetings import Meeting, wide
from shardlib.collectives._worker_sums import axes_of_workers, summed_over_workers
from shardlib.layouts._specs import axes_without, keep_axes, parts_over
from shardlib.optimizers._local import Apart
from shardlib.step._exchange import ErrorsByPath, Gradient, LocalExchange
from shardlib.step._scopes import EXCHANGE
from shardlib.step._state import Layout, State

# The branch of a step in which workers meet. Of the others one sends nothing, and one has nothing
# to send, since all workers have the same.
_MEETS = 2


class Shared(NamedTuple):
    """What a meeting reads and writes, one worker's.

    Attributes:
        center: the parameters on which workers met last.
        own: this worker's parameters.
        opt_state: the state of its optimizer, if that says when workers meet; else nothing.
        kept: by name, what the last meeting has kept, each a tree like the parameters.
        errors: what codes have left out, by the path of the parameter.
    """

    center: Any
    own: Any
    opt_state: Any
    kept: dict[str, Any]
    errors: ErrorsByPath


def meet(
    layout: Layout, shared: Shared, specs_of_optimizer: Any, steps: jax.Array
) -> tuple[jax.Array, Shared]:
    """Whether workers meet at the end of a step, and what they have then.

    It is called where the axes of the workers are manual, and makes all others manual too, so that
    no array is gathered along these before it is sent.

    Args:
        layout: the layout of the state, whose exchange or optimizer says when workers meet.
        shared: what workers have before.
        specs_of_optimizer: how `shared.opt_state` is laid out.
        steps: the number of steps taken, this one included.
    """
    meeting: Any
    optimizer = layout.optimizer
    if isinstance(optimizer, Apart):
        meeting = _OfOptimizer(layout, shared.center)
        due = optimizer.meets(shared.opt_state)
        branch = jnp.where(due, _MEETS, optimizer.alike(shared.opt_state).astype(jnp.int32))
    else:
        meeting = _OfExchange(layout, shared.center)
        due = meeting.exchange.is_due(steps)
        branch = jnp.where(due, _MEETS, 0)

    def apart(shared: Shared) -> Shared:
        return shared

    def alike(shared: Shared) -> Shared:
        return shared._replace(center=shared.own)

    def on_shards(shared: Shared, branch: jax.Array) -> Shared:
        return lax.switch(branch, (apart, alike, meeting), shared)

    others = axes_without(layout.strategy.every_axis, layout.apart)
    stored = meeting.means.specs(others)
    specs = Shared(
        center=stored,
        own=stored,
        opt_state=jax.tree.map(lambda spec: keep_axes(spec, others), specs_of_optimizer),
        kept=dict.fromkeys(shared.kept, stored),
        errors=jax.tree.map(lambda _: PartitionSpec(others), shared.errors),
    )
    return due, _manual_over(others, on_shards, specs)(shared, branch)


def averaged_if_asked(
    layout: Layout, state: State, gradient: Gradient
) -> tuple[jax.Array, Gradient]:
    """Whether the optimizer asks for the mean of all workers' gradients; that, or the worker's own.

    It is called where `meet` is. No worker's gradient counts as finite unless all are, so that all
    of them skip the step.

    Args:
        layout: the layout of the state of all workers.
        state: the state of this one before the step.
        gradient: its own gradient.
    """
    optimizer: Any = layout.optimizer
    asked = optimizer.averages(state.opt_state)
    means = _Means(layout, Exact(), layout.parameters_of(state.params))
    local = LocalExchange(Exact(), means.parameters, means.sizes)

    def on_shards(gradient: Gradient, asked: jax.Array) -> Gradient:
        def averaged(gradient: Gradient) -> Gradient:
            with jax.named_scope(EXCHANGE):
                values, _ = means(means.leaves(gradient.values), {})
            measured = local.measured(values, gradient.errors)
            # The worker's own gradient tells which of the parameters is to blame.
            return measured._replace(values=means.tree(values), finite=gradient.finite)

        gradient = lax.cond(asked, averaged, lambda gradient: gradient, gradient)
        all_finite = lax.pmin(jnp.all(gradient.finite).astype(jnp.int32), layout.apart) == 1
        return gradient._replace(finite=gradient.finite & all_finite)

    others = axes_without(layout.strategy.every_axis, layout.apart)
    replicated = PartitionSpec()
    specs = Gradient(means.specs(others), {}, replicated, replicated)
    return asked, _manual_over(others, on_shards, specs)(gradient, asked)


def _manual_over(axes: tuple[str, ...], function: Callable[..., Any], specs: Any) -> Any:
    """A function of arrays of these specs and a number, manual over some axes more."""
    if not axes:
        return function
    return jax.shard_map(
        function,
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        axis_names=set(axes),
        check_vma=False,
    )


class _Means:
    """Means over workers, as one device takes part in them, where every axis is manual.

    `tree` and `leaves` go from arrays of all parameters to the tree of these, and back.
    """

    def __init__(self, layout: Layout, by: Exchange, parameters: Any) -> None:
        described, treedef = jax.tree.flatten(parameters, is_leaf=_is_parameter)
        self.parameters: Sequence[Parameter] = described
        self.tree, self.leaves = treedef.unflatten, treedef.flatten_up_to
        self.sizes = dict(layout.strategy.device_mesh.shape)
        self.apart, self.by = layout.apart, by
        self.workers = parts_over(self.sizes, layout.apart)
        self.coded = LocalExchange(by, described, self.sizes)

    def specs(self, axes: tuple[str, ...]) -> Any:
        """How the parameters are laid out at rest over some axes, a tree like them."""
        return self.tree([keep_axes(parameter.stored, axes) for parameter in self.parameters])

    def __call__(
        self, arrays: list[jax.Array], errors: ErrorsByPath, alive: Sequence[Any] | None = None
    ) -> tuple[list[jax.Array], ErrorsByPath]:
        """The means over workers: of what is sent as codes, and exactly of all else.

        `alive` says of each array where it is not always zero; None if that is unknown.
        """
        means = self._exact_means(arrays)
        coded = self.coded.averaged_positions
        if not coded:
            return means, errors
        own = [arrays[i].astype(jnp.float32) for i in coded]
        own_alive: list[Any] = [None] * len(coded)
        if alive is not None:
            own_alive = [alive[i] for i in coded]
        return self.coded.average(means, own, errors, own_alive)

    def _exact_means(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """The means of what is sent exactly; all other arrays as they are."""
        positions, axes = [], []
        for position, parameter in enumerate(self.parameters):
            over = averaged_axes(self.apart, parameter)
            if over and position not in self.coded.averaged_positions:
                positions.append(position)
                axes.append(axes_of_workers(over, parameter, self.sizes))
        means = list(arrays)
        own = [arrays[i] for i in positions]
        totals = summed_over_workers(own, axes, self.sizes, self.by.within.bucket_bytes)
        for position, total in zip(positions, totals, strict=True):
            means[position] = total / self.workers
        return means


class _OfExchange:
    """A meeting that an exchange wants: workers average how far they have moved."""

    def __init__(self, layout: Layout, params: Any) -> None:
        exchange: Any = layout.strategy.exchange
        self.exchange: Meeting = exchange
        self.means = _Means(layout, exchange.by, layout.parameters_of(params))

    def __call__(self, shared: Shared) -> Shared:
        """What workers have after it."""
        center, own = self.means.leaves(shared.center), self.means.leaves(shared.own)
        moves = [wide(mine) - wide(ours) for mine, ours in zip(own, center, strict=True)]
        with jax.named_scope(EXCHANGE):
            means, errors = self.means(moves, shared.errors)
        kept = {name: self.means.leaves(tree) for name, tree in shared.kept.items()}
        for number, mean in enumerate(means):
            met = self.exchange.met(
                wide(center[number]),
                wide(own[number]),
                mean,
                {name: leaves[number] for name, leaves in kept.items()},
                self.means.workers,
            )
            center[number] = met.center.astype(center[number].dtype)
            own[number] = met.own.astype(own[number].dtype)
            for name, value in met.kept.items():
                kept[name][number] = value.astype(kept[name][number].dtype)
        return shared._replace(
            center=self.means.tree(center),
            own=self.means.tree(own),
            kept={name: self.means.tree(leaves) for name, leaves in kept.items()},
            errors=errors,
        )


class _OfOptimizer:
    """A meeting that an optimizer wants: workers average its messages."""

    def __init__(self, layout: Layout, params: Any) -> None:
        optimizer: Any = layout.optimizer
        self.optimizer: Apart = optimizer
        self.means = _Means(layout, layout.strategy.exchange, layout.parameters_of(params))

    def __call__(self, shared: Shared) -> Shared:
        """What workers have after it."""
        messages, alive = self.optimizer.message(shared.opt_state)
        with jax.named_scope(EXCHANGE):
            means, errors = self.means(
                self.means.leaves(messages), shared.errors, self.means.leaves(alive)
            )
        # In the dtypes of the messages: means of codes are float32.
        mean = jax.tree.map(lambda m, x: m.astype(x.dtype), self.means.tree(means), messages)
        params, opt_state = self.optimizer.met(mean, shared.opt_state, shared.center)
        return shared._replace(center=params, own=params, opt_state=opt_state, errors=errors)


def _is_parameter(node: Any) -> bool:
    return isinstance(node, Parameter)
