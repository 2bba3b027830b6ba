"""Loops over layers in which not all layers keep the same for the backward pass.

A loop that JAX differentiates keeps the same of every layer. Here it is run as several loops, one
after the other, whose bodies differ only in the policy of their marked blocks:

    forward     layers 0..8, which keep much  ->  layers 8..32, which keep little
    backward    layers 32..8, recomputed      ->  layers 8..0

Loops over parts of stacked arrays would copy those parts. So each iteration picks its layer from
the whole stack by number, and the derivative is written by hand: every backward loop puts the
gradients of its layers into the same stack, in place. What is kept in the memory of the host is
copied back a layer ahead, see `_copied_ahead`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, custom_vjp_primal_tree_values
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from shardlib.tracing._copied_ahead import Kept, with_copies
from shardlib.tracing._jaxpr import values_of, variables
from shardlib.tracing._linearize import Partition, instantiated

Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""One iteration: `(constants, carry, layer) -> (carry, outputs)`, all of them trees."""


class Run(NamedTuple):
    """Layers that follow each other and are evaluated by the same function, up to `stop`."""

    stop: int
    step: Step


def loop_in_runs(
    runs: Sequence[Run], consts: Any, init: Any, xs: Any, *, reverse: bool
) -> tuple[Any, Any]:
    """The last carry and the stacked outputs of a loop, as `lax.scan` returns them.

    The steps of all runs compute the same. They are differentiated each by its own policies.

    Args:
        runs: the functions of the iterations, in the order of the layers.
        consts: what every iteration gets.
        init: the first carry.
        xs: arrays of which each iteration gets one layer.
        reverse: whether the last layer comes first.
    """
    inputs = consts, init, xs
    trees = [jax.tree.structure(part) for part in inputs]
    results = jax.eval_shape(runs[0].step, consts, init, jax.tree.map(lambda x: x[0], xs))

    def flat(step: Step) -> Step:
        def flattened(*inputs: Any) -> tuple[list[Any], list[Any]]:
            parts = [tree.unflatten(part) for tree, part in zip(trees, inputs, strict=True)]
            carry, outputs = step(*parts)
            return jax.tree.leaves(carry), jax.tree.leaves(outputs)

        return flattened

    loop = _Loop(tuple(Run(run.stop, flat(run.step)) for run in runs), reverse)

    @jax.custom_vjp
    def evaluated(consts: list[Any], init: list[Any], xs: list[Any]) -> Any:
        return loop.evaluate(consts, init, xs)

    def forwards(*primals: Any) -> Any:
        # With symbolic zeros, each primal comes with whether it is differentiated.
        moving = _Moving(*[[_is_moving(primal) for primal in part] for part in primals])
        consts, init, xs = custom_vjp_primal_tree_values(primals)
        return loop.forward(consts, init, xs, moving)

    def backwards(backward: Any, cotangents: Any) -> Any:
        return backward(*cotangents)

    evaluated.defvjp(forwards, backwards, symbolic_zeros=True)
    leaves = evaluated(*map(jax.tree.leaves, inputs))
    structures = map(jax.tree.structure, results)
    carry, outputs = [tree.unflatten(part) for tree, part in zip(structures, leaves, strict=True)]
    return carry, outputs


def _is_moving(primal: CustomVJPPrimal) -> bool:
    return primal.perturbed and _has_derivative(primal.value)


def _has_derivative(value: Any) -> bool:
    """Whether a value is no integer, bool or random key."""
    return bool(jnp.issubdtype(value.dtype, jnp.inexact))


class _Moving(NamedTuple):
    """Which of the inputs of a loop are differentiated."""

    consts: list[bool]
    init: list[bool]
    xs: list[bool]


