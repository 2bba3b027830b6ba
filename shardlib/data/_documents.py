"""From files to documents: text, JSON lines, Parquet, ArrayRecord.

    file -> records, each with its number -> parse -> document

Every document is a text that UTF-8 can hold, whole or in pieces. A record that is none is *bad*:
named by file and position, it stops the reading, or is counted and passed over, as the corpus says.
"""

import contextlib
import functools
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from shardlib._text import human_bytes
from shardlib.data._chat import KEYS, Chat, Document, Piece, messages_of
from shardlib.data._checks import listed
from shardlib.data._corpus import Corpus, Reading, Skipped, Source
from shardlib.data._packages import package

_MARK = b"\xef\xbb\xbf"
"""The byte order mark, which some editors begin a file with."""

_BUFFER = _BLOCK = 1 << 20
# Records between two looks at whether a file has grown, and records that are read together.
_LOOK = _ROWS = 256
# At most so large is a document: a file without an end, or without a line's end, must not fill the
# memory.
_DOCUMENT_BYTES = 1 << 30


class _BadRecordError(Exception):
    """A record that is not what its format says."""


Numbered = tuple[int, Any]
"""A record with its number, as messages give it.

The record is bytes, None, or a `_BadRecordError` for one that could not even be read.
"""


@dataclass(frozen=True)
class _Format:
    """How files of a format are read.

    - `records` goes through a file, with the corpus and how far the reading is.
    - `unit` is what the number of a record counts: lines, rows or records.
    - `parse` takes a record and the key of its text to a document.
    """

    records: Callable[[Source, Corpus, Reading], Iterator[Numbered]]
    unit: str
    parse: Callable[[Any, str | None], str]


def read_documents(
    sources: tuple[Source, ...], corpus: Corpus, reading: Reading
) -> Iterator[Document]:
    """The documents of files, in order, each of at least one character.

    `reading` says how far it is, and is kept up to date on the way.
    """
    for source in sources:
        try:
            yield from _documents_of(source, corpus, reading)
        # A compressed file that ends early, or whose bytes have changed, is found out only as it is
        # read.
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"`{source.path}` cannot be read: {error}.") from error
        reading.finished_bytes += source.size
        reading.position = lambda: 0.0


def _documents_of(source: Source, corpus: Corpus, reading: Reading) -> Iterator[Document]:
    """The documents of one file; bad records stop it or are counted, empty documents are counted.

    A file without records is refused, as is one that grows.
    """
    file_format = _FORMATS[source.format]
    count = 0
    for number, raw in file_format.records(source, corpus, reading):
        count += 1
        if count % _LOOK == 0 and reading.position() > source.size:
            raise ValueError(
                f"`{source.path}` has more than the {source.size:,} bytes it had when it "
                "was found: it grows, or has no end. Copy what is to be read into a file "
                "that stays as it is."
            )
        try:
            document = _parsed(file_format, raw, corpus)
        except (_BadRecordError, UnicodeError) as error:
            place = f"{file_format.unit} {_place(error, number, file_format.unit)}"
            _pass_over(source, corpus, reading, place, _reason(error))
            continue
        if document.text:
            yield document
        else:
            reading.empty += 1
    # A text file without content is an empty document, or none.
    if not count and source.format != "text":
        raise ValueError(
            f"`{source.path}` is empty: it has no {file_format.unit}. Remove it, or see what "
            "became of its content."
        )


def _parsed(file_format: _Format, raw: Any, corpus: Corpus) -> Document:
    """The document of a record; raises what is wrong with one that is bad."""
    if isinstance(raw, _BadRecordError):
        raise raw
    if isinstance(corpus.chat, Chat):
        document = _conversation(raw, corpus.chat, corpus.field)
    else:
        document = Document((Piece(file_format.parse(raw, corpus.field)),))
    # JSON may spell what UTF-8 cannot hold.
    document.text.encode()
    return document


