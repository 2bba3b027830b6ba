"""The collectives of the compiled step are those that theory says, by kind, axis and bytes, and no
more.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt
from shardlib import testing

LAYERS, ROWS, SEQ, WIDTH = 3, 8, 128, 256
CONFIG = gpt.tiny(layers=LAYERS, width=WIDTH, heads=8, context=SEQ, vocab=1024)
TENSOR = sl.rules.data | sl.rules.tensor
BATCH = {"tokens": jax.ShapeDtypeStruct((ROWS, SEQ + 1), "int32")}
# Bytes of the residual stream of one device's examples, in float32.
STREAM = ROWS // 2 * SEQ * WIDTH * 4
PER_TOKEN = ROWS // 2 * SEQ * 4
# The loss, its weight, and two numbers that say of which microbatches it is not finite.
SUMS_BYTES = 4 * 4


PLATFORMS = [
    "cpu",
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]
WITHOUT_CPU = PLATFORMS[1:]


def compile_step(mesh, rules, config=CONFIG, loss=gpt.loss, batch=BATCH, **kwargs):
    strategy = sl.Strategy(mesh=mesh, rules=rules, **kwargs)
    state = sl.init(
        lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.adamw(1e-3), strategy, abstract=True
    )
    # In the highest precision the TPU compiler leaves what is on the wire in float32.
    with jax.default_matmul_precision("highest"):
        compiled = compile_for(mesh, sl.train_step(loss, strategy).lower(state, batch))
    return state, testing.collectives(compiled, mesh)


def parameter_bytes(state):
    """Bytes of one device's shards."""
    return sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * 4 for leaf in jax.tree.leaves(state.params)
    )


def norm_bytes(state):
    """What adds up the gradient's norm: a number for each parameter."""
    return 4 * len(jax.tree.leaves(state.params))


def sent(found):
    """Bytes that go into all collectives of a kind over some axes, however compilers combine
    them.
    """
    total = collections.Counter()
    for one in found:
        whole = one.result_bytes if one.kind == "all-gather" else one.operand_bytes
        total[one.kind, *one.axes] += whole * one.times
    return dict(total)


