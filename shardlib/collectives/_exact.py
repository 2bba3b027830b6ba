"""What happens to gradients between the devices that computed them: exchanges, and the exact one.

The gradient of each device's own total, summed over microbatches, is a contribution. The gradient
of a batch is the sum of all contributions, divided by the weight of the batch:

    contributions          one for each device
        |  exact sum, laid out as ZeRO says, over all axes but those that the exchange takes
    gradients of workers   one for each position along these
        |  exchange, over these
    their mean

An exchange is manual over every axis of the mesh, works on each device's own shard, and runs once
per step however many microbatches there were.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.collectives._sums import BUCKET_BYTES, in_pieces, sum_scatter, sum_together, sum_whole
from shardlib.layouts._specs import as_tuple, axes_within, axes_without

_TILE = 16 * 128  # elements of a tile of a TPU, for dtypes of 16 bits; two tiles for 32 bits


class Parameter(NamedTuple):
    """What an exchange knows of one parameter: its place in the model, its shape and layouts.

    - `path`: its path in the tree of parameters, such as `"mlp/up"`.
    - `shape`: its global shape.
    - `spec`: the layout of the contributions to its gradient.
    - `axes`: the data axes that do not split these: its gradient is a sum over them.
    - `stored`: the layout of the parameter at rest, which ZeRO may have split further than the
      contributions.
    - `reduce`: the dtype in which gradients are added up.
    - `wire`: the dtype in which contributions are sent; None is `reduce`.
    - `stacked`: how many leading dims stack layers or experts.
    """

    path: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    axes: tuple[str, ...]
    stored: PartitionSpec
    reduce: Any = jnp.float32
    wire: Any = None
    stacked: int = 0


class Exchange:
    """How the gradients of workers are averaged.

    An exchange is a frozen dataclass derived from this.

    A worker is all that has one position along the axes that the exchange takes: a device, a pod.
    Over the other axes its gradient is there already, summed exactly by `within`, laid out as the
    parameter is at rest.
    """

    @property
    def within(self) -> "Exact":
        """The exact sums, over the axes that the exchange does not take."""
        return Exact()

    @property
    def keeps_errors(self) -> bool:
        """Whether `average` is handed what it left over in the step before.

        Then the state of a run holds that, and checkpoints do.
        """
        return False

    @property
    def axes(self) -> tuple[str, ...]:
        """The data axes over which gradients are averaged here."""
        raise NotImplementedError

    @property
    def by(self) -> "Exchange":
        """The exchange that averages: itself, unless it leaves that to another one."""
        return self

    @property
    def apart(self) -> tuple[str, ...]:
        """The axes along which workers have parameters of their own; none if all have the same."""
        return ()

    def over(self, parameter: Parameter) -> tuple[str, ...]:
        """The axes over which a parameter's gradient is averaged here.

        It is summed exactly over all others that do not split the parameter.
        """
        return averaged_axes(self.axes, parameter)

    def first_errors(self, parameter: Parameter, sizes: Mapping[str, int]) -> Any:
        """What a device has left over of a parameter before the first step, if errors are kept.

        `sizes` are those of the mesh's axes.
        """
        raise NotImplementedError

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


def averaged_axes(axes: tuple[str, ...], parameter: Parameter) -> tuple[str, ...]:
    """The axes of an exchange that do not split a parameter; none for one without elements."""
    if not math.prod(parameter.shape):
        return ()
    return axes_within(axes, parameter.axes)


class ExchangeInputs(NamedTuple):
    """What `Exchange.average` is given besides the gradients; each field has an item for each.

    - `shared`: the axes along which a gradient is the same on every device, for they do not split
      it.
    - `errors`: what was left over of it in the step before, of the type that `first_errors` gives;
      None if the exchange keeps nothing.
    - `alive`: bools, false where it is always zero; None if that is not known.
    """

    shared: Sequence[tuple[str, ...]]
    errors: Sequence[Any]
    alive: Sequence[jax.Array | None]


@dataclass(frozen=True)
class Exact(Exchange):
    """The exact sum of gradients, laid out as the parameter is at rest.

    It is whole, or scattered where ZeRO has split the parameter further.

    - `bucket_bytes`: how many bytes are sent together, 32 MiB unless given. What is summed whole
      goes in as few collectives as this allows, and what is scattered and is smaller is put
      together into buckets of this size, ZeRO's constant buffers; larger stacks go one layer after
      the other.
    - `overlap`: whether a layer's gradients go as soon as they are there, in the backward pass of
      the last microbatch, so that a machine may go on with the next layer meanwhile. That pass is
      then compiled apart from those before.
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
        """Sum each contribution over its parameter's axes, and divide by the weight.

        The sum is laid out as the parameter at rest: what is stored split further is scattered, in
        buckets; all others are summed whole, together where they have the same axes.

        The division comes after the sum: there it is one more factor in the optimizer's own pass
        over the gradient, and no device waits for the weight before it goes backward.
        """
        reduced = []
        for contribution, parameter in zip(contributions, parameters, strict=True):
            reduced.append(contribution.astype(parameter.reduce))
        self._scatter_split(reduced, parameters)
        self._sum_whole(reduced, parameters)
        return [_divided(total, weight) for total in reduced]

    def _scatter_split(self, reduced: list[jax.Array], parameters: Sequence[Parameter]) -> None:
        """Exchange the arrays that are stored split for this device's part of their sums."""
        splits = [_scattered(parameter) for parameter in parameters]
        wires = [parameter.wire for parameter in parameters]
        for (axes, wire), members in _together([split.axes for split in splits], wires).items():
            for bucket in buckets(reduced, members, self.bucket_bytes):
                arrays = [reduced[i] for i in bucket]
                dims = [splits[i].dim for i in bucket]
                parts = _scatter(arrays, dims, axes, wire, self.bucket_bytes)
                for i, part in zip(bucket, parts, strict=True):
                    reduced[i] = part

    def _sum_whole(self, reduced: list[jax.Array], parameters: Sequence[Parameter]) -> None:
        """Exchange each array for its sum over the axes over which it has not been scattered."""
        remaining = []
        wires = [parameter.wire for parameter in parameters]
        for parameter in parameters:
            scattered = _scattered(parameter).axes
            remaining.append(axes_without(parameter.axes, scattered))
        for (axes, wire), members in _together(remaining, wires).items():
            for bucket in buckets(reduced, members, self.bucket_bytes):
                totals = _sum([reduced[i] for i in bucket], axes, wire)
                for i, total in zip(bucket, totals, strict=True):
                    reduced[i] = total


