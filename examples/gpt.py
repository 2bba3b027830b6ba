"""GPT-2 and Llama 2 as steps to plan: each function takes a mesh, and gives a step with its
abstract state and batch, and an estimate to compare.

    python -m shardlib plan examples/gpt.py:llama2_7b --target tpu:v5e:16x16 --mesh data=16,model=16
    python -m shardlib plan examples/gpt.py:gpt2_124m --target gpu:h200:1x1x8 --mesh data=8

Products are taken in bfloat16; parameters, gradients and AdamW's moments are float32. Attention is
plain JAX, of whose memory the estimates speak at its fullest moment; `GPTConfig()` itself takes the
kernel of the device.
"""

import sys
from pathlib import Path
from typing import Any

# The models live beside the examples, in a clone.
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

import shardlib as sl
from models import gpt

PLAIN_GPT2 = gpt.gpt2(dtype=jnp.bfloat16, vocab_multiple=128, attention="xla")
PLAIN_LLAMA = gpt.llama2_7b(dtype=jnp.bfloat16, attention="xla")
Planned = tuple[sl.Step, sl.State, Any, sl.planning.Estimate]


def step_of(
    config: gpt.GPTConfig,
    mesh: Mesh,
    examples: int,
    *,
    split_parameters: bool = False,
    **options: Any,
) -> Planned:
    """A step that trains a decoder with AdamW on so many examples at once.

    The axis `data` splits examples, and parameters too where asked; an axis `model`, if there is
    one, is Megatron's.
    """
    rules = sl.rules.data
    if "model" in mesh.shape:
        rules = rules | sl.rules.tensor_sequence | sl.AxisRules(batch="data")
    if split_parameters:
        rules = rules | sl.AxisRules(embed="data")
    strategy = sl.Strategy(mesh=mesh, rules=rules, **options)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1)
    )
    state = sl.init(lambda: gpt.GPT(config, rngs=nnx.Rngs(0)), optimizer, strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((examples, config.context + 1), "int32")}
    weight_dtype = strategy.dtypes.of("", jnp.dtype("float32"))
    estimate = sl.estimate(
        config.decoder,
        examples=examples // strategy.accumulate // mesh.shape["data"],
        itemsizes=sl.planning.ItemSizes(weights=weight_dtype.itemsize),
        parallelism=sl.planning.Parallelism(
            data=mesh.shape["data"],
            zero=3 if split_parameters else strategy.sharding.stage,
            tensor=mesh.shape.get("model", 1),
            sequence="model" in mesh.shape,
        ),
        recompute="none" if strategy.remat == "none" else "full",
        accumulate=strategy.accumulate,
    )
    return sl.train_step(gpt.loss, strategy), state, batch, estimate


def gpt2_124m(mesh: Mesh) -> Planned:
    """GPT-2 of 124 million parameters, half a million tokens a step."""
    return step_of(PLAIN_GPT2, mesh, 512, accumulate=8)


def llama2_7b(mesh: Mesh) -> Planned:
    """Llama 2 of 7 billion parameters, a million tokens a step."""
    return step_of(PLAIN_LLAMA, mesh, 256, split_parameters=True, remat="full")


def llama2_7b_zero3(mesh: Mesh) -> Planned:
    """The same under stage 3 of ZeRO: gathered and scattered layer by layer, in bfloat16, and not
    by the partitioner.
    """
    return step_of(
        gpt.llama2_7b(attention="xla"),
        mesh,
        256,
        zero=3,
        precision="bf16",
        remat="full",
    )
