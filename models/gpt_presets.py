"""Models that are well known, as configurations of `models/gpt.py`."""

from dataclasses import replace
from typing import Any

from models.gpt_config import GPTConfig, RopeScaling


def tiny(**changes: Any) -> GPTConfig:
    """A GPT-2 for tests and first steps; it trains in seconds on a CPU."""
    return replace(GPTConfig(layers=2, width=64, heads=4, context=64, vocab=256), **changes)


def gpt1(**changes: Any) -> GPTConfig:
    """GPT-1's layers, with a vocabulary that splits evenly and a head of its own.

    OpenAI's own is `gpt1(vocab=40_478, tied=True)`.
    """
    config = GPTConfig(
        layers=12, width=768, heads=12, context=512, vocab=40_512, norm_first=False, tied=False
    )
    return replace(config, **changes)


def gpt2(**changes: Any) -> GPTConfig:
    """GPT-2, the smallest: 124 million parameters."""
    return replace(GPTConfig(layers=12, width=768, heads=12, context=1024, vocab=50_257), **changes)


def gpt2_xl(**changes: Any) -> GPTConfig:
    """GPT-2, the largest: 1.6 billion parameters."""
    return replace(gpt2(layers=48, width=1600, heads=25), **changes)


def llama2_7b(**changes: Any) -> GPTConfig:
    """Llama 2 7B."""
    config = GPTConfig(
        layers=32, width=4096, heads=32, hidden=11_008, context=4096, vocab=32_000,
        norm="rms", positions="rotary", mlp="swiglu", bias=False, tied=False,
    )  # fmt: skip
    return replace(config, **changes)


def llama3_8b(**changes: Any) -> GPTConfig:
    """Llama 3 8B: Llama 2 with a fourth of the key and value heads and four times the
    vocabulary.
    """
    config = llama2_7b(kv_heads=8, hidden=14_336, context=8192, vocab=128_256, rope_theta=500_000.0)
    return replace(config, **changes)


def llama31_8b(**changes: Any) -> GPTConfig:
    """Llama 3.1 8B: Llama 3 for sixteen times the context, whose positions are scaled."""
    return replace(llama3_8b(context=131_072, rope_scaling=RopeScaling()), **changes)


def mistral_7b(**changes: Any) -> GPTConfig:
    """Mistral 7B, the first: each token sees 4,096."""
    config = llama2_7b(kv_heads=8, hidden=14_336, context=8192, window=4096)
    return replace(config, **changes)


def gemma2_9b(**changes: Any) -> GPTConfig:
    """Gemma 2 9B: every other layer has a window."""
    config = GPTConfig(
        layers=42, width=3584, heads=16, kv_heads=8, head_dim=256, hidden=14_336, context=8192,
        vocab=256_000, norm="rms", norm_epsilon=1e-6, positions="rotary", mlp="geglu", bias=False,
        norm_from_zero=True, post_norms=True, scaled_embedding=True, window=4096, full_every=2,
        attention_scale=256**-0.5, attention_cap=50.0, logit_cap=30.0,
    )  # fmt: skip
    return replace(config, **changes)


def gemma2_2b(**changes: Any) -> GPTConfig:
    """Gemma 2 2B."""
    config = gemma2_9b(layers=26, width=2304, heads=8, kv_heads=4, hidden=9216)
    return replace(config, **changes)


def gemma3_1b(**changes: Any) -> GPTConfig:
    """Gemma 3 1B: five layers of six have a window."""
    config = GPTConfig(
        layers=26, width=1152, heads=4, kv_heads=1, head_dim=256, hidden=6912, context=32_768,
        vocab=262_144, norm="rms", norm_epsilon=1e-6, positions="rotary", mlp="geglu", bias=False,
        query_key_norm=True, norm_from_zero=True, post_norms=True, scaled_embedding=True,
        window=512, full_every=6, rope_theta=1_000_000.0, local_rope_theta=10_000.0,
        attention_scale=256**-0.5,
    )  # fmt: skip
    return replace(config, **changes)
