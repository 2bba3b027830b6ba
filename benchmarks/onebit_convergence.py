"""What 1-bit Adam learns beside Adam: a small GPT on the source of Python, eight devices, three seeds, float32 and bfloat16.

Every run takes the same batches from the same start under the same schedule. Adam exchanges gradients exactly. 1-bit Adam does so
for the first fifth of the run, then one bit of each momentum over all eight devices; once with what compression took away added
to the next step, and once without. `loss_ratio` is the worst, over dtypes, of the mean loss over seeds of 1-bit Adam over that of
Adam, on held-out text; `no_feedback_ratio` the least of the same without error feedback. Some half an hour on two cores.

    python -m benchmarks.onebit_convergence --json [--plot docs/onebit.svg]
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from examples.experts import CONTEXT, windows
from examples.quickstart import corpus
from models import gpt

BOUNDS = {"loss_ratio": 1.01}
DEVICES, STEPS, SEEDS, FREEZE, RATE, MEASURE = 8, 2400, 3, 0.2, 2e-3, 200
CONFIG = gpt.GPTConfig(layers=2, width=64, heads=4, context=CONTEXT, vocab=256, bias=False, hidden=128)
COLOURS = {"adam": "#247", "1-bit adam": "#2a7", "without feedback": "#b33"}


def train(kind: str, precision: str, seed: int, steps: int, freeze: Any, scale: Any) -> tuple[float, list[tuple[int, float]]]:
    """The loss on what was held out, in nats a byte, and that of training, every twentieth step."""
    text = corpus()
    held_out, learned = text[: len(text) // 20], text[len(text) // 20 :]
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 20, steps, 0.1 * RATE)
    exact = kind == "adam"
    exchange = sl.Exact() if exact else sl.collectives.OneBit("data", feedback=kind == "1-bit adam", scale=scale)
    optimizer = optax.adam(schedule) if exact else sl.optimizers.onebit_adam(schedule, freeze=freeze)
    strategy = sl.Strategy(
        mesh=f"data={DEVICES}", rules=sl.rules.data, clip=1.0, precision=precision, exchange=exchange
    )
    state = sl.init(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(seed)), optimizer, strategy, seed=seed)
    records: list[dict[str, Any]] = []
    loop = sl.Loop(steps=steps, log_every=20)
    state = sl.fit(sl.train_step(gpt.loss, strategy), state, windows(learned, seed), loop, sinks=[records.append])
    evaluate = sl.evaluation(lambda model, batch, rng: gpt.loss(model, batch, None), strategy)
    loss = evaluate(state, windows(held_out, 0), at_most=MEASURE)["loss"]
    return loss, [(record["step"], record["loss"]) for record in records if "loss" in record]


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--plot", type=Path, help="draw the first seed's curves into this file")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--freeze", default=FREEZE, type=lambda text: text if text == "auto" else float(text))
    parser.add_argument("--scale", default="mean", choices=("mean", "rms"))
    parser.add_argument("--precisions", default="float32,bf16")
    parser.add_argument("--kinds", default=",".join(COLOURS))
    arguments = parser.parse_args()
    sl.simulate_devices(DEVICES)
    losses: dict[str, dict[str, list[float]]] = {}
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for precision in arguments.precisions.split(","):
        losses[precision] = {kind: [] for kind in arguments.kinds.split(",")}
        curves[precision] = {}
        for seed in range(arguments.seeds):
            for kind, found in losses[precision].items():
                started = time.monotonic()
                loss, curve = train(kind, precision, seed, arguments.steps, arguments.freeze, arguments.scale)
                found.append(loss)
                curves[precision].setdefault(kind, curve)
                seconds = time.monotonic() - started
                print(f"{precision}, seed {seed}, {kind}: {loss:.4f} nats a byte, {seconds:.0f} s", file=sys.stderr, flush=True)
    ratio = {
        kind: {precision: float(np.mean(of[kind]) / np.mean(of["adam"])) for precision, of in losses.items()}
        for kind in COLOURS
        if all(kind in of and "adam" in of for of in losses.values())
    }
    if arguments.plot:
        arguments.plot.write_text(picture(curves["float32"], arguments.freeze * arguments.steps))
    figures = {
        "loss_ratio": max(ratio["1-bit adam"].values()),
        "no_feedback_ratio": min(ratio.get("without feedback", {"": float("nan")}).values()),
        "ratios": ratio,
        "losses": losses,
        "steps": arguments.steps,
        "freeze": arguments.freeze,
        "scale": arguments.scale,
    }
    report("onebit_convergence", figures, BOUNDS, arguments.json)


def picture(curves: dict[str, list[tuple[int, float]]], frozen: float) -> str:
    """The loss of each over the steps, each point the mean of those around it."""
    return ""


if __name__ == "__main__":
    main()
