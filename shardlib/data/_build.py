"""Making a token store: documents are read, held out or not, encoded and written with their
digests.
"""

import contextlib
import errno
import hashlib
import heapq
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardlib._text import human_bytes
from shardlib.data._blocks import BLOCK_BYTES, Digests
from shardlib.data._corpus import Corpus, Reading, Source
from shardlib.data._documents import read_documents
from shardlib.data._files import left_out
from shardlib.data._progress import Progress, log
from shardlib.data._seals import PARTS, SUMS, sealed_names, sha256sum
from shardlib.data._tokenizer import Tokenizer, learn_tokenizer, learned_size, read_tokenizer
from shardlib.data._tokens import stored_tokenizer, tokenizer_of_store

VERSION = 2  # of what a store is: part of every key
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4 << 20
_LEARN_BYTES = 64 << 20  # of text, at most, that a tokenizer is learned from


def build(corpus: Corpus, sources: tuple[Source, ...], folder: Path) -> None:
    """Make the store of a corpus in an empty folder."""
    learned = _learn(corpus, sources, folder)
    content = read_tokenizer(tokenizer_of_store(corpus, folder))
    tokenizer_sha256 = hashlib.sha256(content).hexdigest() if content else ""
    tokenizer = stored_tokenizer(corpus, folder, tokenizer_sha256)
    dtype = "<u2" if tokenizer.vocab <= 1 << 16 else "<u4"
    reading, start, unknown = Reading(), time.monotonic(), 0
    progress = Progress(
        f"reading {describe_files(sources)}", sum(source.size for source in sources)
    )
    try:
        with contextlib.ExitStack() as stack:
            parts = [_Part(stack, folder, name, dtype, tokenizer) for name in PARTS]
            for texts in _batches(read_documents(sources, corpus, reading)):
                raw = [text.encode() for text in texts]
                held_out = [_is_held_out(one, corpus.held_out) for one in raw]
                encoded = tokenizer.encode_batch(texts)
                if tokenizer.unknown is not None:
                    unknown += sum(int((ids == tokenizer.unknown).sum()) for ids in encoded)
                for part, side in zip(parts, (False, True), strict=True):
                    chosen = [k for k, other in enumerate(held_out) if other == side]
                    part.append([encoded[k] for k in chosen], sum(len(raw[k]) for k in chosen))
                progress.at(reading.bytes)
            _check(corpus, sources, reading, *parts)
            for part in parts:
                part.finish()
        told: dict[str, Any] = {
            "version": VERSION,
            "corpus": asdict(corpus),
            "dtype": dtype,
            "vocab": tokenizer.vocab,
            "end": tokenizer.end,
            "learned": learned,
            "tokenizer_sha256": tokenizer_sha256,
            "unknown": unknown,
            "block_bytes": BLOCK_BYTES,
            "files": len(sources),
            "empty": reading.empty,
            "left_out": left_out(corpus),
            "skipped": [asdict(one) for one in reading.skipped.values()],
            "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
            "seconds": round(time.monotonic() - start, 1),
            **{name: part.told() for name, part in zip(PARTS, parts, strict=True)},
        }
        _write_text(folder / "meta.json", json.dumps(told, indent=1))
        _write_text(
            folder / SUMS, "".join(sha256sum(folder / name).line() for name in sealed_names(corpus))
        )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                error.errno,
                f"The disk of `{folder.parent}` is full; nothing is left of the store that was "
                f"being made. Tokens take {np.dtype(dtype).itemsize} bytes each. Make room, or "
                "name another folder: `prepare(corpus, cache=...)`",
            ) from error
        raise
    finally:
        progress.close()
    for one in reading.skipped.values():
        log(str(one))


def _learn(corpus: Corpus, sources: tuple[Source, ...], folder: Path) -> dict[str, int]:
    """Put the tokenizer into the folder of a store, if it is one to be learned; tell what it was
    learned from.
    """
    size = learned_size(corpus.tokenizer)
    if size is None:
        return {}
    texts = _sample(corpus, sources)
    total = sum(map(len, texts))
    progress = Progress(f"learning {size:,} tokens", total)

    def told() -> Iterator[str]:
        done = 0
        for text in texts:
            yield text.decode(errors="ignore")  # one that was cut may end within a character
            progress.at(done := done + len(text))

    try:
        learned = learn_tokenizer(size, told(), corpus.end).to_str(pretty=True)
    finally:
        progress.close()
    _write_text(folder / "tokenizer.json", learned)
    return {"learned_documents": len(texts), "learned_bytes": total}


