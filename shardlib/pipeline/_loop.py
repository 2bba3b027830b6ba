"""One loop over layers in a traced loss: what goes in and out, and one layer of it as a
function.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from shardlib.tracing._jaxpr import behind, inlined, inputs_of, made_of, scan_parts, variables

Arrays = list[Any]
Shapes = list[jax.ShapeDtypeStruct]


@dataclass(frozen=True, eq=False)
class Loop:
    """One loop over layers.

    What *travels* from part to part is a list of arrays: what goes from layer to layer, then what
    travels along, then what only passes by, for later; then what the layers tell besides, stacked,
    of which each part fills in its own.
    """

    equation: Any
    weights: tuple[int, ...]  # for each stacked weight, which input of the body it is
    stacked: tuple[int, ...]  # and which of all weights
    along: tuple[int, ...]  # the constants that travel along
    moved: tuple[int, ...]  # those made of weights alone, trained ones among them
    still: tuple[int, ...]  # those made of frozen weights alone
    apart: tuple[int, ...]  # the outputs besides that are made of examples alone
    told: tuple[int, ...]  # the other outputs besides that somebody reads
    passing: tuple[Any, ...]  # outputs of earlier loops that pass by

    @property
    def layers(self) -> int:
        """How often it goes round."""
        return self.equation.params["length"]

    @cached_property
    def parts(self) -> tuple[int, int]:
        """How many constants and how many carries there are."""
        return scan_parts(self.equation)

    @cached_property
    def entering(self) -> list[Any]:
        """What is made to enter it: what goes from layer to layer, and what travels along."""
        constants, carries = self.parts
        inputs = self.equation.invars
        return [*inputs[constants : constants + carries], *[inputs[k] for k in self.along]]

    @cached_property
    def same(self) -> list[int]:
        """Of its inputs, what is the same for all layers and made of examples alone."""
        return [k for k in range(self.parts[0]) if k not in (*self.along, *self.moved, *self.still)]

    @cached_property
    def plain(self) -> list[int]:
        """What is taken layer by layer and made of examples alone."""
        return [
            k for k in range(sum(self.parts), len(self.equation.invars)) if k not in self.weights
        ]

    @cached_property
    def leaving(self) -> list[Any]:
        """Under which names what travels is known after the last part, where it is."""
        outputs = self.equation.outvars
        return [
            *outputs[: self.parts[1]],
            *[None] * len(self.along),
            *self.passing,
            *[outputs[k] for k in self.told],
        ]

    @cached_property
    def travelling(self) -> Shapes:
        """What travels."""
        atoms = [*self.entering, *self.passing, *[self.equation.outvars[k] for k in self.told]]
        return [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]

    @cached_property
    def smooth(self) -> list[bool]:
        """What of it has derivatives."""
        return [jnp.issubdtype(one.dtype, jnp.inexact) for one in self.travelling]

    @cached_property
    def layer(self) -> ClosedJaxpr:
        """One layer as a function: what enters that has derivatives, what else does; what is made
        of trained weights; the layer's weights, trained ones first; what is made of frozen ones;
        what is the same for all layers, and of what is stacked the layer's. What comes out is what
        enters the next, in order, and what the layer tells besides.
        """
        constants, carries = self.parts
        body = self.equation.params["jaxpr"]
        moving = [*range(constants, constants + carries), *self.along]
        floats = [k for k, smooth in zip(moving, self.smooth, strict=False) if smooth]
        others = [k for k, smooth in zip(moving, self.smooth, strict=False) if not smooth]
        order = [*floats, *others, *self.moved, *self.weights, *self.still, *self.same, *self.plain]

        def layer(*given: Any) -> Arrays:
            now = dict(zip(order, given, strict=True))
            results = jaxpr_as_fun(body)(*[now[k] for k in range(len(body.jaxpr.invars))])
            return [
                *results[:carries],
                *[now[k] for k in self.along],
                *[results[k] for k in self.told],
            ]

        avals = [body.jaxpr.invars[k].aval for k in order]
        return jax.make_jaxpr(layer)(
            *[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        )


def aside(loop: Loop, same: Arrays, plain: Arrays) -> Arrays:
    """What a loop makes of examples alone, without its layers."""
    body = body_of(loop.equation)
    names = [body.jaxpr.invars[k] for k in (*loop.same, *loop.plain)]
    wanted = [body.jaxpr.outvars[k] for k in loop.apart]

    def layer(_: None, of_layer: Arrays) -> tuple[None, Arrays]:
        values = dict(zip(body.jaxpr.constvars, body.consts, strict=True))
        return None, made_of(
            body.jaxpr, wanted, values | dict(zip(names, [*same, *of_layer], strict=True))
        )

    return lax.scan(layer, None, plain, length=loop.layers)[1]


def body_of(equation: Any) -> ClosedJaxpr:
    """The body of a loop, calls taken apart, so that what a value is made of can be followed."""
    return inlined(equation.params["jaxpr"], lambda _: True)


def outputs_behind(
    jaxpr: Jaxpr, wanted: Sequence[Any], loops: Sequence[Loop]
) -> list[tuple[int, Any]]:
    """Which outputs of loops, each with the number of its loop, `wanted` is made of, but for those
    made of examples alone.
    """
    of = {v: k for k, loop in enumerate(loops) for v in loop.equation.outvars}
    own = {loop.equation.outvars[k] for loop in loops for k in loop.apart}
    equations = behind(jaxpr, wanted, of)
    read = dict.fromkeys([*inputs_of(equations), *variables(wanted)])
    return [(of[v], v) for v in read if v in of and v not in own]
