"""Weights that are whole only where they are used: a traced function, evaluated with what is stored of its weights.

A function is traced with whole weights, as its author wrote it, and evaluated again with each weight in the form it is
stored in. Where it uses one, the weight is made whole, used and dropped; the backward pass makes it whole again, and
turns its gradient at once into the form in which gradients are summed. What is done at a time, a *region*, is

- the body of a `scan` over stacked weights: a layer, all its weights together;
- a block that is marked, or whatever lies between the first and the last use of a group of weights;
- any other single equation that uses a weight.

A region keeps for its backward pass what JAX would keep, except weights and what is made of weights alone.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

MARK = "shardlib_layer"
"""The name of the `jax.jit` around a marked block, by which it is known in what was traced."""

WHOLE = "whole"
"""Stands where others have a `Weight`: a parameter that is whole all the time."""

# Cheap: done again wherever the result is used, if all that goes in is weights.
_CHEAP = {
    "broadcast_in_dim", "convert_element_type", "copy", "reshape", "rev", "sharding_constraint", "slice", "squeeze",
    "stop_gradient", "transpose",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Weight:
    """How a weight is made whole, and what becomes of its gradient.

    `whole(stored, taken)` makes it, `reduced(gradient, stored, taken)` turns its gradient into the shape and dtype of
    the zero that is held for it; None is a frozen weight. `taken` is how many leading dims loops have taken off, at most
    `stacked`. Weights of one `group` are made whole together; `late` is no earlier than what they are used with.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    whole: Callable[[Any, int], jax.Array]
    reduced: Callable[[jax.Array, Any, int], jax.Array] | None
    stacked: int
    group: Hashable = None
    late: bool = True


class Held(NamedTuple):
    """What stands for a weight: what is stored of it, and a zero to which the derivative is taken (frozen: None)."""

    stored: Any
    zero: Any


def evaluate_on_use(function: Callable[..., Any], weights: Any, held: Any, *args: Any) -> Any:
    """`function(params, *args)`, where each parameter that has a `Weight` is whole only where it is used.

    `weights` has a `Weight` or `WHOLE` for each parameter, `held` a `Held` or the parameter itself.
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
        inputs.append(_Root(weight, one, 0) if isinstance(weight, Weight) else one)
    results = _evaluate(traced.jaxpr, traced.consts, [*inputs, *jax.tree.leaves(args)])
    return jax.tree.unflatten(jax.tree.structure(out), results)


@dataclass(frozen=True, eq=False)
class _Root:
    """A weight, less the dims that loops have taken off."""

    weight: Weight
    held: Held
    taken: int

    def whole(self, stored: Any) -> jax.Array:
        return self.weight.whole(stored, self.taken)

    def reduced(self, gradient: jax.Array, stored: Any) -> jax.Array:
        assert self.weight.reduced is not None
        return self.weight.reduced(gradient, stored, self.taken)

    def at(self, index: int) -> "_Root":
        return _Root(self.weight, jax.tree.map(lambda x: x[index], self.held), self.taken + 1)


@dataclass(frozen=True, eq=False)
class _Derived:
    """What a cheap equation makes of weights alone."""

    equation: Any
    inputs: tuple[Any, ...]


def _is_weight(value: Any) -> bool:
    return isinstance(value, _Root | _Derived)


def _roots(value: Any) -> Iterable[_Root]:
    if isinstance(value, _Root):
        yield value
    elif isinstance(value, _Derived):
        for one in value.inputs:
            yield from _roots(one)


Entry = Any  # an array, a `_Root` or a `_Derived`


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], inputs: Sequence[Entry], *, whole: bool = True) -> list[Entry]:
    """Evaluate a jaxpr some of whose inputs are weights; those among its outputs are made `whole`, or left."""
    values: dict[Any, Entry] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    last_use: dict[Any, int] = {}
    for position, equation in enumerate(jaxpr.eqns):
        last_use.update((var, position) for var in _variables(equation.invars))
    last_use.update((var, len(jaxpr.eqns)) for var in _variables(jaxpr.outvars))
    pending: list[Any] = []

    def evaluate(equations: list[Any], until: int, how: Callable[..., list[Entry]]) -> None:
        made = [var for equation in equations for var in equation.outvars if last_use.get(var, -1) >= until]
        needed = _inputs_of(equations)
        results = how(_Stretch(jaxpr, equations, needed, made), [values[var] for var in needed])
        values.update(zip(made, results, strict=True))

    def catch_up(until: int) -> None:
        if pending:
            evaluate(list(pending), until, lambda stretch, inputs: stretch(inputs))
            pending.clear()

    grouped = _grouped(jaxpr, values)
    position = 0
    while position < len(jaxpr.eqns):
        first, until = jaxpr.eqns[position], grouped.get(position, position + 1)
        read = [atom.val if isinstance(atom, Literal) else values.get(atom) for atom in first.invars]
        if until > position + 1:
            catch_up(position)
            evaluate(list(jaxpr.eqns[position:until]), until, _region)
        elif not any(map(_is_weight, read)):
            pending.append(first)
        elif first.primitive.name in _CHEAP and all(map(_is_weight, read)):
            values[first.outvars[0]] = _derive(first, read)
        else:
            catch_up(position)
            evaluate([first], until, _HOW.get(first.primitive.name, _region))
        position = until
    catch_up(len(jaxpr.eqns))
    outputs = [atom.val if isinstance(atom, Literal) else values[atom] for atom in jaxpr.outvars]
    return [_made_whole(one) for one in outputs] if whole else outputs


class _Stretch(NamedTuple):
    """Some equations of a jaxpr as a function. JAX's own evaluation keeps the lines that equations came from."""

    jaxpr: Jaxpr
    equations: list[Any]
    needed: list[Any]
    made: list[Any]

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        effects = frozenset().union(*(equation.effects for equation in self.equations))
        jaxpr = self.jaxpr.replace(
            constvars=[], invars=self.needed, outvars=self.made, eqns=self.equations, effects=effects
        )
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*inputs)


