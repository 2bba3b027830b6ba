"""The passes of one stage: through a part forward and backward, and around the loops over layers.

What a stage does in a tick is numbers in a *row* of the program: which microbatch, which part,
which slots. These are traced values, since the program is one for all stages; what differs between
loops over layers, which is code, is chosen by `lax.switch`.

    forward   part_input -> run_part -> (after the last part) head, which makes the first gradients
    backward  gradients  -> backward -> (before a first part) start_backward
    weights   weight_gradients, where the schedule splits backward passes
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.pipeline._buffers import (
    Buffers,
    empty,
    read_layer,
    read_slot,
    replaced,
    rows_of,
    split_differentiable,
    with_layer,
    with_loop,
    with_rows,
    with_slot,
)
from shardlib.pipeline._cut import Cut
from shardlib.pipeline._layer import Layer, layer
from shardlib.pipeline._loop import Arrays
from shardlib.pipeline._program import Program


@dataclass(frozen=True, eq=False)
class Pass:
    """A pass of this tick: what the row says of one kind, `F`, `B` or `W`.

    `row` has the numbers of this stage in this tick, by name, such as `F.microbatch`.
    """

    row: dict[str, Any]
    kind: str

    def __getitem__(self, name: str) -> Any:
        """A number of the pass, such as its `microbatch`, or its slot in a buffer."""
        return self.row[f"{self.kind}.{name}"]

    def happens(self) -> Any:
        """Whether this stage has such a pass in this tick."""
        return self.row[self.kind] == 1


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


@dataclass(frozen=True, eq=False)
class _BackwardPart:
    """What the backward passes of all layers of a part have in common.

    `residual_buffer` and `slot` say where the residuals are. `first_row` is the part's first layer
    among those of the stage, where the gradients of its weights are added.
    """

    loop: int
    local: _LocalInputs
    residual_buffer: Arrays
    slot: Any
    first_row: Any


@dataclass(frozen=True, eq=False)
class _ArrivedGradients:
    """The gradients that arrive at a part going backward, by what they are gradients of.

    - `entering` are those of what the part's last layer handed on, which its layers go through.
    - `passing` are those of what the layers do not change, which are sent on as they are.
    - `rows` are the part's own rows of those of stacked outputs, one row for each layer.
    """

    entering: Arrays
    passing: Arrays
    rows: Arrays


@dataclass(frozen=True, eq=False)
class _StageLoop:
    """What a stage has of a loop over layers.

    - `layer` is the function of one layer, with its derivatives.
    - `stacks` are the loop's weights: of each the layers of this stage, part after part.
    - `layers_per_part` is how many layers a part has.
    - The constants are what all layers take that is made of weights outside the loop. Trained
      ones have gradients.
    """

    layer: Layer
    stacks: Arrays
    layers_per_part: int
    trained_constants: Arrays
    frozen_constants: Arrays


@dataclass(eq=False)
class Passes:
    """The passes that one stage can do, for a cut function and a program.

    `weights` are all weights; of the stacked ones this stage's layers, part after part.
    `inputs(microbatch)` gives the inputs of the function, and `totals` are the numbers of those of
    its outputs that are added up over microbatches.

    Sums of gradients are of two kinds: `outer_sums` has one for each weight outside the loops, and
    `layer_sums` has for each loop those of its trained constants and then of its trained weights.
    """

    cut: Cut
    program: Program
    weights: Sequence[Any]
    inputs: Callable[[Any], Arrays]
    totals: Sequence[int]

    def __post_init__(self) -> None:
        cut, self.table = self.cut, self.program.table
        self.parts_per_loop = self.table.parts // len(cut.loops)
        # How many parts of each loop are on each stage.
        self.chunks_per_loop = self.parts_per_loop // self.table.stages
        self.outer = [self.weights[k] for k in cut.outer]
        self.loops: list[_StageLoop] = []
        for number, loop in enumerate(cut.loops):
            trained, frozen = cut.constants(number, self.outer)
            self.loops.append(
                _StageLoop(
                    layer=layer(loop, cut.trained, self.table.splits),
                    stacks=[self.weights[k] for k in loop.weight_numbers],
                    layers_per_part=loop.layers // self.parts_per_loop,
                    trained_constants=trained,
                    frozen_constants=frozen,
                )
            )

    # What a stage has.

    def buffers(self) -> Buffers:
        """All buffers, with nothing in them.

        Those for what is sent have one slot more than is used, for what arrives and nobody reads.
        """
        slots, wire = self.program.slots, self.cut.wire
        activations = empty(wire.shapes, slots["activations"][0] + 1)
        gradients = empty(wire.gradient_shapes, slots["gradients"][0] + 1)
        residual_shapes = [loop.layer.residual_shapes for loop in self.loops]
        saved_shapes = [loop.layer.saved_shapes for loop in self.loops]
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
            buffers.append(empty(shapes, slots[loop], self.loops[loop].layers_per_part))
        return buffers

    def for_loop(self, part: Any, do: Callable[..., Any], *operands: Any) -> Any:
        """`do(loop, *operands)` for the loop that a part belongs to.

        With one loop there is nothing to choose. With several, each has a branch in the program.
        """
        count = len(self.cut.loops)
        # A `switch` of one branch would still be a branch in the program.
        if count == 1:
            return do(0, *operands)
        # Parts are numbered through all loops, so that the quotient is the number of the loop.
        branches = [partial(do, loop) for loop in range(count)]
        return lax.switch(part // self.parts_per_loop, branches, *operands)

    def layer_weights(self, loop: int, weights: Arrays) -> Arrays:
        """What a layer takes as weights: the loop's trained constants, and then its own."""
        return [*self.loops[loop].trained_constants, *weights]

    def part_weights(self, step: Pass, loop: int) -> tuple[Any, Arrays]:
        """The first of the stage's layers that belongs to a pass's part, and the part's weights."""
        # With one part on a stage nothing is sliced. A slice with a traced start would be a copy.
        if self.chunks_per_loop == 1:
            return 0, self.loops[loop].stacks
        count = self.loops[loop].layers_per_part
        # Chunks of a stage are numbered through all loops, its rows only within one.
        first = (step["chunk"] - loop * self.chunks_per_loop) * count
        return first, rows_of(self.loops[loop].stacks, first, count)

    def local_inputs(self, step: Pass, loop: int) -> _LocalInputs:
        """What a pass needs besides what was sent and kept, computed on this stage."""
        inputs = self.inputs(step["microbatch"])
        # Masks, positions and the like are cheaper to compute than to send or to keep.
        shared, per_layer = self.cut.local_inputs(loop, self.outer, inputs)
        count = self.loops[loop].layers_per_part
        first = (step["part"] - loop * self.parts_per_loop) * count
        shared = [*self.loops[loop].frozen_constants, *shared]
        return _LocalInputs(first, inputs, shared, rows_of(per_layer, first, count))

    # Forward.

    def part_input(self, loop: int, step: Pass, buffers: Buffers, inputs: Arrays) -> Arrays:
        """What travels into a pass's part.

        It is what arrived, and before the first part of a loop the start of that loop.
        """
        arrived = read_slot(buffers["activations"], step["activations"])

        def start() -> Arrays:
            # The first loop starts from the microbatch itself. A later one starts from what the
            # loop before it gave, which arrived in the layout of that loop.
            travelled = []
            if loop > 0:
                travelled = self.cut.wire.unpacked(loop - 1, arrived)
            return self.cut.start(loop, self.outer, inputs, travelled)

        # A traced number: one program serves all parts, so that a `cond` chooses at run time.
        is_first = step["part"] == loop * self.parts_per_loop
        return lax.cond(is_first, start, lambda: self.cut.wire.unpacked(loop, arrived))

    def run_part(
        self, loop: int, step: Pass, buffers: Buffers, residual_buffer: Arrays, slot: Any
    ) -> tuple[Arrays, Arrays]:
        """Run the layers of a part forward, and keep what their backward passes read.

        Args:
            loop: The loop that the part belongs to.
            step: The pass: a forward one, or a backward one that recomputes.
            buffers: All buffers, for what arrived.
            residual_buffer: Where residuals are kept, in a `slot`; empty where none are. They are
                written layer by layer: stacked first, they would be written twice.
            slot: The slot of this microbatch in it.

        Returns:
            What travels on, and the buffer with the residuals.
        """
        local = self.local_inputs(step, loop)
        arrived = self.part_input(loop, step, buffers, local.inputs)
        entering = len(self.cut.loops[loop].entering)

        def body(carry: tuple[Arrays, Arrays], scanned: Any) -> tuple[Any, Arrays]:
            travelling, residual_buffer = carry
            number, weights, slices = scanned
            weights = self.layer_weights(loop, weights)
            travelling, rows, residuals = self.loops[loop].layer.forward(
                travelling, weights, [*local.shared, *slices]
            )
            if residual_buffer:
                residual_buffer = with_layer(residual_buffer, slot, number, residuals)
            return (travelling, residual_buffer), rows

        numbers = jnp.arange(self.loops[loop].layers_per_part)
        _, weights = self.part_weights(step, loop)
        carry = arrived[:entering], residual_buffer
        scanned = numbers, weights, local.per_layer
        (travelling, residual_buffer), rows = lax.scan(body, carry, scanned)
        # Of the stacked outputs, the part fills in the rows of its own layers.
        stacked_from = len(arrived) - len(rows)
        stacked = with_rows(arrived[stacked_from:], local.first_layer, rows)
        return [*travelling, *arrived[entering:stacked_from], *stacked], residual_buffer

    def forward(self, row: dict[str, Any], buffers: Buffers) -> tuple[Arrays, Buffers]:
        """A forward pass: what is sent on, and the buffers with what was kept."""
        return self.for_loop(row["F.part"], partial(self._forward, Pass(row, "F")), buffers)

    def _forward(self, step: Pass, loop: int, buffers: Buffers) -> tuple[Arrays, Buffers]:
        # An empty buffer tells `run_part` to keep no residuals. XLA then drops them.
        residual_buffer: Arrays = []
        if self.table.trains and not self.program.recompute:
            residual_buffer = buffers["kept"][loop]
        travelled, residual_buffer = self.run_part(
            loop, step, buffers, residual_buffer, step["kept"]
        )
        sent = self.cut.wire.packed(loop, travelled)
        if residual_buffer:
            buffers = with_loop(buffers, "kept", loop, residual_buffer)
        return sent, buffers

    def head(
        self,
        row: dict[str, Any],
        sent: Arrays,
        buffers: Buffers,
        outer_sums: Arrays,
        totals: Arrays,
    ) -> tuple[Buffers, Arrays, Arrays]:
        """What comes after the last part, and at once its gradient.

        The backward pass of the head does not wait for a tick of its own: what it would keep until
        then, the logits among it, is large.

        Args:
            row: The numbers of this stage in this tick.
            sent: What comes out of the last part.
            buffers: All buffers; the gradients of `sent` go into a slot.
            outer_sums: Sums of gradients of the outer weights, which the head's are added to.
            totals: The sums that the function's outputs are added to.

        Returns:
            The last three, as they are now.
        """
        step, last = Pass(row, "F"), len(self.cut.loops) - 1
        inputs = self.inputs(step["microbatch"])
        # Only these have a gradient here. The others would make the program hold zeros.
        trained = self.cut.head_weights
        floats, with_floats = split_differentiable(
            self.cut.wire.unpacked(last, sent), self.cut.loops[last].differentiable
        )

        def loss(floats: Arrays, weights: Arrays) -> tuple[Any, Arrays]:
            outer = replaced(self.outer, trained, weights)
            travelled = with_floats(floats)
            # Output 0 is the loss, which is differentiated; the rest is only added up.
            total, *others = self.cut.after(outer, inputs, travelled, [0, *self.totals])
            return total, others

        differentiated = jax.value_and_grad(loss, (0, 1), has_aux=True)
        weights = [self.outer[k] for k in trained]
        (_, outputs), (travelled_gradients, weight_gradients) = differentiated(floats, weights)
        packed = self.cut.wire.packed(last, travelled_gradients, backward=True)
        written = with_slot(buffers["gradients"], step["gradients"], packed)
        return (
            buffers | {"gradients": written},
            self.with_outer(outer_sums, trained, weight_gradients),
            [total + output for total, output in zip(totals, outputs, strict=True)],
        )

    # Backward.

    def backward(
        self, row: dict[str, Any], buffers: Buffers, layer_sums: list[Arrays]
    ) -> tuple[Arrays, Buffers, list[Arrays]]:
        """A backward pass: the gradients that are sent back, the buffers, and the layers' sums.

        Where passes are split, gradients of weights wait for a pass of their own, and what these
        read is left in the buffers.
        """
        do = partial(self._backward, Pass(row, "B"))
        return self.for_loop(row["B.part"], do, buffers, layer_sums)

    def _backward(
        self, step: Pass, loop: int, buffers: Buffers, layer_sums: list[Arrays]
    ) -> tuple[Arrays, Buffers, list[Arrays]]:
        local = self.local_inputs(step, loop)
        arrived = self._arrived_gradients(step, loop, buffers, local.first_layer)
        residual_buffer, slot = self._residuals_or_recomputed(step, loop, buffers)
        first_row, weights = self.part_weights(step, loop)
        part = _BackwardPart(loop, local, residual_buffer, slot, first_row)
        numbers = jnp.arange(self.loops[loop].layers_per_part)
        scanned = (numbers, weights, local.per_layer, arrived.rows)
        # Backward, the last layer comes first. Besides the gradients, the scan carries what layers
        # write: what is left for the weights' gradients, or the sums of these themselves.
        if self.table.splits:
            # The gradients of weights are left for a pass `W`, which fills a gap later on.
            body = partial(self._input_gradients_of_layer, part, step["left"])
            start = arrived.entering, buffers["left"][loop]
        else:
            body = partial(self._gradients_of_layer, part)
            start = arrived.entering, layer_sums[loop]
        (gradients, written), _ = lax.scan(body, start, scanned, reverse=True)
        if self.table.splits:
            buffers = with_loop(buffers, "left", loop, written)
            # A stage that recomputes has made the residuals again, and `W` reads them too.
            buffers = with_loop(buffers, "kept", loop, residual_buffer)
        else:
            layer_sums = replaced(layer_sums, [loop], [written])
        sent = self.cut.wire.packed(loop, [*gradients, *arrived.passing], backward=True)
        return sent, buffers, layer_sums

    def _arrived_gradients(
        self, step: Pass, loop: int, buffers: Buffers, first_layer: Any
    ) -> _ArrivedGradients:
        """What waits for a backward pass; `first_layer` is the part's first within the loop."""
        arrived = read_slot(buffers["gradients"], step["gradients"])
        gradients = self.cut.wire.unpacked(loop, arrived, backward=True)
        # They are in the order of what travels: what enters layers, what passes by, stacked rows.
        target = self.cut.loops[loop]
        stacked_from = len(target.travelling) - len(target.stacked_outputs)
        entering = sum(target.differentiable[: len(target.entering)])
        stacked = sum(target.differentiable[stacked_from:])
        of_stacked = gradients[len(gradients) - stacked :]
        rows = rows_of(of_stacked, first_layer, self.loops[loop].layers_per_part)
        return _ArrivedGradients(gradients[:entering], gradients[entering:], rows)

    def _residuals_or_recomputed(
        self, step: Pass, loop: int, buffers: Buffers
    ) -> tuple[Arrays, Any]:
        """The buffer that holds the residuals of a backward pass, and their slot in it.

        A stage that recomputes runs the part forward again to make them.
        """
        residual_buffer, slot = buffers["kept"][loop], step["kept"]
        if not self.program.recompute:
            return residual_buffer, slot
        # Schedules that do not split backward passes have no `kept` slots when they recompute,
        # for no later pass reads the residuals. A temporary buffer of one slot holds them.
        if not residual_buffer:
            stage_loop = self.loops[loop]
            shapes, layers = stage_loop.layer.residual_shapes, stage_loop.layers_per_part
            residual_buffer, slot = empty(shapes, 1, layers), 0
        _, residual_buffer = self.run_part(loop, step, buffers, residual_buffer, slot)
        return residual_buffer, slot

    def _gradients_of_layer(self, part: _BackwardPart, carry: Any, scanned: Any) -> Any:
        """The backward pass of one layer, whole: the body of a loop over the layers of a part."""
        gradients, sums = carry
        number, weights, slices, of_rows = scanned
        weights = self.layer_weights(part.loop, weights)
        residuals = read_layer(part.residual_buffer, part.slot, number)
        gradients, weight_gradients = self.loops[part.loop].layer.backward(
            residuals, weights, [*part.local.shared, *slices], [*gradients, *of_rows]
        )
        sums = self.with_layer_gradients(part.loop, sums, part.first_row + number, weight_gradients)
        return (gradients, sums), None

    def _input_gradients_of_layer(
        self, part: _BackwardPart, saved_slot: Any, carry: Any, scanned: Any
    ) -> Any:
        """The backward pass of one layer, of its inputs only; a pass `W` makes the rest later.

        What that pass needs is saved in the buffer `left`, in the slot `saved_slot`.
        """
        gradients, saved_buffer = carry
        number, weights, slices, of_rows = scanned
        weights = self.layer_weights(part.loop, weights)
        residuals = read_layer(part.residual_buffer, part.slot, number)
        gradients, saved_for_weights = self.loops[part.loop].layer.input_gradients(
            residuals, weights, [*part.local.shared, *slices], [*gradients, *of_rows]
        )
        saved_buffer = with_layer(saved_buffer, saved_slot, number, saved_for_weights)
        return (gradients, saved_buffer), None

    def start_backward(
        self, row: dict[str, Any], sent: Arrays, buffers: Buffers, outer_sums: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The backward pass of the start of a loop, after that of its first part.

        The result is the gradients of what came out of the loop before, which are sent on, and the
        sums. The start is computed again rather than kept, for it is little.
        """
        # The gradient arrives at the start as it leaves the first part of the loop.
        do = partial(self._start_backward, Pass(row, "B"), buffers)
        return self.for_loop(row["B.part"], do, sent, outer_sums)

    def _start_backward(
        self, step: Pass, buffers: Buffers, loop: int, sent: Arrays, outer_sums: Arrays
    ) -> tuple[Arrays, Arrays]:
        inputs = self.inputs(step["microbatch"])
        trained = self.cut.start_weights(loop)
        travelled: Arrays = []
        # The first loop starts from the inputs, which have no gradient.
        differentiable: Sequence[bool] = []
        if loop > 0:
            arrived = read_slot(buffers["activations"], step["activations"])
            travelled = self.cut.wire.unpacked(loop - 1, arrived)
            differentiable = self.cut.loops[loop - 1].differentiable
        floats, with_floats = split_differentiable(travelled, differentiable)

        def start(floats: Arrays, weights: Arrays) -> Arrays:
            outer = replaced(self.outer, trained, weights)
            made = self.cut.start(loop, outer, inputs, with_floats(floats))
            return split_differentiable(made, self.cut.loops[loop].differentiable)[0]

        _, derivative = jax.vjp(start, floats, [self.outer[k] for k in trained])
        travelled_gradients, weight_gradients = derivative(
            self.cut.wire.unpacked(loop, sent, backward=True)
        )
        if loop > 0:
            sent = self.cut.wire.packed(loop - 1, travelled_gradients, backward=True)
        return sent, self.with_outer(outer_sums, trained, weight_gradients)

    def weight_gradients(
        self, row: dict[str, Any], buffers: Buffers, layer_sums: list[Arrays]
    ) -> list[Arrays]:
        """A pass `W`: the sums of the layers' gradients with those of one part and microbatch.

        It reads what the forward pass kept and what the backward pass left.
        """
        do = partial(self._weight_gradients, Pass(row, "W"), buffers)
        return self.for_loop(row["W.part"], do, layer_sums)

    def _weight_gradients(
        self, step: Pass, buffers: Buffers, loop: int, layer_sums: list[Arrays]
    ) -> list[Arrays]:
        local = self.local_inputs(step, loop)
        first_row, weights = self.part_weights(step, loop)

        def body(sums: Arrays, scanned: Any) -> tuple[Arrays, None]:
            number, weights, slices = scanned
            residuals = read_layer(buffers["kept"][loop], step["kept"], number)
            saved_for_weights = read_layer(buffers["left"][loop], step["left"], number)
            weight_gradients = self.loops[loop].layer.weight_gradients(
                residuals,
                self.layer_weights(loop, weights),
                [*local.shared, *slices],
                saved_for_weights,
            )
            # The sums have all layers of a stage, of which a part has some.
            return self.with_layer_gradients(loop, sums, first_row + number, weight_gradients), None

        numbers = jnp.arange(self.loops[loop].layers_per_part)
        sums, _ = lax.scan(body, layer_sums[loop], (numbers, weights, local.per_layer))
        return replaced(layer_sums, [loop], [sums])

    # Sums of gradients.

    def with_outer(self, sums: Arrays, positions: Sequence[int], gradients: Arrays) -> Arrays:
        """The sums of the outer weights with gradients of some of them added."""
        added = []
        for k, gradient in zip(positions, gradients, strict=True):
            added.append(sums[k] + gradient.astype(sums[k].dtype))
        return replaced(sums, positions, added)

    def with_layer_gradients(self, loop: int, sums: Arrays, row: Any, gradients: Arrays) -> Arrays:
        """A loop's sums with the gradients of one layer added.

        Those of trained constants, which all layers share, are added as they are; those of stacked
        weights in the layer's row.
        """
        # The sums of a loop begin with those of its constants.
        constants = len(self.loops[loop].trained_constants)
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
        for x in self.loops[loop].trained_constants:
            sums.append(jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)))
        return sums

    def constants_backward(self, loop: int, outer_sums: Arrays, sums: Arrays) -> Arrays:
        """The sums of the outer weights with what comes back through a loop's trained constants.

        `sums` are those of the gradients of the constants. It is enough to go back once, after all
        microbatches, since the constants are made of weights only.
        """
        trained = self.cut.shared_weights(loop)

        def constants(weights: Arrays) -> Arrays:
            return self.cut.constants(loop, replaced(self.outer, trained, weights))[0]

        made, derivative = jax.vjp(constants, [self.outer[k] for k in trained])
        # Sums may be wider than what they are sums of; a derivative takes the dtype of the latter.
        constant_gradients = [total.astype(x.dtype) for total, x in zip(sums, made, strict=True)]
        (weight_gradients,) = derivative(constant_gradients)
        return self.with_outer(outer_sums, trained, weight_gradients)
