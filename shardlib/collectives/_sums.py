"""Exact sums over devices, in shapes and sizes that machines are good at.

The functions here add nothing to what `jax.lax` computes. They change the form in which arrays are
handed to it, because of what compilers for TPUs and GPUs make of other forms.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from shardlib.layouts._annotate import sizes_on_torus, slow_axes_in_scope
from shardlib.layouts._specs import axes_within
from shardlib.machine._torus import groups_along

BUCKET_BYTES = 32 * 2**20
"""How large one collective is about, where that can be chosen."""

_LANES = 128  # the last dim of an array lies in tiles of as many on a TPU
ROW_TILE = 1024  # an array of one dim lies in tiles of as many
_ROWS = 16  # and the dim before it in tiles of as many numbers of 16 bits, or half as many of 32


def sum_scatter(x: jax.Array, dim: int, axes: tuple[str, ...], wire: Any = None) -> jax.Array:
    """The sum over `axes`, of which each device keeps its part of `dim`, as `psum_scatter`.

    If the dtype `wire` is another than the array's, the array is sent in that, and added up in its
    own.

    The array is first given a shape that TPUs scatter: a row for each device, of whole tiles. Of a
    scatter along either of the last two dims, or of one into less than whole tiles, their compiler
    makes an all-reduce, which sends twice the bytes.
    """
    parts = lax.axis_size(axes)
    own = x.shape[dim] // parts
    # With its dim first, each tile of an array of several matrices, such as of experts, would be
    # laid out anew. Where parts are whole tiles of each matrix, these are moved as they are. For a
    # single matrix the order costs nothing: the product before can write the transpose directly.
    keeps_order = dim < x.ndim - 1 and own % _ROWS == 0
    if not keeps_order:
        x = jnp.moveaxis(x, dim, 0)
    split = dim if keeps_order else 0
    shape = (*x.shape[:split], own, *x.shape[split + 1 :])
    by_parts = jnp.moveaxis(x.reshape(*x.shape[:split], parts, *shape[split:]), split, 0)
    size = math.prod(shape)
    fills_tiles = size % _LANES == 0
    rows = by_parts.reshape((parts, size // _LANES, _LANES) if fills_tiles else (parts, size))
    # One after the other: each axis is a dim of a torus, or a network, of its own.
    for name in axes:
        if wire is None or wire == x.dtype:
            rows = _scatter_rows(rows, name)
        else:
            rows = _sum_on_arrival(rows, name, wire)
    return jnp.moveaxis(rows.reshape(shape), split, dim)


def _scatter_rows(rows: jax.Array, axis: str) -> jax.Array:
    """`psum_scatter` along the first dim, one dim of a TPU's torus after the other.

    Of a scatter over several dims at once the compiler mostly makes an all-reduce, twice the bytes.
    """
    sizes = sizes_on_torus(axis)
    if _scatters_at_once(sizes):
        return lax.psum_scatter(rows, axis, scatter_dimension=0, tiled=True)
    # The outermost digit first: it says which stretch of rows a device keeps a part of.
    for digit in range(len(sizes)):
        groups = groups_along(sizes, digit, digit + 1)
        rows = lax.psum_scatter(
            rows, axis, scatter_dimension=0, tiled=True, axis_index_groups=groups
        )
    return rows


def _sum_on_arrival(rows: jax.Array, axis: str, wire: Any) -> jax.Array:
    """`psum_scatter` along the first dim, of rows that are sent in the dtype `wire`.

    Each device sends every other one the rows that it keeps, and adds up what it gets. A scatter
    would send sums of sums, and round each of them.
    """
    parts = lax.axis_size(axis)
    # Nothing is sent, and so nothing rounded.
    if parts == 1:
        return rows
    sent = rows.astype(wire).reshape(parts, rows.shape[0] // parts, *rows.shape[1:])
    # Compilers would else widen the numbers before they send them, as they are widened afterwards.
    received = lax.optimization_barrier(lax.all_to_all(sent, axis, 0, 0, tiled=True))
    return received.astype(rows.dtype).sum(0)


def sum_whole(x: jax.Array, axes: tuple[str, ...], wire: Any = None) -> jax.Array:
    """The sum over `axes`, on every device, as `psum`.

    If the dtype `wire` is another than the array's, each device sends its contribution in that,
    adds up a part of the array in the array's own, and sends this part in `wire` too.
    """
    if wire is None or wire == x.dtype or not x.size:
        return sum_together([x], axes)[0]
    parts = lax.axis_size(axes)
    flat = x.reshape(-1)
    # Whole tiles of each part.
    padded = jnp.pad(flat, (0, -flat.size % (parts * _LANES)))
    part = sum_scatter(padded, 0, axes, wire).astype(wire)
    for name in reversed(axes):
        part = gather_along(part, 0, name)
    return lax.optimization_barrier(part)[: flat.size].astype(x.dtype).reshape(x.shape)


def sum_together(arrays: Sequence[jax.Array], axes: tuple[str, ...]) -> list[jax.Array]:
    """The sums of some arrays over `axes`, on every device, as `psum` of a list.

    Between slices of TPUs an array is sent in the tiles in which it lies. So that rows of 64
    numbers, say heads, do not go as tiles of which half is empty, they go as one long row.
    """
    if not axes_within(axes, slow_axes_in_scope()):
        return lax.psum(list(arrays), axes)
    rows = [x.reshape(-1) if x.ndim and x.shape[-1] % _LANES else x for x in arrays]
    # Else compilers may take a row for what it was made of, and send that.
    rows = lax.optimization_barrier(rows)
    sums = lax.optimization_barrier(lax.psum(rows, axes))
    return [total.reshape(x.shape) for total, x in zip(sums, arrays, strict=True)]


def _scatters_at_once(sizes: tuple[int, ...]) -> bool:
    """Whether compilers for TPUs scatter over all dims at once.

    They do over two dims of different lengths, and use the links of both.
    """
    return len(sizes) == 1 or (len(sizes) == 2 and sizes[0] != sizes[1])


def gather_along(x: jax.Array, dim: int, axis: str) -> jax.Array:
    """All parts of an array along `axis`, one after the other along `dim`, as `all_gather`.

    It goes over two dims of a TPU's torus at once, and over further ones after that: of a gather
    over three dims, the compiler makes an all-reduce of whole arrays padded with zeros.
    """
    sizes = sizes_on_torus(axis)
    if len(sizes) <= 2:
        return _gathered(x, dim, axis, None)
    # The innermost digits first: parts that follow each other on them are neighbours in the result.
    end = len(sizes)
    while end > 0:
        begin = max(end - 2, 0)
        groups = groups_along(sizes, begin, end)
        x = _gathered(x, dim, axis, groups)
        end = begin
    return x


def _gathered(
    x: jax.Array, dim: int, axis: str, groups: Sequence[Sequence[int]] | None
) -> jax.Array:
    """`all_gather` along `dim`, of rows in a form in which TPUs put them together quickly.

    Where a part ends within a tile, the next one is shifted in all its tiles. The compiler for TPUs
    writes out each shift of each part, for minutes if parts are large and many. Numbers in one long
    row have no such shifts; they are laid out in tiles when all of them are there.
    """
    is_shifted = dim == 0 and x.ndim > 1 and x.shape[0] % _ROWS > 0
    if not is_shifted or not x.size or x.size % ROW_TILE > 0:
        return lax.all_gather(x, axis, axis=dim, tiled=True, axis_index_groups=groups)
    rows = lax.all_gather(x.reshape(-1), axis, tiled=True, axis_index_groups=groups)
    return rows.reshape(-1, *x.shape[1:])


def in_pieces(
    collective: Callable[[jax.Array, int], jax.Array], x: jax.Array, dim: int, count: int
) -> jax.Array:
    """A collective along `dim`, not the first, in about `count` pieces of the first dim.

    The pieces go one after the other, in a loop that fills the result. Collectives along any but
    the first dim turn an array around that dim, and GPUs would copy all of a large one, twice; of a
    piece they copy no more than the piece.
    """
    rows = -(-x.shape[0] // min(count, x.shape[0]))
    count = -(-x.shape[0] // rows)

    def piece(first: jax.Array | int) -> jax.Array:
        """The collective of so many rows, from the `first` one."""
        part = lax.dynamic_slice_in_dim(x, first, rows)
        if rows == 1:
            # A single row goes without the first dim, so that it may have the collective's dim as
            # its first.
            return collective(part[0], dim - 1)[None]
        return collective(part, dim)

    def put(number: jax.Array, filled: jax.Array) -> jax.Array:
        """The result with one more piece in it."""
        # The last piece is as long as the others, and begins with rows of the one before.
        first = jnp.minimum(number * rows, x.shape[0] - rows)
        # Laid out in the order of its dims: else compilers lay all rows out as the collective
        # returns one, and turn all of them later.
        result = with_layout_constraint(piece(first), Layout(tuple(range(x.ndim))))
        return lax.dynamic_update_slice_in_dim(filled, result, first, 0)

    # The loop starts from any number of the array, since all of it is overwritten. If it started
    # from zeros, compilers would keep one array for all that start as zeros of this shape.
    any_number, shape = x[(0,) * x.ndim], jax.eval_shape(lambda: piece(0)).shape
    return lax.fori_loop(0, count, put, jnp.broadcast_to(any_number, (x.shape[0], *shape[1:])))
