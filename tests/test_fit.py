"""The loop of a run: records, evaluation, saving, resuming bit for bit, and what stops it."""

import dataclasses
import functools
import io
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardlib as sl
from models import gpt
from shardlib import _lock
from shardlib._lock import TakenError
from shardlib.train import _folder, _nonfinite
from shardlib.train._speed import Speed

CONFIG = gpt.tiny(layers=2, width=16, heads=4, context=8, vocab=32, dropout=0.1)
STRATEGY = sl.Strategy(mesh="data=4,model=2", rules=sl.rules.data | sl.rules.tensor)
LOOP = sl.Loop(steps=12, log_every=2, evaluate_every=4, save_every=4)
OPTIMIZER = optax.adamw(1e-2)
STEP = sl.train_step(gpt.loss, STRATEGY)


def text(count=40, rows=8, seed=0):
    random = np.random.default_rng(seed)
    return [{"tokens": random.integers(0, 32, (rows, 9)).astype(np.int32)} for _ in range(count)]


@functools.cache
def _start(strategy, **options):
    return sl.init(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), OPTIMIZER, strategy, **options)


def start(strategy=STRATEGY, **options):
    """A new state: of one optimizer, for which one step is compiled once."""
    return jax.tree.map(
        lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, _start(strategy, **options)
    )


def bits(state):
    words = [
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for x in jax.tree.leaves(state)
    ]
    return [np.asarray(x).tobytes() for x in words]


def held_out(model, batch, rng):
    return gpt.loss(nnx.view(model, deterministic=True), batch)


MEASURE = sl.evaluation(held_out, STRATEGY)


def fit(folder, source=None, loop=LOOP, step=STEP, watch=None, **options):
    """A run whose records come back with its state."""
    records = []
    options = {"evaluate": lambda state: MEASURE(state, text(2, seed=1)), **options}
    state = sl.fit(
        step,
        start(step.strategy),
        source or text(),
        loop,
        folder=folder,
        records=sl.Records(sinks=[records.append], watch=watch or {}, unit="tokens"),
        **options,
    )
    return state, records


