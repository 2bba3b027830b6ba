"""DeepSeek's multi-head latent attention (MLA): keys and values of all heads are made of one small
array, and queries of another.

    x ---> query latent -norm-> queries of all heads, a part of each turned by its position
      |--> key-value latent -norm-> keys of all heads without positions, and values
      '--> one key, turned by its position, which all heads have in common

Each head's key is the one made for it, followed by the common one; a score is divided by the root
of both sizes together. Pairs that positions turn are those of `sl.kernels.rotate`, numbers `i` and
`i + size / 2`; DeepSeek's own weights have them side by side, `2 i` and `2 i + 1`, which is the
same model with its rows in another order.

Latents are made where the residual stream is split, and gathered for the heads: of DeepSeek-V3's
7,168 numbers of a token these are 2,112. Under tensor parallelism heads are split, and what comes
before them is made on every device, or, with `sl.rules.tensor_sequence`, for a part of the tokens.

While a model generates, a cache keeps of each token the latent of keys and values, after its norm,
and the common key, turned: of DeepSeek-V3's layers 576 numbers each, where keys and values of all
heads are 40,960. One query is multiplied with the kernels instead of all latents.

Shape suffixes beside those of `models/layers.py`:

    R  rank of a latent (query_rank, kv_rank)      P  numbers that positions turn (rotary_dim)
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl
from models.attention import Attention, Scores
from models.gpt_config import GPTConfig
from models.layers import (
    HEADS,
    RESIDUAL,
    Norm,
    Projection,
    Rotation,
    lay_out,
    named,
    project,
    returning_std,
)

# A latent, as the residual stream is split, and as attention takes it: whole on every device.
LATENT = ("batch", "residual_seq", None)
WHOLE_LATENT = ("batch", "seq", None)
# These take values of the size of keys alone.
PADDED = ("xla", "cudnn")


class MultiHeadLatentAttention(Attention):
    """Attention whose queries, keys and values are made of latents."""

    kv_names = HEADS  # each head has keys and values of its own

    def __init__(
        self, config: GPTConfig, *, causal: bool = True, local: bool = False, rngs: nnx.Rngs
    ) -> None:
        # Not that of `Attention`, which makes other parameters.
        if config.latent is None:
            raise ValueError("`MultiHeadLatentAttention`: the configuration has no `latent`.")
        self.implementation = config.attention
        self.scores = Scores.of(config, causal=causal, local=local)
        self.key_dim = config.latent.key_dim
        self.value_dim = config.latent.value_dim
        self.query_latent = Projection(("embed",), ("query_rank",), config, rngs=rngs)
        self.query_norm = Norm(config, "query_rank", LATENT, rngs=rngs)
        self.query = Projection(("query_rank",), ("heads", "head_dim"), config, rngs=rngs)
        self.kv_latent = Projection(("embed",), ("kv_rank",), config, rngs=rngs)
        self.kv_norm = Norm(config, "kv_rank", LATENT, rngs=rngs)
        self.key = Projection(("kv_rank",), ("heads", "key_dim"), config, rngs=rngs)
        self.value = Projection(("kv_rank",), ("heads", "value_dim"), config, rngs=rngs)
        self.rotary_key = Projection(("embed",), ("rotary_dim",), config, rngs=rngs)
        self.output = Projection(
            ("heads", "value_dim"), ("embed",), config, std=returning_std(config), rngs=rngs
        )

    def projected(
        self,
        x_BSD: jax.Array,
        rotation: Rotation | None = None,
        memory_BTD: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, with their positions. There is no memory to attend to."""
        if memory_BTD is not None or rotation is None:
            raise ValueError(
                "Latent attention is of a sequence to itself, with rotary positions: cross-"
                "attention takes a configuration without `latent`."
            )
        q_BSHK, key_BS1P, kv_BS1R = self.cached(x_BSD, rotation)
        return q_BSHK, *self.of_heads(key_BS1P, kv_BS1R)

    def cached(
        self, x_BSD: jax.Array, rotation: Rotation | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, and what a cache keeps of the tokens: the key that all heads have in common, and
        the latent of keys and values.
        """
        assert rotation is not None
        down = self.query_latent, self.kv_latent, self.rotary_key
        latents = project(x_BSD, RESIDUAL, *((projection, LATENT) for projection in down))
        query_BSR, kv_BSR, key_BSP = latents
        query_BSR = named(query_BSR, "query_latent", LATENT)
        kv_BSR = named(kv_BSR, "kv_latent", LATENT)
        key_BSP = named(key_BSP, "rotary_key", LATENT)
        (q_BSHK,) = project(self.query_norm(query_BSR), LATENT, (self.query, HEADS))
        key_BS1P = lay_out(key_BSP, LATENT, WHOLE_LATENT)[:, :, None]
        key_BS1P = sl.kernels.rotate(key_BS1P, *rotation)
        plain_BSHK, turned_BSHP = jnp.split(q_BSHK, [self.key_dim], axis=-1)
        turned_BSHP = sl.kernels.rotate(turned_BSHP, *rotation)
        q_BSHK = lay_out(jnp.concatenate([plain_BSHK, turned_BSHP], -1), HEADS)
        return q_BSHK, key_BS1P, self.kv_norm(kv_BSR)[:, :, None]

    def of_heads(
        self, k_BTGK: jax.Array, v_BTGK: jax.Array, tokens: str = "seq"
    ) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the heads, from the common key and the latent."""
        heads = ("batch", tokens, "act_heads", "head_dim")
        latent = LATENT if tokens == "seq" else ("batch", tokens, None)
        both = (self.key, heads), (self.value, heads)
        k_BTHK, v_BTHK = project(v_BTGK[:, :, 0], latent, *both)
        key_BTHP = jnp.broadcast_to(k_BTGK, (*k_BTHK.shape[:3], k_BTGK.shape[-1]))
        k_BTHK = lay_out(jnp.concatenate([k_BTHK, lay_out(key_BTHP, heads)], -1), heads)
        return k_BTHK, v_BTHK

    def products(self, q_BSHK: jax.Array, k_BGCK: jax.Array, v_BGCK: jax.Array) -> jax.Array:
        """The products of queries and keys, without making keys of the heads.

        A product with `W c` is one with `c` of a query that was multiplied with `W`: the query is
        one, and the latents are many.
        """
        wide: Any = {"preferred_element_type": jnp.float32}
        plain_BSHK, turned_BSHP = jnp.split(q_BSHK, [self.key_dim], axis=-1)
        kernel_HKR = _kernel_of(self.key, q_BSHK)
        query_BSHR = jnp.einsum("bshk,hkr->bshr", plain_BSHK, kernel_HKR, **wide)
        query_BSHR = sl.shard(query_BSHR.astype(q_BSHK.dtype), *HEADS[:3], None)
        z_BSHC = jnp.einsum("bshr,bcr->bshc", query_BSHR, v_BGCK[:, 0], **wide)
        z_BSHC += jnp.einsum("bshp,bcp->bshc", turned_BSHP, k_BGCK[:, 0], **wide)
        if self.key.bias is not None:
            bias_HK = self.key.bias[...].astype(q_BSHK.dtype)
            z_BSHC += jnp.einsum("bshk,hk->bsh", plain_BSHK, bias_HK, **wide)[..., None]
        return z_BSHC[:, None]

    def taken(self, shares_BGSRC: jax.Array, v_BGCK: jax.Array) -> jax.Array:
        """What queries take from the values, by shares of the latents that these are made of."""
        wide: Any = {"preferred_element_type": jnp.float32}
        y_BSHR = jnp.einsum("bshc,bcr->bshr", shares_BGSRC[:, 0], v_BGCK[:, 0], **wide)
        y_BSHR = y_BSHR.astype(v_BGCK.dtype)
        kernel_HKR = _kernel_of(self.value, v_BGCK)
        y_BSHK = jnp.einsum("bshr,hkr->bshk", y_BSHR, kernel_HKR, **wide)
        return self.value.add_bias(y_BSHK)

    def attend(
        self,
        q_BSHK: jax.Array,
        k_BTGK: jax.Array,
        v_BTGK: jax.Array,
        segments: object,
        **placed: Any,
    ) -> jax.Array:
        """What each query takes from the values, which may be smaller than keys."""
        more = k_BTGK.shape[-1] - self.value_dim
        if self.implementation in PADDED and more > 0:
            v_BTGK = jnp.pad(v_BTGK, ((0, 0), (0, 0), (0, 0), (0, more)))
        y_BSHK = super().attend(q_BSHK, k_BTGK, v_BTGK, segments, **placed)
        return y_BSHK[..., : self.value_dim]


def _kernel_of(projection: Projection, x: jax.Array) -> jax.Array:
    """A projection's kernel, with the factors of an adapter in it, in the dtype of an array."""
    kernel = projection.kernel[...]
    if projection.adapter is not None:
        kernel = projection.adapter.added_to(kernel)
    return kernel.astype(x.dtype)


def attention(config: GPTConfig, *, rngs: nnx.Rngs, **kind: bool) -> Attention:
    """The attention of a block to its own sequence, as the configuration says."""
    form = Attention if config.latent is None else MultiHeadLatentAttention
    return form(config, rngs=rngs, **kind)
