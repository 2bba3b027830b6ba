"""How often an optimizer that says itself what is sent sends it, over a run.

It is counted by the optimizer: all steps of a run, for a model of one number. No mask of weight
decay says what is sent, and it would be that of another model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib.optimizers._local import Apart, Local


class Rounds(NamedTuple):
    """In how many steps of a run what is sent.

    Attributes:
        exact: gradients, summed exactly.
        coded: messages of the optimizer, as codes.
        both: both of them, one after the other.
        silent: nothing.
    """

    exact: int
    coded: int
    both: int
    silent: int


def rounds_of(optimizer: Local | Apart, steps: int) -> Rounds:
    """Count what an optimizer sends in a run of so many steps."""
    optimizer = optimizer.for_run(steps).unmasked()
    constant = _counted(optimizer, steps, growth=1.0)
    # Gradients that double every so often would let no variance settle.
    growing = _counted(optimizer, steps, growth=1.01)
    if constant != growing:
        raise ValueError(
            'The optimizer goes by its gradients, `freeze="auto"`, so it is not known before the '
            "run how often it sends what. Say after which step or part of the run it freezes, "
            "`freeze=0.2`."
        )
    return constant


def _counted(optimizer: Local | Apart, steps: int, growth: float) -> Rounds:
    """The same, for gradients that grow by a factor in each step."""
    params = jnp.zeros(())
    advance = _of_apart if isinstance(optimizer, Apart) else _of_local

    def step(carry: tuple[Any, jax.Array], _: Any) -> tuple[Any, Any]:
        state, gradient = carry
        state, sent = advance(optimizer, state, gradient, params)
        # Not so large that its square is infinite.
        return (state, jnp.minimum(gradient * growth, 1e15)), sent

    def run() -> tuple[jax.Array, jax.Array]:
        start = optimizer.init(params), jnp.ones(())
        return jax.lax.scan(step, start, length=steps)[1]

    exact, coded = jax.jit(run)()
    both = int((exact & coded).sum())
    exactly, as_codes = int(exact.sum()) - both, int(coded.sum()) - both
    return Rounds(exactly, as_codes, both, steps - exactly - as_codes - both)


def _of_local(optimizer: Any, state: Any, gradient: Any, params: Any) -> tuple[Any, Any]:
    """The state after a step, and whether gradients and messages were sent."""
    sends = optimizer.sends(state)
    _, state = optimizer.update(gradient, state, params, sent=True)
    return state, (~sends, sends)


def _of_apart(optimizer: Any, state: Any, gradient: Any, params: Any) -> tuple[Any, Any]:
    """The same of workers that meet now and then."""
    averages = optimizer.averages(state)
    _, state = optimizer.update(gradient, state, params, averaged=averages)
    meets = optimizer.meets(state)
    _, met = optimizer.met(gradient, state, params)
    state = jax.tree.map(lambda new, old: jnp.where(meets, new, old), met, state)
    return state, (averages, meets)
