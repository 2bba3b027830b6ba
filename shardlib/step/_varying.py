"""Which outputs of a traced function differ from device to device: a walk over its jaxpr.

JAX's own `check_vma` types would say so, and would refuse much user code that is right (a scan
whose carry starts as `jnp.zeros(())`). The step needs the answer only for state, which must be the
same on every device.

Each value is given the set of manual axes along which it may differ:

    examples, parameters split over the data   all axes
    parameters, constants                      none
    axis_index(axis)                           that axis
    psum(x, axis)                              those of x, without that axis
    anything else                              those of all its inputs together
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib._text import listed
from shardlib.modeling._random import is_row_key, rows_of
from shardlib.tracing._jaxpr import every_equation, open_jaxpr, scan_parts

Axes = frozenset[str]

_NONE: Axes = frozenset()

# Collectives whose result is the same along the axes that they run over.
_SAME_AFTER = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}

# Collectives by which something of one device reaches another.
_SENDS = {
    *_SAME_AFTER,
    "all_to_all",
    "ppermute",
    "psum_scatter",
    "ragged_all_to_all",
    "reduce_scatter",
}


def varying_outputs(
    jaxpr: ClosedJaxpr, varying_inputs: Sequence[bool], axes: Iterable[str]
) -> list[bool]:
    """For each output, whether it may differ along the manual `axes`, given which inputs do.

    It errs on one side: an output that it calls the same is the same on all devices along the axes.
    """
    every = frozenset(axes)
    inputs: list[Axes] = []
    for varies in varying_inputs:
        inputs.append(every if varies else _NONE)
    return list(map(bool, _walk(jaxpr.jaxpr, inputs, every)))


def _walk(jaxpr: Jaxpr, inputs: Sequence[Axes], axes: Axes) -> list[Axes]:
    """The axes along which each output of a jaxpr may differ, from those of its inputs."""
    known: dict[Any, Axes] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Axes:
        # Literals and constants of the trace are the same on all devices.
        if isinstance(atom, Literal):
            return _NONE
        return known.get(atom, _NONE)

    # In the order of the trace, in which each value is written before it is read.
    for equation in jaxpr.eqns:
        outputs = _equation(equation, list(map(read, equation.invars)), axes)
        known.update(zip(equation.outvars, outputs, strict=True))
    return list(map(read, jaxpr.outvars))


def _equation(equation: Any, inputs: list[Axes], axes: Axes) -> list[Axes]:
    """The axes along which each output of an equation may differ."""
    name, parameters = equation.primitive.name, equation.params
    if name in _RULES:
        return _RULES[name](equation, inputs, axes)
    # In groups, a sum is the same only within each of them.
    if name in _SAME_AFTER and parameters.get("axis_index_groups") is None:
        return _after_collective(equation, inputs)
    is_row_drawing = name in ("random_bits", "random_split")
    if is_row_drawing and is_row_key(equation.invars[0].aval):
        return _drawn_by_row(equation, inputs, axes)
    if name == "random_wrap" and is_row_key(equation.outvars[0].aval):
        # A row key knows which examples a device has, and is the same stream on all devices.
        return [_NONE]
    # Calls are followed by their bodies, so that an output which reads no varying input stays the
    # same.
    inner = _called_jaxpr(equation)
    if inner is not None:
        return _walk(inner, inputs, axes)
    return [_NONE.union(*inputs)] * len(equation.outvars)


def _axis_index(equation: Any, inputs: list[Axes], axes: Axes) -> list[Axes]:
    """A device's index along axes differs along these."""
    del inputs
    return [axes & set(_as_tuple(equation.params["axis_name"]))]


def _barrier(equation: Any, inputs: list[Axes], axes: Axes) -> list[Axes]:
    """The outputs of a barrier are its inputs, one by one."""
    del equation, axes
    return inputs


def _drawn_by_row(equation: Any, inputs: list[Axes], axes: Axes) -> list[Axes]:
    """Draws by a row key: those with a row for each example are of the examples of a device."""
    rows = rows_of(equation.invars[0].aval)
    has_row_per_example = equation.params["shape"][:1] == (rows,)
    # All else that is drawn by such a key is the same on all devices, as a mask for all examples.
    if has_row_per_example:
        return [inputs[0] | axes]
    return [inputs[0]]


