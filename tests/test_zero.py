"""ZeRO: what is split, and that the step equals one device's; precision, clipping, frozen
parameters, nonfinite gradients.
"""

import dataclasses
import re
from functools import cache, partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from test_relate import UNTRAINABLE, public_optimizers, updated

import shardlib as sl
from shardlib import testing
from shardlib._tree import named_leaves
from shardlib.collectives._zero_split import split_further
from shardlib.layouts._relate import relate

DATA = sl.AxisRules(batch="data", layers=None, embed=None, mlp=None)
RULES = sl.AxisRules(batch="data", layers=None, vocab="model", embed=None, mlp="model")
RANDOM = np.random.RandomState(0)
TOKENS = {
    "tokens": RANDOM.randint(0, 40, (16, 4)).astype(np.int32),
    "labels": RANDOM.randint(0, 40, (16, 4)).astype(np.int32),
    "mask": (RANDOM.rand(16, 4) > 0.6).astype(np.float32),  # very unevenly many tokens per device
}
X = RANDOM.randn(16, 16).astype(np.float32)


def normal(number, *shape):
    return jnp.asarray(0.3 * np.random.RandomState(number).randn(*shape), jnp.float32)


def decoder():
    layers = {"up": normal(0, 2, 16, 32), "up_bias": normal(1, 2, 32), "down": normal(2, 2, 32, 16)}
    return sl.annotate(
        {
            "embedding": normal(3, 40, 16),
            "norm": jnp.ones(16),
            "bias": normal(4, 40),
            "layers": layers,
        },
        {
            "embedding": ("vocab", "embed"),
            "norm": ("embed",),
            "bias": ("vocab",),
            "layers/up": ("layers", "embed", "mlp"),
            "layers/up_bias": ("layers", "mlp"),
            "layers/down": ("layers", "mlp", "embed"),
        },
    )


@sl.remat
def layer(x, w, key):
    hidden = jax.nn.gelu(x @ w["up"] + w["up_bias"])
    kept = jax.random.bernoulli(key, 0.8, hidden.shape)
    return x + jnp.where(kept, hidden / 0.8, 0) @ w["down"]


