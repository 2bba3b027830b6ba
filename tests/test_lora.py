"""Thin factors beside kernels: what they compute, what learns, what is sent, and what they become."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from machines import mesh_on

import shardlib as sl
from models import gpt, hub
from shardlib import lora
from shardlib._tree import named_leaves
from shardlib.weights import load, save

CONFIG = gpt.GPTConfig(
    layers=4,
    width=32,
    heads=4,
    kv_heads=2,
    context=16,
    vocab=64,
    norm="rms",
    positions="rotary",
    mlp="swiglu",
    bias=False,
    tied=False,
    query_key_norm=True,
)
RULES = sl.rules.data | sl.rules.tensor
ATTENTION = (".*/attention/(query|value)",)


def batch(seed=0):
    return {"tokens": np.random.default_rng(seed).integers(0, 64, (16, 17))}


def make(config=CONFIG, rank=4, **options):
    def model():
        return lora.add(gpt.GPT(config, rngs=nnx.Rngs(0)), rank, rngs=nnx.Rngs(1), **options)

    return model


def factors(model):
    return [one for _, one in nnx.iter_modules(model) if isinstance(one, lora.Adapter)]


def drawn_up(model):
    """A model whose factors add something."""
    for number, one in enumerate(factors(model)):
        one.up.set_value(jax.random.normal(jax.random.key(number), one.up.shape) / 8)
    return model


@pytest.mark.parametrize("alpha", [None, 6.0])
def test_a_layer_adds_two_small_products(alpha):
    layer = nnx.Linear(6, 5, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (3, 6))
    before = layer(x)
    layer = lora.add(layer, 2, alpha=alpha, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(layer(x), before)
    layer = drawn_up(layer)
    down, up = layer.adapter.down[...], layer.adapter.up[...]
    expected = before + (1 if alpha is None else 3) * x @ down.T @ up.T
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


LAYERS = {
    "linear": lambda: (nnx.Linear(16, 5, rngs=nnx.Rngs(0)), (3, 4, 16)),
    "several dims": lambda: (
        nnx.LinearGeneral((4, 4), (2, 3), axis=(-2, -1), rngs=nnx.Rngs(0)),
        (3, 4, 4),
    ),
    "attention": lambda: (
        nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0)),
        (3, 4, 16),
    ),
}


@pytest.mark.long("attention")
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_of_flax_are_the_same_once_factors_are_in_their_kernels(kind):
    layer, shape = LAYERS[kind]()
    plain, kinds = nnx.state(layer), [type(one) for _, one in nnx.iter_modules(layer)]
    adapted = drawn_up(lora.add(layer, 2, rngs=nnx.Rngs(1)))
    assert len(factors(adapted)) == (4 if kind == "attention" else 1)
    x = jax.random.normal(jax.random.key(1), shape)
    whole = lora.merged(adapted)
    np.testing.assert_allclose(whole(x), adapted(x), rtol=1e-5, atol=1e-5)
    assert jax.tree.structure(nnx.state(whole)) == jax.tree.structure(plain)
    assert [type(one) for _, one in nnx.iter_modules(whole)] == kinds
    assert factors(adapted), "the given model stays as it is"


@pytest.mark.long
def test_a_model_begins_as_it_was_and_only_factors_learn():
    plain = gpt.GPT(CONFIG, rngs=nnx.Rngs(0))
    strategy = sl.Strategy(
        mesh="data=4,model=2", rules=RULES, zero=sl.Zero(3, small=0), frozen=lora.FROZEN
    )
    state = sl.init(make(), optax.adam(1e-2), strategy)
    tokens = batch()["tokens"][:, :-1]
    logits = jax.jit(lambda model, tokens: model(tokens))
    with strategy.scope():
        np.testing.assert_allclose(logits(state.model, tokens), logits(plain, tokens), atol=1e-5)
    step = sl.train_step(gpt.loss, strategy)
    begun = jax.device_get(state.frozen)
    for seed in range(2):
        state, _ = step(state, batch(seed))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.frozen), begun)
    learning = [path for path, _ in named_leaves(state.params)]
    assert len(learning) == 14 and all(re.fullmatch(lora.PARAMETERS, path) for path in learning)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(state.params))
    moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert len(moments) == 2 * 14


@pytest.mark.representative("data=8,model=1-0", "pod=2,data=2,model=2-3")
@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("mesh", ["data=8,model=1", "data=2,model=4", "pod=2,data=2,model=2"])
def test_every_mesh_learns_what_one_device_learns(mesh, zero):
    axes = ("pod", "data") if "pod" in mesh else "data"
    rules = sl.rules.data | sl.rules.tensor_sequence | sl.AxisRules(batch=axes, kv_heads=None)
    rules |= sl.AxisRules(act_kv_heads=None)
    strategy = sl.Strategy(
        mesh=mesh, rules=rules, zero=sl.Zero(zero, small=0), accumulate=2, frozen=lora.FROZEN
    )
    one = sl.make_mesh("data=1", devices=jax.devices()[:1])
    alone = sl.Strategy(mesh=one, rules=sl.rules.data, frozen=lora.FROZEN)
    expected = trained(alone)
    found = trained(strategy)
    for (path, x), (_, y) in zip(
        named_leaves(found.params), named_leaves(expected.params), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5, err_msg=path)
        if zero:
            assert not x.sharding.is_fully_replicated, path


def trained(strategy, **options):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0, momentum=0.9))
    state = sl.init(make(**options), optimizer, strategy)
    step = sl.train_step(gpt.loss, strategy)
    for seed in range(3):
        state, _ = step(state, batch(seed))
    return state


PLATFORMS = [
    "cpu",
    pytest.param("v5e:2x4", marks=pytest.mark.tpu_compiler),
    pytest.param("h200:1x1x8", marks=pytest.mark.gpu_compiler),
]


@pytest.mark.long("cpu")
@pytest.mark.parametrize("platform", PLATFORMS)
def test_only_factors_are_summed_and_no_gradient_of_a_kernel_is_taken(platform):
    config = gpt.GPTConfig(
        layers=2, width=256, heads=4, context=128, vocab=512, positions="rotary", bias=False
    )
    plans, states = {}, {}
    for kind in ("whole", "factors"):
        made = (
            make(config, rank=4) if kind == "factors" else lambda: gpt.GPT(config, rngs=nnx.Rngs(0))
        )
        strategy = sl.Strategy(
            mesh=mesh_on(platform, "data=8"),
            rules=sl.rules.data,
            frozen=lora.FROZEN if kind == "factors" else (),
        )
        states[kind] = sl.init(made, optax.adam(1e-3), strategy, abstract=True)
        tokens = {"tokens": jax.ShapeDtypeStruct((8, 129), "int32")}
        plans[kind] = sl.plan(sl.train_step(gpt.loss, strategy), states[kind], tokens)
    params = states["factors"].params
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
    summed = sum(one.total_bytes for one in plans["factors"].collectives if one.sent_bytes > 1024)
    assert 2 * 7 / 8 * size <= summed <= 1.02 * 2 * 7 / 8 * size
    # Of a product forward, one for its input and one for its kernel, the last is not there.
    ratio = plans["factors"].flops.total / plans["whole"].flops.total
    assert 2 / 3 < ratio < 0.75


@pytest.mark.long
def test_weights_are_loaded_beside_factors_and_saved_with_them(tmp_path):
    table = hub.table(CONFIG)
    published = gpt.GPT(CONFIG, rngs=nnx.Rngs(5))
    save(tmp_path / "published", published, table)
    schedule = sl.pipeline.Interleaved(2, 4, chunks=2)
    strategies = [
        sl.Strategy(
            mesh="data=4,model=2", rules=RULES, zero=sl.Zero(3, small=0), frozen=lora.FROZEN
        ),
        sl.Strategy(
            mesh="stage=2,data=4",
            rules=sl.rules.data | sl.rules.pipeline,
            pipeline=schedule,
            frozen=lora.FROZEN,
        ),
    ]
    for number, strategy in enumerate(strategies):
        state = sl.init(make(), optax.adam(1e-2), strategy)
        drawn = jax.device_get(state.params)
        state = load(tmp_path / "published", state, table, keep=(lora.PARAMETERS,))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), drawn)
        step = sl.train_step(gpt.loss, strategy)
        for seed in range(2):
            state, _ = step(state, batch(seed))
        # A CPU that has several programs before it may wait for itself.
        jax.block_until_ready(state.params)
        whole = lora.merged(state.model)
        save(tmp_path / f"tuned{number}", whole, table)
        again = load(tmp_path / f"tuned{number}", published_like(), table)
        tokens = batch()["tokens"][:, :-1]
        logits = jax.jit(lambda model, tokens: model(tokens))
        with strategy.scope():
            expected = logits(state.model, tokens)
        model = nnx.merge(nnx.graphdef(published), again)
        with sl.unsharded():
            found, before = logits(model, tokens), logits(published, tokens)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.abs(found - before).max() > 1e-3


def published_like():
    return nnx.to_pure_dict(nnx.state(gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), nnx.Param))


def test_kernels_of_few_bits_have_factors_of_many():
    layer = nnx.Linear(6, 5, param_dtype=jnp.bfloat16, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer = drawn_up(lora.add(layer, 2, rngs=nnx.Rngs(1)))
    assert layer.adapter.down.dtype == layer.adapter.up.dtype == jnp.float32
    assert layer(jnp.ones((2, 6), jnp.bfloat16)).dtype == jnp.bfloat16
    assert lora.merged(layer).kernel.dtype == jnp.bfloat16


def two(layer):
    return lora.add(layer, 2, rngs=nnx.Rngs(1))


BAD = {
    "no model": (lambda: two({"kernel": jnp.ones((4, 4))}), "Flax NNX model"),
    "no layer": (lambda: two(nnx.LayerNorm(4, rngs=nnx.Rngs(0))), "no layer that can have factors"),
    "rank": (
        lambda: lora.add(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), 4, rngs=nnx.Rngs(1)),
        "has a kernel of rank 3 at most",
    ),
    "no rank": (lambda: lora.add(nnx.Linear(3, 5, rngs=nnx.Rngs(0)), 0, rngs=nnx.Rngs(1)), "rank"),
    "paths": (
        lambda: make(paths=("blocks/attention/queries",))(),
        "matches no layer.*blocks/attention/key",
    ),
    "twice": (lambda: two(two(nnx.Linear(3, 5, rngs=nnx.Rngs(0)))), "has factors already"),
    "merged twice": (
        lambda: lora.merged(nnx.Linear(3, 5, rngs=nnx.Rngs(0))),
        "no layer with factors",
    ),
    "axis": (
        lambda: two(nnx.LinearGeneral(4, 5, axis=0, rngs=nnx.Rngs(0))),
        "not the last dims",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_have_factors_is_refused(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call()


def test_an_error_leaves_the_model_as_it_was():
    model = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 1, rngs=nnx.Rngs(0))])
    with pytest.raises(ValueError, match="has a kernel of rank 1 at most"):
        two(model)
    assert [type(layer) for layer in model] == [nnx.Linear, nnx.Linear]
    assert not any(hasattr(layer, "adapter") for layer in model)


class Named(nnx.Linear):
    """A layer of one's own that multiplies as Flax's does."""


class Scaled(nnx.Linear):
    """A layer of one's own that does more than a product."""

    def __call__(self, inputs):
        return 2 * super().__call__(inputs)


