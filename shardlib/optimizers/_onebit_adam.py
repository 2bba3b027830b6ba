"""1-bit Adam (arXiv 2102.02888): Adam until its variance settles, then momenta of one bit."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.optimizers._local import Local

SETTLED = 0.04
"""The variance has settled when, over as many steps as it remembers, its norm changes by less than
this part of it.
"""


class OneBitAdamState(NamedTuple):
    """Adam's, and whether the variance is frozen."""

    steps: jax.Array  # taken
    seen: jax.Array  # of these, those that the variance has seen
    frozen: jax.Array
    norm: jax.Array  # of the variance, when it was last compared
    mu: Any
    nu: Any
    rest: Any  # of weight decay and the learning rate


def onebit_adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    freeze: int | float | Literal["auto"] = 0.2,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
    steps: int | None = None,
) -> Local:
    """1-bit Adam: from some step on, workers send momenta in one bit instead of gradients.

    Adam's variance is frozen from that step on.

    - `freeze`: after how many steps; or after what part of the run, below 1; or `"auto"`, when the
      variance has settled: when its norm changes by less than 4 % over 1 / (1 - b2) steps, and the
      learning rate has stopped rising.
    - `b1`, `b2`, `eps`, `weight_decay`, `mask`: those of `optax.adamw`, which it is until the
      freeze; without weight decay unless some is given.
    - `steps`: the length of the run, of which `freeze` may be a part. `sl.fit` says it.

    It goes with `Strategy(exchange=sl.collectives.OneBit(axis=...))`, or `Quantised`. Parameters
    that the exchange sums exactly stay Adam's for good. Elements whose gradient was zero in every
    step before the freeze have no variance to divide by, and no bit says zero: gradients no longer
    move them. Where such elements are to be learned later, sum them exactly.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data,
    ...     exchange=sl.collectives.OneBit("data"))
    >>> state = sl.init(lambda: {"w": jnp.zeros(16)}, onebit_adam(0.1, freeze=2), strategy)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2), strategy)
    >>> compressed = []
    >>> for _ in range(4):
    ...     state, metrics = step(state, jnp.ones((8, 16)))
    ...     compressed.append(metrics["compressed"].item())
    >>> compressed
    [False, False, True, True]
    """
    _check(freeze, steps)
    b1 = check.number("onebit_adam", "b1", b1, least=0, below=1)
    b2 = check.number("onebit_adam", "b2", b2, least=0, below=1)
    eps = check.number("onebit_adam", "eps", eps, least=0)
    weight_decay = check.number("onebit_adam", "weight_decay", weight_decay, least=0)
    _check_learning_rate(learning_rate)
    _check_mask(mask)
    at = _resolved(freeze, steps)
    rest = optax.chain(
        optax.add_decayed_weights(weight_decay, mask), optax.scale_by_learning_rate(learning_rate)
    )
    interval = max(1, round(1 / (1 - b2)))

    def init(params: Any) -> OneBitAdamState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        count = jnp.zeros((), jnp.int32)
        return OneBitAdamState(
            count, count, jnp.zeros((), bool), jnp.zeros(()), zeros, zeros, rest.init(params)
        )

    def message(gradients: Any, state: OneBitAdamState) -> tuple[Any, Any]:
        momenta = jax.tree.map(lambda g, mu: (1 - b1) * g + b1 * mu, gradients, state.mu)
        return momenta, jax.tree.map(lambda nu: nu.real > 0, state.nu)

    def update(
        updates: Any, state: OneBitAdamState, params: Any = None, *, sent: Any = None, **extra: Any
    ) -> tuple[Any, OneBitAdamState]:
        if sent is None:
            raise ValueError(
                "`onebit_adam` needs each worker's own gradient, and was given what is averaged "
                "already. Hand it to `sl.init` as it is, not in `optax.chain` or another "
                "transformation, under `Strategy(exchange=sl.collectives.OneBit(axis=...))`; clip "
                "by `Strategy(clip=...)`. For averaged gradients there is `optax.adamw`."
            )
        if at is None:
            raise ValueError(
                f"`onebit_adam(freeze={freeze})` is a part of the run, and a step by itself does "
                "not know how long that is. `sl.fit` does; or say it: `onebit_adam(..., "
                "steps=10_000)`, or the step at which to freeze."
            )
        count = state.steps + 1
        seen = jnp.where(state.frozen, state.seen, count)

        def moments(
            g: jax.Array, mu: jax.Array, nu: jax.Array, sent: bool
        ) -> tuple[jax.Array, ...]:
            averaged = jnp.logical_and(sent, state.frozen)
            mu = jnp.where(averaged, g, (1 - b1) * g + b1 * mu)
            nu = jnp.where(averaged, nu, (1 - b2) * (g * g.conj()).real + b2 * nu)
            unbiased = nu / (1 - b2 ** (seen if sent else count)).astype(nu.dtype)
            step = mu / (1 - b1**count).astype(mu.dtype) / (jnp.sqrt(unbiased) + eps)
            return mu.astype(g.dtype), nu, step

        found = jax.tree.map(moments, updates, state.mu, state.nu, sent)
        mu, nu, step = (jax.tree.map(lambda _, of, k=k: of[k], updates, found) for k in range(3))
        freezes, norm = count >= at if at != "auto" else False, state.norm
        if at == "auto":

            def compared() -> tuple[jax.Array, jax.Array]:
                scale = 1 - b2 ** count.astype(jnp.float32)
                now = (
                    sum(jnp.sum(leaf.real.astype(jnp.float32)) for leaf in jax.tree.leaves(nu))
                    / scale
                )
                settled = (norm > 0) & (jnp.abs(now / norm - 1) < SETTLED)
                return settled & jnp.logical_not(_rises(learning_rate, state.steps)), now

            due = (count % interval == 0) & ~state.frozen
            freezes, norm = jax.lax.cond(due, compared, lambda: (jnp.zeros((), bool), norm))
        step, after = rest.update(step, state.rest, params, **extra)
        return step, OneBitAdamState(count, seen, state.frozen | freezes, norm, mu, nu, after)

    @lru_cache
    def for_run(length: int) -> Local:
        if steps is not None and steps != length:
            raise ValueError(
                f"`onebit_adam(steps={steps})` says another length than the run has, which is "
                f"{length} steps: make them the same, or leave `steps` out where `sl.fit` says it."
            )
        _resolved(freeze, length)
        if steps is not None or not isinstance(freeze, float):
            return made
        of_run: dict[str, Any] = {
            "b1": b1,
            "b2": b2,
            "eps": eps,
            "weight_decay": weight_decay,
            "mask": mask,
        }
        return onebit_adam(learning_rate, freeze=freeze, steps=length, **of_run)

    made = Local(init, update, sends=lambda state: state.frozen, message=message, for_run=for_run)
    return made


