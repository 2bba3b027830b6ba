"""Rules ready to use, to be united with `|`.

Megatron's tensor and sequence parallelism and FSDP are rules, never a change of the model. Each
preset knows all names of the library's models, so presets unite with one another and with a user's
own rules: `tensor | data` is data and tensor parallelism on a mesh with both axes.
"""

from shardlib.layouts._rules import AxisRules

# Weights and activations have names of their own (`mlp`, `act_mlp`), for FSDP splits only weights.
vocabulary = AxisRules.knowing(
    "batch", "seq", "residual_seq", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp",
    "encoder_layers", "layers",
    "position", "experts", "routes", "act_embed", "act_heads", "act_kv_heads", "act_mlp",
    "act_vocab",
)  # fmt: skip
"""The names that the library's own models use; weights and activations have different ones."""

data = vocabulary | AxisRules(batch="data")
"""Data parallelism over the axis `data`."""

tensor = vocabulary | AxisRules(
    vocab="model", heads="model", kv_heads="model", mlp="model",
    act_vocab="model", act_heads="model", act_kv_heads="model", act_mlp="model",
)  # fmt: skip
"""Megatron's tensor parallelism over the axis `model`: heads, the hidden width of the MLP and the
vocabulary are split.
"""

tensor_sequence = tensor | AxisRules(residual_seq="model")
"""Tensor parallelism whose residual stream, between the split parts, is split along the sequence
(Megatron's).
"""

fsdp = vocabulary | AxisRules(batch=("data", "fsdp"), embed="fsdp")
"""Parameters split over an automatic axis `fsdp` of its own, which splits the batch too; the
partitioner gathers them.
"""

pipeline = vocabulary | AxisRules(encoder_layers="stage", layers="stage")
"""Layers split over the axis `stage`, for `Strategy(pipeline=...)`; those of an encoder come
first.
"""

experts = vocabulary | AxisRules(batch="data", experts="data")
"""GShard's: experts are split over the axis of the data, and tokens go to them; all else is data
parallel.
"""
