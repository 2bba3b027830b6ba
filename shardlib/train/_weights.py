"""What a step makes of a parameter: in which form it starts, when it is whole, and where its gradient is added up."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib._on_use import Weight
from shardlib._precision import cast
from shardlib._rules import spec_axes
from shardlib._tree import map_named
from shardlib._zero import Split, gather, scatter
from shardlib.train._exchange import Parameter
from shardlib.train._strategy import Strategy


@dataclass(frozen=True, eq=False)
class Use:
    """One parameter in a step. What it does is done manual over the data axes, to a device's own part."""

    path: str
    shape: tuple[int, ...]
    dtype: Any  # as stored
    named: PartitionSpec  # where it would lie by its names alone
    split: Split
    strategy: Strategy
    frozen: bool

    @cached_property
    def parameter(self) -> Parameter:
        """What the exchange is told of it. What is scattered in the backward pass comes to the exchange in parts."""
        spec = self.split.spec if self.weight is not None else self.named
        axes = tuple(axis for axis in self.strategy.data_axes if axis not in spec_axes(spec))
        return Parameter(self.path, self.shape, spec, axes, self.split.spec, self.strategy.dtypes.reduced(self.dtype))

    @cached_property
    def weight(self) -> Weight | None:
        """How it is made whole where it is used, or None: it is whole all through the step."""
        stage, dim = self.strategy.sharding.stage, self.split.dim
        if dim is None or stage < (3 if self.frozen else 2):
            return None

        def whole(stored: Any, taken: int) -> jax.Array:
            return self._gathered(stored, taken) if stage == 3 else stored

        def reduced(gradient: jax.Array, stored: Any, taken: int) -> jax.Array:
            with jax.named_scope("exchange"):
                wire = cast(gradient, self.strategy.dtypes.reduced(self.dtype))
                return scatter(wire, PartitionSpec(*self.named[taken:]), dim - taken, self.split.axes)

        return Weight(
            self.path, self.shape, self._compute, whole, None if self.frozen else reduced,
            stacked=dim, group=self.strategy.sharding.group(self.path), late=stage == 3,
        )  # fmt: skip

    def start(self, stored: jax.Array) -> jax.Array:
        """What is held of it all through the step."""
        if self.weight is not None and self.strategy.sharding.stage == 3:
            return stored
        return cast(stored, self._compute) if self.split.dim is None else self._gathered(stored, 0)

    def zero(self, stored: jax.Array) -> jax.Array:
        """The zero that stands for it where its gradient comes in parts."""
        return jnp.zeros(stored.shape, self.strategy.dtypes.reduced(self.dtype))

    @property
    def _compute(self) -> Any:
        return self.strategy.dtypes.of(self.path, self.dtype)

    def _gathered(self, stored: jax.Array, taken: int) -> jax.Array:
        assert self.split.dim is not None
        with jax.named_scope("gather"):
            part = cast(stored, self._compute)
            limit = self.strategy.sharding.bucket_bytes if not taken else 0
            return gather(part, PartitionSpec(*self.named[taken:]), self.split.dim - taken, self.split.axes, limit)


def uses(tree: Any, named: Any, splits: dict[str, Split], strategy: Strategy, *, frozen: bool) -> Any:
    """A `Use` for each of a tree of parameters, from their shapes, their specs by name and how ZeRO splits them."""
    return map_named(
        lambda path, leaf, spec: Use(path, leaf.shape, leaf.dtype, spec, splits[path], strategy, frozen), tree, named
    )
