"""Memory against recomputation, advice that is taken from it, and the largest microbatch."""

import dataclasses
import functools
import itertools
import re
import xml.etree.ElementTree

import jax
import jax.numpy as jnp
import optax
import pytest

import shardlib as sl
from shardlib._text import human_bytes
from shardlib.layouts._chain_schedules import Binomial
from shardlib.layouts._remat_text import remat_code, remat_words
from shardlib.planning._machine import memory_limit
from shardlib.planning._microbatch import search

LAYERS, WIDTH, ROWS = 4, 512, 1024
MATRIX_FLOPS = 2 * ROWS * WIDTH * WIDTH * 8  # a product of a layer, on all devices


def block(x, w):
    gate = sl.checkpoint_name(x @ w["gate"], "gate")
    up = sl.checkpoint_name(x @ w["up"], "up")
    return x + jnp.sin(gate) * up @ w["down"]


def loss(model, x, rng):
    marked = sl.remat(block)
    return jnp.mean(jax.lax.scan(lambda x, w: (marked(x, w), None), x, model)[0] ** 2)


def step_of(remat="full", mesh="data=8", rows=ROWS, dtype="float32", loss=loss, **options):
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, remat=remat, **options)
    make = lambda: dict.fromkeys(("gate", "up", "down"), jnp.zeros((LAYERS, WIDTH, WIDTH), dtype))
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    rows *= strategy.device_mesh.shape["data"]
    return sl.train_step(loss, strategy), state, jax.ShapeDtypeStruct((rows, WIDTH), dtype)


@functools.cache
def compiled_frontier():
    return sl.planning.frontier(*step_of("dots"), "cpu:8", compiled=True)


def total_of(remat, *, target="cpu:8", cache=None, **options):
    step = step_of(remat, sl.Target(target).mesh("data=8"), **options)
    return sl.plan(*step, target, cache=cache)


@pytest.mark.long
def test_points_are_what_plans_of_their_values_say():
    found = compiled_frontier()
    assert found.points[0].remat == "full" and found.points[-1].remat == "none"
    assert all(point.compiled for point in found.points)
    for point in (found.points[0], found.points[1], found.points[-1]):
        plan = total_of(point.remat)
        assert plan.memory.total_bytes == point.total_bytes
        assert plan.flops.recomputed == point.again_flops
        once = plan.flops.total - plan.flops.recomputed
        assert point.again_fraction == pytest.approx(point.again_flops / once)


@pytest.mark.long
def test_no_point_beats_another_one():
    points = compiled_frontier().points
    assert len(points) >= 4
    for less, more in itertools.pairwise(points[:-1]):
        assert less.total_bytes < more.total_bytes and less.again_flops > more.again_flops
    # What keeps all that spares products computes none again; everything is what is left.
    assert points[-2].again_flops == points[-1].again_flops == 0
    assert points[0].again_flops == 2 * LAYERS * MATRIX_FLOPS


@pytest.mark.long
def test_points_that_are_not_compiled_have_the_products_of_those_that_are():
    found = sl.planning.frontier(*step_of(), "cpu:8")
    again = {remat_code(point.remat): point.again_flops for point in compiled_frontier().points}
    assert [point.compiled for point in found.points] == [True, False, False, False, True, True]
    for point in found.points:
        assert again[remat_code(point.remat)] == point.again_flops
    first, last = found.points[0].total_bytes, found.points[-2].total_bytes
    assert all(first < point.total_bytes < last for point in found.points[1:-2])


def test_the_choice_that_fits_computes_the_least_again():
    found = compiled_frontier()
    for point in found.points[:-2]:
        assert found.fitting(point.total_bytes) == point
    assert found.fitting() == found.points[-1]
    assert found.fitting(found.points[-1].total_bytes - 1) == found.points[-2]
    least = human_bytes(found.points[0].total_bytes)
    with pytest.raises(ValueError, match=f"takes {least} of 1.0 MiB where blocks keep the least"):
        found.fitting("1MiB")


def test_values_are_written_as_python_that_makes_them():
    for point in compiled_frontier().points:
        assert eval(remat_code(point.remat), {"sl": sl}) == point.remat
    for value in (
        sl.Remat(products="all"),
        sl.Remat.slots(3),
        sl.Remat.drop("scores"),
        sl.Remat.save("a") | sl.Remat.offload("b", "c") | sl.Remat.compress("int8", "d"),
        sl.Remat.compress("int8", "a") | sl.Remat.compress("fp8", "b"),
        sl.Remat.save("a") | sl.Remat(products="without_batch"),
        sl.Remat.paths((r"a/\w+", "full"), ("b", sl.Remat.save("a")), rest="none"),
        sl.Remat.layers((2, sl.Remat.offload("a")), rest="full"),
        sl.Remat(),
    ):
        names = {"sl": sl, "Binomial": Binomial}
        assert eval(remat_code(value), names) == value


