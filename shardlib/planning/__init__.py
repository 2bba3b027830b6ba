"""Memory and communication of a step on a machine that is not there: by formula, `estimate`, and by
its compiler, `frontier` and `largest_microbatch` besides `sl.plan`.
"""

from shardlib.compiled._memory import Memory as Memory
from shardlib.compiled._memory import Piece as Piece
from shardlib.planning._activations import Activation as Activation
from shardlib.planning._decoder import Decoder as Decoder
from shardlib.planning._decoder import Module as Module
from shardlib.planning._estimate import Estimate as Estimate
from shardlib.planning._estimate import ItemSizes as ItemSizes
from shardlib.planning._estimate import Parallelism as Parallelism
from shardlib.planning._flops import flops as flops
from shardlib.planning._frontier import Frontier as Frontier
from shardlib.planning._frontier import FrontierPoint as FrontierPoint
from shardlib.planning._frontier import frontier as frontier
from shardlib.planning._microbatch import LargestMicrobatch as LargestMicrobatch
from shardlib.planning._microbatch import TriedMicrobatch as TriedMicrobatch
from shardlib.planning._microbatch import largest_microbatch as largest_microbatch
from shardlib.planning._prices import Price as Price
from shardlib.tracing._flops import Flops as Flops
