"""The step against one device: values, gradients, randomness; and what it refuses."""

import dataclasses
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import shardlib as sl
from shardlib import testing

RULES = sl.AxisRules(
    batch="data", seq=None, embed=None, act_embed=None, mlp="model", act_mlp="model"
)
LECUN = nnx.initializers.lecun_normal()
RANDOM = np.random.RandomState(0)
BATCH = {
    "x": RANDOM.randn(16, 3, 8).astype(np.float32),
    "mask": (RANDOM.rand(16, 3) > 0.6).astype(np.float32),  # very unevenly many tokens per device
}
STRATEGY = sl.Strategy(mesh="data=4,model=2", rules=RULES, accumulate=2)


class MLP(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.up = nnx.Linear(8, 16, kernel_init=sl.logical(LECUN, "embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(16, 8, kernel_init=sl.logical(LECUN, "mlp", "embed"), rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        x = sl.shard(x, "batch", "seq", "act_embed")
        return self.down(self.dropout(sl.shard(nnx.gelu(self.up(x)), "batch", "seq", "act_mlp")))


def masked_loss(model, batch, rng):
    error = jnp.mean((model(batch["x"]) - batch["x"]) ** 2, -1)
    return sl.weighted_mean(jnp.sum(error * batch["mask"]), batch["mask"].sum())


def plain_loss(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


def make(**kwargs):
    return lambda: MLP(nnx.Rngs(0), **kwargs)


def run(make_model, loss_fn, strategy=STRATEGY, batch=BATCH, optimizer=None, steps=1):
    state = sl.init(make_model, optimizer or optax.sgd(0.1), strategy)
    step = sl.train_step(loss_fn, strategy)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, metrics


@pytest.mark.long
@pytest.mark.sentinel("plain_loss")
@pytest.mark.parametrize("loss_fn", [masked_loss, plain_loss])
def test_train_step_equals_one_device(loss_fn):
    options = {"meshes": ["data=4,model=2"]}
    if loss_fn is masked_loss:
        options = {"accumulate": [2], "meshes": ["data=8,model=1", "data=1,model=8"]}
    testing.check_step(make(), optax.adamw(1e-2), loss_fn, BATCH, RULES, **options)


@pytest.mark.long
def test_dropout_is_the_same_on_every_mesh_and_accumulation():
    compared = testing.check_step(
        make(dropout=0.5), optax.sgd(0.1), masked_loss, BATCH, RULES,
        meshes=["data=8,model=1", "data=2,model=4"], accumulate=(1, 2),
    )  # fmt: skip
    assert all(comparison.randomness == 0 for comparison in compared)


def test_dropout_differs_between_examples_and_steps():
    def loss(model, batch, rng):
        kept = model.dropout(jnp.ones((2, 64))) > 0
        everyone = sl.gather_batch(kept).astype(jnp.float32)
        same = jnp.mean(
            everyone[:, None] == everyone[None], where=~jnp.eye(16, dtype=bool)[..., None]
        )
        return plain_loss(model, batch, rng), {
            "same": same,
            "first": jnp.sum(everyone * 2.0 ** (jnp.arange(64) % 20)),
        }

    strategy = sl.Strategy(mesh="data=8,model=1", rules=RULES)
    state, step = (
        sl.init(make(dropout=0.5), optax.sgd(0.0), strategy),
        sl.train_step(loss, strategy),
    )
    drawn = []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        assert 0.4 < metrics["same"] < 0.6, "two examples agree by chance alone"
        drawn.append(float(metrics["first"]))
    assert len(set(drawn)) == 3


@pytest.mark.long
def test_psum_inside_the_loss_is_exact():
    def by_global_count(model, batch, rng):
        """Divides by the number of tokens everywhere, itself: every device returns the loss of the
        whole batch.
        """
        error = jnp.sum(jnp.mean((model(batch["x"]) - batch["x"]) ** 2, -1) * batch["mask"])
        axes = ("data",) if jax.sharding.get_abstract_mesh().manual_axes else ()
        return (
            lax.psum(error, axes) / lax.psum(batch["mask"].sum(), axes)
            if axes
            else error / batch["mask"].sum()
        )

    strategy = sl.Strategy(mesh="data=4,model=2", rules=RULES)
    (ours, metrics), (theirs, expected) = (
        run(make(), by_global_count, strategy),
        run(make(), masked_loss, strategy),
    )
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-6)
    chex.assert_trees_all_close(ours.params, theirs.params, rtol=1e-5, atol=1e-7)


@pytest.mark.long
def test_train_step_accepts_a_scan_with_an_unvarying_carry():
    def loss(model, batch, rng):
        total, _ = lax.scan(
            lambda c, row: (c + jnp.sum(model(row[None]) ** 2), None), jnp.zeros(()), batch["x"]
        )
        return sl.weighted_mean(total, batch["x"].size)

    testing.check_step(
        make(), optax.sgd(0.1), loss, BATCH, RULES, meshes=["data=4,model=2"], steps=1
    )


@pytest.mark.long
def test_gather_batch_gives_a_contrastive_loss_the_whole_batch():
    def loss(model, batch, rng):
        ours = model(batch["x"]).reshape(batch["x"].shape[0], -1)
        everyone = sl.gather_batch(ours)
        logits = ours @ everyone.T
        rows = sl.gather_batch(batch["number"])
        here = jnp.argmax(batch["number"][:, None] == rows[None], -1)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, here))

    batch = {**BATCH, "number": np.arange(16, dtype=np.int32)}
    testing.check_step(
        make(), optax.sgd(0.1), loss, batch, RULES, steps=1, meshes=["data=4,model=2"]
    )
    # A microbatch is a batch of its own, of the same examples on every mesh.
    meshes = ["data=1,model=8", "data=4,model=2"]
    losses = []
    for mesh in meshes:
        strategy = sl.Strategy(mesh=mesh, rules=RULES, accumulate=2)
        losses.append(float(run(make(), loss, strategy, batch)[1]["loss"]))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-5)


