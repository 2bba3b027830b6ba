"""Workers that train apart and meet: LocalSGD, DiLoCo, elastic averaging, on any mesh.

Each is held to a plain simulation: a list of workers, each with parameters and an optimizer of its
own, on one device.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt, moe
from shardlib import testing
from shardlib.collectives import DiLoCo, ElasticAveraging, LocalSGD, OneBit, PowerSGD, Quantised
from shardlib.step._saved_errors import saved

RULES = sl.AxisRules(batch=("pod", "data"), embed=None, mlp="model")
NAMES = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "bias": (None,)}
PODS = "pod=2,data=2,model=2"
STEPS = 7
ADAM = optax.adam(1e-2)


def values():
    random = np.random.default_rng(0)
    shapes = {"up": (8, 16), "down": (16, 8), "bias": (5,)}
    return {name: random.normal(size=shape).astype("f4") for name, shape in shapes.items()}


def make():
    return sl.annotate({name: jnp.asarray(value) for name, value in values().items()}, NAMES)


def loss(model, batch, rng):
    y = batch + jnp.tanh(batch @ model["up"]) @ model["down"]
    return jnp.mean((y - 1) ** 2) + jnp.mean((y[:, :5] - model["bias"]) ** 2)


def batch(step):
    return np.random.default_rng(step).normal(size=(16, 8)).astype("f4")


def run(strategy, steps=STEPS, state=None, optimizer=ADAM, loss_fn=loss):
    state = state or sl.init(make, optimizer, strategy)
    step, losses = sl.train_step(loss_fn, strategy), []
    for number in range(int(state.step), int(state.step) + steps):
        state, metrics = step(state, batch(number))
        losses.append(metrics["loss"].item())
    return state, losses


def mean(trees):
    return jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *trees)


def moved_towards(goal, start, part):
    return jax.tree.map(lambda g, s: s + part * (g - s), goal, start)


gradient_of = jax.jit(jax.value_and_grad(lambda params, batch: loss(params, batch, None)))


@functools.cache
def simulated(exchange, workers, steps=STEPS):
    """What workers have after some steps, the center, and the losses."""
    center = values()
    own, states = [center] * workers, [ADAM.init(center)] * workers
    momentum = jax.tree.map(np.zeros_like, center)
    losses = []
    for step in range(steps):
        of_step = []
        for worker, examples in enumerate(np.split(batch(step), workers)):
            value, gradient = gradient_of(own[worker], examples)
            updates, states[worker] = ADAM.update(gradient, states[worker])
            own[worker] = optax.apply_updates(own[worker], updates)
            of_step.append(float(value))
        losses.append(np.mean(of_step))
        if (step + 1) % exchange.every:
            continue
        moves = mean([jax.tree.map(np.subtract, mine, center) for mine in own])
        if isinstance(exchange, ElasticAveraging):
            own = [moved_towards(center, mine, exchange.rate / workers) for mine in own]
            mean_of_own = jax.tree.map(np.add, center, moves)
            center = moved_towards(mean_of_own, center, exchange.rate)
            continue
        if isinstance(exchange, LocalSGD):
            center = jax.tree.map(np.add, center, moves)
        else:
            # As `optax.sgd` has Nesterov's momentum, of the gradient `-moves`.
            outer = optax.sgd(exchange.learning_rate, exchange.momentum, nesterov=True)
            trace = outer.init(center)[0]._replace(trace=momentum)
            gradient = jax.tree.map(np.negative, moves)
            updates, after = outer.update(gradient, (trace, *outer.init(center)[1:]))
            momentum = after[0].trace
            center = optax.apply_updates(center, updates)
        own = [center] * workers
    return own, center, losses


def split(stage):
    return sl.Zero(stage, small=0)


MEETINGS = {
    "every device": dict(mesh="pod=1,data=8,model=1", exchange=LocalSGD("data", every=3)),
    "pods": dict(mesh=PODS, exchange=DiLoCo("pod", every=3)),
    "pods, stage 1": dict(mesh=PODS, exchange=LocalSGD("pod", every=2), zero=split(1)),
    "pods, stage 2, accumulated": dict(
        mesh=PODS, exchange=ElasticAveraging("pod", every=2), zero=split(2), accumulate=2
    ),
    "pods, stage 3": dict(mesh=PODS, exchange=DiLoCo("pod", every=3), zero=split(3)),
    "inner axis": dict(
        mesh="pod=4,data=2,model=1", exchange=DiLoCo("data", every=3), zero=split(2)
    ),
    "inner axis, beside another": dict(
        mesh="pod=2,data=2,model=2", exchange=LocalSGD("data", every=3), zero=split(2)
    ),
    "both axes": dict(mesh=PODS, exchange=ElasticAveraging(("pod", "data"), every=3, rate=0.5)),
    "both, the other way": dict(mesh=PODS, exchange=LocalSGD(("data", "pod"), every=2)),
    "one worker": dict(mesh="pod=1,data=4,model=2", exchange=DiLoCo("pod", every=2)),
}


@pytest.mark.representative("pods", "pods, stage 2, accumulated", "inner axis")
@pytest.mark.long
@pytest.mark.sentinel("pods, stage 3", "both axes")
@pytest.mark.parametrize("name", MEETINGS)
def test_workers_train_and_meet_as_in_a_plain_simulation(name):
    strategy = sl.Strategy(rules=RULES, **MEETINGS[name])
    # So that the examples of a worker follow each other, and compilers take the nested regions.
    assert strategy.data_axes[0] == strategy.exchange.axes[0] or name == "both, the other way"
    workers = sl.init(make, ADAM, strategy, abstract=True).layout.workers
    own, center, losses = simulated(strategy.exchange, workers)
    state, found = run(strategy)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for path, expected in center.items():
        np.testing.assert_allclose(state.params[path], expected, atol=1e-5)
        each = np.stack([mine[path] for mine in own])
        np.testing.assert_allclose(state.workers.params[path], each, atol=1e-5)
        np.testing.assert_allclose(state.model[path], each.mean(0), atol=1e-5)
    assert state.layout.workers == workers


def test_what_workers_have_is_sharded_like_parameters_with_a_dim_in_front():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, zero=split(3), exchange=DiLoCo("pod", every=3))
    state, _ = run(strategy, 1)
    for tree in (state.workers.params, state.workers.opt_state[0].mu):
        assert tree["up"].sharding.spec == jax.P("pod", "data", "model")
    assert state.workers.kept["momentum"]["up"].sharding.spec == jax.P("data", "model")
    assert state.params["up"].sharding.spec == jax.P("data", "model")
    assert state.workers.opt_state[0].count.shape == (2,)
    assert state.opt_state == ()
    # Two workers, with half of the pods' parameters each on four devices.
    described = sl.describe(state)
    assert described.bytes_per_device["workers' own arrays"] > 0
    assert "workers' own arrays" in str(described)


def test_an_evaluation_and_an_export_are_of_the_mean(tmp_path):
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=LocalSGD("pod", every=5))
    state, _ = run(strategy, 3)
    apart = np.asarray(state.workers.params["up"])
    assert np.abs(apart[0] - apart[1]).max() > 1e-3
    expected = loss(
        {n: np.asarray(x).mean(0) for n, x in state.workers.params.items()}, batch(9), 0
    )
    measured = sl.evaluation(loss, strategy)(state, [batch(9)])
    np.testing.assert_allclose(measured["loss"], expected, rtol=1e-5)
    forms = {"up": "embed mlp -> embed mlp", "down": "mlp embed -> mlp embed", "bias": "a -> a"}
    rules = tuple(sl.weights.Rule(name, name, form) for name, form in forms.items())
    files = sl.weights.save(tmp_path, state, sl.weights.Table(rules))
    plain = sl.Strategy(mesh=PODS, rules=RULES)
    read = sl.weights.load(files[0], sl.init(make, None, plain), sl.weights.Table(rules))
    np.testing.assert_allclose(read.params["up"], apart.mean(0), rtol=1e-6)


def test_weights_are_given_to_all_workers():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=LocalSGD("pod", every=5))
    state, _ = run(strategy, 3)
    state = state.with_weights(jax.tree.map(jnp.asarray, values()))
    for path, expected in values().items():
        np.testing.assert_array_equal(state.params[path], expected)
        np.testing.assert_array_equal(state.workers.params[path], np.stack([expected] * 2))


class Normed(nnx.Module):
    """A layer with dropout, and a statistic of its batches."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.ones((8, 8)))
        self.mean = nnx.BatchStat(jnp.zeros(8))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * sl.batch_mean(x)
        return self.dropout(x @ self.w[...]) - self.mean[...]


