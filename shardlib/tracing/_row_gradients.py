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

from shardlib.tracing._jaxpr import CALLS, evaluate, scan_parts


def with_wide_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same `function(params, *others)`; what it looks up in tables made of `params` alone has
    gradients summed in float32.

    >>> tokens, table = jnp.zeros(1024, "int32"), jnp.zeros((1, 1), "bfloat16")
    >>> total = lambda table: jnp.sum(table[tokens])
    >>> jax.grad(total)(table).item(), jax.grad(with_wide_rows(total))(table).item()
    (256.0, 1024.0)
    """

    def evaluated(params: Any, *others: Any) -> Any:
        traced, out = jax.make_jaxpr(function, return_shape=True)(params, *others)
        leaves, rest = jax.tree.leaves(params), jax.tree.leaves(others)
        widened = _widened(traced.jaxpr, [True] * len(leaves) + [False] * len(rest))
        return evaluate(ClosedJaxpr(widened, traced.consts), out, (params, others))

    return evaluated


def _widened(jaxpr: Jaxpr, from_weights: Sequence[bool]) -> Jaxpr:
    """The same, of whose inputs some are made of weights alone, with wide lookups in what is made
    of these.
    """
    known = {var for var, of_weights in zip(jaxpr.invars, from_weights, strict=True) if of_weights}
    equations = []
    for equation in jaxpr.eqns:
        read = [not isinstance(atom, Literal) and atom in known for atom in equation.invars]
        if any(read):
            equations.append(_widened_equation(equation, read))
        else:
            equations.append(equation)
        if any(read) and all(
            isinstance(atom, Literal) or atom in known for atom in equation.invars
        ):
            known.update(equation.outvars)
    return jaxpr.replace(eqns=equations)


def _widened_equation(equation: Any, read: list[bool]) -> Any:
    name, params = equation.primitive.name, equation.params
    if name == "gather" and read[0] and _is_narrow(equation.invars[0].aval.dtype):
        return _wide_gather(equation)
    if name == "scan":
        constants, carries = scan_parts(equation)
        read = [of and not constants <= k < constants + carries for k, of in enumerate(read)]
    if name in (*CALLS, "scan"):
        return equation.replace(params={**params, "jaxpr": _inside(params["jaxpr"], read)})
    if name == "cond":
        branches = tuple(_inside(branch, read[1:]) for branch in params["branches"])
        return equation.replace(params={**params, "branches": branches})
    return equation


def _inside(inner: Any, read: list[bool]) -> Any:
    if isinstance(inner, ClosedJaxpr):
        return ClosedJaxpr(_widened(inner.jaxpr, read), inner.consts)
    return _widened(inner, read)


def _is_narrow(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _wide_gather(equation: Any) -> Any:
    """A lookup, with the sum over all that look up the same in float32."""
    table, indices = (
        jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars
    )

    def take(table: jax.Array, indices: jax.Array) -> jax.Array:
        return equation.primitive.bind(table, indices, **equation.params)

    (made,) = jax.make_jaxpr(wide(take, table))(table, indices).jaxpr.eqns
    return made.replace(
        invars=equation.invars, outvars=equation.outvars, source_info=equation.source_info
    )


def wide(
    take: Callable[[jax.Array, jax.Array], jax.Array], table: Any
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """`take(table, indices)`, whose gradient to a table of this shape and dtype is added up in
    float32.
    """
    if not _is_narrow(table.dtype):
        return take

    def forwards(table: jax.Array, indices: jax.Array) -> tuple[jax.Array, jax.Array]:
        return take(table, indices), indices

    def backwards(indices: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
        in_float32 = jax.ShapeDtypeStruct(table.shape, jnp.float32)
        (sums,) = jax.linear_transpose(lambda table: take(table, indices), in_float32)(
            gradient.astype(jnp.float32)
        )
        return sums.astype(table.dtype), None

    lookup = jax.custom_vjp(take)
    lookup.defvjp(forwards, backwards)
    return lookup
