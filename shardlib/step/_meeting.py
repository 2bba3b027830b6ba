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
from shardlib.collectives._fragments import Fragment, fragments
from shardlib.collectives._meetings import Meeting, wide
from shardlib.collectives._worker_sums import WorkerSums, axes_of_workers
from shardlib.layouts._specs import axes_without, keep_axes, parts_over
from shardlib.optimizers._local import Apart
from shardlib.step._exchange import ErrorsByPath, Gradient, LocalExchange
from shardlib.step._scopes import EXCHANGE
from shardlib.step._state import Layout, State


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
    optimizer = layout.optimizer
    described = Described.of(layout.parameters_of(shared.center))
    meetings: list[Callable[[Shared], Shared]] = []
    if isinstance(optimizer, Apart):
        due = optimizer.meets(shared.opt_state)
        which = 0
        alike = optimizer.alike(shared.opt_state)
        meetings.append(_OptimizerMeeting(layout, optimizer, described))
    else:
        exchange: Any = layout.strategy.exchange
        due, which = exchange.is_due(steps), exchange.fragment_at(steps)
        alike = jnp.zeros((), bool)
        sizes = layout.strategy.device_mesh.shape
        for fragment in fragments(described.parameters, exchange.fragments, sizes):
            meetings.append(ExchangeMeeting(layout, exchange, described, fragment))
    # One branch sends nothing, one has nothing to send since all workers have the same, and each
    # part of the parameters has one in which it meets.
    branch = jnp.where(due, 2 + which, alike.astype(jnp.int32))

    def stay_apart(shared: Shared) -> Shared:
        return shared

    def stay_alike(shared: Shared) -> Shared:
        return shared._replace(center=shared.own)

    def on_shards(shared: Shared, branch: jax.Array) -> Shared:
        return lax.switch(branch, (stay_apart, stay_alike, *meetings), shared)

    others = axes_without(layout.strategy.every_axis, layout.apart)
    specs = specs_of(layout, described, shared)
    of_optimizer = jax.tree.map(lambda spec: keep_axes(spec, others), specs_of_optimizer)
    specs = specs._replace(opt_state=of_optimizer)
    return due, manual_over(others, on_shards, specs, specs)(shared, branch)


def specs_of(layout: Layout, described: "Described", shared: Shared) -> Shared:
    """How all that workers share is laid out within a worker, but for an optimizer's state."""
    others = axes_without(layout.strategy.every_axis, layout.apart)
    stored = described.specs(others)
    return Shared(
        center=stored,
        own=stored,
        opt_state=(),
        kept=dict.fromkeys(shared.kept, stored),
        errors=jax.tree.map(lambda _: PartitionSpec(others), shared.errors),
    )


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
    described = Described.of(layout.parameters_of(state.params))
    means = Means(layout, Exact(), described.parameters)
    local = LocalExchange(Exact(), described.parameters, means.sizes)

    def on_shards(gradient: Gradient, asked: jax.Array) -> Gradient:
        def averaged(gradient: Gradient) -> Gradient:
            with jax.named_scope(EXCHANGE):
                own = described.leaves(gradient.values)
                values, _ = means([wide(value) for value in own], {})
            values = [value.astype(mine.dtype) for value, mine in zip(values, own, strict=True)]
            measured = local.measured(values, gradient.errors)
            # The worker's own gradient tells which of the parameters is to blame.
            finite = measured.finite & gradient.finite
            return measured._replace(values=described.tree(values), finite=finite)

        gradient = lax.cond(asked, averaged, lambda gradient: gradient, gradient)
        all_finite = lax.pmin(jnp.all(gradient.finite).astype(jnp.int32), layout.apart) == 1
        return gradient._replace(finite=gradient.finite & all_finite)

    others = axes_without(layout.strategy.every_axis, layout.apart)
    replicated = PartitionSpec()
    specs = Gradient(described.specs(others), {}, replicated, replicated)
    return asked, manual_over(others, on_shards, specs, specs)(gradient, asked)


def manual_over(
    axes: tuple[str, ...], function: Callable[..., Any], before: Any, after: Any
) -> Any:
    """A function of arrays and a number, manual over some axes more.

    Args:
        axes: these axes.
        function: the function.
        before: the specs of the arrays.
        after: those of its results.
    """
    if not axes:
        return function
    return jax.shard_map(
        function,
        in_specs=(before, PartitionSpec()),
        out_specs=after,
        axis_names=set(axes),
        check_vma=False,
    )


class Described(NamedTuple):
    """All parameters, and how their arrays make up a tree."""

    parameters: list[Parameter]
    treedef: Any

    @classmethod
    def of(cls, parameters: Any) -> "Described":
        """The description of a tree of `Parameter`s."""
        return cls(*jax.tree.flatten(parameters, is_leaf=_is_parameter))

    def tree(self, leaves: Sequence[Any]) -> Any:
        """A value for each parameter, arranged as a tree like the parameters."""
        return self.treedef.unflatten(leaves)

    def leaves(self, tree: Any) -> list[Any]:
        """The values of a tree like the parameters, one for each parameter."""
        return self.treedef.flatten_up_to(tree)

    def specs(self, axes: tuple[str, ...]) -> Any:
        """How parameters are laid out at rest over some axes, a tree like them."""
        return self.tree([keep_axes(parameter.stored, axes) for parameter in self.parameters])


class Sent(NamedTuple):
    """What workers have sent each other of some arrays.

    Attributes:
        exact: sums of what is sent exactly, of which a device may have a part.
        coded: means of what is sent as codes.
    """

    exact: list[list[jax.Array]]
    coded: list[jax.Array]


