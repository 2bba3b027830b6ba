"""What each stage of ZeRO sends and holds, in programs compiled for absent machines."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from machines import mesh_on

import shardlib as sl
from shardlib import testing
from shardlib.collectives._sums import in_pieces

PLATFORMS = [
    "cpu",
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]
OFF_THE_CHIP = [PLATFORMS[0], PLATFORMS[2]]  # a TPU keeps arrays as small as these on it
LAYERS, WIDTH, HIDDEN = 4, 256, 1024
RULES = sl.AxisRules(batch=("pod", "data"), embed=None, mlp="model", layers=None)
NAMES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}
BYTES = 2 * LAYERS * WIDTH * HIDDEN * 4


def make():
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    return sl.annotate({name: jnp.ones(shape) for name, shape in shapes.items()}, NAMES)


def loss(model, x, rng):
    layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)
    return jnp.mean(jax.lax.scan(layer, x, model)[0] ** 2)


def planned(platform, shape, zero, accumulate=1, **options):
    mesh = mesh_on(platform, shape)
    strategy = sl.Strategy(mesh=mesh, rules=RULES, zero=zero, accumulate=accumulate, **options)
    state = sl.init(make, optax.adam(1e-3), strategy, abstract=True)
    batch = jax.ShapeDtypeStruct((16 * accumulate, WIDTH), "float32")
    with jax.default_matmul_precision("highest"):  # lest a TPU send float32 as bfloat16
        return sl.plan(sl.train_step(loss, strategy), state, batch)


def sent(plan, axis):
    """Bytes over an axis by kind, but for sums of a few numbers."""
    total = collections.Counter()
    for one in plan.collectives:
        if one.axes == (axis,) and one.sent_bytes > 1024:
            total[one.kind] += one.total_bytes
    return dict(total)


def moved(size, devices):
    return size * (devices - 1) // devices


@pytest.mark.representative(
    "1-2-1-1-v5e:2x4", "1-2-1-1-h200:1x1x8", "3-2-4-2-v5e:2x4", "3-2-4-2-h200:1x1x8"
)
@pytest.mark.long("1-2-1-1-cpu", "2-2-1-2-cpu")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize(
    "stage, accumulate, gathers, scatters", [(1, 2, 1, 1), (2, 2, 1, 2), (3, 1, 2, 1), (3, 2, 4, 2)]
)
def test_zero_stages_send_the_bytes_of_the_paper(platform, stage, accumulate, gathers, scatters):
    sends = {
        ("all-gather", "data"): gathers * moved(BYTES, 8),
        ("reduce-scatter", "data"): scatters * moved(BYTES, 8),
    }
    found = planned(platform, "pod=1,data=8,model=1", stage, accumulate)
    testing.assert_collectives(found, sends=sends, ignore_below=1024)


@pytest.mark.representative("0-cpu", "1-v5e:2x4", "1-h200:1x1x8")
@pytest.mark.long
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("stage", [0, 1])
def test_overlapped_exchange_sends_the_same_bytes_layer_by_layer(platform, stage):
    found = planned(platform, "pod=1,data=8,model=1", stage, 2, exchange=sl.Exact(overlap=True))
    sends = {("all-reduce", "data"): 2 * moved(BYTES, 8)}
    if stage:
        sends = {
            ("all-gather", "data"): moved(BYTES, 8),
            ("reduce-scatter", "data"): moved(BYTES, 8),
        }
    testing.assert_collectives(found, sends=sends, ignore_below=1024)
    sums = [
        one
        for one in found.collectives
        if one.kind in ("all-reduce", "reduce-scatter") and one.sent_bytes > 1024
    ]
    assert max(one.operand_bytes for one in sums) <= BYTES // LAYERS
    if platform.startswith("h200") and stage:
        assert (
            sum(one.total_bytes for one in sums if one.overlapped)
            > sum(one.total_bytes for one in sums) / 2
        )
        after = planned(platform, "pod=1,data=8,model=1", stage, 2)
        assert not any(one.overlapped for one in after.collectives if one.kind != "all-gather")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_zero_stage_2_scatters_a_tied_weight_only_once(platform):
    def tied(model, x, rng):
        x, _ = jax.lax.scan(
            lambda x, w: (jnp.tanh(x @ w), None), x @ model["table"], model["layers"]
        )
        return jnp.mean((x @ model["table"].T) ** 2)

    make = lambda: {"table": jnp.ones((WIDTH, WIDTH)), "layers": jnp.ones((1, WIDTH, WIDTH))}
    strategy = sl.Strategy(
        mesh=mesh_on(platform, "pod=1,data=8,model=1"), rules=RULES, zero=sl.Zero(2, small=0)
    )
    state = sl.init(make, optax.sgd(1e-3), strategy, abstract=True)
    with jax.default_matmul_precision("highest"):
        found = sl.plan(
            sl.train_step(tied, strategy), state, jax.ShapeDtypeStruct((16, WIDTH), "float32")
        )
    size = 2 * WIDTH * WIDTH * 4
    sends = {("all-gather", "data"): moved(size, 8), ("reduce-scatter", "data"): moved(size, 8)}
    testing.assert_collectives(found, sends=sends, ignore_below=1024)


@pytest.mark.representative("1-cpu", "2-h200:1x1x8", "3-h200:1x1x8")
@pytest.mark.long
@pytest.mark.sentinel("3-cpu")
@pytest.mark.parametrize("platform", OFF_THE_CHIP)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_accumulates_gradients_in_place(platform, stage):
    options = {"exchange": sl.Exact(bucket_bytes=2**16)} if stage == 1 else {}
    found = planned(
        platform, "pod=1,data=8,model=1", sl.Zero(stage, bucket_bytes=2**16), 2, **options
    )
    layer = BYTES // LAYERS
    sums = BYTES if stage == 1 else BYTES // 8
    assert sums <= found.memory.most["gradients"] < sums + 3 * layer


@pytest.mark.representative("2-cpu", "3-v5e:2x4", "3-h200:1x1x8")
@pytest.mark.long
@pytest.mark.sentinel("3-cpu")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_with_tensor_parallelism_sends_only_each_devices_shards(platform, stage):
    found = planned(platform, "pod=1,data=4,model=2", stage)
    gathers = 2 if stage == 3 else 1
    assert sent(found, "data") == {
        "all-gather": gathers * moved(BYTES // 2, 4), "reduce-scatter": moved(BYTES // 2, 4)
    }  # fmt: skip
    assert sent(found, "model") == sent(planned(platform, "pod=1,data=4,model=2", 0), "model")


@pytest.mark.representative("2-v5e:2x4", "2-h200:1x1x8")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_hybrid_sharding_sums_shards_across_pods_once_a_step(platform, accumulate):
    found = planned(platform, "pod=2,data=4,model=1", sl.Zero(3, axes=("data",)), accumulate)
    sends = {
        ("all-gather", "data"): 2 * accumulate * moved(BYTES, 4),
        ("reduce-scatter", "data"): accumulate * moved(BYTES, 4),
        ("all-reduce", "pod"): 2 * moved(BYTES // 4, 2),
    }
    testing.assert_collectives(found, sends=sends, ignore_below=1024)


@pytest.mark.long("cpu")
@pytest.mark.parametrize("platform", OFF_THE_CHIP)
def test_zero_memory_at_rest_and_within_a_step_matches_the_stage(platform):
    kinds = {
        stage: planned(platform, "pod=1,data=8,model=1", stage).memory for stage in (0, 1, 2, 3)
    }
    assert kinds[0].kinds["parameters"] == BYTES and kinds[0].kinds["optimizer state"] >= 2 * BYTES
    for stage in (1, 2, 3):
        assert kinds[stage].kinds["parameters"] == BYTES // 8
        assert 2 * BYTES // 8 <= kinds[stage].kinds["optimizer state"] < 2 * BYTES // 8 + 1024
    assert kinds[1].most["copies of parameters"] >= BYTES <= kinds[2].most["copies of parameters"]
    layer = BYTES // LAYERS
    # Stage 2 holds a layer's gradients before they are scattered, and all shards; stage 3 one
    # layer's weights as well.
    assert kinds[2].most["gradients"] <= BYTES // 8 + 2 * layer < BYTES
    assert kinds[3].most["copies of parameters"] <= 2 * layer
    assert kinds[1].heap_bytes - kinds[3].heap_bytes > BYTES


@pytest.mark.representative("2-v5e:2x4", "2-h200:1x1x8")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_sends_large_stacks_layer_by_layer_with_the_same_bytes(platform, stage):
    mesh = mesh_on(platform, "pod=1,data=8,model=1")
    small = 2**16
    exchange = sl.Exact(bucket_bytes=small) if stage == 1 else sl.Exact()
    strategy = sl.Strategy(
        mesh=mesh, rules=RULES, zero=sl.Zero(stage, bucket_bytes=small), exchange=exchange
    )
    state = sl.init(make, optax.adam(1e-3), strategy, abstract=True)
    with jax.default_matmul_precision("highest"):
        found = sl.plan(
            sl.train_step(loss, strategy), state, jax.ShapeDtypeStruct((16, WIDTH), "float32")
        )
    sends = {("all-gather", "data"): moved(BYTES, 8), ("reduce-scatter", "data"): moved(BYTES, 8)}
    testing.assert_collectives(found, sends=sends, ignore_below=1024)
    assert max(one.sent_bytes for one in found.collectives) <= moved(BYTES // LAYERS, 8), (
        "at most a layer at a time"
    )


@pytest.mark.long
def test_zero_sends_a_large_table_in_a_few_pieces_of_rows():
    make = lambda: sl.annotate({"table": jnp.ones((2000, WIDTH))}, {"table": ("vocab", "embed")})
    rules = RULES | sl.AxisRules(vocab="model")
    strategy = sl.Strategy(
        mesh="pod=1,data=4,model=2", rules=rules, zero=sl.Zero(1, bucket_bytes=2**18),
        exchange=sl.Exact(bucket_bytes=2**18),
    )  # fmt: skip
    look = lambda model, x, rng: jnp.mean(model["table"][x] ** 2)
    state = sl.init(make, optax.sgd(1.0), strategy)
    step, x = sl.train_step(look, strategy), np.arange(16)
    found = sl.plan(step, state, x)
    assert sent(found, "data") == dict.fromkeys(
        ("all-gather", "reduce-scatter"), 1000 * WIDTH * 4 * 3 // 4
    )
    times = {
        one.kind: one.times
        for one in found.collectives
        if one.sent_bytes > 1024 and one.axes == ("data",)
    }
    assert times == {"all-gather": 4, "reduce-scatter": 4}, (
        "a device's half has 1,000 rows of 1 KiB"
    )
    testing.check_step(
        make,
        optax.sgd(1.0),
        look,
        x,
        rules,
        meshes=["pod=1,data=4,model=2"],
        zero=strategy.zero,
        exchange=strategy.exchange,
    )


@pytest.mark.parametrize("rows", [7, 8, 9])
@pytest.mark.parametrize("count", [1, 3, 4, 99])
def test_in_pieces_handles_pieces_of_unequal_size(rows, count):
    x = jnp.arange(rows * 4 * 3.0).reshape(rows, 4, 3)
    half = lambda part, dim: jax.lax.slice_in_dim(part, 0, 2, axis=dim) * 2
    np.testing.assert_array_equal(jax.jit(lambda x: in_pieces(half, x, 1, count))(x), 2 * x[:, :2])


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2])
def test_zero_layer_by_layer_equals_one_device(stage):
    options = {"zero": sl.Zero(stage, bucket_bytes=2**16)}
    if stage == 1:
        options["exchange"] = sl.Exact(bucket_bytes=2**16)
    x = np.random.RandomState(0).randn(16, WIDTH).astype("f")
    meshes = ["pod=1,data=8,model=1"]
    testing.check_step(make, optax.sgd(1e-6), loss, x, RULES, meshes=meshes, **options)


@pytest.mark.parametrize("platform", PLATFORMS[1:])
@pytest.mark.parametrize("dtype, sent_as", [(None, "bf16"), ("float32", "f32")])
def test_tensor_parallel_product_is_reduced_in_the_preferred_dtype(platform, dtype, sent_as):
    def of_parts(model, x, rng):
        hidden = jnp.tanh(x.astype(jnp.bfloat16) @ model["up"][0])
        down = jnp.einsum("bh,hd->bd", hidden, model["down"][0], preferred_element_type=dtype)
        return jnp.mean(sl.shard(down, "batch", None).astype(jnp.float32) ** 2)

    mesh = mesh_on(platform, "pod=1,data=4,model=2")
    strategy = sl.Strategy(mesh=mesh, rules=RULES, precision="bf16")
    state = sl.init(make, optax.sgd(1e-3), strategy, abstract=True)
    found = sl.plan(
        sl.train_step(of_parts, strategy), state, jax.ShapeDtypeStruct((512, WIDTH), "float32")
    )
    parts = [one for one in found.collectives if one.axes == ("model",) and one.sent_bytes > 1024]
    assert [one.dtypes for one in parts] == [(sent_as,)], testing.summary(parts)


@pytest.mark.long
@pytest.mark.sentinel("0-cpu", "3-cpu")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_zero_sends_per_device_parameters_only_over_the_other_data_axes(platform, stage):
    """As with experts: one weight for each device along `data`, which ZeRO splits over `pod`."""

    def of_ones_own(model, x, rng):
        return jnp.mean((x @ model["own"][0]) ** 2)

    rules = RULES | sl.AxisRules(experts="data")
    make_own = lambda: sl.annotate(
        {"own": jnp.ones((4, WIDTH, HIDDEN))}, {"own": ("experts", "embed", "act_mlp")}
    )
    mesh = mesh_on(platform, "pod=2,data=4,model=1")
    strategy = sl.Strategy(
        mesh=mesh, rules=rules | sl.AxisRules(act_mlp=None), zero=stage, manual=("pod", "data")
    )
    state = sl.init(make_own, optax.sgd(1e-3), strategy, abstract=True)
    with jax.default_matmul_precision("highest"):
        found = sl.plan(
            sl.train_step(of_ones_own, strategy),
            state,
            jax.ShapeDtypeStruct((64, WIDTH), "float32"),
        )
    own = WIDTH * HIDDEN * 4
    sends = {("all-reduce", "pod"): 2 * moved(own, 2)}
    if stage:
        # Once at stage 3 too: nothing before the first layer has a gradient, so backward it does
        # not need its weight.
        sends = {("all-gather", "pod"): moved(own, 2), ("reduce-scatter", "pod"): moved(own, 2)}
    testing.assert_collectives(found, sends=sends, ignore_below=1024)
    if stage == 3:
        lines = [line for one in found.collectives if one.sent_bytes > 1024 for line in one.sources]
        assert lines and all(line.startswith(__file__) for line in lines), lines


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("stage", [1, 3])
def test_rows_shorter_than_a_tile_cross_slices_without_holes(stage):
    """Rows of 64 numbers, as heads are: half of each of a TPU's tiles would be empty."""
    target = sl.Target("tpu:v5e:2x2:slices=2")
    heads = (128, 4, 64)
    strategy = sl.Strategy(
        mesh=target.mesh("pod=2,data=4", dcn="pod"),
        rules=sl.AxisRules(batch=("pod", "data")),
        zero=sl.Zero(stage, axes=("data",), small=0),
    )
    state = sl.init(lambda: {"w": jnp.zeros(heads)}, optax.sgd(1e-3), strategy, abstract=True)
    loss = lambda model, x, rng: jnp.mean(jnp.einsum("bd,dhk->bhk", x, model["w"]) ** 2)
    x = jax.ShapeDtypeStruct((16, 128), "float32")
    found = sl.plan(sl.train_step(loss, strategy), state, x, target)
    crossing = [one for one in found.collectives if "pod" in one.axes and one.sent_bytes > 1024]
    # What ZeRO has scattered within a slice is a quarter for each device.
    quarter = 128 * 4 * 64 * 4 / 4
    assert sum(one.total_bytes for one in crossing) == 2 * moved(quarter, 2)
