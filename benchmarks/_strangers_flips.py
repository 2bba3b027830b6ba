"""One flipped bit in a file that a run reads when it is started again.

A tiny run is stopped half-way, with its tokens, its checkpoints and what else lies in its folder.
Each case copies all of that, flips one bit of one file and starts the run again. That is fine if
the flip is noticed (an exception, a warning, a line on the standard error), or if nothing is
different at the end: the parameters bit for bit, every record, what was measured on held-out texts,
`run.json`, and what the tokenizer makes of a text. What differs unnoticed is silent.

Sources that users write, such as JSON lines and Parquet, are not among the files: nothing says what
they should be.
"""

import contextlib
import functools
import io
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import shardlib as sl
import shardlib.data
from benchmarks._strangers import Outcome, Tally, fast_compiles, in_children, serve
from benchmarks._strangers_patience import shorten_patience

DEVICES = 2
IN_ONE_CHILD = 150
PATIENCE = 180.0
STEPS, STOPPED, SAVE_EVERY, LENGTH, BATCH, WIDTH = 9, 6, 2, 16, 8, 8
WORDS = (
    "the",
    "ship",
    "sails",
    "on",
    "a",
    "green",
    "sea",
    "and",
    "nobody",
    "knows",
    "where",
    "it",
    "lands",
    "naïve",
)
ABOUT = {"configuration": "tiny", "rate": 0.1}
OPTIMIZER = optax.adam(0.1)  # one value, for one compiled step
# What a run leaves that was killed on another machine: nobody renews it.
LEFT_BEHIND = {"host": "a-machine-that-is-gone", "process": 2**22 + 1, "nonce": "0123abcd"}

# The files of each kind, among those of a run and of its tokens; every kind is drawn as often as
# any other.
KINDS: dict[str, tuple[str, ...]] = {
    "token ids": ("tokens/*/*.ids",),
    "document ends": ("tokens/*/*.ends",),
    "meta.json": ("tokens/*/meta.json",),
    "tokenizer.json": ("tokens/*/tokenizer.json",),
    "arrays": ("run/checkpoints/[0-9]*/state/**/*",),
    "the newest checkpoint's arrays": (f"run/checkpoints/{STOPPED}/state/**/*",),
    "what a checkpoint says of itself": (
        "run/checkpoints/[0-9]*/about/**/*",
        "run/checkpoints/[0-9]*/_*",
    ),
    "run.json": ("run/run.json",),
    "metrics.jsonl": ("run/metrics.jsonl",),
    "occupied.json": ("run/occupied.json",),
}


@dataclass(frozen=True)
class Case:
    """Which bit is flipped: `place` is the share of the kind's bits that lie before it."""

    kind: str
    place: float

    def __str__(self) -> str:
        return f"{self.kind}, bit at {self.place:.9f}"


def draw(seed: int, number: int) -> Case:
    """A case, from the seed and its number alone."""
    choose = random.Random(f"{seed} {number}")
    return Case(choose.choice(tuple(KINDS)), choose.random())


@dataclass(frozen=True)
class Run:
    """What is made once in a process: the files of a run that was stopped, its compiled step, and
    what it ends as.
    """

    folder: Path
    corpus: shardlib.data.Corpus
    strategy: sl.Strategy
    step: sl.Step
    measure: Any
    reference: dict[str, Any]


def loss(model: Any, batch: Any, rng: Any) -> Any:
    """A language model of a table and a head, with the mask as its weight."""
    x = jnp.take(model["table"], batch["tokens"][:, :-1], axis=0)
    logs = jax.nn.log_softmax(x @ model["head"])
    picked = jnp.take_along_axis(logs, batch["tokens"][:, 1:, None], axis=-1)[..., 0]
    return sl.weighted_mean(-jnp.sum(picked * batch["mask"]), jnp.sum(batch["mask"]))


def write_texts(folder: Path) -> None:
    """Documents enough for some epochs of a tiny run, the same each time."""
    choose = random.Random(3)
    folder.mkdir(parents=True)
    documents = (" ".join(choose.choices(WORDS, k=choose.randrange(5, 40))) for _ in range(120))
    lines = (json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "texts.jsonl").write_text("".join(lines))


def train(folder: Path, steps: int, made: Any) -> dict[str, Any]:
    """Start the run that lies in a folder, or go on with it; everything that must be the same at
    the end.
    """
    corpus, strategy, step, measure = made
    prepared = shardlib.data.prepare(corpus, cache=folder / "tokens")
    vocab = prepared.train.vocab
    draws = np.random.default_rng(0)
    model = {
        "table": draws.normal(size=(vocab, WIDTH)).astype("f"),
        "head": draws.normal(size=(WIDTH, vocab)).astype("f"),
    }
    state = sl.init(lambda: model, OPTIMIZER, strategy)
    held_out = shardlib.data.Sequences(prepared.held_out, LENGTH, 2, seed=None)
    source: Any = shardlib.data.Sequences(prepared.train, LENGTH, BATCH)
    state = sl.fit(
        step,
        state,
        source,
        sl.Loop(steps=steps, log_every=1, save_every=SAVE_EVERY, evaluate_every=3, keep=2),
        folder=folder / "run",
        evaluate=lambda state: measure(state, held_out),
        records=sl.Records(sinks=[sl.JsonLines(folder / "run" / "metrics.jsonl")]),
        about=ABOUT,
    )
    text = "the naïve ship 12"
    tokenizer = prepared.tokenizer
    ids = tokenizer.encode_batch([text])[0].tolist()
    lines = (folder / "run" / "metrics.jsonl").read_text(errors="replace").splitlines()
    return {
        "parameters": {name: np.asarray(leaf).tobytes() for name, leaf in state.params.items()},
        "optimizer": [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state.opt_state)],
        "metrics.jsonl": records(lines),
        "run.json": json.loads((folder / "run" / "run.json").read_text()),
        "the tokenizer": (
            ids,
            tokenizer.vocab,
            tokenizer.end,
            [tokenizer.decode([id]) for id in range(vocab)],
        ),
        "the sizes": (
            len(prepared.train),
            prepared.train.bytes,
            len(prepared.held_out),
            prepared.held_out.bytes,
        ),
    }


