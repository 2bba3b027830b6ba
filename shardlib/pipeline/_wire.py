"""How the arrays that travel through different loops share places on the wire and in buffers.

The program of a pipeline is one for all stages, so that in each tick every stage sends a list of
arrays of the same shapes, whichever loop its part belongs to. Arrays of different loops that have
the same shape and dtype share a place in this list; places that a loop does not use are sent as
zeros.

    loop 0 travels   f32[4,8]  i32[4]                 places of loop 0:  0 1
    loop 1 travels   f32[4,8]          f32[4,16]      places of loop 1:  0   2
    on the wire      f32[4,8]  i32[4]  f32[4,16]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from shardlib.pipeline._loop import Arrays, Loop, Shapes
from shardlib.tracing._jaxpr import picked


@dataclass(frozen=True, eq=False)
class Wire:
    """The list of arrays that is sent from part to part, and the places in it of each loop.

    Forward, all of `shapes` is sent. Backward, gradients of the differentiable ones are, in the
    same order.
    """

    shapes: Shapes
    places: list[list[int]]

    @cached_property
    def gradient_shapes(self) -> Shapes:
        """What is sent backward: the shapes and dtypes of those arrays that have gradients."""
        return picked(self.shapes, self._differentiable)

    @cached_property
    def _differentiable(self) -> list[int]:
        """The places whose arrays have gradients, which are sent backward, in order."""
        places = []
        for place, shape in enumerate(self.shapes):
            if jnp.issubdtype(shape.dtype, jnp.inexact):
                places.append(place)
        return places

    def _places_of(self, loop: int, backward: bool) -> list[int]:
        """Where the arrays of a loop are in what is sent in a direction."""
        if not backward:
            return self.places[loop]
        # Backward, places are counted among those that are sent that way.
        sent_places = self._differentiable
        return [sent_places.index(k) for k in self.places[loop] if k in sent_places]

    def packed(self, loop: int, arrays: Arrays, *, backward: bool = False) -> Arrays:
        """What travels through a loop, or its gradients, as the list that is sent.

        Places of other loops are filled with zeros.
        """
        # The arrays of the loop by their places on the wire.
        array_at = dict(zip(self._places_of(loop, backward), arrays, strict=True))
        shapes = self.shapes
        if backward:
            shapes = self.gradient_shapes
        sent = []
        for place, shape in enumerate(shapes):
            if place in array_at:
                sent.append(array_at[place])
            else:
                sent.append(jnp.zeros(shape.shape, shape.dtype))
        return sent

    def unpacked(self, loop: int, sent: Arrays, *, backward: bool = False) -> Arrays:
        """What travels through a loop, or its gradients, taken out of the list that was sent."""
        return picked(sent, self._places_of(loop, backward))


def wire_of(loops: Sequence[Loop]) -> Wire:
    """Lay the arrays that travel through some loops on one wire.

    Each array takes the first place of its shape and dtype that its own loop has not taken yet, or
    a new one at the end.
    """
    shapes: Shapes = []
    places: list[list[int]] = []
    for cut_loop in loops:
        # A loop uses each place once: two arrays of one shape that it sends have two places.
        free = list(range(len(shapes)))
        places_of_loop = []
        for shape in cut_loop.travelling:
            place = _first_alike(shape, shapes, free)
            if place is None:
                place = len(shapes)
                shapes.append(shape)
            else:
                free.remove(place)
            places_of_loop.append(place)
        places.append(places_of_loop)
    return Wire(shapes, places)


def _first_alike(shape: Any, shapes: Shapes, free: Sequence[int]) -> int | None:
    """The first of the free places whose array has this shape and dtype."""
    for place in free:
        if (shapes[place].shape, shapes[place].dtype) == (shape.shape, shape.dtype):
            return place
    return None