@pytest.mark.long
def test_batch_mean_is_over_the_whole_batch():
    def loss(model, batch, rng):
        y = model(batch["x"])
        return jnp.sum(sl.batch_mean(y, (0, 1)) ** 2) + sl.batch_mean(jnp.mean(y**2, (1, 2)))

    meshes = ["data=8,model=1", "data=2,model=4"]
    testing.check_step(make(), optax.sgd(0.1), loss, BATCH, RULES, steps=1, meshes=meshes)


class WithNorm(nnx.Module):
    def __init__(self, rngs, axis_name=None):
        self.mlp, self.norm = MLP(rngs), nnx.BatchNorm(8, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.mlp(x))


@pytest.mark.long
def test_batch_norm_requires_the_data_axes_and_sees_the_whole_batch():
    with pytest.raises(
        ValueError, match="from the examples at hand: `norm/mean`, `norm/var`.*axis_name"
    ):
        run(lambda: WithNorm(nnx.Rngs(0)), plain_loss)
    whole, _ = run(
        lambda: WithNorm(nnx.Rngs(0)),
        plain_loss,
        sl.Strategy(mesh="data=1,model=8", rules=RULES, manual=()),
    )
    split, _ = run(
        lambda: WithNorm(nnx.Rngs(0), "data"),
        plain_loss,
        sl.Strategy(mesh="data=4,model=2", rules=RULES),
    )
    chex.assert_trees_all_close(
        jax.device_get(split.rest), jax.device_get(whole.rest), rtol=1e-5, atol=1e-6
    )
    chex.assert_trees_all_close(
        jax.device_get(split.params), jax.device_get(whole.params), rtol=1e-4, atol=1e-6
    )
    assert float(jnp.abs(split.rest["norm"]["mean"]).max()) > 0


def test_linen_batch_stats_are_kept_when_the_loss_writes_them_back():
    module = nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False, axis_name="data")])
    plain = nn.Sequential([nn.Dense(8), nn.BatchNorm(use_running_average=False)])

    def loss(variables, batch, rng):
        y, updates = module.apply(variables, batch["x"], mutable=["batch_stats"])
        variables.update(updates)
        return jnp.mean((y - batch["x"]) ** 2)

    state, _ = run(lambda: plain.init(jax.random.key(0), jnp.ones((2, 3, 8))), loss)
    assert float(jnp.abs(state.rest["batch_stats"]["layers_1"]["mean"]).max()) > 0
    assert state.params["batch_stats"]["layers_1"]["mean"] is None


