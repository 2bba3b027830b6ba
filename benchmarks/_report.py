"""What every benchmark prints: its claim in words, and, with `--json`, one line of JSON last."""

import datetime
import json
import os
import platform
import sys
from typing import Any

import jax


def report(name: str, figures: dict[str, Any], bounds: dict[str, float], as_json: bool) -> None:
    """Print the figures, those that a bound speaks of beside it; as JSON with the versions they were measured with."""
    for key, value in figures.items():
        bound = f"   (at most {bounds[key]})" if key in bounds else ""
        print(f"{key:24} {value:.4g}{bound}" if isinstance(value, float) else f"{key:24} {value}{bound}")
    if as_json:
        machine = {
            "command": " ".join(["python -m", f"benchmarks.{name}", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "jax": jax.__version__,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        }
        print(json.dumps({"benchmark": name, **figures, "bounds": bounds, **machine}))
