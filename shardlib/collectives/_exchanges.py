"""Exchanges that leave something out of what they send, and those of them that send codes.

`Lossy` is what all of them share. `OneBit` and `Quantised` average by `pmean`, and differ in
nothing but their codec and their defaults: what these two share is `Compressed`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from shardlib.checks import _arguments as check
from shardlib.collectives._codecs import Codec, Integers, Signs
from shardlib.collectives._compressed import Errors, Pieces, pmean
from shardlib.collectives._exact import Exchange, ExchangeInputs, Parameter, averaged_axes
from shardlib.layouts._specs import as_tuple, axes_without, parts_over, spec_axes

# The whole path of a router's bias, see `sl.experts.balanced`. Its gradient is a count times a tiny
# scale, which codes would lose where it shares theirs with other gradients.
ROUTER_BIAS = "(.*/)?router_bias"


@dataclass(frozen=True)
class Lossy(Exchange):
    """What exchanges share that leave something out of what they send.

    - `axis`: over which of the data axes, or a tuple of them; over the others sums are exact.
      Workers are then not devices but pods, say.
    - `feedback`: what is left out of a gradient is added to the next. It is kept in the state,
      `State.errors`, and in checkpoints.
    - `exact`: patterns of whole paths of parameters whose gradients are summed exactly over these
      axes too.
    """

    axis: str | tuple[str, ...]
    feedback: bool = True
    exact: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_axis(self._name, self.axis)
        check.assign(self, feedback=check.boolean(self._name, "feedback", self.feedback))
        check.patterns(self._name, "exact", self.exact)

    @property
    def _name(self) -> str:
        """The name of the exchange in errors."""
        return type(self).__name__

    @property
    def keeps_errors(self) -> bool:
        """Whether it keeps what it has left out of a gradient: with `feedback`."""
        return self.feedback

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the workers, as a tuple."""
        return as_tuple(self.axis)

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """The patterns of paths that it was given, by the argument."""
        return {"exact": self.exact}

    def is_exact(self, parameter: Parameter) -> bool:
        """Whether a parameter's path is one of the exact ones, as a router's bias is."""
        patterns = (*self.exact, ROUTER_BIAS)
        return any(re.fullmatch(pattern, parameter.path) for pattern in patterns)

    def over(self, parameter: Parameter) -> tuple[str, ...]:
        """The axes over which something is left out of a parameter's gradient; none if exact."""
        if self.is_exact(parameter):
            return ()
        return averaged_axes(self.axes, parameter)


