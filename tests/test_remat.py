"""What blocks keep for the backward pass: the same numbers, and as much as was asked for."""

import dataclasses
import functools
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals
from machines import compile_for, mesh_on
from remat_cases import BATCH, DATA, FULL_ZERO, LENGTH, ROWS, STAGE_3, TENSOR, decoder, stepped

import shardlib as sl
from models import gpt, moe

WIDTH, HIDDEN, LAYERS = 64, 256, 4
CONFIG = decoder(LAYERS, WIDTH)
# Plain attention, which has all scores in memory.
WHOLE_SCORES = dataclasses.replace(CONFIG, attention="xla")
NAMES = (
    "attention_out", "context", "key", "mlp_gate", "mlp_hidden", "mlp_out", "mlp_up", "query",
    "value",
)  # fmt: skip
PIPELINE = {"mesh": "stage=2,data=4", "rules": sl.rules.data | sl.rules.pipeline}
STRATEGIES = {
    "data": DATA,
    "stage 3": STAGE_3,
    "tensor": TENSOR,
    "pipeline": {
        **PIPELINE, "zero": sl.Zero(1, small=0), "pipeline": sl.pipeline.OneFOneB(2, 2),
    },
    "split backward": {**PIPELINE, "pipeline": sl.pipeline.ZBH1(2, 2)},
}  # fmt: skip


@functools.cache
def plain(config=CONFIG):
    return stepped(config, mesh="data=8,model=1", rules=sl.rules.data)


KEPT = {
    "names": (CONFIG, sl.Remat.save("context", "mlp_up", "query")),
    "products": (CONFIG, "dots_without_batch"),
    "selective": (WHOLE_SCORES, "selective"),
}
# Each value under some strategies, and each strategy with one or two of them.
PAIRS = [
    ("data", "names"),
    ("stage 3", "selective"),
    ("tensor", "names"),
    ("tensor", "selective"),
    ("pipeline", "products"),
    ("split backward", "names"),
    ("split backward", "selective"),
]


@pytest.mark.representative("tensor-selective", "split backward-names", "pipeline-products")
@pytest.mark.long
@pytest.mark.sentinel("stage 3-selective")
@pytest.mark.parametrize(("where", "kept"), PAIRS)
def test_remat_of_any_value_changes_no_number(where, kept):
    config, remat = KEPT[kept]
    loss, params = stepped(config, remat=remat, **STRATEGIES[where])
    expected_loss, expected = plain(config)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)

    def near(a, b):
        # Of two stages, each stores half of the layers, in the order of the model.
        np.testing.assert_allclose(a.reshape(b.shape), b, atol=1e-6)

    jax.tree.map(near, params, expected)


TOKENS = ROWS * LENGTH
# Numbers that each name keeps of a layer: with the context goes a log-sum-exp for each head. Nothing
# backward reads what the MLP adds to the stream, so that JAX keeps none of it.
SIZES = dict.fromkeys(NAMES, TOKENS * WIDTH) | {
    "context": TOKENS * (WIDTH + CONFIG.heads),
    "mlp_out": 0,
    **dict.fromkeys(("mlp_gate", "mlp_up", "mlp_hidden"), TOKENS * HIDDEN),
}


def kept_arrays(remat, target="cpu", config=CONFIG, batch=BATCH):
    """The shapes of what a loss keeps for its backward pass, with how many there are of each."""
    experts = isinstance(config, moe.MoEConfig)
    make, loss_of = (moe.MoE, moe.loss) if experts else (gpt.GPT, gpt.loss)

    def loss(params):
        total = loss_of(nnx.merge(graph, params), batch)
        return (total[0] if experts else total).total

    with sl.use(sl.rules.data, mesh_on(target, "data=8"), remat=remat):
        model = nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(model)
        residuals = saved_residuals(loss, params)
    return Counter(aval.shape for aval, _ in residuals)


def numbers_in(arrays):
    return sum(math.prod(shape) * count for shape, count in arrays.items())


def kept_numbers(remat, target="cpu", config=CONFIG):
    """How many numbers a loss keeps for its backward pass."""
    return numbers_in(kept_arrays(remat, target, config))


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.sentinel(
    "context",
    "mlp_hidden",
    "query",
    "attention_out+context+key+mlp_gate+mlp_hidden+mlp_out+mlp_up+query+value",
)
@pytest.mark.parametrize("names", [(name,) for name in NAMES] + [NAMES], ids="+".join)
def test_remat_keeps_exactly_the_activations_that_are_named(names):
    extra = kept_numbers(sl.Remat.save(*names)) - kept_numbers("full")
    assert extra == LAYERS * sum(SIZES[name] for name in names)


