"""One layer's derivative, in the pieces that a schedule does at different times.

A forward pass keeps what its backward pass reads, except weights, what every stage makes for
itself, and what is made of these alone. A split backward pass first makes the gradient of what
travels, and leaves what the gradients of weights take beside what was kept: where the two part in
the traced backward pass is found, not written down.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from shardlib.pipeline._loop import Loop
from shardlib.tracing._jaxpr import JITS, Stretch, behind, inlined, inputs_of, variables
from shardlib.tracing._linearize import derivative

Arrays = list[Any]


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer, forward and backward, all lists of arrays.

    - `forward(travelling, weights, own)`: what travels on, what it tells besides, what is kept.
    - `backward(kept, weights, own, gradients)`: gradients of what travels, and of trained weights.
    - `inputs(kept, weights, own, gradients)`: gradients of what travels, and what is left.
    - `weights(kept, weights, own, left)`: gradients of trained weights.

    `weights` are first those that all layers share, then the layer's. `own` is what every stage
    makes for itself. Gradients are those of what has derivatives: of what travels on, then of what
    is given besides.
    """

    forward: Callable[[Arrays, Arrays, Arrays], tuple[Arrays, Arrays, Arrays]]
    backward: Callable[[Arrays, Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    inputs: Callable[[Arrays, Arrays, Arrays, Arrays], tuple[Arrays, Arrays]]
    weights: Callable[[Arrays, Arrays, Arrays, Arrays], Arrays]
    kept: Sequence[Any]
    left: Sequence[Any]


def layer(loop: Loop, trained_weights: Container[int], splits: bool) -> Layer:
    """The derivative of one layer of a loop, `splits` or not."""
    # Calls taken apart, so that what each makes of the examples alone, a mask say, is seen to be
    # that, and not kept.
    closed = inlined(loop.layer, lambda equation: equation.primitive.name in JITS)
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
    travels = len(loop.entering)
    smooth = loop.smooth[:travels]
    moving = sum(smooth)
    trained = len(loop.moved) + sum(k in trained_weights for k in loop.stacked)
    floats, others, given = avals[:moving], avals[moving:travels], avals[travels:]
    there, back = derivative(closed, [True] * moving, trained, floats, others, given)
    kept = jax.eval_shape(there, *floats, *others, *given)[1]
    results = closed.jaxpr.outvars
    gradients = [
        jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
        for var in results
        if jnp.issubdtype(var.aval.dtype, jnp.inexact)
    ]

    def forward(travelling: Arrays, weights: Arrays, own: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        parted = [
            x
            for of in (True, False)
            for x, one in zip(travelling, smooth, strict=True)
            if one == of
        ]
        made, residuals = there(*parted, *weights, *own)
        return made[:travels], made[travels:], residuals

    def backward(
        kept: Arrays, weights: Arrays, own: Arrays, gradients: Arrays
    ) -> tuple[Arrays, Arrays]:
        return back(kept, [*weights, *own], gradients)

    if not splits:
        return Layer(forward, backward, _none, _none, kept, ())
    traced = inlined(
        jax.make_jaxpr(lambda *given: list(chain(*back(*given))))(kept, given, gradients),
        lambda _: True,
    )
    jaxpr, consts = traced.jaxpr, dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    of_kept, of_given = jaxpr.invars[: len(kept)], jaxpr.invars[len(kept) : len(kept) + len(given)]
    of_gradients = jaxpr.invars[len(kept) + len(given) :]
    to_inputs, to_weights = jaxpr.outvars[:moving], jaxpr.outvars[moving:]
    first = behind(jaxpr, to_inputs)
    # Left is what gradients went into; what is made of what was kept alone, as all that is
    # recomputed, is made again.
    made = set(of_gradients)
    for equation in first:
        if made.intersection(variables(equation.invars)):
            made.update(equation.outvars)
    second = behind(jaxpr, to_weights, made)
    read = [*inputs_of(second), *variables(to_weights)]
    left = list(dict.fromkeys(var for var in read if var in made))
    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in left]

    def run(equations: list[Any], wanted: Sequence[Any], values: dict[Any, Any]) -> Arrays:
        needed = inputs_of(equations)
        outputs = list(
            dict.fromkeys(v for equation in equations for v in equation.outvars if v in set(wanted))
        )
        values = values | dict(
            zip(
                outputs,
                Stretch(jaxpr, equations, needed, outputs)([values[v] for v in needed]),
                strict=True,
            )
        )
        return [atom.val if not variables([atom]) else values[atom] for atom in wanted]

    def known(kept: Arrays, weights: Arrays, own: Arrays) -> dict[Any, Any]:
        return {
            **consts,
            **dict(zip(of_kept, kept, strict=True)),
            **dict(zip(of_given, [*weights, *own], strict=True)),
        }

    def inputs(
        kept: Arrays, weights: Arrays, own: Arrays, gradients: Arrays
    ) -> tuple[Arrays, Arrays]:
        values = known(kept, weights, own) | dict(zip(of_gradients, gradients, strict=True))
        found = run(first, [*to_inputs, *left], values)
        return found[:moving], found[moving:]

    def of_weights(kept: Arrays, weights: Arrays, own: Arrays, left_now: Arrays) -> Arrays:
        return run(
            second, to_weights, known(kept, weights, own) | dict(zip(left, left_now, strict=True))
        )

    return Layer(forward, backward, inputs, of_weights, kept, shapes)


def _none(*_: Any) -> Any:
    raise AssertionError("this schedule does not split its backward passes")