@pytest.mark.long
def test_each_worker_has_statistics_of_its_own_batches_and_draws_as_on_any_mesh():
    def normed_loss(model, x, rng):
        return jnp.mean((model(x) - 1) ** 2)

    def one_step(mesh, exchange):
        strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data | RULES, exchange=exchange)
        state = sl.init(lambda: Normed(nnx.Rngs(0)), optax.sgd(0.1), strategy)
        return sl.train_step(normed_loss, strategy)(state, batch(0))

    state, metrics = one_step(PODS, LocalSGD("pod", every=10))
    own = jax.tree.leaves(state.workers.rest)
    assert len(own) == 1
    expected = 0.1 * np.stack([half.mean(0) for half in np.split(batch(0), 2)])
    np.testing.assert_allclose(own[0], expected, atol=1e-6)
    np.testing.assert_allclose(state.model.mean[...], expected.mean(0), atol=1e-6)
    # Which elements dropout leaves does not depend on who computes them, as the statistic does.
    other, others = one_step("pod=2,data=4,model=1", LocalSGD("pod", every=10))
    np.testing.assert_allclose(metrics["loss"], others["loss"], rtol=1e-5)
    chex.assert_trees_all_close(
        jax.device_get(state.workers.params), jax.device_get(other.workers.params), atol=1e-6
    )


