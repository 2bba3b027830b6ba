"""Pipelines that run: every schedule against one stage, in the step, evaluation and checkpoints;
what is refused; the compiled programs.
"""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt, moe, translation
from shardlib import pipeline
from shardlib.compiled._collectives import collectives
from shardlib.pipeline._program import BUFFERS, program, program_of
from shardlib.step._layer_order import reordered

RULES = sl.rules.data | sl.rules.tensor | sl.rules.pipeline
ALL = [
    pipeline.GPipe,
    pipeline.OneFOneB,
    pipeline.Eager1F1B,
    pipeline.Interleaved,
    pipeline.ZBH1,
    pipeline.ZBH2,
    pipeline.ZBV,
    pipeline.VHalf,
    pipeline.VMin,
    pipeline.DualPipeV,
    pipeline.ZeroBubble,
]
WIDTH, LAYERS, ROWS = 8, 8, 32


# A toy whose layers hand on a tree, see something made of weights and examples outside them, share
# a weight, number themselves, and tell something.


def make(layers=LAYERS):
    keys = jax.random.split(jax.random.key(0), 4)
    normal = lambda key, *shape: jax.random.normal(key, shape) / math.sqrt(WIDTH)
    model = {
        "enter": normal(keys[0], WIDTH, WIDTH),
        "up": normal(keys[1], layers, WIDTH, 2 * WIDTH),
        "down": normal(keys[2], layers, 2 * WIDTH, WIDTH),
        "skip": normal(keys[3], WIDTH, WIDTH),
        "gain": jnp.linspace(0.5, 1.5, WIDTH),
    }
    names = {
        "up": ("layers", "embed", "mlp"),
        "down": ("layers", "mlp", "embed"),
        "enter": ("embed", None),
        "skip": ("embed", None),
        "gain": ("embed",),
    }
    return sl.annotate(model, names)


def loss(model, batch, rng):
    x, weight = batch["x"].astype(model["enter"].dtype), batch["weight"]
    seen, stack = x @ model["skip"], {name: model[name] for name in ("up", "down")}
    gain = jnp.tanh(model["gain"])

    def layer(carry, scanned):
        w, number = scanned
        h = sl.shard(carry["x"] @ w["up"], "batch", "act_mlp")
        y = (
            carry["x"]
            + gain * (jnp.tanh(h + 0.1 * number.astype(h.dtype)) @ w["down"])
            + 0.1 * seen
        )
        return {"x": y, "count": carry["count"] + 1}, jnp.mean(jnp.square(y), -1)

    start = {"x": x @ model["enter"], "count": jnp.zeros((x.shape[0],), jnp.int32)}
    end, told = jax.lax.scan(layer, start, (stack, jnp.arange(stack["up"].shape[0])))
    y = end["x"] @ model["enter"].T + 0.1 * x  # tied, and what came before the layers
    total = jnp.sum(weight * (jnp.mean(y * y, -1) + 0.1 * told.mean(0)))
    return sl.weighted_mean(total, weight.sum()), {
        "count": sl.weighted_mean(end["count"].sum(), x.shape[0])
    }


def batch(rows=ROWS):
    random = np.random.default_rng(1)
    return {
        "x": random.normal(size=(rows, WIDTH)).astype("f"),
        "weight": random.uniform(size=rows).astype("f"),
    }


def stepped(strategy, make=make, loss=loss, given=None, optimizer=None):
    """The parameters after a step, as the model has them, and the metrics."""
    state = sl.init(make, optimizer or optax.sgd(0.1), strategy)
    state, metrics = sl.train_step(loss, strategy)(state, batch() if given is None else given)
    return jax.device_get(reordered(state, natural=True).params), jax.device_get(metrics)


def assert_alike(found, expected, atol=1e-5):
    (params, metrics), (other, theirs) = found, expected
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), params, other)
    for name in theirs:
        np.testing.assert_allclose(metrics[name], theirs[name], rtol=1e-5, err_msg=name)


@pytest.fixture(scope="module")
def alone():
    """A step on one stage."""
    return stepped(sl.Strategy(mesh="stage=1,data=4,model=2", rules=RULES, accumulate=8))


@pytest.mark.representative(
    "stage=4,data=1,model=2-OneFOneB",
    "stage=4,data=1,model=2-ZBH1",
    "stage=4,data=1,model=2-VHalf",
    "stage=2,data=2,model=2-GPipe",
    "stage=2,data=2,model=2-Interleaved",
    "stage=2,data=2,model=2-ZBV",
    "stage=2,data=2,model=2-DualPipeV",
)
@pytest.mark.long
@pytest.mark.sentinel("stage=2,data=2,model=2-Eager1F1B")
@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.__name__)
@pytest.mark.parametrize("mesh", ["stage=4,data=1,model=2", "stage=2,data=2,model=2"])
def test_pipelined_step_equals_one_stage_under_every_schedule(schedule, mesh, alone):
    stages = 4 if "stage=4" in mesh else 2
    assert_alike(stepped(sl.Strategy(mesh=mesh, rules=RULES, pipeline=schedule(stages, 8))), alone)


