"""Attention over a sequence that is split over devices, in all its forms, against one device."""

import itertools
import pickle
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from attention_cases import both_ways, plain
from flax import nnx
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt, moe, translation
from shardlib import kernels, testing
from shardlib.planning._prices import prices
from shardlib.rules import context

P = jax.P
QUERIES = ("batch", "seq", "act_heads", "head_dim")
KEYS = ("batch", "seq", "act_kv_heads", "head_dim")
LENGTH = 32
SEGMENTS = jnp.asarray(np.repeat([0, 1, 2, 3], [5, 10, 9, 8])[None].repeat(2, 0))
# Numbered in no order, and one of them in two places.
UNORDERED = jnp.asarray(np.repeat([7, -2, 7, 0], [5, 10, 9, 8])[None].repeat(2, 0))
BLOCKS = np.random.default_rng(0).random((4, 4, 4)) < 0.5

MASKS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"window": (3, 0)},
    "both sides": {"window": (9, 2), "soft_cap": 2.0},
    "documents": {"causal": True, "segment_ids": SEGMENTS},
    "unordered documents": {"window": (20, 3), "segment_ids": UNORDERED},
    "sinks": {"causal": True, "sinks": True},
    "blocks": {"block_mask": kernels.BlockMask(BLOCKS, 8)},
}
FORMS = {
    "gather": ("context=8", context("gather")),
    "ring": ("context=8", context("ring")),
    "ring of two": ("context=2", context("ring")),
    "ring of three": ("context=3", context("ring")),
    "ulysses": ("context=2", context("ulysses")),
    "ulysses, few key heads": ("context=4", context("ulysses")),
    "usp": ("ring=2,ulysses=2", context("usp", axis=("ring", "ulysses"))),
    "zigzag": ("context=8", context("ring")),
    "zigzag of two": ("context=2", context("ring")),
    "zigzag of two axes": ("a=2,b=2", context("ring", axis=("a", "b"))),
    "zigzag, usp": ("ring=2,ulysses=2", context("usp", axis=("ring", "ulysses"))),
    "zigzag, usp of four": ("ring=2,ulysses=4", context("usp", axis=("ring", "ulysses"))),
    "zigzag, data, tensor": (
        "data=2,context=2,model=2",
        sl.rules.data | sl.rules.tensor | context("ring"),
    ),
    "ring, tensor": ("context=4,model=2", sl.rules.tensor | context("ring")),
    "ulysses, tensor": ("context=2,model=2", sl.rules.tensor | context("ulysses")),
    "ring, data, tensor": (
        "data=2,context=2,model=2",
        sl.rules.data | sl.rules.tensor | context("ring"),
    ),
    "usp, data": (
        "data=2,ring=2,ulysses=2",
        sl.rules.data | context("usp", axis=("ring", "ulysses")),
    ),
}


def make(length=LENGTH, heads=4, key_heads=2, size=8, dtype="float32", sinks=False):
    random = np.random.default_rng(1)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), dtype)
    arrays = {
        "q": draw(2, length, heads, size),
        "k": draw(2, length, key_heads, size),
        "v": draw(2, length, key_heads, size),
    }
    if sinks:
        arrays["sinks"] = draw(heads)
    cotangents = draw(2, length, heads, size), draw(2, length, heads).astype("float32")
    return arrays, cotangents


def attend_arranged(arrays, options, **more):
    """As `attend`, in the order of the rules in force."""
    names = {"q": QUERIES, "k": KEYS, "v": KEYS}
    arrays = arrays | {
        name: sl.context.arrange(sl.shard(arrays[name], *names[name])) for name in names
    }
    if "segment_ids" in options:
        options = options | {"segment_ids": sl.context.arrange(options["segment_ids"])}
    y, lse = map(sl.context.restore, attend(arrays, options, arranged=True, **more))
    return sl.shard(y, *QUERIES), lse


def attend(arrays, options, **more):
    named = {"names": QUERIES, "kv_names": KEYS, "with_lse": True}
    return kernels.attention(**arrays, **named, **options, **more)


def mesh_of(text):
    count = int(np.prod([int(part.split("=")[1]) for part in text.split(",")]))
    return sl.make_mesh(text, devices=jax.devices()[:count])


class Trained(NamedTuple):
    """What a few steps of training made."""

    state: sl.State
    metrics: list[dict]  # of each step

    def all_of(self, name):
        return [float(metrics[name]) for metrics in self.metrics]


def batch_of(config):
    tokens = np.random.default_rng(0).integers(0, config.vocab, (8, config.context + 1))
    return {"tokens": jnp.asarray(tokens)}


def train(config, mesh, rules, *, batch=None, optimizer=None, steps=2, **options):
    """Train a small decoder, with experts or without, for some steps."""
    strategy = sl.Strategy(mesh=mesh_of(mesh), rules=rules, **options)
    has_experts = isinstance(config, moe.MoEConfig)
    kind, loss = (moe.MoE, moe.loss) if has_experts else (gpt.GPT, gpt.loss)
    make_model = lambda: kind(config, rngs=nnx.Rngs(0))
    state = sl.init(make_model, optimizer or optax.sgd(0.1), strategy)
    step = sl.train_step(loss, strategy)
    every = []
    for _ in range(steps):
        state, metrics = step(state, batch or batch_of(config))
        every.append(metrics)
    return Trained(state, every)


