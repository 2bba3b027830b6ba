"""Where every parameter lives, as a table one can read."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardlib._text import human_bytes, table, terminal_width, wrapped
from shardlib._tree import named_leaves
from shardlib.layouts._resolve import resolve
from shardlib.layouts._rules import BATCH, Axes, AxisRules, as_tuple, counts_layers, spec_axes
from shardlib.machine._mesh import format_mesh
from shardlib.modeling._flax import Names
from shardlib.modeling._random import is_key
from shardlib.step._layer_order import orders
from shardlib.step._state import State, combine


@dataclass(frozen=True)
class Row:
    """One array of a state: what it is, how it lies, and why if that is not plain from its
    names.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    names: Names
    spec: PartitionSpec
    bytes_per_device: int
    remark: str


@dataclass(frozen=True)
class Description:
    """What `describe` found; it prints as a table.

    `rows` are for parameters and other arrays of the model, totals for all.

    `optimizer_rows` are of the optimizer's state, one for each leaf; those that lie just as their
    parameters do, and scalars, are counted in the table and not listed.
    """

    mesh: str
    rows: tuple[Row, ...]
    optimizer_rows: tuple[Row, ...]
    like_parameters: int
    parameter_count: int
    parameter_bytes: int
    bytes_per_device: dict[str, int]
    unused_rules: tuple[str, ...]
    idle_axes: tuple[str, ...]
    order: tuple[str, ...] = ()  # of stacks that do not lie as the model has them

    def __str__(self) -> str:
        width = terminal_width()
        lines = [
            _listed(
                ("parameter", "shape", "dtype", "names", "spec", "per device", ""), self.rows, width
            )
        ]
        own = [row for row in self.optimizer_rows if row.remark]
        if own:
            lines += [
                "",
                _listed(
                    ("optimizer state", "shape", "dtype", "", "spec", "per device", ""), own, width
                ),
            ]
        per_device = ", ".join(
            f"{human_bytes(size)} {kind}" for kind, size in self.bytes_per_device.items() if size
        )
        lines += [
            "",
            f"{self.parameter_count:,} parameters, {human_bytes(self.parameter_bytes)}, on "
            f"{self.mesh}",
            f"per device: {per_device}",
        ]
        if self.optimizer_rows:
            scalars = len(self.optimizer_rows) - len(own) - self.like_parameters
            said = [
                f"{self.like_parameters} sharded like their parameters",
                f"{scalars} scalar" + "s" * (scalars != 1),
            ]
            said += [f"{len(own)} listed above"] if own else []
            lines.append(f"arrays of the optimizer: {', '.join(said)}")
        if self.unused_rules:
            lines.append(
                "rules that no parameter uses (annotations of activations may): "
                f"{', '.join(self.unused_rules)}"
            )
        if self.idle_axes:
            lines.append(
                "mesh axes that no rule uses, along which devices repeat work: "
                f"{', '.join(self.idle_axes)}"
            )
        tables = 3 if own else 1  # and the lines after them are sentences
        lines[tables:] = [
            wrapped(line, width, later="  ") for line in (*lines[tables:], *self.order)
        ]
        return "\n".join(lines)


