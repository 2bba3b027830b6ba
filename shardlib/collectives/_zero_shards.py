"""ZeRO's collectives: parameters made whole again, and gradients summed and scattered."""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.collectives._sums import gather_along, in_pieces, sum_scatter, sum_whole
from shardlib.collectives._zero_split import Split
from shardlib.layouts._annotate import constrain
from shardlib.layouts._specs import keep_axes


def gather(x: jax.Array, spec: PartitionSpec, split: Split, limit: int = 0) -> jax.Array:
    """All parts of an array that is split as `split` says.

    It is called manual over the axes of data. A whole array of more than `limit` bytes is gathered
    in pieces of its first dim, unless that is the dim that is gathered.

    Args:
        x: the part that this device has.
        spec: the layout of the whole array over axes that are automatic.
        split: the dims that are split, and the axes that split them.
        limit: so many bytes go in one collective; 0 for any number.
    """
    # The last axis is the innermost one: its parts follow each other.
    gathers: list[tuple[int, tuple[str, ...]]] = [
        (further.dim, (further.axis,)) for further in reversed(split.further)
    ]
    if split.dim is not None:
        gathers.append((split.dim, tuple(reversed(split.axes))))

    def gathered(part: jax.Array) -> jax.Array:
        for dim, axes in gathers:
            part = _gathered_along(part, dim, axes, limit)
        return part

    return _on_shards(gathered, x, split.contributed, spec)


def _gathered_along(x: jax.Array, dim: int, axes: tuple[str, ...], limit: int) -> jax.Array:
    """All parts of an array along a dim, in one go or in pieces.

    The innermost of the axes comes first.
    """

    def collective(part: jax.Array, axis: int) -> jax.Array:
        for name in axes:
            part = gather_along(part, axis, name)
        return part

    # A gather along the first dim writes its result in place, and needs no pieces.
    whole = x.nbytes * lax.axis_size(axes)
    if limit and dim and whole > limit:
        return in_pieces(collective, x, dim, -(-whole // limit))
    return collective(x, dim)


def scatter(x: jax.Array, split: Split, wire: Any = None) -> jax.Array:
    """The sum over the axes of data, of which each device keeps its part, as `split` says.

    It is called manual over these axes. Over axes of sequences the partitioner adds up, and
    scatters where the sum is laid out so. `wire` is the dtype in which the array is sent over axes
    of data, if it is another than its own.
    """
    if split.dim is None:
        return constrain(x, keep_axes(split.contributed, _automatic_axes()))

    def scattered(part: jax.Array) -> jax.Array:
        assert split.dim is not None
        return sum_scatter(part, split.dim, split.axes, wire)

    return _on_shards(scattered, x, split.contributed, split.contributed)


def total(x: jax.Array, spec: PartitionSpec, axes: tuple[str, ...], wire: Any = None) -> jax.Array:
    """The sum over `axes`, on every device.

    It is called manual over these axes; `spec` is the layout over the others, and `wire` the dtype
    in which the array is sent, if it is another than its own.
    """
    return _on_shards(lambda part: sum_whole(part, axes, wire), x, spec, spec)


def _on_shards(
    collective: Any, x: jax.Array, before: PartitionSpec, after: PartitionSpec
) -> jax.Array:
    """Call a collective on each device's own shard over the axes that are still automatic.

    A collective over an operand that an automatic axis splits would first gather the operand along
    that axis, and move so many times the bytes.

    Args:
        collective: the function of a shard.
        x: the array.
        before: its layout over automatic axes.
        after: that of the result.
    """
    automatic = _automatic_axes()
    if not automatic:
        return collective(x)
    return jax.shard_map(
        collective,
        in_specs=keep_axes(before, automatic),
        out_specs=keep_axes(after, automatic),
        axis_names=set(automatic),
        check_vma=False,
    )(x)


def _automatic_axes() -> tuple[str, ...]:
    """The axes of the mesh in scope that are the partitioner's."""
    return jax.sharding.get_abstract_mesh().auto_axes
