"""ZeRO: what is split, and that it is one device's step; precision, clipping, frozen parameters, what is not finite."""

import dataclasses
import re
from functools import cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from test_relate import UNTRAINABLE, public_optimizers, updated

import shardlib as sl
from shardlib import testing
from shardlib._relate import relate
from shardlib._tree import named_leaves
from shardlib._zero import split_further

DATA = sl.AxisRules(batch="data", layers=None, embed=None, mlp=None)
RULES = sl.AxisRules(batch="data", layers=None, vocab="model", embed=None, mlp="model")
RANDOM = np.random.RandomState(0)
TOKENS = {
    "tokens": RANDOM.randint(0, 40, (16, 4)).astype(np.int32),
    "labels": RANDOM.randint(0, 40, (16, 4)).astype(np.int32),
    "mask": (RANDOM.rand(16, 4) > 0.6).astype(np.float32),  # very unevenly many tokens per device
}
X = RANDOM.randn(16, 16).astype(np.float32)


def normal(number, *shape):
    return jnp.asarray(0.3 * np.random.RandomState(number).randn(*shape), jnp.float32)


def decoder():
    layers = {"up": normal(0, 2, 16, 32), "up_bias": normal(1, 2, 32), "down": normal(2, 2, 32, 16)}
    return sl.annotate(
        {"embedding": normal(3, 40, 16), "norm": jnp.ones(16), "bias": normal(4, 40), "layers": layers},
        {
            "embedding": ("vocab", "embed"),
            "norm": ("embed",),
            "bias": ("vocab",),
            "layers/up": ("layers", "embed", "mlp"),
            "layers/up_bias": ("layers", "mlp"),
            "layers/down": ("layers", "mlp", "embed"),
        },
    )


@sl.remat
def layer(x, w, key):
    hidden = jax.nn.gelu(x @ w["up"] + w["up_bias"])
    kept = jax.random.bernoulli(key, 0.8, hidden.shape)
    return x + jnp.where(kept, hidden / 0.8, 0) @ w["down"]


