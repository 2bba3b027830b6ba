"""Which tensor of a file is which parameter, and in what form: as data, read in both directions.

A rule is the name of tensors, the path of a parameter, and how the dims of one become those of the
other:

    Rule("h.{layers}.attn.q.weight", "blocks/attention/query/kernel",
         "(heads head_dim) embed -> layers heads head_dim embed")

A parameter has all layers, and each tensor those of one: a name in braces counts a dim of the
parameter. Dims in parentheses are one dim of the tensor.
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
class Rule:
    """Which tensors make up a parameter.

    - `tensor`: their name, in which a dim in braces stands for a number: `"h.{layers}.w"`.
    - `parameter`: the path of the parameter.
    - `form`: the dims of a tensor, an arrow, and those of the parameter. Dims in parentheses are
      one dim of the tensor, as they follow each other.
    - `part`: of several parts of these tensors, which the parameter is; None if it is all.
    """

    tensor: str
    parameter: str
    form: str
    part: Part | None = None

    def __post_init__(self) -> None:
        check.text("Rule", "tensor", self.tensor, "the name of tensors")
        check.text("Rule", "parameter", self.parameter, "the path of a parameter")
        check.text("Rule", "form", self.form, "dims, such as `(heads size) in -> heads size in`")
        check.kind("Rule", "part", self.part, Part | None, "a `Part`, or None")
        for name in self.counters:
            if not name.isidentifier():
                raise ValueError(
                    f"`Rule({self.tensor!r}, ...)` has {{{name}}} in braces: name the dim that "
                    "counts, such as `{layers}`."
                )
        of_tensor = [dim for group in self.groups for dim in group]
        of_part = [] if self.part is None else [self.part.dim]
        expected = sorted([*of_tensor, *self.counters])
        if len(set(expected)) < len(expected) or expected != sorted([*self.dims, *of_part]):
            raise ValueError(
                f"`Rule({self.tensor!r}, {self.parameter!r}, {self.form!r})`: each dim is there "
                "once on either side of the arrow. Those that the name has in braces are on the "
                "right alone, and that of `part` on the left."
            )

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
        if self.part is not None:
            sizes[self.part.dim] = self.part.count
        return sizes

    def tensor_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of each tensor."""
        return tuple(math.prod(sizes[dim] for dim in group) for group in self.groups)

    def places(self, sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
        """Where each tensor is along the counted dims."""
        return np.ndindex(*[sizes[dim] for dim in self.counters])

    def name_at(self, place: tuple[int, ...]) -> str:
        """The name of the tensor at a place."""
        return self.tensor.format(**dict(zip(self.counters, place, strict=True)))

    def opened(self, tensor: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
        """A view of a tensor, with the dims of the parameter that it has in their order."""
        order = [dim for group in self.groups for dim in group]
        # A view, since tensors are in one piece: what is written into it is written into them.
        opened = tensor.reshape([sizes[dim] for dim in order])
        if self.part is not None:
            opened = np.moveaxis(opened, order.index(self.part.dim), 0)[self.part.number]
            order.remove(self.part.dim)
        return opened.transpose([order.index(dim) for dim in self.inner])


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
        raise ValueError(
            f"`{function}`: the table is of another model. It has no rule for "
            f"{_some(unknown)}, and the model has no {_some(absent)}."
        )
    for path, leaf in leaves.items():
        if len(found[path].dims) != len(leaf.shape):
            raise ValueError(
                f"`{function}`: `{path}` is of shape {leaf.shape}, and its rule has the dims "
                f"{' '.join(found[path].dims)}."
            )
    return found


def _some(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    if not names:
        return "nothing else"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"`{name}`" for name in names[:3]) + more