@pytest.mark.long
def test_optimizer_of_a_plain_tree_model_sees_global_arrays():
    """Clipping, Muon-like and factored optimizers would be silently wrong on shards."""

    def make_tree():
        key = jax.random.key(0)
        return sl.annotate(
            {"w": jax.random.normal(key, (8, 16)), "v": jax.random.normal(key, (16, 8))},
            {"w": ("embed", "mlp"), "v": ("mlp", "embed")},
        )

    def loss(model, batch, rng):
        return jnp.mean((jnp.tanh(batch["x"] @ model["w"]) @ model["v"] - batch["x"]) ** 2)

    for optimizer in (
        optax.chain(optax.clip_by_global_norm(0.01), optax.adamw(1e-2)),
        optax.contrib.muon(1e-2),
        optax.adafactor(1e-2, min_dim_size_to_factor=4),
    ):
        testing.check_step(make_tree, optimizer, loss, BATCH, RULES, meshes=["data=2,model=4"])


@pytest.mark.long
def test_fsdp_by_annotation_leaves_its_axis_to_the_partitioner():
    rules = sl.rules.fsdp | sl.AxisRules(seq=None, act_embed=None, mlp=None)
    strategy = sl.Strategy(mesh="data=2,fsdp=4", rules=rules)
    assert (strategy.data_axes, strategy.batch_axes) == (("data",), ("data", "fsdp"))
    for mesh, accumulate in (("data=2,fsdp=4", 2), ("data=1,fsdp=8", 1)):
        testing.check_step(
            make(dropout=0.3), optax.adam(1e-2), masked_loss, BATCH, rules,
            meshes=[mesh], accumulate=accumulate,
        )  # fmt: skip
    state = sl.init(make(), optax.adam(1e-2), strategy)
    assert state.params["up"]["kernel"].sharding.spec == P("fsdp", None)


def test_gradient_of_a_parameter_split_over_data_stays_local():
    """One weight per device, as with experts: the loss uses the local one, and its gradient stays
    local.
    """
    rules = sl.AxisRules(batch="data", experts="data", embed=None)
    strategy = sl.Strategy(mesh="data=8", rules=rules, manual=("data",))

    def loss(model, batch, rng):
        assert model["own"].shape == (1, 8), "inside the step a device sees its own"
        return jnp.mean((batch["x"] * model["own"][0] + model["shared"]) ** 2)

    make_tree = lambda: sl.annotate(
        {"own": jnp.ones((8, 8)), "shared": jnp.ones(8)}, {"own": ("experts", "embed")}
    )
    state, _ = run(make_tree, loss, strategy)
    x = BATCH["x"].reshape(8, -1, 8)
    own = jax.grad(lambda own: jnp.mean((x * own[:, None] + 1) ** 2))(jnp.ones((8, 8)))
    np.testing.assert_allclose(state.params["own"], 1 - 0.1 * own, rtol=1e-5)
    assert state.params["own"].sharding.spec == P("data", None)


@pytest.mark.long
def test_train_step_equals_a_plain_jit_with_annotations():
    optimizer = optax.adamw(1e-2)
    state = sl.init(make(), optimizer, sl.Strategy(mesh="data=4,model=2", rules=RULES))
    definition = state.layout.definition

    @jax.jit
    def plain(params, opt_state, batch):
        def loss(params):
            out = masked_loss(definition.merge(params, state.streams, state.rest), batch, None)
            return out.total / out.weight

        value, gradient = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    strategy = state.layout.strategy
    with strategy.scope():
        batch = jax.device_put(BATCH, jax.NamedSharding(strategy.device_mesh, P("data")))
        params, _, value = plain(state.params, state.opt_state, batch)
    expected, metrics = run(make(), masked_loss, strategy, optimizer=optimizer)
    np.testing.assert_allclose(value, metrics["loss"], rtol=1e-5)
    chex.assert_trees_all_close(params, expected.params, rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_loss_does_not_depend_on_the_layout_rules():
    others = (RULES, RULES | sl.AxisRules(act_mlp=None), RULES | sl.AxisRules(mlp=None))
    strategies = [sl.Strategy(mesh="data=2,model=4", rules=rules) for rules in others]
    losses = [float(run(make(), masked_loss, strategy)[1]["loss"]) for strategy in strategies]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_train_step_keeps_layouts_donates_state_and_traces_once():
    loss = testing.count_traces(masked_loss)
    state = sl.init(make(dropout=0.1), optax.adamw(1e-2), STRATEGY)
    step = sl.train_step(loss, STRATEGY)
    after, _ = step(state, BATCH)
    chex.assert_trees_all_equal_shapes_and_dtypes(jax.eval_shape(lambda: state), after)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, after)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "the old state is donated"
    traces = loss.count
    after, _ = step(after, BATCH)
    step(sl.init(make(dropout=0.1), state.layout.optimizer, STRATEGY), BATCH)
    assert loss.count == traces
    assert int(after.step) == 2


