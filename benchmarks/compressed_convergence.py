"""What compressed optimizers and workers that train apart learn, beside their parents.

A small GPT on the source of Python, from the same start and the same batches. Each method has a
parent, whose gradients are summed exactly in every step, and a curve that must fail, without what
the method keeps for later:

    0/1 Adam        Adam                    without error feedback
    1-bit LAMB      LAMB                    without error feedback
    PowerSGD        SGD, rank 4             without error feedback
    DiLoCo          Adam, 4 workers that meet every 50 steps    without outer momentum

Steps are of 32 sequences, and of 128 beside DiLoCo, since what a worker learns by itself depends on
how many of them are its own. DiLoCo begins after a quarter of the run, as in its paper, whose
workers start from 24,000 of 88,000 steps of training together. PowerSGD serves each direction of a
matrix of 64 columns every sixteenth step, and what waits is late. The longer a run, the less that
is, and its runs are some times as long as the others'. Two workers do for it: any number sends the
factors of their mean.

`loss_ratio` of a method is the worst, over dtypes, of the mean loss over seeds over its parent's,
on held-out text; `failing_ratio` the least of what must fail, with the first seed alone. Then each
is saved 200 steps before its end, restored, and goes on: on as many devices, where
`restart_differs` counts the arrays that are not what they are without stopping, bit for bit; and
with half as many workers, where `restart_ratio` is the larger of the two losses over the other.

Some five hours on two cores; `--methods` takes some of them. With `--runs FILE` what each run has
learned is written there as it ends, and runs that are there already are not made again.

    python -m benchmarks.compressed_convergence --json [--plot docs/compressed_convergence.svg]
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from benchmarks._picture import level, line, svg, text
from benchmarks._report import report
from benchmarks.onebit_convergence import CONFIG, measured, schedule, texts
from examples.experts import windows
from models import gpt
from shardlib import collectives as c
from shardlib import optimizers

BOUNDS = {
    "loss_ratio_zero_one_adam": 1.01,
    "loss_ratio_onebit_lamb": 1.01,
    "loss_ratio_powersgd": 1.01,
    "loss_ratio_diloco": 1.02,
    "restart_ratio": 1.005,
    "restart_differs": 0,
}
DEVICES, STEPS, SEEDS, LAST = 8, 2000, 3, 200
EVERY_DEVICE, PODS, TWO = "pod=8,data=1", "pod=4,data=2", "pod=2,data=1"
FEWER = {EVERY_DEVICE: 4, PODS: 2}
RULES = sl.rules.data | sl.AxisRules(batch=("pod", "data"))
LAMB_RATE = 10.0
"""How much higher the rate of LAMB is than that of Adam: its steps are in units of parameters."""
SGD_RATE = 100.0


@dataclass(frozen=True)
class Run:
    """How a run trains: its mesh, and its exchange and optimizer for a number of steps."""

    mesh: str
    exchange: sl.Exchange
    optimizer: Callable[[int], Any]
    together: float = 0.0
    """For which part of the run, at its beginning, gradients are summed exactly."""
    longer: int = 1
    """How many times as many steps it has as other runs."""
    windows: int = 1
    """How many times as many sequences a step has as those of other runs."""

    @property
    def described(self) -> str:
        """All that the run is, as text."""
        parts = [self.mesh, str(self.exchange), self.optimizer.__name__]
        parts += [f"together {self.together}", f"windows {self.windows}"]
        return ", ".join(parts)

    def strategy(self, precision: str, workers: int | None = None) -> sl.Strategy:
        """The strategy of the run, or the same with fewer workers on as many devices of each."""
        axes = dict(part.split("=") for part in self.mesh.split(","))
        if workers is not None:
            axes["pod"] = str(workers)
        count = int(axes["pod"]) * int(axes["data"])
        text = ",".join(f"{axis}={size}" for axis, size in axes.items())
        return sl.Strategy(
            mesh=sl.make_mesh(text, devices=jax.devices()[:count]),
            rules=RULES,
            clip=1.0,
            precision=precision,
            exchange=self.exchange,
        )


@dataclass(frozen=True)
class Method:
    """A method, the parent that it is compared with, and what must fail, with names for each."""

    name: str
    parent_name: str
    failing_name: str
    parent: Run
    run: Run
    failing: Run


def adam(steps: int) -> Any:
    """Adam under the schedule of every run."""
    return optax.adam(schedule(steps))


def scaled(steps: int) -> Any:
    """The schedule for LAMB."""
    rate = schedule(steps)
    return lambda step: LAMB_RATE * rate(step)


def zero_one_adam(steps: int) -> Any:
    """0/1 Adam, by parts of the run like those of its paper."""
    return optimizers.zero_one_adam(schedule(steps), steps=steps)


def onebit_lamb(steps: int) -> Any:
    """1-bit LAMB, which freezes after a fifth of the run."""
    return optimizers.onebit_lamb(scaled(steps), steps=steps)


def lamb(steps: int) -> Any:
    """LAMB."""
    return optax.lamb(scaled(steps))


def sgd(steps: int) -> Any:
    """SGD whose momentum looks ahead, as PowerSGD's paper adds it to the gradient."""
    rate = schedule(steps)
    return optax.sgd(lambda step: SGD_RATE * rate(step), momentum=0.9, nesterov=True)