def assert_near(found, expected, tolerance):
    def check(a, b):
        a, b = np.float64(a), np.float64(b)
        np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * max(np.abs(b[b > -np.inf]).max(), 1)
        )

    jax.tree.map(check, found, expected)


# Every second form, each under one of the masks in turn.
ALWAYS = set(list(zip(FORMS, itertools.cycle(MASKS)))[::2])
LONG = [f"{form}-{mask}" for form in FORMS for mask in MASKS if (form, mask) not in ALWAYS]


@pytest.mark.representative(
    "ring-unordered documents",
    "ring-blocks",
    "ring-sinks",
    "zigzag-documents",
    "gather-both sides",
    "ring of three-causal",
    "ring of two-window",
    "ring of two-blocks",
    "ring, data, tensor-both sides",
    "ring, tensor-unordered documents",
    "ulysses, tensor-blocks",
    "ulysses-sinks",
    "ulysses-window",
    "usp, data-all",
    "usp-causal",
    "usp-unordered documents",
    "zigzag of two axes-blocks",
    "zigzag of two-both sides",
    "zigzag, data, tensor-unordered documents",
    "zigzag, usp of four-blocks",
    "zigzag, usp-sinks",
    "zigzag, usp-window",
)
@pytest.mark.long(*LONG)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("form", FORMS)
def test_forms_equal_one_device(form, mask):
    mesh_text, rules = FORMS[form]
    mesh, options = mesh_of(mesh_text), dict(MASKS[mask])
    length = 24 if form == "ring of three" else LENGTH
    arrays, cotangents = make(length, sinks=options.pop("sinks", False))
    if "segment_ids" in options:
        options["segment_ids"] = options["segment_ids"][:, :length]
    with jax.enable_x64():
        wide = jax.tree.map(lambda x: x.astype("float64"), (arrays, cotangents))
        expected = both_ways(plain, wide[0], options, wide[1])
    call = attend_arranged if "zigzag" in form else attend
    with sl.use(rules, mesh):
        run = jax.jit(lambda arrays, cotangents: both_ways(call, arrays, options, cotangents))
        found = run(arrays, cotangents)
        layout = jax.jit(lambda x: sl.shard(x, *QUERIES))(arrays["q"]).sharding
    assert_near(found, expected, 5e-6)
    results, gradients = found
    assert results[0].sharding.is_equivalent_to(layout, 4)
    assert gradients["q"].sharding.is_equivalent_to(layout, 4)


def test_a_ring_gives_zeros_where_a_query_sees_neither_keys_nor_a_sink():
    mesh_text, rules = FORMS["ring of two"]
    arrays, cotangents = make(sinks=True)
    arrays["sinks"] = arrays["sinks"].at[1].set(-jnp.inf)
    ids = np.zeros((2, LENGTH), int)
    # The first queries see no key; the sink of one head is off.
    options = {"segment_ids": (ids - (np.arange(LENGTH) < 5), ids)}
    alone = lambda arrays, options: kernels.attention(**arrays, **options, with_lse=True)
    expected = both_ways(alone, arrays, options, cotangents)
    with sl.use(rules, mesh_of(mesh_text)):
        run = jax.jit(lambda arrays, cotangents: both_ways(attend, arrays, options, cotangents))
        found = run(arrays, cotangents)
    (y, lse), _ = found
    assert not y[:, :5, 1].any() and (lse[:, :5, 1] == -jnp.inf).all()
    assert_near(found, expected, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"causal": True, "starts": (32, 0)}])
@pytest.mark.parametrize("form", ["ring", "ulysses, few key heads", "usp"])
def test_forms_take_keys_of_another_length(form, options):
    """As of an encoder, or of a prefix; values have a size of their own."""
    mesh_text, rules = FORMS[form]
    (arrays, cotangents), (longer, _) = make(), make(2 * LENGTH, size=16)
    arrays |= {"k": longer["k"][..., :8], "v": longer["v"]}
    cotangents = jnp.tile(cotangents[0], 2), cotangents[1]
    with sl.use(rules, mesh_of(mesh_text)):
        run = jax.jit(lambda arrays, cotangents: both_ways(attend, arrays, options, cotangents))
        found = run(arrays, cotangents)
    assert_near(found, both_ways(plain, arrays, options, cotangents), 1e-5)


@pytest.mark.representative("zigzag of two", "ulysses")
@pytest.mark.long
@pytest.mark.parametrize("form", ["ring of two", "zigzag of two", "ulysses"])
def test_kernels_of_tpus_equal_one_device_in_each_form(form):
    mesh_text, rules = FORMS[form]
    # Kernels take lengths that 128 divides, and each stretch is one.
    arrays, cotangents = make(length=512 if "zigzag" in form else 256, heads=2, key_heads=1)
    call = partial(attend_arranged if "zigzag" in form else attend, implementation="tpu_simulated")
    with sl.use(rules, mesh_of(mesh_text)):
        run = lambda arrays, cotangents: both_ways(call, arrays, {"causal": True}, cotangents)
        found = jax.jit(run)(arrays, cotangents)
    assert_near(found, both_ways(plain, arrays, {"causal": True}, cotangents), 1e-5)


