"""The router of the first sparse mixtures of experts: the best of logits with noise."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.scipy.special import ndtr

from shardlib.checks import _arguments as check
from shardlib.experts._routing import Choices, Seen, check_router
from shardlib.experts._selection import largest

_TINY = 1e-10  # keeps quotients finite: of noise that vanishes, and of a group of padding


@dataclass(frozen=True)
class NoisyTopK:
    """Noisy top-k gating (Shazeer et al., 2017): a softmax over the largest of noisy logits.

    While training, normal noise is added to each logit. How large it is follows from a second
    product of the token, with `moe(noise_gate=...)`: the softplus of it. In evaluation there is
    no noise.

    - `choices`: how many experts a token goes to.
    - `capacity`: the capacity factor: how many times its even share of the choices an expert takes
      at most. None is no limit, which `dropless` needs.
    - `importance`: the factor of a loss, the squared coefficient of variation of the experts'
      weights, summed over the tokens of a group. The paper's batch is a group here: larger ones are
      closer to it.
    - `load`: the factor of a second loss, the squared coefficient of variation of the number of
      tokens that each expert is expected to get.

    >>> [round(float(w), 3) for w in NoisyTopK(2).choose(Seen(jnp.log(jnp.array([0.1, 0.6,
    ...     0.3])))).weight]
    [0.667, 0.333]
    """

    choices: int
    capacity: float | None = None
    importance: float = 1.0
    load: float = 1.0

    reads: ClassVar = ("normal", "noise_logits")

    def __post_init__(self) -> None:
        check_router(self)
        check.number("NoisyTopK", "importance", self.importance, least=0)
        check.number("NoisyTopK", "load", self.load, least=0)

    @property
    def jitter(self) -> float:
        """The gate sees what the layer is given; the noise comes after it."""
        return 0.0

    def choose(self, seen: Seen) -> Choices:
        """The largest noisy logits, with a softmax over them."""
        chosen, expert = largest(_noisy(seen), self.choices)
        weight = jax.nn.softmax(chosen)
        return Choices(expert, weight, jnp.ones(weight.shape, bool))

    def balance(self, seen: Seen, choices: Choices) -> jax.Array:
        """The paper's two losses; both are zero where all experts have the same."""
        each = seen.counts[..., None]
        chosen = jax.nn.one_hot(choices.expert, seen.logits.shape[-1])
        importance = (chosen * choices.weight[..., None]).sum(-2) * each
        load = chosen.sum(-2)
        if seen.normal is not None:
            load = self.chance(seen, choices)
        of_importance = _variation(importance.sum(-2))
        return self.importance * of_importance + self.load * _variation((load * each).sum(-2))

    def chance(self, seen: Seen, choices: Choices) -> jax.Array:
        """The paper's P(x, i): how likely a token were to choose each expert, drawn once more.

        The expert's own noise is drawn again, and the noise of all others is what it is. Unlike a
        number of tokens, this has a gradient.
        """
        experts = seen.logits.shape[-1]
        if self.choices == experts:
            return jnp.ones(seen.logits.shape, jnp.float32)
        top, _ = largest(_noisy(seen), self.choices + 1)
        is_chosen = jax.nn.one_hot(choices.expert, experts).sum(-2) > 0
        # Of all others, the one that the expert must exceed to be among the best.
        threshold = jnp.where(is_chosen, top[..., -1:], top[..., -2:-1])
        return ndtr((seen.logits - threshold) / _deviation(seen))


def _noisy(seen: Seen) -> jax.Array:
    """The paper's H(x): logits with noise while training, (..., E)."""
    if seen.normal is None:
        return seen.logits
    return seen.logits + seen.normal * _deviation(seen)


def _deviation(seen: Seen) -> jax.Array:
    """How large the noise of each logit is."""
    if seen.noise_logits is None:
        raise ValueError("`NoisyTopK` reads `noise_logits`, which `moe(noise_gate=...)` makes.")
    return jnp.maximum(jax.nn.softplus(seen.noise_logits), _TINY)


def _variation(x: jax.Array) -> jax.Array:
    """The squared coefficient of variation along the last dim: variance by squared mean."""
    return x.var(-1) / jnp.maximum(jnp.square(x.mean(-1)), _TINY)
