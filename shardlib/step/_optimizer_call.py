"""The call of an optimizer: with what it asks for, and with errors about what no step provides."""

import inspect
import re
from typing import Any

import jax

# How Python, or an optimizer of optax itself, says that `update` lacks an argument.
_MISSING = re.compile(
    r"missing \d+ required keyword-only arguments?: (.*)|(\w+) must be provided\b"
)


def updated(
    optimizer: Any,
    gradient: Any,
    opt_state: Any,
    params: Any,
    loss: jax.Array,
    extra: dict[str, Any],
) -> tuple[Any, Any]:
    """The updates of an optimizer and its next state.

    Besides `extra`, the optimizer is given the loss as `value` and the gradient as `grad`, if its
    `update` takes them.
    """
    extra = {"value": loss, "grad": gradient} | extra
    # Most transformations of optax take any keyword; older ones and those of users take none.
    accepted = inspect.signature(optimizer.update).parameters
    kinds = [parameter.kind for parameter in accepted.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        extra = {name: value for name, value in extra.items() if name in accepted}
    try:
        return optimizer.update(gradient, opt_state, params, **extra)
    except AttributeError as error:
        # Of anything else it is an error within the optimizer.
        if error.obj is not params:
            raise
        raise ValueError(
            f"The optimizer wants parameters in a class of its own, with an attribute "
            f"`{error.name}`, and a step gives it those of the model as they are. Optimizers such "
            "as `optax.lookahead` are not supported."
        ) from error
    except (TypeError, ValueError) as error:
        missing = _MISSING.search(str(error))
        if missing is None:
            raise
        raise ValueError(
            f"The optimizer wants {missing[1] or missing[2]}, which a step does not provide: it "
            "gives `value`, the loss of the whole batch, and `grad`, its gradient. Optimizers that "
            "evaluate the loss again, such as line searches, are not supported."
        ) from error
