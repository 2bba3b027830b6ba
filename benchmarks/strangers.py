"""What strangers meet: drawn calls, meshes and rules, flipped bits, kills and stops, against
references of their own.

- `calls`: public names, called with arguments of other kinds, sizes and values than they take.
- `meshes`: models with lookups on one to four axes under drawn rules, against plain JAX on one
  device.
- `flips`: one flipped bit in every kind of file that a run reads, and the run started again.
- `kills`: a run that is killed, or stopped and continued, and started again, against an undisturbed
  one.

Each case runs, or is refused by a message for users. Otherwise it is a `raw_error` (any other
exception), `silent` (a value, a gradient or a file differs from the reference, without an exception
or a warning), an `abort` (of the process) or a `hang`: of these there should be none, and the exit
code says so. Any case can be drawn again from the seed and its number.

On two cores some twelve minutes; `--only meshes --meshes 50` is a taste.

    python -m benchmarks.strangers --json
"""

import argparse
import importlib
import random
import time
from collections.abc import Mapping
from typing import Any

from benchmarks._report import report
from benchmarks._strangers import FAILURES, KINDS, Outcome

COLUMNS = ("drawn", *KINDS)
# How many cases of each part: of `meshes` so many that run, of the others so many that are drawn.
# Each part is a module, `_strangers_PART`, with a function `run(count, seed)` that gives an
# `Outcome`.
PARTS = {"calls": 5000, "meshes": 500, "flips": 300, "kills": 24}


def main() -> None:
    """Draw, run, print, and with `--json` print for machines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    parser.add_argument(
        "--seed", type=int, default=None, help="of all that is drawn; another each time by default"
    )
    parser.add_argument(
        "--only", choices=PARTS, action="append", help="one part; may be given several times"
    )
    for part, count in PARTS.items():
        parser.add_argument(
            f"--{part}",
            type=int,
            default=count,
            metavar="N",
            help=f"cases of `{part}`; {count} by default",
        )
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed

    outcomes: dict[str, Outcome] = {}
    seconds: dict[str, float] = {}
    for part in arguments.only or PARTS:
        start = time.monotonic()
        outcomes[part] = importlib.import_module(f"benchmarks._strangers_{part}").run(
            getattr(arguments, part), seed
        )
        seconds[part] = round(time.monotonic() - start, 1)
    total = Outcome()
    for outcome in outcomes.values():
        total = total + outcome

    print(f"{'':8}" + "".join(f"{column:>12}" for column in COLUMNS))
    for name, outcome in {**outcomes, "total": total}.items():
        print(f"{name:8}" + "".join(f"{getattr(outcome, column):>12}" for column in COLUMNS))
    for failure in total.failures:
        print(failure)
    too_few = "meshes" in outcomes and outcomes["meshes"].ran < arguments.meshes
    if too_few:
        print(f"Of `meshes`, {outcomes['meshes'].ran} ran, and {arguments.meshes} were to.")
    print(f"seed {seed}")
    if arguments.json:
        print()
        report(
            "strangers",
            figures(outcomes, total, seed, seconds),
            dict.fromkeys(FAILURES, 0),
            as_json=True,
        )
    if too_few or not total.good:
        raise SystemExit(1)


def figures(
    outcomes: Mapping[str, Outcome], total: Outcome, seed: int, seconds: Mapping[str, float]
) -> dict[str, Any]:
    """The counts of all parts together, and of each under its own name."""
    made: dict[str, Any] = {column: getattr(total, column) for column in COLUMNS}
    made |= {"seed": seed, "seconds": seconds}
    for part, outcome in outcomes.items():
        made |= {f"{part}_{column}": getattr(outcome, column) for column in COLUMNS}
    return {**made, "failures": list(total.failures)}


if __name__ == "__main__":
    main()
