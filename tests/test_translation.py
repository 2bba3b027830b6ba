"""What a model with an encoder and a decoder writes, and what it takes."""

import math
from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib as sl
from models import moe, translation

FIRST, LENGTH = 1, 8
TIGHT = sl.experts.Top2(capacity=0.75)  # many tokens find no place
CONFIG = translation.tiny(
    layers=2, every=1, width=16, heads=2, context=LENGTH, vocab=16, experts=4, group=16,
    router=TIGHT,
)  # fmt: skip
SOURCES = jnp.asarray(np.random.default_rng(0).integers(3, 16, (16, LENGTH)))


@pytest.fixture(scope="module")
def model():
    """One whose likeliest tokens differ from place to place."""
    with sl.unsharded():
        model = translation.Translation(CONFIG, rngs=nnx.Rngs(0))
    generator = np.random.default_rng(7)
    drawn = lambda x: x + 0.5 * generator.standard_normal(x.shape).astype(x.dtype)
    nnx.update(model, jax.tree.map(drawn, nnx.state(model, nnx.Param)))
    return model


@jax.jit
def translated(model, sources):
    return translation.translate(model, sources, FIRST, LENGTH)


@jax.jit
def next_token(model, sources, target, at):
    """The likeliest token behind each of the target, of which those up to `at` are written."""
    view = nnx.view(model, deterministic=True, decoding=True)
    written = jnp.broadcast_to(jnp.arange(LENGTH) <= at, target.shape)
    return view.translated(sources, target, None, written)[0].argmax(-1)


def test_tokens_that_are_not_written_yet_change_no_translation(model):
    with sl.unsharded():
        found = np.asarray(translated(model, SOURCES))
        for filler in (1, 5):
            target = np.full((16, LENGTH + 1), filler)
            target[:, 0] = FIRST
            for at in range(LENGTH):
                target[:, at + 1] = next_token(model, SOURCES, target[:, :-1], at)[:, at]
            np.testing.assert_array_equal(found, target[:, 1:])
    assert len(np.unique(found)) > 2


def test_a_sentence_is_translated_alone_as_beside_others(model):
    with sl.unsharded():
        beside = translated(model, SOURCES)
        alone = translated(model, SOURCES[1:2])  # fewer tokens than a group of training has
    np.testing.assert_array_equal(beside[1:2], alone)


def test_training_flops_count_the_attention_to_the_source():
    config = translation.tiny(router=sl.experts.TopK(2))
    shapes = nnx.eval_shape(lambda: translation.Translation(config, rngs=nnx.Rngs(0)))
    weights = 0
    for path, leaf in nnx.to_flat_state(nnx.state(shapes, nnx.Param)):
        names = [str(name) for name in path]
        if names[-1] in ("scale", "positions") or names == ["embedding"]:
            continue
        of_expert = names[-1] in ("up", "down")
        met = config.router.choices / config.experts if of_expert else 1
        weights += met * math.prod(leaf.shape)
    weights += config.vocab * config.width  # the head
    attentions = config.layers + config.layers // 2
    scores = attentions * config.heads * 2 * config.dims["head_dim"] * config.context
    assert config.training_flops_per_token == pytest.approx(6 * (weights + scores), rel=0.02)
    of_decoder = {field.name: getattr(config, field.name) for field in fields(moe.MoEConfig)}
    more = config.training_flops_per_token / moe.MoEConfig(**of_decoder).training_flops_per_token
    assert more > 1.1
