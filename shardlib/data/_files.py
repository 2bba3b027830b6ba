"""From patterns to files, and from files to documents: text, JSON lines, Parquet, ArrayRecord.

Every document is a `str` that UTF-8 can hold. What a file has that is none is a bad record: named by file and position,
it stops the reading, or is counted and passed over, as the corpus says.
"""

import contextlib
import difflib
import functools
import glob
import gzip
import io
import json
import os
import stat
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from shardlib._text import human_bytes
from shardlib.data._checks import expanded, listed, path_text, shown, text_or_none, whole_number
from shardlib.data._packages import package
from shardlib.data._tokenizer import learned_size, tokenizer_name

Format = Literal["auto", "text", "jsonl", "parquet", "arrayrecord"]

_SUFFIXES = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst", ".tex", ".html", ".css", ".toml", ".yaml", ".yml"), "text"),
    **dict.fromkeys((".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js"), "text"),
    **dict.fromkeys((".ts", ".jl", ".r", ".rb", ".scala", ".sh", ".sql"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".arrayrecord", ".array_record"), "arrayrecord"),
}
_COMPRESSED = (".gz", ".zst")
# Tests are a third of the standard library, some of them text in no encoding on purpose; Linux distributions leave them out.
_NOT_PYTHON = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_MARK = b"\xef\xbb\xbf"  # that some editors begin a file with
_BUFFER = _BLOCK = 1 << 20
_LOOK = 256  # records between two looks at whether a file has grown
_DOCUMENT_BYTES = 1 << 30  # at most: a file without an end, or without a line's end, must not fill the memory
_FILES = (
    'Give a path, a folder or a pattern, or several of them in a tuple, as in `Corpus(("books", "wiki/*.jsonl"))`; or '
    '`"python"`.'
)


@dataclass(frozen=True)
class Corpus:
    """Which texts, and what becomes of them. It prints, compares and hashes.

    `files` are paths, folders and patterns (`data/**/*.jsonl`), one or several; or `"python"`, the sources of the running
    interpreter's standard library without its tests, which are there on every machine. A file that several patterns match is
    read once; one that is listed twice is refused.

    `format` is told from each file's suffix unless given: of text, a file is a document (or, with `separator`, what stands
    between two of them, such as `"<|endoftext|>"`); of JSON lines a line, of Parquet a row, of ArrayRecord a record.
    `field` is the key or the column that holds the text, `"text"` unless given; without it, an ArrayRecord's records are
    UTF-8, with it they are JSON. Text and JSON lines may be compressed, `.gz` or `.zst`.

    `tokenizer` is `"bytes"`; or the path of a Hugging Face `tokenizer.json`, whose special token `end` ends each document;
    or `"bpe:4096"`, one of so many tokens that is learned from the documents that are not held out, and kept with the store.
    A text with characters that the tokenizer has no token for is refused, unless its file has a token for what is unknown, or
    `unknown` names one.

    `held_out` is the share of documents kept for evaluation. Which ones is a matter of their content alone, so that it
    never changes as the corpus grows, and no document is on both sides.

    `bad` says what happens to a record that is not what the format says: `"stop"`, or `"skip"` and report.

    >>> Corpus("wiki/*.jsonl.gz", tokenizer="gpt2/tokenizer.json").held_out
    0.01
    >>> Corpus("python", format="json")
    Traceback (most recent call last):
    ValueError: `Corpus(format='json')`: choose 'auto' or 'text' or 'jsonl' or 'parquet' or 'arrayrecord'; did you mean 'jsonl'?
    """

    files: str | tuple[str, ...]
    format: Format = "auto"
    field: str | None = None
    separator: str | None = None
    tokenizer: str = "bytes"
    end: str | None = None
    held_out: float = 0.01
    bad: Literal["stop", "skip"] = "stop"
    unknown: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "files", _checked_files(self.files))
        for name, choices in (("format", get_args(Format)), ("bad", ("stop", "skip"))):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise ValueError(
                    f"`Corpus({name}={shown(value)})`: choose {' or '.join(map(repr, choices))}{_nearest(value, choices)}"
                )
        for name in ("field", "separator", "end", "unknown"):
            text_or_none(f"Corpus({name}=...)", getattr(self, name))
        object.__setattr__(self, "tokenizer", tokenizer_name("Corpus(tokenizer=...)", self.tokenizer))
        made_here = self.tokenizer == "bytes" or learned_size(self.tokenizer) is not None
        if self.unknown and made_here:
            raise ValueError(
                f"`Corpus(unknown={shown(self.unknown)})` is a token of a tokenizer's file; "
                f"`tokenizer={self.tokenizer!r}` lacks no character. Leave it out."
            )
        if isinstance(self.held_out, bool) or not isinstance(self.held_out, int | float) or not 0 <= self.held_out < 1:
            raise ValueError(
                f"`Corpus(held_out={shown(self.held_out)})` is the share of documents kept for evaluation: at least 0, below 1."
            )


