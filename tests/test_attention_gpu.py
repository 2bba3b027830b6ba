"""Our kernels for attention on GPUs: simulated, compiled, and, with `pytest -m gpu`, run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import MASKS, attend, both_ways, check, make, segments
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_programs import ATTENTION_ON_GPUS, GPUS, attention_on_gpus, attention_refused
from machines import on_its_own

from shardlib import kernels
from shardlib.kernels import _attention, _choice
from shardlib.kernels._attention._gpu_band import Band, Columns, Span

pytestmark = pytest.mark.usefixtures("simulators")
SIMULATED = pytest.param(
    "gpu_simulated",
    marks=pytest.mark.skipif(
        jax.__version_info__ < (0, 12),
        reason="JAX 0.12 simulates matrix units of GPUs; 0.11 wants every warpgroup to wait for "
        "all barriers",
    ),
)
WHERE = [SIMULATED, pytest.param("gpu", marks=pytest.mark.gpu)]
TAKEN = [mask for mask in MASKS if "block_mask" not in MASKS[mask]]
FEW = {"heads": 2, "groups": 1, "batch": 2}


@pytest.mark.parametrize("implementation", WHERE)
@pytest.mark.parametrize("mask", TAKEN)
def test_attention_by_gpu_kernels_matches_float64_for_every_mask(mask, implementation):
    arrays = make(256, 256, **FEW, sinks=mask in ("everything", "segments"))
    check(arrays, MASKS[mask], implementation, "bfloat16")


SHAPES = {
    "a few positions": (make(3, 70, **FEW), {"causal": True, "starts": (64, 0)}),
    "lengths of no tile": (make(130, 300, **FEW), {"window": (40, 20), "starts": (100, 30)}),
    "nothing seen": (make(260, 60, **FEW), {"window": (50, 0), "starts": (0, 30)}),
    "values of another size": (make(130, 130, **FEW, size=192, value_size=128), {"causal": True}),
    "large heads": (make(70, 190, **FEW, size=256), {"window": (50, None), "starts": (100, 30)}),
    "many blocks": (
        make(640, 640, heads=1, groups=1, batch=1),
        {"causal": True, "window": (200, None)},
    ),
}


@pytest.mark.parametrize("implementation", WHERE)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_by_gpu_kernels_takes_any_lengths_and_sizes(shape, implementation):
    arrays, options = SHAPES[shape]
    check(arrays, options, implementation, "float16")


@pytest.mark.parametrize("implementation", WHERE)
@pytest.mark.parametrize("options", [{"sinks": np.full(2, 2.5e38, "f")}, {"soft_cap": 3e38}])
def test_attention_by_gpu_kernels_with_scores_near_the_largest_number(options, implementation):
    arrays = {**make(128, 128, **FEW), **options}
    cap = {"soft_cap": arrays.pop("soft_cap")} if "soft_cap" in arrays else {}
    arrays = {name: x if name == "sinks" else jnp.bfloat16(x) for name, x in arrays.items()}
    y, lse = attend(arrays, {**cap, "implementation": implementation})
    assert np.isfinite(y.astype("f")).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("implementation", WHERE)
@pytest.mark.parametrize("starts", [(0, 0), (300, 0), (64, 128), (0, 300)])
def test_attention_by_gpu_kernels_takes_traced_start_positions(starts, implementation):
    arrays = {name: jnp.bfloat16(x) for name, x in make(256, 384, **FEW).items()}
    options = {
        "segment_ids": (segments(256), segments(384, 1)),
        "window": (100, 30),
        "implementation": implementation,
    }
    cotangents = np.ones((2, 256, 2, 8), "f"), np.ones((2, 256, 2), "f")
    traced = lambda starts: both_ways(attend, arrays, {**options, "starts": starts}, cotangents)
    found = jax.jit(traced)((jnp.int32(starts[0]), jnp.int32(starts[1])))
    wanted = both_ways(attend, arrays, {**options, "starts": starts}, cotangents)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("implementation", WHERE)
def test_attention_by_gpu_kernels_under_vmap_matches_separate_calls(implementation):
    arrays = jax.tree.map(lambda *each: np.stack(each), *(make(64, n, **FEW) for n in (64, 64)))
    arrays = {name: jnp.bfloat16(x) for name, x in arrays.items()}
    options = {"causal": True, "implementation": implementation}
    together = jax.jit(jax.vmap(lambda arrays: attend(arrays, options)))(arrays)
    for k in range(2):
        alone = attend(jax.tree.map(lambda x, k=k: x[k], arrays), options)
        jax.tree.map(lambda x, y, k=k: np.testing.assert_array_equal(x[k], y), together, alone)


@pytest.mark.parametrize("implementation", WHERE)
def test_attention_by_gpu_kernels_nan_reaches_only_queries_that_see_it(implementation):
    arrays = {name: jnp.bfloat16(x) for name, x in make(128, 128, **FEW).items()}
    arrays["q"] = arrays["q"].at[0, 5, 1].set(np.nan)
    arrays["k"] = arrays["k"].at[1, 100, 0].set(np.nan)
    y, lse = attend(arrays, {"causal": True, "implementation": implementation})
    bad = np.zeros(y.shape[:3], bool)
    bad[0, 5, 1] = bad[1, 100:] = True
    np.testing.assert_array_equal(np.isnan(lse), bad)
    np.testing.assert_array_equal(np.isnan(y).any(-1), bad)


def seen_columns(band, span, columns):
    """Which columns each row sees, `(rows, columns)`."""
    column = np.arange(columns.block * columns.count)
    away = column - (np.arange(span.rows)[:, None] + span.distance)
    seen = np.broadcast_to(column < columns.real, away.shape)
    if band.lower is not None:
        seen = seen & (away >= band.lower)
    if band.upper is not None:
        seen = seen & (away <= band.upper)
    return seen


@pytest.mark.long
def test_attention_band_blocks_cover_every_visible_position():
    bound = st.none() | st.integers(0, 9)

    @given(bound, bound, st.integers(-25, 35), st.sampled_from([2, 4, 8]), st.data())
    @settings(deadline=None, max_examples=60, derandomize=True)
    def drawn(left, right, distance, rows, data):
        block, count = data.draw(st.sampled_from([2, 4])), data.draw(st.integers(1, 6))
        real = data.draw(st.integers(block * (count - 1) + 1, block * count))
        band = Band(None if left is None else -left, right)
        span, columns = Span(rows, jnp.int32(distance)), Columns(block, count, real)
        blocks = band.blocks(span, columns, whole_parts=True)
        seen = seen_columns(band, span, columns)
        for k in range(count):
            own = seen[:, k * block : (k + 1) * block]
            parts = [part for part in blocks.parts if part.begin <= k < part.end]
            assert len(parts) == (blocks.begin <= k < blocks.end), "each block is in one part"
            assert bool(parts) or not own.any(), "what is seen is computed"
            if parts:
                assert parts[0].is_whole == own.all(), "what is seen as a whole is not masked"

    drawn()


@pytest.mark.parametrize("distance", [-(2**31) + 1, -(2**30), 0, 2**30, 2**31 - 2])
def test_attention_band_bounds_and_positions_may_fill_32_bits(distance):
    columns, span = Columns(64, 10, 640), Span(128, jnp.int32(distance))
    for lower in (None, 0, -(2**31) + 1):
        for upper in (None, 0, 2**31 - 1):
            begin, end, _ = Band(lower, upper).blocks(span, columns, whole_parts=True)
            # The band of whole numbers without a limit.
            first = 0 if lower is None else (distance + lower) // 64
            last = 9 if upper is None else (distance + 127 + upper) // 64
            expected = [k for k in range(10) if first <= k <= last]
            assert list(range(int(begin), int(end))) == expected


HOPPERS = GPUS[:2]


@pytest.mark.representative(
    "window, capped-gpu:h100:1x1x4",
    "values of another size-gpu:h100:1x1x4",
    "causal-gpu:h200:1x1x4",
    "segments, sinks-gpu:h200:1x1x4",
)
@pytest.mark.parametrize("target", HOPPERS)
@pytest.mark.parametrize("case", ATTENTION_ON_GPUS)
def test_attention_by_gpu_kernels_compiles_without_storing_its_scores(case, target):
    found = on_its_own(target, attention_on_gpus, case)
    assert set(found.collectives) <= {"all-reduce"}, "gradients to keys that several devices have"
    assert found.kernels >= 3, "forward, and two backward"
    assert found.temporaries < found.scores / 2


@pytest.mark.parametrize("target", GPUS[2:])
def test_attention_by_gpu_kernels_is_refused_on_blackwell(target):
    assert "of the generation Hopper, and this is NVIDIA B200" in on_its_own(
        target, attention_refused
    )


HALF = jnp.zeros((2, 128, 4, 64), "bfloat16")


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (HALF.astype("float32"), {}, "attends in bfloat16 or float16; not float32"),
        (jnp.tile(HALF, 5), {}, "at most 256 numbers; here 320 and 320"),
        (HALF, {"block_mask": MASKS["blocks"]["block_mask"]}, "has no patterns of blocks"),
    ],
)
def test_attention_by_gpu_kernels_explains_what_it_cannot_do(x, options, message, monkeypatch):
    device = _choice.Device("gpu", "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(_attention, "device_here", lambda: device)
    attention = functools.partial(kernels.attention, **options)
    (call,) = kernels.explain(attention, x, x, x).calls
    assert message in dict(call.others)["gpu"]


def test_attention_by_gpu_kernels_refuses_64_bit_segment_ids(monkeypatch):
    device = _choice.Device("gpu", "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(_attention, "device_here", lambda: device)
    with jax.enable_x64():
        ids = jnp.zeros((2, 128), "int64")
        attention = functools.partial(kernels.attention, segment_ids=ids)
        (call,) = kernels.explain(attention, HALF, HALF, HALF).calls
    assert "compares segment ids of 32 bits; not int64" in dict(call.others)["gpu"]
