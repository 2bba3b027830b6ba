"""Lookups by index in forms that XLA's partitioner can split: what takes the place of a lookup.

A lookup is a `gather` equation `rows = table[indices]`. There are three forms of it, by what the
operand is; `_lookups` says which equation gets which:

    in parts    each device looks up the rows that it has, others are zero, and all are added
    selected    one element of each row, by comparing its index with the number of each element
    laid out    as it was, of an operand that is whole along the dims that are looked up

Scatters and sorts only need the third.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, PartitionSpec

from shardlib.layouts._specs import parts_over, spec_axes
from shardlib.tracing._jaxpr import relocated, shapes_of
from shardlib.tracing._row_gradients import wide

FREE = PartitionSpec.UNCONSTRAINED
"""Stands in a spec for a dim that the partitioner may split as it likes."""


def takes_one_of_each_row(equation: Any) -> bool:
    """Whether a gather takes one element along one dim for each place along all other dims.

    A cross-entropy takes the logit of each label like that.
    """
    operand, indices = (atom.aval for atom in equation.invars)
    dims = equation.params["dimension_numbers"]
    if len(dims.start_index_map) != 1 or set(equation.params["slice_sizes"]) != {1}:
        return False
    # Random keys cannot be multiplied by zero and added.
    if jnp.issubdtype(operand.dtype, jax.dtypes.extended):
        return False
    # Every other dim is paired with one of the indices, in order.
    (looked_up,) = dims.start_index_map
    rows = tuple(dim for dim in range(operand.ndim) if dim != looked_up)
    is_paired = tuple(dims.operand_batching_dims) == rows
    in_order = tuple(dims.start_indices_batching_dims) == tuple(range(len(rows)))
    one_of_each = indices.size == operand.size // operand.shape[looked_up]
    return is_paired and in_order and one_of_each


def picks_whole_rows(equation: Any) -> bool:
    """Whether each index of a gather is a number along one dim of a table of numbers.

    An embedding is looked up like that: `table[tokens]`, with nothing cut from the other dims.
    """
    dims, table = equation.params["dimension_numbers"], equation.invars[0].aval
    return (
        len(dims.start_index_map) == 1
        and not dims.operand_batching_dims
        and tuple(dims.collapsed_slice_dims) == tuple(dims.start_index_map)
        and (jnp.issubdtype(table.dtype, jnp.inexact) or jnp.issubdtype(table.dtype, jnp.integer))
    )


@dataclass(frozen=True, eq=False)
class LookupInParts:
    """A lookup in a table that is split along the dim of the indices, as in Megatron's embedding.

    Each device looks up the rows that it has, and the results are added over the devices.
    """

    equation: Any  # the gather
    axes: tuple[str, ...]  # the axes that split the dim that the indices select from
    spec: PartitionSpec  # the layout of the table over the automatic axes
    batch_axes: frozenset[str]  # those over which the indices may be split, by example

    @property
    def dims(self) -> Any:
        """JAX's description of a gather: which dims are looked up, kept and dropped."""
        return self.equation.params["dimension_numbers"]

    @property
    def dim(self) -> int:
        """The dim of the table that the indices select from."""
        (dim,) = self.dims.start_index_map
        return dim

    def look_up(self, table: jax.Array, indices: jax.Array) -> jax.Array:
        """The rows, with the gather's own rule for indices that are out of range.

        These clip to the first or the last row, give the filling value, or are promised not to
        occur.
        """
        mode = self.equation.params["mode"]
        table = laid_out(table, self.spec)
        layout = _layout_of_parts(self.equation, self.axes, self.spec, self.batch_axes)
        size = table.shape[self.dim]
        if mode == lax.GatherScatterMode.CLIP:
            indices = jnp.clip(indices, 0, size - 1)
        rows = jax.shard_map(
            self.part,
            in_specs=(layout.table, layout.indices),
            out_specs=layout.rows,
            axis_names=set(layout.manual),
            check_vma=False,
        )(table, indices)
        if mode == lax.GatherScatterMode.FILL_OR_DROP:
            rows = self._filled(rows, (indices >= 0) & (indices < size))
        return rows

    def part(self, table: jax.Array, indices: jax.Array) -> jax.Array:
        """What one device does with its part of the table: rows of others count as zero.

        No two devices have the row of an index, so that the sum over all devices is that row.
        """
        count = table.shape[self.dim]
        shard_offset = lax.axis_index(self.axes) * count
        local = indices - shard_offset.astype(indices.dtype)
        sizes = tuple(map(min, self.equation.params["slice_sizes"], table.shape))

        def take(table: jax.Array, indices: jax.Array) -> jax.Array:
            return lax.gather(
                table, indices, self.dims, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
            )

        rows = wide(take, table)(table, jnp.clip(local, 0, count - 1))
        # The index vector has one number, whose dim is taken off.
        is_local = lax.squeeze((local >= 0) & (local < count), (local.ndim - 1,))
        is_local = lax.expand_dims(is_local, self.dims.offset_dims)
        rows = jnp.where(is_local, rows, jnp.zeros((), rows.dtype))
        # Summed in 32 bits: XLA's compiler for CPUs aborts on narrower sums where some axes are
        # left automatic.
        return lax.psum(rows.astype(_of_32_bits(rows.dtype)), self.axes).astype(rows.dtype)

    def _filled(self, rows: jax.Array, is_inside: jax.Array) -> jax.Array:
        """Rows with the filling value where the index is not inside the table."""
        shape, by_index, broadcast = self.equation.outvars[0].aval.shape, [], []
        for d, length in enumerate(shape):
            if d in self.dims.offset_dims:
                broadcast.append(1)
            else:
                by_index.append(length)
                broadcast.append(length)
        is_inside = is_inside.reshape(by_index).reshape(broadcast)
        filling = _filling(self.equation.params["fill_value"], rows.dtype)
        return jnp.where(is_inside, rows, filling)


