"""What it costs a marked block not to keep an activation: the best choices of those to keep.

A block is traced with its derivative. What the backward pass reads is kept or computed again, and
what is computed again has inputs for which the same holds, down to what is kept and to the inputs
of the block:

    block     x --a--> name "gate" --b--> h --c--> y        the backward pass reads x, gate and h
    "gate" kept:     b runs again
    nothing kept:    a and b run again

For every size of memory the choice that computes the least again is an integer program: whether
each name is kept, and whether each equation runs again.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from scipy.optimize import Bounds, LinearConstraint, milp

from shardlib.layouts._checkpoint_policies import BESIDE, COMPRESSIBLE
from shardlib.tracing._block_places import Placed
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

# Of choices that compute the same again, the smaller one is better: the bytes of all names count as
# much as this share of all that could run again.
_TIE = 1e-5


@dataclass(frozen=True)
class Choice:
    """Activations that a block may keep, and what they come to.

    - `names`: those that are kept.
    - `size`: their bytes on one device.
    - `flops`: operations of products that run again in the backward pass.
    """

    names: tuple[str, ...]
    size: int
    flops: int


def choices_of(block: Any) -> list[Choice]:
    """The best choices of named activations for a marked block, smallest first.

    No other choice is both smaller and computes less again. The first keeps nothing.
    """
    costs = Costs.of(block)
    choices = []
    # From the largest down, since each choice says how small the next has to be.
    limit = costs.total_size
    while limit >= 0:
        choice = costs.best(limit)
        choices.append(choice)
        # The next choice has to be smaller, by a byte at least.
        limit = choice.size - 1
    return _undominated(choices[::-1])


def _undominated(choices: list[Choice]) -> list[Choice]:
    """The choices, smallest first, without those that compute no less again than a smaller one.

    >>> _undominated([Choice((), 0, 9), Choice(("a",), 4, 9), Choice(("b",), 8, 2)])
    [Choice(names=(), size=0, flops=9), Choice(names=('b',), size=8, flops=2)]
    """
    best: list[Choice] = []
    for choice in choices:
        if not best or choice.flops < best[-1].flops:
            best.append(choice)
    return best


@dataclass(frozen=True, eq=False)
class Costs:
    """A block whose backward pass is known, and what it would take to compute each value again."""

    jaxpr: Jaxpr  # the forward pass, and as its outputs what the backward pass reads
    again: list[Any]  # the equations that run again if nothing is kept
    flops: list[int]  # of each of these
    named: dict[Any, str]  # variables with names
    sizes: dict[str, int]  # bytes by name
    bytes_of: DeviceBytes

    @classmethod
    def of(cls, block: Any) -> "Costs":
        """The costs of a marked block: in its place in a loss, or an equation."""
        if isinstance(block, Placed):
            return cls.of_function(block.function, block.moving)
        return cls.of_function(open_jaxpr(block.params["jaxpr"]))

    @classmethod
    def of_function(cls, function: Jaxpr, moving: Sequence[bool] | None = None) -> "Costs":
        """The same of a traced function, of which some inputs have derivatives or all do."""
        jaxpr = _with_residuals(function, inputs_with_derivatives(function, moving)).jaxpr
        bytes_of = DeviceBytes(jaxpr)
        # Equations that only the results of the block need never run again.
        again = behind(jaxpr, jaxpr.outvars, jaxpr.invars)
        flops = [_flops(jaxpr, equation) for equation in again]
        named: dict[Any, str] = {}
        sizes: dict[str, int] = defaultdict(int)
        # A name of an input spares nothing: inputs are kept anyway.
        inputs = set(jaxpr.invars)
        for equation in again:
            if equation.primitive.name == COMPRESSIBLE and equation.invars[0] in inputs:
                inputs.update(equation.outvars)
            if equation.primitive.name == "name" and inputs.isdisjoint(variables(equation.invars)):
                (out,) = equation.outvars
                # What belongs to an activation is kept with it, and its bytes count with it.
                named[out] = equation.params["name"].removesuffix(BESIDE)
                sizes[named[out]] += bytes_of(out)
        return cls(jaxpr, again, flops, named, dict(sizes), bytes_of)

    @property
    def total_size(self) -> int:
        """The bytes of all names."""
        return sum(self.sizes.values())

    def best(self, limit: int) -> Choice:
        """The choice of at most so many bytes that computes the least again.

        The solver is to find the optimum itself, and to leave no gap: a block has few names, so
        that it can.
        """
        names = list(self.sizes)
        if not names:
            return Choice((), 0, sum(self.flops))
        sizes = np.array([self.sizes[name] for name in names], float)
        # Both terms are shares, so that the solver sees numbers of about one.
        unit = max(1, sum(self.flops))
        tie = _TIE / max(1, self.total_size)
        # First whether each name is kept, then whether each equation runs again.
        costs = np.concatenate([sizes * tie, np.array(self.flops, float) / unit])
        rows, needed = self._requirements(names)
        # Names alone take memory: what runs again is read at once, and is not kept.
        room = np.zeros((1, len(costs)))
        room[0, : len(names)] = sizes
        # Only names are whole numbers: with these given, equations run again or do not.
        solution = milp(
            costs,
            integrality=np.concatenate([np.ones(len(names)), np.zeros(len(self.again))]),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(rows, needed, np.inf),
                LinearConstraint(room, -np.inf, limit),
            ],
            options={"mip_rel_gap": 0.0},
        )
        # There is always a solution: to keep nothing, and to run everything again.
        assert solution.success, solution.message
        # The solver's whole numbers are floats, and only nearly whole.
        kept = {name for name, value in zip(names, solution.x, strict=False) if value > 0.5}
        return self.choice(kept)

    def choice(self, names: set[str]) -> Choice:
        """What it comes to if the activations of these names are kept."""
        kept = {var for var, name in self.named.items() if name in names}
        read, flops = self.without(kept)
        # What nothing reads is not kept, whatever its name is.
        used = {self.named[var] for var in kept & read}
        size = sum(self.bytes_of(var) for var in kept & read)
        return Choice(tuple(sorted(used)), size, flops)

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
                    row[len(names) + place] -= 1
                    rows.append(row)
                    needed.append(0.0)
        return np.array(rows), np.array(needed)

    def _providers(self, names: list[str]) -> dict[Any, np.ndarray]:
        """By each value that can run again, what can provide it, as a row of the program.

        Its columns are the names and then the equations: one for the equation that makes the value,
        and for the name by which it may be kept.
        """
        provided: dict[Any, np.ndarray] = {}
        for place, equation in enumerate(self.again):
            for var in equation.outvars:
                row = np.zeros(len(names) + len(self.again))
                row[len(names) + place] = 1
                if var in self.named:
                    row[names.index(self.named[var])] = 1
                provided[var] = row
        return provided


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
