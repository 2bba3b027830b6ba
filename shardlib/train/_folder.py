"""The folder of a run, which one run at a time may write into.

Process 0 holds a lock in it, `occupied.json`, and renews it as long as it lives. A run that finds
the lock of another looks at it until it is clear how that one is:

    alive, or its process is there -> this run is refused
    its process is gone, or no sign of life for `_DEAD_SECONDS` -> the lock is taken away

A run whose lock was taken away, since its machine was suspended for instance, sees that before it
writes the next time, and ends. The folder also holds `failures.json`: how many attempts in a row
ended badly that went on from one checkpoint; and `evaluation_owed.json`, where a run ended before
an evaluation that was due after its last step.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardlib._lock import BEAT_SECONDS, POLL_SECONDS, Claim, Other, TakenError, hold
from shardlib._progress import say
from shardlib.machine._agreement import gather_texts
from shardlib.train._contents import sealed, unsealed

# Sealed by a checksum, since a wrong number would cost a good checkpoint.
_FAILURES = "failures.json"
_OWED = "evaluation_owed.json"
_DEAD_SECONDS = 4 * BEAT_SECONDS  # of no beat: four were missed


@dataclass(frozen=True)
class Occupied:
    """A folder that this run has to itself.

    Process 0 holds it for all; `claim` is None in the others, and in a run without a folder.
    """

    claim: Claim | None

    @property
    def seen_taken(self) -> bool:
        """Whether this process has noticed that the folder was taken away, without looking."""
        return self.claim is not None and self.claim.seen_taken

    def check(self) -> None:
        """Raise a `TakenError` if another run may have the folder.

        Processes other than the first cannot tell, and pass.
        """
        if self.claim is not None:
            self.claim.check()

    def check_together(self) -> None:
        """Raise a `TakenError` in every process if process 0 finds the folder taken.

        All call it before they write something together, so that they end together too.
        """
        failure: Exception | None = None
        try:
            self.check()
        except (TakenError, OSError) as error:
            failure = error
        reason = ""
        if failure is not None:
            reason = str(failure)
        # Every process takes part in this exchange before any of them raises.
        first_reason = gather_texts(reason)[0]
        if failure is not None:
            raise failure
        if first_reason:
            raise TakenError(f"Process 0: {first_reason}")


def count_failures(folder: Path, step: int | None) -> int:
    """How many attempts in a row went on from the checkpoint of this step and ended badly.

    That is to say, in gradients that are not finite. A file of failures that is damaged counts as
    none, with a remark on standard error.
    """
    try:
        failures = unsealed(json.loads((folder / _FAILURES).read_text()))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        say(f"{folder / _FAILURES} cannot be used, and is left out of account: {error}")
        return 0
    # Attempts from another checkpoint say nothing of this one.
    if failures["from"] != step:
        return 0
    return failures["times"]


def add_failure(folder: Path, step: int) -> None:
    """Remember an attempt that went on from this step's checkpoint and ended badly.

    Attempts from the checkpoint of another step are forgotten.
    """
    times = count_failures(folder, step) + 1
    _write_at_once(folder / _FAILURES, json.dumps(sealed({"from": step, "times": times})))


def forget_failures(folder: Path) -> None:
    """Forget attempts that ended badly: the checkpoint that they went on from is put aside."""
    (folder / _FAILURES).unlink(missing_ok=True)


def owe_evaluation(folder: Path, step: int) -> None:
    """Remember that the evaluation that was due after a step was not made."""
    _write_at_once(folder / _OWED, json.dumps(sealed({"step": step})))


def owes_evaluation(folder: Path, step: int) -> bool:
    """Whether an evaluation of the state after a step was due and not made."""
    try:
        return unsealed(json.loads((folder / _OWED).read_text()))["step"] == step
    except (OSError, ValueError, KeyError, TypeError):
        return False  # most often there is no such file


def forget_evaluation(folder: Path) -> None:
    """Forget an evaluation that was owed: it is made."""
    (folder / _OWED).unlink(missing_ok=True)


def _write_at_once(path: Path, text: str) -> None:
    """Write a file so that whoever reads it meanwhile sees the old one or the new, never a part."""
    # Renaming is one step for a file system; writing is not.
    new = path.with_name(f"{path.name}.new")
    with new.open("w") as file:
        file.write(text)
        # Else a machine that loses its power may be left with an empty file of that name.
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


@contextlib.contextmanager
def occupied(folder: Path) -> Iterator[Occupied]:
    """Have a folder to oneself, together with the other processes of the run.

    Where another run has it, all of them raise a `ValueError`.

    A run that was killed leaves its mark. On its own machine it is seen to be gone at once, and
    from another one after twenty seconds in which it did nothing.
    """
    lock = folder / "occupied.json"
    with contextlib.ExitStack() as held:
        refusal, claim = "", None
        # Whatever goes wrong in process 0 becomes a text, so that the others hear of it.
        if jax.process_index() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                claim, refusal = _hold_lock(lock, held)
            except OSError as error:
                refusal = _cannot_be_written(folder, error)
        refusal = gather_texts(refusal)[0]
        if refusal:
            raise ValueError(refusal)
        yield Occupied(claim)


def _cannot_be_written(folder: Path, error: OSError) -> str:
    """The message of a folder in which a run cannot live."""
    return f"The folder of the run, {folder}, cannot be written to: {error}."


def write_about(folder: Path, about: Mapping[str, Any]) -> None:
    """Write what there is to say of a run into its `run.json`; all processes call it.

    A run that is refused is not to change what is said of the one before it, so this comes after
    everything that may be refused.
    """
    refusal = ""
    if jax.process_index() == 0 and about:
        try:
            _write_at_once(folder / "run.json", json.dumps(dict(about), indent=1))
        except OSError as error:
            refusal = _cannot_be_written(folder, error)
    refusal = gather_texts(refusal)[0]
    if refusal:
        raise ValueError(refusal)


def _hold_lock(lock: Path, held: contextlib.ExitStack) -> tuple[Claim | None, str]:
    """Hold the lock until `held` is closed, or say why it cannot be had.

    Returns the claim and an empty text, or None and the reason.
    """
    while True:
        try:
            return held.enter_context(hold(lock)), ""
        except FileExistsError:
            refusal = _wait_for_holder(lock)
            if refusal:
                return None, refusal


def _wait_for_holder(lock: Path) -> str:
    """Look at a lock until it is clear how its holder is, and say why it cannot be had.

    The text is empty once the lock is gone, or was taken away from a holder that is dead. Another
    run may hold it by then, so that the caller tries, and looks, again.
    """
    other, start, announced = Other(lock), time.monotonic(), False
    while True:
        condition = other.look(_DEAD_SECONDS)
        if condition == "gone":
            return ""
        if condition == "alive":
            return (
                f"A run is under way in {lock.parent}: {other.name}. Let it end, or give this one "
                "another folder. SIGTERM makes it save and end."
            )
        if condition == "stalled":
            return _describe_stalled(lock, other)
        if condition == "dead":
            if other.take_away():
                say(f"{other.name} left {lock} behind; it is taken for dead")
            return ""
        # Most are seen to be alive or gone at once; of a longer wait a person wants to know.
        if not announced and time.monotonic() - start > 1:
            announced = True
            say(f"waiting to see whether {other.name} is still at work in {lock.parent}")
        time.sleep(POLL_SECONDS)


def _describe_stalled(lock: Path, other: Other) -> str:
    """The error for a folder whose run does nothing, while its process is there."""
    return (
        f"A run in {lock.parent} has given no sign of life for {_DEAD_SECONDS:.0f} "
        f"seconds, and its process is there: {other.name}, which may be stopped. Let it go "
        "on (`kill -CONT`) or end it (`kill -KILL`), or give this run another folder."
    )
