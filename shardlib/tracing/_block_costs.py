"""What it costs a marked block not to keep an activation: the best choices of those to keep.

A block is traced with its derivative. What the backward pass reads is kept or computed again, and
what is computed again has inputs for which the same holds, down to what is kept and to the inputs
of the block:

    block     x --a--> name "gate" --b--> h --c--> y        the backward pass reads x, gate and h
    "gate" kept:     b runs again
    nothing kept:    a and b run again

For every size of memory the choice that computes the least again is an integer program: whether
each name is kept, on the device or in the memory of the host, and whether each equation runs again.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import AbstractMesh
from scipy.optimize import Bounds, LinearConstraint, milp

from shardlib.layouts._checkpoint_policies import BESIDE, COMPRESSIBLE
from shardlib.tracing._block_places import Origin, Placed
from shardlib.tracing._device_bytes import DeviceBytes
from shardlib.tracing._flops import flops_of
from shardlib.tracing._jaxpr import (
    JITS,
    behind,
    inlined,
    inputs_of,
    open_jaxpr,
    shapes_of,
    variables,
)
from shardlib.tracing._linearize import Partition
from shardlib.tracing._manual_axes import in_manual_axes

# Of choices that compute the same again, the one is better that copies less to the host, and then
# the smaller one: the bytes of all names count as much as these shares of all that could run again.
_TIE_ON_HOST, _TIE_ON_DEVICE = 1e-4, 1e-5
# What `scipy.optimize.milp` says where nothing meets all constraints.
_INFEASIBLE = 2


@dataclass(frozen=True)
class Choice:
    """Activations that a block may keep, and what they come to.

    - `names`: those that are kept on the device.
    - `size`: the bytes by which they are more than the block's inputs, on one device. It is below
      zero where the host has inputs and the device has little else.
    - `flops`: operations of products that run again in the backward pass.
    - `offloaded`: those that are kept in the memory of the host.
    - `host_size`: their bytes there, for one device.
    """

    names: tuple[str, ...]
    size: int
    flops: int
    offloaded: tuple[str, ...] = ()
    host_size: int = 0

    @property
    def costs(self) -> tuple[int, int]:
        """What it costs in time: first what is computed again, and then what is copied."""
        return self.flops, self.host_size


@dataclass(frozen=True)
class HostRoom:
    """What blocks may keep in the memory of the host.

    - `names`: the activations that may go there.
    - `bytes_per_flop`: how much is copied while a block computes one operation. What the host gets
      of a block is copied while the block runs, so that nothing waits for it.
    - `bytes_per_block`: what there is of it for each block on one device.

    Both figures are infinite where nobody knows them.
    """

    names: tuple[str, ...] = ()
    bytes_per_flop: float = math.inf
    bytes_per_block: float = math.inf


NO_HOST = HostRoom()


def choices_of(block: Any, host: HostRoom = NO_HOST) -> list[Choice]:
    """The best choices of named activations for a marked block, smallest first.

    No other choice is both smaller and cheaper. The first keeps the least on the device: nothing
    but inputs, or not even these if the host may have them.
    """
    return Costs.of(block, host).choices()


def _undominated(choices: list[Choice]) -> list[Choice]:
    """The choices, smallest first, without those that cost no less than a smaller one.

    >>> choices = [Choice((), 0, 9), Choice(("a",), 4, 9), Choice(("b",), 8, 2)]
    >>> [choice.names for choice in _undominated(choices)]
    [(), ('b',)]
    """
    best: list[Choice] = []
    for choice in choices:
        if not best or choice.costs < best[-1].costs:
            best.append(choice)
    return best


class _Sizes:
    """The bytes of names on one device, while the equations of a block are gone through.

    - `kept`: of each activation with all that belongs to it, as attention's log-sum-exps do to its
      result.
    - `beside`: of these, what stays on the device if the host has the activation.
    - `inputs`: of names of the block's own inputs, which are kept without a name.
    """

    def __init__(self) -> None:
        self.kept: dict[str, int] = defaultdict(int)
        self.beside: dict[str, int] = defaultdict(int)
        self.inputs: dict[str, int] = {}

    def add(self, name: str, size: int) -> None:
        """Add a value by its name in the trace."""
        activation = name.removesuffix(BESIDE)
        self.kept[activation] += size
        if activation != name:
            self.beside[activation] += size

    def on_host(self, name: str) -> int:
        """What goes to the host with a name."""
        if name in self.inputs:
            return self.inputs[name]
        return self.kept[name] - self.beside[name]


@dataclass(frozen=True, eq=False)
class Costs:
    """A block whose backward pass is known, and what it would take to compute each value again."""

    jaxpr: Jaxpr  # the forward pass, and as its outputs what the backward pass reads
    again: list[Any]  # the equations that run again if nothing is kept
    flops: list[int]  # of each of these
    named: dict[Any, str]  # variables with names
    bytes_by_name: _Sizes
    bytes_of: DeviceBytes
    may_leave: tuple[str, ...] = ()  # the names that the host may have
    host_room: float = math.inf  # bytes

    @classmethod
    def of(cls, block: Any, host: HostRoom = NO_HOST) -> "Costs":
        """The costs of a marked block: in its place in a loss, or an equation."""
        if not isinstance(block, Placed):
            return cls.of_function(open_jaxpr(block.params["jaxpr"]))
        own = [origin == Origin.OWN for origin in block.origins]
        return cls.of_function(block.function, block.moving, own, host, block.mesh)

    @classmethod
    def of_function(
        cls,
        function: Jaxpr,
        moving: Sequence[bool] | None = None,
        own: Sequence[bool] | None = None,
        host: HostRoom = NO_HOST,
        mesh: AbstractMesh | None = None,
    ) -> "Costs":
        """The same of a traced function.

        Args:
            function: the block.
            moving: which of its inputs have derivatives; all of them by default.
            own: which of its inputs each call of the block has for itself.
            host: what may be kept in the memory of the host.
            mesh: for which it was traced, with the axes that were manual there.
        """
        derived = inputs_with_derivatives(function, moving)
        jaxpr = in_manual_axes(mesh, lambda: _with_residuals(function, derived)).jaxpr
        bytes_of = DeviceBytes(jaxpr)
        # Equations that only the results of the block need never run again.
        again = behind(jaxpr, jaxpr.outvars, jaxpr.invars)
        flops = [_flops(jaxpr, equation) for equation in again]
        named: dict[Any, str] = {}
        sizes = _Sizes()
        # A name of an input spares nothing on the device, where inputs are kept anyway.
        inputs = _own_by_input(jaxpr, derived, own)
        for equation in again:
            if equation.primitive.name not in (COMPRESSIBLE, "name"):
                continue
            (out,) = equation.outvars
            # A constant that has a name is no variable, and no input.
            var = next(iter(variables(equation.invars)), None)
            if var in inputs:
                # A name changes nothing: what has the name of an input is that input.
                inputs[out] = inputs[var]
                if inputs[var] and equation.primitive.name == "name":
                    sizes.inputs[equation.params["name"]] = bytes_of(var)
            elif equation.primitive.name == "name":
                # What belongs to an activation is kept with it, and its bytes count with it.
                named[out] = equation.params["name"].removesuffix(BESIDE)
                sizes.add(equation.params["name"], bytes_of(out))
        may_leave = tuple(name for name in host.names if name in {*sizes.kept, *sizes.inputs})
        room = host.bytes_per_block
        if may_leave and host.bytes_per_flop < math.inf:
            copied_meanwhile = host.bytes_per_flop * flops_of(ClosedJaxpr(function, [])).total
            room = min(room, copied_meanwhile)
        return cls(jaxpr, again, flops, named, sizes, bytes_of, may_leave, room)

    @property
    def sizes(self) -> dict[str, int]:
        """The bytes of names on one device, but of those of inputs."""
        return self.bytes_by_name.kept

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of those of the block's inputs that each call has for itself."""
        return tuple(self.bytes_by_name.inputs)

    @property
    def total_size(self) -> int:
        """The bytes of all names."""
        return sum(self.sizes.values())

    def choices(self) -> list[Choice]:
        """The best choices, smallest first."""
        choices = []
        # From the largest down, since each choice says how small the next has to be.
        choice = self.best(self.total_size)
        while choice is not None:
            choices.append(choice)
            # The next choice has to be smaller, by a byte at least.
            choice = self.best(choice.size - 1)
        return _undominated(choices[::-1])

    def best(self, limit: int) -> Choice | None:
        """The cheapest choice of at most so many bytes; None if there is none."""
        if not self.sizes and not self.may_leave:
            return Choice((), 0, sum(self.flops)) if limit >= 0 else None
        # A solver takes numbers for whole that are nearly so, and of sums of large ones something
        # is left then: what it found may be larger by a little than it should.
        less = 0
        while True:
            choice = self._solved(limit - less)
            if choice is None or choice.size <= limit:
                return choice
            less = max(2 * less, choice.size - limit)

    def _solved(self, limit: int) -> Choice | None:
        """The cheapest choice of about so many bytes at most; None if there is none.

        The solver is to find the optimum itself, and to leave no gap: a block has few names, so
        that it can.
        """
        names = list(self.sizes)
        leaving = self.may_leave
        # Whether each name is kept on the device, whether the host has it, and whether each
        # equation runs again.
        binary = len(names) + len(leaving)
        count = binary + len(self.again)
        rows, needed = self._requirements(names)
        room, host_room = np.zeros(count), np.zeros(count)
        # Names alone take memory: what runs again is read at once, and is not kept.
        room[: len(names)] = [self.sizes[name] for name in names]
        for place, name in enumerate(leaving, len(names)):
            host_room[place] = self.bytes_by_name.on_host(name)
            room[place] = self._size_if_on_host(name)
        # All terms are shares, so that the solver sees numbers of about one.
        costs = np.zeros(count)
        costs[binary:] = np.array(self.flops, float) / max(1, sum(self.flops))
        costs += _TIE_ON_DEVICE * np.maximum(room, 0) / max(1, self.total_size)
        costs += _TIE_ON_HOST * host_room / max(1, host_room.sum())
        # In the largest unit of which all sizes are multiples.
        unit = math.gcd(*(int(size) for size in room)) or 1
        constraints = [
            LinearConstraint(room[None] / unit, -np.inf, limit // unit),
            LinearConstraint(host_room[None], -np.inf, self.host_room),
        ]
        if len(rows):
            constraints.append(LinearConstraint(rows, needed, np.inf))
        # Only names are whole numbers: with these given, equations run again or do not.
        solution = milp(
            costs,
            integrality=np.concatenate([np.ones(binary), np.zeros(len(self.again))]),
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )
        if solution.status == _INFEASIBLE:
            return None
        assert solution.success, solution.message
        # The solver's whole numbers are floats, and only nearly whole.
        chosen = solution.x > 0.5
        kept = {name for name, value in zip(names, chosen, strict=False) if value}
        on_host = {
            name for name, value in zip(leaving, chosen[len(names) :], strict=False) if value
        }
        return self.choice(kept - on_host, on_host)

    def _size_if_on_host(self, name: str) -> int:
        """What the device has of a name whose activation the host has, beside its inputs."""
        if name in self.bytes_by_name.inputs:
            return -self.bytes_by_name.inputs[name]
        return self.bytes_by_name.beside[name]

    def choice(self, names: Collection[str], on_host: Collection[str] = ()) -> Choice:
        """What it comes to if the activations of these names are kept."""
        either = {*names, *on_host}
        kept = {var for var, name in self.named.items() if name in either}
        read, flops = self.without(kept)
        # What nothing reads is not kept, whatever its name is.
        used = {self.named[var] for var in kept & read}
        size = sum(self.bytes_of(var) for var in kept & read)
        offloaded = [name for name in on_host if name in used or name in self.bytes_by_name.inputs]
        host_size = 0
        for name in offloaded:
            host_size += self.bytes_by_name.on_host(name)
            size -= self.bytes_by_name.on_host(name)
        on_device = sorted(used.difference(on_host))
        return Choice(tuple(on_device), size, flops, tuple(sorted(offloaded)), host_size)

    def without(self, kept: set[Any]) -> tuple[set[Any], int]:
        """Where only some values are kept: all that the backward pass reads and what is read to
        compute that again, and the operations of products that run again.
        """
        again = behind(self.jaxpr, self.jaxpr.outvars, {*self.jaxpr.invars, *kept})
        read = set(variables(self.jaxpr.outvars))
        for equation in again:
            read.update(variables(equation.invars))
        running = set(map(id, again))
        flops = 0
        for equation, cost in zip(self.again, self.flops, strict=True):
            if id(equation) in running:
                flops += cost
        return read, flops

    def _requirements(self, names: list[str]) -> tuple[Any, Any]:
        """One row for each value that has to be there, of what can provide it, and how much.

        What the backward pass reads is kept or runs again. What an equation that runs again reads
        is kept or runs again too.
        """
        provided = self._providers(names)
        first = len(names) + len(self.may_leave)
        rows, needed = [], []
        for var in dict.fromkeys(variables(self.jaxpr.outvars)):
            if var in provided:
                rows.append(provided[var])
                needed.append(1.0)
        for place, equation in enumerate(self.again):
            for var in dict.fromkeys(variables(equation.invars)):
                if var in provided:
                    # Zero is needed of what provides it, less one if this equation runs again.
                    row = provided[var].copy()
                    row[first + place] -= 1
                    rows.append(row)
                    needed.append(0.0)
        return np.array(rows), np.array(needed)

    def _providers(self, names: list[str]) -> dict[Any, np.ndarray]:
        """By each value that can run again, what can provide it, as a row of the program.

        Its columns are the names, those that the host may have, and then the equations: one for
        the equation that makes the value, and for the name by which it may be kept.
        """
        first = len(names) + len(self.may_leave)
        provided: dict[Any, np.ndarray] = {}
        for place, equation in enumerate(self.again):
            for var in equation.outvars:
                row = np.zeros(first + len(self.again))
                row[first + place] = 1
                name = self.named.get(var)
                if name is not None:
                    row[names.index(name)] = 1
                if name in self.may_leave:
                    row[len(names) + self.may_leave.index(name)] = 1
                provided[var] = row
        return provided


def _own_by_input(jaxpr: Jaxpr, derived: Partition, own: Sequence[bool] | None) -> dict[Any, bool]:
    """By input of the function with its derivative, whether each call of the block has its own.

    Where it is not known which inputs are, none counts as one.
    """
    if own is None:
        return dict.fromkeys(jaxpr.invars, False)
    # What has a derivative comes first there.
    floats, others = derived.split(own)
    return dict(zip(jaxpr.invars, [*floats, *others], strict=True))


def inputs_with_derivatives(function: Jaxpr, moving: Sequence[bool] | None = None) -> Partition:
    """Which inputs of a function its derivative is taken by: those that move and are floats."""
    floats = Partition.by_dtype(function.invars).is_float
    if moving is None:
        return Partition(floats)
    return Partition(tuple(a and b for a, b in zip(floats, moving, strict=True)))


def _with_residuals(jaxpr: Jaxpr, partition: Partition) -> ClosedJaxpr:
    """The forward pass of a block, which returns all that its backward pass reads.

    JAX keeps these in the function that `jax.vjp` returns, of which they are the leaves.
    """
    function = jaxpr_as_fun(ClosedJaxpr(jaxpr, []))

    def residuals(floats: list[Any], others: list[Any]) -> list[Any]:
        def call(floats: list[Any]) -> list[Any]:
            results = function(*partition.merge(floats, others))
            return Partition.by_dtype(results).split(results)[0]

        _, backward = jax.vjp(call, floats)
        return jax.tree.leaves(backward)

    traced = jax.make_jaxpr(residuals)(*partition.split(shapes_of(jaxpr.invars)))
    return inlined(traced, lambda equation: equation.primitive.name in JITS)


def _flops(jaxpr: Jaxpr, equation: Any) -> int:
    """The operations of products in an equation.

    The equation becomes a function of its own, since functions are what is counted, with the loops
    and calls in them.
    """
    inputs = inputs_of([equation])
    alone = jaxpr.replace(
        constvars=[],
        invars=inputs,
        outvars=list(equation.outvars),
        eqns=[equation],
        effects=equation.effects,
    )
    return flops_of(ClosedJaxpr(alone, [])).total
