"""The passes of one stage: through the layers of a part, forward and backward.

The model is cut into *parts*, numbered through all loops over layers. A stage holds several parts,
its *chunks*. In a pass, a stage runs one of its parts for one *microbatch*.

    part  0 1 2 3 | 4 5 6 7      2 loops, 4 stages, wrapped: parts_per_loop=4, chunks_per_loop=1
    stage 0 1 2 3 | 0 1 2 3      loop = part // 4;  chunk of part 5 on stage 1 is 1

What a pass needs of other passes waits in a *slot* of a buffer:

    activations    the part before sent it         ->  F, and a B that runs the part or start again
    kept           F, or a B that recomputes       ->  B, and W
    gradients      the part after, or the head     ->  B
    left           B, where B and W are split      ->  W

The program says which microbatch, part and slots, in numbers that are traced: all stages run one
program. What differs between loops is code, and is chosen by `switch_loop`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    with_layer,
    with_loop,
    with_rows,
)
from shardlib.pipeline._cut import Cut
from shardlib.pipeline._layer import Layer, layer
from shardlib.pipeline._loop import Arrays
from shardlib.pipeline._pass_row import PassRow, switch_loop
from shardlib.pipeline._program import Program


@dataclass(frozen=True, eq=False)
class _LocalInputs:
    """What a stage computes for itself for one pass.

    - `first_layer` is the first layer of the pass's part, counted within the loop.
    - `inputs` are those of the microbatch.
    - `shared` is the same for all layers: frozen constants, then shared inputs.
    - `per_layer` has a row for each layer of the part.
    """

    first_layer: Any
    inputs: Arrays
    shared: Arrays
    per_layer: Arrays

    def of_layer(self, slices: Arrays) -> Arrays:
        """The local inputs of one layer, whose slices of `per_layer` are given."""
        # A layer takes [trained constants, weights] and then these, [frozen constants, shared
        # inputs, slices]. Together they are in the order of the arguments of `Loop.layer`.
        return [*self.shared, *slices]


@dataclass(frozen=True, eq=False)
class _ArrivedGradients:
    """The gradients that arrive at a part going backward, by what they are gradients of.

    - `entering` are those of what the part's last layer handed on, which its layers go through.
    - `forwarded` are those of passing arrays and of whole stacked outputs. They are sent on
      unchanged: earlier parts read other rows, and the start of the loop discards the rest.
    - `rows` are those rows of the stacked outputs' gradients that are of the part's own layers.
    """

    entering: Arrays
    forwarded: Arrays
    rows: Arrays


@dataclass(frozen=True, eq=False)
class _BackwardPart:
    """What a backward pass reads of its part, whether it makes all gradients or those of inputs.

    - `weights` are those of the part's layers. `first_row` is the first of these among the stage's
      layers, to whose sums the gradients of weights are added.
    - `residual_buffer` and `residual_slot` say where the residuals are.
    """

    loop: int
    local: _LocalInputs
    arrived: _ArrivedGradients
    weights: Arrays
    first_row: Any
    residual_buffer: Arrays
    residual_slot: Any


@dataclass(frozen=True, eq=False)
class _StageLoop:
    """What a stage has of a loop over layers.

    - `layer` is the function of one layer, with its derivatives.
    - `stacks` are the loop's weights: of each the layers of this stage, part after part.
    - `layers_per_part` is how many layers a part has.
    - `trained_constants` and `frozen_constants` are constants of the scan that are computed only
      from outer weights. Gradients flow only to the former.
    """

    layer: Layer
    stacks: Arrays
    layers_per_part: int
    trained_constants: Arrays
    frozen_constants: Arrays

    def layer_weights(self, weights: Arrays) -> Arrays:
        """What a layer takes as weights: the loop's trained constants, and then its own."""
        return [*self.trained_constants, *weights]


