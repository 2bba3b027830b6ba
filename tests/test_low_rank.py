"""PowerSGD and top-k: gradients as factors or as their largest elements, the rest sent later."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from machines import compile_for, mesh_on

import shardlib as sl
from shardlib import testing
from shardlib.collectives import OneBit, Parameter, PowerSGD, TopK
from shardlib.collectives._feedback import matrix_of
from shardlib.collectives._low_rank import start_of

RULES = sl.AxisRules(
    batch=("pod", "data"), embed=None, mlp="model", heads=None, layers=None, size=None
)
NAMES = {"a": ("layers", "embed", "mlp"), "o": ("mlp", "heads", "size"), "b": ("mlp",)}
PODS = "pod=2,data=2,model=2"
LAYERS, RANK, STEPS = 3, 2, 4
OPTIMIZER = optax.sgd(0.3, momentum=0.9)
WORKERS = 2


def values():
    random = np.random.default_rng(0)
    shapes = {"a": (LAYERS, 16, 24), "o": (24, 4, 4), "b": (24,)}
    return {name: 0.3 * random.normal(size=shape).astype("f4") for name, shape in shapes.items()}


def make():
    return sl.annotate({name: jnp.asarray(value) for name, value in values().items()}, NAMES)


def batch(step):
    return np.random.default_rng(step).normal(size=(16, 16)).astype("f4")


def loss(model, x, rng):
    for layer in range(LAYERS):
        x = jnp.tanh(x @ model["a"][layer])[:, :16] + x
    wide = jnp.pad(x, ((0, 0), (0, 8))) + model["b"]
    return jnp.mean((jnp.einsum("be,ehd->bhd", wide, model["o"]) - 1) ** 2)


def run(strategy, steps=STEPS, state=None):
    state = state or sl.init(make, OPTIMIZER, strategy)
    step, losses = sl.train_step(loss, strategy), []
    for number in range(int(state.step), int(state.step) + steps):
        state, metrics = step(state, batch(number))
        losses.append(metrics["loss"].item())
    return state, losses


def split(stage):
    return sl.Zero(stage, small=0)


gradient_of = jax.jit(jax.grad(lambda params, batch: loss(params, batch, None)))
MATRICES = {"a": (LAYERS, 16, 24), "o": (1, 24, 16)}


def simulated(decided):
    """The parameters after some steps, and what each worker is owed.

    `decided(name, number, matrices)` makes the mean of the workers' matrices, and what of each of
    them is in it.
    """
    params = {name: value.astype("f8") for name, value in values().items()}
    trace = {name: 0 * value for name, value in params.items()}
    owed = [{name: np.zeros(shape) for name, shape in MATRICES.items()} for _ in range(WORKERS)]
    for step in range(STEPS):
        gradients = []
        for examples in np.split(batch(step), WORKERS):
            found = gradient_of({name: x.astype("f4") for name, x in params.items()}, examples)
            gradients.append({name: np.asarray(g, "f8") for name, g in found.items()})
        mean = {"b": sum(g["b"] for g in gradients) / WORKERS}
        for number, (name, shape) in enumerate(MATRICES.items()):
            own = []
            for gradient, errors in zip(gradients, owed, strict=True):
                own.append(gradient[name].reshape(shape) + errors[name])
            found, sent = decided(name, number, own)
            mean[name] = found.reshape(params[name].shape)
            for errors, mine, of_mine in zip(owed, own, sent, strict=True):
                errors[name] = mine - of_mine
        for name in params:
            trace[name] = 0.9 * trace[name] + mean[name]
            params[name] = params[name] - 0.3 * trace[name]
    return params, owed


@functools.cache
def power_iterations():
    warm = {}

    def decided(name, number, own):
        columns = jnp.arange(own[0].shape[2], dtype=jnp.uint32)
        if name not in warm:
            start = np.asarray(start_of(number, columns, RANK), "f8")
            warm[name] = np.stack([start] * len(own[0]))
        left = sum(mine @ warm[name] for mine in own) / WORKERS
        left = np.stack([np.linalg.qr(each)[0] for each in left])
        warm[name] = sum(np.swapaxes(mine, 1, 2) @ left for mine in own) / WORKERS
        product = left @ np.swapaxes(warm[name], 1, 2)
        return product, [product] * WORKERS

    return simulated(decided)


MESHES = {
    "two devices of eight": dict(mesh="pod=2,data=1,model=4"),
    "pods": dict(mesh=PODS),
    "pods, stage 2, accumulated": dict(mesh=PODS, zero=split(2), accumulate=2),
    "pods, stage 3": dict(mesh="pod=2,data=4,model=1", zero=split(3)),
    "stage 1": dict(mesh="pod=2,data=2,model=2", zero=split(1)),
}


@pytest.mark.representative("pods, stage 3")
@pytest.mark.long
@pytest.mark.sentinel("pods, stage 2, accumulated")
@pytest.mark.parametrize("name", MESHES)
def test_powersgd_is_the_same_power_iteration_on_every_mesh(name):
    """Whole matrices are factored, however devices of a worker split them."""
    exchange = PowerSGD("pod", rank=RANK)
    state, _ = run(sl.Strategy(rules=RULES, exchange=exchange, **MESHES[name]))
    expected, owed = power_iterations()
    for path, value in expected.items():
        np.testing.assert_allclose(state.params[path], value, atol=1e-4)
    assert sorted(state.errors) == ["a", "o"]
    assert max(np.abs(errors["a"]).max() for errors in owed) > 1e-3


def test_a_gradient_of_that_rank_is_exact():
    """A product of two thin matrices has gradients that factors of their rank hold whole."""

    def thin(model, x, rng):
        return jnp.mean(x[:, :1] * (x @ model["w"])[:, :1] + (x @ model["w"])[:, 1:2])

    def one_step(exchange):
        strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=exchange)
        names = {"w": ("embed", "mlp")}
        state = sl.init(
            lambda: sl.annotate({"w": jnp.ones((16, 24))}, names), optax.sgd(1.0), strategy
        )
        state, _ = sl.train_step(thin, strategy)(state, batch(0))
        return np.asarray(state.params["w"])

    found = one_step(PowerSGD("pod", rank=RANK, feedback=False))
    np.testing.assert_allclose(found, one_step(sl.Exact()), atol=1e-4)


def test_a_gradient_of_zeros_leaves_nothing_behind():
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=PowerSGD("pod", rank=RANK))
    state = sl.init(make, OPTIMIZER, strategy)
    step = sl.train_step(lambda model, x, rng: 0.0 * loss(model, x, rng), strategy)
    state, metrics = step(state, batch(0))
    chex.assert_trees_all_equal(jax.device_get(state.params), values())
    for leaf in jax.tree.leaves(jax.device_get((state.errors, metrics["grad_norm"]))):
        assert not np.any(leaf)
    # And the next step begins anew.
    state, metrics = sl.train_step(loss, strategy)(state, batch(0))
    assert float(metrics["grad_norm"]) > 0


@functools.cache
def largest(part):
    def decided(name, number, own):
        sent = []
        for mine in own:
            flat = mine.reshape(-1)
            count = max(1, round(part * flat.size))
            places = np.argsort(-np.abs(flat))[:count]
            kept = np.zeros_like(flat)
            kept[places] = flat[places]
            sent.append(kept.reshape(mine.shape))
        return sum(sent) / WORKERS, sent

    return simulated(decided)


@pytest.mark.parametrize("mesh", ["pod=2,data=4,model=1"])
def test_topk_sends_the_largest_elements_and_owes_the_rest(mesh):
    exchange = TopK("pod", part=0.1, exact=("b",))
    state, _ = run(sl.Strategy(mesh=mesh, rules=RULES, exchange=exchange))
    expected, owed = largest(0.1)
    for path, value in expected.items():
        np.testing.assert_allclose(state.params[path], value, atol=1e-5)
    # Devices of a worker that hold the same have the same errors.
    for path, shape in MATRICES.items():
        errors = np.asarray(state.errors[path].error).reshape(2, 4, *shape)
        for worker in range(WORKERS):
            for device in range(4):
                np.testing.assert_allclose(errors[worker, device], owed[worker][path], atol=1e-5)


@pytest.mark.long
def test_ranks_above_that_of_a_gradient_are_no_noise():
    """Of factors with sixteen columns all but a few are of nothing, and the step is exact."""
    strategy = strategy_with(PowerSGD("pod", ranks=(("a", 16), ("o", 16)), feedback=False))
    state, _ = run(strategy, 1)
    exact, _ = run(strategy_with(sl.Exact()), 1)
    for path in NAMES:
        np.testing.assert_allclose(state.params[path], exact.params[path], atol=1e-4)


@pytest.mark.parametrize("exchange", [PowerSGD("pod", feedback=False), TopK("pod", part=0.1)])
def test_one_worker_leaves_nothing_out(exchange):
    one = sl.Strategy(mesh="pod=1,data=4,model=2", rules=RULES, exchange=exchange)
    state, _ = run(one, 2)
    exact, _ = run(sl.Strategy(mesh="pod=1,data=4,model=2", rules=RULES), 2)
    chex.assert_trees_all_close(
        jax.device_get(state.params), jax.device_get(exact.params), atol=1e-6
    )


def test_factors_are_float32_where_wider_numbers_are_allowed():
    with jax.enable_x64(True):
        state, _ = run(strategy_with(PowerSGD("pod", rank=RANK)), 2)
        for leaf in jax.tree.leaves(state.errors):
            assert leaf.dtype == jnp.float32


EXCHANGES = {
    "factors": PowerSGD("pod", rank=RANK),
    "factors without feedback": PowerSGD("pod", rank=RANK, feedback=False),
    "largest": TopK("pod", part=0.1),
}


@pytest.mark.long("factors without feedback", "largest")
@pytest.mark.parametrize("name", EXCHANGES)
def test_a_run_goes_on_bit_for_bit_from_a_checkpoint(name, tmp_path):
    strategy = sl.Strategy(mesh=PODS, rules=RULES, zero=split(2), exchange=EXCHANGES[name])
    state, _ = run(strategy, 2)
    checkpoints = sl.Checkpoints(tmp_path)
    checkpoints.save(state)
    checkpoints.wait()
    without, _ = run(strategy, 2, state)
    restored = checkpoints.restore(sl.init(make, OPTIMIZER, strategy)).state
    after, _ = run(strategy, 2, restored)
    chex.assert_trees_all_equal(
        jax.device_get(without.replaced(key=0)), jax.device_get(after.replaced(key=0))
    )


@pytest.mark.long("pod=4,data=2,model=1")
@pytest.mark.parametrize("mesh", ["pod=2,data=1,model=4", "pod=4,data=2,model=1"])
def test_errors_and_factors_go_to_another_mesh(mesh, tmp_path):
    """As many workers have what they had; others share what those were owed."""
    exchange = PowerSGD("pod", rank=RANK)
    strategy = sl.Strategy(mesh=PODS, rules=RULES, zero=split(2), exchange=exchange)
    state, _ = run(strategy, 3)
    checkpoints = sl.Checkpoints(tmp_path)
    checkpoints.save(state)
    checkpoints.wait()
    _, expected = run(strategy, 2, state)
    other = sl.Strategy(mesh=mesh, rules=RULES, exchange=exchange)
    restored = checkpoints.restore(sl.init(make, OPTIMIZER, other)).state
    _, found = run(other, 2, restored)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


POWER = functools.partial(PowerSGD, "pod", rank=RANK)
LARGEST = TopK("pod", exact=("b",))
EXACTLY = "`errors/a/error` is only in the checkpoint"
# Before, after, and what is there of each parameter then: as it was, zeros, or a refusal.
CHANGES = {
    "another rank": (POWER(), PowerSGD("pod", rank=1), {"error": 0.5, "warm": 0}),
    "no feedback before": (POWER(feedback=False), POWER(), {"error": 0, "warm": 0.5}),
    "no factors before": (LARGEST, POWER(), {"error": 0.5, "warm": 0}),
    "no factors after": (POWER(), LARGEST, {"error": 0.5}),
    "factors alone, then none": (POWER(feedback=False), sl.Exact(), None),
    "factors alone, then codes": (POWER(feedback=False), OneBit("pod"), {"worker": 0, "server": 0}),
    "no feedback after": (POWER(), POWER(feedback=False), EXACTLY),
    "exactly after": (POWER(), POWER(exact=("a",)), EXACTLY),
    "codes after": (POWER(), OneBit("pod"), EXACTLY),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_owed_goes_to_other_exchanges_and_what_is_not_begins_anew(name, tmp_path):
    before, after, expected = CHANGES[name]
    state = sl.init(make, OPTIMIZER, sl.Strategy(mesh=PODS, rules=RULES, exchange=before))
    errors = jax.tree.map(lambda x: jnp.full_like(x, 0.5), state.errors)
    checkpoints = sl.Checkpoints(tmp_path)
    checkpoints.save(state.replaced(errors=errors))
    checkpoints.wait()
    # With other workers too, and other shards.
    mesh = PODS if name != "another rank" else "pod=4,data=2,model=1"
    like = sl.init(make, OPTIMIZER, sl.Strategy(mesh=mesh, rules=RULES, exchange=after))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            checkpoints.restore(like)
        return
    restored = checkpoints.restore(like).state
    chex.assert_trees_all_equal_shapes(restored.errors, like.errors)
    for path in like.errors:
        for field, value in expected.items():
            assert np.all(np.asarray(getattr(restored.errors[path], field)) == value)
    assert bool(restored.errors) == (expected is not None)


@pytest.mark.long
def test_parameters_that_were_exact_before_are_owed_nothing(tmp_path):
    """Beside one that is owed, under factors and under codes."""
    for before, after in (
        (POWER(exact=("o",)), POWER()),
        (OneBit("pod", exact=("o",)), OneBit("pod")),
    ):
        state = sl.init(make, OPTIMIZER, sl.Strategy(mesh=PODS, rules=RULES, exchange=before))
        errors = jax.tree.map(lambda x: jnp.full_like(x, 0.5), state.errors)
        checkpoints = sl.Checkpoints(tmp_path / type(before).__name__)
        checkpoints.save(state.replaced(errors=errors))
        checkpoints.wait()
        like = sl.init(make, OPTIMIZER, sl.Strategy(mesh=PODS, rules=RULES, exchange=after))
        found = checkpoints.restore(like).state.errors
        for leaf in jax.tree.leaves(found["o"]):
            assert not np.any(leaf)
        for leaf in jax.tree.leaves(found["a"]):
            assert np.any(leaf)


def test_a_matrix_is_as_square_as_its_dims_allow():
    def matrix(shape, stacked=0):
        return matrix_of(Parameter("w", shape, jax.P(), (), jax.P(), stacked=stacked))

    assert matrix((8,)) is None
    assert matrix((4, 8), stacked=1) is None
    assert matrix((64, 8, 8)) == (0, 1)
    assert matrix((8, 8, 64)) == (0, 2)
    assert matrix((4, 64, 8, 8), stacked=1) == (1, 2)
    assert matrix((2, 3, 5, 7), stacked=2) == (2, 3)
    assert matrix((1, 64)) is None


REFUSED = {
    "a rank of zero": (lambda: PowerSGD("pod", rank=0), "rank=0.*at least 1"),
    "ranks that are no pairs": (lambda: PowerSGD("pod", ranks=("a", 2)), "pairs of a pattern"),
    "a rank above the matrix": (
        lambda: run(strategy_with(PowerSGD("pod", ranks=(("a", 17),))), 1),
        "asks for rank 17 of `a`.*at most rank 16",
    ),
    "a rank of a vector": (
        lambda: run(strategy_with(PowerSGD("pod", ranks=(("b", 1),))), 1),
        "asks for rank 1 of `b`.*no matrix at all",
    ),
    "ranks in a list": (lambda: PowerSGD("pod", ranks=[("a", 2)]), "a tuple of pairs"),
    "an optimizer that says what is sent": (
        lambda: sl.init(
            make, sl.optimizers.onebit_adam(0.1, freeze=2), strategy_with(PowerSGD("pod"))
        ),
        "does not keep it so",
    ),
    "a pattern of nothing": (
        lambda: run(strategy_with(PowerSGD("pod", ranks=(("nothing", 2),))), 1),
        "nothing",
    ),
    "a rank above all matrices": (
        lambda: run(strategy_with(PowerSGD("pod", rank=100)), 1),
        "has no matrix of which factors of rank 100 would be smaller",
    ),
    "all of it": (lambda: TopK("pod", part=1.0), "part=1.0.*below 1"),
    "none of it": (lambda: TopK("pod", part=0), "part=0.*above 0"),
    "no axis": (lambda: TopK((), part=0.1), "takes an axis of the mesh"),
}


def strategy_with(exchange):
    return sl.Strategy(mesh=PODS, rules=RULES, exchange=exchange)


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_go_together_is_refused(name):
    make_it, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make_it()


@pytest.mark.parametrize(
    "platform",
    [
        "cpu",
        pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
        pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
    ],
)
def test_factors_alone_cross_between_pods(platform):
    """Of each matrix, the rows and columns times the rank, in two sums over workers."""
    mesh = mesh_on(platform, PODS)
    exchange = PowerSGD("pod", rank=RANK, exact=("b",))
    strategy = sl.Strategy(mesh=mesh, rules=RULES, exchange=exchange)
    state = sl.init(make, OPTIMIZER, strategy, abstract=True)
    step = sl.train_step(loss, strategy)
    compiled = compile_for(mesh, step.lower(state, jax.ShapeDtypeStruct((16, 16), "f4")))
    crossing = sum(
        one.sent_bytes
        for one in testing.collectives(compiled, mesh)
        if one.axes is None or "pod" in one.axes
    )
    whole = sum(4 * leaf.size for leaf in jax.tree.leaves(state.params))
    factors = sum(4 * RANK * count * (n + m) for count, n, m in MATRICES.values())
    # The vector is whole, and half of it on each device, as all devices of a pod send a part.
    assert crossing <= factors + 4 * 24 + 512
    assert crossing < whole / 3


@pytest.mark.tpu_compiler
def test_topk_is_gathered_on_tpus_and_not_summed():
    """A part that fills no whole tiles would be sent as a sum of everyone's, twice the bytes."""
    mesh = mesh_on("v5e:2x4", "data=8")
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, exchange=TopK("data", part=0.01))
    make_large = lambda: {"w": jnp.zeros((1024, 1024)), "v": jnp.zeros((1024, 512))}
    state = sl.init(make_large, optax.sgd(0.1), strategy, abstract=True)
    step = sl.train_step(
        lambda model, x, rng: jnp.mean((x @ model["w"] @ model["v"]) ** 2), strategy
    )
    lowered = step.lower(state, jax.ShapeDtypeStruct((16, 1024), "float32"))
    sent = 0
    for one in testing.collectives(compile_for(mesh, lowered), mesh):
        sent += one.total_bytes if one.sent_bytes > 1024 else 0
    chosen = sum(strategy.exchange.count(size) for size in (2**20, 2**19))
    # A value and a place for each of the seven others; at most a tile is filled up.
    assert 7 * 8 * chosen <= sent <= 7 * 8 * (chosen + 1024)
