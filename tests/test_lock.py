"""Locks: whether their holder is alive, and that a run which lost its lock writes nothing more."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardlib import _lock
from shardlib._lock import Other, TakenError, hold

ROOT = Path(__file__).parent.parent


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "occupied.json"


def ended():
    """The number of a process that is no more."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def flip(path, byte, bit=0):
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


ELSEWHERE = {
    "another machine": {"host": "elsewhere"},
    "another boot": {"boot": "00000000-0000-0000-0000-000000000000"},
    "another container": {"namespace": "pid:[1] time:[1]"},
}


@pytest.mark.skipif(not _lock._boot(), reason="needs Linux's /proc")
@pytest.mark.parametrize("where", ["here", *ELSEWHERE])
def test_lock_of_an_ended_process_is_dead_only_on_the_same_machine(lock, where):
    holder = {
        **_lock._this_process(),
        "process": ended(),
        "nonce": "aa",
        **ELSEWHERE.get(where, {}),
    }
    lock.write_text(_lock._sealed(holder))
    assert Other(lock).look(patience=60) == ("dead" if where == "here" else "unknown")


@pytest.mark.skipif(not _lock._boot(), reason="needs Linux's /proc")
def test_lock_is_dead_when_its_process_id_was_reused(lock):
    holder = {**_lock._this_process(), "nonce": "aa"}
    lock.write_text(_lock._sealed({**holder, "started": "1"}))
    assert Other(lock).look(patience=60) == "dead"
    lock.write_text(_lock._sealed(holder))
    assert Other(lock).look(patience=60) == "unknown"


@pytest.mark.skipif(not _lock._boot(), reason="needs Linux's /proc")
def test_lock_of_a_zombie_process_is_dead(lock):
    process = subprocess.Popen(["sleep", "60"])
    holder = {
        **_lock._this_process(),
        "process": process.pid,
        "started": _lock._started(process.pid),
        "nonce": "aa",
    }
    lock.write_text(_lock._sealed(holder))
    assert Other(lock).look(patience=60) == "unknown"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert Other(lock).look(patience=60) == "dead"
    process.wait()


HOLDS = """
import sys, time
from pathlib import Path
from shardlib import _lock
_lock.BEAT_SECONDS = 0.05
with _lock.hold(Path(sys.argv[1])) as claim:
    print("held", flush=True)
    sys.stdin.readline()
    try:
        claim.check()
    except _lock.TakenError as error:
        print(error)
"""


@pytest.mark.long
@pytest.mark.skipif(not _lock._boot(), reason="needs Linux's /proc")
def test_lock_of_a_stopped_process_is_stalled_and_its_loss_is_reported(lock):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(lock)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout.readline() == "held\n"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    other = Other(lock)
    assert other.look(patience=60) == "unknown"
    while (found := other.look(patience=0.5)) == "unknown":
        time.sleep(0.05)
    assert found == "stalled" and str(process.pid) in other.name
    assert other.take_away() and not lock.exists()
    with hold(lock) as claim:
        process.send_signal(signal.SIGCONT)
        said, _ = process.communicate("go on\n", timeout=60)
        assert f"process {os.getpid()} on" in said and "holds it now" in said
        claim.check()  # what the other did at its end has changed nothing


def test_lock_watcher_does_not_count_time_it_slept_itself(lock, monkeypatch):
    lock.write_text("")
    other, now = Other(lock), time.monotonic()
    assert other.look(patience=20) == "unknown"
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    assert other.look(patience=20) == "unknown"


@pytest.mark.parametrize("change", ["gone", "another's", "damaged", "empty"])
def test_lock_holder_detects_the_loss_of_its_lock(lock, change):
    with hold(lock) as claim:
        claim.check()
        assert not claim.seen_taken
        if change == "gone":
            lock.unlink()
        elif change == "another's":
            lock.unlink()
            lock.write_text(
                _lock._sealed(
                    {**_lock._this_process(), "process": 7, "host": "elsewhere", "nonce": "aa"}
                )
            )
        elif change == "damaged":
            flip(lock, 20)
        else:
            lock.write_text("")
        said = {"gone": "it was taken away", "another's": "process 7 on elsewhere holds it now"}
        with pytest.raises(
            TakenError, match=said.get(change, "does not say what this process wrote")
        ):
            claim.check()
        assert claim.seen_taken
    assert lock.exists() == (change != "gone"), "what is another's is not taken away"


def test_lock_file_with_a_flipped_bit_in_any_byte_names_no_holder(lock):
    lock.write_text(_lock._sealed({**_lock._this_process(), "nonce": "aa"}))
    content = lock.read_bytes()
    for byte in range(len(content)):
        flip(lock, byte, byte % 8)
        assert _lock._holder(lock.read_text(errors="replace")) == {}
        lock.write_bytes(content)


def test_lock_that_was_renewed_or_touched_is_not_taken_away(lock):
    lock.write_text("left behind")
    first, second = Other(lock), Other(lock)
    first.look(60), second.look(60)
    assert first.take_away()
    with hold(lock) as claim:
        assert not second.take_away()
        claim.check()
    lock.write_text("left behind")
    first.look(60)
    os.utime(lock, (1, 1))
    assert not first.take_away() and lock.read_text() == "left behind"
    assert [path.name for path in lock.parent.iterdir()] == [lock.name]


def test_lock_taken_meanwhile_by_a_faster_process_is_left_in_place(lock, monkeypatch):
    """Between the look and the renaming another was faster, and holds a lock of its own."""
    lock.write_text("left behind")
    slow = Other(lock)
    slow.look(60)
    rename, faster = Path.rename, []

    def late(path, target):
        if not faster:
            faster.append(True)
            lock.unlink()
            lock.write_text("another's")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", late)
    assert not slow.take_away()
    assert lock.read_text() == "another's" and [path.name for path in lock.parent.iterdir()] == [
        lock.name
    ]


def test_lock_on_a_full_disk_leaves_no_file_behind(lock, monkeypatch):
    real = Path.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, text):
            raise OSError(28, "No space left on device")

    def opened(path, mode="r", **options):
        file = real(path, mode, **options)
        return Full(file) if mode == "x" else file

    monkeypatch.setattr(Path, "open", opened)
    with pytest.raises(OSError, match="No space left"), hold(lock):
        pass
    assert not lock.exists()


TWO_PROCESSES = """
import shardlib as sl
sl.initialize_distributed()
import json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np, optax
folder = pathlib.Path(sys.argv[1])

def batches():
    for number in range(10_000):
        if number == 10 and jax.process_index() == 0:
            (folder / "occupied.json").write_text("another's")
        yield np.ones((1, 4), "f")

strategy = sl.Strategy(mesh="data=2", rules=sl.rules.data)
state = sl.init(lambda: {"w": jnp.zeros(4)}, optax.sgd(0.1), strategy)
step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2), strategy)
sl.fit(step, state, batches(), sl.Loop(steps=10_000, log_every=1, save_every=5), folder=folder)
"""


@pytest.mark.long
def test_lock_loss_ends_all_processes_of_a_run(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(TWO_PROCESSES)
    launch = [sys.executable, "-m", "shardlib.launch", "-n", "2", "--devices", "1", "--"]
    run = subprocess.run(
        [*launch, sys.executable, str(script), str(folder)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=240,
        check=False,
    )
    assert run.returncode == 1
    for process in (0, 1):
        assert f"[{process}] shardlib._lock.TakenError: " in run.stderr, run.stderr
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(record["step"] for record in records) <= 10
    assert {path.name for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()} <= {
        "5",
        "10",
    }
    assert (folder / "occupied.json").read_text() == "another's"
