"""ZeRO: which arrays of a run are split over the axes of data, and how they are made whole again.

At rest everything is split, from stage 1 on: parameters, and optimizer state as its parameters are.
The stage says what is whole during a step:

    stage 1    parameters and gradients
    stage 2    parameters
    stage 3    one layer's parameters
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.collectives._sums import BUCKET_BYTES, gather_along, in_pieces, sum_scatter, sum_whole
from shardlib.layouts._rules import (
    as_tuple,
    axes_without,
    counts_layers,
    keep_axes,
    parts_over,
    product_text,
    spec_axes,
    spec_entry,
)

STAGES: dict[str, int] = {
    "NO_SHARD": 0,
    "SHARD_GRAD_OP": 2,
    "FULL_SHARD": 3,
    "HYBRID_SHARD": 3,
    "_HYBRID_SHARD_ZERO2": 2,
}
"""The stages by the names that FSDP has for them. The hybrid ones split within the fast network,
and repeat across the slow one.
"""


@dataclass(frozen=True)
class Zero:
    r"""How a run is split over the axes of data.

    - `stage`: 1 splits parameters and optimizer state at rest; in a step, parameters are gathered
      once and the summed gradient is scattered. 2 also never holds a whole gradient: each layer's
      is scattered as soon as it is there. 3 also gathers each layer's parameters only while it
      computes, forward and again backward.
    - `axes`: over which of the data axes; by default all of them. Over the others state is
      repeated.
    - `small`: parameters of at most so many elements, per layer where layers are stacked, stay
      whole.
    - `stacked`: names of dims along which layers are stacked, besides those that end in `layers`.
      They are not split.
    - `layers`: for layers that are not scanned, a pattern of paths such as `r"layers/\d+"`:
      parameters for which it finds the same text are gathered together.
    - `bucket_bytes`: of larger arrays, stages 1 and 2 gather one layer after the other.
    - `strict`: refuse an optimizer with state, other than scalars, that can be related to no
      parameter.

    >>> Zero(3, axes=("data",)).stage
    3
    """

    stage: int
    axes: tuple[str, ...] | None = None
    small: int = 2**16
    stacked: tuple[str, ...] = ("layers",)
    layers: str | None = None
    bucket_bytes: int = BUCKET_BYTES
    strict: bool = False

    def __post_init__(self) -> None:
        if type(self.stage) is not int or not 0 <= self.stage <= 3:
            raise ValueError(
                f"`Zero(stage={check.shown(self.stage)})`: the stages are 0 (nothing is split), 1 "
                "(optimizer state), 2 (gradients too) and 3 (parameters too)."
            )
        check.texts("Zero", "axes", self.axes, 'a tuple of names, `axes=("data",)`', optional=True)
        check.texts("Zero", "stacked", self.stacked, 'a tuple of names, `stacked=("layers",)`')
        check.assign(
            self,
            small=check.whole("Zero", "small", self.small, "a number of elements", least=0),
            bucket_bytes=check.whole(
                "Zero", "bucket_bytes", self.bucket_bytes, "a number of bytes", least=1
            ),
            strict=check.boolean("Zero", "strict", self.strict),
        )
        self._check_layers()

    def _check_layers(self) -> None:
        """Refuse a pattern that cannot tell the layers of a model apart."""
        check.pattern("Zero", "layers", self.layers, optional=True)
        # What has no special character matches itself only.
        if self.layers is not None and re.escape(self.layers) == self.layers:
            raise ValueError(
                f"`Zero(layers={check.shown(self.layers)})` is plain text, and would find the same "
                "text in the path of every layer, so that all layers were gathered together. Write "
                r"a pattern that tells layers apart, `layers/\d+`."
            )

    def group(self, path: str) -> str | None:
        """The layer that a parameter belongs to by its path: the text that `layers` finds there.

        None where it finds none, or where there is no pattern.
        """
        if not self.layers:
            return None
        match = re.search(self.layers, path)
        if match is None:
            return None
        return match[0]


class Split(NamedTuple):
    """How a parameter is split at rest, and why no further."""

    spec: PartitionSpec  # its layout
    dim: int | None = None  # the dim that is split over `axes`
    axes: tuple[str, ...] = ()
    reason: str = ""  # why it is not split over the axes of data, if it is not
    layer: int = 0  # how many elements it has, of one layer where layers are stacked


def split_further(
    zero: Zero,
    axes: Iterable[str],
    mesh_shape: Mapping[str, int],
    shape: tuple[int, ...],
    spec: PartitionSpec,
    names: Any = None,
) -> Split:
    """Split a parameter over the axes of data too, along one of its dims.

    That is a dim that divides, is whole so far, and stacks no layers: the first such dim, whose
    parts are contiguous in memory; of a parameter without names the longest, since its first may be
    one of layers. The last dim comes last: a TPU keeps it in tiles, and of a scatter along it, into
    parts that fill few tiles, it makes an all-reduce of twice the bytes.

    What is small stays whole, and so does what has no dim that divides.

    Args:
        zero: what is small, and which names stack layers.
        axes: the axes of data over which to split.
        mesh_shape: the sizes of all axes.
        shape: the shape of the parameter.
        spec: its layout so far.
        names: the names of its dims, a tuple; anything else counts as no names.

    >>> spec = PartitionSpec(None, None, "model")
    >>> split_further(Zero(3), ["data"], {"data": 8, "model": 2}, (4, 1024, 4096), spec, ("layers",
    ...     "embed", "mlp")).spec
    P(None, 'data', 'model')
    """
    # A spec says how a parameter is laid out, and not what its dims are.
    dim_names: tuple[Any, ...] = ()
    if isinstance(names, tuple) and not isinstance(names, PartitionSpec):
        dim_names = names
    stacked = _stacked_dims(zero, len(shape), dim_names)
    elements = math.prod(size for d, size in enumerate(shape) if d not in stacked)
    # Axes of one device split nothing, and those that split the parameter already cannot again.
    used = spec_axes(spec)
    free = tuple(axis for axis in axes if axis not in used and mesh_shape[axis] > 1)
    if not free:
        return Split(spec, layer=elements)
    if elements <= zero.small:
        return Split(spec, reason=f"small: {elements:,} elements", layer=elements)

    entries = [*spec, *[None] * (len(shape) - len(spec))]
    parts = parts_over(mesh_shape, free)
    candidates: list[int] = []
    for d in _whole_dims(entries, mesh_shape):
        if d not in stacked and shape[d] % parts == 0:
            candidates.append(d)
    if not candidates:
        over = product_text(mesh_shape, free)
        return Split(spec, reason=f"no dim that is whole divides by {over}", layer=elements)
    dim = _best_dim(candidates, shape, is_named=bool(dim_names))
    # Axes of size one may be there already.
    entries[dim] = spec_entry((*free, *as_tuple(entries[dim])))
    return Split(PartitionSpec(*entries), dim, free, layer=elements)


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


def gather(
    x: jax.Array, spec: PartitionSpec, dim: int, axes: tuple[str, ...], limit: int = 0
) -> jax.Array:
    """All parts of an array along `axes`, one after the other along `dim`.

    It is called manual over these axes; `spec` is the layout over the others. A whole array of more
    than `limit` bytes is gathered in pieces of its first dim, unless that is `dim` itself.

    Args:
        x: the part that this device has.
        spec: the layout of the array over axes that are automatic.
        dim: the dim that is split.
        axes: the axes that split it, the outermost first.
        limit: so many bytes go in one collective; 0 for any number.
    """

    def collective(part: jax.Array, axis: int) -> jax.Array:
        # The last axis is the innermost one: its parts follow each other.
        for name in reversed(axes):
            part = gather_along(part, axis, name)
        return part

    def gathered(part: jax.Array) -> jax.Array:
        # A gather along the first dim writes its result in place, and needs no pieces.
        whole = part.nbytes * lax.axis_size(axes)
        if limit and dim and whole > limit:
            return in_pieces(collective, part, dim, -(-whole // limit))
        return collective(part, axis=dim)

    return _on_shards(gathered, x, spec)


def scatter(
    x: jax.Array, spec: PartitionSpec, dim: int, axes: tuple[str, ...], wire: Any = None
) -> jax.Array:
    """The sum over `axes`, of which each device along them keeps its part of `dim`.

    It is called manual over these axes; `spec` is the layout over the others, and `wire` the dtype
    in which the array is sent, if it is another than its own.
    """
    return _on_shards(lambda part: sum_scatter(part, dim, axes, wire), x, spec)


def total(x: jax.Array, spec: PartitionSpec, axes: tuple[str, ...], wire: Any = None) -> jax.Array:
    """The sum over `axes`, on every device.

    It is called manual over these axes; `spec` is the layout over the others, and `wire` the dtype
    in which the array is sent, if it is another than its own.
    """
    return _on_shards(lambda part: sum_whole(part, axes, wire), x, spec)


def _on_shards(collective: Any, x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """Call a collective on each device's own shard over the axes that are still automatic.

    A collective over an operand that an automatic axis splits would first gather the operand along
    that axis, and move so many times the bytes.
    """
    automatic = jax.sharding.get_abstract_mesh().auto_axes
    if not automatic:
        return collective(x)
    laid_out = keep_axes(spec, automatic)
    return jax.shard_map(
        collective,
        in_specs=laid_out,
        out_specs=laid_out,
        axis_names=set(automatic),
        check_vma=False,
    )(x)


def resolve_zero(value: Any, crossing: tuple[str, ...], data_axes: tuple[str, ...]) -> Zero:
    """The `Zero` that `Strategy(zero=...)` stands for, checked against the axes there are.

    `value` is a stage, one of FSDP's names, or a `Zero`. `crossing` are the axes that cross the
    slow network, and `data_axes` those over which state can be split.
    """
    if isinstance(value, str):
        zero = _zero_of_name(value, crossing, data_axes)
    elif isinstance(value, Zero):
        zero = value
    elif type(value) is int and value in range(4):
        zero = Zero(value)
    else:
        raise check.refusal(
            "Strategy", "zero", value, "a stage, 0 to 3, one of FSDP's names, or a `sl.Zero`"
        )
    if zero.stage and not data_axes:
        raise ValueError(
            f"`Strategy(zero={value!r})` splits state over the axes of data, and no axis splits "
            "the batch and nothing else: the partitioner has them all. Give `batch` an axis of its "
            "own in the rules."
        )
    for axis in zero.axes or ():
        if axis not in data_axes:
            raise ValueError(
                f"`Zero(axes={zero.axes})`: `{axis}` is not one of the data axes {data_axes}."
            )
    return zero


def _zero_of_name(name: str, crossing: tuple[str, ...], data_axes: tuple[str, ...]) -> Zero:
    """The `Zero` that FSDP calls by a name.

    A hybrid one needs both kinds of axes: some to split over, which stay within the fast network,
    and some to repeat over, which cross the slow one.
    """
    if name not in STAGES:
        raise ValueError(
            f"`Strategy(zero={check.shown(name)})`: FSDP's names are {', '.join(STAGES)}; or "
            "give a stage, 0 to 3."
        )
    if "HYBRID" not in name:
        return Zero(STAGES[name])
    # A hybrid splits within the fast network, and has a copy on each side of the slow one.
    within = axes_without(data_axes, crossing)
    if within in ((), data_axes):
        problem = "none stays within"
        if within:
            problem = "none crosses"
        raise ValueError(
            f"`Strategy(zero={name!r})` splits within the fast network and repeats across the "
            f"slow one, and of the data axes {data_axes} {problem}. Say which cross, "
            f'`dcn="pod"`, or over which to split: `zero=sl.Zero({STAGES[name]}, axes=(...))`.'
        )
    return Zero(STAGES[name], axes=within)
