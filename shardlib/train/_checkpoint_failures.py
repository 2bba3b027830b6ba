"""What goes wrong with checkpoints, and how every process comes to know of it.

Failures of reading are of two kinds, since only one of them may cost a checkpoint:

- *damaged*, an `UnreadableError`: the files do not hold what was written. The checkpoint is put
  aside, and the one before it is used.
- *hindered*, an `OSError`: something else is in the way, such as a permission. The checkpoint may
  be good, so nothing is changed, and the run ends.

If a process fails while others go on to a collective, these wait for it for ever. So a step that
may fail in one process ends with an exchange of texts, after which all fail or none.
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

# For the error to be printed, and other threads to finish, before a process is ended.
_SECONDS_TO_END = 5
# How long the line of an error may be, and what is left of the beginning and end of a longer one.
_MOST_LETTERS, _FIRST_LETTERS, _LAST_LETTERS = 400, 150, 250
# Errors of files that are not there as they should be, which is damage.
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
    """A checkpoint that was not begun, on any process, for want of room.

    So the processes may go on together, unlike after other failures of a save.
    """


class UnreadableError(Exception):
    """A checkpoint that is not what was written."""


def end_with_the_main_thread() -> None:
    """See that this process ends, with status 1, soon after its main thread has.

    Otherwise it could stay for twenty minutes: so long threads of Orbax may wait for those of other
    processes, and Python waits for its threads before it ends.
    """
    threading.Thread(target=_end_after_main_thread, name="shardlib-end", daemon=True).start()


def _end_after_main_thread() -> None:
    """Wait for the main thread, and end the process without waiting for any other."""
    threading.main_thread().join()
    time.sleep(_SECONDS_TO_END)
    # `os._exit` writes nothing that is still in a buffer. Nobody may read it any more.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(1)


def check_shared(folder: Any) -> None:
    """Refuse a folder that some process does not see as the first one does.

    Each would hold only its own part of a checkpoint there. Process 0 writes a random text into a
    file, tells the others by the network what it wrote, and they look whether they read the same.
    """
    if jax.process_count() == 1:
        return
    is_first, mark = jax.process_index() == 0, folder / ".seen-by-all"
    random_text = ""
    if is_first:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            mark.write_text(os.urandom(8).hex())
            random_text = mark.read_text()
    written = gather_texts(random_text)[0]
    try:
        seen = bool(written) and mark.read_text() == written
    except OSError:
        seen = False
    blind = _processes_where(not seen)
    # By now every process has looked.
    if is_first:
        mark.unlink(missing_ok=True)
    if blind:
        raise ValueError(
            f"Process {', '.join(map(str, blind))} of {jax.process_count()} does not see in "
            f"{folder} what process 0 wrote there. Several processes save into one folder, on a "
            "file system that they share, by the same name on each."
        )


def _processes_where(condition: bool) -> list[int]:
    """The processes on which a condition holds; every process calls this.

    The result is the same on all of them, so that all raise the same error or none does.
    """
    texts = gather_texts("x" if condition else "")
    return [process for process, text in enumerate(texts) if text]


def is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Whether a record of a log is of something else than Orbax: a filter for loggers.

    Orbax logs whole tracebacks; what there is to say of them is in our errors and warnings.
    """
    return f"{os.sep}orbax{os.sep}" not in record.pathname + record.getMessage()


def in_every_process(read: Callable[[], T]) -> T:
    """What `read` returns, if it does so in every process; otherwise every process fails.

    A process whose `read` was hindered raises its own `OSError`, and the others one that names it.
    If some are damaged and none is hindered, all raise an `UnreadableError`.
    """
    result, failure = None, None
    try:
        result = read()
    except (UnreadableError, OSError) as error:
        failure = error
    kind = ""
    if isinstance(failure, UnreadableError):
        kind = "damaged"
    elif failure is not None:
        kind = "hindered"
    kinds = gather_texts(kind)
    if isinstance(failure, OSError):
        raise failure
    if "hindered" in kinds:  # what may be good is put aside by none
        process = kinds.index("hindered")
        raise OSError(f"Process {process} cannot read a checkpoint, which need not be damaged.")
    if "damaged" in kinds:
        raise failure or UnreadableError(f"process {kinds.index('damaged')} cannot read it")
    return result  # type: ignore[return-value]


def find_hindrance(folder: Any, error: Exception) -> BaseException | None:
    """What stood in the way of reading a checkpoint's files, if it was not what they hold.

    `error` is what a library raised, whose type does not tell. So each file is opened here, and one
    byte of it read: an error other than that of a missing file is returned. Otherwise `error` is,
    if it speaks of memory, open files or a server; None means that the files are damaged.
    """
    failures: list[OSError] = []
    for subfolder, _, names in os.walk(folder, onerror=failures.append):
        for name in names:
            try:
                with Path(subfolder, name).open("rb") as file:
                    # To open a file is not enough: a disk that fails, fails at reading.
                    file.read(1)
            except OSError as failure:
                failures.append(failure)
    for failure in failures:
        # A file that is gone is the checkpoint's fault, and nothing that stood in the way.
        if not isinstance(failure, MISSING):
            return failure
    if isinstance(error, MemoryError) or any(word in str(error) for word in _HINDERED):
        return error
    return None


def of_this_process(positions: list[Any], step: int) -> Any:
    """The place in the data of this process, from those of the processes that saved a checkpoint.

    Another number of processes can only go on where the places were all the same; else a
    `ValueError` says how many are needed.
    """
    if len(positions) == jax.process_count():
        return positions[jax.process_index()]
    if all(position == positions[0] for position in positions):
        return positions[0]
    raise ValueError(
        f"The checkpoint of step {step} was saved by {len(positions)} processes, each at its own "
        f"place in its data, and cannot be given to {jax.process_count()}. Resume with "
        f"{len(positions)} processes, or read data whose place is the same in every process, as "
        "that of `shardlib.data.Sequences` is."
    )


def reason_of(error: BaseException) -> str:
    """What went wrong first, in one line: the error at the end of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text that is not blank, or its type where there is none.

    The middle of a long line is left out: what failed is at its beginning, and why at its end.
    """
    first = type(error).__name__
    for line in str(error).splitlines():
        if line.strip():
            first = line
            break
    if len(first) <= _MOST_LETTERS:
        return first
    return f"{first[:_FIRST_LETTERS]} ... {first[-_LAST_LETTERS:]}"
