"""shardlib: name the dimensions of a model once, and run it on any mesh."""

from shardlib import rules as rules
from shardlib._annotate import replicate as replicate
from shardlib._annotate import shard as shard
from shardlib._annotate import split as split
from shardlib._annotate import unsharded as unsharded
from shardlib._annotate import use as use
from shardlib._batch import Mean as Mean
from shardlib._batch import batch_mean as batch_mean
from shardlib._batch import gather_batch as gather_batch
from shardlib._batch import mean as mean
from shardlib._flax import annotate as annotate
from shardlib._flax import logical as logical
from shardlib._mesh import describe_mesh as describe_mesh
from shardlib._mesh import make_mesh as make_mesh
from shardlib._remat import remat as remat
from shardlib._rules import AxisRules as AxisRules
from shardlib._rules import ShardingWarning as ShardingWarning
from shardlib.train._exchange import AllReduce as AllReduce
from shardlib.train._exchange import Exchange as Exchange
from shardlib.train._state import State as State
from shardlib.train._state import init as init
from shardlib.train._state import specs as specs
from shardlib.train._step import Step as Step
from shardlib.train._step import train_step as train_step
from shardlib.train._strategy import Strategy as Strategy