@pytest.mark.long
def test_pipelined_step_numbers_the_microbatch_with_a_nonfinite_loss():
    strategy = sl.Strategy(
        mesh="stage=2,data=2,model=2", rules=RULES, pipeline=pipeline.OneFOneB(2, 8)
    )
    given = batch()
    given["weight"][21] = np.nan  # the sixth example of the second worker
    _, metrics = stepped(strategy, given=given)
    assert (metrics["nonfinite_losses"], metrics["nonfinite_microbatch"]) == (1, 8 + 5)


@pytest.mark.long
def test_pipelined_step_on_eight_stages_and_on_a_single_stage(alone):
    assert_alike(
        stepped(
            sl.Strategy(
                mesh="stage=8",
                rules=sl.rules.pipeline | sl.AxisRules(batch=None),
                pipeline=pipeline.OneFOneB(8, 8),
            )
        ),
        alone,
    )
    mesh = "stage=1,data=4,model=2"
    assert_alike(stepped(sl.Strategy(mesh=mesh, rules=RULES, pipeline=pipeline.GPipe(1, 8))), alone)


@pytest.mark.representative(
    "Interleaved(stages=2, microbatches=8, chunks=2, paired=False)",
    "ZBV(stages=2, microbatches=8, costs=Costs(forward=1.0, backward=1.0, weights=1.0, send=0.0, kept=1.0), paired=False)",
)
@pytest.mark.long
@pytest.mark.parametrize(
    "schedule",
    [
        pipeline.GPipe(2, 8),
        pipeline.Interleaved(2, 8),
        pipeline.ZBV(2, 8),
        pipeline.DualPipeV(2, 8),
    ],
    ids=str,
)
def test_pipelined_step_with_stage_remat_equals_one_stage(schedule, alone):
    mesh = "stage=2,data=2,model=2"
    assert_alike(
        stepped(sl.Strategy(mesh=mesh, rules=RULES, pipeline=schedule, remat="stage")), alone
    )


# An encoder and a decoder: two loops, of which the second sees what the first made, and what the
# first told is used at the end.


def make_both():
    keys = jax.random.split(jax.random.key(0), 6)
    normal = lambda key, *shape: jax.random.normal(key, shape) / math.sqrt(WIDTH)
    model = {
        "enter": normal(keys[0], WIDTH, WIDTH),
        "between": normal(keys[1], WIDTH, WIDTH),
        "encoder": {
            "up": normal(keys[2], 4, WIDTH, 2 * WIDTH),
            "down": normal(keys[3], 4, 2 * WIDTH, WIDTH),
        },
        "decoder": {
            "up": normal(keys[4], 8, WIDTH, 2 * WIDTH),
            "down": normal(keys[5], 8, 2 * WIDTH, WIDTH),
        },
    }
    return sl.annotate(
        model,
        {
            "enter|between": ("embed", None),
            "encoder/up": ("encoder_layers", "embed", "mlp"),
            "encoder/down": ("encoder_layers", "mlp", "embed"),
            "decoder/up": ("layers", "embed", "mlp"),
            "decoder/down": ("layers", "mlp", "embed"),
        },
    )


def loss_of_both(model, batch, rng):
    x, weight = batch["x"], batch["weight"]

    def block(x, w):
        return x + jnp.tanh(sl.shard(x @ w["up"], "batch", "act_mlp")) @ w["down"]

    def encode(carry, w):
        y = block(carry[0], w)
        return (y, carry[1] + 1), jnp.mean(jnp.square(y), -1)

    (memory, count), told = jax.lax.scan(
        encode, (x @ model["enter"], jnp.int32(0)), model["encoder"]
    )
    seen = jnp.tanh(memory @ model["between"]) + count

    def decode(y, w):
        return block(y, w) + 0.1 * seen, jnp.mean(y, -1)

    end, also = jax.lax.scan(decode, x[:, ::-1] @ model["enter"], model["decoder"])
    y = end @ model["enter"].T + 0.1 * memory
    total = jnp.sum(weight * (jnp.mean(y * y, -1) + 0.1 * told.mean(0) + 0.1 * also.mean(0)))
    return sl.weighted_mean(total, weight.sum()), {
        "count": sl.weighted_mean(count * x.shape[0], x.shape[0])
    }


@pytest.fixture(scope="module")
def both_alone():
    return stepped(
        sl.Strategy(mesh="stage=1,data=4,model=2", rules=RULES, accumulate=8),
        make_both,
        loss_of_both,
    )


