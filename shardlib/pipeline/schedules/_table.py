"""A pipeline schedule as a table: what each stage does, in order. It needs no JAX.

The model is cut into *parts*, counted from the input; a *stage* is a device, or a group of them,
that holds one or more parts. Of each part and each microbatch there is a forward pass `F`, a
backward pass `B`, and where backward passes are split a `W`: then `B` makes the gradient of a
part's input, for which the stage before waits, and `W` that of its weights, for which nobody does.

    stage 0:  F0  F1  .   .   B0  B1        F1@1 waits for F1@0, B0@1 for F0@1,
    stage 1:  .   F0  F1  B0  B1  .         and B0@0 for F0@0 and B0@1
"""

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from shardlib.checks import _arguments as check

Kind: TypeAlias = Literal["F", "B", "W"]
KINDS = get_args(Kind)

# Digits are limited, lest a long number takes long to read.
_OP = re.compile(r"([FBW])(\d{1,9})(?:@(\d{1,9}))?")


class Op(NamedTuple):
    """One pass of one microbatch through one part of the model; as text it is `F3@5`.

    - `kind`: `"F"` is forward and `"B"` backward. Where backward passes are split, `"B"` makes the
      gradient of a part's input, and `"W"` that of its weights.
    - `microbatch`: its number, from 0 on.
    - `part`: its number, from 0 on, counted from the input.
    """

    kind: Kind
    microbatch: int
    part: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.part}"


@dataclass(frozen=True)
class Table:
    """A pipeline schedule: what each stage does, in order.

    - `orders`: for each stage its ops, a tuple of `Op`s.
    - `placement`: for each part of the model, the stage that has it.

    Ops that are missing, done twice or on a wrong stage are a `ValueError`; their order is not
    looked at before `simulate`.

    >>> table = Table.parse('''
    ...     F0 F1 B0 B1
    ...     F0 B0 F1 B1
    ... ''')
    >>> table.stages, table.microbatches, table.placement, table.splits
    (2, 2, (0, 1), False)
    """

    orders: tuple[tuple[Op, ...], ...]
    placement: tuple[int, ...]

    def __post_init__(self) -> None:
        check.kind(
            "Table", "orders", self.orders, Sequence, "the ops of each stage, in a tuple for each"
        )
        orders = tuple(_order(order) for order in self.orders)
        check.assign(self, orders=orders, placement=_placement(self.placement))
        _check(self)

    @classmethod
    def parse(cls, text: str, placement: Sequence[int] | None = None) -> "Table":
        """A table written by hand, with a line for each stage.

        An op is `F3` for microbatch 3, and `F3@5` where a stage has several parts. `.` and `|` may
        be put in for looks; from `#` on a line is a remark.

        Without a `placement` each part is on the stage in whose line it is named, or, where none
        is, each stage has one, in order.
        """
        check.text("Table.parse", "text", text, "a line of ops for each stage, as text")
        lines = _words(text)
        if placement is None:
            placement = _named_placement(lines)
        placed = _placement(placement)
        orders = []
        for stage, words in enumerate(lines):
            # An op names its part only where its stage has several.
            parts = [part for part, where in enumerate(placed) if where == stage]
            order = []
            for at, word in enumerate(words):
                order.append(_op(word, stage, at, parts))
            orders.append(tuple(order))
        return cls(tuple(orders), placed)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.orders)

    @property
    def parts(self) -> int:
        """The number of parts that the model is cut into."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches that go through, which are counted from 0."""
        return 1 + max(op.microbatch for op in self._ops())

    @cached_property
    def splits(self) -> bool:
        """Whether backward passes are split in two, so that there are `W`s."""
        return any(op.kind == "W" for op in self._ops())

    @cached_property
    def trains(self) -> bool:
        """Whether there are backward passes; a table without any is one to measure by."""
        return any(op.kind != "F" for op in self._ops())

    def _ops(self) -> Iterator[Op]:
        """The ops of all stages, stage by stage."""
        return chain.from_iterable(self.orders)

    def before(self, op: Op) -> tuple[Op, ...]:
        """The ops that an op waits for.

        A forward pass takes what the part before made. A backward pass takes what its own forward
        pass kept, and the gradient that the part after made; that of the last part makes its own.
        """
        kind, microbatch, part = op
        if kind == "F":
            if part == 0:
                return ()
            return (Op("F", microbatch, part - 1),)
        if kind == "W":
            return (Op("B", microbatch, part),)
        # What is left is a backward pass.
        forward = Op("F", microbatch, part)
        if part == self.parts - 1:
            return (forward,)
        return forward, Op("B", microbatch, part + 1)

    def chunk(self, part: int) -> int:
        """The number of a part among those of its stage, counted from the input."""
        return self.placement[:part].count(self.placement[part])

    def crosses(self, part: int) -> bool:
        """Whether what a part makes goes to another stage."""
        return part + 1 < self.parts and self.placement[part] != self.placement[part + 1]