@pytest.mark.representative(
    "context=8-manual0-rules0-True",
    "context=4-manual1-rules1-False",
    "context=2,model=2-manual2-rules2-True",
    "context=2,model=2-manual3-rules3-False",
    "ring=2,ulysses=2-manual4-rules4-True",
    "ring=2,ulysses=2-manual5-rules5-False",
)
@pytest.mark.long
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "mesh, manual, rules",
    [
        ("context=8", {"context"}, context("ring")),
        ("context=4", {"context"}, context("ulysses")),
        ("context=2,model=2", {"context"}, sl.rules.tensor | context("ring")),
        ("context=2,model=2", {"context"}, sl.rules.tensor | context("ulysses")),
        ("ring=2,ulysses=2", {"ring", "ulysses"}, context("usp", axis=("ring", "ulysses"))),
        ("ring=2,ulysses=2", {"ring"}, context("usp", axis=("ring", "ulysses"))),
    ],
)
def test_forms_over_manual_axes_equal_one_device(mesh, manual, rules, check_vma):
    """In anybody's `shard_map`, the arrays are a device's parts already."""
    mesh = mesh_of(mesh)
    arrays, cotangents = make(sinks=True)
    axes = tuple(axis for axis in mesh.axis_names if axis in manual)
    parts = P(None, axes)

    def body(arrays, cotangents, segments):
        options = {"causal": True, "segment_ids": segments}
        results, gradients = both_ways(attend, arrays, options, cotangents)
        # Where JAX keeps no account of what differs, the sum is the caller's.
        if not check_vma:
            gradients["sinks"] = jax.lax.psum(gradients["sinks"], axes)
        return results, gradients

    of_arrays = {"q": parts, "k": parts, "v": parts, "sinks": P()}
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(of_arrays, (parts, parts), parts),
        out_specs=((parts, parts), of_arrays),
        axis_names=manual,
        check_vma=check_vma,
    )
    with sl.use(rules, mesh):
        found = jax.jit(mapped)(arrays, cotangents, SEGMENTS)
    options = {"causal": True, "segment_ids": SEGMENTS}
    assert_near(found, both_ways(plain, arrays, options, cotangents), 1e-5)


@pytest.mark.long("ring")
@pytest.mark.parametrize("form", ["ring", "ulysses", "usp"])
def test_forms_in_bfloat16_are_as_exact_as_one_device(form):
    mesh_text, rules = FORMS[form]
    arrays, cotangents = make(dtype="bfloat16")
    run = lambda arrays, cotangents: both_ways(attend, arrays, {"causal": True}, cotangents)
    with jax.enable_x64():
        wide = jax.tree.map(lambda x: x.astype("float64"), (arrays, cotangents))
        exact = both_ways(plain, wide[0], {"causal": True}, wide[1])
    with sl.unsharded():
        alone = jax.jit(run)(arrays, cotangents)
    with sl.use(rules, mesh_of(mesh_text)):
        found = jax.jit(run)(arrays, cotangents)

    def error(some):
        differences = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), some, exact)
        return [np.linalg.norm(x) for x in jax.tree.leaves(differences)]

    for own, reference in zip(error(found), error(alone), strict=True):
        assert own <= 1.5 * reference


TARGETS = [
    "cpu",
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]
# Of 8 devices: the axes, and the key heads of 16.
PROGRAMS = {
    "ring": ("context=8", context("ring"), 4),
    "zigzag": ("context=8", context("ring"), 4),
    "ulysses": ("context=8", context("ulysses"), 8),
    "ulysses, few key heads": ("context=8", context("ulysses"), 4),
    "usp": ("ring=4,ulysses=2", context("usp", axis=("ring", "ulysses")), 4),
}


def sent_by_theory(form, length, heads, key_heads, width):
    """The bytes that a device sends, by kind, of so many positions.

    All-to-alls send `width` bytes a number.
    """
    own, sent = length // 8, {}
    ulysses = {"ring": 1, "zigzag": 1, "usp": 2}.get(form, 8)
    ring = 8 // ulysses
    if ulysses > 1:
        exchanged = 2 * heads + 2 * max(key_heads, ulysses)
        # There and back.
        sent["all-to-all"] = 2 * width * exchanged * own * (ulysses - 1) // ulysses
    if ring > 1:
        block = 2 * key_heads // ulysses * (length // ring)
        # Keys and values there and backward, and backward their gradients in float32.
        sent["collective-permute"] = (2 * 2 + 4) * block * (ring - 1)
    return sent


@pytest.mark.representative(
    "ring-cpu",
    "zigzag-cpu",
    "ulysses, few key heads-cpu",
    "usp-cpu",
    "usp-v5e:2x4",
    "usp-h200:1x1x8",
)
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The out_shape and scratch_shapes:DeprecationWarning")
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", PROGRAMS)
def test_forms_send_what_theory_says(form, target):
    """A ring's steps are hidden on machines that compute while they send."""
    mesh_text, rules, key_heads = PROGRAMS[form]
    mesh, heads, length, size = mesh_on(target, mesh_text), 16, 2048, 128
    axes = tuple(mesh.axis_names)

    def both(q, k, v, gradient):
        named = {"names": QUERIES, "kv_names": KEYS, "arranged": form == "zigzag"}
        y, back = jax.vjp(partial(kernels.attention, causal=True, **named), q, k, v)
        return y, back(gradient)

    def place(count):
        sharding = jax.NamedSharding(mesh, P(None, axes))
        return jax.ShapeDtypeStruct((1, length, count, size), "bfloat16", sharding=sharding)

    shapes = place(heads), place(key_heads), place(key_heads), place(heads)
    with sl.use(rules, mesh):
        compiled = compile_for(mesh, jax.jit(both).lower(*shapes))
    collectives, found = testing.collectives(compiled, mesh), {}
    for one in collectives:
        found[one.kind] = found.get(one.kind, 0) + one.total_bytes
    # CPUs exchange float32. The log-sum-exp, a number for each head, comes back too.
    width = 4 if target == "cpu" else 2
    expected = sent_by_theory(form, length, heads, key_heads, width)
    assert set(found) == set(expected)
    for kind, theory in expected.items():
        assert theory * size <= found[kind] <= 1.02 * theory * size
    in_loops = [one for one in collectives if one.times > 1]
    assert bool(in_loops) == ("collective-permute" in expected)
    assert target == "cpu" or all(one.overlapped for one in in_loops)


