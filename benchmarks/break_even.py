"""When a compressed exchange pays: pictures for the docs, by the formulas of `sl.break_even`.

How much faster a step is with one bit between machines of eight H200 than with exact sums, over
what a machine's network carries, for some numbers of tokens that a GPU sees in a step. How large
the model is cancels: it makes gradients and products alike. A second picture, `*_methods.svg`, has
every method at one number of tokens.

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


METHODS = {
    "one bit": (sl.collectives.OneBit("pod"), "#247"),
    "four bits": (sl.collectives.Quantised("pod", bits=4), "#57a"),
    "PowerSGD, rank 4": (sl.collectives.PowerSGD("pod"), "#2a7"),
    "the largest 1%": (sl.collectives.TopK("pod"), "#888"),
    "apart for 8 steps": (sl.collectives.LocalSGD("pod", every=8), "#c80"),
    "apart for 500 steps": (sl.collectives.DiLoCo("pod"), "#b33"),
}
WIDTH = 2048
"""The rows and columns of a matrix, where factors are sent."""


def gain(
    gigabits: float,
    tokens: int,
    parameters: float = 1.5e9,
    exchange: sl.Exchange | None = None,
) -> sl.BreakEven:
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
        exchange=exchange,
        width=WIDTH,
    )


def picture(curves: dict[str, tuple[Any, str]], title: str, subtitle: str) -> str:
    """The gain over the bandwidth, a line for each of some functions of it."""
    width, height, left, top, right, bottom = 740, 340, 60, 50, 690, 290

    def x(gigabits: float) -> float:
        return left + (right - left) * math.log10(gigabits) / 4

    def y(gain: float) -> float:
        return bottom - (bottom - top) * math.log2(max(gain, 0.9) / 0.9) / math.log2(32 / 0.9)

    parts = [text(left, 38, subtitle, colour="#666")]
    parts += [
        level(left, right, y(times), times, "#888" if times == 1 else "#ddd")
        for times in (1, 2, 4, 8, 16, 32)
    ]
    parts += [
        text(x(gigabits), bottom + 20, f"{gigabits:,} Gb/s", "middle") for gigabits in GIGABITS
    ]
    parts.append(text(right, bottom + 40, "what a machine sends", "end", "#666"))
    places = [10 ** (k / 10) for k in range(41)]
    for row, (label, (speedup, colour)) in enumerate(curves.items()):
        parts.append(line([(x(place), y(speedup(place))) for place in places], colour, 2))
        parts.append(text(right, top + 16 * (row + 1), label, "end", colour))
    return svg(width, height, left, title, parts)


def by_tokens() -> str:
    """One bit, for some numbers of tokens."""
    curves: dict[str, tuple[Any, str]] = {}
    for tokens, colour in zip(TOKENS, COLOURS, strict=True):
        curves[f"{tokens:,} tokens"] = (lambda g, t=tokens: gain(g, t).speedup, colour)
    return picture(
        curves,
        "How many times as fast a step is with one bit between four machines of eight H200",
        "by the tokens that a GPU sees in a step, all microbatches together",
    )


def by_method() -> str:
    """Every method, for one number of tokens."""
    curves: dict[str, tuple[Any, str]] = {}
    for label, (exchange, colour) in METHODS.items():
        curves[label] = (lambda g, e=exchange: gain(g, 8192, exchange=e).speedup, colour)
    return picture(
        curves,
        "How many times as fast a step is than with exact sums, four machines of eight H200",
        "8,192 tokens a GPU; what it does to the loss is another question",
    )


def main() -> None:
    """Compute, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--plot", type=Path, help="draw the picture into this file")
    arguments = parser.parse_args()
    if arguments.plot:
        arguments.plot.write_text(by_tokens())
        methods = arguments.plot.with_stem(f"{arguments.plot.stem}_methods")
        methods.write_text(by_method())
    figures: dict[str, Any] = {
        "break_even_gigabits": gain(100, 8192).bandwidth * 8 * GPUS / 1e9,
        "speedups": {
            f"{g} Gb/s, {t} tokens": round(gain(g, t).speedup, 3) for g in GIGABITS for t in TOKENS
        },
        "methods_at_10_gigabits": {
            label: round(gain(10, 8192, exchange=exchange).speedup, 3)
            for label, (exchange, _) in METHODS.items()
        },
    }
    report("break_even", figures, {}, arguments.json)


if __name__ == "__main__":
    main()