@pytest.mark.long
def test_metrics_are_means_over_the_whole_batch():
    def loss(model, batch, rng):
        count = batch["mask"].sum()
        return masked_loss(model, batch, rng), {
            "masked": sl.weighted_mean(count, batch["mask"].size),
            "plain": jnp.mean(batch["x"]),
        }

    _, metrics = run(make(), loss)
    np.testing.assert_allclose(metrics["masked"], BATCH["mask"].mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["plain"], BATCH["x"].mean(), rtol=1e-5)
    assert metrics["weight"] == BATCH["mask"].sum()


def both_means(model, batch, rng):
    """Two means over other examples: of unevenly many tokens on each device, and of those left
    out.
    """
    error, mask = jnp.mean((model(batch["x"]) - batch["x"]) ** 2, -1), batch["mask"]
    first, second = (
        sl.weighted_mean(jnp.sum(error * mask), mask.sum()),
        sl.weighted_mean(jnp.sum(error * (1 - mask)), (1 - mask).sum()),
    )
    return first + 0.5 * second, {
        "first": first,
        "second": second,
        "by place": sl.weighted_mean(error.sum(0), error.shape[0]),
    }


@pytest.mark.long
def test_weighted_means_add_up_each_with_its_own_weight():
    testing.check_step(make(), optax.sgd(0.1), both_means, BATCH, RULES, meshes=["data=4,model=2"])
    strategy = sl.Strategy(mesh="data=8,model=1", rules=RULES)
    _, metrics = run(make(), both_means, strategy)
    np.testing.assert_allclose(
        metrics["loss"], metrics["first"] + 0.5 * metrics["second"], rtol=1e-6
    )
    assert metrics["by place"].shape == (3,)
    whole = (
        metrics["first"] * BATCH["mask"].sum() + metrics["second"] * (1 - BATCH["mask"]).sum()
    ) / BATCH["mask"].size
    np.testing.assert_allclose(metrics["by place"].mean(), whole, rtol=1e-5)
    with pytest.raises(ValueError, match=r"`loss` of `loss_fn` is an array of shape \(3,\)"):
        run(make(), lambda model, batch, rng: both_means(model, batch, rng)[1]["by place"])


def test_fully_masked_batch_changes_no_parameters():
    state, metrics = run(
        make(), masked_loss, batch={**BATCH, "mask": np.zeros((16, 3), np.float32)}
    )
    expected = sl.init(make(), optax.sgd(0.1), STRATEGY)
    assert metrics["loss"] == 0
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(expected.params))


def test_gradients_in_bfloat16_accumulate_in_float32():
    """In bfloat16 a sum of 64 would have stopped growing by its last bits."""
    mesh = sl.make_mesh("data=1", devices=jax.devices()[:1])
    strategy = sl.Strategy(mesh=mesh, rules=sl.AxisRules(batch="data"), accumulate=64)
    x = np.full((64, 1), 1 + 2**-7, np.float32)
    state = sl.init(lambda: {"w": jnp.zeros(1, jnp.bfloat16)}, optax.sgd(1.0), strategy)
    step = sl.train_step(
        lambda model, batch, rng: jnp.mean(batch @ model["w"].astype(jnp.float32)), strategy
    )
    state, _ = step(state, x)
    assert float(state.params["w"][0]) == -(1 + 2**-7)
    assert state.params["w"].dtype == jnp.bfloat16


@pytest.mark.long
def test_train_step_may_be_called_inside_a_larger_jit():
    strategy = sl.Strategy(mesh="data=4,model=2", rules=RULES)
    state, step = sl.init(make(), optax.sgd(0.1), strategy), sl.train_step(masked_loss, strategy)
    with strategy.scope():
        twice = jax.jit(lambda s, b: step(step(s, b)[0], b)[1]["loss"])(state, BATCH)
    _, metrics = run(make(), masked_loss, strategy, steps=2)
    np.testing.assert_allclose(twice, metrics["loss"], rtol=1e-6)


