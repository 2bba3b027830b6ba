"""Send all rows of tokens to the devices of their experts and back; none is dropped.

    choices of a device's tokens    sorted by expert, and so by the device that has the expert
      |  sent, in rounds of a fixed number of rows
    rows of a device's experts      sorted by expert, and for each by the device they come from

Every device knows how many rows each device has for each expert, and so where each row goes. The
buffers of the first round have a fixed size, a little more than an even load needs. What does not
fit goes in further rounds. Their buffers are a fraction of that, since a program has memory for
them whether they run or not.

    ragged   each row is sent to its final place, in one collective that moves no others. A round
             takes as many rows as the fullest device has room for.
    dense    all devices send each other equally many rows, of which some may be empty, and what
             arrived is sorted. A round takes as many as the fullest pair of devices has room for.

Shape suffixes: T tokens of a device, K choices of a token, P = K T, the choices by rank, then by
token; D devices, E experts, L experts of a device, J rows that a device sends in a round, R rows
that it gets, M width.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.experts._row_moves import collect_weighed, spread

Sending: TypeAlias = Literal["ragged", "dense"]
SENDING = get_args(Sending)
# The rows of a buffer are a multiple of the largest of these that its limit allows, so that kernels
# have whole tiles.
_MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)
# The first round has room for so many times the rows of a further one.
FURTHER_ROUNDS = 4


class Plan(NamedTuple):
    """Where the choices of a device's tokens are in the order of experts, and counts of all."""

    expert_P: jax.Array  # the expert of each choice; the count of experts if it is not wanted
    order_P: jax.Array  # the choices in the order of their experts
    place_P: jax.Array  # where each choice is in that order
    counts_DE: jax.Array  # how many rows each device has for each expert


class Round(NamedTuple):
    """Where rows are in one round.

    - `place_P`: for each choice the row in which it is sent; the count of rows where it is not.
    - `source_J`: for each row that is sent its choice; the count of choices where it is empty.
    - `sizes_L`: how many rows this device gets for each of its experts.
    - `moves`: the arguments of the collective, both ways.
    """

    place_P: jax.Array
    source_J: jax.Array
    sizes_L: jax.Array
    moves: Any


class Sorted(NamedTuple):
    """The order that sorts the rows that arrived by expert, and its inverse."""

    order_R: jax.Array
    place_R: jax.Array


class Arrived(NamedTuple):
    """Where the rows that a device gets in a round come from.

    - `device_R`: the device that has sent each row.
    - `place_R`: where the row is among that device's choices, in the order of their experts.
    - `is_row_R`: whether there is a row, and not an empty place.
    """

    device_R: jax.Array
    place_R: jax.Array
    is_row_R: jax.Array


class Way(NamedTuple):
    """The arguments of `ragged_all_to_all` that send rows one way.

    - `slices`: where slices begin, how many rows they have, where these are put on the device that
      gets them, and how many rows arrive in each.
    - `arrives`: for each row of the receiving buffer, whether one arrives there.
    """

    slices: tuple[jax.Array, ...]
    arrives: jax.Array


class Ways(NamedTuple):
    """The way of rows to the experts, and their way back to the tokens."""

    to_experts: Way
    to_tokens: Way


