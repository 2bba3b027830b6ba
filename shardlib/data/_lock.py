"""One process does a piece of work, the others wait: on one machine or over a shared file system.

The lock saves work, it is not what keeps results whole: a process may hold a lock that another took for dead. Whoever
uses it must finish by one atomic rename, and be content to find that another came first.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from shardlib.data._progress import say

_BEAT_SECONDS = 5.0
_DEAD_SECONDS = 60.0  # of no beat: a file server may be slow, a builder may sit in one long call
_POLL_SECONDS = 0.2


@contextlib.contextmanager
def claim(lock: Path, what: str) -> Iterator[Path | None]:
    """Hold `lock` and be given a folder to work in, which is gone afterwards unless renamed; or wait, and be given None.

    None says that the one who held it has finished or died: look whether what was wanted is there, or claim again.
    """
    nonce = uuid.uuid4().hex[:8]
    holder = {"host": socket.gethostname(), "process": os.getpid(), "nonce": nonce}
    try:
        with lock.open("x") as file:
            json.dump(holder, file)
    except FileExistsError:
        _wait(lock, what)
        yield None
        return
    scratch = _scratch(lock, nonce)
    stop = threading.Event()
    beating = threading.Thread(target=_beat, args=(lock, nonce, stop), name="shardlib-lock", daemon=True)
    beating.start()
    try:
        scratch.mkdir()
        yield scratch
    finally:
        stop.set()
        beating.join()
        shutil.rmtree(scratch, ignore_errors=True)
        if _holder(lock).get("nonce") == nonce:
            lock.unlink(missing_ok=True)


def _beat(lock: Path, nonce: str, stop: threading.Event) -> None:
    while not stop.wait(_BEAT_SECONDS):
        if _holder(lock).get("nonce") != nonce:
            return
        with contextlib.suppress(OSError):
            os.utime(lock)


def _wait(lock: Path, what: str) -> None:
    """Until the lock is gone, or its holder is dead; then remove it."""
    start = since = time.monotonic()
    seen, said = None, False
    while True:
        holder = _holder(lock)
        try:
            beat = lock.stat().st_mtime_ns
        except FileNotFoundError:
            return
        # The clocks of two machines may differ by more than a beat, so what counts is that the time changes.
        if beat != seen:
            seen, since = beat, time.monotonic()
        silent = time.monotonic() - since
        called = f"process {holder.get('process', '?')} on {holder.get('host', '?')}"
        if _is_dead(holder) or silent > _DEAD_SECONDS:
            say(f"{called}, which held {lock}, is dead; taking over")
            lock.unlink(missing_ok=True)
            if "nonce" in holder:
                shutil.rmtree(_scratch(lock, str(holder["nonce"])), ignore_errors=True)
            return
        if not said and time.monotonic() - start > 1:
            said = True
            say(f"waiting for {called}, which is {what}")
        time.sleep(_POLL_SECONDS)


def _scratch(lock: Path, nonce: str) -> Path:
    return lock.with_suffix(f".{nonce}.partial")


def _holder(lock: Path) -> dict[str, str | int]:
    # A lock that was just made may not be written yet, or be gone again.
    try:
        holder = json.loads(lock.read_text())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


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
