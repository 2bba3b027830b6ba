"""Weights in the form they are stored in, made whole where they are used, of which gradients come
as they are added up.

A function is traced with whole weights, as its author wrote it, and evaluated again with each
weight in the form it is stored in. What is not stored whole is made so in a *region* (see
`_region`), which is

- the body of a `scan` over stacked weights: a layer, all its weights together;
- a block that is marked, or whatever lies between the first and the last use of a group of weights;
- any other single equation that uses a weight.

What is stored whole *enters* where all that uses it is in sight: a layer's weights in the body of
the `scan` or where the layer is picked by its number, others at the start.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, Literal, jaxpr_as_fun

from shardlib.tracing._jaxpr import CALLS, JITS, REMATS, Stretch, inputs_of, scan_parts, variables
from shardlib.tracing._region import (
    Weight,
    WeightSlice,
    bind_whole_weight,
    reader_of,
    use,
    with_source_of,
)

MARK = "shardlib_layer"
"""The name of the `jax.jit` around a marked block, by which it is known in what was traced."""

WHOLE = "whole"
"""Stands where others have a `Weight`: a parameter that is whole all the time."""

# Cheap: done again wherever the result is used, if all that goes in is weights.
_CHEAP = {
    "broadcast_in_dim", "convert_element_type", "copy", "reshape", "rev", "sharding_constraint",
    "slice", "squeeze",
    "stop_gradient", "transpose",
}  # fmt: skip


def evaluate_on_use(function: Callable[..., Any], weights: Any, held: Any, *args: Any) -> Any:
    """`function(params, *args)`, where each parameter that has a `Weight` is whole only where it is
    used.

    `weights` has a `Weight` or `WHOLE` for each parameter, `held` a `StoredWeight` or the parameter
    itself.
    """
    described, treedef = jax.tree.flatten(weights)
    given = treedef.flatten_up_to(held)
    shapes = [
        jax.ShapeDtypeStruct(weight.shape, weight.dtype) if isinstance(weight, Weight) else one
        for weight, one in zip(described, given, strict=True)
    ]
    traced, out = jax.make_jaxpr(function, return_shape=True)(treedef.unflatten(shapes), *args)
    inputs: list[Any] = []
    for weight, one in zip(described, given, strict=True):
        inputs.append(WeightSlice(weight, *one) if isinstance(weight, Weight) else one)
    results = _evaluate(traced.jaxpr, traced.consts, [*inputs, *jax.tree.leaves(args)])
    return jax.tree.unflatten(jax.tree.structure(out), results)


@dataclass(frozen=True, eq=False)
class _Derived:
    """What a cheap equation of a jaxpr makes of a weight alone."""

    jaxpr: Jaxpr
    equation: Any
    inputs: tuple[Any, ...]


def _is_weight(value: Any) -> bool:
    return isinstance(value, WeightSlice | _Derived)


def _roots(value: Any) -> Iterable[WeightSlice]:
    if isinstance(value, WeightSlice):
        yield value
    elif isinstance(value, _Derived):
        for one in value.inputs:
            yield from _roots(one)


Entry = Any  # an array, a `WeightSlice` or a `_Derived`


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Entry], *, whole: bool = True
) -> list[Entry]:
    """Evaluate a jaxpr some of whose inputs are weights; those among its outputs are made `whole`,
    or left.
    """
    inputs = _entered(jaxpr, inputs)
    values: dict[Any, Entry] = dict(
        zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True)
    )
    last_use: dict[Any, int] = {}
    for position, equation in enumerate(jaxpr.eqns):
        last_use.update((var, position) for var in variables(equation.invars))
    last_use.update((var, len(jaxpr.eqns)) for var in variables(jaxpr.outvars))
    pending: list[Any] = []

    def evaluate(equations: list[Any], until: int, how: Callable[..., list[Entry]]) -> None:
        made = [
            var
            for equation in equations
            for var in equation.outvars
            if last_use.get(var, -1) >= until
        ]
        needed = inputs_of(equations)
        results = how(Stretch(jaxpr, equations, needed, made), [values[var] for var in needed])
        values.update(zip(made, results, strict=True))

    def catch_up(until: int) -> None:
        if pending:
            evaluate(list(pending), until, lambda stretch, inputs: stretch(inputs))
            pending.clear()

    grouped = _grouped(jaxpr, values)
    position = 0
    while position < len(jaxpr.eqns):
        first, until = jaxpr.eqns[position], grouped.get(position, position + 1)
        read = [
            atom.val if isinstance(atom, Literal) else values.get(atom) for atom in first.invars
        ]
        if until > position + 1:
            catch_up(position)
            evaluate(list(jaxpr.eqns[position:until]), until, _region)
        elif not any(map(_is_weight, read)):
            pending.append(first)
        elif first.primitive.name in _CHEAP and all(map(_is_weight, read)):
            values[first.outvars[0]] = _derive(jaxpr, first, read)
        else:
            catch_up(position)
            evaluate([first], until, _HOW.get(first.primitive.name, _region))
        position = until
    catch_up(len(jaxpr.eqns))
    outputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]
    return [_made_whole(one) for one in outputs] if whole else outputs


def _entered(jaxpr: Jaxpr, inputs: Sequence[Entry]) -> list[Entry]:
    """Of the inputs of a jaxpr, let the weights enter that are stored whole and are not taken layer
    by layer.
    """
    entered: dict[WeightSlice, Any] = {}

    def enters(var: Any, value: Entry) -> bool:
        roots = [root for root in _roots(value) if root.weight.whole is None]
        if not roots or _is_layered(jaxpr, var, roots[0], picked=isinstance(value, WeightSlice)):
            return False
        if roots[0] not in entered:
            entered[roots[0]] = bind_whole_weight(roots[0], reader_of(jaxpr, var))
        return True

    return [
        _resolve(value, entered) if enters(var, value) else value
        for var, value in zip(jaxpr.invars, inputs, strict=True)
    ]


def _is_layered(jaxpr: Jaxpr, var: Any, root: WeightSlice, picked: bool = True) -> bool:
    """Whether all that becomes of a stack of weights is that one loop takes them one by one, or
    that numbers pick some.
    """
    readers = [equation for equation in jaxpr.eqns if var in variables(equation.invars)]
    if root.taken >= root.weight.stacked or var in variables(jaxpr.outvars) or not readers:
        return False
    equation, name = readers[0], readers[0].primitive.name
    if len(readers) == 1 and variables(equation.invars).count(var) == 1:
        position = next(k for k, atom in enumerate(equation.invars) if atom is var)
        if name == "scan":
            return position >= sum(scan_parts(equation))
        if name == "convert_element_type":
            return _is_layered(jaxpr, equation.outvars[0], root, picked=False)
        if name in CALLS:
            inner = equation.params["jaxpr"]
            inner = getattr(inner, "jaxpr", inner)
            plain = name in JITS and equation.params["name"] != MARK
            return _is_layered(inner, inner.invars[position], root, picked and plain)
    numbers = [_number_picked(jaxpr, equation, root) for equation in readers]
    return picked and None not in numbers and len(set(numbers)) == len(numbers)


def _number_picked(jaxpr: Jaxpr, equation: Any, root: WeightSlice) -> int | None:
    """Which layer of a stack an equation picks by its number, to take it as it is."""
    shape = (1, *root.weight.shape[root.taken + 1 :])
    if equation.primitive.name != "slice" or equation.outvars[0].aval.shape != shape:
        return None
    readers = [one for one in jaxpr.eqns if equation.outvars[0] in variables(one.invars)]
    squeezed = (
        len(readers) == 1
        and readers[0].primitive.name == "squeeze"
        and readers[0].params["dimensions"] == (0,)
    )
    if not squeezed or equation.outvars[0] in variables(jaxpr.outvars):
        return None
    return equation.params["start_indices"][0]


def _grouped(jaxpr: Jaxpr, values: dict[Any, Entry]) -> dict[int, int]:
    """From the first use of each group of weights to behind its last, by position. What overlaps is
    one group.
    """
    groups = {
        var: {root.weight.group for root in _roots(value)} - {None} for var, value in values.items()
    }
    spans: dict[Hashable, tuple[int, int]] = {}
    for position, equation in enumerate(jaxpr.eqns):
        read = [groups.get(var, set()) for var in variables(equation.invars)]
        if equation.primitive.name in _CHEAP and all(read):
            groups[equation.outvars[0]] = set().union(*read)
            continue
        for group in set().union(*read):
            spans[group] = (spans.get(group, (position, 0))[0], position + 1)
    merged: dict[int, int] = {}
    for start, end in sorted(spans.values()):
        before = max((known for known in merged if merged[known] > start), default=start)
        merged[before] = max(end, merged.get(before, end))
    return merged


def _derive(jaxpr: Jaxpr, equation: Any, read: list[Any]) -> Entry:
    (of,) = read
    if (
        equation.primitive.name == "squeeze"
        and equation.params["dimensions"] == (0,)
        and isinstance(of, _Derived)
        and of.equation.primitive.name == "slice"
        and isinstance(root := of.inputs[0], WeightSlice)
        and root.taken < root.weight.stacked
        and of.equation.outvars[0].aval.shape == (1, *root.weight.shape[root.taken + 1 :])
    ):
        layer = root.at(of.equation.params["start_indices"][0])  # one of a stack, by its number
        return (
            bind_whole_weight(layer, reader_of(jaxpr, equation.outvars[0]))
            if root.weight.whole is None
            else layer
        )
    return _Derived(jaxpr, equation, tuple(read))


def _made_whole(value: Entry) -> Any:
    return _region(lambda values: values, [value])[0] if _is_weight(value) else value


def _resolve(value: Entry, whole: dict[WeightSlice, Any]) -> Any:
    if isinstance(value, WeightSlice):
        return whole[value]
    if isinstance(value, _Derived):
        make = Stretch(
            value.jaxpr,
            [value.equation],
            variables(value.equation.invars),
            list(value.equation.outvars),
        )
        return make([_resolve(one, whole) for one in value.inputs])[0]
    return value


def _region(function: Callable[[list[Any]], list[Any]], inputs: list[Entry]) -> list[Any]:
    """Call a function of arrays, the weights among its inputs whole for the time of the call."""
    roots = list(dict.fromkeys(root for value in inputs for root in _roots(value)))
    entered = {root: bind_whole_weight(root, None) for root in roots if root.weight.whole is None}
    roots = [root for root in roots if root not in entered]
    inputs = [
        _resolve(value, entered) if entered.keys() & set(_roots(value)) else value
        for value in inputs
    ]
    plain = [value for value in inputs if not _is_weight(value)]

    def body(plain: list[Any], whole: dict[WeightSlice, Any]) -> list[Any]:
        rest = iter(plain)
        return function(
            [_resolve(value, whole) if _is_weight(value) else next(rest) for value in inputs]
        )

    return use(body, plain, roots) if roots else function(inputs)


def _parts(stretch: Stretch, inputs: list[Entry]) -> tuple[Any, list[Entry]]:
    (equation,) = stretch.equations
    given = dict(zip(stretch.needed, inputs, strict=True))
    return equation, [
        atom.val if isinstance(atom, Literal) else given[atom] for atom in equation.invars
    ]


def _picked(stretch: Stretch, outputs: Sequence[Any]) -> list[Any]:
    made = set(stretch.made)
    return [
        out for var, out in zip(stretch.equations[0].outvars, outputs, strict=True) if var in made
    ]


def _jit(stretch: Stretch, inputs: list[Entry]) -> list[Entry]:
    equation, entries = _parts(stretch, inputs)
    inner = equation.params["jaxpr"]
    if equation.params["name"] == MARK and not has_layers(
        inner.jaxpr, list(map(_is_weight, entries))
    ):
        return _region(stretch, inputs)
    return _picked(stretch, _evaluate(inner.jaxpr, inner.consts, entries, whole=False))


def _checkpoint(stretch: Stretch, inputs: list[Entry]) -> list[Entry]:
    equation, entries = _parts(stretch, inputs)
    inner = equation.params["jaxpr"]
    if not has_layers(inner, list(map(_is_weight, entries))):
        return _region(stretch, inputs)
    roots = list(dict.fromkeys(root for value in entries for root in _roots(value)))

    def block(plain: list[Any], held: list[Any]) -> list[Any]:
        rest = iter(plain)
        now = {
            root: replace(root, stored=stored, zero=zero)
            for root, (stored, zero) in zip(roots, held, strict=True)
        }
        return _evaluate(
            inner,
            [],
            [_replaced(value, now) if _is_weight(value) else next(rest) for value in entries],
        )

    block = jax.checkpoint(
        block, policy=equation.params["policy"], prevent_cse=equation.params["prevent_cse"]
    )
    return _picked(
        stretch,
        block(
            [value for value in entries if not _is_weight(value)],
            [(root.stored, root.zero) for root in roots],
        ),
    )


def _replaced(value: Entry, now: dict[WeightSlice, WeightSlice]) -> Entry:
    if isinstance(value, _Derived):
        return _Derived(
            value.jaxpr, value.equation, tuple(_replaced(one, now) for one in value.inputs)
        )
    return now.get(value, value) if isinstance(value, WeightSlice) else value


def _scan(stretch: Stretch, inputs: list[Entry]) -> list[Entry]:
    equation, entries = _parts(stretch, inputs)
    body = equation.params["jaxpr"]
    constants, carries = scan_parts(equation)
    before, scanned = entries[: constants + carries], entries[constants + carries :]
    roots = [root for value in scanned if _is_weight(value) and (root := _stack(value)) is not None]
    roots = list(dict.fromkeys(roots))
    if not roots:
        return _region(stretch, inputs)
    for root in roots:
        if root.taken >= root.weight.stacked and root.weight.whole is not None:
            raise ValueError(
                f"`{root.weight.path}` of shape {root.weight.shape} is scanned over its dim "
                f"{root.taken}, along which it is split among devices, so no device has a whole "
                "layer of any other's to gather. Name that dim "
                '`"layers"`, as `transform_metadata={nnx.PARTITION_NAME: "layers"}` does: it is '
                "left whole."
            )
    before = [_made_whole(value) for value in before]
    scanned = [
        value if not _is_weight(value) or _stack(value) is not None else _made_whole(value)
        for value in scanned
    ]

    def step(
        constants_now: list[Any], carry: list[Any], scanned_now: Any
    ) -> tuple[list[Any], list[Any]]:
        number, plain, held = scanned_now
        rest = iter(plain)
        now = {
            root: root.layer(stored, root.zero if zero is None else zero, number)
            for root, (stored, zero) in zip(roots, held, strict=True)
        }
        layer = [_replaced(value, now) if _is_weight(value) else next(rest) for value in scanned]
        within = _entered(body.jaxpr, [*constants_now, *carry, *layer])
        if has_layers(body.jaxpr, list(map(_is_weight, within))):
            outputs = _evaluate(body.jaxpr, body.consts, within)
        else:
            outputs = _region(lambda values: jaxpr_as_fun(body)(*values), within)
        return outputs[:carries], outputs[carries:]

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}

    def scan(before: list[Any], plain: list[Any], held: list[Any]) -> Any:
        constants_now, carry = before[:constants], before[constants:]
        numbers = jnp.arange(options["length"])
        return lax.scan(
            functools.partial(step, constants_now), carry, (numbers, plain, held), **options
        )

    plain = [value for value in scanned if not _is_weight(value)]
    carry, stacked = with_source_of(
        equation, scan, before, plain, [root.scanned for root in roots], deep=False
    )
    return _picked(stretch, [*carry, *stacked])


def _stack(value: Entry) -> WeightSlice | None:
    """The stacked weight of which each iteration gets one: as it is, or in another dtype."""
    while isinstance(value, _Derived) and value.equation.primitive.name == "convert_element_type":
        (value,) = value.inputs
    return value if isinstance(value, WeightSlice) else None


_HOW: dict[str, Callable[[Stretch, list[Entry]], list[Entry]]] = {
    "scan": _scan,
    **dict.fromkeys(JITS, _jit),
    **dict.fromkeys(REMATS, _checkpoint),
}


def has_layers(jaxpr: Jaxpr, weights: Sequence[bool]) -> bool:
    """Whether a jaxpr scans over weights, or has a marked block that uses some."""
    known = {var for var, is_weight in zip(jaxpr.invars, weights, strict=True) if is_weight}
    for equation in jaxpr.eqns:
        read = [not isinstance(atom, Literal) and atom in known for atom in equation.invars]
        name = equation.primitive.name
        if not any(read):
            continue
        if name in _CHEAP and all(read):
            known.update(equation.outvars)
        elif name == "scan":
            if any(read[sum(scan_parts(equation)) :]):
                return True
        elif name in CALLS:
            inner = equation.params["jaxpr"]
            if equation.params.get("name") == MARK or has_layers(
                getattr(inner, "jaxpr", inner), read
            ):
                return True
    return False
