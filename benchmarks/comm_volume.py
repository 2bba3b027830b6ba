"""What each stage of ZeRO sends per step, read off compiled programs, against the paper's volumes.

A scanned decoder on eight devices, every stage, 1, 4 and 16 microbatches, with and without tensor
parallelism, and hybrid sharding over two slices; on the compilers of TPU v5e, H200 and CPU. And on
16 v5e and 64 v5p, where axes lie along several dims of a torus. Theory, of P parameters that are
split, A microbatches, n devices along an axis, in units of (n-1)/n:

    stage 0   2P          one all-reduce
    stage 1   2P          one reduce-scatter, one all-gather
    stage 2   (A + 1) P   a reduce-scatter for each microbatch, one all-gather
    stage 3   3P A        two gathers and a scatter for each; but a table that is looked up is
                          gathered once, in the forward pass

Small parameters stay whole and are summed once, 2P. Hybrid sharding sends the above within a slice,
and between slices one all-reduce of the shards, 2P/n. What tensor parallelism sends must be what it
sends at stage 0. Bytes are those on the wire: bfloat16 on TPU and GPU, float32 on the CPU, whose
compiler adds up nothing narrower.

It needs both compilers and no accelerator: `pip install -e ".[tpu-plan,gpu-plan]"`. Some fifteen
minutes on two cores.

    python -m benchmarks.comm_volume --json
"""

import argparse
import math
import os
import sys
from collections import defaultdict

import jax
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from models import gpt
from shardlib.machine._targets import COMPILE_ONLY

MACHINES = {
    "v5e": ("tpu:v5e:2x4", "tpu:v5e:2x2:slices=2", 2),
    # Axes of 16 and of 64 devices along two dims of a torus and along three.
    "v5e16": ("tpu:v5e:4x4", "", 2),
    "v5p64": ("tpu:v5p:4x4x4", "", 2),
    "h200": ("gpu:h200:1x1x8", "gpu:h200:2x1x4", 2),
    "cpu": ("cpu:8", "cpu:8", 4),
}
MESHES = ("data=8", "data=4,model=2", "pod=2,data=4")
MESHES_OF = {"v5e16": ("data=16",), "v5p64": ("data=64", "data=16,model=4")}
BOUNDS = {
    "worst_ratio": 1.02,
    "most_missing": 0.05,
    "worst_ratio_between_slices": 1.02,
    "worst_tensor_ratio": 1.02,
}
CONFIG = gpt.GPTConfig(
    layers=4,
    width=512,
    heads=8,
    context=64,
    vocab=4096,
    norm="rms",
    positions="rotary",
    bias=False,
    tied=False,
)
RULES = {
    "data=8": sl.rules.data,
    "data=16": sl.rules.data,
    "data=64": sl.rules.data,
    "data=4,model=2": sl.rules.data | sl.rules.tensor,
    "data=16,model=4": sl.rules.data | sl.rules.tensor,
    "pod=2,data=4": sl.rules.data | sl.AxisRules(batch=("pod", "data")),
}

Sent = dict[tuple[str, ...], float]


def compiled(
    machine: str, shape: str, stage: int, accumulate: int
) -> tuple[Sent, sl.State, sl.Strategy]:
    """What a device sends in a step over each set of axes, as the compiler has it."""
    one_slice, two_slices, itemsize = MACHINES[machine]
    target = sl.Target(two_slices if "pod" in shape else one_slice)
    mesh = target.mesh(shape, dcn="pod" if "pod" in shape else "")
    precision = sl.Precision("bf16", reduce="bf16") if itemsize == 2 else sl.Precision()
    zero = sl.Zero(stage, axes=("data",) if stage else None)
    strategy = sl.Strategy(
        mesh=mesh, rules=RULES[shape], zero=zero, accumulate=accumulate, precision=precision
    )
    state = sl.init(
        lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optax.adam(1e-3), strategy, abstract=True
    )
    examples = 2 * accumulate * math.prod(mesh.shape[axis] for axis in strategy.data_axes)
    batch = {"tokens": jax.ShapeDtypeStruct((examples, CONFIG.context + 1), "int32")}
    with jax.default_matmul_precision("highest"):
        plan = sl.plan(sl.train_step(gpt.loss, strategy), state, batch, target)
    sent: Sent = defaultdict(float)
    for one in plan.collectives:
        sent[one.axes or ()] += one.total_bytes
    return dict(sent), state, strategy


