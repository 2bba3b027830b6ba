"""Names of NNX variables that have fewer names than dims, completed by tracing how each is made.

To Flax, dims that follow the named ones are whole, so `("embed",)` on an array of two dims means
`("embed", None)`. But names that are too few may also be one dim off: `nnx.vmap` and `jax.vmap`
stack a new dim in front of a variable, and not all of them give it a name.

    made with ("embed",)          shape (4, 8)       means ("embed", None)
    then stacked by `jax.vmap`    shape (3, 4, 8)    means (None, "embed", None)

Both have the same metadata afterwards. How a variable was made tells them apart, so the model is
made once more, under a trace in which each variable is laid out by its names as it is made. That
leaves a sharding constraint, which `vmap` gives one more dim as it does the variable.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from shardlib.layouts._flax_rules import in_force
from shardlib.modeling._flax import Names, is_nnx, is_short, nnx_variables, padded_names
from shardlib.tracing._jaxpr import JITS, variables


def complete_names(
    make_model: Callable[[], Any],
    model: Any,
    names: dict[str, Names],
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[str, Names]:
    """Complete the names of NNX variables that have fewer names than dims.

    Left as they are, to be refused, are those that something has been stacked in front of since
    they were made, whose names are all one dim off. That cannot be told from a variable; so the
    model is made once more, tracing how each comes about.

    Args:
        make_model: what the user makes the model with.
        model: the model that it has made.
        names: the names of all leaves, by path.
        shapes: the shapes of those leaves that are arrays, by path.
    """
    short = _short_paths(names, shapes)
    if not short or not is_nnx(model):
        return names
    # Where all dims are whole, it does not matter which of them has no name.
    completed = dict(names)
    for path in short:
        if not any(names[path] or ()):
            completed[path] = padded_names(names[path], shapes[path])
    short = _short_paths(completed, shapes)
    # A spec speaks of mesh axes, and has no names that rules could be asked for.
    tuples = {}
    for path, value in completed.items():
        if isinstance(value, tuple):
            tuples[path] = value
    entries_by_path = _names_when_made(make_model, short, tuples)
    for path in short:
        # Right if the constraint, which was stacked like the variable, says the same.
        padded = padded_names(completed[path], shapes[path])
        entries = entries_by_path.get(path)
        if entries is not None and _agree(entries, padded):
            completed[path] = padded
    return completed


def _short_paths(names: Mapping[str, Names], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The paths of arrays that have fewer names than dims."""
    short = []
    for path, value in names.items():
        if path in shapes and is_short(value, shapes[path]):
            short.append(path)
    return short


def _agree(entries: list[Any], names: tuple[Any, ...]) -> bool:
    """Whether a constraint has these names; where it leaves a dim open, it agrees with any."""
    for entry, name in zip(entries, names, strict=True):
        if entry is not PartitionSpec.UNCONSTRAINED and entry != name:
            return False
    return True


def _names_when_made(
    make_model: Callable[[], Any], paths: list[str], names: Mapping[str, tuple[str | None, ...]]
) -> dict[str, list[Any]]:
    """By path, the name that each dim of a variable had when it was made.

    A dim that it has got since has none. Variables of which that cannot be told are left out.

    A variable that is laid out as it is made leaves a constraint in the trace, which keeps its
    names, and which `vmap` gives one more dim as it does the variable. To lay variables out, the
    names themselves serve as the axes of a mesh.
    """
    wanted = _distinct_names(names[path] for path in paths)
    # Axes of size two, since JAX takes a constraint over an axis of size one for none.
    types = (AxisType.Auto,) * len(wanted)
    mesh = AbstractMesh((2,) * len(wanted), tuple(wanted), axis_types=types)
    no_mesh = AbstractMesh((), ())
    # A rule for every name: those that are not asked for are whole.
    rules = []
    for name in _distinct_names(names.values()):
        rules.append((name, name if name in wanted else None))

    def values() -> list[Any]:
        variables = dict(nnx_variables(make_model()))
        return [variables[path].get_value() for path in paths]

    try:
        with (
            # In place of a mesh only one of the same size may be put in force, and in place of no
            # mesh any.
            jax.sharding.use_abstract_mesh(no_mesh),
            jax.sharding.use_abstract_mesh(mesh),
            in_force(tuple(rules), eager=True),
        ):
            jaxpr = jax.make_jaxpr(values)().jaxpr
    except (ValueError, KeyError):  # the names are no layout of these dims, so nothing is known
        return {}
    return _entries_by_path(jaxpr, paths)


def _entries_by_path(jaxpr: Any, paths: list[str]) -> dict[str, list[Any]]:
    """The entries of the constraint that each output of a trace comes from, if there is one."""
    entries_by_path = {}
    for path, var in zip(paths, jaxpr.outvars, strict=True):
        entries = _constraint_entries(jaxpr, var)
        if entries is not None:
            entries_by_path[path] = entries
    return entries_by_path


def _distinct_names(names: Any) -> list[str]:
    """All names in several tuples, each once and sorted, without None."""
    distinct = set()
    for dim_names in names:
        distinct.update(dim_names)
    distinct.discard(None)
    return sorted(distinct)


def _constraint_entries(jaxpr: Any, var: Any) -> list[Any] | None:
    """The entries of the constraint that an array comes from, one for each dim.

    The array is followed back through inner functions, transpositions, and operations with a single
    operand of its shape. None if there is no constraint on the way, or it cannot be followed.
    """
    equation = _maker_of(jaxpr, var)
    if equation is None:
        return None
    name, params = equation.primitive.name, equation.params
    # A spec may be shorter than the array: the dims that follow are whole.
    if name == "sharding_constraint":
        entries = list(params["sharding"].spec)
        return entries + [None] * (var.aval.ndim - len(entries))
    if name in JITS:
        inner = params["jaxpr"].jaxpr
        return _constraint_entries(inner, inner.outvars[equation.outvars.index(var)])
    # Any other operation keeps the dims of an array if it has one operand, of as many dims.
    sources = variables(equation.invars)
    if len(sources) != 1 or len(sources[0].aval.shape) != len(var.aval.shape):
        return None
    entries = _constraint_entries(jaxpr, sources[0])
    if name == "transpose" and entries is not None:
        return [entries[dim] for dim in params["permutation"]]
    if sources[0].aval.shape != var.aval.shape:
        return None
    return entries


def _maker_of(jaxpr: Any, var: Any) -> Any:
    """The equation that makes a variable; None for an input."""
    for equation in jaxpr.eqns:
        if var in equation.outvars:
            return equation
    return None
