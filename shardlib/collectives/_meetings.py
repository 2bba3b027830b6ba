"""Exchanges that let workers train apart, and have them meet now and then.

Each worker has parameters and an optimizer's state of its own, and takes steps by itself. In a
meeting they average how far each has moved from the parameters on which they met before:

    center        the parameters that all workers share, from the last meeting
    moves         each worker's parameters minus the center
    mean          of the moves, exactly or as codes
    new center    `moved(center, mean)`, where every worker goes on

A meeting sends as much as a gradient does, and there is one every so many steps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib.checks import _arguments as check
from shardlib.collectives._exact import Exact, Exchange, Parameter, averaged_axes
from shardlib.collectives._exchanges import Lossy, check_axis
from shardlib.layouts._specs import as_tuple


class Met(NamedTuple):
    """What a meeting makes of one parameter.

    Attributes:
        center: what all workers share from now on.
        own: what this worker goes on with.
        kept: what the meeting keeps for the next one, by name.
    """

    center: jax.Array
    own: jax.Array
    kept: dict[str, jax.Array]


@dataclass(frozen=True)
class Meeting(Exchange):
    """What `LocalSGD`, `DiLoCo` and `ElasticAveraging` share.

    - `axis`: the axis of the mesh whose positions are the workers, or a tuple of several.
    - `every`: after how many steps workers meet.
    - `exchange`: how their moves are averaged, an exchange over the same axes such as
      `Quantised("pod", bits=4)`; None is exactly.
    - `fragments`: into how many parts parameters are divided, of which each has meetings of its
      own, in turn: as much is sent, in as many portions. Layers, and rows of matrices, are dealt
      out one by one.
    - `overlap`: whether moves are sent while the next step computes. At its end they are used, and
      a worker keeps what it has moved in that step.
    """

    axis: str | tuple[str, ...]
    every: int
    exchange: Exchange | None = None
    fragments: int = 1
    overlap: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        check_axis(name, self.axis)
        every = check.whole(name, "every", self.every, "a number of steps", least=1)
        overlap = check.boolean(name, "overlap", self.overlap)
        check.assign(self, every=every, overlap=overlap)
        takes = 'an exchange that sends less, such as `sl.collectives.Quantised("pod")`, or None'
        if self.exchange is not None:
            check.kind(name, "exchange", self.exchange, Lossy, takes)
        self._check_fragments(name)
        if self.exchange is not None and set(self.exchange.axes) != set(self.axes):
            raise ValueError(
                f"`{name}(axis={self.axis!r}, exchange={self.exchange})`: workers are apart along "
                f"{self.axes}, and their moves would be averaged over {self.exchange.axes}. Name "
                "the same axes in both."
            )

    def _check_fragments(self, name: str) -> None:
        """Refuse fragments that do not take turns in an interval, or whose errors would mix."""
        fragments = check.whole(name, "fragments", self.fragments, "a number of parts", least=1)
        check.assign(self, fragments=fragments)
        if self.every % fragments:
            longer = -(-self.every // fragments) * fragments
            raise ValueError(
                f"`{name}(every={self.every}, fragments={fragments})`: each part meets every "
                f"{self.every} steps, in turn with the others, and that does not divide into "
                f"{fragments}. Choose an interval that does: `every={longer}`."
            )
        if fragments > 1 and self.exchange is not None and self.exchange.keeps_errors:
            raise ValueError(
                f"`{name}(fragments={fragments}, exchange={self.exchange})`: errors, and factors "
                "of a low rank, are kept for whole parameters, and a part of one would be given "
                "what another part left. Send codes without feedback, "
                "`Quantised(..., feedback=False)`, or all at once, `fragments=1`."
            )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the workers, as a tuple."""
        return as_tuple(self.axis)

    @property
    def apart(self) -> tuple[str, ...]:
        """The same axes: workers have parameters of their own along all of them."""
        return self.axes

    @property
    def by(self) -> Exchange:
        """The exchange that averages moves."""
        return Exact() if self.exchange is None else self.exchange

    @property
    def keeps_errors(self) -> bool:
        """Whether the exchange of moves keeps what its codes leave out."""
        return self.by.keeps_errors

    @property
    def keeps(self) -> tuple[str, ...]:
        """The names of what a meeting keeps for the next one, each like the parameters."""
        return ()

    def over(self, parameter: Parameter) -> tuple[str, ...]:
        """The axes over which a parameter's moves are sent as codes; none if sent exactly."""
        return self.by.over(parameter)

    def first_errors(self, parameter: Parameter, sizes: Mapping[str, int]) -> Any:
        """What a device has left over of a parameter before the first meeting."""
        return self.by.first_errors(parameter, sizes)

    def met_over(self, parameter: Parameter) -> tuple[str, ...]:
        """The axes over which a parameter's moves are averaged, exactly or as codes."""
        return averaged_axes(self.axes, parameter)

    def is_due(self, steps: Any) -> Any:
        """Whether workers meet at the end of a step, by the number of steps with this one."""
        return steps % self._gap == 0

    def fragment_at(self, steps: Any) -> Any:
        """Which part of the parameters meets at the end of a step in which one does."""
        return steps // self._gap % self.fragments

    @property
    def _gap(self) -> int:
        """After how many steps the next part meets."""
        return self.every // self.fragments

    def met(
        self,
        center: jax.Array,
        own: jax.Array,
        mean: jax.Array,
        kept: Mapping[str, jax.Array],
        workers: int,
    ) -> Met:
        """What becomes of one parameter in a meeting, in float32 or wider.

        Args:
            center: what all workers share, from the last meeting.
            own: what this worker has.
            mean: the mean over workers of their moves, `own - center`.
            kept: what the last meeting has kept, by name.
            workers: how many workers there are.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LocalSGD(Meeting):
    """Workers train apart, with any optimizer, and average their parameters every so many steps.

    Each worker keeps the state of its optimizer to itself (arXiv 1805.09767).

    - `axis`: the axis of the mesh whose positions are the workers, or a tuple of several.
    - `every`: after how many steps they average.
    - `exchange`: how, an exchange over the same axes that sends codes; None is exactly.
    - `fragments`: into how many parts parameters are divided, which are averaged in turn.
    - `overlap`: whether moves are sent while the next step computes, and used at its end.

    >>> import optax, shardlib as sl
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data,
    ...     exchange=sl.collectives.LocalSGD("data", every=4))
    >>> state = sl.init(lambda: {"w": jnp.zeros(16)}, optax.sgd(0.1), strategy)
    >>> state.workers.params["w"].shape
    (8, 16)
    """

    def met(
        self,
        center: jax.Array,
        own: jax.Array,
        mean: jax.Array,
        kept: Mapping[str, jax.Array],
        workers: int,
    ) -> Met:
        """All go on from the mean of their parameters."""
        center = center + mean
        return Met(center, center, {})


@dataclass(frozen=True)
class DiLoCo(Meeting):
    """Workers train apart for hundreds of steps; the mean of their moves is an outer gradient.

    An outer optimizer, SGD with Nesterov's momentum, takes a step with it from where they met
    before, and all go on from there (arXiv 2311.08105).

    - `axis`: the axis of the mesh whose positions are the workers, or a tuple of several.
    - `every`: after how many steps they meet.
    - `exchange`: how moves are averaged, an exchange over the same axes that sends codes; None is
      exactly.
    - `fragments`: into how many parts parameters are divided, which meet in turn.
    - `overlap`: whether moves are sent while the next step computes, and used at its end.
    - `learning_rate`, `momentum`: those of the outer optimizer.

    >>> import shardlib as sl
    >>> sl.collectives.DiLoCo("pod", every=100, exchange=sl.collectives.Quantised("pod", bits=4)).by
    Quantised(axis='pod', feedback=False, exact=(), bits=4, block=256)
    """

    every: int = 500
    learning_rate: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        rate = check.number("DiLoCo", "learning_rate", self.learning_rate, above=0)
        momentum = check.number("DiLoCo", "momentum", self.momentum, least=0, below=1)
        check.assign(self, learning_rate=rate, momentum=momentum)

    @property
    def keeps(self) -> tuple[str, ...]:
        """The momentum of the outer optimizer."""
        return ("momentum",)

    def met(
        self,
        center: jax.Array,
        own: jax.Array,
        mean: jax.Array,
        kept: Mapping[str, jax.Array],
        workers: int,
    ) -> Met:
        """All go on from where Nesterov's step leads with the mean of moves."""
        momentum = self.momentum * kept["momentum"] + mean
        center = center + self.learning_rate * (mean + self.momentum * momentum)
        return Met(center, center, {"momentum": momentum})


