"""Weights in safetensors files: read and written by tables, against the reference implementation."""

import json
import struct
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from models import gpt, hub, moe
from shardlib.__main__ import main
from shardlib._tree import named_leaves
from shardlib.weights import Part, Rule, Span, Table, load, open_tensors, save

P = jax.P
KV = "embed (both heads size) -> layers heads size embed"
TABLE = Table(
    (
        Rule("wte", "embedding", "vocab embed -> vocab embed"),
        Rule("h.{layers}.kv", "blocks/key", KV, Part("both", 0, 2)),
        Rule("h.{layers}.kv", "blocks/value", KV, Part("both", 1, 2)),
        Rule("h.{layers}.{experts}.up", "blocks/up", "mlp embed -> layers experts embed mlp"),
    ),
    ignored=("head",),
    sizes={"vocab": 10},
)
SPECS = {
    "embedding": P("data", "model"),
    "blocks": {
        "key": P(None, "model", None, "data"),
        "value": P(),
        "up": P("model", None, "data", None),
    },
}


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f")


def tree():
    embedding = drawn(12, 8)
    embedding[10:] = 0
    blocks = {
        "key": drawn(4, 2, 4, 8, seed=1),
        "value": drawn(4, 2, 4, 8, seed=2),
        "up": drawn(4, 3, 8, 6, seed=3),
    }
    return {"embedding": embedding, "blocks": blocks}


def reference(folder):
    """What the reference implementation reads."""
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= safetensors.numpy.load_file(file)
    return found


@pytest.mark.parametrize("file_size", ["5GB", 600])
def test_files_are_those_of_the_reference_implementation(file_size, tmp_path):
    parameters = tree()
    files = save(tmp_path, parameters, TABLE, file_size=file_size)
    assert (len(files) > 1) == (file_size == 600)
    found, blocks = reference(tmp_path), parameters["blocks"]
    np.testing.assert_array_equal(found["wte"], parameters["embedding"][:10])
    for layer in range(4):
        both = [blocks[name][layer].reshape(8, 8).T for name in ("key", "value")]
        np.testing.assert_array_equal(found[f"h.{layer}.kv"], np.concatenate(both, 1))
        for expert in range(3):
            up = blocks["up"][layer, expert]
            np.testing.assert_array_equal(found[f"h.{layer}.{expert}.up"], up.T)
    assert len(found) == 1 + 4 + 12 == len(open_tensors(tmp_path).tensors)
    assert not list(tmp_path.glob("*.unfinished"))
    # Another model in the same folder takes the place of this one.
    save(tmp_path, parameters, TABLE, dtype="bfloat16", file_size=900)
    read = open_tensors(tmp_path)
    assert {tensor.dtype.name for tensor in read.tensors.values()} == {"bfloat16"}
    assert set(reference(tmp_path)) == set(found)


@pytest.mark.parametrize("full", ["model-00001", "model-00002", "model.safetensors.index"])
def test_a_disk_that_is_full_leaves_the_model_that_was_there(full, tmp_path, monkeypatch):
    """Whichever file it is that has no room, the index too."""
    parameters = tree()
    save(tmp_path, parameters, TABLE, file_size=600)
    before = reference(tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    really_open = Path.open

    def opened(file, mode="r", *arguments, **options):
        if "w" in mode and file.name.startswith(full):
            raise OSError(28, "No space left on device")
        return really_open(file, mode, *arguments, **options)

    parameters["embedding"] = parameters["embedding"] + 1
    with monkeypatch.context() as during:
        during.setattr(Path, "open", opened)
        with pytest.raises(OSError, match="No space left"):
            save(tmp_path, parameters, TABLE, file_size=600)
    assert {file.name for file in tmp_path.iterdir()} == names
    after = reference(tmp_path)
    np.testing.assert_array_equal(before["wte"], after["wte"])


@pytest.mark.parametrize("mesh", ["data=1,model=1", "data=2,model=2", "data=4,model=2"])
def test_loaded_parameters_have_their_layout_and_every_bit(mesh, tmp_path):
    expected = tree()
    save(tmp_path, expected, TABLE)
    count = np.prod([int(part.split("=")[1]) for part in mesh.split(",")])
    devices = sl.make_mesh(mesh, devices=jax.devices()[:count])
    like = jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.NamedSharding(devices, spec)
        ),
        expected,
        SPECS,
        is_leaf=lambda x: isinstance(x, P),
    )
    found = load(tmp_path, like, TABLE)
    for (path, x), (_, y), (_, spec) in zip(
        named_leaves(found), named_leaves(expected), named_leaves(like), strict=True
    ):
        np.testing.assert_array_equal(x, y, err_msg=path)
        assert x.sharding == spec.sharding


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float64"])
def test_numbers_are_rounded_once(dtype, tmp_path):
    parameters = {"w": drawn(4, 6)}
    table = Table((Rule("w.{layers}", "w", "in -> layers in"),))
    save(tmp_path, parameters, table, dtype=dtype)
    expected = parameters["w"].astype(getattr(ml_dtypes, dtype, dtype))
    for layer in range(4):
        tensor = open_tensors(tmp_path).read(f"w.{layer}")
        np.testing.assert_array_equal(tensor, expected[layer])
    found = load(tmp_path, jax.tree.map(jnp.asarray, parameters), table)["w"]
    np.testing.assert_array_equal(found, expected.astype("f"))


