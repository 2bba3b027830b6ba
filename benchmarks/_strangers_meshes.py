"""Meshes and rules with lookups, on one to four axes: two steps of SGD against plain JAX on one
device.

The reference is `jax.value_and_grad` of the same formulas on one device and SGD with momentum in
NumPy; nothing of the library runs in it. Compared are the loss and the norm of the gradient of both
steps, and every parameter after them.

XLA's partitioner gives wrong numbers for some layouts, even of a product of two matrices
(`tests/test_jax_itself.py`). Where a step without manual axes differs from the reference, it is
also taken by plain `jax.jit` with arrays laid out likewise. If that gives the same wrong numbers,
the case counts as `compiler` and not as `silent`.
"""

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import shardlib as sl
from benchmarks._strangers import CompilerError, Outcome, Tally, fast_compiles, in_children, serve
from shardlib.layouts._resolve import resolve

DEVICES = 16
IN_ONE_CHILD = 25  # compiled programs are never given back
PATIENCE = 180.0
# Of the largest entry of what a step changes; float32 sums in another order are off by 1e-6.
TOLERANCE = 1e-4
ROWS, SEQ, WIDTH, HIDDEN, POSITIONS, EXPERTS = 32, 4, 16, 32, 16, 8
VOCABULARIES = (32, 32, 30, 48)  # 30 is divided by no axis of four
STEPS, RATE, MOMENTUM = 2, 0.5, 0.9

NAMES: dict[str, tuple[str, ...]] = {
    "table": ("vocab", "embed"),
    "positions": ("position", "embed"),
    "up": ("embed", "mlp"),
    "down": ("mlp", "embed"),
    "head": ("embed", "vocab"),
    "experts": ("experts", "embed", "mlp"),
    "blocks": ("layers", "embed", "mlp"),
    "blocks_down": ("layers", "mlp", "embed"),
}

Params = dict[str, Any]
Batch = dict[str, Any]
Mark = Callable[..., Any]


def embedded(p: Params, batch: Batch, mark: Mark) -> Any:
    """A row of the table for each token."""
    return mark(jnp.take(p["table"], batch["tokens"], axis=0), "batch", "residual_seq", "act_embed")


def mlp(p: Params, x: Any, mark: Mark) -> Any:
    """Two products with a residual around them."""
    h = mark(jax.nn.gelu(x @ p["up"]), "batch", "seq", "act_mlp")
    return mark(x + h @ p["down"], "batch", "residual_seq", "act_embed")


def chosen(logits: Any, batch: Batch) -> Any:
    """Minus the logarithm of what the targets are given, picked by index."""
    logs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(logs, batch["targets"][..., None], axis=-1))


def embedding(p: Params, batch: Batch, mark: Mark) -> Any:
    """A lookup in a table, and nothing that asks for the vocabulary."""
    return jnp.mean((mlp(p, embedded(p, batch, mark), mark) - batch["values"]) ** 2)


def take_along_axis(p: Params, batch: Batch, mark: Mark) -> Any:
    """A head with weights of its own, and the targets' logits by index."""
    x = mlp(p, embedded(p, batch, mark), mark)
    return chosen(mark(x @ p["head"], "batch", "seq", "act_vocab"), batch)


def tied(p: Params, batch: Batch, mark: Mark) -> Any:
    """The table is looked up in, and its transpose is the head."""
    x = mlp(p, embedded(p, batch, mark), mark)
    return chosen(mark(x @ p["table"].T, "batch", "seq", "act_vocab"), batch)


def one_hot(p: Params, batch: Batch, mark: Mark) -> Any:
    """No index: rows and targets by products with one-hot vectors."""
    size = p["table"].shape[0]
    x = mark(
        jax.nn.one_hot(batch["tokens"], size) @ p["table"], "batch", "residual_seq", "act_embed"
    )
    logits = mark(mlp(p, x, mark) @ p["head"], "batch", "seq", "act_vocab")
    return -jnp.mean(
        jnp.sum(jax.nn.one_hot(batch["targets"], size) * jax.nn.log_softmax(logits), -1)
    )


def scatter_add(p: Params, batch: Batch, mark: Mark) -> Any:
    """Each example's tokens add up in bins of its own, by index, and come back to their places."""
    x = embedded(p, batch, mark)
    bins = jnp.zeros((x.shape[0], POSITIONS, WIDTH), x.dtype)
    rows = jnp.arange(x.shape[0])[:, None]
    bins = mark(bins.at[rows, batch["tokens"] % POSITIONS].add(x), "batch", None, "act_embed")
    return jnp.mean((mlp(p, bins[rows, batch["targets"] % POSITIONS], mark) - batch["values"]) ** 2)


