"""What compressed exchanges send, read off compiled programs, against a float32 all-reduce and
against their own formulas.

First collectives by themselves, of 2^24 numbers among eight devices: means of signs and of
integers, gathers and scatters. Then whole steps of a GPT: 1-bit Adam over eight devices, between
two pods under ZeRO, and beside a tensor axis; Adam with gradients of integers. On the compilers of
TPU v5e, H200 and CPU. Everything counts that a step sends over the axes of the exchange in place of
gradients, the sums from which it tells the norm too. In a step of 1-bit Adam the exact all-reduce
of before the freeze stands beside it, in a branch of its own: that is what it is compared with.

`onebit_ratio`, `int8_ratio` and `int4_ratio` are the worst of all programs; `onebit_bf16_ratio` is
against an all-reduce in bfloat16. `worst_formula_ratio` is the worst of what is sent over what the
formula beside each collective says, or the inverse.

Then steps of the other methods on two of the meshes: meetings of DiLoCo, exactly, in four bits, and
while a step computes, a parameter server, 0/1 Adam, 1-bit LAMB, PowerSGD and top-k, each branch
against its own formula (`methods`). `meeting_overlapped` is the part of the meeting meanwhile,
between two slices or nodes, that is under way while matrices are multiplied: a compiler for GPUs
begins it as late as it thinks it may, beside the optimizer.
`silent_bytes` is what the scalars of a step without a meeting send, on one slice; between slices a
TPU sends at least 512 bytes at a time, and there are three (`silent_bytes_slices`). And whole runs
by count: 0/1 Adam by its paper's schedule beside 1-bit Adam with a warmup in 16 bits, where
`rounds_saved` and `volume_saved` are the parts that it does not send; DiLoCo's share of rounds, and
the largest of four fragments.

It needs both compilers and no accelerator: `pip install -e ".[tpu-plan,gpu-plan]"`. Some twenty
minutes on two cores.

    python -m benchmarks.compressed --json
"""

import argparse
import math
import os
import sys
from collections import defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardlib as sl
from benchmarks._compressed_methods import (
    METHODS,
    compiled,
    largest_fragment,
    of_optimizer,
)
from benchmarks._report import report
from models import gpt
from shardlib import collectives as c
from shardlib import optimizers, testing
from shardlib.machine._targets import COMPILE_ONLY

BOUNDS = {
    "onebit_ratio": 1 / 30,
    "onebit_bf16_ratio": 1 / 15,
    "int8_ratio": 0.27,
    "int4_ratio": 0.14,
    "worst_formula_ratio": 1.02,
    "silent_bytes": 64,
}
AT_LEAST = {"rounds_saved": 0.53, "volume_saved": 0.84}
# The schedule of the paper of 0/1 Adam, for BERT-Large.
PAPER = {"freeze": 23_000, "kappa": 16, "apart": 12_500, "double": 32_678, "longest": 16}
PAPER_STEPS = 162_000
MACHINES = {
    "v5e": ("tpu:v5e:2x4", "tpu:v5e:2x2:slices=2"),
    "h200": ("gpu:h200:1x1x8", "gpu:h200:2x1x4"),
    "cpu": ("cpu:8", "cpu:8"),
}
CODECS = {"onebit": c.Signs(), "int8": c.Integers(8), "int4": c.Integers(4)}
ELEMENTS, DEVICES = 2**24, 8
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
PODS = sl.AxisRules(batch=("pod", "data"))
MESHES = {
    "data=8": (sl.rules.data, "data", 0),
    "data=4,model=2": (sl.rules.data | sl.rules.tensor, "data", 0),
    "pod=2,data=4": (sl.rules.data | PODS, "pod", 1),
    "pod=2,data=2,model=2": (sl.rules.data | sl.rules.tensor | PODS, "pod", 1),
}