def config(kind):
    """A small model of a kind."""
    llama = {
        "norm": "rms",
        "positions": "rotary",
        "mlp": "swiglu",
        "bias": False,
        "kv_heads": 2,
        "vocab_multiple": 64,
    }
    small = {"layers": 4, "width": 32, "heads": 4, "context": 32, "vocab": 96}
    if kind == "gpt2":
        return gpt.GPTConfig(**small)
    if kind == "gemma":
        more = {"mlp": "geglu", "window": 8, "full_every": 3, "norm_from_zero": True}
        return gpt.GPTConfig(**small, **llama | more, post_norms=True, scaled_embedding=True)
    if kind == "deepseek":
        return moe.tiny_deepseek(vocab_multiple=64)
    if kind == "llama":
        return gpt.GPTConfig(**small, **llama, tied=False)
    if kind == "qwen2":
        return gpt.GPTConfig(**small, **llama, qkv_bias=True)
    if kind == "qwen3":
        return gpt.GPTConfig(**small, **llama, head_dim=16, query_key_norm=True)
    return moe.MoEConfig(**small, **llama, tied=False, experts=4, hidden=24)


KINDS = ("gpt2", "llama", "qwen2", "qwen3", "mixtral", "gemma", "deepseek")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.long
@pytest.mark.sentinel("llama")
def test_models_come_back_from_files_under_another_strategy(kind, tmp_path):
    of = config(kind)
    make = lambda seed: lambda: hub.model(of, nnx.Rngs(seed))
    one = sl.Strategy(mesh=sl.make_mesh("data=1", devices=jax.devices()[:1]), rules=sl.rules.data)
    rules = sl.rules.data | sl.rules.tensor
    other = sl.Strategy(mesh="data=4,model=2", rules=rules, zero=sl.Zero(3, small=0))
    state = sl.init(make(0), optax.sgd(1.0), one)
    save(tmp_path / "one", state, hub.table(of))
    found = load(tmp_path / "one", sl.init(make(1), optax.sgd(1.0), other), hub.table(of))
    beyond = of.vocab
    for (path, x), (_, y) in zip(
        named_leaves(found.params), named_leaves(state.params), strict=True
    ):
        # Rows beyond the vocabulary are never read.
        rows = slice(beyond) if path in ("embedding", "head") else slice(None)
        np.testing.assert_array_equal(x[rows], y[rows], err_msg=path)
    save(tmp_path / "other", found, hub.table(of))
    first, second = reference(tmp_path / "one"), reference(tmp_path / "other")
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


