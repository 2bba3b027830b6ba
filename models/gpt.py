"""One decoder that is GPT-1, GPT-2 and Llama by configuration: Flax NNX, every dim named, no device
mentioned.

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

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl
from models.gpt_config import GPTConfig as GPTConfig
from models.gpt_config import gpt1 as gpt1
from models.gpt_config import gpt2 as gpt2
from models.gpt_config import gpt2_xl as gpt2_xl
from models.gpt_config import llama2_7b as llama2_7b
from models.gpt_config import llama3_8b as llama3_8b
from models.gpt_config import tiny as tiny

RESIDUAL = ("batch", "residual_seq", "act_embed")
WHOLE = ("batch", "seq", "act_embed")
HEADS = ("batch", "seq", "act_heads", "head_dim")
KV_HEADS = ("batch", "seq", "act_kv_heads", "head_dim")
HIDDEN = ("batch", "seq", "act_mlp")
LOGITS = ("batch", "seq", "act_vocab")
STANDARD_DEVIATION = 0.02  # of every initial kernel and embedding, as GPT-1 and GPT-2 have it

Rotation = tuple[jax.Array, jax.Array]
normal = nnx.initializers.normal
named = sl.checkpoint_name


class Seen(NamedTuple):
    """What a block sees beside the residual stream: the same in all blocks."""

    rotation: Rotation | None = None  # of positions
    segments_BS: jax.Array | None = None  # a token sees those of its own segment
    memory_BTD: jax.Array | None = None  # what an encoder made, for cross-attention
    memory_segments_BT: jax.Array | None = None
    real_BS: jax.Array | None = None  # false for padding, which no expert should have


def parameter(
    init: Callable[..., Any], config: GPTConfig, *names: str, rngs: nnx.Rngs
) -> nnx.Param:
    """A parameter with a dim for each name, of the size the configuration gives that name."""
    shape = tuple(config.dims[name] for name in names)
    return nnx.Param(sl.logical(init, *names)(rngs.params(), shape, config.param_dtype))


class Projection(nnx.Module):
    """A kernel from some named dims to others, and a bias.

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
        rngs: nnx.Rngs,
    ) -> None:
        self.contracted = len(inputs)
        self.kernel = parameter(normal(std), config, *outputs, *inputs, rngs=rngs)
        self.bias = (
            parameter(nnx.initializers.zeros, config, *outputs, rngs=rngs) if config.bias else None
        )

    def __call__(self, x: jax.Array, *layouts: tuple[str, ...]) -> jax.Array:
        """Multiply over the last dims of `x`, which are the kernel's last too, lay the product out,
        add the bias.
        """
        # In this order: where the product is a sum over devices, the bias belongs to the sum, once.
        return self.add_bias(self.product(x, *layouts))

    def product(self, x: jax.Array, *layouts: tuple[str, ...]) -> jax.Array:
        """The same without the bias, for what adds it itself."""
        last = tuple(range(-self.contracted, 0))
        return lay_out(jnp.tensordot(x, self.kernel[...].astype(x.dtype), (last, last)), *layouts)

    def add_bias(self, product: jax.Array) -> jax.Array:
        """A product with the bias added, where there is one."""
        if self.bias is None:
            return product
        return (product + self.bias[...]).astype(product.dtype)


def project(
    x: jax.Array, names: tuple[str, ...], *projections: tuple[Projection, tuple[str, ...]]
) -> list[jax.Array]:
    """What several projections make of one array, each with the names of its result's dims.

    Those of `x` are as it is laid out: for the products it leaves the residual stream.
    """
    kernels = [projection.kernel[...].astype(x.dtype) for projection, _ in projections]
    outputs = [layout for _, layout in projections]
    products = sl.kernels.projections(x, kernels, names=names, outputs=outputs)
    pairs = zip(projections, products, strict=True)
    return [projection.add_bias(product) for (projection, _), product in pairs]


