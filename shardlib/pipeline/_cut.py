"""A loss, traced, cut at its loops over layers: what comes before each, one layer of each, and what
comes after the last.

Whoever writes a model need not know where it will be cut: at the loops over stacked weights,
`scan`s. What goes into one is of five kinds: the stacked weights; what goes from layer to layer; of
what is the same for all layers, what is made of weights alone, which every stage makes once; what
is made of weights and examples, or of what an earlier loop gave, which travels along, so that its
gradient comes back; and what is made of examples alone, which every stage makes whenever it needs
it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardlib.pipeline._loop import Loop, Shapes, aside, body_of, outputs_behind
from shardlib.tracing._jaxpr import (
    JITS,
    behind,
    inlined,
    inputs_of,
    line_of,
    made_of,
    scan_parts,
    variables,
)
from shardlib.tracing._layer_uses import has_layers

Arrays = list[Any]


@dataclass(frozen=True, eq=False)
class Cut:
    """A function of weights and of inputs, cut at its `loops`. Made by `cut`."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    loops: tuple[Loop, ...]
    outer: tuple[int, ...]  # the weights that are not stacked
    trained: frozenset[int]  # of all weights
    count: int  # of all weights
    # Of which trained weights a value is made, other than through loops.
    depends: dict[Any, frozenset[int]]

    # On the wire, and in buffers, what travels through different loops shares places where it is
    # alike.

    @cached_property
    def _places(self) -> tuple[Shapes, list[list[int]]]:
        wire: Shapes = []
        places: list[list[int]] = []
        for loop in self.loops:
            free = list(range(len(wire)))
            mine = []
            for one in loop.travelling:
                place = next(
                    (k for k in free if (wire[k].shape, wire[k].dtype) == (one.shape, one.dtype)),
                    None,
                )
                if place is None:
                    place = len(wire)
                    wire.append(one)
                else:
                    free.remove(place)
                mine.append(place)
            places.append(mine)
        return wire, places

    @property
    def wire(self) -> Shapes:
        """What is sent from part to part."""
        return self._places[0]

    @cached_property
    def wire_back(self) -> Shapes:
        """Its gradients."""
        return [one for one in self.wire if jnp.issubdtype(one.dtype, jnp.inexact)]

    def _places_of(self, loop: int, back: bool) -> list[int]:
        places = self._places[1][loop]
        if not back:
            return places
        floats = [k for k, one in enumerate(self.wire) if jnp.issubdtype(one.dtype, jnp.inexact)]
        return [floats.index(k) for k in places if k in floats]

    def packed(self, loop: int, arrays: Arrays, *, back: bool = False) -> Arrays:
        """What travels through a loop, or its gradients, as it is sent."""
        found = dict(zip(self._places_of(loop, back), arrays, strict=True))
        shapes = self.wire_back if back else self.wire
        return [
            found[k] if k in found else jnp.zeros(one.shape, one.dtype)
            for k, one in enumerate(shapes)
        ]

    def unpacked(self, loop: int, sent: Arrays, *, back: bool = False) -> Arrays:
        """The arrays that travel through a loop, or their gradients, out of what was sent."""
        return [sent[k] for k in self._places_of(loop, back)]

    # What is not in a loop.

    def _values(self, outer: Arrays, inputs: Arrays) -> dict[Any, Any]:
        """Of constants, weights and inputs, and of what loops make of these alone."""
        weights = dict(zip([self.jaxpr.invars[k] for k in self.outer], outer, strict=True))
        given = zip(self.jaxpr.invars[self.count :], inputs, strict=True)
        values = {
            **dict(zip(self.jaxpr.constvars, self.consts, strict=True)),
            **weights,
            **dict(given),
        }
        for loop in self.loops:
            if loop.apart:
                found = aside(loop, *self._fixed(loop, values))
                values |= dict(
                    zip([loop.equation.outvars[k] for k in loop.apart], found, strict=True)
                )
        return values

    def _fixed(self, loop: Loop, values: dict[Any, Any]) -> tuple[Arrays, Arrays]:
        same, plain = ([loop.equation.invars[k] for k in of] for of in (loop.same, loop.plain))
        made = made_of(self.jaxpr, [*same, *plain], values)
        return made[: len(same)], made[len(same) :]

    def _after(self, loop: int, travelled: Arrays) -> dict[Any, Any]:
        names = self.loops[loop].leaving
        return {name: x for name, x in zip(names, travelled, strict=True) if name is not None}

    def start(self, loop: int, outer: Arrays, inputs: Arrays, travelled: Arrays) -> Arrays:
        """What travels to the first part of a loop, made of what comes out of the last of the loop
        before.
        """
        of = self.loops[loop]
        values = self._values(outer, inputs) | (self._after(loop - 1, travelled) if loop else {})
        made = [jnp.asarray(x) for x in made_of(self.jaxpr, [*of.entering, *of.passing], values)]
        return made + [jnp.zeros(one.shape, one.dtype) for one in of.travelling[len(made) :]]

    def fixed(self, loop: int, outer: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        """What every stage makes for itself: what is the same for all layers, and what is
        stacked.
        """
        return self._fixed(self.loops[loop], self._values(outer, inputs))

    def shared(self, loop: int, outer: Arrays) -> tuple[Arrays, Arrays]:
        """What is made of weights alone, trained ones among them, and of frozen ones."""
        of, names = self.loops[loop], [self.jaxpr.invars[k] for k in self.outer]
        values = dict(zip([*self.jaxpr.constvars, *names], [*self.consts, *outer], strict=True))
        made = made_of(self.jaxpr, [of.equation.invars[k] for k in (*of.moved, *of.still)], values)
        return made[: len(of.moved)], made[len(of.moved) :]

    def after(
        self, outer: Arrays, inputs: Arrays, travelled: Arrays, wanted: Sequence[int]
    ) -> Arrays:
        """Of all outputs those `wanted`, from what comes out of the last part."""
        values = self._values(outer, inputs) | self._after(len(self.loops) - 1, travelled)
        return made_of(self.jaxpr, [self.jaxpr.outvars[k] for k in wanted], values)

    def aside(self, outer: Arrays, inputs: Arrays, wanted: Sequence[int]) -> Arrays | None:
        """Of all outputs those `wanted`, if none is made by the layers, else nothing."""
        atoms = [self.jaxpr.outvars[k] for k in wanted]
        values = self._values(outer, inputs)
        if any(
            _loops_behind(self.jaxpr, [atom], self.loops) for atom in atoms if atom not in values
        ):
            return None
        return made_of(self.jaxpr, atoms, values)

    def unchanged(self, output: int, given: int) -> bool:
        """Whether an output is one of the inputs, be it that a loop took it layer by layer and gave
        it back.
        """
        one, other = self.jaxpr.outvars[output], self.jaxpr.invars[self.count + given]
        for loop in self.loops:
            if one in loop.equation.outvars[loop.parts[1] :]:
                body = body_of(loop.equation).jaxpr
                back = body.outvars[loop.equation.outvars.index(one)]
                one = next(
                    (
                        atom
                        for var, atom in zip(body.invars, loop.equation.invars, strict=True)
                        if var is back
                    ),
                    one,
                )
        return one is other

    def reaching(self, wanted: Sequence[Any]) -> list[int]:
        """The outer weights, by number, that some values are computed from outside the loops."""
        found = frozenset().union(
            *(self.depends.get(atom, frozenset()) for atom in variables(wanted))
        )
        return [k for k, of in enumerate(self.outer) if of in found]

    def enter(self, loop: int) -> list[int]:
        """What travels to the first part of a loop."""
        return self.reaching(self.loops[loop].entering)

    def share(self, loop: int) -> list[int]:
        """What is made of weights alone."""
        return self.reaching([self.loops[loop].equation.invars[k] for k in self.loops[loop].moved])

    @cached_property
    def leave(self) -> list[int]:
        """The first output, after the last loop."""
        return self.reaching(self.jaxpr.outvars[:1])


def _loops_behind(jaxpr: Jaxpr, wanted: Sequence[Any], loops: Sequence[Loop]) -> set[int]:
    """Out of which loops come what `wanted` is made of, at last; their numbers."""
    return {number for number, _ in outputs_behind(jaxpr, wanted, loops)}


def _moves(atom: Any, depends: dict[Any, frozenset[int]]) -> bool:
    return (
        not isinstance(atom, Literal)
        and bool(depends.get(atom))
        and jnp.issubdtype(atom.aval.dtype, jnp.inexact)
    )


def cut(
    function: Callable[..., Any],
    weights: Sequence[Any],
    inputs: Sequence[Any],
    paths: Sequence[str],
    stacked: Sequence[str | None],
    trained: Sequence[bool],
    names: Sequence[str],
) -> Cut:
    """Trace `function(weights, inputs)`, two lists, and cut it where it loops over the stacked
    weights.

    `stacked` says of each weight the name of its stacked dim, if it has one; the loops come in the
    order of `names`.
    """
    traced = jax.make_jaxpr(function)(list(weights), list(inputs))
    count = len(weights)
    _check_effects(traced)
    flat = _with_loops_outside(
        traced, [*[name is not None for name in stacked], *[False] * len(inputs)]
    )
    jaxpr = flat.jaxpr
    of = dict(zip(jaxpr.invars[:count], range(count), strict=False))
    stack = {var: k for var, k in of.items() if stacked[k] is not None}
    found = [
        (
            equation,
            [
                stack[atom]
                for atom in variables(equation.invars[sum(scan_parts(equation)) :])
                if atom in stack
            ],
        )
        for equation in jaxpr.eqns
        if equation.primitive.name == "scan"
    ]
    found = [(equation, over) for equation, over in found if over]
    _check_loops(jaxpr, found, paths, stacked, names)
    loop_of = {k: equation for equation, over in found for k in over}
    for var, k in stack.items():
        _check_reader(jaxpr, var, paths[k], loop_of.get(k))
    equations = [equation for equation, _ in found]
    depends: dict[Any, frozenset[int]] = {
        var: frozenset({k}) for var, k in of.items() if trained[k] and stacked[k] is None
    }
    of_weights = {var: frozenset({k}) for var, k in of.items() if stacked[k] is None}
    of_inputs: dict[Any, frozenset[int]] = dict.fromkeys(jaxpr.invars[count:], frozenset({0}))
    for equation in jaxpr.eqns:
        for known, stops in ((depends, "stop_gradient"), (of_weights, ""), (of_inputs, "")):
            found_of = frozenset().union(
                *(known.get(var, frozenset()) for var in variables(equation.invars))
            )
            if found_of and equation not in equations and equation.primitive.name != stops:
                known.update(dict.fromkeys(equation.outvars, found_of))
    loops: list[Loop] = []
    for equation in equations:
        places = [
            k
            for k, atom in enumerate(equation.invars)
            if not isinstance(atom, Literal) and atom in stack
        ]
        places.sort(key=lambda k: (not trained[of[equation.invars[k]]], k))
        along, moved, still = [], [], []
        for k, atom in enumerate(equation.invars[: scan_parts(equation)[0]]):
            if isinstance(atom, Literal):
                continue
            if outputs_behind(jaxpr, [atom], loops) or (atom in of_weights and atom in of_inputs):
                along.append(k)
            elif atom in of_weights:
                (moved if _moves(atom, depends) else still).append(k)
        loop = Loop(
            equation,
            tuple(places),
            tuple(of[equation.invars[k]] for k in places),
            tuple(along),
            tuple(moved),
            tuple(still),
            (),
            (),
            (),
        )
        whole = {
            k: of_weights[atom]
            for k, atom in enumerate(equation.invars)
            if not isinstance(atom, Literal)
            and atom in of_weights
            and (atom not in of_inputs or _moves(atom, depends))
        }
        _check_inputs(jaxpr, loop, loops, whole, paths)
        loops.append(_with_outputs(jaxpr, loop))
    wanted = [*[loop.entering for loop in loops[1:]], jaxpr.outvars]
    for k, loop in enumerate(loops):
        later = [one for atoms in wanted[k:] for one in outputs_behind(jaxpr, atoms, loops)]
        loops[k] = replace(
            loop, passing=tuple(dict.fromkeys(var for number, var in later if number < k))
        )
    return Cut(
        jaxpr, flat.consts, tuple(loops), tuple(k for k in range(count) if stacked[k] is None),
        frozenset(k for k in range(count) if trained[k]), count, depends,
    )  # fmt: skip


def _with_loops_outside(traced: ClosedJaxpr, flags: Sequence[bool]) -> ClosedJaxpr:
    """With those calls taken apart that have a loop over flagged inputs within."""
    held = set()

    def mark(jaxpr: Jaxpr, flags: Sequence[bool]) -> None:
        known = {var for var, flag in zip(jaxpr.invars, flags, strict=True) if flag}
        for equation in jaxpr.eqns:
            read = [not isinstance(atom, Literal) and atom in known for atom in equation.invars]
            if any(read) and equation.primitive.name in JITS:
                inner = equation.params["jaxpr"].jaxpr
                if has_layers(inner, read):
                    held.add(id(equation))
                    mark(inner, read)

    mark(traced.jaxpr, flags)
    return inlined(
        traced, lambda equation: equation.primitive.name in JITS and id(equation) in held
    )


def _with_outputs(jaxpr: Jaxpr, loop: Loop) -> Loop:
    """The loop, knowing which of its outputs are read, and of which examples alone are behind."""
    read = {v for equation in jaxpr.eqns for v in variables(equation.invars)} | set(
        variables(jaxpr.outvars)
    )
    outputs = loop.equation.outvars
    given = [k for k in range(loop.parts[1], len(outputs)) if outputs[k] in read]
    body = body_of(loop.equation).jaxpr
    own = {body.invars[k] for k in (*loop.same, *loop.plain)} | set(body.constvars)

    def is_own(atom: Any) -> bool:
        made = behind(body, [atom])
        return own.issuperset(inputs_of(made) if made else variables([atom]))

    apart = tuple(k for k in given if is_own(body.outvars[k]))
    return replace(loop, apart=apart, told=tuple(k for k in given if k not in apart))


def _check_effects(traced: ClosedJaxpr) -> None:
    """Refuse what does something besides: a pipeline does parts of a loss again, and leaves out
    what nobody reads.
    """

    # There are effects of other kinds: an axis that is named, an array that is changed.
    def seen(of: Any) -> bool:
        return any(
            "Debug" in type(effect).__name__ or "IO" in type(effect).__name__
            for effect in of.effects
        )

    def first(jaxpr: Jaxpr) -> Any:
        for equation in jaxpr.eqns:
            if seen(equation):
                inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
                return (
                    next(
                        (first(one) for one in inner if isinstance(one, Jaxpr) and seen(one)), None
                    )
                    or equation
                )
        return None

    if (equation := first(traced.jaxpr)) is not None:
        raise ValueError(
            f"The loss prints, calls back or the like: `{equation.primitive.name}` at "
            f"{line_of(equation) or 'a line unknown'}. Stages do parts of it again, and leave out "
            "what nobody reads, so that it would happen never or several times. Take it out, or "
            "look without the pipeline."
        )


def _check_loops(
    jaxpr: Jaxpr,
    found: Sequence[tuple[Any, list[int]]],
    paths: Sequence[str],
    stacked: Sequence[str | None],
    names: Sequence[str],
) -> None:
    """Refuse a loss whose loops over layers are not one for each name, in order."""
    named = [name for name in names if name in stacked]
    of_loops = [tuple(dict.fromkeys(stacked[k] for k in over)) for _, over in found]
    for name in named:
        if not any(name in of for of in of_loops):
            mine = [k for k in range(len(paths)) if stacked[k] == name]
            readers = [
                equation
                for equation in jaxpr.eqns
                if {jaxpr.invars[k] for k in mine} & set(variables(equation.invars))
            ]
            at = (line_of(readers[0]) or "a line unknown") if readers else ""
            read = f"; `{readers[0].primitive.name}` at {at} takes it whole" if readers else ""
            raise ValueError(
                "A pipeline cuts a model at its loop over layers, and the loss has no "
                f"`jax.lax.scan` that takes {', '.join(f'`{paths[k]}`' for k in mine[:3])} one "
                f"layer at a time{read}. `sl.Layers([...])` makes one of a list of modules; "
                "otherwise scan over them, as `nnx.scan` does. What casts weights or reshapes them "
                "belongs into the layer (`Strategy(precision=...)` casts them), and so does a "
                "`jax.checkpoint`: `sl.remat` marks a layer."
            )
    lines = " and ".join(line_of(equation) or "a line unknown" for equation, _ in found)
    taken = [k for _, over in found for k in over]
    if (twice := next((k for k in taken if taken.count(k) > 1), None)) is not None:
        raise ValueError(
            f"`{paths[twice]}` goes through {taken.count(twice)} loops over layers, at {lines}: "
            "layers that are used again are not cut, for each stage has its own once."
        )
    if len(found) > len(named):
        raise ValueError(
            f"The loss has {len(found)} loops over layers, at {lines}, and of stacked dims there "
            f"are {', '.join(f'`{name}`' for name in named)}. A pipeline tells loops apart by the "
            "names of what they take: call the stacked dim of an encoder `encoder_layers`, say, "
            '`sl.Layers([...], name="encoder_layers")`; of what is to be whole on every stage, '
            "anything that no rule lays over the stages."
        )
    for (equation, over), of in zip(found, of_loops, strict=True):
        if len(of) > 1:
            one, other = (next(k for k in over if stacked[k] == name) for name in of[:2])
            raise ValueError(
                f"The loop over layers at {line_of(equation)} takes `{paths[one]}`, whose stacked "
                f"dim is named `{of[0]}`, and `{paths[other]}`, where it is `{of[1]}`: what one "
                "loop takes has one name."
            )
    order = [name for of in of_loops for name in of]
    if order != named:
        raise ValueError(
            f"The loops over layers, at {lines}, take {', '.join(f'`{name}`' for name in order)} "
            f"in this order, and the rules have {', '.join(f'`{name}`' for name in named)}: their "
            "order says which parts of the pipeline come first. Write the rules in the order of "
            "the loss."
        )


def _check_reader(jaxpr: Jaxpr, var: Any, path: str, loop: Any) -> None:
    """Refuse a stacked weight that is not taken by its loop layer by layer, once, and by nobody
    else.
    """
    readers = [equation for equation in jaxpr.eqns if var in variables(equation.invars)]
    if not readers and var not in variables(jaxpr.outvars):
        return
    if readers == [loop] and var not in variables(jaxpr.outvars):
        places = [k for k, atom in enumerate(loop.invars) if atom is var]
        if len(places) == 1 and places[0] >= sum(scan_parts(loop)):
            return
    other = next((equation for equation in readers if equation is not loop), loop)
    what = (
        "it is an output"
        if other is None
        else f"`{other.primitive.name}` at {line_of(other) or 'a line unknown'}"
    )
    raise ValueError(
        f"`{path}` is stacked, each stage of the pipeline has its own layers of it, and the loss "
        f"uses it outside the loop over layers: {what}. Use it in the layer."
    )


def _check_inputs(
    jaxpr: Jaxpr,
    loop: Loop,
    before: Sequence[Loop],
    whole: dict[int, frozenset[int]],
    paths: Sequence[str],
) -> None:
    """Refuse a loop that takes what a pipeline cannot give."""
    equation, at = loop.equation, line_of(loop.equation)
    if equation.params["reverse"]:
        raise ValueError(
            f"The loop over layers at {at} goes backwards; a pipeline goes from the first layer on."
        )
    if lost := [whole[k] for k in loop.plain if k in whole]:
        named = ", ".join(f"`{path}`" for path in dict.fromkeys(paths[min(of)] for of in lost))
        raise ValueError(
            f"The loop over layers at {at} takes {named}, or what is made of it, one layer at a "
            "time, and no dim of it is named `layers`, so that every stage would hold all of it. "
            "Name its first dim: `sl.logical(initializer, ...)` where it is made, for a bias too, "
            "or `sl.annotate(model, ...)`."
        )
    for k in loop.plain:
        atom = equation.invars[k]
        if outputs := outputs_behind(jaxpr, [atom], before):
            first = line_of(before[outputs[0][0]].equation)
            raise ValueError(
                f"The loop over layers at {at} takes what the loop at {first} made one layer at a "
                "time. Stages of the one do not have what stages of the other made: hand it on "
                "from layer to layer, or give all of it to each."
            )
    constants, carries = loop.parts
    for atom in equation.invars[constants : constants + carries]:
        if jnp.issubdtype(atom.aval.dtype, jax.dtypes.prng_key):
            raise ValueError(
                f"The loop over layers at {at} hands a key from layer to layer; a pipeline cannot "
                "send one. Fold the layer's number into one key, `jax.random.fold_in(key, "
                "number)`, and let the loop take it."
            )