def next_token(model, batch, rng):
    def body(x, scanned):
        w, i = scanned
        return layer(x, w, jax.random.fold_in(rng, i)), None

    x, _ = lax.scan(body, model["embedding"].at[batch["tokens"]].get(), (model["layers"], jnp.arange(2)))
    logits = (x * model["norm"]) @ model["embedding"].T + model["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return sl.mean(jnp.sum(losses * batch["mask"]), batch["mask"].sum())


@pytest.mark.parametrize(("stage", "remat"), [(1, "none"), (2, "none"), (3, "none"), (3, "full")])
def test_every_stage_is_one_device(stage, remat):
    compared = testing.check_step(
        decoder, optax.sgd(0.1, momentum=0.9), next_token, TOKENS, RULES, zero=sl.Zero(stage, small=0), remat=remat,
        meshes=["data=8,model=1", "data=4,model=2"], accumulate=(1, 2),
    )  # fmt: skip
    assert all(comparison.randomness == 0 for comparison in compared)


def side_by_side(optimizers):
    """Each for its own part of the parameters, in one program."""

    def update(gradients, state, params, *, value):
        both = {n: updated(o, params[n], gradients[n], state[n], value) for n, o in optimizers.items()}
        return tuple({name: of[k] for name, of in both.items()} for k in (0, 1))

    return optax.GradientTransformationExtraArgs(lambda params: {n: o.init(params[n]) for n, o in optimizers.items()}, update)


OPTIMIZERS = {
    "adam": optax.adam(3e-3),
    "adafactor": optax.adafactor(3e-3, min_dim_size_to_factor=4),
    "lamb": optax.lamb(3e-3),
    "lion": optax.lion(1e-3),
    "sm3": optax.sm3(3e-2),
    "muon": optax.contrib.muon(3e-3),
    "ademamix": optax.contrib.ademamix(3e-3),
}
TEACHER = np.tanh(RANDOM.randn(64, 8) @ RANDOM.randn(8, 8)).astype(np.float32)


@cache
def curves(stage):
    def one():
        return {
            "in": normal(0, 8, 16), "bias": normal(1, 16), "layers": normal(2, 2, 16, 16), "out": normal(3, 16, 8),
        }  # fmt: skip

    def make():
        return sl.annotate({name: one() for name in OPTIMIZERS}, {".*/layers": ("layers", "embed", "mlp")})

    def loss(model, batch, rng):
        def error(w):
            x = jnp.tanh(batch["x"] @ w["in"] + w["bias"])
            x, _ = lax.scan(lambda x, layer: (x + jnp.tanh(x @ layer), None), x, w["layers"])
            return jnp.mean((x @ w["out"] - batch["y"]) ** 2)

        errors = {name: error(w) for name, w in model.items()}
        return sum(errors.values()), errors

    mesh = sl.make_mesh("data=8") if stage else sl.make_mesh("data=1", devices=jax.devices()[:1])
    strategy = sl.Strategy(mesh=mesh, rules=DATA, zero=sl.Zero(stage, small=0))
    state, step = sl.init(make, side_by_side(OPTIMIZERS), strategy), sl.train_step(loss, strategy)
    batch = {"x": np.random.RandomState(1).randn(64, 8).astype(np.float32), "y": TEACHER}
    found = []
    for _ in range(50):
        state, metrics = step(state, batch)
        found.append({name: float(metrics[name]) for name in OPTIMIZERS})
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_curves_are_one_devices(optimizer, stage):
    ours, theirs = ([losses[optimizer] for losses in curves(of)] for of in (stage, 0))
    assert theirs[-1] < 0.9 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


# What cannot take these parameters, and why.
CANNOT: dict[str, str] = {}
TRAINABLE = {n: o for n, o in public_optimizers().items() if n not in UNTRAINABLE and n not in CANNOT}
SHAPES = {"w": (16, 8), "square": (16, 16), "b": (8,)}
AT_ONCE = 20
# Of whole numbers, whose means are exact in any order, so that no optimizer can amplify their rounding.
GRADIENTS = [
    {
        name: (RANDOM.randint(1, 9, (16, *shape)) * RANDOM.choice([-1, 1], shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }
    for _ in range(2)
]


def linear(model, batch, rng):
    means = {name: jnp.mean(gradients, 0) for name, gradients in batch.items()}
    return sum(jnp.sum(w[name] * mean) for w in model.values() for name, mean in means.items())


def start():
    return {name: normal(number, *shape) for number, (name, shape) in enumerate(SHAPES.items())}


@cache
def moved(group):
    """The state after two steps, and what one device makes of the parameters, for a few optimizers at once."""
    optimizers = dict(list(TRAINABLE.items())[group * AT_ONCE : (group + 1) * AT_ONCE])
    together = side_by_side(optimizers)
    make = lambda: {name: start() for name in optimizers}
    strategy = sl.Strategy(mesh="data=8", rules=DATA, zero=sl.Zero(1, small=0))
    state, step = sl.init(make, together, strategy), sl.train_step(linear, strategy)

    @jax.jit
    def alone(params, opt_state, batch):
        value, gradients = jax.value_and_grad(linear)(params, batch, None)
        updates, opt_state = together.update(gradients, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = make(), together.init(make())
    for batch in GRADIENTS:
        state, _ = step(state, batch)
        params, opt_state = alone(params, opt_state, batch)
    return state, params


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_optimizer_moves_split_parameters_as_one_device(name):
    state, expected = moved(list(TRAINABLE).index(name) // AT_ONCE)
    for path, theirs in expected[name].items():
        ours, scale = state.params[name][path], np.abs(theirs).max()
        assert ours.sharding.shard_shape(ours.shape) < ours.shape
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale)
    opt_state = dict(named_leaves(state.opt_state[name]))
    for path, relation in relate(TRAINABLE[name].init, start()).items():
        if relation.kind == "same":
            leaf, parameter = opt_state[path], state.params[name][relation.parameter]
            assert leaf.sharding.shard_shape(leaf.shape) == parameter.sharding.shard_shape(parameter.shape)