def _checked_files(files: Any) -> str | tuple[str, ...]:
    if isinstance(files, str | os.PathLike):
        return path_text("Corpus(files=...)", files, _FILES)
    if not isinstance(files, list | tuple) or not files:
        raise ValueError(f"`Corpus(files={shown(files)})` names no files. {_FILES}")
    texts = tuple(path_text("Corpus(files=(..., …))", one, _FILES) for one in files)
    for text, count in Counter(texts).items():
        if count > 1:
            raise ValueError(f"`Corpus(files=...)` lists {shown(text)} twice. Every file is read once; list it once.")
    return texts


@dataclass(frozen=True)
class Source:
    """One file of a corpus, as it was when it was found."""

    path: Path
    format: str
    size: int
    modified_ns: int


@dataclass(frozen=True)
class Skipped:
    """How many records of a file were not what its format says, and what the first one was."""

    file: str
    count: int
    first: str

    def __post_init__(self) -> None:
        whole_number("Skipped(count=...)", self.count, 0, (1 << 63) - 1)
        for name in ("file", "first"):
            text_or_none(f"Skipped({name}=...)", getattr(self, name))

    def __str__(self) -> str:
        return f"{self.file}: {self.count} skipped, the first at {self.first}"


@dataclass
class Reading:
    """How far a reading has come."""

    finished_bytes: int = 0
    position: Callable[[], float] = lambda: 0.0
    empty: int = 0
    skipped: dict[Path, Skipped] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """How much of the files is read, as they are on disk."""
        return self.finished_bytes + int(self.position())


class _BadRecordError(Exception):
    """A record that is not what its format says."""


def find_files(corpus: Corpus) -> tuple[Source, ...]:
    """The files of a corpus: those of each pattern in the order of their names, each file once, by whatever name."""
    patterns = (corpus.files,) if isinstance(corpus.files, str) else corpus.files
    found: dict[Path, Source] = {}
    named: dict[Path, str] = {}
    for pattern in patterns:
        place = _place(pattern)
        if place is not None and (other := named.setdefault(place, pattern)) != pattern:
            raise ValueError(
                f"`Corpus(files=...)` lists `{place}` twice, as {shown(other)} and as {shown(pattern)}. Every file is read once; "
                "list it once."
            )
        for path in _matches(pattern, corpus.format):
            found.setdefault(path.resolve(), _source(path, corpus.format))
    formats = {source.format for source in found.values()}
    if corpus.separator and "text" not in formats:
        raise ValueError(
            f"`separator={shown(corpus.separator)}` stands between the documents of a text file, and `{corpus.files}` are "
            f"{' and '.join(sorted(formats))}. Leave it out."
        )
    if corpus.field and formats == {"text"}:
        raise ValueError(
            f"`field={shown(corpus.field)}`: text files have no fields, and `{corpus.files}` are text. Leave it out."
        )
    return tuple(found.values())


def left_out(corpus: Corpus) -> tuple[str, ...]:
    """The suffixes of files that lie in the corpus' folders and are not read."""
    patterns = (corpus.files,) if isinstance(corpus.files, str) else corpus.files
    folders = [expanded(pattern) for pattern in patterns if pattern != "python"]
    others = [path for folder in folders if folder.is_dir() for path in _under(folder)]
    return tuple(sorted({path.suffix or path.name for path in others if not _is_wanted(path, corpus.format)}))


