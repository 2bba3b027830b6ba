"""Exact sums over workers, of arrays of which some devices of a worker hold the same values."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.collectives._exact import Parameter, buckets
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
    totals = list(arrays)
    for (over, shared), group in _groups_by_axes(axes).items():
        for bucket in buckets(arrays, group, bucket_bytes):
            parts = [arrays[position] for position in bucket]
            summed: Iterable[jax.Array] = lax.psum(parts, over)
            if shared:
                summed = _sums_in_parts(parts, over, shared, parts_over(sizes, shared))
            for position, total in zip(bucket, summed, strict=True):
                totals[position] = total
    return totals


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


def _sums_in_parts(
    arrays: list[jax.Array], over: tuple[str, ...], shared: tuple[str, ...], count: int
) -> Iterator[jax.Array]:
    """Sums of arrays that are the same along the axes `shared`, of which each device sums a part.

    Args:
        arrays: what is summed, each device's own summand.
        over: the axes of the workers, along which the sums go.
        shared: the axes along which all devices have the same arrays.
        count: how many devices there are along these.
    """
    # Together, so that small arrays share one collective of useful size.
    flat = jnp.concatenate([x.reshape(-1) for x in arrays])
    # One row for each device along `shared`; zeros fill up the last.
    rows = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
    part = lax.psum(rows[lax.axis_index(shared)], over)
    whole = lax.all_gather(part, shared, axis=0, tiled=True)
    return _shaped_like(arrays, whole.reshape(-1))


def _shaped_like(arrays: Sequence[jax.Array], flat: jax.Array) -> Iterator[jax.Array]:
    """The numbers of one array taken apart into arrays of the shapes of others, in order.

    What is left over is padding.
    """
    first = 0
    for x in arrays:
        yield flat[first : first + x.size].reshape(x.shape)
        first += x.size