@pytest.mark.representative("cpu", "h200:1x1x8")
@pytest.mark.long
@pytest.mark.parametrize("platform", PLATFORMS)
def test_tensor_parallelism_is_two_all_reduces_per_layer_and_direction(platform):
    state, found = compile_step(mesh_on(platform, "data=2,model=4"), TENSOR)
    in_layers = [one for one in found if one.times == LAYERS]
    assert len(in_layers) == 4, testing.summary(found)
    assert len([one for one in in_layers if "transpose" not in one.op_name]) == 2
    over_model = [one for one in found if one.axes == ("model",)]
    # Whose partitioner adds up the gradients of query, key and value after their all-reduce.
    if platform == "cpu":
        outside = collections.Counter(
            shape for one in over_model if one.times == 1 for shape in one.shapes
        )
        norm = {(norm_bytes(state) // 4,): 1}
        assert outside == {(ROWS // 2, SEQ, WIDTH): 2, (ROWS // 2, SEQ): 3, **norm}, (
            testing.summary(found)
        )
        assert all(one.kind == "all-reduce" and len(one.axes) == 1 for one in found)
    else:
        # Beside the layers: the embedding forward; the loss's maximum, sum and target, and what it
        # sends back into the stream. And the gradient exchange, each device its own shards; with it
        # the loss and the weight of the batch.
        assert sent(found) == {
            ("all-reduce", "model"): (4 * LAYERS + 2) * STREAM + 3 * PER_TOKEN + norm_bytes(state),
            ("all-reduce", "data"): parameter_bytes(state) + SUMS_BYTES,
        }, testing.summary(found)


@pytest.mark.representative("joined")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("margin", [0.0, float("inf")], ids=["joined", "one by one"])
def test_sequence_parallelism_moves_the_same_bytes_as_gathers_and_scatters(monkeypatch, margin):
    # Queries, keys and values are one product, or three.
    monkeypatch.setattr("shardlib.kernels._projections.MARGIN", margin)
    mesh = mesh_on("v5e:2x4", "data=2,model=4")
    state, found = compile_step(mesh, sl.rules.data | sl.rules.tensor_sequence)
    # An all-reduce receives 2 (n-1)/n of its operand; a gather and a scatter (n-1)/n each of the
    # whole: where tensor parallelism sums the stream 4 times a layer and twice outside, it is now
    # scattered and gathered as often. Backward, the two inputs of a layer of which a device kept
    # its part are gathered once more, as Megatron's are. What stands between the split parts
    # (norms, biases, positions) adds its gradients up, since each device saw part of a sequence.
    stream_parameters = (6 * LAYERS + 2) * WIDTH * 4
    positions = SEQ * WIDTH * 4
    assert sent(found) == {
        ("reduce-scatter", "model"): (4 * LAYERS + 2) * STREAM,
        ("all-gather", "model"): (6 * LAYERS + 2) * STREAM + positions,
        ("all-reduce", "model"): 3 * PER_TOKEN + stream_parameters + norm_bytes(state),
        ("all-reduce", "data"): parameter_bytes(state) + SUMS_BYTES,
    }, testing.summary(found)


@pytest.mark.gpu_compiler
def test_sequence_parallelism_on_gpus_gathers_and_scatters_in_every_layer():
    _, found = compile_step(
        mesh_on("h200:1x1x8", "data=2,model=4"), sl.rules.data | sl.rules.tensor_sequence
    )
    in_layers = collections.Counter()
    for one in found:
        if one.times == LAYERS:
            in_layers[one.kind] += max(one.operand_bytes, one.result_bytes)
    # Two gathers forward and two backward of what is sent back; and once more the two inputs of
    # which a device kept its part, in one collective with a third. As on TPUs, and as Megatron's.
    assert in_layers == {"all-gather": 6 * STREAM, "reduce-scatter": 4 * STREAM}, testing.summary(
        found
    )


@pytest.mark.representative("4-v5e:2x4", "4-h200:1x1x8")
@pytest.mark.long
@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradient_exchange_runs_once_and_sends_no_weight_over_tensor_axis(platform, accumulate):
    mesh = mesh_on(platform, "data=2,model=4")
    state, found = compile_step(mesh, TENSOR, accumulate=accumulate)
    over_data = [one for one in found if "data" in one.axes]
    assert all((one.axes, one.times, one.kind) == (("data",), 1, "all-reduce") for one in over_data)
    assert sum(one.operand_bytes for one in over_data) == parameter_bytes(state) + SUMS_BYTES
    stream, per_token = STREAM // accumulate, PER_TOKEN // accumulate
    over_model = {
        int(np.prod(shape)) * 4 for one in found if one.axes == ("model",) for shape in one.shapes
    }
    of_activations = {stream, per_token, stream + per_token}
    assert over_model <= of_activations | {norm_bytes(state)}, "activations and the gradient's norm"


@pytest.mark.representative("h200:1x1x8")
@pytest.mark.parametrize("platform", PLATFORMS)
def test_data_parallelism_only_all_reduces_the_gradients_once(platform):
    state, found = compile_step(mesh_on(platform, "data=8"), sl.rules.data)
    assert {(one.kind, one.axes, one.times) for one in found} == {("all-reduce", ("data",), 1)}
    assert sum(one.operand_bytes for one in found) == parameter_bytes(state) + SUMS_BYTES


@pytest.mark.tpu_compiler
def test_fsdp_by_annotation_gathers_each_layer_at_most_twice():
    state, found = compile_step(mesh_on("v5e:2x4", "data=1,fsdp=8"), sl.rules.fsdp)
    in_layers = [one for one in found if one.times > 1]
    assert in_layers, testing.summary(found)
    layers = state.params["blocks"]
    whole = sum(leaf.size * 4 for leaf in jax.tree.leaves(layers))
    gathered = sum(one.result_bytes * one.times for one in in_layers if one.kind == "all-gather")
    assert gathered <= 2 * whole * 1.1, "at most every weight once forward and once backward"


@pytest.mark.tpu_compiler
def test_train_step_memory_holds_parameters_and_optimizer_state_once():
    mesh = mesh_on("v5e:2x4", "data=2,model=4")
    strategy = sl.Strategy(mesh=mesh, rules=TENSOR, accumulate=4, remat="full")
    config = gpt.tiny(layers=8, width=1024, heads=8, context=128, vocab=1024)
    state = sl.init(
        lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.adamw(1e-3), strategy, abstract=True
    )
    memory = sl.train_step(gpt.loss, strategy).lower(state, BATCH).compile().memory_analysis()
    shards = parameter_bytes(state)
    small = 2**20
    assert memory.argument_size_in_bytes < 3 * shards + small, "parameters and Adam's two moments"
    assert memory.alias_size_in_bytes > 3 * shards - small, (
        "donated: the new state takes the place of the old"
    )
    # One float32 sum of gradients over microbatches, one microbatch's gradient, and activations of
    # one layer at a time.
    activations = 16 * ROWS // 2 // 4 * 128 * 4096 * 4
    assert memory.temp_size_in_bytes < 2.2 * shards + activations + small


@pytest.mark.parametrize("platform", PLATFORMS)
def test_gather_batch_moves_only_each_devices_shard(platform):
    """With a tensor axis, a gather over `data` of what `model` splits must not gather over `model`
    first.
    """
    rules = sl.AxisRules(batch="data", embed=None, act_embed="model", wide="model")
    mesh = mesh_on(platform, "data=2,model=4")
    strategy = sl.Strategy(mesh=mesh, rules=rules)

    def loss(model, batch, rng):
        features = sl.shard(batch @ model["w"], "batch", "act_embed")
        everyone = sl.gather_batch(features, "act_embed")
        return jnp.mean((features @ everyone.T) ** 2)

    make = lambda: sl.annotate({"w": jnp.ones((64, 512))}, {"w": ("embed", "wide")})
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    with jax.default_matmul_precision("highest"):
        compiled = (
            sl.train_step(loss, strategy)
            .lower(state, jax.ShapeDtypeStruct((32, 64), "float32"))
            .compile()
        )
    gathers = [one for one in testing.collectives(compiled, mesh) if one.kind == "all-gather"]
    assert [(one.axes, one.result_bytes) for one in gathers] == [(("data",), 32 * 512 // 4 * 4)]
