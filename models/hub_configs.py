"""What a `config.json` of transformers says of a model, as a configuration of ours."""

import dataclasses
import difflib
import math
from collections.abc import Callable, Mapping
from typing import Any

import shardlib as sl
from models import gpt, moe
from models.rotary import yarn_size

Said = Mapping[str, Any]
# What the configurations of these models have, and our models have not, with the value that stands
# for its absence.
UNKNOWN: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "mlp_only_layers": [],
    "partial_rotary_factor": 1.0,
    "scale_attn_weights": True,
    "add_cross_attention": False,
    "quantization_config": None,
    "use_bidirectional_attention": False,
}
# Models that read more than texts: the part of their configuration that does, which is a model of
# texts, and the parts of their weights that do not.
WITH_TEXTS = {"gemma3": "text_config"}
NOT_OF_TEXTS = (r"(.*\.)?vision_tower\..*", r"(.*\.)?multi_modal_projector\..*")
_GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
# What transformers takes for fields that a configuration leaves out, where that is not nothing.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "router_aux_loss_coef": 0.001,
    },
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_moe": {
        "num_key_value_heads": 4,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
    },
    "gemma": {**_GEMMA, "num_key_value_heads": 16, "hidden_act": "gelu_pytorch_tanh"},
    "gemma2": {
        **_GEMMA,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
}


def _made(kind: Any, found: Said, changes: Said) -> Any:
    """A configuration with what was found, and with the fields that `hub.config` was given."""
    known = [field.name for field in dataclasses.fields(kind)]
    for name in changes:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean `{near[0]}`?" if near else f"; it has {', '.join(known)}."
            raise ValueError(
                f"`hub.config({name}=...)`: `{kind.__name__}` has no such field{meant}"
            )
    return kind(**{**found, **changes})


def _of_gpt2(said: Said, changes: Said) -> gpt.GPTConfig:
    hidden = said.get("n_inner")
    _check(said, "activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields = {
        "layers": said["n_layer"],
        "width": said["n_embd"],
        "heads": said["n_head"],
        "hidden": hidden,
        "context": said["n_positions"],
        "vocab": said["vocab_size"],
        "norm_epsilon": said.get("layer_norm_epsilon", 1e-5),
        "tied": said.get("tie_word_embeddings", True),
    }
    return _made(gpt.GPTConfig, fields, changes)


def _llama_fields(said: Said, changes: Said) -> dict[str, Any]:
    """What all of Llama's kind have."""
    _check(said, "hidden_act", "silu")
    if said["model_type"] not in ("mistral", "mixtral"):
        # What these say of a window is not used, unless some layers are named as such.
        for kind in said.get("layer_types") or []:
            _check({"layer_types": kind}, "layer_types", "full_attention")
    return {
        **_rope(_rope_parameters(said)),
        **_decoder_fields(said, changes),
        "mlp": "swiglu",
    }


def _decoder_fields(said: Said, changes: Said) -> dict[str, Any]:
    """What all decoders with rotary positions have, but for these and for their MLPs."""
    return {
        "layers": said["num_hidden_layers"],
        "width": said["hidden_size"],
        "heads": said["num_attention_heads"],
        "kv_heads": said.get("num_key_value_heads"),
        "head_dim": said.get("head_dim"),
        "hidden": said["intermediate_size"],
        "context": changes.get("context", said["max_position_embeddings"]),
        "vocab": said["vocab_size"],
        "norm_epsilon": said["rms_norm_eps"],
        "tied": said.get("tie_word_embeddings", False),
        "norm": "rms",
        "positions": "rotary",
        "bias": False,
    }


def _rope_parameters(said: Said) -> dict[str, Any]:
    """What is said of the rotary positions of all layers, or of those without a window."""
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    if "full_attention" in rope:
        rope = rope["full_attention"]
    return {"rope_theta": said.get("rope_theta", 10_000.0), **rope}