@pytest.mark.long
def test_layers_of_a_pipeline_are_in_the_order_of_the_model(tmp_path):
    of = config("llama")
    make = lambda: hub.model(of, nnx.Rngs(0))
    schedule = sl.pipeline.Interleaved(2, 4, chunks=2)
    pipelined = sl.Strategy(
        mesh="stage=2,data=4", rules=sl.rules.data | sl.rules.pipeline, pipeline=schedule
    )
    plain = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    for name, strategy in (("plain", plain), ("pipelined", pipelined)):
        save(tmp_path / name, sl.init(make, optax.sgd(1.0), strategy), hub.table(of))
    first, second = reference(tmp_path / "plain"), reference(tmp_path / "pipelined")
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)
    state = sl.init(make, optax.sgd(1.0), pipelined)
    found = load(tmp_path / "plain", state, hub.table(of))
    of_blocks = found.params["blocks"], state.params["blocks"]
    jax.tree.map(np.testing.assert_array_equal, *of_blocks)


SCALED = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4,
    "beta_slow": 1,
}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "num_mtp_layers": 0,
}
FAMILIES = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 5}),
    "llama3.1": ("Llama", {"rope_parameters": SCALED}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_yarn": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "num_hidden_layers": 5,
            "sliding_window": 5,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "deepseek_v3": ("DeepseekV3", {**DEEPSEEK, "rope_parameters": YARN | MSCALE}),
    "deepseek_v3_plain": ("DeepseekV3", DEEPSEEK),
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_which_reads_what_is_saved(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    name, more = FAMILIES[family]
    sizes = {} if family == "gpt2" else SIZES
    of_text = "TextConfig" if family == "gemma3" else "Config"
    kind = getattr(transformers, name + of_text)
    model = getattr(transformers, f"{name}{'LMHeadModel' if family == 'gpt2' else 'ForCausalLM'}")
    torch.manual_seed(0)
    theirs = model(kind(vocab_size=96, **{**sizes, **more})).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    of = hub.config(tmp_path / "theirs")
    (tmp_path / "config.json").write_text(json.dumps(hub.description(of)))
    assert hub.description(hub.config(tmp_path)) == hub.description(of)
    strategy = sl.Strategy(
        mesh="data=4,model=2",
        rules=sl.rules.data | sl.rules.tensor,
        zero=sl.Zero(3, small=0),
    )
    state = sl.init(lambda: hub.model(of, nnx.Rngs(1)), optax.sgd(1.0), strategy)
    state = load(tmp_path / "theirs", state, hub.table(of))
    tokens = np.random.default_rng(0).integers(0, 96, (4, 17))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    with strategy.scope(), jax.default_matmul_precision("highest"):
        found = jax.jit(lambda model, tokens: model(tokens))(state.model, jnp.asarray(tokens))
    assert np.abs(found - expected).max() < 1e-5
    save(tmp_path / "ours", state, hub.table(of))
    (tmp_path / "config.json").rename(tmp_path / "ours" / "config.json")
    again = model.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(again(torch.tensor(tokens)).logits, expected)
    assert main(["weights", "diff", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_texts_are_read_as_by_transformers_where_a_model_reads_images_too(prefix, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size")}
    vision = transformers.SiglipVisionConfig(
        **sizes, num_hidden_layers=1, num_attention_heads=4, image_size=28, patch_size=14
    )
    # What it leaves out is as published files leave it out.
    text = {**SIZES, **FAMILIES["gemma3"][1], "vocab_size": 96, "model_type": "gemma3_text"}
    kind = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision.to_dict(),
        mm_tokens_per_image=1,
        image_token_index=95,
    )
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(kind).eval()
    theirs.save_pretrained(tmp_path)
    renamed = {}
    for name, tensor in safetensors.numpy.load_file(tmp_path / "model.safetensors").items():
        parts = name.partition("language_model.")
        renamed[prefix + parts[2] if parts[1] else name.removeprefix("model.")] = tensor
    safetensors.numpy.save_file(renamed, tmp_path / "model.safetensors")
    make_model, table, said = hub.weights(tmp_path)
    assert said["model_type"] == "gemma3_text"
    state = sl.init(make_model, None, sl.Strategy(mesh="data=8", rules=sl.rules.data))
    state = load(tmp_path, state, table)
    tokens = np.random.default_rng(0).integers(0, 90, (8, 17))
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    with state.layout.strategy.scope(), jax.default_matmul_precision("highest"):
        found = jax.jit(lambda model, tokens: model(tokens))(state.model, jnp.asarray(tokens))
    assert np.abs(found - expected).max() < 1e-5
    # What is written is a model of texts.
    save(tmp_path / "ours", state, hub.table(hub.config(tmp_path)))
    (tmp_path / "ours" / "config.json").write_text(json.dumps(said))
    again = transformers.Gemma3ForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        np.testing.assert_array_equal(again(torch.tensor(tokens)).logits, expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rank", [0, 4])
def test_what_was_tuned_gives_its_logits_in_transformers(rank, tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    kind = transformers.LlamaConfig(vocab_size=96, **SIZES)
    theirs = transformers.LlamaForCausalLM(kind)
    theirs.save_pretrained(tmp_path / "theirs")
    of = hub.config(tmp_path / "theirs")

    def make():
        model = hub.model(of, nnx.Rngs(1))
        return sl.lora.add(model, rank, rngs=nnx.Rngs(2)) if rank else model

    strategy = sl.Strategy(
        mesh="data=4,model=2",
        rules=sl.rules.data | sl.rules.tensor,
        zero=sl.Zero(3, small=0),
        frozen=sl.lora.FROZEN if rank else (),
    )
    keep = (sl.lora.PARAMETERS,) if rank else ()
    state = sl.init(make, optax.adam(1e-2), strategy)
    state = load(tmp_path / "theirs", state, hub.table(of), keep=keep)
    step = sl.train_step(gpt.loss, strategy)
    tokens = np.random.default_rng(0).integers(0, 96, (8, 17))
    for _ in range(4):
        state, _ = step(state, {"tokens": tokens})
    model = sl.lora.merged(state.model) if rank else state.model
    save(tmp_path / "ours", model, hub.table(of))
    (tmp_path / "ours" / "config.json").write_text(json.dumps(hub.description(of)))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        found = read(torch.tensor(tokens)).logits.numpy()
        before = theirs(torch.tensor(tokens)).logits.numpy()
    with strategy.scope(), jax.default_matmul_precision("highest"):
        expected = jax.jit(lambda model, tokens: model(tokens))(state.model, jnp.asarray(tokens))
    assert np.abs(found - expected).max() < 1e-4 < np.abs(found - before).max()


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        (np.array([1e6, 1], ml_dtypes.bfloat16), "float16"),
        (np.array([1e6, 1], np.float32), "float16"),
        (np.array([2**40 + 3, 7]), "int32"),
    ],
)
def test_numbers_that_a_parameter_cannot_hold_are_refused(numbers, dtype, tmp_path):
    safetensors.numpy.save_file({"w": numbers}, tmp_path / "model.safetensors")
    like = {"kernel": jax.ShapeDtypeStruct((2,), dtype)}
    with pytest.raises(ValueError, match="`w` has numbers up to .* cannot hold"):
        load(tmp_path, like, Table((Rule("w", "kernel", "in -> in"),)))


def test_show_and_diff_tell_what_is_in_files(tmp_path, capsys):
    parameters = tree()
    save(tmp_path / "one", parameters, TABLE)
    parameters["blocks"]["up"][1, 2, 0, 0] += 0.5
    save(tmp_path / "two", parameters, TABLE, file_size=600)
    assert main(["weights", "show", str(tmp_path / "one")]) == 0
    shown = capsys.readouterr().out
    assert "h.3.2.up  float32         6 x 8" in shown and "17 tensors, 1,168 numbers" in shown
    assert main(["weights", "diff", str(tmp_path / "one"), str(tmp_path / "one")]) == 0
    assert capsys.readouterr().out == "17 tensors, all equal.\n"
    assert main(["weights", "diff", str(tmp_path / "one"), str(tmp_path / "two")]) == 1
    assert capsys.readouterr().out == "h.1.2.up: differs by 0.5 at most\n"
    parameters["blocks"]["up"][1, 2, 1, 1] = np.inf
    save(tmp_path / "three", parameters, TABLE)
    parameters["blocks"]["up"][1, 2, 0, 0] += 0.25
    save(tmp_path / "four", parameters, TABLE)
    assert main(["weights", "diff", str(tmp_path / "three"), str(tmp_path / "four")]) == 1
    assert capsys.readouterr().out == "h.1.2.up: differs by 0.25 at most\n"
    assert main(["weights", "diff", str(tmp_path / "two"), str(tmp_path / "three")]) == 1
    assert capsys.readouterr().out == "h.1.2.up: differs by inf at most\n"
    assert main(["weights", "show", str(tmp_path / "none")]) == 2
    assert "model.safetensors.index.json" in capsys.readouterr().err


def write(file, header, numbers=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + numbers)


def entry(shape=(2,), offsets=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BAD = {
    "empty": (b"", "is no safetensors file"),
    "long header": (struct.pack("<Q", 2**31) + b"{}", "header has 2147483648 bytes"),
    "no JSON": ({"header": b"{"}, "no JSON"),
    "deep": ({"header": b"[" * 50_000}, "no JSON"),
    "twice": ({"header": b'{"a": 1, "a": 2}'}, "a name is there twice"),
    "no object": ({"header": []}, "no JSON object"),
    "no tensor": ({"header": {"a": 3}}, "which is no tensor"),
    "dtype": ({"header": {"a": entry(dtype="F4")}}, "of dtype 'F4'"),
    "negative": ({"header": {"a": entry(shape=(-2,))}}, "which is no tensor"),
    "size": ({"header": {"a": entry(shape=(3,))}}, "takes 12 bytes, and the header gives it 8"),
    "huge": ({"header": {"a": entry(shape=(2**62, 2**62))}}, "which is no tensor"),
    "huge and none": ({"header": {"a": entry(shape=(0, 2**62))}}, "which is no tensor"),
    "gap": ({"header": {"a": entry(offsets=(4, 12))}}, "begin at byte 4"),
    "overlap": ({"header": {"a": entry(), "b": entry(offsets=(4, 12))}}, "begin at byte 4"),
    "cut short": ({"header": {"a": entry()}, "numbers": b"1234"}, "has 4 bytes of numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_are_wrong_are_refused(name, tmp_path):
    content, message = BAD[name]
    file = tmp_path / "model.safetensors"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        write(file, content["header"], content.get("numbers", b""))
    with pytest.raises(ValueError, match=message):
        open_tensors(tmp_path)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_headers_are_read_or_refused(data):
    """No damage to a header brings anything but a `ValueError`, or numbers outside of the file."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (file,) = save(folder, {"w": drawn(3, 4)}, Table((Rule("w.{l}", "w", "in -> l in"),)))
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.integers(0, len(content) - 1))
            content[place] = data.draw(st.integers(0, 255))
        file.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        try:
            files = open_tensors(Path(folder))
        except ValueError:
            return
        for name in files.tensors:
            files.read(name)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "../x.safetensors"}}, "which is not beside it"),
        ({"weight_map": {"a": 3}}, "which is not beside it|is no index"),
        ({}, "is no index"),
        ({"weight_map": {"a": "x.safetensors"}}, "which is not there"),
    ],
)
def test_an_index_names_files_beside_it_alone(index, message, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=message):
        open_tensors(tmp_path)


def test_files_of_another_model_are_refused(tmp_path):
    parameters = tree()
    save(tmp_path, parameters, TABLE)
    renamed = replace(TABLE, rules=(replace(TABLE.rules[0], tensor="wtf"), *TABLE.rules[1:]))
    with pytest.raises(ValueError, match=r"no `wtf`, of which `embedding`.*nearest are wte"):
        load(tmp_path, parameters, renamed)
    with pytest.raises(ValueError, match=r"1 tensors that no parameter is made of.*`wte`"):
        less = {"blocks": parameters["blocks"]}
        load(tmp_path, less, replace(TABLE, rules=TABLE.rules[1:], sizes={}))
    with pytest.raises(ValueError, match="no rule for `more`"):
        load(tmp_path, {**parameters, "more": drawn(2)}, TABLE)
    wider = {**parameters, "embedding": drawn(12, 9)}
    with pytest.raises(ValueError, match=r"`wte` is of shape \(10, 8\).*vocab=10, embed=9"):
        load(tmp_path, wider, TABLE)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (("w", "w", "in out"), "an arrow"),
        (("w", "w", "in -> in out"), "each dim is there once"),
        (("w.{layers}", "w", "in -> in"), "in braces are on the right"),
        (("w", "w", "in in -> in in"), "each dim is there once"),
        (("w", "w", "(heads size in -> heads size in"), "an arrow"),
        (("w.{}", "w", "in -> layers in"), "name the dim that counts"),
        (("w", "w", "in -> in", Part("two", 0, 2)), "that of a `Part` on the left"),
    ],
)
def test_rules_that_say_nothing_are_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        Rule(*rule)


def test_numbers_that_a_dtype_cannot_hold_are_refused(tmp_path):
    table = Table((Rule("w", "w", "in -> in"),))
    large = {"w": np.array([0.5, 1e6], "f")}
    with pytest.raises(ValueError, match=r"`w` has numbers up to 1e\+06, which that cannot"):
        save(tmp_path, large, table, dtype="float16")
    with pytest.raises(ValueError, match=r"dtype='int8'.*`w` is of dtype float32"):
        save(tmp_path, large, table, dtype="int8")
    # Nothing of a file that was begun is left.
    assert not list(tmp_path.iterdir())
    safetensors.numpy.save_file({"w": np.ones(2, "i1")}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="quantized weights are not known"):
        load(tmp_path, large, table)


LAYERS = {"layers": (3, 2)}
UNEQUAL = Table(
    (
        Rule("l.{layers}.w", "first", "rank in -> layers rank in", Span("rank", 0, 7), LAYERS),
        Rule(
            "l.{layers}.w", "second", "size in -> layers in size",
            Span("size", 3, 7), LAYERS, {"size": (1, 3, 0, 2)},
        ),
    )
)  # fmt: skip


def test_parts_of_different_sizes_and_in_another_order(tmp_path):
    generator = np.random.default_rng(0)
    draw = lambda *shape: generator.standard_normal(shape).astype("f")
    parameters = {"first": draw(2, 3, 8), "second": draw(2, 8, 4)}
    save(tmp_path, parameters, UNEQUAL)
    found = reference(tmp_path)
    assert set(found) == {"l.3.w", "l.5.w"}
    for number, name in enumerate(("l.3.w", "l.5.w")):
        np.testing.assert_array_equal(found[name][:3], parameters["first"][number])
        for place, row in enumerate((1, 3, 0, 2)):
            of_place = parameters["second"][number, :, place]
            np.testing.assert_array_equal(found[name][3 + row], of_place)
    # Where the dim in another order is split, each device takes its own.
    mesh = sl.make_mesh("data=2,model=4")
    spec = {"first": P(None, None, "model"), "second": P(None, "data", "model")}
    like = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec[name]))
        for name, x in parameters.items()
    }
    read = load(tmp_path, like, UNEQUAL)
    for name, x in parameters.items():
        np.testing.assert_array_equal(read[name], x)
        assert read[name].sharding.spec == spec[name]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"part": Span("x", 0, 2)}, "no dim that both"),
        ({"part": Span("layers", 0, 2)}, "no dim that both"),
        ({"numbers": {"in": (0, 1)}}, "has not in braces|has `in`"),
        ({"numbers": {"layers": (0, 0)}}, "numbers"),
        ({"numbers": {"layers": 3}}, "numbers"),
        ({"orders": {"layers": (0, 1)}}, "no dim that both"),
        ({"orders": {"in": (0, 2)}}, "orders"),
    ],
)
def test_rules_that_contradict_themselves_are_refused(rule, message):
    with pytest.raises(ValueError, match=message):
        Rule("w.{layers}", "w", "in -> layers in", **rule)


def test_sizes_that_do_not_fit_spans_and_orders_are_refused(tmp_path):
    first, second = UNEQUAL.rules
    tree = {"first": np.zeros((2, 3, 8), "f"), "second": np.zeros((2, 8, 4), "f")}
    with pytest.raises(ValueError, match="goes beyond the 7"):
        save(tmp_path, {**tree, "second": np.zeros((2, 8, 5), "f")}, UNEQUAL)
    with pytest.raises(ValueError, match="the order of its rule is of 4"):
        save(tmp_path, {**tree, "second": np.zeros((2, 8, 3), "f")}, UNEQUAL)
    with pytest.raises(ValueError, match="do not make up `l.3.w`"):
        save(tmp_path, {**tree, "first": np.zeros((2, 2, 8), "f")}, UNEQUAL)
    with pytest.raises(ValueError, match="do not make up `l.3.w`"):
        save(tmp_path, {"first": tree["first"]}, Table((first,)))
    with pytest.raises(ValueError, match="below|first"):
        Span("rank", 7, 7)
    assert second.part.total == 7


def test_tables_with_sizes_of_unknown_dims_are_refused():
    with pytest.raises(ValueError, match="has `vocabulary`, which is no dim"):
        replace(TABLE, sizes={"vocabulary": 10})


def test_experts_that_nobody_chooses_are_in_no_file(tmp_path):
    of = replace(config("mixtral"), experts=3, padded_to=4, layers=2)
    strategy = sl.Strategy(mesh="data=4,model=2", rules=sl.rules.experts | sl.rules.tensor)
    state = sl.init(lambda: hub.model(of, nnx.Rngs(0)), optax.sgd(1.0), strategy)
    save(tmp_path, state, hub.table(of))
    experts = {name.split("experts.")[1][0] for name in reference(tmp_path) if "experts." in name}
    assert experts == {"0", "1", "2"}
    found = load(tmp_path, state, hub.table(of)).params["blocks"]["expert"]["mlp"]["up"]
    own = state.params["blocks"]["expert"]["mlp"]["up"]
    np.testing.assert_array_equal(found[:, :3], own[:, :3])
    assert not np.any(found[:, 3])


def test_parameters_in_the_memory_of_the_host_are_read_and_written(tmp_path):
    expected = tree()
    on_host = jax.tree.map(
        lambda x: jax.device_put(x, jax.memory.Space.Host), jax.tree.map(jnp.asarray, expected)
    )
    save(tmp_path, on_host, TABLE)
    found = load(tmp_path, on_host, TABLE)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert found["blocks"]["up"].sharding == on_host["blocks"]["up"].sharding


def test_parts_that_are_missing_are_refused(tmp_path):
    table = Table((Rule("kv", "k", "(two in) -> in", Part("two", 0, 2)),))
    with pytest.raises(ValueError, match="`k` do not make up `kv` part by part"):
        save(tmp_path, {"k": drawn(2)}, table)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"model_type": "bert"}, "of type 'bert'"),
        (
            {"model_type": "llama", "rope_scaling": {"type": "longrope", "factor": 8.0}},
            "rotary positions of type 'longrope'",
        ),
        ({"model_type": "llama", "quantization_config": {"bits": 4}}, "`quantization_config`"),
        ({"model_type": "gpt2", "scale_attn_weights": False}, "`scale_attn_weights` False"),
        (
            {"model_type": "gemma2", "layer_types": ["full_attention", "sliding_attention"] * 2},
            "at equal distances",
        ),
        ({"model_type": "gemma", "hidden_act": "relu"}, "`hidden_act` 'relu'"),
        ({"model_type": "deepseek_v3", "scoring_func": "softmax"}, "`scoring_func` 'softmax'"),
        ({"model_type": "llama", "max_position_embeddings": 64}, "has no `num_hidden_layers`"),
        (
            {"model_type": "qwen3_moe", "max_position_embeddings": 64},
            "`norm_topk_prob` False",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "`attention_bias` True"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "`hidden_act` 'gelu'"),
        (
            {"model_type": "mistral", "layer_types": ["chunked_attention"]},
            "`layer_types` \\['chunked_attention'\\]",
        ),
    ],
)
def test_configurations_that_the_models_do_not_know_are_refused(said, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=message):
        hub.config(tmp_path)


def test_the_command_line_says_its_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"shardlib {sl.__version__}\n"


def test_the_command_line_without_a_command_lists_all(capsys):
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(f"    {command} " in listed for command in ("plan", "pipeline", "weights"))
