"""What `shardlib plan` is asked about a step: its plan, the frontier, or the largest microbatch."""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from shardlib._text import human_bytes
from shardlib._user_files import check_can_write
from shardlib.checks import _arguments as check
from shardlib.layouts._remat_text import remat_code
from shardlib.machine._targets import Target
from shardlib.planning._frontier import frontier
from shardlib.planning._microbatch import largest_microbatch
from shardlib.planning._plan import plan
from shardlib.step._step import Step


def add_questions(command: argparse.ArgumentParser) -> None:
    """Add the options that ask for something else than a plan."""
    questions = command.add_mutually_exclusive_group()
    questions.add_argument(
        "--frontier",
        action="store_true",
        help="instead of a plan: memory against recomputation, for the best choices of remat=",
    )
    questions.add_argument(
        "--largest-microbatch",
        action="store_true",
        help="instead of a plan: how many examples of the batch a device can take at a time",
    )
    command.add_argument(
        "--points", type=int, help="with --frontier: choices between its ends (default: 8)"
    )
    command.add_argument(
        "--compile-all", action="store_true", help="with --frontier: compile all of its choices"
    )
    command.add_argument("--svg", metavar="FILE", help="with --frontier: draw it")
    command.add_argument(
        "--memory",
        help='what the step may take of a device, such as "14GiB" (default: all that it has)',
    )


def check_questions(arguments: argparse.Namespace) -> None:
    """Refuse options that cannot be meant, before a compiler takes minutes."""
    if not arguments.frontier:
        if arguments.svg is not None:
            raise ValueError("`--svg` draws a frontier: add `--frontier`.")
        if arguments.compile_all or arguments.points is not None:
            raise ValueError("`--compile-all` and `--points` are of a frontier: add `--frontier`.")
    if arguments.memory is not None:
        if not (arguments.frontier or arguments.largest_microbatch):
            raise ValueError("`--memory` goes with `--frontier` or `--largest-microbatch`.")
        _check_memory(arguments.memory)
    if arguments.svg is not None:
        check_can_write("--svg", arguments.svg)


def _check_memory(memory: str) -> None:
    """Refuse a size that cannot be read. That nothing fits has another exit code."""
    try:
        check.size("plan", "memory", memory, "a size")
    except ValueError as error:
        raise ValueError(
            f"`--memory {memory}` is no size of at least one byte: write a number and a unit, such "
            'as "14GiB" or "900MB".'
        ) from error


def answer_of(
    arguments: argparse.Namespace, subject: tuple[Any, ...], name: str, cache: Path | None
) -> dict[str, Any]:
    """A report on a step, its state, its batch and maybe an estimate, and whether it fits."""
    target = Target(arguments.target)
    step, state, batch, *rest = subject
    if arguments.frontier:
        return _frontier(arguments, _of_ours(step), state, batch, target, cache)
    if arguments.largest_microbatch:
        memory = arguments.memory
        found = largest_microbatch(_of_ours(step), state, batch, target, memory=memory, cache=cache)
        values = dataclasses.asdict(found) | {"best": dataclasses.asdict(found.best)}
        return _answer(arguments, str(found), values, True)
    estimate = next(iter(rest), None)
    planned = plan(step, state, batch, target, estimate=estimate, name=name, cache=cache)
    return _answer(arguments, str(planned), planned.as_dict(), planned.fits)


def _of_ours(step: Any) -> Step:
    if not isinstance(step, Step):
        raise ValueError(
            "`--frontier` and `--largest-microbatch` are of steps of `sl.train_step`, whose "
            f"strategy they change; got {type(step).__name__}."
        )
    return step


def _frontier(
    arguments: argparse.Namespace,
    step: Step,
    state: Any,
    batch: Any,
    target: Target,
    cache: Path | None,
) -> dict[str, Any]:
    """The frontier, with the choice that fits, as a table and as a picture."""
    points = 8 if arguments.points is None else arguments.points
    options = {"points": points, "compiled": arguments.compile_all}
    found = frontier(step, state, batch, target, cache=cache, **options)
    if arguments.memory is not None:
        most = check.size("plan", "memory", arguments.memory, "a size")
        found = dataclasses.replace(found, usable_bytes=float(most))
    if arguments.svg:
        Path(arguments.svg).write_text(found.svg())
    text = str(found)
    values: dict[str, Any] = {"points": []}
    for point in found.points:
        shown = dataclasses.asdict(point) | {"remat": remat_code(point.remat)}
        values["points"].append(shown)
    try:
        best = found.fitting()
    except ValueError as error:
        return _answer(arguments, f"{text}\n\n{error}", values | {"best": None}, False)
    text += f"\n\n`Strategy(remat={remat_code(best.remat)})` takes {human_bytes(best.total_bytes)}"
    text += f" and computes {best.again_fraction:.1%} again"
    if not best.compiled:
        text += "; it is predicted, and `--compile-all` compiles it"
    return _answer(arguments, f"{text}.", values | {"best": remat_code(best.remat)}, True)


def _answer(
    arguments: argparse.Namespace, text: str, values: dict[str, Any], fits: bool
) -> dict[str, Any]:
    if arguments.json:
        text = json.dumps(values)
    return {"report": text, "fits": fits}
