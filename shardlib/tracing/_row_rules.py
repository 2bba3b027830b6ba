"""How operations are evaluated for some rows of their operands, each by a rule.

A rule gets an equation of a trace and its operands, some of which are there for some rows only. It
evaluates the equation's own primitive on these, and says along which dim the rows of the results
lie:

    transpose  f32[40,64] -> f32[64,40]    the rows along dim 0 lie along dim 1
    reduce_sum f32[40,64] -> f32[64]       refused where rows lie along dim 0: it takes all of them

A rule refuses wherever a result may depend on other rows. Which operation has which rule is listed
at the end.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

_ELEMENTWISE = {
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

    @property
    def has_rows(self) -> bool:
        """Whether it is some rows of a value."""
        return self.dim is not None


Rule: TypeAlias = Callable[[Any, list[Part], Rows], list[Part]]
"""`(equation, operands, rows) -> results`."""


def cut(part: Part, dim: int, rows: Rows) -> Part:
    """The rows of a value along a dim.

    A whole value is cut; what has rows there already is returned as it is. Raises `MixesRowsError`
    where a value has rows along another dim.
    """
    if part.dim == dim:
        return part
    if part.dim is not None:
        raise MixesRowsError(f"rows along dim {part.dim} meet rows along dim {dim}")
    # The whole of it need not exist anywhere.
    if part.spread is not None:
        return _cut_spread(*part.spread, dim, rows)
    return Part(lax.dynamic_slice_in_dim(part.value, rows.start, rows.count, dim), dim)


def _cut_spread(operand: Any, params: Any, dim: int, rows: Rows) -> Part:
    """The rows of a value that is spread by `broadcast_in_dim`, without spreading the others."""
    dims = params["broadcast_dimensions"]
    # What is spread may have rows itself; a dim of one is spread over all of them.
    if dim in dims and jnp.shape(operand)[dims.index(dim)] > 1:
        operand = cut(Part(operand), dims.index(dim), rows).value
    shape = resized(params["shape"], dim, rows.count)
    return Part(lax.broadcast_in_dim(operand, shape, dims), dim)


def _evaluated(equation: Any, values: Sequence[Any], dims: Sequence[int], **changes: Any) -> Any:
    """The results of an equation's primitive, evaluated for some rows.

    Args:
        equation: says which primitive, and its parameters.
        values: its operands, of which those with rows are there for some rows only.
        dims: along which the rows of its results lie.
        changes: parameters that name the sizes of results, for so many rows.
    """
    results = equation.primitive.bind(*values, **{**equation.params, **changes})
    if not equation.primitive.multiple_results:
        results = [results]
    return list(map(Part, results, dims))


def _row_dim(operands: Sequence[Part]) -> int:
    """The dim along which the rows of all operands lie that have some.

    Raises `MixesRowsError` where they lie along several, as in `x + x.T`.
    """
    dims = {operand.dim for operand in operands if operand.dim is not None}
    if len(dims) != 1:
        raise MixesRowsError(f"rows along the dims {sorted(dims)} meet")
    return dims.pop()


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """A shape with another size of one dim.

    >>> resized((40, 64, 16), 0, 2)
    (2, 64, 16)
    """
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
    # The dims of the operand become these ones of the result.
    dim = equation.params["broadcast_dimensions"][operands[0].dim]
    shape = resized(equation.params["shape"], dim, rows.count)
    return _evaluated(equation, [operands[0].value], [dim], shape=shape)


def _reshape(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """A reshape of the dims before the rows and of those after them.

    Their own dim is found again by its size and by how many elements there are before it.
    """
    shape, dim = equation.invars[0].aval.shape, operands[0].dim
    assert dim is not None
    before, new_shape = math.prod(shape[:dim]), equation.params["new_sizes"]
    for new_dim, size in enumerate(new_shape):
        if size == shape[dim] and math.prod(new_shape[:new_dim]) == before:
            sizes = resized(new_shape, new_dim, rows.count)
            return _evaluated(equation, [operands[0].value], [new_dim], new_sizes=sizes)
    raise MixesRowsError("`reshape` joins rows with another dim")


def _transpose(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    dim = equation.params["permutation"].index(operands[0].dim)
    return _evaluated(equation, [operands[0].value], [dim])


def _removing(param: str) -> Rule:
    """The rule of an operation that removes the dims in a parameter."""

    def rule(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
        dim = _row_dim(operands)
        removed = equation.params[param]
        _refuse_dims(equation, dim, removed)
        # The dims before it that are gone no longer count.
        dim -= sum(other < dim for other in removed)
        return _evaluated(equation, [operands[0].value], [dim])

    return rule


def _along(param: str) -> Rule:
    """The rule of an operation of one or several arrays along the dims in a parameter.

    It may be along other dims than that of the rows, which it then treats one by one.
    """

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
    # A slice along other dims, of all rows and each of them, treats rows alike.
    if equation.outvars[0].aval.shape[dim] != rows.total or (strides and strides[dim] != 1):
        raise MixesRowsError("`slice` takes some of the rows")
    limits = resized(limits, dim, rows.count)
    return _evaluated(equation, [operands[0].value], [dim], limit_indices=limits)


def _placed(param: str) -> Rule:
    """The rule of an operation that says over which axes an array is split, as in a parameter."""

    def rule(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
        dim = _row_dim(operands)
        sharding = equation.params[param]
        is_named = isinstance(sharding, jax.sharding.NamedSharding)
        if not is_named or sharding.spec[dim:][:1] not in ((), (None,)):
            raise MixesRowsError(f"`{equation.primitive.name}` splits the rows: {sharding}")
        return _evaluated(equation, [operands[0].value], [dim])

    return rule


def _dot_general(equation: Any, operands: list[Part], rows: Rows) -> list[Part]:
    """A product for each row, or one in which the rows are a dim of the result.

    Refused are sums over the rows, and products of all pairs of rows.
    """
    contracted, batched = equation.params["dimension_numbers"]
    left, right = operands
    for operand, own in zip(operands, contracted, strict=True):
        if operand.dim is not None:
            _refuse_dims(equation, operand.dim, own)
    # Where rows are a batch dim, each row has a product of its own.
    for position, (left_dim, right_dim) in enumerate(zip(*batched, strict=True)):
        if left.dim == left_dim or right.dim == right_dim:
            values = [cut(left, left_dim, rows).value, cut(right, right_dim, rows).value]
            return _evaluated(equation, values, [position])
    if left.has_rows and right.has_rows:
        raise MixesRowsError("`dot_general` multiplies each row by each")
    dim = _dim_of_product(equation, left.dim, right.dim)
    return _evaluated(equation, [left.value, right.value], [dim])


def _dim_of_product(equation: Any, left: int | None, right: int | None) -> int:
    """The dim of a product that comes of a dim of one of its operands alone."""
    contracted, batched = equation.params["dimension_numbers"]
    # A product has the batched dims first, then what is left of its operands' own.
    left_free, right_free = map(_free_dims, equation.invars, contracted, batched)
    if left is not None:
        return len(batched[0]) + left_free.index(left)
    return len(batched[0]) + len(left_free) + right_free.index(right)


def _free_dims(atom: Any, contracted: Sequence[int], batched: Sequence[int]) -> list[int | None]:
    """The dims of an operand that a product neither sums over nor shares with the other one."""
    return [dim for dim in range(len(atom.aval.shape)) if dim not in {*contracted, *batched}]


_REDUCTIONS = (
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or",
    "reduce_xor", "argmax", "argmin",
)  # fmt: skip
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
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
}
"""The rules of single operations, by name; those of elementwise ones are all the same."""
