"""DeepSeek-V3's and Qwen3's shapes: their sizes, latent attention against its formulas, and a small
one on meshes against one device.
"""

import functools
import math
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from models import attention, decoding, gpt, moe, translation
from models.latent_attention import MultiHeadLatentAttention

TINY = moe.tiny_deepseek()
NAMES = ("query_latent", "kv_latent", "rotary_key")


@functools.cache
def parameters(config):
    """The shapes of all parameters, by path."""
    model = nnx.eval_shape(lambda: moe.MoE(config, rngs=nnx.Rngs(0)))
    found = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return {"/".join(str(key.key) for key in path): leaf.shape for path, leaf in found}


# Sizes.


@pytest.mark.parametrize(
    ("config", "count", "billions_met"),
    [
        (moe.deepseek_v3(), 671_026_419_200, 37),
        (moe.qwen3_235b_a22b(), 235_093_634_560, 22),
    ],
    ids=["deepseek_v3", "qwen3_235b_a22b"],
)
def test_presets_have_the_published_parameter_counts(config, count, billions_met):
    shapes = parameters(config)
    assert sum(map(math.prod, shapes.values())) == count
    # Of the experts a token meets as many as its router chooses, and of the embedding a row.
    routed = [shape for path, shape in shapes.items() if re.search(r"mlp/(up|gate|down)$", path)]
    left = 1 - config.router.choices / config.experts
    met = count - left * sum(map(math.prod, routed)) - math.prod(shapes["embedding"])
    assert round(met / 1e9) == billions_met


def test_deepseek_v3_has_the_published_layers():
    shapes = parameters(moe.deepseek_v3())
    assert shapes["dense/mlp/up/kernel"] == (3, 18_432, 7168)
    assert shapes["dense/attention/query/kernel"] == (3, 128, 192, 1536)
    assert shapes["blocks/expert/mlp/up"] == (58, 256, 7168, 2048)
    assert shapes["blocks/expert/mlp/router_bias"] == (58, 256)
    assert shapes["blocks/expert/shared/up/kernel"] == (58, 2048, 7168)


@pytest.mark.parametrize("config", [moe.deepseek_v3(), moe.qwen3_235b_a22b(), TINY])
def test_training_flops_are_six_per_weight_a_token_meets_plus_attention(config):
    weights = 0
    for path, shape in parameters(config).items():
        if path == "embedding" or "norm" in path or path.endswith("bias"):
            continue
        met = config.router.choices / config.experts if "/mlp/" in path and len(shape) > 3 else 1
        weights += met * math.prod(shape)
    sizes = 2 * config.dims["head_dim"]
    if config.latent is not None:
        sizes = config.latent.head_dim + config.latent.value_dim
    attention = config.layers * config.heads * sizes * config.context
    # Norms count a little besides.
    expected = 6 * (weights + attention)
    assert expected < config.training_flops_per_token < 1.03 * expected
    assert config.training_flops_per_token == pytest.approx(expected, rel=0.001) or config is TINY


def test_training_flops_of_experts_that_choose_are_those_of_the_experts_of_a_mean_token():
    tokens_choose = replace(TINY, router=sl.experts.TopK(2), balance_bias=False)
    experts_choose = replace(tokens_choose, router=sl.experts.ExpertChoice(2.0, True))
    assert experts_choose.training_flops_per_token == tokens_choose.training_flops_per_token


def test_optimizers_are_told_which_dims_count_layers_and_experts():
    found = {path: moe.stacked(path, None) for path in parameters(TINY)}
    assert found["dense/mlp/up/kernel"] == found["blocks/expert/shared/up/kernel"] == 1
    assert found["blocks/expert/mlp/up"] == 2
    assert found["blocks/expert/mlp/router_bias"] == 1
    assert found["embedding"] == 0


# Latent attention.


def drawn(module, seed=0):
    """A module in which no parameter is at a value, such as one, that would hide a mistake."""
    structure, state = nnx.split(module)
    generator = np.random.default_rng(seed)

    def value(path, leaf):
        centre = 1.0 if "scale" in str(path) else 0.0
        return jnp.asarray(centre + 0.2 * generator.standard_normal(leaf.shape), leaf.dtype)

    return nnx.merge(structure, jax.tree_util.tree_map_with_path(value, state))


def root_mean_square_norm(x, scale, epsilon):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def turned(x, theta):
    """Pairs of a token's numbers, `[S, P]`, as complex ones, times a power of e^i."""
    half = x.shape[-1] // 2
    angles = jnp.outer(jnp.arange(len(x)), theta ** (-2 * jnp.arange(half) / x.shape[-1]))
    z = (x[:, :half] + 1j * x[:, half:]) * jnp.exp(1j * angles)
    return jnp.concatenate([z.real, z.imag], -1)


