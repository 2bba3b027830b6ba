"""`sl.Layers`, a list of layers as one loop: by itself, under a strategy and in a pipeline."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from shardlib.step._layer_order import reordered

WIDTH = 8


class Block(nnx.Module):
    def __init__(self, rngs, hidden=16, dropout=0.0, number=1):
        self.up = nnx.Linear(
            WIDTH,
            hidden,
            kernel_init=sl.logical(nnx.initializers.lecun_normal(), "embed", "mlp"),
            rngs=rngs,
        )
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))
        self.number = nnx.Variable(jnp.float32(number))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x, shift=0.0):
        return x + self.scale * self.number * self.dropout(self.down(jnp.tanh(self.up(x) + shift)))


def blocks(count=4, **options):
    rngs = nnx.Rngs(0)
    return [Block(rngs, **options, number=1 + k / count) for k in range(count)]


X = np.random.default_rng(0).normal(size=(16, WIDTH)).astype("f")


@pytest.mark.long
@pytest.mark.sentinel("0.5")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layers_equal_applying_each_layer_in_turn(dropout):
    layers, expected = sl.Layers(blocks(dropout=dropout)), jnp.asarray(X)
    for block in blocks(dropout=dropout):
        expected = block(expected, 0.1)
    np.testing.assert_allclose(layers(X, 0.1), expected, rtol=1e-5, atol=1e-5)
    assert len(layers) == 4 and layers.stacked.up.kernel.out_sharding == ("layers", "embed", "mlp")
    assert layers.stacked.scale.out_sharding == (
        "layers",
    ) and layers.stacked.down.bias.out_sharding == (
        "layers",
        None,
    )
    assert (dropout > 0) == bool(jnp.abs(layers(X, 0.1) - expected).max() > 0.1), "a stream goes on"


class Model(nnx.Module):
    def __init__(self, dropout=0.0):
        self.blocks = sl.Layers(blocks(dropout=dropout))

    def __call__(self, x):
        return self.blocks(x, 0.1)


class Listed(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List(blocks())

    def __call__(self, x):
        for block in self.blocks:
            x = block(x, 0.1)
        return x


def stepped(make, strategy, steps=1):
    """Parameters and streams, layers in their order."""
    state, step = (
        sl.init(make, optax.sgd(0.1), strategy),
        sl.train_step(lambda model, x, rng: jnp.mean(model(x) ** 2), strategy),
    )
    for _ in range(steps):
        state, _ = step(state, X)
    state = reordered(state, natural=True)
    streams = [
        x
        for x in jax.tree.leaves(state.streams)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    ]
    return jax.device_get((state.params["blocks"], streams))


RULES = sl.rules.data | sl.rules.tensor | sl.rules.pipeline
STAGES = sl.Strategy(
    mesh="stage=2,data=2,model=2", rules=RULES, pipeline=sl.pipeline.OneFOneB(2, 4), remat="full"
)
ALONE = sl.Strategy(mesh="stage=1,data=4,model=2", rules=RULES, accumulate=4)


def assert_alike(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected
    )


@pytest.mark.exhaustive
@pytest.mark.long
def test_layers_in_a_pipeline_step_like_a_plain_list():
    listed, _ = stepped(Listed, ALONE)
    found, _ = stepped(Model, STAGES)
    assert_alike(found["stacked"], jax.tree.map(lambda *leaves: np.stack(leaves), *listed.values()))


@pytest.mark.long
def test_layers_with_dropout_draw_the_same_in_a_pipeline():
    make, stages = lambda: Model(0.5), replace(STAGES, pipeline=sl.pipeline.ZBV(2, 4))
    assert_alike(stepped(make, stages, 2), stepped(make, ALONE, 2))


class Laid(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(
            jnp.ones((2, 2)),
            out_sharding=jax.sharding.PartitionSpec(None, "model"),
            eager_sharding=False,
        )


def test_layers_that_cannot_be_stacked_are_refused():
    first, *_ = blocks()
    for layers, words in [
        ([], ["at least one"]),
        ([jnp.ones(2)], ["NNX modules", "ArrayImpl", "jax.lax.scan"]),
        (
            [first, *blocks(1, hidden=4)],
            ["`down/kernel`", "float32[16, 8]", "float32[4, 8]", "layer 1"],
        ),
        ([first, nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0))], ["missing", "take turns"]),
        ([first, *blocks(1, dropout=0.5)], ["layer 1 is of another kind", "settings"]),
        ([first, first], ["layers 0 and 1 share", "layers(x, shared)"]),
        ([Laid(), Laid()], ["mesh axes", "sl.logical"]),
    ]:
        with pytest.raises(ValueError) as error:
            sl.Layers(layers)
        assert all(word in str(error.value) for word in words), error.value