def read_documents(sources: tuple[Source, ...], corpus: Corpus, reading: Reading) -> Iterator[str]:
    """The documents of files, in order, each of at least one character; `reading` is brought along."""
    for source in sources:
        records, unit, parse = _FORMATS[source.format]
        count = 0
        try:
            for number, raw in records(source, corpus, reading):
                count += 1
                if count % _LOOK == 0 and reading.position() > source.size:
                    raise ValueError(
                        f"`{source.path}` has more than the {source.size:,} bytes it had when it was found: it grows, or has no "
                        "end. Copy what is to be read into a file that stays as it is."
                    )
                try:
                    if isinstance(raw, _BadRecordError):
                        raise raw
                    text = parse(raw, corpus.field)
                    text.encode()  # JSON may spell what no UTF-8 can hold
                except (_BadRecordError, UnicodeError) as error:
                    _bad(source, corpus, reading, *_told(error, number, unit, raw))
                    continue
                if text:
                    yield text
                else:
                    reading.empty += 1
        # A compressed file that ends early, or whose bytes have changed, is found out only as it is read.
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"`{source.path}` cannot be read: {error}.") from error
        if not count and source.format != "text":
            raise ValueError(
                f"`{source.path}` is empty: it has no {unit}. Remove it, or see what became of its content."
            )
        reading.finished_bytes += source.size
        reading.position = lambda: 0.0


def _matches(pattern: str, format: str) -> list[Path]:
    if pattern == "python":
        return _python()
    path = expanded(pattern)
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        status = None
    except OSError as error:
        raise ValueError(f"`Corpus(files={shown(pattern)})` cannot be read: {error.strerror}. {_FILES}") from error
    if status is not None:
        return _of_folder(path, format) if path.is_dir() else [path.absolute()]
    names = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (a `Path` takes no pattern from the root on)
    if files := [Path(name).absolute() for name in names if not Path(name).is_dir()]:
        return files
    kind = "Nothing matches the pattern" if glob.has_magic(pattern) else "There is no file or folder"
    raise ValueError(
        f"{kind} `{pattern}` of `Corpus(files=...)`, looked for in `{Path.cwd()}`{_nearest(path.name, _names(path.parent))}"
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
    if files := sorted(p for p in folder.rglob("*.py") if not _NOT_PYTHON & set(p.relative_to(folder).parts)):
        return files
    raise ValueError(
        f'`Corpus("python")` is the source of the standard library, and this Python has none in `{folder}`. Take files '
        "of your own."
    )


def _of_folder(folder: Path, format: str) -> list[Path]:
    under = _under(folder)
    if files := [path for path in under if _is_wanted(path, format)]:
        return files
    suffixes = ", ".join(sorted({f"`{path.suffix or path.name}`" for path in under})[:8])
    raise ValueError(
        f"The folder `{folder}` of `Corpus(files=...)` has no file of a known suffix for `format={format!r}`; "
        f"{f'there are {suffixes}' if under else 'it is empty'}. Say the format, or name the files."
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
        f"The folder `{error.filename}` of `Corpus(files=...)` cannot be read: {error.strerror}. See to its permissions, or name "
        "the files that are to be read."
    ) from error


def _is_wanted(path: Path, format: str) -> bool:
    told = _format_of(path)
    return told is not None if format == "auto" else format in (told, "text")


def _format_of(path: Path) -> str | None:
    if path.suffix.lower() in _COMPRESSED:
        inner = _SUFFIXES.get(Path(path.stem).suffix.lower())
        return inner if inner in ("text", "jsonl") else None
    return _SUFFIXES.get(path.suffix.lower())


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
            f"`{path}` does not tell by its suffix what it is; say so: `Corpus(..., format=...)`, one of "
            f"{', '.join(map(repr, get_args(Format)[1:]))}."
        )
    try:
        status = path.stat()
        if kind := _KINDS.get(stat.S_IFMT(status.st_mode)):  # opened, a pipe would wait, and a device may have no end
            raise ValueError(
                f"`{path}` of `Corpus(files=...)` is {kind}, where a file was expected: it is read more than once. Write what it "
                "gives into a file."
            )
        with path.open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"`{path}` cannot be read: {error.strerror}.") from error
    return Source(path, told, status.st_size, status.st_mtime_ns)


