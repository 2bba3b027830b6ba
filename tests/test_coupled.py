"""Losses whose examples depend on each other are warned of, with the line; means over examples are
not.
"""

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import shardlib as sl

WEIGHT = np.linspace(-1, 1, 12).reshape(4, 3).astype(np.float32)
ROWS = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
DATA = sl.Strategy(mesh="data=8", rules=sl.rules.data)


def make():
    return {"w": jnp.asarray(WEIGHT)}


def y(model, x):
    return jnp.tanh(x @ model["w"])


def maml(model, x, key):
    inner = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(model["w"])
    return jnp.mean((x @ (model["w"] - 0.1 * inner)) ** 2)


def maml_of_each(model, x, key):
    def of_one(example):
        inner = jax.grad(lambda w: jnp.mean((example @ w) ** 2))(model["w"])
        return jnp.mean((example @ (model["w"] - 0.1 * inner)) ** 2)

    return jnp.mean(jax.vmap(of_one)(x))


def two_views(model, x, key):
    views = jnp.concatenate([y(model, x), y(model, -x)])
    first, second = jnp.split(views, 2)
    return jnp.mean((first - second) ** 2)


def sum_in_a_loop(model, x, key):
    return (
        lax.scan(lambda carry, row: (carry + jnp.sum(y(model, row)), None), 0.0, x)[0] / x.shape[0]
    )


def moving_average(model, x, key):
    def body(carry, row):
        carry = 0.9 * carry + jnp.sum(y(model, row))
        return carry, carry * jnp.sum(row)

    return jnp.mean(lax.scan(body, 0.0, x)[1])


def recurrent(model, x, key):
    def body(carry, column):
        return jnp.tanh(carry + column[:, None] * model["w"][0]), None

    return jnp.mean(lax.scan(body, jnp.zeros((x.shape[0], 3)), x.T)[0] ** 2)


def counted_by_value(model, x, key):
    values = lax.while_loop(lambda v: jnp.sum(v) < 40.0, lambda v: v + 1.0, y(model, x))
    return jnp.mean(lax.stop_gradient(values) * y(model, x))


MEANS = {
    "a mean": lambda m, x, key: jnp.mean(y(m, x) ** 2),
    "two sums": lambda m, x, key: sl.weighted_mean(
        jnp.sum(y(m, x) ** 2 * (x[:, :1] > 0)), jnp.sum(x[:, 0] > 0)
    ),
    "a mean and a penalty": lambda m, x, key: jnp.mean(y(m, x) ** 2) + 0.1 * jnp.sum(m["w"] ** 2),
    "one after the other": lambda m, x, key: jnp.mean(
        lax.map(lambda row: jnp.sum(y(m, row) ** 2), x)
    ),
    "added up in a loop": sum_in_a_loop,
    "a recurrence": recurrent,
    "inner gradients of each": maml_of_each,
    "two views": two_views,
    "flattened": lambda m, x, key: jnp.mean(jax.nn.softmax(y(m, x).reshape(-1, 3).T, 0) ** 2),
    "flattened and back": lambda m, x, key: jnp.mean(
        jnp.cumsum(y(m, x)[:, None].repeat(5, 1).reshape(-1, 3).reshape(x.shape[0], 5, 3), 1) ** 2
    ),
    "groups of examples": lambda m, x, key: jnp.mean(y(m, x).reshape(2, -1, 3).mean(1)),
    "by einsum": lambda m, x, key: jnp.einsum("bi,bi->", y(m, x), x[:, :3]) / x.shape[0],
    "scaled rows": lambda m, x, key: jnp.mean(
        y(m, x) / jnp.linalg.norm(y(m, x), axis=-1, keepdims=True)
    ),
    "batch statistics": lambda m, x, key: jnp.mean((y(m, x) - sl.batch_mean(y(m, x))) ** 2),
    "a mean by hand": lambda m, x, key: jnp.mean(
        (y(m, x) - lax.pmean(y(m, x).mean(0), "data")) ** 2
    ),
    "all pairs": lambda m, x, key: jnp.mean(
        jax.nn.logsumexp(y(m, x) @ sl.gather_batch(y(m, x)).T, -1)
    ),
    "all in another order": lambda m, x, key: jnp.mean((y(m, x)[::-1] - x[::-1, :3]) ** 2),
    "a feature of each": lambda m, x, key: jnp.mean(
        jnp.take_along_axis(y(m, x), jnp.zeros((x.shape[0], 1), int), 1) * x
    ),
    "labels": lambda m, x, key: jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(y(m, x), jnp.argmax(x[:, :3], -1))
    ),
    "labels of a sequence": lambda m, x, key: jnp.mean(
        optax.softmax_cross_entropy_with_integer_labels(
            x[..., None] * m["w"], jnp.argsort(x, -1) % 3
        )
    ),
    "a metric": lambda m, x, key: (
        jnp.mean(y(m, x)),
        {"right": jnp.mean(y(m, x).argmax(-1) == x.argmax(-1))},
    ),
}

