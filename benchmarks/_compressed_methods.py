"""What whole steps of compressed optimizers, and meetings of workers, send between workers.

Each method is compiled for a machine, and what its program sends over the axis of the workers is
held to a formula, branch by branch: a step takes one branch, and a program has them all.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import optax
from flax import nnx

import shardlib as sl
from models import gpt
from shardlib import collectives as c
from shardlib import optimizers
from shardlib.collectives._feedback import matrix_of
from shardlib.collectives._fragments import fragments as divided
from shardlib.optimizers._rounds import rounds_of

SCALAR = 1024
"""Collectives of fewer bytes are those of metrics and of what is counted."""
NORM = 2039 * 4
"""The bytes of the sums by which a norm is estimated."""


class Sent(NamedTuple):
    """What a branch of a program sends, and what the formula for it says, in bytes of a device."""

    what: str
    bytes: int
    formula: float


@dataclass(frozen=True)
class Shards:
    """The parameters of a state as a device of a worker sends them.

    Attributes:
        state: an abstract state.
        axis: that of the workers.
    """

    state: sl.State
    axis: str

    @property
    def sizes(self) -> Any:
        """The sizes of the mesh's axes."""
        return self.state.layout.strategy.device_mesh.shape

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.sizes[self.axis]

    @property
    def parameters(self) -> list[c.Parameter]:
        """The parameters, as an exchange has them."""
        return list(self.state.layout.parameters(self.state.params).values())

    def parts(self, axes: Any) -> int:
        """How many devices there are along some axes."""
        return math.prod(self.sizes[axis] for axis in axes)

    def split(self, parameter: c.Parameter, first: int = 0, last: int | None = None) -> int:
        """Into how many parts some dims of a parameter are split."""
        parts = 1
        for entry in parameter.stored[first:last]:
            axes = (entry,) if isinstance(entry, str) else entry or ()
            parts *= self.parts(axes)
        return parts

    def within(self) -> int:
        """How many devices a worker has."""
        return math.prod(self.sizes.values()) // self.workers

    def summed(self, elements: float) -> float:
        """What a device sends for an exact sum of so many elements, of which it has a part."""
        return 2 * 4 * elements * (self.workers - 1) / self.workers

    def exactly(self) -> float:
        """The formula for an exact sum of all parameters: each device of a worker sends a part."""
        elements = sum(math.prod(parameter.shape) for parameter in self.parameters)
        return self.summed(elements / self.within())

    def as_codes(self, codec: c.Codec) -> float:
        """The formula for a mean of codes, without what is gathered within the worker."""
        total = 0.0
        for parameter in self.parameters:
            elements = math.prod(parameter.shape) // self.split(parameter)
            shared = self.within() // self.split(parameter)
            total += c.pmean_bytes(-(-elements // shared), self.workers, codec)
        return total

    def as_factors(self, exchange: c.PowerSGD) -> float:
        """The formula for factors, and for what is summed exactly beside them."""
        total = 0.0
        for parameter in self.parameters:
            rank, matrix = exchange.rank_of(parameter), matrix_of(parameter)
            if not rank or matrix is None:
                # As ZeRO would sum it, of which a device has the part that it stores.
                total += self.summed(math.prod(parameter.shape) / self.split(parameter))
                continue
            count, rows, columns = matrix.size(parameter.shape)
            # Devices that have other stacks or other rows of a factor send these, and those that
            # have the same send a part each.
            total += self.summed(rank * count * (rows + columns) / self.within())
        return total

    def as_largest(self, exchange: c.TopK) -> float:
        """The formula for the largest elements: a value and a place for each."""
        total = 0.0
        for parameter in self.parameters:
            elements = math.prod(parameter.shape) // self.split(parameter)
            shared = self.within() // self.split(parameter)
            total += -(-exchange.count(elements) // shared) * 8 * (self.workers - 1)
        return total


class Compiled(NamedTuple):
    """What a compiled step sends over the axis of the workers.

    Attributes:
        branches: what each of its branches sends.
        scalars: the bytes of metrics and counts.
        overlapped: of all else, the part that is under way while matrices are multiplied.
    """

    branches: list[Sent]
    scalars: int
    overlapped: float


def compiled(
    target: sl.Target, config: gpt.GPTConfig, shape: str, rules: sl.AxisRules, method: "Method"
) -> Compiled:
    """Compile a method's step, and read off what it sends over the workers' axis."""
    axis = "pod" if "pod" in shape else "data"
    mesh = target.mesh(shape, dcn="pod" if axis == "pod" else "")
    stage = 1 if axis == "pod" else 0
    strategy = sl.Strategy(
        mesh=mesh,
        rules=rules,
        zero=sl.Zero(stage, small=0),
        exchange=method.exchange(axis),
        clip=1.0,
    )
    make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))  # noqa: E731
    state = sl.init(make, method.optimizer(), strategy, abstract=True)
    batch = {"tokens": jax.ShapeDtypeStruct((16, config.context + 1), "int32")}
    plan = sl.plan(sl.train_step(gpt.loss, strategy), state, batch, target)
    codes = exact = scalars = overlapped = 0
    for one in plan.collectives:
        if axis not in (one.axes or ()):
            continue
        if one.sent_bytes <= SCALAR:
            scalars += one.total_bytes
            continue
        overlapped += one.total_bytes if one.overlapped else 0
        if "u8" in one.dtypes:
            codes += one.total_bytes
        else:
            exact += one.total_bytes
    branches = method.branches(Shards(state, axis), codes, exact)
    return Compiled(branches, scalars, overlapped / (codes + exact))


@dataclass(frozen=True)
class Method:
    """A method: its exchange over an axis, its optimizer, and what its branches send."""

    exchange: Callable[[str], Any]
    optimizer: Callable[[], Any]
    branches: Callable[[Shards, int, int], list[Sent]]


def _meeting(shards: Shards, codes: int, exact: int) -> list[Sent]:
    del codes
    return [Sent("a meeting", exact, shards.exactly())]


def _server(shards: Shards, codes: int, exact: int) -> list[Sent]:
    del codes
    return [Sent("gradients, and parameters back", exact, shards.exactly())]


def _meeting_of_codes(shards: Shards, codes: int, exact: int) -> list[Sent]:
    del exact
    return [Sent("a meeting of codes", codes, shards.as_codes(c.Integers(4)))]


def _zero_one(shards: Shards, codes: int, exact: int) -> list[Sent]:
    return [
        Sent("an averaged gradient", exact, shards.exactly()),
        Sent("a meeting of one bit", codes, shards.as_codes(c.Signs())),
    ]


def _lamb(shards: Shards, codes: int, exact: int) -> list[Sent]:
    # The norm is estimated in the branch of codes, by sums in float32.
    norm = shards.summed(NORM / 4)
    return [
        Sent("before the freeze", round(exact - norm), shards.exactly()),
        Sent("after it", codes, shards.as_codes(c.Signs())),
    ]


def _factors(shards: Shards, codes: int, exact: int) -> list[Sent]:
    del codes
    return [Sent("a step", exact, shards.as_factors(c.PowerSGD(shards.axis)))]


def _largest(shards: Shards, codes: int, exact: int) -> list[Sent]:
    del codes
    return [Sent("a step", exact, shards.as_largest(c.TopK(shards.axis)))]


def _adam() -> Any:
    return optax.adam(1e-3)


METHODS = {
    "diloco": Method(lambda axis: c.DiLoCo(axis), _adam, _meeting),
    "diloco in four bits": Method(
        lambda axis: c.DiLoCo(axis, exchange=c.Quantised(axis, bits=4)), _adam, _meeting_of_codes
    ),
    "diloco meanwhile": Method(lambda axis: c.DiLoCo(axis, overlap=True), _adam, _meeting),
    "server": Method(c.ParameterServer, _adam, _server),
    "zero_one_adam": Method(
        c.OneBit, lambda: optimizers.zero_one_adam(1e-3, steps=1000), _zero_one
    ),
    "onebit_lamb": Method(c.OneBit, lambda: optimizers.onebit_lamb(1e-3, freeze=100), _lamb),
    "powersgd": Method(c.PowerSGD, _adam, _factors),
    "topk": Method(c.TopK, _adam, _largest),
}


class Run(NamedTuple):
    """How often something is sent in a run, and in how many bits of each parameter altogether."""

    rounds: int
    bits: int


def of_optimizer(optimizer: Any, steps: int) -> Run:
    """A run of an optimizer that says itself what is sent, exactly in 16 bits and else in one."""
    rounds = rounds_of(optimizer, steps)
    exact, coded = rounds.exact + rounds.both, rounds.coded + rounds.both
    return Run(exact + coded, 16 * exact + coded)


def largest_fragment(config: gpt.GPTConfig, fragments: int) -> float:
    """The largest part of the parameters that meets at once, of all."""
    exchange = c.DiLoCo("data", every=100 * fragments, fragments=fragments)
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, exchange=exchange)
    make = lambda: gpt.GPT(config, rngs=nnx.Rngs(0))  # noqa: E731
    state = sl.init(make, _adam(), strategy, abstract=True)
    parameters = list(state.layout.parameters(state.params).values())
    parts = divided(parameters, fragments, strategy.device_mesh.shape)
    sizes = [sum(math.prod(part.parameter.shape) for part in fragment) for fragment in parts]
    return max(sizes) / sum(sizes)