def next_token(model, batch, rng):
    def body(x, scanned):
        w, i = scanned
        return layer(x, w, jax.random.fold_in(rng, i)), None

    x, _ = lax.scan(
        body, model["embedding"].at[batch["tokens"]].get(), (model["layers"], jnp.arange(2))
    )
    logits = (x * model["norm"]) @ model["embedding"].T + model["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return sl.weighted_mean(jnp.sum(losses * batch["mask"]), batch["mask"].sum())


MESHES = ["data=8,model=1", "data=4,model=2"]


@pytest.mark.representative("1-none-meshes0-accumulate0", "2-none-meshes1-accumulate1")
@pytest.mark.long
@pytest.mark.sentinel("3-full-meshes3-accumulate3")
@pytest.mark.parametrize(
    ("stage", "remat", "meshes", "accumulate"),
    [
        (1, "none", MESHES[1:], (1, 2)),
        (2, "none", MESHES[1:], (1, 2)),
        (3, "none", MESHES, (2,)),
        (3, "full", MESHES[1:], (1,)),
    ],
)
def test_zero_stages_equal_one_device(stage, remat, meshes, accumulate):
    compared = testing.check_step(
        decoder,
        optax.sgd(0.1, momentum=0.9),
        next_token,
        TOKENS,
        RULES,
        zero=sl.Zero(stage, small=0),
        remat=remat,
        meshes=meshes,
        accumulate=accumulate,
    )
    assert all(comparison.randomness == 0 for comparison in compared)


def side_by_side(optimizers):
    """Each for its own part of the parameters, in one program."""

    def update(gradients, state, params, *, value):
        both = {
            n: updated(o, params[n], gradients[n], state[n], value) for n, o in optimizers.items()
        }
        return tuple({name: of[k] for name, of in both.items()} for k in (0, 1))

    return optax.GradientTransformationExtraArgs(
        lambda params: {n: o.init(params[n]) for n, o in optimizers.items()}, update
    )


OPTIMIZERS = {
    "adam": optax.adam(3e-3),
    "adafactor": optax.adafactor(3e-3, min_dim_size_to_factor=4),
    "lamb": optax.lamb(3e-3),
    "lion": optax.lion(1e-3),
    "sm3": optax.sm3(3e-2),
    "muon": optax.contrib.muon(3e-3),
    "ademamix": optax.contrib.ademamix(3e-3),
}
TEACHER = np.tanh(RANDOM.randn(64, 8) @ RANDOM.randn(8, 8)).astype(np.float32)


@cache
def curves(stage):
    def one():
        return {
            "in": normal(0, 8, 16), "bias": normal(1, 16), "layers": normal(2, 2, 16, 16),
            "out": normal(3, 16, 8),
        }  # fmt: skip

    def make():
        return sl.annotate(
            {name: one() for name in OPTIMIZERS}, {".*/layers": ("layers", "embed", "mlp")}
        )

    def loss(model, batch, rng):
        def error(w):
            x = jnp.tanh(batch["x"] @ w["in"] + w["bias"])
            x, _ = lax.scan(lambda x, layer: (x + jnp.tanh(x @ layer), None), x, w["layers"])
            return jnp.mean((x @ w["out"] - batch["y"]) ** 2)

        errors = {name: error(w) for name, w in model.items()}
        return sum(errors.values()), errors

    mesh = sl.make_mesh("data=8") if stage else sl.make_mesh("data=1", devices=jax.devices()[:1])
    strategy = sl.Strategy(mesh=mesh, rules=DATA, zero=sl.Zero(stage, small=0))
    state, step = sl.init(make, side_by_side(OPTIMIZERS), strategy), sl.train_step(loss, strategy)
    batch = {"x": np.random.RandomState(1).randn(64, 8).astype(np.float32), "y": TEACHER}
    found = []
    for _ in range(50):
        state, metrics = step(state, batch)
        found.append({name: float(metrics[name]) for name in OPTIMIZERS})
    return found


# All optimizers of a stage are one program.
@pytest.mark.representative("adam-3")
@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_zero_training_curves_equal_one_device(optimizer, stage):
    ours, theirs = ([losses[optimizer] for losses in curves(of)] for of in (stage, 0))
    assert theirs[-1] < 0.9 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


TRAINABLE = {
    name: optimizer for name, optimizer in public_optimizers().items() if name not in UNTRAINABLE
}
SHAPES = {"w": (16, 8), "square": (16, 16), "b": (8,)}
AT_ONCE = 20
# Of whole numbers, whose means are exact in any order, so that no optimizer can amplify their
# rounding.
GRADIENTS = [
    {
        name: (RANDOM.randint(1, 9, (16, *shape)) * RANDOM.choice([-1, 1], shape)).astype(
            np.float32
        )
        for name, shape in SHAPES.items()
    }
    for _ in range(2)
]


def linear(model, batch, rng):
    means = {name: jnp.mean(gradients, 0) for name, gradients in batch.items()}
    return sum(jnp.sum(w[name] * mean) for w in model.values() for name, mean in means.items())


def start():
    return {name: normal(number, *shape) for number, (name, shape) in enumerate(SHAPES.items())}


@cache
def moved(group):
    """The state after two steps, and what one device makes of the parameters, for a few optimizers
    at once.
    """
    optimizers = dict(list(TRAINABLE.items())[group * AT_ONCE : (group + 1) * AT_ONCE])
    together = side_by_side(optimizers)
    make = lambda: {name: start() for name in optimizers}
    strategy = sl.Strategy(mesh="data=8", rules=DATA, zero=sl.Zero(1, small=0))
    state, step = sl.init(make, together, strategy), sl.train_step(linear, strategy)

    # It is not what is tested: compile fast.
    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def alone(params, opt_state, batch):
        value, gradients = jax.value_and_grad(linear)(params, batch, None)
        updates, opt_state = together.update(gradients, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = make(), together.init(make())
    for batch in GRADIENTS:
        state, _ = step(state, batch)
        params, opt_state = alone(params, opt_state, batch)
    return state, params


@pytest.mark.long(*list(TRAINABLE)[AT_ONCE:])  # all but one program
@pytest.mark.parametrize("name", TRAINABLE)
def test_zero_with_every_optax_optimizer_equals_one_device(name):
    state, expected = moved(list(TRAINABLE).index(name) // AT_ONCE)
    for path, theirs in expected[name].items():
        ours, scale = state.params[name][path], np.abs(theirs).max()
        assert ours.sharding.shard_shape(ours.shape) < ours.shape
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale)
    opt_state = dict(named_leaves(state.opt_state[name]))
    for path, relation in relate(TRAINABLE[name].init, start()).items():
        if relation.kind == "same":
            leaf, parameter = opt_state[path], state.params[name][relation.parameter]
            assert leaf.sharding.shard_shape(leaf.shape) == parameter.sharding.shard_shape(
                parameter.shape
            )


MESH = {"data": 4, "model": 2, "pod": 1}


@pytest.mark.parametrize(
    ("shape", "spec", "names", "dim"),
    [
        ((8, 16, 4), P(), ("embed", "heads", "head_dim"), 0),  # the first that divides
        ((6, 16, 4), P(), ("embed", "heads", "head_dim"), 1),
        ((6, 6, 4), P(), ("embed", "heads", "head_dim"), 2),  # the last one last
        ((8, 4), P("model"), ("mlp", "embed"), 1),  # not what `model` splits
        ((4, 8, 12), P(), ("layers", "embed", "mlp"), 1),  # nor a dim of layers
        # Unnamed: the longest but for the last, which would be of layers.
        ((4, 6, 8), P(), None, 0),
        ((4, 8, 16), P(), None, 1),
        ((8, 8, 4), P(), None, 0),
        ((3, 8), P(), None, 1),
        ((8,), P(), ("embed",), 0),
    ],
)
def test_zero_chooses_the_dim_to_split(shape, spec, names, dim):
    split = split_further(sl.Zero(1, small=0), ("data",), MESH, shape, spec, names)
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    entries[dim] = "data"
    assert split[:4] == (P(*entries), dim, ("data",), "")
    stacks = [name == "layers" for name in names] if names else [False] * len(shape)
    assert split.layer == np.prod(
        [size for size, stack in zip(shape, stacks, strict=True) if not stack]
    )


@pytest.mark.parametrize(
    ("zero", "axes", "shape", "spec", "names", "reason"),
    [
        (sl.Zero(1), ("data",), (256, 256), P(), None, "small: 65,536 elements"),
        (
            sl.Zero(1, small=64),
            ("data",),
            (99, 8, 8),
            P(),
            ("layers", "embed", "mlp"),
            "small: 64 elements",
        ),
        (
            sl.Zero(1, small=0),
            ("data",),
            (6, 10),
            P(),
            None,
            "no dim that is whole divides by `data=4`",
        ),
        (
            sl.Zero(1, small=0),
            ("data",),
            (8, 6),
            P("model"),
            None,
            "no dim that is whole divides by `data=4`",
        ),
        (
            sl.Zero(1, small=0),
            ("data",),
            (8, 6),
            P(),
            ("layers", "embed"),
            "no dim that is whole divides by `data=4`",
        ),
        (
            sl.Zero(1, small=0),
            ("data", "model"),
            (4, 4),
            P(),
            None,
            "divides by `data=4` x `model=2`",
        ),
        (sl.Zero(1, small=0), ("data",), (), P(), None, "no dim that is whole divides by `data=4`"),
        # An axis of one device splits nothing.
        (sl.Zero(1, small=0), ("pod",), (8, 8), P(), None, ""),
        (sl.Zero(1, small=0), ("data",), (8, 8), P("data"), None, ""),  # split over it already
        (sl.Zero(0, small=0), (), (8, 8), P(), None, ""),
    ],
)
def test_zero_leaves_arrays_unsplit_and_says_why(zero, axes, shape, spec, names, reason):
    split = split_further(zero, axes, MESH, shape, spec, names)
    assert split[:3] == (spec, None, ())
    assert reason in split.reason if reason else split.reason == ""


def test_zero_splits_a_dim_whose_axis_is_a_single_device():
    assert (
        split_further(sl.Zero(1, small=0), ("data",), {"data": 8, "model": 1}, (8,), P("model")).dim
        == 0
    )


def test_zero_splits_arrays_above_the_small_limit_over_all_free_axes():
    zero = sl.Zero(1, small=63, stacked=("stage",))
    assert split_further(zero, ("data",), MESH, (4, 8, 8), P(), ("stage", "a", "b")).dim == 1
    split = split_further(zero, ("pod", "data", "model"), MESH, (8, 8), P(), None)
    assert split[:4] == (P(("data", "model"), None), 0, ("data", "model"), "")
    assert split_further(zero, ("data", "model"), MESH, (8, 8), P("model"), None).spec == P(
        "model", "data"
    )


def mlp():
    return sl.annotate(
        {
            "in": normal(0, 16, 32),
            "bias": normal(1, 32),
            "layers": normal(2, 2, 32, 32),
            "out": normal(3, 32, 16),
        },
        {
            "in": ("embed", "mlp"),
            "bias": ("mlp",),
            "layers": ("layers", "mlp", "embed"),
            "out": ("mlp", "embed"),
        },
    )


def mlp_values():
    return jax.tree.map(
        lambda box: np.asarray(box.unbox()), mlp(), is_leaf=lambda leaf: hasattr(leaf, "unbox")
    )


def residuals(model, x):
    y = jnp.tanh(x @ model["in"] + model["bias"])
    y, _ = lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), y, model["layers"])
    return y @ model["out"] - x