@pytest.mark.parametrize("target", ["cpu", pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler)])
def test_remat_by_products_keeps_their_results(target):
    """Those of six projections: nothing backward reads the result of the last.

    A TPU's rotation is a product too, which is no projection.
    """
    extra = kept_numbers("dots_without_batch", target) - kept_numbers("full", target)
    widths = 3 * WIDTH + WIDTH + 2 * HIDDEN
    assert extra == LAYERS * TOKENS * widths


SEGMENTED = BATCH | {"segments": np.arange(LENGTH + 1) // 9 * np.ones((ROWS, 1), np.int32)}


@pytest.mark.parametrize("batch", [BATCH, SEGMENTED], ids=["whole", "segments"])
def test_selective_keeps_everything_but_what_grows_with_the_square(batch):
    """Megatron's: scores, shares and masks go; what is left of softmax is a few numbers a query."""
    everything = kept_arrays("none", config=WHOLE_SCORES, batch=batch)
    selective = kept_arrays("selective", config=WHOLE_SCORES, batch=batch)
    assert max(shape.count(LENGTH) for shape in everything) == 2
    assert max(shape.count(LENGTH) for shape in selective) == 1
    linear = Counter({shape: n for shape, n in everything.items() if shape.count(LENGTH) < 2})
    # The highest score of each query, and the sum of exponentials.
    per_query = 2 * LAYERS * ROWS * CONFIG.heads * LENGTH
    segments = ROWS * LENGTH if batch is SEGMENTED else 0
    assert numbers_in(selective) == numbers_in(linear) - per_query + segments


@pytest.mark.long
def test_selective_is_none_where_attention_keeps_no_scores():
    assert kept_arrays("selective") == kept_arrays("none")
    loss, params = stepped(CONFIG, mesh="data=8,model=1", rules=sl.rules.data, remat="selective")
    assert loss == plain()[0]
    jax.tree.map(np.testing.assert_array_equal, params, plain()[1])


@pytest.mark.representative("pipeline")
@pytest.mark.long
@pytest.mark.parametrize("where", ["stage 3", "tensor", "pipeline"])
def test_selective_keeps_no_scores_in_compiled_steps(where):
    """Beside regions of gathered weights, and between the passes of a pipeline's stages."""
    length = 512
    config = dataclasses.replace(WHOLE_SCORES, context=length, width=16, heads=4, hidden=32)
    batch = {"tokens": jax.ShapeDtypeStruct((ROWS, length + 1), "int32")}

    def temporaries(remat, layers=LAYERS):
        strategy = sl.Strategy(remat=remat, **STRATEGIES[where])
        deep = dataclasses.replace(config, layers=layers)
        make = lambda: gpt.GPT(deep, rngs=nnx.Rngs(0))
        state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
        compiled = sl.train_step(gpt.loss, strategy).lower(state, batch).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # Of the layers of a device, which has two examples of all heads, or eight of one; a stage of the
    # pipeline has half of the layers and, at a time, half of the examples of its devices.
    scores = 4 * LAYERS * 2 * config.heads * length**2
    if where == "pipeline":
        scores //= 2
    selective = temporaries("selective")
    assert temporaries("none") - selective > scores
    # As many layers again keep nothing as large as half of their scores.
    assert temporaries("selective", 2 * LAYERS) - selective < scores / 2


@pytest.mark.long
def test_kept_inputs_of_blocks_are_split_along_the_sequence():
    """ZeRO's split activations: with sequence parallelism each device keeps its part of them."""
    config = dataclasses.replace(CONFIG, heads=8)

    def kept_of_a_layer(rules):
        most = []
        for layers in (LAYERS, 2 * LAYERS):
            make = lambda: gpt.GPT(dataclasses.replace(config, layers=layers), rngs=nnx.Rngs(0))  # noqa: B023
            strategy = sl.Strategy(mesh="data=1,model=8", rules=rules, remat="full")
            state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
            batch = {"tokens": jax.ShapeDtypeStruct((ROWS, LENGTH + 1), "int32")}
            plan = sl.plan(sl.train_step(gpt.loss, strategy), state, batch)
            most.append(plan.memory.most["activations"])
        return (most[1] - most[0]) / LAYERS

    stream = 4 * TOKENS * WIDTH
    assert kept_of_a_layer(sl.rules.data | sl.rules.tensor) == stream
    assert kept_of_a_layer(sl.rules.data | sl.rules.tensor_sequence) == stream / 8
    split = {"mesh": "data=1,model=8", "rules": sl.rules.data | sl.rules.tensor_sequence}
    loss, _ = stepped(config, remat="full", **split)
    np.testing.assert_allclose(loss, plain(config)[0], rtol=1e-6)


PROJECTIONS = ("query", "key", "value", "attention_out", "mlp_gate", "mlp_up", "mlp_out")


def test_minimal_keeps_what_projections_make_and_the_context():
    extra = kept_numbers("minimal") - kept_numbers("full")
    assert extra == LAYERS * sum(SIZES[name] for name in (*PROJECTIONS, "context"))
    # The word is for models without a gate too.
    plain = dataclasses.replace(CONFIG, mlp="gelu")
    extra = kept_numbers("minimal", config=plain) - kept_numbers("full", config=plain)
    names = [name for name in (*PROJECTIONS, "context") if name != "mlp_gate"]
    assert extra == LAYERS * sum(SIZES[name] for name in names)


EXPERTS, PLACES = 4, 8
MOE = moe.tiny(
    layers=2, width=WIDTH, heads=4, context=LENGTH, hidden=HIDDEN, mlp="swiglu", every=1,
    experts=EXPERTS, router=sl.experts.TopK(1, capacity=EXPERTS * PLACES / LENGTH),
)  # fmt: skip
IN_PLACES = ROWS * EXPERTS * PLACES
OF_EXPERTS = {
    "router": TOKENS * EXPERTS,
    "expert_in": IN_PLACES * WIDTH,
    "expert_gate": IN_PLACES * HIDDEN,
    "expert_up": IN_PLACES * HIDDEN,
    "expert_hidden": IN_PLACES * HIDDEN,
    "expert_out": IN_PLACES * WIDTH,
}


@pytest.mark.representative("router", "expert_in", "expert_out")
@pytest.mark.long
@pytest.mark.sentinel("expert_up")
@pytest.mark.parametrize("name", OF_EXPERTS)
def test_remat_keeps_activations_of_experts_by_name(name):
    extra = kept_numbers(sl.Remat.save(name), config=MOE) - kept_numbers("full", config=MOE)
    assert extra == MOE.layers * OF_EXPERTS[name]


def test_remat_with_the_context_kept_attends_once():
    """Else the recomputed block attends once more."""

    def attends(remat):
        with sl.use(sl.rules.data, sl.make_mesh("data=8"), remat=remat):
            model = nnx.eval_shape(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)))
            graph, params = nnx.split(model)
            loss = lambda params: gpt.loss(nnx.merge(graph, params), BATCH).total
            return str(jax.make_jaxpr(jax.grad(loss))(params)).count("name=_attend")

    assert attends("full") - attends(sl.Remat.save("context")) == 1


