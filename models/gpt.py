"""One decoder that is GPT-1, GPT-2 and Llama by configuration, in Flax NNX, with every dim named for `shardlib`.

Shape suffixes: B batch, S sequence, D width ("embed"), H query heads, G key and value heads, K size of a head,
F hidden width of the MLP ("mlp"), V rows of the vocabulary, L layers.

How it is laid out under Megatron's rules (`sl.rules.tensor`): the residual stream is whole on every device of the axis
`model`; each half of a block is entered once and left once. Entering, every device multiplies by its own heads, or its
own part of the MLP's hidden width; leaving, the partial products are summed: one all-reduce forward, and one backward
where the block was entered. Under `sl.rules.tensor_sequence` the residual stream is split along the sequence, and the
same annotations make it an all-gather on the way in and a reduce-scatter on the way out.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl

RESIDUAL = ("batch", "residual_seq", "act_embed")
WHOLE = ("batch", "seq", "act_embed")


@dataclass(frozen=True)
class GPTConfig:
    """What the model is; the defaults are GPT-2's choices.

    `hidden` is the MLP's inner width. `head_dim=None` is `width / heads`, `kv_heads=None` is `heads`. Embedding rows
    are rounded up to a multiple of `vocab_multiple`, so that any vocabulary can be split over any mesh; the extra rows
    never get probability. Parameters are stored in `param_dtype` and multiplied in `dtype`.
    """

    layers: int
    width: int
    heads: int
    hidden: int
    context: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None
    norm: Literal["layer", "rms"] = "layer"
    norm_first: bool = True
    norm_epsilon: float = 1e-5
    positions: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 10_000.0
    mlp: Literal["gelu", "swiglu"] = "gelu"
    bias: bool = True
    tied: bool = True
    dropout: float = 0.0
    vocab_multiple: int = 1
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32


class Projection(nnx.Module):
    """A kernel with a name for each dim, which contracts the last dims of its input with its own first ones."""

    def __init__(
        self,
        inputs: Mapping[str, int],
        outputs: Mapping[str, int],
        config: GPTConfig,
        *,
        bias: bool,
        std: float = 0.02,
        rngs: nnx.Rngs,
    ) -> None:
        init = sl.logical(nnx.initializers.normal(std), *inputs, *outputs)
        self.kernel = nnx.Param(init(rngs.params(), (*inputs.values(), *outputs.values()), config.param_dtype))
        init = sl.logical(nnx.initializers.zeros, *outputs)
        self.bias = nnx.Param(init(rngs.params(), tuple(outputs.values()), config.param_dtype)) if bias else None
        self.contracted = len(inputs)

    def __call__(self, x: jax.Array, *names: str) -> jax.Array:
        """Multiply, lay the product out as `names` say, add the bias."""
        product = sl.shard(jnp.tensordot(x, self.kernel[...].astype(x.dtype), axes=self.contracted), *names)
        return product if self.bias is None else product + self.bias[...].astype(x.dtype)


class Attention(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        D, H, G, K = config.width, config.heads, config.kv_heads or config.heads, config.head_dim or config.width // config.heads
        project = functools.partial(Projection, config=config, bias=config.bias, rngs=rngs)
        self.query = project({"embed": D}, {"heads": H, "head_dim": K})
        self.key = project({"embed": D}, {"kv_heads": G, "head_dim": K})
        self.value = project({"embed": D}, {"kv_heads": G, "head_dim": K})
        self.output = project({"heads": H, "head_dim": K}, {"embed": D})

    def __call__(self, x, rotation):
        x = sl.shard(x, *WHOLE)
        q_BSHK = self.query(x, "batch", "seq", "act_heads", "head_dim")
        k_BSGK = self.key(x, "batch", "seq", "act_kv_heads", "head_dim")
        v_BSGK = self.value(x, "batch", "seq", "act_kv_heads", "head_dim")
        if rotation is not None:
            q_BSHK, k_BSGK = rotate(q_BSHK, rotation), rotate(k_BSGK, rotation)
        y_BSHK = jax.nn.dot_product_attention(q_BSHK, k_BSGK, v_BSGK, is_causal=True)
        y_BSHK = sl.shard(y_BSHK, "batch", "seq", "act_heads", "head_dim")
        return self.output(y_BSHK, *RESIDUAL)


def rotate(x_BSHK, rotation):
    cos, sin = rotation
    a, b = jnp.split(x_BSHK.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BSHK.dtype)


class MLP(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        D, F = config.width, config.hidden
        project = functools.partial(Projection, config=config, bias=config.bias, rngs=rngs)
        self.up = project({"embed": D}, {"mlp": F})
        self.gate = project({"embed": D}, {"mlp": F}) if config.mlp == "swiglu" else None
        self.down = project({"mlp": F}, {"embed": D})

    def __call__(self, x):
        x = sl.shard(x, *WHOLE)
        h = self.up(x, "batch", "seq", "act_mlp")
        h = jax.nn.gelu(h) if self.gate is None else h * jax.nn.silu(self.gate(x, "batch", "seq", "act_mlp"))
        return self.down(h, *RESIDUAL)


def make_norm(config, rngs):
    options = dict(epsilon=config.norm_epsilon, dtype=config.dtype, param_dtype=config.param_dtype, rngs=rngs, use_fast_variance=False)
    scale_init = sl.logical(nnx.initializers.ones, "embed")
    if config.norm == "rms":
        return nnx.RMSNorm(config.width, scale_init=scale_init, **options)
    return nnx.LayerNorm(config.width, scale_init=scale_init, use_bias=config.bias, bias_init=sl.logical(nnx.initializers.zeros, "embed"), **options)


class Block(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.norm_first = config.norm_first
        self.attention_norm = make_norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = make_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x, rotation, key):
        x = self.residual(x, lambda h: self.attention(h, rotation), self.attention_norm)
        return self.residual(x, self.mlp, self.mlp_norm)

    def residual(self, x, part, norm):
        y = x + part(sl.shard(norm(x), *RESIDUAL) if self.norm_first else x)
        return sl.shard(y if self.norm_first else norm(y), *RESIDUAL)


class GPT(nnx.Module):
    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        rows = -(-config.vocab // config.vocab_multiple) * config.vocab_multiple
        init = sl.logical(nnx.initializers.normal(0.02), "vocab", "embed")
        self.embedding = nnx.Param(init(rngs.params(), (rows, config.width), config.param_dtype))
        init = sl.logical(nnx.initializers.normal(0.02), "position", "embed")
        self.positions = nnx.Param(init(rngs.params(), (config.context, config.width), config.param_dtype)) if config.positions == "learned" else None

        @nnx.split_rngs(splits=config.layers)
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def create(rngs):
            return Block(config, rngs=rngs)

        self.blocks = create(rngs)
        self.norm = make_norm(config, rngs) if config.norm_first else None
        self.head = None if config.tied else Projection({"embed": config.width}, {"vocab": rows}, config, bias=False, rngs=rngs)

    def __call__(self, tokens, key=None):
        config = self.config
        S = tokens.shape[1]
        tokens = sl.shard(tokens, 'batch', 'seq')
        x = sl.shard(self.embedding[...][tokens], *RESIDUAL)
        rotation = None
        if self.positions is not None:
            x = x + self.positions[...][:S]
        else:
            K = config.head_dim or config.width // config.heads
            freq = config.rope_theta ** (-jnp.arange(0, K, 2) / K)
            angle = (jnp.arange(S)[:, None] * freq)[:, None, :]
            rotation = (jnp.cos(angle), jnp.sin(angle))
        x = sl.shard(x.astype(config.dtype), *RESIDUAL)
        block = sl.remat(Block.__call__, checkpoint=functools.partial(nnx.remat, prevent_cse=False))

        @nnx.scan(in_axes=(0, nnx.Carry, None, None), out_axes=nnx.Carry)
        def run(blocks, x, rotation, key):
            return block(blocks, x, rotation, key)

        x = run(self.blocks, x, rotation, key)
        if self.norm is not None:
            x = sl.shard(self.norm(x), *RESIDUAL)
        x = sl.shard(x, *WHOLE)
        if self.head is not None:
            return self.head(x, "batch", "seq", "act_vocab")
        return sl.shard(jnp.tensordot(x, self.embedding[...].astype(x.dtype), axes=(2, 1)), "batch", "seq", "act_vocab")


def token_losses(model, tokens, targets, mask=None):
    targets = sl.shard(targets, 'batch', 'seq')
    logits = model(tokens).astype(jnp.float32)
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True))
    shifted = logits - top
    picked = jnp.where(jnp.arange(logits.shape[-1]) == targets[..., None], shifted, 0).sum(-1)
    losses = jnp.log(jnp.exp(shifted).sum(-1)) - picked
    return losses.sum(), losses.size


def gpt1(**c): return replace(GPTConfig(12, 768, 12, 3072, 512, 40512, tied=False, norm_first=False), **c)
def llama(**c): return replace(GPTConfig(12, 768, 12, 3072, 512, 40512, norm="rms", positions="rotary", mlp="swiglu", bias=False, tied=False, kv_heads=4), **c)
