"""A loop over layers that keeps few of their inputs for its backward pass, by a table.

`jax.lax.scan` keeps something of every layer. Here the forward pass keeps the states that a
`ChainTable` says, in a buffer with a row for each place, and the backward pass goes by the table's
actions:

    forward     scan over layers              write the state into a row, evaluate the layer
    backward    scan over layers, reversed    for each action before it: read a row, evaluate the
                                              layer, write a row
                                              read a row, differentiate the layer

So a program holds a layer three times, whatever the number of layers and the table: once in the
forward pass, evaluated and differentiated in the backward pass. The loop over actions has as many
turns as the table says, the same on all devices, so that a layer may hold collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import custom_vjp_primal_tree_values
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from shardlib.layouts._chain_schedules import Advance, Chain, ChainTable
from shardlib.tracing._linearize import Partition, instantiated


def chain_scan(
    body: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    length: int,
    chain: Chain,
    *,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """`jax.lax.scan(body, init, xs, length, reverse)`, with what a chain keeps for its derivative.

    Trees of any dtypes are carried, scanned and closed over; floats among them are differentiated,
    backwards only. The body may add to references that it closes over where it is differentiated,
    and not in its own pass.
    """
    if length == 0:
        return lax.scan(body, init, xs, length, reverse=reverse)
    traced = _trace(body, init, xs)
    if traced is None:
        # What a loop refuses is refused in JAX's words. What it takes, it says the carry's dtypes
        # of: Python's numbers are promoted.
        shapes, _ = jax.eval_shape(partial(lax.scan, body, length=length), init, xs)
        init = jax.tree.map(lambda x, shape: jnp.asarray(x, shape.dtype), init, shapes)
        traced = _trace(body, init, xs)
    assert traced is not None
    counts = _Operands(*map(len, traced.operands))
    loop = _ChainLoop(traced.body, counts, chain.table(length), reverse)
    carry, ys = loop.run(traced.operands)
    return jax.tree.unflatten(traced.trees[0], carry), jax.tree.unflatten(traced.trees[1], ys)


class _Operands(NamedTuple):
    """What a loop takes, or something for each of it."""

    consts: Any
    carry: Any
    xs: Any


class _Traced(NamedTuple):
    """The body of a loop as a function of lists, and what the loop is given."""

    body: ClosedJaxpr  # of consts, carries and scanned values; it has no constants of its own
    operands: _Operands
    trees: tuple[Any, Any]  # the structures of the carry and of what is stacked


def _trace(body: Any, init: Any, xs: Any) -> _Traced | None:
    """Trace the body of a loop for one layer, with what it closes over as its first inputs.

    None if the carry that it returns is no carry that it takes.
    """
    init, xs = jax.tree.map(jnp.asarray, (init, xs))
    x = jax.tree.map(lambda stacked: lax.index_in_dim(stacked, 0, keepdims=False), xs)
    closed, out = jax.make_jaxpr(body, return_shape=True)(init, x)
    if not isinstance(out, tuple) or len(out) != 2 or not _are_alike(init, out[0]):
        return None
    # What a body closes over has gradients too, so that it becomes an argument.
    jaxpr = closed.jaxpr
    opened = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    operands = _Operands(list(closed.consts), jax.tree.leaves(init), jax.tree.leaves(xs))
    trees = jax.tree.structure(out[0]), jax.tree.structure(out[1])
    return _Traced(ClosedJaxpr(opened, []), operands, trees)


def _are_alike(values: Any, shapes: Any) -> bool:
    """Whether a tree of values has the structure, the shapes and the dtypes of another."""
    if jax.tree.structure(values) != jax.tree.structure(shapes):
        return False
    pairs = zip(jax.tree.leaves(values), jax.tree.leaves(shapes), strict=True)
    return all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)


class _Saved(NamedTuple):
    """What a loop keeps from its forward to its backward pass."""

    consts: list[Any]
    xs: list[Any]
    places: list[Any]  # for each carry a buffer with a row for each place


@dataclass(frozen=True, eq=False)
class _ChainLoop:
    """A loop over layers, as functions of lists of arrays, with a table for its derivative."""

    body: ClosedJaxpr
    counts: _Operands  # how many consts, carries and scanned values the body takes
    table: ChainTable
    reverse: bool

    def run(self, operands: _Operands) -> tuple[list[Any], list[Any]]:
        """The last carry, and what is stacked, with a derivative that goes by the table.

        JAX differentiates floats alone, so operands are taken apart by dtype and merged again.
        """
        # All as one list: a partition does not care which of them are carried.
        given = [*operands.consts, *operands.carry, *operands.xs]
        inputs, outputs = _differentiable(given), _differentiable(self.body.out_avals)
        # With symbolic zeros, each primal comes with whether it is differentiated. JAX takes no
        # references then, and XLA drops the sums of gradients that nothing reads.
        symbolic_zeros = not any(isinstance(x, jax.Ref) for x in given)

        @jax.custom_vjp
        def evaluated(floats: list[Any], others: list[Any]) -> Any:
            operands = self.split(inputs.merge(floats, others))
            return outputs.split(self.evaluate(operands))

        def forwards(*primals: Any) -> Any:
            floats, others, perturbed = _given_to_derivative(primals, symbolic_zeros)
            moving = self.split(inputs.merge(perturbed, [False] * len(others)))
            results, saved = self.forward(self.split(inputs.merge(floats, others)))
            backward = partial(self.backward, moving)
            return outputs.split(results), jax.tree_util.Partial(backward, saved)

        def backwards(saved: Any, cotangents: Any) -> Any:
            return inputs.split(saved(outputs.merge(*cotangents)))

        evaluated.defvjp(forwards, backwards, symbolic_zeros=symbolic_zeros)
        results = outputs.merge(*evaluated(*inputs.split(given)))
        return results[: self.counts.carry], results[self.counts.carry :]

    def split(self, inputs: list[Any]) -> _Operands:
        """The consts, the carries and the scanned values of a list of all of them.

        It takes apart lists of anything that there is one of for each input.
        """
        consts, carry, _ = self.counts
        return _Operands(inputs[:consts], inputs[consts : consts + carry], inputs[consts + carry :])

    def layer(self, consts: Any, carry: Any, x: Any) -> tuple[list[Any], list[Any]]:
        """One layer: the next carry, and its part of what is stacked."""
        results = jaxpr_as_fun(self.body)(*consts, *carry, *x)
        return results[: self.counts.carry], results[self.counts.carry :]

    def evaluate(self, operands: _Operands) -> list[Any]:
        """The results where nothing is differentiated."""
        layer = partial(self.layer, operands.consts)
        carry, ys = lax.scan(
            layer, operands.carry, operands.xs, self.table.layers, reverse=self.reverse
        )
        return [*carry, *ys]

    def forward(self, operands: _Operands) -> tuple[list[Any], _Saved]:
        """The results, and what is kept for the backward pass.

        Every layer writes its input to a place. Where the table keeps it in no slot, that is the
        place of what is at hand, which the next layer overwrites: so all layers do the same.
        """
        consts, init, xs = operands
        places = _rows(init, len(self.table.kept) + 1)

        def step(carry: Any, scanned: Any) -> Any:
            state, places = carry
            place, x = scanned
            places = _written(places, place, state)
            state, y = self.layer(consts, state, x)
            return (state, places), y

        scanned = self._in_order(self.table.places_of_inputs), xs
        (carry, places), ys = lax.scan(step, (init, places), scanned, reverse=self.reverse)
        return [*carry, *ys], _Saved(consts, xs, places)

    def backward(self, moving: _Operands, saved: _Saved, cotangents: list[Any]) -> list[Any]:
        """The gradients of all inputs, None for those that have none.

        Args:
            moving: for each input whether it is differentiated.
            saved: what the forward pass kept.
            cotangents: those of the last carry and of what is stacked.
        """
        layer = _Differentiated.of(self, moving, saved, cotangents)
        carry = instantiated(layer.moving.carry.floats(cotangents[: self.counts.carry]))
        # Stacked outputs that the loss does not read have symbolic zeros, and are left out.
        ys = [one for one in cotangents[self.counts.carry :] if isinstance(one, jax.Array)]
        sums = list(map(jnp.zeros_like, layer.moving.consts.floats(saved.consts)))
        places = _with_rows(saved.places, self.table.places)
        ticks = map(self._in_order, zip(*_ticks(self.table), strict=True))
        (carry, sums, _), xs = lax.scan(
            layer.tick,
            (carry, sums, places),
            (_Tick(*ticks), saved.xs, ys),
            reverse=not self.reverse,
        )
        return layer.gradients(_Operands(sums, carry, xs))

    def advanced(self, saved: _Saved, tick: "_Tick", places: list[Any]) -> list[Any]:
        """The places after the table's evaluations of a tick.

        How many there are differs by tick, and is known to the running program only.
        """
        table = self._advances()
        # A table without any has no rows that a loop, even one of no turns, could read.
        if not table:
            return places

        def advance(number: Any, places: list[Any]) -> list[Any]:
            layer, source, target = _read(table, number)
            state, _ = self.layer(saved.consts, _read(places, source), _read(saved.xs, layer))
            return _written(places, target, state)

        return lax.fori_loop(tick.first, tick.end, advance, places)

    def _advances(self) -> list[Any]:
        """The table's evaluations as arrays: their layers, sources and targets; empty if none."""
        advances = [one for one in self.table.actions if isinstance(one, Advance)]
        if not advances:
            return []
        # A table of numbers, which one loop reads row by row: a program of all actions would grow
        # with the layers.
        layers, sources, targets = np.asarray(advances, np.int32).T
        if self.reverse:
            layers = self.table.layers - 1 - layers
        return list(map(jnp.asarray, (layers, sources, targets)))

    def _in_order(self, numbers: Sequence[int]) -> np.ndarray:
        """Numbers of layers from the first to the last, in the order in which `xs` has them."""
        ordered = np.asarray(numbers, np.int32)
        return ordered[::-1] if self.reverse else ordered


