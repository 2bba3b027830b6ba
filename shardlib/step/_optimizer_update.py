"""What an optimizer of optax is given in a step, and what it makes of a gradient."""

import inspect
import re
from typing import Any

import jax
import optax


def clipped(clip: optax.GradientTransformation, gradient: Any, params: Any) -> Any:
    state = clip.init(params)
    if jax.tree.leaves(state):
        raise ValueError(
            "`Strategy(clip=...)` takes a transformation without state; this one has some. Put it "
            "into the optimizer: `optax.chain(clip, optimizer)`."
        )
    return clip.update(gradient, state, params)[0]


def updated(
    optimizer: Any,
    gradient: Any,
    opt_state: Any,
    params: Any,
    loss: jax.Array,
    extra: dict[str, Any],
) -> tuple[Any, Any]:
    """Let an optimizer say what it makes of a gradient; it is given the loss and the gradient if it
    wants them.
    """
    extra = {"value": loss, "grad": gradient} | extra
    accepted = inspect.signature(optimizer.update).parameters
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in accepted.values()):
        extra = {name: value for name, value in extra.items() if name in accepted}
    try:
        return optimizer.update(gradient, opt_state, params, **extra)
    except TypeError as error:
        missing = re.search(r"missing \d+ required keyword-only arguments?: (.*)", str(error))
        if missing is None:
            raise
        raise ValueError(
            f"The optimizer wants {missing[1]}, which a step has not: it gives `value`, the loss "
            "of the whole batch, and `grad`, its gradient. Line searches, which evaluate the loss "
            "again, are not supported."
        ) from error
