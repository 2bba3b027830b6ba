r"""Conversations as documents: how their turns are written, and which of it is learned.

    {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}

    <|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n
                                                                  -----------  learned

A document is made of pieces. What messages say is encoded piece by piece, so that a text which
reads `<|im_end|>` ends no turn: only the format's own markers are special tokens, where the
tokenizer marks them as such.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardlib.data._checks import listed, shown
from shardlib.data._tokenizer import Tokenizer


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _is_pair(value: Any) -> bool:
    is_pair = isinstance(value, tuple) and len(value) == 2
    return is_pair and all(isinstance(text, str) for text in value)


class Piece(NamedTuple):
    """A part of a document.

    - `text`: what it reads.
    - `is_marker`: whether special tokens are what they read.
    - `is_learned`: whether a model learns to write it.
    """

    text: str
    is_marker: bool = False
    is_learned: bool = True


class Document(NamedTuple):
    """A document, made of pieces; a plain text is one."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        """The whole text, as people read it."""
        return "".join(piece.text for piece in self.pieces)


class Encoded(NamedTuple):
    """The tokens of a document, and which of them are learned."""

    ids: np.ndarray
    learned: np.ndarray

    def beginning_with(self, token: int) -> "Encoded":
        """The same after a token that is not learned."""
        ids = np.concatenate([np.array([token], np.uint32), self.ids])
        return Encoded(ids, np.concatenate([[False], self.learned]))


@dataclass(frozen=True)
class Chat:
    """How a conversation is written as text (a chat template), and which turns are learned.

    A turn is `before`, what its message says, and `after`. A learned turn is learned from its first
    word to the end of `after`, so that a model ends its turn; `before`, and what stands `between`
    turns, is never learned. The end of the document is learned if the last turn is.

    - `before`: what stands before a message, in which `{role}` is replaced.
    - `after`: what stands after a message.
    - `between`: what stands between two turns.
    - `begin`: what a conversation begins with.
    - `roles`: the roles that messages may have, in pairs with how each is written, such as
      `("assistant", "model")`.
    - `learned`: the roles whose messages are learned, by default the assistant's.
    - `special`: tokens that the format needs; a tokenizer that lacks one is refused.

    Known formats go by name, in `Corpus(chat="chatml")`: `chatml` (Qwen's), `llama3`, `gemma`,
    `plain`, which needs no special tokens, and `bare`, with nothing around messages.

    >>> chat = Chat(before="[{role}] ", after=".")
    >>> [piece.text for piece in chat.document([("user", "Hi"), ("assistant", "Ho")]).pieces]
    ['[user] ', 'Hi', '.', '[assistant] ', 'Ho', '.']
    """

    before: str = ""
    after: str = ""
    between: str = ""
    begin: str = ""
    roles: tuple[tuple[str, str], ...] = (
        ("system", "system"),
        ("user", "user"),
        ("assistant", "assistant"),
        ("tool", "tool"),
    )
    learned: tuple[str, ...] = ("assistant",)
    special: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("before", "after", "between", "begin"):
            value = getattr(self, name)
            if not isinstance(value, str):
                raise ValueError(f"`Chat({name}={shown(value)})` is a text.")
        for name in ("roles", "learned", "special"):
            # Read from JSON, tuples are lists.
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                raise ValueError(f"`Chat({name}={shown(value)})` is a tuple.")
            object.__setattr__(self, name, tuple(map(_as_tuple, value)))
        if not all(_is_pair(pair) for pair in self.roles):
            raise ValueError(
                f"`Chat(roles={shown(self.roles)})` are pairs, of a role and how it is written: "
                '`(("user", "user"), ("assistant", "model"))`.'
            )
        known = [role for role, _ in self.roles]
        for role in self.learned:
            if role not in known:
                raise ValueError(
                    f"`Chat(learned={shown(self.learned)})`: {shown(role)} is none of the roles, "
                    f"{listed(known)}."
                )
        if not self.learned:
            raise ValueError("`Chat(learned=())`: nothing would be learned; name a role.")
        if not all(isinstance(token, str) and token for token in self.special):
            raise ValueError(f"`Chat(special={shown(self.special)})` are tokens, as texts.")

    def document(self, messages: Sequence[tuple[str, str]]) -> Document:
        """A conversation, given as roles and what they say.

        One that has nothing to learn, or a role that the format does not know, is a `ValueError`.
        """
        pieces = [Piece(self.begin, is_marker=True, is_learned=False)]
        for number, (role, content) in enumerate(messages):
            if number:
                pieces.append(Piece(self.between, is_marker=True, is_learned=False))
            is_learned = role in self.learned
            pieces += [
                self._opening(role),
                Piece(content, is_learned=is_learned),
                Piece(self.after, is_marker=True, is_learned=is_learned),
            ]
        if not any(piece.is_learned for piece in pieces):
            raise ValueError(f"nothing to learn: no message of {listed(self.learned)}")
        return Document(tuple(piece for piece in pieces if piece.text))

    def prompt(self, messages: Sequence[tuple[str, str]], role: str = "assistant") -> Document:
        """A conversation up to where a role begins to speak."""
        pieces = [Piece(self.begin, is_marker=True)]
        for each, content in messages:
            # Piece by piece, as in documents, so that tokens are the same.
            pieces += [
                self._opening(each),
                Piece(content),
                Piece(self.after, is_marker=True),
                Piece(self.between, is_marker=True),
            ]
        pieces.append(self._opening(role))
        return Document(tuple(piece for piece in pieces if piece.text))

    def prompt_ids(self, tokenizer: Tokenizer, messages: Sequence[tuple[str, str]]) -> np.ndarray:
        """The tokens of a conversation up to where the assistant begins to speak."""
        return encode_documents(tokenizer, [self.prompt(messages)])[0].ids

    def end_of_turn(self, tokenizer: Tokenizer) -> int | None:
        """The special token that ends a turn; None if a turn ends in words."""
        if self.after not in self.special:
            return None
        (token,) = tokenizer.encode_marker(self.after)
        return int(token)

    def _opening(self, role: str) -> Piece:
        """What stands before a message."""
        written = dict(self.roles).get(role)
        if written is None:
            known = listed(role for role, _ in self.roles)
            raise ValueError(f"a message of the role {shown(role)}; the format knows {known}")
        return Piece(self.before.replace("{role}", written), is_marker=True, is_learned=False)

    def check(self, tokenizer: Tokenizer, name: str) -> None:
        """Refuse a tokenizer that lacks special tokens of the format."""
        missing = [token for token in self.special if len(tokenizer.encode_marker(token)) != 1]
        if missing:
            raise ValueError(
                f"`Corpus(chat=...)` needs the special tokens {listed(missing)}, which the "
                f"tokenizer `{name}` does not have. Take the format that the model has learned; "
                'for one that has learned none, `chat="plain"`.'
            )


CHATS = {
    "chatml": Chat(
        "<|im_start|>{role}\n", "<|im_end|>", "\n", special=("<|im_start|>", "<|im_end|>")
    ),
    "llama3": Chat(
        "<|start_header_id|>{role}<|end_header_id|>\n\n",
        "<|eot_id|>",
        begin="<|begin_of_text|>",
        special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "gemma": Chat(
        "<start_of_turn>{role}\n",
        "<end_of_turn>",
        "\n",
        begin="<bos>",
        roles=(("user", "user"), ("assistant", "model")),
        special=("<bos>", "<start_of_turn>", "<end_of_turn>"),
    ),
    "plain": Chat("### {role}:\n", "\n", "\n"),
    "bare": Chat(),
}
"""The formats that are known by name."""


def encode_documents(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Encoded]:
    """The tokens of documents, without those that end them."""
    # Together, since a tokenizer encodes texts in several threads.
    texts = []
    for document in documents:
        texts += [piece.text for piece in document.pieces if not piece.is_marker]
    encoded_texts = iter(tokenizer.encode_batch(texts))
    markers: dict[str, np.ndarray] = {}
    encoded = []
    for document in documents:
        ids, learned = [], []
        for piece in document.pieces:
            if piece.is_marker and piece.text not in markers:
                markers[piece.text] = tokenizer.encode_marker(piece.text)
            part = markers[piece.text] if piece.is_marker else next(encoded_texts)
            ids.append(part)
            learned.append(np.full(len(part), piece.is_learned))
        encoded.append(Encoded(np.concatenate(ids), np.concatenate(learned)))
    return encoded


# What others call the roles.
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
# Pairs of keys in which a record may have a question and its answer.
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
LISTS = ("messages", "conversations", "conversation")
"""Keys under which a record may have a list of messages."""
KEYS = (
    *LISTS,
    "system",
    "tools",
    "functions",
    "instruction",
    "input",
    "output",
    *{key for pair in _PAIRS for key in pair},
)
"""All keys that a record with a conversation may have."""


def messages_of(
    record: Mapping[str, Any], key: str | None, roles: Collection[str] = ()
) -> list[tuple[str, str]]:
    """The roles and what they say in a record, in one of the forms that are in use.

    A list of messages under `key`, or else under one of `LISTS`, each with `role` and `content` or
    `from` and `value`; a question and its answer, such as `prompt` and `completion`; or an
    `instruction`, with an `input` or without, and its `output`. `system` may stand before any of
    them. Anything else is a `ValueError`. What others call a role gets the name that it has here,
    unless it is one of `roles`.
    """
    for unknown in ("tools", "functions"):
        if record.get(unknown):
            raise ValueError(f"`{unknown}`, which the formats here do not write")
    said_first = [("system", _text(record, "system"))] if record.get("system") else []
    said = []
    for role, content in _said_by_others(record, key):
        said.append((role if role in roles else _ROLES.get(role, role), content))
    return said_first + said


def _said_by_others(record: Mapping[str, Any], key: str | None) -> list[tuple[str, str]]:
    """The messages of a record but for its `system`, with roles as it calls them."""
    lists = [name for name in ((key,) if key else LISTS) if name in record]
    if lists:
        return _listed_messages(record[lists[0]], lists[0])
    pairs = [pair for pair in _PAIRS if not key and set(pair) <= record.keys()]
    if pairs:
        question, answer = pairs[0]
        # They may be lists of messages themselves.
        if isinstance(record[question], list) and isinstance(record[answer], list):
            asked = _listed_messages(record[question], question)
            return asked + _listed_messages(record[answer], answer)
        texts = [_text(record, name) for name in pairs[0]]
        return [("user", texts[0]), ("assistant", texts[1])]
    if not key and {"instruction", "output"} <= record.keys():
        asked = _text(record, "instruction")
        if record.get("input"):
            asked += "\n\n" + _text(record, "input")
        return [("user", asked), ("assistant", _text(record, "output"))]
    expected = f"`{key}`" if key else "`messages`, `prompt` and `completion`, or `instruction`"
    raise ValueError(f"no conversation: no {expected}; there is {listed(record) or 'none'}")


def _listed_messages(messages: Any, key: str) -> list[tuple[str, str]]:
    """The messages of a list."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`{key}` is no list of messages")
    found = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise ValueError(f"`{key}` has {shown(message)}, which is no message")
        for unknown in ("tool_calls", "function_call", "weight", "train", "reasoning_content"):
            # A weight of one, and what is to be trained on, are as if nothing were said.
            if message.get(unknown) not in (None, [], {}, "", 1):
                raise ValueError(
                    f"`{key}` has a message with `{unknown}`, which the formats here do not know"
                )
        names = ("role", "content") if "role" in message else ("from", "value")
        if not set(names) <= message.keys():
            raise ValueError(
                f"`{key}` has a message with {listed(message) or 'nothing'}; a message has `role` "
                "and `content`, or `from` and `value`"
            )
        role, content = (_text(message, name) for name in names)
        found.append((role, content))
    return found


def _text(record: Mapping[str, Any], key: str) -> str:
    """The text under a key."""
    if not isinstance(record[key], str):
        raise ValueError(f"`{key}` is {shown(record[key])}, where text was expected")
    return record[key]
