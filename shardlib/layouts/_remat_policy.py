"""What is kept of marked blocks, and of marked parts of them, for the backward pass, as a value.

    Remat()                          the inputs of a block; all else is computed again   "full"
    Remat.save("context", "mlp_up")  these activations too, by their names
    Remat.offload("block_in")        these too, in the memory of the host
    Remat(products="all")            the results of all matrix products too              "dots"
    Remat(products="without_batch")  but for products with batch dims, such as scores    "dots_..."
    Remat.drop("scores")             everything but what is within these parts     "selective"
    Remat.save("query", "mlp_up"...) the results of all projections, and the context    "minimal"
    Remat.compress("int8", "mlp_up") these activations too, in fewer bits
    a | b                            what either keeps
    Remat.layers((8, "none"), rest="full")   the first eight blocks another than the others
    Remat.paths(("encoder/.*", "full"), rest="none")   blocks that read such parameters
    Remat.sublinear()                the inputs of few blocks of a loop, and of others in turn
    Remat.every(4)                   the same, with those of every fourth one
    Remat.slots(3)                   as many inputs as that, with as little computed as can be

It is part of the scope that a function is traced under, so that it can be compared and hashed.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args

from shardlib._text import listed
from shardlib.checks import _arguments as check
from shardlib.layouts._chain_schedules import Binomial, Chain, Every
from shardlib.layouts._remat_parts import (
    PROJECTED,
    SCORES,
    WORDS,
    Encoding,
    Products,
    RematBudget,
    chain_stands_alone,
    check_one_place,
    checked_budget,
    encodings_by_name,
)


@dataclass(frozen=True)
class Remat:
    """What blocks marked with `sl.remat` keep for their backward pass besides their inputs.

    Everything else in them is computed again. Values are united with `|`, to what either keeps.

    - `names`: activations, by the names that the model gave them with `sl.checkpoint_name`.
    - `products`: results of matrix products: "all", those "without_batch" dims, or "none". Products
      that have batch dims are attention's scores and their like, which grow with the square of a
      sequence.
    - `dropped`: parts, by the names that the model gave them with `sl.remat(..., part=...)`. With
      any, blocks keep everything but what is computed within these parts, which keep their inputs,
      and of the rest what `names` and `products` say.
    - `compressed`: pairs of an activation's name and the encoding in which it is kept, in fewer
      bits. An activation that is also in `names` is not compressed; `products` does not affect it.
    - `chain`: for blocks in a loop, which of their inputs are kept, and in which order the others
      are computed again; made by `Remat.every`, `Remat.sublinear` and `Remat.slots`. None keeps the
      inputs of all blocks. With a chain, blocks keep nothing besides inputs.
    - `offloaded`: activations, by name, that are kept in the memory of the host: copied there in
      the forward pass, and back where the backward pass reads them.

    >>> Remat.save("context") | Remat(products="without_batch")
    Remat(names=('context',), products='without_batch')
    """

    names: tuple[str, ...] = ()
    products: Products = "none"
    dropped: tuple[str, ...] = ()
    chain: Chain | None = None
    offloaded: tuple[str, ...] = ()
    compressed: tuple[tuple[str, Encoding], ...] = ()

    def __post_init__(self) -> None:
        takes = "names of activations, in a tuple"
        names = check.texts("Remat", "names", self.names, takes)
        offloaded = check.texts("Remat", "offloaded", self.offloaded, takes)
        check.choice("Remat", "products", self.products, get_args(Products))
        dropped = check.texts("Remat", "dropped", self.dropped, "names of parts, in a tuple")
        takes = "a chain: `sl.Remat.every(4)`, `sl.Remat.sublinear()` or `sl.Remat.slots(4)`"
        check.kind("Remat", "chain", self.chain, Chain | None, takes)
        compressed = encodings_by_name(self.compressed, names)
        is_more = names or dropped or offloaded or compressed or self.products != "none"
        if self.chain is not None and is_more:
            raise chain_stands_alone()
        check_one_place((*names, *dict(compressed)), offloaded)
        # In order, so that equal values are equal whatever the order they were written in.
        check.assign(
            self,
            names=tuple(sorted(set(names))),
            dropped=tuple(sorted(set(dropped))),
            offloaded=tuple(sorted(set(offloaded))),
            compressed=compressed,
        )

    def __repr__(self) -> str:
        """What it keeps, without what it leaves at the default."""
        said = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                said.append(f"{field.name}={value!r}")
        return f"Remat({', '.join(said)})"

    @classmethod
    def save(cls, *names: str) -> "Remat":
        """Keep the activations of these names.

        >>> Remat.save("mlp_up", "context") == Remat.save("context", "mlp_up")
        True
        """
        return cls(names=names)

    @classmethod
    def offload(cls, *names: str) -> "Remat":
        """Keep the activations of these names in the memory of the host.

        >>> Remat.offload("block_in") | Remat.save("context") == Remat(
        ...     ("context",), offloaded=("block_in",))
        True
        """
        if not names:
            raise ValueError(
                "`Remat.offload()` without a name offloads nothing: name an activation, "
                '`Remat.offload("block_in")`, or use `remat="full"`.'
            )
        return cls(offloaded=names)

    @classmethod
    def compress(cls, encoding: Encoding, *names: str) -> "Remat":
        """Keep the activations of these names in fewer bits; only the backward pass reads those.

        The encoding is `"int8"`, `"int4"` or `"fp8"`, with a scale for each block of 128 numbers at
        most; `"bf16"`; or `"sign"`, a bit for whether a number is above zero, which is all that the
        derivative of a ReLU reads of its argument.

        >>> Remat.compress("int8", "mlp_up").compressed
        (('mlp_up', 'int8'),)
        """
        if not names:
            raise ValueError(
                f"`Remat.compress({check.shown(encoding)})` without a name compresses nothing: "
                'name an activation, `Remat.compress("int8", "mlp_up")`.'
            )
        return cls(compressed=tuple((name, encoding) for name in names))

    @classmethod
    def drop(cls, *parts: str) -> "Remat":
        """Keep everything but what is computed within the parts of these names.

        >>> Remat.drop("scores", "mlp") | Remat.drop("scores")
        Remat(dropped=('scores',))
        """
        if not parts:
            raise ValueError(
                "`Remat.drop()` without a part drops nothing: name one, "
                '`Remat.drop("scores")`, or use `remat="none"`.'
            )
        return cls(dropped=parts)

    @classmethod
    def every(cls, layers: int) -> "Remat":
        """Keep the inputs of one block in every `layers` of a loop.

        While the blocks between two kept inputs are differentiated, their own inputs are kept too.
        So most blocks are computed again twice: once to get their input, once to differentiate.

        >>> Remat.every(4).chain.table(16).kept
        (0, 4, 8, 12)
        """
        takes = "a number of blocks, such as 4; `sl.Remat.sublinear()` finds one"
        layers = check.whole("Remat.every", "layers", layers, takes, least=1)
        return cls(chain=Every(layers))

    @classmethod
    def sublinear(cls) -> "Remat":
        """Like `every`, with the square root of the number of blocks in the loop.

        Of `n` blocks, the inputs of about `2 * sqrt(n)` are kept at any time.
        """
        return cls(chain=Every(None))

    @classmethod
    def slots(cls, count: int) -> "Remat":
        """Keep the inputs of so many blocks of a loop at a time, and compute the least again.

        One more input is that of the block at hand. The schedule is Griewank's `revolve`.

        >>> Remat.slots(3).chain.table(16).evaluations
        18
        """
        takes = "a number of inputs that are kept at a time, such as 4"
        return cls(chain=Binomial(check.whole("Remat.slots", "count", count, takes, least=1)))

    def __or__(self, other: "Remat") -> "Remat":
        """What keeps all that either keeps; two different chains are refused."""
        if not isinstance(other, Remat):
            return NotImplemented
        if self == other:
            return self
        if self.chain is not None or other.chain is not None:
            raise chain_stands_alone()
        order = get_args(Products)
        # Each of these keeps what those before it keep.
        place = max(order.index(self.products), order.index(other.products))
        return Remat(
            (*self.names, *other.names),
            order[place],
            self._dropped_by_both(other),
            offloaded=(*self.offloaded, *other.offloaded),
            compressed=(*self.compressed, *other.compressed),
        )

    def _dropped_by_both(self, other: "Remat") -> tuple[str, ...]:
        """The parts that are dropped where everything is kept that either value keeps.

        A value without parts drops whole blocks, and so every part of them.
        """
        if not self.dropped or not other.dropped:
            return self.dropped or other.dropped
        both = tuple(part for part in self.dropped if part in other.dropped)
        if not both:
            raise ValueError(
                f"`{self!r} | {other!r}` would keep everything, for each keeps the parts that the "
                f'other drops: that is `remat="none"`. To drop the parts of both, name them '
                f"together: `Remat.drop({', '.join(map(repr, (*self.dropped, *other.dropped)))})`."
            )
        return both

    @classmethod
    def layers(
        cls, *runs: "tuple[int, str | Remat]", rest: "str | Remat | None" = None
    ) -> "RematLayers":
        """A value for each run of consecutive layers, given as pairs of a number and a value.

        All further layers keep `rest`. Without it the numbers must add up to that of all blocks.

        >>> Remat.layers((8, "none"), rest="full")
        RematLayers(runs=((8, 'none'),), rest='full')
        """
        return RematLayers(runs, rest)

    @classmethod
    def paths(
        cls, *patterns: "tuple[str, str | Remat]", rest: "str | Remat | None" = None
    ) -> "RematPaths":
        """Values for blocks by the paths of the parameters that they read.

        Each pattern is a regular expression. A block keeps the value of the first pattern that
        matches the whole path of a parameter it reads. All other blocks keep `rest`.

        >>> Remat.paths(("encoder/.*", "full"), rest="none")
        RematPaths(patterns=(('encoder/.*', 'full'),), rest='none')
        """
        return RematPaths(patterns, rest)

    @classmethod
    def budget(cls, memory: "int | str", offload: tuple[str, ...] = ()) -> "RematBudget":
        """Keep as much as fits: a step finds out what fits by compiling, before its first run.

        Args:
            memory: how much of a device's memory the step may take, in bytes or as `"14GiB"`.
            offload: names of activations that may go to the host if the device has no room.

        >>> Remat.budget("14GiB", offload=("block_in",))
        RematBudget(memory=15032385536, offload=('block_in',))
        """
        return checked_budget(memory, offload)

    @property
    def every_name(self) -> tuple[str, ...]:
        """The names of activations that are kept, in whatever form and place."""
        return tuple(sorted({*self.names, *self.offloaded, *dict(self.compressed)}))


class RematByBlock(ABC):
    """What marked blocks keep where they do not all keep the same."""

    @property
    @abstractmethod
    def asked(self) -> list[str | Remat]:
        """What blocks keep, as it was written."""

    @abstractmethod
    def of_blocks(self, read: Sequence[frozenset[str]]) -> list[Remat | None]:
        """What each block keeps, from the paths of what it reads; None for everything.

        Args:
            read: for each block, in the order of calls, the paths of the parameters that it reads.
        """

    @property
    def values(self) -> list[Remat]:
        """What blocks keep, of those that do not keep everything.

        >>> Remat.layers((2, Remat.save("context")), rest="none").values
        [Remat(names=('context',))]
        """
        return [kept for kept in map(kept_by_blocks, self.asked) if kept is not None]

    @property
    def every_name(self) -> tuple[str, ...]:
        """The names of activations that any block keeps, in whatever form and place."""
        return tuple(sorted({name for kept in self.values for name in kept.every_name}))

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The names of activations that any block keeps in the memory of the host."""
        return tuple(sorted({name for kept in self.values for name in kept.offloaded}))

    @property
    def compressed(self) -> tuple[tuple[str, Encoding], ...]:
        """The names that any block keeps in fewer bits, with their encodings."""
        return tuple(sorted({pair for kept in self.values for pair in kept.compressed}))

    @property
    def dropped(self) -> tuple[str, ...]:
        """The parts of blocks that are dropped by name: none."""
        return ()

    @property
    def chain(self) -> None:
        """Which inputs of blocks are kept in turn: all are kept."""
        return None


