"""Checkpoints: bit for bit onto any mesh, and what is damaged, missing or of another model is told apart by name."""

import gc
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from models import gpt
from shardlib.train._contents import digests

# Reads that fail leave futures behind, whose errors nobody asks for.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]

CONFIG = gpt.tiny(layers=2, width=16, heads=4, context=8, vocab=32, dropout=0.1)
BATCH = {"tokens": np.random.default_rng(0).integers(0, 32, (8, 9)).astype(np.int32)}
STRATEGIES = {
    "data and tensor": sl.Strategy(mesh="data=2,model=4", rules=sl.rules.data | sl.rules.tensor),
    "stage 1": sl.Strategy(mesh="data=8", rules=sl.rules.data, zero=sl.Zero(1, small=0)),
    "stage 3": sl.Strategy(mesh="data=4,model=2", rules=sl.rules.data | sl.rules.tensor, zero=sl.Zero(3, small=0)),
}


def start(strategy, config=CONFIG, optimizer=None, **options):
    return sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optimizer or optax.adamw(1e-2), strategy, **options)


def bits(state):
    words = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in jax.tree.leaves(state)
    ]
    return [np.asarray(x).tobytes() for x in words]


@pytest.fixture(scope="module")
def trained():
    """A state after two steps, and after one more."""
    strategy = STRATEGIES["data and tensor"]
    state, step = start(strategy), sl.train_step(gpt.loss, strategy)
    for _ in range(2):
        state, _ = step(state, BATCH)
    return state


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("checkpoints")
    state, step = trained, sl.train_step(gpt.loss, STRATEGIES["data and tensor"])
    with sl.Checkpoints(folder) as checkpoints:
        checkpoints.save(state, data={"batches": 2, "source": None}, about={"name": "first"})
        before = bits(state)
        state, _ = step(jax.tree.map(jnp.copy, state), BATCH)
        checkpoints.save(state, data={"batches": 3, "source": None}, about={"name": "second"})
        after = bits(state)
    return folder, before, after


@pytest.fixture
def folder(saved, tmp_path):
    """The same, to be damaged."""
    yield Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))
    gc.collect()  # while what TensorStore's futures say when they are dropped is still this test's


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_bit_comes_back_onto_any_mesh_and_stage(saved, name):
    like = start(STRATEGIES[name], abstract=True)
    with sl.Checkpoints(saved[0]) as checkpoints:
        assert checkpoints.latest() == 3 and checkpoints.steps() == (2, 3)
        restored = checkpoints.restore(like)
        earlier = checkpoints.restore(like, step=2)
        assert checkpoints.about(2) == {"name": "first"}
    assert bits(restored.state) == saved[2] and bits(earlier.state) == saved[1]
    assert (restored.step, restored.data, restored.about) == (3, {"batches": 3, "source": None}, {"name": "second"})
    there = jax.tree.map(lambda x: x.sharding, restored.state)
    assert jax.tree.leaves(there) == [x.sharding for x in jax.tree.leaves(like)]
    state, metrics = sl.train_step(gpt.loss, STRATEGIES[name])(restored.state, BATCH)
    assert int(state.step) == 4 and np.isfinite(metrics["loss"])


def test_the_newest_and_every_so_manieth_are_kept(tmp_path):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: {"w": jnp.ones(8)}, optax.sgd(0.1), strategy)
    step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), strategy)
    with sl.Checkpoints(tmp_path, keep=2, keep_every=3) as checkpoints:
        for _ in range(7):
            state, _ = step(state, np.ones((8, 8), "f"))
            checkpoints.save(state)
        checkpoints.wait()
        assert checkpoints.steps() == (3, 6, 7)


def test_leaves_of_every_dtype_and_without_elements_come_back(tmp_path):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    dtypes = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint8", "int32", "bool", "complex64")
    tree = {dtype: (jnp.arange(16.0) % 2).reshape(2, 8).astype(dtype) for dtype in dtypes}
    tree |= {"empty": jnp.zeros((0, 3)), "scalar": jnp.float32(3), "a/b.c": jnp.ones(2)}
    state = sl.init(lambda: tree, None, strategy)
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        again = checkpoints.restore(state).state
    assert bits(again) == bits(state)
    assert jax.tree.map(lambda x: x.dtype, again) == jax.tree.map(lambda x: x.dtype, state)


def test_a_digest_sees_every_change_and_no_mesh():
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    on = {
        spec: jax.device_put(x, jax.NamedSharding(sl.make_mesh("data=4,model=2"), jax.P(*spec)))
        for spec in ((), ("data",), ("model", "data"))
    }
    assert len({digests({"x": y})["x"] for y in on.values()}) == 1
    one_bit = x.view(np.uint32).copy()
    one_bit[3, 5] ^= 1 << 31
    swapped = x.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    turned = np.ascontiguousarray(x.reshape(16, 8))
    others = (
        one_bit.view(np.float32),
        swapped,
        x.T,
        turned,
        -x,
        np.where(np.arange(16) < 2, -x, x),
        x + 0.0 * x[::-1] + 1,
    )
    found = {digests({"x": jnp.asarray(y)})["x"] for y in (x, *others)}
    assert len(found) == 1 + len(others)


def data(folder, step=3):
    return sorted(path for path in (folder / str(step) / "state").rglob("d/*"))


def about(folder):
    return [folder / "3" / "about" / "metadata"]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def restored_from(folder):
    with sl.Checkpoints(folder) as checkpoints:
        return checkpoints.restore(start(STRATEGIES["stage 1"], abstract=True)), checkpoints.steps()


