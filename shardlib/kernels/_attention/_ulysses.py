"""Attention for which devices exchange positions for heads, and back (DeepSpeed's Ulysses).

Of a sequence that is split over `n` devices, each has some positions of all heads. By an all-to-all
it gets all positions of some heads, attends to these alone, and sends the results back:

              before                      while it attends
    device 0  positions 0, heads 0 1      positions 0 1, heads 0
    device 1  positions 1, heads 0 1      positions 0 1, heads 1

Key heads that are too few to be split are repeated: each device gets the one that its heads need.
What the backward pass reads is kept as it is while a device attends, and not exchanged again.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib._text import listed
from shardlib.kernels._attention._layouts import Arrays, Layouts
from shardlib.kernels._attention._options import OP
from shardlib.kernels._shards import ArrayLayout, as_varying, per_shard
from shardlib.layouts._annotate import mesh_of_shards
from shardlib.layouts._specs import as_tuple, axes_within, axes_without, parts_over, spec_entry


@dataclass(frozen=True)
class HeadExchange:
    """How arrays are laid out before devices exchange positions for heads, and after that."""

    axes: tuple[str, ...]
    before: Layouts
    after: Layouts
    repeats: int  # of each key head

    def to_heads(self, arrays: Arrays) -> Arrays:
        """The arrays as a device has them while it attends."""
        before, after = self.before.layouts, self.after.layouts
        k, v = arrays.k, arrays.v
        if self.repeats > 1:
            k, v = (jnp.repeat(x, self.repeats, axis=2) for x in (k, v))
        moved = arrays._replace(
            q=_exchange(self.axes, before.q, after.q, True, arrays.q),
            k=_exchange(self.axes, before.k, after.k, True, k),
            v=_exchange(self.axes, before.v, after.v, True, v),
        )
        for name in ("query_segments", "key_segments"):
            segments = getattr(arrays, name)
            if segments is not None:
                layouts = getattr(before, name), getattr(after, name)
                moved = moved._replace(**{name: self._gathered(segments, *layouts)})
        if arrays.sinks is not None:
            manual = axes_within(self.axes, mesh_of_shards().manual_axes)
            sinks = as_varying(arrays.sinks, frozenset(manual))
            own = _own_part(self.axes, before.sinks, after.sinks, sinks)
            moved = moved._replace(sinks=own)
        return moved

    def to_positions(self, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """The output and the log-sum-exp as queries are laid out."""
        y, lse = results
        before, after = self.before, self.after
        return (
            _exchange(self.axes, after.y_layout, before.y_layout, False, y),
            _exchange(self.axes, after.lse_layout, before.lse_layout, False, lse),
        )

    def _gathered(self, x: jax.Array, before: ArrayLayout, after: ArrayLayout) -> jax.Array:
        """The segments of all positions that a device has while it attends."""
        gather = partial(lax.all_gather, axis_name=self.axes, axis=1, tiled=True)
        return per_shard(gather, [x], [before], after)


def head_exchange(layouts: Layouts, axes: tuple[str, ...]) -> HeadExchange:
    """The exchange over some axes that split positions; refuses heads that they do not divide."""
    q, k, v = layouts.q_layout, layouts.k_layout, layouts.v_layout
    if q.axes[1] != k.axes[1]:
        raise ValueError(
            f"`{OP}` by `ulysses` over {listed(axes)}: the positions of `q` are split over "
            f"{listed(q.axes[1])} and those of `k` over {listed(k.axes[1])}. Split both alike."
        )
    manual = mesh_of_shards().manual_axes
    if axes_within(q.axes[2], manual) != axes_within(k.axes[2], manual):
        raise ValueError(
            f"`{OP}` by `ulysses` over {listed(axes)}: heads are split over {listed(q.axes[2])} "
            f"and key heads over {listed(k.axes[2])}, some of them manual here. Split both alike, "
            'or use the form "ring".'
        )
    # Over automatic axes an array is seen as a whole, and over manual ones as a device's part.
    parts = parts_over(mesh_of_shards().shape, (*q.automatic_axes(2), *axes))
    heads, key_heads = q.shape[2], k.shape[2]
    repeated = math.lcm(key_heads, parts)
    if heads % parts or heads % repeated:
        sizes = mesh_of_shards().shape
        fits = math.gcd(heads // parts_over(sizes, q.automatic_axes(2)), parts_over(sizes, axes))
        raise ValueError(
            f"`{OP}` by `ulysses`: {heads} heads and {key_heads} key heads are to be split into "
            f"{parts} parts, over {listed((*q.automatic_axes(2), *axes))}, and each device takes "
            f"as many. An axis of {fits} would do; the rest of the sequence may be a ring: "
            '`sl.rules.context("usp", axis=("ring", "ulysses"))`.'
        )
    repeats = repeated // key_heads
    # Repeated, key heads are split as heads are.
    before = Layouts(q, _with_heads(k, q, repeats), _with_heads(v, q, repeats))
    split = partial(_with_split_heads, axes=axes)
    after = Layouts(split(before.q_layout), split(before.k_layout), split(before.v_layout))
    return HeadExchange(axes, before, after, repeats)


def _with_heads(layout: ArrayLayout, q_layout: ArrayLayout, repeats: int) -> ArrayLayout:
    """The layout of keys of which each head is repeated, with heads split as those of queries."""
    assert layout.spec is not None and q_layout.spec is not None
    batch, positions, heads, size = layout.shape
    spec = PartitionSpec(layout.spec[0], layout.spec[1], q_layout.spec[2], layout.spec[3])
    axes = (layout.axes[0], layout.axes[1], q_layout.axes[2], layout.axes[3])
    return ArrayLayout((batch, positions, heads * repeats, size), spec, axes)


def _with_split_heads(layout: ArrayLayout, axes: tuple[str, ...]) -> ArrayLayout:
    """The layout in which axes split the heads, in dim 2, in place of the positions, in dim 1."""
    assert layout.spec is not None
    mesh = mesh_of_shards()
    manual = axes_within(axes, mesh.manual_axes)
    automatic = axes_without(axes, manual)
    parts = parts_over(mesh.shape, manual)
    batch, positions, heads, *rest = layout.shape
    spec = list(layout.spec)
    spec[1] = spec_entry(axes_without(as_tuple(spec[1]), automatic))
    spec[2] = spec_entry((*as_tuple(spec[2]), *automatic))
    split = list(layout.axes)
    split[1] = axes_without(split[1], axes)
    split[2] = (*split[2], *axes)
    shape = (batch, positions * parts, heads // parts, *rest)
    return ArrayLayout(shape, PartitionSpec(*spec), tuple(split))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _exchange(
    axes: tuple[str, ...], before: ArrayLayout, after: ArrayLayout, to_heads: bool, x: jax.Array
) -> jax.Array:
    """An array whose heads are split over axes in place of its positions, or the other way.

    Its derivative is written out, since JAX does not find one in a `shard_map` inside another one.
    """
    split, joined = (2, 1) if to_heads else (1, 2)

    def exchange(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, axes, split, joined, tiled=True)

    return per_shard(exchange, [x], [before], after)


def _exchange_forward(
    axes: tuple[str, ...], before: ArrayLayout, after: ArrayLayout, to_heads: bool, x: jax.Array
) -> tuple[jax.Array, None]:
    return _exchange(axes, before, after, to_heads, x), None


def _exchange_backward(
    axes: tuple[str, ...],
    before: ArrayLayout,
    after: ArrayLayout,
    to_heads: bool,
    _: None,
    gradient: jax.Array,
) -> tuple[jax.Array]:
    """The gradient takes the way back."""
    return (_exchange(axes, after, before, not to_heads, gradient),)


_exchange.defvjp(_exchange_forward, _exchange_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _own_part(
    axes: tuple[str, ...], before: ArrayLayout, after: ArrayLayout, x: jax.Array
) -> jax.Array:
    """The part for a device's heads of an array that has a number for each head."""
    parts = parts_over(mesh_of_shards().shape, axes)

    def take(x: jax.Array) -> jax.Array:
        size = x.shape[0] // parts
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size)

    return per_shard(take, [x], [before], after)


def _own_part_forward(
    axes: tuple[str, ...], before: ArrayLayout, after: ArrayLayout, x: jax.Array
) -> tuple[jax.Array, None]:
    return _own_part(axes, before, after, x), None


def _own_part_backward(
    axes: tuple[str, ...], before: ArrayLayout, after: ArrayLayout, _: None, gradient: jax.Array
) -> tuple[jax.Array]:
    """The gradient to the whole array: each device's part in its place.

    It is summed here over automatic axes only; over manual ones JAX sums.
    """
    mesh = mesh_of_shards()
    parts = parts_over(mesh.shape, axes)
    automatic = axes_without(axes, mesh.manual_axes)

    def put_back(gradient: jax.Array) -> jax.Array:
        size = gradient.shape[0]
        # Zeros that are computed from the gradient vary over the same axes.
        zeros = jnp.tile(gradient * 0, parts)
        start = lax.axis_index(axes) * size
        whole = lax.dynamic_update_slice_in_dim(zeros, gradient, start, 0)
        return lax.psum(whole, automatic) if automatic else whole

    return (per_shard(put_back, [gradient], [after], before),)


_own_part.defvjp(_own_part_forward, _own_part_backward)
