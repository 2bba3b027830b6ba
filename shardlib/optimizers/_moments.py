"""When something happens in a run: after so many steps, or after a part of a run of some length."""

from typing import Any

import numpy as np
from jax.core import Tracer

from shardlib.checks import _arguments as check

TAKES = "a step, an int of at least 1, or a part of the run, a float between 0 and 1"


def check_moment(function: str, argument: str, moment: Any, takes: str = TAKES) -> None:
    """Refuse what is neither a step nor a part of a run.

    `function` and `argument` are what an error speaks of, and `takes` is what it says of them.
    """
    if isinstance(moment, Tracer):
        raise ValueError(
            f"`{function}({argument}=...)` is known before anything is traced, so it does not go "
            "into `optax.inject_hyperparams`. What changes over a run, the learning rate, is a "
            f"schedule: `{function}(optax.cosine_decay_schedule(...))`."
        )
    # A bool is an int to Python, but no step.
    is_int = isinstance(moment, int | np.integer) and not isinstance(moment, bool)
    is_step = is_int and moment >= 1
    is_part = type(moment) is float and 0 < moment < 1
    if not (is_step or is_part):
        raise ValueError(f"`{function}({argument}={check.shown(moment)})` takes {takes}.")


def step_of(function: str, argument: str, moment: Any, steps: int | None) -> int | None:
    """After how many steps a moment is, in a run of so many; None if that is not known.

    A moment beyond the end of the run is refused: what waits for it would never happen.

    >>> step_of("onebit_adam", "freeze", 0.2, 1000), step_of("onebit_adam", "freeze", 0.2, None)
    (200, None)
    """
    is_part = isinstance(moment, float)
    if steps is None:
        return None if is_part else int(moment)
    step = max(1, round(moment * steps)) if is_part else int(moment)
    if step >= steps:
        raise ValueError(
            f"`{function}({argument}={moment})` lies beyond the run, which has {steps} steps. Say "
            f"an earlier step, or a part of the run, `{argument}=0.2`."
        )
    return step
