"""How many bytes of a value of a traced function one device holds.

A trace has the values of one device of the manual axes, whole over all others. Over these the
partitioner splits a value as an annotation near it says:

    product  ->  sharding_constraint(P(None, "model"))  ->  name "mlp_up"  ->  activation
                 split over `model`                         and so these too

So the nearest annotation is looked for, first where a value comes from and then where it goes,
through operations that work on each number by itself. Without one it is taken to be whole.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from jax.extend.core import Jaxpr, Literal

from shardlib.layouts._checkpoint_policies import COMPRESSIBLE
from shardlib.tracing._jaxpr import held_functions, open_jaxpr, variables

# What hands its input on as it is.
SAME = (
    *("name", COMPRESSIBLE, "sharding_constraint", "reduce_precision"),
    *("optimization_barrier", "copy"),
)
_WITH_OWN_DERIVATIVES = ("custom_vjp_call", "custom_jvp_call")
# What a value is laid out for is what all of these read and write is laid out for.
_ELEMENTWISE = {
    *(*SAME, *_WITH_OWN_DERIVATIVES),
    *("abs", "add", "add_any", "convert_element_type", "cos", "div", "erf", "exp", "integer_pow"),
    *("log", "log1p", "logistic", "max", "min", "mul", "neg", "pow", "rsqrt", "select_n", "sign"),
    *("sin", "sqrt", "square", "stop_gradient", "sub", "tanh"),
}


class DeviceBytes:
    """The bytes that a device holds of the values of one jaxpr."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._jaxpr = jaxpr
        self._parts: dict[Any, int] = {}

    def __call__(self, var: Any) -> int:
        """Of one value."""
        if var not in self._parts:
            self._parts[var] = self._found(var)
        return var.aval.size * var.aval.dtype.itemsize // self._parts[var]

    @cached_property
    def _makers(self) -> dict[Any, tuple[Any, int]]:
        makers = {}
        for equation in self._jaxpr.eqns:
            for place, out in enumerate(equation.outvars):
                makers[out] = equation, place
        return makers

    @cached_property
    def _readers(self) -> dict[Any, list[tuple[Any, int]]]:
        readers = defaultdict(list)
        for equation in self._jaxpr.eqns:
            for place, var in enumerate(equation.invars):
                if not isinstance(var, Literal):
                    readers[var].append((equation, place))
        return readers

    def _found(self, var: Any) -> int:
        """In how many parts a value is split."""
        return self.said(var) or 1

    def said(self, var: Any) -> int | None:
        """In how many parts annotations say that it is split; None if none does."""
        return self._behind(var, set()) or self._ahead(var, set())

    def _behind(self, var: Any, seen: set[Any]) -> int | None:
        """What is said where a value comes from.

        Only values of the same shape are asked, whose dims are those of this one.
        """
        # Many ways may lead to one value. Each value is asked once.
        if var in seen or var not in self._makers:
            return None
        seen.add(var)
        equation, place = self._makers[var]
        said = _said(equation, "out_specs", place) or _said_within(equation, place)
        if said is not None:
            return said
        if equation.primitive.name in _ELEMENTWISE:
            for source in _like(var, variables(equation.invars)):
                said = self._behind(source, seen)
                if said is not None:
                    return said
        return None

    def _ahead(self, var: Any, seen: set[Any]) -> int | None:
        """What is said where a value goes.

        What makes a value is asked before: where a value is read, it may be laid out anew.
        """
        if var in seen:
            return None
        seen.add(var)
        for equation, place in self._readers[var]:
            said = _said(equation, "in_specs", place)
            if said is not None:
                return said
            if equation.primitive.name in _ELEMENTWISE:
                for target in _like(var, equation.outvars):
                    said = self._ahead(target, seen)
                    if said is not None:
                        return said
        return None


def _said(equation: Any, specs: str, place: int) -> int | None:
    """The parts that an equation says its result or an operand to be in; None if it says none."""
    params = equation.params
    if equation.primitive.name == "sharding_constraint":
        spec = getattr(params["sharding"], "spec", None)
        if spec is None:
            return None
        return _parts(spec, params["sharding"].mesh.shape)
    if equation.primitive.name == "shard_map":
        # A trace outside has whole arrays, of which each device has what its spec says.
        return _parts(params[specs][place], params["mesh"].shape)
    return None


def _said_within(equation: Any, place: int) -> int | None:
    """The parts that a function with a derivative of its own says its result to be in."""
    if equation.primitive.name not in _WITH_OWN_DERIVATIVES:
        return None
    for function in held_functions(equation):
        inner = open_jaxpr(function)
        out = inner.outvars[place]
        # What is said of its result inside is out of sight of a walk outside.
        if not isinstance(out, Literal):
            return DeviceBytes(inner).said(out)
    return None


def _parts(spec: Iterable[Any], sizes: Any) -> int:
    """In how many parts a spec splits an array.

    >>> _parts(("data", None, ("model", "expert")), {"data": 2, "model": 4, "expert": 3})
    24
    """
    parts = 1
    for axes in spec:
        names = axes if isinstance(axes, tuple) else (axes,)
        # An entry may also be None, or leave the dim to the partitioner: neither is known to split.
        parts *= math.prod(sizes[name] for name in names if isinstance(name, str))
    return parts


def _like(var: Any, others: Iterable[Any]) -> Iterator[Any]:
    """Those of some variables that have the shape of one."""
    for other in others:
        if other.aval.shape == var.aval.shape:
            yield other
