"""Optimizers that keep parameters begin with those that a model is given."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl

WIDTH = 8
GIVEN = {"w": 1.01 * np.eye(WIDTH, dtype="f")}
BATCH = {"x": np.random.default_rng(0).normal(size=(16, WIDTH)).astype("f")}
KEEPING = {
    "schedule_free": optax.contrib.schedule_free_adamw(1e-3),
    "dog": optax.contrib.dog(1.0),
    "cocob": optax.contrib.cocob(),
}


def make():
    w = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH))
    return sl.annotate({"w": w}, {"w": ("embed", "mlp")})


def total(w, x):
    return jnp.sum(jnp.square(x @ w - x))


def loss(model, batch, rng):
    return sl.weighted_mean(total(model["w"], batch["x"]), batch["x"].shape[0])


def losses(step, state):
    found = []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        found.append(metrics["loss"])
    return np.array(found)


def losses_of_optax(optimizer):
    w, x = jnp.asarray(GIVEN["w"]), BATCH["x"]
    state, found = optimizer.init(w), []
    for _ in range(3):
        value, gradient = jax.value_and_grad(lambda w: total(w, x) / len(x))(w)
        updates, state = optimizer.update(gradient, state, w)
        w = optax.apply_updates(w, updates)
        found.append(value)
    return np.array(found)


def strategy_of(**options):
    rules = sl.rules.data | sl.rules.tensor
    return sl.Strategy(mesh="data=4,model=2", rules=rules, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"zero": sl.Zero(3, small=0)}, {"zero": sl.Zero(1, small=0), "offload": "optimizer"}],
    ids=["data", "zero 3", "host"],
)
@pytest.mark.parametrize("name", KEEPING)
def test_an_optimizer_that_keeps_parameters_begins_with_those_that_are_given(name, options):
    strategy = strategy_of(**options)
    state = sl.init(make, KEEPING[name], strategy)
    given = state.with_weights(GIVEN)
    for old, new in zip(
        jax.tree.leaves(state.opt_state), jax.tree.leaves(given.opt_state), strict=True
    ):
        assert (old.sharding, old.dtype, old.weak_type) == (new.sharding, new.dtype, new.weak_type)
    found = losses(sl.train_step(loss, strategy), given)
    np.testing.assert_allclose(found, losses_of_optax(KEEPING[name]), rtol=2e-4)


def test_a_restored_model_is_where_an_optimizer_begins(tmp_path):
    strategy = strategy_of()
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(sl.init(make, None, strategy).with_weights(GIVEN))
        checkpoints.wait()
        state = sl.init(make, KEEPING["dog"], strategy)
        state = checkpoints.restore_model(state).state
    found = losses(sl.train_step(loss, strategy), state)
    np.testing.assert_allclose(found, losses_of_optax(KEEPING["dog"]), rtol=2e-4)


def test_workers_that_train_apart_begin_with_what_is_given():
    strategy = strategy_of(exchange=sl.collectives.LocalSGD(axis="data", every=2))
    state = sl.init(make, KEEPING["schedule_free"], strategy).with_weights(GIVEN)
    kept = [
        leaf
        for leaf in jax.tree.leaves(state.workers.opt_state)
        if leaf.shape[1:] == (WIDTH, WIDTH)
    ]
    assert any(np.array_equal(leaf, np.stack([GIVEN["w"]] * 4)) for leaf in kept)


def test_parameters_are_refused_that_an_optimizer_kept_others_of():
    strategy = strategy_of()
    state = sl.init(make, KEEPING["schedule_free"], strategy)
    state, _ = sl.train_step(loss, strategy)(state, BATCH)
    with pytest.raises(ValueError, match=r"to step 1, .* keeps parameters in `.*z"):
        state.with_weights(GIVEN)


def test_an_optimizer_that_keeps_none_goes_on_with_what_it_has():
    strategy = strategy_of()
    state = sl.init(make, optax.adamw(1e-3), strategy)
    state, _ = sl.train_step(loss, strategy)(state, BATCH)
    given = state.with_weights(GIVEN)
    jax.tree.map(np.testing.assert_array_equal, given.opt_state, state.opt_state)