def test_a_worker_whose_gradient_is_not_finite_skips_alone():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=LocalSGD("pod", every=5))
    state, _ = run(strategy, 1)
    before = np.asarray(state.workers.params["up"])
    bad = batch(1)
    bad[3] = np.inf
    state, metrics = sl.train_step(loss, strategy)(state, bad)
    after = np.asarray(state.workers.params["up"])
    np.testing.assert_array_equal(after[0], before[0])
    assert np.abs(after[1] - before[1]).max() > 0
    assert np.asarray(state.workers.opt_state[0].count).tolist() == [1, 2]
    assert int(state.nonfinite) == 1
    assert int(metrics["first_nonfinite"]) >= 0


def test_gradients_are_divided_by_the_weight_of_the_worker():
    """One pod has a quarter of the other's tokens, and its gradient is their mean all the same."""

    def masked(model, x, rng):
        weight = (x[:, 0] > 0).astype("f4")
        errors = jnp.sum(((x @ model["up"])[:, :8] - 1) ** 2, 1)
        return sl.weighted_mean(jnp.sum(errors * weight), jnp.sum(weight))

    x = np.abs(batch(0))
    x[2:8, 0] = -1
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=LocalSGD("pod", every=5))
    state = sl.init(make, optax.sgd(0.1), strategy)
    state, metrics = sl.train_step(masked, strategy)(state, x)
    means = []
    for worker, examples in enumerate(np.split(x, 2)):
        value, gradient = jax.value_and_grad(
            lambda m, e=examples: (lambda t: t.total / t.weight)(masked(m, e, None))
        )(values())
        means.append((float(value), float((examples[:, 0] > 0).sum())))
        expected = values()["up"] - 0.1 * gradient["up"]
        np.testing.assert_allclose(state.workers.params["up"][worker], expected, atol=1e-5)
    weight = sum(own for _, own in means)
    np.testing.assert_allclose(metrics["weight"], weight)
    np.testing.assert_allclose(
        metrics["loss"], sum(value * own for value, own in means) / weight, rtol=1e-5
    )


CODES = {
    "integers": Quantised("pod", bits=8, block=8, feedback=True),
    "signs": OneBit("pod", exact=("bias",)),
    "factors": PowerSGD("pod", rank=3),
}


