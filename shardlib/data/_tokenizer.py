"""Tokenizers: from texts to ids and back, and learned from texts. All but bytes need Hugging Face's
`tokenizers`.
"""

import operator
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardlib._text import human_bytes
from shardlib.data._alphabet import LACKING, Alphabet, leaves_out
from shardlib.data._checks import expanded, listed, path_text, shown, text_or_none
from shardlib.data._packages import package

# What ends a document in the vocabularies of GPT-2, Llama 3, Llama 2 and T5, Gemma, BERT.
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# What a learned token may lie within: a word with the mark or space before it, three digits, marks.
# A line's end goes with the marks before it and with the next line's indentation, since so it is in
# code; GPT-2's way takes a tenth more tokens. Runs are cut after 64 characters, since the time to
# learn from one grows with the square of its length.
_WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}{1,64}| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]{1,64}(?:\s{0,64}\n\s{0,64})?"
    r"|\s{0,64}\n\s{0,64}|\s{1,64}(?!\S)|\s{1,64}"
)
# Every byte, and the end of a document.
_LEAST = 257
_MOST = 1 << 31  # tokens are int32 in examples
_FILE_BYTES = 1 << 30  # at most, of a `tokenizer.json`; the largest have tens of megabytes
# In characters: where a text is cut, and how many are encoded at once.
_PIECE = 1 << 20
_TOGETHER = 8 << 20


class Tokenizer(Protocol):
    """What turns texts into token ids, and back."""

    @property
    def vocab(self) -> int:
        """How many ids there are: all are below it."""
        ...

    @property
    def end(self) -> int:
        """The id that ends a document."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, without any that mark its begin or end."""
        ...

    def encode_marker(self, text: str) -> np.ndarray:
        """The ids of a text in which special tokens are what they read."""
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
    unknown: None = None  # there is no character that UTF-8 lacks

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The bytes of each text."""
        return [np.frombuffer(raw, np.uint8) for raw in _encoded(texts)]

    def encode_marker(self, text: str) -> np.ndarray:
        """The bytes of a text; there are no special tokens."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """The text whose UTF-8 the ids are, with a mark for each part that is none."""
        return bytes(id for id in _numbers(ids) if 0 <= id < 256).decode(errors="replace")


@dataclass(frozen=True, eq=False)
class HuggingFace:
    """A tokenizer of the `tokenizers` package.

    `unknown` is the id of the token that stands for characters it lacks, where there is one; `name`
    is what messages call it.
    """

    inner: Any
    vocab: int
    end: int
    unknown: int | None = None
    name: str = "tokenizer"
    alphabet: Alphabet | None = None

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text. Texts of more than a million characters are cut after a line."""
        # An encoding takes a hundred bytes a token while it lives, and the time of some grows
        # faster than their texts: so short texts are encoded together, and the pieces of a long one
        # a few at a time.
        _encoded(texts)
        encoded: list[list[np.ndarray]] = [[] for _ in texts]
        for numbers, pieces in _piece_batches(texts):
            for number, ids in zip(numbers, self._encode(pieces), strict=True):
                encoded[number].append(ids)
        return [np.concatenate(parts) for parts in encoded]

    def encode_marker(self, text: str) -> np.ndarray:
        """The ids of a text in which special tokens are what they read."""
        special = {}
        for number, token in self.inner.get_added_tokens_decoder().items():
            special[token.content] = number
        if not special:
            return self.encode_batch([text])[0]
        # Longer ones first, since one may begin with another.
        names = sorted(map(re.escape, special), key=len, reverse=True)
        parts: list[np.ndarray] = []
        for part in re.split(f"({'|'.join(names)})", text):
            if part in special:
                parts.append(np.array([special[part]], np.uint32))
            elif part:
                parts += self.encode_batch([part])
        return np.concatenate([np.empty(0, np.uint32), *parts])

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        if self.alphabet is not None:
            self.alphabet.check(self.inner, texts, self.name)
        try:
            encodings = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the package raises nothing more special
            raise ValueError(
                f"`{self.name}` cannot encode the texts: {error}. {LACKING}"
            ) from error
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, without special tokens and ids that the vocabulary does not have."""
        known = [id for id in _numbers(ids) if 0 <= id < self.vocab]
        return self.inner.decode(known, skip_special_tokens=True)


def _encoded(texts: Sequence[str]) -> list[bytes]:
    """Texts in UTF-8; what is no list of texts is refused."""
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not is_list or not all(isinstance(text, str) for text in texts):
        raise ValueError(
            f'`encode_batch` takes a list of texts, such as `["To be"]`; got {shown(texts)}.'
        )
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"A text of `encode_batch` has {half!r}, half of a character, which UTF-8 cannot hold."
        ) from None


def _numbers(ids: Any) -> list[int]:
    """Ids as ints, from any iterable of them."""
    if isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu":
        return ids.tolist()
    try:
        if isinstance(ids, str | bytes | dict):
            raise TypeError
        numbers = list(ids)
        if any(isinstance(id, bool | np.bool_) for id in numbers):
            raise TypeError
        return [operator.index(id) for id in numbers]
    except Exception:
        raise ValueError(
            f"`decode` takes ids, whole numbers such as `[104, 105]`; got {shown(ids)}."
        ) from None


def learned_size(tokenizer: str) -> int | None:
    """How many tokens the tokenizer has that is to be learned; None if the name means another.

    >>> learned_size("bpe:4096")
    4096
    """
    if not tokenizer.startswith("bpe:"):
        return None
    size = 0
    if re.fullmatch("bpe:[1-9][0-9]{0,8}", tokenizer):
        size = int(tokenizer[4:])
    if size < _LEAST:
        raise ValueError(
            f"`tokenizer={shown(tokenizer)}`: behind `bpe:` stands how many tokens to learn, a "
            f"number from {_LEAST} up (every byte, and the end of a document), such as "
            '`"bpe:4096"`.'
        )
    return size


def learn_tokenizer(size: int, texts: Iterable[str], end: str | None = None) -> Any:
    """A byte-level BPE of `size` tokens, or fewer where the texts have no more, as the `tokenizers`
    package has it.

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
        vocab_size=size,
        min_frequency=2,
        special_tokens=[end or _ENDS[0]],
        # Every byte is a token, so that any text can be encoded.
        initial_alphabet=marks.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts, trainer)
    return inner


