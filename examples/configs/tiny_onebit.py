"""The run `tiny` by 1-bit Adam: after a fifth of it, what devices send each other are bits."""

import dataclasses

import shardlib as sl
from examples.configs import tiny
from examples.run import AdamW, Run


def run() -> Run:
    """As two machines of four: `python -m shardlib.launch -n 2 --devices 4 -- python
    examples/train_lm.py tiny_onebit`.
    """
    other = tiny.run()
    return dataclasses.replace(
        other,
        name="tiny_onebit",
        optimizer=AdamW(learning_rate=3e-3, warmup=50, weight_decay=0.1, b2=0.99, freeze=0.2),
        strategy=dataclasses.replace(other.strategy, exchange=sl.collectives.OneBit("data")),
    )
