"""Where every parameter is, and how it is laid out, as a table."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import PartitionSpec

from shardlib._notebook import Shown
from shardlib._text import human_bytes, table, terminal_width, wrapped
from shardlib._tree import named_leaves
from shardlib.layouts._host import HOST
from shardlib.layouts._resolve import resolve
from shardlib.layouts._rules import BATCH, AxisRules, counts_layers
from shardlib.layouts._specs import Axes, as_tuple, spec_axes
from shardlib.machine._mesh import format_mesh
from shardlib.modeling._flax import Names
from shardlib.modeling._random import is_key
from shardlib.step._layer_order import orders
from shardlib.step._state import State, combine, shapes_without_workers


@dataclass(frozen=True)
class Row:
    """One array of a state: what it is, how it is laid out, and why if its names do not say so."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    names: Names
    spec: PartitionSpec
    bytes_per_device: int
    remark: str


@dataclass(frozen=True)
class Description(Shown):
    """How a state is laid out on its mesh; `describe` makes it, and it prints as a table.

    - `mesh`: the axes of the mesh and their sizes, as text.
    - `rows`: one for each parameter and other array of the model, with `path`, `shape`, `dtype`,
      `names`, `spec`, `bytes_per_device` and a `remark`.
    - `optimizer_rows`: one for each leaf of the optimizer's state. Those that are sharded just like
      their parameters, and scalars, are counted in the table and not listed.
    - `like_parameters`: how many of these leaves are sharded just like their parameters.
    - `parameter_count`: how many numbers all parameters have.
    - `parameter_bytes`: their bytes, each counted once.
    - `bytes_per_device`: the bytes that a device holds, by what they are for.
    - `unused_rules`: names with a rule that splits something, but that no array of the model has.
    - `idle_axes`: mesh axes that split nothing, along which devices repeat work.
    - `order`: sentences on stacks whose layers are not in the order of the model.
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
    order: tuple[str, ...] = ()

    def __str__(self) -> str:
        width = terminal_width()
        head = ("parameter", "shape", "dtype", "names", "spec", "per device", "")
        lines = [_listed(head, self.rows, width)]
        # Like its parameter is what everyone expects: a row is for what is not.
        listed = [row for row in self.optimizer_rows if row.remark]
        if listed:
            head = ("optimizer state", "shape", "dtype", "", "spec", "per device", "")
            lines += ["", _listed(head, listed, width)]
        sentences = [*self._sentences(len(listed)), *self.order]
        lines += ["", *[wrapped(sentence, width, later="  ") for sentence in sentences]]
        return "\n".join(lines)

    def _sentences(self, listed: int) -> Iterator[str]:
        """The lines below the tables; `listed` arrays of the optimizer have a row in them."""
        size = human_bytes(self.parameter_bytes)
        yield f"{self.parameter_count:,} parameters, {size}, on {self.mesh}"
        kinds: list[str] = []
        for kind, size_of_kind in self.bytes_per_device.items():
            # Without frozen parameters or errors there is nothing to say of them.
            if size_of_kind:
                kinds.append(f"{human_bytes(size_of_kind)} {kind}")
        yield f"per device: {', '.join(kinds)}"
        if self.optimizer_rows:
            yield f"arrays of the optimizer: {', '.join(self._counts(listed))}"
        if self.unused_rules:
            yield (
                "rules that no parameter uses (annotations of activations may): "
                f"{', '.join(self.unused_rules)}"
            )
        if self.idle_axes:
            yield (
                "mesh axes that no rule uses, along which devices repeat work: "
                f"{', '.join(self.idle_axes)}"
            )

    def _counts(self, listed: int) -> list[str]:
        """How many arrays of the optimizer there are of each kind, in words."""
        counts = [f"{self.like_parameters} sharded like their parameters"]
        scalars = len(self.optimizer_rows) - listed - self.like_parameters
        if scalars == 1:
            counts.append("1 scalar")
        else:
            counts.append(f"{scalars} scalars")
        if listed:
            counts.append(f"{listed} listed above")
        return counts


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
    layout = state.layout
    names, relations = dict(layout.names), dict(layout.relations)
    rows = _rows_of_model(state, names)
    optimizer_rows = []
    # Where workers have a state of their own, that of one of them.
    for path, leaf in named_leaves(shapes_without_workers(state).opt_state):
        optimizer_rows.append(_row(path, leaf, names.get(path), relations[path].reason))
    leaves = jax.tree.leaves((state.params, state.frozen))
    return Description(
        mesh=format_mesh(layout.strategy.device_mesh),
        rows=tuple(rows),
        optimizer_rows=tuple(optimizer_rows),
        like_parameters=sum(relation.kind == "same" for relation in relations.values()),
        parameter_count=sum(leaf.size for leaf in leaves),
        parameter_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
        bytes_per_device=_bytes_by_kind(state),
        unused_rules=_unused_rules(layout.rules, rows),
        idle_axes=_idle_axes(layout.strategy.device_mesh.shape, layout.rules, rows),
        order=orders(layout.strategy, names, [(row.path, row.shape) for row in rows]),
    )


def _rows_of_model(state: State, names: Mapping[str, Names]) -> list[Row]:
    """The rows of parameters, and then those of the model's other arrays.

    Trained and frozen ones are both parameters of the model, and come in its own order.
    """
    remarks = _Remarks(state, names)
    rows: list[Row] = []
    for tree in (combine(state.params, state.frozen), shapes_without_workers(state).rest):
        for path, leaf in named_leaves(tree):
            rows.append(_row(path, leaf, names.get(path), remarks.of(path, leaf.shape)))
    return rows


def _bytes_by_kind(state: State) -> dict[str, int]:
    """The bytes that each device holds of a state, by what they are for.

    Arrays in the host's memory are counted twice: in their own kind, and in a total for the host.
    """
    sizes = {
        "parameters": _total_per_device((state.params, state.frozen)),
        "optimizer state": _total_per_device(state.opt_state),
    }
    # Only a compressed exchange leaves errors, and others need not read of them.
    if state.errors:
        sizes["errors"] = _total_per_device(state.errors)
    if state.workers is not None:
        sizes["workers' own arrays"] = _total_per_device(state.workers.own)
        sizes["what meetings keep"] = _total_per_device(state.workers.kept)
    sizes["other state"] = _total_per_device((state.rest, state.streams))
    leaves = jax.tree.leaves((state.params, state.frozen, state.opt_state))
    on_host = [leaf for leaf in leaves if leaf.sharding.memory_kind == HOST]
    if on_host:
        sizes["in the host's memory (included above)"] = _total_per_device(on_host)
    return sizes


def _row(path: str, leaf: Any, names: Names, remark: str) -> Row:
    """The row of an array, whose layout is that of its sharding."""
    return Row(
        path,
        leaf.shape,
        str(leaf.dtype),
        names,
        leaf.sharding.spec,
        _bytes_per_device(leaf),
        remark,
    )


def _unused_rules(rules: AxisRules, rows: Iterable[Row]) -> tuple[str, ...]:
    """Rules that split something and that no array of the model uses.

    The batch is no array of a state, and a rule for layers is used by pipelines.
    """
    # Rules for the batch are about arrays that a state does not have.
    used = {BATCH}
    for row in rows:
        used.update(name for name in row.names or () if isinstance(name, str))
    unused: list[str] = []
    for name, candidates in rules.items():
        splits_something = any(as_tuple(axes) for axes in candidates)
        if splits_something and name not in used and not counts_layers(name):
            unused.append(name)
    return tuple(unused)


def _idle_axes(sizes: Mapping[str, int], rules: AxisRules, rows: Iterable[Row]) -> tuple[str, ...]:
    """Axes of several devices over which neither a rule nor a layout splits anything."""
    used = set(rules.axes)
    for row in rows:
        used.update(spec_axes(row.spec))
    return tuple(axis for axis, size in sizes.items() if size > 1 and axis not in used)


class _Remarks:
    """The remarks on parameters: what their names do not say about their layout."""

    def __init__(self, state: State, names: Mapping[str, Names]) -> None:
        layout, self.names = state.layout, names
        self.rules, self.sizes = layout.rules, dict(layout.strategy.device_mesh.shape)
        # Of both, since ZeRO splits frozen parameters too.
        self.splits = {**layout.splits(state.params), **layout.splits(state.frozen)}
        self.frozen = {path for path, _ in named_leaves(state.frozen)}
        self.data_axes = "data"
        if layout.strategy.stage_axis is not None:
            self.data_axes = " and ".join(layout.strategy.zero_axes)

    def of(self, path: str, shape: tuple[int, ...]) -> str:
        """The remark on one parameter; empty if there is nothing to say.

        It says what its names do not: that it is frozen, or has no names; which of several
        candidates a rule took; and why ZeRO leaves it whole.
        """
        split = self.splits.get(path)
        is_split = split is not None and split.is_split
        parts: list[str] = []
        if path in self.frozen:
            parts.append("frozen")
        parts.append(self._on_names(path, shape, is_split))
        if split is not None and split.reason:
            how = "split no further" if is_split else f"whole over {self.data_axes}"
            parts.append(f"{how} ({split.reason})")
        return "; ".join(filter(None, parts))

    def _on_names(self, path: str, shape: tuple[int, ...], is_split: bool) -> str:
        """What the names of an array leave open: none at all, or a choice that a rule had."""
        names = self.names.get(path)
        if names is None and is_split:
            return "no names"
        if names is None:
            return "no names: replicated"
        # No rule was asked, so none had a choice.
        if isinstance(names, PartitionSpec):
            return "mesh axes given"
        resolution = resolve(self.rules, self.sizes, names, shape, what=path)
        return "; ".join([*self._choices(names, resolution.spec), *resolution.said])

    def _choices(self, names: Any, spec: PartitionSpec) -> Iterator[str]:
        """What was chosen for each dim whose rule has several candidates."""
        for name, entry in zip(names, spec, strict=True):
            if isinstance(name, str) and len(self.rules[name]) > 1:
                candidates = ", ".join(map(_axes_text, self.rules[name]))
                yield f"`{name}`: {_axes_text(entry)} (candidates: {candidates})"


def _listed(head: tuple[str, ...], rows: Sequence[Row], width: int | None) -> str:
    """A table of arrays.

    If a terminal is too narrow for the column of remarks, each remark stands below its array.
    """
    cells = [head, *map(_cells, rows)]
    whole = table(cells)
    # Into a file or a pipe goes the whole table.
    if width is None or max(map(len, whole.splitlines())) <= width:
        return whole
    # Paths are shortened first; dtypes are left out before names, and these before specs.
    narrow = [row[:-1] for row in cells]
    lines = table(narrow, width=width, shorten=(0, 3, 4), drop=(2, 3, 4)).splitlines()
    remarks = [row[-1] for row in cells]
    return "\n".join(_with_remarks(lines, remarks, width))


def _with_remarks(lines: Sequence[str], remarks: Sequence[str], width: int) -> Iterator[str]:
    """The lines of a table, each with its remark below it, if there is one."""
    for line, remark in zip(lines, remarks, strict=True):
        yield line
        if remark:
            yield wrapped(remark, width, "    ")


def _bytes_per_device(leaf: Any) -> int:
    """The bytes of an array on each device."""
    itemsize = leaf.dtype.itemsize
    if is_key(leaf):
        # The dtype of keys has no size of its own: that of the words they are made of.
        itemsize = jax.eval_shape(jax.random.key_data, leaf).size * 4 // max(leaf.size, 1)
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * itemsize


def _total_per_device(tree: Any) -> int:
    """The bytes of all arrays of a tree on each device.

    All devices have as many: layouts split evenly.
    """
    return sum(_bytes_per_device(leaf) for leaf in jax.tree.leaves(tree))


def _cells(row: Row) -> tuple[str, str, str, str, str, str, str]:
    """A row as texts, in the columns of the table."""
    return (
        row.path,
        "x".join(map(str, row.shape)) or "scalar",
        row.dtype,
        _names_text(row.names),
        _spec_text(row.spec),
        human_bytes(row.bytes_per_device),
        row.remark,
    )


def _axes_text(axes: Axes) -> str:
    return "x".join(as_tuple(axes)) or "replicated"


def _names_text(names: Names) -> str:
    """The names of an array's dims, with a dash for each dim that has none."""
    if names is None:
        return "-"
    return ", ".join(str(name or "-") for name in names)


def _spec_text(spec: PartitionSpec) -> str:
    """The axes that split each dim, with a dash for each dim that none splits."""
    return ", ".join("x".join(as_tuple(entry)) or "-" for entry in spec) or "-"
