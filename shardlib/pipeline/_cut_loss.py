"""A loss that was cut at its loops over layers: the pieces that stages run, see `_cut`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr

from shardlib.pipeline._loop import (
    Arrays,
    Loop,
    batch_only_values,
    body_of,
    outputs_behind,
)
from shardlib.pipeline._wire import Wire, wire_of
from shardlib.tracing._jaxpr import (
    made_of,
    picked,
    variables,
)

# For each variable of a loss, the numbers of the weights that it is computed from.
Sources = dict[Any, frozenset[int]]


@dataclass(frozen=True, eq=False)
class Cut:
    """A traced function of weights and inputs, cut at its `loops`; `cut` makes one.

    - `jaxpr` and `consts` are the function itself: its inputs are all weights, of which there are
      `weight_count`, and then the inputs of a microbatch.
    - `outer` has the numbers of the weights that are not stacked, and `trained` those of all
      trained weights. Arguments called `outer` below are the values of the former, in this order.
    - `trained_sources` has, for each variable outside the loops, the trained outer weights that it
      is computed from, other than through loops.

    In the methods `loop` is the number of a loop, and `cut_loop` is the `Loop` itself.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    loops: tuple[Loop, ...]
    outer: tuple[int, ...]
    trained: frozenset[int]
    weight_count: int
    trained_sources: Sources

    @cached_property
    def wire(self) -> Wire:
        """How what travels through the loops is sent from part to part."""
        return wire_of(self.loops)

    # The values of what is not in a loop.

    def _values(self, outer: Arrays, inputs: Arrays) -> dict[Any, Any]:
        """The values that are known without any layer, by variable.

        These are constants, outer weights and inputs, and those outputs of loops that are made of
        inputs only.
        """
        # All that is known without running a layer.
        values = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        values |= dict(zip(picked(self.jaxpr.invars, self.outer), outer, strict=True))
        values |= dict(zip(self.jaxpr.invars[self.weight_count :], inputs, strict=True))
        for cut_loop in self.loops:
            if cut_loop.batch_only_outputs:
                outputs = picked(cut_loop.equation.outvars, cut_loop.batch_only_outputs)
                computed = batch_only_values(cut_loop, *self._local_inputs(cut_loop, values))
                values |= dict(zip(outputs, computed, strict=True))
        return values

    def _local_inputs(self, cut_loop: Loop, values: dict[Any, Any]) -> tuple[Arrays, Arrays]:
        """The values of a loop's shared and of its per-layer inputs, out of known values."""
        inputs = cut_loop.equation.invars
        shared = picked(inputs, cut_loop.shared_inputs)
        per_layer = picked(inputs, cut_loop.per_layer_inputs)
        # Computed together, since they may have equations in common.
        computed = made_of(self.jaxpr, [*shared, *per_layer], values)
        return computed[: len(shared)], computed[len(shared) :]

    def _after(self, loop: int, travelled: Arrays) -> dict[Any, Any]:
        """The values that are known from what comes out of the last part of a loop."""
        values = {}
        for variable, value in zip(self.loops[loop].leaving, travelled, strict=True):
            # Carried inputs leave nothing that is read later.
            if variable is not None:
                values[variable] = value
        return values

    def start(self, loop: int, outer: Arrays, inputs: Arrays, travelled: Arrays) -> Arrays:
        """What travels into the first part of a loop.

        `travelled` is what came out of the last part of the loop before, and is not looked at for
        the first loop. Stacked outputs start as zeros, which the parts fill in.
        """
        cut_loop = self.loops[loop]
        values = self._values(outer, inputs)
        if loop > 0:
            # What came out of the loop before, so that nothing in front of it is computed again.
            values |= self._after(loop - 1, travelled)
        travelling = []
        for x in made_of(self.jaxpr, [*cut_loop.entering, *cut_loop.passing], values):
            # A carry may start as a literal, a Python number.
            travelling.append(jnp.asarray(x))
        for shape in cut_loop.travelling[len(travelling) :]:
            travelling.append(jnp.zeros(shape.shape, shape.dtype))
        return travelling

    def local_inputs(self, loop: int, outer: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        """What every stage computes for itself from the inputs of a microbatch.

        The first list has the loop's shared inputs, the second its per-layer inputs, stacked over
        all layers.
        """
        return self._local_inputs(self.loops[loop], self._values(outer, inputs))

    def constants(self, loop: int, outer: Arrays) -> tuple[Arrays, Arrays]:
        """A loop's trained constants and its frozen ones, computed from weights only.

        They are the same for all microbatches, so that a stage computes them once.
        """
        cut_loop = self.loops[loop]
        names = [*self.jaxpr.constvars, *picked(self.jaxpr.invars, self.outer)]
        values = dict(zip(names, [*self.consts, *outer], strict=True))
        numbers = (*cut_loop.trained_constants, *cut_loop.frozen_constants)
        computed = made_of(self.jaxpr, picked(cut_loop.equation.invars, numbers), values)
        split = len(cut_loop.trained_constants)
        return computed[:split], computed[split:]

    def after(
        self, outer: Arrays, inputs: Arrays, travelled: Arrays, wanted: Sequence[int]
    ) -> Arrays:
        """The outputs of the function whose numbers are `wanted`.

        `travelled` is what comes out of the last part of the last loop.
        """
        values = self._values(outer, inputs) | self._after(len(self.loops) - 1, travelled)
        return made_of(self.jaxpr, picked(self.jaxpr.outvars, wanted), values)

    def aside(self, outer: Arrays, inputs: Arrays, wanted: Sequence[int]) -> Arrays | None:
        """The outputs whose numbers are `wanted`, if they can be computed without any layer.

        The result is None if at least one of them is made by layers.
        """
        atoms = picked(self.jaxpr.outvars, wanted)
        values = self._values(outer, inputs)
        for atom in atoms:
            if atom not in values and outputs_behind(self.jaxpr, [atom], self.loops):
                return None
        return made_of(self.jaxpr, atoms, values)

    def unchanged(self, output: int, given: int) -> bool:
        """Whether an output of the function is one of its inputs, as it was given.

        That includes inputs that a loop takes layer by layer and gives back stacked again, as a
        loop over modules does with their state.
        """
        variable = self.jaxpr.outvars[output]
        for cut_loop in self.loops:
            if variable in cut_loop.equation.outvars[cut_loop.parts[1] :]:
                variable = _scanned_unchanged(cut_loop, variable)
        return variable is self.jaxpr.invars[self.weight_count + given]

    # Which outer weights get a gradient from a piece. The numbers are positions in `outer`.

    def _trained_behind(self, wanted: Iterable[Any]) -> list[int]:
        """The trained outer weights that some variables are computed from outside the loops."""
        numbers: set[int] = set()
        for variable in variables(wanted):
            numbers |= self.trained_sources.get(variable, frozenset())
        return [k for k, number in enumerate(self.outer) if number in numbers]

    def start_weights(self, loop: int) -> list[int]:
        """The trained outer weights behind the start of a loop."""
        return self._trained_behind(self.loops[loop].entering)

    def shared_weights(self, loop: int) -> list[int]:
        """The trained outer weights behind the trained constants of a loop."""
        cut_loop = self.loops[loop]
        inputs = cut_loop.equation.invars
        return self._trained_behind(picked(inputs, cut_loop.trained_constants))

    @cached_property
    def head_weights(self) -> list[int]:
        """The trained outer weights behind the first output, the loss, after the last loop."""
        return self._trained_behind(self.jaxpr.outvars[:1])


def _scanned_unchanged(cut_loop: Loop, stacked_output: Any) -> Any:
    """The input of a loop that a stacked output is the same as, or else the output itself."""
    equation = cut_loop.equation
    body = body_of(equation).jaxpr
    result = body.outvars[equation.outvars.index(stacked_output)]
    for argument, atom in zip(body.invars, equation.invars, strict=True):
        if argument is result:
            return atom
    return stacked_output
