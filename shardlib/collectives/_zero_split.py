"""How ZeRO splits a parameter: along which of its dims, over which axes, and why no further."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from shardlib.collectives._zero import Zero
from shardlib.layouts._rules import EXPERTS, counts_layers
from shardlib.layouts._specs import (
    as_tuple,
    axes_within,
    axes_without,
    parts_over,
    product_text,
    spec_axes,
    spec_entry,
)

# The names of dims from which tokens and positions take rows.
_LOOKED_UP = ("vocab", "position")


class Further(NamedTuple):
    """A dim of a parameter that an axis of sequences splits, after whatever else splits it."""

    dim: int
    axis: str


class Split(NamedTuple):
    """How a parameter is split at rest, and why no further.

    Over axes of data, along which a step is manual, one dim is split. Axes of sequences, which are
    the partitioner's, split other dims.
    """

    spec: PartitionSpec  # its layout
    dim: int | None = None  # the dim that is split over `axes`
    axes: tuple[str, ...] = ()  # of data
    reason: str = ""  # why it is not split over all axes that ZeRO splits over, if it is not
    layer: int = 0  # how many elements it has, of one layer where layers are stacked
    further: tuple[Further, ...] = ()
    stacked: int = 0  # how many leading dims stack layers or experts

    @property
    def is_split(self) -> bool:
        """Whether ZeRO splits it at all."""
        return self.dim is not None or bool(self.further)

    @property
    def contributed(self) -> PartitionSpec:
        """The layout of a gradient before it is summed over the axes of data.

        Over axes of sequences the partitioner has added it up by then.
        """
        entries = []
        for entry in self.spec:
            entries.append(spec_entry(axes_without(as_tuple(entry), self.axes)))
        return PartitionSpec(*entries)

    @property
    def dims(self) -> tuple[int, ...]:
        """The dims that ZeRO splits."""
        dims = [further.dim for further in self.further]
        return tuple(dims) if self.dim is None else (self.dim, *dims)

    def of_layer(self, consumed: int) -> "Split":
        """The same for what is left of a parameter after loops took off leading dims."""
        further = tuple(Further(dim - consumed, axis) for dim, axis in self.further)
        dim = None if self.dim is None else self.dim - consumed
        spec = PartitionSpec(*self.spec[consumed:])
        return self._replace(spec=spec, dim=dim, further=further)


def split_further(
    zero: Zero,
    axes: Iterable[str],
    mesh_shape: Mapping[str, int],
    shape: tuple[int, ...],
    spec: PartitionSpec,
    names: Any = None,
    sequence_axes: tuple[str, ...] = (),
    *,
    only_whole: bool = True,
) -> Split:
    """Split a parameter over the axes of data too, along one of its dims.

    That is a dim that divides, is whole so far, and stacks no layers: the first such dim, whose
    parts are contiguous in memory; of a parameter without names the longest, since its first may be
    one of layers. The last dim comes last: a TPU keeps it in tiles, and of a scatter along it, into
    parts that fill few tiles, it makes an all-reduce of twice the bytes.

    What is small stays whole, and so does what has no dim that divides. Axes of sequences split
    further dims, each the longest that it divides.

    Args:
        zero: what is small, and which names stack layers.
        axes: the axes over which to split, those of data first.
        mesh_shape: the sizes of all axes.
        shape: the shape of the parameter.
        spec: its layout so far.
        names: the names of its dims, a tuple; anything else counts as no names.
        sequence_axes: those of `axes` that split sequences, and no batch.
        only_whole: whether a dim that is split already is left as it is, even if no other divides.

    >>> spec = PartitionSpec(None, None, "model")
    >>> split_further(Zero(3), ["data"], {"data": 8, "model": 2}, (4, 1024, 4096), spec, ("layers",
    ...     "embed", "mlp")).spec
    P(None, 'data', 'model')
    """
    # A spec says how a parameter is laid out, and not what its dims are.
    dim_names: tuple[Any, ...] = ()
    if isinstance(names, tuple) and not isinstance(names, PartitionSpec):
        dim_names = names
    leading = _leading_stacked_dims(dim_names)
    stacked = _stacked_dims(zero, len(shape), dim_names)
    elements = math.prod(size for d, size in enumerate(shape) if d not in stacked)
    # Axes of one device split nothing, and those that split the parameter already cannot again.
    used = spec_axes(spec)
    free = tuple(axis for axis in axes if axis not in used and mesh_shape[axis] > 1)
    if not free:
        return Split(spec, layer=elements, stacked=leading)
    if elements <= zero.small:
        reason = f"small: {elements:,} elements"
        return Split(spec, reason=reason, layer=elements, stacked=leading)

    looked_up = {d for d, name in enumerate(dim_names) if name in _LOOKED_UP}
    dims = _Dims(shape, spec, stacked, mesh_shape, looked_up, is_named=bool(dim_names))
    of_data = axes_without(free, sequence_axes)
    dim = dims.split_over_data(of_data) if of_data else None
    if dim is None and of_data and not only_whole:
        dim = dims.split_over_data(of_data, only_whole=False)
    further: list[Further] = []
    for axis in axes_within(free, sequence_axes):
        split_dim = dims.split_over_sequences(axis, dim)
        if split_dim is not None:
            further.append(Further(split_dim, axis))
    split_axes = of_data if dim is not None else ()
    missing = axes_without(free, (*split_axes, *(one.axis for one in further)))
    reason = ""
    if missing:
        reason = f"no dim that is whole divides by {product_text(mesh_shape, missing)}"
    if dim is not None or further:
        spec = PartitionSpec(*dims.entries)
    return Split(spec, dim, split_axes, reason, elements, tuple(further), leading)


class _Dims:
    """The dims of a parameter while they are split over one axis or several after another.

    Args:
        shape: of the parameter.
        spec: its layout so far.
        stacked: the dims that stack layers.
        mesh_shape: the sizes of all axes.
        looked_up: the dims from which tokens and positions take rows.
        is_named: whether its dims have names.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        spec: PartitionSpec,
        stacked: set[int],
        mesh_shape: Mapping[str, int],
        looked_up: set[int],
        *,
        is_named: bool,
    ) -> None:
        self.shape, self.stacked, self.sizes = shape, stacked, mesh_shape
        self.looked_up, self.is_named = looked_up, is_named
        self.entries: list[Any] = [*spec, *[None] * (len(shape) - len(spec))]
        self.named = list(self.entries)

    def split_over_data(self, axes: tuple[str, ...], *, only_whole: bool = True) -> int | None:
        """Split a dim over axes of data, and say which; None if none divides.

        It is one that is whole, unless any may be taken.
        """
        dims: Iterable[int] = range(len(self.shape))
        if only_whole:
            dims = _whole_dims(self.named, self.sizes)
        candidates = self._dividing(dims, axes)
        if not candidates:
            return None
        dim = _best_dim(candidates, self.shape, is_named=self.is_named)
        return self._split(dim, axes)

    def split_over_sequences(self, axis: str, other_than: int | None) -> int | None:
        """Split a dim over an axis of sequences, and say which; None if none divides.

        That is the longest that names leave whole, or else the longest: the partitioner scatters
        along a dim as it is, and of short parts compilers for TPUs make an all-reduce. A dim of
        rows that are looked up comes last: their gradients would be gathered from all positions.

        Args:
            axis: the axis.
            other_than: the dim that axes of data split, if one is.
        """
        whole = _whole_dims(self.named, self.sizes)
        for dims in (whole, range(len(self.shape))):
            free = [dim for dim in dims if dim != other_than]
            candidates = self._dividing(free, (axis,))
            if candidates:
                return self._split(max(candidates, key=self._preference), (axis,))
        return None

    def _preference(self, dim: int) -> tuple[bool, int]:
        """How much one would rather split a dim than others, as it is split so far."""
        part = self.shape[dim] // parts_over(self.sizes, as_tuple(self.entries[dim]))
        return dim not in self.looked_up, part

    def _dividing(self, dims: Iterable[int], axes: tuple[str, ...]) -> list[int]:
        """Those of some dims that axes divide, besides those that split them already."""
        candidates: list[int] = []
        for dim in dims:
            parts = parts_over(self.sizes, (*as_tuple(self.entries[dim]), *axes))
            if dim not in self.stacked and self.shape[dim] % parts == 0:
                candidates.append(dim)
        return candidates

    def _split(self, dim: int, axes: tuple[str, ...]) -> int:
        """Split a dim over axes, after whatever else splits it, and return the dim."""
        # What axes of size one split is whole; those of sequences come after one another.
        before = [axis for axis in as_tuple(self.entries[dim]) if self.sizes[axis] > 1]
        ones = axes_without(as_tuple(self.entries[dim]), before)
        self.entries[dim] = spec_entry((*before, *axes, *ones))
        return dim


