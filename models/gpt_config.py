"""What a GPT is: sizes and choices, and those of well-known ones."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import jax.numpy as jnp

import shardlib as sl
from models.rotary import SCALINGS, Scaling
from models.rotary import LinearScaling as LinearScaling
from models.rotary import RopeScaling as RopeScaling
from models.rotary import YarnScaling as YarnScaling


@dataclass(frozen=True)
class LatentAttention:
    """The sizes of DeepSeek's latent attention (MLA), see `models/latent_attention.py`. The
    defaults are DeepSeek-V3's.

    - `query_rank`: of the array that all heads' queries are made of.
    - `kv_rank`: of the array that all heads' keys and values are made of.
    - `key_dim`: the part of a head's query and key that knows no position.
    - `rotary_dim`: the part that rotary positions turn; of keys, all heads have this one in common.
    - `value_dim`: the size of a head's values.
    """

    query_rank: int = 1536
    kv_rank: int = 512
    key_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128

    def __post_init__(self) -> None:
        for name, value in self.dims.items():
            if not _is_count(value):
                raise ValueError(
                    f"`LatentAttention({name}={value!r})` must be a positive integer, below 2**31."
                )
        if self.rotary_dim % 2:
            raise ValueError(
                f"`LatentAttention(rotary_dim={self.rotary_dim})` must be even: rotary positions "
                "turn pairs."
            )

    @property
    def head_dim(self) -> int:
        """The size of a head's queries and keys."""
        return self.key_dim + self.rotary_dim

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dim of the parameters that plain attention has not, by its name."""
        return {
            "query_rank": self.query_rank,
            "kv_rank": self.kv_rank,
            "key_dim": self.key_dim,
            "rotary_dim": self.rotary_dim,
            "value_dim": self.value_dim,
        }

    def parameters(self, width: int, heads: int) -> int:
        """How many numbers the matrices have, in a model of such a width and so many heads."""
        compressing = width * (self.query_rank + self.kv_rank + self.rotary_dim)
        queries = self.query_rank * heads * self.head_dim
        keys_and_values = self.kv_rank * heads * (self.key_dim + self.value_dim)
        return compressing + queries + keys_and_values + width * heads * self.value_dim


@dataclass(frozen=True)
class GPTConfig:
    """What the model is. The defaults are GPT-2's choices.

    - `layers`: how many there are.
    - `width`: the size of the residual stream.
    - `heads`: query heads of a layer.
    - `context`: how many tokens a sequence has.
    - `vocab`: how many tokens there are.
    - `vocab_multiple`: the embedding's rows are rounded up to it, so that any vocabulary splits
      evenly. Rows beyond `vocab` never get probability.
    - `kv_heads`: key and value heads, by default `heads`.
    - `head_dim`: the size of a head, by default `width / heads`.
    - `hidden`: the inner width of the MLP, by default `4 * width`.
    - `norm`: "layer" for LayerNorm, "rms" for RMSNorm.
    - `norm_epsilon`: what norms add to the variance.
    - `norm_first`: norms come before attention and the MLP, or after them, as in GPT-1.
    - `positions`: "learned" or "rotary".
    - `rope_theta`: the base of rotary angles.
    - `mlp`: its activation; "swiglu" and "geglu" are gated.
    - `bias`: projections and LayerNorms have biases.
    - `tied`: the head is the embedding.
    - `dropout`: the share that is dropped.
    - `dtype`: of products, by default that of the parameters. Norms, attention's softmax,
      activations and the loss are computed in float32 always.
    - `param_dtype`: of the parameters.

    How its layers are computed:

    - `kernels`: norms are plain JAX with "xla", and else those of `sl.kernels`, which take the
      addition before them: by the implementation of that name, or with None by the best that is
      known where they run. Plain JAX is the default since XLA keeps what it has gathered of such a
      norm's result for the backward pass, where sequences are split, and of one with a derivative
      of its own it gathers that again.
    - `attention`: the implementation of `sl.kernels.attention`, whose scores are never in memory,
      such as "tpu" on TPUs and "cudnn" or "tokamax" on NVIDIA's GPUs, or "xla": JAX's own, which
      writes all scores.
    - `fused_loss`: the loss takes the head and the cross-entropy in one,
      `sl.kernels.linear_cross_entropy`: all logits are never in memory at a time, and are made
      again in the backward pass. True takes the fastest implementation that is known where it runs.
      A name takes that one: "reference" is plain JAX, by parts of the vocabulary, which compiles
      faster than a kernel.
    - `mlp_tiles`: an MLP takes so many parts of its tokens one after the other, and makes each part
      again in the backward pass: of what is `hidden` wide, one part at a time is in memory.
    - `unroll`: layers are a loop, compiled once. So many of them are written out one after the
      other in each turn of the loop; with `unroll=layers` there is no loop. A GPU then copies what
      layers keep for the backward pass into no stack, and takes longer to compile.

    What families of models have beside those of GPT-2 and Llama:

    - `query_key_norm`: each head's queries and keys are normed before positions turn them, with one
      scale for all heads, as in Qwen 3.
    - `qkv_bias`: queries, keys and values have biases where nothing else has, as in Qwen 2.
    - `rope_scaling`: rotary positions for longer contexts: a `RopeScaling`, `LinearScaling` or
      `YarnScaling`.
    - `latent`: DeepSeek's latent attention in place of the plain one, in models with rotary
      positions; it says the sizes of heads, which `kv_heads` and `head_dim` do not then.
    - `norm_from_zero`: norms multiply by 1 plus their scale, which begins at 0 (also called
      zero-centered), as in Gemma.
    - `post_norms`: what attention and the MLP return is normed before it is added, as in Gemma 2.
    - `scaled_embedding`: embeddings are multiplied by the root of `width`, as in Gemma.
    - `window`: a token sees so many: itself and those before it.
    - `full_every`: every so many-th layer sees all tokens, and only the others have the window.
    - `local_rope_theta`: the `rope_theta` of layers with a window, whose positions are not scaled,
      as in Gemma 3; by default they have those of the other layers.
    - `attention_scale`: what scores are multiplied by, in place of 1 / sqrt(head_dim).
    - `attention_cap`: scores are softly kept between this and its negative, as in Gemma 2.
    - `logit_cap`: the same of logits.
    """

    layers: int
    width: int
    heads: int
    context: int
    vocab: int
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    norm: Literal["layer", "rms"] = "layer"
    norm_first: bool = True
    norm_epsilon: float = 1e-5
    positions: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 10_000.0
    rope_scaling: Scaling | None = None
    mlp: Literal["gelu", "relu", "swiglu", "geglu"] = "gelu"
    bias: bool = True
    tied: bool = True
    query_key_norm: bool = False
    qkv_bias: bool = False
    latent: LatentAttention | None = None
    norm_from_zero: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    window: int | None = None
    full_every: int | None = None
    local_rope_theta: float | None = None
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    dropout: float = 0.0
    vocab_multiple: int = 1
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernels: Literal[
        "reference", "tpu", "gpu", "tokamax", "tpu_simulated", "gpu_simulated", "xla", None
    ] = "xla"
    fused_loss: Literal[
        True, False, "reference", "tpu", "gpu", "tpu_simulated", "gpu_simulated"
    ] = False
    mlp_tiles: int | None = None
    unroll: int = 1
    attention: Literal[
        "reference",
        "tpu",
        "tpu_simulated",
        "gpu",
        "gpu_simulated",
        "xla",
        "cudnn",
        "tokamax",
        None,
    ] = None

    def __post_init__(self) -> None:
        for field, hint in get_type_hints(type(self)).items():
            value = getattr(self, field)
            if get_origin(hint) is Literal and not _is_one_of(value, get_args(hint)):
                raise ValueError(
                    f"`GPTConfig({field}={value!r})`: choose "
                    f"{' or '.join(map(repr, get_args(hint)))}."
                )
            if hint is bool and not isinstance(value, bool):
                raise ValueError(f"`GPTConfig({field}={value!r})` is True or False.")
            whole = hint is int or (hint == int | None and value is not None)
            if whole and not _is_count(value):
                raise ValueError(
                    f"`GPTConfig({field}={value!r})` must be a positive integer, below 2**31."
                )
            if hint is float and not _is_size(value):
                raise ValueError(
                    f"`GPTConfig({field}={value!r})` must be a number that is finite, at least 0."
                )
            if hint == float | None and value is not None and not _is_positive(value):
                raise ValueError(f"`GPTConfig({field}={value!r})` must be a number above 0.")
        if self.rope_theta == 0:
            raise ValueError(
                "`GPTConfig(rope_theta=0)` must be above 0: angles are divided by its powers."
            )
        if self.dropout >= 1:
            raise ValueError(
                f"`GPTConfig(dropout={self.dropout})` is the share that is dropped: "
                "at least 0, below 1."
            )
        if self.dtype is not None:
            _check_dtype("dtype", self.dtype)
        _check_dtype("param_dtype", self.param_dtype)
        if self.latent is not None:
            _check_latent(self)
        if self.rope_scaling is not None:
            _check_scaling(self)
        _check_windows(self)
        _check_norms(self)
        if self.latent is None and self.head_dim is None and self.width % self.heads:
            raise ValueError(
                f"`GPTConfig(width={self.width})` must be a multiple of `heads={self.heads}`; "
                "choose another number of heads, or say what the size of one is: `head_dim=...`."
            )
        if self.heads % self.dims["kv_heads"]:
            raise ValueError(
                f"`GPTConfig(heads={self.heads})` must be a multiple of "
                f"`kv_heads={self.kv_heads}`: each key and value head serves equally many query "
                "heads."
            )
        if self.positions == "rotary" and self.dims["head_dim"] % 2:
            raise ValueError(
                '`positions="rotary"` turns pairs; '
                f"`head_dim={self.dims['head_dim']}` must be even."
            )

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dim of the parameters, by its name."""
        of_latent = {} if self.latent is None else self.latent.dims
        head_dim = self.head_dim or self.width // self.heads
        return {
            "embed": self.width,
            "heads": self.heads,
            "kv_heads": self.kv_heads or self.heads,
            "head_dim": head_dim if self.latent is None else self.latent.head_dim,
            **of_latent,
            "mlp": self.hidden or 4 * self.width,
            "position": self.context,
            "vocab": math.ceil(self.vocab / self.vocab_multiple) * self.vocab_multiple,
        }

    @property
    def gated(self) -> bool:
        """Whether the MLP has a third matrix, for the gate of a gated unit."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def period(self) -> int:
        """Of how many layers, one after the other, the stack of layers is made."""
        return self.full_every or 1

    @property
    def local_layers(self) -> int:
        """How many layers have a window."""
        return sum(map(self.has_window, range(self.layers)))

    def has_window(self, layer: int) -> bool:
        """Whether a layer, of this number from 0, has a window."""
        is_full = self.full_every is not None and (layer + 1) % self.full_every == 0
        return self.window is not None and not is_full

    @property
    def rotary_dim(self) -> int:
        """How many numbers of a head rotary positions turn."""
        return self.dims["head_dim"] if self.latent is None else self.latent.rotary_dim

    @property
    def training_flops_per_token(self) -> float:
        """What forward and backward take for one token, counting products alone, as MFU does:
        causal attention whole.
        """
        return 3 * sum(self._forward_flops.values()) / self.context

    @property
    def _forward_flops(self) -> dict[str, int]:
        """What the forward pass takes for a sequence, by the kind of module: of all layers."""
        modules = self._plain_decoder.modules()
        found = {module.name: module.count * module.flops for module in modules}
        if self.latent is not None:
            scores = self.context * self.heads * (self.latent.head_dim + self.latent.value_dim)
            products = self.latent.parameters(self.width, self.heads) + scores
            found["attention"] = 2 * self.layers * self.context * products
        # Of the tokens that a layer without a window multiplies with, these are not met.
        unseen = self.context - min(self.window or self.context, self.context)
        sizes = 2 * self.dims["head_dim"]
        if self.latent is not None:
            sizes = self.latent.head_dim + self.latent.value_dim
        scores = 2 * self.heads * sizes * unseen
        found["attention"] -= self.local_layers * self.context * scores
        return found

    @property
    def decoder(self) -> sl.planning.Decoder:
        """Its shape alone, for `sl.estimate`."""
        others = ("post_norms", "window", "attention_cap", "logit_cap", "mlp_tiles")
        for field in ("latent", "query_key_norm", "qkv_bias", *others):
            if getattr(self, field):
                raise no_decoder(self, field)
        return self._plain_decoder

    @property
    def _plain_decoder(self) -> sl.planning.Decoder:
        """The shape of a decoder that has plain attention, and else is like this one."""
        return sl.planning.Decoder(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            sequence=self.context,
            vocab=self.dims["vocab"],
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden=self.hidden,
            norm=self.norm,
            mlp=self.mlp,
            positions=self.positions,
            bias=self.bias,
            tied=self.tied,
            final_norm=self.norm_first,
            scores=self.attention == "xla",
        )


def no_decoder(config: GPTConfig, field: str) -> ValueError:
    """The refusal to describe a model to formulas that know nothing of what a field asks for."""
    return ValueError(
        f"`{type(config).__name__}({field}={getattr(config, field)!r})`: the formulas of "
        "`sl.estimate` and `sl.planning.Decoder` know nothing of it. Ask the compiler: `sl.plan`."
    )


def _check_latent(config: GPTConfig) -> None:
    """Refuse fields that latent attention leaves no meaning."""
    name = type(config).__name__
    if not isinstance(config.latent, LatentAttention):
        raise ValueError(
            f"`{name}(latent={str(config.latent)[:200]!r})` is a `LatentAttention(...)`, or None."
        )
    for field in ("kv_heads", "head_dim"):
        if (value := getattr(config, field)) is not None:
            raise ValueError(
                f"`{name}({field}={value}, latent=...)`: the sizes of latent attention are those "
                f"of `LatentAttention`; leave `{field}` out."
            )
    if config.positions != "rotary":
        raise ValueError(
            f"`{name}(positions={config.positions!r}, latent=...)`: a part of each head is for "
            'rotary positions; say `positions="rotary"`.'
        )
    if config.qkv_bias:
        raise ValueError(
            f"`{name}(qkv_bias=True, latent=...)`: latent attention has other queries, keys and "
            "values; leave `qkv_bias` out."
        )
    if config.query_key_norm:
        raise ValueError(
            f"`{name}(query_key_norm=True, latent=...)`: latent attention norms what queries and "
            "keys are made of; leave `query_key_norm` out."
        )


def _check_scaling(config: GPTConfig) -> None:
    """Refuse scaled positions that are none, and in models that have no rotary ones."""
    name = type(config).__name__
    if not isinstance(config.rope_scaling, SCALINGS):
        known = ", ".join(f"`{kind.__name__}(...)`" for kind in SCALINGS)
        raise ValueError(
            f"`{name}(rope_scaling={str(config.rope_scaling)[:200]!r})` is {known}, or None."
        )
    if isinstance(config.rope_scaling, YarnScaling) and config.rope_theta <= 1:
        raise ValueError(
            f"`{name}(rope_theta={config.rope_theta}, rope_scaling=YarnScaling(...))`: angles of "
            "YaRN are told apart by the logarithm of `rope_theta`, which must be above 1."
        )
    if config.positions != "rotary":
        raise ValueError(
            f"`{name}(positions={config.positions!r}, rope_scaling=...)`: only rotary positions "
            'are scaled; say `positions="rotary"`.'
        )


def _check_windows(config: GPTConfig) -> None:
    """Refuse what is said of windows in models that have none, or no layers with them."""
    name = type(config).__name__
    for field in ("full_every", "local_rope_theta"):
        value = getattr(config, field)
        if value is not None and config.window is None:
            raise ValueError(
                f"`{name}({field}={value})` is of layers with a window, and there are none; say "
                "`window=...`."
            )
    if config.local_rope_theta is not None and config.positions != "rotary":
        raise ValueError(
            f"`{name}(local_rope_theta={config.local_rope_theta}, positions="
            f'{config.positions!r})`: these are no rotary positions; say `positions="rotary"`.'
        )
    if config.full_every is not None and not 2 <= config.full_every <= config.layers:
        raise ValueError(
            f"`{name}(full_every={config.full_every})` must be at least 2, or no layer has the "
            f"window, and at most `layers={config.layers}`, or all have it: leave it out."
        )


def _check_norms(config: GPTConfig) -> None:
    """Refuse norms that there are not."""
    name = type(config).__name__
    if config.norm_from_zero and config.norm != "rms":
        raise ValueError(
            f"`{name}(norm={config.norm!r}, norm_from_zero=True)`: only an RMSNorm has its scale "
            'from zero; say `norm="rms"`.'
        )
    if config.post_norms and not config.norm_first:
        raise ValueError(
            f"`{name}(norm_first=False, post_norms=True)`: the norms after attention and the MLP "
            "are beside those before; leave `norm_first` out."
        )


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**31


def _is_size(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _is_positive(value: Any) -> bool:
    return _is_size(value) and value > 0


def _is_one_of(value: Any, choices: tuple[Any, ...]) -> bool:
    # 1 equals True, and is none of the choices.
    return (value is None or isinstance(value, str | bool)) and value in choices


def _check_dtype(field: str, value: Any) -> None:
    """Refuse what is no dtype in which a model could learn."""
    try:
        found = jnp.dtype(value) if value is not None else None
    except Exception:  # NumPy reads some texts as Python
        found = None
    if found not in (jnp.bfloat16, jnp.float32, jnp.float64, jnp.float16):
        raise ValueError(
            f"`GPTConfig({field}={str(value)[:200]!r})` must be `bfloat16`, `float32` or `float64`."
        )
    if found == jnp.float16:
        raise ValueError(
            f"`GPTConfig({field}={str(value)!r})`: gradients below 6e-8 are zero in float16, which "
            "takes a scaled loss, and a step has none yet. Use `bfloat16`."
        )