def test_unused_rules_are_reported():
    strategy = sl.Strategy(
        mesh="data=4,model=2", rules=RULES | sl.AxisRules(heads="model", act_heads="model")
    )
    state, step = sl.init(make(), optax.sgd(0.1), strategy), sl.train_step(masked_loss, strategy)
    step(state, BATCH)
    assert step.unused_rules == ("heads", "act_heads")
    assert sl.describe(sl.init(make(), None, strategy)).unused_rules == (
        "act_mlp",
        "heads",
        "act_heads",
    )


def test_unused_rules_see_through_a_jit_inside_the_loss():
    inner = jax.jit(lambda graph, values, x: nnx.merge(graph, values)(x), static_argnums=0)

    def loss(model, batch, rng):
        graph, values = nnx.split(model)
        return jnp.mean((inner(graph, values, batch["x"]) - batch["x"]) ** 2)

    for _ in range(2):
        strategy = sl.Strategy(mesh="data=4,model=2", rules=RULES | sl.AxisRules(heads="model"))
        state, step = sl.init(make(), optax.sgd(0.1), strategy), sl.train_step(loss, strategy)
        step.lower(state, BATCH)
        assert step.unused_rules == ("heads",)


def test_strategy_compares_hashes_and_round_trips_its_repr():
    again = sl.Strategy(mesh="data=4,model=2", rules=RULES, accumulate=2)
    assert (again, hash(again)) == (STRATEGY, hash(STRATEGY))
    assert (
        eval(
            repr(STRATEGY),
            {
                "Strategy": sl.Strategy,
                "AxisRules": sl.AxisRules,
                "Exact": sl.Exact,
                "Zero": sl.Zero,
            },
        )
        == STRATEGY
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(mesh="data=8", rules=RULES),
            "rule for `mlp` uses the mesh axis `model`; the mesh has `data=8`.*`model=1`",
        ),
        (dict(mesh="data=4,model=2", rules=RULES, accumulate=0), "accumulate=0"),
        (dict(mesh="data=4,model=2", rules=RULES, remat="half"), "remat='half'.*'none', 'full'"),
        (
            dict(mesh="data=4,model=2", rules=RULES, manual=("model",)),
            "`model` does not split the batch",
        ),
        (dict(mesh="data=4,model=2", rules={"batch": "data"}), "takes `AxisRules`"),
        (dict(mesh="data=-1,model=-1", rules=RULES), "-1"),
        (
            dict(mesh=sl.make_mesh("data=4,model=2", axis_type=AxisType.Explicit), rules=RULES),
            "explicit axes",
        ),
    ],
)
def test_strategy_refuses_invalid_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        sl.Strategy(**arguments)


@pytest.mark.parametrize("mesh", ["data=4,model=1", "data=16,model=1"])
def test_init_refuses_a_mesh_of_another_device_count(mesh):
    with pytest.raises(ValueError, match="devices"):
        sl.init(make(), None, sl.Strategy(mesh=mesh, rules=RULES))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"x": BATCH["x"][:12], "mask": BATCH["mask"][:12]},
            "batch of 12 examples.*`data=4` and `accumulate=2`: use a multiple of 8",
        ),
        ({"x": BATCH["x"], "mask": BATCH["mask"][:8]}, "`mask` has 8, `x` has shape .16, 3, 8."),
        ({**BATCH, "scale": np.float32(1)}, "`mask` has 16, `scale` has shape .."),
        ({}, "holds no arrays"),
    ],
)
def test_train_step_refuses_batches_that_do_not_split(batch, message):
    with pytest.raises(ValueError, match=message):
        run(make(), masked_loss, batch=batch)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (lambda x: x, "`loss` of `loss_fn` is an array of shape .2, 3, 8..*sl.weighted_mean"),
        (lambda x: None, "`loss` of `loss_fn` is None"),
        (
            lambda x: (jnp.sum(x), jnp.sum(x)),
            "second part is an array of shape .*sl.weighted_mean\\(total, weight\\)",
        ),
        (lambda x: sl.weighted_mean(jnp.sum(x), jnp.ones(3)), "is an array of shape .3,."),
        (lambda x: (jnp.sum(x), {"loss": jnp.sum(x)}), "metric `loss` is the step's own"),
    ],
)
def test_loss_functions_with_invalid_results_are_refused(out, message):
    with pytest.raises(ValueError, match=message):
        run(make(), lambda model, batch, rng: out(model(batch["x"])))