def _words(text: str) -> list[list[str]]:
    """The ops of each stage as words, without remarks, ornaments and empty lines."""
    lines = []
    for line in text.splitlines():
        bare = line.split("#")[0]
        if bare.strip():
            lines.append([word for word in bare.split() if word not in (".", "|")])
    return lines


def _named_placement(lines: Sequence[Sequence[str]]) -> Sequence[int]:
    """The stage of each part, from the lines in which parts are named, as in `F3@5`.

    Where not all are named, or there are no more parts than stages, each stage has one, in order.
    """
    stage_of: dict[int, int] = {}
    for stage, words in enumerate(lines):
        for word in words:
            # Only the end of the word is looked at: whether it is an op at all is checked later.
            named = re.search(r"@(\d{1,9})$", word)
            if named:
                stage_of[int(named[1])] = stage
    # Parts that are missing would be placed by guessing, and are left to be found missing.
    if sorted(stage_of) == list(range(len(stage_of))) and len(stage_of) > len(lines):
        return [stage_of[part] for part in range(len(stage_of))]
    return range(len(lines))


def _op(word: str, stage: int, at: int, parts: Sequence[int]) -> Op:
    """The op that a word says, number `at` of a stage that has some `parts`.

    A word is a kind and a microbatch, and a part where the stage has several: `F3` or `F3@1`.
    """
    match = _OP.fullmatch(word)
    names_part = match is not None and match[3] is not None
    if match is None:
        raise _bad_op(word, stage, at, parts, "an op is `F3`, `B3` or `W3`")
    if not names_part and len(parts) != 1:
        which = f"stage {stage} has the parts {list(parts)}: say which"
        raise _bad_op(word, stage, at, parts, which)
    # The pattern has matched one of the kinds.
    kind: Kind = KINDS[KINDS.index(match[1])]
    if names_part:
        return Op(kind, int(match[2]), int(match[3]))
    return Op(kind, int(match[2]), parts[0])


def _bad_op(word: str, stage: int, at: int, parts: Sequence[int], reason: str) -> ValueError:
    """The error for an op that cannot be read, with an example of one that can."""
    example = next(iter(parts), 0)
    return ValueError(
        f"`Table.parse`: `{check.shown(word)[1:-1]}`, op {at} of stage {stage}: "
        f"{reason}, as in `F3@{example}`."
    )


@dataclass(frozen=True, repr=False)
class Custom:
    """A table of your own as a schedule, to be run by `sl.Strategy(pipeline=...)`.

    - `written`: the table, such as `Table.parse(text)`.
    - `paired`: whether a tick takes a pass of each kind, or only one pass.

    >>> Custom(Table.parse("F0 F1 B0 B1"))
    Custom(<1 stages, 2 microbatches>, paired=False)
    """

    written: Table
    paired: bool = False

    def __post_init__(self) -> None:
        check.kind("Custom", "written", self.written, Table, "a table, such as `Table.parse(text)`")
        check.assign(self, paired=check.boolean("Custom", "paired", self.paired))

    @property
    def stages(self) -> int:
        """The number of stages, S in formulas."""
        return self.written.stages

    @property
    def microbatches(self) -> int:
        """The number of microbatches, M in formulas."""
        return self.written.microbatches

    def table(self) -> Table:
        """The table as it was given."""
        return self.written

    def __repr__(self) -> str:
        return (
            f"Custom(<{self.stages} stages, {self.microbatches} microbatches>, "
            f"paired={self.paired})"
        )


