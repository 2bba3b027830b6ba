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

from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.experts._choose import Given, by_token, choose, see
from shardlib.experts._further_rounds import Rounds
from shardlib.experts._moe import group_size
from shardlib.experts._moe_checks import (
    check_functions,
    check_real,
    check_tokens,
    check_weights,
    stored_experts,
)
from shardlib.experts._moe_stats import MoEStats, Trips, load_of_choices, stats_of
from shardlib.experts._routing import Choices, Router, Seen, TopK, check_choices
from shardlib.experts._row_rounds import (
    GroupedExperts,
    RowRounds,
    RowSender,
    TokenLayout,
    in_rounds,
)
from shardlib.experts._rows import SENDING, RowExchange, Sending
from shardlib.experts._rows_sent import ExpertPlaces
from shardlib.experts._sigmoid_router import SigmoidTopK
from shardlib.experts._token_exchange import ExpertAxes, expert_axes
from shardlib.experts._two_levels import Levels
from shardlib.kernels._choice import device_here
from shardlib.kernels._shards import automatic_axes
from shardlib.layouts._annotate import current_mesh, current_scope, shard, slow_axes_in_scope
from shardlib.layouts._checkpoint_policies import BY_EXAMPLE
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

OP = "dropless"


class DroplessOptions(TypedDict, total=False):
    """How tokens are sent to their experts, as keywords of `dropless`.

    - `group`: how many consecutive tokens the router's load-balancing loss is computed over; by
      default the tokens of one example.
    - `buffer`: the room that a device has for rows in the first round, as a multiple of an even
      load. A larger buffer takes more memory; a smaller one needs further rounds more often.
    - `sending`: `"ragged"`, the default on TPUs, sends only the rows that exist. `"dense"`, the
      default elsewhere, sends equally many rows between all devices. The results are equal.
    - `across`: axes of the experts over which a token is sent once to each node that has experts of
      it, and from there to these experts; by default the axes on the slow network. `()` is none.
    - `padded_to`: how many experts the weights have, if more than the gate. The additional experts
      come last and are never chosen: they make the number divisible by a mesh axis.
    """

    group: int | None
    buffer: float
    sending: Sending | None
    across: str | tuple[str, ...] | None
    padded_to: int | None


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

    No token is dropped, however many want the same expert. It returns `(y, stats)`: the outputs, in
    the shape and dtype of `x`, and `MoEStats`.

    Args:
        x: the tokens, (batch, ..., width).
        router: chooses experts for each token, such as `TopK(2)`. It must not have a capacity.
        experts: a function of the weights, of rows (rows, width) sorted by expert, and of `Groups`,
            which say which rows belong to which expert. It returns as many rows of the same width,
            computed with `sl.kernels.grouped_matmul`. Rows at the end belong to no expert.
        gate: (width, experts), whole on every device.
        weights: a tree of arrays with a dim for the experts first, which the rule `experts` splits.
        key: given while training, for the router's draws.
        real: bools (batch, ...), false for padding, which goes to no expert and is not counted.
        bias: (experts,), added to the scores by which `SigmoidTopK` chooses, see `balanced`.
        noise_gate: (width, experts), from which `NoisyTopK` computes how large its noise is.
        ids: the ids of the tokens, (batch, ...), for `Hash`.
        names: a name for each dim of `x`.
        options: see `DroplessOptions`: `group`, how many tokens the router's loss balances, by
            default those of an example; `buffer`, 1.25 by default; `sending`, `across` and
            `padded_to`.

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
    check_tokens(OP, x, gate, names)
    check.keywords(OP, options, DroplessOptions)
    takes = "how many times the rows of an even load a device has room for"
    buffer = check.number(OP, "buffer", options.get("buffer", 1.25), takes, least=1)
    check_real(OP, x, real)
    check_functions(OP, router, experts, key)
    count = gate.shape[1]
    _check_router(router, count)
    stored = stored_experts(OP, options.get("padded_to"), count)
    axes = expert_axes(stored, mixed=True)
    check_weights(OP, weights, stored, axes.parts, axes.manual)
    if real is not None:
        # Padding may hold anything, and times a weight of zero that may be no number.
        x = jnp.where(real[..., None], x, 0)
    x = shard(x, *names)
    seen = see(x, router, Given(gate, key, bias, noise_gate, ids, real))
    choices = choose(router, seen)
    sending = _sending(options.get("sending"))
    across = _across(options.get("across"), axes)
    most_nodes = _most_nodes(router, parts_over(current_mesh().shape, across), count, stored)
    layer = _Layer(experts, names, axes, stored, router, sending, buffer, across, most_nodes)
    y, trips = layer.everywhere(x, choices._replace(probability=None), weights)
    size = group_size(OP, x, options.get("group"))
    y = checkpoint_name(shard(y, *names), BY_EXAMPLE)
    return y, _stats(router, seen, choices, trips, size)


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


