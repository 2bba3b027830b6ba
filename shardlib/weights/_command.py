"""`shardlib weights`: what is in files, where two of them differ, and checkpoints of them."""

import argparse
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from shardlib.weights._convert import CHECKPOINTS, Converted, export_weights, import_weights
from shardlib.weights._hub import local_folder
from shardlib.weights._tensor_files import TensorFiles, open_tensors

_EXAMPLE = """\
WHAT is FILE.py:NAME, MODULE:NAME, or FILE.py, which is FILE.py:weights. The name is that of a
function of a folder that returns how to make its model, and the table of its tensors, and perhaps
what `config.json` is to be:

    def weights(folder):
        config = hub.config(folder)
        return lambda: hub.model(config, nnx.Rngs(0)), hub.table(config), hub.description(config)
"""
_MODELS = "models/hub.py"
# Numbers are compared so many at a time.
_PIECE = 2**22


def add_command(commands: argparse._SubParsersAction) -> None:
    """Add `weights` to the commands of a parser."""
    parser = commands.add_parser("weights", help="safetensors files, and checkpoints of them")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser("show", help="list the tensors of a file or a folder")
    show.add_argument("path", help="a safetensors file, or a folder of them")
    show.set_defaults(run=_show)
    diff = actions.add_parser("diff", help="compare the tensors of two files or folders")
    diff.add_argument("path")
    diff.add_argument("other")
    diff.set_defaults(run=_diff)
    _add_conversions(actions)


def _add_conversions(actions: argparse._SubParsersAction) -> None:
    """Add `import` and `export` to the actions."""
    options: dict[str, Any] = {
        "epilog": _EXAMPLE,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    importing = actions.add_parser(
        "import", help="make a checkpoint of a published model", **options
    )
    importing.add_argument("source", help="its folder, or hf:NAME/MODEL of the Hugging Face hub")
    importing.add_argument("folder", help="for the checkpoint, the configuration and the tokenizer")
    importing.set_defaults(run=_import)
    exporting = actions.add_parser("export", help="make safetensors of a checkpoint", **options)
    exporting.add_argument("source", help=f"a folder with `{CHECKPOINTS}` and a configuration")
    exporting.add_argument("folder", help="for the files")
    exporting.add_argument("--dtype", help="of the tensors; by default that of the parameters")
    exporting.add_argument("--step", type=int, help="of the checkpoint; by default the newest")
    exporting.set_defaults(run=_export)
    for parser in (importing, exporting):
        parser.add_argument(
            "--model", metavar="WHAT", default=_MODELS, help=f"by default {_MODELS}, in a clone"
        )


def _import(arguments: argparse.Namespace) -> int:
    """Make a checkpoint of a published model."""
    return _converted(lambda: import_weights(arguments.source, arguments.folder, arguments.model))


def _export(arguments: argparse.Namespace) -> int:
    """Make safetensors of a checkpoint."""
    return _converted(
        lambda: export_weights(
            arguments.source,
            arguments.folder,
            arguments.model,
            dtype=arguments.dtype,
            step=arguments.step,
        )
    )


def _converted(convert: Callable[[], Converted]) -> int:
    """Convert weights, and say what was written; the exit code is 2 for a mistake."""
    try:
        converted = convert()
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"shardlib weights: {error}", file=sys.stderr)
        return 2
    print(f"{converted.numbers:,} parameters of step {converted.step}, in:")
    for file in converted.files:
        print(f"  {file}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    """List names, dtypes and shapes, and how much it is together."""
    try:
        files = open_tensors(local_folder(arguments.path))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    tensors = files.tensors
    width = max((len(name) for name in tensors), default=0)
    for name, tensor in tensors.items():
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        print(f"{name:{width}}  {tensor.dtype.name:14}  {shape}")
    count = sum(tensor.size // tensor.dtype.itemsize for tensor in tensors.values())
    size = sum(tensor.size for tensor in tensors.values())
    print(f"{len(tensors):,} tensors, {count:,} numbers, {size / 1e9:.3f} GB")
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    """Say in which tensors two models differ; the exit code is 1 if they do."""
    try:
        one = open_tensors(local_folder(arguments.path))
        other = open_tensors(local_folder(arguments.other))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    lines = list(differences(one, other))
    print("\n".join(lines) or f"{len(one.tensors):,} tensors, all equal.")
    return 1 if lines else 0


def differences(one: TensorFiles, other: TensorFiles) -> Iterator[str]:
    """A line for each tensor that is not the same in both."""
    for name in sorted({*one.tensors, *other.tensors}):
        mine, theirs = one.tensors.get(name), other.tensors.get(name)
        if mine is None or theirs is None:
            yield f"{name}: only in the {'second' if mine is None else 'first'}"
        elif (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
            yield f"{name}: {mine.dtype} {mine.shape}, and {theirs.dtype} {theirs.shape}"
        else:
            distance = _distance(one.read(name), other.read(name))
            if distance is not None:
                yield f"{name}: differs by {distance:.3g} at most"


def _distance(mine: np.ndarray, theirs: np.ndarray) -> float | None:
    """How far two tensors are apart at most; None if they are the same, bit for bit."""
    mine, theirs = mine.reshape(-1), theirs.reshape(-1)
    worst: float | None = None
    for first in range(0, mine.size, _PIECE):
        a, b = mine[first : first + _PIECE], theirs[first : first + _PIECE]
        if not np.array_equal(a.view(np.uint8), b.view(np.uint8)):
            apart = _apart(a, b)
            worst = apart if worst is None else max(worst, apart)
    return worst


def _apart(a: np.ndarray, b: np.ndarray) -> float:
    """How far numbers are apart at most; what is no number is as far as can be."""
    if a.dtype.kind in "iu":
        # Modulo the size of the dtype, which is exact.
        unsigned = f"u{a.dtype.itemsize}"
        return float((np.maximum(a, b) - np.minimum(a, b)).view(unsigned).max())
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity less infinity, which is no number
        distances = np.abs(a - b)
    apart = np.where(a == b, 0.0, distances).max()
    return float("inf") if np.isnan(apart) else float(apart)
