"""Attention, from queries, keys and values to what each token makes of them.

The suffixes of shapes and the names of dims are those of `models/layers.py`. Beside these:

    T  keys and values, where they may be others than the queries
    C  slots of a cache      R  query heads of a key head
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl
from models.gpt_config import GPTConfig
from models.layers import (
    HEADS,
    KV_HEADS,
    RESIDUAL,
    WHOLE,
    Names,
    Norm,
    Projection,
    Rotation,
    lay_out,
    named,
    project,
    returning_std,
    softly_capped,
)

# Of a layer, its queries, keys and values: what queries take from values, and anything else.
Attend = Callable[["Attention", jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


@dataclass(frozen=True)
class Scores:
    """Which keys a query sees, and how its scores are made.

    - `causal`: it sees those up to its own position.
    - `window`: how many it sees at most, its own and those before it.
    - `scale`: of the scores; 1 / sqrt(size of a head) if it is None.
    - `cap`: scores are softly kept between this and its negative.
    """

    causal: bool
    window: int | None
    scale: float | None
    cap: float | None

    @classmethod
    def of(cls, config: GPTConfig, *, causal: bool, local: bool) -> "Scores":
        """Those of a layer, which has the configuration's window if it is local."""
        window = config.window if local else None
        # One as long as any sequence hides nothing.
        window = None if window is None or window >= config.context else window
        return cls(causal, window, config.attention_scale, config.attention_cap)

    @property
    def options(self) -> dict[str, Any]:
        """The same as `sl.kernels.attention` takes it."""
        window = None if self.window is None else (self.window - 1, None)
        return {
            "causal": self.causal,
            "window": window,
            "scale": self.scale,
            "soft_cap": self.cap,
        }

    def seen(self, own: jax.Array, other: jax.Array) -> jax.Array:
        """Which of the other positions each of its own sees, `[own, other]`."""
        behind = own[:, None] - other[None, :]
        seen = behind >= 0 if self.causal else jnp.ones(behind.shape, bool)
        return seen if self.window is None else seen & (behind < self.window)

    def scaled(self, products: jax.Array, size: int) -> jax.Array:
        """Scores of products of queries and keys that have so many numbers."""
        scale = 1 / math.sqrt(size) if self.scale is None else self.scale
        return softly_capped(products * scale, self.cap)


