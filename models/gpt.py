"""One decoder that is GPT-1, GPT-2, Llama, Qwen and Gemma by configuration: Flax NNX, every dim
named, no device mentioned.

Its layers, the suffixes of shapes and the names of dims are those of `models/layers.py`.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl
from models.blocks import Block as Block
from models.blocks import Period as Period
from models.blocks import Seen as Seen
from models.blocks import Stack as Stack
from models.blocks import keys_of as keys_of
from models.blocks import stack as stack
from models.gpt_config import GPTConfig as GPTConfig
from models.gpt_config import LatentAttention as LatentAttention
from models.gpt_config import LinearScaling as LinearScaling
from models.gpt_config import RopeScaling as RopeScaling
from models.gpt_config import YarnScaling as YarnScaling
from models.gpt_presets import gemma2_2b as gemma2_2b
from models.gpt_presets import gemma2_9b as gemma2_9b
from models.gpt_presets import gemma3_1b as gemma3_1b
from models.gpt_presets import gpt1 as gpt1
from models.gpt_presets import gpt2 as gpt2
from models.gpt_presets import gpt2_xl as gpt2_xl
from models.gpt_presets import llama2_7b as llama2_7b
from models.gpt_presets import llama3_8b as llama3_8b
from models.gpt_presets import llama31_8b as llama31_8b
from models.gpt_presets import mistral_7b as mistral_7b
from models.gpt_presets import tiny as tiny
from models.layers import (
    LOGITS,
    RESIDUAL,
    STANDARD_DEVIATION,
    WHOLE,
    Dropout,
    Norm,
    fold_in,
    lay_out,
    named,
    normal,
    parameter,
    softly_capped,
)
from models.rotary import rotations as rotations

LAST = "last_layers"  # the dim of the stack of layers that are left after whole periods


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
        self.dropout = Dropout(config.dropout)

        self.blocks = self._blocks(config, rngs)
        local = lambda rngs: Block(config, local=True, rngs=rngs)  # noqa: E731
        rest = config.layers % config.period
        self.last_blocks = stack(local, rest, rngs, LAST) if rest else None
        self.norm = Norm(config, rngs=rngs) if config.norm_first else None
        self.head = None if config.tied else parameter(init, config, "vocab", "embed", rngs=rngs)

    def _blocks(self, config: Any, rngs: nnx.Rngs) -> Any:
        kind = Period if config.full_every else Block
        count = config.layers // config.period
        return stack(lambda rngs: kind(config, rngs=rngs), count, rngs)

    @property
    def stacks(self) -> list[Stack]:
        """All blocks in their order."""
        config = self.config
        stacks = [Stack(self.blocks, config.layers // config.period)]
        if self.last_blocks is not None:
            stacks.append(Stack(self.last_blocks, config.layers % config.period))
        return stacks

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
        x_BSD = self.features(tokens_BS, segments_BS, key=key)
        return sl.context.restore(self.logits(x_BSD))

    def features(
        self,
        tokens_BS: jax.Array,
        segments_BS: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """What the head reads: the residual stream after the last block, whole, in the order of
        `sl.context.arrange`.
        """
        key = key if self.config.dropout else None
        x_BSD, _ = self._run(
            tokens_BS,
            self.blocks,
            self.config.layers // self.config.period,
            key,
            Seen(segments_BS=segments_BS),
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
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """The residual stream after `count` blocks, one after the other, and what each gives
        besides; `name` is their dim's. Tokens are at `positions`, as `_embed` takes them. All come
        in the order of the sequence, and the stream is in that of `sl.context.arrange`.
        """
        own_key = fold_in(key if self.config.dropout else None, count)
        x_BSD, seen = self._entered(tokens_BS, own_key, seen, positions)
        x_BSD = self._before(x_BSD, key, seen)
        keys = None if key is None else keys_of(key, count)
        x_BSD, given = self._through(blocks, x_BSD, keys, seen, name)
        return self._after(x_BSD, key, seen), given

    def _entered(
        self,
        tokens_BS: jax.Array,
        key: jax.Array | None,
        seen: Seen,
        positions: jax.Array | None = None,
    ) -> tuple[jax.Array, Seen]:
        """The residual stream before the first block, and what blocks see beside it."""
        config = self.config
        check_rows(type(self).__name__, tokens_BS)
        if (S := tokens_BS.shape[1]) > config.context:
            raise ValueError(
                f"A sequence of {S} tokens does not fit "
                f"`{type(config).__name__}(context={config.context})`."
            )
        if sl.context.is_arranged(S) and positions is None:
            positions = jnp.arange(S)
        if positions is not None:
            positions = sl.context.arrange(positions, positions.ndim - 1)
        tokens_BS, seen = sl.context.arrange(tokens_BS), seen.arranged()
        x_BSD = self._embed(sl.shard(tokens_BS, "batch", "seq"), positions)
        x_BSD = self.dropout(x_BSD, rngs=key)
        if self.positions is None:
            at = jnp.arange(S, dtype=jnp.float32) if positions is None else positions
            seen = turned(seen, config, at)
        return x_BSD, seen

    def _before(self, x_BSD: jax.Array, key: jax.Array | None, seen: Seen) -> jax.Array:
        """The residual stream that the stack of blocks is given."""
        return x_BSD

    def _after(self, x_BSD: jax.Array, key: jax.Array | None, seen: Seen) -> jax.Array:
        """The residual stream after the layers that are left after whole periods."""
        if self.last_blocks is None:
            return x_BSD
        # A number that no other block has, so that none draws what another does.
        key = fold_in(key, self.config.layers + 1)
        count = self.config.layers % self.config.period
        keys = None if key is None else keys_of(key, count)
        return self._through(self.last_blocks, x_BSD, keys, seen, LAST)[0]

    def _through(
        self, blocks: Any, x_BSD: jax.Array, keys: jax.Array | None, seen: Seen, name: str
    ) -> tuple[jax.Array, Any]:
        """The residual stream after a stack of blocks, each with a key of its own if there are
        some, and what each gives besides; `name` is that of the stack's dim.
        """
        # Blocks change nothing in themselves; said so (`graph_updates=False`), a model may be
        # closed over by `jax.jit`.
        checkpoint = functools.partial(nnx.remat, prevent_cse=False, graph_updates=False)
        block = sl.remat(
            lambda block, x_BSD, key, seen: block(named(x_BSD, "block_in"), key, seen),
            checkpoint=checkpoint,
        )
        axes = {
            "in_axes": (0, nnx.Carry, 0, None),
            "out_axes": (nnx.Carry, 0),
            "transform_metadata": {nnx.PARTITION_NAME: name},
            "unroll": self.config.unroll,
        }
        return nnx.scan(block, **axes, graph_updates=False)(blocks, x_BSD, keys, seen)

    def _embed(self, tokens_BS: jax.Array, positions: jax.Array | None = None) -> jax.Array:
        """The residual stream before the first block. Tokens are at `positions`, `[S]` or `[B, S]`;
        where these are left out, at the first.
        """
        # From a table split over `vocab` the partitioner takes the rows that are here and zeros for
        # the others, and adds up. A token that is no row of the table is nan, which is better than
        # another token's row.
        x_BSD = self.embedding[...].at[tokens_BS].get(mode="fill", wrap_negative_indices=False)
        x_BSD = lay_out(x_BSD, WHOLE, RESIDUAL)
        if self.positions is not None and positions is None:
            x_BSD += self.positions[: tokens_BS.shape[1]]
        elif self.positions is not None:
            x_BSD += self.positions[...].at[positions].get(mode="fill")
        x_BSD = x_BSD.astype(self.config.dtype or x_BSD.dtype)
        if self.config.scaled_embedding:
            x_BSD *= jnp.asarray(math.sqrt(self.config.width), x_BSD.dtype)
        return x_BSD

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """The head: the embedding where it is tied. Rows beyond the vocabulary get the least
        number.
        """
        kernel_VD = self.embedding[...] if self.head is None else self.head[...]
        logits_BSV = lay_out(jnp.tensordot(x_BSD, kernel_VD.astype(x_BSD.dtype), (-1, -1)), LOGITS)
        if (cap := self.config.logit_cap) is not None:
            capped_BSV = softly_capped(logits_BSV.astype(jnp.float32), cap)
            logits_BSV = capped_BSV.astype(logits_BSV.dtype)
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
        fused = self.config.fused_loss
        targets_BS = sl.shard(targets_BS, "batch", "seq")
        losses_BS = sl.kernels.linear_cross_entropy(
            x_BSD,
            kernel_VD,
            targets_BS,
            names=WHOLE,
            vocab_name="act_vocab",
            implementation=fused if isinstance(fused, str) else None,
            vocab=self.config.vocab,
            cap=self.config.logit_cap,
        )
        return _of_known(targets_BS, self.config.vocab, losses_BS)


def check_rows(what: str, tokens_BS: jax.Array) -> None:
    """Refuse what are no rows of tokens, for the function or the model of this name."""
    if tokens_BS.ndim != 2 or not jnp.issubdtype(tokens_BS.dtype, jnp.integer):
        raise ValueError(
            f"`{what}` takes rows of tokens, whole numbers of shape `[rows, tokens]`; got "
            f"{tokens_BS.dtype}{list(tokens_BS.shape)}. A row alone is `tokens[None]`."
        )


def turned(seen: Seen, config: GPTConfig, positions: jax.Array) -> Seen:
    """What blocks see of tokens at these positions, with their rotations."""
    rotation = rotations(positions, config.rotary_dim, config.rope_theta, config.rope_scaling)
    seen = seen._replace(rotation=rotation)
    if config.local_rope_theta is None:
        return seen
    local = rotations(positions, config.rotary_dim, config.local_rope_theta)
    return seen._replace(local_rotation=local)


def loss(model: GPT, batch: dict[str, jax.Array], rng: jax.Array | None = None) -> sl.WeightedMean:
    """Mean cross-entropy of each token given those before it, over the tokens that the mask keeps,
    in float32.

    `batch["tokens"]` is `[B, S + 1]`, and so is `batch["segments"]`, the number of each token's
    document. `batch["mask"]` is `[B, S]` and speaks of the targets. Either may be absent.
    """
    tokens_BS, targets_BS, segments_BS = shifted(batch)
    x_BSD = model.features(tokens_BS, segments_BS, key=rng)
    return entropy(model, x_BSD, targets_BS, batch.get("mask"))


def shifted(batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Tokens, the targets one further, and the tokens' segments, if the batch has some.

    Each row is whole on its devices: of a sequence that is split already, devices would exchange
    tokens to leave out the first or the last, and stages of a pipeline cannot.
    """
    tokens, segments = batch["tokens"], batch.get("segments")
    check_rows('loss(batch["tokens"])', tokens)
    parts = [tokens[:, :-1], tokens[:, 1:]]
    if segments is not None:
        parts.append(segments[:, :-1])
    tokens_BS, targets_BS, *rest = (sl.shard(part, "batch", None) for part in parts)
    return tokens_BS, targets_BS, rest[0] if rest else None


