"""What a step makes of a parameter: in which form it starts, when it is whole, and where its
gradient is added up.
"""

import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib._tree import map_named
from shardlib.collectives._exact import Exact, Parameter
from shardlib.collectives._zero import Split, gather, scatter, total
from shardlib.layouts._annotate import constrain
from shardlib.layouts._rules import as_tuple, keep_axes, spec_axes
from shardlib.step._precision import cast
from shardlib.step._state import combine
from shardlib.step._strategy import Strategy
from shardlib.tracing._lookups import partitionable
from shardlib.tracing._region import StoredWeight, Weight
from shardlib.tracing._stored_weights import WHOLE, evaluate_on_use


@dataclass(frozen=True, eq=False)
class StepParameter:
    """One parameter in a step. What it does is done manual over the data axes, to a device's own
    part.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any  # as stored
    named: PartitionSpec  # where it would lie by its names alone
    split: Split
    strategy: Strategy
    frozen: bool

    @property
    def late(self) -> bool:
        """Whether it is made whole where it is used."""
        return self.split.dim is not None and self.strategy.sharding.stage == 3

    @property
    def scattered(self) -> bool:
        """Whether its gradient is scattered in every backward pass."""
        return not self.frozen and self.split.dim is not None and self.strategy.sharding.stage >= 2

    @property
    def overlapped(self) -> bool:
        """Whether its gradient is exchanged in the last backward pass."""
        exchange = self.strategy.exchange
        large = self.split.layer > self.strategy.sharding.small
        return (
            isinstance(exchange, Exact)
            and exchange.overlap
            and large
            and not (self.scattered or self.frozen)
        )

    @cached_property
    def parameter(self) -> Parameter:
        """What the exchange is told of it. What is scattered in the backward pass comes to the
        exchange in parts.
        """
        exchanged = self.scattered or self.overlapped
        done = () if not exchanged else self.split.axes if self.split.dim is not None else self.axes
        return Parameter(
            self.path, self.shape, self.split.spec if exchanged else self.named,
            tuple(axis for axis in self.axes if axis not in done), self.split.spec,
            self.strategy.dtypes.reduced(self.dtype),
        )  # fmt: skip

    @property
    def axes(self) -> tuple[str, ...]:
        """The manual axes over which its gradient is a sum."""
        return tuple(
            axis for axis in self.strategy.manual_axes if axis not in spec_axes(self.named)
        )

    def weight(self, last: bool) -> Weight | None:
        """How it is made whole and its gradient reduced, in the last microbatch or one before;
        None: as it is.
        """
        accumulates = (
            not self.frozen and self.strategy.accumulate > 1 and not (last and self.overlapped)
        )
        if not (self.late or self.scattered or accumulates or (last and self.overlapped)):
            return None

        def reduced(taken: int, gradient: jax.Array) -> jax.Array:
            if self.scattered or (last and self.overlapped):
                gradient = self._exchanged(gradient, taken)
            return self._laid_out(cast(gradient, self._summed), taken) if accumulates else gradient

        return Weight(
            self.path, self.whole.shape, self.whole.dtype,
            whole=self._gathered if self.late else None, reduced=None if self.frozen else reduced,
            stacked=len(self.shape) if self.split.dim is None else self.split.dim,
            group=self.strategy.sharding.group(self.path) if self.late else None,
            accumulates_in_place=accumulates,
        )  # fmt: skip

    def start(self, stored: jax.Array) -> jax.Array:
        """What is held of it all through the step."""
        if self.late:
            return stored
        return cast(stored, self._compute) if self.split.dim is None else self._gathered(stored, 0)

    def zero(self, stored: jax.Array) -> jax.Array:
        """The zero that stands for it where its gradient comes reduced."""
        return jnp.zeros(stored.shape, self.parameter.reduce)

    def sums(self, stored: jax.Array, whole: jax.Array) -> jax.Array:
        """The sum of its gradients, before any: of a device's own, or scattered."""
        return self._laid_out(
            jnp.zeros((stored if self.scattered else whole).shape, self._summed), 0
        )

    @property
    def _summed(self) -> Any:
        dtypes = self.strategy.dtypes
        return dtypes.accumulated(dtypes.reduced(self.dtype) if self.scattered else self._compute)

    def _exchanged(self, gradient: jax.Array, taken: int) -> jax.Array:
        wire, spec = cast(gradient, self.parameter.reduce), PartitionSpec(*self.named[taken:])
        with jax.named_scope("exchange"):
            if self.split.dim is not None:
                return scatter(wire, spec, self.split.dim - taken, self.split.axes)
            return total(wire, spec, self.axes)

    def _laid_out(self, x: jax.Array, taken: int) -> jax.Array:
        automatic = jax.sharding.get_abstract_mesh().auto_axes
        spec = self.split.spec if self.scattered else self.named
        return constrain(x, keep_axes(PartitionSpec(*spec[taken:]), automatic)) if automatic else x

    @cached_property
    def whole(self) -> jax.ShapeDtypeStruct:
        """What the model gets of it: whole but for what its names split over the data axes."""
        sizes = [
            math.prod(
                self.strategy.device_mesh.shape[axis]
                for axis in as_tuple(entry)
                if axis in self.strategy.data_axes
            )
            for entry in (*self.named, *[None] * (len(self.shape) - len(self.named)))
        ]
        local = tuple(size // parts for size, parts in zip(self.shape, sizes, strict=True))
        return jax.ShapeDtypeStruct(local, self._compute)

    @property
    def _compute(self) -> Any:
        return self.strategy.dtypes.of(self.path, self.dtype)

    def _gathered(self, stored: jax.Array, taken: int) -> jax.Array:
        assert self.split.dim is not None
        with jax.named_scope("gather"):
            part = cast(stored, self._compute)
            limit = self.strategy.sharding.bucket_bytes if not taken else 0
            return gather(
                part,
                PartitionSpec(*self.named[taken:]),
                self.split.dim - taken,
                self.split.axes,
                limit,
            )


def step_parameters(
    tree: Any, named: Any, splits: dict[str, Split], strategy: Strategy, *, frozen: bool
) -> Any:
    """A `StepParameter` for each of a tree of parameters, from their shapes, their specs by name
    and how ZeRO splits them.
    """
    return map_named(
        lambda path, leaf, spec: StepParameter(
            path, leaf.shape, leaf.dtype, spec, splits[path], strategy, frozen
        ),
        tree,
        named,
    )


def with_partitionable_lookups(total: Any, uses: Any, strategy: Strategy) -> Any:
    """`total(params, ...)` with lookups that XLA's partitioner can split on the strategy's mesh."""
    return partitionable(total, jax.tree.map(lambda use: use.named, uses), strategy.batch_axes)


def evaluate_loss(total: Any, uses: Any, params: Any, *others: Any) -> Any:
    """What `total(params, *others)` gives where nothing is differentiated: the uses are those of
    frozen parameters.
    """
    described = jax.tree.map(lambda use: use.weight(True) or WHOLE, uses)
    held = jax.tree.map(
        lambda use, p: StoredWeight(use.start(p), None) if use.late else use.start(p), uses, params
    )
    if all(weight is WHOLE for weight in jax.tree.leaves(described)):
        return total(held, *others)
    return evaluate_on_use(total, described, held, *others)


class Weights:
    """All parameters of a step, manual over the data axes: what is held of each, and the sum of its
    gradients so far.
    """

    def __init__(self, trained: Any, fixed: Any, params: Any, frozen: Any) -> None:
        starts = partial(jax.tree.map, lambda use, stored: use.start(stored))
        self.uses, self.treedef = jax.tree.flatten(trained)
        self.fixed, self.fixed_held = fixed, starts(fixed, frozen)
        self.stored = self.treedef.flatten_up_to(params)
        self.held = self.treedef.flatten_up_to(starts(trained, params))
        of_each = zip(self.uses, self.stored, self.held, strict=True)
        self.sums: list[Any] = [
            jax.new_ref(use.sums(p, h)) if use.strategy.accumulate > 1 else None
            for use, p, h in of_each
        ]

    def gradient(self, total: Any, others: Any, last: bool) -> tuple[Any, list[Any]]:
        """What `total(params, *others)` gives beside the sum that is differentiated, and its
        gradient.

        Of what it has added to the sums, the gradient is None.
        """
        weights = [use.weight(last) for use in self.uses]
        described = combine(
            self.treedef.unflatten([weight or WHOLE for weight in weights]),
            jax.tree.map(lambda use: use.weight(last) or WHOLE, self.fixed),
        )
        fixed = jax.tree.map(
            lambda use, h: StoredWeight(h, None) if use.late else h, self.fixed, self.fixed_held
        )
        # The derivative is taken to what is whole, or to the zero that stands for what is not.
        at = [
            h if weight is None else jnp.float32(0) if weight.accumulates_in_place else use.zero(p)
            for weight, use, p, h in zip(weights, self.uses, self.stored, self.held, strict=True)
        ]

        def loss(at: list[Any]) -> Any:
            if all(weight is WHOLE for weight in jax.tree.leaves(described)):
                return total(combine(self.treedef.unflatten(at), fixed), *others)
            given = [
                a if weight is None else StoredWeight(h, a, sums)
                for weight, a, h, sums in zip(weights, at, self.held, self.sums, strict=True)
            ]
            return evaluate_on_use(
                total, described, combine(self.treedef.unflatten(given), fixed), *others
            )

        (_, aux), gradient = jax.value_and_grad(loss, has_aux=True)(at)
        adds = [weight is not None and weight.accumulates_in_place for weight in weights]
        return aux, [None if added else g for added, g in zip(adds, gradient, strict=True)]

    def summed(self, gradient: list[Any]) -> Any:
        """The whole gradient, of which the last microbatch gave what is not None."""
        leaves = [
            sums[...] if g is None else g for g, sums in zip(gradient, self.sums, strict=True)
        ]
        return self.treedef.unflatten(leaves)