def load_tokenizer(
    tokenizer: str | os.PathLike[str] = "bytes", end: str | None = None, unknown: str | None = None
) -> Tokenizer:
    """The tokenizer that is called `"bytes"`, or that lies in a `tokenizer.json`.

    One that is learned, `"bpe:4096"`, is refused: `prepare(...).tokenizer` is that.

    Args:
        tokenizer: `"bytes"`, or the path of a Hugging Face `tokenizer.json`, or of its folder.
        end: the special token that ends a document; where it is None, the one that is known for it.
        unknown: the token that stands for characters the tokenizer lacks; where it is None, the
            file's own, and without one such characters are refused.

    >>> load_tokenizer("bytes").vocab
    257
    """
    for name, value in (("end", end), ("unknown", unknown)):
        text_or_none(f"load_tokenizer({name}=...)", value)
    tokenizer = tokenizer_name("load_tokenizer(tokenizer=...)", tokenizer)
    if learned_size(tokenizer):
        raise ValueError(
            f"`tokenizer={tokenizer!r}` is learned from a corpus: `prepare(Corpus(..., "
            f"tokenizer={tokenizer!r})).tokenizer`; its file, `tokenizer.json`, lies in the folder "
            "of the store."
        )
    path = tokenizer_file(tokenizer)
    return make_tokenizer(path, read_tokenizer(path), end, unknown)


def special_id(tokenizer: Tokenizer, token: str, argument: str) -> int:
    """The id of a special token, which an argument of this name asks for."""
    special: dict[str, int] = {}
    if isinstance(tokenizer, HuggingFace):
        for number, added in tokenizer.inner.get_added_tokens_decoder().items():
            special[added.content] = number
    if token not in special:
        raise ValueError(
            f"`{argument}={shown(token)}` is no special token of the tokenizer, which has "
            f"{listed(list(special)[:20]) if special else 'none'}."
        )
    return special[token]


def _vocabulary_size(ids: dict[str, int], path: Path) -> int:
    """How many rows a table of embeddings needs for these tokens.

    Ids may have gaps, and a table has a row for each number up to the last one.
    """
    vocab = max(ids.values()) + 1
    if vocab > _MOST:
        raise ValueError(
            f"`{path}` has a token of number {vocab - 1}; examples hold numbers below {_MOST}."
        )
    return vocab


def make_tokenizer(
    path: Path | None, content: bytes, end: str | None, unknown: str | None
) -> "Bytes | HuggingFace":
    """The tokenizer of a file with this content; without a file, bytes.

    Args:
        path: the tokenizer's file.
        content: what is in it.
        end: the token that ends a document, if it is not the one that the file names.
        unknown: the token for characters that it lacks; without one they are refused.
    """
    if path is None:
        _refuse_tokens_of_file(end=end, unknown=unknown)
        return Bytes()
    inner = _inner_tokenizer(path, content)
    ids = inner.get_vocab(with_added_tokens=True)
    end_id = ids[_end_token(inner, ids, end, str(path))]
    vocab = _vocabulary_size(ids, path)
    _set_unknown(inner, unknown, path)
    unknown_id = ids.get(getattr(inner.model, "unk_token", None))
    alphabet = None
    if leaves_out(inner):
        alphabet = Alphabet()
    return HuggingFace(inner, vocab, end_id, unknown_id, str(path), alphabet)


def _refuse_tokens_of_file(**tokens: str | None) -> None:
    """Refuse tokens that only the file of a tokenizer can have, where there is none."""
    for name, value in tokens.items():
        if value is not None:
            raise ValueError(
                f"`{name}={shown(value)}` is a token of a tokenizer's file; with bytes, 256 "
                "ends a document and no character is unknown. Leave it out."
            )


