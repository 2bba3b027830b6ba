"""Attention, forward and backward, without its scores in memory.

The public function checks its arguments, finds out how they are laid out, chooses an implementation
and calls it on each device's own shard. What devices exchange:

    keys and values     where their positions are split, each device gathers all of them; backward
                        their gradients are summed and scattered
    key heads           where query heads are split over more axes than key heads, each device
                        takes those that its queries need; backward their gradients are summed

Forward and backward are one `custom_vjp`. It saves each device's own shards, the result and the
log-sum-exp, and backward gathers keys and values a second time.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Unpack, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardlib._text import listed
from shardlib.kernels._attention._options import (
    OP,
    AttentionOptions,
    checked_arrays,
    checked_options,
)
from shardlib.kernels._attention._reference import Attention, SideInputs
from shardlib.kernels._choice import Chosen, Implementation, Task, choose, device_here
from shardlib.kernels._rows import compute_dtype
from shardlib.kernels._shards import (
    ArrayLayout,
    Names,
    as_varying,
    layout_of,
    partitioned,
    per_shard,
    shard_offset,
    varying,
    varying_alike,
)
from shardlib.layouts._annotate import mesh_of_shards
from shardlib.layouts._checkpoint_policies import BESIDE, CONTEXT
from shardlib.layouts._rules import axes_without, parts_over
from shardlib.tracing._compressed_saves import named

# What a `Remat` calls the results.
IMPLEMENTATIONS = (
    Implementation("reference", None, f"{__name__}._reference"),
    Implementation("tpu", "tpu", f"{__name__}._tpu"),
    Implementation("cudnn", "gpu", f"{__name__}._cudnn", has_simulator=False, differentiable=True),
    Implementation("tokamax", "gpu", f"{__name__}._tokamax", has_simulator=False),
    Implementation("gpu", "gpu", f"{__name__}._gpu"),
)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    names: Names | None = None,
    kv_names: Names | None = None,
    implementation: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Any:
    """`softmax(scale * q @ k) @ v` for each head, over the keys that a query sees.

    Args:
        q: `(batch, queries, heads, size)`, of float32, bfloat16 or float16.
        k: `(batch, keys, key heads, size)`. There may be fewer key heads than heads: each serves
            as many heads, in order.
        v: as `k`; its last dim may have another size, and so has the result.
        names: of the dims of `q`, where they are split over devices; the last must be whole.
        kv_names: of the dims of `k` and `v`; as `names`, with key heads that are too few for the
            axes of the heads whole on every device.
        implementation: None takes what is fastest here; by name, that or an error. See `explain`.
        options: which keys a query sees, and how scores are made, see `AttentionOptions`: `causal`,
            `window`, `segment_ids`, `block_mask`, `scale`, `soft_cap`, `sinks`, `starts`, and
            `with_lse`, which also returns the log-sum-exp.

    A query that sees no key gets zeros, and a log-sum-exp of minus infinity. Scores, softmax and
    sums are in float32 (float64 for float64); products take the dtype of the arrays, at JAX's
    default precision. Memory is linear in the lengths, but for what a pattern of blocks takes.
    There is no dropout.

    >>> q, k = jnp.zeros((1, 3, 2, 4)), jnp.zeros((1, 3, 1, 4))
    >>> v = jnp.arange(3.0).reshape(1, 3, 1, 1)
    >>> attention(q, k, v, causal=True)[0, :, 0, 0]
    Array([0. , 0.5, 1. ], dtype=float32)
    """
    q, k, v = checked_arrays(q, k, v)
    q_layout = layout_of(OP, q, names, "q", in_any_order=(0,))
    k_layout = _layout_of_keys("k", k, q_layout, names, kv_names)
    v_layout = _layout_of_keys("v", v, q_layout, names, kv_names)
    _check_layouts(q_layout, k_layout, v_layout)
    asked = checked_options(options, (q, k), (q_layout.global_shape, k_layout.global_shape))
    definition, shards = asked.definition, _Layouts(q_layout, k_layout, v_layout)
    arrays = _Arrays(q, k, v, asked.query_segments, asked.key_segments, asked.sinks, asked.starts)
    task = _task(arrays, definition, shards)
    call = Call(choose(IMPLEMENTATIONS, task, implementation), definition, shards)
    if q.size and k.size:
        # What has a derivative of its own inside is not given another one.
        attend: Any = _run if call.chosen.implementation.differentiable else _attend
        y, lse = attend(call, *varying_alike(*arrays))
    else:
        # There is nothing to attend to: only sinks are left in the softmax.
        y = jnp.zeros(shards.y_layout.shape, q.dtype)
        only_sinks = jnp.float32(-jnp.inf) if asked.sinks is None else asked.sinks
        dtype = compute_dtype(q.dtype)
        lse = jnp.broadcast_to(jnp.asarray(only_sinks, dtype), shards.lse_layout.shape)
    return (y, lse) if definition.with_lse else y


def _task(arrays: "_Arrays", definition: Attention, shards: "_Layouts") -> Task:
    """What one device is asked to do."""
    local, differing = {}, frozenset[str]()
    for name, array, layout in zip(_Arrays._fields, arrays, shards.layouts, strict=True):
        if array is not None:
            local[name] = layout.local(array.dtype)
            differing |= varying(array)
    return Task(
        OP,
        local,
        partitioned(shards.q_layout),
        differing=differing,
        device=device_here(),
        length=shards.k_layout.global_shape[1],
        definition=shards.on_one_device(definition),
    )


class _Arrays(NamedTuple):
    """The arrays of an attention; those from the fourth on may be None."""

    q: Any
    k: Any
    v: Any
    query_segments: Any
    key_segments: Any
    sinks: Any
    starts: Any


@dataclass(frozen=True)
class _Layouts:
    """How queries, keys and values are laid out, and what a device takes of the keys."""

    q_layout: ArrayLayout
    k_layout: ArrayLayout
    v_layout: ArrayLayout

    @property
    def layouts(self) -> _Arrays:
        """The layout of each array."""
        # The starts are the same on all devices; without a spec, nothing would be known of them.
        starts_spec = None if self.q_layout.spec is None else jax.P(None)
        return _Arrays(
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
        """The attention that one device does.

        Where the queries' positions are split, only the running program knows where they start.
        """
        if self.splits_queries:
            return replace(definition, starts=None)
        return definition

    @property
    def splits_queries(self) -> bool:
        """Whether devices have different positions of the queries."""
        # An axis of one device splits nothing.
        return parts_over(mesh_of_shards().shape, self.q_layout.axes[1]) > 1

    def keys(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys and values that this device's queries need: all positions, and its own heads."""
        k, v = self.gathered(k), self.gathered(v)
        return self.own_heads(k), self.own_heads(v)

    def gathered(self, x: jax.Array) -> jax.Array:
        """All positions of an array of which this device has some, in its second dim."""
        # Of a row of devices each has a stretch of positions, in their order.
        axes = self.k_layout.axes[1]
        if not axes:
            return x
        return lax.all_gather(x, axes, axis=1, tiled=True)

    @property
    def local_head_counts(self) -> tuple[int, int]:
        """How many heads and key heads a device's shards have."""
        return self.q_layout.local_shape[2], self.k_layout.local_shape[2]

    @property
    def key_heads_axes(self) -> tuple[str, ...]:
        """The axes over which heads are split and key heads are not, though they are by others."""
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
        scattered over the axes that split positions. They travel in the dtype of the keys, half the
        bytes of float32: so each device's summand is rounded once more.

        JAX's own transpose is not used: in a `shard_map` in another one, it finds types that do not
        agree on what differs between devices.
        """
        first, taken = self._own_heads()
        if taken < self.local_head_counts[1]:
            shape = list(gradient.shape)
            shape[2] = self.local_head_counts[1]
            zeros = as_varying(jnp.zeros(shape, gradient.dtype), varying(gradient))
            gradient = lax.dynamic_update_slice_in_dim(zeros, gradient, first, 2)
        axes = self.k_layout.axes[1]
        if not axes:
            return gradient
        return lax.psum_scatter(gradient, axes, scatter_dimension=1, tiled=True)

    def _own_heads(self) -> tuple[Any, int]:
        """The first of the key heads that this device takes of those it has, and how many."""
        axes = self.key_heads_axes
        parts = parts_over(mesh_of_shards().shape, axes)
        count = self.local_head_counts[1]
        if parts == 1:
            return 0, count
        # With more parts than key heads, several devices take the same.
        return lax.axis_index(axes) * count // parts, max(count // parts, 1)


@dataclass(frozen=True)
class Call:
    """What is known of a call before its numbers are: the static argument of the `custom_vjp`."""

    chosen: Chosen
    definition: Attention
    shards: _Layouts

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that forward and backward of the implementation both take."""
        return {"attention": self.shards.on_one_device(self.definition)} | self.chosen.options

    def side_inputs(self, arrays: _Arrays) -> SideInputs:
        """The arrays besides queries, keys and values as one device needs them, of its shards."""
        # A device's queries start where those of the devices before it end.
        starts = arrays.starts
        if self.shards.splits_queries:
            # Where queries are split, each device starts elsewhere, which only the running program
            # knows.
            if self.definition.starts is not None:
                starts = jnp.array(self.definition.starts, jnp.int32)
            offset = shard_offset(self.shards.q_layout.axes[1], arrays.q.shape[1])
            starts = starts.at[0].add(offset)
        key_segments = arrays.key_segments
        if key_segments is not None:
            key_segments = self.shards.gathered(key_segments)
        return SideInputs(
            arrays.query_segments, key_segments, arrays.sinks, starts, self._pattern()
        )

    def _pattern(self) -> Any:
        """The pattern of the block mask for this device's heads; None without one."""
        block_mask = self.definition.mask.block_mask
        if block_mask is None:
            return None
        # There is one pattern for all heads, or one for each, of which a device takes its own
        # heads'.
        if block_mask.heads is None:
            return jnp.asarray(block_mask.pattern[None])
        heads = self.shards.local_head_counts[0]
        first = shard_offset(self.shards.q_layout.axes[2], heads)
        return lax.dynamic_slice_in_dim(jnp.asarray(block_mask.pattern), first, heads, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, *arrays: Any) -> tuple[Any, Any]:
    """The outputs of each device's queries, and their log-sum-exps."""
    return _named(_run(call, *arrays))