@pytest.mark.tpu_compiler
def test_remat_with_the_context_kept_runs_the_tpu_kernel_once():
    config = dataclasses.replace(CONFIG, width=128, heads=1, context=128, attention="tpu")
    batch = {"tokens": jax.ShapeDtypeStruct((8, 129), "int32")}
    mesh = mesh_on("v5e:2x4", "data=8")

    def kernels(remat):
        strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, remat=remat, **FULL_ZERO)
        make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
        state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
        lowered = sl.train_step(gpt.loss, strategy).lower(state, batch)
        calls = re.findall(
            r"custom-call\(.*attention_forward", compile_for(mesh, lowered).as_text()
        )
        return len(calls)

    assert kernels("full") == 2
    assert kernels(sl.Remat.save("context")) == 1


def test_remat_values_are_united_compared_and_hashed():
    names = sl.Remat.save("b", "a")
    assert names == sl.Remat(("a", "b", "a")) and hash(names) == hash(sl.Remat(("a", "b")))
    united = names | sl.Remat(products="without_batch") | sl.Remat.save("c")
    assert united == sl.Remat(("a", "b", "c"), "without_batch")
    assert sl.Remat() | names == names
    # What either keeps of blocks that drop parts: all outside of parts that both drop.
    parts = sl.Remat.drop("scores", "mlp")
    assert parts == sl.Remat(dropped=("mlp", "scores")) != sl.Remat()
    assert parts | names == names | parts == sl.Remat(("a", "b"), dropped=("mlp", "scores"))
    assert parts | sl.Remat.drop("scores") == sl.Remat.drop("scores")
    with pytest.raises(ValueError, match="would keep everything"):
        sl.Remat.drop("scores") | sl.Remat.drop("mlp")
    strategy = functools.partial(sl.Strategy, mesh="data=8", rules=sl.rules.data)
    assert strategy(remat=names) == strategy(remat=sl.Remat(("a", "b"))) != strategy(remat="full")


