"""Train a language model: on a laptop, on one machine with accelerators, or on many, by the same
command.

    # A run of `configs/`; with changes, whose fields `tiny --help` lists; and again, from what it
    # wrote:
    python examples/train_lm.py tiny
    python examples/train_lm.py tiny --name short --loop.steps 300
    python examples/train_lm.py runs/tiny/run.json --name again
    python -m shardlib.launch -n 2 --devices 4 -- python examples/train_lm.py tiny --strategy.zero 3

The run lives in a folder. Called again it goes on where it was stopped, on another mesh, stage of
ZeRO or number of processes as well. `examples/launch/` holds the same for SLURM, Kubernetes and TPU
pods.
"""

import json
import math
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# The models live beside the examples, in a clone.
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

import shardlib as sl
import shardlib.data
from examples.find_run import OF_TEXTS, from_command_line, recorded
from examples.run import MAY_CHANGE, Run
from examples.start import started
from models import decoding, sampling


def main(arguments: list[str]) -> None:
    """One run of the command line."""
    train(from_command_line(arguments), arguments[0])


def train(run: Run, named: str = "") -> None:
    """One run, from its data to a sample of what was learned.

    Args:
        run: what is trained, on what.
        named: how the command line calls it.
    """
    sl.initialize_distributed()
    jax.config.update(
        "jax_compilation_cache_dir", str(shardlib.data.cache_folder(run.cache or None) / "programs")
    )
    say = print if jax.process_index() == 0 else lambda *_: None
    say("\n".join(f"  {name} = {text}" for name, text in run.lines().items()), "\n")
    check(run)

    prepared = shardlib.data.prepare(run.data, run.cache or None)
    say(prepared, "\n")
    check_tokens(run, prepared)
    about = {
        **run.lines(),
        "train": prepared.train.fingerprint,
        "held out": prepared.held_out.fingerprint,
    }
    check_folder(run, about)
    check_texts(named, run, about)
    sequences = partial(shardlib.data.Sequences, length=run.model.context, batch=run.batch)
    if run.data.chat:
        sequences.keywords["documents"] = "whole"
    read = sequences(prepared.train, seed=run.seed)
    held_out = partial(sequences, prepared.held_out, seed=0)

    strategy, steps = run.step_strategy, run.loop.steps
    say(sl.describe_mesh(strategy.device_mesh), "\n")
    state = sl.init(run.make_model, run.make_optimizer(), strategy, seed=run.seed)
    if run.start and not has_begun(run):
        state = started(run, state)
        say(f"The run begins with the weights of {run.start}.\n")
    step = sl.train_step(run.loss, strategy)
    measure = sl.evaluation(lambda model, batch, rng: run.entropy(model, batch), strategy)

    def evaluate(state: sl.State) -> dict[str, float]:
        nats = measure(state, held_out(), at_most=run.evaluation_batches)["loss"]
        if run.data.chat:
            return {"loss": nats}
        return {"loss": nats, "bits_per_byte": prepared.held_out.bits_per_byte(nats)}

    measured = len(prepared.held_out) > (0 if run.data.chat else run.model.context)
    if not measured and run.data.held_out:
        say(
            f"Nothing is measured: of {len(prepared.held_out)} held-out tokens no sequence of "
            f"{run.model.context} can be made.\n"
        )
    sinks: list[Any] = [sl.Progress(steps), sl.JsonLines(run.home / "metrics.jsonl")]
    if run.tensorboard and jax.process_index() == 0:
        sinks.append(sl.TensorBoard(run.home / "tensorboard"))
    records = sl.Records(
        sinks=sinks,
        watch={"learning_rate": run.optimizer.schedule(steps)},
        unit="tokens",
        flops_per_unit=run.model.training_flops_per_token,
    )
    state = sl.fit(
        step, state, sl.batches(read, strategy), run.loop,
        folder=run.home,
        evaluate=evaluate if measured else None,
        records=records,
        about=about,
    )  # fmt: skip
    if run.prompt and int(state.step) == steps:
        say(f"\nA sample, after {steps} steps:\n\n" + sample(state, run, prepared.tokenizer))


def check(run: Run) -> None:
    """What can be seen before the data is read."""
    check_folder(run, run.lines())
    try:
        _ = run.strategy.device_mesh  # made when it is first asked for
    except ValueError as error:
        raise SystemExit(f"`strategy.mesh={run.strategy.mesh}`: {error}") from None
    try:
        sl.local_rows(run.batch, run.strategy)
    except ValueError as error:
        raise SystemExit(f"`batch={run.batch}`: {error}") from None
    kind, _, size = run.data.tokenizer.partition(":")
    if kind == "bpe" and size.isdecimal() and int(size) > run.model.vocab:
        raise SystemExit(
            f"`data.tokenizer={run.data.tokenizer}` has more tokens than "
            f"`model.vocab={run.model.vocab}`."
        )
    if 1 < run.loop.steps <= run.optimizer.warmup:
        shorter = f"--optimizer.warmup {max(run.loop.steps // 10, 1)}"
        raise SystemExit(
            f"`optimizer.warmup={run.optimizer.warmup}` would take all "
            f"`loop.steps={run.loop.steps}`: `{shorter}`."
        )


