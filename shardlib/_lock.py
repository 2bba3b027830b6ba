"""A file that says who is at work in a place, on one machine or over a shared file system.

Whoever holds a lock beats: the time of its file changes every few seconds. A lock that does not
beat was left by a process that died, and may be taken away. A process that was stopped for long
looks dead too, and goes on later; so a holder asks `Claim.check` before it writes, and is told when
its lock was taken away.
"""

import contextlib
import hashlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

BEAT_SECONDS = 5.0
POLL_SECONDS = 0.2
_READS = 5  # of a lock that a file server does not give at once

Look = Literal["gone", "dead", "stalled", "alive", "unknown"]


class TakenError(RuntimeError):
    """The lock of this process was taken away, so that another may be writing in the same place."""


@dataclass(frozen=True)
class Claim:
    """A lock that this process holds, until it lets go of it or another takes it away."""

    lock: Path
    nonce: str
    content: str
    _taken: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    @property
    def seen_taken(self) -> bool:
        """Whether the lock was seen to be taken away, when this process last beat: costs nothing to
        ask.
        """
        return self._taken.is_set()

    def check(self) -> None:
        """Raise a `TakenError` unless the lock is still held: to be asked right before something is
        written.
        """
        found = self._read()
        if found == self.content:
            return
        self._taken.set()
        if found is None:
            whose = "it was taken away"
        elif holder := _holder(found):
            whose = f"{_name(holder)} holds it now"
        else:
            whose = "it does not say what this process wrote there"
        raise TakenError(
            f"{self.lock} is no longer held by this process: {whose}. A process that gives no sign "
            "of life for long, because it was stopped, its machine was suspended or its file "
            "server did not answer, is taken for dead. This one ends here and writes nothing more, "
            "since another may be at work in the same place."
        )

    def _read(self) -> str | None:
        for attempt in range(_READS):
            try:
                return self.lock.read_text(errors="replace")
            except FileNotFoundError:
                return None
            except OSError:
                if attempt == _READS - 1:
                    raise
                time.sleep(POLL_SECONDS)
        raise AssertionError("unreachable")


@contextlib.contextmanager
def hold(lock: Path) -> Iterator[Claim]:
    """Hold `lock`; `FileExistsError` where another holds it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, hold(Path(folder, "lock")) as claim:
    ...     claim.check()
    ...     Other(Path(folder, "lock")).look(patience=60)
    'unknown'
    """
    nonce = uuid.uuid4().hex[:8]
    claim = Claim(lock, nonce, _sealed({**_this_process(), "nonce": nonce}))
    with lock.open("x") as file:
        try:
            file.write(claim.content)
            file.flush()
        except OSError:  # a full disk: an empty lock would keep others waiting
            lock.unlink(missing_ok=True)
            raise
    stop = threading.Event()
    beating = threading.Thread(target=_beat, args=(claim, stop), name="shardlib-lock", daemon=True)
    beating.start()
    try:
        yield claim
    finally:
        stop.set()
        beating.join()
        with contextlib.suppress(OSError):  # it stops beating all the same
            _take_away(lock, claim.content, None)