def dynamic_slice(p: Params, batch: Batch, mark: Mark) -> Any:
    """Positions from a table, at a place for all and at a place of each example's own."""
    shared = jax.lax.dynamic_slice_in_dim(p["positions"], jnp.int32(3), SEQ)
    own = jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(p["positions"], start, SEQ))(
        batch["starts"]
    )
    x = mark(embedded(p, batch, mark) + shared + own, "batch", "residual_seq", "act_embed")
    return jnp.mean((mlp(p, x, mark) - batch["values"]) ** 2)


def rows(p: Params, batch: Batch, mark: Mark) -> Any:
    """One place of each example, and rows of a weight in another order."""
    x = embedded(p, batch, mark)
    last = x[jnp.arange(x.shape[0]), batch["starts"] % SEQ]
    order = np.random.default_rng(5).permutation(HIDDEN)
    h = mark(jax.nn.gelu(last @ p["up"])[:, order], "batch", "act_mlp")
    return jnp.mean((h @ p["down"][order] - batch["values"][:, 0]) ** 2)


def table_of_matrices(p: Params, batch: Batch, mark: Mark) -> Any:
    """Each example is multiplied by a matrix of its own choice."""
    x = embedded(p, batch, mark)
    h = jax.nn.gelu(jnp.einsum("bse,bem->bsm", x, p["experts"][batch["starts"] % EXPERTS]))
    return jnp.mean((mark(h, "batch", "seq", "act_mlp") @ p["down"] - batch["values"]) ** 2)


def scanned(p: Params, batch: Batch, mark: Mark) -> Any:
    """Stacked layers in a loop behind a lookup."""

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        up, down = weights
        h = mark(jax.nn.gelu(x @ up), "batch", "seq", "act_mlp")
        return mark(x + h @ down, "batch", "residual_seq", "act_embed"), None

    x, _ = jax.lax.scan(layer, embedded(p, batch, mark), (p["blocks"], p["blocks_down"]))
    return chosen(mark(x @ p["table"].T, "batch", "seq", "act_vocab"), batch)


def without_names(p: Params, batch: Batch, mark: Mark) -> Any:
    """A tied model whose activations have no names: the partitioner is left alone with it."""
    return tied(p, batch, unmarked)


MODELS: dict[Callable[[Params, Batch, Mark], Any], tuple[str, ...]] = {
    embedding: ("table", "up", "down"),
    take_along_axis: ("table", "up", "down", "head"),
    tied: ("table", "up", "down"),
    one_hot: ("table", "up", "down", "head"),
    scatter_add: ("table", "up", "down"),
    dynamic_slice: ("table", "positions", "up", "down"),
    rows: ("table", "up", "down"),
    table_of_matrices: ("table", "experts", "down"),
    scanned: ("table", "blocks", "blocks_down"),
    without_names: ("table", "up", "down"),
}
BY_NAME = {model.__name__: model for model in MODELS}

# United from left to right, as the documentation unites them.
PRESETS = (
    ("data",),
    ("fsdp",),
    ("data", "tensor"),
    ("data", "tensor_sequence"),
    ("data", "fsdp"),
    ("fsdp", "tensor"),
    ("data", "fsdp", "tensor"),
    ("data", "fsdp", "tensor_sequence"),
    ("experts",),
    ("data", "experts", "tensor"),
    ("data", "fsdp", "tensor", "experts"),
)
WEIGHT_NAMES = ("vocab", "embed", "mlp", "position", "experts")
ACTIVATION_NAMES = ("seq", "residual_seq", "act_embed", "act_mlp", "act_vocab")
AXES: tuple[str, ...] = ("data", "fsdp", "model", "pod", "x")


@dataclass(frozen=True)
class Case:
    """A model on a mesh under rules."""

    model: str
    vocab: int
    mesh: str
    rules: str
    zero: int
    accumulate: int
    manual: bool  # False: `Strategy(manual=())`

    def __str__(self) -> str:
        manual = "" if self.manual else ", manual=()"
        return (
            f"{self.model} with {self.vocab} tokens on {self.mesh}, zero={self.zero}, "
            f"accumulate={self.accumulate}{manual}, rules {self.rules}"
        )


