"""`check_step` itself: what it takes for rounding, what it takes for an error, and how it says
so.
"""

import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import shardlib as sl
from models import gpt
from shardlib import testing
from shardlib.tracing._row_gradients import with_wide_rows

RANDOM = np.random.RandomState(0)
RULES = sl.AxisRules(batch="data", embed=None, mlp="model")
BATCH = {
    "x": RANDOM.randn(16, 3, 8).astype(np.float32),
    "mask": np.ones((16, 3), np.float32),
}
BATCH["mask"][:12, 1:] = 0.0  # of most devices one token counts where of the last three do
WHERE = ["data=4,model=2"]


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def make():
    return sl.annotate(
        {"up": 0.3 * normal(0, 8, 16), "down": 0.3 * normal(1, 16, 8)},
        {"up": ("embed", "mlp"), "down": ("mlp", "embed")},
    )


def errors(model, batch):
    x = batch["x"].astype(model["up"].dtype)
    return jnp.mean((jnp.tanh(x @ model["up"]) @ model["down"] - x).astype(jnp.float32) ** 2, -1)


def right(model, batch, rng):
    return sl.weighted_mean(jnp.sum(errors(model, batch) * batch["mask"]), batch["mask"].sum())


def devices():
    """How many devices have examples of their own: on one device one."""
    return lax.axis_size("data") if "data" in jax.sharding.get_abstract_mesh().manual_axes else 1


def mean_of_means(model, batch, rng):
    return jnp.sum(errors(model, batch) * batch["mask"]) / batch["mask"].sum()


def alike(model, batch, rng):
    # No key of the step's: the same everywhere.
    kept = jax.random.bernoulli(jax.random.key(7), 0.5, batch["mask"].shape)
    return sl.weighted_mean(jnp.sum(errors(model, batch) * kept), batch["mask"].size)


def too_large(model, batch, rng):
    loss = right(model, batch, rng)
    return sl.weighted_mean(loss.total * devices(), loss.weight)


def too_large_in_one_gradient(model, batch, rng):
    """Backward alone, as a sum would be that is taken twice; forward nothing differs."""
    many = devices()
    up = model["up"] + (many - 1) * (model["up"] - lax.stop_gradient(model["up"]))
    return right({**model, "up": up}, batch, rng)


def one_left_out(model, batch, rng):
    last = lax.axis_index("data") == devices() - 1 if devices() > 1 else False
    here = jnp.arange(batch["x"].shape[0])[:, None]
    kept = jnp.where(last & (here == 0), 0.0, batch["mask"])
    return sl.weighted_mean(jnp.sum(errors(model, batch) * kept), batch["mask"].sum())


def check(loss, make_model=make, optimizer=None, rules=RULES, meshes=WHERE, batch=None, **options):
    given = BATCH if batch is None else batch
    optimizer = optimizer or optax.adam(1e-2)
    return testing.check_step(make_model, optimizer, loss, given, rules, meshes=meshes, **options)


@pytest.mark.representative(
    "mean_of_means-loss|gradients-bf16", "too_large_in_one_gradient-gradients `up`-float32"
)
@pytest.mark.long
@pytest.mark.sentinel("one_left_out-loss|gradients-float32")
@pytest.mark.filterwarnings("ignore:The loss makes the examples depend")
@pytest.mark.filterwarnings("ignore:The loss is a sum")
@pytest.mark.parametrize(
    ("loss", "kind", "precision"),
    [
        (mean_of_means, "loss|gradients", "bf16"),
        (alike, "loss|gradients", "bf16"),
        (too_large, "loss", "bf16"),
        (too_large_in_one_gradient, "gradients `up`", "float32"),
        (one_left_out, "loss|gradients", "float32"),
        (one_left_out, "loss|gradients", "bf16"),
    ],
)
def test_check_step_reports_errors_larger_than_rounding(loss, kind, precision):
    with pytest.raises(
        AssertionError,
        match=f"^({kind}).* of step 0 on the mesh `data=4,model=2` with accumulate=1",
    ):
        check(loss, precision=precision, steps=1)


