"""Send a token across a slow network once for each node of its experts, and there to these.

    tokens                          on their devices
      | across: once to each node that has experts of the token
    tokens of the node's experts    on the device of the node with the same place within it
      | within: to the devices of the experts, and back
    sums over the node's experts    on the same devices
      | across: back
    sums over nodes                 on the devices of the tokens

A node is all devices with the same place along the axes across. A token that chooses several
experts of one node is sent to it once, and one row comes back: the weighted sum of their outputs.
The experts and weights of each token's choices are not sent with its row, but gathered from all
nodes: they are small beside the rows, and a TPU pads short rows that it sends to 1,024 numbers.

Each level has rounds of its own: rows that do not fit across are sent in a further round, and so
are rows that do not fit within.

Shape suffixes: T tokens of a device, K choices of a token, N nodes, C nodes that a token is sent
to at most, R rows that a device gets from other nodes.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardlib.experts._further_rounds import Made, Operands
from shardlib.experts._routing import Choices
from shardlib.experts._row_rounds import (
    GroupedExperts,
    RowRounds,
    RowSender,
    TokenLayout,
    flat_tokens,
    in_rounds,
    own_plan,
)
from shardlib.experts._rows import FURTHER_ROUNDS, Plan, RowExchange, Sending
from shardlib.kernels._grouped_matmul import Groups
from shardlib.kernels._shards import per_shard


@dataclass(frozen=True)
class Levels:
    """A layer whose experts are split over axes across nodes and axes within them.

    - `across`, `within`: the axes, all of them manual; in the rule for experts, those across come
      first.
    - `nodes`, `devices`: how many nodes there are, and devices of each.
    - `experts`, `choices`: how many experts there are, and how many a token goes to.
    - `most_nodes`: how many nodes the experts of a token are on at most.
    - `form`, `buffer`: as of `RowExchange`.
    """

    across: tuple[str, ...]
    within: tuple[str, ...]
    nodes: int
    devices: int
    experts: int
    choices: int
    most_nodes: int
    form: Sending
    buffer: float

    @property
    def node_experts(self) -> int:
        """How many experts a node has."""
        return self.experts // self.nodes

    def expected_nodes(self) -> float:
        """On how many nodes the experts of a token are, if all are chosen equally often."""
        elsewhere = math.comb(self.experts - self.node_experts, self.choices)
        share = 1 - elsewhere / math.comb(self.experts, self.choices)
        return min(self.nodes * share, self.most_nodes)

    def rounds(self, layout: TokenLayout, tokens: int) -> "NodeRounds":
        """The rounds across, for so many tokens on each device."""
        exchange = RowExchange(
            self.across,
            self.nodes,
            self.nodes,
            tokens,
            self.most_nodes,
            self.form,
            self.buffer,
            even=math.ceil(tokens * self.expected_nodes()),
        )
        sender = RowSender(exchange, layout, (*self.across, *self.within))
        return NodeRounds(self, sender)


class NodePlan(NamedTuple):
    """Where tokens go across, and what the tokens of other nodes choose.

    - `across`: where this device's tokens go.
    - `order_NP`: for the device of each node with this one's place, its tokens' choices of nodes in
      the order of these nodes.
    - `expert_NTK`: the experts that the tokens of these devices choose; -1 where a choice is none.
    """

    across: Plan
    order_NP: jax.Array
    expert_NTK: jax.Array


@dataclass(frozen=True)
class NodeRounds:
    """Rounds in which tokens are sent across, and within each of them to the experts."""

    levels: Levels
    sender: RowSender

    @property
    def is_one(self) -> bool:
        """Whether there is never more than one round."""
        return False

    @property
    def further(self) -> "NodeRounds":
        """The rounds after the first one."""
        return replace(self, sender=self.sender.further)

    @property
    def _within(self) -> RowRounds:
        """The rounds within a node of the rows that one round across has brought."""
        levels, across = self.levels, self.sender.exchange
        even = across.tokens * levels.choices
        if across.is_further:
            even = -(-even // FURTHER_ROUNDS)
        exchange = RowExchange(
            levels.within,
            levels.devices,
            levels.node_experts,
            across.rows,
            levels.choices,
            levels.form,
            levels.buffer,
            even=even,
        )
        return RowRounds(replace(self.sender, exchange=exchange, layout=self.sender.layout.of_rows))

    def shapes(self, x: jax.Array) -> list[tuple[Any, Groups]]:
        """The rows and groups that experts are called with, in the first round within and later."""
        within = self._within
        return within.shapes(x) + within.further.shapes(x)

    def plan(self, choices: Choices) -> tuple[NodePlan, jax.Array]:
        """Where tokens go across, and how many rounds that takes."""
        node = choices.expert // self.levels.node_experts
        node = jnp.where(choices.wanted, node, self.levels.nodes)
        distinct, is_wanted = nodes_of(node, self.levels.nodes, self.levels.most_nodes)
        plan, rounds = self.sender.plan(distinct, is_wanted)

        def run(order_P: jax.Array, expert: jax.Array) -> tuple[jax.Array, jax.Array]:
            gathered = self._gathered(order_P[0]), self._gathered(flat_tokens(expert))
            return gathered[0][None], gathered[1][None]

        layout = self.sender.layout
        expert = jnp.where(choices.wanted, choices.expert, -1)
        given, made = [layout.by_device(), layout.by_token()], (layout.by_device(),) * 2
        order_NP, expert_NTK = per_shard(run, (plan.order_P, expert), given, made)
        return NodePlan(plan, order_NP, expert_NTK), rounds

    def output(
        self, experts: GroupedExperts, number: jax.Array, plan: NodePlan, operands: Operands
    ) -> Made:
        """The experts' outputs for the tokens that are sent across in one round."""
        weight = operands.choice_weight
        rows, _ = self.sender.send(number, plan.across, operands.x)
        choices = self._choices_of_rows(number, plan, weight)
        y, rounds = in_rounds(self._within, experts, rows, choices, operands.weights)
        once = jnp.ones((*operands.x.shape[:-1], self.levels.most_nodes), weight.dtype)
        made = self.sender.receive(number, plan.across, y, once)
        return Made(made.astype(operands.x.dtype), rounds - 1)

    def _choices_of_rows(self, number: jax.Array, plan: NodePlan, weight: jax.Array) -> Choices:
        """The choices of arrived rows, of this node's experts, by their index within the node."""
        exchange, layout = self.sender.exchange, self.sender.layout

        def run(number: Any, plan: Plan, *told: jax.Array) -> tuple[jax.Array, ...]:
            # The first two have a dim of one for the device.
            (order_NP,), (expert_NTK,), weight = told
            from_R, place_R, is_row_R = exchange.arrived(own_plan(plan), number)
            token_R = order_NP.at[from_R, place_R].get(mode="clip") % exchange.tokens
            weight_NTK = self._gathered(flat_tokens(weight))
            expert_RK = expert_NTK[from_R, token_R]
            first = lax.axis_index(self.levels.across) * self.levels.node_experts
            local_RK = expert_RK - first
            is_local_RK = (local_RK >= 0) & (local_RK < self.levels.node_experts)
            is_local_RK = is_local_RK & is_row_R[:, None]
            return jnp.where(is_local_RK, local_RK, 0), weight_NTK[from_R, token_R], is_local_RK

        arrays = [plan.order_NP, plan.expert_NTK, weight]
        given = [layout.by_device(), layout.by_device(), layout.by_token()]
        made = (layout.by_device(),) * 3
        return Choices(*self.sender.with_plan(run, number, plan.across, arrays, given, made))

    def _gathered(self, x: jax.Array) -> jax.Array:
        """An array of each node, from the device with this one's place in its node."""
        return lax.all_gather(x, self.levels.across)


def nodes_of(node: jax.Array, nodes: int, most: int) -> tuple[jax.Array, jax.Array]:
    """The distinct nodes of each token, (..., most), and which of these there are.

    >>> nodes_of(jnp.array([[3, 1, 3], [0, 0, 0]]), 4, 2)[0].tolist()
    [[1, 3], [0, 1]]

    Args:
        node: the node of each choice, (..., choices); the count of nodes stands for none.
        nodes: how many nodes there are.
        most: on how many nodes the experts of a token are at most.
    """
    is_wanted = (node[..., None] == jnp.arange(nodes)).any(-2)
    # `top_k` is stable: nodes that are wanted come first, in their order.
    first, order = lax.top_k(is_wanted.astype(jnp.int32), most)
    return order, first > 0