class Other:
    """Another who holds a lock, as far as can be told from here."""

    def __init__(self, lock: Path) -> None:
        self.lock, self.nonce, self.name = lock, "", "another process"
        self._content = ""
        self._beat: int | None = None
        self._beats = -1  # seen to change, that is
        self._silent, self._looked = 0.0, time.monotonic()

    def look(self, patience: float) -> Look:
        """How the holder is, as far as can be seen.

        - gone: there is no lock.
        - dead: its process has ended, or it has not beaten for `patience` seconds and may be
          anywhere.
        - stalled: it has not beaten for so long, and its process is there all the same: stopped,
          most likely.
        - alive: it was seen to beat.
        - unknown: none of this yet.
        """
        try:
            # Opening it makes a file server tell the time anew.
            content = self.lock.read_text(errors="replace")
        except FileNotFoundError:
            return "gone"
        except OSError:
            content = ""
        try:
            beat = self.lock.stat().st_mtime_ns
        except FileNotFoundError:
            return "gone"
        holder = _holder(content)
        if holder:
            self.nonce, self.name = str(holder["nonce"]), _name(holder)
        # Only time during which this process was awake counts: a suspended machine stops the holder
        # as well.
        now = time.monotonic()
        self._silent += min(now - self._looked, 5 * POLL_SECONDS)
        self._looked = now
        # The clocks of two machines may differ by more than a beat, so what counts is that the time
        # changes.
        if beat != self._beat or content != self._content:
            self._beat, self._content, self._silent, self._beats = (
                beat,
                content,
                0.0,
                self._beats + 1,
            )
        there = _is_there(holder)
        if there is False:
            return "dead"
        if self._silent > patience:
            return "stalled" if there else "dead"
        return "alive" if self._beats > 0 else "unknown"

    def take_away(self) -> bool:
        """Take the lock away, if it is the one last looked at and has not beaten since; whether it
        was.
        """
        return _take_away(self.lock, self._content, self._beat)


def _take_away(lock: Path, content: str, beat: int | None) -> bool:
    """Take a lock away if it has this content and, where given, has not beaten since.

    Between a look and a plain `unlink` another process may have done the same and made a lock of
    its own, which would be taken away instead. A lock that was renamed can be looked at
    undisturbed, and put back.
    """
    aside = lock.with_name(f"{lock.name}.{uuid.uuid4().hex[:8]}")

    def is_the_one(path: Path) -> bool:
        same = path.read_text(errors="replace") == content
        return same and (beat is None or path.stat().st_mtime_ns == beat)

    try:
        if not is_the_one(lock):
            return False
        lock.rename(aside)
        same = is_the_one(aside)
        if not same and not lock.exists():
            aside.rename(lock)
        else:
            aside.unlink(missing_ok=True)
    except FileNotFoundError:
        return False
    return same


def _beat(claim: Claim, stop: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS):
        try:
            claim.check()
            os.utime(claim.lock)
        except TakenError:
            return
        except OSError:
            continue  # a file server that does not answer now may do so next time


def _sealed(holder: Mapping[str, Any]) -> str:
    return json.dumps({**holder, "digest": _digest(holder)})


def _digest(holder: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(holder), sort_keys=True).encode()).hexdigest()[:16]


def _holder(content: str) -> dict[str, Any]:
    """Who holds a lock with this content: nothing where it is not written yet, or damaged."""
    try:
        holder = json.loads(content)
    except ValueError:
        return {}
    if not isinstance(holder, dict) or holder.pop("digest", None) != _digest(holder):
        return {}
    return holder


def _name(holder: Mapping[str, Any]) -> str:
    return f"process {holder['process']} on {holder['host']}"


def _this_process() -> dict[str, Any]:
    """What tells this process from every other: a number alone means little on another machine or
    in a container.
    """
    return {**_machine(), "process": os.getpid(), "started": _started(os.getpid())}


def _machine() -> dict[str, str]:
    """Where numbers of processes mean the same: one boot of one kernel, and one namespace of its
    processes.
    """
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "namespace": f"{_namespace('pid')} {_namespace('time')}",
    }


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return ""


def _started(process: int) -> str | None:
    """When a process was started, in ticks since the machine was; None where that cannot be seen.
    Numbers are used again.
    """
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return "ended" if state in "ZX" else started  # a zombie keeps its number until its parent looks


def _is_there(holder: Mapping[str, Any]) -> bool | None:
    """Whether the process of a holder is there; None where that cannot be told from here."""
    machine = _machine()
    if not machine["boot"] or any(holder.get(name) != value for name, value in machine.items()):
        return None
    try:
        os.kill(holder["process"], 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    started = _started(holder["process"])
    return None if started is None else started == holder["started"]
