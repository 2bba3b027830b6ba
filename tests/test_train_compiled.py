"""What the trainer adds to a step, in programs compiled for absent machines."""

import jax
import optax
import pytest
from flax import nnx
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt
from shardlib.compiled._collectives import collectives
from shardlib.train._contents import _digests

PLATFORMS = [
    "cpu",
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]
CONFIG = gpt.tiny(layers=4, width=256, heads=8, context=32, vocab=256, bias=False)
BATCH = {
    "tokens": jax.ShapeDtypeStruct((16, 33), "int32"),
    "segments": jax.ShapeDtypeStruct((16, 33), "int32"),
}


def abstract(platform, shape, **options):
    rules = sl.rules.data | sl.rules.tensor
    strategy = sl.Strategy(
        mesh=mesh_on(platform, shape), rules=rules, precision="bf16", accumulate=2, **options
    )
    make = lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0))
    return strategy, sl.init(make, optax.adam(1e-3), strategy, abstract=True)


@pytest.mark.representative("0-cpu", "0-h200:1x1x8", "1-v5e:2x4", "3-v5e:2x4", "3-h200:1x1x8")
@pytest.mark.long
@pytest.mark.sentinel("1-cpu")
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_evaluation_gathers_split_weights_once_and_reduces_only_the_loss(platform, stage):
    strategy, state = abstract(platform, "data=8,model=1", zero=sl.Zero(stage, small=0))
    found = sl.plan(sl.evaluation(gpt.loss, strategy), state, BATCH)
    split = [
        leaf
        for leaf in jax.tree.leaves(state.params)
        if "data" in jax.tree.leaves(tuple(leaf.sharding.spec))
    ]
    size = sum(leaf.size for leaf in split)
    assert bool(split) == (stage > 0)
    # A CPU's compiler may send what is asked for in bfloat16 as float32.
    gathered = sum(one.total_bytes for one in found.collectives if one.kind == "all-gather")
    width = 4 if platform == "cpu" else 2
    # The table, where it is embedding and where it is head.
    again = CONFIG.dims["vocab"] * CONFIG.width if stage == 3 else 0
    assert (
        gathered <= (size + again) * width * 7 // 8 * 1.01 and gathered >= size * 2 * 7 // 8 * 0.98
    )
    others = [one for one in found.collectives if one.kind != "all-gather"]
    assert {one.kind for one in others} <= {"all-reduce"}
    assert sum(one.total_bytes for one in others) <= 64 + gathered // 100, (
        "what a TPU gathers by a sum is small"
    )
    if stage == 3:
        layers = sum(
            leaf.size for leaf in jax.tree.leaves(state.params) if leaf.shape[0] == CONFIG.layers
        )
        gathers = [one for one in found.collectives if one.kind == "all-gather"]
        assert (
            sum(one.total_bytes for one in gathers if one.times == CONFIG.layers)
            >= layers * 2 * 7 // 8 * 0.98
        )


@pytest.mark.parametrize("platform", PLATFORMS)
def test_checkpoint_digests_reduce_a_number_per_array_and_gather_none(platform):
    strategy, state = abstract(platform, "data=4,model=2", zero=sl.Zero(3, small=0))
    arrays = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if leaf.ndim]
    compiled = compile_for(strategy.device_mesh, _digests.lower(arrays))
    found = collectives(compiled, strategy.device_mesh)
    assert found and {one.kind for one in found} == {"all-reduce"}
    assert sum(one.total_bytes for one in found) <= 2 * 2 * 4 * len(arrays)
    # A CPU makes words of every array; elsewhere they are summed as they are made, and a TPU has
    # some room for each on its chip.
    at_rest = sum(leaf.size * leaf.dtype.itemsize for leaf in arrays) // 8
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert (
        temporary < 1.1 * at_rest
        if platform == "cpu"
        else temporary < at_rest / 4 + 64 * 1024 * len(arrays)
    )


@pytest.mark.representative("cpu", "h200:1x1x8")
@pytest.mark.long
@pytest.mark.parametrize("platform", PLATFORMS)
def test_packed_segments_add_no_collective_to_a_step(platform):
    strategy, state = abstract(platform, "data=4,model=2")
    step = sl.train_step(gpt.loss, strategy)
    sends = []
    for batch in (BATCH, {"tokens": BATCH["tokens"]}):
        found = sl.plan(step, state, batch)
        sends.append(
            sorted(
                (one.kind, one.axes, one.total_bytes)
                for one in found.collectives
                if one.sent_bytes > 64
            )
        )
    assert sends[0] == sends[1]