class _Layout(NamedTuple):
    """The layouts in which each device looks up its own part."""

    manual: tuple[str, ...]  # the axes over which a device sees its own shards
    table: PartitionSpec
    indices: PartitionSpec
    rows: PartitionSpec


def _layout_of_parts(
    equation: Any, axes: tuple[str, ...], spec: PartitionSpec, batch_axes: frozenset[str]
) -> _Layout:
    """The layouts of a lookup in parts, manual over `axes` and over as few others as possible.

    XLA of JAX 0.12 aborts on a `shard_map` inside another that leaves an axis automatic, unless its
    axes come after those of the outer one in the mesh ("Manual axes must be sorted by mesh axis
    index"). On such a mesh the lookup is manual over all axes: the table keeps its layout, and the
    indices are split by example.
    """
    mesh = jax.sharding.get_abstract_mesh()
    table = equation.invars[0].aval
    dims = equation.params["dimension_numbers"]
    (dim,) = dims.start_index_map
    entries: list[Any] = [None] * table.ndim
    entries[dim] = axes
    # A region over these axes only may then be nested in the one around it.
    if _come_after_manual_axes(axes, mesh):
        return _Layout(axes, PartitionSpec(*entries), PartitionSpec(), PartitionSpec())

    for d, entry in enumerate(spec):
        if d != dim and equation.params["slice_sizes"][d] == table.shape[d]:
            entries[d] = entry
    by_example = _axes_of_indices(equation, PartitionSpec(*entries), mesh, batch_axes)
    rows = _layout_of_rows(equation, entries, by_example)
    return _Layout(tuple(mesh.auto_axes), PartitionSpec(*entries), PartitionSpec(by_example), rows)


def _come_after_manual_axes(axes: tuple[str, ...], mesh: AbstractMesh) -> bool:
    """Whether all of some axes come after the manual ones in the order of the mesh."""
    positions = {axis: position for position, axis in enumerate(mesh.axis_names)}
    last = max((positions[axis] for axis in mesh.manual_axes), default=-1)
    return all(positions[axis] > last for axis in axes)


def _axes_of_indices(
    equation: Any, table: PartitionSpec, mesh: AbstractMesh, batch_axes: frozenset[str]
) -> tuple[str, ...] | None:
    """The automatic axes that can split the indices by example; None if they do not divide them.

    An axis that splits the table cannot split the indices as well.
    """
    used = spec_axes(table)
    split = tuple(axis for axis in mesh.auto_axes if axis in batch_axes and axis not in used)
    indices = equation.invars[1].aval
    # A single index has no dim of examples: its last dim counts the dims that it selects from.
    if indices.ndim > 1 and indices.shape[0] % parts_over(mesh.shape, split) == 0:
        return split
    return None


def _layout_of_rows(
    equation: Any, table: list[Any], by_example: tuple[str, ...] | None
) -> PartitionSpec:
    """The layout of what is looked up: rows like those of the table, split by example."""
    dims = equation.params["dimension_numbers"]
    rows: list[Any] = [None] * equation.outvars[0].aval.ndim
    kept = [d for d in range(len(table)) if d not in dims.collapsed_slice_dims]
    for position, d in zip(dims.offset_dims, kept, strict=True):
        rows[position] = table[d]
    # The first dim of the indices counts the examples, and is the first that is not the table's.
    for position in range(len(rows)):
        if position not in dims.offset_dims:
            rows[position] = by_example
            break
    return PartitionSpec(*rows)


