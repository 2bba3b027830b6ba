"""What models make of tokens that are none, and what they refuse before it is silent."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import shardlib as sl
from models import decoding, gpt, hub, moe, sampling, translation

CONFIG = gpt.tiny(layers=1, width=16, heads=2, context=16, vocab=10, vocab_multiple=4)
TOKENS = jnp.array([[1, 2, 3, 4, 5, 6, 7, 8, 9]])


def made(config):
    with sl.unsharded():
        return gpt.GPT(config, rngs=nnx.Rngs(0))


@pytest.mark.long("False")
@pytest.mark.parametrize("fused", [False, True])
def test_tokens_that_are_none_make_the_loss_nan_and_masked_ones_nothing(fused):
    model = made(replace(CONFIG, fused_loss=fused))
    with sl.unsharded():
        # 10 and 11 are rows that `vocab_multiple` adds.
        for wrong in (-1, -100, 10, 11, 12):
            found = gpt.loss(model, {"tokens": TOKENS.at[0, 8].set(wrong)})
            assert np.isnan(found.total)
            mask = jnp.ones((1, 8)).at[0, 7].set(0)
            left_out = gpt.loss(model, {"tokens": TOKENS.at[0, 8].set(wrong), "mask": mask})
            expected = gpt.loss(model, {"tokens": TOKENS, "mask": mask})
            np.testing.assert_allclose(left_out.total, expected.total, rtol=1e-6)
        assert np.isnan(model._embed(jnp.array([[-1, 12]]))).all()


@pytest.mark.parametrize("shape", [(2, 1), (1, 8), (2, 9), (8,)])
def test_a_mask_has_a_number_for_each_target(shape):
    batch = {"tokens": TOKENS.repeat(2, 0), "mask": jnp.ones(shape)}
    with sl.unsharded():
        model = made(CONFIG)
        of_mask = lambda: gpt.loss(model, batch)
        with pytest.raises(ValueError, match=r"and targets are \[2, 8\]"):
            jax.eval_shape(of_mask)
        with pytest.raises(ValueError, match=r"and targets are \[2, 8\]"):
            gpt.cross_entropy(jnp.zeros((2, 8, 12)), TOKENS.repeat(2, 0)[:, 1:], batch["mask"])


@pytest.mark.parametrize(
    ("tokens", "got"),
    [(TOKENS[0], r"int32\[9\]. A row alone is `tokens\[None\]`"), (1.0 * TOKENS, "float32")],
)
def test_models_and_losses_take_rows_of_tokens(tokens, got):
    model = made(CONFIG)
    with sl.unsharded():
        with pytest.raises(ValueError, match=f"`GPT` takes rows of tokens, .*got {got}"):
            model(tokens)
        with pytest.raises(ValueError, match=rf"`loss\(batch.*takes rows of tokens, .*got {got}"):
            gpt.loss(model, {"tokens": tokens})


def test_lengths_of_prompts_are_no_padding():
    model = made(CONFIG)
    with sl.unsharded():
        for padding in ([4, 4], [9, 0], [-3, 0]):
            with pytest.raises(ValueError, match="are padding, not how long prompts are"):
                decoding.prefill(model, TOKENS[:, :4].repeat(2, 0), 8, np.array(padding))
            with pytest.raises(ValueError, match="are padding, not how long prompts are"):
                prompts = TOKENS[:, :4].repeat(2, 0)
                key = jax.random.key(0)
                sampling.generate(model, prompts, 1, key, padding_B=np.array(padding), chunk=3)
        with pytest.raises(ValueError, match=r"sampling=0.8\)` takes a `Sampling"):
            sampling.generate(model, TOKENS, 1, jax.random.key(0), 0.8)


def test_a_translation_is_no_decoder():
    config = translation.tiny(
        width=16, heads=2, context=16, vocab=20, experts=2, router=sl.experts.TopK(1)
    )
    with sl.unsharded():
        model = translation.Translation(config, rngs=nnx.Rngs(0))
        with pytest.raises(ValueError, match="reads a source and a target"):
            model(TOKENS)
        with pytest.raises(ValueError, match="what its encoder has read"):
            sampling.generate(model, TOKENS, 2, jax.random.key(0))


def test_a_router_is_a_router():
    with pytest.raises(ValueError, match="router='top2'.*is no router"):
        moe.tiny(router="top2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"form": "nonsense"}, "form='nonsense'.*'dropless' or 'scatter' or 'einsum', or None"),
        (
            {"form": "dropless", "router": sl.experts.TopK(2, capacity=1.0)},
            'form="dropless", router=.*say `capacity=None`',
        ),
        ({"balance_bias": True}, "balance_bias=True, router=TopK.*has no use for a bias"),
        ({"router": sl.experts.ExpertChoice()}, "among later tokens too.*sees_later_tokens=True"),
        ({"router": sl.experts.Hash()}, "reads `ids`, which blocks do not give it"),
        ({"router": sl.experts.NoisyTopK(2)}, "reads `noise_logits`"),
    ],
)
def test_fields_of_experts_that_do_not_go_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=rf"MoEConfig\(.*{message}"):
        moe.tiny(**changes)
    with pytest.raises(ValueError, match=rf"TranslationConfig\(.*{message}"):
        translation.tiny(**{"router": sl.experts.TopK(2), **changes})


def test_experts_of_another_width_are_described_as_they_are():
    config = moe.mixtral_8x7b(
        layers=2, width=16, heads=4, kv_heads=2, hidden=32, expert_hidden=24, context=16, vocab=40
    )
    assert hub.description(config)["intermediate_size"] == 24


def test_decoders_have_heads_that_divide():
    sizes = {"layers": 1, "sequence": 4, "vocab": 4}
    with pytest.raises(ValueError, match="must be a multiple of `heads=16`"):
        sl.planning.Decoder(width=8, heads=16, **sizes)
    with pytest.raises(ValueError, match="must be a multiple of `kv_heads=3`"):
        sl.planning.Decoder(width=12, heads=4, kv_heads=3, **sizes)


def test_an_evaluation_gathers_what_zero_splits():
    decoder = sl.planning.Decoder(layers=12, width=768, heads=12, sequence=512, vocab=40_512)
    found = {}
    for stage in range(4):
        shared = sl.planning.Parallelism(data=8, zero=stage)
        found[stage] = sl.estimate(decoder, examples=2, training=False, parallelism=shared)
    whole = found[0].total_bytes
    assert found[1].total_bytes == found[2].total_bytes == whole + whole_parameters(found[1])
    assert found[1].kinds["copies of parameters"] == 4 * decoder.parameters
    assert found[3].total_bytes < whole


def whole_parameters(estimate):
    return estimate.kinds["parameters"]


def test_nothing_is_divided_by_no_time():
    infinite = sl.break_even(parameters=1e9, workers=8, bandwidth=float("inf"))
    assert "1.00 times as fast" in str(infinite)
    assert sl.break_even(parameters=1e9, workers=1, bandwidth=1e9).speedup == 1