@pytest.mark.representative()
@pytest.mark.long("window1-sequence-2", "window2-sequence-2")
@pytest.mark.parametrize(
    "window, order, blocks",
    [
        # A window that reaches into the stretch before, or into two.
        ((31, 0), "sequence", 1),
        ((40, 0), "sequence", 2),
        ((31, 31), "sequence", 2),
        # Of the neighbours of a device's two stretches one comes from either side.
        ((15, 0), "zigzag", 2),
        ((None, 0), "sequence", 7),
    ],
)
def test_keys_travel_no_further_than_a_window_reaches(window, order, blocks):
    mesh, length = mesh_of("context=8"), 256
    x = jax.ShapeDtypeStruct((1, length, 2, 8), "float32")

    named = {"names": QUERIES, "kv_names": KEYS, "arranged": True}
    with sl.use(context("ring", order=order), mesh):
        call = jax.jit(partial(kernels.attention, window=window, **named))
        compiled = call.lower(x, x, x).compile()
    sent = sum(one.total_bytes for one in testing.collectives(compiled, mesh))
    assert sent == blocks * 2 * (length // 8) * 2 * 8 * 4


def test_keys_of_documents_that_a_device_does_not_have_are_left_out():
    """Masked, a value that is no number would still spoil the sums: nothing is computed of it."""
    documents = jnp.repeat(jnp.arange(8), 8)[None].repeat(2, 0)
    options = {"causal": True, "segment_ids": documents}
    arrays, _ = make(64)
    expected = np.asarray(plain(arrays, options)[0])
    third = documents[..., None, None] == 3
    spoilt = arrays | {"v": jnp.where(third, jnp.nan, arrays["v"])}
    with sl.use(context("ring", order="sequence"), mesh_of("context=8")):
        found = np.asarray(jax.jit(lambda arrays: attend(arrays, options)[0])(spoilt))
    others = np.asarray(documents) != 3
    assert np.isnan(found[~others]).all()
    np.testing.assert_allclose(found[others], expected[others], atol=1e-5)


def test_a_ring_holds_the_keys_of_two_devices_at_a_time():
    mesh = mesh_of("context=8")
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), "float32")
    call = partial(kernels.attention, names=QUERIES, kv_names=KEYS, causal=True)
    texts = {}
    for form in ("gather", "ring"):
        with sl.use(context(form), mesh):
            texts[form] = jax.jit(call).lower(x, x, x).compile().as_text()
    assert "[1,4096,2,64]" in texts["gather"]
    assert "[1,4096,2,64]" not in texts["ring"]


@pytest.mark.representative("3-2-data=2,context=2,model=2")
@pytest.mark.long
@pytest.mark.parametrize(
    "mesh", ["data=2,context=4", "data=1,context=4", "data=2,context=2,model=2"]
)
@pytest.mark.parametrize(("stage", "accumulate"), [(1, 1), (2, 2), (3, 2)])
def test_zero_splits_over_axes_of_sequences(stage, accumulate, mesh):
    """Losses and parameters are those of one device, and each device has its part of the state."""
    config = gpt.tiny(context=32)
    rules = sl.rules.data | context("ring")
    if "model" in mesh:
        rules = rules | sl.rules.tensor
    optimizer = optax.sgd(0.1, momentum=0.9)
    how = {"zero": sl.Zero(stage, small=0), "accumulate": accumulate}
    found = train(config, mesh, rules, optimizer=optimizer, steps=3, **how)
    alone = train(config, "data=1", sl.rules.data, optimizer=optimizer, steps=3)
    np.testing.assert_allclose(found.all_of("loss"), alone.all_of("loss"), rtol=2e-6)
    state, expected = found.state, alone.state
    pairs = zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True)
    for one, expected_one in pairs:
        np.testing.assert_allclose(np.asarray(one), np.asarray(expected_one), atol=2e-5)
        # Matrices have a dim for every axis; vectors do not.
        if one.ndim >= 3:
            shard = one.sharding.shard_shape(one.shape)
            assert np.prod(shard) == one.size / mesh_of(mesh).size
    for one, moment in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(state.opt_state), strict=False
    ):
        assert moment.sharding.is_equivalent_to(one.sharding, one.ndim)


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.parametrize("form", ["ring", "ulysses"])
def test_experts_split_sequences_by_rules_alone(form):
    """Experts are split over the axis of the data, and sequences over another."""
    config = moe.tiny(context=32)
    rules = sl.rules.experts | context(form)
    found = train(config, "data=2,context=4", rules, zero=sl.Zero(3, small=0))
    alone = train(config, "data=1", sl.rules.experts)
    for name in ("loss", "cross_entropy"):
        np.testing.assert_allclose(found.all_of(name), alone.all_of(name), rtol=5e-6)


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("axes", [("context",), "usp"])
def test_zero_over_axes_of_sequences_alone(axes, accumulate):
    config = gpt.tiny(context=32)
    if axes == "usp":
        mesh, zero = "data=2,ring=2,ulysses=2", sl.Zero(3, small=0)
        rules = sl.rules.data | context("usp", axis=("ring", "ulysses"))
    else:
        mesh, zero = "data=2,context=4", sl.Zero(2, axes=axes, small=0)
        rules = sl.rules.data | context("ring")
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=4)
    how = {"zero": zero, "accumulate": accumulate}
    found = train(config, mesh, rules, optimizer=optimizer, steps=3, **how)
    alone = train(config, "data=1", sl.rules.data, optimizer=optimizer, steps=3)
    np.testing.assert_allclose(found.all_of("loss"), alone.all_of("loss"), rtol=2e-5)


