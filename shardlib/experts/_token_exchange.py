"""Where experts are, and how tokens get there and back: by the layer itself or the partitioner.

The rule for `experts` says over which axes they are split. Where the step is manual over these, the
layer sends tokens by an all-to-all of its own; over automatic axes it says how tokens are laid out
before and after, and the partitioner sends them:

    (groups, experts, places, width)     split by group, and then by expert

Shape suffixes: M width, G groups, E experts, C places of an expert.
"""

from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

from shardlib.checks import _arguments as check
from shardlib.layouts._annotate import constrain, current_mesh, current_scope
from shardlib.layouts._resolve import resolve
from shardlib.layouts._rules import EXPERTS, AxisRules
from shardlib.layouts._specs import as_tuple, axes_within, axes_without, parts_over
from shardlib.modeling._batch import manual_over_all


def local_experts(count: int) -> int:
    """How many of `count` experts the weights have where this is traced.

    Where a step is manual over the axes that split the experts, as `sl.train_step` is over those of
    data, they are a device's own. Elsewhere they are all.

    Linen compares a parameter with the shape that its module gives it:
    `self.param("up", init, (local_experts(8), width, hidden))`.

    >>> local_experts(8)
    8
    """
    check.whole("local_experts", "count", count, "a number of experts", least=1)
    return count // expert_axes(count).parts


class ExpertAxes(NamedTuple):
    """The axes of the mesh that the experts are split over.

    Either kind is empty: the layer sends tokens over axes of one kind.
    """

    manual: tuple[str, ...]  # the layer exchanges tokens over these itself
    automatic: tuple[str, ...]  # and the partitioner over these
    parts: int  # of the experts, over the manual axes

    def all_manual(self) -> "ExpertAxes":
        """The same axes, where those that are automatic have become manual."""
        return ExpertAxes((*self.manual, *self.automatic), (), self.parts)


def expert_axes(count: int, *, mixed: bool = False) -> ExpertAxes:
    """The axes that `count` experts are split over, by the rules in scope; none where there are no
    rules.

    All of them are manual or all are automatic, unless they may be `mixed`.
    """
    scope, mesh = current_scope(), current_mesh()
    if scope is None or scope.rules is None or mesh.empty:
        return ExpertAxes((), (), 1)
    what = f"the experts, of which a gate, whole everywhere, tells {count}"
    try:
        spec = resolve(scope.rules, mesh.shape, (EXPERTS,), (count,), what=what).spec
    except ValueError as error:
        raise ValueError(
            f"{error} Or let the weights have more experts than the gate, as many as the axes "
            "divide: `padded_to=...` says how many, and nobody chooses those at the end."
        ) from error
    axes = tuple(axis for axis in as_tuple(spec[0]) if mesh.shape[axis] > 1)
    manual = axes_within(axes, mesh.manual_axes)
    if manual and not mixed:
        _check_one_kind(axes, manual)
    automatic = axes_without(axes, manual)
    return ExpertAxes(manual, automatic, parts_over(mesh.shape, manual))


class TokenExchange(NamedTuple):
    """How tokens go between the devices of their groups and those of their experts.

    Over manual axes by an all-to-all of the layer's own, and over automatic axes by constraints
    that the partitioner turns into one.
    """

    experts: ExpertAxes
    batch: tuple[str, ...]  # the axes of the batch that are automatic
    width: Any  # the entry of a spec for the tokens' width
    rows: int  # parts of the batch, over its automatic axes
    sharded: bool  # whether there are rules to lay anything out by

    def lay_out(self, x: jax.Array, *entries: Any) -> jax.Array:
        """Constrain an array over the automatic axes: an entry for each dim, empty for none."""
        if not self.sharded:
            return x
        return constrain(x, PartitionSpec(*(entry or None for entry in entries)))

    def to_experts(self, x_GECM: jax.Array) -> jax.Array:
        """Send tokens from the devices of their groups to those of their experts."""
        x_GECM = self.lay_out(x_GECM, *self._by_group)
        sent = self._all_to_all(x_GECM, self._by_group, split=1, joined=0)
        return self.lay_out(sent, *self._by_expert)

    def to_tokens(self, y_GECM: jax.Array) -> jax.Array:
        """Send outputs from the devices of the experts back to those of the groups."""
        y_GECM = self.lay_out(y_GECM, *self._by_expert)
        sent = self._all_to_all(y_GECM, self._by_expert, split=0, joined=1)
        return self.lay_out(sent, *self._by_group)

    @property
    def _by_group(self) -> tuple[Any, ...]:
        """The entries of (G, E, C, M) where groups are on the devices of their tokens.

        Axes of the experts that are none of the batch split the experts already.
        """
        other = axes_without(self.experts.automatic, self.batch)
        return self.batch, other, None, self.width

    @property
    def _by_expert(self) -> tuple[Any, ...]:
        """The entries of (G, E, C, M) where places are on the devices of their experts.

        Axes of the batch that are none of the experts still split the groups.
        """
        other = axes_without(self.batch, self.experts.automatic)
        return other, self.experts.automatic, None, self.width

    def _all_to_all(
        self, x: jax.Array, entries: tuple[Any, ...], split: int, joined: int
    ) -> jax.Array:
        """Exchange over the manual axes, from `entries`: one dim is split, another one joined.

        Without manual axes it is left to the partitioner, and nothing is done here.
        """
        manual = self.experts.manual
        if not manual:
            return x
        spec = PartitionSpec(*(entry or None for entry in entries))

        def send(part: jax.Array) -> jax.Array:
            return lax.all_to_all(part, manual, split, joined, tiled=True)

        return manual_over_all(send, spec)(x)


_ON_ONE_DEVICE = TokenExchange(ExpertAxes((), (), 1), (), None, 1, False)
"""Without rules or a mesh: all experts are on the device at hand, and nothing is exchanged."""


def _check_one_kind(axes: tuple[str, ...], manual: tuple[str, ...]) -> None:
    """Refuse experts over axes of which only some are manual: tokens go by one kind of exchange."""
    if manual != axes:
        raise ValueError(
            f"The rule `{EXPERTS}` splits over {axes}, of which the step is manual over {manual} "
            "alone: tokens are sent over axes of one kind. Have the batch split over all of them, "
            "leave all to the partitioner, `Strategy(manual=())`, or split the experts over fewer."
        )


def exchange_of(count: int, names: tuple[str | None, ...], x: jax.Array) -> TokenExchange:
    """The exchange of tokens `x` with `count` experts, by the rules in scope.

    Without rules nothing is laid out, and all experts are here.
    """
    scope, mesh = current_scope(), current_mesh()
    if scope is None or scope.rules is None or mesh.empty:
        # Where that is a mistake, `shard` says what is wrong.
        return _ON_ONE_DEVICE
    rules: AxisRules = scope.rules
    scope.record((EXPERTS,))
    # The width may be split too, and stays so during the exchange.
    width = resolve(
        rules,
        mesh.shape,
        names[-1:],
        x.shape[-1:],
        what="the width",
        manual=frozenset(mesh.manual_axes),
    )
    experts = expert_axes(count)
    batch = axes_without(rules.batch_axes, mesh.manual_axes)
    rows = parts_over(mesh.shape, batch)
    return TokenExchange(experts, batch, width.spec[0], rows, True)
