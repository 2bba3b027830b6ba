"""What single operations do to what is known of examples; `_coupled` walks a loss by these.

The rules here are about arithmetic: which operations keep a total a total (`of_totals`), what a
reduction makes of rows (`reduced_over`), and what elementwise operations make of several arrays.
A total T is a sum over examples. Since T of the whole batch is the sum of the T of all devices,

    a * T,  T1 + T2,  T / n      are totals too, and can be added up over devices afterwards;
    T * T,  n / T,   exp(T)      cannot: they couple the examples.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
from jax.extend.core import Literal

from shardlib.step._examples import (
    Coupling,
    Fact,
    Factor,
    has_row,
    plain,
)
from shardlib.tracing._jaxpr import line_of

# Operations that make a total of a total, whatever their parameters.
LINEAR = {
    "neg", "convert_element_type", "copy", "stop_gradient", "real", "imag", "conj",
    "reduce_precision",
    "sharding_constraint", "optimization_barrier", "broadcast_in_dim", "reshape", "squeeze",
    "expand_dims", "transpose",
    "rev", "slice", "dynamic_slice", "concatenate", "pad", "reduce_sum", "cumsum", "gather",
    "stack",
}  # fmt: skip
# Operations that make a total of several totals.
ADDITIVE = {"add", "sub", "add_any"}
# Operations along one dim, in which each element depends on others of that dim.
SAME_SHAPE_ALONG_AXIS = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
# Reductions by a maximum or a minimum, and the kind of total that they make.
EXTREMES = {"reduce_max": "max", "reduce_min": "min"}
# All operations that remove the dims in their parameter `axes`.
REDUCTIONS = {
    "reduce_sum",
    *EXTREMES,
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
    "argmax",
    "argmin",
}


_SMALLEST = 1e-30  # factor of a sum that may be the inverse of a number of examples


def of_totals(equation: Any, operands: list[Fact]) -> Fact:
    """What is made of totals, perhaps together with what does not depend on examples.

    A total stays one through whatever is linear in it: the sum over devices can then be taken of
    the result as well. Anything else couples the examples that it is a total of.
    """
    name = equation.primitive.name
    totals = [fact for fact in operands if fact.total]
    first = totals[0]
    varying = [fact for fact in operands if fact.varies]
    # Rows and totals together: each example would get something of all the others.
    if varying:
        if _is_running_sum(name, first, varying):
            return first
        return couple(equation, first.reduced)
    if first.total == "sum":
        return _of_sums(equation, operands, totals)
    # The maximum of maxima is one too; the negative of a maximum is not.
    same_kind = len({fact.total for fact in totals}) == 1
    keeps_extreme = name in LINEAR - {"neg"} or name == first.total
    if keeps_extreme and same_kind:
        return first
    return couple(equation, first.reduced)


def _is_running_sum(name: str, total: Fact, varying: list[Fact]) -> bool:
    """Whether a loop that takes one example after the other adds each to a sum.

    Args:
        name: the name of the operation.
        total: what was added up so far.
        varying: operands that depend on an example.
    """
    in_a_loop = all(fact.rows is None for fact in varying)
    return in_a_loop and name in ADDITIVE and total.total == "sum"


def _of_sums(equation: Any, operands: list[Fact], totals: list[Fact]) -> Fact:
    """What is made of sums over examples and of constants.

    Args:
        equation: The operation.
        operands: The facts of all its operands, none of which varies.
        totals: Those of them that are sums.
    """
    name = equation.primitive.name
    first = totals[0]
    # Moving or adding up elements of a sum gives sums again.
    if name in LINEAR:
        return first
    if name in ADDITIVE:
        return replace(first, scaled=all(fact.scaled for fact in totals))
    if _scales(name, operands, totals):
        divisor = 0.0 if first.scaled else _divisor(equation)
        return replace(first, scaled=True, divisor=divisor)
    # The first operand of a selection chooses among the others.
    if name == "select_n" and not operands[0].total:
        return first
    if name in ("scatter-add", "scatter_add", "dynamic_update_slice"):
        # The indices of a scatter, or the update of a slice, are the second operand.
        second_is_total = any(fact.total for fact in operands[1:2])
        if not second_is_total:
            return first
    return couple(equation, first.reduced)


def _scales(name: str, operands: list[Fact], totals: list[Fact]) -> bool:
    """Whether an operation multiplies a total by constants, or divides it by one.

    A product of two totals, or a division by one, is not linear.
    """
    if len(totals) != 1:
        return False
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return True
    return name == "div" and bool(operands[0].total)


def _divisor(equation: Any) -> float:
    """The whole number by which an operation divides a sum, or 0 if that is not known."""
    name = equation.primitive.name
    factors = [operand for operand in equation.invars if isinstance(operand, Literal)]
    if name not in ("div", "mul") or len(factors) != 1:
        return 0.0
    value = factors[0].val
    if np.ndim(value) or np.iscomplexobj(value) or not _SMALLEST < abs(value) < 1 / _SMALLEST:
        return 0.0
    divisor = float(value) if name == "div" else 1 / float(value)
    # The inverse of a whole number was rounded.
    nearest = float(round(divisor))
    return nearest if abs(divisor - nearest) < 1e-5 * abs(divisor) else 0.0


def reduced_over(equation: Any, fact: Fact) -> Fact:
    """What a reduction makes of an array: still rows, a total, or a coupling.

    A reduction that leaves some dim of examples gives sums of groups of examples, which are rows
    too. One over all of them gives a total if it is a sum, a maximum or a minimum.
    """
    name, axes = equation.primitive.name, set(equation.params["axes"])
    if fact.rows is None:
        return fact
    kept = tuple(factors for dim, factors in enumerate(fact.rows) if dim not in axes)
    if not fact.dims & axes or any(map(has_row, kept)):
        return replace(fact, rows=kept)
    if name == "reduce_sum":
        shape = equation.invars[0].aval.shape
        summed = math.prod(shape[axis] for axis in axes)
        return Fact(total="sum", scaled=False, summed=summed, reduced=line_of(equation))
    # A maximum of maxima over devices is that of the whole batch.
    if name in EXTREMES:
        return Fact(total=EXTREMES[name], reduced=line_of(equation))
    return couple(equation, line_of(equation))


def along_axis(equation: Any, fact: Fact, axis: int) -> Fact:
    """An operation along one dim that keeps the shape: among examples it couples them."""
    if axis in fact.dims:
        return couple(equation, line_of(equation))
    return fact


def elementwise(equation: Any, var: Any, operands: list[Fact]) -> Fact:
    """What an operation on corresponding elements makes of arrays, for its output `var`.

    A dim of the result holds examples where one of any operand does. If two operands have theirs
    along different dims, the operation pairs each example with each, which couples them. So do
    examples in another order than that of the batch, combined with examples in its order.
    """
    in_order = {fact.moved for fact in operands if fact.several}
    if len(in_order) > 1:
        return couple(equation, line_of(equation))
    shape = getattr(var.aval, "shape", ())
    rows: list[tuple[Factor, ...]] = list(plain(shape))
    dims: frozenset[int] = frozenset()
    several: frozenset[int] = frozenset()
    for atom, fact in zip(equation.invars, operands, strict=True):
        if fact.rows is None:
            continue
        if len(fact.rows) != len(shape):
            return unknown(equation, operands)
        if several and fact.several and not several & fact.several:
            return couple(equation, line_of(equation))
        # A dim of one may be spread over a longer one by the operation itself.
        full_dims = frozenset(dim for dim in fact.dims if atom.aval.shape[dim] == shape[dim])
        dims |= full_dims
        several |= fact.several
        for dim in full_dims:
            rows[dim] = fact.rows[dim]
    single = any(fact.single for fact in operands)
    return Fact(rows=tuple(rows) if dims else None, moved=True in in_order, single=single)


def unknown(equation: Any, operands: list[Fact]) -> Fact:
    """What an operation that the walk does not know gives, guessed from the shapes.

    Examples stay along the first dim that is as long in the result as in an operand, where it
    holds examples. If there is none the result has no dim of them.
    """
    shape = equation.outvars[0].aval.shape
    for fact in operands:
        for dim in sorted(fact.dims):
            assert fact.rows is not None
            length = math.prod(size for size, _ in fact.rows[dim])
            if dim < len(shape) and shape[dim] == length:
                rows = list(plain(shape))
                rows[dim] = fact.rows[dim]
                return Fact(rows=tuple(rows))
    return Fact(single=any(fact.single for fact in operands))


def couple(equation: Any, reduced: str) -> Fact:
    """The fact that an equation couples examples.

    `reduced` is the line of the reduction over examples that the equation takes, or its own.
    """
    return Fact(coupled=Coupling(equation.primitive.name, line_of(equation), reduced))


def located(fact: Fact, line: str) -> Fact:
    """The fact with a line where it has none.

    Equations of library functions have no line of the user's code; that of the call is the
    nearest.
    """
    if fact.total and not fact.reduced:
        return replace(fact, reduced=line)
    coupling = fact.coupled
    if coupling and not coupling.line:
        reduced = coupling.reduced or line
        return replace(fact, coupled=replace(coupling, line=line, reduced=reduced))
    return fact


def chosen_by(equation: Any, predicate: Fact) -> Fact | None:
    """The coupling by a loop or a branch whose course a reduction over examples decides.

    None if the predicate is no such reduction. A predicate of one example is none.
    """
    if predicate.coupled:
        return predicate
    if predicate.total:
        return couple(equation, predicate.reduced)
    return None
