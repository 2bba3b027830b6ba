"""Models on the pods that MaxText is compiled for too: what the TPU compiler makes of a step.

One sequence on each chip, weights and moments in float32, stage 3, products and sums of gradients
in bfloat16, full recomputation, AdamW:

    llama2_7b             2,048 tokens on 256 v5e (16x16), split over one axis of 256, a loss by
                          parts of the vocabulary
    llama2_7b_tensor      the same model, split over 16, and 16-way tensor and sequence parallelism,
                          MLPs in two tiles
    llama3_8b             8,192 tokens on 64 v5p (4x4x4), split over one axis of 64, fused loss
    mixtral_8x7b          2,048 tokens on 64 v5p, split over 16, experts over 4, capacity 1.25
    llama3_8b_v6e         8,192 tokens on 64 v6e (8x8), split over one axis of 64, fused loss
    llama3_8b_h200        8,192 tokens on a host of 8 H200, split over one axis of 8, fused loss

Of each program:

- `arguments_gb`, `temp_gb`: of a chip, by `memory_analysis()`.
- `sent_gb`: what a device sends in a step, and `hidden`, the share of it that is under way while
  matrices are multiplied, as it is scheduled. `hidden_in_layers` is that share of the gathers and
  scatters in loops over layers.
- `gigacycles`: the compiler's own estimates of what its instructions take, added up over loops.
  Custom kernels have none, here and there.
- `lower_s`, `compile_s`: on an otherwise idle machine. `second_start_s` is what `shardlib plan`
  takes of Llama 2 if it has planned it before, with all that a process starts with.

The ratios are over MaxText 0.2.5 as it compiles with JAX 0.12.0.1 (`MAXTEXT`, of 2026-11): `hbm` of
arguments and temporaries, `wire` of bytes sent, `cycle` of cycles. With `--plain`, Llama is also
compiled with plain XLA's attention (`..._xla`), for comparison.

It needs compilers and no accelerator, and takes some six minutes on two cores:
`pip install -e ".[tpu-plan,gpu-plan]"`. Pods whose compiler is not installed are left out.

    python -m benchmarks.pods --json [--plot docs/pods.svg]
"""

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

import shardlib as sl
from benchmarks._compiled import compile_for
from benchmarks._picture import bar, level, svg, text
from benchmarks._report import report
from models import gpt, moe
from shardlib.compiled._hlo import Program

BOUNDS = {
    "llama3_8b_temp_gb": 10.0,
    "llama3_8b_compile_s": 35.0,
    "hbm_ratio_max": 0.95,
    "wire_ratio_max": 0.82,
    "wire_ratio_mixtral": 0.35,
    "cycle_ratio_max": 0.95,
    "compile_s_llama2_7b": 20.0,
    "compile_s_max": 60.0,
    "second_start_s": 5.0,
}
AT_LEAST = {"hidden_min": 0.9}
PRECISION = sl.Precision("bf16", accumulate="bf16", reduce="bf16")
# The compiler's word for "not known", of transfers that another core makes.
UNKNOWN_CYCLES = 2**62


@dataclasses.dataclass(frozen=True)
class Peer:
    """What MaxText's program of the same model on the same pod comes to."""

    arguments_gb: float
    temp_gb: float
    sent_gb: float
    gigacycles: float


MAXTEXT = {
    "llama2_7b": Peer(0.316, 1.786, 52.4, 1.131),
    "llama2_7b_tensor": Peer(0.317, 2.137, 113.5, 1.246),
    "llama3_8b": Peer(1.509, 7.714, 58.2, 2.398),
    "mixtral_8x7b": Peer(8.760, 8.83, 281.2, 1.605),
}


@dataclasses.dataclass(frozen=True)
class Pod:
    """A model on a pod."""

    config: gpt.GPTConfig
    target: str
    mesh: str
    rules: sl.AxisRules = sl.rules.data
    words: str = ""  # under its bars
    model: Callable[..., Any] = gpt.GPT
    loss: Callable[..., Any] = gpt.loss


