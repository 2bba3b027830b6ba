"""The largest of each token's scores, among all experts or within some groups of them.

experts          0   1 | 2   3 | 4   5        three groups, of which a token takes two
scores          .1  .9 |.2  .3 |.5  .4
a group's best      .9 |    .3 |.5            those of groups 0 and 2 are the best
may be chosen   .1  .9 | -   - |.5  .4
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check

_MOST_UNROLLED = 2  # of the indices that `largest` finds


def largest(x: jax.Array, count: int, of: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The largest numbers along the last dim and their indices, the first of equals first.

    With `of`, the numbers of that array at the places of the largest of `x`.

    This is `lax.top_k` without its sort: a TPU's compiler takes longer for a sort of thousands of
    numbers than for the remainder of the layer.
    """
    index = _indices_of_largest(lax.stop_gradient(x), count)
    is_chosen = index[..., None] == lax.broadcasted_iota(jnp.int32, x.shape[-1:], 0)
    # A masked sum, whose gradient is a mask. The gradient of a gather would be a scatter.
    numbers = (x if of is None else of)[..., None, :]
    return jnp.where(is_chosen, numbers, 0).sum(-1), index


def _indices_of_largest(x: jax.Array, count: int) -> jax.Array:
    """The indices of the largest numbers along the last dim, the largest first."""
    iota = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)

    def find_one(remaining: jax.Array, _: Any = None) -> tuple[jax.Array, jax.Array]:
        index = remaining.argmax(-1).astype(jnp.int32)
        return jnp.where(iota == index[..., None], -jnp.inf, remaining), index

    # Numbers of -inf must stay above those that are excluded.
    remaining = jnp.maximum(x, jnp.finfo(x.dtype).min)
    if count > _MOST_UNROLLED:
        # Unrolled, the compiler would exclude all indices before it again for each one: the program
        # would grow with the square of their number.
        _, indices = lax.scan(find_one, remaining, None, length=count)
        return jnp.moveaxis(indices, 0, -1)
    found = []
    for _ in range(count):
        remaining, index = find_one(remaining)
        found.append(index)
    return jnp.stack(found, -1)


def _sum_of_largest(x: jax.Array, count: int) -> jax.Array:
    """The sum of the largest numbers along the last dim."""
    iota = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    total = x.max(-1)
    for _ in range(count - 1):
        x = jnp.where(iota == x.argmax(-1, keepdims=True), -jnp.inf, x)
        total += x.max(-1)
    return total


@dataclass(frozen=True)
class Groups:
    """Consecutive experts in `count` groups of equal size, of which a token takes the best `taken`.

    A group is as good as the sum of its `best` largest scores. With a group on each machine a token
    is sent to so many machines at most.
    """

    count: int
    taken: int
    best: int

    def within(self, scores: jax.Array, choices: int, router: Any) -> jax.Array:
        """Scores (..., E), with -inf for experts of groups that are not taken.

        Args:
            scores: by which groups are compared.
            choices: how many experts a token chooses.
            router: whose groups they are, for messages.
        """
        experts = scores.shape[-1]
        self._check(experts, choices, router)
        if self.taken == self.count:
            return scores
        size = experts // self.count
        shape = (*scores.shape[:-1], self.count, size)
        # Which groups are taken has no gradient.
        by_group = lax.stop_gradient(scores).reshape(shape)
        of_group = _sum_of_largest(by_group, min(self.best, size))
        group = _indices_of_largest(of_group, self.taken)
        is_taken = jax.nn.one_hot(group, self.count).sum(-2) > 0
        return jnp.where(jnp.repeat(is_taken, size, -1), scores, -jnp.inf)

    def _check(self, experts: int, choices: int, router: Any) -> None:
        """Refuse groups of unequal size, and those that have too few experts for a token."""
        if experts % self.count:
            raise ValueError(
                f"{router} has {self.count} groups of experts, and there are {experts}: groups are "
                f"of equal size. Choose `groups` that divides {experts}."
            )
        within = experts // self.count * self.taken
        if choices > within:
            raise ValueError(
                f"{router} sends each token to {choices} experts of {self.taken} groups, which "
                f"have {within} of {experts} experts: choose fewer, or take more groups."
            )


def check_groups(router: Any) -> None:
    """Refuse numbers of groups that make no sense for any number of experts."""
    kind = type(router).__name__
    groups = check.whole(kind, "groups", router.groups, "a number of groups", least=1)
    takes = "how many groups a token takes (of none it could take no expert)"
    taken = check.whole(kind, "groups_taken", router.groups_taken, takes, least=1, most=groups)
    check.assign(router, groups=groups, groups_taken=taken)
