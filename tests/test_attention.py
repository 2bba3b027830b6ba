"""`sl.kernels.attention`: every implementation and every mask, beside plain JAX in float64."""

import functools
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    COTANGENTS,
    MASKS,
    attend,
    both_ways,
    check,
    compiled,
    finite,
    make,
    pattern,
    segments,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_ops import near
from kernel_programs import GPUS, attention_by_cudnn
from machines import compile_for, on_its_own

import shardlib as sl
from shardlib import kernels, testing
from shardlib.kernels import _attention, _choice
from shardlib.kernels._attention import _pairs, _tpu_blocks, _tpu_pattern
from shardlib.kernels._attention._mask import pattern_at
from shardlib.kernels._attention._options import checked_options

P = jax.P
RULES = sl.AxisRules(batch="data", heads="model", kv_heads="model", seq="seq", size="model")
IMPLEMENTATIONS = ["reference", "tpu_simulated"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of the reference so small that short sequences have several."""
    monkeypatch.setattr(_pairs, "BLOCK", 64)


TAKEN = list(itertools.product(IMPLEMENTATIONS, MASKS))


@pytest.mark.representative(
    "tpu_simulated-segments",
    "tpu_simulated-capped",
    "tpu_simulated-blocks of heads",
    "tpu_simulated-starts",
)
@pytest.mark.long
@pytest.mark.sentinel(
    "reference-causal",
    "reference-window",
    "reference-causal window",
    "reference-segments",
    "reference-two segments",
    "reference-capped",
    "reference-blocks",
    "reference-blocks of heads",
    "reference-starts",
)
@pytest.mark.parametrize(("implementation", "mask"), TAKEN)
def test_attention_matches_float64_for_every_mask(implementation, mask):
    check(make(256, 256), MASKS[mask], implementation)


@pytest.mark.representative("tpu_simulated-segments")
@pytest.mark.long
@pytest.mark.sentinel("reference-causal window")
@pytest.mark.parametrize(
    ("implementation", "mask"),
    [
        *(("reference", mask) for mask in MASKS),
        *(("tpu_simulated", mask) for mask in ("causal window", "segments", "blocks of heads")),
    ],
)
def test_attention_with_sinks_matches_float64_for_every_mask(implementation, mask):
    check(make(256, 256, sinks=True), MASKS[mask], implementation)


@pytest.mark.long("tpu_simulated-bfloat16")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_in_16_bits_matches_float64(implementation, dtype):
    if implementation != "reference" and dtype == "float16":
        with pytest.raises(ValueError, match="takes float32 and bfloat16.*not float16"):
            check(make(256, 256), {"causal": True}, implementation, dtype)
        return
    check(make(256, 256), {"causal": True}, implementation, dtype)


@pytest.mark.representative("64")
@pytest.mark.long
@pytest.mark.parametrize("size", [64, 80, 256])
def test_attention_by_tpu_kernels_takes_heads_of_any_size(size):
    arrays = make(128, 256, heads=2, groups=1, size=size)
    check(arrays, {"causal": True, "starts": (128, 0)}, "tpu_simulated", tolerance=3e-5)


@pytest.mark.exhaustive
@pytest.mark.long
def test_attention_by_the_reference_matches_float64_for_random_masks():
    @given(st.data())
    @settings(deadline=None, max_examples=8, derandomize=True)
    def drawn(data):
        draw = data.draw
        queries, keys = draw(st.integers(1, 200)), draw(st.integers(1, 200))
        groups = draw(st.sampled_from([1, 2, 4]))
        sizes = {"size": draw(st.integers(1, 9)), "value_size": draw(st.integers(1, 9))}
        arrays = make(queries, keys, 4, groups, **sizes, sinks=draw(st.booleans()))
        bound = st.none() | st.integers(0, 150)
        options = {
            "causal": draw(st.booleans()),
            "window": (draw(bound), draw(bound)),
            "starts": (draw(st.integers(0, 90)), draw(st.integers(0, 90))),
        }
        if draw(st.booleans()):
            options["segment_ids"] = (segments(queries), segments(keys, 1))
        if draw(st.booleans()):
            heads = draw(st.sampled_from([(), (4,)]))
            options["block_mask"] = pattern(*heads, 10, 8, size=37)
        check(arrays, options, "reference", tolerance=2e-5)

    drawn()


@pytest.mark.parametrize("mask", ["causal window", "blocks", "blocks of heads"])
def test_attention_takes_traced_start_positions(mask):
    arrays, options = make(100, 130), MASKS[mask]
    known = jax.jit(lambda: attend(arrays, {**options, "starts": (37, 20)}))()
    traced = jax.jit(lambda first, second: attend(arrays, {**options, "starts": (first, second)}))
    near(finite(traced(37, 20)), finite(known), 1e-6)


@pytest.mark.representative("window-starts1")
@pytest.mark.long
@pytest.mark.parametrize(
    ("mask", "starts"),
    [
        ("causal", (300, 0)),
        ("window", (64, 128)),
        ("segments", (0, 300)),
        ("blocks of heads", (0, 0)),
        ("blocks of heads", (64, 128)),
    ],
)
def test_attention_by_tpu_kernels_takes_traced_start_positions(mask, starts, monkeypatch):
    # Several blocks of queries and of keys, of which some are not seen.
    monkeypatch.setattr(_tpu_blocks, "BLOCKS", (_tpu_blocks.Blocks(128, 128),))
    arrays, options = make(256, 384), {**MASKS[mask], "implementation": "tpu_simulated"}
    if mask == "segments":
        options["segment_ids"] = (segments(256), segments(384, 1))
    if mask == "blocks of heads":
        options["block_mask"] = pattern(4, 9, 11)
    wanted = compiled(attend, arrays, {**options, "starts": starts}, COTANGENTS)
    traced = lambda starts: both_ways(attend, arrays, {**options, "starts": starts}, COTANGENTS)
    found = jax.jit(traced)((jnp.int32(starts[0]), jnp.int32(starts[1])))
    near(finite(found[0]), finite(wanted[0]), 1e-6, 1)
    near(found[1], wanted[1], 1e-6, 1)
    reference = {**options, "starts": starts, "implementation": "reference"}
    near(found[1], compiled(attend, arrays, reference, COTANGENTS)[1], 6e-6, 1)


@pytest.mark.representative("4")
@pytest.mark.long
@pytest.mark.parametrize("draw", range(7))
def test_attention_by_tpu_kernels_over_many_blocks_matches_float64(draw, monkeypatch):
    monkeypatch.setattr(_tpu_blocks, "BLOCKS", (_tpu_blocks.Blocks(128, 128),))
    options = (
        {"causal": True, "segment_ids": (segments(384), segments(384, 1))},
        {"window": (100, 30), "soft_cap": 2.0},
        {"causal": True, "starts": (200, 0), "window": (150, None)},
        {"segment_ids": (segments(384), segments(384, 1) + 1)},
        # Blocks of a pattern that are larger than a kernel's, that do not divide its, and so small
        # that a word has no bit for each.
        {"block_mask": pattern(4, 2, 2, size=200), "causal": True},
        {"block_mask": pattern(12, 11, size=50), "starts": (200, 130)},
        {"block_mask": pattern(384, 384, size=1), "segment_ids": segments(384)},
    )[draw]
    check(make(384, 384, value_size=24, sinks=draw % 2 == 0), options, "tpu_simulated")


@pytest.mark.long
def test_attention_by_tpu_kernels_sees_nothing_that_a_pattern_does_not_cover():
    arrays = make(256, 256, heads=2, groups=1, batch=1)
    blocks = kernels.BlockMask(np.ones((2, 3), bool), 64)
    covered = np.zeros((8, 8), bool)
    covered[:2, :3] = True
    starts = (jnp.int32(64), jnp.int32(100))
    run = lambda mask: attend(
        arrays, {"starts": starts, "block_mask": mask, "implementation": "tpu_simulated"}
    )
    found, wanted = (
        jax.jit(run, static_argnums=0)(mask) for mask in (blocks, kernels.BlockMask(covered, 64))
    )
    assert np.isfinite(wanted[1]).any() and not np.isfinite(wanted[1]).all()
    near(finite(found), finite(wanted), 1e-6, 1)


@pytest.mark.long
@given(st.data())
@settings(deadline=None, max_examples=10, derandomize=True)
def test_attention_pattern_bits_tell_which_keys_a_query_sees(data):
    draw = data.draw
    size, key_block = draw(st.integers(1, 300)), draw(st.sampled_from([128, 256]))
    starts = draw(st.integers(-200, 400)), draw(st.integers(-200, 400))
    rows, columns = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    blocks = pattern(2, rows, columns, size=size).pattern
    keys = _tpu_pattern.KeyBlocks(2, key_block)
    bits = _tpu_pattern.pattern_bits(jnp.asarray(blocks), size, jnp.array(starts), 64, keys)
    query, key = np.arange(64) + starts[0], np.arange(2 * key_block) + starts[1]
    wanted = np.asarray(pattern_at(jnp.asarray(blocks), size, jnp.asarray(query), jnp.asarray(key)))
    pairs = _tpu_pattern.seen_pairs(bits.words, 2)
    for head, block in itertools.product(range(2), range(2)):
        own = slice(block * key_block, (block + 1) * key_block)
        seen = _tpu_pattern.seen_by_bits(bits.words[head, block], bits.bits[own, None])
        np.testing.assert_array_equal(seen.T, wanted[head, :, own])
        any_seen = wanted[head, :, own].reshape(2, -1).any(1)
        assert (any_seen <= pairs[head, :, block]).all()


@pytest.mark.representative("window1")
@pytest.mark.long
@pytest.mark.parametrize("window", [(None, 2**31 - 2), (2**31 - 2, 0), (2**30, 2**30)])
def test_attention_by_tpu_kernels_takes_window_bounds_near_the_int32_limit(window, monkeypatch):
    monkeypatch.setattr(_tpu_blocks, "BLOCKS", (_tpu_blocks.Blocks(128, 128),))
    arrays = make(256, 256)
    traced = {"starts": (jnp.int32(0), jnp.int32(0)), "window": window}
    found = compiled(attend, arrays, {**traced, "implementation": "tpu_simulated"}, COTANGENTS)
    near(found, compiled(attend, arrays, {**traced, "starts": (0, 0)}, COTANGENTS), 6e-6, 1)


@pytest.mark.long
def test_attention_over_parts_of_the_keys_combines_by_log_sum_exp():
    arrays = make(100, 130)

    def combined(arrays):
        parts = []
        for first, last in ((0, 64), (64, 130)):
            k, v = arrays["k"][:, first:last], arrays["v"][:, first:last]
            options = {"causal": True, "starts": (20, first)}
            parts.append(attend({"q": arrays["q"], "k": k, "v": v}, options))
        (one, lse), (other, other_lse) = parts
        together = jnp.logaddexp(lse, other_lse)
        shares = (jnp.exp(part - together)[..., None] for part in (lse, other_lse))
        return sum(share * y for share, y in zip(shares, (one, other), strict=True)), together

    @functools.partial(jax.jit, static_argnums=0)
    def both(function, arrays):
        results, back = jax.vjp(function, arrays)
        return results, back(cotangents)[0]

    whole = lambda arrays: attend(arrays, {"causal": True, "starts": (20, 0)})
    cotangents = COTANGENTS[0][:, :100], COTANGENTS[1][:, :100]
    near(both(combined, arrays), both(whole, arrays), 2e-6)


@pytest.mark.long
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_under_vmap_and_scan_matches_a_loop(implementation):
    arrays = jax.tree.map(lambda *each: np.stack(each), *(make(128, n) for n in (128, 128)))
    arrays["k"][1] *= 2
    options = {"causal": True, "implementation": implementation}

    def loss(arrays):
        y, lse = attend(arrays, options)
        return (y**2).sum() + lse.sum()

    one = jax.jit(jax.value_and_grad(loss))
    wanted = jax.tree.map(
        lambda *each: np.stack(each),
        *(one(jax.tree.map(lambda x, k=k: x[k], arrays)) for k in range(2)),
    )
    near(jax.jit(jax.vmap(one))(arrays), wanted, 2e-6)
    scanned = jax.jit(lambda arrays: jax.lax.scan(lambda _, x: (None, one(x)), None, arrays)[1])
    near(scanned(arrays), wanted, 2e-6)


@pytest.mark.long("tpu_simulated-options0", "tpu_simulated-options1")
@pytest.mark.parametrize("options", [{}, {"segment_ids": (np.zeros((2, 128), int),) * 2}])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_nan_reaches_only_the_queries_that_see_it(implementation, options):
    arrays = make(128, 128)
    arrays["q"][0, 5, 1], arrays["k"][1, 100, 0] = np.nan, np.nan
    options = {"causal": True, "implementation": implementation} | options
    y, lse = jax.jit(lambda arrays: attend(arrays, options))(arrays)
    bad = np.zeros(y.shape[:3], bool)
    bad[0, 5, 1] = bad[1, 100:, :2] = True
    np.testing.assert_array_equal(np.isnan(lse), bad)
    np.testing.assert_array_equal(np.isnan(y).any(-1), bad)


WHOLE, SPLIT = ("batch", None, "heads", None), ("batch", "seq", "heads", None)
LAYOUTS = {
    "heads": ("data=2,model=4,seq=1", WHOLE, None, 4, {}),
    "few key heads": ("data=2,model=4,seq=1", WHOLE, None, 2, {}),
    "one key head": ("data=2,model=4,seq=1", WHOLE, None, 1, {}),
    "whole key heads": ("data=2,model=4,seq=1", WHOLE, ("batch", None, None, None), 8, {}),
    "positions": ("data=2,model=2,seq=2", SPLIT, None, 4, {"all-gather", "reduce-scatter"}),
    "positions of queries": ("data=2,model=2,seq=2", SPLIT, WHOLE, 4, {}),
}
WHERE = {
    "automatic": ((), False),
    "in a step": (("data",), False),
    "in a checked step": (("data", "model"), True),
    "own": (("data", "model", "seq"), False),
    "own, checked": (("data", "model", "seq"), True),
}


# Each layout in some of the places where it may be, and each place with some layouts.
PLACES = (
    ("heads", "in a step"),
    ("heads", "own, checked"),
    ("few key heads", "automatic"),
    ("few key heads", "in a step"),
    ("one key head", "automatic"),
    ("whole key heads", "in a checked step"),
    ("positions", "automatic"),
    ("positions", "in a step"),
    ("positions of queries", "own"),
    ("positions of queries", "automatic"),
)


@pytest.mark.representative(
    "heads-in a checked step",
    "few key heads-in a step",
    "one key head-own",
    "whole key heads-own, checked",
    "positions-own, checked",
)
@pytest.mark.long
@pytest.mark.sentinel(
    "whole key heads-in a checked step", "positions-in a step", "positions of queries-automatic"
)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_on_shards_matches_one_device(layout, where):
    check_on_shards(layout, where, "reference")


@pytest.mark.representative("heads-own, checked", "positions-in a step")
@pytest.mark.long
@pytest.mark.parametrize(("layout", "where"), PLACES)
def test_attention_by_tpu_kernels_on_shards_matches_one_device(layout, where):
    check_on_shards(layout, where, "tpu_simulated")


@pytest.mark.representative("few key heads-in a step", "positions of queries-automatic")
@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "where"), [place for place in PLACES if place[1] != "in a checked step"]
)
def test_attention_on_shards_can_be_differentiated_by_jax(layout, where, monkeypatch):
    reference = replace(_attention.IMPLEMENTATIONS[0], differentiable=True)
    monkeypatch.setattr(_attention, "IMPLEMENTATIONS", (reference,))
    check_on_shards(layout, where, "reference")


def check_on_shards(layout, where, implementation):
    """Values and gradients on a mesh beside those of one device."""
    shape, names, kv_names, groups, _ = LAYOUTS[layout]
    manual, checked = WHERE[where]
    if manual and kv_names is None and groups < 4:
        kv_names = (*names[:2], None, None)  # what is whole in manual code, its names say
    length = 96
    if implementation != "reference":
        # In whole tiles on each device.
        length = 256 if "seq" in names else 128
    arrays = make(length, length, 8, groups, sinks=True)
    ids = segments(length)
    random = np.random.default_rng(3)
    cotangents = random.normal(size=arrays["q"].shape), random.normal(size=(2, length, 8))
    cotangents = jax.tree.map(np.float32, cotangents)
    options = {"causal": True, "implementation": implementation}
    wanted = compiled(attend, arrays, {**options, "segment_ids": ids}, cotangents)
    specs = {"q": spec_of(names, manual), "k": spec_of(kv_names or names, manual)}
    specs |= {"v": specs["k"], "sinks": spec_of(names[2:3], manual)}
    lse_spec, ids_specs = spec_of(names[:3], manual), spec_of(names[:2], manual)
    if (kv_names or names)[1] != names[1]:
        # Where a device has other queries than keys, their segments are two arrays.
        ids, ids_specs = (ids, ids), (ids_specs, spec_of(kv_names[:2], manual))

    def run(arrays, ids, cotangents):
        named = {**options, "segment_ids": ids, "names": names, "kv_names": kv_names}
        results, gradients = both_ways(attend, arrays, named, cotangents)
        if not checked:
            for name, spec in specs.items():
                rest = tuple(axis for axis in manual if axis not in jax.tree.leaves(tuple(spec)))
                gradients[name] = jax.lax.psum(gradients[name], rest) if rest else gradients[name]
        return results, gradients

    if manual:
        run = jax.shard_map(
            run,
            in_specs=(specs, ids_specs, (specs["q"], lse_spec)),
            out_specs=((specs["q"], lse_spec), specs),
            axis_names=set(manual),
            check_vma=checked,
        )
    mesh = sl.make_mesh(shape)
    with sl.use(RULES, mesh):
        automatic = set(mesh.axis_names) - set(manual)
        refusal = why_not(implementation, names, automatic, checked)
        if refusal:
            with pytest.raises(ValueError, match=refusal):
                jax.jit(run)(arrays, ids, cotangents)
            return
        found = jax.jit(run)(arrays, ids, cotangents)
    near(found, wanted, 4e-6)
    if not manual:
        expected = jax.NamedSharding(mesh, spec_of(names, mesh.axis_names))
        assert found[0][0].sharding.is_equivalent_to(expected, 4)


def spec_of(names, manual):
    axes = (None if name is None else RULES[name][0] for name in names)
    return P(*(axis if axis in manual else None for axis in axes))


def why_not(implementation, names, automatic, checked):
    """Why the kernel cannot run there; None if it can."""
    if implementation == "reference":
        return None
    if implementation == "tpu_simulated":
        return "is known to differ" if checked and not automatic else None
    if "seq" in names:
        return "positions that are known before the program runs"
    return "keeps no account of what differs between devices" if checked else None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_on_shards_exchanges_only_what_devices_lack(layout):
    shape, names, kv_names, groups, kinds = LAYOUTS[layout]
    mesh = sl.make_mesh(shape)
    arrays = make(64, 64, 8, groups)

    def loss(arrays):
        return kernels.attention(**arrays, names=names, kv_names=kv_names, causal=True).sum()

    axes = {"q": names, "k": kv_names or names, "v": kv_names or names}
    if kv_names is None and groups < 4:
        axes |= {"k": (*names[:2], None, None), "v": (*names[:2], None, None)}
    shaped = {
        name: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec_of(axes[name], mesh.axis_names))
        )
        for name, x in arrays.items()
    }
    with sl.use(RULES, mesh):
        forward = compile_for(mesh, jax.jit(loss).lower(shaped))
        both = compile_for(mesh, jax.jit(jax.grad(loss)).lower(shaped))
    gathers = [one for one in testing.collectives(forward, mesh) if one.kind == "all-gather"]
    assert len(gathers) == (2 if kinds else 0), "keys and values, once each"
    found = {one.kind for one in testing.collectives(both, mesh)}
    # Gradients to keys that several devices have are summed; and nothing else is sent.
    shared = {"few key heads", "one key head", "whole key heads", "positions of queries"}
    assert found == (set(kinds) or ({"all-reduce"} if layout in shared else set()))


def test_attention_memory_is_linear_in_the_sequence_length(monkeypatch):
    monkeypatch.undo()

    def bytes_of(length):
        shapes = {"q": (1, length, 2, 64), "k": (1, length, 1, 64), "v": (1, length, 1, 64)}
        arrays = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
        loss = lambda arrays: kernels.attention(**arrays, causal=True).sum()
        memory = jax.jit(jax.grad(loss)).lower(arrays).compile().memory_analysis()
        return memory.temp_size_in_bytes + memory.argument_size_in_bytes

    assert bytes_of(32_768) <= 4.2 * bytes_of(8192)


CASES = {
    "causal": ({"causal": True}, 128),
    "small heads": ({"causal": True}, 64),
    "window, capped": ({"causal": True, "window": (300, None), "soft_cap": 30.0}, 256),
    "blocks": ({"block_mask": kernels.bigbird_blocks(2048, 256)}, 80),
    "segments, sinks": (
        {"segment_ids": np.zeros((2, 2048), np.int32), "sinks": np.ones(8, np.float32)},
        64,
    ),
    "large heads": ({"causal": True}, 384),
}


# Each case on two kinds of TPUs, and each kind with half of the cases.
ON_TPUS = ("tpu:v4:2x2x1", "tpu:v5e:2x2", "tpu:v5p:2x2x1", "tpu:v6e:2x2")


@pytest.mark.representative(
    "small heads-tpu:v5e:2x2", "window, capped-tpu:v5p:2x2x1", "segments, sinks-tpu:v4:2x2x1"
)
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("case", "target"),
    [
        (case, target)
        for (i, case), (j, target) in itertools.product(enumerate(CASES), enumerate(ON_TPUS))
        if (i + j) % 2 == 0
    ],
)
def test_attention_compiles_for_tpu_without_storing_its_scores(case, target):
    options, size = CASES[case]
    mesh = sl.Target(target).mesh("data=2,model=2,seq=1")

    def absent(heads):
        sharding = jax.NamedSharding(mesh, P("data", None, "model"))
        return jax.ShapeDtypeStruct((2, 2048, heads, size), "bfloat16", sharding=sharding)

    def loss(q, k, v):
        y = kernels.attention(q, k, v, names=WHOLE, **options, implementation="tpu")
        return y.astype(jnp.float32).sum()

    with sl.use(RULES, mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(absent(8), absent(2), absent(2))
        compiled = compile_for(mesh, lowered)
    assert not testing.collectives(compiled, mesh)
    assert compiled.as_text().count("tpu_custom_call") >= 3, "forward, and two backward"
    scores = 4 * 2048 * 2048 * 2  # of one device, in two bytes
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 2


@pytest.mark.representative("True-tpu:v4:2x2x1")
@pytest.mark.sentinel("False-tpu:v5e:2x2")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize(
    ("checked", "target"), list(zip([True, False, False, True], ON_TPUS, strict=True))
)
def test_attention_over_sharded_positions_compiles_to_tpu_kernels(checked, target):
    mesh = sl.Target(target).mesh("data=1,model=1,seq=-1")
    shapes = [(2, 1024 * mesh.size, heads, 64) for heads in (4, 2, 2)]
    arrays = [
        jax.ShapeDtypeStruct(shape, "bfloat16", sharding=jax.NamedSharding(mesh, P(None, "seq")))
        for shape in shapes
    ]

    def loss(q, k, v):
        y = kernels.attention(q, k, v, names=SPLIT, causal=True, implementation="tpu")
        return jnp.square(y.astype(jnp.float32))

    both = lambda q, k, v: jax.grad(lambda *arrays: loss(*arrays).sum(), (0, 1, 2))(q, k, v)
    if checked:
        split = P(None, "seq")
        both = jax.shard_map(both, in_specs=split, out_specs=split, axis_names=set(mesh.axis_names))
    with sl.use(RULES, mesh):
        compiled = compile_for(mesh, jax.jit(both).lower(*arrays))
    kinds = {one.kind for one in testing.collectives(compiled, mesh)}
    assert kinds == {"all-gather", "reduce-scatter"}
    assert compiled.as_text().count("tpu_custom_call") >= 3, "forward, and two backward"


@pytest.mark.parametrize("target", GPUS)
def test_attention_by_cudnn_compiles_for_gpu(target):
    assert on_its_own(target, attention_by_cudnn) == ["", "", "", "Backward", "Backward"]


Q = jnp.zeros((2, 128, 4, 8))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.attention(Q, Q[:, :, :3], Q[:, :, :3]), "4 heads on a device and 3 key"),
        (lambda: kernels.attention(Q, Q[..., :4], Q), "queries and keys have heads of one size"),
        (lambda: kernels.attention(Q[0], Q, Q), "the dims (batch, positions, heads, size)"),
        (lambda: kernels.attention(Q, Q.astype("bfloat16"), Q), "all of one dtype"),
        (lambda: kernels.attention(Q, Q[:, 28:], Q[:, 28:], causal=True), "`starts=(0, 28)`"),
        (lambda: kernels.attention(Q, Q, Q, window=(1, 2, 3)), "`(left, right)`"),
        (lambda: kernels.attention(Q, Q, Q, window=-1), "takes a whole number, or two"),
        (lambda: kernels.attention(Q, Q, Q, segment_ids=jnp.zeros((2, 5), int)), "int32[2, 5]"),
        (lambda: kernels.attention(Q, Q, Q, segment_ids=Q[..., 0, 0]), "float32[2, 128]"),
        (lambda: kernels.attention(Q, Q, Q, soft_cap=0), "soft_cap=0"),
        (lambda: kernels.attention(Q, Q, Q, scale=jnp.ones(())), "a Python number"),
        (lambda: kernels.attention(Q, Q, Q, sinks=jnp.zeros(3)), "each of the 4 heads"),
        (lambda: kernels.attention(Q, Q, Q, block_mask=pattern(1, 1)), "covers 64 positions of q"),
        (lambda: kernels.attention(Q, Q, Q, block_mask=pattern(3, 2, 2)), "patterns for 3 heads"),
        (lambda: kernels.attention(Q, Q, Q, block_mask=np.ones((2, 2))), "`sl.kernels.BlockMask`"),
        (lambda: kernels.attention(Q, Q, Q, starts=(0, 0.5)), "two whole numbers"),
        (lambda: kernels.attention(Q, Q, Q, starts=(0, 2**31)), "at most 2,147,483,519"),
        (lambda: kernels.attention(Q, Q, Q, names=WHOLE), "outside any rules"),
        (lambda: kernels.attention(Q, Q, Q, kv_names=WHOLE), "name the dims of `q` too"),
        (lambda: kernels.attention(Q, Q, Q, implementation="tpu"), "is a kernel for TPUs"),
        (lambda: kernels.attention(Q, Q, Q, implementation="flash"), "there are `reference`, `tpu"),
        (
            lambda: kernels.attention(
                Q[:, :100], Q[:, :100], Q[:, :100], implementation="tpu_simulated"
            ),
            "100 queries on a device; pad them to 128",
        ),
        (lambda: kernels.BlockMask(np.ones((2, 2)), 8), "bools of NumPy"),
        (lambda: kernels.longformer_blocks(64, 8, window=2), "an odd number of blocks"),
        (lambda: kernels.longformer_blocks(2**31, 8), "that is 268,435,456 blocks"),
        (lambda: kernels.fixed_blocks(64, 8, local=2, summaries=3), "summaries=3"),
    ],
)
def test_attention_refuses_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


HALF = jnp.zeros((2, 128, 4, 64), "bfloat16")


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (HALF.astype("float32"), {}, "attends in bfloat16 or float16; not float32"),
        (jnp.tile(HALF, 4), {}, "of at most 128; here 256"),
        (HALF, {"causal": True, "starts": (0, 5)}, "start at one position"),
        (HALF, {"soft_cap": 5.0, "with_lse": True}, "no soft cap and no log-sum-exp"),
        (HALF, {"segment_ids": jnp.zeros((2, 128), int)}, "has no segments"),
        (HALF, {"window": (3, 3)}, "a window to the left of a causal one"),
        (HALF, {"window": (3, 0)}, None),
        (HALF, {"causal": True}, None),
    ],
)
def test_attention_by_cudnn_explains_what_it_cannot_do(x, options, message, monkeypatch):
    monkeypatch.setattr(_attention, "device_here", lambda: _choice.Device("gpu", "NVIDIA X"))
    (call,) = kernels.explain(functools.partial(kernels.attention, **options), x, x, x).calls
    said = dict(call.others)["cudnn"]
    assert (message or "can; neither measured nor compiled") in said


def test_attention_by_cudnn_needs_values_of_the_size_of_keys(monkeypatch):
    monkeypatch.setattr(_attention, "device_here", lambda: _choice.Device("gpu", "NVIDIA X"))
    (call,) = kernels.explain(kernels.attention, HALF, HALF, jnp.tile(HALF, 2)).calls
    assert "takes values of the size of keys; here 128 and 64" in dict(call.others)["cudnn"]


@pytest.mark.parametrize(
    ("names", "kv_names", "message"),
    [
        (("batch", None, None, "size"), WHOLE, "the last dim of `q` is split over `model`"),
        (WHOLE, (None, None, "heads", None), "the batch of `q` is split over `data`"),
        (WHOLE, SPLIT, "the positions of `k` are split over `seq`"),
        (("batch", None, None, None), WHOLE, "devices would lack the key heads"),
    ],
)
def test_attention_refuses_layouts_in_which_a_device_lacks_data(names, kv_names, message):
    with (
        sl.use(RULES, sl.make_mesh("data=2,model=2,seq=2")),
        pytest.raises(ValueError, match=message),
    ):
        kernels.attention(Q, Q, Q, names=names, kv_names=kv_names)


@pytest.mark.long
def test_attention_is_zero_when_no_query_sees_a_key():
    options = {"causal": True, "window": (3, None), "starts": (500, 0)}
    for implementation in IMPLEMENTATIONS:
        check(make(128, 128), options, implementation)


@pytest.mark.long
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_with_query_blocks_that_see_no_key_matches_float64(implementation):
    options = {"causal": True, "window": (3, None), "starts": (0, 0)}
    check(make(1152, 384, heads=2, groups=1, batch=1), options, implementation)


def test_attention_of_empty_keys_or_queries_is_zero_or_empty():
    y, lse = kernels.attention(Q, Q[:, :0], Q[:, :0], with_lse=True)
    assert not y.any() and y.shape == Q.shape and (lse == -jnp.inf).all()
    assert kernels.attention(Q[:, :0], Q, Q).shape == (2, 0, 4, 8)


def test_attention_without_keys_returns_the_log_sum_exp_of_its_sinks():
    sinks = jnp.arange(4.0)
    attend_sinks = lambda sinks: kernels.attention(
        Q, Q[:, :0], Q[:, :0], sinks=sinks, with_lse=True
    )
    (y, lse), back = jax.vjp(attend_sinks, sinks)
    assert not y.any()
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks, lse.shape))
    np.testing.assert_array_equal(back((y, jnp.ones_like(lse)))[0], np.full(4, Q[..., 0, 0].size))


def test_attention_with_values_of_size_zero_returns_log_sum_exp():
    _, wanted = kernels.attention(Q, Q, Q, with_lse=True)
    y, lse = kernels.attention(Q, Q, Q[..., :0], with_lse=True)
    assert y.shape == (2, 128, 4, 0)
    near(lse, wanted, 1e-6, 1)


@pytest.mark.long(
    *(f"tpu_simulated-{bound}" for bound in (127, 2**31, 2**63 - 1)), "tpu_simulated-2147483647"
)
@pytest.mark.parametrize("bound", [127, 2**31 - 1, 2**31, 2**63 - 1])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_window_wider_than_the_sequence_hides_nothing(implementation, bound):
    arrays = make(128, 128, batch=1)
    wanted = attend(arrays, {"implementation": implementation})
    found = attend(arrays, {"implementation": implementation, "window": bound})
    near(found, wanted, 1e-6, 1)


def test_attention_wide_window_at_traced_positions_hides_nothing():
    arrays = make(128, 128, batch=1)
    starts = (jnp.int32(2**30), jnp.int32(5))
    found = attend(arrays, {"starts": starts, "window": (2**40, 2**40)})
    near(found, attend(arrays, {}), 1e-6, 1)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_sink_of_minus_infinity_takes_no_part(implementation):
    arrays = make(128, 128, sinks=True)
    arrays["sinks"][1] = -np.inf
    ids = np.zeros((2, 128), int)
    # The first twenty queries see no key.
    options = {"segment_ids": (ids - (np.arange(128) < 20), ids)}
    y, lse = attend(arrays, {**options, "implementation": implementation})
    assert not y[:, :20].any()
    assert (lse[:, :20, 1] == -np.inf).all() and np.isfinite(lse[:, :20, 0]).all()


@pytest.mark.long("tpu_simulated")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_gradients_stay_finite_with_infinite_log_sum_exp(implementation):
    arrays = make(128, 128)
    ids = np.zeros((2, 128), int)
    options = {"segment_ids": (ids - (np.arange(128) < 20), ids), "implementation": implementation}

    def loss(arrays):
        y, lse = attend(arrays, options)
        # As two results are combined of which neither has seen a key.
        both = jnp.logaddexp(lse, lse)
        return y.sum() + jnp.where(jnp.isfinite(both), both, 0).sum()

    gradients = jax.jit(jax.grad(loss))(arrays)
    assert all(np.isfinite(x).all() for x in gradients.values())


def test_attention_compares_all_bits_of_64_bit_segment_ids():
    ids = np.zeros((2, 128), np.int64)
    ids[:, 64:] = 2**32
    options = {"segment_ids": ids, "with_lse": True}
    with jax.enable_x64():
        found = kernels.attention(Q, Q, Q, **options)
        with pytest.raises(ValueError, match="not int64"):
            kernels.attention(Q, Q, Q, **options, implementation="tpu_simulated")
    near(found, kernels.attention(Q, Q, Q, segment_ids=ids // 2**32, with_lse=True), 1e-6, 1)


UPPER = np.triu(np.ones((2, 2), bool), 1)
ONE_EMPTY = np.stack([np.ones((2, 2), bool), np.zeros((2, 2), bool)])


@pytest.mark.representative("reference-2-options0", "tpu_simulated-2-options1")
@pytest.mark.long
@pytest.mark.parametrize(
    ("heads", "options"),
    [
        # A band and a pattern that each leave something, and together nothing.
        (2, {"causal": True, "block_mask": kernels.BlockMask(UPPER, 64)}),
        (2, {"block_mask": kernels.BlockMask(ONE_EMPTY, 64)}),
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_mask_may_hide_every_key_of_a_head(implementation, heads, options):
    check(make(128, 128, heads=heads, groups=1), options, implementation)


@pytest.mark.long
def test_attention_by_tpu_kernels_refuses_a_pattern_with_too_many_pairs(monkeypatch):
    monkeypatch.setattr(_tpu_blocks, "BLOCKS", (_tpu_blocks.Blocks(128, 128),))
    monkeypatch.setattr(_tpu_blocks, "MOST_TABLE_ENTRIES", 15)
    options = {"block_mask": pattern(4, 4, 4), "implementation": "tpu_simulated"}
    with pytest.raises(ValueError, match="that of 4 heads, 256 queries and 256 keys has more"):
        attend(make(256, 256), options)
    attend(make(256, 256), {**options, "block_mask": pattern(4, 4)})
    monkeypatch.setattr(_tpu_blocks, "MOST_BLOCKS", 1)
    with pytest.raises(ValueError, match="blocks in a row on a device"):
        attend(make(256, 256), {**options, "block_mask": pattern(4, 4)})


def test_attention_pattern_takes_the_blocks_whose_table_fits(monkeypatch):
    # Of a sparse pattern small blocks compute least.
    monkeypatch.setattr(
        _tpu_blocks, "BLOCKS", (_tpu_blocks.Blocks(512, 512), _tpu_blocks.Blocks(128, 128))
    )
    monkeypatch.setattr(_tpu_blocks, "EMPTY_STEP_COST", 0)
    blocks = kernels.BlockMask(np.broadcast_to(np.eye(4, dtype=bool), (4, 4, 4)), 128)
    x = jnp.zeros((1, 512, 4, 8))
    definition = checked_options({"block_mask": blocks}, (x, x), (x.shape, x.shape)).definition
    chosen = functools.partial(
        _tpu_blocks.pattern_blocks,
        list(_tpu_blocks.BLOCKS),
        _tpu_blocks.Lengths(512, 512),
        definition,
    )
    assert chosen(4).outer == 128
    monkeypatch.setattr(_tpu_blocks, "MOST_TABLE_ENTRIES", 63)
    assert chosen(4).outer == 512


@pytest.mark.representative("tpu:v4:1x1x1")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("target", ["tpu:v4:1x1x1", "tpu:v6e:1x1"])  # of the least and most room
def test_attention_pattern_with_the_largest_table_compiles_for_tpu(target):
    mesh = sl.Target(target).mesh("data=-1")
    one = kernels.bigbird_blocks(65_536, 128)
    rules, names = sl.AxisRules(batch="data"), ("batch", None, None, None)
    with sl.use(rules, mesh):
        room = _tpu_blocks.vmem_bytes(_choice.device_here().kind)
    # As many heads with a pattern each as the table holds pairs of the largest blocks that fit.
    heads = 16 if room < 16 * 2**20 else 32
    options = {"block_mask": kernels.BlockMask(np.stack([one.pattern] * heads), 128)}
    sharding = jax.NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((mesh.size, 65_536, heads, 64), "bfloat16", sharding=sharding)

    def loss(q, k, v):
        y = kernels.attention(q, k, v, names=names, **options, implementation="tpu")
        return y.astype(jnp.float32).sum()

    with sl.use(rules, mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x)
        compiled = compile_for(mesh, lowered)
    assert compiled.as_text().count("tpu_custom_call") >= 3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("options", [{"sinks": np.full(4, 2.5e38, "f")}, {"soft_cap": 3e38}])
def test_attention_with_scores_near_the_largest_number_is_finite(options, implementation):
    arrays = make(128, 128)
    sinks = options.get("sinks")
    if sinks is not None:
        arrays["sinks"] = sinks
    caps = {name: x for name, x in options.items() if name == "soft_cap"}
    y, lse = attend(arrays, {**caps, "implementation": implementation})
    assert np.isfinite(y).all() and np.isfinite(lse).all()


def test_attention_block_patterns_follow_their_papers():
    assert kernels.bigbird_blocks(640, 64, random=0) == kernels.longformer_blocks(640, 64)
    drawn = [kernels.bigbird_blocks(640, 64, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2] and hash(drawn[0]) == hash(drawn[1])
    assert (drawn[0].pattern.sum(1)[2:9] == 5).all(), "three around, the first, and one at random"
    fixed = kernels.fixed_blocks(600, 64, local=3).pattern
    assert fixed[:, 2::3].all() and fixed.shape == (10, 10)


@pytest.mark.tpu_compiler
@pytest.mark.sentinel
def test_attention_kernel_choice_on_tpu_follows_compiled_programs():
    mesh = sl.Target("tpu:v5p:2x2x1").mesh("data=4")
    x = jax.ShapeDtypeStruct((4, 8192, 8, 128), "bfloat16")
    call = functools.partial(kernels.attention, names=("batch", None, None, None), causal=True)
    with sl.use(sl.AxisRules(batch="data"), mesh):
        (explained,) = kernels.explain(call, x, x, x).calls
        (odd,) = kernels.explain(
            call, *[jax.ShapeDtypeStruct((4, 100, 8, 8), "bfloat16")] * 3
        ).calls
    assert explained.task.startswith("q: bfloat16[1, 8192, 8, 128], k: ")
    assert (explained.runs, explained.decided_by) == ("tpu", "compiled")
    others = dict(explained.others)
    assert others["reference"] == "can; no faster here, by what the compiler estimates"
    assert others["cudnn"].startswith("is a kernel for GPUs")
    assert odd.runs == "reference" and "pad them to 128" in dict(odd.others)["tpu"]
