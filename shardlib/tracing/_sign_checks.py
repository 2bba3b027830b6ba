"""Whether a backward pass reads more than the sign of an activation of which only that was kept.

A block is traced with its backward pass, and what is made of the decoded signs is followed:

    signs -> decoded --> name, reshape, clip around zero ... --> above zero?    a comparison: exact
                                                            '--> times, max ...  reads the value

An operation that is not known to keep the sign counts as one that reads the value.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jax.interpreters import partial_eval

from shardlib.layouts._checkpoint_policies import COMPRESSIBLE, LayersPolicy, policy_of
from shardlib.tracing._compressed_saves import DECODE, encoding_of
from shardlib.tracing._jaxpr import (
    Stretch,
    every_equation,
    held_functions,
    inlined,
    is_block,
    open_jaxpr,
    readers_of,
    shapes_of,
)
from shardlib.tracing._linearize import Partition

_SIGNS = f"{DECODE}_sign"
_KEEPS_SIGN = {
    "name", COMPRESSIBLE, "broadcast_in_dim", "copy", "copy_p", "optimization_barrier", "pvary",
    "reshape", "rev", "sharding_constraint", "slice", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip


class Reader(NamedTuple):
    """An equation that reads the value of an activation of a name, of which the sign was kept."""

    name: str
    equation: Any


def readers_of_values(jaxpr: Jaxpr) -> Iterator[Reader]:
    """What reads more than the sign of what marked blocks keep only the sign of.

    Blocks that share a function, as the layers of a model, are looked at once.
    """
    seen: set[int] = set()
    for block in every_equation(jaxpr):
        if not is_block(block) or id(block.params["jaxpr"]) in seen:
            continue
        seen.add(id(block.params["jaxpr"]))
        for policy in _policies(block.params["policy"]):
            if _keeps_signs(block, policy):
                yield from _readers_in(_gradient(block, policy))


def _policies(policy: Any) -> list[Callable[..., Any] | None]:
    """The policies that a block may have; it has one but where they differ by layer.

    Where these differ, the trace has a placeholder for them that knows all of them.
    """
    if isinstance(policy, LayersPolicy):
        return [policy_of(value) for value in policy.remat.values]
    return [policy]


def _keeps_signs(block: Any, policy: Any) -> bool:
    # Nothing but inputs is kept then, and these as they are.
    if policy is None:
        return False
    for equation in every_equation(open_jaxpr(block.params["jaxpr"])):
        if equation.primitive.name == COMPRESSIBLE and encoding_of(policy, equation) == "sign":
            return True
    return False


def _gradient(block: Any, policy: Any) -> Jaxpr:
    """Forward and backward pass of a block, traced, without what its gradients do not need."""
    # The policy is put into the equation, where the derivative of the block reads it.
    block = block.replace(params=block.params | {"policy": policy})
    inputs = [atom for atom in block.invars if not isinstance(atom, Literal)]
    # A block may get the same array twice.
    inputs = list(dict.fromkeys(inputs))
    outputs = [var for var in block.outvars if type(var).__name__ != "DropVar"]
    function = Stretch(open_jaxpr(block.params["jaxpr"]), [block], inputs, outputs)
    partition = Partition.by_dtype(inputs)

    def gradient(floats: list[Any], others: list[Any]) -> Any:
        def call(floats: list[Any]) -> list[Any]:
            results = function(partition.merge(floats, others))
            return Partition.by_dtype(results).split(results)[0]

        results, backward = jax.vjp(call, floats)
        # What is read does not depend on which gradients come in.
        return backward([jnp.ones_like(x) for x in results])

    traced = jax.make_jaxpr(gradient)(*partition.split(shapes_of(inputs)))
    jaxpr = inlined(traced, _is_open).jaxpr
    # What no gradient needs reads nothing: a value may be there for the loss alone.
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)
    return jaxpr


def _is_open(equation: Any) -> bool:
    """Whether a call is looked into: all are but the one that decodes."""
    return equation.params.get("name") != _SIGNS


def _readers_in(jaxpr: Jaxpr) -> Iterator[Reader]:
    """The readers of decoded signs in a traced function and in what it holds."""
    makers = {}
    for equation in jaxpr.eqns:
        makers.update(dict.fromkeys(equation.outvars, equation))
        if equation.params.get("name") == _SIGNS:
            yield from _readers(jaxpr, equation.outvars[0], "", makers)
            continue
        for function in held_functions(equation):
            yield from _readers_in(open_jaxpr(function))


def _readers(jaxpr: Jaxpr, var: Any, name: str, makers: dict[Any, Any]) -> Iterator[Reader]:
    """The readers of a value of which only the sign is true."""
    for equation in readers_of(jaxpr, var):
        # An activation passes through the operation that is decoded, and gets its name after that.
        if equation.primitive.name == "name":
            name = equation.params["name"]
        if _keeps_sign(equation, var):
            place = list(equation.invars).index(var)
            # Several arrays pass a barrier side by side.
            out = equation.outvars[place if len(equation.outvars) > 1 else 0]
            yield from _readers(jaxpr, out, name, makers)
        elif not _compares_with_zero(equation, var, makers):
            yield Reader(name, equation)


def _keeps_sign(equation: Any, var: Any) -> bool:
    """Whether the result is above zero where the operand is.

    A cast to float16 is not among these, for it makes zeros of small numbers; nor are bounds on the
    wrong side of zero.
    """
    primitive = equation.primitive.name
    if primitive in _KEEPS_SIGN:
        return True
    if primitive == "convert_element_type":
        dtype = equation.outvars[0].aval.dtype
        return dtype in (jnp.bfloat16, jnp.float32, jnp.float64)
    others = [atom for atom in equation.invars if atom is not var]
    # Of bounds that only the running program knows nobody can tell on which side of zero they are.
    if not others or not all(map(_is_number, others)):
        return False
    if primitive == "max":
        return bool(others[0].val < 0)
    if primitive == "min":
        return bool(others[0].val > 0)
    if primitive == "clamp":
        return bool(others[0].val < 0 < others[-1].val)
    return False


def _is_number(atom: Any) -> bool:
    """Whether a value is one number that the trace tells."""
    return isinstance(atom, Literal) and not jnp.shape(atom.val)


def _compares_with_zero(equation: Any, var: Any, makers: dict[Any, Any]) -> bool:
    """Whether all that is asked of a value is whether it is above zero.

    `x > 0` asks no more. `x >= 0` and `x < 0` do: zero and what is below it are encoded alike.
    """
    primitive = equation.primitive.name
    if primitive not in ("gt", "lt"):
        return False
    left, right = equation.invars
    larger, smaller = (left, right) if primitive == "gt" else (right, left)
    return larger is var and _is_zero(smaller, makers)


def _is_zero(atom: Any, makers: dict[Any, Any]) -> bool:
    """Whether a value is zero everywhere, as far as the trace tells.

    A zero may be broadcast or cast before it is compared with.
    """
    if isinstance(atom, Literal):
        return _is_number(atom) and bool(atom.val == 0)
    maker = makers.get(atom)
    if maker is None or maker.primitive.name not in (*_KEEPS_SIGN, "convert_element_type"):
        return False
    return _is_zero(maker.invars[0], makers)
