"""What a run knows of one of its steps: in flight, its metrics, and what is due after it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from shardlib._tree import named_leaves
from shardlib.machine._agreement import require_agreement
from shardlib.step._state import State
from shardlib.step._step import Step


@dataclass(frozen=True)
class StepInFlight:
    """A step that the devices have been given, and whose metrics nobody has looked at yet.

    The batch is kept to find examples in it that are not finite, should the gradient not be.
    """

    step: int
    metrics: Mapping[str, jax.Array]
    batch: Any


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step as numbers, those that only the run needs apart from the others.

    - `recorded`: those that go into records, by name, the loss among them.
    - `weight`: of the batch's examples, in the unit of the run.
    - `nonfinite_parameter`: the number of the first parameter whose gradient is not finite, or -1.
    - `nonfinite_losses`, `nonfinite_microbatch`: in how many microbatches the loss is not finite,
      and in which, if it is one.
    """

    recorded: dict[str, Any]
    weight: float
    nonfinite_parameter: int
    nonfinite_losses: int
    nonfinite_microbatch: int

    @classmethod
    def fetch(cls, metrics: Mapping[str, jax.Array]) -> "StepMetrics":
        """Copy metrics to the host, which waits for their step to end."""
        # One transfer for all metrics, each of which is a few numbers.
        values = {name: value.tolist() for name, value in jax.device_get(metrics).items()}
        return cls(
            weight=values.pop("weight"),
            nonfinite_parameter=int(values.pop("first_nonfinite")),
            nonfinite_losses=values.pop("nonfinite_losses"),
            nonfinite_microbatch=values.pop("nonfinite_microbatch"),
            recorded=values,
        )


@dataclass(frozen=True)
class Due:
    """What happens after a step, besides its record.

    - `last`: the run has taken all its steps.
    - `stopped`: it was asked to end, and ends after this step.
    - `checkpoint`, `evaluation`: one of these is due.
    """

    last: bool
    stopped: bool
    checkpoint: bool
    evaluation: bool


def require_same_program(step: Step, state: State, batch: Any, data: str) -> None:
    """Compare what several processes must have alike, before the first step.

    At this moment none waits for another in a collective. Later, a difference in the program or the
    shapes would be a hang instead of an error. `data` says which data a process reads.
    """
    if jax.process_count() == 1:
        return
    shapes = []
    for path, leaf in named_leaves(batch):
        shapes.append(f"{path}: {leaf.dtype}{list(leaf.shape)}")
    program = step.lower(state, batch).as_text()
    require_agreement({"batch": "\n".join(shapes), "program": program, "data": data})
