"""ZeRO: what is split, and that it is one device's step; precision, clipping, frozen parameters, what is not finite."""

import dataclasses
import re
from functools import cache, partial

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
from shardlib._relate import relate
from shardlib._tree import named_leaves
from shardlib._zero import split_further

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
        {"embedding": normal(3, 40, 16), "norm": jnp.ones(16), "bias": normal(4, 40), "layers": layers},
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

    x, _ = lax.scan(body, model["embedding"].at[batch["tokens"]].get(), (model["layers"], jnp.arange(2)))
    logits = (x * model["norm"]) @ model["embedding"].T + model["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return sl.mean(jnp.sum(losses * batch["mask"]), batch["mask"].sum())


@pytest.mark.parametrize(
    ("stage", "remat", "accumulate"), [(1, "none", (2,)), (2, "none", (1, 2)), (3, "none", (1, 2)), (3, "full", (1,))]
)
def test_every_stage_is_one_device(stage, remat, accumulate):
    compared = testing.check_step(
        decoder, optax.sgd(0.1, momentum=0.9), next_token, TOKENS, RULES, zero=sl.Zero(stage, small=0), remat=remat,
        meshes=["data=8,model=1", "data=4,model=2"], accumulate=accumulate,
    )  # fmt: skip
    assert all(comparison.randomness == 0 for comparison in compared)


def side_by_side(optimizers):
    """Each for its own part of the parameters, in one program."""

    def update(gradients, state, params, *, value):
        both = {n: updated(o, params[n], gradients[n], state[n], value) for n, o in optimizers.items()}
        return tuple({name: of[k] for name, of in both.items()} for k in (0, 1))

    return optax.GradientTransformationExtraArgs(lambda params: {n: o.init(params[n]) for n, o in optimizers.items()}, update)


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
            "in": normal(0, 8, 16), "bias": normal(1, 16), "layers": normal(2, 2, 16, 16), "out": normal(3, 16, 8),
        }  # fmt: skip

    def make():
        return sl.annotate({name: one() for name in OPTIMIZERS}, {".*/layers": ("layers", "embed", "mlp")})

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


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_curves_are_one_devices(optimizer, stage):
    ours, theirs = ([losses[optimizer] for losses in curves(of)] for of in (stage, 0))
    assert theirs[-1] < 0.9 * theirs[0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


TRAINABLE = {name: optimizer for name, optimizer in public_optimizers().items() if name not in UNTRAINABLE}
SHAPES = {"w": (16, 8), "square": (16, 16), "b": (8,)}
AT_ONCE = 20
# Of whole numbers, whose means are exact in any order, so that no optimizer can amplify their rounding.
GRADIENTS = [
    {
        name: (RANDOM.randint(1, 9, (16, *shape)) * RANDOM.choice([-1, 1], shape)).astype(np.float32)
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
    """The state after two steps, and what one device makes of the parameters, for a few optimizers at once."""
    optimizers = dict(list(TRAINABLE.items())[group * AT_ONCE : (group + 1) * AT_ONCE])
    together = side_by_side(optimizers)
    make = lambda: {name: start() for name in optimizers}
    strategy = sl.Strategy(mesh="data=8", rules=DATA, zero=sl.Zero(1, small=0))
    state, step = sl.init(make, together, strategy), sl.train_step(linear, strategy)

    @jax.jit
    def alone(params, opt_state, batch):
        value, gradients = jax.value_and_grad(linear)(params, batch, None)
        updates, opt_state = together.update(gradients, opt_state, params, value=value)
        return optax.apply_updates(params, updates), opt_state

    params, opt_state = make(), together.init(make())
    for batch in GRADIENTS:
        state, _ = step(state, batch)
        params, opt_state = alone(params, opt_state, batch)
    return state, params


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_optimizer_moves_split_parameters_as_one_device(name):
    state, expected = moved(list(TRAINABLE).index(name) // AT_ONCE)
    for path, theirs in expected[name].items():
        ours, scale = state.params[name][path], np.abs(theirs).max()
        assert ours.sharding.shard_shape(ours.shape) < ours.shape
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * scale)
    opt_state = dict(named_leaves(state.opt_state[name]))
    for path, relation in relate(TRAINABLE[name].init, start()).items():
        if relation.kind == "same":
            leaf, parameter = opt_state[path], state.params[name][relation.parameter]
            assert leaf.sharding.shard_shape(leaf.shape) == parameter.sharding.shard_shape(parameter.shape)


MESH = {"data": 4, "model": 2, "pod": 1}


@pytest.mark.parametrize(
    ("shape", "spec", "names", "dim"),
    [
        ((8, 16, 4), P(), ("embed", "heads", "head_dim"), 0),  # the first that divides
        ((6, 16, 4), P(), ("embed", "heads", "head_dim"), 1),
        ((6, 6, 4), P(), ("embed", "heads", "head_dim"), 2),  # the last one last
        ((8, 4), P("model"), ("mlp", "embed"), 1),  # not what `model` splits
        ((4, 8, 12), P(), ("layers", "embed", "mlp"), 1),  # nor a dim of layers
        ((4, 6, 8), P(), None, 0),  # unnamed: the longest but for the last, which would be of layers
        ((4, 8, 16), P(), None, 1),
        ((8, 8, 4), P(), None, 0),
        ((3, 8), P(), None, 1),
        ((8,), P(), ("embed",), 0),
    ],
)
def test_which_dim_is_split(shape, spec, names, dim):
    split = split_further(sl.Zero(1, small=0), ("data",), MESH, shape, spec, names)
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    entries[dim] = "data"
    assert split == (P(*entries), dim, ("data",), "")


@pytest.mark.parametrize(
    ("zero", "axes", "shape", "spec", "names", "reason"),
    [
        (sl.Zero(1), ("data",), (256, 256), P(), None, "small: 65,536 elements"),
        (sl.Zero(1, small=64), ("data",), (99, 8, 8), P(), ("layers", "embed", "mlp"), "small: 64 elements"),
        (sl.Zero(1, small=0), ("data",), (6, 10), P(), None, "no dim that is whole divides by `data=4`"),
        (sl.Zero(1, small=0), ("data",), (8, 6), P("model"), None, "no dim that is whole divides by `data=4`"),
        (sl.Zero(1, small=0), ("data",), (8, 6), P(), ("layers", "embed"), "no dim that is whole divides by `data=4`"),
        (sl.Zero(1, small=0), ("data", "model"), (4, 4), P(), None, "divides by `data=4` x `model=2`"),
        (sl.Zero(1, small=0), ("data",), (), P(), None, "no dim that is whole divides"),
        (sl.Zero(1, small=0), ("pod",), (8, 8), P(), None, ""),  # an axis of one device splits nothing
        (sl.Zero(1, small=0), ("data",), (8, 8), P("data"), None, ""),  # split over it already
        (sl.Zero(0, small=0), (), (8, 8), P(), None, ""),
    ],
)
def test_what_stays_as_it_is_and_why(zero, axes, shape, spec, names, reason):
    split = split_further(zero, axes, MESH, shape, spec, names)
    assert split[:3] == (spec, None, ())
    assert split.reason.endswith(reason) if reason else split.reason == ""


def test_what_is_one_element_larger_than_small_is_split_over_all_axes_that_are_free():
    zero = sl.Zero(1, small=63, stacked=("stage",))
    assert split_further(zero, ("data",), MESH, (4, 8, 8), P(), ("stage", "a", "b")).dim == 1
    split = split_further(zero, ("pod", "data", "model"), MESH, (8, 8), P(), None)
    assert split == (P(("data", "model"), None), 0, ("data", "model"), "")
    assert split_further(zero, ("data", "model"), MESH, (8, 8), P("model"), None).spec == P("model", "data")


def mlp():
    return sl.annotate(
        {"in": normal(0, 16, 32), "bias": normal(1, 32), "layers": normal(2, 2, 32, 32), "out": normal(3, 32, 16)},
        {"in": ("embed", "mlp"), "bias": ("mlp",), "layers": ("layers", "mlp", "embed"), "out": ("mlp", "embed")},
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
    state, step = sl.init(make, optimizer or optax.sgd(0.1), strategy), sl.train_step(loss, strategy)
    before = jax.device_get(state)
    for batch in batches:
        state, metrics = step(state, batch)
    return before, state, metrics


FULL = sl.Zero(3, small=0)


def test_what_is_frozen_is_split_at_rest_stays_as_it_is_and_has_no_state():
    frozen = ("bias", "lay.*")
    before, state, _ = trained(optimizer=optax.adam(1e-2), zero=FULL, frozen=frozen, batches=[X, X])
    assert (state.params["bias"], state.params["layers"], state.frozen["in"], state.frozen["out"]) == (None,) * 4
    chex.assert_trees_all_equal(jax.device_get(state.frozen), before.frozen)
    assert state.frozen["bias"].sharding.spec == P("data")
    assert state.frozen["layers"].sharding.spec == P(None, "data", None)
    assert not any({"bias", "layers"} & set(path.split("/")) for path, _ in named_leaves(state.opt_state))
    for name in ("in", "out"):
        assert not np.any(np.asarray(state.params[name]) == before.params[name])
    chex.assert_trees_all_equal(state.model["layers"], before.frozen["layers"])


def test_frozen_layers_pass_gradients_on():
    testing.check_step(mlp, optax.adam(1e-2), fit, X, RULES, zero=FULL, frozen=("layers", "bias"),
                       meshes=["data=4,model=2"], accumulate=(2,))  # fmt: skip


def test_a_frozen_pattern_that_matches_nothing_is_refused():
    strategy = sl.Strategy(mesh="data=8,model=1", rules=RULES, frozen=("out", "embed"))
    with pytest.raises(ValueError, match="frozen=...*`embed` matches no parameter. The paths are: bias, in, layers, out"):
        sl.init(mlp, optax.sgd(0.1), strategy)


CLIPS = {
    "global norm": (0.05, optax.clip_by_global_norm(0.05)),
    "a norm that is not reached": (1e3, optax.identity()),
    "by value": (optax.clip(1e-3), optax.clip(1e-3)),
    "adaptive": (optax.adaptive_grad_clip(1e-2), optax.adaptive_grad_clip(1e-2)),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_is_that_of_the_whole_gradient(clip, stage):
    ours, optaxs = CLIPS[clip]
    before, state, metrics = trained(optimizer=optax.sgd(1.0), mesh="data=4,model=2", zero=sl.Zero(stage, small=0), clip=ours)
    gradient = jax.grad(fit)(before.params, X, None)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(gradient), rtol=1e-5)
    assert metrics["grad_norm"] > 0.1
    clipped, _ = optaxs.update(gradient, optaxs.init(before.params), before.params)
    if clip != "a norm that is not reached":
        assert optax.tree.norm(clipped) < 0.9 * optax.tree.norm(gradient)
    chex.assert_trees_all_close(state.params, jax.tree.map(jnp.subtract, before.params, clipped), rtol=1e-5, atol=1e-6)


def test_clipping_with_state_is_refused():
    with pytest.raises(ValueError, match="clip=....*without state.*optax.chain"):
        trained(clip=optax.adaptive_grad_clip(0.1)._replace(init=optax.trace(0.9).init))


PRECISIONS = {
    (stage, precision): sl.Precision("bf16", keep=("bias",), reduce=precision)
    for stage, precision in [(0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (1, "bf16"), (3, "bf16")]
}


@cache
def in_bfloat16(stage, reduce):
    seen = {}

    def loss(model, x, rng):
        seen.update({name: (leaf.dtype, leaf.shape) for name, leaf in model.items()})
        return jnp.mean(residuals(model, x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    precision = sl.Precision("bf16", keep=("bias",), reduce=reduce)
    strategy = sl.Strategy(mesh="data=4,model=2", rules=RULES, zero=sl.Zero(stage, small=0), precision=precision)
    state, step = sl.init(mlp, optax.adam(1e-2), strategy), sl.train_step(loss, strategy)
    losses = []
    for _ in range(5):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    return losses, state, seen
