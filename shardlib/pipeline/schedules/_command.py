"""`shardlib pipeline`: a schedule played through, as a picture and in numbers; or all of them side
by side.
"""

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardlib._text import table as text_table
from shardlib._user_files import check_can_write
from shardlib.pipeline.schedules._draw import svg, text
from shardlib.pipeline.schedules._published import COSTED, SCHEDULES
from shardlib.pipeline.schedules._simulate import Costs, Timeline, pack, simulate
from shardlib.pipeline.schedules._table import Table

_EPILOG = """\
schedules: {}

Without --schedule all of them are compared. A table of your own has a line for each stage, F0 for
the forward pass of microbatch 0, B0 for its backward pass, W0 for the gradients of weights where
these are apart:

    F0 F1 B0 B1
    F0 B0 F1 B1
"""
# Options of a known schedule, which a table of one's own says itself; and what they are by default.
_DEFAULTS = {"stages": 4, "microbatches": 8, "chunks": 2}
_HEAD = ("schedule", "takes", "bubble", "in ticks", "bubble in ticks", "held at most", "sends")


def add_command(commands: Any) -> None:
    """Add `pipeline` to the commands of a parser."""
    command = commands.add_parser(
        "pipeline",
        help="a pipeline schedule as a picture and in numbers",
        description="Play a pipeline schedule through: its bubble, in theory and as one program, "
        "what each stage holds, and a picture of who does what when.",
        epilog=_EPILOG.format(", ".join(SCHEDULES)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--schedule", choices=SCHEDULES, metavar="NAME", help="one of those below")
    command.add_argument(
        "--table", type=Path, metavar="FILE", help="a schedule of your own, in place of a known one"
    )
    command.add_argument(
        "--paired", action="store_true", help="with --table: a tick has a pass of each kind"
    )
    command.add_argument("--stages", type=int, help="(default: 4)")
    command.add_argument("--microbatches", type=int, help="(default: 8)")
    command.add_argument(
        "--chunks", type=int, help="parts on a stage, of `interleaved` (default: 2)"
    )
    _add_costs(command)
    command.add_argument("--svg", type=Path, metavar="FILE", help="write the picture there")
    # The command line calls `run` of whichever command was chosen.
    command.set_defaults(run=run)


def _add_costs(command: argparse.ArgumentParser) -> None:
    """Add the options for what passes take, in any unit of time."""
    command.add_argument(
        "--forward", type=float, default=1.0, help="time of a stage's forward pass (default: 1)"
    )
    command.add_argument(
        "--backward", type=float, default=1.0, help="time of its input's gradient (default: 1)"
    )
    command.add_argument(
        "--weights", type=float, default=1.0, help="time of its weights' gradients (default: 1)"
    )
    command.add_argument(
        "--send", type=float, default=0.0, help="time to send to the next stage (default: 0)"
    )


def run(arguments: argparse.Namespace) -> int:
    """The command; 2 for a mistake."""
    try:
        if arguments.svg is not None:
            check_can_write("--svg", str(arguments.svg))
        print(_report(arguments))
    except (OSError, ValueError) as error:
        print(f"shardlib pipeline: {error}", file=sys.stderr)
        return 2
    return 0


def _report(arguments: argparse.Namespace) -> str:
    """What the command prints: one schedule with its picture, or a comparison of all."""
    costs = Costs(arguments.forward, arguments.backward, arguments.weights, arguments.send)
    if not any((arguments.forward, arguments.backward, arguments.weights)):
        raise ValueError(
            "--forward, --backward and --weights are all 0: then nothing takes any time."
        )
    _check_options(arguments)
    # Without a schedule to describe, all are compared.
    if arguments.schedule is None and arguments.table is None:
        if arguments.svg is not None:
            raise ValueError("--svg draws one schedule: say which, --schedule NAME.")
        return _comparison(arguments, costs)
    return _description(arguments, costs)


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that would not be used, and fill in the rest.

    That an option was given is only seen while its default is not filled in.
    """
    # A table has its stages, microbatches and parts in it.
    if arguments.table is not None:
        if arguments.schedule is not None:
            raise ValueError("--schedule and --table: give one of them.")
        for name in _DEFAULTS:
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name}: the table says that itself, leave the option out.")
    elif arguments.paired:
        raise ValueError("--paired is for a --table; a named schedule sets this itself.")
    if arguments.chunks is not None and arguments.schedule not in (None, "interleaved"):
        raise ValueError(f"--chunks is for `interleaved`; got --schedule {arguments.schedule}.")
    # Defaults come last, so that what was given can be told from what was not.
    for name, default in _DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)


@dataclass(frozen=True)
class _Named:
    """A schedule by its name: its table, and whether ticks have a forward and a backward pass."""

    name: str
    table: Table
    paired: bool


def _named(name: str, arguments: argparse.Namespace, costs: Costs) -> _Named:
    """A published schedule of the size that the options say."""
    options: dict[str, Any] = {}
    # Most schedules are the same for all costs.
    if name in COSTED:
        options["costs"] = costs
    if name == "interleaved":
        options["chunks"] = arguments.chunks
    schedule: Any = SCHEDULES[name](arguments.stages, arguments.microbatches, **options)
    return _Named(name, schedule.table(), schedule.paired)


def _chosen(arguments: argparse.Namespace, costs: Costs) -> _Named:
    """The schedule that is asked for, out of a file or by its name."""
    if arguments.table is None:
        return _named(arguments.schedule, arguments, costs)
    # A table in a file has no name but that of the file.
    try:
        written = arguments.table.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"`--table {arguments.table}` cannot be read: {error}") from error
    table = Table.parse(written)
    return _Named(str(arguments.table), table, arguments.paired)


def _description(arguments: argparse.Namespace, costs: Costs) -> str:
    """One schedule: its picture in letters, what they mean, and its numbers."""
    schedule = _chosen(arguments, costs)
    table, timeline = schedule.table, simulate(schedule.table, costs)
    # Colours only for a terminal: in a file they would be letters.
    width = shutil.get_terminal_size((100, 24)).columns
    picture = text(timeline, width, colour=sys.stdout.isatty())
    legend = "F forward, B backward"
    if table.splits:
        legend += ", W gradients of weights"
    if table.parts > table.stages:
        legend += "; small letters: further parts of a stage"
    live = ", ".join(f"{held:g}" for held in timeline.live)
    lines = [
        picture,
        "",
        legend,
        "",
        text_table([_HEAD, _row(schedule, timeline)]),
        f"\nmicrobatches' activations that each stage holds at its fullest: {live}",
    ]
    if arguments.svg is not None:
        title = (
            f"{schedule.name}: {table.stages} stages, {table.microbatches} microbatches, bubble "
            f"{timeline.bubble:.1%}"
        )
        arguments.svg.write_text(svg(timeline, title))
        lines.append(f"the picture is in {arguments.svg}")
    return "\n".join(lines)


def _row(schedule: _Named, timeline: Timeline) -> tuple[str, ...]:
    """The numbers of a schedule, in the columns of `_HEAD`."""
    # Two bubbles: of stages that run freely, and of stages in step, as the compiled program has
    # them.
    ticks = pack(timeline.table, schedule.paired)
    count = str(len(ticks.rows))
    if schedule.paired:
        count += " paired"
    return (
        schedule.name,
        f"{timeline.makespan:g}",
        f"{timeline.bubble:.1%}",
        count,
        f"{ticks.bubble(timeline.costs):.1%}",
        f"{max(timeline.live):g}",
        str(timeline.sends),
    )


def _comparison(arguments: argparse.Namespace, costs: Costs) -> str:
    """All schedules of one size in a table, and why some of them are not in it."""
    rows, left_out = [], []
    for name in SCHEDULES:
        # Some take only certain numbers of microbatches.
        try:
            schedule = _named(name, arguments, costs)
        except ValueError as error:
            left_out.append(f"{name}: {error}")
            continue
        rows.append(_row(schedule, simulate(schedule.table, costs)))
    if not rows:
        raise ValueError(left_out[0])
    heading = (
        f"{arguments.stages} stages, {arguments.microbatches} microbatches; see --schedule NAME "
        "for one with a picture\n"
    )
    units = (
        "takes: in the units of --forward; a tick: one pass, or, if paired, one of each kind; "
        "held: in microbatches"
    )
    return "\n".join([heading, text_table([_HEAD, *rows]), "", units, *left_out])
