"""One decoder that is Switch, Mixtral, Qwen3 or DeepSeek-V3 by configuration: `models/gpt.py` with
experts in place of MLPs.

Every `every`-th block has experts, the last of each stretch of so many. The first blocks may have
none, `dense_layers`, and blocks with experts may have one that every token goes to,
`shared_experts`. Under `sl.rules.experts`
they lie over the axis of the data, and the layer sends tokens to them and back; united with
`sl.rules.tensor` each expert is split as an MLP is.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

import shardlib as sl
from models import gpt, gpt_config, layers

TWO = sl.experts.TopK(2)
DENSE = "dense_layers"  # the dim of the stack of blocks that come before those with experts
DEEPSEEK_ROUTER = sl.experts.SigmoidTopK(8, scale=2.5, groups=8, groups_taken=4)


@dataclass(frozen=True)
class MoEConfig(gpt.GPTConfig):
    """What the model is: `GPTConfig`, whose `mlp` is that of an expert too, and

    - `experts`: how many there are in each block that has them.
    - `router`: which of them a token goes to, `TopK(2)` by default.
    - `padded_to`: how many experts have weights, for an axis that does not divide `experts`. Nobody
      chooses those at the end.
    - `expert_hidden`: the inner width of an expert; by default `hidden`, that of other MLPs.
    - `shared_experts`: how many experts every token meets besides, as one MLP of their width.
    - `dense_layers`: how many blocks without experts come first, in a loop of their own.
    - `balance_bias`: the router has a bias for each expert, which evens the load: train it with
      `sl.experts.balanced(optimizer)`.
    - `every`: one block of so many has experts, the last of them; by default all have.
    - `group`: how many consecutive tokens share the places of the experts; by default a sequence,
      and always the new tokens of one while a model generates or translates.
    - `form`: `"dropless"` sends each token to all of its experts, see `sl.experts.dropless`;
      `"scatter"` and `"einsum"` give an expert so many places, see `sl.experts.moe`. By default
      nothing is dropped where the router has no capacity.
    - `balance`, `z`: coefficients of the load-balancing loss and of the router's z-loss.
    """

    experts: int = 8
    router: sl.experts.Router = TWO
    every: int = 1
    expert_hidden: int | None = None
    shared_experts: int | None = None
    dense_layers: int | None = None
    balance_bias: bool = False
    group: int | None = None
    form: sl.experts.Form | Literal["dropless"] | None = None
    balance: float = 0.01
    z: float = 0.0
    padded_to: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.router, type) or not hasattr(self.router, "choices"):
            raise ValueError(
                f"`MoEConfig(router={self.router!r})` is no router, such as `sl.experts.TopK(2)`."
            )
        _check_router(self)
        dense = self.dense_layers or 0
        if dense >= self.layers:
            raise ValueError(
                f"`MoEConfig(dense_layers={dense})` of `layers={self.layers}` leaves none with "
                "experts: choose fewer, or take `models/gpt.py`."
            )
        if (self.layers - dense) % self.every:
            without = f", without `dense_layers={dense}`" if dense else ""
            raise ValueError(
                f"`MoEConfig(every={self.every})` does not divide `layers={self.layers}`{without}."
            )
        if self.full_every is not None:
            raise ValueError(
                f"`MoEConfig(full_every={self.full_every})`: layers with experts are all alike, "
                "with a window or without; leave `full_every` out."
            )
        if self.router.choices > self.experts:
            raise ValueError(
                f"`MoEConfig(router={self.router})` sends each token to {self.router.choices} "
                f"experts, and there are `experts={self.experts}`."
            )
        if self.padded_to is not None and self.padded_to < self.experts:
            raise ValueError(
                f"`MoEConfig(padded_to={self.padded_to})` has weights of fewer experts than "
                f"`experts={self.experts}`."
            )

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dim of the parameters, by its name."""
        stored = self.padded_to or self.experts
        return {**super().dims, "experts": stored, "routes": self.experts}

    @property
    def of_experts(self) -> "MoEConfig":
        """The same with `hidden` as experts have it."""
        if self.expert_hidden is None:
            return self
        return replace(self, hidden=self.expert_hidden, expert_hidden=None)

    @property
    def of_shared(self) -> "MoEConfig":
        """The same with `hidden` as the shared experts have it together."""
        hidden = self.of_experts.dims["mlp"] * (self.shared_experts or 0)
        return replace(self, hidden=hidden, expert_hidden=None)

    @property
    def expert_blocks(self) -> int:
        """How many blocks have experts."""
        return (self.layers - (self.dense_layers or 0)) // self.every

    @property
    def decoder(self) -> sl.planning.Decoder:
        """Refused: the formulas of `sl.estimate` know no experts."""
        raise gpt_config.no_decoder(self, "experts")

    @property
    def _forward_flops(self) -> dict[str, int]:
        """What the forward pass takes for a sequence, by the kind of module: of all layers. A token
        meets as many experts as the router chooses, and those that are shared.
        """
        found, blocks = super()._forward_flops, self.expert_blocks
        matrices = 3 if self.gated else 2
        met: float = self.router.choices
        if isinstance(self.router, sl.experts.ExpertChoice):
            met = self.router.capacity  # on average
        met += self.shared_experts or 0
        expert = round(matrices * self.of_experts.dims["mlp"] * met) + self.experts
        found["mlp"] = found["mlp"] * (self.layers - blocks) // self.layers
        found["experts"] = 2 * blocks * self.context * self.width * expert
        return found


