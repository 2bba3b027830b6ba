"""The folder of a run, which one run at a time may write into."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardlib._lock import BEAT_SECONDS, POLL_SECONDS, Claim, Other, TakenError, hold
from shardlib.machine._agreement import gather_texts
from shardlib.train._contents import sealed, unsealed

_FAILURES = "failures.json"
_DEAD_SECONDS = 4 * BEAT_SECONDS  # of no beat: four were missed


@dataclass(frozen=True)
class Occupied:
    """A folder that this run has to itself. Process 0 holds it for all; `claim` is None in the
    others.
    """

    claim: Claim | None

    @property
    def seen_taken(self) -> bool:
        """Whether this process has noticed that the folder was taken away, without looking."""
        return self.claim is not None and self.claim.seen_taken

    def check(self) -> None:
        """Raise a `TakenError` if another run may have the folder. Processes other than the first
        cannot tell.
        """
        if self.claim is not None:
            self.claim.check()

    def check_together(self) -> None:
        """The same in every process at once, before they write something together."""
        failure: Exception | None = None
        try:
            self.check()
        except (TakenError, OSError) as error:
            failure = error
        said = gather_texts("" if failure is None else str(failure))[0]
        if failure is not None:
            raise failure
        if said:
            raise TakenError(f"Process 0: {said}")


def count_failures(folder: Path, step: int | None) -> int:
    """How many attempts in a row went on from the checkpoint of this step and ended in gradients
    that are not finite.
    """
    try:
        failures = unsealed(json.loads((folder / _FAILURES).read_text()))
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(
            f"shardlib: {folder / _FAILURES} cannot be used, and is left out of account: {error}\n"
        )
        return 0
    return failures["times"] if failures["from"] == step else 0


def add_failure(folder: Path, step: int) -> None:
    """Remember that an attempt that went on from the checkpoint of this step ended so."""
    times = count_failures(folder, step) + 1
    beside = folder / f"{_FAILURES}.new"
    beside.write_text(json.dumps(sealed({"from": step, "times": times})))
    beside.replace(folder / _FAILURES)


@contextlib.contextmanager
def occupied(folder: Path, about: Mapping[str, Any]) -> Iterator[Occupied]:
    """Have the folder to oneself while it lasts, together with the other processes of the run; or
    refuse, on all of them.

    What there is to say of the run goes into its `run.json`.

    A run that was killed leaves its mark. On its own machine it is seen to be gone at once, and
    from another one after twenty seconds in which it did nothing.
    """
    lock = folder / "occupied.json"
    with contextlib.ExitStack() as held:
        refused, claim = "", None
        if jax.process_index() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                claim, refused = _enter(lock, held)
                if claim is not None and about:
                    beside = folder / "run.json.new"
                    beside.write_text(json.dumps(dict(about), indent=1))
                    beside.replace(folder / "run.json")  # at once, since others may be reading
            except OSError as error:
                refused = f"The folder of the run, {folder}, cannot be written to: {error}."
        if refused := gather_texts(refused)[0]:
            raise ValueError(refused)
        yield Occupied(claim)


def _enter(lock: Path, held: contextlib.ExitStack) -> tuple[Claim | None, str]:
    """Hold the lock, or say why not."""
    while True:
        try:
            return held.enter_context(hold(lock)), ""
        except FileExistsError:
            if refused := _look(lock):
                return None, refused


def _look(lock: Path) -> str:
    """Why the lock cannot be had, if it is held; nothing once it is gone, or was taken away from
    who does nothing.
    """
    other, start, said = Other(lock), time.monotonic(), False
    while (found := other.look(_DEAD_SECONDS)) != "gone":
        if found == "alive":
            return (
                f"A run is under way in {lock.parent}: {other.name}. Let it end, or give this one "
                "another folder. SIGTERM makes it save and end."
            )
        if found == "stalled":
            return (
                f"A run in {lock.parent} has given no sign of life for {_DEAD_SECONDS:.0f} "
                f"seconds, and its process is there: {other.name}, which may be stopped. Let it go "
                "on (`kill -CONT`) or end it (`kill -KILL`), or give this run another folder."
            )
        if found == "dead":
            if other.take_away():
                sys.stderr.write(
                    f"shardlib: {other.name} left {lock} behind; it is taken for dead\n"
                )
            return ""
        if not said and time.monotonic() - start > 1:
            said = True
            sys.stderr.write(
                f"shardlib: waiting to see whether {other.name} is still at work in {lock.parent}\n"
            )
        time.sleep(POLL_SECONDS)
    return ""
