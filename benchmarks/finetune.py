"""What fine-tuning learns, beside a plain loop, and whether others read the result.

A small Llama learns the source of Python and is written as published models are. Then it is read
again and learns prose, the docs of this repository: all of it, and by factors of LoRA. That is done
twice, by `sl.train_step` on eight simulated devices with ZeRO's stage 3 and tensor parallelism, and
by a plain loop of JAX and optax on one device, where a kernel with factors is `kernel + up down`.

- `loss_ratio`: the larger loss on held-out prose over the smaller, of the two ways; the worst.
- `losses`: before, after all parameters have learned, and after factors have.
- `learned_share`: how many numbers learn with LoRA, of all.
- `worst_logit_error`: of what is exported, read by transformers, by absolute value. It needs
  PyTorch and transformers, and is left out without.

    python -m benchmarks.finetune --json
"""

import argparse
import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import shardlib as sl
from benchmarks._report import report
from examples.quickstart import corpus
from models import gpt, hub

BOUNDS = {"loss_ratio": 1.01, "worst_logit_error": 1e-4}
CONFIG = gpt.GPTConfig(
    layers=2,
    width=64,
    heads=4,
    kv_heads=2,
    hidden=128,
    context=64,
    vocab=256,
    norm="rms",
    positions="rotary",
    mlp="swiglu",
    bias=False,
    tied=False,
)
BATCH, FIRST, STEPS, RANK, MEASURED = 32, 400, 200, 8, 20
RATES = {"whole": 1e-3, "lora": 5e-3}
MESH, RULES = "data=4,model=2", sl.rules.data | sl.rules.tensor