def _across(asked: Any, axes: ExpertAxes) -> tuple[str, ...]:
    """The axes over which a token is sent once to each node that has experts of it.

    They come first among the axes of the experts, so that the experts of a node follow each other.
    """
    all_axes = axes.all_manual().manual
    if asked is None:
        slow = axes_within(all_axes, slow_axes_in_scope())
        is_first = slow == all_axes[: len(slow)]
        return slow if is_first and len(slow) < len(all_axes) else ()
    takes = "an axis that experts are split over, or a tuple of such"
    check.kind(OP, "across", asked, str | tuple, takes)
    across = as_tuple(asked)
    # Where experts are not split nothing is sent, as where the model runs on one device.
    if not all_axes or not across:
        return ()
    if across == all_axes[: len(across)] and len(across) < len(all_axes):
        return across
    sizes = current_mesh().shape
    raise ValueError(
        f"`dropless(across={asked!r})` takes the first of the axes that the experts are split "
        "over, with one left for the experts of a node; these are "
        f"{product_text(sizes, all_axes)}. The rule says in which order: "
        "`sl.AxisRules(experts=(across, within))`."
    )


def _most_nodes(router: Router, nodes: int, count: int, stored: int) -> int:
    """On how many of the nodes the experts of a token are at most.

    Args:
        router: says how many experts a token goes to, and of how many groups these are.
        nodes: how many there are.
        count: how many experts there are to choose from.
        stored: how many have weights.
    """
    most = min(router.choices, nodes)
    # Routers of the user's own may mean something else by groups.
    if type(router) not in (TopK, SigmoidTopK):
        return most
    # With padding, or fewer groups than nodes, a group of experts may be on several nodes.
    grouped: Any = router
    if stored == count and grouped.groups % nodes == 0:
        most = min(most, grouped.groups_taken)
    return most


