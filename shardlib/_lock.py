"""A file that says who is at work in a place, on one machine or over a shared file system.

Whoever holds a lock beats: the time of its file changes every few seconds. A lock that does not
beat was left by a process that died, and may be taken away. A process that was stopped for long
looks dead too, and goes on later; so a holder asks `Claim.check` before it writes, and is told when
its lock was taken away.

    no lock  --hold-->  alive: beats every few seconds
                          |  no beat for long
                        dead, or stalled: `Other.look` tells which, as far as it can be told
                          |  take_away, by one who waits
    no lock

On one machine the process that the lock names can be looked up besides, so a dead one is known at
once.
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
"""How a holder looks to another process, see `Other.look`."""


class TakenError(RuntimeError):
    """The lock of this process was taken away, so that another may be writing in the same place."""


@dataclass(frozen=True)
class Claim:
    """A lock that this process holds, until it lets go of it or another takes it away.

    `content` is what this process wrote into its file, which no other process writes.
    """

    lock: Path
    nonce: str
    content: str
    _taken: threading.Event = field(default_factory=threading.Event, compare=False, repr=False)

    @property
    def seen_taken(self) -> bool:
        """Whether the lock was seen to be taken away, when this process last beat.

        It costs nothing to ask, and may be out of date by a beat.
        """
        return self._taken.is_set()

    def check(self) -> None:
        """Raise a `TakenError` unless the lock is still held.

        To be asked right before something is written. The file is read, so this may also raise the
        error of a file server that does not answer.
        """
        content = self._read()
        if content == self.content:
            return
        self._taken.set()
        if content is None:
            whose = "it was taken away"
        elif holder := _holder(content):
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
        """The content of the file, or None where there is none.

        A file server that does not give it at once is asked a few times.
        """
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
    """Hold `lock` in a `with` statement; `FileExistsError` where another holds it.

    A thread keeps it beating. At the end the file is removed, unless it was taken away.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, hold(Path(folder, "lock")) as claim:
    ...     claim.check()
    ...     Other(Path(folder, "lock")).look(patience=60)
    'unknown'
    """
    nonce = uuid.uuid4().hex[:8]
    claim = Claim(lock, nonce, _sealed({**_this_process(), "nonce": nonce}))
    # "x" creates the file or fails: of two processes that try, one gets it.
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
    """Another who holds a lock, as far as can be told from here.

    It is looked at again and again. `name` and `nonce` are those of the holder once the lock was
    read: what to call it, and what tells it from other holders.
    """

    def __init__(self, lock: Path) -> None:
        self.lock, self.nonce, self.name = lock, "", "another process"
        self._content = ""
        self._beat: int | None = None
        # How often the time or the content was seen to change, not counting the first look.
        self._beats = -1
        # Seconds since the last change, and when that was looked at last.
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
            content, beat = self._read()
        except FileNotFoundError:
            return "gone"
        holder = _holder(content)
        if holder:
            self.nonce, self.name = str(holder["nonce"]), _name(holder)
        self._note(content, beat)
        exists = _process_exists(holder)
        if exists is False:
            return "dead"
        if self._silent > patience:
            return "stalled" if exists else "dead"
        return "alive" if self._beats > 0 else "unknown"

    def _read(self) -> tuple[str, int]:
        """The content of the lock and the time of its file; `FileNotFoundError` where it is gone.

        The content is empty where the file server does not give it.
        """
        try:
            # Opening it makes a file server tell the time anew.
            content = self.lock.read_text(errors="replace")
        except FileNotFoundError:
            raise
        except OSError:
            content = ""
        return content, self.lock.stat().st_mtime_ns

    def _note(self, content: str, beat: int) -> None:
        """Keep what was read, and for how long nothing of it has changed."""
        # Only time during which this process was awake counts: a suspended machine stops the holder
        # as well.
        now = time.monotonic()
        self._silent += min(now - self._looked, 5 * POLL_SECONDS)
        self._looked = now
        # The clocks of two machines may differ by more than a beat, so what counts is that the time
        # changes.
        if beat != self._beat or content != self._content:
            self._beat, self._content = beat, content
            self._silent = 0.0
            self._beats += 1

    def take_away(self) -> bool:
        """Take the lock away, if it is the one last looked at and has not beaten since.

        Returns whether it was taken away.
        """
        return _take_away(self.lock, self._content, self._beat)


def _take_away(lock: Path, content: str, beat: int | None) -> bool:
    """Take a lock away if it has this content and, where `beat` is given, this time.

    Returns whether it was taken away.

    Between a look and a plain `unlink` another process may have done the same and made a lock of
    its own, which would be taken away instead. A lock that was renamed can be looked at
    undisturbed, and put back.
    """
    aside = lock.with_name(f"{lock.name}.{uuid.uuid4().hex[:8]}")
    try:
        if not _is_lock(lock, content, beat):
            return False
        lock.rename(aside)
        same = _is_lock(aside, content, beat)
        if not same and not lock.exists():
            # It is another's: put it back, unless a third one made a lock meanwhile.
            aside.rename(lock)
        else:
            aside.unlink(missing_ok=True)
    except FileNotFoundError:
        return False
    return same


def _is_lock(path: Path, content: str, beat: int | None) -> bool:
    """Whether a file has this content and, where `beat` is given, this time."""
    if path.read_text(errors="replace") != content:
        return False
    return beat is None or path.stat().st_mtime_ns == beat


def _beat(claim: Claim, stop: threading.Event) -> None:
    """Change the time of a lock every few seconds, until told to stop or the lock is taken away."""
    while not stop.wait(BEAT_SECONDS):
        try:
            claim.check()
            os.utime(claim.lock)
        except TakenError:
            return
        except OSError:
            continue  # a file server that does not answer now may do so next time


def _sealed(holder: Mapping[str, Any]) -> str:
    """The content of a lock: who holds it, with a digest by which damage is noticed."""
    return json.dumps({**holder, "digest": _digest(holder)})


def _digest(holder: Mapping[str, Any]) -> str:
    """A digest of what a lock says about its holder, independent of the order."""
    return hashlib.sha256(json.dumps(dict(holder), sort_keys=True).encode()).hexdigest()[:16]


def _holder(content: str) -> dict[str, Any]:
    """Who holds a lock with this content, as `_this_process` describes it, with a nonce.

    Empty where the content is not written yet, or damaged.
    """
    try:
        holder = json.loads(content)
    except ValueError:
        return {}
    if not isinstance(holder, dict) or holder.pop("digest", None) != _digest(holder):
        return {}
    return holder


def _name(holder: Mapping[str, Any]) -> str:
    """What to call a holder in messages."""
    return f"process {holder['process']} on {holder['host']}"


def _this_process() -> dict[str, Any]:
    """What tells this process from every other.

    A number by itself means little on another machine or in a container, and is used again.
    """
    return {**_machine(), "process": os.getpid(), "started": _started(os.getpid())}


def _machine() -> dict[str, str]:
    """Where numbers of processes mean the same.

    That is within one boot of one kernel and one namespace of its processes.
    """
    return {
        "host": socket.gethostname(),
        "boot": _boot(),
        "namespace": f"{_namespace('pid')} {_namespace('time')}",
    }


def _boot() -> str:
    """A name for this boot of the kernel; empty where there is no Linux to tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    """A name for the namespace of a kind that this process is in; empty where it cannot be told."""
    try:
        return str(Path(f"/proc/self/ns/{kind}").readlink())
    except OSError:
        return ""


def _started(process: int) -> str | None:
    """When a process was started, in ticks since the machine was; None where that cannot be seen.

    Numbers of processes are used again, and this tells such processes apart. It is "ended" for a
    zombie, which keeps its number until its parent looks.
    """
    try:
        # The name before the parenthesis may have spaces.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    if state in "ZX":
        return "ended"
    return started


def _process_exists(holder: Mapping[str, Any]) -> bool | None:
    """Whether the process of a holder exists; None where that cannot be told from here.

    It can be told on the holder's machine, in the same container.
    """
    machine = _machine()
    if not machine["boot"]:
        return None
    if any(holder.get(name) != value for name, value in machine.items()):
        return None
    try:
        os.kill(holder["process"], 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        pass
    started = _started(holder["process"])
    if started is None:
        return None
    return started == holder["started"]
