"""The gradient of a batch: the part of a step that is manual over the data axes.

    examples of this device
      -> microbatches
      -> forward and backward of each, contributions added up in float32
      -> totals, weights and metrics summed over devices
      -> contributions exchanged, once

Every function here runs inside one `jax.shard_map`, on a device's own examples and with parameters
as they are stored. Over all other axes it is automatic: tensor and sequence parallelism are
annotations in the loss. How a loss with whole weights is differentiated where weights are stored
in shards is told in `docs/gradients.md`.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.collectives._exact import inverse
from shardlib.layouts._specs import keep_axes
from shardlib.step._adapted import adapted
from shardlib.step._exchange import Gradient, Sender, exchange_gradients
from shardlib.step._loss import NONFINITE, LossFunction, call_loss, forward, nonfinite_metrics
from shardlib.step._loss_checks import check_loss
from shardlib.step._loss_trace import LossCall
from shardlib.step._microbatches import every_nth, microbatches_of
from shardlib.step._pipelined import Pipelined
from shardlib.step._scopes import EXCHANGE, LOSS
from shardlib.step._state import Layout, combine
from shardlib.step._strategy import Strategy
from shardlib.step._weights import Weights, with_partitionable_lookups
from shardlib.tracing._row_gradients import with_wide_rows

Metrics = dict[str, jax.Array]


class GradientInputs(NamedTuple):
    """What the manual region takes. `opt_state` is empty unless the optimizer sends by itself."""

    params: Any
    frozen: Any
    errors: Any
    opt_state: Any
    streams: Any
    rest: Any
    key: Any
    batch: Any


class BatchGradient(NamedTuple):
    """What the manual region returns: the gradient, the model's state after it, and metrics."""

    gradient: Gradient
    streams: Any
    rest: Any
    metrics: Any


class _Accumulated(NamedTuple):
    """What all microbatches of this device give together."""

    means: Any
    streams: Any
    rest: Any
    contributions: Any  # to the gradient, a tree like the trained parameters


