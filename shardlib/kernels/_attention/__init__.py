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

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._attention._mask import BlockMask, Mask
from shardlib.kernels._attention._reference import Attention, Beside
from shardlib.kernels._choice import Chosen, Implementation, Task, choose, device_here
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
from shardlib.layouts._rules import axes_without, parts_over

OP = "attention"
IMPLEMENTATIONS = (
    Implementation("reference", None, f"{__name__}._reference"),
    Implementation("splash", "tpu", f"{__name__}._splash"),
    Implementation("cudnn", "gpu", f"{__name__}._cudnn", has_simulator=False),
)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    names: Names | None = None,
    kv_names: Names | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    starts: tuple[Any, Any] | None = None,
    with_lse: bool = False,
    implementation: str | None = None,
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
        causal: a query sees the keys up to its own position.
        window: how many positions before its own a query sees, and how many behind it, `(left,
            right)`, where None is no bound; a number is both.
        segment_ids: a query sees the keys of its own segment: whole numbers, `(batch, queries)`, or
            two arrays, of the queries and of the keys.
        block_mask: which blocks of keys each block of queries sees, see `BlockMask`.
        scale: of the scores; `1 / sqrt(size)` where it is left out.
        soft_cap: scores are softly kept between this and its negative.
        sinks: a score for each head that takes part in the softmax and has no value, `(heads,)`.
        starts: the positions of the first query and of the first key, whole numbers or arrays of
            one; zeros where they are left out. A causal mask or a window of arrays of two lengths
            needs them.
        with_lse: also give the logarithm of the sum of the exponentials of the scores, in float32,
            `(batch, queries, heads)`; results over parts of the keys can be combined by it.
        implementation: None takes what is fastest here; by name, that or an error. See `explain`.

    A query that sees no key gets zeros, and a log-sum-exp of minus infinity. It is computed in
    float32 and rounded once; memory is linear in the lengths. There is no dropout.

    >>> q, k = jnp.zeros((1, 3, 2, 4)), jnp.zeros((1, 3, 1, 4))
    >>> v = jnp.arange(3.0).reshape(1, 3, 1, 1)
    >>> attention(q, k, v, causal=True)[0, :, 0, 0]
    Array([0. , 0.5, 1. ], dtype=float32)
    """
    q, k, v = _checked_arrays(q, k, v)
    q_layout = layout_of(OP, q, names, "q", in_any_order=(0,))
    k_layout = _layout_of_keys("k", k, q_layout, names, kv_names)
    v_layout = _layout_of_keys("v", v, q_layout, names, kv_names)
    _check_layouts(q_layout, k_layout, v_layout)
    mask = _checked_mask(causal, window, block_mask, q_layout, k_layout)
    known, given = _checked_starts(starts, mask, q_layout, k_layout)
    query_segments, key_segments = _checked_segments(segment_ids, q, k)
    definition = Attention(
        scale=_checked_scale(scale, q.shape[-1]),
        mask=mask,
        cap=_checked_cap(soft_cap),
        starts=known,
        own_segments=segment_ids is not None and not isinstance(segment_ids, tuple),
        with_lse=check.boolean(OP, "with_lse", with_lse),
    )
    shards = _Shards(q_layout, k_layout, v_layout)
    arrays = _Arrays(q, k, v, query_segments, key_segments, _checked_sinks(sinks, q), given)
    task = _task(arrays, definition, shards)
    call = Call(choose(IMPLEMENTATIONS, task, implementation), definition, shards)
    if q.size and k.size and v.size:
        y, lse = cast(Any, _attend)(call, *varying_alike(*arrays))
    else:
        # No kernel takes arrays without numbers, and without keys nothing is seen.
        y = jnp.zeros(shards.y_layout.shape, q.dtype)
        lse = jnp.full(shards.lse_layout.shape, -jnp.inf, jnp.promote_types(q.dtype, jnp.float32))
    return (y, lse) if definition.with_lse else y


def _task(arrays: "_Arrays", definition: Attention, shards: "_Shards") -> Task:
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
class _Shards:
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
        if self.q_layout.axes[1]:
            return replace(definition, starts=None)
        return definition

    def keys(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The keys and values that this device's queries need: all positions, and its own heads."""
        k, v = self.gathered(k), self.gathered(v)
        return self.own_heads(k), self.own_heads(v)

    def gathered(self, x: jax.Array) -> jax.Array:
        """All positions of an array of which this device has some, in its second dim."""
        axes = self.k_layout.axes[1]
        if not axes:
            return x
        return lax.all_gather(x, axes, axis=1, tiled=True)

    @property
    def heads(self) -> tuple[int, int]:
        """How many heads and key heads a device has, the latter before it takes its own."""
        return self.q_layout.local_shape[2], self.k_layout.local_shape[2]

    @property
    def key_heads_axes(self) -> tuple[str, ...]:
        """The axes over which heads are split and key heads are not, though they are by others."""
        split = len(self.k_layout.axes[2])
        return self.q_layout.axes[2][split:]

    def own_heads(self, k: jax.Array) -> jax.Array:
        """The key heads that this device's queries need, of those that it has."""
        first, taken = self._own_heads()
        if taken == self.heads[1]:
            return k
        return lax.dynamic_slice_in_dim(k, first, taken, 2)

    def given_back(self, gradient: jax.Array) -> jax.Array:
        """The gradient to this device's shard, from that to what `keys` made of it.

        It is the transpose of `keys`, of one array. JAX's own is not used: in a `shard_map` in
        another one, it finds types that do not agree on what differs between devices.
        """
        first, taken = self._own_heads()
        if taken < self.heads[1]:
            shape = list(gradient.shape)
            shape[2] = self.heads[1]
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
        count = self.heads[1]
        if parts == 1:
            return 0, count
        # With more parts than key heads, several devices take the same.
        return lax.axis_index(axes) * count // parts, max(count // parts, 1)


