"""What a step does with each parameter: gather it, reduce its gradient, and add gradients up.

Everything here runs in the region that is manual over the data axes, on a device's own arrays. What
happens when depends on the stage of ZeRO (see `docs/zero.md`):

                        stages 0 and 1          stage 2                 stage 3
    gathered            at the start            at the start            where it is used
    gradient reduced    in the exchange         in every backward pass  in every backward pass

With `Exact(overlap=True)` the gradients of large parameters are reduced in the last backward pass.
`docs/gradients.md` explains how that is done to a loss that is written with whole weights.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from shardlib._tree import map_named
from shardlib.collectives._exact import Exact, Parameter
from shardlib.collectives._zero_shards import gather, scatter, total
from shardlib.collectives._zero_split import Split
from shardlib.layouts._annotate import constrain
from shardlib.layouts._host import to_device
from shardlib.layouts._remat_policy import RematByBlock
from shardlib.layouts._specs import (
    as_tuple,
    axes_within,
    axes_without,
    keep_axes,
    parts_over,
    spec_axes,
)
from shardlib.step._offload import copied_in_parts, parameters_on_host
from shardlib.step._precision import cast
from shardlib.step._scopes import EXCHANGE, GATHER
from shardlib.step._state import combine
from shardlib.step._strategy import Strategy
from shardlib.tracing._chain_loops import chain_in_force
from shardlib.tracing._lookups import partitionable
from shardlib.tracing._region import StoredWeight, Weight
from shardlib.tracing._stored_weights import UNMANAGED, evaluate_on_use


@dataclass(frozen=True, eq=False)
class StepParameter:
    """One parameter in a step.

    Attributes:
        path: where it is in the tree of parameters.
        shape: its global shape.
        dtype: the dtype it is stored in.
        named: its layout by the names of its dims, without ZeRO.
        split: how ZeRO splits it further.
        strategy: the strategy of the step.
        frozen: whether it has no gradient.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    named: PartitionSpec
    split: Split
    strategy: Strategy
    frozen: bool

    @property
    def gathered_on_use(self) -> bool:
        """Whether it is made whole only where it is used."""
        return self.on_host or (self.split.is_split and self.strategy.sharding.stage == 3)

    @property
    def on_host(self) -> bool:
        """Whether it is stored in the memory of the host."""
        small = self.strategy.sharding.small
        return bool(parameters_on_host(self.strategy.offloaded, {self.path: self.split}, small))

    @property
    def scattered(self) -> bool:
        """Whether its gradient is scattered in every backward pass."""
        return not self.frozen and self.split.is_split and self.strategy.sharding.stage >= 2

    @property
    def overlapped(self) -> bool:
        """Whether its gradient is exchanged in the last backward pass, layer by layer."""
        exchange = self.strategy.exchange
        if not isinstance(exchange, Exact) or not exchange.overlap:
            return False
        # What is scattered is reduced in every backward pass in any case.
        if self.scattered or self.frozen:
            return False
        return self.split.layer > self.strategy.sharding.small

    @cached_property
    def exchanged(self) -> Parameter:
        """The description of the parameter that the exchange gets.

        A gradient that was reduced in the backward pass reaches the exchange in its stored layout,
        and is summed there only over the axes that are left.
        """
        layout = self.split.contributed
        done: tuple[str, ...] = ()
        if self.scattered or self.overlapped:
            layout = self.split.spec
            # ZeRO may split over some of the axes only, those that are near.
            done = self._reduced_over
        return Parameter(
            self.path,
            self.shape,
            layout,
            axes_without(self.axes, done),
            self.split.spec,
            self.strategy.dtypes.reduced(self.dtype),
            self.strategy.dtypes.sent(self.dtype),
            self.split.stacked,
        )

    @property
    def _reduced_over(self) -> tuple[str, ...]:
        """The manual axes over which a backward pass adds its gradient up."""
        return self.split.axes if self.split.is_split else self.axes

    @property
    def axes(self) -> tuple[str, ...]:
        """The manual axes over which its gradient is a sum: those that do not split it."""
        own = spec_axes(self.named)
        return axes_without(self.strategy.manual_axes, own)

    def weight(self, last: bool) -> Weight | None:
        """How it is made whole and its gradient reduced, in the `last` microbatch or one before.

        None if nothing is to be done: it is whole already, and `jax.grad` differentiates it.
        """
        is_exchanged_now = last and self.overlapped
        reduced_here = self.scattered or is_exchanged_now
        # The last microbatch's gradients of overlapped parameters come with the sums added, and go
        # on to the optimizer. All others are added to the sums in place.
        has_sums = not self.frozen and self.strategy.accumulate > 1
        accumulates = has_sums and not is_exchanged_now
        if not (self.gathered_on_use or accumulates or reduced_here):
            return None

        def reduced(gradient: jax.Array, consumed_dims: int) -> jax.Array:
            if reduced_here:
                gradient = self._reduced(gradient, consumed_dims)
            if accumulates:
                gradient = self._laid_out(cast(gradient, self._accumulated_dtype), consumed_dims)
            return gradient

        weight = Weight(
            self.path,
            self.whole.shape,
            self.whole.dtype,
            whole=None,
            reduced=None,
            stacked=self._most_consumed_dims,
            accumulates_in_place=accumulates,
            axes=self._reduced_over if reduced_here else (),
        )
        if self.gathered_on_use:
            group = self.strategy.sharding.group(self.path)
            weight = replace(weight, whole=self._made_whole, group=group)
        if not self.frozen:
            weight = replace(weight, reduced=reduced)
        return weight

    @property
    def _most_consumed_dims(self) -> int:
        """How many leading dims loops may take off: those before the ones that ZeRO splits."""
        return min(self.split.dims, default=len(self.shape))

    def start(self, stored: jax.Array) -> jax.Array:
        """What is held of it throughout the step: its shard, or the whole parameter."""
        if self.gathered_on_use:
            return stored
        if self.split.is_split:
            return self._gathered(stored, 0)
        return cast(stored, self._compute)

    def gradient_anchor(self, stored: jax.Array) -> jax.Array:
        """Zeros like its gradient, with respect to which the derivative is taken."""
        if self.scattered or self.overlapped:
            return jnp.zeros(stored.shape, self.exchanged.reduce)
        # It is exchanged after the backward pass, as the model's own gradient.
        return jnp.zeros(self.whole.shape, self._compute)

    def empty_sums(self, stored: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """The sum of no gradients: sharded if gradients are scattered, else the device's own.

        `shape` is that of the gradient of one microbatch.
        """
        if self.scattered:
            shape = stored.shape
        return self._laid_out(jnp.zeros(shape, self._accumulated_dtype), 0)

    @property
    def _accumulated_dtype(self) -> Any:
        """The dtype of the sum of its gradients, which holds those that are added."""
        dtypes = self.strategy.dtypes
        gradient_dtype = self._compute
        if self.scattered:
            gradient_dtype = dtypes.reduced(self.dtype)
        return dtypes.accumulated(gradient_dtype)

    def _reduced(self, gradient: jax.Array, consumed_dims: int) -> jax.Array:
        """The gradient summed over devices, and scattered if the parameter is split."""
        # Cast before it is sent, so that it is added up in that dtype.
        sent = cast(gradient, self.exchanged.reduce)
        wire = self.exchanged.wire
        with jax.named_scope(EXCHANGE):
            if self.split.is_split:
                return scatter(sent, self.split.of_layer(consumed_dims), wire)
            return total(sent, PartitionSpec(*self.named[consumed_dims:]), self.axes, wire)

    def _laid_out(self, x: jax.Array, consumed_dims: int) -> jax.Array:
        """A sum of gradients, in the layout of the parameter over the automatic axes."""
        automatic = jax.sharding.get_abstract_mesh().auto_axes
        if not automatic:
            return x
        spec = self.split.contributed
        if self.scattered:
            spec = self.split.spec
        return constrain(x, keep_axes(PartitionSpec(*spec[consumed_dims:]), automatic))

    @cached_property
    def whole(self) -> jax.ShapeDtypeStruct:
        """What the model sees: whole, except in dims that its names split over the data axes."""
        missing = len(self.shape) - len(self.named)
        entries = (*self.named, *[None] * missing)
        local: list[int] = []
        for size, entry in zip(self.shape, entries, strict=True):
            local.append(size // self._parts_over_data(entry))
        return jax.ShapeDtypeStruct(tuple(local), self._compute)

    def _parts_over_data(self, entry: Any) -> int:
        """Into how many parts an entry of a spec splits a dim over the data axes."""
        sizes = self.strategy.device_mesh.shape
        # Over other axes the loss sees global arrays, whose layout is the partitioner's.
        data = axes_within(as_tuple(entry), self.strategy.data_axes)
        return parts_over(sizes, data)

    @property
    def _compute(self) -> Any:
        """The dtype in which the model gets it."""
        return self.strategy.dtypes.of(self.path, self.dtype)

    def _made_whole(self, stored: jax.Array, consumed_dims: int) -> jax.Array:
        """The whole parameter, or one layer of it, where it is used."""
        with jax.named_scope(GATHER):
            # A scalar has no dim along which it could be copied in parts.
            if self.on_host and consumed_dims == 0 and self.shape:
                stored = copied_in_parts(stored, self._compute, self._copied_dim)
            else:
                stored = to_device(stored)
        if not self.split.is_split:
            return cast(stored, self._compute)
        return self._gathered(stored, consumed_dims)

    @property
    def _copied_dim(self) -> int:
        """The dim along which it is copied in parts: the first that no automatic axis splits."""
        for dim, entry in enumerate(self.split.spec):
            if not axes_without(as_tuple(entry), self.strategy.manual_axes):
                return dim
        return min(len(self.split.spec), len(self.shape) - 1)

    def _gathered(self, stored: jax.Array, consumed_dims: int) -> jax.Array:
        """The whole parameter, or one layer of it, from the shards of all devices."""
        # One layer is gathered at once, a whole parameter in buckets: it may be a stack of layers.
        limit = self.strategy.sharding.bucket_bytes
        if consumed_dims:
            limit = 0
        with jax.named_scope(GATHER):
            return gather(
                cast(stored, self._compute),
                PartitionSpec(*self.named[consumed_dims:]),
                self.split.of_layer(consumed_dims),
                limit,
            )


def step_parameters(
    tree: Any, named: Any, splits: dict[str, Split], strategy: Strategy, *, frozen: bool
) -> Any:
    """A `StepParameter` for each parameter of a tree.

    Args:
        tree: the parameters, or their shapes.
        named: a tree of their layouts by name.
        splits: how ZeRO splits each, by path.
        strategy: the strategy of the step.
        frozen: whether these parameters have no gradients.
    """

    def parameter(path: str, leaf: Any, spec: PartitionSpec) -> StepParameter:
        return StepParameter(path, leaf.shape, leaf.dtype, spec, splits[path], strategy, frozen)

    return map_named(parameter, tree, named)


def with_partitionable_lookups(total: Any, parameters: Any, strategy: Strategy) -> Any:
    """`total(params, ...)` with lookups that XLA's partitioner can split on the strategy's mesh."""
    specs = jax.tree.map(lambda parameter: parameter.named, parameters)
    return partitionable(total, specs, strategy.batch_axes)


def evaluate_loss(total: Any, parameters: Any, params: Any, *others: Any) -> Any:
    """`total(params, *others)` without derivatives; `parameters` are described as frozen ones.

    Weights that are gathered on use are gathered layer by layer, as in the step.
    """
    # Nothing is accumulated where there is no gradient, so that each microbatch is the last.
    described = _described(parameters, last=True)
    held = jax.tree.map(lambda parameter, p: parameter.start(p), parameters, params)
    if _all_whole(described):
        return total(held, *others)
    return evaluate_on_use(total, described, _without_gradients(parameters, held), *others)


def _described(parameters: Any, *, last: bool) -> Any:
    """A `Weight`, or `UNMANAGED`, for each parameter of a tree."""
    return jax.tree.map(lambda parameter: parameter.weight(last) or UNMANAGED, parameters)


def _without_gradients(parameters: Any, held: Any) -> Any:
    """What the evaluator takes of parameters that have no gradients."""

    def stored(parameter: StepParameter, held: Any) -> Any:
        if parameter.gathered_on_use:
            return StoredWeight(held, None)
        return held

    return jax.tree.map(stored, parameters, held)


def _all_whole(described: Any) -> bool:
    """Whether no parameter of a tree takes an evaluator: then the loss is called as it is."""
    return all(weight is UNMANAGED for weight in jax.tree.leaves(described))


@dataclass
class _Trained:
    """A trained parameter while a step runs."""

    parameter: StepParameter
    stored: Any  # this device's shard of it
    held: Any  # that, or the whole parameter
    sums: Any = None  # a reference to the sum of its gradients, if microbatches accumulate

    def start_sums(self) -> None:
        """Make what microbatches add up in, a reference: all of them add to the same memory."""
        if self.parameter.strategy.accumulate > 1:
            self.sums = jax.new_ref(
                self.parameter.empty_sums(self.stored, self.parameter.whole.shape)
            )

    def differentiated(self, weight: Weight | None) -> Any:
        """The array with respect to which the derivative is taken.

        That is the whole parameter or, if a region makes it whole or reduces its gradient, the
        anchor of the gradient. What accumulates in place has a scalar, whose derivative is zero.
        """
        if weight is None:
            return self.held
        if weight.accumulates_in_place:
            return jnp.float32(0)
        return self.parameter.gradient_anchor(self.stored)

    def evaluated(self, weight: Weight | None, differentiated: Any) -> Any:
        """What the evaluator takes of it."""
        if weight is None:
            return differentiated
        return StoredWeight(self.held, differentiated, self.sums)


class Weights:
    """All parameters of a step, and the sums of their gradients so far.

    Args:
        strategy: the strategy of the step.
        trained: a `StepParameter` for each trained parameter.
        frozen: the same for each frozen one.
        params: what is stored of the trained parameters.
        frozen_params: what is stored of the frozen ones.
    """

    def __init__(
        self, strategy: Strategy, trained: Any, frozen: Any, params: Any, frozen_params: Any
    ) -> None:
        self.parameters, self.treedef = jax.tree.flatten(trained)
        stored_leaves = self.treedef.flatten_up_to(params)
        self.frozen = frozen
        offloads = bool(strategy.offloaded_activations)
        layers_differ = isinstance(strategy.remat, RematByBlock)
        self.has_own_loops = layers_differ or offloads or chain_in_force() is not None
        self.frozen_held = jax.tree.map(lambda p, stored: p.start(stored), frozen, frozen_params)
        self.trained: list[_Trained] = []
        for parameter, stored in zip(self.parameters, stored_leaves, strict=True):
            self.trained.append(_Trained(parameter, stored, parameter.start(stored)))
        for trained in self.trained:
            trained.start_sums()

    def gradient(self, total: Any, others: Any, last: bool) -> tuple[Any, list[Any]]:
        """Differentiate `total(params, *others)`, which returns a sum and auxiliary values.

        Returns the auxiliary values and the gradients of all trained parameters. The gradient is
        None if it was added to the sums already.
        """
        weights = [parameter.weight(last) for parameter in self.parameters]
        described = combine(
            self.treedef.unflatten([weight or UNMANAGED for weight in weights]),
            _described(self.frozen, last=last),
        )
        frozen = _without_gradients(self.frozen, self.frozen_held)
        differentiated = []
        for trained, weight in zip(self.trained, weights, strict=True):
            differentiated.append(trained.differentiated(weight))

        def loss(differentiated: list[Any]) -> Any:
            # Loops that keep inputs by a chain, or not the same of all layers, are the
            # evaluator's, weights or not.
            if _all_whole(described) and not self.has_own_loops:
                return total(combine(self.treedef.unflatten(differentiated), frozen), *others)
            evaluated = self._evaluated(weights, differentiated)
            params = combine(self.treedef.unflatten(evaluated), frozen)
            return evaluate_on_use(total, described, params, *others)

        (_, aux), gradients = jax.value_and_grad(loss, has_aux=True)(differentiated)
        # What accumulated in place has a derivative of zero here, which says nothing.
        for position, weight in enumerate(weights):
            if weight is not None and weight.accumulates_in_place:
                gradients[position] = None
        return aux, gradients

    def _evaluated(self, weights: list[Weight | None], differentiated: list[Any]) -> list[Any]:
        """What the evaluator takes of the trained parameters, each with what is differentiated."""
        evaluated = []
        for trained, weight, value in zip(self.trained, weights, differentiated, strict=True):
            evaluated.append(trained.evaluated(weight, value))
        return evaluated

    def summed(self, gradients: list[Any]) -> Any:
        """The gradient of all microbatches, from what the last one returned.

        Where that is None, it is in the sums.
        """
        leaves = []
        for trained, gradient in zip(self.trained, gradients, strict=True):
            if gradient is None:
                gradient = trained.sums[...]
            leaves.append(gradient)
        return self.treedef.unflatten(leaves)
