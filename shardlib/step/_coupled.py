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

    rows  --- sum over examples --->  total  --- psum over all data axes --->  constant
      |                                 |
      '-- sort, argmax, prod ... ---.   '-- times rows, divided by a total, exp, compared ... --.
                                    v                                                           v
                                 coupled  (once coupled, whatever is made of it is coupled too)

This file walks through functions, loops, branches and collectives. The rules for single operations
are in `_example_rules` and `_example_moves`, the facts themselves in `_examples`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.layouts._checkpoint_policies import BY_EXAMPLE, SAME_RESULT
from shardlib.modeling._random import is_row_key
from shardlib.step._example_moves import MOVE_RULES, between_devices
from shardlib.step._example_rules import (
    REDUCTIONS,
    SAME_SHAPE_ALONG_AXIS,
    along_axis,
    chosen_by,
    elementwise,
    located,
    of_totals,
    reduced_over,
)
from shardlib.step._examples import (
    CONSTANT,
    Coupling,
    Fact,
    has_row,
    joined,
    one_of,
    resized,
    stacked,
    with_examples,
)
from shardlib.tracing._jaxpr import line_of, scan_parts

_COLLECTIVES = {
    "psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "ppermute",
    "all_to_all",
    "reduce_scatter", "psum_scatter",
}  # fmt: skip

# The collectives that finish a total of each kind: after one, all devices have that of the batch.
_COLLECTIVE_OF = {"sum": ("psum", "psum_invariant"), "max": ("pmax",), "min": ("pmin",)}


def facts(jaxpr: ClosedJaxpr, inputs: Sequence[Fact], axes: Sequence[str]) -> list[Fact]:
    """What is known of each output of a traced function, given the facts of its inputs.

    `axes` are the manual axes that split the batch: what is reduced over all of them too is the
    same on every device.
    """
    return _Walk(frozenset(axes)).jaxpr(jaxpr.jaxpr, inputs)


