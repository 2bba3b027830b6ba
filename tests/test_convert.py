"""`shardlib weights import` and `export`: published files as checkpoints, and back."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

import shardlib as sl
from models import gpt, hub
from shardlib.__main__ import main
from shardlib.weights import local_folder

CONFIG = gpt.GPTConfig(
    layers=2,
    width=16,
    heads=4,
    kv_heads=2,
    hidden=24,
    context=16,
    vocab=40,
    norm="rms",
    positions="rotary",
    mlp="swiglu",
    bias=False,
    tied=False,
)


@pytest.fixture
def published(tmp_path):
    """A folder as those have that publish models."""
    folder = tmp_path / "small"
    model = gpt.GPT(CONFIG, rngs=nnx.Rngs(3))
    sl.weights.save(folder, model, hub.table(CONFIG), file_size=4000)
    (folder / "config.json").write_text(json.dumps(hub.description(CONFIG)))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "code.py").write_text("raise SystemExit")
    return folder


@pytest.mark.long
def test_published_files_become_a_checkpoint_and_are_the_same_again(published, tmp_path, capsys):
    imported, exported = tmp_path / "imported", tmp_path / "exported"
    assert main(["weights", "import", str(published), str(imported)]) == 0
    count = sum(leaf.size for leaf in jax.tree.leaves(gpt.GPT(CONFIG, rngs=nnx.Rngs(0))))
    assert f"{count:,} parameters of step 0" in capsys.readouterr().out
    names = {path.name for path in imported.iterdir()}
    assert names == {"checkpoints", "config.json", "tokenizer.json"}
    assert main(["weights", "export", str(imported), str(exported)]) == 0
    assert main(["weights", "diff", str(published), str(exported)]) == 0
    for folder in (imported, exported):
        assert json.loads((folder / "config.json").read_text()) == hub.description(CONFIG)
    # A run with an optimizer, on a mesh of its own, begins with it.
    strategy = sl.Strategy(
        mesh="data=2,context=2,model=2",
        rules=sl.rules.data | sl.rules.tensor | sl.rules.context("ring"),
        zero=sl.Zero(3, small=0),
    )
    state = sl.init(lambda: hub.model(CONFIG, nnx.Rngs(0)), optax.adamw(1e-3), strategy)
    with sl.Checkpoints(imported / "checkpoints") as checkpoints:
        begun = checkpoints.restore_model(state).state
    wanted = sl.weights.load(published, state, hub.table(CONFIG))
    for one, other in zip(
        jax.tree.leaves(begun.params), jax.tree.leaves(wanted.params), strict=True
    ):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_an_import_that_was_cut_off_is_done_again(published, tmp_path):
    imported = tmp_path / "imported"
    (imported / "checkpoints" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    assert main(["weights", "import", str(published), str(imported)]) == 0
    assert main(["weights", "export", str(imported), str(tmp_path / "exported")]) == 0
    assert main(["weights", "diff", str(published), str(tmp_path / "exported")]) == 0


@pytest.mark.long
def test_a_model_is_imported_and_exported_within_its_own_folder(published, capsys):
    before = sl.weights.open_tensors(published)
    kept = {name: np.array(before.read(name)) for name in before.tensors}
    # What runs have in their folders is not the model's.
    (published / "run.json").write_text("{}")
    assert main(["weights", "import", str(published), str(published)]) == 0
    assert main(["weights", "export", str(published), str(published)]) == 0
    after = sl.weights.open_tensors(published)
    assert after.tensors.keys() == kept.keys()
    for name, tensor in kept.items():
        np.testing.assert_array_equal(after.read(name), tensor)
    elsewhere = published.parent / "elsewhere"
    assert main(["weights", "export", str(published), str(elsewhere)]) == 0
    assert not (elsewhere / "run.json").exists()


def test_safetensors_are_in_folders_of_this_machine(published, capsys):
    for arguments in (
        ["import", "gs://bucket/model", "out"],
        ["export", str(published), "gs://x/y"],
    ):
        assert main(["weights", *arguments]) == 2
        assert "is no folder of this machine" in capsys.readouterr().err


def test_an_export_has_the_dtype_and_the_step_that_were_asked_for(published, tmp_path, capsys):
    imported, exported = tmp_path / "imported", tmp_path / "exported"
    main(["weights", "import", str(published), str(imported)])
    command = ["weights", "export", str(imported), str(exported)]
    assert main([*command, "--dtype", "bfloat16", "--step", "0"]) == 0
    tensors = sl.weights.open_tensors(exported).tensors
    assert {tensor.dtype for tensor in tensors.values()} == {jnp.dtype("bfloat16")}
    assert main([*command, "--step", "7"]) == 2
    assert "No checkpoint of step 7" in capsys.readouterr().err


MINE = """
import jax.numpy as jnp
import shardlib as sl
from shardlib.weights import Rule, Table

