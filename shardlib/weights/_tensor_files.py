"""Reading safetensors files: what is in them, and their tensors without copies.

A file is eight bytes that say how long its header is, the header, which is JSON, and the numbers:

    {"name": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]}, ...}

Files come from anywhere, so that nothing in a header is believed before it was checked.
"""

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from shardlib.checks import _arguments as check

OP = "open_tensors"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# As much as the reference implementation reads.
_LONGEST_HEADER = 100_000_000
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is."""

    file: Path
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int  # the byte of the file at which its numbers begin

    @property
    def size(self) -> int:
        """How many bytes its numbers take."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class TensorFiles:
    """The tensors of one model, in one file or several.

    - `tensors`: where each is, by its name.
    - `contents`: the bytes of each file, which are read from the disk where they are looked at.
    """

    tensors: dict[str, Tensor]
    contents: dict[Path, np.ndarray]

    @property
    def name(self) -> str:
        """What to call the files where people read it: by their folder, or the file if it is one.

        A model's file has the same name in every folder.
        """
        files = list(self.contents)
        if len(files) == 1 and files[0].name != SINGLE:
            return files[0].name
        return files[0].parent.resolve().name if files else "no files"

    def read(self, name: str) -> np.ndarray:
        """A tensor, as a view of its file."""
        tensor = self.tensors[name]
        if not tensor.size:
            return np.zeros(tensor.shape, tensor.dtype)
        end = tensor.begin + tensor.size
        numbers = self.contents[tensor.file][tensor.begin : end]
        return np.ndarray(tensor.shape, tensor.dtype, buffer=numbers)


def open_tensors(path: str | Path) -> TensorFiles:
    """The tensors in a safetensors file, or in a folder with one file or with an index of several.

    >>> import tempfile, shardlib as sl
    >>> table = sl.weights.Table((sl.weights.Rule("w", "kernel", "in -> in"),))
    >>> files = sl.weights.save(tempfile.mkdtemp(), {"kernel": np.ones(6, "f")}, table)
    >>> open_tensors(files[0]).tensors["w"].shape
    (6,)
    """
    checked = check.path(OP, "path", path, "the path of a file or of a folder")
    found: dict[str, Tensor] = {}
    contents: dict[Path, np.ndarray] = {}
    for file in _files(checked):
        # What was checked is what is read, even if another file takes the name meanwhile.
        contents[file] = _content(file)
        for name, tensor in _tensors(file, contents[file]):
            if name in found:
                raise ValueError(f"`{name}` is in {found[name].file.name} and in {file.name}.")
            found[name] = tensor
    return TensorFiles(found, contents)


def is_floating(dtype: Any) -> bool:
    """Whether numbers of a dtype are floating-point, those of 8 bits included."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _files(path: Path) -> list[Path]:
    """The files of a model."""
    if path.is_file():
        return [path]
    index, single = path / INDEX, path / SINGLE
    if index.is_file():
        return _indexed(index)
    if single.is_file():
        return [single]
    others = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if len(others) == 1:
        return others
    found = ", ".join(file.name for file in others[:3])
    has = f"has {found}" if others else "has no such file"
    raise ValueError(f"{path} {has}: give a file, or a folder with `{SINGLE}` or with `{INDEX}`.")


def _indexed(index: Path) -> list[Path]:
    """The files that an index names, which are beside it."""
    if index.stat().st_size > _LONGEST_HEADER:
        raise ValueError(f"{index} has {index.stat().st_size} bytes, which no index has.")
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        files = sorted(set(names))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{index} is no index: it has no `weight_map` of names.") from error
    for name in files:
        # A path to elsewhere would read what the model's folder does not have.
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index} names the file {name!r}, which is not beside it.")
        if not (index.parent / name).is_file():
            raise ValueError(f"{index} names {name}, which is not there.")
    return [index.parent / name for name in files]


def _content(file: Path) -> np.ndarray:
    """The bytes of a file."""
    if file.stat().st_size < 8:
        raise ValueError(f"{file} has {file.stat().st_size} bytes: it is no safetensors file.")
    return np.memmap(file, np.uint8, "r")


def _tensors(file: Path, content: np.ndarray) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, checked against its length."""
    header, begin = _header(file, content)
    length = content.size - begin
    spans = []
    for name, said in header.items():
        if name == "__metadata__":
            continue
        tensor, span = _tensor(file, name, said, begin)
        spans.append((*span, name))
        yield name, tensor
    end = 0
    for first, last, name in sorted(spans):
        if first != end:
            raise ValueError(
                f"{file}: the numbers of `{name}` begin at byte {first}, and those before end at "
                f"{end}: the header is wrong."
            )
        end = last
    if end != length:
        raise ValueError(
            f"{file} has {length} bytes of numbers, and its header says {end}: it was cut short, "
            "or is no safetensors file."
        )


def _header(file: Path, content: np.ndarray) -> tuple[dict[str, Any], int]:
    """The header of a file, and where the numbers begin."""
    (length,) = struct.unpack("<Q", content[:8].tobytes())
    most = min(_LONGEST_HEADER, content.size - 8)
    if length > most:
        raise ValueError(
            f"{file} says that its header has {length} bytes, and it may have {most}: it was cut "
            "short, or is no safetensors file."
        )
    text = content[8 : 8 + length].tobytes()
    try:
        header = json.loads(text, object_pairs_hook=_without_repetition)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} has a header that is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{file} has a header that is no JSON object.")
    return header, 8 + length


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, in which no name may be twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def _tensor(file: Path, name: str, said: Any, begin: int) -> tuple[Tensor, tuple[int, int]]:
    """What a header says of a tensor, and the first and last byte of its numbers."""
    wrong = ValueError(f"{file}: the header says of `{name}` {said!r:.200}, which is no tensor.")
    if not isinstance(said, dict) or set(said) != {"dtype", "shape", "data_offsets"}:
        raise wrong
    if not isinstance(said["dtype"], str) or said["dtype"] not in DTYPES:
        raise ValueError(
            f"{file}: `{name}` is of dtype {said['dtype']!r:.40}, and {', '.join(DTYPES)} can be "
            "read."
        )
    shape, offsets = said["shape"], said["data_offsets"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list):
            raise wrong
        if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
            raise wrong
    if len(offsets) != 2 or len(shape) > 32:
        raise wrong
    # Where one dim is zero the others may say anything.
    if math.prod(size for size in shape if size) >= 2**48:
        raise wrong
    first, last = offsets
    tensor = Tensor(file, DTYPES[said["dtype"]], tuple(shape), begin + first)
    if tensor.size != last - first:
        raise ValueError(
            f"{file}: `{name}` of shape {tensor.shape} takes {tensor.size} bytes, and the header "
            f"gives it {last - first}."
        )
    return tensor, (first, last)