def lay_out(x: jax.Array, *layouts: tuple[str, ...]) -> jax.Array:
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
    """LayerNorm, or RMSNorm, which is LayerNorm without the centring and the bias."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.epsilon = config.norm_epsilon
        self.centred = config.norm == "layer"
        self.kernels = config.kernels
        self.scale = parameter(nnx.initializers.ones, config, "embed", rngs=rngs)
        biased = self.centred and config.bias
        self.bias = (
            parameter(nnx.initializers.zeros, config, "embed", rngs=rngs) if biased else None
        )

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        """Of the residual stream."""
        if self.kernels != "xla":
            return self._by_kernel(x_BSD)
        y_BSD = x_BSD.astype(jnp.float32)
        if self.centred:
            y_BSD -= y_BSD.mean(-1, keepdims=True)
        y_BSD *= (
            jax.lax.rsqrt(jnp.square(y_BSD).mean(-1, keepdims=True) + self.epsilon)
            * self.scale[...]
        )
        return (y_BSD if self.bias is None else y_BSD + self.bias[...]).astype(x_BSD.dtype)

    def of_sum(self, x_BSD: jax.Array, y_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the residual stream with what is added to it, and that sum."""
        if self.kernels != "xla":
            return self._by_kernel(x_BSD, residual=y_BSD)
        x_BSD = lay_out(x_BSD + y_BSD, RESIDUAL)
        return self(x_BSD), x_BSD

    def _by_kernel(self, x_BSD: jax.Array, **more: Any) -> Any:
        weights = [one[...] for one in (self.scale, self.bias) if one is not None]
        norm = sl.kernels.layer_norm if self.centred else sl.kernels.rms_norm
        return norm(
            x_BSD,
            *weights,
            names=RESIDUAL,
            epsilon=self.epsilon,
            implementation=self.kernels,
            **more,
        )


class Attention(nnx.Module):
    """Attention, causal unless said otherwise, in which each key and value head serves a group of
    query heads.
    """

    def __init__(self, config: GPTConfig, *, causal: bool = True, rngs: nnx.Rngs) -> None:
        self.causal = causal
        self.implementation = config.attention
        self.query = Projection(("embed",), ("heads", "head_dim"), config, rngs=rngs)
        self.key = Projection(("embed",), ("kv_heads", "head_dim"), config, rngs=rngs)
        self.value = Projection(("embed",), ("kv_heads", "head_dim"), config, rngs=rngs)
        self.output = Projection(
            ("heads", "head_dim"), ("embed",), config, std=returning_std(config), rngs=rngs
        )

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
        own, others = (self.query, HEADS), [(self.key, KV_HEADS), (self.value, KV_HEADS)]
        if memory_BTD is None:
            q_BSHK, k_BTGK, v_BTGK = project(x_BSD, RESIDUAL, own, *others)
        else:
            (q_BSHK,) = project(x_BSD, RESIDUAL, own)
            k_BTGK, v_BTGK = project(memory_BTD, WHOLE, *others)
        if rotation is not None:
            q_BSHK = sl.kernels.rotate(q_BSHK, *rotation)
            k_BTGK = sl.kernels.rotate(k_BTGK, *rotation)
        # Query head h attends with key head h // (H / G), so a device that holds whole groups needs
        # nobody else's.
        segments = None
        memory_BT = segments_BS if memory_BTD is None else memory_segments_BT
        if segments_BS is not None and memory_BT is not None:
            segments = (segments_BS, memory_BT) if memory_BTD is not None else segments_BS
        q_BSHK, k_BTGK = named(q_BSHK, "query", HEADS), named(k_BTGK, "key", KV_HEADS)
        v_BTGK = named(v_BTGK, "value", KV_HEADS)
        y_BSHK = lay_out(self._attend(q_BSHK, k_BTGK, v_BTGK, segments), HEADS)
        return named(self.output(y_BSHK, WHOLE, RESIDUAL), "attention_out", RESIDUAL)

    def _attend(
        self, q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segments: Any
    ) -> jax.Array:
        """What each query takes from the values, by the implementation of the configuration.

        Segments are those of queries and keys, one array where they are the same, or None.
        """
        if self.implementation != "xla":
            return sl.kernels.attention(
                q_BSHK,
                k_BTGK,
                v_BTGK,
                names=HEADS,
                kv_names=KV_HEADS,
                causal=self.causal,
                segment_ids=segments,
                implementation=self.implementation,
            )
        attend = sl.remat(functools.partial(attend_whole, self.causal), part="scores")
        # `sl.kernels.attention` names its result itself, and keeps no scores.
        return named(attend(q_BSHK, k_BTGK, v_BTGK, segments), "context", HEADS)


