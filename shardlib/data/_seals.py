"""Digests of the small files of a token store: which files have one, and which is not as it was
written.
"""

import hashlib
import stat
from pathlib import Path
from typing import NamedTuple

from shardlib.data._corpus import Corpus
from shardlib.data._tokenizer import learned_size

PARTS = ("train", "held_out")
SUMS = "sha256sums"


class _Sum(NamedTuple):
    """The digest of a file of a store, as it is in `sha256sums`."""

    digest: str
    name: str

    def line(self) -> str:
        return f"{self.digest}  {self.name}\n"


def sealed_names(corpus: Corpus) -> list[str]:
    names = [f"{part}.{kind}" for part in PARTS for kind in ("crc32", "ends")]
    return sorted(
        [*names, "meta.json", *["tokenizer.json"] * (learned_size(corpus.tokenizer) is not None)]
    )


def sha256sum(path: Path) -> _Sum:
    with path.open("rb") as file:
        return _Sum(hashlib.file_digest(file, "sha256").hexdigest(), path.name)


def is_plain_file(path: Path) -> bool:
    """Whether it is a plain file: no link that leads elsewhere, no pipe that would wait to be
    opened.
    """
    return stat.S_ISREG(path.lstat().st_mode)


def unsealed(folder: Path, corpus: Corpus) -> str:
    """Which file is not as it was written, if one is not; of the ids, only whether they are
    there.
    """
    names = sealed_names(corpus)
    for name in (SUMS, *names, *(f"{part}.ids" for part in PARTS)):
        if not is_plain_file(folder / name):
            return f"`{name}` is no file"
    sums = [sha256sum(folder / name) for name in names]
    expected = "".join(one.line() for one in sums).encode()
    with (folder / SUMS).open("rb") as file:
        written = file.read(len(expected) + 1)
    if written == expected:
        return ""
    other = [one.name for one in sums if one.line().encode() not in written]
    return f"`{other[0] if len(other) == 1 else SUMS}` is not as it was written"