def records(lines: list[str]) -> list[Any]:
    """Records as they were read, without notes, speeds and checksums, which are others each time;
    other lines as text.
    """
    found: list[Any] = []
    for line in lines:
        try:
            record = dict(json.loads(line))
        except (ValueError, TypeError):
            found.append(line)
            continue
        if "note" not in record:
            others = ("_per_second", "_left", "crc32")
            found.append(
                {name: value for name, value in record.items() if not name.endswith(others)}
            )
    return found


@functools.cache
def stopped_run() -> Run:
    """Make the run, stop it, keep its files, and go on with a copy of them to know how it ends
    undisturbed.
    """
    shorten_patience(beat_seconds=0.2, dead_seconds=0.8)
    folder = Path(tempfile.mkdtemp(prefix="strangers-flips-"))
    write_texts(folder / "texts")
    corpus = shardlib.data.Corpus(
        str(folder / "texts" / "texts.jsonl"), tokenizer="bpe:280", held_out=0.15
    )
    strategy = sl.Strategy(mesh=f"data={DEVICES}", rules=sl.rules.data, zero=sl.Zero(1, small=0))
    made = (corpus, strategy, sl.train_step(loss, strategy), sl.evaluation(loss, strategy))
    train(folder / "stopped", STOPPED, made)
    with copied(folder / "stopped") as copy:
        reference = train(copy, STEPS, made)
    with copied(folder / "stopped") as copy:
        if train(copy, STEPS, made) != reference:
            raise SystemExit(
                "Two undisturbed runs end differently: nothing can be said of flipped bits."
            )
    return Run(folder, corpus, strategy, made[2], made[3], reference)


@contextlib.contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy of all files of a run, gone afterwards.

    Where damage was found, threads that read ahead may still write their mark into it while it is
    removed.
    """
    with tempfile.TemporaryDirectory(
        prefix="strangers-flip-", ignore_cleanup_errors=True
    ) as beside:
        copy = Path(beside, "copy")
        shutil.copytree(folder, copy)
        yield copy


def flip(folder: Path, case: Case) -> str:
    """Flip the bit of a case; the file, from the folder on, and the place in it."""
    files = sorted(
        {path for pattern in KINDS[case.kind] for path in folder.glob(pattern) if path.is_file()}
    )
    sizes = [path.stat().st_size for path in files]
    if not sum(sizes):
        raise SystemExit(
            f"There is no file of the kind `{case.kind}` any more, as {KINDS[case.kind]}: say "
            "where they lie now."
        )
    at = int(case.place * sum(sizes) * 8)
    for path, size in zip(files, sizes, strict=True):
        if at < size * 8:
            content = bytearray(path.read_bytes())
            content[at // 8] ^= 1 << at % 8
            path.write_bytes(content)
            return f"bit {at % 8} of byte {at // 8} of {path.relative_to(folder)}"
        at -= size * 8
    raise AssertionError(case)


def attempt(case: Case) -> str:
    """Flip, start again, and say what is different at the end and was not noticed."""
    run = stopped_run()
    said = io.StringIO()
    with copied(run.folder / "stopped") as copy:
        if case.kind == "occupied.json":
            (copy / "run" / "occupied.json").write_text(json.dumps(LEFT_BEHIND))
        flipped = flip(copy, case)
        with contextlib.redirect_stderr(said):
            found = train(copy, STEPS, (run.corpus, run.strategy, run.step, run.measure))
    different = [name for name in run.reference if found[name] != run.reference[name]]
    if not different or "shardlib" in said.getvalue():
        return ""
    return f"{', '.join(different)} differ after {flipped}"


def run(count: int, seed: int) -> Outcome:
    """Flip `count` bits, each in a copy of its own."""
    tally = Tally("flips", count)
    for first in range(0, count, IN_ONE_CHILD):
        last = min(first + IN_ONE_CHILD, count)
        for outcome in in_children(
            "benchmarks._strangers_flips", seed, first, last, fast_compiles(DEVICES), PATIENCE
        ):
            tally.add(outcome)
    return tally.total


if __name__ == "__main__":
    try:
        serve(draw, attempt)
    finally:
        if stopped_run.cache_info().currsize:
            shutil.rmtree(stopped_run().folder)
    sys.exit(0)
