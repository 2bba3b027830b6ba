"""Traced functions as data: parts of them as functions, calls taken apart, lines to blame.

A jaxpr is a list of equations. Each reads *atoms*, which are variables or literals, and writes
variables of its own:

    { lambda c ; a b .                     constvars; invars
      let d = mul a b                      one equation: primitive, invars, outvars, params
          e = jit[jaxpr={...}] d c         a call, which holds a jaxpr of its own
      in (e,) }                            outvars

The files of this folder read such lists, leave out or exchange equations, and evaluate what they
have chosen. They always evaluate by JAX's own evaluator, which keeps for each equation the line of
the user's code that it came from: error messages and profiles then still name that line.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from shardlib.compiled._source_lines import is_of_user

# The names of primitives that call one function: `jit`, and what recomputes in the backward pass.
# Different versions of JAX call them differently.
JITS, REMATS = ("jit", "pjit"), ("checkpoint", "remat2")
CALLS = (*JITS, *REMATS)

# Operations that change one array cheaply.
_CHEAP = {
    "broadcast_in_dim", "convert_element_type", "copy", "reshape", "rev", "sharding_constraint",
    "slice", "squeeze", "stop_gradient", "transpose",
}  # fmt: skip


class Stretch(NamedTuple):
    """Some equations of a jaxpr as a function of a list of values.

    The function takes values of the variables `inputs` and returns those of `outputs`. JAX's own
    evaluation keeps the lines that the equations came from.
    """

    jaxpr: Jaxpr  # the one that the equations are taken from
    equations: list[Any]
    inputs: list[Any]  # the variables that the equations read and do not write
    outputs: list[Any]  # the variables that are wanted of what they write

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        # JAX checks that a jaxpr has the effects of its equations.
        effects = frozenset().union(*(equation.effects for equation in self.equations))
        jaxpr = self.jaxpr.replace(
            constvars=[],
            invars=self.inputs,
            outvars=self.outputs,
            eqns=self.equations,
            effects=effects,
        )
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*inputs)

    def wanted(self, results: Sequence[Any]) -> list[Any]:
        """Those of its outputs, of all results of the only equation of a stretch."""
        wanted = set(self.outputs)
        pairs = zip(self.equations[0].outvars, results, strict=True)
        return [result for var, result in pairs if var in wanted]


def evaluate(closed: ClosedJaxpr, out: Any, args: Any) -> Any:
    """Evaluate a traced function for a tree of arguments.

    `out` is a tree of the shapes of its results, as `jax.make_jaxpr` returns it on request. The
    results come in the structure of that tree.
    """
    results = []
    for result in jaxpr_as_fun(closed)(*jax.tree.leaves(args)):
        # Constants of a traced function come out as numpy's arrays, which are turned into JAX's
        # own, as the function itself returns them.
        if not isinstance(result, jax.Array):
            result = jnp.asarray(result)
        results.append(result)
    return jax.tree.unflatten(jax.tree.structure(out), results)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The variables among the atoms that equations read, in order and with repetitions."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def picked(values: Any, keys: Iterable[Any]) -> list[Any]:
    """The values of a list at some positions, or those of a mapping under some keys.

    >>> picked(["embed", "up", "down"], [2, 0])
    ['down', 'embed']
    """
    return [values[key] for key in keys]


def shapes_of(atoms: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """The shapes and dtypes of atoms, to trace a function with in their place."""
    return [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]


def readers_of(jaxpr: Jaxpr, variable: Any) -> list[Any]:
    """The equations of a jaxpr that read a variable, in order."""
    return [equation for equation in jaxpr.eqns if variable in variables(equation.invars)]


def values_of(atoms: Iterable[Any], values: Mapping[Any, Any]) -> list[Any]:
    """The value of each atom: a literal's own, or the one that is known of a variable."""
    known = []
    for atom in atoms:
        if isinstance(atom, Literal):
            known.append(atom.val)
        else:
            known.append(values[atom])
    return known


