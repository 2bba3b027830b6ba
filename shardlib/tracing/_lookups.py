"""Lookups by index that XLA's partitioner can split on a mesh with manual axes and several
automatic ones.

XLA partitions a gather whose operand is split along the dims that the indices select from, or along
its other dims. Inside a `shard_map` that leaves several axes automatic it cannot do both at once:
it aborts the process (`partition_group_list.num_replica_groups()` in `spmd_partitioner_util.cc`).
An embedding table whose `vocab` is split over `model` and whose `embed` is split over `fsdp` is
such an operand, and so are logits that are split by example and by vocabulary.

It also aborts where the operand and the indices are split over the same axis. So in a step with
such a mesh, the loss is traced and each lookup in it is given an operand that is split one way
only:

- a parameter is gathered over the axes of the batch first, which fully sharded data parallelism
  does with a weight anyway. Along the dim that is looked up it stays split over the others: each
  device looks up what it has, and the results are added, as in Megatron's embedding;
- one element of each row, as in a cross-entropy that takes the logit of the label, is selected by
  comparison instead, which keeps the row split;
- what else depends on the examples is made whole along the dims that are looked up, and any other
  table altogether.

Scatters, sorts and `top_k` are treated alike, because they or their derivatives are lookups too.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh, PartitionSpec

from shardlib.layouts._rules import as_tuple, spec_axes
from shardlib.tracing._jaxpr import evaluate, relocated, scan_parts
from shardlib.tracing._row_gradients import wide

_FREE = PartitionSpec.UNCONSTRAINED

# What gives an array of the same layout as its only operand.
_SAME_LAYOUT = {
    "convert_element_type",
    "copy",
    "stop_gradient",
    "optimization_barrier",
    "reduce_precision",
}


class _Value(NamedTuple):
    """What is known of a value in a traced function."""

    varies: bool  # with the examples
    spec: PartitionSpec | None = None  # its layout over the automatic axes, of a parameter


_CONSTANT = _Value(False)


def needs_rewriting(mesh: AbstractMesh) -> bool:
    """Whether lookups that are traced under this mesh may abort XLA's partitioner."""
    manual = any(mesh.shape[axis] > 1 for axis in mesh.manual_axes)
    automatic = [axis for axis in mesh.auto_axes if mesh.shape[axis] > 1]
    return manual and len(automatic) > 1


