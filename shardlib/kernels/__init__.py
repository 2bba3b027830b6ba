"""Fused ops for training: attention, softmax, norms, a head with its cross-entropy, GLU, RoPE and
grouped products.

Most have a reference in plain JAX and kernels for TPUs and GPUs; `explain` says which runs.

Each op is one public function, one readable reference and a kernel for each kind of machine, and
runs on each device's own shard from the names of its arrays' dims.
"""

from shardlib.kernels._activations import activate as activate
from shardlib.kernels._activations import glu as glu
from shardlib.kernels._attention import attention as attention
from shardlib.kernels._attention._mask import BlockMask as BlockMask
from shardlib.kernels._attention._options import AttentionOptions as AttentionOptions
from shardlib.kernels._attention._patterns import bigbird_blocks as bigbird_blocks
from shardlib.kernels._attention._patterns import fixed_blocks as fixed_blocks
from shardlib.kernels._attention._patterns import longformer_blocks as longformer_blocks
from shardlib.kernels._choice import Explained as Explained
from shardlib.kernels._choice import Explanation as Explanation
from shardlib.kernels._choice import explain as explain
from shardlib.kernels._grouped_matmul import Groups as Groups
from shardlib.kernels._grouped_matmul import grouped_matmul as grouped_matmul
from shardlib.kernels._linear_cross_entropy import LossOptions as LossOptions
from shardlib.kernels._linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from shardlib.kernels._norm import layer_norm as layer_norm
from shardlib.kernels._norm import rms_norm as rms_norm
from shardlib.kernels._on_shards import on_shards as on_shards
from shardlib.kernels._projections import projections as projections
from shardlib.kernels._rotary import rotate as rotate
from shardlib.kernels._softmax import softmax as softmax
from shardlib.kernels._tiles import in_tiles as in_tiles
