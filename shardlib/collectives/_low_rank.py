"""Gradients as products of two thin matrices (PowerSGD, arXiv 1905.13727).

Of a matrix M, the mean of the workers' M_w, each with what it is owed:

    P = mean of M_w Q         n x r, sent       Q is that of the last step
    P = its columns, made orthogonal
    Q = mean of M_w^T P       m x r, sent
    mean = P Q^T,  and each worker is owed  M_w - P Q^T

That is one step of a power iteration for the largest singular vectors of M. Each starts where the
last one ended, so that over steps they are found, as far as gradients of steps are alike.

A matrix may be split over devices of a worker. Then sums along its rows and columns go over these
too, on the network within the worker, and the factors are those of the whole matrix.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.checks import _arguments as check
from shardlib.collectives._exact import ExchangeInputs, Parameter, averaged_axes
from shardlib.collectives._exchanges import Lossy
from shardlib.collectives._feedback import (
    Feedback,
    Matrix,
    local_shape,
    matrix_of,
    of_one_worker,
    split_by,
    zeros,
)
from shardlib.collectives._worker_sums import WorkerAxes, other_axes, summed_over_workers
from shardlib.layouts._specs import spec_axes
from shardlib.modeling._random import scrambled

# By what part of their squares columns are made longer before they are made orthogonal, so that
# dependent ones, of a gradient of lower rank, come out short instead of as noise.
_RIDGE = 1e-6
# The first pass leaves them nearly orthogonal, and the second as much as float32 can have them.
_PASSES = 2


@dataclass(frozen=True)
class PowerSGD(Lossy):
    """PowerSGD: gradients of matrices as products of low-rank factors, with error feedback.

    It works with any optimizer of optax. Those that say themselves what is sent, such as
    `onebit_adam`, need `OneBit` or `Quantised`.

    - `axis`: over which of the data axes, or a tuple of them; over the others sums are exact.
    - `rank`: how many columns the factors have, of matrices that `ranks` does not name.
    - `ranks`: pairs of a pattern of whole paths and a rank, of which the first that fits counts,
      such as `((".*/kernel", 8),)`. A rank that a matrix does not have is refused.
    - `feedback`: what the factors leave out of a gradient is added to the next. It is kept in the
      state, `State.errors`.
    - `exact`: patterns of whole paths of parameters whose gradients are summed exactly over these
      axes too. So are vectors, and matrices whose factors would not be smaller.

    A parameter is a matrix with as many rows as columns as its dims allow; one that stacks layers
    or experts, by the names of its dims, is one matrix of each.

    >>> import shardlib as sl
    >>> parameter = sl.collectives.Parameter("w", (64, 64), jax.P(), ("pod",), jax.P())
    >>> PowerSGD("pod", rank=4).over(parameter), PowerSGD("pod", rank=32).over(parameter)
    (('pod',), ())
    """

    rank: int = 4
    ranks: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        takes = "a number of columns"
        rank = check.whole("PowerSGD", "rank", self.rank, takes, least=1)
        check.assign(self, rank=rank)
        pairs = 'a tuple of pairs of a pattern and a rank: `((".*/kernel", 8),)`'
        check.kind("PowerSGD", "ranks", self.ranks, tuple, pairs)
        for pair in self.ranks:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise check.refusal("PowerSGD", "ranks", self.ranks, pairs)
            check.patterns("PowerSGD", "ranks", pair[:1])
            check.whole("PowerSGD", "ranks", pair[1], takes, least=1)

    @property
    def keeps_errors(self) -> bool:
        """It keeps factors in any case, and errors with `feedback`."""
        return True

    @property
    def patterns(self) -> dict[str, tuple[str, ...]]:
        """The patterns of paths that it was given, by the argument."""
        return {"exact": self.exact, "ranks": tuple(pattern for pattern, _ in self.ranks)}

    def rank_of(self, parameter: Parameter) -> int:
        """The rank of a parameter's factors; 0 if its gradient is summed exactly."""
        if self.is_exact(parameter):
            return 0
        matrix = matrix_of(parameter)
        rows = columns = 1
        if matrix is not None:
            _, rows, columns = matrix.size(parameter.shape)
        for pattern, rank in self.ranks:
            if re.fullmatch(pattern, parameter.path):
                self._check_rank(parameter, rank, rows, columns)
                return rank
        if matrix is None:
            return 0
        is_smaller = self.rank * (rows + columns) < rows * columns
        return self.rank if is_smaller else 0

    def _check_rank(self, parameter: Parameter, rank: int, rows: int, columns: int) -> None:
        """Refuse a rank that was asked for, and that a matrix does not have."""
        if rank <= min(rows, columns) and rows * columns > 1:
            return
        raise ValueError(
            f"`PowerSGD(ranks=...)` asks for rank {rank} of `{parameter.path}`, whose shape "
            f"{parameter.shape} is that of matrices of {rows} by {columns}: they have at most "
            f"rank {min(rows, columns)}, and one by one is no matrix at all. Ask for less, or have "
            f"it summed exactly, `exact=({parameter.path!r},)`."
        )

    def over(self, parameter: Parameter) -> tuple[str, ...]:
        """The axes over which a parameter's gradient is sent as factors; none if it is exact."""
        if not self.rank_of(parameter):
            return ()
        return averaged_axes(self.axes, parameter)

    def first_errors(self, parameter: Parameter, sizes: Mapping[str, int]) -> Feedback:
        """What a device has left over of a parameter before the first step."""
        matrix, shape = matrix_of(parameter), local_shape(parameter, sizes)
        assert matrix is not None
        warm = zeros((*_columns(matrix, shape), self.rank_of(parameter)))
        return Feedback(zeros(shape) if self.feedback else None, warm)

    def average(
        self,
        gradients: Sequence[jax.Array],
        parameters: Sequence[Parameter],
        inputs: ExchangeInputs,
    ) -> tuple[list[jax.Array], Sequence[Any]]:
        """The product of factors in place of each gradient's mean, and what is left of it.

        The factors of all parameters go together: each of the two takes one sum over workers.
        """
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        if all(lax.axis_size(self.over(parameter)) == 1 for parameter in parameters):
            # Nothing is sent between workers, so nothing is left out.
            return of_one_worker(gradients, inputs.errors)
        factored = []
        for number, (gradient, parameter) in enumerate(zip(gradients, parameters, strict=True)):
            before: Feedback = inputs.errors[number]
            factored.append(self._factored(gradient, parameter, before))
        factored = _started(factored)
        bucket = self.within.bucket_bytes
        lefts = [_product(each.matrix, each.warm) for each in factored]
        lefts = _means(lefts, [each.left for each in factored], sizes, bucket)
        for _ in range(_PASSES):
            lefts = _orthogonal(lefts, [each.row_axes for each in factored])
        rights = []
        for each, left in zip(factored, lefts, strict=True):
            rights.append(_product(each.matrix.swapaxes(1, 2), left))
        rights = _means(rights, [each.right for each in factored], sizes, bucket)
        means, after = [], []
        for each, left, right in zip(factored, lefts, rights, strict=True):
            product = _product(left, right.swapaxes(1, 2))
            error = None
            if self.feedback:
                error = (each.matrix - product).reshape(each.shape)
            means.append(product.reshape(each.shape))
            after.append(Feedback(error, right.reshape(each.warm_shape)))
        return means, after

    def _factored(self, gradient: jax.Array, parameter: Parameter, before: Feedback) -> "_Factored":
        """A gradient as matrices, with what it is owed, and the factor it starts from."""
        matrix = matrix_of(parameter)
        assert matrix is not None
        if before.error is not None:
            gradient = gradient + before.error
        count, rows, columns = matrix.size(gradient.shape)
        row_axes = split_by(parameter, matrix.stacked, matrix.columns)
        column_axes = split_by(parameter, matrix.columns, len(parameter.shape))
        sizes = dict(jax.sharding.get_abstract_mesh().shape)
        over, split = self.over(parameter), spec_axes(parameter.stored)
        shared = other_axes(sizes, (*over, *split))
        # A factor is the same along the axes that split the other dim, once it is added up there.
        return _Factored(
            matrix=gradient.reshape(count, rows, columns),
            warm=before.warm.reshape(count, columns, -1),
            column_numbers=_column_numbers(matrix, parameter, gradient.shape),
            shape=gradient.shape,
            warm_shape=before.warm.shape,
            row_axes=row_axes,
            left=_Sum(column_axes, WorkerAxes(over, row_axes, (*shared, *column_axes))),
            right=_Sum(row_axes, WorkerAxes(over, column_axes, (*shared, *row_axes))),
        )


