"""The command line: `python -m shardlib plan ...`, `pipeline ...` and `weights ...`."""

import argparse
import sys
from collections.abc import Sequence

from shardlib._version import __version__
from shardlib.pipeline.schedules import _command as pipeline
from shardlib.planning import _command as plan
from shardlib.weights import _command as weights


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; each command adds its own options to it."""
    main_parser = argparse.ArgumentParser(
        prog="python -m shardlib", description="Tools around shardlib."
    )
    main_parser.add_argument("--version", action="version", version=f"shardlib {__version__}")
    commands = main_parser.add_subparsers(required=True, metavar="COMMAND")
    plan.add_command(commands)
    pipeline.add_command(commands)
    weights.add_command(commands)
    return main_parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of this process.

    The exit code is 0, or 2 for a mistake in it, or what the command says.
    """
    command_line = list(sys.argv[1:] if argv is None else argv)
    if not command_line:
        parser().print_help()
        return 0
    arguments = parser().parse_args(command_line)
    # A command may start itself again in a process of its own.
    arguments.given = command_line
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
