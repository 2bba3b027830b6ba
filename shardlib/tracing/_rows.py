"""Some rows of a traced function's results, computed from the same rows of its arguments.

An optimizer's update of a stack of layers mostly treats each layer by itself. Then one layer's
results can be computed without the other layers being there:

    the trace, for 40 layers             for the 2 layers from `start` on
    m: f32[40,64,16]                     f32[2,64,16]
    n: f32[40,1,16] = mean(m, dim 1)     f32[2,1,16]
    u: f32[40,64,16] = m / (n + c)       f32[2,64,16]
    s: f32[] = sum(u)                    refused: it needs all of them

Each value is known by the dim along which its rows lie, or is whole. An equation that reads rows is
evaluated by a rule, which says along which dim the rows of its results lie, and refuses if they
depend on other rows. So what is computed is what the trace says; nothing is traced anew, and no
constant of the trace can be another one. An operation that has no rule is refused, too.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal

from shardlib.tracing._jaxpr import JITS, Stretch, open_jaxpr, scan_parts, variables

ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "cbrt", "ceil", "clamp", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos",
    "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
    "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic",
    "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "population_count", "pow",
    "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
}  # fmt: skip
"""Operations of which each result depends on the corresponding elements of the operands only.

The operands have the shape of the result, or none.
"""


class MixesRowsError(Exception):
    """Rows of a result depend on other rows of the arguments, or it cannot be told.

    `equation` is the one of the evaluated jaxpr, which may hold the one that is to blame.
    """

    def __init__(self, reason: str, equation: Any = None) -> None:
        super().__init__(reason)
        self.equation = equation


@dataclass(frozen=True)
class Rows:
    """So many rows, from one on whose number may be known to the running program only."""

    start: Any
    count: int
    total: int  # how many there are in all


@dataclass(frozen=True, eq=False)
class Part:
    """A value: some rows of it, which lie along a dim, or the whole where that is None."""

    value: Any
    dim: int | None = None
    # How a whole value is made of a smaller one, by `broadcast_in_dim`: its rows are made so too.
    spread: tuple[Any, Any] | None = None


def evaluate_rows(
    jaxpr: Jaxpr, consts: Sequence[Any], parts: Sequence[Part], rows: Rows
) -> list[Part]:
    """Evaluate a jaxpr for some rows.

    Raises `MixesRowsError` where its results for these rows take more than these rows.
    """
    known: dict[Any, Part] = dict(zip(jaxpr.invars, parts, strict=True))
    for var, value in zip(jaxpr.constvars, consts, strict=True):
        known[var] = Part(value)
    for equation in jaxpr.eqns:
        operands = [_part_of(atom, known) for atom in equation.invars]
        if all(operand.dim is None for operand in operands):
            results = _whole(jaxpr, equation, operands)
        else:
            results = _by_rule(equation, operands, rows)
        known.update(zip(equation.outvars, results, strict=True))
    return [_part_of(atom, known) for atom in jaxpr.outvars]


def cut(part: Part, dim: int, rows: Rows) -> Part:
    """The rows of a value that is whole, along a dim; those of one that has rows there already."""
    if part.dim == dim:
        return part
    if part.dim is not None:
        raise MixesRowsError(f"rows along dim {part.dim} meet rows along dim {dim}")
    if part.spread is not None:
        return _cut_spread(*part.spread, dim, rows)
    return Part(lax.dynamic_slice_in_dim(part.value, rows.start, rows.count, dim), dim)


def _cut_spread(operand: Any, params: Any, dim: int, rows: Rows) -> Part:
    """The rows of a value that is spread by `broadcast_in_dim`, without spreading the others."""
    dims = params["broadcast_dimensions"]
    if dim in dims and jnp.shape(operand)[dims.index(dim)] > 1:
        operand = cut(Part(operand), dims.index(dim), rows).value
    shape = _resized(params["shape"], dim, rows.count)
    return Part(lax.broadcast_in_dim(operand, shape, dims), dim)


def _part_of(atom: Any, known: dict[Any, Part]) -> Part:
    if isinstance(atom, Literal):
        return Part(atom.val)
    return known[atom]


def _whole(jaxpr: Jaxpr, equation: Any, operands: list[Part]) -> list[Part]:
    """The results of an equation that reads no rows."""
    # An equation may read a variable twice, and JAX's evaluator takes each once.
    values: dict[Any, Any] = {}
    for atom, operand in zip(equation.invars, operands, strict=True):
        if not isinstance(atom, Literal):
            values[atom] = operand.value
    outputs = variables(equation.outvars)
    results = Stretch(jaxpr, [equation], list(values), outputs)(list(values.values()))
    if equation.primitive.name == "broadcast_in_dim":
        return [Part(results[0], spread=(operands[0].value, equation.params))]
    return [Part(result) for result in results]


def _by_rule(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """The results of an equation that reads rows."""
    name = equation.primitive.name
    if name in ELEMENTWISE:
        rule: Callable[..., list[Part]] | None = _elementwise
    else:
        rule = _RULES.get(name)
    try:
        if rule is None:
            raise MixesRowsError(f"`{name}` may mix rows")
        return rule(equation, operands, rows)
    except MixesRowsError as error:
        raise MixesRowsError(str(error), equation) from error


def _evaluated(equation: Any, values: Sequence[Any], dims: Sequence[int], **changes: Any) -> Any:
    """The results of an equation's primitive, with other parameters where they name sizes."""
    results = equation.primitive.bind(*values, **{**equation.params, **changes})
    if not equation.primitive.multiple_results:
        results = [results]
    return [Part(result, dim) for result, dim in zip(results, dims, strict=True)]


