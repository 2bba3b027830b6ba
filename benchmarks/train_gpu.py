"""Training on one GPU: tokens a second of three language models, ours over PyTorch's, in the same
run on the same shapes.

The models are GPT-2 of 124 million and of 1.5 billion parameters, and Llama 3.2 of 1.2 billion.
`ratio` is ours over PyTorch's tokens a second, of each model, and the least of them over all: the
goal is at least 1.1. `mfu` is what the products of `GPTConfig.training_flops_per_token` take, over
the card's published dense bfloat16 peak; `mfu_of_product`, over what one large product reaches in
the same process. `compile_seconds` is by how much the first step is longer than a later one.

On both sides: the same batch of random tokens in every step, so that the loss falls; a vocabulary
that is a multiple of 128; no dropout; AdamW with betas of 0.9 and 0.95 and a weight decay of 0.1 of
matrices and embeddings; gradients clipped to a norm of 1. Parameters, gradients and AdamW's moments
are float32; products and the residual stream are bfloat16; norms, attention's softmax and the loss
are float32. PyTorch has what makes it fast: `torch.compile`, autocast, the faster on these shapes
of its two flash attentions, a fused AdamW, one product for queries, keys and values. Each side runs
in a process of its own, one after the other, so that they never share the GPU's memory.

    python -m benchmarks.train_gpu --json
    python -m benchmarks.train_gpu --tiny --json      # tiny models, to try the path on a CPU

The figures of `--tiny` mean nothing.

`XLA_FLAGS` and PyTorch's variables act as they are set. The benchmark sets one variable, unless it
is set: JAX, which takes three quarters of a GPU's memory by default, may take more,
`XLA_PYTHON_CLIENT_MEM_FRACTION=0.92`.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from models import gpt
from shardlib.compiled._memory import peak_bytes
from shardlib.machine._chips import chip_of

WARM_UP, TURNS, LEARNING_RATE = 5, 5, 3e-4
Training = tuple[Callable[[], None], Callable[[], float], dict[str, Any]]


def llama_1b(**changes: Any) -> gpt.GPTConfig:
    """Llama 3.2 1B, in a context of 2,048, without the scaling of its rotations, which is for
    longer ones.
    """
    config = gpt.GPTConfig(
        layers=16, width=2048, heads=32, kv_heads=8, head_dim=64, hidden=8192, context=2048,
        vocab=128_256,
        norm="rms", positions="rotary", rope_theta=500_000.0, mlp="swiglu", bias=False, tied=True,
    )  # fmt: skip
    return dataclasses.replace(config, **changes)


# Each model, and the sequences of a step: 16,384 tokens or more, and both sides fit an H200 with
# nothing recomputed. GPT-2's 50,257 tokens are 50,304 to both.
MODELS: dict[str, tuple[gpt.GPTConfig, int]] = {
    "gpt2": (gpt.gpt2(vocab=50_304), 32),
    "gpt2_xl": (gpt.gpt2_xl(vocab=50_304), 16),
    "llama_1b": (llama_1b(), 8),
}
# What blocks may recompute, by the word of `--remat`.
REMATS: dict[str, str | sl.Remat] = {
    "none": "none",
    "dots": "dots",
    "minimal": "minimal",
    "selective": "selective",
    "full": "full",
    "context": sl.Remat.save("context"),
    "int8": sl.Remat.compress("int8", "query", "key", "value", "context", "mlp_gate", "mlp_up"),
    "inputs_on_host": sl.Remat.offload("block_in"),
    "mlp_on_host": sl.Remat.offload("block_in", "mlp_up") | sl.Remat.save("context"),
}


def ours(config: gpt.GPTConfig, tokens: np.ndarray, arguments: argparse.Namespace) -> Training:
    """A step of the library's, what waits for it and gives its loss, and what was chosen."""
    device = jax.devices()[0]
    gpu = device.platform == "gpu"
    if not (gpu or arguments.tiny):
        sys.stderr.write(
            f"JAX has no GPU here, only {device}: see `--tiny` for a try without one.\n"
        )
        raise SystemExit(2)
    config = dataclasses.replace(
        config,
        dtype=jnp.bfloat16,
        attention="cudnn" if gpu else "xla",
        kernels=None if arguments.kernels == "best" else arguments.kernels,
        fused_loss=arguments.fused_loss,
        unroll=min(arguments.unroll or config.layers, config.layers),
    )
    about: dict[str, Any] = {
        "device": device.device_kind,
        "product_flops": product_flops(8192 if gpu else 256),
    }
    for name in ("attention", "kernels", "fused_loss", "unroll"):
        about[name] = getattr(config, name)
    about |= {"remat": arguments.remat, "xla_flags": os.environ.get("XLA_FLAGS", "")}
    mesh = sl.make_mesh("data=1", devices=jax.devices()[:1])
    remat = REMATS[arguments.remat]
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, remat=remat, clip=1.0)
    optimizer = optax.adamw(LEARNING_RATE, b1=0.9, b2=0.95, weight_decay=0.1, mask=gpt.decays)
    state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optimizer, strategy)
    take, metrics = sl.train_step(gpt.loss, strategy), {}
    batch = jax.device_put({"tokens": tokens}, jax.NamedSharding(mesh, jax.P("data")))
    if arguments.compiled_bytes:
        compiled = take.lower(state, batch).compile()
        about["compiled_bytes"] = peak_bytes(compiled, device.platform)
        del compiled

    def step() -> None:
        nonlocal state, metrics
        state, metrics = take(state, batch)

    def wait() -> float:
        jax.block_until_ready((state, metrics))
        about["peak_bytes"] = (device.memory_stats() or {}).get("peak_bytes_in_use")
        return metrics["loss"].item()

    return step, wait, about