def partitionable(
    function: Callable[..., Any], specs: Any, batch_axes: Iterable[str]
) -> Callable[..., Any]:
    """`function(params, *args)` with lookups that XLA's partitioner can split; the same values and
    derivatives.

    Args:
        function: what is traced; all but its first argument may depend on the examples.
        specs: a `PartitionSpec` for each parameter, by its names.
        batch_axes: the axes that split the batch; tables are gathered over these first.
    """
    batch_axes = frozenset(batch_axes)

    def rewritten(params: Any, *args: Any) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if not needs_rewriting(mesh):
            return function(params, *args)
        traced, out = jax.make_jaxpr(function, return_shape=True)(params, *args)
        automatic = frozenset(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
        known = [
            _Value(False, _kept(spec, automatic))
            for spec in jax.tree.leaves(specs, is_leaf=_is_spec)
        ]
        known += [_Value(True)] * len(jax.tree.leaves(args))
        jaxpr, _ = _Rewriting(batch_axes).jaxpr(traced.jaxpr, known)
        return evaluate(ClosedJaxpr(jaxpr, traced.consts), out, (params, args))

    return rewritten


class _Rewriting:
    """One pass over a traced function."""

    def __init__(self, batch_axes: frozenset[str]) -> None:
        self.batch_axes = batch_axes

    def jaxpr(self, jaxpr: Jaxpr, inputs: Sequence[_Value]) -> tuple[Jaxpr, list[_Value]]:
        """The same with other lookups, and what is known of its outputs."""
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Value:
            return _CONSTANT if isinstance(atom, Literal) else known.get(atom, _CONSTANT)

        equations: list[Any] = []
        for equation in jaxpr.eqns:
            given = [read(atom) for atom in equation.invars]
            new, outputs = self.equation(equation, given)
            equations += new
            known.update(zip(equation.outvars, outputs, strict=True))
        return jaxpr.replace(eqns=equations), [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, given: list[_Value]) -> tuple[list[Any], list[_Value]]:
        """What takes the place of an equation, and what is known of its outputs."""
        name = equation.primitive.name
        outputs = [_Value(any(value.varies for value in given))] * len(equation.outvars)
        if name in _SAME_LAYOUT and len(given) == 1:
            return [equation], given
        if name == "gather":
            return self.gather(equation, given), outputs
        if name.startswith("scatter"):
            return _replaced(equation, lambda *operands: _scattered(equation, operands)), outputs
        if name in ("sort", "top_k"):
            dim = equation.params.get("dimension", -1)
            return _replaced(
                equation, lambda *operands: _along_whole_dim(equation, operands, dim)
            ), outputs
        if name == "shard_map":  # in which there are no lookups for the partitioner to split
            return [equation], outputs
        return self.call(equation, given, outputs)

    def gather(self, equation: Any, given: list[_Value]) -> list[Any]:
        table, indices = given
        if table.spec is not None:
            spec = _without(table.spec, self.batch_axes)
            dims = equation.params["dimension_numbers"].start_index_map
            axes = tuple(axis for dim in dims for axis in as_tuple(spec[dim]))
            if axes and _picks_whole_rows(equation):
                batch_axes = self.batch_axes if indices.varies else frozenset()
                return _replaced(
                    equation,
                    lambda x, i: _looked_up_in_parts(equation, x, i, axes, spec, batch_axes),
                )
            spec = PartitionSpec(
                *(None if dim in dims else entry for dim, entry in enumerate(spec))
            )
            return _replaced(equation, lambda x, i: _gathered(equation, _laid_out(x, spec), i))
        if table.varies and _takes_one_of_each_row(equation):
            return _replaced(equation, lambda x, i: _selected(equation, x, i))
        spec = self.layout(equation, table, indices)
        return _replaced(equation, lambda x, i: _gathered(equation, _laid_out(x, spec), i))

    def layout(self, equation: Any, table: _Value, indices: _Value) -> PartitionSpec:
        """In which layout to look something up that is no parameter."""
        dims = equation.params["dimension_numbers"]

        def entry(dim: int) -> Any:
            if dim in dims.operand_batching_dims:
                return _FREE
            # Where the indices do not depend on the examples, they are split over no axis that
            # splits the operand.
            free = table.varies and not indices.varies and dim not in dims.start_index_map
            return _FREE if free else None

        return _spec(equation.invars[0], entry)

    def call(
        self, equation: Any, given: list[_Value], outputs: list[_Value]
    ) -> tuple[list[Any], list[_Value]]:
        """An equation that holds functions, which are rewritten too."""
        name, parameters = equation.primitive.name, equation.params
        if name == "scan":
            # Of what is scanned a layer, whose layout has a dim less.
            inner = [_Value(value.varies) for value in given]
            constants, _ = scan_parts(equation)
            inner[:constants] = given[:constants]
            return self.loop(equation, "jaxpr", inner), outputs
        changed: dict[str, Any] = {}
        for key, value in parameters.items():
            if _is_jaxpr(value):
                changed[key], outputs = self.held(value, given, outputs)
            elif isinstance(value, tuple) and value and all(map(_is_jaxpr, value)):
                # The branches of a `cond`.
                changed[key] = tuple(self.held(one, given[1:], outputs)[0] for one in value)
        if not changed:
            return [equation], outputs
        return [equation.replace(params={**parameters, **changed})], outputs

    def loop(self, equation: Any, key: str, inner: list[_Value]) -> list[Any]:
        # What is carried may vary with the examples from the second round on.
        varies = any(value.varies for value in inner)
        inner = [
            value if value.spec is not None else _Value(varies or value.varies) for value in inner
        ]
        body, _ = self.held(equation.params[key], inner, [])
        return [equation.replace(params={**equation.params, key: body})]

    def held(
        self, function: Any, given: list[_Value], outputs: list[_Value]
    ) -> tuple[Any, list[_Value]]:
        """A function that an equation holds, rewritten."""
        inner = function.jaxpr if isinstance(function, ClosedJaxpr) else function
        known = len(inner.invars) == len(given)
        if not known:  # such as the two functions of a `while`
            given = [_Value(any(value.varies for value in given))] * len(inner.invars)
        rewritten, found = self.jaxpr(inner, given)
        outputs = found if known and len(found) == len(outputs) else outputs
        if isinstance(function, ClosedJaxpr):
            return ClosedJaxpr(rewritten, function.consts), outputs
        return rewritten, outputs


def _takes_one_of_each_row(equation: Any) -> bool:
    """Whether a gather takes one element along one dim for each place along all others, as the
    logit of a label.
    """
    operand, indices = (atom.aval for atom in equation.invars)
    dims = equation.params["dimension_numbers"]
    rows = tuple(dim for dim in range(operand.ndim) if dim not in dims.start_index_map)
    return (
        len(dims.start_index_map) == 1
        and tuple(dims.operand_batching_dims) == rows
        and tuple(dims.start_indices_batching_dims) == tuple(range(len(rows)))
        and set(equation.params["slice_sizes"]) == {1}
        and indices.size == operand.size // operand.shape[dims.start_index_map[0]]
        and not jnp.issubdtype(operand.dtype, jax.dtypes.extended)
    )


def _picks_whole_rows(equation: Any) -> bool:
    """Whether each index of a gather says which number along one dim to take, of a table of
    numbers.
    """
    dims, table = equation.params["dimension_numbers"], equation.invars[0].aval
    return (
        len(dims.start_index_map) == 1
        and not dims.operand_batching_dims
        and tuple(dims.collapsed_slice_dims) == tuple(dims.start_index_map)
        and (jnp.issubdtype(table.dtype, jnp.inexact) or jnp.issubdtype(table.dtype, jnp.integer))
    )


def _looked_up_in_parts(
    equation: Any,
    table: jax.Array,
    indices: jax.Array,
    axes: tuple[str, ...],
    spec: PartitionSpec,
    batch_axes: frozenset[str],
) -> jax.Array:
    """A lookup in a table that is split along the dim of the indices: each device adds what it has
    of the rows.

    Args:
        equation: the gather.
        table: the table, which is laid out as `spec` says.
        indices: which rows to take.
        axes: the axes that split the dim that the indices select from.
        spec: the layout of the table over the automatic axes.
        batch_axes: the axes over which the indices may be split, by example.
    """
    dims, mode = equation.params["dimension_numbers"], equation.params["mode"]
    (dim,) = dims.start_index_map
    table = _laid_out(table, spec)
    layout = _layout_of_parts(equation, axes, spec, batch_axes)
    size, shape = table.shape[dim], equation.outvars[0].aval.shape
    in_place = [length for d, length in enumerate(shape) if d not in dims.offset_dims]
    broadcast = [1 if d in dims.offset_dims else length for d, length in enumerate(shape)]
    slices = equation.params["slice_sizes"]
    if mode == lax.GatherScatterMode.CLIP:
        indices = jnp.clip(indices, 0, size - 1)

    def part(table: jax.Array, indices: jax.Array) -> jax.Array:
        rows = table.shape[dim]
        local = indices - (lax.axis_index(axes) * rows).astype(indices.dtype)
        sizes = tuple(map(min, slices, table.shape))

        def take(table: jax.Array, indices: jax.Array) -> jax.Array:
            return lax.gather(
                table, indices, dims, sizes, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS
            )

        found = wide(take, table)(table, jnp.clip(local, 0, rows - 1))
        here = lax.squeeze((local >= 0) & (local < rows), (local.ndim - 1,))
        here = lax.expand_dims(here, dims.offset_dims)
        found = jnp.where(here, found, jnp.zeros((), found.dtype))
        # Summed in 32 bits: XLA's compiler for CPUs aborts on narrower sums where some axes are
        # left automatic.
        return lax.psum(found.astype(_of_32_bits(found.dtype)), axes).astype(found.dtype)

    found = jax.shard_map(
        part,
        in_specs=(layout.table, layout.indices),
        out_specs=layout.rows,
        axis_names=set(layout.manual),
        check_vma=False,
    )(table, indices)
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        inside = ((indices >= 0) & (indices < size)).reshape(in_place).reshape(broadcast)
        found = jnp.where(inside, found, _filling(equation.params["fill_value"], found.dtype))
    return found


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
    table, indices = (atom.aval for atom in equation.invars)
    dims = equation.params["dimension_numbers"]
    (dim,) = dims.start_index_map
    entries: list[Any] = [None] * table.ndim
    entries[dim] = axes
    places = {axis: place for place, axis in enumerate(mesh.axis_names)}
    last = max((places[axis] for axis in mesh.manual_axes), default=-1)
    if all(places[axis] > last for axis in axes):
        return _Layout(axes, PartitionSpec(*entries), PartitionSpec(), PartitionSpec())
    for d, entry in enumerate(spec):
        if d != dim and equation.params["slice_sizes"][d] == table.shape[d]:
            entries[d] = entry
    used = spec_axes(PartitionSpec(*entries))
    split = tuple(axis for axis in mesh.auto_axes if axis in batch_axes and axis not in used)
    parts = math.prod(mesh.shape[axis] for axis in split)
    by_example = split if indices.ndim > 1 and indices.shape[0] % parts == 0 else None
    rows: list[Any] = [None] * equation.outvars[0].aval.ndim
    kept = [d for d in range(table.ndim) if d not in dims.collapsed_slice_dims]
    for place, d in zip(dims.offset_dims, kept, strict=True):
        rows[place] = entries[d]
    of_indices = [place for place in range(len(rows)) if place not in dims.offset_dims]
    if of_indices:
        rows[of_indices[0]] = by_example
    return _Layout(
        tuple(mesh.auto_axes),
        PartitionSpec(*entries),
        PartitionSpec(by_example),
        PartitionSpec(*rows),
    )


def _of_32_bits(dtype: Any) -> Any:
    """A dtype of 32 bits or more that holds all numbers of another."""
    if dtype.itemsize >= 4:
        return dtype
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32


def _gathered(equation: Any, operand: jax.Array, indices: jax.Array) -> jax.Array:
    return _bind(equation, [operand, indices])[0]


def _selected(equation: Any, operand: jax.Array, indices: jax.Array) -> jax.Array:
    """What the gather takes, by comparing the index with the number of each element, which needs no
    lookup.
    """
    (dim,) = equation.params["dimension_numbers"].start_index_map
    size, mode = operand.shape[dim], equation.params["mode"]
    index = indices.reshape([1 if d == dim else length for d, length in enumerate(operand.shape)])
    if mode == lax.GatherScatterMode.CLIP:
        index = jnp.clip(index, 0, size - 1)
    numbers = lax.broadcasted_iota(index.dtype, operand.shape, dim)
    chosen = jnp.where(numbers == index, operand, jnp.zeros((), operand.dtype))
    found = (
        jnp.any(chosen, dim)
        if operand.dtype == jnp.bool_
        else jnp.sum(chosen, dim, dtype=operand.dtype)
    )
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        inside = jnp.squeeze((index >= 0) & (index < size), dim)
        found = jnp.where(inside, found, _filling(equation.params["fill_value"], operand.dtype))
    return found.reshape(equation.outvars[0].aval.shape)


def _filling(value: Any, dtype: Any) -> Any:
    """What a gather gives for an index that is out of range."""
    if value is not None:
        return jnp.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.asarray(jnp.nan, dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(True)
    limits = jnp.iinfo(dtype)
    return jnp.asarray(limits.min if limits.min < 0 else limits.max, dtype)


def _scattered(equation: Any, operands: Sequence[jax.Array]) -> jax.Array:
    """The scatter into an array that is split along its rows at most; so is its gradient, which is
    looked up.
    """
    rows = set(equation.params["dimension_numbers"].operand_batching_dims)
    spec = _spec(equation.invars[0], lambda dim: _FREE if dim in rows else None)
    (result,) = _bind(equation, [_laid_out(operands[0], spec), *operands[1:]])
    return _laid_out(result, spec)


def _along_whole_dim(equation: Any, operands: Sequence[jax.Array], dim: int) -> Any:
    dim = range(operands[0].ndim)[dim]
    spec = _spec(equation.invars[0], lambda d: None if d == dim else _FREE)
    return _bind(equation, [_laid_out(x, spec) for x in operands])


def _replaced(equation: Any, function: Callable[..., Any]) -> list[Any]:
    """The equations of a function, in place of one equation and with its line to blame."""
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
    traced = jax.make_jaxpr(function)(*shapes)
    jaxpr = relocated(traced.jaxpr, equation.source_info.traceback, deep=True)
    assert not traced.consts
    names: dict[Any, Any] = dict(zip(jaxpr.invars, equation.invars, strict=True))
    names.update(zip(jaxpr.outvars, equation.outvars, strict=True))

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in atoms]

    return [
        one.replace(invars=renamed(one.invars), outvars=renamed(one.outvars)) for one in jaxpr.eqns
    ]


def _bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """What an equation makes of other operands."""
    found = equation.primitive.bind(*operands, **equation.params)
    return list(found) if equation.primitive.multiple_results else [found]


def _laid_out(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    return lax.with_sharding_constraint(x, spec)


def _spec(atom: Any, of_dim: Callable[[int], Any]) -> PartitionSpec:
    return PartitionSpec(*map(of_dim, range(len(atom.aval.shape))))


def _kept(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    return _without(spec, frozenset(spec_axes(spec)) - axes)


def _without(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    entries = [tuple(axis for axis in as_tuple(entry) if axis not in axes) for entry in spec]
    return PartitionSpec(*(entry or None for entry in entries))


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def _is_jaxpr(value: Any) -> bool:
    return isinstance(value, Jaxpr | ClosedJaxpr)
