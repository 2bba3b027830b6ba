"""The programs of a set of steps as text, to show that a change of the code left them as they were.

Writes the StableHLO of each step, in which functions are numbered in order, so that only what is
computed is left:

    python -m benchmarks.programs --out before        # on the old code
    python -m benchmarks.programs --compare before    # on the new code

The second lists the programs that differ, and ends with 1 if any does.
"""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import shardlib as sl
from models import gpt, moe

BATCH = 16
DENSE = gpt.tiny(layers=4, width=32, heads=4, context=16, vocab=64)
EXPERTS = moe.tiny(layers=4, width=32, heads=4, context=16, vocab=64, every=2, experts=4)
PRESETS = sl.rules.data | sl.rules.tensor
PODS = sl.rules.data | sl.AxisRules(batch=("pod", "data"))


@dataclass(frozen=True)
class Case:
    """A step whose program is written."""

    name: str
    strategy: Callable[[], sl.Strategy]
    config: Any = DENSE
    optimizer: Callable[[], Any] = lambda: optax.adamw(1e-3)


def strategy(mesh: str, rules: sl.AxisRules = PRESETS, **options: Any) -> Callable[[], sl.Strategy]:
    """A strategy that is made once the devices are there."""
    return lambda: sl.Strategy(mesh=mesh, rules=rules, **options)


CASES = (
    Case("dense", strategy("data=2,model=4", clip=1.0)),
    Case("automatic", strategy("data=2,model=4", manual=())),
    Case("accumulation", strategy("data=4,model=2", accumulate=2, precision="bf16")),
    Case("recomputed", strategy("data=4,model=2", remat="full")),
    *(
        Case(
            f"zero_{stage}", strategy("data=4,model=2", zero=sl.Zero(stage, small=0), accumulate=2)
        )
        for stage in (1, 2, 3)
    ),
    Case(
        "presets",
        strategy(
            "data=2,fsdp=2,model=2",
            sl.rules.data | sl.rules.fsdp | sl.rules.tensor,
            zero=sl.Zero(3, small=0),
        ),
    ),
    Case("experts", strategy("data=4,model=2", sl.rules.experts | sl.rules.tensor), EXPERTS),
    Case(
        "experts_zero_3",
        strategy("data=4,model=2", sl.rules.experts | sl.rules.tensor, zero=sl.Zero(3, small=0)),
        EXPERTS,
    ),
    Case(
        "pipeline_1f1b",
        strategy(
            "stage=2,data=2,model=2",
            PRESETS | sl.rules.pipeline,
            pipeline=sl.pipeline.OneFOneB(2, 4),
        ),
    ),
    Case(
        "pipeline_zb_v",
        strategy(
            "stage=2,data=2,model=2", PRESETS | sl.rules.pipeline, pipeline=sl.pipeline.ZBV(2, 4)
        ),
        gpt.tiny(layers=4, width=32, heads=4, context=16, vocab=64, tied=False),
    ),
    Case("int8", strategy("pod=2,data=4", PODS, exchange=sl.collectives.Quantised("pod", bits=8))),
    Case(
        "one_bit",
        strategy("pod=2,data=4", PODS, exchange=sl.collectives.OneBit("pod"), zero=1),
        optimizer=lambda: sl.optimizers.onebit_adam(1e-3, freeze=4),
    ),
)


def program(case: Case) -> str:
    """The text of the program that a step lowers to."""
    model, loss = (
        (moe.MoE, moe.loss) if isinstance(case.config, moe.MoEConfig) else (gpt.GPT, gpt.loss)
    )
    used = case.strategy()
    state = sl.init(
        lambda: model(case.config, rngs=nnx.Rngs(0)), case.optimizer(), used, abstract=True
    )
    tokens = jax.ShapeDtypeStruct((BATCH, case.config.context + 1), jnp.int32)
    return numbered(sl.train_step(loss, used).lower(state, {"tokens": tokens}).as_text())


def numbered(text: str) -> str:
    """A program whose functions are called by their number, and not by what they are called in
    Python.
    """
    numbers: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], f"@function_{len(numbers)}")

    return re.sub(r"@[A-Za-z_][\w.]*", number, text)


def difference(before: str, after: str, lines: int = 12) -> Iterator[str]:
    """The first lines in which two programs differ."""
    found = difflib.unified_diff(
        before.splitlines(), after.splitlines(), "before", "after", n=0, lineterm=""
    )
    for line in islice(found, lines):
        yield line[:160]


def main() -> None:
    """Write the programs, or compare them with those that were written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="a folder that the programs are written to")
    what.add_argument("--compare", type=Path, help="a folder of programs to compare with")
    arguments = parser.parse_args()
    sl.simulate_devices(8)
    differing: list[str] = []
    for case in CASES:
        text = program(case)
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / f"{case.name}.mlir").write_text(text)
            print(f"{case.name:16} {len(text.splitlines()):6} lines", flush=True)
            continue
        before = (arguments.compare / f"{case.name}.mlir").read_text()
        print(f"{case.name:16} {'the same' if text == before else 'differs'}", flush=True)
        if text != before:
            differing.append(case.name)
            print("\n".join(difference(before, text)))
    if differing:
        sys.exit(f"{len(differing)} of {len(CASES)} programs differ: {', '.join(differing)}")


if __name__ == "__main__":
    main()
