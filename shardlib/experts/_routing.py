"""Routers: to which experts each token goes, and with what weight.

Each router is the rule of its paper, computed in float32. A router sees one token at a time. What
concerns a group of tokens, how many an expert takes and how evenly they fall, is in `_dispatch`;
what concerns devices, in `_moe`.

Shape suffixes: G groups, S tokens of a group, E experts, K choices of a token.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check


class Choices(NamedTuple):
    """What a router wants for each token.

    That is its experts, first choice first, and what their outputs are multiplied by.

    A choice that is not `wanted` takes no place in its expert and adds nothing to the output.
    """

    expert: jax.Array  # (..., K), whole numbers
    weight: jax.Array  # (..., K), float32
    wanted: jax.Array  # (..., K), true or false


class Router(Protocol):
    """A rule for routing; implementations are frozen dataclasses.

    A subclass of your own needs nothing but these.
    """

    @property
    def choices(self) -> int:
        """How many experts a token goes to at most."""
        ...

    @property
    def capacity(self) -> float | None:
        """How many times its even share of the choices an expert takes; None: whatever comes."""
        ...

    @property
    def jitter(self) -> float:
        """By how much, at most, what the gate sees is multiplied up or down while training."""
        ...

    def choose(self, logits: jax.Array, drawn: jax.Array | None) -> Choices:
        """The choices of tokens, from their logits (..., E).

        While training, `drawn` is a number in [0, 1) for each token, for rules with an element of
        chance; elsewhere it is None.
        """
        ...

    def balance(self, first: jax.Array, every: jax.Array, probability: jax.Array) -> jax.Array:
        """The loss of a group that is loaded unevenly, from three shares by expert, (..., E).

        `first`: of the tokens whose first choice it is; `every`: of all choices; `probability`: the
        mean of its softmax.
        """
        ...


@dataclass(frozen=True)
class Top2:
    """GShard's: the two likeliest experts, weighed by their shares of both.

    The second is taken as often as it weighs.

    In training a token goes to its second expert if twice the expert's weight exceeds a number
    drawn from [0, 1), so that one of little weight seldom takes a place. Elsewhere it always goes.

    >>> [round(float(w), 3) for w in Top2().choose(jnp.log(jnp.array([0.1, 0.6, 0.3])),
    ...     None).weight]
    [0.667, 0.333]
    """

    capacity: float | None = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def choices(self) -> int:
        """A token has two experts."""
        return 2

    def choose(self, logits: jax.Array, drawn: jax.Array | None) -> Choices:
        """The two likeliest experts, of which the second is wanted by chance while training.

        The chance is twice its share of the two, as in GShard: with half of it, it is always
        wanted.
        """
        gates, expert = _largest(jax.nn.softmax(logits), 2)
        weight = gates / (gates.sum(-1, keepdims=True) + _TINY)
        wanted = jnp.ones(weight.shape, bool)
        if drawn is not None:
            wanted = wanted.at[..., 1].set(2 * weight[..., 1] > drawn)
        return Choices(expert, weight, wanted)

    def balance(self, first: jax.Array, every: jax.Array, probability: jax.Array) -> jax.Array:
        """GShard's auxiliary loss: the mean over experts of first choices times probability.

        It is 1 / E² if both are even.
        """
        return (first * probability).mean(-1)


@dataclass(frozen=True)
class Switch:
    """Switch Transformer's: only the likeliest expert, weighed by its probability among all.

    While training, what the gate sees is multiplied by a number drawn from [1 - jitter, 1 +
    jitter].

    >>> [round(float(w), 3) for w in Switch().choose(jnp.log(jnp.array([0.1, 0.6, 0.3])),
    ...     None).weight]
    [0.6]
    """

    capacity: float | None = 1.25
    jitter: float = 0.01

    def __post_init__(self) -> None:
        _check(self)

    @property
    def choices(self) -> int:
        """A token has one expert."""
        return 1

    def choose(self, logits: jax.Array, drawn: jax.Array | None) -> Choices:
        """The likeliest expert, with its probability among all."""
        weight, expert = _largest(jax.nn.softmax(logits), 1)
        return Choices(expert, weight, jnp.ones(weight.shape, bool))

    def balance(self, first: jax.Array, every: jax.Array, probability: jax.Array) -> jax.Array:
        """Switch's loss: E times the sum over experts of first choices times probability.

        It is 1 if both are even.
        """
        return first.shape[-1] * (first * probability).sum(-1)


@dataclass(frozen=True)
class TopK:
    """The softmax over the likeliest `choices` experts, as in Mixtral.

    With `renormalize=False` it is their softmax among all experts.

    >>> [round(float(w), 3) for w in TopK(2).choose(jnp.log(jnp.array([0.1, 0.6, 0.3])),
    ...     None).weight]
    [0.667, 0.333]
    """

    choices: int
    capacity: float | None = None
    jitter: float = 0.0
    renormalize: bool = True

    def __post_init__(self) -> None:
        _check(self)
        check.boolean("TopK", "renormalize", self.renormalize)

    def choose(self, logits: jax.Array, drawn: jax.Array | None) -> Choices:
        """The likeliest experts, with a softmax over them or their shares of that over all.

        The former add up to one for each token, the latter to less, by what the other experts have.
        """
        if self.renormalize:
            largest, expert = _largest(logits, self.choices)
            weight = jax.nn.softmax(largest)
        else:
            weight, expert = _largest(jax.nn.softmax(logits), self.choices)
        return Choices(expert, weight, jnp.ones(weight.shape, bool))

    def balance(self, first: jax.Array, every: jax.Array, probability: jax.Array) -> jax.Array:
        """Switch's loss with every choice counted: E times the sum of choices times probability.

        It is 1 if both are even.
        """
        return every.shape[-1] * (every * probability).sum(-1)


def places(router: Router, tokens: int, experts: int) -> int:
    """How many tokens of a group an expert takes.

    That is its even share of all choices, times the router's capacity, rounded up; all tokens where
    the router has no capacity.

    >>> places(Top2(), tokens=64, experts=8), places(Switch(), tokens=64,
    ...     experts=8), places(TopK(2), 64, 8)
    (16, 10, 64)
    """
    if router.choices > experts:
        raise ValueError(
            f"{router} sends each token to {router.choices} experts, and there are {experts}: "
            "choose fewer, or have more experts."
        )
    if router.capacity is None:
        return tokens
    # By fractions: 1.1 * 100 / 10 is more than 11 in floats, and would be rounded up to 12.
    share = router.choices * tokens * Fraction(str(router.capacity)) / experts
    return min(tokens, math.ceil(share))


def z_loss(logits: jax.Array) -> jax.Array:
    """The square of the logarithm of the softmax's sum, for each token.

    As a loss it keeps logits small, where float32 is exact.
    """
    return jnp.square(jax.nn.logsumexp(logits, -1))


_TINY = 1e-9  # keeps a quotient finite where both probabilities vanish


def _largest(x: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest numbers along the last dim and their indices, the first of equals first.

    This is `lax.top_k` without its sort: to sort thousands for a few of them takes a TPU's compiler
    longer than the whole remainder of the layer. Each turn finds one number and excludes it.
    """
    iota = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    values, indices = [], []
    # Numbers of -inf must stay above those that are excluded.
    remaining = jnp.maximum(lax.stop_gradient(x), jnp.finfo(x.dtype).min)
    for _ in range(count):
        index = remaining.argmax(-1, keepdims=True)
        is_largest = iota == index
        # A masked sum, whose gradient is a mask; a gather's would be a scatter.
        values.append(jnp.where(is_largest, x, 0).sum(-1))
        indices.append(index[..., 0])
        remaining = jnp.where(is_largest, -jnp.inf, remaining)
    return jnp.stack(values, -1), jnp.stack(indices, -1)


def _check(router: Router) -> None:
    """Refuse a router's numbers that make no sense, and keep the checked ones."""
    kind = type(router).__name__
    check.whole(kind, "choices", router.choices, "a number of experts", least=1)
    takes = "how many times its even share an expert takes, at most (none would drop every token)"
    capacity = check.number(kind, "capacity", router.capacity, takes, above=0, optional=True)
    check.assign(
        router,
        capacity=capacity,
        jitter=check.number(kind, "jitter", router.jitter, "a share", least=0, below=1),
    )
