"""Attention on TPUs by JAX's splash kernel.

The kernel walks over the blocks of keys that a mask leaves to each block of queries; a band is
computed within it, and blocks of a pattern are left out of its grid. What is done around it:

    its arrays have the heads before the positions, and one sequence: the batch is a `vmap`
    it does not scale, so that queries are scaled before, and their gradient after
    a query that sees nothing gets arbitrary numbers, which are replaced by zeros here
    its backward kernels are called one by one, for they take the sum `dy . y` of each query as an
    operand, and the gradient to the log-sum-exp is a part of that

Its fused backward kernel keeps a gradient of all queries for each block of keys, memory that grows
with the square of the length. The two kernels that are called here each make the scores again.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from shardlib.kernels._attention._mask import Mask, Tiling
from shardlib.kernels._attention._reference import (
    Attention,
    SideInputs,
    sink_gradient,
    softmax_residuals,
)
from shardlib.kernels._choice import Task, device_here
from shardlib.kernels._tpu import LANES, MIB, vmem_bytes
from shardlib.kernels._tpu import supported as refuses_dtypes

# The score of what is masked, as in JAX's kernel. It is no infinity, so that the difference of two
# is a number, and leaves room for the kernel to subtract from it.
MASKED_SCORE = -0.7 * float(np.finfo(np.float32).max)


def refuses(task: Task) -> str | None:
    """Why the kernel cannot do a task; None if it can.

    The text continues a sentence that begins with the implementation's name.
    """
    wrong_dtype = refuses_dtypes(task)
    if wrong_dtype is not None:
        return wrong_dtype
    attention: Attention = task.definition
    q, k, v = (task.arrays[name] for name in ("q", "k", "v"))
    mask = attention.mask
    if attention.starts is None:
        return (
            "takes positions that are known before the program runs; here the device computes "
            "where its queries or keys start"
        )
    if task.differing:
        return (
            "keeps no account of what differs between devices, and here that is known over "
            f"`{', '.join(sorted(task.differing))}`: `shard_map(..., check_vma=False)` wants none"
        )
    for what, length in (("queries", q.shape[1]), ("keys", k.shape[1])):
        if length % LANES:
            raise_to = length + -length % LANES
            return (
                f"takes lengths that {LANES} divides, and there are {length} {what} on a device; "
                f"pad them to {raise_to}, with a segment of their own"
            )
    if v.shape[3] != q.shape[3]:
        return f"takes values of the size of keys; here {v.shape[3]} and {q.shape[3]}"
    pattern = mask.block_mask
    if pattern is not None and pattern.heads not in (None, q.shape[2]):
        return (
            f"takes one pattern of blocks for all heads where heads are split over devices; here "
            f"{pattern.heads} heads have one each"
        )
    if _leaves_nothing(mask, (q.shape[1], k.shape[1]), attention.starts):
        return "takes a mask that leaves some key to some query, and this one leaves none"
    return None


@functools.lru_cache(maxsize=64)
def _leaves_nothing(mask: Mask, lengths: tuple[int, int], starts: tuple[int, int]) -> bool:
    """Whether there is a head in which no query sees any key, which JAX's kernel cannot be made of.

    Args:
        mask: the mask.
        lengths: how many queries and how many keys there are.
        starts: the positions of the first of each.
    """
    queries, keys = (Tiling(length, LANES) for length in lengths)
    within = np.arange(LANES)
    for one_head in mask.of_each_head():
        # A pair of tiles that the band and the pattern both touch may still leave nothing. Mostly
        # the first pair leaves something, and no other is looked at.
        for pair in one_head.pairs(queries, keys, starts):
            query_positions = starts[0] + pair[0] * LANES + within
            key_positions = starts[1] + pair[1] * LANES + within
            if one_head.seen(query_positions, key_positions).any():
                break
        else:
            return True
    return False


def forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    side: SideInputs,
    *,
    attention: Attention,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The output of each query and head, and its log-sum-exp; arguments as in the reference."""
    kernel = _kernel(q, k, attention, simulated)

    def one_sequence(q: Any, k: Any, v: Any, segments: Any) -> tuple[Any, Any]:
        y, (lse,) = kernel(q, k, v, segments, side.sinks)
        return y, lse

    # The compiler makes the scaling a part of what makes the queries.
    q = _heads_first((q * attention.scale).astype(q.dtype))
    y, lse = jax.vmap(one_sequence)(q, _heads_first(k), _heads_first(v), _segments(side))
    if _may_see_nothing(q.shape[2], k.shape[1], side, attention):
        # All scores of such a query are `MASKED_SCORE`, so that the kernel takes the mean of the
        # values, and the log-sum-exp is about that score. What is no number is larger than none.
        sees_nothing = lse <= MASKED_SCORE / 2
        y, lse = jnp.where(sees_nothing[..., None], 0, y), jnp.where(sees_nothing, -jnp.inf, lse)
    return _heads_first(y), lse.swapaxes(1, 2)


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    side: SideInputs,
    results: tuple[jax.Array, jax.Array],
    gradients: tuple[jax.Array, jax.Array],
    *,
    attention: Attention,
    simulated: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """The gradients to queries, keys, values and sinks; arguments as in the reference."""
    kernel = _kernel(q, k, attention, simulated)
    # For a query that saw nothing both are zero. The kernel then makes `exp(MASKED_SCORE - 0)` of
    # its scores, which is zero, so that it adds to no gradient.
    lse, delta = softmax_residuals(results, gradients)

    def one_sequence(*arrays: Any) -> tuple[Any, ...]:
        return _gradients(kernel, *arrays)

    scaled = (q * attention.scale).astype(q.dtype)
    heads_first = (_heads_first(x) for x in (scaled, k, v))
    y_gradient = _heads_first(gradients[0])
    q_gradient, k_gradient, v_gradient = jax.vmap(one_sequence)(
        *heads_first, _segments(side), lse.swapaxes(1, 2), y_gradient, delta.swapaxes(1, 2)
    )
    q_gradient = _heads_first((q_gradient * attention.scale).astype(q.dtype))
    sinks_gradient = sink_gradient(side.sinks, lse, delta)
    return q_gradient, _heads_first(k_gradient), _heads_first(v_gradient), sinks_gradient


