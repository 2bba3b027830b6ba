"""Activations that are kept in fewer bits: the loss stays what it is, and gradients nearly so."""

import collections
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
    most = np.repeat(rows.max(1, initial=0), block).reshape(x.shape)
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
    x = jax.random.normal(jax.random.key(0), shape)
    form, decoded = coded(x, encoding)
    assert decoded.shape == shape
    codes = jax.eval_shape(form.encode, x)
    if encoding in SCALED and x.size:
        assert form.block == block
        in_byte = 2 if encoding == "int4" else 1
        assert codes[0].size == x.size // max(1, form.local) * -(-filled // in_byte)
        assert codes[0].dtype.itemsize == 1 and len(codes) == 2
    if encoding == "sign":
        np.testing.assert_array_equal(decoded > 0, x > 0)
    else:
        # Of one block, which no number's own bound exceeds.
        allowed = bound(encoding, x, max(1, x.size)) * (1 + 2.0**-14)
        assert np.all(np.abs(np.asarray(decoded, np.float64) - np.asarray(x)) <= allowed)


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


# Each strategy once, and each encoding under half of them.
@pytest.mark.representative("int8-microbatches", "int4-pipeline")
@pytest.mark.long
@pytest.mark.sentinel("int4-tensor")
@pytest.mark.parametrize(
    ("encoding", "where"), list(zip(["int8", "int4", "int4"] * 2, STRATEGIES, strict=True))
)
def test_the_loss_stays_bit_for_bit_and_gradients_nearly(encoding, where):
    loss, got = gradients(sl.Remat.compress(encoding, *NAMES), **STRATEGIES[where])
    expected_loss, expected = exact(where)
    assert loss == expected_loss
    assert 0 < relative_error(got, expected) < ERRORS[encoding]


@pytest.mark.gpu
@pytest.mark.parametrize("encoding", ERRORS)
def test_a_gpu_decodes_within_the_bound(encoding):
    one = DATA | {"mesh": sl.make_mesh("data=1", devices=jax.devices()[:1])}
    with jax.default_matmul_precision("highest"):
        loss, got = gradients(sl.Remat.compress(encoding, *NAMES), **one)
        expected_loss, expected = gradients("full", **one)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert 0 < relative_error(got, expected) < ERRORS[encoding]


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["fp8", "bf16"])
def test_floats_of_fewer_bits_change_no_loss(encoding):
    loss, got = gradients(sl.Remat.compress(encoding, *NAMES), **DATA)
    expected_loss, expected = exact()
    assert loss == expected_loss
    assert 0 < relative_error(got, expected) < ERRORS[encoding]


@pytest.mark.representative("split backward")
@pytest.mark.long
@pytest.mark.parametrize("where", ["tensor", "split backward"])
def test_signs_of_what_a_relu_reads_change_no_gradient(where):
    """Its result is kept besides; then all that is asked of its argument is whether it is above
    zero."""
    remat = sl.Remat.compress("sign", "mlp_up") | sl.Remat.save("mlp_hidden")
    loss, got = gradients(remat, RELU, **STRATEGIES[where])
    expected_loss, expected = exact(where, RELU)
    assert loss == expected_loss
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, expected)


@pytest.mark.long
def test_signs_are_refused_where_a_value_is_read():
    for remat, config in (
        (sl.Remat.compress("sign", "mlp_up"), RELU),
        (sl.Remat.compress("sign", "mlp_up") | sl.Remat.save("mlp_hidden"), CONFIG),
        (sl.Remat.layers((1, "full"), rest=sl.Remat.compress("sign", "mlp_up")), RELU),
    ):
        with pytest.raises(
            ValueError, match="reads more of `mlp_up` than whether it is above zero"
        ):
            gradients(remat, config, **DATA)


def block(x, w):
    x = jnp.tanh(sl.checkpoint_name(x @ w, "up"))
    return sl.checkpoint_name(x, "hidden")


def kept(policy, block=block):
    """What a block keeps for its backward pass besides its arguments, by dtype."""
    args = jnp.ones((4, 256)), jnp.ones((256, 256))
    residuals = saved_residuals(lambda x, w: sl.remat(block, policy)(x, w).sum(), *args)
    return sorted(aval.dtype.name for aval, origin in residuals if "argument" not in origin)


def test_a_name_is_kept_exactly_compressed_or_not_at_all():
    compressed = sl.Remat.compress("int8", "up")
    assert kept("full") == []
    assert kept(compressed) == ["float32", "int8"]
    # What some value keeps as it is, is not compressed.
    both = sl.Remat.save("up") | compressed
    assert both == compressed | sl.Remat.save("up") == sl.Remat.save("up")
    assert kept(both) == ["float32"]
    # The result of a product that is named and compressed is not kept besides.
    assert kept(sl.Remat(products="all") | compressed) == ["float32", "int8"]
    assert kept(sl.Remat.compress("int8", "other")) == []
    names = compressed | sl.Remat.compress("int4", "hidden")
    assert names == sl.Remat(compressed=(("hidden", "int4"), ("up", "int8"), ("up", "int8")))
    assert hash(names) == hash(sl.Remat.compress("int4", "hidden") | compressed)


def test_a_policy_that_keeps_everything_compresses_nothing():
    assert kept("none") and "int8" not in kept("none")