@pytest.mark.parametrize(
    ("damage", "where", "said"),
    [
        (flip, data, "arrays cannot be read|the bits of .* are not those that were saved"),
        (cut, data, "arrays cannot be read"),
        (Path.unlink, data, "arrays cannot be read"),
        (flip, about, "what it says of itself is not what was written"),
        (cut, about, "what it says of itself is not what was written"),
        (Path.unlink, about, "what it says of itself is not what was written"),
    ],
)
def test_of_a_damaged_checkpoint_the_one_before_is_used_and_that_is_said(saved, folder, damage, where, said):
    for path in where(folder):
        damage(path)
    with pytest.warns(sl.ShardingWarning, match=rf"The checkpoint of step 3 .*({said})"):
        restored, steps = restored_from(folder)
    assert restored.step == 2 and bits(restored.state) == saved[1]
    assert steps == (2,) and (folder / "unreadable-3").exists(), "it does not stand in the way of the next step 3"


def test_a_bit_that_nobody_else_guards_is_missed_by_its_digest(tmp_path):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: {"w": jax.random.normal(jax.random.key(0), (64, 4096)), "b": jnp.ones(3)}, None, strategy)
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        largest = max(data(tmp_path, 0), key=lambda path: path.stat().st_size)
        assert largest.stat().st_size > 64 * 4096, "the values themselves"
        flip(largest)
        with pytest.warns(sl.ShardingWarning), pytest.raises(ValueError, match="the bits of `params/w` are not those"):
            checkpoints.restore(state)


def test_where_no_checkpoint_is_good_each_is_named(folder):
    for path in (*data(folder, 2), *data(folder, 3)):
        cut(path)
    with pytest.warns(sl.ShardingWarning), pytest.raises(ValueError, match=r"No checkpoint in .* step 3: .* step 2: "):
        restored_from(folder)
    assert (folder / "3").exists(), "nothing is put aside where nothing is used"


def test_a_checkpoint_half_written_is_none(folder):
    (folder / "3" / "commit_success.txt").unlink(missing_ok=True)
    (folder / "3").rename(folder / "3.orbax-checkpoint-tmp")
    restored, steps = restored_from(folder)
    assert restored.step == 2 and steps == (2,)


def test_a_checkpoint_of_another_model_names_each_leaf_that_differs(saved):
    with sl.Checkpoints(saved[0]) as checkpoints:
        wider = start(
            STRATEGIES["stage 1"], gpt.tiny(layers=2, width=16, heads=4, context=8, vocab=32, hidden=48), abstract=True
        )
        with pytest.raises(ValueError, match="another model or optimizer") as error:
            checkpoints.restore(wider)
        assert "`params/blocks/mlp/up/kernel` is float32[2,64,16] there and float32[2,48,16] here" in str(error.value)
        assert "params/embedding" not in str(error.value)
        other = start(STRATEGIES["stage 1"], optimizer=optax.sgd(0.1, momentum=0.9), abstract=True)
        with pytest.raises(
            ValueError, match=r"`opt_state/0/nu/.*` is there alone.*`opt_state/0/trace/.*` is here alone"
        ):
            checkpoints.restore(other)


def test_a_disk_without_room_is_seen_before_anything_is_written(saved, folder, monkeypatch, trained):
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with sl.Checkpoints(folder) as checkpoints:
        with pytest.raises(
            OSError, match=r"step 2 could not be saved.*1000 B are free.*the last good one is that of step 3"
        ):
            checkpoints.save(trained)
        assert checkpoints.steps() == (2, 3)
    assert not list(folder.glob("*tmp*"))


FAILS_HALF_WAY = """
import resource, sys
import jax.numpy as jnp, numpy as np, optax
import shardlib as sl

strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
state = sl.init(lambda: {"w": jax.random.normal(jax.random.key(0), (8, 4096))}, optax.sgd(0.1), strategy)
step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), strategy)
with sl.Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(state)
    checkpoints.wait()
    state, _ = step(state, np.ones((8, 8), "f"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))  # no file may grow beyond, as on a disk that is full
    try:
        checkpoints.save(state)
        checkpoints.wait()
    except OSError as error:
        print("SAID", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    print("KEPT", checkpoints.steps())
    checkpoints.save(state)
    checkpoints.wait()
    print("THEN", checkpoints.steps())
"""


def test_a_save_that_fails_half_way_leaves_the_last_good_one(tmp_path):
    # In a process of its own, for what Orbax's threads leave behind when they fail.
    run = subprocess.run(
        [sys.executable, "-c", "import jax" + FAILS_HALF_WAY, str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    said, kept, then = (line for line in run.stdout.splitlines() if line[:4] in ("SAID", "KEPT", "THEN"))
    assert re.search(r"could not be saved in .*File too large.*the last good one is that of step 0", said), said
    assert (kept, then) == ("KEPT (0,)", "THEN (0, 1)")


def test_wrong_arguments_are_refused(tmp_path):
    for wrong in ({"keep": 0}, {"keep_every": 0}, {"keep": None}):
        with pytest.raises(ValueError, match="a whole number, at least one"):
            sl.Checkpoints(tmp_path, **wrong)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="takes a folder, and that is a file"):
        sl.Checkpoints(tmp_path / "file")
    like = start(STRATEGIES["stage 1"], abstract=True)
    with (
        sl.Checkpoints(tmp_path / "none") as none,
        pytest.raises(ValueError, match="No checkpoint in .*there are: none"),
    ):
        none.restore(like)


def test_what_it_says_of_itself_is_readable_by_people(saved):
    content = json.loads(json.loads((saved[0] / "3" / "about" / "metadata").read_text())["content"])
    assert content["leaves"]["params/blocks/mlp/up/kernel"]["names"] == "('layers', 'mlp', 'embed')"
    assert content["strategy"]["mesh"] == "'data=2,model=4'"