def fit(model, x, rng):
    return jnp.mean(residuals(model, x) ** 2)


def trained(loss=fit, optimizer=None, make=mlp, batches=(X,), **options):
    """The state before and after some steps, on the host, and the metrics of the last."""
    strategy = sl.Strategy(**{"mesh": "data=8,model=1", "rules": RULES, **options})
    state, step = (
        sl.init(make, optimizer or optax.sgd(0.1), strategy),
        sl.train_step(loss, strategy),
    )
    before = jax.device_get(state)
    for batch in batches:
        state, metrics = step(state, batch)
    return before, state, metrics


FULL = sl.Zero(3, small=0)


def test_frozen_parameters_are_split_unchanged_and_without_optimizer_state():
    frozen = ("bias", "lay.*")
    before, state, _ = trained(
        optimizer=optax.adam(1e-2), rules=DATA, mesh="data=8", zero=FULL, frozen=frozen
    )
    assert (
        state.params["bias"],
        state.params["layers"],
        state.frozen["in"],
        state.frozen["out"],
    ) == (None,) * 4
    chex.assert_trees_all_equal(jax.device_get(state.frozen), before.frozen)
    assert state.frozen["bias"].sharding.spec == P("data")
    assert state.frozen["layers"].sharding.spec == P(None, "data", None)
    assert not any(
        {"bias", "layers"} & set(path.split("/")) for path, _ in named_leaves(state.opt_state)
    )
    for name in ("in", "out"):
        assert not np.any(np.asarray(state.params[name]) == before.params[name])
    chex.assert_trees_all_equal(state.model["layers"], before.frozen["layers"])