@pytest.mark.representative("integers")
@pytest.mark.long
@pytest.mark.sentinel("signs")
@pytest.mark.parametrize("name", CODES)
def test_moves_are_sent_as_codes_and_what_they_leave_out_later(name):
    coded = DiLoCo("pod", every=2, momentum=0.0, learning_rate=1.0, exchange=CODES[name])
    strategy = sl.Strategy(mesh=PODS, rules=RULES, zero=split(2), exchange=coded)
    state, _ = run(strategy, 2)
    _, center, _ = simulated(LocalSGD("pod", every=2), 2, 2)
    # What was sent and what is owed are together what was to be sent.
    owed = owed_of(state)
    for path, expected in center.items():
        found = np.asarray(state.params[path]) + owed.get(path, 0)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        mine = np.asarray(state.workers.params[path])
        np.testing.assert_array_equal(mine[0], mine[1])


def owed_of(state):
    """What the mean of all workers is owed, in the shape of each parameter."""
    owed = {}
    for path, errors in jax.device_get(saved(state).errors).items():
        if hasattr(errors, "worker"):
            owed[path] = errors.worker.mean(0) + errors.server
        else:
            owed[path] = errors.error.mean(0)
    return owed


def saved_in(folder, state):
    checkpoints = sl.Checkpoints(folder)
    checkpoints.save(state)
    checkpoints.wait()
    return checkpoints


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint(tmp_path):
    exchange = DiLoCo("pod", every=3, exchange=Quantised("pod", bits=4, feedback=True, block=8))
    strategy = sl.Strategy(mesh=PODS, rules=RULES, zero=split(2), exchange=exchange)
    state, _ = run(strategy, 4)
    checkpoints = saved_in(tmp_path, state)
    without, _ = run(strategy, 3, state)
    state = checkpoints.restore(sl.init(make, ADAM, strategy)).state
    after, _ = run(strategy, 3, state)
    chex.assert_trees_all_equal(
        jax.device_get(without.replaced(key=0)), jax.device_get(after.replaced(key=0))
    )


OTHERS = {
    "fewer workers": dict(mesh="pod=2,data=4,model=1", exchange=DiLoCo("pod", every=3)),
    "more workers": dict(mesh="pod=8,data=1,model=1", exchange=DiLoCo("pod", every=3)),
    "another meeting": dict(mesh="pod=4,data=2,model=1", exchange=LocalSGD("pod", every=3)),
    "no workers": dict(mesh="pod=4,data=1,model=2", exchange=sl.Exact()),
}


@pytest.mark.representative("fewer workers")
@pytest.mark.long
@pytest.mark.sentinel("no workers")
@pytest.mark.parametrize("name", OTHERS)
def test_another_number_of_workers_starts_from_the_mean(name, tmp_path):
    strategy = sl.Strategy(
        mesh="pod=4,data=2,model=1", rules=RULES, zero=split(2), exchange=DiLoCo("pod", every=3)
    )
    state, _ = run(strategy, 5)
    expected = jax.device_get(state.model)
    moments = np.asarray(state.workers.opt_state[0].mu["up"]).mean(0)
    center = jax.device_get(state.params)
    momentum = jax.device_get(state.workers.kept["momentum"])
    checkpoints = saved_in(tmp_path, state)
    other = sl.Strategy(rules=RULES, zero=split(1), **OTHERS[name])
    restored = checkpoints.restore(sl.init(make, ADAM, other)).state
    chex.assert_trees_all_close(jax.device_get(restored.model), expected, atol=1e-7)
    if name == "no workers":
        np.testing.assert_allclose(restored.opt_state[0].mu["up"], moments, atol=1e-7)
    elif name == "another meeting":
        # As many workers: each has what it had.
        assert restored.workers.kept == {}
        own = restored.workers.params["up"]
        np.testing.assert_array_equal(own, state.workers.params["up"])
    else:
        for mine in np.asarray(restored.workers.params["up"]):
            np.testing.assert_allclose(mine, expected["up"], atol=1e-7)
        chex.assert_trees_all_equal(jax.device_get(restored.params), center)
        chex.assert_trees_all_equal(jax.device_get(restored.workers.kept["momentum"]), momentum)
    run(other, 3, restored)


