"""One loop over layers in a traced loss: what goes in and out, and one layer of it as a function.

A loop over layers is a `scan` equation whose body is one layer. A pipeline runs its layers on
different stages, so that each input and output has to be sorted by how a stage comes by it:

    inputs of the scan                  how a stage gets it
    ------------------                  -------------------
    constants   carried_inputs          sent from part to part, beside the carry
                trained_constants       computed from weights, once for each stage
                frozen_constants        the same, but no gradient goes back
                shared_inputs           computed from the microbatch, whenever it is needed
    carry                               sent from part to part
    scanned     weight_inputs           the stage's own layers
                per_layer_inputs        computed from the microbatch, whenever it is needed

    outputs of the scan
    -------------------
    carry                               sent on, and read after the last part
    stacked     stacked_outputs         sent on; each part fills in the rows of its layers
                batch_only_outputs      computed from the microbatch without any layer
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from shardlib.tracing._jaxpr import (
    behind,
    inlined,
    inputs_of,
    made_of,
    picked,
    scan_parts,
    shapes_of,
    variables,
)

Arrays = list[Any]
Shapes = list[jax.ShapeDtypeStruct]


@dataclass(frozen=True, eq=False)
class Weight:
    """One weight of a loss that is to be cut.

    `value` is an array or its shape, `path` is how messages call it, and `stacked_dim` is the name
    of the dim along which the weights of many layers are stacked, if there is one.
    """

    value: Any
    path: str
    stacked_dim: str | None
    trained: bool


@dataclass(frozen=True, eq=False)
class LayerScan:
    """A `scan` equation that goes over stacked weights, and the numbers of these weights."""

    equation: Any
    weights: list[int]


@dataclass(frozen=True, eq=False)
class Loop:
    """One loop over layers, with its inputs and outputs sorted by how a stage gets them.

    Inputs and outputs are given by their positions in the `scan`; the module's docstring has the
    whole table. What *travels* from part to part is a list of arrays, in this order: the carry, the
    carried inputs, what passes by for later loops, and the stacked outputs, of which each part
    fills in its own rows.

    - `weight_inputs` are the stacked weights, trained ones first, and `weight_numbers` says which
      of all weights of the loss these are.
    - `passing` are outputs of earlier loops that are read only after this loop.
    """

    equation: Any
    weight_inputs: tuple[int, ...]
    weight_numbers: tuple[int, ...]
    carried_inputs: tuple[int, ...]
    trained_constants: tuple[int, ...]
    frozen_constants: tuple[int, ...]
    batch_only_outputs: tuple[int, ...] = ()
    stacked_outputs: tuple[int, ...] = ()
    passing: tuple[Any, ...] = ()

    @property
    def layers(self) -> int:
        """The number of layers, which is how often the `scan` goes round."""
        return self.equation.params["length"]

    @cached_property
    def parts(self) -> tuple[int, int]:
        """How many constants and how many carries the `scan` has; they are its first inputs."""
        return scan_parts(self.equation)

    @cached_property
    def entering(self) -> list[Any]:
        """The variables that have to be computed before the first layer can run.

        These are the initial carry, then the carried inputs: the beginning of what travels.
        """
        constants, carries = self.parts
        inputs = self.equation.invars
        # The order is that of `travelling`: whatever enters is at its beginning.
        carried = picked(inputs, self.carried_inputs)
        return [*inputs[constants : constants + carries], *carried]

    @cached_property
    def shared_inputs(self) -> list[int]:
        """The inputs that are the same for all layers and computed from the microbatch only.

        They do not travel: it is cheaper to compute them again on each stage than to send them.
        """
        # Constants that are sorted into no other list are made of the microbatch.
        elsewhere = {*self.carried_inputs, *self.trained_constants, *self.frozen_constants}
        return [k for k in range(self.parts[0]) if k not in elsewhere]

    @cached_property
    def per_layer_inputs(self) -> list[int]:
        """The scanned inputs other than weights, such as the numbers of the layers.

        Each layer takes one slice of them. They are computed from the microbatch only; anything
        else has been refused when the loss was cut.
        """
        scanned = range(sum(self.parts), len(self.equation.invars))
        return [k for k in scanned if k not in self.weight_inputs]

    @cached_property
    def leaving(self) -> list[Any]:
        """For each array that travels, the variable whose value it is after the last part.

        It is None for the carried inputs: whoever reads these later computes them again.
        """
        outputs = self.equation.outvars
        return [
            *outputs[: self.parts[1]],
            # Their values have not changed on the way.
            *([None] * len(self.carried_inputs)),
            *self.passing,
            *picked(outputs, self.stacked_outputs),
        ]

    @cached_property
    def travelling(self) -> Shapes:
        """Shapes and dtypes of the arrays that travel from part to part, in their order."""
        stacked = picked(self.equation.outvars, self.stacked_outputs)
        return shapes_of([*self.entering, *self.passing, *stacked])

    @cached_property
    def differentiable(self) -> list[bool]:
        """For each array that travels, whether a gradient of it comes back.

        Integers, such as counters, travel forward only.
        """
        return [jnp.issubdtype(shape.dtype, jnp.inexact) for shape in self.travelling]

    def split_travelling(
        self, arrays: Arrays, *, backward: bool = False
    ) -> tuple[Arrays, Arrays, Arrays]:
        """What travels, split into what enters the layers, what passes by, and stacked outputs.

        If `backward`, the arrays are gradients, which only the differentiable arrays have.
        """
        # What travels is laid out as [entering | passing | stacked].
        passing_from = len(self.entering)
        stacked_from = passing_from + len(self.passing)
        if backward:
            passing_from = sum(self.differentiable[:passing_from])
            stacked_from = sum(self.differentiable[:stacked_from])
        return arrays[:passing_from], arrays[passing_from:stacked_from], arrays[stacked_from:]

    @cached_property
    def layer(self) -> ClosedJaxpr:
        """One layer as a function, its arguments in the order in which `derivative` wants them.

        The arguments are: what enters and is differentiable, what else enters; the trained
        constants; the layer's weights, trained ones first; the frozen constants; the shared inputs;
        and the layer's slices of the per-layer inputs. The results are what enters the next layer,
        in the order of `entering`, and then the layer's rows of the stacked outputs.
        """
        _, carries = self.parts
        body = self.equation.params["jaxpr"]
        order = self._argument_order

        def layer(*arguments: Any) -> Arrays:
            # The scan body wants inputs by position; `order` says which argument each of them is.
            inputs = dict(zip(order, arguments, strict=True))
            results = jaxpr_as_fun(body)(*picked(inputs, range(len(body.jaxpr.invars))))
            return [
                *results[:carries],
                *picked(inputs, self.carried_inputs),
                *picked(results, self.stacked_outputs),
            ]

        return jax.make_jaxpr(layer)(*shapes_of(body.jaxpr.invars[k] for k in order))

    @property
    def _argument_order(self) -> list[int]:
        """The positions of the scan body's inputs, in the order of the arguments of `layer`."""
        constants, carries = self.parts
        entering = [*range(constants, constants + carries), *self.carried_inputs]
        floats, others = [], []
        # `differentiable` is longer: it goes on with what passes by and with stacked outputs.
        for k, differentiable in zip(entering, self.differentiable, strict=False):
            if differentiable:
                floats.append(k)
            else:
                others.append(k)
        return [
            *floats,
            *others,
            *self.trained_constants,
            *self.weight_inputs,
            *self.frozen_constants,
            *self.shared_inputs,
            *self.per_layer_inputs,
        ]


