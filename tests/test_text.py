"""Printed descriptions fit the terminal, 80 columns wide or narrower, and are not shortened
elsewhere.
"""

import io
import re
import sys

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import shardlib as sl
from models import gpt
from shardlib import _progress
from shardlib._text import coloured, shortened, table, terminal_width, text_width, wrapped
from shardlib.planning import _command

CONFIG = gpt.tiny(layers=2, width=64, heads=4, context=32, vocab=256)
WIDTHS = [80, 60]


@pytest.fixture(params=WIDTHS)
def width(request, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(request.param))
    return request.param


def widest(text):
    return max(map(len, text.splitlines()))


@pytest.fixture(scope="module")
def state():
    strategy = sl.Strategy(
        mesh="data=2,model=4", rules=sl.rules.data | sl.rules.tensor, zero=sl.Zero(1, small=64)
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adafactor(1e-3))
    return sl.init(lambda: gpt.GPT(CONFIG, rngs=nnx.Rngs(0)), optimizer, strategy, abstract=True)


@pytest.fixture(scope="module")
def plan(state):
    step = sl.train_step(gpt.loss, state.layout.strategy)
    guess = sl.estimate(CONFIG.decoder, examples=4, parallelism=sl.planning.Parallelism(tensor=4))
    return sl.plan(
        step, state, {"tokens": jax.ShapeDtypeStruct((8, 33), "int32")}, "cpu:8", estimate=guess
    )


def test_describe_fits_the_terminal_width(state, width):
    found = sl.describe(state)
    text = str(found)
    assert widest(text) <= width
    for row in found.rows:  # nothing is left out that the array is known by
        assert row.path.split("/")[-1][-3:] in text
        for word in row.remark.split():
            assert word in text


@pytest.mark.long
def test_plan_and_estimate_fit_80_columns(plan, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = str(plan)
    assert widest(text) <= 80 and widest(str(plan.estimate)) <= 80
    titles = (
        "memory per device",
        "communication per step",
        "ZeRO, by formula",
        "the most at any moment",
    )
    for words in (*titles, "sends", "because of", "all over model"):
        assert words in text


@pytest.mark.long
def test_text_is_not_shortened_without_a_terminal_width(plan, state, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert "…" not in str(sl.describe(state)) and widest(str(sl.describe(state))) > 80
    assert widest(str(plan)) > 80


@pytest.mark.parametrize("columns", [120, 80, 40, 12])
@pytest.mark.parametrize("corpus", ["a corpus with a long name", "一个名字很长的语料库"])
def test_progress_bar_stays_within_its_line(monkeypatch, columns, corpus):
    terminal, now = io.StringIO(), iter(range(0, 100, 10))
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = _progress.Progress("data", f"reading 1,234 files of {corpus}", 1 << 40)
    bar.at(1 << 30), bar.at(1 << 36)
    lines = terminal.getvalue().split("\r\x1b[K")[1:]
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in lines]  # colours take no room
    assert len(lines) == 2 and all(0 < text_width(line) < columns for line in lines)
    assert columns < 120 or ("░" in lines[1] and lines[1].endswith("s left"))


def test_colours_are_for_terminals_that_have_them(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    file, terminal = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    assert coloured("bar", "green", file) == "bar"
    assert coloured("bar", "green", terminal) == "\x1b[32mbar\x1b[0m"
    report = "step on cpu:8\nmesh data=8\n\nmemory\n  parameters  1 KiB  ██▌\n\nnothing was run"
    monkeypatch.setattr(sys, "stdout", terminal)
    assert _command._in_colours(report) == (
        "\x1b[1mstep on cpu:8\x1b[0m\nmesh data=8\n\n"
        "\x1b[1mmemory\x1b[0m\n  parameters  1 KiB  \x1b[32m██▌\x1b[0m\n\nnothing was run"
    )
    for name, value in (("TERM", "dumb"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
        assert _command._in_colours(report) == report


def test_a_terminal_without_blocks_is_shown_others(monkeypatch, capsys):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", file)
    _command._print("memory\n  parameters  1 KiB  ██▌▏")
    file.flush()
    assert file.buffer.getvalue() == b"memory\n  parameters  1 KiB  ####\n"


def test_terminal_width_is_read_from_the_environment_or_terminal(monkeypatch, tmp_path):
    for said, width in [("80", 80), ("0", None), ("wide", None), ("9" * 5000, None), ("", None)]:
        monkeypatch.setenv("COLUMNS", said)
        assert terminal_width(io.StringIO()) == width
    with (tmp_path / "file").open("w") as file:
        assert terminal_width(file) is None


def test_text_tables_shorten_words_and_then_drop_columns():
    rows = [("path", "dtype", "bytes", "why"), ("a" * 30, "float32", "1,024", "b" * 30)]
    assert widest(table(rows, width=80, shorten=(0, 3))) == len("a" * 30) + 2 + 7 + 2 + 5 + 2 + 30
    for width in (70, 60, 50, 46):
        text = table(rows, right=(2,), width=width, shorten=(0, 3), drop=(1,))
        assert widest(text) <= width and "1,024" in text and "…" in text and "float32" in text
    narrow = table(rows, right=(2,), width=40, shorten=(0, 3), drop=(1,))
    assert widest(narrow) <= 40 and "float32" not in narrow and "1,024" in narrow
    assert [len(shortened("abcdefgh", size)) for size in (1, 2, 3, 7, 8, 9)] == [1, 2, 3, 7, 8, 8]
    assert wrapped("one two three", None) == "one two three"
    assert wrapped("one two three " * 9, 40, "- ", "  ").splitlines()[1].startswith("  ")


@pytest.mark.parametrize(
    "text", ["注意力/查询/内核", "층/가중치/커널", "e\u0301tat/couche/noyau", "ＡＢＣ"]
)
def test_wide_letters_take_their_columns(text):
    lines = table([(text, "4"), ("layers/kernel/bias", "16")], right=(1,)).splitlines()
    assert len(set(map(text_width, lines))) == 1
    for width in range(2, text_width(text) + 2):
        fits = shortened(text, width)
        assert width - 2 <= min(text_width(fits), text_width(text)) and text_width(fits) <= width
    lines = table([(text * 9, "x")], width=40, shorten=(0,)).splitlines()
    assert all(text_width(line) <= 40 for line in lines)


def test_describe_of_a_tiny_model_fits_the_terminal_width(width):
    strategy = sl.Strategy(mesh="data=8", rules=sl.rules.data)
    state = sl.init(lambda: {"w": jnp.zeros(8)}, optax.sgd(0.1), strategy, abstract=True)
    assert widest(str(sl.describe(state))) <= width