@dataclass(frozen=True)
class _Layer:
    """One call of `dropless`, but for its arrays."""

    experts: GroupedExperts
    names: tuple[str | None, ...]
    axes: ExpertAxes
    count: int
    router: Router
    sending: Sending
    buffer: float
    across: tuple[str, ...]
    most_nodes: int

    def everywhere(self, x: jax.Array, choices: Choices, weights: Any) -> tuple[Any, Trips]:
        """The outputs of all tokens, and how these got to their experts."""
        automatic = self.axes.automatic
        if not automatic:
            return self.manually(x, choices, weights)
        # Over the axes of the experts this file sends rows itself.
        tokens = self._split_tokens(x, automatic)
        by_expert = spec_entry(automatic)
        inner = replace(self, axes=self.axes.all_manual())

        def run(x: jax.Array, choices: Choices, weights: Any) -> tuple[Any, Trips]:
            y, trips = inner.manually(x, choices, weights)
            within, across = lax.psum((trips.within, trips.across), automatic)
            return y, Trips(trips.rounds, within, across)

        spec = PartitionSpec(*tokens)
        mapped = jax.shard_map(
            run,
            in_specs=(spec, spec, PartitionSpec(by_expert)),
            out_specs=(spec, PartitionSpec()),
            axis_names=set(automatic),
            check_vma=False,
        )
        return mapped(x, choices, weights)

    def manually(self, x: jax.Array, choices: Choices, weights: Any) -> tuple[Any, Trips]:
        """The same where the axes of the experts are manual, or there are none."""
        layout = self._layout(x)
        rounds = self._rounds(layout, layout.local_tokens(x))
        y, number = in_rounds(rounds, self.experts, x, choices, weights)
        # A row goes there and comes back.
        of_row = 2.0 * x.shape[-1] * x.dtype.itemsize
        rows = self._places.rows_sent(choices)
        within, across = jax.tree.map(lambda count: of_row * count, rows)
        return y, Trips(number, within, across)

    @property
    def _places(self) -> ExpertPlaces:
        """Which devices have which experts, and which of them are in other nodes."""
        axes = self.axes.manual
        slow = self.across or axes_within(axes, slow_axes_in_scope())
        return ExpertPlaces(axes, slow, self.count, bool(self.across))

    def _rounds(self, layout: TokenLayout, tokens: int) -> Rounds:
        """The rounds in which so many tokens of a device are sent."""
        axes, sizes = self.axes.manual, current_mesh().shape
        if self.across:
            within = axes_without(axes, self.across)
            levels = Levels(
                self.across,
                within,
                parts_over(sizes, self.across),
                parts_over(sizes, within),
                self.count,
                self.router.choices,
                self.most_nodes,
                self.sending,
                self.buffer,
            )
            return levels.rounds(layout, tokens)
        devices = parts_over(sizes, axes)
        exchange = RowExchange(
            axes, devices, self.count, tokens, self.router.choices, self.sending, self.buffer
        )
        return RowRounds(RowSender(exchange, layout, axes))

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

    def _layout(self, x: jax.Array) -> TokenLayout:
        """How tokens and rows are laid out over the axes that are still automatic."""
        mesh = current_mesh()
        spec = self._resolved(x)
        row_axes = spec_axes(PartitionSpec(*spec[:-1]))
        free = [axis for axis in automatic_axes() if axis not in row_axes and mesh.shape[axis] > 1]
        feature_axes: tuple[str, ...] = ()
        for axis in free:
            if x.shape[-1] % parts_over(mesh.shape, (*feature_axes, axis)) == 0:
                feature_axes = (*feature_axes, axis)
        return TokenLayout(tuple(spec[:-1]), row_axes, feature_axes)

    def _resolved(self, x: jax.Array) -> PartitionSpec:
        """The spec of the tokens over axes that are automatic."""
        scope, mesh = current_scope(), current_mesh()
        if scope is None or scope.rules is None or mesh.empty:
            return PartitionSpec(*[None] * x.ndim)
        manual = frozenset(mesh.manual_axes)
        return resolve(
            scope.rules, mesh.shape, self.names, x.shape, what="x", manual=manual, parts=True
        ).spec


def _stats(router: Router, seen: Seen, choices: Choices, trips: Trips, group: int) -> MoEStats:
    """The statistics of the layer, of which those of the router's loss are by group.

    Args:
        router: has the loss of uneven load.
        seen: what it saw of each token.
        choices: what it wants.
        trips: how tokens got to their experts.
        group: the tokens of a group.
    """
    dims = seen.logits.ndim - 1

    def by_group(x: jax.Array) -> jax.Array:
        # A group may be of several examples, and is then what is told apart of the batch.
        return checkpoint_name(x.reshape(-1, group, *x.shape[dims:]), BY_EXAMPLE)

    grouped: Choices = jax.tree.map(by_group, choices)
    seen = by_token(seen, by_group)
    load = load_of_choices(seen, grouped, grouped.wanted)
    return stats_of(router, seen, grouped, load, trips)