def batch_only_values(loop: Loop, shared: Arrays, per_layer: Arrays) -> Arrays:
    """The loop's outputs that no layer has a part in, computed from the microbatch.

    `shared` and `per_layer` are the values of the loop's inputs of these kinds. The result has the
    values of `loop.batch_only_outputs`, stacked over all layers: a small `scan` makes them, whose
    body is what is left of the layer.
    """
    body = body_of(loop.equation)
    # Inlining keeps the inputs and outputs of the body where they are.
    names = picked(body.jaxpr.invars, (*loop.shared_inputs, *loop.per_layer_inputs))
    wanted = picked(body.jaxpr.outvars, loop.batch_only_outputs)

    def layer(_: None, slices: Arrays) -> tuple[None, Arrays]:
        values = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        values |= dict(zip(names, [*shared, *slices], strict=True))
        return None, made_of(body.jaxpr, wanted, values)

    return lax.scan(layer, None, per_layer, length=loop.layers)[1]


def body_of(equation: Any) -> ClosedJaxpr:
    """A loop's scan body with its calls inlined, so that dependencies can be followed through."""
    return inlined(equation.params["jaxpr"], lambda _: True)


def outputs_behind(
    jaxpr: Jaxpr, wanted: Sequence[Any], loops: Sequence[Loop]
) -> list[tuple[int, Any]]:
    """The outputs of loops that `wanted` is computed from, each with the number of its loop.

    Only the last loop on each way counts: the search stops at an output of a loop. Outputs that are
    computed from the microbatch only are left out, for no layer is needed to have them. The order
    is that in which the outputs are read.
    """
    # No variable is an output of two loops.
    loop_of_output: dict[Any, int] = {}
    without_layers: set[Any] = set()
    for number, loop in enumerate(loops):
        outputs = loop.equation.outvars
        loop_of_output.update(dict.fromkeys(outputs, number))
        without_layers.update(picked(outputs, loop.batch_only_outputs))
    # An output of a loop is taken as given here: what lies behind it is the loop's own affair.
    equations = behind(jaxpr, wanted, loop_of_output)
    read = dict.fromkeys([*inputs_of(equations), *variables(wanted)])
    outputs_read = []
    for variable in read:
        # What a loop makes of the batch only is there before any layer.
        if variable in loop_of_output and variable not in without_layers:
            outputs_read.append((loop_of_output[variable], variable))
    return outputs_read
