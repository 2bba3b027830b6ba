"""Checkpoints: bit for bit onto any mesh, and what is damaged, missing or of another model is told
apart by name.
"""

import contextlib
import ctypes
import functools
import gc
import inspect
import json
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from models import gpt
from shardlib import _lock
from shardlib.train._contents import digests
from shardlib.train._folder import occupied

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
    "stage 3": sl.Strategy(
        mesh="data=4,model=2", rules=sl.rules.data | sl.rules.tensor, zero=sl.Zero(3, small=0)
    ),
}


def start(strategy, config=CONFIG, optimizer=None, **options):
    return sl.init(
        lambda: gpt.GPT(config, rngs=nnx.Rngs(0)),
        optimizer or optax.adamw(1e-2),
        strategy,
        **options,
    )


@functools.cache
def step_of(name):
    return sl.train_step(gpt.loss, STRATEGIES[name])


def bits(state):
    words = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    ]
    return [np.asarray(x).tobytes() for x in words]


@pytest.fixture(scope="module")
def trained():
    """A state after two steps, and after one more."""
    state, step = start(STRATEGIES["data and tensor"]), step_of("data and tensor")
    for _ in range(2):
        state, _ = step(state, BATCH)
    return state


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("checkpoints")
    state, step = trained, step_of("data and tensor")
    with sl.Checkpoints(folder) as checkpoints:
        checkpoints.save(state, data={"batches": 2, "source": None}, about={"name": "first"})
        before = bits(state)
        state, _ = step(jax.tree.map(jnp.copy, state), BATCH)
        checkpoints.save(state, data={"batches": 3, "source": None}, about={"name": "second"})
        after = bits(state)
    return folder, before, after


def drop_failed_reads():
    """Let go of what a read that failed leaves behind, while what it says when it is dropped is
    still this test's.
    """
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        gc.collect()
        if not any(inspect.iscoroutine(one) for one in gc.get_objects()):
            return
        time.sleep(0.02)  # threads of TensorStore hold some until they have failed as well


@pytest.fixture
def failing_reads():
    """For a test in which reads fail."""
    yield
    drop_failed_reads()