@pytest.mark.representative("DualPipeV(stages=2, microbatches=8, paired=True)-none")
@pytest.mark.long
@pytest.mark.sentinel("Interleaved(stages=2, microbatches=8, chunks=4, paired=False)-none")
@pytest.mark.parametrize(
    ("schedule", "remat"),
    [
        (pipeline.Interleaved(2, 8), "stage"),
        (pipeline.Interleaved(2, 8, chunks=4), "none"),
        (pipeline.ZBV(2, 8), "none"),
        (pipeline.ZBV(2, 8), "stage"),
        (pipeline.DualPipeV(2, 8), "none"),
    ],
    ids=str,
)
def test_pipelined_encoder_decoder_equals_one_stage(schedule, remat, both_alone):
    strategy = sl.Strategy(
        mesh="stage=2,data=2,model=2", rules=RULES, pipeline=schedule, remat=remat
    )
    assert_alike(stepped(strategy, make_both, loss_of_both), both_alone)


@pytest.mark.exhaustive
@pytest.mark.long
def test_pipelined_encoder_decoder_layers_are_stored_by_stage():
    alone = sl.Strategy(mesh="stage=1,data=4,model=2", rules=RULES)
    strategy = sl.Strategy(mesh="stage=2,data=2,model=2", rules=RULES, pipeline=pipeline.ZBV(2, 4))
    state, other = (
        sl.init(make_both, optax.adam(0.1), strategy),
        sl.init(make_both, optax.adam(0.1), alone),
    )
    measured = [
        sl.evaluation(loss_of_both, s.layout.strategy)(s, [batch(), batch(16)])
        for s in (state, other)
    ]
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)
    for one, order in (("encoder", [0, 1, 2, 3]), ("decoder", [4, 5, 6, 7, 0, 1, 2, 3])):
        np.testing.assert_array_equal(
            state.params[one]["up"], np.asarray(other.params[one]["up"])[order]
        )
        np.testing.assert_array_equal(state.model[one]["up"], other.model[one]["up"])


@pytest.mark.long
def test_pipelined_step_with_a_custom_table_equals_one_stage(alone):
    first = "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7"
    second = " ".join(f"F{k} B{k}" for k in range(8))
    schedule = pipeline.Custom(pipeline.Table.parse(f"{first}\n{second}"))
    assert_alike(
        stepped(sl.Strategy(mesh="stage=2,data=2,model=2", rules=RULES, pipeline=schedule)), alone
    )


@pytest.mark.exhaustive
@pytest.mark.long
def test_pipelined_step_passes_check_step_against_one_device():
    given = {name: x[:16] for name, x in batch().items()}
    options = {"pipeline": pipeline.ZBV(2, 4), "remat": "stage"}
    (found,) = sl.testing.check_step(
        make, optax.adam(0.1), loss, given, RULES, meshes=["stage=2,data=2,model=1"], **options
    )
    assert found.mesh == "stage=2,data=2,model=1"


CONFIG = gpt.tiny(layers=2, width=32, heads=4, context=16, vocab=64)
TOKENS = {"tokens": np.random.default_rng(0).integers(0, 64, (16, 17))}


@pytest.mark.representative("ZBH1-changes2-options2")
@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "changes", "options"),
    [
        (pipeline.OneFOneB, {"dropout": 0.2}, {}),
        (
            pipeline.ZBH1,
            {"tied": False, "positions": "rotary", "mlp": "swiglu"},
            {"zero": sl.Zero(1, small=16)},
        ),
        (pipeline.ZBH1, {}, {"remat": "full", "clip": 0.1, "frozen": ("positions",)}),
    ],
)
def test_pipelined_gpt_with_dropout_zero_or_remat_equals_one_stage(schedule, changes, options):
    config = replace(CONFIG, **changes)
    make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
    expected = stepped(
        sl.Strategy(mesh="stage=1,data=4,model=2", rules=RULES, accumulate=4, **options),
        make,
        gpt.loss,
        TOKENS,
    )
    strategy = sl.Strategy(
        mesh="stage=2,data=2,model=2", rules=RULES, pipeline=schedule(2, 4), **options
    )
    assert_alike(stepped(strategy, make, gpt.loss, TOKENS), expected)


EXPERTS = RULES | sl.AxisRules(experts="data")


@pytest.fixture(scope="module")
def experts_alone():
    return stepped(
        sl.Strategy(mesh="stage=1,data=2,model=4", rules=EXPERTS, accumulate=4),
        make_experts,
        moe.loss,
        TOKENS,
    )


def make_experts():
    config = moe.tiny(layers=4, width=32, heads=4, context=16, vocab=64, every=1, experts=4)
    return moe.MoE(config, rngs=nnx.Rngs(0))


@pytest.mark.representative("ZBV")
@pytest.mark.long
@pytest.mark.parametrize(
    "schedule", [pipeline.Eager1F1B, pipeline.ZBV], ids=lambda schedule: schedule.__name__
)
def test_pipelined_experts_over_the_data_axis_equal_one_stage(schedule, experts_alone):
    strategy = sl.Strategy(mesh="stage=2,data=2,model=2", rules=EXPERTS, pipeline=schedule(2, 4))
    assert_alike(stepped(strategy, make_experts, moe.loss, TOKENS), experts_alone)


