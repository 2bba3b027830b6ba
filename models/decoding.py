"""Decoding: keys and values of earlier tokens are kept in a cache, and new tokens attend to them.

    tokens [B, S]  --prefill-->  logits for the token after each row's last, and a cache
    tokens [B, 1]  --extend--->  logits for the token after these, and the cache with them too
                     ...

The blocks are those of training. What differs is what their attention sees: the tokens of a block,
one a row or a stretch of a long prompt, are written to the cache, and see what is in it up to
themselves. The cache is laid out by the names in `CACHE`: rows over the axes of the batch, key
heads as in training, and slots (`cache_seq`) over the axes of a context, if there are any.

Prompts of different lengths end in the same slot: shorter ones are padded on the left, and padding
is a segment of its own, which no token sees. Positions count from each row's first token.

Shape suffixes are those of `models/layers.py`, and

    L  layers      C  slots of the cache (cache_seq)      R  query heads of a key head

What devices exchange for one token, under tensor parallelism: two sums of `[B, 1, D]` a layer, as
in training, and what the embedding and the head do. Where slots are split, also the largest score,
the sum of exponentials and the result of each query; keys and values stay where they are.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

import shardlib as sl
from models.attention import Attention
from models.gpt import GPT, Seen, check_rows, turned
from models.layers import (
    Names,
)

# Layers are whole on every device: were they split, each turn of the loop would gather all of them.
CACHE = (None, "batch", "act_kv_heads", "cache_seq", "head_dim")
# As `sl.kernels.attention` takes keys. In the cache heads come first: so each head's keys are one
# matrix, which compilers multiply as it lies in memory.
KEYS = ("batch", "cache_seq", "act_kv_heads", "head_dim")
# Of latent attention: all heads have the same.
LATENT_CACHE = (None, "batch", None, "cache_seq", None)
LATENT_KEYS = ("batch", "cache_seq", "act_heads", "head_dim")
MAX_TOKEN = 2**31 - 1  # tokens are kept as int32


class Cache(NamedTuple):
    """Keys and values of the tokens so far, for every layer.

    Of latent attention, the key that all heads have in common in place of keys, and the latent in
    place of values, as of one head.
    """

    k_LBGCK: jax.Array
    v_LBGCK: jax.Array
    length: jax.Array  # how many slots are written, the same in all rows
    padding_B: jax.Array | None = None  # how many of them are padding: a row's first ones

    @property
    def slots(self) -> int:
        """How many tokens of each row there is room for."""
        return self.k_LBGCK.shape[3]


def rules(rules: sl.AxisRules) -> sl.AxisRules:
    """Rules of training for decoding.

    Where they split sequences, a block of tokens that the axes do not divide, such as one token, is
    whole on every device. Slots are split as sequences are, unless there is a rule for them. Layers
    are not split: there is no pipeline.

    >>> rules(sl.AxisRules(seq="context"))
    AxisRules(seq=['context', None], cache_seq='context')
    """
    more: dict[str, Any] = {}
    for name in ("seq", "residual_seq"):
        if rules.says(name) and None not in rules[name]:
            more[name] = [*rules[name], None]
    if rules.says("seq") and not rules.says("cache_seq"):
        more["cache_seq"] = list(rules["seq"])
    if rules.says("layers"):
        more["layers"] = None
    return sl.AxisRules.knowing("cache_seq") | rules | sl.AxisRules(more)


def pad(prompts: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as the rows of one array, padded on the left, and how much each is padded.

    >>> tokens_BS, padding_B = pad([[5, 6, 7], [8]])
    >>> tokens_BS.tolist(), padding_B.tolist()
    ([[5, 6, 7], [0, 0, 8]], [0, 2])
    """
    prompts = [_prompt(number, prompt) for number, prompt in enumerate(prompts)]
    sizes = [len(prompt) for prompt in prompts]
    if not sizes or min(sizes) == 0:
        raise ValueError(
            f"`pad`: prompts of {sizes} tokens: give at least one, and none without tokens. A text "
            "from nothing may begin with the token that ends a document."
        )
    longest = max(sizes)
    tokens_BS = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BS[row, longest - len(prompt) :] = prompt
    return tokens_BS, np.array([longest - size for size in sizes], np.int32)


