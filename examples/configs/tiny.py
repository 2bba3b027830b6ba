"""A small GPT that learns Python on a laptop: no download, no accelerator, something to read after
two minutes.
"""

import shardlib as sl
from examples.run import Muon, Run
from models import gpt
from shardlib.data import Corpus


def run() -> Run:
    """The standard library, in tokens learned from it, on whatever devices there are; nine minutes
    on two cores.
    """
    return Run(
        name="tiny",
        model=gpt.GPTConfig(
            layers=4, width=128, heads=4, context=256, vocab=2048, vocab_multiple=128, norm="rms",
            positions="rotary",
            mlp="swiglu", hidden=352, bias=False,
        ),
        data=Corpus("python", tokenizer="bpe:2048", held_out=0.05),
        batch=8,
        optimizer=Muon(learning_rate=5e-3, warmup=50, final=0.0, reach=0.4),
        strategy=sl.Strategy(mesh="data=-1", rules=sl.rules.data, clip=1.0, nonfinite="skip"),
        loop=sl.Loop(steps=2000, evaluate_every=500, save_every=500),
        evaluation_batches=100,
        across_documents=True,
        prompt="def",
    )  # fmt: skip
