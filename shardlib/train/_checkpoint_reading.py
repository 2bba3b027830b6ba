"""Reading one checkpoint back into a state, and proving that it is what was saved.

A checkpoint of step 40 is the folder `40/`, with two parts:

    40/about/metadata   JSON with a checksum: shape, dtype, names and digest of every array, the
                        strategy, each process's place in the data, what the run said of itself
    40/state/           the arrays, by path, as Orbax writes them

Reading goes in the order that loses nothing where something is wrong. First the description is
read and compared with the state that is wanted, which costs little. Only then are arrays that the
caller gives up deleted from their devices and others read in their place. At last the digests of
what was read are compared with the description. A step that reads files is taken by every process
together, since one of them failing while the others wait in a collective would hang the run.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from shardlib._tree import named_leaves
from shardlib.step._saved_errors import from_saved, saved_like
from shardlib.step._saved_model import model_alone, of_model, parameters_of, with_model
from shardlib.step._state import State
from shardlib.train._checkpoint_failures import (
    MISSING,
    UnreadableError,
    find_hindrance,
    first_line,
    in_every_process,
    of_this_process,
)
from shardlib.train._contents import (
    FORMAT,
    arrays_of,
    as_leaf,
    at,
    check_leaves,
    describe_leaves,
    digests,
    nested,
    unsealed,
)

# How many arrays with changed bits an error lists by name.
_MOST_LISTED = 3


@dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` and `restore_model` return.

    - `state`: the state, laid out as the one that was given.
    - `step`: the step of the checkpoint that was read.
    - `data`: the place in the data, for `Batches.restore`; None if none was saved.
    - `about`: what the run said of itself, `save(about=...)`.
    """

    state: State
    step: int
    data: Any
    about: Mapping[str, Any]


