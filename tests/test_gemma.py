"""Layers that see a window of tokens, capped scores and logits, and norms after: what Gemma has
beside Llama. A small one on meshes, and what its layers see.
"""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt, moe, translation
from shardlib.compiled._collectives import collectives

# Two periods of a layer with a window and one without, and a layer that is left.
SMALL = gpt.GPTConfig(
    layers=5, width=32, heads=4, kv_heads=2, head_dim=16, hidden=48, context=16, vocab=96,
    norm="rms", positions="rotary", mlp="geglu", bias=False,
    norm_from_zero=True, post_norms=True, scaled_embedding=True, query_key_norm=True,
    window=5, full_every=2, rope_theta=1000.0, local_rope_theta=100.0,
    rope_scaling=gpt.LinearScaling(2.0),
    attention_scale=0.3, attention_cap=2.0, logit_cap=3.0,
)  # fmt: skip
BATCH = {"tokens": np.random.default_rng(0).integers(0, 96, (8, 17))}


def model_of(config, seed=0):
    """A model in which every parameter counts."""
    with sl.unsharded():
        model = gpt.GPT(config, rngs=nnx.Rngs(seed))
    structure, state = nnx.split(model)
    generator = np.random.default_rng(seed)
    drawn = lambda leaf: leaf + 0.1 * generator.standard_normal(leaf.shape).astype(leaf.dtype)
    return nnx.merge(structure, jax.tree.map(drawn, state))


TOKENS = BATCH["tokens"][:2, :16]


def logits_of(model, tokens=TOKENS):
    with sl.unsharded():
        return nnx.view(model, deterministic=True)(jnp.asarray(tokens))


# What layers see.


def alone(config, **changes):
    """A model of one layer of attention, whose tokens see no further than that."""
    return replace(config, layers=1, full_every=None, local_rope_theta=None, **changes)


@pytest.mark.long("xla")
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_token_sees_itself_and_those_before_it_up_to_the_window(implementation):
    model = model_of(alone(SMALL, window=3, attention=implementation))
    tokens = BATCH["tokens"][:1, :8]
    before = logits_of(model, tokens)
    for changed in range(8):
        other = tokens.copy()
        other[0, changed] += 1
        differs = np.abs(logits_of(model, other) - before).max(-1)[0] > 1e-7
        expected = [changed <= place < changed + 3 for place in range(8)]
        assert differs.tolist() == expected


@pytest.mark.long
def test_every_so_many_layers_see_all_tokens():
    config = replace(SMALL, layers=7, full_every=3, window=4)
    assert [config.has_window(layer) for layer in range(7)] == [True, True, False] * 2 + [True]
    model = model_of(config)
    assert [block.local for block in model.blocks.blocks] == [True, True, False]
    assert model.last_blocks.local
    windows = [stack.blocks.blocks[0].attention.scores.window for stack in model.stacks]
    assert windows == [4, 4]
    assert model.blocks.full.attention.scores.window is None
    assert model.blocks.full.attention.query.kernel.shape[0] == 2
    assert model.last_blocks.attention.query.kernel.shape[0] == 1
    # A model that sees all from each layer has all of its layers in one stack.
    assert (
        model_of(replace(config, window=None, full_every=None, local_rope_theta=None)).last_blocks
        is None
    )


@pytest.mark.long
def test_layers_with_a_window_have_positions_of_their_own():
    config = replace(SMALL, layers=1, full_every=None, window=8)
    own = logits_of(model_of(config))
    same = replace(config, rope_theta=100.0, rope_scaling=None, local_rope_theta=None)
    np.testing.assert_array_equal(own, logits_of(model_of(same)))
    others = logits_of(model_of(replace(config, local_rope_theta=None)))
    assert np.abs(own - others).max() > 1e-4
    # A layer that sees all tokens has those of the model.
    seen = gpt.turned(gpt.Seen(), SMALL, jnp.arange(4))
    with sl.unsharded():
        full, local = (gpt.Block(SMALL, local=kind, rngs=nnx.Rngs(0)) for kind in (False, True))
    assert full._rotation(seen) is seen.rotation
    assert local._rotation(seen) is seen.local_rotation


