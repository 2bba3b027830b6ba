"""Documents as tokens on disk: made once, memory-mapped ever after.

A store is a folder. For each of its parts, `train` and `held_out`, there are the tokens of all documents one after the
other, each document ended by the end token, and where each document ends. Whatever changes the tokens is in the folder's
name: the files with their sizes and times, the tokenizer's content, the choices of the `Corpus`. So a store is never out
of date; it is there, or it is built.

Every byte of a store is under a digest. Of the tokens, `train.ids` and `held_out.ids`, each block has its own, in
`train.crc32` and `held_out.crc32`, compared when the block is first read. All other files are small beside them: their
digests are in `sha256sums`, as the program `sha256sum` writes them, and are compared when the store is opened.
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
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from shardlib._text import human_bytes, table
from shardlib.data._blocks import BLOCK_BYTES, SUSPECT, CheckedArray, Digests
from shardlib.data._checks import expanded, path_text, shown, whole_number
from shardlib.data._claim import claim
from shardlib.data._files import Corpus, Reading, Skipped, Source, find_files, left_out, read_documents
from shardlib.data._progress import Progress, say
from shardlib.data._tokenizer import (
    Bytes,
    HuggingFace,
    Tokenizer,
    learn_tokenizer,
    learned_size,
    make_tokenizer,
    read_tokenizer,
    tokenizer_file,
)

_VERSION = 2  # of what a store is: part of every key
_PARTS = ("train", "held_out")
_SUMS = "sha256sums"
_MOST_IDS = 1 << 31  # examples hold them as int32
_BATCH_DOCUMENTS = 1024
_BATCH_CHARACTERS = 4 << 20
_LEARN_BYTES = 64 << 20  # of text, at most, that a tokenizer is learned from


@dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """Documents, one after the other, as ids below `vocab`; each is ended by the id `end`.

    `ids` are all tokens, `ends[k]` is where document k ends and the next begins; both may be memory-mapped. `bytes` is
    the size of the documents' text in UTF-8, `fingerprint` a hash of all tokens.

    The `ids` of a store are read as an array is, by numbers, slices and `np.asarray`; what is read is checked against its
    digest first.

    >>> tokens = Tokens(np.array([7, 8, 0, 9, 0], np.uint16), np.array([3, 5]), vocab=10, end=0, bytes=3)
    >>> tokens
    Tokens(5 of 2 documents, vocab=10)
    >>> tokens.ids[tokens.ends[0] : tokens.ends[1]].tolist()
    [9, 0]
    """

    ids: np.ndarray | CheckedArray
    ends: np.ndarray
    vocab: int
    end: int
    bytes: int
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for name, kinds in (("ids", np.ndarray | CheckedArray), ("ends", np.ndarray)):
            array = getattr(self, name)
            if not isinstance(array, kinds) or array.ndim != 1 or array.dtype.kind not in "iu":
                raise ValueError(f"`Tokens({name}={shown(array)})` must be a numpy array of whole numbers, of one dim.")
        vocab = whole_number("Tokens(vocab=...)", self.vocab, 1, _MOST_IDS)
        whole_number("Tokens(end=...)", self.end, 0, vocab - 1)
        whole_number("Tokens(bytes=...)", self.bytes, 0, (1 << 63) - 1)
        if not isinstance(self.fingerprint, str):
            raise ValueError(f"`Tokens(fingerprint={shown(self.fingerprint)})` is a text.")
        last = int(self.ends[-1]) if len(self.ends) else 0
        rises = not len(self.ends) or (self.ends[0] > 0 and bool((self.ends[1:] > self.ends[:-1]).all()))
        if last != len(self.ids) or not rises:
            raise ValueError(
                f"`Tokens(ends=...)` are where documents end: each beyond the one before, since a document has its end token at "
                f"least, and the last is the number of tokens, {len(self.ids)}; got {shown(self.ends)}."
            )

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
        try:
            nats = float(loss)
        except (TypeError, ValueError, OverflowError):
            nats = None
        if nats is None or isinstance(loss, str | bytes | bool):
            raise ValueError(f"`bits_per_byte(loss={shown(loss)})` is a mean loss in nats per token, a number.")
        if not self.bytes:
            raise ValueError(
                f"{self} are of a text of 0 bytes, which has no bits per byte. Hold out more: `Corpus(held_out=...)`."
            )
        return nats / math.log(2) * len(self) / self.bytes

    def check_vocab(self, embeddings: int) -> None:
        """Refuse a model whose embedding table has fewer rows than there are ids: what lies beyond has no embedding.

        Call it where data meets model, before the first step.

        >>> tokens = Tokens(np.array([7, 0], np.uint16), np.array([2]), vocab=300, end=0, bytes=1)
        >>> tokens.check_vocab(512)
        >>> tokens.check_vocab(256)
        Traceback (most recent call last):
        ValueError: The data has token ids below 300, and the model has 256 embeddings: it needs 300 or more.
        """
        if whole_number("check_vocab(embeddings=...)", embeddings, 1, (1 << 63) - 1) < self.vocab:
            raise ValueError(
                f"The data has token ids below {self.vocab}, and the model has {embeddings} embeddings: it needs "
                f"{self.vocab} or more."
            )


@dataclass(frozen=True, eq=False, repr=False)
class Prepared:
    """A corpus as tokens: what there is to train on, and what is held out. `print` shows what it came to.

    `learned_documents` and `learned_bytes` are what the tokenizer was learned from, if it was. `unknown` counts the tokens that
    stand for characters the tokenizer lacks. `tokenizer_sha256` is the digest of the tokenizer's file.
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
    unknown: int = 0
    tokenizer_sha256: str = ""

    def __post_init__(self) -> None:
        for name in ("files", "empty", "learned_documents", "learned_bytes", "unknown"):
            number = whole_number(f"Prepared({name}=...)", getattr(self, name), 0, (1 << 63) - 1)
            object.__setattr__(self, name, number)
        kinds = {"corpus": Corpus, "folder": Path, "train": Tokens, "held_out": Tokens, "tokenizer_sha256": str}
        for name, kind in kinds.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ValueError(
                    f"`Prepared({name}={shown(value)})` is no `{kind.__name__}`. `prepare(corpus)` makes it."
                )
        for name, kind in (("skipped", Skipped), ("left_out", str)):
            value = getattr(self, name)
            if not isinstance(value, tuple) or not all(isinstance(one, kind) for one in value):
                raise ValueError(
                    f"`Prepared({name}={shown(value)})` is no tuple of `{kind.__name__}`. `prepare(corpus)` makes it."
                )

    def __repr__(self) -> str:
        return f"Prepared({self.corpus}, train={self.train}, held_out={self.held_out})"

    def __str__(self) -> str:
        return self.describe()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens, to encode prompts and decode samples."""
        return _tokenizer(self.corpus, self.folder, self.tokenizer_sha256)

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
        if self.unknown:
            notes.append(f"{self.unknown:,} tokens stand for characters that the tokenizer lacks")
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
        given = f", such as `Corpus({shown(corpus)})`" if isinstance(corpus, str) else ""
        raise ValueError(f"`prepare` takes a `Corpus`{given}; got {type(corpus).__name__}.")
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
        lock = folder.with_suffix(".lock")
        with contextlib.suppress(FileNotFoundError):
            if not _is_file(lock):  # as a lock, it would be waited for without end
                raise ValueError(f"`{lock}` is no file, and no lock of ours: remove it.")
        with claim(lock, f"preparing {_files(sources)} in {folder}") as scratch:
            # Another may have finished between the look and the claim.
            if scratch is not None and not isinstance(_open(folder, corpus), Prepared):
                try:
                    _build(corpus, sources, scratch)
                    if _key(corpus, sources) != folder.name:
                        raise ValueError(
                            f"`{corpus.tokenizer}` changed while it was used. Prepare again when it is finished."
                        )
                    _publish(scratch, folder, corpus)
                except FileNotFoundError:
                    if scratch.exists():
                        raise
                    say(f"{folder} is being made by another, which took this process for dead")


def cache_folder(cache: str | os.PathLike[str] | None = None) -> Path:
    """The folder for what is made once and kept: `~/.cache/shardlib`, or under `$XDG_CACHE_HOME`, unless another is given."""
    if cache is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "shardlib"
    folder = expanded(path_text("prepare(cache=...)", cache, "Name a folder, or give None for `~/.cache/shardlib`."))
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"The folder {shown(str(folder))} for tokens cannot be made ({error.strerror}); name another: "
            "`prepare(corpus, cache=...)`."
        ) from error
    if not os.access(folder, os.W_OK):
        raise ValueError(
            f"The folder `{folder}` for tokens cannot be written to; name another: `prepare(corpus, cache=...)`."
        )
    return folder


def _key(corpus: Corpus, sources: tuple[Source, ...]) -> str:
    """A name for the tokens. Where the files are named from another folder, it is the same."""
    tokenizer = tokenizer_file(corpus.tokenizer)
    content = read_tokenizer(tokenizer)
    chosen = {name: value for name, value in asdict(corpus).items() if name not in ("files", "format")}
    chosen["held_out"] = float(corpus.held_out)
    chosen["tokenizer"] = hashlib.sha256(content).hexdigest() if tokenizer else corpus.tokenizer
    files = [(str(one.path), one.format, one.size, one.modified_ns) for one in sources]
    return hashlib.sha256(json.dumps([_VERSION, chosen, files]).encode()).hexdigest()[:16]


class _Sum(NamedTuple):
    """The digest of a file of a store, as it is in `sha256sums`."""

    digest: str
    name: str

    def line(self) -> str:
        return f"{self.digest}  {self.name}\n"


def _files(sources: tuple[Source, ...]) -> str:
    size = human_bytes(sum(source.size for source in sources))
    return f"{sources[0].path.name} ({size})" if len(sources) == 1 else f"{len(sources)} files ({size})"


def _open(folder: Path, corpus: Corpus) -> Prepared | str:
    """What lies in a folder; or what is wrong with it, an empty text where there is nothing."""
    if not os.path.lexists(folder):
        return ""
    if not folder.is_dir():
        return "it is no folder"
    try:
        return _unsealed(folder, corpus) or _read(folder, corpus)
    except FileNotFoundError as error:
        return f"`{Path(error.filename).name}` is missing"
    except (KeyError, TypeError, AttributeError, ValueError):  # whole, by its digest, and not of this library
        return "`meta.json` is of another kind"
    except OSError as error:  # a file that cannot be read may be as it should be
        raise ValueError(f"`{error.filename or folder}` cannot be read: {error.strerror}.") from error


def _unsealed(folder: Path, corpus: Corpus) -> str:
    """Which file is not as it was written, if one is not; of the ids, only whether they are there."""
    names = _sealed_names(corpus)
    for name in (_SUMS, *names, *(f"{part}.ids" for part in _PARTS)):
        if not _is_file(folder / name):
            return f"`{name}` is no file"
    sums = [_sum(folder / name) for name in names]
    expected = "".join(one.line() for one in sums).encode()
    with (folder / _SUMS).open("rb") as file:
        written = file.read(len(expected) + 1)
    if written == expected:
        return ""
    other = [one.name for one in sums if one.line().encode() not in written]
    return f"`{other[0] if len(other) == 1 else _SUMS}` is not as it was written"


def _is_file(path: Path) -> bool:
    """Whether it is a plain file: no link that leads elsewhere, no pipe that would wait to be opened."""
    return stat.S_ISREG(path.lstat().st_mode)


def _sealed_names(corpus: Corpus) -> list[str]:
    names = [f"{part}.{kind}" for part in _PARTS for kind in ("crc32", "ends")]
    return sorted([*names, "meta.json", *["tokenizer.json"] * (learned_size(corpus.tokenizer) is not None)])


def _sum(path: Path) -> _Sum:
    with path.open("rb") as file:
        return _Sum(hashlib.file_digest(file, "sha256").hexdigest(), path.name)


def _read(folder: Path, corpus: Corpus) -> Prepared | str:
    """A store whose digests are right."""
    told = json.loads((folder / "meta.json").read_text())
    if told["block_bytes"] != BLOCK_BYTES:
        return f"its blocks have {told['block_bytes']} bytes"
    parts = []
    ids_of_parts = []
    for part in _PARTS:
        path, size = folder / f"{part}.ids", told["sizes"][f"{part}.ids"]
        if (found := path.stat().st_size) != size:
            return f"`{path.name}` has {found} of {size} bytes"
        ids = CheckedArray(path, told["dtype"], np.fromfile(folder / f"{part}.crc32", "<u4"))
        ids_of_parts.append(ids)
        ends = _mapped(folder / f"{part}.ends", "<i8")
        parts.append(Tokens(ids, ends, told["vocab"], told["end"], **told[part]))
    # A block that was found damaged may have been so in one machine's memory alone.
    if os.path.lexists(folder / SUSPECT):
        for ids in ids_of_parts:
            if damage := ids.find_damage():
                return damage
        with contextlib.suppress(OSError):
            (folder / SUSPECT).unlink(missing_ok=True)
    train, held_out = parts
    skipped = tuple(Skipped(**one) for one in told["skipped"])
    return Prepared(
        corpus, folder, train, held_out, told["files"], told["empty"], skipped, tuple(told["left_out"]),
        **told["learned"], unknown=told["unknown"], tokenizer_sha256=told["tokenizer_sha256"],
    )  # fmt: skip


def _mapped(path: Path, dtype: str) -> np.ndarray:
    if not path.stat().st_size:
        return np.empty(0, dtype)  # a file without bytes cannot be mapped
    return np.memmap(path, dtype, mode="r")


def _build(corpus: Corpus, sources: tuple[Source, ...], folder: Path) -> None:
    learned = _learn(corpus, sources, folder)
    content = read_tokenizer(_tokenizer_file(corpus, folder))
    tokenizer_sha256 = hashlib.sha256(content).hexdigest() if content else ""
    tokenizer = _tokenizer(corpus, folder, tokenizer_sha256)
    dtype = "<u2" if tokenizer.vocab <= 1 << 16 else "<u4"
    reading, start, unknown = Reading(), time.monotonic(), 0
    progress = Progress(f"reading {_files(sources)}", sum(source.size for source in sources))
    try:
        with contextlib.ExitStack() as stack:
            parts = [_Part(stack, folder, name, dtype, tokenizer) for name in _PARTS]
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
            "version": _VERSION,
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
            **{name: part.told() for name, part in zip(_PARTS, parts, strict=True)},
        }
        _write_text(folder / "meta.json", json.dumps(told, indent=1))
        _write_text(folder / _SUMS, "".join(_sum(folder / name).line() for name in _sealed_names(corpus)))
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


def _tokenizer_file(corpus: Corpus, folder: Path) -> Path | None:
    """Where the tokenizer of a store is: in its folder if it was learned."""
    return folder / "tokenizer.json" if learned_size(corpus.tokenizer) else tokenizer_file(corpus.tokenizer)


def _tokenizer(corpus: Corpus, folder: Path, sha256: str) -> Bytes | HuggingFace:
    """The tokenizer of a store, from a file that is as it was when the tokens were made."""
    path = _tokenizer_file(corpus, folder)
    content = read_tokenizer(path)
    if content and hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(
            f"`{path}` is not the tokenizer that the tokens in `{folder}` were made with: the file has changed since. Run again: "
            "`prepare` makes the tokens that belong to it."
        )
    return make_tokenizer(path, content, corpus.end, corpus.unknown)


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
    _write_text(folder / "tokenizer.json", learned)
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

    def __init__(self, stack: contextlib.ExitStack, folder: Path, name: str, dtype: str, tokenizer: Tokenizer) -> None:
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
                f"The tokenizer gave the id {highest}, and its vocabulary has {self.vocab} tokens: its file contradicts itself."
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
        _remove(aside)


def _remove(path: Path) -> None:
    """Whatever it is; of a link, the link."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)
