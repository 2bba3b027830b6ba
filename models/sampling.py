"""The text that a model writes after prompts: which token comes next, until there are enough."""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from models import decoding
from models.gpt import GPT

# A cache has some multiple of this many slots: so the axes of a context divide it, and on TPUs
# nothing is padded.
SLOTS = 128
LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen.

    - `temperature`: logits are divided by it, at least 1e-6; 0 takes the likeliest token.
    - `top_k`: only so many of the likeliest tokens are drawn from.
    - `top_p`: only the likeliest tokens that together have this share of the probability, what
      `top_k` leaves being all of it, are drawn from, and the likeliest always.

    Tokens as likely as the last that may be drawn may be drawn too.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        # By smaller ones logits overflow, or they are 0 in float32 themselves.
        is_zero = _is_number(self.temperature) and self.temperature == 0
        if not is_zero and not _is_number(self.temperature, LEAST_TEMPERATURE):
            takes = f"0, which takes the likeliest token, or a number, at least {LEAST_TEMPERATURE}"
            raise _refusal("temperature", self.temperature, takes)
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            raise _refusal("top_k", self.top_k, "a whole number, at least 1, or None")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise _refusal("top_p", self.top_p, "a share, above 0 and at most 1, or None")

    def drawn(self, logits_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
        """A token for each row, by a key for each.

        >>> logits_BV, keys_B = jnp.array([[0.0, 2.0, 1.0]]), jax.random.split(jax.random.key(0), 1)
        >>> Sampling(temperature=0).drawn(logits_BV, keys_B).tolist()
        [1]
        """
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        return jax.vmap(jax.random.categorical)(keys_B, self.kept(logits_BV))

    def kept(self, logits_BV: jax.Array) -> jax.Array:
        """The logits that a token is drawn by, in float32: minus infinity for those left out.

        >>> Sampling(top_k=2).kept(jnp.array([[0.0, 2.0, 1.0]])).tolist()
        [[-inf, 2.0, 1.0]]
        """
        logits_BV = logits_BV.astype(jnp.float32)
        if self.temperature:
            logits_BV /= self.temperature
        if self.top_k is not None and self.top_k < logits_BV.shape[-1]:
            likeliest_BV = jax.lax.top_k(logits_BV, self.top_k)[0]
            logits_BV = jnp.where(logits_BV < likeliest_BV[:, -1:], -jnp.inf, logits_BV)
        if self.top_p is not None and self.top_p < 1:
            sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
            shares_BV = jax.nn.softmax(sorted_BV, axis=-1)
            # Of the tokens before each: the one that crosses the share is drawn from too.
            needed_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV < self.top_p
            least_B1 = jnp.where(needed_BV, sorted_BV, jnp.inf).min(-1, keepdims=True)
            logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        return logits_BV


def _is_number(value: Any, least: float = 0) -> bool:
    return type(value) in (int, float) and least <= value < math.inf


def _refusal(name: str, value: Any, takes: str) -> ValueError:
    return ValueError(f"`Sampling({name}={repr(value)[:200]})`: {takes}.")


GREEDY = Sampling(temperature=0)


def generate(
    model: GPT,
    prompts_BS: Any,
    tokens: int,
    key: jax.Array,
    sampling: Sampling = GREEDY,
    *,
    padding_B: Any = None,
    end: int | None = None,
    chunk: int | None = None,
) -> jax.Array:
    """The next `tokens` tokens of each row, `[B, tokens]`, in one program.

    A row's draws follow from the key, the number of the row and the position in it: they are the
    same on any mesh, and however many tokens come after them.

    Args:
        model: with its weights, laid out in any way.
        prompts_BS: the tokens so far.
        tokens: how many more.
        key: of all draws; greedy choices need it too, and do not use it.
        sampling: how tokens are chosen; the likeliest by default.
        padding_B: how many of each row's tokens, its first ones, are padding: `decoding.pad`.
        end: a token that ends a row, which has nothing else from there on.
        chunk: read prompts so many tokens at a time, which bounds the memory that reading takes.
    """
    tokens = decoding.checked_count("generate", tokens=tokens)
    chunk = None if chunk is None else decoding.checked_count("generate", chunk=chunk)
    end = None if end is None else _checked_end(end, model.config.vocab)
    _check_key(key)
    prompts_BS = decoding.checked_tokens("generate", model, prompts_BS)
    if not isinstance(sampling, Sampling):
        raise ValueError(
            f"`generate(sampling={sampling!r})` takes a `Sampling(...)`, such as "
            "`Sampling(temperature=0.8)`."
        )
    padding_B = decoding.checked_padding(padding_B, *prompts_BS.shape)
    rows, more = prompts_BS.shape[0], 0 if chunk is None else -prompts_BS.shape[1] % chunk
    if more:
        prompts_BS = jnp.pad(prompts_BS, ((0, 0), (more, 0)))
        padding_B = more + (jnp.zeros(rows, int) if padding_B is None else jnp.asarray(padding_B))
    length = prompts_BS.shape[1] + tokens
    slots = -(-length // SLOTS) * SLOTS
    decoding.check_room(model, slots, 0, length, padding_B)
    padding_B = decoding.checked_padding(padding_B, *prompts_BS.shape)
    options: Any = {"tokens": tokens, "slots": slots, "sampling": sampling, "end": end}
    return _generate(model, prompts_BS, key, padding_B, chunk=chunk, **options)


class _Written(NamedTuple):
    """What is written so far, and what it takes to go on."""

    number: jax.Array  # of tokens
    tokens_BN: jax.Array
    last_B: jax.Array
    ended_B: jax.Array
    cache: decoding.Cache


@functools.partial(jax.jit, static_argnames=("tokens", "slots", "sampling", "end", "chunk"))
def _generate(
    model: GPT,
    prompts_BS: jax.Array,
    key: jax.Array,
    padding_B: jax.Array | None,
    *,
    tokens: int,
    slots: int,
    sampling: Sampling,
    end: int | None,
    chunk: int | None,
) -> jax.Array:
    rows, S = prompts_BS.shape
    if chunk is None:
        logits_BV, cache = decoding.prefill(model, prompts_BS, slots, padding_B)
    else:
        cache = decoding.empty(model, rows, slots, padding_B)
        logits_BV, cache = _read(model, prompts_BS, cache, chunk)
    first_B = S - (0 if padding_B is None else padding_B)
    row_keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))

    def with_token(written: _Written, logits_BV: jax.Array, cache: decoding.Cache) -> _Written:
        positions_B = jnp.broadcast_to(first_B + written.number, (rows,))
        keys_B = jax.vmap(jax.random.fold_in)(row_keys_B, positions_B)
        token_B, ended_B = sampling.drawn(logits_BV, keys_B).astype(jnp.int32), written.ended_B
        if end is not None:
            token_B = jnp.where(ended_B, end, token_B)
            ended_B |= token_B == end
        tokens_BN = jax.lax.dynamic_update_slice(
            written.tokens_BN, token_B[:, None], (0, written.number)
        )
        return _Written(written.number + 1, tokens_BN, token_B, ended_B, cache)

    def one(written: _Written) -> _Written:
        logits_BV, cache = decoding.extend(model, written.last_B[:, None], written.cache)
        return with_token(written, logits_BV, cache)

    nothing = jnp.full((rows, tokens), 0 if end is None else end, jnp.int32)
    begin = _Written(jnp.int32(0), nothing, nothing[:, 0], jnp.zeros(rows, bool), cache)
    unfinished = lambda written: (written.number < tokens) & ~written.ended_B.all()  # noqa: E731
    written = with_token(begin, logits_BV, cache)
    return jax.lax.while_loop(unfinished, one, written).tokens_BN


