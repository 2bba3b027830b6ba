"""Rows across a slow network once for each node that has experts of a token, and there to these.

    tokens                          on their devices
      | across: once to each node that has experts of the token
    tokens of the node's experts    on the device of the node with the same place within it
      | within: to the devices of the experts, and back
    sums over the node's experts    on the same devices
      | across: back
    sums over nodes                 on the devices of the tokens

A node is all devices with the same place along the axes across. A token that wants several experts
of one node is sent to it once, with the numbers and weights of these experts, and what comes back
is one row as well: the weighted sum of what they made of it.

Each level has rounds of its own: what does not fit across goes in a further round, and so does what
does not fit within.

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
    in_rounds,
)
from shardlib.experts._rows import FURTHER_ROUNDS, Plan, RowExchange, Sending
from shardlib.kernels._grouped_matmul import Groups


@dataclass(frozen=True)
class Levels:
    """A layer whose experts are split over axes across nodes and axes within them.

    - `across`, `within`: the axes, all of them manual; those across are the first of the experts'.
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
        """On how many nodes the experts of a token are, if all experts are wanted alike."""
        elsewhere = math.comb(self.experts - self.node_experts, self.choices)
        share = 1 - elsewhere / math.comb(self.experts, self.choices)
        return min(self.nodes * share, self.most_nodes)

    def rounds(self, layout: TokenLayout, tokens: int) -> "NodeRounds":
        """The rounds across, of so many tokens of a device."""
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
    """Where tokens go across, and what they tell there."""

    across: Plan
    expert: jax.Array  # of each choice, and
    wanted: jax.Array  # whether it is one


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
        number = jnp.arange(self.levels.nodes)
        is_of_node = (node[..., None] == number) & choices.wanted[..., None]
        is_wanted = is_of_node.any(-2)
        # The nodes of a token come first, in their order.
        first, order = lax.top_k(is_wanted.astype(jnp.int32), self.levels.most_nodes)
        plan, rounds = self.sender.plan(order, first > 0)
        return NodePlan(plan, choices.expert, choices.wanted), rounds

    def output(
        self, experts: GroupedExperts, number: jax.Array, plan: NodePlan, operands: Operands
    ) -> Made:
        """What the experts make of the tokens that are sent across in one round."""
        weight = operands.choice_weight
        # Numbers of experts are sent with their weights, as floats and from one on: zeros are what
        # an empty row has.
        told = jnp.where(plan.wanted, plan.expert + 1, 0).astype(weight.dtype)
        told = jnp.concatenate([lax.stop_gradient(told), weight], -1)
        rows, told_rows, _ = self.sender.send(number, plan.across, operands.x, told)
        within = self._within
        choices = self._choices_of_rows(told_rows)
        y, rounds = in_rounds(within, experts, rows, choices, operands.weights)
        once = jnp.ones((*operands.x.shape[:-1], self.levels.most_nodes), weight.dtype)
        made = self.sender.receive(number, plan.across, y, once)
        return Made(made.astype(operands.x.dtype), rounds - 1)

    def _choices_of_rows(self, told_RJ: jax.Array) -> Choices:
        """The choices of rows from other nodes, of experts of this node by their numbers in it."""
        expert_RK, weight_RK = jnp.split(told_RJ, 2, -1)
        first = lax.axis_index(self.levels.across) * self.levels.node_experts
        number_RK = expert_RK.astype(jnp.int32) - 1 - first
        is_here_RK = (number_RK >= 0) & (number_RK < self.levels.node_experts)
        return Choices(jnp.where(is_here_RK, number_RK, 0), weight_RK, is_here_RK)
