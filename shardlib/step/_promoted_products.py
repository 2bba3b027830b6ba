"""Weights that were given in a narrow dtype and are multiplied in a wider one: what was asked for,
and did not happen.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.tracing._jaxpr import line_of

_PRODUCTS = ("dot_general", "conv_general_dilated")
_MOVES = (
    "broadcast_in_dim", "concatenate", "convert_element_type", "dynamic_slice", "gather",
    "reshape", "rev",
    "sharding_constraint", "slice", "squeeze", "stack", "transpose",
)  # fmt: skip


def widened(jaxpr: ClosedJaxpr, paths: Sequence[str | None], width: int) -> dict[str, str]:
    """Of the inputs that have a path, those that a product takes with more than `width` bytes; the
    line of the first.
    """
    found: dict[str, str] = {}
    for path, line in _products(jaxpr.jaxpr, paths, width):
        found.setdefault(path, line)
    return found


def _products(jaxpr: Any, paths: Sequence[str | None], width: int) -> Iterator[tuple[str, str]]:
    known = {var: path for var, path in zip(jaxpr.invars, paths, strict=True) if path is not None}
    for equation in jaxpr.eqns:
        read = [None if isinstance(atom, Literal) else known.get(atom) for atom in equation.invars]
        if not any(read):
            continue
        name = equation.primitive.name
        if name in _PRODUCTS:
            if max(atom.aval.dtype.itemsize for atom in equation.invars) > width:
                yield from ((path, line_of(equation)) for path in read if path is not None)
        elif name in _MOVES:
            known[equation.outvars[0]] = next(filter(None, read))
        else:
            inside = equation.params["branches"] if name == "cond" else equation.params.values()
            of_inside = read[1:] if name == "cond" else read
            for inner in filter(None, map(_jaxpr, inside)):
                if len(inner.invars) == len(of_inside):
                    # What was traced before, for another call, has no line of this one.
                    yield from (
                        (path, line or line_of(equation))
                        for path, line in _products(inner, of_inside, width)
                    )


def _jaxpr(value: Any) -> Jaxpr | None:
    return (
        value.jaxpr
        if isinstance(value, ClosedJaxpr)
        else value
        if isinstance(value, Jaxpr)
        else None
    )


def describe_widened(found: dict[str, str], compute: str) -> str:
    """The warning that products are not taken in the dtype that was asked for."""
    path, line = next(iter(found.items()))
    more = f", and so are {len(found) - 1} others" if len(found) > 1 else ""
    at = f" at {line}" if line else ""
    return (
        f"The model gets `{path}` in {compute}, as `Strategy(precision=...)` says, and it is "
        f"multiplied in a wider dtype{at}{more}: what it meets is wider. Cast that, "
        f"`x.astype({path.rsplit('/', 1)[-1]}.dtype)`; or if that is meant, keep the parameter as "
        f'it is: `sl.Precision("{compute}", keep=({re.escape(path)!r},))`.'
    )