def _bad(source: Source, corpus: Corpus, reading: Reading, where: str, reason: str) -> None:
    if corpus.bad == "stop":
        raise ValueError(
            f'`{source.path}`, {where}: {reason}. Mend it, or pass over such records: `Corpus(..., bad="skip")`.'
        )
    earlier = reading.skipped.get(source.path)
    count, first = (earlier.count, earlier.first) if earlier else (0, f"{where}: {reason}")
    reading.skipped[source.path] = Skipped(str(source.path), count + 1, first)


def _told(error: Exception, number: int, unit: str, raw: Any) -> tuple[str, str]:
    if isinstance(error, UnicodeDecodeError):
        if unit == "line":  # of a text with many, the one that is meant
            number += error.object[: error.start].count(b"\n")
        return f"{unit} {number}", f"not UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason})"
    if isinstance(error, UnicodeEncodeError):
        half = error.object[error.start].encode("unicode_escape").decode()
        return f"{unit} {number}", f"`{half}` is half of a character, which UTF-8 cannot hold"
    return f"{unit} {number}", str(error)


# Records of each format: their numbers and their bytes. Lines count from 1, as editors do; rows and records from 0.


def _texts(source: Source, corpus: Corpus, reading: Reading) -> Iterator[tuple[int, bytes | _BadRecordError]]:
    with _opened(source, reading) as file:
        if corpus.separator is None:
            document = file.read(_DOCUMENT_BYTES + 1)
            way_out = "say what separates documents, `Corpus(..., separator=...)`, or cut the file"
            yield 1, _too_long(way_out) if len(document) > _DOCUMENT_BYTES else document.removeprefix(_MARK)
            return
        yield from _separated(file, corpus.separator.encode())


def _separated(file: BinaryIO, separator: bytes) -> Iterator[tuple[int, bytes | _BadRecordError]]:
    """What stands between two separators, in time that grows as the file does, however long the documents."""
    rest = bytearray()
    searched = dropped = 0  # of this document: bytes known to hold no separator, and bytes too many to be kept
    begun = line = 1
    lines = separator.count(b"\n")
    block = file.read(max(_BLOCK, len(_MARK))).removeprefix(_MARK)
    while block:
        rest += block
        if rest.find(separator, searched) >= 0:
            *whole, last = bytes(rest).split(separator)
            for document in whole:
                is_long = dropped + len(document) > _DOCUMENT_BYTES
                yield (begun, _too_long("cut it")) if is_long else _trimmed(document, begun)
                begun = line = line + document.count(b"\n") + lines
                dropped = 0
            rest = bytearray(last)
        searched = max(0, len(rest) - len(separator) + 1)
        if searched > _DOCUMENT_BYTES:
            line += rest.count(b"\n", 0, searched)
            del rest[:searched]
            searched, dropped = 0, dropped + searched
        block = file.read(_BLOCK)
    if dropped + len(rest) > _DOCUMENT_BYTES:
        yield begun, _too_long("cut it")
    elif rest.strip(b"\r\n"):
        yield _trimmed(bytes(rest), begun)


def _too_long(way_out: str) -> _BadRecordError:
    return _BadRecordError(f"a document of more than {human_bytes(_DOCUMENT_BYTES)}; {way_out}")


def _trimmed(document: bytes, line: int) -> tuple[int, bytes]:
    text = document.lstrip(b"\r\n")
    return line + document.count(b"\n", 0, len(document) - len(text)), text.rstrip(b"\r\n")


def _lines(source: Source, corpus: Corpus, reading: Reading) -> Iterator[tuple[int, bytes | _BadRecordError]]:
    with _opened(source, reading) as file:
        bounded = functools.partial(file.readline, _DOCUMENT_BYTES + 1)
        for number, line in enumerate(iter(bounded, b""), 1):
            if len(line) > _DOCUMENT_BYTES:
                rest = line
                while rest and not rest.endswith(b"\n"):
                    rest = file.readline(_BLOCK)
                yield number, _too_long("see whether lines are ended by newlines, and cut it")
            elif stripped := line.removeprefix(_MARK if number == 1 else b"").strip():
                yield number, stripped