@pytest.mark.parametrize("policy", [sl.Remat.compress("int8", "up"), sl.Remat.save("up")])
def test_batched_blocks_keep_what_others_do(policy):
    args = jnp.ones((3, 4, 256)), jax.random.normal(jax.random.key(0), (256, 256))

    def loss(x, w, batched):
        f = sl.remat(block, policy)
        y = jax.vmap(f, (1, None), 1)(x.swapaxes(0, 1), w) if batched else f(x, w)
        return jnp.sum(y**2)

    alone, together = (jax.grad(loss, 1)(*args, batched) for batched in (False, True))
    np.testing.assert_allclose(alone, together, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "remat, message",
    [
        (sl.Remat.compress("int8", "mlp_ut"), "keeps `mlp_ut`.*They are called `attention_out`"),
        (sl.Remat.compress("sign", "mlp_up") | sl.Remat.compress("int8", "x"), "keeps `x`"),
    ],
)
def test_names_that_no_activation_has_are_refused(remat, message):
    with pytest.raises(ValueError, match=message):
        gradients(remat, **DATA)


@pytest.mark.long
def test_what_decides_is_not_compressed():
    config = moe.tiny(layers=2, width=WIDTH, heads=4, context=32)
    strategy = sl.Strategy(remat=sl.Remat.compress("int8", "router"), **DATA)
    state = sl.init(lambda: moe.MoE(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
    with pytest.raises(ValueError, match="compresses `router`, which cannot be"):
        sl.train_step(moe.loss, strategy)(state, BATCH)


def test_integers_are_not_compressed():
    def counted(x):
        count = sl.checkpoint_name(jnp.argsort(x), "order")
        return jnp.sin(x[count])

    f = sl.remat(counted, sl.Remat.compress("int8", "order"))
    with pytest.raises(ValueError, match=r"`order` is int32\[4\], and only real numbers"):
        jax.grad(lambda x: f(x).sum())(jnp.arange(4.0))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: sl.Remat.compress("int3", "up"), "encoding='int3'.*int8.*int4.*fp8.*bf16.*sign"),
        (lambda: sl.Remat.compress("int8"), "without a name compresses nothing"),
        (lambda: sl.Remat.compress("int8", 3), "compressed.*name of an activation"),
        (lambda: sl.Remat(compressed="up"), "pairs of a name and an encoding"),
        (
            lambda: sl.Remat.compress("int8", "up") | sl.Remat.compress("int4", "up"),
            "`up` is compressed as 'int8' and as 'int4'",
        ),
        (lambda: sl.Remat.compress("int8", "up") | sl.Remat.every(2), "of a chain"),
    ],
)
def test_values_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.long
def test_layers_may_differ_in_what_they_compress():
    compressed = sl.Remat.compress("int8", *NAMES)
    remat = sl.Remat.layers((1, "none"), (1, sl.Remat.compress("int4", "mlp_up")), rest=compressed)
    loss, got = gradients(remat, **DATA)
    expected_loss, expected = exact()
    assert loss == expected_loss
    assert 0 < relative_error(got, expected) < ERRORS["int4"]


def collectives(remat):
    """The collectives of a compiled step over tensor and sequence axes, and what each sends."""
    config = dataclasses.replace(CONFIG, layers=2)
    strategy = sl.Strategy(remat=remat, **STRATEGIES["tensor"])
    make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    plan = sl.plan(sl.train_step(gpt.loss, strategy), state, BATCH)
    sent = collections.Counter()
    for one in plan.collectives:
        sent[one.kind, one.axes] += one.times * one.sent_bytes
    return sent


@pytest.mark.long
@pytest.mark.parametrize("encoding", ["int4"])
def test_nothing_is_sent_to_encode_or_decode(encoding):
    """Activations are split over heads, hidden units and the sequence, and so are their codes."""
    names = (*NAMES, "mlp_hidden", "attention_out")
    assert collectives(sl.Remat.compress(encoding, *names)) == collectives(sl.Remat.save(*names))


ROWS, LENGTH = 16, 2048
NUMBERS = ROWS * LENGTH * 1024  # in the hidden units of a layer, on a device
# Bytes of a number, and of a scale for each block of 128.
BYTES = {"int8": 1 + 4 / 128, "int4": 1 / 2 + 4 / 128, "fp8": 1 + 4 / 128, "sign": 1 / 8}


@functools.cache
def temporaries(remat, layers):
    """What a loop over layers takes of a TPU besides its arguments and results."""
    mesh = mesh_on("v5e:2x2", "data=4")

    def layer(x, weights):
        names = ("batch", None, None)
        up = sl.checkpoint_name(jnp.einsum("bsd,df->bsf", x, weights[0]), "up", names)
        hidden = sl.checkpoint_name(jax.nn.relu(up), "hidden", names)
        return x + jnp.einsum("bsf,df->bsd", hidden, weights[1])

    def loss(weights, x):
        block = sl.remat(layer)
        x, _ = lax.scan(lambda x, _: (block(x, weights), None), x, None, length=layers)
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def shape(spec, *sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    with sl.use(sl.AxisRules(batch="data"), mesh, remat=remat):
        weights = [shape(PartitionSpec(), 128, 1024)] * 2
        x = shape(PartitionSpec("data"), 4 * ROWS, LENGTH, 128)
        compiled = compile_for(mesh, jax.jit(jax.grad(loss)).lower(weights, x))
    return compiled.memory_analysis().temp_size_in_bytes


def per_layer(remat):
    few, many = 128, 256  # enough that no stack is in the faster memory beside the cores
    return (temporaries(remat, many) - temporaries(remat, few)) / (many - few)


@pytest.mark.representative("int4")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("encoding", BYTES)
def test_a_layer_keeps_the_bytes_of_the_codes_and_scales_on_a_tpu(encoding):
    remat, numbers = sl.Remat.compress(encoding, "up"), BYTES[encoding]
    if encoding == "sign":
        # The product after a ReLU reads its result.
        remat, numbers = remat | sl.Remat.compress("int8", "hidden"), numbers + BYTES["int8"]
    inputs = 2 * ROWS * LENGTH * 128
    assert per_layer(remat) == inputs + numbers * NUMBERS
