"""What the tiny recipe learns in ten minutes of a laptop: bits a byte of the standard library's files that are held out.

The command of the README, in a process of its own that sees the CPU as one device; its clock starts before Python does, so
tokenizing, compiling, evaluating and saving count. `bits_per_byte` is that of the last evaluation; the curve is every one.

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

from benchmarks._report import report

ROOT = Path(__file__).parent.parent
BOUNDS = {"bits_per_byte": 1.6, "minutes": 10.0}
WIDTH, HEIGHT, LEFT, TOP = 720, 320, 60, 50


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    arguments = parser.parse_args()

    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
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
        "bits_per_byte_after_two_minutes": min((bits for _, at, bits in curve if at <= 120), default=float("nan")),
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

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="14">Bits a byte of held-out files, over minutes: `tiny` on two cores</text>',
    ]
    for bits in (1.0, 1.5, 2.0, 2.5, 3.0):
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{y(bits):.1f}" y2="{y(bits):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(bits) + 4:.1f}" text-anchor="end">{bits:.1f}</text>')
    for minutes in range(0, int(last) + 1, 2):
        parts.append(f'<text x="{x(minutes):.1f}" y="{bottom + 20}" text-anchor="middle">{minutes}</text>')
    goal = BOUNDS["bits_per_byte"]
    parts.append(
        f'<line x1="{LEFT}" x2="{right}" y1="{y(goal):.1f}" y2="{y(goal):.1f}" stroke="#b33" stroke-dasharray="4 4"/>'
    )
    points = " ".join(f"{x(seconds / 60):.1f},{y(bits):.1f}" for seconds, bits in curve)
    parts.append(f'<polyline points="{points}" fill="none" stroke="#247" stroke-width="2"/>')
    parts += [f'<circle cx="{x(s / 60):.1f}" cy="{y(b):.1f}" r="3" fill="#247"/>' for s, b in curve]
    parts.append(
        f'<text x="{x(curve[-1][0] / 60):.1f}" y="{y(curve[-1][1]) + 20:.1f}" text-anchor="end">{curve[-1][1]:.2f}</text>'
    )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    main()
