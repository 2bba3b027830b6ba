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

# What else than a file a path may name, by its mode.
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def find_files(corpus: Corpus) -> tuple[Source, ...]:
    """The files of a corpus, those of each pattern in the order of their names.

    A file that is found under several names is there once. A pattern that matches nothing, a file
    that is listed twice, and options that the formats have no use for are a `ValueError`.
    """
    patterns = _patterns(corpus)
    _check_listed_once(patterns)
    sources: dict[Path, Source] = {}
    for pattern in patterns:
        for path in _matches(pattern, corpus.format):
            # A link and the file that it leads to are one text, which is not to be learnt twice.
            sources.setdefault(path.resolve(), _source(path, corpus.format))
    _check_options(corpus, {source.format for source in sources.values()})
    return tuple(sources.values())


def _check_options(corpus: Corpus, formats: set[str]) -> None:
    """Refuse options that none of the formats has a use for."""
    if corpus.separator and "text" not in formats:
        raise ValueError(
            f"`separator={shown(corpus.separator)}` stands between the documents of a text file, "
            f"and `{corpus.files}` are {' and '.join(sorted(formats))}. Leave it out."
        )
    # A corpus may have both kinds of files, and the field is for those that have one.
    if corpus.chat and "text" in formats:
        raise ValueError(
            f"`Corpus(chat=...)` reads conversations, and `{corpus.files}` are text. Give them as "
            'JSON lines, such as `{"prompt": ..., "completion": ...}`, or leave `chat` out.'
        )
    if corpus.field and formats == {"text"}:
        raise ValueError(
            f"`field={shown(corpus.field)}`: text files have no fields, and `{corpus.files}` are "
            "text. Leave it out."
        )


def _patterns(corpus: Corpus) -> tuple[str, ...]:
    """What a corpus names: paths, folders and patterns."""
    if isinstance(corpus.files, str):
        return (corpus.files,)
    return corpus.files


def _check_listed_once(patterns: tuple[str, ...]) -> None:
    """Refuse two names of one file or folder. A pattern may match what another one names."""
    pattern_of: dict[Path, str] = {}
    for pattern in patterns:
        path = _named_path(pattern)
        if path is None:
            continue
        other = pattern_of.setdefault(path, pattern)
        if other != pattern:
            raise ValueError(
                f"`Corpus(files=...)` lists `{path}` twice, as {shown(other)} and as "
                f"{shown(pattern)}. Every file is read once; list it once."
            )


def left_out(corpus: Corpus) -> tuple[str, ...]:
    """The suffixes of files that are in the corpus' folders and are not read."""
    suffixes: set[str] = set()
    # Only of folders it is not said what is wanted: a pattern or a name says that itself.
    for pattern in _patterns(corpus):
        folder = expanded(pattern)
        # Python's own sources are chosen here, and need no remark.
        if pattern == "python" or not folder.is_dir():
            continue
        for path in _files_under(folder):
            if not _is_wanted(path, corpus.format):
                suffixes.add(_suffix(path))
    return tuple(sorted(suffixes))


def _suffix(path: Path) -> str:
    """The suffix of a file, or its whole name where it has none.

    >>> _suffix(Path("a/notes.md")), _suffix(Path("a/Makefile"))
    ('.md', 'Makefile')
    """
    return path.suffix or path.name


def _files_of_pattern(path: Path) -> list[Path]:
    """The files that a path with wildcards matches, in order; there may be none."""
    # By `glob`, since a `Path` takes no pattern from the root on.
    names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207
    files: list[Path] = []
    for name in names:
        # A pattern may match folders too, whose files it does not name.
        if not Path(name).is_dir():
            files.append(Path(name).absolute())
    return files


def _matches(pattern: str, format: str) -> list[Path]:
    """The files that a pattern names: at least one."""
    if pattern == "python":
        return _python_files()
    path = expanded(pattern)
    # A path that exists is no pattern, even if it has a `*` in its name.
    if _exists(path, pattern):
        if path.is_dir():
            return _files_of_folder(path, format)
        return [path.absolute()]
    files = _files_of_pattern(path)
    if files:
        return files
    what = "There is no file or folder"
    if glob.has_magic(pattern):
        what = "Nothing matches the pattern"
    raise ValueError(
        f"{what} `{pattern}` of `Corpus(files=...)`, looked for in "
        f"`{Path.cwd()}`{nearest(path.name, _names_in(path.parent))}"
    )


