"""Further rounds of experts whose weights ZeRO gathers where they are used."""

import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from machines import compile_for, mesh_on

import shardlib as sl
from models import moe
from shardlib.experts import _row_rounds
from shardlib.tracing import _region

OVER_EXPERTS = sl.rules.data | sl.AxisRules(batch=("data", "expert"), experts="expert")
WEIGHTS = {f"blocks/expert/mlp/{name}" for name in ("up", "gate", "down")}


def config(**changes):
    return moe.tiny(layers=2, every=1, mlp="swiglu", balance=0.0, **changes)


def uneven(vocab, length, examples):
    """Examples of which the first half is of one token, which goes to the same experts."""
    tokens = np.random.default_rng(0).integers(0, vocab, (examples, length + 1)).astype(np.int32)
    tokens[: examples // 2] = 3
    return {"tokens": tokens}


def after_steps(config, batch, mesh, rules, **options):
    devices = jax.devices()[: int(np.prod([int(part[-1]) for part in mesh.split(",")]))]
    strategy = sl.Strategy(mesh=sl.make_mesh(mesh, devices=devices), rules=rules, **options)
    state = sl.init(lambda: moe.MoE(config, rngs=nnx.Rngs(0)), optax.sgd(0.5), strategy)
    step = sl.train_step(moe.loss, strategy)
    for _ in range(2):
        state, metrics = step(state, batch)
    return state.params, float(metrics["loss"])


@pytest.fixture
def summed(monkeypatch):
    """The weights whose gradients the loops add up reduced."""
    found = set()
    of_shard = _region._of_shard

    def seen(root, reader):
        found.add(root.weight.path)
        return of_shard(root, reader)

    monkeypatch.setattr(_region, "_of_shard", seen)
    return found


@pytest.fixture
def rounds(monkeypatch):
    """The numbers of rounds that layers took on some device."""
    found = set()
    plan = _row_rounds.RowRounds.plan

    def told(self, choices):
        made, number = plan(self, choices)
        jax.debug.callback(lambda number: found.add(int(number)), number)
        return made, number

    monkeypatch.setattr(_row_rounds.RowRounds, "plan", told)
    return found


CASES = {
    "recomputed": ("data=2,expert=4", OVER_EXPERTS, {"remat": "full"}),
    "nothing recomputed": ("data=2,expert=4", OVER_EXPERTS, {"remat": "none"}),
    "accumulated": ("data=2,expert=4", OVER_EXPERTS, {"remat": "full", "accumulate": 2}),
    "overlapped": (
        "data=2,expert=4",
        OVER_EXPERTS,
        {"remat": "minimal", "accumulate": 2, "exchange": sl.Exact(overlap=True)},
    ),
    "by a chain": ("data=2,expert=4", OVER_EXPERTS, {"remat": sl.Remat.every(2)}),
    "tensor": ("data=2,expert=2,model=2", OVER_EXPERTS | sl.rules.tensor, {"remat": "full"}),
}


@pytest.mark.representative("recomputed", "tensor")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.long
def test_a_step_in_further_rounds_equals_one_device(case, summed, rounds):
    """Devices whose tokens go elsewhere take fewer rounds, and scatter with those that take more."""
    mesh, rules, options = CASES[case]
    tiny = config(width=16, heads=2, context=8, vocab=32, hidden=32)
    batch = uneven(32, 8, 16)
    found, loss = after_steps(tiny, batch, mesh, rules, zero=sl.Zero(3, small=0), **options)
    assert summed == WEIGHTS
    assert len(rounds) > 1 and max(rounds) > 2
    expected, expected_loss = after_steps(tiny, batch, "data=1,expert=1", OVER_EXPERTS)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=2e-6), found, expected)


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.long
def test_weights_that_are_whole_are_not_gathered_in_the_loop(stage, summed):
    tiny = config(width=16, heads=2, context=8, vocab=32, hidden=32)
    strategy = sl.Strategy(
        mesh=sl.make_mesh("data=2,expert=4"), rules=OVER_EXPERTS, zero=sl.Zero(stage, small=0)
    )
    make_model = lambda: moe.MoE(tiny, rngs=nnx.Rngs(0))
    state = sl.init(make_model, optax.sgd(0.5), strategy, abstract=True)
    sl.train_step(moe.loss, strategy).lower(state, uneven(32, 8, 16))
    assert not summed


def shapes_in_loops(program):
    """The shapes of what the loops of further rounds keep between rounds: forward, backward."""
    forward, backward = set(), set()
    for line in program.as_text().splitlines():
        loop = re.search(r" = \((.*)\) while\(.*op_name=\"([^\"]*if_uneven\)*/while)\"", line)
        if loop:
            kept, origin = loop.groups()
            found = backward if "transpose(" in origin else forward
            found.update(re.findall(r"\[([\d,]+)\]", kept))
    return forward, backward


@pytest.mark.tpu_compiler
def test_nothing_whole_stays_between_rounds_of_the_backward_pass():
    mesh = mesh_on("v5e:2x4", "data=4,expert=2")
    strategy = sl.Strategy(
        mesh=mesh, rules=OVER_EXPERTS, zero=sl.Zero(3, small=0), precision="bf16", remat="full"
    )
    larger = config(width=256, heads=2, context=128, vocab=256, hidden=2048)
    make_model = lambda: moe.MoE(larger, rngs=nnx.Rngs(0))
    state = sl.init(make_model, optax.sgd(0.1), strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 129), "int32")}
    with pytest.warns(sl.ShardingWarning, match="is multiplied in a wider dtype"):
        lowered = sl.train_step(moe.loss, strategy).lower(state, batch)
    program = compile_for(mesh, lowered)
    whole, shards = {"4,256,2048", "4,2048,256"}, {"4,64,2048", "4,512,256"}
    forward, backward = shapes_in_loops(program)
    assert whole <= forward
    assert shards <= backward and not whole & backward
    # Where loads are even, nothing more is sent than without the loop.
    sent = sl.testing.collectives(program, mesh)
    further = [one for one in sent if one.further_times and one.kind != "ragged-all-to-all"]
    assert further and not any(one.times for one in further)