EXPERTS = sl.rules.data | sl.AxisRules(batch=("data", "expert"), experts="expert")
MIXTRAL = moe.mixtral_8x7b(context=2048, router=sl.experts.TopK(2, capacity=1.25))
LLAMA2 = gpt.llama2_7b(context=2048)
LLAMA3 = gpt.llama3_8b(fused_loss=True)
PODS = {
    "llama2_7b": Pod(
        dataclasses.replace(LLAMA2, fused_loss="reference"),
        "tpu:v5e:16x16",
        "data=256",
        words="Llama 2, FSDP",
    ),
    "llama2_7b_tensor": Pod(
        dataclasses.replace(LLAMA2, mlp_tiles=2),
        "tpu:v5e:16x16",
        "data=16,model=16",
        sl.rules.data | sl.rules.tensor_sequence,
        words="Llama 2, tensor",
    ),
    "llama3_8b": Pod(LLAMA3, "tpu:v5p:4x4x4", "data=64", words="Llama 3, FSDP"),
    "mixtral_8x7b": Pod(
        MIXTRAL, "tpu:v5p:4x4x4", "data=16,expert=4", EXPERTS, "Mixtral", moe.MoE, moe.loss
    ),
    "llama3_8b_v6e": Pod(LLAMA3, "tpu:v6e:8x8", "data=64"),
    "llama3_8b_h200": Pod(LLAMA3, "gpu:h200:1x1x8", "data=8"),
}


def step_on(mesh: Mesh, pod: Pod) -> tuple[sl.Step, sl.State, Any]:
    """A training step on a mesh, with its state and batch in shapes."""
    strategy = sl.Strategy(mesh=mesh, rules=pod.rules, zero=3, precision=PRECISION, remat="full")
    optimizer = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    state = sl.init(
        lambda: pod.model(pod.config, rngs=nnx.Rngs(0)), optimizer, strategy, abstract=True
    )
    batch = {"tokens": jax.ShapeDtypeStruct((mesh.size, pod.config.context + 1), "int32")}
    return sl.train_step(pod.loss, strategy), state, batch


def llama2_7b(mesh: Mesh) -> tuple[sl.Step, sl.State, Any]:
    """The step that `second_start_s` has planned."""
    return step_on(mesh, PODS["llama2_7b"])


