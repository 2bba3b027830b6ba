r"""Long sequences as steps to plan: one sequence of a million tokens over the devices of a slice,
around a ring; and Llama 3.1 70B at 131,072 tokens, each sequence over eight devices.

    python -m shardlib plan examples/long.py:llama3_8b_1m \
        --target tpu:v5p:4x4x4 --mesh data=1,context=64
    python -m shardlib plan examples/long.py:llama31_70b_128k \
        --target tpu:7x:4x8x8 --mesh data=64,context=8

The model is that of short sequences: rules alone say that positions are split over the axis
`context`, and that keys and values go around a ring. ZeRO splits parameters and optimizer state
over both axes. Only each layer's input is kept for the backward pass.
"""

import sys
from pathlib import Path
from typing import Any

# The models live beside the examples, in a clone.
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import optax
from flax import nnx
from jax.sharding import Mesh

import shardlib as sl
from models import gpt

PRECISION = sl.Precision("bf16", accumulate="bf16", reduce="bf16")
LLAMA3_8B = gpt.llama3_8b(context=2**20, rope_theta=283_461_213.0, fused_loss=True)
LLAMA31_70B = gpt.llama3_8b(
    context=2**17, layers=80, width=8192, heads=64, hidden=28_672, fused_loss=True
)


def step_of(config: gpt.GPTConfig, mesh: Mesh, examples: int) -> tuple[sl.Step, sl.State, Any]:
    """A step that trains a decoder on so many sequences at once."""
    strategy = sl.Strategy(
        mesh=mesh,
        rules=sl.rules.data | sl.rules.context("ring", axis="context"),
        zero=3,
        precision=PRECISION,
        remat="full",
    )
    optimizer = optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optimizer, strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((examples, config.context + 1), "int32")}
    return sl.train_step(gpt.loss, strategy), state, batch


def llama3_8b_1m(mesh: Mesh) -> tuple[sl.Step, sl.State, Any]:
    """Llama 3 8B on sequences of 1,048,576 tokens, one for each place along `data`."""
    return step_of(LLAMA3_8B, mesh, mesh.shape["data"])


def llama31_70b_128k(mesh: Mesh) -> tuple[sl.Step, sl.State, Any]:
    """Llama 3.1 70B on sequences of 131,072 tokens, one for each place along `data`."""
    return step_of(LLAMA31_70B, mesh, mesh.shape["data"])
