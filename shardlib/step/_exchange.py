"""The exchange of a step: exact sums first, then the strategy's exchange between workers.

A contribution is the gradient of one device's own examples. An exchange names the axes over which
it averages (it "takes" them); over all others sums are exact. A worker is all devices that have the
same position along the axes it takes: on a mesh of `pod=4,data=8`, an exchange over `pod` has four
workers of eight devices, and one over both axes has 32 of one.

    contributions of devices
      -> summed exactly within workers, laid out as at rest, divided by the
         weight of the batch                                                    `within`
      -> averaged over workers, if the exchange takes any axes                  `averaged`, `sent`
      -> gradient, errors for the next step, norm of the gradient, which gradients are finite
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.collectives._compressed import Errors
from shardlib.collectives._exact import Exchange, ExchangeInputs, Parameter
from shardlib.collectives._feedback import Feedback
from shardlib.collectives._worker_sums import (
    WorkerAxes,
    axes_of_workers,
    other_axes,
    summed_over_workers,
)
from shardlib.layouts._specs import axes_without, keep_axes, parts_over
from shardlib.optimizers._local import Local
from shardlib.step._gradient_sizes import SKETCH_SIZE, sketch, squares, sum_of_squares
from shardlib.step._scopes import COMPRESSED, EXACT

ErrorsByPath = dict[str, Errors | Feedback]


class Gradient(NamedTuple):
    """What an exchange makes of the contributions of all devices.

    Attributes:
        values: the gradient of the batch, before clipping. While the optimizer decides what is
            sent, the mean of its messages for those parameters that the exchange averages.
        errors: what compression left out, for the next step, by path.
        square: the square of the norm of all values. While the optimizer decides what is sent, an
            estimate of that of the gradient.
        finite: for each parameter, whether its gradient is finite, and so small that its square is.
    """

    values: Any
    errors: ErrorsByPath
    square: Any
    finite: Any


class Sender(NamedTuple):
    """An optimizer that decides what workers send each other, such as 1-bit Adam.

    Attributes:
        optimizer: the optimizer.
        state: its state.
        specs: how that is laid out.
        clip: the largest norm of a gradient, None for any.
    """

    optimizer: Local
    state: Any
    specs: Any
    clip: float | None


def exchange_gradients(
    exchange: Exchange,
    gradients: Any,
    weight: jax.Array,
    parameters: Any,
    errors: ErrorsByPath,
    sender: Sender | None,
) -> Gradient:
    """Turn every device's own gradients into the gradient of the batch.

    It is called where the data axes are manual, and makes all other axes manual too. If an array
    were left split along an automatic axis, XLA would gather it before a collective over a manual
    one, and send as many times the bytes.

    Args:
        exchange: the exchange of the strategy.
        gradients: the contributions of this device, a tree like the trained parameters.
        weight: the weight of the whole batch.
        parameters: a `Parameter` for each gradient.
        errors: what the exchange left over in the step before.
        sender: the optimizer, if it decides what workers send each other.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    described = treedef.flatten_up_to(parameters)
    mesh = jax.sharding.get_abstract_mesh()

    def exchanged(shards: list[jax.Array], weight: jax.Array, errors: Any, state: Any) -> Gradient:
        # By now every axis is manual: arrays are shards, and collectives name their axes.
        local = LocalExchange(exchange, described, dict(mesh.shape))
        sums = local.within(shards, weight)
        if not local.averaged_positions:
            return local.measured(sums, errors)
        if sender is None:
            return local.averaged(sums, errors)
        # What a `shard_map` splits comes in as an argument. So this is the device's shard of it.
        return local.sent(sums, errors, sender._replace(state=state), treedef)

    state: Any = ()
    if sender is not None:
        state = sender.state
    # Some axes may be automatic out here, those of tensor parallelism for one. Inside, none is.
    everywhere: Any = exchanged
    if mesh.auto_axes:
        everywhere = _manual_everywhere(exchanged, mesh.auto_axes, described, errors, sender)
    gradient = everywhere(leaves, weight, errors, state)
    return gradient._replace(values=treedef.unflatten(gradient.values))


def _manual_everywhere(
    exchanged: Callable[..., Any],
    automatic: tuple[str, ...],
    parameters: Sequence[Parameter],
    errors: ErrorsByPath,
    sender: Sender | None,
) -> Callable[..., Any]:
    """The same function, manual over the automatic axes too.

    Args:
        exchanged: the function, `(shards, weight, errors, state)` to a `Gradient` of leaves.
        automatic: the axes that are automatic around it.
        parameters: what it exchanges.
        errors: the errors, of which only the structure is used.
        sender: the optimizer, if it decides what workers send each other.
    """
    replicated = PartitionSpec()
    # Each device has errors of its own, in the order of `Strategy.every_axis`: first the manual
    # axes, which are split outside of this, then the automatic ones.
    error_specs = jax.tree.map(lambda _: PartitionSpec(automatic), errors)
    state_specs = _sender_specs(sender, automatic)
    contributed = [keep_axes(parameter.spec, automatic) for parameter in parameters]
    stored = [keep_axes(parameter.stored, automatic) for parameter in parameters]
    return jax.shard_map(
        exchanged,
        in_specs=(contributed, replicated, error_specs, state_specs),
        out_specs=Gradient(stored, error_specs, replicated, replicated),
        axis_names=set(automatic),
        check_vma=False,
    )


