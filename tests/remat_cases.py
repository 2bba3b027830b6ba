"""The small decoder whose blocks keep little in the tests of `remat`: its batch, and a step of it."""

import jax
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from models import gpt

ROWS, LENGTH = 16, 32


def decoder(layers, width=64):
    """A decoder in which every named activation occurs: gated MLPs and rotary positions."""
    return gpt.tiny(
        layers=layers,
        width=width,
        heads=4,
        context=LENGTH,
        norm="rms",
        mlp="swiglu",
        bias=False,
        positions="rotary",
    )


VOCAB = decoder(1).vocab
BATCH = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)}
FULL_ZERO = {"zero": sl.Zero(3, small=0)}
DATA = {"mesh": "data=8", "rules": sl.rules.data}
STAGE_3 = {**DATA, **FULL_ZERO}
TENSOR = {"mesh": "data=2,model=4", "rules": sl.rules.data | sl.rules.tensor_sequence, **FULL_ZERO}


def stepped(config, **options):
    """The loss of a step, and the parameters after it."""
    strategy = sl.Strategy(**options)
    state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optax.sgd(0.1), strategy)
    state, metrics = sl.train_step(gpt.loss, strategy)(state, BATCH)
    return metrics["loss"], jax.tree.map(np.asarray, state.params)