def _rows(source: Source, corpus: Corpus, reading: Reading) -> Iterator[tuple[int, bytes | None]]:
    arrow, parquet = package("pyarrow", "Parquet"), package("pyarrow.parquet", "Parquet")
    column = corpus.field or "text"
    try:
        with parquet.ParquetFile(source.path, page_checksum_verification=True) as file:
            schema = file.schema_arrow
            if schema.get_field_index(column) < 0:
                raise ValueError(
                    f"`{source.path}` has no column `{column[:80]}`; it has {listed(schema.names)}. "
                    "Say which one holds the text: `Corpus(..., field=...)`."
                )
            of_type = schema.field(column).type
            if arrow.types.is_dictionary(of_type):
                of_type = of_type.value_type
            if not any(getattr(arrow.types, f"is_{kind}")(of_type) for kind in _TEXT_TYPES):
                raise ValueError(f"The column `{column}` of `{source.path}` holds {of_type}, where text was expected.")
            number, total = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                # As bytes, since a column may hold what is not UTF-8, and a batch would fail as a whole.
                for raw in batch.column(0).cast(of_type).cast(arrow.large_binary()).to_pylist():
                    yield number, raw
                    number += 1
                reading.position = lambda done=number: source.size * done / total
    except arrow.ArrowException as error:
        raise ValueError(f"`{source.path}` cannot be read as Parquet: {error}") from error


_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def _records(source: Source, corpus: Corpus, reading: Reading) -> Iterator[tuple[int, bytes | _BadRecordError]]:
    module = package("array_record.python.array_record_module", "ArrayRecord")
    reader = module.ArrayRecordReader(str(source.path), "readahead_buffer_size:0")
    if not reader.ok():
        raise ValueError(f"`{source.path}` cannot be read as ArrayRecord: it is no such file, or its end is missing.")
    try:
        total = reader.num_records()
        for start in range(0, total, 256):
            numbers = range(start, min(start + 256, total))
            try:
                records = reader.read(numbers.start, numbers.stop)
            except RuntimeError:  # somewhere among them; the others can be read
                records = [_record(reader, number) for number in numbers]
            yield from zip(numbers, records, strict=True)
            reading.position = lambda done=numbers.stop: source.size * done / total
    finally:
        reader.close()


def _record(reader: Any, number: int) -> bytes | _BadRecordError:
    try:
        return reader.read([number])[0]
    except RuntimeError as error:
        return _BadRecordError(str(error).split(";")[0])


@contextlib.contextmanager
def _opened(source: Source, reading: Reading) -> Iterator[BinaryIO]:
    suffix = source.path.suffix.lower()
    with source.path.open("rb", buffering=_BUFFER) as raw:
        reading.position = raw.tell
        if suffix == ".gz":
            with gzip.GzipFile(fileobj=raw) as plain, io.BufferedReader(plain, _BUFFER) as file:
                yield file
        elif suffix == ".zst":
            arrow = package("pyarrow", "Zstandard")
            with arrow.CompressedInputStream(raw, "zstd") as plain, io.BufferedReader(plain, _BUFFER) as file:
                yield file
        else:
            yield raw


def _utf8(raw: Any, key: str | None) -> str:
    if raw is None:
        raise _BadRecordError("null, where text was expected")
    return raw.decode()


def _json(raw: Any, key: str | None) -> str:
    text = _utf8(raw, key)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _BadRecordError(f"not JSON ({error})") from error
    key = key or "text"
    if not isinstance(record, dict):
        raise _BadRecordError(f"{_called(record)}, where a JSON object was expected")
    if key not in record:
        raise _BadRecordError(f"no key `{key[:80]}`; there is {listed(record) or 'none'}")
    if not isinstance(record[key], str):
        raise _BadRecordError(f"`{key}` is {_called(record[key])}, where text was expected")
    return record[key]


def _called(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _nearest(got: Any, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(got, list(choices), 1) if isinstance(got, str) and len(got) < 256 else []
    return f"; did you mean {near[0]!r}?" if near else "."


_Parse = Callable[[Any, str | None], str]
_FORMATS: dict[str, tuple[Callable[..., Iterator[tuple[int, Any]]], str, _Parse]] = {
    "text": (_texts, "line", _utf8),
    "jsonl": (_lines, "line", _json),
    "parquet": (_rows, "row", _utf8),
    "arrayrecord": (_records, "record", lambda raw, key: _json(raw, key) if key else _utf8(raw, key)),
}
