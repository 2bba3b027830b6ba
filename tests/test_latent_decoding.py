"""Decoding of latent attention, whose cache has the latents that keys and values are made of."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_decoding import (
    CUBLAS,
    KEY,
    LARGE,
    LAYERS,
    LLAMA,
    MESHES,
    PLATFORMS,
    ROWS,
    SLOTS,
    WIDTH,
    compile_extend,
    cpu_mesh,
    make,
    tokens_of,
    without_cache,
)

import shardlib as sl
from models import decoding, gpt, moe, sampling
from shardlib import testing

SIZES = gpt.LatentAttention(query_rank=24, kv_rank=16, key_dim=8, rotary_dim=4, value_dim=6)
LATENT = replace(LLAMA, kv_heads=None, latent=SIZES)
CONFIGS = {
    "plain": LATENT,
    "biases, caps and windows": replace(
        LATENT, bias=True, attention_cap=2.0, window=4, full_every=2, attention_scale=0.4
    ),
    "scores in memory": replace(LATENT, attention="xla"),
    "wide values": replace(LATENT, latent=replace(SIZES, value_dim=20)),
}


@pytest.mark.long("biases, caps and windows", "wide values")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_latents_in_a_cache_give_what_a_whole_pass_gives(config):
    model, tokens = make(config), tokens_of(config, rows=3)
    prompts = [tokens[0, :7], tokens[1, :2], tokens[2, :4]]
    padded, padding = decoding.pad(prompts)
    write = functools.partial(sampling.generate, model, padded, 6, KEY, padding_B=padding)
    with sl.unsharded():
        found = write()
        np.testing.assert_array_equal(write(chunk=4), found)
        for row, prompt in zip(found, prompts, strict=True):
            np.testing.assert_array_equal(row, without_cache(model, prompt[None], 6)[0])


def test_a_cache_of_latents_has_no_heads():
    model, prompts = make(LATENT), tokens_of(LATENT, rows=2, length=5)
    with sl.unsharded():
        _, cache = decoding.prefill(model, prompts, slots=8)
        _, read = decoding.extend(model, prompts, decoding.empty(model, rows=2, slots=8))
    assert cache.k_LBGCK.shape == (LATENT.layers, 2, 1, 8, SIZES.rotary_dim)
    assert cache.v_LBGCK.shape == (LATENT.layers, 2, 1, 8, SIZES.kv_rank)
    np.testing.assert_allclose(read.k_LBGCK, cache.k_LBGCK, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(read.v_LBGCK, cache.v_LBGCK, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_small_deepseek_is_decoded_with_a_cache():
    config = replace(moe.tiny_deepseek(), context=16)
    model, prompts = make(config, moe.MoE), tokens_of(config, length=5)
    with sl.unsharded():
        expected = without_cache(model, prompts, 6)
        np.testing.assert_array_equal(sampling.generate(model, prompts, 6, KEY), expected)


def test_latents_in_a_cache_are_of_kernels_with_their_adapters():
    model, draws = nnx.clone(make(LATENT)), np.random.default_rng(3)
    sl.lora.add(model, rank=2, paths=(".*/attention/.*",), rngs=nnx.Rngs(1))

    def drawn(path, leaf):
        if "adapter" not in jax.tree_util.keystr(path):
            return leaf
        return jnp.asarray(0.3 * draws.normal(size=leaf.shape), leaf.dtype)

    nnx.update(model, jax.tree.map_with_path(drawn, nnx.state(model, nnx.Param)))
    prompts = tokens_of(LATENT, rows=2, length=5)
    with sl.unsharded():
        expected = without_cache(model, prompts, 5)
        assert (expected != without_cache(make(LATENT), prompts, 5)).any()
        np.testing.assert_array_equal(sampling.generate(model, prompts, 5, KEY), expected)


@functools.cache
def on_one_device():
    prompts, padding = tokens_of(LATENT, length=8), np.array([0, 3, 6, 1])
    with sl.unsharded():
        return sampling.generate(make(LATENT), prompts, 8, KEY, padding_B=padding)


@pytest.mark.representative("both-whole", "ring-chunks", "stages-whole")
@pytest.mark.long
@pytest.mark.sentinel("sequence-chunks")
@pytest.mark.parametrize("chunk", [None, 4], ids=["whole", "chunks"])
@pytest.mark.parametrize("where", MESHES)
def test_latents_in_a_cache_on_a_mesh_give_what_one_device_writes(where, chunk):
    (shape, rules), model, expected = MESHES[where], make(LATENT), on_one_device()
    prompts, padding = tokens_of(LATENT, length=8), np.array([0, 3, 6, 1])
    with sl.use(decoding.rules(rules), cpu_mesh(shape)):
        found = sampling.generate(model, prompts, 8, KEY, padding_B=padding, chunk=chunk)
    np.testing.assert_array_equal(found, expected)


# Compiled for machines that are not there.

LARGE_SIZES = gpt.LatentAttention(
    query_rank=256, kv_rank=128, key_dim=128, rotary_dim=128, value_dim=128
)
LARGE_LATENT = replace(LARGE, kv_heads=None, latent=LARGE_SIZES)
CACHE_BYTES = LAYERS * ROWS // 2 * SLOTS * (LARGE_SIZES.kv_rank + LARGE_SIZES.rotary_dim) * 2


@pytest.mark.parametrize("platform", PLATFORMS)
def test_decoding_of_latents_under_tensor_parallelism_is_two_all_reduces_of_a_token_per_layer(
    platform,
):
    rules = sl.rules.data | sl.rules.tensor
    compiled, found = compile_extend(platform, "data=2,model=4", rules, config=LARGE_LATENT)
    token, sums = ROWS // 2 * WIDTH, {}
    for one in found:
        assert (one.kind, one.axes) == ("all-reduce", ("model",)), testing.summary(found)
        assert one.operand_bytes in (2 * token, 4 * token)
        sums[one.times] = sums.get(one.times, 0) + 1
    assert sums == {LAYERS: 2, 1: 1}, testing.summary(found)
    # The cache is written in its place, every device of the axis has all of it, and there are
    # neither keys and values of heads beside it nor a second cache.
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= CACHE_BYTES
    workspace = CUBLAS if platform.startswith("h200") else 0
    assert memory.temp_size_in_bytes - workspace < CACHE_BYTES


@pytest.mark.parametrize("platform", PLATFORMS)
def test_decoding_with_latents_split_over_devices_combines_what_queries_found(platform):
    rules = sl.rules.data | sl.AxisRules(seq="context", residual_seq="context")
    rules = rules.attention(context="ring")
    _, found = compile_extend(platform, "data=2,context=4", rules, config=LARGE_LATENT)
    queries = ROWS // 2 * LARGE.heads
    assert {(one.kind, one.axes, one.times) for one in found} == {
        ("all-reduce", ("context",), LAYERS)
    }, testing.summary(found)
    # Of each query: its largest score, its sum of exponentials, and its share of the latents.
    elements = sorted(int(np.prod(shape)) for one in found for shape in one.shapes)
    rank = LARGE_SIZES.kv_rank
    assert elements == [queries, queries, queries * rank], testing.summary(found)
