"""A step of workers that train apart: each takes an ordinary step of its own, and then they meet
if a meeting is due.

    [manual over the axes of the workers
       one worker's examples, parameters and optimizer  ->  an ordinary step, as `Step` has it
       its parameters and the center                    ->  a meeting, or nothing
    ]

Within the worker everything is as without other workers: ZeRO, clipping, and whatever an optimizer
reduces over. In every step workers exchange their metrics, and nothing else unless the optimizer
asks for averaged gradients.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.collectives._meetings import Meeting
from shardlib.layouts._rules import rules_without
from shardlib.layouts._specs import keep_axes
from shardlib.optimizers._local import Apart
from shardlib.step._meeting import Shared, meet
from shardlib.step._meeting_meanwhile import meet_meanwhile
from shardlib.step._state import Layout, State, state_specs
from shardlib.step._workers import Workers, of_one, with_dim

Metrics = dict[str, jax.Array]
TakeStep = Callable[[State, Any], tuple[State, Metrics]]


def step_apart(take_step: TakeStep, state: State, batch: Any) -> tuple[State, Metrics]:
    """One step of every worker, and their meeting.

    Args:
        take_step: an ordinary step, of the state and the examples of one worker. Its metrics are of
            all workers, but for those of the gradient.
        state: the state before, with the arrays of each worker.
        batch: the examples of all workers.
    """
    apart = state.layout.apart
    specs = jax.tree.map(lambda spec: keep_axes(spec, apart), state_specs(state))
    on_workers = jax.shard_map(
        lambda state, batch: _worker_step(take_step, state, batch),
        in_specs=(specs, PartitionSpec(apart)),
        out_specs=(specs, PartitionSpec()),
        axis_names=set(apart),
        check_vma=False,
    )
    return on_workers(state, batch)


def _worker_step(take_step: TakeStep, state: State, batch: Any) -> tuple[State, Metrics]:
    """The step of one worker, where the axes of the workers are manual."""
    layout, workers = state.layout, state.workers
    assert workers is not None
    own = of_one(workers._replace(kept={}))
    alone = state.replaced(
        params=own.params,
        opt_state=own.opt_state,
        rest=own.rest,
        errors={},
        workers=None,
        layout=layout_of_worker(layout),
    )
    shared = Shared(state.params, own.params, (), workers.kept, state.errors)

    def step() -> tuple[Any, Any]:
        after, metrics = take_step(alone, batch)
        return after.params, (after, metrics)

    exchange, by_optimizer = layout.strategy.exchange, isinstance(layout.optimizer, Apart)
    if isinstance(exchange, Meeting) and exchange.overlap:
        met, shared, (after, metrics) = meet_meanwhile(layout, shared, state.step, step)
    else:
        params, (after, metrics) = step()
        shared, specs = shared._replace(own=params), ()
        # Only an optimizer that says when workers meet changes its state in a meeting.
        if by_optimizer:
            shared, specs = shared._replace(opt_state=after.opt_state), state_specs(alone).opt_state
        met, shared = meet(layout, shared, specs, after.step)
    opt_state = shared.opt_state if by_optimizer else after.opt_state
    nonfinite, metrics = _of_all_workers(layout.apart, after.nonfinite - state.nonfinite, metrics)
    own = with_dim(Workers(shared.own, opt_state, after.rest, {}))
    after_all = state.replaced(
        step=after.step,
        params=shared.center,
        errors=shared.errors,
        workers=own._replace(kept=shared.kept),
        streams=after.streams,
        nonfinite=state.nonfinite + nonfinite,
    )
    return after_all, metrics | {"met": met}


def layout_of_worker(layout: Layout) -> Layout:
    """The layout of what one worker has, on its own devices."""
    return replace(
        layout,
        strategy=layout.strategy.of_worker(layout.apart),
        variable_rules=rules_without(layout.variable_rules, layout.apart),
    )


def _of_all_workers(
    apart: tuple[str, ...], nonfinite: jax.Array, metrics: Metrics
) -> tuple[jax.Array, Metrics]:
    """Whether any worker had a gradient that is not finite, and the metrics of all of them.

    The norm is the root of the mean square of the workers' norms. Of several parameters that are
    not finite the last is named.
    """
    square = lax.pmean(jnp.square(metrics["grad_norm"]), apart)
    counts = jnp.stack([nonfinite, metrics["first_nonfinite"].astype(nonfinite.dtype)])
    nonfinite, first = lax.pmax(counts, apart)
    return nonfinite, metrics | {"grad_norm": jnp.sqrt(square), "first_nonfinite": first}
