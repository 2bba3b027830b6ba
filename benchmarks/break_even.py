"""When a compressed exchange pays: a picture for the docs, by the formulas of `sl.break_even`.

How much faster a step is with one bit between machines of eight H200 than with exact sums, over
what a machine's network carries, for some numbers of tokens that a GPU sees in a step. How large
the model is cancels: it makes gradients and products alike.

    python -m benchmarks.break_even --json [--plot docs/break_even.svg]
"""

import argparse
import math
from pathlib import Path
from typing import Any

import shardlib as sl
from benchmarks._picture import level, line, svg, text
from benchmarks._report import report

GPUS, MACHINES, UTILIZATION = 8, 4, 0.4
TOKENS = (2048, 8192, 32_768, 131_072)
COLOURS = ("#b33", "#c80", "#2a7", "#247")
GIGABITS = (1, 10, 100, 1000, 10_000)


def gain(gigabits: float, tokens: int, parameters: float = 1.5e9) -> sl.BreakEven:
    """Of a step in which a GPU sees so many tokens, on machines that send so many gigabits a
    second.
    """
    chip = sl.Target("gpu:h200:1x1x8").chip
    flops = 6 * parameters * tokens
    return sl.break_even(
        parameters=parameters,
        workers=MACHINES,
        shards=GPUS,
        bandwidth=gigabits * 1e9 / 8 / GPUS,
        compute_seconds=flops / (UTILIZATION * chip.flops["bf16"]),
        memory_bandwidth=chip.hbm_bandwidth,
    )


def picture() -> str:
    """The gain over the bandwidth, a line for each number of tokens."""
    width, height, left, top, right, bottom = 740, 340, 60, 50, 690, 290

    def x(gigabits: float) -> float:
        return left + (right - left) * math.log10(gigabits) / 4

    def y(gain: float) -> float:
        return bottom - (bottom - top) * math.log2(max(gain, 0.9) / 0.9) / math.log2(32 / 0.9)

    parts = [
        text(
            left,
            38,
            "by the tokens that a GPU sees in a step, all microbatches together",
            colour="#666",
        )
    ]
    parts += [
        level(left, right, y(times), times, "#888" if times == 1 else "#ddd")
        for times in (1, 2, 4, 8, 16, 32)
    ]
    parts += [
        text(x(gigabits), bottom + 20, f"{gigabits:,} Gb/s", "middle") for gigabits in GIGABITS
    ]
    parts.append(text(right, bottom + 40, "what a machine sends", "end", "#666"))
    places = [10 ** (k / 10) for k in range(41)]
    for row, (tokens, colour) in enumerate(zip(TOKENS, COLOURS, strict=True)):
        parts.append(
            line([(x(place), y(gain(place, tokens).speedup)) for place in places], colour, 2)
        )
        parts.append(text(right, top + 16 * (row + 1), f"{tokens:,} tokens", "end", colour))
    title = "How many times as fast a step is with one bit between four machines of eight H200"
    return svg(width, height, left, title, parts)


def main() -> None:
    """Compute, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--plot", type=Path, help="draw the picture into this file")
    arguments = parser.parse_args()
    if arguments.plot:
        arguments.plot.write_text(picture())
    figures: dict[str, Any] = {
        "break_even_gigabits": gain(100, 8192).bandwidth * 8 * GPUS / 1e9,
        "speedups": {
            f"{g} Gb/s, {t} tokens": round(gain(g, t).speedup, 3) for g in GIGABITS for t in TOKENS
        },
    }
    report("break_even", figures, {}, arguments.json)


if __name__ == "__main__":
    main()
