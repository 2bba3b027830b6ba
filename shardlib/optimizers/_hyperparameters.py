"""What is refused of arguments that optimizers share."""

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


def check_mask(name: str, mask: Any) -> None:
    """Refuse what is no mask of `optax.add_decayed_weights`: a tree of bools, or a function."""
    takes = "a tree of bools like the parameters, or a function that makes one of them"
    if mask is None or (callable(mask) and not isinstance(mask, type)):
        return
    leaves = jax.tree.leaves(mask)
    if not leaves or not all(isinstance(leaf, bool) for leaf in leaves):
        raise check.refusal(name, "mask", mask, f"{takes}, or None")
