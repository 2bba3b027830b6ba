"""Names of NNX variables that have fewer names than dims, completed by tracing how each is made."""

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
    """Complete the names of NNX variables that have fewer names than dims: to Flax, the dims that
    follow are whole.

    Left as they are, to be refused, are those that something has been stacked in front of since
    they were made, whose names are all one dim off. That cannot be told from a variable; so the
    model is made once more, tracing how each comes about.
    """
    short = [
        path
        for path, of_dims in names.items()
        if path in shapes and is_short(of_dims, shapes[path])
    ]
    if not short or not is_nnx(model):
        return names
    names = {
        p: padded_names(n, shapes[p]) if p in short and not any(n or ()) else n
        for p, n in names.items()
    }
    short = [path for path in short if is_short(names[path], shapes[path])]
    entries = _names_when_made(
        make_model, short, {p: n for p, n in names.items() if isinstance(n, tuple)}
    )
    done = dict(names)
    for path in short:
        full = padded_names(names[path], shapes[path])
        made = entries.get(path)
        if made is not None and all(
            one is PartitionSpec.UNCONSTRAINED or one == n
            for one, n in zip(made, full, strict=True)
        ):
            done[path] = full
    return done


def _names_when_made(
    make_model: Callable[[], Any], paths: list[str], names: Mapping[str, tuple[str | None, ...]]
) -> dict[str, list[Any]]:
    """By path, the name that each dim of a variable had when it was made; a dim that it has got
    since has none.

    A variable that is laid out as it is made leaves a constraint in the trace, which keeps its
    names, and which `vmap` gives one more dim as it does the variable.
    """
    wanted = {name for path in paths for name in names[path] if name is not None}
    every = {name for of_dims in names.values() for name in of_dims if name is not None}
    # Axes of size two, since JAX takes a constraint over an axis of size one for none. In place of
    # a mesh only one of the same size may be put in force, and in place of no mesh any.
    mesh = AbstractMesh(
        (2,) * len(wanted), tuple(sorted(wanted)), axis_types=(AxisType.Auto,) * len(wanted)
    )
    none = AbstractMesh((), ())
    pairs = tuple((name, name if name in wanted else None) for name in sorted(every))

    def values() -> list[Any]:
        variables = dict(nnx_variables(make_model()))
        return [variables[path].get_value() for path in paths]

    try:
        with (
            jax.sharding.use_abstract_mesh(none),
            jax.sharding.use_abstract_mesh(mesh),
            in_force(pairs, eager=True),
        ):
            jaxpr = jax.make_jaxpr(values)().jaxpr
    except (ValueError, KeyError):  # it cannot be laid out so, hence not told
        return {}
    made = {path: _entries(jaxpr, var) for path, var in zip(paths, jaxpr.outvars, strict=True)}
    return {path: entries for path, entries in made.items() if entries is not None}


def _entries(jaxpr: Any, var: Any) -> list[Any] | None:
    """The entries of the constraint that an array comes from, by whatever keeps its dims; None if
    it comes from none.
    """
    equation = next((one for one in jaxpr.eqns if var in one.outvars), None)
    if equation is None:
        return None
    name, params = equation.primitive.name, equation.params
    if name == "sharding_constraint":
        entries = list(params["sharding"].spec)
        return entries + [None] * (var.aval.ndim - len(entries))
    if name in JITS:
        inner = params["jaxpr"].jaxpr
        return _entries(inner, inner.outvars[equation.outvars.index(var)])
    sources = variables(equation.invars)
    if len(sources) != 1 or len(sources[0].aval.shape) != len(var.aval.shape):
        return None
    entries = _entries(jaxpr, sources[0])
    if name == "transpose" and entries is not None:
        return [entries[dim] for dim in params["permutation"]]
    return entries if sources[0].aval.shape == var.aval.shape else None