@pytest.mark.representative("bfloat16-float32")
@pytest.mark.long
@pytest.mark.parametrize(("stored", "precision"), [("float32", "bf16"), ("bfloat16", "float32")])
def test_check_step_accepts_rounding(stored, precision):
    of_dtype = lambda: jax.tree.map(lambda x: x.astype(stored), make())
    (found,) = check(right, of_dtype, precision=precision, accumulate=[2], zero=sl.Zero(3, small=0))
    assert found.randomness == 0
    assert found.gradients > 1e-5, "there is some rounding to be told"


@pytest.mark.long
def test_check_step_accepts_rounding_amplified_by_the_optimizer():
    """Adam divides by what may be near zero: 1e-5 would not do in the second step."""
    # Plain attention rounds enough for it to show, with a batch whose gradients come near zero.
    sizes = {"width": 32, "heads": 8, "kv_heads": 8, "context": 16, "vocab": 40, "hidden": 64}
    config = gpt.tiny(layers=2, attention="xla", **sizes)
    random = np.random.RandomState(2)
    tokens = {
        "tokens": random.randint(0, 40, (16, 17)).astype("i4"),
        "mask": (random.rand(16, 16) > 0.5).astype("f"),
    }
    build = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
    rules = sl.rules.data | sl.rules.fsdp
    (found,) = check(gpt.loss, build, optax.adamw(1e-2), rules, ["data=2,fsdp=4"], tokens)
    assert 1e-5 < found.gradients < 1e-3


@pytest.mark.long
def test_check_step_applies_the_given_tolerance_and_refuses_bad_values():
    with pytest.raises(AssertionError, match="where 1.0e-08 is allowed"):
        check(right, precision="bf16", tolerance=1e-8, steps=1)
    for tolerance in (-1, "1e-5", float("nan"), float("inf"), True):
        with pytest.raises(ValueError, match=r"tolerance=.* takes a number from 0 up"):
            check(right, tolerance=tolerance)


@pytest.mark.long
def test_check_step_shows_the_worst_entries_with_their_index():
    def loss(model, batch, rng):
        wrong = jnp.zeros((8, 16)).at[5, 11].set(1e-3).at[2, 3].set(5e-4) * (devices() - 1)
        return right(
            {**model, "up": model["up"] + wrong * (model["up"] - lax.stop_gradient(model["up"]))},
            batch,
            rng,
        )

    with pytest.raises(AssertionError) as failure:
        check(loss, steps=1)
    first, others = str(failure.value).splitlines()
    assert first.startswith("gradients `up` of step 0")
    assert "where 1.0e-05 is allowed for rounding. The worst of 128 entries: [5, 11] is " in first
    worst = first.split("[5, 11] is ")[1].split(" on one device")[0].split(", and ")
    assert worst[0] != worst[1], "so many digits that they differ"
    assert "; [2, 3] is " in first
    assert "loss `grad_norm`" not in first
    assert "`0/mu/up`" in others


@pytest.mark.long
def test_check_step_blames_the_earliest_and_largest_difference():
    """Of a loss that draws otherwise the draws; of one that is wrong in two gradients the farther
    one.
    """

    def draws(model, batch, rng):
        loss = right(model, batch, rng)
        return loss, {"drawn": jnp.mean(jax.random.uniform(jax.random.key(devices())))}

    with pytest.raises(
        AssertionError, match="^loss `drawn` of step 0.*It is 0.[0-9]+, and 0.[0-9]+ on one device"
    ):
        check(draws, steps=1)

    def two(model, batch, rng):
        by = {"up": 0.01, "down": 0.3}
        moved = lambda name, w: w + by[name] * (devices() - 1) * (w - lax.stop_gradient(w))
        return right({name: moved(name, w) for name, w in model.items()}, batch, rng)

    with pytest.raises(
        AssertionError,
        match="(?s)^gradients `down`.*In the same step differ gradients `up`.*`grad_norm`",
    ):
        check(two, steps=1)


