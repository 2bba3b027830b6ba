"""Checkpoints of a run, by Orbax: the only file that imports it.

A checkpoint is a folder named by its step. Beside the arrays, by path, it holds what they are
(shape, dtype, names and a digest of the bits of each), the strategy, the place in the data and
whatever the run says of itself. Values are global arrays, so they may be read onto any mesh, stage
of ZeRO or number of processes. A digest does not depend on how an array is sharded; comparing it
after reading finds whatever went wrong between one device's memory and another's.

A save is in the background, and ends where the next one begins:

    save(40)                           save(80)
    |  copy off the devices            |  wait(): 40 complete? else an OSError; delete old ones
    |  -> steps go on                  |  copy off the devices ...
    `- Orbax's threads write 40.tmp -- rename to 40

Every method that writes is called by all processes, in the same order. Process 0 renames and
deletes; an exchange of empty texts, `gather_texts("")`, makes the others wait for it.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from shardlib._lock import TakenError
from shardlib._text import human_bytes
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.layouts._annotate import warn
from shardlib.machine._agreement import gather_texts
from shardlib.step._saved_errors import saved
from shardlib.step._state import State
from shardlib.train._checkpoint_failures import (
    NoRoomError,
    UnreadableError,
    check_shared,
    end_with_the_main_thread,
    is_not_of_orbax,
    reason_of,
)
from shardlib.train._checkpoint_folders import (
    begin_to_delete,
    check_folder,
    clear_unfinished,
    free_bytes,
    kept_no_longer,
    remove_late_writes,
    rename_aside,
)
from shardlib.train._checkpoint_reading import CheckpointReader, Restored
from shardlib.train._contents import arrays_of, check_json, describe, nested, sealed
from shardlib.train._folder import Occupied

# The loggers to which Orbax, and what it is made of, writes.
_LOGGERS = ("absl", "asyncio")
# How often it is looked whether the folder was lost while a save is under way.
_SECONDS_BETWEEN_LOOKS = 0.05


class Checkpoints:
    """The checkpoints of one run, in one folder.

    - `folder`: a path, or that of a bucket, such as `gs://bucket/run/checkpoints`. Several
      processes share it.
    - `keep`, `keep_every`: the newest so many are kept, and every step that `keep_every` divides.
      Others are deleted once a newer one is complete and was waited for, as the next save does.

    `save` returns once the state is copied off its devices, and writes in the background; `wait`,
    `close` and the end of a `with` statement wait for it.

    >>> import jax.numpy as jnp, shardlib as sl, optax, tempfile
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> state = sl.init(lambda: {"w": jnp.ones(8)}, optax.adam(1e-3), strategy)
    >>> with tempfile.TemporaryDirectory() as folder, sl.Checkpoints(folder) as checkpoints:
    ...     checkpoints.save(state)
    ...     checkpoints.wait()
    ...     checkpoints.latest(), checkpoints.restore(state).state.params["w"].sum().item()
    (0, 8.0)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        _occupied: Occupied | None = None,
    ) -> None:
        self._keep = check.whole("Checkpoints", "keep", keep, least=1)
        self._keep_every = check.whole(
            "Checkpoints", "keep_every", keep_every, least=1, optional=True
        )
        check.path("Checkpoints", "folder", folder)
        import orbax.checkpoint as ocp  # a second of loading, which only who saves should pay
        from etils import epath

        self._orbax = ocp
        self._writes = False  # whether this object has saved anything itself
        # The step of a save that was begun, and was not seen to be complete yet.
        self._begun: int | None = None
        if _occupied is None:
            _occupied = Occupied(None)
        self._occupied = _occupied
        # Set by Orbax's thread, once another run has taken the folder.
        self._taken: TakenError | None = None
        self._deleting: list[threading.Thread] = []
        self.folder = epath.Path(folder).expanduser().resolve()
        check_folder(folder, self.folder)
        check_shared(self.folder)
        self._reader = CheckpointReader(self.folder, ocp)
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(is_not_of_orbax)
        self._manager = self._make_manager()

    def _make_manager(self) -> Any:
        """Orbax's own manager of the folder.

        It writes in the background, and deletes nothing itself.
        """
        # `_before_commit` is called by Orbax's thread right before a checkpoint gets its name. Were
        # folders made asynchronously, each of Orbax's threads would wait for one that cannot be
        # made for up to twenty minutes, and the process could not end before.
        background = self._orbax.AsyncOptions(
            post_finalization_callback=self._before_commit, create_directories_asynchronously=False
        )
        # It keeps all: old ones are deleted here.
        options = self._orbax.CheckpointManagerOptions(async_options=background)
        return self._orbax.CheckpointManager(
            self.folder, options=options, item_names=("state", "about")
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
            return
        # Without the commit of a process that lost the folder, Orbax's threads in the others wait
        # for it, and waiting for them here would hang.
        if issubclass(kind, TakenError) and jax.process_count() > 1:
            end_with_the_main_thread()
            return
        with contextlib.suppress(OSError, TakenError):  # what went wrong at first is told
            self._close()

    def latest(self) -> int | None:
        """The step of the newest checkpoint that is complete, or None where there is none."""
        return max(self.steps(), default=None)

    def steps(self) -> tuple[int, ...]:
        """The steps of all complete checkpoints, in order.

        Those put aside, and one that is still being written, are not among them.
        """
        # Orbax lists a folder once. Who only reads it may see that of a run that goes on.
        if not self._writes:
            self._manager.reload()
        steps, begun = set(self._manager.all_steps()), self._begun
        # Orbax counts a step as soon as its save has begun.
        if begun is not None and not self._is_complete(begun):
            steps.discard(begun)
        return tuple(sorted(steps))

    def _is_complete(self, step: int) -> bool:
        """Whether a save that was begun has ended well."""
        return not self._manager.is_saving_in_progress() and self._exists(step)

    def _exists(self, step: int) -> bool:
        """Whether there is a folder of a step's checkpoint, which another run may have deleted."""
        return (self.folder / str(step)).exists()

    def save(
        self, state: State, *, data: Any = None, about: Mapping[str, Any] | None = None
    ) -> None:
        """Copy a state off its devices, and write it while the run goes on.

        `data` is a place in the data, as `Batches.state` gives it, and `about` anything that JSON
        can hold. If the save before this one failed, that is raised here as an `OSError`, once; the
        checkpoint before it is still there.
        """
        check.kind("save", "state", state, State, "the `State` that `sl.init` makes")
        check.kind(
            "save",
            "about",
            about,
            Mapping,
            "a mapping from names to what JSON can hold",
            optional=True,
        )
        check_json(data, about)
        check_arrays.values("save", "state", state.step)
        # Whether the folder is still this run's is agreed on before anything is written to it.
        self._occupied.check_together()
        self.wait()
        # Not before the first save: an object that only reads leaves the folder as it is.
        if not self._writes:
            clear_unfinished(self.folder)
            self._writes = True
        state = saved(state)
        step, arrays = int(state.step), arrays_of(state)
        description = sealed(describe(state, step, arrays, data, about))
        self._check_room(step, sum(leaf.nbytes for leaf in arrays.values()))
        # Orbax does not write arrays without elements.
        written = nested({path: leaf for path, leaf in arrays.items() if leaf.size})
        args = self._orbax.args
        with self._failing(step):
            self._manager.save(
                step,
                args=args.Composite(
                    state=args.PyTreeSave(written), about=args.JsonSave(description)
                ),
                # Orbax's own rules for which steps to save are not asked.
                force=True,
            )
        self._begun = step

    def wait(self) -> None:
        """Wait until the save that was begun is complete, and delete what need not be kept.

        If it could not be completed, an `OSError` says why, and which checkpoint is still there.
        """
        self._wait()
        self._delete_old()

    def _wait(self) -> None:
        """Wait until what was begun is saved, and raise the error that a thread of Orbax ended in.

        A folder that was lost meanwhile is a `TakenError`.
        """
        with self._failing(None):
            # A process that does not commit leaves Orbax's threads waiting for each other, here and
            # in the other processes.
            while jax.process_count() > 1 and self._manager.is_saving_in_progress():
                if self._taken is not None:
                    raise self._taken
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        self._begun = None

    def close(self) -> None:
        """Wait for what was begun, and let go of the folder.

        It is let go of even if the last save failed, which is an `OSError`.
        """
        try:
            self.wait()
        finally:
            self._close()

    def _close(self) -> None:
        """Release Orbax's threads, ours and the loggers' filters, however the last save went."""
        try:
            self._wait()
        finally:
            self._manager.close()
            for thread in self._deleting:
                thread.join()
            for name in _LOGGERS:
                logging.getLogger(name).removeFilter(is_not_of_orbax)

    def _before_commit(self) -> None:
        """Refuse to name a checkpoint in a folder that another run has taken.

        Called in a thread of Orbax's, right before a checkpoint that is written gets its name. The
        error ends that thread; `_wait` finds it in the main one.
        """
        try:
            self._occupied.check()
        except TakenError as error:
            self._taken = error
            raise

    def restore(self, like: State, *, step: int | None = None, release: bool = False) -> Restored:
        """Read the newest good checkpoint, or that of a step, into the layout that `like` has.

        `like` is a state of the same model and optimizer under any strategy, best an abstract one:
        `sl.init(make_model, optimizer, strategy, abstract=True)`. A checkpoint that is damaged, so
        that it cannot be read or its bits are not those that were saved, is put aside under another
        name, with a warning, and the one before it is used. Where files cannot be read for another
        reason, a permission say, that is an `OSError`, and nothing is changed. With `release`, the
        arrays of `like` are deleted from their devices before others are read, once it is seen that
        these fit.
        """
        check.kind("restore", "like", like, State, "the `State` that `sl.init` makes")
        release = check.boolean("restore", "release", release)
        return self._newest_good(
            "restore", step, lambda candidate: self._reader.read(candidate, like, release)
        )

    def restore_model(
        self, like: State, *, step: int | None = None, release: bool = False
    ) -> Restored:
        """Read the model alone: parameters, statistics and random streams, of any optimizer.

        `like` is a state of the same model under any optimizer and strategy; its step, its
        optimizer's state and all else stay as they are. So another run can begin with what this one
        has learned. To compute with the model and not train it, an abstract `like` is enough: then
        `state.model` can be used, and the step and the optimizer's state are abstract still.

        Which parameters are frozen may differ. Where the checkpoint has workers that train apart,
        their mean is read. A place in the data is not given back. Damage, and `release`, are as for
        `restore`.
        """
        check.kind("restore_model", "like", like, State, "the `State` that `sl.init` makes")
        release = check.boolean("restore_model", "release", release)
        return self._newest_good(
            "restore_model",
            step,
            lambda candidate: self._reader.read_model(candidate, like, release),
        )

    def _newest_good(
        self, method: str, step: int | None, read: Callable[[int], Restored]
    ) -> Restored:
        """What `read` makes of the newest checkpoint that is not damaged, or of that of a step.

        `method` is the one that was called, for messages.
        """
        check.whole(method, "step", step, "the step of a checkpoint", least=0, optional=True)
        # What this object is writing is complete before it is read.
        if self._begun is not None:
            self._wait()
        candidates = self._steps_to_read(step)
        failures = []
        # The newest first.
        for candidate in reversed(candidates):
            try:
                restored = read(candidate)
            except UnreadableError as error:
                if not self._exists(candidate):
                    failures.append(f"step {candidate}: it has been deleted meanwhile")
                    continue
                failures.append(f"step {candidate}: {error}")
                if step is None:
                    warn(
                        (
                            f"The checkpoint of step {candidate} in {self.folder} cannot be used: "
                            f"{error}. The one before it is tried; if that is good, this one is "
                            f"put aside as `unreadable-{candidate}`.",
                        ),
                        depth=2,
                    )
                continue
            # Only now that another is known to be good: else nothing is renamed.
            if failures:
                unreadable = [newer for newer in candidates if newer > restored.step]
                self.put_aside(unreadable, "unreadable")
            return restored
        raise ValueError(
            f"No checkpoint in {self.folder} can be used. " + "; ".join(failures) + "."
        )

    def _steps_to_read(self, step: int | None) -> tuple[int, ...]:
        """The steps whose checkpoints may be restored: the one asked for, or all; never none."""
        steps = self.steps()
        if step is None and steps:
            return steps
        if step is not None and step in steps:
            return (step,)
        wanted = ""
        if step is not None:
            wanted = f" of step {step}"
        listed = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"No checkpoint{wanted} in {self.folder}; there are: {listed}.")

    def about(self, step: int | None = None) -> Mapping[str, Any]:
        """What the run said of itself when it saved the newest checkpoint, or that of a step.

        It is the `about` of `save`, read without the arrays. A checkpoint that is missing or cannot
        be read is a `ValueError`.
        """
        check.whole("about", "step", step, "the step of a checkpoint", least=0, optional=True)
        if self._begun is not None:
            self._wait()
        if step is None:
            step = self.latest()
        if step is None:
            raise ValueError(f"No checkpoint in {self.folder}.")
        try:
            return self._reader.content(step)["about"]
        except UnreadableError as error:
            raise ValueError(
                f"The checkpoint of step {step} in {self.folder} cannot be read: {error}."
            ) from error

    def put_aside(self, steps: Iterable[int], name: str) -> None:
        """Rename the checkpoints of these steps to `NAME-STEP`.

        They are kept to be looked at, and no longer counted as checkpoints.
        """
        self._occupied.check_together()
        if jax.process_index() == 0:
            for step in filter(self._exists, steps):
                rename_aside(self.folder, step, name)
        gather_texts("")  # until it is done
        self._manager.reload()

    def _delete_old(self) -> None:
        """Delete the checkpoints that are kept no longer, if this object has saved any itself.

        One that only reads deletes nothing. What cannot be deleted is a warning.
        """
        old = kept_no_longer(self.steps(), self._keep, self._keep_every)
        if not old or not self._writes:
            return
        self._occupied.check_together()
        if jax.process_index() == 0:
            for step in old:
                try:
                    self._deleting.append(begin_to_delete(self.folder, step))
                except OSError as error:
                    warn(
                        (
                            f"The checkpoint of step {step} in {self.folder} could not be deleted: "
                            f"{error}.",
                        )
                    )
        gather_texts("")  # until it is done
        self._manager.reload()

    def _check_room(self, step: int, needed: int) -> None:
        """Refuse a save of so many bytes that the disk has no room for, before half is written.

        Process 0 looks for all, so that each of them raises the same `NoRoomError`.
        """
        shortage = ""
        if jax.process_index() == 0:
            free = free_bytes(self.folder)
            if free is not None and free < needed:
                shortage = f"it takes {human_bytes(needed)}, and {human_bytes(free)} are free"
        shortage = gather_texts(shortage)[0]
        if shortage:
            raise NoRoomError(self._failure(f"The checkpoint of step {step}", shortage))

    def _failure(self, what: str, why: str) -> str:
        """The message of a save that failed, with the step that a run could go on from."""
        latest = self.latest()
        if latest is None:
            remaining = "there is none before it"
        else:
            remaining = f"the last good one is that of step {latest}"
        return f"{what} could not be saved in {self.folder}: {why}; {remaining}."

    @contextlib.contextmanager
    def _failing(self, step: int | None) -> Iterator[None]:
        """Turn whatever a save raises into an `OSError`, and remove what was written of it.

        `step` is None where it is not known which of the saves has failed. A `TakenError` passes
        unchanged: the folder is another run's, and nothing may be removed from it.
        """
        try:
            yield
        except TakenError:
            raise
        except Exception as error:  # of whatever kind: Orbax raises TensorStore's, as they come
            # Several processes end after a failure, and cannot clean up together.
            if jax.process_count() == 1:
                self._clean_up_after_failure()
            what = "A checkpoint"
            if step is not None:
                what = f"The checkpoint of step {step}"
            raise OSError(self._failure(what, reason_of(error))) from error

    def _clean_up_after_failure(self) -> None:
        """Remove what a save that failed has written, so that the run may go on without it.

        Other threads may still write after the first has failed. It waits until nothing new
        appears, for some three seconds at most, because a save of the same step that is tried again
        writes under the same name.
        """
        # The error that is told is the first one, and not that of a thread which fails later.
        with contextlib.suppress(Exception):
            self._manager.wait_until_finished()
        self._occupied.check()
        remove_late_writes(self.folder)
        self._manager.reload()  # which had counted it among the others
        self._begun = None
