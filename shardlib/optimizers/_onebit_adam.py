"""1-bit Adam (arXiv 2102.02888): Adam until its variance settles, then momenta of one bit.

    before the freeze   workers average gradients g exactly      mu = (1 - b1) g + b1 mu
                                                                 nu = (1 - b2) g g + b2 nu
    after it            each worker has a momentum of its own    m = (1 - b1) g + b1 mu
                        they average m in one bit                mu = mean of m, nu stays

    step                mu / (1 - b1^t) / (sqrt(nu / (1 - b2^s)) + eps)

Adam is not linear in the gradient, and one bit of it would not do; but with its variance nu frozen
it is a preconditioned momentum, which is linear, and so may be compressed with its errors kept.
Here t counts the steps, and s those that the variance has seen.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardlib.checks import _arguments as check
from shardlib.optimizers._hyperparameters import (
    check_learning_rate,
    check_length,
    check_mask_fits,
    checked_adam,
    needs_own_gradients,
)
from shardlib.optimizers._local import Local
from shardlib.optimizers._moments import TAKES, check_moment, step_of

SETTLED = 0.04
"""The variance has settled when, over as many steps as it remembers, its norm changes by less than
this part of it.
"""


class OneBitAdamState(NamedTuple):
    """The state of `onebit_adam`: that of Adam, and whether its variance is frozen.

    - `steps`: how many steps were taken.
    - `seen`: how many of these the variance has seen; after the freeze it sees no more.
    - `frozen`: whether the variance is frozen.
    - `norm`: the norm of the variance when it was last compared, for `freeze="auto"`.
    - `mu`: the mean of gradients, the momentum, a tree like the parameters.
    - `nu`: the mean of their squares, the variance, a tree like the parameters.
    - `rest`: the state of weight decay and of the learning rate.
    """

    steps: jax.Array
    seen: jax.Array
    frozen: jax.Array
    norm: jax.Array
    mu: Any
    nu: Any
    rest: Any


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

    Adam's variance is frozen from that step on (arXiv 2102.02888).

    - `learning_rate`: a number, or a schedule of optax: a function of the number of steps taken.
    - `freeze`: after how many steps, a whole number; or after what part of the run, a float below
      1; or `"auto"`, when the variance has settled: when its norm changes by less than 4 % over
      1 / (1 - b2) steps, and the learning rate has stopped rising.
    - `b1`, `b2`, `eps`, `weight_decay`, `mask`: as in `optax.adamw`, which it equals until the
      freeze, except that `weight_decay` is 0 by default.
    - `steps`: the length of the run in steps, which a `freeze` below 1 needs. `sl.fit` fills it in;
      give it where you call the step yourself.

    Give what it returns to `sl.init` as it is, not in `optax.chain`, under
    `Strategy(exchange=sl.collectives.OneBit(axis=...))`, or `Quantised`. Parameters that the
    exchange sums exactly use Adam throughout. If the gradient of an element was zero in every step
    before the freeze, its variance is zero and cannot be divided by, so after the freeze gradients
    no longer change this element. If it has to learn later, let the exchange sum it exactly.

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
    check_freeze("onebit_adam", freeze, steps)
    check_learning_rate("onebit_adam", learning_rate)
    options = checked_adam("onebit_adam", b1, b2, eps, weight_decay, mask)
    adam = FrozenVariance(learning_rate, freeze, steps, *options)
    # Refuses a freeze beyond the end of the run now, rather than at the first step.
    adam.freeze_step  # noqa: B018
    return adam.local


@dataclass(frozen=True, eq=False)
class FrozenVariance:
    """The functions of 1-bit Adam, for some options; they are those of `onebit_adam`, checked.

    Other optimizers that freeze Adam's variance derive from it: `final` is what they do after it.
    """

    name: ClassVar[str] = "onebit_adam"
    instead: ClassVar[str] = "optax.adamw"
    """What is to be used without a compressed exchange."""

    learning_rate: optax.ScalarOrSchedule
    freeze: Any
    steps: int | None
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Any

    @cached_property
    def local(self) -> Local:
        """The optimizer; always the same one, so that a step is compiled for it once."""
        return Local(
            self.init,
            self.update,
            sends=lambda state: state.frozen,
            message=self.message,
            for_run=lru_cache(self.for_run),
            unmasked=lambda: replace(self, mask=None).local,
        )

    @cached_property
    def freeze_step(self) -> Any:
        """After how many steps to freeze, or `"auto"`; None as long as that is not known."""
        return _resolved(self.name, self.freeze, self.steps)

    @cached_property
    def final(self) -> optax.GradientTransformationExtraArgs:
        """What follows Adam's own step: weight decay, and the learning rate."""
        return optax.chain(
            optax.add_decayed_weights(self.weight_decay, self.mask),
            optax.scale_by_learning_rate(self.learning_rate),
        )

    def init(self, params: Any) -> OneBitAdamState:
        """The state before the first step."""
        check_mask_fits(self.name, self.mask, params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        count = jnp.zeros((), jnp.int32)
        frozen, norm = jnp.zeros((), bool), jnp.zeros((), jnp.float32)
        return OneBitAdamState(count, count, frozen, norm, zeros, zeros, self.final.init(params))

    def message(self, gradients: Any, state: OneBitAdamState) -> tuple[Any, Any]:
        """The momenta of a worker, and where they are not always zero: where there is variance."""
        momenta = jax.tree.map(lambda g, mu: (1 - self.b1) * g + self.b1 * mu, gradients, state.mu)
        return momenta, jax.tree.map(lambda nu: nu.real > 0, state.nu)

    def update(
        self,
        updates: Any,
        state: OneBitAdamState,
        params: Any = None,
        *,
        sent: Any = None,
        **extra: Any,
    ) -> tuple[Any, OneBitAdamState]:
        """The updates of a step, and the state after it.

        Args:
            updates: gradients; averaged momenta for leaves that are `sent`, after the freeze.
            state: the state before the step.
            params: the parameters, for weight decay.
            sent: a tree of bools: which leaves workers send as messages.
            extra: further arguments for what optax does after Adam.
        """
        self._check_update(sent)
        count = state.steps + 1
        seen = jnp.where(state.frozen, state.seen, count)
        mu, nu, step = self._adam(updates, state, sent, count, seen)
        freezes, norm = self._freezes(state, count, nu)
        extra |= {"sent": sent, "before": state, "mu": mu, "nu": nu, "adam": self}
        step, final = self.final.update(step, state.rest, params, **extra)
        return step, OneBitAdamState(count, seen, state.frozen | freezes, norm, mu, nu, final)

    def _check_update(self, sent: Any) -> None:
        """Refuse a step that gives averaged gradients only, or one of a run of unknown length."""
        if sent is None:
            raise needs_own_gradients(self.name, self.instead)
        if self.freeze_step is None:
            raise ValueError(
                f"`{self.name}(freeze={self.freeze})` is a part of the run, and a step by itself "
                f"does not know how long that is. `sl.fit` does; or say it: `{self.name}(..., "
                "steps=10_000)`, or the step at which to freeze."
            )

    def _adam(
        self, updates: Any, state: OneBitAdamState, sent: Any, count: jax.Array, seen: jax.Array
    ) -> tuple[Any, Any, Any]:
        """The next `mu` and `nu`, and the step that Adam takes with them.

        Args:
            updates: gradients, or averaged momenta.
            state: the state before the step.
            sent: which leaves are momenta after the freeze.
            count: the number of this step, from 1.
            seen: how many steps the variance has seen, this one included.
        """
        structure = jax.tree.structure(updates)
        new_mu, new_nu, steps = [], [], []
        for g, mu, nu, is_sent in zip(
            jax.tree.leaves(updates),
            structure.flatten_up_to(state.mu),
            structure.flatten_up_to(state.nu),
            structure.flatten_up_to(sent),
            strict=True,
        ):
            # What is averaged after the freeze has the old momentum in it already.
            averaged = jnp.logical_and(is_sent, state.frozen)
            mu = jnp.where(averaged, g, (1 - self.b1) * g + self.b1 * mu)
            nu = jnp.where(averaged, nu, (1 - self.b2) * (g * g.conj()).real + self.b2 * nu)
            # The variance of a leaf that is summed exactly sees every step.
            nu_steps = seen if is_sent else count
            steps.append(self._step_of(mu, nu, count, nu_steps))
            new_mu.append(mu.astype(g.dtype))
            new_nu.append(nu)
        return structure.unflatten(new_mu), structure.unflatten(new_nu), structure.unflatten(steps)

    def _step_of(
        self, mu: jax.Array, nu: jax.Array, count: jax.Array, nu_steps: jax.Array
    ) -> jax.Array:
        """Adam's step for one parameter, both means without their bias towards zero.

        `mu` has seen `count` gradients and `nu` the squares of `nu_steps` of them.
        """
        unbiased = nu / (1 - self.b2**nu_steps).astype(nu.dtype)
        return mu / (1 - self.b1**count).astype(mu.dtype) / (jnp.sqrt(unbiased) + self.eps)

    def _freezes(
        self, state: OneBitAdamState, count: jax.Array, nu: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Whether the variance is frozen from now on, and its norm when it was last compared."""
        if self.freeze_step == "auto":
            return self._freezes_by_itself(state, count, nu)
        return count >= self.freeze_step, state.norm

    def _freezes_by_itself(
        self, state: OneBitAdamState, count: jax.Array, nu: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Whether the variance has settled, and its norm when it was last compared.

        It is compared with itself as many steps ago as it remembers, and not in between.
        """
        # The memory of an exponential mean: the weight of older steps is below 1 / e.
        interval = max(1, round(1 / (1 - self.b2)))

        def compare() -> tuple[jax.Array, jax.Array]:
            return self._compared(state, count, nu)

        def leave() -> tuple[jax.Array, jax.Array]:
            return jnp.zeros((), bool), state.norm

        due = (count % interval == 0) & ~state.frozen
        # Most steps do not read the variance for this: by default one in a thousand does.
        return jax.lax.cond(due, compare, leave)

    def _compared(
        self, state: OneBitAdamState, count: jax.Array, nu: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Whether the norm of the variance has changed little since it was last compared; the norm.

        The norm is the sum of the elements, which are not negative, in float32.
        """
        unbias = 1 - self.b2 ** count.astype(jnp.float32)
        total: Any = 0
        for leaf in jax.tree.leaves(nu):
            total += jnp.sum(leaf.real.astype(jnp.float32))
        norm = total / unbias
        # At the first comparison there is no earlier norm.
        settled = (state.norm > 0) & (jnp.abs(norm / state.norm - 1) < SETTLED)
        # A variance that settles while the learning rate warms up changes again.
        return settled & jnp.logical_not(_rises(self.learning_rate, state.steps)), norm

    def for_run(self, length: int) -> Local:
        """The same optimizer for a run of so many steps.

        That is itself, unless it freezes after a part of a run whose length it did not know.
        """
        check_length(self.name, self.steps, length)
        _resolved(self.name, self.freeze, length)  # refuses a freeze beyond the end of the run
        if self.steps is not None or not isinstance(self.freeze, float):
            return self.local
        return replace(self, steps=length).local


def _rises(learning_rate: Any, count: jax.Array) -> Any:
    """Whether the learning rate of a step is above that of the one before.

    `count` is how many steps were taken before it. One that is no schedule never rises.
    """
    if not callable(learning_rate):
        return False
    schedule: Callable = learning_rate
    return schedule(count) > schedule(jnp.maximum(count - 1, 0))


def _resolved(name: str, freeze: Any, steps: int | None) -> Any:
    """After how many steps an optimizer of a name freezes in a run of so many, or `"auto"`.

    None if that is a part of a run whose length is not known.
    """
    if freeze == "auto":
        return freeze
    return step_of(name, "freeze", freeze, steps)


def check_freeze(name: str, freeze: Any, steps: Any) -> None:
    """Refuse what is neither a step, nor a part of a run, nor `"auto"`.

    `name` is the optimizer that an error speaks of.
    """
    if not (isinstance(freeze, str) and freeze == "auto"):
        check_moment(name, "freeze", freeze, f'{TAKES}, or "auto"')
    check.whole(name, "steps", steps, "a number of steps", least=1, optional=True)
