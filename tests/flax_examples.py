"""The structure of Flax's published examples, in a few lines each: Gemma (NNX), lm1b (Linen and
NNX) and ResNet (Linen).

What they have of Flax's own ways to say how arrays are laid out is kept: names fewer than dims on
attention's kernels, logical constraints, specs that name mesh axes, `BatchNorm(axis_name="batch")`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P

NORMAL = nnx.initializers.normal(0.3)
VOCABULARY, WIDTH, HEADS, HEAD, HIDDEN = 32, 16, 4, 4, 32


# Gemma: weights of einsums, a table that embeds and decodes, RMSNorm, GeGLU, every other layer with
# a sliding window.


@dataclasses.dataclass(frozen=True)
class Layout:
    """How Gemma's weights and activations are laid out: names, or mesh axes."""

    table: tuple
    query: tuple
    key_value: tuple
    out: tuple
    gate: tuple
    down: tuple
    scale: tuple
    activation: P | None = None


BY_NAME = Layout(
    ("vocab", "embed"), ("heads", "embed", "head_dim"), (None, "kv_heads", "embed", "head_dim"),
    ("heads", "head_dim", "embed"),
    (None, "embed", "mlp"), ("mlp", "embed"), ("embed",),
)  # fmt: skip
FSDP_TP = Layout(
    ("tp", "fsdp"), ("tp", "fsdp", None), (None, "tp", "fsdp", None), ("tp", None, "fsdp"), (None,
    "fsdp", "tp"),
    ("tp", "fsdp"), ("tp",), P("fsdp", None, "tp"),
)  # fmt: skip


class Einsum(nnx.Module):
    def __init__(self, shape, names, rngs):
        self.w = nnx.Param(nnx.with_partitioning(NORMAL, names)(rngs.params(), shape, jnp.float32))

    def __call__(self, equation, x):
        return jnp.einsum(equation, x, self.w[...])


class RMSNorm(nnx.Module):
    def __init__(self, names, rngs):
        zeros = nnx.with_partitioning(nnx.initializers.zeros_init(), names)
        self.scale = nnx.Param(zeros(rngs.params(), (WIDTH,), jnp.float32))

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + self.scale[...])


class GemmaBlock(nnx.Module):
    def __init__(self, layout, window, rngs):
        self.window = window
        self.before_attention, self.before_mlp = (
            RMSNorm(layout.scale, rngs),
            RMSNorm(layout.scale, rngs),
        )
        self.query = Einsum((HEADS, WIDTH, HEAD), layout.query, rngs)
        self.key_value = Einsum((2, 2, WIDTH, HEAD), layout.key_value, rngs)
        self.out = Einsum((HEADS, HEAD, WIDTH), layout.out, rngs)
        self.gate = Einsum((2, WIDTH, HIDDEN), layout.gate, rngs)
        self.down = Einsum((HIDDEN, WIDTH), layout.down, rngs)

    def __call__(self, x):
        y = self.before_attention(x)
        query = self.query("BTD,NDH->BTNH", y) * HEAD**-0.5
        key, value = self.key_value("BTD,CKDH->CBTKH", y)
        grouped = query.reshape(*query.shape[:2], key.shape[2], -1, HEAD)
        logits = 50 * jnp.tanh(jnp.einsum("BTKGH,BSKH->BTKGS", grouped, key) / 50)
        positions = jnp.arange(x.shape[1])
        distance = positions[:, None] - positions[None]
        seen = (distance >= 0) & (distance < self.window)
        weights = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -1e9))
        mixed = jnp.einsum("BTKGS,BSKH->BTKGH", weights, value).reshape(query.shape)
        x = x + self.out("BTNH,NHD->BTD", mixed)
        gate, up = self.gate("BTD,CDF->CBTF", self.before_mlp(x))
        return x + self.down("BTF,FD->BTD", nnx.gelu(gate) * up)