def entropy(
    model: GPT, x_BSD: jax.Array, targets_BS: jax.Array, mask_BS: jax.Array | None = None
) -> sl.WeightedMean:
    """The mean cross-entropy from what the head reads, over the targets that the mask keeps, as the
    configuration says. Targets and mask come in the order of the sequence.
    """
    _check_mask(mask_BS, targets_BS)
    targets_BS = sl.context.arrange(targets_BS)
    mask_BS = None if mask_BS is None else sl.context.arrange(mask_BS)
    if model.config.fused_loss:
        return _mean(model.losses(x_BSD, targets_BS), mask_BS)
    return cross_entropy(model.logits(x_BSD), targets_BS, mask_BS, model.config.vocab)


def cross_entropy(
    logits_BSV: jax.Array,
    targets_BS: jax.Array,
    mask_BS: jax.Array | None = None,
    vocab: int | None = None,
) -> sl.WeightedMean:
    """The mean over the targets that the mask keeps, in float32.

    Losses of targets that are no tokens are nan: there are `vocab` of these, by default as many as
    each has logits.
    """
    _check_mask(mask_BS, targets_BS)
    logits_BSV, targets_BS = logits_BSV.astype(jnp.float32), sl.shard(targets_BS, "batch", "seq")
    # Everything is a reduction over the vocabulary, so that devices that hold parts of it exchange
    # one number per token at a time. Indexing with the targets would gather the logits.
    logits_BSV -= jax.lax.stop_gradient(logits_BSV.max(-1, keepdims=True))
    is_target = jnp.arange(logits_BSV.shape[-1]) == targets_BS[..., None]
    losses_BS = jnp.log(jnp.exp(logits_BSV).sum(-1)) - jnp.where(is_target, logits_BSV, 0).sum(-1)
    losses_BS = _of_known(targets_BS, vocab or logits_BSV.shape[-1], losses_BS)
    return _mean(losses_BS, mask_BS)


