"""The command line: `python -m shardlib plan ...` and `python -m shardlib pipeline ...`."""

import argparse
import sys
from collections.abc import Sequence

from shardlib.pipeline.schedules import _command as pipeline
from shardlib.planning import _command as plan


def parser() -> argparse.ArgumentParser:
    """What it takes."""
    made = argparse.ArgumentParser(prog="python -m shardlib", description="Tools around shardlib.")
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    plan.add_command(commands)
    pipeline.add_command(commands)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; the exit code is 0, or 2 for a mistake, or what the command says."""
    given = list(sys.argv[1:] if argv is None else argv)
    arguments = parser().parse_args(given)
    arguments.given = given
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
