"""The train step.

    state, batch
      -> [manual over the data axes: the contributions of devices to the
         gradient of the whole batch's loss, `_gradient`, and their `_exchange`]
      -> [automatic: clip and `_optimizer_update`, on global arrays laid out in shards]
      -> new state, metrics

`Step._run` below holds this order.

The contract of differentiation. Inside the manual region the loss of a step is
`sum of totals / sum of weights` over devices and microbatches. What each device differentiates is
the sum of all devices' totals; the weight does not depend on parameters, and the exchange divides
by it last. With `check_vma=False` every collective transposes as the linear map it is, a `psum` to
a `psum`. So a loss may use collectives without knowing how the step adds up. The exchange adds the
contributions of the devices to each gradient, over the data axes that do not split the parameter.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.compiled._memory import peak_bytes
from shardlib.layouts._annotate import UsedNames, mesh_of_step, recording
from shardlib.layouts._placement import place
from shardlib.layouts._remat_policy import Remat, RematBudget
from shardlib.machine._absent import is_absent, options_for, without_cache
from shardlib.machine._agreement import require_agreement
from shardlib.optimizers._local import Apart, Local
from shardlib.step._apart import step_apart
from shardlib.step._batches import batch_sharding, check_batch
from shardlib.step._compiler_options import CompilerOptions, compiler_options
from shardlib.step._exchange import Sender
from shardlib.step._gradient import BatchGradient, GradientFunction, GradientInputs, Metrics
from shardlib.step._loss import LossFunction, check_arguments
from shardlib.step._meeting import averaged_if_asked
from shardlib.step._optimizer_update import Averaged, update_of
from shardlib.step._pipelined import Programs
from shardlib.step._remat_budget import FittedRemat, fit_remat, host_room, loops_of
from shardlib.step._scopes import OPTIMIZER
from shardlib.step._server import step_around_server
from shardlib.step._state import (
    Layout,
    State,
    combine,
    drop_weak_types,
    state_shardings,
    state_specs,
)
from shardlib.step._step_calls import (
    check_call,
    check_compiles,
    check_experts,
    check_kept,
    check_layout,
    explained,
    is_traced,
    unused_rules,
)
from shardlib.step._strategy import Strategy
from shardlib.step._weights import step_parameters


def train_step(loss_fn: LossFunction, strategy: Strategy) -> "Step":
    """Make the train step of a run: a function `(state, batch) -> (state, metrics)`.

    The step is compiled at its first call. The state that is passed in is donated: continue with
    the state that is returned. Every leaf of `batch` has the examples along dim 0.

    - `loss_fn`: a function `loss_fn(model, batch, rng)` of the model, some of the examples, and a
      key whose draws do not depend on the mesh. It returns the loss, or `(loss, metrics)` with a
      dict of metrics. The loss is `sl.weighted_mean(total, weight)`, or a scalar: then all examples
      weigh the same. A metric is either of these, or `sl.weighted_mean(total, weight)` of an array.
      Its changes to the model's state, other than to parameters, are kept.
    - `strategy`: how to train, the `sl.Strategy` that the state was made with.

    The metrics that a step returns are those of the loss, as means over the whole batch, and these:

    - `loss`: the loss of the whole batch.
    - `weight`: what the examples of the batch weigh together.
    - `grad_norm`: the norm of the gradient, before it is clipped.
    - `first_nonfinite`: the number of the first parameter whose gradient is not finite, or -1.
    - `nonfinite_losses`: in how many microbatches of all devices the loss is not finite.
    - `nonfinite_microbatch`: the number of that microbatch if there is exactly one, otherwise -1.
    - `compressed`: whether gradients were compressed in this step; only with optimizers that decide
      this, such as `sl.optimizers.onebit_adam`.
    - `met`: whether workers have met in this step; only if workers train apart.

    >>> import jax.numpy as jnp, optax, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> state = sl.init(lambda: {"w": jnp.zeros(3)}, optax.sgd(0.1), strategy)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2), strategy)
    >>> state, metrics = step(state, jnp.ones((16, 3)))
    >>> metrics["loss"].item()
    1.0
    """
    return Step(loss_fn, strategy)


class Step:
    """A compiled train step; make it with `train_step`.

    `step(state, batch)` takes a step. `step.lower(state, batch).compile()` shows what it will do.

    - `loss_fn`: the loss that it was made with.
    - `strategy`: the strategy that it was made with.
    """

    def __init__(self, loss_fn: LossFunction, strategy: Strategy) -> None:
        if not callable(loss_fn) or not isinstance(strategy, Strategy):
            raise ValueError(
                "`train_step(loss_fn, strategy)` takes a function of model, batch and key, and a "
                f"`sl.Strategy`; got {type(loss_fn).__name__} and {type(strategy).__name__}."
            )
        check_arguments(loss_fn)
        self.loss_fn, self.strategy = loss_fn, strategy
        # Names are recorded while the loss is traced, which is once for each program.
        self._used = UsedNames()
        # By `State.program_key`.
        self._jitted_by_state: dict[tuple[Any, ...], Any] = {}
        self._programs = Programs()
        # Where a budget says how much memory there is: what was found, and steps that keep it.
        self._fitted: dict[Any, FittedRemat] = {}
        self._by_remat: dict[Any, Step] = {}

    def __call__(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """Take one step. `state` is donated: use the one returned.

        A step may stand in a function that is traced, by `jax.jit`, `lax.scan` or `jax.make_jaxpr`.
        There nothing is donated but by the outer `jax.jit(..., donate_argnums=0)`.
        """
        check_call(state, batch)
        if self._has_budget:
            return self._within_budget(state, batch)(state, batch)
        with self._in_force():
            jitted = self._jitted(state, batch)
            # A batch that is laid out right already stays where it is.
            batch = jax.device_put(batch, batch_sharding(self.strategy))
            if self.strategy.pipeline is None:
                return jitted(state, batch)
            if is_traced(state, batch):
                shapes = jax.tree.map(_shape, (state, batch))
                # The program within a traced function cannot be seen. Another one of the same
                # shapes is compiled instead, to see whether it would hang.
                self._programs.of(jitted, *shapes)
                return jitted(state, batch)
            return self._programs.of(jitted, state, batch)(state, batch)

    def trace(self, state: State, batch: Any) -> Any:
        """Trace the step, as `jax.jit(...).trace` does. Takes shapes as well as arrays."""
        check.kind("Step.trace", "state", state, State, "the `State` that `sl.init` makes")
        if self._has_budget:
            return self._within_budget(state, batch).trace(state, batch)
        with self._in_force():
            return self._jitted(state, batch).trace(state, batch)

    def lower(self, state: State, batch: Any) -> Any:
        """Lower the step, as `jax.jit(...).lower` does. Takes shapes as well as arrays.

        `.compile()` of the result shows what the step will do, for devices that need not be there.
        """
        with explained():
            return self.trace(state, batch).lower()

    def fitted_remat(self, state: State, batch: Any) -> FittedRemat:
        """What blocks keep within `Remat.budget`, and the programs that were compiled to find it.

        A step finds it at its first call; here it is found without running. Takes shapes as well as
        arrays, and devices need not be there. In a run of several processes each of them calls it:
        each compiles for itself, and all must come to the same.
        """
        if not self._has_budget:
            raise ValueError(
                f"`Step.fitted_remat` is for a step with a budget of memory, such as "
                f'`Strategy(remat=sl.Remat.budget("14GiB"))`; this one has '
                f"`remat={self.strategy.remat!r}`."
            )
        key = state.program_key, _shapes_key(batch)
        if key not in self._fitted:
            shapes = jax.tree.map(_shape, batch)
            fitted = self._fit(jax.tree.map(_shape, state), shapes)
            # Processes that keep something else would start other programs, and wait for ever.
            require_agreement({"what blocks keep within the budget": repr(fitted.best.remat)})
            self._fitted[key] = fitted
        return self._fitted[key]

    @property
    def _has_budget(self) -> bool:
        return isinstance(self.strategy.remat, RematBudget)

    def _within_budget(self, state: State, batch: Any) -> "Step":
        """The step that keeps what fits."""
        return self._with_remat(self.fitted_remat(state, batch).best.remat)

    def _with_remat(self, remat: Any) -> "Step":
        """The same step, whose blocks keep something else."""
        if remat not in self._by_remat:
            self._by_remat[remat] = Step(self.loss_fn, replace(self.strategy, remat=remat))
        return self._by_remat[remat]

    def _fit(self, state: Any, batch: Any) -> FittedRemat:
        """Find what blocks keep, by compiling for shapes of a state and a batch."""
        budget = self.strategy.remat
        assert isinstance(budget, RematBudget)
        weights = len(jax.tree.leaves((state.params, state.frozen)))
        # Names that no activation has are refused with the trace.
        loss = traced_loss(self._with_remat(Remat(offloaded=budget.offload)), state, batch)
        loops = loops_of(loss, weights)
        host = host_room(self.strategy, budget.offload, loops)
        device = self.strategy.device_mesh.devices.flat[0]

        def peak_of(remat: Any) -> int:
            lowered = self._with_remat(remat).lower(state, batch)
            with without_cache() if is_absent(device) else contextlib.nullcontext():
                # As plans compile for devices that are not there.
                options: Any = options_for(device)
                return peak_bytes(lowered.compile(compiler_options=options), device.platform)

        return fit_remat(budget.memory, loops, peak_of, host=host)

    @property
    def unused_rules(self) -> tuple[str, ...]:
        """Rules that split something and that the traced step has not used.

        A rule is used if a parameter or an annotation has its name.
        """
        # With a budget, other steps are traced in place of this one: each has the same names.
        for step in self._by_remat.values():
            return step.unused_rules
        layouts = [key[0] for key in self._jitted_by_state]
        return unused_rules(self.strategy, layouts, self._used.names)

    @property
    def compiler_options(self) -> dict[str, bool | int]:
        """The options that its programs are compiled with.

        They are empty on CPUs. Those that the user's flags have, and those that the compiler does
        not know, are left out.
        """
        return self._compiler_options.known

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a plan says of the step itself: options that its compiler does not know."""
        return self._compiler_options.remarks

    @cached_property
    def _compiler_options(self) -> CompilerOptions:
        """The options of its programs."""
        return compiler_options(self.strategy)

    @contextlib.contextmanager
    def _in_force(self) -> Iterator[None]:
        """The mesh and the rules of the strategy, and a record of the names that are used."""
        strategy = self.strategy
        with (
            mesh_of_step(strategy.device_mesh),
            strategy.scope(),
            recording(self._used),
            explained(),
        ):
            yield

    def _jitted(self, state: State, batch: Any) -> Any:
        """The jitted step for states of one layout and one model's sizes."""
        check_compiles()
        check_batch(batch, self.strategy)
        key = state.program_key
        if key not in self._jitted_by_state:
            check_layout(state.layout, self.strategy)
            check_kept(combine(state.params, state.frozen), self.strategy)
            mesh = self.strategy.device_mesh
            shardings = state_shardings(state)
            self._jitted_by_state[key] = jax.jit(
                self._run,
                in_shardings=(shardings, batch_sharding(self.strategy)),
                out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
                donate_argnums=0,
                compiler_options=self.compiler_options or None,
            )
        return self._jitted_by_state[key]

    def _run(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One step, as it is traced: of all workers together, or of each apart."""
        of_all = state.layout
        if not of_all.apart:
            return self._take(self.strategy, state, batch)
        worker = self.strategy.of_worker(of_all.apart)

        # Names and reductions over the batch are those of the worker alone.
        def take(state: State, batch: Any) -> tuple[State, Metrics]:
            with worker.scope(), recording(self._used):
                return self._take(worker, state, batch, of_all)

        def differentiate(state: State, batch: Any) -> BatchGradient:
            with worker.scope(), recording(self._used):
                return self._differentiated(worker, state, batch, of_all.apart)

        if of_all.has_server:
            return step_around_server(differentiate, self.strategy, state, batch)
        return step_apart(take, state, batch)

    def _take(
        self, strategy: Strategy, state: State, batch: Any, of_all: Layout | None = None
    ) -> tuple[State, Metrics]:
        """One step under a strategy. Its order is that of the text at the top of this file.

        If this is one of several workers that have parameters of their own, `of_all` is the layout
        of the state of all.
        """
        apart = () if of_all is None else of_all.apart
        gradient, streams, rest, metrics = self._differentiated(strategy, state, batch, apart)
        averaged = None
        if isinstance(state.layout.optimizer, Apart):
            assert of_all is not None
            asked, gradient = averaged_if_asked(of_all, state, gradient)
            averaged = Averaged(asked, of_all.workers)
        trained = self._parameters(strategy, state, state.params, frozen=False)
        # Automatic from here: global values laid out in shards, so that every optax transformation
        # is right. What the user said about implicit promotion applies to the loss; optimizers of
        # optax need it.
        with jax.named_scope(OPTIMIZER), jax.numpy_dtype_promotion("standard"):
            update = update_of(state, gradient, trained, metrics["loss"], strategy, averaged)
        if strategy.skips:
            # Such a gradient may have left its mark in statistics of batches too.
            rest = jax.tree.map(partial(jnp.where, update.nonfinite == 0), rest, state.rest)
        params, opt_state, streams, rest = drop_weak_types(
            (update.params, update.opt_state, streams, rest)
        )
        after = state.replaced(
            step=state.step + 1,
            params=params,
            opt_state=opt_state,
            errors=update.errors,
            streams=streams,
            rest=rest,
            nonfinite=state.nonfinite + update.nonfinite,
        )
        return after, metrics | update.metrics

    def _differentiated(
        self, strategy: Strategy, state: State, batch: Any, apart: tuple[str, ...]
    ) -> BatchGradient:
        """The gradient of a batch under a strategy, where `apart` are the axes of other workers."""
        layout, sender = state.layout, self._sender(state)
        trained = self._parameters(strategy, state, state.params, frozen=False)
        frozen = self._parameters(strategy, state, state.frozen, frozen=True)
        differentiate = GradientFunction(
            self.loss_fn, strategy, layout, trained, frozen, sender, apart
        )
        found = differentiate(_inputs_of(state, batch, sender))
        # Only now are the names known that annotations of the loss have used.
        check_experts(layout, strategy, self._used.names)
        return found

    def _parameters(self, strategy: Strategy, state: State, params: Any, *, frozen: bool) -> Any:
        """A `StepParameter` under a strategy for each of some parameters of a state."""
        named = place(state.layout.named, params)
        splits = state.layout.splits(params)
        return step_parameters(params, named, splits, strategy, frozen=frozen)

    def _sender(self, state: State) -> Sender | None:
        """What the exchange needs of an optimizer that decides what is sent; None for others."""
        optimizer, clip = state.layout.optimizer, self.strategy.clip
        if not isinstance(optimizer, Local) or isinstance(clip, optax.GradientTransformation):
            return None
        return Sender(optimizer, state.opt_state, state_specs(state).opt_state, clip)


def with_remat(step: Step, remat: Any) -> Step:
    """The same step, whose blocks keep something else."""
    return step._with_remat(remat)


def traced_loss(step: Step, state: State, batch: Any) -> Any:
    """The loss of a step whose blocks are marked, as it is traced for one microbatch.

    Its first inputs are the parameters. It has the values of one device of the data axes.
    """
    if not step._used.losses:
        step.trace(state, batch)
    return step._used.losses[-1]


def _inputs_of(state: State, batch: Any, sender: Sender | None) -> GradientInputs:
    """What the manual region of a step takes of a state."""
    sender_state: Any = ()
    if sender is not None:
        sender_state = sender.state
    return GradientInputs(
        params=state.params,
        frozen=state.frozen,
        errors=state.errors,
        opt_state=sender_state,
        streams=state.streams,
        rest=state.rest,
        # Each step has a key of its own, and a run that is resumed has the same ones.
        key=jax.random.fold_in(state.key, state.step),
        batch=batch,
    )


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _shapes_key(batch: Any) -> Any:
    """What is the same for batches that the same program takes."""
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, tuple((x.shape, str(x.dtype)) for x in leaves)