def _prompt(number: int, prompt: Any) -> np.ndarray:
    """The tokens of the prompt of this number, from 0."""
    tokens = np.asarray(prompt)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise ValueError(
            f"`pad`: prompt {number} is {tokens.dtype}{list(tokens.shape)}: each is a row of "
            "tokens, whole numbers, and all are in a list. One alone is `[prompt]`; texts are "
            "encoded before."
        )
    outside = tokens[(tokens < 0) | (tokens > MAX_TOKEN)]
    if outside.size:
        raise ValueError(
            f"`pad`: prompt {number} has the token {outside[0]}: tokens are numbers from 0 to "
            f"{MAX_TOKEN}."
        )
    return tokens


def names_of(model: GPT) -> Names:
    """The names of the dims of a model's cache."""
    return CACHE if model.config.latent is None else LATENT_CACHE


def empty(model: GPT, rows: int, slots: int, padding_B: Any = None) -> Cache:
    """A cache without tokens, for prompts that `extend` reads a block at a time."""
    check_cached(model)
    rows, slots = checked_count("empty", rows=rows), checked_count("empty", slots=slots)
    config, latent = model.config, model.config.latent
    heads, sizes = config.dims["kv_heads"], (config.dims["head_dim"],) * 2
    if latent is not None:
        heads, sizes = 1, (latent.rotary_dim, latent.kv_rank)
    dtype = config.dtype or config.param_dtype

    def zeros(size: int) -> jax.Array:
        shape = (config.layers, rows, heads, slots, size)
        return sl.shard(jnp.zeros(shape, dtype), *names_of(model))

    k_LBGCK, v_LBGCK = map(zeros, sizes)
    padding_B = checked_padding(padding_B, rows, slots)
    return Cache(k_LBGCK, v_LBGCK, jnp.zeros((), jnp.int32), padding_B)


def prefill(
    model: GPT, tokens_BS: Any, slots: int, padding_B: Any = None
) -> tuple[jax.Array, Cache]:
    """Logits for the token after each row's last, `[B, V]`, and a cache of so many slots.

    `padding_B` says how many of each row's tokens, its first ones, are padding, as `pad` does.
    Attention is that of training: by its kernels, and over sequences split as its rules say.
    """
    check_cached(model)
    tokens_BS = checked_tokens("prefill", model, tokens_BS)
    slots = checked_count("prefill", slots=slots)
    rows, S = tokens_BS.shape
    check_room(model, slots, 0, S, padding_B)
    return _prefill(model, tokens_BS, slots, checked_padding(padding_B, rows, S))


@functools.partial(jax.jit, static_argnames="slots")
def _prefill(
    model: GPT, tokens_BS: jax.Array, slots: int, padding_B: jax.Array | None
) -> tuple[jax.Array, Cache]:
    S = tokens_BS.shape[1]
    segments_BS = _segments(padding_B, jnp.arange(S))
    room = ((0, 0), (0, 0), (0, slots - S), (0, 0))
    names = names_of(model)

    def attend(
        attention: Attention, q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array
    ) -> tuple[jax.Array, Any]:
        kept = []
        for x_BSGK in (k_BSGK, v_BSGK):
            kept.append(sl.shard(jnp.pad(x_BSGK.swapaxes(1, 2), room), *names[1:]))
        of_heads = attention.of_heads(k_BSGK, v_BSGK)
        return attention.attend(q_BSHK, *of_heads, segments_BS), tuple(kept)

    def turn(blocks: Any, x_BSD: jax.Array, first: jax.Array, seen: Seen) -> tuple[jax.Array, Any]:
        kept = []
        for block in blocks.blocks:
            x_BSD, of_block = block.by(attend, x_BSD, seen)
            kept.append(of_block)
        return x_BSD, jax.tree.map(lambda *layers: jnp.stack(layers), *kept)

    x_BSD, seen = _embedded(model, tokens_BS, jnp.arange(S), padding_B)
    x_BSD, kept = _loop(model, turn, x_BSD, seen)
    k_LBGCK, v_LBGCK = (sl.shard(_of_all_layers(x), *names) for x in zip(*kept, strict=True))
    return _logits(model, x_BSD), Cache(k_LBGCK, v_LBGCK, jnp.int32(S), padding_B)