def describe(state: State) -> Description:
    """Each parameter's shape, names, spec and bytes per device.

    A remark is added where a rule had a choice to make.

    >>> import jax.numpy as jnp, optax, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=2,model=4", rules=sl.AxisRules(batch="data", embed=None,
    ...     mlp="model"))
    >>> make = lambda: sl.annotate({"w": jnp.ones((4, 8)), "b": jnp.ones(4)}, {"w": ("embed",
    ...     "mlp")})
    >>> print(sl.describe(sl.init(make, optax.sgd(0.1), strategy)))
    parameter  shape  dtype    names       spec      per device
    b          4      float32  -           -         16 B        no names: replicated
    w          4x8    float32  embed, mlp  -, model  32 B
    <BLANKLINE>
    36 parameters, 144 B, on data=2,model=4
    per device: 48 B parameters
    """
    if not isinstance(state, State):
        raise ValueError(
            f"`describe` takes the `State` that `sl.init` makes; got {type(state).__name__}."
        )
    layout, mesh = state.layout, state.layout.strategy.device_mesh
    rules, names, relations = layout.rules, dict(layout.names), dict(layout.relations)
    splits = {**layout.splits(state.params), **layout.splits(state.frozen)}
    frozen = {path for path, _ in named_leaves(state.frozen)}
    over = "data" if layout.strategy.stage_axis is None else " and ".join(layout.strategy.zero_axes)

    def remark(path: str, shape: tuple[int, ...]) -> str:
        split = splits.get(path)
        parts = [
            "frozen" if path in frozen else "",
            _remark(
                path,
                shape,
                names.get(path),
                rules,
                dict(mesh.shape),
                split is not None and split.dim is not None,
            ),
            f"whole over {over} ({split.reason})" if split is not None and split.reason else "",
        ]
        return "; ".join(filter(None, parts))

    def row(path: str, leaf: Any, remark: str) -> Row:
        return Row(
            path,
            leaf.shape,
            str(leaf.dtype),
            names.get(path),
            leaf.sharding.spec,
            _bytes_here(leaf),
            remark,
        )

    rows = tuple(
        row(path, leaf, remark(path, leaf.shape))
        for tree in (combine(state.params, state.frozen), state.rest)
        for path, leaf in named_leaves(tree)
    )
    of_optimizer = tuple(
        row(path, leaf, relations[path].reason) for path, leaf in named_leaves(state.opt_state)
    )
    used = {name for row in rows for name in row.names or () if isinstance(name, str)}
    splitting = (
        name for name, candidates in rules.items() if any(as_tuple(axes) for axes in candidates)
    )
    return Description(
        mesh=format_mesh(mesh),
        rows=rows,
        optimizer_rows=of_optimizer,
        like_parameters=sum(relation.kind == "same" for relation in relations.values()),
        parameter_count=sum(leaf.size for leaf in jax.tree.leaves((state.params, state.frozen))),
        parameter_bytes=sum(
            leaf.size * leaf.dtype.itemsize
            for leaf in jax.tree.leaves((state.params, state.frozen))
        ),
        bytes_per_device={
            "parameters": _total_here((state.params, state.frozen)),
            "optimizer state": _total_here(state.opt_state),
            **({"errors": _total_here(state.errors)} if state.errors else {}),
            "other state": _total_here((state.rest, state.streams)),
        },
        unused_rules=tuple(
            name for name in splitting if name not in used | {BATCH} and not counts_layers(name)
        ),
        idle_axes=tuple(
            axis
            for axis, size in mesh.shape.items()
            if size > 1
            and axis not in {*rules.axes, *(a for row in rows for a in spec_axes(row.spec))}
        ),
        order=orders(layout.strategy, names, [(row.path, row.shape) for row in rows]),
    )


def _listed(head: tuple[str, ...], rows: Sequence[Row], width: int | None) -> str:
    """A table of arrays; where remarks do not fit into a terminal beside them, each stands below
    its array.
    """
    cells = [head, *map(_cells, rows)]
    whole = table(cells)
    if width is None or max(map(len, whole.splitlines())) <= width:
        return whole
    narrow = [row[:-1] for row in cells]
    lines = table(narrow, width=width, shorten=(0, 3, 4), drop=(2, 3, 4)).splitlines()
    told = []
    for line, row in zip(lines, cells, strict=True):
        told += [line, *([wrapped(row[-1], width, "    ")] if row[-1] else [])]
    return "\n".join(told)


def _bytes_here(leaf: Any) -> int:
    itemsize = (
        jax.eval_shape(jax.random.key_data, leaf).size * 4 // max(leaf.size, 1)
        if is_key(leaf)
        else leaf.dtype.itemsize
    )
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * itemsize


def _total_here(tree: Any) -> int:
    return sum(_bytes_here(leaf) for leaf in jax.tree.leaves(tree))


def _cells(row: Row) -> tuple[str, str, str, str, str, str, str]:
    return (
        row.path,
        "x".join(map(str, row.shape)) or "scalar",
        row.dtype,
        _names_text(row.names),
        _spec_text(row.spec),
        human_bytes(row.bytes_per_device),
        row.remark,
    )


def _remark(
    path: str,
    shape: tuple[int, ...],
    names: Names,
    rules: AxisRules,
    mesh_shape: dict[str, int],
    split: bool,
) -> str:
    if names is None:
        return "no names" if split else "no names: replicated"
    if isinstance(names, PartitionSpec):
        return "mesh axes given"
    resolution = resolve(rules, mesh_shape, names, shape, what=path)
    chosen = [
        f"`{name}`: {_axes_text(entry)} (candidates: "
        f"{', '.join(_axes_text(axes) for axes in rules[name])})"
        for name, entry in zip(names, resolution.spec, strict=True)
        if isinstance(name, str) and len(rules[name]) > 1
    ]
    return "; ".join([*chosen, *resolution.said])


def _axes_text(axes: Axes) -> str:
    return "x".join(as_tuple(axes)) or "replicated"


def _names_text(names: Names) -> str:
    return "-" if names is None else ", ".join("-" if name is None else str(name) for name in names)


def _spec_text(spec: PartitionSpec) -> str:
    return ", ".join("x".join(as_tuple(entry)) or "-" for entry in spec) or "-"
