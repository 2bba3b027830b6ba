"""How much of the exchange of gradients is under way while matrices are multiplied, as compilers
schedule it.

A scanned decoder on eight devices of TPU v5e and of H200, two microbatches, every stage of ZeRO;
stages 0 and 1 with the exchange after the last microbatch and, by `sl.Exact(overlap=True)`, in its
backward pass. A figure is the share of the bytes of all-reduces and reduce-scatters between whose
start and end the compiled program has a product of matrices. On standard error stand the same share
of all that is sent, gathers too, and what overlapping costs: how long the step compiles, and what
the program holds.

It needs both compilers and no accelerator: `pip install -e ".[tpu-plan,gpu-plan]"`.

    python -m benchmarks.overlap --json
"""

import argparse
import os
import sys

import jax
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from models import gpt
from shardlib.machine._targets import COMPILE_ONLY

MACHINES = {"v5e": "tpu:v5e:2x4", "7x": "tpu:7x:2x2x1", "h200": "gpu:h200:1x1x8"}
CONFIG = gpt.GPTConfig(
    layers=4,
    width=2048,
    heads=16,
    context=512,
    vocab=8192,
    norm="rms",
    positions="rotary",
    bias=False,
    tied=False,
)
CHOICES = [(0, False), (0, True), (1, False), (1, True), (2, False), (3, False)]


def planned(machine: str, stage: int, overlap: bool) -> sl.Plan:
    """The plan of a step."""
    target = sl.Target(MACHINES[machine])
    strategy = sl.Strategy(
        mesh=target.mesh("data=8"), rules=sl.rules.data, zero=stage, accumulate=2, remat="full",
        precision=sl.Precision("bf16", reduce="bf16"), exchange=sl.Exact(overlap=overlap),
    )  # fmt: skip
    state = sl.init(
        lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optax.adam(1e-3), strategy, abstract=True
    )
    batch = {"tokens": jax.ShapeDtypeStruct((8 * 2 * 4, CONFIG.context + 1), "int32")}
    return sl.plan(sl.train_step(gpt.loss, strategy), state, batch, target)


def fraction(found: sl.Plan) -> float:
    """Of the bytes of sums of gradients, those that are under way meanwhile."""
    sums = [one for one in found.collectives if one.kind in ("all-reduce", "reduce-scatter")]
    return sum(one.total_bytes for one in sums if one.overlapped) / sum(
        one.total_bytes for one in sums
    )


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--machines", default="v5e,h200", help="some of v5e, 7x (three minutes a program) and h200"
    )
    arguments = parser.parse_args()
    os.environ.update(COMPILE_ONLY)  # before a compiler is loaded
    sl.simulate_devices(8)
    figures = {}
    for machine in arguments.machines.split(","):
        for stage, overlap in CHOICES:
            found = planned(machine, stage, overlap)
            name = f"{machine}_stage{stage}" + ("_overlap" if overlap else "")
            figures[f"overlapped_fraction_{name}"] = fraction(found)
            print(
                f"{name:22} overlapped {fraction(found):5.1%} of sums, "
                f"{found.overlapped_fraction:5.1%} of all   sends "
                f"{sum(found.sent_bytes.values()) / 1e6:8.1f} MB   heap "
                f"{found.memory.heap_bytes / 1e6:8.1f} MB   traced {found.lower_seconds:5.1f} s, "
                f"compiled {found.compile_seconds:5.1f} s",
                file=sys.stderr,
            )
    report("overlap", figures, {}, arguments.json)


if __name__ == "__main__":
    main()
