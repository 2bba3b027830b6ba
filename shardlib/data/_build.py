r"""Making a token store: documents are read, held out or not, encoded and written with digests.

    files -> documents -> batches -> ids -> train.ids, train.ends, train.crc32
                                        \-> held_out.ids, held_out.ends, held_out.crc32
                     and at the end the description, meta.json, and the digests, sha256sums

Which part a document goes to is decided by a hash of its text, so that the same document is always
on the same side. Only a batch of documents is in memory at a time.
"""

import contextlib
import errno
import hashlib
import heapq
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardlib._progress import Progress, log
from shardlib._text import human_bytes
from shardlib.data._blocks import BLOCK_BYTES, Digests
from shardlib.data._chat import Chat, Document, Encoded, encode_documents
from shardlib.data._corpus import Corpus, Reading, Source
from shardlib.data._documents import read_documents
from shardlib.data._files import left_out
from shardlib.data._seals import PARTS, SUMS, sealed_names, sha256sum
from shardlib.data._tokenizer import (
    Bytes,
    HuggingFace,
    Tokenizer,
    learn_tokenizer,
    learned_size,
    read_tokenizer,
    special_id,
)
from shardlib.data._tokens import stored_tokenizer, tokenizer_of_store

VERSION = 3
"""The format of a store. It is part of every key, so that a store of another one is not found."""

# A batch of documents is full at so many of them, or of their characters.
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4 << 20
# A tokenizer is learned from at most so many bytes of text.
_LEARN_BYTES = 64 << 20
# Documents are ordered by a hash of so many bytes.
_HASH_BYTES = 8


def build(corpus: Corpus, sources: tuple[Source, ...], folder: Path) -> None:
    """Make the store of a corpus in an empty folder.

    Files that are no documents, change while they are read, or leave nothing to train on are a
    `ValueError`. A full disk is an `OSError` that says so.
    """
    learned = _learn(corpus, sources, folder)
    content = read_tokenizer(tokenizer_of_store(corpus, folder))
    tokenizer_sha256 = ""
    if content:
        tokenizer_sha256 = hashlib.sha256(content).hexdigest()
    tokenizer = stored_tokenizer(corpus, folder, tokenizer_sha256)
    if isinstance(corpus.chat, Chat):
        corpus.chat.check(tokenizer, corpus.tokenizer)
    builder = _Builder(corpus, sources, folder, tokenizer)
    try:
        builder.write_tokens()
        builder.write_description({"learned": learned, "tokenizer_sha256": tokenizer_sha256})
    except OSError as error:
        # A full disk is the user's to mend, and is said in words.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_is_full(error, folder, builder.dtype) from error
        raise
    for skipped in builder.reading.skipped.values():
        log("data", str(skipped))


def _disk_is_full(error: OSError, folder: Path, dtype: str) -> OSError:
    """The error for a disk that has no room for a store, or none that the user may use."""
    return OSError(
        error.errno,
        f"The disk of `{folder.parent}` is full; nothing is left of the store that was "
        f"being made. Tokens take {np.dtype(dtype).itemsize} bytes each. Make room, or "
        "name another folder: `prepare(corpus, cache=...)`",
    )


