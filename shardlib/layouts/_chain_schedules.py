"""Which inputs of a chain of layers are kept for its backward pass, and what is computed again.

A chain of `n` layers in a loop has the states x[0], ..., x[n], and layer `k` makes x[k + 1] of
x[k]. To differentiate layer `k` takes x[k]. A schedule keeps few states, in slots, and advances
from them once more:

    forward     x0 -> x1 -> x2 -> x3 -> x4 -> x5 -> x6         slots: x0, x3; at hand: x5
    backward    differentiate 5
                x3 -> x4                                       differentiate 4, 3
                x0 -> x1 -> x2                                 differentiate 2, ...

It is a table: first what the forward pass keeps, then the actions of the backward pass.

- A slot holds a state until it is read no more. The chain's input x[0] is in a slot, too.
- One more state is *at hand*: the one that was made last. When the forward pass ends it is the
  input of the last layer.
- To differentiate a layer evaluates it once more, which every schedule does, and which is not
  counted: `evaluations` are those that the backward pass needs to get there.

There are two kinds of tables. `Every(k)` has slots for the input of every k-th layer, and while
the layers between two of them are differentiated for theirs too. `Binomial(slots)` takes as few
evaluations as any table does with so many slots: Griewank's `revolve`, a divide and conquer.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple, TypeAlias

AT_HAND = 0
"""The place of the state that was made last. Slots are the places 1, 2, ..."""


class Advance(NamedTuple):
    """Evaluate a layer on the state in the place `source`, and put what it makes in `target`."""

    layer: int
    source: int
    target: int


class Differentiate(NamedTuple):
    """Differentiate a layer at its input, which is the state in the place `source`."""

    layer: int
    source: int


Action: TypeAlias = Advance | Differentiate


@dataclass(frozen=True)
class ChainTable:
    """What the forward pass of a chain keeps, and what its backward pass does.

    - `layers`: how many there are.
    - `kept`: the layers whose inputs the forward pass puts into the slots 1, 2, ..., in order. The
      input of every other layer is at hand until the next one's is.
    - `actions`: those of the backward pass, in order.

    A table that reads a state which is not there, or differentiates in another order, is refused.

    >>> ChainTable(2, (0,), (Differentiate(1, AT_HAND), Differentiate(0, 1))).evaluations
    0
    """

    layers: int
    kept: tuple[int, ...]
    actions: tuple[Action, ...]

    def __post_init__(self) -> None:
        self._check_kept()
        to_differentiate = self.layers - 1
        for number, (action, places) in enumerate(self._simulated()):
            if places.get(action.source) != action.layer:
                raise ValueError(
                    f"Action {number} of a chain reads the input of layer {action.layer} in place "
                    f"{action.source}, which holds {places.get(action.source, 'nothing')}."
                )
            if isinstance(action, Differentiate):
                if action.layer != to_differentiate:
                    raise ValueError(
                        f"Action {number} of a chain differentiates layer {action.layer} where "
                        f"layer {to_differentiate} is next."
                    )
                to_differentiate -= 1
        if to_differentiate >= 0:
            raise ValueError(f"A chain of {self.layers} layers ends before {to_differentiate}.")

    def _check_kept(self) -> None:
        """Refuse inputs that are not kept in the order of layers, or without the chain's own."""
        in_order = tuple(sorted(set(self.kept)))
        if self.kept[:1] != (0,) or in_order != self.kept or self.kept[-1] >= self.layers:
            raise ValueError(
                f"A chain of {self.layers} layers keeps the inputs of {self.kept}; these are "
                "layers in order, and the first is 0."
            )

    def _simulated(self) -> Iterator[tuple[Action, dict[int, int]]]:
        """Each action, and which layer's input is in each place when it starts."""
        # As the forward pass leaves them: slots are counted from one, and the state that was made
        # last is at hand, unless a slot has it.
        places = dict(enumerate(self.kept, 1))
        if self.kept[-1] != self.layers - 1:
            places[AT_HAND] = self.layers - 1
        for action in self.actions:
            # A copy, since whoever reads it may do so after the next action.
            yield action, dict(places)
            if isinstance(action, Advance):
                places[action.target] = action.layer + 1

    @property
    def evaluations(self) -> int:
        """How many layers the backward pass evaluates besides those that it differentiates.

        The forward pass has evaluated each once, and to differentiate one evaluates it, too.
        """
        return sum(isinstance(action, Advance) for action in self.actions)

    @cached_property
    def slots(self) -> int:
        """How many slots hold states that are still read, at most at a time.

        That is found by simulation, backwards: a slot is in use between a write and its last read.
        """
        in_use: set[int] = set()
        most = 0
        # Whether a state is still read is known only from what comes after.
        for action in reversed(self.actions):
            if isinstance(action, Advance):
                in_use.discard(action.target)
            in_use.add(action.source)
            most = max(most, len(in_use - {AT_HAND}))
        return most

    @property
    def places_of_inputs(self) -> tuple[int, ...]:
        """For each layer the place into which the forward pass puts its input."""
        slots = {layer: slot for slot, layer in enumerate(self.kept, 1)}
        return tuple(slots.get(layer, AT_HAND) for layer in range(self.layers))

    @property
    def places(self) -> int:
        """How many places there are: that at hand, and all slots."""
        # The backward pass may use slots that the forward pass leaves empty.
        last = len(self.kept)
        for action in self.actions:
            if isinstance(action, Advance):
                last = max(last, action.target)
        return last + 1