def product_flops(size: int) -> float:
    """What a product of two square matrices in bfloat16 reaches, in FLOP/s."""
    a, b = (jax.random.normal(jax.random.key(k), (size, size), jnp.bfloat16) for k in range(2))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready([product(a, b) for _ in range(3)])
    turns = []
    for _ in range(TURNS):
        begin = time.perf_counter()
        jax.block_until_ready([product(a, b) for _ in range(10)])
        turns.append((time.perf_counter() - begin) / 10)
    return 2 * size**3 / statistics.median(turns)


def timed(step: Callable[[], None], wait: Callable[[], float], steps: int) -> dict[str, float]:
    """Seconds of a step, the median of turns of several, each waited for; those of the first; the
    first loss and the last.
    """

    def turn(count: int) -> tuple[float, float]:
        begin = time.perf_counter()
        for _ in range(count):
            step()
        loss = wait()
        return (time.perf_counter() - begin) / count, loss

    first, before = turn(1)
    turn(WARM_UP - 1)
    turns, after = zip(*(turn(max(1, steps // TURNS)) for _ in range(TURNS)), strict=True)
    seconds = statistics.median(turns)
    spread = (max(turns) - min(turns)) / seconds
    found = {"step_seconds": seconds, "spread": spread, "compile_seconds": first - seconds}
    return found | {"loss_before": before, "loss_after": after[-1]}


def shapes(name: str, arguments: argparse.Namespace) -> tuple[gpt.GPTConfig, int]:
    """A model and the sequences of its step."""
    config, batch = MODELS[name]
    if arguments.tiny:
        kv_heads, hidden = (2, 96) if config.kv_heads else (None, None)
        sizes: dict[str, Any] = {
            "layers": 2,
            "width": 64,
            "heads": 4,
            "head_dim": 16,
            "context": 64,
            "vocab": 256,
        }
        config, batch = dataclasses.replace(config, **sizes, kv_heads=kv_heads, hidden=hidden), 4
    return config, arguments.batch or batch


def one_side(side: str, name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What is measured of one side on one model, in this process."""
    config, batch = shapes(name, arguments)
    tokens = np.random.default_rng(0).integers(
        0, config.vocab, (batch, config.context + 1), dtype=np.int32
    )
    if side == "ours":
        made = ours(config, tokens, arguments)
    elif importlib.util.find_spec("torch") is None:
        return {"skipped": "PyTorch is not installed."}
    else:
        theirs: Any = importlib.import_module("benchmarks._train_torch")
        if not (arguments.tiny or theirs.torch.cuda.is_available()):
            return {"skipped": "PyTorch has no CUDA here."}
        made = theirs.training(
            config, tokens, LEARNING_RATE, arguments.torch_mode, arguments.torch_attention
        )
    step, wait, about = made
    found = timed(step, wait, arguments.steps)
    return {"tokens_per_second": batch * config.context / found["step_seconds"], **found, **about}


def in_process_of_its_own(side: str, name: str, options: list[str]) -> dict[str, Any]:
    """The same by a new process, which leaves the GPU empty; of one that fails, how it ended."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.train_gpu",
        *options,
        "--models",
        name,
        "--only",
        side,
    ]
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"} | os.environ
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode == 2:
        raise SystemExit(2)
    if ended.returncode:
        return {"failed": f"It ended with status {ended.returncode}; standard error says why."}
    return json.loads(ended.stdout.splitlines()[-1])


def compared(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Both sides on one model, one after the other."""
    config, batch = shapes(name, arguments)
    sides = {}
    for side in ("ours", "torch"):
        sides[side] = in_process_of_its_own(side, name, sys.argv[1:])
    chip, product = chip_of(sides["ours"].get("device", "")), sides["ours"].get("product_flops")
    for which, side in sides.items():
        if rate := side.get("tokens_per_second"):
            flops = rate * config.training_flops_per_token
            side["mfu"] = chip and flops / chip.flops["bf16"]
            side["mfu_of_product"] = product and flops / product
        print(f"{name}, {which}: {said(side)}", flush=True)
    mine, other = (side.get("tokens_per_second") for side in sides.values())
    return {
        "ratio": mine / other if mine and other else None,
        "batch": batch,
        "context": config.context,
        **sides,
    }


def said(side: dict[str, Any]) -> str:
    """What was measured of one side, in a line."""
    if "tokens_per_second" not in side:
        return side.get("skipped") or side["failed"]
    figures = [
        f"{side['tokens_per_second']:,.0f} tokens a second",
        f"compiled in {side['compile_seconds']:.0f} s",
    ]
    figures += [f"loss {side['loss_before']:.3f} to {side['loss_after']:.3f}"]
    for name in ("mfu", "mfu_of_product"):
        if side.get(name):
            figures.append(f"{name} {side[name]:.3f}")
    if peak := side.get("peak_bytes"):
        figures.append(f"{peak / 2**30:.1f} GiB")
    return ", ".join(figures)


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument(
        "--models", default=",".join(MODELS), help="some of them, with commas between"
    )
    parser.add_argument(
        "--batch", type=int, help="sequences a step, on both sides, in place of the table's"
    )
    parser.add_argument(
        "--steps", type=int, default=20, help="measured steps, after five of warm-up"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny models, on a CPU too; the figures mean nothing"
    )
    parser.add_argument(
        "--remat", choices=tuple(REMATS), default="none", help="ours: what blocks recompute"
    )
    parser.add_argument(
        "--compiled-bytes",
        action="store_true",
        help="ours: what the compiled step says it takes, too; it is compiled twice for it",
    )
    parser.add_argument("--kernels", default="best", help="ours: `GPTConfig.kernels`, or best")
    parser.add_argument("--fused-loss", action="store_true", help="ours: `GPTConfig.fused_loss`")
    parser.add_argument(
        "--unroll",
        type=int,
        default=1,
        help="ours: layers that are written out one after the other; 0 for all",
    )
    parser.add_argument(
        "--torch-mode", default="default", help="PyTorch's: the mode of `torch.compile`"
    )
    parser.add_argument(
        "--torch-attention", choices=("fastest", "flash", "cudnn"), default="fastest"
    )
    parser.add_argument(
        "--only",
        choices=("ours", "torch"),
        help="one side of one model, here; prints its line of JSON",
    )
    arguments = parser.parse_args()
    names = arguments.models.split(",")
    if unknown := [name for name in names if name not in MODELS]:
        parser.error(f"`--models {unknown[0]}`: there are {', '.join(MODELS)}.")
    if arguments.only:
        print(json.dumps(one_side(arguments.only, names[0], arguments)))
        return
    if arguments.tiny:
        print("Tiny models: these figures mean nothing.")
    models = {name: compared(name, arguments) for name in names}
    ratios = [model["ratio"] for model in models.values()]
    report(
        "train_gpu",
        {"ratio": None if None in ratios else min(ratios), **models},
        {},
        arguments.json,
    )
    sides = [
        (name, side, model[side]) for name, model in models.items() for side in ("ours", "torch")
    ]
    wrong = [
        f"{name}, {side}: {found['failed']}" for name, side, found in sides if "failed" in found
    ]
    wrong += [
        f"{name}, {side}: the loss did not fall, {found['loss_before']:.3f} to "
        f"{found['loss_after']:.3f}."
        for name, side, found in sides
        if "loss_after" in found and not found["loss_after"] < found["loss_before"]
    ]
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
