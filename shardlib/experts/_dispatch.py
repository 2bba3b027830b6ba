"""Tokens to the places of experts and back, within each group: two forms with one result.

    tokens of a group     0   1   2   3          each expert has C places in each group
    their first choices   B   A   B   B
    places, with C = 2    A: 1, -    B: 0, 2     the choice of token 3 found no place

`Einsum` is GShard's: masks of groups x tokens x experts x places, and a product with one of them
each way. `Scatter` sorts the choices and moves rows, so its memory is that of the tokens and of the
places, without masks. Both give places to first choices before second ones, and in each rank to
earlier tokens first; a choice that finds no place is dropped. Tokens that experts chose have their
places already, see `dispatch_taken`.

Shape suffixes: G groups, S tokens of a group, E experts, K choices of a token, C places of an
expert, M width; P = K S, the choices of a group by rank, then by token; J = E C, all places of a
group.
"""

from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp

from shardlib.experts._routing import Choices, Taken
from shardlib.experts._row_moves import collect, gather_rows, spread

Form: TypeAlias = Literal["scatter", "einsum"]
"""How `moe` gives tokens places of experts: `"scatter"` sorts them and moves rows, `"einsum"` takes
GShard's products with masks.
"""
FORMS = get_args(Form)


class Einsum(NamedTuple):
    """Dispatch by GShard's masks: products with them move tokens to places and back.

    Masks are tokens times experts times places of each group, so that this form suits few
    experts.
    """

    dispatch_GSEC: jax.Array  # one where a token has that place
    combine_GSEC: jax.Array  # by what the expert's output is multiplied there
    kept_GSK: jax.Array  # which choices found a place

    def to_experts(self, x_GSM: jax.Array) -> jax.Array:
        """The token in each place (G, E, C, M), or zeros where a place is empty."""
        return jnp.einsum("gsec,gsm->gecm", self.dispatch_GSEC.astype(x_GSM.dtype), x_GSM)

    def from_experts(self, y_GECM: jax.Array) -> jax.Array:
        """For each token the weighted sum of its experts' outputs, (G, S, M)."""
        return jnp.einsum("gsec,gecm->gsm", self.combine_GSEC.astype(y_GECM.dtype), y_GECM)


class Scatter(NamedTuple):
    """Dispatch by indices: where each choice goes, and where each place's token comes from.

    The two index arrays are each other's inverse, so that both ways are gathers.
    """

    place_GP: jax.Array  # J where a choice has none
    source_GJ: jax.Array  # the choice that has the place, P where none has
    weight_GP: jax.Array
    shape: tuple[int, int, int]  # tokens, experts, places
    kept_GSK: jax.Array

    def to_experts(self, x_GSM: jax.Array) -> jax.Array:
        """The token in each place (G, E, C, M), or zeros where a place is empty."""
        tokens, experts, places = self.shape
        x_GJM: Any = spread(x_GSM, self.place_GP, self.source_GJ, tokens)
        return x_GJM.reshape(x_GSM.shape[0], experts, places, x_GSM.shape[-1])

    def from_experts(self, y_GECM: jax.Array) -> jax.Array:
        """For each token the weighted sum of its experts' outputs, (G, S, M)."""
        y_GJM = y_GECM.reshape(y_GECM.shape[0], -1, y_GECM.shape[-1])
        weight_GJ = gather_rows(self.weight_GP, self.source_GJ)
        return collect(
            y_GJM * weight_GJ[..., None].astype(y_GJM.dtype),
            self.place_GP,
            self.source_GJ,
            self.shape[0],
        )


class Gather(NamedTuple):
    """Dispatch of tokens that experts chose: each place has the index of its token.

    A token has any number of places. So outputs are added to their tokens, which is a scatter.
    """

    token_GJ: jax.Array  # S where a place is empty
    weight_GJ: jax.Array
    shape: tuple[int, int, int]  # tokens, experts, places

    def to_experts(self, x_GSM: jax.Array) -> jax.Array:
        """The token in each place (G, E, C, M), or zeros where a place is empty."""
        _, experts, places = self.shape
        x_GJM = gather_rows(x_GSM, self.token_GJ)
        return x_GJM.reshape(x_GSM.shape[0], experts, places, x_GSM.shape[-1])

    def from_experts(self, y_GECM: jax.Array) -> jax.Array:
        """For each token the weighted sum of its experts' outputs, (G, S, M)."""
        y_GJM = y_GECM.reshape(y_GECM.shape[0], -1, y_GECM.shape[-1])
        y_GJM = y_GJM * self.weight_GJ[..., None].astype(y_GJM.dtype)

        def add(token_J: jax.Array, y_JM: jax.Array) -> jax.Array:
            # Empty places have an index beyond the end, and are dropped.
            sums = jnp.zeros((self.shape[0], y_JM.shape[-1]), y_JM.dtype)
            return sums.at[token_J].add(y_JM, mode="drop")

        return jax.vmap(add)(self.token_GJ, y_GJM)


Dispatch: TypeAlias = Einsum | Scatter | Gather
"""Places of tokens, in one of the forms."""


