"""How the arrays of an attention are laid out, and what a device gets of the keys of others.

Where axes split the positions of keys, rules say of each what happens (`AxisRules.attention`):

    gather     a device has all positions of the axis before attention is computed
    ring       a device has a block of them at a time, see `_ring`
    zigzag     a ring; where arrays are arranged for it, each device has two stretches
    ulysses    the axis splits heads in place of positions, see `_ulysses`

So by the time that a device attends, keys are split over axes of rings, then over those gathered.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib._text import listed
from shardlib.kernels._attention._options import OP
from shardlib.kernels._attention._reference import Attention
from shardlib.kernels._shards import ArrayLayout, Names, as_varying, layout_of, varying
from shardlib.layouts._annotate import current_scope, mesh_of_shards
from shardlib.layouts._rules import RINGS, SEQUENCE, AxisRules
from shardlib.layouts._sequence_order import is_arranged
from shardlib.layouts._specs import axes_without, parts_over


class Arrays(NamedTuple):
    """The arrays of an attention; those from the fourth on may be None."""

    q: Any
    k: Any
    v: Any
    query_segments: Any
    key_segments: Any
    sinks: Any
    starts: Any


@dataclass(frozen=True)
class Layouts:
    """How queries, keys and values are laid out, and what a device takes of the keys."""

    q_layout: ArrayLayout
    k_layout: ArrayLayout
    v_layout: ArrayLayout
    ring_axes: tuple[str, ...] = ()  # the first of those that split the positions of keys
    zigzag: bool = False  # whether a device of a ring has an early and a late stretch

    @property
    def layouts(self) -> Arrays:
        """The layout of each array."""
        # The starts are the same on all devices; without a spec, nothing would be known of them.
        starts_spec = None if self.q_layout.spec is None else jax.P(None)
        return Arrays(
            self.q_layout,
            self.k_layout,
            self.v_layout,
            self.q_layout.select(0, 1),
            self.k_layout.select(0, 1),
            self.q_layout.select(2),
            ArrayLayout((2,), starts_spec, ((),)),
        )

    @property
    def y_layout(self) -> ArrayLayout:
        """The layout of the result, whose last dim is that of the values."""
        layout = self.q_layout
        return ArrayLayout((*layout.shape[:3], self.v_layout.shape[3]), layout.spec, layout.axes)

    @property
    def lse_layout(self) -> ArrayLayout:
        """The layout of the log-sum-exp, one number for each query and head."""
        return self.q_layout.select(0, 1, 2)

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """The automatic axes over which devices with other queries have the same keys.

        Over these, gradients of keys and values are added up inside the `shard_map` of the op.
        """
        own = self.k_layout.automatic_axes(0, 1, 2)
        return axes_without(self.q_layout.automatic_axes(0, 1, 2), own)

    def on_one_device(self, definition: Attention) -> Attention:
        """The attention that one device computes.

        Where the queries' positions are split, only the running program knows where they start.
        """
        if self.splits_queries or self.ring_axes:
            return replace(definition, starts=None)
        return definition

    @property
    def splits_queries(self) -> bool:
        """Whether devices have different positions of the queries."""
        # An axis of one device splits nothing.
        return parts_over(mesh_of_shards().shape, self.q_layout.axes[1]) > 1

    def keys(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys and values that this device's queries need, of its own heads.

        They are all positions, or, in a ring, those of the device's own block.
        """
        k, v = self.gathered(k), self.gathered(v)
        return self.own_heads(k), self.own_heads(v)

    def gathered(self, x: jax.Array) -> jax.Array:
        """An array whose second dim is this device's positions, with those of all devices.

        In a ring, with those of the device's block.
        """
        # Devices have stretches of positions in the order of the devices.
        if not self.gathered_axes:
            return x
        return lax.all_gather(x, self.gathered_axes, axis=1, tiled=True)

    @property
    def gathered_axes(self) -> tuple[str, ...]:
        """The axes over which positions of keys are gathered."""
        return axes_without(self.k_layout.axes[1], self.ring_axes)

    @property
    def block_length(self) -> int:
        """How many keys a device attends to at a time, for each query."""
        parts = parts_over(mesh_of_shards().shape, self.ring_axes)
        return self.k_layout.global_shape[1] // (parts * self.stretches)

    @property
    def stretches(self) -> int:
        """How many stretches of the sequence a device has, and attends to one by one."""
        return 2 if self.zigzag else 1

    @property
    def is_split_by_the_ring_alone(self) -> bool:
        """Whether nothing but the ring splits the positions of queries and of keys."""
        sizes = mesh_of_shards().shape
        axes = (*self.q_layout.axes[1], *self.k_layout.axes[1])
        several = [axis for axis in axes if sizes[axis] > 1]
        return several == [*self.ring_axes, *self.ring_axes]

    @property
    def local_head_counts(self) -> tuple[int, int]:
        """How many heads and key heads a device's shards have."""
        return self.q_layout.local_shape[2], self.k_layout.local_shape[2]

    @property
    def key_heads_axes(self) -> tuple[str, ...]:
        """The axes that split heads, and do not split key heads."""
        split = len(self.k_layout.axes[2])
        return self.q_layout.axes[2][split:]

    def own_heads(self, k: jax.Array) -> jax.Array:
        """The key heads that this device's queries need, of those that it has.

        Eight heads on four devices with two key heads, which every device has:

            device     0    1    2    3
            heads      0 1  2 3  4 5  6 7
            key head   0    0    1    1
        """
        # The heads of a device are neighbours, and so are the key heads that serve them.
        first, taken = self._own_heads()
        if taken == self.local_head_counts[1]:
            return k
        return lax.dynamic_slice_in_dim(k, first, taken, 2)

    def reduce_key_gradient(self, gradient: jax.Array) -> jax.Array:
        """The transpose of `keys`, for one array: a gradient for this device's shard.

        The heads that were taken are put back in their place, and gradients are summed and
        scattered over the axes that split positions. They are sent in the dtype of the keys, often
        half the bytes of float32, for which each device's summand is rounded once more.

        JAX's own transpose is not used: in a `shard_map` inside another one, it finds types that do
        not agree on which axes arrays vary over.
        """
        first, taken = self._own_heads()
        if taken < self.local_head_counts[1]:
            shape = list(gradient.shape)
            shape[2] = self.local_head_counts[1]
            zeros = as_varying(jnp.zeros(shape, gradient.dtype), varying(gradient))
            gradient = lax.dynamic_update_slice_in_dim(zeros, gradient, first, 2)
        axes = self.gathered_axes
        if not axes:
            return gradient
        return lax.psum_scatter(gradient, axes, scatter_dimension=1, tiled=True)

    def _own_heads(self) -> tuple[Any, int]:
        """The index of the first key head that this device takes, and how many it takes."""
        axes = self.key_heads_axes
        parts = parts_over(mesh_of_shards().shape, axes)
        count = self.local_head_counts[1]
        if parts == 1:
            return 0, count
        # With more parts than key heads, several devices take the same one.
        return lax.axis_index(axes) * count // parts, max(count // parts, 1)


