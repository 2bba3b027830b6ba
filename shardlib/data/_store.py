"""Documents as tokens on disk: made once, memory-mapped ever after.

A store is a folder. For each of its parts, `train` and `held_out`, there are the tokens of all documents one after the
other, each document ended by the end token, and where each document ends. Whatever changes the tokens is in the folder's
name: the files with their sizes and times, the tokenizer's content, the choices of the `Corpus`. So a store is never out
of date; it is there, or it is built.
"""

import contextlib
import errno
import functools
import hashlib
import heapq
import json
import math
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardlib._text import human_bytes, table
from shardlib.data._claim import claim
from shardlib.data._files import Corpus, Reading, Skipped, Source, find_files, left_out, read_documents
from shardlib.data._progress import Progress, say
from shardlib.data._tokenizer import Tokenizer, learn_tokenizer, learned_size, load_tokenizer, tokenizer_file

_VERSION = 1  # of what a store is: part of every key
_PARTS = ("train", "held_out")
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4 << 20
_LEARN_BYTES = 64 << 20  # of text, at most, that a tokenizer is learned from


@dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """Documents, one after the other, as ids below `vocab`; each is ended by the id `end`.

    `ids` are all tokens, `ends[k]` is where document k ends and the next begins; both may be memory-mapped. `bytes` is
    the size of the documents' text in UTF-8, `fingerprint` a hash of all tokens.

    >>> tokens = Tokens(np.array([7, 8, 0, 9, 0], np.uint16), np.array([3, 5]), vocab=10, end=0, bytes=3)
    >>> tokens
    Tokens(5 of 2 documents, vocab=10)
    >>> tokens.ids[tokens.ends[0] : tokens.ends[1]].tolist()
    [9, 0]
    """

    ids: np.ndarray
    ends: np.ndarray
    vocab: int
    end: int
    bytes: int
    fingerprint: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Tokens({len(self)} of {self.documents} documents, vocab={self.vocab})"

    @property
    def documents(self) -> int:
        """How many there are."""
        return len(self.ends)

    def bits_per_byte(self, loss: float) -> float:
        """What a mean loss per token, in nats, is per byte of text: comparable between tokenizers.

        >>> round(Tokens(np.zeros(5, np.uint16), np.array([5]), vocab=10, end=0, bytes=20).bits_per_byte(math.log(16)), 6)
        1.0
        """
        return loss / math.log(2) * len(self) / self.bytes


@dataclass(frozen=True, eq=False, repr=False)
class Prepared:
    """A corpus as tokens: what there is to train on, and what is held out. `print` shows what it came to.

    `learned_documents` and `learned_bytes` are what the tokenizer was learned from, if it was.
    """

    corpus: Corpus
    folder: Path
    train: Tokens
    held_out: Tokens
    files: int
    empty: int
    skipped: tuple[Skipped, ...]
    left_out: tuple[str, ...]
    learned_documents: int = 0
    learned_bytes: int = 0

    def __repr__(self) -> str:
        return f"Prepared({self.corpus}, train={self.train}, held_out={self.held_out})"

    def __str__(self) -> str:
        return self.describe()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens, to encode prompts and decode samples."""
        return _tokenizer(self.corpus, self.folder)

    def describe(self) -> str:
        """Sizes of both parts, and what was passed over, for people."""
        rows = [("", "documents", "tokens", "text", "bytes a token")]
        for name, part in (("train", self.train), ("held out", self.held_out)):
            share = f"{part.bytes / len(part):.2f}" if len(part) else "-"
            rows.append((name, f"{part.documents:,}", f"{len(part):,}", human_bytes(part.bytes), share))
        files = f"{self.files:,} file{'s' * (self.files != 1)}"
        lines = [
            f"{files}, {self.train.vocab:,} tokens in the vocabulary, in {self.folder}",
            "",
            table(rows, (1, 2, 3, 4)),
        ]
        notes = []
        if count := self.learned_documents:
            size = human_bytes(self.learned_bytes)
            notes.append(f"tokenizer learned from {count:,} document{'s' * (count != 1)} ({size})")
        if self.empty:
            notes.append(f"{self.empty:,} empty document{'s' * (self.empty != 1)} left out")
        if self.left_out:
            notes.append(f"files left out that end in {', '.join(self.left_out)}")
        notes += map(str, self.skipped)
        return "\n".join([*lines, "", *notes] if notes else lines)


def prepare(corpus: Corpus, cache: str | os.PathLike[str] | None = None) -> Prepared:
    r"""The tokens of a corpus, from the cache or made now.

    `cache` is a folder, `~/.cache/shardlib` unless given. Of several processes that ask at once, on a shared file system
    too, one makes them and the others wait. Memory is bounded by the largest document, not by the corpus.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> lines = Path(folder.name, "lines.jsonl")
    >>> size = lines.write_text('{"text": "To be"}\n{"text": "or not to be"}\n')
    >>> prepared = prepare(Corpus(str(lines), held_out=0), cache=folder.name)
    >>> prepared.train
    Tokens(19 of 2 documents, vocab=257)
    >>> prepared.tokenizer.decode(prepared.train.ids[:5])
    'To be'
    >>> folder.cleanup()
    """
    if not isinstance(corpus, Corpus):
        raise ValueError(f"`prepare` takes a `Corpus`, such as `Corpus({str(corpus)!r})`; got {type(corpus).__name__}.")
    sources = find_files(corpus)
    folder = cache_folder(cache) / _key(corpus, sources)
    damage = ""
    while True:
        opened = _open(folder, corpus)
        if isinstance(opened, Prepared):
            return opened
        if opened and opened != damage:
            damage = opened
            say(f"{folder} is damaged, {damage}; it is made anew")
        with claim(folder.with_suffix(".lock"), f"preparing {_files(sources)} in {folder}") as scratch:
            # Another may have finished between the look and the claim.
            if scratch is not None and not isinstance(_open(folder, corpus), Prepared):
                try:
                    _build(corpus, sources, scratch)
                    _publish(scratch, folder, corpus)
                except FileNotFoundError:
                    if scratch.exists():
                        raise
                    say(f"{folder} is being made by another, which took this process for dead")


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder for what is made once and kept: `~/.cache/shardlib`, or under `$XDG_CACHE_HOME`, unless another is given."""
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "shardlib"
    folder = Path(cache).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"The folder `{folder}` for tokens cannot be made ({error.strerror}); name another: `prepare(corpus, cache=...)`."
        ) from error
    if not os.access(folder, os.W_OK):
        raise ValueError(
            f"The folder `{folder}` for tokens cannot be written to; name another: `prepare(corpus, cache=...)`."
        )
    return folder


