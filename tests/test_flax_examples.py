"""Flax's published examples on many meshes against one device, as they are; their structure is in
`flax_examples`.
"""

import flax_examples as examples
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.testing import check_step

TOKENS = np.random.default_rng(0).integers(1, examples.VOCABULARY, (8, 6)).astype("i4")
IMAGES = np.random.default_rng(1).normal(size=(8, 8, 8, 3)).astype("f")
RULES = sl.rules.data | sl.rules.fsdp | sl.rules.tensor | sl.AxisRules(kv="model", length=None)
SGD = optax.sgd(0.1, momentum=0.9)
ZERO = sl.Zero(3, small=0)


def cross_entropy(logits, tokens):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
    return sl.weighted_mean(losses.sum(), losses.size)


def nnx_loss(model, tokens, rng):
    return cross_entropy(model(tokens), tokens)


def linen_loss(variables, tokens, rng):
    return cross_entropy(examples.LinenLM().apply(variables, tokens), tokens)


def resnet_loss(variables, images, rng):
    logits, updates = examples.ResNet().apply(variables, images, mutable=["batch_stats"])
    variables.update(updates)
    return jnp.mean((logits - images.sum((1, 2, 3))[:, None] / 10) ** 2)


def gemma():
    return examples.Gemma(examples.BY_NAME, nnx.Rngs(0))


def lm1b_linen():
    return examples.LinenLM().init(jax.random.key(0), jnp.ones((1, 6), "i4"))


def lm1b_nnx():
    return examples.NnxLM(nnx.Rngs(0))


@pytest.mark.representative("lm1b_linen")
@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "loss", "mesh"),
    [
        # Tensor parallelism with stage 3 of ZeRO and fully sharded data parallelism, and with
        # either of them.
        (gemma, nnx_loss, "data=2,fsdp=2,model=2"),
        (lm1b_linen, linen_loss, "data=2,fsdp=1,model=2"),
        (lm1b_nnx, nnx_loss, "data=1,fsdp=2,model=2"),
    ],
    ids=["gemma", "lm1b_linen", "lm1b_nnx"],
)
def test_flax_language_models_match_one_device(make, loss, mesh):
    check_step(make, SGD, loss, TOKENS, RULES, meshes=[mesh], steps=1, zero=ZERO)


@pytest.mark.long
def test_flax_gemma_with_its_own_specs_and_constraints_matches_one_device():
    rules = sl.AxisRules(batch="fsdp", act_embed="tp")
    make = lambda: examples.Gemma(examples.FSDP_TP, nnx.Rngs(0))
    check_step(make, SGD, nnx_loss, TOKENS, rules, meshes=["fsdp=2,tp=2"], steps=1, manual=())
    with pytest.raises(ValueError, match=r"step is manual over `fsdp`.*`manual=\(\)`"):
        sl.init(make, SGD, sl.Strategy(mesh="fsdp=4,tp=2", rules=rules), abstract=True)


@pytest.mark.long
def test_flax_resnet_matches_one_device():
    make = lambda: examples.ResNet().init(jax.random.key(0), jnp.ones((1, 8, 8, 3)))
    rules = sl.AxisRules(batch=("pod", "data"))
    check_step(
        make,
        SGD,
        resnet_loss,
        IMAGES,
        rules,
        meshes=["pod=2,data=2"],
        steps=2,
        zero=sl.Zero(2, small=0),
    )


def test_flax_examples_are_laid_out_by_their_names():
    P = jax.sharding.PartitionSpec
    strategy = sl.Strategy(mesh="data=2,fsdp=2,model=2", rules=RULES)
    of = lambda make: sl.specs(sl.init(make, None, strategy, abstract=True)).params
    attention = of(lm1b_linen)["params"]["LinenBlock_0"]["MultiHeadDotProductAttention_0"]
    assert attention["query"]["kernel"] == P("fsdp", "model", None)
    assert attention["query"]["bias"] == P("model", None)
    assert attention["out"]["kernel"] == P("fsdp", "model", None)
    block = of(lm1b_nnx)["block"]
    assert block["attention"]["query"]["kernel"] == P("fsdp", "model", None)
    assert block["up"]["kernel"] == P("fsdp", "model")
    assert of(gemma)["blocks"][0]["gate"]["w"] == P(None, "fsdp", "model")