@dataclass(frozen=True, eq=False)
class _Differentiated:
    """The derivative of one layer, with respect to those of its inputs that move.

    Attributes:
        loop: the loop that it is a layer of.
        moving: for each kind of inputs, which are differentiated: all floats that are carried, and
            those of the others that the loss moves with.
        live: the outputs whose cotangents there are: all floats that are carried, and those that
            are stacked and read.
        saved: what the loop has kept.
    """

    loop: _ChainLoop
    moving: _Operands
    live: Partition
    saved: _Saved

    @classmethod
    def of(
        cls, loop: _ChainLoop, moving: _Operands, saved: _Saved, cotangents: list[Any]
    ) -> "_Differentiated":
        """That of a loop.

        Args:
            loop: the loop.
            moving: for each input whether the loss moves with it.
            saved: what the forward pass kept.
            cotangents: those of the results, symbolic where they are known to be zero.
        """
        is_float = _differentiable(loop.body.out_avals[: loop.counts.carry]).is_float
        stacked = cotangents[loop.counts.carry :]
        live = (*is_float, *[isinstance(one, jax.Array) for one in stacked])
        partitions = _Operands(
            Partition(tuple(moving.consts)), Partition(is_float), Partition(tuple(moving.xs))
        )
        return cls(loop, partitions, Partition(live), saved)

    def tick(self, carried: Any, scanned: Any) -> tuple[Any, list[Any]]:
        """Go back by one layer: the table's evaluations before it, and then its derivative.

        Args:
            carried: the gradients of the carry behind the layer, the sums of those of constants,
                and the places.
            scanned: the layer's `_Tick`, its part of the stacks, and the cotangents of its outputs.
        """
        carry, sums, places = carried
        tick, x, y = scanned
        places = self.loop.advanced(self.saved, tick, places)
        gradients = self(_read(places, tick.place), x, [*carry, *y])
        sums = list(map(jnp.add, sums, gradients.consts))
        return (gradients.carry, sums, places), gradients.xs

    def __call__(self, state: list[Any], x: list[Any], cotangents: list[Any]) -> _Operands:
        """The gradients of the inputs that move, at the input of a layer.

        Args:
            state: what the layer was given by the one before.
            x: its part of the stacks.
            cotangents: those of the outputs that are `live`.
        """
        inputs = self.saved.consts, state, x
        moved, fixed = zip(*map(Partition.split, self.moving, inputs), strict=True)

        def layer(moved: tuple[list[Any], ...]) -> list[Any]:
            carry, y = self.loop.layer(*map(Partition.merge, self.moving, moved, fixed))
            return self.live.floats([*carry, *y])

        _, backward = jax.vjp(layer, moved)
        (gradients,) = backward(cotangents)
        return _Operands(*gradients)

    def gradients(self, moved: _Operands) -> list[Any]:
        """The gradients of all inputs of the loop, None for those that do not move."""
        every: list[Any] = []
        for partition, gradients in zip(self.moving, moved, strict=True):
            every += partition.gradients(gradients)
        return every