def _rope(rope: Said) -> dict[str, Any]:
    """Rotary positions, and how they are changed for longer contexts."""
    _check(rope, "partial_rotary_factor", 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _SCALINGS:
        known = ", ".join(map(repr, _SCALINGS))
        raise ValueError(
            f"`config.json` has rotary positions of type {kind!r}; the models here know {known}."
        )
    return {
        "rope_theta": float(rope["rope_theta"]),
        "rope_scaling": _SCALINGS[kind](rope),
    }


def _llama3_scaling(rope: Said) -> gpt.RopeScaling:
    return gpt.RopeScaling(
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        rope["original_max_position_embeddings"],
    )


def _yarn_scaling(rope: Said) -> gpt.YarnScaling:
    if not rope.get("truncate", True):
        raise ValueError(
            "`config.json` has `truncate` False, of YaRN's positions; the models here know True."
        )
    factor, context = float(rope["factor"]), rope["original_max_position_embeddings"]
    size = rope.get("attention_factor")
    if size is None:
        size = yarn_size(factor)
        own, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
        if own and all_dims:
            size = yarn_size(factor, own) / yarn_size(factor, all_dims)
    turns = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
    return gpt.YarnScaling(factor, context, *turns, float(size))


_SCALINGS: dict[str, Callable[[Said], Any]] = {
    "default": lambda rope: None,
    "linear": lambda rope: gpt.LinearScaling(float(rope["factor"])),
    "llama3": _llama3_scaling,
    "yarn": _yarn_scaling,
}


def _windows(said: Said) -> dict[str, Any]:
    """How many tokens layers see, and which of them see all."""
    window = said.get("sliding_window")
    every = said.get("sliding_window_pattern")
    if said.get("layer_types") is not None:
        every = _pattern(list(said["layer_types"]))
    if window is None or every == 1:
        return {}
    if every is not None and every > said["num_hidden_layers"]:
        every = None  # none of the layers comes to see all
    return {"window": window, "full_every": every}


def _pattern(kinds: list[str]) -> int | None:
    """Every which layer sees all tokens, of their kinds; None if none does."""
    sees_all = [kind == "full_attention" for kind in kinds]
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"`config.json` has `layer_types` {sorted(set(kinds))}; the models here know "
            "'full_attention' and 'sliding_attention'."
        )
    if not any(sees_all):
        return None
    every = sees_all.index(True) + 1
    if sees_all != [number % every == 0 for number in range(1, len(kinds) + 1)]:
        raise ValueError(
            "`config.json` has `layer_types` with layers of full attention at other distances than "
            f"that of the first, number {every}; the models here have them at equal distances."
        )
    return every


def _of_llama(said: Said, changes: Said) -> gpt.GPTConfig:
    return _made(gpt.GPTConfig, _llama_fields(said, changes), changes)


def _of_mistral(said: Said, changes: Said) -> gpt.GPTConfig:
    window = _windows(said)
    return _made(gpt.GPTConfig, {**_llama_fields(said, changes), **window}, changes)


def _of_qwen2(said: Said, changes: Said) -> gpt.GPTConfig:
    return _made(gpt.GPTConfig, {**_llama_fields(said, changes), "qkv_bias": True}, changes)


def _of_qwen3(said: Said, changes: Said) -> gpt.GPTConfig:
    return _made(gpt.GPTConfig, {**_llama_fields(said, changes), "query_key_norm": True}, changes)


def _of_mixtral(said: Said, changes: Said) -> gpt.GPTConfig:
    more = {
        **_windows(said),
        "balance": said["router_aux_loss_coef"],
        "experts": said["num_local_experts"],
        "router": sl.experts.TopK(said["num_experts_per_tok"]),
    }
    return _made(moe.MoEConfig, {**_llama_fields(said, changes), **more}, changes)


def _of_qwen3_moe(said: Said, changes: Said) -> gpt.GPTConfig:
    _check(said, "norm_topk_prob", True)
    _check(said, "decoder_sparse_step", 1)
    # The later of two versions has Mixtral's name for it.
    experts = "num_experts" if "num_experts" in said else "num_local_experts"
    more = {
        "balance": said["router_aux_loss_coef"],
        "experts": said[experts],
        "expert_hidden": said["moe_intermediate_size"],
        "router": sl.experts.TopK(said["num_experts_per_tok"]),
        "query_key_norm": True,
    }
    return _made(moe.MoEConfig, {**_llama_fields(said, changes), **more}, changes)


