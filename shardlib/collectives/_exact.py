"""What happens to gradients between the devices that computed them: one pluggable value, and the
exact one.

The gradient of each device's own total, summed over microbatches, is a contribution; the gradient
of a batch is the sum of all, divided by the weight of the batch. The step adds contributions up
exactly, and lays the sum out as ZeRO says, over all axes but those that its exchange takes. Over
these an exchange averages, manual over every axis of the mesh, on each device's own shard, once per
step however many microbatches there were.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.collectives._sums import BUCKET_BYTES, in_pieces, sum_scatter
from shardlib.layouts._rules import as_tuple


class Parameter(NamedTuple):
    """What an exchange knows of a parameter.

    That is its path, its global shape, its layout, and the axes over which to reduce it.
    """

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec  # of the contributions to its gradient
    axes: tuple[str, ...]  # the data axes that do not split these: its gradient is a sum over them
    # Of the parameter at rest, which ZeRO may have split further than the contributions.
    stored: PartitionSpec
    reduce: Any = jnp.float32  # the dtype in which to add up


class Exchange:
    """How the gradients of workers are averaged.

    An exchange is a frozen dataclass derived from this.

    A worker is all that has one place along the axes that the exchange takes: a device, a pod. Over
    the other axes its gradient is there already, summed exactly by `within`, laid out as the
    parameter is at rest.
    """

    @property
    def within(self) -> "Exact":
        """How the sums go that are exact."""
        return Exact()

    @property
    def keeps_errors(self) -> bool:
        """Whether `average` is handed what it left over in the step before."""
        return False

    @property
    def axes(self) -> tuple[str, ...]:
        """The data axes over which gradients are averaged here."""
        raise NotImplementedError

    def over(self, parameter: Parameter) -> tuple[str, ...]:
        """Over which of these a parameter's are; it is summed exactly over all others that do not
        split it.
        """
        return (
            tuple(axis for axis in self.axes if axis in parameter.axes)
            if math.prod(parameter.shape)
            else ()
        )

    def average(
        self,
        gradients: Sequence[jax.Array],
        parameters: Sequence[Parameter],
        inputs: "ExchangeInputs",
    ) -> tuple[list[jax.Array], Sequence[Any]]:
        """The mean over workers of each gradient, and what of it is left over for the next step.

        Shapes are those of a device's own shards; a mean is the same on all workers.
        """
        raise NotImplementedError


class ExchangeInputs(NamedTuple):
    """What an exchange is given besides the gradients, for each of them."""

    # The axes along which it is the same on every device, for they do not split it.
    shared: Sequence[tuple[str, ...]]
    # What was left over of it in the step before, `Errors`, if the exchange keeps some.
    errors: Sequence[Any]
    alive: Sequence[jax.Array | None]  # where it is not always zero, if that is known


@dataclass(frozen=True)
class Exact(Exchange):
    """The exact sum of gradients, laid out as the parameter is at rest.

    It is whole, or scattered where ZeRO has split the parameter further.

    What is summed whole goes in as few collectives as `bucket_bytes` allows, and what is scattered
    and is smaller than that is put together into buckets of that size, ZeRO's constant buffers;
    larger stacks go one layer after the other.

    With `overlap`, a layer's gradients go as soon as they are there, in the backward pass of the
    last microbatch, and a machine may go on with the next layer meanwhile. That pass is then
    compiled apart from those before.
    """

    bucket_bytes: int = BUCKET_BYTES
    overlap: bool = False

    def __post_init__(self) -> None:
        size = check.whole("Exact", "bucket_bytes", self.bucket_bytes, "a number of bytes", least=1)
        check.assign(
            self, bucket_bytes=size, overlap=check.boolean("Exact", "overlap", self.overlap)
        )

    @property
    def within(self) -> "Exact":
        """The exchange itself, since all of it is exact."""
        return self

    @property
    def axes(self) -> tuple[str, ...]:
        """No axes: every gradient is summed exactly over all of them."""
        return ()

    def reduce(
        self, contributions: Sequence[jax.Array], weight: jax.Array, parameters: Sequence[Parameter]
    ) -> list[jax.Array]:
        """Sum each contribution over its parameter's axes, laid out as the parameter at rest, and
        divide by the weight.

        What is stored split further is scattered, in buckets; the rest is summed, in one go for all
        that have the same axes.

        The division comes after it: there it is one more factor in the optimizer's own pass over
        the gradient, and no device waits for the weight before it goes backward.
        """
        reduced = [
            g.astype(parameter.reduce)
            for g, parameter in zip(contributions, parameters, strict=True)
        ]
        splits = [_scattered(parameter) for parameter in parameters]
        for axes in dict.fromkeys(axes for _, axes in splits if axes):
            members = [i for i, split in enumerate(splits) if split[1] == axes]
            for bucket in buckets(reduced, members, self.bucket_bytes):
                parts = _scatter(
                    [reduced[i] for i in bucket],
                    [splits[i][0] for i in bucket],
                    axes,
                    self.bucket_bytes,
                )
                for i, part in zip(bucket, parts, strict=True):
                    reduced[i] = part
        left = [
            tuple(axis for axis in parameter.axes if axis not in axes)
            for parameter, (_, axes) in zip(parameters, splits, strict=True)
        ]
        for axes in dict.fromkeys(filter(None, left)):
            members = [i for i, over in enumerate(left) if over == axes]
            for bucket in buckets(reduced, members, self.bucket_bytes):
                for i, total in zip(
                    bucket, lax.psum([reduced[i] for i in bucket], axes), strict=True
                ):
                    reduced[i] = total
        each = inverse(weight)
        return [total * each.astype(total.real.dtype) for total in reduced]


def _scattered(parameter: Parameter) -> tuple[int, tuple[str, ...]]:
    """The dim over which a sum is scattered, and over which axes; of one that is not, no axes."""
    for dim, entry in enumerate(parameter.stored):
        if axes := tuple(axis for axis in as_tuple(entry) if axis in parameter.axes):
            return dim, axes
    return 0, ()


def buckets(arrays: Sequence[jax.Array], members: Sequence[int], limit: int) -> list[list[int]]:
    """Members in groups of one dtype and at most `limit` bytes, in order; what is larger goes
    alone.
    """
    buckets: list[list[int]] = []
    filled: dict[Any, int] = {}
    last: dict[Any, list[int]] = {}
    for i in members:
        size, dtype = arrays[i].nbytes, arrays[i].dtype
        if dtype not in last or filled[dtype] + size > limit:
            last[dtype], filled[dtype] = [], 0
            buckets.append(last[dtype])
        last[dtype].append(i)
        filled[dtype] += size
    return buckets


def _scatter(
    arrays: list[jax.Array], dims: list[int], axes: tuple[str, ...], limit: int
) -> list[jax.Array]:
    """Sums over `axes`, of which each device keeps its part of a dim of each array, in one
    collective.
    """
    if len(arrays) == 1:
        ((array,), (dim,)) = arrays, dims
        if dim and array.nbytes > limit:
            return [
                in_pieces(partial(sum_scatter, axes=axes), array, dim, -(-array.nbytes // limit))
            ]
        return [sum_scatter(array, dim, axes)]
    parts = math.prod(lax.axis_size(axis) for axis in axes)
    # Each device's part of each array is one row of the buffer, so that one scatter of its rows
    # does for all.
    rows, shapes = [], []
    for x, dim in zip(arrays, dims, strict=True):
        shape = (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
        moved = jnp.moveaxis(x.reshape(shape), dim, 0)
        rows.append(moved.reshape(parts, -1))
        shapes.append(moved.shape[1:])
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    padding = jnp.zeros((parts, -ends[-1] % _TILE), arrays[0].dtype)
    mine = sum_scatter(jnp.concatenate([*rows, padding], axis=1), 0, axes)[0]
    return [
        mine[end - math.prod(shape) : end].reshape(shape)
        for end, shape in zip(ends, shapes, strict=True)
    ]


_TILE = 16 * 128  # a row of the buffer fills tiles of a TPU


def inverse(weight: jax.Array) -> jax.Array:
    """One over the weight; of a batch of which nothing counts zero, so that loss and gradient are
    zero and not nan.
    """
    return jnp.where(weight == 0, 0.0, 1 / jnp.where(weight == 0, 1.0, weight))
