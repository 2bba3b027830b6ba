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


def largest(x: jax.Array, count: int, of: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """The largest numbers along the last dim and their indices, the first of equals first.

    With `of`, the numbers of that array which are where the largest of `x` are.

    This is `lax.top_k` without its sort: to sort thousands for a few of them takes a TPU's compiler
    longer than the whole remainder of the layer. Each turn finds one number and excludes it.
    """
    if of is None:
        of = x
    iota = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    values, indices = [], []
    # Numbers of -inf must stay above those that are excluded.
    remaining = jnp.maximum(lax.stop_gradient(x), jnp.finfo(x.dtype).min)
    for _ in range(count):
        index = remaining.argmax(-1, keepdims=True)
        is_largest = iota == index
        # A masked sum, whose gradient is a mask; a gather's would be a scatter.
        values.append(jnp.where(is_largest, of, 0).sum(-1))
        indices.append(index[..., 0])
        remaining = jnp.where(is_largest, -jnp.inf, remaining)
    return jnp.stack(values, -1), jnp.stack(indices, -1)


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
        best, _ = largest(by_group, min(self.best, size))
        _, group = largest(best.sum(-1), self.taken)
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