def test_values_are_said_in_few_words():
    value = sl.Remat.save("a") | sl.Remat.offload("b") | sl.Remat.compress("int8", "c")
    assert remat_words(value) == "a + b on the host + c as int8"
    by_path = sl.Remat.paths(("encoder/.*", "full"), rest="none")
    assert remat_words(by_path) == "inputs in encoder/.*, everything in the rest"


def test_a_picture_has_each_point_and_the_memory_of_the_target():
    found = dataclasses.replace(compiled_frontier(), usable_bytes=float(60 * 2**20))
    text = found.svg("a < b")
    root = xml.etree.ElementTree.fromstring(text)
    circles = [one for one in root if one.tag.endswith("circle")]
    assert len(circles) == len(found.points)
    told = [circle[0].text for circle in circles]
    size = human_bytes(found.points[-2].total_bytes)
    assert f"gate + up: {size}, 0.0%, compiled" in told
    words = [one.text for one in root if one.tag.endswith("text")]
    assert "a step may take 60.0 MiB" in words and "a < b" in words
    lines = str(found).splitlines()
    assert len(lines) == len(found.points) + 1
    assert re.search(rf"{size} +0.0% +compiled +too much +sl.Remat.save", lines[-2])


def test_a_frontier_of_what_has_none_is_refused():
    plain = lambda model, x, rng: jnp.mean((x @ model["gate"][0]) ** 2)
    with pytest.raises(ValueError, match="^`frontier` compares .* calls no such block"):
        sl.planning.frontier(*step_of("none", loss=plain), "cpu:8")


@pytest.mark.parametrize("limit", [0, 60, 61, 110, 400, 700, 701, 10**6])
@pytest.mark.parametrize("sums", [0, 35])
def test_a_search_finds_the_largest_that_fits(limit, sums):
    """On a line, where sums of several microbatches are on it or not."""
    sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    total = lambda size: 50 + 10 * size + sums * (size < 64)
    tried = search(sizes, limit, total)
    fitting = [size for size in sizes if total(size) <= limit]
    assert all(tried[size] == total(size) for size in tried)
    if not fitting:
        assert list(tried) == [1]
        return
    best = max(size for size in tried if tried[size] <= limit)
    assert best == fitting[-1] and len(tried) <= 5
    if best < 64:
        assert sizes[sizes.index(best) + 1] in tried


@functools.cache
def largest():
    step, state, batch = step_of("none", rows=4096, accumulate=2)
    return sl.planning.largest_microbatch(step, state, batch, "cpu:8", memory="120MiB")


