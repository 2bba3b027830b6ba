"""Schedules as pictures: who does what when, as SVG and as lines of letters for a terminal."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from shardlib._notebook import Picture
from shardlib.checks import _arguments as check
from shardlib.pipeline.schedules._simulate import Timeline
from shardlib.pipeline.schedules._table import KINDS, Op

# For each kind the colour of passes through the first part of a stage, and through its other parts.
_COLOURS = {"F": ("#4c78c8", "#93b1e1"), "B": ("#2e9e62", "#8ccfa8"), "W": ("#d98a29", "#f0c48c")}
_NAMES = {"F": "forward", "B": "backward", "W": "gradients of weights"}
_TERMINAL = {
    "F": ("\x1b[44;97m", "\x1b[104;30m"),
    "B": ("\x1b[42;97m", "\x1b[102;30m"),
    "W": ("\x1b[43;97m", "\x1b[103;30m"),
}
_RESET = "\x1b[0m"
# In pixels: the width of the picture, the height of a row, and where the first row begins.
_WIDTH, _ROW, _LEFT, _TOP = 1200, 26, 70, 44

# For readers whose machine is set to dark: the paper, what is written on it, lines, and colours
# that would not be seen.
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
    chart = _Chart(timeline)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {chart.height}" '
        'font-family="sans-serif" font-size="12">',
        DARK,
        f'<rect width="{_WIDTH}" height="{chart.height}" fill="white"/>',
    ]
    if title:
        lines.append(f'<text x="{_LEFT}" y="16" font-size="13">{escape(title)}</text>')
    lines += chart.legend()
    for stage, order in enumerate(timeline.table.orders):
        lines += chart.background(stage)
        for op in order:
            lines += chart.box(stage, op)
    return Picture("\n".join([*lines, "</svg>\n"]))


@dataclass(frozen=True)
class _Chart:
    """The pieces of a Gantt chart, each as lines of SVG."""

    timeline: Timeline

    @property
    def height(self) -> int:
        """The height of the picture: a head with the legend, and a row for each stage."""
        return _TOP + _ROW * self.timeline.table.stages + 20

    @property
    def scale(self) -> float:
        """The width of one unit of time."""
        return (_WIDTH - _LEFT - 10) / self.timeline.elapsed

    def legend(self) -> Iterator[str]:
        """A box and a name for each kind of pass that there is."""
        x = float(_LEFT)
        for kind in _kinds(self.timeline):
            colour, name = _COLOURS[kind][0], _name(self.timeline, kind)
            yield f'<rect x="{x:.0f}" y="24" width="12" height="12" fill="{colour}"/>'
            yield f'<text x="{x + 17:.0f}" y="34">{name}</text>'
            # A letter is about seven wide.
            x += 30 + 7 * len(name)

    def background(self, stage: int) -> Iterator[str]:
        """The name of a stage, and the bar on which its passes are drawn."""
        y = _TOP + _ROW * stage
        width = self.timeline.elapsed * self.scale
        yield f'<text x="{_LEFT - 8}" y="{y + 16}" text-anchor="end">stage {stage}</text>'
        yield (
            f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" fill="#f3f3f3"/>'
        )

    def box(self, stage: int, op: Op) -> Iterator[str]:
        """The box of a pass, with its microbatch's number where there is room for it."""
        start, end = self.timeline.start[op], self.timeline.end[op]
        y = _TOP + _ROW * stage
        left, width = _LEFT + start * self.scale, (end - start) * self.scale
        chunk = min(self.timeline.table.chunk(op.part), 1)
        # A little narrower than the time it takes, so that neighbours can be told apart.
        yield (
            f'<rect x="{left:.2f}" y="{y}" width="{max(width - 0.6, 0.2):.2f}" '
            f'height="{_ROW - 4}" fill="{_COLOURS[op.kind][chunk]}"><title>{op.kind}'
            f"{op.microbatch}, part {op.part}, from {start:g} to {end:g}</title></rect>"
        )
        if width > 8 * len(str(op.microbatch)):
            ink = ("#ffffff", "#222222")[chunk]
            yield (
                f'<text x="{left + width / 2:.2f}" y="{y + 15}" text-anchor="middle" '
                f'font-size="10" fill="{ink}">{op.microbatch}</text>'
            )