def has_begun(run: Run) -> bool:
    """Whether the folder of a run has checkpoints to go on from."""
    checkpoints = (run.home / "checkpoints").glob("*")
    written = (run.home / "run.json").exists()
    return written and any(one.name.isdecimal() for one in checkpoints)


def _written(path: Path) -> dict[str, str]:
    """The fields that a run has written to its `run.json`."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise SystemExit(
            f"`{path}` cannot be read: {error}. Begin in another folder, `--name` or `--folder`; "
            "or remove the file, if you know that its checkpoints are of this run."
        ) from error


def check_folder(run: Run, now: dict[str, str]) -> None:
    """See that the folder holds no other run than this, and that its data has not changed."""
    path = run.home / "run.json"
    before = _written(path) if has_begun(run) else now
    unread = set(OF_TEXTS) - now.keys()
    other = [
        name
        for name in {**before, **now}
        if before.get(name) != now.get(name) and name not in unread
    ]
    if differing := [name for name in other if not name.startswith(MAY_CHANGE)]:
        listed = "\n".join(
            f"  {name}: {before.get(name)} there, {now.get(name)} now" for name in differing
        )
        files = (
            " Its files have other text than they had." if set(OF_TEXTS) & set(differing) else ""
        )
        raise SystemExit(
            f"The folder {run.home} holds another run:\n{listed}\nGive this one a name or a folder "
            f"of its own, `--name` or `--folder`, or its fields as they were.{files}"
        )


def check_texts(name: str, run: Run, now: dict[str, str]) -> None:
    """See that a run which begins from a `run.json` reads the texts that that one read, if they are
    called the same.
    """
    if not name.endswith(".json") or recorded(name).data != run.data:
        return
    before = json.loads(Path(name).read_text())
    if any(before.get(of, now[of]) != now[of] for of in OF_TEXTS):
        raise SystemExit(
            f"The texts of `{name}`, `data.files={run.data.files!r}`, have changed since it was "
            "written, so that this would be another run. Give `--data.files` where they are as "
            "they were; or begin anew from the function that gives the run."
        )


def check_tokens(run: Run, prepared: shardlib.data.Prepared) -> None:
    """A token that is no row of the table would make the loss nan, and a prompt that fills the
    context leaves no sample.
    """
    if prepared.train.vocab > run.model.vocab:
        raise SystemExit(
            f"The tokenizer `{run.data.tokenizer}` has {prepared.train.vocab} tokens, and "
            f"`model.vocab` is {run.model.vocab}: `--model.vocab {prepared.train.vocab}`."
        )
    if not run.prompt:
        return
    try:
        size = len(run.prompt_ids(prepared.tokenizer, run.prompt))
    except ValueError as error:
        raise SystemExit(f"`--prompt`: {error}") from None
    if size >= run.model.context:
        raise SystemExit(
            f"The prompt has {size} tokens, and the context is {run.model.context}: a "
            "shorter `--prompt`."
        )


def sample(state: sl.State, run: Run, tokenizer: shardlib.data.Tokenizer, length: int = 200) -> str:
    """What the model writes after the prompt, on the mesh that it was trained on."""
    strategy = run.step_strategy
    # Each draws its own.
    rows = math.prod(strategy.device_mesh.shape[axis] for axis in strategy.batch_axes)
    prompt = run.prompt_ids(tokenizer, run.prompt)
    length = min(length, run.model.context - len(prompt))
    end = run.end(tokenizer)
    known_end = end if end < run.model.vocab else None
    prompts, key = jnp.array([prompt] * rows), jax.random.key(run.seed)
    with sl.use(decoding.rules(strategy.rules), strategy.device_mesh):
        written = sampling.generate(
            state.model, prompts, length, key, sampling.Sampling(temperature=0.7), end=known_end
        )
    row = multihost_utils.process_allgather(written, tiled=True)[0].tolist()
    row = row[: row.index(end)] if end in row else row
    return tokenizer.decode([*prompt.tolist(), *row])


def interrupted(main: Callable[[list[str]], None]) -> None:
    """Run a program on the command line's arguments; where it is stopped, say how it goes on."""
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.stderr.write(
            "\nStopped. The same command goes on from the last checkpoint, or begins anew where "
            "there is none.\n"
        )
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    interrupted(main)