def _conversation(raw: Any, chat: Chat, key: str | None) -> Document:
    """The document of a conversation, a JSON object or one that is read already."""
    record = raw if isinstance(raw, dict) else _json_object(raw)
    try:
        return chat.document(messages_of(record, key, [role for role, _ in chat.roles]))
    except UnicodeError:
        raise
    except ValueError as error:
        raise _BadRecordError(str(error)) from error


def _pass_over(source: Source, corpus: Corpus, reading: Reading, place: str, reason: str) -> None:
    """Count a bad record, or refuse it, as the corpus says.

    `place` is where the record is in its file, such as `line 3`, and `reason` what is wrong with
    it.
    """
    if corpus.bad == "stop":
        raise ValueError(
            f"`{source.path}`, {place}: {reason}. Fix it, or skip bad records: `Corpus(..., "
            'bad="skip")`.'
        )
    # Names of files and keys of JSON may have what UTF-8 cannot hold.
    file, first = (
        text.encode(errors="backslashreplace").decode()
        for text in (str(source.path), f"{place}: {reason}")
    )
    count, earlier = 0, reading.skipped.get(source.path)
    if earlier is not None:
        count, first = earlier.count, earlier.first
    reading.skipped[source.path] = Skipped(file, count + 1, first)


def _place(error: Exception, number: int, unit: str) -> int:
    """The number of the line, row or record that an error is about.

    A document may have many lines, of which the one that is meant is named.
    """
    if unit == "line" and isinstance(error, UnicodeDecodeError):
        return number + error.object[: error.start].count(b"\n")
    return number