def _together(
    axes: Sequence[tuple[str, ...]], wires: Sequence[Any]
) -> dict[tuple[tuple[str, ...], Any], list[int]]:
    """The positions of arrays that can share a collective, in order, by axes and dtype on the wire.

    Arrays without axes are left out.
    """
    members: dict[tuple[tuple[str, ...], Any], list[int]] = {}
    for i, each in enumerate(zip(axes, wires, strict=True)):
        if each[0]:
            members.setdefault(each, []).append(i)
    return members


def _sum(arrays: list[jax.Array], axes: tuple[str, ...], wire: Any) -> list[jax.Array]:
    """Sums over `axes`, on every device, of arrays of one dtype.

    What is sent in another dtype goes as one long array, of which each device adds up a part.
    """
    if wire is None or wire == arrays[0].dtype:
        return sum_together(arrays, axes)
    ends = list(itertools.accumulate(x.size for x in arrays))
    joined = jnp.concatenate([x.reshape(-1) for x in arrays])
    total = sum_whole(joined, axes, wire)
    sums = []
    for x, end in zip(arrays, ends, strict=True):
        sums.append(total[end - x.size : end].reshape(x.shape))
    return sums


class _Scattered(NamedTuple):
    """The dim along which a sum is scattered, and over which axes; no axes if it is not."""

    dim: int
    axes: tuple[str, ...]


def _scattered(parameter: Parameter) -> _Scattered:
    """How the sum of a parameter's gradients is scattered: as the parameter is stored split.

    ZeRO splits at most one dim over axes of the data.
    """
    for dim, entry in enumerate(parameter.stored):
        axes = axes_within(as_tuple(entry), parameter.axes)
        if axes:
            return _Scattered(dim, axes)
    return _Scattered(0, ())


