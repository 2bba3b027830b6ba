"""Optimizers that say themselves what workers send each other.

Ordinary optimizers are given the mean of all workers' gradients. Some methods average something
else, momenta for one, and need each worker's own gradient to make it:

    own gradient --message()--> what is sent --codes, exchange--> its mean --update()--> the step
    on each device's own shards                                   on global arrays
"""

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

    # Optax knows its transformations by their type, a tuple of `init` and `update` that other code
    # unpacks. So these are attributes and no further items: it stays such a tuple.
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
        """Make an optimizer of its functions.

        Args:
            init: makes the state from parameters, as optax has it.
            update: makes updates of global arrays; it takes `sent` besides what optax has.
            sends: whether messages are sent in the step that begins with a state.
            message: what a worker sends, a tree like the gradients, and a tree of bools.
            for_run: the same optimizer for a run of so many steps, if its length is not known.
        """
        functions = {
            "init": init,
            "update": update,
            "sends": sends,
            "message": message,
            "for_run": for_run,
        }
        for name, function in functions.items():
            check.function("Local", name, function)
        transformation = super().__new__(cls, init, update)
        transformation.sends = sends
        transformation.message = message
        transformation.for_run = for_run
        return transformation
