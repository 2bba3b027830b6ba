"""Eight experts against one MLP of equal compute, on eight simulated devices, and a picture of who
is sent what.

    python examples/experts.py                      # some five minutes on two cores
    python examples/experts.py --steps 100 --picture load.svg

Both take as many products for a token: of eight experts, half as wide as the dense model's MLP, it
goes to two, and experts have places for no more than that. Each device holds one expert of every
layer, and its share of the examples; tokens travel. The text is the source of the Python
installation that runs this.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

# The models live beside the examples, in a clone.
sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import optax
from flax import nnx

import shardlib as sl
from examples.quickstart import corpus
from models import gpt, moe

CONTEXT, BATCH, STEPS, EXPERTS = 64, 32, 2400, 8
SIZES: dict[str, Any] = {
    "layers": 2,
    "width": 64,
    "heads": 4,
    "context": CONTEXT,
    "vocab": 256,
    "bias": False,
}
DENSE = gpt.GPTConfig(**SIZES, hidden=128)
SPARSE = moe.MoEConfig(
    **SIZES,
    hidden=64,
    experts=EXPERTS,
    router=sl.experts.Top2(capacity=1.0),
    balance=0.5,
    group=BATCH // EXPERTS * CONTEXT,
)
MEASURE = 20  # batches that are held out


def train(
    config: gpt.GPTConfig, steps: int, seed: int, strategy: sl.Strategy
) -> tuple[float, list[dict[str, Any]]]:
    """The loss on what was held out, in nats a byte, and the metrics of every tenth step."""
    text = corpus()
    held_out, learned = text[: len(text) // 20], text[len(text) // 20 :]
    sparse = isinstance(config, moe.MoEConfig)
    loss, make = (moe.loss, moe.MoE) if sparse else (gpt.loss, gpt.GPT)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 20, max(steps, 21))
    optimizer: Any = optax.adamw(schedule, weight_decay=0.1)
    if isinstance(config, moe.MoEConfig) and config.balance_bias:
        optimizer = sl.experts.balanced(optimizer)
    state = sl.init(lambda: make(config, rngs=nnx.Rngs(seed)), optimizer, strategy, seed=seed)
    records: list[dict[str, Any]] = []
    loop = sl.Loop(steps=steps, log_every=10)
    sinks = [sl.Progress(steps), records.append]
    step = sl.train_step(loss, strategy)
    state = sl.fit(
        step,
        state,
        windows(learned, seed),
        loop,
        records=sl.Records(sinks=sinks),
    )

    def cross_entropy(model: Any, batch: Any, rng: Any) -> sl.WeightedMean:
        found: Any = loss(nnx.view(model, deterministic=True), batch, None)
        return found[1]["cross_entropy"] if sparse else found

    measured = sl.evaluation(cross_entropy, strategy)(state, windows(held_out, 0), at_most=MEASURE)
    return measured["loss"], [record for record in records if "loss" in record]


def windows(text: np.ndarray, seed: int) -> Any:
    """Random pieces of the text, each one byte longer than the context, which is only a target."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - CONTEXT - 1, BATCH)
        yield {"tokens": np.stack([text[s : s + CONTEXT + 1] for s in starts]).astype(np.int32)}


def main(arguments: list[str]) -> None:
    """Train both, and say which has learned more."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, help="draw the load of the experts into this file")
    asked = parser.parse_args(arguments)
    sl.simulate_devices(EXPERTS)
    strategy = sl.Strategy(mesh=f"data={EXPERTS}", rules=sl.rules.experts, clip=1.0)
    losses, records = {}, []
    for name, config in {"dense": DENSE, f"{EXPERTS} experts": SPARSE}.items():
        print(f"\n{name}: {strategy.mesh}", flush=True)
        started = time.monotonic()
        losses[name], records = train(config, asked.steps, asked.seed, strategy)
        print(
            f"{name}: {losses[name]:.3f} nats a byte held out, after "
            f"{time.monotonic() - started:.0f} s"
        )
    dense, sparse = losses.values()
    dropped = np.mean([record["dropped"] for record in records[-10:]])
    print(
        f"\nThe experts' loss is {sparse / dense:.3f} of the dense model's; {dropped:.1%} of "
        "choices found no place lately."
    )
    if asked.picture:
        asked.picture.write_text(sl.experts.load_picture(records, "Two layers of experts"))
        print(f"Drawn into {asked.picture}.")


if __name__ == "__main__":
    main(sys.argv[1:])