def _leading_stacked_dims(names: tuple[Any, ...]) -> int:
    """How many leading dims stack layers or experts, by their names."""
    count = 0
    for name in names:
        if not counts_layers(name) and name != EXPERTS:
            break
        count += 1
    return count


def _stacked_dims(zero: Zero, ndim: int, names: tuple[Any, ...]) -> set[int]:
    """The dims that count layers by their names; none of a parameter without names."""
    if not names:
        return set()
    return {d for d in range(ndim) if names[d] in zero.stacked or counts_layers(names[d])}


def _whole_dims(entries: Sequence[Any], mesh_shape: Mapping[str, int]) -> list[int]:
    """The dims that a spec with these entries leaves whole, over axes of one device say."""
    dims = []
    for dim, entry in enumerate(entries):
        if parts_over(mesh_shape, as_tuple(entry)) == 1:
            dims.append(dim)
    return dims


def _best_dim(candidates: Sequence[int], shape: tuple[int, ...], is_named: bool) -> int:
    """The dim to split: the first if dims have names, else the longest.

    The last dim of the array is taken only if there is no other.
    """
    before_last = [d for d in candidates if d != len(shape) - 1]
    if not before_last:
        return candidates[0]
    if is_named:
        return before_last[0]
    return max(before_last, key=lambda d: shape[d])
