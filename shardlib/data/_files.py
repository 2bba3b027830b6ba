"""From patterns and folders to the files that a corpus is read from."""

import glob
import os
import stat
import sysconfig
from pathlib import Path
from typing import get_args

from shardlib.data._checks import expanded, shown
from shardlib.data._corpus import (
    COMPRESSED,
    FILES_EXAMPLES,
    SUFFIXES,
    Corpus,
    Format,
    Source,
    nearest,
)

# Tests are a third of the standard library, some of them text in no encoding on purpose; Linux
# distributions leave them out.
_NOT_PYTHON = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


def find_files(corpus: Corpus) -> tuple[Source, ...]:
    """The files of a corpus: those of each pattern in the order of their names, each file once, by
    whatever name.
    """
    patterns = (corpus.files,) if isinstance(corpus.files, str) else corpus.files
    found: dict[Path, Source] = {}
    named: dict[Path, str] = {}
    for pattern in patterns:
        place = _place(pattern)
        if place is not None and (other := named.setdefault(place, pattern)) != pattern:
            raise ValueError(
                f"`Corpus(files=...)` lists `{place}` twice, as {shown(other)} and as "
                f"{shown(pattern)}. Every file is read once; list it once."
            )
        for path in _matches(pattern, corpus.format):
            found.setdefault(path.resolve(), _source(path, corpus.format))
    formats = {source.format for source in found.values()}
    if corpus.separator and "text" not in formats:
        raise ValueError(
            f"`separator={shown(corpus.separator)}` stands between the documents of a text file, "
            f"and `{corpus.files}` are {' and '.join(sorted(formats))}. Leave it out."
        )
    if corpus.field and formats == {"text"}:
        raise ValueError(
            f"`field={shown(corpus.field)}`: text files have no fields, and `{corpus.files}` are "
            "text. Leave it out."
        )
    return tuple(found.values())


def left_out(corpus: Corpus) -> tuple[str, ...]:
    """The suffixes of files that lie in the corpus' folders and are not read."""
    patterns = (corpus.files,) if isinstance(corpus.files, str) else corpus.files
    folders = [expanded(pattern) for pattern in patterns if pattern != "python"]
    others = [path for folder in folders if folder.is_dir() for path in _under(folder)]
    return tuple(
        sorted({path.suffix or path.name for path in others if not _is_wanted(path, corpus.format)})
    )


def _matches(pattern: str, format: str) -> list[Path]:
    if pattern == "python":
        return _python()
    path = expanded(pattern)
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        status = None
    except OSError as error:
        raise ValueError(
            f"`Corpus(files={shown(pattern)})` cannot be read: {error.strerror}. {FILES_EXAMPLES}"
        ) from error
    if status is not None:
        return _of_folder(path, format) if path.is_dir() else [path.absolute()]
    # By `glob`, since a `Path` takes no pattern from the root on.
    names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
    if files := [Path(name).absolute() for name in names if not Path(name).is_dir()]:
        return files
    kind = (
        "Nothing matches the pattern" if glob.has_magic(pattern) else "There is no file or folder"
    )
    raise ValueError(
        f"{kind} `{pattern}` of `Corpus(files=...)`, looked for in "
        f"`{Path.cwd()}`{nearest(path.name, _names(path.parent))}"
    )


def _place(pattern: str) -> Path | None:
    """Which file or folder a pattern names, if it names one."""
    try:
        path = expanded(pattern)
        return path.resolve() if pattern != "python" and path.exists() else None
    except (OSError, RuntimeError):  # told where it is read
        return None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []


def _python() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    if files := sorted(
        p for p in folder.rglob("*.py") if not _NOT_PYTHON & set(p.relative_to(folder).parts)
    ):
        return files
    raise ValueError(
        '`Corpus("python")` is the source of the standard library, and this Python has none in '
        f"`{folder}`. Take files of your own."
    )


def _of_folder(folder: Path, format: str) -> list[Path]:
    under = _under(folder)
    if files := [path for path in under if _is_wanted(path, format)]:
        return files
    suffixes = ", ".join(sorted({f"`{path.suffix or path.name}`" for path in under})[:8])
    raise ValueError(
        f"The folder `{folder}` of `Corpus(files=...)` has no file of a known suffix for "
        f"`format={format!r}`; {f'there are {suffixes}' if under else 'it is empty'}. Say the "
        "format, or name the files."
    )


def _under(folder: Path) -> list[Path]:
    """The files of a folder and of those within it, without hidden ones."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_not_listed):
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(place, name) for name in names if not name.startswith(".")]
        found += [path.absolute() for path in paths if path.is_file()]
    return sorted(found)


def _not_listed(error: OSError) -> None:
    raise ValueError(
        f"The folder `{error.filename}` of `Corpus(files=...)` cannot be read: {error.strerror}. "
        "See to its permissions, or name the files that are to be read."
    ) from error


def _is_wanted(path: Path, format: str) -> bool:
    told = _format_of(path)
    return told is not None if format == "auto" else format in (told, "text")


def _format_of(path: Path) -> str | None:
    if path.suffix.lower() in COMPRESSED:
        inner = SUFFIXES.get(Path(path.stem).suffix.lower())
        return inner if inner in ("text", "jsonl") else None
    return SUFFIXES.get(path.suffix.lower())


_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def _source(path: Path, format: str) -> Source:
    told = _format_of(path) if format == "auto" else format
    if told is None:
        raise ValueError(
            f"`{path}` does not tell by its suffix what it is; say so: `Corpus(..., format=...)`, "
            f"one of {', '.join(map(repr, get_args(Format)[1:]))}."
        )
    try:
        status = path.stat()
        # Opened, a pipe would wait, and a device may have no end.
        if kind := _KINDS.get(stat.S_IFMT(status.st_mode)):
            raise ValueError(
                f"`{path}` of `Corpus(files=...)` is {kind}, where a file was expected: it is read "
                "more than once. Write what it gives into a file."
            )
        with path.open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"`{path}` cannot be read: {error.strerror}.") from error
    return Source(path, told, status.st_size, status.st_mtime_ns)
