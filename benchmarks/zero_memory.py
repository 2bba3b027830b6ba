"""The ZeRO paper's table of bytes per device, read off compiled programs.

A decoder of 7.5 billion parameters, trained by Adam in mixed precision: bfloat16 copies of the
parameters and bfloat16 gradients, float32 master weights and moments; one sequence of 1,024 tokens
on each device, everything recomputed, no accumulation. Theory, of P parameters on N devices: 16P;
4P + 12P/N; 2P + 14P/N; 16P/N. Found is what the compiled step holds at its fullest moment:
parameters, their bfloat16 copies, gradients and optimizer state. In columns of their own is what
stages 2 and 3 hold of a layer: its weights that stage 3 has gathered, its whole gradients that wait
to be scattered, known by having as many elements as a whole parameter; then activations, and the
rest: logits, products within a layer and their casts. Then what sums in float32 over two
microbatches add, as a multiple of P.

It needs the GPU's compiler and no accelerator: `pip install -e ".[gpu-plan]"`.

    python -m benchmarks.zero_memory --json [--plot docs/zero_memory.svg]
"""

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import optax
from flax import nnx

import shardlib as sl
from benchmarks._picture import bar, line, svg, text
from benchmarks._report import report
from models import gpt

MACHINES = {1: "gpu:h200:1x1x1", 4: "gpu:h200:1x1x4", 16: "gpu:h200:2x1x8", 64: "gpu:h200:8x1x8"}
BF16 = sl.Precision("bf16", reduce="bf16")
CONFIG = gpt.GPTConfig(layers=36, width=4096, heads=32, context=1024, vocab=51_200)
BOUNDS = {"worst_ratio": 1.05}
Sizes = list[tuple[int, int]]
"""Of each parameter its elements, and those of one layer of it."""


def theory(parameters: int, devices: int, stage: int) -> float:
    """The paper's bytes per device: parameters, gradients, and the optimizer's state with the
    master weights.
    """
    whole, split = [(16, 0), (4, 12), (2, 14), (0, 16)][stage]
    return parameters * (whole + split / devices)


def compiled(
    target: str, stage: int, precision: sl.Precision = BF16, accumulate: int = 1
) -> tuple[sl.Plan, Sizes]:
    """The plan of a step, and the elements of its parameters."""
    machine = sl.Target(target)
    mesh = machine.mesh(
        f"data={machine.size}", dcn=f"data={machine.slices}" if machine.slices > 1 else ""
    )
    strategy = sl.Strategy(
        mesh=mesh,
        rules=sl.rules.data,
        zero=stage,
        precision=precision,
        accumulate=accumulate,
        remat="full",
    )
    state = sl.init(
        lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optax.adam(1e-4), strategy, abstract=True
    )
    batch = {
        "tokens": jax.ShapeDtypeStruct((machine.size * accumulate, CONFIG.context + 1), "int32")
    }
    found = sl.plan(sl.train_step(gpt.loss, strategy), state, batch, machine)
    leaves = jax.tree.leaves(state.params)
    return found, [
        (leaf.size, leaf.size // (CONFIG.layers if leaf.shape[0] == CONFIG.layers else 1))
        for leaf in leaves
    ]


def columns(found: sl.Plan, stage: int, sizes: Sizes) -> dict[str, float]:
    """Bytes per device at the fullest moment, in the paper's columns and in those that it does not
    count.
    """
    kinds = found.memory.kinds
    copies = kinds["copies of parameters"]
    gathered = copies if stage == 3 else 0
    waiting = 0
    if stage >= 2 and found.devices > 1:
        whole = {layer for _, layer in sizes}
        waiting = sum(
            piece.size
            for piece in found.memory.pieces
            if piece.kind == "gradients"
            and math.prod(map(int, re.findall(r"\d+", piece.type.partition("[")[2]))) in whole
        )
    model = (
        kinds["parameters"]
        + kinds["optimizer state"]
        + kinds["gradients"]
        - waiting
        + copies
        - gathered
    )
    rest = found.memory.total_bytes - model - gathered - waiting - kinds["activations"]
    return {
        "model": model,
        "gathered": gathered,
        "waiting": waiting,
        "activations": kinds["activations"],
        "rest": rest,
    }


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--plot", type=Path, help="where to write a picture of the largest machine's"
    )
    arguments = parser.parse_args()
    sl.simulate_devices(8)
    worst, figures, bars = 0.0, {}, []
    print(
        f"{'N':>5} {'stage':>5} {'theory':>9} {'found':>9} {'ratio':>6}   gathered    waiting  "
        "activations       rest   GB",
        file=sys.stderr,
    )
    parameters = 0
    for devices, target in MACHINES.items():
        for stage in range(4):
            found, sizes = compiled(target, stage)
            parameters = sum(size for size, _ in sizes)
            of, expected = columns(found, stage, sizes), theory(parameters, devices, stage)
            worst = max(worst, of["model"] / expected)
            figures[f"gb_n{devices}_stage{stage}"] = of["model"] / 1e9
            show(devices, stage, expected, of)
            if devices == max(MACHINES):
                bars.append((found.memory.kinds, expected))
    if arguments.plot:
        arguments.plot.write_text(plot(max(MACHINES), bars))
    estimated = {
        f"gb_n1024_stage{stage}_estimated": theory(parameters, 1024, stage) / 1e9
        for stage in range(4)
    }
    added: dict[str, Any] = {}
    for stage in (1, 2):
        found, sizes = compiled(
            MACHINES[16],
            stage,
            sl.Precision("bf16", accumulate="float32", reduce="bf16"),
            accumulate=2,
        )
        extra = columns(found, stage, sizes)["model"] - 1e9 * figures[f"gb_n16_stage{stage}"]
        added[f"float32_sums_add_stage{stage}_of_p"] = extra / parameters
    report(
        "zero_memory",
        {"parameters": parameters, "worst_ratio": worst, **figures, **estimated, **added},
        BOUNDS,
        arguments.json,
    )


