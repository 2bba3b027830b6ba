"""One decoder that is Switch or Mixtral by configuration: `models/gpt.py` with experts in place of
MLPs.

Every `every`-th block has experts, the last of each stretch of so many. Under `sl.rules.experts`
they lie over the axis of the data, and the layer sends tokens to them and back; united with
`sl.rules.tensor` each expert is split as an MLP is.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl
from models import gpt

TWO = sl.experts.TopK(2)


@dataclass(frozen=True)
class MoEConfig(gpt.GPTConfig):
    """What the model is: `GPTConfig`, whose `hidden` and `mlp` are those of an expert too, and

    - `experts`: how many there are in each block that has them.
    - `router`: which of them a token goes to.
    - `every`: each so many-th block has experts.
    - `group`: so many consecutive tokens share the places of the experts; by default a sequence.
    - `form`: how tokens are brought to their places, see `sl.experts.moe`.
    - `balance`, `z`: by what the router's losses of uneven load and of large logits are multiplied.
    """

    experts: int = 8
    router: sl.experts.Router = TWO
    every: int = 1
    group: int | None = None
    form: sl.experts.Form = "scatter"
    balance: float = 0.01
    z: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers % self.every:
            raise ValueError(
                f"`MoEConfig(every={self.every})` does not divide `layers={self.layers}`."
            )
        if self.router.choices > self.experts:
            raise ValueError(
                f"`MoEConfig(router={self.router})` sends each token to {self.router.choices} "
                f"experts, and there are `experts={self.experts}`."
            )

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dim of the parameters, by its name."""
        return {**super().dims, "experts": self.experts, "routes": self.experts}

    @property
    def training_flops_per_token(self) -> float:
        """What forward and backward take for one token, whose experts are as many as the router
        chooses.
        """
        matrices = 3 if self.gated else 2
        expert = 2 * matrices * self.width * self.dims["mlp"]
        more = (self.router.choices - 1) * expert + 2 * self.width * self.experts
        return super().training_flops_per_token + 3 * more * (self.layers // self.every)


def tiny(**changes: Any) -> MoEConfig:
    """Eight experts for tests and first steps."""
    return replace(
        MoEConfig(layers=2, width=64, heads=4, context=64, vocab=256, every=2), **changes
    )


def mixtral_8x7b(**changes: Any) -> MoEConfig:
    """Mixtral 8x7B: 46.7 billion parameters, of which a token meets 12.9."""
    config = MoEConfig(
        layers=32, width=4096, heads=32, kv_heads=8, hidden=14_336, context=4096, vocab=32_000,
        rope_theta=1_000_000.0,
        norm="rms", positions="rotary", mlp="swiglu", bias=False, tied=False,
        experts=8, router=sl.experts.TopK(2), balance=0.02,
    )  # fmt: skip
    return replace(config, **changes)


def switch_base(**changes: Any) -> MoEConfig:
    """A decoder with the sizes and the routing of Switch-Base: 128 experts in every other block."""
    config = MoEConfig(
        layers=12, width=768, heads=12, head_dim=64, hidden=3072, context=512, vocab=32_128,
        norm="rms", mlp="relu", bias=False,
        every=2, experts=128, router=sl.experts.Switch(), balance=0.01, z=0.001,
    )  # fmt: skip
    return replace(config, **changes)


class Experts(nnx.Module):
    """MLPs without biases, each token's by a router's choice. Gives the layer's output, and what it
    tells of itself.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        self.config, self.deterministic = config, False
        init, returning = gpt.normal(gpt.STANDARD_DEVIATION), gpt.normal(gpt.returning_std(config))
        self.router = gpt.parameter(init, config, "embed", "routes", rngs=rngs)
        self.up = gpt.parameter(init, config, "experts", "embed", "mlp", rngs=rngs)
        self.gate = (
            gpt.parameter(init, config, "experts", "embed", "mlp", rngs=rngs)
            if config.gated
            else None
        )
        self.down = gpt.parameter(returning, config, "experts", "mlp", "embed", rngs=rngs)

    def __call__(
        self, x_BSD: jax.Array, key: jax.Array | None, real_BS: jax.Array | None
    ) -> tuple[jax.Array, sl.experts.MoEStats]:
        config, weights = self.config, {"up": self.up[...], "down": self.down[...]}
        if self.gate is not None:
            weights["gate"] = self.gate[...]

        def experts(weights: dict[str, jax.Array], x_END: jax.Array) -> jax.Array:
            times = lambda x, name: jnp.einsum("enk,ekl->enl", x, weights[name].astype(x.dtype))  # noqa: E731
            # Kept, tokens are not sent to their experts once more.
            x_END = gpt.named(x_END, "expert_in")
            h_ENF = gpt.named(times(x_END, "up"), "expert_up")
            if "gate" in weights:
                gate_ENF = gpt.named(times(x_END, "gate"), "expert_gate")
                h_ENF = gpt.activate(gate_ENF, config.mlp, up=h_ENF)
            else:
                h_ENF = gpt.activate(h_ENF, config.mlp)
            return gpt.named(times(gpt.named(h_ENF, "expert_hidden"), "down"), "expert_out")

        y_BSD, stats = sl.experts.moe(
            gpt.lay_out(x_BSD, gpt.RESIDUAL, gpt.WHOLE),
            config.router,
            experts,
            gate=self.router[...],
            weights=weights,
            key=None if self.deterministic else key,
            group=config.group,
            form=config.form,
            real=real_BS,
            names=gpt.WHOLE,
        )
        return gpt.lay_out(y_BSD, gpt.WHOLE, gpt.RESIDUAL), stats


class ExpertBlock(gpt.Block):
    """A block with experts in place of the MLP."""

    def _mlp(self, config: Any, rngs: nnx.Rngs) -> Any:
        return Experts(config, rngs=rngs)

    def __call__(
        self, x_BSD: jax.Array, key: jax.Array | None, seen: gpt.Seen
    ) -> tuple[jax.Array, sl.experts.MoEStats]:
        x_BSD, read_BSD = self._attended(x_BSD, key, seen)
        y_BSD, stats = self.mlp(read_BSD, gpt.fold_in(key, 2), seen.real_BS)
        return self._returned(x_BSD, y_BSD, key), stats


class Stretch(nnx.Module):
    """Plain blocks, and one with experts after them."""

    def __init__(
        self, config: MoEConfig, *, causal: bool = True, cross: bool = False, rngs: nnx.Rngs
    ) -> None:
        kind = {"causal": causal, "cross": cross, "rngs": rngs}
        self.plain = nnx.List([gpt.Block(config, **kind) for _ in range(config.every - 1)])
        self.expert = ExpertBlock(config, **kind)

    def __call__(
        self, x_BSD: jax.Array, key: jax.Array | None, seen: gpt.Seen
    ) -> tuple[jax.Array, sl.experts.MoEStats]:
        for number, block in enumerate(self.plain):
            x_BSD, _ = block(x_BSD, gpt.fold_in(key, number), seen)
        return self.expert(x_BSD, gpt.fold_in(key, len(self.plain)), seen)


class MoE(gpt.GPT):
    """The decoder: tokens to logits.

    >>> with sl.unsharded():
    ...     MoE(tiny(), rngs=nnx.Rngs(0))(jnp.zeros((2, 16), int)).shape
    (2, 16, 256)
    """

    config: MoEConfig

    def _blocks(self, config: Any, rngs: nnx.Rngs) -> Any:
        return gpt.stack(
            lambda rngs: Stretch(config, rngs=rngs), config.layers // config.every, rngs
        )

    def features(
        self,
        tokens_BS: jax.Array,
        segments_BS: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> jax.Array:
        """What the head reads: the residual stream after the last block, whole."""
        return self.routed(tokens_BS, segments_BS, key=key)[0]

    def routed(
        self,
        tokens_BS: jax.Array,
        segments_BS: jax.Array | None = None,
        *,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, sl.experts.MoEStats]:
        """The features, and what the layers of experts tell: the mean over them."""
        count = self.config.layers // self.config.every
        x_BSD, stats = self._run(
            tokens_BS, self.blocks, count, key, gpt.Seen(segments_BS=segments_BS)
        )
        return self._last(x_BSD, self.norm), jax.tree.map(lambda x: x.mean(0), stats)


def stacked(path: str, parameter: Any) -> int:
    """How many leading dims of a parameter count layers and experts, for
    `sl.optimizers.per_layer_and_expert`.
    """
    if not path.startswith(("blocks/", "encoder/")):
        return 0
    return 2 if path.endswith(("/mlp/up", "/mlp/gate", "/mlp/down")) else 1


def loss(
    model: MoE, batch: dict[str, jax.Array], rng: jax.Array | None = None
) -> tuple[sl.WeightedMean, dict[str, sl.WeightedMean]]:
    """GPT's cross-entropy, with the losses of the routers, and metrics of these; by itself it is
    `cross_entropy`.
    """
    tokens, config = batch["tokens"], model.config
    segments_BS = (
        sl.shard(batch["segments"][:, :-1], "batch", "seq") if "segments" in batch else None
    )
    x_BSD, stats = model.routed(tokens[:, :-1], segments_BS, key=rng)
    entropy = gpt.entropy(model, x_BSD, tokens[:, 1:], batch.get("mask"))
    return entropy + config.balance * stats.balance + config.z * stats.z, {
        "cross_entropy": entropy,
        **stats.metrics,
    }
