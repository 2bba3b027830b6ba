"""Models whose weights others have published: their configurations, and where their tensors go.

    config = hub.config("Llama-3-8B")                      # the folder that holds the files
    state = sl.init(lambda: hub.model(config, nnx.Rngs(0)), optimizer, strategy)
    state = sl.weights.load("Llama-3-8B", state, hub.table(config))

GPT-2, Llama 1 to 3.2, Mistral, Qwen 2 and 3 and Mixtral have the names that Hugging Face's
transformers gives them. `sl.weights.save` writes files that it reads.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

import shardlib as sl
from models import gpt, moe
from shardlib.weights import Part, Rule, Table

# What the configurations of these models have, and our models have not, with the value that stands
# for its absence.
_UNKNOWN: dict[str, Any] = {
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
# What transformers takes for fields that a configuration leaves out, where that is not nothing.
_DEFAULTS: dict[str, dict[str, Any]] = {
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
}


def config(folder: str | Path, **changes: Any) -> gpt.GPTConfig:
    """The configuration of the model in a folder, by its `config.json`."""
    file = Path(folder) / "config.json"
    said = json.loads(file.read_text())
    if not isinstance(said, dict):
        raise ValueError(f"{file} is no configuration: it is no JSON object.")
    kind = said.get("model_type")
    if kind not in _CONFIGS:
        known = ", ".join(map(repr, _CONFIGS))
        raise ValueError(f"{file} is of a model of type {kind!r}; known are {known}.")
    said = {**_DEFAULTS.get(kind, {}), **said}
    for field, absent in _UNKNOWN.items():
        if said.get(field) not in (None, absent):
            raise ValueError(
                f"{file} has `{field}` {said[field]!r}, which the models here do not know."
            )
    try:
        return _CONFIGS[kind](said, changes)
    except KeyError as error:
        raise ValueError(f"{file} has no `{error.args[0]}`.") from error


def description(config: gpt.GPTConfig) -> dict[str, Any]:
    """What a `config.json` says of a model, as transformers reads it, and `config` above."""
    kind = _kind_of(config)
    said: dict[str, Any] = {"model_type": kind, "architectures": [_CLASSES[kind]]}
    if kind == "gpt2":
        return said | {
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
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tied,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
    if (scaling := config.rope_scaling) is not None:
        said["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.context,
        }
    if not isinstance(config, moe.MoEConfig):
        return said
    experts = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
    said |= {
        experts: config.experts,
        "num_experts_per_tok": config.router.choices,
        "router_aux_loss_coef": config.balance,
    }
    if kind == "qwen3_moe":
        hidden = config.expert_hidden or config.dims["mlp"]
        said |= {"moe_intermediate_size": hidden, "norm_topk_prob": True}
    return said


def _kind_of(config: gpt.GPTConfig) -> str:
    """The type of a model by its name among those that are published."""
    sparse = isinstance(config, moe.MoEConfig)
    is_gpt2 = config.positions == "learned" and config.norm == "layer" and config.mlp == "gelu"
    plain_heads = config.kv_heads in (None, config.heads)
    plain_heads = plain_heads and config.dims["head_dim"] * config.heads == config.width
    is_gpt2 = is_gpt2 and plain_heads and not sparse and not config.query_key_norm
    if is_gpt2 and config.bias and config.norm_first:
        return "gpt2"
    is_llama = config.positions == "rotary" and config.norm == "rms" and config.mlp == "swiglu"
    if is_llama and not config.bias and config.norm_first and config.latent is None:
        if not sparse:
            kinds = {(True, False): "qwen3", (False, True): "qwen2", (False, False): "llama"}
            kind = kinds.get((config.query_key_norm, config.qkv_bias))
            if kind is not None:
                return kind
        if isinstance(config, moe.MoEConfig) and _is_mixtral(config):
            return "qwen3_moe" if config.query_key_norm else "mixtral"
    raise ValueError(
        f"No published model has the layers of {config}: known are GPT-2's, and those of Llama, "
        "Qwen 2, Qwen 3 and Mixtral, with all that they have."
    )


def _is_mixtral(config: moe.MoEConfig) -> bool:
    """Whether a model has experts as Mixtral has them: alike in all blocks, and nothing beside."""
    plain = moe.MoEConfig(1, 2, 1, 1, 1)
    same = ("every", "shared_experts", "dense_layers", "balance_bias", "z", "qkv_bias")
    router = config.router
    if not isinstance(router, sl.experts.TopK) or router != sl.experts.TopK(router.choices):
        return False
    return all(getattr(config, field) == getattr(plain, field) for field in same)


def end_token(folder: str | Path) -> str | None:
    """The token that ends a document, by the `tokenizer_config.json` in a folder, if it says so."""
    file = Path(folder) / "tokenizer_config.json"
    if not file.exists():
        return None
    token = json.loads(file.read_text()).get("eos_token")
    return token.get("content") if isinstance(token, dict) else token


def model(config: gpt.GPTConfig, rngs: nnx.Rngs) -> gpt.GPT:
    """A new model of a configuration."""
    if isinstance(config, moe.MoEConfig):
        return moe.MoE(config, rngs=rngs)
    return gpt.GPT(config, rngs=rngs)


def table(config: gpt.GPTConfig, prefix: str | None = None) -> Table:
    """Which tensors make up the parameters of a model.

    Args:
        config: of the model.
        prefix: before the names of all tensors but the head's; by default `"model."`, and
            `"transformer."` for GPT-2, whose first files have none.
    """
    if config.latent is not None:
        raise ValueError("There is no table yet for latent attention, DeepSeek's.")
    if config.positions == "learned":
        return _gpt2(config, "transformer." if prefix is None else prefix)
    return _llama(config, "model." if prefix is None else prefix)


def _of_gpt2(said: Mapping[str, Any], changes: Mapping[str, Any]) -> gpt.GPTConfig:
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
    return gpt.GPTConfig(**{**fields, **changes})


def _llama_fields(said: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """What all of Llama's kind have."""
    _check(said, "hidden_act", "silu")
    rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"`config.json` has rotary positions of type {kind!r}; the models here know those "
            "without scaling, and Llama 3.1's, 'llama3'."
        )
    scaling = None
    if kind == "llama3":
        scaling = gpt.RopeScaling(
            float(rope["factor"]),
            float(rope["low_freq_factor"]),
            float(rope["high_freq_factor"]),
            rope["original_max_position_embeddings"],
        )
    context = changes.get("context", said["max_position_embeddings"])
    # Qwen's configurations have a window that is not used.
    window = said.get("sliding_window") if said.get("use_sliding_window", True) else None
    kinds = set(said.get("layer_types") or ["full_attention"])
    if kinds != {"full_attention"} and window is not None:
        raise ValueError(
            f"`config.json` has `layer_types` {sorted(kinds)}; known is full attention."
        )
    if window is not None and window < context:
        raise ValueError(
            f"`config.json` has a `sliding_window` of {window} tokens, which the models here do "
            f"not know. They are right for as many: `hub.config(..., context={window})`."
        )
    return {
        "layers": said["num_hidden_layers"],
        "width": said["hidden_size"],
        "heads": said["num_attention_heads"],
        "kv_heads": said.get("num_key_value_heads"),
        "head_dim": said.get("head_dim"),
        "hidden": said["intermediate_size"],
        "context": context,
        "vocab": said["vocab_size"],
        "norm_epsilon": said["rms_norm_eps"],
        "rope_theta": float(rope.get("rope_theta", said.get("rope_theta", 10_000.0))),
        "rope_scaling": scaling,
        "tied": said.get("tie_word_embeddings", False),
        "norm": "rms",
        "positions": "rotary",
        "mlp": "swiglu",
        "bias": False,
    }