@dataclass(frozen=True)
class Call:
    """What is known of a call before its numbers are: the static argument of the `custom_vjp`."""

    chosen: Chosen
    definition: Attention
    shards: _Shards

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that forward and backward of the implementation both take."""
        return {"attention": self.shards.on_one_device(self.definition)} | self.chosen.options

    def beside(self, arrays: _Arrays) -> Beside:
        """The other arrays of one device than queries, keys and values, from its shards."""
        starts = arrays.starts
        if self.shards.q_layout.axes[1]:
            if self.definition.starts is not None:
                starts = jnp.array(self.definition.starts, jnp.int32)
            offset = shard_offset(self.shards.q_layout.axes[1], arrays.q.shape[1])
            starts = starts.at[0].add(offset)
        key_segments = arrays.key_segments
        if key_segments is not None:
            key_segments = self.shards.gathered(key_segments)
        return Beside(arrays.query_segments, key_segments, arrays.sinks, starts, self._pattern())

    def _pattern(self) -> Any:
        """The pattern of the block mask for this device's heads; None without one."""
        blocks = self.definition.mask.blocks
        if blocks is None:
            return None
        if blocks.heads is None:
            return jnp.asarray(blocks.pattern[None])
        heads = self.shards.heads[0]
        first = shard_offset(self.shards.q_layout.axes[2], heads)
        return lax.dynamic_slice_in_dim(jnp.asarray(blocks.pattern), first, heads, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: Call, *arrays: Any) -> tuple[Any, Any]:
    """What each device's queries take from the values, and their log-sum-exp."""

    def run_shard(*shards: Any) -> tuple[Any, Any]:
        own = _Arrays(*shards)
        k, v = call.shards.keys(own.k, own.v)
        implementation = call.chosen.implementation
        return implementation.forward(own.q, k, v, call.beside(own), **call.options)

    results = (call.shards.y_layout, call.shards.lse_layout)
    return per_shard(run_shard, arrays, call.shards.layouts, results)


def _forward(call: Call, *arrays: Any) -> tuple[Any, Any]:
    """The results, and what backward needs."""
    results = cast(Any, _attend)(call, *arrays)
    return results, (arrays, results)


