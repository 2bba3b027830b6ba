"""A router without parameters: the expert of a token is a hash of its id."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp

from shardlib.checks import _arguments as check
from shardlib.experts._routing import Choices, Seen, check_router
from shardlib.experts._selection import largest
from shardlib.modeling._random import scrambled


@dataclass(frozen=True)
class Hash:
    """Hash layers (Roller et al., 2021): a hash of the token's id chooses its experts.

    The layer is given the ids, `moe(ids=...)`. The experts of a token are distinct and have equal
    weights. Logits are not used: the gate, which may be zeros, only gives the number of experts.

    - `choices`: how many experts a token goes to.
    - `capacity`: the capacity factor: how many times its even share of the choices an expert takes
      at most. None is no limit, which `dropless` needs.
    - `seed`: selects the hash; a whole number of 32 bits.

    >>> seen = Seen(jnp.zeros((3, 8)), ids=jnp.array([5, 9, 5]))
    >>> Hash().choose(seen).expert[:, 0].tolist()
    [7, 5, 7]
    """

    choices: int = 1
    capacity: float | None = 1.25
    seed: int = 0

    reads: ClassVar = ("ids",)

    def __post_init__(self) -> None:
        check_router(self)
        check.whole("Hash", "seed", self.seed, least=0, most=2**32 - 1)

    @property
    def jitter(self) -> float:
        """The gate sees what the layer is given."""
        return 0.0

    def choose(self, seen: Seen) -> Choices:
        """The experts whose hash with the token's id is largest, of equal weight."""
        if seen.ids is None:
            raise ValueError("`Hash` reads `ids`, the tokens' whole numbers: `moe(ids=...)`.")
        count = seen.logits.shape[-1]
        word = scrambled(seen.ids.astype(jnp.uint32) + scrambled(jnp.uint32(self.seed)))
        words = scrambled(word[..., None] + jnp.arange(count, dtype=jnp.uint32))
        # Of 32 bits so many are exact in float32.
        _, expert = largest((words >> jnp.uint32(8)).astype(jnp.float32), self.choices)
        weight = jnp.full(expert.shape, 1 / self.choices, jnp.float32)
        probability = jax.nn.one_hot(expert, count).sum(-2) / self.choices
        return Choices(expert, weight, jnp.ones(expert.shape, bool), probability)

    def balance(self, seen: Seen, choices: Choices) -> jax.Array:
        """Zero: nothing that is trained moves the load."""
        return jnp.zeros(seen.logits.shape[:-2], jnp.float32)
