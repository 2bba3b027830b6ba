"""When a compressed exchange pays: a picture for the docs, by the formulas of `sl.break_even`.

How much faster a step is with one bit between machines of eight H200 than with exact sums, over what a machine's network carries,
for some numbers of tokens that a GPU sees in a step. How large the model is cancels: it makes gradients and products alike.

    python -m benchmarks.break_even --json [--plot docs/break_even.svg]
"""

import argparse
import math
from pathlib import Path
from typing import Any

import shardlib as sl
from benchmarks._report import report

GPUS, MACHINES, UTILIZATION = 8, 4, 0.4
TOKENS = (2048, 8192, 32_768, 131_072)
COLOURS = ("#b33", "#c80", "#2a7", "#247")
GIGABITS = (1, 10, 100, 1000, 10_000)


def gain(gigabits: float, tokens: int, parameters: float = 1.5e9) -> sl.BreakEven:
    """Of a step in which a GPU sees so many tokens, on machines that send so many gigabits a second."""
    chip = sl.Target("gpu:h200:1x1x8").chip
    return sl.break_even(
        parameters=parameters, workers=MACHINES, shards=GPUS, tokens=GPUS * tokens, bandwidth=gigabits * 1e9 / 8 / GPUS,
        flops=UTILIZATION * chip.flops["bf16"], memory_bandwidth=chip.hbm_bandwidth,
    )  # fmt: skip


def picture() -> str:
    """The gain over the bandwidth, a line for each number of tokens."""
    width, height, left, top, right, bottom = 720, 340, 60, 50, 690, 290
    x = lambda gigabits: left + (right - left) * math.log10(gigabits) / 4  # noqa: E731
    y = lambda gain: bottom - (bottom - top) * math.log2(max(gain, 0.9) / 0.9) / math.log2(32 / 0.9)  # noqa: E731
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="20" font-size="14">How many times as fast a step is with one bit between four machines of '
        "eight H200</text>",
        f'<text x="{left}" y="38" fill="#666">by the tokens that a GPU sees in a step, all microbatches together</text>',
    ]
    for times in (1, 2, 4, 8, 16, 32):
        colour = "#888" if times == 1 else "#ddd"
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y(times):.1f}" y2="{y(times):.1f}" stroke="{colour}"/>')
        parts.append(f'<text x="{left - 8}" y="{y(times) + 4:.1f}" text-anchor="end">{times}</text>')
    for gigabits in GIGABITS:
        label = f"{gigabits:,} Gb/s"
        parts.append(f'<text x="{x(gigabits):.1f}" y="{bottom + 20}" text-anchor="middle">{label}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 40}" text-anchor="end" fill="#666">what a machine sends</text>')
    for row, (tokens, colour) in enumerate(zip(TOKENS, COLOURS, strict=True)):
        places = [10 ** (k / 10) for k in range(41)]
        points = " ".join(f"{x(place):.1f},{y(gain(place, tokens).speedup):.1f}" for place in places)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(
            f'<text x="{right}" y="{top + 16 * (row + 1)}" text-anchor="end" fill="{colour}">{tokens:,} tokens</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    """Compute, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--plot", type=Path, help="draw the picture into this file")
    arguments = parser.parse_args()
    if arguments.plot:
        arguments.plot.write_text(picture())
    figures: dict[str, Any] = {
        "break_even_gigabits": gain(100, 8192).bandwidth * 8 * GPUS / 1e9,
        "speedups": {f"{g} Gb/s, {t} tokens": round(gain(g, t).speedup, 3) for g in GIGABITS for t in TOKENS},
    }
    report("break_even", figures, {}, arguments.json)


if __name__ == "__main__":
    main()
