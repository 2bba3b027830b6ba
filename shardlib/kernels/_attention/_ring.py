"""A ring of devices, of which each has the queries and the keys of a stretch of a sequence.

Keys and values are passed on from each device to the next, so that after as many steps as there are
devices every query has met every key. While a device computes with one block, the next one travels:

    step       0      1      2      3
    device 0   0      3      2      1     blocks of keys; under a causal mask a device
    device 1   1      0      3      2     leaves out those of devices after it
    device 2   2      1      0      3
    device 3   3      2      1      0

Under a causal mask the last device has the most work. In zigzag order each device has an early and
a late stretch of the sequence, and all have equally many pairs of stretches in a step (`Order`).

Steps in which no query of any device sees a key are left out, where the mask alone says so: under a
window keys travel no further than it reaches. In zigzag order the neighbours of a device's two
stretches come from either side, so that only the first and the last steps are needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardlib.kernels._attention._mask import Mask
from shardlib.kernels._attention._reference import SideInputs
from shardlib.kernels._choice import device_here
from shardlib.layouts._annotate import mesh_of_shards
from shardlib.layouts._checkpoint_policies import SAME_RESULT
from shardlib.layouts._specs import parts_over

# If steps are left out in between, so many are unrolled at most. Beyond that all steps are run.
_MOST_UNROLLED = 8


class Block(NamedTuple):
    """The keys of one stretch of positions, with their values and segments."""

    k: jax.Array
    v: jax.Array
    segments: jax.Array | None


class Queries(NamedTuple):
    """The queries of one stretch of positions, with their segments."""

    q: jax.Array
    segments: jax.Array | None


@dataclass(frozen=True)
class Order:
    """Which stretches of a sequence each of the devices of a ring has.

        device       0    1    2    3
        in order     0    1    2    3
        zigzag       0 7  1 6  2 5  3 4

    - `size`: how many devices there are.
    - `zigzag`: whether each has an early and a late stretch.
    """

    size: int
    zigzag: bool

    @property
    def stretches(self) -> int:
        """How many stretches a device has."""
        return 2 if self.zigzag else 1

    def number(self, device: Any, stretch: int) -> Any:
        """Which stretch of the sequence a device has as its first, 0, or second, 1."""
        if stretch == 0:
            return device
        return 2 * self.size - 1 - device


@dataclass(frozen=True)
class Ring:
    """Devices that pass blocks of keys on, and one device's place among them.

    - `axes`: of the mesh, along which the devices follow each other.
    - `zigzag`: whether each device has an early and a late stretch of the sequence.
    - `mask`: which keys a query sees, by their positions.
    - `starts`: the positions of the first query and of the first key of all devices, if they are
      known before the program runs.
    - `lengths`: how many queries and keys a device has.
    - `side`: the other arrays of the device. Its `starts` are the positions of the first query of
      the device (in zigzag order: of all devices), and of the first key of all devices.
    """

    axes: tuple[str, ...]
    zigzag: bool
    mask: Mask
    starts: tuple[int, int] | None
    lengths: tuple[int, int]
    side: SideInputs

    @cached_property
    def order(self) -> Order:
        """Which stretches each device has."""
        return Order(parts_over(mesh_of_shards().shape, self.axes), self.zigzag)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """All pairs of a device's stretch of queries and a device's stretch of keys."""
        stretches = range(self.order.stretches)
        return [(queries, keys) for queries in stretches for keys in stretches]

    def cut(self, x: Any) -> list[Any]:
        """An array of a device, or None, by stretches of its positions, in dim 1."""
        if x is None or not self.zigzag:
            return [x] * self.order.stretches
        return list(jnp.split(x, 2, 1))

    def queries(self, q: jax.Array) -> list[Queries]:
        """A device's queries by stretches."""
        return list(map(Queries, self.cut(q), self.cut(self.side.query_segments)))

    def blocks(self, k: jax.Array, v: jax.Array) -> list[Block]:
        """A device's keys by stretches."""
        return list(map(Block, self.cut(k), self.cut(v), self.cut(self.side.key_segments)))

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps in which some device computes: always the first, with each device's own keys.

        In step `n` a device has the keys of the device `n` places before it.
        """
        size = self.order.size
        needed = [0]
        for step in range(1, size):
            if any(self._seen(step, *pair).any() for pair in self.pairs):
                needed.append(step)
        consecutive = needed[-1] == len(needed) - 1
        if consecutive or len(needed) <= _MOST_UNROLLED:
            return tuple(needed)
        return tuple(range(needed[-1] + 1))

    def _seen(self, step: int, queries: int, keys: int) -> np.ndarray:
        """For each device, whether in a step queries of one stretch may see keys of another.

        The band decides. Where only the running program knows positions, all may see all.
        """
        devices = np.arange(self.order.size)
        if self.starts is None:
            return np.ones(len(devices), bool)
        first_query = self.first_position(0, devices, queries, self.starts[0])
        sources = (devices - step) % self.order.size
        first_key = self.first_position(1, sources, keys, self.starts[1])
        return np.asarray(self._in_band(first_query, first_key)) & np.ones(len(devices), bool)

    def first_position(self, side: int, device: Any, stretch: int, start: Any) -> Any:
        """The first position of a device's stretch of queries, side 0, or of keys, side 1."""
        return start + self.order.number(device, stretch) * self._stretch_length(side)

    def _stretch_length(self, side: int) -> int:
        """How many positions a stretch of queries has, or one of keys."""
        return self.lengths[side] // self.order.stretches

    def _in_band(self, first_query: Any, first_key: Any) -> Any:
        """Whether some query of a stretch may see some key of another, by the band of the mask."""
        queries, keys = self._stretch_length(0), self._stretch_length(1)
        nearest = first_key - (first_query + queries - 1)
        farthest = first_key + keys - 1 - first_query
        seen: Any = True
        if self.mask.right is not None:
            seen = nearest <= self.mask.right
        if self.mask.left is not None:
            seen = seen & (farthest >= -self.mask.left)
        return seen

    def passed_on(self, stretches: list[Any], places: int) -> list[Any]:
        """The arrays of the device so many places before this one, a tree for each stretch."""
        size = self.order.size
        pairs = [(device, (device + places) % size) for device in range(size)]
        permute = partial(lax.ppermute, axis_name=self.axes, perm=pairs)
        if device_here().platform == "cpu":
            # XLA for CPUs, as of JAX 0.12, may take several permutes at a time for one, and the
            # process is aborted. On simulated devices all arrays are therefore sent as one.
            return _in_one_row(permute, stretches)
        # One array for all stretches: a TPU runs few permutes at a time, and further ones would
        # wait for the products.
        whole = jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *stretches)
        leaves, tree = jax.tree.flatten(whole)
        cut = [self.cut(permute(x)) for x in leaves]
        return [tree.unflatten(parts) for parts in zip(*cut, strict=True)]

    def pair(self, step: Any, numbers: tuple[int, int], queries: Queries, block: Block) -> "Pair":
        """A stretch of queries and one of keys, which arrived in a step."""
        device = lax.axis_index(self.axes)
        source = (device - step) % self.order.size
        first_query = self.side.starts[0]
        if self.zigzag:
            first_query = self.first_position(0, device, numbers[0], first_query)
        first_key = self.first_position(1, source, numbers[1], self.side.starts[1])
        # Sinks are added once, after all blocks.
        side = self.side._replace(
            query_segments=queries.segments,
            key_segments=block.segments,
            starts=jnp.stack([first_query, first_key]),
            sinks=None,
        )
        seen = self._in_band(first_query, first_key)
        # Where it is the same in all steps on all devices, the program needs no condition.
        no_band = self.mask.right is None and self.mask.left is None
        if self.starts is not None or no_band:
            known = [self._seen(one, *numbers) for one in range(self.order.size)]
            if np.all(known):
                seen = True
            elif not np.any(known):
                seen = False
        if seen is not False and queries.segments is not None and block.segments is not None:
            seen = seen & _may_meet(queries.segments, block.segments)
        return Pair(queries.q, block, side, seen)


