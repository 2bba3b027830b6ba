"""The table of a plan's activations, for people who read it in a terminal."""

from typing import Any

from shardlib._text import human_bytes, table, terminal_width

_LEAST_SHARE = 5e-4  # of a step's products, below which none are said


def activations_table(plan: Any) -> str:
    """What marked blocks keep, by name; empty for a plan without marked blocks.

    The last column is the first to go where a terminal is narrow: the table is about bytes.
    """
    if not plan.activations:
        return ""
    total = 0
    if plan.flops is not None:
        total = plan.flops.total
    rows = [
        ("activations of marked blocks", "a layer", "all kept", "", "of all products, keeping it")
    ]
    for one in plan.activations:
        rows.append(
            (
                f"  {one.name}",
                human_bytes(one.layer_bytes),
                _held(one.held_bytes),
                one.state,
                _spared(one, total),
            )
        )
    # What is kept adds up. What is spared does not: two names may spare the same product.
    held = sum(one.held_bytes for one in plan.activations)
    rows.append(("  all", "", human_bytes(held), "", ""))
    return table(rows, right=(1, 2), width=terminal_width(), shorten=(0,), drop=(4,))


def _held(size: int) -> str:
    """Bytes that a device holds, or a dash, which is found faster than a zero among sizes.

    >>> _held(0), _held(2**20)
    ('-', '1.0 MiB')
    """
    if not size:
        return "-"
    return human_bytes(size)


def _spared(activation: Any, total: int) -> str:
    """What keeping an activation spares, and what it would spare where it is not kept.

    A share that would read as 0.0% is left out.

    >>> from shardlib.planning._activations import Activation
    >>> _spared(Activation("context", 64, 128, (("kept", 2),), 250, 0), 1000)
    'spares 25.0%'
    """
    said = []
    for words, flops in (
        ("spares", activation.spared_flops),
        ("would spare", activation.again_flops),
    ):
        if total and flops >= _LEAST_SHARE * total:
            said.append(f"{words} {flops / total:.1%}")
    return ", ".join(said)
