"""Routers: to which experts each token goes, and with what weight.

Each router is the rule of its paper, computed in float32. A router sees the tokens of a group, and
what it says is by token: where these find places is in `_dispatch`, and what concerns devices in
`_moe`. What a router is shown is made in `_choose`.

Shape suffixes: G groups, S tokens of a group, E experts, K choices of a token.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from shardlib.checks import _arguments as check
from shardlib.experts._selection import Groups, check_groups, largest


class Seen(NamedTuple):
    """What a router may look at, for tokens of any leading dims (...) and E experts.

    What nobody gave, or what only training has, is None.

    - `logits`: (..., E), the product of tokens and gate, in float32.
    - `uniform`: (...), while training a number in [0, 1) for each token.
    - `normal`: (..., E), while training standard normal numbers, for routers that read them.
    - `noise_logits`: (..., E), the product of tokens and `noise_gate`.
    - `bias`: (E,), what is added to scores before experts are chosen.
    - `real`: (...), false for padding.
    - `ids`: (...), whole numbers, such as the ids of tokens.
    """

    logits: jax.Array
    uniform: jax.Array | None = None
    normal: jax.Array | None = None
    noise_logits: jax.Array | None = None
    bias: jax.Array | None = None
    real: jax.Array | None = None
    ids: jax.Array | None = None

    @property
    def counts(self) -> jax.Array:
        """(...): one for a token, zero for padding, in float32."""
        if self.real is None:
            return jnp.ones(self.logits.shape[:-1], jnp.float32)
        return self.real.astype(jnp.float32)


class Choices(NamedTuple):
    """What a router wants for each token: K experts, the first choice first.

    - `expert`: (..., K), the numbers of the experts, from 0 on.
    - `weight`: (..., K), float32, by what the output of each is multiplied.
    - `wanted`: (..., K), bools. A choice that is not wanted takes no place in its expert and adds
      nothing to the output.
    - `probability`: (..., E), float32, how likely each expert is to the router, adding up to one;
      statistics and losses of uneven load are made of it. None is the softmax of the logits.
    """

    expert: jax.Array
    weight: jax.Array
    wanted: jax.Array
    probability: jax.Array | None = None


class Taken(NamedTuple):
    """What a router by which experts choose has for each of the C places of an expert in a group.

    - `token`: (..., E, C), the numbers of tokens in their group, from 0 on.
    - `weight`: (..., E, C), float32, by what the output for each is multiplied.
    - `wanted`: (..., E, C), bools. Places that are not wanted stay empty.
    """

    token: jax.Array
    weight: jax.Array
    wanted: jax.Array


class Router(Protocol):
    """A rule for routing; implementations are frozen dataclasses.

    A subclass of your own needs nothing but these. One that looks at more than logits and `uniform`
    says so in `reads`, a tuple of names of fields of `Seen`: what nobody reads is not drawn, and is
    refused where it is given. One by which experts choose has `take(seen, places) -> Taken` too.
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

    def choose(self, seen: Seen) -> Choices:
        """The choices of tokens, from what may be seen of them."""
        ...

    def balance(self, seen: Seen, choices: Choices) -> jax.Array:
        """The loss of each group that is loaded unevenly, for tokens (groups, tokens).

        `shares` gives what most of these losses are made of.
        """
        ...


class Shares(NamedTuple):
    """How a group of tokens falls upon the experts, (..., E) each, as shares of its tokens.

    - `first`: of the tokens whose first choice it is.
    - `every`: of all choices.
    - `probability`: the mean probability.
    """

    first: jax.Array
    every: jax.Array
    probability: jax.Array