def test_a_run_without_workers_goes_on_as_workers(tmp_path):
    """As post-local SGD does: data parallelism first, and workers that train apart later."""
    together = sl.Strategy(mesh=PODS, rules=RULES, zero=split(2))
    state, _ = run(together, 3)
    expected = jax.device_get((state.params, state.opt_state[0].mu))
    checkpoints = saved_in(tmp_path, state)
    strategy = sl.Strategy(mesh=PODS, rules=RULES, zero=split(2), exchange=DiLoCo("pod", every=3))
    restored = checkpoints.restore(sl.init(make, ADAM, strategy)).state
    for worker in range(2):
        found = jax.tree.map(
            lambda x, worker=worker: np.asarray(x)[worker],
            (restored.workers.params, restored.workers.opt_state[0].mu),
        )
        chex.assert_trees_all_equal(found, expected)
    assert not np.any(jax.tree.leaves(restored.workers.kept["momentum"])[0])
    run(strategy, 3, restored)


@pytest.mark.long
def test_what_moves_are_owed_is_not_owed_to_gradients(tmp_path):
    coded = OneBit("pod")
    apart = sl.Strategy(mesh=PODS, rules=RULES, exchange=DiLoCo("pod", every=3, exchange=coded))
    together = sl.Strategy(mesh=PODS, rules=RULES, exchange=coded)
    for before, after in ((apart, together), (together, apart), (apart, sl.Strategy(PODS, RULES))):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        state, _ = run(before, 3)
        checkpoints = saved_in(folder, state)
        with pytest.raises(ValueError, match="one is not owed to the other"):
            checkpoints.restore(sl.init(make, ADAM, after))


@pytest.mark.long
def test_workers_go_on_in_a_pipeline_with_layers_in_its_order(tmp_path):
    """The mean of workers is in the model's order, and a pipeline stores it in another."""
    names = {"stack": ("layers", "embed", "mlp"), "head": ("mlp", "embed")}

    def make_stack():
        random = np.random.default_rng(0)
        shapes = {"stack": (8, 8, 8), "head": (8, 8)}
        arrays = {n: jnp.asarray(random.normal(size=s), "float32") for n, s in shapes.items()}
        return sl.annotate(arrays, names)

    def stack_loss(model, x, rng):
        def layer(x, w):
            return jnp.tanh(x @ w) + x, None

        return jnp.mean((jax.lax.scan(layer, x, model["stack"])[0] @ model["head"] - 1) ** 2)

    rules = RULES | sl.AxisRules(layers=None)
    strategy = sl.Strategy(mesh=PODS, rules=rules, exchange=LocalSGD("pod", every=5))
    state = sl.init(make_stack, ADAM, strategy)
    step = sl.train_step(stack_loss, strategy)
    for number in range(2):
        state, _ = step(state, batch(number))
    expected = jax.device_get(state.model)
    checkpoints = saved_in(tmp_path, state)
    pipelined = sl.Strategy(
        mesh="stage=2,pod=2,data=2,model=1",
        rules=rules | sl.AxisRules(layers="stage"),
        pipeline=sl.pipeline.Interleaved(stages=2, microbatches=2, chunks=2),
    )
    restored = checkpoints.restore(sl.init(make_stack, ADAM, pipelined)).state
    chex.assert_trees_all_close(jax.device_get(restored.model), expected, atol=1e-7)


def test_a_model_of_one_array_has_workers_too(tmp_path):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, exchange=LocalSGD("data", every=2))
    state = sl.init(lambda: jnp.ones((8, 4)), ADAM, strategy)
    step = sl.train_step(lambda w, x, rng: jnp.mean((x @ w - 1) ** 2), strategy)
    state, _ = step(state, batch(0))
    restored = saved_in(tmp_path, state).restore(state).state
    assert restored.workers.params.shape == (8, 8, 4)


def test_an_abstract_state_has_a_model():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=LocalSGD("pod", every=5))
    model = sl.init(make, ADAM, strategy, abstract=True).model
    assert model["up"].shape == (8, 16)