@pytest.mark.representative("ulysses")
@pytest.mark.long
@pytest.mark.parametrize("form", ["ulysses", "gather"])
def test_stages_of_a_pipeline_split_sequences(form):
    config = gpt.tiny(context=32, layers=4)
    rules = sl.rules.data | sl.rules.pipeline
    schedule = sl.pipeline.OneFOneB(stages=2, microbatches=4)
    split = rules | context(form)
    found = train(config, "data=2,stage=2,context=2", split, pipeline=schedule)
    alone = train(config, "data=1", sl.rules.data)
    np.testing.assert_allclose(found.all_of("loss"), alone.all_of("loss"), rtol=5e-6)


def test_stages_of_a_pipeline_refuse_a_ring():
    rules = sl.rules.data | sl.rules.pipeline | context("ring")
    schedule = sl.pipeline.OneFOneB(stages=2, microbatches=4)
    mesh = mesh_of("data=2,stage=2,context=2")
    with pytest.raises(ValueError, match="around a ring over `context`.*ulysses"):
        sl.Strategy(mesh=mesh, rules=rules, pipeline=schedule)
    # An axis of one device is no ring.
    sl.Strategy(mesh=mesh_of("data=2,stage=2,context=1"), rules=rules, pipeline=schedule)


def test_zero_over_the_axes_that_it_names():
    mesh = mesh_of("data=2,context=4")
    rules = sl.rules.data | context("ring")
    for axes, expected in [(None, ("data", "context")), (("data",), ("data",))]:
        strategy = sl.Strategy(mesh=mesh, rules=rules, zero=sl.Zero(3, axes=axes))
        assert strategy.zero_axes == expected
    hybrid = sl.Strategy(
        mesh="pod=2,data=2,context=2",
        rules=sl.AxisRules(batch=("pod", "data")) | context("ring"),
        dcn="pod",
        zero="HYBRID_SHARD",
    )
    assert hybrid.zero_axes == ("data", "context")
    with pytest.raises(ValueError, match="which splits sequences"):
        sl.Strategy(mesh=mesh, rules=rules, zero=3, offload="parameters")
    with pytest.raises(ValueError, match="nor of those of sequences"):
        sl.Strategy(mesh=mesh, rules=rules, zero=sl.Zero(3, axes=("model",)))
    # An axis that splits weights is no axis of sequences alone.
    rules = sl.rules.data | sl.rules.tensor | sl.AxisRules(seq="model")
    assert sl.Strategy(mesh=mesh_of("data=2,model=4"), rules=rules, zero=3).zero_axes == ("data",)


@pytest.mark.tpu_compiler
def test_zero_over_sequences_gathers_each_layer_and_scatters_its_gradients():
    """Of a layer's matrices, in float32; sums over the sequence are the partitioner's."""
    mesh = mesh_on("v5e:2x4", "data=2,context=4")
    layers, width, hidden = 3, 128, 512
    config = gpt.tiny(
        layers=layers, width=width, heads=8, context=64, hidden=hidden, vocab=256,
        positions="rotary", norm="rms", bias=False, attention=None,
    )  # fmt: skip
    rules = sl.rules.data | context("ring")
    strategy = sl.Strategy(mesh=mesh, rules=rules, zero=sl.Zero(3, small=width))
    make_model = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
    state = sl.init(make_model, optax.sgd(0.1), strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 65), "int32")}
    with jax.default_matmul_precision("highest"):
        compiled = compile_for(mesh, sl.train_step(gpt.loss, strategy).lower(state, batch))
    sent = {}
    for one in testing.collectives(compiled, mesh):
        if one.times == layers and one.kind != "collective-permute":
            size = one.times * max(one.operand_bytes, one.result_bytes)
            sent[one.kind, one.axes] = sent.get((one.kind, one.axes), 0) + size
    matrices = 4 * layers * (4 * width * width + 2 * width * hidden)
    # Forward and backward; a layer is whole after both gathers, and half of it after the first.
    assert sent["all-gather", ("context",)] == matrices
    assert sent["all-gather", ("data",)] == 2 * matrices
    assert sent["reduce-scatter", ("data",)] == matrices / 4
    # Whatever is not scattered over the sequence is summed whole there.
    over_context = sent.get(("reduce-scatter", ("context",)), 0)
    over_context += sent.get(("all-reduce", ("context",)), 0)
    norms = 4 * layers * 2 * width
    assert over_context == matrices + norms
    assert not [key for key in sent if key[0] == "all-reduce" and "data" in key[1]]