def _rises(learning_rate: Any, count: jax.Array) -> Any:
    """Whether the learning rate of this step is above that of the one before."""
    if not callable(learning_rate):
        return False
    schedule: Callable = learning_rate
    return schedule(count) > schedule(jnp.maximum(count - 1, 0))


def _resolved(freeze: Any, steps: int | None) -> Any:
    """After how many steps to freeze, if the run is as long as is said; None if that is a part of
    what is not known.
    """
    if freeze == "auto" or steps is None:
        return None if isinstance(freeze, float) else freeze
    at = max(1, round(freeze * steps)) if isinstance(freeze, float) else freeze
    if at >= steps:
        raise ValueError(
            f"`onebit_adam(freeze={freeze})` lies beyond the run, which has {steps} steps: nothing "
            "would ever be compressed. Freeze earlier, after 15 to 25 % of a run say, "
            "`freeze=0.2`; or use `optax.adamw`."
        )
    return at


def _check(freeze: Any, steps: Any) -> None:
    if isinstance(freeze, Tracer):
        raise ValueError(
            "`onebit_adam(freeze=...)` is known before anything is traced, so it does not go into "
            "`optax.inject_hyperparams`. What changes over a run, the learning rate, is a "
            "schedule: `onebit_adam(optax.cosine_decay_schedule(...))`."
        )
    whole = isinstance(freeze, int | np.integer) and not isinstance(freeze, bool) and freeze >= 1
    part = type(freeze) is float and 0 < freeze < 1
    if not (whole or part or (isinstance(freeze, str) and freeze == "auto")):
        raise ValueError(
            f"`onebit_adam(freeze={check.shown(freeze)})` takes a step, an int of at least 1, a "
            'part of the run, a float between 0 and 1, or "auto".'
        )
    check.whole("onebit_adam", "steps", steps, "a number of steps", least=1, optional=True)


def _check_learning_rate(rate: Any) -> None:
    takes = "a number, or a schedule: a function of the number of steps taken"
    if callable(rate) and not isinstance(rate, type):
        return
    if hasattr(rate, "dtype"):
        check_arrays.real("onebit_adam", "learning_rate", rate, takes)
        if rate.shape != ():
            raise check.refusal("onebit_adam", "learning_rate", rate, takes)
        return
    check.number("onebit_adam", "learning_rate", rate, takes)


def _check_mask(mask: Any) -> None:
    takes = "a tree of bools like the parameters, or a function that makes one of them"
    if mask is None or (callable(mask) and not isinstance(mask, type)):
        return
    leaves = jax.tree.leaves(mask)
    if not leaves or not all(isinstance(leaf, bool) for leaf in leaves):
        raise check.refusal("onebit_adam", "mask", mask, f"{takes}, or None")
