"""From the files of a published model to a checkpoint of ours, and back.

    Llama-3-8B/                                imported/
      config.json, tokenizer.json, ...  <->      the same
      model-00001-of-00004.safetensors           checkpoints/0/
      ...

A checkpoint is read onto any mesh by each process for itself, from a bucket too. Which model it is,
and where its tensors go, is said by a function of the folder, such as `models/hub.py` has.
"""

import json
import shutil
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


class Converted(NamedTuple):
    """What was written.

    - `files`: the folder of the checkpoint, or the files.
    - `numbers`: how many the model has.
    - `step`: of the checkpoint.
    """

    files: list[Path]
    numbers: int
    step: int


def import_weights(source: str | Path, folder: Path, model: str) -> Converted:
    """Write the weights of a published model as a checkpoint.

    Args:
        source: the folder of the model, or its name on the Hugging Face hub.
        folder: for the checkpoint, in a folder of its own, and for the model's other files.
        model: `FILE.py:NAME`, a function of a folder that returns how to make the model, the table
            of its tensors, and perhaps what `config.json` is to be.
    """
    source, folder = local_folder(source), folder.expanduser()
    if (folder / CHECKPOINTS).exists():
        raise ValueError(f"`{folder}` has checkpoints already. Name another folder.")
    described = _described(source, model)
    new = init(described.make_model, None, _strategy(described.make_model))
    state = load(source, new, described.table, release=True)
    with Checkpoints(folder / CHECKPOINTS) as checkpoints:
        checkpoints.save(state, about={"imported": source.name})
    _write_beside(source, folder, described.config)
    return Converted([folder / CHECKPOINTS], _numbers(state), 0)


def export_weights(
    source: Path, folder: Path, model: str, *, dtype: Any = None, step: int | None = None
) -> Converted:
    """Write a checkpoint as safetensors, with the other files of the model.

    Args:
        source: the folder that has the checkpoints, in a folder of their own, and a configuration.
        folder: for the files.
        model: as for `import_weights`.
        dtype: of the tensors; by default that of the parameters.
        step: of the checkpoint; by default the newest.
    """
    source, folder = source.expanduser(), folder.expanduser()
    if not (source / CHECKPOINTS).is_dir():
        raise ValueError(f"`{source}` has no folder `{CHECKPOINTS}`, in which a run has its own.")
    described = _described(source, model)
    make_model = described.make_model
    like = init(make_model, None, _strategy(make_model), abstract=True)
    with Checkpoints(source / CHECKPOINTS) as checkpoints:
        restored = checkpoints.restore_model(like, step=step)
    files = save(folder, restored.state, described.table, dtype=dtype)
    _write_beside(source, folder, described.config)
    return Converted(files, _numbers(restored.state), restored.step)


class _Described(NamedTuple):
    """What a function says of the model in a folder.

    - `make_model`: makes a new one.
    - `table`: of its tensors.
    - `config`: what `config.json` is to be; None if it is copied like other files.
    """

    make_model: Callable[[], Any]
    table: Table
    config: Mapping[str, Any] | None = None


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
    if not isinstance(said, tuple) or len(said) not in (2, 3):
        said = (said, None)
    described = _Described(*said)
    if not callable(described.make_model) or not isinstance(described.table, Table):
        raise ValueError(
            f"`--model {model}` is to return a function that makes a model, a "
            "`sl.weights.Table`, and perhaps what `config.json` is to be."
        )
    return described


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


def _write_beside(source: Path, folder: Path, config: Mapping[str, Any] | None) -> None:
    """Copy the files of a model besides its weights, and write its configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        is_index = file.name.endswith(".index.json")
        if file.suffix in _BESIDE and file.is_file() and not is_index:
            shutil.copyfile(file, folder / file.name)
    if config is not None:
        (folder / CONFIG).write_text(json.dumps(config, indent=2))