def _exists(path: Path, pattern: str) -> bool:
    """Whether there is anything at a path, a broken link too."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ValueError(
            f"`Corpus(files={shown(pattern)})` cannot be read: {error.strerror}. {FILES_EXAMPLES}"
        ) from error
    return True


def _named_path(pattern: str) -> Path | None:
    """Which file or folder a pattern names, if it names one."""
    if pattern == "python":
        return None
    # What is wrong with a path is told where it is read.
    try:
        path = expanded(pattern)
        if path.exists():
            return path.resolve()
    except (OSError, RuntimeError):
        pass
    return None


def _names_in(folder: Path) -> list[str]:
    """What is in a folder, to find a name that was meant; nothing if it cannot be read."""
    try:
        return os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []


def _python_files() -> list[Path]:
    """The sources of the running interpreter's standard library, without its tests."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(folder.rglob("*.py")):
        if not _NOT_PYTHON & set(path.relative_to(folder).parts):
            files.append(path)
    if not files:
        raise ValueError(
            '`Corpus("python")` is the source of the standard library, and this Python has none in '
            f"`{folder}`. Take files of your own."
        )
    return files


def _files_of_folder(folder: Path, format: str) -> list[Path]:
    """The files of a folder that are of a format: at least one."""
    present = _files_under(folder)
    wanted = [path for path in present if _is_wanted(path, format)]
    if wanted:
        return wanted
    content = "it is empty"
    if present:
        # What is there most often tells what is wrong: another format, or a folder above.
        suffixes = sorted({f"`{_suffix(path)}`" for path in present})
        content = f"there are {', '.join(suffixes[:8])}"
    raise ValueError(
        f"The folder `{folder}` of `Corpus(files=...)` has no file of a known suffix for "
        f"`format={format!r}`; {content}. Say the format, or name the files."
    )


def _files_under(folder: Path) -> list[Path]:
    """The files of a folder and of those within it, without hidden ones, in order."""
    files: list[Path] = []
    # Links to folders are followed, each folder once: one may lead to a folder that it is in.
    seen = {folder.resolve()}
    for place, folders, names in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        entered = []
        for name in sorted(folders):
            resolved = Path(place, name).resolve()
            if not name.startswith(".") and resolved not in seen:
                seen.add(resolved)
                entered.append(name)
        # `os.walk` goes on with those folders that are left in its list.
        folders[:] = entered
        for name in names:
            path = Path(place, name)
            # Neither hidden files nor pipes, devices and broken links.
            if not name.startswith(".") and path.is_file():
                files.append(path.absolute())
    return sorted(files)


def _refuse_folder(error: OSError) -> None:
    """Refuse a folder that cannot be listed, which `os.walk` by itself passes over."""
    raise ValueError(
        f"The folder `{error.filename}` of `Corpus(files=...)` cannot be read: {error.strerror}. "
        "See to its permissions, or name the files that are to be read."
    ) from error


def _is_wanted(path: Path, format: str) -> bool:
    """Whether a file in a folder is read: its suffix is of the format, or of any if that is open.

    As text a file is read whatever its suffix says.
    """
    format_of_suffix = _format_of(path)
    if format == "auto":
        return format_of_suffix is not None
    # Whoever says "text" may mean sources in any language, whose suffixes nobody lists.
    return format in (format_of_suffix, "text")


def _format_of(path: Path) -> str | None:
    """The format that a file's suffix tells, that of `a.jsonl.gz` by the one before the last.

    >>> _format_of(Path("a.jsonl.gz")), _format_of(Path("a.txt")), _format_of(Path("a.png"))
    ('jsonl', 'text', None)
    """
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return SUFFIXES.get(suffix)
    inner = SUFFIXES.get(Path(path.stem).suffix.lower())
    # The other formats compress what they hold themselves, and are read from any position.
    if inner in ("text", "jsonl"):
        return inner
    return None


def _source(path: Path, format: str) -> Source:
    """A file of a corpus as it is now; what cannot be opened, or is no file, is refused."""
    if format == "auto":
        known = _format_of(path)
        if known is None:
            raise ValueError(
                f"`{path}` does not tell by its suffix what it is; say so: `Corpus(..., "
                f"format=...)`, one of {', '.join(map(repr, get_args(Format)[1:]))}."
            )
        format = known
    try:
        status = path.stat()
        # Opened, a pipe would wait, and a device may have no end.
        kind = _KINDS.get(stat.S_IFMT(status.st_mode))
        if kind:
            raise ValueError(
                f"`{path}` of `Corpus(files=...)` is {kind}, where a file was expected: it is read "
                "more than once. Write what it gives into a file."
            )
        # Whether it may be read is better known now than after hours of other files.
        with path.open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"`{path}` cannot be read: {error.strerror}.") from error
    return Source(path, format, status.st_size, status.st_mtime_ns)
