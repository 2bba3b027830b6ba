"""Attention, forward and backward, without its scores in memory.

The public function checks its arguments, finds out how they are laid out, chooses an implementation
and calls it on each device's own shard. What devices exchange:

    keys and values     where their positions are split, each device gathers all of them; backward
                        their gradients are summed and scattered. Rules may have other forms:
                        a ring of devices, or heads split in place of positions
    key heads           where query heads are split over more axes than key heads, each device
                        takes those that its queries need; backward their gradients are summed

Forward and backward are one `custom_vjp`. It saves each device's own shards, the result and the
log-sum-exp, and backward gathers keys and values a second time.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.kernels._attention._layouts import (
    Arrays,
    Forms,
    Layouts,
    check_layouts,
    forms_of,
    layout_of_keys,
)
from shardlib.kernels._attention._options import (
    OP,
    AttentionOptions,
    checked_arrays,
    checked_options,
)
from shardlib.kernels._attention._reference import Attention, SideInputs
from shardlib.kernels._attention._ring import Ring
from shardlib.kernels._attention._ring_passes import ring_backward, ring_forward
from shardlib.kernels._attention._ulysses import head_exchange
from shardlib.kernels._choice import Chosen, Implementation, Task, choose, device_here
from shardlib.kernels._rows import compute_dtype
from shardlib.kernels._shards import (
    Names,
    layout_of,
    partitioned,
    per_shard,
    shard_offset,
    varying,
    varying_alike,
)
from shardlib.layouts._checkpoint_policies import BESIDE, CONTEXT
from shardlib.layouts._rules import SEQUENCE
from shardlib.tracing._compressed_saves import named

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
    arranged: bool = False,
    implementation: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Any:
    """`softmax(scale * q @ k) @ v` for each head, over the keys that a query sees.

    Args:
        q: `(batch, queries, heads, size)`, of float32, bfloat16 or float16.
        k: `(batch, keys, key heads, size)`. There may be fewer key heads than heads: each serves
            as many heads, in order.
        v: as `k`; its last dim may have another size, and so has the result.
        names: the names of the dims of `q`, if they are split over devices; the last dim must be
            whole.
        kv_names: the same for `k` and `v`. Key heads that are too few to be split over the axes of
            the query heads are whole on every device.
        arranged: whether the positions of queries, keys and segments are in the order of
            `sl.context.arrange`.
        implementation: None chooses the fastest one here. A name chooses that one, or raises an
            error if it cannot run. See `explain`.
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
    k_layout = layout_of_keys("k", k, q_layout, names, kv_names)
    v_layout = layout_of_keys("v", v, q_layout, names, kv_names)
    check_layouts(q_layout, k_layout, v_layout)
    asked = checked_options(options, (q, k), (q_layout.global_shape, k_layout.global_shape))
    definition, shards = asked.definition, Layouts(q_layout, k_layout, v_layout)
    arrays = Arrays(q, k, v, asked.query_segments, asked.key_segments, asked.sinks, asked.starts)
    if q.size and k.size:
        name = SEQUENCE if names is None or names[1] is None else names[1]
        forms = forms_of(shards, check.boolean(OP, "arranged", arranged), name)
        y, lse = _attention_of(definition, arrays, shards, forms, implementation)
    else:
        # There is nothing to attend to: only sinks are left in the softmax.
        y = jnp.zeros(shards.y_layout.shape, q.dtype)
        only_sinks = jnp.float32(-jnp.inf) if asked.sinks is None else asked.sinks
        dtype = compute_dtype(q.dtype)
        lse = jnp.broadcast_to(jnp.asarray(only_sinks, dtype), shards.lse_layout.shape)
    return (y, lse) if definition.with_lse else y