@pytest.mark.long
def test_frozen_layers_pass_gradients_through():
    testing.check_step(mlp, optax.adam(1e-2), fit, X, RULES, zero=FULL, frozen=("layers", "bias"),
                       meshes=["data=4,model=2"], accumulate=(2,))  # fmt: skip


def test_frozen_pattern_that_matches_nothing_is_refused():
    strategy = sl.Strategy(mesh="data=8,model=1", rules=RULES, frozen=("out", "embed"))
    with pytest.raises(
        ValueError,
        match="frozen=...*`embed` matches no parameter. The paths are: bias, in, layers, out",
    ):
        sl.init(mlp, optax.sgd(0.1), strategy)


CLIPS = {
    "global norm": (0.05, optax.clip_by_global_norm(0.05)),
    "a norm that is not reached": (1e3, optax.identity()),
    "by value": (optax.clip(1e-3), optax.clip(1e-3)),
    "adaptive": (optax.adaptive_grad_clip(1e-2), optax.adaptive_grad_clip(1e-2)),
}


@pytest.mark.long("adaptive-3", "global norm-0", "global norm-3")
@pytest.mark.parametrize(("clip", "stage"), [("global norm", 0), *((clip, 3) for clip in CLIPS)])
def test_clipping_uses_the_whole_gradient(clip, stage):
    ours, optaxs = CLIPS[clip]
    before, state, metrics = trained(
        optimizer=optax.sgd(1.0), mesh="data=4,model=2", zero=sl.Zero(stage, small=0), clip=ours
    )
    gradient = jax.grad(fit)(before.params, X, None)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)
    assert metrics["grad_norm"] > 0.1
    clipped, _ = optaxs.update(gradient, optaxs.init(before.params), before.params)
    if clip != "a norm that is not reached":
        assert optax.tree.norm(clipped) < 0.9 * optax.tree.norm(gradient)
    chex.assert_trees_all_close(
        state.params, jax.tree.map(jnp.subtract, before.params, clipped), rtol=1e-5, atol=1e-6
    )