def _of_llama(said: Mapping[str, Any], changes: Mapping[str, Any]) -> gpt.GPTConfig:
    return gpt.GPTConfig(**{**_llama_fields(said, changes), **changes})


def _of_qwen2(said: Mapping[str, Any], changes: Mapping[str, Any]) -> gpt.GPTConfig:
    return gpt.GPTConfig(**{**_llama_fields(said, changes), "qkv_bias": True, **changes})


def _of_qwen3(said: Mapping[str, Any], changes: Mapping[str, Any]) -> gpt.GPTConfig:
    return gpt.GPTConfig(**{**_llama_fields(said, changes), "query_key_norm": True, **changes})


def _of_mixtral(said: Mapping[str, Any], changes: Mapping[str, Any]) -> gpt.GPTConfig:
    more = {
        "balance": said["router_aux_loss_coef"],
        "experts": said["num_local_experts"],
        "router": sl.experts.TopK(said["num_experts_per_tok"]),
    }
    return moe.MoEConfig(**{**_llama_fields(said, changes), **more, **changes})


def _of_qwen3_moe(said: Mapping[str, Any], changes: Mapping[str, Any]) -> gpt.GPTConfig:
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
    return moe.MoEConfig(**{**_llama_fields(said, changes), **more, **changes})


def _check(said: Mapping[str, Any], field: str, *known: Any) -> None:
    """Refuse a value of a configuration that is none of those that are known."""
    if said.get(field, known[0]) not in known:
        raise ValueError(
            f"`config.json` has `{field}` {said[field]!r}; the models here know "
            f"{' and '.join(map(repr, known))}."
        )