class Means:
    """Means over workers, as one device takes part in them, where every axis is manual."""

    def __init__(self, layout: Layout, by: Exchange, parameters: Sequence[Parameter]) -> None:
        self.parameters = parameters
        self.sizes = dict(layout.strategy.device_mesh.shape)
        self.by = by
        self.workers = parts_over(self.sizes, layout.apart)
        self.coded = LocalExchange(by, parameters, self.sizes)
        self.exact_positions, self.exact_axes = [], []
        for position, parameter in enumerate(parameters):
            over = averaged_axes(layout.apart, parameter)
            if over and position not in self.coded.averaged_positions:
                self.exact_positions.append(position)
                self.exact_axes.append(axes_of_workers(over, parameter, self.sizes))

    def __call__(
        self, arrays: list[jax.Array], errors: ErrorsByPath, alive: Sequence[Any] | None = None
    ) -> tuple[list[jax.Array], ErrorsByPath]:
        """The means over workers: of what is sent as codes, and exactly of all else.

        `alive` says of each array where it is not always zero; None if that is unknown.
        """
        sent, errors = self.send(arrays, errors, alive)
        return self.receive(arrays, sent), errors

    def send(
        self, arrays: list[jax.Array], errors: ErrorsByPath, alive: Sequence[Any] | None = None
    ) -> tuple[Sent, ErrorsByPath]:
        """The first half of it: all that goes between workers."""
        exact = self._sums(arrays).of_parts([arrays[i] for i in self.exact_positions])
        coded = self.coded.averaged_positions
        if not coded:
            return Sent(exact, []), errors
        own = [arrays[i].astype(jnp.float32) for i in coded]
        own_alive: list[Any] = [None] * len(coded)
        if alive is not None:
            own_alive = [alive[i] for i in coded]
        means, errors = self.coded.average(arrays, own, errors, own_alive)
        return Sent(exact, [means[i] for i in coded]), errors

    def receive(self, arrays: list[jax.Array], sent: Sent) -> list[jax.Array]:
        """The second half, within workers. What is not averaged stays as it is in `arrays`."""
        means = list(arrays)
        totals = self._sums(arrays).gathered(sent.exact)
        for position, total in zip(self.exact_positions, totals, strict=True):
            means[position] = total / self.workers
        for position, mean in zip(self.coded.averaged_positions, sent.coded, strict=True):
            means[position] = mean
        return means

    def _sums(self, arrays: list[jax.Array]) -> WorkerSums:
        own = [arrays[i] for i in self.exact_positions]
        return WorkerSums(own, self.exact_axes, self.sizes, self.by.within.bucket_bytes)


class ExchangeMeeting:
    """The meeting of an exchange: workers average how far some parameters have moved."""

    def __init__(
        self, layout: Layout, exchange: Meeting, described: Described, fragment: Fragment
    ) -> None:
        self.exchange, self.described, self.fragment = exchange, described, fragment
        self.means = Means(layout, exchange.by, [part.parameter for part in fragment])

    def __call__(self, shared: Shared) -> Shared:
        """What workers have after it."""
        with jax.named_scope(EXCHANGE):
            means, errors = self.means(self.moves(shared), shared.errors)
        return self.met(shared._replace(errors=errors), means)

    def moves(self, shared: Shared) -> list[jax.Array]:
        """How far this worker has moved from the center, in each part that meets."""
        center = self.described.leaves(shared.center)
        own = self.described.leaves(shared.own)
        moves = []
        for part in self.fragment:
            moves.append(wide(part.of(own)) - wide(part.of(center)))
        return moves

    def met(self, shared: Shared, means: Sequence[jax.Array]) -> Shared:
        """What workers have once they know the means of their moves."""
        center = self.described.leaves(shared.center)
        own = self.described.leaves(shared.own)
        kept = {name: self.described.leaves(tree) for name, tree in shared.kept.items()}
        for part, mean in zip(self.fragment, means, strict=True):
            met = self.exchange.met(
                wide(part.of(center)),
                wide(part.of(own)),
                mean,
                {name: part.of(leaves) for name, leaves in kept.items()},
                self.means.workers,
            )
            part.put(center, met.center)
            part.put(own, met.own)
            for name, value in met.kept.items():
                part.put(kept[name], value)
        return shared._replace(
            center=self.described.tree(center),
            own=self.described.tree(own),
            kept={name: self.described.tree(leaves) for name, leaves in kept.items()},
        )


class _OptimizerMeeting:
    """The meeting of an optimizer: workers average its messages."""

    def __init__(self, layout: Layout, optimizer: Apart, described: Described) -> None:
        self.optimizer, self.described = optimizer, described
        self.means = Means(layout, layout.strategy.exchange, described.parameters)

    def __call__(self, shared: Shared) -> Shared:
        """What workers have after it."""
        messages, alive = self.optimizer.message(shared.opt_state)
        own, own_alive = self.described.leaves(messages), self.described.leaves(alive)
        with jax.named_scope(EXCHANGE):
            means, errors = self.means(own, shared.errors, own_alive)
        # In the dtypes of the messages: means of codes are float32.
        means = [mean.astype(x.dtype) for mean, x in zip(means, own, strict=True)]
        params, opt_state = self.optimizer.met(
            self.described.tree(means), shared.opt_state, shared.center
        )
        return shared._replace(center=params, own=params, opt_state=opt_state, errors=errors)


def _is_parameter(node: Any) -> bool:
    return isinstance(node, Parameter)
