"""Layers that the models are made of: projections, norms and MLPs, every dim named.

Shape suffixes, with the names the rules know a dim by (weights / activations):

    B  batch                 S  sequence (seq; residual_seq in the residual stream)
    D  width (embed / act_embed)            F  hidden width of the MLP (mlp / act_mlp)
    H  query heads (heads / act_heads)      G  key and value heads (kv_heads / act_kv_heads)
    K  size of one head (head_dim)          V  rows of the vocabulary (vocab / act_vocab)

What Megatron's rules make of it (`sl.rules.tensor`): the residual stream is whole on every device
of `model`, and each half of a block leaves it once and returns once. Each device multiplies by its
own heads, or by its own part of the MLP, and the partial products are summed on the way back: one
all-reduce per half forward, and one backward, where the half left the stream. Under
`sl.rules.tensor_sequence` the stream is split along the sequence, and the same annotations make
each all-reduce an all-gather on leaving and a reduce-scatter on returning.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl
from models.gpt_config import GPTConfig
from models.rotary import Rotation as Rotation

RESIDUAL = ("batch", "residual_seq", "act_embed")
WHOLE = ("batch", "seq", "act_embed")
HEADS = ("batch", "seq", "act_heads", "head_dim")
KV_HEADS = ("batch", "seq", "act_kv_heads", "head_dim")
HIDDEN = ("batch", "seq", "act_mlp")
LOGITS = ("batch", "seq", "act_vocab")
STANDARD_DEVIATION = 0.02  # of every initial kernel and embedding, as GPT-1 and GPT-2 have it

Names = tuple[str | None, ...]  # of the dims of an activation
normal = nnx.initializers.normal
named = sl.checkpoint_name


def parameter(
    init: Callable[..., Any], config: GPTConfig, *names: str, rngs: nnx.Rngs
) -> nnx.Param:
    """A parameter with a dim for each name, of the size the configuration gives that name."""
    shape = tuple(config.dims[name] for name in names)
    return nnx.Param(sl.logical(init, *names)(rngs.params(), shape, config.param_dtype))


class Projection(nnx.Module):
    """A kernel from some named dims to others, and a bias, if the configuration or `bias` has it.

    The kernel has its outputs first, as PyTorch stores them and as its gradient comes out of the
    product: with inputs first, every backward pass would transpose every gradient.
    """

    def __init__(
        self,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        config: GPTConfig,
        *,
        std: float = STANDARD_DEVIATION,
        bias: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.inputs, self.outputs = len(inputs), len(outputs)
        self.kernel = parameter(normal(std), config, *outputs, *inputs, rngs=rngs)
        biased = bias or config.bias
        self.bias = (
            parameter(nnx.initializers.zeros, config, *outputs, rngs=rngs) if biased else None
        )
        self.adapter: sl.lora.Adapter | None = None  # `sl.lora.add` gives it one

    def __call__(self, x: jax.Array, *layouts: Names) -> jax.Array:
        """Multiply over the last dims of `x`, which are the kernel's last too, lay the product out,
        add the bias.
        """
        # In this order: where the product is a sum over devices, the bias belongs to the sum, once.
        last = tuple(range(-self.inputs, 0))
        product = jnp.tensordot(x, self.kernel[...].astype(x.dtype), (last, last))
        return self.add_bias(self.add_adapter(lay_out(product, *layouts), x, *layouts))

    def add_adapter(self, product: jax.Array, x: jax.Array, *layouts: Names) -> jax.Array:
        """A product with that of the two thin factors added, where there are these: LoRA's.

        What is between them is small: it is gathered, or summed over devices, in place of `x` or
        the product.
        """
        if self.adapter is None:
            return product
        low = lay_out(self.adapter.project_down(x), (*layouts[0][: -self.outputs], None))
        return product + lay_out(self.adapter.project_up(low), *layouts)

    def add_bias(self, product: jax.Array) -> jax.Array:
        """A product with the bias added, where there is one."""
        if self.bias is None:
            return product
        return (product + self.bias[...]).astype(product.dtype)


class Dropout(nnx.Dropout):
    """Flax's dropout of an array `[batch, sequence, ...]`, whose draws follow the positions of
    tokens, in whatever order these are.
    """

    def __call__(self, inputs: jax.Array, **options: Any) -> jax.Array:
        inactive = self.deterministic or not self.rate
        if inactive or not sl.context.is_arranged(inputs.shape[1]):
            return super().__call__(inputs, **options)
        ones = jnp.ones(inputs.shape, inputs.dtype)
        return inputs * sl.context.arrange(super().__call__(ones, **options))


def project(x: jax.Array, names: Names, *projections: tuple[Projection, Names]) -> list[jax.Array]:
    """What several projections make of one array, each with the names of its result's dims.

    Those of `x` are as it is laid out: for the products it leaves the residual stream.
    """
    products = multiply(x, names, *projections)
    pairs = zip(projections, products, strict=True)
    return [projection.add_bias(product) for (projection, _), product in pairs]


def multiply(
    x: jax.Array, names: Names, *projections: tuple[Projection, Names]
) -> tuple[jax.Array, ...]:
    """The products of `project` without their biases, for what adds these itself."""
    kernels = [projection.kernel[...].astype(x.dtype) for projection, _ in projections]
    outputs = [layout for _, layout in projections]
    products = sl.kernels.projections(x, kernels, names=names, outputs=outputs)
    return tuple(
        projection.add_adapter(product, x, layout)
        for (projection, layout), product in zip(projections, products, strict=True)
    )


def lay_out(x: jax.Array, *layouts: Names) -> jax.Array:
    """Name the dims of `x` one way, then another; the gradient takes the same way back.

    `RESIDUAL, WHOLE` leaves the residual stream: what was split along the sequence is gathered, its
    gradient summed and scattered. `WHOLE, RESIDUAL` returns to it: a sum over devices is scattered,
    its gradient gathered. Both names are said although the second decides, lest the partitioner
    carry one side's layout over to the other.
    """
    for names in layouts:
        x = sl.shard(x, *names)
    return x


class Norm(nnx.Module):
    """LayerNorm, or RMSNorm, which is LayerNorm without the centring and the bias. With
    `norm_from_zero` it multiplies by 1 plus the scale.

    `dim` is what the last dim of its parameters is called, `names` are those of what it norms.
    """

    def __init__(
        self, config: GPTConfig, dim: str = "embed", names: Names = RESIDUAL, *, rngs: nnx.Rngs
    ) -> None:
        self.names = names
        self.epsilon = config.norm_epsilon
        self.centred = config.norm == "layer"
        self.kernels = config.kernels
        self.from_zero = config.norm_from_zero
        init = nnx.initializers.zeros if self.from_zero else nnx.initializers.ones
        self.scale = parameter(init, config, dim, rngs=rngs)
        biased = self.centred and config.bias
        self.bias = parameter(nnx.initializers.zeros, config, dim, rngs=rngs) if biased else None

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Of the residual stream, or of what has the names that it was made for."""
        if self.kernels != "xla":
            return self._by_kernel(x_BSD)
        y_BSD = x_BSD.astype(jnp.float32)
        if self.centred:
            y_BSD -= y_BSD.mean(-1, keepdims=True)
        y_BSD *= (
            jax.lax.rsqrt(jnp.square(y_BSD).mean(-1, keepdims=True) + self.epsilon) * self._factor
        )
        return (y_BSD if self.bias is None else y_BSD + self.bias[...]).astype(x_BSD.dtype)

    @property
    def _factor(self) -> jax.Array:
        """What is multiplied by, in float32 where it is made of the scale."""
        scale = self.scale[...]
        return 1 + scale.astype(jnp.float32) if self.from_zero else scale

    def of_sum(self, x_BSD: jax.Array, y_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the residual stream with what is added to it, and that sum."""
        if self.kernels != "xla":
            return self._by_kernel(x_BSD, residual=y_BSD)
        x_BSD = lay_out(x_BSD + y_BSD, RESIDUAL)
        return self(x_BSD), x_BSD

    def _by_kernel(self, x_BSD: jax.Array, **more: Any) -> Any:
        weights = [self._factor, *([] if self.bias is None else [self.bias[...]])]
        norm = sl.kernels.layer_norm if self.centred else sl.kernels.rms_norm
        return norm(
            x_BSD,
            *weights,
            names=self.names,
            epsilon=self.epsilon,
            implementation=self.kernels,
            **more,
        )


def softly_capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Numbers softly kept between a cap and its negative, where there is one."""
    return x if cap is None else cap * jnp.tanh(x / cap)


class MLP(nnx.Module):
    """GPT's two matrices around a GELU, or Llama's three around a gated unit (SwiGLU)."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.kind = config.mlp
        self.up = Projection(("embed",), ("mlp",), config, rngs=rngs)
        self.gate = Projection(("embed",), ("mlp",), config, rngs=rngs) if config.gated else None
        self.down = Projection(("mlp",), ("embed",), config, std=returning_std(config), rngs=rngs)
        self.tiles = config.mlp_tiles

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        # One token of each row is what a model has that generates.
        if self.tiles is None or x_BSD.shape[1] == 1:
            return self.of_all(x_BSD)
        return sl.kernels.in_tiles(self.of_all, x_BSD, self.tiles, names=RESIDUAL)

    def of_all(self, x_BSD: jax.Array) -> jax.Array:
        """What the MLP makes of all tokens at once."""
        if self.gate is not None:
            both = (self.gate, HIDDEN), (self.up, HIDDEN)
            gate_BSF, up_BSF = project(x_BSD, RESIDUAL, *both)
            gate_BSF, up_BSF = named(gate_BSF, "mlp_gate", HIDDEN), named(up_BSF, "mlp_up", HIDDEN)
            h_BSF = activate(gate_BSF, self.kind, up=up_BSF)
        else:
            # The bias is added by the activation, so that the sum is never in memory.
            bias_F = None if self.up.bias is None else self.up.bias[...]
            (up_BSF,) = multiply(x_BSD, RESIDUAL, (self.up, HIDDEN))
            up_BSF = named(up_BSF, "mlp_up", HIDDEN)
            h_BSF = activate(up_BSF, self.kind, bias=bias_F)
        h_BSF = named(h_BSF, "mlp_hidden", HIDDEN)
        return named(self.down(h_BSF, WHOLE, RESIDUAL), "mlp_out", RESIDUAL)


def activate(
    x: jax.Array, kind: str, *, up: jax.Array | None = None, bias: jax.Array | None = None
) -> jax.Array:
    """What an MLP of a kind has between its matrices: GPT's GELU or a ReLU, of `x` and a bias, or a
    gated unit, in which `x` is the gate of `up`.
    """
    if up is not None:
        return sl.kernels.glu(x, up, "silu" if kind == "swiglu" else "gelu_tanh")
    return sl.kernels.activate(x, bias, "gelu_tanh" if kind == "gelu" else "relu")


def returning_std(config: GPTConfig) -> float:
    """GPT-2's: 2 * layers products are added up in the residual stream, which should not grow with
    the depth.
    """
    return STANDARD_DEVIATION / math.sqrt(2 * config.layers)


def fold_in(key: jax.Array | None, number: int) -> jax.Array | None:
    """A key of its own for each number, where there is a key."""
    return None if key is None else jax.random.fold_in(key, number)