@dataclass(frozen=True, eq=False)
class _Loop:
    """The runs of a loop, in the order of the layers."""

    runs: tuple[Run, ...]
    reverse: bool

    def evaluate(self, consts: list[Any], init: list[Any], xs: list[Any]) -> Any:
        """The loop where nothing is differentiated: all runs compute the same."""
        step = functools.partial(self.runs[0].step, consts)
        return lax.scan(step, init, xs, length=self.runs[-1].stop, reverse=self.reverse)

    def forward(
        self, consts: list[Any], init: list[Any], xs: list[Any], moving: _Moving
    ) -> tuple[tuple[list[Any], list[Any]], Any]:
        """The results, and the backward pass as a function of their cotangents."""
        # A carry that starts as a constant is differentiated once a layer has added to it.
        moving = moving._replace(init=[_has_derivative(x) for x in init])
        # A layer and not its shapes, which do not say in which memory it is.
        any_layer = _layer(xs, 0)
        carry, outputs, done, all_kept = init, [], [], []
        for run, layers in self._in_order():
            derivative = _Derivative.of(run.step, consts, carry, any_layer, moving)

            def iteration(carry: Any, number: Any, derivative: Any = derivative) -> Any:
                carry, outputs, kept = derivative.forward(consts, carry, _layer(xs, number))
                return carry, (outputs, kept)

            numbers = jnp.arange(*layers)
            carry, (stacked, kept) = lax.scan(iteration, carry, numbers, reverse=self.reverse)
            outputs.append(stacked)
            done.append(_Done(derivative, layers))
            all_kept.append(kept)

        def backward(all_kept: Any, consts: Any, xs: Any, *cotangents: Any) -> Any:
            return self._backward(moving, done, all_kept, consts, xs, cotangents)

        saved = jax.tree_util.Partial(backward, all_kept, consts, xs)
        return (carry, self._joined(outputs)), saved

    def _backward(
        self,
        moving: _Moving,
        done: list["_Done"],
        all_kept: list[Any],
        consts: list[Any],
        xs: list[Any],
        cotangents: Any,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradients of all inputs; None for those that are not differentiated.

        Args:
            moving: which inputs are differentiated.
            done: the derivative of each run, and its layers, in the order of evaluation.
            all_kept: what each of the runs has kept.
            consts: what every iteration got.
            xs: the stacks.
            cotangents: those of the last carry and of the stacked outputs.
        """
        last_carry, of_outputs = cotangents
        outputs = instantiated(done[0].derivative.outputs.split(of_outputs)[0])
        gradients = _Gradients(
            carry=instantiated(_chosen(last_carry, moving.init)),
            consts=[jnp.zeros_like(x) for x in _chosen(consts, moving.consts)],
            xs=[jnp.zeros_like(x) for x in _chosen(xs, moving.xs)],
        )
        for (derivative, layers), stacks in zip(reversed(done), reversed(all_kept), strict=True):
            kept = Kept(stacks, *layers, self.reverse)

            def iteration(
                state: Any, at: Any, derivative: Any = derivative, kept: Kept = kept
            ) -> Any:
                (gradients, copies), (number, on_device) = state, at
                given = consts, _layer(xs, number), gradients.carry, _layer(outputs, number)

                def backward(on_host: list[Any]) -> Any:
                    return derivative.backward(kept.merged(on_device, on_host), *given)

                carry, added, layer = with_copies(backward, kept.of_layer(number), copies)
                gradients = gradients.with_layer(number, carry, added, layer)
                return (gradients, kept.next_copies(number)), None

            xs_of_run = jnp.arange(*layers), kept.on_device
            state = gradients, kept.first_copies()
            (gradients, _), _ = lax.scan(iteration, state, xs_of_run, reverse=not self.reverse)
        return (
            _spread(gradients.consts, moving.consts),
            _spread(gradients.carry, moving.init),
            _spread(gradients.xs, moving.xs),
        )

    def _in_order(self) -> list[tuple[Run, tuple[int, int]]]:
        """The runs in the order in which they are evaluated, with where their layers start and
        stop.
        """
        starts = [0, *[run.stop for run in self.runs]]
        in_order = []
        for run, start in zip(self.runs, starts, strict=False):
            in_order.append((run, (start, run.stop)))
        if self.reverse:
            in_order.reverse()
        return in_order

    def _joined(self, outputs: list[list[Any]]) -> list[Any]:
        """The outputs of all layers, from those of each run in the order of evaluation."""
        if self.reverse:
            outputs = outputs[::-1]
        return [jnp.concatenate(parts) for parts in zip(*outputs, strict=True)]


class _Done(NamedTuple):
    """A run that was evaluated: the derivative of a layer, and where its layers start and stop."""

    derivative: "_Derivative"
    layers: tuple[int, int]


class _Gradients(NamedTuple):
    """Gradients so far, of what is differentiated."""

    carry: list[Any]
    consts: list[Any]
    xs: list[Any]

    def with_layer(
        self, number: Any, carry: list[Any], added: list[Any], layer: list[Any]
    ) -> "_Gradients":
        """These after one more layer, whose own go into the stacks."""
        consts = [jnp.add(x, y) for x, y in zip(self.consts, added, strict=True)]
        stacks = []
        for stack, gradient in zip(self.xs, layer, strict=True):
            stacks.append(lax.dynamic_update_index_in_dim(stack, gradient, number, 0))
        return _Gradients(carry, consts, stacks)


def _layer(stacks: list[Any], number: Any) -> list[Any]:
    """One layer of each stack."""
    return [lax.dynamic_index_in_dim(x, number, 0, keepdims=False) for x in stacks]


def _chosen(values: list[Any], which: list[bool]) -> list[Any]:
    return [value for value, is_chosen in zip(values, which, strict=True) if is_chosen]


def _spread(values: list[Any], which: list[bool]) -> list[Any]:
    """The inverse of `_chosen`, with None in the other places."""
    remaining = iter(values)
    return [next(remaining) if is_chosen else None for is_chosen in which]


def _replaced(values: list[Any], which: list[bool], chosen: list[Any]) -> list[Any]:
    """The values with the chosen ones replaced by others."""
    remaining = iter(chosen)
    replaced = []
    for value, is_chosen in zip(values, which, strict=True):
        replaced.append(next(remaining) if is_chosen else value)
    return replaced


@dataclass(frozen=True, eq=False)
class _Derivative:
    """One iteration with its linearization, traced.

    What its backward pass reads and every iteration has in any case, constants and layers of
    stacks, is not kept.
    """

    traced: ClosedJaxpr  # returns the results and then what the backward pass reads
    tree: Any  # the structure of JAX's backward function, whose leaves are the latter
    carries: Partition  # which carries have derivatives
    outputs: Partition  # the same of the outputs
    const_vars: list[Any]
    layer_vars: list[Any]
    moving: _Moving
    kept: list[Any]  # the variables that are kept

    @classmethod
    def of(
        cls, step: Step, consts: list[Any], carry: list[Any], layer: list[Any], moving: _Moving
    ) -> "_Derivative":
        """Trace an iteration. Shapes will do for its arguments."""
        trees, partitions = [], []

        def differentiated(consts: list[Any], carry: list[Any], layer: list[Any]) -> Any:
            inputs = [*consts, *carry, *layer]
            which = [*moving.consts, *moving.init, *moving.xs]

            def call(chosen: list[Any]) -> Any:
                values = _replaced(inputs, which, chosen)
                before_layer = len(consts) + len(carry)
                after, outputs = step(
                    values[: len(consts)], values[len(consts) : before_layer], values[before_layer:]
                )
                parts = Partition.by_dtype(after), Partition.by_dtype(outputs)
                partitions.append(parts)
                floats = [parts[0].split(after)[0], parts[1].split(outputs)[0]]
                return floats, (after, outputs)

            _, backward, results = jax.vjp(call, _chosen(inputs, which), has_aux=True)
            leaves, tree = jax.tree.flatten(backward)
            trees.append(tree)
            return results, leaves

        traced, shapes = jax.make_jaxpr(differentiated, return_shape=True)(consts, carry, layer)
        variables_in = traced.jaxpr.invars
        const_vars = variables_in[: len(consts)]
        layer_vars = variables_in[len(variables_in) - len(layer) :]
        results = len(jax.tree.leaves(shapes[0]))
        carries, outputs = partitions[-1]
        there = {*const_vars, *layer_vars, *traced.jaxpr.constvars}
        read = variables(traced.jaxpr.outvars[results:])
        kept = [var for var in dict.fromkeys(read) if var not in there]
        return cls(traced, trees[-1], carries, outputs, const_vars, layer_vars, moving, kept)

    def forward(
        self, consts: list[Any], carry: list[Any], layer: list[Any]
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The next carry, the outputs, and what is kept for the backward pass."""
        jaxpr = self.traced.jaxpr
        carries, outputs = len(self.carries.is_float), len(self.outputs.is_float)
        wanted = jaxpr.replace(outvars=[*jaxpr.outvars[: carries + outputs], *self.kept])
        results = jaxpr_as_fun(ClosedJaxpr(wanted, self.traced.consts))(*consts, *carry, *layer)
        return results[:carries], results[carries : carries + outputs], results[carries + outputs :]

    def backward(
        self,
        kept: list[Any],
        consts: list[Any],
        layer: list[Any],
        carry_cotangents: list[Any],
        output_cotangents: list[Any],
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradients of the carry, of constants and of the layer, of what is differentiated.

        Outputs that have no derivatives have no cotangents here either.
        """
        jaxpr = self.traced.jaxpr
        values = dict(zip(self.kept, kept, strict=True))
        values.update(zip(self.const_vars, consts, strict=True))
        values.update(zip(self.layer_vars, layer, strict=True))
        values.update(zip(jaxpr.constvars, self.traced.consts, strict=True))
        results = len(self.carries.is_float) + len(self.outputs.is_float)
        residuals = values_of(jaxpr.outvars[results:], values)
        backward = self.tree.unflatten(residuals)
        (gradients,) = backward([carry_cotangents, output_cotangents])
        consts_count = sum(self.moving.consts)
        before_layer = consts_count + sum(self.moving.init)
        return (
            gradients[consts_count:before_layer],
            gradients[:consts_count],
            gradients[before_layer:],
        )
