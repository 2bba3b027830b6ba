"""Workers around a server: asynchronous SGD, held to a plain loop over workers on one device."""

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
from models import gpt
from shardlib import testing
from shardlib.collectives import DiLoCo, LocalSGD, ParameterServer

RULES = sl.AxisRules(batch=("pod", "data"), embed=None, mlp="model")
NAMES = {"up": ("embed", "mlp"), "down": ("mlp", "embed"), "bias": (None,)}
PODS = "pod=2,data=2,model=2"
ADAM = optax.adam(1e-2)
STEPS = 4


def values(dtype="f4"):
    random = np.random.default_rng(0)
    shapes = {"up": (8, 16), "down": (16, 8), "bias": (5,)}
    return {name: random.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def make(dtype="f4"):
    return sl.annotate({name: jnp.asarray(value) for name, value in values(dtype).items()}, NAMES)


def loss(model, batch, rng):
    y = batch + jnp.tanh(batch @ model["up"]) @ model["down"]
    return jnp.mean((y - 1) ** 2) + jnp.mean((y[:, :5] - model["bias"]) ** 2)


def batch(step, dtype="f4"):
    return np.random.default_rng(step).normal(size=(16, 8)).astype(dtype)


def run(strategy, steps=STEPS, state=None, optimizer=ADAM, make=make, dtype="f4"):
    state = state or sl.init(make, optimizer, strategy)
    step, losses = sl.train_step(loss, strategy), []
    for number in range(int(state.step), int(state.step) + steps):
        state, metrics = step(state, batch(number, dtype))
        losses.append(metrics["loss"].item())
    return state, losses


gradient_of = jax.jit(jax.value_and_grad(lambda params, batch: loss(params, batch, None)))


@functools.cache
def simulated(workers, optimizer=ADAM, dtype="f4", clip=None):
    """The server's parameters, those of each worker, and the losses."""

    @jax.jit
    def updated(server, state, gradient):
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(server, updates), state

    server, own = values(dtype), [values(dtype)] * workers
    served, losses = optimizer.init(server), []
    for step in range(STEPS):
        examples = np.split(batch(step, dtype), workers)
        found = [gradient_of(mine, some) for mine, some in zip(own, examples, strict=True)]
        losses.append(np.mean([value for value, _ in found]))
        for worker, (_, gradient) in enumerate(found):
            if clip is not None:
                scale = min(1, clip / optax.tree.norm(gradient))
                gradient = jax.tree.map(lambda g, scale=scale: g * scale, gradient)
            server, served = updated(server, served, gradient)
            own[worker] = server
    return server, own, losses


def split(stage):
    return sl.Zero(stage, small=0)


SERVERS = {
    "every device": dict(mesh="pod=1,data=8,model=1", exchange=ParameterServer("data")),
    "every device, split": dict(
        mesh="pod=1,data=8,model=1", exchange=ParameterServer("data"), zero=split(0)
    ),
    "pods, stage 0": dict(mesh=PODS, exchange=ParameterServer("pod"), zero=split(0)),
    "pods, stage 1": dict(mesh=PODS, exchange=ParameterServer("pod"), zero=split(1)),
    "pods, stage 3, clipped": dict(
        mesh=PODS, exchange=ParameterServer("pod"), zero=split(3), clip=0.5
    ),
    "inner axis, accumulated": dict(
        mesh=PODS, exchange=ParameterServer("data"), zero=split(2), accumulate=2
    ),
    "both axes": dict(mesh=PODS, exchange=ParameterServer(("pod", "data")), zero=split(0)),
    "both, the other way": dict(mesh=PODS, exchange=ParameterServer(("data", "pod"))),
    "one worker": dict(mesh="pod=1,data=4,model=2", exchange=ParameterServer("pod")),
}


@pytest.mark.representative("every device, split", "pods, stage 1")
@pytest.mark.sentinel("pods, stage 3, clipped", "both axes")
@pytest.mark.parametrize("name", SERVERS)
def test_it_is_as_a_plain_loop_over_workers(name):
    strategy = sl.Strategy(rules=RULES, **SERVERS[name])
    state, losses = run(strategy)
    count = state.layout.workers
    server, own, expected = simulated(count, clip=strategy.clip)
    close = functools.partial(chex.assert_trees_all_close, rtol=5e-5, atol=5e-6)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    close(jax.device_get(state.params), server)
    # The order of the axes says which worker is which.
    for worker in range(count):
        close(
            jax.tree.map(lambda x, w=worker: x[w], jax.device_get(state.workers.params)),
            own[worker],
        )
    assert state.workers.versions.tolist() == list(
        range(count * STEPS - count + 1, count * STEPS + 1)
    )
    assert state.opt_state[0].count == count * STEPS


def test_it_is_bit_for_bit_that_loop_in_float64():
    """Eight workers of a device each, so that a worker computes what the loop does.

    Rates are powers of two: a compiler may or may not round a product before it is added.
    """
    with jax.enable_x64(True):
        optimizer = optax.sgd(2.0**-7, momentum=0.5)
        strategy = sl.Strategy(
            mesh="pod=1,data=8,model=1",
            rules=RULES,
            exchange=ParameterServer("data"),
            zero=split(0),
        )
        state, losses = run(strategy, optimizer=optimizer, make=lambda: make("f8"), dtype="f8")
        server, own, expected = simulated(8, optimizer, "f8")
        assert state.params["up"].dtype == np.float64
        chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(server))
        for worker in range(8):
            mine = jax.tree.map(lambda x, w=worker: x[w], jax.device_get(state.workers.params))
            chex.assert_trees_all_equal(mine, jax.device_get(own[worker]))
        np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_the_server_is_split_over_workers_and_these_have_whole_parameters():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=ParameterServer("pod"), zero=split(1))
    state = sl.init(make, ADAM, strategy)
    assert state.params["up"].sharding.spec == jax.P(("data", "pod"), "model")
    assert state.opt_state[0].mu["up"].sharding.spec == jax.P(("data", "pod"), "model")
    assert state.workers.params["up"].sharding.spec == jax.P("pod", "data", "model")
    assert state.workers.opt_state == ()
    # Five numbers do not divide by two: each device has them all.
    assert state.params["bias"].sharding.is_fully_replicated


