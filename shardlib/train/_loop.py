"""The loop of a run: it takes steps, says how it goes, measures, saves, and goes on where it was
stopped.
"""

import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from shardlib._lock import TakenError
from shardlib._tree import named_leaves
from shardlib.checks import _arguments as check
from shardlib.machine._agreement import gather_texts, require_agreement
from shardlib.machine._processes import catch_termination
from shardlib.optimizers._local import Local
from shardlib.step._batches import Batches, batches
from shardlib.step._state import State
from shardlib.step._step import Step
from shardlib.train._checkpoint import Checkpoints, NoRoomError
from shardlib.train._folder import Occupied, add_failure, count_failures, occupied
from shardlib.train._loop_options import Loop, check_call, check_names, check_options
from shardlib.train._nonfinite import describe_losses, describe_nonfinite
from shardlib.train._sinks import JsonLines, Progress, Sink
from shardlib.train._speed import Profile, Speed

FAILURES = 2  # of attempts from one checkpoint, after which the one before it is tried
# Steps that devices have before them: they never wait for the host, which is never far ahead.
IN_FLIGHT = 2


def fit(
    step: Step,
    state: State,
    source: Iterable[Any],
    loop: Loop,
    *,
    folder: str | os.PathLike[str] | None = None,
    evaluate: Callable[[State], Mapping[str, Any]] | None = None,
    sinks: Sequence[Sink] | None = None,
    watch: Mapping[str, Callable[[int], Any]] | None = None,
    unit: str = "examples",
    flops_per_unit: float | None = None,
    about: Mapping[str, Any] | None = None,
) -> State:
    """Train, and return the last state.

    The run goes on from where its folder says it was stopped.

    - `state`: as `init` makes it. It is used up, as by a step; where `folder` holds a checkpoint,
      that is read in its place.
    - `source`: an iterable of batches, or what `batches` made of one.
    - `folder`: where the run lives: `checkpoints/`, `metrics.jsonl`, `run.json`, `profile/`.
      Without it nothing is kept. A folder in which another run is under way is refused.
    - `evaluate`: measures a state: `lambda state: evaluation(state, held_out)`.
    - `sinks`: called with every record, by the first process alone; by default a bar, and
      `metrics.jsonl` in the folder.
    - `watch`: numbers to record, by how many steps were taken before, as a schedule of the learning
      rate has it.
    - `unit`: what the weights of the loss count, "tokens" say. With `flops_per_unit`, what training
      on one takes, records say what part of the devices' peak that is (MFU), where their datasheet
      is known.
    - `about`: what to save with checkpoints and in `run.json`, of whatever JSON holds; processes
      compare it before the first step.

    SIGTERM, to any process, saves after the step that is under way, and returns.

    A `FloatingPointError` ends a run that had `Loop(nonfinite=...)` steps in a row whose gradient
    is not finite, or whose last step had such a gradient.

    >>> import shardlib as sl, jax.numpy as jnp, numpy as np, optax
    >>> strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    >>> state = sl.init(lambda: {"w": jnp.zeros(3)}, optax.sgd(0.02), strategy)
    >>> step = sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2), strategy)
    >>> records = []
    >>> state = sl.fit(step, state, [np.ones((16, 3), "f")] * 20, sl.Loop(steps=20),
    ...     sinks=[records.append])
    >>> [(record["step"], round(record["loss"], 4)) for record in records if "loss" in record]
    [(10, 0.1002), (20, 0.0078)]
    """
    check_call(step, state, loop)
    check_options(evaluate, sinks, watch, unit, flops_per_unit, about)
    optimizer = state.layout.optimizer
    if isinstance(optimizer, Local):
        state = _with_optimizer(state, optimizer.for_run(loop.steps))
    if isinstance(folder, str | os.PathLike) and "://" in str(folder):
        raise ValueError(
            f"`fit(folder={check.shown(folder)})` takes a folder of a file system; a bucket can be "
            "mounted as one (gcsfuse, s3fs)."
        )
    place = None if folder is None else check.path("fit", "folder", folder).expanduser().absolute()
    try:
        json.dumps(dict(about or {}))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"`fit(about=...)` goes into checkpoints as JSON, which cannot hold it: {error}."
        ) from error
    if sinks is None:
        sinks = (Progress(loop.steps), *([JsonLines(place / "metrics.jsonl")] if place else []))
    run = _Run(
        step,
        batches(source, step.strategy),
        loop,
        place,
        evaluate,
        sinks,
        dict(watch or {}),
        unit,
        flops_per_unit,
        about,
    )
    # Before anything is looked for in a folder, together.
    require_agreement({"configuration": _lines(run.about)})
    keep = {"keep": loop.keep, "keep_every": loop.keep_every}
    try:
        if place is None:
            return _with_optimizer(run.steps(run.resume(state, None), None), optimizer)
        with (
            occupied(place, run.about) as held,
            Checkpoints(place / "checkpoints", **keep, _occupied=held) as checkpoints,
        ):
            run.held = held
            state = run.resume(state, checkpoints)
            try:
                return _with_optimizer(run.steps(state, checkpoints), optimizer)
            except FloatingPointError:
                run.remember_failure()
                raise
    finally:
        if run.batches is not source:  # which whoever made them may go on with
            run.batches.close()


