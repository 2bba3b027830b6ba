"""Products of one array with several kernels, against each product by itself."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kernel_ops import ROUNDING
from machines import compile_for, mesh_on

import shardlib as sl
from shardlib import kernels, testing

P = jax.P
STREAM = ("batch", "residual_seq", "act_embed")
QUERIES = ("batch", "seq", "act_heads", "head_dim")
KEYS = ("batch", "seq", "act_kv_heads", "head_dim")
HIDDEN = ("batch", "seq", "act_mlp")
OUTPUTS = [QUERIES, KEYS, HIDDEN]
SEQUENCE = sl.rules.data | sl.rules.tensor_sequence


def make(dtype="float32", rows=8, length=8, features=16, heads=4, key_heads=2, size=8, hidden=16):
    """An array, and kernels to queries, keys and hidden units."""
    random = np.random.default_rng(0)
    shapes = (heads, size, features), (key_heads, size, features), (hidden, features)
    draw = lambda shape: jnp.asarray(random.normal(size=shape), dtype)
    return draw((rows, length, features)), [draw(shape) for shape in shapes]


def plain(x, weights):
    return tuple(jnp.tensordot(x, weight, (-1, -1)) for weight in weights)


def derived(function, x, weights):
    """The products and, for random gradients of them, those of the arguments."""
    products, back = jax.vjp(function, x, weights)
    random = np.random.default_rng(1)
    gradients = [jnp.asarray(random.normal(size=y.shape), y.dtype) for y in products]
    return products, back(tuple(gradients))


def assert_near(found, expected, tolerance):
    def check(a, b):
        a, b = np.float64(a), np.float64(b)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * np.abs(b).max())

    jax.tree.map(check, found, expected)


@pytest.mark.representative("float32-True", "float16-True", "float16-False")
@pytest.mark.long(
    "float32-True", "bfloat16-False", "float16-True", "float16-False", "float64-False"
)
@pytest.mark.parametrize("joined", [True, False, None])
@pytest.mark.parametrize("dtype", [*ROUNDING, "float64"])
def test_projections_match_float64_values_and_gradients(dtype, joined):
    with jax.enable_x64():
        x, weights = make(dtype)
        wide = jax.tree.map(lambda a: a.astype("float64"), (x, weights))
        found = derived(partial(kernels.projections, joined=joined), x, weights)
        expected = derived(plain, *wide)
        rounding = ROUNDING.get(dtype, 1e-15)
        # Separate products add up a gradient that was rounded for each of them.
        assert_near(found, expected, 4 * rounding)


RULES = {
    "sequence split": ("data=2,model=4", SEQUENCE),
    "sequence whole": ("data=2,model=4", sl.rules.data | sl.rules.tensor),
    "keys whole": ("data=2,model=4", SEQUENCE | sl.AxisRules(act_kv_heads=["model", None])),
    "axes of size one": ("data=8,model=1", SEQUENCE),
    "two axes gathered": (
        "data=2,other=2,model=2",
        SEQUENCE | sl.AxisRules(residual_seq=("other", "model")),
    ),
    "one of two axes gathered": (
        "data=2,other=2,model=2",
        SEQUENCE | sl.AxisRules(residual_seq=("other", "model"), seq="other"),
    ),
    "four axes": (
        "pod=1,data=2,other=2,model=2",
        SEQUENCE | sl.AxisRules(batch=("pod", "data"), act_mlp=("model", "other")),
    ),
    "batch whole": ("other=2,model=4", sl.rules.tensor_sequence),
}


# As in a train step, and where all axes are automatic.
@pytest.mark.representative()
@pytest.mark.long(
    "sequence split-automatic",
    "sequence whole-data manual",
    "keys whole-data manual",
    "axes of size one-data manual",
    "two axes gathered-automatic",
    "one of two axes gathered-data manual",
    "four axes-automatic",
    "batch whole-data manual",
)
@pytest.mark.parametrize("manual", [("pod", "data"), ()], ids=["data manual", "automatic"])
@pytest.mark.parametrize("case", RULES)
def test_projections_joined_on_meshes_equal_one_device(case, manual):
    mesh_text, rules = RULES[case]
    mesh = sl.make_mesh(mesh_text)
    x, weights = make(key_heads=2 if case == "keys whole" else 4)
    call = partial(kernels.projections, names=STREAM, outputs=OUTPUTS, joined=True)
    axes = tuple(axis for axis in manual if axis in mesh.shape)

    def both(x, weights):
        products, back = jax.vjp(call, x, weights)
        dx, gradients = back(tuple(map(jnp.cos, products)))
        return products, (dx, jax.lax.psum(gradients, axes) if axes else gradients)

    if axes:
        both = jax.shard_map(
            both,
            mesh=mesh,
            in_specs=(P(axes), P()),
            out_specs=(P(axes), (P(axes), P())),
            axis_names=set(axes),
            check_vma=False,
        )
    with sl.use(rules, mesh):
        found = jax.jit(both)(x, weights)
        expected_layouts = [
            jax.jit(lambda y, names=names: sl.shard(y, *names))(y).sharding
            for y, names in zip(found[0], OUTPUTS, strict=True)
        ]
    products, back = jax.vjp(plain, x, weights)
    assert_near(found, (products, back(tuple(map(jnp.cos, products)))), 2e-6)
    for product, layout in zip(found[0], expected_layouts, strict=True):
        assert product.sharding.is_equivalent_to(layout, product.ndim)


def count_products(function, *arguments):
    return len(re.findall(r"\bdot_general\b", str(jax.make_jaxpr(function)(*arguments))))


@pytest.mark.parametrize(
    "rows, features, heads, products",
    [
        (4096, 512, 4, 1),  # many rows, few columns
        (8, 512, 4, 3),  # few rows: the copies of kernels cost more
        (4096, 32, 64, 3),  # few features: the copies of products cost more
    ],
)
def test_projections_join_where_a_device_reads_and_writes_less(rows, features, heads, products):
    shapes = make(length=rows // 4, features=features, heads=heads, key_heads=heads)
    assert count_products(kernels.projections, *shapes) == products


def test_projections_count_the_columns_of_one_device():
    """Columns that are too many for one device are few on each of eight."""
    x, weights = make(rows=2, length=1024, features=256, heads=64, key_heads=64, hidden=512)
    call = partial(kernels.projections, names=STREAM, outputs=OUTPUTS)
    with sl.unsharded():
        assert count_products(call, x, weights) == 3
    with sl.use(sl.rules.vocabulary | sl.rules.tensor_sequence, sl.make_mesh("model=8")):
        assert count_products(call, x, weights) == 1


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("size, products", [(64, 3), (128, 1)])
def test_projections_stay_apart_where_a_tpu_would_pad_their_parts(size, products):
    x, weights = make(length=1024, features=1024, heads=1, key_heads=1, size=size, hidden=size)
    with sl.use(sl.rules.vocabulary, mesh_on("v5e:2x4", "data=8")):
        call = partial(kernels.projections, names=STREAM, outputs=OUTPUTS)
        assert count_products(call, x, weights) == products


def test_projections_over_an_automatic_batch_are_left_to_the_partitioner():
    x, weights = make(rows=8, length=1024, features=256, key_heads=4)
    call = partial(kernels.projections, names=STREAM, outputs=OUTPUTS)
    with sl.use(SEQUENCE, sl.make_mesh("data=2,model=4")):
        assert count_products(call, x, weights) == 3


def test_projections_are_derived_in_forward_mode_and_twice():
    x, weights = make()
    joined = lambda x: kernels.projections(jnp.sin(x), weights, joined=True)[0].sum()
    separate = lambda x: kernels.projections(jnp.sin(x), weights, joined=False)[0].sum()
    second = lambda f: jax.jvp(jax.grad(f), (x,), (x,))
    assert_near(second(joined), second(separate), 1e-5)


def test_projections_under_vmap_and_scan_equal_a_loop():
    x, weights = make()
    call = lambda x: kernels.projections(x, weights, joined=True)
    assert_near(jax.vmap(call)(x), plain(x, weights), 2e-6)
    scanned = jax.lax.scan(lambda _, x: (None, call(x)), None, x)[1]
    assert_near(scanned, plain(x, weights), 2e-6)


def test_projections_keep_no_concatenated_kernel_for_the_backward_pass():
    """At stage 3 a layer's kernels are gathered again for its backward pass."""
    names = {"q": ("layers", "heads", "embed"), "k": ("layers", "heads", "embed")}
    make_weights = lambda: sl.annotate(
        {name: jnp.zeros((3, 16, 64)) for name in names}, dict(names)
    )

    def loss(model, x, rng):
        def layer(x, weights):
            q, k = kernels.projections(x, [weights["q"], weights["k"]], joined=True)
            return x + jnp.tanh(jnp.concatenate([q, k, q, k], -1)), None

        return jnp.mean(jax.lax.scan(layer, x, model)[0])

    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, zero=sl.Zero(3, small=0))
    state = sl.init(make_weights, optax.sgd(0.1), strategy, abstract=True)
    x = jax.ShapeDtypeStruct((16, 64), "float32")
    text = sl.train_step(loss, strategy).lower(state, x).as_text()
    # Two kernels forward, and two backward.
    assert text.count("stablehlo.all_gather") == 4
    # Loops carry no stack of concatenated kernels from one pass to the other.
    assert "tensor<3x32x64xf32>" not in text