def test_prices_of_zero_over_axes_of_sequences():
    """Sums over the sequence are made in every microbatch, in the dtype of computation."""
    mesh, rules = mesh_of("data=2,context=4"), sl.rules.data | context("ring")

    def prices_of(precision="bf16", **options):
        strategy = sl.Strategy(mesh=mesh, rules=rules, accumulate=3, precision=precision, **options)
        make = lambda: sl.annotate({"w": jnp.ones((512, 512))}, {"w": ("embed", "mlp")})
        state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
        return {one.stage: one for one in prices(state, strategy)}

    size, found = 512 * 512, prices_of(zero=sl.Zero(1, small=0))
    by_partitioner, whole = 3 * size * 2 * 3 / 4, size * 2 * 7 / 8
    assert found[1].sent_bytes == whole + by_partitioner + size / 4 * 4 / 2
    assert found[2].sent_bytes == whole + by_partitioner + 3 * size / 4 * 4 / 2
    assert found[3].sent_bytes == 6 * whole + by_partitioner + 3 * size / 4 * 4 / 2
    assert found[1].held_bytes == size * 2 + size * 4 / 4
    assert found[3].held_bytes == size * 4 / 8
    alone = prices_of(zero=sl.Zero(3, axes=("data",), small=0))
    assert alone[3].sent_bytes == 3 * (2 * size * 2 + size * 4) / 2
    narrow = sl.Precision("bf16", wire="bf16")
    alone = prices_of(narrow, zero=sl.Zero(3, axes=("data",), small=0))
    assert alone[3].sent_bytes == 3 * 3 * size * 2 / 2


def test_costs_are_those_of_the_table():
    sizes = {"tokens": 1024, "heads": 8, "key_heads": 2, "head_size": 16}
    found = sl.context.costs(devices=4, itemsize=2, **sizes)
    # 2 k S (N - 1) / N numbers of two bytes; backward as many, and gradients of four.
    passed = 2 * 32 * 1024 * 3 // 4
    assert found["ring"].forward_bytes == 2 * passed
    assert found["ring"].backward_bytes == (2 + 4) * passed
    assert found["gather"].backward_bytes == (2 + 2) * passed
    # Two key heads are repeated for four devices.
    exchanged = (2 * 128 + 2 * 64) * 256 * 3 // 4
    assert found["ulysses"].sent_bytes == 2 * 2 * exchanged
    assert found["ring"].load == found["gather"].load == 1.75
    assert found["zigzag"].load == found["ulysses"].load == 1
    assert found.forms[0].sent_bytes == min(one.sent_bytes for one in found.forms)
    assert "usp 2x2" in str(found)
    # Twelve parts do not divide the sequence, so that rings go in order.
    odd = sl.context.costs(tokens=18, devices=6, heads=6, key_heads=6, head_size=16, itemsize=2)
    assert (odd["usp 2x3"].load, odd["ulysses"].load) == (1.5, 1)
    few = sl.context.costs(devices=16, itemsize=2, **sizes)
    assert "ulysses" not in str(few) and "usp 2x8" in str(few)
    with pytest.raises(KeyError, match="there are"):
        few["ulysses"]
    with pytest.raises(ValueError, match="each key head serves as many"):
        sl.context.costs(devices=4, **{**sizes, "key_heads": 3})


def test_arrays_are_arranged_and_restored():
    x = jnp.arange(2 * 24 * 3).reshape(2, 24, 3)
    for axis, mesh in [("context", "context=4"), (("a", "b"), "a=2,b=3")]:
        with sl.use(context("ring", axis=axis), mesh_of(mesh)):
            assert sl.context.is_arranged(24)
            arranged = jax.jit(sl.context.arrange)(x)
            np.testing.assert_array_equal(jax.jit(sl.context.restore)(arranged), x)
            np.testing.assert_array_equal(
                sl.context.arrange(x.swapaxes(0, 1), 0).swapaxes(0, 1), arranged
            )
        size = mesh_of(mesh).size
        stretches = np.asarray(arranged[0, :, 0]).reshape(size, 2, -1) // (3 * 24 // (2 * size))
        for device in range(size):
            assert (stretches[device, 0] == device).all()
            assert (stretches[device, 1] == 2 * size - 1 - device).all()


@pytest.mark.parametrize(
    "rules, mesh",
    [
        (context("ring", order="sequence"), "context=4"),
        (context("ulysses"), "context=4"),
        (context("ring"), "context=1"),
    ],
)
def test_other_rules_leave_positions_in_their_order(rules, mesh):
    x = jnp.arange(8)[None]
    with sl.use(rules, mesh_of(mesh)):
        assert not sl.context.is_arranged(8)
        assert sl.context.arrange(x) is x
    with sl.unsharded():
        assert sl.context.restore(x) is x


def test_a_length_that_two_stretches_of_each_device_do_not_divide():
    x, mesh = jnp.arange(12)[None], mesh_of("context=4")
    message = "8 does not divide 12. Pad the sequence to 16"
    with sl.use(context("ring"), mesh), pytest.raises(ValueError, match=message):
        sl.context.arrange(x)
    warned = pytest.warns(sl.ShardingWarning, match="They stay in their order")
    with sl.use(context("ring").indivisible(seq="replicate"), mesh), warned:
        assert sl.context.arrange(x) is x


