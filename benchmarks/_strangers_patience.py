"""The patience of runs with marks of others, shortened: `benchmarks.strangers` meets stale ones by
the hundred.
"""

from typing import Any

import shardlib._lock
import shardlib.train._folder

MODULES: tuple[Any, ...] = (shardlib._lock, shardlib.train._folder)


def shorten_patience(beat_seconds: float, dead_seconds: float) -> None:
    """In this process, renew the mark of a run this often, and take one for left behind that was
    not renewed for so long.
    """
    seconds = {"BEAT_SECONDS": beat_seconds, "_DEAD_SECONDS": dead_seconds}
    for name, value in seconds.items():
        modules = [module for module in MODULES if hasattr(module, name)]
        if not modules:
            raise SystemExit(f"No module has {name} any more: shorten what has taken its place.")
        for module in modules:
            setattr(module, name, value)
