"""`Checkpoints.restore_model`: what a model has learned, read into a run of another kind."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from models import gpt
from shardlib.train._contents import sealed, unsealed

FROZEN = ("up/.*",)
RULES = sl.AxisRules(batch=("pod", "data"), embed=None, mlp="model")
STRATEGIES = {
    "stage 3": sl.Strategy(mesh="pod=1,data=4,model=2", rules=RULES, zero=sl.Zero(3, small=0)),
    "three axes": sl.Strategy(mesh="pod=2,data=2,model=2", rules=RULES, zero=sl.Zero(1, small=0)),
    "frozen": sl.Strategy(mesh="pod=1,data=8,model=1", rules=RULES, frozen=FROZEN),
    "workers": sl.Strategy(
        mesh="pod=2,data=4,model=1", rules=RULES, exchange=sl.collectives.DiLoCo("pod", every=4)
    ),
    "other workers": sl.Strategy(
        mesh="pod=4,data=2,model=1", rules=RULES, exchange=sl.collectives.LocalSGD("pod", every=4)
    ),
    "server": sl.Strategy(
        mesh="pod=1,data=8,model=1", rules=RULES, exchange=sl.collectives.ParameterServer("data")
    ),
}


class Perceptron(nnx.Module):
    def __init__(self, rngs, width=8, dtype=jnp.float32):
        named = functools.partial(sl.logical, nnx.initializers.normal())
        options = {"param_dtype": dtype, "rngs": rngs}
        self.up = nnx.Linear(width, 16, kernel_init=named("embed", "mlp"), **options)
        self.down = nnx.Linear(16, width, kernel_init=named("mlp", "embed"), **options)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.down(nnx.relu(self.up(x)))))


def start(name, optimizer=None, seed=0, abstract=False, **options):
    return sl.init(
        lambda: Perceptron(nnx.Rngs(seed), **options),
        optimizer or optax.adamw(1e-2),
        STRATEGIES[name],
        abstract=abstract,
    )


def used(name):
    """A state that differs from a new one in all of its numbers, and between workers."""

    def moved(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        numbers = jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        return jax.device_put(leaf + numbers, leaf.sharding)

    state = start(name)
    return jax.tree.map(moved, state).replaced(step=state.step + 2)


def assert_same(tree, other):
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), tree, other
    )


def as_saved(folder, state):
    checkpoints = sl.Checkpoints(folder)
    checkpoints.save(state, about={"name": "first"})
    checkpoints.wait()
    return checkpoints


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("stage 3", "three axes"),
        ("stage 3", "frozen"),
        ("frozen", "stage 3"),
        ("workers", "stage 3"),
        ("stage 3", "workers"),
        ("workers", "other workers"),
        ("workers", "workers"),
        ("server", "stage 3"),
        ("workers", "server"),
    ],
)
def test_another_run_begins_with_what_a_model_has_learned(tmp_path, before, after):
    old = used(before)
    # Another optimizer, whose state a checkpoint of the first does not have.
    new = start(after, optimizer=optax.sgd(0.1, momentum=0.9), seed=1)
    with as_saved(tmp_path, old) as checkpoints:
        restored = checkpoints.restore_model(new)
    state = restored.state
    assert (restored.step, restored.about, int(state.step)) == (2, {"name": "first"}, 0)
    assert_same(state.weights, old.weights)
    assert_same(nnx.state(state.model, nnx.BatchStat), nnx.state(old.model, nnx.BatchStat))
    assert_same(state.opt_state, new.opt_state)
    assert jax.tree.structure(state) == jax.tree.structure(new)
    for one, other in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
    if state.workers is not None:
        jax.tree.map(
            lambda x: np.testing.assert_array_equal(x, x[:1] + 0 * x), state.workers.params
        )


@pytest.mark.long
def test_layers_of_a_pipeline_are_in_their_places(tmp_path):
    config = gpt.tiny(layers=4, width=8, heads=2, context=8, vocab=16)
    pipeline = sl.Strategy(
        mesh="data=2,stage=2,model=2",
        rules=sl.rules.data | sl.rules.tensor | sl.rules.pipeline,
        pipeline=sl.pipeline.Interleaved(stages=2, microbatches=4, chunks=2),
    )
    plain = sl.Strategy(mesh="data=8", rules=sl.rules.data, zero=sl.Zero(3, small=0))

    def begun(strategy, seed):
        return sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(seed)), optax.sgd(1e-2), strategy)

    for number, (before, after) in enumerate(((pipeline, plain), (plain, pipeline))):
        old = begun(before, 0)
        with as_saved(tmp_path / str(number), old) as checkpoints:
            state = checkpoints.restore_model(begun(after, 1)).state
        assert_same(state.weights, old.weights)


def test_an_abstract_state_is_enough_to_compute_with_a_model(tmp_path):
    old = used("stage 3")
    abstract = start("three axes", optimizer=optax.set_to_zero(), abstract=True)
    with as_saved(tmp_path, old) as checkpoints:
        state = checkpoints.restore_model(abstract).state
    assert isinstance(state.step, jax.ShapeDtypeStruct)
    x = np.ones((8, 8), "f")
    outputs = []
    for one in (old, state):
        with one.layout.strategy.scope():
            model = nnx.view(one.model, deterministic=True, use_running_average=True)
            outputs.append(np.asarray(nnx.jit(model)(x)))
    np.testing.assert_allclose(*outputs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("after", ["three axes", "workers"])
def test_what_is_replaced_is_released_first(tmp_path, after):
    old, new = used("stage 3"), start(after, seed=1)
    with as_saved(tmp_path, old) as checkpoints:
        wider = start(after, seed=1, width=12)
        with pytest.raises(ValueError, match="of another model"):
            checkpoints.restore_model(wider, release=True)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(wider))
        state = checkpoints.restore_model(new, release=True).state
    own = new.workers.params if new.workers else ()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((new.params, new.frozen, own)))
    assert_same(state.weights, old.weights)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_a_model_may_be_a_single_array(tmp_path):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    old = sl.init(lambda: jnp.arange(8.0), optax.adam(1e-3), strategy)
    with as_saved(tmp_path, old) as checkpoints:
        new = sl.init(lambda: jnp.zeros(8), optax.sgd(1e-3), strategy)
        assert_same(checkpoints.restore_model(new).state.params, jnp.arange(8.0))


def test_parameters_are_cast(tmp_path):
    old, new = used("stage 3"), start("frozen", seed=1, dtype=jnp.bfloat16)
    with as_saved(tmp_path, old) as checkpoints:
        state = checkpoints.restore_model(new).state
    for layer in ("up", "down"):
        kernel = state.weights[layer]["kernel"]
        assert kernel.dtype == jnp.bfloat16
        assert_same(kernel, old.weights[layer]["kernel"].astype(jnp.bfloat16))


def test_the_rest_of_a_checkpoint_is_not_read(tmp_path):
    old = used("stage 3")
    with as_saved(tmp_path, old) as checkpoints:
        file = tmp_path / "2" / "about" / "metadata"
        content = unsealed(json.loads(file.read_text()))
        for path, leaf in content["leaves"].items():
            if path.startswith("opt_state/"):
                leaf["digest"] = "00000000"
        file.write_text(json.dumps(sealed(content)))
        with pytest.raises(ValueError, match="the bits of `opt_state/"):
            checkpoints.restore(start("stage 3", abstract=True), step=2)
        state = checkpoints.restore_model(start("stage 3")).state
    assert_same(state.weights, old.weights)


def test_a_damaged_model_is_passed_over(tmp_path):
    old = start("stage 3")
    with as_saved(tmp_path, old) as checkpoints:
        checkpoints.save(used("stage 3"))
        checkpoints.wait()
        (tmp_path / "2" / "about" / "metadata").write_text("{}")
        with pytest.warns(UserWarning, match="step 2 in .* cannot be used") as warned:
            restored = checkpoints.restore_model(start("three axes", seed=1))
    assert restored.step == 0
    assert warned[0].filename == __file__
    assert_same(restored.state.weights, old.weights)


def test_another_model_is_refused_by_name(tmp_path):
    with as_saved(tmp_path, start("stage 3")) as checkpoints:
        wider = start("stage 3", width=12, abstract=True)
        of_both = r"`params/up/kernel` is float32\[8,16\] in the checkpoint and float32\[12,16\]"
        with pytest.raises(ValueError, match=of_both):
            checkpoints.restore_model(wider)
        with pytest.raises(ValueError, match="No checkpoint of step 7"):
            checkpoints.restore_model(start("stage 3", abstract=True), step=7)
        with pytest.raises(ValueError, match="`State` that `sl.init` makes"):
            checkpoints.restore_model({})
