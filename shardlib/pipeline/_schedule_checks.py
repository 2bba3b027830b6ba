"""What a schedule must have so that a step can run it on a mesh."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from shardlib.checks import _arguments as check
from shardlib.layouts._rules import LAYERS, AxisRules
from shardlib.layouts._specs import as_tuple
from shardlib.pipeline._program import table_of
from shardlib.pipeline.schedules._schedule import Schedule
from shardlib.pipeline.schedules._simulate import simulate
from shardlib.pipeline.schedules._table import Table

# A schedule is anything with these attributes.
_PROTOCOL = ("stages", "microbatches", "paired", "table")


def check_is_schedule(schedule: Any) -> None:
    """Refuse what is no schedule, each near miss with its way out."""
    if isinstance(schedule, str):
        raise ValueError(
            f"`Strategy(pipeline={check.shown(schedule)})`: text is for the trainer's command "
            "line; here it is a schedule, such as `sl.pipeline.OneFOneB(stages=4, "
            "microbatches=16)`."
        )
    if isinstance(schedule, Table):
        raise ValueError(
            "`Strategy(pipeline=...)`: a table becomes a schedule by `sl.pipeline.Custom(table)`."
        )
    # A class has the attributes of its instances, as functions.
    is_class = isinstance(schedule, type)
    if is_class or not all(hasattr(schedule, name) for name in _PROTOCOL):
        raise ValueError(
            f"`Strategy(pipeline={check.shown(schedule)})` takes a schedule, such as "
            "`sl.pipeline.OneFOneB(stages=4, microbatches=16)`: what has `stages`, "
            "`microbatches`, `paired` and `table()`."
        )


def check_table(schedule: Any) -> None:
    """Refuse a schedule whose table is not what it says, or cannot be one program on all stages."""
    table = table_of(schedule)
    if (table.stages, table.microbatches) != (schedule.stages, schedule.microbatches):
        raise ValueError(
            f"`{schedule}` says {schedule.stages} stages and {schedule.microbatches} "
            f"microbatches, and its table has {table.stages} and {table.microbatches}."
        )
    if not table.trains:
        raise ValueError(
            f"The table of `{schedule}` has only forward passes: nothing would be learned."
        )
    # All devices run one program, so each stage has the same number of parts of the model.
    counts = [table.placement.count(stage) for stage in range(table.stages)]
    if len(set(counts)) > 1:
        raise ValueError(
            f"The table of `{schedule}` has {counts} parts on its stages: every stage must have "
            "as many, since all run one program."
        )
    _play_through(schedule)


@lru_cache(maxsize=64)
def _play_through(schedule: Schedule) -> None:
    """Refuse a schedule in which an op can never start; played once for each schedule."""
    simulate(table_of(schedule))


def check_stage_axis(schedule: Any, rules: AxisRules, axes: Mapping[str, int]) -> None:
    """Refuse rules or a mesh without an axis that has one place for each stage.

    Args:
        schedule: the schedule.
        rules: the rules, of which `layers` names the axis.
        axes: the sizes of the mesh's axes; -1 of one that takes the devices that are left.
    """
    choices = _choices_of(rules, LAYERS)
    if len(choices) != 1 or len(as_tuple(choices[0])) != 1:
        rule = choices[0] if len(choices) == 1 else list(choices)
        raise ValueError(
            f"`Strategy(pipeline=...)`: the rule `{LAYERS}` says which mesh axis has the stages, "
            f"and it is {rule!r}. Name one: "
            f'`rules | sl.AxisRules({LAYERS}="stage")`, as `sl.rules.pipeline` does.'
        )
    (axis,) = as_tuple(choices[0])
    # A device holds one stage: with more devices than stages, some would have no work. A size of -1
    # is not known yet.
    if axes[axis] not in (schedule.stages, -1):
        raise ValueError(
            f"`{schedule}` has {schedule.stages} stages, and the mesh axis `{axis}` that the "
            f"rule `{LAYERS}` names has size {axes[axis]}: make them the same."
        )
    # Microbatches travel from stage to stage, so that all of them pass through each.
    if axis in rules.batch_axes:
        raise ValueError(
            f"The axis `{axis}` splits the batch, and `{LAYERS}` too: every stage sees all "
            "examples."
        )


def _choices_of(rules: AxisRules, name: str) -> tuple[Any, ...]:
    """What a rule may choose among; None if there is no rule of this name."""
    for other, choices in rules.items():
        if other == name:
            return tuple(choices)
    return (None,)
