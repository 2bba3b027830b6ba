"""Pipelines that combine a forward and a backward pass of a tick: against one stage; what is refused;
what the compiled programs hide.
"""

import numpy as np
import optax
import pytest
from flax import nnx
from machines import compile_for, mesh_on
from test_pipelined import (
    EXPERTS,
    RULES,
    TOKENS,
    assert_alike,
    experts_alone,  # noqa: F401
    loss,
    loss_of_both,
    make,
    make_both,
    make_experts,
    stepped,
)
from test_pipelined import alone as alone_of_toy

import shardlib as sl
from models import moe
from shardlib import pipeline
from shardlib.pipeline._program import program_of

alone = alone_of_toy
PAIRED = [
    pipeline.OneFOneB(2, 8, paired=True),
    pipeline.Eager1F1B(2, 8),
    pipeline.Interleaved(2, 8, paired=True),
    pipeline.ZBH1(2, 8, paired=True),
    pipeline.ZBV(2, 8, paired=True),
    pipeline.VHalf(2, 8, paired=True),
    pipeline.DualPipeV(2, 8),
]


def combining(schedule, mesh="stage=2,data=2,model=2", rules=RULES, **options):
    return sl.Strategy(mesh=mesh, rules=rules, pipeline=schedule, combine_passes=True, **options)


@pytest.mark.representative("DualPipeV-none", "Interleaved-none", "DualPipeV-stage")
@pytest.mark.long
@pytest.mark.parametrize("remat", ["none", "full", "stage"])
@pytest.mark.parametrize("schedule", PAIRED, ids=lambda schedule: type(schedule).__name__)
def test_combined_passes_equal_one_stage(schedule, remat, alone):
    assert_alike(stepped(combining(schedule, remat=remat)), alone)


@pytest.mark.long
def test_combined_passes_on_four_stages_equal_one_stage(alone):
    strategy = combining(pipeline.DualPipeV(4, 8), "stage=4,data=1,model=2")
    assert_alike(stepped(strategy), alone)


@pytest.mark.long
def test_combined_passes_with_experts_equal_one_stage(experts_alone):  # noqa: F811
    strategy = combining(pipeline.DualPipeV(2, 4), rules=EXPERTS)
    assert_alike(stepped(strategy, make_experts, moe.loss, TOKENS), experts_alone)


@pytest.mark.parametrize("schedule", PAIRED, ids=lambda schedule: type(schedule).__name__)
def test_no_combined_backward_pass_waits_for_the_forward_pass_of_its_tick(schedule):
    made = program_of(schedule)
    assert made.combinable.any()
    for tick, stage in np.argwhere(made.combinable):
        of = {name: made.rows[name][tick, stage] for name in made.rows}
        assert of["F"] == of["B"] == 1
        # What a forward pass writes is read by no backward pass of its tick.
        assert (of["F.microbatch"], of["F.part"]) != (of["B.microbatch"], of["B.part"])
        assert of["F.kept"] != of["B.kept"]


@pytest.mark.parametrize(
    "schedule, named",
    [
        (None, "give a schedule"),
        (pipeline.GPipe(2, 8), "takes one pass"),
        (pipeline.DualPipeV(2, 8, paired=False), "takes one pass"),
        (pipeline.Eager1F1B(1, 8), "do not wait for each other"),
    ],
)
def test_combined_passes_are_refused_where_no_tick_has_two(schedule, named):
    stages = 1 if schedule is None else schedule.stages
    with pytest.raises(ValueError, match=named):
        combining(schedule, f"stage={stages},data=1,model=1")


def test_combined_passes_of_two_loops_are_refused():
    strategy = combining(pipeline.DualPipeV(2, 8))
    state = sl.init(make_both, optax.sgd(0.1), strategy)
    given = {"x": np.ones((32, 8), "f"), "weight": np.ones(32, "f")}
    with pytest.raises(ValueError, match="2 loops over layers"):
        sl.train_step(loss_of_both, strategy)(state, given)
