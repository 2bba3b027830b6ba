"""The picture of a frontier, as SVG."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

from shardlib._notebook import Picture
from shardlib._text import human_bytes
from shardlib.pipeline.schedules._draw import DARK

# In pixels: the picture, and the place of its axes in it.
_WIDTH, _HEIGHT = 900, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 850, 50, 410


class _Point(NamedTuple):
    """A point: bytes, a share, what it stands for, and whether it is compiled or predicted."""

    size: int
    share: float
    words: str
    compiled: bool


def picture(points: Sequence[tuple[int, float, str, bool]], usable: float, title: str) -> str:
    """Memory along x, the share that is computed again along y, and a line at what is usable.

    >>> points = [(2**30, 0.3, "inputs", True), (2**31, 0.0, "everything", False)]
    >>> picture(points, 2**31, "What is kept").count("<circle")
    2
    """
    chart = _Chart([_Point(*point) for point in points], usable)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        DARK,
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" fill="black">{escape(title)}</text>',
        *chart.axes(),
        *chart.limit(),
        *chart.curve(),
    ]
    return Picture("\n".join([*lines, "</svg>\n"]))


class _Chart:
    """The pieces of the picture, each as lines of SVG."""

    def __init__(self, points: Sequence[_Point], usable: float) -> None:
        self.points, self.usable = points, usable
        sizes = [point.size for point in points]
        self.least, self.most = min(sizes), max(sizes)
        # A target with much more memory than anything takes would leave no room for the points.
        self.has_limit = usable <= 2 * self.most
        if self.has_limit:
            self.least, self.most = min(self.least, int(usable)), max(self.most, int(usable))
        # Where nothing is computed again at all, the axis still needs a length.
        self.highest = max(0.01, *(point.share for point in points))

    def x(self, size: float) -> float:
        """Where some bytes are.

        There is room on both sides for the words at the points.

        >>> chart = _Chart([_Point(100, 0.5, "a", True), _Point(200, 0.0, "b", True)], 150)
        >>> chart.x(100), chart.x(150), chart.x(200)
        (100.0, 460.0, 820.0)
        """
        share = (size - self.least) / max(1, self.most - self.least)
        return _LEFT + 30 + share * (_RIGHT - _LEFT - 60)

    def y(self, share: float) -> float:
        """Where a share is.

        >>> chart = _Chart([_Point(100, 0.5, "a", True), _Point(200, 0.0, "b", True)], 150)
        >>> chart.y(0), chart.y(0.5)
        (410.0, 70.0)
        """
        return _BOTTOM - share / self.highest * (_BOTTOM - _TOP - 20)

    def axes(self) -> Iterator[str]:
        """Lines across for shares, and sizes below."""
        for step in range(5):
            share = self.highest * step / 4
            y = self.y(share)
            yield _line([(_LEFT, y), (_RIGHT, y)], "#ddd")
            yield _text(_LEFT - 8, y + 4, f"{share:.1%}", "end", "#555")
        for step in range(5):
            size = self.least + (self.most - self.least) * step / 4
            yield _text(self.x(size), _BOTTOM + 20, human_bytes(size), "middle", "#555")
        yield _text(_LEFT, _TOP - 8, "products computed again, over all others", "start", "#555")
        yield _text(_RIGHT, _BOTTOM + 38, "memory of a device", "end", "#555")

    def limit(self) -> Iterator[str]:
        """A line at the memory that a step may take.

        There is none where nobody knows that memory, or where it is far beyond all points.
        """
        if not self.has_limit or math.isinf(self.usable):
            return
        x = self.x(self.usable)
        yield _line([(x, _TOP), (x, _BOTTOM)], "black", ' stroke-dasharray="4 4"')
        words = f"a step may take {human_bytes(self.usable)}"
        yield _text(x - 6, _TOP + 12, words, "end", "black")

    def curve(self) -> Iterator[str]:
        """The points, with what each keeps; those that are predicted are hollow."""
        places = [(self.x(point.size), self.y(point.share)) for point in self.points]
        yield _line(places, "#247")
        for point, (x, y) in zip(self.points, places, strict=True):
            fill = "#247" if point.compiled else "white"
            how = "compiled" if point.compiled else "predicted"
            # Browsers show a `<title>` while the pointer is on its point.
            told = f"{point.words}: {human_bytes(point.size)}, {point.share:.1%}, {how}"
            yield (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="#247">'
                f"<title>{escape(told)}</title></circle>"
            )
        last = 0.0
        for point, (x, y) in zip(self.points, places, strict=True):
            # Words that would cover those before are left to the point's own title.
            if point.compiled or y - last > 12:
                yield _words(point, x, y)
                last = y


def _words(point: _Point, x: float, y: float) -> str:
    """What a point keeps, beside it and not on the line, which falls from left to right."""
    words = escape(point.words)
    if x < (_LEFT + _RIGHT) / 2:
        return _text(x + 8, y - 6, words, "start", "black", 10)
    # Below the last points are the sizes.
    down = 14 if y < _BOTTOM - 20 else -8
    return _text(x - 8, y + down, words, "end", "black", 10)


def _line(points: Sequence[tuple[float, float]], colour: str, more: str = "") -> str:
    """A line through some points, in pixels; `more` are further attributes.

    >>> _line([(0, 1), (2, 3)], "black")
    '<polyline points="0.0,1.0 2.0,3.0" fill="none" stroke="black"/>'
    """
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{places}" fill="none" stroke="{colour}"{more}/>'


def _text(x: float, y: float, words: str, anchor: str, colour: str, size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}">{words}</text>'
    )
