"""What optimizers of compressed exchanges refuse alike: of their arguments, and of their use."""

from typing import Any

import jax

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays


def check_learning_rate(name: str, rate: Any) -> None:
    """Refuse what is neither a number nor a schedule; a scalar array is a number too.

    `name` is the optimizer that an error speaks of.
    """
    takes = "a number, or a schedule: a function of the number of steps taken"
    if callable(rate) and not isinstance(rate, type):
        return
    if hasattr(rate, "dtype"):
        check_arrays.real(name, "learning_rate", rate, takes)
        if rate.shape != ():
            raise check.refusal(name, "learning_rate", rate, takes)
        return
    check.number(name, "learning_rate", rate, takes)


def checked_adam(
    name: str, b1: Any, b2: Any, eps: Any, weight_decay: Any, mask: Any
) -> tuple[float, float, float, float, Any]:
    """The same arguments, checked: those of `optax.adamw` besides its learning rate."""
    check_mask(name, mask)
    return (
        check.number(name, "b1", b1, least=0, below=1),
        check.number(name, "b2", b2, least=0, below=1),
        check.number(name, "eps", eps, least=0),
        check.number(name, "weight_decay", weight_decay, least=0),
        mask,
    )


def check_mask(name: str, mask: Any) -> None:
    """Refuse what is no mask of `optax.add_decayed_weights`: a tree of bools, or a function."""
    takes = "a tree of bools like the parameters, or a function that makes one of them"
    if mask is None or (callable(mask) and not isinstance(mask, type)):
        return
    leaves = jax.tree.leaves(mask)
    if not leaves or not all(isinstance(leaf, bool) for leaf in leaves):
        raise check.refusal(name, "mask", mask, f"{takes}, or None")


def check_length(name: str, steps: int | None, length: int) -> None:
    """Refuse a run of another length than the optimizer was told.

    Args:
        name: the optimizer that an error speaks of.
        steps: the length that it was told; None for none.
        length: that of the run.
    """
    if steps is not None and steps != length:
        raise ValueError(
            f"`{name}(steps={steps})` says another length than the run has, which is {length} "
            "steps: make them the same, or leave `steps` out where `sl.fit` says it."
        )


def needs_own_gradients(name: str, instead: str) -> ValueError:
    """The error of an optimizer that was given gradients that are averaged already.

    `instead` is what there is for these.
    """
    return ValueError(
        f"`{name}` needs each worker's own gradient, and was given what is averaged already. Hand "
        "it to `sl.init` as it is, not in `optax.chain` or another transformation, under "
        "`Strategy(exchange=sl.collectives.OneBit(axis=...))`; clip by `Strategy(clip=...)`. For "
        f"averaged gradients there is `{instead}`."
    )
