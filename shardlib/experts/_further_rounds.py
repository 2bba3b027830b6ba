"""Rounds after the first one: a loop that is run as often as it takes, with a derivative.

JAX has no reverse mode for a loop whose length is known to the running program alone. Here the
backward pass is a loop as well, which computes each round again and differentiates it:

    forward     y = sum of output(k, operands)                  k = 1 ... rounds - 1
    backward    gradients += of output(k, operands) by y's      starting from those of round 0

Between rounds nothing is kept but the sums. Where the weights are gathered for the layer, and their
gradients scattered, a sum is of scattered gradients: `tracing/_reduced_sums` tells the loop how.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardlib.compiled._source_lines import IF_UNEVEN
from shardlib.kernels._shards import as_varying, varying
from shardlib.layouts._checkpoint_policies import SAME_RESULT
from shardlib.tracing._jaxpr import evaluate
from shardlib.tracing._reduced_sums import Reduction, SumsGradients


class Operands(NamedTuple):
    """What a round's output is differentiated by.

    - `x`: the tokens.
    - `weights`: of the experts.
    - `choice_weight`: by what the outputs of a token's experts are multiplied.
    """

    x: jax.Array
    weights: Any
    choice_weight: jax.Array


class Rounds(Protocol):
    """The output of one round, by its number."""

    def output(self, experts: Any, number: jax.Array, plan: Any, operands: Operands) -> jax.Array:
        """What a function of experts makes of the rows of one round, for each token."""
        ...


class Captured(NamedTuple):
    """A function that reads nothing but its arguments, and the arrays that it used to read."""

    function: Callable[..., Any]
    arrays: tuple[Any, ...]


def without_captures(function: Callable[..., Any], *shapes: Any) -> Captured:
    """A function of arrays, as one that also takes all arrays that it reads from elsewhere.

    The loop is differentiated after its function was traced, when such arrays are gone.
    """
    traced, shape = jax.make_jaxpr(function, return_shape=True)(*shapes)
    tree = jax.tree.structure(shape)
    return Captured(_Converted(traced.jaxpr, tree), tuple(traced.consts))


@dataclass(frozen=True, eq=False)
class _Converted:
    """A traced function, whose first argument is the arrays that it reads from elsewhere."""

    jaxpr: Jaxpr
    tree: Any

    def __call__(self, arrays: tuple[Any, ...], *args: Any) -> Any:
        return evaluate(ClosedJaxpr(self.jaxpr, list(arrays)), self.tree, args)


def all_rounds(
    rounds: Rounds,
    first: Callable[[Operands], jax.Array],
    experts: Captured,
    number: jax.Array,
    plan: Any,
    operands: Operands,
) -> jax.Array:
    """The sum of the outputs of all rounds.

    The loop starts from the output of the first round, and adds to it in place. Backward it starts
    from the gradients by the first round, and adds to these: so it is where `operands` come in that
    the backward pass has its loop, and not where the forward pass has it.

        operands -- _enter --> operands, sink -- first --> y  -- _add_rounds (y, sink) --> y
                    backward: the loop,                         backward: the gradient of y
                    by what the sink got                        to y and to the sink

    Args:
        rounds: gives the output of a round by its number.
        first: the output of the first round, which JAX differentiates.
        experts: the function of experts for all others.
        number: how many rounds there are.
        plan: where rows go.
        operands: what is differentiated.
    """
    arrays = number, plan, operands, experts.arrays
    loop = _Loop(rounds, experts.function, jax.tree.structure(arrays))
    name = SumsGradients(SAME_RESULT, loop.entered_with_anchors)
    entered: Any = _enter(loop, checkpoint_name(number, name), *arrays[1:], [])
    operands, sink = entered
    y = first(operands)
    arrays = operands, experts.arrays
    total: Any = _add_rounds(rounds, experts.function, number, plan, arrays, y, sink)
    return total


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _add_rounds(
    rounds: Rounds,
    function: Callable[..., Any],
    number: jax.Array,
    plan: Any,
    arrays: tuple[Operands, tuple[Any, ...]],
    y: jax.Array,
    sink: jax.Array,
) -> jax.Array:
    """The outputs of all rounds but the first, added to `y`; their gradient goes into the sink."""
    del sink
    operands, captured = arrays

    def add_round(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        k, y = carry
        return k + 1, y + rounds.output(partial(function, captured), k, plan, operands)

    with jax.named_scope(IF_UNEVEN):
        _, y = lax.while_loop(lambda carry: carry[0] < number, add_round, (jnp.int32(1), y))
    return y


def _add_forward(rounds: Rounds, function: Any, *arrays: Any) -> tuple[Any, None]:
    return _add_rounds(rounds, function, *arrays), None


def _add_backward(rounds: Rounds, function: Any, saved: None, gradient: Any) -> tuple[Any, ...]:
    del rounds, function, saved
    return None, None, None, gradient, gradient


_add_rounds.defvjp(_add_forward, _add_backward)


@dataclass(frozen=True, eq=False)
class _Loop:
    """What the backward loop is of, but for arrays.

    - `rounds`, `function`: give the output of a round.
    - `structure`: of the arrays: the number of rounds, the plan, the operands, and what the
      function reads from elsewhere.
    - `reductions`: of gradients that are added up reduced, by the leaf of the latter two.
    """

    rounds: Rounds
    function: Callable[..., Any]
    structure: Any
    reductions: Mapping[int, Reduction] = field(default_factory=dict)

    def entered_with_anchors(
        self, reductions: Mapping[int, Reduction], leaves: list[Any], anchors: list[Any]
    ) -> Any:
        """What `_enter` makes of the leaves of arrays, where some gradients are reduced."""
        number, plan, *arrays = jax.tree.unflatten(self.structure, leaves)
        before = len(leaves) - len(jax.tree.leaves(arrays))
        by_leaf = {place - before: reduction for place, reduction in reductions.items()}
        return _enter(replace(self, reductions=by_leaf), number, plan, *arrays, anchors)

    def reduced(self, places: list[int], gradients: list[jax.Array]) -> list[jax.Array]:
        """The gradients to the leaves at some places, reduced where they are to be."""
        made = []
        for place, gradient in zip(places, gradients, strict=True):
            reduction = self.reductions.get(place)
            made.append(gradient if reduction is None else reduction.reduced(gradient))
        return made

    def number_for_all(self, number: jax.Array) -> jax.Array:
        """How many rounds the loop runs, where it reduces gradients.

        Devices that reduce together run it equally often. In a round that a device does not need
        all its rows are empty, and gradients of zero are added.
        """
        axes = {axis for reduction in self.reductions.values() for axis in reduction.axes}
        return lax.pmax(number, tuple(sorted(axes))) if axes else number


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _enter(
    loop: _Loop,
    number: jax.Array,
    plan: Any,
    operands: Operands,
    captured: tuple[Any, ...],
    anchors: list[jax.Array],
) -> tuple[Operands, jax.Array]:
    """The operands as they are, and an array that nothing reads, for the gradient of the output.

    Of arrays whose gradients the loop reduces, the anchors get these.
    """
    del loop, number, plan, captured, anchors
    x = operands.x
    return operands, as_varying(jnp.zeros_like(x), varying(x))


def _enter_forward(loop: _Loop, *arrays: Any) -> tuple[Any, Any]:
    # Nothing of the anchors is needed.
    return _enter(loop, *arrays), arrays[:-1]


def _enter_backward(loop: _Loop, saved: Any, gradients: Any) -> tuple[Any, ...]:
    """The gradients to the operands: those by the first round, and those by each other one."""
    number, plan, *arrays = saved
    of_operands, of_y = gradients
    number = loop.number_for_all(number)
    places, floats, rebuilt = _floats_of(arrays)
    by_first = jax.tree.leaves((of_operands, jax.tree.map(jnp.zeros_like, arrays[1])))

    def add_round(carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        k, sums = carry

        def output(floats: list[jax.Array]) -> jax.Array:
            operands, captured = rebuilt(floats)
            return loop.rounds.output(partial(loop.function, captured), k, plan, operands)

        _, back = jax.vjp(output, floats)
        (added,) = back(of_y)
        return k + 1, jax.tree.map(jnp.add, sums, loop.reduced(places, added))

    start = jnp.int32(1), loop.reduced(places, [by_first[place] for place in places])
    with jax.named_scope(IF_UNEVEN):
        _, sums = lax.while_loop(lambda carry: carry[0] < number, add_round, start)
    of_leaves = dict(zip(places, sums, strict=True))
    of_anchors = [of_leaves.pop(place) for place in loop.reductions]
    leaves, definition = jax.tree.flatten(arrays)
    # What is no float has no gradient, and that of a weight with an anchor is the anchor's.
    of_arrays = jax.tree.unflatten(definition, [of_leaves.get(k) for k in range(len(leaves))])
    return None, None, *of_arrays, of_anchors


_enter.defvjp(_enter_forward, _enter_backward)


def _floats_of(tree: Any) -> tuple[list[int], list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """The places of leaves that have gradients, these leaves, and a function of such that makes the
    tree again.

    All others are as they were.
    """
    leaves, definition = jax.tree.flatten(tree)
    places = [k for k, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def rebuilt(floats: list[jax.Array]) -> Any:
        changed = list(leaves)
        for place, leaf in zip(places, floats, strict=True):
            changed[place] = leaf
        return jax.tree.unflatten(definition, changed)

    return places, [leaves[place] for place in places], rebuilt