def _gradients(
    kernel: Any, q: Any, k: Any, v: Any, segments: Any, lse: Any, y_gradient: Any, delta: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients to one sequence's queries, keys and values, by the two backward kernels.

    Args:
        kernel: what `_kernel` made.
        q: scaled queries, (heads, queries, size); k and v likewise.
        k: keys.
        v: values.
        segments: of queries and keys, or None.
        lse: (heads, queries).
        y_gradient: the gradient to the result.
        delta: for each query, that times the result, less the gradient to its log-sum-exp.
    """
    sizes: Any = kernel.kwargs["block_sizes"]
    options = {
        "is_mqa": False,
        "mask_value": kernel.kwargs["mask_value"],
        "attn_logits_soft_cap": kernel.kwargs["attn_logits_soft_cap"],
        "mask_function": kernel.kwargs["mask_function"],
        "interpret": kernel.kwargs["interpret"],
        "q_layout": sizes.q_layout,
        "k_layout": sizes.k_layout,
        "v_layout": sizes.v_layout,
    }
    # Sinks are in `lse` already.
    operands = (q, k, v, segments, None, lse, y_gradient, delta)
    # The derivative that JAX gives its kernel takes no gradient to the log-sum-exp. Here that is a
    # part of `delta`. The two kernels are private in JAX: the tests of attention hold them to the
    # reference on every version of JAX that is supported.
    _, k_gradient, v_gradient = splash._splash_attention_bwd_dkv(
        *operands,
        bq=sizes.block_q_dkv,
        bkv=sizes.block_kv_dkv,
        bkv_compute=sizes.block_kv_dkv_compute,
        mask_info=_collapsed(kernel.dkv_mask_info),
        use_fused_bwd_kernel=False,
        **options,
    )
    q_gradient = splash._splash_attention_bwd_dq(
        *operands,
        bq=sizes.block_q_dq,
        bkv=sizes.block_kv_dq,
        mask_info=_collapsed(kernel.dq_mask_info),
        **options,
    )
    return q_gradient, k_gradient, v_gradient


def _collapsed(mask_info: Any) -> Any:
    """A mask's blocks, with one dim for all that are partly seen, as the kernels read them.

    JAX does the same in its public function, which is not called backward.
    """
    blocks = mask_info.partial_mask_blocks
    if blocks is None:
        return mask_info
    return mask_info._replace(partial_mask_blocks=blocks.reshape(-1, *blocks.shape[-2:]))


def _kernel(q: jax.Array, k: jax.Array, attention: Attention, simulated: bool) -> Any:
    """JAX's kernel for such queries and keys, with what it makes of the mask."""
    queries, heads = q.shape[1:3]
    keys = k.shape[1]
    row_bytes = q.shape[3] * jnp.dtype(q.dtype).itemsize
    largest = _largest_block(attention.mask, row_bytes)
    # The blocks of what stays in fast memory, and of what is fetched again and again.
    inner = _largest_inner_block(attention.mask, largest)
    sizes = splash.BlockSizes(
        block_q=_block(queries, largest),
        block_kv=_block(keys, inner),
        block_q_dkv=_block(queries, inner),
        block_kv_dkv=_block(keys, largest),
        block_q_dq=_block(queries, largest),
        block_kv_dq=_block(keys, inner),
    )
    assert attention.starts is not None
    return splash.make_splash_mha(
        mask=_mask(attention.mask, queries, keys, heads, attention.starts),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        save_residuals=True,
        mask_value=MASKED_SCORE,
        attn_logits_soft_cap=attention.cap,
        interpret=simulated,
    )


def _largest_block(mask: Mask, row_bytes: int) -> int:
    """How many queries or keys a block may have.

    Blocks of 1,024 are read least often. With their scores and gradients they fit the 16 MiB that
    the compiler gives a kernel, but not on a core that has no more, nor with bools for each
    score, as which a pattern of blocks comes, nor with long rows in float32.
    """
    is_small = vmem_bytes(device_here().kind) < 16 * MIB
    if mask.block_mask is not None or is_small or row_bytes > 512:
        return 512
    return 1024


def _largest_inner_block(mask: Mask, outer: int) -> int:
    """How many positions a block of the inner loop may have, beside the largest of the outer one.

    Of a narrow band, smaller ones compute and fetch less that nobody sees.
    """
    if mask.left is None or mask.right is None or mask.left + mask.right >= outer:
        return outer
    return 256


def _block(length: int, largest: int) -> int:
    """How many of so many queries or keys a block has, in whole tiles that divide the length."""
    tiles = length // LANES
    for count in range(largest // LANES, 1, -1):
        if tiles % count == 0:
            return count * LANES
    return LANES


@functools.lru_cache(maxsize=64)
def _mask(
    mask: Mask, queries: int, keys: int, heads: int, starts: tuple[int, int]
) -> masks.MultiHeadMask:
    """The mask as JAX's kernel takes it: one for each head."""
    shape = (queries, keys)
    if mask.block_mask is not None:
        patterns: list[Any] = [_Pattern(own, shape, starts) for own in mask.of_each_head()]
        if len(patterns) == 1:
            patterns *= heads
        return masks.MultiHeadMask(patterns)
    # Without bounds JAX's window would give one bool for all scores, which the kernel cannot read.
    one: Any = masks.FullMask(shape)
    if not mask.everything:
        one = masks.LocalMask(shape, (mask.left, mask.right), offset=starts[0] - starts[1])
    return masks.MultiHeadMask([one] * heads)


class _Pattern(masks.Mask):
    """A band and a pattern of blocks of one head, whose bools are made when they are asked for."""

    def __init__(self, mask: Mask, shape: tuple[int, int], starts: tuple[int, int]) -> None:
        # Heads with equal patterns have equal masks, of which the kernel keeps one.
        self._key = (mask, shape, starts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Queries and keys."""
        return self._key[1]

    def __getitem__(self, index: Any) -> np.ndarray:
        mask, shape, starts = self._key
        # Only a block of the whole is asked for at a time: all of it would not fit.
        queries = np.arange(shape[0])[index[0]] + starts[0]
        keys = np.arange(shape[1])[index[1]] + starts[1]
        return mask.seen(queries, keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Pattern) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _may_see_nothing(queries: int, keys: int, side: SideInputs, attention: Attention) -> bool:
    """Whether there may be a query that sees no key.

    Sinks do not rule that out: one of minus infinity takes no part in the softmax.
    """
    segments = side.query_segments is not None
    if attention.mask.everything and not segments:
        return False
    assert attention.starts is not None
    # Bounds of a band are zero or more. So if queries and keys start at one position, each query
    # sees the key at its own, which is of its own segment; a pattern of blocks may leave it out.
    same_positions = queries == keys and attention.starts[0] == attention.starts[1]
    same_segment_ids = attention.same_segment_ids or not segments
    return not (same_positions and same_segment_ids and attention.mask.block_mask is None)


def _segments(side: SideInputs) -> Any:
    """The segments of queries and keys as JAX's kernel takes them; None where there are none."""
    if side.query_segments is None:
        return None
    return splash.SegmentIds(side.query_segments, side.key_segments)


def _heads_first(x: jax.Array) -> jax.Array:
    """The array with its second dim and its third exchanged: positions and heads."""
    return x.swapaxes(1, 2)