def batches(seed: int, several: int) -> Iterator[Any]:
    """Batches of several windows of text."""
    source = windows(texts()[1], seed)
    while True:
        parts = [next(source) for _ in range(several)]
        yield jax.tree.map(lambda *rows: np.concatenate(rows), *parts)


ADAM = Run(EVERY_DEVICE, sl.Exact(), adam)
ON_TWO: dict[str, Any] = {"mesh": TWO, "optimizer": sgd, "longer": 8}
BY_FOUR: dict[str, Any] = {"mesh": PODS, "optimizer": adam, "windows": 4}
METHODS = {
    "zero_one_adam": Method(
        "0/1 Adam",
        "Adam",
        "without feedback",
        ADAM,
        Run(EVERY_DEVICE, c.OneBit("pod"), zero_one_adam),
        Run(EVERY_DEVICE, c.OneBit("pod", feedback=False), zero_one_adam),
    ),
    "onebit_lamb": Method(
        "1-bit LAMB",
        "LAMB",
        "without feedback",
        Run(EVERY_DEVICE, sl.Exact(), lamb),
        Run(EVERY_DEVICE, c.OneBit("pod"), onebit_lamb),
        Run(EVERY_DEVICE, c.OneBit("pod", feedback=False), onebit_lamb),
    ),
    "powersgd": Method(
        "PowerSGD, rank 4",
        "SGD",
        "without feedback",
        Run(exchange=sl.Exact(), **ON_TWO),
        Run(exchange=c.PowerSGD("pod", rank=4), **ON_TWO),
        Run(exchange=c.PowerSGD("pod", rank=4, feedback=False), **ON_TWO),
    ),
    "diloco": Method(
        "DiLoCo, every 50 steps",
        "Adam on the same batches",
        "without outer momentum",
        Run(exchange=sl.Exact(), **BY_FOUR),
        Run(exchange=c.DiLoCo("pod", every=50), together=0.25, **BY_FOUR),
        Run(exchange=c.DiLoCo("pod", every=50, momentum=0.0), together=0.25, **BY_FOUR),
    ),
}
COLOURS = {"parent": "#247", "method": "#2a7", "failing": "#b33"}
Curve = list[tuple[int, float]]


def train(run: Run, precision: str, seed: int, steps: int) -> tuple[float, Curve]:
    """The loss on what was held out, and that of training, smoothed, over steps."""
    curve: Curve = []
    steps *= run.longer
    source = batches(seed, run.windows)
    strategy = run.strategy(precision)
    state = begun(run, strategy, seed, steps, source, curve)
    loss = measured(onward(strategy, state, source, steps, curve), strategy)
    return loss, smoothed(curve, 5 * run.longer)


def smoothed(curve: Curve, several: int) -> Curve:
    """Means of so many points each."""
    means = []
    for first in range(0, len(curve) - several + 1, several):
        steps, losses = zip(*curve[first : first + several], strict=True)
        means.append((int(np.mean(steps)), round(float(np.mean(losses)), 4)))
    return means