def _inner_tokenizer(path: Path, content: bytes) -> Any:
    """The tokenizer of the `tokenizers` package that a file describes, set up for a store.

    A store holds documents as they are. What a model's card adds, cuts or fills up is not wanted;
    the text of a document that reads `<|endoftext|>` does not end it; and the same text always has
    the same tokens.
    """
    package_ = package("tokenizers", f"The tokenizer `{path}`")
    try:
        inner = package_.Tokenizer.from_buffer(content)
        inner.get_vocab(with_added_tokens=True)
    except Exception as error:  # the package raises nothing more special
        raise ValueError(
            f"`tokenizer={str(path)!r}` is not what the `tokenizers` package writes as "
            f"`tokenizer.json`: {error}"
        ) from error
    inner.no_truncation()
    inner.no_padding()
    inner.encode_special_tokens = True
    if getattr(inner.model, "dropout", None):
        inner.model.dropout = None
    return inner


def _set_unknown(inner: Any, unknown: str | None, path: Path) -> None:
    """Have a token of the vocabulary stand for characters that it lacks."""
    if unknown is None:
        return
    if not hasattr(inner.model, "unk_token"):
        raise ValueError(
            f"`unknown={shown(unknown)}`: the model of `{path}`, {type(inner.model).__name__}, has "
            "its own token for what is unknown, or none. Leave it out."
        )
    if inner.model.token_to_id(unknown) is None:
        raise ValueError(
            f"`unknown={shown(unknown)}` is no token of the vocabulary of `{path}`. Choose one "
            "that is, such as its own unknown or padding token."
        )
    inner.model.unk_token = unknown


def tokenizer_name(what: str, tokenizer: Any) -> str:
    """What a tokenizer is called, or where it lies, as text."""
    way_out = (
        'A tokenizer is `"bytes"` or the path of a `tokenizer.json`, or `"bpe:4096"`, which is '
        "learned."
    )
    return path_text(what, tokenizer, way_out)


def tokenizer_file(tokenizer: str) -> Path | None:
    """The file that a tokenizer's name means, if it means one."""
    if tokenizer == "bytes" or learned_size(tokenizer):
        return None
    path = expanded(tokenizer)
    try:
        if path.is_dir():
            # Folders of models have the file by this name.
            path = path / "tokenizer.json"
        if path.is_file():
            return path
    except OSError as error:
        raise ValueError(
            f"The tokenizer `{shown(str(path))}` cannot be read: {error.strerror}."
        ) from error
    raise ValueError(
        f'There is no tokenizer at `{path}`. `tokenizer` is `"bytes"`, or the path of a '
        "`tokenizer.json` as the `tokenizers` package writes it, or of the folder that holds it, "
        'or `"bpe:4096"`, which is learned.'
    )


def read_tokenizer(path: Path | None) -> bytes:
    """What a tokenizer's file holds; nothing without a file."""
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"The tokenizer `{path}` cannot be read: {error.strerror}.") from error
    if len(content) > _FILE_BYTES:
        raise ValueError(
            f"`{path}` is larger than {human_bytes(_FILE_BYTES)}, which no `tokenizer.json` is."
        )
    return content


def _end_token(inner: Any, ids: dict[str, int], end: str | None, path: str) -> str:
    """The token that ends a document: the one that was asked for, or the only one that is known.

    Only tokens that were added to the vocabulary count, since a text's `</s>` may be a token too,
    as any word is.
    """
    added = inner.get_added_tokens_decoder().values()
    known = [end]
    if end is None:
        known = [token.content for token in added if token.content in _ENDS]
    if len(known) == 1 and known[0] in ids:
        return known[0]
    problem = f"`{path}` does not tell which token ends a document"
    if end:
        problem = f"`end={shown(end)}` is no token of `{path}`"
    special = listed(token.content for token in added if token.special)
    raise ValueError(
        f"{problem}: say `end=...`, one of its special tokens: {special or 'it has none'}."
    )


def _piece_batches(texts: Sequence[str]) -> Iterator[tuple[list[int], list[str]]]:
    """Pieces of texts that are encoded together, each with the number of its text, in order.

    A batch has at most `_TOGETHER` characters, or a single piece.
    """
    numbers: list[int] = []
    pieces: list[str] = []
    characters = 0
    for number, text in enumerate(texts):
        for piece in _pieces(text):
            if pieces and characters + len(piece) > _TOGETHER:
                yield numbers, pieces
                numbers, pieces, characters = [], [], 0
            numbers.append(number)
            pieces.append(piece)
            characters += len(piece)
    if pieces:
        yield numbers, pieces


def _pieces(text: str) -> Iterator[str]:
    """A text cut into pieces of at most `_PIECE` characters, after a line where there is one."""
    start = 0
    while len(text) - start > _PIECE:
        # Few tokens go on beyond a line's end.
        cut = text.rfind("\n", start, start + _PIECE) + 1 or start + _PIECE
        yield text[start:cut]
        start = cut
    yield text[start:]
