"""The passes of one stage: forward and backward through the layers of a part.

The model is cut into *parts*, numbered through all loops over layers. The parts of one stage, in
order, are its *chunks*. A pass takes one *microbatch* through one part.

    part   0 1 2 3 | 4 5 6 7      2 loops, 4 stages: parts_per_loop=4, chunks_per_loop=1
    stage  0 1 2 3 | 0 1 2 3      part 5 is in loop 5 // 4 = 1, and is chunk 1 of stage 1

What one pass makes for another waits in a *slot* of a buffer:

    buffer         made by                       read by
    activations    F of the part before          F; B, where it runs the part's layers again;
                                                 and `start_backward`, in loops after loop 0
    kept           F, or a B that recomputes     B; and W
    gradients      B of the part after, or head  B
    left           B, where B and W are split    W

A `PassRow` says which microbatch, part and slots a pass has, in traced numbers: all stages run one
program. Loops differ in code, which `switch_loop` chooses.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from shardlib.pipeline._buffers import (
    Buffers,
    empty,
    read_layer,
    read_slot,
    replaced,
    rows_of,
    slot_aside,
    with_layer,
    with_loop,
    with_rows,
)
from shardlib.pipeline._cut_loss import Cut
from shardlib.pipeline._layer import layer
from shardlib.pipeline._loop import Arrays
from shardlib.pipeline._parts import ArrivedGradients, BackwardPart, LocalInputs, StageLoop
from shardlib.pipeline._pass_row import PassRow, cond_told, switch_loop
from shardlib.pipeline._program import Program
from shardlib.pipeline._sweeps import Sweep, run_together
from shardlib.tracing._jaxpr import picked


@dataclass(eq=False)
class Passes:
    """The passes that one stage can do, for a cut function and a program.

    `weights` are all weights; the stacked ones have only this stage's layers, part after part.
    *Outer* weights are those outside all loops. `inputs(microbatch)` gives the inputs of the
    function.

    `B`, or `W` where they are split, adds the gradients of weights to `layer_sums`:

        layer_sums[loop] = [*sums of trained constants, *sums of trained stacks]

    The sum of a stack has a row for each of the stage's layers, as the stack has.
    """

    cut: Cut
    program: Program
    weights: Sequence[Any]
    inputs: Callable[[Any], Arrays]

    def __post_init__(self) -> None:
        self.table = self.program.table
        self.parts_per_loop = self.program.parts_per_loop
        # How many parts of each loop a stage has: `step/_layer_order` refuses unequal numbers.
        self.chunks_per_loop = self.parts_per_loop // self.table.stages
        self.outer = picked(self.weights, self.cut.outer)
        self.stage_loops = [self._stage_loop(loop) for loop in range(len(self.cut.loops))]

    # What a stage has.

    def _stage_loop(self, loop: int) -> StageLoop:
        """What this stage has of a loop."""
        cut_loop = self.cut.loops[loop]
        trained, frozen = self.cut.constants(loop, self.outer)
        return StageLoop(
            layer=layer(cut_loop, self.cut.trained, self.table.splits),
            stacks=picked(self.weights, cut_loop.weight_numbers),
            layers_per_part=cut_loop.layers // self.parts_per_loop,
            trained_constants=trained,
            frozen_constants=frozen,
        )

    def buffers(self) -> Buffers:
        """All buffers, filled with zeros.

        `activations` and `gradients` are written in every tick, with whatever arrives. They have a
        slot more, the last, into which goes what nobody reads. `kept` and `left` are written only
        by passes.
        """
        slots, wire = self.program.slots, self.cut.wire
        # What is sent has the same shapes for all loops, so that these two buffers have one number
        # of slots. The other two have one for each loop.
        activations = empty(wire.shapes, slots["activations"][0] + 1)
        gradients = empty(wire.gradient_shapes, slots["gradients"][0] + 1)
        residual_shapes = [stage_loop.layer.residual_shapes for stage_loop in self.stage_loops]
        saved_shapes = [stage_loop.layer.saved_shapes for stage_loop in self.stage_loops]
        return {
            "activations": activations,
            "gradients": gradients,
            "kept": self._empty(residual_shapes, slots["kept"]),
            "left": self._empty(saved_shapes, slots["left"]),
        }

    def _empty(self, shapes_of_loops: Sequence[Any], slots: Sequence[int]) -> list[Any]:
        """For each loop a buffer of zeros of its own shapes, for all layers of a part."""
        buffers = []
        for loop, shapes in enumerate(shapes_of_loops):
            buffers.append(empty(shapes, slots[loop], self.stage_loops[loop].layers_per_part))
        return buffers

    def _first_row(self, loop: int, pass_row: PassRow) -> Any:
        """The row of a part's first layer in the stage's stacks of a loop."""
        if self.chunks_per_loop == 1:
            return 0
        # Chunks are numbered through all loops. The chunks of earlier loops come before those of
        # this one.
        chunk_of_loop = pass_row.chunk - loop * self.chunks_per_loop
        return chunk_of_loop * self.stage_loops[loop].layers_per_part

    def _part_weights(self, loop: int, first_row: Any) -> Arrays:
        """The weights of a part's layers, which begin at a row of the stage's stacks."""
        stage_loop = self.stage_loops[loop]
        # A stage's only part of a loop has all of the stage's rows. A slice with a traced start
        # would copy them.
        if self.chunks_per_loop == 1:
            return stage_loop.stacks
        return rows_of(stage_loop.stacks, first_row, stage_loop.layers_per_part)

    def _local_inputs(self, loop: int, pass_row: PassRow) -> LocalInputs:
        """What a pass needs besides weights and buffers."""
        inputs = self.inputs(pass_row.microbatch)
        # Masks, positions and the like are cheaper to compute than to send or to keep.
        shared, per_layer = self.cut.local_inputs(loop, self.outer, inputs)
        count = self.stage_loops[loop].layers_per_part
        first_layer = (pass_row.part - loop * self.parts_per_loop) * count
        shared = [*self.stage_loops[loop].frozen_constants, *shared]
        return LocalInputs(first_layer, inputs, shared, rows_of(per_layer, first_layer, count))

    # Forward.

    def _part_input(self, loop: int, pass_row: PassRow, buffers: Buffers, inputs: Arrays) -> Arrays:
        """The arrays that travel into a part: what arrived, or the start before a first part."""
        # Nothing is sent to part 0. What it reads here is not used.
        arrived = read_slot(buffers["activations"], pass_row.slot("activations"))

        def start() -> Arrays:
            # The first loop starts from the microbatch itself. A later one starts from what came
            # out of the loop before it, laid out on the wire as that loop has it.
            travelled = []
            if loop > 0:
                travelled = self.cut.wire.unpacked(loop - 1, arrived)
            return self.cut.start(loop, self.outer, inputs, travelled)

        # The number of the part is traced, so that a `cond` has to choose.
        is_first = pass_row.part == loop * self.parts_per_loop
        unpack = partial(self.cut.wire.unpacked, loop, arrived)
        return cond_told(1, self.chunks_per_loop, is_first, start, unpack)

    def _forward_sweep(
        self, loop: int, pass_row: PassRow, buffers: Buffers, residual_buffer: Arrays, slot: Any
    ) -> Sweep[tuple[Arrays, Arrays]]:
        """The layers of a part forward, keeping what their backward passes read.

        The pass is a forward one, or a backward one that recomputes. What is kept goes into a slot
        of `residual_buffer`; if that is an empty list, nothing is kept. The results are what
        travels on, and `residual_buffer`.
        """
        local = self._local_inputs(loop, pass_row)
        arrived = self._part_input(loop, pass_row, buffers, local.inputs)
        entering, passing, stacked = self.cut.loops[loop].split_travelling(arrived)
        body = partial(self._run_layer, loop, local, slot)
        numbers = jnp.arange(self.stage_loops[loop].layers_per_part, dtype=jnp.int32)
        weights = self._part_weights(loop, self._first_row(loop, pass_row))
        scanned = numbers, weights, local.per_layer

        def finish(carry: tuple[Arrays, Arrays], rows: Arrays) -> tuple[Arrays, Arrays]:
            handed_on, residual_buffer = carry
            # Of the stacked outputs, the part fills in the rows of its own layers.
            of_part = with_rows(stacked, local.first_layer, rows)
            return [*handed_on, *passing, *of_part], residual_buffer

        return Sweep(body, (entering, residual_buffer), scanned, finish)

    def _run_layer(
        self, loop: int, local: LocalInputs, slot: Any, carry: tuple[Arrays, Arrays], scanned: Any
    ) -> tuple[tuple[Arrays, Arrays], Arrays]:
        """The scan body of a forward sweep: one layer.

        The carry is what enters the layer, and the buffer in which its residuals are kept.
        """
        stage_loop = self.stage_loops[loop]
        entering, residual_buffer = carry
        number, weights, slices = scanned
        handed_on, rows, residuals = stage_loop.layer.forward(
            entering, stage_loop.layer_weights(weights), local.of_layer(slices)
        )
        # Each layer writes straight into the buffer. If the scan stacked the residuals instead,
        # they would be written twice: into the stack, and from there into the buffer.
        if residual_buffer:
            residual_buffer = with_layer(residual_buffer, slot, number, residuals)
        return (handed_on, residual_buffer), rows

    def forward(self, pass_row: PassRow, buffers: Buffers) -> tuple[Arrays, Buffers]:
        """A forward pass `F`.

        The results are the output of the part, laid out for the wire, and the buffers with the
        residuals.
        """
        return switch_loop(self.program, pass_row, self._forward, buffers)

    def _forward(self, loop: int, pass_row: PassRow, buffers: Buffers) -> tuple[Arrays, Buffers]:
        sweep = self._forward_sweep(loop, pass_row, buffers, *self._keeps(loop, pass_row, buffers))
        return self._after_forward(loop, buffers, *sweep.run())

    def _keeps(self, loop: int, pass_row: PassRow, buffers: Buffers) -> tuple[Arrays, Any]:
        """The buffer in which a forward pass keeps residuals, and the slot of its microbatch."""
        slot = pass_row.slot("kept")
        # With an empty buffer no residuals are kept, and XLA does not compute them.
        if not self.table.trains or self.program.recompute:
            return [], slot
        return buffers["kept"][loop], slot

    def _after_forward(
        self, loop: int, buffers: Buffers, travelled: Arrays, residual_buffer: Arrays
    ) -> tuple[Arrays, Buffers]:
        """What a forward sweep made, laid out for the wire, and the buffers with the residuals."""
        output_wire = self.cut.wire.packed(loop, travelled)
        if residual_buffer:
            buffers = with_loop(buffers, "kept", loop, residual_buffer)
        return output_wire, buffers

    # Backward.

    def backward(
        self, pass_row: PassRow, buffers: Buffers, layer_sums: list[Arrays]
    ) -> tuple[Arrays, Buffers, list[Arrays]]:
        """A backward pass `B`, of inputs only where the schedule splits backward passes.

        The results are the gradients of the part's input, laid out for the wire, the buffers, and
        `layer_sums`.
        """
        return switch_loop(self.program, pass_row, self._backward, buffers, layer_sums)

    def _backward(
        self, loop: int, pass_row: PassRow, buffers: Buffers, layer_sums: list[Arrays]
    ) -> tuple[Arrays, Buffers, list[Arrays]]:
        part = self._backward_part(loop, pass_row, buffers)
        sweep = self._backward_sweep(part, pass_row, buffers, layer_sums)
        gradient_wire, written = sweep.run()
        return gradient_wire, *self._after_backward(part, buffers, layer_sums, written)

    def _backward_sweep(
        self, part: BackwardPart, pass_row: PassRow, buffers: Buffers, layer_sums: list[Arrays]
    ) -> Sweep[tuple[Arrays, Arrays]]:
        """The layers of a part backward.

        Besides the gradients, the scan carries what each layer writes into: the sums of gradients,
        or where passes are split the buffer of what a pass `W` needs. The results are the gradients
        of the part's input, laid out for the wire, and what was written.
        """
        body: Callable[..., Any] = partial(self._gradients_of_layer, part)
        written = layer_sums[part.loop]
        if self.table.splits:
            body = partial(self._input_gradients_of_layer, part, pass_row.slot("left"))
            written = buffers["left"][part.loop]
        numbers = jnp.arange(self.stage_loops[part.loop].layers_per_part, dtype=jnp.int32)
        scanned = numbers, part.weights, part.local.per_layer, part.arrived.rows

        def finish(carry: tuple[Arrays, Arrays], _: None) -> tuple[Arrays, Arrays]:
            gradients, written = carry
            travelling = [*gradients, *part.arrived.forwarded]
            return self.cut.wire.packed(part.loop, travelling, backward=True), written

        # Backward, the last layer comes first.
        return Sweep(body, (part.arrived.entering, written), scanned, finish, reverse=True)

    def _after_backward(
        self, part: BackwardPart, buffers: Buffers, layer_sums: list[Arrays], written: Arrays
    ) -> tuple[Buffers, list[Arrays]]:
        """The buffers and the sums of gradients, with what a backward sweep wrote."""
        if not self.table.splits:
            return buffers, replaced(layer_sums, [part.loop], [written])
        buffers = with_loop(buffers, "left", part.loop, written)
        # `W` reads the residuals too, so that those that this pass has made again are kept.
        if self.program.recompute:
            buffers = with_loop(buffers, "kept", part.loop, part.residual_buffer)
        return buffers, layer_sums

    # Both.

    def combined(
        self, forward: PassRow, backward: PassRow, buffers: Buffers, layer_sums: list[Arrays]
    ) -> tuple[Arrays, Arrays, Buffers, list[Arrays]]:
        """A forward and a backward pass of different microbatches, a layer of each at a time.

        Neither waits for the other, so that what a layer of one sends may go while the other
        multiplies. The results are the output of the one and the gradients of the other's input,
        laid out for the wire, the buffers, and `layer_sums`.
        """
        part = self._backward_part(0, backward, buffers)
        if not self.program.recompute:
            # The forward pass writes into the buffer that this one reads. Were it read in the loop
            # over layers, the compiler would copy the whole buffer.
            residuals = slot_aside(part.residual_buffer, part.residual_slot)
            part = replace(part, residual_buffer=residuals, residual_slot=0)
        (travelled, residual_buffer), (gradient_wire, written) = run_together(
            self._forward_sweep(0, forward, buffers, *self._keeps(0, forward, buffers)),
            self._backward_sweep(part, backward, buffers, layer_sums),
        )
        output_wire, buffers = self._after_forward(0, buffers, travelled, residual_buffer)
        buffers, layer_sums = self._after_backward(part, buffers, layer_sums, written)
        return output_wire, gradient_wire, buffers, layer_sums

    # What backward passes read and write.

    def _backward_part(self, loop: int, pass_row: PassRow, buffers: Buffers) -> BackwardPart:
        """What a backward pass reads, with the residuals made again on a stage that recomputes."""
        local = self._local_inputs(loop, pass_row)
        arrived = self._arrived_gradients(loop, pass_row, buffers, local.first_layer)
        residual_buffer, slot = self._residuals_or_recomputed(loop, pass_row, buffers)
        first_row = self._first_row(loop, pass_row)
        weights = self._part_weights(loop, first_row)
        return BackwardPart(loop, local, arrived, weights, first_row, residual_buffer, slot)

    def _arrived_gradients(
        self, loop: int, pass_row: PassRow, buffers: Buffers, first_layer: Any
    ) -> ArrivedGradients:
        """The gradients that wait for a backward pass, of a part that begins at `first_layer`."""
        arrived = read_slot(buffers["gradients"], pass_row.slot("gradients"))
        gradients = self.cut.wire.unpacked(loop, arrived, backward=True)
        cut_loop = self.cut.loops[loop]
        entering, passing, stacked = cut_loop.split_travelling(gradients, backward=True)
        rows = rows_of(stacked, first_layer, self.stage_loops[loop].layers_per_part)
        return ArrivedGradients(entering, [*passing, *stacked], rows)

    def _residuals_or_recomputed(
        self, loop: int, pass_row: PassRow, buffers: Buffers
    ) -> tuple[Arrays, Any]:
        """The buffer that holds the residuals of a backward pass, and their slot in it.

        A stage that recomputes runs the part forward again to make them.
        """
        residual_buffer, slot = buffers["kept"][loop], pass_row.slot("kept")
        if not self.program.recompute:
            return residual_buffer, slot
        # Where backward passes are not split, no later pass reads the residuals, and `kept` has no
        # slots. A temporary buffer of one slot holds them.
        if not residual_buffer:
            stage_loop = self.stage_loops[loop]
            shapes, layers = stage_loop.layer.residual_shapes, stage_loop.layers_per_part
            residual_buffer, slot = empty(shapes, 1, layers), 0
        sweep = self._forward_sweep(loop, pass_row, buffers, residual_buffer, slot)
        _, residual_buffer = sweep.run()
        return residual_buffer, slot

    def _gradients_of_layer(self, part: BackwardPart, carry: Any, scanned: Any) -> Any:
        """The scan body of a whole backward pass: all gradients of one layer."""
        stage_loop = self.stage_loops[part.loop]
        gradients, sums = carry
        number, weights, slices, row_gradients = scanned
        residuals = read_layer(part.residual_buffer, part.residual_slot, number)
        gradients, weight_gradients = stage_loop.layer.backward(
            residuals,
            stage_loop.layer_weights(weights),
            part.local.of_layer(slices),
            [*gradients, *row_gradients],
        )
        row = part.first_row + number
        sums = self._with_layer_gradients(part.loop, sums, row, weight_gradients)
        return (gradients, sums), None

    def _input_gradients_of_layer(
        self, part: BackwardPart, saved_slot: Any, carry: Any, scanned: Any
    ) -> Any:
        """The scan body of a backward pass of inputs: the gradients of what entered one layer.

        What a pass `W` needs is saved in a slot of `saved_buffer`, which is the loop's `left`.
        """
        stage_loop = self.stage_loops[part.loop]
        gradients, saved_buffer = carry
        number, weights, slices, row_gradients = scanned
        residuals = read_layer(part.residual_buffer, part.residual_slot, number)
        gradients, saved_for_weights = stage_loop.layer.input_gradients(
            residuals,
            stage_loop.layer_weights(weights),
            part.local.of_layer(slices),
            [*gradients, *row_gradients],
        )
        saved_buffer = with_layer(saved_buffer, saved_slot, number, saved_for_weights)
        return (gradients, saved_buffer), None

    def weight_pass(
        self, pass_row: PassRow, buffers: Buffers, layer_sums: list[Arrays]
    ) -> list[Arrays]:
        """A pass `W`: `layer_sums` with the gradients of one part's weights added.

        It reads the residuals, and what the backward pass saved.
        """
        # Operands of `switch_loop` are what its branches return updated; buffers are only read.
        do = partial(self._weight_pass, buffers=buffers)
        return switch_loop(self.program, pass_row, do, layer_sums)

    def _weight_pass(
        self, loop: int, pass_row: PassRow, layer_sums: list[Arrays], buffers: Buffers
    ) -> list[Arrays]:
        stage_loop = self.stage_loops[loop]
        local = self._local_inputs(loop, pass_row)
        first_row = self._first_row(loop, pass_row)
        part_weights = self._part_weights(loop, first_row)

        def body(sums: Arrays, scanned: Any) -> tuple[Arrays, None]:
            number, weights, slices = scanned
            residuals = read_layer(buffers["kept"][loop], pass_row.slot("kept"), number)
            saved_for_weights = read_layer(buffers["left"][loop], pass_row.slot("left"), number)
            weight_gradients = stage_loop.layer.weight_gradients(
                residuals,
                stage_loop.layer_weights(weights),
                local.of_layer(slices),
                saved_for_weights,
            )
            row = first_row + number
            return self._with_layer_gradients(loop, sums, row, weight_gradients), None

        numbers = jnp.arange(stage_loop.layers_per_part, dtype=jnp.int32)
        sums, _ = lax.scan(body, layer_sums[loop], (numbers, part_weights, local.per_layer))
        return replaced(layer_sums, [loop], [sums])

    # Sums of gradients.

    def _with_layer_gradients(self, loop: int, sums: Arrays, row: Any, gradients: Arrays) -> Arrays:
        """A loop's sums with the gradients of one layer added.

        All layers share the trained constants, so that their gradients are added to the whole sum.
        Those of stacked weights are added to one `row` of the sum, the layer's.
        """
        # The sums of a loop begin with those of its constants.
        constants = len(self.stage_loops[loop].trained_constants)
        added = []
        for k, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
            gradient = gradient.astype(total.dtype)
            if k < constants:
                added.append(total + gradient)
            else:
                added.append(total.at[row].add(gradient))
        return added

    def empty_constant_sums(self, loop: int) -> Arrays:
        """Sums of the gradients of a loop's trained constants before any pass: zeros."""
        # All layers and microbatches are added up, for which bfloat16 is too coarse.
        sums = []
        for x in self.stage_loops[loop].trained_constants:
            sums.append(jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)))
        return sums