def test_embeddings_and_what_is_added_are_scaled_as_asked():
    config = replace(alone(SMALL), window=None, post_norms=False)
    model = model_of(config)
    state = nnx.to_pure_dict(nnx.state(model))
    plain = nnx.graphdef(model_of(replace(config, scaled_embedding=False, tied=False)))
    scaled = dict(state) | {"head": state["embedding"], "embedding": state["embedding"] * 32**0.5}
    expected = logits_of(nnx.merge(plain, scaled))
    np.testing.assert_allclose(logits_of(model), expected, atol=1e-5)
    # With a scale of -1 norms after attention and the MLP add nothing to the embeddings.
    silent = model_of(replace(config, post_norms=True))
    for norm in (silent.blocks.attention_post_norm, silent.blocks.mlp_post_norm):
        norm.scale[...] = -jnp.ones_like(norm.scale[...])
    with sl.unsharded():
        found = silent.features(jnp.asarray(TOKENS))
        embedded = silent._last(silent._embed(jnp.asarray(TOKENS)), silent.norm)
    np.testing.assert_allclose(found, embedded, atol=1e-6)


@pytest.mark.long("None-False", "None-True", "2.0-False")
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("cap", [None, 2.0])
def test_scores_in_memory_are_those_that_never_are(cap, segments):
    logits = []
    of = np.repeat([[0, 1, 2, 3]], 4, 1) if segments else None
    for implementation in ("xla", "reference"):
        config = replace(SMALL, attention_cap=cap, attention=implementation)
        model = nnx.view(model_of(config), deterministic=True)
        with sl.unsharded():
            logits.append(model(jnp.asarray(BATCH["tokens"][:1, :16]), of))
    np.testing.assert_allclose(*logits, atol=2e-6)


def test_norms_from_zero_multiply_by_one_and_their_scale():
    config = replace(alone(SMALL), window=None)
    model, plain = model_of(config), model_of(replace(config, norm_from_zero=False))
    structure = nnx.graphdef(plain)
    state = nnx.to_pure_dict(nnx.state(model))
    shifted = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + ("scale" in str(path)), state
    )
    expected = logits_of(nnx.merge(structure, shifted))
    found = logits_of(model)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    kernels = replace(config, kernels="reference")
    by_kernels = nnx.merge(nnx.graphdef(model_of(kernels)), state)
    np.testing.assert_allclose(logits_of(by_kernels), found, atol=1e-5)
    # Before it learns, a norm changes only the size.
    with sl.unsharded():
        fresh = gpt.GPT(config, rngs=nnx.Rngs(0))
    assert not np.any(fresh.norm.scale[...])


def test_logits_are_capped():
    free = logits_of(model_of(replace(SMALL, logit_cap=None)))
    capped = logits_of(model_of(replace(SMALL, logit_cap=0.5)))
    assert np.abs(free).max() > 0.5
    np.testing.assert_allclose(capped, 0.5 * np.tanh(free / 0.5), atol=1e-5)


@pytest.mark.long("True")
@pytest.mark.parametrize("tied", [True, False])
def test_the_fused_loss_knows_the_cap_of_logits(tied):
    config = replace(alone(SMALL, tied=tied), logit_cap=0.5)
    tokens = {"tokens": jnp.asarray(BATCH["tokens"][:2])}

    def of(**changes):
        structure, params = nnx.split(model_of(replace(config, **changes)))

        def loss(params):
            found = gpt.loss(nnx.merge(structure, params), tokens)
            return found.total / found.weight

        with sl.unsharded():
            return jax.value_and_grad(loss)(params)

    fused, plain, free = of(fused_loss="reference"), of(), of(logit_cap=None)
    assert abs(plain[0] - free[0]) > 0.01
    for one, other in zip(jax.tree.leaves(fused), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * np.abs(other).max())