def _variables(atoms: Iterable[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def _inputs_of(equations: Sequence[Any]) -> list[Any]:
    """What equations read and do not make."""
    made: set[Any] = set()
    needed: dict[Any, None] = {}
    for equation in equations:
        needed.update((var, None) for var in _variables(equation.invars) if var not in made)
        made.update(equation.outvars)
    return list(needed)


def _grouped(jaxpr: Jaxpr, values: dict[Any, Entry]) -> dict[int, int]:
    """From the first use of each group of weights to behind its last, by position. What overlaps is one group."""
    groups = {var: {root.weight.group for root in _roots(value)} - {None} for var, value in values.items()}
    spans: dict[Hashable, tuple[int, int]] = {}
    for position, equation in enumerate(jaxpr.eqns):
        read = [groups.get(var, set()) for var in _variables(equation.invars)]
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


def _derive(equation: Any, read: list[Any]) -> Entry:
    (of,) = read
    if (
        equation.primitive.name == "squeeze"
        and equation.params["dimensions"] == (0,)
        and isinstance(of, _Derived)
        and of.equation.primitive.name == "slice"
        and isinstance(root := of.inputs[0], _Root)
        and root.taken < root.weight.stacked
        and of.equation.outvars[0].aval.shape == (1, *root.weight.shape[root.taken + 1 :])
    ):
        return root.at(of.equation.params["start_indices"][0])  # one of a stack, by its number
    return _Derived(equation, tuple(read))


def _made_whole(value: Entry) -> Any:
    return _use(lambda _, of: [_resolve(value, of)], [], list(_roots(value)))[0] if _is_weight(value) else value


def _resolve(value: Entry, whole: dict[_Root, Any]) -> Any:
    if isinstance(value, _Root):
        return whole[value]
    if isinstance(value, _Derived):
        return value.equation.primitive.bind(*(_resolve(one, whole) for one in value.inputs), **value.equation.params)
    return value


def _region(function: Callable[[list[Any]], list[Any]], inputs: list[Entry]) -> list[Any]:
    """Call a function of arrays, the weights among its inputs whole for the time of the call."""
    roots = list(dict.fromkeys(root for value in inputs for root in _roots(value)))
    plain = [value for value in inputs if not _is_weight(value)]

    def body(plain: list[Any], whole: dict[_Root, Any]) -> list[Any]:
        rest = iter(plain)
        return function([_resolve(value, whole) if _is_weight(value) else next(rest) for value in inputs])

    return _use(body, plain, roots)


def _use(body: Callable[[list[Any], dict[_Root, Any]], list[Any]], plain: list[Any], roots: list[_Root]) -> list[Any]:
    """`body(plain, weights)`, which keeps for its backward pass neither weights nor what is made of them alone."""
    trained = [root for root in roots if root.weight.reduced is not None]
    frozen = [root for root in roots if root.weight.reduced is None]
    smooth = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in plain]
    floats = [x for x, is_smooth in zip(plain, smooth, strict=True) if is_smooth]
    others = [x for x, is_smooth in zip(plain, smooth, strict=True) if not is_smooth]
    kinds: list[bool] = []
    trees: list[Any] = []

    def forward(floats: Any, others: Any, trained_whole: Any, frozen_whole: Any) -> Any:
        def run(floats: Any, trained_whole: Any) -> Any:
            of_floats, of_others = iter(floats), iter(others)
            whole = dict(zip([*trained, *frozen], [*trained_whole, *frozen_whole], strict=True))
            outputs = body([next(of_floats) if is_smooth else next(of_others) for is_smooth in smooth], whole)
            kinds[:] = [jnp.issubdtype(jnp.result_type(x), jnp.inexact) for x in outputs]
            return tuple(
                [x for x, is_smooth in zip(outputs, kinds, strict=True) if is_smooth == want] for want in (True, False)
            )

        out, backward, aux = jax.vjp(run, floats, trained_whole, has_aux=True)
        residuals, tree = jax.tree.flatten(backward)
        trees[:] = [tree]
        return out, aux, residuals

    def shapes(of: list[_Root]) -> list[Any]:
        return [jax.ShapeDtypeStruct(root.weight.shape[root.taken :], root.weight.dtype) for root in of]

    traced = jax.make_jaxpr(forward)(floats, others, shapes(trained), shapes(frozen))
    jaxpr, (tree,) = traced.jaxpr, trees
    count = len(kinds)
    outputs, residuals = jaxpr.outvars[:count], jaxpr.outvars[count:]
    of_weights = set(jaxpr.invars[len(plain) :])
    for equation in jaxpr.eqns:
        if not equation.effects and of_weights.issuperset(_variables(equation.invars)):
            of_weights.update(equation.outvars)
    kept = list(dict.fromkeys(var for var in _variables(residuals) if var not in of_weights))
    again = list(dict.fromkeys(var for var in _variables(residuals) if var in of_weights))

    reads = [
        next((eqn for eqn in jaxpr.eqns if var in _variables(eqn.invars)), None) for var in jaxpr.invars[len(plain) :]
    ]

    def make(stored: list[Any]) -> list[Any]:
        return [
            _because(use, root.whole, one) for root, use, one in zip([*trained, *frozen], reads, stored, strict=True)
        ]

    def evaluated(floats: Any, others: Any, stored: Any, wanted: list[Any]) -> list[Any]:
        if any(root.weight.late for root in roots):
            floats, others, stored = _together(floats, others, stored)
        return jaxpr_as_fun(ClosedJaxpr(jaxpr.replace(outvars=wanted), traced.consts))(*floats, *others, *make(stored))

    @jax.custom_vjp
    def used(floats: Any, others: Any, stored: Any, zeros: Any) -> Any:
        del zeros
        return evaluated(floats, others, stored, outputs)

    def forwards(floats: Any, others: Any, stored: Any, zeros: Any) -> Any:
        del zeros
        results = evaluated(floats, others, stored, [*outputs, *kept])
        return results[:count], (results[count:], stored)

    def backwards(saved: Any, gradient: Any) -> Any:
        of_kept, stored = saved
        gradient = gradient[: sum(kinds)]
        if any(root.weight.late for root in roots):
            gradient, stored = _together(gradient, stored)
        whole = make(stored)
        values = dict(zip(kept, of_kept, strict=True))
        values.update(zip(again, _again(traced, again, len(plain), whole), strict=True))
        backward = tree.unflatten([atom.val if isinstance(atom, Literal) else values[atom] for atom in residuals])
        of_floats, of_trained = backward(gradient)
        reduced = [
            _because(use, root.reduced, g, one)
            for root, use, g, one in zip(trained, reads, of_trained, stored, strict=False)
        ]
        return of_floats, None, None, reduced

    used.defvjp(forwards, backwards)
    results = used(
        floats, others, [root.held.stored for root in [*trained, *frozen]], [root.held.zero for root in trained]
    )
    of_smooth, of_rest = iter(results[: sum(kinds)]), iter(results[sum(kinds) :])
    return [next(of_smooth) if is_smooth else next(of_rest) for is_smooth in kinds]


def _because(use: Any, function: Callable[..., Any], *args: Any, deep: bool = True) -> Any:
    """Call a function as if from the line of an equation, which is to blame for it; `deep`, for what it calls too."""
    if use is None:
        return function(*args)
    traced, out = jax.make_jaxpr(function, return_shape=True)(*args)
    blamed = _relocated(traced.jaxpr, use.source_info.traceback, deep)
    results = jaxpr_as_fun(ClosedJaxpr(blamed, traced.consts))(*jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out), results)