def extend(model: GPT, tokens_BS: Any, cache: Cache) -> tuple[jax.Array, Cache]:
    """Logits for the token after each row's last, `[B, V]`, and the cache with these tokens too.

    The tokens are one a row, or a stretch of a prompt, `[B, S]`; they see what is in the cache, and
    each other. The cache is donated: what was given is gone, and what is returned has its place.
    One that is full is refused. A `jax.jit` around this cannot see that: there, logits are nan.
    """
    tokens_BS = checked_tokens("extend", model, tokens_BS)
    if tokens_BS.shape[0] != cache.k_LBGCK.shape[1]:
        raise ValueError(
            f"`extend` of {tokens_BS.shape[0]} rows of tokens and a cache of "
            f"{cache.k_LBGCK.shape[1]} rows: each row has its own."
        )
    if not isinstance(cache.length, Tracer):
        check_room(model, cache.slots, int(cache.length), tokens_BS.shape[1], cache.padding_B)
    return _extend(model, tokens_BS, cache)


@functools.partial(jax.jit, donate_argnames="cache")
def _extend(model: GPT, tokens_BS: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
    at, padding_B, names = cache.length, cache.padding_B, names_of(model)
    numbers = at + jnp.arange(tokens_BS.shape[1])
    segments = None
    if padding_B is not None:
        segments = _segments(padding_B, numbers), _segments(padding_B, jnp.arange(cache.slots))

    def turn(blocks: Any, carry: Any, first: jax.Array, seen: Seen) -> tuple[Any, None]:
        x_BSD, (k_LBGCK, v_LBGCK) = carry
        for number, block in enumerate(blocks.blocks):
            past = _Past(k_LBGCK, v_LBGCK, names, first + number, at, segments)
            x_BSD, (k_LBGCK, v_LBGCK) = block.by(functools.partial(_attend, past), x_BSD, seen)
        return (x_BSD, (k_LBGCK, v_LBGCK)), None

    kept = (sl.shard(cache.k_LBGCK, *names), sl.shard(cache.v_LBGCK, *names))
    x_BSD, seen = _embedded(model, tokens_BS, numbers, padding_B)
    (x_BSD, kept), _ = _loop(model, turn, (x_BSD, kept), seen)
    k_LBGCK, v_LBGCK = (sl.shard(x, *names) for x in kept)
    length = at + tokens_BS.shape[1]
    positions = length if padding_B is None else length - padding_B[:, None]
    fits = (length <= cache.slots) & (positions <= model.config.context)
    logits_BV = jnp.where(fits, _logits(model, x_BSD), jnp.nan)
    return logits_BV, Cache(k_LBGCK, v_LBGCK, length, padding_B)


class _Past(NamedTuple):
    """What a layer's attention finds in the cache."""

    k_LBGCK: jax.Array
    v_LBGCK: jax.Array
    names: Names
    layer: jax.Array
    at: jax.Array  # the slot of the block's first token
    segments: tuple[Any, Any] | None  # of the block, and of all slots


def _attend(
    past: _Past, attention: Attention, q_BSHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array
) -> tuple[jax.Array, Any]:
    """What queries take from the values of all slots up to theirs, and the cache with their own."""
    kept, own = [], []
    for x_LBGCK, x_BSGK in ((past.k_LBGCK, k_BSGK), (past.v_LBGCK, v_BSGK)):
        new_BGSK = x_BSGK.swapaxes(1, 2).astype(x_LBGCK.dtype)
        kept.append(sl.shard(_written(past, x_LBGCK, new_BGSK), *past.names))
        x_BGCK = jax.lax.dynamic_index_in_dim(kept[-1], past.layer, keepdims=False)
        own.append(sl.shard(x_BGCK, *past.names[1:]))
    # The scores of one query are few. The partitioner splits their products and their softmax over
    # devices that have different slots, and compilers read each key once.
    if q_BSHK.shape[1] == 1 or attention.implementation == "xla":
        return _plain(past, attention, q_BSHK, *own), tuple(kept)
    k_BCGK, v_BCGK = (x_BGCK.swapaxes(1, 2) for x_BGCK in own)
    k_BCGK, v_BCGK = attention.of_heads(k_BCGK, v_BCGK, "cache_seq")
    y_BSHK = attention.attend(
        q_BSHK,
        k_BCGK,
        v_BCGK,
        past.segments,
        kv_names=KEYS if past.names == CACHE else LATENT_KEYS,
        starts=(past.at, 0),
    )
    return y_BSHK, tuple(kept)


def _written(past: _Past, x_LBGCK: jax.Array, new_BGSK: jax.Array) -> jax.Array:
    """Keys or values of all layers with those of a block of tokens, in one layer."""
    S, C = new_BGSK.shape[2], x_LBGCK.shape[3]

    def at_once(x_LBGCK: Any, new_BGSK: Any, layer: Any, at: Any, *_: Any) -> jax.Array:
        first = (layer, 0, 0, at, 0)
        return jax.lax.dynamic_update_slice(x_LBGCK, new_BGSK[None], first)

    def by_slot(x_LBGCK: Any, new_BGSK: Any, layer: Any, at: Any, slots_C: Any) -> jax.Array:
        if slots_C.size == C:
            return at_once(x_LBGCK, new_BGSK, layer, at)
        # This device has some of the slots, and takes for each the token that belongs there.
        numbers_C = slots_C - at
        taken_BGCK = new_BGSK.take(numbers_C.clip(0, S - 1), axis=2)
        before_BGCK = jax.lax.dynamic_index_in_dim(x_LBGCK, layer, keepdims=False)
        is_new_C1 = ((numbers_C >= 0) & (numbers_C < S))[:, None]
        x_BGCK = jnp.where(is_new_C1, taken_BGCK, before_BGCK)
        return jax.lax.dynamic_update_index_in_dim(x_LBGCK, x_BGCK, layer, 0)

    if S == 1:  # which the partitioner does without exchanging anything
        return at_once(x_LBGCK, new_BGSK, past.layer, past.at)
    names = past.names
    of_block = (*names[1:3], None, names[4])
    write = sl.kernels.on_shards(by_slot, [names, of_block, (), (), names[3:4]], names)
    return write(x_LBGCK, new_BGSK, past.layer, past.at, jnp.arange(C))


def _plain(
    past: _Past, attention: Attention, q_BSHK: jax.Array, k_BGCK: jax.Array, v_BGCK: jax.Array
) -> jax.Array:
    """Attention with all scores in memory. What is behind a query, written or not, is not seen."""
    S, C, scores = q_BSHK.shape[1], k_BGCK.shape[2], attention.scores
    seen_BSC = scores.seen(past.at + jnp.arange(S), jnp.arange(C))[None]
    if past.segments is not None:
        own_BS, other_BC = past.segments
        seen_BSC &= own_BS[:, :, None] == other_BC[:, None, :]
    z_BGSRC = scores.scaled(attention.products(q_BSHK, k_BGCK, v_BGCK), q_BSHK.shape[-1])
    z_BGSRC = jnp.where(seen_BSC[:, None, :, None], z_BGSRC, -jnp.inf)
    shares_BGSRC = jax.nn.softmax(z_BGSRC, axis=-1).astype(v_BGCK.dtype)
    return attention.taken(shares_BGSRC, v_BGCK).astype(q_BSHK.dtype)


def _segments(padding_B: jax.Array | None, slots_S: jax.Array) -> jax.Array | None:
    """The segments of slots: 1 for a row's tokens, and 0 for what it is padded by."""
    if padding_B is None:
        return None
    return sl.shard((slots_S >= padding_B[:, None]).astype(jnp.int32), "batch", None)


def _embedded(
    model: GPT, tokens_BS: jax.Array, slots_S: jax.Array, padding_B: jax.Array | None
) -> tuple[jax.Array, Seen]:
    """The residual stream before the first block, and what blocks see beside it."""
    positions, real_BS = slots_S, None
    if padding_B is not None:
        # Padding is at the first position, whose embedding there is.
        positions = jnp.maximum(slots_S - padding_B[:, None], 0)
        real_BS = slots_S >= padding_B[:, None]
    x_BSD = model._embed(sl.shard(tokens_BS, "batch", "seq"), positions)
    seen = Seen(real_BS=real_BS)
    if model.config.positions == "rotary":
        seen = turned(seen, model.config, positions)
    return x_BSD, seen


def _loop(model: GPT, turn: Callable[..., Any], carry: Any, seen: Seen) -> tuple[Any, list[Any]]:
    """What turns of blocks make of `carry`, one after the other, and what each stack of blocks
    gives besides. A turn is told the number of its first layer.
    """
    axes = {
        "in_axes": (0, nnx.Carry, 0, None),
        "out_axes": (nnx.Carry, 0),
        "transform_metadata": {nnx.PARTITION_NAME: "layers"},
        "unroll": model.config.unroll,
    }
    first, given = 0, []
    for stack in model.stacks:
        modes = {"deterministic": True, "decoding": True}
        # Only experts ask whether a model decodes.
        blocks = nnx.view(stack.blocks, raise_if_not_found=False, **modes)
        size = len(stack.blocks.blocks)
        numbers = first + size * jnp.arange(stack.count)
        loop = nnx.scan(turn, **axes, graph_updates=False)
        carry, of_stack = loop(blocks, carry, numbers, seen)
        given.append(of_stack)
        first += size * stack.count
    return carry, given


def _of_all_layers(stacks: Sequence[jax.Array]) -> jax.Array:
    """Keys or values of all layers, of those that turns of stacks give."""
    return jnp.concatenate([x.reshape(-1, *x.shape[2:]) for x in stacks])


def _logits(model: GPT, x_BSD: jax.Array) -> jax.Array:
    """Logits for the token after the last."""
    return model.logits(model._last(x_BSD[:, -1:], model.norm))[:, 0]


def check_cached(model: GPT) -> None:
    """Refuse a model whose keys and values the cache has no place for."""
    if getattr(model, "encoder", None) is not None:
        raise ValueError(
            f"`{type(model).__name__}` attends to what its encoder has read, for which a cache has "
            "no place: `model.translated(source, target)` is a whole pass."
        )


def whole_number(value: Any) -> int | None:
    """A whole number as an `int`, of NumPy too; None where it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def checked_count(what: str, **counts: Any) -> int:
    """A count as an `int`, given by its name to the function of this name."""
    ((name, value),) = counts.items()
    count = whole_number(value)
    if count is None or count < 1:
        raise ValueError(f"`{what}({name}={repr(value)[:200]})`: a whole number, at least 1.")
    return count


def checked_tokens(what: str, model: GPT, given: Any) -> jax.Array:
    """Rows of the model's tokens as an array, for the function of this name."""
    try:
        tokens_BS = jnp.asarray(given)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"`{what}` takes rows of tokens, whole numbers of shape `[rows, tokens]`, as one "
            "array. Prompts of several lengths are one by `decoding.pad`, which says how much each "
            f"is padded. Got what is none: {error}"
        ) from error
    check_rows(what, tokens_BS)
    if not tokens_BS.size:
        raise ValueError(f"`{what}` got {list(tokens_BS.shape)} tokens: give at least one a row.")
    # NumPy's array as it is: JAX may leave out the upper half of a number.
    known, vocab = _known(given if isinstance(given, np.ndarray) else tokens_BS), model.config.vocab
    if known is not None and not 0 <= known.min() <= known.max() < vocab:
        raise ValueError(
            f"`{what}`: tokens are from {known.min()} to {known.max()}, and the model has 0 to "
            f"{vocab - 1}. Encode texts by the tokenizer that it has learned with."
        )
    return tokens_BS