def _of_32_bits(dtype: Any) -> Any:
    """A dtype of 32 bits or more that holds all numbers of another."""
    if dtype.itemsize >= 4:
        return dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.float32
    return jnp.int32


def gathered(equation: Any, operand: jax.Array, indices: jax.Array) -> jax.Array:
    """The same gather, of another operand."""
    return bind(equation, [operand, indices])[0]


def selected(equation: Any, operand: jax.Array, indices: jax.Array) -> jax.Array:
    """What the gather takes of each row, by comparing its index with the number of each element.

    That needs no lookup, so the row may stay split: the sum over it has one term that is not zero.
    """
    (dim,) = equation.params["dimension_numbers"].start_index_map
    size, mode = operand.shape[dim], equation.params["mode"]
    # One index for each row, along the dim that is looked up.
    index = indices.reshape([*operand.shape[:dim], 1, *operand.shape[dim + 1 :]])
    if mode == lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, size - 1)
    numbers = lax.broadcasted_iota(index.dtype, operand.shape, dim)
    chosen = jnp.where(numbers == index, operand, jnp.zeros((), operand.dtype))
    if operand.dtype == jnp.bool_:
        elements = jnp.any(chosen, dim)
    else:
        elements = jnp.sum(chosen, dim, dtype=operand.dtype)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        is_inside = jnp.squeeze((index >= 0) & (index < size), dim)
        filling = _filling(equation.params["fill_value"], operand.dtype)
        elements = jnp.where(is_inside, elements, filling)
    return elements.reshape(equation.outvars[0].aval.shape)


def _filling(value: Any, dtype: Any) -> Any:
    """What a gather returns for an index that is out of range.

    Without a value that is JAX's own choice: nan, true, the least signed or the largest unsigned
    integer.
    """
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    limits = jnp.iinfo(dtype)
    if limits.min < 0:
        return jnp.asarray(limits.min, dtype)
    return jnp.asarray(limits.max, dtype)


def scattered(equation: Any, operands: Sequence[jax.Array]) -> jax.Array:
    """The same scatter, into an array that is split along its rows at most.

    The result is laid out alike, since the gradient of a scatter looks up its own gradient.
    """
    rows = set(equation.params["dimension_numbers"].operand_batching_dims)
    spec = spec_by_dim(equation.invars[0], lambda dim: FREE if dim in rows else None)
    (result,) = bind(equation, [laid_out(operands[0], spec), *operands[1:]])
    return laid_out(result, spec)


def along_whole_dim(equation: Any, operands: Sequence[jax.Array], dim: int) -> Any:
    """The same sort or `top_k`, of operands that are whole along its dim.

    XLA's partitioner is free to split them along all other dims.
    """
    dim = range(operands[0].ndim)[dim]  # which may count from the end
    spec = spec_by_dim(equation.invars[0], lambda d: None if d == dim else FREE)
    return bind(equation, [laid_out(x, spec) for x in operands])


def replaced(equation: Any, function: Callable[..., Any]) -> list[Any]:
    """The equations of a function, in place of one equation and with its line to blame.

    The function takes what the equation reads and returns what it writes, as arrays.
    """
    traced = jax.make_jaxpr(function)(*shapes_of(equation.invars))
    jaxpr = relocated(traced.jaxpr, equation.source_info.traceback, deep=True)
    assert not traced.consts
    names: dict[Any, Any] = dict(zip(jaxpr.invars, equation.invars, strict=True))
    names.update(zip(jaxpr.outvars, equation.outvars, strict=True))

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        renamed_atoms = []
        for atom in atoms:
            # Literals stay, and so do variables between equations of the function itself.
            if not isinstance(atom, Literal):
                atom = names.get(atom, atom)
            renamed_atoms.append(atom)
        return renamed_atoms

    equations = []
    for new in jaxpr.eqns:
        equations.append(new.replace(invars=renamed(new.invars), outvars=renamed(new.outvars)))
    return equations


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Do what an equation does, with other operands; its results, as a list."""
    results = equation.primitive.bind(*operands, **equation.params)
    if equation.primitive.multiple_results:
        return list(results)
    return [results]


def laid_out(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """An array with a layout over the automatic axes; random keys stay as they are."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return lax.with_sharding_constraint(x, spec)


def spec_by_dim(atom: Any, entry: Callable[[int], Any]) -> PartitionSpec:
    """A spec for an atom, from a function of the number of a dim."""
    return PartitionSpec(*map(entry, range(len(atom.aval.shape))))
