"""What goes wrong with checkpoints: told from what need not be damage, and told to every
process.
"""

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax

from shardlib.machine._agreement import gather_texts

_SECONDS_TO_END = 5
MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
# How libraries say that something else than the files is in the way of reading them.
_HINDERED = (
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "UNAVAILABLE",
    "DEADLINE_EXCEEDED",
    "Too many open files",
)
T = TypeVar("T")


class NoRoomError(OSError):
    """A checkpoint that was not begun, on any process, for want of room."""


class UnreadableError(Exception):
    """A checkpoint that is not what was written."""


def end_with_the_main_thread() -> None:
    """See that this process ends with its error: threads of Orbax may wait twenty minutes for those
    of other processes.
    """

    def end() -> None:
        threading.main_thread().join()
        time.sleep(_SECONDS_TO_END)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)

    threading.Thread(target=end, name="shardlib-end", daemon=True).start()


def check_shared(folder: Any) -> None:
    """Refuse a folder that some process does not see as the first one does: of a checkpoint it
    would hold its part alone.
    """
    if jax.process_count() == 1:
        return
    first, mark = jax.process_index() == 0, folder / ".seen-by-all"
    said = ""
    if first:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(os.urandom(8).hex())
            said = mark.read_text()
    written = gather_texts(said)[0]
    try:
        seen = bool(written) and mark.read_text() == written
    except OSError:
        seen = False
    blind = [number for number, text in enumerate(gather_texts("" if seen else "x")) if text]
    if first:
        mark.unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"Process {', '.join(map(str, blind))} of {jax.process_count()} does not see in "
            f"{folder} what process 0 wrote there. Several processes save into one folder, on a "
            "file system that they share, by the same name on each."
        )


def is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Leaves out what Orbax logs, tracebacks above all: what there is to say of it is in our errors
    and warnings.
    """
    return f"{os.sep}orbax{os.sep}" not in record.pathname + record.getMessage()


def in_every_process(read: Callable[[], T]) -> T:
    """What `read` gives, if it does in every process; else every process fails as one."""
    result, failure = None, None
    try:
        result = read()
    except (UnreadableError, OSError) as error:
        failure = error
    kind = (
        "" if failure is None else "damaged" if isinstance(failure, UnreadableError) else "hindered"
    )
    said = gather_texts(kind)
    if isinstance(failure, OSError):
        raise failure
    if "hindered" in said:  # what may be good is put aside by none
        raise OSError(
            f"Process {said.index('hindered')} cannot read a checkpoint, which need not be damaged."
        )
    if "damaged" in said:
        raise failure or UnreadableError(f"process {said.index('damaged')} cannot read it")
    return result  # type: ignore[return-value]


def find_hindrance(folder: Any, error: Exception) -> BaseException | None:
    """What stood in the way of reading a checkpoint's files, if it was something else than what
    they hold.
    """
    failures: list[OSError] = []
    for place, _, names in os.walk(folder, onerror=failures.append):
        for name in names:
            try:
                with Path(place, name).open("rb") as file:
                    file.read(1)
            except OSError as failure:
                failures.append(failure)
    for failure in failures:
        if not isinstance(failure, MISSING):
            return failure
    if isinstance(error, MemoryError) or any(word in str(error) for word in _HINDERED):
        return error
    return None


def of_this_process(places: list[Any], step: int) -> Any:
    if len(places) == jax.process_count():
        return places[jax.process_index()]
    if all(place == places[0] for place in places):
        return places[0]
    raise ValueError(
        f"The checkpoint of step {step} was saved by {len(places)} processes, each at its own "
        f"place in its data, and cannot be given to {jax.process_count()}. Resume with "
        f"{len(places)} processes, or read data whose place is the same in every process, as that "
        "of `shardlib.data.Sequences` is."
    )


def reason_of(error: BaseException) -> str:
    """What went wrong first, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return line if len(line) <= 400 else f"{line[:150]} ... {line[-250:]}"