def test_loss_that_changes_the_structure_of_the_state_is_refused():
    def loss(model, batch, rng):
        model.sow = nnx.Intermediate(jnp.ones(3))
        return plain_loss(model, batch, rng)

    with pytest.raises(
        ValueError, match="changed the structure of the model's state: .*`sow`|`1/sow`"
    ):
        run(make(), loss)


def test_train_step_refuses_a_state_of_another_strategy_or_no_optimizer():
    state = sl.init(make(), optax.sgd(0.1), sl.Strategy(mesh="data=8,model=1", rules=RULES))
    with pytest.raises(ValueError, match="`mesh` is .*data=8,model=1.* there and .*data=4.* here"):
        sl.train_step(plain_loss, STRATEGY)(state, BATCH)
    with pytest.raises(ValueError, match="no optimizer"):
        sl.train_step(plain_loss, STRATEGY)(sl.init(make(), None, STRATEGY), BATCH)


@pytest.mark.long
def test_remat_recomputes_activations_and_keeps_the_result():
    class Rematerialized(MLP):
        def __call__(self, x):
            return sl.remat(lambda mlp, x: MLP.__call__(mlp, x), checkpoint=nnx.remat)(self, x)

    found = []
    for remat in ("none", "full"):
        strategy = sl.Strategy(mesh="data=4,model=2", rules=RULES, remat=remat)
        state, step = (
            sl.init(lambda: Rematerialized(nnx.Rngs(0)), optax.sgd(0.1), strategy),
            sl.train_step(masked_loss, strategy),
        )
        with warnings.catch_warnings():
            tanh = step.lower(state, jax.device_put(BATCH)).compile().as_text().count(" tanh(")
        found.append((tanh, jax.device_get(step(state, BATCH)[0].params)))
    assert found[1][0] > found[0][0], "the activation is computed again in the backward pass"
    chex.assert_trees_all_close(found[0][1], found[1][1], rtol=1e-6)


class WithMemory(nnx.Module):
    def __init__(self, rngs, shape):
        self.mlp, self.seen = MLP(rngs, dropout=0.5), nnx.BatchStat(jnp.zeros(shape))

    def __call__(self, x):
        return self.mlp(x)


@pytest.mark.long
def test_model_state_drawn_per_example_is_refused_and_shared_draws_kept():
    def loss(model, batch, rng):
        model.seen[...] = model.seen[...] + jax.random.uniform(rng, model.seen.shape)
        return plain_loss(model, batch, rng)

    rows = 16 // 4 // 2
    with pytest.raises(ValueError, match="from the examples at hand: `seen`"):
        run(lambda: WithMemory(nnx.Rngs(0), (rows, 3)), loss)
    state, _ = run(lambda: WithMemory(nnx.Rngs(0), (rows + 1, 3)), loss)
    shards = [np.asarray(shard.data) for shard in state.rest["seen"].addressable_shards]
    assert shards[0].min() > 0
    chex.assert_trees_all_equal(*shards)


@dataclasses.dataclass(frozen=True)
class InHalf(sl.Exchange):
    """Gradients that are averaged as bfloat16s, between pods say."""

    axes: tuple[str, ...] = ("data",)

    def average(self, gradients, parameters, inputs):
        means = [
            lax.pmean(g.astype(jnp.bfloat16), self.over(p))
            for g, p in zip(gradients, parameters, strict=True)
        ]
        return [
            mean.astype(g.dtype) for mean, g in zip(means, gradients, strict=True)
        ], inputs.errors


@pytest.mark.long
def test_custom_exchange_averages_gradients_in_its_own_dtype():
    testing.check_step(
        make(),
        optax.sgd(1e-2),
        masked_loss,
        BATCH,
        RULES,
        meshes=["data=4,model=2"],
        accumulate=(1, 2),
        tolerance=2**-6,
        exchange=InHalf(),
    )
    mesh = sl.make_mesh("data=4,model=2")
    strategy = sl.Strategy(mesh=mesh, rules=RULES, exchange=InHalf())
    state = sl.init(make(), optax.sgd(0.1), strategy, abstract=True)
    sums = sl.train_step(masked_loss, strategy).lower(state, BATCH).as_text().count("bf16")
    assert sums > 0


def test_custom_exchange_that_would_never_run_is_refused():
    with pytest.raises(ValueError, match="InHalf.* would never run"):
        sl.Strategy(mesh="data=8,model=1", rules=RULES, manual=(), exchange=InHalf())