def test_hybrid_zero_splits_within_a_worker():
    strategy = sl.Strategy(
        mesh="pod=2,data=4",
        dcn="pod",
        rules=sl.rules.data | sl.AxisRules(batch=("pod", "data"), embed=None, mlp=None),
        zero="HYBRID_SHARD",
        exchange=LocalSGD("pod", every=5),
    )
    # All of these are small, of which a warning tells.
    with pytest.warns(sl.ShardingWarning, match="splits nothing over `data=4`"):
        state, _ = run(strategy, 1)
    assert state.workers is not None


@pytest.mark.long
def test_fit_trains_workers_apart_and_resumes(tmp_path):
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=DiLoCo("pod", every=3))
    batches = [batch(number) for number in range(8)]

    def fit(steps):
        state = sl.init(make, ADAM, strategy)
        step = sl.train_step(loss, strategy)
        loop = sl.Loop(steps=steps, save_every=4)
        quiet = sl.Records(sinks=[])
        return sl.fit(step, state, batches, loop, folder=tmp_path, records=quiet)

    fit(4)
    resumed = fit(8)
    through, _ = run(strategy, 8)
    chex.assert_trees_all_equal(jax.device_get(resumed.workers), jax.device_get(through.workers))


def strategy_with(**options):
    return sl.Strategy(**{"mesh": PODS, "rules": RULES, **options})


def test_fragments_meet_in_turn():
    """Every second layer, and every second row, after two steps; all others after four."""
    names = {"stack": ("layers", "embed", "mlp"), "head": ("mlp", "embed"), "bias": (None,)}

    def make_stack():
        random = np.random.default_rng(0)
        shapes = {"stack": (3, 8, 16), "head": (16, 8), "bias": (8,)}
        arrays = {n: jnp.asarray(random.normal(size=s), "float32") for n, s in shapes.items()}
        return sl.annotate(arrays, names)

    def stack_loss(model, x, rng):
        for layer in range(3):
            x = jnp.tanh(x @ model["stack"][layer]) @ model["head"] + x + model["bias"]
        return jnp.mean((x - 1) ** 2)

    strategy = sl.Strategy(
        mesh=PODS,
        rules=RULES | sl.AxisRules(layers=None),
        zero=split(2),
        exchange=LocalSGD("pod", every=4, fragments=2),
    )
    state = sl.init(make_stack, ADAM, strategy)
    step = sl.train_step(stack_loss, strategy)
    for number in range(4):
        state, metrics = step(state, batch(number))
        alike = {}
        for name, value in jax.device_get(state.workers.params).items():
            same = value[0] == value[1]
            rows = same.reshape(len(same), -1).all(1)
            # Adam's first steps are of nearly equal size: some of a bias are equal by chance.
            alike[name] = bool(rows.all()) if name == "bias" else rows.tolist()
        # The part that meets first has layer 1 and, since it has fewer layers, the bias.
        first, second = [False, True] * 8, [True, False] * 8
        expected = {1: (first[:3], first, True), 3: (second[:3], second, False)}
        nothing = [False] * 3, [False] * 16, False
        stack, head, bias = expected.get(number, nothing)
        assert alike == {"stack": stack, "head": head, "bias": bias}
        assert bool(metrics["met"]) == (number in expected)
    # The center has what was averaged last, of each part.
    own = state.workers.params["stack"]
    np.testing.assert_array_equal(state.params["stack"][0], own[0, 0])


@pytest.mark.representative("meanwhile")
@pytest.mark.long
@pytest.mark.sentinel("after a step")
@pytest.mark.parametrize("overlap", [False, True], ids=["after a step", "meanwhile"])
def test_what_meets_when_depends_on_no_layout(overlap, tmp_path):
    """Resumed on another mesh, with devices that have other numbers of rows than take turns."""
    meeting = DiLoCo("pod", every=3, fragments=3, overlap=overlap)
    whole = strategy_with(mesh="pod=2,data=4,model=1", exchange=meeting)
    # A device has 4 rows of one matrix, and of the other 2.
    cut = strategy_with(mesh="pod=2,data=2,model=2", exchange=meeting, zero=split(3))
    half, _ = run(whole, 4)
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(half)
        checkpoints.wait()
        resumed = checkpoints.restore(sl.init(make, ADAM, cut, abstract=True)).state
    through, _ = run(whole, 3, half)
    state, _ = run(cut, 3, resumed)
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-3, atol=1e-4)
    close(jax.device_get(state.params), jax.device_get(through.params))
    close(jax.device_get(state.workers.params), jax.device_get(through.workers.params))


