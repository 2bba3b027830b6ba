"""Arrays in the memory of the host, copied to the device before they are needed.

JAX copies an activation back from the host where the backward pass of its block reads it. The input
of a block is read first, so the device would wait for the copy. A loop over layers can copy what
the next layer reads while it computes with one:

    backward    copy of layer 3   layer 3               layer 2               layer 1
                                  copy of layer 2       copy of layer 1       ...

So here the copies are taken out of a traced function, which is given arrays on the device instead.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from shardlib.layouts._host import is_on_host, to_device
from shardlib.tracing._jaxpr import CALLS, evaluate, open_jaxpr, readers_of, variables


@dataclass(frozen=True, eq=False)
class Kept:
    """The values that the layers of a loop have kept, some of them in the memory of the host.

    - `stacks`: an array for each value, with a first dim for the layers.
    - `start`, `stop`: the numbers of these layers.
    - `reverse`: whether the backward pass goes from the first layer to the last.
    """

    stacks: list[Any]
    start: int
    stop: int
    reverse: bool

    @property
    def on_device(self) -> list[Any]:
        """The stacks on the device."""
        return [stack for stack in self.stacks if not is_on_host(stack)]

    def of_layer(self, number: Any) -> list[Any]:
        """What a layer has kept in the memory of the host."""
        of_layer = []
        for stack in self.stacks:
            if is_on_host(stack):
                # The layers may be divided among several loops, with stacks of their own.
                place = number - self.start
                of_layer.append(lax.dynamic_index_in_dim(stack, place, 0, keepdims=False))
        return of_layer

    def first_copies(self) -> list[Any]:
        """Copies of the values of the layer that is differentiated first.

        They are made before the loop, since each of its iterations copies for the next one only.
        """
        first = self.start if self.reverse else self.stop - 1
        return [to_device(array) for array in self.of_layer(first)]

    def next_copies(self, number: Any) -> list[Any]:
        """Copies of the values of the layer that is differentiated next, or of the last one.

        All iterations of a loop are alike: the last one copies too, and nothing reads those copies.
        """
        after = jnp.maximum(number - 1, self.start)
        if self.reverse:
            after = jnp.minimum(number + 1, self.stop - 1)
        return [to_device(array) for array in self.of_layer(after)]

    def merged(self, on_device: Sequence[Any], on_host: Sequence[Any]) -> list[Any]:
        """All that a layer has kept, in the order of the stacks."""
        next_on_device, next_on_host = iter(on_device), iter(on_host)
        merged = []
        for stack in self.stacks:
            source = next_on_host if is_on_host(stack) else next_on_device
            merged.append(next(source))
        return merged


def with_copies(
    function: Callable[[list[Any]], Any], arrays: Sequence[Any], copies: Sequence[Any]
) -> Any:
    """`function(arrays)` of arrays in the memory of the host, with copies on the device instead.

    An array that the function does not only copy to the device is passed to it as it is.
    """
    if not arrays:
        return function([])
    traced, out = jax.make_jaxpr(function, return_shape=True)(list(arrays))
    which = [_is_only_copied(traced.jaxpr, var) for var in traced.jaxpr.invars]
    # A block may compute on the host with an array there. Then it needs that array and no copy.
    given = []
    for array, copy, is_copied in zip(arrays, copies, which, strict=True):
        given.append(copy if is_copied else array)
    return evaluate(ClosedJaxpr(_of_copies(traced.jaxpr, which), traced.consts), out, given)


def _is_only_copied(jaxpr: Jaxpr, var: Any) -> bool:
    """Whether a function does nothing with a variable but copy it to the device."""
    # What reads the results of the function is not known here.
    if var in variables(jaxpr.outvars):
        return False
    return all(_only_copies(equation, var) for equation in readers_of(jaxpr, var))


def _only_copies(equation: Any, var: Any) -> bool:
    """Whether an equation, or the function that it calls, only copies a variable to the device."""
    name = equation.primitive.name
    if name == "device_put":
        # One `device_put` may move several arrays, each to another place.
        return len(equation.invars) == 1 and not _is_of_host(equation.outvars[0])
    if name not in CALLS:
        return False
    inner = open_jaxpr(equation.params["jaxpr"])
    places = [place for place, read in enumerate(equation.invars) if read is var]
    return all(_is_only_copied(inner, inner.invars[place]) for place in places)


def _is_of_host(var: Any) -> bool:
    return var.aval.memory_space == jax.memory.Space.Host


def _of_copies(jaxpr: Jaxpr, which: Sequence[bool]) -> Jaxpr:
    """A function that takes copies of some arguments on the device, and does not copy them.

    Functions that it calls are rewritten likewise, if they get any of these arguments.
    """
    # What stands for a variable, and the arguments that are copies now.
    stands_for: dict[Any, Any] = {}
    invars = []
    for var, is_copied in zip(jaxpr.invars, which, strict=True):
        if is_copied:
            stands_for[var] = Var(var.aval.update(memory_space=jax.memory.Space.Device))
        invars.append(stands_for.get(var, var))
    copied = set(stands_for)

    def replaced(atoms: Sequence[Any]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else stands_for.get(atom, atom) for atom in atoms]

    equations = []
    for equation in jaxpr.eqns:
        are_copies = [not isinstance(x, Literal) and x in copied for x in equation.invars]
        if any(are_copies) and equation.primitive.name == "device_put":
            # The copy is there already: the equation is dropped.
            stands_for[equation.outvars[0]] = stands_for[equation.invars[0]]
            continue
        params = equation.params
        if any(are_copies):
            held = params["jaxpr"]
            inner = _of_copies(open_jaxpr(held), are_copies)
            # Some calls hold a function with its constants, some without.
            if isinstance(held, ClosedJaxpr):
                inner = held.replace(jaxpr=inner)
            params = params | {"jaxpr": inner}
        equations.append(equation.replace(invars=replaced(equation.invars), params=params))
    return jaxpr.replace(invars=invars, eqns=equations, outvars=replaced(jaxpr.outvars))