def test_clipping_with_state_is_refused():
    with pytest.raises(ValueError, match="clip=....*without state.*optax.chain"):
        trained(clip=optax.adaptive_grad_clip(0.1)._replace(init=optax.trace(0.9).init))


@cache
def in_bfloat16(stage, reduce="float32"):
    """The losses of five steps, the state after them, and the dtypes and shapes that the loss
    saw.
    """
    seen = {}

    def loss(model, x, rng):
        seen.update({name: (leaf.dtype.name, leaf.shape) for name, leaf in model.items()})
        model = model | {"bias": model["bias"].astype(jnp.bfloat16)}
        return jnp.mean(residuals(model, x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    precision = sl.Precision("bf16", keep=("bias",), reduce=reduce)
    strategy = sl.Strategy(
        mesh="data=4,model=2", rules=RULES, zero=sl.Zero(stage, small=0), precision=precision
    )
    state, step = sl.init(mlp, optax.adam(1e-2), strategy), sl.train_step(loss, strategy)
    losses = []
    for _ in range(5):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    return losses, state, seen


@pytest.mark.representative("1-float32", "2-bf16")
@pytest.mark.long
@pytest.mark.sentinel("0-float32", "3-bf16")
@pytest.mark.parametrize(
    ("stage", "reduce"), [(0, "float32"), (1, "float32"), (3, "float32"), (2, "bf16"), (3, "bf16")]
)
def test_bf16_precision_gives_the_loss_bfloat16_of_float32_masters(stage, reduce):
    losses, state, seen = in_bfloat16(stage, reduce)
    whole = {
        name: (("float32" if name == "bias" else "bfloat16"), leaf.shape)
        for name, leaf in state.params.items()
    }
    assert seen == whole
    assert {leaf.dtype.name for leaf in jax.tree.leaves(state.params)} == {"float32"}
    assert losses[-1] < 0.9 * losses[0]
    np.testing.assert_allclose(losses, in_bfloat16(0)[0], rtol=2e-2)


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
def test_bf16_precision_warns_of_a_product_in_a_wider_dtype(accumulate):
    with pytest.warns(
        sl.ShardingWarning,
        match=r"`in` in bfloat16, .* at .*test_zero.py:\d+, and so are 2 others.*keep=",
    ) as said:
        trained(precision="bf16", accumulate=accumulate)
    line = int(re.search(r"test_zero.py:(\d+)", str(said[0].message))[1])
    assert '@ model["in"]' in Path(__file__).read_text().splitlines()[line - 1]

    def in_a_scan(model, x, rng):
        hidden = (x.astype(jnp.bfloat16) @ model["in"]).astype(jnp.float32)
        hidden, _ = lax.scan(
            lambda y, w: (jnp.tanh(jax.checkpoint(jnp.dot)(y, w)), None), hidden, model["layers"]
        )
        return jnp.mean((hidden.astype(jnp.bfloat16) @ model["out"]) ** 2)

    with pytest.warns(
        sl.ShardingWarning,
        match="`layers` in bfloat16, .* and it is multiplied in a wider dtype at [^,]*: what",
    ):
        trained(in_a_scan, precision="bf16", accumulate=accumulate)
    trained(in_a_scan, precision=sl.Precision("bf16", keep=("layers",)), accumulate=accumulate)


def test_precision_keep_pattern_that_matches_nothing_is_refused():
    strategy = sl.Strategy(
        mesh="data=8,model=1", rules=RULES, precision=sl.Precision("bf16", keep=(".*norm",))
    )
    with pytest.raises(
        ValueError, match="keep=...*`.\\*norm` matches no parameter. The paths are: bias, in"
    ):
        sl.init(mlp, optax.sgd(0.1), strategy)


def broken(model, batch, rng):
    """Of which the gradient of `b` and of `d`, the second and fourth, is not finite where the batch
    is not.
    """
    bad = jnp.mean(batch["bad"])
    return jnp.mean((batch["x"] @ model["a"] @ model["c"]) ** 2) + bad * jnp.sum(
        model["b"] + model["d"]
    )


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("nonfinite", ["count", "skip"])
def test_nonfinite_gradients_are_counted_named_and_skipped_on_demand(nonfinite, stage):
    params = {
        "a": normal(0, 16, 16),
        "b": normal(1, 16),
        "c": normal(2, 16, 16),
        "d": normal(3, 16),
    }
    strategy = sl.Strategy(
        mesh="data=8", rules=DATA, zero=sl.Zero(stage, small=0), nonfinite=nonfinite
    )
    state, step = (
        sl.init(lambda: params, optax.adam(1e-2), strategy),
        sl.train_step(broken, strategy),
    )
    good = {"x": X, "bad": np.ones(16, np.float32)}
    # On one device alone.
    bad = {"x": X, "bad": np.where(np.arange(16) == 13, np.inf, 1).astype(np.float32)}
    state, metrics = step(state, good)
    assert (int(state.nonfinite), int(metrics["first_nonfinite"])) == (0, -1)
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, bad)
    assert int(state.nonfinite) == 1
    assert named_leaves(state.params)[int(metrics["first_nonfinite"])][0] == "b"
    after = jax.device_get((state.params, state.opt_state))
    if nonfinite == "skip":
        chex.assert_trees_all_equal(after, before)
        state, metrics = step(state, good)
        assert (int(state.nonfinite), int(metrics["first_nonfinite"])) == (1, -1)
        assert all(
            np.all(leaf != old)
            for leaf, old in zip(state.params.values(), before[0].values(), strict=True)
        )
    else:
        assert np.all(after[0]["a"] != before[0]["a"]) and np.isfinite(after[0]["a"]).all()
        assert not np.isfinite(after[0]["b"]).any()
    assert int(state.step) == (3 if nonfinite == "skip" else 2)


@dataclasses.dataclass(frozen=True)
class Doubled(sl.Exchange):
    """Any exchange other than `Exact`."""

    axes: tuple[str, ...] = ("pod",)

    def average(self, gradients, parameters, inputs):
        return [
            2 * lax.pmean(g, self.over(p)) for g, p in zip(gradients, parameters, strict=True)
        ], inputs.errors


def strategy(**options):
    return sl.Strategy(**{"mesh": "data=8", "rules": DATA, **options})


PODS = DATA | sl.AxisRules(batch=("pod", "data"))
HYBRID = dict(mesh="pod=2,data=4", rules=PODS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: strategy(zero=4), r"zero=4\)` takes a stage, 0 to 3, one of FSDP's names"),
        (lambda: strategy(zero=True), "zero=True.*takes a stage, 0 to 3"),
        (lambda: strategy(zero="FULL"), "zero='FULL'.*NO_SHARD, SHARD_GRAD_OP, FULL_SHARD, "
                                        "HYBRID_SHARD"),
        (lambda: strategy(zero=sl.Zero(1, axes=("model",))), "`model` is not one of the data axes .'data',."),
        (lambda: sl.Zero(1, axes="data"), "axes='data'.*a tuple of names"),
        (lambda: sl.Zero(1, small=-1), "small=-1"),
        (lambda: sl.Zero(1, bucket_bytes=0), "bucket_bytes=0"),
        (lambda: sl.Zero(3, layers="layers/("), "is no regular expression"),
        (lambda: strategy(zero=1, manual=()), "no axis splits the batch and nothing else"),
        (lambda: sl.Strategy(mesh="fsdp=8", rules=sl.AxisRules(batch="fsdp", embed="fsdp"), zero=1), "no axis splits the"),
        (lambda: strategy(zero="HYBRID_SHARD"), "of the axes .'data',. none crosses"),
        (lambda: strategy(zero="HYBRID_SHARD", dcn="data=8"), "none stays within"),
        (lambda: strategy(zero="HYBRID_SHARD", **HYBRID), "none "
                                                          "crosses.*dcn=\"pod\".*zero=sl.Zero.3, "
                                                          "axes="),
        (lambda: strategy(zero=2, exchange=Doubled()), "Doubled.*`pod` is no axis of the mesh"),
        (lambda: strategy(zero=2, exchange=Doubled(("data",))), "Doubled.*takes all axes of data"),
        (lambda: strategy(zero=sl.Zero(3, axes=("pod",)), exchange=Doubled(), **HYBRID), "split parameters over `pod` too"),
        (lambda: strategy(clip=0), "clip=0"),
        (lambda: strategy(clip=optax.adam), "clip="),
        (lambda: strategy(frozen="bias"), "frozen='bias'.*takes a tuple of patterns"),
        (lambda: strategy(nonfinite="raise"), "nonfinite='raise'"),
        (lambda: strategy(precision="int8"), "compute='int8'"),
        (lambda: strategy(precision=16), "precision=16"),
        (
            lambda: trained(optimizer=optax.flatten(optax.adam(0.1)), zero=sl.Zero(1, strict=True)),
            "strict=True.*`0/mu` of shape .*follows several parameters; `0/nu`",
        ),
        (lambda: trained(zero=sl.Zero(3, layers=r"blocks/\d+")), "layers='blocks/.*found in no parameter's path.*bias, in"),
        (lambda: trained(optimizer=optax.lbfgs()), "wants .*value_fn"),
        (
            lambda: trained(frozen=("bias", "in", "layers", "out")),
            "nothing to move.*frozen=.'bias', 'in', 'layers', 'out'.*There are: bias, in, layers, "
            "out",
        ),
    ],
)  # fmt: skip
def test_strategy_refuses_invalid_zero_clip_frozen_and_precision(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_zero_refuses_a_scan_over_a_split_unnamed_layer_dim():
    def loss(model, x, rng):
        y, _ = lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x[:, :6], model["w"])
        return jnp.mean(y)

    make = lambda: {"w": normal(0, 8, 6, 6)}
    with pytest.raises(
        ValueError,
        match='`w` of shape .8, 6, 6. is scanned over its dim 0, which is split.*"layers"',
    ):
        trained(loss, make=make, rules=DATA, mesh="data=8", zero=FULL)
    named = lambda: sl.annotate(make(), {"w": ("layers", None, None)})
    with pytest.warns(
        sl.ShardingWarning, match="splits nothing over `data=8`.*`w` .no dim that is whole divides"
    ):
        after = trained(loss, make=named, rules=DATA, mesh="data=8", zero=FULL)[1]
    assert after.params["w"].sharding.is_fully_replicated