def _key(corpus: Corpus, sources: tuple[Source, ...]) -> str:
    """A name for the tokens. Where the files are named from another folder, it is the same."""
    tokenizer = tokenizer_file(corpus.tokenizer)
    chosen = {name: value for name, value in asdict(corpus).items() if name not in ("files", "format")}
    chosen["held_out"] = float(corpus.held_out)
    chosen["tokenizer"] = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer else corpus.tokenizer
    files = [(str(one.path), one.format, one.size, one.modified_ns) for one in sources]
    return hashlib.sha256(json.dumps([_VERSION, chosen, files]).encode()).hexdigest()[:16]


def _files(sources: tuple[Source, ...]) -> str:
    size = human_bytes(sum(source.size for source in sources))
    return f"{sources[0].path.name} ({size})" if len(sources) == 1 else f"{len(sources)} files ({size})"


def _open(folder: Path, corpus: Corpus) -> Prepared | str:
    """What lies in a folder; or what is wrong with it, an empty text where there is nothing."""
    try:
        told = json.loads((folder / "meta.json").read_text())
        for name, size in told["sizes"].items():
            if (found := (folder / name).stat().st_size) != size:
                return f"`{name}` has {found} of {size} bytes"
        train, held_out = (
            Tokens(
                _mapped(folder / f"{part}.ids", told["dtype"]),
                _mapped(folder / f"{part}.ends", "<i8"),
                told["vocab"],
                told["end"],
                **told[part],
            )
            for part in _PARTS
        )
        skipped = tuple(Skipped(**one) for one in told["skipped"])
        learned = told["learned"] if learned_size(corpus.tokenizer) else {}
        return Prepared(
            corpus, folder, train, held_out, told["files"], told["empty"], skipped, tuple(told["left_out"]), **learned
        )
    except FileNotFoundError as error:
        return f"`{Path(error.filename).name}` is missing" if folder.is_dir() else ""
    except (KeyError, TypeError, ValueError):
        return "`meta.json` is not as it was written"


def _mapped(path: Path, dtype: str) -> np.ndarray:
    if not path.stat().st_size:
        return np.empty(0, dtype)  # a file without bytes cannot be mapped
    return np.memmap(path, dtype, mode="r")


def _build(corpus: Corpus, sources: tuple[Source, ...], folder: Path) -> None:
    learned = _learn(corpus, sources, folder)
    tokenizer = _tokenizer(corpus, folder)
    dtype = "<u2" if tokenizer.vocab <= 1 << 16 else "<u4"
    reading, start = Reading(), time.monotonic()
    progress = Progress(f"reading {_files(sources)}", sum(source.size for source in sources))
    try:
        with contextlib.ExitStack() as stack:
            parts = [_Part(stack, folder, name, dtype, tokenizer.end) for name in _PARTS]
            for texts in _batches(read_documents(sources, corpus, reading)):
                raw = [text.encode() for text in texts]
                held_out = [_is_held_out(one, corpus.held_out) for one in raw]
                encoded = tokenizer.encode_batch(texts)
                for part, side in zip(parts, (False, True), strict=True):
                    chosen = [k for k, other in enumerate(held_out) if other == side]
                    part.append([encoded[k] for k in chosen], sum(len(raw[k]) for k in chosen))
                progress.at(reading.bytes)
            _check(corpus, sources, reading, *parts)
            for part in parts:
                part.flush()
        told: dict[str, Any] = {
            "version": _VERSION,
            "corpus": asdict(corpus),
            "dtype": dtype,
            "vocab": tokenizer.vocab,
            "end": tokenizer.end,
            "learned": learned,
            "files": len(sources),
            "empty": reading.empty,
            "left_out": left_out(corpus),
            "skipped": [asdict(one) for one in reading.skipped.values()],
            "sizes": {path.name: path.stat().st_size for path in sorted(folder.iterdir())},
            "seconds": round(time.monotonic() - start, 1),
            **{name: part.told() for name, part in zip(_PARTS, parts, strict=True)},
        }
        with (folder / "meta.json").open("w") as file:
            json.dump(told, file, indent=1)
            _to_disk(file)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                error.errno,
                f"The disk of `{folder.parent}` is full; nothing is left of the store that was being made. Tokens take "
                f"{np.dtype(dtype).itemsize} bytes each. Make room, or name another folder: `prepare(corpus, cache=...)`",
            ) from error
        raise
    finally:
        progress.close()
    for one in reading.skipped.values():
        say(str(one))


