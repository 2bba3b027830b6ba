"""Pipelines that combine a forward and a backward pass of a tick: against one stage; what is refused;
what the compiled programs hide.
"""

from collections import Counter
from functools import partial

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from machines import compile_for, mesh_on
from test_pipelined import (
    EXPERTS,
    RULES,
    TOKENS,
    alone,
    assert_alike,
    batch,
    experts_alone,
    loss,
    loss_of_both,
    make,
    make_both,
    make_experts,
    stepped,
)

import shardlib as sl
from models import moe
from shardlib import pipeline
from shardlib.compiled._collectives import collectives
from shardlib.pipeline._program import program_of

__all__ = ["alone", "experts_alone"]  # fixtures

PAIRED = [
    pipeline.Interleaved(2, 8, paired=True),
    pipeline.ZBV(2, 8, paired=True),
    pipeline.VHalf(2, 8, paired=True),
    pipeline.DualPipeV(2, 8),
]


def combining(schedule, mesh="stage=2,data=2,model=2", rules=RULES, **options):
    return sl.Strategy(mesh=mesh, rules=rules, pipeline=schedule, combine_passes=True, **options)


@pytest.mark.representative("DualPipeV-none", "Interleaved-none", "DualPipeV-stage")
@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "stage"])
@pytest.mark.parametrize("schedule", PAIRED, ids=lambda schedule: type(schedule).__name__)
def test_combined_passes_equal_one_stage(schedule, remat, alone):
    assert_alike(stepped(combining(schedule, remat=remat)), alone)


@pytest.mark.long
def test_combined_passes_on_four_stages_equal_one_stage(alone):
    strategy = combining(pipeline.DualPipeV(4, 8), "stage=4,data=1,model=2")
    assert_alike(stepped(strategy), alone)


@pytest.mark.long
def test_combined_passes_of_a_custom_table_equal_one_stage(alone):
    table = pipeline.DualPipeV(2, 8).table()
    strategy = combining(pipeline.Custom(table, paired=True))
    assert_alike(stepped(strategy), alone)


@pytest.mark.long
def test_combined_passes_send_what_passes_do_that_are_apart():
    totals = []
    for combine in (False, True):
        strategy = sl.Strategy(
            mesh="stage=2,data=2,model=2",
            rules=RULES,
            pipeline=pipeline.DualPipeV(2, 8),
            combine_passes=combine,
        )
        state = sl.init(make, optax.sgd(0.1), strategy)
        compiled = sl.train_step(loss, strategy).lower(state, batch()).compile()
        sent = Counter()
        for one in collectives(compiled, strategy.device_mesh):
            sent[one.kind, one.axes] += one.total_bytes
        totals.append(sent)
    assert totals[0] == totals[1]


@pytest.mark.exhaustive
@pytest.mark.long
def test_combined_passes_pass_check_step_against_one_device():
    given = {name: x[:16] for name, x in batch().items()}
    options = {"pipeline": pipeline.DualPipeV(2, 4), "combine_passes": True}
    meshes = ["stage=2,data=2,model=1"]
    sl.testing.check_step(make, optax.adam(0.1), loss, given, RULES, meshes=meshes, **options)


@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full"])
def test_combined_passes_with_experts_equal_one_stage(remat, experts_alone):
    strategy = combining(pipeline.DualPipeV(2, 4), rules=EXPERTS, remat=remat)
    assert_alike(stepped(strategy, make_experts, moe.loss, TOKENS), experts_alone)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", PAIRED, ids=lambda schedule: type(schedule).__name__)
def test_no_combined_backward_pass_waits_for_the_forward_pass_of_its_tick(schedule, recompute):
    made = program_of(schedule, recompute=recompute)
    assert made.combined_passes > 0
    for tick, stage in np.argwhere(made.combinable):
        of = {name: made.rows[name][tick, stage] for name in made.rows}
        assert of["F"] == of["B"] == 1
        # What a forward pass writes is read by no backward pass of its tick.
        assert (of["F.microbatch"], of["F.part"]) != (of["B.microbatch"], of["B.part"])
        if not recompute:
            assert of["F.kept"] != of["B.kept"]


@pytest.mark.parametrize(
    "schedule, named",
    [
        (None, "give a schedule"),
        (pipeline.GPipe(2, 8), "takes one pass"),
        (pipeline.DualPipeV(2, 8, paired=False), "takes one pass"),
        (pipeline.Eager1F1B(1, 8), "stage 0 a forward"),
        (pipeline.Eager1F1B(2, 8), "stage 1 a forward"),
        (pipeline.ZBH1(2, 8, paired=True), "stage 1 a forward"),
        (pipeline.GPipe(2, 8, paired=True), "stage 0 a forward"),
    ],
)
def test_combined_passes_are_refused_where_no_tick_has_two(schedule, named):
    stages = 1 if schedule is None else schedule.stages
    with pytest.raises(ValueError, match=named):
        combining(schedule, f"stage={stages},data=1,model=1")


def test_combined_passes_of_two_loops_are_refused_where_they_train():
    strategy = combining(pipeline.DualPipeV(2, 8))
    state = sl.init(make_both, optax.sgd(0.1), strategy)
    given = {"x": np.ones((32, 8), "f"), "weight": np.ones(32, "f")}
    with pytest.raises(ValueError, match="2 loops over layers"):
        sl.train_step(loss_of_both, strategy)(state, given)
    assert sl.evaluation(loss_of_both, strategy)(state, [given])


def sends_to_experts(machine, combine):
    """The all-to-alls of a pipeline of experts, compiled for a machine."""
    mesh = mesh_on(machine, "stage=2,data=4")
    config = moe.tiny(layers=4, width=256, heads=2, context=256, vocab=256, every=1, experts=4)
    rules = sl.rules.data | sl.rules.pipeline | sl.AxisRules(experts="data")
    strategy = sl.Strategy(
        mesh=mesh,
        rules=rules,
        pipeline=pipeline.DualPipeV(2, 4),
        combine_passes=combine,
        remat="full",
    )
    make_model = partial(moe.MoE, config)
    state = sl.init(lambda: make_model(rngs=nnx.Rngs(0)), optax.adam(1e-3), strategy, abstract=True)
    tokens = {"tokens": jax.ShapeDtypeStruct((16, 257), "int32")}
    lowered = sl.train_step(moe.loss, strategy).lower(state, tokens)
    found = collectives(compile_for(mesh, lowered), mesh)
    return [one for one in found if one.kind.endswith("all-to-all")]


@pytest.mark.long
@pytest.mark.parametrize(
    "machine",
    [
        pytest.param("v6e:2x4", marks=pytest.mark.exhaustive),
        pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
    ],
)
def test_combined_passes_hide_more_of_what_experts_are_sent_and_send_as_much(machine):
    apart, combined = [sends_to_experts(machine, combine) for combine in (False, True)]
    total = [sum(one.total_bytes for one in found) for found in (apart, combined)]
    hidden = [
        sum(one.total_bytes for one in found if one.overlapped) for found in (apart, combined)
    ]
    assert total[0] == total[1] > 0
    assert hidden[1] > 1.25 * hidden[0]
