"""How much of what experts are sent is under way while matrices are multiplied, in a pipeline.

Eight layers of experts on two stages of DualPipeV, the experts split over four devices of each. A
forward and a backward pass of a tick run one after the other and, by `combine_passes=True`, a layer
of each at a time. A figure is the share of the bytes of all-to-alls between whose start and end the
compiled program has a product of matrices. Beside it stands what the program holds besides its
arguments.

It needs both compilers and no accelerator: `pip install -e ".[tpu-plan,gpu-plan]"`.

    python -m benchmarks.combined_passes --json
"""

import argparse
import os
import sys

import jax
import optax
from flax import nnx

import shardlib as sl
from benchmarks._compiled import Compiled, compile_for
from benchmarks._report import report
from models import moe
from shardlib.machine._targets import COMPILE_ONLY

MACHINES = {"v6e": "tpu:v6e:2x4", "7x": "tpu:7x:2x2x1", "h200": "gpu:h200:1x1x8"}
CONFIG = moe.MoEConfig(
    layers=8,
    width=1024,
    heads=8,
    context=1024,
    vocab=1024,
    hidden=2048,
    experts=8,
    every=1,
    norm="rms",
    positions="rotary",
    mlp="swiglu",
    bias=False,
    router=sl.experts.TopK(2),
)
BOUNDS = {"sent_ratio": 1.0}


def compiled(machine: str, combine: bool) -> Compiled:
    """The program of a step."""
    target = sl.Target(MACHINES[machine])
    mesh = target.mesh("stage=2,data=4")
    strategy = sl.Strategy(
        mesh=mesh,
        rules=sl.rules.data | sl.rules.pipeline | sl.AxisRules(experts="data"),
        pipeline=sl.pipeline.DualPipeV(2, 8),
        combine_passes=combine,
        precision=sl.Precision("bf16", keep=(".*router",)),
        remat="full",
        zero=1,
    )
    state = sl.init(
        lambda: moe.MoE(CONFIG, rngs=nnx.Rngs(0)), optax.adam(1e-3), strategy, abstract=True
    )
    batch = {"tokens": jax.ShapeDtypeStruct((4 * 8 * 2, CONFIG.context + 1), "int32")}
    return compile_for(target, mesh, sl.train_step(moe.loss, strategy).lower(state, batch))


def to_experts(program: Compiled) -> tuple[int, float]:
    """The bytes that all-to-alls send, and the share of them that is hidden."""
    sends = [one for one in program.collectives if one.kind.endswith("all-to-all")]
    sent = sum(one.total_bytes for one in sends)
    hidden = sum(one.total_bytes for one in sends if one.overlapped)
    return sent, hidden / sent


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--machines", default="v6e,h200", help="some of v6e, 7x and h200")
    arguments = parser.parse_args()
    os.environ.update(COMPILE_ONLY)  # before a compiler is loaded
    sl.simulate_devices(8)
    figures: dict[str, float] = {}
    for machine in arguments.machines.split(","):
        sent: list[int] = []
        for combine in (False, True):
            program = compiled(machine, combine)
            bytes_sent, hidden = to_experts(program)
            sent.append(bytes_sent)
            temporaries = program.program.memory_analysis().temp_size_in_bytes
            name = f"{machine}_{'combined' if combine else 'apart'}"
            figures[f"hidden_{name}"] = round(hidden, 3)
            figures[f"temporaries_gb_{name}"] = round(temporaries / 1e9, 2)
            print(
                f"{name:14} hidden {hidden:5.1%} of {bytes_sent / 1e6:.0f} MB   temporaries "
                f"{temporaries / 1e9:.2f} GB",
                file=sys.stderr,
                flush=True,
            )
        ratio = sent[1] / sent[0]
        figures["sent_ratio"] = max(ratio, figures.get("sent_ratio", 0.0))
    report("combined_passes", figures, BOUNDS, arguments.json)


if __name__ == "__main__":
    main()
