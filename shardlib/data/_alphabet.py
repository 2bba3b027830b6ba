"""Which characters a tokenizer lacks, and would leave out of a text without a word."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from shardlib.data._packages import package

# How to go on, at the end of messages about characters that a tokenizer lacks.
LACKING = (
    'Take a tokenizer that has every character, such as `Corpus(tokenizer="bytes")` or '
    '`"bpe:4096"`; or let a token stand for those that are lacking, `Corpus(unknown="<unk>")`, one '
    "of its vocabulary."
)


@dataclass(frozen=True)
class Alphabet:
    """Which characters a tokenizer has that would leave out those it lacks.

    Only a BPE without an unknown token does. Such a model sees a text after it was normalized and
    split into words, and leaves out each character that is no token of its vocabulary.
    """

    known: set[str] = field(default_factory=set)  # of the characters that were looked up

    def check(self, inner: Any, texts: list[str], name: str) -> None:
        """Refuse texts with characters that the tokenizer would leave out.

        Args:
            inner: the tokenizer of the `tokenizers` package.
            texts: documents, some of a batch.
            name: the tokenizer's name, for the message.
        """
        normalized = [_normalized(inner, text) for text in texts]
        # Texts have few characters that differ, and each is looked up once.
        fresh = set().union(*normalized) - self.known
        lacking = {character for character in fresh if not _has(inner, character)}
        self.known.update(fresh - lacking)
        if lacking:
            raise ValueError(_describe_lacking(lacking, normalized, name))


def _normalized(inner: Any, text: str) -> str:
    """A text as the model of a tokenizer sees it, before it is split into words."""
    if inner.normalizer is None:
        return text
    return inner.normalizer.normalize_str(text)


def _describe_lacking(lacking: set[str], texts: list[str], name: str) -> str:
    """The error for characters that a tokenizer would leave out: which, and how many there are."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(character for character in text if character in lacking)
    plural = "s" if len(texts) != 1 else ""
    return (
        f"`{name}` has no token for {_most_frequent(counts)}, and would leave out "
        f"{counts.total():,} of the {sum(map(len, texts)):,} characters of the {len(texts):,} "
        f"text{plural} it was given. {LACKING}"
    )


def _most_frequent(counts: Counter[str], most: int = 8) -> str:
    """The most frequent of some characters with their numbers, and how many more there are."""
    worst = [f"{character!r} ({count} times)" for character, count in counts.most_common(most)]
    text = ", ".join(worst)
    if len(counts) > most:
        text += f" and {len(counts) - most} more"
    return text


def _has(inner: Any, character: str) -> bool:
    """Whether the model has a token for each part of a character that reaches it.

    Of one that is split away, as a space may be, nothing reaches it.
    """
    words = [character]
    if inner.pre_tokenizer is not None:
        words = [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(character)]
    # One character may become several, bytes for example.
    parts = set().union(*words)
    for part in parts:
        # Twice too: within a word, some models write a character otherwise than at its begin or
        # end.
        for text in (part, 2 * part):
            tokens = inner.model.tokenize(text)
            if not tokens or tokens[-1].offsets[1] < len(text.encode()):
                return False
    return True


def leaves_out(inner: Any) -> bool:
    """Whether there may be characters that a tokenizer leaves out without a word."""
    model = inner.model
    if type(model).__name__ != "BPE":
        return False  # others have a token for what is unknown, or fail
    ids = inner.get_vocab(with_added_tokens=False)
    if model.unk_token in ids:
        return False
    if model.byte_fallback and all(f"<0x{byte:02X}>" in ids for byte in range(256)):
        return False
    marks = set(package("tokenizers", "A tokenizer").pre_tokenizers.ByteLevel.alphabet())
    return not (_works_on_bytes(inner, marks) and marks <= ids.keys())


def _works_on_bytes(inner: Any, marks: set[str]) -> bool:
    """Whether a tokenizer takes text as bytes, for each of which it has a character as its mark.

    It is seen by a character to which Unicode has given no meaning: it becomes marks for its bytes,
    or stays itself.
    """
    text = _normalized(inner, "\U00050000")
    words = [text]
    if inner.pre_tokenizer is not None:
        words = [word for word, _ in inner.pre_tokenizer.pre_tokenize_str(text)]
    return set().union(*words) <= marks
