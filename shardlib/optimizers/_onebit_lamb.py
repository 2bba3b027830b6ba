"""1-bit LAMB (arXiv 2104.06069): LAMB until its variance settles, then momenta of one bit.

LAMB scales Adam's step for each parameter by a ratio, of the norm of the parameter over that of the
step. With a frozen variance the step's norm means something else, so the ratio is frozen with it,
and corrected by how far a variance that goes on would be from the frozen one:

    before the freeze   ratio   = |w| / |step|, within bounds            as LAMB has it
    after it            g       = what the averaged momenta say of the mean gradient
                        fresh   = (1 - b2) g g + b2 fresh
                        factor  = max of sqrt(frozen) / sqrt(fresh), within bounds, and within a
                                  tenth of the one before
                        ratio   = mean of the ratios before the freeze, times factor

The paper scales momenta so that one buffer may hold those of all parameters under one scale. Here
each block of each parameter has a scale of its own, which is as good, and all go in one collective.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shardlib.checks import _arguments as check
from shardlib.optimizers._hyperparameters import check_learning_rate, checked_adam
from shardlib.optimizers._local import Local
from shardlib.optimizers._onebit_adam import FrozenVariance, OneBitAdamState, check_freeze

_NAME = "onebit_lamb"
_CHANGE = 0.1  # how much a factor may differ from the one before, as a part of that


class OneBitLambState(NamedTuple):
    """What `onebit_lamb` has besides the state of 1-bit Adam, as its `OneBitAdamState.rest`.

    - `ratio`: for each parameter, the mean of its ratios; it stays as it is after the freeze.
    - `weight`: what that mean is divided by, since it begins with zero.
    - `factor`: for each parameter, the factor by which its last ratio was corrected.
    - `fresh`: the variance that goes on after the freeze, a tree like the parameters.
    - `rest`: the state of the learning rate.
    """

    ratio: Any
    weight: jax.Array
    factor: Any
    fresh: Any
    rest: Any


def onebit_lamb(
    learning_rate: optax.ScalarOrSchedule,
    *,
    freeze: int | float | Literal["auto"] = 0.2,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    mask: Any = None,
    ratios: tuple[float, float] = (0.01, 10.0),
    factors: tuple[float, float] = (0.5, 4.0),
    memory: float = 0.9,
    steps: int | None = None,
) -> Local:
    """1-bit LAMB: from some step on, workers send momenta in one bit instead of gradients.

    Its variance, and the ratios by which it scales the steps of parameters, are frozen from that
    step on (arXiv 2104.06069).

    - `learning_rate`: a number, or a schedule of optax: a function of the number of steps taken.
    - `freeze`: after how many steps, a whole number; or after what part of the run, a float below
      1; or `"auto"`, when the norm of the variance hardly changes and the learning rate has stopped
      rising.
    - `b1`, `b2`, `eps`, `weight_decay`, `mask`: those of `optax.lamb`, which it is until the freeze
      as long as no ratio meets a bound.
    - `ratios`: the least and the largest ratio of a parameter's norm over that of its step.
    - `factors`: the least and the largest factor by which a frozen ratio is corrected.
    - `memory`: how much of the mean of ratios is kept in a step before the freeze, from 0 to below
      1.
    - `steps`: the length of the run in steps, which a `freeze` below 1 needs. `sl.fit` fills it in;
      give it where you call the step yourself.

    Give what it returns to `sl.init` as it is, not in `optax.chain`, under
    `Strategy(exchange=sl.collectives.OneBit(axis=...))`, or `Quantised`. Parameters that the
    exchange sums exactly stay LAMB's for good. What is said of elements without variance under
    `onebit_adam` holds here too. A ratio is that of a whole array: layers that are stacked in one
    array share it.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data,
    ...     exchange=sl.collectives.OneBit("data"))
    >>> state = sl.init(lambda: {"w": jnp.ones(16)}, onebit_lamb(0.1, freeze=2), strategy)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2), strategy)
    >>> compressed = []
    >>> for _ in range(4):
    ...     state, metrics = step(state, jnp.ones((8, 16)))
    ...     compressed.append(metrics["compressed"].item())
    >>> compressed
    [False, False, True, True]
    """
    check_freeze(_NAME, freeze, steps)
    check_learning_rate(_NAME, learning_rate)
    lamb = _OneBitLamb(
        learning_rate,
        freeze,
        steps,
        *checked_adam(_NAME, b1, b2, eps, weight_decay, mask),
        _checked_bounds("ratios", ratios),
        _checked_bounds("factors", factors),
        check.number(_NAME, "memory", memory, least=0, below=1),
    )
    # Refuses a freeze beyond the end of the run now, rather than at the first step.
    lamb.freeze_step  # noqa: B018
    return lamb.local


@dataclass(frozen=True, eq=False)
class _OneBitLamb(FrozenVariance):
    """The functions of 1-bit LAMB; they are those of 1-bit Adam with another end."""

    name: ClassVar[str] = _NAME
    instead: ClassVar[str] = "optax.lamb"

    ratios: tuple[float, float]
    factors: tuple[float, float]
    memory: float

    @cached_property
    def final(self) -> optax.GradientTransformationExtraArgs:
        """What follows Adam's own step: weight decay, ratios, and the learning rate."""
        update: Any = self._update_final
        return optax.GradientTransformationExtraArgs(self._init_final, update)

    @cached_property
    def _rate(self) -> optax.GradientTransformation:
        return optax.scale_by_learning_rate(self.learning_rate)

    def _init_final(self, params: Any) -> OneBitLambState:
        numbers = jax.tree.map(lambda _: jnp.zeros(()), params)
        ones = jax.tree.map(lambda _: jnp.ones(()), params)
        fresh = jax.tree.map(jnp.zeros_like, params)
        return OneBitLambState(numbers, jnp.zeros(()), ones, fresh, self._rate.init(params))

    def _update_final(
        self,
        steps: Any,
        state: OneBitLambState,
        params: Any,
        *,
        before: OneBitAdamState,
        mu: Any,
        nu: Any,
        sent: Any,
        **extra: Any,
    ) -> tuple[Any, OneBitLambState]:
        """The updates of a step, and the state after it.

        Args:
            steps: those of Adam.
            state: the state before the step.
            params: the parameters.
            before: the state of Adam before the step.
            mu: Adam's mean of gradients after it.
            nu: its variance after it.
            sent: which parameters are sent as messages.
            extra: what else transformations may take.
        """
        count = (before.steps + 1).astype(jnp.float32)
        decayed = optax.add_decayed_weights(self.weight_decay, self.mask)
        whole, _ = decayed.update(steps, decayed.init(params), params)
        weight = jnp.where(
            before.frozen, state.weight, self.memory * state.weight + (1 - self.memory)
        )
        treedef = jax.tree.structure(steps)
        trees = (steps, whole, params, before.mu, mu, nu, sent)
        leaves = [treedef.flatten_up_to(tree) for tree in (*trees, *state[:1], *state[2:4])]
        updates, ratios, factors, fresh = [], [], [], []
        for of_one in zip(*leaves, strict=True):
            parameter = _Parameter(*of_one)
            scaled = self._scaled(parameter, before.frozen, weight, count, before.seen)
            updates.append(scaled.update)
            ratios.append(scaled.ratio)
            factors.append(scaled.factor)
            fresh.append(scaled.fresh)
        update, rest = self._rate.update(treedef.unflatten(updates), state.rest, params)
        tree: Callable[[list[Any]], Any] = treedef.unflatten
        return update, OneBitLambState(tree(ratios), weight, tree(factors), tree(fresh), rest)

    def _scaled(
        self,
        parameter: "_Parameter",
        frozen: jax.Array,
        weight: jax.Array,
        count: jax.Array,
        seen: jax.Array,
    ) -> "_Scaled":
        """One parameter's step times its ratio.

        Args:
            parameter: what there is of it.
            frozen: whether the variance is.
            weight: what the mean of ratios is divided by.
            count: the number of this step, from 1.
            seen: how many steps the frozen variance has seen.
        """
        ratio = self._ratio(parameter.params, parameter.whole)
        mean = jnp.where(
            frozen, parameter.ratio, self.memory * parameter.ratio + (1 - self.memory) * ratio
        )
        compressed = frozen & parameter.sent
        fresh = self._fresh(parameter, compressed)
        factor = self._factor(parameter, fresh, count, seen)
        factor = jnp.where(compressed, factor, 1)
        coefficient = jnp.where(compressed, mean / weight * factor, ratio)
        update = coefficient.astype(parameter.whole.real.dtype) * parameter.whole
        return _Scaled(update, mean, factor, fresh)

    def _ratio(self, params: jax.Array, step: jax.Array) -> jax.Array:
        """The norm of a parameter over that of its step, within bounds; one if either is zero."""
        size, length = _norm(params), _norm(step)
        none = (size == 0) | (length == 0)
        ratio = size / jnp.where(none, 1, length)
        return jnp.where(none, 1, jnp.clip(ratio, *self.ratios))

    def _fresh(self, parameter: "_Parameter", compressed: jax.Array) -> jax.Array:
        """The variance that goes on, with what averaged momenta say of the mean gradient."""
        g = (parameter.mu - self.b1 * parameter.mu_before) / (1 - self.b1)
        fresh = (1 - self.b2) * (g * g.conj()).real + self.b2 * parameter.fresh
        return jnp.where(compressed, fresh, parameter.nu).astype(parameter.fresh.dtype)

    def _factor(
        self, parameter: "_Parameter", fresh: jax.Array, count: jax.Array, seen: jax.Array
    ) -> jax.Array:
        """By what a frozen ratio is corrected.

        Where a part of the step is weight decay, which no variance scales, the factor is for the
        rest only.
        """
        frozen = self._root(parameter.nu, seen.astype(jnp.float32))
        largest = jnp.max(frozen / self._root(fresh, count), initial=0)
        length = _norm(parameter.whole)
        share = jnp.where(length == 0, 1, _norm(parameter.step) / jnp.where(length == 0, 1, length))
        share = jnp.minimum(share, 1)
        factor = jnp.clip(largest * share + (1 - share), *self.factors)
        last = parameter.factor
        return jnp.clip(factor, (1 - _CHANGE) * last, (1 + _CHANGE) * last)

    def _root(self, nu: jax.Array, seen: jax.Array) -> jax.Array:
        """What Adam divides by, of a variance that has seen so many steps."""
        unbiased = nu.real.astype(jnp.float32) / (1 - self.b2**seen)
        return jnp.sqrt(unbiased) + self.eps


class _Parameter(NamedTuple):
    """What there is of one parameter in a step."""

    step: jax.Array  # Adam's
    whole: jax.Array  # with weight decay
    params: jax.Array
    mu_before: jax.Array
    mu: jax.Array
    nu: jax.Array
    sent: bool
    ratio: jax.Array
    factor: jax.Array
    fresh: jax.Array


class _Scaled(NamedTuple):
    """What becomes of one parameter in a step."""

    update: jax.Array
    ratio: jax.Array
    factor: jax.Array
    fresh: jax.Array


def _norm(x: jax.Array) -> jax.Array:
    """The norm of an array, in float32."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sqrt(jnp.sum((wide * wide.conj()).real)).astype(jnp.float32)


def _checked_bounds(argument: str, bounds: Any) -> tuple[float, float]:
    """A pair of bounds, of which the first is above zero and not above the second."""
    takes = "a pair of numbers, (least, largest), above 0"
    if not isinstance(bounds, tuple) or len(bounds) != 2:
        raise check.refusal(_NAME, argument, bounds, takes)
    least, largest = (check.number(_NAME, argument, bound, takes, above=0) for bound in bounds)
    if least > largest:
        raise check.refusal(_NAME, argument, bounds, takes)
    return least, largest
