"""Exchanges that send codes: one bit for each number, or integers of eight or four."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax

from shardlib.checks import _arguments as check
from shardlib.collectives._codecs import Codec, Integers, Signs
from shardlib.collectives._compressed import pmean
from shardlib.collectives._exact import Exchange, ExchangeInputs, Parameter
from shardlib.layouts._rules import as_tuple


@dataclass(frozen=True)
class Compressed(Exchange):
    """What `OneBit` and `Quantised` share: gradients averaged by `pmean`, all together.

    - `axis`: over which of the data axes, or a tuple of them; over the others sums are exact.
      Workers are then not devices but pods, say.
    - `feedback`: what compression takes from a gradient is added to the next, once where it is sent
      and once where it is averaged. It is kept in the state, `State.errors`, and in checkpoints.
    - `exact`: patterns of whole paths of parameters whose gradients are summed exactly over these
      axes too.
    """

    axis: str | tuple[str, ...]
    feedback: bool = True
    exact: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        axes = as_tuple(self.axis) if isinstance(self.axis, str | tuple) else ()
        if (
            not axes
            or not all(isinstance(axis, str) for axis in axes)
            or len(set(axes)) < len(axes)
        ):
            raise check.refusal(
                self._name, "axis", self.axis, 'an axis of the mesh, `"pod"`, or several: a tuple'
            )
        check.assign(self, feedback=check.boolean(self._name, "feedback", self.feedback))
        check.patterns(self._name, "exact", self.exact)

    @property
    def _name(self) -> str:
        return type(self).__name__

    @property
    def codec(self) -> Codec:
        """What turns numbers into bytes."""
        raise NotImplementedError

    @property
    def keeps_errors(self) -> bool:
        """With feedback."""
        return self.feedback

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of `axis`."""
        return as_tuple(self.axis)

    def over(self, parameter: Parameter) -> tuple[str, ...]:
        """The axes, where they do not split the parameter and its path is not one of the exact
        ones.
        """
        return (
            ()
            if any(re.fullmatch(pattern, parameter.path) for pattern in self.exact)
            else super().over(parameter)
        )

    def average(
        self,
        gradients: Sequence[jax.Array],
        parameters: Sequence[Parameter],
        inputs: ExchangeInputs,
    ) -> tuple[list[jax.Array], Sequence[Any]]:
        """Those that have the same axes go together, in two collectives."""
        groups: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = defaultdict(list)
        for i, (parameter, shared) in enumerate(zip(parameters, inputs.shared, strict=True)):
            groups[self.over(parameter), shared].append(i)
        means, errors = list(gradients), list(inputs.errors)
        for (over, shared), members in groups.items():
            found, left = pmean(
                [gradients[i] for i in members],
                over,
                self.codec,
                [inputs.errors[i] for i in members] if self.feedback else None,
                alive=[inputs.alive[i] for i in members],
                shared=shared,
            )
            for k, i in enumerate(members):
                means[i] = found[k]
                if self.feedback:
                    errors[i] = left[k]
        return means, errors


@dataclass(frozen=True)
class OneBit(Compressed):
    """A bit for each number: its sign, with a scale for each block.

    Of momenta, as `onebit_adam` has it; or of gradients: with `optax.sgd` that is SGD with error
    compensation, and without `feedback` and with `optax.sign_sgd` the majority vote of signSGD.

    - `axis`: over which of the data axes, or a tuple of them; over the others sums are exact.
    - `feedback`: what compression takes from a message is added to the next. It is kept in the
      state, `State.errors`.
    - `exact`: patterns of whole paths of parameters whose gradients are summed exactly over these
      axes too.
    - `scale`, `block`: of signs, see `Signs`.

    >>> OneBit("pod").over(Parameter("w", (8,), jax.P(), ("pod", "data"), jax.P("data")))
    ('pod',)
    """

    scale: Literal["mean", "rms"] = "mean"
    block: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codec  # noqa: B018

    @property
    def codec(self) -> Codec:
        """Signs."""
        return Signs(self.scale, self.block)


@dataclass(frozen=True)
class Quantised(Compressed):
    """Integers of eight or four bits, with a scale for each block.

    - `axis`, `feedback`, `exact`: as `OneBit` has them; feedback is for the asking.
    - `bits`, `block`: of integers, see `Integers`.
    """

    feedback: bool = False
    bits: Literal[8, 4] = 8
    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.codec  # noqa: B018

    @property
    def codec(self) -> Codec:
        """Integers."""
        return Integers(self.bits, self.block)
