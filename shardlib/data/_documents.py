"""From files to documents: text, JSON lines, Parquet, ArrayRecord.

Every document is a `str` that UTF-8 can hold. What a file has that is none is a bad record: named
by file and position, it stops the reading, or is counted and passed over, as the corpus says.
"""

import contextlib
import functools
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from shardlib._text import human_bytes
from shardlib.data._checks import listed
from shardlib.data._corpus import Corpus, Reading, Skipped, Source
from shardlib.data._packages import package

_MARK = b"\xef\xbb\xbf"  # that some editors begin a file with
_BUFFER = _BLOCK = 1 << 20
_LOOK = 256  # records between two looks at whether a file has grown
# At most: a file without an end, or without a line's end, must not fill the memory.
_DOCUMENT_BYTES = 1 << 30


class _BadRecordError(Exception):
    """A record that is not what its format says."""


def read_documents(sources: tuple[Source, ...], corpus: Corpus, reading: Reading) -> Iterator[str]:
    """The documents of files, in order, each of at least one character; `reading` says how far it
    is.
    """
    for source in sources:
        records, unit, parse = _FORMATS[source.format]
        count = 0
        try:
            for number, raw in records(source, corpus, reading):
                count += 1
                if count % _LOOK == 0 and reading.position() > source.size:
                    raise ValueError(
                        f"`{source.path}` has more than the {source.size:,} bytes it had when it "
                        "was found: it grows, or has no end. Copy what is to be read into a file "
                        "that stays as it is."
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
        # A compressed file that ends early, or whose bytes have changed, is found out only as it is
        # read.
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"`{source.path}` cannot be read: {error}.") from error
        if not count and source.format != "text":
            raise ValueError(
                f"`{source.path}` is empty: it has no {unit}. Remove it, or see what became of its "
                "content."
            )
        reading.finished_bytes += source.size
        reading.position = lambda: 0.0


def _bad(source: Source, corpus: Corpus, reading: Reading, where: str, reason: str) -> None:
    if corpus.bad == "stop":
        raise ValueError(
            f"`{source.path}`, {where}: {reason}. Fix it, or skip bad records: `Corpus(..., "
            'bad="skip")`.'
        )
    earlier = reading.skipped.get(source.path)
    count, first = (earlier.count, earlier.first) if earlier else (0, f"{where}: {reason}")
    reading.skipped[source.path] = Skipped(str(source.path), count + 1, first)


def _told(error: Exception, number: int, unit: str, raw: Any) -> tuple[str, str]:
    if isinstance(error, UnicodeDecodeError):
        if unit == "line":  # of a text with many, the one that is meant
            number += error.object[: error.start].count(b"\n")
        return (
            f"{unit} {number}",
            f"not UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason})",
        )
    if isinstance(error, UnicodeEncodeError):
        half = error.object[error.start].encode("unicode_escape").decode()
        return f"{unit} {number}", f"`{half}` is half of a character, which UTF-8 cannot hold"
    return f"{unit} {number}", str(error)


def _texts(
    source: Source, corpus: Corpus, reading: Reading
) -> Iterator[tuple[int, bytes | _BadRecordError]]:
    with _opened(source, reading) as file:
        if corpus.separator is None:
            document = file.read(_DOCUMENT_BYTES + 1)
            way_out = "say what separates documents, `Corpus(..., separator=...)`, or cut the file"
            yield (
                1,
                _too_long(way_out)
                if len(document) > _DOCUMENT_BYTES
                else document.removeprefix(_MARK),
            )
            return
        yield from _separated(file, corpus.separator.encode())


def _separated(file: BinaryIO, separator: bytes) -> Iterator[tuple[int, bytes | _BadRecordError]]:
    """What stands between two separators, in time that grows as the file does, however long the
    documents.
    """
    rest = bytearray()
    # Of this document: bytes known to hold no separator, and bytes too many to be kept.
    searched = dropped = 0
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


def _lines(
    source: Source, corpus: Corpus, reading: Reading
) -> Iterator[tuple[int, bytes | _BadRecordError]]:
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
                    f"`{source.path}` has no column `{column[:80]}`; it has "
                    f"{listed(schema.names)}. Say which one holds the text: `Corpus(..., "
                    "field=...)`."
                )
            of_type = schema.field(column).type
            if arrow.types.is_dictionary(of_type):
                of_type = of_type.value_type
            if not any(getattr(arrow.types, f"is_{kind}")(of_type) for kind in _TEXT_TYPES):
                raise ValueError(
                    f"The column `{column}` of `{source.path}` holds {of_type}, where "
                    "text was expected."
                )
            number, total = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=256, columns=[column]):
                # As bytes, since a column may hold what is not UTF-8, and a batch would fail as a
                # whole.
                for raw in batch.column(0).cast(of_type).cast(arrow.large_binary()).to_pylist():
                    yield number, raw
                    number += 1
                reading.position = lambda done=number: source.size * done / total
    except arrow.ArrowException as error:
        raise ValueError(f"`{source.path}` cannot be read as Parquet: {error}") from error


_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def _records(
    source: Source, corpus: Corpus, reading: Reading
) -> Iterator[tuple[int, bytes | _BadRecordError]]:
    module = package("array_record.python.array_record_module", "ArrayRecord")
    reader = module.ArrayRecordReader(str(source.path), "readahead_buffer_size:0")
    if not reader.ok():
        raise ValueError(
            f"`{source.path}` cannot be read as ArrayRecord: it is no such file, or "
            "its end is missing."
        )
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
            with (
                arrow.CompressedInputStream(raw, "zstd") as plain,
                io.BufferedReader(plain, _BUFFER) as file,
            ):
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
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


_Parse = Callable[[Any, str | None], str]
_FORMATS: dict[str, tuple[Callable[..., Iterator[tuple[int, Any]]], str, _Parse]] = {
    "text": (_texts, "line", _utf8),
    "jsonl": (_lines, "line", _json),
    "parquet": (_rows, "row", _utf8),
    "arrayrecord": (
        _records,
        "record",
        lambda raw, key: _json(raw, key) if key else _utf8(raw, key),
    ),
}
