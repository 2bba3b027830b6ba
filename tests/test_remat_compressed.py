"""Activations that are kept in fewer bits: the loss stays what it is, and gradients nearly so."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax._src.ad_checkpoint import saved_residuals
from jax.sharding import NamedSharding, PartitionSpec
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt, moe
from shardlib.tracing._activation_codecs import Encoded

ENCODINGS = ("int8", "int4", "fp8", "bf16", "sign")
SCALED = {"int8": 127, "int4": 7, "fp8": 448}


def bound(encoding, x, block):
    """How far a decoded number may be from the exact one, as the table of the docs has it."""
    x = np.asarray(x, np.float64)
    if encoding == "bf16":
        return np.abs(x) * 2.0**-8
    rows = np.abs(x).reshape(-1, block)
    most = np.repeat(rows.max(1), block).reshape(x.shape)
    if encoding == "fp8":
        return np.maximum(np.abs(x) / 16, most / 448 / 2**10)
    # Half a step.
    return most / SCALED[encoding] / 2


RANDOM = np.random.default_rng(0)
LARGEST = float(np.finfo(np.float32).max)
ARRAYS = {
    "normal": RANDOM.normal(size=(4, 256)),
    "heavy tails": RANDOM.standard_cauchy(size=(4, 256)),
    "zeros": np.zeros((4, 256)),
    "one number": np.eye(4, 256) * -3.0,
    "extremes": RANDOM.choice([LARGEST, -LARGEST, 1.0, 0.0], (4, 256)),
    "tiny": RANDOM.normal(size=(4, 256)) * 1e-34,
    "ties": RANDOM.integers(-127, 128, (4, 256)) / 2,
    "wide range": RANDOM.normal(size=(4, 256)) * 2.0 ** RANDOM.integers(-30, 30, (4, 256)),
}


def coded(x, encoding, parts=1):
    form = Encoded(encoding, x.shape, x.dtype, parts)
    return form, jax.jit(lambda x: form.decode(form.encode(x)))(x)


@pytest.mark.parametrize("encoding", ("int8", "int4", "fp8", "bf16"))
@pytest.mark.parametrize("name", ARRAYS)
def test_decoded_numbers_are_within_the_bound(name, encoding):
    x = jnp.asarray(ARRAYS[name], jnp.float32)
    if (name, encoding) == ("extremes", "bf16"):
        x = x * 0.99  # above the largest of bfloat16 there is infinity
    form, decoded = coded(x, encoding)
    allowed = bound(encoding, x, form.block)
    # Quotients and products are rounded in float32 on the way.
    slack = np.abs(np.asarray(x, np.float64)) * 2.0**-21
    assert np.all(np.abs(np.asarray(decoded, np.float64) - np.asarray(x)) <= allowed + slack)


@pytest.mark.parametrize("encoding", ("int8", "int4", "fp8"))
def test_numbers_below_all_normal_ones_are_decoded_as_zero(encoding):
    x = jnp.full((2, 128), 2.0**-130, jnp.float32)
    assert np.all(np.asarray(coded(x, encoding)[1]) == 0)


@pytest.mark.parametrize("encoding", ("int8", "int4", "fp8", "bf16"))
@pytest.mark.parametrize("bad", (np.inf, np.nan))
def test_numbers_that_are_not_finite_stay_so(encoding, bad):
    x = jnp.ones((2, 256), jnp.float32).at[0, 3].set(bad)
    decoded = np.asarray(coded(x, encoding)[1])
    assert not np.isfinite(decoded[0, 3]) and np.isfinite(decoded[1]).all()


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
def test_a_decoded_sign_is_above_zero_where_the_number_is(dtype):
    for array in ARRAYS.values():
        x = jnp.asarray(array, jnp.float32).astype(dtype)
        decoded = coded(x, "sign")[1]
        assert decoded.dtype == dtype
        np.testing.assert_array_equal(decoded > 0, x > 0)
        # Whatever else is done with what is not above zero shows.
        np.testing.assert_array_equal(np.isnan(np.asarray(decoded, float)), ~np.asarray(x > 0))


SHAPES = {
    (): (1, 1), (1,): (1, 1), (3, 7): (7, 7), (2, 131): (66, 132), (2, 96): (96, 96),
    (2, 192): (96, 192), (2, 3, 1376): (86, 1376), (2, 0): (1, 0), (5, 254): (127, 254),
}  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_size_is_encoded_in_blocks_that_divide_it_or_fill_it_up(shape, encoding):
    block, filled = SHAPES[shape]
    x = jnp.asarray(RANDOM.normal(size=shape), jnp.float32)
    form, decoded = coded(x, encoding)
    assert decoded.shape == shape
    codes = jax.eval_shape(form.encode, x)
    if encoding in SCALED:
        assert form.block == block
        in_byte = 2 if encoding == "int4" else 1
        assert codes[0].size == x.size // max(1, form.local) * -(-filled // in_byte)
        assert codes[0].dtype.itemsize == 1 and len(codes) == 1 + bool(x.size)
    near = {"bf16": 0.01, "fp8": 0.1, "int8": 0.05, "int4": 0.5}.get(encoding)
    if near is None:
        np.testing.assert_array_equal(decoded > 0, x > 0)
    else:
        np.testing.assert_allclose(decoded, x, atol=near)


def test_blocks_are_within_what_one_device_may_have():
    assert Encoded("int8", (4, 1024), jnp.float32, parts=8).block == 128
    assert Encoded("int8", (4, 11008), jnp.float32, parts=4).block == 86
    # An axis that does not divide the dim does not split it.
    assert Encoded("int8", (4, 129), jnp.float32, parts=8).block == 65
    assert Encoded("int8", (4, 64), jnp.float32, parts=8).block == 8


WIDTH, HIDDEN, LAYERS = 64, 256, 4
CONFIG = gpt.tiny(
    layers=LAYERS, width=WIDTH, heads=4, context=32, norm="rms", mlp="swiglu", bias=False,
    positions="rotary",
)  # fmt: skip
RELU = dataclasses.replace(CONFIG, mlp="relu")
BATCH = {"tokens": np.random.default_rng(0).integers(0, CONFIG.vocab, (16, 33), dtype=np.int32)}
DATA = {"mesh": "data=8,model=1", "rules": sl.rules.data}
FULL_ZERO = {"zero": sl.Zero(3, small=0)}
PIPELINE = {"mesh": "stage=2,data=4", "rules": sl.rules.data | sl.rules.pipeline}
STRATEGIES = {
    "data": DATA,
    "stage 3": DATA | FULL_ZERO,
    "tensor": {
        "mesh": "data=2,model=4", "rules": sl.rules.data | sl.rules.tensor_sequence, **FULL_ZERO,
    },
    "microbatches": DATA | {"accumulate": 2},
    "pipeline": PIPELINE | {"zero": sl.Zero(1, small=0), "pipeline": sl.pipeline.OneFOneB(2, 2)},
    "split backward": PIPELINE | {"pipeline": sl.pipeline.ZBH1(2, 2)},
}  # fmt: skip
# Everything that the block of a model names and a product reads.
NAMES = ("query", "key", "value", "context", "mlp_gate", "mlp_up")


def gradients(remat, config=CONFIG, **options):
    """The loss of a step, and how far it moves the parameters: the gradients."""
    strategy = sl.Strategy(remat=remat, **options)
    state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(1.0), strategy)
    before = jax.tree.map(np.asarray, state.params)
    state, metrics = sl.train_step(gpt.loss, strategy)(state, BATCH)
    moved = jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)
    return float(metrics["loss"]), moved


@functools.cache
def exact(where="data", config=CONFIG):
    return gradients("full", config, **STRATEGIES[where])


def relative_error(got, expected):
    """The largest of any parameter, by norms."""

    def error(a, b):
        return np.linalg.norm(a - b) / np.linalg.norm(b)

    return max(jax.tree.leaves(jax.tree.map(error, got, expected)))


# What gradients are off by at most, of any parameter of the small model, with all names compressed.
ERRORS = {"int8": 0.02, "int4": 0.4, "fp8": 0.06, "bf16": 0.005}


@pytest.mark.long
@pytest.mark.sentinel("int8-stage 3")
@pytest.mark.parametrize("where", STRATEGIES)
@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_the_loss_stays_bit_for_bit_and_gradients_nearly(encoding, where):
    loss, got = gradients(sl.Remat.compress(encoding, *NAMES), **STRATEGIES[where])
    expected_loss, expected = exact(where)
    assert loss == expected_loss
    assert 0 < relative_error(got, expected) < ERRORS[encoding]


@pytest.mark.parametrize("encoding", ["fp8", "bf16"])
def test_floats_of_fewer_bits_change_no_loss(encoding):
    loss, got = gradients(sl.Remat.compress(encoding, *NAMES), **DATA)
    expected_loss, expected = exact()
    assert loss == expected_loss
    assert 0 < relative_error(got, expected) < ERRORS[encoding]


@pytest.mark.long
@pytest.mark.sentinel("stage 3")
@pytest.mark.parametrize("where", ["data", "stage 3", "tensor", "split backward"])
def test_signs_of_what_a_relu_reads_change_no_gradient(where):
    """Its result is kept besides; then all that is asked of its argument is whether it is above
    zero."""
    remat = sl.Remat.compress("sign", "mlp_up") | sl.Remat.save("mlp_hidden")
    loss, got = gradients(remat, RELU, **STRATEGIES[where])
    expected_loss, expected = exact(where, RELU)
    assert loss == expected_loss
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, expected)


def test_signs_are_refused_where_a_value_is_read():
    for remat, config in (
        (sl.Remat.compress("sign", "mlp_up"), RELU),
        (sl.Remat.compress("sign", "mlp_up") | sl.Remat.save("mlp_hidden"), CONFIG),
        (sl.Remat.layers((1, "full"), rest=sl.Remat.compress("sign", "mlp_up")), RELU),
    ):
        with pytest.raises(ValueError, match="reads more of `mlp_up` than whether it is above zero"):
            gradients(remat, config, **DATA)
