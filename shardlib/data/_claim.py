"""One process does a piece of work, the others wait: on one machine or over a shared file system.

The lock only saves work. What keeps results whole is that each is made in a folder of its own, and
gets its name by one atomic rename when it is complete.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from shardlib._lock import POLL_SECONDS, Other, hold
from shardlib._progress import log

# So long without a beat: a file server may be slow, and a builder may be in one long call.
_DEAD_SECONDS = 60.0
_WHY = {"dead": "is dead", "stalled": "has given no sign of life for long"}


@contextlib.contextmanager
def claim(lock: Path, what: str) -> Iterator[Path | None]:
    """Hold a lock and be given a folder to work in; or wait for its holder, and be given None.

    The folder is removed afterwards, unless it was renamed. None says that the one who held the
    lock has finished or died: look whether what was wanted is there, or claim again.

    Finish by one atomic rename, and be content to find that another came first. Whoever takes the
    lock away from a process that was only stopped renames its folder first. So that process can
    neither go on writing there nor publish it: it gets a `FileNotFoundError`.

    Args:
        lock: the path of the lock; the folder is next to it.
        what: what its holder is doing, for the message of those who wait.
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
    """Wait until the lock is gone, or take it away from a holder that is dead or does nothing."""
    other, start, announced = Other(lock), time.monotonic(), False
    while True:
        condition = other.look(_DEAD_SECONDS)
        if condition == "gone":
            return
        if condition in ("dead", "stalled"):
            if _take_away(other, _WHY[condition]):
                log("data", f"{other.name}, which held {lock}, {_WHY[condition]}; taking over")
                _discard(lock, other.nonce)
            return
        # Most work is done in a moment, and not worth a word.
        if not announced and time.monotonic() - start > 1:
            announced = True
            log("data", f"waiting for {other.name}, which is {what}")
        time.sleep(POLL_SECONDS)


def _take_away(other: Other, why: str) -> bool:
    """Take a lock away from its holder, which has left it for a reason; whether it was there."""
    try:
        return other.take_away()
    except OSError as error:
        raise ValueError(
            f"{other.name} {why} and has left its lock {other.lock}, which cannot be removed: "
            f"{error.strerror}. Its owner, or that of the folder, may remove it; or use another "
            "cache."
        ) from error


def _discard(lock: Path, nonce: str) -> None:
    """Remove the folder of a process that held the lock.

    It is renamed first, so that nothing that goes on by its name can be published.
    """
    scratch = _scratch(lock, nonce)
    abandoned = scratch.with_suffix(".abandoned")
    if nonce and scratch.exists():
        with contextlib.suppress(OSError):
            scratch.rename(abandoned)
        shutil.rmtree(abandoned, ignore_errors=True)


def _scratch(lock: Path, nonce: str) -> Path:
    """The folder in which the holder of a lock works; `nonce` is drawn anew for each holder."""
    return lock.with_suffix(f".{nonce}.partial")