def test_an_evaluation_and_an_export_are_of_the_server(tmp_path):
    strategy = sl.Strategy(
        mesh="pod=1,data=8,model=1", rules=RULES, exchange=ParameterServer("data"), zero=split(0)
    )
    state, _ = run(strategy, 2)
    server = jax.device_get(state.params)
    chex.assert_trees_all_equal(jax.device_get(state.model), server)
    found = sl.evaluation(loss, strategy)(state, [batch(0)])
    np.testing.assert_allclose(found["loss"], loss(server, batch(0), None), rtol=1e-5)
    given = state.with_weights(values())
    for name, value in values().items():
        np.testing.assert_array_equal(given.params[name], value)
        np.testing.assert_array_equal(given.workers.params[name][5], value)


def test_a_gradient_that_is_not_finite_is_no_update():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=ParameterServer(("pod", "data")))
    state = sl.init(make, ADAM, strategy)
    bad = batch(0)
    bad[4] = np.nan
    state, metrics = sl.train_step(loss, strategy)(state, bad)
    assert state.nonfinite == 1
    assert metrics["first_nonfinite"] == 0
    assert state.workers.versions.tolist() == [1, 1, 2, 3]
    assert state.opt_state[0].count == 3
    # The second worker goes on from what the first has left.
    first, second = state.workers.params["up"][:2]
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(state.params["up"]).all()


def test_an_update_that_is_counted_and_not_skipped_is_an_update():
    exchange = ParameterServer(("pod", "data"))
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=exchange, nonfinite="count")
    bad = batch(0)
    bad[4] = np.nan
    state, _ = sl.train_step(loss, strategy)(sl.init(make, ADAM, strategy), bad)
    assert state.nonfinite == 1
    assert state.workers.versions.tolist() == [1, 2, 3, 4]
    assert state.opt_state[0].count == 4


