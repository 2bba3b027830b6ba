"""Rounds after the first one: a loop that is run as often as it takes, with a derivative.

JAX has no reverse mode for a loop whose length is known to the running program alone. Here the
backward pass is a loop as well, which computes each round again and differentiates it:

    forward     y = sum of output(k, operands)                     k = 1 ... rounds - 1
    backward    gradients += derivative of output(k, operands)     starting with round 0's gradients

Between rounds only the sums are kept. If the layer's weights are gathered and their gradients
scattered, the backward loop does both in each round, so it adds up scattered gradients.
See `tracing/_reduced_sums`.
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
from shardlib.tracing._reduced_sums import Further, OfShard, SumsGradients


class Operands(NamedTuple):
    """The arrays with respect to which a round's output is differentiated.

    - `x`: the tokens.
    - `weights`: of the experts.
    - `choice_weight`: by what the outputs of a token's experts are multiplied.
    """

    x: jax.Array
    weights: Any
    choice_weight: jax.Array


class Rounds(Protocol):
    """How a layer's tokens get to their experts and back, in rounds."""

    @property
    def is_one(self) -> bool:
        """Whether there is never more than one round."""
        ...

    @property
    def further(self) -> "Rounds":
        """The rounds after the first one."""
        ...

    def shapes(self, x: jax.Array) -> list[tuple[Any, Any]]:
        """The rows and groups that experts are called with in a round."""
        ...

    def plan(self, choices: Any) -> tuple[Any, jax.Array]:
        """Where choices go, and how many rounds that takes."""
        ...

    def output(self, experts: Any, number: jax.Array, plan: Any, operands: Operands) -> "Made":
        """What the experts make of the rows of one round, for each token."""
        ...


class Made(NamedTuple):
    """What one round makes.

    - `y`: the outputs of the experts, for each token.
    - `further`: how many rounds there were within this one, after the first of these.
    """

    y: jax.Array
    further: jax.Array


class Captured(NamedTuple):
    """A function that reads nothing but its arguments, and the arrays that it used to read."""

    function: Callable[..., Any]
    arrays: tuple[Any, ...]


def without_captures(
    function: Callable[..., Any], weights: Any, shapes: list[tuple[Any, Any]]
) -> Captured:
    """A function of weights, rows and groups, as one that also takes all arrays that it captured.

    The loop is differentiated after its function was traced, when such arrays are gone.

    Args:
        function: of weights, rows and groups.
        weights: that it is called with.
        shapes: the rows and groups that it may be called with, which differ in their rows.
    """
    traced: dict[int, _Traced] = {}
    arrays: list[Any] = []
    for rows, groups in shapes:
        made, shape = jax.make_jaxpr(function, return_shape=True)(weights, rows, groups)
        first = len(arrays)
        arrays += made.consts
        own = slice(first, len(arrays))
        traced[rows.shape[0]] = _Traced(made.jaxpr, jax.tree.structure(shape), own)
    return Captured(_Converted(traced), tuple(arrays))


class _Traced(NamedTuple):
    """A traced function, and which of all captured arrays it reads."""

    jaxpr: Jaxpr
    tree: Any
    arrays: slice


@dataclass(frozen=True, eq=False)
class _Converted:
    """A function that was traced for some numbers of rows, and takes what it captured first."""

    traced: dict[int, _Traced]

    def __call__(self, arrays: tuple[Any, ...], weights: Any, rows: jax.Array, groups: Any) -> Any:
        jaxpr, tree, own = self.traced[rows.shape[0]]
        return evaluate(ClosedJaxpr(jaxpr, list(arrays[own])), tree, (weights, rows, groups))