@pytest.mark.parametrize("lengths", [(16, 12), (12, 16), (16, 32)])
def test_queries_and_keys_of_two_lengths_are_not_arranged_together(lengths):
    arrays, _ = make(lengths[0])
    arrays |= {name: make(lengths[1])[0][name] for name in ("k", "v")}
    rules = context("ring").indivisible(seq="replicate")
    options = {"causal": True, "starts": (0, 0)}
    refused = pytest.raises(ValueError, match="arranged=True")
    with sl.use(rules, mesh_of("context=4")), refused:
        jax.eval_shape(lambda arrays: attend(arrays, options, arranged=True), arrays)


def test_a_length_that_heads_do_not_divide_stays_in_its_order():
    """Twice the ring divides it, and all devices of the sequence do not."""
    rules = context("usp", axis=("ring", "ulysses")).indivisible(seq="replicate")
    x = jnp.arange(12)[None]
    with sl.use(rules, mesh_of("ring=2,ulysses=4")):
        with pytest.warns(sl.ShardingWarning, match="8 does not divide 12"):
            assert sl.context.arrange(x) is x
        assert not sl.context.is_arranged(12) and sl.context.is_arranged(16)


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.sentinel(
    "context=4-rules1-None", "context=4-rules3-starts3", "ring=4,ulysses=1-rules6-None"
)
@pytest.mark.parametrize(
    "mesh, rules, starts",
    [
        ("context=4", context("ring"), None),
        ("context=4", context("ring", order="sequence"), None),
        ("context=4", context("ring", order="sequence"), (jnp.int32(0), jnp.int32(0))),
        ("context=4", context("ring"), (jnp.int32(0), jnp.int32(0))),
        ("a=4,b=1", context("ring", axis=("a", "b")), None),
        ("a=4,b=1", context("ring", axis=("a", "b"), order="sequence"), None),
        ("ring=4,ulysses=1", context("usp", axis=("ring", "ulysses")), None),
    ],
)
def test_what_a_causal_mask_hides_is_not_computed(mesh, rules, starts):
    """A value that is no number spoils nothing, where all that is computed of it would be."""
    arrays, _ = make(32)
    options = {"causal": True} if starts is None else {"causal": True, "starts": starts}
    expected = np.asarray(plain(arrays, {"causal": True})[0])
    last = jnp.arange(32)[None, :, None, None] >= 28
    spoilt = arrays | {"v": jnp.where(last, jnp.nan, arrays["v"])}
    with sl.use(rules, mesh_of(mesh)):
        found = jax.jit(lambda arrays: attend_arranged(arrays, options)[0])(spoilt)
    # Within a stretch what is hidden is masked, and multiplied by zero.
    np.testing.assert_allclose(found[:, :24], expected[:, :24], atol=1e-5)


def test_positions_of_one_device_are_not_arranged():
    mesh, x = mesh_of("context=4"), jnp.arange(16)[None]
    with sl.use(context("ring"), mesh), pytest.raises(ValueError, match="call it outside"):
        spec = P(None, "context")
        jax.shard_map(sl.context.arrange, mesh=mesh, in_specs=spec, out_specs=spec)(x)


