"""Gradients that are sent in one dtype and added up in another."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from machines import compile_for

import shardlib as sl
from shardlib.collectives._sums import sum_scatter, sum_whole

P = jax.P
RULES = sl.rules.data | sl.AxisRules(batch=("pod", "data"), wide="model")

ONE_AXIS = "pod=1,data=8,model=1"


def mapped(function, mesh, out):
    """A function of each device's own rows, over all axes of a mesh."""
    axes = mesh.axis_names
    return jax.jit(
        jax.shard_map(
            lambda x: function(x[0])[None], mesh=mesh, in_specs=P(axes), out_specs=P(axes, *out)
        )
    )


@pytest.mark.representative()
@pytest.mark.long("rows0-data=8", "rows1-pod=2,data=4", "rows2-pod=2,data=4", "rows3-data=8")
@pytest.mark.parametrize("shape", ["data=8", "pod=2,data=4"])
@pytest.mark.parametrize("rows", [(16, 3), (8, 128), (8,), (24, 256, 2)])
def test_wire_dtype_rounds_only_the_values_that_are_sent(shape, rows):
    mesh = sl.make_mesh(shape)
    axes = mesh.axis_names
    # Whole numbers, which bfloat16 holds and whose sums it does not.
    x = np.random.default_rng(0).integers(-250, 250, (8, *rows)).astype(np.float32)
    whole = mapped(lambda one: sum_whole(one, axes, jnp.bfloat16), mesh, ())(x)
    once_rounded = x.sum(0).astype(jnp.bfloat16).astype(np.float32)
    if len(axes) == 1:
        np.testing.assert_array_equal(whole, np.broadcast_to(once_rounded, x.shape))
    else:  # sums over the first axis are rounded before they are sent over the second
        np.testing.assert_allclose(whole[0], x.sum(0), atol=3 * 2.0**-8 * 1000)
    parts = mapped(lambda one: sum_scatter(one, 0, axes, jnp.bfloat16), mesh, ())(x)
    parts = np.concatenate(list(np.asarray(parts)))
    if len(axes) == 1:
        np.testing.assert_array_equal(parts, x.sum(0))
    else:
        np.testing.assert_allclose(parts, x.sum(0), atol=2 * 2.0**-8 * 1000)


def test_wire_dtype_sums_keep_small_contributions():
    mesh = sl.make_mesh("data=8")
    x = np.full((8, 8, 4), 2.0**-9, np.float32)
    x[0] = 1
    parts = mapped(lambda one: sum_scatter(one, 0, ("data",), jnp.bfloat16), mesh, ())(x)
    assert np.all(np.asarray(parts) == 1 + 7 * 2.0**-9)


def run(mesh, precision, stage, steps=3, **options):
    """The parameters after some steps of a small model with all kinds of parameters."""
    strategy = sl.Strategy(
        mesh=mesh, rules=RULES, zero=sl.Zero(stage, small=0), precision=precision, **options
    )

    def make():
        keys = jax.random.split(jax.random.key(0), 2)
        return {
            "up": jax.random.normal(keys[0], (16, 32)) / 4,
            "scale": jnp.ones(32),
            "odd": jnp.ones(3),
            "down": jax.random.normal(keys[1], (32, 8)) / 6,
        }

    names = {"up": (None, "wide"), "scale": ("wide",), "odd": (None,), "down": ("wide", None)}

    def loss(model, batch, rng):
        x = batch["x"].astype(model["up"].dtype)
        hidden = jnp.tanh(x @ model["up"]) * model["scale"]
        y = (hidden @ model["down"]).astype(jnp.float32)
        return jnp.mean((y - batch["y"]) ** 2) * jnp.mean(model["odd"].astype(jnp.float32) ** 2)

    state = sl.init(lambda: sl.annotate(make(), names), optax.sgd(0.1), strategy)
    step = sl.train_step(loss, strategy)
    rng = np.random.default_rng(1)
    batch = {
        "x": rng.normal(size=(32, 16)).astype(np.float32),
        "y": rng.normal(size=(32, 8)).astype(np.float32),
    }
    for _ in range(steps):
        state, metrics = step(state, batch)
    return jax.tree.map(np.asarray, state.params), metrics, (step, state, batch)