class _Sum(NamedTuple):
    """How a factor is added up: first over axes within the worker, then over workers."""

    within: tuple[str, ...]
    workers: WorkerAxes


class _Factored(NamedTuple):
    """A device's shard of a gradient as matrices, and how their factors are added up."""

    matrix: jax.Array  # (matrices, rows, columns)
    warm: jax.Array  # (matrices, columns, rank)
    column_numbers: jax.Array  # in the whole matrix
    shape: tuple[int, ...]
    warm_shape: tuple[int, ...]
    row_axes: tuple[str, ...]
    left: _Sum
    right: _Sum


def _columns(matrix: Matrix, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dims of the columns of an array of matrices, after those that count matrices."""
    return (*shape[: matrix.stacked], *shape[matrix.columns :])


def _started(factored: list[_Factored]) -> list[_Factored]:
    """The same with factors to begin with where the last ones are zero: in the first step, say."""
    not_zero = [jnp.any(each.warm != 0, (1, 2)).astype(jnp.int32) for each in factored]
    # Devices have different columns of a factor, which is zero if all of them are.
    not_zero = _summed(not_zero, [each.left.within for each in factored])
    started = []
    for number, (each, count) in enumerate(zip(factored, not_zero, strict=True)):
        start = start_of(number, each.column_numbers, each.warm.shape[2])
        warm = jnp.where((count == 0)[:, None, None], start, each.warm)
        started.append(each._replace(warm=warm))
    return started


def start_of(number: int, columns: jax.Array, rank: int) -> jax.Array:
    """A factor to begin with, `(columns, rank)`: the same in every step and on every mesh.

    `number` tells parameters apart, and `columns` are those of a device, in the whole matrix.
    """
    word = columns[:, None] * jnp.uint32(0x9E3779B1)
    word += jnp.arange(rank, dtype=jnp.uint32) * jnp.uint32(0x85EBCA77)
    seed = jnp.uint32(0xC2B2AE35 * (number + 1) % 2**32)
    return scrambled(word + seed).astype(jnp.float32) * jnp.float32(2**-31) - 1


def _column_numbers(matrix: Matrix, parameter: Parameter, shape: tuple[int, ...]) -> jax.Array:
    """The numbers, in the whole matrix, of the columns of a device's shard of a shape."""
    numbers = jnp.zeros((), jnp.uint32)
    for dim in range(matrix.columns, len(shape)):
        axes = split_by(parameter, dim, dim + 1)
        place: Any = lax.axis_index(axes) if axes else 0
        own = jnp.uint32(place * shape[dim]) + jnp.arange(shape[dim], dtype=jnp.uint32)
        numbers = numbers[..., None] * jnp.uint32(parameter.shape[dim]) + own
    return numbers.reshape(-1)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Products of stacked matrices in float32, where a TPU would round to bfloat16 by default."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _means(
    factors: list[jax.Array], sums: Sequence[_Sum], sizes: Mapping[str, int], bucket_bytes: int
) -> list[jax.Array]:
    """The means over workers of factors, of which devices of a worker have parts."""
    whole = _summed(factors, [each.within for each in sums])
    axes = [each.workers for each in sums]
    totals = summed_over_workers(whole, axes, sizes, bucket_bytes)
    means = []
    for total, own in zip(totals, axes, strict=True):
        means.append(total / lax.axis_size(own.over))
    return means


