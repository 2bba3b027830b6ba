"""Lookups by index that XLA's partitioner can split on a mesh with manual and automatic axes.

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
The forms that lookups are given are in `_lookup_forms`; this file decides which, and follows what
is known of values through a traced function.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from jax.sharding import AbstractMesh, PartitionSpec

from shardlib.layouts._specs import as_tuple, axes_without, spec_axes
from shardlib.tracing._jaxpr import evaluate, is_function, open_jaxpr, scan_parts
from shardlib.tracing._lookup_forms import (
    FREE,
    LookupInParts,
    along_whole_dim,
    gathered,
    laid_out,
    picks_whole_rows,
    replaced,
    scattered,
    selected,
    spec_by_dim,
    takes_one_of_each_row,
)

# Primitives whose result has the layout of their only operand.
_SAME_LAYOUT = {
    "convert_element_type",
    "copy",
    "stop_gradient",
    "optimization_barrier",
    "reduce_precision",
}


class _Value(NamedTuple):
    """What is known of a value in a traced function."""

    varies: bool  # whether it may depend on the examples
    spec: PartitionSpec | None = None  # its layout over the automatic axes, of a parameter


_CONSTANT = _Value(False)


def needs_rewriting(mesh: AbstractMesh) -> bool:
    """Whether lookups that are traced under this mesh may abort XLA's partitioner.

    They may where some axes are manual and several are automatic, not counting axes of size one.
    """
    manual = any(mesh.shape[axis] > 1 for axis in mesh.manual_axes)
    automatic = [axis for axis in mesh.auto_axes if mesh.shape[axis] > 1]
    return manual and len(automatic) > 1


def partitionable(
    function: Callable[..., Any], specs: Any, batch_axes: Iterable[str]
) -> Callable[..., Any]:
    """`function(params, *args)` with lookups that XLA's partitioner can split.

    It has the same values and derivatives. On a mesh that needs no rewriting it is called as it is.

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
        values = _values_of_parameters(specs, mesh)
        values += [_Value(True)] * len(jax.tree.leaves(args))
        jaxpr, _ = _Rewriting(batch_axes).jaxpr(traced.jaxpr, values)
        return evaluate(ClosedJaxpr(jaxpr, traced.consts), out, (params, args))

    return rewritten


