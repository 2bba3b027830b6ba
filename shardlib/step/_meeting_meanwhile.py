"""Meetings whose moves are sent while a step computes, and used at its end.

    before the step    own parameters - center   ->  moves, sent to be averaged
    the step           own parameters            ->  own parameters, without waiting for the means
    at its end         means of the moves        ->  a new center, and new own parameters: each
                                                     worker adds what it has moved in this step

A compiler can have a collective under way beside products only where both are in one branch of the
program. So there are two branches, each with a step in it: one meets and one does not. Which part
of the parameters meets is not known to either: it is put into buffers that are as large as the
largest part, and what comes back is taken out of them.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.collectives._exact import Parameter, averaged_axes
from shardlib.collectives._fragments import fragments
from shardlib.collectives._meetings import Meeting, wide, wide_dtype
from shardlib.collectives._worker_sums import WorkerAxes, axes_of_workers
from shardlib.layouts._specs import axes_without, parts_over
from shardlib.step._exchange import ErrorsByPath
from shardlib.step._meeting import (
    Described,
    ExchangeMeeting,
    Means,
    Sent,
    Shared,
    manual_over,
    specs_of,
)
from shardlib.step._scopes import EXCHANGE
from shardlib.step._state import Layout
from shardlib.step._workers import of_one, with_dim

TakeStep = Callable[[], tuple[Any, Any]]


def meet_meanwhile(
    layout: Layout, shared: Shared, steps: jax.Array, take_step: TakeStep
) -> tuple[jax.Array, Shared, Any]:
    """A step of a worker, and in the meantime a meeting if one is due.

    It is called where the axes of the workers are manual, and makes all others manual for what is
    sent. Returns whether workers have met, what they have then, and whatever else the step gives.

    Args:
        layout: the layout of the state, whose exchange says when workers meet.
        shared: what workers have before the step.
        steps: the number of steps taken, without this one.
        take_step: gives the worker's own parameters after the step, and anything else.
    """
    exchange: Any = layout.strategy.exchange
    due, which = exchange.is_due(steps) & (steps > 0), exchange.fragment_at(steps)
    meeting = _Meanwhile(layout, exchange, shared.center)

    def apart() -> tuple[Shared, Any]:
        own, others = take_step()
        return shared._replace(own=own), others

    def meet() -> tuple[Shared, Any]:
        sent = meeting.send(shared, which)
        own, others = take_step()
        # What is left to do within workers comes after the step. Joined with what the step sends
        # there, it would have that wait for the other workers.
        sent, own = lax.optimization_barrier((sent, own))
        met = meeting.receive(shared, sent, which)

        def moved_on(end: jax.Array, start: jax.Array, met: jax.Array) -> jax.Array:
            # Where no part has met, what is added is exactly zero.
            return (wide(end) + (wide(met) - wide(start))).astype(end.dtype)

        return met._replace(own=jax.tree.map(moved_on, own, shared.own, met.own)), others

    # If some part meets in every step there is nothing to choose.
    if exchange.every == exchange.fragments:
        return due, *meet()
    return due, *lax.cond(due, meet, apart)


class _Sent(NamedTuple):
    """What devices have been sent, and the errors of codes."""

    arrays: Sent
    errors: ErrorsByPath


class _Meanwhile:
    """The two halves of a meeting, on the arrays of one worker."""

    def __init__(self, layout: Layout, exchange: Meeting, center: Any) -> None:
        described = Described.of(layout.parameters_of(center))
        sizes = layout.strategy.device_mesh.shape
        self.parts: list[ExchangeMeeting] = []
        for fragment in fragments(described.parameters, exchange.fragments, sizes):
            self.parts.append(ExchangeMeeting(layout, exchange, described, fragment))
        self.buffers = None
        if len(self.parts) > 1:
            dtypes = [wide_dtype(leaf.dtype) for leaf in described.leaves(center)]
            self.buffers = _Buffers(layout, exchange, self.parts, dtypes)
        self.others = axes_without(layout.strategy.every_axis, layout.apart)
        self.layout, self.described = layout, described

    def send(self, shared: Shared, which: jax.Array) -> _Sent:
        """All that goes between workers, of the part of the parameters that meets."""

        def on_shards(shared: Shared, which: jax.Array) -> _Sent:
            with jax.named_scope(EXCHANGE):
                sent, errors = self._means.send(self._moves(shared, which), shared.errors)
            # What a device has is its own, along a dim of devices.
            return _Sent(with_dim(sent), errors)

        before = specs_of(self.layout, self.described, shared)
        after = _Sent(self._own, before.errors)
        return manual_over(self.others, on_shards, before, after)(shared, which)

    def receive(self, shared: Shared, sent: _Sent, which: jax.Array) -> Shared:
        """What workers have once these have come."""

        def on_shards(both: tuple[Shared, _Sent], which: jax.Array) -> Shared:
            shared, sent = both
            with jax.named_scope(EXCHANGE):
                means = self._means.receive(self._moves(shared, which), of_one(sent.arrays))
            shared = shared._replace(errors=sent.errors)
            if self.buffers is None:
                return self.parts[0].met(shared, means)
            return lax.switch(which, self._receivers(self.buffers), shared, means)

        after = specs_of(self.layout, self.described, shared)
        before = after, _Sent(self._own, after.errors)
        return manual_over(self.others, on_shards, before, after)((shared, sent), which)

    @property
    def _own(self) -> Any:
        """How a device's own arrays are laid out, whatever tree they are."""
        return PartitionSpec(self.others)

    @property
    def _means(self) -> Means:
        return self.parts[0].means if self.buffers is None else self.buffers.means

    def _moves(self, shared: Shared, which: jax.Array) -> list[jax.Array]:
        """How far this worker has moved, as arrays of their own or in buffers."""
        if self.buffers is None:
            return self.parts[0].moves(shared)
        return lax.switch(which, self._packers(self.buffers), shared)

    def _packers(self, buffers: "_Buffers") -> list[Callable[[Shared], list[jax.Array]]]:
        """For each part, what workers put into the buffers."""

        def packer(number: int, part: ExchangeMeeting) -> Callable[[Shared], list[jax.Array]]:
            return lambda shared: buffers.pack(number, part.moves(shared))

        return [packer(number, part) for number, part in enumerate(self.parts)]

    def _receivers(self, buffers: "_Buffers") -> list[Callable[..., Shared]]:
        """For each part, what workers have when it has met, from what is in the buffers."""

        def receiver(number: int, part: ExchangeMeeting) -> Callable[..., Shared]:
            def receive(shared: Shared, means: Sequence[jax.Array]) -> Shared:
                return part.met(shared, buffers.unpack(number, means, part.moves(shared)))

            return receive

        return [receiver(number, part) for number, part in enumerate(self.parts)]