def test_check_step_compares_the_parameters_of_the_last_step():
    def update(updates, state, params=None):
        factor = jnp.sqrt(jax.sharding.get_abstract_mesh().size)
        return jax.tree.map(lambda u: u * factor, updates), state

    scaled = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    optimizer = optax.chain(optax.sgd(0.1), scaled)
    with pytest.raises(AssertionError, match="^parameters `w` of step 0"):
        testing.check_step(
            lambda: {"w": jnp.ones((4, 2))},
            optimizer,
            lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2),
            np.ones((8, 4), "f"),
            sl.rules.data,
            meshes=["data=8"],
            steps=1,
        )


@pytest.mark.long
def test_check_step_does_not_accept_nan_as_rounding():
    with pytest.raises(
        AssertionError, match="(?s)differs from one device by nan.*not finite either"
    ):
        check(lambda *given: right(*given) * jnp.nan, steps=1)


@pytest.mark.representative("meshes1")
@pytest.mark.long
@pytest.mark.parametrize("meshes", [None, ["data=4,tensor=2"]])
def test_check_step_takes_parameter_specs_on_axes_without_rules(meshes, monkeypatch):
    two = jax.devices()[:2]
    if meshes is None:
        monkeypatch.setattr(jax, "devices", lambda *_: two)
    literal = lambda: sl.annotate(
        jax.tree.map(jnp.asarray, make_plain()), {"up": P(None, "tensor")}
    )
    rules = sl.AxisRules(batch="data")
    found = check(right, literal, optax.sgd(0.1), rules, meshes, steps=1)
    assert [one.mesh for one in found] == (meshes or testing.mesh_shapes(["data", "tensor"]))


def make_plain():
    return {"up": 0.3 * normal(0, 8, 16), "down": 0.3 * normal(1, 16, 8)}


@pytest.mark.long
def test_check_step_takes_mesh_axes_that_only_the_model_mentions():
    def split(model, batch, rng):
        return right(
            {**model, "up": lax.with_sharding_constraint(model["up"], P(None, "other"))}, batch, rng
        )

    check(
        split, make_plain, optax.sgd(0.1), sl.AxisRules(batch="data"), ["data=4,other=2"], steps=1
    )
    with pytest.raises(
        ValueError, match="no mesh to compare: no rule and no parameter mentions an axis"
    ):
        check(right, make_plain, rules=sl.AxisRules(batch=None), meshes=None)


@pytest.mark.long
def test_check_step_says_when_random_numbers_depend_on_the_mesh():
    make_tree = lambda: {"params": make_plain(), "key": jax.random.key(0, impl="rbg")}

    def noisy(model, batch, rng):
        kept = jax.random.bernoulli(model["key"], 0.5, batch["x"].shape)
        return right(model["params"], {**batch, "x": batch["x"] * kept}, rng)

    meshes, rules = ["data=8"], sl.AxisRules(batch="data")
    with pytest.raises(
        ValueError, match=r'implementation `rbg` draws otherwise.*Strategy\(draws="by_mesh"\)'
    ):
        check(noisy, make_tree, rules=rules, meshes=meshes)
    with pytest.raises(
        AssertionError, match=r'draws="by_mesh".* random numbers may differ from mesh to mesh'
    ):
        check(noisy, make_tree, rules=rules, meshes=meshes, draws="by_mesh", steps=1)


# Embeddings: many tokens look up the same row, whose gradient is the sum over all of them.

VOCABULARY, WIDTH = 16, 8
TOKENS = np.minimum(np.random.RandomState(0).geometric(0.15, (64, 65)) - 1, VOCABULARY - 1).astype(
    np.int32
)


def embedding():
    table = 0.3 * normal(2, VOCABULARY, WIDTH)
    return {
        "table": table,
        "hidden": 0.3 * normal(3, WIDTH, WIDTH),
        "head": 0.3 * normal(4, WIDTH, VOCABULARY),
    }


def next_token(tied, dtype=None):
    def loss(model, tokens, rng):
        table = model["table"] if dtype is None else model["table"].astype(dtype)
        x = jax.nn.gelu(
            jnp.take(table, tokens[:, :-1], axis=0) @ model["hidden"].astype(table.dtype)
        )
        logits = (x @ (table.T if tied else model["head"].astype(table.dtype))).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    return loss


