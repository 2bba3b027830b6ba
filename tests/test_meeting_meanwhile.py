"""Meetings whose moves are sent while the next step computes, held to a plain simulation."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from machines import compile_for, mesh_on

import shardlib as sl
from shardlib import testing
from shardlib.collectives import DiLoCo, ElasticAveraging, LocalSGD, OneBit, PowerSGD, Quantised
from shardlib.collectives._fragments import fragments

RULES = sl.AxisRules(batch=("pod", "data"), embed=None, mlp="model", layers=None)
NAMES = {
    "stack": ("layers", "embed", "mlp"),
    "down": ("mlp", "embed"),
    "bias": (None,),
    "scale": ("mlp",),
}
PODS = "pod=2,data=2,model=2"
# Adam would make much of rounding where gradients are small.
OPTIMIZER = optax.sgd(1e-2, momentum=0.9)
STEPS = 8


def values():
    random = np.random.default_rng(0)
    shapes = {"stack": (3, 8, 16), "down": (16, 8), "bias": (5,), "scale": (16,)}
    return {n: 0.3 * random.normal(size=shape).astype("f4") for n, shape in shapes.items()}


def make(dtype="f4"):
    return sl.annotate({n: jnp.asarray(value, dtype) for n, value in values().items()}, NAMES)


def loss(model, x, rng):
    for layer in range(3):
        x = x + jnp.tanh(x @ model["stack"][layer] * model["scale"]) @ model["down"]
    return jnp.mean((x - 1) ** 2) + jnp.mean((x[:, :5] - model["bias"]) ** 2)


def batch(step):
    return np.random.default_rng(step).normal(size=(16, 8)).astype("f4")


def run(strategy, steps=STEPS, state=None, dtype="f4"):
    state = state or sl.init(lambda: make(dtype), OPTIMIZER, strategy)
    step, met = sl.train_step(loss, strategy), []
    for number in range(int(state.step), int(state.step) + steps):
        state, metrics = step(state, batch(number))
        met.append(bool(metrics["met"]))
    return state, met


gradient_of = jax.jit(jax.grad(lambda params, batch: loss(params, batch, None)))


def parts_of(strategy):
    """For each part of the parameters, where its elements are."""
    state = sl.init(make, OPTIMIZER, strategy, abstract=True)
    parameters = list(state.layout.parameters(state.params).values())
    count = strategy.exchange.fragments
    parts = []
    for fragment in fragments(parameters, count, strategy.device_mesh.shape):
        part = {name: np.zeros(value.shape, bool) for name, value in values().items()}
        for one in fragment:
            mask = part[parameters[one.position].path]
            mask[slice(None) if one.rows is None else one.rows] = True
        parts.append(part)
    return parts


def simulated(strategy, workers):
    """What workers have after some steps, and the center."""
    exchange, parts = strategy.exchange, parts_of(strategy)
    center = values()
    own, states = [center] * workers, [OPTIMIZER.init(center)] * workers
    momentum = jax.tree.map(np.zeros_like, center)
    gap = exchange.every // exchange.fragments
    for step in range(STEPS):
        before, after = own, []
        for worker, examples in enumerate(np.split(batch(step), workers)):
            gradient = gradient_of(own[worker], examples)
            updates, states[worker] = OPTIMIZER.update(gradient, states[worker])
            after.append(jax.tree.map(np.asarray, optax.apply_updates(own[worker], updates)))
        own = after
        if not step or step % gap:
            continue
        part = parts[step // gap % exchange.fragments]
        own = [dict(mine) for mine in own]
        center = dict(center)
        for name, mask in part.items():
            start = [mine[name] for mine in before]
            mean = np.mean([theirs - center[name] for theirs in start], 0)
            kept = {"momentum": momentum[name]}
            for worker in range(workers):
                met = exchange.met(center[name], start[worker], mean, kept, workers)
                on_top = met.own + (own[worker][name] - start[worker])
                own[worker][name] = np.where(mask, on_top, own[worker][name])
            momentum[name] = np.where(mask, met.kept.get("momentum", 0), momentum[name])
            center[name] = np.where(mask, met.center, center[name])
    return own, center


def split(stage):
    return sl.Zero(stage, small=0)


MEETINGS = {
    "all at once": dict(mesh=PODS, exchange=DiLoCo("pod", every=3, overlap=True)),
    "in every step": dict(
        mesh="pod=1,data=8,model=1", exchange=LocalSGD("data", every=1, overlap=True)
    ),
    "parts": dict(
        mesh=PODS, exchange=DiLoCo("pod", every=4, fragments=2, overlap=True), zero=split(2)
    ),
    "a part in every step": dict(
        mesh=PODS, exchange=LocalSGD("pod", every=3, fragments=3, overlap=True), accumulate=2
    ),
    "parts, inner axis": dict(
        mesh=PODS, exchange=DiLoCo("data", every=6, fragments=3, overlap=True), zero=split(3)
    ),
    "a spring": dict(mesh=PODS, exchange=ElasticAveraging(("pod", "data"), every=2, overlap=True)),
}


@pytest.mark.representative("parts")
@pytest.mark.long
@pytest.mark.sentinel("all at once", "parts, inner axis")
@pytest.mark.parametrize("name", MEETINGS)
def test_moves_of_before_a_step_are_used_at_its_end(name):
    strategy = sl.Strategy(rules=RULES, **MEETINGS[name])
    state, met = run(strategy)
    gap = strategy.exchange.every // strategy.exchange.fragments
    assert met == [step > 0 and step % gap == 0 for step in range(STEPS)]
    workers = state.layout.workers
    own, center = simulated(strategy, workers)
    close = functools.partial(chex.assert_trees_all_close, rtol=2e-4, atol=2e-5)
    close(jax.device_get(state.params), center)
    for worker in range(workers):
        mine = jax.tree.map(lambda x, w=worker: x[w], jax.device_get(state.workers.params))
        close(mine, own[worker])


CODES = {
    "integers, in parts": (Quantised("pod"), 2, 1e-2),
    "integers, some exactly": (Quantised("pod", exact=("down", "bias")), 4, 1e-2),
    "signs with what they leave out": (OneBit("pod"), 1, 0.9),
    "factors": (PowerSGD("pod", rank=2, feedback=False), 1, 0.9),
}


@pytest.mark.representative("integers, in parts")
@pytest.mark.long
@pytest.mark.parametrize("name", CODES)
def test_moves_are_sent_as_codes_meanwhile(name):
    """What is sent is near what would be sent exactly, and elements that are exact are so."""
    by, count, tolerance = CODES[name]
    found, centers = [], []
    for exchange in (None, by):
        meeting = LocalSGD("pod", every=4, exchange=exchange, fragments=count, overlap=True)
        strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=meeting, zero=split(1))
        # To the end of the first meeting, before a difference has made others.
        state, _ = run(strategy, 4 // count + 1)
        centers.append(jax.device_get(state.params))
        found.append(state)
    moved = optax.tree.norm(jax.tree.map(np.subtract, centers[0], values()))
    errors = jax.tree.map(np.subtract, *centers)
    assert optax.tree.norm(errors) <= tolerance * moved
    for path in by.exact:
        assert np.abs(errors[path]).max() <= 1e-6
    # Something was sent in codes.
    assert any((centers[0][n] != centers[1][n]).any() for n in centers[0])
    if by.keeps_errors:
        left = jax.tree.leaves(jax.device_get(found[1].errors))
        assert any(np.abs(error).max() > 0 for error in left)


@pytest.mark.long
def test_it_goes_on_bit_for_bit_from_a_checkpoint(tmp_path):
    meeting = DiLoCo("pod", every=4, fragments=2, overlap=True)
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=meeting, zero=split(1))
    state, _ = run(strategy, 4)
    with sl.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        like = sl.init(make, OPTIMIZER, strategy, abstract=True)
        read = checkpoints.restore(like).state
    through, _ = run(strategy, 3, state)
    resumed, _ = run(strategy, 3, read)
    chex.assert_trees_all_equal(
        jax.device_get(resumed.replaced(key=0)), jax.device_get(through.replaced(key=0))
    )


def test_parameters_of_16_bits_meet_in_32():
    meeting = LocalSGD("pod", every=2, fragments=2, overlap=True)
    strategy = sl.Strategy(mesh=PODS, rules=RULES, exchange=meeting)
    state, _ = run(strategy, 4, dtype="bfloat16")
    for leaf in jax.tree.leaves(state.workers.params):
        assert leaf.dtype == jnp.bfloat16
        assert np.isfinite(np.asarray(leaf, "f4")).all()


def test_overlap_is_yes_or_no():
    with pytest.raises(ValueError, match=r"`DiLoCo\(overlap=2\)`"):
        DiLoCo("pod", overlap=2)


@pytest.mark.parametrize(
    "platform",
    [
        "cpu",
        pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
        pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
    ],
)
def test_a_meeting_sends_one_part(platform):
    """The part that has most, once, whichever it is: there is no branch for each."""
    mesh = mesh_on(platform, PODS)
    meeting = LocalSGD("pod", every=8, fragments=4, overlap=True)
    strategy = sl.Strategy(mesh=mesh, rules=RULES, zero=split(2), exchange=meeting)
    state = sl.init(make, OPTIMIZER, strategy, abstract=True)
    step = sl.train_step(loss, strategy)
    compiled = compile_for(mesh, step.lower(state, jax.ShapeDtypeStruct((16, 8), "f4")))
    largest = max(sum(mask.sum() for mask in part.values()) for part in parts_of(strategy))
    large = 0
    for one in testing.collectives(compiled, mesh):
        if (one.axes is None or "pod" in one.axes) and one.sent_bytes > 64:
            large += one.total_bytes
    # A device sends half of its quarter of the part to the other pod, and as much of the sum; what
    # some devices of a pod have alike, vectors, each may send.
    assert 0 < large <= 1.3 * 4 * largest / 4 + 64


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("overlap", [False, True])
def test_only_what_overlaps_is_under_way_while_a_step_multiplies(overlap):
    """Between slices. Rows of 64 numbers, of which tiles would be half empty, go without holes."""
    target = sl.Target("tpu:v5e:2x2:slices=2")
    mesh = target.mesh("pod=2,data=4", dcn="pod")
    strategy = sl.Strategy(
        mesh=mesh,
        rules=sl.AxisRules(batch=("pod", "data")),
        exchange=LocalSGD("pod", every=2, overlap=overlap),
        zero=split(1),
    )
    state = sl.init(lambda: {"w": jnp.zeros((512, 16, 64))}, OPTIMIZER, strategy, abstract=True)
    step = sl.train_step(
        lambda model, x, rng: jnp.mean(jnp.einsum("bd,dhk->bhk", x, model["w"]) ** 2), strategy
    )
    compiled = step.lower(state, jax.ShapeDtypeStruct((16, 512), "f4")).compile()
    crossing = []
    for one in testing.collectives(compiled, mesh):
        if "pod" in one.axes and one.sent_bytes > 1024:
            crossing.append(one)
    # Each of a pod's four devices sends its quarter, half of it twice.
    quarter = 4 * 512 * 16 * 64 / 4
    assert quarter <= sum(one.total_bytes for one in crossing) <= 1.01 * quarter
    assert any(one.overlapped for one in crossing) == overlap