@pytest.mark.long
def test_complex_parameters_train_like_plain_jax():
    def make_tree():
        return {"w": jnp.ones((8, 4)) * (1 + 1j)}

    def loss(model, batch, rng):
        return jnp.mean(jnp.abs(batch["x"] @ model["w"] - 1) ** 2)

    testing.check_step(
        make_tree, optax.sgd(0.1), loss, BATCH, RULES, meshes=["data=4,model=2"], accumulate=2
    )
    state, _ = run(make_tree, loss)
    gradient = jax.grad(lambda model: loss(model, BATCH, None))(make_tree())["w"]
    np.testing.assert_allclose(state.params["w"], make_tree()["w"] - 0.1 * gradient, rtol=1e-5)
    with pytest.raises(ValueError, match="`loss` of `loss_fn` is complex"):
        run(make_tree, lambda model, batch, rng: jnp.sum(model["w"]))


@pytest.mark.long
def test_parameters_split_over_a_data_axis_are_refused_by_default():
    make_tree = lambda: sl.annotate({"w": jnp.ones((8, 8)), "b": jnp.ones(8)}, {"b": P("data")})
    loss = lambda model, batch, rng: jnp.mean((batch["x"] @ model["w"] + model["b"]) ** 2)
    with pytest.raises(ValueError, match=r"`b` is laid out as P\('data',\).*manual=\('data',\)"):
        run(make_tree, loss)
    testing.check_step(
        make_tree, optax.sgd(0.1), loss, BATCH, RULES, meshes=["data=4,model=2"], manual=()
    )


def test_model_state_that_differs_between_devices_is_refused():
    rules = sl.AxisRules(batch="data", experts="data")
    strategy = sl.Strategy(mesh="data=8", rules=rules, manual=("data",))
    make_tree = lambda: {
        "params": sl.annotate({"own": jnp.ones(8)}, {"own": ("experts",)}),
        "seen": jnp.zeros(1),
    }

    def loss(model, batch, rng):
        model["seen"] = model["params"]["own"] * 2
        return jnp.mean(batch["x"] * model["params"]["own"])

    with pytest.raises(
        ValueError, match="differ from device to device|from the examples at hand: `seen`"
    ):
        run(make_tree, loss, strategy)


@pytest.mark.long
def test_optimizers_that_need_the_loss_value_receive_it():
    optimizer = optax.chain(optax.adam(1e-2), optax.contrib.reduce_on_plateau())
    testing.check_step(make(), optimizer, masked_loss, BATCH, RULES, meshes=["data=4,model=2"])
    _, metrics = run(make(), masked_loss, optimizer=optax.polyak_sgd())
    assert np.isfinite(metrics["loss"])


def test_train_step_with_weak_types_is_traced_once():
    loss = testing.count_traces(lambda model, batch, rng: jnp.mean((batch["x"] * model["s"]) ** 2))
    state, step = (
        sl.init(lambda: {"s": jnp.asarray(2.0)}, optax.sgd(0.1), STRATEGY),
        sl.train_step(loss, STRATEGY),
    )
    state, _ = step(state, BATCH)
    traces = loss.count
    step(state, BATCH)
    assert loss.count == traces


def test_train_step_refuses_a_donated_state():
    state, step = sl.init(make(), optax.sgd(0.1), STRATEGY), sl.train_step(masked_loss, STRATEGY)
    step(state, BATCH)
    with pytest.raises(ValueError, match="has been through a step already"):
        step(state, BATCH)


