"""Attention by Tokamax: what its kernels are asked for, whether the real compilers take them, and
what it refuses.

Its kernels run on GPUs alone. Elsewhere its own plain attention stands in for them forward, with
the same arguments, and backward what the kernels for Hopper and Blackwell compute of theirs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_ops import near, needs_tokamax
from kernel_programs import GPUS, attention_by_tokamax, attention_chosen
from machines import on_its_own
from test_attention import COTANGENTS, MASKS, attend, both_ways, check, make

import shardlib as sl
from shardlib import kernels
from shardlib.kernels import _attention, _choice
from shardlib.kernels import _tokamax as library
from shardlib.kernels._attention import _tokamax

P = jax.P
HOPPER, BLACKWELL = "NVIDIA H100 80GB HBM3", "NVIDIA B200"
RULES = sl.AxisRules(batch="data", heads="model", seq="seq")
# What masks by other things than a first and a last key of each query.
REFUSED = ("segments", "two segments", "blocks", "blocks of heads")
TAKEN = [mask for mask in MASKS if mask not in REFUSED]


def gradients_of_kernels(residuals, y, y_gradient, q, k, v, *, mask, logits_scale, **options):
    """What Tokamax's kernels compute backward, with all scores, of what they are given."""
    highest, total = residuals
    group = q.shape[2] // k.shape[2]
    many_k, many_v = (jnp.repeat(x, group, 2) for x in (k, v))
    z = jnp.einsum("bqhd,bkhd->bhqk", q, many_k) * logits_scale
    cap, slope = options["logits_soft_cap"], 1
    if cap is not None:
        z = cap * jnp.tanh(z / cap)
        slope = 1 - (z / cap) ** 2
    seen = mask.as_array(q.shape[1], k.shape[1])
    if seen is not None:
        z = jnp.where(seen, z, np.finfo("f").min)
    p = jnp.exp(z - highest[..., None]) / total[..., None]
    delta = jnp.einsum("bqhv,bqhv->bhq", y, y_gradient)[..., None]
    dz = p * (jnp.einsum("bqhv,bkhv->bhqk", y_gradient, many_v) - delta) * slope * logits_scale
    grouped = lambda x: x.reshape(*k.shape[:3], group, -1).sum(3)
    return {
        "q": jnp.einsum("bhqk,bkhd->bqhd", dz, many_k),
        "k": grouped(jnp.einsum("bhqk,bqhd->bkhd", dz, q)),
        "v": grouped(jnp.einsum("bhqk,bqhv->bkhv", p, y_gradient)),
    }


@pytest.fixture
def plain_kernels(monkeypatch):
    """A GPU is traced for, arrays of any dtype are taken, and plain attention runs."""
    base = library.imported("tokamax._src.ops.attention.base")
    plain = base.DotProductAttention(vjp=gradients_of_kernels)
    here = jax.devices()[0]
    trace_for(monkeypatch, HOPPER)
    monkeypatch.setattr(_tokamax, "_device", lambda kind: here)
    monkeypatch.setattr(_tokamax, "_operation", lambda: plain)
    monkeypatch.setattr(_tokamax, "_refuses_arrays", lambda task: None)


def trace_for(monkeypatch, kind):
    for module in (_attention, _tokamax):
        monkeypatch.setattr(module, "device_here", lambda: _choice.Device("gpu", kind))


# Its environment has Tokamax.
with_tokamax = [needs_tokamax, pytest.mark.gpu_compiler]


def in_its_environment(test):
    for mark in with_tokamax:
        test = mark(test)
    return test


@in_its_environment
@pytest.mark.parametrize("kind", [HOPPER, BLACKWELL])
@pytest.mark.parametrize("mask", TAKEN)
def test_attention_by_tokamax_matches_float64(mask, kind, plain_kernels, monkeypatch):
    trace_for(monkeypatch, kind)
    check(make(256, 256), MASKS[mask], "tokamax")