@pytest.fixture
def folder(saved, tmp_path, failing_reads):
    """The same, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "checkpoints"))


@pytest.fixture(scope="module", autouse=True)
def no_failed_read_is_left():
    """Whatever is left is not the business of the tests in the next file."""
    gc.freeze()  # what the files before made is not looked through again and again
    yield
    drop_failed_reads()
    gc.unfreeze()


@pytest.mark.representative("data and tensor")
@pytest.mark.long
@pytest.mark.sentinel("stage 3")
@pytest.mark.parametrize("name", STRATEGIES)
def test_checkpoints_restore_every_bit_onto_any_mesh_and_zero_stage(saved, name):
    like = start(STRATEGIES[name], abstract=True)
    with sl.Checkpoints(saved[0]) as checkpoints:
        assert checkpoints.latest() == 3 and checkpoints.steps() == (2, 3)
        restored = checkpoints.restore(like)
        earlier = checkpoints.restore(like, step=2)
        assert checkpoints.about(2) == {"name": "first"}
    assert bits(restored.state) == saved[2] and bits(earlier.state) == saved[1]
    assert (restored.step, restored.data, restored.about) == (
        3,
        {"batches": 3, "source": None},
        {"name": "second"},
    )
    there = jax.tree.map(lambda x: x.sharding, restored.state)
    assert jax.tree.leaves(there) == [x.sharding for x in jax.tree.leaves(like)]
    state, metrics = step_of(name)(restored.state, BATCH)
    assert int(state.step) == 4 and np.isfinite(metrics["loss"])


def test_checkpoints_keep_the_newest_and_every_nth(tmp_path):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: {"w": jnp.ones(8)}, optax.sgd(0.1), strategy)
    step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), strategy)
    with sl.Checkpoints(tmp_path, keep=2, keep_every=3) as checkpoints:
        for _ in range(7):
            state, _ = step(state, np.ones((8, 8), "f"))
            checkpoints.save(state)
        checkpoints.wait()
        assert checkpoints.steps() == (3, 6, 7)


@pytest.mark.long
def test_checkpoints_restore_every_dtype_and_empty_arrays(tmp_path):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    dtypes = (
        "float32",
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "int8",
        "uint8",
        "int32",
        "bool",
        "complex64",
    )
    tree = {dtype: (jnp.arange(16.0) % 2).reshape(2, 8).astype(dtype) for dtype in dtypes}
    tree |= {"empty": jnp.zeros((0, 3)), "scalar": jnp.float32(3), "a/b.c": jnp.ones(2)}
    state = sl.init(lambda: tree, None, strategy)
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        again = checkpoints.restore(state).state
    assert bits(again) == bits(state)
    assert jax.tree.map(lambda x: x.dtype, again) == jax.tree.map(lambda x: x.dtype, state)


def test_checkpoint_digest_sees_every_change_and_ignores_the_mesh():
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


@pytest.mark.long
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
def test_checkpoints_fall_back_from_a_damaged_checkpoint_with_a_warning(
    saved, folder, damage, where, said
):
    for path in where(folder):
        damage(path)
    with pytest.warns(sl.ShardingWarning, match=rf"The checkpoint of step 3 .*({said})"):
        restored, steps = restored_from(folder)
    assert restored.step == 2 and bits(restored.state) == saved[1]
    assert steps == (2,) and (folder / "unreadable-3").exists(), (
        "it does not stand in the way of the next step 3"
    )


def test_checkpoint_digest_catches_a_bit_flip_in_array_data(tmp_path):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(
        lambda: {"w": jax.random.normal(jax.random.key(0), (64, 4096)), "b": jnp.ones(3)},
        None,
        strategy,
    )
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        largest = max(data(tmp_path, 0), key=lambda path: path.stat().st_size)
        assert largest.stat().st_size > 64 * 4096, "the values themselves"
        flip(largest)
        with (
            pytest.warns(sl.ShardingWarning),
            pytest.raises(ValueError, match="the bits of `params/w` are not those"),
        ):
            checkpoints.restore(state)


@pytest.mark.long
def test_checkpoints_name_each_failure_when_none_is_usable(folder):
    for path in (*data(folder, 2), *data(folder, 3)):
        cut(path)
    with (
        pytest.warns(sl.ShardingWarning),
        pytest.raises(ValueError, match=r"No checkpoint in .* step 3: .* step 2: "),
    ):
        restored_from(folder)
    assert (folder / "3").exists(), "nothing is put aside where nothing is used"


def test_checkpoints_ignore_a_half_written_checkpoint(folder):
    (folder / "3" / "commit_success.txt").unlink(missing_ok=True)
    (folder / "3").rename(folder / "3.orbax-checkpoint-tmp")
    restored, steps = restored_from(folder)
    assert restored.step == 2 and steps == (2,)


def test_checkpoint_of_another_model_names_each_leaf_that_differs(saved):
    with sl.Checkpoints(saved[0]) as checkpoints:
        wider = start(
            STRATEGIES["stage 1"],
            gpt.tiny(layers=2, width=16, heads=4, context=8, vocab=32, hidden=48),
            abstract=True,
        )
        with pytest.raises(ValueError, match="another model or optimizer") as error:
            checkpoints.restore(wider)
        assert (
            "`params/blocks/mlp/up/kernel` is float32[2,64,16] in the checkpoint and float32[2,48,16] in the state"
            in str(error.value)
        )
        assert "params/embedding" not in str(error.value)
        other = start(STRATEGIES["stage 1"], optimizer=optax.sgd(0.1, momentum=0.9), abstract=True)
        with pytest.raises(
            ValueError,
            match=r"`opt_state/0/nu/.*` is only in the checkpoint.*`opt_state/0/trace/.*` is only in the state",
        ):
            checkpoints.restore(other)


@pytest.mark.long
def test_checkpoint_save_on_a_full_disk_is_refused_before_writing(
    saved, folder, monkeypatch, trained
):
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with sl.Checkpoints(folder) as checkpoints:
        with pytest.raises(
            OSError,
            match=r"step 2 could not be saved.*1000 B are free.*the last good one is that of step 3",
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
    # No file may grow beyond, as on a disk that is full. Each shard is larger, and may be in a file of its own.
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
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


@pytest.mark.long
def test_checkpoint_save_that_fails_half_way_keeps_the_last_good(tmp_path):
    # In a process of its own, for what Orbax's threads leave behind when they fail.
    run = subprocess.run(
        [sys.executable, "-c", "import jax" + FAILS_HALF_WAY, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    said, kept, then = (
        line for line in run.stdout.splitlines() if line[:4] in ("SAID", "KEPT", "THEN")
    )
    assert re.search(
        r"could not be saved in .*File too large.*the last good one is that of step 0", said
    ), said
    assert (kept, then) == ("KEPT (0,)", "THEN (0, 1)")


def test_checkpoint_files_written_after_a_failed_save_are_removed(tmp_path, monkeypatch):
    late = tmp_path / "1.orbax-checkpoint-tmp" / "state" / "ocdbt.process_0"

    def write_late():
        # As TensorStore does, which makes the folders that it misses.
        for _ in range(3):
            time.sleep(0.1)
            with contextlib.suppress(OSError):
                late.mkdir(parents=True, exist_ok=True)
                (late / "manifest.ocdbt").write_text("")

    writer = threading.Thread(target=write_late)

    def fail(checkpoints):
        writer.start()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sl.Checkpoints, "_before_commit", fail)
    checkpoints = sl.Checkpoints(tmp_path)
    checkpoints.save(small_state(1))
    with pytest.raises(OSError, match="could not be saved.*No space left on device"):
        checkpoints.wait()
    assert not writer.is_alive() and not list(tmp_path.iterdir())
    checkpoints.close()


# A folder whose lock is lost, and stray files in it


def small_state(value=1.0):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: {"w": jnp.full(8, float(value))}, None, strategy)
    return state.replaced(step=state.step + int(value))


def lose_at_commit(monkeypatch, lock):
    """Another takes the folder while a checkpoint is written: when Orbax's thread is about to name
    it.
    """
    check = _lock.Claim.check

    def lost(claim):
        if threading.current_thread().name == "async_save":
            lock.write_text("another's")
        check(claim)

    monkeypatch.setattr(_lock.Claim, "check", lost)


def test_checkpoint_is_not_committed_after_the_folder_lock_is_lost(tmp_path, monkeypatch):
    lose_at_commit(monkeypatch, tmp_path / "occupied.json")
    with (
        pytest.raises(_lock.TakenError, match="writes nothing more"),
        occupied(tmp_path) as held,
        sl.Checkpoints(tmp_path / "checkpoints", _occupied=held) as checkpoints,
    ):
        checkpoints.save(small_state(3))
        checkpoints.wait()
    assert not (tmp_path / "checkpoints" / "3").exists()
    assert (tmp_path / "checkpoints" / "3.orbax-checkpoint-tmp").is_dir(), (
        "left to whoever has the folder now"
    )


@pytest.mark.parametrize("what", ["delete", "save", "put aside"])
def test_checkpoints_change_nothing_after_the_folder_lock_is_lost(tmp_path, what):
    folder = tmp_path / "checkpoints"
    with (
        pytest.raises(_lock.TakenError),
        occupied(tmp_path) as held,
        sl.Checkpoints(folder, keep=1, _occupied=held) as checkpoints,
    ):
        checkpoints.save(small_state(1))
        checkpoints.wait()
        checkpoints.save(small_state(2))
        checkpoints._manager.wait_until_finished()
        (tmp_path / "occupied.json").write_text("another's")
        if what == "delete":
            checkpoints.wait()
        elif what == "save":
            checkpoints.save(small_state(3))
        else:
            checkpoints.put_aside([1], "abandoned")
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_checkpoints_opened_only_for_reading_delete_nothing(tmp_path):
    with sl.Checkpoints(tmp_path) as checkpoints:
        for value in (1, 2, 3):
            checkpoints.save(small_state(value))
    with sl.Checkpoints(tmp_path, keep=1) as looking:
        assert looking.restore(small_state()).step == 3
        looking.wait()
    assert looking.steps() == (1, 2, 3)


@pytest.mark.parametrize("stray", ["symlink to a folder", "symlink to nothing", "file", "folder"])
def test_checkpoint_save_works_despite_strays_named_like_unfinished_saves(tmp_path, stray):
    folder, outside = tmp_path / "checkpoints", tmp_path / "outside"
    folder.mkdir(), outside.mkdir()
    (outside / "precious").write_text("")
    planted = folder / "1.orbax-checkpoint-tmp-7"
    if stray == "file":
        planted.write_text("")
    elif stray == "folder":
        (planted / "deep").mkdir(parents=True)
    else:
        planted.symlink_to(outside if stray == "symlink to a folder" else tmp_path / "none")
    with sl.Checkpoints(folder) as checkpoints:
        checkpoints.save(small_state(1))
        checkpoints.wait()
        assert checkpoints.steps() == (1,)
    assert (outside / "precious").exists() and [path.name for path in folder.iterdir()] == ["1"]


def test_checkpoint_save_warns_about_leftovers_it_cannot_delete(tmp_path, monkeypatch):
    (tmp_path / "7.orbax-checkpoint-tmp").mkdir()

    def refusing(path, ignore_errors=False):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refusing)
    with sl.Checkpoints(tmp_path) as checkpoints:
        with pytest.warns(
            sl.ShardingWarning,
            match=r"could not be deleted: `7.orbax-checkpoint-tmp`.*Permission denied",
        ):
            checkpoints.save(small_state(1))
        checkpoints.wait()
        assert checkpoints.steps() == (1,)


@pytest.mark.parametrize(
    ("how", "named"), [("renamed", 9), ("copied", 9), ("linked", 9), ("renamed", 1)]
)
def test_checkpoint_under_the_number_of_another_step_is_refused(tmp_path, how, named):
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(small_state(2))
    place = {
        "renamed": lambda old, new: old.rename(new),
        "copied": shutil.copytree,
        "linked": lambda old, new: new.symlink_to(old),
    }
    place[how](tmp_path / "2", tmp_path / str(named))
    before = sorted(path.name for path in tmp_path.iterdir())
    with sl.Checkpoints(tmp_path) as checkpoints:
        for read in (
            lambda: checkpoints.restore(small_state(), step=named),
            lambda: checkpoints.about(named),
            *([lambda: checkpoints.restore(small_state())] if named == 9 else []),
        ):
            with pytest.raises(
                ValueError,
                match=rf"The checkpoint in .*/{named} is that of step 2.*Give it its name",
            ):
                read()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.long
def test_checkpoint_bit_flip_in_any_file_is_noticed_or_harmless(tmp_path, failing_reads):
    good, damaged = tmp_path / "good", tmp_path / "damaged"
    with sl.Checkpoints(good) as checkpoints:
        for value in (1, 2):
            checkpoints.save(
                small_state(value), data={"batches": value, "source": None}, about={"name": "run"}
            )
    files = sorted(
        path.relative_to(good)
        for path in good.rglob("*")
        if path.is_file() and "1" not in path.parts
    )
    expected = {step: bits(small_state(step)) for step in (1, 2)}
    noticed = []
    for number, file in enumerate(files):
        shutil.copytree(good, damaged)
        flip_bit(damaged / file, number)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with sl.Checkpoints(damaged) as checkpoints:
                restored = checkpoints.restore(small_state())
        told = any("The checkpoint of step 2" in str(one.message) for one in said)
        noticed += [file] * told
        assert restored.step == (1 if told else 2), file
        assert bits(restored.state) == expected[restored.step], file
        assert (restored.data["batches"], restored.about) == (restored.step, {"name": "run"}), file
        shutil.rmtree(damaged)
    drop_failed_reads()
    assert len(noticed) >= 3 and any("about" in file.parts for file in noticed), noticed


def flip_bit(path, number):
    """Flip one bit of a file, at a place that differs from file to file."""
    content = bytearray(path.read_bytes())
    if content:
        content[len(content) // 2] ^= 1 << number % 8
        path.write_bytes(content)


# In a process of its own, which obeys the permissions of files whoever the user is, and has to end.
FAILS_IN_MANY_WAYS = """
import os, resource, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np, optax
import shardlib as sl

