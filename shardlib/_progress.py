"""What long work says on the way: a bar on a terminal, a line now and then elsewhere.

Work that is done within two seconds says nothing.
"""

import contextlib
import sys
import time
from types import TracebackType

from shardlib._text import (
    CLEAR_LINE,
    bar,
    coloured,
    encodable,
    human_bytes,
    is_terminal,
    shortened,
    terminal_width,
    text_width,
)

# Work that is shorter says nothing.
_QUIET_SECONDS = 2.0
# How often a line is written where there is no terminal, and how often a bar is drawn where there
# is one.
_LINE_SECONDS = 30.0
_FRAME_SECONDS = 0.1
# The bar's letters, and how many there must be for it to be of use.
_WIDTH, _NARROWEST = 24, 4


def log(package: str, text: str) -> None:
    """One line for people, on the standard error, from one of the packages of shardlib."""
    write_to_stderr(f"shardlib.{package}: {text}\n")


def say(text: str) -> None:
    """One line for people, on the standard error, from shardlib."""
    write_to_stderr(f"shardlib: {text}\n")


def write_to_stderr(text: str) -> None:
    """Write on the standard error, if anybody still reads it.

    A terminal may have been closed since, or a pipe may have ended. No work ends for that.
    """
    # Without a standard error, as in some services, it is None.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


class Progress:
    """How far work on a known number of bytes has come; the bar is gone after the `with` block.

    Args:
        package: of shardlib, that does the work.
        what: it does.
        total_bytes: of all work.
        is_shown: whether anything is; of several processes at the same work, one shows it.
    """

    def __init__(self, package: str, what: str, total_bytes: int, *, is_shown: bool = True) -> None:
        self.package, self.what, self.total_bytes = package, what, total_bytes
        self.is_shown = is_shown
        self.done_bytes = 0
        self.start = time.monotonic()
        self.next = self.start + _QUIET_SECONDS
        self.is_terminal = is_terminal(sys.stderr)
        self.drawn = False

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.drawn:
            write_to_stderr(CLEAR_LINE)

    def advance(self, more_bytes: int) -> None:
        """Show that so many more bytes are done, unless something was shown a moment ago."""
        self.at(self.done_bytes + more_bytes)

    def at(self, done_bytes: int) -> None:
        """Show that so many bytes are done, unless something was shown a moment ago."""
        self.done_bytes = done_bytes
        now = time.monotonic()
        if now < self.next or not self.is_shown:
            return
        text = progress_line(self.what, done_bytes, self.total_bytes, now - self.start)
        if not self.is_terminal:
            self.next = now + _LINE_SECONDS
            log(self.package, text)
            return
        self.next = now + _FRAME_SECONDS
        write_to_stderr(CLEAR_LINE + _line(done_bytes, self.total_bytes, text))
        self.drawn = True


def _line(done: float, total: float, text: str) -> str:
    """A bar and a text, in one line of the terminal: one that is wrapped cannot be taken back.

    Without room for a bar there is only the text, shortened where that is too long.
    """
    # The last column stays free: some terminals wrap a line that fills it.
    room = (terminal_width(sys.stderr) or 80) - 1
    width = min(_WIDTH, room - text_width(text) - 1)
    if width < _NARROWEST:
        return shortened(text, room)
    drawn = encodable(bar(done, total, width), sys.stderr)
    return f"{coloured(drawn, 'green', sys.stderr)} {text}"


def progress_line(what: str, done: int, total: int, seconds: float) -> str:
    """Share, size, speed, and the seconds that are left at that speed.

    >>> progress_line("reading 3 files", 1 << 20, 4 << 20, 2.0)
    'reading 3 files: 25% of 4.0 MiB, 512.0 KiB/s, 6 s left'
    """
    speed = done / max(seconds, 1e-9)
    left = ""
    # Nothing is known of the speed yet, or a file has grown beyond the size that it had.
    if 0 < done <= total:
        left = f", {(total - done) / speed:.0f} s left"
    share = min(1.0, done / max(total, 1))
    return f"{what}: {share:.0%} of {human_bytes(total)}, {human_bytes(speed)}/s{left}"
