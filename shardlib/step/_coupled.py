"""Losses in which examples depend on each other: found in the traced loss, since each device has
only some of them.

A step adds up `total` and `weight` over devices and microbatches. That is the loss of the whole
batch if the total is a sum over examples. A loss that first reduces over the examples at hand and
then does anything else with the result is another loss on every mesh: `y - y.mean(0)`, a ratio of
two sums, a maximum, a branch chosen by a sum.

The walk below follows which dims of each value hold examples (`Rows`). Reducing such dims by a sum
gives a *total*, which may be added, scaled and returned. A total that has been added up over all
devices, as `sl.batch_mean` does, is a constant to the walk. Whatever else is made of a total is
*coupled*. Unknown operations are given the benefit of the doubt: the walk warns, it does not prove.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.modeling._random import is_row_key, rows_of
from shardlib.step._example_rules import (
    REDUCTIONS,
    SAME_SHAPE_ALONG_AXIS,
    along_axis,
    chosen_by,
    couple,
    elementwise,
    located,
    of_totals,
    reduced_over,
    unknown,
)
from shardlib.step._examples import (
    CONSTANT,
    Fact,
    Factor,
    factors_of,
    has_row,
    joined,
    one_of,
    plain,
    reshaped,
    resized,
    stacked,
    with_examples,
    with_rows,
)
from shardlib.tracing._jaxpr import line_of, scan_parts

_COLLECTIVE_OF = {"sum": ("psum", "psum_invariant"), "max": ("pmax",), "min": ("pmin",)}


def facts(jaxpr: ClosedJaxpr, inputs: Sequence[Fact], axes: Sequence[str]) -> list[Fact]:
    """What is known of each output of a traced function, given the facts of its inputs.

    `axes` are the manual axes that split the batch: what is reduced over all of them too is the
    same on every device.
    """
    return _Walk(frozenset(axes)).jaxpr(jaxpr.jaxpr, inputs)


class _Walk:
    def __init__(self, axes: frozenset[str]) -> None:
        self.axes = axes

    def jaxpr(self, jaxpr: Jaxpr, inputs: Sequence[Fact]) -> list[Fact]:
        known: dict[Any, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Fact:
            return CONSTANT if isinstance(atom, Literal) else known.get(atom, CONSTANT)

        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            if all(fact == CONSTANT for fact in given) and not _draws(equation):
                continue
            known.update(zip(equation.outvars, self.equation(equation, given), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, given: list[Fact]) -> list[Fact]:
        count = len(equation.outvars)
        name = equation.primitive.name
        held = {"scan": self.scan, "while": self.loop, "cond": self.branches}.get(name)
        if held is not None:
            return held(equation, given)
        inner = _inner(equation)
        if inner is not None:
            return self.call(equation, inner, given)
        if coupled := next((fact for fact in given if fact.coupled), None):
            return [coupled] * count
        rule: Callable[..., Fact | list[Fact]] | None = getattr(
            self, f"_{name.replace('-', '_')}", None
        )
        if name in _COLLECTIVES:
            return [self.collective(equation, fact) for fact in _spread(given, count)]
        if any(fact.total for fact in given):
            return [of_totals(equation, given)] * count
        if rule is not None:
            found = rule(equation, given)
            return found if isinstance(found, list) else [found] * count
        if name in SAME_SHAPE_ALONG_AXIS:
            return [along_axis(equation, given[0], equation.params["axis"])] * count
        if name in REDUCTIONS:
            return [reduced_over(equation, given[0])] * count
        return [elementwise(equation, var, given) for var in equation.outvars]

    # What holds functions

    def scan(self, equation: Any, given: list[Fact]) -> list[Fact]:
        body = equation.params["jaxpr"].jaxpr
        constants, carries = scan_parts(equation)
        before = given[:constants]
        carry = given[constants : constants + carries]
        scanned = given[constants + carries :]
        over_examples = any(fact.rows is not None and has_row(fact.rows[0]) for fact in scanned)
        each = [one_of(fact) for fact in scanned]
        while True:
            found = self.jaxpr(body, [*before, *carry, *each])
            grown = [
                joined(old, new, over_examples)
                for old, new in zip(carry, found[:carries], strict=True)
            ]
            if grown == carry:
                break
            carry = grown
        length = equation.params["length"]
        return [*carry, *(stacked(fact, length, over_examples) for fact in found[carries:])]

    def loop(self, equation: Any, given: list[Fact]) -> list[Fact]:
        of_condition, of_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        conditions, constants = given[:of_condition], given[of_condition : of_condition + of_body]
        carry = given[of_condition + of_body :]
        while True:
            (stops,) = self.jaxpr(equation.params["cond_jaxpr"].jaxpr, [*conditions, *carry])
            found = self.jaxpr(equation.params["body_jaxpr"].jaxpr, [*constants, *carry])
            if chosen := chosen_by(equation, stops):
                return [chosen] * len(carry)
            grown = [joined(old, new, False) for old, new in zip(carry, found, strict=True)]
            if grown == carry:
                return carry
            carry = grown

    def branches(self, equation: Any, given: list[Fact]) -> list[Fact]:
        if chosen := chosen_by(equation, given[0]):
            return [chosen] * len(equation.outvars)
        branches = [self.jaxpr(branch.jaxpr, given[1:]) for branch in equation.params["branches"]]
        outputs = branches[0]
        for other in branches[1:]:
            outputs = [joined(one, two, False) for one, two in zip(outputs, other, strict=True)]
        return outputs

    def call(self, equation: Any, inner: Jaxpr, given: list[Fact]) -> list[Fact]:
        # Inside a `shard_map` arrays are smaller.
        given = [resized(fact, var.aval) for fact, var in zip(given, inner.invars, strict=True)]
        found = self.jaxpr(inner, given)
        found = [resized(fact, var.aval) for fact, var in zip(found, equation.outvars, strict=True)]
        # What was traced before, for another call, has no line of this one.
        return [located(fact, line_of(equation)) for fact in found]

    # What goes between devices

    def collective(self, equation: Any, fact: Fact) -> Fact:
        parameters, name = equation.params, equation.primitive.name
        over = parameters.get("axes", parameters.get("axis_name"))
        over = set(over) if isinstance(over, list | tuple) else {over}
        if not self.axes <= over or parameters.get("axis_index_groups") is not None:
            return resized(fact, equation.outvars[0].aval)
        if fact.coupled:
            return fact
        if name.startswith("all_gather") or (fact.total and name in _COLLECTIVE_OF[fact.total]):
            return CONSTANT
        return resized(fact, equation.outvars[0].aval)

    # What moves elements

    def _reshape(self, equation: Any, given: list[Fact]) -> Fact:
        return with_rows(given[0], reshaped(given[0].rows, equation.outvars[0].aval.shape))

    def _broadcast_in_dim(self, equation: Any, given: list[Fact]) -> Fact:
        fact, places = given[0], equation.params["broadcast_dimensions"]
        if fact.rows is None:
            return fact
        rows = list(plain(equation.outvars[0].aval.shape))
        for factors, place in zip(fact.rows, places, strict=True):
            if has_row(factors):
                rows[place] = factors
        return replace(fact, rows=tuple(rows))

    def _transpose(self, equation: Any, given: list[Fact]) -> Fact:
        rows = given[0].rows
        if rows is None:
            return given[0]
        return replace(given[0], rows=tuple(rows[dim] for dim in equation.params["permutation"]))

    def _squeeze(self, equation: Any, given: list[Fact]) -> Fact:
        fact, gone = given[0], equation.params["dimensions"]
        if fact.rows is None:
            return fact
        return with_rows(
            fact, tuple(factors for dim, factors in enumerate(fact.rows) if dim not in gone)
        )

    def _moved(self, equation: Any, given: list[Fact]) -> Fact:
        """Some of the elements of an array, or more of them, in the same dims."""
        fact = given[0]
        if fact.rows is None:
            return unknown(equation, given)
        return resized(fact, equation.outvars[0].aval)

    _slice = _dynamic_slice = _pad = _rev = _dynamic_update_slice = _moved

    def _concatenate(self, equation: Any, given: list[Fact]) -> Fact:
        shape, dim = equation.outvars[0].aval.shape, equation.params["dimension"]
        dims: set[int] = set()
        for fact in given:
            dims |= fact.dims
        example = next((fact for fact in given if fact.rows is not None), given[0])
        if example.rows is None:
            return elementwise(equation, equation.outvars[0], given)
        rows = [
            example.rows[d] if d in dims and d != dim else ((size, False),)
            for d, size in enumerate(shape)
        ]
        if dim in dims:
            rows[dim] = ((shape[dim], True),)
            # Several views of the same examples.
            if len({atom.aval.shape for atom in equation.invars}) == 1:
                rows[dim] = ((len(given), False), *example.rows[dim])
        return replace(example, rows=tuple(rows))

    def _stack(self, equation: Any, given: list[Fact]) -> Fact:
        fact = next((one for one in given if one.rows is not None), given[0])
        if fact.rows is None:
            return Fact(single=any(one.single for one in given))
        rows, axis = list(fact.rows), equation.params["axis"]
        rows.insert(axis, ((len(given), False),))
        return replace(fact, rows=tuple(rows))

    def _gather(self, equation: Any, given: list[Fact]) -> Fact:
        operand, indices = given
        dims = equation.params["dimension_numbers"]
        shape = equation.outvars[0].aval.shape
        rows = list(plain(shape))
        in_place = [dim for dim in range(len(shape)) if dim not in dims.offset_dims]
        passed = [
            dim
            for dim in range(len(equation.invars[0].aval.shape))
            if dim not in (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
        ]
        if indices.rows is not None:
            for place, factors in zip(in_place, indices.rows[:-1], strict=True):
                rows[place] = factors
        elif operand.dims - set(passed):  # examples taken by numbers that do not depend on them
            for place in in_place:
                rows[place] = ((shape[place], True),)
        for place, dim in zip(dims.offset_dims, passed, strict=True):
            if dim in operand.dims and indices.rows is None:
                rows[place] = ((shape[place], True),)
        return with_rows(Fact(rows=(), single=operand.single or indices.single), tuple(rows))

    def _scatter(self, equation: Any, given: list[Fact]) -> Fact:
        operand, indices, updates = given
        if operand.rows is not None:
            return operand
        shape = equation.outvars[0].aval.shape
        dims = equation.params["dimension_numbers"]
        rows = list(plain(shape))
        for place, dim in zip(
            dims.operand_batching_dims, dims.scatter_indices_batching_dims, strict=True
        ):
            if dim in indices.dims:
                rows[place] = factors_of(indices, dim, equation.invars[1].aval.shape)
        if any(map(has_row, rows)):
            return Fact(rows=tuple(rows))
        lengths = {
            atom.aval.shape[dim]
            for atom, fact in zip(equation.invars, given, strict=True)
            for dim in fact.dims
        }
        if shape and shape[0] in lengths:  # written row by row, most likely
            return with_examples(shape)
        if not (indices.varies or updates.varies):
            return operand
        return Fact(total="sum", scaled=False, reduced=line_of(equation))

    _scatter_add = _scatter

    # What multiplies

    def _dot_general(self, equation: Any, given: list[Fact]) -> Fact:
        (left_summed, right_summed), (left_batch, right_batch) = equation.params[
            "dimension_numbers"
        ]
        sides = ((given[0], left_summed, left_batch), (given[1], right_summed, right_batch))
        summed = any(fact.dims & set(over) for fact, over, _ in sides)
        free = [fact.several - set(over) - set(batch) for fact, over, batch in sides]
        batch_rows = given[0].dims & set(left_batch) or given[1].dims & set(right_batch)
        if (all(free) and not batch_rows) or (summed and any(free)):
            return couple(equation, line_of(equation))
        if summed and not batch_rows:
            # A product with what is no example scales, as a mean by a vector of 1/n does.
            scaled = not all(fact.varies for fact in given)
            return Fact(total="sum", scaled=scaled, reduced=line_of(equation))
        rows: list[tuple[Factor, ...]] = []
        shapes = [atom.aval.shape for atom in equation.invars]
        for left, right in zip(left_batch, right_batch, strict=True):
            rows.append(
                factors_of(given[0], left, shapes[0])
                if left in given[0].dims
                else factors_of(given[1], right, shapes[1])
            )
        for (fact, over, batch), shape in zip(sides, shapes, strict=True):
            rows += [
                factors_of(fact, dim, shape)
                for dim in range(len(shape))
                if dim not in (*over, *batch)
            ]
        return with_rows(Fact(rows=(), single=any(fact.single for fact in given)), tuple(rows))

    def _conv_general_dilated(self, equation: Any, given: list[Fact]) -> Fact:
        numbers = equation.params["dimension_numbers"]
        images, kernel = given
        shape = equation.outvars[0].aval.shape
        if kernel.varies:  # the derivative to a kernel: a sum over images
            return Fact(total="sum", scaled=False, reduced=line_of(equation))
        if images.rows is None:
            return images
        if images.dims - {numbers.lhs_spec[0]}:
            return Fact(total="sum", scaled=False, reduced=line_of(equation))
        rows = list(plain(shape))
        rows[numbers.out_spec[0]] = images.rows[numbers.lhs_spec[0]]
        return replace(images, rows=tuple(rows))

    # What sorts and draws

    def _sort(self, equation: Any, given: list[Fact]) -> list[Fact]:
        fact = next((one for one in given if one.varies), given[0])
        return [along_axis(equation, fact, equation.params["dimension"])] * len(equation.outvars)

    def _top_k(self, equation: Any, given: list[Fact]) -> Fact:
        fact = given[0]
        if fact.rows is None:
            return fact
        if len(fact.rows) - 1 in fact.dims:
            return couple(equation, line_of(equation))
        rows = (*fact.rows[:-1], ((equation.outvars[0].aval.shape[-1], False),))
        return replace(fact, rows=rows)

    def _random_bits(self, equation: Any, given: list[Fact]) -> Fact:
        shape, keys = equation.outvars[0].aval.shape, given[0]
        if keys.rows is not None:
            return replace(keys, rows=(*keys.rows, *plain(shape[len(keys.rows) :])))
        return with_examples(shape) if shape[:1] == (rows_of(equation.invars[0].aval),) else keys

    _random_split = _random_bits


_COLLECTIVES = {
    "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "ppermute",
    "all_to_all",
    "reduce_scatter", "psum_scatter",
}  # fmt: skip


def _draws(equation: Any) -> bool:
    """Whether an equation draws a row for each example."""
    return equation.primitive.name in ("random_bits", "random_split") and is_row_key(
        equation.invars[0].aval
    )


def _spread(given: list[Fact], count: int) -> list[Fact]:
    return given if len(given) == count else [given[0]] * count


def _inner(equation: Any) -> Jaxpr | None:
    """The function that an equation calls with its own inputs, if it is of that kind."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(name)
        if inner is not None:
            inner = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
            same = len(inner.invars) == len(equation.invars) and len(inner.outvars) == len(
                equation.outvars
            )
            return inner if same else None
    return None


