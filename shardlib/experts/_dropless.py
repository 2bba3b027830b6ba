"""A layer of experts that drops nothing: each expert takes all tokens that want it.

    tokens (batch, ..., width)      on the devices of the batch
      | router: which experts                                   `_routing`
      | sort by expert, send                                    `_rows`
    rows (rows, width), groups      on the devices of the experts, sorted by expert
      | each expert's function, by products of grouped rows     `sl.kernels.grouped_matmul`
      | send back, add up by weight
    tokens (batch, ..., width)      on the devices of the batch

A device has room for a little more rows than an even load takes, and what does not fit is sent in
further rounds of fewer rows. The first round is differentiated by JAX, and keeps what `remat` says.
The others are a loop that is run as often as it takes, and not at all where loads are even enough;
backward, it computes each of its rounds again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.checks import _arrays as check_arrays
from shardlib.experts._choose import Given, by_token, choose, see
from shardlib.experts._further_rounds import Operands, all_rounds, without_captures
from shardlib.experts._moe import group_size
from shardlib.experts._moe_checks import check_functions, check_real, check_tokens, check_weights
from shardlib.experts._moe_stats import MoEStats, load_of_choices, stats_of
from shardlib.experts._routing import Choices, Router, Seen, check_choices
from shardlib.experts._rows import SENDING, Plan, RowExchange, Sending
from shardlib.experts._token_exchange import ExpertAxes, expert_axes
from shardlib.kernels._choice import device_here
from shardlib.kernels._grouped_matmul import Groups
from shardlib.kernels._shards import ArrayLayout, automatic_axes, per_shard
from shardlib.layouts._annotate import current_mesh, current_scope, shard
from shardlib.layouts._checkpoint_policies import BY_EXAMPLE, SAME_RESULT
from shardlib.layouts._resolve import resolve
from shardlib.layouts._specs import (
    as_tuple,
    axes_within,
    axes_without,
    parts_over,
    product_text,
    spec_axes,
    spec_entry,
)

GroupedExperts = Callable[[Any, jax.Array, Groups], jax.Array]
OP = "dropless"
_SCALAR = ArrayLayout((), PartitionSpec(), ())


class DroplessOptions(TypedDict, total=False):
    """How tokens are sent to their experts, as keywords of `dropless`.

    - `group`: so many consecutive tokens are balanced by the router's loss; by default those of one
      example.
    - `buffer`: how many times the rows of an even load a device has room for, in one round.
    - `sending`: `"ragged"`, the default on TPUs, sends the rows that there are; `"dense"`, the
      default elsewhere, equally many between all devices. The results are equal.
    """

    group: int | None
    buffer: float
    sending: Sending | None


def dropless(
    x: jax.Array,
    router: Router,
    experts: GroupedExperts,
    *,
    gate: jax.Array,
    weights: Any,
    key: jax.Array | None = None,
    real: jax.Array | None = None,
    bias: jax.Array | None = None,
    noise_gate: jax.Array | None = None,
    ids: jax.Array | None = None,
    names: tuple[str | None, ...] = ("batch", "seq", "act_embed"),
    **options: Unpack[DroplessOptions],
) -> tuple[jax.Array, MoEStats]:
    """Send each token to all experts that a router chooses, and add up their outputs.

    No token is dropped, however many want the same expert.

    Args:
        x: the tokens, (batch, ..., width).
        router: chooses experts for each token, such as `TopK(2)`. It has no capacity.
        experts: a function of weights, of rows (rows, width), sorted by expert, and of the `Groups`
            that say which rows are whose; it gives rows of the same number and width, made by
            `sl.kernels.grouped_matmul`. Rows at the end are of no expert.
        gate: (width, experts), whole on every device.
        weights: a tree of arrays with a dim for the experts first, which the rule `experts` splits.
        key: given while training, for the router's draws.
        real: false for padding, (batch, ...), which goes to no expert and counts for nothing.
        bias: (experts,), added to the scores by which `SigmoidTopK` chooses, see `balanced`.
        noise_gate: (width, experts), of the noise of `NoisyTopK`.
        ids: the ids of the tokens, (batch, ...), for `Hash`.
        names: a name for each dim of `x`.
        options: see `DroplessOptions`: `group`, how many tokens the router's loss balances, by
            default those of an example; `buffer`, 1.25 by default; `sending`.

    >>> import shardlib as sl
    >>> weights = jnp.stack([jnp.eye(4), 2 * jnp.eye(4)])
    >>> gate = jnp.zeros((4, 2)).at[0, 1].set(9.0)
    >>> product = lambda w, x, groups: sl.kernels.grouped_matmul(x, w, groups)
    >>> with sl.unsharded():
    ...     y, stats = dropless(
    ...         jnp.ones((1, 3, 4)), sl.experts.TopK(1), product, gate=gate, weights=weights
    ...     )
    >>> y[0, 0].tolist(), stats.load.total.tolist(), float(stats.rounds.total)
    ([2.0, 2.0, 2.0, 2.0], [0.0, 6.0], 1.0)
    """
    check_tokens(x, gate, names)
    check.keywords(OP, options, DroplessOptions)
    takes = "how many times the rows of an even load a device has room for"
    buffer = check.number(OP, "buffer", options.get("buffer", 1.25), takes, least=1)
    check_real(x, real)
    check_functions(router, experts, key)
    count = gate.shape[1]
    _check_router(router, count)
    axes = expert_axes(count, mixed=True)
    check_weights(weights, count, axes.parts, axes.manual)
    if real is not None:
        # Padding may hold anything, and times a weight of zero that may be no number.
        x = jnp.where(real[..., None], x, 0)
    x = shard(x, *names)
    seen = see(x, router, Given(gate, key, bias, noise_gate, ids, real))
    choices = choose(router, seen)
    sending = _sending(options.get("sending"))
    layer = _Layer(experts, names, axes, count, router.choices, sending, buffer)
    y, rounds = layer.everywhere(x, choices._replace(probability=None), weights)
    size = group_size(OP, x, options.get("group"))
    y = checkpoint_name(shard(y, *names), BY_EXAMPLE)
    return y, _stats(router, seen, choices, rounds, size)


def _check_router(router: Router, count: int) -> None:
    """Refuse a router that would have tokens dropped, or that wants more experts than there are."""
    if hasattr(router, "take"):
        raise ValueError(
            f"`dropless` sends tokens to the experts that they choose; with {router} experts "
            "choose as many tokens as they have places: call `sl.experts.moe`."
        )
    check_choices(router, count)
    if router.capacity is not None:
        raise ValueError(
            f"`dropless` drops no token, and {router} has a capacity of {router.capacity} times "
            "an even share: set `capacity=None`, or call `sl.experts.moe`, which drops what does "
            "not fit."
        )


def _sending(asked: Any) -> Sending:
    """The form of the collective that sends rows, by the device that is traced for."""
    platform = device_here().platform
    if asked is None:
        return "ragged" if platform == "tpu" else "dense"
    check.choice(OP, "sending", asked, SENDING)
    if asked == "ragged" and platform == "cpu":
        raise ValueError(
            '`dropless(sending="ragged")`: CPUs have no ragged all-to-all. Leave `sending` out, or '
            'take `sending="dense"`, which gives the same.'
        )
    return asked


class _Where(NamedTuple):
    """How tokens and rows are laid out over automatic axes.

    - `tokens`: the spec of the tokens, but for their width.
    - `row_axes`: the axes that split tokens, and so rows.
    - `feature_axes`: those that split the width while rows are sent, so that each device sends a
      part of what all of them have.
    """

    tokens: tuple[Any, ...]
    row_axes: tuple[str, ...]
    feature_axes: tuple[str, ...]

    @property
    def every_axis(self) -> tuple[str, ...]:
        """The axes over which rows are laid out."""
        return (*self.row_axes, *self.feature_axes)


@dataclass(frozen=True)
class _Layer:
    """One call of `dropless`, but for its arrays."""

    experts: GroupedExperts
    names: tuple[str | None, ...]
    axes: ExpertAxes
    count: int
    choices: int
    sending: Sending
    buffer: float

    def everywhere(self, x: jax.Array, choices: Choices, weights: Any) -> tuple[Any, jax.Array]:
        """The outputs of all tokens, and how many rounds it took."""
        automatic = self.axes.automatic
        if not automatic:
            return self.manually(x, choices, weights)
        # Over the axes of the experts this file sends rows itself.
        tokens = self._split_tokens(x, automatic)
        by_expert = spec_entry(automatic)
        inner = replace(self, axes=self.axes.all_manual())

        def run(x: jax.Array, choices: Choices, weights: Any) -> tuple[Any, jax.Array]:
            return inner.manually(x, choices, weights)

        spec = PartitionSpec(*tokens)
        mapped = jax.shard_map(
            run,
            in_specs=(spec, spec, PartitionSpec(by_expert)),
            out_specs=(spec, PartitionSpec()),
            axis_names=set(automatic),
            check_vma=False,
        )
        return mapped(x, choices, weights)

    def manually(self, x: jax.Array, choices: Choices, weights: Any) -> tuple[Any, jax.Array]:
        """The same where the axes of the experts are manual, or there are none."""
        where = self._where(x)
        tokens = _local_tokens(x, where)
        devices = parts_over(current_mesh().shape, self.axes.manual)
        exchange = RowExchange(
            self.axes.manual,
            devices,
            self.count,
            tokens,
            self.choices,
            self.sending,
            self.buffer,
        )
        rounds = _Rounds(exchange, where)
        plan, number = rounds.plan(choices)
        operands = Operands(x, weights, choices.weight)
        first = partial(rounds.output, self.experts, jnp.int32(0), plan)
        if devices == 1:
            return first(operands), number
        further = replace(rounds, exchange=exchange.further)
        converted = without_captures(self.experts, weights, *further.shapes(x))
        return all_rounds(further, first, converted, number, plan, operands), number

    def _split_tokens(self, x: jax.Array, axes: tuple[str, ...]) -> tuple[Any, ...]:
        """A spec by which the tokens are split over axes that become manual.

        Axes that the names do not split tokens over split them all the same: each device sends some
        of what all of them have.
        """
        sizes = current_mesh().shape
        spec = self._resolved(x)
        entries = [axes_within(as_tuple(entry), axes) for entry in spec[:-1]]
        for axis in axes_without(axes, spec_axes(PartitionSpec(*map(spec_entry, entries)))):
            # The sequence rather than the batch.
            for dim in (*range(1, x.ndim - 1), 0):
                parts = parts_over(sizes, (*entries[dim], axis))
                if x.shape[dim] % parts == 0:
                    entries[dim] = (*entries[dim], axis)
                    break
            else:
                raise ValueError(
                    f"`dropless` sends tokens of shape {x.shape[:-1]} from each device of the "
                    f"axes {product_text(sizes, axes)}, over which the experts are split, and "
                    f"`{axis}` divides no dim of them."
                )
        return tuple(map(spec_entry, entries))

    def _where(self, x: jax.Array) -> _Where:
        """How tokens and rows are laid out over the axes that are still automatic."""
        mesh = current_mesh()
        spec = self._resolved(x)
        row_axes = spec_axes(PartitionSpec(*spec[:-1]))
        free = [axis for axis in automatic_axes() if axis not in row_axes and mesh.shape[axis] > 1]
        feature_axes: tuple[str, ...] = ()
        for axis in free:
            if x.shape[-1] % parts_over(mesh.shape, (*feature_axes, axis)) == 0:
                feature_axes = (*feature_axes, axis)
        return _Where(tuple(spec[:-1]), row_axes, feature_axes)

    def _resolved(self, x: jax.Array) -> PartitionSpec:
        """The spec of the tokens over axes that are automatic."""
        scope, mesh = current_scope(), current_mesh()
        if scope is None or scope.rules is None or mesh.empty:
            return PartitionSpec(*[None] * x.ndim)
        manual = frozenset(mesh.manual_axes)
        return resolve(
            scope.rules, mesh.shape, self.names, x.shape, what="x", manual=manual, parts=True
        ).spec


def _local_tokens(x: jax.Array, where: _Where) -> int:
    """How many tokens a device has."""
    return x[..., 0].size // parts_over(current_mesh().shape, where.row_axes)


@dataclass(frozen=True)
class _Rounds:
    """The rounds of a layer, each a function of the same operands."""

    exchange: RowExchange
    where: _Where

    def shapes(self, x: jax.Array) -> tuple[jax.ShapeDtypeStruct, Groups]:
        """The rows and the groups that experts are called with, on all devices together."""
        parts = parts_over(current_mesh().shape, self.where.row_axes)
        rows = jax.ShapeDtypeStruct((parts * self.exchange.rows, x.shape[-1]), x.dtype)
        sizes: Any = jax.ShapeDtypeStruct((parts, self.exchange.local_experts), jnp.int32)
        return rows, Groups(sizes, self.where.row_axes, self.where.feature_axes)

    def plan(self, choices: Choices) -> tuple[Plan, jax.Array]:
        """Where each device's choices go, and how many rounds that takes."""

        def run(expert: jax.Array, wanted: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
            plan = self.exchange.plan(_flat(expert), _flat(wanted))
            rounds = self.exchange.rounds(plan)
            # All devices that take part in what a round sends run the loop equally often. Those of
            # other stages of a pipeline may run none.
            axes = axes_without(self.where.every_axis, self.exchange.axes)
            together = (*self.exchange.axes, *axes)
            if together:
                rounds = lax.pmax(rounds, together)
            return tuple(part[None] for part in plan), rounds

        of_plan: Any = tuple([self._of_device()] * len(Plan._fields))
        # Where a row goes depends on the other tokens, and what comes back of it does not.
        arrays = [checkpoint_name(part, SAME_RESULT) for part in (choices.expert, choices.wanted)]
        plan, rounds = per_shard(run, arrays, [self._of_tokens()] * 2, (of_plan, _SCALAR))
        return Plan(*plan), rounds

    def output(
        self, experts: GroupedExperts, number: jax.Array, plan: Plan, operands: Operands
    ) -> jax.Array:
        """What the experts make of the rows of one round, for each token."""
        exchange, where = self.exchange, self.where
        shape = operands.x.shape
        by_token = self._of_tokens(where.feature_axes)
        by_row = self._of_device(where.feature_axes)

        def send(number: jax.Array, plan: Plan, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            round_ = exchange.round(_own(plan), number)
            return exchange.to_experts(_flat(x), round_), round_.sizes_L[None]

        def receive(number: Any, plan: Plan, y: jax.Array, weight: jax.Array) -> jax.Array:
            round_ = exchange.round(_own(plan), number)
            returned = exchange.to_tokens(y, _flat(weight), round_)
            return returned.reshape(*weight.shape[:-1], -1)

        sent = by_row, self._of_device()
        rows, sizes = self._with_plan(send, number, plan, [operands.x], [by_token], sent)
        groups = Groups(sizes, where.row_axes, where.feature_axes)
        y = experts(operands.weights, rows, groups)
        _check_outputs(y, rows, shape)
        weight = operands.choice_weight
        layouts = [by_row, self._of_tokens()]
        made = self._with_plan(receive, number, plan, [y, weight], layouts, by_token)
        return made.astype(operands.x.dtype)

    def _with_plan(
        self,
        body: Callable[..., Any],
        number: jax.Array,
        plan: Plan,
        arrays: list[jax.Array],
        layouts: list[ArrayLayout],
        results: Any,
    ) -> Any:
        """A function of a round's number, of the plan, and of arrays, on each device's shards."""
        of_plan = self._of_device()

        def run(number: jax.Array, *rest: jax.Array) -> Any:
            return body(number, Plan(*rest[: len(plan)]), *rest[len(plan) :])

        given = [_SCALAR, *[of_plan] * len(plan), *layouts]
        return per_shard(run, (number, *plan, *arrays), given, results)

    def _of_tokens(self, features: tuple[str, ...] = ()) -> ArrayLayout:
        """The layout of what tokens have, which is along the last dim."""
        spec = PartitionSpec(*self.where.tokens, spec_entry(features))
        return ArrayLayout((), spec, ((),) * len(spec))

    def _of_device(self, features: tuple[str, ...] = ()) -> ArrayLayout:
        """The layout of what each device has some of, along dim 0."""
        spec = PartitionSpec(spec_entry(self.where.row_axes), spec_entry(features))
        return ArrayLayout((), spec, ((), ()))


def _own(plan: Plan) -> Plan:
    """A device's own plan, of an array of those of all devices."""
    return Plan(*[part[0] for part in plan])


def _flat(x: jax.Array) -> jax.Array:
    """The tokens of a device in one dim."""
    return x.reshape(-1, x.shape[-1])


def _check_outputs(y: Any, rows: jax.Array, shape: tuple[int, ...]) -> None:
    """Refuse a function of experts that does not give a row for each row."""
    takes = "a function that gives an array, (rows, width)"
    check_arrays.array(OP, "experts", y, takes)
    if y.ndim != 2 or y.shape[0] != rows.shape[0] or y.shape[1] != shape[-1]:
        raise ValueError(
            f"`experts` was given rows of shape {rows.shape}, (rows, width), and made {y.shape} "
            "of them: it gives as many of the same width."
        )


def _stats(router: Router, seen: Seen, choices: Choices, rounds: jax.Array, group: int) -> MoEStats:
    """The statistics of the layer, of which those of the router's loss are by group.

    Args:
        router: has the loss of uneven load.
        seen: what it saw of each token.
        choices: what it wants.
        rounds: in how many rounds tokens were sent.
        group: the tokens of a group.
    """
    dims = seen.logits.ndim - 1

    def by_group(x: jax.Array) -> jax.Array:
        return x.reshape(-1, group, *x.shape[dims:])

    grouped: Choices = jax.tree.map(by_group, choices)
    seen = by_token(seen, by_group)
    load = load_of_choices(seen, grouped, grouped.wanted)
    return stats_of(router, seen, grouped, load, rounds)
