"""One process does a piece of work, the others wait: on one machine or over a shared file system."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from shardlib._lock import POLL_SECONDS, Other, hold
from shardlib.data._progress import say

_DEAD_SECONDS = 60.0  # of no beat: a file server may be slow, a builder may sit in one long call


@contextlib.contextmanager
def claim(lock: Path, what: str) -> Iterator[Path | None]:
    """Hold `lock` and be given a folder to work in, which is gone afterwards unless renamed; or wait, and be given None.

    None says that the one who held it has finished or died: look whether what was wanted is there, or claim again. The
    lock saves work, it is not what keeps results whole: finish by one atomic rename, and be content to find that another
    came first.
    """
    with contextlib.ExitStack() as held:
        try:
            nonce = held.enter_context(hold(lock))
        except FileExistsError:
            _wait(lock, what)
            yield None
            return
        scratch = _scratch(lock, nonce)
        held.callback(shutil.rmtree, scratch, ignore_errors=True)
        scratch.mkdir()
        yield scratch


def _wait(lock: Path, what: str) -> None:
    """Until the lock is gone, or its holder is dead; then remove it."""
    other, start, said = Other(lock), time.monotonic(), False
    while (found := other.look(_DEAD_SECONDS)) != "gone":
        if found == "dead":
            say(f"{other.name}, which held {lock}, is dead; taking over")
            lock.unlink(missing_ok=True)
            if other.nonce:
                shutil.rmtree(_scratch(lock, other.nonce), ignore_errors=True)
            return
        if not said and time.monotonic() - start > 1:
            said = True
            say(f"waiting for {other.name}, which is {what}")
        time.sleep(POLL_SECONDS)


def _scratch(lock: Path, nonce: str) -> Path:
    return lock.with_suffix(f".{nonce}.partial")