@pytest.mark.representative(
    "0-pod=2,data=2,model=2-1", "2-pod=2,data=2,model=2-1", "3-pod=2,data=2,model=2-2"
)
@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "mesh", "accumulate"),
    [
        (0, "pod=2,data=2,model=2", 1),
        (1, "pod=2,data=2,model=2", 2),
        (2, "pod=2,data=2,model=2", 1),
        (3, "pod=2,data=2,model=2", 2),
        (3, ONE_AXIS, 1),
    ],
)
def test_wire_dtype_step_stays_close_to_the_exact_step(stage, mesh, accumulate):
    exact, _, _ = run(mesh, sl.Precision(), stage, accumulate=accumulate)
    near, metrics, _ = run(mesh, sl.Precision(wire="bf16"), stage, accumulate=accumulate)
    for name, array in exact.items():
        moved = np.abs(array - near[name]).max()
        assert moved < 0.01 * 0.1, name
    assert np.isfinite(metrics["loss"])


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, 3])
def test_wire_dtype_bfloat16_loses_nothing_of_bfloat16_gradients(stage):
    """Over one axis, what is scattered is added up in float32 from what every device has."""
    exact, _, _ = run(ONE_AXIS, sl.Precision("bf16"), stage)
    narrow, _, _ = run(ONE_AXIS, sl.Precision("bf16", wire="bf16"), stage)
    for name in ("up", "down"):
        np.testing.assert_allclose(narrow[name], exact[name], rtol=0, atol=2e-4)


@pytest.mark.long("3")
@pytest.mark.parametrize("stage", [0, 3])
def test_wire_dtype_applies_to_the_whole_gradient(stage):
    _, _, (step, state, batch) = run(ONE_AXIS, sl.Precision(wire="bf16"), stage, steps=1)
    found = sl.testing.collectives(step.lower(state, batch).compile(), sl.make_mesh(ONE_AXIS))
    sums = [one for one in found if one.kind in ("all-reduce", "reduce-scatter")]
    # What is left are the loss, its weight and the norm.
    assert all(one.operand_bytes < 64 for one in sums)
    # A CPU widens what it sends; the compilers below do not.
    assert any(one.kind == "all-to-all" for one in found)


@pytest.mark.representative("0-tpu:v5e:4x4", "3-tpu:v5p:2x2x2")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("target", ["tpu:v5e:4x4", "tpu:v5p:2x2x2"])
@pytest.mark.parametrize("stage", [0, 3])
def test_wire_dtype_on_tpus_sends_each_bfloat16_gradient_once(target, stage):
    check_compiled(target, stage)


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("stage", [0, 3])
def test_wire_dtype_on_gpus_sends_each_bfloat16_gradient_once(stage):
    check_compiled("gpu:h200:1x1x8", stage)


def check_compiled(target, stage):
    """A step whose only large transfers are a gather, and an all-to-all of one weight's size."""
    mesh = sl.Target(target).mesh("data=-1")
    strategy = sl.Strategy(
        mesh=mesh, rules=sl.rules.data, zero=stage, precision=sl.Precision("bf16", wire="bf16")
    )
    state = sl.init(lambda: {"w": jnp.zeros((1024, 1024))}, optax.sgd(0.1), strategy, abstract=True)
    step = sl.train_step(
        lambda model, x, rng: jnp.mean((x.astype(model["w"].dtype) @ model["w"]) ** 2), strategy
    )
    batch = jax.ShapeDtypeStruct((8 * mesh.size, 1024), "float32")
    found = sl.testing.collectives(compile_for(mesh, step.lower(state, batch)), mesh)
    large = [one for one in found if one.total_bytes > 2**16]
    assert {one.kind for one in large} == {"all-gather", "all-to-all"}, found
    [sent] = [one for one in large if one.kind == "all-to-all"]
    assert set(sent.dtypes) == {"bf16"}
    assert sent.total_bytes == 2 * 1024 * 1024 * (mesh.size - 1) // mesh.size


def test_wire_dtype_wider_than_the_sums_is_refused():
    with pytest.raises(ValueError, match=r'wire="float32", reduce="bfloat16".*reduce="float32"'):
        sl.Precision("bf16", reduce="bf16", wire="float32")


@pytest.mark.parametrize("value", ["float16", "int8", "float8_e4m3fn", 3])
def test_wire_dtype_that_is_unsupported_is_refused(value):
    with pytest.raises(ValueError, match=r"Precision\(wire="):
        sl.Precision(wire=value)


def test_wire_dtype_does_not_narrow_float64_and_complex_gradients():
    precision = sl.Precision(wire="bf16")
    assert precision.sent("float64") == "float64"
    assert precision.sent("complex64") == "complex64"
    assert precision.sent("bfloat16") == precision.sent("float32") == "bfloat16"
    assert sl.Precision(reduce="bf16").sent("float32") == "bfloat16"