def test_custom_exchange_covers_the_axes_that_zero_leaves():
    common = dict(mesh="pod=2,data=4", rules=PODS, zero=sl.Zero(3, axes=("data",), small=0))
    plain, doubled = (
        trained(**common, exchange=exchange)[1].params for exchange in (sl.Exact(), Doubled())
    )
    expected = jax.tree.map(
        lambda start, p: start + 2 * (p - start), mlp_values(), jax.device_get(plain)
    )
    chex.assert_trees_all_close(jax.device_get(doubled), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("NO_SHARD", 0),
        ("SHARD_GRAD_OP", 2),
        ("FULL_SHARD", 3),
        ("HYBRID_SHARD", 3),
        ("_HYBRID_SHARD_ZERO2", 2),
    ],
)
def test_zero_accepts_the_names_of_fsdp_sharding_strategies(name, stage):
    found = strategy(zero=name, **HYBRID, dcn="pod")
    assert found.sharding.stage == stage
    assert set(found.zero_axes) == (
        set() if not stage else {"data"} if "HYBRID" in name else {"pod", "data"}
    )


def test_an_axis_of_which_dcn_takes_a_factor_of_one_stays_within_a_pod():
    for dcn in ("pod", "pod=2,data=1", "data = 1, pod = 2"):
        found = strategy(zero=1, **HYBRID, dcn=dcn)
        assert found.crossing == ("pod",)
        assert found.zero_axes == ("data", "pod")
        assert strategy(zero="HYBRID_SHARD", **HYBRID, dcn=dcn).zero_axes == ("data",)