def shares(seen: Seen, choices: Choices) -> Shares:
    """What a loss of uneven load is made of, for tokens (..., tokens); padding counts for nothing.

    >>> logits = jnp.log(jnp.array([[0.75, 0.25], [0.5, 0.5]]))
    >>> seen = Seen(logits)
    >>> [share.tolist() for share in shares(seen, TopK(1).choose(seen))]
    [[1.0, 0.0], [1.0, 0.0], [0.625, 0.375]]
    """
    check.kind("shares", "seen", seen, Seen, "what a router is shown, a `Seen`")
    check.kind("shares", "choices", choices, Choices, "what a router chose, `Choices`")
    count, ranks = seen.logits.shape[-1], choices.expert.shape[-1]
    each = seen.counts
    # A group of nothing but padding has no shares.
    share = 1 / jnp.maximum(each.sum(-1), 1)[..., None]
    probability = probability_of(seen, choices)
    chosen = jax.nn.one_hot(choices.expert, count) * each[..., None, None]
    return Shares(
        chosen[..., 0, :].sum(-2) * share,
        chosen.sum((-3, -2)) * share / ranks,
        (probability * each[..., None]).sum(-2) * share,
    )


def probability_of(seen: Seen, choices: Choices | None) -> jax.Array:
    """How likely each expert is to a router, (..., E): what it says, or else the softmax."""
    if choices is None or choices.probability is None:
        return jax.nn.softmax(seen.logits)
    return choices.probability


@dataclass(frozen=True)
class Top2:
    """GShard's top-2 gating: the two likeliest experts, weighed by their shares of both.

    In training a token goes to its second expert if twice the expert's weight exceeds a number
    drawn from [0, 1), so that one of little weight seldom takes a place. Elsewhere it always goes.

    - `capacity`: the capacity factor: how many times its even share of the choices an expert takes
      at most. None is no limit, which `dropless` needs.
    - `jitter`: while training, what the gate sees is multiplied by numbers drawn from
      [1 - jitter, 1 + jitter].

    >>> [round(float(w), 3) for w in Top2().choose(Seen(jnp.log(jnp.array([0.1, 0.6,
    ...     0.3])))).weight]
    [0.667, 0.333]
    """

    capacity: float | None = 1.0
    jitter: float = 0.0

    def __post_init__(self) -> None:
        check_router(self)

    @property
    def choices(self) -> int:
        """A token has two experts."""
        return 2

    def choose(self, seen: Seen) -> Choices:
        """The two likeliest experts, of which the second is wanted by chance while training.

        The chance is twice its share of the two, as in GShard: with half of it, it is always
        wanted.
        """
        gates, expert = largest(jax.nn.softmax(seen.logits), 2)
        weight = gates / (gates.sum(-1, keepdims=True) + _TINY)
        wanted = jnp.ones(weight.shape, bool)
        if seen.uniform is not None:
            wanted = wanted.at[..., 1].set(2 * weight[..., 1] > seen.uniform)
        return Choices(expert, weight, wanted)

    def balance(self, seen: Seen, choices: Choices) -> jax.Array:
        """GShard's auxiliary loss: the mean over experts of first choices times probability.

        It is 1 / E² if both are even.
        """
        first, _, probability = shares(seen, choices)
        return (first * probability).mean(-1)


@dataclass(frozen=True)
class Switch:
    """Switch Transformer's: only the likeliest expert, weighed by its probability among all.

    - `capacity`: the capacity factor: how many times its even share of the choices an expert takes
      at most. None is no limit, which `dropless` needs.
    - `jitter`: while training, what the gate sees is multiplied by numbers drawn from
      [1 - jitter, 1 + jitter].

    >>> [round(float(w), 3) for w in Switch().choose(Seen(jnp.log(jnp.array([0.1, 0.6,
    ...     0.3])))).weight]
    [0.6]
    """

    capacity: float | None = 1.25
    jitter: float = 0.01

    def __post_init__(self) -> None:
        check_router(self)

    @property
    def choices(self) -> int:
        """A token has one expert."""
        return 1

    def choose(self, seen: Seen) -> Choices:
        """The likeliest expert, with its probability among all."""
        weight, expert = largest(jax.nn.softmax(seen.logits), 1)
        return Choices(expert, weight, jnp.ones(weight.shape, bool))

    def balance(self, seen: Seen, choices: Choices) -> jax.Array:
        """Switch's loss: E times the sum over experts of first choices times probability.

        It is 1 if both are even.
        """
        first, _, probability = shares(seen, choices)
        return first.shape[-1] * (first * probability).sum(-1)