def _order(order: Any) -> tuple[Op, ...]:
    """The ops of one stage, checked one by one: each a kind, a microbatch and a part."""
    takes = 'the ops of each stage, such as `Op("F", 0, 0)`, in a tuple for each'
    check.kind("Table", "orders", order, Sequence, takes)
    ops = []
    for op in order:
        if not isinstance(op, tuple | list) or len(op) != 3:
            raise check.refusal("Table", "orders", op, takes)
        kind, microbatch, part = op
        check.choice("Table", "orders", kind, KINDS)
        microbatch = check.whole("Op", "microbatch", microbatch)
        ops.append(Op(kind, microbatch, check.whole("Op", "part", part)))
    return tuple(ops)


def _placement(placement: Any) -> tuple[int, ...]:
    """The stage of each part as a tuple of whole numbers; anything else is refused."""
    takes = "the stage of each part, in a tuple"
    if isinstance(placement, str | bytes) or not isinstance(placement, Sequence):
        raise check.refusal("Table", "placement", placement, takes)
    return tuple(check.whole("Table", "placement", stage, takes) for stage in placement)


def _check(table: Table) -> None:
    """Refuse a table in which something is missing, done twice, or on the wrong stage.

    The order of ops is not looked at here; `simulate` says where a schedule comes to a halt.
    """
    if not table.orders or not any(table.orders):
        raise ValueError("`Table(orders=...)`: a schedule has at least one stage, and an op.")
    _check_placement(table)
    # Where each op is, in words, for the error about one that is there twice.
    positions: dict[Op, str] = {}
    # Each op by itself, and then whether all are there.
    for stage, order in enumerate(table.orders):
        for at, op in enumerate(order):
            where = f"op {at} of stage {stage}"
            _check_op(table, op, stage, where)
            if op in positions:
                raise ValueError(f"`{op}` is done twice: {positions[op]}, and {where}.")
            positions[op] = where
    _check_complete(table, positions)


def _check_placement(table: Table) -> None:
    """Refuse a placement that leaves a stage without parts, or names one that is not there."""
    empty = sorted(set(range(table.stages)).difference(table.placement))
    if empty:
        raise ValueError(
            f"Stage {empty[0]} has no part of the model: `placement={table.placement}`."
        )
    for stage in table.placement:
        if not 0 <= stage < table.stages:
            raise ValueError(
                f"`placement={table.placement}` names stage {stage}, and there are {table.stages}."
            )


def _check_op(table: Table, op: Op, stage: int, where: str) -> None:
    """Refuse an op that cannot be, or whose part is on another stage.

    `stage` is the stage that has it in its order, and `where` its place there, for the message.
    """
    if op.kind not in KINDS or not 0 <= op.part < table.parts or op.microbatch < 0:
        raise ValueError(
            f"`Table(orders=...)`: `{op}`, {where}, cannot be: there are {table.parts} "
            f"parts, from 0 on, and kinds {', '.join(KINDS)}."
        )
    if table.placement[op.part] != stage:
        raise ValueError(f"`{op}`, {where}: part {op.part} is on stage {table.placement[op.part]}.")


def _check_complete(table: Table, done: Container[Op]) -> None:
    """Refuse a table in which a part lacks a pass that other parts or microbatches have."""
    kinds = KINDS
    if not table.splits:
        # Only split tables have ops for weights, and only those that train go backward.
        kinds = KINDS[:2] if table.trains else KINDS[:1]
    for microbatch, part, kind in product(range(table.microbatches), range(table.parts), kinds):
        op = Op(kind, microbatch, part)
        if op not in done:
            raise ValueError(
                f"`{op}` is missing: stage {table.placement[part]} never does it, and every "
                f"part does {', '.join(kinds)} of each of the {table.microbatches} microbatches "
                "once."
            )
