"""0/1 Adam (arXiv 2202.06009): few exact gradients, momenta of one bit, and silent steps.

    now and then         workers average gradients g exactly,      nu = (1 - b2) g g + b2 nu
                         for the variance, less and less often

    in every step        each has a momentum of its own,           m = (1 - b1) g + b1 m
                         moves by it, and adds up how far          u = u + rate m

    in a meeting         they average u in one bit                 x = center - mean / sqrt(nu)
                                                                   m = mean / sum of rates

The momentum after a meeting is the mean of those that workers had, weighted by their rates, so one
bit for each number is all that is sent. Meetings are in every step at first, and less and less
often later. Here `rate` is the learning rate without the bias of the momentum towards zero.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

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
from shardlib.optimizers._local import Apart
from shardlib.optimizers._moments import check_moment, step_of

_NAME = "zero_one_adam"
_NEVER = -1  # the step in which the variance is seen next, once it is frozen


class ZeroOneAdamState(NamedTuple):
    """The state of `zero_one_adam` of one worker. All but `mu` and `u` is the same for all workers.

    - `steps`: how many steps were taken.
    - `seen`: how many of these the variance has seen.
    - `next_seen`: the number of the step that the variance sees next, -1 if none.
    - `next_meeting`: after how many steps workers meet next.
    - `apart`: whether workers have moved on their own since they met.
    - `rates`: the sum of learning rates since then.
    - `decay`: what weight decay has left since then of a parameter that does not move.
    - `mu`: the mean of gradients, the momentum.
    - `nu`: the mean of the squares of averaged gradients, the variance.
    - `u`: what the worker's momenta have added up to since the last meeting.
    """

    steps: jax.Array
    seen: jax.Array
    next_seen: jax.Array
    next_meeting: jax.Array
    apart: jax.Array
    rates: jax.Array
    decay: jax.Array
    mu: Any
    nu: Any
    u: Any


def zero_one_adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    freeze: int | float = 0.15,
    kappa: int = 16,
    apart: int | float = 0.08,
    double: int | float = 0.2,
    longest: int = 16,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    mask: Any = None,
    steps: int | None = None,
) -> Apart:
    """0/1 Adam: momenta of one bit, fewer and fewer exact gradients, and steps that send nothing.

    It is the method of arXiv 2202.06009.

    - `learning_rate`: a number, or a schedule of optax: a function of the number of steps taken.
    - `freeze`: after how many steps (a whole number), or what part of the run (a float below 1),
      the variance is frozen.
    - `kappa`: how often the variance sees a gradient before the interval between such gradients
      doubles; it begins with every step.
    - `apart`, `double`: workers meet in every step until `apart + double`, then in every second
      one, after another `double` in every fourth, and so on. Each is a number of steps or a part of
      the run, as `freeze` is.
    - `longest`: the longest interval between meetings, in steps.
    - `b1`, `b2`, `eps`, `weight_decay`, `mask`: as in `optax.adamw`, but `weight_decay` is 0 by
      default. A mask that is a function may not depend on sizes, since it is also given shards.
    - `steps`: the length of the run in steps, which parts of the run need. `sl.fit` fills it in;
      give it where you call the step yourself.

    Give what it returns to `sl.init` as it is, not in `optax.chain`, under
    `Strategy(exchange=sl.collectives.OneBit(axis=...))`, or `Quantised`. Workers have parameters of
    their own, `State.workers`; an evaluation is of their mean. Elements whose averaged gradient was
    always zero have no variance to divide by: weight decay alone moves them.

    >>> import shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data,
    ...     exchange=sl.collectives.OneBit("data"))
    >>> optimizer = zero_one_adam(0.1, freeze=2, kappa=1, apart=3, double=100, longest=4)
    >>> state = sl.init(lambda: {"w": jnp.zeros(16)}, optimizer, strategy)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2), strategy)
    >>> met = []
    >>> for _ in range(4):
    ...     state, metrics = step(state, jnp.ones((8, 16)))
    ...     met.append(metrics["met"].item())
    >>> met
    [False, False, True, True]
    """
    for argument, moment in (("freeze", freeze), ("apart", apart), ("double", double)):
        check_moment(_NAME, argument, moment)
    check_learning_rate(_NAME, learning_rate)
    takes = "a number of gradients"
    adam = _ZeroOneAdam(
        learning_rate,
        freeze,
        check.whole(_NAME, "kappa", kappa, takes, least=1),
        apart,
        double,
        check.whole(_NAME, "longest", longest, "a number of steps", least=1),
        check.whole(_NAME, "steps", steps, "a number of steps", least=1, optional=True),
        *checked_adam(_NAME, b1, b2, eps, weight_decay, mask),
    )
    # Refuses moments beyond the end of the run now, rather than at the first step.
    adam.moments  # noqa: B018
    return adam.optimizer


class _Moments(NamedTuple):
    """When what happens in a run, in steps."""

    freeze: int
    apart: int
    double: int


@dataclass(frozen=True, eq=False)
class _ZeroOneAdam:
    """The functions of 0/1 Adam, for some options; they are those of `zero_one_adam`, checked."""

    learning_rate: optax.ScalarOrSchedule
    freeze: Any
    kappa: int
    apart: Any
    double: Any
    longest: int
    steps: int | None
    b1: float
    b2: float
    eps: float
    weight_decay: float
    mask: Any

    @cached_property
    def optimizer(self) -> Apart:
        """The optimizer; always the same one, so that a step is compiled for it once."""
        return Apart(
            self.init,
            self.update,
            averages=lambda state: state.steps == state.next_seen,
            alike=lambda state: jnp.logical_not(state.apart),
            meets=lambda state: state.apart & (state.steps >= state.next_meeting),
            message=self.message,
            met=self.met,
            for_run=lru_cache(self.for_run),
            unmasked=lambda: replace(self, mask=None).optimizer,
        )

    @cached_property
    def moments(self) -> _Moments | None:
        """When what happens; None as long as the length of the run is not known."""
        found = []
        for argument in _Moments._fields:
            # A doubling beyond the end of a run is one that does not come: that is no mistake.
            steps = self.steps
            moment = getattr(self, argument)
            if argument == "double" and not isinstance(moment, float):
                steps = None
            found.append(step_of(_NAME, argument, moment, steps))
        return None if None in found else _Moments(*found)

    def init(self, params: Any) -> ZeroOneAdamState:
        """The state before the first step, in which the variance sees a gradient."""
        check_mask_fits(_NAME, self.mask, params)
        zero, one = jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return ZeroOneAdamState(
            steps=zero,
            seen=zero,
            next_seen=zero,
            next_meeting=one,
            apart=jnp.zeros((), bool),
            rates=jnp.zeros(()),
            decay=jnp.ones(()),
            mu=zeros,
            nu=jax.tree.map(lambda x: jnp.zeros_like(x.real), params),
            u=jax.tree.map(_zeros_of_message, params),
        )

    def update(
        self,
        updates: Any,
        state: ZeroOneAdamState,
        params: Any = None,
        *,
        averaged: Any = None,
        **extra: Any,
    ) -> tuple[Any, ZeroOneAdamState]:
        """The updates of a worker, and its state after them.

        Args:
            updates: the worker's own gradients, or the mean of all workers' if `averaged`.
            state: the worker's state before the step.
            params: its parameters, for weight decay.
            averaged: whether gradients are averaged in this step.
            extra: what other transformations of optax take.
        """
        moments = self._checked_moments(averaged)
        count = state.steps + 1
        learning_rate = self._learning_rate(state.steps)
        rate = learning_rate / (1 - self.b1 ** count.astype(jnp.float32))
        seen = state.seen + averaged.astype(jnp.int32)
        mu = jax.tree.map(self._mean, updates, state.mu)
        nu = jax.tree.map(
            lambda g, nu: jnp.where(averaged, self._square_mean(g, nu), nu), updates, state.nu
        )
        moves = jax.tree.map(lambda mu, nu: jnp.where(nu > 0, rate * mu, 0), mu, nu)
        steps = jax.tree.map(lambda move, nu: -move / self._root(nu, seen), moves, nu)
        if self.weight_decay:
            decayed = learning_rate * self.weight_decay
            steps = jax.tree.map(
                lambda step, p, decays: step - decayed * p if decays else step,
                steps,
                params,
                self._decays(params),
            )
        steps = jax.tree.map(lambda step, p: step.astype(p.dtype), steps, updates)
        # After an averaged gradient all workers have the same, if they had the same before.
        apart = state.apart | ~averaged
        after = ZeroOneAdamState(
            steps=count,
            seen=seen,
            next_seen=jnp.where(averaged, self._next_seen(state, seen, moments), state.next_seen),
            next_meeting=jnp.where(apart, state.next_meeting, count + self._interval(count)),
            apart=apart,
            rates=jnp.where(apart, state.rates + rate, 0),
            decay=jnp.where(apart, state.decay * (1 - learning_rate * self.weight_decay), 1),
            mu=jax.tree.map(lambda mu, g: mu.astype(g.dtype), mu, updates),
            nu=nu,
            u=jax.tree.map(lambda u, move: jnp.where(apart, u + move, 0), state.u, moves),
        )
        return steps, after

    def message(self, state: ZeroOneAdamState) -> tuple[Any, Any]:
        """How far a worker's momenta have gone since the last meeting, where there is variance."""
        return state.u, jax.tree.map(lambda nu: nu > 0, state.nu)

    def met(self, mean: Any, state: ZeroOneAdamState, center: Any) -> tuple[Any, ZeroOneAdamState]:
        """The parameters from which all workers go on, and their state.

        Args:
            mean: of their messages.
            state: the state of a worker before.
            center: the parameters on which they met last.
        """

        def moved(x: jax.Array, u: jax.Array, nu: jax.Array, decays: bool) -> jax.Array:
            stayed = x * state.decay if decays else x
            return (stayed - u / self._root(nu, state.seen)).astype(x.dtype)

        def averaged_momentum(u: jax.Array, mu: jax.Array) -> jax.Array:
            # With rates of zero nothing has moved, and momenta stay as they are.
            rates = jnp.where(state.rates == 0, 1, state.rates)
            return jnp.where(state.rates == 0, mu, u / rates).astype(mu.dtype)

        params = jax.tree.map(moved, center, mean, state.nu, self._decays(center))
        after = state._replace(
            next_meeting=state.steps + self._interval(state.steps),
            apart=jnp.zeros((), bool),
            rates=jnp.zeros(()),
            decay=jnp.ones(()),
            mu=jax.tree.map(averaged_momentum, mean, state.mu),
            u=jax.tree.map(jnp.zeros_like, state.u),
        )
        return params, after

    def for_run(self, length: int) -> Apart:
        """The same optimizer for a run of so many steps."""
        check_length(_NAME, self.steps, length)
        made = replace(self, steps=length)
        made.moments  # noqa: B018 - refuses moments beyond the end of the run
        return self.optimizer if self.moments is not None else made.optimizer

    def _checked_moments(self, averaged: Any) -> _Moments:
        """When what happens, for a step that is given what it needs."""
        if averaged is None:
            raise needs_own_gradients(_NAME, "optax.adamw")
        if self.moments is None:
            raise ValueError(
                f"`{_NAME}(freeze={self.freeze}, apart={self.apart}, double={self.double})` has "
                "parts of the run, and a step by itself does not know how long that is. `sl.fit` "
                f"does; or say it: `{_NAME}(..., steps=10_000)`, or steps instead of parts."
            )
        return self.moments

    def _mean(self, g: jax.Array, mu: jax.Array) -> jax.Array:
        return (1 - self.b1) * g + self.b1 * mu

    def _square_mean(self, g: jax.Array, nu: jax.Array) -> jax.Array:
        return (1 - self.b2) * (g * g.conj()).real + self.b2 * nu

    def _root(self, nu: jax.Array, seen: jax.Array) -> jax.Array:
        """What a momentum is divided by; one where there is no variance."""
        unbiased = nu / (1 - self.b2 ** seen.astype(jnp.float32)).astype(nu.dtype)
        return jnp.where(nu > 0, jnp.sqrt(unbiased) + self.eps, 1)

    def _learning_rate(self, count: jax.Array) -> Any:
        """The learning rate of a step, by how many were taken before it."""
        if callable(self.learning_rate):
            schedule: Callable = self.learning_rate
            return schedule(count)
        return self.learning_rate

    def _decays(self, params: Any) -> Any:
        """Which parameters decay, a tree of bools."""
        mask = self.mask
        if callable(mask):
            mask = mask(params)
        if mask is None:
            mask = True
        # A mask may be a prefix of the tree, and has leaves for frozen parameters too.
        return jax.tree.map(
            lambda decays, of_it: jax.tree.map(lambda _: decays, of_it), mask, params
        )

    def _next_seen(self, state: ZeroOneAdamState, seen: jax.Array, moments: _Moments) -> jax.Array:
        """The number of the step whose gradient the variance sees after this one."""
        # The first `kappa` gaps are of one step, the next as many of two, of four, and so on.
        gap = jnp.int32(1) << jnp.minimum((seen - 1) // self.kappa, 30)
        # A gap that is as long as the run is never over.
        following = state.steps + jnp.minimum(gap, moments.freeze)
        return jnp.where(following < moments.freeze, following, _NEVER)

    def _interval(self, count: jax.Array) -> jax.Array:
        """After how many steps workers meet again, after a meeting at the end of a step."""
        moments = self.moments
        assert moments is not None
        doublings = jnp.maximum(count - moments.apart, 0) // moments.double
        interval = jnp.int32(1) << jnp.minimum(doublings, 30)
        return jnp.minimum(interval, self.longest)


def _zeros_of_message(x: jax.Array) -> jax.Array:
    """Zeros in the dtype in which moves are added up: float32, or that of wider parameters."""
    return jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
