"""The exchange of a step: exact sums first, then the strategy's exchange between workers.

A contribution is the gradient of one device's own examples. A worker is all devices that have one
position along the axes that the exchange takes: a device or a pod (see `collectives/_exact`).

    contributions of devices
      -> summed exactly within workers, laid out as the parameter is at rest    `within`
      -> averaged over workers, if the exchange takes any axes                  `averaged`, `sent`
      -> gradient, errors for the next step, norm, what is finite
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.collectives._compressed import Errors, Pieces
from shardlib.collectives._exact import Exchange, ExchangeInputs, Parameter, buckets
from shardlib.layouts._rules import axes_without, keep_axes, parts_over, spec_axes
from shardlib.modeling._random import scrambled
from shardlib.optimizers._local import Local
from shardlib.step._scopes import COMPRESSED, EXACT

ErrorsByPath = dict[str, Errors]

# The number of sums by which the norm of a mean is estimated. It is a prime, so that a column of a
# matrix, which may have most of its gradient, does not fall into one sum.
_WIDTH = 2039


class Gradient(NamedTuple):
    """What an exchange makes of the contributions of all devices.

    Attributes:
        values: the gradient of the batch. Where the optimizer decides what is sent, the mean of
            that over workers.
        errors: what is left over for the next step, by path.
        square: the square of the norm of the whole gradient.
        finite: for each parameter, whether its gradient is finite.
    """

    values: Any
    errors: ErrorsByPath
    square: Any
    finite: Any


class Sender(NamedTuple):
    """An optimizer that decides what workers send each other, such as 1-bit Adam.

    Attributes:
        optimizer: the optimizer.
        state: its state.
        specs: how that is laid out.
        clip: the largest norm of a gradient, None for any.
    """

    optimizer: Local
    state: Any
    specs: Any
    clip: float | None


def exchange_gradients(
    exchange: Exchange,
    gradients: Any,
    weight: jax.Array,
    parameters: Any,
    errors: ErrorsByPath,
    sender: Sender | None,
) -> Gradient:
    """Turn every device's own gradients into the gradient of the batch.

    It is called in the region that is manual over the data axes, and works manually over all axes:
    a collective over a manual axis whose operand an automatic axis splits would first gather that
    operand.

    Args:
        exchange: the exchange of the strategy.
        gradients: the contributions of this device, a tree like the trained parameters.
        weight: the weight of the whole batch.
        parameters: a `Parameter` for each gradient.
        errors: what the exchange left over in the step before.
        sender: the optimizer, if it decides what workers send each other.
    """
    leaves, treedef = jax.tree.flatten(gradients)
    described = treedef.flatten_up_to(parameters)
    mesh = jax.sharding.get_abstract_mesh()

    def exchanged(
        shards: list[jax.Array], weight: jax.Array, errors: Any, state: Any
    ) -> tuple[Any, ...]:
        # By now every axis is manual: arrays are shards, and collectives name their axes.
        local = _LocalExchange(exchange, described, dict(mesh.shape))
        sums = local.within(shards, weight)
        if not local.members:
            return local.exact(sums, errors)
        if sender is None:
            return local.averaged(sums, errors)
        return local.sent(sums, errors, sender._replace(state=state), treedef)

    state: Any = ()
    if sender is not None:
        state = sender.state
    # The step is manual over the axes of data only; here the others become so too.
    everywhere: Any = exchanged
    if mesh.auto_axes:
        everywhere = _manual_everywhere(exchanged, mesh.auto_axes, described, errors, sender)
    values, errors, square, finite = everywhere(leaves, weight, errors, state)
    return Gradient(treedef.unflatten(values), errors, square, finite)


def _manual_everywhere(
    exchanged: Callable[..., Any],
    automatic: tuple[str, ...],
    parameters: Sequence[Parameter],
    errors: ErrorsByPath,
    sender: Sender | None,
) -> Callable[..., Any]:
    """A function of shards, errors and the sender's state, manual over the automatic axes too.

    Args:
        exchanged: the function, `(shards, weight, errors, state)` to values, errors, the square of
            the norm, and what is finite.
        automatic: the axes that are automatic around it.
        parameters: what it exchanges.
        errors: the errors, of which only the structure is used.
        sender: the optimizer, if it decides what workers send each other.
    """
    replicated = PartitionSpec()
    # Errors have a leading dim of devices, of which each has its own.
    error_specs = jax.tree.map(lambda _: PartitionSpec(automatic), errors)
    state_specs = _kept_specs(sender, automatic)
    contributed = [keep_axes(parameter.spec, automatic) for parameter in parameters]
    stored = [keep_axes(parameter.stored, automatic) for parameter in parameters]
    return jax.shard_map(
        exchanged,
        in_specs=(contributed, replicated, error_specs, state_specs),
        out_specs=(stored, error_specs, replicated, replicated),
        axis_names=set(automatic),
        check_vma=False,
    )


def _kept_specs(sender: Sender | None, automatic: tuple[str, ...]) -> Any:
    """The specs of the state of an optimizer that sends, over axes that are automatic so far."""
    if sender is None:
        return ()
    return jax.tree.map(lambda spec: keep_axes(spec, automatic), sender.specs)


class _Axes(NamedTuple):
    """The axes of a mesh, as a parameter has them.

    Attributes:
        workers: over these its gradient is averaged by the exchange; none if it is not.
        split: these split it.
        shared: along these, of more than one device, devices hold the same values of it.
    """

    workers: tuple[str, ...]
    split: tuple[str, ...]
    shared: tuple[str, ...]


class _LocalExchange:
    """The exchange of a step's gradients as one device sees it, manual over every axis.

    `members` are the positions of the parameters that are averaged by the exchange. All others are
    only summed exactly. `axes` has for each parameter its own.
    """

    def __init__(
        self, exchange: Exchange, parameters: Sequence[Parameter], sizes: Mapping[str, int]
    ) -> None:
        self.exchange, self.parameters, self.sizes = exchange, parameters, sizes
        self.axes: list[_Axes] = []
        self.members: list[int] = []
        for position, parameter in enumerate(parameters):
            workers, split = exchange.over(parameter), spec_axes(parameter.stored)
            shared = self._axes_without((*workers, *split))
            self.axes.append(_Axes(workers, split, shared))
            if workers:
                self.members.append(position)

    @property
    def every_axis(self) -> tuple[str, ...]:
        """The axes of the mesh that have several devices."""
        return self._axes_without(())

    def _axes_without(self, excluded: Sequence[str]) -> tuple[str, ...]:
        """The axes of several devices but for some."""
        axes = []
        for axis, size in self.sizes.items():
            if size > 1 and axis not in excluded:
                axes.append(axis)
        return tuple(axes)

    def within(self, contributions: Sequence[jax.Array], weight: jax.Array) -> list[jax.Array]:
        """Sum exactly over all axes that the exchange does not take.

        Of a parameter that it averages, the result is this worker's part of the gradient.
        """
        summed: list[Parameter] = []
        for parameter, own in zip(self.parameters, self.axes, strict=True):
            axes = axes_without(parameter.axes, own.workers)
            summed.append(parameter._replace(axes=axes))
        return self.exchange.within.reduce(contributions, weight, summed)

    def exact(self, values: list[jax.Array], errors: ErrorsByPath) -> tuple[Any, ...]:
        """What is returned of gradients that are complete: them, the errors, and exact norms."""
        squares = _squares(values, [own.split for own in self.axes], self.sizes)
        return values, errors, jnp.sum(squares), jnp.isfinite(squares)

    def averaged(self, sums: list[jax.Array], errors: ErrorsByPath) -> tuple[Any, ...]:
        """Average the workers' gradients."""
        unknown = [None] * len(self.members)
        values, errors = self._average(sums, self._workers(sums), errors, unknown)
        return self.exact(values, errors)

    def sent(
        self, sums: list[jax.Array], errors: ErrorsByPath, sender: Sender, treedef: Any
    ) -> tuple[Any, ...]:
        """Average what the optimizer sends or, while it sends nothing, gradients exactly.

        Which of the two a step does is known only when it runs, so both are in its program.
        """

        def compressed() -> tuple[Any, ...]:
            with jax.named_scope(COMPRESSED):
                return self._messages(sums, errors, sender, treedef)

        def exact() -> tuple[Any, ...]:
            with jax.named_scope(EXACT):
                members = [sums[i] for i in self.members]
                values = self._with(sums, self._exactly(members))
                return self.exact(values, errors)

        return lax.cond(sender.optimizer.sends(sender.state), compressed, exact)

    def _messages(
        self, sums: list[jax.Array], errors: ErrorsByPath, sender: Sender, treedef: Any
    ) -> tuple[Any, ...]:
        """Average the messages that the optimizer makes of the workers' own gradients.

        Gradients are clipped before the optimizer sees them. Returns what `averaged` does: values,
        errors, the square of the gradient's norm, and whether it is finite.
        """
        own = self._workers(sums)
        square, finite = self._measured(sums, own)
        if sender.clip is not None:
            # The estimate of the norm is the same on all workers, and so is the scale: the mean of
            # clipped gradients is the clipped mean.
            scale = sender.clip / jnp.maximum(jnp.sqrt(square), sender.clip)
            own = [gradient * scale.astype(gradient.dtype) for gradient in own]
        gradients = treedef.unflatten(self._with(sums, own))
        messages, alive = sender.optimizer.message(gradients, sender.state)
        message_leaves = treedef.flatten_up_to(messages)
        alive_leaves = treedef.flatten_up_to(alive)
        alive_members = [alive_leaves[i] for i in self.members]
        own = [message_leaves[i].astype(jnp.float32) for i in self.members]
        values, after = self._average(sums, own, errors, alive_members)
        # What was finite may not be as a code. Its error would then never be finite again.
        all_finite = finite & self._finite(values) & jnp.isfinite(square)
        # One gradient that is not finite spoils the norm, and with it the scale of all others. Then
        # only that one is named.
        finite = jnp.where(jnp.all(finite), all_finite, finite)
        return values, after, square, finite

    def _exactly(self, sums: list[jax.Array]) -> list[jax.Array]:
        """The exact sums over workers.

        If other devices hold the same values, each of them sums a part, and they gather the parts:
        the network between workers then carries every value once.
        """
        # Positions here are those among the members, not among all parameters.
        totals = list(sums)
        # Arrays that are summed over the same axes go in one collective.
        groups: dict[Any, list[int]] = defaultdict(list)
        for position, i in enumerate(self.members):
            groups[self.axes[i].workers, self.axes[i].shared].append(position)
        for (over, shared), members in groups.items():
            for bucket in buckets(sums, members, self.exchange.within.bucket_bytes):
                parts = [sums[position] for position in bucket]
                summed = self._summed(parts, over, shared)
                for position, total in zip(bucket, summed, strict=True):
                    totals[position] = total.astype(jnp.float32)
        return totals

    def _summed(
        self, parts: list[jax.Array], over: tuple[str, ...], shared: tuple[str, ...]
    ) -> Iterable[jax.Array]:
        """The sums of some arrays over workers, in one collective.

        Args:
            parts: arrays that each device has a summand of.
            over: the axes of the workers.
            shared: axes along which devices have the same summand; each of them then sums a part.
        """
        if shared:
            return self._sums_in_parts(parts, over, shared)
        return lax.psum(parts, over)

    def _sums_in_parts(
        self, arrays: list[jax.Array], over: tuple[str, ...], shared: tuple[str, ...]
    ) -> Iterator[jax.Array]:
        """Sums of arrays that are the same along the axes `shared`, of which each sums a part."""
        # Together, so that small arrays share one collective of useful size.
        flat = jnp.concatenate([x.reshape(-1) for x in arrays])
        count = parts_over(self.sizes, shared)
        # One row for each device along `shared`; zeros fill up the last.
        rows = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
        part = lax.psum(rows[lax.axis_index(shared)], over)
        whole = lax.all_gather(part, shared, axis=0, tiled=True)
        first = 0
        for x in arrays:
            yield whole.reshape(-1)[first : first + x.size].reshape(x.shape)
            first += x.size

    def _workers(self, sums: list[jax.Array]) -> list[jax.Array]:
        """Each worker's own gradient.

        It is scaled by the number of workers, so that the gradient of the batch is the mean.
        """
        own: list[jax.Array] = []
        for i in self.members:
            workers = parts_over(self.sizes, self.axes[i].workers)
            own.append(sums[i].astype(jnp.float32) * workers)
        return own

    def _with(self, sums: list[jax.Array], members: list[jax.Array]) -> list[jax.Array]:
        """The sums, with other values for those that the exchange averages."""
        values = list(sums)
        for i, value in zip(self.members, members, strict=True):
            values[i] = value
        return values

    def _average(
        self, sums: list[jax.Array], own: list[jax.Array], errors: ErrorsByPath, alive: list[Any]
    ) -> tuple[list[jax.Array], ErrorsByPath]:
        """Average what workers have, by the exchange; returns values and errors.

        `alive` says of each gradient where it is not always zero; None if that is unknown.
        """
        # Only these parameters are averaged by the exchange: the others are summed already.
        described = [self.parameters[i] for i in self.members]
        shared = [self.axes[i].shared for i in self.members]
        before: list[Any] = [None] * len(self.members)
        if self.exchange.keeps_errors:
            before = [_own_error(errors[parameter.path]) for parameter in described]
        inputs = ExchangeInputs(shared, before, alive)
        means, after = self.exchange.average(own, described, inputs)
        if self.exchange.keeps_errors:
            errors = {}
            for parameter, error in zip(described, after, strict=True):
                errors[parameter.path] = jax.tree.map(lambda x: x[None], error)
        return self._with(sums, means), errors

    def _measured(self, sums: list[jax.Array], own: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """An estimate of the square of the norm of the whole gradient, and what of it is finite.

        No device has the mean gradient, so its norm is estimated from sums with random signs s:

            E[(sum_k s_k x_k)^2]  =  sum_k x_k^2

        and sums over workers of such sums are those of the mean. `_WIDTH` of them tell the square
        to some three percent, and the norm to half of that.
        """
        # What is summed exactly has an exact norm, to which the estimate of the rest is added.
        square = self._square_of_summed(sums)
        for over in dict.fromkeys(self.axes[i].workers for i in self.members):
            mean = lax.pmean(self._sketch_of_members(own, over), over)
            others = self._axes_without(over)
            estimate = jnp.sum(jnp.square(mean))
            if others:
                estimate = lax.psum(estimate, others)
            square += estimate
        return square, self._finite(self._with(sums, own))

    def _square_of_summed(self, sums: list[jax.Array]) -> jax.Array:
        """The square of the norm of all gradients that are summed exactly."""
        summed = [i for i in range(len(sums)) if i not in self.members]
        if not summed:
            return jnp.float32(0)
        axes = [self.axes[i].split for i in summed]
        return jnp.sum(_squares([sums[i] for i in summed], axes, self.sizes))

    def _sketch_of_members(self, own: list[jax.Array], over: tuple[str, ...]) -> jax.Array:
        """Sums with random signs of all gradients that are averaged over the same axes."""
        sketch, offset = jnp.zeros(_WIDTH, jnp.float32), 0
        for i, gradient in zip(self.members, own, strict=True):
            if self.axes[i].workers != over:
                continue
            split = {*self.axes[i].split, *over}
            copies = parts_over(self.sizes, axes_without(self.sizes, split))
            # One array starts where the one before ends. So if there are fewer elements than sums,
            # each element has a sum of its own, and the estimate is exact.
            sketch += jnp.roll(_sketch(gradient, i), offset) / math.sqrt(copies)
            offset += gradient.size
        return sketch

    def _finite(self, values: list[jax.Array]) -> jax.Array:
        """For each array, whether its elements and its norm are finite on all devices."""
        # Counted as integers: a sum of nan would say no more than that there is one.
        bad = jnp.stack([~jnp.isfinite(_sum_of_squares(x)) for x in values]).astype(jnp.int32)
        if self.every_axis:
            bad = lax.psum(bad, self.every_axis)
        return bad == 0


def _own_error(error: Errors) -> Errors:
    """What a device holds of errors: in the state they have a leading dim of devices."""
    return jax.tree.map(lambda x: x[0], error)


def _sketch(x: jax.Array, number: int) -> jax.Array:
    """Sums of the elements of an array, each with a sign that `number` and its place decide.

    Signs are the same in every step. So while the direction of a gradient does not change, the
    estimate of its norm errs by the same share.
    """
    rows = jnp.pad(x.astype(jnp.float32).reshape(-1), (0, -x.size % _WIDTH)).reshape(-1, _WIDTH)
    seed = jnp.uint32(0x9E3779B1 * (number + 1) % 2**32)
    word = lax.broadcasted_iota(jnp.uint32, rows.shape, 0) * jnp.uint32(_WIDTH)
    word += lax.broadcasted_iota(jnp.uint32, rows.shape, 1) + seed
    is_positive = scrambled(word) & 1 == 1
    return jnp.sum(jnp.where(is_positive, rows, -rows), 0)


def _squares(
    shards: Sequence[jax.Array], axes: Sequence[tuple[str, ...]], mesh_shape: Mapping[str, int]
) -> jax.Array:
    """The square of the norm of each array, from the shards of all devices, by one sum.

    `axes` are those that split each array.
    """
    every = _all_axes(axes, mesh_shape)
    squares: list[jax.Array] = []
    for x, own_axes in zip(shards, axes, strict=True):
        # Devices along an axis that does not split an array all have it, and all are summed.
        copies = parts_over(mesh_shape, axes_without(every, own_axes))
        squares.append(_sum_of_squares(x) / copies)
    # Stacked, so that there is one small sum over devices for all arrays.
    stacked = jnp.stack(squares)
    if not every:
        return stacked
    return lax.psum(stacked, every)


def _sum_of_squares(x: jax.Array) -> jax.Array:
    """The sum of the squares of an array, added up in 32 bits or more."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.sum(_square(wide)).astype(jnp.float32)


def _all_axes(axes: Sequence[tuple[str, ...]], mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of several devices that split any of some arrays, in order of first use."""
    used: dict[str, None] = {}
    for own_axes in axes:
        for axis in own_axes:
            if mesh_shape[axis] > 1:
                used[axis] = None
    return tuple(used)


def _square(x: jax.Array) -> jax.Array:
    """The square of the absolute value of each element."""
    if jnp.iscomplexobj(x):
        return jnp.square(x.real) + jnp.square(x.imag)
    return jnp.square(x)


def pieces(exchange: Exchange, parameter: Parameter, sizes: Mapping[str, int]) -> Pieces:
    """How a device's shard of a parameter's gradient is cut for the exchange."""
    over, split = exchange.over(parameter), spec_axes(parameter.stored)
    # ZeRO and the names split evenly, so that all shards have as many elements.
    elements = math.prod(parameter.shape) // parts_over(sizes, split)
    shared = parts_over(sizes, axes_without(sizes, (*over, *split)))
    return Pieces(elements, shared, parts_over(sizes, over))