def numbers(records):
    """What must be the same in every attempt: all but speeds and notes."""
    told = (
        {n: v for n, v in record.items() if not n.endswith(("_per_second", "_left", "crc32"))}
        for record in records
    )
    return [record for record in told if "note" not in record]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A run that nothing stopped."""
    folder = tmp_path_factory.mktemp("run")
    state, records = fit(folder)
    return folder, bits(state), records


@pytest.mark.long
def test_fit_records_match_a_plain_loop_of_steps_and_evaluations(undisturbed):
    _, _, records = undisturbed
    logged = [record for record in records if "loss" in record]
    assert [record["step"] for record in logged] == [2, 4, 6, 8, 10, 12]
    assert {"step", "loss", "grad_norm", "tokens_per_second", "seconds_left"} <= logged[1].keys()
    assert [record["step"] for record in records if "evaluation/loss" in record] == [4, 8, 12]
    state, step = start(), STEP
    for number, batch in zip(range(1, 13), text(), strict=False):
        state, metrics = step(state, batch)
        if number % 2 == 0:
            assert float(metrics["loss"]) == logged[number // 2 - 1]["loss"], (
                "what a bare loop of steps gives, bit for bit"
            )
    assert MEASURE(state, text(2, seed=1))["loss"] == records[-1]["evaluation/loss"]


class LostError(Exception):
    """As a machine is."""


def lost_after(count, source):
    yield from source[:count]
    raise LostError


class Source(list):
    """A list that is lost once, after so many batches, and read again from its start."""

    def __init__(self, batches, count):
        super().__init__(batches)
        self.count = count

    def __iter__(self):
        count, self.count = self.count, len(self)
        return iter(self[:]) if count >= len(self) else lost_after(count, self[:])


@pytest.mark.long
@pytest.mark.parametrize("count", [5, 8, 11])
def test_fit_resumes_a_lost_run_to_the_identical_result(undisturbed, tmp_path, count):
    source = Source(text(), count)
    with pytest.raises(LostError):
        fit(tmp_path, source)
    state, records = fit(tmp_path, source)
    assert bits(state) == undisturbed[1]
    resumed = records[0]["step"]
    assert records[0]["note"] == f"resumed from the checkpoint of step {resumed}" and resumed in (
        4,
        8,
    )
    assert numbers(records) == [
        record for record in numbers(undisturbed[2]) if record["step"] > resumed
    ]


@pytest.mark.representative()
@pytest.mark.long
@pytest.mark.parametrize("other", ["data=8", "data=2,model=4"])
def test_fit_resumes_on_another_mesh_and_zero_stage(undisturbed, tmp_path, other):
    rules = sl.rules.data | (sl.rules.tensor if "model" in other else sl.AxisRules())
    strategy = sl.Strategy(mesh=other, rules=rules, zero=sl.Zero(3, small=0))
    fit(tmp_path, loop=dataclasses.replace(LOOP, steps=4), evaluate=None)
    _, records = fit(tmp_path, step=sl.train_step(gpt.loss, strategy), evaluate=None)
    for mine, theirs in zip(
        numbers(records),
        [r for r in numbers(undisturbed[2]) if "loss" in r and r["step"] > 4],
        strict=True,
    ):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


@pytest.mark.long
def test_fit_saves_on_sigterm_and_resumes(undisturbed, tmp_path):
    def interrupted(batches):
        for number, batch in enumerate(batches):
            if number == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    before = signal.getsignal(signal.SIGTERM)
    state, records = fit(tmp_path, interrupted(text()))
    stopped = int(state.step)
    assert (
        stopped < 12
        and records[-1]["note"]
        == f"asked to end: stopped after step {stopped} of 12; the state is saved"
    )
    assert signal.getsignal(signal.SIGTERM) == before
    state, _ = fit(tmp_path)
    assert bits(state) == undisturbed[1]


@pytest.mark.long
def test_fit_says_that_a_finished_run_is_finished(undisturbed):
    state, records = fit(undisturbed[0])
    assert bits(state) == undisturbed[1]
    assert records[-1] == {"step": 12, "note": "the run has taken its 12 steps already"}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The loss makes the examples depend")
def test_fit_reports_nonfinite_steps_and_ends_after_a_streak(tmp_path):
    def poisoned(model, batch, rng):
        mean = gpt.loss(model, batch, rng)
        return sl.weighted_mean(
            jnp.where(batch["tokens"][0, 0] == 31, jnp.nan, 1.0) * mean.total, mean.weight
        )

    strategy = dataclasses.replace(STRATEGY, nonfinite="skip")
    source = text()
    for number, batch in enumerate(source):
        batch["tokens"][:, 0] = 31 if number in (1, 4, 5, 6) else 0
    loop = dataclasses.replace(LOOP, nonfinite=3)
    records = []
    with pytest.raises(
        FloatingPointError,
        match=r"3 steps in a row, up to step 7.*that of `.*` among them.*checkpoint is that of step 4",
    ):
        sl.fit(
            sl.train_step(poisoned, strategy),
            start(strategy),
            source,
            loop,
            folder=tmp_path,
            records=sl.Records(sinks=[records.append]),
        )
    told = [record["note"] for record in records if "finite" in record.get("note", "")]
    assert len(told) == 4 and all(
        re.search(
            r"gradient of `[\w/]+`, at least, is not finite, and the loss is nan; the step is skipped; .*all devices$",
            one,
        )
        for one in told
    )


def test_fit_refuses_data_that_ends_early_with_a_suggestion():
    with pytest.raises(ValueError, match=r"The data ended after 3 of 12 steps.*`Loop\(steps=3\)`"):
        fit(None, text(3))


def test_fit_skips_a_checkpoint_while_the_disk_is_full(undisturbed, tmp_path, monkeypatch):
    import shutil

    usage, asked = shutil.disk_usage(tmp_path), []

    def full_at_first(path):
        asked.append(path)
        return usage._replace(free=0 if len(asked) == 1 else usage.free)

    monkeypatch.setattr(shutil, "disk_usage", full_at_first)
    state, records = fit(tmp_path)
    assert bits(state) == undisturbed[1]
    assert any(
        re.search(
            r"step 4 could not be saved.*0 B are free.*there is none before it", r.get("note", "")
        )
        for r in records
    )
    with sl.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == (8, 12)


def test_fit_fills_an_abstract_state_from_a_checkpoint_or_refuses(undisturbed, tmp_path):
    state = sl.fit(
        STEP,
        start(abstract=True),
        text(),
        LOOP,
        folder=undisturbed[0],
        records=sl.Records(sinks=[]),
    )
    assert bits(state) == undisturbed[1]
    with pytest.raises(
        ValueError, match="The state is abstract, and there is no checkpoint to fill it from"
    ):
        sl.fit(
            STEP, start(abstract=True), text(), LOOP, folder=tmp_path, records=sl.Records(sinks=[])
        )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The loss makes the examples depend")
def test_fit_never_saves_nonfinite_parameters(tmp_path):
    def poisoned(model, batch, rng):
        mean = gpt.loss(model, batch, rng)
        return sl.weighted_mean(
            jnp.where(batch["tokens"][0, 0] == 31, jnp.nan, 1.0) * mean.total, mean.weight
        )

    strategy = dataclasses.replace(STRATEGY, nonfinite="count")
    source = text()
    for number, batch in enumerate(source):
        batch["tokens"][:, 0] = 31 if number == 4 else 0
    loop, records = dataclasses.replace(LOOP, save_every=2, nonfinite=5), []
    with pytest.raises(FloatingPointError, match=r"up to step 9.*checkpoint is that of step 4"):
        sl.fit(
            sl.train_step(poisoned, strategy),
            start(strategy),
            source,
            loop,
            folder=tmp_path,
            records=sl.Records(sinks=[records.append]),
        )
    assert sum("not saved" in record.get("note", "") for record in records) >= 1
    with sl.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.steps() == (2, 4)


# Steps whose gradient is not finite, of a model that costs little.


@functools.cache
def line_fit(nonfinite):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data, nonfinite=nonfinite)
    return sl.train_step(lambda model, x, rng: jnp.mean((x @ model["w"] - 1.0) ** 2), strategy)


def rows(count, bad=()):
    """Batches by number of step, from 1; those of `bad` steps have a nan."""
    batches = [np.full((8, 4), 0.1 * (number % 7), np.float32) for number in range(count)]
    for number in bad:
        batches[number - 1][3, 2] = np.nan
    return batches


def short_fit(folder, source, policy="skip", **loop):
    records, step = [], line_fit(policy)
    state = sl.init(lambda: {"w": jnp.ones(4)}, OPTIMIZER, step.strategy)
    loop = {"steps": len(source), "save_every": 2, "keep": 100, "log_every": 1, **loop}
    failure = None
    try:
        state = sl.fit(
            step,
            state,
            source,
            sl.Loop(**loop),
            folder=folder,
            records=sl.Records(sinks=[records.append]),
        )
    except FloatingPointError as error:
        failure = str(error)
    return state, records, failure


def saved_steps(folder):
    return sorted(
        int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()
    )


def test_fit_skips_a_nonfinite_batch_by_default(tmp_path):
    assert sl.Strategy(mesh="data=8", rules=sl.rules.data) == line_fit("skip").strategy
    state, _, failure = short_fit(tmp_path, rows(9, bad=[5]))
    assert failure is None and np.isfinite(state.params["w"]).all() and int(state.nonfinite) == 1


def test_fit_locates_nonfinite_values_down_to_the_example(tmp_path):
    _, records, _ = short_fit(tmp_path, rows(4, bad=[2]))
    (told,) = (record["note"] for record in records if "at least" in record.get("note", ""))
    assert (
        "the gradient of `w`, at least, is not finite, and the loss is nan; the step is skipped"
        in told
    )
    device = line_fit("skip").strategy.device_mesh.devices.flat[3].id
    assert (
        f"; the loss is not finite in the examples on device {device} of process 0; the batch"
        in told
    )
    assert told.endswith(f"; the batch is not finite in example 3, device {device} of process 0")


@pytest.mark.representative()
@pytest.mark.long("0-model=2,data=4", "3-data=4,model=2", "9-model=2,data=4", "14-data=4,model=2")
@pytest.mark.parametrize("mesh", ["data=4,model=2", "model=2,data=4"])
@pytest.mark.parametrize("example", [0, 3, 9, 14])
def test_fit_names_device_and_microbatch_of_a_nonfinite_loss(mesh, example):
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, accumulate=2)
    step, records = (
        sl.train_step(lambda model, x, rng: jnp.mean(jnp.sqrt(x) * model["w"]), strategy),
        [],
    )
    state = sl.init(lambda: {"w": jnp.ones(4)}, OPTIMIZER, strategy)
    good = np.ones((16, 4), np.float32)
    bad = good.copy()
    bad[example, 1] = -1
    sl.fit(
        step,
        state,
        [good, bad, -good, good],
        sl.Loop(steps=4),
        records=sl.Records(sinks=[records.append]),
    )
    one, all_of_them = (
        record["note"] for record in records if "at least" in record.get("note", "")
    )
    worker, microbatch = example // 4, example % 4 % 2
    devices = strategy.device_mesh.devices
    devices = devices[worker] if mesh.startswith("data") else devices[:, worker]
    listed = ", ".join(str(device.id) for device in devices)
    assert one.endswith(
        f"; the loss is not finite in microbatch {microbatch} on devices {listed} of process 0"
    )
    assert all_of_them.endswith(
        "; the loss is not finite in 8 of the 8 microbatches of all devices"
    )


def test_fit_reports_a_nonfinite_gradient_of_a_finite_loss():
    strategy, records = line_fit("skip").strategy, []
    step = sl.train_step(lambda model, x, rng: jnp.mean(jnp.sqrt(x @ model["w"])), strategy)
    state = sl.init(lambda: {"w": jnp.ones(4)}, OPTIMIZER, strategy)
    batches = [np.zeros((8, 4), np.float32), np.ones((8, 4), np.float32)]
    sl.fit(step, state, batches, sl.Loop(steps=2), records=sl.Records(sinks=[records.append]))
    (told,) = (record["note"] for record in records if "at least" in record.get("note", ""))
    assert told.endswith(
        "the loss is 0; the step is skipped; the loss itself is finite on all devices"
    )


def test_fit_saves_nothing_in_a_nonfinite_streak_and_catches_up_after(tmp_path):
    _, records, failure = short_fit(tmp_path, rows(12, bad=[4, 5, 6, 8]))
    assert failure is None and saved_steps(tmp_path) == [2, 7, 9, 10, 12]
    assert [record["step"] for record in records if "not saved" in record.get("note", "")] == [4, 8]


@pytest.mark.parametrize(
    ("nonfinite", "bad"), [("skip", [12]), ("skip", [10, 11, 12]), ("count", [12]), ("count", [9])]
)
def test_fit_that_ends_with_nonfinite_gradients_fails(tmp_path, nonfinite, bad):
    _, _, failure = short_fit(tmp_path, rows(12, bad), nonfinite)
    assert "The run ended badly" in failure and "They are not saved" in failure
    last = max(step for step in (2, 4, 6, 8, 10) if step < bad[0])
    assert f"the last checkpoint is that of step {last}" in failure.replace("The last", "the last")
    assert saved_steps(tmp_path)[-1] == last
    assert "`Loop(steps=13)`" in failure if nonfinite == "skip" else 'nonfinite="skip"' in failure
    if nonfinite == "skip" and len(bad) == 1:  # the way out that was named
        state, _, failure = short_fit(tmp_path, rows(13, bad))
        assert failure is None and int(state.step) == 13 and saved_steps(tmp_path)[-1] == 13


def test_fit_stopped_in_a_nonfinite_streak_ends_with_a_finite_gradient(tmp_path):
    def stopping():
        for number, batch in enumerate(rows(12, bad=[5, 6, 7, 8, 9])):
            if number == 8:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    records, step = [], line_fit("skip")
    state = sl.init(lambda: {"w": jnp.ones(4)}, OPTIMIZER, step.strategy)
    loop = sl.Loop(steps=12, save_every=2)
    state = sl.fit(
        step, state, stopping(), loop, folder=tmp_path, records=sl.Records(sinks=[records.append])
    )
    assert int(state.step) == 10 and saved_steps(tmp_path) == [2, 4, 10]
    assert records[-1]["note"] == "asked to end: stopped after step 10 of 12; the state is saved"


def test_fit_counts_no_failures_of_the_users_functions(tmp_path):
    def source():
        yield from rows(6)
        raise FloatingPointError("log of zero")

    for _ in range(3):
        state = sl.init(lambda: {"w": jnp.ones(4)}, OPTIMIZER, line_fit("skip").strategy)
        records = sl.Records(sinks=[])
        loop = sl.Loop(steps=12, save_every=2)
        with pytest.raises(FloatingPointError, match="log of zero"):
            sl.fit(line_fit("skip"), state, source(), loop, folder=tmp_path, records=records)
        if not (tmp_path / "checkpoints" / "6").is_dir():
            break
    assert not (tmp_path / "failures.json").exists()


def line_run(folder, source, steps, evaluate=None, sinks=(), **options):
    """A run of the line, with an evaluation after every third step; its records."""
    records, step = [], line_fit("skip")
    state = sl.init(lambda: {"w": jnp.ones(4)}, OPTIMIZER, step.strategy)
    loop = sl.Loop(steps=steps, save_every=100, evaluate_every=3, log_every=1)
    sinks = [records.append, *sinks]
    state = sl.fit(
        step,
        state,
        source,
        loop,
        folder=folder,
        evaluate=evaluate,
        records=sl.Records(sinks=sinks, **options),
    )
    return state, records


def evaluated(records):
    return [record["step"] for record in records if "evaluation/loss" in record]


def test_fit_makes_up_for_an_evaluation_that_was_due_when_it_was_stopped(tmp_path):
    def stopping(record):
        # That of the first step is there when the third one has been begun.
        if record["step"] == 1 and "loss" in record:
            os.kill(os.getpid(), signal.SIGTERM)

    measure = lambda state: {"loss": 1.0}
    state, records = line_run(tmp_path, rows(8), 8, measure, [stopping])
    assert int(state.step) == 3 and evaluated(records) == []
    state, records = line_run(tmp_path, rows(8), 8, measure)
    assert int(state.step) == 8 and evaluated(records) == [3, 6, 8]


def test_fit_makes_up_for_an_evaluation_that_failed_at_its_end(tmp_path):
    def failing(state):
        raise RuntimeError("no such file")

    with pytest.raises(RuntimeError, match="no such file"):
        line_run(tmp_path, rows(1), 1, failing)
    for expected in ([1], []):
        _, records = line_run(tmp_path, rows(1), 1, lambda state: {"loss": 1.0})
        assert evaluated(records) == expected


@pytest.mark.parametrize(
    "measured",
    [
        *[1.0, np.ones(()), ["loss"]],
        *[{"loss": {"a": 1.0}}, {"loss": None}, {"loss": "1.5"}, {"loss": [1.0, None]}],
        *[{"loss": [[1.0], [1.0, 2.0]]}, {"loss": jax.random.key(0)}],
    ],
    ids=str,
)
def test_fit_refuses_what_an_evaluation_returns_and_saves_the_state(tmp_path, measured):
    with pytest.raises(
        ValueError, match=r"`fit\(evaluate=...\)` is a function that returns numbers"
    ):
        line_run(tmp_path, rows(2), 2, lambda state: measured)
    assert saved_steps(tmp_path) == [2]


def test_fit_saves_what_it_learned_of_data_that_ends_early(tmp_path):
    with pytest.raises(ValueError, match=r"ended after 3 of 5 steps.*`Loop\(steps=3\)`"):
        line_run(tmp_path, rows(3), 5)
    assert saved_steps(tmp_path) == [3]
    with pytest.raises(ValueError, match="The source gave no batch"):
        line_run(None, [], 5)


def test_fit_that_is_refused_leaves_word_of_the_run_before_it(tmp_path):
    step, told = line_fit("skip"), sl.Records(sinks=[])
    make = lambda: sl.init(lambda: {"w": jnp.ones(4)}, OPTIMIZER, step.strategy)
    sl.fit(step, make(), rows(2), sl.Loop(steps=2), folder=tmp_path, records=told, about={"a": 1})
    before = (tmp_path / "run.json").read_text()
    with pytest.raises(ValueError, match="has taken 2 steps already"):
        loop = sl.Loop(steps=1)
        sl.fit(step, make(), rows(2), loop, folder=tmp_path, records=told, about={"a": 2})
    assert (tmp_path / "run.json").read_text() == before and json.loads(before) == {"a": 1}


def test_fit_refuses_a_state_that_is_used_up():
    step = line_fit("skip")
    state = sl.init(lambda: {"w": jnp.ones(4)}, OPTIMIZER, step.strategy)
    step(state, rows(1)[0])
    with pytest.raises(ValueError, match="has been through a step already"):
        sl.fit(step, state, rows(1), sl.Loop(steps=1), records=sl.Records(sinks=[]))


def test_fit_asks_a_schedule_with_the_number_of_updates():
    _, records = line_run(None, rows(6, bad=[2, 3]), 6, watch={"rate": lambda n: 10.0 * n})
    rates = [record["rate"] for record in records if "rate" in record]
    assert rates == [0, 10, 10, 10, 20, 30]
    with pytest.raises(ValueError, match=r"watch=\{'rate': ...\}.*return a number"):
        line_run(None, rows(2), 2, watch={"rate": lambda n: np.ones(2)})


def test_sinks_of_two_runs_record_each_step_once(tmp_path):
    lines = sl.JsonLines(tmp_path / "metrics.jsonl")
    for first in (1, 3):
        for step in range(first, 6):
            lines({"step": step, "loss": 1.0 if step % 2 else float("nan")})
    read = [json.loads(line) for line in lines.path.read_text().splitlines()]
    assert [record["step"] for record in read] == [1, 2, 3, 4, 5]
    # JSON has no number that is none.
    assert [record["loss"] for record in read] == [1.0, None, 1.0, None, 1.0]


def test_fit_goes_back_a_checkpoint_after_two_identical_failures(tmp_path, capsys):
    bad = rows(20, bad=range(7, 21))
    for attempt in range(3):  # the first from nothing, two from step 6
        _, records, failure = short_fit(tmp_path, bad, nonfinite=3)
        assert "3 steps in a row" in failure and saved_steps(tmp_path) == [2, 4, 6]
        assert records[0]["step"] == (6 if attempt else 0)
    state, records, failure = short_fit(tmp_path, rows(20))
    assert failure is None and int(state.step) == 20
    assert records[0]["note"] == "resumed from the checkpoint of step 4"
    assert "it is put aside as `abandoned-6`" in records[1]["note"]
    assert (tmp_path / "checkpoints" / "abandoned-6" / "state").is_dir(), "nothing is deleted"
    assert {4, 6, 20} <= set(saved_steps(tmp_path))


def test_fit_keeps_the_checkpoint_that_took_the_place_of_an_abandoned_one(tmp_path):
    bad = rows(20, bad=range(7, 21))
    for _ in range(3):
        short_fit(tmp_path, bad, nonfinite=3)
    for _ in range(2):
        state, records, _ = short_fit(tmp_path, rows(6))
        assert int(state.step) == 6
    assert records[-1]["note"] == "the run has taken its 6 steps already"
    assert len(list((tmp_path / "checkpoints").glob("abandoned*"))) == 1


def test_a_profile_that_never_begins_is_no_silence(tmp_path):
    for steps, profile in ((4, (5, 3)), (6, (2, 1))):
        _, records, _ = short_fit(tmp_path, rows(steps), profile=profile)
        assert any("no profile is taken" in record.get("note", "") for record in records)


def test_fit_keeps_checkpoints_while_each_attempt_gets_further(tmp_path):
    for start in (7, 9, 11):  # each fails, and later than the one before
        short_fit(tmp_path, rows(20, bad=range(start, 21)), nonfinite=2)
    _, records, _ = short_fit(tmp_path, rows(20))
    assert records[0]["note"] == "resumed from the checkpoint of step 10"
    assert not list((tmp_path / "checkpoints").glob("abandoned*"))


def test_fit_ignores_a_damaged_failure_count(tmp_path, capfd):
    _folder.add_failure(tmp_path, 6)
    _folder.add_failure(tmp_path, 6)
    path = tmp_path / "failures.json"
    assert (_folder.count_failures(tmp_path, 6), _folder.count_failures(tmp_path, 4)) == (2, 0)
    content = path.read_bytes()
    for byte in range(len(content)):
        path.write_bytes(
            content[:byte] + bytes([content[byte] ^ 1 << byte % 8]) + content[byte + 1 :]
        )
        assert _folder.count_failures(tmp_path, 6) in (0, 2)
        assert "cannot be used" in capfd.readouterr().err


def test_fit_saves_its_steps_when_an_evaluation_fails(tmp_path):
    def failing(state):
        raise RuntimeError("no such file")

    with pytest.raises(RuntimeError, match="no such file"):
        fit(
            tmp_path,
            loop=dataclasses.replace(LOOP, save_every=100, evaluate_every=100),
            evaluate=failing,
        )
    with sl.Checkpoints(tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.latest() == 12


def test_fit_continues_when_a_record_cannot_be_written(capsys):
    def full(record):
        raise OSError(28, "No space left on device")

    state = sl.fit(STEP, start(), text(), LOOP, records=sl.Records(sinks=[full]))
    assert (
        int(state.step) == 12
        and "a record of step 2 could not be written" in capsys.readouterr().err
    )


def test_fit_keeps_the_given_state_if_the_checkpoint_does_not_match(undisturbed):
    wider = dataclasses.replace(CONFIG, width=32)
    other = sl.init(lambda: gpt.GPT(wider, rngs=nnx.Rngs(0)), OPTIMIZER, STRATEGY)
    with pytest.raises(ValueError, match="another model or optimizer"):
        sl.fit(STEP, other, text(), LOOP, folder=undisturbed[0], records=sl.Records(sinks=[]))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(other))


def test_fit_leaves_given_batches_at_the_next_unread_batch():
    seen = []

    def noting():
        for number, batch in enumerate(text()):
            seen.append(number)
            yield batch

    batches = sl.batches(noting(), STRATEGY)
    loop = dataclasses.replace(LOOP, steps=4)
    sl.fit(STEP, start(), batches, loop, records=sl.Records(sinks=[]))
    assert batches.state()["batches"] == 4
    expected, found = text()[4], next(batches)
    np.testing.assert_array_equal(found["tokens"], expected["tokens"])
    batches.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": "gs://bucket/run"}, "a bucket can be mounted"),
        ({"about": {"lr": np.float32(3)}}, "goes into checkpoints as JSON, which cannot hold it"),
        ({"folder": "runs/lr[1]"}, "would be taken for a pattern"),
    ],
)
def test_fit_refuses_unusable_folders_and_metadata_at_once(options, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        sl.fit(STEP, start(abstract=True), text(), LOOP, **options)


def test_fit_reads_watched_numbers_before_each_step(tmp_path):
    _, records = fit(
        None,
        loop=dataclasses.replace(LOOP, steps=2, log_every=1),
        evaluate=None,
        watch={"rate": lambda n: 10 * n},
    )
    assert [record["rate"] for record in records if "rate" in record] == [0.0, 10.0]


def test_fit_profiles_the_chosen_steps(tmp_path):
    fit(tmp_path, loop=dataclasses.replace(LOOP, steps=3, profile=(2, 1)), evaluate=None)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    with pytest.raises(ValueError, match="needs a folder for what it writes"):
        fit(None, loop=dataclasses.replace(LOOP, profile=(2, 1)))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("log_every", 1.5),
        ("save_every", None),
        ("profile", (3,)),
        ("nonfinite", True),
    ],
)
def test_loop_refuses_wrong_settings(field, value):
    with pytest.raises(ValueError, match=rf"`Loop\({field}="):
        dataclasses.replace(LOOP, **{field: value})


def test_fit_refuses_a_wrong_step_or_loop_by_name():
    with pytest.raises(ValueError, match="`loop` is int"):
        sl.fit(STEP, start(abstract=True), text(), 12)
    with pytest.raises(ValueError, match="`step` is function"):
        sl.fit(gpt.loss, start(abstract=True), text(), LOOP)


# Evaluation.


@pytest.mark.representative("data=8-options0", "data=2,model=4-options3")
@pytest.mark.long
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("data=8", {}),
        ("data=4,model=2", {}),
        ("data=8", {"zero": sl.Zero(3, small=0), "accumulate": 2}),
        ("data=2,model=4", {"zero": sl.Zero(3, small=0), "precision": "bf16"}),
    ],
)
def test_evaluation_loss_over_all_batches_matches_one_device(mesh, options):
    rules = sl.rules.data | (sl.rules.tensor if "model" in mesh else sl.AxisRules())
    strategy = sl.Strategy(mesh=mesh, rules=rules, **options)
    batches = text(3, seed=2)
    for number, batch in enumerate(batches):  # of which each weighs otherwise
        batch["mask"] = (np.arange(8) < 3 * number + 1).astype(np.float32) * np.ones(
            (8, 1), np.float32
        )
    found = sl.evaluation(held_out, strategy)(start(strategy), iter(batches))["loss"]
    with sl.unsharded():
        model = nnx.view(gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), deterministic=True)
        means = [gpt.loss(model, batch) for batch in batches]
    expected = sum(float(mean.total) for mean in means) / sum(float(mean.weight) for mean in means)
    assert found == pytest.approx(expected, rel=1e-2 if "precision" in options else 1e-5)


def test_evaluation_changes_no_state():
    state = start()
    before = bits(state)
    MEASURE(state, text(1))
    assert bits(state) == before


def test_evaluation_without_batches_is_refused():
    with pytest.raises(ValueError, match="no batch to evaluate on"):
        MEASURE(start(), [])


# Where records go.


def test_json_lines_survive_a_cut_line_and_repeated_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = sl.JsonLines(path)
    for step in (2, 4, 6):
        first({"step": step, "loss": np.float32(step)})
    path.write_text(path.read_text() + '{"step": 8, "lo')
    again = sl.JsonLines(path)
    again({"step": 4, "note": "resumed from the checkpoint of step 4"})
    again({"step": 6, "loss": 6.5})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line.get("loss")) for line in lines] == [
        (2, 2.0),
        (4, 4.0),
        (4, None),
        (6, 6.5),
    ]


@pytest.mark.parametrize("half", [b'{"step": 4, "lo', b"\xff\xfe", b'{"step": "4"}', b"[]"])
def test_json_lines_do_not_join_a_half_written_record_to_the_next(tmp_path, capsys, half):
    path = tmp_path / "metrics.jsonl"
    sink = sl.JsonLines(path)
    sink({"step": 2, "loss": 2.0})
    with path.open("ab") as file:
        file.write(half)  # until the disk was full
    sink({"step": 6, "loss": 6.0})
    sink({"step": 8, "loss": 8.0})
    lines = path.read_bytes().splitlines()
    assert lines[1] == half and [json.loads(lines[at])["step"] for at in (0, 2, 3)] == [2, 6, 8]
    sl.JsonLines(path)({"step": 8, "note": "resumed from the checkpoint of step 8"})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2, 6, 8, 8]
    assert "line 2 of" in (said := capsys.readouterr().err) and "is no record" in said


def test_json_lines_report_every_bit_flip(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    for step in range(10, 60, 10):
        sl.JsonLines(path)({"step": step, "loss": 0.5})
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
        sl.JsonLines(path)({"step": 90, "note": "resumed from the checkpoint of step 90"})
        assert "shardlib: line" in capsys.readouterr().err, at
    path.write_bytes(content)
    sl.JsonLines(path)({"step": 90, "note": "resumed from the checkpoint of step 90"})
    assert capsys.readouterr().err == "" and path.read_bytes().startswith(content)


def test_json_lines_drop_damaged_records_and_keep_foreign_records(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    for step in (2, 4):
        sl.JsonLines(path)({"step": step, "loss": 0.5})
    path.write_text(
        path.read_text().replace('"loss": 0.5', '"loss": 0.7', 1) + '{"step": 6, "mine": 1}\n'
    )
    sl.JsonLines(path)({"step": 8, "loss": 0.25})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [4, 6, 8]
    said = capsys.readouterr().err
    assert "line 1 of" in said and "does not match its checksum" in said
    assert "line 3 of" in said and "has no checksum" in said
    with pytest.raises(ValueError, match="without `crc32`, which the sink adds"):
        sl.JsonLines(path)({"step": 10, "crc32": "00000000"})


@pytest.mark.long
def test_fit_metrics_of_a_run_in_parts_equal_an_uninterrupted_run(undisturbed, tmp_path):
    lines = {}
    for name, parts in {"whole": [12], "parts": [6, 12]}.items():
        for steps in parts:
            sl.fit(
                STEP,
                start(),
                text(),
                dataclasses.replace(LOOP, steps=steps, save_every=6),
                folder=tmp_path / name,
            )
        lines[name] = numbers(
            map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        )
    assert lines["whole"] == lines["parts"] and len(lines["whole"]) == 6


def test_tensorboard_sink_writes_numbers_and_notes(tmp_path):
    pytest.importorskip("tensorboardX")
    sink = sl.TensorBoard(tmp_path)
    sink({"step": 1, "note": "hello"})
    sink({"step": 2, "loss": 1.5})
    for _ in range(300):  # it is written by a thread
        written = b"".join(path.read_bytes() for path in Path(tmp_path).iterdir())
        if b"loss" in written and b"hello" in written:
            return
        time.sleep(0.1)
    raise AssertionError(written)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    records = [
        {"step": 1, "note": "compiling the step"},
        {"step": 5, "loss": 2.34567, "tokens_per_second": 123456.0, "seconds_left": 75.0},
        {"step": 5, "evaluation/loss": 2.5},
        {"step": 10, "loss": 1.0},
    ]
    plain, terminal = io.StringIO(), Terminal()
    for file in (plain, terminal):
        bar = sl.Progress(10, file)
        for record in records:
            bar(record)
    assert plain.getvalue().splitlines() == [
        "step 1: compiling the step",
        "step 5/10  1 min 15 s left  loss 2.346  tokens/s 123k",
        "step 5, held out: loss 2.5",
        "step 10/10  loss 1",
    ]
    shown = re.sub(r"\x1b\[\d+m", "", terminal.getvalue())
    assert "████████████░░░░░░░░░░░░ 5/10  1 min 15 s left  loss 2.346" in shown
    assert terminal.getvalue().endswith("\n")


class Step:
    """What a step gives, which is ready from some moment on."""

    def __init__(self, ends, clock):
        self.ends, self.clock = ends, clock

    def is_ready(self):
        return self.clock[0] >= self.ends


@pytest.mark.parametrize("each", [1, 3, 7])
@pytest.mark.parametrize("ahead", [False, True], ids=["blocking", "ahead"])
def test_speed_is_right_from_the_first_record(monkeypatch, each, ahead):
    """Ten seconds to compile, then two a step, counted `each` at a time; whether a call returns
    before its step has ended.
    """
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    speed, told, waiting = Speed("tokens", None, STRATEGY), [], []
    for number in range(1, 22):
        waiting.append(Step(10.0 + 2 * (number - 1), clock))
        if not ahead or number == 1:
            clock[0] = max(clock[0], waiting[-1].ends)
        speed.begun(waiting[-1])
        if number % each == 0:
            for step in waiting:
                clock[0] = max(clock[0], step.ends)
                speed.count(50)
                told.append(speed.read(10))
            waiting = []
    told = [record for record in told if record]
    assert len(told) >= 14 and all(
        record == {"tokens_per_second": 25.0, "seconds_left": 20.0} for record in told
    )


def test_speed_ignores_steps_whose_end_was_not_observed(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    speed = Speed("tokens", None, STRATEGY)
    speed.begun(Step(1.0, clock)), speed.begun(Step(2.0, clock))
    clock[0] = 9.0  # the data was waited for
    speed.begun(Step(10.0, clock))
    speed.count(50), speed.count(50)
    assert speed.read(3) == {}
    clock[0] = 10.0
    speed.count(50)
    assert speed.read(2) == {"tokens_per_second": 50.0, "seconds_left": 2.0}


def test_speed_leaves_out_the_first_step_and_pauses_and_reports_mfu(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 100.0, 101.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    speed = Speed("tokens", 10.0, STRATEGY)
    speed.peak = 1000.0
    speed.count(50)  # compiling
    speed.count(50), speed.count(50)
    assert speed.read(4) == {
        "tokens_per_second": 100 / 3,
        "mfu": pytest.approx(1 / 3),
        "seconds_left": 6.0,
    }
    speed.pause()
    speed.count(50)
    assert speed.read(3) == {}
    speed.count(50)
    assert speed.read(2)["tokens_per_second"] == 50.0


@pytest.mark.long
def test_fit_refuses_fewer_steps_than_already_taken(tmp_path):
    fit(tmp_path, evaluate=None)
    with pytest.raises(
        ValueError, match=r"has taken 12 steps already, more than `Loop\(steps=8\)`"
    ):
        fit(tmp_path, loop=dataclasses.replace(LOOP, steps=8))


# One run at a time


def test_fit_refuses_a_folder_with_a_run_in_progress(tmp_path, monkeypatch):
    monkeypatch.setattr(_lock, "BEAT_SECONDS", 0.1)
    with _lock.hold(tmp_path / "occupied.json"):
        with pytest.raises(
            ValueError, match=rf"A run is under way in .*: process {os.getpid()} on .*Let it end"
        ):
            fit(tmp_path, about={"run": "another"})
        assert [path.name for path in tmp_path.iterdir()] == ["occupied.json"], (
            "run.json is the first one's"
        )


def test_fit_takes_over_the_folder_of_a_killed_run(tmp_path, monkeypatch, capfd):
    gone = subprocess.Popen(["true"])
    gone.wait()
    lock = tmp_path / "occupied.json"
    here = {**_lock._this_process(), "process": gone.pid, "nonce": "aa"}
    monkeypatch.setattr(_folder, "_DEAD_SECONDS", 1.5)
    for holder, waits in ((here, False), ({**here, "host": "elsewhere"}, True)):
        lock.write_text(_lock._sealed(holder))
        state, _ = fit(tmp_path, loop=dataclasses.replace(LOOP, steps=2), evaluate=None)
        assert int(state.step) == 2 and not lock.exists()
        assert ("still at work" in capfd.readouterr().err) == waits


def test_fit_refuses_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written to"):
        fit(tmp_path / "file" / "run")


def test_fit_stops_writing_after_it_loses_its_folder(tmp_path):
    others = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"

    def taken():
        for number, batch in enumerate(rows(12)):
            if number == 7:
                (tmp_path / "occupied.json").write_text("another's")
                others.mkdir()
            yield batch

    step = line_fit("skip")
    state = sl.init(lambda: {"w": jnp.ones(4)}, OPTIMIZER, step.strategy)
    tables = sl.TensorBoard(tmp_path / "tensorboard")
    sinks = [sl.JsonLines(tmp_path / "metrics.jsonl"), tables]
    with pytest.raises(
        TakenError, match=r"occupied.json is no longer held by this process.*writes nothing more"
    ):
        loop = sl.Loop(steps=12, log_every=1, save_every=3)
        sl.fit(
            step,
            state,
            taken(),
            loop,
            folder=tmp_path,
            about={"run": "first"},
            records=sl.Records(sinks=sinks),
        )
    recorded = [
        json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert max(recorded) < 8 and set(saved_steps(tmp_path)) <= {3, 6}
    assert (tmp_path / "occupied.json").read_text() == "another's" and others.is_dir(), (
        "what is another's stays"
    )


def test_fit_does_not_take_over_a_run_that_is_alive_but_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(_folder, "_DEAD_SECONDS", 0.5)
    holder = _lock._sealed({**_lock._this_process(), "nonce": "aa"})
    (tmp_path / "occupied.json").write_text(holder)
    with pytest.raises(
        ValueError, match=rf"no sign of life.*process {os.getpid()} on .*`kill -CONT`"
    ):
        short_fit(tmp_path, rows(2))
    assert (tmp_path / "occupied.json").read_text() == holder


def test_nonfinite_check_accepts_large_float64_values():
    rows = np.array([[1.0], [1e300], [np.inf]])
    assert _nonfinite._first_nonfinite_row(rows) == 2
    assert _nonfinite._first_nonfinite_row(rows[:2]) is None
    small = np.array([[1.0], [np.nan]], jnp.bfloat16)
    assert _nonfinite._first_nonfinite_row(small) == 1