@pytest.mark.representative("mask0-starts0", "mask0-starts2", "mask1-starts1", "mask2-starts3")
@in_its_environment
@pytest.mark.parametrize("starts", [(0, 0), (300, 0), (64, 128), (0, 300)])
@pytest.mark.parametrize("mask", [{"causal": True}, {"window": (40, 70)}, {"window": (None, 9)}])
def test_attention_by_tokamax_takes_traced_start_positions(mask, starts, plain_kernels):
    arrays, options = make(128, 256), {**mask, "starts": starts}
    check(arrays, options, "tokamax")
    shape = (2, 128, 4, 8)
    cotangents = COTANGENTS[0][:, : shape[1]], COTANGENTS[1][:, : shape[1]]

    def traced(arrays, first, second):
        named = {**options, "starts": (first, second), "implementation": "tokamax"}
        return both_ways(attend, arrays, named, cotangents)

    known = both_ways(attend, arrays, {**options, "implementation": "tokamax"}, cotangents)
    found = jax.jit(traced)(arrays, *starts)
    finite = lambda tree: jax.tree.map(lambda x: np.where(np.isfinite(x), x, 0), tree)
    near(finite(found), finite(known), 1e-6, 1)


@in_its_environment
@pytest.mark.parametrize("window", [(None, 2**31 - 2), (2**31 - 2, 0), (2**30, 2**30)])
def test_attention_by_tokamax_takes_window_bounds_near_the_int32_limit(window, plain_kernels):
    arrays = make(128, 128)
    call = functools.partial(attend, arrays)

    def traced(start):
        starts = {"window": window, "starts": (start, start)}
        return call({**starts, "implementation": "tokamax"})

    found = jax.jit(traced)(2**31 - 200)
    near(found, call({"window": window}), 1e-6)


@in_its_environment
def test_attention_by_tokamax_under_vmap_matches_a_loop(plain_kernels):
    arrays = jax.tree.map(lambda *each: np.stack(each), *(make(128, n) for n in (128, 128)))
    arrays["k"][1] *= 2

    def loss(arrays):
        y, lse = attend(arrays, {"window": (50, 0), "implementation": "tokamax"})
        return (y**2).sum() + lse.sum()

    one = jax.value_and_grad(loss)
    each = [one(jax.tree.map(lambda x, k=k: x[k], arrays)) for k in range(2)]
    near(jax.jit(jax.vmap(one))(arrays), jax.tree.map(lambda *x: np.stack(x), *each), 2e-6)


@in_its_environment
def test_attention_by_tokamax_has_finite_gradients_with_infinite_lse(plain_kernels):
    arrays = make(128, 128)

    def loss(arrays):
        options = {"causal": True, "starts": (0, 64), "implementation": "tokamax"}
        y, lse = attend(arrays, options)
        return (y**2).sum() + jnp.exp(lse).sum() + (lse * 2).sum()

    gradients = jax.grad(loss)(arrays)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@in_its_environment
@pytest.mark.parametrize("where", ["automatic", "own", "own, checked"])
@pytest.mark.parametrize(
    ("names", "shape"),
    [
        (("batch", None, "heads", None), "data=2,model=4,seq=1"),
        (("batch", "seq", "heads", None), "data=2,model=2,seq=2"),
    ],
)
def test_attention_by_tokamax_on_shards_matches_one_device(names, shape, where, plain_kernels):
    arrays = make(256, 256, 8, 4)
    cotangents = np.tile(COTANGENTS[0], (1, 1, 2, 1)), np.tile(COTANGENTS[1], (1, 1, 2))
    options = {"causal": True, "window": (100, None)}
    wanted = both_ways(attend, arrays, options, cotangents)
    mesh = sl.make_mesh(shape)
    spec = P(*(None if name is None else RULES[name][0] for name in names))

    def run(arrays, cotangents):
        named = {**options, "names": names, "implementation": "tokamax"}
        return both_ways(attend, arrays, named, cotangents)

    if where != "automatic":
        specs, checked = (spec, P(*spec[:3])), where == "own, checked"
        run = jax.shard_map(run, in_specs=(spec, specs), out_specs=(specs, spec), check_vma=checked)
    with sl.use(RULES, mesh):
        if where == "own, checked":
            with pytest.raises(ValueError, match="keeps no account of what differs"):
                jax.eval_shape(run, arrays, cotangents)
            return
        found = jax.jit(run)(arrays, cotangents)
    near(found, wanted, 4e-6)


@needs_tokamax
@pytest.mark.representative("gpu:h200:1x1x4")
@pytest.mark.parametrize("target", GPUS)
def test_attention_by_tokamax_compiles_without_storing_its_scores(target):
    for kernels_found, temporaries in on_its_own(target, attention_by_tokamax):
        assert kernels_found >= 2, "forward, and one or two backward"
        assert temporaries < 2 * 2048**2 * 2, "less than the scores of one head and sequence"


