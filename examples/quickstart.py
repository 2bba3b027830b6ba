"""Train a byte-level GPT on eight simulated devices, then run the very same model on another mesh.

    python examples/quickstart.py

The text is the source of the Python installation that runs this, so there is nothing to download.
"""

import sys
import sysconfig
import time
from pathlib import Path

# The models live beside the examples, in a clone.
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from models import gpt, sampling

CONTEXT, BATCH, STEPS = 64, 32, 500
RULES = sl.rules.data | sl.rules.tensor


def corpus() -> np.ndarray:
    """The modules of Python's standard library, as bytes."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def batches(text: np.ndarray, seed: int = 0):
    """Random windows of the text, each one token longer than the context: the last is only a
    target.
    """
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - CONTEXT - 1, BATCH)
        yield {"tokens": np.stack([text[s : s + CONTEXT + 1] for s in starts]).astype(np.int32)}


def start(strategy: sl.Strategy, steps: int) -> sl.State:
    """A model and its optimizer, born on the mesh, for a run of so many steps."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, 20, max(steps, 21))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.1))
    return sl.init(lambda: gpt.GPT(gpt.tiny(), rngs=nnx.Rngs(0)), optimizer, strategy)


def train(state: sl.State, text: np.ndarray, steps: int) -> tuple[sl.State, list[float]]:
    """A run: a state goes in, a state and the losses come out. Nothing here knows about devices."""
    step, losses = sl.train_step(gpt.loss, state.layout.strategy), []
    print("compiling the step ...", flush=True)
    started = time.time()
    for number, batch in zip(range(steps), batches(text), strict=False):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        progress(number + 1, steps, losses, time.time() - started)
    return state, losses


def progress(done: int, steps: int, losses: list[float], seconds: float) -> None:
    """A bar that rewrites its line on a terminal, and now and then a line elsewhere."""
    bar = "█" * (30 * done // steps) + "·" * (30 - 30 * done // steps)
    loss = sum(losses[-10:]) / len(losses[-10:])
    line = f"{bar} {done}/{steps}  loss {loss:.3f}  {seconds:4.0f} s"
    if sys.stdout.isatty():
        print("\r" + line, end="\n" if done == steps else "", flush=True)
    elif done % max(steps // 5, 10) == 0:
        print(line, flush=True)


def sample(state: sl.State, prompt: str) -> str:
    """What the model writes after `prompt`, drawn on the mesh that it was trained on."""
    tokens = jnp.array([list(prompt.encode())])
    rows = jax.device_count()  # the batch is split over the data axes like any other
    more, drawn = CONTEXT - tokens.shape[1], sampling.Sampling(temperature=0.7)
    with state.layout.strategy.scope():
        written = sampling.generate(
            state.model, jnp.repeat(tokens, rows, 0), more, jax.random.key(0), drawn
        )
    return prompt + bytes(np.asarray(written[0]).astype(np.uint8)).decode(errors="replace")


def main(steps: int = STEPS) -> None:
    """The tour."""
    sl.simulate_devices(8)
    text = corpus()
    print(f"The text: {len(text) / 2**20:.1f} MiB of Python's own source.\n")

    strategy = sl.Strategy(mesh="data=2,model=4", rules=RULES)
    print(sl.describe_mesh(strategy.device_mesh), "\n")
    state = start(strategy, steps)
    print(sl.describe(state), "\n")
    state, losses = train(state, text, steps)

    other = sl.Strategy(mesh="data=4,model=2", rules=RULES, accumulate=2)
    print(
        f"\nThe same model on {other.mesh}, in two microbatches. Nothing but the strategy has "
        "changed:\n"
    )
    _, again = train(start(other, steps), text, 10)
    print("\n    step   " + "  ".join(f"{n:6d}" for n in (1, 4, 7, 10)))
    for where, values in ((strategy.mesh, losses), (other.mesh, again)):
        print(
            "    loss   " + "  ".join(f"{values[n - 1]:6.4f}" for n in (1, 4, 7, 10)) + "   on "
            f"{where}"
        )
    np.testing.assert_allclose(again, losses[:10], rtol=1e-3)

    print(f"\nA sample, after {steps} steps:\n")
    print("    " + sample(state, "    def __init__(self").replace("\n", "\n    "))


if __name__ == "__main__":
    main()
