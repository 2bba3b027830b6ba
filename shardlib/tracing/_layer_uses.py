"""How a traced function uses its weights: layer by layer, in groups, or in marked blocks.

A stack of weights need not be whole as a stack if all that is done with it is one of

    for w in stack: ...      a `scan` that takes its layers one by one
    stack[0], stack[1]       layers picked by numbers, a `slice` and a `squeeze` each

Nothing is evaluated here: these functions read equations and say what is there.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from shardlib.tracing._jaxpr import (
    CALLS,
    JITS,
    is_cheap,
    open_jaxpr,
    readers_of,
    scan_parts,
    variables,
)
from shardlib.tracing._region import WeightSlice

MARK = "shardlib_layer"
"""The name of the `jax.jit` around a marked block, by which a trace shows that it is marked."""


# Primitives that are cheap when they have one operand.
def is_cheap_call(equation: Any) -> bool:
    """Whether an equation is a `jit` of cheap changes only, such as one that casts all weights."""
    if equation.primitive.name not in JITS or equation.params["name"] == MARK:
        return False
    return all(is_cheap(inner) or is_cheap_call(inner) for inner in _jaxpr_of_call(equation).eqns)


def is_cast(equation: Any) -> bool:
    """Whether an equation changes only the dtype of an array, which it can do layer by layer."""
    if equation.primitive.name != "convert_element_type":
        return False
    # A cast may set a sharding too, which names all dims.
    return equation.params.get("sharding") is None


def is_layered(jaxpr: Jaxpr, var: Any, root: WeightSlice, pickable: bool) -> bool:
    """Whether a stack of weights is used in a jaxpr layer by layer, and in no other way.

    Either one loop takes all layers, or numbers pick some, each once: a layer is bound where it is
    picked, and its gradient would be reduced at each pick. With `pickable` false, only a loop
    counts.
    """
    readers = readers_of(jaxpr, var)
    if root.consumed_dims >= root.weight.stacked or not readers:
        return False
    # Whoever calls this jaxpr gets the whole stack.
    if var in variables(jaxpr.outvars):
        return False
    if len(readers) == 1 and _leads_to_layers(jaxpr, readers[0], var, root, pickable):
        return True
    if not pickable:
        return False
    numbers = [_picked_number(jaxpr, reader, root) for reader in readers]
    return None not in numbers and len(set(numbers)) == len(numbers)


def _leads_to_layers(
    jaxpr: Jaxpr, reader: Any, var: Any, root: WeightSlice, pickable: bool
) -> bool:
    """Whether the only equation that reads a stack is a loop over its layers, or leads to uses of
    layers: a cast before the loop, or a call.
    """
    if variables(reader.invars).count(var) > 1:
        return False
    cast = _cast_of(reader, var)
    if cast is not None:
        # Layers of what is cast are not picked: the cast would be done to the whole stack first.
        return is_layered(jaxpr, cast, root, pickable=False)
    name = reader.primitive.name
    position = _position_of(reader.invars, var)
    if name == "scan":
        # What comes before are constants and carries, which the loop does not take apart.
        return position >= sum(scan_parts(reader))
    if name not in CALLS:
        return False
    inner = _jaxpr_of_call(reader)
    # A marked block or one that is recomputed is a region, in which nothing is picked.
    is_plain = name in JITS and reader.params["name"] != MARK
    return is_layered(inner, inner.invars[position], root, pickable and is_plain)


def _cast_of(equation: Any, stack: Any) -> Any:
    """What a cast, or a `jit` that casts, makes of a stack; None for other equations.

    Of a `jit` that returns two things made of the stack, or anything but a cast, it is None.
    """
    if not is_cast(equation) and not is_cheap_call(equation):
        return None
    results = _known_of_results(equation, {stack: True}, _leaves_a_stack)
    if list(results.values()) != [True]:
        return None
    return next(iter(results))


def _position_of(atoms: Sequence[Any], var: Any) -> int:
    """Where a variable is first in a list of atoms."""
    return next(position for position, atom in enumerate(atoms) if atom is var)


def _jaxpr_of_call(equation: Any) -> Jaxpr:
    """The jaxpr that a call holds: `jit` has a closed one and `checkpoint` an open one."""
    return open_jaxpr(equation.params["jaxpr"])


def _picked_number(jaxpr: Jaxpr, equation: Any, root: WeightSlice) -> int | None:
    """The number of the layer that an equation picks from a stack, as `stack[3]` does.

    That is a slice of length one along the first dim, which one `squeeze` reads and nothing else.
    None for all other equations.
    """
    if equation.primitive.name != "slice" or not is_one_layer(equation, root):
        return None
    layer = equation.outvars[0]
    readers = readers_of(jaxpr, layer)
    if len(readers) != 1 or layer in variables(jaxpr.outvars):
        return None
    if not squeezes_first_dim(readers[0]):
        return None
    return equation.params["start_indices"][0]


def is_one_layer(equation: Any, root: WeightSlice) -> bool:
    """Whether the result of a slice of a stack has the shape of one layer."""
    # Indexing with a number slices one layer, and then takes the dim off.
    layer = (1, *root.weight.shape[root.consumed_dims + 1 :])
    return equation.outvars[0].aval.shape == layer


def squeezes_first_dim(equation: Any) -> bool:
    """Whether an equation takes off the first dim, and no other."""
    return equation.primitive.name == "squeeze" and equation.params["dimensions"] == (0,)


def group_spans(jaxpr: Jaxpr, groups: dict[Any, Hashable]) -> dict[int, int]:
    """Where the uses of each group of weights begin and end among the equations of a jaxpr.

    `groups` has the group of each input that is a weight with one. The result has, by the position
    of a first use, the position behind the last. Spans that overlap become one, since a region
    cannot end inside another one.
    """
    groups = dict(groups)
    spans: dict[Hashable, tuple[int, int]] = {}
    for position, equation in enumerate(jaxpr.eqns):
        if is_cheap(equation) or is_cheap_call(equation):
            # This is no use yet: it is put off until its result is used.
            groups.update(_known_of_results(equation, groups, lambda _, group: group))
            continue
        for var in variables(equation.invars):
            if var in groups:
                first, _ = spans.get(groups[var], (position, 0))
                spans[groups[var]] = (first, position + 1)
    return _merge_overlapping(spans.values())


def _merge_overlapping(spans: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The ends of spans by their starts, where those that overlap are merged into one."""
    ends: dict[int, int] = {}
    latest = -1  # the start of the span that was added last
    # In the order of their starts, a span can only overlap with the one before.
    for start, end in sorted(spans):
        if latest in ends and ends[latest] > start:
            ends[latest] = max(ends[latest], end)
        else:
            ends[start] = end
            latest = start
    return ends


