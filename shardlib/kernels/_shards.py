"""How the arrays of an op are laid out where it is called, from the names of their dims, and the op
run on each device's own shard.

A kernel is one device's: the partitioner cannot take it apart. So an op that is given names runs
under a `shard_map` over all axes that are still automatic where it is called. Over axes that are
manual there already (the data axes of the train step, all axes in a `shard_map` of the user's) the
arrays are parts already; names say which, so that sums over a dim count every device that has a
part of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.layouts._annotate import constrain, current_scope, mesh_of_shards, say
from shardlib.layouts._resolve import resolve
from shardlib.layouts._rules import AxisRules, as_tuple

Names: TypeAlias = Sequence[str | None]


@dataclass(frozen=True)
class ArrayLayout:
    """How an array is laid out: its spec over the automatic axes, and of each dim all the axes that
    split it, the manual first.

    Without names nothing is known of it: `spec` is None.
    """

    shape: tuple[int, ...]  # where the op is called
    spec: PartitionSpec | None
    axes: tuple[tuple[str, ...], ...]

    @property
    def here(self) -> tuple[int, ...]:
        """Its shape on one device."""
        if self.spec is None:
            return self.shape
        sizes = mesh_of_shards().shape
        parts = [math.prod(sizes[axis] for axis in as_tuple(entry)) for entry in self.spec]
        return tuple(size // part for size, part in zip(self.shape, parts, strict=True))

    @property
    def whole(self) -> tuple[int, ...]:
        """Its shape on all devices together."""
        sizes = mesh_of_shards().shape
        pairs = zip(self.here, self.axes, strict=True)
        return tuple(size * math.prod(sizes[axis] for axis in axes) for size, axes in pairs)

    def like(self, shape: tuple[int, ...]) -> "ArrayLayout":
        """The layout of an array with the same dims, but for those of size one, which are on every
        device.
        """
        if self.spec is None:
            return ArrayLayout(shape, None, self.axes)
        whole = [to == 1 and size != 1 for to, size in zip(shape, self.shape, strict=True)]
        spec = PartitionSpec(
            *(None if one else entry for one, entry in zip(whole, self.spec, strict=True))
        )
        return ArrayLayout(
            shape,
            spec,
            tuple(() if one else axes for one, axes in zip(whole, self.axes, strict=True)),
        )

    def of(self, *dims: int) -> "ArrayLayout":
        """The layout of an array that has only these of the dims."""
        shape, axes = tuple(self.shape[dim] for dim in dims), tuple(self.axes[dim] for dim in dims)
        return ArrayLayout(
            shape,
            None if self.spec is None else PartitionSpec(*(self.spec[dim] for dim in dims)),
            axes,
        )


def layout_of(op: str, x: Any, names: Names | None, what: str = "x") -> ArrayLayout:
    """The layout of an array with these names; without any, or where there is no sharding on
    purpose, nothing is known.
    """
    shape = tuple(x.shape)
    if names is not None:
        check.kind(op, "names", names, tuple | list, "a name for each dim, in a tuple")
        for name in names:
            check.kind(
                op,
                "names",
                name,
                str,
                "a name for each dim, in a tuple, with None for one that is whole",
                optional=True,
            )
    if names is not None and len(names) != len(shape):
        raise ValueError(
            f"`{op}`: `{what}` of shape {shape} has {len(shape)} dims and was given {len(names)} "
            f"names {check.shown(tuple(names))}: name every dim once."
        )
    scope, mesh = current_scope(), mesh_of_shards()
    if names is None or (scope is not None and scope.rules is None):
        return ArrayLayout(shape, None, ((),) * len(shape))
    if scope is None or scope.rules is None or mesh.empty:
        raise ValueError(
            f"`{op}(names={tuple(names)})` outside any rules: nothing says what the names mean. "
            "Trace it under `with sl.use(rules, mesh):`, as `sl.init` and `sl.train_step` do, say "
            "that there is no sharding on purpose, `with sl.unsharded():`, or leave the names out."
        )
    scope.record(names)
    held = [_held(op, scope.rules, mesh, name, what) for name in names]
    resolution = resolve(
        scope.rules,
        mesh.shape,
        tuple(names),
        shape,
        what=what,
        manual=frozenset(mesh.manual_axes),
        parts=True,
    )
    if resolution.padded_shape != shape:
        raise ValueError(
            f"`{op}`: `{what}` of shape {shape} would be padded to {resolution.padded_shape}. An "
            'op takes sizes that its axes divide; `rules.indivisible(name="replicate")` lays such '
            "a dim out whole."
        )
    say(resolution.said)
    axes = tuple(
        (*already, *as_tuple(entry)) for already, entry in zip(held, resolution.spec, strict=True)
    )
    return ArrayLayout(shape, resolution.spec, axes)


def _held(op: str, rules: AxisRules, mesh: AbstractMesh, name: Any, what: str) -> tuple[str, ...]:
    """The axes over which a dim of this name is split already."""
    if not isinstance(name, str) or name not in rules:
        return ()
    candidates = [as_tuple(axes) for axes in rules[name]]
    held = [tuple(axis for axis in axes if axis in mesh.manual_axes) for axes in candidates]
    if len(set(held)) > 1:
        raise ValueError(
            f"`{op}`: the rule for `{name}`, a dim of `{what}`, has the candidates {candidates}, "
            f"and `{next(axis for axes in held for axis in axes)}` is manual here: whether the dim "
            "is split over it already cannot be told. Give the rule one candidate."
        )
    if candidates[0][: len(held[0])] != held[0]:
        raise ValueError(
            f"`{op}`: the rule for `{name}`, a dim of `{what}`, is {candidates[0]}, and {held[0]} "
            "is manual here, where it has been split over first. Put what is manual first in the "
            "rule."
        )
    return held[0]


def automatic_axes() -> tuple[str, ...]:
    """The axes of the mesh in scope over which the partitioner lays arrays out where this is
    called.
    """
    mesh = mesh_of_shards()
    return (
        ()
        if mesh.empty
        else tuple(axis for axis in mesh.axis_names if axis not in mesh.manual_axes)
    )


def partitioned(of: ArrayLayout) -> bool:
    """Whether the partitioner would have to take apart what is done with an array: it may be split,
    and how is not known.
    """
    sizes = mesh_of_shards().shape
    return of.spec is None and any(sizes[axis] > 1 for axis in automatic_axes())


def per_shard(
    body: Callable[..., Any],
    arrays: Sequence[Any],
    layouts: Sequence[ArrayLayout | None],
    results: Any,
    *,
    same: tuple[str, ...] = (),
) -> Any:
    """Run a function of arrays on each device's own shard; a None among the arrays is handed on.

    `results` is a tree of the layouts of its results; over the axes `same` they do not differ.
    Where no names were given, the function sees the arrays as they are.
    """
    automatic = automatic_axes()
    given = [k for k, x in enumerate(arrays) if x is not None]
    if not automatic or any(layouts[k].spec is None for k in given):  # type: ignore[union-attr]
        return body(*arrays)

    def of_given(*some: Any) -> Any:
        every: list[Any] = [None] * len(arrays)
        for k, x in zip(given, some, strict=True):
            every[k] = x
        return body(*every)

    specs: Any = tuple(layouts[k].spec for k in given)  # type: ignore[union-attr]
    operands = [constrain(arrays[k], spec) for k, spec in zip(given, specs, strict=True)]
    out = jax.tree.map(
        lambda layout: layout.spec, results, is_leaf=lambda layout: isinstance(layout, ArrayLayout)
    )
    mapped = jax.shard_map(
        of_given, in_specs=specs, out_specs=out, axis_names=set(automatic), check_vma=False
    )
    differing = frozenset().union(*map(varying, operands)) - frozenset(same)
    return jax.tree.map(lambda x: as_varying(x, differing), mapped(*operands))


def alone() -> bool:
    """Whether what is traced here runs on one device."""
    sizes = mesh_of_shards()
    return sizes.empty or all(sizes.shape[axis] == 1 for axis in sizes.manual_axes)


def varying_alike(*arrays: Any) -> list[Any]:
    """The same arrays, all varying over the manual axes that any of them varies over, where JAX
    keeps account of that.

    An op with a derivative of its own must give each array a gradient that varies as it does; what
    this changes, JAX turns back by the sum it takes.
    """
    axes = frozenset().union(*(varying(x) for x in arrays if x is not None))
    return [x if x is None else as_varying(x, axes) for x in arrays]


def as_varying(x: Any, axes: frozenset[str]) -> Any:
    """The array, said to differ over these axes too."""
    rest = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, rest, to="varying") if rest else x


def varying(x: Any) -> frozenset[str]:
    """The manual axes over which an array is known to differ."""
    return jax.typeof(x).manual_axis_type.varying


def place(axes: tuple[str, ...], size: int) -> jax.Array:
    """Where the part begins that this device has of a dim split over these axes, of `size` each."""
    return jnp.int32(lax.axis_index(axes) * size if axes else 0)
