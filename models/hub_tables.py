"""Where the tensors of published models go, under the names that transformers gives them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from models import gpt, moe
from shardlib.weights import Part, Rule, Span, Table

_SCALE = "embed -> layers embed"
_QUERY = "(heads head_dim) embed -> layers heads head_dim embed"
_OUTPUT = "embed (heads head_dim) -> layers embed heads head_dim"


@dataclass(frozen=True)
class _Layers:
    """Layers of one stack of a model: the path of their parameters, and which they are of all.

    - `path`: of the block.
    - `first`, `step`: the number of the first layer, and how far it is to the next one.
    - `sparse`: whether they have experts.
    """

    path: str
    first: int
    step: int
    sparse: bool = False

    def rule(self, tensor: str, parameter: str, form: str, **more: Any) -> Rule:
        """A rule for a parameter of these layers."""
        numbers = {"layers": (self.first, self.step)}
        return Rule(tensor, self.path + parameter, form, numbers=numbers, **more)


def gpt2(config: gpt.GPTConfig, prefix: str) -> Table:
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
    return _with_head(config, rules, [r".*\.attn\.(masked_)?bias"])


def llama(config: gpt.GPTConfig, prefix: str) -> Table:
    """The names of Llama and its kind: Mistral, Mixtral, Qwen, Gemma, and DeepSeek-V3."""
    rules = [
        Rule(prefix + "embed_tokens.weight", "embedding", "vocab embed -> vocab embed"),
        Rule(prefix + "norm.weight", "norm/scale", "embed -> embed"),
    ]
    name = prefix + "layers.{layers}."
    for layers in _layers(config):
        rules += _norms(config, layers, name)
        rules += _attention(config, layers, name)
        rules += _experts(config, layers, name) if layers.sparse else _mlp(layers, name)
    ignored = [r".*\.rotary_emb\.inv_freq"]
    if config.latent is not None:
        # DeepSeek's prediction of several tokens, which is one more layer.
        ignored.append(rf"{prefix}layers\.{config.layers}\..*")
    return _with_head(config, rules, ignored)


def _layers(config: gpt.GPTConfig) -> Iterator[_Layers]:
    """The stacks of layers of a model."""
    if isinstance(config, moe.MoEConfig):
        dense = config.dense_layers or 0
        if dense:
            yield _Layers("dense/", 0, 1)
        for number in range(config.every - 1):
            yield _Layers(f"blocks/plain/{number}/", dense + number, config.every)
        yield _Layers("blocks/expert/", dense + config.every - 1, config.every, sparse=True)
        return
    if config.full_every is None:
        yield _Layers("blocks/", 0, 1)
        return
    period = config.period
    for number in range(period - 1):
        yield _Layers(f"blocks/local/{number}/", number, period)
    yield _Layers("blocks/full/", period - 1, period)
    if rest := config.layers % period:
        yield _Layers("last_blocks/", config.layers - rest, 1)


def _norms(config: gpt.GPTConfig, layers: _Layers, name: str) -> list[Rule]:
    """The norms of the residual stream, and of what is added to it."""
    names = {"input_layernorm": "attention_norm", "post_attention_layernorm": "mlp_norm"}
    if config.post_norms:
        names |= {
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_post_norm",
        }
    return [
        layers.rule(f"{name}{theirs}.weight", f"{ours}/scale", _SCALE)
        for theirs, ours in names.items()
    ]


def _attention(config: gpt.GPTConfig, layers: _Layers, name: str) -> list[Rule]:
    """The projections of attention, and the norms and biases in it."""
    if config.latent is not None:
        return _latent_attention(config.latent, layers, name + "self_attn.")
    name += "self_attn."
    rules = [layers.rule(name + "o_proj.weight", "attention/output/kernel", _OUTPUT)]
    for letter, ours in (("q", "query"), ("k", "key"), ("v", "value")):
        kernel = f"attention/{ours}/kernel"
        rules.append(layers.rule(f"{name}{letter}_proj.weight", kernel, _QUERY))
        if config.qkv_bias:
            form = "(heads size) -> layers heads size"
            rules.append(layers.rule(f"{name}{letter}_proj.bias", f"attention/{ours}/bias", form))
        if config.query_key_norm and ours != "value":
            scale, form = f"attention/{ours}_norm/scale", "head_dim -> layers head_dim"
            rules.append(layers.rule(f"{name}{letter}_norm.weight", scale, form))
    return rules


def _latent_attention(latent: gpt.LatentAttention, layers: _Layers, name: str) -> list[Rule]:
    """DeepSeek's: some projections have one tensor, and pairs that positions turn are side by side.

    Where they have numbers 2 i and 2 i + 1, we have i and i + size / 2.
    """
    half = latent.rotary_dim // 2
    pairs = tuple(2 * (place % half) + place // half for place in range(latent.rotary_dim))
    plain = tuple(range(latent.key_dim))
    of_query = {"head_dim": plain + tuple(latent.key_dim + place for place in pairs)}
    compressed = latent.kv_rank + latent.rotary_dim
    both = latent.key_dim + latent.value_dim
    kv, norm = name + "kv_a_proj_with_mqa.weight", "rank -> layers rank"
    return [
        layers.rule(name + "q_a_proj.weight", "attention/query_latent/kernel",
                    "rank embed -> layers rank embed"),
        layers.rule(name + "q_a_layernorm.weight", "attention/query_norm/scale", norm),
        layers.rule(name + "q_b_proj.weight", "attention/query/kernel",
                    "(heads head_dim) rank -> layers heads head_dim rank", orders=of_query),
        layers.rule(kv, "attention/kv_latent/kernel", "rank embed -> layers rank embed",
                    part=Span("rank", 0, compressed)),
        layers.rule(kv, "attention/rotary_key/kernel", "size embed -> layers size embed",
                    part=Span("size", latent.kv_rank, compressed), orders={"size": pairs}),
        layers.rule(name + "kv_a_layernorm.weight", "attention/kv_norm/scale", norm),
        layers.rule(name + "kv_b_proj.weight", "attention/key/kernel",
                    "(heads size) rank -> layers heads size rank", part=Span("size", 0, both)),
        layers.rule(name + "kv_b_proj.weight", "attention/value/kernel",
                    "(heads size) rank -> layers heads size rank",
                    part=Span("size", latent.key_dim, both)),
        layers.rule(name + "o_proj.weight", "attention/output/kernel", _OUTPUT),
    ]  # fmt: skip


def _mlp(layers: _Layers, name: str, theirs: str = "mlp.", ours: str = "mlp/") -> list[Rule]:
    """An MLP's three matrices."""
    rules = []
    for matrix in ("up", "gate", "down"):
        form = "mlp embed -> layers mlp embed"
        if matrix == "down":
            form = "embed mlp -> layers embed mlp"
        tensor = f"{name}{theirs}{matrix}_proj.weight"
        rules.append(layers.rule(tensor, f"{ours}{matrix}/kernel", form))
    return rules


