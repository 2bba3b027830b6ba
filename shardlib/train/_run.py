"""One call of `fit`: its steps, and all that happens between them on the host.

Devices work through a queue of steps that the host fills. The host looks at the metrics of a step
only when `IN_FLIGHT` newer ones are queued behind it, so that devices never wait for the host:

    host      begin 1   begin 2   begin 3, settle 1   begin 4, settle 2   ...
    devices   [ step 1        ][ step 2        ][ step 3        ][ step 4 ...

To settle a step is to wait for its metrics, count it, and record what is due. Before anything that
concerns the state as it is now, an evaluation or a checkpoint, all steps in flight are settled: so
a state whose last gradient was not finite is never saved.

Everything that has processes wait for each other (steps, evaluations, saves, the texts they
exchange) happens in the same order in each of them. What may differ, such as a signal, or a file
that cannot be read, is agreed on first.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from shardlib._tree import named_leaves
from shardlib.machine._agreement import gather_texts
from shardlib.machine._processes import catch_termination
from shardlib.step._batches import Batches
from shardlib.step._state import State
from shardlib.step._step import Step
from shardlib.train._checkpoint import Checkpoints, NoRoomError
from shardlib.train._folder import (
    Occupied,
    add_failure,
    count_failures,
    forget_evaluation,
    forget_failures,
    owe_evaluation,
    owes_evaluation,
)
from shardlib.train._loop_options import (
    Loop,
    Records,
    check_has_values,
    check_measured,
    check_names,
    watched_number,
)
from shardlib.train._nonfinite import (
    NonfiniteError,
    describe_bad_end,
    describe_losses,
    gather_nonfinite,
)
from shardlib.train._recorder import Recorder
from shardlib.train._run_steps import Due, StepInFlight, StepMetrics, require_same_program
from shardlib.train._sinks import Sink
from shardlib.train._speed import Profile, Speed

FAILURES = 2  # of attempts from one checkpoint, after which the one before it is tried
# Steps that devices have before them: they never wait for the host, which is never far ahead.
IN_FLIGHT = 2


class Run:
    """One call of `fit`, from finding the state to go on from to the last step.

    `resume` is called once, then `steps`. `checkpoints` is None for a run without a folder; with
    one, `recorder.held` is set before `resume`, and says whether the folder is still this run's.
    """

    def __init__(
        self,
        step: Step,
        batches: Batches,
        loop: Loop,
        folder: Path | None,
        evaluate: Callable[[State], Mapping[str, Any]] | None,
        records: Records,
        about: Mapping[str, Any] | None,
    ) -> None:
        """Gather what a run needs; nothing is read, written or computed here.

        Args:
            step: takes a state and a batch to the next state and metrics.
            batches: the data, on the mesh.
            loop: how long the run is, and how often what happens.
            folder: the run's folder, absolute, or None.
            evaluate: measures a state, or None.
            records: what is recorded, and where, with its sinks.
            about: what the run says of itself in its checkpoints.
        """
        self.step = step
        self.batches = batches
        self.loop = loop
        self.folder = folder
        self.evaluate = evaluate
        self.watch = records.watch
        sinks: Sequence[Sink] = ()
        if jax.process_index() == 0:
            sinks = records.sinks or ()
        self.recorder = Recorder(sinks)
        self.about = dict(about or {})
        self.speed = Speed(records.unit, records.flops_per_unit, step.strategy)
        self.in_flight: deque[StepInFlight] = deque()
        self.nonfinite_in_a_row = 0
        self.parameter_paths: list[str] = []
        self.resumed_step: int | None = None
        # The step of the newest checkpoint that was begun, and perhaps not complete yet.
        self.saved_step: int | None = None
        # A checkpoint was due, and put off because the last gradient was not finite.
        self.checkpoint_overdue = False
        self.latest: Callable[[], int | None] = lambda: None
        # Steps that changed nothing, which a schedule does not count.
        self.skipped = 0

    @property
    def held(self) -> Occupied:
        """The folder, which this run has to itself."""
        return self.recorder.held

    def resume(self, state: State, checkpoints: Checkpoints | None) -> State:
        """The state to go on from, with the batches put at its place in the data.

        That is the newest good checkpoint, whose arrays take the place of those of `state`, or
        `state` itself where there is none.
        """
        state = self._resumed(state, checkpoints)
        done = int(state.step)
        if done > self.loop.steps:
            raise ValueError(
                f"The run has taken {done} steps already, more than "
                f"`Loop(steps={self.loop.steps})`: let it have more, or begin another run in "
                "another folder."
            )
        if self.step.strategy.skips:
            self.skipped = int(state.nonfinite)
        return state

    def _resumed(self, state: State, checkpoints: Checkpoints | None) -> State:
        """The state of the newest good checkpoint, or the given one."""
        self.parameter_paths = [path for path, _ in named_leaves(state.params)]
        if checkpoints is not None:
            self.latest = partial(self._latest_complete, checkpoints)
        if checkpoints is None or checkpoints.latest() is None:
            check_has_values(state, None if checkpoints is None else self.folder)
            return state
        # Before restoring, which then finds the one before it to be the newest.
        abandoned = self._abandon_checkpoint(checkpoints)
        # What is read takes the place of what was given.
        restored = checkpoints.restore(state, release=True)
        # Without a place in the data, examples would be learned from twice.
        if restored.data is None:
            raise ValueError(
                f"The checkpoint of step {restored.step} in {checkpoints.folder} says nothing of "
                "the place in the data: it was not saved by `fit`. Save it with "
                "`Checkpoints.save(state, data=batches.state())`, or begin in another folder with "
                "`Checkpoints.restore(...).state`."
            )
        self.batches.restore(restored.data)
        self.resumed_step = restored.step
        self.saved_step = restored.step
        self._note(restored.step, f"resumed from the checkpoint of step {restored.step}")
        if abandoned is not None:
            self._note(
                restored.step,
                f"{FAILURES} attempts that went on from the checkpoint of step {abandoned} ended "
                f"in gradients that are not finite: it is put aside as `abandoned-{abandoned}`",
            )
        return restored.state

    def _abandon_checkpoint(self, checkpoints: Checkpoints) -> int | None:
        """Put the newest checkpoint aside if attempts from it ended badly; its step, or None.

        The only checkpoint there is stays: nothing is before it that could do better.
        """
        steps = checkpoints.steps()
        assert self.folder is not None
        # Process 0 reads the file of failures, and tells the others.
        verdict = ""
        if jax.process_index() == 0 and count_failures(self.folder, steps[-1]) >= FAILURES:
            verdict = "abandon"
        abandon = gather_texts(verdict)[0]
        if not abandon or len(steps) == 1:
            return None
        checkpoints.put_aside(steps[-1:], "abandoned")
        if jax.process_index() == 0:
            # A later checkpoint of that step is another one.
            forget_failures(self.folder)
        return steps[-1]

    def remember_failure(self) -> None:
        """Note in the folder that this attempt ended in gradients that are not finite.

        Attempts are counted by the checkpoint they went on from: after `FAILURES` of them the next
        one begins at the checkpoint before it.
        """
        # A run that began at its first step has no checkpoint to blame.
        if jax.process_index() == 0 and self.resumed_step is not None:
            assert self.folder is not None
            self.held.check()
            add_failure(self.folder, self.resumed_step)

    def steps(self, state: State, checkpoints: Checkpoints | None) -> State:
        """Take every step that is left, and return the last state.

        Ends early, with the state saved, after a SIGTERM to any process. Raises a
        `FloatingPointError` where gradients were not finite for too long, or in the last step.
        """
        loop, done = self.loop, int(state.step)
        if self.evaluate is not None and self._owes_evaluation(done):
            self._evaluate(state, done, checkpoints)
        if done == loop.steps:
            self._note(done, f"the run has taken its {loop.steps} steps already")
            return state
        if loop.profile is not None and not done < loop.profile[0] <= loop.steps:
            self._note(
                done,
                f"no profile is taken: `Loop(profile={loop.profile})` begins at none of the steps "
                f"from {done + 1} to {loop.steps}",
            )
        profile, stopped = Profile(loop.profile, self.folder), False
        with catch_termination() as termination, profile:
            while done < loop.steps:
                batch = self._next_batch(state, done, checkpoints)
                # The old state's arrays are used up by the step: nothing here may keep them.
                state = self._take_step(state, batch, done, profile)
                done += 1
                stopped = termination.now(done) or stopped
                due = self._due(done, stopped)
                self._act_on(due, state, done, checkpoints)
                # What is not saved yet goes on until a gradient is finite.
                if due.stopped and (checkpoints is None or not self.nonfinite_in_a_row):
                    self._note_stop(done)
                    break
        return state

    def _take_step(self, state: State, batch: Any, done: int, profile: Profile) -> State:
        """Give the devices one more step, and settle those that are far enough behind it."""
        # Neither counted nor begun: this is the attempt's first step.
        if not self.speed.started and not self.in_flight:
            require_same_program(self.step, state, batch, self.batches.identity)
            self._note(done, "compiling the step")
        step = done + 1
        profile.before(step)
        state, metrics = self.step(state, batch)
        self.in_flight.append(StepInFlight(step, metrics, batch))
        self.speed.begun(metrics["weight"])
        while len(self.in_flight) > IN_FLIGHT:
            self._settle_oldest()
        profile.after(step, metrics)
        # The thread that renews the lock has noticed; here it ends the run.
        if self.held.seen_taken:
            self.recorder.may_write()
        return state

    def _due(self, done: int, stopped: bool) -> Due:
        """What is to be done after `done` steps, of which the last is in flight.

        `stopped` is the same in every process, as all that this is made of.
        """
        loop = self.loop
        last = done == loop.steps
        return Due(
            last=last,
            stopped=stopped,
            checkpoint=last or stopped or self.checkpoint_overdue or done % loop.save_every == 0,
            evaluation=done % loop.evaluate_every == 0,
        )

    def _act_on(self, due: Due, state: State, done: int, checkpoints: Checkpoints | None) -> None:
        """Settle, evaluate and save as it is due after a step, in this order.

        Raises a `FloatingPointError` after a last step whose gradient is not finite.
        """
        # A signal may mean that process 0 has lost the folder: then all end here.
        if due.stopped:
            self.held.check_together()
        if due.checkpoint or due.evaluation:
            self._settle_all()
        if due.last:
            self._check_end(done)
        # Who asks a run to end does not wait for an evaluation, which is made when it goes on; the
        # last step has one in any case.
        if self.evaluate is not None and (due.last or due.evaluation):
            if due.stopped and not due.last:
                self._owe_evaluation(done)
            else:
                self._evaluate(state, done, checkpoints)
        if checkpoints is not None and due.checkpoint:
            self._save(state, done, checkpoints, due.last or due.stopped)

    def _check_end(self, done: int) -> None:
        """Refuse to end well after gradients that are not finite: nobody knows the parameters."""
        if self.nonfinite_in_a_row:
            reason = describe_bad_end(self.nonfinite_in_a_row, done, self.step.strategy)
            raise NonfiniteError(f"{reason} They are not saved.{self._last_checkpoint()}")

    def _note_stop(self, done: int) -> None:
        """Note that the run was asked to end, and whether its state is saved."""
        if done == self.loop.steps:
            return
        remark = ""
        if self.saved_step == done:
            remark = "; the state is saved"
        self._note(done, f"asked to end: stopped after step {done} of {self.loop.steps}{remark}")

    def _evaluate(self, state: State, done: int, checkpoints: Checkpoints | None) -> None:
        """Evaluate the state, and record what is measured.

        This comes before saving, so that a run which goes on from the checkpoint has it behind it.
        """
        assert self.evaluate is not None
        try:
            measured = self.evaluate(state)
            check_measured(measured)
        except Exception:
            self._keep_unevaluated(state, done, checkpoints)
            raise
        try:
            self.recorder.record_evaluation(done, measured or {})
        except Exception:
            # Of several processes only the first has sinks: it would wait for the others to save.
            if jax.process_count() == 1:
                self._keep_unevaluated(state, done, checkpoints)
            raise
        if self.folder is not None and jax.process_index() == 0:
            forget_evaluation(self.folder)
        # An evaluation is no training, and does not count as time of the next step.
        self.speed.pause()

    def _keep_unevaluated(self, state: State, done: int, checkpoints: Checkpoints | None) -> None:
        """Save what has been learned, before an evaluation that failed ends the run."""
        if checkpoints is not None:
            self._save(state, done, checkpoints, wait=True)
            self._owe_evaluation(done)

    def _owe_evaluation(self, done: int) -> None:
        """Remember, for the next attempt, that the state after this step was not evaluated."""
        if self.folder is not None and jax.process_index() == 0:
            self.held.check()
            owe_evaluation(self.folder, done)

    def _owes_evaluation(self, done: int) -> bool:
        """Whether an earlier attempt ended before an evaluation that was due after this step."""
        if self.folder is None or self.resumed_step is None:
            return False
        # Process 0 reads the file, and tells the others.
        verdict = ""
        if jax.process_index() == 0 and owes_evaluation(self.folder, done):
            verdict = "owed"
        return bool(gather_texts(verdict)[0])

    def _next_batch(self, state: State, done: int, checkpoints: Checkpoints | None) -> Any:
        """The next batch, on the mesh.

        Data that ends before the run does is a `ValueError` that says after how many steps. What
        has been learned is saved, where one process can say so for all.
        """
        batch = next(self.batches, None)
        if batch is not None:
            return batch
        if done == 0:
            raise ValueError("The source gave no batch: there is nothing to train with.")
        if checkpoints is not None and jax.process_count() == 1:
            self._settle_all()
            self._save(state, done, checkpoints, wait=True)
        raise ValueError(
            f"The data ended after {done} of {self.loop.steps} steps. Let the run have that "
            f"many, `Loop(steps={done})`, or the data go round."
        )

    def _settle_all(self) -> None:
        """Wait for every step in flight, so that nothing of the state is unknown."""
        while self.in_flight:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        """Wait for the oldest step in flight, count it, and record it where that is due."""
        oldest = self.in_flight.popleft()
        step = oldest.step
        metrics = StepMetrics.fetch(oldest.metrics)
        self.speed.count(metrics.weight)
        # With how many updates before it a schedule computed this step.
        updates, nonfinite = step - 1 - self.skipped, metrics.nonfinite_parameter >= 0
        if nonfinite and self.step.strategy.skips:
            self.skipped += 1
        if nonfinite:
            self._report_nonfinite(step, metrics, oldest.batch)
        else:
            self.nonfinite_in_a_row = 0
        if step % self.loop.log_every == 0 or step == self.loop.steps:
            self._record_step(step, metrics.recorded, updates)

    def _record_step(self, step: int, metrics: Mapping[str, Any], updates: int) -> None:
        """Record the metrics of a step, with the numbers that are watched and the speed.

        A schedule is asked with how many updates were made before this one.
        """
        watched = {name: watched_number(name, f, updates) for name, f in self.watch.items()}
        speed = self.speed.read(self.loop.steps - step)
        check_names(metrics, watched, speed)
        self.recorder.record({"step": step, **metrics, **watched, **speed})

    def _report_nonfinite(self, step: int, metrics: StepMetrics, batch: Any) -> None:
        """Note a step whose gradient is not finite, with what is known of the cause.

        As many in a row as `Loop(nonfinite=...)` says end the run by a `FloatingPointError`.
        """
        self.nonfinite_in_a_row += 1
        strategy = self.step.strategy
        consequence = "skipped" if strategy.skips else "taken all the same"
        path = self.parameter_paths[metrics.nonfinite_parameter]
        losses = describe_losses(metrics.nonfinite_losses, metrics.nonfinite_microbatch, strategy)
        self._note(
            step,
            f"the gradient of `{path}`, at least, is not finite, and the loss is "
            f"{metrics.recorded['loss']:.6g}; the step is {consequence}; "
            f"{losses}{gather_nonfinite(batch, strategy)}",
        )
        if self.nonfinite_in_a_row >= self.loop.nonfinite:
            raise NonfiniteError(
                f"{self.nonfinite_in_a_row} steps in a row, up to step {step}, had gradients that "
                f"are not finite, that of `{path}` among them.{self._last_checkpoint()} A smaller "
                "learning rate, clipping or another precision may help; `Loop(nonfinite=...)` "
                "says how many are borne."
            )

    def _latest_complete(self, checkpoints: Checkpoints) -> int | None:
        """The step of the newest checkpoint, once the save that was begun has ended."""
        try:
            checkpoints.wait()
        except OSError as error:
            self._note(self.saved_step or 0, str(error))
        return checkpoints.latest()

    def _last_checkpoint(self) -> str:
        """A sentence that says which checkpoint a run that ends has left.

        It begins with a space, and is empty where there is none.
        """
        latest = self.latest()
        if latest is None:
            return ""
        return f" The last checkpoint is that of step {latest}."

    def _save(self, state: State, done: int, checkpoints: Checkpoints, wait: bool) -> None:
        """Begin to save, and with `wait` see it complete.

        A save that fails is noted, and the run goes on, unless it was to be waited for or other
        processes may have gone on without this one: then the run ends.
        """
        if done == self.saved_step:
            return
        if self.nonfinite_in_a_row:
            self._put_off_checkpoint(done)
            return
        self.checkpoint_overdue = False
        # Of several processes one may fail while others go on. Then the run ends, to be taken up
        # where all of them were.
        single_process = jax.process_count() == 1
        self.held.check_together()
        # The save before this one has its own failures, which do not keep this one from starting.
        try:
            checkpoints.wait()
        except OSError as error:
            if not single_process:
                raise
            self._note(done, str(error))
        try:
            checkpoints.save(state, data=self.batches.state(), about=self.about)
            if wait:
                checkpoints.wait()
        except OSError as error:
            # A save for which there is no room was begun by no process.
            in_every_process = single_process or isinstance(error, NoRoomError)
            if wait or not in_every_process:
                raise
            self._note(done, str(error))
            return
        self.saved_step = done

    def _put_off_checkpoint(self, done: int) -> None:
        """Leave a checkpoint for after the next step whose gradient is finite.

        The first time in a row that it is put off, that is noted.
        """
        if not self.checkpoint_overdue:
            self._note(
                done,
                "not saved: the last gradient was not finite, and parameters may be to blame",
            )
        self.checkpoint_overdue = True

    def _note(self, step: int, text: str) -> None:
        """Record a remark in words."""
        self.recorder.record({"step": step, "note": text})