def checked_padding(padding_B: Any, rows: int, length: int) -> jax.Array | None:
    """How much rows are padded, as an array laid out as they are; None where none is."""
    if padding_B is None:
        return None
    padding_B = jnp.asarray(padding_B)
    if padding_B.shape != (rows,) or not jnp.issubdtype(padding_B.dtype, jnp.integer):
        raise ValueError(
            f"`padding_B` is {padding_B.dtype}{list(padding_B.shape)}: whole numbers, one for each "
            f"of {rows} rows, as `pad` gives them."
        )
    known = _known(padding_B)
    if known is not None and known.size and not 0 <= known.min() <= known.max() < length:
        raise ValueError(
            f"`padding_B` is from {known.min()} to {known.max()}, and rows have {length} tokens: "
            "it says how many of them, the first ones, are padding, not how long prompts are."
        )
    return sl.shard(padding_B.astype(jnp.int32), "batch")


def check_room(model: GPT, slots: int, length: int, more: int, padding_B: Any) -> None:
    """Refuse tokens for which the cache has no slots, or the model no positions."""
    if length + more > slots:
        raise ValueError(
            f"A cache of {slots} slots, of which {length} are written, has no room for {more} "
            f"more tokens. Make one with `slots={length + more}` or more."
        )
    context, padding = model.config.context, _least(padding_B)
    if padding is not None and length + more - padding > context:
        raise ValueError(
            f"{length + more - padding} tokens do not fit "
            f"`{type(model.config).__name__}(context={context})`: shorter prompts, or fewer tokens "
            "after them."
        )


def _least(padding_B: Any) -> int | None:
    """How much every row is padded at least; None where only the running program knows."""
    if padding_B is None:
        return 0
    known = _known(padding_B)
    return None if known is None else int(known.min())


def _known(numbers: Any) -> np.ndarray | None:
    """What is in an array; None where only the running program knows."""
    traced = isinstance(numbers, Tracer)
    if traced or (isinstance(numbers, jax.Array) and not numbers.is_fully_addressable):
        return None
    return np.asarray(numbers)