@dataclass(eq=False)
class Passes:
    """The passes that one stage can do, for a cut function and a program.

    `weights` are all weights; of the stacked ones this stage's layers, part after part. *Outer*
    weights are those outside all loops. `inputs(microbatch)` gives the inputs of the function.

    Passes add the gradients of layers to `layer_sums`:

        layer_sums[loop] = [*sums of trained constants, *sums of trained stacks]

    The sum of a stack has a row for each of the stage's layers.
    """

    cut: Cut
    program: Program
    weights: Sequence[Any]
    inputs: Callable[[Any], Arrays]

    def __post_init__(self) -> None:
        cut, self.table = self.cut, self.program.table
        self.parts_per_loop = self.program.parts_per_loop
        # How many parts of each loop are on each stage.
        self.chunks_per_loop = self.parts_per_loop // self.table.stages
        self.outer = [self.weights[k] for k in cut.outer]
        self.stage_loops: list[_StageLoop] = []
        for loop, cut_loop in enumerate(cut.loops):
            trained, frozen = cut.constants(loop, self.outer)
            self.stage_loops.append(
                _StageLoop(
                    layer=layer(cut_loop, cut.trained, self.table.splits),
                    stacks=[self.weights[k] for k in cut_loop.weight_numbers],
                    layers_per_part=cut_loop.layers // self.parts_per_loop,
                    trained_constants=trained,
                    frozen_constants=frozen,
                )
            )

    # What a stage has.

    def buffers(self) -> Buffers:
        """All buffers, with nothing in them.

        What arrives is written in every tick, expected or not, so that its buffers have a spare
        slot. `kept` and `left` are written only inside a pass.
        """
        slots, wire = self.program.slots, self.cut.wire
        # All loops share the wire, so that its buffers have one number of slots; the others have
        # one for each loop.
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
        """For each loop an empty buffer of its own shapes, for all layers of a part."""
        buffers = []
        for loop, shapes in enumerate(shapes_of_loops):
            buffers.append(empty(shapes, slots[loop], self.stage_loops[loop].layers_per_part))
        return buffers

    def first_row(self, loop: int, pass_row: PassRow) -> Any:
        """The first layer of a pass's part, counted among the stage's layers of this loop."""
        if self.chunks_per_loop == 1:
            return 0
        # Chunks are numbered through all loops. Each stage has `chunks_per_loop` parts of every
        # loop, in the order of the loops, so that this many per loop come before.
        chunk_of_loop = pass_row.chunk - loop * self.chunks_per_loop
        return chunk_of_loop * self.stage_loops[loop].layers_per_part

    def part_weights(self, loop: int, first_row: Any) -> Arrays:
        """The weights of a part's layers, of which `first_row` is the first."""
        stage_loop = self.stage_loops[loop]
        # With one part of a loop nothing is sliced. A slice with a traced start would be a copy.
        if self.chunks_per_loop == 1:
            return stage_loop.stacks
        return rows_of(stage_loop.stacks, first_row, stage_loop.layers_per_part)

    def local_inputs(self, loop: int, pass_row: PassRow) -> _LocalInputs:
        """What a pass needs besides what was sent and kept, computed on this stage."""
        inputs = self.inputs(pass_row.microbatch)
        # Masks, positions and the like are cheaper to compute than to send or to keep.
        shared, per_layer = self.cut.local_inputs(loop, self.outer, inputs)
        count = self.stage_loops[loop].layers_per_part
        first_layer = (pass_row.part - loop * self.parts_per_loop) * count
        shared = [*self.stage_loops[loop].frozen_constants, *shared]
        return _LocalInputs(first_layer, inputs, shared, rows_of(per_layer, first_layer, count))

    # Forward.

    def part_input(self, loop: int, pass_row: PassRow, buffers: Buffers, inputs: Arrays) -> Arrays:
        """The arrays that enter a part: what arrived, or for a loop's first part the loop's start.

        For part 0, `arrived` is what the spare slot holds, and is not used.
        """
        arrived = read_slot(buffers["activations"], pass_row.slot("activations"))

        def start() -> Arrays:
            # The first loop starts from the microbatch itself. A later one starts from what the
            # loop before it gave, which arrived in the layout of that loop.
            travelled = []
            if loop > 0:
                travelled = self.cut.wire.unpacked(loop - 1, arrived)
            return self.cut.start(loop, self.outer, inputs, travelled)

        # A traced number: one program serves all parts, so that a `cond` chooses at run time.
        is_first = pass_row.part == loop * self.parts_per_loop
        return lax.cond(is_first, start, lambda: self.cut.wire.unpacked(loop, arrived))

    def run_part(
        self, loop: int, pass_row: PassRow, buffers: Buffers, residual_buffer: Arrays, slot: Any
    ) -> tuple[Arrays, Arrays]:
        """Run the layers of a part forward, and keep what their backward passes read.

        Args:
            loop: The loop that the part belongs to.
            pass_row: The pass: a forward one, or a backward one that recomputes.
            buffers: All buffers, for what arrived.
            residual_buffer: Where residuals are kept, in a `slot`; empty where none are. They are
                written layer by layer: stacked first, they would be written twice.
            slot: The slot of this microbatch in it.

        Returns:
            What travels on, and the buffer with the residuals.
        """
        stage_loop = self.stage_loops[loop]
        local = self.local_inputs(loop, pass_row)
        arrived = self.part_input(loop, pass_row, buffers, local.inputs)
        entering, passing, stacked = self.cut.loops[loop].split_travelling(arrived)

        def body(carry: tuple[Arrays, Arrays], scanned: Any) -> tuple[Any, Arrays]:
            travelling, residual_buffer = carry
            number, weights, slices = scanned
            travelling, rows, residuals = stage_loop.layer.forward(
                travelling, stage_loop.layer_weights(weights), local.of_layer(slices)
            )
            if residual_buffer:
                residual_buffer = with_layer(residual_buffer, slot, number, residuals)
            return (travelling, residual_buffer), rows

        numbers = jnp.arange(stage_loop.layers_per_part)
        weights = self.part_weights(loop, self.first_row(loop, pass_row))
        carry, scanned = (entering, residual_buffer), (numbers, weights, local.per_layer)
        (travelling, residual_buffer), rows = lax.scan(body, carry, scanned)
        # Of the stacked outputs, the part fills in the rows of its own layers.
        stacked = with_rows(stacked, local.first_layer, rows)
        return [*travelling, *passing, *stacked], residual_buffer

    def forward(self, pass_row: PassRow, buffers: Buffers) -> tuple[Arrays, Buffers]:
        """A forward pass `F`.

        The results are the output of the part, laid out for the wire, and the buffers with the
        residuals.
        """
        return switch_loop(self.program, pass_row, self._forward, buffers)

    def _forward(self, loop: int, pass_row: PassRow, buffers: Buffers) -> tuple[Arrays, Buffers]:
        # An empty buffer tells `run_part` to keep no residuals. XLA then drops them.
        residual_buffer: Arrays = []
        if self.table.trains and not self.program.recompute:
            residual_buffer = buffers["kept"][loop]
        travelled, residual_buffer = self.run_part(
            loop, pass_row, buffers, residual_buffer, pass_row.slot("kept")
        )
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
        do = self._backward_whole
        if self.table.splits:
            do = self._backward_inputs
        return switch_loop(self.program, pass_row, do, buffers, layer_sums)

    def _backward_whole(
        self, loop: int, pass_row: PassRow, buffers: Buffers, layer_sums: list[Arrays]
    ) -> tuple[Arrays, Buffers, list[Arrays]]:
        """The backward pass of a part, with the gradients of weights added to their sums."""
        part = self._backward_part(loop, pass_row, buffers)
        body = partial(self._gradients_of_layer, part)
        gradient_wire, sums = self._scan_backward(part, body, layer_sums[loop])
        return gradient_wire, buffers, replaced(layer_sums, [loop], [sums])

    def _backward_inputs(
        self, loop: int, pass_row: PassRow, buffers: Buffers, layer_sums: list[Arrays]
    ) -> tuple[Arrays, Buffers, list[Arrays]]:
        """The backward pass of a part, without the gradients of weights.

        What these need is saved for a pass `W`, which fills a gap later on.
        """
        part = self._backward_part(loop, pass_row, buffers)
        body = partial(self._input_gradients_of_layer, part, pass_row.slot("left"))
        gradient_wire, saved_buffer = self._scan_backward(part, body, buffers["left"][loop])
        buffers = with_loop(buffers, "left", loop, saved_buffer)
        # A stage that recomputes has made the residuals again, and `W` reads them too.
        buffers = with_loop(buffers, "kept", loop, part.residual_buffer)
        return gradient_wire, buffers, layer_sums

    def _scan_backward(
        self, part: _BackwardPart, body: Callable[..., Any], written: Arrays
    ) -> tuple[Arrays, Arrays]:
        """Go backward through the layers of a part, by a scan body for one layer.

        Besides the gradients, the scan carries `written`, to which each layer adds: sums of
        gradients, or a buffer. The results are the gradients, laid out for the wire, and `written`.
        """
        numbers = jnp.arange(self.stage_loops[part.loop].layers_per_part)
        carry = part.arrived.entering, written
        scanned = numbers, part.weights, part.local.per_layer, part.arrived.rows
        # Backward, the last layer comes first.
        (gradients, written), _ = lax.scan(body, carry, scanned, reverse=True)
        travelling = [*gradients, *part.arrived.forwarded]
        return self.cut.wire.packed(part.loop, travelling, backward=True), written

    def _backward_part(self, loop: int, pass_row: PassRow, buffers: Buffers) -> _BackwardPart:
        """What a backward pass reads, with the residuals made again on a stage that recomputes."""
        local = self.local_inputs(loop, pass_row)
        arrived = self._arrived_gradients(loop, pass_row, buffers, local.first_layer)
        residual_buffer, slot = self._residuals_or_recomputed(loop, pass_row, buffers)
        first_row = self.first_row(loop, pass_row)
        weights = self.part_weights(loop, first_row)
        return _BackwardPart(loop, local, arrived, weights, first_row, residual_buffer, slot)

    def _arrived_gradients(
        self, loop: int, pass_row: PassRow, buffers: Buffers, first_layer: Any
    ) -> _ArrivedGradients:
        """What waits for a backward pass; `first_layer` is the part's first within the loop."""
        arrived = read_slot(buffers["gradients"], pass_row.slot("gradients"))
        gradients = self.cut.wire.unpacked(loop, arrived, backward=True)
        cut_loop = self.cut.loops[loop]
        entering, passing, stacked = cut_loop.split_travelling(gradients, backward=True)
        rows = rows_of(stacked, first_layer, self.stage_loops[loop].layers_per_part)
        return _ArrivedGradients(entering, [*passing, *stacked], rows)

    def _residuals_or_recomputed(
        self, loop: int, pass_row: PassRow, buffers: Buffers
    ) -> tuple[Arrays, Any]:
        """The buffer that holds the residuals of a backward pass, and their slot in it.

        A stage that recomputes runs the part forward again to make them.
        """
        residual_buffer, slot = buffers["kept"][loop], pass_row.slot("kept")
        if not self.program.recompute:
            return residual_buffer, slot
        # Schedules that do not split backward passes have no `kept` slots when they recompute,
        # for no later pass reads the residuals. A temporary buffer of one slot holds them.
        if not residual_buffer:
            stage_loop = self.stage_loops[loop]
            shapes, layers = stage_loop.layer.residual_shapes, stage_loop.layers_per_part
            residual_buffer, slot = empty(shapes, 1, layers), 0
        _, residual_buffer = self.run_part(loop, pass_row, buffers, residual_buffer, slot)
        return residual_buffer, slot

    def _gradients_of_layer(self, part: _BackwardPart, carry: Any, scanned: Any) -> Any:
        """The scan body of a whole backward pass: all gradients of one layer."""
        stage_loop = self.stage_loops[part.loop]
        gradients, sums = carry
        number, weights, slices, of_rows = scanned
        residuals = read_layer(part.residual_buffer, part.residual_slot, number)
        gradients, weight_gradients = stage_loop.layer.backward(
            residuals,
            stage_loop.layer_weights(weights),
            part.local.of_layer(slices),
            [*gradients, *of_rows],
        )
        sums = self.with_layer_gradients(part.loop, sums, part.first_row + number, weight_gradients)
        return (gradients, sums), None

    def _input_gradients_of_layer(
        self, part: _BackwardPart, saved_slot: Any, carry: Any, scanned: Any
    ) -> Any:
        """The scan body of a backward pass of inputs: gradients of what entered one layer.

        What a pass `W` needs is saved in the buffer `left`, in the slot `saved_slot`.
        """
        stage_loop = self.stage_loops[part.loop]
        gradients, saved_buffer = carry
        number, weights, slices, of_rows = scanned
        residuals = read_layer(part.residual_buffer, part.residual_slot, number)
        gradients, saved_for_weights = stage_loop.layer.input_gradients(
            residuals,
            stage_loop.layer_weights(weights),
            part.local.of_layer(slices),
            [*gradients, *of_rows],
        )
        saved_buffer = with_layer(saved_buffer, saved_slot, number, saved_for_weights)
        return (gradients, saved_buffer), None

    def weight_pass(
        self, pass_row: PassRow, buffers: Buffers, layer_sums: list[Arrays]
    ) -> list[Arrays]:
        """A pass `W`: `layer_sums` with the gradients of one part's weights added.

        It reads what the forward pass kept and what the backward pass saved.
        """
        do = partial(self._weight_pass, buffers=buffers)
        return switch_loop(self.program, pass_row, do, layer_sums)

    def _weight_pass(
        self, loop: int, pass_row: PassRow, layer_sums: list[Arrays], buffers: Buffers
    ) -> list[Arrays]:
        stage_loop = self.stage_loops[loop]
        local = self.local_inputs(loop, pass_row)
        first_row = self.first_row(loop, pass_row)
        weights = self.part_weights(loop, first_row)

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
            # The sums have all layers of a stage, of which a part has some.
            return self.with_layer_gradients(loop, sums, first_row + number, weight_gradients), None

        numbers = jnp.arange(stage_loop.layers_per_part)
        sums, _ = lax.scan(body, layer_sums[loop], (numbers, weights, local.per_layer))
        return replaced(layer_sums, [loop], [sums])

    # Sums of gradients.

    def with_layer_gradients(self, loop: int, sums: Arrays, row: Any, gradients: Arrays) -> Arrays:
        """A loop's sums with the gradients of one layer added.

        Those of trained constants, which all layers share, are added as they are; those of stacked
        weights in the layer's row.
        """
        # The sums of a loop begin with those of its constants.
        constants = len(self.stage_loops[loop].trained_constants)
        added = []
        for k, (total, gradient) in enumerate(zip(sums, gradients, strict=True)):
            gradient = gradient.astype(total.dtype)
            if k < constants:
                added.append(total + gradient)
            else:
                # The sum has a row for each of the stage's layers; one is updated in place.
                added.append(total.at[row].add(gradient))
        return added

    def empty_constant_sums(self, loop: int) -> Arrays:
        """Empty sums of gradients of a loop's trained constants, in float32 at least."""
        sums = []
        for x in self.stage_loops[loop].trained_constants:
            sums.append(jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)))
        return sums