@needs_tokamax
@pytest.mark.parametrize("target", GPUS[:2])
def test_attention_kernel_choice_on_gpu_follows_compiled_programs(target):
    assert on_its_own(target, attention_chosen) == ("cudnn", "tokamax", "tokamax")


HALF = jnp.zeros((2, 128, 4, 64), "bfloat16")


@needs_tokamax
@pytest.mark.parametrize(
    ("kind", "size", "options", "message"),
    [
        ("NVIDIA A100-SXM4-80GB", 64, {}, "is for GPUs of the generations Hopper and Blackwell"),
        (HOPPER, 264, {}, "takes keys of at most 256 numbers"),
        (HOPPER, 256, {"with_lse": True}, "with the log-sum-exp one less, on Hopper"),
        (BLACKWELL, 200, {}, "numbers and values of"),
        (HOPPER, 64, {"segment_ids": jnp.zeros((2, 128), int)}, "has no segments"),
        (HOPPER, 64, {"sinks": jnp.zeros(4)}, "has no sinks"),
        (HOPPER, 64, {"block_mask": kernels.bigbird_blocks(128, 8)}, "no patterns of blocks"),
        (HOPPER, 64, {}, "can; another was named"),
        (BLACKWELL, 64, {"with_lse": True}, "can; another was named"),
    ],
)
def test_attention_by_tokamax_explains_what_it_cannot_do(kind, size, options, message, monkeypatch):
    monkeypatch.setattr(_tokamax, "_device", lambda kind: jax.devices()[0])
    trace_for(monkeypatch, kind)
    x = jnp.zeros((2, 128, 4, size), "bfloat16")
    assert message in said_of(x, options)


def said_of(x, options):
    attention = functools.partial(kernels.attention, implementation="reference", **options)
    (call,) = kernels.explain(attention, x, x, x).calls
    return dict(call.others)["tokamax"]


@needs_tokamax
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (HALF.astype("float32"), "attends in bfloat16 or float16; not float32"),
        (HALF[:, :100], "takes lengths that 128 divides, and there are 100 queries"),
        (HALF, "fits its kernels to a GPU, and JAX has no NVIDIA H100X here"),
    ],
)
def test_attention_by_tokamax_explains_which_arrays_and_gpus_it_refuses(x, message, monkeypatch):
    trace_for(monkeypatch, "NVIDIA H100X")
    assert message in said_of(x, {})


@needs_tokamax
@pytest.mark.parametrize(
    ("tokamax", "jax_version"), [((0, 0, 17), (0, 11, 1)), ((0, 0, 12), (0, 12, 0)),
    ((0, 0, 15), (0, 11, 1)), ((0, 0, 15), (0, 12, 0))],
)  # fmt: skip
def test_attention_by_tokamax_needs_the_release_for_this_jax(tokamax, jax_version, monkeypatch):
    trace_for(monkeypatch, HOPPER)
    monkeypatch.setattr(_tokamax, "version", lambda: tokamax)
    monkeypatch.setattr(jax, "__version_info__", jax_version)
    assert "takes Tokamax 0.0.12 with JAX before 0.11.2, and with others 0.0.17" in said_of(
        HALF, {}
    )


@needs_tokamax
def test_attention_by_tokamax_needs_a_release_with_the_expected_module(monkeypatch):
    trace_for(monkeypatch, HOPPER)
    monkeypatch.setattr(_tokamax, "MODULE", "tokamax.elsewhere")
    assert "is called by `tokamax.elsewhere`, which Tokamax" in said_of(HALF, {})


def test_attention_by_tokamax_needs_the_package_installed(monkeypatch):
    trace_for(monkeypatch, HOPPER)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    assert 'which is not installed: `pip install "shardlib[tokamax]"`' in said_of(HALF, {})


@needs_tokamax
@pytest.mark.gpu
@pytest.mark.parametrize("mask", TAKEN)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_attention_by_tokamax_on_a_gpu_matches_float64(mask, dtype):
    arrays = {name: np.asarray(jnp.asarray(x, dtype), "f") for name, x in
              make(512, 512, size=64).items()}  # fmt: skip
    check(arrays, MASKS[mask], "tokamax", dtype)
