"""GPT-2 of 124 million parameters, the run that everybody compares: half a million tokens a step,
for ten billion.
"""

import shardlib as sl
from examples.run import AdamW, Run
from models import gpt
from shardlib.data import Corpus


def run() -> Run:
    """Expects `data/`, text in Parquet files, and GPT-2's `tokenizer.json` beside it."""
    return Run(
        name="gpt2_124m",
        model=gpt.gpt2(vocab_multiple=128),
        data=Corpus(
            "data/**/*.parquet",
            tokenizer="data/tokenizer.json",
            end="<|endoftext|>",
            held_out=0.001,
        ),
        batch=512,
        optimizer=AdamW(learning_rate=6e-4, warmup=700, final=0.1),
        strategy=sl.Strategy(
            mesh="data=-1",
            rules=sl.rules.data,
            zero=1,
            precision="bf16",
            clip=1.0,
            nonfinite="skip",
        ),
        loop=sl.Loop(steps=19_073, evaluate_every=250, save_every=1000, keep_every=5000),
        across_documents=True,
        tensorboard=True,
        prompt="Hello, I'm a language model,",
    )
