"""`linear_cross_entropy`, the head and its loss fused: only what test_kernels.py does not cover."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_ops import OPS, derived, head, make, near, plain_head, some, true
from kernel_programs import GPUS, TPUS, of_head
from machines import on_its_own

import shardlib as sl
from shardlib import kernels

P = jax.P
pytestmark = pytest.mark.usefixtures("simulators")


@pytest.mark.representative(
    "automatic-reference-data",
    "automatic-reference-None",
    "own-reference-model",
    "own-tpu_simulated-model",
)
@pytest.mark.long
@pytest.mark.sentinel(
    "automatic-tpu_simulated-data",
    "automatic-tpu_simulated-model",
    "in a step-reference-model",
    "in a step-tpu_simulated-data",
    "own, checked-reference-data",
    "own, checked-reference-model",
)
@pytest.mark.parametrize("over", ["data", "model", None])
@pytest.mark.parametrize("implementation", ["reference", "tpu_simulated"])
@pytest.mark.parametrize("where", ["automatic", "in a step", "own", "own, checked"])
def test_linear_cross_entropy_on_a_mesh_equals_one_device(over, implementation, where, monkeypatch):
    from shardlib.kernels._linear_cross_entropy import _reference

    monkeypatch.setattr(_reference, "CHUNK_BYTES", 1)  # chunks of 128 rows, and a rest
    arrays = make({"x": (4, 8, 16), "kernel": (1120, 16), "targets": (4, 8)}, "float32")
    options = {"z_loss": 0.1, "smoothing": 0.1, "cap": 3.0, "vocab": 1100}
    cotangent = np.asarray(make({"x": (4, 8)}, "float32", 1)["x"])
    wanted = derived(plain_head, arrays, options, cotangent)
    batch = None if over == "data" else "data"
    rules = sl.AxisRules(batch=batch, vocab=over)
    options |= {
        "names": ("batch", None, None),
        "vocab_name": "vocab",
        "implementation": implementation,
    }
    specs = {"x": P(batch), "kernel": P(over), "targets": P(batch)}
    axes = {"automatic": set(), "in a step": {"data"}}.get(where, {"data", "model"})

    def run(arrays, cotangent):
        out, gradients = derived(head, arrays, options, cotangent)
        if batch in axes and where != "own, checked":
            gradients["kernel"] = jax.lax.psum(gradients["kernel"], batch)
        return out, gradients

    if axes:
        keep = lambda spec: P(*(axis if axis in axes else None for axis in spec))
        inside = jax.tree.map(keep, specs)
        out = (inside["targets"], {name: inside[name] for name in ("x", "kernel")})
        checked = where == "own, checked"
        run = jax.shard_map(
            run,
            in_specs=(inside, inside["targets"]),
            out_specs=out,
            axis_names=axes,
            check_vma=checked,
        )
    with sl.use(rules, sl.make_mesh("data=2,model=4")):
        if implementation != "reference" and where == "own, checked":
            with pytest.raises(ValueError, match="A kernel is simulated on one device or"):
                jax.jit(run)(arrays, cotangent)
            return
        near(jax.jit(run)(arrays, cotangent), wanted, 2e-6)


@pytest.mark.representative("100-1-float32", "300-2-float32", "700-1-bfloat16")
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "cores"), [(100, 1), (300, 1), (300, 2), (700, 1)])
def test_linear_cross_entropy_tpu_kernel_is_exact_over_several_blocks(
    rows, cores, dtype, monkeypatch
):
    """One block of rows, two, and three, for three and four blocks of the vocabulary, by one core
    and by two.
    """
    from shardlib.kernels._linear_cross_entropy import _tpu

    monkeypatch.setattr(_tpu, "cores", lambda: cores)
    monkeypatch.setattr(_tpu, "COLUMNS_AT_ONCE", 8)
    for blocks in ("forward_blocks", "backward_blocks"):
        monkeypatch.setattr(
            _tpu, blocks, lambda x, kernel: iter([_tpu.Blocks(min(rows, 256), 128, 0)])
        )
    arrays = make(
        {"x": (rows, 20), "kernel": (350 if cores == 1 else 500, 20), "targets": (rows,)}, "float32"
    )
    arrays["kernel"] = arrays["kernel"].astype(dtype)
    found = derived(head, arrays, {"implementation": "tpu_simulated", "cap": 9.0})
    near(found, true_of(arrays, found, {"cap": 9.0}), 2e-6 if dtype == "float32" else 2**-8)


@pytest.mark.parametrize("vocab", [1120, 1152, 1000])
def test_linear_cross_entropy_takes_all_chunks_in_one_loop(vocab, monkeypatch):
    from shardlib.kernels._linear_cross_entropy import _reference

    monkeypatch.setattr(_reference, "CHUNK_BYTES", 2**15)
    arrays = make({"x": (16, 8), "kernel": (vocab, 8), "targets": (16,)}, "float32")
    found = derived(head, arrays, {"implementation": "reference"})
    near(found, true_of(arrays, found, {}), 2e-6)
    forward = jax.make_jaxpr(lambda arrays: head(arrays, {"implementation": "reference"}))(arrays)
    assert str(forward).count("dot_general[") == 1


@pytest.mark.long
def test_linear_cross_entropy_ignores_a_vocabulary_shard_of_padding(monkeypatch):
    from shardlib.kernels._linear_cross_entropy import _reference

    monkeypatch.setattr(_reference, "CHUNK_BYTES", 1)
    arrays = make({"x": (5, 8), "kernel": (300, 8), "targets": (5,)}, "float32")
    with sl.use(sl.AxisRules(vocab="model"), sl.make_mesh("data=4,model=2")):
        for implementation in ("reference", "tpu_simulated"):
            options = {
                "names": (None, None),
                "vocab_name": "vocab",
                "implementation": implementation,
                "vocab": 20,
            }
            found = jax.jit(lambda arrays, options=options: derived(head, arrays, options))(arrays)
            near(found, true_of(arrays, found, {"vocab": 20}), 2e-6)


def true_of(arrays, found, options):
    return true(OPS["head"], arrays, options, jax.tree.map(np.asarray, some(found[0])))


@pytest.mark.representative(
    "tpu:v4:2x2x1-reference",
    "tpu:v5e:2x2-kernel",
    "tpu:v5p:2x2x1-kernel",
    "tpu:v6e:2x2-reference",
    "gpu:h200:1x1x4-reference",
    "gpu:h200:1x1x4-kernel",
    "gpu:b200:1x1x4-kernel",
)
@pytest.mark.parametrize("implementation", ["reference", "kernel"])
@pytest.mark.parametrize("target", TPUS + GPUS)
def test_linear_cross_entropy_keeps_no_logits_in_memory(target, implementation):
    rows, vocab, width = 8192, 64_000, 256
    if implementation == "kernel":
        implementation = target[:3]
    temporaries, large = on_its_own(target, of_head_in_chunks, implementation, rows, vocab, width)
    logits = rows // 2 * (vocab // 2) * 4
    assert temporaries < 0.2 * logits
    assert large == {("all-reduce", ("model",)), ("all-reduce", ("data",))}


def of_head_in_chunks(target, implementation, *shape):
    """With chunks as small beside these logits as those of an op beside a user's."""
    from shardlib.kernels._linear_cross_entropy import _gpu, _reference

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_reference, "CHUNK_BYTES", 2**21)
        patch.setattr(_gpu, "CHUNK_BYTES", 2**20)
        return of_head(target, implementation, "bfloat16", *shape)