def inputs_of(equations: Sequence[Any]) -> list[Any]:
    """The variables that equations read and do not write, each once and in order of first use."""
    written: set[Any] = set()
    needed: dict[Any, None] = {}
    for equation in equations:
        for var in variables(equation.invars):
            if var not in written:
                needed[var] = None
        written.update(equation.outvars)
    return list(needed)


def last_uses(jaxpr: Jaxpr) -> dict[Any, int]:
    """By variable, the position of the last equation that reads it.

    Outputs of the jaxpr map to `len(jaxpr.eqns)`.
    """
    last_use: dict[Any, int] = {}
    for position, equation in enumerate(jaxpr.eqns):
        for var in variables(equation.invars):
            last_use[var] = position
    for var in variables(jaxpr.outvars):
        last_use[var] = len(jaxpr.eqns)
    return last_use


def behind(jaxpr: Jaxpr, wanted: Iterable[Any], known: Iterable[Any] = ()) -> list[Any]:
    """The equations of a jaxpr that it takes to compute what is wanted, in order.

    What is `known` need not be computed, and neither does what leads to it and to nothing else.
    """
    # What is known is not looked behind.
    needed, known = set(variables(wanted)), set(known)
    # Backwards, so that all readers of a value are seen before the equation that writes it.
    equations = []
    for equation in reversed(jaxpr.eqns):
        if (needed - known).intersection(equation.outvars):
            equations.append(equation)
            needed.update(variables(equation.invars))
    return equations[::-1]


def made_of(jaxpr: Jaxpr, wanted: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
    """Compute the wanted atoms of a jaxpr from the values of some of its variables.

    The equations between them are evaluated, and no others. `values` has to hold the inputs and
    constants that these read; it is left as it is.
    """
    equations = behind(jaxpr, wanted, values)
    inputs = inputs_of(equations)
    outputs = list(dict.fromkeys(var for var in variables(wanted) if var not in values))
    results = Stretch(jaxpr, equations, inputs, outputs)(picked(values, inputs))
    computed = dict(zip(outputs, results, strict=True))
    return values_of(wanted, {**values, **computed})


def inlined(closed: ClosedJaxpr, whether: Callable[[Any], bool]) -> ClosedJaxpr:
    """The same function with the bodies of calls in place of the calls, and so on inside these.

    `whether(equation)` says which calls are taken apart; others stay. The equations of a body keep
    their lines where they have some.
    """

    def evaluated(*inputs: Any) -> list[Any]:
        return _evaluate_inlined(closed.jaxpr, closed.consts, inputs, whether)

    return jax.make_jaxpr(evaluated)(*shapes_of(closed.jaxpr.invars))


def _evaluate_inlined(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], whether: Callable[[Any], bool]
) -> list[Any]:
    """Evaluate a jaxpr, and the bodies of the calls in it where `whether(call)`.

    Equations between two such calls are evaluated together, by JAX's evaluator.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    read = set(variables(jaxpr.outvars))
    for equation in jaxpr.eqns:
        read.update(variables(equation.invars))

    pending: list[Any] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name not in CALLS or not whether(equation):
            pending.append(equation)
            continue
        _evaluate_stretch(jaxpr, pending, read, values)
        pending = []
        # The call is replaced by its body, in which there may be more such calls.
        body, constants = _body_of_call(equation)
        arguments = values_of(equation.invars, values)
        results = _evaluate_inlined(body, constants, arguments, whether)
        values.update(zip(equation.outvars, results, strict=True))
    _evaluate_stretch(jaxpr, pending, read, values)
    return values_of(jaxpr.outvars, values)


def _evaluate_stretch(
    jaxpr: Jaxpr, equations: list[Any], read: set[Any], values: dict[Any, Any]
) -> None:
    """Evaluate equations that follow each other; what is `read` of them goes into `values`."""
    inputs = inputs_of(equations)
    outputs = []
    for equation in equations:
        outputs += [variable for variable in equation.outvars if variable in read]
    results = Stretch(jaxpr, equations, inputs, outputs)(picked(values, inputs))
    values.update(zip(outputs, results, strict=True))


def _body_of_call(equation: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """The jaxpr that a call holds and its constants; a `checkpoint` holds one without any."""
    function = equation.params["jaxpr"]
    body, constants = open_jaxpr(function), getattr(function, "consts", [])
    # JAX traces a function once for several calls. What it traced for another call has no line
    # that would be true of this one, so it is given the line of the call.
    if not any(map(line_of, body.eqns)):
        body = relocated(body, equation.source_info.traceback, deep=True)
    return body, constants


def keeps_arguments(*_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` for an operation that keeps its arguments and nothing else.

    By it what an operation does for its own backward pass is told from a block of a model.
    """
    return False


