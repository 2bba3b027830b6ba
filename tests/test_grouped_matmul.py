"""Products of grouped rows, against products group by group."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machines import compile_for, mesh_on

import shardlib as sl
from shardlib.compiled._flops import compiled_flops
from shardlib.kernels import Groups, explain, grouped_matmul
from shardlib.kernels._grouped_matmul._places import Places

P = jax.P
SIZES = (10, 0, 130, 60)
NAMES = ("act_embed", "act_mlp")
TENSOR = sl.rules.data | sl.rules.tensor


def drawn(*shape, seed=0, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def by_hand(x, w, sizes):
    """The product of each row with the matrix of its group, a group at a time."""
    y, first = np.zeros((x.shape[0], w.shape[2])), 0
    for group, size in enumerate(sizes):
        rows = slice(first, first + size)
        y[rows] = np.float64(x[rows]) @ np.float64(w[group])
        first += size
    return y


def gradients_by_hand(x, w, sizes, gradient):
    of_x = by_hand(gradient, np.swapaxes(w, 1, 2), sizes)
    of_w, first = np.zeros(w.shape), 0
    for group, size in enumerate(sizes):
        rows = slice(first, first + size)
        of_w[group] = np.float64(x[rows]).T @ np.float64(gradient[rows])
        first += size
    return of_x, of_w


def lowered_with_gradients(mesh, rows, features, columns, count, implementation):
    """A product of shapes and both gradients, on a mesh whose devices need not be there."""

    def both(x, w, sizes, gradient):
        def product(x, w):
            return grouped_matmul(x, w, sizes, names=NAMES, implementation=implementation)

        y, back = jax.vjp(product, x, w)
        return y, back(gradient)

    def shape(*dims, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, P()))

    arrays = shape(rows, features), shape(count, features, columns)
    with sl.use(sl.rules.data, mesh):
        return jax.jit(both).lower(*arrays, shape(count, dtype="int32"), shape(rows, columns))


@pytest.mark.representative()
@pytest.mark.long(
    "130-sizes2-reference",
    "128-sizes3-reference",
    "128-sizes3-tpu_simulated",
    "256-sizes1-tpu_simulated",
)
@pytest.mark.parametrize("implementation", ["reference", "ragged_dot", "tpu_simulated"])
@pytest.mark.parametrize(
    ("rows", "sizes"), [(256, SIZES), (256, (0, 256, 0, 0)), (130, (5, 6, 7, 0)), (128, (0,) * 4)]
)
def test_each_row_is_multiplied_with_the_matrix_of_its_group(implementation, rows, sizes):
    x, w = drawn(rows, 24), drawn(4, 24, 40, seed=1)
    # What is in rows of no group may be anything.
    x = x.at[sum(sizes) :].set(jnp.nan)

    def product(x, w):
        return grouped_matmul(x, w, jnp.array(sizes), implementation=implementation)

    y, back = jax.vjp(product, x, w)
    np.testing.assert_allclose(y, by_hand(x, w, sizes), atol=1e-4)
    gradient = drawn(rows, 40, seed=2).at[sum(sizes) :].set(jnp.nan)
    found = back(gradient)
    for one, expected in zip(found, gradients_by_hand(x, w, sizes, gradient), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-4)


@pytest.mark.parametrize("implementation", ["reference", "ragged_dot", "tpu_simulated"])
def test_products_in_bfloat16_are_rounded_once(implementation):
    x, w = drawn(128, 64, dtype="bfloat16"), drawn(2, 64, 32, seed=1, dtype="bfloat16")
    y = grouped_matmul(x, w, jnp.array([100, 20]), implementation=implementation)
    assert y.dtype == jnp.bfloat16
    expected = by_hand(x, w, (100, 20))
    np.testing.assert_allclose(np.float64(y), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "ragged_dot"])
def test_products_in_float64_are_not_rounded_to_float32(implementation):
    with jax.enable_x64(True):
        x, w = np.float64(drawn(130, 24)) / 3, np.float64(drawn(2, 24, 40, seed=1)) / 3
        gradient, sizes = np.float64(drawn(130, 40, seed=2)) / 3, (100, 20)

        def product(x, w):
            return grouped_matmul(x, w, jnp.array(sizes), implementation=implementation)

        y, back = jax.vjp(product, jnp.array(x), jnp.array(w))
        found = (y, *back(jnp.array(gradient)))
    expected = (by_hand(x, w, sizes), *gradients_by_hand(x, w, sizes, gradient))
    for one, exact in zip(found, expected, strict=True):
        assert one.dtype == jnp.float64
        np.testing.assert_allclose(one, exact, atol=1e-12)


@pytest.mark.parametrize("implementation", ["reference", "ragged_dot"])
def test_sizes_may_be_small_integers(implementation):
    x, w, sizes = drawn(300, 8), drawn(3, 8, 4, seed=1), (100, 120, 70)
    y = grouped_matmul(x, w, jnp.array(sizes, "uint8"), implementation=implementation)
    np.testing.assert_allclose(y, by_hand(x, w, sizes), atol=1e-4)


@pytest.mark.parametrize("varies", ["rows", "sizes"])
def test_rows_beyond_places_in_a_checked_shard_map(varies):
    """Rows or sizes differ between devices, and the others do not."""
    mesh = sl.make_mesh("data=2", devices=jax.devices()[:2])
    w = drawn(4, 8, 4, seed=1)
    x, gradient = drawn(2, 32, 8), drawn(2, 32, 4, seed=2)
    sizes = np.array([(1, 28, 0, 2), (3, 2, 20, 1)])
    if varies == "rows":
        sizes[1] = sizes[0]
    else:
        x = jnp.stack([x[0]] * 2)

    def both(x, w, sizes, gradient):
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
        of_x, of_w = back(gradient[0])
        return y[None], of_x, of_w

    def both_of_device(x, w, sizes, gradient):
        if varies == "rows":
            return both(x[0], w, sizes, gradient)
        return both(x, w, sizes[0], gradient)

    split, whole = P("data"), P()
    specs = (split, whole, whole, split) if varies == "rows" else (whole, whole, split, split)
    given = (x, w, sizes[0], gradient) if varies == "rows" else (x[0], w, sizes, gradient)
    out_specs = (split, split if varies == "rows" else whole, whole)
    mapped = jax.shard_map(both_of_device, mesh=mesh, in_specs=specs, out_specs=out_specs)
    y, _, of_w = jax.jit(mapped)(*given)
    expected = [gradients_by_hand(x[k], w, sizes[k], gradient[k]) for k in range(2)]
    np.testing.assert_allclose(y, [by_hand(x[k], w, sizes[k]) for k in range(2)], atol=1e-4)
    # JAX adds up the gradient to what devices have alike.
    np.testing.assert_allclose(of_w, sum(of_w for _, of_w in expected), atol=1e-4)


@pytest.mark.long
def test_several_matrices_are_multiplied_with_the_same_rows():
    x, up, gate = drawn(16, 8), drawn(3, 8, 6, seed=1), drawn(3, 8, 10, seed=2)
    sizes = jnp.array([3, 9, 2])

    def together(x, up, gate):
        return grouped_matmul(x, [up, gate], sizes)

    def apart(x, up, gate):
        return grouped_matmul(x, up, sizes), grouped_matmul(x, gate, sizes)

    made, back = jax.vjp(together, x, up, gate)
    expected, expected_back = jax.vjp(apart, x, up, gate)
    jax.tree.map(np.testing.assert_array_equal, made, expected)
    gradients = drawn(16, 6, seed=3), drawn(16, 10, seed=4)
    for one, other in zip(back(gradients), expected_back(gradients), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("axes", [(), ("model",)])
@pytest.mark.parametrize("order", [1, -1])
def test_matrices_of_which_one_has_whole_columns_equal_one_device(axes, order):
    """The gradients to the rows are parts of a sum for some matrices, and whole for others."""
    rules = sl.AxisRules(act_mlp=[("model", "more"), "model", None], act_embed=None)
    x, columns = drawn(16, 8), (8, 10, 3)
    if axes:
        # What is split over features has columns that these axes divide.
        columns = (8, 10, 6)
    w = [drawn(2, 8, size, seed=1 + size) for size in columns][::order]
    gradients = [drawn(16, one.shape[2], seed=2) for one in w]
    sizes = jnp.array([[5, 9]])

    def both(x, w, groups, names):
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, groups, names=names), x, w)
        return y, back(tuple(gradients))

    expected = both(x, w, Groups(sizes), None)
    with sl.use(rules, sl.make_mesh("data=2,model=2,more=2")):
        groups = Groups(sizes, (), axes)
        found = jax.jit(lambda x, w: both(x, w, groups, NAMES))(x, w)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, expected)


def test_blocks_of_rows_have_groups_of_their_own():
    x, w = drawn(24, 8), drawn(2, 8, 4, seed=1)
    sizes = [(3, 4), (0, 8), (1, 2)]
    y = grouped_matmul(x, w, Groups(jnp.array(sizes)))
    expected = [by_hand(x[8 * k : 8 * k + 8], w, one) for k, one in enumerate(sizes)]
    np.testing.assert_allclose(y, np.concatenate(expected), atol=1e-5)
    np.testing.assert_array_equal(grouped_matmul(x, w, Groups(sizes)), y)


@pytest.mark.representative()
@pytest.mark.long(
    "names0-row_axes0-feature_axes0",
    "names0-row_axes3-feature_axes3",
    "names1-row_axes1-feature_axes1",
    "names1-row_axes2-feature_axes2",
    "None-row_axes0-feature_axes0",
    "None-row_axes3-feature_axes3",
)
@pytest.mark.parametrize(
    ("row_axes", "feature_axes"),
    [((), ()), (("data",), ()), ((), ("model",)), (("data",), ("model",))],
)
@pytest.mark.parametrize("names", [("act_embed", "act_mlp"), ("act_mlp", "act_embed"), None])
def test_rows_and_matrices_over_devices_equal_one_device(row_axes, feature_axes, names):
    mesh = sl.make_mesh("data=2,model=4")
    blocks = 2 if row_axes else 1
    x, w = drawn(16 * blocks, 8), drawn(3, 8, 16, seed=1)
    sizes = np.array([(3, 9, 2), (1, 0, 15)])[:blocks]
    gradient = drawn(16 * blocks, 16, seed=2)

    def both(x, w, groups, names):
        y, back = jax.vjp(lambda x, w: grouped_matmul(x, w, groups, names=names), x, w)
        return y, back(gradient)

    expected = both(x, w, Groups(jnp.array(sizes)), None)
    with sl.use(TENSOR, mesh):
        groups = Groups(jnp.array(sizes), row_axes, feature_axes)
        found = jax.jit(lambda x, w, groups: both(x, w, groups, names))(x, w, groups)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), found, expected)
    y, _ = found
    splits_columns = names == ("act_embed", "act_mlp") or "model" in feature_axes
    if names is not None or row_axes or feature_axes:
        shard = y.sharding.shard_shape(y.shape)
        assert shard == (16, 16 // (4 if splits_columns else 1))


@pytest.mark.tpu_compiler
def test_products_take_what_their_rows_take():
    """Forward and both gradients, of as many rows as there are: no product of every row with
    every matrix.
    """
    mesh = mesh_on("v5e:2x2", "data=4")
    rows, features, columns, count = 1024, 256, 384, 8

    lowered = lowered_with_gradients(mesh, rows, features, columns, count, "tpu")
    analysis = compile_for(mesh, lowered).cost_analysis()
    analysis = analysis[0] if isinstance(analysis, list) else analysis
    flops = 3 * 2 * rows * features * columns
    assert analysis["flops"] <= 1.05 * flops


@pytest.mark.gpu_compiler
@pytest.mark.parametrize("count", [1, 8])
def test_products_on_gpus_take_what_their_rows_take(count):
    """As many as there are rows, where no group has more than an even share of these."""
    mesh = mesh_on("h200:1x1x1", "data=1")
    rows, features, columns = 8192, 256, 512

    lowered = lowered_with_gradients(mesh, rows, features, columns, count, "reference")
    flops = 3 * 2 * rows * features * columns
    assert compiled_flops(compile_for(mesh, lowered)) == flops


@pytest.mark.representative("8-1000")
@pytest.mark.long("1-7", "1-100", "3-7", "3-1000", "8-100", "8-1000")
@pytest.mark.parametrize("rows", [1, 7, 16, 100, 1000])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_every_row_of_a_group_has_a_place_or_is_in_one_tile(rows, groups):
    random = np.random.default_rng(rows)
    x = jnp.arange(1, rows + 1)[:, None]
    for _ in range(10):
        edges = np.sort(random.integers(0, rows + 1, groups + 1))
        sizes = np.diff(edges)
        places = Places(jnp.array(sizes), rows)
        placed = places.placed(x)[..., 0]
        expected = np.repeat(np.arange(groups), sizes)
        for group, own in enumerate(np.asarray(placed)):
            assert (expected[own[own > 0] - 1] == group).all()
        found = places.by_row(placed[..., None])
        for number in range(int(places.tile_ends[-1])):
            tile = places.tile(jnp.int32(number))
            own = tile.read(x)[:, 0]
            assert (expected[own[own > 0] - 1] == tile.group).all()
            assert not found[own[own > 0] - 1].any()  # each row once
            found = tile.write(found, own[:, None])
        in_groups = np.arange(1, rows + 1) * (np.arange(rows) < sizes.sum())
        np.testing.assert_array_equal(found[:, 0], in_groups)


@pytest.mark.tpu_compiler
def test_features_are_gathered_and_scattered_over_the_tensor_axis():
    """Of an expert's two products: what is read is gathered once, the sum is scattered once, and
    backward it is the other way round; nothing else is sent.
    """
    mesh = mesh_on("v5e:2x2", "data=1,model=4")
    # Of small arrays the compiler sums several at once, and sends more.
    rows, features, columns = 8192, 2048, 1024

    def both(x, up, down, sizes, gradient):
        groups = Groups(sizes[None], (), ("model",))

        def layer(x, up, down):
            h = grouped_matmul(x, up, groups, names=NAMES, implementation="tpu")
            return grouped_matmul(h, down, groups, names=NAMES[::-1], implementation="tpu")

        y, back = jax.vjp(layer, x, up, down)
        return y, back(gradient)

    def shape(*dims, spec=P(), dtype="bfloat16"):  # noqa: B008
        return jax.ShapeDtypeStruct(dims, dtype, sharding=jax.NamedSharding(mesh, spec))

    by_feature = shape(rows, features, spec=P(None, "model"))
    up = shape(2, features, columns, spec=P(None, None, "model"))
    down = shape(2, columns, features, spec=P(None, "model"))
    with sl.use(TENSOR, mesh):
        lowered = jax.jit(both).lower(by_feature, up, down, shape(2, dtype="int32"), by_feature)
    found = sl.testing.collectives(compile_for(mesh, lowered), mesh)
    assert sorted(one.kind for one in found) == ["all-gather"] * 2 + ["reduce-scatter"] * 2
    assert {one.total_bytes for one in found} == {2 * rows * features * 3 // 4}


def test_what_runs_is_explained():
    x, w = jnp.ones((8, 4)), jnp.ones((2, 4, 4))
    told = explain(lambda x, w: grouped_matmul(x, w, jnp.array([1, 2])), x, w)
    assert [call.runs for call in told.calls] == ["reference"]


@pytest.mark.parametrize(
    ("x", "w", "groups", "options", "message"),
    [
        ((8,), (2, 4, 4), [1, 2], {}, "give it floats of 16 bits or more"),
        ((8, 4), (2, 5, 4), [1, 2], {}, r"should be float32, \(groups, 4, columns\)"),
        ((8, 4), (4, 4), [1, 2], {}, r"should be float32, \(groups, 4, columns\)"),
        ((8, 4), (2, 4, 4), [1, 2, 3], {}, r"they should be whole numbers, \(2,\)"),
        ((8, 4), (2, 4, 4), [1.0, 2.0], {}, "they should be whole numbers"),
        ((8, 4), (2, 4, 4), [7, 2], {}, "no more together than there are rows"),
        ((8, 4), (2, 4, 4), [-1, 2], {}, "sizes are not negative"),
        ((8, 4), (2, 4, 4), [2**31 - 1] * 2, {}, "no more together than there are rows"),
        ((8, 4), (2, 4, 4), [1, 2], {"names": ("act_embed",)}, "two names"),
        ((8, 4), (2, 4, 4), [1, 2], {"implementation": "cuda"}, "there are `reference`, `tpu`"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x, w, groups, options, message):
    with pytest.raises(ValueError, match=message):
        grouped_matmul(jnp.ones(x), jnp.ones(w), jnp.array(groups), **options)


def test_blocks_that_do_not_divide_the_rows_are_refused():
    with pytest.raises(ValueError, match="8 rows in 3 blocks of equal length"):
        grouped_matmul(jnp.ones((8, 4)), jnp.ones((2, 4, 4)), Groups(jnp.ones((3, 2), int)))
    with pytest.raises(ValueError, match="how many rows each group has"):
        grouped_matmul(jnp.ones((8, 4)), jnp.ones((2, 4, 4)), Groups("no sizes"))
    with pytest.raises(ValueError, match="`w` is empty"):
        grouped_matmul(jnp.ones((8, 4)), [], jnp.array([1]))
    with pytest.raises(ValueError, match="for 2 and 3 groups in one call"):
        several = [jnp.ones((2, 4, 4)), jnp.ones((3, 4, 4))]
        grouped_matmul(jnp.ones((8, 4)), several, jnp.array([1, 2]))
