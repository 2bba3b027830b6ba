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

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.layouts._host import is_on_host, to_device, to_host
from shardlib.step._host_update import HostUpdate
from shardlib.step._offload import BYTES_AT_A_TIME, Updater
from shardlib.step._streamed_loops import TOTALS, ByRows, Loop, Total
from shardlib.tracing._jaxpr import (
    JITS,
    behind,
    inlined,
    inputs_of,
    made_of,
    picked,
    variables,
)
from shardlib.tracing._row_rules import MixesRowsError, Rows

# Rows of more bytes are taken along another dim, if there is one with smaller rows. Those of the
# first dim are contiguous.
_LARGEST_ROW = 2**31
# The two last dims of an array lie in tiles, of which copies take whole ones: of so many rows.
_TILE = 16


class Owner(NamedTuple):
    """A parameter of which an array is in the host's memory.

    Attributes:
        path: where the parameter is.
        shape: its shape.
        parts: into how many parts the mesh splits each dim.
        position: its number among the parameters.
        positions: the numbers of what is updated with it, itself first: of the arrays that have
            its shape, among the parameters and then the arrays of the optimizer's state.
    """

    path: str
    shape: tuple[int, ...]
    parts: tuple[int, ...]
    position: int
    positions: tuple[int, ...]

    @property
    def split_dims(self) -> list[int]:
        """The dims that the mesh splits."""
        return [dim for dim, parts in enumerate(self.parts) if parts > 1]


def streamed_update(
    function: Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]],
    params: Any,
    opt_state: Any,
    gradient: Any,
    others: Any,
    owners: Sequence[Owner],
    by: Updater = "device",
) -> tuple[Any, Any, Any]:
    """What `function(params, opt_state, gradient, others)` returns: the same trees, and the rest.

    Arrays of the first two that are in the host's memory are so in the results.

    Args:
        function: the update, of whole trees.
        params: the parameters.
        opt_state: the optimizer's state.
        gradient: a tree like `params`.
        others: what else the update reads, on the device.
        owners: the parameters that have arrays in the host's memory.
        by: what updates the arrays of these: the device, or the processors of the host.
    """
    inputs, tree = jax.tree.flatten((params, opt_state, gradient, others))
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs]
    traced, out = jax.make_jaxpr(
        lambda *inputs: function(*tree.unflatten(inputs)), return_shape=True
    )(*shapes)
    closed = inlined(traced, lambda equation: equation.primitive.name in JITS)
    number = len(jax.tree.leaves((params, opt_state)))
    results = _Streaming(closed, inputs, number, by).results(owners)
    return jax.tree.unflatten(jax.tree.structure(out), results)


