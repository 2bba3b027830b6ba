"""What a step and its state have to agree on, and what a step that is skipped leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl

X = np.random.default_rng(0).normal(size=(16, 4)).astype("f")


def strategy(**options):
    return sl.Strategy(mesh="data=8", rules=sl.rules.data, **options)


def loss(model, x, rng):
    x = x.astype(model["w"].dtype)
    return jnp.mean((x @ model["w"] - x.sum(1)) ** 2)


def stepped(of_state, of_step, loss=loss, batch=X, w=None):
    make = lambda: {"w": jnp.arange(4.0) * 0.1 if w is None else w}
    state = sl.init(make, optax.sgd(0.1), of_state)
    return sl.train_step(loss, of_step)(state, batch)


@pytest.mark.parametrize(
    "options",
    [
        {"manual": ()},
        {"frozen": ("w",)},
        {"zero": sl.Zero(3, small=0)},
        {"offload": "optimizer"},
        {"draws": "by_mesh"},
    ],
    ids=str,
)
def test_a_state_of_another_strategy_is_refused(options):
    with pytest.raises(ValueError, match="another strategy than the step's|Use one strategy"):
        stepped(strategy(), strategy(**options))


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"precision": "bf16"}, {"clip": 1e-6}])
def test_what_a_state_does_not_depend_on_is_that_of_the_step(options):
    expected, of_both = stepped(strategy(**options), strategy(**options))
    found, of_step = stepped(strategy(), strategy(**options))
    np.testing.assert_array_equal(found.params["w"], expected.params["w"])
    assert of_step["grad_norm"] == of_both["grad_norm"]


def test_a_server_clips_as_the_step_says():
    exchange = sl.collectives.ParameterServer("data")
    clipped = strategy(exchange=exchange, clip=1e-6)
    found, _ = stepped(strategy(exchange=exchange), clipped)
    expected, _ = stepped(clipped, clipped)
    np.testing.assert_array_equal(found.params["w"], expected.params["w"])


def test_patterns_of_what_is_kept_are_those_of_the_step():
    misspelt = strategy(precision=sl.Precision("bf16", keep=("typo.*",)))
    with pytest.raises(ValueError, match="`typo.*` matches no parameter. The paths are: w"):
        stepped(strategy(), misspelt)
    state = sl.init(lambda: {"w": jnp.ones(4)}, None, strategy())
    with pytest.raises(ValueError, match="`typo.*` matches no parameter"):
        sl.evaluation(loss, misspelt)(state, [X])


def test_a_state_without_values_is_refused():
    make = lambda: {"w": jnp.ones(4)}
    abstract = sl.init(make, optax.sgd(0.1), strategy(), abstract=True)
    measure = sl.evaluation(loss, strategy())
    for call in (lambda: measure(abstract, [X]), lambda: abstract.with_weights(make())):
        with pytest.raises(ValueError, match="abstract, of shapes alone: make it by `sl.init`"):
            call()
    state = sl.init(make, None, strategy())
    with pytest.raises(ValueError, match="The batch has no values, but shapes alone"):
        measure(state, [jax.ShapeDtypeStruct((16, 4), np.float32)])
    replaced = sl.init(make, optax.sgd(0.1), strategy())
    replaced.step.delete()
    for call in (lambda: measure(replaced, [X]), lambda: replaced.with_weights(make())):
        with pytest.raises(ValueError, match="through a step already.*the new one"):
            call()


def test_a_mean_over_nothing_adds_nothing():
    batch = {"x": X, "a": np.ones(16, "f"), "b": np.float32(np.arange(16) % 2)}

    def both(model, batch, rng):
        error = (batch["x"] @ model["w"]) ** 2
        first = sl.weighted_mean((error * batch["a"]).sum(), batch["a"].sum())
        return first + 0.5 * sl.weighted_mean((error * batch["b"]).sum(), batch["b"].sum())

    whole, told = stepped(strategy(), strategy(), both, batch)
    # Each device has two examples, one of which weighs nothing in the second mean.
    parts, in_parts = stepped(strategy(), strategy(accumulate=2), both, batch)
    assert np.isfinite(in_parts["loss"]) and not parts.nonfinite and not whole.nonfinite
    assert np.isfinite(told["loss"])


def test_means_are_summed_scaled_and_subtracted():
    def several(model, batch, rng):
        error, number = (batch @ model["w"] - 1) ** 2, batch.shape[0]
        mean = sl.weighted_mean(error.sum(), number)
        penalty = sl.weighted_mean(jnp.sum(model["w"] ** 2) * number, number)
        return sum([mean / 2, 0.1 * penalty, -mean]) + 0.0 - 2 * penalty

    _, metrics = stepped(strategy(), strategy(), several)
    w = np.arange(4) * np.float32(0.1)
    expected = -0.5 * np.mean((X @ w - 1) ** 2) - 1.9 * np.sum(w**2)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("term", "said"),
    [
        (lambda mean, x: mean + x, r"\+ other.*penalty.*sl.weighted_mean.term \* weight, weight"),
        (lambda mean, x: x + mean, r"\+ other.*penalty.*sl.weighted_mean.term \* weight, weight"),
        (lambda mean, x: 1.0 + mean, r"takes another `weighted_mean`; got 1.0"),
        (lambda mean, x: np.float32(1) + mean, r"takes another `weighted_mean`; got"),
        (lambda mean, x: mean - x, r"- other.*penalty"),
        (lambda mean, x: 1.0 - mean, r"- other.*penalty"),
        (lambda mean, x: mean * mean, "Multiply or divide a mean by a number"),
        (lambda mean, x: mean / mean, "Multiply or divide a mean by a number"),
        (lambda mean, x: 1 / mean, "Multiply or divide a mean by a number"),
    ],
)
def test_what_is_no_mean_is_not_added_to_one(term, said):
    with pytest.raises(ValueError, match=said):
        term(sl.weighted_mean(jnp.float32(6.0), 3), jnp.float32(1.0))


def test_a_number_is_not_gathered():
    largest = lambda model, x, rng: sl.gather_batch((x @ model["w"]).max()).max()
    said = r"gather_batch\(x=.*examples along dim 0.*`x.max\(\)\[None\]`"
    with pytest.raises(ValueError, match=said):
        stepped(strategy(), strategy(), largest)
    with pytest.raises(ValueError, match=said):
        sl.gather_batch(jnp.float32(1))


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (lambda: optax.contrib.sophia(0.1), "The optimizer wants obj_fn, which a step does not"),
        (
            lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
            "The optimizer wants grad_fn, which a step does not",
        ),
        (
            lambda: optax.lookahead(optax.sgd(0.1), 2, 0.5),
            "wants parameters in a class of its own, with an attribute `fast`",
        ),
        (
            lambda: optax.GradientTransformation(lambda params: params.slow, None),
            r"`optimizer.init\(params\)`.*failed, AttributeError: .*no attribute 'slow'",
        ),
    ],
    ids=["sophia", "sam", "lookahead", "init"],
)
def test_optimizers_that_want_what_a_step_lacks_are_refused(optimizer, said):
    with pytest.raises(ValueError, match=said):
        state = sl.init(lambda: {"w": jnp.ones(4)}, optimizer(), strategy(), abstract=True)
        sl.train_step(loss, strategy()).trace(state, X)


@pytest.mark.parametrize("of_state", [{}, {"exchange": sl.collectives.ParameterServer("data")}])
def test_statistics_of_a_batch_that_is_skipped_are_left_out(of_state):
    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones(4))
            self.mean = nnx.BatchStat(jnp.zeros(4))

    def with_mean(model, x, rng):
        model.mean.set_value(0.9 * model.mean[...] + 0.1 * sl.batch_mean(x))
        return jnp.mean((x @ model.w[...]) ** 2)

    state = sl.init(Model, optax.sgd(0.01), strategy(**of_state))
    step = sl.train_step(with_mean, strategy(**of_state))
    bad = X.copy()
    bad[:] = np.nan
    state, _ = step(state, X)
    before = jax.device_get(statistics_of(state))
    state, _ = step(state, bad)
    assert state.nonfinite and before
    for old, new in zip(before, jax.device_get(statistics_of(state)), strict=True):
        assert np.any(old)
        np.testing.assert_array_equal(old, new)


def statistics_of(state):
    return jax.tree.leaves(state.rest if state.workers is None else state.workers.rest)


def test_gradients_are_divided_by_the_weight_in_their_own_dtype():
    x = np.ones((24, 4))
    mean = lambda model, x, rng: jnp.mean(x @ model["w"])
    with jax.enable_x64(True):
        w = jnp.ones(4, jnp.float64)
        state, _ = stepped(strategy(), strategy(), mean, x, w)
        np.testing.assert_allclose(state.params["w"], 0.9, rtol=1e-15)
    narrow = strategy(precision=sl.Precision(reduce="bf16"))
    state, _ = stepped(narrow, narrow, mean, x.astype("f"), jnp.ones(4))
    np.testing.assert_array_equal(state.params["w"], np.float32(1) - np.float32(0.1))


def test_means_norms_and_gradients_of_float64_are_float64():
    draws = np.random.default_rng(1)
    x, weight, w = draws.normal(size=(16, 4)), draws.random(16), draws.normal(size=4)
    batch = {"x": x, "weight": weight}

    def weighted(model, batch, rng):
        error = (batch["x"] @ model["w"] - 1) ** 2 * batch["weight"]
        mean = sl.weighted_mean(error.sum(), batch["weight"].sum())
        return mean, {"plain": jnp.mean(batch["x"]), "share": sl.weighted_mean(error.sum(), 3)}

    gradient = 2 * (weight * (x @ w - 1)) @ x / weight.sum()
    norm = np.linalg.norm(gradient)
    with jax.enable_x64(True):
        clipped = strategy(precision="float64", accumulate=2, clip=0.1)
        state, metrics = stepped(clipped, clipped, weighted, batch, jnp.asarray(w))
    found = jax.device_get(metrics)
    np.testing.assert_allclose(state.params["w"], w - 0.01 * gradient / norm, rtol=1e-14)
    np.testing.assert_allclose(found["grad_norm"], norm, rtol=1e-14)
    error = (x @ w - 1) ** 2 * weight
    np.testing.assert_allclose(found["loss"], error.sum() / weight.sum(), rtol=1e-14)
    np.testing.assert_allclose(found["weight"], weight.sum(), rtol=1e-14)
    np.testing.assert_allclose(found["plain"], x.mean(), rtol=1e-13)
    np.testing.assert_allclose(found["share"], error.sum() / 48, rtol=1e-14)


def test_means_of_narrower_dtypes_and_counts_are_float32():
    def counted(model, batch, rng):
        mean = sl.weighted_mean(jnp.sum((batch @ model["w"]) ** 2).astype(jnp.bfloat16), 2.0)
        return mean, {"count": sl.weighted_mean(jnp.sum(batch > 0), batch.shape[0])}

    with jax.enable_x64(True):
        _, metrics = stepped(strategy(), strategy(), counted, X, jnp.ones(4, jnp.float32))
    for name in ("loss", "weight", "count", "grad_norm"):
        assert metrics[name].dtype == np.float32, name


def test_means_and_norms_are_wide_under_strict_promotion():
    def narrow(model, x, rng):
        error = jnp.sum((x @ model["w"]) ** 2).astype(jnp.bfloat16)
        return sl.weighted_mean(error * model["s"].astype(jnp.bfloat16), np.float64(3.5))

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        model = {"w": jnp.ones(4, jnp.float32), "s": jnp.ones((), jnp.float64)}
        state = sl.init(lambda: model, optax.sgd(0.1), strategy())
        state, metrics = sl.train_step(narrow, strategy(accumulate=2, clip=0.1))(state, X)
    assert state.params["s"].dtype == metrics["grad_norm"].dtype == np.float64
    np.testing.assert_allclose(metrics["loss"], np.sum(X.sum(1) ** 2) / 56, rtol=1e-2)


def test_a_pipeline_computes_in_float64():
    def layered(model, x, rng):
        def layer(x, w):
            return x + jnp.tanh(x @ w), None

        return jnp.mean(jax.lax.scan(layer, x, model["w"])[0] ** 2)

    x, w = np.float64(X), np.random.default_rng(1).normal(size=(2, 4, 4))
    expected = x
    for layer in w:
        expected = expected + np.tanh(expected @ layer)
    rules = sl.rules.data | sl.rules.pipeline
    schedule = sl.pipeline.ZBH1(2, 2)
    with jax.enable_x64(True):
        staged = sl.Strategy(mesh="data=4,stage=2", rules=rules, pipeline=schedule)
        model = sl.annotate({"w": jnp.asarray(w)}, {"w": ("layers", None, None)})
        state = sl.init(lambda: model, optax.sgd(0.1), staged)
        _, metrics = sl.train_step(layered, staged)(state, x)
    np.testing.assert_allclose(metrics["loss"], np.mean(expected**2), rtol=1e-13)


@pytest.mark.parametrize("dtype", [jnp.int32, bool])
def test_a_loss_without_a_gradient_is_refused(dtype):
    count = lambda model, x, rng: jnp.sum(x @ model["w"] > 0).astype(dtype)
    with pytest.raises(ValueError, match="which has no gradient: a loss is a floating-point"):
        stepped(strategy(), strategy(), count)


def test_whole_numbers_cannot_be_trained():
    with pytest.raises(ValueError, match="`n` is int32, which has no gradient"):
        sl.init(
            lambda: {"w": jnp.zeros(4), "n": jnp.zeros(3, jnp.int32)},
            optax.sgd(0.1),
            strategy(),
            trainable=lambda path, leaf: True,
        )


def test_a_freeze_that_is_found_by_itself_takes_float64():
    one_bit = strategy(exchange=sl.collectives.OneBit("data"))
    with jax.enable_x64(True):
        optimizer = sl.optimizers.onebit_adam(0.1, freeze="auto")
        state = sl.init(lambda: {"w": jnp.ones(16, jnp.float32)}, optimizer, one_bit)
        step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), one_bit)
        state, metrics = step(state, jnp.ones((8, 16), jnp.float32))
    assert np.isfinite(metrics["loss"])


@pytest.mark.long("True")
@pytest.mark.parametrize("pipelined", [False, True])
def test_a_step_takes_models_of_several_sizes(pipelined):
    options = {"mesh": "data=8", "rules": sl.rules.data}
    if pipelined:
        options = {"mesh": "data=4,stage=2", "rules": sl.rules.data | sl.rules.pipeline}
        options["pipeline"] = sl.pipeline.OneFOneB(2, 2)
    of_sizes = sl.Strategy(zero=sl.Zero(1 if pipelined else 3, small=0), **options)

    def layered(model, x, rng):
        def layer(x, w):
            return x + jnp.tanh(x @ w["up"]) @ w["down"], None

        return jnp.mean(jax.lax.scan(sl.remat(layer), x, model)[0] ** 2)

    step, evaluation = sl.train_step(layered, of_sizes), sl.evaluation(layered, of_sizes)
    optimizer = optax.sgd(0.1)
    # ZeRO splits the dim of 16, which is another one in the second model.
    for width, hidden in ((16, 10), (10, 16)):
        draws = np.random.default_rng(1)
        up = draws.normal(size=(4, width, hidden)).astype("f") * 0.3
        down = draws.normal(size=(4, hidden, width)).astype("f") * 0.3
        x = draws.normal(size=(16, width)).astype("f")
        names = ("layers", None, None)
        model = sl.annotate({"up": up, "down": down}, {"up": names, "down": names})
        state = sl.init(lambda model=model: model, optimizer, of_sizes)
        expected = x
        for number in range(4):
            expected = expected + np.tanh(expected @ up[number]) @ down[number]
        expected = np.mean(expected**2)
        np.testing.assert_allclose(evaluation(state, [x])["loss"], expected, rtol=1e-5)
        np.testing.assert_allclose(step(state, x)[1]["loss"], expected, rtol=1e-5)


def test_batches_hold_keys():
    def noisy(model, batch, rng):
        noise = jax.vmap(jax.random.normal)(batch["key"])
        return jnp.mean((batch["x"] @ model["w"] + noise) ** 2)

    batch = {"x": X, "key": jax.random.split(jax.random.key(3), 16)}
    state = sl.init(lambda: {"w": jnp.arange(4.0) * 0.1}, optax.sgd(0.1), strategy())
    noise = jax.vmap(jax.random.normal)(batch["key"])
    expected = np.mean((X @ (np.arange(4) * 0.1) + noise) ** 2)
    found = sl.evaluation(noisy, strategy())(state, [batch])["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    on_mesh = next(sl.batches([batch], strategy()))
    assert on_mesh["key"].dtype == batch["key"].dtype
    found, given = jax.random.key_data(on_mesh["key"]), jax.random.key_data(batch["key"])
    np.testing.assert_array_equal(found, given)
    found = sl.train_step(noisy, strategy())(state, on_mesh)[1]["loss"]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_sizes_that_the_devices_decide_are_checked_with_the_mesh():
    rules = sl.rules.data | sl.rules.pipeline
    schedule = sl.pipeline.OneFOneB(2, 2)
    staged = sl.Strategy(mesh="data=4,stage=-1", rules=rules, pipeline=schedule)
    assert dict(staged.device_mesh.shape) == {"data": 4, "stage": 2}
    wrong = sl.Strategy(mesh="data=2,stage=-1", rules=rules, pipeline=schedule)
    with pytest.raises(ValueError, match="has 2 stages, and the mesh axis `stage`.*has size 4"):
        wrong.device_mesh  # noqa: B018
    around = sl.Strategy(
        mesh="data=1,stage=2,context=-1",
        rules=rules | sl.rules.context("ring"),
        pipeline=schedule,
    )
    with pytest.raises(ValueError, match="attention around a ring over `context`"):
        around.device_mesh  # noqa: B018
