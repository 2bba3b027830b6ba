import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from shardlib.modeling._random import is_row_key, plain_keys, row_keys

KEY = jax.random.key(7)
PARTS = [(4, 0, 1), (4, 4, 1), (2, 0, 4), (4, 1, 2), (2, 3, 4)]  # rows, first example, stride


def both(f, rows, start, stride):
    """What f draws for all eight examples, cut to these, and what it draws for these alone."""
    whole = f(row_keys(KEY, 8, 0, 1), 8)
    return np.asarray(whole)[start::stride][:rows], np.asarray(
        f(row_keys(KEY, rows, start, stride), rows)
    )


@pytest.mark.representative()
@pytest.mark.long(
    "<lambda>1-part0",
    "<lambda>1-part1",
    "<lambda>1-part2",
    "<lambda>1-part3",
    "<lambda>4-part0",
    "<lambda>4-part1",
    "<lambda>4-part2",
    "<lambda>4-part3",
    "<lambda>6-part0",
    "<lambda>6-part1",
    "<lambda>6-part2",
    "<lambda>6-part3",
)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "draw",
    [
        lambda key, n: jax.random.bernoulli(key, 0.3, (n, 5, 3)),
        lambda key, n: jax.random.bits(jax.random.fold_in(key, 3), (n, 5)),
        # Two streams, also where there are two rows.
        lambda key, n: jax.random.bits(jax.random.split(key)[1], (n, 5)),
        lambda key, n: jax.vmap(jax.random.bits)(jax.random.split(key, n)),  # one key per example
        lambda key, n: jax.vmap(lambda k: jax.random.uniform(jax.random.fold_in(k, 1), (3,)))(
            jax.random.split(key, n)
        ),
        lambda key, n: jax.random.randint(key, (n,), 0, 100),
        lambda key, n: jnp.full(n, jax.random.bits(key)),
    ],
)
def test_row_keys_draw_the_same_for_an_example_on_any_device(draw, part):
    whole, here = both(draw, *part)
    np.testing.assert_array_equal(whole, here)


@pytest.mark.parametrize("part", [part for part in PARTS if part[0] != 2])
def test_row_keys_draw_shared_values_the_same_on_every_device(part):
    # `permutation` splits its key in two: with two rows that would be taken for one key per example
    # (see the module).
    whole, here = both(lambda key, n: jax.random.permutation(key, 5)[None].repeat(n, 0), *part)
    np.testing.assert_array_equal(whole, here)


def test_row_keys_draw_differently_by_example_stream_and_split():
    key = row_keys(KEY, 4, 0, 1)
    draws = [
        jax.random.normal(k, (4,))
        for k in (
            key,
            jax.random.fold_in(key, 0),
            jax.random.fold_in(key, 1),
            *jax.random.split(key),
        )
    ]
    values = np.concatenate(draws)
    assert len(np.unique(values)) == values.size


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(0, 6))
def test_row_keys_draw_uniform_numbers(seed, start):
    bits = jax.random.uniform(row_keys(jax.random.key(seed), 64, start, 3), (64, 64))
    assert abs(float(bits.mean()) - 0.5) < 0.03  # 6 standard deviations
    assert abs(float(jnp.corrcoef(bits[0], bits[1])[0, 1])) < 0.7


def test_row_keys_of_any_shape_convert_back_to_plain_keys():
    for base in (KEY, jax.random.split(KEY, 3)):
        keys = row_keys(base, 4, 2, 1)
        assert is_row_key(keys)
        assert not is_row_key(base)
        assert keys.shape == base.shape
        np.testing.assert_array_equal(
            jax.random.key_data(plain_keys(keys)), jax.random.key_data(base)
        )
        assert row_keys(keys, 8, 0, 1).dtype == row_keys(base, 8, 0, 1).dtype
    assert plain_keys(KEY) is KEY
    assert jax.random.split(row_keys(KEY, 4, 0, 1), (2, 3)).shape == (2, 3)


def test_row_keys_work_inside_scan_checkpoint_and_grad():
    def noisy(x, key):
        return jnp.sum(x * jax.random.normal(key, (4,)))

    def loss(x, key):
        step = jax.checkpoint(lambda c, k: (c + noisy(x, k), None))
        return jax.lax.scan(step, 0.0, jax.random.split(key, 3))[0]

    key = row_keys(KEY, 4, 0, 1)
    gradient = jax.jit(jax.grad(loss))(jnp.ones(4), key)
    expected = sum(jax.random.normal(k, (4,)) for k in jax.random.split(key, 3))
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)