def begun(
    run: Run, strategy: sl.Strategy, seed: int, steps: int, source: Iterator[Any], curve: Curve
) -> sl.State:
    """The state with which a run begins, after its steps together if it has such."""
    make: Any = lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(seed))  # noqa: E731
    optimizer = run.optimizer(steps)
    if not run.together:
        return sl.init(make, optimizer, strategy, seed=seed)
    together = replace(strategy, exchange=sl.Exact())
    state = sl.init(make, optimizer, together, seed=seed)
    state = onward(together, state, source, int(run.together * steps), curve)
    like = sl.init(make, optimizer, strategy, seed=seed, abstract=True)
    return through_a_checkpoint(state, [like])[0]


def onward(
    strategy: sl.Strategy, state: sl.State, source: Iterator[Any], steps: int, curve: Curve
) -> sl.State:
    """A run up to a number of steps; its losses come at the end of the curve."""
    step = sl.train_step(gpt.loss, strategy)
    for number in range(int(state.step) + 1, steps + 1):
        state, metrics = step(state, next(source))
        # A CPU that has many steps before it may wait for itself.
        jax.block_until_ready(metrics)
        if number % 20 == 0:
            curve.append((number, float(metrics["loss"])))
    return state


def through_a_checkpoint(state: sl.State, like: list[sl.State]) -> list[sl.State]:
    """A state, saved and then read by others."""
    with tempfile.TemporaryDirectory() as folder, sl.Checkpoints(folder) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        return [checkpoints.restore(one).state for one in like]


