"""The train step. The order of `_gradients` and `_run` below is the design.

    batch -> microbatches -> [manual over the data axes: forward and backward under annotations ->
    contributions summed in float32 -> exchange, once] -> [automatic: the optimizer, on global
    arrays laid out in shards] -> new state.

The contract of differentiation. Inside the manual region the loss of a step is
`sum of totals / sum of weights` over devices and microbatches, and what is differentiated on each
device is the sum of all devices' totals. Every collective transposes as the linear map it is
(`check_vma=False`): a `psum` inside a loss is part of that sum like anything else, so using one is
exact, and needs no knowledge of what the step does. The contributions of the devices to a
parameter's gradient are then added by the exchange, over the data axes that do not split the
parameter.
"""

import contextlib
import math
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.collectives._exact import inverse
from shardlib.layouts._annotate import UsedNames, mesh_of_step, recording
from shardlib.layouts._placement import place
from shardlib.layouts._rules import BATCH, EXPERTS, as_tuple, keep_axes, spec_axes
from shardlib.optimizers._local import Local
from shardlib.step._adapted import adapted
from shardlib.step._batches import batch_sharding, check_batch
from shardlib.step._exchange import Gradient, Sender, exchange_gradients
from shardlib.step._init_checks import check_sender
from shardlib.step._layer_order import check_order
from shardlib.step._loss import (
    NONFINITE,
    LossFunction,
    call_loss,
    check_arguments,
    every_nth,
    forward,
    nonfinite_metrics,
    with_row_keys,
)
from shardlib.step._loss_checks import check_loss
from shardlib.step._optimizer_update import clipped, updated
from shardlib.step._pipelined import Pipelined, refuse_if_it_would_hang
from shardlib.step._state import Layout, State, combine, drop_weak_types, state_specs
from shardlib.step._step_calls import check_call, check_compiles, explained, is_traced
from shardlib.step._strategy import Strategy
from shardlib.step._weights import Weights, step_parameters, with_partitionable_lookups
from shardlib.tracing._row_gradients import with_wide_rows

Metrics = dict[str, jax.Array]


def train_step(loss_fn: LossFunction, strategy: Strategy) -> "Step":
    """Make the step of a training run: `(state, batch) -> (state, metrics)`.

    It is compiled, and the old state is donated.

    `loss_fn(model, batch, rng)` sees the model and some of the examples, and returns
    `sl.weighted_mean(total, weight)`, or a scalar, which says that all examples weigh the same;
    either alone or with a dict of metrics, each of the same kind or
    `sl.weighted_mean(total, weight)` of an array. What it changes in the model's state other than
    parameters is kept. `rng` is a key whose draws do not depend on the mesh. Every leaf of `batch`
    has the examples along dim 0.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> state = sl.init(lambda: {"w": jnp.zeros(3)}, optax.sgd(0.1), strategy)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2), strategy)
    >>> state, metrics = step(state, jnp.ones((16, 3)))
    >>> metrics["loss"].item()
    1.0
    """
    return Step(loss_fn, strategy)


