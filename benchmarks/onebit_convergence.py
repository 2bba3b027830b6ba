"""What 1-bit Adam learns beside Adam: a small GPT on the source of Python, eight devices, three
seeds, float32 and bfloat16.

Every run takes the same batches from the same start under the same schedule. Adam exchanges
gradients exactly. 1-bit Adam does so for the first fifth of the run, then one bit of each momentum
over all eight devices; once with what compression took away added to the next step, and once
without. `loss_ratio` is the worst, over dtypes, of the mean loss over seeds of 1-bit Adam over that
of Adam, on held-out text; `no_feedback_ratio` the least of the same without error feedback. Then a
run of 1-bit Adam is saved 200 steps before its end, restored, and goes on: on as many devices,
where `restart_differs` counts the arrays that are not what they are without stopping, bit for bit;
and on four of them, where `restart_ratio` is the larger of the two losses over the other. Some half
an hour on two cores.

    python -m benchmarks.onebit_convergence --json [--plot docs/onebit.svg]
"""

import argparse
import itertools
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from benchmarks._picture import level, line, svg, text
from benchmarks._report import report
from examples.experts import CONTEXT, windows
from examples.quickstart import corpus
from models import gpt

BOUNDS = {"loss_ratio": 1.01, "restart_ratio": 1.005, "restart_differs": 0}
DEVICES, STEPS, SEEDS, FREEZE, RATE, MEASURE, LAST = 8, 2000, 3, 0.2, 2e-3, 200, 200
CONFIG = gpt.GPTConfig(
    layers=2, width=64, heads=4, context=CONTEXT, vocab=256, bias=False, hidden=128
)
COLOURS = {"adam": "#247", "1-bit adam": "#2a7", "without feedback": "#b33"}