TARGETS = [
    "cpu",
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]


@pytest.mark.parametrize(
    "target, joined",
    [
        ("cpu", True),
        pytest.param("v5e:2x4", True, marks=pytest.mark.tpu_compiler),
        pytest.param("h200:1x1x8", True, marks=pytest.mark.gpu_compiler),
        pytest.param("h200:1x1x8", False, marks=pytest.mark.gpu_compiler),
    ],
)
def test_projections_keep_parts_of_a_split_sequence_for_the_backward_pass(target, joined):
    """What is gathered for the products is gathered again, even in the loop over layers."""
    mesh = mesh_on(target, "model=8")
    layers, rows, length, features, hidden = 3, 2, 1024, 256, 512
    output = ("batch", "seq", "act_mlp")

    def layer(x, weights):
        (up,) = kernels.projections(
            x, [weights["up"]], names=STREAM, outputs=[output], joined=joined
        )
        down = sl.shard(jnp.tensordot(jnp.tanh(up), weights["down"], (-1, -1)), *STREAM)
        return x + jnp.sin(down), None

    def loss(weights, x):
        return jax.lax.scan(layer, x, weights)[0].astype("float32").sum()

    def place(shape, *spec):
        return jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.NamedSharding(mesh, P(*spec)))

    weights = {
        "up": place((layers, hidden, features), None, "model"),
        "down": place((layers, features, hidden), None, None, "model"),
    }
    x = place((rows, length, features), None, "model")
    with sl.use(sl.rules.vocabulary | sl.rules.tensor_sequence, mesh):
        text = compile_for(mesh, jax.jit(jax.grad(loss)).lower(weights, x)).as_text()
    assert f"[{layers},{rows},{length // 8},{features}]" in text
    assert f"[{layers},{rows},{length},{features}]" not in text