def attend_whole(
    causal: bool, q_BSHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segments: Any
) -> jax.Array:
    """Plain attention, with all scores in memory, and the mask of segments that is as large."""
    same_B1ST = None
    if segments is not None:
        own_BS, other_BT = segments if isinstance(segments, tuple) else (segments, segments)
        same_B1ST = (own_BS[:, :, None] == other_BT[:, None, :])[:, None]
    return jax.nn.dot_product_attention(
        q_BSHK, k_BTGK, v_BTGK, mask=same_B1ST, is_causal=causal, implementation="xla"
    )


class MLP(nnx.Module):
    """GPT's two matrices around a GELU, or Llama's three around a gated unit (SwiGLU)."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.kind = config.mlp
        self.up = Projection(("embed",), ("mlp",), config, rngs=rngs)
        self.gate = Projection(("embed",), ("mlp",), config, rngs=rngs) if config.gated else None
        self.down = Projection(("mlp",), ("embed",), config, std=returning_std(config), rngs=rngs)

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        if self.gate is not None:
            both = (self.gate, HIDDEN), (self.up, HIDDEN)
            gate_BSF, up_BSF = project(x_BSD, RESIDUAL, *both)
            gate_BSF, up_BSF = named(gate_BSF, "mlp_gate", HIDDEN), named(up_BSF, "mlp_up", HIDDEN)
            h_BSF = activate(gate_BSF, self.kind, up=up_BSF)
        else:
            x_BSD = lay_out(x_BSD, RESIDUAL, WHOLE)
            # The bias is added by the activation, so that the sum is never in memory.
            bias_F = None if self.up.bias is None else self.up.bias[...]
            up_BSF = named(self.up.product(x_BSD, HIDDEN), "mlp_up", HIDDEN)
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


class Block(nnx.Module):
    """Attention, then the MLP, each beside the residual stream, with its norm before (GPT-2) or
    after (GPT-1).

    With `cross`, a decoder's: between the two it attends to what an encoder made.
    """

    def __init__(
        self, config: GPTConfig, *, causal: bool = True, cross: bool = False, rngs: nnx.Rngs
    ) -> None:
        self.norm_first = config.norm_first
        self.attention_norm = Norm(config, rngs=rngs)
        self.attention = Attention(config, causal=causal, rngs=rngs)
        self.cross_norm = Norm(config, rngs=rngs) if cross else None
        self.cross = Attention(config, causal=False, rngs=rngs) if cross else None
        self.mlp_norm = Norm(config, rngs=rngs)
        self.mlp = self._mlp(config, rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def _mlp(self, config: Any, rngs: nnx.Rngs) -> Any:
        return MLP(config, rngs=rngs)

    def __call__(
        self, x_BSD: jax.Array, key: jax.Array | None, seen: Seen
    ) -> tuple[jax.Array, Any]:
        x_BSD, read_BSD = self._attended(x_BSD, key, seen)
        return self._returned(x_BSD, self.mlp(read_BSD), key), None

    def _attended(
        self, x_BSD: jax.Array, key: jax.Array | None, seen: Seen
    ) -> tuple[jax.Array, jax.Array]:
        """The residual stream after attention, and what the MLP reads of it."""
        read_BSD = self.attention_norm(x_BSD) if self.norm_first else x_BSD
        y_BSD = self.attention(read_BSD, seen.rotation, seen.segments_BS)
        if self.cross is None or self.cross_norm is None:
            norms = self.attention_norm, self.mlp_norm
            return self._added(x_BSD, y_BSD, norms, fold_in(key, 0))
        norms = self.attention_norm, self.cross_norm
        x_BSD, read_BSD = self._added(x_BSD, y_BSD, norms, fold_in(key, 0))
        memory = seen.memory_BTD, seen.memory_segments_BT
        y_BSD = self.cross(read_BSD, None, seen.segments_BS, *memory)
        return self._added(x_BSD, y_BSD, (self.cross_norm, self.mlp_norm), fold_in(key, 3))

    def _added(
        self,
        x_BSD: jax.Array,
        y_BSD: jax.Array,
        norms: tuple[Norm, Norm],
        key: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array]:
        """The residual stream with `y_BSD` added, and what is read of it next.

        The norms are those of what was added and of what comes next; one of them is taken here, in
        one with the addition.
        """
        own, following = norms
        y_BSD = self.dropout(y_BSD, rngs=key)
        if self.norm_first:
            read_BSD, x_BSD = following.of_sum(x_BSD, y_BSD)
            return lay_out(x_BSD, RESIDUAL), read_BSD
        x_BSD = lay_out(own.of_sum(x_BSD, y_BSD)[0], RESIDUAL)
        return x_BSD, x_BSD

    def _returned(self, x_BSD: jax.Array, y_BSD: jax.Array, key: jax.Array | None) -> jax.Array:
        """The residual stream with what the MLP adds."""
        y_BSD = self.dropout(y_BSD, rngs=fold_in(key, 1))
        if self.norm_first:
            return lay_out(x_BSD + y_BSD, RESIDUAL)
        return lay_out(self.mlp_norm.of_sum(x_BSD, y_BSD)[0], RESIDUAL)


class GPT(nnx.Module):
    """The decoder: tokens to logits.

    >>> with sl.unsharded():
    ...     GPT(tiny(), rngs=nnx.Rngs(0))(jnp.zeros((2, 16), int)).shape
    (2, 16, 256)
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        init = normal(STANDARD_DEVIATION)
        self.embedding = parameter(init, config, "vocab", "embed", rngs=rngs)
        learned = config.positions == "learned"
        self.positions = (
            parameter(init, config, "position", "embed", rngs=rngs) if learned else None
        )
        self.dropout = nnx.Dropout(config.dropout)

        self.blocks = self._blocks(config, rngs)
        self.norm = Norm(config, rngs=rngs) if config.norm_first else None
        self.head = None if config.tied else parameter(init, config, "vocab", "embed", rngs=rngs)

    def _blocks(self, config: Any, rngs: nnx.Rngs) -> Any:
        return stack(lambda rngs: Block(config, rngs=rngs), config.layers, rngs)

    def __call__(
        self,
        tokens_BS: jax.Array,
        segments_BS: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """Logits for the token after each. Dropout, which draws from `key`, acts until
        `model.eval()`, as all NNX's.

        Where `segments_BS` is given, a token sees those of its own segment alone: documents packed
        into one sequence.
        """
        return self.logits(self.features(tokens_BS, segments_BS, key=key))

    def features(
        self,
        tokens_BS: jax.Array,
        segments_BS: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """What the head reads: the residual stream after the last block, whole."""
        key = key if self.config.dropout else None
        x_BSD, _ = self._run(
            tokens_BS, self.blocks, self.config.layers, key, Seen(segments_BS=segments_BS)
        )
        return self._last(x_BSD, self.norm)

    def _last(self, x_BSD: jax.Array, norm: Norm | None) -> jax.Array:
        return lay_out(x_BSD if norm is None else norm(x_BSD), RESIDUAL, WHOLE)

    def _run(
        self,
        tokens_BS: jax.Array,
        blocks: Any,
        count: int,
        key: jax.Array | None,
        seen: Seen,
        name: str = "layers",
    ) -> tuple[jax.Array, Any]:
        """The residual stream after `count` blocks, one after the other, and what each gives
        besides; `name` is their dim's.
        """
        config = self.config
        if (S := tokens_BS.shape[1]) > config.context:
            raise ValueError(
                f"A sequence of {S} tokens does not fit "
                f"`{type(config).__name__}(context={config.context})`."
            )
        x_BSD = self._embed(sl.shard(tokens_BS, "batch", "seq"))
        x_BSD = self.dropout(x_BSD, rngs=fold_in(key if config.dropout else None, count))
        if self.positions is None:
            seen = seen._replace(rotation=rotations(S, config.dims["head_dim"], config.rope_theta))
        # Blocks change nothing in themselves; said so (`graph_updates=False`), a model may be
        # closed over by `jax.jit`.
        checkpoint = functools.partial(nnx.remat, prevent_cse=False, graph_updates=False)
        block = sl.remat(
            lambda block, x_BSD, key, seen: block(named(x_BSD, "block_in"), key, seen),
            checkpoint=checkpoint,
        )
        keys = (
            None if key is None else jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))
        )
        axes = {
            "in_axes": (0, nnx.Carry, 0, None),
            "out_axes": (nnx.Carry, 0),
            "transform_metadata": {nnx.PARTITION_NAME: name},
            "unroll": config.unroll,
        }
        return nnx.scan(block, **axes, graph_updates=False)(blocks, x_BSD, keys, seen)

    def _embed(self, tokens_BS: jax.Array) -> jax.Array:
        # From a table split over `vocab` the partitioner takes the rows that are here and zeros for
        # the others, and adds up. A token that is no row of the table is nan, which is better than
        # another token's row.
        x_BSD = lay_out(self.embedding[...].at[tokens_BS].get(mode="fill"), WHOLE, RESIDUAL)
        if self.positions is not None:
            x_BSD += self.positions[: tokens_BS.shape[1]]
        return x_BSD.astype(self.config.dtype or x_BSD.dtype)

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """The head: the embedding where it is tied. Rows beyond the vocabulary get the least
        number.
        """
        kernel_VD = self.embedding[...] if self.head is None else self.head[...]
        logits_BSV = lay_out(jnp.tensordot(x_BSD, kernel_VD.astype(x_BSD.dtype), (-1, -1)), LOGITS)
        if (rows := self.config.dims["vocab"]) == self.config.vocab:
            return logits_BSV
        return jnp.where(
            jnp.arange(rows) < self.config.vocab, logits_BSV, jnp.finfo(logits_BSV.dtype).min
        )

    def losses(self, x_BSD: jax.Array, targets_BS: jax.Array) -> jax.Array:
        """The cross-entropy of each target, in float32, from what the head reads, without logits in
        memory.
        """
        kernel_VD = self.embedding[...] if self.head is None else self.head[...]
        return sl.kernels.linear_cross_entropy(
            x_BSD,
            kernel_VD,
            sl.shard(targets_BS, "batch", "seq"),
            names=WHOLE,
            vocab_name="act_vocab",
            vocab=self.config.vocab,
        )


