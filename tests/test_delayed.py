"""Updates with gradients of some steps ago."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib.optimizers import delayed
from shardlib.testing import check_step

RULES = sl.AxisRules(batch="data", embed=None, mlp="model")


def make():
    random = np.random.default_rng(0)
    arrays = {"up": random.normal(size=(8, 16)), "down": random.normal(size=(16, 8))}
    names = {"up": ("embed", "mlp"), "down": ("mlp", "embed")}
    return sl.annotate(jax.tree.map(lambda x: jnp.asarray(x, "float32"), arrays), names)


def loss(model, x, rng):
    return jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"] - 1) ** 2)


def batch(step):
    return np.random.default_rng(step).normal(size=(16, 8)).astype("f4")


@pytest.mark.parametrize("delay", [1, 3])
def test_a_gradient_moves_the_parameters_of_a_later_step(delay):
    """Held to a list of all parameters so far, of which each gradient is taken at its own, in
    float64.
    """
    with jax.enable_x64(True):
        start = {n: np.asarray(x.value, "f8") for n, x in make().items()}
        optimizer = optax.adam(1e-2)
        optimizer_later = delayed(optimizer, delay)
        # As it is in a step, and as a server would do it.
        params, state = start, optimizer_later.init(start)
        history, served = [start], optimizer.init(start)
        gradient_of = jax.jit(jax.grad(lambda params, x: loss(params, x, None)))
        for step in range(7):
            x = batch(step).astype("f8")
            updates, state = optimizer_later.update(gradient_of(params, x), state, params)
            params = optax.apply_updates(params, updates)
            newest = history[-1]
            if step >= delay:
                gradient = gradient_of(history[step - delay], batch(step - delay).astype("f8"))
                updates, served = optimizer.update(gradient, served, newest)
                newest = optax.apply_updates(newest, updates)
            history.append(newest)
            chex.assert_trees_all_equal(params, newest)


def test_it_is_the_same_on_every_mesh_and_waits_in_shards():
    optimizer = delayed(optax.adam(1e-2), 2)
    meshes = ["data=4,model=2", "data=8,model=1"]
    zero = sl.Zero(2, small=0)
    check_step(make, optimizer, loss, batch(0), RULES, meshes=meshes, steps=4, zero=zero)
    strategy = sl.Strategy(mesh=meshes[0], rules=RULES, zero=zero)
    state = sl.init(make, optimizer, strategy)
    for waiting in state.opt_state.waiting:
        assert waiting["up"].sharding.spec == jax.P("data", "model")


def test_a_step_that_is_skipped_leaves_the_queue_as_it_is():
    strategy = sl.Strategy(mesh="data=4,model=2", rules=RULES)
    state = sl.init(make, delayed(optax.sgd(0.1), 1), strategy)
    step = sl.train_step(loss, strategy)
    state, _ = step(state, batch(0))
    before = jax.device_get((state.params, state.opt_state))
    bad = batch(1)
    bad[0] = np.nan
    state, _ = step(state, bad)
    chex.assert_trees_all_equal(jax.device_get((state.params, state.opt_state)), before)


@pytest.mark.parametrize("delay", [0, -1, 1.5, True])
def test_a_delay_is_a_number_of_steps(delay):
    with pytest.raises(ValueError, match="a number of steps, at least 1"):
        delayed(optax.sgd(0.1), delay)


def test_what_is_delayed_is_an_optimizer():
    with pytest.raises(ValueError, match="an optax transformation"):
        delayed(0.1, 1)
