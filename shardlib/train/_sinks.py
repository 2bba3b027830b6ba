"""Where the records of a run go. A record is a dict with the step and, by name, numbers or lists of
them; or with a `note` in words. A sink is anything that may be called with one.
"""

import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import numpy as np

from shardlib.checks import _arguments as check

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
        self._opened = False

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
        if not self._opened:
            self._begin(_first_anew(record))
            self._opened = True
        line = json.dumps({name: _plain(value) for name, value in record.items()})
        with self.path.open("ab") as file:
            file.write((b"\n" if self._half() else b"") + _with_checksum(line.encode()) + b"\n")

    def _half(self) -> bool:
        """Whether the last record was written in part, without the end of its line."""
        if not self.path.stat().st_size:
            return False
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"

    def _begin(self, step: int) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            return
        kept, before = [], 0
        for number, line in enumerate(self.path.read_bytes().splitlines(), start=1):
            found = _step_of(line)
            if found is None:
                self._say(number, line, "is no record, and is left out")
                continue
            checked = _matches_checksum(line)
            if checked is None:
                self._say(
                    number, line, "has no checksum: another program wrote it, or it was damaged"
                )
            elif not checked:
                self._say(
                    number, line, "does not match its checksum, hence was damaged, and is left out"
                )
                continue
            if found < before:
                self._say(
                    number, line, f"is of a step before that of the record above it, {before}"
                )
            before = found
            if found < step:
                kept.append(line + b"\n")
        beside = self.path.with_suffix(".rewritten")
        beside.write_bytes(b"".join(kept))
        beside.replace(self.path)

    def _say(self, number: int, line: bytes, what: str) -> None:
        shown = line[:60].decode(errors="replace")
        sys.stderr.write(f"shardlib: line {number} of {self.path} {what}: {shown}\n")


_CHECKSUM = re.compile(rb'(?P<record>.*), "crc32": "(?P<checksum>[0-9a-f]{8})"}')


def _with_checksum(line: bytes) -> bytes:
    return line[:-1] + b', "crc32": "%08x"}' % zlib.crc32(line)


def _matches_checksum(line: bytes) -> bool | None:
    """Whether a line is as it was written; None of a line without a checksum."""
    found = _CHECKSUM.fullmatch(line)
    if found is None:
        return None
    return zlib.crc32(found["record"] + b"}") == int(found["checksum"], 16)


def _step_of(line: bytes) -> int | None:
    """The step of a record; None of a line that was cut off while it was written, or damaged."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if type(step) is int else None


class TensorBoard:
    """Curves for TensorBoard, in a folder; needs `pip install "shardlib[train]"`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        check.path("TensorBoard", "folder", folder)
        try:
            from tensorboardX import SummaryWriter  # an optional dependency
        except ImportError as error:
            raise ModuleNotFoundError(
                'Writing for TensorBoard needs `tensorboardX`: pip install "shardlib[train]"'
            ) from error
        self._make = SummaryWriter
        self._folder, self._writer = str(folder), None

    def __call__(self, record: Record) -> None:
        """Add a point to each curve; what an earlier attempt drew beyond this step is dropped."""
        _check_record("TensorBoard", record)
        step = record["step"]
        if self._writer is None:
            self._writer = self._make(self._folder, purge_step=_first_anew(record), flush_secs=1)
        for name, value in record.items():
            if name == "note":
                self._writer.add_text(name, value, step)
            elif name != "step":
                several = dict(enumerate(np.ravel(value))) if np.ndim(value) else {"": value}
                for at, one in several.items():
                    self._writer.add_scalar(f"{name}/{at}".rstrip("/"), one, step)
        # So that nothing waits to be written by the time that the folder may be another run's.
        self._writer.flush()


class Progress:
    """A bar with the time that is left, on a terminal; elsewhere a line per record."""

    def __init__(self, steps: int, file: TextIO | None = None, width: int = 24) -> None:
        self.steps = check.whole("Progress", "steps", steps, "a number of steps", least=0)
        self.width = check.whole(
            "Progress", "width", width, "a number of letters", least=1, most=10_000
        )
        if file is not None and not hasattr(file, "write"):
            raise check.refusal("Progress", "file", file, "a file to write to, or None")
        self._file = sys.stderr if file is None else file
        self._shown = 0  # letters of the bar that is on the line now

    def __call__(self, record: Record) -> None:
        """Show a record."""
        _check_record("Progress", record)
        record = {name: value for name, value in record.items() if not np.ndim(value)}
        step = record["step"]
        if "note" in record:
            return self._line(f"step {step}: {record['note']}")
        if any(name.startswith("evaluation/") for name in record):
            shown = "  ".join(
                f"{name.removeprefix('evaluation/')} {_short(value)}"
                for name, value in record.items()
                if name != "step"
            )
            return self._line(f"step {step}, held out: {shown}")
        left = f"  {_duration(record['seconds_left'])} left" if "seconds_left" in record else ""
        # What matters most comes first, where a narrow terminal has room for it.
        first = [name for name in record if name == "loss" or name.endswith("_per_second")]
        rest = [name for name in record if name not in ("step", "seconds_left", *first)]
        text = "  ".join(f"{_label(name)} {_short(record[name])}" for name in (*first, *rest))
        done = self.width * step // max(self.steps, 1)
        bar = "█" * done + "·" * (self.width - done)
        if self._file.isatty():
            line = f"{bar} {step}/{self.steps}{left}  {text}"[: _columns()]
            self._file.write("\r" + line.ljust(self._shown) + ("\n" if step >= self.steps else ""))
            self._shown = 0 if step >= self.steps else len(line)
            self._file.flush()
        else:
            self._line(f"step {step}/{self.steps}{left}  {text}")
        return None

    def _line(self, text: str) -> None:
        if self._shown:
            self._file.write("\r" + " " * self._shown + "\r")
            self._shown = 0
        self._file.write(text + "\n")
        self._file.flush()


def _check_record(sink: str, record: Any) -> None:
    takes = "a record: a mapping from names to numbers, with the step"
    if (
        not isinstance(record, Mapping)
        or "step" not in record
        or not all(isinstance(name, str) for name in record)
    ):
        raise check.refusal(sink, "record", record, takes)
    check.whole(sink, "step", record["step"], "a number of steps", least=0)


def _first_anew(record: Record) -> int:
    """The first step that this attempt takes itself: a note, of where it went on, comes after what
    was recorded there.
    """
    return record["step"] + ("note" in record)


def _columns() -> int:
    try:
        return os.get_terminal_size().columns - 1
    except OSError:
        return 100


def _label(name: str) -> str:
    return name.removesuffix("_per_second") + "/s" if name.endswith("_per_second") else name


def _short(value: Any) -> str:
    if isinstance(value, float) and abs(value) >= 10_000:
        for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.3g}{letter}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    """Time for reading.

    >>> _duration(42), _duration(3700), _duration(200_000)
    ('42 s', '1 h 01 min', '2 d 07 h')
    """
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if seconds < 60:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min {int(seconds) % 60:02d} s"
    return (
        f"{hours} h {minutes % 60:02d} min" if hours < 48 else f"{hours // 24} d {hours % 24:02d} h"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    return np.asarray(value, float).tolist()
