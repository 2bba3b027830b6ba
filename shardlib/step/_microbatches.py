"""The microbatches of a device: which examples each holds, and for which examples keys draw.

Microbatch `k` of `n` holds every `n`-th row of the device, from row `k` on:

    rows of the device   0  1  2  3  4  5  6  7        n = 2
    microbatch           0  1  0  1  0  1  0  1

Over all devices that is every `n`-th example of the batch, so microbatch `k` holds the same
examples on every mesh.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax

from shardlib.modeling._random import is_key, row_keys
from shardlib.step._strategy import Strategy


@dataclass(frozen=True)
class Microbatches:
    """How the examples of one device are split into microbatches.

    Attributes:
        count: the number of microbatches.
        rows: the examples of this device, in all microbatches together.
        worker: the device's index along the data axes, a traced number.
        first_row: the number of the device's first example in the whole batch.
        by_mesh: whether draws may depend on the mesh, see `Strategy.draws`.
    """

    count: int
    rows: int
    worker: Any
    first_row: Any
    by_mesh: bool

    def with_keys(self, number: Any, *trees: Any) -> tuple[Any, ...]:
        """Trees whose keys draw for the examples of one microbatch.

        A draw with a row per example draws each row by the example's number in the whole batch, so
        that it does not depend on the device that makes it.
        """
        # Rows of a microbatch are every `count`-th row, from `first_row + number` on.
        start = self.first_row + number
        return tuple(self._keyed(tree, start) for tree in trees)

    def _keyed(self, tree: Any, start: Any) -> Any:
        def keyed(leaf: Any) -> Any:
            # Numbers of the user's own pass through: only keys know which rows they draw for.
            if not is_key(leaf):
                return leaf
            return row_keys(
                leaf,
                rows=self.rows // self.count,
                start=start,
                stride=self.count,
                by_mesh=self.by_mesh,
            )

        return jax.tree.map(keyed, tree)


def microbatches_of(batch: Any, strategy: Strategy, apart: tuple[str, ...] = ()) -> Microbatches:
    """The microbatches of a device's examples, inside the region that is manual over the data.

    `apart` are the axes of workers outside of the strategy's own axes of data, if there are any.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    # The index counts over all data axes, the last the fastest, as a batch is laid out.
    axes = (*apart, *strategy.data_axes)
    worker = lax.axis_index(axes) if axes else 0
    return Microbatches(
        count=strategy.microbatches,
        rows=rows,
        worker=worker,
        first_row=worker * rows,
        by_mesh=strategy.draws == "by_mesh",
    )


def every_nth(batch: Any, count: int, number: Any = ...) -> Any:
    """All microbatches of a batch, stacked along a new first dim, or the one of a `number`."""

    def split(x: jax.Array) -> jax.Array:
        # Rows k, k + n, k + 2n ... of the batch, for a stride of n, are column k of this reshape.
        stacked = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
        return stacked[number]

    return jax.tree.map(split, batch)
