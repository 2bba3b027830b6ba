"""Checkpoints of a run, by Orbax: the only file that imports it.

A checkpoint is a folder named by its step. Beside the arrays, by path, it holds what they are
(shape, dtype, names and a digest of the bits of each), the strategy, the place in the data and
whatever the run says of itself. Values are global arrays, so they may be read onto any mesh, stage
of ZeRO or number of processes. A digest does not depend on how an array lies; comparing it after
reading finds whatever went wrong between one device's memory and another's.
"""

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardlib._lock import TakenError
from shardlib._text import human_bytes
from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.layouts._annotate import say
from shardlib.machine._agreement import gather_texts
from shardlib.step._errors import from_saved, saved, saved_like
from shardlib.step._state import State
from shardlib.train._checkpoint_failures import (
    MISSING,
    NoRoomError,
    UnreadableError,
    check_shared,
    end_with_the_main_thread,
    find_hindrance,
    first_line,
    in_every_process,
    is_not_of_orbax,
    of_this_process,
    reason_of,
)
from shardlib.train._contents import (
    arrays_of,
    as_leaf,
    at,
    check_leaves,
    describe_leaves,
    digests,
    nested,
    sealed,
    unsealed,
)
from shardlib.train._folder import Occupied

FORMAT = 1
_LOGGERS = ("absl", "asyncio")
# In the names of folders that are no checkpoints yet, or no longer.
_UNFINISHED = ".orbax-checkpoint-tmp"