def by_the_paper(config, params, x):
    """DeepSeek-V2's equations 37 to 47, a head at a time, of one sequence `[S, D]`."""
    latent, theta, epsilon = config.latent, config.rope_theta, config.norm_epsilon
    weight = lambda name: params[name]["kernel"]
    normed = lambda c, name: root_mean_square_norm(c, params[name]["scale"], epsilon)
    c_q = normed(x @ weight("query_latent").T, "query_norm")
    c_kv = normed(x @ weight("kv_latent").T, "kv_norm")
    key_r = turned(x @ weight("rotary_key").T, theta)
    out = jnp.zeros_like(x)
    for head in range(config.heads):
        query = c_q @ weight("query")[head].T
        query_c, query_r = query[:, : latent.key_dim], turned(query[:, latent.key_dim :], theta)
        key_c, value = c_kv @ weight("key")[head].T, c_kv @ weight("value")[head].T
        scores = query_c @ key_c.T + query_r @ key_r.T
        scores /= math.sqrt(latent.key_dim + latent.rotary_dim)
        seen = jnp.tri(len(x), dtype=bool)
        shares = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
        out += shares @ value @ weight("output")[:, head].T
    return out


@pytest.mark.long
@pytest.mark.sentinel("None")
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_latent_attention_equals_the_formulas_of_the_paper(implementation):
    config = replace(TINY, attention=implementation)
    module = drawn(MultiHeadLatentAttention(config, rngs=nnx.Rngs(0)))
    structure, state = nnx.split(module)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, 7, config.width)), "float32")
    rotation = gpt.rotations(jnp.arange(7), config.latent.rotary_dim, config.rope_theta)

    def ours(state, x):
        with sl.unsharded():
            return nnx.merge(structure, state)(x, rotation)

    def theirs(state, x):
        params = nnx.to_pure_dict(state)
        return jnp.stack([by_the_paper(config, params, row) for row in x])

    def both(attend, state, x):
        total = lambda state, x: (jnp.sin(attend(state, x)).sum(), attend(state, x))
        return jax.value_and_grad(total, (0, 1), has_aux=True)(state, x)

    found, expected = (jax.jit(functools.partial(both, f))(state, x) for f in (ours, theirs))
    close = functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5)
    jax.tree.map(close, found, expected)


