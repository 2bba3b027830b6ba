"""One process does a piece of work, the others wait: on one machine or over a shared file
system.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from shardlib._lock import POLL_SECONDS, Other, hold
from shardlib.data._progress import log

_DEAD_SECONDS = 60.0  # of no beat: a file server may be slow, a builder may sit in one long call
_WHY = {"dead": "is dead", "stalled": "has given no sign of life for long"}


@contextlib.contextmanager
def claim(lock: Path, what: str) -> Iterator[Path | None]:
    """Hold `lock` and be given a folder to work in, which is gone afterwards unless renamed; or
    wait, and be given None.

    None says that the one who held it has finished or died: look whether what was wanted is there,
    or claim again. The lock saves work, it is not what keeps results whole: finish by one atomic
    rename, and be content to find that another came first. Whoever takes the lock away from a
    process that was only stopped renames its folder first, so that it can neither go on writing
    there nor publish it: a `FileNotFoundError`.
    """
    with contextlib.ExitStack() as held:
        try:
            nonce = held.enter_context(hold(lock)).nonce
        except FileExistsError:
            _wait(lock, what)
            yield None
            return
        scratch = _scratch(lock, nonce)
        held.callback(shutil.rmtree, scratch, ignore_errors=True)
        scratch.mkdir()
        yield scratch


def _wait(lock: Path, what: str) -> None:
    """Until the lock is gone, or its holder is dead or does nothing; then take it away."""
    other, start, said = Other(lock), time.monotonic(), False
    while (found := other.look(_DEAD_SECONDS)) != "gone":
        if found in ("dead", "stalled"):
            if other.take_away():
                log(f"{other.name}, which held {lock}, {_WHY[found]}; taking over")
                _discard(lock, other.nonce)
            return
        if not said and time.monotonic() - start > 1:
            said = True
            log(f"waiting for {other.name}, which is {what}")
        time.sleep(POLL_SECONDS)


def _discard(lock: Path, nonce: str) -> None:
    """Remove the folder of a process that held the lock. Renamed at first, nothing that goes on by
    its name can be published.
    """
    scratch = _scratch(lock, nonce)
    beside = scratch.with_suffix(".abandoned")
    if nonce and scratch.exists():
        with contextlib.suppress(OSError):
            scratch.rename(beside)
        shutil.rmtree(beside, ignore_errors=True)


def _scratch(lock: Path, nonce: str) -> Path:
    return lock.with_suffix(f".{nonce}.partial")