def all_rounds(
    rounds: Rounds,
    first: Callable[[Operands], Made],
    experts: Captured,
    number: jax.Array,
    plan: Any,
    operands: Operands,
) -> Made:
    """The sum of the outputs of all rounds, and how many further rounds there were in the first.

    The loop starts from the output of the first round, and adds to it in place. The backward loop
    starts from the gradients of the first round, and adds to these. So it runs in the backward pass
    of `_enter`, where `operands` come in, and not in that of `_add_rounds`.

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
    captured = experts.arrays
    loop = _Loop(rounds, experts.function, jax.tree.structure((number, plan, operands, captured)))
    named = checkpoint_name(number, SumsGradients(SAME_RESULT, loop.of_shards))
    entered: Any = _enter(loop, named, plan, operands, captured, [])
    operands, sink = entered
    y, further = first(operands)
    total: Any = _add_rounds(rounds, experts.function, number, plan, (operands, captured), y, sink)
    return Made(total, further)


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
        return k + 1, y + rounds.output(partial(function, captured), k, plan, operands).y

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
    """The static part of the backward loop: everything except arrays.

    - `rounds`, `function`: give the output of a round.
    - `structure`: of the arrays: the number of rounds, the plan, the operands, and what the
      function reads from elsewhere.
    - `weights`: those that the loop gathers, by the leaf of the latter two.
    """

    rounds: Rounds
    function: Callable[..., Any]
    structure: Any
    weights: Mapping[int, OfShard] = field(default_factory=dict)

    def of_shards(
        self, weights: Mapping[int, OfShard], leaves: list[Any], further: list[Further]
    ) -> Any:
        """What `_enter` makes of the leaves of arrays, where the loop gathers some of them."""
        number, plan, *arrays = jax.tree.unflatten(self.structure, leaves)
        before = len(leaves) - len(jax.tree.leaves(arrays))
        by_leaf = {place - before: of_shard for place, of_shard in weights.items()}
        return _enter(replace(self, weights=by_leaf), number, plan, *arrays, further)

    def whole(self, leaves: list[jax.Array], number: jax.Array) -> list[jax.Array]:
        """The leaves of the arrays in the round of a number, with whole weights for their shards.

        A round drops them again where it has read them. Without the barrier the compiler might
        gather them before the loop.
        """
        if not self.weights:
            return leaves
        made = list(leaves)
        shards, _ = lax.optimization_barrier(([leaves[place] for place in self.weights], number))
        for (place, of_shard), shard in zip(self.weights.items(), shards, strict=True):
            made[place] = of_shard.whole(shard)
        return made

    def reduced(self, gradients: dict[int, jax.Array]) -> dict[int, jax.Array]:
        """Gradients by leaf, reduced where they are to be."""
        made = dict(gradients)
        for place, of_shard in self.weights.items():
            made[place] = of_shard.reduced(made[place])
        return made

    def number_for_all(self, number: jax.Array) -> jax.Array:
        """How many rounds there are on the device that has most, of those that gather together.

        In a round that a device does not need all its rows are empty, and the gradients are zero.
        """
        axes = {axis for of_shard in self.weights.values() for axis in of_shard.axes}
        return lax.pmax(number, tuple(sorted(axes))) if axes else number


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _enter(
    loop: _Loop,
    number: jax.Array,
    plan: Any,
    operands: Operands,
    captured: tuple[Any, ...],
    further: list[Further],
) -> tuple[Operands, jax.Array]:
    """The operands as they are, and an array that nothing reads, for the gradient of the output.

    The gradients of weights that the loop gathers go to their anchors.
    """
    del loop, number, plan, captured, further
    x = operands.x
    return operands, as_varying(jnp.zeros_like(x), varying(x))


def _enter_forward(
    loop: _Loop, number: Any, plan: Any, operands: Any, captured: Any, further: list[Further]
) -> tuple[Any, Any]:
    leaves, structure = jax.tree.flatten((operands, captured))
    # What the loop gathers is not kept.
    for place, one in zip(loop.weights, further, strict=True):
        leaves[place] = one.shard
    saved = number, plan, jax.tree.unflatten(structure, leaves)
    return _enter(loop, number, plan, operands, captured, further), saved


def _enter_backward(loop: _Loop, saved: Any, gradients: Any) -> tuple[Any, ...]:
    """The gradients to the operands: those by the first round, and those by each other one."""
    number, plan, arrays = saved
    of_operands, of_y = gradients
    number = loop.number_for_all(number)
    leaves, structure = jax.tree.flatten(arrays)
    _, captured = arrays
    by_first = jax.tree.leaves((of_operands, jax.tree.map(jnp.zeros_like, captured)))
    floats = [k for k, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def add_round(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        k, sums = carry
        whole = loop.whole(leaves, k)

        def output(of_floats: dict[int, jax.Array]) -> jax.Array:
            now = [of_floats.get(place, leaf) for place, leaf in enumerate(whole)]
            operands, captured = jax.tree.unflatten(structure, now)
            return loop.rounds.output(partial(loop.function, captured), k, plan, operands).y

        _, back = jax.vjp(output, {place: whole[place] for place in floats})
        (added,) = back(of_y)
        return k + 1, jax.tree.map(jnp.add, sums, loop.reduced(added))

    start = jnp.int32(1), loop.reduced({place: by_first[place] for place in floats})
    with jax.named_scope(IF_UNEVEN):
        _, sums = lax.while_loop(lambda carry: carry[0] < number, add_round, start)
    of_further = [Further(sums.pop(place), None) for place in loop.weights]
    # Only floating-point leaves have a gradient; the others get None.
    of_leaves = [sums.get(k) for k in range(len(leaves))]
    return None, None, *jax.tree.unflatten(structure, of_leaves), of_further


_enter.defvjp(_enter_forward, _enter_backward)
