"""Workers around a server that has the parameters: asynchronous SGD, one round of it in each step.

In a round every worker has a gradient, taken at the parameters that it was given in the round
before. They arrive one after the other, and the server takes an update with each:

    server         p0 --gradient of worker 0--> p1 --gradient of worker 1--> p2 ...
    worker 0       goes on from p1
    worker 1       goes on from p2

Of n workers, each gradient is older than the parameters that it moves by n - 1 updates. Every
device is the server of a part of the parameters. So the gradients of all workers go to it in one
exchange of parts, an all-to-all, and what workers go on from comes back in another. If several
devices of a worker hold the same, each sends its share of it, and they gather what has come.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.collectives._exact import Exchange, buckets
from shardlib.collectives._exchanges import check_axis
from shardlib.collectives._worker_sums import other_axes
from shardlib.collectives._zero import Zero
from shardlib.collectives._zero_split import Split, split_further
from shardlib.layouts._specs import as_tuple, spec_axes


@dataclass(frozen=True)
class ParameterServer(Exchange):
    """Workers send their gradients to a server, each to be used by itself: asynchronous SGD.

    Each worker computes with parameters of its own, which it was given after its last gradient was
    used; those of all others were used meanwhile. They take turns, as in arXiv 0911.0491, so that a
    run is the same every time. In a step the optimizer takes as many updates as there are workers,
    and its schedule and its counts see each of them.

    - `axis`: the axis of the mesh whose positions are the workers, or a tuple of several. The
      server's parameters and its optimizer's state are split over their devices.

    >>> import optax, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data,
    ...     exchange=sl.collectives.ParameterServer("data"))
    >>> state = sl.init(lambda: {"w": jnp.zeros(16)}, optax.adam(0.1), strategy)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1) ** 2), strategy)
    >>> state, metrics = step(state, jnp.ones((8, 16)))
    >>> state.opt_state[0].count.item()
    8
    """

    axis: str | tuple[str, ...]

    def __post_init__(self) -> None:
        check_axis("ParameterServer", self.axis)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the workers, as a tuple."""
        return as_tuple(self.axis)

    @property
    def apart(self) -> tuple[str, ...]:
        """The same axes: workers have parameters of their own along all of them."""
        return self.axes


def split_of_server(
    zero: Zero,
    apart: tuple[str, ...],
    sizes: Mapping[str, int],
    shape: tuple[int, ...],
    of_worker: Split,
    names: Any,
) -> Split:
    """How the server's copy of a parameter is split over workers, besides how each worker's is.

    Args:
        zero: what is too small to be split, and which dims stack layers.
        apart: the axes of the workers.
        sizes: the sizes of all axes of the mesh.
        shape: of the parameter.
        of_worker: how a worker's copy is split.
        names: the names of its dims.
    """
    return split_further(zero, apart, sizes, shape, of_worker.spec, names, only_whole=False)


class ServerAxes(NamedTuple):
    """The axes along which workers and their devices lie.

    Attributes:
        apart: those of the workers.
        sizes: of all axes of the mesh.
    """

    apart: tuple[str, ...]
    sizes: Mapping[str, int]

    def shared(self, split: Split) -> tuple[str, ...]:
        """The axes along which a worker's devices hold the same of what the server splits so."""
        return other_axes(self.sizes, (*self.apart, *spec_axes(split.spec)))


def to_server(
    arrays: Sequence[jax.Array], splits: Sequence[Split], axes: ServerAxes, bucket_bytes: int
) -> list[jax.Array]:
    """Give each device what all workers have of the parts that it serves: `(workers, *part)`.

    It is called where all axes are manual, with a device's shards of what its worker has. What is
    not split is given to every device whole.

    Args:
        arrays: the shards.
        splits: how the server's are split, one for each.
        axes: those of the workers, and their sizes.
        bucket_bytes: the most bytes that go in one collective, unless one array has more.
    """
    arrived = list(arrays)
    for shared, split in _by_shared(splits, axes).items():
        for bucket in buckets(arrays, split, bucket_bytes):
            parts = [_cut(arrays[i], splits[i], lax.axis_size(axes.apart)) for i in bucket]
            columns = _exchanged(parts, axes.apart, shared)
            for i, column in zip(bucket, columns, strict=True):
                arrived[i] = column
    for bucket in buckets(arrays, _whole(splits), bucket_bytes):
        gathered = lax.all_gather([arrays[i] for i in bucket], axes.apart)
        for i, rows in zip(bucket, gathered, strict=True):
            arrived[i] = rows
    return arrived


def to_workers(
    arrays: Sequence[jax.Array], splits: Sequence[Split], axes: ServerAxes, bucket_bytes: int
) -> list[jax.Array]:
    """Give each worker what all devices have for it: undoes `to_server`, with the same arguments.

    What every device has whole, of all workers, is sent nowhere.
    """
    arrived = list(arrays)
    for shared, split in _by_shared(splits, axes).items():
        for bucket in buckets(arrays, split, bucket_bytes):
            columns = _exchanged([arrays[i] for i in bucket], axes.apart, shared)
            for i, column in zip(bucket, columns, strict=True):
                arrived[i] = _joined(column, splits[i])
    for i in _whole(splits):
        arrived[i] = arrays[i][lax.axis_index(axes.apart)]
    return arrived


def _by_shared(splits: Sequence[Split], axes: ServerAxes) -> dict[tuple[str, ...], list[int]]:
    """The positions of what is split, by the axes along which a worker's devices hold the same."""
    positions: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for position, split in enumerate(splits):
        if split.dim is not None:
            positions[axes.shared(split)].append(position)
    return positions


def _whole(splits: Sequence[Split]) -> list[int]:
    """The positions of what is not split."""
    return [position for position, split in enumerate(splits) if split.dim is None]


def _cut(x: jax.Array, split: Split, parts: int) -> jax.Array:
    """An array with the parts of its split dim in front, one for each server."""
    dim: Any = split.dim
    shape = (*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
    return jnp.moveaxis(x.reshape(shape), dim, 0)


def _joined(parts: jax.Array, split: Split) -> jax.Array:
    """The array that was cut into parts."""
    dim: Any = split.dim
    moved = jnp.moveaxis(parts, 0, dim)
    shape = moved.shape
    return moved.reshape(*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])


def _exchanged(
    arrays: Sequence[jax.Array], apart: tuple[str, ...], shared: tuple[str, ...]
) -> Iterator[jax.Array]:
    """Arrays with a row for each worker, each row sent to its worker, all in one collective.

    Devices along the axes `shared` hold the same: each sends a share of the columns.
    """
    rows = jnp.concatenate([x.reshape(x.shape[0], -1) for x in arrays], axis=1)
    if shared:
        shares = lax.axis_size(shared)
        rows = jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % shares)))
        rows = rows.reshape(len(rows), shares, -1)[:, lax.axis_index(shared)]
    rows = lax.all_to_all(rows, apart, 0, 0, tiled=True)
    if shared:
        rows = lax.all_gather(rows, shared, axis=1, tiled=True)
    first = 0
    for x in arrays:
        last = first + math.prod(x.shape[1:])
        yield rows[:, first:last].reshape(x.shape)
        first = last