@dataclass(frozen=True, eq=False)
class GradientFunction:
    """The function from the state and the batch to the gradient of the whole batch's loss.

    Attributes:
        loss_fn: the user's loss.
        strategy: the strategy of the step.
        layout: the layout of the state.
        trained: a `StepParameter` for each trained parameter.
        frozen: the same for each frozen one.
        sender: the optimizer, if it says itself what workers send.
        apart: the axes of workers that have parameters of their own, which are manual around this:
            gradients are those of one worker, and metrics are of all of them.
    """

    loss_fn: LossFunction
    strategy: Strategy
    layout: Layout
    trained: Any
    frozen: Any
    sender: Sender | None
    apart: tuple[str, ...] = ()

    def __call__(self, inputs: GradientInputs) -> BatchGradient:
        """Compute the gradient, on global arrays."""
        manual = self.strategy.manual_axes
        if not manual:
            return self._on_device(inputs)
        replicated = PartitionSpec()
        specs = self._input_specs(inputs)
        # A gradient is laid out as its parameter is in the state, and errors as they came.
        gradient = Gradient(
            values=specs.params,
            errors=specs.errors,
            square=replicated,
            finite=replicated,
        )
        # Unchecked, a `psum` transposes to a `psum`. That is exact for the sum of all devices'
        # totals, which is what is differentiated: see `docs/step.md`.
        on_devices = jax.shard_map(
            self._on_device,
            in_specs=(specs,),
            out_specs=BatchGradient(gradient, replicated, replicated, replicated),
            axis_names=set(manual),
            check_vma=False,
        )
        return on_devices(inputs)

    def _input_specs(self, inputs: GradientInputs) -> GradientInputs:
        """How the inputs of the manual region are laid out over its axes."""
        manual, replicated = self.strategy.manual_axes, PartitionSpec()
        return GradientInputs(
            params=self._at_rest(self.trained),
            frozen=self._at_rest(self.frozen),
            errors=jax.tree.map(lambda _: PartitionSpec(manual), inputs.errors),
            opt_state=self._specs_of_sender(),
            streams=replicated,
            rest=replicated,
            key=replicated,
            # Split by example.
            batch=PartitionSpec(self.strategy.data_axes or None),
        )

    def _at_rest(self, parameters: Any) -> Any:
        """How parameters are laid out over the manual axes in the state."""
        manual = self.strategy.manual_axes
        return jax.tree.map(lambda parameter: keep_axes(parameter.split.spec, manual), parameters)

    def _specs_of_sender(self) -> Any:
        """How the state of an optimizer that sends by itself is laid out over the manual axes."""
        if self.sender is None:
            return ()
        manual = self.strategy.manual_axes
        return jax.tree.map(lambda spec: keep_axes(spec, manual), self.sender.specs)

    def _on_device(self, inputs: GradientInputs) -> BatchGradient:
        """The gradient, from this device's examples and together with the other devices.

        The loss is checked, and put into a form that can be split, before anything is computed.
        """
        microbatches = microbatches_of(inputs.batch, self.strategy, self.apart)
        examples = every_nth(inputs.batch, microbatches.count)
        # The number of a microbatch goes with its examples, for keys and reports.
        scanned = jnp.arange(microbatches.count, dtype=jnp.int32), examples
        call = adapted(partial(call_loss, self.loss_fn, self.layout), self.strategy)
        total = with_partitionable_lookups(
            partial(forward, call), combine(self.trained, self.frozen), self.strategy
        )

        def arguments(rest: Any, number: Any, examples: Any) -> Any:
            keyed = microbatches.with_keys(number, inputs.streams, rest, inputs.key)
            return *keyed, examples

        # The checks look at the loss as its author wrote it, before sums of rows are widened.
        number, first = jax.tree.map(lambda x: x[0], scanned)
        loss = LossCall(call, arguments, self.trained, self.frozen, inputs.rest, number, first)
        check_loss(loss, self.strategy)
        total = with_wide_rows(total)

        def numbered_arguments(rest: Any, number: Any, examples: Any) -> Any:
            # Among the microbatches of all devices, in float32: it is added up with the metrics.
            global_number = microbatches.worker * microbatches.count + number
            return *arguments(rest, number, examples), jnp.float32(global_number)

        if self.strategy.pipeline is None:
            accumulated = self._in_turn(total, numbered_arguments, inputs, scanned)
        else:
            accumulated = self._in_a_pipeline(total, numbered_arguments, inputs, examples)
        return self._exchanged(inputs, accumulated)

    def _in_turn(
        self, total: Any, arguments: Any, inputs: GradientInputs, scanned: Any
    ) -> _Accumulated:
        """One microbatch after the other, their gradients added up.

        Args:
            total: the loss and the metrics of a microbatch, as sums with their weights.
            arguments: from the model's other state and a microbatch to the arguments of the loss.
            inputs: what the step was given.
            scanned: the number and the examples of each microbatch, stacked.
        """
        weights = Weights(self.strategy, self.trained, self.frozen, inputs.params, inputs.frozen)

        def microbatch(last: bool, rest: Any, scanned: Any) -> Any:
            return weights.gradient(total, arguments(rest, *scanned), last)

        # Sums that are exchanged in the last backward pass make it another program than those
        # before it, which only add up.
        last_is_different = any(parameter.overlapped for parameter in weights.parameters)
        with jax.named_scope(LOSS):
            (means, streams, rest), gradient = _accumulate(
                microbatch, inputs.rest, scanned, self.strategy.microbatches, last_is_different
            )
            return _Accumulated(means, streams, rest, weights.summed(gradient))

    def _in_a_pipeline(
        self, total: Any, arguments: Any, inputs: GradientInputs, examples: Any
    ) -> _Accumulated:
        """Microbatches that go through the stages of a pipeline, overlapping each other.

        A schedule says when each microbatch is where, and the gradients of all are added up as they
        come.
        """

        def arguments_of(number: Any) -> Any:
            # Examples have a leading dim of microbatches here.
            return arguments(inputs.rest, number, jax.tree.map(lambda x: x[number], examples))

        with jax.named_scope(LOSS):
            pipelined = Pipelined(
                total,
                self.strategy,
                combine(self.trained, self.frozen),
                combine(inputs.params, inputs.frozen),
                dict(self.layout.names),
                arguments_of,
            )
            (means, streams, rest), gradient = pipelined.gradient()
            contributions = jax.tree.unflatten(jax.tree.structure(self.trained), gradient)
        return _Accumulated(means, streams, rest, contributions)

    def _exchanged(self, inputs: GradientInputs, accumulated: _Accumulated) -> BatchGradient:
        """Add up what all devices have: the loss, its metrics, and the gradient.

        Means are divided once, by the weight of the whole batch. A mean of the devices' means would
        count an example less where there are more of them.
        """
        # Means are sums with their weights until they have been added up over devices.
        totals = accumulated.means
        if self.strategy.manual_axes:
            totals = lax.psum(totals, self.strategy.manual_axes)
        # A worker divides its gradient by the weight of its own examples.
        weight = totals["loss"].weight
        if self.apart:
            totals = lax.psum(totals, self.apart)
        # Its weight is a count, by which nothing is divided.
        nonfinite = totals.pop(NONFINITE)
        # One division, after the sums: a mean of means would weigh devices and not examples.
        metrics = {name: mean.total * inverse(mean.weight) for name, mean in totals.items()}
        parameters = jax.tree.map(lambda parameter: parameter.exchanged, self.trained)
        sender = self.sender
        if sender is not None:
            sender = sender._replace(state=inputs.opt_state)
        with jax.named_scope(EXCHANGE):
            gradient = exchange_gradients(
                self.strategy.exchange,
                accumulated.contributions,
                weight,
                parameters,
                inputs.errors,
                sender,
            )
        values = gradient.values
        # An update that takes some rows at a time casts these only.
        if self.strategy.offloaded is None:
            values = jax.tree.map(lambda g, p: g.astype(p.dtype), values, inputs.params)
        metrics |= {"weight": totals["loss"].weight, **nonfinite_metrics(nonfinite)}
        gradient = gradient._replace(values=values)
        return BatchGradient(gradient, accumulated.streams, accumulated.rest, metrics)