@pytest.mark.parametrize("generation", ["hopper", "blackwell"])
@pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason="JAX 0.12 simulates matrix units of GPUs; 0.11 wants every warpgroup to wait for all barriers",
)
def test_linear_cross_entropy_gpu_kernel_on_hopper_and_blackwell_tiles(generation, monkeypatch):
    """More steps than are on their way at once, tiles and chunks of the vocabulary that are not
    full, two warpgroups' rows.
    """
    from shardlib.kernels import _gpu_tiles
    from shardlib.kernels._linear_cross_entropy import _gpu

    monkeypatch.setattr(_gpu_tiles, "generation", lambda kind: generation)
    monkeypatch.setattr(_gpu, "CHUNK_BYTES", 1)
    options = {"z_loss": 0.1, "smoothing": 0.1, "cap": 3.0, "vocab": 290}
    for dtype in ("float32", "bfloat16"):
        arrays = make({"x": (300, 300), "kernel": (300, 300), "targets": (300,)}, dtype)
        found = jax.jit(
            lambda arrays: derived(head, arrays, options | {"implementation": "gpu_simulated"})
        )(arrays)
        near(found, true_of(arrays, found, options), 2e-6 if dtype == "float32" else 2**-7)


def test_linear_cross_entropy_is_nan_for_a_target_outside_the_vocabulary():
    X = jnp.zeros((8, 128))
    losses = kernels.linear_cross_entropy(X[:3], X, jnp.array([7, 8, -1]))
    assert np.isfinite(losses[0]) and np.isnan(losses[1]) and losses[2] == 0