def test_row_keys_of_mesh_dependent_generators_are_refused():
    with pytest.raises(ValueError, match="implementation `rbg` draws otherwise.*threefry2x32"):
        row_keys(jax.random.key(0, impl="rbg"), 4, 0, 1)
    with pytest.raises(ValueError, match="`Strategy\\(draws='per_mesh'\\)` takes one of"):
        sl.Strategy(mesh="data=8", rules=RULES, draws="per_mesh")


RULES = sl.AxisRules(batch="data")
X = np.ones((16, 4), np.float32)


def drawn(draw, make_key, **options):
    """What a loss draws with a key of the model: for the examples, and for what every device
    has.
    """
    strategy = sl.Strategy(mesh="data=8", rules=RULES, **options)

    def loss(model, x, rng):
        rows, same = draw(model["key"], x.shape), draw(sl.replicated_draws(model["key"]), (3,))
        metrics = {
            "rows": sl.weighted_mean(sl.gather_batch(rows), 1.0),
            "same": sl.weighted_mean(sl.gather_batch(same[None]), 1.0),
        }
        return jnp.mean((x * model["params"] * rows) ** 2), metrics

    state = sl.init(lambda: {"params": jnp.ones(4), "key": make_key()}, optax.sgd(0.1), strategy)
    state, metrics = sl.train_step(loss, strategy)(state, X)
    return state, jax.device_get(metrics)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_draws_by_mesh_still_differ_between_examples(impl):
    state, metrics = drawn(
        jax.random.uniform, lambda: jax.random.key(0, impl=impl), draws="by_mesh"
    )
    assert jax.random.key_impl(state.rest["key"]) == impl
    rows = metrics["rows"] / 8  # each device gathered all of them
    assert len(np.unique(rows.round(5))) == rows.size == 64
    assert len(np.unique(metrics["same"][:, 0])) == 1, (
        "what is not for examples is the same everywhere"
    )


def test_draws_by_mesh_use_the_default_key_implementation():
    with jax.default_prng_impl("rbg"):
        of = lambda draws: drawn(jax.random.uniform, lambda: KEY, draws=draws)[0].key
        assert [str(jax.random.key_impl(of(draws))) for draws in ("same", "by_mesh")] == [
            "threefry2x32",
            "rbg",
        ]


def bernoulli(key, shape):
    return jax.random.bernoulli(key, 0.5, shape)


@pytest.mark.parametrize(
    "draw",
    [
        bernoulli,
        jax.jit(bernoulli, static_argnums=1),
        lambda key, shape: bernoulli(jax.random.split(key)[1], shape),
        lambda key, shape: bernoulli(jax.random.fold_in(key, 1), shape),
        lambda key, shape: jax.vmap(lambda k: bernoulli(k, shape[1:]))(
            jax.random.split(key, shape[0])
        ),
        lambda key, shape: jax.lax.scan(
            lambda k, _: (jax.random.split(k)[0], bernoulli(k, shape)), key, length=2
        )[1][0],
        lambda key, shape: jax.lax.cond(
            shape[0] > 1, lambda k: bernoulli(k, shape), lambda k: bernoulli(k, shape), key
        ),
        lambda key, shape: bernoulli(
            jax.lax.fori_loop(0, 2, lambda _, k: jax.random.split(k)[0], key), shape
        ),
    ],
)
def test_raw_model_keys_that_would_repeat_draws_on_devices_are_refused(draw):
    with pytest.raises(
        ValueError, match="draws with old-style raw keys of the model, `key`.*wrap_key_data"
    ):
        drawn(draw, lambda: jax.random.PRNGKey(0))


def test_raw_model_keys_are_accepted_for_whole_batches_or_without_draws():
    drawn(bernoulli, lambda: jax.random.PRNGKey(0), manual=())
    drawn(bernoulli, lambda: jax.random.wrap_key_data(jax.random.PRNGKey(0)))
    counts = lambda key, shape: (
        jnp.full(shape, key[0], jnp.float32) + bernoulli(jax.random.fold_in(KEY, key[1]), shape)
    )
    drawn(counts, lambda: jnp.zeros(2, jnp.uint32))
