"""What blocks keep, where their collectives are over axes that are manual in the step."""

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from models import moe
from shardlib.planning._activations import activations_of

OVER_EXPERTS = sl.rules.data | sl.AxisRules(batch=("data", "expert"), experts="expert")


def step_of(capacity, remat):
    config = moe.tiny(router=sl.experts.TopK(2, capacity=capacity))
    mesh = sl.make_mesh("data=2,expert=4")
    strategy = sl.Strategy(mesh=mesh, rules=OVER_EXPERTS, zero=3, remat=remat)
    adam = optax.adamw(1e-3)
    state = sl.init(lambda: moe.MoE(config, rngs=nnx.Rngs(0)), adam, strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((8, config.context + 1), np.int32)}
    return sl.train_step(moe.loss, strategy), state, batch


@pytest.mark.long("None")
@pytest.mark.parametrize("capacity", [None, 1.25])
def test_activations_of_blocks_whose_experts_are_over_a_manual_axis(capacity):
    rows = {row.name: row for row in activations_of(*step_of(capacity, "full"))}
    assert rows["block input"].state == "kept"
    # Queries of two tokens a device would be kept by a step that keeps everything.
    assert rows["query"].state == "recomputed" and rows["query"].layer_bytes > 0


@pytest.mark.long
def test_a_budget_for_blocks_whose_experts_are_over_a_manual_axis():
    step, state, batch = step_of(None, sl.Remat.budget("1GiB"))
    assert step.fitted_remat(state, batch).best.peak < 2**30
