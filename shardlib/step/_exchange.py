"""The exchange of a step: exact sums first, then whatever the strategy's exchange makes of the
workers' gradients.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.collectives._compressed import Errors, Pieces
from shardlib.collectives._exact import Exchange, ExchangeInputs, Parameter, buckets
from shardlib.layouts._rules import keep_axes, spec_axes
from shardlib.optimizers._local import Local

ErrorsByPath = dict[str, Errors]


class Gradient(NamedTuple):
    """What an exchange makes of contributions."""

    values: Any  # of the batch; of what an optimizer has sent itself, that
    errors: ErrorsByPath  # what is left over for the next step
    square: Any  # of the norm of the whole gradient
    finite: Any  # of each parameter whether its gradient is


class Sender(NamedTuple):
    """An optimizer that says itself what is sent, with its state, and the largest norm of a
    gradient.
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
    """Turn every device's own gradients into the batch's. Manual over the data axes."""
    leaves, treedef = jax.tree.flatten(gradients)
    described = treedef.flatten_up_to(parameters)
    mesh = jax.sharding.get_abstract_mesh()

    def exchanged(
        shards: list[jax.Array], weight: jax.Array, errors: Any, state: Any
    ) -> tuple[Any, ...]:
        at = _Exchanged(exchange, described, dict(mesh.shape))
        sums = at.within(shards, weight)
        if not at.members:
            squares = _squares(sums, at.axes, mesh.shape)
            return sums, errors, jnp.sum(squares), jnp.isfinite(squares)
        if sender is None:
            return at.averaged(sums, errors)
        return at.sent(sums, errors, sender._replace(state=state), treedef)

    state = () if sender is None else sender.state
    if mesh.auto_axes:
        auto, same = mesh.auto_axes, PartitionSpec()
        of_errors = jax.tree.map(lambda _: PartitionSpec(auto), errors)
        of_state = (
            () if sender is None else jax.tree.map(lambda spec: keep_axes(spec, auto), sender.specs)
        )
        exchanged = jax.shard_map(
            exchanged,
            in_specs=([keep_axes(one.spec, auto) for one in described], same, of_errors, of_state),
            out_specs=([keep_axes(one.stored, auto) for one in described], of_errors, same, same),
            axis_names=set(auto),
            check_vma=False,
        )
    values, errors, square, finite = exchanged(leaves, weight, errors, state)
    return Gradient(treedef.unflatten(values), errors, square, finite)


