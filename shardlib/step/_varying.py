"""Which outputs of a traced function differ from device to device: a walk over its jaxpr.

JAX's own `check_vma` types would say so, and would refuse much user code that is right (a scan
whose carry starts as `jnp.zeros(())`). The step needs the answer for one thing alone: state that
must be the same on every device.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.modeling._random import is_row_key, rows_of
from shardlib.tracing._jaxpr import scan_parts

# What makes a value the same along the axes it runs over.
_SAME_AFTER = {"psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant"}


def varying_outputs(
    jaxpr: ClosedJaxpr, varying_inputs: Sequence[bool], axes: Iterable[str]
) -> list[bool]:
    """For each output, whether it may differ along the manual `axes`, given which inputs do."""
    every = frozenset(axes)
    inputs = [every if varies else frozenset() for varies in varying_inputs]
    return [bool(found) for found in _walk(jaxpr.jaxpr, inputs, every)]


def _walk(
    jaxpr: Jaxpr, inputs: Sequence[frozenset[str]], axes: frozenset[str]
) -> list[frozenset[str]]:
    known: dict[Any, frozenset[str]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> frozenset[str]:
        return frozenset() if isinstance(atom, Literal) else known.get(atom, frozenset())

    for equation in jaxpr.eqns:
        outputs = _equation(equation, [read(atom) for atom in equation.invars], axes)
        known.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _equation(
    equation: Any, inputs: list[frozenset[str]], axes: frozenset[str]
) -> list[frozenset[str]]:
    name, parameters, outputs = equation.primitive.name, equation.params, len(equation.outvars)
    if name == "axis_index":
        return [axes & set(_as_tuple(parameters["axis_name"]))]
    if name == "random_wrap" and is_row_key(equation.outvars[0].aval):
        # A row key says which examples are here, and is the same stream everywhere.
        return [frozenset()]
    if name in ("random_bits", "random_split") and is_row_key(equation.invars[0].aval):
        return [
            inputs[0] | axes
            if parameters["shape"][:1] == (rows_of(equation.invars[0].aval),)
            else inputs[0]
        ]
    if name in _SAME_AFTER and parameters.get("axis_index_groups") is None:
        over = set(_as_tuple(parameters.get("axes", parameters.get("axis_name"))))
        return (
            [found - over for found in inputs]
            if len(inputs) == outputs
            else [frozenset().union(*inputs) - over] * outputs
        )
    if name == "optimization_barrier":  # each is what it was
        return inputs
    if name == "scan":
        return _scan(equation, inputs, axes)
    if name == "while":
        return _while(parameters, inputs, axes)
    if name == "cond":
        branches = [_walk(branch.jaxpr, inputs[1:], axes) for branch in parameters["branches"]]
        return [inputs[0].union(*found) for found in zip(*branches, strict=True)]
    inner = _inner(parameters)
    if inner is not None and len(inner.invars) == len(inputs) and len(inner.outvars) == outputs:
        return _walk(inner, inputs, axes)
    return [frozenset().union(*inputs)] * outputs


def _scan(
    equation: Any, inputs: list[frozenset[str]], axes: frozenset[str]
) -> list[frozenset[str]]:
    body = equation.params["jaxpr"].jaxpr
    constants, carries = scan_parts(equation)
    carry = inputs[constants : constants + carries]
    while True:  # to the fixed point: a carry varies if it ever does
        found = _walk(body, [*inputs[:constants], *carry, *inputs[constants + carries :]], axes)
        grown = [old | new for old, new in zip(carry, found[:carries], strict=True)]
        if grown == carry:
            return carry + found[carries:]
        carry = grown


def _while(
    parameters: Any, inputs: list[frozenset[str]], axes: frozenset[str]
) -> list[frozenset[str]]:
    of_condition, of_body = parameters["cond_nconsts"], parameters["body_nconsts"]
    constants = inputs[of_condition : of_condition + of_body]
    carry = inputs[of_condition + of_body :]
    while True:
        (stops,) = _walk(parameters["cond_jaxpr"].jaxpr, [*inputs[:of_condition], *carry], axes)
        found = _walk(parameters["body_jaxpr"].jaxpr, [*constants, *carry], axes)
        grown = [old | new | stops for old, new in zip(carry, found, strict=True)]
        if grown == carry:
            return carry
        carry = grown


def _inner(parameters: Any) -> Jaxpr | None:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in parameters:
            inner = parameters[name]
            return inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    return None


def _as_tuple(axes: Any) -> tuple[Any, ...]:
    return tuple(axes) if isinstance(axes, list | tuple) else (axes,)


_SENDS = {
    *_SAME_AFTER,
    "all_to_all",
    "ppermute",
    "psum_scatter",
    "ragged_all_to_all",
    "reduce_scatter",
}


def sends_between(jaxpr: ClosedJaxpr | Jaxpr, axes: Iterable[str]) -> bool:
    """Whether a traced function has a collective over one of the axes."""
    axes = set(axes)
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for equation in inner.eqns:
        parameters = equation.params
        over = _as_tuple(parameters.get("axes", parameters.get("axis_name")))
        if equation.primitive.name in _SENDS and not axes.isdisjoint(over):
            return True
        held = [one for value in parameters.values() for one in _as_tuple(value)]
        if any(isinstance(one, Jaxpr | ClosedJaxpr) and sends_between(one, axes) for one in held):
            return True
    return False


def describe_varying(paths: Sequence[str]) -> str:
    """The error for state that would differ from device to device."""
    return (
        "The loss changes state of the model from the examples at hand: "
        f"{', '.join(f'`{path}`' for path in paths)}. It would differ from device to device. "
        "Compute it from the whole batch: `sl.batch_mean(x)` and `sl.gather_batch(x)`, or a "
        "layer's own option, `nnx.BatchNorm(..., axis_name=<the data axes>)`."
    )