def has_layers(jaxpr: Jaxpr, weights: Sequence[bool], stacks: Sequence[bool]) -> bool:
    """Whether a jaxpr scans over stacks of weights, or has a marked block that uses weights.

    `weights` says which of its inputs are weights or cheaply made of some, and `stacks` which of
    these a `scan` can take layer by layer: weights as they are, or cast.
    """
    # For each variable that is made of a weight, whether it is still such a stack.
    known = {}
    for var, is_weight, is_stack in zip(jaxpr.invars, weights, stacks, strict=True):
        if is_weight:
            known[var] = is_stack
    for equation in jaxpr.eqns:
        if is_cheap(equation) or is_cheap_call(equation):
            known.update(_known_of_results(equation, known, _leaves_a_stack))
        elif known.keys() & variables(equation.invars) and _is_layer_use(equation, known):
            return True
    return False


def _leaves_a_stack(equation: Any, is_stack: bool) -> bool:
    """Whether what a cheap equation makes of a weight can be taken layer by layer."""
    return is_stack and is_cast(equation)


def _known_of_results(
    equation: Any, known: Mapping[Any, Any], of_result: Callable[[Any, Any], Any]
) -> dict[Any, Any]:
    """What is known of the results of a cheap equation, from what is `known` of its operand.

    That is `of_result(equation, known[operand])`. The equation may be a `jit` of cheap ones, too.
    """
    if is_cheap(equation):
        found = _handed_over(known, equation.invars, equation.outvars)
        return {var: of_result(equation, value) for var, value in found.items()}
    body = _jaxpr_of_call(equation)
    inside = _handed_over(known, equation.invars, body.invars)
    for inner in body.eqns:
        inside.update(_known_of_results(inner, inside, of_result))
    return _handed_over(inside, body.outvars, equation.outvars)


def _handed_over(
    known: Mapping[Any, Any], atoms: Sequence[Any], names: Sequence[Any]
) -> dict[Any, Any]:
    """What is known of some atoms, by the variables that stand for them elsewhere."""
    found = {}
    for atom, name in zip(atoms, names, strict=True):
        # Literals cannot be looked up.
        if not isinstance(atom, Literal) and atom in known:
            found[name] = known[atom]
    return found


def _is_layer_use(equation: Any, known: Mapping[Any, bool]) -> bool:
    """Whether an equation scans over stacks or is a marked block, or a call that holds one.

    `known` has, for each variable that is made of a weight, whether it is a stack.
    """
    name = equation.primitive.name
    if name not in CALLS and name != "scan":
        return False
    if equation.params.get("name") == MARK:
        return True
    weights, stacks = [], []
    for atom in equation.invars:
        is_weight = not isinstance(atom, Literal) and atom in known
        weights.append(is_weight)
        stacks.append(is_weight and known[atom])
    if name == "scan":
        return any(stacks[sum(scan_parts(equation)) :])
    return has_layers(_jaxpr_of_call(equation), weights, stacks)