def test_remat_marks_one_block_by_a_value_of_its_own():
    def block(x):
        return jnp.sin(sl.checkpoint_name(jnp.sin(x), "inner") * 2)

    def kept(policy):
        return len(saved_residuals(lambda x: sl.remat(block, policy)(x).sum(), jnp.ones(3)))

    assert kept("full") == 1 and kept(sl.Remat.save("inner")) == 2
    assert kept(sl.Remat.save("other")) == 1


def test_a_part_is_recomputed_by_itself_where_a_value_drops_it():
    def inner(x):
        return jnp.sin(sl.checkpoint_name(jnp.sin(x), "inner"))

    def block(x):
        return jnp.cos(sl.remat(inner, part="inner part")(jnp.cos(x)))

    def kept(remat):
        with sl.use(sl.rules.data, remat=remat):
            return len(saved_residuals(lambda x: sl.remat(block)(x).sum(), jnp.ones(3)))

    # Each of four functions keeps the derivative at its argument; of the part there is one argument.
    assert kept("none") == 4
    assert kept(sl.Remat.drop("inner part")) == kept("none") - 1
    assert kept(sl.Remat.drop("inner part") | sl.Remat.save("inner")) == kept("none")
    assert kept(sl.Remat.drop("another")) == kept("none")
    # In a block that is recomputed the part is not recomputed once more.
    assert kept("full") == 1


@pytest.mark.parametrize(
    "remat, message",
    [
        (
            "dotted",
            "'dotted'.*'none', 'full', 'stage', 'dots', 'dots_without_batch', 'selective', "
            "'minimal'",
        ),
        (sl.Remat.drop("score"), "recomputes `score`, which no part.*part='score'"),
        (sl.Remat.save("contxt"), "keeps `contxt`.*They are called `attention_out`, `block_in`"),
        (("context",), "remat"),
    ],
)
def test_remat_refuses_unknown_words_and_names(remat, message):
    with pytest.raises(ValueError, match=message):
        stepped(CONFIG, mesh="data=8", rules=sl.rules.data, remat=remat)


def test_remat_refuses_names_where_no_block_is_marked():
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, remat=sl.Remat.save("inner"))
    state = sl.init(lambda: {"w": jnp.ones(4)}, optax.sgd(0.1), strategy)
    loss = lambda model, x, rng: jnp.mean(sl.checkpoint_name(x * model["w"], "inner"))
    with pytest.raises(ValueError, match="the loss calls none"):
        sl.train_step(loss, strategy)(state, jnp.ones((8, 4)))


def test_remat_takes_no_joined_projection_for_a_marked_block():
    def loss(model, x, rng):
        return jnp.mean(sl.kernels.projections(x, [model["a"], model["b"]], joined=True)[0])

    make = lambda: {"a": jnp.ones((2, 4)), "b": jnp.ones((2, 4))}
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, remat="full")
    state = sl.init(make, optax.sgd(0.1), strategy)
    with pytest.raises(ValueError, match="the loss calls none"):
        sl.train_step(loss, strategy)(state, jnp.ones((8, 4)))


def test_remat_values_refuse_what_they_are_not_made_of():
    with pytest.raises(ValueError, match="names"):
        sl.Remat(names="context")
    with pytest.raises(ValueError, match="products"):
        sl.Remat(products="some")
    with pytest.raises(ValueError, match="dropped"):
        sl.Remat(dropped="scores")
    with pytest.raises(ValueError, match="without a part"):
        sl.Remat.drop()
    with pytest.raises(ValueError, match="drops parts, which a strategy does"):
        sl.remat(jnp.sin, "selective")
    with pytest.raises(ValueError, match="Leave one of the two out"):
        sl.remat(jnp.sin, "full", part="scores")
    with pytest.raises(ValueError, match='a block has "full"'):
        sl.remat(jnp.sin, "stage")
    with pytest.raises(ValueError, match="name"):
        sl.checkpoint_name(jnp.ones(2), 3)
