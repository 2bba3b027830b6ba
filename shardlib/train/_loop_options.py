"""How long a run is and what happens on the way, and which arguments `fit` refuses.

All are checked before anything is computed or written. What is refused is named with the value that
was given and with what would be right.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, SupportsFloat

import jax
import numpy as np

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.step._state import State
from shardlib.step._step import Step
from shardlib.train._sinks import Sink

# Steps are counted in 32 bits.
_MOST_STEPS = 2**31 - 1


@dataclass(frozen=True)
class Loop:
    """How long a run is, and how often it logs, evaluates and saves.

    - `steps`: how many steps the run has, those before it was resumed included.
    - `log_every`: steps from one record of the metrics to the next; the last step has one too.
    - `evaluate_every`: steps from one evaluation, `fit(evaluate=...)`, to the next; there is one
      after the last step too.
    - `save_every`: steps from one checkpoint to the next, if the run has a folder; there is one
      after the last step too.
    - `keep`: the newest checkpoints that are kept, a number; older ones are deleted.
    - `keep_every`: older checkpoints are kept too if this divides their step; None keeps none.
    - `nonfinite`: the run ends, with a `FloatingPointError`, after so many steps in a row whose
      gradient is not finite. In such a row nothing is saved.
    - `profile`: the first step to profile, counted from 1, and the number of steps, such as
      `(10, 3)`. The profile is in `profile/` in the run's folder; look at it with `xprof`. None
      makes none.
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
        for option in fields(self):
            value = getattr(self, option.name)
            # All options are numbers of steps but this one, a pair of them.
            if option.name == "profile":
                _check_profile(value)
                continue
            value = check.whole(
                "Loop",
                option.name,
                value,
                least=1,
                most=_MOST_STEPS,
                optional=option.name == "keep_every",
            )
            # A whole number of another type, NumPy's say, becomes an `int`.
            check.assign(self, **{option.name: value})


@dataclass(frozen=True)
class Records:
    """What the records of a run hold, and where they go.

    - `sinks`: called with every record, by the first process only. By default a bar on standard
      error, and `metrics.jsonl` if the run has a folder.
    - `watch`: further numbers, by name: each a function of how many updates were made before, as a
      schedule of the learning rate is. A step that is skipped is no update.
    - `unit`: what the weights of the loss count: `"tokens"`, for example.
    - `flops_per_unit`: the FLOPs that training on one of these takes. With it, records say what
      share of the devices' peak that is (MFU), if their datasheet is known.

    >>> Records(watch={"half": lambda steps: steps / 2}, unit="tokens").unit
    'tokens'
    """

    sinks: Sequence[Sink] | None = None
    watch: Mapping[str, Callable[[int], Any]] = field(default_factory=dict)
    unit: str = "examples"
    flops_per_unit: float | None = None

    def __post_init__(self) -> None:
        takes = "a list of functions of a record"
        check.kind("Records", "sinks", self.sinks, list | tuple, takes, optional=True)
        for sink in self.sinks or ():
            check.function("Records", "sinks", sink, "functions of a record")
        takes = "a mapping from names to functions of a number of steps"
        check.kind("Records", "watch", self.watch, Mapping, takes)
        # A wrong name or function would only fail at the first record, after the step has compiled.
        for name, function in self.watch.items():
            takes = "names, as text, of functions of a number of steps"
            check.text("Records", "watch", name, takes)
            check.function("Records", "watch", function, "functions of a number of steps")
        check.text("Records", "unit", self.unit, "what the weights of the loss count, as text")
        takes = "a number of FLOPs"
        flops = self.flops_per_unit
        check.number("Records", "flops_per_unit", flops, takes, above=0, optional=True)


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


def check_has_values(state: State, folder: Path | None) -> None:
    """Refuse a state that is abstract or used up, where no checkpoint takes its place.

    `folder` is that of the run, in which none was found: a wrong path is a common reason.
    """
    if not isinstance(state.step, jax.ShapeDtypeStruct):
        check_arrays.values("fit", "state", state.step)
        return
    elsewhere = ""
    if folder is not None:
        elsewhere = f", or look for the run elsewhere than in {folder}"
    raise ValueError(
        "The state is abstract, and there is no checkpoint to fill it from. Make it "
        f"with `sl.init(...)` without `abstract`{elsewhere}."
    )


def check_names(
    metrics: Mapping[str, Any], watched: Mapping[str, Any], speed: Mapping[str, Any]
) -> None:
    """Refuse two numbers of one name, of which a record would only have the last.

    A record has the metrics of the step, the numbers that are watched, and the speed. The last is
    empty before the second step, so that this is called for every record.
    """
    # Names are looked at before values: a dict would silently keep the last of two.
    names = {"step", "note", *metrics}
    for name in (*watched, *speed):
        if name in names:
            raise ValueError(
                f"`fit`: two numbers of a record are called `{name}`. A record has the metrics of "
                "the step, what `Records(watch=...)` names, and the speed, "
                f"{listed(speed) or 'none yet'}: call yours something else."
            )
        names.add(name)


def check_options(evaluate: Any, records: Any, about: Any) -> None:
    """Refuse options of `fit` that are of another kind than it takes.

    Whether JSON can hold `about` is not looked at here.
    """
    check.function(
        "fit", "evaluate", evaluate, "a function of a state that measures it", optional=True
    )
    check.kind("fit", "records", records, Records, "a `sl.Records`", optional=True)
    check.kind(
        "fit", "about", about, Mapping, "a mapping from names to what JSON can hold", optional=True
    )


def watched_number(name: str, value: Callable[[int], Any], updates: int) -> float:
    """A number that is watched, such as a learning rate, after so many updates."""
    number = value(updates)
    if np.ndim(number) or not isinstance(number, SupportsFloat):
        raise ValueError(
            f"`Records(watch={{{name!r}: ...}})` takes functions that return a number; this one "
            f"returned {check.shown(number)}."
        )
    return float(number)


def check_measured(measured: Any) -> None:
    """Refuse what `fit(evaluate=...)` returned if it is no numbers by name."""
    takes = "a function that returns numbers by name, such as `{'loss': 1.5}`, or None"
    if measured is None:
        return
    if not isinstance(measured, Mapping):
        raise ValueError(f"`fit(evaluate=...)` is {takes}; it returned {check.shown(measured)}.")
    for name, value in measured.items():
        if not _is_numbers(value):
            raise ValueError(
                f"`fit(evaluate=...)` is {takes}; of `{name}` it returned {check.shown(value)}."
            )


def _is_numbers(value: Any) -> bool:
    """Whether a value is a number, or an array of numbers.

    NumPy would read numbers from texts and dates, and call None a number that is none.
    """
    try:
        array = np.asarray(value)
        if array.dtype.kind in "USMmc":
            return False
        if array.dtype.kind == "O" and any(one is None for one in array.flat):
            return False
        array.astype(float)
    except (TypeError, ValueError):
        return False
    return True
