"""The update of a state of which a part is in the host's memory: some rows at a time.

The optimizer is any function of whole trees. It is traced once, as if all arrays were on the
device, and the trace is taken apart by parameter:

    count, norms, ...                    what reads no rows                  once, before the loops
    for each parameter on the host
      its gradient, moments, value       copied to the device, some rows at a time, updated by the
                                         equations of the trace that lead to them, and copied back
    everything else                      as without offload

Rows are indices along one dim, mostly of the layers, which no axis of the mesh splits. Where rows
of an update depend on other rows, as a norm over a whole stack does, no dim will do, and the arrays
of that parameter are copied to the device whole, one parameter after the other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.step._offload import BYTES_AT_A_TIME, is_on_host, to_device, to_host
from shardlib.tracing._jaxpr import JITS, behind, inlined, inputs_of, made_of, variables
from shardlib.tracing._rows import MixesRowsError, Part, Rows, evaluate_rows

# The two last dims of an array lie in tiles, of which copies take whole ones.
_TILE = (16, 128)


class Owner(NamedTuple):
    """A parameter of which an array is in the host's memory.

    Attributes:
        path: where the parameter is.
        shape: its shape.
        shards: into how many parts the mesh splits it.
        whole_dims: its dims that no axis of the mesh splits.
        position: its number among the parameters.
        positions: the numbers of what is updated with it, itself first: of the arrays that have
            its shape, among the parameters and then the arrays of the optimizer's state.
    """

    path: str
    shape: tuple[int, ...]
    shards: int
    whole_dims: tuple[int, ...]
    position: int
    positions: tuple[int, ...]


def streamed_update(
    function: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]],
    params: Any,
    opt_state: Any,
    gradient: Any,
    others: Any,
    owners: Sequence[Owner],
) -> tuple[Any, Any, Any]:
    """What `function(params, opt_state, gradient, others)` returns: the same trees, and the rest.

    Arrays of the first two that are in the host's memory are so in the results. `gradient` is a
    tree like `params`; `owners` are the parameters that have arrays in the host's memory.
    """
    inputs, tree = jax.tree.flatten((params, opt_state, gradient, others))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    traced, out = jax.make_jaxpr(
        lambda *inputs: function(*tree.unflatten(inputs)), return_shape=True
    )(*shapes)
    closed = inlined(traced, lambda equation: equation.primitive.name in JITS)
    number = len(jax.tree.leaves((params, opt_state)))
    results = _Streaming(closed, inputs, number).results(owners)
    return jax.tree.unflatten(jax.tree.structure(out), results)


@dataclass(frozen=True, eq=False)
class _Loop:
    """The update of one parameter's arrays along a dim, some rows in each iteration.

    Attributes:
        body: the equations that lead to the results, as a function of rows and then `wholes`.
        dim: along which the rows lie.
        inputs: the positions of the inputs of which an iteration gets rows.
        positions: those of the results, which take the place of the inputs there.
        wholes: the variables of the trace that every iteration reads.
        rows: how many there are, and how many an iteration takes.
    """

    body: Jaxpr
    dim: int
    inputs: tuple[int, ...]
    positions: tuple[int, ...]
    wholes: tuple[Any, ...]
    rows: Rows

    def check(self, arrays: Sequence[Any]) -> None:
        """Trace an iteration; raises `MixesRowsError` where rows depend on others."""
        wholes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in self.wholes]
        jax.eval_shape(lambda wholes: self._iteration(0, arrays, wholes), wholes)

    def run(self, arrays: Sequence[Any], wholes: Sequence[Any]) -> list[Any]:
        """The results. What an iteration writes takes the place of what it has read."""

        def iteration(number: Any, updated: list[Any]) -> list[Any]:
            now = list(arrays)
            for position, array in zip(self.positions, updated, strict=True):
                now[position] = array
            start = number * self.rows.count
            written = []
            for array, update in zip(updated, self._iteration(start, now, wholes), strict=True):
                if is_on_host(array):
                    update = to_host(update)
                written.append(lax.dynamic_update_slice_in_dim(array, update, start, self.dim))
            return written

        updated = [arrays[position] for position in self.positions]
        return lax.fori_loop(0, self.rows.total // self.rows.count, iteration, updated)

    def _iteration(self, start: Any, arrays: Sequence[Any], wholes: Sequence[Any]) -> list[Any]:
        """The rows from `start` on of the results."""
        rows = Rows(start, self.rows.count, self.rows.total)
        parts = []
        for position in self.inputs:
            part = lax.dynamic_slice_in_dim(arrays[position], start, rows.count, self.dim)
            parts.append(Part(to_device(part), self.dim))
        results = evaluate_rows(self.body, [], [*parts, *map(Part, wholes)], rows)
        for result in results:
            if result.dim != self.dim:
                raise MixesRowsError("the rows of a result lie along another dim")
        return [result.value for result in results]


@dataclass(frozen=True, eq=False)
class _Streaming:
    """A traced update with its inputs, of which the first `number` come back as results."""

    closed: ClosedJaxpr
    inputs: list[Any]
    number: int

    @property
    def jaxpr(self) -> Jaxpr:
        return self.closed.jaxpr

    def results(self, owners: Sequence[Owner]) -> list[Any]:
        """The results of the trace, those of each owner by itself."""
        loops: list[_Loop] = []
        whole: list[list[int]] = []
        apart: set[int] = set()
        for owner in owners:
            updated = [at for at in owner.positions if self._is_updated(at)]
            loop = self._loop(owner, updated)
            if loop is not None:
                loops.append(loop)
            else:
                whole.append(updated)
            apart.update(updated)
        results: dict[int, Any] = {}
        known = self._first(loops, apart, results)
        before: list[Any] = []
        for positions in whole:
            values = self._whole(positions, known, before)
            results.update(zip(positions, values, strict=True))
            before = values[:1]
        for loop in loops:
            arrays = loop.run(self.inputs, [known[var] for var in loop.wholes])
            results.update(zip(loop.positions, arrays, strict=True))
        return [results[position] for position in range(len(self.jaxpr.outvars))]

    def _first(
        self, loops: Sequence[_Loop], apart: set[int], results: dict[int, Any]
    ) -> dict[Any, Any]:
        """Compute all results but those `apart`, and what loops read whole.

        Returns the values of the variables that are known then; results go into `results`.
        """
        known = dict(zip(self.jaxpr.constvars, self.closed.consts, strict=True))
        inputs = dict(zip(self.jaxpr.invars, self.inputs, strict=True))
        known.update({var: value for var, value in inputs.items() if not is_on_host(value)})
        rest = []
        for position, atom in enumerate(self.jaxpr.outvars):
            if position in apart:
                continue
            # What is handed on as it came stays where it is.
            if not isinstance(atom, Literal) and atom in inputs:
                results[position] = inputs[atom]
            else:
                rest.append(position)
        wanted = [self.jaxpr.outvars[position] for position in rest]
        for loop in loops:
            wanted += loop.wholes
        values = self._values(wanted, known, [])
        for position, value in zip(rest, values, strict=False):
            results[position] = self._in_place(position, value)
        for atom, value in zip(wanted, values, strict=True):
            if not isinstance(atom, Literal):
                known[atom] = value
        return known

    def _values(
        self, wanted: Sequence[Any], known: Mapping[Any, Any], before: list[Any]
    ) -> list[Any]:
        """The values of some atoms, for which what is on the host is copied to the device whole.

        Nothing is copied until the arrays `before` are there.
        """
        read = set(variables(wanted)).union(inputs_of(behind(self.jaxpr, wanted, known)))
        copied = {}
        for var, value in zip(self.jaxpr.invars, self.inputs, strict=True):
            if var in read and var not in known:
                copied[var] = value
        on_host = list(copied.values())
        if on_host and before:
            on_host, _ = lax.optimization_barrier((on_host, before))
        copied = dict(zip(copied, map(to_device, on_host), strict=True))
        return made_of(self.jaxpr, wanted, {**known, **copied})

    def _whole(
        self, positions: Sequence[int], known: Mapping[Any, Any], before: list[Any]
    ) -> list[Any]:
        """Results of which rows depend on others, with their arrays on the device, after others."""
        wanted = [self.jaxpr.outvars[position] for position in positions]
        values = self._values(wanted, known, before)
        return [self._in_place(*pair) for pair in zip(positions, values, strict=True)]

    def _in_place(self, position: int, value: Any) -> Any:
        """A result in the memory where its input was."""
        if position < self.number and is_on_host(self.inputs[position]):
            return to_host(value)
        return value

    def _loop(self, owner: Owner, updated: Sequence[int]) -> _Loop | None:
        """The loop that updates the arrays of an owner; None where rows depend on other rows."""
        arrays = [self.inputs[position] for position in owner.positions]
        arrays.append(self.inputs[self._gradient_of(owner)])
        size = sum(array.size * array.dtype.itemsize for array in arrays) // owner.shards
        for dim, count in _choices(owner, size):
            try:
                return self._loop_along(owner, updated, dim, count)
            except MixesRowsError:
                continue
        return None

    def _loop_along(self, owner: Owner, updated: Sequence[int], dim: int, count: int) -> _Loop:
        """The loop along a dim; raises `MixesRowsError` where rows depend on other rows."""
        outvars = [self.jaxpr.outvars[position] for position in updated]
        rows = (*owner.positions, self._gradient_of(owner))
        by_rows = [self.jaxpr.invars[position] for position in rows]
        equations = _by_rows(behind(self.jaxpr, outvars), by_rows)
        written = {var for equation in equations for var in equation.outvars}
        if not updated or not written.issuperset(outvars):
            raise MixesRowsError("a result does not depend on the rows of its parameter")
        wholes = [var for var in inputs_of(equations) if var not in by_rows]
        body = self.jaxpr.replace(
            constvars=[], invars=[*by_rows, *wholes], outvars=outvars, eqns=equations
        )
        total = Rows(0, count, owner.shape[dim])
        loop = _Loop(body, dim, rows, tuple(updated), tuple(wholes), total)
        loop.check(self.inputs)
        return loop

    def _gradient_of(self, owner: Owner) -> int:
        """The number of an owner's gradient among the inputs, where it comes after the state."""
        return self.number + owner.position

    def _is_updated(self, position: int) -> bool:
        """Whether a result is another value than its input."""
        return self.jaxpr.outvars[position] is not self.jaxpr.invars[position]


