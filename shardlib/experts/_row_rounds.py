"""Rounds in which rows are sent to their experts and back: functions of the same operands.

Rows are sent over the axes of an exchange, which are manual. Over axes that are automatic, every
device sends what it has: that part runs in a `shard_map` of its own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardlib.checks import _arrays as check_arrays
from shardlib.experts._further_rounds import Made, Operands, Rounds, all_rounds, without_captures
from shardlib.experts._routing import Choices
from shardlib.experts._rows import Plan, RowExchange
from shardlib.kernels._grouped_matmul import Groups
from shardlib.kernels._shards import ArrayLayout, per_shard
from shardlib.layouts._annotate import current_mesh
from shardlib.layouts._checkpoint_policies import SAME_RESULT
from shardlib.layouts._specs import axes_without, parts_over, spec_entry

GroupedExperts = Callable[[Any, jax.Array, Groups], jax.Array]
_SCALAR = ArrayLayout((), PartitionSpec(), ())


class TokenLayout(NamedTuple):
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

    @property
    def parts(self) -> int:
        """Into how many parts the automatic axes split the tokens."""
        return parts_over(current_mesh().shape, self.row_axes)

    @property
    def of_rows(self) -> "TokenLayout":
        """The layout of rows that were received, as tokens that are sent on."""
        return self._replace(tokens=(spec_entry(self.row_axes),))

    def local_tokens(self, x: jax.Array) -> int:
        """How many tokens a device has."""
        return x[..., 0].size // self.parts

    def by_token(self, features: tuple[str, ...] = ()) -> ArrayLayout:
        """The layout of what tokens have, which is along the last dim."""
        spec = PartitionSpec(*self.tokens, spec_entry(features))
        return ArrayLayout((), spec, ((),) * len(spec))

    def by_device(self, features: tuple[str, ...] = ()) -> ArrayLayout:
        """The layout of what each device has some of, along dim 0."""
        spec = PartitionSpec(spec_entry(self.row_axes), spec_entry(features))
        return ArrayLayout((), spec, ((), ()))


@dataclass(frozen=True)
class RowSender:
    """Sends the rows of tokens by an exchange, wherever they are over automatic axes.

    - `exchange`: which rows go where, on one device.
    - `layout`: of the tokens.
    - `together`: the manual axes whose devices run as many rounds as each other.
    """

    exchange: RowExchange
    layout: TokenLayout
    together: tuple[str, ...]

    @property
    def further(self) -> "RowSender":
        """What sends in the rounds after the first one."""
        return replace(self, exchange=self.exchange.further)

    @property
    def all_rows(self) -> int:
        """The rows that are received in a round, on all devices of the automatic axes."""
        return self.layout.parts * self.exchange.rows

    def plan(self, expert: jax.Array, wanted: jax.Array) -> tuple[Plan, jax.Array]:
        """Where each device's choices go, and how many rounds that takes."""

        def run(expert: jax.Array, wanted: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
            plan = self.exchange.plan(flat_tokens(expert), flat_tokens(wanted))
            rounds = self.exchange.rounds(plan)
            # All devices that take part in what a round sends run the loop equally often. Those of
            # other stages of a pipeline may run none.
            others = axes_without(self.layout.every_axis, self.together)
            together = (*self.together, *others)
            if together:
                rounds = lax.pmax(rounds, together)
            return tuple(part[None] for part in plan), rounds

        of_plan: Any = tuple([self.layout.by_device()] * len(Plan._fields))
        # Where a row goes depends on the other tokens, and what comes back of it does not.
        arrays = [checkpoint_name(part, SAME_RESULT) for part in (expert, wanted)]
        of_tokens = [self.layout.by_token()] * 2
        plan, rounds = per_shard(run, arrays, of_tokens, (of_plan, _SCALAR))
        return Plan(*plan), rounds

    def send(self, number: jax.Array, plan: Plan, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The rows of the tokens, and how many each expert gets."""
        layout, exchange = self.layout, self.exchange

        def run(number: jax.Array, plan: Plan, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            round_ = exchange.round(own_plan(plan), number)
            return exchange.to_experts(flat_tokens(x), round_), round_.sizes_L[None]

        # The width may be split meanwhile.
        results = layout.by_device(layout.feature_axes), layout.by_device()
        given = [layout.by_token(layout.feature_axes)]
        return self.with_plan(run, number, plan, [x], given, results)

    def receive(self, number: jax.Array, plan: Plan, y: jax.Array, weight: jax.Array) -> jax.Array:
        """For each token the weighted sum of its rows, sent back."""
        layout, exchange = self.layout, self.exchange

        def run(number: Any, plan: Plan, y: jax.Array, weight: jax.Array) -> jax.Array:
            round_ = exchange.round(own_plan(plan), number)
            returned = exchange.to_tokens(y, flat_tokens(weight), round_)
            return returned.reshape(*weight.shape[:-1], -1)

        given = [layout.by_device(layout.feature_axes), layout.by_token()]
        results = layout.by_token(layout.feature_axes)
        return self.with_plan(run, number, plan, [y, weight], given, results)

    def with_plan(
        self,
        body: Callable[..., Any],
        number: jax.Array,
        plan: Plan,
        arrays: list[jax.Array],
        layouts: list[ArrayLayout],
        results: Any,
    ) -> Any:
        """A function of a round's number, of the plan, and of arrays, on each device's shards."""
        of_plan = self.layout.by_device()

        def run(number: jax.Array, *rest: jax.Array) -> Any:
            return body(number, Plan(*rest[: len(plan)]), *rest[len(plan) :])

        given = [_SCALAR, *[of_plan] * len(plan), *layouts]
        return per_shard(run, (number, *plan, *arrays), given, results)


@dataclass(frozen=True)
class RowRounds:
    """Rounds in which rows are sent to the devices of their experts at once."""

    sender: RowSender

    @property
    def is_one(self) -> bool:
        """Whether there is never more than one round: where nothing is sent."""
        return self.sender.exchange.devices == 1

    @property
    def further(self) -> "RowRounds":
        """The rounds after the first one."""
        return RowRounds(self.sender.further)

    def shapes(self, x: jax.Array) -> list[tuple[Any, Groups]]:
        """The rows and groups that experts are called with in a round, on all devices together."""
        layout, exchange = self.sender.layout, self.sender.exchange
        rows = jax.ShapeDtypeStruct((self.sender.all_rows, x.shape[-1]), x.dtype)
        sizes: Any = jax.ShapeDtypeStruct((layout.parts, exchange.local_experts), jnp.int32)
        return [(rows, Groups(sizes, layout.row_axes, layout.feature_axes))]

    def plan(self, choices: Choices) -> tuple[Plan, jax.Array]:
        """Where choices go, and how many rounds that takes."""
        return self.sender.plan(choices.expert, choices.wanted)

    def output(
        self, experts: GroupedExperts, number: jax.Array, plan: Plan, operands: Operands
    ) -> Made:
        """What the experts make of the rows of one round, for each token."""
        layout = self.sender.layout
        rows, sizes = self.sender.send(number, plan, operands.x)
        groups = Groups(sizes, layout.row_axes, layout.feature_axes)
        y = experts(operands.weights, rows, groups)
        _check_outputs(y, rows)
        made = self.sender.receive(number, plan, y, operands.choice_weight)
        return Made(made.astype(operands.x.dtype), jnp.int32(0))


def in_rounds(
    rounds: Rounds, experts: GroupedExperts, x: jax.Array, choices: Choices, weights: Any
) -> tuple[jax.Array, jax.Array]:
    """The outputs of all tokens, in as many rounds as it takes, and how many these are.

    Of rounds within rounds, those within the first one count.
    """
    plan, number = rounds.plan(choices)
    operands = Operands(x, weights, choices.weight)
    first = partial(rounds.output, experts, jnp.int32(0), plan)
    if rounds.is_one:
        return first(operands).y, number
    further = rounds.further
    converted = without_captures(experts, weights, further.shapes(x))
    y, within = all_rounds(further, first, converted, number, plan, operands)
    return y, number + within


def own_plan(plan: Plan) -> Plan:
    """A device's own plan, of an array of those of all devices."""
    return Plan(*[part[0] for part in plan])


def flat_tokens(x: jax.Array) -> jax.Array:
    """The tokens of a device in one dim."""
    return x.reshape(-1, x.shape[-1])


def _check_outputs(y: Any, rows: jax.Array) -> None:
    """Refuse a function of experts that does not give a row for each row."""
    takes = "a function that gives an array, (rows, width)"
    check_arrays.array("dropless", "experts", y, takes)
    if y.shape != rows.shape:
        raise ValueError(
            f"`experts` was given rows of shape {rows.shape}, (rows, width), and made {y.shape} "
            "of them: it gives as many of the same width."
        )
