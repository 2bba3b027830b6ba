"""Tokenizers: from texts to ids and back. Bytes need nothing; files of Hugging Face's `tokenizers` need that package."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardlib.data._packages import package

# What ends a document in the vocabularies of GPT-2, Llama 3, Llama 2 and T5, Gemma, BERT.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
_PIECE = 1 << 20
_TOGETHER = 8 << 20


class Tokenizer(Protocol):
    """What turns texts into ids below `vocab`, and back. `end` is the id that ends a document."""

    @property
    def vocab(self) -> int: ...
    @property
    def end(self) -> int: ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without any that mark its begin or end."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, as far as there is one: a model's samples may end within a character."""
        ...


@dataclass(frozen=True)
class Bytes:
    """The bytes of a text's UTF-8 are its ids; 256 ends a document.

    >>> [ids.tolist() for ids in Bytes().encode_batch(["hé", ""])]
    [[104, 195, 169], []]
    >>> Bytes().decode([104, 195, 169, 256, 195])
    'hé�'
    """

    vocab: int = 257
    end: int = 256

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        """The text whose UTF-8 the ids are, with a mark for each part that is none."""
        return bytes(int(id) for id in ids if 0 <= id < 256).decode(errors="replace")


@dataclass(frozen=True, eq=False)
class HuggingFace:
    """A tokenizer of the `tokenizers` package."""

    inner: Any
    vocab: int
    end: int

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text. Texts of more than a million characters are cut after a line."""
        # An encoding takes a hundred bytes a token while it lives, and the time of some grows faster than their texts: so
        # short texts go together, and the pieces of a long one a few at a time.
        pieces = [(k, piece) for k, text in enumerate(texts) for piece in _pieces(text)]
        encoded: list[list[np.ndarray]] = [[] for _ in texts]
        while pieces:
            sizes = itertools.accumulate(len(piece) for _, piece in pieces)
            count = max(1, sum(1 for _ in itertools.takewhile(lambda size: size <= _TOGETHER, sizes)))
            now, pieces = pieces[:count], pieces[count:]
            found = self.inner.encode_batch_fast([piece for _, piece in now], add_special_tokens=False)
            for (k, _), one in zip(now, found, strict=True):
                encoded[k].append(np.array(one.ids, np.uint32))
        return [np.concatenate(parts) for parts in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, without special tokens and without ids that the vocabulary does not have."""
        return self.inner.decode([int(id) for id in ids if 0 <= id < self.vocab], skip_special_tokens=True)


def load_tokenizer(tokenizer: str = "bytes", end: str | None = None) -> Tokenizer:
    """The tokenizer that is called `"bytes"`, or that lies in a `tokenizer.json`.

    `end` is the special token that ends a document; where it is None, the one that is known for it.

    >>> load_tokenizer("bytes").vocab
    257
    """
    path = tokenizer_file(tokenizer)
    if path is None:
        if end is not None:
            raise ValueError(
                f"`end={end!r}` is a token of a tokenizer's file; with bytes, 256 ends a document. Leave it out."
            )
        return Bytes()
    package_ = package("tokenizers", f"The tokenizer `{path}`")
    try:
        inner = package_.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more special
        raise ValueError(
            f"`tokenizer={tokenizer!r}` is not what the `tokenizers` package writes as `tokenizer.json`: {error}"
        ) from error
    # A store holds documents as they are: what a model's card adds, cuts or fills up is not wanted, and the text of a
    # document that reads `<|endoftext|>` does not end it.
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    ids = inner.get_vocab(with_added_tokens=True)
    return HuggingFace(inner, max(ids.values()) + 1, ids[_end_token(inner, ids, end, str(path))])


def tokenizer_file(tokenizer: str) -> Path | None:
    """The file that a tokenizer's name means, if it means one."""
    if tokenizer == "bytes":
        return None
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f'There is no tokenizer at `{path}`. `tokenizer` is `"bytes"`, or the path of a `tokenizer.json` as the '
            "`tokenizers` package writes it, or of the folder that holds it."
        )
    return path


def _end_token(inner: Any, ids: dict[str, int], end: str | None, path: str) -> str:
    known = [token for token in _ENDS if token in ids] if end is None else [end]
    if len(known) == 1 and known[0] in ids:
        return known[0]
    special = ", ".join(f"`{token.content}`" for token in inner.get_added_tokens_decoder().values() if token.special)
    asked = f"`end={end!r}` is no token of `{path}`" if end else f"`{path}` does not tell which token ends a document"
    raise ValueError(f"{asked}: say `end=...`, one of its special tokens: {special or 'it has none'}.")


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE:
        cut = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:cut]
        start = cut
    yield text[start:]