@dataclass(frozen=True)
class RematLayers(RematByBlock):
    """What marked blocks keep, by their place in the model; made by `Remat.layers`.

    Blocks are counted in the order in which the model calls them, a loop's as often as it calls
    them. Layers of one loop that keep different things run in loops of their own, one after the
    other, and each of these takes time to compile.

    - `runs`: how many blocks, and what they keep: a word or a `Remat`.
    - `rest`: what all further blocks keep; None if there are none.
    """

    runs: tuple[tuple[int, str | Remat], ...]
    rest: str | Remat | None = None

    def __post_init__(self) -> None:
        takes = 'runs of blocks, `(8, "none")` each'
        for number, _ in _checked_pairs("Remat.layers", "runs", self.runs, self.rest, takes):
            check.whole("Remat.layers", "runs", number, "a number of blocks", least=1)

    @property
    def asked(self) -> list[str | Remat]:
        """What blocks keep, as it was written."""
        return _asked(self.runs, self.rest)

    def of_blocks(self, read: Sequence[frozenset[str]]) -> list[Remat | None]:
        """What each of so many blocks keeps, whatever it reads."""
        count = len(read)
        values: list[Remat | None] = []
        for number, value in self.runs:
            values += [kept_by_blocks(value)] * number
        # More blocks than were told would keep what nobody chose.
        fits = len(values) == count or (len(values) < count and self.rest is not None)
        if not fits:
            raise ValueError(
                f"`{self}` is for {len(values)} blocks{' or more' if self.rest else ''}, and the "
                f"loss calls {count} that are marked with `sl.remat`. Give numbers that add up to "
                f'that, or fewer and `rest="full"`.'
            )
        if self.rest is not None:
            values += [kept_by_blocks(self.rest)] * (count - len(values))
        return values


