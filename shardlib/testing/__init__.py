"""Tools to test the sharding of your own code, on a laptop.

`check_step` compares a step on many simulated meshes with one device; `assert_collectives` and
`assert_memory` hold a step to the bytes that its compiled program sends and takes; `count_traces`
counts traces.
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
