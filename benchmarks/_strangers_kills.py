"""A tiny run that is killed, or stopped and continued, at any moment, while another is started in
its folder.

Some cases kill the run by SIGKILL, once or several times, and start it again. Others stop it by
SIGSTOP, as a machine does that is suspended; start another in the same folder; and let the first go
on again while the second trains or after it has ended. That is fine if the parameters and the
records at the end equal those of an undisturbed run, bit for bit, and if the records say that no
run wrote after another had taken over. A run that ends itself with a message for users is fine too.
"""

import concurrent.futures
import contextlib
import faulthandler
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib as sl
from benchmarks._strangers import ROOT, Outcome, Tally, fast_compiles, is_refusal
from benchmarks._strangers_patience import shorten_patience

DEVICES = 2
STEPS, SAVE_EVERY, SECONDS_PER_STEP = 40, 4, 0.03
BEAT_SECONDS, DEAD_SECONDS = 0.3, 1.5
PATIENCE = 120.0  # of one process, or of the wait for something that it does
MOST_STARTS = 6


@dataclass(frozen=True)
class Case:
    """What happens to a run, when."""

    kind: str  # "kill", "stop", "short stop"
    times: int  # how often it is killed
    # How many steps a process has taken when it is killed or stopped; 0: it has just been started.
    steps: tuple[int, ...]
    delay: float  # seconds after that
    until: int  # how many steps the second takes before the first goes on; of a short stop, none
    stopped_for: float  # seconds, of a short stop

    def __str__(self) -> str:
        if self.kind == "kill":
            return f"killed {self.times} times, {self.delay:.3f} s after steps {self.steps}"
        if self.kind == "stop":
            return (
                f"stopped {self.delay:.3f} s after step {self.steps[0]}, goes on at step "
                f"{self.until} of another"
            )
        return (
            f"stopped {self.delay:.3f} s after step {self.steps[0]} for {self.stopped_for:.2f} s "
            "as another starts"
        )


def draw(seed: int, number: int) -> Case:
    """A case, from the seed and its number alone: half of them kills."""
    choose = random.Random(f"{seed} {number}")
    kind = (
        choose.choice(("kill", "kill", "stop", "short stop"))
        if number >= 4
        else ("kill", "stop", "short stop", "kill")[number]
    )
    times = choose.choice((1, 1, 2, 3)) if kind == "kill" else 1
    least = 0 if kind == "kill" else 1
    return Case(
        kind=kind,
        times=times,
        steps=tuple(
            sorted(choose.choice((least, choose.randrange(1, STEPS))) for _ in range(times))
        ),
        # Before its first step a process loads, looks for others, reads and compiles, for some
        # seconds.
        delay=choose.uniform(0, 2 * SECONDS_PER_STEP),
        until=choose.choice((1, choose.randrange(1, STEPS), STEPS)),
        stopped_for=choose.uniform(0.2, 2) * DEAD_SECONDS,
    )


def slow_batches() -> Iterator[np.ndarray]:
    """Batches that are the same each time, one every so often, so that there are moments between
    two.
    """
    for number in range(2 * STEPS):
        time.sleep(SECONDS_PER_STEP)
        yield np.random.default_rng(number).normal(size=(8, 8)).astype("f")