@pytest.mark.long
def test_strategy_scope_shards_arrays_made_outside_it():
    state = sl.init(make(), None, STRATEGY)
    x = jnp.asarray(BATCH["x"])
    with STRATEGY.scope():
        assert sl.shard(x, "batch", "seq", "act_embed").sharding.spec == P("data", None, None)
        found = state.model(x)
    with sl.unsharded():
        np.testing.assert_allclose(found, MLP(nnx.Rngs(0))(x), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_strategy_scope_nests_only_within_the_same_strategy():
    def loss(model, batch, rng):
        with STRATEGY.scope():
            return masked_loss(model, batch, rng)

    _, metrics = run(make(), loss)
    np.testing.assert_allclose(metrics["loss"], run(make(), masked_loss)[1]["loss"])
    step, state = sl.train_step(masked_loss, STRATEGY), sl.init(make(), optax.sgd(0.1), STRATEGY)
    other = dataclasses.replace(STRATEGY, mesh="data=8,model=1")
    with (
        other.scope(),
        pytest.raises(
            ValueError, match="inside a traced function, where the mesh .*around the call"
        ),
    ):
        jax.jit(step)(state, BATCH)


def test_batch_mean_without_rules_is_refused():
    def loss(model, batch, rng):
        with sl.unsharded():
            return jnp.sum(sl.batch_mean(batch["x"], (0, 1)))

    with pytest.raises(ValueError, match="no rules say which of these axes split it"):
        run(make(), loss)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sl.Strategy(mesh={"data": 8}, rules=RULES), "takes text such as"),
        (
            lambda: sl.Strategy(mesh=sl.make_mesh("data=4,model=2"), rules=RULES, dcn="data"),
            "for a mesh given as text",
        ),
        (
            lambda: sl.Strategy(mesh="data=8,model=1", rules=RULES, accumulate=2.0),
            "accumulate=2.0.*number of microbatches",
        ),
        (
            lambda: sl.Strategy(mesh="data=8,model=1", rules=RULES, exchange=sl.Exact),
            "takes an exchange",
        ),
        (lambda: sl.Strategy(mesh="data=8,model=1", rules=RULES, manual="data"), "takes a tuple"),
        (
            lambda: sl.init(MLP(nnx.Rngs(0)), None, STRATEGY),
            "takes a function that makes the model",
        ),
        (lambda: sl.init(make(), optax.adam, STRATEGY), "takes an optax transformation"),
        (
            lambda: sl.init(make(), optax.sgd(0.1), "data=8"),
            "strategy='data=8'.*takes a `sl.Strategy`",
        ),
        (
            lambda: sl.init(make(), optax.sgd(0.1), STRATEGY, trainable=nnx.LoRAParam),
            "nothing to move.*up/kernel",
        ),
        (lambda: sl.train_step(STRATEGY, masked_loss), "got Strategy and function"),
        (lambda: run(make(), masked_loss, batch={**BATCH, "n": 3}), "`n` of the batch is a int"),
        (lambda: sl.describe(make()()), "takes the `State`"),
        (lambda: sl.use({"batch": "data"}).__enter__(), "takes `AxisRules` and a mesh"),
        (lambda: sl.AxisRules([("batch", "data")]), "takes a mapping or keywords"),
        (
            lambda: testing.check_step(
                make(), optax.sgd(0.1), masked_loss, BATCH, RULES, meshes="data=8"
            ),
            "takes a list of meshes",
        ),
        (
            lambda: testing.check_step(
                make(), optax.sgd(0.1), masked_loss, BATCH, RULES, meshes=[]
            ),
            "no mesh",
        ),
    ],
)
def test_public_functions_explain_common_mistakes(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.long
def test_check_step_compares_untrained_state():
    def loss(model, batch, rng):
        axes = ("data",) if jax.sharding.get_abstract_mesh().manual_axes else ()
        model["sum"] = lax.psum(jnp.mean(batch["x"]), axes)  # a sum where the mean was meant
        return jnp.mean((batch["x"] * model["params"]["w"]) ** 2)

    make_tree = lambda: {"params": {"w": jnp.ones(8)}, "sum": jnp.zeros(())}
    with pytest.raises(AssertionError, match="state `sum` of step 0 on the mesh `data=4,model=2`"):
        testing.check_step(make_tree, optax.sgd(0.1), loss, BATCH, RULES, meshes=["data=4,model=2"])


def test_describe_names_idle_mesh_axes():
    strategy = sl.Strategy(
        mesh="data=2,model=4", rules=sl.AxisRules(batch="data", embed=None, mlp=None)
    )
    described = sl.describe(sl.init(make(), None, strategy))
    assert described.idle_axes == ("model",)
    assert "along which devices repeat work: model" in str(described)


def test_remat_works_as_a_decorator():
    @sl.remat
    def block(x, w):
        return jnp.tanh(x @ w)

    loss = lambda model, batch, rng: jnp.mean(block(block(batch["x"], model["w"]), model["w"]) ** 2)
    found = []
    for remat in ("none", "full"):
        strategy = sl.Strategy(mesh="data=4,model=2", rules=RULES, remat=remat)
        state = sl.init(lambda: {"w": jnp.ones((8, 8))}, optax.sgd(0.1), strategy)
        found.append(
            "optimization_barrier" in sl.train_step(loss, strategy).lower(state, BATCH).as_text()
        )
    assert found == [False, True]
