"""Grouped products by `jax.lax.ragged_dot`.

For CPUs and GPUs it is compiled to dense products of all rows with all matrices. Rows of no group
are zeros in the result. They are masked here, since backends differ in what they leave there.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._grouped_matmul._places import only_grouped

# The gradient to the matrices: rows are what is summed over, group by group.
_BY_GROUP = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def forward(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """The product of each row with the matrix of its group.

    Args:
        x: (rows, features).
        w: (groups, features, columns).
        sizes: (groups,), how many rows each group has, one group after the other.
    """
    y = lax.ragged_dot(x, w, sizes, preferred_element_type=wide(x))
    return only_grouped(y.astype(x.dtype), sizes)


def backward(
    x: jax.Array, w: jax.Array, sizes: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients to the rows and to the matrices."""
    of_x = lax.ragged_dot(gradient, w.mT, sizes, preferred_element_type=wide(x))
    # This sum runs over all rows. Those of no group may hold anything, in both operands.
    x, gradient = only_grouped(x, sizes), only_grouped(gradient, sizes)
    of_w: Any = lax.ragged_dot_general(
        x, gradient, sizes, _BY_GROUP, preferred_element_type=wide(x)
    )
    return only_grouped(of_x.astype(x.dtype), sizes), of_w.astype(w.dtype)


def wide(x: jax.Array) -> Any:
    """The dtype in which products of an array are summed: float32 at least."""
    return jnp.promote_types(x.dtype, jnp.float32)
