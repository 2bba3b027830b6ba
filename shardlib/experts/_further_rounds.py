"""Rounds after the first one: a loop that is run as often as it takes, with a derivative.

JAX has no reverse mode for a loop whose length is known to the running program alone. Here the
backward pass is a loop as well, which computes each round again and differentiates it:

    forward     y = sum of output(k, operands)                  k = 1 ... rounds - 1
    backward    gradients += of output(k, operands) by y's      starting from those of round 0

Between rounds nothing is kept but the sums.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardlib.compiled._source_lines import IF_UNEVEN
from shardlib.kernels._shards import as_varying, varying
from shardlib.tracing._jaxpr import evaluate


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
    captured = experts.arrays
    entered: Any = _enter(rounds, experts.function, number, plan, operands, captured)
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


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _enter(
    rounds: Rounds,
    function: Callable[..., Any],
    number: jax.Array,
    plan: Any,
    operands: Operands,
    captured: tuple[Any, ...],
) -> tuple[Operands, jax.Array]:
    """The operands as they are, and an array that nothing reads, for the gradient of the output."""
    del rounds, function, number, plan, captured
    x = operands.x
    return operands, as_varying(jnp.zeros_like(x), varying(x))


def _enter_forward(rounds: Rounds, function: Any, *arrays: Any) -> tuple[Any, Any]:
    return _enter(rounds, function, *arrays), arrays


def _enter_backward(rounds: Rounds, function: Any, saved: Any, gradients: Any) -> tuple[Any, ...]:
    """The gradients to the operands: those by the first round, and those by each other one."""
    number, plan, operands, captured = saved
    of_operands, of_y = gradients
    floats, rebuilt = _floats_of((operands, captured))
    by_first, _ = _floats_of((of_operands, jax.tree.map(jnp.zeros_like, captured)))

    def add_round(carry: tuple[jax.Array, list[jax.Array]]) -> tuple[jax.Array, list[jax.Array]]:
        k, sums = carry

        def output(floats: list[jax.Array]) -> jax.Array:
            operands, captured = rebuilt(floats)
            return rounds.output(partial(function, captured), k, plan, operands).y

        _, back = jax.vjp(output, floats)
        (added,) = back(of_y)
        return k + 1, jax.tree.map(jnp.add, sums, added)

    start = jnp.int32(1), by_first
    with jax.named_scope(IF_UNEVEN):
        _, sums = lax.while_loop(lambda carry: carry[0] < number, add_round, start)
    of_operands, of_captured = _with_none(rebuilt(sums), (operands, captured))
    return None, None, of_operands, of_captured


_enter.defvjp(_enter_forward, _enter_backward)


def _floats_of(tree: Any) -> tuple[list[jax.Array], Callable[[list[jax.Array]], Any]]:
    """The leaves of a tree that have gradients, and a function of such that makes the tree again.

    All others are as they were.
    """
    leaves, definition = jax.tree.flatten(tree)
    places = [k for k, leaf in enumerate(leaves) if _is_float(leaf)]

    def rebuilt(floats: list[jax.Array]) -> Any:
        changed = list(leaves)
        for place, leaf in zip(places, floats, strict=True):
            changed[place] = leaf
        return jax.tree.unflatten(definition, changed)

    return [leaves[place] for place in places], rebuilt


def _with_none(gradients: Any, arrays: Any) -> Any:
    """The gradients of arrays, with None for arrays that have none."""
    return jax.tree.map(lambda of, x: of if _is_float(x) else None, gradients, arrays)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)
