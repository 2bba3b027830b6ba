"""Constraints that name the axes over which the step is manual, and an axis called `batch`, against
one device.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib.testing import check_step

RULES = sl.AxisRules(batch="data", embed=None, mlp="model", act_mlp="model")
X = np.random.default_rng(0).normal(size=(8, 4)).astype("f")
STRATEGY = sl.Strategy(mesh="data=4,model=2", rules=RULES)
constrain = lax.with_sharding_constraint


def make():
    weights = np.random.default_rng(1).normal(size=(4, 8)).astype("f")
    return sl.annotate({"w": jnp.asarray(weights)}, {"w": ("embed", "mlp")})


def check(loss, rules=RULES, meshes=("data=2,model=2",), **options):
    return check_step(make, optax.sgd(0.1), loss, X, rules, meshes=list(meshes), steps=1, **options)


def constraints(loss):
    """How the constraints of a step's program lay out arrays that have dims."""
    return re.findall(r"sharding_constraint \S+ <@mesh, (\[\{.*?\])>", program(loss).as_text())


def program(loss, strategy=STRATEGY):
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    return sl.train_step(loss, strategy).lower(state, X)


@jax.custom_vjp
def folded(x):
    return jnp.sin(x) @ jnp.ones((8, 3))


folded.defvjp(lambda x: (folded(x), x), lambda x, g: (jnp.cos(x) * (g @ jnp.ones((3, 8))),))


def everywhere(model, x, rng):
    """Constraints in each kind of function that JAX traces, beside what asks for the whole
    batch.
    """
    spec = P("data", "model")
    y = constrain(x @ model["w"], spec)
    y = y - lax.pmean(y.mean(0), "data") + sl.shard(y, "batch", "act_mlp") * sl.batch_mean(y)
    layer = jax.checkpoint(
        lambda c, _: (jax.nn.gelu(constrain(c, P("data", None))), jax.nn.relu(c))
    )
    y, relus = lax.scan(layer, y, None, length=2)
    y = jax.jit(lambda y: constrain(jnp.sin(y), spec))(y) + relus.sum(0)
    y = lax.cond(
        lax.pmean(y.sum(), "data") > 0,
        lambda y: constrain(y, spec),
        lambda y: constrain(y + 1, spec),
        y,
    )
    y = jax.vmap(lambda row: constrain(row, P("model")) * 2)(y)
    y = constrain(y, P(P.UNCONSTRAINED, "model")) * jax.random.bernoulli(rng, 0.5, y.shape)
    return jnp.mean(folded(y) ** 2)


@pytest.mark.representative("options0")
@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{}, {"zero": sl.Zero(3, small=0), "accumulate": [1, 2]}, {"manual": ()}]
)
def test_sharding_constraints_may_name_the_data_axes(options):
    loss = everywhere
    if options == {"manual": ()}:  # where no axis is bound
        loss = lambda model, x, rng: jnp.mean(
            folded(constrain(x @ model["w"], P("data", "model"))) ** 2
        )
    if "accumulate" in options:  # of which each is a batch of its own
        loss = lambda model, x, rng: jnp.mean(
            folded(constrain(x @ model["w"], P(("data",), "model"))) ** 2
        )
    check(loss, **options)


def test_sharding_constraints_accept_a_named_sharding_on_the_mesh():
    mesh = STRATEGY.device_mesh  # MaxText's way

    def loss(model, x, rng):
        y = constrain(x @ model["w"], NamedSharding(mesh, P("data", "model")))
        return jnp.mean((y @ jnp.ones((8, 3))) ** 2)

    state = sl.init(make, optax.sgd(0.1), STRATEGY)
    _, metrics = sl.train_step(loss, STRATEGY)(state, X)
    y = X @ make()["w"].value @ np.ones((8, 3))
    np.testing.assert_allclose(metrics["loss"], np.mean(y**2), rtol=1e-5)


def test_sharding_constraints_reach_the_partitioner_without_manual_axes():
    of = lambda spec: constraints(constrained_to(spec))
    assert of(P("data", None)) == of(P(None, None))
    assert of(P("data", "model")) == of(P(None, "model")) != of(P(None, None))


def constrained_to(spec):
    return lambda model, x, rng: jnp.mean((constrain(x @ model["w"], spec) @ jnp.ones((8, 3))) ** 2)


def logical(model, x, rng):
    y = nn.with_logical_constraint(x @ model["w"], ("batch", "act_mlp"))
    return jnp.mean((y @ jnp.ones((8, 3))) ** 2)


def test_logical_constraints_follow_flax_rules_or_else_the_rules_in_force():
    split, whole = (constraints(constrained_to(spec)) for spec in (P(None, "model"), P(None, None)))
    assert constraints(logical) == split
    with nn.logical_axis_rules((("batch", "data"), ["act_mlp", None])):
        assert constraints(logical) == whole, "Flax's rules, where there are some"
    assert constraints(logical) == split, "and no longer"
    by_argument = lambda model, x, rng: logical_by(
        model, x, (("batch", "data"), ("act_mlp", "model"))
    )
    assert constraints(by_argument) == split


def logical_by(model, x, rules):
    y = nn.with_logical_constraint(x @ model["w"], ("batch", "act_mlp"), rules=rules)
    return jnp.mean((y @ jnp.ones((8, 3))) ** 2)


