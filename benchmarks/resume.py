"""A run that is killed again and again ends bit for bit as one that nothing disturbed.

Two processes train the tiny recipe's model, smaller, with dropout, saving every few steps. Ten
times, at moments drawn at random, while compiling, stepping or writing a checkpoint, all of it is
killed by SIGKILL and started anew. At the end the digests of every array, the place in the data and
every recorded number are those of an undisturbed run.

    python -m benchmarks.resume --json
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks._report import report

ROOT = Path(__file__).parent.parent
STEPS, SAVE_EVERY = 400, 5
RUN = [
    *(
        "--model.layers",
        "2",
        "--model.width",
        "32",
        "--model.hidden",
        "64",
        "--model.context",
        "64",
        "--batch",
        "8",
    ),
    *(
        "--data.tokenizer",
        "bytes",
        "--model.vocab",
        "257",
        "--model.vocab_multiple",
        "1",
        "--model.dropout",
        "0.1",
    ),
    *("--loop.steps", str(STEPS), "--loop.save_every", str(SAVE_EVERY), "--loop.log_every", "1"),
    *("--loop.evaluate_every", "100", "--evaluation_batches", "4", "--prompt", ""),
]


def start(folder: Path) -> subprocess.Popen[str]:
    """The run in two processes of two devices each, from wherever it was."""
    train = [
        sys.executable,
        str(ROOT / "examples/train_lm.py"),
        "tiny",
        *RUN,
        "--folder",
        str(folder),
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "shardlib.launch", "-n", "2", "--devices", "2", "--", *train],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def result(folder: Path) -> dict[str, object]:
    """What must be the same: the digest of every array, the place in the data, every number of
    every record but speeds.
    """
    written = json.loads((folder / "checkpoints" / str(STEPS) / "about" / "metadata").read_text())
    content = json.loads(written["content"])
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [
        {
            name: value
            for name, value in line.items()
            if not name.endswith(("_per_second", "_left", "crc32"))
        }
        for line in lines
        if "note" not in line
    ]
    return {"leaves": content["leaves"], "data": content["processes"], "numbers": numbers}


def saved(folder: Path) -> int:
    """The step of the newest checkpoint."""
    names = [path.name for path in (folder / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def undisturbed(folder: Path) -> float:
    """The whole run; the seconds from its first step to its end."""
    process, first = start(folder), 0.0
    assert process.stdout is not None
    output = []
    for line in process.stdout:
        output.append(line)
        if not first and re.search(r"step 1/", line):
            first = time.monotonic()
    if process.wait():
        raise SystemExit("".join(output))
    return time.monotonic() - first


def killed(folder: Path, moment: float, whole: bool) -> tuple[int, bool]:
    """Run until so many seconds after the start, or after the first step, and kill; the step it
    came to, and whether it ended.

    The launcher is killed, and the kernel kills the processes with it.
    """
    process, at = start(folder), 0
    assert process.stdout is not None
    timer = threading.Timer(moment, process.kill)
    if whole:
        timer.start()
    for line in process.stdout:
        if found := re.search(r"step (\d+)/", line):
            at = int(found[1])
            if not timer.is_alive() and not timer.finished.is_set():
                timer.start()
    timer.cancel()
    process.wait()
    return at, process.returncode == 0


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--seed", type=int, default=None, help="of the moments; another each time by default"
    )
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    moments = random.Random(seed)

    with tempfile.TemporaryDirectory() as both:
        calm, wild = Path(both, "undisturbed"), Path(both, "killed")
        seconds = undisturbed(calm)
        print(f"undisturbed: {STEPS} steps in {seconds:.0f} s", flush=True)
        came_to, kills = [], 0
        while kills < arguments.kills:
            # Every fourth may come before the first step: while joining, reading a checkpoint,
            # compiling.
            whole = kills % 4 == 3
            left = seconds * (STEPS - saved(wild)) / STEPS / (arguments.kills - kills + 1)
            at, ended = killed(wild, moments.uniform(0, 15 if whole else 1.5 * left), whole)
            if ended:
                break
            kills += 1
            came_to.append(at)
            half = (
                [path.name for path in (wild / "checkpoints").glob("*tmp*")]
                if wild.exists()
                else []
            )
            where = f"at step {at}" if at else "before its first step"
            print(f"killed {where}" + (f", writing {half[0]}" if half else ""), flush=True)
        undisturbed(wild)
        one, other = result(calm), result(wild)
    different = [name for name in one if one[name] != other[name]]
    figures = {
        "identical": not different,
        "different": ", ".join(different) or "nothing",
        "kills": kills,
        "killed_at_steps": came_to,
        "arrays": len(one["leaves"]),  # type: ignore[arg-type]
        "records": len(one["numbers"]),  # type: ignore[arg-type]
        "seed": seed,
    }
    report("resume", figures, {}, arguments.json)
    if different or kills < arguments.kills:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
