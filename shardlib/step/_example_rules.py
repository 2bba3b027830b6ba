"""What single operations do to what is known of examples; `_coupled` walks a loss by these."""

import math
from dataclasses import replace
from typing import Any

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
ADDITIVE = {"add", "sub", "add_any"}
SAME_SHAPE_ALONG_AXIS = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"}
EXTREMES = {"reduce_max": "max", "reduce_min": "min"}
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


def of_totals(equation: Any, given: list[Fact]) -> Fact:
    """What is made of totals, perhaps together with what does not depend on examples."""
    name = equation.primitive.name
    totals = [fact for fact in given if fact.total]
    first = totals[0]
    others_vary = [fact for fact in given if fact.varies]
    if others_vary:
        in_a_loop = all(fact.rows is None for fact in others_vary)
        if name in ADDITIVE and in_a_loop and first.total == "sum":
            return first
        return couple(equation, first.reduced)
    if first.total != "sum":
        same = name in LINEAR - {"neg"} or name == first.total
        return (
            first
            if same and len({fact.total for fact in totals}) == 1
            else couple(equation, first.reduced)
        )
    if name in LINEAR:
        return first
    scaled = replace(first, scaled=True)
    numerator = given[0]
    if name in ADDITIVE:
        return replace(first, scaled=all(fact.scaled for fact in totals))
    if name in ("mul", "dot_general", "conv_general_dilated") and len(totals) == 1:
        return scaled
    if name == "div" and len(totals) == 1 and numerator.total:
        return scaled
    if name == "select_n" and not given[0].total:
        return first
    if name in ("scatter-add", "scatter_add", "dynamic_update_slice") and not any(
        fact.total for fact in given[1:2]
    ):
        return first
    return couple(equation, first.reduced)


def reduced_over(equation: Any, fact: Fact) -> Fact:
    name, axes = equation.primitive.name, set(equation.params["axes"])
    if fact.rows is None:
        return fact
    left = tuple(factors for dim, factors in enumerate(fact.rows) if dim not in axes)
    if not fact.dims & axes or any(map(has_row, left)):  # sums of groups of examples are rows too
        return replace(fact, rows=left)
    if name == "reduce_sum":
        return Fact(total="sum", scaled=False, reduced=line_of(equation))
    if name in EXTREMES:
        return Fact(total=EXTREMES[name], reduced=line_of(equation))
    return couple(equation, line_of(equation))


def along_axis(equation: Any, fact: Fact, axis: int) -> Fact:
    """An operation along one dim that keeps the shape: among examples it couples them."""
    return couple(equation, line_of(equation)) if axis in fact.dims else fact


def elementwise(equation: Any, var: Any, given: list[Fact]) -> Fact:
    shape = getattr(var.aval, "shape", ())
    rows: list[tuple[Factor, ...]] = list(plain(shape))
    dims: frozenset[int] | None = None
    several: frozenset[int] = frozenset()
    for atom, fact in zip(equation.invars, given, strict=True):
        if fact.rows is None:
            continue
        if len(fact.rows) != len(shape):
            return unknown(equation, given)
        # A dim of one may be spread over a longer one by the operation itself.
        here = frozenset(dim for dim in fact.dims if atom.aval.shape[dim] == shape[dim])
        if several and fact.several and not several & fact.several:
            return couple(equation, line_of(equation))  # each example against each
        dims, several = (dims or frozenset()) | here, several | fact.several
        for dim in here:
            rows[dim] = fact.rows[dim]
    single = any(fact.single for fact in given)
    return Fact(rows=tuple(rows) if dims else None, single=single)


def unknown(equation: Any, given: list[Fact]) -> Fact:
    """Of an operation that the walk does not know: examples stay where a dim looks as if they
    did.
    """
    shape = equation.outvars[0].aval.shape
    for fact in given:
        for dim in sorted(fact.dims):
            assert fact.rows is not None
            size = math.prod(size for size, _ in fact.rows[dim])
            if dim < len(shape) and shape[dim] == size:
                rows = list(plain(shape))
                rows[dim] = fact.rows[dim]
                return Fact(rows=tuple(rows))
    return Fact(single=any(fact.single for fact in given))


def couple(equation: Any, reduced: str) -> Fact:
    return Fact(coupled=Coupling(equation.primitive.name, line_of(equation), reduced))


def located(fact: Fact, line: str) -> Fact:
    """The fact with a line where it has none."""
    if fact.total and not fact.reduced:
        return replace(fact, reduced=line)
    if fact.coupled and not fact.coupled.line:
        found = fact.coupled
        return replace(fact, coupled=replace(found, line=line, reduced=found.reduced or line))
    return fact


def chosen_by(equation: Any, predicate: Fact) -> Fact | None:
    """What a loop or a branch gives whose course a reduction over examples decides."""
    if predicate.coupled:
        return predicate
    return couple(equation, predicate.reduced) if predicate.total else None