def _of_deepseek_v3(said: Said, changes: Said) -> gpt.GPTConfig:
    _check(said, "norm_topk_prob", True)
    _check(said, "rope_interleave", True)
    _check(said, "moe_layer_freq", 1)
    _check(said, "scoring_func", "sigmoid")
    _check(said, "topk_method", "noaux_tc")
    if said["q_lora_rank"] is None:
        raise ValueError(
            "`config.json` has `q_lora_rank` None; the models here make queries of a latent."
        )
    latent = gpt.LatentAttention(
        query_rank=said["q_lora_rank"],
        kv_rank=said["kv_lora_rank"],
        key_dim=said["qk_nope_head_dim"],
        rotary_dim=said["qk_rope_head_dim"],
        value_dim=said["v_head_dim"],
    )
    router = sl.experts.SigmoidTopK(
        said["num_experts_per_tok"],
        scale=said["routed_scaling_factor"],
        groups=said["n_group"],
        groups_taken=said["topk_group"],
    )
    rope = _rope_parameters(said)
    scale = None
    if rope.get("mscale_all_dim") and "factor" in rope:
        size = yarn_size(float(rope["factor"]), rope["mscale_all_dim"])
        scale = size * size / math.sqrt(latent.head_dim)
    more = {
        "kv_heads": None,
        "head_dim": None,
        "latent": latent,
        "attention_scale": scale,
        "dense_layers": said["first_k_dense_replace"] or None,
        "experts": said["n_routed_experts"],
        "expert_hidden": said["moe_intermediate_size"],
        "shared_experts": said["n_shared_experts"] or None,
        "balance_bias": True,
        "balance": said.get("aux_loss_alpha", 0.0001),
        "router": router,
    }
    return _made(moe.MoEConfig, {**_llama_fields(said, changes), **more}, changes)


def _gemma_fields(said: Said, changes: Said) -> dict[str, Any]:
    """What all of Gemma's kind have."""
    # The first configurations say "gelu" and mean its approximation.
    if not said.get("hidden_activation"):
        _check(said, "hidden_act", "gelu_pytorch_tanh", "gelu")
    _check(said, "hidden_activation", None, "gelu_pytorch_tanh")
    return {
        **_rope(_rope_parameters(said)),
        **_decoder_fields(said, changes),
        "mlp": "geglu",
        "norm_from_zero": True,
        "scaled_embedding": True,
    }


def _of_gemma(said: Said, changes: Said) -> gpt.GPTConfig:
    return _made(gpt.GPTConfig, _gemma_fields(said, changes), changes)


def _later_gemma_fields(said: Said) -> dict[str, Any]:
    """What Gemma 2 and 3 have besides."""
    return {
        **_windows(said),
        "post_norms": True,
        "attention_scale": 1 / math.sqrt(said["query_pre_attn_scalar"]),
        "attention_cap": said.get("attn_logit_softcapping"),
        "logit_cap": said.get("final_logit_softcapping"),
    }


def _of_gemma2(said: Said, changes: Said) -> gpt.GPTConfig:
    more = _later_gemma_fields(said)
    return _made(gpt.GPTConfig, {**_gemma_fields(said, changes), **more}, changes)


def _of_gemma3(said: Said, changes: Said) -> gpt.GPTConfig:
    more = {**_later_gemma_fields(said), "query_key_norm": True}
    if "window" in more:
        local = (said.get("rope_parameters") or {}).get("sliding_attention")
        theta = said["rope_local_base_freq"] if local is None else local["rope_theta"]
        if local is not None and local.get("rope_type", "default") != "default":
            raise ValueError(
                "`config.json` has scaled rotary positions in layers with a window, which the "
                "models here do not know."
            )
        more["local_rope_theta"] = float(theta)
    return _made(gpt.GPTConfig, {**_gemma_fields(said, changes), **more}, changes)


def _check(said: Said, field: str, *known: Any) -> None:
    """Refuse a value of a configuration that is none of those that are known."""
    if said.get(field, known[0]) not in known:
        raise ValueError(
            f"`config.json` has `{field}` {said[field]!r}; the models here know "
            f"{' and '.join(map(repr, known))}."
        )


READERS: dict[str, Callable[[Said, Said], gpt.GPTConfig]] = {
    "gpt2": _of_gpt2,
    "llama": _of_llama,
    "mistral": _of_mistral,
    "mixtral": _of_mixtral,
    "qwen2": _of_qwen2,
    "qwen3": _of_qwen3,
    "qwen3_moe": _of_qwen3_moe,
    "gemma": _of_gemma,
    "gemma2": _of_gemma2,
    "gemma3_text": _of_gemma3,
    "deepseek_v3": _of_deepseek_v3,
}