def _named(results: tuple[Any, Any]) -> tuple[Any, Any]:
    """The results under the name by which a `Remat` keeps them.

    Kept, they are all that backward needs of forward: nothing is attended to once more.
    """
    y, lse = results
    # Sums of exponentials stay exact: errors of theirs would be factors of all shares.
    return named(y, CONTEXT), checkpoint_name(lse, CONTEXT + BESIDE)


def _run(call: Call, *arrays: Any) -> tuple[Any, Any]:
    """The implementation on each device's shards."""

    def run_shard(*shards: Any) -> tuple[Any, Any]:
        own = _Arrays(*shards)
        k, v = call.shards.keys(own.k, own.v)
        implementation = call.chosen.implementation
        return implementation.forward(own.q, k, v, call.side_inputs(own), **call.options)

    results = (call.shards.y_layout, call.shards.lse_layout)
    return per_shard(run_shard, arrays, call.shards.layouts, results)


def _forward(call: Call, *arrays: Any) -> tuple[Any, Any]:
    """The results, and what backward needs."""
    # Not `_run`: whoever differentiates twice differentiates this.
    # A policy sees no names within a function that has a derivative of its own.
    results = _named(cast(Any, _attend)(call, *arrays))
    return results, (arrays, results)


def _backward(call: Call, saved: Any, gradients: Any) -> tuple[Any, ...]:
    """The gradients to queries, keys, values and sinks; the other arrays have none."""
    arrays, results = saved
    shards = call.shards
    operands = (*arrays, *results, *gradients)
    result_layouts = (shards.y_layout, shards.lse_layout)
    layouts = (*shards.layouts, *result_layouts, *result_layouts)
    sinks = _Arrays(*arrays).sinks
    gradient_layouts: list[Any] = [shards.q_layout, shards.k_layout, shards.v_layout, None]
    if sinks is not None:
        gradient_layouts[3] = shards.layouts.sinks
    run_shard = partial(_shard_gradients, call)
    gradient = per_shard(run_shard, operands, layouts, tuple(gradient_layouts))
    q_gradient, k_gradient, v_gradient, sinks_gradient = gradient
    # A sum over queries comes wide: it is rounded once, after devices have added up theirs.
    if sinks is not None:
        sinks_gradient = sinks_gradient.astype(sinks.dtype)
    return q_gradient, k_gradient, v_gradient, None, None, sinks_gradient, None