class _Walk:
    """A walk through a traced function in the order of its equations.

    Each method takes an equation (or a function) with the facts of its operands and returns the
    facts of its results. Loops are walked until the facts of what they carry no longer change.
    """

    def __init__(self, axes: frozenset[str]) -> None:
        self.axes = axes

    def jaxpr(self, jaxpr: Jaxpr, inputs: Sequence[Fact]) -> list[Fact]:
        """The facts of the outputs of a function.

        Literals, constants of the trace and results of equations that are skipped have no entry in
        `known`: they depend on no example.
        """
        known: dict[Any, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))

        def fact_of(atom: Any) -> Fact:
            if isinstance(atom, Literal):
                return CONSTANT
            return known.get(atom, CONSTANT)

        for equation in jaxpr.eqns:
            operands = list(map(fact_of, equation.invars))
            # Most equations of a model touch only parameters, and need no rule. A draw by rows
            # makes examples out of a key that has none.
            constant = all(fact == CONSTANT for fact in operands)
            if constant and not _draws_rows(equation):
                continue
            known.update(zip(equation.outvars, self.equation(equation, operands), strict=True))
        return list(map(fact_of, jaxpr.outvars))

    def equation(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        """The facts of the results of any equation, by whatever it is that it holds.

        Equations that hold functions are walked through. The others have one rule each.
        """
        name = equation.primitive.name
        if name == "scan":
            return self.scan(equation, operands)
        if name == "while":
            return self.loop(equation, operands)
        if name == "cond":
            return self.branches(equation, operands)
        inner = _called_function(equation)
        if inner is not None:
            return self.call(equation, inner, operands)
        return self.operation(equation, operands)

    def operation(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        """The facts of the results of an equation that holds no function.

        The order of the checks matters: what is coupled stays so, and the rules below that of
        totals see none.
        """
        count = len(equation.outvars)
        name = equation.primitive.name
        if name == "name" and equation.params["name"] == SAME_RESULT:
            return [CONSTANT] * count
        if name == "name" and equation.params["name"] == BY_EXAMPLE:
            return [with_examples(equation.outvars[0].aval.shape)]
        for fact in operands:
            if fact.coupled:
                return [fact] * count
        if name in _COLLECTIVES:
            # A collective of several arrays has a result for each.
            if len(operands) != count:
                operands = [operands[0]] * count
            return [self.collective(equation, fact) for fact in operands]
        if any(fact.total for fact in operands):
            return [of_totals(equation, operands)] * count
        rule = MOVE_RULES.get(name.replace("-", "_"))
        if rule is not None:
            results = rule(equation, operands)
            if isinstance(results, list):
                return results
            return [results] * count
        if name in SAME_SHAPE_ALONG_AXIS:
            return [along_axis(equation, operands[0], equation.params["axis"])] * count
        if name in REDUCTIONS:
            return [reduced_over(equation, operands[0])] * count
        return [elementwise(equation, var, operands) for var in equation.outvars]

    # Equations that hold functions

    def scan(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        """The facts of what a `scan` carries out, and of what it stacks up.

        If the scanned arrays hold examples along dim 0, the loop takes one example after the
        other, and what it carries may be a sum over them.
        """
        body = equation.params["jaxpr"].jaxpr
        constant_count, carry_count = scan_parts(equation)
        constants = operands[:constant_count]
        carry = operands[constant_count : constant_count + carry_count]
        scanned = operands[constant_count + carry_count :]
        over_examples = any(fact.rows is not None and has_row(fact.rows[0]) for fact in scanned)
        # In each round the body sees one element along dim 0.
        elements = [one_of(fact) for fact in scanned]
        while True:
            results = self.jaxpr(body, [*constants, *carry, *elements])
            next_carry = _all_joined(carry, results[:carry_count], over_examples)
            if next_carry == carry:
                break
            carry = next_carry
        length = equation.params["length"]
        stacks = [stacked(fact, length, over_examples) for fact in results[carry_count:]]
        return [*carry, *stacks]

    def loop(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        """The facts of what a `while` loop carries.

        A loop that a reduction over examples ends couples all of it: how often it runs depends on
        the examples together.
        """
        # First the constants of the condition, then those of the body, and what is carried.
        condition_count = equation.params["cond_nconsts"]
        constant_count = condition_count + equation.params["body_nconsts"]
        condition_constants = operands[:condition_count]
        body_constants = operands[condition_count:constant_count]
        carry = operands[constant_count:]
        condition = equation.params["cond_jaxpr"].jaxpr
        body = equation.params["body_jaxpr"].jaxpr
        while True:
            (predicate,) = self.jaxpr(condition, [*condition_constants, *carry])
            results = self.jaxpr(body, [*body_constants, *carry])
            coupled = chosen_by(equation, predicate)
            if coupled is not None:
                return [coupled] * len(carry)
            # Repeated until nothing changes: what one turn learns of a value, the next turn starts
            # with.
            next_carry = _all_joined(carry, results, over_examples=False)
            if next_carry == carry:
                return carry
            carry = next_carry

    def branches(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        """The facts of what the branches of a `cond` may give, joined over all branches."""
        predicate, *arguments = operands
        coupled = chosen_by(equation, predicate)
        if coupled is not None:
            return [coupled] * len(equation.outvars)
        first, *others = equation.params["branches"]
        outputs = self.jaxpr(first.jaxpr, arguments)
        for branch in others:
            results = self.jaxpr(branch.jaxpr, arguments)
            outputs = _all_joined(outputs, results, over_examples=False)
        return outputs

    def call(self, equation: Any, inner: Jaxpr, operands: list[Fact]) -> list[Fact]:
        """The facts of the results of a called function, such as that of `jit` or `remat`.

        Facts are resized on the way in and out, since inside a `shard_map` arrays are smaller.
        """
        inputs = _all_resized(operands, inner.invars)
        outputs = self.jaxpr(inner, inputs)
        results = _all_resized(outputs, equation.outvars)
        # What was traced before, for another call, has no line of this one.
        return [located(fact, line_of(equation)) for fact in results]

    # Collectives

    def collective(self, equation: Any, fact: Fact) -> Fact:
        """The fact of what a collective makes of a value.

        Only over all axes that split the batch does it make a value that is the same everywhere:
        the total of the whole batch, or all of its examples.
        """
        params, name = equation.params, equation.primitive.name
        named = params.get("axes", params.get("axis_name"))
        axes = set(named) if isinstance(named, list | tuple) else {named}
        grouped = params.get("axis_index_groups") is not None
        # Over some of the axes only, each group of devices would have another value.
        if grouped or not self.axes <= axes:
            return between_devices(equation, fact)
        if fact.coupled:
            return fact
        completes_total = fact.total and name in _COLLECTIVE_OF[fact.total]
        if completes_total or name.startswith("all_gather"):
            return CONSTANT
        return between_devices(equation, fact)


def _all_joined(old: list[Fact], new: list[Fact], over_examples: bool) -> list[Fact]:
    """What each of several values is that may have the one fact or the other."""
    return [joined(before, after, over_examples) for before, after in zip(old, new, strict=True)]


def _all_resized(facts: Sequence[Fact], variables: Sequence[Any]) -> list[Fact]:
    """The facts of values that are known by other variables now, of other shapes perhaps."""
    pairs = zip(facts, variables, strict=True)
    return [resized(fact, variable.aval) for fact, variable in pairs]


def _draws_rows(equation: Any) -> bool:
    """Whether an equation draws a row for each example."""
    return equation.primitive.name in ("random_bits", "random_split") and is_row_key(
        equation.invars[0].aval
    )


def _called_function(equation: Any) -> Jaxpr | None:
    """The function that an equation calls with its own inputs, if it is of that kind.

    A function with other numbers of inputs or outputs than the equation is something else, such as
    the kernel of a custom call, and is not walked through.
    """
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = equation.params.get(name)
        if inner is None:
            continue
        if isinstance(inner, ClosedJaxpr):
            inner = inner.jaxpr
        # A loop has a function too, but hands it other inputs than its own.
        same_inputs = len(inner.invars) == len(equation.invars)
        same_outputs = len(inner.outvars) == len(equation.outvars)
        if same_inputs and same_outputs:
            return inner
        return None
    return None


# What is said about it


class Split(NamedTuple):
    """How many examples the traced loss has, and how many times as many the whole batch has.

    - `examples`: those of one device and microbatch.
    - `devices`: over how many devices the batch is split.
    - `microbatches`: in how many microbatches a device takes its examples.
    """

    examples: int
    devices: int
    microbatches: int

    @property
    def times(self) -> int:
        """How many parts of the batch there are."""
        return self.devices * self.microbatches


def describe_coupled(name: str, fact: Fact, weighted: bool, split: Split) -> str:
    """The warning that the loss, or a metric, is not a mean over examples, or an empty text.

    The text is empty if the value is such a mean as far as can be seen.

    Args:
        name: "loss", or the name of a metric.
        fact: What the walk found out about the value.
        weighted: Whether the value is a pair of a total and a weight.
        split: How the batch is split.
    """
    subject = f"The metric `{name}`"
    if name == "loss":
        subject = "The loss"
    line = fact.reduced or "an unknown line"
    if fact.coupled:
        problem = _coupling_in_words(fact.coupled)
    elif fact.total in ("max", "min"):
        problem = f"is a {fact.total}imum over the examples at hand, made at {line}"
    elif fact.total and not fact.scaled and not weighted:
        return (
            f"{subject} is a sum over the examples at hand, made at {line}, and not their mean. "
            "A scalar is taken for the mean over equally many examples on each "
            "device and in each microbatch, so this one would depend on how many these are. Return "
            "`sl.weighted_mean(total, weight)`, whose totals are added up over devices and divided "
            "once, or a mean."
        )
    elif not weighted and is_divided_by_whole_batch(fact, split):
        return (
            f"{subject} is a sum over the {split.examples} examples at hand, made at {line}, and "
            f"divided by {fact.divisor:g}, as the whole batch has. The step takes the mean of what "
            f"each device and microbatch returns, so this one is {split.times} times too small. "
            "Divide by what the loss sees, `batch.shape[0]`, or take `.mean()`."
        )
    else:
        return ""
    automatic = "`sl.Strategy(manual=())`"
    if split.microbatches > 1:
        automatic += ", with `accumulate=1`"
    return (
        f"{subject} {problem}. Each device, and each microbatch, has examples of its own, so the "
        "result depends on how many there are. For a mean with unequal weights return the two "
        "sums, `sl.weighted_mean(total, weight)`. For a statistic of the whole batch use "
        "`sl.batch_mean(x)` or `sl.gather_batch(x)`. Or leave the batch to the partitioner, which "
        f"sees all of it: {automatic}."
    )


def is_divided_by_whole_batch(fact: Fact, split: Split) -> bool:
    """Whether a sum over a part of the batch may have been divided by the size of the whole batch.

    A sum over other dims, as many as there are parts, looks the same: whoever asks has to see that
    the divisor does not grow with the examples at hand.
    """
    if fact.total != "sum" or not fact.divisor:
        return False
    sizes = {fact.summed, split.examples}
    return fact.divisor not in sizes and fact.divisor in {split.times * size for size in sizes}


def _coupling_in_words(coupling: Coupling) -> str:
    """The part of the warning that names the operation, its line, and that of the reduction."""
    reduced = ""
    if coupling.reduced and coupling.reduced != coupling.line:
        reduced = f", reduced at {coupling.reduced},"
    at = ""
    if coupling.line:
        at = f" at {coupling.line}"
    return (
        f"makes the examples depend on each other: what they have in common{reduced} goes into "
        f"`{coupling.operation}`{at}"
    )