@pytest.mark.exhaustive
@pytest.mark.long
def test_pipelined_gshard_translation_equals_one_stage():
    random = np.random.default_rng(0)
    given = {
        "source": random.integers(1, 64, (8, 8)),
        "target": random.integers(1, 64, (8, 7)),
        "pad": np.zeros(8, int),
    }
    given["source"][:, 6:] = 0
    config = translation.tiny(layers=4, every=1, width=16, heads=4, context=8, vocab=64, experts=4)
    make = lambda: translation.Translation(config, rngs=nnx.Rngs(0))
    expected = stepped(
        sl.Strategy(mesh="stage=1,data=2,model=4", rules=EXPERTS, accumulate=4),
        make,
        translation.loss,
        given,
    )
    strategy = sl.Strategy(
        mesh="stage=2,data=2,model=2", rules=EXPERTS, pipeline=pipeline.ZBV(2, 4)
    )
    assert_alike(stepped(strategy, make, translation.loss, given), expected)


@pytest.mark.long
def test_pipelined_bf16_error_is_at_most_twice_that_on_one_stage(alone):
    two = sl.Strategy(
        mesh="stage=2,data=2,model=2",
        rules=RULES,
        pipeline=pipeline.OneFOneB(2, 8),
        precision="bf16",
    )
    one = sl.Strategy(mesh="stage=1,data=4,model=2", rules=RULES, accumulate=8, precision="bf16")

    def far(found):
        return max(
            float(np.abs(a - b).max())
            for a, b in zip(*map(jax.tree.leaves, (found[0], alone[0])), strict=True)
        )

    assert 0 < far(stepped(two)) <= 2 * far(stepped(one))


@pytest.mark.representative("Interleaved(stages=2, microbatches=4, chunks=2, paired=False)")
@pytest.mark.long
@pytest.mark.parametrize(
    "schedule", [pipeline.OneFOneB(2, 4), pipeline.Interleaved(2, 4), pipeline.VHalf(2, 4)], ids=str
)
def test_pipelined_layers_are_stored_by_stage_and_read_in_model_order(schedule, tmp_path):
    alone = sl.Strategy(mesh="stage=1,data=4,model=2", rules=RULES)
    strategy = sl.Strategy(mesh="stage=2,data=2,model=2", rules=RULES, pipeline=schedule)
    state, other = sl.init(make, optax.adam(0.1), strategy), sl.init(make, optax.adam(0.1), alone)
    measured = [
        sl.evaluation(loss, s.layout.strategy)(s, [batch(), batch(16)]) for s in (state, other)
    ]
    assert measured[0] == pytest.approx(measured[1], rel=1e-5)
    np.testing.assert_array_equal(state.model["up"], other.model["up"])
    in_order = isinstance(schedule, pipeline.OneFOneB)
    assert np.array_equal(state.params["up"], other.params["up"]) == in_order
    assert (
        "`layers` are stored stage after stage, not in the model's order: 0"
        in str(sl.describe(state))
    ) != in_order
    given = jax.tree.map(lambda x: 2 * np.asarray(x), other.params)
    jax.tree.map(np.testing.assert_array_equal, state.with_weights(given).model, given)
    with pytest.raises(ValueError, match=r"`up` is of shape \(8, 8, 16\).*\(8, 16\)"):
        state.with_weights(given | {"up": given["up"][0]})
    with pytest.raises(ValueError, match="the parameter `gain` is not among the weights"):
        state.with_weights({name: x for name, x in given.items() if name != "gain"})
    assert state.params["up"].sharding.spec == jax.sharding.PartitionSpec("stage", None, "model")
    state, _ = sl.train_step(loss, strategy)(state, batch())
    checkpoints = sl.Checkpoints(tmp_path)
    checkpoints.save(state)
    checkpoints.wait()
    here = checkpoints.restore(sl.init(make, optax.adam(0.1), strategy, abstract=True)).state
    there = checkpoints.restore(sl.init(make, optax.adam(0.1), alone, abstract=True)).state
    for found, expected in ((here, state), (there, reordered(state, natural=True))):
        jax.tree.map(
            np.testing.assert_array_equal,
            (found.params, found.opt_state),
            (expected.params, expected.opt_state),
        )


def square(layers=8):
    keys = jax.random.split(jax.random.key(0), layers)
    made = jax.vmap(lambda key: jax.random.normal(key, (16, 16)) / 4)(keys)
    return sl.annotate(
        {"square": made, "out": jnp.eye(16)},
        {"square": ("layers", "embed", None), "out": ("embed", None)},
    )


def loss_of_squares(model, x, rng):
    y, _ = jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), x, model["square"])
    return jnp.mean((y @ model["out"]) ** 2)


