"""How an op's arrays are laid out where it is called, and the op run on each device's own shard.

A kernel is one device's program: the partitioner cannot take it apart. So an op that is given the
names of its arrays' dims runs under a `shard_map` over all axes that are still automatic where it
is called:

    axes of the mesh    manual at the call  |  automatic at the call
    arrays              are parts already   |  become parts in `per_shard`

Over manual axes (the data axes of the train step, or all axes in a `shard_map` of the user's) the
arrays are parts already. Names say which dims these axes split, so that sums over a dim take in
every device that has a part of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.layouts._annotate import constrain, current_scope, mesh_of_shards, warn
from shardlib.layouts._resolve import resolve
from shardlib.layouts._rules import AxisRules
from shardlib.layouts._specs import as_tuple, axes_within, axes_without, parts_over

Names: TypeAlias = Sequence[str | None]


@dataclass(frozen=True)
class ArrayLayout:
    """How an array is laid out where an op is called.

    Without names nothing is known of that: `spec` is None, and no dim has axes.
    """

    shape: tuple[int, ...]  # as the op is given it: whole over the automatic axes
    spec: PartitionSpec | None  # over the automatic axes
    axes: tuple[tuple[str, ...], ...]  # that split each dim: the manual ones, then the automatic

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Its shape on one device."""
        if self.spec is None:
            return self.shape
        sizes = mesh_of_shards().shape
        shape = []
        for size, entry in zip(self.shape, self.spec, strict=True):
            shape.append(size // parts_over(sizes, as_tuple(entry)))
        return tuple(shape)

    def local(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """The shape on one device with a dtype: what a kernel there sees."""
        return jax.ShapeDtypeStruct(self.local_shape, dtype)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Its shape on all devices together."""
        sizes = mesh_of_shards().shape
        shape = []
        for size, axes in zip(self.local_shape, self.axes, strict=True):
            shape.append(size * parts_over(sizes, axes))
        return tuple(shape)

    def broadcasting(self, shape: tuple[int, ...]) -> "ArrayLayout":
        """The layout of an array of a shape that broadcasts to this one's.

        Its dims are split as this array's are, except for those of size one, which every device
        has whole.
        """
        entries: list[Any] = []
        axes: list[tuple[str, ...]] = []
        spec = self.spec
        if spec is None:
            return ArrayLayout(shape, None, self.axes)
        for dim, (size, own_size) in enumerate(zip(shape, self.shape, strict=True)):
            if size == 1 and own_size != 1:
                axes.append(())
                entries.append(None)
            else:
                axes.append(self.axes[dim])
                entries.append(spec[dim])
        return ArrayLayout(shape, PartitionSpec(*entries), tuple(axes))

    def select(self, *dims: int) -> "ArrayLayout":
        """The layout of an array that has only these dims."""
        shape = tuple(self.shape[dim] for dim in dims)
        axes = tuple(self.axes[dim] for dim in dims)
        if self.spec is None:
            return ArrayLayout(shape, None, axes)
        return ArrayLayout(shape, PartitionSpec(*(self.spec[dim] for dim in dims)), axes)

    def automatic_axes(self, *dims: int) -> tuple[str, ...]:
        """The automatic axes that split some of the dims; none if nothing is known of the array."""
        axes: list[str] = []
        if self.spec is not None:
            for dim in dims:
                axes.extend(as_tuple(self.spec[dim]))
        return tuple(axes)


def layout_of(
    op: str, x: Any, names: Names | None, what: str = "x", *, in_any_order: tuple[int, ...] = ()
) -> ArrayLayout:
    """The layout of an array with these names for its dims, by the rules in scope.

    Without names, or where there is no sharding on purpose, nothing is known of it.

    Args:
        op: the function that is called, for errors.
        x: the array.
        names: of its dims: of rules in scope, one for each dim, whose axes divide it.
        what: the argument that is the array, for errors.
        in_any_order: dims of which a device needs no more than its part, whichever that is.
    """
    shape = tuple(x.shape)
    _check_names(op, shape, names, what)
    scope, mesh = current_scope(), mesh_of_shards()
    if names is None or (scope is not None and scope.rules is None):
        return ArrayLayout(shape, None, ((),) * len(shape))
    if scope is None or scope.rules is None or mesh.empty:
        raise ValueError(
            f"`{op}(names={tuple(names)})` outside any rules: nothing says what the names mean. "
            "Trace it under `with sl.use(rules, mesh):`, as `sl.init` and `sl.train_step` do, say "
            "that there is no sharding on purpose, `with sl.unsharded():`, or leave the names out."
        )
    # The names are used by now, whatever comes of them.
    scope.record(names)
    manual: list[tuple[str, ...]] = []
    for dim, name in enumerate(names):
        axes = _manual_axes_of(op, scope.rules, mesh, name, what)
        if dim not in in_any_order:
            _check_manual_first(op, scope.rules, name, axes, what)
        manual.append(axes)
    resolution = resolve(
        scope.rules,
        mesh.shape,
        tuple(names),
        shape,
        what=what,
        manual=frozenset(mesh.manual_axes),
        parts=True,
    )
    # Numbers that were added would count in sums over the dim.
    if resolution.padded_shape != shape:
        raise ValueError(
            f"`{op}`: `{what}` of shape {shape} would be padded to {resolution.padded_shape}. An "
            'op takes sizes that its axes divide; `rules.indivisible(name="replicate")` lays such '
            "a dim out whole."
        )
    warn(resolution.said)
    axes = []
    for manual_axes, entry in zip(manual, resolution.spec, strict=True):
        axes.append((*manual_axes, *as_tuple(entry)))
    return ArrayLayout(shape, resolution.spec, tuple(axes))


def _check_names(op: str, shape: tuple[int, ...], names: Names | None, what: str) -> None:
    """Refuse names that are not one string or None for each dim.

    Args:
        op: the operation, for the message.
        shape: the shape of the array that has the dims.
        names: what was given as their names.
        what: the argument that is the array.
    """
    if names is None:
        return
    check.kind(op, "names", names, tuple | list, "a name for each dim, in a tuple")
    takes = "a name for each dim, in a tuple, with None for one that is whole"
    for name in names:
        check.kind(op, "names", name, str, takes, optional=True)
    if len(names) != len(shape):
        raise ValueError(
            f"`{op}`: `{what}` of shape {shape} has {len(shape)} dims and was given {len(names)} "
            f"names {check.shown(tuple(names))}: name every dim once."
        )


def _manual_axes_of(
    op: str, rules: AxisRules, mesh: AbstractMesh, name: Any, what: str
) -> tuple[str, ...]:
    """The manual axes over which a dim of this name is split already.

    Args:
        op: the function that is called, for errors.
        rules: which may have several candidates for a name.
        mesh: in scope.
        name: of the dim; None, and a name that the rules lack, has no axes.
        what: the argument that has the dim, for errors.
    """
    if not isinstance(name, str) or name not in rules:
        return ()
    candidates = [as_tuple(axes) for axes in rules[name]]
    manual = [axes_within(axes, mesh.manual_axes) for axes in candidates]
    if len(set(manual)) > 1:
        first_manual = next(axes for axes in manual if axes)[0]
        raise ValueError(
            f"`{op}`: the rule for `{name}`, a dim of `{what}`, has the candidates {candidates}, "
            f"and `{first_manual}` is manual here: whether the dim is split over it already cannot "
            "be told. Give the rule one candidate."
        )
    return manual[0]


def _check_manual_first(
    op: str, rules: AxisRules, name: Any, manual: tuple[str, ...], what: str
) -> None:
    """Refuse a rule in which the manual axes are not first.

    Parts of a part are in the order of the rule only if the manual axes split first.

    Args:
        op: the function that is called, for errors.
        rules: in scope.
        name: of the dim.
        manual: the manual axes over which the dim is split already.
        what: the argument that has the dim, for errors.
    """
    if not manual:
        return
    axes = as_tuple(rules[name][0])
    if axes[: len(manual)] != manual:
        raise ValueError(
            f"`{op}`: the rule for `{name}`, a dim of `{what}`, is {axes}, and {manual} is manual "
            "here, where it has been split over first. Put what is manual first in the rule."
        )


def automatic_axes() -> tuple[str, ...]:
    """The axes of the mesh in scope over which the partitioner lays arrays out at this point."""
    mesh = mesh_of_shards()
    if mesh.empty:
        return ()
    return axes_without(mesh.axis_names, mesh.manual_axes)


def partitioned(layout: ArrayLayout) -> bool:
    """Whether the partitioner would have to take apart what is done with an array.

    It may be split over an automatic axis, and nothing says how.
    """
    sizes = mesh_of_shards().shape
    return layout.spec is None and any(sizes[axis] > 1 for axis in automatic_axes())


def per_shard(
    body: Callable[..., Any],
    arrays: Sequence[Any],
    layouts: Sequence[ArrayLayout | None],
    results: Any,
    *,
    unvarying: tuple[str, ...] = (),
) -> Any:
    """Run a function of arrays on each device's own shard.

    Where no names were given, or all axes are manual, the function sees the arrays as they are.

    Args:
        body: the function.
        arrays: its arguments; a None is handed on as it is.
        layouts: of the arguments.
        results: a tree of the layouts of its results.
        unvarying: the axes over which results do not differ, though the arguments may.
    """
    # Without automatic axes, arrays are a device's own shards already.
    automatic = automatic_axes()
    present = [k for k, x in enumerate(arrays) if x is not None]
    present_layouts: list[Any] = [layouts[k] for k in present]
    if not automatic or any(layout.spec is None for layout in present_layouts):
        return body(*arrays)

    def of_given(*shards: Any) -> Any:
        arguments: list[Any] = [None] * len(arrays)
        for k, x in zip(present, shards, strict=True):
            arguments[k] = x
        return body(*arguments)

    # `shard_map` takes no None among its operands: those that are None are filled in inside.
    specs = tuple(layout.spec for layout in present_layouts)
    operands = [constrain(arrays[k], spec) for k, spec in zip(present, specs, strict=True)]
    out_specs = jax.tree.map(
        lambda layout: layout.spec, results, is_leaf=lambda layout: isinstance(layout, ArrayLayout)
    )
    mapped = jax.shard_map(
        of_given, in_specs=specs, out_specs=out_specs, axis_names=set(automatic), check_vma=False
    )
    # Inside, JAX does not track what varies. Over the manual axes around it, it may.
    differing = frozenset().union(*map(varying, operands)) - frozenset(unvarying)
    return jax.tree.map(lambda x: as_varying(x, differing), mapped(*operands))


def on_one_device() -> bool:
    """Whether what is traced at this point runs on one device.

    That is so without a mesh, and where all manual axes are of size one: kernels are not called
    where automatic ones are larger.
    """
    sizes = mesh_of_shards()
    return sizes.empty or all(sizes.shape[axis] == 1 for axis in sizes.manual_axes)


def varying_alike(*arrays: Any) -> list[Any]:
    """The same arrays, all varying over the manual axes that any of them varies over.

    It matters where JAX tracks over which axes arrays vary. An op with a derivative of its own must
    give each array a gradient that varies as the array does. What is made to vary here, JAX's
    transpose makes unvarying again, by a sum. None is returned as None.
    """
    axes = frozenset().union(*(varying(x) for x in arrays if x is not None))
    alike: list[Any] = []
    for x in arrays:
        if x is not None:
            x = as_varying(x, axes)
        alike.append(x)
    return alike


def as_varying(x: Any, axes: frozenset[str]) -> Any:
    """The array, declared to vary over these axes too.

    Its numbers stay as they are; backward, the gradient is summed over the axes that were
    added.
    """
    # Sorted, since the program must be the same in every process.
    missing = tuple(sorted(axes - varying(x)))
    if not missing:
        return x
    return lax.pcast(x, missing, to="varying")


def varying(x: Any) -> frozenset[str]:
    """The manual axes over which an array is known to differ between devices."""
    return jax.typeof(x).manual_axis_type.varying


def shard_offset(axes: tuple[str, ...], size: int) -> jax.Array:
    """Where this device's part begins of a dim that is split over axes into parts of a size."""
    # Along no axes there is one part.
    if not axes:
        return jnp.int32(0)
    return jnp.int32(lax.axis_index(axes) * size)