COUPLED = {
    "centred": lambda m, x, key: jnp.mean((y(m, x) - y(m, x).mean(0)) ** 2),
    "a variance": lambda m, x, key: jnp.mean(jnp.var(y(m, x), 0)),
    "a cumulative sum": lambda m, x, key: jnp.mean(jnp.cumsum(y(m, x), 0) ** 2),
    "inner gradients": maml,
    "a branch": lambda m, x, key: jnp.mean(
        lax.cond(jnp.sum(x) > 0, lambda v: v**2, lambda v: 2 * v, y(m, x))
    ),
    "a while loop": counted_by_value,
    "a masked mean": lambda m, x, key: jnp.sum(y(m, x) * (x[:, :1] > 0)) / jnp.sum(x[:, 0] > 0),
    "a mean with where": lambda m, x, key: jnp.mean(y(m, x), where=x[:, :1] > 0),
    "a sum": lambda m, x, key: jnp.sum(y(m, x)),
    "a maximum": lambda m, x, key: jnp.max(y(m, x)),
    "an order": lambda m, x, key: jnp.mean(jnp.sort(y(m, x), 0) * jnp.arange(x.shape[0])[:, None]),
    "differences of pairs": lambda m, x, key: jnp.mean((y(m, x)[:, None] - y(m, x)[None]) ** 2),
    "products of pairs": lambda m, x, key: jnp.mean(jax.nn.logsumexp(y(m, x) @ y(m, x).T, -1)),
    "mixup": lambda m, x, key: jnp.mean(
        (0.7 * y(m, x) + 0.3 * y(m, x)[(5 * np.arange(x.shape[0]) + 3) % x.shape[0]]) ** 2
    ),
    "a reverse order": lambda m, x, key: jnp.mean((y(m, x) - y(m, x)[::-1]) ** 2),
    "a softmax over examples": lambda m, x, key: jnp.mean(jax.nn.softmax(y(m, x), 0) * x[:, :3]),
    "a norm": lambda m, x, key: jnp.linalg.norm(y(m, x)),
    "a perplexity": lambda m, x, key: jnp.exp(jnp.mean(y(m, x))),
    "a mean of a part": lambda m, x, key: jnp.mean((y(m, x).reshape(-1) - y(m, x).mean()) ** 2),
    "a moving average": moving_average,
    "a recomputed block": lambda m, x, key: jnp.mean(
        jax.checkpoint(lambda v: v - v.mean(0))(y(m, x)) ** 2
    ),
    "a guarded weight": lambda m, x, key: sl.weighted_mean(
        jnp.sum(y(m, x)), jnp.maximum(jnp.sum(x[:, 0] > 1.5), 1)
    ),
    "a metric": lambda m, x, key: (jnp.mean(y(m, x)), {"perplexity": jnp.exp(jnp.mean(y(m, x)))}),
}


def traced(loss, strategy=DATA, batch=ROWS):
    """The warnings of tracing a step."""
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sl.train_step(loss, strategy).trace(state, batch)
    return [str(one.message) for one in caught if issubclass(one.category, sl.ShardingWarning)]


def whole(loss):
    """The loss and the metrics of the whole batch, by plain JAX."""

    def alone(x):
        out = loss(make(), x, jax.random.key(0))
        of_loss, metrics = out if isinstance(out, tuple) else (out, {})
        values = {"loss": of_loss, **metrics}
        return {
            k: v.total / v.weight if isinstance(v, sl.WeightedMean) else v
            for k, v in values.items()
        }

    with sl.unsharded():
        return jax.vmap(alone, axis_name="data")(jnp.asarray(ROWS)[None])


