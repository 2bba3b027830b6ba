"""`shardlib pipeline`: a schedule played through, as a picture and in numbers; or all of them side
by side.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from shardlib._text import table as text_table
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
        "--paired", action="store_true", help="of such: a forward and a backward pass in a tick"
    )
    command.add_argument("--stages", type=int, help="(default: 4)")
    command.add_argument("--microbatches", type=int, help="(default: 8)")
    command.add_argument(
        "--chunks", type=int, help="parts on a stage, of `interleaved` (default: 2)"
    )
    command.add_argument(
        "--forward", type=float, default=1.0, help="what a stage's forward pass takes (default: 1)"
    )
    command.add_argument(
        "--backward", type=float, default=1.0, help="that of the gradient of what came (default: 1)"
    )
    command.add_argument(
        "--weights", type=float, default=1.0, help="that of the gradients of weights (default: 1)"
    )
    command.add_argument(
        "--send", type=float, default=0.0, help="what sending to the next stage takes (default: 0)"
    )
    command.add_argument("--svg", type=Path, metavar="FILE", help="write the picture there")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """The command; 2 for a mistake."""
    try:
        costs = Costs(arguments.forward, arguments.backward, arguments.weights, arguments.send)
        if not any((arguments.forward, arguments.backward, arguments.weights)):
            raise ValueError(
                "--forward, --backward and --weights are all 0: then nothing takes any time."
            )
        _check_options(arguments)
        if arguments.schedule is None and arguments.table is None:
            if arguments.svg is not None:
                raise ValueError("--svg draws one schedule: say which, --schedule NAME.")
            print(_compared(arguments, costs))
        else:
            print(_shown(arguments, costs))
    except (OSError, ValueError) as error:
        print(f"shardlib pipeline: {error}", file=sys.stderr)
        return 2
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse what would not be used; fill in the rest."""
    if arguments.table is not None:
        if arguments.schedule is not None:
            raise ValueError("--schedule and --table: give one of them.")
        if unused := [
            name
            for name in ("stages", "microbatches", "chunks")
            if getattr(arguments, name) is not None
        ]:
            raise ValueError(f"--{unused[0]}: the table says that itself.")
    elif arguments.paired:
        raise ValueError("--paired is for a --table; the other schedules know.")
    if arguments.chunks is not None and arguments.schedule not in (None, "interleaved"):
        raise ValueError(f"--chunks is for `interleaved`; got --schedule {arguments.schedule}.")
    for name, default in (("stages", 4), ("microbatches", 8), ("chunks", 2)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)


def _made(name: str, arguments: argparse.Namespace, costs: Costs) -> tuple[Table, bool]:
    more: dict[str, Any] = {"costs": costs} if name in COSTED else {}
    if name == "interleaved":
        more["chunks"] = arguments.chunks
    schedule: Any = SCHEDULES[name](arguments.stages, arguments.microbatches, **more)
    return schedule.table(), schedule.paired


def _shown(arguments: argparse.Namespace, costs: Costs) -> str:
    if arguments.table is not None:
        name = str(arguments.table)
        made = Table.parse(arguments.table.read_text())
        paired = arguments.paired
    else:
        name, (made, paired) = arguments.schedule, _made(arguments.schedule, arguments, costs)
    timeline = simulate(made, costs)
    width = shutil.get_terminal_size((100, 24)).columns
    shown = text(timeline, width, colour=sys.stdout.isatty())
    small = "; small letters: further parts of a stage" if made.parts > made.stages else ""
    lines = [
        shown,
        "",
        f"F forward, B backward{', W gradients of weights' if made.splits else ''}{small}",
        "",
    ]
    lines += [text_table([_HEAD, _row(name, timeline, paired)])]
    live = ", ".join(f"{held:g}" for held in timeline.live)
    lines.append(f"\nmicrobatches' activations that each stage holds at its fullest: {live}")
    if arguments.svg is not None:
        title = (
            f"{name}: {made.stages} stages, {made.microbatches} microbatches, bubble "
            f"{timeline.bubble:.1%}"
        )
        arguments.svg.write_text(svg(timeline, title))
        lines.append(f"the picture is in {arguments.svg}")
    return "\n".join(lines)


_HEAD = ("schedule", "takes", "bubble", "in ticks", "bubble in ticks", "held at most", "sends")


def _row(name: str, timeline: Timeline, paired: bool) -> tuple[str, ...]:
    ticks = pack(timeline.table, paired)
    return (
        name,
        f"{timeline.makespan:g}",
        f"{timeline.bubble:.1%}",
        f"{len(ticks.rows)}{' paired' if paired else ''}",
        f"{ticks.bubble(timeline.costs):.1%}",
        f"{max(timeline.live):g}",
        str(timeline.sends),
    )


def _compared(arguments: argparse.Namespace, costs: Costs) -> str:
    rows, left_out = [], []
    for name in SCHEDULES:
        try:
            made, paired = _made(name, arguments, costs)
        except ValueError as error:
            left_out.append(f"{name}: {error}")
            continue
        rows.append(_row(name, simulate(made, costs), paired))
    if not rows:
        raise ValueError(left_out[0])
    said = (
        f"{arguments.stages} stages, {arguments.microbatches} microbatches; see --schedule NAME "
        "for one with a picture\n"
    )
    units = (
        "takes: in the units of --forward; a tick: one part, or where paired, there and back; "
        "held: in microbatches"
    )
    return "\n".join([said, text_table([_HEAD, *rows]), "", units, *left_out])
