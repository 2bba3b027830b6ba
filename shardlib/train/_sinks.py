"""Where the records of a run go: a file of JSON, curves, a bar on a terminal.

A record is a dict with the step and, by name, numbers or lists of them; or with a `note` in words:

    {"step": 20, "loss": 1.5, "tokens_per_second": 81920.0, "seconds_left": 42.0}
    {"step": 20, "evaluation/loss": 1.7}
    {"step": 20, "note": "resumed from the checkpoint of step 20"}

A sink is anything that may be called with one. Those here know that a run may be resumed: what an
earlier attempt recorded of the steps that are taken again is dropped at the first record.
"""

import contextlib
import json
import math
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import numpy as np

from shardlib._progress import say
from shardlib._text import (
    CLEAR_LINE,
    bar,
    beginning,
    coloured,
    encodable,
    is_terminal,
    terminal_width,
)
from shardlib.checks import _arguments as check

# Numbers from here on are shortened by a letter for thousands, millions and so on.
_LEAST_SHORTENED = 9_999.5  # which four digits would round to 1e+04
_LETTERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# How wide a bar's line may be where the width of the terminal cannot be known.
_DEFAULT_COLUMNS = 100

# What a bar asks of the file that it is written to.
_OF_FILES = ("write", "flush", "isatty")

Record = Mapping[str, Any]
Sink = Callable[[Record], None]


class JsonLines:
    """A file with one line of JSON per record.

    A run that is resumed goes on in the same file: what an earlier attempt wrote of the steps that
    are taken again is dropped. So is a line that was damaged, such as one half written on a full
    disk, and that is said on standard error. To tell these, each line ends with a checksum of what
    precedes it, `crc32`.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (10, 20, 20):  # the last is of an attempt that was resumed from step 10
    ...         JsonLines(f"{folder}/metrics.jsonl")({"step": step, "loss": 1.5})
    ...     print(pathlib.Path(folder, "metrics.jsonl").read_text(), end="")
    {"step": 10, "loss": 1.5, "crc32": "17f64683"}
    {"step": 20, "loss": 1.5, "crc32": "3e3ef271"}
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = check.path("JsonLines", "path", path)
        self._last_step: int | None = None
        # From which step on records of an earlier attempt are yet to be dropped.
        self._drop_from_step: int | None = None

    def __call__(self, record: Record) -> None:
        """Add a line."""
        _check_record("JsonLines", record)
        if "crc32" in record:
            raise check.refusal(
                "JsonLines",
                "record",
                record,
                "a record without `crc32`, which the sink adds itself",
            )
        if _begins_attempt(record, self._last_step):
            self._drop_from_step = _earlier(self._drop_from_step, _first_step_anew(record))
        if self._drop_from_step is not None:
            # If that fails, as on a full disk, the next record tries again.
            self._drop_from(self._drop_from_step)
            self._drop_from_step = None
        self._last_step = record["step"]
        line = json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False)
        with self.path.open("ab") as file:
            # A line of its own, even after one that a full disk cut off.
            separator = b""
            if self._ends_within_a_line():
                separator = b"\n"
            file.write(separator + _with_checksum(line.encode()) + b"\n")

    def _ends_within_a_line(self) -> bool:
        """Whether the last record was written in part, without the end of its line."""
        # An empty file has no last byte to look at.
        if not self.path.stat().st_size:
            return False
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"

    def _drop_from(self, step: int) -> None:
        """Rewrite the file without damaged lines and without records of this step or later ones.

        The file is replaced at once, so that one who reads it sees the old one or the new.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        kept, previous_step = [], 0
        for number, line in enumerate(self.path.read_bytes().splitlines(), start=1):
            line_step = self._checked_step(number, line)
            if line_step is None:
                continue
            # Records are written in the order of their steps: a smaller one is damaged or foreign.
            if line_step < previous_step:
                self._warn(
                    number,
                    line,
                    f"is of a step before that of the record above it, {previous_step}",
                )
            previous_step = line_step
            if line_step < step:
                kept.append(line + b"\n")
        # The file itself, which the path may be a link to.
        file = self.path.resolve()
        rewritten = file.with_name(f"{file.name}.rewritten")
        rewritten.write_bytes(b"".join(kept))
        with contextlib.suppress(OSError):  # some file systems have no modes
            shutil.copymode(file, rewritten)
        rewritten.replace(file)

    def _checked_step(self, number: int, line: bytes) -> int | None:
        """The step of a line's record; None if the line is to be left out, which is said.

        A line without a checksum stays, since another program may have written it.
        """
        step = _step_of(line)
        if step is None:
            self._warn(number, line, "is no record, and is left out")
            return None
        intact = _matches_checksum(line)
        if intact is None:
            self._warn(number, line, "has no checksum: another program wrote it, or it was damaged")
        elif not intact:
            self._warn(
                number, line, "does not match its checksum, hence was damaged, and is left out"
            )
            return None
        return step

    def _warn(self, number: int, line: bytes, what: str) -> None:
        """Say on standard error what is wrong with a line, with its number and its beginning."""
        shown = line[:60].decode(errors="replace")
        say(f"line {number} of {self.path} {what}: {shown}")


