"""The tokens of a corpus, and what is known of how they were made."""

import functools
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardlib._notebook import Shown
from shardlib._text import human_bytes, table
from shardlib.data._blocks import CheckedArray
from shardlib.data._checks import shown, whole_number
from shardlib.data._corpus import Corpus, Skipped
from shardlib.data._tokenizer import (
    Bytes,
    HuggingFace,
    Tokenizer,
    learned_size,
    make_tokenizer,
    read_tokenizer,
    tokenizer_file,
)

_MOST_IDS = 1 << 31  # examples hold them as int32


@dataclass(frozen=True, eq=False, repr=False)
class Tokens:
    """Documents as token ids, one after the other.

    - `ids`: all tokens, each a number below `vocab`; they may be memory-mapped.
    - `ends`: for each document the place in `ids` where it ends and the next begins.
    - `vocab`: how many different ids there may be.
    - `end`: the id that ends each document.
    - `bytes`: the size of the documents' text in UTF-8.
    - `fingerprint`: a hash of all tokens.
    - `switches`: where tokens begin to be learned and end, in turn: those from the first to the
      second are learned, those from there to the third are not. None if all are learned.
    - `begin`: the id that each document begins with; None if they have none.

    The `ids` of a store are read as an array is, by numbers, slices and `np.asarray`; what is read
    is checked against its digest first.

    >>> tokens = Tokens(np.array([7, 8, 0, 9, 0], np.uint16), np.array([3, 5]), vocab=10, end=0,
    ...     bytes=3)
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
    switches: np.ndarray | None = None
    begin: int | None = None

    def __post_init__(self) -> None:
        _check_whole_numbers("ids", self.ids, np.ndarray | CheckedArray)
        _check_whole_numbers("ends", self.ends, np.ndarray)
        # NumPy takes none of 64 bits without a sign for places.
        for name in ("ends", "switches"):
            places = getattr(self, name)
            if isinstance(places, np.ndarray) and places.dtype == np.uint64:
                object.__setattr__(self, name, places.astype(np.int64))
        vocab = whole_number("Tokens(vocab=...)", self.vocab, 1, _MOST_IDS)
        whole_number("Tokens(end=...)", self.end, 0, vocab - 1)
        if self.begin is not None:
            whole_number("Tokens(begin=...)", self.begin, 0, vocab - 1)
        whole_number("Tokens(bytes=...)", self.bytes, 0, (1 << 63) - 1)
        if not isinstance(self.fingerprint, str):
            raise ValueError(f"`Tokens(fingerprint={shown(self.fingerprint)})` is a text.")
        if not self._ends_fit():
            raise ValueError(
                "`Tokens(ends=...)` are where documents end: each beyond the one before, since a "
                "document has its end token at least, and the last is the number of tokens, "
                f"{len(self.ids)}; got {shown(self.ends)}."
            )

        if self.switches is not None:
            self._check_switches(self.switches)

    def _check_switches(self, switches: np.ndarray) -> None:
        """Refuse switches that do not rise, or lie beyond the tokens."""
        _check_whole_numbers("switches", switches, np.ndarray)
        rises = bool((switches[1:] > switches[:-1]).all())
        if len(switches) and not (rises and switches[0] >= 0 and switches[-1] <= len(self.ids)):
            raise ValueError(
                "`Tokens(switches=...)` are where tokens begin to be learned, and end: each beyond "
                f"the one before, from 0 to {len(self.ids)}; got {shown(switches)}."
            )

    @property
    def learned(self) -> int:
        """How many of the tokens are learned."""
        if self.switches is None:
            return len(self)
        bounds = np.append(self.switches, len(self)) if len(self.switches) % 2 else self.switches
        return int((bounds[1::2] - bounds[::2]).sum())

    def are_learned(self, positions: np.ndarray) -> np.ndarray:
        """Whether the tokens at these positions are learned.

        >>> tokens = Tokens(np.zeros(6, np.uint16), np.array([6]), 10, 0, 5,
        ...     switches=np.array([1, 3]))
        >>> tokens.are_learned(np.arange(6)).tolist()
        [False, True, True, False, False, False]
        """
        if self.switches is None:
            return np.ones(np.shape(positions), bool)
        return np.searchsorted(self.switches, positions, side="right") % 2 == 1

    def _ends_fit(self) -> bool:
        """Whether each document ends beyond the one before, and the last one with the tokens."""
        # No document at all is a part that nothing was held out for.
        if not len(self.ends):
            return not len(self.ids)
        rises = self.ends[0] > 0 and bool((self.ends[1:] > self.ends[:-1]).all())
        return rises and int(self.ends[-1]) == len(self.ids)

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

        >>> round(Tokens(np.zeros(5, np.uint16), np.array([5]), vocab=10, end=0,
        ...     bytes=20).bits_per_byte(math.log(16)), 6)
        1.0
        """
        try:
            # An array of one number is a number too. A bool or a text is refused below.
            nats = float(loss)
        except (TypeError, ValueError, OverflowError):
            nats = None
        if nats is None or isinstance(loss, str | bytes | bool):
            raise ValueError(
                f"`bits_per_byte(loss={shown(loss)})` is a mean loss in nats per token, a number."
            )
        if self.switches is not None:
            raise ValueError(
                f"Of {self} only {self.learned:,} are learned, and the size of their text is not "
                "known: a loss of conversations has no bits per byte."
            )
        # Of empty documents there are tokens, those that end them, and no text.
        if not self.bytes:
            raise ValueError(
                f"{self} are of a text of 0 bytes, which has no bits per byte. Hold out more: "
                "`Corpus(held_out=...)`."
            )
        # Nats of all tokens that are of texts or end them, in bits, over the bytes of the texts.
        tokens = len(self) if self.begin is None else len(self) - self.documents
        return nats / math.log(2) * tokens / self.bytes

    def check_vocab(self, embeddings: int) -> None:
        """Refuse a model whose embedding table has fewer rows than there are ids.

        Call it where data meets model, before the first step.

        >>> tokens = Tokens(np.array([7, 0], np.uint16), np.array([2]), vocab=300, end=0, bytes=1)
        >>> tokens.check_vocab(512)
        >>> tokens.check_vocab(256)
        Traceback (most recent call last):
        ValueError: The data has token ids below 300, and the model has 256 embeddings: it needs
            300 or more.
        """
        if whole_number("check_vocab(embeddings=...)", embeddings, 1, (1 << 63) - 1) < self.vocab:
            raise ValueError(
                f"The data has token ids below {self.vocab}, and the model has {embeddings} "
                f"embeddings: it needs {self.vocab} or more."
            )


