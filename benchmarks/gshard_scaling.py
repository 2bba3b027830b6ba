"""GShard's 600-billion-parameter model on 2,048 TPU v3 cores, and its smaller ones, as the TPU's
compiler has them.

The translation model of 36 layers with 128, 512 and 2,048 experts on as many cores, float32
weights, Adafactor, everything recomputed, two sentence pairs of 1,024 tokens on each core; the
whole train step, compiled, in the step's form, where the layer of experts sends its tokens itself.
In the other form, annotations alone, the smallest again. Then one step beyond the paper: 60 layers,
a trillion parameters, with the weights that are no experts' split over the cores too (ZeRO-3).

Read off each program: bytes of HBM at the fullest moment, and the collectives, each kind's bytes
against theory. An all-to-all carries the places of all experts of one device's tokens,
`2 x tokens x width` numbers, twice forward, twice backward and twice when recomputed, in each layer
with experts; every weight that is no expert's is summed once. The dtype of what is sent is the
compiler's: of float32 products in the default precision it sends the bfloat16 factors.

The roofline's step: products at the datasheet's peak, all-to-alls and all-reduces over the torus by
the formulas of `docs/collectives.md`, nothing overlapped. The paper ran 0.72 steps a second at
2,048 cores, for 4.0 days.

Seconds to compile are medians of three, 128 and 2,048 cores in turns, since the machine's own speed
wanders.

It needs the TPU's compiler and no accelerator: `pip install -e ".[tpu-plan]"`. A quarter of an hour
on two cores.

    python -m benchmarks.gshard_scaling --json
"""

import argparse
import math
import statistics
import sys
from collections import defaultdict
from typing import Any

import jax
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from models import moe, translation
from shardlib._tree import named_leaves

MACHINES = {128: ("tpu:v3:8x8", 8), 512: ("tpu:v3:16x16", 16), 2048: ("tpu:v3:32x32", 32)}
BOUNDS = {
    "compile_ratio": 1.25, "compile_s_max": 90.0, "hbm_ratio": 1.15, "hbm_gib_max": 13.0,
    "worst_ratio": 1.05,
    "trillion_hbm_gib": 14.0,
}  # fmt: skip
GIB = 2**30
PAIRS = 2  # of sentences on a core
PAPER_STEPS = 0.72 * 4.0 * 86_400


def compiled(
    cores: int, layers: int, *, zero: int = 0, manual: bool = True
) -> tuple[sl.Plan, sl.State, Any]:
    """The plan of a step, with as many experts as cores."""
    machine = sl.Target(MACHINES[cores][0])
    strategy = sl.Strategy(
        mesh=machine.mesh(f"data={cores}"), rules=sl.rules.experts, zero=zero, remat="full",
        manual=None if manual else (),
    )  # fmt: skip
    config = translation.gshard(layers, cores)
    optimizer = sl.optimizers.per_layer_and_expert(optax.adafactor(1e-2), moe.stacked)
    make = lambda: translation.Translation(config, rngs=nnx.Rngs(0))  # noqa: E731
    state = sl.init(make, optimizer, strategy, abstract=True)
    shape = lambda length: jax.ShapeDtypeStruct((PAIRS * cores, length), "int32")  # noqa: E731
    batch = {"source": shape(config.context), "target": shape(config.context + 1)}
    return sl.plan(sl.train_step(translation.loss, strategy), state, batch, machine), state, config


def sent(found: sl.Plan) -> dict[str, dict[str, Any]]:
    """What a device sends by kind of collective: how often, in which dtypes, how many bytes."""
    kinds: dict[str, dict[str, Any]] = defaultdict(
        lambda: {"times": 0, "bytes": 0, "dtypes": defaultdict(int)}
    )
    for one in found.collectives:
        of = kinds[one.kind]
        of["times"] += one.times
        of["bytes"] += one.total_bytes
        of["dtypes"]["+".join(sorted(set(one.dtypes)))] += one.times
    return {kind: {**of, "dtypes": dict(of["dtypes"])} for kind, of in kinds.items()}


def dense_parameters(state: sl.State) -> int:
    """Those that are no experts'."""
    return sum(
        leaf.size for path, leaf in named_leaves(state.params) if moe.stacked(path, leaf) < 2
    )


def theory(
    kinds: dict[str, dict[str, Any]], state: sl.State, config: Any, cores: int
) -> dict[str, float]:
    """Bytes that a device should send, by kind; an all-to-all in the dtypes that were found."""
    tokens, experts = PAIRS * config.context, 2 * config.stretches
    places = cores * max(1, math.ceil(2 * tokens / cores)) * config.width
    narrow = kinds["all-to-all"]["dtypes"].get("bf16", 0) / kinds["all-to-all"]["times"]
    elsewhere = (cores - 1) / cores
    return {
        "all-to-all": elsewhere * 6 * experts * places * (2 * narrow + 4 * (1 - narrow)),
        "all-reduce": elsewhere * 2 * 4 * dense_parameters(state),
    }


