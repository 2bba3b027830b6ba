"""Loops over the layers of a part, which are run alone or two at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Result = TypeVar("Result")
Other = TypeVar("Other")


@dataclass(frozen=True, eq=False)
class Sweep(Generic[Result]):
    """A loop over the layers of a part, forward or backward.

    - `body`, `carry`, `scanned` and `reverse` are what `lax.scan` takes.
    - `finish` makes the result of the last carry and the stacked outputs.
    """

    body: Callable[[Any, Any], tuple[Any, Any]]
    carry: Any
    scanned: Any
    finish: Callable[[Any, Any], Result]
    reverse: bool = False

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return jax.tree.leaves(self.scanned)[0].shape[0]

    def run(self) -> Result:
        """The result of all layers."""
        scanned = lax.scan(self.body, self.carry, self.scanned, reverse=self.reverse)
        return self.finish(*scanned)

    def step(self, carry: Any, number: jax.Array) -> tuple[Any, Any]:
        """What the body makes in one turn, by the number of the turn."""
        layer = self.layers - 1 - number if self.reverse else number
        # A slice by a number, as a scan takes it. The layers in reverse would be a copy of all.
        scanned = jax.tree.map(_row_of(layer), self.scanned)
        return self.body(carry, scanned)


def run_together(first: Sweep[Result], second: Sweep[Other]) -> tuple[Result, Other]:
    """The results of two loops over as many layers, of each of which a turn runs one.

    Only the first has stacked outputs, and it goes forward.
    """

    def body(carries: tuple[Any, Any], number: jax.Array) -> tuple[tuple[Any, Any], Any]:
        carry, rows = first.step(carries[0], number)
        other_carry, _ = second.step(carries[1], number)
        return (carry, other_carry), rows

    numbers = jnp.arange(first.layers, dtype=jnp.int32)
    (carry, other_carry), rows = lax.scan(body, (first.carry, second.carry), numbers)
    return first.finish(carry, rows), second.finish(other_carry, None)


def _row_of(number: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function that takes the row of a number of an array."""
    return lambda x: lax.dynamic_index_in_dim(x, number, keepdims=False)