def draw(seed: int, number: int) -> Case:
    """A case, from the seed and its number alone.

    >>> draw(0, 5) == draw(0, 5)
    True
    """
    choose = random.Random(f"{seed} {number}")
    if choose.random() < 0.5:
        presets = choose.choice(PRESETS)
        rules, axes = " | ".join(presets), list(united(" | ".join(presets)).axes)
    else:
        axes = choose.sample(AXES, choose.choice((1, 2, 2, 3, 3, 4)))
        rules = drawn_rules(choose, axes)
    while True:
        sizes = [choose.choice((1, 2, 2, 4)) for _ in axes]
        most = DEVICES if len(axes) == 4 else DEVICES // 2
        if 1 < np.prod(sizes) <= most:
            break
    choose.shuffle(axes)
    return Case(
        model=choose.choice(tuple(BY_NAME)),
        vocab=choose.choice(VOCABULARIES),
        mesh=",".join(f"{axis}={size}" for axis, size in zip(axes, sizes, strict=True)),
        rules=rules,
        zero=choose.choice((0, 0, 1, 2, 3)),
        accumulate=choose.choice((1, 1, 2)),
        manual=choose.random() < 0.9,
    )


def drawn_rules(choose: random.Random, axes: list[str]) -> str:
    """Rules over these axes, as keyword arguments: the batch has one at least, and weights and
    activations what comes.
    """

    def some(most: int) -> Any:
        count = choose.choice((0, 1, 1, 2)[: most + 2])
        taken = choose.sample(axes, min(count, len(axes)))
        return None if not taken else taken[0] if len(taken) == 1 else tuple(taken)

    of_batch = choose.sample(axes, choose.choice((1, 1, 2)) if len(axes) > 1 else 1)
    chosen: dict[str, Any] = {"batch": tuple(of_batch)}
    chosen |= {name: some(2) for name in WEIGHT_NAMES if choose.random() < 0.6}
    chosen |= {name: some(1) for name in ACTIVATION_NAMES if choose.random() < 0.4}
    return ", ".join(f"{name}={value!r}" for name, value in chosen.items())


def united(text: str) -> sl.AxisRules:
    """Rules from the text of a case: names of presets, or keyword arguments."""
    if "=" in text:
        return sl.rules.vocabulary | eval(f"AxisRules({text})", {"AxisRules": sl.AxisRules})
    rules = sl.rules.vocabulary
    for preset in text.split(" | "):
        rules = rules | getattr(sl.rules, preset)
    return rules


def unmarked(x: Any, *names: Any) -> Any:
    """What stands for `sl.shard` in the reference."""
    return x


@functools.cache
def problem(model: str, vocab: int) -> tuple[Params, Batch]:
    """Parameters and a batch, as NumPy arrays."""
    shapes = {
        "table": (vocab, WIDTH),
        "positions": (POSITIONS, WIDTH),
        "up": (WIDTH, HIDDEN),
        "down": (HIDDEN, WIDTH),
        "head": (WIDTH, vocab),
        "experts": (EXPERTS, WIDTH, HIDDEN),
        "blocks": (2, WIDTH, HIDDEN),
        "blocks_down": (2, HIDDEN, WIDTH),
    }
    draws = np.random.default_rng(7)
    params = {
        name: (draws.normal(size=shapes[name]) / np.sqrt(shapes[name][-2])).astype("f")
        for name in MODELS[BY_NAME[model]]
    }
    batch = {
        "tokens": draws.integers(0, vocab, (ROWS, SEQ), dtype="i4"),
        "targets": draws.integers(0, vocab, (ROWS, SEQ), dtype="i4"),
        "starts": draws.integers(0, POSITIONS - SEQ, (ROWS,), dtype="i4"),
        "values": draws.normal(size=(ROWS, SEQ, WIDTH)).astype("f"),
    }
    return params, batch


class Taken(NamedTuple):
    """What some steps gave."""

    metrics: list[dict[str, float]]  # of each step the loss and the norm of the gradient
    params: Params


@functools.cache
def reference(model: str, vocab: int) -> Taken:
    """All steps on one device, by plain JAX and NumPy."""
    params, batch = problem(model, vocab)
    formula = BY_NAME[model]
    # On the first device, the default.
    gradient = jax.jit(jax.value_and_grad(lambda p: formula(p, batch, unmarked)))
    return descend(gradient, params)


