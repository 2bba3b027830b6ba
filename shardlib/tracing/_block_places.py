"""Where a traced loss has marked blocks, and which of their inputs are activations.

    weights, keys, batch  ->  loop of 32 turns  ->  block(carry, weights of a layer, positions)
                                                          ^ own      no activation   shared

What a block gets is told apart by where it comes from:

- its *own*: it is made between the blocks, or carried from turn to turn. Kept, it takes memory for
  each block;
- *each*: it differs between turns, but it is there as a stack whether it is kept or not;
- *shared*: the same in all turns of a loop;
- *no activation*: it is made of weights alone.

And it *moves* if it depends on weights that are differentiated. Positions do not: what a derivative
with respect to them would read is not kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, Literal
from jax.sharding import AbstractMesh

from shardlib.layouts._checkpoint_policies import PolicyOfPart
from shardlib.tracing._jaxpr import every_equation, held_functions, is_block, open_jaxpr, scan_parts


class Origin(IntEnum):
    """Where an input of a block comes from, the least of it first.

    The order matters: a value that is made of several has the highest of their origins.
    """

    WEIGHTS = 0
    SHARED = 1
    EACH = 2
    OWN = 3


class Source(NamedTuple):
    """Where a value comes from, and whether it moves."""

    origin: Origin
    moves: bool


@dataclass(frozen=True, eq=False)
class Placed:
    """A marked block in a loss: its function, what it keeps, where its inputs come from, how often
    it is called, and the mesh that it was traced for, with the axes that are manual there.
    """

    function: Jaxpr
    policy: Any
    sources: tuple[Source, ...]
    times: int = 1
    mesh: AbstractMesh | None = None

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where its inputs come from."""
        return tuple(source.origin for source in self.sources)

    @property
    def moving(self) -> tuple[bool, ...]:
        """Which of its inputs move."""
        return tuple(source.moves for source in self.sources)

    @property
    def key(self) -> Any:
        """What is equal for blocks that keep and compute the same.

        Two traces of one function are different objects, and have the same text.
        """
        return str(self.function), self.sources


@dataclass(frozen=True)
class PlacedLoop:
    """Blocks that are called one after the other, so many times."""

    blocks: tuple[Placed, ...]
    times: int


@dataclass(frozen=True, eq=False)
class TracedLoss:
    """A loss as a step traces it, and the mesh, with the axes that are manual there."""

    jaxpr: Jaxpr
    mesh: AbstractMesh | None = None


def placed_blocks(loss: TracedLoss, weights: int) -> list[PlacedLoop]:
    """The marked blocks of a traced loss, by the loops that they are called in, in order.

    `weights` is how many of its first inputs are weights. A block that is called once is a loop of
    one turn.
    """
    return _Walk(_is_marked, loss.mesh).loops(loss.jaxpr, _of_loss(loss, weights))


def loops_with_parts(loss: TracedLoss, weights: int) -> list[PlacedLoop]:
    """The bodies of loops whose blocks drop some of their parts: each stands for its blocks.

    In such a trace a block itself has no mark, and only the parts have one.
    """
    walk = _Walk(_never, loss.mesh, of_bodies=True)
    return walk.loops(loss.jaxpr, _of_loss(loss, weights))


