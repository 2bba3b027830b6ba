"""The work outside the loops over layers: the head, and gradients through starts and constants.

    inputs --> [ start ] -> layers ... -> [ start ] -> layers ... -> [ head ] --> loss
    outer weights --> [ trained constants ] --> layers

Starts and heads run in the tick of the pass through the part next to them. Forward, a start is
the input of the first part of its loop, and is computed in that pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from shardlib.pipeline._buffers import (
    Buffers,
    read_slot,
    replaced,
    split_differentiable,
    with_slot,
)
from shardlib.pipeline._cut import Cut
from shardlib.pipeline._loop import Arrays
from shardlib.pipeline._pass_row import PassRow, switch_loop
from shardlib.pipeline._program import Program


@dataclass(frozen=True, eq=False)
class OutsideLoops:
    """The work of a stage outside the loops, for a cut function and a program.

    - `outer` are the outer weights, those outside all loops. `outer_sums`, below, are the sums of
      their gradients.
    - `inputs(microbatch)` gives the inputs of the function.
    - `summed_outputs` are the positions of the outputs that are summed over microbatches.
    """

    cut: Cut
    program: Program
    outer: Arrays
    inputs: Callable[[Any], Arrays]
    summed_outputs: Sequence[int]

    def head(
        self,
        pass_row: PassRow,
        output_wire: Arrays,
        buffers: Buffers,
        outer_sums: Arrays,
        totals: Arrays,
    ) -> tuple[Buffers, Arrays, Arrays]:
        """What comes after the last part, and at once its gradient.

        The backward pass of the head does not wait for a tick of its own: what it would keep until
        then, the logits among it, is large.

        Args:
            pass_row: The forward pass through the last part.
            output_wire: What comes out of that part.
            buffers: All buffers; the gradients of `output_wire` go into a slot.
            outer_sums: Sums of gradients of the outer weights, which the head's are added to.
            totals: The sums that the function's outputs are added to.

        Returns:
            Updated `buffers`, `outer_sums` and `totals`.
        """
        last = len(self.cut.loops) - 1
        inputs = self.inputs(pass_row.microbatch)
        # Differentiate only the outer weights that the head uses. JAX would make arrays of zeros
        # as gradients of the others.
        trained = self.cut.head_weights
        floats, with_floats = split_differentiable(
            self.cut.wire.unpacked(last, output_wire), self.cut.loops[last].differentiable
        )

        def loss(floats: Arrays, weights: Arrays) -> tuple[Any, Arrays]:
            outer = replaced(self.outer, trained, weights)
            travelled = with_floats(floats)
            # Output 0 is the loss, which is differentiated; the rest is only added up.
            total, *others = self.cut.after(outer, inputs, travelled, [0, *self.summed_outputs])
            return total, others

        differentiated = jax.value_and_grad(loss, (0, 1), has_aux=True)
        weights = [self.outer[k] for k in trained]
        (_, outputs), (travelled_gradients, weight_gradients) = differentiated(floats, weights)
        gradient_wire = self.cut.wire.packed(last, travelled_gradients, backward=True)
        written = with_slot(buffers["gradients"], pass_row.slot("gradients"), gradient_wire)
        return (
            buffers | {"gradients": written},
            _with_gradients(outer_sums, trained, weight_gradients),
            [total + output for total, output in zip(totals, outputs, strict=True)],
        )

    def start_backward(
        self, pass_row: PassRow, gradient_wire: Arrays, buffers: Buffers, outer_sums: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The backward pass of the start of a loop, after that of the loop's first part.

        Args:
            pass_row: The backward pass through the first part of the loop.
            gradient_wire: The gradients that this pass has made, of what the start makes.
            buffers: All buffers, for what arrived at the start.
            outer_sums: Sums of gradients of the outer weights, which the start's are added to.

        Returns:
            The gradients for the previous loop, and updated `outer_sums`. For loop 0
            `gradient_wire` is returned unchanged: part 0 has no receiver.
        """
        do = partial(self._start_backward, buffers=buffers)
        return switch_loop(self.program, pass_row, do, gradient_wire, outer_sums)

    def _start_backward(
        self,
        loop: int,
        pass_row: PassRow,
        gradient_wire: Arrays,
        outer_sums: Arrays,
        buffers: Buffers,
    ) -> tuple[Arrays, Arrays]:
        # The start is computed again rather than kept, for it is little.
        inputs = self.inputs(pass_row.microbatch)
        trained = self.cut.start_weights(loop)
        travelled: Arrays = []
        # The first loop starts from the inputs, which have no gradient.
        differentiable: Sequence[bool] = []
        if loop > 0:
            arrived = read_slot(buffers["activations"], pass_row.slot("activations"))
            travelled = self.cut.wire.unpacked(loop - 1, arrived)
            differentiable = self.cut.loops[loop - 1].differentiable
        floats, with_floats = split_differentiable(travelled, differentiable)

        def start(floats: Arrays, weights: Arrays) -> Arrays:
            outer = replaced(self.outer, trained, weights)
            made = self.cut.start(loop, outer, inputs, with_floats(floats))
            return split_differentiable(made, self.cut.loops[loop].differentiable)[0]

        _, derivative = jax.vjp(start, floats, [self.outer[k] for k in trained])
        travelled_gradients, weight_gradients = derivative(
            self.cut.wire.unpacked(loop, gradient_wire, backward=True)
        )
        gradient_to_previous_loop = gradient_wire
        if loop > 0:
            gradient_to_previous_loop = self.cut.wire.packed(
                loop - 1, travelled_gradients, backward=True
            )
        outer_sums = _with_gradients(outer_sums, trained, weight_gradients)
        return gradient_to_previous_loop, outer_sums

    def constants_backward(self, loop: int, outer_sums: Arrays, sums: Arrays) -> Arrays:
        """Pull the summed gradients of a loop's trained constants back to the outer weights.

        `sums` are those gradients, and the result is `outer_sums` with theirs added. It is enough
        to do this once per step: the constants are the same for all microbatches, and their
        derivative is linear.
        """
        trained = self.cut.shared_weights(loop)

        def constants(weights: Arrays) -> Arrays:
            return self.cut.constants(loop, replaced(self.outer, trained, weights))[0]

        made, derivative = jax.vjp(constants, [self.outer[k] for k in trained])
        # Sums are in float32 at least, and the derivative takes the dtype of the constants. So each
        # gradient is rounded once, after all microbatches.
        constant_gradients = [total.astype(x.dtype) for total, x in zip(sums, made, strict=True)]
        (weight_gradients,) = derivative(constant_gradients)
        return _with_gradients(outer_sums, trained, weight_gradients)


def _with_gradients(outer_sums: Arrays, positions: Sequence[int], gradients: Arrays) -> Arrays:
    """The sums of the outer weights with gradients of those at some positions added."""
    added = []
    for k, gradient in zip(positions, gradients, strict=True):
        added.append(outer_sums[k] + gradient.astype(outer_sums[k].dtype))
    return replaced(outer_sums, positions, added)
