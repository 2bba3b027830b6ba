"""From parameters to files that other frameworks read: a tensor at a time."""

import json
import struct
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shardlib._progress import Progress
from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.layouts._host import to_device
from shardlib.modeling._flax import is_nnx, take_apart
from shardlib.step._state import State
from shardlib.weights._table import Rule, Table, rules_by_path
from shardlib.weights._tensor_files import DTYPES, INDEX, SINGLE, is_floating

OP = "save"
_UNFINISHED = ".unfinished"
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Tensor(NamedTuple):
    """A tensor that is to be written.

    - `name`, `dtype`, `shape`: as the header has them.
    - `rules`: with the paths of the parameters that it is made of, one unless these are parts.
    - `place`: of the tensor, along the dims that its name counts.
    """

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    rules: tuple[tuple[str, Rule], ...]
    place: tuple[int, ...]

    @property
    def size(self) -> int:
        """How many bytes it takes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


def save(
    folder: str | Path,
    parameters: Any,
    table: Table,
    *,
    dtype: Any = None,
    file_size: int | str = "5GB",
) -> list[Path]:
    """Write parameters as safetensors, under the names and in the forms of a table.

    Args:
        folder: is made if it is not there. One file, or several and an index, are written into it.
        parameters: a state, a Flax NNX model, or a tree of arrays.
        table: which tensors make up which parameters.
        dtype: of the tensors, such as `"bfloat16"`; by default that of the parameters.
        file_size: how large a file is at most, unless it has one tensor.

    Returns:
        The files.
    """
    folder = check.path(OP, "folder", folder, "the path of a folder")
    if jax.process_count() > 1:
        raise ValueError(
            "`save` runs in one process, and this run has several: save a checkpoint, and export "
            "it from a process that has all of its devices."
        )
    takes = 'the bytes of a file: a number, or text such as `"5GB"`'
    most = check.size(OP, "file_size", file_size, takes)
    if isinstance(parameters, State):
        parameters = parameters.weights
    elif is_nnx(parameters):
        parameters = take_apart(parameters)[0].params
    leaves = dict(named_leaves(parameters))
    tensors = _tensors(table, rules_by_path(OP, table, leaves), leaves, dtype)
    groups = _by_file(tensors, most)
    folder.mkdir(parents=True, exist_ok=True)
    names = [SINGLE]
    if len(groups) > 1:
        numbers = range(1, len(groups) + 1)
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in numbers]
        names.append(INDEX)
    unfinished = [folder / (name + _UNFINISHED) for name in names]
    try:
        total = sum(tensor.size for tensor in tensors)
        with Progress("weights", f"writing {folder.name}", total) as progress:
            for file, group in zip(unfinished, groups, strict=False):
                _write(file, group, leaves, table, progress)
        if len(groups) > 1:
            unfinished[-1].write_text(json.dumps(_index(names[:-1], groups), indent=2))
    except BaseException:
        for file in unfinished:
            file.unlink(missing_ok=True)
        raise
    # An older model in the folder is gone before the first file of this one has its name.
    for file in _files_of_models(folder):
        file.unlink()
    files = [folder / name for name in names]
    for file, written in zip(files, unfinished, strict=True):
        written.replace(file)
    return files


def _index(names: Sequence[str], groups: Sequence[Sequence[_Tensor]]) -> dict[str, Any]:
    """What an index says: which file each tensor is in; a file for each group, in their order."""
    total, file_of = 0, {}
    for name, group in zip(names, groups, strict=True):
        for tensor in group:
            total += tensor.size
            file_of[tensor.name] = name
    return {"metadata": {"total_size": total}, "weight_map": file_of}


def _files_of_models(folder: Path) -> list[Path]:
    """The files in a folder that have the names of a model's."""
    single = [file for file in (folder / INDEX, folder / SINGLE) if file.is_file()]
    return [*single, *folder.glob("model-?????-of-?????.safetensors")]