@pytest.mark.long
def test_the_largest_microbatch_fits_and_the_next_does_not():
    found = largest()
    assert found.microbatch * found.accumulate == 4096
    plan = lambda accumulate: total_of("none", rows=4096, accumulate=accumulate)
    assert plan(found.accumulate).memory.total_bytes == found.total_bytes <= found.memory
    assert plan(found.accumulate // 2).memory.total_bytes > found.memory
    assert f"{found.microbatch} " in str(found) and "the largest that fits" in str(found)


def test_a_microbatch_that_cannot_fit_is_refused_with_what_to_change():
    step, state, batch = step_of("none")
    with pytest.raises(ValueError, match=r"with 1 example at a time.* MiB of 1.0 MiB.*zero=3"):
        sl.planning.largest_microbatch(step, state, batch, "cpu:8", memory="1MiB")
    with pytest.raises(ValueError, match='`memory="14GiB"`'):
        sl.planning.largest_microbatch(step, state, batch, "cpu:8")


def of_size(usable, monkeypatch):
    """A machine whose devices have so much memory."""
    chip = dataclasses.replace(sl.Target("cpu:8").chip, usable_bytes=usable, hbm_bytes=usable)
    monkeypatch.setattr(sl.Target, "chip", property(lambda self: chip))


def taken(advice):
    """The value that advice names."""
    (code,) = re.findall(r"Strategy\(remat=(.*?)\)` ", advice[1] if len(advice) > 1 else advice[0])
    return eval(code, {"sl": sl})


@pytest.mark.representative("dots")
@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_advice_where_a_step_does_not_fit_is_a_value_that_fits(remat, monkeypatch):
    usable = 57 * 2**20
    of_size(usable, monkeypatch)
    plan = total_of(remat)
    assert not plan.fits and "which fits" in "\n".join(plan.advice)
    value = taken([one for one in plan.advice if "which fits" in one])
    after = total_of(value)
    assert after.fits and after.flops.recomputed < 2 * LAYERS * MATRIX_FLOPS


@pytest.mark.long
def test_advice_where_memory_is_left_is_a_value_that_fits(monkeypatch):
    of_size(90 * 2**20, monkeypatch)
    plan = total_of("full")
    (advice,) = plan.advice
    free = human_bytes(90 * 2**20 - plan.memory.total_bytes)
    assert "Keep more" in advice and f"of the {free} that are free" in advice
    after = total_of(taken([advice]))
    assert after.fits and not after.flops.recomputed and not after.advice
    share = plan.flops.recomputed / plan.flops.total
    assert f"spares {share:.1%}" in advice


@pytest.mark.long
def test_advice_where_nothing_helps_says_what_is_still_too_much(monkeypatch):
    full = compiled_frontier().points[0].total_bytes
    usable = 20 * 2**20
    of_size(usable, monkeypatch)
    text = "\n".join(total_of("none").advice)
    takes, excess = human_bytes(full), human_bytes(full - usable)
    assert f'With `Strategy(remat="full")` it takes {takes}, still {excess} too much' in text
    assert "remat=" not in "\n".join(total_of("full").advice)


@pytest.mark.exhaustive
@pytest.mark.tpu_compiler
def test_advice_for_a_tpu_has_inputs_on_the_host_where_they_are_too_much(monkeypatch, tmp_path):
    def named(model, x, rng):
        marked = sl.remat(lambda x, w: block(sl.checkpoint_name(x, "block_in"), w))
        return jnp.mean(jax.lax.scan(lambda x, w: (marked(x, w), None), x, model)[0] ** 2)

    target = "tpu:v5e:2x4"
    options = {"rows": 32 * ROWS, "dtype": "bfloat16", "loss": named, "cache": tmp_path}
    plan = total_of("full", target=target, **options)
    inputs = 2 * 32 * ROWS * WIDTH
    usable = plan.memory.total_bytes - inputs
    chip = dataclasses.replace(sl.Target(target).chip, usable_bytes=usable)
    monkeypatch.setattr(sl.Target, "chip", property(lambda self: chip))
    advised = total_of("full", target=target, **options).advice
    value = taken([one for one in advised if "on the host" in one])
    assert value == sl.Remat.offload("block_in")
    after = total_of(value, target=target, **options)
    assert after.fits and after.memory.host_bytes == LAYERS * inputs


@pytest.mark.exhaustive
@pytest.mark.tpu_compiler
def test_advice_for_a_tpu_is_a_value_that_fits(monkeypatch, tmp_path):
    target, many = "tpu:v5e:2x4", {"rows": 32 * ROWS, "dtype": "bfloat16"}
    cache = {"cache": tmp_path}
    plan = total_of("full", target=target, **many, **cache)
    # As much more as both names take in half of the layers, twice: half of it may be spent.
    usable = plan.memory.total_bytes + 4 * LAYERS * 32 * ROWS * WIDTH
    chip = dataclasses.replace(sl.Target(target).chip, usable_bytes=usable)
    monkeypatch.setattr(sl.Target, "chip", property(lambda self: chip))
    advised = total_of("full", target=target, **many, **cache).advice
    value = taken([one for one in advised if "Keep more" in one])
    assert isinstance(value, type(sl.Remat.layers((1, "full"))))
    after = total_of(value, target=target, **many)
    assert after.memory.total_bytes <= usable and after.flops.recomputed < plan.flops.recomputed


def test_the_largest_microbatch_counts_all_devices_that_split_the_batch():
    """Some of the axes of the batch are left to the partitioner."""
    strategy = sl.Strategy(mesh="data=2,fsdp=4", rules=sl.rules.fsdp)
    state = sl.init(lambda: {"w": jnp.zeros((64, 64))}, optax.sgd(0.1), strategy, abstract=True)
    step = sl.train_step(lambda model, x, key: jnp.mean((x @ model["w"]) ** 2), strategy)
    batch = jax.ShapeDtypeStruct((512, 64), "float32")
    found = sl.planning.largest_microbatch(step, state, batch, memory="8MiB")
    assert (found.microbatch, found.accumulate) == (64, 1)


def test_more_memory_than_a_device_has_is_refused():
    with pytest.raises(ValueError, match=r"memory='99GiB'.*has 8.0 GiB"):
        memory_limit("largest_microbatch", "99GiB", 2**33)
    assert memory_limit("largest_microbatch", "2GiB", 2**33) == 2**31


def test_a_state_of_another_strategy_is_refused_whatever_the_target():
    rules, make = sl.rules.data, lambda: {"w": jnp.zeros((256, 256))}
    of_stage = lambda zero: sl.Strategy(mesh="data=8", rules=rules, zero=zero)
    split, whole = of_stage(sl.Zero(3, small=0)), of_stage(0)
    state = sl.init(make, optax.adam(0.1), split, abstract=True)
    step = sl.train_step(lambda model, x, key: jnp.mean((x @ model["w"]) ** 2), whole)
    batch = jax.ShapeDtypeStruct((64, 256), "float32")
    for function in (sl.plan, sl.planning.largest_microbatch, sl.planning.frontier):
        with pytest.raises(ValueError, match="`zero_axes` is .*there and .*here"):
            function(step, state, batch, "cpu:8")


def test_a_plan_is_asserted_of_without_another_target():
    step, state, batch = step_of("none")
    made = sl.plan(step, state, batch, "cpu:8")
    with pytest.raises(ValueError, match="a plan already, for cpu:8: leave"):
        sl.testing.assert_memory(made, at_most={"parameters": 2**30}, target="tpu:v5e:2x4")