def restart(run: Run, steps: int) -> tuple[int, float]:
    """How many arrays of a run that was stopped differ from those of one that was not; and the loss
    with half as many workers over that with all of them, or the inverse.
    """
    # On eight workers, which become four.
    run = replace(run, mesh=EVERY_DEVICE if run.mesh == TWO else run.mesh)
    optimizer, source = run.optimizer(steps), batches(0, run.windows)
    strategies = [run.strategy("float32"), run.strategy("float32", FEWER[run.mesh])]
    make: Any = lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0))  # noqa: E731
    after = min(LAST, steps // 2)
    before = begun(run, strategies[0], 0, steps, source, [])
    before = onward(strategies[0], before, source, steps - after, [])
    last = list(itertools.islice(source, after))
    like = [sl.init(make, optimizer, strategy, abstract=True) for strategy in strategies]
    read = through_a_checkpoint(before, like)
    never_stopped = onward(strategies[0], before, iter(last), steps, [])
    restarted = []
    for strategy, state in zip(strategies, read, strict=True):
        restarted.append(onward(strategy, state, iter(last), steps, []))
    arrays = []
    for state in (never_stopped, restarted[0]):
        arrays.append(jax.tree.leaves(jax.device_get(state.replaced(key=0))))
    differs = sum(not np.array_equal(a, b) for a, b in zip(*arrays, strict=True))
    losses = []
    for state, strategy in zip(restarted, strategies, strict=True):
        losses.append(measured(state, strategy))
    return differs, max(losses) / min(losses)


class Results:
    """The losses of all runs, each of which is trained once, whoever asks for it.

    With a file, what a run has learned is written there, a line of JSON each, and runs that the
    file has are not made again.
    """

    def __init__(self, steps: int, seeds: int, file: Path | None = None) -> None:
        self.steps, self.seeds, self.file = steps, seeds, file
        self._found: dict[str, tuple[float, Curve]] = {}
        if file is not None and file.exists():
            for line in map(json.loads, file.read_text().splitlines()):
                curve = [(step, loss) for step, loss in line["curve"]]
                self._found[line["run"]] = line["loss"], curve

    def losses(self, name: str, run: Run, precision: str, seeds: int | None = None) -> list[float]:
        """The loss of a run for each seed, or for the first of them."""
        seeds = self.seeds if seeds is None else seeds
        return [self._of(name, run, precision, seed)[0] for seed in range(seeds)]

    def curve(self, name: str, run: Run) -> Curve:
        """The losses of the first run, in float32, over its steps."""
        return self._of(name, run, "float32", 0)[1]

    def _of(self, name: str, run: Run, precision: str, seed: int) -> tuple[float, Curve]:
        steps = self.steps * run.longer
        key = f"{run.described} in {precision}, seed {seed}, {steps} steps"
        if key in self._found:
            return self._found[key]
        started = time.monotonic()
        loss, curve = self._found[key] = train(run, precision, seed, self.steps)
        seconds = time.monotonic() - started
        said = f"{precision}, seed {seed}, {name}: {loss:.4f} nats a byte, {seconds:.0f} s"
        print(said, file=sys.stderr, flush=True)
        if self.file is not None:
            record = {"run": key, "loss": loss, "curve": curve, "jax": jax.__version__}
            with self.file.open("a") as opened:
                opened.write(json.dumps(record) + "\n")
        return loss, curve


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument("--plot", type=Path, help="draw the first seed's curves into this file")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--runs", type=Path, help="a file of runs that are made already")
    parser.add_argument("--precisions", default="float32,bf16")
    parser.add_argument("--methods", default=",".join(METHODS), help=", ".join(METHODS))
    arguments = parser.parse_args()
    sl.simulate_devices(DEVICES)
    results = Results(arguments.steps, arguments.seeds, arguments.runs)
    methods = {name: METHODS[name] for name in arguments.methods.split(",")}
    precisions = arguments.precisions.split(",")
    figures: dict[str, Any] = {}
    losses: dict[str, Any] = {}
    for name, method in methods.items():
        losses[name] = {}
        ratios, failing_ratios = [], []
        for precision in precisions:
            parent = results.losses(f"{name}, parent", method.parent, precision)
            own = results.losses(f"{name}, method", method.run, precision)
            failing = results.losses(f"{name}, failing", method.failing, precision, seeds=1)
            losses[name][precision] = {"parent": parent, "method": own, "failing": failing}
            ratios.append(float(np.mean(own) / np.mean(parent)))
            failing_ratios.append(failing[0] / parent[0])
        figures[f"loss_ratio_{name}"] = max(ratios)
        figures[f"failing_ratio_{name}"] = min(failing_ratios)
    if arguments.plot:
        arguments.plot.write_text(picture(methods, results))
    restarts = {name: restart(method.run, arguments.steps) for name, method in methods.items()}
    figures |= {
        "restart_differs": sum(differs for differs, _ in restarts.values()),
        "restart_ratio": max(ratio for _, ratio in restarts.values()),
        "restarts": restarts,
        "losses": losses,
        "steps": arguments.steps,
        "seeds": arguments.seeds,
    }
    bounds = {name: bound for name, bound in BOUNDS.items() if name in figures}
    report("compressed_convergence", figures, bounds, arguments.json)


def picture(methods: dict[str, Method], results: Results) -> str:
    """For each method, its loss over the steps, its parent's, and that of what must fail."""
    width, row, left, right = 720, 240, 50, 690
    low, high = 1.2, 3.0
    parts: list[Any] = []
    for number, method in enumerate(methods.values()):
        top, bottom = 80 + number * row, 80 + number * row + 150
        runs = {"parent": method.parent, "method": method.run, "failing": method.failing}
        labels = {
            "parent": method.parent_name,
            "method": method.name,
            "failing": method.failing_name,
        }

        def y(loss: float, bottom: int = bottom) -> float:
            return bottom - 150 * (min(loss, high) - low) / (high - low)

        parts += [level(left, right, y(loss), loss) for loss in (1.2, 1.8, 2.4, 3.0)]
        last = results.steps * method.run.longer
        for place, (kind, run) in enumerate(runs.items()):
            points = []
            for step, loss in results.curve(method.name, run):
                points.append((left + (right - left) * step / last, y(loss)))
            parts.append(line(points, COLOURS[kind], 2))
            parts.append(text(left + 210 * place, top - 14, labels[kind], colour=COLOURS[kind]))
        parts.append(text(left, bottom + 18, "0", "middle", "#666"))
        parts.append(text(right, bottom + 18, f"{last:,} steps", "end", "#666"))
    return svg(width, row * len(methods) + 40, left, "Loss over steps, nats a byte", parts)


if __name__ == "__main__":
    main()