class _Kind(NamedTuple):
    """What arrays have in common that may share a buffer.

    Attributes:
        axes: those of the workers, those that split the array, and all others.
        coded: whether it is sent as codes.
        dtype: of its moves.
    """

    axes: WorkerAxes
    coded: bool
    dtype: Any


@dataclass
class _Buffer:
    """A flat array of one kind, in which a device has its moves of any one part.

    Attributes:
        first: the first of the parameters that it is for.
        length: as many elements as the part has that has most.
    """

    first: Parameter
    length: int = 0


class _Buffers:
    """The buffers for the parts of some parameters.

    Args:
        layout: the layout of the state.
        exchange: the exchange, which says what is sent as codes.
        parts: meetings of each of the parts.
        dtypes: the dtype of the moves of each parameter.
    """

    def __init__(
        self,
        layout: Layout,
        exchange: Meeting,
        parts: Sequence[ExchangeMeeting],
        dtypes: Sequence[Any],
    ) -> None:
        self.sizes = layout.strategy.device_mesh.shape
        self.by_kind: dict[_Kind, _Buffer] = {}
        # Of each part, the kind of each of its arrays.
        self.kinds_of_parts: list[list[_Kind]] = []
        for part in parts:
            kinds: list[_Kind] = []
            lengths: Counter[_Kind] = Counter()
            for one in part.fragment:
                parameter = one.parameter
                axes = axes_of_workers(
                    averaged_axes(layout.apart, parameter), parameter, self.sizes
                )
                kind = _Kind(axes, bool(exchange.over(parameter)), dtypes[one.position])
                kinds.append(kind)
                lengths[kind] += self._elements(parameter, axes)
                self.by_kind.setdefault(kind, _Buffer(parameter))
            self.kinds_of_parts.append(kinds)
            for kind, length in lengths.items():
                buffer = self.by_kind[kind]
                buffer.length = max(buffer.length, length)
        described = [self._described(kind, buffer) for kind, buffer in self.by_kind.items()]
        self.means = Means(layout, exchange.by, described)

    def _elements(self, parameter: Parameter, axes: WorkerAxes) -> int:
        """How many elements a device has of a parameter."""
        return math.prod(parameter.shape) // parts_over(self.sizes, axes.split)

    def _described(self, kind: _Kind, buffer: _Buffer) -> Parameter:
        """A buffer as an exchange is told of it: a vector, split as its arrays are."""
        split = kind.axes.split
        shape = (buffer.length * parts_over(self.sizes, split),)
        spec = PartitionSpec(split or None)
        return buffer.first._replace(shape=shape, spec=spec, stored=spec, stacked=0)

    def pack(self, number: int, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays of a part, put into the buffers and filled up with zeros."""
        packed = []
        for kind, buffer in self.by_kind.items():
            flat = [jnp.zeros(0, kind.dtype)]
            for own, x in zip(self.kinds_of_parts[number], arrays, strict=True):
                if own == kind:
                    flat.append(x.reshape(-1))
            joined = jnp.concatenate(flat)
            packed.append(jnp.pad(joined, (0, buffer.length - joined.size)))
        return packed

    def unpack(
        self, number: int, buffers: Sequence[jax.Array], like: Sequence[jax.Array]
    ) -> list[jax.Array]:
        """The arrays of a part, of these shapes, taken out of the buffers."""
        ends: Counter[_Kind] = Counter()
        by_kind = dict(zip(self.by_kind, buffers, strict=True))
        arrays = []
        for kind, x in zip(self.kinds_of_parts[number], like, strict=True):
            first = ends[kind]
            ends[kind] = first + x.size
            arrays.append(by_kind[kind][first : ends[kind]].reshape(x.shape))
        return arrays