class _Tick(NamedTuple):
    """What the backward pass does at a layer, by the numbers of the table's evaluations.

    First come those from `first` to before `end`, then the derivative at the input in a `place`.
    """

    first: Any
    end: Any
    place: Any


def _ticks(table: ChainTable) -> list[_Tick]:
    """What the backward pass does at each layer, from the first to the last.

    Here the inputs of layers 0 and 2 are kept. Layer 3 has its input at hand, in place 0. Before
    layer 1 is differentiated, its input is made by the table's evaluation number 0, of layer 0:

    >>> from shardlib.layouts._chain_schedules import Every
    >>> for tick in _ticks(Every(2).table(4)):
    ...     print(tick)
    _Tick(first=1, end=1, place=1)
    _Tick(first=0, end=1, place=0)
    _Tick(first=0, end=0, place=2)
    _Tick(first=0, end=0, place=0)
    """
    # Each of them is replaced: a table differentiates every layer once.
    ticks = [_Tick(0, 0, 0)] * table.layers
    before = done = 0
    for action in table.actions:
        if isinstance(action, Advance):
            done += 1
        else:
            ticks[action.layer] = _Tick(before, done, action.source)
            before = done
    return ticks


def _given_to_derivative(
    primals: tuple[list[Any], list[Any]], symbolic_zeros: bool
) -> tuple[list[Any], list[Any], list[bool]]:
    """The floats and the other values of a loop that is differentiated, from JAX's primals.

    The third list says which of the floats the loss moves with. Without symbolic zeros JAX does not
    say it, so that all count.
    """
    floats, others = primals
    if not symbolic_zeros:
        return floats, others, [True] * len(floats)
    perturbed = [primal.perturbed for primal in floats]
    floats, others = custom_vjp_primal_tree_values(primals)
    return floats, others, perturbed


