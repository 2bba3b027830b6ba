"""Which published model a configuration of ours is, and what its `config.json` says of it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import shardlib as sl
from models import gpt, moe

# The fields by which models of one kind differ from others, as most have them.
_USUAL: dict[str, Any] = {
    "norm_first": True,
    "query_key_norm": False,
    "qkv_bias": False,
    "latent": None,
    "norm_from_zero": False,
    "post_norms": False,
    "scaled_embedding": False,
    "window": None,
    "full_every": None,
    "local_rope_theta": None,
    "attention_scale": None,
    "attention_cap": None,
    "logit_cap": None,
    "every": 1,
    "shared_experts": None,
    "dense_layers": None,
    "balance_bias": False,
    "z": 0.0,
}
_LLAMA = {"norm": "rms", "positions": "rotary", "mlp": "swiglu", "bias": False}
_GEMMA = {**_LLAMA, "mlp": "geglu", "norm_from_zero": True, "scaled_embedding": True}
_GEMMA_FREE = ("window", "full_every", "attention_scale", "attention_cap", "logit_cap")


@dataclass(frozen=True)
class _Kind:
    """Models of one kind.

    - `architecture`: the class that transformers has for them.
    - `fixed`: the fields in which they are not as most models.
    - `free`: the fields that `config.json` says.
    - `sparse`: whether they have experts.
    """

    architecture: str
    fixed: Mapping[str, Any]
    free: tuple[str, ...] = ()
    sparse: bool = False
    values: Mapping[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", {**_USUAL, **self.fixed})

    def differing(self, config: gpt.GPTConfig) -> list[str]:
        """The fields in which a model is not of this kind."""
        fields = [name for name in self.values if name not in self.free]
        return [
            name for name in fields if getattr(config, name, _USUAL.get(name)) != self.values[name]
        ]


_KINDS = {
    "gpt2": _Kind(
        "GPT2LMHeadModel", {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True}
    ),
    "llama": _Kind("LlamaForCausalLM", _LLAMA),
    "mistral": _Kind("MistralForCausalLM", _LLAMA, ("window",)),
    "qwen2": _Kind("Qwen2ForCausalLM", {**_LLAMA, "qkv_bias": True}),
    "qwen3": _Kind("Qwen3ForCausalLM", {**_LLAMA, "query_key_norm": True}),
    "mixtral": _Kind("MixtralForCausalLM", _LLAMA, ("window",), sparse=True),
    "qwen3_moe": _Kind("Qwen3MoeForCausalLM", {**_LLAMA, "query_key_norm": True}, sparse=True),
    "gemma": _Kind("GemmaForCausalLM", _GEMMA),
    "gemma2": _Kind("Gemma2ForCausalLM", {**_GEMMA, "post_norms": True}, _GEMMA_FREE),
    "gemma3_text": _Kind(
        "Gemma3ForCausalLM",
        {**_GEMMA, "post_norms": True, "query_key_norm": True},
        (*_GEMMA_FREE, "local_rope_theta"),
    ),
    "deepseek_v3": _Kind(
        "DeepseekV3ForCausalLM",
        {**_LLAMA, "balance_bias": True},
        ("latent", "attention_scale", "shared_experts", "dense_layers"),
        sparse=True,
    ),
}


def description(config: gpt.GPTConfig) -> dict[str, Any]:
    """What a `config.json` says of a model, as transformers reads it."""
    kind = _kind_of(config)
    said: dict[str, Any] = {"model_type": kind, "architectures": [_KINDS[kind].architecture]}
    if kind == "gpt2":
        return said | _gpt2(config)
    said |= {
        "num_hidden_layers": config.layers,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.dims["kv_heads"],
        "head_dim": config.dims["head_dim"],
        "intermediate_size": config.dims["mlp"],
        "max_position_embeddings": config.context,
        "vocab_size": config.vocab,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **_rope(kind, config),
    }
    if kind in ("mistral", "mixtral"):
        said["sliding_window"] = config.window
    if kind.startswith("gemma"):
        said |= _gemma(kind, config)
    if isinstance(config, moe.MoEConfig):
        said |= _deepseek(config) if kind == "deepseek_v3" else _experts(kind, config)
    return said


def _kind_of(config: gpt.GPTConfig) -> str:
    """The type of a model by its name among those that are published."""
    sparse = isinstance(config, moe.MoEConfig)
    nearest = None
    for name, kind in _KINDS.items():
        differing = kind.differing(config)
        if kind.sparse != sparse:
            continue
        if name == "deepseek_v3" and config.latent is None:
            differing.append("latent")
        if sparse and not _routes_as(name, config):
            differing.append("router")
        if name == "gpt2" and config.dims["kv_heads"] != config.heads:
            differing.append("kv_heads")
        if name == "gpt2" and config.dims["head_dim"] * config.heads != config.width:
            differing.append("head_dim")
        if not differing:
            return name
        if nearest is None or len(differing) < len(nearest[1]):
            nearest = name, differing
    name, differing = nearest or ("gpt2", [])
    raise ValueError(
        f"No published model has the layers of {config}. The nearest are those of {name!r}, and it "
        f"differs in {', '.join(f'`{field}`' for field in differing)}."
    )


def _routes_as(name: str, config: Any) -> bool:
    """Whether a model routes tokens as those of a kind."""
    router = config.router
    if name != "deepseek_v3":
        return router == sl.experts.TopK(router.choices)
    if not isinstance(router, sl.experts.SigmoidTopK):
        return False
    return router.normalize and router.capacity is None and not router.jitter


def _gpt2(config: gpt.GPTConfig) -> dict[str, Any]:
    return {
        "n_layer": config.layers,
        "n_embd": config.width,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "n_positions": config.context,
        "vocab_size": config.vocab,
        "layer_norm_epsilon": config.norm_epsilon,
        "activation_function": "gelu_new",
        "tie_word_embeddings": config.tied,
    }


def _rope(kind: str, config: gpt.GPTConfig) -> dict[str, Any]:
    """Rotary positions: of layers with a window and without, where Gemma 3 has two kinds."""
    scaling = _scaling(config)
    if kind != "gemma3_text":
        more = {} if scaling is None else {"rope_scaling": scaling}
        return {"rope_theta": config.rope_theta, **more}
    local_theta = config.local_rope_theta or config.rope_theta
    if config.local_rope_theta is None and config.window is not None and scaling is not None:
        raise ValueError(
            f"`{type(config).__name__}(rope_scaling=...)`: Gemma 3 does not scale the positions of "
            "layers with a window; say `local_rope_theta=...`, which these have."
        )
    full = {"rope_theta": config.rope_theta, **(scaling or {"rope_type": "default"})}
    local = {"rope_theta": local_theta, "rope_type": "default"}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _scaling(config: gpt.GPTConfig) -> dict[str, Any] | None:
    match config.rope_scaling:
        case gpt.RopeScaling(factor, low, high, context):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
        case gpt.LinearScaling(factor):
            return {"rope_type": "linear", "factor": factor}
        case gpt.YarnScaling(factor, context, fast, slow, size):
            return {
                "rope_type": "yarn",
                "factor": factor,
                "original_max_position_embeddings": context,
                "beta_fast": fast,
                "beta_slow": slow,
                "attention_factor": size,
            }
        case _:
            return None


def _gemma(kind: str, config: gpt.GPTConfig) -> dict[str, Any]:
    said: dict[str, Any] = {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
    }
    if kind == "gemma":
        return said
    kinds = []
    for layer in range(config.layers):
        kinds.append("sliding_attention" if config.has_window(layer) else "full_attention")
    scale = config.attention_scale
    squared = config.dims["head_dim"] if scale is None else round(scale**-2)
    if scale is not None and not math.isclose(scale, squared**-0.5, rel_tol=1e-6):
        raise ValueError(
            f"`{type(config).__name__}(attention_scale={scale})` is not 1 over the root of a whole "
            f"number, as {kind!r} has it."
        )
    return said | {
        "layer_types": kinds,
        "sliding_window": config.window,
        "query_pre_attn_scalar": squared,
        "attn_logit_softcapping": config.attention_cap,
        "final_logit_softcapping": config.logit_cap,
    }


def _experts(kind: str, config: moe.MoEConfig) -> dict[str, Any]:
    experts = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
    said = {
        experts: config.experts,
        "num_experts_per_tok": config.router.choices,
        "router_aux_loss_coef": config.balance,
    }
    if kind == "qwen3_moe":
        hidden = config.expert_hidden or config.dims["mlp"]
        said |= {"moe_intermediate_size": hidden, "norm_topk_prob": True}
    if kind == "mixtral":
        said["intermediate_size"] = config.of_experts.dims["mlp"]
    return said


def _deepseek(config: moe.MoEConfig) -> dict[str, Any]:
    latent, router = config.latent or gpt.LatentAttention(), config.router
    said: dict[str, Any] = {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.key_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "head_dim": latent.rotary_dim,
        "first_k_dense_replace": config.dense_layers or 0,
        "n_routed_experts": config.experts,
        "n_shared_experts": config.shared_experts or 0,
        "moe_intermediate_size": config.expert_hidden or config.dims["mlp"],
        "num_experts_per_tok": router.choices,
        "norm_topk_prob": True,
        "aux_loss_alpha": config.balance,
        "rope_interleave": True,
    }
    if isinstance(router, sl.experts.SigmoidTopK):
        said |= {
            "routed_scaling_factor": router.scale,
            "n_group": router.groups,
            "topk_group": router.groups_taken,
        }
    if config.attention_scale is None:
        return said
    scaling = config.rope_scaling
    if not isinstance(scaling, gpt.YarnScaling) or scaling.factor <= 1:
        raise ValueError(
            f"`MoEConfig(attention_scale={config.attention_scale})`: DeepSeek's scores are scaled "
            "so with YaRN's positions alone, `rope_scaling=gpt.YarnScaling(...)`."
        )
    size = math.sqrt(config.attention_scale * math.sqrt(latent.head_dim))
    weight = (size - 1) / (0.1 * math.log(scaling.factor))
    return said | {"rope_scaling": {**(_scaling(config) or {}), "mscale_all_dim": weight}}
