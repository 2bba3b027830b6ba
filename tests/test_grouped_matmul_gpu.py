"""Grouped products by the kernels for GPUs, against products group by group in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from machines import compile_for, mesh_on
from test_grouped_matmul import by_hand, drawn, gradients_by_hand, lowered_with_gradients

from shardlib.compiled._kernel_products import call_multiplies
from shardlib.kernels import grouped_matmul
from shardlib.kernels._grouped_matmul import _gpu

pytestmark = pytest.mark.usefixtures("simulators")
needs_matrix_units = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="JAX 0.12 simulates matrix units of GPUs"
)
WHERE = [
    pytest.param("gpu_simulated", marks=needs_matrix_units),
    pytest.param("gpu", marks=pytest.mark.gpu),
]
CASES = {
    "even": (512, (128, 128, 128, 128)),
    "uneven": (256, (10, 0, 130, 60)),
    "one": (304, (0, 300, 0, 0)),
    "few": (130, (5, 6, 7, 0)),
    "none": (128, (0, 0, 0, 0)),
    "ends": (1000, (1, 7, 8, 984)),
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """A simulator runs a program after the other; three have several tiles each."""
    if jax.default_backend() == "cpu":
        monkeypatch.setattr(_gpu, "PROGRAMS", 3)


@pytest.mark.parametrize("implementation", WHERE)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_kernels_for_gpus_multiply_each_row_with_the_matrix_of_its_group(
    implementation, case, dtype
):
    rows, sizes = CASES[case]
    # A last tile of 128 columns is half of one, both ways.
    x, w = drawn(rows, 128, dtype=dtype), drawn(4, 128, 384, seed=1, dtype=dtype)
    gradient = drawn(rows, 384, seed=2, dtype=dtype)
    # What is in rows of no group may be anything.
    x = x.at[sum(sizes) :].set(jnp.nan)
    gradient = gradient.at[sum(sizes) :].set(jnp.nan)

    @jax.jit
    def both(x, w, sizes, gradient):
        y, back = jax.vjp(
            lambda x, w: grouped_matmul(x, w, sizes, implementation=implementation), x, w
        )
        return y, *back(gradient)

    found = both(x, w, jnp.array(sizes), gradient)
    expected = by_hand(x, w, sizes), *gradients_by_hand(x, w, sizes, gradient)
    rounding = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
    for one, exact in zip(found, expected, strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(np.float64(one), exact, rtol=rounding, atol=1e-4)


@pytest.mark.parametrize("implementation", WHERE)
def test_rows_that_are_no_numbers_reach_their_own_group_alone(implementation):
    """Groups that share a tile, and a step of a sum over rows."""
    sizes = (20, 30, 14, 64)
    x, w = drawn(128, 128, dtype="bfloat16"), drawn(4, 128, 128, seed=1, dtype="bfloat16")
    x, gradient = x.at[25].set(jnp.nan), drawn(128, 128, seed=2, dtype="bfloat16")

    def product(x, w):
        return grouped_matmul(x, w, jnp.array(sizes), implementation=implementation)

    y, back = jax.vjp(product, x, w)
    _, of_w = back(gradient)
    assert np.flatnonzero(np.isnan(y).any(1)).tolist() == [25]
    assert np.flatnonzero(np.isnan(of_w).any((1, 2))).tolist() == [1]


@pytest.mark.parametrize("implementation", WHERE)
def test_kernels_for_gpus_under_vmap_equal_a_loop(implementation):
    x, w = drawn(2, 128, 128, dtype="bfloat16"), drawn(2, 3, 128, 128, seed=1, dtype="bfloat16")
    sizes = jnp.array([(40, 50, 30), (0, 128, 0)])

    def both(x, w, sizes):
        y, back = jax.vjp(
            lambda x, w: grouped_matmul(x, w, sizes, implementation=implementation), x, w
        )
        return y, back(y)

    found = jax.vmap(both)(x, w, sizes)
    for k in range(2):
        expected = both(x[k], w[k], sizes[k])
        jax.tree.map(lambda a, b, k=k: np.testing.assert_array_equal(a[k], b), found, expected)


@pytest.mark.long
def test_every_row_of_a_group_is_written_by_one_tile():
    random = np.random.default_rng(0)
    for _ in range(50):
        groups, rows = random.integers(1, 9), 8 * random.integers(16, 80)
        sizes = np.diff(np.sort(random.integers(0, rows + 1, groups + 1)))
        written = np.full(rows, -1)
        for group, row, begin, end in np.asarray(_gpu._row_tiles(jnp.array(sizes), int(rows))):
            assert row % 8 == 0 and (begin >= end or 0 <= row <= rows - _gpu.ROWS)
            own = slice(row + begin, row + max(begin, end))
            assert (written[own] == -1).all()
            written[own] = group
        expected = np.repeat(np.arange(groups), sizes)
        np.testing.assert_array_equal(written[: sizes.sum()], expected)
        assert (written[sizes.sum() :] == -1).all()


@pytest.mark.gpu_compiler
def test_kernels_for_gpus_compile_and_tell_that_they_multiply():
    mesh = mesh_on("h200:1x1x1", "data=1")
    rows, features, columns, count = 2048, 256, 384, 8

    lowered = lowered_with_gradients(mesh, rows, features, columns, count, "gpu")
    text = compile_for(mesh, lowered).as_text()
    kernels = [line for line in text.splitlines() if '"mosaic_gpu' in line]
    assert len(kernels) == 3 and all(map(call_multiplies, kernels))


@pytest.mark.parametrize(
    ("dtype", "columns", "message"),
    [
        ("float32", 128, "multiplies bfloat16 and float16, and `x` is float32"),
        ("bfloat16", 64, r"takes multiples of 128 features and columns, and `w` is \[2, 128, 64\]"),
    ],
)
def test_kernels_for_gpus_say_what_they_do_not_take(dtype, columns, message):
    x, w = jnp.ones((128, 128), dtype), jnp.ones((2, 128, columns), dtype)
    with pytest.raises(ValueError, match=message):
        grouped_matmul(x, w, jnp.array([1, 2]), implementation="gpu_simulated")
