"""Tokens to the places of experts and back, within each group: two forms with one result.

`Einsum` is GShard's: a mask of groups x tokens x experts x places, and two products with it.
`Scatter` sorts the choices and moves rows: no mask, so its memory does not grow with experts times
places beyond the tokens' own. Both give an expert its first choices before its second ones, and in
each rank the earlier tokens first; what finds no place is dropped.

Shape suffixes: G groups, S tokens of a group, E experts, K choices of a token, C places of an
expert, M width; P = K S, the choices of a group by rank, then by token; J = E C, all places of a
group.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from shardlib.experts._routing import Choices

Form: TypeAlias = Literal["scatter", "einsum"]
FORMS = get_args(Form)


class Einsum(NamedTuple):
    """GShard's masks."""

    dispatch_GSEC: jax.Array  # one where a token has that place
    combine_GSEC: jax.Array  # by what the expert's output is multiplied there
    kept_GSK: jax.Array  # which choices found a place

    def to_experts(self, x_GSM: jax.Array) -> jax.Array:
        """What is in each place: a token, or zeros. (G, E, C, M)."""
        return jnp.einsum("gsec,gsm->gecm", self.dispatch_GSEC.astype(x_GSM.dtype), x_GSM)

    def from_experts(self, y_GECM: jax.Array) -> jax.Array:
        """For each token the sum of what its experts made of it, by their weights. (G, S, M)."""
        return jnp.einsum("gsec,gecm->gsm", self.combine_GSEC.astype(y_GECM.dtype), y_GECM)


class Scatter(NamedTuple):
    """Where each choice goes, and where each place's token comes from."""

    place_GP: jax.Array  # J where a choice has none
    source_GJ: jax.Array  # the choice that has the place, P where none has
    weight_GP: jax.Array
    shape: tuple[int, int, int]  # tokens, experts, places
    kept_GSK: jax.Array

    def to_experts(self, x_GSM: jax.Array) -> jax.Array:
        """What is in each place: a token, or zeros. (G, E, C, M)."""
        tokens, experts, places = self.shape
        spread: Any = _spread(x_GSM, self.place_GP, self.source_GJ, tokens)
        return spread.reshape(x_GSM.shape[0], experts, places, x_GSM.shape[-1])

    def from_experts(self, y_GECM: jax.Array) -> jax.Array:
        """For each token the sum of what its experts made of it, by their weights. (G, S, M)."""
        y_GJM = y_GECM.reshape(y_GECM.shape[0], -1, y_GECM.shape[-1])
        weight_GJ = _take(self.weight_GP, self.source_GJ)
        return _collect(
            y_GJM * weight_GJ[..., None].astype(y_GJM.dtype),
            self.place_GP,
            self.source_GJ,
            self.shape[0],
        )


def dispatch(choices: Choices, experts: int, places: int, form: Form) -> Einsum | Scatter:
    """Give each choice of each group (G, S, K) a place of its expert, first come first served,
    while there are any.
    """
    (_, tokens, ranks) = choices.expert.shape
    # By rank, then by token: a first choice never yields to a second.
    expert_GP, weight_GP, wanted_GP = (
        part.swapaxes(1, 2).reshape(-1, ranks * tokens) for part in choices
    )
    # One beyond, where there is no end of places.
    expert_GP = jnp.where(wanted_GP, expert_GP, experts)
    if form == "einsum":
        onehot_GPE = jax.nn.one_hot(expert_GP, experts, dtype=jnp.int32)
        at_GP = ((jnp.cumsum(onehot_GPE, 1) - 1) * onehot_GPE).sum(-1)
    else:
        at_GP = jax.vmap(_in_order)(expert_GP)
    kept_GP = wanted_GP & (at_GP < places)
    kept_GSK = kept_GP.reshape(-1, ranks, tokens).swapaxes(1, 2)
    if form == "einsum":
        at_GSK = at_GP.reshape(-1, ranks, tokens).swapaxes(1, 2)
        of_expert = jax.nn.one_hot(choices.expert, experts) * kept_GSK[..., None]
        of_place = jax.nn.one_hot(at_GSK, places)
        dispatched = jnp.einsum("gske,gskc->gsec", of_expert, of_place)
        combined = jnp.einsum("gsk,gske,gskc->gsec", choices.weight, of_expert, of_place)
        return Einsum(jax.lax.stop_gradient(dispatched), combined, kept_GSK)
    place_GP = jnp.where(kept_GP, expert_GP * places + at_GP, experts * places)
    source_GJ = jax.vmap(lambda place: _inverse(place, experts * places))(place_GP)
    return Scatter(place_GP, source_GJ, weight_GP, (tokens, experts, places), kept_GSK)


def _in_order(expert_P: jax.Array) -> jax.Array:
    """How many earlier choices have the same expert, for each choice."""
    number_P = jnp.arange(expert_P.size, dtype=jnp.int32)
    order_P = jnp.argsort(expert_P, stable=True)
    sorted_P = expert_P[order_P]
    begins_P = jnp.concatenate([jnp.ones(1, bool), sorted_P[1:] != sorted_P[:-1]])
    # Of those with the same expert, in the sorted order.
    first_P = jax.lax.cummax(jnp.where(begins_P, number_P, 0))
    return jnp.zeros_like(number_P).at[order_P].set(number_P - first_P, unique_indices=True)


def _inverse(place_P: jax.Array, count: int) -> jax.Array:
    """Which choice has each of `count` places; their number where none has."""
    empty = jnp.full(count, place_P.size, jnp.int32)
    return empty.at[place_P].set(jnp.arange(place_P.size, dtype=jnp.int32), mode="drop")


def _take(x_GN: jax.Array, index_GJ: jax.Array) -> jax.Array:
    """`x[g, index[g, j]]`, zero where the index is beyond the end."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0))(x_GN, index_GJ)


# The two are each other's transpose, and each is a gather: said so, since JAX would make a scatter
# of each for the other.


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x_GSM: jax.Array, place_GP: jax.Array, source_GJ: jax.Array, tokens: int) -> jax.Array:
    """The token that has each place. (G, J, M)."""
    return _take(x_GSM, jnp.where(source_GJ < place_GP.shape[1], source_GJ % tokens, tokens))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _collect(y_GJM: jax.Array, place_GP: jax.Array, source_GJ: jax.Array, tokens: int) -> jax.Array:
    """The sum of what is in each token's places. (G, S, M)."""
    taken_GPM = _take(y_GJM, place_GP)
    return taken_GPM.reshape(taken_GPM.shape[0], -1, tokens, taken_GPM.shape[-1]).sum(1)


def _transposed(of: Any, transpose: Any) -> None:
    def forward(x: jax.Array, place_GP: jax.Array, source_GJ: jax.Array, tokens: int) -> tuple:
        return of(x, place_GP, source_GJ, tokens), (place_GP, source_GJ)

    def backward(tokens: int, where: tuple, gradient: jax.Array) -> tuple:
        return transpose(gradient, *where, tokens), None, None

    of.defvjp(forward, backward)


_transposed(_spread, _collect)
_transposed(_collect, _spread)
