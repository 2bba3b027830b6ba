"""Layers of experts: tokens are routed to a few of many, which are on different devices."""

from shardlib.experts._dispatch import Form as Form
from shardlib.experts._moe import DispatchOptions as DispatchOptions
from shardlib.experts._moe import MoEStats as MoEStats
from shardlib.experts._moe import moe as moe
from shardlib.experts._routing import Choices as Choices
from shardlib.experts._routing import Router as Router
from shardlib.experts._routing import Switch as Switch
from shardlib.experts._routing import Top2 as Top2
from shardlib.experts._routing import TopK as TopK
from shardlib.experts._token_exchange import local_experts as local_experts
