"""A loss, traced, cut at its loop over layers: what comes before, one layer, and what comes after.

Whoever writes a model need not know where it will be cut: at the loop over stacked weights, a `scan`. What goes into that
is of four kinds: the stacked weights; what goes from layer to layer; what is made of other weights and is the same for all
layers, which travels along, so that its gradient comes back; and what is made of the examples alone, which every stage
makes for itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from shardlib._jaxpr import JITS, behind, inlined, inputs_of, line_of, made_of, scan_parts, variables
from shardlib._on_use import has_layers

Arrays = list[Any]


@dataclass(frozen=True, eq=False)
class Cut:
    """A function of weights and of inputs, in three. Made by `cut`.

    What *travels* from part to part is a list of arrays: what goes from layer to layer, then what travels along, then what
    the layers give besides, stacked, of which each part fills in its own.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    loop: Any  # the equation
    weights: tuple[int, ...]  # for each stacked weight, which input of the body of the loop it is
    stacked: tuple[int, ...]  # and which of all weights
    outer: tuple[int, ...]  # the other weights
    trained: frozenset[int]  # of all weights
    count: int  # of all weights
    depends: dict[Any, frozenset[int]]  # of which trained weights a value is made

    @property
    def layers(self) -> int:
        """How often the loop goes round."""
        return self.loop.params["length"]

    @cached_property
    def _parts(self) -> tuple[int, int]:
        return scan_parts(self.loop)

    @property
    def _carried(self) -> list[Any]:
        constants, carries = self._parts
        return self.loop.invars[constants : constants + carries]

    @cached_property
    def along(self) -> list[int]:
        """Which of the constants of the loop have a derivative to weights."""
        return [k for k, atom in enumerate(self.loop.invars[: self._parts[0]]) if _moves(atom, self.depends)]

    @cached_property
    def _same(self) -> list[int]:
        return [k for k in range(self._parts[0]) if k not in self.along]

    @cached_property
    def _plain(self) -> list[int]:
        return [k for k in range(sum(self._parts), len(self.loop.invars)) if k not in self.weights]

    @cached_property
    def _given(self) -> list[int]:
        """Which of the outputs of the loop that layers give besides are read."""
        read = {v for equation in self.jaxpr.eqns for v in variables(equation.invars)} | set(
            variables(self.jaxpr.outvars)
        )
        return [k for k in range(self._parts[1], len(self.loop.outvars)) if self.loop.outvars[k] in read]

    @cached_property
    def _body(self) -> ClosedJaxpr:
        """The body of the loop, calls taken apart, so that what a value is made of can be followed."""
        return inlined(self.loop.params["jaxpr"], lambda _: True)

    @cached_property
    def _apart(self) -> list[int]:
        """Which of these are made neither of weights nor of what goes from layer to layer: the count of a stream, say."""
        jaxpr = self._body.jaxpr
        own = {jaxpr.invars[k] for k in (*self._same, *self._plain)} | set(jaxpr.constvars)

        def is_own(atom: Any) -> bool:
            made = behind(jaxpr, [atom])
            return own.issuperset(inputs_of(made) if made else variables([atom]))

        return [k for k in self._given if is_own(jaxpr.outvars[k])]

    @cached_property
    def told(self) -> list[int]:
        """The others, which travel."""
        return [k for k in self._given if k not in self._apart]

    @cached_property
    def travelling(self) -> list[jax.ShapeDtypeStruct]:
        """What travels."""
        atoms = [*self._carried, *[self.loop.invars[k] for k in self.along], *[self.loop.outvars[k] for k in self.told]]
        return [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]

    @cached_property
    def smooth(self) -> list[bool]:
        """What of it has derivatives."""
        return [jnp.issubdtype(one.dtype, jnp.inexact) for one in self.travelling]

    def _values(self, outer: Arrays, inputs: Arrays) -> dict[Any, Any]:
        """Of constants, weights and inputs, and of what the loop makes of these alone."""
        weights = dict(zip([self.jaxpr.invars[k] for k in self.outer], outer, strict=True))
        given = zip(self.jaxpr.invars[self.count :], inputs, strict=True)
        values = {**dict(zip(self.jaxpr.constvars, self.consts, strict=True)), **weights, **dict(given)}
        if not self._apart:
            return values
        made = made_of(self.jaxpr, [self.loop.invars[k] for k in (*self._same, *self._plain)], values)
        same, plain = made[: len(self._same)], made[len(self._same) :]
        jaxpr = self._body.jaxpr

        def layer(_: None, plain: Arrays) -> tuple[None, Arrays]:
            now = dict(zip([jaxpr.invars[k] for k in (*self._same, *self._plain)], [*same, *plain], strict=True))
            now |= dict(zip(jaxpr.constvars, self._body.consts, strict=True))
            return None, made_of(jaxpr, [jaxpr.outvars[k] for k in self._apart], now)

        found = lax.scan(layer, None, plain, length=self.layers)[1]
        return values | dict(zip([self.loop.outvars[k] for k in self._apart], found, strict=True))

    def before(self, outer: Arrays, inputs: Arrays) -> Arrays:
        """What travels to the first part."""
        wanted = [*self._carried, *[self.loop.invars[k] for k in self.along]]
        made = made_of(self.jaxpr, wanted, self._values(outer, inputs))
        return [jnp.asarray(x) for x in made] + [
            jnp.zeros(one.shape, one.dtype) for one in self.travelling[len(wanted) :]
        ]

    def fixed(self, outer: Arrays, inputs: Arrays) -> tuple[Arrays, Arrays]:
        """What every stage makes for itself: what is the same for all layers, and what is stacked."""
        same, plain = ([self.loop.invars[k] for k in of] for of in (self._same, self._plain))
        made = made_of(self.jaxpr, [*same, *plain], self._values(outer, inputs))
        return made[: len(same)], made[len(same) :]

    def after(self, outer: Arrays, inputs: Arrays, travelled: Arrays, wanted: Sequence[int]) -> Arrays:
        """Of all outputs those `wanted`, from what comes out of the last part."""
        carries = self._parts[1]
        outputs = [*range(carries), *self.told]
        of = [*travelled[:carries], *travelled[len(travelled) - len(self.told) :]]
        known = dict(zip([self.loop.outvars[k] for k in outputs], of, strict=True))
        return made_of(self.jaxpr, [self.jaxpr.outvars[k] for k in wanted], self._values(outer, inputs) | known)

    def aside(self, outer: Arrays, inputs: Arrays, wanted: Sequence[int]) -> Arrays | None:
        """Of all outputs those `wanted`, if none is made by the layers, else nothing."""
        atoms = [self.jaxpr.outvars[k] for k in wanted]
        if any(self.reads_loop(atom) for atom in atoms):
            return None
        return made_of(self.jaxpr, atoms, self._values(outer, inputs))

    def reads_loop(self, atom: Any) -> bool:
        """Whether an output is made of what comes out of the loop."""
        return not isinstance(atom, Literal) and atom in self._downstream

    @cached_property
    def _downstream(self) -> set[Any]:
        found = set(self.loop.outvars) - {self.loop.outvars[k] for k in self._apart}
        for equation in self.jaxpr.eqns:
            if found.intersection(variables(equation.invars)):
                found.update(equation.outvars)
        return found

    def reaching(self, wanted: Sequence[Any]) -> list[int]:
        """Of which of the outer weights, by their number among these, some values are made, not through the loop."""
        found = frozenset().union(*(self.depends.get(atom, frozenset()) for atom in variables(wanted)))
        return [k for k, of in enumerate(self.outer) if of in found]

    @cached_property
    def enter(self) -> list[int]:
        """Of which of the outer weights what travels to the first part is made."""
        return self.reaching([*self._carried, *[self.loop.invars[k] for k in self.along]])

    @cached_property
    def leave(self) -> list[int]:
        """Of which of the outer weights the first output is made, after the loop."""
        return self.reaching(self.jaxpr.outvars[:1])

    @cached_property
    def layer(self) -> ClosedJaxpr:
        """One layer as a function: what travels that has derivatives, what else does; trained weights, frozen ones, what
        is the same for all layers, and of what is stacked the layer's. What comes out is what travels on, in order, and
        what the layer gives besides.
        """
        constants, carries = self._parts
        body = self.loop.params["jaxpr"]
        moving = [*range(constants, constants + carries), *self.along]
        floats = [k for k, smooth in zip(moving, self.smooth, strict=False) if smooth]
        others = [k for k, smooth in zip(moving, self.smooth, strict=False) if not smooth]
        order = [*floats, *others, *self.weights, *self._same, *self._plain]

        def layer(*given: Any) -> Arrays:
            now = dict(zip(order, given, strict=True))
            results = jaxpr_as_fun(body)(*[now[k] for k in range(len(body.jaxpr.invars))])
            return [*results[:carries], *[now[k] for k in self.along], *[results[k] for k in self.told]]

        avals = [body.jaxpr.invars[k].aval for k in order]
        return jax.make_jaxpr(layer)(*[jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])