class Attention(nnx.Module):
    """Attention, causal unless said otherwise, in which each key and value head serves a group of
    query heads. One that is `local` has the configuration's window.
    """

    kv_names = KV_HEADS

    def __init__(
        self, config: GPTConfig, *, causal: bool = True, local: bool = False, rngs: nnx.Rngs
    ) -> None:
        self.implementation = config.attention
        self.scores = Scores.of(config, causal=causal, local=local)
        own, others = ("heads", "head_dim"), ("kv_heads", "head_dim")
        options = {"bias": config.qkv_bias, "rngs": rngs}
        self.query = Projection(("embed",), own, config, **options)
        self.key = Projection(("embed",), others, config, **options)
        self.value = Projection(("embed",), others, config, **options)
        self.output = Projection(
            ("heads", "head_dim"), ("embed",), config, std=returning_std(config), rngs=rngs
        )
        normed = config.query_key_norm
        self.query_norm = Norm(config, "head_dim", HEADS, rngs=rngs) if normed else None
        self.key_norm = Norm(config, "head_dim", KV_HEADS, rngs=rngs) if normed else None

    def __call__(
        self,
        x_BSD: jax.Array,
        rotation: Rotation | None = None,
        segments_BS: jax.Array | None = None,
        memory_BTD: jax.Array | None = None,
        memory_segments_BT: jax.Array | None = None,
    ) -> jax.Array:
        """What each token makes of those it sees: of its own segment, in the memory where one is
        given.
        """
        q_BSHK, k_BTGK, v_BTGK = self.projected(x_BSD, rotation, memory_BTD)
        # Query head h attends with key head h // (H / G), so a device that holds whole groups needs
        # nobody else's.
        segments = None
        memory_BT = segments_BS if memory_BTD is None else memory_segments_BT
        if segments_BS is not None and memory_BT is not None:
            segments = (segments_BS, memory_BT) if memory_BTD is not None else segments_BS
        q_BSHK, k_BTGK = named(q_BSHK, "query", HEADS), named(k_BTGK, "key", self.kv_names)
        v_BTGK = named(v_BTGK, "value", self.kv_names)
        # The tokens of a model are arranged together; queries and memory may be of two lengths.
        arranged = memory_BTD is None
        y_BSHK = lay_out(self.attend(q_BSHK, k_BTGK, v_BTGK, segments, arranged=arranged), HEADS)
        return named(self.output(y_BSHK, WHOLE, RESIDUAL), "attention_out", RESIDUAL)

    def by(self, attend: Attend, x_BSD: jax.Array, rotation: Rotation | None) -> Any:
        """What each token makes of those that `attend` has it see, and what that gives besides."""
        q_BSHK, k_BSGK, v_BSGK = self.cached(x_BSD, rotation)
        y_BSHK, kept = attend(self, q_BSHK, k_BSGK, v_BSGK)
        return self.output(lay_out(y_BSHK, HEADS), WHOLE, RESIDUAL), kept

    def cached(
        self, x_BSD: jax.Array, rotation: Rotation | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, and what a cache keeps of the tokens: their keys and values."""
        return self.projected(x_BSD, rotation)

    def of_heads(
        self, k_BTGK: jax.Array, v_BTGK: jax.Array, tokens: str = "seq"
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the heads, from what `cached` gives; `tokens` is the name of their
        dim there.
        """
        return k_BTGK, v_BTGK

    def products(self, q_BSHK: jax.Array, k_BGCK: jax.Array, v_BGCK: jax.Array) -> jax.Array:
        """The products of queries and keys in float32, `[B, G, S, R, C]`, of R query heads for each
        key head, from what `cached` gives, heads first.
        """
        (B, S, H, K), G = q_BSHK.shape, k_BGCK.shape[1]
        q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
        return jnp.einsum("bsgrk,bgck->bgsrc", q_BSGRK, k_BGCK, preferred_element_type=jnp.float32)

    def taken(self, shares_BGSRC: jax.Array, v_BGCK: jax.Array) -> jax.Array:
        """What queries take from the values, by shares of them, in float32."""
        y_BGSRK = jnp.einsum(
            "bgsrc,bgck->bgsrk", shares_BGSRC, v_BGCK, preferred_element_type=jnp.float32
        )
        B, G, S, R, K = y_BGSRK.shape
        return y_BGSRK.swapaxes(1, 2).reshape(B, S, G * R, K)

    def projected(
        self,
        x_BSD: jax.Array,
        rotation: Rotation | None = None,
        memory_BTD: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, and keys and values, of the memory where one is given; with their positions."""
        own, others = (self.query, HEADS), [(self.key, KV_HEADS), (self.value, KV_HEADS)]
        if memory_BTD is None:
            q_BSHK, k_BTGK, v_BTGK = project(x_BSD, RESIDUAL, own, *others)
        else:
            (q_BSHK,) = project(x_BSD, RESIDUAL, own)
            k_BTGK, v_BTGK = project(memory_BTD, WHOLE, *others)
        if self.query_norm is not None and self.key_norm is not None:
            q_BSHK, k_BTGK = self.query_norm(q_BSHK), self.key_norm(k_BTGK)
        if rotation is not None:
            q_BSHK = sl.kernels.rotate(q_BSHK, *rotation)
            k_BTGK = sl.kernels.rotate(k_BTGK, *rotation)
        return q_BSHK, k_BTGK, v_BTGK

    def attend(
        self,
        q_BSHK: jax.Array,
        k_BTGK: jax.Array,
        v_BTGK: jax.Array,
        segments: Any,
        *,
        arranged: bool = False,
        kv_names: Names | None = None,
        starts: tuple[Any, Any] | None = None,
    ) -> jax.Array:
        """What each query takes from the values, by the implementation of the configuration.

        Segments are those of queries and keys, one array where they are the same, or None. Where
        `arranged`, all are in the order of `sl.context.arrange`. With `starts`, which only kernels
        take, queries and keys are from these positions on.
        """
        if self.implementation != "xla":
            placed: dict[str, Any] = {"arranged": arranged}
            if starts is not None:
                placed = {"starts": starts}
            return sl.kernels.attention(
                q_BSHK,
                k_BTGK,
                v_BTGK,
                names=HEADS,
                kv_names=kv_names or self.kv_names,
                segment_ids=segments,
                implementation=self.implementation,
                **placed,
                **self.scores.options,
            )
        attend = sl.remat(functools.partial(attend_whole, self.scores, arranged), part="scores")
        # `sl.kernels.attention` names its result itself, and keeps no scores.
        return named(attend(q_BSHK, k_BTGK, v_BTGK, segments), "context", HEADS)


def attend_whole(
    scores: Scores,
    arranged: bool,
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    segments: Any,
) -> jax.Array:
    """Plain attention, with all scores in memory, and the masks that are as large."""
    S, T = q_BSHK.shape[1], k_BTGK.shape[1]
    seen_B1ST, causal = None, scores.causal
    if segments is not None:
        own_BS, other_BT = segments if isinstance(segments, tuple) else (segments, segments)
        seen_B1ST = (own_BS[:, :, None] == other_BT[:, None, :])[:, None]
    is_arranged = arranged and sl.context.is_arranged(S)
    if scores.window is not None or (causal and (is_arranged or scores.cap is not None)):
        own_S, other_T = jnp.arange(S), jnp.arange(T)
        if is_arranged:
            own_S, other_T = sl.context.arrange(own_S, 0), sl.context.arrange(other_T, 0)
        seen_1ST = scores.seen(own_S, other_T)[None]
        seen_B1ST = seen_1ST if seen_B1ST is None else seen_B1ST & seen_1ST
        causal = False
    if scores.cap is not None:
        return _attend_capped(scores, q_BSHK, k_BTGK, v_BTGK, seen_B1ST)
    return jax.nn.dot_product_attention(
        q_BSHK,
        k_BTGK,
        v_BTGK,
        mask=seen_B1ST,
        is_causal=causal,
        scale=scores.scale,
        implementation="xla",
    )


def _attend_capped(
    scores: Scores,
    q_BSHK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGK: jax.Array,
    seen_B1ST: jax.Array | None,
) -> jax.Array:
    """Plain attention with capped scores, which JAX's own has not."""
    (B, S, H, K), G = q_BSHK.shape, k_BTGK.shape[2]
    wide: Any = {"preferred_element_type": jnp.float32}
    # R query heads for each key head.
    q_BSGRK = q_BSHK.reshape(B, S, G, H // G, K)
    z_BGRST = scores.scaled(jnp.einsum("bsgrk,btgk->bgrst", q_BSGRK, k_BTGK, **wide), K)
    if seen_B1ST is not None:
        seen_B11ST = seen_B1ST.reshape(-1, 1, 1, *seen_B1ST.shape[-2:])
        z_BGRST = jnp.where(seen_B11ST, z_BGRST, jnp.finfo(z_BGRST.dtype).min)
    shares_BGRST = jax.nn.softmax(z_BGRST, axis=-1).astype(v_BTGK.dtype)
    y_BSGRK = jnp.einsum("bgrst,btgk->bsgrk", shares_BGRST, v_BTGK, **wide)
    return y_BSGRK.reshape(B, S, H, v_BTGK.shape[-1]).astype(q_BSHK.dtype)
