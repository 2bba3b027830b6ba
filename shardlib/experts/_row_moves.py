"""Move rows of tokens to places and back, by a gather each way.

Shape suffixes: G groups, S tokens of a group, K choices of a token, M width; P = K S, the choices
of a group by rank, then by token; J places of a group, N rows.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp


def gather_rows(x_GN: jax.Array, index_GJ: jax.Array) -> jax.Array:
    """`x[g, index[g, j]]` for all g and j, zero where the index is beyond the end."""
    return jax.vmap(lambda x, index: x.at[index].get(mode="fill", fill_value=0))(x_GN, index_GJ)


# `spread` and `collect` are each other's transpose, and each is a gather. Their gradients are
# defined as each other, since JAX would transpose a gather to a scatter, which is slower.


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def spread(x_GSM: jax.Array, place_GP: jax.Array, source_GJ: jax.Array, tokens: int) -> jax.Array:
    """The row of the token that has each place, (G, J, M), or zeros where a place is empty.

    Choices are ordered by rank first, so a choice's index modulo `tokens` is its token.
    """
    return gather_rows(x_GSM, jnp.where(source_GJ < place_GP.shape[1], source_GJ % tokens, tokens))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def collect(y_GJM: jax.Array, place_GP: jax.Array, source_GJ: jax.Array, tokens: int) -> jax.Array:
    """The sum of what is in each token's places, (G, S, M)."""
    rows_GPM = gather_rows(y_GJM, place_GP)
    return rows_GPM.reshape(rows_GPM.shape[0], -1, tokens, rows_GPM.shape[-1]).sum(1)


def _define_transpose(function: Any, transpose: Any) -> None:
    """Define the gradient of `spread` or `collect` as the other one; indices have none."""

    def forward(x: jax.Array, place_GP: jax.Array, source_GJ: jax.Array, tokens: int) -> tuple:
        return function(x, place_GP, source_GJ, tokens), (place_GP, source_GJ)

    def backward(tokens: int, indices: tuple, gradient: jax.Array) -> tuple:
        return transpose(gradient, *indices, tokens), None, None

    function.defvjp(forward, backward)


_define_transpose(spread, collect)
_define_transpose(collect, spread)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def collect_weighed(
    y_JM: jax.Array, weight_P: jax.Array, place_P: jax.Array, source_J: jax.Array, tokens: int
) -> jax.Array:
    """The sum of what is in each token's places, times the weights of its choices, (S, M).

    It is for one group. Rows are multiplied by weights as they are gathered, and not written to
    memory once more.
    """
    rows_PM = gather_rows(y_JM[None], place_P[None])[0]
    weighed_PM = rows_PM * weight_P[:, None].astype(y_JM.dtype)
    return weighed_PM.reshape(-1, tokens, y_JM.shape[-1]).sum(0)


def _weighed_forward(
    y_JM: jax.Array, weight_P: jax.Array, place_P: jax.Array, source_J: jax.Array, tokens: int
) -> tuple[Any, tuple]:
    arrays = y_JM, weight_P, place_P, source_J
    return collect_weighed(*arrays, tokens), arrays


def _weighed_backward(tokens: int, saved: tuple, gradient_SM: jax.Array) -> tuple:
    """The gradients to rows and to weights, both computed row by row."""
    y_JM, weight_P, place_P, source_J = saved
    spread_GJM: Any = spread(gradient_SM[None], place_P[None], source_J[None], tokens)
    gradient_JM = spread_GJM[0]
    weight_J = gather_rows(weight_P[None], source_J[None])[0]
    of_weight_J = (gradient_JM * y_JM).astype(jnp.float32).sum(-1)
    of_weight_P = gather_rows(of_weight_J[None], place_P[None])[0]
    of_y_JM = gradient_JM * weight_J[:, None].astype(y_JM.dtype)
    return of_y_JM, of_weight_P.astype(weight_P.dtype), None, None


collect_weighed.defvjp(_weighed_forward, _weighed_backward)
