"""The router of DeepSeek-V3: sigmoid scores, groups of experts, and a bias that evens the load."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from shardlib.checks import _arguments as check
from shardlib.experts._routing import Choices, Seen, check_router, shares
from shardlib.experts._selection import Groups, check_groups, largest

_TINY = 1e-20  # keeps a quotient finite where all scores vanish


@dataclass(frozen=True)
class SigmoidTopK:
    """DeepSeek-V3's gating: each expert is scored by itself, with the sigmoid of its logit.

    Experts are chosen by score plus bias (`moe(bias=...)`, see `balanced`) and weighed by their
    scores alone. DeepSeek-V3 is `SigmoidTopK(8, scale=2.5, groups=8, groups_taken=4)` with 256
    experts.

    - `choices`: how many experts a token goes to.
    - `capacity`: the capacity factor: how many times its even share of the choices an expert takes
      at most. None is no limit, which `dropless` needs.
    - `jitter`: while training, what the gate sees is multiplied by numbers drawn from
      [1 - jitter, 1 + jitter].
    - `scale`: by what the weights are multiplied, after `normalize`.
    - `normalize`: whether a token's weights are divided by their sum. A single choice wants False:
      divided by itself, a score teaches the gate nothing.
    - `groups`: into how many groups of equal size the experts fall, consecutive ones together.
    - `groups_taken`: how many groups a token chooses from: those whose two best sums of score and
      bias add up to most.

    >>> seen = Seen(jnp.array([2.0, 0.0, -2.0]), bias=jnp.array([-1.0, 0.0, 0.5]))
    >>> choices = SigmoidTopK(2, normalize=False).choose(seen)
    >>> choices.expert.tolist(), [round(float(weight), 2) for weight in choices.weight]
    ([2, 1], [0.12, 0.5])
    """

    choices: int
    capacity: float | None = None
    jitter: float = 0.0
    scale: float = 1.0
    normalize: bool = True
    groups: int = 1
    groups_taken: int = 1

    reads: ClassVar = ("bias",)

    def __post_init__(self) -> None:
        check_router(self)
        check.number("SigmoidTopK", "scale", self.scale, above=0)
        check.boolean("SigmoidTopK", "normalize", self.normalize)
        check_groups(self)

    def choose(self, seen: Seen) -> Choices:
        """The experts of the largest score plus bias, weighed by score.

        Their `probability` is a score's share of the sum of all scores, as in the paper's loss.
        """
        scores = jax.nn.sigmoid(seen.logits)
        biased = scores if seen.bias is None else scores + seen.bias.astype(jnp.float32)
        allowed = Groups(self.groups, self.groups_taken, 2).within(biased, self.choices, self)
        weight, expert = largest(allowed, self.choices, of=scores)
        if self.normalize:
            weight = weight / (weight.sum(-1, keepdims=True) + _TINY)
        probability = scores / (scores.sum(-1, keepdims=True) + _TINY)
        wanted = jnp.ones(weight.shape, bool)
        return Choices(expert, weight * self.scale, wanted, probability)

    def balance(self, seen: Seen, choices: Choices) -> jax.Array:
        """The paper's complementary loss: E times the sum of choices times probability.

        It is 1 if both are even. Choices are counted as scores alone would have them, without bias
        and groups, as the paper writes it. A group of tokens is the paper's sequence.
        """
        _, expert = largest(jax.nn.sigmoid(seen.logits), self.choices)
        _, every, probability = shares(seen, choices._replace(expert=expert))
        return every.shape[-1] * (every * probability).sum(-1)
