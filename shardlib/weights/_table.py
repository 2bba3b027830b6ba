"""Which tensor of a file is which parameter, and in what form: as data, read in both directions.

A rule is the name of tensors, the path of a parameter, and how the dims of one become those of the
other:

    Rule("h.{layers}.attn.q.weight", "blocks/attention/query/kernel",
         "(heads head_dim) embed -> layers heads head_dim embed")

A parameter has all layers, and each tensor those of one: a name in braces counts a dim of the
parameter, and `numbers` says from where and by which step, if these are not 0 and 1. Dims in
parentheses are one dim of the tensor. Where a tensor has several parameters, each has a `Part` of
it, or a `Span` where they differ in size. Where the numbers along a dim have another order in the
tensor, `orders` says which.
"""

import math
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from shardlib.checks import _arguments as check

_SIDE = re.compile(r"\([^()]+\)|[^()\s]+")


@dataclass(frozen=True)
class Part:
    """A parameter is one of several equal parts of a tensor.

    - `dim`: of the tensor's form, which counts the parts.
    - `number`: which of them the parameter is.
    - `count`: how many there are.
    """

    dim: str
    number: int
    count: int

    def __post_init__(self) -> None:
        check.text("Part", "dim", self.dim, "the name of a dim")
        count = check.whole("Part", "count", self.count, "a number of parts", least=1)
        takes = "which part it is, from 0"
        check.whole("Part", "number", self.number, takes, least=0, most=count - 1)


@dataclass(frozen=True)
class Span:
    """A parameter is a stretch of a tensor, along a dim that both have.

    - `dim`: of the tensor's form, which has the parameter's numbers and others.
    - `first`: the place of the parameter's first one.
    - `total`: how many the tensor has.
    """

    dim: str
    first: int
    total: int

    def __post_init__(self) -> None:
        check.text("Span", "dim", self.dim, "the name of a dim")
        total = check.whole("Span", "total", self.total, "the size of a tensor's dim", least=1)
        takes = "a place in the tensor, from 0"
        check.whole("Span", "first", self.first, takes, least=0, most=total - 1)