def _check_mask(mask_BS: jax.Array | None, targets_BS: jax.Array) -> None:
    """Refuse a mask of another shape: broadcast, it would count every loss several times."""
    if mask_BS is not None and mask_BS.shape != targets_BS.shape:
        raise ValueError(
            f'`cross_entropy(mask_BS)`, a loss\'s `batch["mask"]`, is {mask_BS.dtype}'
            f"{list(mask_BS.shape)}, and targets are {list(targets_BS.shape)}: give a number for "
            "each target, the tokens from the second on. A mask as long as `tokens` is "
            "`mask[:, 1:]`."
        )


def _of_known(targets_BS: jax.Array, vocab: int, losses_BS: jax.Array) -> jax.Array:
    """Losses, of which those of targets that are no tokens are nan: leave these out by a mask."""
    is_known = (targets_BS >= 0) & (targets_BS < vocab)
    return jnp.where(is_known, losses_BS, jnp.nan)


def _mean(losses_BS: jax.Array, mask_BS: jax.Array | None) -> sl.WeightedMean:
    if mask_BS is None:
        return sl.weighted_mean(losses_BS.sum(), jnp.ones_like(losses_BS).sum())
    weights_BS = mask_BS.astype(jnp.float32)
    # What is left out counts as nothing, whatever it is.
    counted_BS = jnp.where(weights_BS == 0, 0, losses_BS * weights_BS)
    return sl.weighted_mean(counted_BS.sum(), weights_BS.sum())


def decays(params: Any) -> Any:
    """Which parameters weight decay acts on, for optax's `mask`: kernels and embeddings, not norms
    and biases.
    """

    def is_matrix(path: Any, _: Any) -> bool:
        return not {"bias", "scale"} & {
            str(getattr(key, "key", getattr(key, "name", ""))) for key in path
        }

    return jax.tree_util.tree_map_with_path(is_matrix, params)