def _of_loss(loss: TracedLoss, weights: int) -> list[Source]:
    """Where the inputs of a loss come from."""
    others = len(loss.jaxpr.invars) - weights
    return [_WEIGHT] * weights + [_OTHER] * others


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
    - `mesh`: for which the loss was traced.
    - `of_bodies`: whether the body of a loop is a block, where it has parts that are dropped.
    - `in_loop`: whether it is in a loop; `seen`: what is some block's own already.
    """

    is_wanted: Callable[[Any], bool]
    mesh: AbstractMesh | None = None
    of_bodies: bool = False
    in_loop: bool = False
    seen: set[Any] = field(default_factory=set)

    def loops(self, jaxpr: Jaxpr, sources: Sequence[Source]) -> list[PlacedLoop]:
        """The blocks of a function whose inputs come from there."""
        known = dict(zip(jaxpr.invars, sources, strict=True))
        # What a loss closes over is keys and the like.
        known |= dict.fromkeys(jaxpr.constvars, _OTHER)
        loops: list[PlacedLoop] = []
        for equation in jaxpr.eqns:
            inputs = [_source(var, known) for var in equation.invars]
            # A function that is called could tell its results apart. Each is taken to come of all
            # inputs, which at worst counts a shared value as an activation.
            known |= dict.fromkeys(equation.outvars, _joined(inputs))
            if self.is_wanted(equation):
                loops.append(PlacedLoop((self._block(equation, inputs),), 1))
            elif equation.primitive.name == "scan":
                loops += self._of_scan(equation, inputs)
            else:
                loops += self._inside(equation, inputs)
        return loops

    def _block(self, equation: Any, inputs: list[Source]) -> Placed:
        """A marked block, an equation.

        Outside of loops there are no turns that could share anything: all that is not made of
        weights alone is its own.
        """
        own_from = Origin.OWN if self.in_loop else Origin.SHARED
        sources = []
        for var, source in zip(equation.invars, inputs, strict=True):
            if source.origin >= own_from:
                # What two blocks get is kept once.
                origin = Origin.EACH if var in self.seen else Origin.OWN
                source = Source(origin, source.moves)
                self.seen.add(var)
            sources.append(source)
        function = open_jaxpr(equation.params["jaxpr"])
        return Placed(function, equation.params["policy"], tuple(sources), mesh=self.mesh)

    def _of_scan(self, equation: Any, inputs: list[Source]) -> list[PlacedLoop]:
        """The blocks in the body of a loop.

        The body has variables of its own, so that it is noted anew which of them some block has.
        """
        body, length = open_jaxpr(equation.params["jaxpr"]), equation.params["length"]
        sources = _in_body(equation, inputs)
        inside = replace(self, in_loop=True, seen=set()).loops(body, sources)
        # Loops around that of the layers have the same parts in their bodies: the innermost counts.
        if not inside and self.of_bodies and any(parts_of(body)):
            return [PlacedLoop((Placed(body, None, tuple(sources), length, self.mesh),), length)]
        return _repeated(inside, length)

    def _inside(self, equation: Any, inputs: list[Source]) -> list[PlacedLoop]:
        """The blocks in what any other equation holds: what it calls, or its branches."""
        loops: list[PlacedLoop] = []
        for function in held_functions(equation):
            inner = open_jaxpr(function)
            # Some inputs, such as the number of a branch, come before those that are handed on.
            sources = inputs[len(inputs) - len(inner.invars) :]
            # What passes on other values than it gets does not tell which input is which.
            if len(inputs) < len(inner.invars):
                sources = [_joined([*inputs, _OTHER])] * len(inner.invars)
            loops += self.loops(inner, sources)
        return loops


_WEIGHT, _OTHER = Source(Origin.WEIGHTS, True), Source(Origin.SHARED, False)
_CONSTANT = Source(Origin.WEIGHTS, False)


def _source(var: Any, known: dict[Any, Source]) -> Source:
    if isinstance(var, Literal):
        return _CONSTANT
    return known.get(var, _OTHER)


def _joined(sources: Sequence[Source]) -> Source:
    """Where a value comes from that is made of others.

    >>> _joined([Source(Origin.EACH, False), _WEIGHT])
    Source(origin=<Origin.EACH: 2>, moves=True)
    """
    origin = max([source.origin for source in sources], default=Origin.WEIGHTS)
    return Source(origin, any(source.moves for source in sources))


def _in_body(equation: Any, inputs: list[Source]) -> list[Source]:
    """Where the inputs of a loop's body come from, of those of the loop.

    Constants are the same in all turns, carries are made anew in each of them, and of all else each
    turn gets a slice. A slice of weights is a weight.
    """
    constants, carries = scan_parts(equation)
    carried = constants + carries
    # One turn adds to a carry what any other input has.
    made = _joined(inputs)
    if made.origin > Origin.WEIGHTS:
        made = Source(Origin.OWN, made.moves)
    sources = []
    for place, source in enumerate(inputs):
        if place < constants:
            sources.append(Source(min(source.origin, Origin.SHARED), source.moves))
        elif place < carried:
            sources.append(made)
        elif source.origin > Origin.WEIGHTS:
            sources.append(Source(Origin.EACH, source.moves))
        else:
            sources.append(source)
    return sources


def _repeated(loops: list[PlacedLoop], times: int) -> list[PlacedLoop]:
    """The loops in the body of another one, as often as this calls them.

    Loops of one turn are blocks in a row, which then are one loop: its turns call all of them.
    """
    if loops and all(loop.times == 1 for loop in loops):
        blocks = [replace(block, times=times) for loop in loops for block in loop.blocks]
        return [PlacedLoop(tuple(blocks), times)]
    repeated = []
    for loop in loops:
        blocks = [replace(block, times=block.times * times) for block in loop.blocks]
        repeated.append(PlacedLoop(tuple(blocks), loop.times * times))
    return repeated