_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
_CONFIGS: dict[str, Callable[[Mapping[str, Any], Mapping[str, Any]], gpt.GPTConfig]] = {
    "gpt2": _of_gpt2,
    "llama": _of_llama,
    "mistral": _of_llama,
    "mixtral": _of_mixtral,
    "qwen2": _of_qwen2,
    "qwen3": _of_qwen3,
    "qwen3_moe": _of_qwen3_moe,
}

_SCALE = "embed -> layers embed"
_QUERY = "(heads head_dim) embed -> layers heads head_dim embed"


def _gpt2(config: gpt.GPTConfig, prefix: str) -> Table:
    """GPT-2's names. Its matrices have the inputs first, and one has queries, keys and values."""
    layer = prefix + "h.{layers}."
    rules = [
        Rule(prefix + "wte.weight", "embedding", "vocab embed -> vocab embed"),
        Rule(prefix + "wpe.weight", "positions", "position embed -> position embed"),
        Rule(layer + "attn.c_proj.weight", "blocks/attention/output/kernel",
             "(heads head_dim) embed -> layers embed heads head_dim"),
        Rule(layer + "attn.c_proj.bias", "blocks/attention/output/bias", _SCALE),
        Rule(layer + "mlp.c_fc.weight", "blocks/mlp/up/kernel", "embed mlp -> layers mlp embed"),
        Rule(layer + "mlp.c_fc.bias", "blocks/mlp/up/bias", "mlp -> layers mlp"),
        Rule(layer + "mlp.c_proj.weight", "blocks/mlp/down/kernel",
             "mlp embed -> layers embed mlp"),
        Rule(layer + "mlp.c_proj.bias", "blocks/mlp/down/bias", _SCALE),
    ]  # fmt: skip
    for number, name in enumerate(("query", "key", "value")):
        part = Part("three", number, 3)
        rules += [
            Rule(layer + "attn.c_attn.weight", f"blocks/attention/{name}/kernel",
                 "embed (three heads head_dim) -> layers heads head_dim embed", part),
            Rule(layer + "attn.c_attn.bias", f"blocks/attention/{name}/bias",
                 "(three heads head_dim) -> layers heads head_dim", part),
        ]  # fmt: skip
    for theirs, ours in (("ln_1", "attention_norm"), ("ln_2", "mlp_norm")):
        rules += [
            Rule(layer + theirs + ".weight", f"blocks/{ours}/scale", _SCALE),
            Rule(layer + theirs + ".bias", f"blocks/{ours}/bias", _SCALE),
        ]
    for kind, name in (("weight", "scale"), ("bias", "bias")):
        rules.append(Rule(f"{prefix}ln_f.{kind}", f"norm/{name}", "embed -> embed"))
    # Masks, which early versions saved with the weights.
    ignored = [r".*\.attn\.(masked_)?bias"]
    return _with_head(config, rules, ignored)


