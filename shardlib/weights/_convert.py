"""From the files of a published model to a checkpoint of ours, and back.

    Llama-3-8B/                                imported/
      config.json, tokenizer.json, ...  <->      the same
      model-00001-of-00004.safetensors           checkpoints/0/
      ...

A checkpoint is read onto any mesh by each process for itself, from a bucket too. Which model it is,
and where its tensors go, is said by a function of the folder, such as `models/hub.py` has.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from shardlib._tree import named_leaves
from shardlib._user_files import load_module, split_name
from shardlib.collectives._zero import Zero
from shardlib.layouts._rules import AxisRules
from shardlib.modeling._flax import building, take_apart
from shardlib.step._init import init
from shardlib.step._state import State
from shardlib.step._strategy import Strategy
from shardlib.train._checkpoint import Checkpoints
from shardlib.weights._hub import local_folder
from shardlib.weights._load import load
from shardlib.weights._save import save
from shardlib.weights._table import Table

# The function that is looked for in a file where none is named.
DEFAULT_NAME = "weights"
CHECKPOINTS = "checkpoints"
CONFIG = "config.json"
# The files of a model besides its weights, by how their names end.
_BESIDE = (".json", ".txt", ".model", ".jinja")
# What a run has in its folder for itself.
_OF_RUNS = ("run.json", "occupied.json", "failures.json")


class Converted(NamedTuple):
    """What was written.

    - `files`: the folder of the checkpoint, or the files.
    - `numbers`: how many the model has.
    - `step`: of the checkpoint.
    """

    files: list[Any]
    numbers: int
    step: int


def import_weights(source: str, folder: str, model: str) -> Converted:
    """Write the weights of a published model as a checkpoint.

    Args:
        source: the folder of the model, or its name on the Hugging Face hub.
        folder: for the checkpoint, in a folder of its own, and for the model's other files. It may
            be in a bucket.
        model: `FILE.py:NAME`, a function of a folder that returns how to make the model, the table
            of its tensors, and perhaps what `config.json` is to be.
    """
    files = local_folder(source)
    described = _described(files, model)
    with Checkpoints(_checkpoints_in(folder)) as checkpoints:
        if checkpoints.steps():
            raise ValueError(f"`{folder}` has checkpoints already. Name another folder.")
        new = init(described.make_model, None, _strategy(described.make_model))
        state = load(files, new, described.table, release=True)
        checkpoints.save(state, about={"imported": source})
        checkpoints.wait()
        _write(_beside(files) | _own_config(described), checkpoints.folder.parent)
        return Converted([checkpoints.folder], _numbers(state), 0)


def export_weights(
    source: str, folder: str, model: str, *, dtype: Any = None, step: int | None = None
) -> Converted:
    """Write a checkpoint as safetensors, with the other files of the model.

    Args:
        source: the folder that has the checkpoints, in a folder of their own, and a configuration.
            It may be in a bucket.
        folder: for the files.
        model: as for `import_weights`.
        dtype: of the tensors; by default that of the parameters.
        step: of the checkpoint; by default the newest.
    """
    target = local_folder(folder)
    # What is not there would be made by looking into it; of a bucket that is no folder.
    if "://" not in source and not Path(_checkpoints_in(source)).expanduser().is_dir():
        raise ValueError(f"`{source}` has no checkpoints, in a folder `{CHECKPOINTS}`.")
    with Checkpoints(_checkpoints_in(source)) as checkpoints:
        if not checkpoints.steps():
            raise ValueError(f"`{source}` has no checkpoints, in a folder `{CHECKPOINTS}`.")
        beside = _beside(checkpoints.folder.parent)
        described = _described_beside(source, beside, model)
        make_model = described.make_model
        like = init(make_model, None, _strategy(make_model), abstract=True)
        restored = checkpoints.restore_model(like, step=step)
    files = save(target, restored.state, described.table, dtype=dtype)
    _write(beside | _own_config(described), target)
    return Converted(files, _numbers(restored.state), restored.step)


def _checkpoints_in(folder: str) -> str:
    """The folder of checkpoints in that of a model, which may be in a bucket."""
    return f"{folder.rstrip('/')}/{CHECKPOINTS}"


class _Described(NamedTuple):
    """What a function says of the model in a folder.

    - `make_model`: makes a new one.
    - `table`: of its tensors.
    - `config`: what `config.json` is to be; None if it is copied like other files.
    """

    make_model: Callable[[], Any]
    table: Table
    config: Mapping[str, Any] | None = None


def _described_beside(source: str, beside: Mapping[str, bytes], model: str) -> _Described:
    """What the function `model` says of a model by the files beside its checkpoints.

    It reads a folder of this machine, into which files in a bucket are copied first.
    """
    if "://" not in source:
        return _described(Path(source).expanduser(), model)
    with tempfile.TemporaryDirectory() as copied:
        _write(beside, Path(copied))
        return _described(Path(copied), model)


def _described(folder: Path, model: str) -> _Described:
    """What the function `model` says of the model in a folder."""
    try:
        where, name = split_name(model, DEFAULT_NAME)
    except ValueError as error:
        raise ValueError(f"`--model {model}` names no function: {error}") from error
    if where.endswith(".py") and not Path(where).exists():
        raise ValueError(
            f"`--model {model}`: there is no file `{where}`. Run this in a clone, which has "
            "`models/hub.py`, or name a function of your own."
        )
    describe = getattr(load_module(where), name, None)
    if not callable(describe):
        raise ValueError(f"`--model {model}`: `{where}` has no function `{name}`.")
    if not folder.is_dir():
        raise ValueError(f"There is no folder `{folder}`.")
    said: Any = describe(folder)
    if isinstance(said, tuple) and len(said) in (2, 3):
        described = _Described(*said)
        if callable(described.make_model) and isinstance(described.table, Table):
            return described
    raise ValueError(
        f"`--model {model}` is to return a function that makes a model, a `sl.weights.Table`, and "
        "perhaps what `config.json` is to be."
    )


def _strategy(make_model: Callable[[], Any]) -> Strategy:
    """A strategy that divides the parameters over the devices of this process, by size alone."""
    count = jax.local_device_count()
    rules = AxisRules(**dict.fromkeys(_names(make_model))) | AxisRules(batch="data")
    zero = Zero(3, small=0) if count > 1 else 0
    return Strategy(mesh=f"data={count}", rules=rules, zero=zero)


def _names(make_model: Callable[[], Any]) -> set[str]:
    """The names of all dims of a model's parameters."""
    found: set[str] = set()

    def build() -> Any:
        with building():
            parts, names = take_apart(make_model())
        for dims in names.values():
            found.update(name for name in dims or () if isinstance(name, str))
        return parts.params

    jax.eval_shape(build)
    return found


def _numbers(state: State) -> int:
    """How many numbers the parameters of a state have."""
    leaves = [*named_leaves(state.params), *named_leaves(state.frozen)]
    return sum(leaf.size for _, leaf in leaves)


def _beside(folder: Any) -> dict[str, bytes]:
    """The files of a model besides its weights, by name: its configuration and its tokenizer.

    The folder may be in a bucket, a path of `etils.epath`.
    """
    found: dict[str, bytes] = {}
    for file in sorted(folder.iterdir()):
        is_left_out = file.name in _OF_RUNS or file.name.endswith(".index.json")
        if file.suffix in _BESIDE and not is_left_out and file.is_file():
            found[file.name] = file.read_bytes()
    return found


def _own_config(described: _Described) -> dict[str, bytes]:
    """The configuration that a function gives, as a file; nothing where it gives none."""
    if described.config is None:
        return {}
    return {CONFIG: json.dumps(described.config, indent=2).encode()}


def _write(files: Mapping[str, bytes], folder: Any) -> None:
    """Write small files into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
