"""Lookups by index on three and four mesh axes: they run, equal one device, and compile for absent
machines.

XLA's partitioner aborts the process on lookups in a manual region that leaves several axes
automatic, so each of these tests ended its whole process before lookups were rewritten.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from machines import compile_for, devices_of

import shardlib as sl
from models import gpt, moe
from shardlib import testing
from shardlib.compiled._collectives import collectives

VOCAB, EMBED, MLP, ROWS, SEQ = 32, 16, 32, 16, 4
RANDOM = np.random.default_rng(0)
NAMES = {
    "table": ("vocab", "embed"),
    "up": ("embed", "mlp"),
    "head": ("embed", "vocab"),
    "position": ("seq", "embed"),
}
SIZES = {"vocab": VOCAB, "embed": EMBED, "mlp": MLP, "seq": SEQ}
WEIGHTS = {
    path: RANDOM.normal(size=[SIZES[name] for name in names]).astype(np.float32)
    for path, names in NAMES.items()
}
IDS = RANDOM.integers(0, VOCAB, (ROWS, SEQ)).astype(np.int32)
PRESETS = sl.rules.data | sl.rules.fsdp | sl.rules.tensor
THREE = "data=2,fsdp=2,model=2"


def make():
    return sl.annotate({path: jnp.asarray(leaf) for path, leaf in WEIGHTS.items()}, NAMES)


def hidden(model, ids):
    x = jnp.take(model["table"], ids, axis=0) + model["position"][jnp.arange(SEQ)]
    x = sl.shard(x, "batch", "seq", "act_embed")
    return x + jnp.tanh(sl.shard(x @ model["up"], "batch", "seq", "act_mlp")) @ model["up"].T


def logits(model, ids):
    return sl.shard(hidden(model, ids) @ model["head"], "batch", "seq", "act_vocab")


def language_model(model, ids, key):
    """A cross-entropy, as nearly every loss of a language model has one; and a tied head."""
    labels = jnp.roll(ids, 1, axis=1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(model, ids), labels)
    tied = sl.shard(hidden(model, ids) @ model["table"].T, "batch", "seq", "act_vocab")
    return jnp.mean(losses) + jnp.mean(jax.nn.logsumexp(tied, -1))


def gathers(model, ids, key):
    """Everything else that reads by index, each in the gradient."""
    x, y = hidden(model, ids), logits(model, ids)
    rows = jnp.arange(ids.shape[0])[:, None]
    return sum(
        jnp.mean(term.astype(jnp.float32) ** 2)
        for term in (
            jnp.take_along_axis(y, ids[..., None], -1),
            jnp.take_along_axis(y, ids[:, :, None] % SEQ, 1),
            y[rows, jnp.arange(SEQ), ids],
            x[:, jnp.array([2, 0])],
            jax.vmap(lambda row, number: row[number[0] % SEQ])(x, ids),
            jnp.take(model["table"], ids % EMBED, axis=1, mode="clip"),
            jnp.take(model["table"] * 2, ids, axis=0),
            lax_slices(x, ids),
        )
    )


def lax_slices(x, ids):
    return jax.vmap(lambda row, number: jax.lax.dynamic_slice_in_dim(row, number[0] % 2, 2))(x, ids)


def scatters(model, ids, key):
    """What writes by index, and what sorts, whose derivatives read by index."""
    y, rows = logits(model, ids), jnp.arange(ids.shape[0])[:, None]
    counts = sl.shard(jnp.zeros((ids.shape[0], VOCAB)), "batch", "act_vocab")
    return sum(
        jnp.mean(term**2)
        for term in (
            counts.at[rows, ids].add(model["table"][ids].sum(-1)),
            counts.at[rows, ids].max(model["table"][ids].sum(-1)),
            model["table"].at[jnp.arange(3)].add(1.0)[ids],
            jnp.sort(y, -1) * jnp.arange(VOCAB),
            jax.lax.top_k(y, 2)[0],
            jax.vmap(lambda number, row: jax.ops.segment_sum(row, number, num_segments=4))(
                ids % 4, y
            ),
        )
    )


def within(model, ids, key):
    """Lookups in loops, branches, and blocks that are computed again."""

    @jax.checkpoint
    def block(carry, number):
        return jnp.tanh(carry + jnp.take(model["table"], number, axis=0)), jnp.take(
            model["table"], number, axis=0
        )

    start = jnp.zeros((ids.shape[0], EMBED))
    last, stacked = jax.lax.scan(block, start, ids.T)
    branch = jax.lax.cond(
        model["table"][0, 0] > 0, lambda t: t[ids] * 2, lambda t: t[ids + 1], model["table"]
    )
    return jnp.mean(last**2) + jnp.mean(stacked**2) + jnp.mean(branch**2)


LOSSES = (language_model, gathers, scatters, within)
SEVERAL = {
    "presets": (PRESETS, THREE, {}),
    "sequence": (
        sl.rules.data | sl.rules.fsdp | sl.rules.tensor_sequence,
        THREE,
        {"zero": 1, "accumulate": 2},
    ),
    "vocab over fsdp": (
        PRESETS | sl.AxisRules(vocab="fsdp", embed="model", mlp=None, act_mlp=None),
        THREE,
        {"zero": 3},
    ),
    "table over both": (PRESETS | sl.AxisRules(vocab=("model", "fsdp"), embed=None), THREE, {}),
    "context": (
        sl.rules.data | sl.rules.tensor | sl.AxisRules(seq="context", position="context"),
        "data=2,context=2,model=2",
        {"zero": 2},
    ),
    "two axes of data": (
        PRESETS | sl.AxisRules(batch=("pod", "data", "fsdp")),
        "pod=2,data=1,fsdp=2,model=2",
        {},
    ),
    # Where the axes of the data come last, XLA of JAX 0.12 takes no `shard_map` over a part of the
    # others.
    "data last": (PRESETS, "fsdp=2,model=2,data=2", {"zero": 3}),
    "data between": (
        PRESETS | sl.AxisRules(vocab="fsdp", embed="model", mlp=None, act_mlp=None),
        "fsdp=2,data=2,model=2",
        {"accumulate": 2},
    ),
}


@pytest.mark.representative(
    "scatters-data=2,fsdp=2,model=2", "language_model-model=2,fsdp=2,data=2"
)
@pytest.mark.long
@pytest.mark.parametrize(
    ("loss", "mesh"),
    [*((loss, THREE) for loss in LOSSES), (LOSSES[0], "model=2,fsdp=2,data=2")],
)
def test_lookups_on_three_mesh_axes_equal_one_device(loss, mesh):
    testing.check_step(
        make, optax.adam(0.1), loss, IDS, PRESETS, meshes=[mesh], zero=sl.Zero(3, small=16)
    )


@pytest.mark.representative("context")
@pytest.mark.long
@pytest.mark.sentinel("presets")
@pytest.mark.parametrize("rules, mesh, options", SEVERAL.values(), ids=SEVERAL)
def test_lookups_of_a_language_model_equal_one_device_under_all_rules(rules, mesh, options):
    if "zero" in options:
        options = {**options, "zero": sl.Zero(options["zero"], small=16)}
    counts = [options.pop("accumulate", 1)]
    testing.check_step(
        make,
        optax.sgd(0.1),
        language_model,
        IDS,
        rules,
        meshes=[mesh],
        accumulate=counts,
        **options,
    )


@pytest.mark.long
def test_lookups_in_evaluation_on_three_mesh_axes_equal_one_device():
    strategy = sl.Strategy(mesh=THREE, rules=PRESETS, zero=sl.Zero(3, small=16))
    state = sl.init(make, optax.sgd(0.1), strategy)
    found = sl.evaluation(language_model, strategy)(state, [IDS])["loss"]
    with sl.unsharded():
        expected = language_model(
            {path: jnp.asarray(leaf) for path, leaf in WEIGHTS.items()}, IDS, None
        )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_lookup_gradients_accumulate_in_float32_on_three_mesh_axes():
    """In bfloat16 a sum of 1,024 ones stands still at 256."""
    same = np.zeros((64, 16), np.int32)

    def loss(model, ids, key):
        return sl.weighted_mean(
            jnp.sum(jnp.take(model["table"], ids, axis=0).astype(jnp.float32)), 1
        )

    strategy = sl.Strategy(mesh=THREE, rules=PRESETS, precision="bf16")
    state = sl.init(
        lambda: sl.annotate({"table": jnp.zeros((VOCAB, EMBED))}, {"table": NAMES["table"]}),
        optax.sgd(1.0),
        strategy,
    )
    after, _ = sl.train_step(loss, strategy)(state, same)
    np.testing.assert_array_equal(after.params["table"][0], np.full(EMBED, -same.size / 2))


def gpt_model(**options):
    config = gpt.tiny(width=32, heads=4, context=SEQ, vocab=VOCAB, **options)
    return lambda: gpt.GPT(config, rngs=nnx.Rngs(0))


TOKENS = {
    "tokens": RANDOM.integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32),
    "mask": (RANDOM.random((ROWS, SEQ)) > 0.3).astype(np.float32),
}


@pytest.mark.representative("pipeline")
@pytest.mark.long
@pytest.mark.parametrize(
    "mesh, rules, options",
    [
        (THREE, PRESETS, {"zero": sl.Zero(3, small=16), "precision": "float32", "remat": "full"}),
        (THREE, PRESETS | sl.rules.tensor_sequence, {"accumulate": 2}),
        (
            "stage=2,fsdp=2,model=2,data=1",
            PRESETS | sl.rules.pipeline | sl.AxisRules(batch=("data", "fsdp")),
            {"pipeline": sl.pipeline.OneFOneB(stages=2, microbatches=4)},
        ),
    ],
    ids=["stage 3", "sequence", "pipeline"],
)
def test_gpt_on_three_mesh_axes_equals_one_device(mesh, rules, options):
    counts = [options.pop("accumulate", 1)]
    testing.check_step(
        gpt_model(fused_loss=counts == [2]),
        optax.sgd(0.1),
        gpt.loss,
        TOKENS,
        rules,
        meshes=[mesh],
        accumulate=counts,
        steps=1,
        **options,
    )


@pytest.mark.exhaustive
@pytest.mark.long
def test_experts_on_three_mesh_axes_equal_one_device():
    config = moe.tiny(layers=1, every=1, width=32, heads=4, context=SEQ, vocab=VOCAB, experts=4)
    rules = PRESETS | sl.rules.experts | sl.AxisRules(batch=("data", "fsdp"))
    testing.check_step(
        lambda: moe.MoE(config, rngs=nnx.Rngs(0)),
        optax.sgd(0.1),
        moe.loss,
        TOKENS,
        rules,
        meshes=[THREE],
        zero=sl.Zero(1, small=16),
        steps=1,
    )


FOUR = {
    "pod=2,data=2,fsdp=2,model=2": PRESETS | sl.AxisRules(batch=("pod", "data", "fsdp")),
    "data=2,fsdp=2,context=2,model=2": PRESETS | sl.AxisRules(seq="context", position="context"),
}


def on_four_axes():
    """Run by a process of its own, which has sixteen devices."""
    for (mesh, rules), loss in zip(FOUR.items(), (gathers, language_model), strict=True):
        testing.check_step(
            make,
            optax.sgd(0.1),
            loss,
            IDS,
            rules,
            meshes=[mesh],
            zero=sl.Zero(3, small=16),
            steps=1,
        )
    print("four axes are equal to one device")


@pytest.mark.long
def test_lookups_on_four_mesh_axes_equal_one_device():
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=16")
    ran = subprocess.run(
        [sys.executable, "-c", "import test_lookups; test_lookups.on_four_axes()"],
        cwd=Path(__file__).parent,
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert "four axes are equal to one device" in ran.stdout, ran.stderr[-2000:]


TARGETS = [
    pytest.param("v5e:2x4", THREE, PRESETS, marks=pytest.mark.tpu_compiler),
    pytest.param("v5e:4x4", *next(iter(FOUR.items())), marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", THREE, PRESETS, marks=pytest.mark.gpu_compiler),
    pytest.param("h200:2x1x8", *next(iter(FOUR.items())), marks=pytest.mark.gpu_compiler),
    pytest.param("cpu", THREE, PRESETS),
]


@pytest.mark.representative(
    "v5e:4x4-pod=2,data=2,fsdp=2,model=2-rules1",
    "h200:2x1x8-pod=2,data=2,fsdp=2,model=2-rules3",
    "cpu-data=2,fsdp=2,model=2-rules4",
)
@pytest.mark.long
@pytest.mark.parametrize("machine, mesh, rules", TARGETS)
def test_lookups_compile_for_every_machine_and_never_gather_the_vocabulary(machine, mesh, rules):
    devices = sl.make_mesh(
        mesh, devices=devices_of(machine), dcn="pod" if machine == "h200:2x1x8" else ""
    )
    strategy = sl.Strategy(mesh=devices, rules=rules, zero=sl.Zero(1, small=16))
    state = sl.init(make, optax.adam(0.1), strategy, abstract=True)
    for loss in (language_model, scatters):
        step = sl.train_step(loss, strategy)
        compiled = compile_for(
            devices, step.lower(state, jax.ShapeDtypeStruct((2 * devices.size, SEQ), jnp.int32))
        )
        if loss is language_model:
            # The vocabulary is split over `model`: no table and no logits are made whole along it.
            gathers_of = [
                one.axes or () for one in collectives(compiled, devices) if one.kind == "all-gather"
            ]
            assert gathers_of and not [axes for axes in gathers_of if "model" in axes]
