"""Weights that were given in a narrow dtype and are multiplied in a wider one: what was asked for,
and did not happen.

A strategy may give the model its weights in bfloat16. If a product takes such a weight together
with a float32 array, JAX promotes the weight, and the product runs at the speed of float32. The
walk below follows each weight through the trace, by the operations that only move its elements or
cast them, to the products that take it.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.tracing._jaxpr import line_of

_PRODUCTS = ("dot_general", "conv_general_dilated")
# The results of these are taken for the weight itself. A cast is where a promotion happens.
_MOVES = (
    "broadcast_in_dim", "concatenate", "convert_element_type", "dynamic_slice", "gather",
    "reshape", "rev",
    "sharding_constraint", "slice", "squeeze", "stack", "transpose",
)  # fmt: skip


def widened(jaxpr: ClosedJaxpr, paths: Sequence[str | None], width: int) -> dict[str, str]:
    """The weights that a product takes with more than `width` bytes an element, by their paths.

    `paths` has an entry for each input of the function: the path of a weight, or None for an input
    that is not followed. The values are the lines of the first such product of each weight.
    """
    first_lines: dict[str, str] = {}
    for path, line in _wide_products(jaxpr.jaxpr, paths, width):
        first_lines.setdefault(path, line)
    return first_lines


def _wide_products(
    jaxpr: Any, paths: Sequence[str | None], width: int
) -> Iterator[tuple[str, str]]:
    """The path of a weight and the line of a product, for each product that takes it widened.

    Equations come in the order of the trace, those of called functions at their calls.
    """
    known: dict[Any, str] = {}
    for var, path in zip(jaxpr.invars, paths, strict=True):
        if path is not None:
            known[var] = path
    for equation in jaxpr.eqns:
        operands = _paths_of(equation.invars, known)
        weights = [path for path in operands if path is not None]
        if not any(weights):
            continue
        name = equation.primitive.name
        if name in _PRODUCTS:
            # A product of narrow operands is what was asked for, whatever it is accumulated in.
            inputs: list[Any] = equation.invars
            widest = max(atom.aval.dtype.itemsize for atom in inputs)
            if widest > width:
                for path in weights:
                    yield path, line_of(equation)
        elif name in _MOVES:
            # Of several weights in one array the first stands for all. An input that is itself the
            # whole tree has an empty path, which names nothing.
            known[equation.outvars[0]] = next(filter(None, weights))
        else:
            yield from _wide_products_inside(equation, operands, width)


def _paths_of(atoms: Sequence[Any], known: dict[Any, str]) -> list[str | None]:
    """The path of the weight that each operand of an equation holds, or None.

    Literals are never weights, and cannot be looked up: they are not hashable.
    """
    paths: list[str | None] = []
    for atom in atoms:
        if isinstance(atom, Literal):
            paths.append(None)
        else:
            paths.append(known.get(atom))
    return paths


def _wide_products_inside(
    equation: Any, operands: list[str | None], width: int
) -> Iterator[tuple[str, str]]:
    """The widened weights in the functions that an equation calls, as `_wide_products` has them.

    A function with another number of inputs than the equation has operands is left out, since it
    cannot be told which of them get the weights.
    """
    params = equation.params
    if equation.primitive.name == "cond":
        # The first operand of a `cond` chooses the branch, and is not given to it.
        inner_values, arguments = params["branches"], operands[1:]
    else:
        # Which parameter has the function differs from primitive to primitive.
        inner_values, arguments = params.values(), operands
    for value in inner_values:
        inner = _as_jaxpr(value)
        if inner is None or len(inner.invars) != len(arguments):
            continue
        for path, line in _wide_products(inner, arguments, width):
            # What was traced before, for another call, has no line of this one.
            yield path, line or line_of(equation)


def _as_jaxpr(value: Any) -> Jaxpr | None:
    """The function in a parameter of an equation, if the parameter is one."""
    if isinstance(value, ClosedJaxpr):
        return value.jaxpr
    if isinstance(value, Jaxpr):
        return value
    return None


def describe_widened(found: dict[str, str], compute: str) -> str:
    """The warning that products are not taken in the dtype that was asked for.

    `found` is what `widened` returns, and not empty: the text names its first weight and counts
    the others. `compute` is the dtype in which the strategy gives the weights to the model.
    """
    path, line = next(iter(found.items()))
    more = f", and so are {len(found) - 1} others" if len(found) > 1 else ""
    at = f" at {line}" if line else ""
    return (
        f"The model gets `{path}` in {compute}, as `Strategy(precision=...)` says, and it is "
        f"multiplied in a wider dtype{at}{more}: what it meets is wider. Cast that, "
        f"`x.astype({path.rsplit('/', 1)[-1]}.dtype)`; or if that is meant, keep the parameter as "
        f'it is: `sl.Precision("{compute}", keep=({re.escape(path)!r},))`.'
    )