def _after_collective(equation: Any, inputs: list[Axes]) -> list[Axes]:
    """After a sum over axes, or a gather, devices along these have the same."""
    parameters = equation.params
    over = set(_as_tuple(parameters.get("axes", parameters.get("axis_name"))))
    outputs = len(equation.outvars)
    # A sum of several arrays is one equation, each of whose outputs comes of its own input.
    if len(inputs) == outputs:
        return [differs - over for differs in inputs]
    return [_NONE.union(*inputs) - over] * outputs


def _cond(equation: Any, inputs: list[Axes], axes: Axes) -> list[Axes]:
    """A branch that differs between devices makes all of its outputs differ."""
    index, operands = inputs[0], inputs[1:]
    # Devices that take different branches have different results, whatever these read.
    outputs = [index] * len(equation.outvars)
    for branch in equation.params["branches"]:
        outputs = _united(outputs, _walk(branch.jaxpr, operands, axes))
    return outputs


def _united(one: Sequence[Axes], other: Sequence[Axes]) -> list[Axes]:
    """For each value the axes along which it may differ by either of two accounts."""
    return [a | b for a, b in zip(one, other, strict=True)]


def _scan(equation: Any, inputs: list[Axes], axes: Axes) -> list[Axes]:
    """A carry differs if it ever does, so its axes grow until they no longer change."""
    body = equation.params["jaxpr"].jaxpr
    constants, carries = scan_parts(equation)
    first_scanned = constants + carries
    carry = inputs[constants:first_scanned]
    # What one iteration makes of a carry, the next one reads.
    while True:
        outputs = _walk(body, [*inputs[:constants], *carry, *inputs[first_scanned:]], axes)
        grown = _united(carry, outputs[:carries])
        if grown == carry:
            return carry + outputs[carries:]
        carry = grown


def _while(equation: Any, inputs: list[Axes], axes: Axes) -> list[Axes]:
    """A carry differs if it ever does, and all carries do if devices stop at different times."""
    parameters = equation.params
    condition_constants = parameters["cond_nconsts"]
    first_carry = condition_constants + parameters["body_nconsts"]
    body_constants = inputs[condition_constants:first_carry]
    carry = inputs[first_carry:]
    condition, body = parameters["cond_jaxpr"].jaxpr, parameters["body_jaxpr"].jaxpr
    while True:
        (stops,) = _walk(condition, [*inputs[:condition_constants], *carry], axes)
        outputs = _walk(body, [*body_constants, *carry], axes)
        # Repeated until nothing is added: axes only ever join, so this ends.
        grown = [differs | stops for differs in _united(carry, outputs)]
        if grown == carry:
            return carry
        carry = grown


_RULES: dict[str, Callable[[Any, list[Axes], Axes], list[Axes]]] = {
    "axis_index": _axis_index,
    "optimization_barrier": _barrier,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}


def _called_jaxpr(equation: Any) -> Jaxpr | None:
    """The jaxpr that an equation calls with its own inputs, if it calls one.

    One with other numbers of inputs or outputs is something else, such as a kernel.
    """
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name not in equation.params:
            continue
        inner = open_jaxpr(equation.params[name])
        same_inputs = len(inner.invars) == len(equation.invars)
        same_outputs = len(inner.outvars) == len(equation.outvars)
        # Operands and results then are those of the function, one by one.
        if same_inputs and same_outputs:
            return inner
        return None
    return None


def _as_tuple(axes: Any) -> tuple[Any, ...]:
    """The axes of a collective, which JAX keeps as one name or as several."""
    if isinstance(axes, list | tuple):
        return tuple(axes)
    return (axes,)


def sends_between(jaxpr: ClosedJaxpr, axes: Iterable[str]) -> bool:
    """Whether a traced function has a collective over one of the axes."""
    axes = set(axes)
    for equation in every_equation(jaxpr.jaxpr):
        parameters = equation.params
        over = _as_tuple(parameters.get("axes", parameters.get("axis_name")))
        if equation.primitive.name in _SENDS and not axes.isdisjoint(over):
            return True
    return False


def describe_varying(paths: Sequence[str]) -> str:
    """The error for state that would differ from device to device."""
    return (
        f"The loss changes state of the model from the examples at hand: {listed(paths)}. It would "
        "differ from device to device. Compute it from the whole batch: `sl.batch_mean(x)` and "
        "`sl.gather_batch(x)`, or give a layer of Flax the axis, "
        '`BatchNorm(..., axis_name="batch")`. '
        "This holds on one device too, so that a model trains the same on any number of them."
    )
