"""Llama 3 of 8 billion parameters, the classic 3D way: stages between slices, data among them,
tensors on the fastest links.
"""

from dataclasses import replace

import shardlib as sl
from examples.configs import llama3_8b
from examples.run import Run


def run() -> Run:
    """For four slices of 64 TPU v5p chips, or as many GPUs; reads what `llama3_8b` reads."""
    return replace(
        llama3_8b.run(),
        name="llama3_8b_3d",
        strategy=sl.Strategy(
            mesh="stage=4,data=8,model=8",
            dcn="stage",
            rules=sl.rules.data | sl.rules.tensor | sl.rules.pipeline,
            pipeline=sl.pipeline.Eager1F1B(stages=4, microbatches=32),
            zero=1,
            precision="bf16",
            remat="full",
            clip=1.0,
            nonfinite="skip",
        ),
    )
