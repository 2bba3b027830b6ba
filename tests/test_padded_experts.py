"""Experts that an axis does not divide: the weights have more, which nobody chooses."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_dropless import RULES, TENSOR, X, assert_near, drawn, experts, mesh_of, with_gradients

import shardlib as sl
from models import moe as decoder
from shardlib.experts import ExpertChoice, TopK, dropless, moe

COUNT, STORED, WIDTH, HIDDEN = 6, 8, X.shape[-1], 16
GATE = drawn(WIDTH, COUNT, seed=4)
WEIGHTS = {
    "up": drawn(STORED, WIDTH, HIDDEN, seed=1),
    "gate": drawn(STORED, WIDTH, HIDDEN, seed=2),
    "down": drawn(STORED, HIDDEN, WIDTH, seed=3),
}
OWN = {name: weight[:COUNT] for name, weight in WEIGHTS.items()}


def in_places(weights, x):
    h = jax.nn.silu(jnp.einsum("enk,ekl->enl", x, weights["gate"]))
    h = h * jnp.einsum("enk,ekl->enl", x, weights["up"])
    return jnp.einsum("enk,ekl->enl", h, weights["down"])


def dropping_nothing(x, gate, weights, **options):
    return dropless(x, TopK(2), experts, gate=gate, weights=weights, **options)


def with_places(form, x, gate, weights, **options):
    router = TopK(2, capacity=1.0)
    return moe(x, router, in_places, gate=gate, weights=weights, form=form, **options)


def choosing(x, gate, weights, **options):
    router = ExpertChoice(1.0)
    return moe(x, router, in_places, gate=gate, weights=weights, causal=False, **options)


LAYERS = {
    "dropless": dropping_nothing,
    "scatter": partial(with_places, "scatter"),
    "einsum": partial(with_places, "einsum"),
    "expert choice": choosing,
}


@pytest.mark.parametrize(("text", "rules"), [("data=4", RULES), ("data=4,model=2", TENSOR)])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.representative("dropless-data=4,model=2-rules1", "scatter-data=4-rules0")
@pytest.mark.long
@pytest.mark.sentinel("expert choice-data=4-rules0")
def test_more_weights_than_experts_change_nothing(name, text, rules):
    layer = LAYERS[name]
    with sl.unsharded():
        y, of_own = jax.jit(partial(with_gradients, lambda *a: layer(*a)[0]))(X, GATE, OWN)
    with sl.use(rules, mesh_of(text)):
        padded = partial(layer, padded_to=STORED)
        found, gradients = jax.jit(partial(with_gradients, lambda *a: padded(*a)[0]))(
            X, GATE, WEIGHTS
        )
        _, stats = jax.jit(padded)(X, GATE, WEIGHTS)
    assert stats.load.total.shape == (COUNT,)
    assert_near(found, y)
    assert_near(gradients[:2], of_own[:2])
    for own, of_all in zip(jax.tree.leaves(of_own[2]), jax.tree.leaves(gradients[2]), strict=True):
        assert_near(of_all[:COUNT], own)
        assert not np.any(of_all[COUNT:])


@pytest.mark.long
def test_a_model_of_experts_that_the_axis_does_not_divide_trains():
    config = decoder.tiny(experts=6, padded_to=8)
    batch = {"tokens": np.random.default_rng(1).integers(0, config.vocab, (8, 17))}
    losses = []
    for mesh in ("data=1", "data=4,model=2"):
        rules = RULES if mesh == "data=1" else TENSOR
        strategy = sl.Strategy(mesh=mesh_of(mesh), rules=rules)
        model = lambda: decoder.MoE(config, rngs=nnx.Rngs(0))
        state = sl.init(model, optax.sgd(0.5), strategy)
        step = sl.train_step(decoder.loss, strategy)
        for _ in range(2):
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.long
def test_a_checkpoint_goes_to_other_meshes_and_not_to_other_padding(tmp_path):
    def state_of(stored, mesh, seed=1):
        config = decoder.tiny(experts=6, padded_to=stored)
        strategy = sl.Strategy(mesh=mesh_of(mesh), rules=RULES)
        model = lambda: decoder.MoE(config, rngs=nnx.Rngs(seed))
        return sl.init(model, optax.sgd(0.5, momentum=0.9), strategy)

    state = state_of(8, "data=4", seed=0)
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        found = checkpoints.restore(state_of(8, "data=2")).state
        with pytest.raises(ValueError, match=r"`params/blocks/expert/mlp/up` is .*\[1,8,64,256\]"):
            checkpoints.restore(state_of(6, "data=2"))
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(found.params), strict=True)
    for own, restored in pairs:
        np.testing.assert_array_equal(own, restored)


@pytest.mark.parametrize(
    ("padded_to", "weights", "message"),
    [
        (None, OWN, r"padded_to=\.\.\.` says how many"),
        (5, WEIGHTS, "no fewer than the 6 of the gate"),
        (8, OWN, "should have 2 experts|should have 8 experts"),
    ],
)
def test_what_does_not_fit_is_refused(padded_to, weights, message):
    with sl.use(RULES, mesh_of("data=4")), pytest.raises(ValueError, match=message):
        dropping_nothing(X, GATE, weights, padded_to=padded_to)
    with pytest.raises(ValueError, match="fewer experts than `experts=8`"):
        decoder.tiny(padded_to=4)