def _experts(config: Any, layers: _Layers, name: str) -> list[Rule]:
    """A router, the three matrices of each expert, and those of the shared ones."""
    # Mixtral's names are its own. Those with norms of queries and keys are Qwen's, which are
    # DeepSeek's too.
    experts, names = "mlp.", {"up": "up_proj", "gate": "gate_proj", "down": "down_proj"}
    if not config.query_key_norm and config.latent is None:
        experts, names = "block_sparse_moe.", {"up": "w3", "gate": "w1", "down": "w2"}
    router = "routes embed -> layers embed routes"
    rules = [layers.rule(f"{name}{experts}gate.weight", "mlp/router", router)]
    if config.balance_bias:
        tensor = f"{name}{experts}gate.e_score_correction_bias"
        rules.append(layers.rule(tensor, "mlp/router_bias", "routes -> layers routes"))
    for ours, theirs in names.items():
        form = "mlp embed -> layers experts embed mlp"
        if ours == "down":
            form = "embed mlp -> layers experts mlp embed"
        tensor = name + experts + "experts.{experts}." + theirs + ".weight"
        rules.append(layers.rule(tensor, f"mlp/{ours}", form))
    if config.shared_experts:
        rules += _mlp(layers, name, "mlp.shared_experts.", "shared/")
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