def _differentiable(values: Sequence[Any]) -> Partition:
    """Which values or shapes have derivatives; references have a dtype, and none."""
    is_float = []
    for value in values:
        is_array = not isinstance(value, jax.Ref)
        is_float.append(is_array and jnp.issubdtype(value.dtype, jnp.inexact))
    return Partition(tuple(is_float))


def _rows(values: list[Any], count: int) -> list[Any]:
    """For each value a buffer of so many rows like it."""
    return [lax.full_like(x, 0, shape=(count, *x.shape)) for x in values]


def _with_rows(buffers: list[Any], count: int) -> list[Any]:
    """Buffers with rows added, up to so many."""
    longer = []
    for buffer in buffers:
        if buffer.shape[0] < count:
            empty = lax.full_like(buffer, 0, shape=(count, *buffer.shape[1:]))
            buffer = lax.dynamic_update_slice_in_dim(empty, buffer, 0, 0)
        longer.append(buffer)
    return longer


def _read(buffers: list[Any], row: Any) -> list[Any]:
    """One row of each buffer."""
    return [lax.dynamic_index_in_dim(buffer, row, keepdims=False) for buffer in buffers]


def _written(buffers: list[Any], row: Any, values: list[Any]) -> list[Any]:
    """The buffers with a row of each replaced.

    XLA does so in place where a loop carries them.
    """
    pairs = zip(buffers, values, strict=True)
    return [lax.dynamic_update_index_in_dim(buffer, x, row, 0) for buffer, x in pairs]
