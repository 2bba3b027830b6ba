"""Pictures of figures for the docs, as SVG."""

from collections.abc import Sequence

from shardlib.pipeline.schedules._draw import DARK


def svg(width: int, height: int, left: int, title: str, parts: Sequence[str]) -> str:
    """A picture of parts under a title."""
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        DARK,
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(left, 20, title, size=14),
    ]
    return "\n".join([*head, *parts, "</svg>\n"])


def text(
    x: float, y: float, words: object, anchor: str = "start", colour: str = "black", size: int = 12
) -> str:
    """Words that begin at a place, or end there, or have it in their middle."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" '
        f'font-size="{size}">{words}</text>'
    )


def line(
    points: Sequence[tuple[float, float]], colour: str, width: float = 1, dashed: bool = False
) -> str:
    """A line through points."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dashes = ' stroke-dasharray="4 4"' if dashed else ""
    return (
        f'<polyline points="{places}" fill="none" stroke="{colour}" '
        f'stroke-width="{width}"{dashes}/>'
    )


def level(left: float, right: float, y: float, label: object, colour: str = "#ddd") -> str:
    """A line across, and what it stands for."""
    return line([(left, y), (right, y)], colour) + text(left - 8, y + 4, label, "end", "#555")


def dot(x: float, y: float, colour: str) -> str:
    """A point."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'


def bar(x: float, y: float, width: float, height: float, colour: str, told: str) -> str:
    """A bar, and what is told of it where a reader points at it."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{colour}"><title>{told}</title></rect>'
    )
