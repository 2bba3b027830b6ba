"""A small GShard learns to translate: every word backwards and in capitals. Eight experts, eight
simulated devices.

python examples/translate.py                    # some two minutes on two cores

no time like now   ->   ON EMIT EKIL WON
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The models live beside the examples, in a clone.
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import numpy as np
import optax
from flax import nnx

import shardlib as sl
from models import translation

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["<pad>", "<first>", "<end>", " ", *LETTERS, *LETTERS.upper()]
PAD, FIRST, END = 0, 1, 2
LENGTH, BATCH, STEPS, EXPERTS = 16, 128, 600, 8
CONFIG = translation.tiny(
    width=64,
    hidden=64,
    context=LENGTH,
    vocab=len(TOKENS),
    experts=EXPERTS,
    router=sl.experts.Top2(capacity=1.25),
    balance=0.5,
    group=BATCH // EXPERTS * LENGTH,
)


def translated(text: str) -> str:
    """Every word backwards and in capitals.

    >>> translated("no time like now")
    'ON EMIT EKIL WON'
    """
    return " ".join(word[::-1].upper() for word in text.split())


def sentences(seed: int) -> Iterator[str]:
    """Words of one to five random letters."""
    random = np.random.default_rng(seed)
    while True:
        words, size = [], 0
        while size < LENGTH - 6:
            words.append("".join(random.choice(list(LETTERS), random.integers(1, 6))))
            size += len(words[-1]) + 1
        yield " ".join(words[: random.integers(1, len(words) + 1)])


def encoded(texts: list[str], *, target: bool) -> np.ndarray:
    """Tokens of texts, padded: of targets with a first token, which the model is given, and a last
    one.
    """
    rows = [[*[FIRST] * target, *map(TOKENS.index, text), END] for text in texts]
    return np.array([row + [PAD] * (LENGTH + target - len(row)) for row in rows], np.int32)


def decoded(row: np.ndarray) -> str:
    """The text of tokens, up to the last."""
    tokens = row.tolist()
    return "".join(
        TOKENS[token] for token in tokens[: tokens.index(END) if END in tokens else None]
    )


def batches(seed: int) -> Iterator[dict[str, np.ndarray]]:
    """Sentences and their translations."""
    source = sentences(seed)
    while True:
        texts = [next(source) for _ in range(BATCH)]
        target = encoded([translated(text) for text in texts], target=True)
        yield {
            "source": encoded(texts, target=False),
            "target": target,
            "pad": np.full(BATCH, PAD, np.int32),
        }


def main(arguments: list[str]) -> float:
    """Train, translate sentences that were not seen, and say how many are right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args(arguments)
    sl.simulate_devices(EXPERTS)
    strategy = sl.Strategy(mesh=f"data={EXPERTS}", rules=sl.rules.experts, clip=1.0)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, max(asked.steps, 51))
    make = lambda: translation.Translation(CONFIG, rngs=nnx.Rngs(0))  # noqa: E731
    state = sl.init(make, optax.adamw(schedule), strategy)
    loop = sl.Loop(steps=asked.steps, log_every=50)
    state = sl.fit(sl.train_step(translation.loss, strategy), state, batches(0), loop)

    unseen = sentences(1)
    texts = [next(unseen) for _ in range(BATCH)]
    with strategy.scope():
        found: Any = jax.jit(
            lambda model, source: translation.translate(model, source, FIRST, LENGTH, PAD)
        )(state.model, encoded(texts, target=False))
    right = 0
    for number, (text, row) in enumerate(zip(texts, np.asarray(found), strict=True)):
        right += decoded(row) == translated(text)
        if number < 5:
            print(f"{text:16} -> {decoded(row)}")
    print(f"\n{right} of {len(texts)} sentences it has never seen are right.")
    return right / len(texts)


if __name__ == "__main__":
    main(sys.argv[1:])