def _accumulate(
    microbatch: Any, rest: Any, scanned: Any, count: int, last_is_different: bool
) -> tuple[Any, Any]:
    """What all microbatches give together, in a scan.

    The model's other state goes from each microbatch to the next. Its random streams start alike
    in all of them, and what comes of the last one is kept.

    Args:
        microbatch: `(last, rest, scanned) -> (means, streams, rest), gradient`.
        rest: the model's state that is neither parameter nor random stream.
        scanned: the number and the examples of each microbatch, stacked.
        count: the number of microbatches.
        last_is_different: whether the last microbatch is a program of its own, after the scan.
    """
    if count == 1:
        return microbatch(True, rest, jax.tree.map(lambda x: x[0], scanned))
    # Gradients are added up in place, in references that the scan closes over. Those that the
    # microbatches of the scan return are the same objects every time: none, for what is in place.
    gradients: list[Any] = []

    def body(rest: Any, scanned: Any) -> tuple[Any, Any]:
        (means, streams, rest), gradient = microbatch(False, rest, scanned)
        gradients.append(gradient)
        return rest, (means, streams)

    in_scan = count
    if last_is_different:
        in_scan = count - 1
    rest, (means, streams) = lax.scan(body, rest, jax.tree.map(lambda x: x[:in_scan], scanned))
    # Totals and weights are summed apart, and divided later.
    means = jax.tree.map(lambda x: x.sum(0), means)
    if not last_is_different:
        return (means, jax.tree.map(lambda x: x[-1], streams), rest), gradients[-1]
    (last_means, streams, rest), gradient = microbatch(
        True, rest, jax.tree.map(lambda x: x[-1], scanned)
    )
    return (jax.tree.map(jnp.add, means, last_means), streams, rest), gradient
