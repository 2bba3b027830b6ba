"""The scopes of a step: names that stand before those of its operations, as in

    jit(_run)/shard_map/loss/transpose(jvp())/gather/all_gather

They are seen in profiles and in the text of compiled programs.
"""

LOSS = "loss"
"""The user's loss and its derivative."""

GATHER = "gather"
"""Within the loss: making a parameter whole that is stored in parts."""

EXCHANGE = "exchange"
"""Reducing gradients over devices."""

COMPRESSED, EXACT = "compressed", "exact"
"""Within the exchange, where an optimizer compresses from some step on: the two ways."""

OPTIMIZER = "optimizer"
"""The update of parameters."""


def may_be_in_loss(op_name: str) -> bool:
    """Whether an operation of a compiled program may come from the loss, by its name.

    Compilers leave the name out of some operations, which may come from anywhere.

    >>> may_be_in_loss("jit(_run)/optimizer/add"), may_be_in_loss("")
    (False, True)
    """
    return LOSS in op_name or not op_name