@dataclass
class _Bucket:
    """Arrays that share a collective, by number, and the bytes that they have together."""

    members: list[int] = field(default_factory=list)
    bytes: int = 0


def buckets(arrays: Sequence[jax.Array], members: Sequence[int], limit: int) -> list[list[int]]:
    """Some of the arrays in groups of one dtype and at most `limit` bytes, by their positions.

    Groups are filled in order. An array that is larger than the limit is a group by itself.
    """
    buckets: list[_Bucket] = []
    # A collective takes arrays of one dtype, so a bucket of each is being filled.
    bucket_of_dtype: dict[Any, _Bucket] = {}
    for i in members:
        size, dtype = arrays[i].nbytes, arrays[i].dtype
        bucket = bucket_of_dtype.get(dtype)
        if bucket is None or bucket.bytes + size > limit:
            bucket = _Bucket()
            bucket_of_dtype[dtype] = bucket
            buckets.append(bucket)
        bucket.members.append(i)
        bucket.bytes += size
    return [bucket.members for bucket in buckets]


def _scatter(
    arrays: list[jax.Array], dims: list[int], axes: tuple[str, ...], wire: Any, limit: int
) -> list[jax.Array]:
    """Sums over `axes`, of which each device keeps its part of a dim of each array.

    Several arrays go in one collective, as columns of a buffer that has a row for each device:

        row of device 0   | its part of array 0 | its part of array 1 | ... | padding |
        row of device 1   | its part of array 0 | its part of array 1 | ... | padding |
    """
    if len(arrays) == 1:
        return [_scatter_one(arrays[0], dims[0], axes, wire, limit)]
    parts = lax.axis_size(axes)
    rows, shapes = [], []
    for x, dim in zip(arrays, dims, strict=True):
        shape = (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
        # The dim is cut into parts, which come first: one for each device.
        moved = jnp.moveaxis(x.reshape(shape), dim, 0)
        rows.append(moved.reshape(parts, -1))
        shapes.append(moved.shape[1:])
    ends = list(itertools.accumulate(map(math.prod, shapes)))
    padding = jnp.zeros((parts, -ends[-1] % _TILE), arrays[0].dtype)
    # Padded to whole tiles, in which a TPU scatters.
    local_row = sum_scatter(jnp.concatenate([*rows, padding], axis=1), 0, axes, wire)[0]
    sums = []
    for end, shape in zip(ends, shapes, strict=True):
        sums.append(local_row[end - math.prod(shape) : end].reshape(shape))
    return sums


def _scatter_one(x: jax.Array, dim: int, axes: tuple[str, ...], wire: Any, limit: int) -> jax.Array:
    """The scatter of one array; a large one along another dim than the first goes in pieces.

    Pieces of at most `limit` bytes are sent one after the other, so that their buffers need not
    exist all at once.
    """
    if dim and x.nbytes > limit:
        return in_pieces(partial(sum_scatter, axes=axes, wire=wire), x, dim, -(-x.nbytes // limit))
    return sum_scatter(x, dim, axes, wire)


def _divided(total: jax.Array, weight: jax.Array) -> jax.Array:
    """A sum divided by the weight of a batch, rounded once; zero if the weight is zero.

    The factor is the same for all sums of a dtype, so that it is computed once.
    """
    dtype, real = total.dtype, total.real.dtype
    if jnp.finfo(real).bits < 32:
        total, real = total.astype(jnp.float32), jnp.dtype(jnp.float32)
    return (total * inverse(weight.astype(real))).astype(dtype)


def inverse(weight: jax.Array) -> jax.Array:
    """One over the weight of a batch, and zero if the weight is zero.

    If nothing in a batch counts, loss and gradient are then zero and not nan.
    """
    # The division comes last: XLA copies cheap operations on a scalar into every loop that uses the
    # result, here one or more for each parameter, but not a division. One over infinity is zero,
    # and so is its derivative.
    return 1 / jnp.where(weight == 0, jnp.inf, weight)
