"""A pipeline schedule as a table: what each stage does, in order. Made and proved without JAX.

The model is cut into *parts*, counted from the input; a *stage* is a device, or a group of them,
that holds one or more parts. Of each part and each microbatch there is a forward pass `F`, a
backward pass `B`, and where backward passes are split a `W`: then `B` makes the gradient of a
part's input, for which the stage before waits, and `W` that of its weights, for which nobody does.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from shardlib.checks import _arguments as check

Kind: TypeAlias = Literal["F", "B", "W"]
KINDS = get_args(Kind)


class Op(NamedTuple):
    """One pass of one microbatch through one part."""

    kind: Kind
    microbatch: int
    part: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.part}"


@dataclass(frozen=True)
class Table:
    """What each stage does, in order.

    `orders` has the ops of each stage; `placement` says of each part on which stage it is.

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
        orders = tuple(_order(stage, order) for stage, order in enumerate(self.orders))
        check.assign(self, orders=orders, placement=_placement(self.placement))
        _check(self)

    @classmethod
    def parse(cls, text: str, placement: Sequence[int] | None = None) -> "Table":
        """A table written by hand: a line for each stage, `F3` for microbatch 3, `F3@5` where a
        stage has several parts.

        Without a `placement` each part is on the stage in whose line it is named, or, where none
        is, each stage has one, in order. `.` and `|` may be put in for looks; from `#` on a line is
        a remark.
        """
        check.text("Table.parse", "text", text, "a line of ops for each stage, as text")
        bare = [line.split("#")[0] for line in text.splitlines()]
        lines = [
            [word for word in line.split() if word not in (".", "|")]
            for line in bare
            if line.strip()
        ]
        named = {
            int(part): stage
            for stage, words in enumerate(lines)
            for word in words
            for part in re.findall(r"@(\d{1,9})$", word)
        }
        if (
            placement is None
            and sorted(named) == list(range(len(named)))
            and len(named) > len(lines)
        ):
            placement = [named[part] for part in range(len(named))]
        placed = _placement(range(len(lines)) if placement is None else placement)

        def op(word: str, stage: int, at: int) -> Op:
            found = re.fullmatch(r"([FBW])(\d{1,9})(?:@(\d{1,9}))?", word)
            mine = [part for part, where in enumerate(placed) if where == stage]
            if not found or (found[3] is None and len(mine) != 1):
                said = (
                    f"stage {stage} has the parts {mine}: say which"
                    if found
                    else "an op is `F3`, `B3` or `W3`"
                )
                raise ValueError(
                    f"`Table.parse`: `{check.shown(word)[1:-1]}`, op {at} of stage {stage}: "
                    f"{said}, as in `F3@{mine[0] if mine else 0}`."
                )
            kind: Kind = next(kind for kind in KINDS if kind == found[1])
            return Op(kind, int(found[2]), mine[0] if found[3] is None else int(found[3]))

        orders = tuple(
            tuple(op(word, stage, at) for at, word in enumerate(words))
            for stage, words in enumerate(lines)
        )
        return cls(orders, placed)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.orders)

    @property
    def parts(self) -> int:
        """Into how many parts the model is cut."""
        return len(self.placement)

    @cached_property
    def microbatches(self) -> int:
        """How many microbatches go through."""
        return 1 + max(op.microbatch for order in self.orders for op in order)

    @cached_property
    def splits(self) -> bool:
        """Whether backward passes are split in two."""
        return any(op.kind == "W" for order in self.orders for op in order)

    @cached_property
    def trains(self) -> bool:
        """Whether there are backward passes: without, it is a table to measure by."""
        return any(op.kind != "F" for order in self.orders for op in order)

    def before(self, op: Op) -> tuple[Op, ...]:
        """What an op waits for."""
        kind, microbatch, part = op
        if kind == "F":
            return (Op("F", microbatch, part - 1),) if part else ()
        if kind == "W":
            return (Op("B", microbatch, part),)
        forward = (Op("F", microbatch, part),)
        return forward if part == self.parts - 1 else (*forward, Op("B", microbatch, part + 1))

    def chunk(self, part: int) -> int:
        """Which of the parts of its stage a part is, counted from the input."""
        return self.placement[:part].count(self.placement[part])

    def crosses(self, part: int) -> bool:
        """Whether what a part makes goes to another stage."""
        return part + 1 < self.parts and self.placement[part] != self.placement[part + 1]