folder = Path(sys.argv[1])
strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), strategy)

def fit(steps, evaluate=None, save_every=2):
    state = sl.init(lambda: {"w": jax.random.normal(jax.random.key(0), (8, 4096))}, optax.sgd(0.1), strategy)
    loop = sl.Loop(steps=steps, save_every=save_every, evaluate_every=3)
    batches = [np.full((8, 8), 1e-3, "f")] * 40
    return sl.fit(step, state, batches, loop, folder=folder, records=sl.Records(sinks=[]), evaluate=evaluate)

def failing(name, run):
    try:
        run()
    except BaseException as error:
        print(name, "SAID", type(error).__name__, error)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    print(name, "LEFT", *names)

fit(4)
for file in ("state", "state/d", "about", "about/metadata", "state/_METADATA", "state/manifest.ocdbt"):
    path = folder / "checkpoints" / "4" / file
    mode = path.stat().st_mode
    path.chmod(0)
    failing("unreadable", lambda: fit(6))
    path.chmod(mode)

def interrupted(state):
    raise KeyboardInterrupt

failing("interrupted", lambda: fit(6, interrupted, save_every=5))

def broken(state):
    raise RuntimeError("no such file")

failing("evaluation", lambda: fit(8, broken, save_every=5))
before = sl.Checkpoints._before_commit

