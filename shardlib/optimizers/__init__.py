"""What optax lacks, as optax transformations."""

from shardlib.optimizers._delayed import DelayedState as DelayedState
from shardlib.optimizers._delayed import delayed as delayed
from shardlib.optimizers._local import Apart as Apart
from shardlib.optimizers._local import Local as Local
from shardlib.optimizers._onebit_adam import OneBitAdamState as OneBitAdamState
from shardlib.optimizers._onebit_adam import onebit_adam as onebit_adam
from shardlib.optimizers._onebit_lamb import OneBitLambState as OneBitLambState
from shardlib.optimizers._onebit_lamb import onebit_lamb as onebit_lamb
from shardlib.optimizers._stacked import per_layer_and_expert as per_layer_and_expert
from shardlib.optimizers._zero_one_adam import ZeroOneAdamState as ZeroOneAdamState
from shardlib.optimizers._zero_one_adam import zero_one_adam as zero_one_adam