# A line with a checksum: what precedes it, less the closing brace, and the checksum.
_CHECKSUM = re.compile(rb'(?P<record>.*), "crc32": "(?P<checksum>[0-9a-f]{8})"}')


def _with_checksum(line: bytes) -> bytes:
    """A JSON object with one more entry at its end, the checksum of the object without it.

    The closing brace is cut off for the entry, and comes after it again.
    """
    return line[:-1] + b', "crc32": "%08x"}' % zlib.crc32(line)


def _matches_checksum(line: bytes) -> bool | None:
    """Whether a line is as it was written; None for a line without a checksum."""
    match = _CHECKSUM.fullmatch(line)
    if match is None:
        return None
    return zlib.crc32(match["record"] + b"}") == int(match["checksum"], 16)


def _step_of(line: bytes) -> int | None:
    """The step of a record; None for a line that was cut off while it was written, or damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    # `True` is an `int` too.
    if type(step) is not int:
        return None
    return step


class TensorBoard:
    """A sink: curves for TensorBoard, in `folder`; needs `pip install "shardlib[train]"`.

    Each number of a record is a curve, each number of a list one of a group of curves, and notes
    are texts.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check.path("TensorBoard", "folder", folder)
        try:
            from tensorboardX import SummaryWriter  # an optional dependency
        except ImportError as error:
            raise ModuleNotFoundError(
                'Writing for TensorBoard needs `tensorboardX`: pip install "shardlib[train]"'
            ) from error
        # The writer is made at the first record, whose step says what to drop.
        self._make = SummaryWriter
        self._folder, self._writer = str(folder), None
        self._last_step: int | None = None
        # From which step on curves of an earlier attempt are yet to be dropped.
        self._drop_from_step: int | None = None

    def __call__(self, record: Record) -> None:
        """Add a point to each curve; what an earlier attempt drew beyond this step is dropped."""
        _check_record("TensorBoard", record)
        step = record["step"]
        if _begins_attempt(record, self._last_step):
            self._drop_from_step = _earlier(self._drop_from_step, _first_step_anew(record))
            if self._writer is not None:
                self._writer.close()
                self._writer = None
        self._last_step = step
        if self._writer is None:
            self._writer = self._make(self._folder, purge_step=self._drop_from_step, flush_secs=1)
            self._drop_from_step = None
        for name, value in record.items():
            if name == "note":
                self._writer.add_text(name, value, step)
            elif name != "step":
                self._add_curves(name, value, step)
        # So that nothing waits to be written by the time that the folder may be another run's.
        self._writer.flush()

    def _add_curves(self, name: str, value: Any, step: int) -> None:
        """Add a point to the curve of a number, or to one curve for each number of a list.

        A list, such as the loads of experts, is a group of curves that are drawn together.
        """
        assert self._writer is not None
        if not np.ndim(value):
            self._writer.add_scalar(name.rstrip("/"), value, step)
            return
        for index, number in enumerate(np.ravel(value)):
            self._writer.add_scalar(f"{name}/{index}", number, step)


