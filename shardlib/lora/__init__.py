"""LoRA: a model is fine-tuned by thin factors beside its kernels, which stay as they are.

    make = lambda: lora.add(hub.model(config, nnx.Rngs(0)), rank=8, rngs=nnx.Rngs(1))
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, zero=3, frozen=lora.FROZEN)
    state = sl.init(make, optax.adamw(1e-4), strategy)

A kernel `W` of a layer has two factors of a small rank, and the layer computes

    y  =  x W  +  alpha / rank * (x down) up

Only the factors learn: they alone have gradients, states of the optimizer, and an exchange.
"""

from shardlib.lora._adapter import FROZEN as FROZEN
from shardlib.lora._adapter import PARAMETERS as PARAMETERS
from shardlib.lora._adapter import Adapter as Adapter
from shardlib.lora._add import add as add
from shardlib.lora._add import merged as merged
