"""What is to be read, as a user says it, and what was found: files, and records passed over."""

import difflib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from shardlib.data._chat import CHATS, Chat
from shardlib.data._checks import path_text, shown, text_or_none, whole_number
from shardlib.data._tokenizer import learned_size, tokenizer_name

Format = Literal["auto", "text", "jsonl", "parquet", "arrayrecord"]

_SUFFIXES_OF_TEXT = (
    # Prose, markup and settings.
    *(".txt", ".text", ".md", ".rst", ".tex", ".html", ".css", ".toml", ".yaml", ".yml"),
    # Code.
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js"),
    *(".ts", ".jl", ".r", ".rb", ".scala", ".sh", ".sql"),
)
SUFFIXES = {
    **dict.fromkeys(_SUFFIXES_OF_TEXT, "text"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
    **dict.fromkeys((".arrayrecord", ".array_record"), "arrayrecord"),
}
"""The format that a file's suffix tells."""
COMPRESSED = (".gz", ".zst")
FILES_EXAMPLES = (
    'Give a path, a folder or a pattern, or several of them in a tuple, as in `Corpus(("books", '
    '"wiki/*.jsonl"))`; or `"python"`.'
)


@dataclass(frozen=True)
class Corpus:
    """Which texts, and what becomes of them. It prints, compares and hashes.

    - `files`: a path, a folder or a pattern such as `data/**/*.jsonl`, or several in a tuple; or
      `"python"`, the source of the running interpreter's standard library without its tests. A file
      that several patterns match is read once; one that is listed twice is refused.
    - `format`: `"text"`, `"jsonl"`, `"parquet"` or `"arrayrecord"`; `"auto"` tells it from each
      file's suffix. A document is a text file, a line of JSON, a row or a record. Text and JSON
      lines may be compressed, `.gz` or `.zst`.
    - `field`: the key or column that holds the text, `"text"` unless given. Records of ArrayRecord
      are JSON if it is given, and else plain UTF-8.
    - `separator`: in text files, what stands between two documents, such as `"<|endoftext|>"`.
    - `tokenizer`: `"bytes"`; the path of a Hugging Face `tokenizer.json`, or of its folder; or
      `"bpe:4096"`, which is learned from the documents that are not held out, and has at most so
      many tokens.
    - `end`: the special token that ends each document; None is the usual one of the tokenizer.
    - `held_out`: the share of documents kept for evaluation. The content of a document decides, so
      the choice does not change as the corpus grows, and no document is on both sides.
    - `bad`: what happens to a record that does not match its format: `"stop"` refuses the corpus,
      `"skip"` counts and reports it.
    - `unknown`: the token for characters that the tokenizer has no token for; None is the one that
      its file names, and without one such texts are refused.
    - `chat`: a `Chat`, or the name of one such as `"chatml"`: records are conversations, lists of
      messages under `field` or the usual names, or pairs such as `prompt` and `completion`. Only
      what the assistant says is learned.
    - `begin`: a special token that is put before each document and never learned, such as `"<s>"`
      of Llama 2.

    >>> Corpus("wiki/*.jsonl.gz", tokenizer="gpt2/tokenizer.json").held_out
    0.01
    >>> Corpus("python", format="json")
    Traceback (most recent call last):
    ValueError: `Corpus(format='json')`: choose 'auto' or 'text' or 'jsonl' or 'parquet' or
        'arrayrecord'; did you mean 'jsonl'?
    """

    files: str | tuple[str, ...]
    format: Format = "auto"
    field: str | None = None
    separator: str | None = None
    tokenizer: str = "bytes"
    end: str | None = None
    held_out: float = 0.01
    bad: Literal["stop", "skip"] = "stop"
    unknown: str | None = None
    chat: Chat | str | None = None
    begin: str | None = None

    def __post_init__(self) -> None:
        # The fields of a frozen dataclass are set by `object`.
        object.__setattr__(self, "files", _checked_files(self.files))
        _check_choice("format", self.format, get_args(Format))
        _check_choice("bad", self.bad, ("stop", "skip"))
        object.__setattr__(self, "chat", _chat(self.chat))
        for name in ("field", "separator", "end", "unknown", "begin"):
            text_or_none(f"Corpus({name}=...)", getattr(self, name))
        object.__setattr__(
            self, "tokenizer", tokenizer_name("Corpus(tokenizer=...)", self.tokenizer)
        )
        # Bytes and learned tokenizers have a token for every byte, and so for all texts.
        made_here = self.tokenizer == "bytes" or learned_size(self.tokenizer) is not None
        if self.unknown and made_here:
            raise ValueError(
                f"`Corpus(unknown={shown(self.unknown)})` is a token of a tokenizer's file; "
                f"`tokenizer={self.tokenizer!r}` lacks no character. Leave it out."
            )
        if self.begin and made_here:
            raise ValueError(
                f"`Corpus(begin={shown(self.begin)})` is a token of a tokenizer's file; "
                f"`tokenizer={self.tokenizer!r}` has no special token but what ends a document. "
                "Leave it out."
            )
        if self.prefix and isinstance(self.chat, Chat) and self.chat.begin:
            raise ValueError(
                f"`Corpus(begin={shown(self.begin)})`: conversations of this format begin with "
                f"{shown(self.chat.begin)}. Leave `begin` out."
            )
        if not _is_share(self.held_out):
            raise ValueError(
                f"`Corpus(held_out={shown(self.held_out)})` is the share of documents kept for "
                "evaluation: at least 0, below 1."
            )

    @property
    def prefix(self) -> str:
        """What stands before a document: `begin`, unless the format of conversations has it."""
        if isinstance(self.chat, Chat) and self.chat.begin == self.begin:
            return ""
        return self.begin or ""


def _is_share(value: Any) -> bool:
    """Whether something is a number from 0 up, below 1; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value < 1


def _chat(value: Any) -> Chat | None:
    """The format of conversations, which may be given by its name."""
    if value is None or isinstance(value, Chat):
        return value
    if isinstance(value, str) and value in CHATS:
        return CHATS[value]
    raise ValueError(
        f"`Corpus(chat={shown(value)})` is a `Chat(...)`, or the name of a known one, "
        f"{' or '.join(map(repr, CHATS))}{nearest(value, CHATS)}"
    )


def _check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuse what is none of some texts, and name the nearest of them."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"`Corpus({name}={shown(value)})`: choose "
            f"{' or '.join(map(repr, choices))}{nearest(value, choices)}"
        )


def _checked_files(files: Any) -> str | tuple[str, ...]:
    """Paths and patterns as text, a single one by itself; one that is listed twice is refused."""
    if isinstance(files, str | os.PathLike):
        return path_text("Corpus(files=...)", files, FILES_EXAMPLES)
    if not isinstance(files, list | tuple) or not files:
        raise ValueError(f"`Corpus(files={shown(files)})` names no files. {FILES_EXAMPLES}")
    texts = tuple(path_text("Corpus(files=(..., …))", file, FILES_EXAMPLES) for file in files)
    # Listed twice, a file would be read once and counted for two, or be a mistake.
    for text, count in Counter(texts).items():
        if count > 1:
            raise ValueError(
                f"`Corpus(files=...)` lists {shown(text)} twice. Every file is read "
                "once; list it once."
            )
    return texts


@dataclass(frozen=True)
class Source:
    """One file of a corpus, as it was when it was found."""

    path: Path
    format: str
    size: int
    modified_ns: int


@dataclass(frozen=True)
class Skipped:
    """Records of a file that were not what its format says, and were passed over.

    - `file`: the path of the file.
    - `count`: how many there were.
    - `first`: where the first one is, and what is wrong with it.
    """

    file: str
    count: int
    first: str

    def __post_init__(self) -> None:
        whole_number("Skipped(count=...)", self.count, 0, (1 << 63) - 1)
        for name in ("file", "first"):
            text_or_none(f"Skipped({name}=...)", getattr(self, name))

    def __str__(self) -> str:
        return f"{self.file}: {self.count} skipped, the first at {self.first}"


@dataclass
class Reading:
    """How far a reading has come.

    - `finished_bytes` is the size of the files that are read, `position` how far the file is read
      that is being read now, both in bytes as they are on disk.
    - `empty` counts empty documents, and `skipped` has bad records by file.
    - `separators` counts what stood between documents.
    """

    finished_bytes: int = 0
    position: Callable[[], float] = lambda: 0.0
    empty: int = 0
    separators: int = 0
    skipped: dict[Path, Skipped] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """How much of the files is read, as they are on disk."""
        return self.finished_bytes + int(self.position())


def nearest(value: Any, choices: Iterable[str]) -> str:
    """The end of a message about a wrong text: the choice that is most like it, if one is.

    >>> nearest("jsnol", ["text", "jsonl"])
    "; did you mean 'jsonl'?"
    """
    # To compare long texts takes long.
    if not isinstance(value, str) or len(value) >= 256:
        return "."
    near = difflib.get_close_matches(value, list(choices), 1)
    if not near:
        return "."
    return f"; did you mean {near[0]!r}?"
