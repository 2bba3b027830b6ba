"""Tokens to the places of experts and back, within each group: two forms with one result.

    tokens of a group     0   1   2   3          each expert has C places in each group
    their first choices   B   A   B   B
    places, with C = 2    A: 1, -    B: 0, 2     the choice of token 3 found no place

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
        spread: Any = _spread(x_GSM, self.place_GP, self.source_GJ, tokens)
        return spread.reshape(x_GSM.shape[0], experts, places, x_GSM.shape[-1])

    def from_experts(self, y_GECM: jax.Array) -> jax.Array:
        """For each token the weighted sum of its experts' outputs, (G, S, M)."""
        y_GJM = y_GECM.reshape(y_GECM.shape[0], -1, y_GECM.shape[-1])
        weight_GJ = _gather_rows(self.weight_GP, self.source_GJ)
        return _collect(
            y_GJM * weight_GJ[..., None].astype(y_GJM.dtype),
            self.place_GP,
            self.source_GJ,
            self.shape[0],
        )


def dispatch(choices: Choices, experts: int, places: int, form: Form) -> Einsum | Scatter:
    """Give the choices of each group places of their experts, first come, first served.

    `choices` are (G, S, K). All first choices come before all second ones, and among those of one
    rank the earlier tokens come first. An expert has so many `places` in each group; choices that
    find none are dropped, and so are those that are not wanted.
    """
    _, tokens, ranks = choices.expert.shape
    # By rank, then by token: a first choice never yields to a second.
    expert_GP, weight_GP, wanted_GP = (
        part.swapaxes(1, 2).reshape(-1, ranks * tokens) for part in choices
    )
    # What is not wanted goes to one expert more than there are, and takes nobody's place.
    expert_GP = jnp.where(wanted_GP, expert_GP, experts)
    position_GP = _positions(expert_GP, experts, form)
    kept_GP = wanted_GP & (position_GP < places)
    kept_GSK = kept_GP.reshape(-1, ranks, tokens).swapaxes(1, 2)
    if form == "einsum":
        position_GSK = position_GP.reshape(-1, ranks, tokens).swapaxes(1, 2)
        return _masks(choices, position_GSK, kept_GSK, experts, places)
    # Places are numbered expert by expert; one number more than there are stands for none.
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


def _gather_rows(x_GN: jax.Array, index_GJ: jax.Array) -> jax.Array:
    """`x[g, index[g, j]]` for all g and j, zero where the index is beyond the end."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0))(x_GN, index_GJ)


# `_spread` and `_collect` are each other's transpose, and each is a gather. Their gradients are
# defined as each other, since JAX would transpose a gather to a scatter, which is slower.


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x_GSM: jax.Array, place_GP: jax.Array, source_GJ: jax.Array, tokens: int) -> jax.Array:
    """The token that has each place, (G, J, M), or zeros where a place is empty.

    A choice's index modulo the tokens is its token, as choices are ordered by rank first.
    """
    return _gather_rows(x_GSM, jnp.where(source_GJ < place_GP.shape[1], source_GJ % tokens, tokens))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _collect(y_GJM: jax.Array, place_GP: jax.Array, source_GJ: jax.Array, tokens: int) -> jax.Array:
    """The sum of what is in each token's places, (G, S, M)."""
    rows_GPM = _gather_rows(y_GJM, place_GP)
    return rows_GPM.reshape(rows_GPM.shape[0], -1, tokens, rows_GPM.shape[-1]).sum(1)


def _define_transpose(function: Any, transpose: Any) -> None:
    """Define the gradient of `_spread` or `_collect` as the other one; indices have none."""

    def forward(x: jax.Array, place_GP: jax.Array, source_GJ: jax.Array, tokens: int) -> tuple:
        return function(x, place_GP, source_GJ, tokens), (place_GP, source_GJ)

    def backward(tokens: int, indices: tuple, gradient: jax.Array) -> tuple:
        return transpose(gradient, *indices, tokens), None, None

    function.defvjp(forward, backward)


_define_transpose(_spread, _collect)
_define_transpose(_collect, _spread)
