"""Examples of one length from documents of any: every one has a number, and the place in the data
is one number too.

    N  examples in one pass
    R  rows of a batch, those of this process
    S  length of an example

An example has S + 1 tokens: S inputs and, one further, their targets. Examples are drawn at
positions 0, 1, 2, ... without end; a pass over the data, an epoch, is N of them, in an order of its
own. Step k of a run takes the positions from k * batch on, whatever the number of processes, and
each process reads its rows of them and no more.
"""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shardlib.data._blocks import windows
from shardlib.data._checks import shown, whole_number, whole_numbers
from shardlib.data._packages import package
from shardlib.data._tokens import Tokens

_ENDLESS = 1 << 62
_ROUNDS = 4  # of the shuffle, as grain's own datasets have it
_MOST_LENGTH = _MOST_BATCH = 1 << 24
_MOST_SEED = (1 << 63) - 1
_MOST_THREADS, _MOST_AHEAD = 1 << 10, 1 << 16
_MAX_EXAMPLES = 1 << 32  # beyond, grain's shuffle cuts off what 32 bits do not hold

Example = dict[str, np.ndarray]


@dataclass(frozen=True)
class Sequences:
    """Examples of one length, made of the documents of a corpus, shuffled, in batches.

    - `tokens`: the documents, such as `prepare(corpus).train`.
    - `length`: how many tokens of an example the model reads. An example has one more, since the
      target of each token is the next one.
    - `batch`: how many examples a step takes, over all processes.
    - `seed`: shuffles the examples, anew for each epoch; None takes them in order.
    - `documents`: with `"cut"`, examples are windows over all documents one after the other, which
      are cut where a window ends; what is behind the last whole window is left out. With
      `"whole"`, only documents longer than an example are cut: others are whole in one, as many as
      fit in their order, and the rest of the example is padding.

    Too few tokens for one example are a `ValueError`.

    >>> ids = np.array([1, 2, 3, 0, 4, 0, 5, 6, 0], np.uint16)
    >>> tokens = Tokens(ids, np.array([4, 6, 9]), vocab=7, end=0, bytes=6)
    >>> examples = Sequences(tokens, length=4, batch=1, seed=None).examples([0, 1])
    >>> examples["tokens"]
    array([[1, 2, 3, 0, 4],
           [4, 0, 5, 6, 0]], dtype=int32)

    `segments` number the documents within an example, -1 is padding. `mask` is 1 for the targets
    that count: those in the same document as the token before them, since nothing of it tells how
    the next document begins; of conversations, those of what is learned.

    >>> examples["segments"]
    array([[0, 0, 0, 0, 1],
           [0, 0, 1, 1, 1]], dtype=int32)
    >>> examples["mask"]
    array([[1., 1., 1., 0.],
           [1., 0., 1., 1.]], dtype=float32)
    >>> Sequences(tokens, length=4, batch=1, documents="whole", seed=None).examples([0,
    ...     1])["tokens"]
    array([[1, 2, 3, 0, 0],
           [4, 0, 5, 6, 0]], dtype=int32)
    """

    tokens: Tokens
    length: int
    batch: int
    seed: int | None = 0
    documents: Literal["cut", "whole"] = "cut"

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tokens):
            raise ValueError(
                "`Sequences` are of `Tokens`, such as `prepare(corpus).train`; got "
                f"{type(self.tokens).__name__}."
            )
        whole_number("Sequences(length=...)", self.length, 1, _MOST_LENGTH)
        whole_number("Sequences(batch=...)", self.batch, 1, _MOST_BATCH)
        _check_seed(self.seed)
        if not isinstance(self.documents, str) or self.documents not in ("cut", "whole"):
            raise ValueError(
                f"`Sequences(documents={shown(self.documents)})`: choose 'cut' or 'whole'."
            )
        if not len(self):
            raise ValueError(self._describe_too_few())
        # The shuffle computes in 32 bits.
        if len(self) > _MAX_EXAMPLES and self.seed is not None:
            raise ValueError(
                f"{len(self)} examples are more than can be shuffled, {_MAX_EXAMPLES}: choose a "
                "greater length, or split the corpus."
            )

    def _describe_too_few(self) -> str:
        """The error for tokens that are too few for one example."""
        way_out = (
            "Which documents are held out is told from their content, and of a few "
            "documents it may be none: take more, or for evaluation a corpus of its own."
        )
        if len(self.tokens) > 1:
            way_out = f"A length up to {len(self.tokens) - 1} fits; or take more text."
        return (
            f"`Sequences(length={self.length})` needs {self.length + 1} tokens for one "
            f"example, and there are {len(self.tokens)} of {self.tokens.documents} documents. "
            f"{way_out}"
        )

    def __len__(self) -> int:
        if self.documents == "whole":
            return len(self._spans[0])
        # Windows overlap by one token: the last target of one is the first input of the next.
        return max(0, (len(self.tokens) - 1) // self.length)

    @property
    def steps(self) -> int:
        """How many batches one pass takes, the last perhaps not full."""
        return -(-len(self) // self.batch)

    def examples(self, positions: Any) -> Example:
        """The examples at these positions.

        They are `tokens` and `segments`, int32 `[R, S + 1]`, and `mask`, float32 `[R, S]`.
        """
        return self._read(self._indices(whole_numbers("positions", positions, 0, _ENDLESS)))

    def local(self, rows: Any = slice(None), *, threads: int = 2, ahead: int = 8) -> "Reader":
        """Batch after batch without end, of each these rows: what one process holds of the batch of
        all.

        `rows` are a slice or numbers below `batch`. `threads` read up to `ahead` batches before
        they are asked for.
        """
        rows = self._rows(rows)
        if self.batch > len(self):
            longest = (len(self.tokens) - 1) // self.batch
            length = ""
            if longest:
                length = f"a length up to {longest}, "
            raise ValueError(
                f"`Sequences(batch={self.batch})` is more than the {len(self)} examples of length "
                f"{self.length} that the {len(self.tokens)} tokens make. Choose a batch up to "
                f"{len(self)}, {length}or take more text."
            )
        whole_number("local(threads=...)", threads, 0, _MOST_THREADS)
        whole_number("local(ahead=...)", ahead, 0, _MOST_AHEAD)
        return Reader(self, rows, min(threads, ahead), ahead)

    def once(self, rows: Any = slice(None)) -> Iterator[Example]:
        """Every example once, those of the first epoch, in `steps` batches.

        The last batch is filled up with padding.
        """
        rows = self._rows(rows)
        for step in range(self.steps):
            positions = step * self.batch + rows
            indices = self._indices(np.minimum(positions, len(self) - 1))
            # Beyond the last example, the last batch has padding.
            yield self._read(np.where(positions < len(self), indices, -1))

    @functools.cached_property
    def identity(self) -> dict[str, Any]:
        """What decides which example is at a position.

        Where it differs, the same place in the data means another one.
        """
        seed = self.seed
        if seed is not None:
            seed = int(seed)
        return {
            "data": self.tokens.fingerprint,
            "length": int(self.length),
            "seed": seed,
            "documents": self.documents,
        }

    def _rows(self, rows: Any) -> np.ndarray:
        try:
            if isinstance(rows, slice):
                return np.arange(self.batch)[rows]
            return whole_numbers("rows", rows, 0, self.batch - 1)
        except (TypeError, ValueError, IndexError):
            raise ValueError(
                f"`rows` are a slice, or numbers from 0 to {self.batch - 1}, of the {self.batch} "
                f"rows of a batch; got {shown(rows)}."
            ) from None

    def _indices(self, positions: np.ndarray) -> np.ndarray:
        """Which example stands at each position."""
        # Positions go on without end: a pass is over after as many as there are examples.
        epochs, within = np.divmod(positions, len(self))
        if self.seed is None:
            return within
        # It computes where a single index goes, so that no order of all examples is ever stored.
        shuffle = package("grain.experimental", "A shuffle").index_shuffle
        seed_of_epoch: dict[int, int] = {}
        shuffled: list[int] = []
        for index, epoch in zip(within.tolist(), epochs.tolist(), strict=True):
            if epoch not in seed_of_epoch:
                seed_of_epoch[epoch] = _epoch_seed(int(self.seed), epoch)
            seed = seed_of_epoch[epoch]
            shuffled.append(shuffle(index, max_index=len(self) - 1, seed=seed, rounds=_ROUNDS))
        return np.array(shuffled, np.int64)

    @functools.cached_property
    def _spans(self) -> tuple[np.ndarray, np.ndarray]:
        """Of whole documents: where each example begins and ends."""
        return _whole(self.tokens.ends, self.length)

    def _read(self, indices: np.ndarray) -> Example:
        """The examples of these numbers; -1 is one of padding."""
        if self.documents == "cut":
            starts = np.maximum(indices, 0) * self.length
            stops = starts + self.length + 1
        else:
            begins, ends = self._spans
            starts, stops = begins[indices], ends[indices]
        # An example of padding has no tokens: it stops where it starts.
        stops = np.where(indices < 0, starts, stops)
        tokens_RS = self._ids_from(starts).astype(np.int32)
        segments_RS = _segments(self.tokens.ends, starts, stops, self.length + 1)
        # A target counts if it is in the same document as the token before it.
        mask_RS = segments_RS[:, 1:] == segments_RS[:, :-1]
        if self.tokens.switches is not None:
            targets_RS = starts[:, None] + np.arange(1, self.length + 1)
            mask_RS &= self.tokens.are_learned(targets_RS)
        sizes = stops - starts
        if (sizes <= self.length).any():
            padding_RS = np.arange(self.length + 1) >= sizes[:, None]
            tokens_RS[padding_RS], segments_RS[padding_RS] = self.tokens.end, -1
            mask_RS &= ~padding_RS[:, 1:]
        return {"tokens": tokens_RS, "segments": segments_RS, "mask": mask_RS.astype(np.float32)}

    def _ids_from(self, starts: np.ndarray) -> np.ndarray:
        """The ids of a window from each start on, [R, S + 1]; refused if one is no id at all."""
        ids_RS = windows(self.tokens.ids, starts, self.length + 1)
        if ids_RS.size and not 0 <= int(ids_RS.min()) <= int(ids_RS.max()) < self.tokens.vocab:
            raise ValueError(
                f"`Tokens(vocab={self.tokens.vocab})` have ids from {ids_RS.min()} to "
                f"{ids_RS.max()} in these examples, and ids are from 0 to {self.tokens.vocab - 1}: "
                "the vocabulary is larger, or the ids are damaged."
            )
        return ids_RS


class Reader:
    """The batches of one process, one after the other without end, read ahead by threads.

    Its state is how many examples all processes together have taken: any number of processes, with
    any batch, goes on from there.
    """

    def __init__(self, sequences: Sequences, rows: np.ndarray, threads: int, ahead: int) -> None:
        if not isinstance(sequences, Sequences):
            raise ValueError(
                "A `Reader` is of `Sequences`, whose method `local` makes it; got "
                f"{type(sequences).__name__}."
            )
        self._sequences, self._rows = sequences, sequences._rows(rows)
        self._threads = whole_number("Reader(threads=...)", threads, 0, _MOST_THREADS)
        self._ahead = whole_number("Reader(ahead=...)", ahead, 0, _MOST_AHEAD)
        self._start, self._taken = 0, 0
        self._iterator: Any = None

    def __iter__(self) -> "Reader":
        return self

    def __next__(self) -> Example:
        if self._iterator is None:
            grain = package("grain", "Reading batches")
            # Grain reads steps by number in its threads, and gives them in order.
            source = _Steps(self._sequences, self._rows, self._start)
            options = grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=self._ahead)
            self._iterator = iter(grain.MapDataset.source(source).to_iter_dataset(options))
        example = next(self._iterator)
        self._taken += 1
        return example

    def get_state(self) -> dict[str, Any]:
        """The place in the data, for JSON: `examples` taken by all processes, and of which data."""
        return {
            "examples": self._start + self._taken * int(self._sequences.batch),
            **self._sequences.identity,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a place in the data; from `{"examples": 0}`, start again."""
        examples: Any = None
        if isinstance(state, Mapping):
            examples = state.get("examples")
        # Python takes True for 1.
        is_int = isinstance(examples, int) and not isinstance(examples, bool)
        if not is_int or not 0 <= examples < _ENDLESS:
            raise ValueError(
                "The state of a `Reader` tells how many `examples` were taken, from 0 up; got "
                f"{shown(state)}."
            )
        differences = self._differences(state)
        if differences:
            raise ValueError(
                f"The state is a place in other data: {', '.join(differences)}. Take the same, or "
                f'give up the place: `set_state({{"examples": {examples}}})` takes the {examples} '
                "as a number of these."
            )
        self.close()
        self._start, self._taken = examples, 0

    def _differences(self, state: Mapping[str, Any]) -> list[str]:
        """In what the data of a state are others than these, for a message."""
        differences: list[str] = []
        for name, value in self._sequences.identity.items():
            # A state may leave out what it is of, and is then taken for one of these data.
            if name in state and state[name] != value:
                differences.append(f"`{name}` was {shown(state[name])} and is {value!r}")
        return differences

    def close(self) -> None:
        """Stop reading ahead. The next batch begins it again."""
        if self._iterator is not None:
            self._iterator.close()
        self._start, self._taken = self.get_state()["examples"], 0
        self._iterator = None


@dataclass(frozen=True)
class _Steps:
    """The batches of one process by number, as grain reads them."""

    sequences: Sequences
    rows: np.ndarray
    start: int

    def __len__(self) -> int:
        return _ENDLESS

    def __getitem__(self, step: int) -> Example:
        return self.sequences.examples(self.start + step * self.sequences.batch + self.rows)


def _check_seed(seed: Any) -> None:
    """Refuse a seed that is neither None nor a whole number of at most 63 bits."""
    if seed is None:
        return
    is_whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not is_whole or abs(int(seed)) > _MOST_SEED:
        raise ValueError(
            f"`Sequences(seed={shown(seed)})` is a whole number, or None for the order as it is; "
            "of at most 63 bits."
        )


def _epoch_seed(seed: int, epoch: int) -> int:
    """The seed of one epoch's order.

    It is hashed, since with a sum the second epoch of one seed would be the first of the next.
    """
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _segments(ends: np.ndarray, starts: np.ndarray, stops: np.ndarray, size: int) -> np.ndarray:
    """Which document of its row each token belongs to, counted from 0 in each row.

    Rows begin and stop there among all tokens, and documents end at `ends`.
    """
    # A count goes up at those ends of documents that are strictly within a row. In row r these are
    # `counts[r]` ends, the one of number `first[r]` and those after it.
    first = np.searchsorted(ends, starts, side="right")
    counts = np.maximum(np.searchsorted(ends, stops, side="left") - first, 0)
    rows = np.repeat(np.arange(len(starts)), counts)
    documents = _numbers_within(counts) + np.repeat(first, counts)
    # A one where a document begins within a row; sums along the row number them.
    segments = np.zeros((len(starts), size), np.int32)
    segments[rows, ends[documents] - starts[rows]] = 1
    return np.cumsum(segments, axis=1, dtype=np.int32)


def _numbers_within(counts: np.ndarray) -> np.ndarray:
    """The numbers from 0 up to each count, one after the other.

    >>> _numbers_within(np.array([2, 0, 3]))
    array([0, 1, 0, 1, 2])
    """
    begins = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(begins, counts)


def _whole(ends: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Where examples of whole documents begin and end.

    Every example is one stretch of the tokens: of a document that is too long, all parts but the
    last fill an example, and the last begins one.
    """
    # An example has one token more than inputs, the last target.
    size = length + 1
    starts, stops = np.concatenate([[0], ends[:-1]])[: len(ends)], np.asarray(ends)
    # Each part of a long document begins with the last token of the one before, the input to its
    # first target.
    parts = np.maximum(1, -(-(stops - starts - 1) // length))
    starts = np.repeat(starts, parts) + _numbers_within(parts) * length
    stops = np.minimum(starts + size, np.repeat(stops, parts))
    # For each part the first one that does not fit into an example that begins with it; these are
    # followed from the first part on. A part that continues a document never fits behind the one
    # before, which is full.
    following = np.searchsorted(stops, starts + size, side="right")
    begins, at, jumps = [], 0, following.tolist()
    while at < len(jumps):
        begins.append(at)
        at = jumps[at]
    first = np.array(begins, np.int64)
    return starts[first], stops[following[first] - 1]