@pytest.mark.long
def test_pipelined_adafactor_moments_of_square_weights_follow_their_layers():
    x = np.random.default_rng(0).normal(size=(16, 16)).astype("f")
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=16)
    alone = sl.Strategy(mesh="stage=1,data=4,model=2", rules=RULES, accumulate=4)
    strategy = sl.Strategy(
        mesh="stage=2,data=2,model=2", rules=RULES, pipeline=pipeline.Interleaved(2, 4)
    )
    found, expected = (
        reordered(
            sl.train_step(loss_of_squares, s)(sl.init(square, optimizer, s), x)[0], natural=True
        )
        for s in (strategy, alone)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        found.opt_state,
        expected.opt_state,
    )
    with pytest.raises(ValueError, match=r"v_row/square.*cannot be told.*which dim of it counts"):
        sl.init(lambda: square(16), optimizer, strategy)


# What lies where, and what waits.


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("schedule", ALL, ids=lambda schedule: schedule.__name__)
def test_pipeline_buffers_hold_no_more_than_the_schedule_promises(schedule, stages):
    made = schedule(stages, 3 * stages)
    found = program_of(made)
    timeline = pipeline.simulate(found.table)
    # A tick goes forward first, so that it holds one microbatch's part more for as long.
    paired = made.paired
    of_stage = found.table.parts // found.table.stages
    assert found.slots["kept"][0] <= max(timeline.live) * of_stage + paired
    assert (found.slots["left"][0] > 0) == found.table.splits
    again = program_of(made, recompute=True)
    assert again.slots["kept"][0] == (again.slots["left"][0] if found.table.splits else 0)
    assert again.slots["activations"][0] >= found.slots["activations"][0]
    assert sum(found.rows[kind].sum() for kind in "FBW") == sum(map(len, found.table.orders))


def test_pipeline_sends_go_only_to_neighbouring_stages():
    far = lambda schedule: {kind: sorted(of) for kind, of in program_of(schedule).channels.items()}
    assert far(pipeline.OneFOneB(4, 8)) == {"F": [1], "B": [-1]}
    assert far(pipeline.VHalf(4, 8)) == {"F": [-1, 0, 1], "B": [-1, 0, 1]}
    assert program_of(pipeline.Interleaved(4, 8)).channels["F"] == {
        1: ((0, 1), (1, 2), (2, 3), (3, 0))
    }
    assert far(pipeline.OneFOneB(2, 8)) == {"F": [1], "B": [-1]}


def test_pipeline_slots_are_read_before_they_are_overwritten():
    """Played through: every pass finds in its slots what was meant for it."""
    for schedule in (s(4, 8) for s in ALL):
        made = program(pipeline.pack(schedule.table(), schedule.paired))
        rows, table = made.rows, made.table
        lies = [{buffer: {} for buffer in BUFFERS} for _ in range(table.stages)]
        for tick in range(made.ticks):
            sent = []
            for stage in range(table.stages):
                for kind in "FBW":
                    if not rows[kind][tick, stage]:
                        continue
                    of = (
                        int(rows[f"{kind}.microbatch"][tick, stage]),
                        int(rows[f"{kind}.part"][tick, stage]),
                    )
                    numbers = {name: int(of_ticks[tick, stage]) for name, of_ticks in rows.items()}
                    slot = lambda buffer, kind=kind, numbers=numbers: numbers[f"{kind}.{buffer}"]
                    if kind == "F":
                        assert of[1] == 0 or lies[stage]["activations"][slot("activations")] == of
                        lies[stage]["kept"][slot("kept")] = of
                        if of[1] == table.parts - 1:
                            lies[stage]["gradients"][slot("gradients")] = of
                        else:
                            sent.append((kind, stage, (of[0], of[1] + 1)))
                    else:
                        assert lies[stage]["kept"][slot("kept")] == of
                        if kind == "B":
                            assert lies[stage]["gradients"][slot("gradients")] == of
                            lies[stage]["left"][slot("left")] = of
                            if of[1]:
                                sent.append((kind, stage, (of[0], of[1] - 1)))
                        else:
                            assert lies[stage]["left"][slot("left")] == of
            for kind, stage, of in sent:
                there, buffer = (
                    table.placement[of[1]],
                    "activations" if kind == "F" else "gradients",
                )
                far = next(d for d, pairs in made.channels[kind].items() if (stage, there) in pairs)
                slot = int(rows[f"{kind}{far:+d}"][tick, there])
                assert slot < made.slots[buffer][0]
                lies[there][buffer][slot] = of


# What the compiled program holds and sends.

PLATFORMS = [
    "cpu",
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]


def lowered(platform, microbatches, schedule=pipeline.OneFOneB):
    strategy = sl.Strategy(
        mesh=mesh_on(platform, "stage=4,data=2"),
        rules=sl.rules.data | sl.rules.pipeline,
        pipeline=schedule(4, microbatches),
    )
    config = gpt.tiny(layers=4, width=256, heads=4, context=128, vocab=512)
    state = sl.init(
        lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.adam(1e-3), strategy, abstract=True
    )
    tokens = jax.ShapeDtypeStruct((4 * microbatches, 129), "int32")
    return strategy.device_mesh, sl.train_step(gpt.loss, strategy).lower(state, {"tokens": tokens})


