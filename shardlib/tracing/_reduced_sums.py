"""Operations that add up gradients of weights themselves, and can add up reduced ones.

Such an operation has a derivative of its own, in which a loop adds gradients to a sum. A region
would reduce the sum once it is complete. Until then the sum is as large as the whole weight, and in
memory beside the weight and the gradient that is added. So where nothing but such an operation
reads a weight, it is told how the weight is gathered and how the gradient is reduced:

    operation(weight)                    gradient of the weight    whole, reduced by the region
    operation(weight, anchor, shard)     gradient of the anchor    a sum of reduced gradients

The loop gathers the weight itself, so that the region's is dropped once the rest has read it. The
operation is found by the name of its first operand, which is a `SumsGradients`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var

from shardlib.tracing._jaxpr import (
    CALLS,
    JITS,
    open_jaxpr,
    readers_of,
    shapes_of,
    variables,
)


@dataclass(frozen=True, eq=False)
class OfShard:
    """What an operation does to a weight and to its gradient.

    - `whole(shard)`: the whole weight.
    - `reduced(gradient)`: the gradient in the form in which it is added up.
    - `axes`: the manual axes over which both take collectives: all devices along them have to take
      equally many.
    """

    whole: Callable[[jax.Array], jax.Array]
    reduced: Callable[[jax.Array], jax.Array]
    axes: tuple[str, ...]


class Further(NamedTuple):
    """What an operation reads of a weight beside the weight, as variables or as arrays."""

    anchor: Any
    shard: Any


class SumsGradients(str):
    """The name of the first operand of an operation that adds up gradients of weights.

    `of_shards(weights, operands, further)` is the same operation for the flat operands of the call.
    `weights` has an `OfShard` by the position of each weight among these, and `further` a `Further`
    for each, in order. The anchors get the gradients, and the weights get none.
    """

    of_shards: Callable[[Mapping[int, OfShard], list[Any], list[Further]], Any]

    def __new__(cls, name: str, of_shards: Callable[..., Any]) -> "SumsGradients":
        """A string like any other, for what asks for names."""
        named = super().__new__(cls, name)
        named.of_shards = of_shards
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
    return _name_of(jaxpr, reader) is not None


def summing_inside(jaxpr: Jaxpr, weights: Mapping[Any, tuple[Further, OfShard]]) -> Jaxpr:
    """A jaxpr in which operations that add up gradients of weights add up reduced ones.

    `weights` has, by the variable of each weight, the variables that the operation reads too, which
    the caller makes inputs, and what is done.
    """
    equations = []
    for equation in jaxpr.eqns:
        read = [var for var in variables(equation.invars) if var in weights]
        if read:
            places = {_position_of(equation, var): weights[var] for var in read}
            equation = _summing_inside(jaxpr, equation, places)
        equations.append(equation)
    return jaxpr.replace(eqns=equations)


def _summing_inside(
    jaxpr: Jaxpr, equation: Any, places: Mapping[int, tuple[Further, OfShard]]
) -> Any:
    """The operation, or the call that leads to it, as one that reads anchors and shards too."""
    variables_read = [further for further, _ in places.values()]
    operands = [*equation.invars, *jax.tree.leaves(variables_read)]
    if equation.primitive.name in CALLS:
        return _call_summing_inside(equation, places).replace(invars=operands)
    name = _name_of(jaxpr, equation)
    assert name is not None
    weights = {place: of_shard for place, (_, of_shard) in places.items()}
    shapes = shapes_of(equation.invars), jax.tree.map(_shape_of, variables_read)
    traced = jax.make_jaxpr(partial(name.of_shards, weights))(*shapes)
    (call,) = traced.jaxpr.eqns
    # Errors and profiles then show the line of the operation as it was called.
    return call.replace(
        invars=operands,
        outvars=equation.outvars,
        source_info=equation.source_info,
        ctx=equation.ctx,
    )


def _call_summing_inside(equation: Any, places: Mapping[int, tuple[Further, OfShard]]) -> Any:
    """A call whose function takes anchors and shards last. They are not its operands yet."""
    function = equation.params["jaxpr"]
    body = open_jaxpr(function)
    inside = {}
    for place, (further, of_shard) in places.items():
        inside[body.invars[place]] = Further(*map(_like, further)), of_shard
    last = jax.tree.leaves([further for further, _ in inside.values()])
    changed: Any = summing_inside(body, inside).replace(invars=[*body.invars, *last])
    if equation.primitive.name in JITS:
        changed = ClosedJaxpr(changed, function.consts)
    return _with_function(equation, changed, len(last))


def _with_function(equation: Any, function: Any, count: int) -> Any:
    """A call of another function, which takes so many arrays more."""
    params = {**equation.params, "jaxpr": function}
    if equation.primitive.name in JITS:
        plain = jax.make_jaxpr(jax.jit(lambda x: x))(0.0).jaxpr.eqns[0].params
        for name in ("in_shardings", "in_layouts", "donated_invars"):
            params[name] = (*params[name], *plain[name] * count)
    elif isinstance(params["prevent_cse"], tuple):
        # JAX 0.12 may have one for each operand.
        given = params["prevent_cse"]
        params["prevent_cse"] = (*given, *[any(given)] * count)
    return equation.replace(params=params)


def _like(variable: Any) -> Var:
    """Another variable of the same shape."""
    return Var(variable.aval)


def _shape_of(variable: Any) -> jax.ShapeDtypeStruct:
    return shapes_of([variable])[0]


def _name_of(jaxpr: Jaxpr, equation: Any) -> SumsGradients | None:
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