REFUSED = {
    "an interval of zero": (lambda: LocalSGD("pod", every=0), "every=0.*at least 1"),
    "fragments that do not take turns": (
        lambda: DiLoCo("pod", every=10, fragments=4),
        "does not divide into 4. Choose an interval that does: `every=12`",
    ),
    "fragments with feedback": (
        lambda: DiLoCo("pod", every=4, fragments=2, exchange=OneBit("pod")),
        "Send codes without feedback",
    ),
    "no axis": (lambda: DiLoCo((), every=3), "takes an axis of the mesh"),
    "an axis twice": (lambda: DiLoCo(("pod", "pod"), every=3), "takes an axis of the mesh"),
    "a momentum of one": (lambda: DiLoCo("pod", momentum=1.0), "momentum=1.0.*below 1"),
    "a rate of zero": (lambda: DiLoCo("pod", learning_rate=0), "learning_rate=0.*above 0"),
    "too elastic": (lambda: ElasticAveraging("pod", every=3, rate=1.5), "rate=1.5"),
    "a meeting in a meeting": (
        lambda: DiLoCo("pod", every=3, exchange=LocalSGD("pod", every=3)),
        "an exchange that sends less",
    ),
    "codes over another axis": (
        lambda: DiLoCo("pod", every=3, exchange=OneBit("data")),
        "Name the same axes in both",
    ),
    "an axis that is not there": (
        lambda: strategy_with(exchange=LocalSGD("rack", every=3)),
        "`rack` is no axis of the mesh",
    ),
    "an axis of the model": (
        lambda: strategy_with(exchange=LocalSGD("model", every=3)),
        "`model` splits no batch",
    ),
    "ZeRO over workers": (
        lambda: strategy_with(zero=sl.Zero(1, axes=("pod",)), exchange=LocalSGD("pod", every=3)),
        "ZeRO would split",
    ),
    "a pipeline": (
        lambda: strategy_with(
            mesh="pod=2,stage=2,data=2,model=1",
            rules=RULES | sl.AxisRules(layers="stage"),
            pipeline=sl.pipeline.OneFOneB(stages=2, microbatches=2),
            exchange=DiLoCo("pod", every=3),
        ),
        "none is cut into stages yet",
    ),
    "state on the host": (
        lambda: strategy_with(offload="optimizer", exchange=DiLoCo("pod", every=3)),
        "stays on its devices",
    ),
    "experts over workers": (
        lambda: strategy_with(
            rules=RULES | sl.AxisRules(experts="pod"), exchange=DiLoCo("pod", every=3)
        ),
        "the rule for `experts` splits arrays over it",
    ),
    "an optimizer that sends": (
        lambda: sl.init(
            make,
            sl.optimizers.onebit_adam(0.1, freeze=2),
            strategy_with(exchange=DiLoCo("pod", every=3)),
        ),
        "send nothing between meetings",
    ),
    "a comparison with one device": (
        lambda: testing.check_step(
            make, ADAM, loss, batch(0), RULES, exchange=DiLoCo("pod", every=3)
        ),
        "do not take the steps of one device",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(name):
    make_it, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make_it()


def test_a_metric_may_not_have_the_name_of_a_step():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=DiLoCo("pod", every=3))

    def named(model, x, rng):
        return loss(model, x, rng), {"met": 1.0}

    with pytest.raises(ValueError, match="The metric `met` is the step's own"):
        run(strategy, 1, loss_fn=named)


@pytest.mark.parametrize(
    "platform",
    [
        "cpu",
        pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
        pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
    ],
)
def test_only_scalars_and_the_meeting_cross_between_workers(platform):
    """Of what crosses the axis of the workers, all but 64 bytes is in the branch of the meeting."""
    mesh = mesh_on(platform, PODS)
    strategy = sl.Strategy(mesh=mesh, rules=RULES, zero=split(2), exchange=DiLoCo("pod", every=3))
    state = sl.init(make, ADAM, strategy, abstract=True)
    step = sl.train_step(loss, strategy)
    compiled = compile_for(mesh, step.lower(state, jax.ShapeDtypeStruct((16, 8), "f4")))
    sizes = [leaf.size for leaf in jax.tree.leaves(state.params)]
    crossing = []
    for one in testing.collectives(compiled, mesh):
        if one.axes is None or "pod" in one.axes:
            crossing.append(one.sent_bytes)
    scalars = [size for size in crossing if size < 64]
    assert sum(scalars) <= 64
    # Both halves of the sum over two pods, of what each device of a pod has of the parameters.
    biggest = 4 * sum(sizes) / 4
    assert sum(crossing) - sum(scalars) <= 1.3 * biggest + 64


GPT = gpt.GPTConfig(layers=2, width=16, heads=2, context=16, vocab=32, hidden=32)
EXPERTS = moe.MoEConfig(layers=2, width=16, heads=2, context=16, vocab=32, hidden=32, experts=4)
WITHIN = {
    "precision": ("data=2,model=2", sl.rules.data | sl.rules.tensor, dict(precision="bf16")),
    "recomputation": ("data=2,model=2", sl.rules.data | sl.rules.tensor, dict(remat="full")),
    "a budget": ("data=2,model=2", sl.rules.data, dict(remat=sl.Remat.budget("1GiB"))),
    "sequences": (
        "data=2,seq=2",
        sl.rules.data | sl.rules.context(axis="seq"),
        dict(zero=split(3)),
    ),
    "fsdp": ("data=2,fsdp=2", sl.rules.fsdp, {}),
    "experts": ("data=2,model=2", sl.rules.experts | sl.rules.tensor, dict(zero=split(1))),
    "frozen": ("data=2,model=2", sl.rules.data, dict(frozen=("embedding",), clip=0.1)),
}


@pytest.mark.representative("fsdp", "sequences")
@pytest.mark.long
@pytest.mark.parametrize("name", WITHIN)
def test_a_worker_steps_as_a_run_alone(name):
    """Two steps of each pod, and of a run on a mesh of one pod with the pod's examples."""
    shape, rules, options = WITHIN[name]
    config, model = (EXPERTS, moe) if name == "experts" else (GPT, gpt)
    make_model = (
        (lambda: moe.MoE(config, rngs=nnx.Rngs(0)))
        if name == "experts"
        else (lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    )
    tokens = np.random.default_rng(0).integers(0, 32, (2, 16, 17))

    def two_steps(mesh, rules, examples, exchange):
        strategy = sl.Strategy(mesh=mesh, rules=rules, exchange=exchange, **options)
        state = sl.init(make_model, ADAM, strategy)
        step, losses = sl.train_step(model.loss, strategy), []
        for number in range(2):
            state, metrics = step(state, {"tokens": jnp.asarray(examples[number])})
            losses.append(float(metrics["loss"]))
        return state, losses

    pods = sl.AxisRules(batch=("pod", *rules.batch_axes))
    apart, losses = two_steps(f"pod=2,{shape}", rules | pods, tokens, LocalSGD("pod", every=5))
    one_pod = sl.make_mesh(shape, devices=jax.devices()[:4])
    tolerance = 2e-2 if name == "precision" else 2e-4
    of_each = []
    for worker in range(2):
        half = tokens[:, 8 * worker : 8 * (worker + 1)]
        alone, found = two_steps(one_pod, rules, half, sl.Exact())
        of_each.append(found)
        for mine, expected in zip(
            jax.tree.leaves(apart.workers.params), jax.tree.leaves(alone.params), strict=True
        ):
            np.testing.assert_allclose(mine[worker], expected, atol=tolerance)
    np.testing.assert_allclose(losses, np.mean(of_each, 0), rtol=tolerance)
