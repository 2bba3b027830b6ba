"""What a device has of an exchange's errors, as arrays that do not depend on how a mesh cuts them.

    exchanges of codes    worker   (workers, *shape)    what each worker has left out
                          server   (*shape)             what was left out of the mean
    factors, and the      error    (workers, *shape)    what each worker has left out
    largest elements      warm     (matrices, columns, rank), the factor to start from

Each form is used where every axis is manual, on what one device has.
"""

from typing import Any, Protocol

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.collectives._compressed import Errors, Pieces
from shardlib.collectives._exact import Exchange, Parameter
from shardlib.collectives._exchanges import Compressed
from shardlib.collectives._feedback import Feedback, matrix_of
from shardlib.layouts._specs import axes_without, parts_over, spec_axes
from shardlib.step._strategy import Strategy

OWN = ("worker", "error")
"""The names of what each worker has of its own, with a dim of workers in front."""

WARM = "warm"
"""The name of the factor to start from."""


class ErrorForm(Protocol):
    """How the errors of one parameter are stored."""

    parameter: Parameter
    own: str  # the field that has a dim of workers

    @property
    def workers(self) -> int:
        """How many workers there are on this mesh."""
        ...

    def shapes(self, workers: int) -> Any:
        """The shapes of what is stored of so many workers."""
        ...

    def specs(self, *, is_split: bool = True) -> Any:
        """How that is laid out; whole along the dim of workers unless it `is_split`."""
        ...

    def stored(self, errors: Any) -> Any:
        """A device's part of what is stored, from its errors."""
        ...

    def local(self, stored: Any) -> Any:
        """A device's errors, from its part of what is stored."""
        ...


def form_of(strategy: Strategy, parameter: Parameter) -> ErrorForm:
    """The form in which the errors of a parameter are stored."""
    exchange = strategy.exchange.by
    if isinstance(exchange, Compressed):
        return _OfCodes(strategy, exchange, parameter)
    return _OfFeedback(strategy, exchange, parameter)


class _OfCodes:
    """The errors of codes, of which each device has rows of a part."""

    own = "worker"

    def __init__(self, strategy: Strategy, exchange: Compressed, parameter: Parameter) -> None:
        self.strategy, self.parameter = strategy, parameter
        self.over = exchange.over(parameter)
        sizes = strategy.device_mesh.shape
        self.cut: Pieces = exchange.pieces(parameter, sizes)
        self.workers = parts_over(sizes, self.over)
        # Along these, devices hold the same, so that each sends a part of it. Axes that split the
        # parameter hold different parts of it, and workers send their own.
        self.shared = axes_without(sizes, (*self.over, *spec_axes(parameter.stored)))

    def shapes(self, workers: int) -> Errors:
        return Errors((workers, *self.parameter.shape), self.parameter.shape)

    def specs(self, *, is_split: bool = True) -> Errors:
        stored = self.parameter.stored
        return Errors(_by_worker(self.over if is_split else None, stored), stored)

    def stored(self, errors: Errors) -> Errors:
        sharding = NamedSharding(self.strategy.device_mesh, self.parameter.stored)
        local_shape = sharding.shard_shape(self.parameter.shape)
        worker = _gathered(errors.worker[None], self.shared)
        # A server has one row of one part. Gathered over the workers, which are the servers too,
        # rows are that part; and then all parts are put together.
        part = _gathered(errors.server[None], self.over)
        server = _gathered(part[None], self.shared)
        whole = self.cut.whole(worker, local_shape)
        return Errors(whole[None], self.cut.whole(server, local_shape))

    def local(self, stored: Errors) -> Errors:
        # Each of the devices that hold the same took its part of the rows; here it takes them back.
        # Without such devices, there is one part.
        part: Any = lax.axis_index(self.shared) if self.shared else 0
        worker = self.cut.all_rows(stored.worker)[part]
        server = self.cut.all_rows(stored.server)[part]
        return Errors(worker, server[lax.axis_index(self.over)])


class _OfFeedback:
    """The errors of factors and of the largest elements: a device has those of its shard."""

    own = "error"

    def __init__(self, strategy: Strategy, exchange: Exchange, parameter: Parameter) -> None:
        self.parameter = parameter
        self.over = exchange.over(parameter)
        sizes = strategy.device_mesh.shape
        self.workers = parts_over(sizes, self.over)
        # On a mesh of one device the shard is the whole.
        self.whole: Feedback = jax.eval_shape(
            lambda: exchange.first_errors(parameter, dict.fromkeys(sizes, 1))
        )

    def shapes(self, workers: int) -> Feedback:
        error = warm = None
        if self.whole.error is not None:
            error = (workers, *self.whole.error.shape)
        if self.whole.warm is not None:
            warm = self.whole.warm.shape
        return Feedback(error, warm)

    def specs(self, *, is_split: bool = True) -> Feedback:
        error = warm = None
        stored = self.parameter.stored
        if self.whole.error is not None:
            error = _by_worker(self.over if is_split else None, stored)
        if self.whole.warm is not None:
            matrix = matrix_of(self.parameter)
            assert matrix is not None
            # A spec may be shorter than the shape, whose last dims then are whole.
            missing = len(self.parameter.shape) - len(stored)
            entries = (*stored, *[None] * missing)
            warm = PartitionSpec(*entries[: matrix.stacked], *entries[matrix.columns :])
        return Feedback(error, warm)

    def stored(self, errors: Feedback) -> Feedback:
        error = None if errors.error is None else errors.error[None]
        return Feedback(error, errors.warm)

    def local(self, stored: Feedback) -> Feedback:
        error = None if stored.error is None else stored.error[0]
        return Feedback(error, stored.warm)


def _by_worker(over: tuple[str, ...] | None, stored: PartitionSpec) -> PartitionSpec:
    """A dim of workers in front, and then the dims of the parameter."""
    return PartitionSpec(over, *stored)


def _gathered(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The arrays of all devices along some axes, one after the other in their first dim."""
    if not axes:
        return x
    return lax.all_gather(x, axes, axis=0, tiled=True)
