"""What plans say of activations by name: the bytes of theory, and those of compiled loops."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardlib as sl
from shardlib.planning._activations import activations_of

LAYERS, WIDTH, ROWS = 4, 512, 1024
ARRAY = ROWS * WIDTH * 4
MATRIX_FLOPS = 2 * ROWS * WIDTH * WIDTH * 8  # a product of a layer, on all devices
TENSOR = sl.AxisRules(batch="data", width=None, hidden="model")


def gated(x, w):
    gate = sl.checkpoint_name(sl.shard(x @ w["gate"], "batch", "hidden"), "gate")
    up = sl.checkpoint_name(sl.shard(x @ w["up"], "batch", "hidden"), "up")
    return sl.shard(x + jnp.sin(gate) * up @ w["down"], "batch", "width")


def loss_of_loop(model, x, rng):
    block = sl.remat(gated)
    return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, model)[0] ** 2)


def loss_of_blocks(model, x, rng):
    for number in range(LAYERS):
        x = sl.remat(gated)(x, jax.tree.map(lambda w, number=number: w[number], model))
    return jnp.mean(x**2)


def loss_of_parts(model, x, rng):
    def squashed(x):
        return jnp.tanh(jnp.sin(x))

    @sl.remat
    def block(x, w):
        return x + sl.remat(squashed, part="squashed")(x @ w["gate"]) @ w["down"]

    return jnp.mean(jax.lax.scan(lambda x, w: (block(x, w), None), x, model)[0] ** 2)


def step_of(
    remat, mesh="data=8,model=1", rules=TENSOR, loss=loss_of_loop, dtype="float32", **options
):
    strategy = sl.Strategy(mesh=mesh, rules=rules, remat=remat, **options)
    make = lambda: dict.fromkeys(("gate", "up", "down"), jnp.zeros((LAYERS, WIDTH, WIDTH), dtype))
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    rows = strategy.device_mesh.shape["data"] * ROWS * strategy.accumulate
    return sl.train_step(loss, strategy), state, jax.ShapeDtypeStruct((rows, WIDTH), dtype)


@functools.cache
def planned(remat, target="cpu:8"):
    return sl.plan(*step_of(remat, sl.Target(target).mesh("data=8,model=1")), target)


def rows_of(plan):
    return {one.name: one for one in plan.activations}


def stacked_bytes(plan):
    """What the loops of the program hold of activations: arrays with a dim of layers."""
    stacks = [piece for piece in plan.memory.pieces if piece.kind == "activations"]
    return sum(piece.size for piece in stacks if re.match(r"\w+\[[234],\d+,\d+\]", piece.type))


SOME = sl.Remat.save("up")
LAST = sl.Remat.layers((2, "full"), rest=SOME)
VALUES = {"full": "full", "names": SOME, "none": "none", "dots": "dots", "layers": LAST}


@pytest.mark.representative()
@pytest.mark.long("full", "dots")
@pytest.mark.parametrize("remat", VALUES)
def test_rows_add_up_to_what_compiled_loops_hold(remat):
    plan = planned(VALUES[remat])
    assert stacked_bytes(plan) == sum(one.held_bytes for one in plan.activations) > 0


@pytest.mark.representative()
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("remat", ["names", "layers"])
def test_rows_add_up_to_what_loops_of_a_tpu_hold(remat):
    """With more rows, so that they are not in the memory of the chip itself, and in the dtype that
    a TPU multiplies in, to which it narrows what it keeps of others.
    """
    mesh = sl.Target("tpu:v5e:2x4").mesh("data=8,model=1")
    step, state, _ = step_of(VALUES[remat], mesh, dtype="bfloat16")
    plan = sl.plan(step, state, jax.ShapeDtypeStruct((8 * 16 * ROWS, WIDTH), "bfloat16"))
    # Stacks of layers that differ are temporaries to the plan in part, where loops are ours.
    stack = re.compile(rf"bf16\[[234],{16 * ROWS},{WIDTH}\]")
    stacks = [piece.size for piece in plan.memory.pieces if stack.match(piece.type)]
    assert sum(stacks) == sum(one.held_bytes for one in plan.activations) > 0


def test_rows_have_the_bytes_and_the_products_of_theory():
    full, names, last = (rows_of(planned(VALUES[name])) for name in ("full", "names", "layers"))
    assert list(full) == ["block input", "gate", "up"]
    assert {one.layer_bytes for one in full.values()} == {ARRAY}
    assert full["block input"].held_bytes == LAYERS * ARRAY and not full["up"].held_bytes
    assert full["up"].state == "recomputed" and names["up"].state == "kept"
    assert full["up"].again_flops == names["up"].spared_flops == LAYERS * MATRIX_FLOPS
    assert last["up"].state == "recomputed in 2, kept in 2" and last["up"].layers == LAYERS
    assert last["up"].again_flops == last["up"].spared_flops == 2 * MATRIX_FLOPS


def activations_under(remat):
    return {one.name: one for one in activations_of(*step_of(remat))}


def test_rows_say_what_is_on_the_host_and_what_is_in_fewer_bits():
    found = activations_under(sl.Remat.offload("up") | sl.Remat.compress("int8", "gate"))
    assert found["up"].states == (("on the host", LAYERS),)
    assert found["up"].layer_bytes == ARRAY and found["up"].held_bytes == 0
    assert found["gate"].states == (("int8", LAYERS),)
    # A float32 scale for each block of 128.
    assert found["gate"].held_bytes == LAYERS * ARRAY * (1 + 4 / 128) / 4
    kept = activations_under(sl.Remat.save("up", "gate"))
    for name in ("up", "gate"):
        assert found[name].spared_flops == kept[name].spared_flops == LAYERS * MATRIX_FLOPS


def test_rows_follow_the_paths_of_what_blocks_read():
    found = activations_under(sl.Remat.paths(("ga.*", SOME), rest="none"))
    assert found["up"].states == (("kept", LAYERS),)
    assert found["gate"].states == (("recomputed", LAYERS),)


@pytest.mark.parametrize("remat", ["full", "names", "layers", "dots"])
def test_what_is_not_kept_is_what_the_step_computes_again(remat):
    """No name can be made of another one, so that their figures add up."""
    plan = planned(VALUES[remat])
    assert plan.flops.recomputed == sum(one.again_flops for one in plan.activations)


def test_blocks_that_are_called_one_by_one_have_the_same_rows():
    step = step_of("full", loss=loss_of_blocks)
    found = sl.plan(*step, "cpu:8").activations
    assert found == planned("full").activations


def test_rows_are_of_one_microbatch_and_products_of_all():
    found = rows_of(sl.plan(*step_of("full", accumulate=2), "cpu:8"))
    assert found["up"].layer_bytes == ARRAY
    assert found["up"].again_flops == 2 * LAYERS * MATRIX_FLOPS


def test_what_is_split_over_a_tensor_axis_counts_as_split():
    found = rows_of(sl.plan(*step_of("full", "data=2,model=4"), "cpu:8"))
    assert found["block input"].layer_bytes == ARRAY
    assert found["gate"].layer_bytes == found["up"].layer_bytes == ARRAY // 4


def test_parts_that_are_dropped_have_rows():
    plan = sl.plan(*step_of(sl.Remat.drop("squashed"), loss=loss_of_parts), "cpu:8")
    found = rows_of(plan)
    part = found["part squashed"]
    assert part.state == "recomputed" and part.layers == LAYERS and not part.held_bytes
    assert part.layer_bytes >= ARRAY  # the derivatives of two functions
    assert stacked_bytes(plan) == sum(one.held_bytes for one in plan.activations)


@pytest.mark.long
def test_a_chain_keeps_the_inputs_of_few_blocks():
    found = rows_of(sl.plan(*step_of("sublinear"), "cpu:8"))
    assert found["block input"].state == "kept in 2, recomputed in 2"
    again = sl.Remat.sublinear().chain.table(LAYERS).evaluations
    assert found["block input"].again_flops == pytest.approx(again * 2 * MATRIX_FLOPS, rel=0.01)


def test_a_step_without_blocks_has_no_rows():
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: {"w": jnp.zeros((8, 8))}, optax.sgd(0.1), strategy, abstract=True)
    step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2), strategy)
    found = sl.plan(step, state, np.zeros((16, 8), "f"))
    assert found.activations == () and "marked blocks" not in str(found)


def test_reports_and_values_have_the_rows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    plan = planned(LAST)
    share = 2 * MATRIX_FLOPS / plan.flops.total
    assert re.search(
        rf"up +2.0 MiB +4.0 MiB +recomputed in 2, kept in 2 +spares {share:.1%}, "
        rf"would spare {share:.1%}",
        str(plan),
    )
    (up,) = [one for one in plan.as_dict()["activations"] if one["name"] == "up"]
    assert up["states"] == {"recomputed": 2, "kept": 2} and up["held_bytes"] == 2 * ARRAY
