"""What every benchmark prints: its claim in words, and, with `--json`, one line of JSON last."""

import datetime
import json
import os
import platform
import sys
from typing import Any

import jax


def report(
    name: str,
    figures: dict[str, Any],
    bounds: dict[str, float],
    as_json: bool,
    *,
    at_least: dict[str, float] | None = None,
) -> None:
    """Print the figures with their bounds; as JSON with the versions that they were measured with.

    Args:
        name: of the benchmark.
        figures: what it measured, by name.
        bounds: what some of the figures may be at most.
        as_json: print a line of JSON too.
        at_least: what others of the figures must be at least.
    """
    floors = at_least or {}
    for key, value in figures.items():
        bound = f"   (at most {bounds[key]})" if key in bounds else ""
        bound = f"   (at least {floors[key]})" if key in floors else bound
        print(
            f"{key:24} {value:.4g}{bound}"
            if isinstance(value, float)
            else f"{key:24} {value}{bound}"
        )
    if as_json:
        machine = {
            "command": " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        }
        least = {"at_least": floors} if floors else {}
        print(json.dumps({"benchmark": name, **figures, "bounds": bounds, **least, **machine}))
