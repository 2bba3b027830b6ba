"""Gated units, and activations of a sum with a bias, against plain formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.ad_checkpoint import saved_residuals
from kernel_ops import ROUNDING, near, some

import shardlib as sl
from shardlib import kernels

P = jax.P
PLAIN = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
}
every_activation = pytest.mark.parametrize("activation", PLAIN)
every_dtype = pytest.mark.parametrize("dtype", [*ROUNDING, "float64"])


def glu(activation, arrays):
    return kernels.glu(arrays["gate"], arrays["up"], activation)


def plain_glu(activation, arrays):
    return PLAIN[activation](arrays["gate"]) * arrays["up"]


def activate(activation, arrays):
    return kernels.activate(arrays["x"], arrays.get("bias"), activation)


def plain_activate(activation, arrays):
    return PLAIN[activation](arrays["x"] + arrays.get("bias", 0))


FORMS = {"glu": (glu, plain_glu), "activate": (activate, plain_activate)}
every_form = pytest.mark.parametrize("form", FORMS)


def make(form, shape, dtype="float32", seed=0, bias_dtype=None):
    random = np.random.default_rng(seed)
    one = lambda shape, dtype: jnp.asarray(3 * random.normal(size=shape), dtype)
    if form == "glu":
        return {"gate": one(shape, dtype), "up": one(shape, dtype)}
    return {"x": one(shape, dtype), "bias": one(shape[-1:], bias_dtype or dtype)}


def derived(function, arrays, cotangent=None):
    out, back = jax.vjp(function, arrays)
    return out, back(some(out) if cotangent is None else cotangent)[0]


def true(form, activation, arrays, cotangent):
    """Of the plain formula, in float64."""
    with jax.enable_x64():
        wide = jax.tree.map(lambda x: jnp.asarray(np.float64(x)), arrays)
        plain = functools.partial(FORMS[form][1], activation)
        found = derived(plain, wide, jnp.asarray(np.float64(cotangent)))
        return jax.tree.map(np.asarray, found)


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.sentinel(
    "float32-silu-glu",
    "float32-silu-activate",
    "float32-gelu-glu",
    "float32-gelu-activate",
    "float32-gelu_tanh-glu",
    "float32-gelu_tanh-activate",
    "float32-relu-glu",
    "float32-relu-activate",
    "float32-sigmoid-glu",
    "float32-sigmoid-activate",
    "bfloat16-silu-activate",
    "bfloat16-gelu-glu",
    "bfloat16-relu-glu",
    "float16-gelu_tanh-activate",
    "float16-sigmoid-glu",
    "float64-silu-glu",
)
@every_form
@every_activation
@every_dtype
def test_activations_match_float64_values_and_gradients(form, activation, dtype):
    @given(st.integers(1, 3), st.integers(1, 40), st.integers(1, 130), st.integers(0, 9))
    @settings(deadline=None, max_examples=3, derandomize=True)
    def check(batch, rows, row, seed):
        with jax.enable_x64(dtype == "float64"):
            bias_dtype = "float32" if seed % 2 and dtype != "float64" else dtype
            arrays = make(form, (batch, rows, row), dtype, seed, bias_dtype)
            function = functools.partial(FORMS[form][0], activation)
            found = jax.jit(functools.partial(derived, function))(arrays)
            cotangent = some(found[0])
        assert found[0].dtype == dtype
        assert jax.tree.map(lambda x: x.dtype, found[1]) == jax.tree.map(lambda x: x.dtype, arrays)
        wanted = true(form, activation, arrays, cotangent)
        near(found, wanted, 1e-13 if dtype == "float64" else 1.5 * ROUNDING[dtype], 1e-3)

    check()


@every_form
@every_activation
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_save_only_their_arguments_for_backward(form, activation, dtype):
    arrays = make(form, (4, 8), dtype)
    function = functools.partial(FORMS[form][0], activation)
    saved = saved_residuals(lambda arrays: function(arrays).astype(jnp.float32).sum(), arrays)
    sizes = sorted((x.shape, x.dtype) for x, _ in saved)
    assert sizes == sorted((x.shape, x.dtype) for x in arrays.values()), saved


@pytest.mark.representative(
    "gelu-activate",
    "gelu_tanh-glu",
    "gelu_tanh-activate",
    "relu-glu",
    "relu-activate",
    "sigmoid-glu",
    "sigmoid-activate",
)
@pytest.mark.long
@pytest.mark.sentinel("silu-glu")
@every_form
@every_activation
def test_activations_have_second_derivatives_in_forward_and_reverse_mode(form, activation):
    with jax.enable_x64():
        arrays = make(form, (2, 3), "float64")
        ours, plain = (lambda arrays, f=f: (f(activation, arrays) ** 2).sum() for f in FORMS[form])
        for mode in (jax.jacfwd, jax.jacrev):
            found, wanted = (mode(jax.grad(function))(arrays) for function in (ours, plain))
            near(found, wanted, 1e-12)


@pytest.mark.representative()
@pytest.mark.long(
    "float16-silu",
    "float16-gelu",
    "float16-gelu_tanh",
    "float16-relu",
    "float16-sigmoid",
    "float64-silu",
    "float64-gelu",
    "float64-gelu_tanh",
    "float64-relu",
    "float64-sigmoid",
)
@every_activation
@every_dtype
def test_activations_reach_their_limits_at_infinity_and_large_inputs(activation, dtype):
    with jax.enable_x64(dtype == "float64"):
        largest = float(jnp.finfo(dtype).max)
        below = jnp.asarray([-np.inf, -largest, -2e4, -800], dtype)
        above = jnp.asarray([800, 2e4, largest, np.inf], dtype)
        one = lambda z: kernels.activate(z, None, activation)
        gated = lambda z: kernels.glu(z, jnp.full_like(z, 0.5), activation)

        def found(z):
            slope = jax.grad(lambda z: one(z).sum())
            y, (slopes, jumps) = one(z), derived(slope, z, jnp.ones_like(z))
            of_gate = derived(gated, z, jnp.ones_like(z))
            return [np.float64(x) for x in (y, slopes, jumps, *of_gate)]

        lower, upper = found(below), found(above)
    for each in lower:
        np.testing.assert_array_equal(each, np.zeros(4))
    # A sigmoid ends at one, and all others grow as their argument does.
    grows = float(activation != "sigmoid")
    y, slopes, jumps, half, half_slopes = upper
    np.testing.assert_array_equal(y, np.float64(above) if grows else np.ones(4))
    np.testing.assert_array_equal(slopes, np.full(4, grows))
    np.testing.assert_array_equal(jumps, np.zeros(4))
    np.testing.assert_array_equal(half, y / 2)
    np.testing.assert_array_equal(half_slopes, slopes / 2)


def test_activations_keep_nan_within_its_element():
    x = jnp.ones((3, 4)).at[1, 2].set(np.nan)
    for function in (lambda x: kernels.activate(x), lambda x: kernels.glu(x, x)):
        found = jax.value_and_grad(lambda x, f=function: (f(x), f(x))[0].sum(where=~jnp.isnan(x)))(
            x
        )
        assert np.isfinite(found[0])
        assert np.isnan(np.asarray(function(x))).sum() == 1
    assert np.isinf(kernels.glu(jnp.ones(2), jnp.full(2, np.inf))).all()


@every_form
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_under_vmap_and_scan_match_a_loop(form, activation):
    function = functools.partial(derived, functools.partial(FORMS[form][0], activation))
    each = [make(form, (3, 5), seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *each)
    wanted = jax.tree.map(lambda *found: np.stack(found), *map(function, each))
    near(jax.vmap(function)(stacked), wanted, 1e-6)
    near(jax.lax.scan(lambda none, one: (none, function(one)), None, stacked)[1], wanted, 1e-6)


@pytest.mark.representative()
@pytest.mark.long(
    "unchecked-()-bfloat16-glu",
    "unchecked-()-bfloat16-activate",
    "unchecked-('data',)-bfloat16-glu",
    "unchecked-('data',)-bfloat16-activate",
    "unchecked-('data', 'model')-bfloat16-activate",
    "checked-()-bfloat16-glu",
    "checked-()-bfloat16-activate",
    "checked-('data',)-bfloat16-glu",
    "checked-('data',)-bfloat16-activate",
    "checked-('data', 'model')-bfloat16-activate",
)
@every_form
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [(), ("data",), ("data", "model")], ids=str)
@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
def test_activations_on_shards_match_one_device(form, dtype, axes, checked):
    if checked and not axes:
        pytest.skip("there is no `shard_map`")
    arrays = make(form, (4, 8, 16), dtype)
    cotangent = some(arrays["gate" if form == "glu" else "x"])
    function = functools.partial(FORMS[form][0], "gelu_tanh")
    wanted = true(form, "gelu_tanh", arrays, cotangent)
    mesh = sl.make_mesh("data=2,model=4")
    spec = P("data", None, "model")
    specs = {name: P("model") if name == "bias" else spec for name in arrays}

    def run(arrays, cotangent):
        out, gradients = derived(function, arrays, cotangent)
        # There JAX itself adds up what is the same on devices.
        if "bias" in gradients and axes and not checked:
            # A CPU's compiler aborts on sums of bfloat16 beside automatic axes.
            added = jax.lax.psum(gradients["bias"].astype(jnp.float32), "data")
            gradients["bias"] = added.astype(dtype)
        return out, gradients

    if axes:
        inside = jax.tree.map(lambda one: P(*(n if n in axes else None for n in one)), specs)
        of_x = P(*(n if n in axes else None for n in spec))
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(inside, of_x),
            out_specs=(of_x, inside),
            axis_names=set(axes),
            check_vma=checked,
        )
    place = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))
    found = jax.jit(run)(jax.tree.map(place, arrays, specs), place(cotangent, spec))
    # Where nothing is known of what differs, parts are added up by whoever holds them, rounded.
    rounded = 4 if axes and not checked else 1.5
    near(found, wanted, rounded * ROUNDING[dtype])
    assert found[0].sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 3)


def test_activation_bias_gradient_is_rounded_once_across_devices():
    """Sums over devices of what each has rounded would lose the small one."""
    mesh = sl.make_mesh("data=8")
    cotangent = jnp.asarray([[256.0]] + [[0.5]] * 7, jnp.bfloat16)
    x, bias = jnp.ones((8, 1), jnp.bfloat16), jnp.ones(1, jnp.bfloat16)

    def gradient(x, bias, cotangent):
        return jax.vjp(lambda bias: kernels.activate(x, bias, "relu"), bias)[1](cotangent)[0]

    whole = gradient(x, bias, cotangent)
    manual = jax.shard_map(gradient, mesh=mesh, in_specs=(P("data"), P(), P("data")), out_specs=P())
    found = jax.jit(manual)(x, bias, cotangent)
    assert float(found[0]) == float(whole[0]) == float(jnp.bfloat16(259.5))


def test_activation_gradients_with_a_per_device_bias_and_replicated_input():
    mesh = sl.make_mesh("data=8")
    x, biases = make("activate", (3, 4))["x"], make("glu", (8, 4))["up"]

    def total(x, biases):
        per_device = lambda x, bias: kernels.activate(x, bias[0]).sum()[None]
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        return jax.shard_map(per_device, mesh=mesh, **specs)(x, biases).sum()

    def plain(x, biases):
        return jax.nn.gelu(x + biases[:, None]).sum()

    near(jax.jit(jax.grad(total, (0, 1)))(x, biases), jax.grad(plain, (0, 1))(x, biases), 1e-5)


def test_activations_accept_empty_arrays_and_scalars():
    assert kernels.glu(jnp.ones((0, 3)), jnp.ones((0, 3))).shape == (0, 3)
    assert kernels.activate(jnp.float32(1), activation="relu") == 1
    gradient = jax.grad(lambda bias: kernels.activate(jnp.ones((0, 3)), bias).sum())(jnp.ones(3))
    np.testing.assert_array_equal(gradient, np.zeros(3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: kernels.glu(x, x, "tanh"), "glu.activation='tanh'.. takes one of 'silu', 'ge"),
        (lambda x: kernels.activate(x, None, "swish"), "activate.activation='swish'"),
        (lambda x: kernels.glu(x, x[:1]), r"`glu`: `up` is float32\[1, 3\] and `gate` is float32"),
        (lambda x: kernels.glu(x, x.astype("bfloat16")), r"`up` is bfloat16\[2, 3\].*`astype`"),
        (lambda x: kernels.glu(x.astype(int), x), r"`glu`: `gate` is int32\[2, 3\]: give it floa"),
        (lambda x: kernels.activate(x.astype("float8_e4m3fn")), "`activate`: `x` is float8_e4m3f"),
        (lambda x: kernels.activate(x, x), r"`bias` is float32\[2, 3\]; it has a float for each"),
        (lambda x: kernels.activate(x, jnp.ones(3, int)), r"`activate`: `bias` is int32\[3\]"),
        (lambda x: kernels.activate(x[0, 0], jnp.ones(1)), r"of `x`, which is float32\[\]"),
        (lambda x: kernels.activate("x"), "activate.x='x'.. takes an array of numbers"),
    ],
)
def test_activations_refuse_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(jnp.ones((2, 3)))
