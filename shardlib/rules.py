"""Rules ready to use, to be united with `|`.

Megatron's tensor and sequence parallelism and FSDP are rules, never a change of the model. Each
preset knows all names of the library's models, so presets unite with one another and with a user's
own rules: `tensor | data` is data and tensor parallelism on a mesh with both axes.
"""

from typing import Any

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.layouts._rules import AxisRules

# Weights and activations have names of their own (`mlp`, `act_mlp`), for FSDP splits only weights.
vocabulary = AxisRules.knowing(
    "batch", "seq", "residual_seq", "vocab", "embed", "heads", "kv_heads", "head_dim", "mlp",
    "query_rank", "kv_rank", "key_dim", "rotary_dim", "value_dim",
    "encoder_layers", "dense_layers", "last_layers", "layers", "cache_seq",
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


def context(
    form: str = "ring", axis: str | tuple[str, ...] = "context", *, order: str = "zigzag"
) -> AxisRules:
    """Sequences split over an axis, and what attention does about it.

    Args:
        form: `"ring"`, `"ulysses"` or `"gather"`, see `AxisRules.attention`, or `"usp"`: a ring of
            groups of devices, of which each exchanges positions for heads within.
        axis: of the mesh. `"usp"` takes two: that of the ring, and that within a group.
        order: of positions over the devices of a ring: `"zigzag"`, each has an early and a late
            stretch, in models that arrange their tokens so (`sl.context.arrange`); `"sequence"`, as
            they follow each other, which sends less where all windows are short.

    >>> context("usp", axis=("ring", "ulysses"))["seq"]
    (('ring', 'ulysses'),)
    """
    check.choice("context", "form", form, ("gather", "ring", "ulysses", "usp"))
    check.choice("context", "order", order, ("zigzag", "sequence"))
    axes = (axis,) if isinstance(axis, str) else axis
    takes = 'an axis of the mesh, `"context"`, or several in a tuple'
    axes = check.texts("context", "axis", axes, takes)
    if form == "usp" and len(axes) != 2:
        raise ValueError(
            f'`context("usp", axis=...)` takes two axes, that of the ring and that of `ulysses`; '
            f"got {listed(axes)}."
        )
    ring = "zigzag" if order == "zigzag" else "ring"
    forms: Any = {
        "gather": ("gather",) * len(axes),
        "ring": (ring,) * len(axes),
        "ulysses": ("ulysses",) * len(axes),
        "usp": (ring, "ulysses"),
    }[form]
    split = AxisRules(seq=tuple(axes), residual_seq=tuple(axes), cache_seq=tuple(axes))
    return vocabulary | split.attention(**dict(zip(axes, forms, strict=True)))