class Progress:
    """A sink: a bar with the time that is left, on a terminal; elsewhere a line per record.

    - `steps`: the length of the run, as in `Loop(steps=...)`.
    - `file`: where it is written; None is standard error.
    - `width`: the width of the bar, in letters.
    """

    def __init__(self, steps: int, file: TextIO | None = None, width: int = 24) -> None:
        self.steps = check.whole("Progress", "steps", steps, "a number of steps", least=0)
        self.width = check.whole(
            "Progress", "width", width, "a number of letters", least=1, most=10_000
        )
        if file is not None and not all(hasattr(file, name) for name in _OF_FILES):
            raise check.refusal("Progress", "file", file, "a file to write to, or None")
        self._file = sys.stderr if file is None else file
        self._is_drawn = False  # whether the terminal's line has a bar now

    def __call__(self, record: Record) -> None:
        """Show a record."""
        _check_record("Progress", record)
        # Nobody can read what is written to a file that is closed, or is not there, as in services.
        if self._file is None or getattr(self._file, "closed", False):
            return
        # Lists of numbers are for curves, and would fill the terminal.
        numbers: dict[str, Any] = {}
        for name, value in record.items():
            if not np.ndim(value):
                numbers[name] = value
        step = numbers["step"]
        if "note" in numbers:
            self._line(f"step {step}: {numbers['note']}", "yellow")
        elif any(name.startswith("evaluation/") for name in numbers):
            self._line(f"step {step}, held out: {_listed_evaluation(numbers)}", "cyan")
        else:
            self._show_step(numbers)

    def _show_step(self, numbers: Record) -> None:
        """Draw the bar anew with the numbers of a step, or write a line in a file or a pipe."""
        step = numbers["step"]
        left = ""
        if "seconds_left" in numbers:
            left = f"  {_duration(numbers['seconds_left'])} left"
        text = _listed_metrics(numbers)
        # A file or a pipe cannot go back to the beginning of a line.
        if not is_terminal(self._file):
            self._line(f"step {step}/{self.steps}{left}  {text}")
            return
        self._draw(step, f"{step}/{self.steps}{left}  {text}")

    def _draw(self, step: int, text: str) -> None:
        """Draw the bar of a step with a text behind it, in place of the one that is there.

        The bar takes a quarter of a narrow terminal. What is too long behind it is cut: a second
        line could not be drawn over.
        """
        # The last column is left for the cursor.
        room = (terminal_width(self._file) or _DEFAULT_COLUMNS) - 1
        drawn = encodable(bar(step, self.steps, min(self.width, room // 4)), self._file)
        shown = beginning(encodable(f" {text}", self._file), room - len(drawn))
        line = coloured(drawn, "green", self._file) + shown
        # The last one stays, and whatever is written next begins below it.
        self._is_drawn = step < self.steps
        end = "" if self._is_drawn else "\n"
        self._file.write(CLEAR_LINE + line + end)
        self._file.flush()

    def _line(self, text: str, colour: str | None = None) -> None:
        """Write a line in place of the bar, which is drawn below it by the next record."""
        text = encodable(text, self._file)
        if colour is not None:
            text = coloured(text, colour, self._file)
        if self._is_drawn:
            self._file.write(CLEAR_LINE)
            self._is_drawn = False
        self._file.write(text + "\n")
        self._file.flush()


def _listed_evaluation(numbers: Record) -> str:
    """The numbers of an evaluation, each after its name.

    The step, which begins the line, is left out, and the prefix that all names have.
    """
    parts = []
    for name, value in numbers.items():
        if name != "step":
            parts.append(f"{name.removeprefix('evaluation/')} {_short(value)}")
    return "  ".join(parts)


def _listed_metrics(numbers: Record) -> str:
    """The numbers of a step, each after its name.

    What matters most comes first, the loss and the speed, where a narrow terminal has room for it.
    """
    first, others = [], []
    for name, value in numbers.items():
        part = f"{_label(name)} {_short(value)}"
        if name == "loss" or name.endswith("_per_second"):
            first.append(part)
        elif name not in ("step", "seconds_left"):
            others.append(part)
    return "  ".join(first + others)


def _check_record(sink: str, record: Any) -> None:
    """Refuse what is no record; `sink` is the name of the class that was called with it."""
    is_record = (
        isinstance(record, Mapping)
        and "step" in record
        and all(isinstance(name, str) for name in record)
    )
    if not is_record:
        takes = "a record: a mapping from names to numbers, with the step"
        raise check.refusal(sink, "record", record, takes)
    check.whole(sink, "step", record["step"], "a number of steps", least=0)


def _first_step_anew(record: Record) -> int:
    """The first step that this attempt takes itself, as its first record shows it.

    A note says where the attempt went on, and comes after what was recorded of that step; numbers
    are of a step that this attempt has taken.
    """
    if "note" in record:
        return record["step"] + 1
    return record["step"]


def _earlier(step: int | None, other: int) -> int:
    """The earlier of two steps, of which the first may be none."""
    return other if step is None else min(step, other)


def _begins_attempt(record: Record, last_step: int | None) -> bool:
    """Whether a record is the first of an attempt; `last_step` is that of the one before it.

    A sink may be used for a second run, which takes steps again that the first one has recorded.
    """
    return last_step is None or record["step"] < last_step


def _label(name: str) -> str:
    """A metric's name for a terminal: `tokens/s` for `tokens_per_second`.

    Other names stay as they are.
    """
    if name.endswith("_per_second"):
        return name.removesuffix("_per_second") + "/s"
    return name


def _short(value: Any) -> str:
    """A value for a terminal: `81.9k` for 81920.0, four digits of other floats.

    What is no float, a whole number for instance, is written in full.
    """
    if not isinstance(value, float):
        return str(value)
    if _LEAST_SHORTENED <= abs(value) < math.inf:
        # The largest unit first. What is rounded to a thousand of a unit is one of the next.
        for size, letter in _LETTERS:
            if abs(value) >= 0.9995 * size:
                return f"{value / size:.3g}{letter}"
    return f"{value:.4g}"


def _duration(seconds: float) -> str:
    """A time in the two units that matter most.

    >>> _duration(42), _duration(3700), _duration(200_000), _duration(math.inf)
    ('42 s', '1 h 01 min', '2 d 07 h', 'inf s')
    """
    if not math.isfinite(seconds):
        return f"{seconds} s"
    whole = round(float(seconds))
    minutes, hours = whole // 60, whole // 3600
    if whole < 60:
        return f"{whole} s"
    if minutes < 60:
        return f"{minutes} min {whole % 60:02d} s"
    if hours < 48:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24:02d} h"


def _plain(value: Any) -> Any:
    """A value as JSON holds it: numbers of NumPy and JAX become floats, arrays lists of them.

    JSON has no numbers that are not finite: they become None.
    """
    # Of other types only arrays have a form in JSON.
    if not isinstance(value, str | int | float | bool | list) and value is not None:
        value = np.asarray(value, float).tolist()
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