@pytest.mark.long("cpu")
@pytest.mark.parametrize("platform", PLATFORMS)
def test_pipelined_step_compiles_to_one_permute_each_way_and_flat_memory(platform):
    memory = {}
    for microbatches in (8, 32):
        mesh, step = lowered(platform, microbatches)
        compiled = compile_for(mesh, step)
        found = collectives(compiled, mesh)
        permutes = [
            one for one in found if one.kind == "collective-permute" and one.operand_bytes > 1024
        ]
        assert [one.axes for one in permutes] == [("stage",)] * 2 and not any(
            one.conditional for one in permutes
        )
        ticks = program_of(pipeline.OneFOneB(4, microbatches)).ticks
        assert {one.times for one in permutes} == {ticks} and {one.shapes for one in permutes} == {
            ((2, 128, 256),)
        }
        over_stages = [
            one
            for one in found
            if one.axes == ("stage",) and one not in permutes and one.operand_bytes > 1024
        ]
        assert {one.kind for one in over_stages} <= {"all-gather", "reduce-scatter", "all-reduce"}
        assert all(one.times == 1 for one in over_stages), (
            "what is outside the stages is gathered and scattered once"
        )
        memory[microbatches] = compiled.memory_analysis().temp_size_in_bytes
    # The numbers of the ticks, and the batch itself, grow; activations do not.
    assert memory[32] / memory[8] <= 1.02, memory


# A toy in which all is split over `model`: before, in and after one or two loops over 8 layers.
# Each product of two matrices ends, forward, with a sum of what it makes, and begins, backward,
# with a sum of the gradient of what it takes. Widths tell which: 16 and 20 in the loops.
LOOPS = {"encoder_layers": 16, "layers": 20}


def make_split(loops):
    shapes = {"head": (LOOPS[loops[-1]], 24)}
    before = 8
    for name in loops:
        shapes |= {f"to_{name}": (before, LOOPS[name]), name: (LOOPS[name], LOOPS[name])}
        before = LOOPS[name]
    model, names = {}, {}
    for name, (taken, made) in shapes.items():
        sizes, outer = ((8,), (name,)) if name in loops else ((), ())
        model[name] = {"up": jnp.ones((*sizes, taken, 32)), "down": jnp.ones((*sizes, 32, made))}
        names |= {f"{name}/up": (*outer, "embed", "mlp"), f"{name}/down": (*outer, "mlp", "embed")}
    return sl.annotate(model, names)


def loss_of_split(model, x, rng):
    def product(x, w):
        return jnp.tanh(x @ w["up"]) @ w["down"]

    for name in LOOPS:
        if name in model:
            x = product(x, model[f"to_{name}"])
            x, _ = jax.lax.scan(lambda x, w: (x + product(x, w), None), x, model[name])
    return jnp.mean(product(x, model["head"]) ** 2)


def times_by_width(plan, kind, axis):
    """How often arrays are sent by collectives over an axis, by their last dim. GPUs combine some."""
    times = dict.fromkeys((16, 20, 24), 0)
    for one in plan.collectives:
        if one.kind == kind and one.axes == (axis,) and one.operand_bytes > 64:
            for shape in one.shapes:
                times[shape[-1]] += one.times
    return times


