"""What compressed activations of a small decoder take, and how far they move its gradients."""

import functools
import itertools
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from models import gpt

# What the block of a model names and its products read.
NAMES = ("query", "key", "value", "context", "mlp_gate", "mlp_up")
ENCODINGS = ("int8", "int4", "fp8", "bf16")
STEPS, SEEDS, LAST = 150, 3, 30
EXAMPLES, SUCCESSORS = 16, 4
CONFIG = gpt.tiny(
    layers=4, width=64, heads=4, context=64, norm="rms", mlp="swiglu", bias=False,
    positions="rotary",
)  # fmt: skip


def figures() -> dict[str, Any]:
    """Bytes kept, errors of gradients, and losses after training, beside those that are exact."""
    found: dict[str, Any] = {}
    full, saved = kept_bytes("full"), kept_bytes(sl.Remat.save(*NAMES))
    exact = gradient(sl.Remat.save(*NAMES))
    for encoding in ENCODINGS:
        remat = sl.Remat.compress(encoding, *NAMES)  # type: ignore[arg-type]
        found[f"kept_{encoding}"] = round((kept_bytes(remat) - full) / (saved - full), 4)
        errors = jax.tree.map(relative_error, gradient(remat), exact)
        found[f"gradient_error_{encoding}"] = round(max(jax.tree.leaves(errors)), 5)
    for encoding in ("int8", "int4"):
        remat = sl.Remat.compress(encoding, *NAMES)  # type: ignore[arg-type]
        ratios = [last_loss(remat, seed) / last_loss("full", seed) for seed in range(SEEDS)]
        found[f"loss_{encoding}"] = round(statistics.mean(ratios), 4)
        found[f"loss_{encoding}_worst"] = round(max(ratios), 4)
    return found


def kept_bytes(remat: Any) -> int:
    """What the loss keeps for its backward pass."""
    with sl.use(sl.rules.data, sl.make_mesh("data=1"), remat=remat):
        graph, params = nnx.split(nnx.eval_shape(model))
        batch = {"tokens": jnp.zeros((EXAMPLES, CONFIG.context + 1), jnp.int32)}

        def backward(params: Any) -> Any:
            return jax.vjp(lambda p: gpt.loss(nnx.merge(graph, p), batch).total, params)[1]

        kept = jax.tree.leaves(jax.eval_shape(backward, params))
    return sum(array.size * array.dtype.itemsize for array in kept)


def model(seed: int = 0) -> gpt.GPT:
    """The decoder, with weights of its own for each seed."""
    return gpt.GPT(CONFIG, rngs=nnx.Rngs(seed))


def step_of(remat: Any, optimizer: Any, seed: int) -> tuple[sl.Step, sl.State]:
    """A step on one device, and its first state."""
    strategy = sl.Strategy(mesh="data=1", rules=sl.rules.data, remat=remat)
    state = sl.init(functools.partial(model, seed), optimizer, strategy)
    return sl.train_step(gpt.loss, strategy), state


def gradient(remat: Any) -> Any:
    """The gradient of one batch: how far a step of a rate of one moves the parameters."""
    step, state = step_of(remat, optax.sgd(1.0), 0)
    before = jax.tree.map(np.asarray, state.params)
    state, _ = step(state, next(batches(0)))
    return jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)


def relative_error(found: np.ndarray, exact: np.ndarray) -> float:
    """How far an array is off, as norms."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


@functools.cache
def last_loss(remat: Any, seed: int) -> float:
    """The mean loss of the last steps of a run."""
    step, state = step_of(remat, optax.adamw(3e-3), seed)
    losses = []
    for batch in itertools.islice(batches(seed), STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return statistics.mean(losses[-LAST:])


def batches(seed: int) -> Any:
    """Tokens of which each has a few successors, with unequal odds."""
    random = np.random.default_rng(seed)
    successors = random.integers(0, CONFIG.vocab, (CONFIG.vocab, SUCCESSORS))
    odds = np.array([0.6, 0.2, 0.15, 0.05])
    while True:
        tokens = np.zeros((EXAMPLES, CONFIG.context + 1), np.int32)
        tokens[:, 0] = random.integers(0, CONFIG.vocab, EXAMPLES)
        for place in range(CONFIG.context):
            chosen = random.choice(SUCCESSORS, EXAMPLES, p=odds)
            tokens[:, place + 1] = successors[tokens[:, place], chosen]
        yield {"tokens": tokens}