class Gemma(nnx.Module):
    def __init__(self, layout, rngs):
        self.layout = layout
        self.table = Einsum((VOCABULARY, WIDTH), layout.table, rngs)
        self.blocks = nnx.List([GemmaBlock(layout, window, rngs) for window in (3, 100)])
        self.norm = RMSNorm(layout.scale, rngs)

    def constrained(self, x):
        return (
            x
            if self.layout.activation is None
            else jax.lax.with_sharding_constraint(x, self.layout.activation)
        )

    def __call__(self, tokens):
        x = self.constrained(self.table.w[...][tokens] * WIDTH**0.5)
        for block in self.blocks:
            x = self.constrained(block(x))
        return self.norm(x) @ self.table.w[...].T


# lm1b: a decoder of LayerNorm, dot product attention and an MLP, which predicts the token from
# those before it.


def shifted(tokens):
    return jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]


def named(init, *names):
    return nn.with_logical_partitioning(init, names)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        ones, zeros = nn.initializers.ones, nn.initializers.zeros
        norm = {"scale_init": named(ones, "embed"), "bias_init": named(zeros, "embed")}
        y = nn.LayerNorm(**norm)(x)
        kernels = {"kernel_init": named(NORMAL, "embed", "kv"), "bias_init": named(zeros, "kv")}
        y = nn.MultiHeadDotProductAttention(HEADS, **kernels)(
            y, mask=nn.make_causal_mask(jnp.ones(x.shape[:2]))
        )
        x = nn.with_logical_constraint(x + y, ("batch", "length", "act_embed"))
        y = nn.Dense(
            HIDDEN, kernel_init=named(NORMAL, "embed", "mlp"), bias_init=named(zeros, "mlp")
        )(nn.LayerNorm(**norm)(x))
        y = nn.with_logical_constraint(nn.relu(y), ("batch", "length", "act_mlp"))
        return x + nn.Dense(
            WIDTH, kernel_init=named(NORMAL, "mlp", "embed"), bias_init=named(zeros, "embed")
        )(y)


class LinenLM(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, embedding_init=named(NORMAL, "vocab", "embed"))(
            shifted(tokens)
        )
        x = LinenBlock()(nn.with_logical_constraint(x, ("batch", "length", "act_embed")))
        return nn.Dense(VOCABULARY, kernel_init=named(NORMAL, "embed", "vocab"))(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        def named(init, *names):
            return nnx.with_partitioning(init, names)

        ones, zeros = nnx.initializers.ones_init(), nnx.initializers.zeros_init()
        norm = {
            "scale_init": named(ones, "embed"),
            "bias_init": named(zeros, "embed"),
            "rngs": rngs,
        }
        kernels = {
            "kernel_init": named(NORMAL, "embed", "kv"),
            "bias_init": named(zeros, "kv"),
            "rngs": rngs,
        }
        self.before_attention, self.before_mlp = (
            nnx.LayerNorm(WIDTH, **norm),
            nnx.LayerNorm(WIDTH, **norm),
        )
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, **kernels)
        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=named(NORMAL, "embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, kernel_init=named(NORMAL, "mlp", "embed"), rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.before_attention(x), mask=mask)
        return x + self.down(nnx.relu(self.up(self.before_mlp(x))))


class NnxLM(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(
            VOCABULARY,
            WIDTH,
            embedding_init=nnx.with_partitioning(NORMAL, ("vocab", "embed")),
            rngs=rngs,
        )
        self.block = NnxBlock(rngs)
        self.head = nnx.Linear(
            WIDTH,
            VOCABULARY,
            kernel_init=nnx.with_partitioning(NORMAL, ("embed", "vocab")),
            rngs=rngs,
        )

    def __call__(self, tokens):
        return self.head(self.block(self.table(shifted(tokens))))


# ResNet: convolutions and batch norm over the whole batch, whose axis the example calls `batch`.


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        def norm():
            return nn.BatchNorm(use_running_average=False, momentum=0.9, axis_name="batch")

        x = nn.relu(norm()(nn.Conv(8, (3, 3), use_bias=False)(x)))
        y = nn.relu(norm()(nn.Conv(8, (3, 3), (2, 2), use_bias=False)(x)))
        y = norm()(nn.Conv(8, (3, 3), use_bias=False)(y))
        x = nn.relu(y + norm()(nn.Conv(8, (1, 1), (2, 2), use_bias=False)(x)))
        return nn.Dense(4)(x.mean((1, 2)))