def full(self):
    raise OSError(28, "No space left on device")

sl.Checkpoints._before_commit = full
failing("commit", lambda: fit(9))
sl.Checkpoints._before_commit = before
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
failing("written", lambda: fit(9))
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
(folder / "checkpoints").chmod(0o555)
fit(9)
"""


def as_an_ordinary_user():
    """What lets root ignore permissions is given up, for the program that is started."""
    libc, drop = ctypes.CDLL(None), 24
    for capability in (1, 2):  # to write, and to read, whatever the permissions
        libc.prctl(drop, capability, 0, 0, 0)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's capabilities")
def test_checkpoint_failures_end_the_process_and_keep_good_checkpoints(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", FAILS_IN_MANY_WAYS, str(tmp_path)],
        capture_output=True, text=True, preexec_fn=as_an_ordinary_user, timeout=400, check=False,
    )  # fmt: skip
    (tmp_path / "checkpoints").chmod(0o755)
    lines = run.stdout.splitlines()
    said = {name: [line for line in lines if line.startswith(f"{name} SAID")] for name in (
        "unreadable", "interrupted", "evaluation", "commit", "written")}  # fmt: skip
    left = [line.split(" LEFT ")[1] for line in lines if " LEFT " in line]
    assert len(said["unreadable"]) == 6, run.stdout + run.stderr
    for line in said["unreadable"]:
        assert "OSError" in line and "Permission denied" in line and "checkpoints/4/" in line, line
        assert "need not be damage" in line
    assert set(left[:6]) == {"2 4"}, "nothing is renamed, nothing is trained again"
    assert "KeyboardInterrupt" in said["interrupted"][0]
    assert "RuntimeError no such file" in said["evaluation"][0] and "6" in left[7].split()
    assert "could not be saved" in said["commit"][0] and "No space left" in said["commit"][0]
    assert "could not be saved" in said["written"][0] and "File too large" in said["written"][0]
    assert not any("tmp" in names for names in left), left
    assert run.returncode == 1 and "PermissionError" in run.stderr, run.stderr
    # Not always the last line: asyncio tells, at the end, of writes that nobody waited for.
    ends = [line for line in run.stderr.splitlines() if line.startswith("OSError: ")]
    assert ends and "could not be saved" in ends[-1], run.stderr


def test_checkpoints_refuse_wrong_arguments(tmp_path):
    for wrong in ({"keep": 0}, {"keep_every": 0}, {"keep": None}):
        with pytest.raises(ValueError, match="a whole number, at least 1"):
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


def test_checkpoint_metadata_is_human_readable_json(saved):
    content = json.loads(json.loads((saved[0] / "3" / "about" / "metadata").read_text())["content"])
    assert content["leaves"]["params/blocks/mlp/up/kernel"]["names"] == "('layers', 'mlp', 'embed')"
    assert content["strategy"]["mesh"] == "'data=2,model=4'"


def small(step, strategy=None):
    """A state of so many steps whose one parameter says how many."""
    strategy = strategy or sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: {"w": jnp.full(8, float(step))}, optax.sgd(0.1), strategy)
    return state.replaced(step=jnp.full_like(state.step, step))


def test_checkpoints_wait_for_their_own_save_before_they_read(tmp_path):
    with sl.Checkpoints(tmp_path) as checkpoints:
        for step in range(4):
            checkpoints.save(small(step), about={"is": step})
            assert checkpoints.about() == {"is": step}
            checkpoints.save(small(step + 10), about={})
            assert checkpoints.restore(small(0)).step == step + 10
            checkpoints.put_aside([step + 10], "other")
    assert not list(tmp_path.glob("unreadable-*"))


def test_checkpoints_leave_out_one_that_is_being_written(tmp_path, monkeypatch):
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(small(1))
        checkpoints.wait()
        commit, go_on = checkpoints._before_commit, threading.Event()

        def held_up():
            go_on.wait(60)
            commit()

        monkeypatch.setattr(checkpoints, "_before_commit", held_up)
        checkpoints._manager.close()
        checkpoints._manager = checkpoints._make_manager()
        checkpoints.save(small(2))
        assert checkpoints.steps() == (1,) and checkpoints.latest() == 1
        go_on.set()
        checkpoints.wait()
        assert checkpoints.steps() == (1, 2) and checkpoints.latest() == 2


def test_checkpoints_that_only_read_see_what_a_run_has_saved_and_deleted(tmp_path):
    with sl.Checkpoints(tmp_path, keep=1) as of_run, sl.Checkpoints(tmp_path) as reader:
        for step in (1, 2, 3):
            of_run.save(small(step))
            of_run.wait()
            assert reader.latest() == step and reader.steps() == (step,)
            assert reader.restore(small(0)).state.params["w"][0] == step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3"]


def test_checkpoints_refuse_to_save_an_abstract_state(tmp_path):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: {"w": jnp.ones(8)}, optax.sgd(0.1), strategy, abstract=True)
    with sl.Checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="is abstract"):
        checkpoints.save(state)
