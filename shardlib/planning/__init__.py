"""What a machine will do with a step, without the machine: targets, the compilers, and what their
programs say.
"""

from shardlib.compiled._memory import Memory as Memory
from shardlib.compiled._memory import Piece as Piece
from shardlib.planning._decoder import Decoder as Decoder
from shardlib.planning._decoder import Module as Module
from shardlib.planning._estimate import Estimate as Estimate
from shardlib.planning._estimate import ItemSizes as ItemSizes
from shardlib.planning._estimate import Parallelism as Parallelism
from shardlib.planning._flops import flops as flops
from shardlib.planning._prices import Price as Price
from shardlib.tracing._flops import Flops as Flops
