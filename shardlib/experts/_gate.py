"""The product of tokens and a gate, which makes the logits of a router, in full float32.

Shape suffixes: M width, E experts, C columns at a time, P parts of so many columns.
"""

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._shards import varying_alike

# Experts whose logits are made at a time.
_COLUMNS = 256


def logits(x: jax.Array, gate_ME: jax.Array) -> jax.Array:
    """The product `x @ gate` in full float32; a TPU would round the factors to bfloat16.

    It takes some columns at a time: for a product with thousands of them the TPU's compiler makes
    several times the code, in several times the seconds, for each layer that is compiled. The
    gradient is defined, so that JAX does not differentiate the loop.
    """
    # Tokens differ between devices, and the gate does not.
    return _logits(*varying_alike(x, gate_ME))


@jax.custom_vjp
def _logits(x: jax.Array, gate_ME: jax.Array) -> jax.Array:
    """The product, of factors that vary over the same axes."""
    parts_PMC = _split_columns(gate_ME)
    parts = lax.map(lambda gate_MC: _product("...m,mc->...c", x, gate_MC), parts_PMC)
    return jnp.moveaxis(parts, 0, -2).reshape(*x.shape[:-1], gate_ME.shape[1])


def _backwards(
    saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of `_logits` to both factors, from the same columns at a time."""
    x, gate_ME = saved

    def add_columns(
        of_x: jax.Array, part: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        gate_MC, of_part = part
        of_x = of_x + _product("...c,mc->...m", of_part, gate_MC)
        return of_x, _product("...m,...c->mc", x, of_part)

    columns = _split_columns(gate_ME).shape[-1]
    # The gradient is split as the gate is.
    of_parts = jnp.moveaxis(gradient.reshape(*x.shape[:-1], -1, columns), -2, 0)
    of_x, of_gate_PMC = lax.scan(
        add_columns, jnp.zeros_like(x), (_split_columns(gate_ME), of_parts)
    )
    return of_x, of_gate_PMC.swapaxes(0, 1).reshape(gate_ME.shape)


_logits.defvjp(lambda x, gate_ME: (_logits(x, gate_ME), (x, gate_ME)), _backwards)


def _product(dims: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(dims, x, y, precision="highest")


def _split_columns(gate_ME: jax.Array) -> jax.Array:
    """The gate as (parts, width, columns): whole if its columns are no multiple of the limit."""
    width, count = gate_ME.shape
    columns = count if count % _COLUMNS else _COLUMNS
    return gate_ME.reshape(width, -1, columns).swapaxes(0, 1)