@dataclass(frozen=True)
class Rule:
    """Which tensors of a file make up a parameter, and in what form.

    - `tensor`: their name, in which a dim in braces stands for a number: `"h.{layers}.w"`.
    - `parameter`: the path of the parameter, such as `"blocks/attention/query/kernel"`.
    - `form`: the dims of a tensor, an arrow, and those of the parameter, such as
      `"(heads size) in -> layers heads size in"`. Dims in parentheses are one dim of the tensor, as
      they follow each other. Dims in braces are on the right alone, that of a `Part` on the left.
    - `part`: of several parts of these tensors, which the parameter is, a `Part` or a `Span`; None
      if it is all.
    - `numbers`: of a dim in braces, the number in the name of its first tensor and the step to the
      next; `(0, 1)` where it is left out.
    - `orders`: of a dim, for each place in the parameter the place in the tensor.
    """

    tensor: str
    parameter: str
    form: str
    part: Part | Span | None = None
    numbers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    orders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check.text("Rule", "tensor", self.tensor, "the name of tensors")
        check.text("Rule", "parameter", self.parameter, "the path of a parameter")
        check.text("Rule", "form", self.form, "dims, such as `(heads size) in -> heads size in`")
        check.kind("Rule", "part", self.part, Part | Span | None, "a `Part`, a `Span`, or None")
        for name in self.counters:
            if not name.isidentifier():
                raise ValueError(
                    f"`Rule({self.tensor!r}, ...)` has {{{name}}} in braces: name the dim that "
                    "counts, such as `{layers}`."
                )
        of_tensor = [dim for group in self.groups for dim in group]
        of_part = [self.part.dim] if isinstance(self.part, Part) else []
        expected = sorted([*of_tensor, *self.counters])
        if len(set(expected)) < len(expected) or expected != sorted([*self.dims, *of_part]):
            raise ValueError(
                f"`Rule({self.tensor!r}, {self.parameter!r}, {self.form!r})`: each dim is there "
                "once on either side of the arrow. Those that the name has in braces are on the "
                "right alone, and that of a `Part` on the left."
            )
        if isinstance(self.part, Span) and self.part.dim not in self.inner:
            raise ValueError(
                f"`Rule({self.tensor!r}, ..., part={self.part})`: `{self.part.dim}` is no dim that "
                "both the tensor and the parameter have."
            )
        self._check_numbers()
        self._check_orders()

    def _check_numbers(self) -> None:
        takes = "the first number and the step of dims in braces, such as `{'layers': (3, 1)}`"
        check.kind("Rule", "numbers", self.numbers, Mapping, takes)
        for dim, numbering in self.numbers.items():
            if dim not in self.counters:
                raise ValueError(
                    f"`Rule({self.tensor!r}, ..., numbers=...)` has `{dim}`, which the name has "
                    "not in braces."
                )
            if not isinstance(numbering, tuple) or len(numbering) != 2:
                raise check.refusal("Rule", "numbers", numbering, takes)
            check.whole("Rule", "numbers", numbering[0], takes, least=0)
            check.whole("Rule", "numbers", numbering[1], takes, least=1)

    def _check_orders(self) -> None:
        takes = "each number below the size of a dim once, such as `{'size': (0, 2, 1, 3)}`"
        check.kind("Rule", "orders", self.orders, Mapping, takes)
        for dim, order in self.orders.items():
            if dim not in self.inner:
                raise ValueError(
                    f"`Rule({self.tensor!r}, ..., orders=...)` has `{dim}`, which is no dim that "
                    "both the tensor and the parameter have."
                )
            is_order = isinstance(order, tuple) and set(order) == set(range(len(order)))
            if not is_order:
                raise check.refusal("Rule", "orders", order, takes)

    @cached_property
    def _sides(self) -> tuple[str, str]:
        left, arrow, right = self.form.partition("->")
        is_left = re.fullmatch(rf"\s*(({_SIDE.pattern})(\s+|$))*", left)
        if not arrow or not is_left or re.search(r"[()>]", right):
            raise ValueError(
                f"`Rule(form={self.form!r})` takes the dims of a tensor, an arrow and those of a "
                "parameter, such as `(heads size) in -> heads size in`."
            )
        return left, right

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """For each dim of a tensor, the dims that it is made of."""
        sides = _SIDE.findall(self._sides[0])
        return tuple(tuple(one.strip("()").split()) for one in sides)

    @cached_property
    def dims(self) -> tuple[str, ...]:
        """The dims of the parameter."""
        return tuple(self._sides[1].split())

    @cached_property
    def counters(self) -> tuple[str, ...]:
        """The dims of the parameter along which each tensor has one place."""
        try:
            fields = list(string.Formatter().parse(self.tensor))
        except ValueError as error:
            raise ValueError(f"`Rule({self.tensor!r}, ...)`: {error}.") from error
        return tuple(name for _, name, _, _ in fields if name is not None)

    @cached_property
    def inner(self) -> tuple[str, ...]:
        """The dims of the parameter that a tensor has."""
        return tuple(dim for dim in self.dims if dim not in self.counters)

    def sizes(self, shape: tuple[int, ...]) -> dict[str, int]:
        """The size of each dim, by the shape of the parameter."""
        sizes = dict(zip(self.dims, shape, strict=True))
        if isinstance(self.part, Part):
            sizes[self.part.dim] = self.part.count
        return sizes

    def check_sizes(self, function: str, sizes: Mapping[str, int]) -> None:
        """Refuse a parameter that goes beyond the tensor, or has another size than its order."""
        span = self.part
        if isinstance(span, Span) and span.first + sizes[span.dim] > span.total:
            raise ValueError(
                f"`{function}`: `{self.parameter}` has {span.dim}={sizes[span.dim]}, which from "
                f"{span.first} on goes beyond the {span.total} of `{self.tensor}`."
            )
        for dim, order in self.orders.items():
            if sizes[dim] != len(order):
                raise ValueError(
                    f"`{function}`: `{self.parameter}` has {dim}={sizes[dim]}, and the order of "
                    f"its rule is of {len(order)}."
                )

    def stretch(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """Where in a tensor the parameter begins and ends, and how much there is in all."""
        match self.part:
            case Part(_, number, count):
                return number, number + 1, count
            case Span(dim, first, total):
                return first, first + sizes[dim], total
            case _:
                return 0, 1, 1

    def tensor_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The size of each dim in the tensors, of those in the parameter."""
        if isinstance(self.part, Span):
            return {**sizes, self.part.dim: self.part.total}
        return dict(sizes)

    def tensor_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of each tensor."""
        sizes = self.tensor_sizes(sizes)
        return tuple(math.prod(sizes[dim] for dim in group) for group in self.groups)

    def places(self, sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
        """Where each tensor is along the counted dims."""
        return np.ndindex(*[sizes[dim] for dim in self.counters])

    def name_at(self, place: tuple[int, ...]) -> str:
        """The name of the tensor at a place."""
        numbers = {}
        for dim, at in zip(self.counters, place, strict=True):
            first, step = self.numbers.get(dim, (0, 1))
            numbers[dim] = first + step * at
        return self.tensor.format(**numbers)

    def taken(
        self, tensor: np.ndarray, sizes: Mapping[str, int], index: tuple[slice, ...]
    ) -> np.ndarray:
        """What a tensor has of a part of the parameter, with the dims of `inner`."""
        piece = self._opened(tensor, sizes)
        for axis, (dim, part) in enumerate(zip(self.inner, index, strict=True)):
            if dim in self.orders:
                piece = np.take(piece, self.orders[dim][part], axis)
            else:
                piece = piece[(slice(None),) * axis + (part,)]
        return piece

    def put(self, tensor: np.ndarray, sizes: Mapping[str, int], values: np.ndarray) -> None:
        """Write all that the parameter has of a tensor into it."""
        for dim, order in self.orders.items():
            values = np.take(values, np.argsort(order), self.inner.index(dim))
        self._opened(tensor, sizes)[...] = values

    def _opened(self, tensor: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """A view of a tensor, with the dims of the parameter that it has, as they follow there."""
        dims = [dim for group in self.groups for dim in group]
        in_tensor = self.tensor_sizes(sizes)
        # A view, since tensors are in one piece: what is written into it is written into them.
        opened = tensor.reshape([in_tensor[dim] for dim in dims])
        if isinstance(self.part, Part):
            opened = np.moveaxis(opened, dims.index(self.part.dim), 0)[self.part.number]
            dims.remove(self.part.dim)
        if isinstance(self.part, Span):
            stretch = slice(self.part.first, self.part.first + sizes[self.part.dim])
            opened = opened[(slice(None),) * dims.index(self.part.dim) + (stretch,)]
        return opened.transpose([dims.index(dim) for dim in self.inner])


@dataclass(frozen=True)
class Table:
    """Which tensors make up the parameters of a model.

    - `rules`: one for each parameter.
    - `ignored`: patterns of tensors that no parameter is made of, such as a head that is tied to
      the embedding.
    - `sizes`: of dims that the parameters have more of, such as a vocabulary that is rounded up.
      What is beyond these is zero.
    """

    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check.kind("Table", "rules", self.rules, tuple, "a tuple of `Rule`s")
        for rule in self.rules:
            check.kind("Table", "rules", rule, Rule, "a tuple of `Rule`s")
        check.patterns("Table", "ignored", self.ignored)
        takes = "the size of dims by their names"
        known = {dim for rule in self.rules for dim in rule.dims}
        for dim, size in check.kind("Table", "sizes", self.sizes, Mapping, takes).items():
            check.whole("Table", "sizes", size, takes, least=1)
            if dim not in known:
                raise ValueError(f"`Table(sizes=...)` has `{dim}`, which is no dim of a rule.")

    def is_ignored(self, tensor: str) -> bool:
        """Whether no parameter is made of a tensor."""
        return any(re.fullmatch(pattern, tensor) for pattern in self.ignored)

    def sizes_of(self, rule: Rule, shape: tuple[int, ...]) -> dict[str, int]:
        """The sizes of the dims of a rule's tensors, by the shape of the parameter."""
        sizes = rule.sizes(shape)
        for dim in rule.dims:
            sizes[dim] = min(sizes[dim], self.sizes.get(dim, sizes[dim]))
        return sizes


def rules_by_path(function: str, table: Table, leaves: Mapping[str, Any]) -> dict[str, Rule]:
    """The rule of each parameter; refuses parameters without, and rules without a parameter."""
    check.kind(function, "table", table, Table, "a `Table` of rules")
    found: dict[str, Rule] = {}
    for rule in table.rules:
        if rule.parameter in found:
            raise ValueError(f"`{function}`: the table has two rules for `{rule.parameter}`.")
        found[rule.parameter] = rule
    unknown = [path for path in leaves if path not in found]
    absent = [path for path in found if path not in leaves]
    if unknown or absent:
        lacks = []
        if unknown:
            lacks.append(f"it has no rule for {_some(unknown)}")
        if absent:
            lacks.append(f"the model has no {_some(absent)}")
        raise ValueError(f"`{function}`: the table is of another model: {', and '.join(lacks)}.")
    for path, leaf in leaves.items():
        if len(found[path].dims) != len(leaf.shape):
            raise ValueError(
                f"`{function}`: `{path}` is of shape {leaf.shape}, and its rule has the dims "
                f"{' '.join(found[path].dims)}."
            )
        found[path].check_sizes(function, table.sizes_of(found[path], leaf.shape))
    return found


def _some(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + more