def test_train_step_follows_flax_rules_that_change_between_calls():
    loss = lambda model, x, rng: jnp.mean(logical_by(model, x, None) * 1.0)
    step, state = (
        sl.train_step(loss, STRATEGY),
        sl.init(make, optax.sgd(0.1), STRATEGY, abstract=True),
    )
    plain = step.lower(state, X).as_text()
    with nn.logical_axis_rules((("act_mlp", "data"),)):
        assert step.lower(state, X).as_text() != plain
    with sl.use(sl.AxisRules(batch=None)):  # rules of our own around a step are not Flax's
        assert step.lower(state, X).as_text() == plain


def test_logical_constraints_follow_the_rules_of_sl_use():
    y = jnp.ones((8, 8))
    with sl.use(
        sl.AxisRules(batch="data", heads=["model", None], other=None),
        sl.make_mesh("data=2,model=4"),
    ):
        spec = jax.jit(lambda y: nn.with_logical_constraint(y, ("batch", "heads")))(y).sharding.spec
        assert spec == P("data", "model")
        with sl.unsharded():
            assert nn.with_logical_constraint(y, ("batch", "heads")) is y


@pytest.mark.parametrize("beside", ["gather_batch", "shard_map", "kernel"])
def test_sharding_constraint_with_gather_shard_map_or_kernel_is_refused(beside):
    def loss(model, x, rng):
        y = constrain(x @ model["w"], P("data", "model"))
        if beside == "gather_batch":
            y = sl.gather_batch(y)
        elif beside == "kernel":
            y = sl.kernels.softmax(y, names=("batch", "act_mlp"))
        else:
            spec = P(None, "model")
            y = jax.shard_map(
                lambda y: 2 * y,
                in_specs=spec,
                out_specs=spec,
                axis_names={"model"},
                check_vma=False,
            )(y)
        return jnp.mean(y**2)

    with pytest.raises(ValueError, match=r"constraint.*sl\.shard\(x, names\)"):
        program(loss)


def test_sharding_constraint_on_an_unknown_axis_raises_jax_error():
    with pytest.raises(ValueError, match="nosuch"):
        program(lambda model, x, rng: jnp.mean(constrain(x @ model["w"], P("nosuch")) ** 2))


def centred(model, x, rng):
    y = x @ model["w"]
    return jnp.mean((y - lax.pmean(y.mean(0), "batch")) ** 3 + lax.psum(1, "batch") * 0)


TWO = sl.AxisRules(batch=("pod", "data"), embed=None, mlp="model")


@pytest.mark.representative("two_axes", "partly_automatic")
@pytest.mark.long
@pytest.mark.sentinel("automatic")
@pytest.mark.parametrize(
    ("rules", "meshes", "options"),
    [
        (RULES, ["data=2,model=2"], {"zero": sl.Zero(3, small=0)}),
        (RULES, ["data=4,model=1"], {"manual": ()}),
        (TWO, ["pod=2,data=2,model=2"], {}),
        (sl.rules.fsdp | sl.AxisRules(mlp=None), ["data=2,fsdp=2"], {}),
    ],
    ids=["one_axis", "automatic", "two_axes", "partly_automatic"],
)
def test_axis_name_batch_stands_for_the_data_axes(rules, meshes, options):
    check(centred, rules, meshes, **options)


@pytest.mark.long
def test_axis_name_batch_works_in_all_gather_and_pmax():
    def loss(model, x, rng):
        y = x @ model["w"]
        everyone = lax.all_gather(y.mean(0), "batch")
        return jnp.mean((y - everyone.mean(0)) ** 3) + 0 * lax.pmax(
            lax.stop_gradient(y).max(), "batch"
        )

    check(loss, TWO, ["pod=2,data=2,model=1"])


@pytest.mark.long
def test_axis_name_batch_means_a_mesh_axis_of_that_name():
    rules = sl.AxisRules(batch="batch", embed=None, mlp="model")
    check(centred, rules, ["batch=2,model=2"])


def test_axis_names_that_are_unknown_or_ambiguous_are_refused():
    of = lambda axis: (
        lambda model, x, rng: jnp.mean((x @ model["w"] - lax.pmean(x.mean(), axis)) ** 2)
    )
    with pytest.raises(
        ValueError, match=r"does not bind; it binds 'data', 'batch'.*axis_name=strategy\.data_axes"
    ):
        program(of("btch"))
    index = lambda model, x, rng: jnp.mean(x @ model["w"]) * lax.axis_index("batch")
    with pytest.raises(
        ValueError, match="`axis_index` over the axis `batch`, which stands for .*'pod', 'data'"
    ):
        program(index, sl.Strategy(mesh="pod=2,data=2,model=2", rules=TWO))
    with pytest.raises(NameError, match="no_such_name"):
        program(lambda model, x, rng: no_such_name)  # noqa: F821


def test_batch_norm_over_the_batch_axis_in_train_step_and_evaluation():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(4, axis_name="batch", rngs=rngs)

        def __call__(self, x):
            return self.norm(x)

    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: Net(nnx.Rngs(0)), optax.sgd(0.1), strategy)
    state, _ = sl.train_step(lambda model, x, rng: jnp.mean(model(x) ** 3), strategy)(state, X)
    np.testing.assert_allclose(state.rest["norm"]["mean"], 0.01 * X.mean(0), rtol=1e-4, atol=1e-7)
    measure = sl.evaluation(lambda model, x, rng: jnp.mean(model(x) ** 3), strategy)
    assert np.isfinite(measure(state, [X])["loss"])
