"""Floating-point operations: of traced functions by pass, and of compiled programs."""

import dataclasses
import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt
from shardlib._tree import named_leaves
from shardlib.compiled._flops import _Window, compiled_flops
from shardlib.planning import Flops
from shardlib.planning._compiled_step import kinds_of
from shardlib.tracing._flops import flops_of

ROWS, LENGTH, WIDTH, HEADS, LAYERS, VOCAB = 8, 64, 32, 4, 2, 128
HIDDEN = 4 * WIDTH
CONFIG = gpt.tiny(
    layers=LAYERS, width=WIDTH, heads=HEADS, context=LENGTH, vocab=VOCAB, attention="xla"
)
BATCH = {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), "int32")}
TOKENS = ROWS * LENGTH
# Forward, of a layer: scores and what is taken of the values, then all of it; and the head.
SCORES = 2 * TOKENS * LENGTH * WIDTH
ATTENDED = 2 * SCORES
LAYER = 2 * TOKENS * (4 * WIDTH * WIDTH + 2 * WIDTH * HIDDEN) + ATTENDED
HEAD = 2 * TOKENS * WIDTH * VOCAB
STRATEGIES = {
    "data": {"mesh": "data=8,model=1", "rules": sl.rules.data},
    "stage 3": {
        "mesh": "data=8,model=1", "rules": sl.rules.data, "zero": sl.Zero(3, small=0),
    },
    "tensor": {"mesh": "data=2,model=4", "rules": sl.rules.data | sl.rules.tensor_sequence},
}  # fmt: skip
# What each word computes again of the products of a layer. A product whose result nothing backward
# reads, as that of the MLP's second matrix, is not made again.
AGAIN = {
    "none": 0,
    "selective": SCORES,
    "minimal": SCORES,
    "dots": 0,
    "dots_without_batch": ATTENDED,
    "full": LAYER - 2 * TOKENS * WIDTH * HIDDEN,
}


def made(where, remat, target="cpu", config=CONFIG):
    options = STRATEGIES[where] | {"mesh": mesh_on(target, STRATEGIES[where]["mesh"])}
    strategy = sl.Strategy(remat=remat, **options)
    make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
    state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
    return sl.train_step(gpt.loss, strategy), state, BATCH


@functools.cache
def counted(where, remat):
    return sl.planning.flops(*made(where, remat))


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.sentinel(
    "none-data",
    "selective-tensor",
    "minimal-stage 3",
    "dots-data",
    "dots_without_batch-tensor",
    "full-stage 3",
)
@pytest.mark.parametrize("where", STRATEGIES)
@pytest.mark.parametrize("remat", AGAIN)
def test_flops_say_what_each_policy_recomputes(where, remat):
    found, none = counted(where, remat), counted(where, "none")
    assert found.forward == none.forward == LAYERS * LAYER + HEAD
    assert found.backward == none.backward == 2 * found.forward
    assert found.total - none.total == found.recomputed == LAYERS * AGAIN[remat]
    assert found.recomputed_fraction == found.recomputed / (LAYERS * LAYER + HEAD)
    assert found.unknown == () and found.in_kernels == 0


@pytest.mark.long("stage 3-full")
@pytest.mark.parametrize("where, remat", [("stage 3", "full"), ("tensor", "selective")])
def test_flops_are_those_of_the_compiled_program(where, remat):
    step, state, batch = made(where, remat)
    compiled = step.lower(state, batch).compile()
    assert 8 * compiled_flops(compiled) == pytest.approx(counted(where, remat).total, rel=0.02)


@pytest.mark.representative("stage 3-selective")
@pytest.mark.tpu_compiler
@pytest.mark.parametrize("remat", ["selective", "full"])
@pytest.mark.parametrize("where", ["stage 3", "tensor"])
def test_flops_are_those_of_the_tpu_compilers_program(where, remat):
    """Its convolutions slide over the dims of a batch, and over heads."""
    config = dataclasses.replace(CONFIG, width=256, heads=4, vocab=512)
    step, state, batch = made(where, remat, "v5e:2x4", config)
    found = sl.planning.flops(step, state, batch)
    compiled = compile_for(mesh_on("v5e:2x4", "data=8"), step.lower(state, batch))
    assert 8 * compiled_flops(compiled) == pytest.approx(found.total, rel=0.02)


