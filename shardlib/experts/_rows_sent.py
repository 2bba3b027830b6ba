"""How many rows leave their device for experts elsewhere, by the level of the network they take.

Rows are counted on the devices of the tokens, from the experts that these choose. So the counts are
the same for each form of the collective, and leave out rows that are sent only to fill buffers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.experts._routing import Choices
from shardlib.layouts._annotate import current_mesh
from shardlib.layouts._specs import axes_without, parts_over


class RowsSent(NamedTuple):
    """How many rows are sent for the tokens of a device.

    - `within`: to another device of the same node.
    - `across`: to another node; None where there is one node.
    """

    within: jax.Array
    across: jax.Array | None


@dataclass(frozen=True)
class ExpertPlaces:
    """Which devices of the manual axes have which experts.

    - `axes`: the axes that the experts are split over, all of them manual.
    - `slow`: those of these axes that lead to another node.
    - `experts`: how many experts there are on all devices.
    - `once`: whether a token is sent once to all its experts of a node, and from there to these.
    """

    axes: tuple[str, ...]
    slow: tuple[str, ...]
    experts: int
    once: bool

    def rows_sent(self, choices: Choices) -> RowsSent:
        """How many rows are sent for the tokens of this device."""
        if not self.axes:
            return RowsSent(jnp.float32(0), None)
        sizes = current_mesh().shape
        devices = parts_over(sizes, self.axes)
        device = choices.expert // (self.experts // devices)
        places = jnp.unravel_index(device, [sizes[axis] for axis in self.axes])
        place_of = dict(zip(self.axes, places, strict=True))
        fast = axes_without(self.axes, self.slow)
        is_elsewhere = _differs(place_of, fast) & choices.wanted
        if not self.slow:
            return RowsSent(_count(is_elsewhere), None)
        is_across = _differs(place_of, self.slow)
        if not self.once:
            return RowsSent(_count(is_elsewhere & ~is_across), _count(is_across & choices.wanted))
        # On the other node a token arrives at the device with the same place within it.
        node = device // parts_over(sizes, fast)
        nodes = jnp.arange(parts_over(sizes, self.slow))
        is_sent = is_across & choices.wanted
        to_node = ((node[..., None] == nodes) & is_sent[..., None]).any(-2)
        return RowsSent(_count(is_elsewhere), _count(to_node))


def _differs(place_of: dict[str, jax.Array], axes: Iterable[str]) -> jax.Array:
    """Whether devices are at another place than this one along any of the axes."""
    differs = jnp.array(False)
    for axis in axes:
        differs = differs | (place_of[axis] != lax.axis_index(axis))
    return differs


def _count(is_one: jax.Array) -> jax.Array:
    """How many are true, in float32 like all sums of the statistics."""
    return (is_one * 1.0).sum()
