"""Axes of a mesh, and partition specs made of them: what every layout is said in.

An entry of a spec says which axes split a dim: one axis, several together, or None.
"""

import math
from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

Axes: TypeAlias = str | tuple[str, ...] | None
"""What splits a dim: one axis, several axes together, or None for replicated."""


def check_spec(
    mesh_shape: Mapping[str, int],
    spec: PartitionSpec,
    shape: tuple[int, ...],
    *,
    what: str = "array",
) -> PartitionSpec:
    """Check a literal `PartitionSpec` for an array, and return it.

    It must obey what names do: every axis is one of the mesh, splits one dim, and splits it evenly.
    `what` is what messages call the array.
    """
    array = f"`{what}` of shape {shape}"
    if len(spec) > len(shape):
        raise ValueError(
            f"{array} has {len(shape)} dims and was given {spec} with {len(spec)} entries."
        )
    seen: set[str] = set()
    for dim, (entry, size) in enumerate(zip(spec, shape, strict=False)):
        if entry is PartitionSpec.UNCONSTRAINED:  # the partitioner splits it as it likes
            continue
        axes = as_tuple(entry)
        for axis in axes:
            if axis not in mesh_shape:
                raise ValueError(
                    f"{spec} for {array} names the axis `{axis}`; the mesh has "
                    f"{mesh_text(mesh_shape)}."
                )
            # Within one entry as well as between entries.
            if axis in seen:
                raise ValueError(
                    f"{spec} for {array} uses the axis `{axis}` twice; one axis splits one dim."
                )
            seen.add(axis)
        count = parts_over(mesh_shape, axes)
        # A literal spec has no policy, so there is nothing but to refuse.
        if size % count:
            raise ValueError(
                f"{spec} splits dim {dim} of {array} into {count}, which does not divide {size}."
            )
    return spec


def as_tuple(axes: Axes) -> tuple[str, ...]:
    """The axes of one entry of a spec, or of one candidate of a rule, as a tuple.

    It is empty for None, which means that the dim is not split.
    """
    if axes is None:
        return ()
    if isinstance(axes, str):
        return (axes,)
    return tuple(axes)


def spec_entry(axes: tuple[str, ...]) -> Axes:
    """Axes as an entry of a spec, the inverse of `as_tuple`.

    None or one axis is not written as a tuple, so that specs which mean the same compare equal.
    """
    if not axes:
        return None
    if len(axes) == 1:
        return axes[0]
    return axes


def spec_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Every mesh axis that a spec mentions, in order.

    A dim that is left to the partitioner mentions none.
    """
    axes: list[str] = []
    for entry in spec:
        if entry is not PartitionSpec.UNCONSTRAINED:
            axes.extend(as_tuple(entry))
    return tuple(axes)


def keep_axes(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """The spec with every axis outside `axes` left out.

    That is the spec which a `shard_map` that is manual over `axes` takes; the other axes stay with
    the partitioner.

    >>> keep_axes(PartitionSpec(("data", "fsdp"), "model"), {"data", "model"})
    P('data', 'model')
    """
    axes = frozenset(axes)
    entries: list[Any] = []
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            # There are no axes in it to leave out.
            entries.append(entry)
            continue
        entries.append(spec_entry(axes_within(as_tuple(entry), axes)))
    return PartitionSpec(*entries)


def axes_without(axes: Iterable[str], excluded: Container[str]) -> tuple[str, ...]:
    """Some axes but for those that are excluded, in order.

    >>> axes_without(("pod", "data", "model"), ("data",))
    ('pod', 'model')
    """
    return tuple(axis for axis in axes if axis not in excluded)


def axes_within(axes: Iterable[str], kept: Container[str]) -> tuple[str, ...]:
    """Those of some axes that are among others, in order.

    >>> axes_within(("pod", "data", "model"), ("model", "data"))
    ('data', 'model')
    """
    return tuple(axis for axis in axes if axis in kept)


def parts_over(mesh_shape: Mapping[str, int], axes: Iterable[str]) -> int:
    """The number of parts that axes together split a dim into."""
    return math.prod(mesh_shape[axis] for axis in axes)


def mesh_text(mesh_shape: Mapping[str, int], separator: str = ", ") -> str:
    """The axes of a mesh with their sizes, for a message.

    >>> mesh_text({"data": 2, "model": 4}), mesh_text({})
    ('`data=2`, `model=4`', 'no axes')
    """
    return separator.join(f"`{axis}={size}`" for axis, size in mesh_shape.items()) or "no axes"


def product_text(mesh_shape: Mapping[str, int], axes: Iterable[str]) -> str:
    """Some axes of a mesh, with the sizes that they multiply, for a message.

    >>> product_text({"data": 2, "model": 4, "stage": 2}, ("data", "model"))
    '`data=2` x `model=4`'
    """
    return mesh_text({axis: mesh_shape[axis] for axis in axes}, " x ")