@pytest.mark.gpu_compiler
def test_flops_are_those_of_the_gpu_compilers_program():
    """Its products are calls of cuBLAS."""
    config = dataclasses.replace(CONFIG, width=256, heads=4, vocab=512)
    step, state, batch = made("tensor", "full", "h200:1x1x8", config)
    found = sl.planning.flops(step, state, batch)
    compiled = compile_for(mesh_on("h200:1x1x8", "data=8"), step.lower(state, batch))
    assert "__cublas" in compiled.as_text()
    assert 8 * compiled_flops(compiled) == pytest.approx(found.total, rel=0.02)


def flops(function, *shapes):
    return flops_of(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)))


def test_loops_that_even_loads_do_not_run_count_for_nothing():
    """Where derivatives wrap the scope of such a loop, too; the compiled program's likewise."""
    x, w, sizes = jnp.ones((64, 8)), jnp.ones((4, 8, 16)), jnp.array([16] * 4)

    def both(x, w):
        product = lambda x, w: jnp.square(sl.kernels.grouped_matmul(x, w, sizes)).sum()
        return jax.value_and_grad(product, (0, 1))(x, w)

    found = flops_of(jax.make_jaxpr(both)(x, w))
    assert (found.total, found.unknown) == (3 * 2 * 64 * 8 * 16, ())
    assert compiled_flops(jax.jit(both).lower(x, w).compile()) == found.total


def test_flops_count_loops_branches_and_devices():
    product = 2 * 4 * 4 * 4
    square = ((4, 4),)
    looped = lambda x: jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=5)[0]
    assert flops(looped, *square).total == 5 * product
    assert flops(jax.jit(lambda x: x @ x @ x), *square).total == 2 * product
    branch = lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)
    assert flops(branch, *square).total == 2 * product
    mesh = sl.make_mesh("data=8")
    each = jax.shard_map(lambda x: x @ x, mesh=mesh, in_specs=P(), out_specs=P())
    assert flops(each, *square).total == 8 * product
    # Nothing reads the second product.
    assert flops(lambda x: (x @ x, x @ x.T)[0], *square).total == product


def test_flops_name_loops_of_unknown_length():
    endless = lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x)
    assert flops(endless, (4, 4)) == Flops(2 * 4**3, 0, 0, unknown=(("loop", 1),))
    assert flops(lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, jnp.sin, x), (4, 4)).total == 0


def test_flops_of_convolutions_and_ragged_products():
    image, kernel = (2, 8, 8, 3), (3, 3, 3, 16)
    convolved = lambda x, w: jax.lax.conv_general_dilated(
        x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    assert flops(convolved, image, kernel).total == 2 * (2 * 6 * 6 * 16) * (3 * 3 * 3)
    ragged = lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([4, 12], jnp.int32))
    assert flops(ragged, (16, 8), (2, 8, 4)).total == 2 * 16 * 8 * 4
    # The gradient to the kernels sums over the rows of each group.
    gradient = jax.grad(lambda w, x: ragged(x, w).sum())
    assert flops(gradient, (2, 8, 4), (16, 8)).total == 2 * 16 * 8 * 4


@pytest.mark.parametrize("before", [-1, 0, 2])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_windows_count_the_places_that_meet_an_element(stride, before):
    for dilation, spread, size in itertools.product((1, 2, 3), (1, 2, 5), (1, 2, 4)):
        input_, output = 5, 4
        window = _Window(size, stride, before, dilation, spread)
        elements = {place * dilation for place in range(input_)}
        places = itertools.product(range(size), range(output))
        met = sum(e * spread + o * stride - before in elements for e, o in places)
        assert window.meetings(input_, output) == met