def _summed(arrays: list[jax.Array], axes: Sequence[tuple[str, ...]]) -> list[jax.Array]:
    """Sums over axes within the worker, those over the same axes in one collective."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for position, own in enumerate(axes):
        if own:
            groups[own].append(position)
    sums = list(arrays)
    for own, positions in groups.items():
        totals = lax.psum([arrays[position] for position in positions], own)
        for position, total in zip(positions, totals, strict=True):
            sums[position] = total
    return sums


def _orthogonal(factors: list[jax.Array], row_axes: Sequence[tuple[str, ...]]) -> list[jax.Array]:
    """Factors with orthogonal columns of length one, from their products with themselves.

    These products are small, and all that devices with other rows of a factor tell each other.
    """
    squares = [_product(factor.swapaxes(1, 2), factor) for factor in factors]
    squares = _summed(squares, row_axes)
    by_rank: dict[int, list[int]] = defaultdict(list)
    for position, square in enumerate(squares):
        by_rank[square.shape[2]].append(position)
    orthogonal = list(factors)
    # All of one rank together, since each is a few numbers.
    for positions in by_rank.values():
        together = jnp.concatenate([squares[position] for position in positions])
        combined = _orthogonalizing(together)
        first = 0
        for position in positions:
            last = first + squares[position].shape[0]
            orthogonal[position] = _product(factors[position], combined[first:last])
            first = last
    return orthogonal


def _orthogonalizing(squares: jax.Array) -> jax.Array:
    """What combines the columns of factors P into orthogonal ones, from `P^T P`: Gram-Schmidt.

    It is the usual one, but for where products of columns are taken from: the square has them.
    """
    rank = squares.shape[2]
    size = jnp.trace(squares, axis1=1, axis2=2)[:, None, None]
    # What is zero stays zero, divided by what is not.
    least = _RIDGE * size / rank + jnp.finfo(jnp.float32).tiny
    unit = jnp.eye(rank, dtype=squares.dtype)
    squares = squares + unit * least
    found = jnp.zeros((squares.shape[0], rank, 0), squares.dtype)
    for number in range(rank):
        along = _product(found.swapaxes(1, 2), squares[:, :, number : number + 1])
        column = unit[:, number : number + 1] - _product(found, along)
        length = _product(column.swapaxes(1, 2), _product(squares, column))
        # What is left of a column that depends on those before is no shorter but for rounding.
        length = jnp.maximum(length, least)
        found = jnp.concatenate([found, column * lax.rsqrt(length)], 2)
    return found
