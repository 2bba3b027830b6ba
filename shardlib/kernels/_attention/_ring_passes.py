"""Attention around a ring of devices, forward and backward; `_ring` says which device has what.

Forward, each block gives an output `y` and a log-sum-exp, and two of these are joined to

    lse = log(exp lse_a + exp lse_b)        y = y_a exp(lse_a - lse) + y_b exp(lse_b - lse)

Backward, the log-sum-exp over all keys is known, so the gradients of each block are parts of the
final ones. Gradients to queries are added up on their device. Gradients to keys and values follow
their block, in float32, one step behind it, and end on the device that has the keys. Of `n` devices
each sends keys and values `n - 1` times forward, and these and their gradients as often backward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.kernels._attention._reference import sink_gradient, softmax_residuals
from shardlib.kernels._attention._ring import Block, Pair, Ring, as_moved
from shardlib.kernels._rows import compute_dtype
from shardlib.kernels._shards import as_varying, varying


class Results(NamedTuple):
    """The outputs of the queries of one stretch, and their log-sum-exps."""

    y: jax.Array
    lse: jax.Array


class _Sums(NamedTuple):
    """Gradients to the keys and to the values of one stretch, wide."""

    k: jax.Array
    v: jax.Array


class _Step(NamedTuple):
    """A step of the ring, and how far arrays travel: from the device so many places before."""

    number: Any
    places: int  # for this step
    places_of_next: int  # for the next one


def _walk(ring: Ring, first: int, run_step: Callable[[_Step, Any], Any], carried: Any) -> Any:
    """Run the needed steps, from a first one to the last but one, and give what they carry.

    Args:
        ring: the ring.
        first: which of `ring.steps` is the first.
        run_step: called with a step and what is carried; gives what is carried after it.
        carried: what is carried before the first.
    """
    steps = ring.steps
    last = len(steps) - 1
    if steps[last] == last:
        # No step is left out: they are a loop.
        make_step = partial(_Step, places=1, places_of_next=1)
        return lax.fori_loop(first, last, lambda n, before: run_step(make_step(n), before), carried)
    for n in range(first, last):
        places = steps[n] - steps[n - 1] if n else 0
        carried = run_step(_Step(steps[n], places, steps[n + 1] - steps[n]), carried)
    return carried


def ring_forward(
    attend: Callable[..., Any], ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output of each of a device's queries, and its log-sum-exp.

    Args:
        attend: the attention to one block: `attend(q, k, v, side)` gives both.
        ring: the device's place among the others.
        q: the device's queries.
        k: its own keys.
        v: its own values.
    """
    queries = ring.queries(q)

    def added(results: list[Results], blocks: list[Block], step: Any) -> list[Results]:
        results = list(results)
        for numbers in ring.pairs:
            own = numbers[0]
            pair = ring.pair(step, numbers, queries[own], blocks[numbers[1]])
            results[own] = _with_pair(attend, results[own], pair)
        return results

    def run_step(step: _Step, before: Any) -> Any:
        blocks, results = before
        # The next blocks travel while these are attended to.
        following = ring.passed_on(blocks, step.places_of_next)
        return following, added(results, blocks, step.number)

    blocks = as_moved(ring.blocks(k, v))
    nothing = [_nothing(one.q, blocks[0]) for one in queries]
    blocks, results = _walk(ring, 0, run_step, (blocks, nothing))
    results = added(results, blocks, ring.steps[-1])
    y = jnp.concatenate([one.y for one in results], 1)
    lse = jnp.concatenate([one.lse for one in results], 1)
    if ring.side.sinks is not None:
        # A sink is a score without a value.
        with_sinks = jnp.logaddexp(lse, ring.side.sinks.astype(lse.dtype))
        y, lse = y * _rescaling(lse, with_sinks)[..., None], with_sinks
    return y.astype(q.dtype), lse


def _nothing(q: jax.Array, block: Block) -> Results:
    """The results before any key is seen, wide."""
    wide = compute_dtype(q.dtype)
    y = jnp.zeros((*q.shape[:3], block.v.shape[3]), wide)
    lse = jnp.full(q.shape[:3], -jnp.inf, wide)
    axes = varying(q) | varying(block.k)
    return Results(as_varying(y, axes), as_varying(lse, axes))


def _with_pair(attend: Callable[..., Any], results: Results, pair: Pair) -> Results:
    """The results of some queries over the keys of one more block."""

    def joined() -> Results:
        more = Results(*attend(pair.q, pair.block.k, pair.block.v, pair.side))
        return _joined(results, more)

    return pair.if_seen(joined, lambda: results)


def _joined(results: Results, more: Results) -> Results:
    """The results over the keys of two blocks, from those over each."""
    total = jnp.logaddexp(results.lse, more.lse)
    y = results.y * _rescaling(results.lse, total)[..., None]
    more_y = more.y.astype(results.y.dtype) * _rescaling(more.lse, total)[..., None]
    return Results(y + more_y, total)


def _rescaling(lse: jax.Array, total: jax.Array) -> jax.Array:
    """The factor of an output over some keys in that over all, from the log-sum-exps of both."""
    # Where nothing was seen, the difference of two infinities would be nan.
    return jnp.exp(lse - jnp.where(total == -jnp.inf, 0, total))


class _Gradients(NamedTuple):
    """The gradients to queries, and to blocks of keys and values, for each stretch; wide."""

    queries: list[jax.Array]
    blocks: list[_Sums]