def _shard_gradients(call: Call, *operands: Any) -> tuple[Any, ...]:
    """The gradients to the shards of queries, keys, values and sinks of one device.

    Args:
        call: what is known of the call.
        operands: the shards, what forward gave, and the gradients to that.
    """
    shards = call.shards
    own = _Arrays(*operands[:-4])
    own_results, own_gradients = operands[-4:-2], operands[-2:]
    # Gathered again: kept since forward, they would take the place of whole keys in memory.
    k, v = shards.keys(own.k, own.v)
    q_gradient, k_gradient, v_gradient, sinks_gradient = call.chosen.implementation.backward(
        own.q, k, v, call.side_inputs(own), own_results, own_gradients, **call.options
    )
    k_gradient, v_gradient = (
        shards.reduce_key_gradient(k_gradient),
        shards.reduce_key_gradient(v_gradient),
    )
    # Only automatic axes are summed over here. Over axes that are manual where the op is called,
    # `varying_alike` does it, or the transpose of that `shard_map` where it checks nothing.
    if shards.shared_axes:
        k_gradient, v_gradient = lax.psum((k_gradient, v_gradient), shards.shared_axes)
    query_axes = shards.q_layout.automatic_axes(0, 1)
    if sinks_gradient is not None and query_axes:
        sinks_gradient = lax.psum(sinks_gradient, query_axes)
    return q_gradient, k_gradient, v_gradient, sinks_gradient


_attend.defvjp(_forward, _backward)


def _layout_of_keys(
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


def _check_layouts(q_layout: ArrayLayout, k_layout: ArrayLayout, v_layout: ArrayLayout) -> None:
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
    _check_heads(_Layouts(q_layout, k_layout, v_layout))


def _check_heads(shards: _Layouts) -> None:
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
