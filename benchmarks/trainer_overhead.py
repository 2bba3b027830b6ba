"""What the trainer costs over the bare step: records every 10 steps, a checkpoint every 50, batches
from the data loader.

One process, in turns: ten steps of `sl.fit`, then ten of the step alone on a batch that is there
already, and so on, since the machine's own speed wanders within a minute. Five turns of each, with
one checkpoint among the trainer's, make a ratio; the figure is the median of the ratios. A turn of
the trainer ends when its last step has; the save is written while the turn after it goes on. And
the loader alone, in tokens a second, against the tokens the model eats.

    python -m benchmarks.trainer_overhead --json
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax
import optax
from flax import nnx

import shardlib as sl
from benchmarks._report import report
from models import gpt

BOUNDS = {"ratio_median": 1.03, "loader_ratio_inverse": 1 / 20}
TURN, SAVE = 10, 50  # steps
MODEL = gpt.GPTConfig(
    layers=4, width=128, heads=4, context=256, vocab=257, vocab_multiple=128, norm="rms",
    positions="rotary",
    mlp="swiglu", hidden=352, bias=False,
)  # fmt: skip
BATCH = 8


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument(
        "--ratios", type=int, default=16, help="ratios, after one that is not counted"
    )
    arguments = parser.parse_args()

    strategy = sl.Strategy(mesh="data=-1", rules=sl.rules.data, clip=1.0)
    step, optimizer = sl.train_step(gpt.loss, strategy), optax.adamw(1e-3)
    states = [
        sl.init(lambda: gpt.GPT(MODEL, rngs=nnx.Rngs(0)), optimizer, strategy) for _ in range(2)
    ]
    prepared = sl.data.prepare(sl.data.Corpus("python", held_out=0.05))
    sequences = sl.data.Sequences(prepared.train, length=MODEL.context, batch=BATCH)
    batch = next(sl.batches(sequences, strategy))

    bare, trainer, started = [], [], 0.0

    def turn(state: sl.State) -> dict[str, float]:
        """Called by the loop every ten steps: the end of a turn of the trainer, and the whole of
        one of the bare step.
        """
        nonlocal started
        jax.block_until_ready(state)
        trainer.append(time.perf_counter() - started)
        before = time.perf_counter()
        for _ in range(TURN):
            states[1], _ = step(states[1], batch)
        jax.block_until_ready(states[1])
        bare.append(time.perf_counter() - before)
        started = time.perf_counter()
        return {}

    with tempfile.TemporaryDirectory() as folder:
        loop = sl.Loop(steps=SAVE * (arguments.ratios + 1), evaluate_every=TURN, save_every=SAVE)
        sinks = [sl.Progress(loop.steps), sl.JsonLines(Path(folder) / "metrics.jsonl")]
        sl.fit(
            step,
            states[0],
            sl.batches(sequences, strategy),
            loop,
            folder=folder,
            evaluate=turn,
            records=sl.Records(sinks=sinks, unit="tokens"),
        )
        saved = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())

    rows = iter(sequences.local())
    next(rows)
    before = time.perf_counter()
    count = 2000
    for _ in range(count):
        next(rows)
    loaded = count * BATCH * MODEL.context / (time.perf_counter() - before)
    # The first turn of a save's fifty steps is that in which it is written.
    together = [
        [sum(turns[i : i + SAVE // TURN]) for i in range(SAVE // TURN, len(turns), SAVE // TURN)]
        for turns in (trainer, bare)
    ]
    ratios = [a / b for a, b in zip(*together, strict=True)]
    step_seconds = statistics.median(bare) / TURN
    eaten = BATCH * MODEL.context / step_seconds
    figures = {
        "ratio_median": statistics.median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "loader_ratio": loaded / eaten,
        "loader_ratio_inverse": eaten / loaded,
        "step_milliseconds": 1000 * step_seconds,
        "loader_tokens_per_second": loaded,
        "checkpoint_megabytes_kept": saved / 1e6,
        "devices": jax.device_count(),
    }
    report("trainer_overhead", figures, BOUNDS, arguments.json)


if __name__ == "__main__":
    main()
