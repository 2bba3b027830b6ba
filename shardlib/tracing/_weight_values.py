"""The values of variables while a function is evaluated on weights as they are stored.

Such a value is one of three kinds:

    an array           as in JAX's own evaluation
    a `WeightSlice`    a weight, or a layer of it, that is no array yet: sharded, or not yet bound
    a `Derived`        what a cheap equation makes of one of these, put off until it is used

The *root* of a value is the weight that it is or is derived from.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
from jax.extend.core import Jaxpr

from shardlib.tracing._jaxpr import Stretch, variables
from shardlib.tracing._layer_uses import is_cast, is_one_layer, squeezes_first_dim
from shardlib.tracing._region import WeightSlice, bind_whole_weight, reader_of


@dataclass(frozen=True, eq=False)
class Derived:
    """What a cheap equation of a jaxpr makes of a weight, to be computed where it is used."""

    jaxpr: Jaxpr
    equation: Any
    operand: "WeightSlice | Derived"


# What a variable may stand for.
Value = jax.Array | WeightSlice | Derived


def is_weight(value: Any) -> TypeGuard[WeightSlice | Derived]:
    """Whether a value is a weight that is no array yet, or derived from one."""
    return isinstance(value, WeightSlice | Derived)


def root_of(value: Value) -> WeightSlice | None:
    """The weight that a value is, or is derived from; None for an array."""
    while isinstance(value, Derived):
        value = value.operand
    return value if isinstance(value, WeightSlice) else None


def roots_of(values: Iterable[Value]) -> list[WeightSlice]:
    """The weights that some values are or are derived from, each once."""
    # Several values may come of one weight, which is gathered once.
    roots = [root_of(value) for value in values]
    return list(dict.fromkeys(root for root in roots if root is not None))


def derive(jaxpr: Jaxpr, equation: Any, operand: WeightSlice | Derived) -> Value:
    """What a cheap equation, such as a cast or a slice, makes of a weight.

    A layer that is picked from a stack is a weight again. If it is stored whole, it is bound here.
    """
    layer = _layer_picked_by(equation, operand)
    if layer is None:
        return Derived(jaxpr, equation, operand)
    # There is nothing to wait for: what is whole can be sliced at once, and what reads it sees an
    # array.
    if layer.weight.is_stored_whole:
        return bind_whole_weight(layer, reader_of(jaxpr, equation.outvars[0]))
    return layer


def _layer_picked_by(equation: Any, operand: WeightSlice | Derived) -> WeightSlice | None:
    """The layer that an equation picks from a stack by its number; None for other equations.

    `stack[3]` is traced as a `slice` and then a `squeeze`. The equation has to be the `squeeze`,
    and its operand what the `slice` made of the stack.
    """
    # Two equations make one picked layer, and each is seen by itself: the first has been put off.
    if not squeezes_first_dim(equation) or not isinstance(operand, Derived):
        return None
    stack, slicing = operand.operand, operand.equation
    if not isinstance(stack, WeightSlice) or stack.consumed_dims >= stack.weight.stacked:
        return None
    if slicing.primitive.name != "slice" or not is_one_layer(slicing, stack):
        return None
    return stack.at(slicing.params["start_indices"][0])


def stack_of(value: Value) -> WeightSlice | None:
    """The weight that a `scan` over this value can take layer by layer; None if there is none.

    The value is that weight, or the weight in another dtype. Anything else that is made of a weight
    might mix its layers, or could not be done to one layer as it was traced.
    """
    # A cast of a stack is the stack of the casts of its layers.
    while isinstance(value, Derived) and is_cast(value.equation):
        value = value.operand
    return value if isinstance(value, WeightSlice) else None


def check_unsplit(stack: WeightSlice) -> None:
    """Refuse a loop over a dim along which a weight is split among devices.

    ZeRO splits a dim behind those that may count layers, so these are whole.
    """
    if stack.consumed_dims < stack.weight.stacked:
        return
    raise ValueError(
        f"`{stack.weight.path}` of shape {stack.weight.shape} is scanned over its dim "
        f"{stack.consumed_dims}, which is split among devices, so an iteration's slice lives on "
        'one device and cannot be gathered. Name that dim `"layers"`, as '
        '`transform_metadata={nnx.PARTITION_NAME: "layers"}` does: it is left whole.'
    )


def resolve(value: Value, whole: dict[WeightSlice, jax.Array]) -> Any:
    """The array that a value stands for, given the arrays of `whole` weights.

    What is derived is computed here, again in each place that uses it.
    """
    if isinstance(value, WeightSlice):
        return whole[value]
    if isinstance(value, Derived):
        inputs, outputs = variables(value.equation.invars), list(value.equation.outvars)
        # The equation of the trace itself, so that errors and profiles name the line of the model.
        recipe = Stretch(value.jaxpr, [value.equation], inputs, outputs)
        return recipe([resolve(value.operand, whole)])[0]
    return value


def split_arrays(values: Sequence[Value]) -> list[Any]:
    """The values that are arrays, in order.

    Functions that JAX transforms take arrays as arguments. Weights stay outside of them, and
    `merge` puts them in again on the inside.
    """
    return [value for value in values if not is_weight(value)]


def merge(
    values: Sequence[Value],
    arrays: Sequence[Any],
    replace_weight: Callable[[WeightSlice | Derived], Any],
) -> list[Any]:
    """The inverse of `split_arrays`, with `replace_weight(value)` in place of each weight."""
    # Arrays come in the order in which `split_arrays` took them out.
    next_array = iter(arrays)
    merged = []
    for value in values:
        if is_weight(value):
            merged.append(replace_weight(value))
        else:
            merged.append(next(next_array))
    return merged


def with_root_replaced(
    value: WeightSlice | Derived, replacement: dict[WeightSlice, WeightSlice]
) -> WeightSlice | Derived:
    """A weight, or what is derived from one, with another weight in its place."""
    if isinstance(value, Derived):
        operand = with_root_replaced(value.operand, replacement)
        return Derived(value.jaxpr, value.equation, operand)
    return replacement[value]