def _by_rows(equations: Sequence[Any], by_rows: Sequence[Any]) -> list[Any]:
    """The equations whose results depend on rows, and those that spread a value over all rows."""
    dependent = set(by_rows)
    chosen = set()
    for number, equation in enumerate(equations):
        if not dependent.isdisjoint(variables(equation.invars)):
            chosen.add(number)
            dependent.update(equation.outvars)
    # A value that is spread would take as much memory outside of the loop as all rows.
    read = {var for number in chosen for var in variables(equations[number].invars)}
    for number, equation in enumerate(equations):
        is_spread = equation.primitive.name == "broadcast_in_dim"
        if is_spread and not read.isdisjoint(equation.outvars):
            chosen.add(number)
    return [equations[number] for number in sorted(chosen)]


def _choices(owner: Owner, size: int) -> list[tuple[int, int]]:
    """The dims along which an owner's arrays may be updated, with rows for an iteration.

    Dims of which few bytes are on the device at a time come first, and then those that come first
    in the parameter. `size` is how many bytes the arrays have on each device.
    """
    choices = []
    for dim in owner.whole_dims:
        total = owner.shape[dim]
        most = BYTES_AT_A_TIME * total // max(1, size)
        count = _divisor(total, most, _multiple(dim, len(owner.shape)))
        if count is not None:
            choices.append((count > most, dim, count))
    return [(dim, count) for _, dim, count in sorted(choices)]


def _multiple(dim: int, rank: int) -> int:
    """Of how many rows a copy should take a multiple, along a dim of an array."""
    from_end = rank - dim
    if from_end > len(_TILE):
        return 1
    return _TILE[-from_end]


def _divisor(total: int, most: int, multiple: int) -> int | None:
    """The largest divisor of a number of rows up to `most`, else the smallest one above it.

    It is a multiple of `multiple` and less than `total`; None where there is none.

    >>> _divisor(40, 12, 1), _divisor(4096, 100, 16), _divisor(40, 0, 1), _divisor(40, 8, 16)
    (10, 64, 1, None)
    """
    divisors = []
    for number in range(1, math.isqrt(total) + 1):
        if total % number == 0:
            divisors += [number, total // number]
    fitting = sorted({d for d in divisors if d % multiple == 0 and d < total})
    if not fitting:
        return None
    below = [d for d in fitting if d <= most]
    return below[-1] if below else fitting[0]
