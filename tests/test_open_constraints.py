"""Sharding constraints that ask for nothing are left out of programs, and no others."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from models import gpt
from shardlib.tracing import _open_constraints

# Scalars are not counted: nothing can be asked of their layout in any case.
OPEN = re.compile(r"sdy\.sharding_constraint .*<@\w+, \[\{\?\}(, \{\?\})*\]>")
ASKING = re.compile(r"sdy\.sharding_constraint .*<@\w+, \[.*\{(\"|\}).*\]>")
CONFIG = gpt.tiny(layers=2, width=16, heads=2, context=8, vocab=32)
BATCH = {"tokens": np.arange(8 * 9, dtype=np.int32).reshape(8, 9) % 32}


def step_and_state(**options):
    strategy = sl.Strategy(mesh="data=4,model=2", rules=sl.rules.data | sl.rules.tensor, **options)
    state = sl.init(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
    return sl.train_step(gpt.loss, strategy), state


def constraints(text):
    """How many constraints of a program ask for nothing, and how many for something."""
    return len(OPEN.findall(text)), len(ASKING.findall(text))


@pytest.mark.parametrize(
    "options", [{}, {"zero": sl.Zero(3, small=0), "accumulate": 2}], ids=["plain", "zero_3"]
)
def test_a_step_is_lowered_without_open_constraints_and_with_all_others(monkeypatch, options):
    step, state = step_and_state(**options)
    lowered = step.lower(state, BATCH).as_text()
    with monkeypatch.context() as patched:
        patched.setattr(_open_constraints, "_asks_for_nothing", lambda sharding: False)
        jax.clear_caches()
        step, state = step_and_state(**options)
        as_jax_lowers_it = step.lower(state, BATCH).as_text()
    jax.clear_caches()
    before, asked_before = constraints(as_jax_lowers_it)
    after, asked_after = constraints(lowered)
    assert before > 100 and after == 0
    assert asked_before == asked_after > 0


def test_a_step_within_another_jitted_function_runs_and_has_none_either():
    step, state = step_and_state()
    twice = jax.jit(lambda state, batch: step(step(state, batch)[0], batch))
    assert constraints(twice.lower(state, BATCH).as_text())[0] == 0
    expected = step(step(step_and_state()[1], BATCH)[0], BATCH)[1]["loss"]
    np.testing.assert_allclose(twice(state, BATCH)[1]["loss"], expected, rtol=1e-6)


def test_a_scan_over_steps_runs():
    step, state = step_and_state()

    def body(state, batch):
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    batches = jax.tree.map(lambda x: np.stack([x, x]), BATCH)
    losses = jax.jit(lambda state, batches: jax.lax.scan(body, state, batches)[1])(state, batches)
    step, state = step_and_state()
    expected = []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        expected.append(metrics["loss"])
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_constraints_of_functions_that_are_not_lowered_to_their_end_stay():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    unconstrained = NamedSharding(mesh, P(P.UNCONSTRAINED, P.UNCONSTRAINED))

    def function(x):
        # JAX refers to the result of the first constraint again, after the second is lowered.
        early = jax.lax.with_sharding_constraint(x + 1, unconstrained)
        late = _open_constraints.without_open_constraints(early * 2)
        return early + late

    x = jnp.arange(32.0).reshape(8, 4)
    np.testing.assert_array_equal(jax.jit(function)(x), 3 * (x + 1))


def test_the_mark_changes_nothing_under_any_transformation():
    mark = _open_constraints.without_open_constraints
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(mark(x), x)
    np.testing.assert_array_equal(jax.vmap(mark)(x), x)
    np.testing.assert_array_equal(jax.jit(jax.vmap(mark))(x), x)
    assert jax.grad(lambda x: mark(x**2))(3.0) == 6.0
    assert jax.jvp(mark, (2.0,), (5.0,)) == (2.0, 5.0)