def texts() -> tuple[np.ndarray, np.ndarray]:
    """What is held out, and what is learned from."""
    text = corpus()
    return text[: len(text) // 20], text[len(text) // 20 :]


def schedule(steps: int) -> optax.Schedule:
    """The learning rate of every run."""
    return optax.warmup_cosine_decay_schedule(0.0, RATE, steps // 20, steps, 0.1 * RATE)


def measured(state: sl.State, strategy: sl.Strategy) -> float:
    """Nats a byte of what was held out."""
    evaluate = sl.evaluation(lambda model, batch, rng: gpt.loss(model, batch, None), strategy)
    return evaluate(state, windows(texts()[0], 0), at_most=MEASURE)["loss"]


def train(
    kind: str, precision: str, seed: int, steps: int, freeze: Any, scale: Any
) -> tuple[float, list[tuple[int, float]]]:
    """The loss on what was held out, and that of training, every twentieth step."""
    exact = kind == "adam"
    exchange = (
        sl.Exact()
        if exact
        else sl.collectives.OneBit("data", feedback=kind == "1-bit adam", scale=scale)
    )
    optimizer = (
        optax.adam(schedule(steps))
        if exact
        else sl.optimizers.onebit_adam(schedule(steps), freeze=freeze)
    )
    strategy = sl.Strategy(
        mesh=f"data={DEVICES}",
        rules=sl.rules.data,
        clip=1.0,
        precision=precision,
        exchange=exchange,
    )
    state = sl.init(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(seed)), optimizer, strategy, seed=seed)
    records: list[dict[str, Any]] = []
    loop = sl.Loop(steps=steps, log_every=20)
    sinks: list[Any] = [records.append]
    batches = windows(texts()[1], seed)
    step = sl.train_step(gpt.loss, strategy)
    state = sl.fit(step, state, batches, loop, records=sl.Records(sinks=sinks))
    return measured(state, strategy), [
        (record["step"], record["loss"]) for record in records if "loss" in record
    ]


def restart(steps: int) -> tuple[int, float]:
    """How many arrays of a run that was stopped differ from those of one that was not; and the loss
    on half the devices.
    """
    optimizer = sl.optimizers.onebit_adam(schedule(steps), freeze=FREEZE, steps=steps)
    strategies = [
        sl.Strategy(
            mesh=sl.make_mesh(f"data={devices}", devices=jax.devices()[:devices]),
            rules=sl.rules.data,
            clip=1.0,
            exchange=sl.collectives.OneBit("data"),
        )
        for devices in (DEVICES, DEVICES // 2)
    ]
    make = lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0))  # noqa: E731
    source = windows(texts()[1], 0)

    def onward(strategy: sl.Strategy, state: sl.State, batches: Any) -> sl.State:
        step = sl.train_step(gpt.loss, strategy)
        for batch in batches:
            state, metrics = step(state, batch)
            # A CPU that has many steps before it may wait for itself.
            jax.block_until_ready(metrics)
        return state

    before = onward(
        strategies[0],
        sl.init(make, optimizer, strategies[0]),
        itertools.islice(source, steps - LAST),
    )
    last = list(itertools.islice(source, LAST))
    with tempfile.TemporaryDirectory() as folder, sl.Checkpoints(folder) as checkpoints:
        checkpoints.save(before)
        checkpoints.wait()
        read = [
            checkpoints.restore(sl.init(make, optimizer, one, abstract=True)).state
            for one in strategies
        ]
    never_stopped, *restarted = [
        onward(strategy, state, last)
        for strategy, state in zip(strategies[:1] + strategies, [before, *read], strict=True)
    ]
    arrays = [
        jax.device_get((one.params, one.opt_state, one.errors))
        for one in (never_stopped, restarted[0])
    ]
    differs = sum(
        not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, arrays), strict=True)
    )
    losses = [
        measured(state, strategy) for state, strategy in zip(restarted, strategies, strict=True)
    ]
    return differs, max(losses) / min(losses)


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--plot", type=Path, help="draw the first seed's curves into this file")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument(
        "--freeze", default=FREEZE, type=lambda text: text if text == "auto" else float(text)
    )
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
                loss, curve = train(
                    kind, precision, seed, arguments.steps, arguments.freeze, arguments.scale
                )
                found.append(loss)
                curves[precision].setdefault(kind, curve)
                seconds = time.monotonic() - started
                print(
                    f"{precision}, seed {seed}, {kind}: {loss:.4f} nats a byte, {seconds:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    ratio = {
        kind: {
            precision: float(np.mean(of[kind]) / np.mean(of["adam"]))
            for precision, of in losses.items()
        }
        for kind in COLOURS
        if all(kind in of and "adam" in of for of in losses.values())
    }
    if arguments.plot:
        arguments.plot.write_text(picture(curves["float32"], arguments.freeze * arguments.steps))
    differs, restarted = restart(arguments.steps)
    figures = {
        "loss_ratio": max(ratio["1-bit adam"].values()),
        "no_feedback_ratio": min(ratio.get("without feedback", {"": float("nan")}).values()),
        "restart_differs": differs,
        "restart_ratio": restarted,
        "ratios": ratio,
        "losses": losses,
        "steps": arguments.steps,
        "freeze": arguments.freeze,
        "scale": arguments.scale,
    }
    report("onebit_convergence", figures, BOUNDS, arguments.json)


def picture(curves: dict[str, list[tuple[int, float]]], frozen: float) -> str:
    """The loss of each over the steps, each point the mean of those around it."""
    width, height, left, top, right, bottom = 720, 340, 50, 40, 690, 300
    last, low, high = max(step for of in curves.values() for step, _ in of), 1.4, 3.0

    def x(step: float) -> float:
        return left + (right - left) * step / last

    def y(loss: float) -> float:
        return bottom - (bottom - top) * (min(loss, high) - low) / (high - low)

    parts = [level(left, right, y(loss), loss) for loss in (1.4, 1.8, 2.2, 2.6, 3.0)]
    parts += [text(x(step), bottom + 20, step, "middle") for step in range(0, last + 1, last // 4)]
    parts.append(line([(x(frozen), top), (x(frozen), bottom)], "#888", dashed=True))
    parts.append(text(x(frozen) + 6, top + 12, "from here one bit", colour="#666"))
    for row, (kind, curve) in enumerate(curves.items()):
        losses = np.array([loss for _, loss in curve])
        smooth = [losses[max(0, k - 4) : k + 5].mean() for k in range(len(losses))]
        points = [(x(step), y(loss)) for (step, _), loss in zip(curve, smooth, strict=True)]
        parts += [
            line(points, COLOURS[kind], 2),
            text(right, top + 16 * (row + 1), kind, "end", COLOURS[kind]),
        ]
    return svg(width, height, left, "Loss over steps, nats a byte, eight workers", parts)


if __name__ == "__main__":
    main()
