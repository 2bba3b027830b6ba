"""How long a run is and what happens on the way, and which arguments `fit` refuses.

All are checked before anything is computed or written. What is refused is named with the value that
was given and with what would be right.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardlib.checks import _arguments as check
from shardlib.step._state import State
from shardlib.step._step import Step

# Steps are counted in 32 bits.
_MOST_STEPS = 2**31 - 1


@dataclass(frozen=True)
class Loop:
    """How long a run is, and what happens on the way.

    - `steps`: how many steps the run has, those before it was resumed included.
    - `log_every`, `evaluate_every`, `save_every`: steps between records, measurements of held-out
      data, and checkpoints; after the last step there is one of each in any case.
    - `keep`, `keep_every`: the newest checkpoints, and every so many steps, that are kept.
    - `nonfinite`: the run ends after so many steps in a row whose gradient is not finite. In such a
      row nothing is saved.
    - `profile`: the first step and the number of steps to profile; look at them with `xprof`.
    """

    steps: int
    log_every: int = 10
    evaluate_every: int = 1000
    save_every: int = 1000
    keep: int = 3
    keep_every: int | None = None
    nonfinite: int = 10
    profile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "profile":
                _check_profile(value)
                continue
            value = check.whole(
                "Loop",
                field.name,
                value,
                least=1,
                most=_MOST_STEPS,
                optional=field.name == "keep_every",
            )
            # A whole number of another type, NumPy's say, becomes an `int`.
            check.assign(self, **{field.name: value})


def _check_profile(profile: Any) -> None:
    """Refuse a profile that is neither None nor a pair of positive whole numbers."""
    if profile is None:
        return
    # The types are compared since `True` is an `int` too, and no number of steps.
    is_pair = (
        isinstance(profile, tuple)
        and len(profile) == 2
        and all(type(number) is int and number >= 1 for number in profile)
    )
    if not is_pair:
        raise check.refusal(
            "Loop", "profile", profile, "the first step and how many: `profile=(10, 3)`"
        )


def check_call(step: Any, state: Any, loop: Any) -> None:
    """Refuse a call of `fit` whose first arguments are mixed up or were made by something else."""
    for name, value, kind in (("step", step, Step), ("state", state, State), ("loop", loop, Loop)):
        if not isinstance(value, kind):
            raise ValueError(
                "`fit(step, state, batches, loop)` takes what `train_step` and `init` make and a "
                f"`Loop`; `{name}` is {type(value).__name__}."
            )


def check_names(
    metrics: Mapping[str, Any], watched: Mapping[str, Any], speed: Mapping[str, Any]
) -> None:
    """Refuse two numbers of one name, of which a record would only have the last.

    A record has the metrics of the step, the numbers that are watched, and the speed. The last is
    empty before the second step, so that this is called for every record.
    """
    names = {"step", "note", *metrics}
    listed = ", ".join(f"`{name}`" for name in speed) or "none yet"
    for name in (*watched, *speed):
        if name in names:
            raise ValueError(
                f"`fit`: two numbers of a record are called `{name}`. A record has the metrics of "
                "the step, what is given by `watch`, and the speed, "
                f"{listed}: call yours something else."
            )
        names.add(name)


def check_options(
    evaluate: Any, sinks: Any, watch: Any, unit: Any, flops_per_unit: Any, about: Any
) -> None:
    """Refuse options of `fit` that are of another kind than it takes.

    Args:
        evaluate: a function of a state, or None.
        sinks: a list of functions of a record, or None.
        watch: functions of a number of steps, by name, or None.
        unit: a text.
        flops_per_unit: a positive number, or None.
        about: a mapping, or None; whether JSON can hold it is not looked at here.
    """
    check.function(
        "fit", "evaluate", evaluate, "a function of a state that measures it", optional=True
    )
    check.kind(
        "fit", "sinks", sinks, list | tuple, "a list of functions of a record", optional=True
    )
    for sink in sinks or ():
        check.function("fit", "sinks", sink, "functions of a record")
    check.kind(
        "fit",
        "watch",
        watch,
        Mapping,
        "a mapping from names to functions of a number of steps",
        optional=True,
    )
    for name, function in (watch or {}).items():
        check.text("fit", "watch", name, "names, as text, of functions of a number of steps")
        check.function("fit", "watch", function, "functions of a number of steps")
    check.text("fit", "unit", unit, "what the weights of the loss count, as text")
    check.number(
        "fit", "flops_per_unit", flops_per_unit, "a number of FLOPs", above=0, optional=True
    )
    check.kind(
        "fit", "about", about, Mapping, "a mapping from names to what JSON can hold", optional=True
    )