@pytest.mark.long
def test_norms_of_queries_and_keys_come_before_positions():
    config = gpt.tiny(
        width=16, heads=4, kv_heads=2, norm="rms", positions="rotary", bias=False,
        query_key_norm=True,
    )  # fmt: skip
    module = drawn(attention.Attention(config, rngs=nnx.Rngs(0)))
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 5, 16)), "float32")
    with sl.unsharded():
        q, k, v = module.projected(x, gpt.rotations(jnp.arange(5), 4, config.rope_theta))
    params = nnx.to_pure_dict(nnx.state(module))
    for name, found in (("query", q), ("key", k)):
        plain = jnp.einsum("bsd,hkd->bshk", x, params[name]["kernel"])
        scale = params[f"{name}_norm"]["scale"]
        normed = root_mean_square_norm(plain, scale, config.norm_epsilon)
        expected = [turned(one, config.rope_theta) for one in normed[0].swapaxes(0, 1)]
        np.testing.assert_allclose(found[0], jnp.stack(expected, 1), rtol=1e-4, atol=1e-5)
    plain = jnp.einsum("bsd,hkd->bshk", x, params["value"]["kernel"])
    np.testing.assert_allclose(v, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_a_small_qwen_is_decoded_with_a_cache():
    config = moe.qwen3_235b_a22b(
        layers=2, width=32, heads=4, kv_heads=2, head_dim=8, hidden=16, context=16, vocab=40,
        experts=4, router=sl.experts.TopK(2),
    )  # fmt: skip
    model = drawn(moe.MoE(config, rngs=nnx.Rngs(0)))
    tokens = np.random.default_rng(1).integers(0, 40, (2, 9), dtype=np.int32)
    with sl.unsharded():
        expected = nnx.jit(lambda model: model(tokens))(model)
        found, cache = decoding.prefill(model, tokens[:, :7], slots=9)
        np.testing.assert_allclose(found, expected[:, 6], rtol=1e-4, atol=1e-4)
        for at in (7, 8):
            found, cache = decoding.extend(model, tokens[:, at : at + 1], cache)
            np.testing.assert_allclose(found, expected[:, at], rtol=1e-4, atol=1e-4)


# On meshes.


BATCH = {"tokens": np.random.default_rng(0).integers(0, 128, (4, 17)).astype(np.int32)}
SPLIT = sl.rules.experts | sl.rules.tensor


def trained(config, mesh, rules, steps=3, **options):
    """The losses of some steps, and the last state."""
    count = math.prod(int(part.split("=")[1]) for part in mesh.split(","))
    mesh = sl.make_mesh(mesh, devices=jax.devices()[:count])
    strategy = sl.Strategy(mesh=mesh, rules=rules, **options)
    make = lambda: moe.MoE(config, rngs=nnx.Rngs(0))
    state = sl.init(make, optax.sgd(0.5), strategy)
    step, losses = sl.train_step(moe.loss, strategy), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses, state


@functools.cache
def on_one_device(config=TINY):
    losses, state = trained(config, "data=1", sl.rules.data)
    assert losses[-1] < losses[0] - 0.1, "it learns"
    return losses, jax.device_get(state.params)


MESHES = {
    "data and tensor": ("data=2,model=2", SPLIT, {}),
    "zero 3": ("data=2,model=2", SPLIT, {"zero": sl.Zero(3, small=0)}),
    "remat full": ("data=2", sl.rules.experts, {"remat": "full"}),
    "latents alone are kept": ("data=2", sl.rules.experts, {"remat": sl.Remat.save(*NAMES)}),
    "minimal": ("data=2", sl.rules.experts, {"remat": "minimal"}),
    "sequence": ("data=2,model=2", sl.rules.experts | sl.rules.tensor_sequence, {}),
    "automatic": ("data=2,model=2", SPLIT, {"manual": ()}),
    "ring": ("data=2,context=2", sl.rules.experts | sl.rules.context("ring"), {}),
    "ulysses": ("data=2,context=2", sl.rules.experts | sl.rules.context("ulysses"), {}),
    "pipeline": (
        "data=2,stage=2",
        sl.rules.data | sl.rules.pipeline | sl.AxisRules(experts="data"),
        {"pipeline": sl.pipeline.Eager1F1B(2, 2)},
    ),
    "gather": ("data=2,context=2", sl.rules.experts | sl.rules.context("gather"), {}),
}


@pytest.mark.representative("ring", "pipeline")
@pytest.mark.long
@pytest.mark.parametrize("name", MESHES)
def test_a_small_deepseek_trains_as_on_one_device(name):
    mesh, rules, options = MESHES[name]
    losses, state = trained(TINY, mesh, rules, **options)
    expected, params = on_one_device()
    np.testing.assert_allclose(losses, expected, rtol=0, atol=5e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    jax.tree.map(close, jax.device_get(state.params), params)
    if name == "data and tensor":
        up = state.params["blocks"]["expert"]["mlp"]["up"]
        assert up.sharding.spec[1:] == ("data", None, "model")
        key = state.params["dense"]["attention"]["key"]["kernel"]
        assert key.sharding.spec[1] == "model", "heads are split"


# Refusals.


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"kv_heads": 2}, "leave `kv_heads` out"),
        ({"head_dim": 8}, "leave `head_dim` out"),
        ({"positions": "learned"}, 'say `positions="rotary"`'),
        ({"query_key_norm": True}, "leave `query_key_norm` out"),
        ({"latent": (1, 2)}, "is a `LatentAttention"),
        ({"dense_layers": 4}, "leaves none with experts"),
        ({"dense_layers": 1, "every": 2}, "without `dense_layers=1`"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(changes, refusal):
    with pytest.raises(ValueError, match=refusal):
        replace(TINY, **changes)


@pytest.mark.parametrize("changes", [{"rotary_dim": 3}, {"kv_rank": 0}, {"value_dim": 1.5}])
def test_sizes_of_latent_attention_are_checked(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=rf"LatentAttention\({name}="):
        gpt.LatentAttention(**changes)


def test_a_translation_model_has_no_latent_attention():
    with pytest.raises(ValueError, match=r"TranslationConfig\(dense_layers=2\)"):
        translation.tiny(dense_layers=2)


def test_what_knows_nothing_of_these_models_refuses_them():
    with pytest.raises(ValueError, match=r"MoEConfig\(experts=8\).*Ask the compiler"):
        _ = TINY.decoder
    with pytest.raises(ValueError, match=r"GPTConfig\(query_key_norm=True\)"):
        _ = gpt.tiny(query_key_norm=True).decoder


@pytest.mark.long
def test_routers_of_a_model_draw_nothing_in_a_deterministic_view():
    router = sl.experts.TopK(2, jitter=0.5)
    config = moe.tiny(layers=1, every=1, width=16, context=8, vocab=16, router=router)
    model = moe.MoE(config, rngs=nnx.Rngs(0))
    tokens = jnp.arange(16).reshape(2, 8)
    key = jax.random.key(5)
    with sl.unsharded():
        plain = model.routed(tokens)[0]
        assert (model.routed(tokens, key=key)[0] != plain).any()
        view = nnx.view(model, deterministic=True)
        np.testing.assert_array_equal(view.routed(tokens, key=key)[0], plain)