def layout_of_keys(
    what: str, x: Any, q_layout: ArrayLayout, names: Names | None, kv_names: Names | None
) -> ArrayLayout:
    """The layout of keys or values, by their own names or by those of the queries.

    Args:
        what: the argument, for errors.
        x: the array.
        q_layout: of the queries.
        names: of the dims of the queries.
        kv_names: of the dims of keys and values, or None.
    """
    if kv_names is not None and names is None:
        raise ValueError(f"`{OP}(kv_names=...)` without `names`: name the dims of `q` too.")
    if names is None:
        return layout_of(OP, x, None, what)
    if kv_names is None:
        kv_names = tuple(names)
        # Key heads that are too few are whole, and each device takes what it needs of them.
        parts = parts_over(mesh_of_shards().shape, q_layout.automatic_axes(2))
        if x.shape[2] % parts:
            kv_names = (kv_names[0], kv_names[1], None, kv_names[3])
    return layout_of(OP, x, kv_names, what, in_any_order=(0,))


def check_layouts(q_layout: ArrayLayout, k_layout: ArrayLayout, v_layout: ArrayLayout) -> None:
    """Refuse layouts in which a device does not have, and cannot get, what its queries need."""
    for what, layout in (("q", q_layout), ("k", k_layout), ("v", v_layout)):
        if layout.axes[3]:
            raise ValueError(
                f"`{OP}`: the last dim of `{what}` is split over {listed(layout.axes[3])}, and a "
                "head's numbers must be on one device. Name it None."
            )
    if q_layout.axes[0] != k_layout.axes[0]:
        raise ValueError(
            f"`{OP}`: the batch of `q` is split over {listed(q_layout.axes[0])} and that of `k` "
            f"over {listed(k_layout.axes[0])}. Give both the same name."
        )
    gathered = set(k_layout.axes[1])
    if not gathered <= set(q_layout.axes[1]):
        raise ValueError(
            f"`{OP}`: the positions of `k` are split over {listed(k_layout.axes[1])} and those of "
            f"`q` over {listed(q_layout.axes[1])}: devices with the same queries would each do the "
            "same. Split those of `q` too, or name those of `k` None."
        )
    heads, key_heads = q_layout.axes[2], k_layout.axes[2]
    if heads[: len(key_heads)] != key_heads:
        raise ValueError(
            f"`{OP}`: heads are split over {listed(heads)} and key heads over {listed(key_heads)}, "
            "and devices would lack the key heads of their heads. Key heads may be split as heads "
            "are, or over the first of their axes, or be whole."
        )
    _check_heads(Layouts(q_layout, k_layout, v_layout))