def test_hybrid_sharding_splits_within_pods_and_repeats_across_them():
    large = lambda: {"w": jnp.zeros((256, 512)), "b": jnp.zeros(512)}
    state = sl.init(
        large, optax.adam(0.1), strategy(zero="HYBRID_SHARD", **HYBRID, dcn="pod"), abstract=True
    )
    assert (
        state.params["w"].sharding.spec
        == state.opt_state[0].mu["w"].sharding.spec
        == P("data", None)
    )
    assert state.params["b"].sharding.spec == P()


@pytest.mark.representative("HYBRID_SHARD-pod", "zero2-")
@pytest.mark.long
@pytest.mark.sentinel("zero3-")
@pytest.mark.parametrize(
    ("zero", "dcn"),
    [
        ("HYBRID_SHARD", "pod"),
        (sl.Zero(3, axes=("data",), small=0), ""),
        (sl.Zero(2, axes=("pod",), small=0), ""),
        (sl.Zero(1, axes=("data", "pod"), small=0), ""),
        (sl.Zero(3, small=0), "pod"),
    ],
)
def test_zero_over_some_or_all_of_two_data_axes_equals_one_device(zero, dcn):
    wide = lambda: {**mlp(), "in": normal(0, 16, 6000), "out": normal(3, 6000, 16)}  # not small
    make = wide if zero == "HYBRID_SHARD" else mlp
    loss = (
        fit
        if make is mlp
        else lambda model, x, rng: jnp.mean((jnp.tanh(x @ model["in"]) @ model["out"] - x) ** 2)
    )
    testing.check_step(
        make, optax.sgd(0.1), loss, X, PODS, meshes=["pod=2,data=4"], zero=zero, dcn=dcn, steps=1
    )


