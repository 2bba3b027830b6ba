"""One device's loss, gradients, optimizer state and randomness, on machines and for models that
hypothesis draws.
"""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import shardlib as sl
from models import gpt
from shardlib import testing

ROWS, SEQ = 16, 8
RANDOM = np.random.RandomState(0)
KEPT = (RANDOM.rand(ROWS, SEQ) > 0.6).astype(np.float32)  # very unevenly many tokens per device
FLOATS = {"x": RANDOM.randn(ROWS, SEQ, 8).astype(np.float32), "mask": KEPT}
TOKENS = {"tokens": RANDOM.randint(0, 40, (ROWS, SEQ + 1)).astype(np.int32), "mask": KEPT}


class MLP(nnx.Module):
    def __init__(self, dropout):
        init, rngs = nnx.initializers.lecun_normal(), nnx.Rngs(0)
        self.up = nnx.Linear(8, 16, kernel_init=sl.logical(init, "embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(16, 8, kernel_init=sl.logical(init, "mlp", "embed"), rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        x = sl.shard(x, "batch", "seq", "act_embed")
        return self.down(self.dropout(sl.shard(nnx.gelu(self.up(x)), "batch", "seq", "act_mlp")))


def masked(model, batch, rng):
    error = jnp.mean((model(batch["x"]) - batch["x"]) ** 2, -1)
    return sl.weighted_mean(jnp.sum(error * batch["mask"]), batch["mask"].sum())


def plain(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["x"]) ** 2)


def check(make_model, loss, batch, rules, draw):
    shape = draw(st.sampled_from(testing.mesh_shapes(rules.axes)), "mesh")
    accumulate = draw(st.sampled_from([1, 2]), "accumulate")
    testing.check_step(
        make_model,
        optax.adam(1e-2),
        loss,
        batch,
        rules,
        meshes=[shape],
        accumulate=[accumulate],
        steps=1,
    )


@pytest.mark.long
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_mlp_under_random_rules_matches_one_device(data):
    draw = data.draw
    mlp = draw(
        st.sampled_from([None, "model", "other", ["model", None], ["other", "model", None]]), "mlp"
    )
    rules = sl.AxisRules(
        batch=draw(st.sampled_from(["data", ("data", "pod")]), "batch"),
        seq=None,
        act_embed=None,
        embed=draw(st.sampled_from([None, ["other", None], ["model", "other", None]]), "embed"),
        mlp=[*(mlp if isinstance(mlp, list) else [mlp]), None],
        act_mlp=draw(st.sampled_from([None, ["model", None]]), "act_mlp"),
    )
    loss = draw(st.sampled_from([masked, plain]), "loss")
    check(
        functools.partial(MLP, draw(st.sampled_from([0.0, 0.3]), "dropout")),
        loss,
        FLOATS,
        rules,
        draw,
    )


# A device holds at least one head of queries; keys and values with fewer heads are whole where they
# do not divide.
FEWER_HEADS = sl.AxisRules(kv_heads=["model", None], act_kv_heads=["model", None])
PRESETS = {
    "data": sl.rules.data,
    "fsdp": sl.rules.fsdp,
    "tensor": sl.rules.data | sl.rules.tensor | FEWER_HEADS,
    "tensor_sequence": sl.rules.data | sl.rules.tensor_sequence | FEWER_HEADS,
    "fsdp and tensor": sl.rules.fsdp | sl.rules.tensor | FEWER_HEADS,
}


@pytest.mark.exhaustive
@pytest.mark.long
@settings(max_examples=2, deadline=None, derandomize=True)
@given(data=st.data())
def test_decoder_under_random_presets_matches_one_device(data):
    draw = data.draw
    config = gpt.tiny(
        layers=2, width=32, heads=8, context=SEQ, vocab=40, hidden=64,
        kv_heads=draw(st.sampled_from([8, 2]), "kv_heads"),
        norm=draw(st.sampled_from(["layer", "rms"]), "norm"),
        norm_first=draw(st.booleans(), "norm_first"),
        positions=draw(st.sampled_from(["learned", "rotary"]), "positions"),
        mlp=draw(st.sampled_from(["gelu", "swiglu"]), "mlp"),
        tied=draw(st.booleans(), "tied"),
        dropout=draw(st.sampled_from([0.0, 0.3]), "dropout"),
    )  # fmt: skip
    rules = PRESETS[draw(st.sampled_from(sorted(PRESETS)), "rules")]
    check(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), gpt.loss, TOKENS, rules, draw)
