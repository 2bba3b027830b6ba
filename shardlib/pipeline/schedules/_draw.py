"""Schedules as pictures: who does what when, as SVG and as lines of letters for a terminal."""

from html import escape

from shardlib.checks import _arguments as check
from shardlib.pipeline.schedules._simulate import Timeline
from shardlib.pipeline.schedules._table import KINDS, Op

_COLOURS = {"F": ("#4c78c8", "#93b1e1"), "B": ("#2e9e62", "#8ccfa8"), "W": ("#d98a29", "#f0c48c")}
_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights"}
_TERMINAL = {
    "F": ("\x1b[44;97m", "\x1b[104;30m"),
    "B": ("\x1b[42;97m", "\x1b[102;30m"),
    "W": ("\x1b[43;97m", "\x1b[103;30m"),
}
_RESET = "\x1b[0m"
_WIDTH, _ROW, _LEFT, _TOP = 1200, 26, 70, 44


# Where readers have their machine in the dark: the paper, what is written on it, lines, and colours
# that would be lost.
DARK = (
    "<style>@media (prefers-color-scheme: dark) { "
    'rect[fill="white"] { fill: #1e2129 } '
    'rect[fill="#f3f3f3"] { fill: #2d313b } '
    'text:not([fill]), text[fill="black"] { fill: #e3e5ea } '
    'text[fill="#555"], text[fill="#666"] { fill: #a9adb8 } '
    '[fill="#247"] { fill: #6d9be8 } '
    '[stroke="#247"] { stroke: #6d9be8 } '
    '[stroke="#ddd"] { stroke: #434855 } '
    '[stroke="black"] { stroke: #e3e5ea } '
    "}</style>"
)


def svg(timeline: Timeline, title: str = "") -> str:
    """A Gantt chart: a row for each stage, a box with the number of its microbatch for each pass.

    Where stages have several parts, passes through all but the first are lighter.

    >>> from shardlib.pipeline import OneFOneB, simulate
    >>> svg(simulate(OneFOneB(2, 2).table())).count("<rect")  # eight passes among them
    13
    """
    check.kind("svg", "timeline", timeline, Timeline, "what `simulate` gives")
    check.text("svg", "title", title)
    _check_time("svg", timeline)
    table = timeline.table
    scale = (_WIDTH - _LEFT - 10) / timeline.elapsed
    height = _TOP + _ROW * table.stages + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        DARK,
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="16" font-size="13">{escape(title)}</text>' if title else "",
    ]
    x = float(_LEFT)
    for kind in _kinds(timeline):
        parts.append(
            f'<rect x="{x:.0f}" y="24" width="12" height="12" fill="{_COLOURS[kind][0]}"/>'
        )
        parts.append(f'<text x="{x + 17:.0f}" y="34">{_said(timeline, kind)}</text>')
        x += 30 + 7 * len(_said(timeline, kind))
    for stage, order in enumerate(table.orders):
        y = _TOP + _ROW * stage
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">stage {stage}</text>')
        parts.append(
            f'<rect x="{_LEFT}" y="{y}" width="{timeline.elapsed * scale:.1f}" height="{_ROW - 4}" '
            'fill="#f3f3f3"/>'
        )
        for op in order:
            left = _LEFT + timeline.start[op] * scale
            width = (timeline.end[op] - timeline.start[op]) * scale
            colour = _COLOURS[op.kind][min(table.chunk(op.part), 1)]
            parts.append(
                f'<rect x="{left:.2f}" y="{y}" width="{max(width - 0.6, 0.2):.2f}" '
                f'height="{_ROW - 4}" fill="{colour}"><title>{op.kind}{op.microbatch}, part '
                f"{op.part}, from {timeline.start[op]:g} to {timeline.end[op]:g}</title></rect>"
            )
            if width > 8 * len(str(op.microbatch)):
                dark = "#ffffff" if colour == _COLOURS[op.kind][0] else "#222222"
                parts.append(
                    f'<text x="{left + width / 2:.2f}" y="{y + 15}" text-anchor="middle" '
                    f'font-size="10" fill="{dark}">{op.microbatch}</text>'
                )
    return "\n".join([*filter(None, parts), "</svg>\n"])


def text(timeline: Timeline, width: int = 100, *, colour: bool = False) -> str:
    """The same in `width` letters: F, B and W, small for all but the first part of a stage, and
    dots where it waits.

    With room for it, each letter is a pass, or a part of one, and where numbers fit they stand
    beside it.

    >>> from shardlib.pipeline import OneFOneB, simulate, Costs
    >>> print(text(simulate(OneFOneB(2, 3).table(), Costs(1, 1, 0))))
    stage 0 | F0 F1 .. B0 F2 B1 .. B2
    stage 1 | .. F0 B0 F1 B1 F2 B2 ..
    """
    check.kind("text", "timeline", timeline, Timeline, "what `simulate` gives")
    check.whole("text", "width", width, "a number of letters", least=1)
    check.boolean("text", "colour", colour)
    _check_time("text", timeline)
    table = timeline.table
    lead = len(f"stage {table.stages - 1} | ")
    shortest = min(
        timeline.end[op] - timeline.start[op]
        for op in timeline.end
        if timeline.end[op] > timeline.start[op]
    )
    digits = len(str(table.microbatches - 1))
    columns = round(timeline.elapsed / shortest)
    numbered = columns * (digits + 2) <= width - lead
    columns = columns if numbered else max(1, min(width - lead, columns))
    step = timeline.elapsed / columns
    lines = []
    for stage, order in enumerate(table.orders):
        cells, at = [], 0
        for column in range(columns):
            moment = (column + 0.5) * step
            while at < len(order) and timeline.end[order[at]] <= moment:
                at += 1
            busy = at < len(order) and timeline.start[order[at]] <= moment
            cells.append(
                _cell(table.chunk(order[at].part), order[at], digits, numbered, colour)
                if busy
                else "." * (digits + 1 if numbered else 1)
            )
        lines.append(
            f"{f'stage {stage}':{lead - 3}} | {(' ' if numbered else '').join(cells)}".rstrip()
        )
    return "\n".join(lines)


def _check_time(name: str, timeline: Timeline) -> None:
    if not timeline.elapsed > 0:
        raise ValueError(
            f"`{name}(timeline=...)`: with {timeline.costs} nothing takes any time, and there is "
            "nothing to draw."
        )


def _cell(chunk: int, op: Op, digits: int, numbered: bool, colour: bool) -> str:
    letter = op.kind if chunk == 0 else op.kind.lower()
    cell = f"{letter}{op.microbatch:<{digits}}" if numbered else letter
    return f"{_TERMINAL[op.kind][min(chunk, 1)]}{cell}{_RESET}" if colour else cell


def _kinds(timeline: Timeline) -> list[str]:
    there = {op.kind for op in timeline.end}
    return [kind for kind in KINDS if kind in there]


def _said(timeline: Timeline, kind: str) -> str:
    if kind == "B" and timeline.table.splits:
        return "backward: of what came"
    return _NAMES[kind]