@pytest.mark.long
@pytest.mark.parametrize(("stage", "accumulate"), [(0, (1, 2)), (1, (1, 2))])
def test_overlapped_exchange_equals_one_device(stage, accumulate):
    testing.check_step(
        decoder,
        optax.sgd(0.1, momentum=0.9),
        next_token,
        TOKENS,
        RULES,
        zero=sl.Zero(stage, small=0),
        exchange=sl.Exact(overlap=True),
        meshes=["data=4,model=2"],
        accumulate=accumulate,
    )


def test_overlapped_exchange_over_two_data_axes_equals_one_device():
    zero, exchange = sl.Zero(1, axes=("data",), small=0), sl.Exact(overlap=True)
    testing.check_step(
        mlp,
        optax.sgd(0.1),
        fit,
        X,
        PODS,
        meshes=["pod=2,data=4"],
        zero=zero,
        exchange=exchange,
        steps=1,
        accumulate=(2,),
    )


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.sentinel("0-1-False", "1-2-True", "2-1-True", "2-2-False", "3-1-True", "3-2-False")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_with_per_device_parameters_equals_one_device(stage, accumulate, overlap):
    """Each device along `data` has a weight of its own, as with experts, which ZeRO splits over
    `pod`.
    """
    own, shared = normal(0, 4, 16, 32), normal(1, 32, 16)

    def loss(model, x, rng):
        assert model["own"].shape == (1, 16, 32)
        return jnp.mean((jnp.tanh(x @ model["own"][0]) @ model["shared"] - x) ** 2)

    def alone(model):
        expert = np.arange(16) // 2 % 4  # whose example it is: two on each of two pods of four
        hidden = jnp.tanh(jnp.einsum("bi,bij->bj", X, model["own"][expert]))
        return jnp.mean((hidden @ model["shared"] - X) ** 2)

    state, _ = trained(
        loss,
        optax.sgd(1.0),
        lambda: sl.annotate({"own": own, "shared": shared}, {"own": P("data", None, None)}),
        mesh="pod=2,data=4",
        rules=PODS,
        manual=("pod", "data"),
        zero=sl.Zero(stage, small=0),
        exchange=sl.Exact(overlap=overlap),
        accumulate=accumulate,
    )[1:]
    gradient = jax.grad(alone)({"own": own, "shared": shared})
    expected = jax.tree.map(jnp.subtract, {"own": own, "shared": shared}, gradient)
    chex.assert_trees_all_close(jax.device_get(state.params), expected, rtol=1e-5, atol=1e-6)
    spec = state.params["own"].sharding.spec
    assert spec == (P("data", "pod", None) if stage else P("data", None, None)), spec
