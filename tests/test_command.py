"""`python -m shardlib plan`, as a user types it: a report, or one message and exit code 2.

What is said of processes is shown by processes, and the rest in this one.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from shardlib.__main__ import main
from shardlib.planning import _command

ROOT = Path(__file__).parent.parent

STEPS = """
import jax, jax.numpy as jnp, optax
import shardlib as sl

print("noise of the user's")

def step_for(loss):
    def make(mesh):
        strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data)
        state = sl.init(lambda: {"w": jnp.zeros((64, 64))}, optax.adam(1e-3), strategy, abstract=True)
        return sl.train_step(loss, strategy), state, jax.ShapeDtypeStruct((16, 64), "float32")
    return make

good = step_for(lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2))
choosing = step_for(lambda model, x, rng: jnp.mean(x @ model["w"]) if jnp.sum(x) > 0 else 0.0)

def blocks(model, x, rng):
    block = sl.remat(lambda x: sl.checkpoint_name(jnp.tanh(x @ model["w"]), "squashed"))
    return jnp.mean(block(x) ** 2)

blocky = step_for(blocks)

def warning(mesh):
    import warnings
    warnings.warn("two\\nlines")
    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data, precision="bf16")
    state = sl.init(lambda: {"w": jnp.zeros((64, 64))}, optax.sgd(1e-3), strategy, abstract=True)
    loss = lambda model, x, rng: jnp.mean((x @ model["w"]) ** 2)
    return sl.train_step(loss, strategy), state, jax.ShapeDtypeStruct((16, 64), "float32")

def failing(mesh):
    return undefined

def thrifty(mesh):
    return good(mesh)[:2]

def leaving(mesh):
    raise SystemExit(3)

def wrong():
    return 3

class Run:
    name = "a run"

    def planned(self, target, mesh, dcn):
        return good(target.mesh(mesh or "data=4,other=2", dcn=dcn))

a_run = Run()

def gives_a_run(width=64):
    return Run()

def dying(mesh):
    import os, signal
    os.write(2, b"F0000 check failed: the compiler's last words")
    os.kill(os.getpid(), signal.SIGABRT)
"""


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "steps.py"
    path.write_text(STEPS)
    return path


def plan(make_step, *options):
    bare = {
        key: value for key, value in os.environ.items() if not key.startswith(("JAX", "XLA", "TPU"))
    }
    command = [sys.executable, "-m", "shardlib", "plan", str(make_step), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=bare, check=False)


@pytest.fixture
def plan_here(monkeypatch, capsys):
    """The command with its child in this process, which has simulated devices as well."""

    def run_child(argv, target, environment, noise):
        with pytest.MonkeyPatch.context() as patched, noise.open("w") as log:
            patched.setenv(_command._CHILD, environment[_command._CHILD])
            with (
                contextlib.redirect_stdout(log),
                contextlib.redirect_stderr(log),
                warnings.catch_warnings(action="ignore"),
            ):
                return main(argv)

    def run(make_step, *options):
        code = main(["plan", str(make_step), *map(str, options)])
        return subprocess.CompletedProcess([], code, *capsys.readouterr())

    monkeypatch.setattr(_command, "_run_child", run_child)
    monkeypatch.chdir(ROOT)
    return run


@pytest.mark.long
def test_plan_command_prints_a_report(steps):
    result = plan(f"{steps}:good", "--target", "cpu:8", "--mesh", "data=8")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("good on cpu:8: 8 devices") and "noise" not in result.stdout
    assert result.stderr == "compiling for cpu:8 ...\n"


@pytest.mark.parametrize(
    ("name", "options", "mesh"),
    [
        ("a_run", [], "data=4,other=2"),
        ("gives_a_run", ["--mesh", "data=8"], "data=8"),
    ],
)
def test_plan_command_plans_a_run_with_its_own_mesh(steps, name, options, mesh, plan_here):
    result = plan_here(f"{steps}:{name}", "--target", "cpu:8", "--json", *options)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["name"], found["mesh"]) == ("a run", mesh)


@pytest.mark.long
def test_plan_command_plans_a_trainer_config(tmp_path, plan_here):
    own = tmp_path / "small.py"
    own.write_text(SMALL_RUN)
    result = plan_here(own, "--target", "cpu:8")
    assert result.returncode == 0, result.stderr
    assert (
        result.stdout.startswith("small on cpu:8: 8 devices")
        and "mesh data=2,model=4" in result.stdout
    )


SMALL_RUN = """
import dataclasses
import shardlib as sl
from examples.configs import tiny

