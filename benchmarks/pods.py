"""Llama on the pods that others publish figures of: what the TPU compiler makes of a training step.

One sequence on each chip, weights and moments in float32 and split over all chips (stage 3),
products and sums of gradients in bfloat16, full recomputation, AdamW:

    llama2_7b     2,048 tokens on 256 v5e (16x16), one axis
    llama3_8b     8,192 tokens on 64 v5p (4x4x4), an axis for each dim of the torus, fused loss

Each is compiled as it is, which is with the attention that `sl.kernels` chooses, and with plain
XLA's (`..._xla`), for comparison:

- `temp_gb`: temporaries of a chip, by `memory_analysis()`.
- `gigacycles`: the compiler's own estimates of what its instructions take, added up over loops.
  Custom kernels have none.
- `lower_s`, `compile_s`: on an otherwise idle machine.
- `attends`: the implementation that was chosen.

It needs the TPU compiler and no TPU, and takes some three minutes on two cores:
`pip install -e ".[tpu-plan]"`.

    python -m benchmarks.pods --json
"""

import argparse
import dataclasses
import os
import re
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from models import gpt
from shardlib.compiled._hlo import Program

BOUNDS = {"llama3_8b_temp_gb": 10.0, "llama3_8b_compile_s": 35.0}
PRECISION = sl.Precision("bf16", accumulate="bf16", reduce="bf16")
# The compiler's word for "not known", of transfers that another core makes.
UNKNOWN_CYCLES = 2**62


@dataclasses.dataclass(frozen=True)
class Pod:
    """A model on a pod."""

    config: gpt.GPTConfig
    target: str
    mesh: str
    examples: int


PODS = {
    "llama2_7b": Pod(gpt.llama2_7b(context=2048), "tpu:v5e:16x16", "data=256", 256),
    "llama3_8b": Pod(gpt.llama3_8b(fused_loss=True), "tpu:v5p:4x4x4", "x=4,y=4,z=4", 64),
}


def figures_of(pod: Pod) -> dict[str, Any]:
    """What the compiler makes of a training step on a pod."""
    mesh = sl.Target(pod.target).mesh(pod.mesh)
    rules = sl.rules.data | sl.AxisRules(batch=mesh.axis_names)
    strategy = sl.Strategy(mesh=mesh, rules=rules, zero=3, precision=PRECISION, remat="full")
    optimizer = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    state = sl.init(
        lambda: gpt.GPT(pod.config, rngs=nnx.Rngs(0)), optimizer, strategy, abstract=True
    )
    batch = {"tokens": jax.ShapeDtypeStruct((pod.examples, pod.config.context + 1), "int32")}
    started = time.perf_counter()
    lowered = sl.train_step(gpt.loss, strategy).lower(state, batch)
    lower_s = time.perf_counter() - started
    started = time.perf_counter()
    compiled = lowered.compile()
    compile_s = time.perf_counter() - started
    attends = pod.config.attention
    if attends is None:
        attends = "splash" if "splash" in compiled.as_text() else "reference"
    return {
        "temp_gb": round(compiled.memory_analysis().temp_size_in_bytes / 1e9, 3),
        "gigacycles": round(cycles(compiled.as_text()) / 1e9, 3),
        "lower_s": round(lower_s, 1),
        "compile_s": round(compile_s, 1),
        "attends": attends,
    }


def cycles(text: str) -> int:
    """The compiler's estimates of all instructions of a program, as often as they run."""
    total = 0
    for _, made, run in Program(text).walk():
        estimate = re.search(r'"estimated_cycles":"(\d+)"', made.attributes)
        if estimate and int(estimate[1]) < UNKNOWN_CYCLES:
            total += run.times * int(estimate[1])
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--only", choices=list(PODS), help="only this one")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {}
    for name, pod in PODS.items():
        if arguments.only in (None, name):
            plain = dataclasses.replace(pod.config, attention="xla", fused_loss=False)
            for suffix, config in (("", pod.config), ("_xla", plain)):
                for figure, value in figures_of(dataclasses.replace(pod, config=config)).items():
                    figures[f"{name}{suffix}_{figure}"] = value
    bounds = {name: bound for name, bound in BOUNDS.items() if name in figures}
    report("pods", figures, bounds, arguments.json)


if __name__ == "__main__":
    main()
