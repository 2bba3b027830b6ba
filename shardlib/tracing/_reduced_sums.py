"""Operations that add up gradients of weights themselves, and can add up reduced ones.

Such an operation has a derivative of its own, in which a loop adds gradients to a sum. A region
would reduce the sum once it is complete. Until then the sum is as large as the whole weight, in
memory beside the weight and the gradient that is added. So where an operation alone reads a weight,
it is given how the gradient is reduced, and the anchor of that:

    operation(weight)                 gradient of the weight     whole, reduced by the region
    operation(weight, anchor)         gradient of the anchor     a sum of reduced gradients

The operation is found by the name of its first operand, which is a `SumsGradients`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from shardlib.tracing._jaxpr import (
    CALLS,
    REMATS,
    open_jaxpr,
    readers_of,
    shapes_of,
    variables,
)


@dataclass(frozen=True, eq=False)
class Reduction:
    """How the gradient of a weight is reduced.

    - `reduced(gradient)`: the gradient in the form in which it is added up.
    - `axes`: the manual axes over which that takes collectives: all devices along them have to
      reduce equally many gradients.
    """

    reduced: Callable[[jax.Array], jax.Array]
    axes: tuple[str, ...]


class SumsGradients(str):
    """The name of the first operand of an operation that adds up gradients of weights.

    `with_anchors(reductions, operands, anchors)` is the same operation for the flat operands of the
    call. `reductions` are by the position of a weight among these. There is an anchor for each, in
    order, which gets the gradient. The weight itself gets none.
    """

    with_anchors: Callable[[Mapping[int, Reduction], list[Any], list[Any]], Any]

    def __new__(cls, name: str, with_anchors: Callable[..., Any]) -> "SumsGradients":
        """A string like any other, for what asks for names."""
        named = super().__new__(cls, name)
        named.with_anchors = with_anchors
        return named


def is_summed_inside(jaxpr: Jaxpr, weight: Any) -> bool:
    """Whether a weight is read once, by an operation that adds up its gradients itself.

    The operation may be inside of calls.
    """
    readers = readers_of(jaxpr, weight)
    if len(readers) != 1 or weight in variables(jaxpr.outvars):
        return False
    (reader,) = readers
    if variables(reader.invars).count(weight) > 1:
        return False
    if reader.primitive.name in CALLS:
        inner = open_jaxpr(reader.params["jaxpr"])
        return is_summed_inside(inner, inner.invars[_position_of(reader, weight)])
    return _summing(jaxpr, reader) is not None


def with_anchors(jaxpr: Jaxpr, anchors: Mapping[Any, tuple[Any, Reduction]]) -> Jaxpr:
    """A jaxpr in which operations that add up gradients of weights add up reduced ones.

    `anchors` has, by the variable of each such weight, that of its anchor, which the caller makes
    an input, and how its gradient is reduced.
    """
    equations = []
    for equation in jaxpr.eqns:
        read = [var for var in variables(equation.invars) if var in anchors]
        if read:
            equation = _with_anchors(jaxpr, equation, {var: anchors[var] for var in read})
        equations.append(equation)
    return jaxpr.replace(eqns=equations)


def _with_anchors(jaxpr: Jaxpr, equation: Any, anchors: Mapping[Any, tuple[Any, Reduction]]) -> Any:
    """The operation, or the call that leads to it, as one that reads the anchors too."""
    places = {_position_of(equation, weight): anchors[weight] for weight in anchors}
    further = [anchor for anchor, _ in places.values()]
    if equation.primitive.name in CALLS:
        equation = _call_with_anchors(equation, places)
        return equation.replace(invars=[*equation.invars, *further])
    summing = _summing(jaxpr, equation)
    assert summing is not None
    reductions = {place: reduction for place, (_, reduction) in places.items()}

    def operation(operands: list[Any], anchors: list[Any]) -> Any:
        return summing.with_anchors(reductions, operands, anchors)

    traced = jax.make_jaxpr(operation)(shapes_of(equation.invars), shapes_of(further))
    (call,) = traced.jaxpr.eqns
    # Errors and profiles then show the line of the operation as it was called.
    return call.replace(
        invars=[*equation.invars, *further],
        outvars=equation.outvars,
        source_info=equation.source_info,
        ctx=equation.ctx,
    )


def _call_with_anchors(equation: Any, places: Mapping[int, tuple[Any, Reduction]]) -> Any:
    """A call whose function takes anchors behind all else. They are not among its operands yet."""
    function = equation.params["jaxpr"]
    body = open_jaxpr(function)
    inside = {}
    for place, (anchor, reduction) in places.items():
        inside[body.invars[place]] = Var(anchor.aval), reduction
    further = [anchor for anchor, _ in inside.values()]
    changed = with_anchors(body, inside).replace(invars=[*body.invars, *further])
    if equation.primitive.name in REMATS:
        return _with_operands(equation, {"jaxpr": changed}, {}, len(further))
    closed = ClosedJaxpr(changed, function.consts)
    of_one = jax.make_jaxpr(jax.jit(lambda x: x))(*shapes_of(further[:1])).jaxpr.eqns[0].params
    return _with_operands(equation, {"jaxpr": closed}, of_one, len(further))


def _with_operands(
    equation: Any, changed: Mapping[str, Any], of_one: Mapping[str, Any], count: int
) -> Any:
    """A call with parameters for so many operands more.

    Args:
        equation: the call.
        changed: parameters that are others.
        of_one: those of a call with one operand, of which nothing was asked.
        count: how many operands more there are.
    """
    params = {**equation.params, **changed}
    for name, value in equation.params.items():
        if not isinstance(value, tuple) or len(value) != len(equation.invars):
            continue
        if name == "prevent_cse":
            params[name] = (*value, *[any(value)] * count)
        elif name in ("in_shardings", "in_layouts", "donated_invars"):
            params[name] = (*value, *of_one[name] * count)
    return equation.replace(params=params)


def _summing(jaxpr: Jaxpr, equation: Any) -> SumsGradients | None:
    """The name by which an equation is an operation that adds up gradients; None for others."""
    if equation.primitive.name != "custom_vjp_call" or equation.params["num_consts"]:
        return None
    number = next(iter(equation.invars), None)
    for maker in jaxpr.eqns:
        if maker.primitive.name == "name" and maker.outvars[0] is number:
            name = maker.params["name"]
            return name if isinstance(name, SumsGradients) else None
    return None


def _position_of(equation: Any, var: Any) -> int:
    """Where a variable is first among the operands of an equation."""
    return next(place for place, atom in enumerate(equation.invars) if atom is var)
