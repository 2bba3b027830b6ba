"""Where a traced loss has marked blocks, and which of their inputs are activations.

    weights, keys, batch  ->  loop of 32 turns  ->  block(carry, weights of a layer, positions)
                                                          ^ own      no activation   shared

What a block gets is told apart by where it comes from:

- its *own*: it is made between the blocks, or carried from turn to turn. Kept, it takes memory for
  each block;
- *each*: it differs between turns, but it is there as a stack whether it is kept or not;
- *shared*: the same in all turns of a loop;
- *no activation*: it is made of weights alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from jax.extend.core import Jaxpr, Literal

from shardlib.layouts._remat_policy import PolicyOfPart
from shardlib.tracing._jaxpr import every_equation, held_functions, is_block, open_jaxpr, scan_parts


class Origin(IntEnum):
    """Where an input of a block comes from, the least of it first."""

    WEIGHTS = 0
    SHARED = 1
    EACH = 2
    OWN = 3


@dataclass(frozen=True, eq=False)
class Placed:
    """A marked block in a loss: its function, what it keeps, where its inputs come from, and how
    often it is called.
    """

    function: Jaxpr
    policy: Any
    origins: tuple[Origin, ...]
    times: int = 1


@dataclass(frozen=True)
class PlacedLoop:
    """Blocks that are called one after the other, so many times."""

    blocks: tuple[Placed, ...]
    times: int


def placed_blocks(loss: Jaxpr, weights: int) -> list[PlacedLoop]:
    """The marked blocks of a traced loss, by the loops that they are called in, in order.

    `weights` is how many of its first inputs are weights. A block that is called once is a loop of
    one turn.
    """
    origins = [Origin.SHARED] * len(loss.invars)
    origins[:weights] = [Origin.WEIGHTS] * weights
    return _Walk(_is_marked).loops(loss, origins)


def loops_with_parts(loss: Jaxpr, weights: int) -> list[PlacedLoop]:
    """The bodies of loops whose blocks drop some of their parts: each stands for its blocks."""
    origins = [Origin.SHARED] * len(loss.invars)
    origins[:weights] = [Origin.WEIGHTS] * weights
    return _Walk(_never, of_bodies=True).loops(loss, origins)


def _is_marked(equation: Any) -> bool:
    return is_block(equation) and not isinstance(equation.params["policy"], PolicyOfPart)


def _never(_: Any) -> bool:
    return False


def parts_of(function: Jaxpr) -> Iterator[tuple[str, Jaxpr]]:
    """The parts of a block that are computed again by themselves, with their names."""
    for equation in every_equation(function):
        if is_block(equation) and isinstance(equation.params["policy"], PolicyOfPart):
            yield equation.params["policy"].part, open_jaxpr(equation.params["jaxpr"])


@dataclass(frozen=True)
class _Walk:
    """A walk through a loss.

    - `is_wanted`: which equations are blocks.
    - `of_bodies`: whether the body of a loop is a block, where it has parts that are dropped.
    - `in_loop`: whether it is in a loop; `seen`: what is some block's own already.
    """

    is_wanted: Callable[[Any], bool]
    of_bodies: bool = False
    in_loop: bool = False
    seen: set[Any] = field(default_factory=set)

    def loops(self, jaxpr: Jaxpr, origins: Sequence[Origin]) -> list[PlacedLoop]:
        """The blocks of a function whose inputs come from there."""
        known = dict(zip(jaxpr.invars, origins, strict=True))
        # What a loss closes over is keys and the like.
        known |= dict.fromkeys(jaxpr.constvars, Origin.SHARED)
        loops: list[PlacedLoop] = []
        for equation in jaxpr.eqns:
            inputs = [_origin(var, known) for var in equation.invars]
            known |= dict.fromkeys(equation.outvars, max(inputs, default=Origin.WEIGHTS))
            if self.is_wanted(equation):
                loops.append(PlacedLoop((self._block(equation, inputs),), 1))
            elif equation.primitive.name == "scan":
                loops += self._of_scan(equation, inputs)
            else:
                loops += self._inside(equation, inputs)
        return loops

    def _block(self, equation: Any, inputs: list[Origin]) -> Placed:
        """A marked block, an equation."""
        own_from = Origin.OWN if self.in_loop else Origin.SHARED
        origins = []
        for var, origin in zip(equation.invars, inputs, strict=True):
            if origin >= own_from:
                # What two blocks get is kept once.
                origin = Origin.EACH if var in self.seen else Origin.OWN
                self.seen.add(var)
            origins.append(origin)
        function = open_jaxpr(equation.params["jaxpr"])
        return Placed(function, equation.params["policy"], tuple(origins))

    def _of_scan(self, equation: Any, inputs: list[Origin]) -> list[PlacedLoop]:
        """The blocks in the body of a loop."""
        body, length = open_jaxpr(equation.params["jaxpr"]), equation.params["length"]
        origins = _in_body(equation, inputs)
        inside = replace(self, in_loop=True, seen=set()).loops(body, origins)
        if not inside and self.of_bodies and any(parts_of(body)):
            return [PlacedLoop((Placed(body, None, tuple(origins), length),), length)]
        return _repeated(inside, length)

    def _inside(self, equation: Any, inputs: list[Origin]) -> list[PlacedLoop]:
        """The blocks in what any other equation holds: what it calls, or its branches."""
        loops: list[PlacedLoop] = []
        for function in held_functions(equation):
            inner = open_jaxpr(function)
            # Some inputs, such as the number of a branch, come before those that are handed on.
            origins = inputs[len(inputs) - len(inner.invars) :]
            if len(inputs) < len(inner.invars):
                origins = [max(inputs, default=Origin.SHARED)] * len(inner.invars)
            loops += self.loops(inner, origins)
        return loops


def _origin(var: Any, known: dict[Any, Origin]) -> Origin:
    if isinstance(var, Literal):
        return Origin.WEIGHTS
    return known.get(var, Origin.SHARED)


def _in_body(equation: Any, inputs: list[Origin]) -> list[Origin]:
    """Where the inputs of a loop's body come from, of those of the loop."""
    constants, carries = scan_parts(equation)
    carried = constants + carries
    origins = []
    for place, origin in enumerate(inputs):
        if place < constants:
            origins.append(min(origin, Origin.SHARED))
        elif place < carried:
            # One turn adds to it what any other input has.
            moves = any(one > Origin.WEIGHTS for one in inputs)
            origins.append(Origin.OWN if moves else Origin.WEIGHTS)
        else:
            origins.append(Origin.EACH if origin > Origin.WEIGHTS else origin)
    return origins


def _repeated(loops: list[PlacedLoop], times: int) -> list[PlacedLoop]:
    """The loops in the body of another one, as often as this calls them."""
    if loops and all(loop.times == 1 for loop in loops):
        blocks = [replace(block, times=times) for loop in loops for block in loop.blocks]
        return [PlacedLoop(tuple(blocks), times)]
    repeated = []
    for loop in loops:
        blocks = [replace(block, times=block.times * times) for block in loop.blocks]
        repeated.append(PlacedLoop(tuple(blocks), loop.times * times))
    return repeated