def _tokenizer(corpus: Corpus, folder: Path) -> Tokenizer:
    """The tokenizer of a store, which lies in its folder if it was learned."""
    learned = learned_size(corpus.tokenizer)
    return load_tokenizer(str(folder / "tokenizer.json") if learned else corpus.tokenizer, corpus.end)


def _learn(corpus: Corpus, sources: tuple[Source, ...], folder: Path) -> dict[str, int]:
    """Put the tokenizer into the folder of a store, if it is one to be learned; tell what it was learned from."""
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
    with (folder / "tokenizer.json").open("w", encoding="utf-8") as file:
        file.write(learned)
        _to_disk(file)
    return {"learned_documents": len(texts), "learned_bytes": total}


def _sample(corpus: Corpus, sources: tuple[Source, ...]) -> list[bytes]:
    """Documents to train on: all, or those that come first in an order of no meaning, as many as a tokenizer is learned from."""
    chosen: list[tuple[int, int, bytes]] = []  # a heap, the last in that order on top
    reading, total = Reading(), 0
    progress = Progress(f"choosing from {_files(sources)}", sum(source.size for source in sources))
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

    def __init__(self, stack: contextlib.ExitStack, folder: Path, name: str, dtype: str, end: int) -> None:
        self.ids = stack.enter_context((folder / f"{name}.ids").open("wb"))
        self.ends = stack.enter_context((folder / f"{name}.ends").open("wb"))
        self.dtype, self.end = dtype, np.array([end], dtype)
        self.tokens = self.documents = self.bytes = 0
        self.hash = hashlib.blake2b(digest_size=16)

    def append(self, documents: list[np.ndarray], size_bytes: int) -> None:
        if not documents:
            return
        ended = np.concatenate(
            [one for ids in documents for one in (ids, self.end)], dtype=self.dtype, casting="unsafe"
        )
        ends = self.tokens + np.cumsum([len(ids) + 1 for ids in documents], dtype="<i8")
        self.hash.update(ended.data)
        _write(self.ids, ended)
        _write(self.ends, ends)
        self.tokens += len(ended)
        self.documents += len(documents)
        self.bytes += size_bytes

    def flush(self) -> None:
        _to_disk(self.ids)
        _to_disk(self.ends)

    def told(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "fingerprint": self.hash.hexdigest()}


def _write(file: BinaryIO, array: np.ndarray) -> None:
    file.write(array.data)


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
    """Whether a document is kept for evaluation, told from its content so that its duplicates go with it."""
    return _place(text) < share * 2**64


def _place(text: bytes) -> int:
    """Where a document stands, of 2**64 places, in an order that is as good as drawn."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _check(corpus: Corpus, sources: tuple[Source, ...], reading: Reading, train: _Part, held_out: _Part) -> None:
    if not train.documents + held_out.documents:
        named = ", ".join(f"`{source.path}`" for source in sources[:3]) + (", …" if len(sources) > 3 else "")
        passed = f"{reading.empty} are empty and {sum(one.count for one in reading.skipped.values())} were skipped"
        raise ValueError(f"{named} hold no document: {passed}.")
    if not train.documents:
        raise ValueError(
            f"`Corpus(held_out={corpus.held_out})` leaves nothing to train on: of {held_out.documents} documents all are held "
            "out. Whole documents are; with few of them, `held_out=0` and a corpus of its own for evaluation."
        )
    for source in sources:
        status = source.path.stat()
        if (status.st_size, status.st_mtime_ns) != (source.size, source.modified_ns):
            raise ValueError(f"`{source.path}` changed while it was read. Prepare again when it is finished.")


def _publish(scratch: Path, folder: Path, corpus: Corpus) -> None:
    """Give what was built its name; or leave it, where another took this process for dead and was faster."""
    aside = scratch.with_suffix(".damaged")
    if not isinstance(_open(folder, corpus), Prepared):
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside)
    try:
        scratch.rename(folder)
    except OSError:
        if not isinstance(_open(folder, corpus), Prepared):
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