def prose() -> np.ndarray:
    """The docs of this repository, as bytes."""
    files = sorted((Path(__file__).parent.parent / "docs").rglob("*.md"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def batches(text: np.ndarray, seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Random windows of a text."""
    random, length = np.random.default_rng(seed), CONFIG.context + 1
    while True:
        starts = random.integers(0, len(text) - length, BATCH)
        yield {"tokens": np.stack([text[s : s + length] for s in starts]).astype(np.int32)}


def optimizer(kind: str) -> optax.GradientTransformation:
    """The same for both ways."""
    rate = optax.warmup_cosine_decay_schedule(0.0, RATES[kind], STEPS // 10, STEPS)
    return optax.adamw(rate, weight_decay=0.0)


def publish(folder: Path) -> None:
    """Train a model, and write it as published ones are."""
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    model = lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0))  # noqa: E731
    state = sl.init(model, optax.adamw(3e-3), strategy)
    state = trained(state, strategy, batches(corpus(), 0), FIRST)
    export(folder, state)


def trained(state: Any, strategy: sl.Strategy, source: Any, steps: int) -> Any:
    """A state after so many steps."""
    step = sl.train_step(gpt.loss, strategy)
    for _ in range(steps):
        state, metrics = step(state, next(source))
        jax.block_until_ready(metrics)
    return state


def export(folder: Path, parameters: Any) -> None:
    """Write a model with its configuration."""
    sl.weights.save(folder, parameters, hub.table(CONFIG))
    (folder / "config.json").write_text(json.dumps(hub.description(CONFIG)))


def start(kind: str, published: Path, strategy: sl.Strategy) -> Any:
    """The state with which fine-tuning begins."""

    def make() -> gpt.GPT:
        model = hub.model(hub.config(published), nnx.Rngs(1))
        return sl.lora.add(model, RANK, rngs=nnx.Rngs(2)) if kind == "lora" else model

    keep = (sl.lora.PARAMETERS,) if kind == "lora" else ()
    state = sl.init(make, optimizer(kind), strategy)
    return sl.weights.load(published, state, hub.table(CONFIG), keep=keep)


def by_step(kind: str, published: Path, text: np.ndarray) -> tuple[dict[Any, Any], Any, int]:
    """The weights before, with factors apart; the model that was tuned; and how many numbers
    learn.
    """
    strategy = sl.Strategy(
        mesh=MESH,
        rules=RULES,
        zero=sl.Zero(3, small=0),
        frozen=sl.lora.FROZEN if kind == "lora" else (),
    )
    state = start(kind, published, strategy)
    before = flatten_dict(jax.device_get(state.weights))
    learning = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    state = trained(state, strategy, batches(text, 1), STEPS)
    model = sl.lora.merged(state.model) if kind == "lora" else state.model
    return before, model, learning


def by_plain_loop(kind: str, before: dict[Any, Any], text: np.ndarray) -> Any:
    """The weights after as many steps, by JAX and optax alone."""
    before = {path: jnp.asarray(x) for path, x in before.items()}
    is_factor = {path: "adapter" in path for path in before}
    learning = {path: x for path, x in before.items() if is_factor[path] or kind == "whole"}
    fixed = {path: x for path, x in before.items() if path not in learning}

    def whole(learned: dict[Any, Any]) -> Any:
        """The weights of the model without factors."""
        weights = {**fixed, **learned}
        kernels = {path: x for path, x in weights.items() if not is_factor[path]}
        for path in list(kernels):
            if (up := (*path[:-1], "adapter", "up")) in weights:
                down = weights[(*path[:-1], "adapter", "down")]
                product = jax.vmap(lambda u, d: jnp.tensordot(u, d, (-1, 0)))(weights[up], down)
                kernels[path] = kernels[path] + product
        return unflatten_dict(kernels)

    def loss(learned: dict[Any, Any], batch: Any) -> jax.Array:
        return loss_of(whole(learned), batch)

    update = optimizer(kind)

    @jax.jit
    def step(learned: Any, opt_state: Any, batch: Any) -> Any:
        gradients = jax.grad(loss)(learned, batch)
        updates, opt_state = update.update(gradients, opt_state, learned)
        return optax.apply_updates(learned, updates), opt_state

    opt_state, source = update.init(learning), batches(text, 1)
    for _ in range(STEPS):
        learning, opt_state = step(learning, opt_state, next(source))
    return whole(learning)


def loss_of(weights: Any, batch: Any) -> jax.Array:
    """The loss of plain weights, on one device."""
    with sl.unsharded():
        graph = nnx.graphdef(nnx.eval_shape(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0))))
        mean = gpt.loss(nnx.merge(graph, weights), batch)
    return mean.total / mean.weight


def measured(weights: Any, text: np.ndarray) -> float:
    """The mean loss on what was held out."""
    source, loss = batches(text, 2), jax.jit(loss_of)
    return float(np.mean([loss(weights, next(source)) for _ in range(MEASURED)]))


def logit_error(folder: Path, weights: Any) -> float:
    """How far transformers' logits of exported files are from ours."""
    torch, transformers = map(importlib.import_module, ("torch", "transformers"))
    tokens = next(batches(prose(), 3))["tokens"][:, :-1]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)).logits.numpy()
    with sl.unsharded(), jax.default_matmul_precision("highest"):
        graph = nnx.graphdef(nnx.eval_shape(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0))))
        on_device = jax.tree.map(jnp.asarray, weights)
        ours = nnx.merge(graph, on_device)(jnp.asarray(tokens))
    return float(np.abs(ours - theirs).max())


def main() -> None:
    """Measure, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    arguments = parser.parse_args()
    sl.simulate_devices(8)
    text = prose()
    held_out, text = text[: len(text) // 10], text[len(text) // 10 :]
    losses: dict[str, float] = {}
    ratios, errors, share = [], [], 0.0
    has_transformers = importlib.util.find_spec("transformers") is not None
    with tempfile.TemporaryDirectory() as folder:
        published = Path(folder, "published")
        publish(published)
        for kind in RATES:
            before, model, learning = by_step(kind, published, text)
            kernels = {path: x for path, x in before.items() if "adapter" not in path}
            losses["before"] = measured(unflatten_dict(kernels), held_out)
            share = learning / sum(x.size for x in kernels.values())
            ours = jax.device_get(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
            plain = by_plain_loop(kind, before, text)
            pair = [measured(weights, held_out) for weights in (ours, plain)]
            losses[kind], losses[f"{kind}, plain loop"] = pair
            ratios.append(max(pair) / min(pair))
            export(Path(folder, kind), model)
            if has_transformers:
                errors.append(logit_error(Path(folder, kind), ours))
    figures: dict[str, Any] = {
        "loss_ratio": max(ratios),
        "losses": {name: round(loss, 4) for name, loss in losses.items()},
        "learned_share": share,
    }
    if errors:
        figures["worst_logit_error"] = max(errors)
    bounds = {name: bound for name, bound in BOUNDS.items() if name in figures}
    report("finetune", figures, bounds, arguments.json)


if __name__ == "__main__":
    main()