def _values_of_parameters(specs: Any, mesh: AbstractMesh) -> list[_Value]:
    """What is known of parameters: they are the same for all examples, and laid out by `specs`."""
    automatic = frozenset(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
    values = []
    for spec in jax.tree.leaves(specs, is_leaf=_is_spec):
        others = frozenset(spec_axes(spec)) - automatic
        values.append(_Value(False, _without(spec, others)))
    return values


class _Rewriting:
    """One pass over a traced function, which follows what is known from inputs to outputs."""

    def __init__(self, batch_axes: frozenset[str]) -> None:
        self.batch_axes = batch_axes

    def jaxpr(self, jaxpr: Jaxpr, inputs: Sequence[_Value]) -> tuple[Jaxpr, list[_Value]]:
        """The jaxpr with lookups in other forms, and what is known of its outputs.

        Args:
            jaxpr: what is rewritten.
            inputs: what is known of each of its inputs.
        """
        known = dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> _Value:
            return _CONSTANT if isinstance(atom, Literal) else known.get(atom, _CONSTANT)

        equations: list[Any] = []
        for equation in jaxpr.eqns:
            operands = [read(atom) for atom in equation.invars]
            new, outputs = self.equation(equation, operands)
            equations += new
            known.update(zip(equation.outvars, outputs, strict=True))
        return jaxpr.replace(eqns=equations), [read(atom) for atom in jaxpr.outvars]

    def equation(self, equation: Any, operands: list[_Value]) -> tuple[list[Any], list[_Value]]:
        """The equations that take the place of one, and what is known of its outputs.

        Whatever is computed from something that varies varies too; layouts are followed only
        through equations that keep them.
        """
        name = equation.primitive.name
        outputs = [_Value(any(value.varies for value in operands))] * len(equation.outvars)
        if name in _SAME_LAYOUT and len(operands) == 1:
            return [equation], operands
        if name == "gather":
            return self.gather(equation, operands), outputs
        if name.startswith("scatter"):
            return replaced(equation, lambda *arrays: scattered(equation, arrays)), outputs
        if name in ("sort", "top_k"):
            dim = equation.params.get("dimension", -1)
            new = replaced(equation, lambda *arrays: along_whole_dim(equation, arrays, dim))
            return new, outputs
        if name == "shard_map":  # in which there are no lookups for the partitioner to split
            return [equation], outputs
        return self.call(equation, operands, outputs)

    def gather(self, equation: Any, operands: list[_Value]) -> list[Any]:
        """The equations for a lookup, in the form that suits its operand."""
        table, indices = operands
        # Only of parameters is it known how they are laid out.
        if table.spec is not None:
            return self.gather_from_parameter(equation, table.spec, indices)
        if table.varies and takes_one_of_each_row(equation):
            return replaced(equation, lambda x, i: selected(equation, x, i))
        return _gathered_from_layout(equation, self.layout(equation, table, indices))

    def gather_from_parameter(
        self, equation: Any, spec: PartitionSpec, indices: _Value
    ) -> list[Any]:
        """The equations for a lookup in a parameter, which is gathered over the batch's axes."""
        spec = _without(spec, self.batch_axes)
        dims = equation.params["dimension_numbers"].start_index_map
        axes: list[str] = []
        for dim in dims:
            axes += as_tuple(spec[dim])
        if axes and picks_whole_rows(equation):
            batch_axes = self.batch_axes if indices.varies else frozenset()
            lookup = LookupInParts(equation, tuple(axes), spec, batch_axes)
            return replaced(equation, lookup.look_up)
        entries = [None if dim in dims else entry for dim, entry in enumerate(spec)]
        return _gathered_from_layout(equation, PartitionSpec(*entries))

    def layout(self, equation: Any, table: _Value, indices: _Value) -> PartitionSpec:
        """The layout in which something is looked up that is no parameter."""
        dims = equation.params["dimension_numbers"]

        def entry(dim: int) -> Any:
            if dim in dims.operand_batching_dims:
                return FREE
            # Where the indices do not depend on the examples, they are split over no axis that
            # splits the operand.
            free = table.varies and not indices.varies and dim not in dims.start_index_map
            return FREE if free else None

        return spec_by_dim(equation.invars[0], entry)

    def call(
        self, equation: Any, operands: list[_Value], outputs: list[_Value]
    ) -> tuple[list[Any], list[_Value]]:
        """An equation that may hold functions, which are rewritten too; others stay as they are."""
        if equation.primitive.name == "scan":
            return self.scan(equation, operands), outputs
        changed: dict[str, Any] = {}
        for key, value in equation.params.items():
            if is_function(value):
                changed[key], outputs = self.held(value, operands, outputs)
            elif isinstance(value, tuple) and value and all(map(is_function, value)):
                # The branches of a `cond`, whose first operand says which one it is.
                branches = [self.held(branch, operands[1:], outputs)[0] for branch in value]
                changed[key] = tuple(branches)
        if not changed:
            return [equation], outputs
        return [equation.replace(params={**equation.params, **changed})], outputs

    def scan(self, equation: Any, operands: list[_Value]) -> list[Any]:
        """A loop with its body rewritten.

        Only its constants keep their layouts: what is scanned has a dim less inside, and what is
        carried may be laid out otherwise from the second iteration on.
        """
        constants, _ = scan_parts(equation)
        # What is carried may also vary with the examples from the second iteration on.
        # A carry may get something of any operand after one round.
        varies = any(value.varies for value in operands)
        inside = []
        for position, value in enumerate(operands):
            if position < constants and value.spec is not None:
                inside.append(value)
            else:
                inside.append(_Value(varies or value.varies))
        body, _ = self.held(equation.params["jaxpr"], inside, [])
        return [equation.replace(params={**equation.params, "jaxpr": body})]

    def held(
        self, function: Any, operands: list[_Value], outputs: list[_Value]
    ) -> tuple[Any, list[_Value]]:
        """A function that an equation holds, rewritten, and what is known of the outputs then.

        If its inputs are not the operands one by one, as with the two functions of a `while`, each
        may be any of them.
        """
        # With constants or without: these hold no examples.
        inner = open_jaxpr(function)
        is_aligned = len(inner.invars) == len(operands)
        if not is_aligned:
            operands = [_Value(any(value.varies for value in operands))] * len(inner.invars)
        rewritten, results = self.jaxpr(inner, operands)
        if is_aligned and len(results) == len(outputs):
            outputs = results
        if isinstance(function, ClosedJaxpr):
            return ClosedJaxpr(rewritten, function.consts), outputs
        return rewritten, outputs


def _gathered_from_layout(equation: Any, spec: PartitionSpec) -> list[Any]:
    """The equations for a lookup whose operand is first given a layout."""
    return replaced(equation, lambda x, i: gathered(equation, laid_out(x, spec), i))


def _without(spec: PartitionSpec, axes: frozenset[str]) -> PartitionSpec:
    """A spec with some axes left out."""
    entries = []
    for entry in spec:
        kept = axes_without(as_tuple(entry), axes)
        entries.append(kept or None)
    return PartitionSpec(*entries)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)
