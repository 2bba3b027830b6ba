"""The training loop, `fit`: what it takes, and the folder that is its own while it lasts.

The steps themselves are those of a `Run`. Around them, in this order:

    check the arguments -> compare them between processes -> take the folder -> open checkpoints
        -> resume -> steps -> close checkpoints -> leave the folder -> close the batches

An argument that could only fail later, in another thread or after hours, is refused at once.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardlib.checks import _arguments as check
from shardlib.machine._agreement import require_agreement
from shardlib.optimizers._local import Apart, Local
from shardlib.step._batches import batches
from shardlib.step._state import State
from shardlib.step._step import Step
from shardlib.train._checkpoint import Checkpoints
from shardlib.train._folder import occupied, write_about
from shardlib.train._loop_options import Loop, Records, check_call, check_options
from shardlib.train._nonfinite import NonfiniteError
from shardlib.train._run import Run
from shardlib.train._sinks import JsonLines, Progress, Sink


def fit(
    step: Step,
    state: State,
    source: Iterable[Any],
    loop: Loop,
    *,
    folder: str | os.PathLike[str] | None = None,
    evaluate: Callable[[State], Mapping[str, Any]] | None = None,
    records: Records | None = None,
    about: Mapping[str, Any] | None = None,
) -> State:
    """Train a state for the steps of a loop, and return the last state.

    The run goes on from where its folder says it was stopped.

    - `step`: the train step, as `train_step` makes it.
    - `state`: as `init` makes it. It is used up, as by a step; where `folder` holds a checkpoint,
      that is read in its place.
    - `source`: an iterable of batches, or what `batches` made of one. If it ends before the run
      does, that is a `ValueError`. It is read some batches ahead: an iterator that is to be gone on
      with is given as what `batches` made of it, which keeps these.
    - `loop`: how many steps the run has, and how often it logs, evaluates and saves, a `Loop`.
    - `folder`: where the run lives: `checkpoints/`, `metrics.jsonl`, `run.json`, `profile/`.
      Without it nothing is kept. A folder in which another run is under way is refused.
    - `evaluate`: a function that measures a state, and returns numbers by name, such as
      `lambda state: measure(state, held_out)` with `measure = sl.evaluation(loss_fn, strategy)`.
      Without it nothing is measured.
    - `records`: what is recorded and where, a `Records`; by default the metrics and the speed, on a
      bar and in `metrics.jsonl` in the folder.
    - `about`: what to save with checkpoints and in `run.json`, of whatever JSON holds; processes
      compare it before the first step.

    SIGTERM, to any process, saves after the step that is under way, and returns; if the gradient of
    that step is not finite, after the next one whose gradient is.

    A `FloatingPointError` ends a run that had `Loop(nonfinite=...)` steps in a row whose gradient
    is not finite, or whose last step had such a gradient.

    >>> import shardlib as sl, jax.numpy as jnp, numpy as np, optax
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> state = sl.init(lambda: {"w": jnp.zeros(3)}, optax.sgd(0.02), strategy)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2), strategy)
    >>> records = []
    >>> state = sl.fit(step, state, [np.ones((16, 3), "f")] * 20, sl.Loop(steps=20),
    ...     records=sl.Records(sinks=[records.append]))
    >>> [(record["step"], round(record["loss"], 4)) for record in records if "loss" in record]
    [(10, 0.1002), (20, 0.0078)]
    """
    check_call(step, state, loop)
    check_options(evaluate, records, about)
    # An optimizer that depends on the run's length is made for this one, and given back as it was.
    optimizer = state.layout.optimizer
    if isinstance(optimizer, Local | Apart):
        state = _with_optimizer(state, optimizer.for_run(loop.steps))
    # Nothing has been written so far: what is wrong with an argument leaves no trace.
    run_folder = _checked_folder(folder)
    _check_json(about)
    records = Records() if records is None else records
    if records.sinks is None:
        records = replace(records, sinks=_default_sinks(loop, run_folder))
    run_batches = batches(source, step.strategy)
    run = Run(step, run_batches, loop, run_folder, evaluate, records, about)
    # Before anything is looked for in a folder, together.
    require_agreement({"configuration": _lines(run.about)})
    try:
        if run_folder is None:
            state = run.steps(run.resume(state, None), None)
        else:
            state = _steps_in_folder(run, state, run_folder)
        return _with_optimizer(state, optimizer)
    finally:
        if run_batches is not source:  # which whoever made them may go on with
            run_batches.close()


def _steps_in_folder(run: Run, state: State, folder: Path) -> State:
    """Resume a run from its folder, and take its steps, with the folder to itself meanwhile.

    A run that ends in gradients that are not finite leaves word of it for the next attempt.
    """
    loop = run.loop
    # The folder is left last: the checkpoints wait for what they write into it.
    with (
        occupied(folder) as held,
        Checkpoints(
            folder / "checkpoints", keep=loop.keep, keep_every=loop.keep_every, _occupied=held
        ) as checkpoints,
    ):
        run.recorder.held = held
        state = run.resume(state, checkpoints)
        held.check_together()
        write_about(folder, run.about)
        try:
            return run.steps(state, checkpoints)
        except NonfiniteError:
            run.remember_failure()
            raise


def _checked_folder(folder: str | os.PathLike[str] | None) -> Path | None:
    """The absolute path of a run's folder, or None for a run without one.

    A bucket is refused, since the folder's lock needs a file system.
    """
    if isinstance(folder, str | os.PathLike) and "://" in str(folder):
        raise ValueError(
            f"`fit(folder={check.shown(folder)})` takes a folder of a file system; a bucket can be "
            "mounted as one (gcsfuse, s3fs)."
        )
    if folder is None:
        return None
    return check.path("fit", "folder", folder).absolute()


def _check_json(about: Mapping[str, Any] | None) -> None:
    """Refuse what the first checkpoint could not hold.

    `about` is what the run says of itself, or None.
    """
    try:
        json.dumps(dict(about or {}))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"`fit(about=...)` goes into checkpoints as JSON, which cannot hold it: {error}."
        ) from error


def _default_sinks(loop: Loop, folder: Path | None) -> list[Sink]:
    """A bar on standard error, and a file of records where the run has a folder."""
    sinks: list[Sink] = [Progress(loop.steps)]
    if folder is not None:
        sinks.append(JsonLines(folder / "metrics.jsonl"))
    return sinks


def _with_optimizer(state: State, optimizer: Any) -> State:
    """The same state, whose layout names another optimizer; its arrays stay as they are."""
    return state.replaced(layout=replace(state.layout, optimizer=optimizer))


def _lines(about: Mapping[str, Any]) -> str:
    """What a run says of itself, a line for each name, for processes to compare."""
    return "\n".join(f"{name}: {value}" for name, value in about.items())