def gradient_of(loss, make_model, mesh="data=8", **options):
    mesh = mesh or sl.make_mesh({"data": 1}, devices=jax.devices()[:1])
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, **options)
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )
    state, _ = sl.train_step(loss, strategy)(sl.init(make_model, keep, strategy), TOKENS)
    return np.asarray(state.opt_state["table"], np.float64)


@pytest.mark.representative("stored-True", "cast-False")
@pytest.mark.long
@pytest.mark.parametrize(
    ("narrow", "tied"), [("computed", True), ("computed", False), ("stored", True), ("cast", False)]
)
def test_embedding_gradients_are_summed_in_float32(tied, narrow):
    """One device, which has the most tokens, is as near to float32 as many."""
    stored = jnp.bfloat16 if narrow == "stored" else jnp.float32
    rounded = lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(stored), embedding())
    wide = lambda: jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), embedding())
    loss = next_token(tied, jnp.bfloat16 if narrow == "cast" else None)
    precision = {"precision": "bf16"} if narrow == "computed" else {}
    exact = gradient_of(next_token(tied), wide, mesh=None)
    scale = np.abs(exact).max()
    for mesh, options in [(None, {}), ("data=8", {"zero": sl.Zero(3, small=0), "accumulate": 2})]:
        found = gradient_of(loss, rounded, mesh, **options, **precision)
        assert np.abs(found - exact).max() / scale < 2**-6, (mesh, options)


def test_embedding_lookups_are_recognized_in_loops_branches_and_calls():
    """In loops, branches, calls and blocks that are recomputed; of tables that are made of weights,
    and of no others.
    """
    table, tokens = jnp.ones((1, 1), jnp.bfloat16), jnp.zeros(1024, jnp.int32)
    total = lambda table: jnp.sum(table[tokens].astype(jnp.float32))

    def sums(function, *others):
        return float(jax.grad(with_wide_rows(function))(table, *others)[0, 0])

    assert float(jax.grad(total)(table)[0, 0]) < 512, "without, a sum stands still"
    looped = lambda table: lax.scan(
        lambda carry, _: (carry + total(table), None), 0.0, None, length=2
    )[0]
    each = lambda table: lax.scan(
        lambda carry, row: (carry + total(row), None), 0.0, jnp.stack([table, table])
    )[0]
    either = lambda table, which: lax.cond(which, total, lambda table: 2 * total(table), table)
    assert sums(total) == sums(jax.jit(total)) == sums(jax.checkpoint(total)) == 1024
    assert sums(
        lambda table: total(jnp.tanh(jnp.arctanh(table / 2)).astype(jnp.bfloat16) * 2)
    ) == pytest.approx(1024, rel=0.02)
    assert sums(looped) == sums(each) == 2048
    assert (sums(either, True), sums(either, False)) == (1024, 2048)
    other = lambda table, x: total(table) + total(x.astype(jnp.bfloat16))
    narrow = [
        equation
        for equation in jax.make_jaxpr(with_wide_rows(other))(table, jnp.ones((1, 1))).jaxpr.eqns
        if equation.primitive.name == "gather"
    ]
    assert len(narrow) == 1, "what is no weight is left as it is"
    assert (
        sums(
            lambda table: jnp.sum(
                table.at[tokens].get(mode="fill", fill_value=0).astype(jnp.float32)
            )
        )
        == 1024
    )


# Steps in functions that are traced.

STRATEGY = sl.Strategy(mesh="data=4,model=2", rules=RULES)


def start(strategy=STRATEGY):
    return sl.init(make, optax.adam(1e-2), strategy)


