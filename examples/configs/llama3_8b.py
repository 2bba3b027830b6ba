"""Llama 3 of 8 billion parameters: ZeRO's stage 3 over all devices, products in bfloat16, four
million tokens a step.
"""

import shardlib as sl
from examples.run import AdamW, Run
from models import gpt
from shardlib.data import Corpus


def run() -> Run:
    """Expects `data/`, text in Parquet files, and Llama 3's `tokenizer.json` beside it."""
    return Run(
        name="llama3_8b",
        model=gpt.llama3_8b(fused_loss=True),
        data=Corpus(
            "data/**/*.parquet",
            tokenizer="data/tokenizer.json",
            end="<|end_of_text|>",
            held_out=0.001,
        ),
        batch=512,
        optimizer=AdamW(learning_rate=3e-4, warmup=2000),
        strategy=sl.Strategy(
            mesh="data=-1",
            rules=sl.rules.data,
            zero=3,
            precision="bf16",
            remat="full",
            clip=1.0,
            nonfinite="skip",
        ),
        loop=sl.Loop(steps=100_000, evaluate_every=1000, save_every=500, keep_every=10_000),
        tensorboard=True,
        prompt="The capital of France is",
    )
