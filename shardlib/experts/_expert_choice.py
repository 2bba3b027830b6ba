"""The router by which experts choose their tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.experts._routing import Choices, Seen, Taken, check_router, places


@dataclass(frozen=True)
class ExpertChoice:
    """Expert choice (Zhou et al., 2022): each expert takes the tokens that it is likeliest for.

    Each is weighed by its probability among all experts. Every expert is full, so there is no loss
    of uneven load. A token may have many experts or none.

    - `capacity`: how many experts a token has on average. Each expert takes
      `capacity * tokens / experts` of the tokens of a group, rounded up.
    - `sees_later_tokens`: allow this router in a causal model.

    Whether a token is taken depends on later tokens of its group, which a causal model does not
    have when it generates. So `moe` refuses this router, unless the model is not causal,
    `moe(causal=False)`, or you accept this with `sees_later_tokens=True`.

    >>> seen = Seen(jnp.array([[[3.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 0.0]]]))
    >>> ExpertChoice(1.0).take(seen, 2).token.tolist()
    [[[0, 1], [2, 3]]]
    """

    capacity: float = 2.0
    sees_later_tokens: bool = False

    def __post_init__(self) -> None:
        check_router(self)
        if self.capacity is None:
            takes = "how many experts a token has on average, a number above 0"
            raise check.refusal("ExpertChoice", "capacity", self.capacity, takes)
        check.boolean("ExpertChoice", "sees_later_tokens", self.sees_later_tokens)

    @property
    def choices(self) -> int:
        """A token has one expert if `capacity` is one."""
        return 1

    @property
    def jitter(self) -> float:
        """The gate sees what the layer is given."""
        return 0.0

    def take(self, seen: Seen, places: int) -> Taken:
        """The tokens that each expert takes, so many as it has places, the likeliest first.

        Padding is taken last, and is not wanted.
        """
        probability = jax.nn.softmax(seen.logits)
        # Below any probability.
        ranked = jnp.where(seen.counts[..., None] > 0, probability, -1).swapaxes(-1, -2)
        weight, token = lax.top_k(ranked, places)
        return Taken(token, weight, weight != -1)

    def choose(self, seen: Seen) -> Choices:
        """The same by token, with a choice for each expert, of which some are wanted."""
        tokens, experts = seen.logits.shape[-2:]
        taken = self.take(seen, places(self, tokens, experts))
        one_hot = jax.nn.one_hot(taken.token, tokens) * taken.wanted[..., None]
        expert = jnp.broadcast_to(jnp.arange(experts), seen.logits.shape)
        return Choices(expert, jax.nn.softmax(seen.logits), one_hot.sum(-2).swapaxes(-1, -2) > 0)

    def balance(self, seen: Seen, choices: Choices) -> jax.Array:
        """Zero: each expert takes as many tokens as any other."""
        return jnp.zeros(seen.logits.shape[:-2], jnp.float32)
