"""The named activations of a decoder's layer, by formula: bytes, and what keeping them spares.

The names are those of `models/gpt.py`. What the MLP returns has a name too, and no derivative reads
it, so that nothing of a layer runs again for its last product.
"""

from typing import Any, NamedTuple, get_args

from shardlib.checks import _arguments as check
from shardlib.layouts._remat_parts import PROJECTED
from shardlib.layouts._remat_policy import Remat, kept_by_blocks
from shardlib.planning._decoder import Decoder, Recompute


class Named(NamedTuple):
    """Bytes of an activation of one layer on one device, and operations that keeping it spares."""

    size: int
    flops: int


def named_of(
    decoder: Decoder, examples: int, itemsize: int, tensor: int, parts: int
) -> dict[str, Named]:
    """The named activations of a layer.

    Args:
        decoder: the decoder.
        examples: how many there are.
        itemsize: bytes of a number.
        tensor: devices that split a layer.
        parts: devices that split the stream between layers.
    """
    tokens, width = examples * decoder.sequence, decoder.width
    head_dim = decoder.head_dim or width // decoder.heads
    queries, keys = decoder.heads * head_dim, (decoder.kv_heads or decoder.heads) * head_dim

    def product(inputs: int, outputs: int) -> Named:
        return Named(tokens * outputs * itemsize // tensor, 2 * tokens * inputs * outputs // tensor)

    scores = 2 * tokens * decoder.sequence * queries // tensor
    context = Named(tokens * queries * itemsize // tensor, scores)
    # An attention without scores in memory keeps a number for each query, and makes the scores
    # again from it in a kernel of its own backward pass.
    if not decoder.scores:
        size = context.size + decoder.score_bytes(examples, itemsize, tensor)
        context = Named(size, 2 * scores)
    # What an attention returns is the stream, which more devices may split than split a layer.
    returned = Named(tokens * width * itemsize // parts, 2 * tokens * queries * width // tensor)
    hidden = product(width, decoder.hidden or 4 * width)
    named = {
        "query": product(width, queries),
        "key": product(width, keys),
        "value": product(width, keys),
        "context": context,
        "attention_out": returned,
        "mlp_up": hidden,
        # An activation function runs again for it, which is no product.
        "mlp_hidden": Named(hidden.size, 0),
    }
    if decoder.mlp in ("swiglu", "geglu"):
        named["mlp_gate"] = hidden
    return named


def kept_names(recompute: Any, decoder: Decoder) -> tuple[str, ...] | None:
    """The names that a layer keeps besides its input; None for a word that is none of names.

    What no formula is of is refused.
    """
    if isinstance(recompute, str) and recompute in get_args(Recompute):
        return None
    # Which names there are does not depend on sizes.
    known = named_of(decoder, 1, 1, 1, 1)
    if isinstance(recompute, str) and recompute == "minimal":
        return tuple(name for name in PROJECTED if name in known)
    kept = kept_by_blocks(recompute) if isinstance(recompute, Remat) else None
    if not isinstance(recompute, Remat) or kept != Remat.save(*recompute.names):
        words = ", ".join(map(repr, (*get_args(Recompute), "minimal")))
        takes = f"one of {words}, or names of activations: `sl.Remat.save(...)`"
        raise check.refusal("estimate", "recompute", recompute, takes)
    for name in recompute.names:
        if name not in known and name != "mlp_out":
            raise ValueError(
                f"`estimate(recompute={check.shown(recompute)})`: a decoder has no `{name}`; it "
                f"has {', '.join(known)}."
            )
    return tuple(name for name in recompute.names if name in known)
