"""Loops that update a parameter's arrays some rows at a time, from and to the host's memory.

What they compute is cut out of the trace of a whole update: see `_streamed_update`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr

from shardlib.layouts._host import is_on_host, to_device, to_host
from shardlib.tracing._jaxpr import picked, shapes_of
from shardlib.tracing._row_rules import Part, Rows, cut
from shardlib.tracing._rows import evaluate_rows


@dataclass(frozen=True, eq=False)
class ByRows:
    """A function of some rows of one parameter's arrays, taken from the trace of the whole update.

    Attributes:
        body: its equations, which read rows first and then `wholes`.
        dim: along which the rows lie.
        inputs: the positions of the inputs that it reads rows of.
        wholes: the variables of the trace that it reads whole.
        rows: how many there are, and how many are taken at a time.
    """

    body: Jaxpr
    dim: int
    inputs: tuple[int, ...]
    wholes: tuple[Any, ...]
    rows: Rows

    @property
    def times(self) -> int:
        """How often rows are taken until all have been."""
        return self.rows.total // self.rows.count

    def check(self, arrays: Sequence[Any]) -> None:
        """Trace it; raises `MixesRowsError` where rows depend on others."""
        jax.eval_shape(lambda wholes: self(0, arrays, wholes), shapes_of(self.wholes))

    def __call__(self, number: Any, arrays: Sequence[Any], wholes: Sequence[Any]) -> list[Any]:
        """The rows of the results that are the next after so many times.

        Args:
            number: how many times rows have been taken.
            arrays: the inputs of the whole update.
            wholes: the values of `wholes`, on the device.
        """
        # Where they start is known to the running program only; their number is a part of it.
        rows = Rows(number * self.rows.count, self.rows.count, self.rows.total)
        parts = []
        for position in self.inputs:
            part = lax.dynamic_slice_in_dim(arrays[position], rows.start, rows.count, self.dim)
            parts.append(Part(to_device(part), self.dim))
        results = evaluate_rows(self.body, [], [*parts, *map(Part, wholes)], rows)
        return [cut(result, self.dim, rows).value for result in results]


@dataclass(frozen=True, eq=False)
class Total:
    """A reduction over the rows of what a function gives, as the equation says."""

    function: ByRows
    equation: Any
    dim: int  # along which the rows of its operand lie

    def run(self, arrays: Sequence[Any], wholes: Sequence[Any]) -> Any:
        """The total of all rows."""
        # The first total is made outside of the loop: it has the dtype that the loop carries.
        combine = TOTALS[self.equation.primitive.name]

        def part(number: Any) -> Any:
            (operand,) = self.function(number, arrays, wholes)
            return self.equation.primitive.bind(operand, **self.equation.params)

        def iteration(number: Any, total: Any) -> Any:
            return combine(total, part(number))

        return lax.fori_loop(1, self.function.times, iteration, part(0))


TOTALS: dict[str, Callable[[Any, Any], Any]] = {
    "reduce_sum": lax.add,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
}
"""How totals of some rows are combined, by the reductions that have such totals."""


@dataclass(frozen=True, eq=False)
class Loop:
    """The update of one parameter's arrays, which take the place of what they were."""

    function: ByRows
    positions: tuple[int, ...]  # of the arrays that it updates
    totals: dict[Any, Total]  # what has to be known before, by variable of the trace

    def run(self, arrays: Sequence[Any], wholes: Sequence[Any]) -> list[Any]:
        """The updated arrays."""

        def iteration(number: Any, updated: list[Any]) -> list[Any]:
            # Rows are read from the arrays that rows are written to: a second buffer would be
            # there for as long as the loop runs.
            now = list(arrays)
            for position, array in zip(self.positions, updated, strict=True):
                now[position] = array
            return self._written(number, updated, self.function(number, now, wholes))

        updated = picked(arrays, self.positions)
        return lax.fori_loop(0, self.function.times, iteration, updated)

    def _written(self, number: Any, arrays: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """The arrays with the rows of an iteration replaced by its results."""
        count, dim = self.function.rows.count, self.function.dim
        written = []
        for array, rows in zip(arrays, results, strict=True):
            if is_on_host(array):
                rows = to_host(rows)
            start = number * count
            written.append(lax.dynamic_update_slice_in_dim(array, rows, start, dim))
        return written