def dropped(model, batch, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    return right(model, {**batch, "x": sl.shard(batch["x"] * kept, "batch", None, "embed")}, rng)


@pytest.mark.representative("options0")
@pytest.mark.long
@pytest.mark.parametrize(
    "options", [{"zero": sl.Zero(3, small=0), "accumulate": 2, "clip": 1.0}, {"manual": ()}]
)
def test_train_step_works_inside_a_traced_function(options):
    strategy = dataclasses.replace(STRATEGY, **options)
    step = sl.train_step(dropped, strategy)
    state, expected = start(strategy), []
    for _ in range(3):
        state, metrics = step(state, BATCH)
        expected.append(float(metrics["loss"]))
    stacked = jax.tree.map(lambda x: np.stack([x] * 3), BATCH)

    def steps(state, batches):
        return lax.scan(step, state, batches)

    after, metrics = jax.jit(steps, donate_argnums=0)(start(strategy), stacked)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)
    assert after.params["up"].sharding == state.params["up"].sharding
    with strategy.scope():
        _, metrics = jax.jit(step)(start(strategy), BATCH)
    np.testing.assert_allclose(metrics["loss"], expected[0], rtol=1e-6)
    shapes = sl.init(make, optax.adam(1e-2), strategy, abstract=True)
    assert jax.make_jaxpr(step)(shapes, BATCH).out_avals[0].dtype == jnp.int32
    assert jax.eval_shape(steps, shapes, stacked)[1]["loss"].shape == (3,)
    assert jax.eval_shape(step, shapes, BATCH)[1]["loss"].shape == ()


def test_annotations_in_a_traced_function_need_a_mesh_in_force():
    """Else `jax.jit` would run on one device what has no sharding, and ignore every annotation."""

    def laid_out(x):
        with STRATEGY.scope():
            return sl.shard(x, "batch", "mlp")

    x = np.ones((8, 16), np.float32)
    for call in (lambda: jax.jit(laid_out)(x), lambda: jax.make_jaxpr(laid_out)(x)):
        with pytest.raises(
            ValueError,
            match=r"where no mesh is in force.*`with strategy.scope\(\): jax.jit\(function\)",
        ):
            call()
    with STRATEGY.scope():
        assert jax.jit(laid_out)(x).sharding.spec == P("data", "model")
        jax.make_jaxpr(laid_out)(x)
        lax.scan(lambda carry, x: (carry, laid_out(x)), 0, x[None])


# Strategies as values.

USED = [
    STRATEGY,
    sl.Strategy(mesh=sl.make_mesh("data=4,model=2"), rules=RULES),
    sl.Strategy(
        mesh="data=8",
        rules=sl.rules.data,
        zero="FULL_SHARD",
        precision=sl.Precision("bf16", keep=("a",)),
        clip=1.0,
    ),
    sl.Strategy(
        mesh="pod=2,data=4",
        dcn="pod",
        rules=sl.AxisRules(batch=("pod", "data")),
        zero="HYBRID_SHARD",
    ),
    sl.Strategy(
        mesh="pod=2,data=4",
        rules=sl.AxisRules(batch=("pod", "data")),
        exchange=sl.collectives.OneBit("pod"),
        draws="by_mesh",
    ),
    sl.Strategy(
        mesh="data=2,stage=4",
        rules=sl.rules.data | sl.rules.pipeline,
        pipeline=sl.pipeline.OneFOneB(4, 8),
        remat="stage",
    ),
    sl.Strategy(
        mesh="stage=4,data=2",
        rules=sl.rules.data | sl.rules.pipeline,
        pipeline=sl.pipeline.Custom(sl.pipeline.GPipe(4, 4).table()),
    ),
    *[
        sl.Strategy(mesh="data=2,fsdp=1,model=4", rules=sl.rules.data | rules)
        for rules in (sl.rules.fsdp, sl.rules.tensor, sl.rules.tensor_sequence, sl.rules.experts)
    ],
]


@pytest.mark.parametrize("strategy", USED, ids=range(len(USED)))
def test_strategy_can_be_pickled_and_copied_after_use(strategy):
    for name in (
        "device_mesh",
        "data_axes",
        "manual_axes",
        "every_axis",
        "zero_axes",
        "sharding",
        "layer_names",
        "dtypes",
    ):
        getattr(strategy, name)
    for same in (
        pickle.loads(pickle.dumps(strategy)), copy.copy(strategy), copy.deepcopy(strategy), dataclasses.replace(strategy)
    ):  # fmt: skip
        assert same == strategy
        assert hash(same) == hash(strategy)
        assert repr(same) == repr(strategy)
        assert same.device_mesh == strategy.device_mesh
    other = dataclasses.replace(strategy, nonfinite="count")
    assert other != strategy
    assert pickle.loads(pickle.dumps(other)) == other


