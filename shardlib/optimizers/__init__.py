"""What optax lacks, as optax transformations."""

from shardlib.optimizers._local import Local as Local
from shardlib.optimizers._onebit_adam import OneBitAdamState as OneBitAdamState
from shardlib.optimizers._onebit_adam import onebit_adam as onebit_adam
from shardlib.optimizers._stacked import per_layer_and_expert as per_layer_and_expert