class Computed(nnx.Linear):
    """A layer whose kernel is made of another parameter."""

    @property
    def kernel(self):
        return nnx.Param(self.root[...] * 2)

    @kernel.setter
    def kernel(self, value):
        self.root = value


def test_a_kernel_that_is_computed_gets_no_factors():
    with pytest.raises(ValueError, match="no layer that can have factors"):
        two(nnx.List([Computed(6, 4, rngs=nnx.Rngs(0))]))


def test_layers_derived_from_those_of_flax_get_factors_if_they_multiply_alike():
    model = nnx.List([Named(6, 4, rngs=nnx.Rngs(0)), Scaled(6, 4, rngs=nnx.Rngs(0))])
    x = jax.random.normal(jax.random.key(0), (3, 6))
    drawn_up(two(model))
    assert [hasattr(layer, "adapter") for layer in model] == [True, False]
    merged = lora.merged(model)
    assert type(merged[0]) is Named
    np.testing.assert_allclose(model[0](x), merged[0](x), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="`1` matches no layer that can have factors"):
        lora.add(merged, 2, paths=("1",), rngs=nnx.Rngs(1))


def test_layers_that_share_a_kernel_get_no_factors():
    """Factors of one of them would be merged into the kernel of both."""
    layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(seed)) for seed in range(3)]
    model = nnx.List(layers)
    layers[2].kernel = layers[0].kernel
    for paths in ((".*",), ("0",)):
        with pytest.raises(ValueError, match="the kernel of `0` is `2/kernel` too"):
            lora.add(model, 2, paths=paths, rngs=nnx.Rngs(1))
    assert not factors(model)
    assert len(factors(lora.add(model, 2, paths=("1",), rngs=nnx.Rngs(1)))) == 1
    table = nnx.Embed(4, 4, rngs=nnx.Rngs(0))
    layers[1] = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    layers[1].kernel = table.embedding
    with pytest.raises(ValueError, match="the kernel of `1` is `0/embedding` too"):
        two(nnx.List([table, layers[1]]))
    holder = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(0))])
    holder.kept = nnx.data({"list": [holder[0].kernel]})
    with pytest.raises(ValueError, match="the kernel of `0` is `kept/list/0` too"):
        two(holder)
    twice = nnx.List([layers[0], layers[0]])  # one layer, called twice, is one
    assert len(factors(two(twice))) == 1


