"""How long a run is and what happens on the way, and what is refused of the arguments of `fit`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardlib.checks import _arguments as check
from shardlib.step._state import State
from shardlib.step._step import Step


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
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "profile":
                pair = (
                    isinstance(value, tuple)
                    and len(value) == 2
                    and all(type(n) is int and n >= 1 for n in value)
                )
                if value is not None and not pair:
                    raise check.refusal(
                        "Loop", "profile", value, "the first step and how many: `profile=(10, 3)`"
                    )
            else:
                most, optional = 2**31 - 1, one.name == "keep_every"  # steps are counted in 32 bits
                value = check.whole("Loop", one.name, value, least=1, most=most, optional=optional)
                check.assign(self, **{one.name: value})


def check_call(step: Any, state: Any, loop: Any) -> None:
    for name, value, kind in (("step", step, Step), ("state", state, State), ("loop", loop, Loop)):
        if not isinstance(value, kind):
            raise ValueError(
                "`fit(step, state, batches, loop)` takes what `train_step` and `init` make and a "
                f"`Loop`; `{name}` is {type(value).__name__}."
            )


def check_names(
    metrics: Mapping[str, Any], watched: Mapping[str, Any], speed: Mapping[str, Any]
) -> None:
    """Refuse two numbers of one name, of which a record would have the last."""
    taken = {"step", "note", *metrics}
    for name in (*watched, *speed):
        if name in taken:
            raise ValueError(
                f"`fit`: two numbers of a record are called `{name}`. A record has the metrics of "
                "the step, what is given by `watch`, and the speed, "
                f"{', '.join(f'`{one}`' for one in speed) or 'none yet'}: call yours something "
                "else."
            )
        taken.add(name)


def check_options(
    evaluate: Any, sinks: Any, watch: Any, unit: Any, flops_per_unit: Any, about: Any
) -> None:
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
    for name, one in (watch or {}).items():
        check.text("fit", "watch", name, "names, as text, of functions of a number of steps")
        check.function("fit", "watch", one, "functions of a number of steps")
    check.text("fit", "unit", unit, "what the weights of the loss count, as text")
    check.number(
        "fit", "flops_per_unit", flops_per_unit, "a number of FLOPs", above=0, optional=True
    )
    check.kind(
        "fit", "about", about, Mapping, "a mapping from names to what JSON can hold", optional=True
    )