@dataclass
class _Builder:
    """A store while it is made.

    - `reading` says how far the files have been read, and what was passed over.
    - `unknown` counts tokens that stand for characters that the tokenizer lacks.
    - `described` has what the description says of each part, once that is written.
    """

    corpus: Corpus
    sources: tuple[Source, ...]
    folder: Path
    tokenizer: Bytes | HuggingFace
    reading: Reading = field(default_factory=Reading)
    start: float = field(default_factory=time.monotonic)
    unknown: int = 0
    described: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The dtype of the stored ids: two bytes each, if the vocabulary has no more."""
        if self.tokenizer.vocab <= 1 << 16:
            return "<u2"
        return "<u4"

    @cached_property
    def begin(self) -> int | None:
        """The token that each document begins with."""
        if self.corpus.begin is None:
            return None
        return special_id(self.tokenizer, self.corpus.begin, "Corpus(begin=...)")

    def write_tokens(self) -> None:
        """Read and encode all documents, and write the files of both parts.

        One pass over the files does it all, a batch of texts at a time, so that a corpus may be
        larger than memory.
        """
        documents = read_documents(self.sources, self.corpus, self.reading)
        # The files of both parts are open while documents are read, and closed by the stack.
        with _progress("reading", self.sources) as progress, contextlib.ExitStack() as stack:
            has_switches = self.corpus.chat is not None
            train, held_out = [
                _Part(stack, self.folder, name, self.dtype, self.tokenizer, has_switches)
                for name in PARTS
            ]
            for batch in _batches(documents):
                self._append(batch, train, held_out)
                progress.at(self.reading.bytes)
            _check(self.corpus, self.sources, self.reading, train, held_out)
            for name, part in zip(PARTS, (train, held_out), strict=True):
                part.finish()
                self.described[name] = part.description()

    def _append(self, batch: list[Document], train: "_Part", held_out: "_Part") -> None:
        """Encode a batch of documents, and write each to its part.

        Args:
            batch: the documents.
            train: the part for those to learn from.
            held_out: the part for those kept for evaluation, chosen by the hash of their text.
        """
        encoded = encode_documents(self.tokenizer, batch)
        if self.begin is not None and self.corpus.prefix:
            encoded = [one.beginning_with(self.begin) for one in encoded]
        documents: dict[bool, list[Encoded]] = {False: [], True: []}
        sizes = {False: 0, True: 0}
        for document, one in zip(batch, encoded, strict=True):
            raw = document.text.encode()
            side = _is_held_out(raw, self.corpus.held_out)
            documents[side].append(one)
            sizes[side] += len(raw)
            self._count_unknown(one.ids)
        train.append(documents[False], sizes[False])
        held_out.append(documents[True], sizes[True])

    def _count_unknown(self, ids: np.ndarray) -> None:
        """Count the tokens of a document that stand for characters which the tokenizer lacks."""
        if self.tokenizer.unknown is not None:
            self.unknown += int((ids == self.tokenizer.unknown).sum())

    def write_description(self, tokenizer: dict[str, Any]) -> None:
        """Write `meta.json`, and the digests of all small files.

        `tokenizer` has the digest of the tokenizer's file, and what it was learned from.
        """
        description: dict[str, Any] = {
            "version": VERSION,
            "corpus": asdict(self.corpus),
            "dtype": self.dtype,
            "vocab": self.tokenizer.vocab,
            "end": self.tokenizer.end,
            "begin": self.begin,
            **tokenizer,
            "unknown": self.unknown,
            "block_bytes": BLOCK_BYTES,
            "files": len(self.sources),
            "empty": self.reading.empty,
            "left_out": left_out(self.corpus),
            "skipped": [asdict(skipped) for skipped in self.reading.skipped.values()],
            "sizes": {path.name: path.stat().st_size for path in sorted(self.folder.iterdir())},
            "seconds": round(time.monotonic() - self.start, 1),
            **self.described,
        }
        _write_text(self.folder / "meta.json", json.dumps(description, indent=1))
        # Last, since it has a digest of the description too.
        sums = [sha256sum(self.folder / name).line() for name in sealed_names(self.corpus)]
        _write_text(self.folder / SUMS, "".join(sums))


def _progress(doing: str, sources: tuple[Source, ...]) -> Progress:
    """What shows work on all files."""
    total = sum(source.size for source in sources)
    return Progress("data", f"{doing} {describe_files(sources)}", total)


def _learn(corpus: Corpus, sources: tuple[Source, ...], folder: Path) -> dict[str, int]:
    """Put the tokenizer into the folder of a store, if it is one to be learned.

    Returns from how many documents and bytes it was learned, or nothing.
    """
    size = learned_size(corpus.tokenizer)
    if size is None:
        return {}
    sample = _sample(corpus, sources)
    total = sum(map(len, sample))
    with Progress("data", f"learning {size:,} tokens", total) as progress:
        learned = learn_tokenizer(size, _texts(sample, progress), corpus.end).to_str(pretty=True)
    _write_text(folder / "tokenizer.json", learned)
    return {"learned_documents": len(sample), "learned_bytes": total}


def _texts(sample: list[bytes], progress: Progress) -> Iterator[str]:
    """The texts of a sample, while whoever reads them is shown to get on."""
    done = 0
    for raw in sample:
        # A text that was cut may end within a character.
        yield raw.decode(errors="ignore")
        done += len(raw)
        progress.at(done)


def _sample(corpus: Corpus, sources: tuple[Source, ...]) -> list[bytes]:
    """The documents that a tokenizer is learned from: all, or as many as it may be learned from.

    Those are chosen that come first by the hash of their text: as good as drawn, and the same ones
    in whatever order the files are read.
    """
    # A heap of documents with the last one by hash on top, which is the first to be given up.
    chosen: list[tuple[int, int, bytes]] = []
    reading, total = Reading(), 0
    with _progress("choosing from", sources) as progress:
        for number, document in enumerate(read_documents(sources, corpus, reading)):
            raw = document.text.encode()
            if not _is_held_out(raw, corpus.held_out):
                part = raw[:_LEARN_BYTES]
                # The number breaks ties between documents of one text.
                heapq.heappush(chosen, (-_text_hash(raw), -number, part))
                total += len(part)
            while total > _LEARN_BYTES:
                total -= len(heapq.heappop(chosen)[2])
            progress.at(reading.bytes)
    return [raw for _, _, raw in chosen]


class _Part:
    """One part of a store, `train` or `held_out`, while it is written.

    It has three files: the ids of all documents, where in them each document ends, and a digest of
    each block of the ids; of conversations a fourth, where tokens begin to be learned, and end.
    """

    def __init__(
        self,
        stack: contextlib.ExitStack,
        folder: Path,
        name: str,
        dtype: str,
        tokenizer: Tokenizer,
        has_switches: bool,
    ) -> None:
        # "x" makes new files, and so never writes through a link that another put there.
        self.ids = stack.enter_context((folder / f"{name}.ids").open("xb"))
        self.ends = stack.enter_context((folder / f"{name}.ends").open("xb"))
        self.crc32 = stack.enter_context((folder / f"{name}.crc32").open("xb"))
        self.switches: Any = None
        if has_switches:
            self.switches = stack.enter_context((folder / f"{name}.switches").open("xb"))
        self.is_learning = False
        self.dtype, self.vocab = dtype, tokenizer.vocab
        self.end = np.array([tokenizer.end], dtype)
        self.tokens = self.documents = self.bytes = 0
        self.hash, self.digests = hashlib.blake2b(digest_size=16), Digests()

    def append(self, documents: list[Encoded], size_bytes: int) -> None:
        """Write the ids of some documents, whose texts have so many bytes in all.

        Each is followed by the token that ends documents. Ids beyond the vocabulary are refused:
        the dtype in which ids are stored would cut them to others.
        """
        if not documents:
            return
        pieces, lengths, learned = [], [], []
        for document in documents:
            pieces += [document.ids, self.end]
            lengths.append(len(document.ids) + 1)
            # The end of a document is learned with the last that is said in it.
            is_end_learned = document.learned.size > 0 and document.learned[-1]
            learned += [document.learned, np.array([is_end_learned])]
        # Before ids are cut to the dtype in which they are stored, each must be in the vocabulary.
        joined = np.concatenate(pieces)
        highest = int(joined.max())
        if highest >= self.vocab:
            raise ValueError(
                f"The tokenizer gave the id {highest}, and its vocabulary has {self.vocab} tokens: "
                "its file contradicts itself."
            )
        stored = joined.astype(self.dtype)
        self.hash.update(stored.data)
        self.digests.update(stored.data)
        _write(self.ids, stored)
        _write(self.ends, self.tokens + np.cumsum(lengths, dtype="<i8"))
        if self.switches is not None:
            self._write_switches(np.concatenate(learned))
        self.tokens += len(stored)
        self.documents += len(documents)
        self.bytes += size_bytes

    def _write_switches(self, learned: np.ndarray) -> None:
        """Write where tokens begin to be learned, and end, of those that come next."""
        before = np.concatenate([[self.is_learning], learned[:-1]])
        self.is_learning = bool(learned[-1])
        switches = (self.tokens + np.flatnonzero(learned != before)).astype("<i8")
        self.hash.update(switches.data)
        _write(self.switches, switches)

    def finish(self) -> None:
        """Write the digests, and have all of it on disk."""
        _write(self.crc32, self.digests.finish())
        for file in (self.ids, self.ends, self.crc32, self.switches):
            if file is not None:
                _to_disk(file)

    def description(self) -> dict[str, Any]:
        """What the description of the store says of this part."""
        return {"bytes": self.bytes, "fingerprint": self.hash.hexdigest()}


def _write(file: BinaryIO, array: np.ndarray) -> None:
    file.write(array.data)


def _write_text(path: Path, text: str) -> None:
    """Write a new file, and have it on disk."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        _to_disk(file)