def _attention_of(
    definition: Attention,
    arrays: Arrays,
    shards: Layouts,
    forms: Forms,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """The results, in the forms that the rules have for the axes that split positions."""
    exchange = None
    if forms.ulysses:
        exchange = head_exchange(shards, forms.ulysses)
        arrays, shards = exchange.to_heads(arrays), exchange.after
    shards = replace(shards, ring_axes=forms.ring, zigzag=forms.zigzag)
    call = Call(_chosen(arrays, definition, shards, implementation), definition, shards)
    # What has a derivative of its own inside is not given another one.
    attend: Any = _run if call.chosen.implementation.differentiable else _attend
    results = attend(call, *varying_alike(*arrays))
    return results if exchange is None else exchange.to_positions(results)


def _chosen(
    arrays: Arrays, definition: Attention, shards: Layouts, implementation: str | None
) -> Chosen:
    """The implementation that one device's shards are given to."""
    if not shards.ring_axes:
        return choose(IMPLEMENTATIONS, _task(arrays, definition, shards), implementation)
    # Of a block's attention a ring needs the gradients that it has among all blocks.
    usable = [one for one in IMPLEMENTATIONS if not one.differentiable]
    if implementation in {one.name for one in IMPLEMENTATIONS if one.differentiable}:
        raise ValueError(
            f'`{OP}(implementation="{implementation}")` in a ring over '
            f"{listed(shards.ring_axes)}: its backward pass takes all keys at once. Name another, "
            'or use the form "ulysses" or "gather": `rules.attention(...)`.'
        )
    task = _task(arrays._replace(sinks=None), definition, shards)
    return choose(tuple(usable), task, implementation)


def _task(arrays: Arrays, definition: Attention, shards: Layouts) -> Task:
    """What one device is asked to do."""
    local, differing = {}, frozenset[str]()
    for name, array, layout in zip(Arrays._fields, arrays, shards.layouts, strict=True):
        if array is not None:
            local[name] = layout.local(array.dtype)
            differing |= varying(array)
    return Task(
        OP,
        local,
        partitioned(shards.q_layout),
        differing=differing,
        device=device_here(),
        length=shards.block_length,
        definition=shards.on_one_device(definition),
    )


@dataclass(frozen=True)
class Call:
    """What is known of a call before its numbers are: the static argument of the `custom_vjp`."""

    chosen: Chosen
    definition: Attention
    shards: Layouts

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that forward and backward of the implementation both take."""
        return {"attention": self.shards.on_one_device(self.definition)} | self.chosen.options

    def side_inputs(self, arrays: Arrays) -> SideInputs:
        """The arrays besides queries, keys and values as one device needs them, of its shards."""
        starts = arrays.starts
        if (self.shards.splits_queries or self.shards.ring_axes) and starts is None:
            starts = jnp.array(self.definition.starts, jnp.int32)
        # In zigzag order, the ring says which stretches each device has.
        if self.shards.splits_queries and not self.shards.zigzag:
            offset = shard_offset(self.shards.q_layout.axes[1], arrays.q.shape[1])
            starts = starts.at[0].add(offset)
        key_segments = arrays.key_segments
        if key_segments is not None:
            key_segments = self.shards.gathered(key_segments)
        return SideInputs(
            arrays.query_segments, key_segments, arrays.sinks, starts, self._pattern()
        )

    def ring(self, side: SideInputs) -> Ring:
        """The place of this device in the ring, with its other arrays."""
        shards = self.shards
        lengths = shards.q_layout.local_shape[1], shards.block_length * shards.stretches
        # Where queries are split further, a device of the ring has some of its queries only.
        starts = self.definition.starts if shards.is_split_by_the_ring_alone else None
        return Ring(shards.ring_axes, shards.zigzag, self.definition.mask, starts, lengths, side)

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
        own = Arrays(*shards)
        k, v = call.shards.keys(own.k, own.v)
        attend = partial(call.chosen.implementation.forward, **call.options)
        side = call.side_inputs(own)
        if call.shards.ring_axes:
            return ring_forward(attend, call.ring(side), own.q, k, v)
        return attend(own.q, k, v, side)

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
    sinks = Arrays(*arrays).sinks
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
    own = Arrays(*operands[:-4])
    own_results, own_gradients = operands[-4:-2], operands[-2:]
    # Gathered again: kept since forward, they would take the place of whole keys in memory.
    k, v = shards.keys(own.k, own.v)
    differentiate = partial(call.chosen.implementation.backward, **call.options)
    side, given = call.side_inputs(own), (own_results, own_gradients)
    if shards.ring_axes:
        found = ring_backward(differentiate, call.ring(side), own.q, k, v, *given)
    else:
        found = differentiate(own.q, k, v, side, *given)
    q_gradient, k_gradient, v_gradient, sinks_gradient = found
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
