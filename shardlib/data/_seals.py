"""Digests of the small files of a token store: which files have one, and which is not as it was
written.

The ids themselves, which are large, have a digest for each block instead; see `_blocks`.
"""

import hashlib
import stat
from pathlib import Path
from typing import NamedTuple

from shardlib.data._corpus import Corpus
from shardlib.data._tokenizer import learned_size

PARTS = ("train", "held_out")
"""The parts of a store, as their files are named."""

SUMS = "sha256sums"
"""The file of digests, which the program `sha256sum --check` reads too."""


class _Sum(NamedTuple):
    """The digest of a file of a store, as it is in `sha256sums`."""

    digest: str
    name: str

    def line(self) -> str:
        """The line that the program `sha256sum` writes."""
        return f"{self.digest}  {self.name}\n"


def sealed_names(corpus: Corpus) -> list[str]:
    """The names of the files of a store that have a digest in `sha256sums`, in order."""
    names = ["meta.json"]
    for part in PARTS:
        names += [f"{part}.crc32", f"{part}.ends"]
        if corpus.chat:
            names.append(f"{part}.switches")
    # Other tokenizers are files of the user's own.
    if learned_size(corpus.tokenizer) is not None:
        names.append("tokenizer.json")
    return sorted(names)


def sha256sum(path: Path) -> _Sum:
    """The digest of a file."""
    with path.open("rb") as file:
        return _Sum(hashlib.file_digest(file, "sha256").hexdigest(), path.name)


def is_plain_file(path: Path) -> bool:
    """Whether a path is a plain file.

    It is neither a link that leads elsewhere nor a pipe that would wait to be opened.
    """
    return stat.S_ISREG(path.lstat().st_mode)


def unsealed(folder: Path, corpus: Corpus) -> str:
    """Which file of a store is not as it was written, for a message; empty if all are.

    Of the ids it is only seen whether they are there.
    """
    names = sealed_names(corpus)
    for name in (SUMS, *names, *(f"{part}.ids" for part in PARTS)):
        if not is_plain_file(folder / name):
            return f"`{name}` is no file"
    sums = [sha256sum(folder / name) for name in names]
    expected = "".join(file_sum.line() for file_sum in sums).encode()
    # One byte more shows that the file is longer; a damaged one may be of any length.
    with (folder / SUMS).open("rb") as file:
        written = file.read(len(expected) + 1)
    if written == expected:
        return ""
    return f"`{_changed_file(sums, written)}` is not as it was written"


def _changed_file(sums: list[_Sum], written: bytes) -> str:
    """The file whose digest is not the one that was written.

    If several digests differ, or none, it is the list of them that is damaged.
    """
    changed = []
    for file_sum in sums:
        if file_sum.line().encode() not in written:
            changed.append(file_sum.name)
    if len(changed) == 1:
        return changed[0]
    return SUMS
