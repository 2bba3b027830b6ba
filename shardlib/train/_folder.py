"""The folder of a run, which one run at a time may write into."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from shardlib._lock import BEAT_SECONDS, POLL_SECONDS, Other, hold
from shardlib._processes import gather_texts

_DEAD_SECONDS = 4 * BEAT_SECONDS  # of no beat: four were missed


@contextlib.contextmanager
def occupied(folder: Path, about: Mapping[str, Any]) -> Iterator[None]:
    """Have the folder to oneself while it lasts, together with the other processes of the run; or refuse, on all of them.

    What there is to say of the run goes into its `run.json`.

    A run that was killed leaves its mark. On its own machine it is seen to be gone at once, and from another one after
    twenty seconds in which it did nothing.
    """
    lock = folder / "occupied.json"
    with contextlib.ExitStack() as held:
        refused = ""
        if jax.process_index() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if not (refused := _enter(lock, held)) and about:
                    beside = folder / "run.json.new"
                    beside.write_text(json.dumps(dict(about), indent=1))
                    beside.replace(folder / "run.json")  # at once, since others may be reading
            except OSError as error:
                refused = f"The folder of the run, {folder}, cannot be written to: {error}."
        if refused := gather_texts(refused)[0]:
            raise ValueError(refused)
        yield


def _enter(lock: Path, held: contextlib.ExitStack) -> str:
    """Hold the lock, or say who does."""
    while True:
        try:
            held.enter_context(hold(lock))
        except FileExistsError:
            if living := _living(lock):
                return (
                    f"A run is under way in {lock.parent}: {living}. Let it end, or give this one another folder. SIGTERM makes "
                    "it save and end."
                )
            lock.unlink(missing_ok=True)
        else:
            return ""


def _living(lock: Path) -> str:
    """Who is seen to hold the lock; no one if the lock goes away, or nothing happens to it for long."""
    other, start, said = Other(lock), time.monotonic(), False
    while (found := other.look(_DEAD_SECONDS)) not in ("gone", "dead"):
        if found == "alive":
            return other.name
        if not said and time.monotonic() - start > 1:
            said = True
            sys.stderr.write(f"shardlib: waiting to see whether {other.name} is still at work in {lock.parent}\n")
        time.sleep(POLL_SECONDS)
    return ""