@pytest.mark.representative(
    "a recurrence", "inner gradients of each", "two views", "all pairs", "labels"
)
@pytest.mark.long
@pytest.mark.sentinel(
    "a mean", "added up in a loop", "flattened and back", "groups of examples", "a metric"
)
@pytest.mark.parametrize("loss", MEANS.values(), ids=MEANS)
def test_uncoupled_loss_is_not_warned_about_and_matches_one_device(loss):
    for strategy in (
        DATA,
        sl.Strategy(mesh="data=4,fsdp=2", rules=sl.rules.data | sl.rules.fsdp, accumulate=2),
    ):
        assert not traced(loss, strategy)
    step = sl.train_step(loss, DATA)
    metrics = step(sl.init(make, optax.sgd(0.1), DATA), ROWS)[1]
    for name, value in whole(loss).items():
        np.testing.assert_allclose(metrics[name], np.squeeze(value), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", COUPLED.values(), ids=COUPLED)
def test_coupled_loss_is_warned_about_with_its_line(loss):
    (said,) = traced(loss)
    lines, start = inspect.getsourcelines(loss)
    assert any(f"{__file__}:{line}" in said for line in range(start, start + len(lines)))
    assert "sl.weighted_mean(total, weight)" in said
    assert ("perplexity" in said) == (loss is COUPLED["a metric"])


@pytest.mark.representative(
    "a variance",
    "a cumulative sum",
    "inner gradients",
    "a while loop",
    "a maximum",
    "differences of pairs",
    "a softmax over examples",
    "a moving average",
    "a recomputed block",
)
@pytest.mark.long
@pytest.mark.sentinel("centred", "a branch", "a sum", "an order", "a metric")
@pytest.mark.parametrize("loss", COUPLED.values(), ids=COUPLED)
def test_coupled_loss_is_wrong_with_manual_axes_and_right_without(loss):
    alone = sl.Strategy(mesh="data=8", rules=sl.rules.data, manual=())
    assert not traced(loss, alone)
    expected = {name: np.squeeze(value) for name, value in whole(loss).items()}

    def found(strategy):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sl.ShardingWarning)
            metrics = sl.train_step(loss, strategy)(sl.init(make, optax.sgd(0.1), strategy), ROWS)[
                1
            ]
        return {name: np.asarray(metrics[name]) for name in expected}

    for name, value in found(alone).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6)
    several = found(DATA)
    assert any(
        not np.allclose(several[name], value, rtol=1e-3, atol=1e-4)
        for name, value in expected.items()
    )


@pytest.mark.long
def test_coupling_warnings_work_for_single_examples_and_microbatches():
    for strategy in (DATA, sl.Strategy(mesh="data=4,model=2", rules=sl.rules.data, accumulate=2)):
        assert not traced(MEANS["a mean"], strategy, ROWS[:8])
        assert not traced(MEANS["flattened"], strategy, ROWS[:8])
        assert not traced(MEANS["labels"], strategy, ROWS[:8])
        assert not traced(MEANS["labels of a sequence"], strategy, ROWS[:8])
        assert traced(COUPLED["centred"], strategy, ROWS[:8])
        assert traced(COUPLED["a masked mean"], strategy, ROWS[:8])
    microbatches = sl.Strategy(
        mesh="model=8", rules=sl.AxisRules(batch=None, mlp="model"), accumulate=2
    )
    (said,) = traced(COUPLED["centred"], microbatches)
    assert "`accumulate=1`" in said
    assert not traced(
        COUPLED["centred"], sl.Strategy(mesh="model=8", rules=sl.AxisRules(batch=None, mlp="model"))
    )


def gathered(x):
    return lax.all_gather(x, "pod")[None][0, lax.axis_index("pod")]


def gathered_within(x):
    return lax.all_gather(x, "pod", axis=1)[None][0, :, lax.axis_index("pod")]


def sent_and_returned(x):
    halves = x.reshape(2, 1, -1, *x.shape[1:])
    there = lax.all_to_all(halves, "pod", 0, 2)[None]
    return lax.all_to_all(there[0], "pod", 2, 0).reshape(x.shape)


def scattered(x):
    copies = jnp.stack([x, jnp.zeros_like(x)])
    return copies[0] + 0 * lax.psum_scatter(copies, "pod")[None][0]


@pytest.mark.parametrize("moved", [gathered, gathered_within, sent_and_returned, scattered])
def test_examples_that_go_to_some_devices_and_back_are_not_coupled(moved):
    def loss(model, x, key):
        return jnp.mean(moved(y(model, x)) ** 2)

    def plain(model, x, key):
        return jnp.mean(y(model, x) ** 2)

    rules = sl.AxisRules(batch=("pod", "data"))
    found = {}
    for one in (loss, plain):
        strategy = sl.Strategy(mesh="pod=2,data=4", rules=rules)
        state = sl.init(make, optax.sgd(0.1), strategy)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            state, _ = sl.train_step(one, strategy)(state, ROWS)
        found[one.__name__] = jax.device_get(state.params["w"])
    np.testing.assert_allclose(found["loss"], found["plain"], rtol=1e-6)