def dispatch_taken(taken: Taken, tokens: int, form: Form) -> Einsum | Gather:
    """The places of experts that chose their tokens, (G, E, C), of groups of so many tokens."""
    groups, experts, places = taken.token.shape
    if form == "einsum":
        one_hot_GECS = jax.nn.one_hot(taken.token, tokens) * taken.wanted[..., None]
        dispatched = jnp.moveaxis(one_hot_GECS, -1, 1)
        # Not a product, by which a weight of nan would reach other tokens.
        weight_GECS = jnp.where(one_hot_GECS > 0, taken.weight[..., None], 0)
        combined = jnp.moveaxis(weight_GECS, -1, 1)
        return Einsum(dispatched, combined, dispatched.sum(-1) > 0)
    token_GEC = jnp.where(taken.wanted, taken.token, tokens)
    flat = (groups, experts * places)
    shape = (tokens, experts, places)
    return Gather(token_GEC.reshape(flat), taken.weight.reshape(flat), shape)


def dispatch(choices: Choices, experts: int, places: int, form: Form) -> Einsum | Scatter:
    """Give the choices of each group places of their experts, first come, first served.

    `choices` are (G, S, K). All first choices come before all second ones, and among those of one
    rank the earlier tokens come first. An expert has so many `places` in each group; choices that
    find none are dropped, and so are those that are not wanted.
    """
    _, tokens, ranks = choices.expert.shape
    # By rank, then by token: a first choice never yields to a second.
    expert_GP, weight_GP, wanted_GP = (
        part.swapaxes(1, 2).reshape(-1, ranks * tokens) for part in choices[:3]
    )
    # Choices that are not wanted get the index after the last expert, and take no other's place.
    expert_GP = jnp.where(wanted_GP, expert_GP, experts)
    position_GP = _positions(expert_GP, experts, form)
    kept_GP = wanted_GP & (position_GP < places)
    kept_GSK = kept_GP.reshape(-1, ranks, tokens).swapaxes(1, 2)
    if form == "einsum":
        position_GSK = position_GP.reshape(-1, ranks, tokens).swapaxes(1, 2)
        return _masks(choices, position_GSK, kept_GSK, experts, places)
    # Places are numbered expert by expert; the number after the last stands for none.
    place_GP = jnp.where(kept_GP, expert_GP * places + position_GP, experts * places)
    source_GJ = jax.vmap(lambda place: _inverse(place, experts * places))(place_GP)
    return Scatter(place_GP, source_GJ, weight_GP, (tokens, experts, places), kept_GSK)


def _masks(
    choices: Choices, position_GSK: jax.Array, kept_GSK: jax.Array, experts: int, places: int
) -> Einsum:
    """GShard's masks for choices that have these positions at their experts, where they are kept.

    Each mask is a product of two one-hot vectors for each choice, that of its expert and that of
    its place, summed over the choices of a token.
    """
    expert_GSKE = jax.nn.one_hot(choices.expert, experts) * kept_GSK[..., None]
    place_GSKC = jax.nn.one_hot(position_GSK, places)
    dispatched = jnp.einsum("gske,gskc->gsec", expert_GSKE, place_GSKC)
    combined = jnp.einsum("gsk,gske,gskc->gsec", choices.weight, expert_GSKE, place_GSKC)
    # Where tokens go has no gradient; with what weight they come back has one.
    return Einsum(jax.lax.stop_gradient(dispatched), combined, kept_GSK)


def _positions(expert_GP: jax.Array, experts: int, form: Form) -> jax.Array:
    """How many earlier choices of its group have the same expert, for each choice.

    GShard's form counts in a mask of choices times experts, the other one sorts.
    """
    if form == "einsum":
        onehot_GPE = jax.nn.one_hot(expert_GP, experts, dtype=jnp.int32)
        return ((jnp.cumsum(onehot_GPE, 1) - 1) * onehot_GPE).sum(-1)
    return jax.vmap(_in_order)(expert_GP)


def _in_order(expert_P: jax.Array) -> jax.Array:
    """How many earlier choices have the same expert, for each choice of one group.

    A stable sort brings the choices of an expert together, in their order: a choice's position is
    its distance from the first of them.
    """
    number_P = jnp.arange(expert_P.size, dtype=jnp.int32)
    order_P = jnp.argsort(expert_P, stable=True)
    sorted_P = expert_P[order_P]
    begins_P = jnp.concatenate([jnp.ones(1, bool), sorted_P[1:] != sorted_P[:-1]])
    # The sorted index of the first choice with the same expert.
    first_P = jax.lax.cummax(jnp.where(begins_P, number_P, 0))
    return jnp.zeros_like(number_P).at[order_P].set(number_P - first_P, unique_indices=True)


def _inverse(place_P: jax.Array, count: int) -> jax.Array:
    """Which choice has each of `count` places of one group.

    Where none has, it is the number of choices, which is beyond the end of them. Choices without a
    place have one beyond the end of places, and are dropped here.
    """
    empty = jnp.full(count, place_P.size, jnp.int32)
    return empty.at[place_P].set(jnp.arange(place_P.size, dtype=jnp.int32), mode="drop")