def _relocated(jaxpr: Jaxpr, traceback: Any, deep: bool) -> Jaxpr:
    def relocated(equation: Any) -> Any:
        inner = {
            name: _relocated(value, traceback, deep)
            for name, value in equation.params.items()
            if deep and isinstance(value, Jaxpr)
        }
        return equation.replace(
            source_info=equation.source_info.replace(traceback=traceback), params={**equation.params, **inner}
        )

    return jaxpr.replace(eqns=[relocated(equation) for equation in jaxpr.eqns])


def _again(traced: Any, wanted: list[Any], before: int, whole: list[Any]) -> list[Any]:
    """What is made of weights alone, made again."""
    needed, equations = set(wanted), []
    for equation in reversed(traced.jaxpr.eqns):
        if needed.intersection(equation.outvars):
            equations.append(equation)
            needed.update(_variables(equation.invars))
    stretch = _Stretch(traced.jaxpr, equations[::-1], traced.jaxpr.invars[before:], wanted)
    return stretch(whole) if wanted else []


def _together(*trees: Any) -> Any:
    """Nothing of it before all of it is there. Keys are no arrays to a compiler."""
    leaves, treedef = jax.tree.flatten(trees)
    numbers = [k for k, leaf in enumerate(leaves) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    for k, leaf in zip(numbers, lax.optimization_barrier([leaves[k] for k in numbers]), strict=True):
        leaves[k] = leaf
    return treedef.unflatten(leaves)


def _parts(stretch: _Stretch, inputs: list[Entry]) -> tuple[Any, list[Entry]]:
    (equation,) = stretch.equations
    given = dict(zip(stretch.needed, inputs, strict=True))
    return equation, [atom.val if isinstance(atom, Literal) else given[atom] for atom in equation.invars]


def _picked(stretch: _Stretch, outputs: Sequence[Any]) -> list[Any]:
    made = set(stretch.made)
    return [out for var, out in zip(stretch.equations[0].outvars, outputs, strict=True) if var in made]


def _jit(stretch: _Stretch, inputs: list[Entry]) -> list[Entry]:
    equation, entries = _parts(stretch, inputs)
    inner = equation.params["jaxpr"]
    if equation.params["name"] == MARK and not _has_layers(inner.jaxpr, list(map(_is_weight, entries))):
        return _region(stretch, inputs)
    return _picked(stretch, _evaluate(inner.jaxpr, inner.consts, entries, whole=False))


def _checkpoint(stretch: _Stretch, inputs: list[Entry]) -> list[Entry]:
    equation, entries = _parts(stretch, inputs)
    inner = equation.params["jaxpr"]
    if not _has_layers(inner, list(map(_is_weight, entries))):
        return _region(stretch, inputs)
    roots = list(dict.fromkeys(root for value in entries for root in _roots(value)))

    def block(plain: list[Any], held: list[Held]) -> list[Any]:
        rest = iter(plain)
        now = dict(zip(roots, (_Root(r.weight, h, r.taken) for r, h in zip(roots, held, strict=True)), strict=True))
        return _evaluate(inner, [], [_replaced(value, now) if _is_weight(value) else next(rest) for value in entries])

    block = jax.checkpoint(block, policy=equation.params["policy"], prevent_cse=equation.params["prevent_cse"])
    return _picked(stretch, block([value for value in entries if not _is_weight(value)], [root.held for root in roots]))


def _replaced(value: Entry, now: dict[_Root, _Root]) -> Entry:
    if isinstance(value, _Derived):
        return _Derived(value.equation, tuple(_replaced(one, now) for one in value.inputs))
    return now.get(value, value) if isinstance(value, _Root) else value


def _scan(stretch: _Stretch, inputs: list[Entry]) -> list[Entry]:
    equation, entries = _parts(stretch, inputs)
    body = equation.params["jaxpr"]
    constants, carries = scan_parts(equation)
    before, scanned = entries[: constants + carries], entries[constants + carries :]
    roots = [root for value in scanned if _is_weight(value) and (root := _stack(value)) is not None]
    roots = list(dict.fromkeys(roots))
    if not roots:
        return _region(stretch, inputs)
    for root in roots:
        if root.taken >= root.weight.stacked:
            raise ValueError(
                f"`{root.weight.path}` of shape {root.weight.shape} is scanned over its dim {root.taken}, along which it is "
                "split among devices, so no device has a whole layer of any other's to gather. Name that dim "
                '`"layers"`, as `transform_metadata={nnx.PARTITION_NAME: "layers"}` does: it is left whole.'
            )
    before = [_made_whole(value) for value in before]
    scanned = [value if not _is_weight(value) or _stack(value) is not None else _made_whole(value) for value in scanned]

    def step(constants_now: list[Any], carry: list[Any], scanned_now: Any) -> tuple[list[Any], list[Any]]:
        plain, held = scanned_now
        rest = iter(plain)
        now = dict(zip(roots, (_Root(r.weight, h, r.taken + 1) for r, h in zip(roots, held, strict=True)), strict=True))
        layer = [_replaced(value, now) if _is_weight(value) else next(rest) for value in scanned]
        within = [*constants_now, *carry, *layer]
        if _has_layers(body.jaxpr, list(map(_is_weight, within))):
            outputs = _evaluate(body.jaxpr, body.consts, within)
        else:
            outputs = _region(lambda values: jaxpr_as_fun(body)(*values), within)
        return outputs[:carries], outputs[carries:]

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}

    def scan(before: list[Any], plain: list[Any], held: list[Held]) -> Any:
        constants_now, carry = before[:constants], before[constants:]
        return lax.scan(functools.partial(step, constants_now), carry, (plain, held), **options)

    plain = [value for value in scanned if not _is_weight(value)]
    carry, stacked = _because(equation, scan, before, plain, [root.held for root in roots], deep=False)
    return _picked(stretch, [*carry, *stacked])


