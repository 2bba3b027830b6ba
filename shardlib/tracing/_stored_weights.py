"""Evaluates a loss that was traced with whole weights, on weights as they are stored.

Weights that are sharded are gathered in *regions* only (ZeRO-3, see `_region`):

    the author's trace     h = dot x W                W: a whole array
    second evaluation      h = region(x, shard_W)

    region = custom_vjp    forward    gather W, dot, drop W
                           backward   gather W, differentiate dot, reduce the gradient of W

A region is

- the body of a `scan` over stacked weights: a layer, all its weights together;
- a block that `sl.zero3_layer` marks;
- whatever is between the first and the last use of a group of weights;
- any other single equation that uses a weight.

Weights that are stored whole are replicated, and need no gathering. They are *bound*: an identity
makes them arrays, and reduces their gradients in the backward pass. That is done at the start,
before all uses, so that a gradient is reduced once. Only a stack that is used layer by layer is
bound a layer at a time, in the body of the `scan` or where the layer is picked by its number: then
each layer's gradient is reduced as soon as it is complete.

A loop over marked blocks keeps their inputs by a chain, if the strategy has one, whether it reads
weights or only arrays: see `_chain_scan`.

During the second evaluation the value of a variable may be a weight that is no array yet (see
`_weight_values`). Equations that read arrays only are collected and evaluated by JAX; those that
read such weights are evaluated one by one, by the rules below.
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from shardlib._tree import named_leaves
from shardlib.layouts._chain_schedules import Chain
from shardlib.tracing._bound_weights import bind_all_replicated, bind_replicated_weights
from shardlib.tracing._chain_loops import (
    chain_in_force,
    is_loop_over_blocks,
    leads_to_loop_over_blocks,
    loops_over_blocks,
)
from shardlib.tracing._chain_scan import chain_scan
from shardlib.tracing._jaxpr import (
    JITS,
    REMATS,
    Stretch,
    inputs_of,
    last_uses,
    picked,
    scan_options,
    scan_parts,
    values_of,
    variables,
)
from shardlib.tracing._layer_policies import (
    bodies_of_runs,
    holds_offloading,
    holds_runs,
    with_policies_of_layers,
)
from shardlib.tracing._layer_runs import Run, loop_in_runs
from shardlib.tracing._layer_uses import (
    MARK,
    group_spans,
    has_layers,
    is_cheap,
    is_cheap_call,
)
from shardlib.tracing._region import (
    Weight,
    WeightSlice,
    evaluate_region,
    with_source_of,
)
from shardlib.tracing._weight_values import (
    Value,
    check_unsplit,
    derive,
    is_weight,
    merge,
    resolve,
    root_of,
    roots_of,
    split_arrays,
    stack_of,
    with_root_replaced,
)

UNMANAGED = "unmanaged"
"""In place of a `Weight`: an ordinary parameter, which `jax.grad` differentiates as usual."""


def evaluate_on_use(function: Callable[..., Any], weights: Any, params: Any, *args: Any) -> Any:
    """Evaluate `function(params, *args)` with parameters that are whole only where they are used.

    `weights` has a `Weight` or `UNMANAGED` for each parameter; `params` has a `StoredWeight` for
    each of the former and the parameter itself for each of the latter.
    """
    described, treedef = jax.tree.flatten(weights)
    shapes, inputs = [], []
    for weight, stored in zip(described, treedef.flatten_up_to(params), strict=True):
        if isinstance(weight, Weight):
            shapes.append(jax.ShapeDtypeStruct(weight.shape, weight.dtype))
            inputs.append(WeightSlice(weight, *stored))
        else:
            shapes.append(stored)
            inputs.append(stored)
    # Traced with whole weights, as the function's author wrote it.
    traced, out = jax.make_jaxpr(function, return_shape=True)(treedef.unflatten(shapes), *args)
    traced = with_policies_of_layers(traced, [path for path, _ in named_leaves(weights)])
    inputs.extend(jax.tree.leaves(args))
    # Results that do not depend on the inputs may be NumPy's numbers, as they are in JAX's own
    # evaluation. The transformations around this function take those.
    results = _evaluate_jaxpr_to_arrays(traced.jaxpr, traced.consts, inputs)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _evaluate_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value]) -> list[Value]:
    """Evaluate a jaxpr. Inputs and outputs may be weights that are no arrays yet."""
    return _Evaluator(jaxpr, consts, bind_replicated_weights(jaxpr, inputs)).run()


def _evaluate_jaxpr_to_arrays(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value]
) -> list[Any]:
    """Evaluate a jaxpr as `_evaluate_jaxpr` does, and make arrays of weights among its outputs."""
    return [_make_whole(value) for value in _evaluate_jaxpr(jaxpr, consts, inputs)]


class _Evaluator:
    """One evaluation of a jaxpr: the values of its variables so far, and equations put off.

    Equations that read arrays only are pending until something else needs the results, and then
    evaluated together.
    """

    def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Value]) -> None:
        self.jaxpr = jaxpr
        self.values: dict[Any, Value] = dict(
            zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
        )
        # A region returns only what is read later: a whole weight among its outputs stays alive.
        self.last_use = last_uses(jaxpr)
        self.pending: list[Any] = []

    def run(self) -> list[Value]:
        """The outputs, after all equations have been evaluated in order."""
        ends = group_spans(self.jaxpr, self._groups())
        equations = self.jaxpr.eqns
        position = 0
        while position < len(equations):
            end = ends.get(position, position + 1)
            if end > position + 1:
                self._evaluate_span(position, end)
            else:
                self._evaluate_equation(position)
            position = end
        self._compute_pending(len(equations))
        return values_of(self.jaxpr.outvars, self.values)

    def _groups(self) -> dict[Any, Hashable]:
        """By variable, the groups of the inputs that are weights with a group."""
        groups: dict[Any, Hashable] = {}
        for var, value in self.values.items():
            root = root_of(value)
            if root is not None and root.weight.group is not None:
                groups[var] = root.weight.group
        return groups

    def _evaluate_span(self, start: int, end: int) -> None:
        """Evaluate the uses of a group of weights, and what is between them, as one region."""
        self._compute_pending(start)
        if any(map(_leads_to_chain, self.jaxpr.eqns[start:end])):
            raise ValueError(
                "`Zero(layers=...)` makes one layer of weights between whose uses there is a loop "
                "over marked blocks, of which `Strategy(remat=...)` keeps few inputs. Name the "
                'layers that are in no loop by `layers`; or take `remat="full"`.'
            )
        # Cheap equations of weights, in a `jit` or not, are recorded and left out of the region.
        # It would return results that are used after the span as arrays, whole until then.
        equations = []
        for position in range(start, end):
            equation = self.jaxpr.eqns[position]
            if not self._reads_weights(equation):
                equations.append(equation)
            elif is_cheap(equation):
                self._record(equation)
            elif is_cheap_call(equation) and self._has_operands(equation):
                # A call may read arrays, too. Those of this span have no values yet.
                self._apply_rule(_jit, [equation], position + 1)
            else:
                equations.append(equation)
        self._apply_rule(_region, equations, end)

    def _evaluate_equation(self, position: int) -> None:
        """Defer an equation that reads arrays only, record a cheap one of a weight, or apply the
        rule of its primitive.
        """
        equation = self.jaxpr.eqns[position]
        if not self._reads_weights(equation) and not _has_own_loop(equation):
            self.pending.append(equation)
        elif is_cheap(equation):
            self._record(equation)
        else:
            self._compute_pending(position)
            rule = _RULES.get(equation.primitive.name, _region)
            self._apply_rule(rule, [equation], position + 1)

    def _reads_weights(self, equation: Any) -> bool:
        """Whether an equation reads a weight, or what is derived from one.

        Results of pending equations have no value yet. They are arrays, since such equations read
        arrays only.
        """
        return any(is_weight(self.values.get(var)) for var in variables(equation.invars))

    def _has_operands(self, equation: Any) -> bool:
        """Whether all that an equation reads has a value already."""
        return all(var in self.values for var in variables(equation.invars))

    def _record(self, equation: Any) -> None:
        """Put a cheap equation of a weight off until its result is used."""
        (operand,) = values_of(equation.invars, self.values)
        self.values[equation.outvars[0]] = derive(self.jaxpr, equation, operand)

    def _apply_rule(
        self,
        rule: Callable[[Stretch, list[Value]], list[Value]],
        equations: Sequence[Any],
        end: int,
    ) -> None:
        """Evaluate equations by a rule; what is read at or after the position `end` is kept."""
        outputs = []
        for equation in equations:
            for var in equation.outvars:
                if self.last_use.get(var, -1) >= end:
                    outputs.append(var)
        inputs = inputs_of(equations)
        stretch = Stretch(self.jaxpr, list(equations), inputs, outputs)
        results = rule(stretch, picked(self.values, inputs))
        self.values.update(zip(outputs, results, strict=True))

    def _compute_pending(self, end: int) -> None:
        """Evaluate the equations that are pending, before the one at `end`."""
        if self.pending:
            self._apply_rule(lambda stretch, inputs: stretch(inputs), self.pending, end)
            self.pending = []


def _make_whole(value: Value) -> Any:
    """The array that a value stands for, made in a region that does nothing else."""
    if not is_weight(value):
        return value
    return _region(lambda values: values, [value])[0]


def _region(function: Callable[[list[Any]], list[Any]], inputs: Sequence[Value]) -> list[Any]:
    """Call a function of arrays in a region, in which the weights among its inputs are whole.

    Weights that are stored whole are only bound. If there are no others, there is no region.
    """
    values = bind_all_replicated(inputs)
    weights = roots_of(values)
    if not weights:
        return function(values)

    def body(arrays: list[Any], whole: dict[WeightSlice, jax.Array]) -> list[Any]:
        return function(merge(values, arrays, lambda weight: resolve(weight, whole)))

    return evaluate_region(body, split_arrays(values), weights)


def _single_equation(stretch: Stretch, inputs: list[Value]) -> tuple[Any, list[Value]]:
    """The equation of a stretch of one, and the values of all that it reads."""
    (equation,) = stretch.equations
    return equation, values_of(equation.invars, dict(zip(stretch.inputs, inputs, strict=True)))


def _has_layers(jaxpr: Jaxpr, inputs: Sequence[Value]) -> bool:
    """Whether a jaxpr, with these inputs, has layers that are regions themselves."""
    weights = [is_weight(value) for value in inputs]
    stacks = [stack_of(value) is not None for value in inputs]
    return has_layers(jaxpr, weights, stacks) or _holds_chain(jaxpr)


def _holds_chain(jaxpr: Jaxpr) -> bool:
    """Whether a loop in a jaxpr keeps inputs by the chain in force."""
    return chain_in_force() is not None and any(True for _ in loops_over_blocks(jaxpr))


def _leads_to_chain(equation: Any) -> bool:
    """Whether an equation is a loop that keeps inputs by the chain in force, or holds one."""
    return chain_in_force() is not None and leads_to_loop_over_blocks(equation)


def _has_own_loop(equation: Any) -> bool:
    """Whether an equation is, or holds, a loop whose derivative is not the one that JAX makes."""
    return _leads_to_chain(equation) or holds_runs(equation) or holds_offloading(equation)


def _jit(stretch: Stretch, inputs: list[Value]) -> list[Value]:
    """Evaluate a `jit` of weights, with what is inside of it in place of the call.

    A marked block is one region, unless there are layers inside that are regions themselves.
    """
    equation, operands = _single_equation(stretch, inputs)
    inner = equation.params["jaxpr"]
    if is_cheap_call(equation):
        # Nothing is bound in here: a stack that is only cast may go on to a loop over its layers.
        results = _Evaluator(inner.jaxpr, inner.consts, operands).run()
        return stretch.wanted(results)
    # Calls without the mark are taken apart, since weights may be used deep inside.
    is_marked = equation.params["name"] == MARK
    if is_marked and not _has_layers(inner.jaxpr, operands):
        return _region(stretch, inputs)
    return stretch.wanted(_evaluate_jaxpr(inner.jaxpr, inner.consts, operands))


def _checkpoint(stretch: Stretch, inputs: list[Value]) -> list[Value]:
    """Evaluate a `checkpoint` of weights.

    Without layers inside it is one region: the region gathers weights again in the backward pass,
    and the checkpoint inside it recomputes the rest. With layers inside, which are regions
    themselves, it is a checkpoint around these.
    """
    equation, operands = _single_equation(stretch, inputs)
    inner = equation.params["jaxpr"]
    if not _has_layers(inner, operands):
        return _region(stretch, inputs)
    # Each weight once, however many of the operands come from it.
    roots = roots_of(operands)
    stored_and_anchors = [(root.stored, root.gradient_anchor) for root in roots]

    # `jax.checkpoint` is handed all that is differentiated as arguments, so roots are made again
    # inside. Their `sums` are references, and stay closed over.
    def block(arrays: list[Any], stored_and_anchors: list[Any]) -> list[Any]:
        replacement = {}
        for root, (stored, anchor) in zip(roots, stored_and_anchors, strict=True):
            replacement[root] = replace(root, stored=stored, gradient_anchor=anchor)
        values = merge(operands, arrays, lambda weight: with_root_replaced(weight, replacement))
        return _evaluate_jaxpr_to_arrays(inner, [], values)

    policy, prevent_cse = equation.params["policy"], equation.params["prevent_cse"]
    # JAX 0.12 may have one for each operand of the traced call. Those of `block` are others.
    if not isinstance(prevent_cse, bool):
        prevent_cse = any(prevent_cse)
    block = jax.checkpoint(block, policy=policy, prevent_cse=prevent_cse)
    return stretch.wanted(block(split_arrays(operands), stored_and_anchors))


@dataclass(frozen=True, eq=False)
class _LayerLoop:
    """A `scan` over layers of weights, whose body makes one layer whole at a time.

    With a `chain`, it keeps inputs of layers by that. If it `copies_ahead`, activations in the
    memory of the host are copied back a layer before they are read.

    Its inputs are `num_consts` constants, `num_carry` carries, and `xs`, of which each iteration
    gets one part. `stacks` are the weights that `xs` are or are cast from, each once, and `taken`
    the same as their layers are taken from them.
    """

    body: ClosedJaxpr
    num_consts: int
    num_carry: int
    xs: list[Value]
    stacks: list[WeightSlice]
    taken: list[WeightSlice]
    chain: Chain | None = None
    copies_ahead: bool = False

    def run(
        self,
        options: dict[str, Any],
        consts_and_init: list[Any],
        arrays: list[Any],
        stack_xs: list[tuple[Any, Any]],
    ) -> tuple[list[Any], list[Any]]:
        """The loop, as a function of arrays: the last carry, and `ys`, stacked outputs.

        Args:
            options: those of `lax.scan`.
            consts_and_init: constants and first carries.
            arrays: those of `xs` that are arrays.
            stack_xs: what is scanned of each stack, as `WeightSlice.scanned` says.
        """
        consts, init = consts_and_init[: self.num_consts], consts_and_init[self.num_consts :]
        # Anchors that are the same for all layers: scalars, or None for a frozen weight.
        anchors = []
        for stack in self.taken:
            anchors.append(None if stack.has_stacked_anchor else stack.gradient_anchor)
        held = consts, anchors
        xs = jnp.arange(options["length"]), arrays, stack_xs
        step = functools.partial(self.step, held)
        length, reverse = options["length"], options["reverse"]
        if self.chain is not None:
            return chain_scan(step, init, xs, length, self.chain, reverse=reverse)
        bodies = bodies_of_runs(self.body, length)
        if len(bodies) == 1 and not self.copies_ahead:
            return lax.scan(step, init, xs, **options)
        runs = [Run(stop, replace(self, body=body).step) for stop, body in bodies]
        return loop_in_runs(runs, held, init, xs, reverse=reverse)

    def step(self, held: Any, carry: list[Any], x: Any) -> tuple[list[Any], list[Any]]:
        """One iteration: all weights of its layer are whole together, unless there are more layers
        inside.

        `held` are constants of the loop, and anchors that are the same for all layers.
        """
        (consts, anchors), (index, arrays, stack_xs) = held, x
        layers = []
        for stack, (stored, anchor), same in zip(self.taken, stack_xs, anchors, strict=True):
            layers.append(stack.layer(stored, same if anchor is None else anchor, index))
        layer_of = dict(zip(self.stacks, layers, strict=True))
        # Equations that were traced for a stack are evaluated for a layer of it. They may be,
        # since `stack_of` lets only casts through, whose parameters mention no shape.
        parts = merge(self.xs, arrays, lambda weight: with_root_replaced(weight, layer_of))
        # Layers are bound inside the loop, so that each iteration reduces its own gradients.
        values = bind_replicated_weights(self.body.jaxpr, [*consts, *carry, *parts])
        if _has_layers(self.body.jaxpr, values):
            outputs = _evaluate_jaxpr_to_arrays(self.body.jaxpr, self.body.consts, values)
        else:
            outputs = _region(lambda values: jaxpr_as_fun(self.body)(*values), values)
        return outputs[: self.num_carry], outputs[self.num_carry :]


def _scan(stretch: Stretch, inputs: list[Value]) -> list[Value]:
    """Evaluate a `scan` over stacks of weights with a region in each iteration.

    A scan that has weights as constants or carries only is one region, unless it keeps inputs of
    its blocks by a chain or not the same of all layers, or a loop in it does.
    """
    equation, operands = _single_equation(stretch, inputs)
    num_consts, num_carry = scan_parts(equation)
    consts_and_init = operands[: num_consts + num_carry]
    xs = operands[num_consts + num_carry :]
    stacks = [stack_of(value) for value in xs]
    stacks = list(dict.fromkeys(stack for stack in stacks if stack is not None))
    if not stacks and not _has_own_loop(equation):
        return _region(stretch, inputs)
    for stack in stacks:
        check_unsplit(stack)

    # All other weights are whole throughout the loop, and until its backward pass is done. A carry
    # has to be an array, and what is made of a stack may mix its layers. Constants could be
    # gathered in each iteration; that would send them as many times as there are layers.
    consts_and_init = [_make_whole(value) for value in consts_and_init]
    for position, value in enumerate(xs):
        if stack_of(value) is None:
            xs[position] = _make_whole(value)

    taken = stacks
    if holds_runs(equation):
        # The derivative of such a loop cannot hand on the references of its layers.
        taken = [stack.with_gradients_added_at_once for stack in stacks]
    chain = chain_in_force()
    if not is_loop_over_blocks(equation):
        chain = None
    body = equation.params["jaxpr"]
    # References, to which microbatches add their gradients, JAX's own derivative hands on.
    copies_ahead = holds_offloading(equation) and all(stack.sums is None for stack in stacks)
    copies_ahead = copies_ahead and is_loop_over_blocks(equation)
    loop = _LayerLoop(body, num_consts, num_carry, xs, stacks, taken, chain, copies_ahead)
    run = functools.partial(loop.run, scan_options(equation))
    stack_xs = [stack.scanned for stack in taken]
    # The body keeps its own source lines; only the `scan` takes this one.
    carry, ys = with_source_of(
        equation, run, consts_and_init, split_arrays(xs), stack_xs, deep=False
    )
    return stretch.wanted([*carry, *ys])


# How to evaluate an equation that reads weights, by primitive. All others are regions.
_RULES: dict[str, Callable[[Stretch, list[Value]], list[Value]]] = {
    "scan": _scan,
    **dict.fromkeys(JITS, _jit),
    **dict.fromkeys(REMATS, _checkpoint),
}