class _Exchanged:
    """One exchange of a step's gradients, manual over every axis."""

    def __init__(
        self, exchange: Exchange, parameters: Sequence[Parameter], sizes: Mapping[str, int]
    ) -> None:
        self.exchange, self.parameters, self.sizes = exchange, parameters, sizes
        self.over = [exchange.over(one) for one in parameters]
        self.axes = [spec_axes(one.stored) for one in parameters]
        self.members = [i for i, over in enumerate(self.over) if over]
        self.shared = [
            tuple(axis for axis, size in sizes.items() if size > 1 and axis not in (*over, *axes))
            for over, axes in zip(self.over, self.axes, strict=True)
        ]

    def within(self, contributions: Sequence[jax.Array], weight: jax.Array) -> list[jax.Array]:
        """What is summed exactly: whole gradients, and each worker's part of those that are to be
        averaged.
        """
        summed = [
            one._replace(axes=tuple(axis for axis in one.axes if axis not in over))
            for one, over in zip(self.parameters, self.over, strict=True)
        ]
        return self.exchange.within.reduce(contributions, weight, summed)

    def averaged(self, sums: list[jax.Array], errors: ErrorsByPath) -> tuple[Any, ...]:
        """The workers' gradients, averaged."""
        values, errors = self._average(
            sums, self._workers(sums), errors, [None] * len(self.members)
        )
        squares = _squares(values, self.axes, self.sizes)
        return values, errors, jnp.sum(squares), jnp.isfinite(squares)

    def sent(
        self, sums: list[jax.Array], errors: ErrorsByPath, sender: Sender, treedef: Any
    ) -> tuple[Any, ...]:
        """What the optimizer sends, averaged; while it sends nothing of its own, exact
        gradients.
        """

        def messages() -> tuple[Any, ...]:
            own = self._workers(sums)
            square, finite = self._measured(sums, own)
            if sender.clip is not None:
                scale = sender.clip / jnp.maximum(jnp.sqrt(square), sender.clip)
                own = [g * scale.astype(g.dtype) for g in own]
            found, alive = sender.optimizer.message(
                treedef.unflatten(self._with(sums, own)), sender.state
            )
            found, alive = treedef.flatten_up_to(found), treedef.flatten_up_to(alive)
            living = [alive[i] for i in self.members]
            own = [found[i].astype(jnp.float32) for i in self.members]
            values, after = self._average(sums, own, errors, living)
            # What was finite may be none as a code; and what is owed then would be owed forever.
            return values, after, square, finite & self._finite(values) & jnp.isfinite(square)

        def exactly() -> tuple[Any, ...]:
            values = self._with(sums, self._exactly([sums[i] for i in self.members]))
            squares = _squares(values, self.axes, self.sizes)
            return values, errors, jnp.sum(squares), jnp.isfinite(squares)

        def named(name: str, branch: Any) -> Any:
            def under_its_name() -> Any:
                with jax.named_scope(name):
                    return branch()

            return under_its_name

        return lax.cond(
            sender.optimizer.sends(sender.state),
            named("compressed", messages),
            named("exact", exactly),
        )

    def _exactly(self, sums: list[jax.Array]) -> list[jax.Array]:
        """The sums over workers. Of what is the same along other axes each device there adds up a
        part.
        """
        found, groups = list(sums), defaultdict(list)
        for k, i in enumerate(self.members):
            groups[self.over[i], self.shared[i]].append(k)
        for (over, shared), members in groups.items():
            for bucket in buckets(sums, members, self.exchange.within.bucket_bytes):
                if not shared:
                    for k, total in zip(
                        bucket, lax.psum([sums[k] for k in bucket], over), strict=True
                    ):
                        found[k] = total.astype(jnp.float32)
                    continue
                flat = jnp.concatenate([sums[k].reshape(-1) for k in bucket])
                parts = math.prod(self.sizes[axis] for axis in shared)
                rows = jnp.pad(flat, (0, -flat.size % parts)).reshape(parts, -1)
                whole = lax.all_gather(
                    lax.psum(rows[lax.axis_index(shared)], over), shared, axis=0, tiled=True
                )
                ends = itertools.accumulate((sums[k].size for k in bucket), initial=0)
                for k, (first, last) in zip(bucket, itertools.pairwise(ends), strict=True):
                    found[k] = (
                        whole.reshape(-1)[first:last].reshape(sums[k].shape).astype(jnp.float32)
                    )
        return found

    def _workers(self, sums: list[jax.Array]) -> list[jax.Array]:
        """Each worker's own gradient: the mean of these is the gradient of the batch."""
        workers = [math.prod(self.sizes[axis] for axis in self.over[i]) for i in self.members]
        return [
            sums[i].astype(jnp.float32) * count
            for i, count in zip(self.members, workers, strict=True)
        ]

    def _with(self, sums: list[jax.Array], members: list[jax.Array]) -> list[jax.Array]:
        values = list(sums)
        for i, value in zip(self.members, members, strict=True):
            values[i] = value
        return values

    def _average(
        self, sums: list[jax.Array], own: list[jax.Array], errors: ErrorsByPath, alive: list[Any]
    ) -> tuple[list[jax.Array], ErrorsByPath]:
        described = [self.parameters[i] for i in self.members]
        shared = [self.shared[i] for i in self.members]
        owed: list[Any] = [None] * len(self.members)
        if self.exchange.keeps_errors:
            owed = [jax.tree.map(lambda x: x[0], errors[one.path]) for one in described]
        means, left = self.exchange.average(own, described, ExchangeInputs(shared, owed, alive))
        if self.exchange.keeps_errors:
            left = [jax.tree.map(lambda x: x[None], one) for one in left]
            errors = {one.path: one_left for one, one_left in zip(described, left, strict=True)}
        return self._with(sums, means), errors

    def _measured(self, sums: list[jax.Array], own: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
        """About the square of the norm of the whole gradient, of which nobody has the mean, and
        what of it is finite.

        A sum of elements with random signs has the square of their norm, on average; so have the
        sums of workers' sums. `_WIDTH` of them tell it to some three percent, and the norm to half
        of that.
        """
        every = tuple(axis for axis, size in self.sizes.items() if size > 1)
        rest = [i for i in range(len(sums)) if i not in self.members]
        square = jnp.float32(0)
        if rest:
            square = jnp.sum(
                _squares([sums[i] for i in rest], [self.axes[i] for i in rest], self.sizes)
            )
        for over in dict.fromkeys(self.over[i] for i in self.members):
            sketch, place = jnp.zeros(_WIDTH), 0
            for i, gradient in zip(self.members, own, strict=True):
                if self.over[i] == over:
                    split = {*self.axes[i], *over}
                    again = math.prod(
                        size for axis, size in self.sizes.items() if axis not in split
                    )
                    # One array behind the other, so that few elements have a sum each, which is
                    # exact.
                    sketch += jnp.roll(_sketch(gradient, i), place) / math.sqrt(again)
                    place += gradient.size
            mean = lax.pmean(sketch, over)
            others = tuple(axis for axis in every if axis not in over)
            found = jnp.sum(jnp.square(mean))
            square += lax.psum(found, others) if others else found
        return square, self._finite(self._with(sums, own))

    def _finite(self, values: list[jax.Array]) -> jax.Array:
        every = tuple(axis for axis, size in self.sizes.items() if size > 1)
        bad = jnp.stack([jnp.any(~jnp.isfinite(x)) for x in values]).astype(jnp.int32)
        return (lax.psum(bad, every) if every else bad) == 0


# A prime, lest a column of a matrix, which may have most of its gradient, fall into one sum.
_WIDTH = 2039


def _sketch(x: jax.Array, number: int) -> jax.Array:
    """Sums of the elements of an array, with signs that are drawn once and for all."""
    rows = jnp.pad(x.astype(jnp.float32).reshape(-1), (0, -x.size % _WIDTH)).reshape(-1, _WIDTH)
    word = lax.broadcasted_iota(jnp.uint32, rows.shape, 0) * jnp.uint32(_WIDTH)
    word += lax.broadcasted_iota(jnp.uint32, rows.shape, 1) + jnp.uint32(
        0x9E3779B1 * (number + 1) % 2**32
    )
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # MurmurHash3's finalizer
        word = (word ^ (word >> jnp.uint32(shift))) * jnp.uint32(factor)
    return jnp.sum(jnp.where((word ^ (word >> jnp.uint32(16))) & 1 == 1, rows, -rows), 0)


def _squares(
    shards: Sequence[jax.Array], axes: Sequence[tuple[str, ...]], mesh_shape: Mapping[str, int]
) -> jax.Array:
    """The square of the norm of each array, of which each device has the shard that `axes` split
    off; in one sum.
    """
    every = tuple(dict.fromkeys(axis for of in axes for axis in of if mesh_shape[axis] > 1))
    # What an array is not split over, each device along it has: it is counted so often.
    again = [math.prod(mesh_shape[axis] for axis in every if axis not in of) for of in axes]
    wide = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in shards]
    own = [jnp.sum(_square(x)).astype(jnp.float32) / n for x, n in zip(wide, again, strict=True)]
    return lax.psum(jnp.stack(own), every) if every else jnp.stack(own)


def _square(x: jax.Array) -> jax.Array:
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)


def pieces(exchange: Exchange, parameter: Parameter, sizes: Mapping[str, int]) -> Pieces:
    """How a device's shard of a parameter's gradient is cut for the exchange."""
    over, split = exchange.over(parameter), spec_axes(parameter.stored)
    elements = math.prod(parameter.shape) // math.prod(sizes[axis] for axis in split)
    shared = math.prod(size for axis, size in sizes.items() if axis not in (*over, *split))
    return Pieces(elements, shared, math.prod(sizes[axis] for axis in over))