def _check_router(config: MoEConfig) -> None:
    """Refuse a form of the layer that there is not, and what does not go with the router."""
    name, router = type(config).__name__, config.router
    forms = ("dropless", *get_args(sl.experts.Form))
    if config.form is not None and config.form not in forms:
        raise ValueError(
            f"`{name}(form={config.form!r})`: choose {' or '.join(map(repr, forms))}, or None."
        )
    if config.form == "dropless" and getattr(router, "capacity", None) is not None:
        raise ValueError(
            f'`{name}(form="dropless", router={router})` drops no token, and the router has a '
            "capacity: say `capacity=None` there, or leave `form` out."
        )
    reads = getattr(router, "reads", ())
    if config.balance_bias and "bias" not in reads:
        raise ValueError(
            f"`{name}(balance_bias=True, router={router})`: the router has no use for a bias; "
            "take one that has, such as `sl.experts.SigmoidTopK(2)`, or leave `balance_bias` out."
        )
    for given in ("ids", "noise_logits"):
        if given in reads:
            raise ValueError(
                f"`{name}(router={router})` reads `{given}`, which blocks do not give it: take "
                "another, such as `sl.experts.TopK(2)`."
            )
    # In an encoder too: a model has one router for all of its layers.
    if hasattr(router, "take") and not getattr(router, "sees_later_tokens", False):
        raise ValueError(
            f"`{name}(router={router})`: experts choose among later tokens too, which a decoder "
            f"does not have when it writes. Ask for it by name, `{type(router).__name__}("
            "sees_later_tokens=True)`, or let tokens choose: `sl.experts.TopK(2)`."
        )


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


def qwen3_235b_a22b(**changes: Any) -> MoEConfig:
    """Qwen3-235B-A22B: 235 billion parameters, of which a token meets 22."""
    config = MoEConfig(
        layers=94, width=4096, heads=64, kv_heads=4, head_dim=128, hidden=1536, context=4096,
        vocab=151_936, rope_theta=1_000_000.0, norm_epsilon=1e-6, query_key_norm=True,
        norm="rms", positions="rotary", mlp="swiglu", bias=False, tied=False,
        experts=128, router=sl.experts.TopK(8), balance=0.001,
    )  # fmt: skip
    return replace(config, **changes)


def deepseek_v3(**changes: Any) -> MoEConfig:
    """DeepSeek-V3: 671 billion parameters, of which a token meets 37, without the prediction of
    several tokens and without its scaling of rotary positions for long contexts.
    """
    config = MoEConfig(
        layers=61, width=7168, heads=128, hidden=18_432, context=4096, vocab=129_280,
        norm_epsilon=1e-6, latent=gpt.LatentAttention(),
        norm="rms", positions="rotary", mlp="swiglu", bias=False, tied=False,
        dense_layers=3, experts=256, expert_hidden=2048, shared_experts=1, balance_bias=True,
        router=DEEPSEEK_ROUTER, balance=0.0001,
    )  # fmt: skip
    return replace(config, **changes)


