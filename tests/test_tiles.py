"""A function of some tokens at a time, against the same of all."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from machines import compile_for, mesh_on

import shardlib as sl
from models import gpt, sampling
from shardlib import kernels
from shardlib.compiled._collectives import collectives

P = jax.P
STREAM = ("batch", "residual_seq", "act_embed")
HIDDEN = ("batch", "seq", "act_mlp")
SEQUENCE = sl.rules.data | sl.rules.tensor_sequence


def make(*shape, features=8, hidden=16):
    random = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(random.normal(size=shape), "float32")
    return draw(*shape, features), (draw(hidden, features), draw(features, hidden))


def mlp(x, weights, names=None):
    """A function of tokens, which leaves the residual stream and returns to it."""
    up, down = weights
    (h,) = kernels.projections(x, [up], names=names, outputs=None if names is None else [HIDDEN])
    y = jnp.tensordot(jnp.tanh(h), down, (-1, -1))
    return y if names is None else sl.shard(y, *names)


def derived(tiles, x, weights, names=None):
    """What the function makes, and the gradients of a sum in which each number counts otherwise."""

    def total(x, weights):
        of_tile = lambda x: mlp(x, weights, names)
        y = of_tile(x) if tiles is None else kernels.in_tiles(of_tile, x, tiles, names=names)
        return (jnp.cos(jnp.arange(y.size)).reshape(y.shape) * y).sum(), y

    (_, y), gradients = jax.value_and_grad(total, (0, 1), has_aux=True)(x, weights)
    return y, gradients


def assert_near(found, expected):
    def check(a, b):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * max(1, np.abs(b).max()))

    jax.tree.map(check, found, expected)


@pytest.mark.parametrize(
    ("shape", "tiles", "cut", "rest"),
    [
        ((4, 6), 2, (2, 2, 6), None),  # rows
        ((3, 6), 2, (2, 3, 3), None),  # tokens, where there are no rows for each
        ((1, 7), 2, (1, 1, 4), (1, 3)),  # and a rest
        ((5, 3), 4, (2, 2, 3), (1, 3)),
        ((2, 3), 9, (3, 2, 1), None),  # fewer tiles than are asked for
        ((6,), 3, (3, 2), None),  # one dim of tokens
    ],
    ids=str,
)
def test_tiles_make_what_all_tokens_make_at_once(shape, tiles, cut, rest, monkeypatch):
    arrays = make(*shape)
    seen = []
    with sl.unsharded():
        kernels.in_tiles(lambda x: seen.append(x.shape[:-1]) or x, arrays[0], tiles)
        found = jax.jit(derived, static_argnums=0)(tiles, *arrays)
        expected = derived(None, *arrays)
    # A single tile is no loop.
    assert seen == [cut[1:], *([] if rest is None else [rest])]
    assert_near(found, expected)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)], ids=str)
def test_no_tokens_make_none(shape):
    with sl.unsharded():
        found = kernels.in_tiles(lambda x: 2 * x, jnp.ones((*shape, 8)), 2)
    assert found.shape == (*shape, 8)


MESHES = {
    "rows": ("data=2,model=4", SEQUENCE, (8, 8)),
    "tokens": ("data=2,model=4", SEQUENCE, (2, 16)),
    "a rest": ("data=2,model=2", SEQUENCE, (2, 6)),
    "three axes": ("data=2,context=2,model=2", SEQUENCE | sl.rules.context("ring"), (2, 16)),
}


def small_mesh(axes):
    sizes = [int(axis.partition("=")[2]) for axis in axes.split(",")]
    return sl.make_mesh(axes, devices=jax.devices()[: int(np.prod(sizes))])


@pytest.mark.parametrize("name", MESHES)
def test_each_device_cuts_its_own_tokens(name):
    axes, rules, shape = MESHES[name]
    mesh, arrays = small_mesh(axes), make(*shape)
    with sl.unsharded():
        expected = derived(None, *arrays)
    with sl.use(rules, mesh):
        x = sl.shard(arrays[0], *STREAM)
        step = jax.jit(lambda x, weights: derived(2, x, weights, STREAM))
        found = step(x, arrays[1])
        program = step.lower(x, arrays[1]).compile()
    assert_near(found, expected)
    assert found[0].sharding.is_equivalent_to(x.sharding, 3)
    sent = {}
    for one in collectives(program.as_text(), mesh):
        sent[one.kind] = sent.get(one.kind, 0) + one.total_bytes
    sums = sent.pop("all-reduce")  # of products, and of gradients
    expected = {}
    if "model" in str(x.sharding.spec):
        # Tokens are gathered forward, and once more backward, and so are gradients to results.
        expected["all-gather"] = 3 * (mesh.shape["model"] - 1) * arrays[0].nbytes // mesh.size
    assert sums and sent == expected


@pytest.mark.tpu_compiler
def test_one_tile_of_hidden_units_is_in_memory():
    """Compiled for a TPU: hidden units of all tokens, or those of an eighth and their gradients."""
    tokens, features, hidden = 32768, 512, 4096
    mesh = mesh_on("v5e:2x2", "data=4")

    def temporaries(tiles):
        x = jax.ShapeDtypeStruct((4, tokens, features), jnp.bfloat16)
        weights = [jax.ShapeDtypeStruct((hidden, features), jnp.bfloat16)]
        weights.append(jax.ShapeDtypeStruct((features, hidden), jnp.bfloat16))

        def gradients(x, weights):
            def total(x, weights):
                of_tile = lambda x: mlp(x, weights)
                y = of_tile(x) if tiles is None else kernels.in_tiles(of_tile, x, tiles)
                return jnp.square(y.astype(jnp.float32)).sum()

            return jax.grad(total, (0, 1))(x, weights)

        mapped = jax.shard_map(
            gradients, mesh=mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P())
        )
        program = compile_for(mesh, jax.jit(mapped).lower(x, weights))
        return program.memory_analysis().temp_size_in_bytes

    units = 2 * tokens * hidden  # bytes of all
    whole, tiled = temporaries(None), temporaries(8)
    assert whole >= units
    assert tiled <= units / 4


# In models.

CONFIG = gpt.tiny(layers=2, width=16, heads=4, context=8, vocab=32, mlp="swiglu", bias=False)
TOKENS = np.random.default_rng(0).integers(0, 32, (8, 9))


def after_a_step(config, mesh, rules, **options):
    strategy = sl.Strategy(mesh=mesh, rules=rules, **options)
    state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
    state, metrics = sl.train_step(gpt.loss, strategy)(state, {"tokens": TOKENS})
    return jax.tree.map(np.asarray, (state.params, metrics["loss"]))


STEPS = {
    "sequence, zero 3": (
        "data=2,model=2", SEQUENCE, {"zero": sl.Zero(3, small=0), "remat": "full"}
    ),
    "kept by name": ("data=2,model=2", SEQUENCE, {"remat": sl.Remat.save("mlp_up")}),
    "pipeline": (
        "data=2,stage=2",
        sl.rules.data | sl.rules.pipeline,
        {"pipeline": sl.pipeline.Eager1F1B(2, 2)},
    ),
}  # fmt: skip


@pytest.mark.long("kept by name", "pipeline")
@pytest.mark.parametrize("name", STEPS)
def test_a_model_with_tiles_trains_as_without(name):
    mesh, rules, options = STEPS[name]
    found = after_a_step(replace(CONFIG, mlp_tiles=2), small_mesh(mesh), rules, **options)
    expected = after_a_step(CONFIG, small_mesh("data=1"), sl.rules.data)
    assert_near(found, expected)


@pytest.mark.long
def test_what_a_remat_names_is_kept_of_tiles():
    """Products that are taken again: with the hidden units kept, those before them are not."""

    def products(remat):
        strategy = sl.Strategy(mesh=small_mesh("data=1"), rules=sl.rules.data, remat=remat)
        config = replace(CONFIG, mlp_tiles=2)
        make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
        state = sl.init(make, optax.sgd(0.1), strategy, abstract=True)
        batch = {"tokens": jax.ShapeDtypeStruct(TOKENS.shape, "int32")}
        return sl.plan(sl.train_step(gpt.loss, strategy), state, batch).flops.total

    kept = sl.Remat.save("mlp_gate", "mlp_up")
    tokens = TOKENS.shape[0] * 8
    spared = 2 * 2 * tokens * CONFIG.width * CONFIG.dims["mlp"] * CONFIG.layers
    assert products("full") - products(kept) == spared


@pytest.mark.long
def test_a_model_with_tiles_generates():
    with sl.unsharded():
        model = gpt.GPT(replace(CONFIG, mlp_tiles=2), rngs=nnx.Rngs(0))
        plain = gpt.GPT(CONFIG, rngs=nnx.Rngs(0))
        prompt = jnp.asarray(TOKENS[:1, :3])
        key = jax.random.key(0)
        found, expected = (sampling.generate(one, prompt, 4, key) for one in (model, plain))
    np.testing.assert_array_equal(found, expected)


# Refusals.


@pytest.mark.parametrize(
    ("function", "x", "tiles", "message"),
    [
        (jnp.sin, jnp.ones((2, 8)), 0, r"`in_tiles\(tiles=0\)` takes a whole number, at least 1"),
        (jnp.sin, jnp.ones(8), 2, r"`x` is float32\[8\]: it takes rows"),
        (lambda x: x.sum(0), jnp.ones((4, 8)), 2, r"makes \[8\] of a tile \[2, 8\]"),
        (None, jnp.ones((4, 8)), 2, "function"),
    ],
    ids=["no tiles", "one dim", "no tokens", "no function"],
)
def test_what_cannot_be_cut_is_refused(function, x, tiles, message):
    with sl.unsharded(), pytest.raises(ValueError, match=message):
        kernels.in_tiles(function, x, tiles)


def test_formulas_know_no_tiles():
    with pytest.raises(ValueError, match=r"mlp_tiles=2\)`: the formulas of `sl.estimate`"):
        _ = replace(CONFIG, mlp_tiles=2).decoder