def test_strategy_from_a_pickle_works_with_an_existing_state():
    step = sl.train_step(right, pickle.loads(pickle.dumps(STRATEGY)))
    _, metrics = step(start(), BATCH)
    assert np.isfinite(metrics["loss"])


def test_strategy_pickle_refuses_a_mesh_of_missing_devices(monkeypatch):
    half = sl.Strategy(mesh=sl.make_mesh("data=2,model=2", devices=jax.devices()[4:]), rules=RULES)
    written = pickle.dumps(half)
    assert [device.id for device in pickle.loads(written).device_mesh.devices.flat] == [4, 5, 6, 7]
    few = jax.devices()[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: few)
    with pytest.raises(
        ValueError, match="has the cpu device 4, and this process has 2 cpu devices"
    ):
        pickle.loads(written)
    with pytest.raises(
        ValueError, match="of 4 cpu devices that this process does not have cannot be pickled"
    ):
        pickle.dumps(half)


# What a step refuses.


def stepped(loss, batch=BATCH, make_model=make, strategy=STRATEGY):
    state = sl.init(make_model, optax.sgd(0.1), strategy)
    return sl.train_step(loss, strategy)(state, batch)


def calling_back(model, batch, rng):
    x = jax.pure_callback(
        lambda x: np.asarray(x) * 2, jax.ShapeDtypeStruct(batch["x"].shape, jnp.float32), batch["x"]
    )
    return right(model, {**batch, "x": x}, rng)


def telling(model, batch, rng):
    jax.experimental.io_callback(lambda x: None, None, batch["x"][0, 0, 0])
    return right(model, batch, rng)


@pytest.mark.long("telling")
@pytest.mark.parametrize("loss", [calling_back, telling])
def test_train_step_refuses_python_callbacks_on_automatic_axes(loss):
    with pytest.raises(ValueError, match=r"calls back into Python .*`Strategy\(manual=\(\)\)`"):
        stepped(loss)
    abstract = sl.init(make, optax.sgd(0.1), STRATEGY, abstract=True)
    with pytest.raises(ValueError, match="calls back into Python"):
        sl.train_step(loss, STRATEGY).lower(abstract, BATCH)
    for way_out in (
        {"manual": ()},
        {"mesh": sl.make_mesh("data=8"), "rules": sl.AxisRules(batch="data", embed=None, mlp=None)},
    ):
        _, metrics = stepped(loss, strategy=dataclasses.replace(STRATEGY, **way_out))
        assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize(
    "values",
    [
        ["a"] * 16,
        [b"a"] * 16,
        [None] * 16,
        np.array(["2020-01-01"] * 16, "M8[D]"),
        np.zeros(16, "m8[s]"),
    ],
)
def test_train_step_refuses_text_objects_and_dates_in_a_batch(values):
    with pytest.raises(
        ValueError, match="`text` of the batch is an array of .*, which no device holds"
    ):
        stepped(right, {**BATCH, "text": np.array(values)})


@pytest.mark.parametrize(
    "dtype", [np.bool_, np.uint8, jnp.bfloat16, jnp.float8_e4m3fn, np.complex64]
)
def test_train_step_takes_any_numeric_dtype_in_a_batch(dtype):
    stepped(right, {**BATCH, "more": np.ones(16).astype(dtype)})


@pytest.mark.parametrize("make_it", [sl.train_step, sl.evaluation])
@pytest.mark.parametrize(
    "loss",
    [
        lambda model, batch: 0.0,
        lambda model, batch, rng, more: 0.0,
        lambda *, model, batch, rng: 0.0,
    ],
)
def test_train_step_refuses_a_loss_with_the_wrong_arguments(loss, make_it):
    with pytest.raises(
        ValueError, match=r"A loss takes three arguments, `loss_fn\(model, batch, rng\)`"
    ):
        make_it(loss, STRATEGY)
    make_it(lambda model, batch, *rest: 0.0, STRATEGY)
    make_it(lambda model, batch, rng, more=None: 0.0, STRATEGY)