@pytest.mark.parametrize("ignored", [-1, 2**31 - 1])
def test_linear_cross_entropy_is_nan_for_a_target_beyond_32_bits(ignored):
    """In fewer bits it would be another number: the ignored one, or a token."""
    x, kernel = jnp.eye(4, 8), jnp.eye(5, 8)

    def losses(targets):
        return np.asarray(kernels.linear_cross_entropy(x, kernel, targets, ignored=ignored))

    unsigned = losses(jnp.array([2**32 - 1, 2**31, 2**32 - 2, 1], "uint32"))
    np.testing.assert_array_equal(np.isnan(unsigned), [True, True, True, False])
    with jax.enable_x64(True):
        wide = losses(jnp.array([2**32 + 1, -(2**32) - 1, ignored, 1], "int64"))
    np.testing.assert_array_equal(np.isnan(wide), [True, True, False, False])
    assert wide[2] == 0 and wide[3] == unsigned[3]


@pytest.mark.parametrize("implementation", ["reference", "tpu_simulated"])
def test_linear_cross_entropy_of_ignored_rows_reads_nothing_from_them(implementation):
    arrays = make({"x": (16, 64), "kernel": (128, 64), "targets": (16,)}, "float32")
    arrays["targets"] = jnp.asarray(arrays["targets"]).at[3:6].set(-1)
    options = {"implementation": implementation, "z_loss": 0.1, "smoothing": 0.1}
    both = jax.jit(lambda arrays: derived(head, arrays, options))
    x = jnp.asarray(arrays["x"])
    clean = both(arrays | {"x": x.at[3:6].set(0)})
    rows = x.at[3].set(jnp.nan).at[4, 1].set(jnp.inf).at[5, 2].set(-jnp.inf)
    found = both(arrays | {"x": rows})
    jax.tree.map(np.testing.assert_array_equal, found, clean)
    assert not np.asarray(found[1]["x"][3:6]).any()


def test_linear_cross_entropy_refuses_rows_without_width():
    with pytest.raises(ValueError, match="`linear_cross_entropy`: .*their width is 0"):
        kernels.linear_cross_entropy(jnp.ones((2, 0)), jnp.ones((5, 0)), jnp.array([0, 1]))


@pytest.mark.long
def test_linear_cross_entropy_takes_uint8_targets():
    x, kernel = jnp.eye(4, 8), jnp.arange(2400.0).reshape(300, 8)
    whole = kernels.linear_cross_entropy(x, kernel, jnp.array([7, 8, 0, 255]))
    np.testing.assert_array_equal(
        kernels.linear_cross_entropy(x, kernel, jnp.array([7, 8, 0, 255], "uint8")), whole
    )


def test_linear_cross_entropy_gpu_kernel_refuses_highest_precision():
    x = jnp.zeros((8, 128))
    with (
        jax.default_matmul_precision("highest"),
        pytest.raises(
            ValueError,
            match="TF32 alone, on Hopper, if `jax_default_matmul_precision` allows that; it is 'hi",
        ),
    ):
        kernels.linear_cross_entropy(x, x, jnp.zeros(8, int), implementation="gpu_simulated")


@pytest.mark.long
def test_linear_cross_entropy_is_exact_when_backward_exceeds_fast_memory(monkeypatch):
    from shardlib.kernels._linear_cross_entropy import _tpu

    monkeypatch.setattr(
        _tpu, "backward_blocks", lambda x, kernel: iter([_tpu.Blocks(256, 512, 2**40)])
    )
    arrays = make({"x": (100, 20), "kernel": (350, 20), "targets": (100,)}, "float32")
    found = derived(head, arrays, {"implementation": "tpu_simulated"})
    near(found, true_of(arrays, found, {}), 2e-6)