def _moves(atom: Any, depends: dict[Any, frozenset[int]]) -> bool:
    return not isinstance(atom, Literal) and bool(depends.get(atom)) and jnp.issubdtype(atom.aval.dtype, jnp.inexact)


def cut(
    function: Callable[..., Any],
    weights: Sequence[Any],
    inputs: Sequence[Any],
    paths: Sequence[str],
    stacked: Sequence[bool],
    trained: Sequence[bool],
) -> Cut:
    """Trace `function(weights, inputs)`, two lists, and cut it where it loops over the stacked weights."""
    traced = jax.make_jaxpr(function)(list(weights), list(inputs))
    count = len(weights)
    held = set()

    def holds(equation: Any) -> bool:
        return equation.primitive.name in JITS and id(equation) in held

    def mark(jaxpr: Jaxpr, flags: Sequence[bool]) -> None:
        """Which calls have the loop within."""
        known = {var for var, flag in zip(jaxpr.invars, flags, strict=True) if flag}
        for equation in jaxpr.eqns:
            read = [not isinstance(atom, Literal) and atom in known for atom in equation.invars]
            if any(read) and equation.primitive.name in JITS:
                inner = equation.params["jaxpr"].jaxpr
                if has_layers(inner, read):
                    held.add(id(equation))
                    mark(inner, read)

    mark(traced.jaxpr, [*stacked, *[False] * len(inputs)])
    flat = inlined(traced, holds)
    jaxpr = flat.jaxpr
    of = dict(zip(jaxpr.invars[:count], range(count), strict=False))
    stack = {var: k for var, k in of.items() if stacked[k]}
    loops = [
        (equation, [atom for atom in variables(equation.invars[sum(scan_parts(equation)) :]) if atom in stack])
        for equation in jaxpr.eqns
        if equation.primitive.name == "scan"
    ]
    loops = [(equation, over) for equation, over in loops if over]
    named = ", ".join(f"`{paths[k]}`" for k in list(stack.values())[:3])
    if not loops:
        raise ValueError(
            f"A pipeline cuts a model at its loop over layers, and the loss has no `jax.lax.scan` that takes {named} one layer "
            "at a time. `sl.Layers([...])` makes one of a list of modules; otherwise scan over them, as `nnx.scan` does."
        )
    if len(loops) > 1:
        lines = " and ".join(line_of(equation) or "a line unknown" for equation, _ in loops)
        raise ValueError(
            f"The loss has {len(loops)} loops over layers, at {lines}; a pipeline cuts one. Name the stacked dim of the others "
            "otherwise than `layers`: their weights are then outside the stages."
        )
    ((loop, _),) = loops
    body_of = {atom: k for k, atom in enumerate(loop.invars) if not isinstance(atom, Literal) and atom in stack}
    for var, k in stack.items():
        readers = [equation for equation in jaxpr.eqns if var in variables(equation.invars)]
        times = variables(loop.invars).count(var)
        if not readers:
            continue
        if readers != [loop] or times != 1 or body_of[var] < sum(scan_parts(loop)) or var in variables(jaxpr.outvars):
            other = next((equation for equation in readers if equation is not loop), loop)
            at = line_of(other)
            raise ValueError(
                f"`{paths[k]}` is stacked, each stage of the pipeline has its own layers of it, and the loss uses it outside "
                f"the loop over layers: `{other.primitive.name}`{f' at {at}' if at else ''}. Use it in the layer."
            )
    if loop.params["reverse"]:
        raise ValueError(
            f"The loop over layers at {line_of(loop)} goes backwards; a pipeline goes from the first layer on."
        )
    depends: dict[Any, frozenset[int]] = {var: frozenset({k}) for var, k in of.items() if trained[k] and not stacked[k]}
    for equation in jaxpr.eqns:
        found = frozenset().union(*(depends.get(var, frozenset()) for var in variables(equation.invars)))
        if equation is not loop and found and equation.primitive.name != "stop_gradient":
            depends.update(dict.fromkeys(equation.outvars, found))
    order = sorted(body_of.values(), key=lambda k: (not trained[of[loop.invars[k]]], k))
    plain = [k for k in range(sum(scan_parts(loop)), len(loop.invars)) if k not in order]
    if lost := [k for k in plain if _moves(loop.invars[k], depends)]:
        path = paths[min(depends[loop.invars[lost[0]]])]
        raise ValueError(
            f"The loop over layers at {line_of(loop)} takes `{path}`, or what is made of it, one layer at a time, and no dim of "
            "it is named `layers`: name its first."
        )
    keys = [a for a in loop.invars[: sum(scan_parts(loop))] if jnp.issubdtype(a.aval.dtype, jax.dtypes.prng_key)]
    if any(key in loop.invars[scan_parts(loop)[0] : sum(scan_parts(loop))] for key in keys):
        raise ValueError(
            f"The loop over layers at {line_of(loop)} hands a key from layer to layer; a pipeline cannot send one. Fold the "
            "layer's number into one key, `jax.random.fold_in(key, number)`, and let the loop take it."
        )
    outer = tuple(k for k in range(count) if not stacked[k])
    return Cut(
        jaxpr, flat.consts, loop, tuple(order), tuple(of[loop.invars[k]] for k in order), outer,
        frozenset(k for k in range(count) if trained[k]), count, depends,
    )  # fmt: skip