@dataclass(frozen=True)
class RematPaths(RematByBlock):
    """What marked blocks keep, by the paths of the parameters they read; made by `Remat.paths`.

    - `patterns`: regular expressions, and what blocks keep that read a parameter whose whole path
      matches. Of several patterns the first counts.
    - `rest`: what all other blocks keep; None if there are none.
    """

    patterns: tuple[tuple[str, str | Remat], ...]
    rest: str | Remat | None = None

    def __post_init__(self) -> None:
        takes = 'patterns of paths, `("encoder/.*", "full")` each'
        pairs = _checked_pairs("Remat.paths", "patterns", self.patterns, self.rest, takes)
        for pattern, _ in pairs:
            # A pattern that does not compile is refused where it is written, and not when a step is
            # traced.
            check.pattern("Remat.paths", "patterns", pattern)

    @property
    def asked(self) -> list[str | Remat]:
        """What blocks keep, as it was written."""
        return _asked(self.patterns, self.rest)

    def of_blocks(self, read: Sequence[frozenset[str]]) -> list[Remat | None]:
        """What each block keeps by what it reads; a pattern that none matches is refused."""
        matched: set[str] = set()
        values = []
        for paths in read:
            pattern, value = self._first(paths)
            matched.add(pattern)
            values.append(kept_by_blocks(value))
        for pattern, _ in self.patterns:
            if pattern not in matched:
                # Most often a prefix is missing, which the paths show.
                known = sorted(set().union(*read))
                raise ValueError(
                    f"`{self}`: no block that is marked with `sl.remat`, and that no pattern "
                    f"before it takes, reads a parameter whose path matches `{pattern}`. The "
                    f"blocks read {listed(known) if known else 'no parameters'}."
                )
        return values

    def _first(self, paths: frozenset[str]) -> tuple[str, str | Remat]:
        """The first pattern that one of the paths matches, or none, and what is kept by it."""
        for pattern, value in self.patterns:
            if any(re.fullmatch(pattern, path) for path in paths):
                return pattern, value
        if self.rest is None:
            raise ValueError(
                f"`{self}`: a block that is marked with `sl.remat` reads "
                f"{listed(sorted(paths)) if paths else 'no parameters'}, which no pattern matches. "
                'Say what all others keep, `rest="full"`.'
            )
        return "", self.rest