@dataclass(frozen=True)
class ElasticAveraging(Meeting):
    """Workers are tied to a center by a spring, and stay apart (EASGD, arXiv 1412.6651).

    Every so many steps each worker moves towards the center, and the center towards their mean.

    - `axis`: the axis of the mesh whose positions are the workers, or a tuple of several.
    - `every`: after how many steps they meet.
    - `exchange`: how moves are averaged, an exchange over the same axes that sends codes; None is
      exactly.
    - `fragments`: into how many parts parameters are divided, which meet in turn.
    - `overlap`: whether moves are sent while the next step computes, and used at its end.
    - `rate`: the part of the way to the mean of workers that the center goes. Each worker goes
      `rate / workers` of its way to the center.

    >>> import shardlib as sl
    >>> sl.collectives.ElasticAveraging("data", every=10).rate
    0.9
    """

    rate: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        takes = "a part of the way, above 0 and at most 1"
        rate = check.number("ElasticAveraging", "rate", self.rate, takes, above=0, most=1)
        check.assign(self, rate=rate)

    def met(
        self,
        center: jax.Array,
        own: jax.Array,
        mean: jax.Array,
        kept: Mapping[str, jax.Array],
        workers: int,
    ) -> Met:
        """The center and the worker move towards each other, both from where they were."""
        own = own - self.rate / workers * (own - center)
        return Met(center + self.rate * mean, own, {})


def wide(x: jax.Array) -> jax.Array:
    """A parameter in the dtype in which meetings compute: float32, or its own if that is wider."""
    return x.astype(wide_dtype(x.dtype))


def wide_dtype(dtype: Any) -> Any:
    """The dtype in which meetings compute with parameters of a dtype."""
    return jnp.promote_types(dtype, jnp.float32)