def text(timeline: Timeline, width: int = 100, *, colour: bool = False) -> str:
    """The Gantt chart as text, a line for each stage.

    - `timeline`: what `simulate` gives.
    - `width`: how many letters a line has at most.
    - `colour`: whether letters are coloured, by the codes of a terminal.

    The letters are F, B and W: capital for the first part of a stage, small for its other parts. A
    dot is time in which a stage waits. If there is room, each pass has a letter of its own, or
    several if it is long, with the number of its microbatch.

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
    # What is before the letters takes as much room on each line as for the last stage.
    room = width - len(f"stage {table.stages - 1} | ")
    # As many columns as the shortest pass goes into the whole, so that each has one to itself.
    columns = round(timeline.elapsed / _shortest_pass(timeline))
    digits = len(str(table.microbatches - 1))
    # A cell is a letter, a number, and a space. Without room for it, letters stand close together.
    if columns * (digits + 2) > room:
        digits = 0
        columns = max(1, min(room, columns))
    cells = _Cells(timeline, columns, digits, colour)
    longest = len(f"stage {table.stages - 1}")
    lines = []
    for stage in range(table.stages):
        name = f"stage {stage}".ljust(longest)
        lines.append(f"{name} | {cells.line(stage)}".rstrip())
    return "\n".join(lines)


def _shortest_pass(timeline: Timeline) -> float:
    """The time of the shortest pass that takes any."""
    shortest = timeline.elapsed
    for op, end in timeline.end.items():
        length = end - timeline.start[op]
        if 0 < length < shortest:
            shortest = length
    return shortest


@dataclass(frozen=True)
class _Cells:
    """The letters of a chart: so many columns, each of a letter and `digits` digits of a number."""

    timeline: Timeline
    columns: int
    digits: int
    colour: bool

    def line(self, stage: int) -> str:
        """What a stage does in each column: the pass that is under way in the middle of it."""
        step = self.timeline.elapsed / self.columns
        order = self.timeline.table.orders[stage]
        cells, at = [], 0
        for column in range(self.columns):
            # The middle of a column: passes that end at its edge are not drawn twice.
            moment = (column + 0.5) * step
            while at < len(order) and self.timeline.end[order[at]] <= moment:
                at += 1
            if at < len(order) and self.timeline.start[order[at]] <= moment:
                cells.append(self._cell(order[at]))
            else:
                cells.append("." * (self.digits + 1))
        separator = " " if self.digits else ""
        return separator.join(cells)

    def _cell(self, op: Op) -> str:
        """The letters of a pass, in colour for a terminal that has colours."""
        chunk = min(self.timeline.table.chunk(op.part), 1)
        # Capital letters for the first part of a stage, small ones for all further parts.
        letter = op.kind
        if chunk > 0:
            letter = letter.lower()
        cell = letter
        if self.digits:
            cell = f"{letter}{op.microbatch:<{self.digits}}"
        if not self.colour:
            return cell
        return f"{_TERMINAL[op.kind][chunk]}{cell}{_RESET}"


def _check_time(name: str, timeline: Timeline) -> None:
    """Refuse a timeline in which nothing takes any time: it has no scale."""
    if not timeline.elapsed > 0:
        raise ValueError(
            f"`{name}(timeline=...)`: with {timeline.costs} nothing takes any time, and there is "
            "nothing to draw."
        )


def _kinds(timeline: Timeline) -> list[str]:
    """The kinds of passes that a timeline has, in their usual order."""
    present = {op.kind for op in timeline.end}
    return [kind for kind in KINDS if kind in present]


def _name(timeline: Timeline, kind: str) -> str:
    """What the legend calls a kind of pass."""
    if kind == "B" and timeline.table.splits:
        return "backward: of what came"
    return _NAMES[kind]