def _with_optimizer(state: State, optimizer: Any) -> State:
    return state.replaced(layout=replace(state.layout, optimizer=optimizer))


class _Run:
    """One call of `fit`."""

    def __init__(
        self,
        step: Step,
        batches: Batches,
        loop: Loop,
        folder: Path | None,
        evaluate: Any,
        sinks: Sequence[Sink],
        watch: dict[str, Any],
        unit: str,
        flops_per_unit: float | None,
        about: Mapping[str, Any] | None,
    ) -> None:
        self.step = step
        self.batches = batches
        self.loop = loop
        self.folder = folder
        self.evaluate = evaluate
        self.sinks = sinks if jax.process_index() == 0 else ()
        self.watch = watch
        self.about = dict(about or {})
        self.speed = Speed(unit, flops_per_unit, step.strategy)
        # Steps, with their metrics and batches.
        self.in_flight: deque[tuple[int, Any, Any]] = deque()
        self.nonfinite = 0  # in a row
        self.paths: list[str] = []
        self.held = Occupied(None)
        self.lost = False  # the folder, to another run
        self.resumed: int | None = None
        self.saved: int | None = None  # begun, that is
        self.owed = False  # a checkpoint that was not saved when it was due
        self.latest: Callable[[], int | None] = lambda: None

    def resume(self, state: State, checkpoints: Checkpoints | None) -> State:
        """The state to go on from, and the batches at their place."""
        self.paths = [path for path, _ in named_leaves(state.params)]
        if checkpoints is not None:
            self.latest = checkpoints.latest
        if checkpoints is None or checkpoints.latest() is None:
            if isinstance(state.step, jax.ShapeDtypeStruct):
                elsewhere = ""
                if checkpoints is not None:
                    elsewhere = f", or look for the run elsewhere than in {self.folder}"
                raise ValueError(
                    "The state is abstract, and there is no checkpoint to fill it from. Make it "
                    f"with `sl.init(...)` without `abstract`{elsewhere}."
                )
            return state
        abandoned = self.go_back(checkpoints)
        # What is read takes the place of what was given.
        restored = checkpoints.restore(state, release=True)
        if restored.data is None:
            raise ValueError(
                f"The checkpoint of step {restored.step} in {checkpoints.folder} says nothing of "
                "the place in the data: it was not saved by `fit`. Save it with "
                "`Checkpoints.save(state, data=batches.state())`, or begin in another folder with "
                "`Checkpoints.restore(...).state`."
            )
        self.batches.restore(restored.data)
        self.saved = self.resumed = restored.step
        self.note(restored.step, f"resumed from the checkpoint of step {restored.step}")
        if abandoned is not None:
            self.note(
                restored.step,
                f"{FAILURES} attempts that went on from the checkpoint of step {abandoned} ended "
                f"in gradients that are not finite: it is put aside as `abandoned-{abandoned}`",
            )
        return restored.state

    def go_back(self, checkpoints: Checkpoints) -> int | None:
        """Put the newest checkpoint aside if attempts from it ended badly, and there is another;
        its step.
        """
        steps = checkpoints.steps()
        assert self.folder is not None
        again = jax.process_index() == 0 and count_failures(self.folder, steps[-1]) >= FAILURES
        if not gather_texts("again" if again else "")[0] or len(steps) == 1:
            return None
        checkpoints.put_aside(steps[-1:], "abandoned")
        return steps[-1]

    def remember_failure(self) -> None:
        """That this attempt ended in gradients that are not finite, for the one after the next to
        begin elsewhere.
        """
        if jax.process_index() == 0 and self.resumed is not None:
            assert self.folder is not None
            self.held.check()
            add_failure(self.folder, self.resumed)

    def steps(self, state: State, checkpoints: Checkpoints | None) -> State:
        """Every step that is left."""
        loop, done = self.loop, int(state.step)
        if done > loop.steps:
            raise ValueError(
                f"The run has taken {done} steps already, more than `Loop(steps={loop.steps})`: "
                "let it have more, or begin another run in another folder."
            )
        if done == loop.steps:
            self.note(done, f"the run has taken its {loop.steps} steps already")
            return state
        profile = Profile(loop.profile, self.folder)
        with catch_termination() as termination, profile:
            while done < loop.steps:
                batch = self.next_batch(done)
                if not self.speed.started and not self.in_flight:
                    self.first(state, batch, done)
                profile.before(done + 1)
                state, metrics = self.step(state, batch)
                done += 1
                self.in_flight.append((done, metrics, batch))
                self.speed.begun(metrics["weight"])
                while len(self.in_flight) > IN_FLIGHT:
                    self.settle()
                profile.after(done, metrics)
                if self.held.seen_taken:
                    self.may_write()
                last, stopped = done == loop.steps, termination.now(done)
                if stopped:
                    self.held.check_together()
                due = last or stopped or self.owed or done % loop.save_every == 0
                if due or done % loop.evaluate_every == 0:
                    self.settle_all()
                if last and self.nonfinite:
                    raise FloatingPointError(self.ended_badly(done))
                if self.evaluate is not None and (
                    last or (done % loop.evaluate_every == 0 and not stopped)
                ):
                    self.measure(state, done, checkpoints)
                if checkpoints is not None and due:
                    self.save(state, done, checkpoints, last or stopped)
                if stopped and not last:
                    kept = "; the state is saved" if self.saved == done else ""
                    self.note(
                        done, f"asked to end: stopped after step {done} of {loop.steps}{kept}"
                    )
                    break
        return state

    def measure(self, state: State, done: int, checkpoints: Checkpoints | None) -> None:
        """Evaluate, before saving: so that a run which goes on from the checkpoint has this behind
        it.
        """
        assert self.evaluate is not None
        try:
            measured = self.evaluate(state)
        except Exception:
            if checkpoints is not None:  # what has been learned is not lost with it
                self.save(state, done, checkpoints, wait=True)
            raise
        if measured:
            self.say(
                {"step": done, **{f"evaluation/{name}": value for name, value in measured.items()}}
            )
        self.speed.pause()

    def next_batch(self, done: int) -> Any:
        try:
            return next(self.batches)
        except StopIteration:
            raise ValueError(
                f"The data ended after {done} of {self.loop.steps} steps. Let the run have that "
                f"many, `Loop(steps={done})`, or the data go round."
            ) from None

    def first(self, state: State, batch: Any, done: int) -> None:
        """Before the first step: what several processes must have alike is compared, while none
        waits for another.
        """
        if jax.process_count() > 1:
            shapes = "\n".join(
                f"{path}: {leaf.dtype}{list(leaf.shape)}" for path, leaf in named_leaves(batch)
            )
            program = self.step.lower(state, batch).as_text()
            require_agreement({"batch": shapes, "program": program, "data": self.batches.identity})
        self.note(done, "compiling the step")

    def settle(self) -> None:
        """Wait for the oldest step in flight, and tell of it."""
        step, metrics, batch = self.in_flight.popleft()
        values = {name: value.tolist() for name, value in jax.device_get(metrics).items()}
        weight, bad = values.pop("weight"), int(values.pop("first_nonfinite"))
        losses, microbatch = values.pop("nonfinite_losses"), values.pop("nonfinite_microbatch")
        self.speed.count(weight)
        if bad >= 0:
            self.nonfinite += 1
            skipped = "skipped" if self.step.strategy.skips else "taken all the same"
            self.note(
                step,
                f"the gradient of `{self.paths[bad]}`, at least, is not finite, and the loss is "
                f"{values['loss']:.6g}; the step is {skipped}; "
                f"{describe_losses(losses, microbatch, self.step.strategy)}{self.blame(batch)}",
            )
            if self.nonfinite >= self.loop.nonfinite:
                raise FloatingPointError(
                    f"{self.nonfinite} steps in a row, up to step {step}, had gradients that are "
                    f"not finite, that of `{self.paths[bad]}` among them.{self.kept()} A smaller "
                    "learning rate, clipping or another precision may help; `Loop(nonfinite=...)` "
                    "says how many are borne."
                )
        else:
            self.nonfinite = 0
        if step % self.loop.log_every == 0 or step == self.loop.steps:
            watched = {name: float(of(step - 1)) for name, of in self.watch.items()}
            left = self.loop.steps - step
            speed = self.speed.read(left)
            check_names(values, watched, speed)
            self.say({"step": step, **values, **watched, **speed})

    def blame(self, batch: Any) -> str:
        """Which examples of a batch are not finite themselves, and where they lie."""
        found = [
            text for text in gather_texts(describe_nonfinite(batch, self.step.strategy)) if text
        ]
        return "".join(f"; {text}" for text in found)

    def kept(self) -> str:
        return (
            ""
            if self.latest() is None
            else f" The last checkpoint is that of step {self.latest()}."
        )

    def ended_badly(self, done: int) -> str:
        """What there is to say where the last gradient was not finite: nobody has seen a good one
        of these parameters.
        """
        steps = (
            "step, " + str(done)
            if self.nonfinite == 1
            else f"{self.nonfinite} steps, up to {done},"
        )
        said = f"The run ended badly: the last {steps} had a gradient that is not finite"
        if self.step.strategy.skips:
            why = (
                " and left the parameters as they were, which may be no good either. If a batch is "
                f"to blame and not they, let the run have another step, `Loop(steps={done + 1})`."
            )
        else:
            why = (
                ' and went into the parameters all the same: `Strategy(nonfinite="skip")` leaves '
                "such steps out."
            )
        return f"{said}{why} They are not saved.{self.kept()}"

    def settle_all(self) -> None:
        while self.in_flight:
            self.settle()

    def save(self, state: State, done: int, checkpoints: Checkpoints, wait: bool) -> None:
        """Begin to save. A save that fails is told of and the run goes on, unless it was the
        last.
        """
        if done == self.saved:
            return
        if self.nonfinite:
            if not self.owed:
                self.note(
                    done,
                    "not saved: the last gradient was not finite, and parameters may be to blame",
                )
            self.owed = True  # to be saved once a gradient is finite
            return
        self.owed = False
        # Of several processes one may fail while others go on. Then the run ends, to be taken up
        # where all of them were.
        alone = jax.process_count() == 1
        self.held.check_together()
        try:
            checkpoints.wait()
        except OSError as error:
            if not alone:
                raise
            self.note(done, str(error))
        try:
            checkpoints.save(state, data=self.batches.state(), about=self.about)
            if wait:
                checkpoints.wait()
        except OSError as error:
            if wait or not (alone or isinstance(error, NoRoomError)):
                raise
            self.note(done, str(error))
            return
        self.saved = done

    def note(self, step: int, text: str) -> None:
        self.say({"step": step, "note": text})

    def may_write(self) -> bool:
        """Whether the folder is still this run's. A process that is alone ends here if not; several
        end after one step.
        """
        try:
            self.held.check()
        except TakenError:
            if jax.process_count() == 1:
                raise
            if not self.lost:
                # By which JAX finds a step after which all can stop.
                os.kill(os.getpid(), signal.SIGTERM)
            self.lost = True
        except OSError as error:
            sys.stderr.write(
                f"shardlib: whether the folder of the run is another's cannot be seen: {error}\n"
            )
            return False
        return not self.lost

    def say(self, record: Mapping[str, Any]) -> None:
        if not self.sinks or not self.may_write():
            return
        for sink in self.sinks:
            try:
                sink(record)
            except OSError as error:  # a record less, and no reason to end a run
                sys.stderr.write(
                    f"shardlib: a record of step {record['step']} could not be written: {error}\n"
                )


def _lines(about: Mapping[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in about.items())
