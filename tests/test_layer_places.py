"""Optimizers to which it matters which layer a row is, where layers are stored in another order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib import pipeline
from shardlib.step import _layer_places

LAYERS, WIDTH = 4, 8
INTERLEAVED = pipeline.Interleaved(2, 4)
RULES = sl.rules.data | sl.rules.pipeline | sl.AxisRules(embed=None, mlp=None)


def weights(width=WIDTH):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "table": jax.random.normal(keys[0], (2 * width, width)),
        "up": jax.random.normal(keys[1], (LAYERS, width, width)),
        "bias": jnp.ones((LAYERS, width)),
    }


NAMES = {"table": (None, "embed"), "up": ("layers", "embed", "mlp"), "bias": ("layers", "mlp")}


def strategy(schedule, **options):
    mesh = "stage=2,data=4" if schedule else "stage=1,data=8"
    return sl.Strategy(mesh=mesh, rules=RULES, pipeline=schedule, **options)


def start(optimizer, schedule=INTERLEAVED, width=WIDTH, **options):
    make = lambda: sl.annotate(weights(width), NAMES)
    return sl.init(make, optimizer, strategy(schedule, **options), abstract=True)


def stateless(update):
    """An optax transformation of each gradient and its parameter."""

    def of_tree(updates, state, params):
        return jax.tree.map(update, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), of_tree)


def by_layer(factors):
    """Updates times a factor for each layer."""

    def scaled(update, parameter):
        if len(update) != len(factors):
            return update
        return update * factors.reshape(-1, *[1] * (update.ndim - 1))

    return stateless(scaled)


def near(held):
    """Gradients that pull parameters to weights that are held."""

    def pulled(updates, state, params):
        return jax.tree.map(lambda u, p, h: u + 1e-3 * (p - h), updates, params, held), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), pulled)


RATES = by_layer(0.9 ** jnp.arange(LAYERS))
WARMED = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 1000, 10_000)
PLACED = {
    "rates": optax.chain(optax.sgd(0.1), RATES),
    "rates from zero": optax.chain(optax.adamw(WARMED), RATES),
    "rates of narrow moments": optax.chain(optax.adam(1e-3, mu_dtype=jnp.bfloat16), RATES),
    "mask": optax.chain(by_layer(jnp.arange(LAYERS) > 1), optax.adam(1e-3)),
    "held": optax.chain(near(weights()), optax.adam(1e-3)),
    "layers before": stateless(lambda update, _: jnp.cumsum(update, 0)),
}


@pytest.mark.parametrize("name", PLACED)
def test_an_optimizer_that_knows_a_layer_by_its_place_is_refused(name):
    with pytest.raises(ValueError) as error:
        start(PLACED[name])
    words = ["Interleaved(stages=2", "init(optimizer=...)", "layer 1 of `", "Eager1F1B(2, 4)"]
    assert all(word in str(error.value) for word in words), error.value
    # In the model's order it is as good as any.
    start(PLACED[name], pipeline.Eager1F1B(2, 4))
    start(PLACED[name], None)


@pytest.mark.parametrize("schedule", [pipeline.ZBV(2, 4), pipeline.DualPipeV(2, 4)], ids=str)
def test_clipping_that_knows_a_layer_by_its_place_is_refused(schedule):
    with pytest.raises(ValueError, match=r"Strategy\(clip=\.\.\.\).*layer 1 of `bias`"):
        start(optax.sgd(0.1), schedule, clip=RATES)
    start(optax.sgd(0.1), schedule, clip=optax.adaptive_grad_clip(0.1))


def test_weights_on_the_mesh_that_an_optimizer_holds_are_seen():
    state = sl.init(weights, optax.sgd(0.1), strategy(None))
    assert len(state.weights["up"].sharding.device_set) == 8
    with pytest.raises(ValueError, match="layer 1 of `up`"):
        start(near(state.weights))


def test_a_large_model_is_tried_small():
    # One of these arrays would take 16 GiB.
    with pytest.raises(ValueError, match="layer 1 of `bias`"):
        start(PLACED["rates"], width=2**15)
    start(optax.sgd(0.1), width=2**15)
    # What holds arrays of such shapes cannot be tried.
    held = jax.tree.map(lambda x: np.broadcast_to(np.float32(1), x.shape), weights())
    start(near(held), width=2**15)


def test_each_of_two_loops_has_its_own_order():
    names = {"up": ("encoder_layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}
    both = {"up": jnp.ones((4, 4, 4)), "down": jnp.ones((4, 4, 4))}

    def only(path):
        decaying = {name: (0.9 ** jnp.arange(4) if name == path else jnp.ones(4)) for name in both}
        return optax.GradientTransformation(
            lambda params: optax.EmptyState(),
            lambda u, s, p: (jax.tree.map(lambda u, f: u * f[:, None, None], u, decaying), s),
        )

    options = strategy(pipeline.Interleaved(2, 4, chunks=4))
    make = lambda: sl.annotate(both, names)
    for path in both:
        with pytest.raises(ValueError, match=f"layer 1 of `{path}`"):
            sl.init(make, only(path), options, abstract=True)
    sl.init(make, optax.adam(1e-3), options, abstract=True)


def printing(update, _):
    jax.debug.print("{}", update.sum())
    return update


def failing(update, _):
    raise KeyError("unheard of")


def narrow(update, _):
    return update.astype(jnp.bfloat16)


def in_blocks(update, _):
    """Codes of 8 bits for blocks of a parameter, which are not the blocks of its layers."""
    size = update.size
    blocks = jnp.pad(update.ravel(), (0, -size % 12)).reshape(-1, 12)
    scales = jnp.max(jnp.abs(blocks), 1, keepdims=True) / 127
    codes = jnp.round(blocks / scales).astype(jnp.int8)
    return (codes * scales).ravel()[:size].reshape(update.shape)


ALIKE = {
    "adamw": optax.adamw(WARMED, weight_decay=0.1),
    "narrow moments": optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(1e-3, mu_dtype=jnp.bfloat16)
    ),
    "norms of stacks": optax.lamb(1e-3),
    "norms of layers": sl.optimizers.per_layer_and_expert(
        optax.lamb(1e-3), lambda path, _: 0 if path == "table" else 1
    ),
    # Of `bias` they factor, and make orthogonal, matrices of which layers are the rows.
    "factored": optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "orthogonal": optax.contrib.muon(1e-3),
    "orthogonal in bfloat16": optax.chain(stateless(narrow), optax.contrib.muon(1e-3)),
    "signs": optax.lion(1e-3),
    "maxima": optax.sm3(0.1),
    "by distance": optax.contrib.prodigy(1.0),
    "averages": optax.contrib.schedule_free_adamw(1e-3),
    "the loss": optax.polyak_sgd(),
    "codes": optax.chain(stateless(in_blocks), optax.sgd(0.1)),
    "noise": optax.noisy_sgd(0.1, eta=0.1, key=3),
}


@pytest.mark.long(*[name for name in ALIKE if name not in ("narrow moments", "factored", "noise")])
@pytest.mark.parametrize("name", ALIKE)
def test_an_optimizer_that_treats_layers_alike_is_taken(name, monkeypatch):
    tried = []
    misplaced = _layer_places._Trial.misplaced

    def seen(trial):
        found = misplaced(trial)
        tried.append(found)
        return found

    monkeypatch.setattr(_layer_places._Trial, "misplaced", seen)
    start(ALIKE[name])
    # It was not taken for failing.
    assert tried == [None]


@pytest.mark.parametrize("update", [printing, failing])
def test_an_optimizer_that_cannot_be_tried_is_taken(update, capfd):
    start(optax.chain(stateless(update), RATES))
    assert capfd.readouterr().out == ""