def test_what_is_to_be_kept_must_be_there(tmp_path):
    table = hub.table(CONFIG)
    save(tmp_path, gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), table)
    with pytest.raises(ValueError, match="matches no parameter"):
        load(tmp_path, published_like(), table, keep=(lora.PARAMETERS,))


MERGING = """
import sys

import optax
from flax import nnx
import shardlib as sl

sl.initialize_distributed()
strategy = sl.Strategy(
    mesh="data=-1", rules=sl.rules.data, zero=sl.Zero(3, small=0), frozen=sl.lora.FROZEN
)


def make():
    init = sl.logical(nnx.initializers.lecun_normal(), "embed", "mlp")
    layer = nnx.Sequential(nnx.Linear(64, 64, kernel_init=init, rngs=nnx.Rngs(0)))
    return sl.lora.add(layer, rank=4, rngs=nnx.Rngs(1))


model = sl.init(make, optax.adamw(1e-3), strategy).model
kernel = sl.lora.merged(model).layers[0].kernel[...]
# In one write: the library that connects processes writes to the same pipe.
sys.stdout.write(f"merged: {kernel.is_fully_addressable} {kernel.shape}\\n")
"""


@pytest.mark.long
def test_factors_that_several_processes_share_are_merged(tmp_path):
    script = tmp_path / "merging.py"
    script.write_text(MERGING)
    launched = [sys.executable, "-m", "shardlib.launch", "-n", "2", "--devices", "1", "--"]
    root = Path(__file__).parent.parent
    path = f"{root}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*launched, sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": path, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("merged: False (64, 64)") == 2, done.stdout