def tiny_deepseek(**changes: Any) -> MoEConfig:
    """DeepSeek-V3's parts in a size for tests and first steps."""
    latent = gpt.LatentAttention(
        query_rank=24, kv_rank=16, key_dim=8, rotary_dim=4, value_dim=8
    )  # fmt: skip
    config = deepseek_v3(
        layers=4, width=32, heads=4, hidden=64, context=32, vocab=128, latent=latent,
        dense_layers=2, experts=8, expert_hidden=16,
        router=sl.experts.SigmoidTopK(2, scale=2.5, groups=4, groups_taken=2),
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
        self.config, self.deterministic, self.decoding = config, False, False
        init = layers.normal(layers.STANDARD_DEVIATION)
        returning = layers.normal(layers.returning_std(config))
        self.router = layers.parameter(init, config, "embed", "routes", rngs=rngs)
        zeros = nnx.initializers.zeros
        biased = config.balance_bias
        self.router_bias = layers.parameter(zeros, config, "routes", rngs=rngs) if biased else None
        self.up = layers.parameter(init, config, "experts", "embed", "mlp", rngs=rngs)
        self.gate = (
            layers.parameter(init, config, "experts", "embed", "mlp", rngs=rngs)
            if config.gated
            else None
        )
        self.down = layers.parameter(returning, config, "experts", "mlp", "embed", rngs=rngs)

    def set_view(self, deterministic: bool | None = None, decoding: bool | None = None) -> None:
        """What `nnx.view` sets: without a router's draws, and one token of a sequence at a time."""
        if deterministic is not None:
            self.deterministic = deterministic
        if decoding is not None:
            self.decoding = decoding

    def __call__(
        self, x_BSD: jax.Array, key: jax.Array | None, real_BS: jax.Array | None
    ) -> tuple[jax.Array, sl.experts.MoEStats]:
        config, weights = self.config, {"up": self.up[...], "down": self.down[...]}
        if config.router.capacity is not None and sl.context.is_arranged(x_BSD.shape[1]):
            raise ValueError(
                f"`MoEConfig(router={config.router})` gives the places of an expert to the first "
                "tokens of a sequence, and tokens are in zigzag order, as the rules of the context "
                "say. Let the experts take all of theirs, `capacity=None`, or leave tokens in "
                'their order: `sl.rules.context(..., order="sequence")`.'
            )
        if self.gate is not None:
            weights["gate"] = self.gate[...]
        x_BSD = layers.lay_out(x_BSD, layers.RESIDUAL, layers.WHOLE)
        options: dict[str, Any] = {
            "gate": self.router[...],
            "weights": weights,
            "key": None if self.deterministic else key,
            "group": None if self.decoding else config.group,
            "real": real_BS,
            "names": layers.WHOLE,
            "padded_to": config.padded_to,
        }
        if self.router_bias is not None:
            options["bias"] = self.router_bias[...]
        if config.form == "dropless" or (config.form is None and config.router.capacity is None):
            of_rows = partial(_experts_of_rows, config.mlp)
            y_BSD, stats = sl.experts.dropless(x_BSD, config.router, of_rows, **options)
        else:
            of_places = partial(_experts_of_places, config.mlp)
            options["form"] = config.form or "scatter"
            y_BSD, stats = sl.experts.moe(x_BSD, config.router, of_places, **options)
        return layers.lay_out(y_BSD, layers.WHOLE, layers.RESIDUAL), stats


def _experts_of_places(mlp: str, weights: dict[str, jax.Array], x_END: jax.Array) -> jax.Array:
    """What each expert makes of the tokens in its places, (experts, places, width)."""

    def product(x_ENK: jax.Array, name: str) -> jax.Array:
        return jnp.einsum("enk,ekl->enl", x_ENK, weights[name].astype(x_ENK.dtype))

    # Kept, tokens are not sent to their experts once more.
    x_END = layers.named(x_END, "expert_in")
    products = {name: product(x_END, name) for name in weights if name != "down"}
    return layers.named(product(_hidden(products, mlp), "down"), "expert_out")


def _experts_of_rows(
    mlp: str, weights: dict[str, jax.Array], x_RD: jax.Array, groups: sl.kernels.Groups
) -> jax.Array:
    """What experts make of rows that are sorted by expert, (rows, width)."""
    x_RD = layers.named(x_RD, "expert_in")
    inward = [name for name in weights if name != "down"]
    made = sl.kernels.grouped_matmul(
        x_RD,
        [weights[name].astype(x_RD.dtype) for name in inward],
        groups,
        names=("act_embed", "act_mlp"),
    )
    h_RF = _hidden(dict(zip(inward, made, strict=True)), mlp)
    down = weights["down"].astype(x_RD.dtype)
    y_RD = sl.kernels.grouped_matmul(h_RF, down, groups, names=("act_mlp", "act_embed"))
    return layers.named(y_RD, "expert_out")


def _hidden(products: dict[str, jax.Array], mlp: str) -> jax.Array:
    """What experts multiply with their last matrix, from the products with the first ones."""
    h = layers.named(products["up"], "expert_up")
    if "gate" in products:
        gate = layers.named(products["gate"], "expert_gate")
        h = layers.activate(gate, mlp, up=h)
    else:
        h = layers.activate(h, mlp)
    return layers.named(h, "expert_hidden")


class ExpertBlock(gpt.Block):
    """A block with experts in place of the MLP, and the shared ones beside them."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs, **kind: bool) -> None:
        super().__init__(config, rngs=rngs, **kind)
        shared = config.shared_experts
        self.shared = layers.MLP(config.of_shared, rngs=rngs) if shared else None

    def _mlp(self, config: Any, rngs: nnx.Rngs) -> Any:
        return Experts(config.of_experts, rngs=rngs)

    def _fed(
        self, x_BSD: jax.Array, read_BSD: jax.Array, key: jax.Array | None, seen: gpt.Seen
    ) -> tuple[jax.Array, sl.experts.MoEStats]:
        y_BSD, stats = self.mlp(read_BSD, layers.fold_in(key, 2), seen.real_BS)
        if self.shared is not None:
            y_BSD += self.shared(read_BSD)
        return self._returned(x_BSD, y_BSD, key), stats


class Stretch(nnx.Module):
    """Plain blocks, and one with experts after them."""

    def __init__(
        self, config: MoEConfig, *, causal: bool = True, cross: bool = False, rngs: nnx.Rngs
    ) -> None:
        kind = {"causal": causal, "cross": cross, "rngs": rngs}
        self.plain = nnx.List([gpt.Block(config, **kind) for _ in range(config.every - 1)])
        self.expert = ExpertBlock(config, **kind)

    @property
    def blocks(self) -> list[gpt.Block]:
        """The blocks that this is, one after the other."""
        return [*self.plain, self.expert]

    def __call__(
        self, x_BSD: jax.Array, key: jax.Array | None, seen: gpt.Seen
    ) -> tuple[jax.Array, sl.experts.MoEStats]:
        for number, block in enumerate(self.plain):
            x_BSD, _ = block(x_BSD, layers.fold_in(key, number), seen)
        return self.expert(x_BSD, layers.fold_in(key, len(self.plain)), seen)


class MoE(gpt.GPT):
    """The decoder: tokens to logits.

    >>> with sl.unsharded():
    ...     MoE(tiny(), rngs=nnx.Rngs(0))(jnp.zeros((2, 16), int)).shape
    (2, 16, 256)
    """

    config: MoEConfig

    def __init__(self, config: Any, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        block, count = lambda rngs: gpt.Block(config, rngs=rngs), config.dense_layers
        self.dense = gpt.stack(block, count, rngs, DENSE) if count else None

    def _blocks(self, config: Any, rngs: nnx.Rngs) -> Any:
        return gpt.stack(lambda rngs: Stretch(config, rngs=rngs), config.expert_blocks, rngs)

    def _before(self, x_BSD: jax.Array, key: jax.Array | None, seen: gpt.Seen) -> jax.Array:
        """The residual stream after the blocks that come before those with experts."""
        if self.dense is None:
            return x_BSD
        # A number that no block has, so that none draws what another does.
        key = layers.fold_in(key, self.config.layers + 1)
        keys = None if key is None else gpt.keys_of(key, self.config.dense_layers or 0)
        return self._through(self.dense, x_BSD, keys, seen, DENSE)[0]

    @property
    def stacks(self) -> list[gpt.Stack]:
        """All blocks in their order."""
        stacks = [gpt.Stack(self.blocks, self.config.expert_blocks)]
        if self.dense is not None:
            stacks.insert(0, gpt.Stack(self.dense, self.config.dense_layers or 0))
        return stacks

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
        """The features, in the order of `sl.context.arrange`, and what the layers of experts tell:
        the mean over them.
        """
        seen, count = gpt.Seen(segments_BS=segments_BS), self.config.expert_blocks
        x_BSD, stats = self._run(tokens_BS, self.blocks, count, key, seen)
        return self._last(x_BSD, self.norm), jax.tree.map(lambda x: x.mean(0), stats)


def stacked(path: str, parameter: Any) -> int:
    """How many leading dims of a parameter count layers and experts, for
    `sl.optimizers.per_layer_and_expert`.
    """
    if not path.startswith(("blocks/", "encoder/", "dense/")):
        return 0
    return 2 if path.endswith(("/mlp/up", "/mlp/gate", "/mlp/down")) else 1


def loss(
    model: MoE, batch: dict[str, jax.Array], rng: jax.Array | None = None
) -> tuple[sl.WeightedMean, dict[str, sl.WeightedMean]]:
    """GPT's cross-entropy, with the losses of the routers, and metrics of these; by itself it is
    `cross_entropy`.
    """
    config = model.config
    tokens_BS, targets_BS, segments_BS = gpt.shifted(batch)
    x_BSD, stats = model.routed(tokens_BS, segments_BS, key=rng)
    entropy = gpt.entropy(model, x_BSD, targets_BS, batch.get("mask"))
    return entropy + config.balance * stats.balance + config.z * stats.z, {
        "cross_entropy": entropy,
        **stats.metrics,
        **stats.sending,
    }
