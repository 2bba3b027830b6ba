"""What optimizers of compressed exchanges refuse alike: of their arguments, and of their use."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from shardlib._text import listed
from shardlib._tree import named_leaves
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
    if not leaves or not all(isinstance(leaf, bool | np.bool_) for leaf in leaves):
        raise check.refusal(name, "mask", mask, f"{takes}, or None")


def check_mask_fits(name: str, mask: Any, params: Any) -> None:
    """Refuse a mask that is not like parameters, nor like the upper part of their tree.

    Parameters that are not trained are None, for which a mask may have a bool.
    """
    if mask is None:
        return
    if callable(mask):
        mask = mask(params)
    try:
        jax.tree.map(lambda _, below: below, mask, params)
    except (ValueError, TypeError) as error:
        raise _misfit(name, mask, params) from error


def _misfit(name: str, mask: Any, params: Any) -> ValueError:
    """The error of a mask that is not like parameters."""
    masked = named_leaves(mask, is_leaf=lambda leaf: leaf is None)
    parameters = named_leaves(params, is_leaf=lambda leaf: leaf is None)
    missing, unknown = [], []
    for path, leaf in parameters:
        # None stands for parameters that are None.
        tops = [top for top, decays in masked if decays is not None or leaf is None]
        if not any(_is_below(path, top) for top in tops):
            missing.append(path)
    for top, _ in masked:
        if not any(_is_below(path, top) for path, _ in parameters):
            unknown.append(top)
    found = []
    if missing:
        found.append(f"has no bool for {_some_listed(missing)}")
    if unknown:
        found.append(f"has one for {_some_listed(unknown)}, which the model does not have")
    if not found:
        found.append("has containers of other types")
    return ValueError(
        f"`{name}(mask=...)` takes a tree of bools like the parameters, and this one "
        f"{', and '.join(found)}. Give a bool for each parameter, or one for all that are below a "
        "key; or make the tree by a function, `mask=lambda params: jax.tree.map(lambda x: x.ndim "
        "> 1, params)`."
    )


def _is_below(path: str, top: str) -> bool:
    """Whether a path is another one, or goes on from it; the empty one is that of the tree."""
    return not top or path == top or path.startswith(f"{top}/")


def _some_listed(paths: Iterable[str]) -> str:
    """Some paths for a message, the first few of many."""
    paths = list(paths)
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return listed(paths[:3]) + more


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