def run():
    base = tiny.run()
    model = dataclasses.replace(base.model, layers=1, width=32, heads=4, hidden=64, context=32, vocab=256)
    strategy = sl.Strategy(mesh="data=2,model=4", rules=sl.rules.data | sl.rules.tensor, zero=1)
    return dataclasses.replace(base, name="small", model=model, strategy=strategy)
"""


def test_plan_command_prints_json(steps, plan_here):
    result = plan_here(f"{steps}:good", "--target", "cpu:4", "--json")
    found = json.loads(result.stdout)
    assert (
        found["mesh"] == "data=4"
        and found["memory"]["kinds"]["parameters"] == 64 * 64 * 4
        and found["fits"]
    )


@pytest.mark.parametrize("option", [("--points", "2"), ("--compile-all",), ("--svg", "x.svg")])
def test_plan_command_refuses_options_of_a_frontier_without_one(steps, plan_here, option):
    result = plan_here(f"{steps}:good", "--target", "cpu:4", *option)
    assert result.returncode == 2 and "add `--frontier`" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory", "banana"], "`--memory banana` is no size of at least one byte: write a"),
        (["--memory", "0GiB"], "`--memory 0GiB` is no size"),
        (["--memory", ""], "`--memory ` is no size"),
        (["--svg", "nowhere/x.svg"], "`--svg nowhere/x.svg`: there is no folder `nowhere`"),
        (["--svg", "docs"], "`--svg docs` is a folder: name a file in it."),
        (["--svg", ""], "is a folder: name a file in it."),
    ],
)
def test_plan_command_refuses_options_of_a_frontier_before_it_compiles(
    steps, plan_here, monkeypatch, options, words
):
    """What it compiled would be lost, and an exit code of 1 would say that nothing fits."""
    monkeypatch.setattr(_command, "_run_child", None)
    result = plan_here(f"{steps}:blocky", "--target", "cpu:4", "--frontier", *options)
    assert result.returncode == 2 and words in result.stderr
    assert "Traceback" not in result.stderr and not result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cache", __file__], "is no folder that can be written to: name one"),
        (["--cache", f"{__file__}/sub"], "is no folder that can be written to: name one"),
        (["--cache", "~nobody-of-that-name/x"], "`--cache ~nobody-of-that-name/x`: "),
        (["--cache", ""], "`--cache ` is no folder"),
    ],
)
def test_plan_command_refuses_a_cache_that_can_keep_nothing(steps, plan_here, options, words):
    result = plan_here(f"{steps}:good", "--target", "cpu:4", *options)
    assert result.returncode == 2 and words in result.stderr and not result.stdout


def test_plan_command_hands_warnings_on(steps):
    result = plan(f"{steps}:warning", "--target", "cpu:4", "--no-cache")
    told = [line for line in result.stderr.splitlines() if "Warning" in line]
    assert result.returncode == 0 and len(told) == 2
    assert re.search(r"^shardlib: .*steps.py:\d+: UserWarning: two lines$", told[0])
    assert told[1].startswith("shardlib: ShardingWarning: The model gets `w` in bfloat16")


@pytest.mark.long
def test_plan_command_prints_and_draws_a_frontier(steps, tmp_path, plan_here):
    picture = tmp_path / "frontier.svg"
    asked = ("--target", "cpu:4", "--no-cache", "--frontier", "--points", "1", "--svg", picture)
    result = plan(f"{steps}:blocky", *map(str, asked))
    assert result.returncode == 0 and "takes" in result.stdout.splitlines()[-1]
    assert "compiled" in result.stdout and picture.read_text().startswith("<svg")
    # What is done is told while it is done.
    assert 'with "none" (2 of 2 compiled)' in result.stderr
    result = plan_here(f"{steps}:blocky", *asked[:6], "--memory", "1KiB")
    assert result.returncode == 1 and "fits" not in result.stdout and "too much" in result.stdout
    result = plan_here(f"{steps}:blocky", *asked, "--memory", "1GiB")
    assert result.returncode == 0 and "fits" in result.stdout
    result = plan_here(f"{steps}:blocky", *asked[:4], "--memory", "1KiB", "--json")
    assert result.returncode == 1 and json.loads(result.stdout)["best"] is None


@pytest.mark.long
def test_plan_command_finds_the_largest_microbatch(steps, plan_here):
    asked = ("--target", "cpu:4", "--no-cache", "--largest-microbatch", "--memory", "1GiB")
    result = plan_here(f"{steps}:good", *asked, "--json")
    assert result.returncode == 0 and json.loads(result.stdout)["best"]["microbatch"] == 4
    result = plan_here(f"{steps}:good", *asked[:4])
    assert result.returncode == 2 and "say what a step may take" in result.stderr


@pytest.mark.parametrize(
    "function, options, message",
    [
        ("good", ["--target", "tpu:v9:4x4"], "`tpu:v9:4x4` is no target"),
        (
            "good",
            ["--target", "cpu:8", "--mesh", "data=4"],
            "`data=4` is 4 devices, and `cpu:8` has 8",
        ),
        ("good", ["--target", "cpu:8", "--mesh", "data=8", "--dcn", "pod"], "no axis `pod`"),
        ("good", ["--target", "cpu:6"], "16 examples does not split over `data=6`"),
        (
            "nothing",
            ["--target", "cpu:8"],
            "has no function and no run `nothing`; it has `step_for`",
        ),
        ("wrong", ["--target", "cpu:8"], "takes no mesh, so it must return a run"),
        ("choosing", ["--target", "cpu:8"], "needs values while it is traced"),
        ("failing", ["--target", "cpu:8"], "NameError: name 'undefined' is not defined"),
        ("thrifty", ["--target", "cpu:8"], "must return a step, its state and its batch"),
    ],
)
def test_plan_command_reports_a_mistake_as_one_message(
    steps, function, options, message, plan_here
):
    result = plan_here(f"{steps}:{function}", *options)
    assert result.returncode == 2 and result.stdout == ""
    said = result.stderr.removeprefix(f"compiling for {options[1]} ...\n")
    assert said.startswith("shardlib plan: ") and message in said and "Traceback" not in said
    if function == "failing":
        assert f"steps.py:{STEPS.splitlines().index('    return undefined') + 1}: NameError" in said
    if function == "choosing":
        assert (
            f"steps.py:{[line[:8] for line in STEPS.splitlines()].index('choosing') + 1}, and"
            in said
        )


@pytest.mark.representative("dying-died (signal SIGABRT). Its last words:")
@pytest.mark.long
@pytest.mark.parametrize(
    "function, message",
    [
        ("leaving", "ended the process"),
        ("dying", "died (signal SIGABRT). Its last words:"),
    ],
)
def test_plan_command_outlives_its_child(steps, function, message):
    result = plan(f"{steps}:{function}", "--target", "cpu:8")
    assert result.returncode == 2 and result.stdout == ""
    said = result.stderr.removeprefix("compiling for cpu:8 ...\n")
    assert said.startswith("shardlib plan: ") and message in said and "Traceback" not in said
    if function == "dying":
        assert "\n  F0000 check failed: the compiler's last words\n" in said


def test_plan_command_names_missing_functions_and_files(steps, plan_here):
    cases = [
        ("nowhere.py:make", "no file `nowhere.py`"),
        ("nowhere.py", "no file `nowhere.py`"),
        (str(steps), "has no function and no run `run`; it has `step_for`"),
        ("steps", "names no step and no run"),
    ]
    for make_step, message in cases:
        result = plan_here(make_step, "--target", "cpu:8")
        assert result.returncode == 2 and message in result.stderr


@pytest.mark.exhaustive
@pytest.mark.tpu_compiler
def test_plan_command_on_the_gpt_example_agrees_with_the_tpu_compiler():
    result = plan(
        "examples/gpt.py:gpt2_124m", "--target", "tpu:v5e:2x4", "--mesh", "data=2,model=4", "--json"
    )
    found = json.loads(result.stdout)
    memory = found["memory"]
    # The compiler's own account.
    assert abs(memory["total_bytes"] / memory["stated_bytes"] - 1) < 0.01
    assert memory["kinds"]["unattributed"] < 0.05 * memory["total_bytes"]
    estimated, there = found["estimate"]["kinds"]["parameters"], memory["kinds"]["parameters"]
    assert estimated == pytest.approx(there, rel=0.03)  # biases are whole on every device
    kept = sum(memory["most"][kind] for kind in found["estimate"]["kinds"])
    # As the docs say.
    assert sum(found["estimate"]["kinds"].values()) == pytest.approx(kept, rel=0.05)
    assert found["estimate"]["total_bytes"] == pytest.approx(memory["total_bytes"], rel=0.11)
    assert result.stderr.splitlines() == ["compiling for tpu:v5e:2x4 ..."]
