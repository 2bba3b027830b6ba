"""Which of the marked blocks in a traced loss keeps what, where layers differ.

A block is traced with a stand-in for its policy, since it does not know which layer it is. Here
blocks are counted, and the stand-ins exchanged:

    a block that is called once       the policy of its layer
    a block in a loop over layers     one policy, or a `LoopPolicy` with one for each iteration
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from shardlib.layouts._checkpoint_policies import LayersPolicy, offloads, policy_of
from shardlib.tracing._block_paths import paths_of_blocks
from shardlib.tracing._jaxpr import (
    every_equation,
    held_functions,
    is_block,
    is_function,
    open_jaxpr,
)

Policy = Callable[..., Any] | None


@dataclass(frozen=True)
class LoopPolicy:
    """In place of a policy, in the body of a loop whose layers differ: that of each iteration."""

    asked: LayersPolicy
    by_iteration: tuple[Policy, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        return self.asked(*args, **kwargs)


def with_policies_of_layers(closed: ClosedJaxpr, paths: Sequence[str]) -> ClosedJaxpr:
    """The same function with a policy for each block that was traced with a `LayersPolicy`.

    Its first inputs are the parameters of these paths.
    """
    asked = None
    for equation in every_equation(closed.jaxpr):
        if _stands_in(equation):
            asked = equation.params["policy"]
    if asked is None:
        return closed
    # How many blocks there are, and what they read, is known here only, so that a number or a
    # pattern that does not fit is refused here.
    values = asked.remat.of_blocks(paths_of_blocks(closed.jaxpr, paths, _stands_in))
    policies = iter([policy_of(kept) for kept in values])
    return closed.replace(jaxpr=_assigned(closed.jaxpr, policies))


def _stands_in(equation: Any) -> bool:
    return is_block(equation) and isinstance(equation.params["policy"], LayersPolicy)


def _count(jaxpr: Jaxpr) -> int:
    """How many blocks that differ by layer are evaluated by a jaxpr. Blocks in blocks count not."""
    count = 0
    for equation in jaxpr.eqns:
        # A block within a block is computed again with it, and has nothing to choose.
        if _stands_in(equation):
            count += 1
            continue
        inside = sum(_count(open_jaxpr(function)) for function in held_functions(equation))
        if equation.primitive.name == "scan":
            inside *= equation.params["length"]
        count += inside
    return count


def _assigned(jaxpr: Jaxpr, policies: Iterator[Policy]) -> Jaxpr:
    """A jaxpr in which each block that stands in has the next policy.

    A loop takes as many as it has blocks in all of its iterations.
    """

    def exchanged(equation: Any) -> Any:
        if _stands_in(equation):
            return _with_policy(equation, next(policies))
        if equation.primitive.name != "scan":
            return _with_functions(equation, lambda inner: _assigned(inner, policies))
        of_blocks = _policies_of_body(equation, policies)
        return _with_functions(equation, lambda inner: _assigned(inner, iter(of_blocks)))

    return jaxpr.replace(eqns=list(map(exchanged, jaxpr.eqns)))


def _policies_of_body(loop: Any, policies: Iterator[Policy]) -> list[Policy]:
    """The policy of each block in the body of a loop, of the next policies by layer.

    One that differs between iterations is a `LoopPolicy`.
    """
    body, length = loop.params["jaxpr"].jaxpr, loop.params["length"]
    blocks = _count(body)
    # They come layer by layer, as the loop calls its blocks.
    in_order = list(itertools.islice(policies, blocks * length))
    of_blocks: list[Policy] = []
    for block in range(blocks):
        by_iteration = tuple(in_order[block::blocks])
        if len(set(by_iteration)) == 1:
            of_blocks.append(by_iteration[0])
        else:
            asked = next(filter(_stands_in, every_equation(body))).params["policy"]
            of_blocks.append(LoopPolicy(asked, by_iteration))
    return of_blocks


def _with_policy(equation: Any, policy: Policy) -> Any:
    """A block with another policy, which is that of blocks within it too."""

    def inner(jaxpr: Jaxpr) -> Jaxpr:
        equations = []
        for equation in jaxpr.eqns:
            if _stands_in(equation):
                equations.append(_with_policy(equation, policy))
            else:
                equations.append(_with_functions(equation, inner))
        return jaxpr.replace(eqns=equations)

    equation = _with_functions(equation, inner)
    return equation.replace(params=equation.params | {"policy": policy})


def _with_functions(equation: Any, function: Callable[[Jaxpr], Jaxpr]) -> Any:
    """An equation that holds other jaxprs: `function` of those that it holds."""

    def exchanged(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=function(value.jaxpr))
        if isinstance(value, Jaxpr):
            return function(value)
        return value

    params = {}
    for name, value in equation.params.items():
        holds = any(map(is_function, jax.tree.leaves(value, is_leaf=is_function)))
        if holds:
            value = jax.tree.map(exchanged, value, is_leaf=is_function)
        params[name] = value
    return equation.replace(params=params)


def holds_runs(equation: Any) -> bool:
    """Whether an equation is a loop whose layers differ, or a call that leads to one."""
    for function in held_functions(equation):
        for inner in every_equation(open_jaxpr(function)):
            if is_block(inner) and isinstance(inner.params["policy"], LoopPolicy):
                return True
    return False


def holds_offloading(equation: Any) -> bool:
    """Whether an equation holds a marked block that keeps activations in the host's memory."""
    for function in held_functions(equation):
        for inner in every_equation(open_jaxpr(function)):
            if is_block(inner) and offloads(inner.params["policy"]):
                return True
    return False


def bodies_of_runs(body: ClosedJaxpr, length: int) -> list[tuple[int, ClosedJaxpr]]:
    """The bodies of a loop whose layers differ, each with the iteration before which it stops.

    Iterations that follow each other and keep the same share one. A loop without a `LoopPolicy` has
    one body for all.
    """
    policies = []
    for equation in every_equation(body.jaxpr):
        if is_block(equation) and isinstance(equation.params["policy"], LoopPolicy):
            policies.append(equation.params["policy"].by_iteration)
    bodies = []
    start = 0
    # Policies are functions: those of layers that keep the same are the same object.
    for stop in range(1, length + 1):
        if stop < length and all(of[stop] is of[start] for of in policies):
            continue
        bodies.append((stop, body.replace(jaxpr=_of_iteration(body.jaxpr, start))))
        start = stop
    return bodies


def _of_iteration(jaxpr: Jaxpr, iteration: int) -> Jaxpr:
    """The body of a loop with the policies of one of its iterations."""
    equations = []
    for equation in jaxpr.eqns:
        # Blocks may be inside of calls that the body makes.
        equation = _with_functions(equation, lambda inner: _of_iteration(inner, iteration))
        if is_block(equation) and isinstance(equation.params["policy"], LoopPolicy):
            policy = equation.params["policy"].by_iteration[iteration]
            equation = equation.replace(params=equation.params | {"policy": policy})
        equations.append(equation)
    return jaxpr.replace(eqns=equations)
