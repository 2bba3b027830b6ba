"""Whether a loss has computed a new value for a parameter, or has only passed it through functions.

After a call of `nnx.jit`, `nnx.remat` or `nnx.scan` a module's parameters are results of the call,
equal to what they were before. So a result is followed into the functions that gave it:

    parameter -- jit, scan, reshape ... --> perhaps the same parameter
    parameter -- mul, add, clamp ... -----> another value, which was computed
"""

from typing import Any

from jax.extend.core import Jaxpr, Literal

from shardlib.tracing._jaxpr import held_functions, open_jaxpr

# What gives elements as they are. The result may still be the parameter.
_MOVES = {
    "copy", "copy_p", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "slice",
    "dynamic_slice", "dynamic_update_slice", "concatenate", "split", "rev", "gather", "name",
    "convert_element_type", "reduce_precision", "optimization_barrier", "sharding_constraint",
    "reshard", "device_put", "pvary", "pcast", "all_gather", "psum",
}  # fmt: skip


def is_computed(jaxpr: Jaxpr, result: Any) -> bool:
    """Whether an output of a function was surely computed, and not only passed through it."""
    if isinstance(result, Literal):
        return True
    for equation in jaxpr.eqns:
        if result in equation.outvars:
            return _computes(equation, equation.outvars.index(result))
    return False


def _computes(equation: Any, place: int) -> bool:
    """Whether an equation surely computes its result of a place."""
    if equation.primitive.name in _MOVES:
        return False
    functions = list(map(open_jaxpr, held_functions(equation)))
    if not functions:
        return True
    result: Any = equation.outvars[place]
    dtype = result.aval.dtype
    for function in functions:
        # The condition of a loop gives something else than its body.
        if len(function.outvars) != len(equation.outvars):
            continue
        output: Any = function.outvars[place]
        if output.aval.dtype == dtype and is_computed(function, output):
            return True
    return False