def _sample(corpus: Corpus, sources: tuple[Source, ...]) -> list[bytes]:
    """Documents to train on: all, or those that come first in an order of no meaning, as many as a
    tokenizer is learned from.
    """
    chosen: list[tuple[int, int, bytes]] = []  # a heap, the last in that order on top
    reading, total = Reading(), 0
    progress = Progress(
        f"choosing from {describe_files(sources)}", sum(source.size for source in sources)
    )
    try:
        for number, text in enumerate(read_documents(sources, corpus, reading)):
            raw = text.encode()
            if not _is_held_out(raw, corpus.held_out):
                part = raw[:_LEARN_BYTES]
                heapq.heappush(chosen, (-_place(raw), -number, part))
                total += len(part)
            while total > _LEARN_BYTES:
                total -= len(heapq.heappop(chosen)[2])
            progress.at(reading.bytes)
    finally:
        progress.close()
    return [raw for _, _, raw in chosen]


class _Part:
    """One part of a store while it is written."""

    def __init__(
        self, stack: contextlib.ExitStack, folder: Path, name: str, dtype: str, tokenizer: Tokenizer
    ) -> None:
        # Files of their own, never through a link that another put there.
        self.ids = stack.enter_context((folder / f"{name}.ids").open("xb"))
        self.ends = stack.enter_context((folder / f"{name}.ends").open("xb"))
        self.crc32 = stack.enter_context((folder / f"{name}.crc32").open("xb"))
        self.dtype, self.vocab, self.end = dtype, tokenizer.vocab, np.array([tokenizer.end], dtype)
        self.tokens = self.documents = self.bytes = 0
        self.hash, self.digests = hashlib.blake2b(digest_size=16), Digests()

    def append(self, documents: list[np.ndarray], size_bytes: int) -> None:
        if not documents:
            return
        joined = np.concatenate([one for ids in documents for one in (ids, self.end)])
        if (highest := int(joined.max())) >= self.vocab:
            raise ValueError(
                f"The tokenizer gave the id {highest}, and its vocabulary has {self.vocab} tokens: "
                "its file contradicts itself."
            )
        ended = joined.astype(self.dtype)
        ends = self.tokens + np.cumsum([len(ids) + 1 for ids in documents], dtype="<i8")
        self.hash.update(ended.data)
        self.digests.update(ended.data)
        _write(self.ids, ended)
        _write(self.ends, ends)
        self.tokens += len(ended)
        self.documents += len(documents)
        self.bytes += size_bytes

    def finish(self) -> None:
        """Write the digests, and have all of it on disk."""
        _write(self.crc32, self.digests.finish())
        for file in (self.ids, self.ends, self.crc32):
            _to_disk(file)

    def told(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "fingerprint": self.hash.hexdigest()}


def _write(file: BinaryIO, array: np.ndarray) -> None:
    file.write(array.data)


def _write_text(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        _to_disk(file)


def _to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _is_held_out(text: bytes, share: float) -> bool:
    """Whether a document is kept for evaluation, told from its content so that its duplicates go
    with it.
    """
    return _place(text) < share * 2**64


def _place(text: bytes) -> int:
    """Where a document stands, of 2**64 places, in an order that is as good as drawn."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _check(
    corpus: Corpus, sources: tuple[Source, ...], reading: Reading, train: _Part, held_out: _Part
) -> None:
    if not train.documents + held_out.documents:
        named = ", ".join(f"`{source.path}`" for source in sources[:3]) + (
            ", …" if len(sources) > 3 else ""
        )
        passed = (
            f"{reading.empty} are empty and {sum(one.count for one in reading.skipped.values())} "
            "were skipped"
        )
        raise ValueError(f"{named} hold no document: {passed}.")
    if not train.documents:
        raise ValueError(
            f"`Corpus(held_out={corpus.held_out})` leaves nothing to train on: of "
            f"{held_out.documents} documents all are held out. Whole documents are; with few of "
            "them, `held_out=0` and a corpus of its own for evaluation."
        )
    for source in sources:
        status = source.path.stat()
        if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
            raise ValueError(
                f"`{source.path}` changed while it was read. Prepare again when it is finished."
            )


def describe_files(sources: tuple[Source, ...]) -> str:
    size = human_bytes(sum(source.size for source in sources))
    return (
        f"{sources[0].path.name} ({size})"
        if len(sources) == 1
        else f"{len(sources)} files ({size})"
    )