def _read(
    model: GPT, prompts_BS: jax.Array, cache: decoding.Cache, chunk: int
) -> tuple[jax.Array, decoding.Cache]:
    """What `decoding.prefill` gives, of prompts that are read a chunk at a time."""
    chunks = prompts_BS.reshape(len(prompts_BS), -1, chunk).swapaxes(0, 1)
    made = jax.eval_shape(decoding.extend, model, chunks[0], cache)[0]

    def one(carry: Any, tokens_BS: jax.Array) -> tuple[Any, None]:
        return decoding.extend(model, tokens_BS, carry[1]), None

    return jax.lax.scan(one, (jnp.zeros(made.shape, made.dtype), cache), chunks)[0]


def _checked_end(end: Any, vocab: int) -> int:
    """The token that ends a row, as an `int`."""
    token = decoding.whole_number(end)
    if token is None or not 0 <= token < vocab:
        raise ValueError(
            f"`generate(end={repr(end)[:200]})`: a token of the model, 0 to {vocab - 1}, or None."
        )
    return token


def _check_key(key: Any) -> None:
    """Refuse what is no key: a seed, or several keys."""
    dtype, shape = getattr(key, "dtype", None), getattr(key, "shape", None)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    # Those of `jax.random.PRNGKey` are numbers.
    is_key = shape == () if typed else dtype == jnp.uint32 and len(shape or ()) == 1
    if not is_key:
        raise ValueError(
            f"`generate(key={repr(key)[:200]})` takes one key of JAX: `jax.random.key(0)`, of any "
            "seed in place of 0."
        )