def _tensors(
    table: Table, rules: Mapping[str, Rule], leaves: Mapping[str, Any], dtype: Any
) -> list[_Tensor]:
    """What is to be written, in the order of the rules; parts of a tensor are together."""
    asked = None if dtype is None else check_arrays.dtype(OP, "dtype", dtype)
    makers: dict[str, list[tuple[str, Rule, Mapping[str, int]]]] = defaultdict(list)
    found: dict[str, _Tensor] = {}
    for path, rule in rules.items():
        leaf = leaves[path]
        sizes = table.sizes_of(rule, leaf.shape)
        kind = np.dtype(leaf.dtype) if asked is None else asked
        if kind not in _NAMES:
            raise ValueError(f"`save`: `{path}` is of dtype {kind}, which safetensors has not.")
        if is_floating(kind) != is_floating(leaf.dtype):
            raise ValueError(
                f"`save(dtype={kind.name!r})`: `{path}` is of dtype {leaf.dtype}, and integers and "
                "floating-point numbers are not made into each other."
            )
        for place in rule.places(sizes):
            name = rule.name_at(place)
            makers[name].append((path, rule, sizes))
            shape = rule.tensor_shape(sizes)
            if name in found and (found[name].shape, found[name].dtype) != (shape, kind):
                raise ValueError(f"`save`: two rules give `{name}` different shapes or dtypes.")
            found[name] = _Tensor(name, kind, shape, (), place)
    for name, of in makers.items():
        _check_parts(name, of)
        found[name] = found[name]._replace(rules=tuple((path, rule) for path, rule, _ in of))
    return list(found.values())


def _check_parts(name: str, makers: list[tuple[str, Rule, Mapping[str, int]]]) -> None:
    """Refuse a tensor of which a part is made by no parameter, or by two."""
    stretches = sorted(rule.stretch(sizes) for _, rule, sizes in makers)
    begins = [first for first, _, _ in stretches]
    ends = [end for _, end, _ in stretches]
    totals = {total for _, _, total in stretches}
    if begins != [0, *ends[:-1]] or totals != {ends[-1]}:
        paths = ", ".join(f"`{path}`" for path, _, _ in makers)
        raise ValueError(f"`save`: {paths} do not make up `{name}` part by part.")


def _by_file(tensors: Iterable[_Tensor], most: int) -> list[list[_Tensor]]:
    """Tensors one after the other, as many in a file as it may have."""
    groups: list[list[_Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.size > most:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.size
    return groups


def _write(
    file: Path,
    tensors: list[_Tensor],
    leaves: Mapping[str, Any],
    table: Table,
    progress: Progress,
) -> None:
    """Write a file of some tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        offsets = [end, end + tensor.size]
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": offsets,
        }
        end += tensor.size
    text = json.dumps(header).encode()
    # Numbers begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            opened.write(_numbers(tensor, leaves, table).tobytes())
            progress.advance(tensor.size)


def _numbers(tensor: _Tensor, leaves: Mapping[str, Any], table: Table) -> np.ndarray:
    """A tensor, of the parameters that it is made of."""
    made = np.zeros(tensor.shape, tensor.dtype)
    for path, rule in tensor.rules:
        leaf = leaves[path]
        sizes = table.sizes_of(rule, leaf.shape)
        at = dict(zip(rule.counters, tensor.place, strict=True))
        index = tuple(at.get(dim, slice(0, sizes[dim])) for dim in rule.dims)
        # Counted dims are gone from the part, and the others are in the order of the parameter.
        part = np.asarray(jax.device_get(to_device(leaf)[index]))
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = part.astype(tensor.dtype)
        if tensor.dtype != part.dtype and (np.isfinite(part) & ~np.isfinite(rounded)).any():
            raise ValueError(
                f"`save(dtype={tensor.dtype.name!r})`: `{path}` has numbers up to "
                f"{np.abs(part).max():.4g}, which that cannot hold."
            )
        rule.put(made, sizes, rounded)
    return made