@dataclass(frozen=True)
class TopK:
    """Top-k gating, as in Mixtral: the likeliest `choices` experts, weighed by a softmax over them.

    - `choices`: how many experts a token goes to.
    - `capacity`: the capacity factor: how many times its even share of the choices an expert takes
      at most. None is no limit, which `dropless` needs.
    - `jitter`: while training, what the gate sees is multiplied by numbers drawn from
      [1 - jitter, 1 + jitter].
    - `renormalize`: whether the weights of a token add up to one. With False they are the softmax
      over all experts.
    - `groups`: into how many groups of equal size the experts fall, consecutive ones together.
    - `groups_taken`: how many groups a token chooses from: those with the likeliest experts, as in
      DeepSeek-V2.

    >>> [round(float(w), 3) for w in TopK(2).choose(Seen(jnp.log(jnp.array([0.1, 0.6,
    ...     0.3])))).weight]
    [0.667, 0.333]
    """

    choices: int
    capacity: float | None = None
    jitter: float = 0.0
    renormalize: bool = True
    groups: int = 1
    groups_taken: int = 1

    def __post_init__(self) -> None:
        check_router(self)
        check.boolean("TopK", "renormalize", self.renormalize)
        check_groups(self)

    def choose(self, seen: Seen) -> Choices:
        """The likeliest experts, with a softmax over them or their shares of that over all.

        The former add up to one for each token, the latter to less, by what the other experts have.
        """
        # Of a group of experts the likeliest counts; a softmax keeps the order of logits.
        logits = Groups(self.groups, self.groups_taken, 1).within(seen.logits, self.choices, self)
        if self.renormalize:
            chosen, expert = largest(logits, self.choices)
            weight = jax.nn.softmax(chosen)
        else:
            weight, expert = largest(logits, self.choices, of=jax.nn.softmax(seen.logits))
        return Choices(expert, weight, jnp.ones(weight.shape, bool))

    def balance(self, seen: Seen, choices: Choices) -> jax.Array:
        """Switch's loss with every choice counted: E times the sum of choices times probability.

        It is 1 if both are even.
        """
        _, every, probability = shares(seen, choices)
        return every.shape[-1] * (every * probability).sum(-1)


def places(router: Router, tokens: int, experts: int) -> int:
    """How many tokens of a group an expert takes.

    That is its even share of all choices, times the router's capacity, rounded up; all tokens where
    the router has no capacity.

    >>> places(Top2(), tokens=64, experts=8), places(Switch(), tokens=64,
    ...     experts=8), places(TopK(2), 64, 8)
    (16, 10, 64)
    """
    check_choices(router, experts)
    if router.capacity is None:
        return tokens
    # By fractions: 1.1 * 100 / 10 is more than 11 in floats, and would be rounded up to 12.
    share = router.choices * tokens * Fraction(str(router.capacity)) / experts
    return min(tokens, math.ceil(share))


def check_choices(router: Router, experts: int) -> None:
    """Refuse a router that sends a token to more experts than there are."""
    if router.choices > experts:
        raise ValueError(
            f"{router} sends each token to {router.choices} experts, and there are {experts}: "
            "choose fewer, or have more experts."
        )


def z_loss(logits: jax.Array) -> jax.Array:
    """The square of the logarithm of the softmax's sum, for each token.

    As a loss it keeps logits small, where float32 is exact.
    """
    return jnp.square(jax.nn.logsumexp(logits, -1))


_TINY = 1e-9  # keeps a quotient finite where both probabilities vanish


def check_router(router: Router) -> None:
    """Refuse a router's numbers that make no sense, and keep the checked ones."""
    kind = type(router).__name__
    check.whole(kind, "choices", router.choices, "a number of experts", least=1)
    takes = "how many times its even share an expert takes, at most (none would drop every token)"
    capacity = check.number(kind, "capacity", router.capacity, takes, above=0, optional=True)
    check.assign(router, capacity=capacity)
    # Some routers have no jitter to be chosen.
    if "jitter" in vars(router):
        jitter = check.number(kind, "jitter", router.jitter, "a share", least=0, below=1)
        check.assign(router, jitter=jitter)
