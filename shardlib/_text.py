"""Words and tables for people: how sizes and rows are written, everywhere alike.

A table that is wider than the terminal would be broken by it in the middle of rows. So tables are
fitted to a width: long cells of some columns lose their middle, and then some columns are left out.
"""

import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TextIO

CLEAR_LINE = "\r\x1b[K"
"""Takes a terminal back to the beginning of its line, and clears that."""

COLOURS = {"bold": 1, "red": 31, "green": 32, "yellow": 33, "cyan": 36}
"""What terminals call the colours of text, and heavy type."""

_BLOCKS = re.compile("[█-▏]")  # what bars are drawn with, from a full one to an eighth
_NARROWEST = 14  # letters that a column keeps when it is shortened


def human_bytes(size: float) -> str:
    """A size in bytes for reading, in the largest binary unit of which there is one or more.

    >>> human_bytes(1536), human_bytes(7)
    ('1.5 KiB', '7 B')
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def listed(names: Iterable[object]) -> str:
    """Names in backquotes, with commas between them, for a message.

    >>> listed(["data", "model"])
    '`data`, `model`'
    """
    return ", ".join(f"`{name}`" for name in names)


def terminal_width(file: TextIO | None = None) -> int | None:
    """The columns of the terminal that is written to, or None where that is no terminal.

    It is by default the standard output. `COLUMNS` in the environment decides where it is set.
    """
    columns = os.environ.get("COLUMNS", "")
    # Longer numbers are no widths, and very long ones Python refuses to read.
    if columns.isdecimal() and len(columns) < 6 and int(columns):
        return int(columns)
    stream = file or sys.stdout
    # The output of a notebook has the number of the terminal that its server was started in.
    if not is_terminal(stream):
        return None
    try:
        return os.get_terminal_size(stream.fileno()).columns or None
    except (OSError, ValueError, AttributeError):  # no number, or not that of a terminal
        return None


def is_terminal(file: TextIO | None) -> bool:
    """Whether a file is a terminal; one that is closed is none, nor is one that is not there."""
    try:
        return file is not None and file.isatty()
    except (OSError, ValueError, AttributeError):  # closed, or no file of Python's own kind
        return False


def bar(done: float, total: float, width: int = 24) -> str:
    """A bar that is filled as far as work is done; without any work it is empty.

    >>> bar(1, 2, width=8)
    '████░░░░'
    """
    full = min(width, int(width * done / max(total, 1)))
    return "█" * full + "░" * (width - full)


def encodable(text: str, file: TextIO) -> str:
    """A text in letters that a file can be written: bars are drawn with blocks, which not all know.

    >>> import io
    >>> encodable("██▌░ 5 µs", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    '###. 5 ?s'
    """
    encoding = getattr(file, "encoding", None)
    if not encoding:  # a file in memory takes any
        return text
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return _BLOCKS.sub("#", text).replace("░", ".").encode(encoding, "replace").decode(encoding)
    return text


def coloured(text: str, colour: str, file: TextIO) -> str:
    """A text in one of the `COLOURS`, if it is to be written to a terminal.

    With `NO_COLOR` in the environment, or on a terminal that calls itself `dumb`, it stays plain.

    >>> import io
    >>> coloured("fits", "green", io.StringIO())
    'fits'
    """
    is_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    if is_plain or not is_terminal(file):
        return text
    return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def text_width(text: str) -> int:
    """The columns of a terminal that a text takes: two for each Chinese, Japanese or Korean letter.

    >>> text_width("layers"), text_width("注意力")
    (6, 6)
    """
    if text.isascii():
        return len(text)
    return sum(map(_letter_width, text))


def _letter_width(letter: str) -> int:
    """The columns that a letter takes; none if it is drawn onto the letter before it."""
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in ("W", "F") else 1


def shortened(text: str, width: int) -> str:
    """A text of at most `width` columns, with its middle left out where it is wider.

    The ends of paths, which tables have most of, say more than their middles.

    >>> shortened("layers/attention/query/kernel", 20)
    'layers/att…ry/kernel'
    """
    if text_width(text) <= width:
        return text
    # One column is the dots, and an odd one goes to the beginning.
    kept = max(width - 1, 0)
    end = kept // 2
    return f"{beginning(text, kept - end)}…{beginning(text[::-1], end)[::-1]}"


def beginning(text: str, width: int) -> str:
    """As many letters of the beginning of a text as fit into some columns."""
    taken = 0
    for number, letter in enumerate(text):
        taken += _letter_width(letter)
        if taken > width:
            return text[:number]
    return text


def wrapped(text: str, width: int | None, indent: str = "", later: str | None = None) -> str:
    """A paragraph in lines of at most `width` letters, or in one line without a width.

    The first line begins with `indent`, the others with `later` or, without it, with `indent` too.
    Lines have at least 20 letters behind `later`, so on a narrow terminal they are wider than it.
    """
    if later is None:
        later = indent
    if width is None or text_width(indent + text) <= width:
        return indent + text
    width = max(width, len(later) + 20)
    return textwrap.fill(
        text, width, initial_indent=indent, subsequent_indent=later, break_on_hyphens=False
    )


def table(
    rows: Sequence[Sequence[str]],
    right: Collection[int] = (),
    gap: str = "  ",
    *,
    width: int | None = None,
    shorten: Sequence[int] = (),
    drop: Sequence[int] = (),
) -> str:
    """Rows in columns, as lines of text.

    What stands in the last column sets no width, unless that column is aligned to the right.

    Args:
        rows: the texts of each row, of which some may be shorter than others.
        right: the numbers of the columns whose ends are aligned.
        gap: what stands between columns.
        width: how long lines may be, or None for any length.
        shorten: the columns that lose the middle of long texts, where lines are too long.
        drop: the columns that are left out, first to last, until the table fits, where that is not
            enough.

    >>> print(table([("kind", "bytes"), ("parameters", "4")], right=(1,)))
    kind        bytes
    parameters      4
    >>> print(table([("path", "dtype", "bytes"), ("layers/0/kernel/scale", "float32", "4")],
    ...     width=25, shorten=(0,), drop=(1,)))
    path                bytes
    layers/0/…el/scale  4
    """
    if width is not None:
        rows, right = _fitted(rows, right, gap, width, _Sacrifices(shorten, drop))
    columns = max(map(len, rows), default=0)
    widths = _widths(rows, range(columns))
    if columns - 1 not in right:
        widths[columns - 1] = 0
    lines = []
    for row in rows:
        # No spaces at the ends of lines, where the last cells are empty or narrow.
        lines.append(gap.join(_aligned(row, widths, right)).rstrip())
    return "\n".join(lines)


def _aligned(row: Sequence[str], widths: Mapping[int, int], right: Collection[int]) -> list[str]:
    """The cells of a row, each as wide as its column; those of the columns `right` end alike."""
    cells: list[str] = []
    for column, cell in enumerate(row):
        space = " " * (widths[column] - text_width(cell))
        if column in right:
            cells.append(space + cell)
        else:
            cells.append(cell + space)
    return cells


def _widths(rows: Sequence[Sequence[str]], columns: Iterable[int]) -> dict[int, int]:
    """The width of the widest text in each column, by the number of the column.

    A row without the column counts for nothing.
    """
    widths: dict[int, int] = {}
    for column in columns:
        lengths = [text_width(row[column]) for row in rows if column < len(row)]
        widths[column] = max(lengths, default=0)
    return widths


@dataclass(frozen=True)
class _Sacrifices:
    """What a table may lose to fit a width.

    Texts in the columns `shorten` lose their middle, and then the columns `drop` are left out. Both
    have numbers of columns, in the order in which they are to be shortened or left out.
    """

    shorten: Sequence[int]
    drop: Sequence[int]


def _fitted(
    rows: Sequence[Sequence[str]],
    right: Collection[int],
    gap: str,
    width: int,
    sacrifices: _Sacrifices,
) -> tuple[list[list[str]], set[int]]:
    """The rows of a table that is at most `width` wide, and which of its columns are at the right.

    Texts are shortened first, and columns are left out one after another while that is not enough.
    If nothing helps, the result is as narrow as it can be.

    Args:
        rows: the texts of each row.
        right: the numbers of the columns whose ends are aligned.
        gap: what stands between columns.
        width: how long lines may be.
        sacrifices: what the table may lose.
    """
    kept = list(range(max(map(len, rows), default=0)))
    limits: dict[int, int] = {}
    # None first: with all columns, for shortening them may be enough.
    for dropped in (None, *sacrifices.drop):
        if dropped in kept:
            kept.remove(dropped)
        widths = _widths(rows, kept)
        excess = sum(widths.values()) + len(gap) * (len(kept) - 1) - width
        limits, excess = _limits(widths, excess, sacrifices.shorten)
        if excess <= 0:
            break
    # Columns have other numbers where some before them are left out.
    kept_right = set()
    for number, column in enumerate(kept):
        if column in right:
            kept_right.add(number)
    return [_shortened_row(row, kept, limits) for row in rows], kept_right


def _shortened_row(row: Sequence[str], kept: list[int], limits: Mapping[int, int]) -> list[str]:
    """The cells of a row in the columns that are kept, no longer than their columns' limits."""
    cells: list[str] = []
    for column in kept:
        if column < len(row):
            cells.append(shortened(row[column], limits.get(column, text_width(row[column]))))
    return cells


def _limits(
    widths: Mapping[int, int], excess: int, shorten: Sequence[int]
) -> tuple[dict[int, int], int]:
    """To how many letters columns are shortened so that lines lose `excess` letters.

    Returns the limits, by column, and the letters that lines have too many all the same.
    """
    limits: dict[int, int] = {}
    for column in shorten:
        # A column that was left out has no width.
        if excess > 0 and widths.get(column, 0) > _NARROWEST:
            limits[column] = max(_NARROWEST, widths[column] - excess)
            excess -= widths[column] - limits[column]
    return limits, excess


def lines_as_they_come(source: IO[bytes]) -> Iterator[str]:
    """The lines of a stream as they come, without their ends.

    A carriage return ends one too: a progress bar has a line for each of its states.
    """
    pending, last_end = b"", b""
    while part := source.read1(1 << 16):  # pyright: ignore[reportAttributeAccessIssue]
        # Line, end, line, end, ..., and the beginning of a line that is not complete yet.
        *whole, pending = re.split(rb"([\r\n])", pending + part)
        for line, end in zip(whole[::2], whole[1::2], strict=True):
            # `\r\n` is one end, so the nothing between the two is no line.
            if line or (end == b"\n" and last_end != b"\r"):
                yield line.decode(errors="replace")
            last_end = end
    if pending:
        yield pending.decode(errors="replace")
