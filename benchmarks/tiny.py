"""What the tiny recipe learns in ten minutes of a laptop: bits a byte of the standard library's
files that are held out.

The command of the README, in a process of its own that sees the CPU as one device; its clock starts
before Python does, so tokenizing, compiling, evaluating and saving count. `bits_per_byte` is that
of the last evaluation; the curve is every one.

    python -m benchmarks.tiny --json [--plot docs/tiny.svg]
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._picture import dot, level, line, svg, text
from benchmarks._report import report

ROOT = Path(__file__).parent.parent
BOUNDS = {"bits_per_byte": 1.6, "minutes": 10.0}
WIDTH, HEIGHT, LEFT, TOP = 720, 320, 60, 50


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    arguments = parser.parse_args()

    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {
        "JAX_PLATFORMS": "cpu"
    }
    with tempfile.TemporaryDirectory() as folder:
        # A cache of its own: the tokens and the programs are made anew.
        command = [
            sys.executable,
            "examples/train_lm.py",
            "tiny",
            "--folder",
            f"{folder}/run",
            "--cache",
            f"{folder}/cache",
        ]
        # Evaluated oftener than the recipe has it, for the curve; which takes time of its own.
        started, curve, sample = time.monotonic(), [], []
        run = subprocess.Popen(
            [*command, "--loop.evaluate_every", "250"],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            if found := re.search(r"step (\d+), held out: .*bits_per_byte ([\d.]+)", line):
                curve.append((int(found[1]), round(time.monotonic() - started, 1), float(found[2])))
            if sample or line.startswith("A sample"):
                sample.append(line)
        seconds = time.monotonic() - started
        if run.wait():
            raise SystemExit(run.returncode)
    if arguments.plot:
        arguments.plot.write_text(plot([(at, bits) for _, at, bits in curve]))
    figures = {
        "bits_per_byte": curve[-1][2],
        "minutes": seconds / 60,
        "steps": curve[-1][0],
        "bits_per_byte_after_two_minutes": min(
            (bits for _, at, bits in curve if at <= 120), default=float("nan")
        ),
        "curve": curve,
    }
    report("tiny", figures, BOUNDS, arguments.json)


def plot(curve: list[tuple[float, float]]) -> str:
    """Bits a byte over minutes."""
    right, bottom = WIDTH - 30, HEIGHT - 45
    last, low, high = max(10.0, curve[-1][0] / 60), 1.0, 3.0

    def x(minutes: float) -> float:
        return LEFT + (right - LEFT) * minutes / last

    def y(bits: float) -> float:
        return bottom - (bottom - TOP) * (min(bits, high) - low) / (high - low)

    parts = [level(LEFT, right, y(bits), bits) for bits in (1.0, 1.5, 2.0, 2.5, 3.0)]
    parts += [
        text(x(minutes), bottom + 20, minutes, "middle") for minutes in range(0, int(last) + 1, 2)
    ]
    goal = y(BOUNDS["bits_per_byte"])
    points = [(x(seconds / 60), y(bits)) for seconds, bits in curve]
    parts += [line([(LEFT, goal), (right, goal)], "#b33", dashed=True), line(points, "#247", 2)]
    parts += [dot(*point, "#247") for point in points]
    parts.append(text(points[-1][0], points[-1][1] + 20, f"{curve[-1][1]:.2f}", "end"))
    return svg(
        WIDTH,
        HEIGHT,
        LEFT,
        "Bits a byte of held-out files, over minutes: `tiny` on two cores",
        parts,
    )


if __name__ == "__main__":
    main()