def roofline(
    found: sl.Plan, config: Any, cores: int, kinds: dict[str, dict[str, Any]]
) -> dict[str, float]:
    """Seconds of a step by what they go to, none of it under way at the same time."""
    chip, side = found.chip, MACHINES[cores][1]
    tokens = PAIRS * config.context
    width = config.width
    heads = config.heads * config.dims["head_dim"]
    # A token's, forward, no half of the scores left out.
    attention = 8 * width * heads + 4 * config.context * heads
    ffn, experts = 4 * width * config.dims["mlp"], 2 * config.stretches
    layers = config.layers * attention + config.layers // 2 * attention  # the decoder attends twice
    layers += (config.layers - experts) * ffn + experts * (2 * ffn + 2 * width * config.experts)
    # Forward, recomputed, and twice backward; the head, of the target alone, is not recomputed.
    flops = tokens * (4 * layers + 3 * 2 * width * config.dims["vocab"])
    # A core has its share of its chip's links, which are busy both ways in each dim.
    whole, link = kinds["all-to-all"]["bytes"] * cores / (cores - 1), chip.link_bandwidth
    return {
        "products": flops / chip.flops["f32"],
        "all_to_all": whole * side / (8 * link),
        "all_reduce": kinds["all-reduce"]["bytes"] / (4 * link),
    }


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument(
        "--rounds", type=int, default=3, help="how often to compile for 128 and for 2,048 cores"
    )
    arguments = parser.parse_args()
    sl.simulate_devices(8)
    rows, worst, figures = {}, 0.0, {}
    for cores in MACHINES:
        found, state, config = compiled(cores, 36)
        kinds = sent(found)
        rows[cores] = found
        expected = theory(kinds, state, config, cores)
        if unexpected := {kind: of for kind, of in kinds.items() if kind not in expected}:
            raise SystemExit(
                f"The step of {cores} cores has collectives that it should not have: {unexpected}"
            )
        ratios = {kind: kinds[kind]["bytes"] / expected[kind] for kind in expected}
        worst = max(worst, *(max(ratio, 1 / ratio) for ratio in ratios.values()))
        parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
        seconds = roofline(found, config, cores, kinds)
        print(
            f"{cores} cores: {parameters / 1e9:.1f}B, {found.memory.total_bytes / GIB:.2f} GiB, "
            f"{kinds}",
            file=sys.stderr,
        )
        figures |= {
            f"parameters_{cores}": parameters,
            f"hbm_gib_{cores}": found.memory.total_bytes / GIB,
            f"all_to_alls_per_expert_layer_{cores}": kinds["all-to-all"]["times"]
            / (2 * config.stretches),
            f"all_to_all_dtypes_{cores}": kinds["all-to-all"]["dtypes"],
            f"all_reduce_dtypes_{cores}": kinds["all-reduce"]["dtypes"],
            f"all_to_all_ratio_{cores}": ratios["all-to-all"],
            f"all_reduce_ratio_{cores}": ratios["all-reduce"],
            **{f"roofline_{name}_s_{cores}": value for name, value in seconds.items()},
            f"roofline_steps_per_s_{cores}": 1 / sum(seconds.values()),
            f"roofline_days_{cores}": PAPER_STEPS * sum(seconds.values()) / 86_400,
        }
    seconds_of = {cores: [found.compile_seconds] for cores, found in rows.items()}
    for _ in range(arguments.rounds - 1):
        for cores in (128, 2048):
            seconds_of[cores].append(compiled(cores, 36)[0].compile_seconds)
            print(f"{cores} cores: compiled in {seconds_of[cores][-1]:.1f} s", file=sys.stderr)
    took = {cores: statistics.median(each) for cores, each in seconds_of.items()}
    figures |= {f"compile_s_{cores}": seconds for cores, seconds in took.items()} | {
        "compile_s_all": seconds_of
    }
    automatic = sent(compiled(128, 36, manual=False)[0])
    of_step = sent(rows[128])
    trillion, state, _ = compiled(2048, 60, zero=3)
    least, most = rows[128], rows[2048]
    head = {
        "compile_ratio": took[2048] / took[128],
        "compile_s_max": max(took.values()),
        "hbm_ratio": most.memory.total_bytes / least.memory.total_bytes,
        "hbm_gib_max": max(found.memory.total_bytes for found in rows.values()) / GIB,
        "worst_ratio": worst,
        "trillion_hbm_gib": trillion.memory.total_bytes / GIB,
        "trillion_parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "trillion_compile_s": trillion.compile_seconds,
        "trillion_sends": {kind: of["times"] for kind, of in sent(trillion).items()},
        "annotations_alone_sends": {kind: of["bytes"] for kind, of in automatic.items()},
        "annotations_alone_over_step": {
            kind: automatic[kind]["bytes"] / of_step[kind]["bytes"]
            for kind in automatic
            if kind in of_step
        },
        "weights": "float32",
    }
    report("gshard_scaling", {**head, **figures}, BOUNDS, arguments.json)


if __name__ == "__main__":
    main()
