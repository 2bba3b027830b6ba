"""Mixture-of-experts layers with expert parallelism: `moe` with a fixed capacity, `dropless`, which
drops no token, and routers.
"""

from shardlib.experts._bias import balanced as balanced
from shardlib.experts._dispatch import Form as Form
from shardlib.experts._dropless import DroplessOptions as DroplessOptions
from shardlib.experts._dropless import dropless as dropless
from shardlib.experts._expert_choice import ExpertChoice as ExpertChoice
from shardlib.experts._hash_router import Hash as Hash
from shardlib.experts._load_picture import load_picture as load_picture
from shardlib.experts._moe import DispatchOptions as DispatchOptions
from shardlib.experts._moe import moe as moe
from shardlib.experts._moe_stats import MoEStats as MoEStats
from shardlib.experts._noisy_router import NoisyTopK as NoisyTopK
from shardlib.experts._routing import Choices as Choices
from shardlib.experts._routing import Router as Router
from shardlib.experts._routing import Seen as Seen
from shardlib.experts._routing import Shares as Shares
from shardlib.experts._routing import Switch as Switch
from shardlib.experts._routing import Taken as Taken
from shardlib.experts._routing import Top2 as Top2
from shardlib.experts._routing import TopK as TopK
from shardlib.experts._routing import shares as shares
from shardlib.experts._sigmoid_router import SigmoidTopK as SigmoidTopK
from shardlib.experts._token_exchange import local_experts as local_experts