@dataclass(frozen=True)
class Compressed(Lossy):
    """What `OneBit` and `Quantised` share: gradients averaged by `pmean`, all together.

    What compression takes from a gradient is added to the next twice, once where it is sent and
    once where it is averaged.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        # The codec checks its own options when it is made.
        # Wrong options are refused here, and not when a step is traced.
        self.codec  # noqa: B018

    @property
    def codec(self) -> Codec:
        """What turns numbers into bytes and back; each exchange has its own."""
        raise NotImplementedError

    def first_errors(self, parameter: Parameter, sizes: Mapping[str, int]) -> Errors:
        """What a device has left over of a parameter before the first step: zeros."""
        return self.pieces(parameter, sizes).errors()

    def pieces(self, parameter: Parameter, sizes: Mapping[str, int]) -> Pieces:
        """How a device's shard of a parameter's gradient is cut.

        `sizes` are those of the mesh's axes.
        """
        over, split = self.over(parameter), spec_axes(parameter.stored)
        # ZeRO and the names split evenly, so that all shards have as many elements.
        elements = math.prod(parameter.shape) // parts_over(sizes, split)
        shared = parts_over(sizes, axes_without(sizes, (*over, *split)))
        return Pieces(elements, shared, parts_over(sizes, over))

    def average(
        self,
        gradients: Sequence[jax.Array],
        parameters: Sequence[Parameter],
        inputs: ExchangeInputs,
    ) -> tuple[list[jax.Array], Sequence[Any]]:
        """The mean over workers of each gradient, and the errors that are left of it.

        Those that have the same axes go together, in two collectives.
        """
        means, errors = list(gradients), list(inputs.errors)
        for (over, shared), members in self._groups(parameters, inputs.shared).items():
            owed = [inputs.errors[i] for i in members] if self.feedback else None
            group_means, left = pmean(
                [gradients[i] for i in members],
                over,
                self.codec,
                owed,
                alive=[inputs.alive[i] for i in members],
                shared=shared,
            )
            # Each goes back to where it came from among all gradients.
            for k, i in enumerate(members):
                means[i] = group_means[k]
                if self.feedback:
                    errors[i] = left[k]
        return means, errors

    def _groups(
        self, parameters: Sequence[Parameter], shared: Sequence[tuple[str, ...]]
    ) -> dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]]:
        """The positions of the parameters that are averaged together.

        They are told apart by the axes of their workers, and by those along which devices have the
        same values of them.
        """
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = defaultdict(list)
        for position, (parameter, own) in enumerate(zip(parameters, shared, strict=True)):
            groups[self.over(parameter), own].append(position)
        return groups


def check_axis(name: str, axis: Any) -> None:
    """Refuse what is neither an axis nor a tuple of several, on behalf of an exchange of a name."""
    if not _are_axes(axis):
        raise check.refusal(name, "axis", axis, 'an axis of the mesh, `"pod"`, or several: a tuple')


def _are_axes(axis: Any) -> bool:
    """Whether an argument is the name of an axis, or a tuple of different ones."""
    if isinstance(axis, str):
        return True
    if not isinstance(axis, tuple) or not axis:
        return False
    return all(isinstance(name, str) for name in axis) and len(set(axis)) == len(axis)


@dataclass(frozen=True)
class OneBit(Compressed):
    """1-bit gradients: the sign of each number, a scale for each block, and error feedback.

    What is sent are momenta under `onebit_adam`, and gradients under other optimizers: with
    `optax.sgd` that is SGD with error compensation, and without `feedback` and with
    `optax.sign_sgd` the majority vote of signSGD, weighted by the scales of
    workers.

    - `axis`: over which of the data axes, or a tuple of them; over the others sums are exact.
    - `feedback`: what compression takes from a message is added to the next. It is kept in the
      state, `State.errors`.
    - `exact`: patterns of whole paths of parameters whose gradients are summed exactly over these
      axes too.
    - `scale`: what stands for the numbers of a block, `"mean"` of their absolute values, or
      `"rms"`, the root of their mean square. See `Signs`.
    - `block`: how many numbers share a scale: a multiple of 8 up to 1,024, and of 1,024 beyond.

    >>> OneBit("pod").over(Parameter("w", (8,), jax.P(), ("pod", "data"), jax.P("data")))
    ('pod',)
    """

    scale: Literal["mean", "rms"] = "mean"
    block: int = 2048

    @property
    def codec(self) -> Codec:
        """Signs, with the scale and the block of this exchange."""
        return Signs(self.scale, self.block)


@dataclass(frozen=True)
class Quantised(Compressed):
    """Gradients as integers of eight or four bits, with a scale for each block of numbers.

    - `axis`: over which of the data axes, or a tuple of them; over the others sums are exact.
    - `feedback`: what rounding takes from a message is added to the next, kept in the state,
      `State.errors`; by default it is lost.
    - `exact`: patterns of whole paths of parameters whose gradients are summed exactly over these
      axes too.
    - `bits`: 8 or 4.
    - `block`: how many numbers share a scale, an even number.

    It works with any optimizer.

    >>> Quantised("pod", bits=4).codec
    Integers(bits=4, block=256)
    """

    feedback: bool = False
    bits: Literal[8, 4] = 8
    block: int = 256

    @property
    def codec(self) -> Codec:
        """Integers, with the bits and the block of this exchange."""
        return Integers(self.bits, self.block)
