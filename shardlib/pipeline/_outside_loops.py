"""The work outside the loops over layers: the head, and gradients through starts and constants.

    inputs --> [ start ] -> layers ... -> [ start ] -> layers ... -> [ head ] --> loss
    outer weights --> [ trained constants ] --> layers

The head runs right after the forward pass through the last part, in the same tick. The backward
pass of a loop's start runs right after that of the loop's first part. Forward, a start is computed
by the pass through the first part, as its input: see `Passes`. Constants are the same in all ticks,
and are computed before them; their gradients go backward once, after all ticks.
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
from shardlib.pipeline._cut_loss import Cut
from shardlib.pipeline._loop import Arrays
from shardlib.pipeline._pass_row import PassRow, switch_loop
from shardlib.pipeline._program import Program
from shardlib.tracing._jaxpr import picked


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
        """The head for one microbatch, forward and at once backward.

        The backward pass does not wait for a later tick. What it would keep until then is large:
        the logits, for instance.

        Args:
            pass_row: The forward pass through the last part.
            output_wire: What comes out of that part.
            buffers: All buffers. The gradients of `output_wire` go into a slot of `gradients`.
            outer_sums: Sums of gradients of the outer weights, which the head's are added to.
            totals: The sums that the summed outputs are added to.

        Returns:
            Updated `buffers`, `outer_sums` and `totals`.
        """
        last = len(self.cut.loops) - 1
        inputs = self.inputs(pass_row.microbatch)
        travelled = self.cut.wire.unpacked(last, output_wire)
        outputs, travelled_gradients, weight_gradients = self._head_gradients(inputs, travelled)
        gradient_wire = self.cut.wire.packed(last, travelled_gradients, backward=True)
        written = with_slot(buffers["gradients"], pass_row.slot("gradients"), gradient_wire)
        return (
            buffers | {"gradients": written},
            _with_gradients(outer_sums, self.cut.head_weights, weight_gradients),
            [total + output for total, output in zip(totals, outputs, strict=True)],
        )

    def _head_gradients(self, inputs: Arrays, travelled: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """The summed outputs, and the loss's gradients, for what came out of the last part.

        The gradients are those of the differentiable arrays of `travelled`, then those of the
        weights of the head.
        """
        # Differentiate only the outer weights that the head uses. JAX would make arrays of zeros
        # as gradients of the others.
        positions = self.cut.head_weights
        floats, with_floats = split_differentiable(travelled, self.cut.loops[-1].differentiable)

        def loss(floats: Arrays, weights: Arrays) -> tuple[Any, Arrays]:
            outer = replaced(self.outer, positions, weights)
            # Output 0 is the loss, which is differentiated. The summed outputs are others, and are
            # only added up.
            wanted = [0, *self.summed_outputs]
            value, *summed = self.cut.after(outer, inputs, with_floats(floats), wanted)
            return value, summed

        loss_and_gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)
        weights = picked(self.outer, positions)
        (_, outputs), (travelled_gradients, weight_gradients) = loss_and_gradients(floats, weights)
        return outputs, travelled_gradients, weight_gradients

    def start_backward(
        self, pass_row: PassRow, gradient_wire: Arrays, buffers: Buffers, outer_sums: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The backward pass of the start of a loop, after that of the loop's first part.

        Args:
            pass_row: The backward pass through the first part of the loop.
            gradient_wire: The gradients that this pass has made: those of what the start makes.
            buffers: All buffers. `activations` still holds what the start was made of.
            outer_sums: Sums of gradients of the outer weights, which the start's are added to.

        Returns:
            The gradients of what the loop before made, and updated `outer_sums`. No loop comes
            before loop 0, so that nobody receives its first result: it is `gradient_wire` itself.
        """
        # The branches only read the buffers, and so these are bound here. By convention, operands
        # of `switch_loop` are what the branches return updated.
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
        inputs = self.inputs(pass_row.microbatch)
        floats, with_floats = self._split_arrived(loop, pass_row, buffers)
        gradients = self.cut.wire.unpacked(loop, gradient_wire, backward=True)
        positions = self.cut.start_weights(loop)

        def start(floats: Arrays, weights: Arrays) -> Arrays:
            outer = replaced(self.outer, positions, weights)
            made = self.cut.start(loop, outer, inputs, with_floats(floats))
            return split_differentiable(made, self.cut.loops[loop].differentiable)[0]

        # It is cheaper to compute the start again than to keep what its derivative reads.
        _, derivative = jax.vjp(start, floats, picked(self.outer, positions))
        travelled_gradients, weight_gradients = derivative(gradients)
        if loop > 0:
            gradient_wire = self.cut.wire.packed(loop - 1, travelled_gradients, backward=True)
        return gradient_wire, _with_gradients(outer_sums, positions, weight_gradients)

    def _split_arrived(
        self, loop: int, pass_row: PassRow, buffers: Buffers
    ) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
        """What the start of a loop is made of besides weights and inputs.

        That is what came out of the loop before, split by `split_differentiable`.
        """
        if loop == 0:
            # Nothing was sent: this start is made of weights and inputs only.
            return split_differentiable([], [])
        arrived = read_slot(buffers["activations"], pass_row.slot("activations"))
        travelled = self.cut.wire.unpacked(loop - 1, arrived)
        return split_differentiable(travelled, self.cut.loops[loop - 1].differentiable)

    def constants_backward(self, loop: int, outer_sums: Arrays, sums: Arrays) -> Arrays:
        """Turn the gradients of a loop's trained constants into gradients of outer weights.

        `sums` are the former, summed over all passes. The result is `outer_sums` with the latter
        added. It is enough to do this once per step: the constants are the same for all
        microbatches, and a derivative is linear in the gradients that go into it.
        """
        positions = self.cut.shared_weights(loop)

        def constants(weights: Arrays) -> Arrays:
            return self.cut.constants(loop, replaced(self.outer, positions, weights))[0]

        made, derivative = jax.vjp(constants, picked(self.outer, positions))
        # Sums are in float32 at least, and the derivative takes the dtype of the constants. So a
        # gradient is rounded only once, after all microbatches.
        constant_gradients = [total.astype(x.dtype) for total, x in zip(sums, made, strict=True)]
        (weight_gradients,) = derivative(constant_gradients)
        return _with_gradients(outer_sums, positions, weight_gradients)


def _with_gradients(outer_sums: Arrays, positions: Sequence[int], gradients: Arrays) -> Arrays:
    """`outer_sums` with the gradients of the outer weights at some positions added."""
    added = []
    for k, gradient in zip(positions, gradients, strict=True):
        added.append(outer_sums[k] + gradient.astype(outer_sums[k].dtype))
    return replaced(outer_sums, positions, added)