class Statistics(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.down = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.norm(x))


def test_workers_have_statistics_of_their_own():
    mesh = sl.make_mesh("data=4", devices=jax.devices()[:4])
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, exchange=ParameterServer("data"))
    state = sl.init(lambda: Statistics(nnx.Rngs(0)), ADAM, strategy)
    step = sl.train_step(lambda model, x, rng: jnp.mean(model(x) ** 2), strategy)
    x = batch(0)
    state, _ = step(state, x)
    means = dict(jax.tree.leaves_with_path(state.workers.rest))
    (mean,) = [leaf for path, leaf in means.items() if "mean" in jax.tree_util.keystr(path)]
    for worker, examples in enumerate(np.split(x, 4)):
        np.testing.assert_allclose(mean[worker], 0.01 * examples.mean(0), rtol=1e-5, atol=1e-7)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of four workers after three steps, in a checkpoint, and after five."""
    folder = tmp_path_factory.mktemp("server")
    strategy = sl.Strategy(
        mesh="pod=4,data=1,model=2", rules=RULES, exchange=ParameterServer("pod"), zero=split(0)
    )
    with sl.Checkpoints(folder) as checkpoints:
        state, _ = run(strategy, 3)
        checkpoints.save(state)
        checkpoints.wait()
        before = jax.device_get((state.params, state.opt_state, state.workers))
        after, _ = run(strategy, 2, state)
        yield checkpoints, strategy, before, after


def restored(checkpoints, strategy):
    return checkpoints.restore(sl.init(make, ADAM, strategy, abstract=True)).state


def test_it_goes_on_bit_for_bit_from_a_checkpoint(stopped):
    checkpoints, strategy, _, after = stopped
    state, _ = run(strategy, 2, restored(checkpoints, strategy))
    found, expected = (jax.device_get(one.replaced(key=0)) for one in (state, after))
    chex.assert_trees_all_equal(found, expected)


OTHERS = {
    "other workers": dict(mesh=PODS, exchange=ParameterServer("pod"), zero=split(0)),
    "no workers": dict(mesh=PODS, zero=split(1)),
    "workers that meet": dict(mesh=PODS, exchange=DiLoCo("pod", every=2)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_server_has_goes_on_elsewhere(name, stopped):
    checkpoints, _, (params, opt_state, _), _ = stopped
    state = restored(checkpoints, sl.Strategy(rules=RULES, **OTHERS[name]))
    chex.assert_trees_all_equal(jax.device_get(state.params), params)
    if state.workers is not None:
        for worker in range(2):
            own = jax.tree.map(lambda x, w=worker: x[w], jax.device_get(state.workers.params))
            chex.assert_trees_all_equal(own, params)
    if name == "other workers":
        assert state.workers.versions.tolist() == [12, 12]
    if name == "workers that meet":
        first = jax.tree.map(lambda x: x[0], jax.device_get(state.workers.opt_state))
        chex.assert_trees_all_equal(first, opt_state)
    else:
        chex.assert_trees_all_equal(jax.device_get(state.opt_state), opt_state)
    run(state.layout.strategy, 1, state)


@pytest.mark.parametrize("exchange", [sl.Exact(), LocalSGD("pod", every=2)])
def test_a_server_goes_on_from_other_runs(exchange, tmp_path):
    state, _ = run(sl.Strategy(mesh=PODS, rules=RULES, exchange=exchange, zero=split(1)), 3)
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        strategy = sl.Strategy(
            mesh="pod=4,data=1,model=2", rules=RULES, exchange=ParameterServer("pod"), zero=split(0)
        )
        served = restored(checkpoints, strategy)
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-6, atol=1e-7)
    close(jax.device_get(served.params), jax.device_get(state.model))
    for worker in range(4):
        own = jax.tree.map(lambda x, w=worker: x[w], jax.device_get(served.workers.params))
        close(own, jax.device_get(state.model))
    assert served.workers.versions.tolist() == [0] * 4
    assert served.opt_state[0].count == 3
    run(strategy, 1, served)


@pytest.mark.long
def test_fit_trains_around_a_server_and_resumes(tmp_path):
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=ParameterServer("pod"), zero=split(0))
    batches = [batch(number) for number in range(4)]

    def fit(steps):
        state = sl.init(make, ADAM, strategy)
        step, loop = sl.train_step(loss, strategy), sl.Loop(steps=steps, save_every=2)
        quiet = sl.Records(sinks=[])
        return sl.fit(step, state, batches, loop, folder=tmp_path, records=quiet)

    fit(2)
    state = fit(4)
    expected, _ = run(strategy, 4)
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(expected.params))


@pytest.mark.long("cpu")
@pytest.mark.parametrize(
    "platform",
    [
        "cpu",
        pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
        pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
    ],
)
def test_gradients_go_to_the_server_and_parameters_come_back_once(platform):
    """Each worker sends its gradient but for its own part, and is sent as much."""
    mesh = mesh_on(platform, "data=8")
    strategy = sl.Strategy(
        mesh=mesh, rules=sl.rules.data, zero=split(0), exchange=ParameterServer("data")
    )
    config = gpt.GPTConfig(layers=2, width=64, heads=2, context=16, vocab=64, hidden=128)
    state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), ADAM, strategy, abstract=True)
    step = sl.train_step(gpt.loss, strategy)
    tokens = {"tokens": jax.ShapeDtypeStruct((16, 17), "int32")}
    compiled = compile_for(mesh, step.lower(state, tokens))
    elements = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    sent = [one.total_bytes for one in testing.collectives(compiled, mesh)]
    large = sum(size for size in sent if size > 1024)
    assert large <= 1.02 * 2 * 4 * elements * 7 / 8
    assert large >= 0.98 * 2 * 4 * elements * 7 / 8
    assert sum(sent) - large <= 4096


def test_devices_of_a_worker_that_hold_the_same_send_a_share_each():
    """Four of them share a matrix whose halves do not divide by four."""
    found = []
    for devices in (1, 4):
        strategy = sl.Strategy(
            mesh=sl.make_mesh(f"pod=2,data={devices}", devices=jax.devices()[: 2 * devices]),
            rules=sl.AxisRules(batch=("pod", "data")),
            zero=split(0),
            exchange=ParameterServer("pod"),
        )
        state = sl.init(lambda: {"w": jnp.ones((62, 33))}, ADAM, strategy)
        step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1) ** 2), strategy)
        x = np.random.default_rng(0).normal(size=(16, 62)).astype("f4")
        sent = sl.plan(step, state, x).collectives
        between = [one for one in sent if one.axes == ("pod",) and one.sent_bytes > 64]
        # The other half of the gradient, and as much of parameters.
        assert [one.sent_bytes for one in between] == [4 * -(-31 * 33 // devices)] * 2
        for _ in range(2):
            state, _ = step(state, x)
        found.append(jax.device_get((state.params, state.workers.params)))
    chex.assert_trees_all_close(*found, rtol=1e-5, atol=1e-6)


REFUSED = {
    "an optimizer that sends": (
        dict(exchange=ParameterServer("pod")),
        sl.optimizers.onebit_adam(1e-3, freeze=2),
        "says itself what workers send",
    ),
    "a pipeline": (
        dict(exchange=ParameterServer("pod"), pipeline=sl.pipeline.GPipe(stages=2, microbatches=2)),
        ADAM,
        "stages of a pipeline",
    ),
    "offload": (dict(exchange=ParameterServer("pod"), offload="optimizer"), ADAM, "offload"),
    "ZeRO over workers": (
        dict(exchange=ParameterServer("pod"), zero=sl.Zero(1, axes=("pod", "data"))),
        ADAM,
        "pod",
    ),
    "no axis": (dict(exchange=ParameterServer("pods")), ADAM, "is no axis of the mesh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(name):
    options, optimizer, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        sl.init(make, optimizer, sl.Strategy(mesh=PODS, rules=RULES, **options))