class Pair(NamedTuple):
    """A stretch of queries and one of keys, and whether some query may see some key."""

    q: jax.Array
    block: Block
    side: SideInputs
    seen: Any  # a bool, where it is known before the program runs

    def if_seen(self, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """What the first function gives if something may be seen, and else the second."""
        if isinstance(self.seen, bool):
            return then() if self.seen else otherwise()
        return lax.cond(self.seen, then, otherwise)


def _may_meet(queries: jax.Array, keys: jax.Array) -> jax.Array:
    """Whether some segment may be among those of queries and among those of keys."""
    # Segments that follow each other are mostly numbered in order, so the ids of a stretch are a
    # range. In any other order this may be true where no ids agree, which is only slower.
    meet = (queries.min() <= keys.max()) & (keys.min() <= queries.max())
    # The name says that the condition changes no result, since a pair that is left out would add
    # nothing: no example depends on another one by it.
    return checkpoint_name(meet, SAME_RESULT)


def _in_one_row(function: Callable[[jax.Array], jax.Array], arrays: Any) -> Any:
    """Call a function that moves numbers with the bytes of all arrays in one row."""
    leaves, tree = jax.tree.flatten(arrays)
    rows = [lax.bitcast_convert_type(x, jnp.uint8).reshape(-1) for x in leaves]
    moved = lax.split(function(jnp.concatenate(rows)), [row.size for row in rows])
    made = []
    for row, x in zip(moved, leaves, strict=True):
        made.append(lax.bitcast_convert_type(row.reshape(*x.shape, -1), x.dtype))
    return tree.unflatten(made)


def as_moved(arrays: Any) -> Any:
    """The same arrays, with the types that arrays have which arrive from other devices."""
    # In a nested `shard_map` these are the types of computed values, which differ from those of
    # arguments.
    if device_here().platform == "cpu":
        return _in_one_row(lambda row: row, arrays)
    return arrays