def second_start_s() -> float:
    """Seconds in which Llama 2 is planned again, in a process of its own."""
    pod = PODS["llama2_7b"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardlib", "plan", f"{__file__}:llama2_7b"]
        command += ["--target", pod.target, "--mesh", pod.mesh, "--cache", folder]
        subprocess.run(command, capture_output=True, check=True)
        started = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = time.perf_counter() - started
    assert "by an earlier plan" in done.stdout
    return seconds


def figures_of(pod: Pod) -> dict[str, Any]:
    """What the compiler makes of a training step on a pod."""
    target = sl.Target(pod.target)
    mesh = target.mesh(pod.mesh)
    step, state, batch = step_on(mesh, pod)
    started = time.perf_counter()
    lowered = step.lower(state, batch)
    lower_s = time.perf_counter() - started
    compiled = compile_for(target, mesh, lowered)
    memory = compiled.program.memory_analysis()
    written = compiled.program.as_text()
    return {
        "arguments_gb": round(memory.argument_size_in_bytes / 1e9, 3),
        "temp_gb": round(memory.temp_size_in_bytes / 1e9, 3),
        "sent_gb": round(compiled.sent / 1e9, 2),
        "hidden": round(compiled.hidden, 3),
        "hidden_in_layers": round(hidden_in_layers(compiled.collectives), 3),
        "gigacycles": round(cycles(written) / 1e9, 3),
        "lower_s": round(lower_s, 1),
        "compile_s": round(compiled.seconds, 1),
        "attends": attention_of(pod.config, written),
    }


def hidden_in_layers(collectives: Iterable[sl.testing.Collective]) -> float:
    """Of what gathers and scatters in loops send, the share that is sent beside products."""
    in_loops = [
        one for one in collectives if one.kind in ("all-gather", "reduce-scatter") and one.times > 1
    ]
    sent = sum(one.total_bytes for one in in_loops)
    return sum(one.total_bytes for one in in_loops if one.overlapped) / sent


def attention_of(config: gpt.GPTConfig, text: str) -> str:
    """The implementation of attention in a program."""
    if config.attention is not None:
        return config.attention
    return "tpu" if "attention_forward" in text else "reference"


def cycles(text: str) -> int:
    """The compiler's estimates of all instructions of a program, as often as they run."""
    total = 0
    for _, made, run in Program(text).walk():
        estimate = re.search(r'"estimated_cycles":"(\d+)"', made.attributes)
        if estimate and int(estimate[1]) < UNKNOWN_CYCLES:
            total += run.times * int(estimate[1])
    return total


def ratios(name: str, figures: dict[str, Any]) -> dict[str, float]:
    """A program's memory, bytes and cycles over MaxText's; nothing where MaxText has none."""
    peer = MAXTEXT.get(name)
    if peer is None:
        return {}
    held = figures["arguments_gb"] + figures["temp_gb"]
    return {
        "hbm_ratio": round(held / (peer.arguments_gb + peer.temp_gb), 3),
        "wire_ratio": round(figures["sent_gb"] / peer.sent_gb, 3),
        "cycle_ratio": round(figures["gigacycles"] / peer.gigacycles, 3),
    }


def summary(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The worst of all programs, of the kinds that bounds are for."""
    worst = {}
    compared = {name: found[name] for name in found if name in MAXTEXT}
    for ratio in ("hbm_ratio", "wire_ratio", "cycle_ratio"):
        # What Mixtral's experts send is compared by a bound of its own.
        values = [
            figures[ratio]
            for name, figures in compared.items()
            if ratio != "wire_ratio" or name != "mixtral_8x7b"
        ]
        if values:
            worst[f"{ratio}_max"] = max(values)
    if "mixtral_8x7b" in found:
        worst["wire_ratio_mixtral"] = found["mixtral_8x7b"]["wire_ratio"]
    # Loops over layers on v5e and H200, which have no sparse cores, and on v5p.
    shares = [
        found[name]["hidden_in_layers"] for name in ("llama2_7b", "llama3_8b_h200") if name in found
    ]
    if shares:
        worst["hidden_min"] = min(shares)
    if "llama3_8b" in found:
        worst["hidden_v5p"] = found["llama3_8b"]["hidden_in_layers"]
    if "llama2_7b" in found:
        worst["compile_s_llama2_7b"] = found["llama2_7b"]["compile_s"]
    worst["compile_s_max"] = max(figures["compile_s"] for figures in found.values())
    return worst


RATIOS = {
    "hbm_ratio": ("memory", "#247"),
    "wire_ratio": ("bytes sent", "#2a7"),
    "cycle_ratio": ("cycles", "#b83"),
}


def plot(found: dict[str, dict[str, Any]]) -> str:
    """Each model's memory, bytes and cycles over MaxText's, as bars."""
    compared = [name for name in found if name in MAXTEXT]
    left, top, bar_width, group, tall = 60, 60, 28, 130, 180
    width, most = left + group * len(compared) + 20, 1.25
    base = top + tall
    parts = []
    for value in (0, 0.5, 1):
        y = base - tall * value / most
        parts.append(level(left, width - 20, y, f"{value:g}", "#999" if value == 1 else "#ddd"))
    for position, (words, colour) in enumerate(RATIOS.values()):
        parts.append(text(left + 110 * position, 42, words, colour=colour))
    for number, name in enumerate(compared):
        x = left + group * number + 12
        for position, (ratio, (words, colour)) in enumerate(RATIOS.items()):
            value = found[name][ratio]
            high = tall * value / most
            at = x + (bar_width + 4) * position
            parts.append(bar(at, base - high, bar_width, high, colour, f"{words}: {value}"))
            parts.append(text(at + bar_width / 2, base - high - 4, f"{value:.2f}", "middle"))
        parts.append(text(x + 1.5 * bar_width, base + 18, PODS[name].words, "middle"))
    return svg(width, base + 34, left, "Programs for TPU pods, over MaxText's", parts)


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--only", choices=list(PODS), action="append", help="only this one")
    parser.add_argument("--plain", action="store_true", help="Llama with plain attention, too")
    parser.add_argument("--plot", type=Path, help="draw the ratios into this file")
    arguments = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.only or PODS:
        pod = PODS[name]
        try:
            found[name] = figures_of(pod)
        except ImportError as error:
            print(f"{name}: left out. {error}", file=sys.stderr)
            continue
        found[name] |= ratios(name, found[name])
        print(name, found[name], file=sys.stderr, flush=True)
        if arguments.plain and pod.model is gpt.GPT:
            config = dataclasses.replace(pod.config, attention="xla", fused_loss=False)
            found[f"{name}_xla"] = figures_of(dataclasses.replace(pod, config=config))
    if arguments.plot:
        arguments.plot.write_text(plot(found))
    figures = {
        f"{name}_{figure}": value
        for name, of_program in found.items()
        for figure, value in of_program.items()
    }
    figures |= summary(found)
    if "llama2_7b" in found:
        figures["second_start_s"] = round(second_start_s(), 1)
    bounds = {name: bound for name, bound in BOUNDS.items() if name in figures}
    floors = {name: bound for name, bound in AT_LEAST.items() if name in figures}
    report("pods", figures, bounds, arguments.json, at_least=floors)


if __name__ == "__main__":
    main()
