"""A file that says who is at work in a place, on one machine or over a shared file system.

Who holds a lock beats: its time changes every few seconds. A lock that does not beat was left by one who died, and may be
taken away. One who sat still for long may be taken for dead, so what two must never do at once ends in one atomic rename.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

BEAT_SECONDS = 5.0
POLL_SECONDS = 0.2


@contextlib.contextmanager
def hold(lock: Path) -> Iterator[str]:
    """Hold `lock`, and be given a text that no other holder has; `FileExistsError` where another holds it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, hold(Path(folder, "lock")):
    ...     Other(Path(folder, "lock")).look(patience=60)
    'unknown'
    """
    nonce = uuid.uuid4().hex[:8]
    with lock.open("x") as file:
        json.dump({"host": socket.gethostname(), "process": os.getpid(), "nonce": nonce}, file)
    stop = threading.Event()
    beating = threading.Thread(target=_beat, args=(lock, nonce, stop), name="shardlib-lock", daemon=True)
    beating.start()
    try:
        yield nonce
    finally:
        stop.set()
        beating.join()
        if _holder(lock).get("nonce") == nonce:
            lock.unlink(missing_ok=True)


class Other:
    """Another who holds a lock, as far as can be told from here."""

    def __init__(self, lock: Path) -> None:
        self.lock, self.nonce, self.name = lock, "", "another process"
        self._beat: int | None = None
        self._since = time.monotonic()
        self._beats = -1  # seen to change, that is

    def look(self, patience: float) -> Literal["gone", "dead", "alive", "unknown"]:
        """How it is: dead where its process is no more, or after so many seconds without a beat; alive after a beat."""
        holder = _holder(self.lock)  # opening it is what makes a file server tell the time anew
        try:
            beat = self.lock.stat().st_mtime_ns
        except FileNotFoundError:
            return "gone"
        if holder:
            self.nonce, self.name = str(holder["nonce"]), f"process {holder['process']} on {holder['host']}"
        # The clocks of two machines may differ by more than a beat, so what counts is that the time changes.
        if beat != self._beat:
            self._beat, self._since, self._beats = beat, time.monotonic(), self._beats + 1
        if _is_dead(holder) or time.monotonic() - self._since > patience:
            return "dead"
        return "alive" if self._beats > 0 else "unknown"


def _beat(lock: Path, nonce: str, stop: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS):
        if _holder(lock).get("nonce") != nonce:
            return
        with contextlib.suppress(OSError):
            os.utime(lock)


def _holder(lock: Path) -> dict[str, str | int]:
    # A lock that was just made may not be written yet, or be gone again.
    try:
        holder = json.loads(lock.read_text())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) and {"host", "process", "nonce"} <= holder.keys() else {}


def _is_dead(holder: dict[str, str | int]) -> bool:
    if holder.get("host") != socket.gethostname() or not isinstance(process := holder.get("process"), int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
