"""The cache of plans: what is kept of a compilation, and when a step is compiled anew."""

import argparse
import gzip
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import shardlib as sl
from shardlib.compiled import _compile
from shardlib.planning import _command


def step_and_inputs(rows=8, rate=0.1, scale=1.0):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(
        lambda: {"w": jnp.zeros((rows, rows))}, optax.sgd(rate), strategy, abstract=True
    )
    step = sl.train_step(lambda model, x, rng: scale * jnp.mean((x @ model["w"]) ** 2), strategy)
    return step, state, jax.ShapeDtypeStruct((16, rows), "float32")


def planned(cache=None, **changes):
    """The plan of the step."""
    return sl.plan(*step_and_inputs(**changes), cache=cache)


def same(plan, other):
    """Whether two plans say the same, but for how long they took."""
    seconds = ("lower_seconds", "compile_seconds", "compiled_before")
    told = [{k: v for k, v in one.as_dict().items() if k not in seconds} for one in (plan, other)]
    return told[0] == told[1]


def test_plan_cache_compiles_a_step_only_once(tmp_path, monkeypatch):
    first = planned(tmp_path)
    assert not first.compiled_before
    monkeypatch.setattr(_compile, "_write", None)  # no compiler can be asked
    second = planned(str(tmp_path))  # from another line, which makes no difference
    assert second.compiled_before
    assert second.compile_seconds == first.compile_seconds
    assert same(first, second)
    assert "by an earlier plan" in str(second) and "by an earlier plan" not in str(first)


@pytest.mark.long
def test_plan_cache_recompiles_for_another_program_or_flag(tmp_path, monkeypatch):
    planned(tmp_path)
    assert not planned(tmp_path, rows=16).compiled_before
    assert not planned(tmp_path, rate=0.2).compiled_before
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert not planned(tmp_path).compiled_before
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_optimization_level", "O1"),
        ("jax_memory_fitting_level", "O1"),
        ("jax_disable_most_optimizations", True),
    ],
)
def test_plan_cache_recompiles_at_another_level_of_optimization(setting, value, tmp_path):
    planned(tmp_path)
    before = jax.config.values[setting]
    jax.config.update(setting, value)
    try:
        assert not planned(tmp_path).compiled_before
    finally:
        jax.config.update(setting, before)
    assert planned(tmp_path).compiled_before


def test_plan_cache_is_off_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        assert not planned().compiled_before
    assert not list(tmp_path.iterdir())


@pytest.mark.representative()
@pytest.mark.long("no gzip")
@pytest.mark.parametrize("content", [b"", b"no gzip", gzip.compress(b'{"text": "', mtime=0), None])
def test_plan_cache_replaces_a_damaged_file(tmp_path, content):
    first = planned(tmp_path)
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if content is None else content)
    again = planned(tmp_path)
    assert not again.compiled_before
    assert same(first, again)
    assert planned(tmp_path).compiled_before


def test_plan_cache_warns_of_a_folder_that_cannot_be_created(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be kept in .*file/plans .*another folder"):
        assert not planned(tmp_path / "file" / "plans").compiled_before


def test_plan_cache_refuses_a_folder_that_is_not_a_path():
    with pytest.raises(ValueError, match=r"plan\(cache=3\).*a folder"):
        planned(3)


@pytest.mark.long
def test_plan_command_reuses_its_cache(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import jax, jax.numpy as jnp, optax, shardlib as sl\n"
        "def make(mesh):\n"
        "    strategy = sl.Strategy(mesh=mesh, rules=sl.rules.data)\n"
        "    state = sl.init(\n"
        "        lambda: {'w': jnp.zeros((8, 8))}, optax.sgd(0.1), strategy, abstract=True\n"
        "    )\n"
        "    loss = lambda model, x, rng: jnp.mean((x @ model['w']) ** 2)\n"
        "    return sl.train_step(loss, strategy), state, jax.ShapeDtypeStruct((8, 8), 'float32')\n"
    )

    def report(*options):
        command = [sys.executable, "-m", "shardlib", "plan", "mine.py:make", "--target", "cpu:2"]
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert "by an earlier plan" not in report("--cache", "kept")
    assert "by an earlier plan" in report("--cache", "kept")


def test_plan_command_chooses_the_cache_folder_from_its_options(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parser = argparse.ArgumentParser()
    _command.add_command(parser.add_subparsers())
    step, *_ = step_and_inputs()
    given = ["plan", "mine.py:make", "--target", "cpu:2"]
    given_folder = parser.parse_args([*given, "--cache", "~/kept"])
    assert _command._cache(given_folder, step) == Path.home() / "kept"
    assert _command._cache(parser.parse_args(given), step) == tmp_path / "shardlib" / "plans"
    assert _command._cache(parser.parse_args(given), jax.jit(lambda x: x)) is None
    assert _command._cache(parser.parse_args([*given, "--no-cache"]), step) is None


def test_plan_cache_refuses_functions_that_are_not_a_step(tmp_path):
    with pytest.raises(ValueError, match=r"plan\(cache=...\).*leave `cache` out"):
        sl.plan(jax.jit(lambda state, x: x), {}, jnp.ones(3), cache=tmp_path)
