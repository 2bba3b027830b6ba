"""A small GPT that learns Python on a laptop: no download, no accelerator, something to read after two minutes."""

import shardlib as sl
from examples.run import AdamW, Run
from models import gpt
from shardlib.data import Corpus


def run() -> Run:
    """Bytes of the standard library, on whatever devices there are."""
    return Run(
        name="tiny",
        model=gpt.GPTConfig(
            layers=4, width=128, heads=4, context=256, vocab=257, vocab_multiple=128, norm="rms", positions="rotary",
            mlp="swiglu", hidden=352, bias=False,
        ),
        data=Corpus("python", held_out=0.05),
        batch=16,
        optimizer=AdamW(learning_rate=3e-3, warmup=50),
        strategy=sl.Strategy(mesh="data=-1", rules=sl.rules.data, clip=1.0, nonfinite="skip"),
        loop=sl.Loop(steps=1000, evaluate_every=200, save_every=200),
        prompt="def ",
    )  # fmt: skip