def test_train_step_is_refused_when_jit_is_disabled():
    state = start()
    with jax.disable_jit():
        for run in (
            lambda: sl.train_step(right, STRATEGY)(state, BATCH),
            lambda: sl.evaluation(right, STRATEGY)(state, [BATCH]),
        ):
            with pytest.raises(
                ValueError, match="`jax_disable_jit` is on, and a step is a compiled program"
            ):
                run()


@pytest.mark.representative()
@pytest.mark.long("options0-bfloat16", "options1-float32")
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{"zero": sl.Zero(3, small=0)}, {"accumulate": 2, "clip": 1.0}])
def test_train_step_applies_strict_promotion_only_to_the_loss(stored, options):
    strategy = dataclasses.replace(STRATEGY, precision="bf16", **options)
    of_dtype = lambda: jax.tree.map(lambda x: x.astype(stored), make())
    with jax.numpy_dtype_promotion("strict"):
        state = sl.init(of_dtype, optax.adamw(1e-2), strategy)
        state, metrics = sl.train_step(right, strategy)(state, BATCH)
        assert state.params["up"].dtype == stored
        with pytest.raises(
            jax.errors.TypePromotionError
            if hasattr(jax.errors, "TypePromotionError")
            else Exception
        ):
            stepped(lambda model, batch, rng: jnp.mean((batch["x"] @ model["up"]) * jnp.int32(2)))
    assert np.isfinite(metrics["loss"])


@pytest.mark.parametrize("field", ["compute", "accumulate", "reduce"])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"])
def test_precision_refuses_dtypes_of_8_bits_or_fewer(field, dtype):
    with pytest.raises(
        ValueError, match=rf"`Precision\({field}='{dtype}'\)` takes .*8 bits and fewer take scales"
    ):
        sl.Precision(**{field: dtype})


def test_trainable_parameters_of_8_bits_are_refused_unless_frozen():
    few = lambda: {**make_plain(), "scale": jnp.ones(8, jnp.float8_e4m3fn)}
    with pytest.raises(
        ValueError, match=r"`scale` is float8_e4m3fn.*`Strategy\(frozen=\('scale',\)\)`"
    ):
        stepped(right, make_model=few)
    stepped(right, make_model=few, strategy=dataclasses.replace(STRATEGY, frozen=("scale",)))
    with pytest.raises(ValueError, match=r"nothing to move.*returned a model without arrays"):
        stepped(right, make_model=dict)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mesh": "data=8"}, r"name the meshes to compare in a list"),
        ({"zeros": 3}, "unexpected keyword argument 'zeros'"),
        ({"steps": "2"}, r"steps='2'\)` takes a number of steps"),
        ({"steps": True}, "takes a number of steps"),
        ({"steps": 0}, "takes a number of steps"),
        ({"accumulate": []}, r"accumulate=\[\]\)` takes a number of microbatches"),
        ({"accumulate": 1.5}, "takes a number of microbatches"),
        ({"meshes": "data=8"}, "takes a list of meshes"),
        ({"rules": "data"}, "takes `AxisRules`"),
        ({"optimizer": None}, "takes an optax optimizer"),
        ({"make_model": {"w": 1}}, "takes a function that makes the model"),
        ({"loss_fn": None}, "takes a function of model, batch and key"),
    ],
)
def test_check_step_refuses_bad_arguments_by_name(changed, message):
    given = dict(make_model=make, optimizer=optax.sgd(0.1), loss_fn=right, batch=BATCH, rules=RULES)
    with pytest.raises((ValueError, TypeError), match=message):
        sl.testing.check_step(**{**given, "meshes": WHERE, **changed})


def test_a_linen_module_is_no_model():
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    with pytest.raises(ValueError, match=r"module of Linen, `Dense`.*`module.init\(key, x\)`"):
        sl.init(lambda: linen.Dense(3), optax.sgd(0.1), strategy)
