"""Which parameters a marked block reads, by their paths.

A trace has parameters as its first inputs, and blocks that read them, mostly one layer of a stack
in a loop and in another dtype:

    blocks/up: f32[12,64,256]  ->  scan over 12 layers, f32[64,256]  ->  bf16[64,256]  ->  the block

What is followed is a parameter itself, a layer of it, and cheap changes of it, as casts are. What
is computed of parameters and of other things is an activation, and no parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal

from shardlib.tracing._jaxpr import held_functions, is_cheap, open_jaxpr, scan_parts


def paths_of_blocks(
    jaxpr: Jaxpr, paths: Sequence[str], is_asked: Callable[[Any], bool]
) -> list[frozenset[str]]:
    """The paths of the parameters that each block reads, in the order in which blocks are called.

    Blocks in a loop count as often as the loop calls them.

    Args:
        jaxpr: the trace, whose first inputs are the parameters.
        paths: those of the parameters.
        is_asked: whether an equation is such a block. Blocks within one are not looked for.
    """
    # Further inputs are the batch and keys, which have no paths.
    known = dict(zip(jaxpr.invars, paths, strict=False))
    return _Walk(is_asked).through(jaxpr, known)


class _Walk:
    """A walk through equations in their order."""

    def __init__(self, is_asked: Callable[[Any], bool]) -> None:
        self.is_asked = is_asked

    def through(self, jaxpr: Jaxpr, known: dict[Any, str]) -> list[frozenset[str]]:
        """What the blocks of a jaxpr read; paths of further variables are added to the known."""
        blocks: list[frozenset[str]] = []
        for equation in jaxpr.eqns:
            if self.is_asked(equation):
                read = [_path_of(atom, known) for atom in equation.invars]
                blocks.append(frozenset(path for path in read if path is not None))
            # A loop may slice the stacks of its layers by itself, by the number of a turn.
            elif is_cheap(equation) or equation.primitive.name == "dynamic_slice":
                path = _path_of(equation.invars[0], known)
                if path is not None:
                    known[equation.outvars[0]] = path
            else:
                blocks += self._inside(equation, known)
        return blocks

    def _inside(self, equation: Any, known: dict[Any, str]) -> list[frozenset[str]]:
        """What blocks in the functions of an equation read.

        A loop's blocks are the same in each turn, and count as often.
        """
        blocks: list[frozenset[str]] = []
        for function in held_functions(equation):
            inner = open_jaxpr(function)
            inside: dict[Any, str] = {}
            for atom, var in zip(_operands(equation, inner), inner.invars, strict=False):
                path = _path_of(atom, known)
                if path is not None:
                    inside[var] = path
            blocks += self.through(inner, inside)
            self._hand_back(equation, inner, inside, known)
        if equation.primitive.name == "scan":
            blocks *= equation.params["length"]
        return blocks

    def _hand_back(
        self, equation: Any, inner: Jaxpr, inside: Mapping[Any, str], known: dict[Any, str]
    ) -> None:
        """Results of a call that are parameters: a `jit` may cast all of them."""
        # What these return was stacked, carried, or chosen between branches: a parameter no more.
        if equation.primitive.name in ("scan", "while", "cond"):
            return
        for atom, var in zip(inner.outvars, equation.outvars, strict=False):
            path = _path_of(atom, inside)
            if path is not None:
                known[var] = path


def _operands(equation: Any, inner: Jaxpr) -> list[Any]:
    """What a function that an equation holds gets, in order; None for what a loop carries."""
    operands = list(equation.invars)
    if equation.primitive.name == "scan":
        consts, carries = scan_parts(equation)
        operands[consts : consts + carries] = [None] * carries
    # The branches of a `cond` and the body of a `while` get the last operands.
    return operands[len(operands) - len(inner.invars) :]


def _path_of(atom: Any, known: Mapping[Any, str]) -> str | None:
    """The path of a parameter; None of what is none."""
    if atom is None or isinstance(atom, Literal):
        return None
    return known.get(atom)