class Step:
    """A compiled train step; make it with `train_step`."""

    def __init__(self, loss_fn: LossFunction, strategy: Strategy) -> None:
        if not callable(loss_fn) or not isinstance(strategy, Strategy):
            raise ValueError(
                "`train_step(loss_fn, strategy)` takes a function of model, batch and key, and a "
                f"`sl.Strategy`; got {type(loss_fn).__name__} and {type(strategy).__name__}."
            )
        check_arguments(loss_fn)
        self.loss_fn, self.strategy = loss_fn, strategy
        self._used = UsedNames()
        self._compiled: dict[Layout, Any] = {}
        self._programs: dict[Any, Any] = {}

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Take one step. `state` is donated: use the one returned.

        A step may stand in a function that is traced, by `jax.jit`, `lax.scan` or `jax.make_jaxpr`.
        There nothing is donated but by the outer `jax.jit(..., donate_argnums=0)`.
        """
        check_call(state, batch)
        if (
            not isinstance(state.step, Tracer)
            and isinstance(state.step, jax.Array)
            and state.step.is_deleted()
        ):
            raise ValueError(
                "This state has been through a step already, which put the new one in its place: "
                "use that."
            )
        with self._in_force():
            step = self._jitted(state, batch)
            batch = jax.device_put(batch, batch_sharding(self.strategy))
            if self.strategy.pipeline is None:
                return step(state, batch)
            program = self._checked(step, state, batch)
            return (step if is_traced(state, batch) else program)(state, batch)

    def _checked(self, step: Any, state: State, batch: Any) -> Any:
        """The program of a step, compiled before its first run, since there are some that would
        hang.
        """
        kind = (
            state.layout,
            *((path, leaf.shape, leaf.dtype) for path, leaf in named_leaves(batch)),
        )
        if kind not in self._programs:
            if is_traced(state, batch):
                state, batch = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (state, batch)
                )
            self._programs[kind] = refuse_if_it_would_hang(step.lower(state, batch).compile())
        return self._programs[kind]

    def trace(self, state: State, batch: Any) -> Any:
        """As `jax.jit(...).trace`, for shapes as for arrays."""
        check.kind("Step.trace", "state", state, State, "the `State` that `sl.init` makes")
        with self._in_force():
            return self._jitted(state, batch).trace(state, batch)

    def lower(self, state: State, batch: Any) -> Any:
        """As `jax.jit(...).lower`: `.compile()` shows what the step will do, for devices that need
        not be there.
        """
        with explained():
            return self.trace(state, batch).lower()

    @contextlib.contextmanager
    def _in_force(self) -> Iterator[None]:
        """The mesh and the rules of the strategy, and a record of the names that annotations
        use.
        """
        strategy = self.strategy
        with (
            mesh_of_step(strategy.device_mesh),
            strategy.scope(),
            recording(self._used),
            explained(),
        ):
            yield

    @property
    def unused_rules(self) -> tuple[str, ...]:
        """Rules that split something, and that no parameter and no annotation of the traced step
        has used.
        """
        named = {
            n
            for layout in self._compiled
            for _, names in layout.names
            for n in names or ()
            if isinstance(n, str)
        }
        rules = self.strategy.rules
        splitting = [
            name for name, candidates in rules.items() if any(as_tuple(axes) for axes in candidates)
        ]
        return tuple(name for name in splitting if name not in self._used.names | named | {BATCH})

    def _jitted(self, state: State, batch: Any) -> Any:
        check_compiles()
        check_batch(batch, self.strategy)
        layout = state.layout
        if layout not in self._compiled:
            if layout.optimizer is None:
                raise ValueError(
                    "The state has no optimizer: `sl.init(make_model, optimizer, strategy)`."
                )
            if (
                theirs := layout.strategy
            ).device_mesh != self.strategy.device_mesh or theirs.rules != self.strategy.rules:
                raise ValueError(
                    f"The state was made for {theirs}; the step is for "
                    f"{self.strategy}. Use one strategy."
                )
            if theirs.exchange.axes or self.strategy.exchange.axes:
                # By which errors lie as they do.
                for name in ("exchange", "zero_axes", "every_axis"):
                    if getattr(theirs, name) != getattr(self.strategy, name):
                        raise ValueError(
                            f"The state was made for another exchange than the step's: `{name}` is "
                            f"{getattr(theirs, name)} there and {getattr(self.strategy, name)} "
                            "here. Use one strategy; a checkpoint may be read into another."
                        )
            check_sender(layout.optimizer, self.strategy)
            check_order(theirs, self.strategy, dict(layout.names))
            mesh = self.strategy.device_mesh
            to = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs(state))
            self._compiled[layout] = jax.jit(
                self._run, in_shardings=(to, batch_sharding(self.strategy)),
                out_shardings=(to, NamedSharding(mesh, PartitionSpec())),
                donate_argnums=0, compiler_options=_compiler_options(self.strategy),
            )  # fmt: skip
        return self._compiled[layout]

    def _run(self, state: State, batch: Any) -> tuple[State, Metrics]:
        specs, manual = state_specs(state), self.strategy.manual_axes
        trained = self._uses(state, state.params, False)
        frozen = self._uses(state, state.frozen, True)
        sender = self._sender(state, specs)
        gradients = partial(self._gradients, state.layout, trained, frozen, sender)
        if manual:
            mine, same = PartitionSpec(self.strategy.data_axes or None), PartitionSpec()
            at_rest = partial(jax.tree.map, lambda use: keep_axes(use.split.spec, manual))
            errors = jax.tree.map(lambda _: PartitionSpec(manual), state.errors)
            of_sender = (
                ()
                if sender is None
                else jax.tree.map(lambda spec: keep_axes(spec, manual), sender.specs)
            )
            gradients = jax.shard_map(
                gradients,
                in_specs=(
                    at_rest(trained),
                    at_rest(frozen),
                    errors,
                    of_sender,
                    same,
                    same,
                    same,
                    mine,
                ),
                out_specs=(Gradient(at_rest(trained), errors, same, same), same, same, same),
                axis_names=set(manual),
                check_vma=False,
            )
        key = jax.random.fold_in(state.key, state.step)
        every = (
            state.params,
            state.frozen,
            state.errors,
            () if sender is None else sender.state,
            state.streams,
            state.rest,
        )
        gradient, streams, rest, metrics = gradients(*every, key, batch)
        self._check_experts(state.layout)

        # Automatic from here: global values laid out in shards, so that every optax transformation
        # is right. What the user said of implicit promotion is of the loss; optimizers of optax
        # need it.
        with jax.named_scope("optimizer"), jax.numpy_dtype_promotion("standard"):
            params, opt_state, errors, bad, of_gradient = self._update(
                state, gradient, trained, metrics["loss"]
            )
        params, opt_state, streams, rest = drop_weak_types((params, opt_state, streams, rest))
        after = state.replaced(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            errors=errors,
            streams=streams,
            rest=rest,
            nonfinite=state.nonfinite + bad,
        )
        return after, metrics | of_gradient

    def _sender(self, state: State, specs: State) -> Sender | None:
        """The optimizer, if it says itself what is sent."""
        optimizer, clip = state.layout.optimizer, self.strategy.clip
        if not isinstance(optimizer, Local) or isinstance(clip, optax.GradientTransformation):
            return None
        return Sender(optimizer, state.opt_state, specs.opt_state, clip)

    def _check_experts(self, layout: Layout) -> None:
        """Refuse experts none of whose weights is split as the rule says, where a layer cannot see
        that itself.
        """
        if EXPERTS not in self._used.names:
            return
        sizes, candidates = self.strategy.device_mesh.shape, self.strategy.rules[EXPERTS]
        axes = [axis for entry in candidates for axis in as_tuple(entry) if sizes[axis] > 1]
        literal = [names for _, names in layout.names if isinstance(names, PartitionSpec)]
        named = any(
            EXPERTS in (names or ())
            for _, names in layout.names
            if not isinstance(names, PartitionSpec)
        )
        split = named or any(not set(axes).isdisjoint(spec_axes(spec)) for spec in literal)
        if axes and not split:
            raise ValueError(
                f"The loss has a layer of experts, which the rule `{EXPERTS}` splits over "
                f"`{axes[0]}`, and no parameter has a dim of that name: every device would hold "
                f"all of them. Name the first dim of their weights `{EXPERTS}`, or have them "
                f"whole: `rules | sl.AxisRules({EXPERTS}=None)`."
            )

    def _uses(self, state: State, params: Any, frozen: bool) -> Any:
        named = place(state.layout.named, params)
        return step_parameters(
            params, named, state.layout.splits(params), self.strategy, frozen=frozen
        )

    def _update(
        self, state: State, made: Gradient, trained: Any, loss: jax.Array
    ) -> tuple[Any, Any, Any, jax.Array, Metrics]:
        """Clip and let the optimizer move the parameters. The norm is that of the whole gradient,
        computed once.
        """
        strategy, gradient, optimizer = self.strategy, made.values, state.layout.optimizer
        norm, all_finite = jnp.sqrt(made.square), jnp.all(made.finite)
        metrics = {
            "grad_norm": norm,
            "first_nonfinite": jnp.where(all_finite, -1, jnp.argmin(made.finite)),
        }
        extra: dict[str, Any] = {}
        if isinstance(optimizer, Local):
            extra["sent"] = jax.tree.map(
                lambda use: bool(strategy.exchange.over(use.parameter)), trained
            )
            metrics["compressed"] = optimizer.sends(state.opt_state)
        if isinstance(strategy.clip, optax.GradientTransformation):
            gradient = clipped(strategy.clip, gradient, state.params)
        elif strategy.clip is not None:
            scale = strategy.clip / jnp.maximum(norm, strategy.clip)
            scales = jax.tree.map(lambda _: scale, gradient)
            if extra:  # what was sent was clipped before
                scales = jax.tree.map(
                    lambda sent: jnp.where(metrics["compressed"] & sent, 1, scale), extra["sent"]
                )
            gradient = jax.tree.map(
                lambda g, scale: g * scale.astype(g.real.dtype), gradient, scales
            )
        updates, opt_state = updated(
            optimizer, gradient, state.opt_state, state.params, loss, extra
        )
        params = optax.apply_updates(state.params, updates)
        if strategy.skips:
            new, old = (params, opt_state), (state.params, state.opt_state)
            params, opt_state = jax.tree.map(lambda n, o: jnp.where(all_finite, n, o), new, old)
        # What is owed is never of what is not finite: it would be owed forever.
        errors = jax.tree.map(lambda n, o: jnp.where(all_finite, n, o), made.errors, state.errors)
        return params, opt_state, errors, 1 - all_finite.astype(jnp.int32), metrics

    def _gradients(
        self,
        layout: Layout,
        trained: Any,
        fixed: Any,
        sender: Sender | None,
        params: Any,
        frozen: Any,
        errors: Any,
        opt_state: Any,
        streams: Any,
        rest: Any,
        key: Any,
        batch: Any,
    ) -> tuple[Gradient, Any, Any, Metrics]:
        """The gradient of the whole batch's loss, or what the optimizer makes of the workers' own.

        Manual over the data axes: `batch` is this device's examples.
        """
        axes, count = self.strategy.data_axes, self.strategy.microbatches
        rows = jax.tree.leaves(batch)[0].shape[0]
        worker = lax.axis_index(axes) if axes else 0
        first = worker * rows
        microbatches = every_nth(batch, count)
        scanned = (jnp.arange(count), microbatches)

        def inputs(rest: Any, index: Any, examples: Any) -> Any:
            by_mesh = self.strategy.draws == "by_mesh"
            keys = partial(
                with_row_keys,
                rows=rows // count,
                start=first + index,
                stride=count,
                by_mesh=by_mesh,
            )
            return keys(streams), keys(rest), keys(key), examples

        def numbered_inputs(rest: Any, index: Any, examples: Any) -> Any:
            return *inputs(rest, index, examples), jnp.float32(worker * count + index)

        call = adapted(partial(call_loss, self.loss_fn, layout), self.strategy)
        total = with_partitionable_lookups(
            partial(forward, call), combine(trained, fixed), self.strategy
        )
        first_of_each = jax.tree.map(lambda x: x[0], scanned)
        check_loss(call, inputs, trained, fixed, rest, first_of_each, self.strategy)
        total = with_wide_rows(total)
        if self.strategy.pipeline is not None:

            def numbered(number: Any) -> Any:
                return numbered_inputs(
                    rest, number, jax.tree.map(lambda x: x[number], microbatches)
                )

            with jax.named_scope("loss"):
                of_all = combine(trained, fixed), combine(params, frozen), dict(layout.names)
                made = Pipelined(total, self.strategy, *of_all, numbered)
                (means, streams, rest), gradient = made.gradient()
                summed = jax.tree.unflatten(jax.tree.structure(trained), gradient)
        else:
            weights = Weights(trained, fixed, params, frozen)

            def microbatch(last: bool, rest: Any, scanned: Any) -> Any:
                return weights.gradient(total, numbered_inputs(rest, *scanned), last)

            with jax.named_scope("loss"):
                apart = any(use.overlapped for use in weights.uses)
                (means, streams, rest), gradient = _accumulate(
                    microbatch, rest, scanned, count, apart
                )
                summed = weights.summed(gradient)

        totals = lax.psum(means, self.strategy.manual_axes) if self.strategy.manual_axes else means
        nonfinite = totals.pop(NONFINITE)
        metrics = {name: of.total * inverse(of.weight) for name, of in totals.items()}
        weight = totals["loss"].weight
        parameters = jax.tree.map(lambda use: use.parameter, trained)
        with jax.named_scope("exchange"):
            if sender is not None:
                sender = sender._replace(state=opt_state)
            made = exchange_gradients(
                self.strategy.exchange, summed, weight, parameters, errors, sender
            )
        values = jax.tree.map(lambda g, p: g.astype(p.dtype), made.values, params)
        metrics |= {"weight": weight, **nonfinite_metrics(nonfinite)}
        return made._replace(values=values), streams, rest, metrics


def _compiler_options(strategy: Strategy) -> dict[str, int] | None:
    """What keeps the compiler of a GPU from joining the buckets of an exchange: it would hold the
    buffers of all.
    """
    devices, exchange = strategy.device_mesh.devices.flat, strategy.exchange.within
    if devices[0].platform not in ("gpu", "cuda"):
        return None
    parts = math.prod(strategy.device_mesh.shape[axis] for axis in strategy.zero_axes)
    # The compiler counts what comes out: of a scatter one part.
    limits = {
        "all_reduce": exchange.bucket_bytes,
        "reduce_scatter": max(1, exchange.bucket_bytes // parts),
    }
    options = {f"xla_gpu_{kind}_combine_threshold_bytes": size for kind, size in limits.items()}
    return {
        name: size for name, size in options.items() if name not in os.environ.get("XLA_FLAGS", "")
    }


def _accumulate(
    microbatch: Any, rest: Any, scanned: Any, count: int, apart: bool
) -> tuple[Any, Any]:
    """What all microbatches give together: in a scan, or with the last `apart`.

    `rest` goes from each to the next, random streams start alike in all.
    """

    def body(rest: Any, scanned: Any) -> tuple[Any, Any]:
        (means, streams, rest), gradient = microbatch(False, rest, scanned)
        gradients.append(gradient)
        return rest, (means, streams)

    if count == 1:
        return microbatch(True, rest, jax.tree.map(lambda x: x[0], scanned))
    gradients: list[Any] = []
    rest, (means, streams) = lax.scan(
        body, rest, jax.tree.map(lambda x: x[: count - apart], scanned)
    )
    before = jax.tree.map(lambda x: x.sum(0), means)
    if not apart:
        return (before, jax.tree.map(lambda x: x[-1], streams), rest), gradients[-1]
    (means, streams, rest), gradient = microbatch(
        True, rest, jax.tree.map(lambda x: x[-1], scanned)
    )
    return (jax.tree.map(jnp.add, before, means), streams, rest), gradient
