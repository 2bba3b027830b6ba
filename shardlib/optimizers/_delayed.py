"""Updates with gradients of some steps ago, as a parameter server or PipeDream-2BW takes them.

step t    gradient at parameters(t)  ->  waits  ->  moves parameters(t + delay)
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardlib.checks import _arguments as check
from shardlib.optimizers._local import check_wrapped


class DelayedState(NamedTuple):
    """The state of `delayed`: the gradients that wait, and the state of the optimizer behind them.

    - `steps`: how many gradients came.
    - `waiting`: a tree of gradients for each step of the delay, the oldest first.
    - `inner`: the state of the optimizer that is delayed.
    """

    steps: jax.Array
    waiting: tuple[Any, ...]
    inner: Any


def delayed(
    optimizer: optax.GradientTransformation, delay: int
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that updates parameters with the gradient of an earlier step.

    With a delay of one it is the rule of PipeDream-2BW (arXiv 2006.09503). A longer delay simulates
    the stale gradients that workers send to a parameter server. The first `delay` steps change no
    parameter.

    - `optimizer`: any optax transformation. It is given the older gradient, and the parameters and
      the loss of the step.
    - `delay`: after how many steps a gradient is used.

    Waiting gradients are part of the state, sharded like their parameters, and of checkpoints. A
    step that is skipped because its gradient is not finite has no effect on them.

    >>> optimizer = delayed(optax.sgd(1.0), 1)
    >>> params, state = jnp.zeros(()), optimizer.init(jnp.zeros(()))
    >>> for gradient in (1.0, 10.0, 100.0):
    ...     updates, state = optimizer.update(jnp.float32(gradient), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params.item()
    -11.0
    """
    check_wrapped("delayed", optimizer)
    delay = check.whole("delayed", "delay", delay, "a number of steps", least=1)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> DelayedState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return DelayedState(jnp.zeros((), jnp.int32), (zeros,) * delay, inner.init(params))

    def update(
        updates: Any, state: DelayedState, params: Any = None, **extra: Any
    ) -> tuple[Any, DelayedState]:
        oldest, *others = state.waiting
        if "grad" in extra:
            extra["grad"] = oldest
        moves, after = inner.update(oldest, state.inner, params, **extra)
        # Before anything has come that is old enough, there is nothing to move by.
        is_there = state.steps >= delay
        moves = jax.tree.map(lambda move: jnp.where(is_there, move, 0), moves)
        after = jax.tree.map(lambda new, old: jnp.where(is_there, new, old), after, state.inner)
        return moves, DelayedState(state.steps + 1, (*others, updates), after)

    typed: Any = update  # optax knows the types of its own states only
    return optax.GradientTransformationExtraArgs(init, typed)
