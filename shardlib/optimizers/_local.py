"""Optimizers that say themselves what workers send each other, and when.

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
    """An optimizer that gets each worker's own gradient, and averages something made of it.

    Give it to `sl.init` as it is, under a strategy whose exchange sends codes. It runs in two
    places of the step. While `sends(state)` is true, `message(gradients, state)` computes what a
    worker sends, on each device's own shards, and marks where that is not always zero. The exchange
    returns the mean over workers. Then `update` runs on global arrays. For leaves for which `sent`
    is true it gets this mean in place of a gradient; for all others it gets the averaged gradient.
    """

    # Optax knows its transformations by their type, a tuple of `init` and `update` that other code
    # unpacks. So these are attributes and no further items: it stays such a tuple.
    sends: Callable[[Any], jax.Array]
    message: Callable[[Any, Any], tuple[Any, Any]]
    for_run: Callable[[int], "Local"]
    unmasked: Callable[[], "Local"]

    def __new__(
        cls,
        init: Callable,
        update: Callable,
        *,
        sends: Callable[[Any], jax.Array],
        message: Callable[[Any, Any], tuple[Any, Any]],
        for_run: Callable[[int], "Local"],
        unmasked: Callable[[], "Local"] | None = None,
    ) -> "Local":
        """Make an optimizer of its functions.

        Args:
            init: makes the state from parameters, as optax has it.
            update: makes updates of global arrays; it takes `sent` besides what optax has.
            sends: whether messages are sent in the step that begins with a state.
            message: what a worker sends, a tree like the gradients, and a tree of bools.
            for_run: the same optimizer for a run of so many steps, if its length is not known.
            unmasked: one that sends the same at the same times and has no mask, which is like the
                parameters of one model; by default the optimizer itself.
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
        check.function("Local", "unmasked", unmasked, optional=True)
        transformation = super().__new__(cls, init, update)
        transformation.sends = sends
        transformation.message = message
        transformation.for_run = for_run
        transformation.unmasked = unmasked or (lambda: transformation)
        return transformation


class Apart(optax.GradientTransformationExtraArgs):
    """An optimizer that lets workers differ, and says when they meet and what they send then.

    Give it to `sl.init` as it is, under a strategy whose exchange sends codes. Each worker has
    parameters and a state of its own, and `update` takes a step with its own gradient. Then, if
    `meets(state)`, workers average their `message(state)`, and `met` says from which parameters,
    and with which state, all of them go on:

        own gradient --update()--> own parameters and state
            if meets(state):   message(state) --codes, exchange--> its mean --met()--> the same

    Before `update`, while `averages(state)`, gradients are averaged exactly, for a variance say.
    If all workers have the same parameters after such a step, as `alike(state)` says, that counts
    as a meeting in which nothing had to be sent.

    What `meets` and `averages` go by, such as counts of steps, must be the same for all workers. So
    if one worker's gradient is not finite, the step is skipped by all, if it is skipped at all.
    """

    averages: Callable[[Any], jax.Array]
    alike: Callable[[Any], jax.Array]
    meets: Callable[[Any], jax.Array]
    message: Callable[[Any], tuple[Any, Any]]
    met: Callable[[Any, Any, Any], tuple[Any, Any]]
    for_run: Callable[[int], "Apart"]
    unmasked: Callable[[], "Apart"]

    def __new__(
        cls,
        init: Callable,
        update: Callable,
        *,
        averages: Callable[[Any], jax.Array],
        alike: Callable[[Any], jax.Array],
        meets: Callable[[Any], jax.Array],
        message: Callable[[Any], tuple[Any, Any]],
        met: Callable[[Any, Any, Any], tuple[Any, Any]],
        for_run: Callable[[int], "Apart"],
        unmasked: Callable[[], "Apart"] | None = None,
    ) -> "Apart":
        """Make an optimizer of its functions.

        Args:
            init: makes the state from parameters, as optax has it.
            update: makes a worker's updates; it takes `averaged`, whether the gradients are the
                mean of all workers' in this step, besides what optax has.
            averages: whether gradients are averaged in the step that begins with a state.
            alike: whether the step that made a state has left all workers with the same parameters
                and the same state.
            meets: whether workers meet at the end of the step that made a state.
            message: what a worker sends, a tree like the parameters, and a tree of bools that says
                where it is not always zero. Both are of a device's own shards.
            met: `(mean of messages, state, center) -> (parameters, state)`, where the center is the
                parameters on which workers met last; again of a device's own shards.
            for_run: the same optimizer for a run of so many steps, if its length is not known.
            unmasked: one that sends the same at the same times and has no mask, which is like the
                parameters of one model; by default the optimizer itself.
        """
        functions = {
            "init": init,
            "update": update,
            "averages": averages,
            "alike": alike,
            "meets": meets,
            "message": message,
            "met": met,
            "for_run": for_run,
        }
        for name, function in functions.items():
            check.function("Apart", name, function)
        check.function("Apart", "unmasked", unmasked, optional=True)
        transformation = super().__new__(cls, init, update)
        for name, function in functions.items():
            # The first two are what optax has made of it already.
            if name not in ("init", "update"):
                setattr(transformation, name, function)
        transformation.unmasked = unmasked or (lambda: transformation)
        return transformation


def check_wrapped(name: str, optimizer: Any) -> None:
    """Refuse what is no optimizer, and one that cannot be wrapped by the function `name`.

    An optimizer that says itself what workers send is known by its type, which a wrapper hides.
    """
    takes = "an optax transformation, such as `optax.sgd(0.1)`"
    check.kind(name, "optimizer", optimizer, optax.GradientTransformation, takes)
    if isinstance(optimizer, Local | Apart):
        raise ValueError(
            f"`{name}(optimizer=...)` was given an optimizer that says itself what workers send, "
            "which it cannot wrap: take an ordinary one of optax, such as `optax.adamw`."
        )