def theory(
    state: sl.State, strategy: sl.Strategy, stage: int, accumulate: int, itemsize: int
) -> Sent:
    """What the paper says a device sends over the axes of data."""
    sizes, sent = strategy.device_mesh.shape, defaultdict(float)
    of_scatter = {0: 0, 1: 1, 2: accumulate, 3: accumulate}[stage]
    of_gather = {0: 0, 1: 1, 2: 1, 3: 2 * accumulate}[stage]
    for path, leaf in zip(state_paths(state), jax.tree.leaves(state.params), strict=True):
        spec = leaf.sharding.spec
        tensor = sizes.get("model", 1) if "model" in jax.tree.leaves(tuple(spec)) else 1
        size = leaf.size * itemsize / tensor
        if "data" in jax.tree.leaves(tuple(spec)):
            gathers = of_gather // 2 if stage == 3 and path == "embedding" else of_gather
            sent["data",] += size * (of_scatter + gathers) * (sizes["data"] - 1) / sizes["data"]
            if "pod" in sizes:
                sent["pod",] += 2 * size / sizes["data"] * (sizes["pod"] - 1) / sizes["pod"]
        else:
            devices = math.prod(sizes[axis] for axis in strategy.data_axes)
            sent[strategy.data_axes] += 2 * size * (devices - 1) / devices
    return dict(sent)


def state_paths(state: sl.State) -> list[str]:
    """The paths of the parameters."""
    return [row.path for row in sl.describe(state).rows if not row.path.startswith("rest")]


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--machines", default=",".join(MACHINES), help="some of v5e, v5e16, v5p64, h200, cpu"
    )
    arguments = parser.parse_args()
    os.environ.update(COMPILE_ONLY)  # before a compiler is loaded
    sl.simulate_devices(8)
    worst, least, between, worst_tensor, programs = 0.0, 1.0, 0.0, 1.0, 0
    for machine in arguments.machines.split(","):
        for shape in MESHES_OF.get(machine, MESHES):
            of_tensor: dict[int, float] = {}
            for stage in range(4):
                for accumulate in (1, 4, 16):
                    found, state, strategy = compiled(machine, shape, stage, accumulate)
                    expected = theory(state, strategy, stage, accumulate, MACHINES[machine][2])
                    # Of a sum over two networks some compilers make sums within and between slices,
                    # of as many bytes.
                    over_data = sum(size for axes, size in found.items() if "model" not in axes)
                    ratio = over_data / sum(expected.values())
                    worst, least, programs = max(worst, ratio), min(least, ratio), programs + 1
                    if stage and "pod" in shape:
                        slow = sum(size for axes, size in expected.items() if "pod" in axes)
                        between = max(
                            between,
                            sum(size for axes, size in found.items() if "pod" in axes) / slow,
                        )
                    if "model" in shape:
                        base = of_tensor.setdefault(accumulate, found["model",])
                        worst_tensor = max(worst_tensor, found["model",] / base)
                    whole = (
                        sum(leaf.size for leaf in jax.tree.leaves(state.params))
                        * MACHINES[machine][2]
                    )
                    volume = sum(expected.values()) / whole
                    print(
                        f"{machine:5} {shape:15} stage {stage} x{accumulate:<3} theory "
                        f"{volume:7.3f} P, found {ratio:.4f} of it",
                        file=sys.stderr,
                    )
    figures = {
        "programs": programs, "worst_ratio": worst, "most_missing": 1 - least,
        "worst_ratio_between_slices": between, "worst_tensor_ratio": worst_tensor,
    }  # fmt: skip
    report("comm_volume", figures, BOUNDS, arguments.json)


if __name__ == "__main__":
    main()