def _llama(config: gpt.GPTConfig, prefix: str) -> Table:
    """The names of Llama and its kind."""
    layer = prefix + "layers.{layers}."
    sparse = isinstance(config, moe.MoEConfig)
    block = "blocks/expert/" if sparse else "blocks/"
    rules = [
        Rule(prefix + "embed_tokens.weight", "embedding", "vocab embed -> vocab embed"),
        Rule(prefix + "norm.weight", "norm/scale", "embed -> embed"),
        Rule(layer + "input_layernorm.weight", block + "attention_norm/scale", _SCALE),
        Rule(layer + "post_attention_layernorm.weight", block + "mlp_norm/scale", _SCALE),
        Rule(layer + "self_attn.o_proj.weight", block + "attention/output/kernel",
             "embed (heads head_dim) -> layers embed heads head_dim"),
    ]  # fmt: skip
    for letter, name in (("q", "query"), ("k", "key"), ("v", "value")):
        kernel = f"{block}attention/{name}/kernel"
        rules.append(Rule(f"{layer}self_attn.{letter}_proj.weight", kernel, _QUERY))
        if config.qkv_bias:
            bias, form = f"{block}attention/{name}/bias", "(heads size) -> layers heads size"
            rules.append(Rule(f"{layer}self_attn.{letter}_proj.bias", bias, form))
    if config.query_key_norm:
        for letter, name in (("q", "query"), ("k", "key")):
            scale, form = f"{block}attention/{name}_norm/scale", "head_dim -> layers head_dim"
            rules.append(Rule(f"{layer}self_attn.{letter}_norm.weight", scale, form))
    rules += _mixed(config, layer, block) if sparse else _gated(layer, block)
    return _with_head(config, rules, [r".*\.rotary_emb\.inv_freq"])


def _gated(layer: str, block: str) -> list[Rule]:
    """An MLP's three matrices."""
    rules = []
    for name in ("up", "gate", "down"):
        form = "mlp embed -> layers mlp embed"
        if name == "down":
            form = "embed mlp -> layers embed mlp"
        rules.append(Rule(f"{layer}mlp.{name}_proj.weight", f"{block}mlp/{name}/kernel", form))
    return rules


def _mixed(config: Any, layer: str, block: str) -> list[Rule]:
    """A router, and the three matrices of each expert."""
    # Mixtral's names are its own; those with norms of queries and keys are Qwen's.
    experts, names = "mlp.", {"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}
    if not config.query_key_norm:
        experts, names = "block_sparse_moe.", {"up": "w3", "gate": "w1", "down": "w2"}
    router = "routes embed -> layers embed routes"
    rules = [Rule(f"{layer}{experts}gate.weight", block + "mlp/router", router)]
    for ours, theirs in names.items():
        form = "mlp embed -> layers experts embed mlp"
        if ours == "down":
            form = "embed mlp -> layers experts mlp embed"
        name = layer + experts + "experts.{experts}." + theirs + ".weight"
        rules.append(Rule(name, f"{block}mlp/{ours}", form))
    return rules


def _with_head(config: gpt.GPTConfig, rules: list[Rule], ignored: list[str]) -> Table:
    """The rules with that of the head, which may be the embedding."""
    if config.tied:
        ignored = [*ignored, r"lm_head\.weight"]
    else:
        rules = [*rules, Rule("lm_head.weight", "head", "vocab embed -> vocab embed")]
    sizes = {"vocab": config.vocab}
    if isinstance(config, moe.MoEConfig):
        # With `padded_to` there are weights of experts that nobody chooses.
        sizes["experts"] = config.experts
    return Table(tuple(rules), tuple(ignored), sizes)