def test_positions_are_those_of_yarn():
    """Against the paper's formulas, a pair at a time."""
    scaling = gpt.YarnScaling(factor=4.0, context=64, fast=8.0, slow=1.0, size=1.2)
    theta, size = 100.0, 16
    cos, sin = gpt.rotations(jnp.arange(5), size, theta, scaling)
    pair_of = lambda turns: size * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(theta))
    first, last = math.floor(pair_of(8.0)), math.ceil(pair_of(1.0))
    assert 0 <= first < last < size // 2 + 1
    for pair in range(size // 2):
        ramp = min(max((pair - first) / (last - first), 0), 1)
        frequency = theta ** (-2 * pair / size)
        expected = ramp * frequency / 4 + (1 - ramp) * frequency
        for position in range(5):
            angle = position * expected
            assert cos[position, 0, pair] == pytest.approx(1.2 * math.cos(angle), abs=1e-5)
            assert sin[position, 0, pair] == pytest.approx(1.2 * math.sin(angle), abs=1e-5)


def test_positions_may_be_divided_by_a_factor():
    slow = gpt.rotations(jnp.arange(0, 32, 4), 16, 100.0, gpt.LinearScaling(4.0))
    for found, expected in zip(slow, gpt.rotations(jnp.arange(8), 16, 100.0), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_products_of_a_window_alone_are_counted():
    flops = lambda **changes: replace(SMALL, **changes).training_flops_per_token
    all_seen = flops(window=None, full_every=None, local_rope_theta=None)
    # Of the 16 tokens of a context, a layer with a window meets 5.
    unseen = 3 * 4 * (16 - 5) * 4 * 16
    assert flops() == all_seen - 3 * unseen
    assert flops(window=64) == all_seen


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (gpt.mistral_7b(), 7_241_732_096),
        (gpt.gemma2_2b(), 2_614_341_888),
        (gpt.gemma2_9b(), 9_241_705_984),
        (gpt.gemma3_1b(), 999_885_952),
    ],
    ids=["mistral_7b", "gemma2_2b", "gemma2_9b", "gemma3_1b"],
)
def test_known_models_have_the_published_parameter_counts(config, count):
    model = nnx.eval_shape(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert sum(leaf.size for leaf in leaves) == count


# On meshes.


def trained(mesh, rules, steps=2, config=SMALL, **options):
    """The losses of some steps, and the last state."""
    count = math.prod(int(part.split("=")[1]) for part in mesh.split(","))
    mesh = sl.make_mesh(mesh, devices=jax.devices()[:count])
    strategy = sl.Strategy(mesh=mesh, rules=rules, **options)
    state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(0.2), strategy)
    step, losses = sl.train_step(gpt.loss, strategy), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return losses, state


@functools.cache
def on_one_device():
    losses, state = trained("data=1", sl.rules.data)
    assert losses[-1] < losses[0] - 0.01, "it learns"
    return losses, jax.device_get(state.params)


TENSOR = sl.rules.data | sl.rules.tensor
MESHES = {
    "tensor": ("data=2,model=2", TENSOR, {}),
    "sequence, zero 3": (
        "data=2,model=2", sl.rules.data | sl.rules.tensor_sequence, {"zero": sl.Zero(3, small=0)}
    ),
    "ring": ("data=2,context=4", sl.rules.data | sl.rules.context("ring"), {}),
    "ulysses": ("data=2,context=2", sl.rules.data | sl.rules.context("ulysses"), {}),
    "pipeline": (
        "data=2,stage=2",
        sl.rules.data | sl.rules.pipeline,
        {"pipeline": sl.pipeline.Eager1F1B(2, 2)},
    ),
    "remat": ("data=2", sl.rules.data, {"remat": "full"}),
    "three axes": (
        "data=2,context=2,model=2", TENSOR | sl.rules.context("ring"), {"zero": sl.Zero(3, small=0)}
    ),
}  # fmt: skip