def _backward(call: Call, saved: Any, gradients: Any) -> tuple[Any, ...]:
    """The gradients to queries, keys, values and sinks; the other arrays have none."""
    arrays, results = saved
    shards = call.shards

    def run_shard(*operands: Any) -> tuple[Any, ...]:
        own = _Arrays(*operands[:-4])
        own_results, own_gradients = operands[-4:-2], operands[-2:]
        k, v = shards.keys(own.k, own.v)
        q_gradient, k_gradient, v_gradient, sinks_gradient = call.chosen.implementation.backward(
            own.q, k, v, call.beside(own), own_results, own_gradients, **call.options
        )
        k_gradient, v_gradient = shards.given_back(k_gradient), shards.given_back(v_gradient)
        if shards.shared_axes:
            k_gradient, v_gradient = lax.psum((k_gradient, v_gradient), shards.shared_axes)
        query_axes = shards.q_layout.automatic_axes(0, 1)
        if sinks_gradient is not None and query_axes:
            sinks_gradient = lax.psum(sinks_gradient, query_axes)
        return q_gradient, k_gradient, v_gradient, sinks_gradient

    operands = (*arrays, *results, *gradients)
    result_layouts = (shards.y_layout, shards.lse_layout)
    layouts = (*shards.layouts, *result_layouts, *result_layouts)
    sinks = _Arrays(*arrays).sinks
    gradient_layouts: list[Any] = [shards.q_layout, shards.k_layout, shards.v_layout, None]
    if sinks is not None:
        gradient_layouts[3] = shards.layouts.sinks
    gradient = per_shard(run_shard, operands, layouts, tuple(gradient_layouts))
    q_gradient, k_gradient, v_gradient, sinks_gradient = gradient
    if sinks is not None:
        sinks_gradient = sinks_gradient.astype(sinks.dtype)
    return q_gradient, k_gradient, v_gradient, None, None, sinks_gradient, None


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
    _check_heads(_Shards(q_layout, k_layout, v_layout))