def train(folder: Path, go: Path, about: int) -> None:
    """Be one process: wait for the file `go`, train, and write the digest of what was learned
    beside it.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    shorten_patience(BEAT_SECONDS, DEAD_SECONDS)
    strategy = sl.Strategy(mesh=f"data={DEVICES}", rules=sl.rules.data, zero=sl.Zero(1, small=0))
    model = {"w": np.random.default_rng(0).normal(size=(8, 8)).astype("f")}
    state = sl.init(lambda: model, optax.adam(0.01), strategy)
    step = sl.train_step(
        lambda model, x, rng: jnp.mean((x @ model["w"] - x[:, ::-1]) ** 2), strategy
    )
    print("ready", flush=True)
    while not go.exists():
        time.sleep(0.01)
    state = sl.fit(
        step,
        state,
        slow_batches(),
        sl.Loop(steps=STEPS, log_every=1, save_every=SAVE_EVERY, keep=3),
        folder=folder,
        records=sl.Records(
            sinks=[
                sl.JsonLines(folder / "metrics.jsonl"),
                lambda record: print("step", record["step"], flush=True),
            ],
            watch={"writer": lambda step: about},
        ),
        about={"writer": about},
    )
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        digest.update(np.asarray(leaf).tobytes())
    print("digest", digest.hexdigest(), flush=True)


class Process:
    """One process of a case, number `number` of those that were started in its folder."""

    def __init__(self, place: Path, number: int) -> None:
        self.number, self.go = number, place / f"go-{number}"
        self.out, self.errors = place / f"out-{number}", place / f"errors-{number}"
        self.ended_by_us = False
        command = [
            sys.executable,
            "-m",
            "benchmarks._strangers_kills",
            str(place / "run"),
            str(self.go),
            str(number),
        ]
        with self.out.open("w") as out, self.errors.open("w") as errors:
            self.popen = subprocess.Popen(
                command, env=fast_compiles(DEVICES), cwd=ROOT, stdout=out, stderr=errors
            )

    def said(self, word: str) -> list[str]:
        """What it said behind this word."""
        # Without one that is being written.
        lines = self.out.read_text().rpartition("\n")[0].splitlines()
        return [line.removeprefix(word).strip() for line in lines if line.startswith(word)]

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait until something is so, or the process has ended."""
        start = time.monotonic()
        while not until() and self.popen.poll() is None:
            if time.monotonic() - start > PATIENCE:
                raise TimeoutError(
                    f"process {self.number} did nothing for {PATIENCE:.0f} s, {self.place()}"
                )
            time.sleep(0.01)

    def place(self) -> str:
        """Where its main thread is: the innermost lines of Python, and the innermost of the
        library.
        """
        self.popen.send_signal(signal.SIGUSR1)  # for which `train` has registered `faulthandler`
        time.sleep(1)
        said = self.errors.read_text().rpartition("most recent call first")[2].splitlines()
        frames = [line.strip() for line in said if line.strip().startswith("File ")]
        library = [frame for frame in frames if str(ROOT / "shardlib") in frame]
        return "in " + " < ".join([*frames[:2], *library[:1]])

    def start(self) -> None:
        """Let it begin, as soon as it has loaded what it needs."""
        self.wait(lambda: bool(self.said("ready")))
        self.go.touch()

    def wait_for_step(self, step: int) -> None:
        """Wait until it has taken a step of the run, itself; for step 0, not at all."""
        self.wait(lambda: not step or any(int(one) >= step for one in self.said("step")))

    def send(self, signum: int) -> None:
        """Send it a signal."""
        self.ended_by_us |= signum == signal.SIGKILL
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signum)

    def end(self) -> tuple[str, str]:
        """Wait for its end: "ran", or how it failed, and its last line."""
        self.wait(lambda: False)
        code = self.popen.returncode
        lines = [line for line in self.errors.read_text().splitlines() if line.strip()]
        if code == 0 or self.ended_by_us:
            return "ran", ""
        if code < 0:
            return (
                "aborts",
                f"process {self.number}, {signal.Signals(-code).name}: {(lines or [''])[-1]}",
            )
        for kind in ("refused", "raw_errors"):
            if said := self.said(kind):
                return kind, f"process {self.number}: {said[0]}"
        return "raw_errors", f"process {self.number}, exit code {code}: {(lines or [''])[-1]}"


