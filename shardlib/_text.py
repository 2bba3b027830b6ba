"""Words and tables for people: how sizes and rows are written, everywhere alike."""

import os
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import TextIO

_NARROWEST = 14  # letters that a column keeps when it is shortened


def human_bytes(size: float) -> str:
    """A size for reading.

    >>> human_bytes(1536), human_bytes(7)
    ('1.5 KiB', '7 B')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def terminal_width(file: TextIO | None = None) -> int | None:
    """Columns of the terminal that is written to, by default the standard output; none where that
    is no terminal.

    `COLUMNS` in the environment decides where it is set.
    """
    if (said := os.environ.get("COLUMNS", "")).isdecimal() and len(said) < 6 and int(said):
        return int(said)
    try:
        return os.get_terminal_size((file or sys.stdout).fileno()).columns or None
    except (OSError, ValueError, AttributeError):  # a pipe, a file, a notebook, or closed
        return None


def shortened(text: str, width: int) -> str:
    """A text of at most so many letters, with its middle left out: the ends of paths say most.

    >>> shortened("layers/attention/query/kernel", 20)
    'layers/att…ry/kernel'
    """
    if len(text) <= width:
        return text
    end = max(width - 1, 0) // 2
    return f"{text[: max(width - 1 - end, 0)]}…{text[len(text) - end :]}"


def wrapped(text: str, width: int | None, indent: str = "", later: str | None = None) -> str:
    """A paragraph in lines of at most `width`; as it is where there is none. Lines after the first
    begin with `later`.
    """
    later = indent if later is None else later
    if width is None or len(indent) + len(text) <= width:
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
    """Rows in columns, those named in `right` with their ends aligned. What stands last in a row
    sets no width.

    With a `width`, the columns in `shorten` lose the middle of long texts, and where that is not
    enough those in `drop` are left out, first to last, until the table fits.

    >>> print(table([("kind", "bytes"), ("parameters", "4")], right=(1,)))
    kind        bytes
    parameters      4
    >>> print(table([("path", "dtype", "bytes"), ("layers/0/kernel/scale", "float32", "4")],
    ...     width=25, shorten=(0,), drop=(1,)))
    path                bytes
    layers/0/…el/scale  4
    """
    if width is not None:
        rows, right = _fitted(rows, right, gap, width, shorten, drop)
    columns = max(map(len, rows), default=0)
    widths = [
        max(
            (len(row[k]) for row in rows if k < len(row) and (k < columns - 1 or k in right)),
            default=0,
        )
        for k in range(columns)
    ]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(widths[k]) if k in right else cell.ljust(widths[k])
            for k, cell in enumerate(row)
        )
        return gap.join(cells).rstrip()

    return "\n".join(map(line, rows))


def _fitted(
    rows: Sequence[Sequence[str]],
    right: Collection[int],
    gap: str,
    width: int,
    shorten: Sequence[int],
    drop: Sequence[int],
) -> tuple[list[list[str]], set[int]]:
    """The rows with cells shortened, and columns left out, so that no line is longer than `width`
    where that can be.
    """
    columns = max(map(len, rows), default=0)
    kept = list(range(columns))
    limits: dict[int, int] = {}
    for dropped in (None, *drop):
        kept = [column for column in kept if column != dropped]
        widest = {k: max((len(row[k]) for row in rows if k < len(row)), default=0) for k in kept}
        excess = sum(widest.values()) + len(gap) * (len(kept) - 1) - width
        limits = {}
        for column in shorten:
            if excess > 0 and column in kept and widest[column] > _NARROWEST:
                limits[column] = max(_NARROWEST, widest[column] - excess)
                excess -= widest[column] - limits[column]
        if excess <= 0:
            break
    fitted = [
        [shortened(row[k], limits.get(k, len(row[k]))) for k in kept if k < len(row)]
        for row in rows
    ]
    return fitted, {kept.index(k) for k in right if k in kept}