def _reason(error: Exception) -> str:
    """Why a record is bad, for a message."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason})"
    if isinstance(error, UnicodeEncodeError):
        half = error.object[error.start].encode("unicode_escape").decode()
        return f"`{half}` is half of a character, which UTF-8 cannot hold"
    return str(error)


# Text.


def _texts(source: Source, corpus: Corpus, reading: Reading) -> Iterator[Numbered]:
    """The documents of a text file: the file itself, or what is between separators."""
    with _opened(source, reading) as file:
        if corpus.separator is not None:
            yield from _separated(file, corpus.separator.encode(), reading)
            return
        # One byte more shows that there is more.
        document = file.read(_DOCUMENT_BYTES + 1)
        if len(document) > _DOCUMENT_BYTES:
            yield (
                1,
                _too_long(
                    "say what separates documents, `Corpus(..., separator=...)`, or cut the file"
                ),
            )
        else:
            yield 1, document.removeprefix(_MARK)


def _separated(file: BinaryIO, separator: bytes, reading: Reading) -> Iterator[Numbered]:
    """What is between two separators, with the number of the line that it begins in.

    The time grows with the file only, however long documents are: no byte is searched twice.
    """
    scan = _SeparatedScan(separator)
    # The first block has at least the mark, whatever the size of blocks.
    block = file.read(max(_BLOCK, len(_MARK))).removeprefix(_MARK)
    while block:
        yield from scan.documents_with(block)
        block = file.read(_BLOCK)
    reading.separators += scan.found
    yield from scan.last_document()


class _SeparatedScan:
    """A text that is read block by block and cut at separators.

    - `rest` are the bytes of the document that is not complete yet, of which the first `searched`
      are known to hold no separator.
    - `dropped` counts bytes of it that were too many to be kept.
    - `begun` is the line in which it begins, and `line` the one in which `rest` does: they differ
      where bytes were dropped.
    - `found` counts separators.
    """

    def __init__(self, separator: bytes) -> None:
        self.separator = separator
        self.rest = bytearray()
        self.searched = self.dropped = self.found = 0
        self.begun = self.line = 1

    def documents_with(self, block: bytes) -> Iterator[Numbered]:
        """The documents that the next block completes."""
        self.rest += block
        if self.rest.find(self.separator, self.searched) >= 0:
            *whole, last = bytes(self.rest).split(self.separator)
            self.found += len(whole)
            for document in whole:
                yield self._completed(document)
            self.rest = bytearray(last)
        # A separator may begin in this block and end in the next.
        self.searched = max(0, len(self.rest) - len(self.separator) + 1)
        if self.searched > _DOCUMENT_BYTES:
            self.line += self.rest.count(b"\n", 0, self.searched)
            del self.rest[: self.searched]
            self.dropped += self.searched
            self.searched = 0

    def last_document(self) -> Iterator[Numbered]:
        """What is behind the last separator, if it is more than ends of lines."""
        if self.dropped + len(self.rest) > _DOCUMENT_BYTES:
            yield self.begun, _too_long("cut it")
        elif self.rest.strip(b"\r\n"):
            yield _trimmed(bytes(self.rest), self.begun)

    def _completed(self, document: bytes) -> Numbered:
        """A document that a separator follows; the next one begins behind that."""
        record = _trimmed(document, self.begun)
        if self.dropped + len(document) > _DOCUMENT_BYTES:
            record = self.begun, _too_long("cut it")
        self.line += document.count(b"\n") + self.separator.count(b"\n")
        self.begun, self.dropped = self.line, 0
        return record


def _too_long(way_out: str) -> _BadRecordError:
    return _BadRecordError(f"a document of more than {human_bytes(_DOCUMENT_BYTES)}; {way_out}")


def _trimmed(document: bytes, line: int) -> tuple[int, bytes]:
    """A document without empty lines around it, and the line in which it begins then."""
    text = document.lstrip(b"\r\n")
    skipped = len(document) - len(text)
    return line + document.count(b"\n", 0, skipped), text.rstrip(b"\r\n")


# JSON lines.


def _lines(source: Source, corpus: Corpus, reading: Reading) -> Iterator[Numbered]:
    """The lines of a file that are not blank, without the white space around them."""
    with _opened(source, reading) as file:
        bounded = functools.partial(file.readline, _DOCUMENT_BYTES + 1)
        for number, line in enumerate(iter(bounded, b""), 1):
            if len(line) > _DOCUMENT_BYTES:
                _skip_line(file, line)
                yield number, _too_long("see whether lines are ended by newlines, and cut it")
                continue
            if number == 1:
                line = line.removeprefix(_MARK)
            stripped = line.strip()
            if stripped:
                yield number, stripped


def _skip_line(file: BinaryIO, begun: bytes) -> None:
    """Read to the end of a line that was begun, and forget it."""
    rest = begun
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(_BLOCK)


# Parquet.

_TEXT_TYPES = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")


def _rows(source: Source, corpus: Corpus, reading: Reading) -> Iterator[Numbered]:
    """The rows of a column of a Parquet file, as bytes, or None for null."""
    arrow, parquet = package("pyarrow", "Parquet"), package("pyarrow.parquet", "Parquet")
    column = corpus.field or "text"
    try:
        with parquet.ParquetFile(source.path, page_checksum_verification=True) as file:
            if corpus.chat:
                yield from _conversations(source, file, corpus.field, reading)
                return
            text_type = _text_type(arrow, source, file.schema_arrow, column)
            number, total = 0, max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=_ROWS, columns=[column]):
                # As bytes, since a column may hold what is not UTF-8, and a batch would fail as a
                # whole.
                values = batch.column(0).cast(text_type).cast(arrow.large_binary())
                for raw in values.to_pylist():
                    yield number, raw
                    number += 1
                # Parquet says nothing of bytes: rows are taken to be alike.
                reading.position = lambda done=number: source.size * done / total
    except arrow.ArrowException as error:
        raise ValueError(f"`{source.path}` cannot be read as Parquet: {error}") from error


def _conversations(
    source: Source, file: Any, field: str | None, reading: Reading
) -> Iterator[Numbered]:
    """The rows of a Parquet file, each as a record of those columns that make a conversation."""
    names = file.schema_arrow.names
    wanted = (field, "system", "tools") if field else KEYS
    columns = [name for name in names if name in wanted]
    if not columns or (field and field not in columns):
        raise ValueError(
            f"`{source.path}` has no column of a conversation; it has "
            f"{listed(names)}. Say which one holds the messages: `Corpus(..., "
            "field=...)`."
        )
    number, total = 0, max(file.metadata.num_rows, 1)
    for batch in file.iter_batches(batch_size=_ROWS, columns=columns):
        for record in batch.to_pylist():
            yield number, record
            number += 1
        reading.position = lambda done=number: source.size * done / total


def _text_type(arrow: Any, source: Source, schema: Any, column: str) -> Any:
    """The type of a column's texts; a file without the column, or without texts in it, is refused.

    A column may be a dictionary, whose values are the texts.
    """
    if schema.get_field_index(column) < 0:
        raise ValueError(
            f"`{source.path}` has no column `{column[:80]}`; it has "
            f"{listed(schema.names)}. Say which one holds the text: `Corpus(..., "
            "field=...)`."
        )
    column_type = schema.field(column).type
    # A dictionary is a column of numbers, with a table of the texts that they stand for.
    if arrow.types.is_dictionary(column_type):
        column_type = column_type.value_type
    if not any(getattr(arrow.types, f"is_{kind}")(column_type) for kind in _TEXT_TYPES):
        raise ValueError(
            f"The column `{column}` of `{source.path}` holds {column_type}, where "
            "text was expected."
        )
    return column_type


# ArrayRecord.


def _records(source: Source, corpus: Corpus, reading: Reading) -> Iterator[Numbered]:
    """The records of an ArrayRecord file."""
    module = package("array_record.python.array_record_module", "ArrayRecord")
    reader = module.ArrayRecordReader(str(source.path), "readahead_buffer_size:0")
    if not reader.ok():
        raise ValueError(
            f"`{source.path}` cannot be read as ArrayRecord: it is no such file, or "
            "its end is missing."
        )
    try:
        total = reader.num_records()
        for start in range(0, total, _ROWS):
            numbers = range(start, min(start + _ROWS, total))
            yield from zip(numbers, _read_records(reader, numbers), strict=True)
            # Nothing is said of bytes here: records are taken to be alike.
            reading.position = lambda done=numbers.stop: source.size * done / total
    finally:
        reader.close()


def _read_records(reader: Any, numbers: range) -> list[bytes | _BadRecordError]:
    """Some records, of which those that cannot be read are bad, and the others good."""
    try:
        return reader.read(numbers.start, numbers.stop)
    except RuntimeError:
        # One of them cannot be read, and fails all that are read with it.
        return [_read_record(reader, number) for number in numbers]


def _read_record(reader: Any, number: int) -> bytes | _BadRecordError:
    try:
        return reader.read([number])[0]
    except RuntimeError as error:
        return _BadRecordError(str(error).split(";")[0])


@contextlib.contextmanager
def _opened(source: Source, reading: Reading) -> Iterator[BinaryIO]:
    """A file of text, opened and decompressed.

    How far it is read is told in bytes on disk, of what is compressed.
    """
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


# From records to documents.


def _utf8(raw: Any, key: str | None) -> str:
    """A record that is a text itself."""
    if raw is None:
        raise _BadRecordError("null, where text was expected")
    return raw.decode()


def _json_object(raw: Any) -> dict[str, Any]:
    """A record that is a JSON object."""
    text = _utf8(raw, None)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _BadRecordError(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise _BadRecordError(f"{_json_kind(record)}, where a JSON object was expected")
    return record


def _json(raw: Any, key: str | None) -> str:
    """The text under a key of a record that is a JSON object."""
    record = _json_object(raw)
    key = key or "text"
    if key not in record:
        raise _BadRecordError(f"no key `{key[:80]}`; there is {listed(record) or 'none'}")
    if not isinstance(record[key], str):
        raise _BadRecordError(f"`{key}` is {_json_kind(record[key])}, where text was expected")
    return record[key]


def _utf8_or_json(raw: Any, key: str | None) -> str:
    """A record that is a text, or with a key a JSON object."""
    if key:
        return _json(raw, key)
    return _utf8(raw, key)


def _json_kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "true or false",
        type(None): "null",
    }
    return names.get(type(value), "a number")


_FORMATS = {
    "text": _Format(_texts, "line", _utf8),
    "jsonl": _Format(_lines, "line", _json),
    "parquet": _Format(_rows, "row", _utf8),
    "arrayrecord": _Format(_records, "record", _utf8_or_json),
}
