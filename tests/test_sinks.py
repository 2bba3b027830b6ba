"""Where records go when somebody has closed the terminal, filled the disk, or has a narrow one."""

import io
import json
import os
import stat
import sys

import pytest

import shardlib as sl
from shardlib import _progress
from shardlib._text import terminal_width, text_width
from shardlib.train._recorder import Recorder


class Closed(io.StringIO):
    """A standard error that nobody reads any more."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self):
        raise BrokenPipeError(32, "Broken pipe")


def test_a_broken_standard_error_ends_no_work(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Closed())
    kept = []
    recorder = Recorder([sl.Progress(10), kept.append])
    for step in (1, 2):
        recorder.record({"step": step, "loss": 1.0})
    assert [record["step"] for record in kept] == [1, 2]
    _progress.log("data", "reading")
    now = iter(range(0, 1000, 10))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    closed = io.StringIO()
    closed.close()
    for unread in (Closed(), closed, None):
        monkeypatch.setattr(sys, "stderr", unread)
        _progress.say("reading")
        Recorder([sl.Progress(10)]).record({"step": 1, "loss": 1.0})
        with _progress.Progress("data", "reading", 100) as progress:
            progress.at(10)


def losses(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], line.get("loss")) for line in lines]


def test_an_attempt_that_cannot_write_at_first_still_drops_what_came_before(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    first = sl.JsonLines(path)
    for step in range(1, 9):
        first({"step": step, "loss": 1.0})
    again = sl.JsonLines(path)
    with monkeypatch.context() as full:

        def refuse(self, data):
            raise OSError(28, "No space left on device")

        full.setattr("pathlib.Path.write_bytes", refuse)
        for step in (4, 5):
            with pytest.raises(OSError, match="No space"):
                again({"step": step, "loss": 2.0})
    again({"step": 6, "loss": 2.0})
    assert losses(path) == [(1, 1.0), (2, 1.0), (3, 1.0), (6, 2.0)]


def test_a_file_of_records_keeps_its_mode_its_link_and_its_neighbours(tmp_path):
    target, link = tmp_path / "far.jsonl", tmp_path / "metrics.jsonl"
    mine = tmp_path / "metrics.rewritten"
    mine.write_text("mine")
    target.touch()
    target.chmod(0o664)
    link.symlink_to(target)
    for step in (1, 2, 2):
        sl.JsonLines(link)({"step": step, "loss": 1.0})
    assert link.is_symlink() and losses(target) == [(1, 1.0), (2, 1.0)]
    assert stat.S_IMODE(target.stat().st_mode) == 0o664 and mine.read_text() == "mine"
    assert {file.name for file in tmp_path.iterdir()} == {target.name, link.name, mine.name}


class Terminal(io.TextIOWrapper):
    def __init__(self, encoding="utf-8"):
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self):
        return True

    def shown(self):
        self.flush()
        text = self.buffer.getvalue().decode(self.encoding)
        return [line.rstrip("\n") for line in text.split("\r\x1b[K")[1:]]


NUMBERS = {"loss": 2.5, "tokens_per_second": 123456.0, "seconds_left": 59.7}


@pytest.mark.parametrize("columns", [10, 20, 40, 80, 200])
def test_a_bar_and_the_loss_fit_the_terminal(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    file = Terminal()
    sl.Progress(10, file)({"step": 5, **NUMBERS, "genauigkeit_注意力" * 9: 1.0})
    (line,) = file.shown()
    assert text_width(line) < columns
    assert columns < 40 or ("5/10  1 min 00 s left  loss 2" in line and "█" in line)


def test_a_bar_is_written_in_letters_that_the_terminal_has(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    for encoding in ("latin-1", "ascii"):
        file = Terminal(encoding)
        bar = sl.Progress(10, file, width=8)
        bar({"step": 5, **NUMBERS})
        bar({"step": 5, "note": "résumé 注"})
        assert file.shown()[0].startswith("####.... 5/10  1 min 00 s left  loss 2.5")


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *[(float("inf"), "inf"), (float("-inf"), "-inf"), (float("nan"), "nan")],
        *[
            (999_950.0, "1M"),
            (999_400.0, "999k"),
            (9999.0, "9999"),
            (9999.7, "10k"),
            (-123_456.0, "-123k"),
        ],
    ],
)
def test_numbers_are_short(value, shown):
    file = io.StringIO()
    for left in (float("inf"), float("nan"), 59.2):
        sl.Progress(10, file)({"step": 5, "loss": value, "seconds_left": left})
    lines = file.getvalue().splitlines()
    assert lines == [f"step 5/10  {left} left  loss {shown}" for left in ("inf s", "nan s", "59 s")]


def test_a_file_that_no_bar_can_be_written_to_is_refused():
    class OnlyWrites:
        def write(self, text):
            pass

    with pytest.raises(ValueError, match=r"`Progress\(file=.*a file to write to"):
        sl.Progress(10, OnlyWrites())


def test_what_is_no_terminal_has_no_width_whatever_its_number_is(monkeypatch):
    """A notebook's output has the number of the terminal that the server was started in."""
    monkeypatch.delenv("COLUMNS", raising=False)

    class Output(io.StringIO):
        def fileno(self):
            return 1

    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((40, 20)))
    assert terminal_width(Output()) is None
    output = Output()
    output.isatty = lambda: True
    assert terminal_width(output) == 40