@dataclass(frozen=True, eq=False)
class _Streaming:
    """A traced update with its inputs, of which the first `number` come back as results."""

    closed: ClosedJaxpr
    inputs: list[Any]
    number: int
    by: Updater = "device"

    @property
    def jaxpr(self) -> Jaxpr:
        return self.closed.jaxpr

    def results(self, owners: Sequence[Owner]) -> list[Any]:
        """The results of the trace, those of each owner by itself."""
        loops: list[Loop] = []
        by_host: list[HostUpdate] = []
        whole: list[list[int]] = []
        apart: set[int] = set()
        for owner in owners:
            updated = [at for at in owner.positions if self._is_updated(at)]
            if not updated:
                continue
            loop = self._loop(owner, updated)
            if loop is not None:
                loops.append(loop)
            else:
                whole.append(updated)
            if self.by == "host":
                by_host.append(self._on_host(owner, loop))
            apart.update(updated)
        known = _Known(self, {var: total for loop in loops for var, total in loop.totals.items()})
        results = self._not_apart(known, apart)
        # What loops read is known before any of them writes, and none keeps what it has read.
        wholes = [known.values(loop.function.wholes) for loop in loops]
        updates = by_host if self.by == "host" else loops
        before: list[Any] = []
        for positions in whole:
            wanted = [self.jaxpr.outvars[position] for position in positions]
            for position, value in zip(positions, known.values(wanted, before), strict=True):
                results[position] = self._in_place(position, value)
            before = [results[position] for position in positions[:1]]
        for update, read in zip(updates, wholes, strict=True):
            results.update(zip(update.positions, update.run(self.inputs, read), strict=True))
        return [results[position] for position in range(len(self.jaxpr.outvars))]

    def _on_host(self, owner: Owner, loop: Loop | None) -> HostUpdate:
        """The same update as a loop's by the host, which has each device's shard by itself."""
        if loop is None:
            raise _host_cannot_update(owner, "no dim of it has rows that are updated by themselves")
        for dim in owner.split_dims:
            total = owner.shape[dim]
            of_a_shard = Rows(0, total // owner.parts[dim], total)
            function = dataclasses.replace(loop.function, dim=dim, rows=of_a_shard)
            try:
                function.check(self.inputs)
            except MixesRowsError as error:
                reason = f"the mesh splits dim {dim} into {owner.parts[dim]} parts, and {error}"
                raise _host_cannot_update(owner, reason) from error
        return HostUpdate(loop.function.body, loop.function.inputs, loop.positions)

    def _not_apart(self, known: "_Known", apart: set[int]) -> dict[int, Any]:
        """All results but those `apart`, by position."""
        inputs = dict(zip(self.jaxpr.invars, self.inputs, strict=True))
        results: dict[int, Any] = {}
        rest = []
        for position, atom in enumerate(self.jaxpr.outvars):
            if position in apart:
                continue
            # What is handed on as it came stays where it is.
            if not isinstance(atom, Literal) and atom in inputs:
                results[position] = inputs[atom]
            else:
                rest.append(position)
        values = known.values(picked(self.jaxpr.outvars, rest))
        for position, value in zip(rest, values, strict=True):
            results[position] = self._in_place(position, value)
        return results

    def _in_place(self, position: int, value: Any) -> Any:
        """A result in the memory where its input was."""
        if position < self.number and is_on_host(self.inputs[position]):
            return to_host(value)
        return value

    def _loop(self, owner: Owner, updated: Sequence[int]) -> Loop | None:
        """The loop that updates the arrays of an owner; None where rows depend on other rows."""
        arrays = [self.inputs[position] for position in owner.positions]
        arrays.append(self.inputs[self._gradient_of(owner)])
        size = sum(array.size * array.dtype.itemsize for array in arrays) // math.prod(owner.parts)
        choices = _choices(owner, size)
        if self.by == "host":
            # It takes all rows at once, and only has to know what is computed of all rows before.
            choices += [(dim, total) for dim, total in enumerate(owner.shape)]
        for dim, count in choices:
            try:
                return self._loop_along(owner, updated, dim, count)
            except MixesRowsError:
                continue
        return None

    def _loop_along(self, owner: Owner, updated: Sequence[int], dim: int, count: int) -> Loop:
        """The loop along a dim, of so many rows at a time.

        What mixes rows is taken out of the loop where it can be: a norm of all rows is known before
        any of them is updated. Raises `MixesRowsError` where rows depend on other rows still.
        """
        outvars = picked(self.jaxpr.outvars, updated)
        rows = Rows(0, count, owner.shape[dim])
        totals: dict[Any, Total] = {}
        # Each round takes an equation out that is evaluated before the loop, for all rows.
        before: set[Any] = set()
        while True:
            function = self._by_rows(owner, outvars, dim, rows, before)
            try:
                function.check(self.inputs)
                return Loop(function, tuple(updated), totals)
            except MixesRowsError as error:
                equation = error.equation
                if equation is None or not before.isdisjoint(equation.outvars):
                    raise
                if self._reads_host(equation, before):
                    total = self._total(owner, equation, dim, rows, before)
                    totals[equation.outvars[0]] = total
                before.update(equation.outvars)

    def _by_rows(
        self, owner: Owner, outvars: Sequence[Any], dim: int, rows: Rows, before: set[Any]
    ) -> ByRows:
        """What leads from the rows of an owner's arrays to some variables.

        Args:
            owner: the parameter that has the arrays.
            outvars: the variables of the trace that are wanted.
            dim: along which the rows lie.
            rows: how many there are, and how many are taken at a time.
            before: variables that are known before, and read whole.
        """
        positions = (*owner.positions, self._gradient_of(owner))
        by_rows = picked(self.jaxpr.invars, positions)
        equations = _depending(behind(self.jaxpr, outvars, before), by_rows)
        made = set(by_rows)
        for equation in equations:
            made.update(equation.outvars)
        if not outvars or not made.issuperset(outvars):
            raise MixesRowsError("a result does not depend on the rows of its parameter")
        wholes = [var for var in inputs_of(equations) if var not in by_rows]
        body = self.jaxpr.replace(
            constvars=[], invars=[*by_rows, *wholes], outvars=list(outvars), eqns=equations
        )
        return ByRows(body, dim, positions, tuple(wholes), rows)

    def _reads_host(self, equation: Any, before: set[Any]) -> bool:
        """Whether what an equation reads depends on arrays in the host's memory."""
        read = set(variables(equation.invars))
        read.update(inputs_of(behind(self.jaxpr, equation.invars, before)))
        pairs = zip(self.jaxpr.invars, self.inputs, strict=True)
        return any(is_on_host(value) and var in read for var, value in pairs)

    def _total(self, owner: Owner, equation: Any, dim: int, rows: Rows, before: set[Any]) -> Total:
        """A reduction over all rows as a loop of its own.

        Raises `MixesRowsError` where its totals of some rows do not add up to that of all.
        """
        if equation.primitive.name not in TOTALS:
            raise MixesRowsError(f"`{equation.primitive.name}` is not made of totals of rows")
        function = self._by_rows(owner, equation.invars, dim, rows, before)
        # Its operand has its rows where the parameter has them, or it is no such total.
        function.check(self.inputs)
        return Total(function, equation, dim)

    def _gradient_of(self, owner: Owner) -> int:
        """The number of an owner's gradient among the inputs, where it comes after the state."""
        return self.number + owner.position

    def _is_updated(self, position: int) -> bool:
        """Whether a result is another value than its input."""
        return self.jaxpr.outvars[position] is not self.jaxpr.invars[position]


def _host_cannot_update(owner: Owner, reason: str) -> ValueError:
    """The error for a parameter that the host cannot update."""
    return ValueError(
        f'`Offload(update="host")`: the host updates the shard of each device by itself, and the '
        f"optimizer's update of `{owner.path}`, of shape {owner.shape}, reads other shards: "
        f'{reason}. Take `update="device"`, or an optimizer whose update is elementwise, such as '
        "`optax.adamw`."
    )


class _Known:
    """The values of an update's variables that are known so far, all on the device."""

    def __init__(self, streaming: _Streaming, totals: Mapping[Any, Total]) -> None:
        self.streaming, self.totals = streaming, totals
        jaxpr = streaming.jaxpr
        self.known: dict[Any, Any] = dict(
            zip(jaxpr.constvars, streaming.closed.consts, strict=True)
        )
        self.on_host: dict[Any, Any] = {}
        for var, value in zip(jaxpr.invars, streaming.inputs, strict=True):
            if is_on_host(value):
                self.on_host[var] = value
            else:
                self.known[var] = value

    def values(self, wanted: Sequence[Any], before: Sequence[Any] = ()) -> list[Any]:
        """The values of some atoms, for which what is on the host is copied to the device whole.

        Nothing is copied until the arrays `before` are there.
        """
        jaxpr = self.streaming.jaxpr
        read = self._read(wanted)
        # In the order in which they were found. That of a set is another one in each process, and
        # processes have to run the same program.
        for var, total in self.totals.items():
            if var in read and var not in self.known:
                wholes = self.values(total.function.wholes)
                self.known[var] = total.run(self.streaming.inputs, wholes)
        copied = [var for var in self.on_host if var in read]
        arrays = picked(self.on_host, copied)
        if arrays and before:
            arrays, _ = lax.optimization_barrier((arrays, list(before)))
        on_device = dict(zip(copied, map(to_device, arrays), strict=True))
        values = made_of(jaxpr, wanted, {**self.known, **on_device})
        for atom, value in zip(wanted, values, strict=True):
            if not isinstance(atom, Literal):
                self.known.setdefault(atom, value)
        return values

    def _read(self, wanted: Sequence[Any]) -> set[Any]:
        """The inputs and totals of which some atoms are made, as far as these are not known."""
        # What is known is not made once more, and what a total leads to is read by that alone.
        stops = {*self.known, *self.totals}
        read = set(variables(wanted))
        read.update(inputs_of(behind(self.streaming.jaxpr, wanted, stops)))
        return read - self.known.keys()


def _depending(equations: Sequence[Any], by_rows: Sequence[Any]) -> list[Any]:
    """The equations whose results depend on rows, and those that spread a value over all rows."""
    dependent = set(by_rows)
    chosen = set()
    for number, equation in enumerate(equations):
        if not dependent.isdisjoint(variables(equation.invars)):
            chosen.add(number)
            dependent.update(equation.outvars)
    # A value that is spread would take as much memory outside of the loop as all rows.
    read: set[Any] = set()
    for equation in picked(equations, chosen):
        read.update(variables(equation.invars))
    for number, equation in enumerate(equations):
        is_spread = equation.primitive.name == "broadcast_in_dim"
        if is_spread and not read.isdisjoint(equation.outvars):
            chosen.add(number)
    return picked(equations, sorted(chosen))


def _choices(owner: Owner, size: int) -> list[tuple[int, int]]:
    """The dims along which an owner's arrays may be updated, with rows for an iteration.

    The first dims come first, but for those whose rows are too large. `size` is how many bytes the
    arrays have on each device.
    """
    choices = []
    for dim, parts in enumerate(owner.parts):
        if parts > 1:
            continue
        # Compilers for TPUs do not write to a part of the last dim of an array of the host.
        if dim == len(owner.shape) - 1:
            continue
        total = owner.shape[dim]
        most = BYTES_AT_A_TIME * total // max(1, size)
        multiple = 1
        if dim == len(owner.shape) - 2:
            multiple = _TILE
        count = _divisor(total, most, multiple)
        if count is not None:
            is_large = count > most and count * size > _LARGEST_ROW * total
            choices.append((is_large, dim, count))
    return [(dim, count) for _, dim, count in sorted(choices)]


def _divisor(total: int, most: int, multiple: int) -> int | None:
    """The largest divisor of a number of rows up to `most`, else the smallest one above it.

    It is a multiple of `multiple` and less than `total`; None where there is none.

    >>> _divisor(40, 12, 1), _divisor(4096, 100, 16), _divisor(40, 0, 1), _divisor(40, 8, 16)
    (10, 64, 1, None)
    """
    divisors = []
    # Divisors come in pairs, of which one is at most the square root.
    for number in range(1, math.isqrt(total) + 1):
        if total % number == 0:
            divisors += [number, total // number]
    fitting = {d for d in divisors if d % multiple == 0 and d < total}
    if not fitting:
        return None
    below = {d for d in fitting if d <= most}
    if below:
        return max(below)
    return min(fitting)