def _check_whole_numbers(name: str, array: Any, kinds: Any) -> None:
    """Refuse what is no array of whole numbers of one dim, of the kinds that `Tokens` takes."""
    if not isinstance(array, kinds) or array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"`Tokens({name}={shown(array)})` must be a numpy array of whole numbers, of one dim."
        )


@dataclass(frozen=True, eq=False, repr=False)
class Prepared(Shown):
    """A corpus as tokens: what there is to train on, and what is held out.

    `prepare` makes it, and `print` shows a table of it.

    - `corpus`: what it was made from.
    - `folder`: where it is on disk.
    - `train`: the tokens to train on.
    - `held_out`: the tokens that are kept for evaluation.
    - `files`: how many files were read.
    - `empty`: how many documents were empty and left out.
    - `skipped`: bad records that were passed over, a `Skipped` for each file that has some.
    - `left_out`: suffixes of files in folders that are not read.
    - `learned_documents`: of how many documents the tokenizer was learned; 0 if it was not.
    - `learned_bytes`: the bytes of these documents.
    - `unknown`: how many tokens stand for characters that the tokenizer lacks.
    - `tokenizer_sha256`: the digest of the tokenizer's file; empty if it has none.
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
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise ValueError(
                    f"`Prepared({name}={shown(value)})` is no `{kind.__name__}`. `prepare(corpus)` "
                    "makes it."
                )
        for name, kind in (("skipped", Skipped), ("left_out", str)):
            _check_tuple(name, getattr(self, name), kind)

    def __repr__(self) -> str:
        return f"Prepared({self.corpus}, train={self.train}, held_out={self.held_out})"

    def __str__(self) -> str:
        return self.describe()

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens, to encode prompts and decode samples."""
        # It is read when it is asked for: who only trains needs no tokenizer, nor the package of
        # one.
        return stored_tokenizer(self.corpus, self.folder, self.tokenizer_sha256)

    def describe(self) -> str:
        """Sizes of both parts, and what was passed over, for people."""
        rows: list[tuple[str, ...]] = [("", "documents", "tokens", "text", "bytes a token")]
        rows.append(_row("train", self.train))
        rows.append(_row("held out", self.held_out))
        lines = [
            f"{_counted(self.files, 'file')}, {self.train.vocab:,} tokens in the vocabulary, "
            f"in {self.folder}",
            "",
            table(rows, (1, 2, 3, 4)),
        ]
        # Notes are of what is unusual, so that a corpus without any prints as a table alone.
        notes = self._notes()
        if notes:
            lines += ["", *notes]
        return "\n".join(lines)

    def _notes(self) -> list[str]:
        """What was learned, left out and passed over, a line each."""
        notes = []
        if self.learned_documents:
            documents = _counted(self.learned_documents, "document")
            size = human_bytes(self.learned_bytes)
            notes.append(f"tokenizer learned from {documents} ({size})")
        if self.unknown:
            notes.append(f"{self.unknown:,} tokens stand for characters that the tokenizer lacks")
        for name, part in (("train", self.train), ("held out", self.held_out)):
            if part.switches is not None:
                share = part.learned / max(len(part), 1)
                notes.append(f"{part.learned:,} tokens of {name} are learned, {share:.0%}")
        if self.empty:
            notes.append(f"{_counted(self.empty, 'empty document')} left out")
        if self.left_out:
            notes.append(f"files left out that end in {', '.join(self.left_out)}")
        for skipped in self.skipped:
            notes.append(str(skipped))
        return notes


