"""Exact sums over workers, of arrays of which some devices of a worker hold the same values."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.collectives._exact import Parameter, buckets
from shardlib.collectives._sums import sum_together
from shardlib.layouts._specs import parts_over, spec_axes


class WorkerAxes(NamedTuple):
    """How the axes of a mesh fall into three for one parameter. Axes of one device may be in none.

    Attributes:
        over: along these lie the workers, each with an array of its own. Empty if the exchange
            does not take the parameter.
        split: along these, devices hold different parts of it, as it is stored.
        shared: along all others, devices hold the same values of it.
    """

    over: tuple[str, ...]
    split: tuple[str, ...]
    shared: tuple[str, ...]


def axes_of_workers(
    over: tuple[str, ...], parameter: Parameter, sizes: Mapping[str, int]
) -> WorkerAxes:
    """The axes for one parameter, of which the workers are along `over`.

    `sizes` are those of the mesh's axes.
    """
    split = spec_axes(parameter.stored)
    return WorkerAxes(over, split, other_axes(sizes, (*over, *split)))


def other_axes(sizes: Mapping[str, int], excluded: Sequence[str]) -> tuple[str, ...]:
    """The axes of a mesh, of more than one device, that are not among these."""
    axes = []
    for axis, size in sizes.items():
        if size > 1 and axis not in excluded:
            axes.append(axis)
    return tuple(axes)


def summed_over_workers(
    arrays: Sequence[jax.Array],
    axes: Sequence[WorkerAxes],
    sizes: Mapping[str, int],
    bucket_bytes: int,
) -> list[jax.Array]:
    """The exact sums over workers, on every device, where all axes are manual.

    If several devices of a worker hold the same values, each of them sums one part of these over
    workers, and then they gather the parts: the network between workers carries every value once.

    Args:
        arrays: a device's shards of what its worker has.
        axes: those of each array.
        sizes: how many devices the mesh has along each axis.
        bucket_bytes: the most bytes that go in one collective, unless one array has more.
    """
    sums = WorkerSums(arrays, axes, sizes, bucket_bytes)
    return sums.gathered(sums.of_parts(arrays))


class WorkerSums:
    """Such sums in two halves: over workers, and then within each. Arguments are as above."""

    def __init__(
        self,
        arrays: Sequence[jax.Array],
        axes: Sequence[WorkerAxes],
        sizes: Mapping[str, int],
        bucket_bytes: int,
    ) -> None:
        self.shapes = [x.shape for x in arrays]
        self.sizes = sizes
        self.buckets: list[_Bucket] = []
        for (over, shared), group in _groups_by_axes(axes).items():
            for positions in buckets(arrays, group, bucket_bytes):
                self.buckets.append(_Bucket(over, shared, positions))

    def of_parts(self, arrays: Sequence[jax.Array]) -> list[list[jax.Array]]:
        """For each bucket the sums over workers: whole arrays, or this device's part of them."""
        sums: list[list[jax.Array]] = []
        for bucket in self.buckets:
            own = [arrays[position] for position in bucket.positions]
            if bucket.shared:
                own = [_own_part(own, bucket.shared, parts_over(self.sizes, bucket.shared))]
            sums.append(sum_together(own, bucket.over))
        return sums

    def gathered(self, sums: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """All arrays, once the devices of a worker have told each other their parts."""
        totals: list[Any] = [None] * len(self.shapes)
        for bucket, own in zip(self.buckets, sums, strict=True):
            whole: Iterable[jax.Array] = own
            if bucket.shared:
                flat = lax.all_gather(own[0], bucket.shared, axis=0, tiled=True).reshape(-1)
                whole = _of_shapes([self.shapes[i] for i in bucket.positions], flat)
            for position, total in zip(bucket.positions, whole, strict=True):
                totals[position] = total
        return totals


class _Bucket(NamedTuple):
    """Arrays that are summed together, by position.

    Attributes:
        over: the axes of the workers, along which the sums go.
        shared: the axes along which the devices of a worker have the same arrays.
        positions: of the arrays.
    """

    over: tuple[str, ...]
    shared: tuple[str, ...]
    positions: list[int]


def _groups_by_axes(
    axes: Sequence[WorkerAxes],
) -> dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]]:
    """The positions of arrays that are summed over the same axes, which may go in one collective.

    The keys are the axes of the workers, and those along which a worker's devices hold the same.
    """
    groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = defaultdict(list)
    for position, own in enumerate(axes):
        groups[own.over, own.shared].append(position)
    return groups


def _own_part(arrays: list[jax.Array], shared: tuple[str, ...], count: int) -> jax.Array:
    """A device's part of arrays that are the same along the axes `shared`, of `count` devices.

    Together, so that small arrays share one collective of useful size.
    """
    flat = jnp.concatenate([x.reshape(-1) for x in arrays])
    # One row for each device; zeros fill up the last.
    rows = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
    return rows[lax.axis_index(shared)]


def _of_shapes(shapes: Sequence[tuple[int, ...]], flat: jax.Array) -> Iterator[jax.Array]:
    """The numbers of one array taken apart into arrays of these shapes, in order.

    What is left over is padding.
    """
    first = 0
    for shape in shapes:
        last = first + math.prod(shape)
        yield flat[first:last].reshape(shape)
        first = last
