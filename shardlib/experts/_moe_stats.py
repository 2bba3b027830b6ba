"""What a layer of experts tells of itself: losses of the router, and how loaded its experts are.

Shape suffixes: G groups, S tokens of a group, E experts, K choices of a token.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.experts._choose import finite_logits, without_gradient
from shardlib.experts._routing import Choices, Router, Seen, Taken, probability_of, z_loss
from shardlib.modeling._batch import WeightedMean


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEStats:
    """Statistics of a layer of experts: sums over local tokens, with what to divide them by.

    - `balance`: the router's load-balancing (auxiliary) loss, a mean over groups.
    - `z`: the router's z-loss, the squared log-sum-exp of a token's logits; a mean over tokens.
    - `load`: for each expert, how many choices it has over the mean of all experts: 1 is an even
      load.
    - `dropped`: the share of wanted choices that found no place; where experts choose, the share of
      tokens that none takes.
    - `entropy`: of a token's probabilities over the experts, in nats: the softmax of its logits, or
      what its router says, as sigmoids divided by their sum.
    - `nonfinite`: the share of tokens whose logits are not all finite.
    - `rounds`: in how many rounds tokens were sent to their experts; one where some may be dropped.
    - `sent_within`: bytes that go to experts on other devices of the same node and back, a mean
      over tokens. The backward pass sends as many again. None for `moe`, which sends all places,
      taken or not.
    - `sent_across`: the same of bytes that go to other nodes, over the slow network; None where
      there is none.
    """

    balance: WeightedMean
    z: WeightedMean
    load: WeightedMean
    dropped: WeightedMean
    entropy: WeightedMean
    nonfinite: WeightedMean
    rounds: WeightedMean
    sent_within: WeightedMean | None = None
    sent_across: WeightedMean | None = None

    @property
    def metrics(self) -> dict[str, WeightedMean]:
        """The statistics worth watching, for a loss to return as metrics.

        They are the same on every mesh. Statistics that depend on the mesh are in `sending`.
        """
        return {
            "balance": self.balance,
            "load": self.load,
            "dropped": self.dropped,
            "entropy": self.entropy,
            "nonfinite": self.nonfinite,
        }

    @property
    def sending(self) -> dict[str, WeightedMean]:
        """How much `dropless` sent, and in how many rounds, for a loss to return as metrics.

        It depends on the mesh: `rounds`, `sent_within` and, over a slow network, `sent_across`.
        """
        if self.sent_within is None:
            return {}
        found = {"rounds": self.rounds, "sent_within": self.sent_within}
        if self.sent_across is not None:
            found["sent_across"] = self.sent_across
        return found


class Trips(NamedTuple):
    """How tokens got to their experts and back.

    - `rounds`: how many rounds there were.
    - `within`, `across`: bytes to other devices of the node and to other nodes, and back; None for
      the latter where there is one node.
    """

    rounds: jax.Array
    within: jax.Array
    across: jax.Array | None


class Load(NamedTuple):
    """How loaded experts are, over all groups: whole numbers, in float32."""

    by_expert: jax.Array  # (E,), the choices of each
    wanted: jax.Array  # all of them
    dropped: jax.Array  # those that came to nothing, see `MoEStats`
    of: jax.Array  # of how many


def load_of_choices(seen: Seen, choices: Choices, kept_GSK: jax.Array) -> Load:
    """The load by what tokens choose, of which `kept_GSK` found a place."""
    count = seen.logits.shape[-1]
    wanted = (choices.wanted * 1.0).sum()
    by_expert = (jax.nn.one_hot(choices.expert, count) * choices.wanted[..., None]).sum((0, 1, 2))
    return Load(by_expert, wanted, (choices.wanted & ~kept_GSK).sum() * 1.0, wanted)


def load_of_taken(seen: Seen, taken: Taken) -> Load:
    """The load by what experts take. Dropped are tokens that none takes."""
    by_expert = (taken.wanted * 1.0).sum((0, 2))

    def add(token: jax.Array, wanted: jax.Array) -> jax.Array:
        # How many experts each token of a group has.
        return jnp.zeros(seen.logits.shape[1]).at[token].add(wanted * 1.0)

    experts_GS = jax.vmap(add)(taken.token, taken.wanted)
    alone = ((experts_GS == 0) * seen.counts).sum()
    return Load(by_expert, by_expert.sum(), alone, seen.counts.sum())


def stats_of(
    router: Router,
    seen: Seen,
    choices: Choices | None,
    load: Load,
    trips: Trips | None = None,
) -> MoEStats:
    """The statistics of a layer; padding counts for nothing in any of them.

    Each is a sum with what to divide it by, so that means over devices and microbatches are
    exact.

    Args:
        router: has the loss of uneven load.
        seen: what it saw, by group.
        choices: what it wants; None where experts choose, whose load is even.
        load: how loaded experts are.
        trips: how tokens got to their experts; None where all places are sent in one round.
    """
    each_GS = seen.counts
    balance = jnp.zeros(())
    if choices is not None:
        balance = router.balance(without_gradient(seen), choices).sum()
    rounds, within, across = jnp.float32(1), None, None
    if trips is not None:
        rounds = trips.rounds * 1.0
        within = WeightedMean(trips.within, each_GS.sum())
    if trips is not None and trips.across is not None:
        across = WeightedMean(trips.across, each_GS.sum())
    return MoEStats(
        WeightedMean(balance, (each_GS.sum(1) > 0).sum() * 1.0),
        WeightedMean((z_loss(seen.logits) * each_GS).sum(), each_GS.sum()),
        WeightedMean(load.by_expert * seen.logits.shape[-1], load.wanted),
        WeightedMean(load.dropped, load.of),
        WeightedMean((_entropy(seen, choices) * each_GS).sum(), each_GS.sum()),
        WeightedMean((~finite_logits(seen) * each_GS).sum(), each_GS.sum()),
        WeightedMean(rounds, jnp.float32(1)),
        within,
        across,
    )


def _entropy(seen: Seen, choices: Choices | None) -> jax.Array:
    """The entropy of each token's probabilities, in nats, which takes no part in gradients."""
    probability_GSE = lax.stop_gradient(probability_of(seen, choices))
    # The limit of p log p at zero is zero, which the product is not.
    positive_GSE = probability_GSE > 0
    logarithm_GSE = jnp.log(jnp.where(positive_GSE, probability_GSE, 1))
    return -jnp.where(positive_GSE, probability_GSE * logarithm_GSE, 0).sum(-1)