COLOURS = {
    "parameters": "#4269d0", "copies of parameters": "#a7b8ea", "gradients": "#3a8a5f",
    "optimizer state": "#e1a057",
    "all else": "#cccccc",
}  # fmt: skip
WIDTH, LEFT, TOP, ROW, PIXELS = 800, 80, 64, 44, 4.6


def plot(devices: int, bars: list[tuple[dict[str, int], float]]) -> str:
    """What a device holds at its fullest moment, by stage: a bar of the compiled bytes, a tick for
    the paper's figure.
    """
    title = (
        f"A device of {devices} at its fullest moment, GB: 7.5 billion parameters, Adam, bfloat16 "
        "with float32 masters"
    )
    parts, at = [], LEFT
    for kind, colour in COLOURS.items():
        parts += [bar(at, 32, 12, 12, colour, kind), text(at + 16, 42, kind)]
        at += 36 + 7 * len(kind)
    parts.append(text(at, 42, "| the paper"))
    for stage, (kinds, expected) in enumerate(bars):
        sizes = {kind: kinds.get(kind, 0) / 1e9 for kind in COLOURS}
        sizes["all else"] = sum(kinds.values()) / 1e9 - sum(sizes.values())
        x, y = float(LEFT), TOP + ROW * stage
        parts.append(text(LEFT - 8, y + 19, f"stage {stage}", "end"))
        for kind, size in sizes.items():
            parts.append(bar(x, y, PIXELS * size, 28, COLOURS[kind], f"{kind}: {size:.2f} GB"))
            x += PIXELS * size
        tick = LEFT + PIXELS * expected / 1e9
        parts.append(line([(tick, y - 3), (tick, y + 31)], "black", 2))
        parts.append(text(max(x, tick) + 8, y + 19, f"{sum(sizes.values()):.1f}"))
    return svg(WIDTH, TOP + ROW * len(bars) + 8, LEFT, title, parts)


def show(devices: int, stage: int, expected: float, of: dict[str, float]) -> None:
    """A line of the table."""
    print(
        f"{devices:5} {stage:5} {expected / 1e9:9.2f} {of['model'] / 1e9:9.2f} "
        f"{of['model'] / expected:6.3f}   "
        + "  ".join(
            f"{of[key] / 1e9:9.2f}" for key in ("gathered", "waiting", "activations", "rest")
        ),
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
