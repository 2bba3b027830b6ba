"""Mesh axes that span several dims of a TPU's torus: detected, and gathered and scattered over."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from machines import compile_for

import shardlib as sl
from shardlib import testing
from shardlib.collectives._sums import gather_along, sum_scatter
from shardlib.layouts import _annotate
from shardlib.machine._torus import groups_along, torus_dims

P = jax.P


@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("target", "shape", "expected"),
    [
        ("tpu:v5e:16x16", "data=256", {"data": (16, 16)}),
        ("tpu:v5e:16x16", "x=16,y=16", {}),
        ("tpu:v5e:16x16", "data=64,model=4", {"data": (4, 16)}),
        ("tpu:v5p:4x4x4", "data=64", {"data": (4, 4, 4)}),
        ("tpu:v4:4x4x8", "data=32,model=4", {"data": (4, 8)}),
        # The two cores of a chip are no dim.
        ("tpu:7x:4x4x4", "data=-1", {"data": (4, 4, 8)}),
        ("tpu:7x:4x4x4", "x=4,y=4,z=8", {}),
        ("tpu:v5p:2x2x2", "data=8", {"data": (2, 2, 2)}),
        ("tpu:v4:2x2x2", "data=8", {"data": (2, 2, 2)}),
        # A ring through all chips.
        ("tpu:v5e:2x4", "data=8", {}),
        ("tpu:v5e:4x4:slices=2", "data=32", {}),
    ],
)
def test_torus_dims_are_detected_for_axes_spanning_several_dims(target, shape, expected):
    dcn = "data=2" if "slices" in target else ""
    assert dict(torus_dims(sl.Target(target).mesh(shape, dcn=dcn))) == expected


@pytest.mark.gpu_compiler
def test_torus_dims_of_gpus_are_empty():
    mesh = sl.Target("gpu:h100:1x1x4").mesh("data=2,model=2")
    assert torus_dims(mesh) == ()
    assert "torus" not in sl.describe_mesh(mesh)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 2), (8,), (2, 1, 4)])
def test_torus_groups_differ_in_only_one_coordinate(sizes):
    index = np.arange(8).reshape(sizes)
    for digit in range(len(sizes)):
        expected = np.moveaxis(index, digit, -1).reshape(-1, sizes[digit])
        assert groups_along(sizes, digit, digit + 1) == expected.tolist()
    assert groups_along(sizes, 0, len(sizes)) == [list(range(8))]


def put_on_torus(monkeypatch, *sizes):
    """Simulated devices of the axis `data` as if they lay along dims of so many each."""
    monkeypatch.setattr(_annotate, "torus_dims", lambda mesh: (("data", sizes),))


TORI = [(2, 2, 2), (2, 4), (4, 2), (2, 2, 2, 1)]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("sizes", TORI)
def test_torus_gather_and_scatter_equal_those_over_the_whole_axis(sizes, dim, monkeypatch):
    put_on_torus(monkeypatch, *sizes)
    x = np.random.default_rng(0).normal(size=(16, 24)).astype("f")
    split = P(*[None] * dim, "data")

    def on_devices(function, in_spec, out_spec):
        run = jax.shard_map(function, in_specs=in_spec, out_specs=out_spec, check_vma=False)
        return jax.jit(run)

    with sl.use(sl.rules.data, sl.make_mesh("data=8")):
        gathered = on_devices(lambda part: gather_along(part, dim, "data"), split, P())(x)
        number = lambda: 1 + jax.lax.axis_index("data").astype(jnp.float32)
        scatter = lambda whole: sum_scatter(whole * number(), dim, ("data",))
        scattered = on_devices(scatter, P(), split)(x)
    np.testing.assert_array_equal(gathered, x)
    np.testing.assert_allclose(scattered, 36 * x, rtol=1e-6)


@pytest.mark.parametrize("sizes", [(8,), *TORI])
@pytest.mark.parametrize("shape", [(5, 1024), (5, 8, 128), (16, 1024), (5, 24)])
def test_gather_of_parts_that_fill_no_tiles_equals_the_array(shape, sizes, monkeypatch):
    put_on_torus(monkeypatch, *sizes)
    x = np.random.default_rng(0).normal(size=(8 * shape[0], *shape[1:])).astype("f")
    with sl.use(sl.rules.data, sl.make_mesh("data=8")):
        gather = lambda part: gather_along(part, 0, "data")
        run = jax.shard_map(gather, in_specs=P("data"), out_specs=P(), check_vma=False)
        gathered, lowered = jax.jit(run)(x), jax.jit(run).lower(x).as_text()
    np.testing.assert_array_equal(gathered, x)
    # Large parts that end within a tile are gathered as numbers in one row.
    gathers = [line for line in lowered.splitlines() if '"stablehlo.all_gather"' in line]
    is_one_row = shape[0] == 5 and shape[1:] != (24,)
    assert (f"tensor<{x[: shape[0]].size}xf32>" in "".join(gathers)) == is_one_row


@pytest.mark.parametrize("wire", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((3, 128, 5), 1), ((3, 64, 5), 1), ((2, 3, 256, 128), 2), ((128, 3, 5), 0), ((3, 5, 128), 2)],
)
def test_scatter_along_any_dim_equals_the_sum_over_devices(shape, dim, wire, monkeypatch):
    put_on_torus(monkeypatch, 4, 2)
    # Whole numbers, which bfloat16 holds.
    x = np.random.default_rng(0).integers(-7, 7, shape).astype("f")
    split = P(*[None] * dim, "data")

    def scatter(whole):
        number = 1 + jax.lax.axis_index("data").astype(jnp.float32)
        return sum_scatter(whole * number, dim, ("data",), wire and jnp.dtype(wire))

    with sl.use(sl.rules.data, sl.make_mesh("data=8")):
        run = jax.shard_map(scatter, in_specs=P(), out_specs=split, check_vma=False)
        np.testing.assert_array_equal(jax.jit(run)(x), 36 * x)


@pytest.mark.tpu_compiler
@pytest.mark.sentinel("tpu:v5p:2x2x2")
@pytest.mark.parametrize("target", ["tpu:v5e:2x2", "tpu:v5p:2x2x2", "tpu:v6e:2x2"])
def test_scatter_of_expert_gradients_on_tpus_turns_no_tiles(target):
    mesh = sl.Target(target).mesh("data=-1")
    split = jax.NamedSharding(mesh, P("data"))
    count = mesh.shape["data"]

    def gradient(x, dy):
        product = jnp.einsum("enk,enl->ekl", x, dy)
        return sum_scatter(product, 1, ("data",))

    shapes = (2 * count, 1024, 4096), (2 * count, 1024, 2048)
    arrays = [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=split) for shape in shapes]
    with sl.use(sl.rules.data, mesh):
        run = jax.shard_map(
            gradient, in_specs=P("data"), out_specs=P(None, "data"), check_vma=False
        )
        compiled = compile_for(mesh, jax.jit(run).lower(*arrays))
    # A tile of two rows is one with the two experts in the place of the rows of a matrix.
    assert "T(2,128)" not in compiled.as_text()


NAMES = {"up": ("layers", "embed", "mlp"), "down": ("layers", "mlp", "embed")}
LAYERS, WIDTH, HIDDEN = 2, 64, 256


def model():
    key = jax.random.key(0)
    shapes = {"up": (LAYERS, WIDTH, HIDDEN), "down": (LAYERS, HIDDEN, WIDTH)}
    arrays = {name: jax.random.normal(key, shape) / 16 for name, shape in shapes.items()}
    return sl.annotate(arrays, NAMES)


def loss(model, x, rng):
    layer = lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None)
    return jnp.mean(jax.lax.scan(layer, x, model)[0] ** 2)


@pytest.mark.long("1-data=4,model=2", "3-data=8", "1-data=8")
@pytest.mark.parametrize("shape", ["data=8", "data=4,model=2"])
@pytest.mark.parametrize("stage", [1, 3])
def test_torus_train_step_equals_one_device(stage, shape, monkeypatch):
    mlp = "model" if "model" in shape else None
    rules = sl.AxisRules(batch="data", embed=None, mlp=mlp, layers=None)
    batch = np.random.default_rng(1).normal(size=(16, WIDTH)).astype("f")

    def after_steps(mesh, zero):
        strategy = sl.Strategy(mesh=mesh, rules=rules, zero=zero)
        state = sl.init(model, optax.adam(1e-2), strategy)
        step = sl.train_step(loss, strategy)
        for _ in range(3):
            state, metrics = step(state, batch)
        return jax.tree.map(np.asarray, (state.params, metrics["loss"]))

    wanted = after_steps(sl.make_mesh("data=1,model=1", devices=jax.devices()[:1]), 0)
    put_on_torus(monkeypatch, 2, 2, *[2] * (shape == "data=8"))
    found = after_steps(sl.make_mesh(shape), sl.Zero(stage, small=0))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5), found, wanted)


COMPILED = [
    ("tpu:v5e:4x4", "data=16"),
    ("tpu:v5e:4x8", "data=32"),
    ("tpu:v5p:4x4x4", "data=64"),
    ("tpu:v5p:2x2x4", "data=16"),
    ("tpu:v5p:4x4x4", "data=16,model=4"),
    ("tpu:v4:4x4x8", "data=128"),
    ("tpu:v6e:16x16", "data=256"),
    ("tpu:7x:2x4x4", "data=-1"),
]


@pytest.mark.representative(
    "tpu:v5e:4x4-data=16",
    "tpu:v5p:4x4x4-data=16,model=4",
    "tpu:v4:4x4x8-data=128",
    "tpu:v6e:16x16-data=256",
    "tpu:7x:2x4x4-data=-1",
)
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(("target", "shape"), COMPILED)
def test_torus_collectives_on_tpus_send_the_bytes_of_theory(target, shape):
    mesh = sl.Target(target).mesh(shape)
    count, size = mesh.shape["data"], 2**26
    both = lambda x: sum_scatter(gather_along(x, 0, "data") * 2, 0, ("data",))
    sharding = jax.NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((size // 512, 256), "bfloat16", sharding=sharding)
    with sl.use(sl.rules.data, mesh):
        run = jax.shard_map(both, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        compiled = compile_for(mesh, jax.jit(run).lower(x))
    sent = {}
    for one in testing.collectives(compiled, mesh):
        if one.sent_bytes > 2**12:
            assert one.axes == ("data",)
            sent[one.kind] = sent.get(one.kind, 0) + one.total_bytes
    theory = size * (count - 1) / count
    assert set(sent) == {"all-gather", "reduce-scatter"}
    for kind, found in sent.items():
        assert found <= 1.02 * theory, kind
