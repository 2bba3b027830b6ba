"""Leave out of a lowered program the sharding constraints that ask for nothing.

Inside a `shard_map` that is manual over some axes of the mesh only, JAX adds a constraint to the
result of every operation. It is open in every dim, so that the partitioner may do what it would do
anyway:

    %5 = stablehlo.add %3, %4 : tensor<8x16xf32>
    %6 = sdy.sharding_constraint %5 <@mesh, [{?}, {?}]> : tensor<8x16xf32>

XLA's passes go through all of them nevertheless: one operation in four of a small GPT's step is
such a constraint, and without them it compiles in 7% less time.

They are removed while JAX lowers the program. `without_open_constraints` marks the last operation
of a function; where JAX lowers that, everything before it is in the module already.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import sdy
from jax.interpreters import ad, batching, mlir

_CONSTRAINT = "sdy.sharding_constraint"
_RETURNS = ("func.return", "sdy.return", "stablehlo.return")


def without_open_constraints(x: jax.Array) -> jax.Array:
    """The same array, of whose program the open constraints are left out.

    It is to be the last operation of a function that is compiled: constraints are removed from
    what was lowered before it.
    """
    return _without_open_constraints.bind(x)


_without_open_constraints = Primitive("without_open_constraints")
_without_open_constraints.def_impl(lambda x: x)
_without_open_constraints.def_abstract_eval(lambda x: x)
ad.deflinear2(_without_open_constraints, lambda gradient, _: [gradient])
batching.defvectorized(_without_open_constraints)


def _lower(context: mlir.LoweringRuleContext, x: Any) -> list[Any]:
    """Remove open constraints from the module so far, and add nothing to it."""
    is_open = _Openness()
    removable: list[Any] = []

    def visit(operation: Any) -> Any:
        if operation.name == _CONSTRAINT and is_open(operation.attributes["sharding"]):
            removable.append(operation)
        return ir.WalkResult.ADVANCE

    context.module_context.module.operation.walk(visit)
    # Nothing is removed during the walk, which would lose its way.
    for operation in removable:
        if _is_finished(operation):
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()
    return [x]


# Not cached: each place that it stands in has other constraints before it.
mlir.register_lowering(_without_open_constraints, _lower, cacheable=False)


class _Openness:
    """Whether shardings ask for nothing. A program has few that differ, and each is read once."""

    def __init__(self) -> None:
        self.known: dict[Any, bool] = {}

    def __call__(self, sharding: Any) -> bool:
        if sharding not in self.known:
            self.known[sharding] = _asks_for_nothing(sdy.TensorShardingAttr(sharding))
        return self.known[sharding]


def _asks_for_nothing(sharding: Any) -> bool:
    """Whether a sharding names no axis, and leaves every dim to the partitioner."""
    if len(sharding.replicated_axes) or len(sharding.unreduced_axes):
        return False
    for attribute in sharding.dimension_shardings:
        dim = sdy.DimensionShardingAttr(attribute)
        if dim.is_closed or len(dim.axes):
            return False
    return True


def _is_finished(operation: Any) -> bool:
    """Whether the block of an operation is lowered to its end.

    In one that is not, JAX may still refer to the operation's result.
    """
    return operation.block.operations[-1].operation.name in _RETURNS