@pytest.mark.representative("tensor", "three axes", "pipeline")
@pytest.mark.long
@pytest.mark.sentinel("tensor")
@pytest.mark.parametrize("name", MESHES)
def test_a_small_gemma_trains_as_on_one_device(name):
    mesh, rules, options = MESHES[name]
    losses, state = trained(mesh, rules, **options)
    expected, params = on_one_device()
    np.testing.assert_allclose(losses, expected, rtol=0, atol=5e-6)
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
    jax.tree.map(close, jax.device_get(state.params), params)
    if name == "tensor":
        for stack in (state.params["blocks"]["full"], state.params["last_blocks"]):
            assert stack["attention"]["query"]["kernel"].sharding.spec[1] == "model"


@pytest.mark.tpu_compiler
def test_windows_and_caps_send_nothing_more():
    """Compiled for TPUs under tensor parallelism: the sums of a plain model, and no others."""
    found = []
    wide = {
        "width": 256,
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 128,
        "hidden": 1024,
        "context": 512,
    }
    large = replace(
        SMALL, layers=4, attention="tpu", dtype=jnp.bfloat16, rope_scaling=None, **wide, window=128
    )
    seeing_all = replace(large, window=None, full_every=None, local_rope_theta=None)
    for config in (large, replace(seeing_all, attention_cap=None, logit_cap=None)):
        mesh = mesh_on("v5e:2x4", "data=2,model=4")
        strategy = sl.Strategy(mesh=mesh, rules=TENSOR)
        make = lambda config=config: gpt.GPT(config, rngs=nnx.Rngs(0))
        state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
        batch = {"tokens": jax.ShapeDtypeStruct((8, 513), jnp.int32)}
        lowered = sl.train_step(gpt.loss, strategy).lower(state, batch)
        program = compile_for(mesh, lowered)
        kinds = {}
        for one in collectives(program.as_text()):
            if max(map(math.prod, one.shapes)) >= 512 * 256:
                kinds[one.kind] = kinds.get(one.kind, 0) + one.times
        found.append(kinds)
    assert found[0] == found[1] and found[0]


# Refusals.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window=0"),
        ({"window": None}, r"full_every=2\).*say `window="),
        ({"window": None, "full_every": None}, r"local_rope_theta=100.0\)"),
        ({"full_every": 1}, "at least 2"),
        ({"full_every": 6}, "at most `layers=5`"),
        ({"positions": "learned", "rope_scaling": None}, "no rotary positions"),
        ({"norm": "layer"}, "norm_from_zero=True"),
        ({"norm_first": False}, "post_norms=True"),
        ({"attention_cap": 0.0}, r"attention_cap=0.0\)` must be a number above 0"),
        ({"logit_cap": -1}, r"logit_cap=-1\)` must be a number above 0"),
        ({"fused_loss": "xla"}, r"fused_loss='xla'\)`: choose True or False or 'reference'"),
        ({"fused_loss": 1}, r"fused_loss=1\)`: choose True or False"),
        ({"rope_scaling": "linear"}, r"`LinearScaling\(...\)`"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **changes)


@pytest.mark.parametrize("kind", [gpt.LinearScaling, gpt.YarnScaling])
def test_scalings_are_checked(kind):
    with pytest.raises(ValueError, match=f"{kind.__name__}.factor=0"):
        kind(0)
    with pytest.raises(ValueError, match="below `fast`"):
        gpt.YarnScaling(fast=1.0, slow=2.0)
    with pytest.raises(ValueError, match="context=1.5"):
        gpt.YarnScaling(context=1.5)


def test_models_that_have_no_such_layers_refuse_them():
    with pytest.raises(ValueError, match=r"MoEConfig\(full_every=2\)"):
        moe.tiny(window=4, full_every=2)
    for field in ({"window": 4}, {"post_norms": True}):
        with pytest.raises(ValueError, match=rf"TranslationConfig\({next(iter(field))}="):
            translation.tiny(**field)
    with pytest.raises(ValueError, match=r"GPTConfig\(window=4\)"):
        _ = gpt.tiny(window=4).decoder
