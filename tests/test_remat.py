"""What blocks keep for the backward pass: the same numbers, and as much as was asked for."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt

ROWS, LENGTH, WIDTH, HIDDEN, LAYERS = 16, 32, 64, 256, 4
CONFIG = gpt.tiny(
    layers=LAYERS,
    width=WIDTH,
    heads=4,
    context=LENGTH,
    norm="rms",
    mlp="swiglu",
    bias=False,
    positions="rotary",
)
BATCH = {
    "tokens": np.random.default_rng(0).integers(0, CONFIG.vocab, (ROWS, LENGTH + 1), dtype=np.int32)
}
NAMES = (
    "attention_out", "context", "key", "mlp_gate", "mlp_hidden", "mlp_out", "mlp_up", "query",
    "value",
)  # fmt: skip
FULL_ZERO = {"zero": sl.Zero(3, small=0)}
PIPELINE = {"mesh": "stage=2,data=4", "rules": sl.rules.data | sl.rules.pipeline}
STRATEGIES = {
    "data": {"mesh": "data=8", "rules": sl.rules.data},
    "stage 3": {"mesh": "data=8", "rules": sl.rules.data, **FULL_ZERO},
    "tensor": {
        "mesh": "data=2,model=4", "rules": sl.rules.data | sl.rules.tensor_sequence, **FULL_ZERO,
    },
    "pipeline": {
        **PIPELINE, "zero": sl.Zero(1, small=0), "pipeline": sl.pipeline.OneFOneB(2, 2),
    },
    "split backward": {**PIPELINE, "pipeline": sl.pipeline.ZBH1(2, 2)},
}  # fmt: skip


def stepped(**options):
    """The loss of a step, and the parameters after it."""
    strategy = sl.Strategy(**options)
    state = sl.init(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
    state, metrics = sl.train_step(gpt.loss, strategy)(state, BATCH)
    return metrics["loss"], jax.tree.map(np.asarray, state.params)


@functools.cache
def plain():
    return stepped(mesh="data=8,model=1", rules=sl.rules.data)


@pytest.mark.long
@pytest.mark.sentinel("stage 3-names", "split backward-names", "tensor-products")
@pytest.mark.parametrize(
    "remat",
    [sl.Remat.save("context", "mlp_up", "query"), "dots_without_batch"],
    ids=["names", "products"],
)
@pytest.mark.parametrize("where", STRATEGIES)
def test_remat_of_any_value_changes_no_number(where, remat):
    loss, params = stepped(remat=remat, **STRATEGIES[where])
    expected_loss, expected = plain()
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


def kept_numbers(remat, target="cpu"):
    """How many numbers a loss keeps for its backward pass."""

    def loss(params):
        return gpt.loss(nnx.merge(graph, params), BATCH).total

    with sl.use(sl.rules.data, mesh_on(target, "data=8"), remat=remat):
        model = nnx.eval_shape(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(model)
        residuals = saved_residuals(loss, params)
    return sum(aval.size for aval, _ in residuals)


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
    config = dataclasses.replace(CONFIG, width=256, heads=2, context=256, attention="tpu")
    batch = {"tokens": jax.ShapeDtypeStruct((8, 257), "int32")}
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
    strategy = functools.partial(sl.Strategy, mesh="data=8", rules=sl.rules.data)
    assert strategy(remat=names) == strategy(remat=sl.Remat(("a", "b"))) != strategy(remat="full")


def test_remat_marks_one_block_by_a_value_of_its_own():
    def block(x):
        return jnp.sin(sl.checkpoint_name(jnp.sin(x), "inner") * 2)

    def kept(policy):
        return len(saved_residuals(lambda x: sl.remat(block, policy)(x).sum(), jnp.ones(3)))

    assert kept("full") == 1 and kept(sl.Remat.save("inner")) == 2
    assert kept(sl.Remat.save("other")) == 1


@pytest.mark.parametrize(
    "remat, message",
    [
        ("dotted", "'dotted'.*'none', 'full', 'stage', 'dots', 'dots_without_batch'"),
        (sl.Remat.save("contxt"), "keeps `contxt`.*They are called `attention_out`, `context`"),
        (("context",), "remat"),
    ],
)
def test_remat_refuses_unknown_words_and_names(remat, message):
    with pytest.raises(ValueError, match=message):
        stepped(mesh="data=8", rules=sl.rules.data, remat=remat)


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
    with pytest.raises(ValueError, match='a block has "full"'):
        sl.remat(jnp.sin, "stage")
    with pytest.raises(ValueError, match="name"):
        sl.checkpoint_name(jnp.ones(2), 3)
