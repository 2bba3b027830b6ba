"""One layer's derivative, in the pieces that a schedule runs at different times.

A forward pass keeps what its backward pass reads (the *residuals*), except weights, what every
stage computes for itself, and what is made of these only.

A backward pass that is split runs in two pieces. `B` makes the gradients of the layer's inputs, for
which the stage before waits; `W` makes those of its weights, for which nobody does. Where the two
part is found in the traced backward pass, not written down:

    gradients --> [ first equations ] --> gradients of inputs
                          |
                          | saved for weights: values that gradients went into
                          v
    residuals --> [ second equations ] --> gradients of weights
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal

from shardlib.pipeline._loop import Arrays, Loop, Shapes
from shardlib.tracing._jaxpr import (
    JITS,
    Stretch,
    behind,
    inlined,
    inputs_of,
    picked,
    shapes_of,
    variables,
)
from shardlib.tracing._linearize import derivative


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of a loop, forward and backward; all arguments and results are lists of arrays.

    In the methods, `weights` are first the constants that all layers share, then the layer's own
    weights. `local_inputs` is what every stage computes for itself. `gradients` are those of the
    forward pass's results that are differentiable: of what travels on, then of the stacked outputs.

    - `differentiable` says which of the arrays that enter the layer have gradients.
    - `run_forward` and `run_backward` are the two functions that `derivative` gives.
    - `residual_shapes` are those of what a forward pass keeps.
    - `split` has the two pieces of the backward pass, where the schedule splits it.
    """

    differentiable: Sequence[bool]
    run_forward: Callable[..., tuple[Arrays, Arrays]]
    run_backward: Callable[..., tuple[Arrays, Arrays]]
    residual_shapes: Sequence[Any]
    split: "_SplitBackward | None"

    @property
    def saved_shapes(self) -> Shapes:
        """Shapes of what a split backward pass saves for the gradients of weights."""
        if self.split is None:
            return []
        return shapes_of(self.split.saved_for_weights)

    def forward(
        self, travelling: Arrays, weights: Arrays, local_inputs: Arrays
    ) -> tuple[Arrays, Arrays, Arrays]:
        """What travels on, the layer's rows of the stacked outputs, and the residuals."""
        floats, others = [], []
        for array, differentiable in zip(travelling, self.differentiable, strict=True):
            if differentiable:
                floats.append(array)
            else:
                others.append(array)
        # The function takes what is differentiated first.
        made, residuals = self.run_forward(*floats, *others, *weights, *local_inputs)
        entering = len(self.differentiable)
        return made[:entering], made[entering:], residuals

    def backward(
        self, residuals: Arrays, weights: Arrays, local_inputs: Arrays, gradients: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The gradients of what entered the layer, and those of the trained weights."""
        return self.run_backward(residuals, [*weights, *local_inputs], gradients)

    def input_gradients(
        self, residuals: Arrays, weights: Arrays, local_inputs: Arrays, gradients: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The gradients of what entered the layer, and what is saved for those of the weights."""
        assert self.split is not None, "this schedule does not split its backward passes"
        return self.split.input_gradients(residuals, [*weights, *local_inputs], gradients)

    def weight_gradients(
        self,
        residuals: Arrays,
        weights: Arrays,
        local_inputs: Arrays,
        saved_for_weights: Arrays,
    ) -> Arrays:
        """The gradients of the trained weights, from what `input_gradients` has saved."""
        assert self.split is not None, "this schedule does not split its backward passes"
        arguments = [*weights, *local_inputs]
        return self.split.weight_gradients(residuals, arguments, saved_for_weights)


def layer(cut_loop: Loop, trained_weights: Container[int], splits: bool) -> Layer:
    """The derivative of one layer of a loop, in two pieces if the schedule `splits` it.

    `trained_weights` has the numbers of those of the loss's weights that are trained.
    """
    # Calls are inlined, so that what each makes of the microbatch only, such as a mask, is seen to
    # be that, and is not kept.
    closed = inlined(cut_loop.layer, lambda equation: equation.primitive.name in JITS)
    shapes = shapes_of(closed.jaxpr.invars)
    entering = len(cut_loop.entering)
    differentiable = cut_loop.differentiable[:entering]
    # The arguments of `Loop.layer` begin with what enters, differentiable arrays first.
    count = sum(differentiable)
    trained = len(cut_loop.trained_constants)
    trained += sum(k in trained_weights for k in cut_loop.weight_numbers)
    floats, others, arguments = shapes[:count], shapes[count:entering], shapes[entering:]
    forward, backward = derivative(closed, [True] * count, trained, floats, others, arguments)
    # What is kept is seen only once the forward function is traced.
    residual_shapes = jax.eval_shape(forward, *floats, *others, *arguments)[1]
    split = None
    if splits:
        results = _differentiable_shapes(closed.jaxpr.outvars)
        split = _split(backward, count, residual_shapes, arguments, results)
    return Layer(differentiable, forward, backward, residual_shapes, split)


def _differentiable_shapes(variables_of: Sequence[Any]) -> Shapes:
    """The shapes of those variables that can have gradients: not of counters, for instance."""
    shapes = []
    for shape in shapes_of(variables_of):
        if jnp.issubdtype(shape.dtype, jnp.inexact):
            shapes.append(shape)
    return shapes


@dataclass(frozen=True, eq=False)
class _SplitBackward:
    """A traced backward pass, cut into the equations that run first and those that can wait.

    - `constants` are the values of the jaxpr's constants, by variable.
    - `residuals`, `arguments` and `gradients` are its inputs: the second are weights with local
      inputs, the third the gradients of the forward pass's results.
    - `to_inputs` and `to_weights` are its outputs.
    - `saved_for_weights` are the values that the first equations make and the second ones read.
    """

    jaxpr: Jaxpr
    constants: dict[Any, Any]
    residuals: Sequence[Any]
    arguments: Sequence[Any]
    gradients: Sequence[Any]
    to_inputs: Sequence[Any]
    to_weights: Sequence[Any]
    first: list[Any]
    second: list[Any]
    saved_for_weights: list[Any]

    def input_gradients(
        self, residuals: Arrays, arguments: Arrays, gradients: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Run the first equations: the gradients of inputs, and the values that are saved."""
        values = self._known(residuals, arguments)
        values |= dict(zip(self.gradients, gradients, strict=True))
        results = self._run(self.first, [*self.to_inputs, *self.saved_for_weights], values)
        count = len(self.to_inputs)
        return results[:count], results[count:]

    def weight_gradients(
        self, residuals: Arrays, arguments: Arrays, saved_for_weights: Arrays
    ) -> Arrays:
        """Run the second equations, on what the first ones have saved."""
        values = self._known(residuals, arguments)
        values |= dict(zip(self.saved_for_weights, saved_for_weights, strict=True))
        return self._run(self.second, self.to_weights, values)

    def _known(self, residuals: Arrays, arguments: Arrays) -> dict[Any, Any]:
        """The values, by variable, that both pieces have."""
        # Weights and local inputs are there in both passes, and are not kept in between.
        values = dict(self.constants)
        values |= dict(zip(self.residuals, residuals, strict=True))
        values |= dict(zip(self.arguments, arguments, strict=True))
        return values

    def _run(self, equations: list[Any], wanted: Sequence[Any], values: dict[Any, Any]) -> Arrays:
        """The values of `wanted` after some equations, given those of what these read.

        Args:
            equations: equations of the layer's backward pass, in order.
            wanted: the variables whose values are returned.
            values: what is known, by variable; it is added to.
        """
        needed = inputs_of(equations)
        outputs = _outputs_among(wanted, equations)
        # Equations may read each other's results, and all else comes as an argument.
        stretch = Stretch(self.jaxpr, equations, needed, outputs)
        results = stretch(picked(values, needed))
        values = values | dict(zip(outputs, results, strict=True))
        # A gradient that is zero whatever happens is a literal.
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in wanted]


def _outputs_among(wanted: Sequence[Any], equations: Sequence[Any]) -> list[Any]:
    """Those of the wanted variables that some equations compute, in the order of these, each once.

    The others are inputs of the equations, or literals.
    """
    wanted_variables = set(variables(wanted))
    outputs: dict[Any, None] = {}
    for equation in equations:
        for variable in equation.outvars:
            if variable in wanted_variables:
                outputs[variable] = None
    return list(outputs)


def _split(
    backward: Callable[..., tuple[Arrays, Arrays]],
    count: int,
    residual_shapes: Sequence[Any],
    arguments: Sequence[Any],
    results: Sequence[Any],
) -> _SplitBackward:
    """Trace a backward pass and find where the gradients of its inputs and of its weights part.

    Args:
        backward: The backward pass, as `derivative` gives it.
        count: How many of the layer's inputs have gradients.
        residual_shapes: Shapes of the residuals.
        arguments: Shapes of weights and local inputs.
        results: Shapes of the forward pass's results that are differentiable.
    """

    def flat(*inputs: Any) -> Arrays:
        to_inputs, to_weights = backward(*inputs)
        return [*to_inputs, *to_weights]

    traced = inlined(jax.make_jaxpr(flat)(residual_shapes, arguments, results), lambda _: True)
    jaxpr = traced.jaxpr
    after_residuals = len(residual_shapes)
    after_arguments = after_residuals + len(arguments)
    gradients = jaxpr.invars[after_arguments:]
    to_inputs, to_weights = jaxpr.outvars[:count], jaxpr.outvars[count:]
    # Whatever the gradients of inputs need has to run in the first pass.
    first = behind(jaxpr, to_inputs)
    # What is saved for later is only what gradients went into. What is made of residuals only, such
    # as all that is recomputed, is computed again rather than held.
    from_gradients = _made_from(gradients, first)
    second = behind(jaxpr, to_weights, from_gradients)
    # In order of use and each once: the order of what is saved in a buffer.
    read = dict.fromkeys([*inputs_of(second), *variables(to_weights)])
    return _SplitBackward(
        jaxpr=jaxpr,
        constants=dict(zip(jaxpr.constvars, traced.consts, strict=True)),
        residuals=jaxpr.invars[:after_residuals],
        arguments=jaxpr.invars[after_residuals:after_arguments],
        gradients=gradients,
        to_inputs=to_inputs,
        to_weights=to_weights,
        first=first,
        second=second,
        saved_for_weights=[variable for variable in read if variable in from_gradients],
    )


def _made_from(sources: Sequence[Any], equations: Sequence[Any]) -> set[Any]:
    """Some variables, and all that equations compute from them, directly or not.

    The equations are in the order in which they are computed.
    """
    reached = set(sources)
    for equation in equations:
        if reached.intersection(variables(equation.invars)):
            reached.update(equation.outvars)
    return reached