def make():
    return sl.annotate({"w": jnp.zeros((8, 6))}, {"w": ("in", "out")})

def read(folder):
    return make, Table((Rule("linear.weight", "w", "out in -> in out"),))

def wrong(folder):
    return make()

def careful(folder):
    raise ValueError(f"there is no sizes.json in {folder}")
"""


def test_a_model_of_ones_own_is_converted_by_its_own_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    kernel = np.random.default_rng(0).normal(size=(8, 6)).astype("f")
    table = sl.weights.Table((sl.weights.Rule("linear.weight", "w", "out in -> in out"),))
    sl.weights.save(tmp_path / "theirs", {"w": kernel}, table)
    mine = ["--model", "mine.py:read"]
    assert main(["weights", "import", "theirs", "ours", *mine]) == 0
    assert main(["weights", "export", "ours", "again", *mine]) == 0
    assert main(["weights", "diff", "theirs", "again"]) == 0
    capsys.readouterr()
    for arguments, message in (
        (["theirs", "ours", *mine], "`ours` has checkpoints already"),
        (["nowhere", "other", *mine], "There is no folder `nowhere`"),
        (["theirs", "other"], "Run this in a clone"),
        (["theirs", "other", "--model", "mine.py:raed"], "`mine.py` has no function `raed`"),
        (["theirs", "other", "--model", "mine.py:wrong"], "is to return a function that makes"),
        (["theirs", "other", "--model", "mine"], "write `FILE.py:NAME`"),
    ):
        assert main(["weights", "import", *arguments]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "other").exists()
    assert main(["weights", "export", "theirs", "again", *mine]) == 2
    assert "has no checkpoints, in a folder `checkpoints`" in capsys.readouterr().err
    # What a function says of a folder of this machine has the folder's own name.
    assert main(["weights", "export", "ours", "again", "--model", "mine.py:careful"]) == 2
    assert "there is no sizes.json in ours\n" in capsys.readouterr().err
    assert main(["weights", "export", "nowhere", "again", *mine]) == 2
    assert not (tmp_path / "nowhere").exists() and not (tmp_path / "theirs/checkpoints").exists()


def test_models_of_the_hub_are_downloaded_once_asked_for(published, monkeypatch):
    asked = []

    def snapshot_download(repository, *, revision, allow_patterns, ignore_patterns):
        asked.append((repository, revision))
        # Programs that somebody has put beside weights are not wanted.
        assert not any(pattern.endswith(("*", ".py", ".bin")) for pattern in allow_patterns)
        if repository == "small/private":
            raise PermissionError("401: log in\nmore")
        return str(published)

    client = types.SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    assert local_folder("hf:small/small@v1") == published
    assert main(["weights", "show", "hf:small/small"]) == 0
    assert asked == [("small/small", "v1"), ("small/small", None)]
    with pytest.raises(
        OSError, match=r"`hf:small/private` could not be downloaded: 401: log in more$"
    ):
        local_folder("hf:small/private")
    for wrong in ("hf:small", "hf:a/b/c", "hf:../x y"):
        with pytest.raises(ValueError, match="is no model of the Hugging Face hub"):
            local_folder(wrong)
    # A folder is never looked for elsewhere.
    assert str(local_folder("small/small")) == "small/small"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"pip install \"shardlib\[hub\]\""):
        local_folder("hf:small/small")


def test_what_is_replaced_is_released_first(published):
    pipeline = sl.Strategy(
        mesh="data=2,stage=2,model=2",
        rules=sl.rules.data | sl.rules.tensor | sl.rules.pipeline,
        pipeline=sl.pipeline.Interleaved(stages=2, microbatches=4, chunks=1),
    )
    state = sl.init(lambda: hub.model(CONFIG, nnx.Rngs(0)), None, pipeline)
    table = hub.table(CONFIG)
    wanted = sl.weights.load(published, state, table).weights
    # Files of another model delete nothing.
    with pytest.raises(ValueError, match="it has no rule for `blocks/"):
        sl.weights.load(published, state, sl.weights.Table(table.rules[:3]), release=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    loaded = sl.weights.load(published, state, table, release=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    jax.tree.map(np.testing.assert_array_equal, loaded.weights, wanted)


def test_long_reads_and_writes_show_how_far_they_are(published, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("shardlib._progress._QUIET_SECONDS", 0)
    like = jax.eval_shape(lambda: nnx.to_pure_dict(nnx.state(gpt.GPT(CONFIG, rngs=nnx.Rngs(0)))))
    loaded = sl.weights.load(published, like, hub.table(CONFIG))
    assert capsys.readouterr().err.startswith("shardlib.weights: reading small: ")
    sl.weights.save(tmp_path / "out", loaded, hub.table(CONFIG))
    assert capsys.readouterr().err.startswith("shardlib.weights: writing out: ")


def renamed(folder, prefix, **more):
    """The files in a folder with other names, and with more tensors."""
    files = sl.weights.open_tensors(folder)
    tensors = {prefix + name: np.array(files.read(name)) for name in files.tensors}
    safetensors.numpy.save_file(tensors | more, folder / "model.safetensors")


def test_names_may_have_another_prefix_and_images_are_left_out(tmp_path):
    config = gpt.gemma3_1b(
        layers=2,
        full_every=2,
        width=16,
        heads=2,
        kv_heads=1,
        head_dim=8,
        hidden=24,
        context=16,
        vocab=40,
    )
    model = gpt.GPT(config, rngs=nnx.Rngs(3))
    sl.weights.save(tmp_path, model, hub.table(config, prefix="model."))
    renamed(tmp_path, "language_model.", **{"vision_tower.patches": np.zeros((2, 2), "f")})
    text = hub.description(config)
    said = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    make_model, table, written = hub.weights(tmp_path)
    assert written == text
    loaded = sl.weights.load(tmp_path, nnx.to_pure_dict(nnx.state(make_model(), nnx.Param)), table)
    jax.tree.map(
        np.testing.assert_array_equal, loaded, nnx.to_pure_dict(nnx.state(model, nnx.Param))
    )
    (tmp_path / "config.json").write_text(json.dumps(said | {"quantization_config": {"bits": 4}}))
    with pytest.raises(ValueError, match="`quantization_config`"):
        hub.config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(said))
    # Only what reads images may be left over.
    renamed(tmp_path, "", another=np.zeros(3, "f"))
    with pytest.raises(ValueError, match="no parameter is made of, such as `another`"):
        sl.weights.load(tmp_path, loaded, hub.table_in(tmp_path, config))


def test_gpt2_has_files_with_and_without_a_prefix(tmp_path):
    config = gpt.gpt2(layers=1, width=16, heads=2, context=16, vocab=40)
    model = gpt.GPT(config, rngs=nnx.Rngs(3))
    sl.weights.save(tmp_path, model, hub.table(config, prefix=""))
    (tmp_path / "config.json").write_text(json.dumps(hub.description(config)))
    make_model, table, _ = hub.weights(tmp_path)
    loaded = sl.weights.load(tmp_path, nnx.to_pure_dict(nnx.state(make_model(), nnx.Param)), table)
    np.testing.assert_array_equal(loaded["embedding"], model.embedding[...])