def _checked_pairs(function: str, argument: str, pairs: Any, rest: Any, takes: str) -> Any:
    """Pairs of which the second says what blocks keep, as `rest` does; anything else is refused."""
    check.kind(function, argument, pairs, tuple, takes)
    if not pairs:
        raise check.refusal(function, argument, pairs, takes)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise check.refusal(function, argument, pair, takes)
        _check_of_blocks(function, argument, pair[1])
    if rest is not None:
        _check_of_blocks(function, "rest", rest)
    return pairs


def _asked(pairs: Sequence[tuple[Any, str | Remat]], rest: str | Remat | None) -> list[str | Remat]:
    """What some pairs and the rest say that blocks keep."""
    asked = [value for _, value in pairs]
    if rest is not None:
        asked.append(rest)
    return asked


def _check_of_blocks(function: str, argument: str, value: Any) -> None:
    """Refuse what is no value for one block."""
    takes = 'what blocks keep, `"none"`, `"full"` or a `Remat`'
    if isinstance(value, RematByBlock | RematBudget) or value == "stage":
        raise check.refusal(function, argument, value, takes)
    kept = kept_by_blocks(checked_remat(function, argument, value))
    if kept is not None and (kept.dropped or kept.chain):
        takes = f"{takes} that drops no parts and has no chain"
        raise check.refusal(function, argument, value, takes)


def checked_remat(function: str, argument: str, value: Any) -> Any:
    """A word or a value for what blocks keep, or an error that lists the words.

    >>> checked_remat("Strategy", "remat", "full")
    'full'
    """
    if isinstance(value, Remat | RematByBlock | RematBudget):
        return value
    if isinstance(value, str) and value in WORDS:
        return value
    words = ", ".join(map(repr, WORDS))
    takes = f'one of {words}, or a `Remat`, such as `sl.Remat.save("context")`'
    raise check.refusal(function, argument, value, takes)


def kept_by_blocks(value: Any) -> Any:
    """What marked blocks keep; None where they keep everything.

    >>> kept_by_blocks("full"), kept_by_blocks("none")
    (Remat(), None)
    """
    if isinstance(value, Remat | RematByBlock):
        return value
    # Blocks have to be marked for a step to find out what fits.
    if isinstance(value, RematBudget):
        return Remat()
    # With "stage" a stage's whole pass is computed again, and its blocks keep little within it.
    words = {
        "full": Remat(),
        "stage": Remat(),
        "dots": Remat(products="all"),
        "dots_without_batch": Remat(products="without_batch"),
        "selective": Remat(dropped=(SCORES,)),
        "minimal": Remat(names=PROJECTED),
        "sublinear": Remat.sublinear(),
    }
    return words.get(value)
