"""What a step multiplies and adds, before it is compiled."""

from typing import Any

from shardlib.planning._lower import check_traceable, trace
from shardlib.step._step import Step
from shardlib.tracing._flops import Flops, flops_of


def flops(step: Any, state: Any, batch: Any) -> Flops:
    """Count the floating-point operations of a step's products, by pass.

    Nothing is compiled, and nothing runs. A plan has the same count, `plan.flops`. A step with a
    pipeline cannot be counted, and is a `ValueError`.

    - `step`: what `sl.train_step` gives, or any `jax.jit`-ed function of a state and a batch.
    - `state`: its state, which may be abstract: `sl.init(..., abstract=True)`.
    - `batch`: its batch, or the shapes of one, `jax.ShapeDtypeStruct`s.

    >>> import jax, jax.numpy as jnp, optax, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, remat="full")
    >>> block = sl.remat(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w))
    >>> loss = lambda model, x, rng: jnp.mean(block(x, model["w"]))
    >>> state = sl.init(lambda: {"w": jnp.zeros((64, 64))}, optax.sgd(0.1), strategy, abstract=True)
    >>> found = flops(sl.train_step(loss, strategy), state, jax.ShapeDtypeStruct((16, 64), "f"))
    >>> found.forward, found.recomputed, found.recomputed_fraction
    (262144, 262144, 1.0)
    """
    if isinstance(step, Step) and step.strategy.pipeline is not None:
        raise ValueError(
            "`flops` cannot count a step with `Strategy(pipeline=...)`: the schedule's table "
            "decides which passes a stage runs, and the trace does not show it. Count the same "
            'step without `pipeline`, and with `remat="full"` in place of `remat="stage"`.'
        )
    check_traceable("flops", step)
    return flops_of(trace(step, state, batch))


def flops_of_planned(step: Any, jaxpr: Any) -> Flops | None:
    """The same of a step that was traced already; None where that cannot be counted."""
    if isinstance(step, Step) and step.strategy.pipeline is not None:
        return None
    return flops_of(jaxpr)