@pytest.mark.long
@pytest.mark.sentinel("ZBV-1-none-cpu")
@pytest.mark.parametrize(
    ("schedule", "loops", "remat", "platform"),
    [
        *((schedule, 1, "none", "cpu") for schedule in ALL[:4]),
        (pipeline.ZBV, 1, "none", "cpu"),
        (pipeline.GPipe, 1, "stage", "cpu"),
        (pipeline.ZBV, 2, "none", "cpu"),
        (pipeline.Interleaved, 2, "stage", "cpu"),
        pytest.param(pipeline.ZBV, 2, "none", "v5e:2x4", marks=pytest.mark.tpu_compiler),
        pytest.param(pipeline.ZBV, 2, "none", "h200:1x1x8", marks=pytest.mark.gpu_compiler),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_plans_count_a_collective_in_a_pass_as_often_as_a_stage_has_such_a_pass(
    schedule, loops, remat, platform
):
    names = ["encoder_layers", "layers"][-loops:]
    mesh = mesh_on(platform, "stage=2,data=1,model=4")
    strategy = sl.Strategy(mesh=mesh, rules=RULES, pipeline=schedule(2, 4), remat=remat)
    optimizer = optax.sgd(1.0)
    state = sl.init(lambda: make_split(names), optimizer, strategy, abstract=True)
    x = jax.ShapeDtypeStruct((32, 8), "float32")
    train = sl.plan(sl.train_step(loss_of_split, strategy), state, x)
    measured = sl.plan(sl.evaluation(loss_of_split, strategy), state, x)

    # Forward: each of 4 microbatches goes through 4 layers of a stage, and once through a start.
    expected = dict.fromkeys((16, 20, 24), 0)
    for name in names:
        expected[LOOPS[name]] = 4 * 4 + 4
    expected[24] = 4
    assert times_by_width(measured, "all-reduce", "model") == expected
    # Recomputing does both once more. Backward: the same layers, and what comes after the loop,
    # a head or the start of the next one. Its own start makes no gradient of the batch.
    for name in names:
        expected[LOOPS[name]] *= 2 if remat == "stage" else 1
        expected[LOOPS[name]] += 4 * 4 + 4
    assert times_by_width(train, "all-reduce", "model") == expected

    # What is sent between stages is outside of passes: in every tick, over every channel.
    for plan, trains in ((train, True), (measured, False)):
        made = program_of(schedule(2, 4), loops=loops, trains=trains)
        channels = [far for kind in made.channels.values() for far in kind if far]
        sent = times_by_width(plan, "collective-permute", "stage")
        assert sent[LOOPS[names[-1]]] == made.ticks * len(channels)


# What is refused.


def strategy(**changes):
    given = {
        "mesh": "stage=2,data=2,model=2",
        "rules": RULES,
        "pipeline": pipeline.OneFOneB(2, 8),
    } | changes
    return sl.Strategy(**given)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline": pipeline.OneFOneB(4, 8)}, ["has 4 stages", "`stage`", "size 2"]),
        ({"rules": sl.rules.data | sl.rules.tensor}, ["rule `layers`", "sl.rules.pipeline"]),
        ({"rules": RULES | sl.AxisRules(layers="stages")}, ["`stages`", "the mesh has"]),
        ({"rules": RULES | sl.AxisRules(layers="data")}, ["`data`", "splits the batch"]),
        ({"accumulate": 2}, ["accumulate=2", "8"]),
        ({"zero": 2}, ["zero=2", "zero=1"]),
        ({"exchange": sl.Exact(overlap=True)}, ["overlap"]),
        ({"pipeline": pipeline.OneFOneB}, ["takes a schedule"]),
        ({"pipeline": 4}, ["takes a schedule"]),
    ],
)
def test_pipeline_strategies_that_are_invalid_are_refused(changes, words):
    with pytest.raises(ValueError) as error:
        strategy(**changes)
    assert all(word in str(error.value) for word in words), error.value


@dataclass(frozen=True)
class Wrong:
    """A schedule whose table is another's."""

    written: pipeline.Table
    stages: int = 2
    microbatches: int = 8
    paired: bool = False

    def table(self):
        return self.written


def test_pipeline_schedules_that_are_inconsistent_are_refused():
    few, forward = pipeline.OneFOneB(2, 4).table(), pipeline.Table.parse("F0 F1\nF0 F1")
    uneven = pipeline.Table.parse("F0@0 F0@2 B0@2 B0@0\nF0 B0", placement=(0, 1, 0))
    crossed = pipeline.Table.parse("F0 B0 F1 B1\nF1 F0 B0 B1")
    backward = pipeline.Table.parse("F0 B0\nB0 F0")
    for schedule, words in [
        (few, ["sl.pipeline.Custom(table)"]),
        (Wrong(few), ["8 microbatches", "has 2 and 4"]),
        (pipeline.Custom(forward), ["only forward passes"]),
        (pipeline.Custom(uneven), ["[2, 1] parts"]),
        (pipeline.Custom(crossed), ["comes to a halt", "stage 1 cannot do `F1@1`"]),
        (Wrong(backward, microbatches=1), ["Stage 1 does `B0@1`", "before `F0@1`"]),
        (object(), ["`paired`"]),
    ]:
        with pytest.raises(ValueError) as error:
            strategy(pipeline=schedule)
        assert all(word in str(error.value) for word in words), error.value


def test_pipelined_state_in_the_order_of_another_schedule_is_refused():
    state = sl.init(make, optax.sgd(0.1), strategy(pipeline=pipeline.Interleaved(2, 8)))
    for other in (pipeline.OneFOneB(2, 8), pipeline.ZBV(2, 8)):
        with pytest.raises(ValueError, match="Interleaved.*in the order of that"):
            sl.train_step(loss, strategy(pipeline=other))(state, batch())
    with pytest.raises(ValueError, match=r"Interleaved.*`pipeline=None`.*state.layout.strategy"):
        sl.evaluation(loss, strategy(pipeline=None))(state, [batch()])
    state = sl.init(make, optax.sgd(0.1), strategy())
    assert sl.evaluation(loss, strategy(pipeline=None))(state, [batch()])["loss"] > 0, (
        "stage by stage is in order"
    )


