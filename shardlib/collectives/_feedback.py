"""What sparse and low-rank exchanges share: errors in the shape of the parameter, and its matrices.

Each worker has an error of its own, of a device's own shard of the parameter, and may have factors
that all workers share:

    error     what the worker's gradient had, and the mean has not
    warm      the factor of the last mean, from which the next one is found
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardlib.collectives._exact import Parameter
from shardlib.layouts._specs import as_tuple, parts_over


class Feedback(NamedTuple):
    """What an exchange keeps of one parameter for the next step.

    Attributes:
        error: what has been left out, of the worker's own; None without feedback.
        warm: the factor from which the next one is found, the same for all workers; None if there
            is none.
    """

    error: Any
    warm: Any


class Matrix(NamedTuple):
    """How the dims of an array are those of matrices.

    The first `stacked` dims count matrices, those up to `columns` are their rows, and all others
    their columns.
    """

    stacked: int
    columns: int

    def size(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """How many matrices there are in an array of a shape, and their rows and columns."""
        return (
            math.prod(shape[: self.stacked]),
            math.prod(shape[self.stacked : self.columns]),
            math.prod(shape[self.columns :]),
        )


def matrix_of(parameter: Parameter) -> Matrix | None:
    """The dims of a parameter as those of matrices, as square as they can be; None for vectors.

    >>> matrix_of(Parameter("w", (4, 64, 8, 8), jax.P(), (), jax.P(), stacked=1))
    Matrix(stacked=1, columns=2)
    """
    shape, stacked = parameter.shape, parameter.stacked
    best: Matrix | None = None
    fewest = math.inf
    for columns in range(stacked + 1, len(shape)):
        matrix = Matrix(stacked, columns)
        _, rows, across = matrix.size(shape)
        if min(rows, across) > 1 and rows + across < fewest:
            best, fewest = matrix, rows + across
    return best


def split_by(parameter: Parameter, first: int, last: int) -> tuple[str, ...]:
    """The axes that split some dims of a parameter at rest, from `first` up to `last`."""
    axes: list[str] = []
    for entry in parameter.stored[first:last]:
        axes.extend(as_tuple(entry))
    return tuple(axes)


def local_shape(parameter: Parameter, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a device's shard of a parameter at rest.

    `sizes` are those of the mesh's axes.
    """
    shape = list(parameter.shape)
    for dim, entry in enumerate(parameter.stored):
        shape[dim] //= parts_over(sizes, as_tuple(entry))
    return tuple(shape)


def zeros(shape: tuple[int, ...]) -> jax.Array:
    """Errors before the first step: float32 whatever the parameter is, since they are small."""
    return jnp.zeros(shape, jnp.float32)


def of_one_worker(
    gradients: Sequence[jax.Array], errors: Sequence[Any]
) -> tuple[list[jax.Array], list[Any]]:
    """The means of a single worker: its gradients, with all that it is owed."""
    means, after = [], []
    for gradient, before in zip(gradients, errors, strict=True):
        if before is not None and before.error is not None:
            gradient = gradient + before.error
            before = before._replace(error=jnp.zeros_like(before.error))
        means.append(gradient)
        after.append(before)
    return means, after