def _sender_specs(sender: Sender | None, automatic: tuple[str, ...]) -> Any:
    """The specs of the state of an optimizer that sends, over axes that are automatic so far."""
    if sender is None:
        return ()
    return jax.tree.map(lambda spec: keep_axes(spec, automatic), sender.specs)


class LocalExchange:
    """The exchange of a step's gradients as one device sees it, manual over every axis.

    `averaged_positions` are those of the parameters that are averaged by the exchange. All others
    are only summed exactly. A list named `own` or `averaged` has an entry for each of these
    positions; every other list has one for each parameter.
    """

    def __init__(
        self, exchange: Exchange, parameters: Sequence[Parameter], sizes: Mapping[str, int]
    ) -> None:
        self.exchange, self.parameters, self.sizes = exchange, parameters, sizes
        self.axes_of: list[WorkerAxes] = []
        self.averaged_positions: list[int] = []
        for position, parameter in enumerate(parameters):
            own = axes_of_workers(exchange.over(parameter), parameter, sizes)
            self.axes_of.append(own)
            if own.over:
                self.averaged_positions.append(position)

    def within(self, contributions: Sequence[jax.Array], weight: jax.Array) -> list[jax.Array]:
        """Sum exactly over all axes that the exchange does not take; divide by the batch's weight.

        Of a parameter that the exchange averages, the result is this worker's summand of the
        batch's gradient. Of any other, it is that gradient.
        """
        summed: list[Parameter] = []
        for parameter, own in zip(self.parameters, self.axes_of, strict=True):
            axes = axes_without(parameter.axes, own.over)
            summed.append(parameter._replace(axes=axes))
        return self.exchange.within.reduce(contributions, weight, summed)

    def measured(self, values: list[jax.Array], errors: ErrorsByPath) -> Gradient:
        """The result of an exchange whose values are final: with them, their norm."""
        of_each = squares(values, [own.split for own in self.axes_of], self.sizes)
        return Gradient(values, errors, jnp.sum(of_each), jnp.isfinite(of_each))

    def averaged(self, sums: list[jax.Array], errors: ErrorsByPath) -> Gradient:
        """Average the workers' gradients, by the exchange.

        What is not averaged has been summed exactly, and goes by.
        """
        unknown = [None] * len(self.averaged_positions)
        values, errors = self.average(sums, self._own_gradients(sums), errors, unknown)
        return self.measured(values, errors)

    def sent(
        self, sums: list[jax.Array], errors: ErrorsByPath, sender: Sender, treedef: Any
    ) -> Gradient:
        """Average what the optimizer sends or, while it sends nothing, gradients exactly.

        Which of the two a step does is known only when it runs, so both are in its program.
        """

        def by_messages() -> Gradient:
            with jax.named_scope(COMPRESSED):
                return self._messages(sums, errors, sender, treedef)

        def by_sums() -> Gradient:
            with jax.named_scope(EXACT):
                own = [sums[i] for i in self.averaged_positions]
                totals = summed_over_workers(
                    own,
                    [self.axes_of[i] for i in self.averaged_positions],
                    self.sizes,
                    self.exchange.within.bucket_bytes,
                )
                # The dtype of the means of messages, which the other branch returns.
                totals = [total.astype(jnp.float32) for total in totals]
                return self.measured(self._with(sums, totals), errors)

        return lax.cond(sender.optimizer.sends(sender.state), by_messages, by_sums)

    def _messages(
        self, sums: list[jax.Array], errors: ErrorsByPath, sender: Sender, treedef: Any
    ) -> Gradient:
        """Average the messages that the optimizer makes of the workers' own gradients.

        Gradients are clipped before the optimizer sees them.
        """
        own = self._own_gradients(sums)
        square, finite = self._estimated(sums, own)
        clipped = own
        if sender.clip is not None:
            # The estimate of the norm is the same on all workers, and so is the scale: the mean of
            # clipped gradients is the clipped mean.
            scale = sender.clip / jnp.maximum(jnp.sqrt(square), sender.clip)
            clipped = [gradient * scale.astype(gradient.dtype) for gradient in own]
        # Those that are summed exactly are clipped after the exchange, by the optimizer's update.
        gradients = treedef.unflatten(self._with(sums, clipped))
        messages, alive = sender.optimizer.message(gradients, sender.state)
        message_leaves = treedef.flatten_up_to(messages)
        alive_leaves = treedef.flatten_up_to(alive)
        own_alive = [alive_leaves[i] for i in self.averaged_positions]
        own_messages = [message_leaves[i].astype(jnp.float32) for i in self.averaged_positions]
        values, after = self.average(sums, own_messages, errors, own_alive)
        # What was finite may not be as a code. Its error would then never be finite again.
        all_finite = finite & self._finite(values) & jnp.isfinite(square)
        # One gradient that is not finite spoils the norm, and with it the scale of all others. Then
        # only that one is named.
        finite = jnp.where(jnp.all(finite), all_finite, finite)
        return Gradient(values, after, square, finite)

    def _own_gradients(self, sums: list[jax.Array]) -> list[jax.Array]:
        """The gradients of this worker alone.

        Each is its summand times the number of workers, so that the mean over workers is the
        gradient of the batch.
        """
        own: list[jax.Array] = []
        for i in self.averaged_positions:
            workers = parts_over(self.sizes, self.axes_of[i].over)
            own.append(sums[i].astype(jnp.float32) * workers)
        return own

    def _with(self, sums: list[jax.Array], averaged: list[jax.Array]) -> list[jax.Array]:
        """The sums of all parameters, with these in place of those that the exchange averages."""
        values = list(sums)
        for i, value in zip(self.averaged_positions, averaged, strict=True):
            values[i] = value
        return values

    def average(
        self, sums: list[jax.Array], own: list[jax.Array], errors: ErrorsByPath, alive: list[Any]
    ) -> tuple[list[jax.Array], ErrorsByPath]:
        """Average what workers have, by the exchange; returns values and errors.

        `alive` says of each gradient where it is not always zero; None if that is unknown.
        """
        # Only these parameters are averaged by the exchange: the others are summed already.
        described = [self.parameters[i] for i in self.averaged_positions]
        shared = [self.axes_of[i].shared for i in self.averaged_positions]
        before: list[Any] = [None] * len(self.averaged_positions)
        if self.exchange.keeps_errors:
            before = [_own_error(errors[parameter.path]) for parameter in described]
        inputs = ExchangeInputs(shared, before, alive)
        means, after = self.exchange.average(own, described, inputs)
        if self.exchange.keeps_errors:
            errors = {}
            for parameter, error in zip(described, after, strict=True):
                errors[parameter.path] = jax.tree.map(lambda x: x[None], error)
        return self._with(sums, means), errors

    def _estimated(
        self, sums: list[jax.Array], own: list[jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """An estimate of the square of the norm of the whole gradient, and what of it is finite.

        No device has the mean gradient x. But each has a sketch of its own gradient: sums of its
        elements with random signs s. A sketch is linear: the mean of the workers' sketches is the
        sketch of x. And

            E[(sum_k s_k x_k)^2]  =  sum_k x_k^2

        so the squares of its sums add up to an estimate of the square of the norm of x. With
        `SKETCH_SIZE` sums its standard deviation is three percent; that of the norm is half of it.
        """
        # What is summed exactly has an exact norm, to which the estimate of the rest is added.
        square = self._square_of_summed(sums)
        for over in dict.fromkeys(self.axes_of[i].over for i in self.averaged_positions):
            mean = lax.pmean(self._sketch_of_averaged(own, over), over)
            others = other_axes(self.sizes, over)
            estimate = jnp.sum(jnp.square(mean))
            # Devices along the other axes have sketches of other parts, or of their share of one.
            if others:
                estimate = lax.psum(estimate, others)
            square += estimate
        return square, self._finite(self._with(sums, own))

    def _square_of_summed(self, sums: list[jax.Array]) -> jax.Array:
        """The square of the norm of all gradients that are summed exactly."""
        summed = [i for i in range(len(sums)) if i not in self.averaged_positions]
        if not summed:
            return jnp.float32(0)
        axes = [self.axes_of[i].split for i in summed]
        return jnp.sum(squares([sums[i] for i in summed], axes, self.sizes))

    def _sketch_of_averaged(self, own: list[jax.Array], over: tuple[str, ...]) -> jax.Array:
        """Sums with random signs of all gradients that are averaged over the same axes."""
        total, offset = jnp.zeros(SKETCH_SIZE, jnp.float32), 0
        for i, gradient in zip(self.averaged_positions, own, strict=True):
            if self.axes_of[i].over != over:
                continue
            split = {*self.axes_of[i].split, *over}
            copies = parts_over(self.sizes, axes_without(self.sizes, split))
            # One array starts where the one before ends. So if there are fewer elements than sums,
            # each element has a sum of its own, and the estimate is exact.
            total += jnp.roll(sketch(gradient, i), offset) / math.sqrt(copies)
            offset += gradient.size
        return total

    def _finite(self, values: list[jax.Array]) -> jax.Array:
        """For each array, whether its elements and its norm are finite on all devices."""
        # On how many devices each array is not finite, by one small sum for all arrays.
        bad = jnp.stack([~jnp.isfinite(sum_of_squares(x)) for x in values]).astype(jnp.int32)
        every_axis = other_axes(self.sizes, ())
        if every_axis:
            bad = lax.psum(bad, every_axis)
        return bad == 0


def _own_error(error: Errors | Feedback) -> Any:
    """What a device holds of errors: in the state they have a leading dim of devices."""
    return jax.tree.map(lambda x: x[0], error)