def _to_disk(file: Any) -> None:
    # Without this, a machine that loses power may keep a renamed folder with empty files.
    file.flush()
    os.fsync(file.fileno())


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in lists, each large enough that encoding it keeps all threads busy."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document.text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _is_held_out(text: bytes, share: float) -> bool:
    """Whether a document is kept for evaluation.

    Its content decides, so that its duplicates go with it.
    """
    return _text_hash(text) < share * 2 ** (8 * _HASH_BYTES)


def _text_hash(text: bytes) -> int:
    """A number below 2**64 that a document's text decides, as good as drawn."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=_HASH_BYTES).digest(), "little")


def _check(
    corpus: Corpus, sources: tuple[Source, ...], reading: Reading, train: _Part, held_out: _Part
) -> None:
    """Refuse files without documents, without any to train on, or that changed meanwhile.

    It comes after all has been read, and before anything counts as prepared.
    """
    if not train.documents + held_out.documents:
        raise ValueError(_describe_no_documents(sources, reading))
    if corpus.separator is not None and not reading.separators:
        ends = ""
        if "\n" in corpus.separator:
            ends = " Lines that end as Windows has them have `\\r\\n`."
        raise ValueError(
            f"`Corpus(separator={corpus.separator!r})` is in none of the files, each of which "
            f"would be one document.{ends} Leave it out if that is meant."
        )
    if not train.documents:
        raise ValueError(
            f"`Corpus(held_out={corpus.held_out})` leaves nothing to train on: of "
            f"{held_out.documents} documents all are held out. Whole documents are; with few of "
            "them, `held_out=0` and a corpus of its own for evaluation."
        )
    for source in sources:
        status = source.path.stat()
        # What was read of a file that changes may be half of one version and half of another.
        if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
            raise ValueError(
                f"`{source.path}` changed while it was read. Prepare again when it is finished."
            )


def _describe_no_documents(sources: tuple[Source, ...], reading: Reading) -> str:
    """The error for files that hold no document, or only empty and bad ones."""
    named = ", ".join(f"`{source.path}`" for source in sources[:3])
    if len(sources) > 3:
        named += ", …"
    skipped = sum(skipped.count for skipped in reading.skipped.values())
    return f"{named} hold no document: {reading.empty} are empty and {skipped} were skipped."


def describe_files(sources: tuple[Source, ...]) -> str:
    """The files of a corpus for a message: the name of one, or how many there are, and their size.

    >>> describe_files((Source(Path("a/wiki.txt"), "text", 2048, 0),))
    'wiki.txt (2.0 KiB)'
    """
    size = human_bytes(sum(source.size for source in sources))
    if len(sources) == 1:
        return f"{sources[0].path.name} ({size})"
    return f"{len(sources)} files ({size})"