def describe_coupled(name: str, fact: Fact, weighted: bool, accumulate: int) -> str:
    """The warning that the loss, or a metric, is not a mean over examples; nothing if it is one, as
    far as can be seen.
    """
    what = "The loss" if name == "loss" else f"The metric `{name}`"
    if fact.coupled:
        found = fact.coupled
        reduced = (
            f", reduced at {found.reduced},"
            if found.reduced and found.reduced != found.line
            else ""
        )
        at = f" at {found.line}" if found.line else ""
        problem = (
            f"makes the examples depend on each other: what they have in common{reduced} goes into "
            f"`{found.operation}`{at}"
        )
    elif fact.total in ("max", "min"):
        problem = (
            f"is a {fact.total}imum over the examples at hand, made at "
            f"{fact.reduced or 'an unknown line'}"
        )
    elif fact.total and not fact.scaled and not weighted:
        problem = (
            f"is a sum over the examples at hand, made at {fact.reduced or 'an unknown line'}, and "
            "not their mean"
        )
        return (
            f"{what} {problem}. A scalar is taken for the mean over equally many examples on each "
            "device and in each microbatch, so this one would depend on how many these are. Return "
            "`sl.weighted_mean(total, weight)`, whose totals are added up over devices and divided "
            "once, or a mean."
        )
    else:
        return ""
    alone = "`sl.Strategy(manual=())`" + (", with `accumulate=1`" if accumulate > 1 else "")
    return (
        f"{what} {problem}. Each device, and each microbatch, has examples of its own, so the "
        "result depends on how many there are. Of a mean with unequal weights return the two sums, "
        "`sl.weighted_mean(total, weight)`. For a statistic of the whole batch use "
        "`sl.batch_mean(x)` or `sl.gather_batch(x)`. Or leave the batch to the partitioner, which "
        f"sees all of it: {alone}."
    )