@pytest.mark.tpu_compiler
@pytest.mark.parametrize("causal", [True, False])
def test_flops_of_a_tpu_kernel_are_of_the_blocks_that_it_computes(causal):
    rows, length, heads, size = 1, 4096, 2, 128
    x = jax.ShapeDtypeStruct((rows, length, heads, size), "bfloat16")
    attend = functools.partial(
        sl.kernels.attention, names=(None,) * 4, causal=causal, implementation="tpu"
    )
    loss = lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum()
    with sl.use(sl.rules.data, mesh_on("v5e:2x4", "data=8")):
        found = flops_of(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, x, x))
    # Nothing is split: all eight devices do the same.
    whole = 8 * 2 * rows * heads * length**2 * size
    assert found.unknown == ()
    # Outside of kernels there is the product of each result and its gradient.
    backward = found.backward - 8 * 2 * rows * heads * length * size
    assert found.in_kernels == found.forward + backward
    # Forward two products of each pair, backward seven in two kernels: scores in both.
    if causal:
        # Half, and half of the blocks on the diagonal.
        assert 0.5 < found.forward / (2 * whole) < 0.7
        assert 0.5 < backward / (7 * whole) < 0.7
    else:
        assert found.forward == 2 * whole and backward == 7 * whole


@pytest.mark.long
def test_plan_says_what_a_step_recomputes():
    plan = sl.plan(*made("data", "full"))
    assert plan.flops == counted("data", "full")
    fraction = LAYERS * AGAIN["full"] / (LAYERS * LAYER + HEAD)
    words = " ".join(str(plan).split())
    assert f"recompute {fraction:.1%} of the forward pass" in words
    assert plan.as_dict()["flops"]["recomputed"] == LAYERS * AGAIN["full"]


def test_flops_of_a_pipeline_are_refused():
    strategy = sl.Strategy(
        mesh="stage=2,data=4", rules=sl.rules.data | sl.rules.pipeline,
        pipeline=sl.pipeline.OneFOneB(2, 2),
    )  # fmt: skip
    state = sl.init(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), None, strategy, abstract=True)
    with pytest.raises(ValueError, match="without `pipeline`"):
        sl.planning.flops(sl.train_step(gpt.loss, strategy), state, BATCH)
    with pytest.raises(ValueError, match="can be traced"):
        sl.planning.flops(np.sum, 1, 2)


def test_flops_of_strided_convolutions_count_no_zeros_between_elements():
    def loss(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, kernel, (2, 2), "SAME", dimension_numbers=numbers)
        return jnp.sum(y**2)

    x, kernel = jnp.ones((2, 16, 16, 4)), jnp.ones((3, 3, 4, 8))
    traced = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(x, kernel)
    found = flops_of(traced)
    forward = 2 * (2 * 8 * 8 * 8) * 9 * 4
    assert found.forward + found.backward == 3 * forward
    # Kernels as long as the sequence, and longer than it.
    along = lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, (1,), "SAME")
    shapes = (jax.ShapeDtypeStruct((1, 1, 2**20), "float32"),) * 2
    assert flops_of(jax.make_jaxpr(along)(*shapes)).forward == 2 * 2**40
    empty = lambda x, kernel: jax.lax.conv_general_dilated(x, kernel, (1,), "VALID")
    assert flops_of(jax.make_jaxpr(empty)(jnp.ones((1, 1, 2)), jnp.ones((1, 1, 5)))).forward == 0


def test_kinds_of_memory_do_not_depend_on_names_of_the_model():
    class Kept(nnx.Module):
        def __init__(self):
            self.kept = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    state = sl.init(Kept, optax.adam(0.1), sl.Strategy(mesh="data=8", rules=sl.rules.data))
    paths = tuple(path for path, _ in named_leaves(state))
    kinds = kinds_of(paths, len(paths))
    assert Counter(kinds.values())["parameters"] == 2
    assert Counter(kinds.values())["optimizer state"] == 5