def is_block(equation: Any) -> bool:
    """Whether an equation is a block that is computed again in the backward pass."""
    if equation.primitive.name not in REMATS:
        return False
    return equation.params["policy"] is not keeps_arguments


def is_cheap(equation: Any) -> bool:
    """Whether an equation makes a cheap change to one array, such as a cast or a transpose.

    If the array is a weight, the change is made again wherever its result is used, so that no whole
    copy of the weight has to be kept.
    """
    # Shapes that are not known while tracing are further operands.
    return equation.primitive.name in _CHEAP and len(equation.invars) == 1


def every_equation(jaxpr: Jaxpr) -> Iterator[Any]:
    """The equations of a jaxpr and, after each, those that it holds: loops, branches, calls."""
    for equation in jaxpr.eqns:
        yield equation
        for function in held_functions(equation):
            yield from every_equation(open_jaxpr(function))


def is_function(value: Any) -> bool:
    """Whether a value is a traced function: a jaxpr, with its constants or without."""
    return isinstance(value, Jaxpr | ClosedJaxpr)


def open_jaxpr(function: Jaxpr | ClosedJaxpr) -> Jaxpr:
    """The jaxpr of a traced function, without its constants."""
    if isinstance(function, ClosedJaxpr):
        return function.jaxpr
    return function


def held_functions(equation: Any) -> Iterator[Jaxpr | ClosedJaxpr]:
    """The traced functions that an equation holds: bodies of loops, branches, what it calls.

    Primitives keep them as parameters of their own names, some in tuples, as a `cond` its branches.
    """
    for value in jax.tree.leaves(list(equation.params.values()), is_leaf=is_function):
        if is_function(value):
            yield value


def relocated(jaxpr: Jaxpr, traceback: Any, deep: bool) -> Jaxpr:
    """The same jaxpr with equations that blame another place in the user's code.

    With `deep`, so do the equations of the jaxprs that its equations hold, those of `checkpoint`
    and others that have no constants; closed ones keep their lines.
    """

    def moved(equation: Any) -> Any:
        params = dict(equation.params)
        if deep:
            for name, value in equation.params.items():
                if isinstance(value, Jaxpr):
                    params[name] = relocated(value, traceback, deep)
        source = equation.source_info.replace(traceback=traceback)
        return equation.replace(source_info=source, params=params)

    return jaxpr.replace(eqns=[moved(equation) for equation in jaxpr.eqns])


def scan_parts(equation: Any) -> tuple[int, int]:
    """How many constants and how many carries a `scan` has, which are its first inputs.

    Versions of JAX keep count of them under different names, so they are told by rank: only what is
    scanned, or stacked, has one dim more outside the loop than in its body.
    """
    body = equation.params["jaxpr"].jaxpr
    # Outputs are the carries and then what is stacked.
    carries = _count_same_rank(equation.outvars, body.outvars)
    return _count_same_rank(equation.invars, body.invars) - carries, carries


def _count_same_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    """How many variables of a loop have as many dims outside of it as in its body."""
    pairs = zip(outside, inside, strict=True)
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)


def scan_options(equation: Any) -> dict[str, Any]:
    """The options of `lax.scan` that an equation was traced with, those that this JAX has."""
    names = ("length", "reverse", "unroll", "_split_transpose")
    return {name: equation.params[name] for name in names if name in equation.params}


def line_of(equation: Any) -> str:
    """The line that an equation came from, as `file:number`; empty if there is none.

    It is the innermost frame of the traceback that is in a file of the user.
    """
    traceback = equation.source_info.traceback
    if not traceback:
        return ""
    for frame in traceback.frames:
        if is_of_user(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""