@dataclass(frozen=True)
class CheckpointReader:
    """Reads the checkpoints in one folder, and changes nothing there.

    `folder` is a path of `etils.epath`, which may be that of a bucket. `orbax` is the module
    `orbax.checkpoint`, handed in because only one file imports it.
    """

    folder: Any
    orbax: Any

    def content(self, step: int) -> dict[str, Any]:
        """The description of a checkpoint: its leaves, places in the data and `about`.

        Raises an `UnreadableError` where it is damaged, an `OSError` where something else is in the
        way of reading it, and a `ValueError` where it is of another format or step.
        """
        try:
            text = (self.folder / str(step) / "about" / "metadata").read_text()
            content = unsealed(json.loads(text))
        # A file that is missing is damage, unlike one that may not be opened.
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

    def read(self, step: int, like: State, release: bool) -> Restored:
        """Read the checkpoint of a step into the layout of `like`, and verify it.

        With `release`, the arrays of `like` are deleted once the checkpoint is known to fit, so
        that devices need not hold two states. Raises an `UnreadableError` for a damaged checkpoint.
        """
        content = in_every_process(lambda: self.content(step))
        state = self._read_state(step, like, content["leaves"], like if release else None)
        self._check_step(step, int(state.step))
        data = of_this_process(content["processes"], step)
        return Restored(state, step, data, content["about"])

    def read_model(self, step: int, like: State, release: bool) -> Restored:
        """Read only what belongs to the model, and verify it; all else stays as `like` has it.

        With `release`, the parameters of `like` are deleted as by `read`. Raises an
        `UnreadableError` for a damaged checkpoint.
        """
        content = in_every_process(lambda: self.content(step))
        described = of_model(content["leaves"])
        alone = model_alone(like, described)
        model = self._read_state(step, alone, described, parameters_of(like) if release else None)
        # The place in the data is that of another run, perhaps of another number of processes.
        return Restored(with_model(like, model), step, None, content["about"])

    def _read_state(
        self, step: int, like: State, described: Mapping[str, Any], released: Any
    ) -> State:
        """The arrays of a checkpoint that are `described`, in the layout of `like`.

        The arrays of the tree `released` are deleted once it is seen that the checkpoint fits.
        """
        stored_state, wanted = self._layout_to_read(step, like, described)
        abstract_like = jax.tree.map(_abstract, like)
        _delete_arrays(released)
        # Orbax does not write arrays without elements.
        to_read = {path: leaf for path, leaf in wanted.items() if leaf.size}
        arrays_read = in_every_process(lambda: self._read_arrays(step, to_read))
        _check_digests(arrays_read, described)
        leaves = []
        for path, leaf in named_leaves(stored_state):
            leaves.append(as_leaf(leaf, wanted[path], arrays_read.get(path)))
        state = jax.tree.unflatten(jax.tree.structure(stored_state), leaves)
        # Layers in the order of this strategy, and errors for as many workers as there are now.
        return from_saved(state, abstract_like)

    def _layout_to_read(
        self, step: int, like: State, described: Mapping[str, Any]
    ) -> tuple[State, dict[str, jax.ShapeDtypeStruct]]:
        """The abstract state to read a checkpoint into, and its arrays by path, keys as words.

        It refers to no array of `like`, so that these can be freed. Raises a `ValueError` where the
        checkpoint, whose leaves are `described`, is of another model or optimizer.
        """
        shapes = {path: tuple(leaf["shape"]) for path, leaf in described.items()}
        # Errors that an exchange of gradients left over are saved in another form than they have
        # in a state, and may be of another number of workers.
        stored_state = saved_like(like, shapes)
        arrays = arrays_of(stored_state)
        check_leaves(described, describe_leaves(stored_state, arrays, {}), step, str(self.folder))
        wanted = {path: _abstract(array) for path, array in arrays.items()}
        return jax.tree.map(_abstract, stored_state), wanted

    def _read_arrays(self, step: int, to_read: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a checkpoint by path, each with the sharding, shape and dtype asked for.

        Tells damage, an `UnreadableError`, from what is in the way of reading, an `OSError`, by
        opening the files once more: Orbax reports both as errors of many types.
        """
        ocp = self.orbax
        arguments = {}
        for path, leaf in to_read.items():
            arguments[path] = ocp.ArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            )
        handler = ocp.PyTreeCheckpointHandler()
        try:
            tree = handler.restore(
                self.folder / str(step) / "state",
                args=ocp.args.PyTreeRestore(
                    item=nested(to_read), restore_args=nested(arguments), partial_restore=True
                ),
            )
        except Exception as error:  # of whatever kind
            hindrance = find_hindrance(self.folder / str(step), error)
            if hindrance:
                raise self._hindered(step, hindrance) from error
            raise UnreadableError(
                f"its arrays cannot be read ({type(error).__name__}: {first_line(error)})"
            ) from error
        finally:
            handler.close()
        return {path: at(tree, path) for path in to_read}

    def _check_step(self, step: int, saved_step: int) -> None:
        """Refuse a checkpoint whose folder is named by another step than it was saved at.

        Its bits may be right, but the run would go on at the wrong place.
        """
        if saved_step != step:
            raise ValueError(
                f"The checkpoint in {self.folder / str(step)} is that of step {saved_step}: its "
                f"folder was renamed or copied from `{saved_step}`. Give it its name again, or "
                "remove it; nothing was changed."
            )

    def _hindered(self, step: int, error: BaseException) -> OSError:
        """The error for a checkpoint that may be good, and cannot be read as things are.

        `error` is what stood in the way; its first line is quoted.
        """
        return OSError(
            f"The checkpoint of step {step} in {self.folder} cannot be read: {first_line(error)}. "
            "That need not be damage, so nothing was changed. Let this process read it, or move "
            "the checkpoint elsewhere for the one before it to be used."
        )


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and sharding of an array, without its values.

    `array` may be abstract already.
    """
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _delete_arrays(tree: Any) -> None:
    """Delete the arrays of a tree from their devices, whoever else still refers to them.

    Leaves of an abstract state are passed over.
    """
    for leaf in jax.tree.leaves(tree):
        # One array may be two leaves, and is deleted once.
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()


def _check_digests(arrays: Mapping[str, jax.Array], described: Mapping[str, Any]) -> None:
    """Raise an `UnreadableError` if the bits of an array are not those that were saved.

    The digests are computed on the devices that hold the arrays now. That covers every way from
    the memory of one device to that of another: the copy, the disk, the network.
    """
    changed = []
    for path, digest in digests(arrays).items():
        if digest != described[path]["digest"]:
            changed.append(f"`{path}`")
    if not changed:
        return
    listed = ", ".join(changed[:_MOST_LISTED])
    if len(changed) > _MOST_LISTED:
        listed += f" and {len(changed) - _MOST_LISTED} more"
    raise UnreadableError(f"the bits of {listed} are not those that were saved")