def _check_heads(shards: Layouts) -> None:
    """Refuse heads of which a device would need a part of those that one key head serves."""
    heads, key_heads = shards.local_head_counts
    parts = parts_over(mesh_of_shards().shape, shards.key_heads_axes)
    taken = max(key_heads // parts, 1)
    even = key_heads % parts == 0 or parts % key_heads == 0
    if heads % taken or not even:
        raise ValueError(
            f"`{OP}`: {heads} heads on a device and {key_heads} key heads, of which each of "
            f"{parts} devices takes those that its heads need: one number must divide the other, "
            "so that each key head serves as many heads."
        )


class Forms(NamedTuple):
    """The axes that split the positions of keys, by what attention does about it.

    Positions are gathered over all others. In a `zigzag` ring each device has two stretches.
    """

    ring: tuple[str, ...] = ()
    ulysses: tuple[str, ...] = ()
    zigzag: bool = False


def forms_of(layouts: Layouts, arranged: bool, name: str = SEQUENCE) -> Forms:
    """The forms that the rules in scope have for the axes which split the positions of keys.

    Args:
        layouts: of the arrays.
        arranged: whether positions are in the order of `sl.context.arrange`.
        name: of the dim of positions.
    """
    scope, sizes = current_scope(), mesh_of_shards().shape
    if scope is None or scope.rules is None:
        return Forms()
    # An axis of one device splits nothing.
    axes = [axis for axis in layouts.k_layout.axes[1] if sizes[axis] > 1]
    forms = [scope.rules.attention_form(axis) for axis in axes]
    # Otherwise what a device has of the sequence while it attends would not be one stretch.
    order = {"ring": 0, "zigzag": 0, "gather": 1, "ulysses": 2}
    if sorted(forms, key=order.__getitem__) != forms:
        said = ", ".join(f"`{axis}` by {form!r}" for axis, form in zip(axes, forms, strict=True))
        raise ValueError(
            f"`{OP}`: positions are split over {said}, in this order. In the rule for them, write "
            "axes of a ring first, then those that are gathered, and those of `ulysses` last."
        )
    by_axis = dict(zip(axes, forms, strict=True))
    ring = tuple(axis for axis in axes if by_axis[axis] in RINGS)
    ulysses = tuple(axis for axis in axes if by_axis[axis] == "ulysses")
    lengths = layouts.q_layout.global_shape[1], layouts.k_layout.global_shape[1]
    if not arranged or not any(is_arranged(length, name) for length in lengths):
        return Forms(ring, ulysses)
    _check_arranged(layouts, scope.rules, by_axis)
    return Forms(ring, ulysses, zigzag=True)


def _check_arranged(layouts: Layouts, rules: AxisRules, by_axis: dict[str, str]) -> None:
    """Refuse arranged positions of which a device does not have an early and a late stretch.

    Args:
        layouts: of the arrays.
        rules: in scope.
        by_axis: the form of each axis that splits positions of keys.
    """
    sizes = mesh_of_shards().shape
    axes = tuple(axis for axis in rules.zigzag_axes if sizes.get(axis, 1) > 1)
    found = tuple(axis for axis in by_axis if by_axis[axis] != "ulysses")
    queries, keys = layouts.q_layout, layouts.k_layout
    if set(found) != set(axes) or queries.axes[1] != keys.axes[1]:
        raise ValueError(
            f"`{OP}(arranged=True)`: positions are in zigzag order over {listed(axes)}, those of "
            f"`q` are split over {listed(queries.axes[1])} and those of `k` over "
            f"{listed(keys.axes[1])}. Split both over the axes of the order, and besides over axes "
            "of `ulysses` only; or do not arrange them."
        )
    lengths = queries.global_shape[1], keys.global_shape[1]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"`{OP}(arranged=True)` of {lengths[0]} queries and {lengths[1]} keys: in zigzag order "
            "both are the same positions."
        )