@dataclass(frozen=True)
class Restored:
    """What a checkpoint gives back.

    That is the state, the place in the data, and what the run said of itself.
    """

    state: State
    step: int
    data: Any
    about: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run, in one folder.

    It keeps the newest `keep`, and every step that `keep_every` divides.

    Older ones are deleted once the next is complete and was waited for, as the next save does.

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
        keep = check.whole("Checkpoints", "keep", keep, least=1)
        keep_every = check.whole("Checkpoints", "keep_every", keep_every, least=1, optional=True)
        check.path("Checkpoints", "folder", folder)
        import orbax.checkpoint as ocp  # a second of loading, which only who saves should pay
        from etils import epath

        self._orbax, self._writes = ocp, False
        self._keep, self._keep_every = keep, keep_every
        self._occupied = Occupied(None) if _occupied is None else _occupied
        self._taken: TakenError | None = None
        self._deleting: list[threading.Thread] = []
        self.folder = epath.Path(folder).expanduser().resolve()
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"`Checkpoints({str(folder)!r})` takes a folder, and that is a file.")
        if "://" not in str(folder) and (odd := sorted(set("*?[]") & set(str(self.folder)))):
            raise ValueError(
                f"`Checkpoints({str(folder)!r})`: what is written under a path with "
                f"{' '.join(odd)} could not be read again, since it would be taken for a pattern. "
                "Choose another name."
            )
        check_shared(self.folder)
        # Called by Orbax's thread right before a checkpoint gets its name. Were folders made
        # asynchronously, each of Orbax's threads would wait for one that cannot be made for up to
        # twenty minutes, and the process could not end before.
        background = ocp.AsyncOptions(
            post_finalization_callback=self._before_commit, create_directories_asynchronously=False
        )
        # It keeps all: old ones are deleted here.
        options = ocp.CheckpointManagerOptions(async_options=background)
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(is_not_of_orbax)
        self._manager = ocp.CheckpointManager(
            self.folder, options=options, item_names=("state", "about")
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
            return
        if issubclass(kind, TakenError) and jax.process_count() > 1:
            end_with_the_main_thread()
            return
        with contextlib.suppress(OSError, TakenError):  # what went wrong at first is told
            self._close()

    def latest(self) -> int | None:
        """The step of the newest checkpoint that is complete, or None where there is none."""
        return self._manager.latest_step()

    def steps(self) -> tuple[int, ...]:
        """The steps of all complete checkpoints, in order."""
        return tuple(sorted(self._manager.all_steps()))

    def save(
        self, state: State, *, data: Any = None, about: Mapping[str, Any] | None = None
    ) -> None:
        """Begin to save: the state is copied off its devices here, and written while the run goes
        on.

        `data` is a place in the data, as `Batches.state` gives it, and `about` anything that JSON
        can hold. If the save before this one failed, says so by an `OSError`, once; that before it
        is still there.
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
        try:
            json.dumps([data, dict(about or {})])
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                "`save(data=..., about=...)` go into checkpoints as JSON, which cannot hold them: "
                f"{error}."
            ) from error
        self._occupied.check_together()
        self.wait()
        if not self._writes:
            self._clear()
            self._writes = True
        state = saved(state)
        step, arrays = int(state.step), arrays_of(state)
        content = {
            "format": FORMAT,
            "step": step,
            "leaves": describe_leaves(state, arrays, digests(arrays)),
            "strategy": {
                one.name: repr(getattr(state.layout.strategy, one.name))
                for one in dataclasses.fields(state.layout.strategy)
            },
            "processes": [json.loads(text) for text in gather_texts(json.dumps(data))],
            "about": dict(about or {}),
        }
        about_it = sealed(content)
        self._check_room(step, sum(leaf.nbytes for leaf in arrays.values()))
        written = nested({path: leaf for path, leaf in arrays.items() if leaf.size})
        args = self._orbax.args
        with self._failing(step):
            self._manager.save(
                step,
                args=args.Composite(state=args.PyTreeSave(written), about=args.JsonSave(about_it)),
                force=True,
            )

    def wait(self) -> None:
        """Wait until what was begun is saved; if it could not be, an `OSError` says why and what is
        still there.
        """
        self._wait()
        self._delete_old()

    def _wait(self) -> None:
        with self._failing(None):
            # A process that does not commit leaves Orbax's threads waiting for each other, here and
            # in the other processes.
            while jax.process_count() > 1 and self._manager.is_saving_in_progress():
                if self._taken is not None:
                    raise self._taken
                time.sleep(0.05)
            self._manager.wait_until_finished()
            self._manager.check_for_errors()

    def close(self) -> None:
        """Wait for what was begun, and let go of the folder."""
        try:
            self.wait()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._wait()
        finally:
            self._manager.close()
            for thread in self._deleting:
                thread.join()
            for name in _LOGGERS:
                logging.getLogger(name).removeFilter(is_not_of_orbax)

    def _before_commit(self) -> None:
        """In a thread of Orbax's, right before a checkpoint that is written is given its name."""
        try:
            self._occupied.check()
        except TakenError as error:
            self._taken = error
            raise

    def restore(self, like: State, *, step: int | None = None, release: bool = False) -> Restored:
        """Read the newest good checkpoint, or that of a step, into the places that `like` has.

        `like` is a state of the same model and optimizer under any strategy, best an abstract one:
        `sl.init(make_model, optimizer, strategy, abstract=True)`. A checkpoint that is damaged, so
        that it cannot be read or its bits are not those that were saved, is put aside under another
        name, with a warning, and the one before it is used. Where files cannot be read for another
        reason, a permission say, that is an `OSError`, and nothing is changed. With `release`, the
        arrays of `like` are deleted from their devices before others are read, once it is seen that
        these fit.
        """
        check.kind("restore", "like", like, State, "the `State` that `sl.init` makes")
        check.whole("restore", "step", step, "the step of a checkpoint", least=0, optional=True)
        release = check.boolean("restore", "release", release)
        steps = self.steps() if step is None else (step,)
        if not steps or (step is not None and step not in self.steps()):
            there = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(
                f"No checkpoint{'' if step is None else f' of step {step}'} in {self.folder}; "
                f"there are: {there}."
            )
        failures = []
        for one in reversed(steps):
            try:
                restored = self._read(one, like, release)
            except UnreadableError as error:
                failures.append(f"step {one}: {error}")
                if step is None:
                    say(
                        (
                            f"The checkpoint of step {one} in {self.folder} cannot be used: "
                            f"{error}. The one before it is tried; if that is good, this one is "
                            f"put aside as `unreadable-{one}`.",
                        )
                    )
                continue
            if failures:
                self.put_aside([one for one in steps if one > restored.step], "unreadable")
            return restored
        raise ValueError(
            f"No checkpoint in {self.folder} can be used. " + "; ".join(failures) + "."
        )

    def about(self, step: int | None = None) -> Mapping[str, Any]:
        """What the run said of itself when it saved the newest checkpoint, or that of a step."""
        check.whole("about", "step", step, "the step of a checkpoint", least=0, optional=True)
        step = self.latest() if step is None else step
        if step is None:
            raise ValueError(f"No checkpoint in {self.folder}.")
        try:
            return self._content(step)["about"]
        except UnreadableError as error:
            raise ValueError(
                f"The checkpoint of step {step} in {self.folder} cannot be read: {error}."
            ) from error

    def _content(self, step: int) -> dict[str, Any]:
        try:
            sealed = json.loads((self.folder / str(step) / "about" / "metadata").read_text())
            content = unsealed(sealed)
        except (*MISSING, ValueError, KeyError, TypeError) as error:
            raise UnreadableError(
                f"what it says of itself is not what was written ({first_line(error)})"
            ) from error
        except OSError as error:
            raise self._hindered(step, error) from error
        if content["format"] != FORMAT:
            raise ValueError(
                f"The checkpoint of step {step} in {self.folder} has format {content['format']}; "
                f"this version of shardlib reads format {FORMAT}. Read it with the version that "
                "wrote it."
            )
        self._check_step(step, content.get("step", step))
        return content

    def _check_step(self, step: int, found: int) -> None:
        if found != step:
            raise ValueError(
                f"The checkpoint in {self.folder / str(step)} is that of step {found}: its folder "
                f"was renamed or copied from `{found}`. Give it its name again, or remove it; "
                "nothing was changed."
            )

    def _hindered(self, step: int, error: BaseException) -> OSError:
        """What is said of a checkpoint that may be good, and that cannot be read as things are."""
        return OSError(
            f"The checkpoint of step {step} in {self.folder} cannot be read: {first_line(error)}. "
            "That need not be damage, so nothing was changed. Let this process read it, or move "
            "the checkpoint elsewhere for the one before it to be used."
        )

    def _read(self, step: int, like: State, release: bool) -> Restored:
        ocp = self._orbax
        content = in_every_process(lambda: self._content(step))
        held, here = like, like
        like = saved_like(
            here, {path: tuple(leaf["shape"]) for path, leaf in content["leaves"].items()}
        )
        wanted = arrays_of(like)
        check_leaves(content["leaves"], describe_leaves(like, wanted, {}), step, str(self.folder))
        wanted = {
            path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for path, x in wanted.items()
        }
        like, here = (
            jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), of)
            for of in (like, here)
        )
        for leaf in jax.tree.leaves(held) if release else ():
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        read = {path: leaf for path, leaf in wanted.items() if leaf.size}
        arguments = {
            path: ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            )
            for path, leaf in read.items()
        }

        def arrays() -> dict[str, Any]:
            handler = ocp.PyTreeCheckpointHandler()
            try:
                tree = handler.restore(
                    self.folder / str(step) / "state",
                    args=ocp.args.PyTreeRestore(restore_args=nested(arguments)),
                )
            except Exception as error:  # of whatever kind
                if hindrance := find_hindrance(self.folder / str(step), error):
                    raise self._hindered(step, hindrance) from error
                raise UnreadableError(
                    f"its arrays cannot be read ({type(error).__name__}: {first_line(error)})"
                ) from error
            finally:
                handler.close()
            return {path: at(tree, path) for path in read}

        given = in_every_process(arrays)
        found = digests(given)
        changed = [
            path for path, digest in found.items() if digest != content["leaves"][path]["digest"]
        ]
        if changed:
            listed = ", ".join(f"`{path}`" for path in changed[:3]) + (
                f" and {len(changed) - 3} more" if changed[3:] else ""
            )
            raise UnreadableError(f"the bits of {listed} are not those that were saved")
        leaves = [as_leaf(leaf, wanted[path], given.get(path)) for path, leaf in named_leaves(like)]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        state = from_saved(state, here)
        self._check_step(step, int(state.step))
        return Restored(state, step, of_this_process(content["processes"], step), content["about"])

    def put_aside(self, steps: Iterable[int], name: str) -> None:
        """Rename the checkpoints of these steps to `NAME-STEP`: they are kept to be looked at, and
        no longer counted.
        """
        self._occupied.check_together()
        if jax.process_index() == 0:
            for step in steps:
                names = (
                    f"{name}-{step}{number}"
                    for number in itertools.chain([""], (f".{n}" for n in itertools.count(2)))
                )
                (self.folder / str(step)).rename(
                    next(to for one in names if not (to := self.folder / one).exists())
                )
        gather_texts("")  # until it is done
        self._manager.reload()

    def _delete_old(self) -> None:
        """Delete the checkpoints that are kept no longer, if this object has saved any itself."""
        steps = self.steps()
        kept = set(steps[-self._keep :])
        if self._keep_every is not None:
            kept |= {step for step in steps if step % self._keep_every == 0}
        old = [step for step in steps if step not in kept]
        if not old or not self._writes:
            return
        self._occupied.check_together()
        if jax.process_index() == 0:
            for step in old:
                # Under this name it is no checkpoint any more, however much of it is deleted when
                # the process ends.
                gone = self.folder / f"{step}{_UNFINISHED}-old"
                try:
                    (self.folder / str(step)).rename(gone)
                except OSError as error:
                    say(
                        (
                            f"The checkpoint of step {step} in {self.folder} could not be deleted: "
                            f"{error}.",
                        )
                    )
                    continue
                thread = threading.Thread(
                    target=shutil.rmtree, args=(gone, True), name="shardlib-delete", daemon=True
                )
                thread.start()
                self._deleting.append(thread)
        gather_texts("")  # until it is done
        self._manager.reload()

    def _clear(self) -> None:
        """Take away what an earlier attempt was writing when it ended."""
        left = self._remove_unfinished() if jax.process_index() == 0 else []
        say(
            tuple(
                f"Left by a save that did not end, in {self.folder}, and could not be deleted: "
                f"{one}."
                for one in left
            )
        )
        gather_texts("")  # until it is done

    def _remove_unfinished(self) -> list[str]:
        """What of it could not be removed, and why."""
        left = []
        for half in self.folder.glob(f"*{_UNFINISHED}*"):
            try:
                if half.is_dir() and not Path(half).is_symlink():
                    shutil.rmtree(half)
                else:
                    half.unlink()
            except OSError as error:
                left.append(f"`{half.name}` ({error})")
        return left

    def _check_room(self, step: int, needed: int) -> None:
        """Refuse to begin what a disk has no room for, rather than to leave half of it there."""
        short = ""
        if jax.process_index() == 0 and "://" not in str(self.folder):
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                short = f"it takes {human_bytes(needed)}, and {human_bytes(free)} are free"
        if short := gather_texts(short)[0]:
            raise NoRoomError(self._failure(f"The checkpoint of step {step}", short))

    def _failure(self, what: str, why: str) -> str:
        latest = self.latest()
        still = (
            "there is none before it"
            if latest is None
            else f"the last good one is that of step {latest}"
        )
        return f"{what} could not be saved in {self.folder}: {why}; {still}."

    @contextlib.contextmanager
    def _failing(self, step: int | None) -> Iterator[None]:
        try:
            yield
        except TakenError:
            raise
        except Exception as error:  # of whatever kind: Orbax raises TensorStore's, as they come
            if jax.process_count() == 1:
                # Threads of Orbax may write on for a while, and fail as this one did. What is left
                # then is nobody's checkpoint.
                with contextlib.suppress(Exception):
                    self._manager.wait_until_finished()
                self._occupied.check()
                for _ in range(4):
                    if not self._remove_unfinished():
                        break
                    time.sleep(0.5)
                self._manager.reload()  # which had counted it among the others
            what = "A checkpoint" if step is None else f"The checkpoint of step {step}"
            raise OSError(self._failure(what, reason_of(error))) from error