@dataclass(frozen=True, repr=False)
class Custom:
    """A table of your own as a schedule; if `paired`, a tick takes a forward and a backward pass.

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
        """Stages, S."""
        return self.written.stages

    @property
    def microbatches(self) -> int:
        """Microbatches, M."""
        return self.written.microbatches

    def table(self) -> Table:
        """What each stage does."""
        return self.written

    def __repr__(self) -> str:
        return (
            f"Custom(<{self.stages} stages, {self.microbatches} microbatches>, "
            f"paired={self.paired})"
        )


def _order(stage: int, order: Any) -> tuple[Op, ...]:
    takes = 'the ops of each stage, such as `Op("F", 0, 0)`, in a tuple for each'
    check.kind("Table", "orders", order, Sequence, takes)
    ops = []
    for op in order:
        if not isinstance(op, tuple | list) or len(op) != 3:
            raise check.refusal("Table", "orders", op, takes)
        kind, microbatch, part = op
        check.choice("Table", "orders", kind, KINDS)
        ops.append(
            Op(kind, check.whole("Op", "microbatch", microbatch), check.whole("Op", "part", part))
        )
    return tuple(ops)


def _placement(placement: Any) -> tuple[int, ...]:
    takes = "the stage of each part, in a tuple"
    if isinstance(placement, str | bytes) or not isinstance(placement, Sequence):
        raise check.refusal("Table", "placement", placement, takes)
    return tuple(check.whole("Table", "placement", stage, takes) for stage in placement)


def _check(table: Table) -> None:
    """Refuse a table in which something is missing, done twice, or on a stage that does not have
    it.
    """
    if not table.orders or not any(table.orders):
        raise ValueError("`Table(orders=...)`: a schedule has at least one stage, and an op.")
    if missing := sorted(set(range(table.stages)).difference(table.placement)):
        raise ValueError(
            f"Stage {missing[0]} has no part of the model: `placement={table.placement}`."
        )
    if beyond := [stage for stage in table.placement if not 0 <= stage < table.stages]:
        raise ValueError(
            f"`placement={table.placement}` names stage {beyond[0]}, and there are {table.stages}."
        )
    seen: dict[Op, tuple[int, int]] = {}
    for stage, order in enumerate(table.orders):
        for at, op in enumerate(order):
            where = f"op {at} of stage {stage}"
            if op.kind not in KINDS or not 0 <= op.part < table.parts or op.microbatch < 0:
                raise ValueError(
                    f"`Table(orders=...)`: `{op}`, {where}, cannot be: there are {table.parts} "
                    f"parts, from 0 on, and kinds {', '.join(KINDS)}."
                )
            if table.placement[op.part] != stage:
                raise ValueError(
                    f"`{op}`, {where}: part {op.part} is on stage {table.placement[op.part]}."
                )
            if op in seen:
                raise ValueError(
                    f"`{op}` is done twice: op {seen[op][1]} of stage {seen[op][0]}, and {where}."
                )
            seen[op] = stage, at
    kinds = KINDS if table.splits else KINDS[:2] if table.trains else KINDS[:1]
    everything = (
        Op(kind, m, part)
        for m in range(table.microbatches)
        for part in range(table.parts)
        for kind in kinds
    )
    if hole := next((op for op in everything if op not in seen), None):
        raise ValueError(
            f"`{hole}` is missing: stage {table.placement[hole.part]} never does it, and every "
            f"part does {', '.join(kinds)} of each of the {table.microbatches} microbatches once."
        )
