"""What every schedule is, and what each checks of its numbers and costs."""

from collections.abc import Sequence
from typing import Any, Protocol

from shardlib.checks import _arguments as check
from shardlib.pipeline.schedules._simulate import Costs
from shardlib.pipeline.schedules._table import Table


class Schedule(Protocol):
    """A rule that makes a table; implementations are frozen dataclasses."""

    @property
    def stages(self) -> int:
        """Stages, S."""
        ...

    @property
    def microbatches(self) -> int:
        """Microbatches, M."""
        ...

    @property
    def paired(self) -> bool:
        """Whether a tick takes a forward and a backward pass."""
        ...

    def table(self) -> Table:
        """What each stage does."""
        ...


MOST_STAGES = 256
"""The most stages that a schedule is made for: more than any pipeline has."""
MOST_PASSES = 2**16
"""The most passes of one kind, microbatches times parts, that a table is made of.

A table has two or three entries for each.
"""


def check_schedule(
    schedule: Any,
    least: int = 1,
    multiple: int = 1,
    why: str = "",
    parts: int = 1,
    most: int = MOST_PASSES,
) -> None:
    """Refuse numbers of stages and microbatches that a schedule does not take.

    Args:
        schedule: the schedule, whose numbers are replaced by checked ones.
        least: the fewest microbatches that it takes.
        multiple: what the number of microbatches is a multiple of.
        why: the reason for these two, for the error.
        parts: how many parts are on each stage.
        most: the most passes of one kind.
    """
    kind = type(schedule).__name__
    stages, count = checked_stages(schedule), _checked_microbatches(schedule)
    # Both are said at once, so that the next number that is tried is right.
    if count < least or count % multiple:
        what = f"at least {least}"
        if multiple > 1:
            what += f", a multiple of {multiple}"
        raise ValueError(f"`{kind}(stages={stages}, microbatches={count!r})`: {what}{why}.")
    # A table is made by Python, op by op, which would take minutes beyond.
    if stages * parts * count > most:
        raise ValueError(
            f"`{kind}(stages={stages}, microbatches={count})` has {stages * parts * count:,} "
            f"passes of each kind, and a table at most {most:,}: use fewer microbatches, or fewer "
            "stages."
        )
    # Numbers of numpy become those of Python, so that equal schedules print and hash alike.
    check.assign(
        schedule,
        stages=stages,
        microbatches=count,
        paired=check.boolean(kind, "paired", schedule.paired),
    )


def _checked_microbatches(schedule: Any) -> int:
    """How many microbatches a schedule has."""
    return check.whole(
        type(schedule).__name__,
        "microbatches",
        schedule.microbatches,
        "a number of microbatches",
        least=1,
        most=MOST_PASSES,
    )


def checked_stages(schedule: Any) -> int:
    """The number of stages of a schedule, as an `int`; anything else is refused."""
    return check.whole(
        type(schedule).__name__,
        "stages",
        schedule.stages,
        "a number of stages",
        least=1,
        most=MOST_STAGES,
    )


def check_costs(schedule: Any) -> None:
    """Refuse a schedule that is made for costs and was given something else."""
    takes = "`sl.pipeline.Costs`, such as `Costs(forward=1, backward=2)`"
    check.kind(type(schedule).__name__, "costs", schedule.costs, Costs, takes)


def single_costs(costs: Costs) -> tuple[float, float, float]:
    """The costs F, B and W of a stage, if they are one number each.

    Closed formulas know no stages that differ from others.
    """
    # Formulas are asked for by `gap`, whose argument it is.
    check.kind("gap", "costs", costs, Costs, "`sl.pipeline.Costs`")
    # A cost may be one number, or a list with one for each part.
    forward, backward, weights = costs.forward, costs.backward, costs.weights
    if (
        isinstance(forward, Sequence)
        or isinstance(backward, Sequence)
        or isinstance(weights, Sequence)
    ):
        raise ValueError(
            "A closed formula takes stages that are all alike: give one number for each cost."
        )
    return forward, backward, weights


def require_for_formula(holds: bool, condition: str, costs: Costs) -> None:
    """Refuse to evaluate a closed formula where the condition that it was derived for fails."""
    if not holds:
        raise ValueError(
            f"The closed formula is for {condition}; got {costs}. `simulate` takes any."
        )


def equal_cost(costs: Costs) -> float:
    """The cost F for a formula that holds where F = B = W."""
    forward, backward, weights = single_costs(costs)
    require_for_formula(forward == backward == weights, "F = B = W", costs)
    return forward


def total_cost(costs: Costs) -> float:
    """F + B + W: what a microbatch takes on a stage in all."""
    return sum(single_costs(costs))