def test_pipelined_layers_that_do_not_divide_into_parts_are_refused():
    with pytest.raises(
        ValueError, match="stacks 6 layers.*4 parts.*2 on each stage.*multiple of 4"
    ):
        sl.init(lambda: make(6), optax.sgd(0.1), strategy(pipeline=pipeline.VHalf(2, 8)))
    with pytest.raises(ValueError, match="stacks 1 layers.*2 parts.*or fewer stages"):
        sl.init(lambda: make(1), optax.sgd(0.1), strategy())
    with pytest.raises(ValueError, match="stacks no layers.*2 parts.*leave `pipeline` out"):
        sl.init(lambda: make(0), optax.sgd(0.1), strategy())
    with pytest.raises(ValueError, match="stacks no layers.*4 parts"):
        sl.init(lambda: make(0), optax.sgd(0.1), strategy(pipeline=pipeline.ZBV(2, 8)))
    with pytest.raises(ValueError, match="no parameter has a dim named `layers`"):
        sl.init(lambda: {"w": jnp.ones((2, 2))}, optax.sgd(0.1), strategy())


def refused(loss, words, make=make, given=None, **changes):
    with pytest.raises(ValueError) as error:
        stepped(strategy(**changes), make, loss, given)
    assert all(word in str(error.value) for word in words), error.value


def test_pipelined_batch_that_does_not_divide_is_refused():
    refused(loss, ["batch of 24", "`microbatches=8`", "multiple of 16"], given=batch(24))


def over_layers(model, batch, layer, stack=None, **options):
    x, _ = jax.lax.scan(layer, batch["x"], model if stack is None else stack, **options)
    return jnp.mean(x * x)


def plain(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def stack_of(model):
    return {name: model[name] for name in ("up", "down")}


@pytest.mark.long
def test_pipelined_losses_that_cannot_be_cut_into_stages_are_refused():
    refused(
        lambda model, batch, rng: jnp.mean((batch["x"] @ model["up"][0]) ** 2),
        ["no `jax.lax.scan`", "`up`"],
    )

    def twice(model, batch, rng):
        return over_layers(model, batch, plain, stack_of(model)) + over_layers(
            model, batch, plain, stack_of(model)
        )

    refused(twice, ["goes through 2 loops over layers", "test_pipelined.py", "used again"])

    def outside(model, batch, rng):
        return over_layers(model, batch, plain, stack_of(model)) + 0.01 * jnp.sum(model["up"] ** 2)

    refused(outside, ["`up` is stacked", "outside the loop", "test_pipelined.py"])

    def backwards(model, batch, rng):
        return over_layers(model, batch, plain, stack_of(model), reverse=True)

    refused(backwards, ["goes backwards"])

    def unnamed(model, batch, rng):
        layer = lambda x, w: plain(x + w[1], w[0])
        return over_layers(model, batch, layer, (stack_of(model), model["enter"]))

    refused(unnamed, ["`enter`", "no dim of it is named `layers`"])
    refused(unnamed, ["`enter`", "no dim of it is named `layers`"], frozen=("enter",))

    def cast(model, batch, rng):
        return over_layers(model, batch, plain, jax.tree.map(lambda w: 2 * w, stack_of(model)))

    refused(cast, ["no `jax.lax.scan`", "`mul` at", "test_pipelined.py", "into the layer"])

    def prints(model, batch, rng):
        def layer(x, w):
            jax.debug.print("{}", x[0, 0])
            return plain(x, w)

        return over_layers(model, batch, layer, stack_of(model))

    refused(prints, ["debug", "test_pipelined.py", "Take it out"])


def test_pipelined_layers_that_change_the_carry_are_refused():
    def wider(model, batch, rng):
        return over_layers(model, batch, lambda x, w: (x @ w["up"], None), stack_of(model))

    with pytest.raises(TypeError, match=r"float32\[2,8\].*float32\[2,16\]|carry"):
        stepped(strategy(), make, wider)


@pytest.mark.long
def test_pipelined_shift_along_a_sharded_dim_is_refused():
    def shifted(model, batch, rng):
        def layer(x, w):
            h = sl.shard(x @ w["up"], "batch", "act_mlp")
            return x + jnp.tanh(jnp.roll(h, 1, -1)) @ w["down"], None

        return over_layers(model, batch, layer, stack_of(model))

    refused(shifted, ["permute within the work of one stage", "test_pipelined.py"])
    with pytest.raises(ValueError, match="permute within the work of one stage"):
        sl.evaluation(shifted, strategy())(sl.init(make, None, strategy()), [batch()])


def test_pipelined_model_state_that_changes_is_refused():
    class Model(nnx.Module):
        def __init__(self):
            stacked = {nnx.PARTITION_NAME: "layers"}
            self.weights = nnx.vmap(
                lambda key: nnx.Param(
                    sl.logical(nnx.initializers.normal(), "embed", None)(key, (WIDTH, WIDTH))
                ),
                transform_metadata=stacked,
            )(jax.random.split(jax.random.key(0), 2))
            self.seen = nnx.BatchStat(jnp.zeros(()))

    def counts(model, batch, rng):
        model.seen[...] = model.seen[...] + 1
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], model.weights[...])
        return jnp.mean(x * x)

    refused(counts, ["changes `seen` of the model"], Model)
