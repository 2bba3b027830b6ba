"""Traced functions: pieces of them as functions of their own, calls taken apart, lines to blame."""

import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

JITS, REMATS = ("jit", "pjit"), ("checkpoint", "remat2")
CALLS = (*JITS, *REMATS)


class Stretch(NamedTuple):
    """Some equations of a jaxpr as a function. JAX's own evaluation keeps the lines that equations
    came from.
    """

    jaxpr: Jaxpr
    equations: list[Any]
    needed: list[Any]
    made: list[Any]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        effects = frozenset().union(*(equation.effects for equation in self.equations))
        jaxpr = self.jaxpr.replace(
            constvars=[],
            invars=self.needed,
            outvars=self.made,
            eqns=self.equations,
            effects=effects,
        )
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*inputs)


def evaluate(closed: ClosedJaxpr, out: Any, args: Any) -> Any:
    """What a traced function gives for a tree of arguments, in the structure of `out`, a tree of
    its results' shapes.
    """
    results = jaxpr_as_fun(closed)(*jax.tree.leaves(args))
    # Constants of a traced function come out as numpy's arrays: back to JAX's own, as the function
    # itself gives them.
    results = [one if isinstance(one, jax.Array) else jnp.asarray(one) for one in results]
    return jax.tree.unflatten(jax.tree.structure(out), results)


def variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def inputs_of(equations: Sequence[Any]) -> list[Any]:
    """What equations read and do not make."""
    made: set[Any] = set()
    needed: dict[Any, None] = {}
    for equation in equations:
        needed.update((var, None) for var in variables(equation.invars) if var not in made)
        made.update(equation.outvars)
    return list(needed)


def behind(jaxpr: Jaxpr, wanted: Iterable[Any], known: Iterable[Any] = ()) -> list[Any]:
    """The equations that `wanted` takes, where what is `known` need not be made."""
    needed, known, equations = set(variables(wanted)), set(known), []
    for equation in reversed(jaxpr.eqns):
        if (needed - known).intersection(equation.outvars):
            equations.append(equation)
            needed.update(variables(equation.invars))
    return equations[::-1]


def made_of(jaxpr: Jaxpr, wanted: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
    """What `wanted` comes to, where some `values` are known, inputs and constants among them."""
    equations = behind(jaxpr, wanted, values)
    needed = inputs_of(equations)
    made = list(dict.fromkeys(var for var in variables(wanted) if var not in values))
    found = dict(
        zip(
            made,
            Stretch(jaxpr, equations, needed, made)([values[var] for var in needed]),
            strict=True,
        )
    )
    return [
        atom.val if isinstance(atom, Literal) else values[atom] if atom in values else found[atom]
        for atom in wanted
    ]


def inlined(closed: ClosedJaxpr, whether: Callable[[Any], bool]) -> ClosedJaxpr:
    """The same with calls taken apart, and calls in these, where `whether(equation)`; lines stay as
    they are.
    """

    def evaluate(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
        plain: list[Any] = []
        read = {var for equation in jaxpr.eqns for var in variables(equation.invars)} | set(
            variables(jaxpr.outvars)
        )

        def catch_up() -> None:
            needed = inputs_of(plain)
            made = [v for equation in plain for v in equation.outvars if v in read]
            results = Stretch(jaxpr, list(plain), needed, made)([values[var] for var in needed])
            values.update(zip(made, results, strict=True))
            plain.clear()

        for equation in jaxpr.eqns:
            if equation.primitive.name in CALLS and whether(equation):
                catch_up()
                inner = equation.params["jaxpr"]
                given = [
                    atom.val if isinstance(atom, Literal) else values[atom]
                    for atom in equation.invars
                ]
                inner, constants = (
                    (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, [])
                )
                # What was traced before, for another call, has no line of this one.
                if not any(map(line_of, inner.eqns)):
                    inner = relocated(inner, equation.source_info.traceback, deep=True)
                values.update(zip(equation.outvars, evaluate(inner, constants, given), strict=True))
            else:
                plain.append(equation)
        catch_up()
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]

    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *inputs: evaluate(closed.jaxpr, closed.consts, inputs))(*shapes)


def every_equation(jaxpr: Jaxpr) -> Iterator[Any]:
    """The equations of a jaxpr and of all that these hold: loops, branches, calls."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for one in value if isinstance(value, tuple | list) else (value,):
                inner = one.jaxpr if isinstance(one, ClosedJaxpr) else one
                if isinstance(inner, Jaxpr):
                    yield from every_equation(inner)


def relocated(jaxpr: Jaxpr, traceback: Any, deep: bool) -> Jaxpr:
    """The same as if from another line; `deep`, what its equations hold too."""

    def moved(equation: Any) -> Any:
        inner = {
            name: relocated(value, traceback, deep)
            for name, value in equation.params.items()
            if deep and isinstance(value, Jaxpr)
        }
        return equation.replace(
            source_info=equation.source_info.replace(traceback=traceback),
            params={**equation.params, **inner},
        )

    return jaxpr.replace(eqns=[moved(equation) for equation in jaxpr.eqns])


def scan_parts(equation: Any) -> tuple[int, int]:
    """How many constants and how many carries a `scan` has, its first inputs; versions of JAX keep
    count differently.

    Only what is scanned, or stacked, has another rank outside than inside.
    """
    body = equation.params["jaxpr"].jaxpr
    carries = _alike(equation.outvars, body.outvars)
    return _alike(equation.invars, body.invars) - carries, carries


def _alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True))


def line_of(equation: Any) -> str:
    """The innermost line of an equation that is neither ours nor of something installed; or
    nothing.
    """
    installed = (
        Path(__file__).parent.parent,
        Path(sysconfig.get_paths()["purelib"]),
        Path(sysconfig.get_paths()["stdlib"]),
    )
    frames = equation.source_info.traceback.frames if equation.source_info.traceback else ()
    places = [
        f"{frame.file_name}:{frame.line_num}"
        for frame in frames
        if not any(folder in Path(frame.file_name).parents for folder in installed)
    ]
    return places[0] if places else ""