@dataclass(frozen=True)
class Every:
    """Keep the input of every `layers`-th layer, None for the square root of how many there are.

    Layers between two of them make a segment. While one is differentiated, the inputs of its own
    layers are kept as well, so that each layer is evaluated at most once besides.

    >>> table = Every(None).table(16)
    >>> table.kept, table.evaluations, table.slots
    ((0, 4, 8, 12), 11, 5)
    """

    layers: int | None

    def table(self, layers: int) -> ChainTable:
        """The table for a chain of so many layers."""
        return _every_table(layers, self.layers or math.isqrt(layers - 1) + 1)


@dataclass(frozen=True)
class Binomial:
    """Keep states in so many slots, and evaluate as few layers in the backward pass as can be.

    The slots include that of the chain's input. With `t` the smallest number for which
    C(slots + t, t) >= n, all passes together evaluate t n - C(slots + t, t - 1) layers before they
    differentiate them, of which the forward pass has done n - 1.

    >>> table = Binomial(3).table(16)
    >>> table.kept, table.evaluations, table.slots
    ((0, 10, 13), 18, 3)
    """

    slots: int

    def table(self, layers: int) -> ChainTable:
        """The table for a chain of so many layers."""
        return _binomial_table(layers, self.slots)


Chain: TypeAlias = Every | Binomial


@cache
def _every_table(layers: int, segment: int) -> ChainTable:
    """A table of segments of so many layers each; the last one may have fewer."""
    kept = tuple(range(0, layers, segment))
    actions: list[Action] = []
    at_hand = layers - 1
    # The backward pass goes through the last segment first.
    for number in reversed(range(len(kept))):
        first, behind = kept[number], min(kept[number] + segment, layers)
        source = {first: number + 1}
        # The forward pass has left one state at hand, unless it is in a slot.
        if behind == layers and at_hand > first:
            behind -= 1
            actions.append(Differentiate(behind, AT_HAND))
        # Slots of later segments are free by now. The last state of a segment stays at hand.
        for offset, layer in enumerate(range(first, behind - 1)):
            target = number + 2 + offset
            if layer + 1 == behind - 1:
                target = AT_HAND
            actions.append(Advance(layer, source[layer], target))
            source[layer + 1] = target
        for layer in reversed(range(first, behind)):
            actions.append(Differentiate(layer, source[layer]))
    return ChainTable(layers, kept, tuple(actions))


@cache
def _binomial_table(layers: int, slots: int) -> ChainTable:
    """The table of `revolve`, whose first advances are those of the forward pass."""
    kept = [0]
    # The forward pass goes to the input of the last layer, and keeps a state at each division.
    while len(kept) < slots and layers - kept[-1] > 1:
        first = kept[-1] + _division(layers - kept[-1], slots - len(kept) + 1)
        # The input of the last layer is at hand when the forward pass ends, and needs no slot.
        if first == layers - 1:
            break
        kept.append(first)
    actions: list[Action] = []
    behind, at_hand = layers, kept[-1] != layers - 1
    for number in reversed(range(len(kept))):
        if at_hand:
            behind -= 1
            actions.append(Differentiate(behind, AT_HAND))
            at_hand = False
        _reverse(kept[number], behind, number + 1, slots, actions)
        behind = kept[number]
    return ChainTable(layers, tuple(kept), tuple(actions))


def _reverse(first: int, behind: int, slot: int, slots: int, actions: list[Action]) -> None:
    """Differentiate the layers from `first` on, those before `behind`, the last one first.

    The input of the first is in `slot`, and all slots after that are free.
    """
    while behind - first > 1:
        middle = first + _division(behind - first, slots - slot + 1)
        last_alone = middle == behind - 1
        target = AT_HAND if last_alone else slot + 1
        source = slot
        for layer in range(first, middle):
            # On the way, states that nothing goes back to are at hand only.
            place = target if layer + 1 == middle else AT_HAND
            actions.append(Advance(layer, source, place))
            source = place
        # Its input was made last, so that it is at hand.
        if last_alone:
            actions.append(Differentiate(middle, AT_HAND))
        else:
            _reverse(middle, behind, slot + 1, slots, actions)
        behind = middle
    if behind > first:
        actions.append(Differentiate(first, slot))


def _division(layers: int, slots: int) -> int:
    """How far to advance into some layers, two or more, before the next state is kept.

    What follows has one slot less. With `t` repetitions, both parts are within what their slots
    can do with `t`, and the first one with `t - 1`: it has been advanced through once already.
    """
    repetitions = _repetitions(layers, slots)
    most = math.comb(slots + repetitions - 1, repetitions - 1)
    # What is left is no less than the slots that are left do with fewer repetitions.
    return min(most, layers - math.comb(slots + repetitions - 2, repetitions - 1))


def _repetitions(layers: int, slots: int) -> int:
    """How often a layer is evaluated at most, the smallest `t` with C(slots + t, t) >= layers."""
    repetitions = 0
    while math.comb(slots + repetitions, repetitions) < layers:
        repetitions += 1
    return repetitions


def least_evaluations(layers: int, slots: int) -> int:
    """The closed formula for the fewest evaluations of a backward pass with so many slots.

    >>> least_evaluations(16, 3), least_evaluations(16, 1), least_evaluations(16, 16)
    (18, 105, 0)
    """
    t = _repetitions(layers, slots)
    total = t * layers
    if t:
        total -= math.comb(slots + t, t - 1)
    return total - (layers - 1)
