"""Sequences that are split over devices, context parallelism: their order, and what forms cost."""

from shardlib.layouts._sequence_order import arrange as arrange
from shardlib.layouts._sequence_order import is_arranged as is_arranged
from shardlib.layouts._sequence_order import restore as restore
from shardlib.planning._context_costs import Costs as Costs
from shardlib.planning._context_costs import FormCosts as FormCosts
from shardlib.planning._context_costs import costs as costs
