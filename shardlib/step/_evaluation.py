"""The loss of a state on batches it does not learn from: the forward half of a step, on the same
mesh.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.layouts._placement import place
from shardlib.layouts._rules import keep_axes
from shardlib.modeling._batch import WeightedMean
from shardlib.step._adapted import adapted
from shardlib.step._batches import batch_sharding, batches, check_batch, local_rows
from shardlib.step._layer_order import check_order
from shardlib.step._loss import (
    LossFunction,
    call_loss,
    check_arguments,
    every_nth,
    forward,
    with_row_keys,
)
from shardlib.step._pipelined import Pipelined, refuse_if_it_would_hang
from shardlib.step._state import Layout, State, combine
from shardlib.step._step_calls import check_compiles
from shardlib.step._strategy import Strategy
from shardlib.step._weights import evaluate_loss, step_parameters, with_partitionable_lookups


def evaluation(loss_fn: LossFunction, strategy: Strategy) -> "Evaluation":
    """Make what measures a state: `(state, source) -> metrics`.

    Each metric is a mean over all examples of all batches.

    `loss_fn` is as for `train_step`. Dropout is as `loss_fn` has it: give it a model that draws
    nothing, `nnx.view(model, deterministic=True)`. What it changes in the model's state is
    forgotten. Weights that ZeRO splits are made whole layer by layer, as in the step; batches are
    not split into microbatches, but for those of a pipeline, which go through one after the other.

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
        self.loss_fn, self.strategy = loss_fn, replace(strategy, accumulate=1)
        self._compiled = jax.jit(self._run)
        self._programs: dict[Any, Any] = {}

    def __call__(self, state: State, source: Any, *, at_most: int | None = None) -> dict[str, Any]:
        """The means over the batches of a source, each weighed by its weight: over all, or
        `at_most` so many.

        Of a source with a method `once(rows)`, such as `shardlib.data.Sequences`, that is every
        example once.
        """
        check.kind("evaluation", "state", state, State, "the `State` that `sl.init` makes")
        check.whole("evaluation", "at_most", at_most, "a number of batches", least=1, optional=True)
        once = hasattr(source, "once")
        if not once:
            check.kind(
                "evaluation",
                "source",
                source,
                Iterable,
                "an iterable of batches, each a tree of arrays",
            )
        whole = source.once(local_rows(source.batch, self.strategy)) if once else source
        some = whole if at_most is None else itertools.islice(whole, at_most)
        on_mesh = batches(some, self.strategy)
        sums: dict[str, tuple[Any, Any]] = {}
        try:
            for batch in on_mesh:
                check_batch(batch, self.strategy)
                with self.strategy.scope():
                    means = self._program(state, batch)(state, batch)
                for name, mean in jax.device_get(means).items():
                    total, weight = sums.get(name, (0.0, 0.0))
                    sums[name] = total + np.float64(mean.total), weight + np.float64(mean.weight)
        finally:
            on_mesh.close()
        if not sums:
            raise ValueError("There was no batch to evaluate on.")
        means = {
            name: total / weight if weight else total * np.nan
            for name, (total, weight) in sums.items()
        }
        return {name: float(mean) if np.ndim(mean) == 0 else mean for name, mean in means.items()}

    def _program(self, state: State, batch: Any) -> Any:
        check_compiles()
        check_order(state.layout.strategy, self.strategy, dict(state.layout.names))
        if self.strategy.pipeline is None:
            return self._compiled
        kind = (
            state.layout,
            *((path, leaf.shape, leaf.dtype) for path, leaf in named_leaves(batch)),
        )
        if kind not in self._programs:
            self._programs[kind] = refuse_if_it_would_hang(
                self._compiled.lower(state, batch).compile()
            )
        return self._programs[kind]

    def trace(self, state: State, batch: Any) -> Any:
        """As `jax.jit(...).trace`, of shapes as of arrays: for `sl.plan`, to see what it will
        do.
        """
        check.kind("Evaluation.trace", "state", state, State, "the `State` that `sl.init` makes")
        check_batch(batch, self.strategy)
        to = batch_sharding(self.strategy)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), batch)
        with self.strategy.scope():
            return self._compiled.trace(state, shapes)

    def _run(self, state: State, batch: Any) -> dict[str, WeightedMean]:
        strategy, params = self.strategy, combine(state.params, state.frozen)
        named = place(state.layout.named, params)
        used = step_parameters(params, named, state.layout.splits(params), strategy, frozen=True)
        means = partial(self._means, state.layout, used)
        if axes := strategy.manual_axes:
            same, mine = PartitionSpec(), PartitionSpec(strategy.data_axes or None)
            at_rest = jax.tree.map(lambda use: keep_axes(use.split.spec, axes), used)
            means = jax.shard_map(
                means,
                in_specs=(at_rest, same, same, same, mine),
                out_specs=same,
                axis_names=set(axes),
                check_vma=False,
            )
        return means(params, state.streams, state.rest, state.key, batch)

    def _means(
        self, layout: Layout, used: Any, params: Any, streams: Any, rest: Any, key: Any, batch: Any
    ) -> Any:
        """Manual over the data axes: `batch` is this device's examples."""
        axes, count = self.strategy.data_axes, self.strategy.microbatches
        rows = jax.tree.leaves(batch)[0].shape[0]
        first = lax.axis_index(axes) * rows if axes else 0

        def inputs(number: Any) -> tuple[Any, ...]:
            by_mesh = self.strategy.draws == "by_mesh"
            keys = partial(
                with_row_keys,
                rows=rows // count,
                start=first + number,
                stride=count,
                by_mesh=by_mesh,
            )
            return keys(streams), keys(rest), keys(key), every_nth(batch, count, number)

        call = adapted(partial(call_loss, self.loss_fn, layout), self.strategy)
        total = with_partitionable_lookups(partial(forward, call), used, self.strategy)
        if self.strategy.pipeline is not None:
            with jax.named_scope("loss"):
                means = Pipelined(
                    total, self.strategy, used, params, dict(layout.names), inputs
                ).value()
        else:
            _, (means, _, _) = evaluate_loss(total, used, params, *inputs(0))
        return lax.psum(means, self.strategy.manual_axes) if self.strategy.manual_axes else means
