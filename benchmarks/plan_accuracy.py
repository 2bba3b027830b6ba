"""What a plan says, held to theory, to the compilers' own accounts, and to the formulas that come
before it.

- Steps written by hand (`benchmarks/_steps.py`), on TPU v5e and v5p, on H200s and on simulated
  devices: the bytes of every kind of collective over every mesh axis, as the plan reads them off
  the compiled program, against those that theory says.
- The same programs and decoders: the kinds of memory against the compiler's own total. Of a TPU
  that is what its log says ("Program hbm requirement", with the arguments), elsewhere
  `memory_analysis()`.
- Dense decoders, scanned over their layers: `sl.estimate`, from formulas alone, against the
  compiled program: parameters, optimizer state, gradients and saved activations together, the most
  of each, and the whole at its fullest.

It needs both compilers and no accelerator: `pip install -e ".[tpu-plan,gpu-plan]"`. Some ten
minutes on two cores.

    python -m benchmarks.plan_accuracy --json
"""

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from benchmarks._steps import HAND_WRITTEN, HandWritten
from models import gpt
from shardlib.machine._targets import COMPILE_ONLY, LOUD

BOUNDS = {
    "collective_mismatches": 0,
    "kinds_error_max": 0.01,
    "unattributed_max": 0.05,
    "estimate_error_max": 0.10,
    "peak_error_max": 0.25,
}

# Each with the machine for one slice and for two; on v5p, axes that a step does not use fill up the
# torus.
MACHINES = {
    "v5e": ("tpu:v5e:2x4", "tpu:v5e:2x2:slices=2", ""),
    "v5p": ("tpu:v5p:2x2x8", "tpu:v5p:2x2x4:slices=2", "rest=4,"),
    "h200": ("gpu:h200:1x1x8", "gpu:h200:2x1x4", ""),
    "cpu": ("cpu:8", "cpu:8", ""),
}

# Attention is plain JAX: of the memory that a fused one works in, the formulas know nothing yet.
LLAMA = {
    "attention": "xla",
    "layers": 8,
    "width": 1024,
    "heads": 16,
    "hidden": 2816,
    "context": 1024,
}
GPT2 = gpt.gpt2(vocab_multiple=128, dtype=jnp.bfloat16, attention="xla")
DECODERS: dict[
    str, tuple[gpt.GPTConfig, str, int, Literal["none", "full"]]
] = {  # configuration, mesh, examples per device, what is recomputed
    "GPT-2 124M": (GPT2, "data=8", 4, "none"),
    "GPT-2 124M, recomputed": (
        GPT2,
        "data=8",
        8,
        "full",
    ),
    "GPT-2 124M, tensor parallel": (
        GPT2,
        "data=2,model=4",
        8,
        "none",
    ),
    "Llama of 8 layers": (gpt.llama2_7b(dtype=jnp.bfloat16, **LLAMA), "data=8", 4, "none"),
    "Llama of 8 layers, recomputed": (
        gpt.llama2_7b(dtype=jnp.bfloat16, **LLAMA),
        "data=8",
        4,
        "full",
    ),
}
ESTIMATED_ON = ("tpu:v5e:2x4", "tpu:v5p:2x2x2", "gpu:h200:1x1x8")


def by_hand(step: HandWritten, machine: str) -> tuple[sl.Plan, int]:
    """The plan of a step, and how many kinds of collectives over how many axes send other bytes
    than theory says.
    """
    one_slice, two_slices, rest = MACHINES[machine]
    target = sl.Target(two_slices if step.dcn else one_slice)
    mesh = target.mesh(rest + step.mesh, dcn=step.dcn)
    with jax.default_matmul_precision("highest"):  # lest a TPU send float32 as bfloat16
        found = sl.plan(*step.build(mesh), target)
    sent: dict[tuple, int] = defaultdict(int)
    for one in found.collectives:
        sent[one.kind, one.axes] += one.total_bytes
    expected = {
        (kind, (axes,) if isinstance(axes, str) else axes): size
        for (kind, axes), size in step.sends.items()
    }
    return found, sum(sent.get(key, 0) != expected.get(key, 0) for key in {*sent, *expected})


def decoder(name: str, on: str) -> sl.Plan:
    """The plan of a decoder's step, with the estimate that was made before it."""
    config, shape, examples, remat = DECODERS[name]
    target = sl.Target(on)
    mesh = target.mesh(shape if target.size == 8 else shape.replace("8", str(target.size)))
    tensor = mesh.shape.get("model", 1)
    rules = sl.rules.data | (sl.rules.tensor if tensor > 1 else sl.AxisRules())
    strategy = sl.Strategy(mesh=mesh, rules=rules, remat=remat)
    state = sl.init(
        lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.adamw(1e-3), strategy, abstract=True
    )
    batch = {
        "tokens": jax.ShapeDtypeStruct((examples * mesh.shape["data"], config.context + 1), "int32")
    }
    guess = sl.estimate(
        config.decoder,
        examples=examples,
        recompute=remat,
        parallelism=sl.planning.Parallelism(data=mesh.shape["data"], tensor=tensor),
    )
    return sl.plan(
        sl.train_step(gpt.loss, strategy), state, batch, target, estimate=guess, name=name
    )


def errors(found: sl.Plan) -> tuple[float, float]:
    """How far an estimate was off: of what is kept, and of the whole, each relative to what the
    compiler has.
    """
    assert found.estimate is not None
    kept = sum(found.estimate.kinds.values()) / sum(
        found.memory.most[kind] for kind in found.estimate.kinds
    )
    return abs(kept - 1), abs(found.estimate.total_bytes / found.memory.total_bytes - 1)


def accounts(found: sl.Plan) -> Iterator[float]:
    """How far the kinds of memory add up to something else than the compiler's own total, where it
    gave one.
    """
    if found.memory.stated_bytes:
        yield abs(found.memory.total_bytes / found.memory.stated_bytes - 1)


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    # Before a compiler is loaded: its own account of memory in its log.
    os.environ.update(COMPILE_ONLY | LOUD)
    sl.simulate_devices(8)  # and no accelerator
    mismatches, kinds, unattributed, steps = 0, [], [], 0
    for machine in MACHINES:
        for step in HAND_WRITTEN:
            found, wrong = by_hand(step, machine)
            mismatches, steps = mismatches + wrong, steps + 1
            kinds += [*accounts(found)]
            unattributed.append(found.memory.unattributed)
            print(
                f"{machine:5} {step.name:22} "
                f"{'as theory says' if not wrong else f'{wrong} MISMATCHES'}",
                file=sys.stderr,
            )
    kept, whole = [], []
    for on in ESTIMATED_ON:
        for name in DECODERS:
            found = decoder(name, on)
            of_kept, of_whole = errors(found)
            kept, whole = [*kept, of_kept], [*whole, of_whole]
            kinds += [*accounts(found)]
            unattributed.append(found.memory.unattributed)
            print(f"{on:16} {name:30} kept {of_kept:+.1%}, whole {of_whole:+.1%}", file=sys.stderr)
    figures = {
        "steps_by_hand": steps,
        "collective_mismatches": mismatches,
        "programs_accounted": len(kinds),
        "kinds_error_max": max(kinds),
        "unattributed_max": max(unattributed),
        "estimates": len(kept),
        "estimate_error_max": max(kept),
        "peak_error_max": max(whole),
    }
    report("plan_accuracy", figures, BOUNDS, arguments.json)


if __name__ == "__main__":
    main()
