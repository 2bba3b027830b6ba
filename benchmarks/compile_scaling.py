"""How compile time and program size grow with the machine, and with the depth of the model: hardly.

The train step of a GPT, compiled by the real TPU compiler (the `libtpu` wheel; no TPU needed) for
4, 16, 64 and 256 v5e chips, constant work per chip, and for 12, 24 and 48 layers. Times are medians
of several rounds through all machines, tracing and lowering included.

    python -m benchmarks.compile_scaling --json
"""

import argparse
import os
import statistics
import time

import jax
import optax
from flax import nnx
from jax.experimental import topologies

import shardlib as sl
from benchmarks._report import report
from models import gpt

BOUNDS = {"compile_ratio": 1.5, "hlo_ratio": 1.1, "depth_ratio": 1.2}
CHIPS = {4: "v5e:2x2", 16: "v5e:4x4", 64: "v5e:8x8", 256: "v5e:16x16"}


def compile_step(topology: str, layers: int) -> tuple[float, int]:
    """Seconds to compile the step for a pod, and the characters of the compiled program."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = sl.make_mesh("data=-1,model=2", devices=devices)
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data | sl.rules.tensor, remat="full")
    config = gpt.gpt2(layers=layers, width=1024, heads=16, vocab_multiple=128)
    state = sl.init(
        lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.adamw(1e-3), strategy, abstract=True
    )
    batch = {"tokens": jax.ShapeDtypeStruct((4 * mesh.shape["data"], config.context + 1), "int32")}
    jax.clear_caches()
    started = time.perf_counter()
    compiled = sl.train_step(gpt.loss, strategy).lower(state, batch).compile()
    return time.perf_counter() - started, len(compiled.as_text())


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_LOG_DIR="disabled")
    sl.simulate_devices(1)

    cases = [(chips, 24) for chips in CHIPS] + [(16, 12), (16, 48)]
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    size: dict[tuple[int, int], int] = {}
    compile_step(CHIPS[16], 2)  # the first compilation starts the compiler
    for _ in range(arguments.rounds):
        for chips, layers in cases:
            taken, size[chips, layers] = compile_step(CHIPS[chips], layers)
            seconds[chips, layers].append(taken)
            print(
                f"{layers} layers on {chips} chips: {taken:.1f} s, {size[chips, layers]:,} "
                "characters",
                flush=True,
            )
    median = {case: statistics.median(times) for case, times in seconds.items()}
    report(
        "compile_scaling",
        {
            "compile_ratio": median[256, 24] / median[4, 24],
            "hlo_ratio": size[256, 24] / size[4, 24],
            "depth_ratio": median[16, 48] / median[16, 12],
            **{f"seconds_{chips}_chips": median[chips, 24] for chips in CHIPS},
        },
        BOUNDS,
        arguments.json,
    )


if __name__ == "__main__":
    main()