@dataclass(frozen=True)
class RowExchange:
    """How the choices of a device's tokens are sent to the devices of the experts.

    - `axes`: the manual axes that the experts are split over.
    - `devices`: how many devices these axes have.
    - `experts`: how many experts there are on all of them.
    - `tokens`, `choices`: how many tokens a device has, and how many choices of a token.
    - `form`: of the collective.
    - `buffer`: how many times the rows of an even load a device has room for in the first round.
    - `is_further`: whether this is the exchange of the rounds after the first one.
    - `even`: how many rows a device has under an even load; by default as many as it has choices.
    """

    axes: tuple[str, ...]
    devices: int
    experts: int
    tokens: int
    choices: int
    form: Sending
    buffer: float
    is_further: bool = False
    even: int | None = None

    @property
    def further(self) -> "RowExchange":
        """The exchange of each round after the first one."""
        return replace(self, is_further=True)

    @property
    def local_experts(self) -> int:
        """How many experts a device has."""
        return self.experts // self.devices

    @property
    def rows(self) -> int:
        """How many rows a device gets in a round at most."""
        if self.devices == 1 or self.form == "ragged":
            return self.room
        return self.devices * self.room

    @property
    def room(self) -> int:
        """How many rows a round has room for: on a device or, if dense, for a pair of devices."""
        total = self.tokens * self.choices
        if self.devices == 1:
            return total
        if self.even is not None:
            total = self.even
        even = total if self.form == "ragged" else -(-total // self.devices)
        room = _room(even, self.buffer)
        if not self.is_further:
            return room
        return _rounded_up(-(-room // FURTHER_ROUNDS))

    def plan(self, expert_TK: jax.Array, wanted_TK: jax.Array) -> Plan:
        """Sort the choices of this device's tokens, and gather the counts of all devices."""
        expert_P = jnp.where(wanted_TK, expert_TK, self.experts).T.reshape(-1)
        order_P = _order(expert_P, self.experts)
        place_P = _inverse(order_P)
        # Where each expert begins among the sorted choices, and where the last one ends.
        begins = jnp.searchsorted(expert_P[order_P], jnp.arange(self.experts + 1))
        counts_DE = jnp.diff(begins).astype(jnp.int32)[None]
        if self.axes:
            counts_DE = lax.all_gather(counts_DE, self.axes, tiled=True)
        return Plan(expert_P, order_P, place_P, counts_DE)

    def rounds(self, plan: Plan) -> jax.Array:
        """How many rounds it takes until every row is sent."""
        if self.devices == 1:
            return jnp.int32(1)
        of_pairs_DD = plan.counts_DE.reshape(self.devices, self.devices, -1).sum(2)
        most = of_pairs_DD.max()
        if self.form == "ragged":
            most = of_pairs_DD.sum(0).max()
        left = jnp.maximum(most - self.room, 0)
        return 1 - (-left // self.further.room)

    def _before(self, number: Any) -> Any:
        """How many rows the rounds before the one of this number have room for."""
        if not self.is_further:
            return 0
        return replace(self, is_further=False).room + (number - 1) * self.room

    def round(self, plan: Plan, number: Any) -> Round:
        """Where rows are in the round of this number, which is 0 for the first one."""
        if self.devices == 1:
            return self._only_round(plan)
        if self.form == "ragged":
            return self._ragged_round(plan, number)
        return self._dense_round(plan, number)

    def to_experts(self, x_TM: jax.Array, where: Round) -> jax.Array:
        """The rows of this device's experts (R, M), sent from the devices of the tokens."""
        x_GJM: Any = spread(x_TM[None], where.place_P[None], where.source_J[None], self.tokens)
        x_JM = x_GJM[0]
        if self.devices == 1:
            return x_JM
        if self.form == "ragged":
            sent: Any = _send_slices(self.axes, x_JM, *where.moves)
            return sent
        return _reordered(self._all_to_all(x_JM), where.moves)

    def to_tokens(self, y_RM: jax.Array, weight_TK: jax.Array, where: Round) -> jax.Array:
        """The weighted sum of the rows of each token (T, M), sent back from the experts."""
        y_JM: Any = y_RM
        if self.devices > 1 and self.form == "ragged":
            y_JM = _send_slices(self.axes, y_RM, *where.moves[::-1])
        elif self.devices > 1:
            back = Sorted(where.moves.place_R, where.moves.order_R)
            y_JM = self._all_to_all(_reordered(y_RM, back))
        weight_P = weight_TK.T.reshape(-1)
        y_TM: Any = collect_weighed(y_JM, weight_P, where.place_P, where.source_J, self.tokens)
        return y_TM

    def arrived(self, plan: Plan, number: Any) -> Arrived:
        """Where the rows of a round come from, on devices of one expert each."""
        me, first = lax.axis_index(self.axes), self._before(number)
        counts_D = plan.counts_DE[:, me]
        # Of the rows that each device has for this one: how many are in rounds before, and how many
        # in this round.
        if self.form == "ragged":
            begin_D = _sums_up_to(counts_D) - counts_D
            skipped_D = jnp.clip(first - begin_D, 0, counts_D)
            taken_D = jnp.clip(first + self.room - begin_D, 0, counts_D) - skipped_D
        else:
            skipped_D = jnp.minimum(first, counts_D)
            taken_D = jnp.clip(counts_D - first, 0, self.room)
        row_R, end_D = jnp.arange(self.rows), _sums_up_to(taken_D)
        device_R = jnp.minimum((row_R[:, None] >= end_D).sum(1), self.devices - 1)
        within_R = row_R - (end_D - taken_D)[device_R] + skipped_D[device_R]
        leave_DE = _sums_up_to(plan.counts_DE, 1) - plan.counts_DE
        place_R = leave_DE[device_R, me] + within_R
        return Arrived(device_R, place_R, row_R < end_D[-1])

    def _all_to_all(self, x_JM: jax.Array) -> jax.Array:
        """Send equally many rows from each device to each."""
        return lax.all_to_all(x_JM, self.axes, 0, 0, tiled=True)

    def _only_round(self, plan: Plan) -> Round:
        """All rows at once, where nothing is sent.

        Choices that are not wanted come last in the order. They have no rows: whatever the experts
        make of rows of no expert, it is added to no token.
        """
        count = plan.order_P.size
        is_row_J = jnp.arange(count) < plan.counts_DE.sum()
        source_J = jnp.where(is_row_J, plan.order_P, count)
        place_P = jnp.where(plan.expert_P < self.experts, plan.place_P, count)
        return Round(place_P, source_J, plan.counts_DE[0], None)

    def _dense_round(self, plan: Plan, number: Any) -> Round:
        """The rows of a pair of devices that are in no round before, as many as fit."""
        count = plan.order_P.shape[0]
        room, first = self.room, self._before(number)
        me = lax.axis_index(self.axes)
        counts_DDL = plan.counts_DE.reshape(self.devices, self.devices, -1)
        to_D = counts_DDL[me].sum(1)
        begins_D = _sums_up_to(to_D) - to_D
        # The index of each row that is sent, among all rows for the same device.
        within_J = first + jnp.tile(jnp.arange(room), self.devices)
        device_J = jnp.repeat(jnp.arange(self.devices), room)
        sorted_J = begins_D[device_J] + within_J
        is_row_J = within_J < to_D[device_J]
        source_J = jnp.where(is_row_J, plan.order_P[jnp.minimum(sorted_J, count - 1)], count)
        # The inverse: the row of each choice.
        device_P = jnp.minimum(plan.expert_P // self.local_experts, self.devices - 1)
        within_P = plan.place_P - begins_D[device_P] - first
        is_sent_P = (plan.expert_P < self.experts) & (within_P >= 0) & (within_P < room)
        place_P = jnp.where(is_sent_P, device_P * room + within_P, self.rows)
        # What arrives, device by device, is sorted by expert.
        ends_DL = _sums_up_to(counts_DDL[:, me], 1)
        arrived_J = first + jnp.arange(room)
        expert_R = (arrived_J[:, None] >= ends_DL[:, None]).sum(-1).reshape(-1)
        order_R = _order(expert_R, self.local_experts)
        sizes_L = (expert_R[:, None] == jnp.arange(self.local_experts)).sum(0)
        moves = Sorted(order_R, _inverse(order_R))
        return Round(place_P, source_J, sizes_L.astype(jnp.int32), moves)

    def _ragged_round(self, plan: Plan, number: Any) -> Round:
        """The rows of a device that are in no round before, as many as fit.

        Rows of a device are counted expert by expert, and those of one expert in the order of the
        devices that they come from.
        """
        me, room = lax.axis_index(self.axes), self.room
        first = self._before(number)
        counts_DE = plan.counts_DE
        # Of each device's rows for each expert: where they begin among all of the device that gets
        # them, and among all of the device that sends them.
        totals_DL = counts_DE.sum(0).reshape(self.devices, -1)
        before_E = (_sums_up_to(totals_DL, 1) - totals_DL).reshape(-1)
        arrive_DE = before_E + _sums_up_to(counts_DE, 0) - counts_DE
        leave_DE = _sums_up_to(counts_DE, 1) - counts_DE
        # The rows of this round are a contiguous part of them.
        skipped_DE = jnp.clip(first - arrive_DE, 0, counts_DE)
        sent_DE = jnp.clip(first + room - arrive_DE, 0, counts_DE) - skipped_DE
        leave_DE = leave_DE + skipped_DE
        # The offset of an empty slice could be beyond the end, which a backend may not accept.
        arrive_DE = jnp.clip(arrive_DE + skipped_DE - first, 0, room)

        def for_own_experts(x_DE: jax.Array) -> jax.Array:
            of_experts_DL = x_DE.reshape(self.devices, self.devices, -1)[:, me]
            return of_experts_DL.reshape(-1)

        received = for_own_experts(sent_DE)
        sizes_L = received.reshape(self.devices, -1).sum(0)
        to_experts = leave_DE[me], sent_DE[me], arrive_DE[me], received
        to_tokens = for_own_experts(arrive_DE), received, for_own_experts(leave_DE), sent_DE[me]
        ways = Ways(
            Way(to_experts, jnp.arange(room) < sizes_L.sum()),
            Way(to_tokens, _within(plan, leave_DE[me], sent_DE[me])),
        )
        return Round(plan.place_P, plan.order_P, sizes_L, ways)


def _within(plan: Plan, first_E: jax.Array, count_E: jax.Array) -> jax.Array:
    """Which sorted choices are among the `count_E` of their expert that begin at `first_E`."""
    expert_P = plan.expert_P[plan.order_P]
    number_P = jnp.arange(expert_P.size)
    # Choices that are not wanted have the index after the last expert's.
    none = jnp.zeros(1, count_E.dtype)
    first_P = jnp.concatenate([first_E, none])[expert_P]
    count_P = jnp.concatenate([count_E, none])[expert_P]
    return (number_P >= first_P) & (number_P < first_P + count_P)


def _room(even: int, buffer: float) -> int:
    """The rows of a buffer: at least those of an even load, and at most `buffer` times as many."""
    most = int(even * buffer)
    for multiple in _MULTIPLES:
        rows = most // multiple * multiple
        if rows >= even:
            return rows
    return even


def _rounded_up(part: int) -> int:
    """The rows of a buffer for `part` rows: not many more, in whole tiles."""
    for multiple in _MULTIPLES:
        rows = -(-part // multiple) * multiple
        if rows <= 1.25 * part:
            return rows
    return part


def _order(expert_P: jax.Array, most: int) -> jax.Array:
    """The order that sorts indices of experts, of which `most` is the highest; it is stable."""
    count = expert_P.size
    if (most + 1) * count >= 2**31:
        return jnp.argsort(expert_P, stable=True).astype(jnp.int32)
    # Each choice's expert and index are one number. To sort these takes less time than an argsort,
    # and a TPU's compiler makes a shorter program of it.
    number_P = jnp.arange(count, dtype=jnp.int32)
    return jnp.sort(expert_P.astype(jnp.int32) * count + number_P) % count


def _sums_up_to(x: jax.Array, dim: int = 0) -> jax.Array:
    """The cumulative sum along a dim, by adding the array to itself, moved by 1, 2, 4 ... places.

    For `jnp.cumsum` a TPU's compiler makes a program that is some thirty times as long.
    """
    moved = 1
    while moved < x.shape[dim]:
        padding = [(0, 0, 0)] * x.ndim
        padding[dim] = (moved, -moved, 0)
        x += lax.pad(x, jnp.zeros((), x.dtype), padding)
        moved *= 2
    return x


def _inverse(order_P: jax.Array) -> jax.Array:
    """The inverse of a permutation."""
    numbers = jnp.arange(order_P.size, dtype=jnp.int32)
    return jnp.zeros_like(order_P).at[order_P].set(numbers, unique_indices=True)


def _reordered(x_RM: jax.Array, order: Sorted) -> jax.Array:
    """The rows in another order; its gradient is a gather, too, by the inverse order."""
    moved: Any = spread(x_RM[None], order.place_R[None], order.order_R[None], x_RM.shape[0])
    return moved[0]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _send_slices(axes: tuple[str, ...], x_JM: jax.Array, there: Way, back: Way) -> jax.Array:
    """Slices of rows to other devices; zeros where none arrive.

    Args:
        axes: of the devices.
        x_JM: the rows.
        there: which rows go where.
        back: the same for the other direction, which the gradient takes.
    """
    del back
    # The buffer is not initialized: to fill it with zeros takes longer than to mask it afterwards.
    buffer = lax.empty((there.arrives.size, x_JM.shape[1]), x_JM.dtype)
    received = lax.ragged_all_to_all(x_JM, buffer, *there.slices, axis_name=axes)
    return jnp.where(there.arrives[:, None], received, jnp.zeros_like(received))


def _send_forward(axes: Any, x_JM: Any, there: Way, back: Way) -> tuple[Any, Any]:
    return _send_slices(axes, x_JM, there, back), (there, back)


def _send_backward(axes: Any, saved: Any, gradient: Any) -> tuple[Any, None, None]:
    there, back = saved
    return _send_slices(axes, gradient, back, there), None, None


_send_slices.defvjp(_send_forward, _send_backward)
