"""What a marked block keeps for its backward pass, by the names of its activations.

    block     x --a--> "gate" --b--> h --c--> y

    nothing kept      x, the block's input      a and b run again
    "gate" kept       x, "gate"                 b runs again: keeping "gate" spares a
    everything kept   x, "gate", and h, which has no name: one of the "others"

What keeping a name spares is what would run again without it and does not run now, beside all that
is kept. So the figures of several names do not add up: where either of two is enough to compute a
third, each spares little beside the other.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from jax.ad_checkpoint import Offloadable
from jax.extend.core import Literal

from shardlib.layouts._checkpoint_policies import BESIDE, COMPRESSIBLE
from shardlib.tracing._activation_codecs import Encoded
from shardlib.tracing._block_costs import Costs, inputs_with_derivatives
from shardlib.tracing._block_places import Origin, Placed, parts_of
from shardlib.tracing._compressed_saves import encoding_of
from shardlib.tracing._device_bytes import SAME
from shardlib.tracing._jaxpr import variables

INPUT, OTHERS = "block input", "others"
ON_HOST = "on the host"


Forms: TypeAlias = dict[str, tuple[str, float]]
"""By name, how an activation is kept, and the bytes of that over those of the activation."""


@dataclass(frozen=True)
class Held:
    """An activation of one block.

    - `size`: bytes that it takes for one device, or would take if it were kept.
    - `flops`: operations that keeping it spares, or would spare.
    - `form`: how it is kept where that is not as it is on the device: `on the host`, or the
      encoding in which it is.
    """

    name: str
    size: int
    kept: bool
    flops: int
    form: str = ""


@dataclass(frozen=True)
class Part:
    """A part of a block that is computed again by itself."""

    name: str
    size: int
    flops: int


class BlockActivations:
    """The activations of one kind of block: one function with inputs of the same origins."""

    def __init__(self, placed: Placed) -> None:
        self.function = placed.function
        self._mesh = placed.mesh
        self.costs = Costs.of(placed)
        # What has a derivative comes first in the function with its derivative.
        derived = inputs_with_derivatives(placed.function, placed.moving)
        floats, others = derived.split(placed.origins)
        origins = dict(zip(self.costs.jaxpr.invars, [*floats, *others], strict=True))
        self._input = {var for var, origin in origins.items() if origin == Origin.OWN}
        self._depends = {var for var, origin in origins.items() if origin >= Origin.EACH}
        # What comes of weights alone, or of what all turns share, is there once for all layers.
        # Only what depends on more is an activation, of which each layer has its own.
        for equation in self.costs.jaxpr.eqns:
            if self._depends.intersection(variables(equation.invars)):
                self._depends.update(equation.outvars)

    @property
    def forward_flops(self) -> int:
        """Operations of products that run again where nothing is kept."""
        return sum(self.costs.flops)

    def held(self, policy: Any) -> list[Held]:
        """What a block keeps of each activation by a policy of `jax.checkpoint`, or None.

        The block's input comes first, then names in the order in which the block makes them. All
        that has no name, as the results of products that a policy keeps, comes last and together.
        """
        kept, forms = self._kept_by(policy)
        read, flops = self.costs.without(kept)
        held = []
        size = self._size(self._input & read)
        if size:
            form, share = self._form_of_input(forms)
            held.append(Held(INPUT, round(share * size), True, 0, form))
        of_names = self._by_name(kept & read)
        others = self._size(of_names.pop(OTHERS, set()))
        for name in self._names:
            held += self._of_name(name, kept, of_names.get(name, set()), flops, forms)
        if others:
            # What has no name is told as one row, and so is what it spares.
            _, without = self.costs.without(kept & set(self._name_of))
            held.append(Held(OTHERS, others, True, without - flops))
        return held

    def _of_name(
        self, name: str, kept: set[Any], kept_of_it: set[Any], flops: int, forms: Forms
    ) -> list[Held]:
        """The activation of a name; nothing if nobody would read it.

        Where it is kept, it spares what would run again without it. Where it is not, it would spare
        what runs now.
        """
        if kept_of_it:
            _, without = self.costs.without(kept - self._named[name])
            form, share = forms.get(name, ("", 1.0))
            # What belongs to it, such as attention's normalizers, is kept as it is on the device.
            beside = kept_of_it & self._beside
            size = round(share * self._size(kept_of_it - beside)) + self._size(beside)
            return [Held(name, size, True, without - flops, form)]
        # Nothing of it is held. What would run no more if all of it were?
        more = kept | {var for var, said in self.costs.named.items() if said == name}
        read, spared = self.costs.without(more)
        size = self._size(self._named[name] & more & read)
        if not size:
            return []
        return [Held(name, size, False, flops - spared)]

    def parts(self) -> list[Part]:
        """What is dropped of a block that keeps all but some of its parts.

        A part keeps its inputs, and its size is what it makes from these while it is
        differentiated.
        """
        found = []
        for name, function in parts_of(self.function):
            costs = Costs.of_function(function, mesh=self._mesh)
            size = sum(costs.bytes_of(var) for var in _made(costs))
            found.append(Part(name, size, sum(costs.flops)))
        return found

    def _kept_by(self, policy: Any) -> tuple[set[Any], Forms]:
        """The values that a policy keeps, whether they are read or not, and in which forms."""
        kept: set[Any] = set()
        forms: Forms = {}
        if policy is None:
            return kept, forms
        for equation in self.costs.jaxpr.eqns:
            shapes: list[Any] = [var.aval for var in equation.invars]
            if equation.primitive.name == COMPRESSIBLE:
                # The operation that compresses comes before the one that names, and a policy that
                # compresses a name answers to the former only.
                encoding = encoding_of(policy, equation)
                if encoding is not None:
                    share = Encoded(encoding, shapes[0].shape, shapes[0].dtype).share
                    forms[equation.params["name"]] = encoding, share
                    kept.update(equation.outvars)
                    continue
            answer = policy(equation.primitive, *shapes, **equation.params)
            if isinstance(answer, Offloadable):
                forms[equation.params["name"]] = ON_HOST, 1.0
            if answer:
                kept.update(equation.outvars)
        return kept, forms

    def _form_of_input(self, forms: Forms) -> tuple[str, float]:
        """How a block's input is kept, which may have a name too.

        A model names it to have it on the host, say. It is the input all the same, in that form.
        """
        for equation in self.costs.jaxpr.eqns:
            if equation.primitive.name == "name":
                root = self._roots[equation.outvars[0]]
                if root in self._input and equation.params["name"] in forms:
                    return forms[equation.params["name"]]
        return "", 1.0

    def _size(self, values: Iterable[Any]) -> int:
        """The bytes of those values that are activations.

        A value under several layouts that take the same is kept once: a compiler finds the two.
        """
        sizes = set()
        for var in values:
            if var in self._depends:
                sizes.add((self._roots.get(var, var), self.costs.bytes_of(var)))
        return sum(size for _, size in sizes)

    def _by_name(self, values: set[Any]) -> dict[str, set[Any]]:
        """Values by the name that each has, under whatever layout."""
        by_name: dict[str, set[Any]] = defaultdict(set)
        for var in values:
            by_name[self._name_of.get(var, OTHERS)].add(var)
        return by_name

    @cached_property
    def _roots(self) -> dict[Any, Any]:
        """For a value that is another one, handed on as it is, that other one.

        Names and layouts change no number: a value before and after them is one value in memory.
        """
        roots: dict[Any, Any] = {}
        for equation in self.costs.jaxpr.eqns:
            if equation.primitive.name in SAME:
                for source, out in zip(equation.invars, equation.outvars, strict=True):
                    if not isinstance(source, Literal):
                        roots[out] = roots.get(source, source)
        return roots

    @cached_property
    def _name_of(self) -> dict[Any, str]:
        """The names of values, and of those that are the same under another layout."""
        of_roots = {}
        for equation in self.costs.jaxpr.eqns:
            if equation.primitive.name == "name":
                name = equation.params["name"].removesuffix(BESIDE)
                of_roots[self._roots[equation.outvars[0]]] = name
        names = {}
        for var, root in [*self._roots.items(), *[(root, root) for root in of_roots]]:
            # The input has a row of its own, whatever name the model gives it.
            if root in of_roots and var not in self._input:
                names[var] = of_roots[root]
        return names

    @cached_property
    def _beside(self) -> set[Any]:
        """The values that belong to an activation and are not the activation itself."""
        roots = set()
        for equation in self.costs.jaxpr.eqns:
            if equation.primitive.name == "name" and equation.params["name"].endswith(BESIDE):
                roots.add(self._roots[equation.outvars[0]])
        return roots | {var for var, root in self._roots.items() if root in roots}

    @cached_property
    def _named(self) -> dict[str, set[Any]]:
        """All values by name."""
        named: dict[str, set[Any]] = defaultdict(set)
        for var, name in self._name_of.items():
            named[name].add(var)
        return named

    @property
    def _names(self) -> list[str]:
        """The names in the order in which the block makes them."""
        return list(dict.fromkeys(self.costs.named.values()))


def _made(costs: Costs) -> list[Any]:
    """What the backward pass of a function reads and is none of its inputs."""
    inputs = set(costs.jaxpr.invars)
    return [var for var in dict.fromkeys(variables(costs.jaxpr.outvars)) if var not in inputs]
