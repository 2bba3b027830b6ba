"""Folders that have a model: of a run, of a published model, or of one that was imported."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import shardlib as sl
from examples.fields import override
from examples.find_run import recorded
from examples.run import Run
from models import decoding, gpt, hub
from shardlib.data import Corpus, prepare


@functools.cache
def folder_of(source: str) -> Path:
    """The folder of a run or of a published model, which may be one of the hub, `hf:NAME/MODEL`."""
    try:
        return sl.weights.local_folder(source)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error


def described(source: str) -> Run:
    """The run in a folder; of a published model, a run that has not begun."""
    folder = folder_of(source)
    if (folder / "run.json").exists():
        return recorded(folder / "run.json")
    return Run(
        name=name_of(source),
        model=published_model(folder),
        data=published_texts(folder, source),
        batch=8,
        strategy=sl.Strategy(mesh="data=-1", rules=sl.rules.data),
        loop=sl.Loop(steps=1),
        start=source,
    )


def name_of(source: str) -> str:
    """What a folder or a model of the hub is called."""
    if source.startswith("hf:"):
        return source.partition("@")[0].rpartition("/")[-1]
    return Path(source).expanduser().resolve().name


def published_model(folder: Path, longest: int | None = None) -> gpt.GPTConfig:
    """The configuration of a published model.

    Args:
        folder: with its files.
        longest: the context that is enough; more takes memory.
    """
    try:
        model = hub.config(folder)
        if longest and model.positions == "rotary" and model.context > longest:
            model = hub.config(folder, context=longest)
    except (OSError, ValueError) as error:
        raise SystemExit(str(error)) from error
    return model


def published_texts(folder: Path, files: str) -> Corpus:
    """Texts as a published model reads them, by its own tokenizer."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.exists():
        raise SystemExit(
            f"`{folder}` has no `tokenizer.json`, by which the model reads. Take it from where the "
            "model was published."
        )
    try:
        begin, end = hub.begin_token(folder), hub.end_token(folder)
        return Corpus(files, tokenizer=str(tokenizer), end=end, begin=begin)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def started(run: Run, state: sl.State) -> sl.State:
    """A new state with the weights of the folder that the run starts from.

    That has the files of a published model, or checkpoints, of which the last is read. Factors of
    LoRA stay as they are.
    """
    folder = folder_of(run.start)
    keep = (sl.lora.PARAMETERS,) if run.lora.rank else ()
    try:
        if has_checkpoints(folder):
            before = described(run.start)
            if not run.lora.rank and not before.lora.rank:
                with sl.Checkpoints(folder / "checkpoints") as checkpoints:
                    return checkpoints.restore_model(state, release=True).state
            # On the machine of this run, which may be another than that of the one before.
            here = dataclasses.replace(before, strategy=run.strategy)
            model, _ = restored(run.start, to_read(here, is_split=True))
            return state.with_weights(_in_place(state.weights, model, folder))
        table = hub.table_in(folder, run.model)
        return sl.weights.load(folder, state, table, keep=keep, release=True)
    except (OSError, ValueError) as error:
        raise SystemExit(f"`--start {run.start}`: {error}") from error


def has_checkpoints(folder: Path) -> bool:
    """Whether a folder is that of a run, or of an imported model, and not of a published one."""
    return (folder / "checkpoints").exists() or (folder / "run.json").exists()


def restored(source: str, strategy: sl.Strategy, step: int | None = None) -> tuple[Any, int | None]:
    """The model in a folder under a strategy, and the step of its checkpoint.

    A published model has no step. Factors of LoRA are in their kernels.
    """
    folder, run = folder_of(source), described(source)
    # Kernels are chosen where the model runs now.
    config = dataclasses.replace(run.model, attention=None, kernels="xla")
    make = dataclasses.replace(run, model=config).make_model
    if not has_checkpoints(folder):
        if step is not None:
            raise ValueError(f"`{source}` has no checkpoints, and so none of step {step}.")
        state = sl.init(make, None, strategy, seed=run.seed)
        table = hub.table_in(folder, config)
        return sl.weights.load(folder, state, table, release=True).model, None
    like = sl.init(make, None, strategy, seed=run.seed, abstract=True)
    with sl.Checkpoints(folder / "checkpoints") as checkpoints:
        found = checkpoints.restore_model(like, step=step)
    model = found.state.model
    return (sl.lora.merged(model) if run.lora.rank else model), found.step


def tokenizer_of(source: str) -> str:
    """The tokenizer of a run; one that it has learned is a file beside its tokens."""
    folder, run = folder_of(source), described(source)
    if not run.data.tokenizer.startswith("bpe:"):
        return run.data.tokenizer
    prepared = prepare(run.data, run.cache or None)
    if prepared.train.fingerprint != json.loads((folder / "run.json").read_text()).get("train"):
        raise SystemExit(
            f"The tokenizer of `{folder}`, `{run.data.tokenizer}`, was learned from texts, "
            f"`data.files={run.data.files!r}`, that have changed since, so that its tokens would "
            "be others. Put the texts back as they were."
        )
    return str(prepared.folder / "tokenizer.json")


def to_read(
    run: Run, mesh: str | None = None, rules: str | None = None, *, is_split: bool = False
) -> sl.Strategy:
    """The strategy to read what a run has learned: its own without what trains.

    Args:
        run: that has learned.
        mesh: by default that of the run.
        rules: by default those of the run; written as for `train_lm.py`.
        is_split: whether devices along the data axes share the parameters, which then take less
            memory; a model that computes has them whole.
    """
    changes = []
    for name, value in (("mesh", mesh), ("rules", rules)):
        if value is not None:
            changes += [f"--{name}", value]
    # What only a pipeline takes is left out together with it.
    alone = dataclasses.replace(
        run.strategy, dcn="", pipeline=None, combine_passes=False, remat="none", offload=None,
        exchange=sl.Exact(), manual=None,
    )  # fmt: skip
    strategy = override(alone, changes)
    return dataclasses.replace(
        strategy,
        frozen=(),
        rules=decoding.rules(strategy.rules),
        zero=sl.Zero(3, small=0) if is_split and strategy.data_axes else 0,
        accumulate=1,
    )


def _in_place(weights: Any, model: nnx.Module, folder: Path) -> Any:
    """A tree of weights with those of a model in their places."""
    given = flatten_dict(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    wanted = flatten_dict(weights)
    without_factors = {path for path in wanted if "adapter" not in path}
    for path in without_factors ^ given.keys():
        which = "has" if path in given else "lacks"
        raise ValueError(
            f"the model of `{folder}` {which} `{'/'.join(path)}`: it is another model. Start from "
            "one whose fields `model.*` are the same."
        )
    return unflatten_dict({**wanted, **given})
