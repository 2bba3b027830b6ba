"""Test the sharding of your own code on a laptop: one call compares a step on many meshes with one
device.
"""

from shardlib.compiled._collectives import Collective as Collective
from shardlib.compiled._collectives import collectives as collectives
from shardlib.compiled._collectives import summary as summary
from shardlib.compiled._memory_traffic import Moved as Moved
from shardlib.compiled._memory_traffic import memory_traffic as memory_traffic
from shardlib.testing._assert import assert_collectives as assert_collectives
from shardlib.testing._assert import assert_memory as assert_memory
from shardlib.testing._compare import Comparison as Comparison
from shardlib.testing._compare import check_step as check_step
from shardlib.testing._compare import mesh_shapes as mesh_shapes
from shardlib.testing._traces import CountedTraces as CountedTraces
from shardlib.testing._traces import count_traces as count_traces