class _Backward:
    """What the backward pass of a device does in each step.

    Args:
        differentiate: the gradients of one block: `differentiate(q, k, v, side, results,
            gradients)` gives those to queries, keys, values and sinks.
        ring: the device's place among the others.
        q: the device's queries.
        results: what `ring_forward` gave.
        gradients: those to the results.
    """

    def __init__(
        self,
        differentiate: Callable[..., Any],
        ring: Ring,
        q: jax.Array,
        results: tuple[jax.Array, jax.Array],
        gradients: tuple[jax.Array, jax.Array],
    ) -> None:
        self.differentiate = differentiate
        self.ring = ring
        self.queries = ring.queries(q)
        self.results = list(map(Results, *map(ring.cut, results)))
        self.gradients = list(map(Results, *map(ring.cut, gradients)))

    def gradients_of(self, blocks: list[Block], step: Any) -> _Gradients:
        """The gradients to the queries and to the blocks that a device has in a step."""
        wide = compute_dtype(self.queries[0].q.dtype)
        axes = varying(self.queries[0].q) | varying(blocks[0].k)

        def zeros(x: jax.Array) -> jax.Array:
            return as_varying(jnp.zeros(x.shape, wide), axes)

        of_queries = [zeros(one.q) for one in self.queries]
        of_blocks = [_Sums(zeros(block.k), zeros(block.v)) for block in blocks]
        for own, other in self.ring.pairs:
            pair = self.ring.pair(step, (own, other), self.queries[own], blocks[other])
            if pair.seen is False:
                continue
            found = self._of_pair(pair, own)
            q_gradient, *block_gradients = (as_varying(x.astype(wide), axes) for x in found)
            of_queries[own] += q_gradient
            of_blocks[other] = _added(of_blocks[other], _Sums(*block_gradients))
        return _Gradients(of_queries, of_blocks)

    def _of_pair(self, pair: Pair, own: int) -> Sequence[jax.Array]:
        """The gradients to the queries, keys and values of a pair of stretches."""
        operands = pair.q, pair.block.k, pair.block.v
        wide = compute_dtype(pair.q.dtype)
        axes = varying(pair.q) | varying(pair.block.k)

        def computed() -> list[jax.Array]:
            given = self.results[own], self.gradients[own]
            found = self.differentiate(*operands, pair.side, *given)[:3]
            return [as_varying(x.astype(wide), axes) for x in found]

        def zeros() -> list[jax.Array]:
            return [as_varying(jnp.zeros(x.shape, wide), axes) for x in operands]

        return pair.if_seen(computed, zeros)

    def all_steps(self, blocks: list[Block]) -> _Gradients:
        """The gradients to the device's own queries and to its own blocks."""
        ring, steps = self.ring, self.ring.steps
        last = len(steps) - 1
        own = self.gradients_of(blocks, 0)
        if last == 0:
            return own

        def run_step(step: _Step, before: Any) -> Any:
            blocks, (of_queries, of_blocks) = before
            # Both travel while the blocks' gradients are computed.
            following = ring.passed_on(blocks, step.places_of_next)
            arrived = ring.passed_on(of_blocks, step.places)
            more = self.gradients_of(blocks, step.number)
            return following, _all_added(_Gradients(of_queries, arrived), more)

        arrived = ring.passed_on(blocks, steps[1])
        if last == 1:
            sums = self.gradients_of(arrived, steps[1])
        else:
            # There are no gradients yet that could arrive with the first blocks. Without a barrier
            # compilers put the first two permutes next to each other, before any product.
            arrived, own = lax.optimization_barrier((arrived, own))
            following = ring.passed_on(arrived, steps[2] - steps[1])
            sums = self.gradients_of(arrived, steps[1])
            following, sums = _walk(ring, 2, run_step, (following, sums))
            of_blocks = ring.passed_on(sums.blocks, steps[last] - steps[last - 1])
            more = self.gradients_of(following, steps[last])
            sums = _all_added(_Gradients(sums.queries, of_blocks), more)
        # The gradients go home, over as many places as are left. The barrier keeps this permute
        # apart from the one before, which overlaps with products.
        last_blocks = lax.optimization_barrier(sums.blocks)
        of_blocks = ring.passed_on(last_blocks, ring.order.size - steps[last])
        return _all_added(_Gradients(sums.queries, of_blocks), own)


def ring_backward(
    differentiate: Callable[..., Any],
    ring: Ring,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    results: tuple[jax.Array, jax.Array],
    gradients: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients to a device's queries, keys, values and sinks; the latter is wide.

    Args:
        differentiate: the gradients of one block: `differentiate(q, k, v, side, results,
            gradients)` gives those to queries, keys, values and sinks.
        ring: the device's place among the others.
        q: the device's queries.
        k: its own keys.
        v: its own values.
        results: what `ring_forward` gave.
        gradients: those to the results.
    """
    backward = _Backward(differentiate, ring, q, results, gradients)
    total = backward.all_steps(ring.blocks(k, v))
    return (
        jnp.concatenate(total.queries, 1).astype(q.dtype),
        jnp.concatenate([sums.k for sums in total.blocks], 1).astype(k.dtype),
        jnp.concatenate([sums.v for sums in total.blocks], 1).astype(v.dtype),
        sink_gradient(ring.side.sinks, *softmax_residuals(results, gradients)),
    )


def _added(sums: _Sums, more: _Sums) -> _Sums:
    """Two sums of gradients of one block, added up."""
    return _Sums(sums.k + more.k, sums.v + more.v)


def _all_added(sums: _Gradients, more: _Gradients) -> _Gradients:
    """Gradients of all stretches, added up."""
    of_queries = [x + y for x, y in zip(sums.queries, more.queries, strict=True)]
    return _Gradients(of_queries, list(map(_added, sums.blocks, more.blocks)))
