"""The executor: one program, in which each stage does in each tick what the table says.

The program is manual over the stages' axis. In a tick a stage may go forward, go backward and make
gradients of weights, each under a `cond`: what the stages do differs, the program does not. Between
ticks, what was made is sent on, by one permute for each distance that the schedule sends over.
The permutes are outside the `cond`s, since all stages have to take part in a collective.

    tick:   forward? -> head? -> backward? -> start of a loop, backward? -> weights? -> send

Where passes are combined, a forward and a backward pass that do not wait for each other are one
pass under one `cond`, at the beginning of the tick.

Around the loop of ticks nothing differs from any other step: the weights outside the stages are
whole on each stage, and the weights of a stage are only there, as are the sums of their gradients.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardlib.pipeline._buffers import Buffers, replaced, with_slot, zeros
from shardlib.pipeline._cut_loss import Cut
from shardlib.pipeline._loop import Arrays
from shardlib.pipeline._outside_loops import OutsideLoops
from shardlib.pipeline._pass_row import PassRow, cond_told
from shardlib.pipeline._passes import Passes
from shardlib.pipeline._program import Program, channel
from shardlib.tracing._jaxpr import picked


class _State(NamedTuple):
    """What a stage hands from tick to tick, when it trains.

    `outer_sums` has a sum of gradients for each outer weight, `layer_sums` is described at
    `Passes`, and `totals` are the sums of the function's outputs.
    """

    buffers: Buffers
    outer_sums: Arrays
    layer_sums: list[Arrays]
    totals: Arrays


@dataclass(eq=False)
class Executor:
    """A cut function, run as a program says, over the mesh axis `axis`.

    `weights` are all weights; of the stacked ones this stage's layers, part after part.
    `inputs(microbatch)` gives the inputs of the function, and `summed_outputs` are the positions of
    the outputs that are summed over microbatches. `combines` says whether two passes of a tick that
    do not wait for each other are one.
    """

    cut: Cut
    program: Program
    axis: str
    weights: Sequence[Any]
    inputs: Callable[[Any], Arrays]
    summed_outputs: Sequence[int]
    combines: bool = False

    def __post_init__(self) -> None:
        self.passes = Passes(self.cut, self.program, self.weights, self.inputs)
        self.outside = OutsideLoops(
            self.cut, self.program, self.passes.outer, self.inputs, self.summed_outputs
        )
        self.table = self.program.table

    def gradient(self, sums: Sequence[Any]) -> tuple[Arrays, Arrays]:
        """Run all microbatches forward and backward.

        `sums` has an array for each trained weight, and anything for the others. The result is what
        the totals come to on this stage, and `sums` with its gradients added.
        """
        stage = lax.axis_index(self.axis)
        start = self._start(sums)
        # Both branches of a `cond` have results: a stage without a pass in a tick sends zeros.
        nothing = zeros(self.cut.wire.shapes)
        no_gradients = zeros(self.cut.wire.gradient_shapes)

        def tick(state: _State, rows: Any) -> tuple[_State, None]:
            row = {name: numbers[stage] for name, numbers in rows.items()}
            return self._tick(row, state, nothing, no_gradients), None

        state, _ = lax.scan(tick, start, self._rows())
        outer_sums, stack_sums = self._sums_after(state)
        positions = list(self.cut.outer)
        for loop in range(len(self.cut.loops)):
            positions += self._trained_stacks(loop)
        return state.totals, replaced(sums, positions, [*outer_sums, *stack_sums])

    def _start(self, sums: Sequence[Any]) -> "_State":
        """What a stage has before its first tick, with sums of gradients that go on from these."""
        layer_sums = []
        for loop in range(len(self.cut.loops)):
            of_constants = self.passes.empty_constant_sums(loop)
            of_stacked = picked(sums, self._trained_stacks(loop))
            layer_sums.append([*of_constants, *of_stacked])
        outer_sums = picked(sums, self.cut.outer)
        return _State(self.passes.buffers(), outer_sums, layer_sums, self._empty_totals())

    def _trained_stacks(self, loop: int) -> list[int]:
        """The positions of a loop's trained stacked weights among all, in the loop's order."""
        return [k for k in self.cut.loops[loop].weight_numbers if k in self.cut.trained]

    def _tick(
        self, row: dict[str, Any], state: _State, nothing: Arrays, no_gradients: Arrays
    ) -> _State:
        """One tick of this stage; `nothing` and `no_gradients` are sent where it has no pass."""
        output_wire, gradient_wire = nothing, no_gradients
        both: Any = np.bool_(False)
        if self.combines:
            both = row["both"]
            output_wire, gradient_wire, state = self._both(row, state, nothing, no_gradients)
        # Forward comes first: the head's gradient is there for a backward pass of the same tick.
        output_wire, state = self._forward(row, state, output_wire, both)
        gradient_wire, state = self._backward(row, state, gradient_wire, both)
        buffers = self._with_arrivals(state.buffers, row, "F", output_wire)
        buffers = self._with_arrivals(buffers, row, "B", gradient_wire)
        return state._replace(buffers=buffers)

    def _both(
        self, row: dict[str, Any], state: _State, nothing: Arrays, no_gradients: Arrays
    ) -> tuple[Arrays, Arrays, _State]:
        """Both passes of a tick, if there are two that do not wait for each other."""
        output_wire, gradient_wire, buffers, layer_sums = self._cond(
            self.combined_passes,
            row["both"],
            partial(self.passes.combined, PassRow(row, "F"), PassRow(row, "B")),
            lambda *same: (nothing, no_gradients, *same),
            *(state.buffers, state.layer_sums),
        )
        state = state._replace(buffers=buffers, layer_sums=layer_sums)
        return output_wire, gradient_wire, state

    def _forward(
        self, row: dict[str, Any], state: _State, output_wire: Arrays, both: Any
    ) -> tuple[Arrays, _State]:
        """The forward pass of a tick, if there is one, and after the last part the head.

        If the tick has done `both` passes, it made `output_wire`.
        """
        forward = PassRow(row, "F")
        made_before = output_wire
        output_wire, buffers = self._cond(
            self.program.passes - self.combined_passes,
            forward.happens & ~both,
            partial(self.passes.forward, forward),
            lambda buffers: (made_before, buffers),
            state.buffers,
        )
        # The head comes right behind the last part, in the same tick. No part receives what the
        # last one made.
        buffers, outer_sums, totals = self._cond(
            self.table.microbatches,
            self._is_last(forward),
            lambda *operands: self.outside.head(forward, output_wire, *operands),
            lambda *same: same,
            *(buffers, state.outer_sums, state.totals),
        )
        return output_wire, state._replace(buffers=buffers, outer_sums=outer_sums, totals=totals)

    def _backward(
        self, row: dict[str, Any], state: _State, gradient_wire: Arrays, both: Any
    ) -> tuple[Arrays, _State]:
        """The backward pass of a tick, if there is one, and that of weights where they are split.

        If the tick has done `both` passes, the backward one made `gradient_wire`.

        `B` and `W` of one tick may be of the same microbatch: `W` reads what `B` has just saved.
        """
        backward = PassRow(row, "B")
        made_before = gradient_wire
        gradient_wire, buffers, layer_sums = self._cond(
            self.program.passes - self.combined_passes,
            backward.happens & ~both,
            partial(self.passes.backward, backward),
            lambda buffers, layer_sums: (made_before, buffers, layer_sums),
            *(state.buffers, state.layer_sums),
        )
        # The first part of a loop is followed, backward, by the start of the loop.
        # Inside, `switch_loop` says how many of the passes are of which loop.
        gradient_wire, outer_sums = self._cond(
            self.table.microbatches * self.program.loops,
            backward.happens & (backward.part % self.program.parts_per_loop == 0),
            lambda wire, sums: self.outside.start_backward(backward, wire, buffers, sums),
            lambda *same: same,
            *(gradient_wire, state.outer_sums),
        )
        if self.table.splits:
            weights = PassRow(row, "W")
            layer_sums = self._cond(
                self.program.passes,
                weights.happens,
                partial(self.passes.weight_pass, weights, buffers),
                lambda same: same,
                layer_sums,
            )
        state = state._replace(buffers=buffers, outer_sums=outer_sums, layer_sums=layer_sums)
        return gradient_wire, state

    def _sums_after(self, state: _State) -> tuple[Arrays, Arrays]:
        """The sums of outer weights, complete, and those of stacked weights, loop after loop.

        Gradients of trained constants go back to the weights that the constants are made of.
        """
        outer_sums, stack_sums = state.outer_sums, []
        for loop, stage_loop in enumerate(self.passes.stage_loops):
            # The sums of a loop are those of its constants, then those of its stacked weights.
            sums, count = state.layer_sums[loop], len(stage_loop.trained_constants)
            if count:
                outer_sums = self.outside.constants_backward(loop, outer_sums, sums[:count])
            stack_sums += sums[count:]
        return outer_sums, stack_sums

    def measure(self) -> Arrays:
        """What the totals come to on this stage, for a program of forward passes only."""
        stage = lax.axis_index(self.axis)
        nothing = zeros(self.cut.wire.shapes)

        def tick(state: Any, rows: Any) -> tuple[Any, None]:
            buffers, totals = state
            row = {name: numbers[stage] for name, numbers in rows.items()}
            forward = PassRow(row, "F")
            output_wire = self._cond(
                self.program.passes,
                forward.happens,
                lambda: self.passes.forward(forward, buffers)[0],
                lambda: nothing,
            )
            # Only one stage has the last part. On the others the totals stay zero.
            head = partial(self._measured_head, forward, output_wire)
            totals = self._cond(
                self.table.microbatches, self._is_last(forward), head, lambda same: same, totals
            )
            return (self._with_arrivals(buffers, row, "F", output_wire), totals), None

        start = self.passes.buffers(), self._empty_totals()
        (_, totals), _ = lax.scan(tick, start, self._rows())
        return totals

    def _measured_head(self, forward: PassRow, output_wire: Arrays, totals: Arrays) -> Arrays:
        """The totals with the outputs of the microbatch that has come out of the last part.

        It is the loss without a derivative, for a table that only goes forward.
        """
        travelled = self.cut.wire.unpacked(len(self.cut.loops) - 1, output_wire)
        inputs = self.inputs(forward.microbatch)
        outputs = self.cut.after(self.passes.outer, inputs, travelled, self.summed_outputs)
        return [total + output for total, output in zip(totals, outputs, strict=True)]

    def _cond(self, times: int, *given: Any) -> Any:
        """`lax.cond(*given)`, of which a stage takes the first branch in `times` ticks at most."""
        return cond_told(times, self.program.ticks, *given)

    def _is_last(self, forward: PassRow) -> Any:
        """Whether this stage has a forward pass through the last part in this tick."""
        return forward.happens & (forward.part == self.table.parts - 1)

    def _rows(self) -> dict[str, jax.Array]:
        """What each stage does in each tick, as arrays that the loop of ticks goes over."""
        rows = dict(self.program.rows)
        if self.combines:
            rows["both"] = self.program.combinable
        return {name: jnp.asarray(numbers) for name, numbers in rows.items()}

    @property
    def combined_passes(self) -> int:
        """How many passes of each kind are combined with another; plans count the others alone."""
        return self.program.combined_passes if self.combines else 0

    def _empty_totals(self) -> Arrays:
        """The sums of the function's outputs before any microbatch, as zeros."""

        def after(*travelled: Any) -> Any:
            outer, inputs = self.passes.outer, self.inputs(0)
            return self.cut.after(outer, inputs, list(travelled), self.summed_outputs)

        # Only the shapes are computed: the layers are not run for this.
        return zeros(jax.eval_shape(after, *self.cut.loops[-1].travelling))

    def _with_arrivals(
        self, buffers: Buffers, row: dict[str, Any], kind: str, made: Arrays
    ) -> Buffers:
        """Send what passes of a kind made, and write what arrives from other stages.

        There is one permute for each distance at which the schedule sends; at distance 0 a stage
        hands on to itself. What a stage does not expect goes into a slot that nobody reads.
        """
        # What a forward pass makes is read by the next one, and gradients go backward.
        buffer = {"F": "activations", "B": "gradients"}[kind]
        for distance, pairs in self.program.channels[kind].items():
            arrived = made
            if distance != 0:
                # A stage that is no pair's target gets zeros.
                arrived = [lax.ppermute(x, self.axis, pairs) for x in made]
            # Where nothing is expected, this is the slot that nobody reads.
            slot = row[channel(kind, distance)]
            buffers = buffers | {buffer: with_slot(buffers[buffer], slot, arrived)}
        return buffers
