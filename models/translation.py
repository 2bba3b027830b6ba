"""GShard's translation model: an encoder and a decoder with experts in every other layer, in the
blocks of `models/moe.py`.

The encoder reads a whole source, the decoder writes the target and attends to what the encoder
made.

    B batch    T source    S target    D width
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl
from models import gpt, layers, moe

GSHARD = sl.experts.Top2()
ENCODER = "encoder_layers"  # the dim of its stack: a pipeline tells it from the decoder's


@dataclass(frozen=True)
class TranslationConfig(moe.MoEConfig):
    """What the model is: `MoEConfig`, of whose `layers` the encoder has half and the decoder half.

    `context` is the length of the longest source and of the longest target; both have one
    vocabulary and one embedding.
    """

    every: int = 2
    router: sl.experts.Router = GSHARD

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("dense_layers", "latent", "window", "post_norms"):
            if getattr(self, field):
                raise ValueError(
                    f"`TranslationConfig({field}={getattr(self, field)!r})`: an encoder and a "
                    "decoder have plain attention and blocks, and experts from the first stretch "
                    f"on; leave `{field}` out."
                )
        if self.layers % (2 * self.every):
            raise ValueError(
                f"`TranslationConfig(layers={self.layers})` has half of them in the encoder and "
                f"half in the decoder, and experts in each `every={self.every}`th: a multiple of "
                f"{2 * self.every}."
            )

    @property
    def stretches(self) -> int:
        """How many layers with experts the encoder has, and how many the decoder."""
        return self.layers // (2 * self.every)

    @property
    def _forward_flops(self) -> dict[str, int]:
        """What the forward pass takes for a source and a target as long as the context. Half of the
        layers attend to the source too.
        """
        found = super()._forward_flops
        found["cross_attention"] = found["attention"] // 2
        return found


def tiny(**changes: Any) -> TranslationConfig:
    """A small one for tests and first steps."""
    return replace(
        TranslationConfig(
            layers=4, width=64, heads=4, context=32, vocab=128, experts=8, bias=False, mlp="relu"
        ),
        **changes,
    )


def gshard(layers: int = 36, experts: int = 2048, **changes: Any) -> TranslationConfig:
    """GShard's sizes (its Table 1): 12 or 36 layers, with 128, 512 or 2,048 experts in every other;
    60 make a trillion.

    A group is what a core holds: two sentences of 1,024 tokens.
    """
    config = TranslationConfig(
        layers=layers, width=1024, heads=16, head_dim=128, hidden=8192, context=1024, vocab=64_000,
        mlp="relu", bias=False,
        experts=experts, group=2048,
    )  # fmt: skip
    return replace(config, **changes)


class Translation(moe.MoE):
    """The model: source and target to logits of the target.

    >>> with sl.unsharded():
    ...     model = Translation(tiny(), rngs=nnx.Rngs(0))
    ...     model.translated(jnp.zeros((2, 32), int), jnp.zeros((2, 16), int))[0].shape
    (2, 16, 128)
    """

    def __init__(self, config: TranslationConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)  # the decoder
        self.stretches = config.stretches
        encoder = lambda rngs: moe.Stretch(config, causal=False, rngs=rngs)  # noqa: E731
        self.encoder = gpt.stack(encoder, config.stretches, rngs, ENCODER)
        self.encoder_norm = layers.Norm(config, rngs=rngs) if config.norm_first else None

    def _blocks(self, config: Any, rngs: nnx.Rngs) -> Any:
        return gpt.stack(
            lambda rngs: moe.Stretch(config, cross=True, rngs=rngs), config.stretches, rngs
        )

    def routed(self, *tokens: Any, **options: Any) -> Any:
        """Refused: the decoder attends to what the encoder has read."""
        raise ValueError(
            "`Translation` reads a source and a target: take `model.translated(source, target)`, "
            "or `decoded` for what the head reads."
        )

    def encoded(
        self,
        source_BT: jax.Array,
        real_BT: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, sl.experts.MoEStats]:
        """What the decoder attends to, in the order of `sl.context.arrange`; `real_BT` is false for
        padding.
        """
        seen = gpt.Seen(segments_BS=_segments(real_BT), real_BS=real_BT)
        x_BTD, stats = self._run(source_BT, self.encoder, self.stretches, key, seen, ENCODER)
        return self._last(x_BTD, self.encoder_norm), stats

    def decoded(
        self,
        source_BT: jax.Array,
        target_BS: jax.Array,
        real_BT: jax.Array | None = None,
        real_BS: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, sl.experts.MoEStats]:
        """What the head reads for the token after each of the target, in the order of
        `sl.context.arrange`, and what the layers of experts tell: the mean over all.
        """
        memory_BTD, of_encoder = self.encoded(source_BT, real_BT, key=layers.fold_in(key, 0))
        segments_BS = None if real_BT is None else jnp.ones(target_BS.shape, int)
        seen = gpt.Seen(
            segments_BS=segments_BS,
            memory_BTD=memory_BTD,
            memory_segments_BT=_segments(real_BT),
            real_BS=real_BS,
        )
        x_BSD, of_decoder = self._run(
            target_BS, self.blocks, self.stretches, layers.fold_in(key, 1), seen
        )
        stats = jax.tree.map(lambda a, b: (a.mean(0) + b.mean(0)) / 2, of_encoder, of_decoder)
        return self._last(x_BSD, self.norm), stats

    def translated(
        self, *tokens: Any, key: jax.Array | None = None
    ) -> tuple[jax.Array, sl.experts.MoEStats]:
        """Logits for the token after each of the target, of what `decoded` takes, and what the
        layers of experts tell.
        """
        x_BSD, stats = self.decoded(*tokens, key=key)
        return sl.context.restore(self.logits(x_BSD)), stats


def _segments(real: jax.Array | None) -> jax.Array | None:
    return None if real is None else real.astype(int)


def loss(
    model: Translation, batch: dict[str, jax.Array], rng: jax.Array | None = None
) -> tuple[sl.WeightedMean, dict[str, sl.WeightedMean]]:
    """Mean cross-entropy of the target, each token given the source and those before it, with the
    losses of the routers.

    `batch["source"]` is `[B, T]`, `batch["target"]` is `[B, S + 1]`. Where `batch["pad"]`, a number
    for each example, is given, it is the token that pads both.
    """
    source_BT, target = (sl.shard(batch[name], "batch", None) for name in ("source", "target"))
    config, real_BT, mask_BS, real_BS = model.config, None, None, None
    if "pad" in batch:
        pad_B1 = batch["pad"][:, None]
        real_BT = source_BT != pad_B1
        real_BS = target[:, :-1] != pad_B1
        mask_BS = target[:, 1:] != pad_B1
    x_BSD, stats = model.decoded(source_BT, target[:, :-1], real_BT, real_BS, key=rng)
    entropy = gpt.entropy(model, x_BSD, target[:, 1:], mask_BS)
    return entropy + config.balance * stats.balance + config.z * stats.z, {
        "cross_entropy": entropy,
        **stats.metrics,
    }


def translate(
    model: Translation, source_BT: jax.Array, first: int, length: int, pad: int | None = None
) -> jax.Array:
    """The likeliest target, token by token, `length` of them after `first`.

    Each sentence is translated by itself: its tokens share the experts' places with no others, and
    those that are not written yet take none. So any number of sentences may come together, whatever
    `group` the model has learned with.
    """
    model = nnx.view(model, deterministic=True, decoding=True)
    target = jnp.full((source_BT.shape[0], length + 1), first, source_BT.dtype)
    real_BT = None if pad is None else source_BT != pad

    def extend(at: jax.Array, target: jax.Array) -> jax.Array:
        written_BS = jnp.broadcast_to(jnp.arange(length) <= at, (target.shape[0], length))
        logits, _ = model.translated(source_BT, target[:, :-1], real_BT, written_BS)
        return target.at[:, at + 1].set(logits[:, at].argmax(-1).astype(target.dtype))

    return jax.lax.fori_loop(0, length, extend, target)[:, 1:]
