"""Words and tables for people: how sizes and rows are written, everywhere alike."""

from collections.abc import Collection, Sequence


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


def table(rows: Sequence[Sequence[str]], right: Collection[int] = (), gap: str = "  ") -> str:
    """Rows in columns, those named in `right` with their ends aligned. What stands last in a row sets no width.

    >>> print(table([("kind", "bytes"), ("parameters", "4")], right=(1,)))
    kind        bytes
    parameters      4
    """
    columns = max(map(len, rows), default=0)
    widths = [
        max((len(row[k]) for row in rows if k < len(row) and (k < columns - 1 or k in right)), default=0)
        for k in range(columns)
    ]

    def line(row: Sequence[str]) -> str:
        cells = (cell.rjust(widths[k]) if k in right else cell.ljust(widths[k]) for k, cell in enumerate(row))
        return gap.join(cells).rstrip()

    return "\n".join(map(line, rows))