def _check_heads(shards: _Shards) -> None:
    """Refuse heads of which a device would need a part of those that one key head serves."""
    heads, key_heads = shards.heads
    parts = parts_over(mesh_of_shards().shape, shards.key_heads_axes)
    taken = max(key_heads // parts, 1)
    even = key_heads % parts == 0 or parts % key_heads == 0
    if heads % taken or not even:
        raise ValueError(
            f"`{OP}`: {heads} heads on a device and {key_heads} key heads, of which each of "
            f"{parts} devices takes those that its heads need: one number must divide the other, "
            "so that each key head serves as many heads."
        )


def _checked_arrays(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values as arrays, if they fit each other."""
    q, k = check_arrays.as_array(OP, "q", q), check_arrays.as_array(OP, "k", k)
    v = check_arrays.as_array(OP, "v", v)
    shapes = f"`q` {list(q.shape)}, `k` {list(k.shape)} and `v` {list(v.shape)}"
    for x in (q, k, v):
        if x.ndim != 4 or not check_arrays.is_float(x.dtype) or x.dtype != q.dtype:
            raise ValueError(
                f"`{OP}` of {shapes}, of {q.dtype}, {k.dtype} and {v.dtype}: give it floats of 16 "
                "bits or more, all of one dtype, with the dims (batch, positions, heads, size)."
            )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"`{OP}` of {shapes}: batches must be equal, keys and values differ in the last dim at "
            "most, and queries and keys have heads of one size."
        )
    if not q.shape[3] or not q.shape[2] or not k.shape[2]:
        raise ValueError(f"`{OP}` of {shapes}: there are no heads, or they have no numbers.")
    return q, k, v


def _checked_mask(
    causal: Any, window: Any, block_mask: Any, q_layout: ArrayLayout, k_layout: ArrayLayout
) -> Mask:
    """The band and the blocks of a mask, from the arguments."""
    causal = check.boolean(OP, "causal", causal)
    takes = "a whole number, or two, `(left, right)`, where None is no bound"
    left = right = window
    if isinstance(window, tuple):
        if len(window) != 2:
            raise check.refusal(OP, "window", window, takes)
        left, right = window
    left = check.whole(OP, "window", left, takes, least=0, optional=True)
    right = check.whole(OP, "window", right, takes, least=0, optional=True)
    if causal:
        right = 0
    takes = "a `sl.kernels.BlockMask`"
    check.kind(OP, "block_mask", block_mask, BlockMask, takes, optional=True)
    if block_mask is not None:
        heads = q_layout.global_shape[2]
        if block_mask.heads not in (None, heads):
            raise ValueError(
                f"`{OP}(block_mask=...)` has patterns for {block_mask.heads} heads, and `q` has "
                f"{heads}. One pattern, without the dim of heads, is for all."
            )
    return Mask(left, right, block_mask)


def _checked_starts(
    starts: Any, mask: Mask, q_layout: ArrayLayout, k_layout: ArrayLayout
) -> tuple[tuple[int, int] | None, jax.Array | None]:
    """The positions of the first query and key: as numbers, or as an array if they are traced."""
    queries, keys = q_layout.global_shape[1], k_layout.global_shape[1]
    takes = "the positions of the first query and of the first key, two whole numbers"
    if starts is None:
        if queries != keys and not mask.everything:
            raise ValueError(
                f"`{OP}` of {queries} queries and {keys} keys with a causal mask, a window or a "
                "block mask, and it is not said which stand at the same position: say where each "
                f"starts, `starts=(0, 0)`, or `starts=({max(keys - queries, 0)}, "
                f"{max(queries - keys, 0)})` if the last are at the same."
            )
        starts = (0, 0)
    check.kind(OP, "starts", starts, tuple, takes)
    if len(starts) != 2:
        raise check.refusal(OP, "starts", starts, takes)
    if any(isinstance(start, jax.Array) for start in starts):
        arrays = []
        for start in starts:
            array = check_arrays.as_array(OP, "starts", start, takes)
            if array.shape or not jnp.issubdtype(array.dtype, jnp.integer):
                raise check.refusal(OP, "starts", start, takes)
            arrays.append(array.astype(jnp.int32))
        return None, jnp.stack(arrays)
    known = tuple(check.whole(OP, "starts", start, takes, least=0) for start in starts)
    if mask.blocks is not None:
        _check_covered(mask.blocks, (known[0] + queries, known[1] + keys))
    return (known[0], known[1]), None


def _check_covered(blocks: BlockMask, ends: tuple[int, int]) -> None:
    """Refuse a pattern that ends before the queries or the keys do."""
    for what, end, covered in zip(("queries", "keys"), ends, blocks.lengths, strict=True):
        if end > covered:
            raise ValueError(
                f"`{OP}(block_mask=...)` covers {covered} positions of {what}, and they end at "
                f"{end}: the pattern has {list(blocks.pattern.shape)} blocks of {blocks.size}."
            )


def _checked_segments(segment_ids: Any, q: jax.Array, k: jax.Array) -> tuple[Any, Any]:
    """The segments of queries and of keys, whole numbers; two Nones where there are none."""
    if segment_ids is None:
        return None, None
    pair = segment_ids
    if not isinstance(segment_ids, tuple):
        pair = (segment_ids, segment_ids)
    takes = "whole numbers, (batch, positions), or two arrays, of the queries and of the keys"
    if len(pair) != 2:
        raise check.refusal(OP, "segment_ids", segment_ids, takes)
    segments = []
    for ids, x, what in zip(pair, (q, k), ("queries", "keys"), strict=True):
        ids = check_arrays.as_array(OP, "segment_ids", ids, takes)
        if ids.shape != x.shape[:2] or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise ValueError(
                f"`{OP}(segment_ids=...)` of the {what}: {ids.dtype}{list(ids.shape)}, and they "
                f"are {list(x.shape[:2])}: it takes {takes}."
            )
        segments.append(ids.astype(jnp.int32))
    return segments[0], segments[1]


def _checked_sinks(sinks: Any, q: jax.Array) -> Any:
    """The sinks as an array, a float for each head; None where there are none."""
    if sinks is None:
        return None
    sinks = check_arrays.as_array(OP, "sinks", sinks)
    if sinks.shape != (q.shape[2],) or not check_arrays.is_float(sinks.dtype):
        raise ValueError(
            f"`{OP}`: `sinks` is {sinks.dtype}{list(sinks.shape)}; it has a float for each of the "
            f"{q.shape[2]} heads of `q`."
        )
    return sinks


def _checked_cap(soft_cap: Any) -> float | None:
    """What the scores are kept below; None where they are not."""
    check.number(OP, "soft_cap", soft_cap, optional=True, above=0)
    return None if soft_cap is None else float(soft_cap)


def _checked_scale(scale: Any, size: int) -> float:
    """The factor of the scores."""
    if scale is None:
        return 1 / math.sqrt(size)
    takes = "a Python number; multiply `q` by what has a gradient"
    return float(check.number(OP, "scale", scale, takes))
