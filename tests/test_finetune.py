"""`finetune.py`, `generate.py` and `export.py` as a user starts them, one after the other."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

import shardlib as sl
from examples import export, finetune, generate
from examples.fields import override
from examples.find_run import recorded
from models import gpt, hub, moe
from models.attention import Scores
from shardlib.__main__ import main
from shardlib._tree import named_leaves
from shardlib.data import Chat, Corpus, load_tokenizer

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tokenizers")
ROOT = Path(__file__).parent.parent
CONFIG = gpt.GPTConfig(
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    hidden=48,
    context=64,
    vocab=260,
    norm="rms",
    positions="rotary",
    mlp="swiglu",
    bias=False,
    tied=False,
)
FIELDS = (
    "--data.chat plain --lora.rank 2 --optimizer.warmup 1 --optimizer.learning_rate 0.01 "
    "--loop.save_every 2 --loop.evaluate_every 2 --evaluation_batches 1 --data.held_out 0.1"
)


def published(folder, config=CONFIG):
    """A folder as those have that publish models."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    folder.mkdir()
    sl.weights.save(folder, gpt.GPT(config, rngs=nnx.Rngs(3)), hub.table(config))
    (folder / "config.json").write_text(json.dumps(hub.description(config)))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=["<s>", "<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    return folder


def chats(folder):
    """Sums, as conversations."""
    pairs = [(number % 7, number // 7) for number in range(70)]
    lines = [json.dumps({"prompt": f"{a} + {b}?", "completion": str(a + b)}) for a, b in pairs]
    (folder / "chats.jsonl").write_text("\n".join(lines))
    return folder / "chats.jsonl"


def tune(start, files, where, *more):
    command = [sys.executable, "examples/finetune.py", str(start), str(files), *FIELDS.split()]
    places = ["--folder", str(where), "--cache", str(where.parent / "cache")]
    done = subprocess.run([*command, *places, *more], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def weights(folder):
    files = sl.weights.open_tensors(folder)
    return {name: files.read(name) for name in files.tensors}


@pytest.fixture
def no_cache():
    before = jax.config.jax_compilation_cache_dir
    yield
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.long
def test_a_published_model_is_tuned_stopped_continued_asked_and_exported(
    tmp_path, capsys, no_cache
):
    start, files = published(tmp_path / "small"), chats(tmp_path)
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    said = tune(start, files, straight, "--loop.steps", "6")
    assert "The run begins with the weights of" in said and "tokens of train are learned" in said
    # As if it had been killed after step 4.
    shutil.copytree(straight, stopped)
    shutil.rmtree(stopped / "checkpoints" / "6")
    tune(start, files, stopped, "--loop.steps", "6")
    for source in (straight, stopped):
        export.main([str(source), str(tmp_path / f"{source.name}-out")])
    tuned = weights(tmp_path / "straight-out")
    for name, tensor in weights(tmp_path / "stopped-out").items():
        np.testing.assert_array_equal(tensor, tuned[name], err_msg=name)
    before = weights(start)
    assert tuned.keys() == before.keys()
    changed = {name for name in tuned if not np.array_equal(tuned[name], before[name])}
    kernels = {name for name in tuned if "_proj." in name}
    assert changed == kernels
    out = tmp_path / "straight-out"
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_text() == (start / name).read_text()
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": [1]}
    capsys.readouterr()
    generate.main([str(straight), "--prompt", "1 + 2?", "--tokens", "4"])
    answer = capsys.readouterr().out
    assert "user" not in answer and "+" not in answer.partition("\n")[0][:1]


@pytest.mark.long
def test_published_and_imported_models_are_asked(tmp_path, capsys, no_cache):
    start, imported = published(tmp_path / "small"), tmp_path / "imported"
    assert main(["weights", "import", str(start), str(imported)]) == 0
    capsys.readouterr()
    answers = []
    for folder in (start, imported):
        asked = [str(folder), "--prompt", "1 + 2?", "--tokens", "6", "--temperature", "0"]
        generate.main(asked)
        answers.append(capsys.readouterr().out)
        generate.main([*asked, "--chat", "plain"])
        answers.append(capsys.readouterr().out)
    assert answers[0].startswith("1 + 2?") and answers[:2] == answers[2:]
    for folder, options, message in (
        (start, ("--chat", "plian"), "did you mean 'plain'"),
        (start, ("--step", "2"), "has no checkpoints, and so none of step 2"),
        (imported, ("--step", "2"), "there are: 0"),
    ):
        with pytest.raises(SystemExit, match=message):
            generate.main([str(folder), "--prompt", "1", *options])


@pytest.mark.long
def test_a_run_begins_with_an_imported_model(tmp_path, no_cache):
    start, imported = published(tmp_path / "small"), tmp_path / "imported"
    assert main(["weights", "import", str(start), str(imported)]) == 0
    files, losses = chats(tmp_path), []
    for folder in (start, imported):
        tune(folder, files, tmp_path / f"{folder.name}-run", "--loop.steps", "2")
        records = (tmp_path / f"{folder.name}-run" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line).get("loss") for line in records])
    assert losses[0] == losses[1] and any(losses[0])


@pytest.mark.long
def test_what_has_factors_is_tuned_again_on_another_machine(tmp_path, no_cache):
    start, files = published(tmp_path / "small"), chats(tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    tune(start, files, first, "--loop.steps", "2")
    # As if it had been trained on more devices than are here.
    recorded_as = json.loads((first / "run.json").read_text())
    recorded_as["strategy.mesh"] = "'data=8,model=2'"
    (first / "run.json").write_text(json.dumps(recorded_as))
    machine = ["--strategy.mesh", "data=4,model=2", "--strategy.rules", "data|tensor"]
    said = tune(first, files, second, "--loop.steps", "2", *machine)
    assert "The run begins with the weights of" in said


@pytest.mark.long
def test_a_run_of_ours_is_tuned_whole_and_exported(tmp_path, capsys, no_cache):
    files = chats(tmp_path)
    small = "--model.layers 1 --model.width 32 --model.hidden 48 --model.context 64 --batch 8"
    train = [sys.executable, "examples/train_lm.py", "tiny", *small.split(), "--prompt", ""]
    options = ["--data.files", str(ROOT / "shardlib/data"), "--data.tokenizer", "bpe:280"]
    places = ["--folder", str(tmp_path / "first"), "--cache", str(tmp_path / "cache")]
    loop = ["--loop.steps", "4", "--optimizer.warmup", "1", "--model.vocab", "280"]
    subprocess.run([*train, *options, *places, *loop], cwd=ROOT, check=True, capture_output=True)
    second = tmp_path / "second"
    tune(tmp_path / "first", files, second, "--loop.steps", "2", "--lora.rank", "0")
    export.main([str(tmp_path / "first"), str(tmp_path / "one")])
    export.main([str(second), str(tmp_path / "two"), "--dtype", "bfloat16"])
    of = recorded(second / "run.json").model
    read = hub.config(tmp_path / "two")
    assert hub.description(read) == hub.description(of)
    said = json.loads((tmp_path / "two" / "tokenizer_config.json").read_text())
    assert said["eos_token"] == "<|endoftext|>"
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert all(tensor.dtype.name == "bfloat16" for tensor in two.values())
    for name in one:
        near = np.abs(one[name].astype("f") - two[name].astype("f")).max()
        assert 0 < near < 0.1, name


LLAMA = {"norm": "rms", "positions": "rotary", "mlp": "swiglu", "bias": False}
MIXTRAL = moe.MoEConfig(2, 32, 4, 64, 96, tied=False, **LLAMA)
GEMMA = gpt.GPTConfig(
    2, 32, 4, 64, 96, head_dim=16, tied=True, norm_from_zero=True, scaled_embedding=True,
    **LLAMA | {"mlp": "geglu"},
)  # fmt: skip
CAPS = {"attention_cap": 50.0, "logit_cap": 30.0}
DESCRIBED = {
    "gpt2": gpt.tiny(),
    "llama": CONFIG,
    "llama3.1": dataclasses.replace(CONFIG, rope_scaling=gpt.RopeScaling(4.0, context=32)),
    "qwen2": dataclasses.replace(CONFIG, qkv_bias=True),
    "qwen3": gpt.GPTConfig(2, 32, 4, 64, 96, query_key_norm=True, **LLAMA),
    "mistral": dataclasses.replace(CONFIG, window=8),
    "yarn": dataclasses.replace(CONFIG, rope_scaling=gpt.YarnScaling(4.0, 32, 8.0, 2.0, 1.1)),
    "gemma": GEMMA,
    "gemma2": dataclasses.replace(GEMMA, **CAPS, layers=4, post_norms=True, full_every=2, window=8),
    "gemma2, windows alone": dataclasses.replace(GEMMA, post_norms=True, window=8),
    "gemma2, no windows": dataclasses.replace(GEMMA, post_norms=True),
    "gemma3": dataclasses.replace(
        GEMMA,
        layers=5,
        post_norms=True,
        query_key_norm=True,
        window=8,
        full_every=3,
        local_rope_theta=100.0,
        rope_scaling=gpt.LinearScaling(4.0),
        attention_scale=24**-0.5,
    ),
    "deepseek_v3": moe.tiny_deepseek(),
    "deepseek_v3, yarn": moe.tiny_deepseek(
        rope_scaling=gpt.YarnScaling(4.0, 32), attention_scale=0.4, dense_layers=None
    ),
    "mixtral": MIXTRAL,
    "qwen3_moe": dataclasses.replace(MIXTRAL, query_key_norm=True, expert_hidden=24, tied=True),
}


# What publishers have written, with the fields that say something of the layers.
GEMMA_3 = {
    "model_type": "gemma3_text", "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
    "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_local_base_freq": 10000,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "attention_bias": False, "vocab_size": 262144,
}  # fmt: skip
GEMMA_2 = {
    "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
    "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42,
    "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "vocab_size": 32000,
}  # fmt: skip
QWEN_2 = {**MISTRAL, "model_type": "qwen2", "max_window_layers": 21, "use_sliding_window": False}
DEEPSEEK = {
    "model_type": "deepseek_v3", "attention_bias": False, "aux_loss_alpha": 0.0001, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
    "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
YARN_SIZE = 0.1 * math.log(40) + 1
PUBLISHED = {
    "gemma3_1b": (GEMMA_3, gpt.gemma3_1b()),
    "gemma2_9b": (GEMMA_2, gpt.gemma2_9b()),
    "mistral_7b": (MISTRAL, gpt.mistral_7b(context=32_768)),
    # Windows that are named and not used.
    "qwen2": (QWEN_2, gpt.mistral_7b(context=32_768, window=None, qkv_bias=True)),
    "qwen2 says nothing of use": (
        {**MISTRAL, "model_type": "qwen2"},
        gpt.mistral_7b(context=32_768, window=None, qkv_bias=True),
    ),
    "llama": (
        {**MISTRAL, "model_type": "llama"},
        gpt.mistral_7b(context=32_768, window=None),
    ),
    "mistral without": (
        {**MISTRAL, "sliding_window": None}, gpt.mistral_7b(context=32_768, window=None)
    ),
    "all see all": (
        {**GEMMA_2, "sliding_window_pattern": 1}, gpt.gemma2_9b(window=None, full_every=None)
    ),
    "deepseek_v3": (
        DEEPSEEK,
        moe.deepseek_v3(
            context=163_840, rope_scaling=gpt.YarnScaling(40.0, 4096, 32.0, 1.0, 1.0),
            attention_scale=YARN_SIZE**2 / math.sqrt(192),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configurations_are_those_of_the_models(kind, tmp_path):
    said, expected = PUBLISHED[kind]
    (tmp_path / "config.json").write_text(json.dumps(said))
    found = hub.config(tmp_path)
    # What is left out where it is as by default is the same.
    assert found.dims == expected.dims
    same = dict.fromkeys(("kv_heads", "head_dim"))
    assert dataclasses.replace(found, **same) == dataclasses.replace(expected, **same)


def test_a_window_stays_where_sequences_are_shorter(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    (tmp_path / "tokenizer.json").write_text('{"post_processor": null}')
    run = finetune.tuned(str(tmp_path), "x.jsonl")
    assert run.model.context == 2048
    longer = override(run, ["--model.context", "8192"])
    assert longer.model.window == 4096
    # Where it hides nothing, attention has none.
    short = lambda config: Scores.of(config, causal=True, local=True).window
    assert short(run.model) is None and short(longer.model) == 4096


def test_a_model_that_was_changed_is_described_as_it_is(tmp_path):
    start, out = published(tmp_path / "small"), tmp_path / "out"
    out.mkdir()
    run = finetune.tuned(str(start), "x.jsonl")
    export._write_beside(tmp_path, run, out, "float32")
    assert (out / "config.json").read_text() == (start / "config.json").read_text()
    changed = override(run, ["--model.rope_scaling", "LinearScaling(2.0)"])
    export._write_beside(tmp_path, changed, out, "float32")
    assert hub.config(out).rope_scaling == gpt.LinearScaling(2.0)


def test_a_model_is_described_by_the_dtype_of_its_files_and_the_longest_context(tmp_path):
    start, out = published(tmp_path / "small"), tmp_path / "out"
    out.mkdir()
    said = json.loads((start / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    (start / "config.json").write_text(json.dumps(said))
    for context, expected in ((32, 64), (128, 128)):
        run = override(finetune.tuned(str(start), "x.jsonl"), ["--model.context", str(context)])
        export._write_beside(tmp_path, run, out, "float32")
        exported = json.loads((out / "config.json").read_text())
        changes = {"torch_dtype": "float32", "max_position_embeddings": expected}
        assert exported == said | changes


def test_what_an_older_model_left_beside_its_weights_is_removed(tmp_path):
    start, out = published(tmp_path / "small"), tmp_path / "out"
    out.mkdir()
    (out / "chat_template.jinja").write_text("of another model")
    (out / "generation_config.json").write_text('{"top_k": 3}')
    export._write_beside(tmp_path, finetune.tuned(str(start), "x.jsonl"), out, "float32")
    assert not (out / "chat_template.jinja").exists()
    assert "top_k" not in (out / "generation_config.json").read_text()


def test_a_tokenizer_that_is_in_the_folder_of_an_export_stays_there(tmp_path, monkeypatch):
    out = published(tmp_path / "out")
    text = (out / "tokenizer.json").read_text()
    run = dataclasses.replace(finetune.tuned(str(out), "x.jsonl"), start="")
    monkeypatch.setattr(export, "tokenizer_of", lambda source: str(out / "tokenizer.json"))
    names = export._write_beside(str(tmp_path), run, out, "float32")
    assert "tokenizer.json" in names and (out / "tokenizer.json").read_text() == text


def test_a_model_is_not_exported_over_the_one_it_began_with_or_without_it(tmp_path):
    start = published(tmp_path / "small")
    with pytest.raises(ValueError, match="which would be replaced: name another folder"):
        export._check_published(start, tmp_path / "out" / ".." / "small")
    shutil.rmtree(start)
    with pytest.raises(ValueError, match="which is gone: put it back"):
        export._check_published(start, tmp_path / "out")


def test_a_configuration_that_is_no_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{x")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        hub.config(tmp_path)


def test_tokens_that_texts_begin_with_are_found(tmp_path):
    folder = published(tmp_path / "small")
    assert hub.begin_token(folder) == "<s>"
    settings = folder / "tokenizer_config.json"
    for said, expected in (
        ({"add_bos_token": False, "bos_token": "<s>"}, None),
        ({"add_bos_token": True, "bos_token": {"content": "<b>"}}, "<b>"),
        ({"bos_token": "<b>"}, "<s>"),
    ):
        settings.write_text(json.dumps(said))
        assert hub.begin_token(folder) == expected
    settings.write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        hub.begin_token(folder)


@pytest.mark.parametrize("kind", DESCRIBED)
def test_runs_of_all_models_are_taken_up_again(kind, tmp_path):
    start = tmp_path / "small"
    start.mkdir()
    (start / "config.json").write_text(json.dumps(hub.description(DESCRIBED[kind])))
    (start / "tokenizer.json").write_text('{"post_processor": null}')
    run = finetune.tuned(str(start), "x.jsonl")
    assert type(run.model) is type(DESCRIBED[kind])
    (tmp_path / "run.json").write_text(json.dumps(run.lines()))
    assert recorded(tmp_path / "run.json") == run
    if kind in ("llama", "deepseek_v3"):
        run = override(run, ["--model.rope_scaling", "LinearScaling(2.0)"])
        assert run.model.rope_scaling == gpt.LinearScaling(2.0)
    if kind == "mixtral":
        run = override(run, ["--model.router", "TopK(1)"])
        assert run.model.router == sl.experts.TopK(1)


@pytest.mark.parametrize("kind", DESCRIBED)
def test_configurations_are_written_and_read(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hub.description(DESCRIBED[kind])))
    found = hub.config(tmp_path)
    assert hub.description(found) == hub.description(DESCRIBED[kind])
    # What is said, and is so by default.
    said = ("kv_heads", "head_dim", "hidden", "expert_hidden", "attention_scale")
    same = {field: None for field in said if hasattr(found, field)}
    scales = [
        config.attention_scale or config.dims["head_dim"] ** -0.5
        for config in (found, DESCRIBED[kind])
    ]
    assert scales[0] == pytest.approx(scales[1], rel=1e-12)
    assert dataclasses.replace(found, **same) == dataclasses.replace(DESCRIBED[kind], **same)
    assert found.dims == DESCRIBED[kind].dims and type(found) is type(DESCRIBED[kind])
    make = lambda config: dict(
        named_leaves(
            nnx.eval_shape(lambda: nnx.to_pure_dict(nnx.state(hub.model(config, nnx.Rngs(0)))))
        )
    )
    shapes = {path: leaf.shape for path, leaf in make(found).items()}
    assert shapes == {path: leaf.shape for path, leaf in make(DESCRIBED[kind]).items()}


def test_configurations_that_nobody_publishes_are_refused():
    sparse = MIXTRAL
    for config in (
        dataclasses.replace(sparse, qkv_bias=True),
        dataclasses.replace(sparse, z=0.1),
        gpt.tiny(kv_heads=2),
        gpt.tiny(head_dim=8),
        gpt.tiny(norm="rms"),
        gpt.tiny(norm_first=False),
        moe.MoEConfig(2, 32, 4, 64, 96),
        dataclasses.replace(GEMMA, scaled_embedding=False),
        dataclasses.replace(GEMMA, attention_cap=2.0),
        dataclasses.replace(sparse, router=sl.experts.SigmoidTopK(2), balance_bias=True),
    ):
        with pytest.raises(ValueError, match="No published model has the layers"):
            hub.description(config)
    with pytest.raises(
        ValueError, match="nearest are those of 'gemma', and it differs in `scaled_"
    ):
        hub.description(dataclasses.replace(GEMMA, scaled_embedding=False))
    odd = dataclasses.replace(GEMMA, post_norms=True, attention_scale=0.3)
    with pytest.raises(ValueError, match="not 1 over the root"):
        hub.description(odd)
    plain = moe.tiny_deepseek(latent=None)
    with pytest.raises(ValueError, match="nearest are those of 'deepseek_v3'.*`latent`"):
        hub.description(plain)
    scaled = dataclasses.replace(DESCRIBED["gemma3"], local_rope_theta=None)
    with pytest.raises(ValueError, match="say `local_rope_theta"):
        hub.description(scaled)
    with pytest.raises(ValueError, match="with YaRN's positions alone"):
        hub.description(moe.tiny_deepseek(attention_scale=0.4))


def refused(*arguments):
    with pytest.raises(SystemExit) as caught:
        finetune.main([str(one) for one in arguments])
    return str(caught.value)


def test_patterns_and_formats_are_read_from_the_command_line(tmp_path):
    run = finetune.tuned(str(published(tmp_path / "small")), "x.jsonl")
    assert (run.data.begin, run.data.end) == ("<s>", "<end>")
    tokenizer = load_tokenizer(run.data.tokenizer, run.data.end)
    assert run.prompt_ids(tokenizer, "a")[0] == 0 and len(run.prompt_ids(tokenizer, "a")) == 2
    chat = "Chat(before='[{role}] ', after='.')"
    run = override(run, ["--lora.paths", ".*/(query|value)", "--data.chat", chat])
    assert run.lora.paths == (".*/(query|value)",)
    assert run.data.chat == Chat(before="[{role}] ", after=".")
    (tmp_path / "run.json").write_text(json.dumps(run.lines()))
    assert recorded(tmp_path / "run.json") == run


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (CONFIG, {"contxt": 8}, r"contxt=...\)`: `GPTConfig` has no.*did you mean `context`\?"),
        (MIXTRAL, {"exprts": 8}, r"`MoEConfig` has no such field; did you mean `experts`\?"),
        (CONFIG, {"balance_bias": True}, "no such field; it has layers, width, "),
    ],
)
def test_fields_of_a_published_model_are_changed_by_their_names(config, changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hub.description(config)))
    assert hub.config(tmp_path, context=8).context == 8
    with pytest.raises(ValueError, match=message):
        hub.config(tmp_path, **changes)


def test_a_run_is_tuned_with_its_own_markers(tmp_path):
    tokenizer = published(tmp_path / "small") / "tokenizer.json"
    markers = {"end": "<end>", "begin": "<s>", "unknown": "<unk>"}
    before = dataclasses.replace(
        finetune.tuned(str(tmp_path / "small"), "x.txt"),
        data=Corpus("x.txt", tokenizer=str(tokenizer), **markers),
    )
    folder = tmp_path / "first"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(before.lines()))
    data = finetune.tuned(str(folder), "y.txt").data
    assert {name: getattr(data, name) for name in markers} == markers


def test_folders_that_cannot_be_started_from_are_named(tmp_path):
    assert "neither a `config.json`" in refused(tmp_path, "x.jsonl")
    start = published(tmp_path / "small")
    assert "did you mean" in refused(start, chats(tmp_path), "--lora.rnk", "2")
    assert "a whole number" in refused(start, chats(tmp_path), "--lora.rank", "-1")
    assert "no regular expression" in refused(start, chats(tmp_path), "--lora.paths", "(")
    assert "Muon moves kernels" in refused(start, chats(tmp_path), "--optimizer", "muon")
    frozen = ("--strategy.frozen", "('embedding',)")
    assert "all else is frozen already" in refused(start, chats(tmp_path), *frozen)
    (start / "tokenizer.json").write_text("{")
    assert "is no tokenizer" in refused(start, "x.jsonl")
    (start / "tokenizer.json").unlink()
    assert "has no `tokenizer.json`" in refused(start, "x.jsonl")
    (start / "config.json").write_text('{"model_type": "bert"}')
    assert "of a model of type 'bert'" in refused(start, "x.jsonl")
    with pytest.raises(SystemExit, match="no folder of a run"):
        export.main([str(start), str(tmp_path / "out")])