def stack(make: Callable[[nnx.Rngs], Any], count: int, rngs: nnx.Rngs, name: str = "layers") -> Any:
    """Blocks as one block whose parameters have a leading dim of this name: compiled once, whatever
    the depth.
    """

    @nnx.split_rngs(splits=count)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: name})
    def blocks(rngs: nnx.Rngs) -> Any:
        return make(rngs)

    return blocks(rngs)


def rotations(S: int, K: int, theta: float) -> Rotation:
    """Cosine and sine of each position's angle for each pair of a head's dims, as
    `[S, 1, K / 2]`.
    """
    frequency = theta ** (-jnp.arange(0, K, 2, dtype=jnp.float32) / K)
    angle = jnp.arange(S, dtype=jnp.float32)[:, None, None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def loss(model: GPT, batch: dict[str, jax.Array], rng: jax.Array | None = None) -> sl.WeightedMean:
    """Mean cross-entropy of each token given those before it, over the tokens that the mask keeps,
    in float32.

    `batch["tokens"]` is `[B, S + 1]`, and so is `batch["segments"]`, the number of each token's
    document. `batch["mask"]` is `[B, S]` and speaks of the targets. Either may be absent.
    """
    tokens, mask_BS = batch["tokens"], batch.get("mask")
    segments_BS = (
        sl.shard(batch["segments"][:, :-1], "batch", "seq") if "segments" in batch else None
    )
    return entropy(
        model, model.features(tokens[:, :-1], segments_BS, key=rng), tokens[:, 1:], mask_BS
    )


def entropy(
    model: GPT, x_BSD: jax.Array, targets_BS: jax.Array, mask_BS: jax.Array | None = None
) -> sl.WeightedMean:
    """The mean cross-entropy from what the head reads, over the targets that the mask keeps, as the
    configuration says.
    """
    if model.config.fused_loss:
        return _mean(model.losses(x_BSD, targets_BS), mask_BS)
    return cross_entropy(model.logits(x_BSD), targets_BS, mask_BS)


def cross_entropy(
    logits_BSV: jax.Array, targets_BS: jax.Array, mask_BS: jax.Array | None = None
) -> sl.WeightedMean:
    """The mean over the targets that the mask keeps, in float32."""
    logits_BSV, targets_BS = logits_BSV.astype(jnp.float32), sl.shard(targets_BS, "batch", "seq")
    # Everything is a reduction over the vocabulary, so that devices that hold parts of it exchange
    # one number per token at a time. Indexing with the targets would gather the logits.
    logits_BSV -= jax.lax.stop_gradient(logits_BSV.max(-1, keepdims=True))
    is_target = jnp.arange(logits_BSV.shape[-1]) == targets_BS[..., None]
    losses_BS = jnp.log(jnp.exp(logits_BSV).sum(-1)) - jnp.where(is_target, logits_BSV, 0).sum(-1)
    return _mean(losses_BS, mask_BS)


def _mean(losses_BS: jax.Array, mask_BS: jax.Array | None) -> sl.WeightedMean:
    weights_BS = jnp.ones_like(losses_BS) if mask_BS is None else mask_BS.astype(jnp.float32)
    return sl.weighted_mean((losses_BS * weights_BS).sum(), weights_BS.sum())


def decays(params: Any) -> Any:
    """Which parameters weight decay acts on, for optax's `mask`: kernels and embeddings, not norms
    and biases.
    """

    def is_matrix(path: Any, _: Any) -> bool:
        return not {"bias", "scale"} & {
            str(getattr(key, "key", getattr(key, "name", ""))) for key in path
        }

    return jax.tree_util.tree_map_with_path(is_matrix, params)


@functools.partial(nnx.jit, static_argnames="length")
def generate(
    model: GPT, prompt: jax.Array, length: int, key: jax.Array, temperature: float | jax.Array = 1.0
) -> jax.Array:
    """Continue every row of `prompt` by `length` tokens; temperature 0 takes the likeliest each
    time.

    For a first look at a trained model: without a cache of keys and values, each token costs a pass
    over all of them.
    """
    model = nnx.view(model, deterministic=True)
    B, start = prompt.shape
    greedy = temperature == 0
    tokens = jnp.concatenate([prompt, jnp.zeros((B, length), prompt.dtype)], axis=1)

    def extend(at: jax.Array, tokens: jax.Array) -> jax.Array:
        # Tokens after `at` are still zeros; attention is causal, so they change nothing before
        # them.
        last_B1D = jax.lax.dynamic_slice_in_dim(model.features(tokens), at - 1, 1, axis=1)
        logits_BV = model.logits(last_B1D)[:, 0].astype(jnp.float32)
        drawn = jax.random.categorical(
            jax.random.fold_in(key, at), logits_BV / jnp.where(greedy, 1, temperature)
        )
        chosen = jnp.where(greedy, logits_BV.argmax(-1), drawn).astype(tokens.dtype)
        return jax.lax.dynamic_update_slice_in_dim(tokens, chosen[:, None], at, axis=1)

    return jax.lax.fori_loop(start, start + length, extend, tokens)


def returning_std(config: GPTConfig) -> float:
    """GPT-2's: 2 * layers products are added up in the residual stream, which should not grow with
    the depth.
    """
    return STANDARD_DEVIATION / math.sqrt(2 * config.layers)


def fold_in(key: jax.Array | None, number: int) -> jax.Array | None:
    """A key of its own for each number, where there is a key."""
    return None if key is None else jax.random.fold_in(key, number)