def _row_dim(operands: Sequence[Part]) -> int:
    """The dim along which the rows of all operands lie that have some."""
    dims = {operand.dim for operand in operands if operand.dim is not None}
    if len(dims) != 1:
        raise MixesRowsError(f"rows along the dims {sorted(dims)} meet")
    return dims.pop()


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _refuse_dims(equation: Any, dim: int, dims: Sequence[int]) -> None:
    if dim in dims:
        raise MixesRowsError(f"`{equation.primitive.name}` goes over all rows")


# The dims of results


def _elementwise(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    dim = _row_dim(operands)
    values = []
    for operand in operands:
        # An operation may spread a scalar, or a dim of one, over all rows by itself.
        if operand.dim is not None or jnp.shape(operand.value)[dim:][:1] not in ((), (1,)):
            operand = cut(operand, dim, rows)
        values.append(operand.value)
    return _evaluated(equation, values, [dim])


def _broadcast_in_dim(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    dim = equation.params["broadcast_dimensions"][operands[0].dim]
    shape = _resized(equation.params["shape"], dim, rows.count)
    return _evaluated(equation, [operands[0].value], [dim], shape=shape)


def _reshape(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """A reshape of the dims before the rows and of those after them."""
    shape, dim = equation.invars[0].aval.shape, operands[0].dim
    assert dim is not None
    before, new_shape = math.prod(shape[:dim]), equation.params["new_sizes"]
    for new_dim, size in enumerate(new_shape):
        if size == shape[dim] and math.prod(new_shape[:new_dim]) == before:
            sizes = _resized(new_shape, new_dim, rows.count)
            return _evaluated(equation, [operands[0].value], [new_dim], new_sizes=sizes)
    raise MixesRowsError("`reshape` joins rows with another dim")


def _transpose(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    dim = equation.params["permutation"].index(operands[0].dim)
    return _evaluated(equation, [operands[0].value], [dim])


def _removing(param: str) -> Callable[..., list[Part]]:
    """The rule of an operation that removes the dims in a parameter."""

    def rule(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
        dim = _row_dim(operands)
        removed = equation.params[param]
        _refuse_dims(equation, dim, removed)
        dim -= sum(other < dim for other in removed)
        return _evaluated(equation, [operands[0].value], [dim])

    return rule


def _along(param: str) -> Callable[..., list[Part]]:
    """The rule of an operation of one or several arrays along the dims in a parameter."""

    def rule(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
        dim = _row_dim(operands)
        along = equation.params[param]
        _refuse_dims(equation, dim, along if isinstance(along, tuple) else (along,))
        values = [cut(operand, dim, rows).value for operand in operands]
        return _evaluated(equation, values, [dim] * len(equation.outvars))

    return rule


def _slice(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    dim = _row_dim(operands)
    limits, strides = equation.params["limit_indices"], equation.params["strides"]
    if equation.outvars[0].aval.shape[dim] != rows.total or (strides and strides[dim] != 1):
        raise MixesRowsError("`slice` takes some of the rows")
    limits = _resized(limits, dim, rows.count)
    return _evaluated(equation, [operands[0].value], [dim], limit_indices=limits)


def _dot_general(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """A product for each row, or one in which the rows are a dim of the result."""
    contracted, batched = equation.params["dimension_numbers"]
    left, right = operands
    for operand, own in zip(operands, contracted, strict=True):
        if operand.dim is not None:
            _refuse_dims(equation, operand.dim, own)
    for position, (left_dim, right_dim) in enumerate(zip(*batched, strict=True)):
        if left.dim == left_dim or right.dim == right_dim:
            values = [cut(left, left_dim, rows).value, cut(right, right_dim, rows).value]
            return _evaluated(equation, values, [position])
    if left.dim is not None and right.dim is not None:
        raise MixesRowsError("`dot_general` multiplies each row by each")
    dim = len(batched[0])
    for operand, atom, own, pairs in zip(
        operands, equation.invars, contracted, batched, strict=True
    ):
        taken = {*own, *pairs}
        free = [at for at in range(len(atom.aval.shape)) if at not in taken]
        if operand.dim is not None:
            dim += free.index(operand.dim)
            break
        dim += len(free)
    return _evaluated(equation, [left.value, right.value], [dim])


def _placed(param: str) -> Callable[..., list[Part]]:
    """The rule of an operation that says over which axes an array is split, as in a parameter."""

    def rule(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
        dim = _row_dim(operands)
        sharding = equation.params[param]
        is_named = isinstance(sharding, jax.sharding.NamedSharding)
        if not is_named or sharding.spec[dim:][:1] not in ((), (None,)):
            raise MixesRowsError(f"`{equation.primitive.name}` splits the rows: {sharding}")
        return _evaluated(equation, [operands[0].value], [dim])

    return rule


# Calls, branches and loops


def _call(param: str) -> Callable[..., list[Part]]:
    """The rule of an operation that calls the function in a parameter."""

    def rule(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
        return _evaluate_function(equation.params[param], operands, rows)

    return rule


def _evaluate_function(function: Any, parts: Sequence[Part], rows: Rows) -> list[Part]:
    return evaluate_rows(open_jaxpr(function), getattr(function, "consts", []), parts, rows)


def _dims_of(function: Any, parts: Sequence[Part], rows: Rows) -> list[int | None]:
    """The dims along which the rows of a function's results lie; nothing is computed."""
    dims: list[int | None] = []

    def values_of_results(values: list[Any]) -> list[Any]:
        given = _with_values(parts, values)
        results = _evaluate_function(function, given, rows)
        dims.extend(result.dim for result in results)
        return [result.value for result in results]

    jax.eval_shape(values_of_results, [part.value for part in parts])
    return dims


def _with_values(parts: Sequence[Part], values: Sequence[Any]) -> list[Part]:
    """The same parts of other values, of which nobody knows what they were made of."""
    return [Part(value, part.dim) for part, value in zip(parts, values, strict=True)]


def _aligned(parts: Sequence[Part], dims: Sequence[int | None], rows: Rows) -> list[Part]:
    """Parts whose rows lie along these dims; a value that is to be whole must be."""
    aligned = []
    for part, dim in zip(parts, dims, strict=True):
        if dim is not None:
            part = cut(part, dim, rows)
        elif part.dim is not None:
            raise MixesRowsError("a loop or a branch makes rows of a whole value")
        aligned.append(part)
    return aligned


def _settled(
    function: Any,
    before: Sequence[Part],
    init: Sequence[Part],
    after: Sequence[Part],
    rows: Rows,
) -> list[Part]:
    """The first carries of a loop, with rows where its body makes rows of them.

    Args:
        function: the body, of `before`, the carries and `after`; its first results are carries.
        before: what the body reads before the carries.
        init: the first carries.
        after: what the body reads after them, as one iteration gets it.
        rows: the rows that are evaluated.
    """
    settled = list(init)
    # Each round but the last finds another carry that has rows.
    for _ in range(len(settled) + 1):
        dims = _dims_of(function, [*before, *settled, *after], rows)[: len(settled)]
        found = False
        for position, (carry, dim) in enumerate(zip(settled, dims, strict=True)):
            if carry.dim is None and dim is not None:
                settled[position], found = cut(carry, dim, rows), True
        if not found:
            break
    return settled


def _values(parts: Sequence[Part]) -> list[Any]:
    return [part.value for part in parts]


def _scan(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """A loop in which each iteration treats rows by themselves; it does not go over the rows."""
    body = equation.params["jaxpr"]
    num_consts, num_carry = scan_parts(equation)
    consts, xs = operands[:num_consts], operands[num_consts + num_carry :]
    one_of_xs = []
    for x, var in zip(xs, body.jaxpr.invars[num_consts + num_carry :], strict=True):
        if x.dim == 0:
            raise MixesRowsError("`scan` goes over the rows")
        dim, shape = None, var.aval.shape
        if x.dim is not None:
            dim = x.dim - 1
            shape = _resized(shape, dim, rows.count)
        one_of_xs.append(Part(jax.ShapeDtypeStruct(shape, var.aval.dtype), dim))
    init = operands[num_consts : num_consts + num_carry]
    carries = _settled(body, consts, init, one_of_xs, rows)
    dims = [carry.dim for carry in carries]
    out_dims = _dims_of(body, [*consts, *carries, *one_of_xs], rows)

    def step(values: list[Any], scanned: list[Any]) -> tuple[list[Any], list[Any]]:
        given = [*consts, *_with_values(carries, values), *_with_values(one_of_xs, scanned)]
        results = _evaluate_function(body, given, rows)
        next_carries = _aligned(results[:num_carry], dims, rows)
        return _values(next_carries), _values(results[num_carry:])

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    last, stacked = lax.scan(step, _values(carries), _values(xs), **options)
    results = _with_values(carries, last)
    for value, dim in zip(stacked, out_dims[num_carry:], strict=True):
        # Stacked results have one more dim in front.
        results.append(Part(value, None if dim is None else dim + 1))
    return results


def _while(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """A loop that is not ended by rows."""
    params = equation.params
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    condition_consts = operands[:of_condition]
    body_consts = operands[of_condition : of_condition + of_body]
    init = operands[of_condition + of_body :]
    carries = _settled(params["body_jaxpr"], body_consts, init, [], rows)
    dims = [carry.dim for carry in carries]
    if _dims_of(params["cond_jaxpr"], [*condition_consts, *carries], rows) != [None]:
        raise MixesRowsError("`while` is ended by rows")

    def goes_on(values: list[Any]) -> Any:
        given = [*condition_consts, *_with_values(carries, values)]
        return _evaluate_function(params["cond_jaxpr"], given, rows)[0].value

    def step(values: list[Any]) -> list[Any]:
        given = [*body_consts, *_with_values(carries, values)]
        results = _evaluate_function(params["body_jaxpr"], given, rows)
        return _values(_aligned(results, dims, rows))

    return _with_values(carries, lax.while_loop(goes_on, step, _values(carries)))


def _cond(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """A branch that is not chosen by rows."""
    index, arguments = operands[0], operands[1:]
    if index.dim is not None:
        raise MixesRowsError("`cond` is chosen by rows")
    functions = equation.params["branches"]
    dims: list[int | None] = [None] * len(equation.outvars)
    for function in functions:
        for position, dim in enumerate(_dims_of(function, arguments, rows)):
            if dim is not None:
                dims[position] = dim

    def branch(function: Any) -> Callable[..., list[Any]]:
        def evaluated(*values: Any) -> list[Any]:
            results = _evaluate_function(function, _with_values(arguments, values), rows)
            return _values(_aligned(results, dims, rows))

        return evaluated

    branches = [branch(function) for function in functions]
    results = lax.switch(index.value, branches, *_values(arguments))
    return [Part(value, dim) for value, dim in zip(results, dims, strict=True)]


_REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "reduce_xor", "argmax", "argmin",
)  # fmt: skip
_RULES: dict[str, Callable[..., list[Part]]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _removing("dimensions"),
    **dict.fromkeys(_REDUCTIONS, _removing("axes")),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    "concatenate": _along("dimension"),
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    "slice": _slice,
    "dot_general": _dot_general,
    "reshard": _placed("dst_sharding"),
    "sharding_constraint": _placed("sharding"),
    **dict.fromkeys(JITS, _call("jaxpr")),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_vjp_call": _call("call_jaxpr"),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
