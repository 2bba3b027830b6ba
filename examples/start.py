"""The weights that a run begins with: those of a published model, or of another run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

import shardlib as sl
from examples.run import Run, override, recorded
from models import decoding, hub
from shardlib.data import prepare


def started(run: Run, state: sl.State) -> sl.State:
    """A new state with the weights of the folder that the run starts from.

    That has the files of a published model, or is the folder of a run, of which the last checkpoint
    is read. Factors of LoRA stay as they are.
    """
    folder = Path(run.start).expanduser()
    keep = (sl.lora.PARAMETERS,) if run.lora.rank else ()
    try:
        if (folder / "run.json").exists():
            model, _ = restored(folder, to_read(recorded(folder / "run.json")))
            return state.with_weights(_in_place(state.weights, model, folder))
        return sl.weights.load(folder, state, hub.table(run.model), keep=keep, release=True)
    except (OSError, ValueError) as error:
        raise SystemExit(f"`--start {run.start}`: {error}") from error


def restored(folder: Path, strategy: sl.Strategy, step: int | None = None) -> tuple[Any, int]:
    """The model of a run's checkpoint under a strategy, and the checkpoint's step.

    Factors of LoRA are in their kernels.
    """
    run = recorded(folder / "run.json")
    # Kernels are chosen where the model runs now.
    config = dataclasses.replace(run.model, attention=None, kernels="xla")
    make = dataclasses.replace(run, model=config).make_model
    like = sl.init(make, optax.set_to_zero(), strategy, seed=run.seed, abstract=True)
    with sl.Checkpoints(folder / "checkpoints") as checkpoints:
        found = checkpoints.restore_model(like, step=step)
    model = found.state.model
    return (sl.lora.merged(model) if run.lora.rank else model), found.step


def tokenizer_of(folder: Path) -> str:
    """The tokenizer of a run; one that it has learned is a file beside its tokens."""
    run = recorded(folder / "run.json")
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


def to_read(run: Run, mesh: str | None = None, rules: str | None = None) -> sl.Strategy:
    """The strategy to read what a run has learned: its own without what trains.

    Args:
        run: that has learned.
        mesh: by default that of the run.
        rules: by default those of the run; written as for `train_lm.py`.
    """
    changes = []
    for name, value in (("mesh", mesh), ("rules", rules)):
        if value is not None:
            changes += [f"--{name}", value]
    strategy = override(dataclasses.replace(run.strategy, dcn="", pipeline=None), changes)
    return dataclasses.replace(
        strategy,
        frozen=(),
        rules=decoding.rules(strategy.rules),
        zero=0,
        accumulate=1,
        offload=None,
        remat="none",
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