def of_batch(model, x, key):
    return jnp.sum(jnp.mean(y(model, x) ** 2, -1)) / 16


def of_elements_of_batch(model, x, key):
    return jnp.sum(y(model, x) ** 2) * (1 / (16 * 3))


def of_examples_at_hand(model, x, key):
    return jnp.sum(jnp.mean(y(model, x) ** 2, -1)) / x.shape[0]


@pytest.mark.parametrize("loss", [of_batch, of_elements_of_batch])
def test_sum_over_a_part_divided_by_the_whole_batch_is_warned_about(loss):
    (said,) = traced(loss)
    assert "over the 2 examples at hand" in said and "8 times too small" in said
    accumulating = sl.Strategy(mesh="data=4,model=2", rules=sl.rules.data, accumulate=2)
    (said,) = traced(loss, accumulating)
    assert "8 times too small" in said
    assert not traced(of_examples_at_hand) and not traced(of_examples_at_hand, accumulating)


def means_of_eight_features(model, x, key):
    """Sums over other dims, which are as many as the parts of the batch."""
    features = jnp.tanh(x @ jnp.tile(model["w"], (1, 3))[:, :8])
    return jnp.sum(features**2, -1).sum() / features.size, {
        "by dot": jnp.vdot(features, features) / features.size,
        "in a loop": lax.scan(lambda total, row: (total + row.sum(), None), 0.0, features)[0]
        * (1 / features.size),
        "nan": jnp.sum(features) * jnp.nan,
        "complex": jnp.real(jnp.sum(jnp.fft.fft(features)) * (2 - 1j)) / x.shape[0],
    }


def test_mean_over_as_many_features_as_parts_is_not_warned_about():
    assert not traced(means_of_eight_features)
    one_example_each = sl.Strategy(mesh="data=8", rules=sl.rules.data, accumulate=2)
    assert not traced(means_of_eight_features, one_example_each)


def two_wrong_metrics(model, x, key):
    error = jnp.mean(y(model, x) ** 2, -1)
    return error.mean(), {"largest": error.max(), "perplexity": jnp.exp(error.mean())}


def test_evaluation_warns_of_every_value_that_is_no_mean():
    state = sl.init(make, None, DATA)
    with pytest.warns(sl.ShardingWarning, match="metric `largest`.*Look at `perplexity` too"):
        sl.evaluation(two_wrong_metrics, DATA)(state, [ROWS])
    (said,) = traced(two_wrong_metrics)
    assert "metric `largest`" in said and said.endswith("Look at `perplexity` too.")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sl.evaluation(MEANS["a mean"], DATA)(state, [ROWS])


class Teaching(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.student, self.teacher = nnx.Linear(4, 3, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)


def with_teacher(model, x, key):
    old, new = model.teacher.kernel[...], model.student.kernel[...]
    model.teacher.kernel[...] = 0.9 * old + 0.1 * new
    return jnp.mean((model.student(x) - lax.stop_gradient(model.teacher(x))) ** 2)


@nnx.jit
def in_functions_of_flax(model, x):
    return nnx.remat(lambda model, x: model.student(x))(model, x)


def without_assignment(model, x, key):
    return jnp.mean(in_functions_of_flax(model, x) ** 2)


def test_assigning_to_a_parameter_is_warned_about():
    state = sl.init(Teaching, optax.sgd(0.1), DATA)
    with pytest.warns(sl.ShardingWarning, match="assigns to `teacher/kernel`.*trainable="):
        sl.train_step(with_teacher, DATA)(state, ROWS)
    clipped = lambda model, x, key: jnp.mean(y(model, x) ** 2)

    def clips(model, x, key):
        model["w"] = jnp.clip(model["w"], -0.1, 0.1)
        return clipped(model, x, key)

    (said,) = traced(clips)
    assert "assigns to `w`" in said and not traced(clipped)
    with warnings.catch_warnings():
        warnings.simplefilter("error", sl.ShardingWarning)
        state = sl.init(Teaching, optax.sgd(0.1), DATA)
        sl.train_step(without_assignment, DATA)(state, ROWS)
