"""What defines an attention besides its queries, keys and values, and whether it makes sense."""

import math
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.kernels._attention._mask import BlockMask, Mask
from shardlib.kernels._attention._reference import Attention

OP = "attention"
LAST_POSITION = 2**31 - 1  # positions are whole numbers of 32 bits


class AttentionOptions(TypedDict, total=False):
    """Which keys a query sees, and how scores are made, as keywords of `attention`.

    - `causal`: a query sees the keys up to its own position.
    - `window`: query `i` sees keys `i - left` to `i + right`, of `(left, right)`, where None is no
      bound; a number is both. `causal` makes `right` zero.
    - `segment_ids`: a query sees the keys of its own segment: whole numbers, `(batch, queries)`, or
      two arrays, of the queries and of the keys.
    - `block_mask`: which blocks of keys each block of queries sees, see `BlockMask`.
    - `scale`: the factor of the scores; by default `1 / sqrt(size)`.
    - `soft_cap`: limits scores smoothly, `soft_cap * tanh(score / soft_cap)`.
    - `sinks`: an additional score for each head, `(heads,)`, which takes part in the softmax but
      has no value.
    - `starts`: the positions of the first query and of the first key, whole numbers, which may be
      traced; zeros by default. A causal mask, a window or a block mask needs them if there are not
      as many queries as keys.
    - `with_lse`: also return the log-sum-exp of the scores, in float32, `(batch, queries, heads)`.
      With it, results over parts of the keys can be combined.
    """

    causal: bool
    window: int | tuple[int | None, int | None] | None
    segment_ids: Any
    block_mask: BlockMask | None
    scale: float | None
    soft_cap: float | None
    sinks: jax.Array | None
    starts: tuple[Any, Any] | None
    with_lse: bool


class Asked(NamedTuple):
    """What options ask for: the definition, and arrays, each of which may be None."""

    definition: Attention
    query_segments: Any
    key_segments: Any
    sinks: Any
    starts: Any  # two whole numbers, where only the running program knows them


def checked_options(
    options: AttentionOptions,
    arrays: tuple[jax.Array, jax.Array],
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> Asked:
    """What options ask for, if that makes sense.

    Args:
        options: the keywords that were given.
        arrays: queries and keys, as far as the caller has them.
        shapes: of all queries and of all keys, on all devices.
    """
    check.keywords(OP, options, AttentionOptions)
    q, k = arrays
    queries, heads = shapes[0][1:3]
    mask = _checked_mask(
        options.get("causal", False), options.get("window"), options.get("block_mask"), heads
    )
    keys = shapes[1][1]
    known, given = _checked_starts(options.get("starts"), mask, queries, keys)
    mask = mask.without_needless_bounds(*_distances(known, queries, keys))
    segment_ids = options.get("segment_ids")
    query_segments, key_segments = _checked_segments(segment_ids, q, k)
    definition = Attention(
        scale=_checked_scale(options.get("scale"), q.shape[-1]),
        mask=mask,
        cap=_checked_cap(options.get("soft_cap")),
        starts=known,
        same_segment_ids=segment_ids is not None and not isinstance(segment_ids, tuple),
        with_lse=check.boolean(OP, "with_lse", options.get("with_lse", False)),
    )
    sinks = _checked_sinks(options.get("sinks"), q)
    return Asked(definition, query_segments, key_segments, sinks, given)


def checked_arrays(q: Any, k: Any, v: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
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


def _checked_mask(causal: Any, window: Any, block_mask: Any, heads: int) -> Mask:
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
    # A window to the right of a causal mask would say that a query sees what it must not.
    if causal:
        right = 0
    _check_block_mask(block_mask, heads)
    return Mask(left, right, block_mask)


def _check_block_mask(block_mask: Any, heads: int) -> None:
    """Refuse what is no pattern of blocks, or has patterns for another number of heads."""
    takes = "a `sl.kernels.BlockMask`"
    check.kind(OP, "block_mask", block_mask, BlockMask, takes, optional=True)
    if block_mask is not None and block_mask.heads not in (None, heads):
        raise ValueError(
            f"`{OP}(block_mask=...)` has patterns for {block_mask.heads} heads, and `q` has "
            f"{heads}. One pattern, without the dim of heads, is for all."
        )


def _checked_starts(
    starts: Any, mask: Mask, queries: int, keys: int
) -> tuple[tuple[int, int] | None, jax.Array | None]:
    """The positions of the first query and key: as numbers, or as an array if they are traced."""
    takes = "the positions of the first query and of the first key, two whole numbers"
    if starts is None:
        # Others align the first positions, or the last: neither is a guess to make silently.
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
    # Tracers are arrays too: a kernel that leaves out blocks before it runs cannot use these.
    if any(isinstance(start, jax.Array) for start in starts):
        arrays = []
        for start in starts:
            array = check_arrays.as_array(OP, "starts", start, takes)
            if array.shape or not jnp.issubdtype(array.dtype, jnp.integer):
                raise check.refusal(OP, "starts", start, takes)
            arrays.append(array.astype(jnp.int32))
        return None, jnp.stack(arrays)
    # The end of the keys, and that of the queries, is a position too.
    most = LAST_POSITION - max(queries, keys)
    known = tuple(check.whole(OP, "starts", start, takes, least=0, most=most) for start in starts)
    if mask.block_mask is not None:
        _check_covered(mask.block_mask, (known[0] + queries, known[1] + keys))
    return (known[0], known[1]), None


def _distances(starts: tuple[int, int] | None, queries: int, keys: int) -> tuple[int, int]:
    """The smallest and the largest `key - query` of any positions that there may be."""
    if starts is None:
        return -LAST_POSITION, LAST_POSITION
    first_query, first_key = starts
    return first_key - (first_query + queries - 1), first_key + keys - 1 - first_query


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
    # One array is of both, which is only possible where queries and keys are as many.
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
        # Kernels compare 32 bits. Longer ids are kept, since two of them may agree in these.
        if ids.dtype.itemsize <= 4:
            ids = ids.astype(jnp.int32)
        segments.append(ids)
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
