"""What gradients lose on the wire, by the dtypes that they are sent in and added up in.

A sum over devices has an error of its own, here of normal numbers in bfloat16 over that in float32,
relative to the sum's typical size:

    error_ring_N       bfloat16, `Precision(reduce="bf16")`: each device of a ring adds its own to
                       what comes, and rounds before it sends
    error_grid_256     the same over 16 devices, and then over 16 more
    error_arrival_N    `Precision(wire="bf16")`: each sends its own, which are added up in float32

And a small GPT learns the source of Python on eight devices at stage 3, from three seeds, with
gradients sent as float32, as bfloat16 that is added up on arrival, and as bfloat16 along a ring.
Simulated devices widen sums of bfloat16, so that the ring is written out. `loss_ratio_...` is the
mean loss over seeds on held-out text, over that with float32; `seed_ratio` the largest loss of a
seed with float32 over the least. Some six minutes on two cores.

    python -m benchmarks.wire --json [--plot docs/wire.svg]
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from jax import lax

import shardlib as sl
from benchmarks._picture import level, line, svg, text
from benchmarks._report import report
from examples.experts import CONTEXT, windows
from examples.quickstart import corpus
from models import gpt
from shardlib.collectives import _sums

BOUNDS = {"loss_ratio_arrival": 1.005}
DEVICES, STEPS, SEEDS, RATE, MEASURE, SMOOTH = 8, 1000, 3, 2e-3, 100, 5
CONFIG = gpt.GPTConfig(
    layers=2, width=64, heads=4, context=CONTEXT, vocab=256, bias=False, hidden=128
)


@dataclass(frozen=True)
class Choice:
    """A way to send and add up gradients."""

    words: str
    precision: sl.Precision
    colour: str


CHOICES = {
    "float32": Choice("sent as float32", sl.Precision("bf16"), "#247"),
    "arrival": Choice(
        "sent as bfloat16, added up as float32", sl.Precision("bf16", wire="bf16"), "#2a7"
    ),
    "ring": Choice(
        "sent as bfloat16 along a ring",
        sl.Precision("bf16", accumulate="bf16", reduce="bf16"),
        "#b33",
    ),
}


@dataclass(frozen=True)
class Trained:
    """A run: its loss on held-out text, and while it learned, by step."""

    held_out: float
    curve: list[tuple[int, float]]


def ring(rows: jax.Array, axis: str) -> jax.Array:
    """The rows that this device keeps of the sum, added up hop by hop in the dtype of the rows."""
    parts, index = lax.axis_size(axis), lax.axis_index(axis)
    pieces = rows.reshape(parts, rows.shape[0] // parts, *rows.shape[1:])
    onward = [(device, (device + 1) % parts) for device in range(parts)]
    total = pieces[(index - 1) % parts]
    for hop in range(2, parts + 1):
        total = lax.ppermute(total, axis, onward) + pieces[(index - hop) % parts]
    return total


def train(choice: Choice, seed: int, steps: int) -> Trained:
    """Train a small model."""
    held_out, learned = split_corpus()
    schedule = optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 20, steps, 0.1 * RATE)
    strategy = sl.Strategy(
        mesh=f"data={DEVICES}",
        rules=sl.rules.data,
        clip=1.0,
        zero=sl.Zero(3, small=0),
        precision=choice.precision,
    )
    state = sl.init(
        lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(seed)), optax.adam(schedule), strategy, seed=seed
    )
    records: list[dict[str, Any]] = []
    sinks: list[Any] = [records.append]
    with mock.patch.object(_sums, "_scatter_rows", ring):
        state = sl.fit(
            sl.train_step(gpt.loss, strategy),
            state,
            windows(learned, seed),
            sl.Loop(steps=steps, log_every=20),
            records=sl.Records(sinks=sinks),
        )
    evaluate = sl.evaluation(lambda model, batch, rng: gpt.loss(model, batch, None), strategy)
    loss = evaluate(state, windows(held_out, 0), at_most=MEASURE)["loss"]
    curve = [(record["step"], record["loss"]) for record in records if "loss" in record]
    return Trained(loss, curve)


def split_corpus() -> tuple[np.ndarray, np.ndarray]:
    """What is held out, and what is learned from."""
    whole = corpus()
    return whole[: len(whole) // 20], whole[len(whole) // 20 :]


def errors() -> dict[str, float]:
    """The errors of single sums."""
    rng = np.random.default_rng(0)
    found = {}
    for devices in (8, 256):
        numbers = rng.normal(size=(devices, 4096)).astype(ml_dtypes.bfloat16)
        found[f"error_ring_{devices}"] = error(hop_by_hop(numbers), numbers)
        found[f"error_arrival_{devices}"] = error(numbers.astype(np.float32).sum(0), numbers)
        if devices == 256:
            first = [hop_by_hop(some) for some in numbers.reshape(16, 16, -1)]
            found["error_grid_256"] = error(hop_by_hop(np.stack(first)), numbers)
    return found


def hop_by_hop(numbers: np.ndarray) -> np.ndarray:
    """The sum over the first dim, rounded after each addition."""
    total = numbers[0]
    for one in numbers[1:]:
        total = (total.astype(np.float32) + one.astype(np.float32)).astype(numbers.dtype)
    return total


def error(total: np.ndarray, numbers: np.ndarray) -> float:
    """How far sums are off, over how large they are, each as the root of a mean square."""
    true = numbers.astype(np.float64).sum(0)
    off = total.astype(np.float64) - true
    return float(np.sqrt(np.mean(off**2) / np.mean(true**2)))


def plot(runs: dict[str, list[Trained]]) -> str:
    """The losses of all runs over the steps."""
    width, height, left, top, right, bottom = 720, 340, 60, 40, 20, 60
    curves = [run.curve for of_choice in runs.values() for run in of_choice]
    last = max(step for curve in curves for step, _ in curve)
    smooth = [loss for curve in curves for _, loss in smoothed(curve)]
    low, high = min(smooth), max(smooth)

    def place(step: float, loss: float) -> tuple[float, float]:
        x = left + (width - left - right) * step / last
        y = top + (height - top - bottom) * (high - loss) / (high - low)
        return x, y

    parts = []
    for loss in np.linspace(low, high, 5):
        parts.append(level(left, width - right, place(0, loss)[1], f"{loss:.2f}"))
    for position, (name, of_choice) in enumerate(runs.items()):
        choice = CHOICES[name]
        for run in of_choice:
            parts.append(line([place(*point) for point in smoothed(run.curve)], choice.colour))
        y = height - 36 + 14 * (position // 2)
        x = left + 300 * (position % 2)
        parts.append(text(x, y, choice.words, colour=choice.colour))
    parts.append(text(width - right, height - 36, f"{last:,} steps", "end", "#555"))
    title = "Training loss, three seeds of each way to send gradients"
    return svg(width, height, left, title, parts)


def smoothed(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means of a few records each, as single batches differ more than the curves do."""
    points = []
    for end in range(SMOOTH, len(curve) + 1):
        losses = [loss for _, loss in curve[end - SMOOTH : end]]
        points.append((curve[end - 1][0], sum(losses) / SMOOTH))
    return points


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--plot", type=Path, help="draw the losses into this file")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    sl.simulate_devices(DEVICES)
    runs: dict[str, list[Trained]] = {name: [] for name in CHOICES}
    for seed in range(SEEDS):
        for name, choice in CHOICES.items():
            run = train(choice, seed, arguments.steps)
            runs[name].append(run)
            print(f"seed {seed} {name:8} {run.held_out:.4f}", file=sys.stderr, flush=True)
    losses = {name: [run.held_out for run in of_choice] for name, of_choice in runs.items()}
    figures = errors()
    for name in ("arrival", "ring"):
        figures[f"loss_ratio_{name}"] = float(np.mean(losses[name]) / np.mean(losses["float32"]))
    figures["seed_ratio"] = max(losses["float32"]) / min(losses["float32"])
    if arguments.plot:
        arguments.plot.write_text(plot(runs))
    report("wire", figures, BOUNDS, arguments.json)


if __name__ == "__main__":
    main()
