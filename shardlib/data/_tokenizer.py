"""Tokenizers: from texts to ids and back, and learned from texts. All but bytes need Hugging Face's `tokenizers`."""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardlib.data._packages import package

# What ends a document in the vocabularies of GPT-2, Llama 3, Llama 2 and T5, Gemma, BERT.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# What a learned token may lie within: a word with the mark or space before it, three digits, marks. A line's end goes with
# the marks before it and with the next line's indentation, since so it is in code; GPT-2's way takes a tenth more tokens.
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?:\s*\n\s*)?|\s*\n\s*|\s+(?!\S)|\s+"
_LEAST = 257
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


def learned_size(tokenizer: str) -> int | None:
    """Of how many tokens the tokenizer is that is to be learned, or None where the name means another.

    >>> learned_size("bpe:4096")
    4096
    """
    if not tokenizer.startswith("bpe:"):
        return None
    size = int(tokenizer[4:]) if re.fullmatch("bpe:[1-9][0-9]{0,8}", tokenizer) else 0
    if size < _LEAST:
        raise ValueError(
            f"`tokenizer={tokenizer!r}`: behind `bpe:` stands how many tokens to learn, a number from {_LEAST} up (every byte, "
            'and the end of a document), such as `"bpe:4096"`.'
        )
    return size


def learn_tokenizer(size: int, texts: Iterable[str], end: str | None = None) -> Any:
    """A byte-level BPE of `size` tokens, or fewer where the texts have no more, as the `tokenizers` package has it.

    The same texts give the same, in whatever order. `end` is the token that ends a document.

    >>> learn_tokenizer(260, ["to be or not to be"]).get_vocab_size()
    260
    """
    package_ = package("tokenizers", f"The tokenizer `bpe:{size}`")
    marks = package_.pre_tokenizers
    inner = package_.Tokenizer(package_.models.BPE())
    inner.pre_tokenizer = marks.Sequence(
        [
            marks.Split(package_.Regex(_WORDS), "isolated"),
            marks.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = package_.decoders.ByteLevel()
    trainer = package_.trainers.BpeTrainer(
        vocab_size=size, min_frequency=2, special_tokens=[end or _ENDS[0]], initial_alphabet=marks.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    inner.train_from_iterator(texts, trainer)
    return inner


def load_tokenizer(tokenizer: str = "bytes", end: str | None = None) -> Tokenizer:
    """The tokenizer that is called `"bytes"`, or that lies in a `tokenizer.json`.

    `end` is the special token that ends a document; where it is None, the one that is known for it.

    >>> load_tokenizer("bytes").vocab
    257
    """
    if learned_size(tokenizer):
        raise ValueError(
            f"`tokenizer={tokenizer!r}` is learned from a corpus: `prepare(Corpus(..., tokenizer={tokenizer!r})).tokenizer`; its "
            "file, `tokenizer.json`, lies in the folder of the store."
        )
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
    if tokenizer == "bytes" or learned_size(tokenizer):
        return None
    path = Path(tokenizer).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f'There is no tokenizer at `{path}`. `tokenizer` is `"bytes"`, or the path of a `tokenizer.json` as the '
            '`tokenizers` package writes it, or of the folder that holds it, or `"bpe:4096"`, which is learned.'
        )
    return path


def _end_token(inner: Any, ids: dict[str, int], end: str | None, path: str) -> str:
    added = inner.get_added_tokens_decoder().values()  # a text's `</s>` may be a token too, as any word is
    known = [token.content for token in added if token.content in _ENDS] if end is None else [end]
    if len(known) == 1 and known[0] in ids:
        return known[0]
    special = ", ".join(f"`{token.content}`" for token in added if token.special)
    asked = f"`end={end!r}` is no token of `{path}`" if end else f"`{path}` does not tell which token ends a document"
    raise ValueError(f"{asked}: say `end=...`, one of its special tokens: {special or 'it has none'}.")


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE:
        cut = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:cut]
        start = cut
    yield text[start:]
