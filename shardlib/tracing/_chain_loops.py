"""Where a traced function loops over marked blocks: the loops that keep inputs by a chain.

    scan                        a loop over groups of blocks: entered
      jit, checkpoint           entered
        scan                    a loop over blocks
          checkpoint            a block

Nothing is evaluated here: these functions read equations and say what is there.
"""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr

from shardlib.layouts._annotate import current_scope
from shardlib.layouts._chain_schedules import Chain
from shardlib.tracing._jaxpr import CALLS, every_equation, held_functions, is_block, open_jaxpr


def chain_in_force() -> Chain | None:
    """The chain by which loops over marked blocks keep inputs; None where they keep all.

    It is part of what blocks keep, `Strategy(remat=...)`, and ambient as all of that is.
    """
    scope = current_scope()
    if scope is None or scope.remat is None:
        return None
    return scope.remat.chain


def is_loop_over_blocks(equation: Any) -> bool:
    """Whether an equation is a `scan` of marked blocks, which are in no loop further inside."""
    if equation.primitive.name != "scan":
        return False
    return _holds_block(open_jaxpr(equation.params["jaxpr"]))


def _holds_block(jaxpr: Jaxpr) -> bool:
    """Whether there is a marked block in a jaxpr, in what it holds too but not in its loops."""
    for equation in jaxpr.eqns:
        if is_block(equation):
            return True
        if equation.primitive.name in ("scan", "while"):
            continue
        if any(_holds_block(open_jaxpr(one)) for one in held_functions(equation)):
            return True
    return False


def loops_over_blocks(jaxpr: Jaxpr) -> Iterator[Any]:
    """The loops over blocks in a jaxpr, in loops and calls too, but in no other equations."""
    for equation in jaxpr.eqns:
        if is_loop_over_blocks(equation):
            yield equation
        if _is_entered(equation):
            yield from loops_over_blocks(open_jaxpr(equation.params["jaxpr"]))


def leads_to_loop_over_blocks(equation: Any) -> bool:
    """Whether an equation is a loop over blocks, or a loop or a call that holds one."""
    if not _is_entered(equation):
        return False
    if is_loop_over_blocks(equation):
        return True
    return any(True for _ in loops_over_blocks(open_jaxpr(equation.params["jaxpr"])))


def _is_entered(equation: Any) -> bool:
    return equation.primitive.name in (*CALLS, "scan")


def holder_of_loops(jaxpr: Jaxpr) -> Any:
    """An equation that holds loops over blocks and is not entered, such as a `cond`; else None."""
    for equation in jaxpr.eqns:
        if _is_entered(equation):
            inside = holder_of_loops(open_jaxpr(equation.params["jaxpr"]))
            if inside is not None:
                return inside
        # What has a derivative of its own keeps what that says.
        elif not equation.primitive.name.startswith("custom_"):
            for function in held_functions(equation):
                if any(map(is_loop_over_blocks, every_equation(open_jaxpr(function)))):
                    return equation
    return None
