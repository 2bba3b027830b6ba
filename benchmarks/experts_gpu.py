"""Training with experts on one GPU, over a dense model of as many products.

A decoder of six layers with eight experts each, of which a token meets two, as wide as a model of a
billion parameters. It has 1.8 billion.

- `dropless`: nothing is dropped, by grouped products.
- `capacity`: an expert has room for 1.25 times its share, and what is more is dropped.
- `dense`: no experts, and an MLP as wide as the two.

Each is trained on the same random tokens, as `benchmarks.train_gpu` trains, in a process of its
own. `..._over_dense` is its tokens a second over those of the dense model, which has a quarter of
the experts' parameters to update. `mfu` is what products take, over the card's published peak.

    python -m benchmarks.experts_gpu --json
    python -m benchmarks.experts_gpu --tiny     # to try the path on a CPU; the figures mean nothing
"""

import argparse
import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from benchmarks.train_gpu import LEARNING_RATE, timed
from models import gpt, moe
from shardlib.machine._chips import chip_of

VARIANTS = ("dense", "dropless", "capacity")
BATCH = 8


def shape(tiny: bool) -> dict[str, Any]:
    """What all variants share."""
    return {
        "layers": 2 if tiny else 6,
        "width": 64 if tiny else 2048,
        "heads": 4 if tiny else 16,
        "kv_heads": 2 if tiny else 8,
        "hidden": 96 if tiny else 5632,
        "context": 64 if tiny else 2048,
        "vocab": 256 if tiny else 32_000,
        "norm": "rms",
        "positions": "rotary",
        "mlp": "swiglu",
        "bias": False,
        "tied": False,
    }


def config_of(variant: str, tiny: bool) -> gpt.GPTConfig:
    """The model of a variant."""
    sizes = shape(tiny)
    on_gpu = jax.default_backend() == "gpu"
    how: dict[str, Any] = {
        "dtype": jnp.bfloat16,
        "attention": "cudnn" if on_gpu else "xla",
        "unroll": sizes["layers"],
    }
    if variant == "dense":
        return gpt.GPTConfig(**{**sizes, "hidden": 2 * sizes["hidden"]}, **how)
    capacity = 1.25 if variant == "capacity" else None
    router = sl.experts.TopK(2, capacity=capacity)
    return moe.MoEConfig(**sizes, **how, experts=8, router=router)


def of_variant(variant: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is measured of a variant, in this process."""
    config = config_of(variant, arguments.tiny)
    device = jax.devices()[0]
    mesh = sl.make_mesh("data=1", devices=jax.devices()[:1])
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, remat=arguments.remat, clip=1.0)
    optimizer = optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, weight_decay=0.1, mask=gpt.decays)
    dense = variant == "dense"
    model, loss = (gpt.GPT, gpt.loss) if dense else (moe.MoE, moe.loss)
    state = sl.init(lambda: model(config, rngs=nnx.Rngs(0)), optimizer, strategy)
    take, metrics = sl.train_step(loss, strategy), {}
    shape = (BATCH, config.context + 1)
    tokens = np.random.default_rng(0).integers(0, config.vocab, shape, dtype=np.int32)
    batch = jax.device_put({"tokens": tokens}, jax.NamedSharding(mesh, jax.P("data")))

    def step() -> None:
        nonlocal state, metrics
        state, metrics = take(state, batch)

    def wait() -> float:
        jax.block_until_ready((state, metrics))
        return metrics["loss"].item()

    found: dict[str, Any] = timed(step, wait, arguments.steps)
    rate = BATCH * config.context / found["step_seconds"]
    found |= {"tokens_per_second": rate, "device": device.device_kind}
    if chip := chip_of(device.device_kind):
        found["mfu"] = rate * config.training_flops_per_token / chip.flops["bf16"]
    found["peak_bytes"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
    for name in ("dropped", "rounds"):
        if name in metrics:
            found[name] = metrics[name].item()
    return found


def in_process_of_its_own(variant: str) -> dict[str, Any]:
    """The same by a new process, which leaves the GPU empty."""
    command = [sys.executable, "-m", "benchmarks.experts_gpu", *sys.argv[1:], "--only", variant]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(ended.stdout.splitlines()[-1])
    print(variant, found, flush=True)
    return found


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--tiny", action="store_true", help="a small model; figures mean nothing")
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--remat", default="none", help="what blocks recompute")
    parser.add_argument("--only", choices=VARIANTS, help="one of them, here; prints its JSON")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(of_variant(arguments.only, arguments)))
        return
    figures: dict[str, Any] = {name: in_process_of_its_own(name) for name in VARIANTS}
    dense = figures["dense"]["tokens_per_second"]
    for name in VARIANTS[1:]:
        figures[f"{name}_over_dense"] = figures[name]["tokens_per_second"] / dense
    report("experts_gpu", figures, {}, arguments.json)


if __name__ == "__main__":
    main()
