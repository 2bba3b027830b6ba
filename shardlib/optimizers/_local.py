"""Optimizers that say themselves what workers send each other."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from shardlib.checks import _arguments as check


class Local(optax.GradientTransformationExtraArgs):
    """An optimizer that is given each worker's own gradient.

    It has something other than gradients averaged.

    Give it to `sl.init` as it is, under a strategy whose exchange sends codes. It runs in the
    step's two places. While `sends(state)`, `message(gradients, state)` makes, on each device's own
    shards, what its worker sends, and says where that is not always zero; what comes back is the
    mean of these. Then `update`, on global arrays, takes that mean in place of a gradient, of those
    leaves for which `sent` is true, and gradients as ever of all others.
    """

    sends: Callable[[Any], jax.Array]
    message: Callable[[Any, Any], tuple[Any, Any]]
    for_run: Callable[[int], "Local"]

    def __new__(
        cls,
        init: Callable,
        update: Callable,
        *,
        sends: Callable[[Any], jax.Array],
        message: Callable[[Any, Any], tuple[Any, Any]],
        for_run: Callable[[int], "Local"],
    ) -> "Local":
        """`for_run(steps)` is the same optimizer for a run of so many steps, if its length is not
        known already.
        """
        functions = {
            "init": init,
            "update": update,
            "sends": sends,
            "message": message,
            "for_run": for_run,
        }
        for name, one in functions.items():
            check.function("Local", name, one)
        made = super().__new__(cls, init, update)
        made.sends, made.message, made.for_run = sends, message, for_run
        return made
