"""What becomes of the folders of checkpoints besides being written and read: renamed and deleted.

A checkpoint is a folder whose name is a step. A folder under any other name is none, so that one
rename, which a file system does at once or not at all, is enough to take a checkpoint away:

    40/                             a checkpoint
    40.orbax-checkpoint-tmp-17/     one that is being written, or was when its process was killed
    40.orbax-checkpoint-tmp-old/    one that is being deleted
    unreadable-40/, abandoned-40/   one put aside to be looked at

Only process 0 renames and deletes; the others wait until it is done.
"""

import itertools
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from shardlib.layouts._annotate import warn
from shardlib.machine._agreement import gather_texts

# Part of the names of folders that are not checkpoints yet, or no longer. Orbax chose it, and
# passes over such folders.
_UNFINISHED = ".orbax-checkpoint-tmp"
# After a save that failed: how many looks one after another must find nothing of it, how many there
# are at most, and the seconds between two. Beside a busy process, what was written last came 0.05 s
# after the error.
_LOOKS_THAT_FIND_NOTHING, _MOST_LOOKS, _SECONDS_BETWEEN_REMOVALS = 10, 60, 0.05


def check_folder(argument: Any, folder: Any) -> None:
    """Refuse a path under which no checkpoint could be written, or none read again.

    `argument` is the path as the caller wrote it, for the message and to tell a bucket; `folder`
    is the absolute path.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`Checkpoints({str(argument)!r})` takes a folder, and that is a file.")
    if "://" in str(argument):
        return
    wildcards = sorted(set("*?[]") & set(str(folder)))
    if wildcards:
        raise ValueError(
            f"`Checkpoints({str(argument)!r})`: what is written under a path with "
            f"{' '.join(wildcards)} could not be read again, since it would be taken for a "
            "pattern. Choose another name."
        )


def kept_no_longer(steps: Sequence[int], keep: int, keep_every: int | None) -> list[int]:
    """The steps that are neither among the newest `keep` nor divided by `keep_every`.

    >>> kept_no_longer((10, 20, 30, 40), 1, 20)
    [10, 30]
    """
    old: list[int] = []
    # The newest are the last, and left out here.
    for step in steps[:-keep]:
        if keep_every is None or step % keep_every:
            old.append(step)
    return old


def rename_aside(folder: Any, step: int, reason: str) -> None:
    """Rename the checkpoint of a step to `REASON-STEP`, or `REASON-STEP.2` where that is taken."""
    target = folder / f"{reason}-{step}"
    for number in itertools.count(2):
        if not target.exists():
            break
        target = folder / f"{reason}-{step}.{number}"
    (folder / str(step)).rename(target)


def begin_to_delete(folder: Any, step: int) -> threading.Thread:
    """Take a checkpoint away at once, and delete its files in a thread, which is returned.

    Raises an `OSError`, with the checkpoint untouched, where it cannot be renamed.
    """
    # Under this name it is no checkpoint any more, however much of it is deleted when the process
    # ends. The next run removes what is left.
    removed = folder / f"{step}{_UNFINISHED}-old"
    (folder / str(step)).rename(removed)
    # `True` ignores errors: nothing is lost with files that stay.
    thread = threading.Thread(
        target=shutil.rmtree, args=(removed, True), name="shardlib-delete", daemon=True
    )
    thread.start()
    return thread


def clear_unfinished(folder: Any) -> None:
    """Remove what earlier runs were writing or deleting when they ended; all processes call it.

    What cannot be removed is a warning: it is in nobody's way.
    """
    failures = []
    if jax.process_index() == 0:
        failures = _remove_unfinished(folder)
    remarks = []
    for failure in failures:
        remarks.append(
            f"Left by a save that did not end, in {folder}, and could not be deleted: {failure}."
        )
    warn(tuple(remarks))
    gather_texts("")  # until it is done


def _remove_unfinished(folder: Any) -> list[str]:
    """Remove what saves or deletions that did not end left in a folder of checkpoints.

    Returns, in words, what could not be removed and why; an empty list if all is gone.
    """
    failures = []
    for unfinished in folder.glob(f"*{_UNFINISHED}*"):
        try:
            # A link is removed itself, never what it refers to.
            if unfinished.is_dir() and not Path(unfinished).is_symlink():
                shutil.rmtree(unfinished)
            else:
                unfinished.unlink()
        except OSError as error:
            failures.append(f"`{unfinished.name}` ({error})")
    return failures


def remove_late_writes(folder: Any) -> None:
    """Remove what a save that failed has written, and whatever it goes on writing.

    The error comes from the first array that could not be written. Those that TensorStore writes
    meanwhile, in threads that nobody can wait for, make their folders again where these are gone.
    So it looks until nothing has come back for half a second, or gives up after some three; what
    is left then, the next run removes.
    """
    looks_that_found_nothing = 0
    for _ in range(_MOST_LOOKS):
        if list(folder.glob(f"*{_UNFINISHED}*")):
            _remove_unfinished(folder)
            looks_that_found_nothing = 0
        else:
            looks_that_found_nothing += 1
        if looks_that_found_nothing == _LOOKS_THAT_FIND_NOTHING:
            return
        time.sleep(_SECONDS_BETWEEN_REMOVALS)


def free_bytes(folder: Any) -> int | None:
    """The free bytes of the disk that a folder is on; None for a bucket, which has no limit."""
    if "://" in str(folder):
        return None
    return shutil.disk_usage(folder).free