def attempt(case: Case, place: Path, undisturbed: tuple[str, list[Any]] | None) -> tuple[str, str]:
    """Do to a run what the case says, start it until it has ended, and hold it to the undisturbed
    one.
    """
    started: list[Process] = []

    def another() -> Process:
        started.append(Process(place, len(started)))
        return started[-1]

    try:
        first = another()
        if case.kind == "kill":
            for step in case.steps:
                first.start()
                first.wait_for_step(step)
                # A kill without a step may come at any time while it begins, which takes longer
                # than a step.
                time.sleep(case.delay if step else 20 * case.delay)
                first.send(signal.SIGKILL)
                first.end()
                first = another()
            first.start()
        else:
            second = another()
            first.start()
            first.wait_for_step(case.steps[0])
            time.sleep(case.delay)
            second.wait(lambda: bool(second.said("ready")))
            first.send(signal.SIGSTOP)
            second.start()
            if case.kind == "short stop":
                time.sleep(case.stopped_for)
            else:
                second.wait_for_step(case.until)
            first.send(signal.SIGCONT)
            second.end()
        first.end()
        while (
            not any(process.popen.returncode == 0 for process in started)
            and len(started) < MOST_STARTS
        ):
            another().start()
            started[-1].end()
        return verdict(started, place / "run", undisturbed)
    except TimeoutError as error:
        return "hangs", str(error)
    finally:
        for process in started:
            process.send(signal.SIGKILL)
            process.popen.wait()


def verdict(
    started: list[Process], folder: Path, undisturbed: tuple[str, list[Any]] | None
) -> tuple[str, str]:
    """How a case ended, once all of its processes have."""
    ends = [process.end() for process in started]
    for kind in ("aborts", "raw_errors"):
        if found := [seen for how, seen in ends if how == kind]:
            return kind, found[0]
    finished = [process for process in started if process.popen.returncode == 0]
    if not finished:
        return "hangs", f"it did not come to its end in {len(started)} starts: {ends[-1][1]}"
    result = (finished[-1].said("digest")[0], numbers(folder))
    if seen := two_writers(folder):
        return "silent", seen
    if undisturbed is not None and result[0] != undisturbed[0]:
        return (
            "silent",
            "the parameters or the optimizer's state at the end are not those of an undisturbed "
            "run",
        )
    if undisturbed is not None and result[1] != undisturbed[1]:
        return (
            "silent",
            f"the records are not those of an undisturbed run: {len(result[1])} and "
            f"{len(undisturbed[1])}",
        )
    return "ran", ""


def numbers(folder: Path) -> list[Any]:
    """The records of a run, without notes, without who wrote them and without speeds; a line that
    is no record as text.
    """
    found: list[Any] = []
    for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            found.append(line)
            continue
        if "note" not in record:
            found.append({name: record[name] for name in ("step", "loss", "grad_norm")})
    return found


def two_writers(folder: Path) -> str:
    """Whether a process wrote a record after another had taken over from it."""
    writers: list[int] = []
    for line in (folder / "metrics.jsonl").read_text(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError):
            writers.append(int(json.loads(line)["writer"]))
    turns = writers[:1] + [now for before, now in pairwise(writers) if now != before]
    return (
        f"two live runs wrote records in turns, by process: {turns[:12]}"
        if len(turns) > len(set(turns))
        else ""
    )


def run(count: int, seed: int) -> Outcome:
    """Kill and stop `count` runs, two of them at a time."""
    with tempfile.TemporaryDirectory(prefix="strangers-kills-") as places:

        def one(number: int, case: Case, reference: Any = None) -> Outcome:
            place = Path(places, str(number))
            place.mkdir()
            kind, seen = attempt(case, place, reference)
            return Outcome.of(kind, f"case {number} of seed {seed}: {case}", seen)

        calm = Case("kill", 0, (), 0.0, 0, 0.0)
        if not (first := one(-1, calm)).ran:
            raise SystemExit(f"An undisturbed run did not come to its end: {first.failures}")
        calm_place = Path(places, "-1")
        digest = next(
            line
            for line in (calm_place / "out-0").read_text().splitlines()
            if line.startswith("digest")
        )
        undisturbed = (digest.removeprefix("digest").strip(), numbers(calm_place / "run"))
        tally = Tally("kills", count)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            futures = [
                pool.submit(one, number, draw(seed, number), undisturbed) for number in range(count)
            ]
            for future in concurrent.futures.as_completed(futures):
                tally.add(future.result())
        return tally.total


if __name__ == "__main__":
    try:
        train(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except Exception as error:
        # For the process that waits for this one: of what others of its threads write, nothing says
        # how it ended.
        first = str(error).partition("\n")[0]
        print(
            "refused" if is_refusal(error) else "raw_errors",
            f"{type(error).__name__}: {first}",
            flush=True,
        )
        raise