def _stack(value: Entry) -> _Root | None:
    """The stacked weight of which each iteration gets one: as it is, or in another dtype."""
    while isinstance(value, _Derived) and value.equation.primitive.name == "convert_element_type":
        (value,) = value.inputs
    return value if isinstance(value, _Root) else None


_HOW: dict[str, Callable[[_Stretch, list[Entry]], list[Entry]]] = {
    "scan": _scan, "jit": _jit, "pjit": _jit, "checkpoint": _checkpoint, "remat2": _checkpoint,
}  # fmt: skip


def _has_layers(jaxpr: Jaxpr, weights: Sequence[bool]) -> bool:
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
        elif name in ("jit", "pjit", "checkpoint", "remat2"):
            inner = equation.params["jaxpr"]
            if equation.params.get("name") == MARK or _has_layers(getattr(inner, "jaxpr", inner), read):
                return True
    return False


def scan_parts(equation: Any) -> tuple[int, int]:
    """How many constants and how many carries a `scan` has, its first inputs; versions of JAX keep count differently.

    Only what is scanned, or stacked, has another rank outside than inside.
    """
    body = equation.params["jaxpr"].jaxpr
    carries = _alike(equation.outvars, body.outvars)
    return _alike(equation.invars, body.invars) - carries, carries


def _alike(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True))
