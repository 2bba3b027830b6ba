"""Rows looked up in a table of weights, whose gradients are added up in float32.

Many tokens look up the same row of an embedding, and the gradient of the row is the sum over all of
them. In the dtype of the table, of 16 bits, that sum stands still as soon as it is some hundred
times as large as what is added to it. So a traced function is evaluated with its lookups replaced:
forward as they were, backward a sum in float32, rounded once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.tracing._jaxpr import CALLS, evaluate, scan_parts, shapes_of, variables


def with_wide_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(params, *others)` with wide sums for the gradients of rows that it looks up.

    That goes for tables that are `params` or made of nothing else; the gradient of each of their
    rows is summed in float32 and rounded once. Values stay the same.

    >>> tokens, table = jnp.zeros(1024, "int32"), jnp.zeros((1, 1), "bfloat16")
    >>> total = lambda table: jnp.sum(table[tokens])
    >>> jax.grad(total)(table).item(), jax.grad(with_wide_rows(total))(table).item()
    (256.0, 1024.0)
    """

    def evaluated(params: Any, *others: Any) -> Any:
        traced, out = jax.make_jaxpr(function, return_shape=True)(params, *others)
        from_weights = [True] * len(jax.tree.leaves(params))
        from_weights += [False] * len(jax.tree.leaves(others))
        widened = _widened(traced.jaxpr, from_weights)
        return evaluate(ClosedJaxpr(widened, traced.consts), out, (params, others))

    return evaluated


def _widened(jaxpr: Jaxpr, from_weights: Sequence[bool]) -> Jaxpr:
    """A jaxpr with wide lookups in tables that are made of weights only.

    `from_weights` says of which inputs that is true. A table that is scaled by a number
    counts too, but not one that depends on anything else.
    """
    known = set()
    for variable, is_from_weights in zip(jaxpr.invars, from_weights, strict=True):
        if is_from_weights:
            known.add(variable)
    equations = []
    for equation in jaxpr.eqns:
        read = [not isinstance(atom, Literal) and atom in known for atom in equation.invars]
        if not any(read):
            equations.append(equation)
            continue
        equations.append(_widened_equation(equation, read))
        # What is made of tables and of anything else is no table of weights.
        if known.issuperset(variables(equation.invars)):
            known.update(equation.outvars)
    return jaxpr.replace(eqns=equations)


def _widened_equation(equation: Any, read: list[bool]) -> Any:
    """An equation that reads weights, as a wide lookup or with wide lookups inside.

    `read` says which of its operands are made of weights only.
    """
    name, params = equation.primitive.name, equation.params
    if name == "gather" and read[0] and _is_narrow(equation.invars[0].aval.dtype):
        return _wide_gather(equation)
    if name == "scan":
        read = _without_carry(equation, read)
    if name in (*CALLS, "scan"):
        return equation.replace(params={**params, "jaxpr": _inside(params["jaxpr"], read)})
    if name == "cond":  # whose first operand says which branch it is
        branches = tuple(_inside(branch, read[1:]) for branch in params["branches"])
        return equation.replace(params={**params, "branches": branches})
    return equation


def _without_carry(equation: Any, read: list[bool]) -> list[bool]:
    """The same flags for the operands of a `scan`, false for what it carries.

    What is carried is something else from the second iteration on.
    """
    constants, carries = scan_parts(equation)
    flags = list(read)
    for position in range(constants, constants + carries):
        flags[position] = False
    return flags


def _inside(inner: Any, read: list[bool]) -> Any:
    """A function that an equation holds, closed or open, with wide lookups."""
    if isinstance(inner, ClosedJaxpr):
        return ClosedJaxpr(_widened(inner.jaxpr, read), inner.consts)
    return _widened(inner, read)


def _is_narrow(dtype: Any) -> bool:
    """Whether a dtype has fewer bits than a sum over many rows needs."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _wide_gather(equation: Any) -> Any:
    """A lookup whose backward pass sums over all that look up the same row in float32.

    It is one equation again, a `custom_vjp` call with the operands and the line of the first one.
    """
    table, indices = shapes_of(equation.invars)

    def take(table: jax.Array, indices: jax.Array) -> jax.Array:
        return equation.primitive.bind(table, indices, **equation.params)

    (call,) = jax.make_jaxpr(wide(take, table))(table, indices).jaxpr.eqns
    return call.replace(
        invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info
    )


def wide(
    take: Callable[[jax.Array, jax.Array], jax.Array], table: Any
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`take(table, indices)` with a gradient that is summed in float32.

    `table` has the shape and the dtype of the tables that it is called with. The gradient is
    rounded to that dtype after the sum. For a table of 32 bits or more `take` is returned.
    """
    if not _is_narrow(table.dtype):
        return take

    def forwards(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        return take(table, indices), indices

    def backwards(indices: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
        # A lookup is linear in its table, so its transpose is the gradient, in any dtype.
        in_float32 = jax.ShapeDtypeStruct(table.shape, jnp.float32)
        transposed = jax.linear_transpose(lambda table: take(table, indices), in_float32)
        (sums,) = transposed(gradient.astype(jnp.float32))
        return sums.astype(table.dtype), None

    lookup = jax.custom_vjp(take)
    lookup.defvjp(forwards, backwards)
    return lookup
