"""One suite over every op and every implementation; more of the head's is in test_head.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernel_ops import (
    OPS,
    ROUNDING,
    RULES,
    derived,
    every,
    every_op,
    make,
    near,
    needs_tokamax,
    rounding,
    some,
    true,
)
from kernel_programs import (
    CASES,
    GPUS,
    OF_GPUS,
    TPUS,
    in_a_checked_shard_map,
    of_case,
    of_tokamax,
    of_triton,
    which_multiply,
)
from machines import on_its_own

import shardlib as sl
from models import gpt
from shardlib import kernels
from shardlib.kernels._tpu import interpreted

P = jax.P
on_gpu = functools.partial(pytest.param, marks=pytest.mark.gpu)
pytestmark = pytest.mark.usefixtures("simulators")


@pytest.mark.representative(
    "float32-softmax-tpu_simulated",
    "float32-norm-tpu_simulated",
    "float32-head-reference",
    "bfloat16-softmax-reference",
    "bfloat16-norm-gpu_simulated",
    "bfloat16-head-tpu_simulated",
    "float16-softmax-gpu_simulated",
)
@pytest.mark.long
@pytest.mark.sentinel(
    "float32-softmax-gpu",
    "float32-norm-gpu",
    "float32-head-gpu",
    "float32-norm-tokamax",
    "bfloat16-softmax-tpu_simulated",
    "bfloat16-softmax-gpu_simulated",
    "bfloat16-softmax-gpu",
    "bfloat16-norm-gpu",
    "bfloat16-head-gpu",
    "bfloat16-norm-tokamax",
    "float16-softmax-tpu_simulated",
    "float16-norm-tpu_simulated",
    "float16-head-tpu_simulated",
    "float16-softmax-gpu",
    "float16-norm-gpu",
    "float16-head-gpu",
    "float16-norm-tokamax",
)
@every
@pytest.mark.parametrize("dtype", ROUNDING)
def test_kernels_match_float64_values_and_gradients(op, implementation, dtype):
    if implementation == "tpu_simulated" and dtype == "float16":
        pytest.skip("refused, as is tested below")
    # A GPU does not mind, and neither do the simulators before and after.
    if implementation == "gpu_simulated" and op.name == "head" and jax.__version_info__[1] == 11:
        pytest.skip("JAX 0.11's simulator refuses barriers whose last phase not all have seen")

    @given(st.data())
    @settings(
        deadline=None, max_examples=2 if "simulated" in implementation else 4, derandomize=True
    )
    def check(data):
        # A simulator takes short rows number by number.
        few = st.integers(1, 9) | st.integers(128, 300)
        row = data.draw(few if implementation == "gpu_simulated" else st.integers(1, 300))
        shape = (data.draw(st.integers(1, 3)), data.draw(st.integers(1, 19)), row)
        options = {name: data.draw(st.sampled_from(values)) for name, values in op.options.items()}
        arrays = make(op.arrays(shape, data.draw), dtype, seed=data.draw(st.integers(0, 9)))
        function = jax.jit(
            lambda arrays: derived(op.call, arrays, {**options, "implementation": implementation})
        )
        found = function(arrays)
        # Gradients, and a loss, are differences of numbers about one, and may be near zero
        # themselves.
        wanted, difference = true(op, arrays, options, some(found[0])), op.name == "head"
        near(found[0], wanted[0], 6 * rounding(op, dtype), difference or 1e-30)
        near(found[1], wanted[1], 6 * rounding(op, dtype), 1 if difference else 0.1)

    check()


LENGTHS = [
    ("tpu_simulated", 1),
    *[("gpu_simulated", n) for n in (5, 72, 10_244)],
    *[("gpu", n) for n in (1, 64, 127, 9001, 19_100, 60_000)],
]


@pytest.mark.representative("gpu_simulated-72-softmax", "gpu_simulated-10244-norm")
@pytest.mark.long(
    "gpu_simulated-72-softmax",
    "gpu_simulated-72-norm",
    "gpu_simulated-10244-softmax",
    "gpu_simulated-10244-norm",
)
@every_op
@pytest.mark.parametrize(
    ("implementation", "row"), [on_gpu(*one) if one[0] == "gpu" else one for one in LENGTHS]
)
def test_kernels_accept_rows_of_any_length(op, implementation, row):
    shapes = {
        "softmax": {"x": (2, 1, row), "where": (1, 1, row)},
        "norm": {"x": (2, 1, row), "scale": (row,), "bias": (row,)},
    }
    arrays = make(shapes[op.name], "float32")
    found = jax.jit(lambda arrays: derived(op.call, arrays, {"implementation": implementation}))(
        arrays
    )
    wanted = true(op, arrays, {}, some(found[0]))
    near(found[0], wanted[0], 6 * ROUNDING["float32"])
    tolerance, least = 6 * ROUNDING["float32"], 0.1
    if op.name == "norm" and row == 1:
        # The only number is its own mean, and its gradient the difference of two equal products,
        # each as large as the factor of the norm. A GPU may round but one of the two.
        tolerance, least = 2**-23, 1e-6**-0.5
    near(found[1], wanted[1], tolerance, least)


@every_op
@pytest.mark.parametrize("implementation", ["tpu_simulated", "gpu_simulated", on_gpu("gpu")])
def test_kernels_propagate_nan_and_inf_like_the_reference(op, implementation):
    x = np.array(np.random.default_rng(0).normal(size=(5, 130)), np.float32)
    x[1, 3], x[2, 129], x[3, 5], x[4, :] = np.nan, np.inf, -np.inf, -np.inf
    found, wanted = (
        jax.jit(lambda x, name=name: op.call({"x": x}, {"implementation": name}))(x)
        for name in (implementation, "reference")
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert np.isnan(found[1]).all() and np.isfinite(found[0]).all()


@pytest.mark.representative("norm-tpu_simulated", "norm-gpu_simulated")
@pytest.mark.long(
    "softmax-tpu_simulated",
    "softmax-gpu_simulated",
    "norm-tpu_simulated",
    "norm-gpu_simulated",
    "head-reference",
    "head-tpu_simulated",
)
@every
def test_kernels_under_vmap_and_scan_equal_a_loop(op, implementation):
    shapes = {
        "softmax": {"x": (2, 3, 3, 130), "where": (2, 3, 1, 130)},
        "norm": {"x": (2, 3, 3, 130), "scale": (2, 130)},
        "head": {"x": (2, 3, 3, 8), "kernel": (2, 19, 8), "targets": (2, 3, 3)},
    }
    arrays, tolerance = make(shapes[op.name], "float32"), max(1e-6, rounding(op, "float32") / 2)
    one = jax.jit(lambda arrays: derived(op.call, arrays, {"implementation": implementation}))
    wanted = [one(jax.tree.map(lambda x, k=k: x[k], arrays)) for k in range(2)]
    wanted = jax.tree.map(lambda *each: np.stack(each), *wanted)
    near(jax.jit(jax.vmap(one))(arrays), wanted, tolerance)
    near(jax.lax.scan(lambda none, arrays: (none, one(arrays)), None, arrays)[1], wanted, tolerance)
    shared = {name: x if name == "x" else x[0] for name, x in arrays.items()}  # the same beside all
    each = [one({name: x[k] if name == "x" else x for name, x in shared.items()}) for k in range(2)]
    beside = jax.vmap(one, ({name: 0 if name == "x" else None for name in shared},))
    found = jax.jit(beside)(shared)
    near(found, jax.tree.map(lambda *each: np.stack(each), *each), tolerance)


NAMES = [
    ("batch", "heads", None, None),
    ("batch", None, "seq", None),
    ("batch", None, None, "width"),
]


@pytest.mark.representative()
@pytest.mark.long(
    "automatic-reference-sequence-norm",
    "automatic-tpu_simulated-sequence-norm",
    "in a step-reference-sequence-norm",
    "in a step-tpu_simulated-sequence-norm",
    "own-reference-heads-softmax",
    "own-reference-sequence-norm",
    "own-tpu_simulated-heads-softmax",
    "own-tpu_simulated-sequence-norm",
    "own, checked-reference-sequence-norm",
    "own, checked-tpu_simulated-sequence-norm",
)
@every_op
@pytest.mark.parametrize("names", NAMES, ids=["heads", "sequence", "row"])
@pytest.mark.parametrize("implementation", ["reference", "tpu_simulated"])
@pytest.mark.parametrize("where", ["automatic", "in a step", "own", "own, checked"])
def test_kernels_on_sharded_arrays_equal_one_device(op, names, implementation, where):
    shapes = {
        "softmax": {"x": (2, 4, 8, 64), "where": (2, 1, 8, 64)},
        "norm": {"x": (2, 4, 8, 64), "scale": (64,)},
    }
    arrays = make(shapes[op.name], "float32")
    cotangent = np.asarray(make({"x": (2, 4, 8, 64)}, "float32", 1)["x"])
    wanted = derived(op.call, arrays, {}, cotangent)
    mesh = sl.make_mesh("data=2,model=4")
    spec = P(*(None if name is None else RULES[name][0] for name in names))
    beside = {"x": spec, "where": P(spec[0], None, *spec[2:]), "scale": P(spec[-1])}
    specs = {name: beside[name] for name in arrays}
    options = {"names": names, "implementation": implementation}
    axes = {"automatic": set(), "in a step": {"data"}}.get(where, {"data", "model"})

    def run(arrays, cotangent):
        out, gradients = derived(op.call, arrays, options, cotangent)
        # There JAX itself adds up what is the same on devices.
        if "scale" in gradients and where != "own, checked":
            over = tuple(
                axis for axis in axes if axis not in jax.tree.leaves(tuple(specs["scale"]))
            )
            gradients["scale"] = (
                jax.lax.psum(gradients["scale"], over) if over else gradients["scale"]
            )
        return out, gradients

    if axes:
        keep = lambda spec: P(*(axis if axis in axes else None for axis in spec))
        inside = jax.tree.map(keep, specs)
        out = (inside["x"], {name: one for name, one in inside.items() if name != "where"})
        run = jax.shard_map(
            run,
            in_specs=(inside, inside["x"]),
            out_specs=out,
            axis_names=axes,
            check_vma=where == "own, checked",
        )
    with sl.use(RULES, mesh):
        if implementation != "reference" and names[-1]:
            with pytest.raises(
                ValueError, match="the last dim is split over `model`. Here `reference` can"
            ):
                jax.jit(run)(arrays, cotangent)
            return
        if implementation != "reference" and where == "own, checked":
            with pytest.raises(
                ValueError,
                match=r"in a `shard_map\(..., check_vma=False\)`; here `float32.* over `data",
            ):
                jax.jit(run)(arrays, cotangent)
            return
        found = jax.jit(run)(arrays, cotangent)
    near(found, wanted, 1e-6)
    if where == "automatic":
        assert found[0].sharding.is_equivalent_to(jax.NamedSharding(mesh, spec), 4)


def cases(targets, *of):
    """Each of the cases of ops for each target."""
    numbers = {
        op: range(sum(len(one[op]) for one in of[:-1]), sum(len(one[op]) for one in of))
        for op in of[0]
    }
    return [
        pytest.param(*target.values, op, k, marks=target.marks, id=f"{target.values[0]}-{op}-{k}")
        for target in targets
        for op in numbers
        for k in numbers[op]
    ]


@pytest.mark.representative(
    "tpu:v4:2x2x1-softmax-2",
    "tpu:v4:2x2x1-norm-2",
    "tpu:v5e:2x2-norm-1",
    "tpu:v5p:2x2x1-softmax-0",
    "tpu:v6e:2x2-softmax-1",
    "tpu:v6e:2x2-norm-0",
    "gpu:h100:1x1x4-softmax-1",
    "gpu:h200:1x1x4-norm-0",
    "gpu:b200:1x1x4-softmax-2",
    "gpu:b200:1x1x4-norm-1",
    "gpu:h200:1x1x4-softmax-3",
    "gpu:h200:1x1x4-norm-5",
    "gpu:b200:1x1x4-norm-7",
)
@pytest.mark.parametrize(
    ("target", "op", "case"), cases(TPUS + GPUS, CASES) + cases(GPUS[1:], CASES, OF_GPUS)
)
def test_kernels_compile_and_read_and_write_each_byte_once(target, op, case):
    found = on_its_own(target, of_case, op, case)
    assert set(found.kinds) <= {"all-reduce"}, "gradients of what rows share, and nothing else"
    x, mask = found.sizes["x"], found.sizes.get("where", 0)
    beside = found.sizes.get("scale", 0) + found.sizes.get("bias", 0)
    out = x * (2 if "residual" in found.sizes else 1)
    # A mask is turned from bools into bytes before, and rows' sums of gradients are not forward's.
    assert found.read <= 1.02 * (out + 2 * mask) + 2 * beside, found
    assert found.written <= 1.02 * (out + mask), found


@pytest.mark.representative(
    "tpu:v5e:2x2-softmax",
    "tpu:v5e:2x2-norm",
    "tpu:v5e:2x2-head",
    "gpu:h200:1x1x4-softmax",
    "gpu:h200:1x1x4-norm",
    "gpu:h200:1x1x4-head",
)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("target", [TPUS[1], *GPUS[1:]])
def test_kernels_compile_inside_a_checked_shard_map(target, op):
    assert set(on_its_own(target, in_a_checked_shard_map, op)) <= {"all-reduce"}


@pytest.mark.parametrize(
    ("target", "op"),
    [
        pytest.param(*target.values, op, marks=target.marks)
        for target in (TPUS[1], *GPUS[1:])
        for op in ("softmax", "norm", "head", "attention")
        if (op, target.values[0]) != ("attention", "gpu:b200:1x1x4")  # ours is for Hopper
    ],
)
def test_kernels_that_multiply_are_known_by_their_bodies(target, op):
    """What is sent beside such a kernel is hidden; kernels of rows take too little time."""
    found = on_its_own(target, which_multiply, op)
    assert found and set(found) == {op in ("head", "attention")}


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.gpu_compiler
def test_kernels_of_triton_that_multiply_are_known_by_their_bodies(multiplies):
    assert on_its_own("gpu:h200:1x1x1", of_triton, multiplies) == [multiplies]


@needs_tokamax
@pytest.mark.parametrize("target", GPUS[1:])
def test_tokamax_norm_compiles_for_gpus(target):
    assert set(on_its_own(target, of_tokamax)) <= {"all-reduce"}


@needs_tokamax
@pytest.mark.gpu_compiler  # whose environment has it
@pytest.mark.parametrize("centred", [True, False])
def test_tokamax_norm_equals_the_reference_forward_and_backward(centred, monkeypatch):
    import tokamax

    from shardlib.kernels._norm import _reference, _tokamax

    plain = tokamax.layer_norm  # its own reference, as no GPU is there
    monkeypatch.setattr(
        tokamax,
        "layer_norm",
        lambda *given, implementation, **how: plain(*given, implementation="xla", **how),
    )
    row = {"scale": (130,), **({"bias": (130,)} if centred else {})}
    arrays = make(
        {
            "x": (3, 5, 130),
            "residual": (3, 5, 130),
            "g": (3, 5, 130),
            "h_gradient": (3, 5, 130),
            **row,
        },
        "float32",
    )
    x, residual, scale, bias = (arrays.get(name) for name in ("x", "residual", "scale", "bias"))
    options = {"epsilon": 0.1, "centred": centred}
    found, wanted = (
        one.forward(x, residual, scale, bias, **options) for one in (_tokamax, _reference)
    )
    near(found, wanted, 1e-6)
    given, biased = (wanted[1], scale, arrays["g"], arrays["h_gradient"]), bias is not None
    near(*(one.backward(*given, biased=biased, **options) for one in (_tokamax, _reference)), 1e-6)


X, T = jnp.zeros((8, 128)), jnp.zeros(8, int)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: kernels.softmax(X, implementation="tpu"),
            "`tpu` is a kernel for TPUs, and this is traced for cpu.*`reference` can",
        ),
        (
            lambda: kernels.softmax(X, implementation="triton"),
            "there are `reference`, `tpu`, `gpu`, `tpu_simulated`",
        ),
        (lambda: kernels.softmax(X, implementation="reference_simulated"), "there are `reference`"),
        (
            lambda: kernels.softmax(X.astype("float16"), implementation="tpu_simulated"),
            "takes float32 and bfloat16.*not float16",
        ),
        (
            lambda: kernels.rms_norm(X, implementation="tokamax"),
            "is a kernel for GPUs, and this is traced for cpu .cpu.. Here",
        ),
        (
            lambda: kernels.rms_norm(X, implementation="tokamax_simulated"),
            "there are .* `tokamax`, `tpu_simulated`, `gpu_sim",
        ),
        (
            lambda: kernels.softmax(jnp.zeros((1, 100_000)), implementation="tpu_simulated"),
            "a row may be of 45875",
        ),
        (lambda: kernels.softmax(X.astype(int)), "int32.8, 128.: give it floats"),
        (lambda: kernels.softmax(X, causal=True), "8 queries and 128 keys"),
        (lambda: kernels.softmax(X, scale=jnp.ones(())), "a Python number"),
        (lambda: kernels.softmax(X, where=X), "bools, true where"),
        (lambda: kernels.softmax(X, where=X[0, :5] > 0), "does not broadcast"),
        (lambda: kernels.softmax(X, names=("batch", None)), "outside any rules"),
        (
            lambda: kernels.rms_norm(X, X),
            "`scale` is float32.8, 128.; it has a float for each of the 128",
        ),
        (
            lambda: kernels.rms_norm(X, residual=X.astype("bfloat16")),
            "`residual` is bfloat16.8, 128. and `x` is float32",
        ),
        (lambda: kernels.layer_norm(X, epsilon=-1), "finite and at least 0"),
        (
            lambda: kernels.linear_cross_entropy(X, X[:, :5], T),
            "`kernel` float32.8, 5.; they are floats",
        ),
        (
            lambda: kernels.linear_cross_entropy(X, X, T[:3]),
            "an integer for each of the rows .8. of `x`",
        ),
        (
            lambda: kernels.linear_cross_entropy(X, X, T, vocab=9),
            "kernel's rows, of which there are 8",
        ),
        (lambda: kernels.linear_cross_entropy(X, X, T, smoothing=1.0), "at least 0 and below 1"),
        (lambda: kernels.linear_cross_entropy(X, X, T, cap=0.0), "above 0, or None"),
        (lambda: kernels.linear_cross_entropy(X, X, T, ignored=3), "is a token of the 8"),
        (
            lambda: kernels.linear_cross_entropy(
                *[jnp.zeros((128, 99_000))] * 2, jnp.zeros(128, int), implementation="tpu_simulated"
            ),
            "the least, of 99000 numbers a row, take",
        ),
    ],
)
def test_kernels_refuse_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_kernels_refuse_invalid_dimension_names():
    with sl.use(RULES, sl.make_mesh("data=2,model=4")):
        with pytest.raises(ValueError, match="has 2 dims and was given 1 names"):
            kernels.softmax(X, names=("batch",))
        with pytest.raises(ValueError, match="Did you mean `batch`"):
            kernels.softmax(X, names=("bach", None))
        with pytest.raises(ValueError, match="does not divide 3"):
            kernels.softmax(X[:3], names=("batch", None))
        with pytest.raises(ValueError, match="XLA cannot take a kernel apart. Name the dims"):
            jax.jit(functools.partial(kernels.softmax, implementation="tpu_simulated"))(X)
    rules = RULES | sl.AxisRules(width=["model", None])
    with (
        sl.use(rules, sl.make_mesh("data=2,model=4")),
        pytest.raises(ValueError, match="Give the rule one candidate"),
    ):
        jax.shard_map(
            lambda x: kernels.softmax(x, names=("batch", "width")), in_specs=P(), out_specs=P()
        )(X)


def test_kernels_accept_a_manual_axis_that_is_not_first_in_its_rule():
    rules, mesh = sl.AxisRules(batch=("pod", "data")), sl.make_mesh("pod=2,data=4")
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), "float32")
    head, targets = jnp.eye(8), jnp.arange(16) % 8

    def ops(x, targets):
        names = ("batch", None)
        y = kernels.rms_norm(x, names=names) + kernels.softmax(x, names=names)
        return y, kernels.linear_cross_entropy(x, head, targets, names=names)

    with sl.unsharded():
        wanted = jax.jit(ops)(x, targets)
    split = P("data")
    mapped = jax.shard_map(ops, in_specs=split, out_specs=split, axis_names={"data"})
    with sl.use(rules, mesh):
        found = jax.jit(mapped)(x, targets)
    near(found, wanted, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [
        {"kernels": None, "fused_loss": True},
        pytest.param(
            {"kernels": "tpu_simulated"},
            marks=pytest.mark.skipif(
                jax.__version__.startswith("0.11."),
                reason="simulated devices wait for each other forever beside JAX 0.11's simulator",
            ),
        ),
    ],
    ids=str,
)
def test_kernels_in_a_train_step_equal_the_plain_step(changes):
    def after(**changes):
        config = gpt.tiny(
            width=16,
            heads=4,
            vocab=30,
            vocab_multiple=8,
            context=8,
            layers=2,
            norm="rms",
            **changes,
        )
        strategy = sl.Strategy(
            mesh="data=2,model=4", rules=sl.rules.data | sl.rules.tensor, zero=sl.Zero(3, small=0)
        )
        state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
        tokens = np.random.default_rng(0).integers(0, 30, (4, 9))
        state, metrics = sl.train_step(gpt.loss, strategy)(state, {"tokens": tokens})
        return jax.tree.map(np.asarray, (state.params, metrics["loss"]))

    for one, other in zip(jax.tree.leaves(after(**changes)), jax.tree.leaves(after()), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_kernels_of_gpus_in_a_train_step_equal_the_plain_step():
    def after(**changes):
        # The gradient to a bias of keys is zero, and what is left of it rounding alone.
        config = gpt.tiny(
            width=128, head_dim=64, heads=2, vocab=300, norm="rms", bias=False,
            dtype=jnp.bfloat16, **changes,
        )  # fmt: skip
        strategy = sl.Strategy(
            mesh=sl.make_mesh("data=1", devices=jax.devices()[:1]), rules=sl.rules.data
        )
        state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
        tokens = np.random.default_rng(0).integers(0, 300, (4, 65))
        state, metrics = sl.train_step(gpt.loss, strategy)(state, {"tokens": tokens})
        return jax.tree.map(np.asarray, (state.params, metrics["loss"]))

    plain, kernels = after(), after(kernels="gpu", fused_loss=True, attention="cudnn")
    for one, other in zip(jax.tree.leaves(kernels), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2**-7 * np.abs(other).max())


def test_kernels_explain_says_which_runs_and_why_the_others_do_not(monkeypatch):
    def model(x):
        return jax.jit(kernels.rms_norm)(kernels.softmax(x, names=("batch", None)))

    with sl.use(RULES, sl.make_mesh("data=8,model=1")):
        said = kernels.explain(model, X)
    assert [(call.op, call.runs, call.task) for call in said.calls] == [
        ("softmax", "reference", "x: float32[1, 128]"),
        ("rms_norm", "reference", "x: float32[8, 128]"),
    ]
    assert "is a kernel for TPUs, and this is traced for cpu" in str(said)
    assert str(kernels.explain(jnp.sin, X)) == "No op of `shardlib.kernels` was called."


@pytest.mark.tpu_compiler
def test_kernel_choice_for_an_absent_tpu_is_the_fastest_measured(monkeypatch):
    from shardlib.kernels import _choice

    mesh = sl.Target("tpu:v5e:2x2").mesh("data=2,model=2")
    x, half = (jax.ShapeDtypeStruct((8, 128), dtype) for dtype in ("float32", "float16"))
    monkeypatch.setattr(_choice, "programs", tuple)
    with sl.use(RULES, mesh):
        said = kernels.explain(kernels.softmax, x, names=("batch", None)).calls[0]
        assert said.runs == "reference" and said.device == "TPU v5 lite"
        assert said.decided_by == "default"
        unknown = "can; neither measured nor compiled for this kind of device"
        assert dict(said.others)["tpu"] == unknown
        line, times = (
            {"op": "softmax", "device": "TPU v5 lite", "dtype": "float32"},
            {("tpu", 512): 1.0, ("reference", 512): 2.0},
        )
        times |= {("tpu", 8192): 4.0, ("reference", 8192): 3.0}
        table = [
            {**line, "implementation": name, "row": row, "time": time}
            for (name, row), time in times.items()
        ]
        monkeypatch.setattr(_choice, "measurements", lambda: tuple(table))
        assert kernels.explain(kernels.softmax, x, names=("batch", None)).calls[0].runs == "tpu"
        long = jax.ShapeDtypeStruct((8, 4096), "float32")
        said = kernels.explain(kernels.softmax, long, names=("batch", None)).calls[0]
        assert said.runs == "reference" and dict(said.others)["tpu"] == "can; measured slower here"
        assert said.decided_by == "measured"
        assert (
            kernels.explain(kernels.softmax, half, names=("batch", None)).calls[0].runs
            == "reference"
        )
        assert kernels.explain(kernels.softmax, x).calls[0].runs == "reference"


def test_kernel_choice_without_measurements_compares_compiled_programs(monkeypatch):
    from shardlib.kernels import _choice, _softmax

    monkeypatch.setattr(_softmax, "device_here", lambda: _choice.Device("tpu", "TPU vX"))
    line = {"op": "softmax", "device": "TPU vX", "dtype": "bfloat16", "row": 1024}

    def runs(**lines):
        table = [{**line, "implementation": name, **cost} for name, cost in lines.items()]
        monkeypatch.setattr(_choice, "programs", lambda: tuple(table))
        (call,) = kernels.explain(kernels.softmax, X).calls
        return call.runs, call.decided_by

    fast, slow = {"seconds": 1.0, "temp_gb": 3.0}, {"seconds": 1.1, "temp_gb": 1.0}
    assert runs(tpu=fast, reference=slow) == ("tpu", "compiled")
    assert runs(tpu=slow, reference=fast) == ("reference", "compiled")
    about_as_fast = {"seconds": 1.001, "temp_gb": 2.0}
    assert runs(reference=fast, tpu=about_as_fast) == ("tpu", "compiled"), "fewer temporaries"
    assert runs(tpu={"failed": "out of memory"}, reference=slow) == ("reference", "compiled")
    measured = [{**line, "implementation": "reference", "time": 1.0}]
    monkeypatch.setattr(_choice, "measurements", lambda: tuple(measured))
    assert runs(tpu=fast, reference=slow) == ("reference", "measured"), "a clock knows better"
    (named,) = kernels.explain(lambda: kernels.softmax(X, implementation="reference")).calls
    assert named.decided_by == "name" and dict(named.others)["tpu"] == "can; another was named"


def test_kernel_library_that_is_missing_is_named_with_its_pip_extra(monkeypatch):
    from shardlib.kernels import _choice, _norm

    monkeypatch.setattr(_norm, "device_here", lambda: _choice.Device("gpu", "NVIDIA H200"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r'not installed: `pip install "shardlib\[tokamax\]"`. Here `reference` and `gpu` can',
    ):
        kernels.layer_norm(X, implementation="tokamax")


def test_kernel_simulator_detects_a_race(capsys):
    def reads_before_it_is_there(x_ref, y_ref, scratch, semaphore):
        copy = pltpu.make_async_copy(x_ref, scratch, semaphore)
        copy.start()
        y_ref[...] = scratch[...]
        copy.wait()

    run = pl.pallas_call(
        reads_before_it_is_there,
        out_shape=X,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA],
        interpret=interpreted(True, X),
    )
    try:
        jax.block_until_ready(run(X))
    except (
        jax.errors.JaxRuntimeError
    ) as error:  # from JAX 0.12; before, it is printed, which the fixture reads
        assert "RACE DETECTED" in str(error)
    else:
        assert "RACE DETECTED" in capsys.readouterr().out


ROWS = ("batch", "seq", None)


def squared_sums(x, scale):
    """What a kernel of others might be: a result of rows, and one of all rows of the device."""
    y = x * scale
    return y, jax.lax.psum((y**2).sum((0, 1)), ("data", "model"))


@pytest.mark.parametrize("manual", [(), ("data",), ("data", "model")], ids=str)
def test_on_shards_runs_a_custom_function_on_each_devices_shard(manual):
    arrays = make({"x": (4, 8, 16), "scale": (8, 16)}, "float32")
    x, scale = arrays["x"], arrays["scale"]
    mesh = sl.make_mesh("data=2,model=4")
    run = kernels.on_shards(squared_sums, [ROWS, ("seq", None)], [ROWS, (None,)])

    def both_ways(x, scale, cotangent):
        (y, _), back = jax.vjp(run, x, scale)
        x_gradient, scale_gradient = back((cotangent, jnp.zeros(16)))
        rest = tuple(axis for axis in manual if axis == "data")
        return y, run(x, scale)[1], x_gradient, jax.lax.psum(scale_gradient, rest)

    if manual:
        spec = P(*("data" if "data" in manual else None, "model" if "model" in manual else None))
        row = P(spec[1])
        both_ways = jax.shard_map(
            both_ways,
            in_specs=(spec, row, spec),
            out_specs=(spec, P(), spec, row),
            axis_names=set(manual),
            check_vma=False,
        )
    cotangent = np.cos(np.arange(x.size)).reshape(x.shape).astype("f")
    with sl.use(RULES, mesh):
        found = jax.jit(both_ways)(x, scale, cotangent)
    y = x * scale
    wanted = (y, (y**2).sum((0, 1)), cotangent * scale, (cotangent * x).sum(0))
    near(found, wanted, 1e-6)
    if not manual:
        assert found[0].sharding.is_equivalent_to(jax.NamedSharding(mesh, P("data", "model")), 3)


@pytest.mark.parametrize(
    ("in_names", "out_names", "message"),
    [
        ([ROWS, ROWS], ROWS, "called with 1 arrays, and `in_names` has names for 2"),
        ([ROWS], ("batch", None), "has 3 dims and was given 2 names"),
        ([ROWS], ("batch", "heads", None), "named `heads`, which no argument's is; they have `b"),
        ([ROWS], [ROWS, ROWS], "the function gives 1 results, and `out_names` has names for 2"),
        (ROWS, ROWS, "the names of each argument's dims, in a list"),
        ([None], ROWS, "a tuple of names"),
    ],
)
def test_on_shards_refuses_invalid_dimension_names(in_names, out_names, message):
    x = jnp.ones((4, 8, 16))
    several = isinstance(out_names, list)
    with sl.use(RULES, sl.make_mesh("data=2,model=4")), pytest.raises(ValueError, match=message):
        kernels.on_shards(lambda x: [2 * x] if several else 2 * x, in_names, out_names)(x)