@pytest.mark.parametrize(
    "rules, names, message",
    [
        (context("ring"), ("batch", None, "act_heads", "head_dim"), "positions are in zigzag"),
        (
            context("ring", axis=("a", "b")).attention(b="gather"),
            QUERIES,
            "besides over axes of `ulysses` only",
        ),
    ],
)
def test_arranged_positions_that_a_ring_does_not_have_are_refused(rules, names, message):
    arrays, _ = make()
    mesh = mesh_of("context=4" if "context" in rules.axes else "a=2,b=2")
    call = partial(kernels.attention, names=names, causal=True, arranged=True)
    with sl.use(rules, mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(call, arrays["q"], arrays["q"], arrays["q"])


@pytest.mark.representative("learned-None")
@pytest.mark.long
@pytest.mark.sentinel("rotary-xla")
@pytest.mark.parametrize("attention", [None, "xla"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_model_in_zigzag_order_gives_the_logits_of_one_device(positions, attention):
    """In the order of the sequence; dropout draws follow positions."""
    config = gpt.tiny(context=32, positions=positions, attention=attention, dropout=0.3)
    model = gpt.GPT(config, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, config.vocab, (2, 32)))
    segments = jnp.asarray(np.sort(random.integers(0, 3, (2, 32))))

    def logits(model, tokens, segments):
        return model(tokens, segments, key=jax.random.key(0))

    with sl.unsharded():
        expected = nnx.jit(logits)(model, tokens, segments)
    with sl.use(context("ring"), mesh_of("context=4")):
        found = nnx.jit(logits)(model, tokens, segments)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.long
def test_an_encoder_and_a_decoder_in_zigzag_order_equal_one_device():
    config = translation.tiny(router=sl.experts.TopK(2))
    model = translation.Translation(config, rngs=nnx.Rngs(0))
    random = np.random.default_rng(0)
    batch = {
        "source": jnp.asarray(random.integers(0, config.vocab, (2, 16))),
        "target": jnp.asarray(random.integers(0, config.vocab, (2, 33))),
        "pad": jnp.zeros(2, int),
    }
    batch["source"] = batch["source"].at[:, 12:].set(0)

    def total(model, batch):
        return translation.loss(model, batch)[0].total

    with sl.unsharded():
        expected = nnx.jit(total)(model, batch)
    with sl.use(context("ring"), mesh_of("context=4")):
        found = nnx.jit(total)(model, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_experts_with_few_places_refuse_tokens_in_another_order():
    router = sl.experts.TopK(2, capacity=1.0)
    model = moe.MoE(moe.tiny(context=16, router=router), rngs=nnx.Rngs(0))
    refused = pytest.raises(ValueError, match="tokens are in zigzag order")
    with sl.use(context("ring"), mesh_of("context=4")), refused:
        jax.eval_shape(lambda tokens: model(tokens), jnp.zeros((2, 16), int))


@pytest.mark.representative("ring=2,ulysses=2,model=2-rules2")
@pytest.mark.long
@pytest.mark.parametrize(
    "mesh, rules",
    [
        ("data=2,context=4", sl.rules.data | context("ring")),
        ("data=2,context=2", sl.rules.data | context("ulysses")),
        (
            "ring=2,ulysses=2,model=2",
            sl.rules.data | sl.rules.tensor | context("usp", axis=("ring", "ulysses")),
        ),
    ],
)
def test_a_model_takes_each_form_by_rules_alone(mesh, rules):
    """Losses and parameters of a few steps, at stage 3 and with blocks computed again."""
    config = gpt.tiny(context=32)
    segments = np.sort(np.random.default_rng(1).integers(0, 3, (8, 33)))
    batch = batch_of(config) | {"segments": jnp.asarray(segments)}
    zero = sl.Zero(3, small=0)
    if "data" not in mesh:
        rules, zero = rules | sl.AxisRules(batch=None), sl.Zero(0)
    how = {"batch": batch, "steps": 3, "remat": "full"}
    found = train(config, mesh, rules, zero=zero, **how)
    alone = train(config, "data=1", sl.rules.data, zero=sl.Zero(3, small=0), **how)
    np.testing.assert_allclose(found.all_of("loss"), alone.all_of("loss"), rtol=2e-6)
    pairs = zip(
        jax.tree.leaves(found.state.params), jax.tree.leaves(alone.state.params), strict=True
    )
    for one, expected in pairs:
        np.testing.assert_allclose(np.asarray(one), np.asarray(expected), atol=2e-5)


@pytest.mark.parametrize(
    "rules, mesh, sizes, message",
    [
        (context("ulysses"), "context=8", {}, "An axis of 4 would do"),
        (context("ulysses"), "context=2", {"heads": 3, "key_heads": 3}, "An axis of 1 would do"),
        (
            context("usp", axis=("ulysses", "ring")).attention(ulysses="ulysses", ring="ring"),
            "ring=2,ulysses=2",
            {},
            "axes of a ring first",
        ),
    ],
)
def test_forms_refuse_heads_and_orders_that_do_not_fit(rules, mesh, sizes, message):
    arrays, _ = make(**sizes)
    with sl.use(rules, mesh_of(mesh)), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda arrays: attend(arrays, {}), arrays)


def test_a_ring_refuses_an_implementation_that_has_no_gradients_of_parts():
    arrays, _ = make()
    message = "in a ring over `context`: its backward pass"
    rules = sl.use(context("ring"), mesh_of("context=4"))
    with rules, pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda arrays: attend(arrays, {}, implementation="cudnn"), arrays)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: context("rings"), "ring"),
        (lambda: context("usp"), "takes two axes"),
        (lambda: context("ring", axis=["a"]), "several in a tuple"),
        (lambda: sl.AxisRules(seq="a").attention(a="spiral"), "gather"),
        (
            lambda: sl.AxisRules(seq="a").attention(b="ring").check_mesh({"a": 1, "b": 1}),
            "no rule uses the axis `b`",
        ),
    ],
)
def test_forms_that_are_not_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_forms_are_part_of_the_rules():
    rules = context("ring", order="sequence")
    assert rules.attention_form("context") == "ring"
    assert context("ring").attention_form("context") == "zigzag"
    assert rules != context("ulysses") and hash(rules) != hash(context("ulysses"))
    assert pickle.loads(pickle.dumps(rules)) == rules
    assert eval(repr(sl.AxisRules(seq="a").attention(a="ring")), {"AxisRules": sl.AxisRules}) == (
        sl.AxisRules(seq="a").attention(a="ring")
    )
    united = sl.rules.data | rules | sl.AxisRules(batch="data").indivisible(batch="drop")
    assert united.attention_form("context") == "ring"
    assert rules.indivisible(seq="replicate").attention_form("context") == "ring"


def test_prices_of_zero_count_frozen_parameters():
    """They are gathered as all others are, and have no gradients."""
    strategy = sl.Strategy(
        mesh="data=8", rules=sl.rules.data, zero=sl.Zero(1, small=0), frozen=("base",), accumulate=2
    )
    make = lambda: {"base": jnp.ones((64, 64)), "w": jnp.ones((64, 8))}
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    base, w = 64 * 64 * 4, 64 * 8 * 4
    found = {one.stage: one for one in prices(state, strategy)}
    assert found[1].sent_bytes == 7 / 8 * (base + 2 * w)
    assert found[2].sent_bytes == 7 / 8 * (base + 3 * w)
    assert found[3].sent_bytes == 7 / 8 * 2 * (2 * base + 3 * w)
    assert found[1].held_bytes == base + 2 * w
    assert found[3].held_bytes == w / 8
