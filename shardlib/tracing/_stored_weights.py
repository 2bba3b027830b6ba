"""Weights are kept in the form they are stored in and made whole only where they are used.

A function is traced with whole weights, as its author wrote it, and evaluated again with each
weight in the form it is stored in. What is not stored whole is made whole in a *region* (see
`_region`), which is

- the body of a `scan` over stacked weights: a layer, all its weights together;
- a block that is marked, or whatever is between the first and the last use of a group of weights;
- any other single equation that uses a weight.

What is stored whole *enters* where all that uses it is in sight: a layer's weights in the body of
the `scan` or where the layer is picked by its number, others at the start.

During the second evaluation a variable of the trace therefore has one of three kinds of values:

    an array           as in JAX's own evaluation
    a `WeightSlice`    a weight, or a layer of it, that is not whole
    a `_Derived`       what a cheap equation makes of one of these, put off until it is used

Equations that read arrays only are collected and evaluated by JAX; those that read one of the
others are evaluated one by one, by the rules below.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from shardlib.tracing._jaxpr import (
    JITS,
    REMATS,
    Stretch,
    inputs_of,
    scan_parts,
    values_of,
    variables,
)
from shardlib.tracing._layer_uses import (
    MARK,
    group_spans,
    has_layers,
    is_cast,
    is_cheap,
    is_layered,
    is_one_layer,
    squeezes_first_dim,
)
from shardlib.tracing._region import (
    Weight,
    WeightSlice,
    bind_whole_weight,
    reader_of,
    use,
    with_source_of,
)

WHOLE = "whole"
"""Stands where others have a `Weight`: a parameter that is whole all the time."""


def evaluate_on_use(function: Callable[..., Any], weights: Any, held: Any, *args: Any) -> Any:
    """Evaluate `function(params, *args)` with parameters that are whole only where they are used.

    `weights` has a `Weight` or `WHOLE` for each parameter; `held` has a `StoredWeight` for each of
    the former and the parameter itself for each of the latter.
    """
    described, treedef = jax.tree.flatten(weights)
    shapes, inputs = [], []
    for weight, stored in zip(described, treedef.flatten_up_to(held), strict=True):
        if isinstance(weight, Weight):
            shapes.append(jax.ShapeDtypeStruct(weight.shape, weight.dtype))
            inputs.append(WeightSlice(weight, *stored))
        else:
            shapes.append(stored)
            inputs.append(stored)
    # Traced with whole weights, as the function's author wrote it.
    traced, out = jax.make_jaxpr(function, return_shape=True)(treedef.unflatten(shapes), *args)
    results = _evaluate(traced.jaxpr, traced.consts, [*inputs, *jax.tree.leaves(args)])
    return jax.tree.unflatten(jax.tree.structure(out), [_make_whole(value) for value in results])


@dataclass(frozen=True, eq=False)
class _Derived:
    """What a cheap equation of a jaxpr makes of a weight, to be computed where it is used."""

    jaxpr: Jaxpr
    equation: Any
    operand: "WeightSlice | _Derived"


# A value during the second evaluation: an array, a `WeightSlice` or a `_Derived`.
Entry = Any


def _is_weight(value: Any) -> bool:
    """Whether a value is a weight that is not whole, or derived from one."""
    return isinstance(value, WeightSlice | _Derived)


def _root(value: Entry) -> WeightSlice | None:
    """The weight that a value is, or is derived from; None for an array."""
    while isinstance(value, _Derived):
        value = value.operand
    return value if isinstance(value, WeightSlice) else None


def _roots(values: Iterable[Entry]) -> list[WeightSlice]:
    """The weights that some values are or are derived from, each once."""
    roots = [_root(value) for value in values]
    return list(dict.fromkeys(root for root in roots if root is not None))


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Entry]) -> list[Entry]:
    """Evaluate a jaxpr some of whose inputs are weights; so may be some of its outputs."""
    return _Evaluation(jaxpr, consts, _enter_whole_weights(jaxpr, inputs)).run()


class _Evaluation:
    """One evaluation of a jaxpr: the values of its variables so far, and equations put off.

    Equations that read arrays only are pending until something else needs the results, and then
    evaluated together.
    """

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Entry]) -> None:
        self.jaxpr = jaxpr
        self.values: dict[Any, Entry] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
        )
        # Values that are not read again need not be outputs of what computes them.
        self.last_use = _last_use(jaxpr)
        self.pending: list[Any] = []

    def run(self) -> list[Entry]:
        """The outputs, after all equations have been evaluated in order."""
        ends = group_spans(self.jaxpr, self._groups())
        equations = self.jaxpr.eqns
        position = 0
        while position < len(equations):
            end = ends.get(position, position + 1)
            if end > position + 1:
                self._evaluate_span(position, end)
            else:
                self._evaluate_one(position)
            position = end
        self._catch_up(len(equations))
        return values_of(self.jaxpr.outvars, self.values)

    def _groups(self) -> dict[Any, Hashable]:
        """The groups of those inputs that are weights of one, by variable."""
        groups: dict[Any, Hashable] = {}
        for var, value in self.values.items():
            root = _root(value)
            if root is not None and root.weight.group is not None:
                groups[var] = root.weight.group
        return groups

    def _evaluate_span(self, start: int, end: int) -> None:
        """Evaluate the uses of a group of weights, and what is between them, as one region."""
        # Cheap equations of weights are put off first. They may be of weights that are used after
        # the span: the region would return those as arrays, whole until their last use.
        equations = []
        for equation in self.jaxpr.eqns[start:end]:
            if not self._put_off(equation):
                equations.append(equation)
        self._catch_up(start)
        self._evaluate(equations, end, _region)

    def _put_off(self, equation: Any) -> bool:
        """Put an equation off if it makes a cheap change to a weight; whether it does."""
        if not self._reads_weights(equation) or not is_cheap(equation):
            return False
        (operand,) = equation.invars
        self.values[equation.outvars[0]] = _derive(self.jaxpr, equation, self.values[operand])
        return True

    def _reads_weights(self, equation: Any) -> bool:
        """Whether an equation reads a weight, or what is derived from one."""
        # What is pending has no value yet, and is no weight.
        return any(_is_weight(self.values.get(var)) for var in variables(equation.invars))

    def _evaluate_one(self, position: int) -> None:
        """Evaluate one equation, or put it off if it needs no weight or makes a cheap change."""
        equation = self.jaxpr.eqns[position]
        if not self._reads_weights(equation):
            self.pending.append(equation)
        elif not self._put_off(equation):
            self._catch_up(position)
            rule = _RULES.get(equation.primitive.name, _region)
            self._evaluate([equation], position + 1, rule)

    def _evaluate(
        self, equations: list[Any], end: int, rule: Callable[[Stretch, list[Entry]], list[Entry]]
    ) -> None:
        """Evaluate equations by a rule; what is read at or after the position `end` is kept."""
        outputs = []
        for equation in equations:
            for var in equation.outvars:
                if self.last_use.get(var, -1) >= end:
                    outputs.append(var)
        inputs = inputs_of(equations)
        stretch = Stretch(self.jaxpr, equations, inputs, outputs)
        results = rule(stretch, [self.values[var] for var in inputs])
        self.values.update(zip(outputs, results, strict=True))

    def _catch_up(self, end: int) -> None:
        """Evaluate the equations that are pending, before the one at `end`."""
        if self.pending:
            self._evaluate(self.pending, end, lambda stretch, inputs: stretch(inputs))
            self.pending = []


def _last_use(jaxpr: Jaxpr) -> dict[Any, int]:
    """By variable the position of the last equation that reads it; of outputs the end."""
    last_use: dict[Any, int] = {}
    for position, equation in enumerate(jaxpr.eqns):
        for var in variables(equation.invars):
            last_use[var] = position
    for var in variables(jaxpr.outvars):
        last_use[var] = len(jaxpr.eqns)
    return last_use


def _enter_whole_weights(jaxpr: Jaxpr, inputs: Sequence[Entry]) -> list[Entry]:
    """Replace the weights that are stored whole among the inputs of a jaxpr by arrays.

    A stack that the jaxpr takes layer by layer stays: each of its layers enters further inside.
    """
    entered: dict[WeightSlice, Any] = {}
    values: list[Entry] = []
    for var, value in zip(jaxpr.invars, inputs, strict=True):
        root = _root(value)
        if root is None or not root.weight.is_stored_whole:
            values.append(value)
            continue
        # Entered as a whole, the gradient of a stack would be reduced at once, not layer by layer.
        if is_layered(jaxpr, var, root, pickable=isinstance(value, WeightSlice)):
            values.append(value)
            continue
        if root not in entered:
            entered[root] = bind_whole_weight(root, reader_of(jaxpr, var))
        values.append(_resolve(value, entered))
    return values


def _derive(jaxpr: Jaxpr, equation: Any, operand: "WeightSlice | _Derived") -> Entry:
    """What a cheap equation, such as a cast or a slice, makes of a weight.

    A slice that picks one layer of a stack by its number gives a weight again. If that is stored
    whole, it enters here.
    """
    if squeezes_first_dim(equation) and isinstance(operand, _Derived):
        stack, index = operand.operand, operand.equation
        if (
            isinstance(stack, WeightSlice)
            and stack.consumed_dims < stack.weight.stacked
            and index.primitive.name == "slice"
            and is_one_layer(index, stack)
        ):
            layer = stack.at(index.params["start_indices"][0])
            if stack.weight.is_stored_whole:
                return bind_whole_weight(layer, reader_of(jaxpr, equation.outvars[0]))
            return layer
    return _Derived(jaxpr, equation, operand)


def _make_whole(value: Entry) -> Any:
    """The array that a value stands for, made in a region that does nothing else."""
    if not _is_weight(value):
        return value
    return _region(lambda values: values, [value])[0]


def _resolve(value: Entry, whole: dict[WeightSlice, Any]) -> Any:
    """The array that a value stands for, where the weights it needs are whole."""
    if isinstance(value, WeightSlice):
        return whole[value]
    if isinstance(value, _Derived):
        inputs, outputs = variables(value.equation.invars), list(value.equation.outvars)
        derive = Stretch(value.jaxpr, [value.equation], inputs, outputs)
        return derive([_resolve(value.operand, whole)])[0]
    return value


def _arrays(entries: Sequence[Entry]) -> list[Any]:
    """The entries that are arrays, in order."""
    return [entry for entry in entries if not _is_weight(entry)]


def _with_arrays(
    entries: Sequence[Entry], arrays: Sequence[Any], of_weight: Callable[[Entry], Any]
) -> list[Any]:
    """Entries with others in their place: the given arrays, and what `of_weight` makes of weights.

    Functions that JAX transforms take the arrays as arguments. Weights stay outside of them, and
    are put in again on the inside.
    """
    next_array = iter(arrays)
    values = []
    for entry in entries:
        if _is_weight(entry):
            values.append(of_weight(entry))
        else:
            values.append(next(next_array))
    return values


def _region(function: Callable[[list[Any]], list[Any]], inputs: list[Entry]) -> list[Any]:
    """Call a function of arrays in a region, in which the weights among its inputs are whole.

    Weights that are stored whole only enter. If there are no others, the function is called without
    a region.
    """
    entered: dict[WeightSlice, Any] = {}
    regional: list[WeightSlice] = []
    # Weights that are stored whole need no region, which would gather them.
    for root in _roots(inputs):
        if root.weight.is_stored_whole:
            entered[root] = bind_whole_weight(root, None)
        else:
            regional.append(root)

    entries = []
    for value in inputs:
        entries.append(_resolve(value, entered) if _root(value) in entered else value)

    def body(plain: list[Any], whole: dict[WeightSlice, Any]) -> list[Any]:
        return function(_with_arrays(entries, plain, lambda weight: _resolve(weight, whole)))

    if not regional:
        return function(entries)
    return use(body, _arrays(entries), regional)


def _single_equation(stretch: Stretch, inputs: list[Entry]) -> tuple[Any, list[Entry]]:
    """The equation of a stretch of one, and the values of all that it reads."""
    (equation,) = stretch.equations
    return equation, values_of(equation.invars, dict(zip(stretch.inputs, inputs, strict=True)))


def _has_layers(jaxpr: Jaxpr, inputs: Sequence[Entry]) -> bool:
    """Whether a jaxpr, with these inputs, has layers that are regions themselves."""
    weights = [_is_weight(value) for value in inputs]
    stacks = [_stack(value) is not None for value in inputs]
    return has_layers(jaxpr, weights, stacks)


def _wanted(stretch: Stretch, results: Sequence[Any]) -> list[Any]:
    """The results that are read later, of all results of the only equation of a stretch."""
    wanted = set(stretch.outputs)
    pairs = zip(stretch.equations[0].outvars, results, strict=True)
    return [result for var, result in pairs if var in wanted]


def _jit(stretch: Stretch, inputs: list[Entry]) -> list[Entry]:
    """Evaluate a `jit` of weights, with what is inside of it in place of the call.

    A marked block is one region, unless there are layers inside that are regions themselves.
    """
    equation, entries = _single_equation(stretch, inputs)
    inner = equation.params["jaxpr"]
    # Calls without the mark are taken apart, since weights may be used deep inside.
    is_marked = equation.params["name"] == MARK
    if is_marked and not _has_layers(inner.jaxpr, entries):
        return _region(stretch, inputs)
    return _wanted(stretch, _evaluate(inner.jaxpr, inner.consts, entries))


def _checkpoint(stretch: Stretch, inputs: list[Entry]) -> list[Entry]:
    """Evaluate a `checkpoint` of weights.

    Without layers inside it is one region: the region gathers weights again in the backward pass,
    and the checkpoint inside it recomputes the rest. With layers inside, which are regions
    themselves, it is a checkpoint around these.
    """
    equation, entries = _single_equation(stretch, inputs)
    inner = equation.params["jaxpr"]
    if not _has_layers(inner, entries):
        return _region(stretch, inputs)
    # Each weight once, however many of the operands come from it.
    roots = _roots(entries)

    # Whatever is differentiated has to be an argument of the checkpoint, stored weights and anchors
    # too.
    def block(plain: list[Any], held: list[Any]) -> list[Any]:
        now = {}
        for root, (stored, anchor) in zip(roots, held, strict=True):
            now[root] = replace(root, stored=stored, gradient_anchor=anchor)
        return _evaluate_whole(
            inner, [], _with_arrays(entries, plain, lambda weight: _rebased(weight, now))
        )

    block = jax.checkpoint(
        block, policy=equation.params["policy"], prevent_cse=equation.params["prevent_cse"]
    )
    held = [(root.stored, root.gradient_anchor) for root in roots]
    return _wanted(stretch, block(_arrays(entries), held))


def _evaluate_whole(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Entry]) -> list[Any]:
    """Evaluate a jaxpr some of whose inputs are weights; weights among its outputs are whole."""
    return [_make_whole(value) for value in _evaluate(jaxpr, consts, inputs)]


def _rebased(value: Entry, now: dict[WeightSlice, WeightSlice]) -> Entry:
    """A value derived from a weight, now derived from the one that takes its place."""
    if isinstance(value, _Derived):
        return _Derived(value.jaxpr, value.equation, _rebased(value.operand, now))
    return now.get(value, value)


@dataclass(frozen=True, eq=False)
class _LayerLoop:
    """A `scan` over layers of weights, whose body makes one layer whole at a time."""

    body: ClosedJaxpr
    constants: int  # how many of the inputs are the same in each iteration
    carries: int  # and how many, after these, go from one iteration to the next
    scanned: list[Entry]  # of all other inputs each iteration gets one part
    stacks: list[WeightSlice]  # the weights among these

    def run(self, options: dict[str, Any], before: list[Any], plain: list[Any], held: Any) -> Any:
        """The loop, as a function of arrays: `(carry, stacked outputs)`.

        Args:
            options: those of `lax.scan`.
            before: constants and first carries.
            plain: the scanned inputs that are arrays.
            held: of each stack of weights, what is scanned.
        """
        constants, carry = before[: self.constants], before[self.constants :]
        numbers = jnp.arange(options["length"])
        step = functools.partial(self.step, constants)
        return lax.scan(step, carry, (numbers, plain, held), **options)

    def step(
        self, constants: list[Any], carry: list[Any], scanned: Any
    ) -> tuple[list[Any], list[Any]]:
        """One iteration: all weights of its layer are whole together, unless there are more layers
        inside.
        """
        number, plain, held = scanned
        layers = {}
        for stack, (stored, anchor) in zip(self.stacks, held, strict=True):
            if anchor is None:  # one that all layers share
                anchor = stack.gradient_anchor
            layers[stack] = stack.layer(stored, anchor, number)
        parts = _with_arrays(self.scanned, plain, lambda weight: _rebased(weight, layers))
        entries = _enter_whole_weights(self.body.jaxpr, [*constants, *carry, *parts])
        if _has_layers(self.body.jaxpr, entries):
            outputs = _evaluate_whole(self.body.jaxpr, self.body.consts, entries)
        else:
            outputs = _region(lambda values: jaxpr_as_fun(self.body)(*values), entries)
        return outputs[: self.carries], outputs[self.carries :]


def _scan(stretch: Stretch, inputs: list[Entry]) -> list[Entry]:
    """Evaluate a `scan` over stacks of weights with a region in each iteration.

    A scan that has weights as constants or carries only is one region.
    """
    equation, entries = _single_equation(stretch, inputs)
    constants, carries = scan_parts(equation)
    before, scanned = entries[: constants + carries], entries[constants + carries :]
    stacks = [_stack(value) for value in scanned]
    stacks = list(dict.fromkeys(stack for stack in stacks if stack is not None))
    if not stacks:
        return _region(stretch, inputs)
    for stack in stacks:
        _check_unsplit(stack)

    before = [_make_whole(value) for value in before]
    for position, value in enumerate(scanned):
        if _stack(value) is None:
            scanned[position] = _make_whole(value)

    loop = _LayerLoop(equation.params["jaxpr"], constants, carries, scanned, stacks)
    held = [stack.scanned for stack in stacks]
    run = functools.partial(loop.run, _scan_options(equation))
    carry, stacked = with_source_of(equation, run, before, _arrays(scanned), held, deep=False)
    return _wanted(stretch, [*carry, *stacked])


def _scan_options(equation: Any) -> dict[str, Any]:
    """The options of `lax.scan` that an equation was traced with, those that this JAX has."""
    names = ("length", "reverse", "unroll", "_split_transpose")
    return {name: equation.params[name] for name in names if name in equation.params}


def _check_unsplit(stack: WeightSlice) -> None:
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


def _stack(value: Entry) -> WeightSlice | None:
    """The stacked weight of which each iteration gets a layer: as it is, or in another dtype.

    Anything else that is made of a weight might mix layers; for that, and for arrays, it is None.
    """
    while isinstance(value, _Derived) and is_cast(value.equation):
        value = value.operand
    return value if isinstance(value, WeightSlice) else None


# How to evaluate an equation that reads weights, by primitive. All others are regions.
_RULES: dict[str, Callable[[Stretch, list[Entry]], list[Entry]]] = {
    "scan": _scan,
    **dict.fromkeys(JITS, _jit),
    **dict.fromkeys(REMATS, _checkpoint),
}