_KINDS = {
    "corpus": Corpus,
    "folder": Path,
    "train": Tokens,
    "held_out": Tokens,
    "tokenizer_sha256": str,
}
"""The kinds of those fields of `Prepared` that are neither numbers nor tuples."""


def _check_tuple(name: str, value: Any, kind: type) -> None:
    """Refuse a field of `Prepared` that is no tuple of a kind."""
    if isinstance(value, tuple) and all(isinstance(item, kind) for item in value):
        return
    raise ValueError(
        f"`Prepared({name}={shown(value)})` is no tuple of `{kind.__name__}`. `prepare(corpus)` "
        "makes it."
    )


def _row(name: str, part: Tokens) -> tuple[str, ...]:
    """The line of a part in the table of sizes."""
    # A part without tokens has no bytes a token.
    share = "-"
    if len(part):
        share = f"{part.bytes / len(part):.2f}"
    return name, f"{part.documents:,}", f"{len(part):,}", human_bytes(part.bytes), share


def _counted(count: int, noun: str) -> str:
    """A number of things: `1 file`, `2,000 files`."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"


def tokenizer_of_store(corpus: Corpus, folder: Path) -> Path | None:
    """Where the tokenizer of a store is: in its folder if it was learned."""
    # A tokenizer that is given stays where it is, and only its digest is kept.
    if learned_size(corpus.tokenizer):
        return folder / "tokenizer.json"
    return tokenizer_file(corpus.tokenizer)


def stored_tokenizer(corpus: Corpus, folder: Path, sha256: str) -> Bytes | HuggingFace:
    """The tokenizer of a store, from a file that is as it was when the tokens were made."""
    path = tokenizer_of_store(corpus, folder)
    content = read_tokenizer(path)
    # Without a file, for bytes, there is nothing that could have changed.
    if content and hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(
            f"`{path}` is not the tokenizer that the tokens in `{folder}` were made with: the file "
            "has changed since. Run again: `prepare` makes the tokens that belong to it."
        )
    return make_tokenizer(path, content, corpus.end, corpus.unknown)