@pytest.mark.parametrize("target", TARGETS)
def test_projections_gather_once_forward_and_scatter_once_backward(target):
    mesh = mesh_on(target, "model=8")
    x, weights = make("bfloat16", rows=2, length=1024, features=256, heads=8, key_heads=8)
    rules = sl.rules.vocabulary | sl.rules.tensor_sequence

    def both(x, weights):
        call = partial(kernels.projections, names=STREAM, outputs=OUTPUTS, joined=True)
        products, back = jax.vjp(call, sl.shard(x, *STREAM), weights)
        dx, gradients = back(tuple(map(jnp.cos, products)))
        return sl.shard(dx, *STREAM), gradients

    def place(a, *spec):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.NamedSharding(mesh, P(*spec)))

    shapes = place(x, None, "model"), [place(weight, "model") for weight in weights]
    with sl.use(rules, mesh):
        compiled = compile_for(mesh, jax.jit(both).lower(*shapes))

    found = testing.collectives(compiled, mesh)
    size = 2 * 1024 * 256
    moved = sum(one.total_bytes for one in found if one.kind != "all-reduce")
    assert sorted(one.kind for one in found) == ["all-gather", "reduce-scatter"]
    # Of the whole array, 7 parts of 8, out and back. CPUs send float32.
    width = 4 if target == "cpu" else 2
    assert moved == 2 * width * size * 7 // 8


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x, w: kernels.projections(x, []), "`kernels` is empty"),
        (lambda x, w: kernels.projections(x, w[0]), "in a list"),
        (lambda x, w: kernels.projections(x, [w[0][..., :4]]), r"float32\[4, 8, 4\] and `x`"),
        (lambda x, w: kernels.projections(x, [w[0].astype("bfloat16")]), "`astype`"),
        (lambda x, w: kernels.projections(x, w, joined="yes"), "joined"),
        (lambda x, w: kernels.projections(x, w, names=STREAM), "together, or neither"),
        (
            lambda x, w: kernels.projections(x, w, names=STREAM, outputs=OUTPUTS[:2]),
            "names for 2 products, of 3 kernels",
        ),
        (
            lambda x, w: kernels.projections(x, w[:1], names=STREAM, outputs=[HIDDEN]),
            r"has 3 names .* has 4 dims",
        ),
        (
            lambda x, w: kernels.projections(x, w[1:], names=STREAM, outputs=[KEYS, STREAM]),
            r"`outputs\[1\]` begins with",
        ),
        (lambda x, w: kernels.projections(x, w, joined=True), "give it `names` and `outputs`"),
        (
            lambda x, w: kernels.projections(
                x, w, names=("batch", "seq", "act_mlp"), outputs=OUTPUTS, joined=True
            ),
            "features of `x` are split over `model`",
        ),
        (
            lambda x, w: kernels.projections(
                x, w[2:], names=("batch", None, None), outputs=[("batch", "act_mlp", None)],
                joined=True,
            ),
            r"dim 1 is split over \(\) in `x` and over \('model',\) in a product",
        ),
        (
            lambda x, w: kernels.projections(
                x[:, :5], w, names=STREAM, outputs=OUTPUTS, joined=True
            ),
            "would be padded",
        ),
    ],
)  # fmt: skip
def test_projections_refuse_what_they_cannot_do_and_say_why(call, message):
    x, weights = make(key_heads=4)
    padded = SEQUENCE.indivisible(residual_seq="pad")
    with sl.use(padded, sl.make_mesh("data=2,model=4")), pytest.raises(ValueError, match=message):
        jax.jit(call)(x, weights)
