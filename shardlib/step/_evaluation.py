"""The loss of a state on batches it does not learn from: the forward half of a step."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.layouts._placement import place
from shardlib.layouts._specs import keep_axes
from shardlib.modeling._batch import WeightedMean
from shardlib.step._adapted import adapted
from shardlib.step._batches import batch_sharding, batches, check_batch, local_rows
from shardlib.step._layer_order import check_order
from shardlib.step._loss import LossFunction, call_loss, check_arguments, forward
from shardlib.step._loss_checks import check_evaluated
from shardlib.step._loss_trace import LossCall
from shardlib.step._microbatches import every_nth, microbatches_of
from shardlib.step._pipelined import Pipelined, Programs
from shardlib.step._scopes import LOSS
from shardlib.step._state import (
    Layout,
    State,
    combine,
    mean_over_workers,
    shapes_without_workers,
)
from shardlib.step._step_calls import check_compiles, check_kept
from shardlib.step._strategy import Strategy
from shardlib.step._weights import evaluate_loss, step_parameters, with_partitionable_lookups


def evaluation(loss_fn: LossFunction, strategy: Strategy) -> "Evaluation":
    """Make a function that measures a state on held-out data: `(state, source) -> metrics`.

    The metrics are numbers by name, `loss` and those of the loss, each a mean over all examples of
    all batches of `source`.

    - `loss_fn`: as for `train_step`. Dropout is not turned off automatically: in `loss_fn`, use
      `nnx.view(model, deterministic=True)`. Changes to the model's state are discarded.
    - `strategy`: the strategy of the step.

    Weights that ZeRO splits are gathered layer by layer, as in the step. A batch is not split into
    microbatches, except in a pipeline.

    >>> import shardlib as sl, jax.numpy as jnp
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, accumulate=2)
    >>> state = sl.init(lambda: {"w": jnp.zeros(3)}, None, strategy)
    >>> measure = sl.evaluation(lambda model, x, rng: jnp.mean((x @ model["w"] - x[:, 0]) ** 2),
    ...     strategy)
    >>> measure(state, [np.ones((8, 3)), 3 * np.ones((24, 3))])
    {'loss': 7.0}
    """
    return Evaluation(loss_fn, strategy)


class Evaluation:
    """The loss of states on batches; make it with `evaluation`."""

    def __init__(self, loss_fn: LossFunction, strategy: Strategy) -> None:
        check.function("evaluation", "loss_fn", loss_fn, "a function of model, batch and key")
        check.kind("evaluation", "strategy", strategy, Strategy, "a `sl.Strategy`")
        check_arguments(loss_fn)
        # Without gradients nothing has to be held for several microbatches: the batch is one.
        self.loss_fn, self.strategy = loss_fn, replace(strategy, accumulate=1)
        self._compiled = jax.jit(self._run)
        self._programs = Programs()

    def __call__(self, state: State, source: Any, *, at_most: int | None = None) -> dict[str, Any]:
        """The means over the batches of a source, each batch weighed by its weight.

        `at_most` limits the number of batches. A source with a method `once(rows)`, such as
        `shardlib.data.Sequences`, gives each of its examples exactly once.
        """
        check.kind("evaluation", "state", state, State, "the `State` that `sl.init` makes")
        check_arrays.values("evaluation", "state", state.step)
        check.whole("evaluation", "at_most", at_most, "a number of batches", least=1, optional=True)
        # Of workers that train apart, their mean is measured.
        state = mean_over_workers(state)
        on_mesh = batches(self._examples(source, at_most), self.strategy)
        sums: dict[str, tuple[Any, Any]] = {}
        try:
            for batch in on_mesh:
                check_batch(batch, self.strategy)
                with self.strategy.scope():
                    # The next batches are read while this one is computed.
                    means = self._program(state, batch)(state, batch)
                for name, mean in jax.device_get(means).items():
                    total, weight = sums.get(name, (0.0, 0.0))
                    # In float64, on the host: a run may evaluate millions of examples.
                    sums[name] = total + np.float64(mean.total), weight + np.float64(mean.weight)
        finally:
            # An error must not leave the thread that reads ahead behind.
            on_mesh.close()
        if not sums:
            raise ValueError("There was no batch to evaluate on.")
        means_of_all: dict[str, Any] = {}
        for name, (total, weight) in sums.items():
            means_of_all[name] = _quotient(total, weight)
        return means_of_all

    def _examples(self, source: Any, at_most: int | None) -> Any:
        """The batches of a source, or the first of them."""
        examples = source
        # A source that repeats forever has to be asked for one pass over its examples.
        if hasattr(source, "once"):
            examples = source.once(local_rows(source.batch, self.strategy))
        else:
            takes = "an iterable of batches, each a tree of arrays"
            check.kind("evaluation", "source", source, Iterable, takes)
        if at_most is None:
            return examples
        return itertools.islice(examples, at_most)

    def _program(self, state: State, batch: Any) -> Any:
        """The compiled function for a state and a batch."""
        check_compiles()
        check_order(state.layout.strategy, self.strategy, dict(state.layout.names))
        if self.strategy.pipeline is None:
            return self._compiled
        return self._programs.of(self._compiled, state, batch)

    def trace(self, state: State, batch: Any) -> Any:
        """Trace the evaluation, as `jax.jit(...).trace` does, from arrays or shapes.

        `sl.plan` uses it to show what the evaluation will do.
        """
        check.kind("Evaluation.trace", "state", state, State, "the `State` that `sl.init` makes")
        check_batch(batch, self.strategy)
        state = shapes_without_workers(state)
        to = batch_sharding(self.strategy)
        # Laid out as `batches` does it, or the plan would be that of another program.
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), batch)
        with self.strategy.scope():
            return self._compiled.trace(state, shapes)

    def _run(self, state: State, batch: Any) -> dict[str, WeightedMean]:
        """The means of one batch, as it is traced."""
        strategy, params = self.strategy, combine(state.params, state.frozen)
        check_kept(params, strategy)
        named = place(state.layout.named, params)
        splits = state.layout.splits(params)
        # All parameters are taken for frozen ones: nothing is differentiated.
        parameters = step_parameters(params, named, splits, strategy, frozen=True)
        means: Any = partial(self._means, state.layout, parameters)
        if strategy.manual_axes:
            means = jax.shard_map(
                means,
                in_specs=(self._specs(parameters),),
                out_specs=PartitionSpec(),
                axis_names=set(strategy.manual_axes),
                check_vma=False,
            )
        return means(_Inputs(params, state.streams, state.rest, state.key, batch))

    def _specs(self, parameters: Any) -> "_Inputs":
        """How the inputs of the manual region are laid out over its axes."""
        manual, replicated = self.strategy.manual_axes, PartitionSpec()
        at_rest = jax.tree.map(lambda p: keep_axes(p.split.spec, manual), parameters)
        return _Inputs(
            params=at_rest,
            streams=replicated,
            rest=replicated,
            key=replicated,
            batch=PartitionSpec(self.strategy.data_axes or None),
        )

    def _means(self, layout: Layout, parameters: Any, inputs: "_Inputs") -> Any:
        """The means over the whole batch, from this device's examples.

        It runs in the region that is manual over the data axes.
        """
        microbatches = microbatches_of(inputs.batch, self.strategy)

        def with_keys(rest: Any, number: Any, examples: Any) -> tuple[Any, ...]:
            return *microbatches.with_keys(number, inputs.streams, rest, inputs.key), examples

        def arguments(number: Any) -> tuple[Any, ...]:
            examples = every_nth(inputs.batch, microbatches.count, number)
            return with_keys(inputs.rest, number, examples)

        call = adapted(partial(call_loss, self.loss_fn, layout), self.strategy)
        nothing = jax.tree.map(lambda _: None, parameters)
        first = every_nth(inputs.batch, microbatches.count, 0)
        loss = LossCall(call, with_keys, parameters, nothing, inputs.rest, 0, first)
        check_evaluated(loss, self.strategy)
        # The same wrappers as in training, so that a loss means the same in both.
        total = with_partitionable_lookups(partial(forward, call), parameters, self.strategy)
        if self.strategy.pipeline is None:
            # Streams and other state that come out are those of an evaluation, and are forgotten.
            _, (means, _, _) = evaluate_loss(total, parameters, inputs.params, *arguments(0))
        else:
            with jax.named_scope(LOSS):
                names = dict(layout.names)
                pipelined = Pipelined(
                    total, self.strategy, parameters, inputs.params, names, arguments
                )
                means = pipelined.value()
        # Over automatic axes the partitioner has added up already.
        if not self.strategy.manual_axes:
            return means
        return lax.psum(means, self.strategy.manual_axes)


class _Inputs(NamedTuple):
    """What the manual region of an evaluation takes."""

    params: Any
    streams: Any
    rest: Any
    key: Any
    batch: Any


def _quotient(total: Any, weight: Any) -> Any:
    """A mean as a number or, for a total that is an array, an array; NaN for no weight."""
    mean = total * np.nan
    if weight:
        mean = total / weight
    if np.ndim(mean) == 0:
        return float(mean)
    return mean