def descend(gradient: Callable[[Params], Any], start: Params) -> Taken:
    """Gradient descent with momentum, in NumPy."""
    params = {name: value.astype("f8") for name, value in start.items()}
    momentum = {name: np.zeros_like(value) for name, value in params.items()}
    metrics = []
    for _ in range(STEPS):
        loss, gradients = gradient({name: value.astype("f") for name, value in params.items()})
        squares = 0.0
        for name, of_one in gradients.items():
            wide = np.asarray(of_one, "f8")
            squares += float(np.sum(wide**2))
            momentum[name] = MOMENTUM * momentum[name] + wide
            params[name] = params[name] - RATE * momentum[name]
        metrics.append({"loss": float(loss), "grad_norm": squares**0.5})
    return Taken(metrics, params)


def by_plain_jit(case: Case, strategy: sl.Strategy, state: sl.State) -> Taken:
    """All steps by `jax.jit` and NumPy, with parameters, examples and activations laid out as a
    strategy says.
    """
    params, batch = problem(case.model, case.vocab)
    formula, rules, mesh = BY_NAME[case.model], strategy.rules, strategy.device_mesh

    def mark(x: Any, *names: Any) -> Any:
        spec = resolve(rules, mesh.shape, names, x.shape).spec
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    laid_out = {name: leaf.sharding for name, leaf in state.params.items()}
    examples = NamedSharding(mesh, PartitionSpec(strategy.batch_axes or None))
    whole = NamedSharding(mesh, PartitionSpec())
    gradient = jax.jit(
        jax.value_and_grad(lambda p, batch: formula(p, batch, mark)),
        in_shardings=(laid_out, examples),
        out_shardings=(whole, laid_out),
    )
    return descend(lambda p: gradient(p, batch), params)


def difference(found: Taken, expected: Taken, start: Params) -> str:
    """The first difference between what steps gave, or an empty text."""
    for number, (told, numbers) in enumerate(
        zip(found.metrics, expected.metrics, strict=True), start=1
    ):
        for name, value in numbers.items():
            if not abs(told[name] - value) <= TOLERANCE * abs(value):
                return f"{name} of step {number} is {told[name]:.6g}, and {value:.6g} on one device"
    for name, value in expected.params.items():
        changed = float(np.max(np.abs(value - start[name])))
        off = float(np.max(np.abs(found.params[name] - value)))
        if not off <= TOLERANCE * changed + 1e-6:
            return (
                f"`{name}` is off by {off:.3g} where the steps changed it by {changed:.3g} at most"
            )
    return ""


def attempt(case: Case) -> str:
    """Take the steps as a stranger would; the first difference from the reference, or an empty
    text.
    """
    params, batch = problem(case.model, case.vocab)
    formula = BY_NAME[case.model]
    sizes = [int(part.partition("=")[2]) for part in case.mesh.split(",")]
    mesh = sl.make_mesh(case.mesh, devices=jax.devices()[: int(np.prod(sizes))])
    options: dict[str, Any] = {} if case.manual else {"manual": ()}
    zero = sl.Zero(case.zero, small=0) if case.zero else 0
    strategy = sl.Strategy(
        mesh=mesh, rules=united(case.rules), zero=zero, accumulate=case.accumulate, **options
    )
    optimizer = optax.sgd(RATE, momentum=MOMENTUM)
    state = sl.init(
        lambda: sl.annotate(dict(params), {name: NAMES[name] for name in params}),
        optimizer,
        strategy,
    )
    step = sl.train_step(lambda p, given, rng: formula(p, given, sl.shard), strategy)
    metrics = []
    for _ in range(STEPS):
        state, told = step(state, batch)
        metrics.append({name: float(told[name]) for name in ("loss", "grad_norm")})
    found = Taken(metrics, {name: np.asarray(leaf, "f8") for name, leaf in state.params.items()})
    different = difference(found, reference(case.model, case.vocab), params)
    if (
        different
        and not strategy.manual_axes
        and not difference(found, by_plain_jit(case, strategy, state), params)
    ):
        raise CompilerError(different)
    return different


def run(count: int, seed: int) -> Outcome:
    """Draw cases until `count` have run, or four times as many were drawn."""
    tally, first = Tally("meshes", count), 0
    while tally.total.ran < count and tally.total.drawn < 4 * count:
        last = first + min(IN_ONE_CHILD, count)
        for outcome in in_children(
            "benchmarks._strangers_meshes", seed, first, last, fast_compiles(DEVICES), PATIENCE
        ):
            tally.add(outcome)
        first = last
    return tally.total


if __name__ == "__main__":
    serve(draw, attempt)