def alone(target: sl.Target, kind: str, codec: Any) -> tuple[int, int]:
    """What a collective sends, and what its formula says."""
    mesh: Any = target.mesh(f"data={DEVICES}")
    P: Any = jax.P
    kinds: dict[str, tuple[Any, int]] = {
        "pmean": (lambda x: c.pmean(x, "data", codec)[0], c.pmean_bytes(ELEMENTS, DEVICES, codec)),
        "all_gather": (
            lambda x: jnp.sum(c.all_gather(x, "data", codec), keepdims=True),
            c.all_gather_bytes(ELEMENTS // DEVICES, DEVICES, codec),
        ),
        "psum_scatter": (
            lambda x: c.psum_scatter(x, "data", codec),
            c.psum_scatter_bytes(ELEMENTS, DEVICES, codec),
        ),
    }
    function, formula = kinds[kind]
    size = ELEMENTS * (1 if kind == "all_gather" else DEVICES)
    given = jax.ShapeDtypeStruct((size,), "float32", sharding=jax.NamedSharding(mesh, P("data")))
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    options: Any = target.compiler_options
    compiled = jax.jit(mapped).lower(given).compile(compiler_options=options)
    return sum(one.total_bytes for one in testing.collectives(compiled, mesh)), formula


def of_step(target: sl.Target, shape: str, name: str) -> tuple[int, int, int]:
    """What a step sends over the exchange's axis, what the formulas say, and what an all-reduce in
    float32 sends.
    """
    rules, axis, stage = MESHES[shape]
    mesh = target.mesh(shape, dcn="pod" if "pod" in shape else "")
    exchange = (
        c.OneBit(axis) if name == "onebit" else c.Quantised(axis, bits=8 if name == "int8" else 4)
    )
    optimizer = (
        sl.optimizers.onebit_adam(1e-3, freeze=100) if name == "onebit" else optax.adam(1e-3)
    )
    # So that all of it is split, and nothing goes in parts along other axes.
    zero = sl.Zero(stage, small=0)
    strategy = sl.Strategy(mesh=mesh, rules=rules, zero=zero, exchange=exchange, clip=1.0)
    state = sl.init(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optimizer, strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((16, CONFIG.context + 1), "int32")}
    plan = sl.plan(sl.train_step(gpt.loss, strategy), state, batch, target)
    sent: dict[bool, int] = defaultdict(int)
    for one in plan.collectives:
        if axis in (one.axes or ()) and one.sent_bytes > 1024:
            exact = (
                name == "onebit"
                and one.kind == "all-reduce"
                and "f32" in one.dtypes
                and one.sent_bytes > 2**15
            )
            sent[exact] += one.total_bytes
    workers, sizes, formula, whole = mesh.shape[axis], mesh.shape, 0, 0
    for leaf in jax.tree.leaves(state.params):
        split = [
            a
            for entry in leaf.sharding.spec
            for a in ((entry,) if isinstance(entry, str) else entry or ())
        ]
        elements = leaf.size // math.prod(sizes[a] for a in split)
        shared = math.prod(size for a, size in sizes.items() if a not in (*split, axis))
        one = c.pmean_bytes(elements, workers, exchange.codec, shared)
        formula += one - (shared - 1) * workers * exchange.codec.size(
            -(-elements // (workers * shared))
        )
        whole += 2 * 4 * elements * (workers - 1) // workers
    if name == "onebit":
        formula += 2 * 2039 * 4 * (workers - 1) // workers  # of the norm
    return sent[False], formula, sent[True] or whole


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--machines", default=",".join(MACHINES), help="some of v5e, h200 and cpu")
    arguments = parser.parse_args()
    os.environ.update(COMPILE_ONLY)  # before a compiler is loaded
    sl.simulate_devices(DEVICES)
    ratios: dict[str, dict[str, float]] = {name: {} for name in CODECS}
    worst, programs = 1.0, 0

    def told(name: str, what: str, sent: int, formula: int, exact: float) -> None:
        nonlocal worst, programs
        ratios[name][what] = sent / exact
        worst, programs = max(worst, sent / formula, formula / sent), programs + 1
        print(
            f"{name:7} {what:34} {sent:>12,} bytes, {sent / exact:.5f} of float32, "
            f"{sent / formula:.4f} of the formula",
            file=sys.stderr,
            flush=True,
        )

    reduced = 2 * 4 * ELEMENTS * (DEVICES - 1) / DEVICES
    for machine in arguments.machines.split(","):
        one_slice, two_slices = (sl.Target(text) for text in MACHINES[machine])
        for name, codec in CODECS.items():
            for kind in ("pmean", "all_gather", "psum_scatter"):
                half = reduced if kind == "pmean" else reduced / 2
                told(name, f"{machine} {kind}", *alone(one_slice, kind, codec), half)
            for shape in MESHES:
                target = two_slices if "pod" in shape else one_slice
                told(name, f"{machine} step {shape}", *of_step(target, shape, name))
    methods: dict[str, float] = {}
    overlapped: dict[str, float] = {}
    silent, silent_slices = 0, 0
    for machine in arguments.machines.split(","):
        one_slice, two_slices = (sl.Target(text) for text in MACHINES[machine])
        for name, method in METHODS.items():
            for shape in ("data=8", "pod=2,data=2,model=2"):
                target = two_slices if "pod" in shape else one_slice
                found = compiled(target, CONFIG, shape, MESHES[shape][0], method)
                scalars = found.scalars
                if name == "diloco meanwhile" and "pod" in shape:
                    overlapped[machine] = found.overlapped
                # Without codes, all that is small are scalars.
                if name == "diloco" and "pod" in shape:
                    silent_slices = max(silent_slices, scalars)
                elif name == "diloco":
                    silent = max(silent, scalars)
                for branch in found.branches:
                    ratio = branch.bytes / branch.formula
                    methods[f"{machine} {name} {shape}, {branch.what}"] = ratio
                    worst, programs = max(worst, ratio, 1 / ratio), programs + 1
                    print(
                        f"{name:20} {machine} {shape:22} {branch.what:22} {branch.bytes:>12,} "
                        f"bytes, {ratio:.4f} of the formula; scalars {scalars}",
                        file=sys.stderr,
                        flush=True,
                    )
    paper = of_optimizer(optimizers.zero_one_adam(1e-3, **PAPER), PAPER_STEPS)
    warmup = of_optimizer(optimizers.onebit_adam(1e-3, freeze=PAPER["freeze"]), PAPER_STEPS)
    figures = {f"{name}_ratio": max(of.values()) for name, of in ratios.items()}
    figures |= {
        "onebit_bf16_ratio": 2 * figures["onebit_ratio"],
        "worst_formula_ratio": worst,
        "programs": programs,
        "ratios": ratios,
        "methods": methods,
        "meeting_overlapped": overlapped,
        "silent_bytes": silent,
        "silent_bytes_slices": silent_slices,
        "rounds_saved": 1 - paper.rounds / warmup.rounds,
        "volume_saved": 1 - paper.bits / warmup.bits,
        "diloco_rounds": 1 / c.DiLoCo("pod").every,
        "largest_of_four_fragments": largest_fragment(CONFIG, 4),
    }
    report("compressed", figures, BOUNDS, arguments.json, at_least=AT_LEAST)


if __name__ == "__main__":
    main()
