"""The load of experts over a run, as an SVG picture.

load       a row for each expert, a column for each record: white for an even share, blue for
           less, red for more
balance    the fullest expert in even shares, and the entropy of the router
dropped    the share of choices that found no place
rounds     in how many rounds tokens were sent
bytes      that a token sent to its experts and back, within nodes and across
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from shardlib._notebook import Picture
from shardlib.checks import _arguments as check
from shardlib.pipeline.schedules._draw import DARK

OP = "load_picture"
# In pixels: the picture, what is beside its panels, and the height of a panel of lines.
_WIDTH, _LEFT, _RIGHT, _TOP, _GAP, _PANEL = 900, 60, 20, 44, 46, 110
# The rows of all experts together, where there are few of them, or many.
_LEAST, _MOST = 96, 320
# More columns than pixels would not be seen.
_COLUMNS = 400
_COLOURS = ("#247", "#c52")


@dataclass(frozen=True)
class _Line:
    """A curve of a panel: its name, and a number for each record."""

    name: str
    values: Sequence[float]


def load_picture(records: Sequence[Mapping[str, Any]], title: str = "") -> str:
    """How the load of experts, and what came of it, went over a run, as SVG.

    Args:
        records: of a run, as `sl.fit` gives them to its sinks and writes them into `metrics.jsonl`.
            Those with a `load` are drawn, the metric that `MoEStats` has, by `step`. `entropy`,
            `dropped` and what `MoEStats.sending` has are drawn where all of these have them.
        title: above the picture.

    >>> records = [{"step": k, "load": [1.5, 0.5], "dropped": 0.1} for k in (10, 20)]
    >>> picture = load_picture(records)
    >>> picture.count("<rect"), picture.count("<polyline")
    (5, 2)
    """
    check.text(OP, "title", title)
    drawn = _checked(records)
    chart = _Chart([int(record["step"]) for record in drawn], len(drawn[0]["load"]))
    panels = _panels(drawn)
    height = chart.top_of(len(panels)) + 6
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        'font-family="sans-serif" font-size="12">',
        DARK,
        f'<rect width="{_WIDTH}" height="{height:.0f}" fill="white"/>',
        f'<text x="{_LEFT}" y="18" font-size="14" fill="black">{escape(title)}</text>',
        *chart.loads([record["load"] for record in drawn]),
    ]
    for number, panel in enumerate(panels):
        lines += chart.panel(number, panel)
    return Picture("\n".join([*lines, *chart.steps_below(len(panels)), "</svg>\n"]))


def _checked(records: Any) -> list[Mapping[str, Any]]:
    """The records that have a load, as a list; refuses records that cannot be drawn."""
    takes = "the records of a run, mappings with a `step` and a `load`"
    check.kind(OP, "records", records, list | tuple, takes)
    drawn: list[Mapping[str, Any]] = []
    for record in records:
        check.kind(OP, "records", record, Mapping, takes)
        if "load" not in record:
            continue
        check.whole(OP, "records", record.get("step"), "a whole number as each record's `step`")
        drawn.append({**record, "load": _checked_load(record["load"])})
    if not drawn:
        raise ValueError(
            f"`{OP}(records=...)`: none of the {len(records)} records has a `load`: let the loss "
            "return `stats.metrics` of a layer of experts."
        )
    counts = sorted({len(record["load"]) for record in drawn})
    if len(counts) > 1:
        raise ValueError(
            f"`{OP}(records=...)`: loads of {counts[0]} and of {counts[-1]} experts: draw one "
            "layer, or layers with equally many experts."
        )
    return drawn


def _checked_load(load: Any) -> list[float]:
    """The share of each expert; refuses what is not a number for each."""
    takes = "a list of numbers as each record's `load`, one for each expert"
    check.kind(OP, "records", load, list | tuple, takes)
    if not load:
        raise check.refusal(OP, "records", load, takes)
    return [_number(share, takes) for share in load]


def _number(value: Any, takes: str) -> float:
    """A number as it is; nan too, which a run may come to.

    In the file of a run it is None, as JSON has no nan.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return math.nan
    return check.number(OP, "records", value, takes, infinite=True)


def _panels(drawn: Sequence[Mapping[str, Any]]) -> list[list[_Line]]:
    """The curves below the loads, by panel."""
    fullest = _Line("fullest expert, in even shares", [max(one["load"]) for one in drawn])
    panels = [[fullest, *_known(drawn, "entropy", "entropy of the router, in nats")]]
    outcome = [
        *_known(drawn, "dropped", "dropped choices, as a share"),
        *_known(drawn, "rounds", "rounds in which tokens were sent"),
    ]
    sent = [
        *_known(drawn, "sent_within", "bytes a token sent within its node"),
        *_known(drawn, "sent_across", "bytes a token sent to other nodes"),
    ]
    panels += [[line] for line in outcome]
    return [*panels, sent] if sent else panels


def _known(drawn: Sequence[Mapping[str, Any]], metric: str, name: str) -> list[_Line]:
    """The curve of a metric, if every record has it."""
    if not all(metric in record for record in drawn):
        return []
    takes = f"a number as each record's `{metric}`"
    values = [_number(record[metric], takes) for record in drawn]
    return [_Line(name, values)]


@dataclass(frozen=True)
class _Chart:
    """The pieces of the picture, each as lines of SVG."""

    steps: Sequence[int]
    experts: int

    @property
    def loads_height(self) -> float:
        """The height of the rows of all experts."""
        return min(_MOST, max(_LEAST, 12 * self.experts))

    def top_of(self, panel: int) -> float:
        """Where a panel of lines begins."""
        return _TOP + self.loads_height + _GAP + panel * (_PANEL + _GAP)

    def x(self, step: float) -> float:
        """Where a step is."""
        first, last = self.steps[0], self.steps[-1]
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (step - first) / max(1, last - first)

    def loads(self, loads: Sequence[Sequence[float]]) -> Iterator[str]:
        """A row for each expert, whose boxes are coloured by load."""
        yield f'<text x="{_LEFT}" y="{_TOP - 8}" fill="black">load by expert</text>'
        row = self.loads_height / self.experts
        shown = range(0, len(loads), -(-len(loads) // _COLUMNS))
        width = (_WIDTH - _LEFT - _RIGHT) / len(shown)
        for expert in range(self.experts):
            y = _TOP + row * expert
            if expert % max(1, self.experts // 8) == 0:
                yield (
                    f'<text x="{_LEFT - 8}" y="{y + row / 2 + 4:.1f}" text-anchor="end">{expert}'
                    "</text>"
                )
            for column, number in enumerate(shown):
                load = loads[number][expert]
                yield (
                    f'<rect x="{_LEFT + column * width:.1f}" y="{y:.1f}" width="{width + 0.3:.1f}" '
                    f'height="{row:.1f}" fill="{_colour(load)}"><title>expert {expert}, step '
                    f"{self.steps[number]}: {load:.3g}</title></rect>"
                )

    def panel(self, number: int, lines: Sequence[_Line]) -> Iterator[str]:
        """Curves over the steps, each between its own least and most, which its name says."""
        top = self.top_of(number)
        for place, line in enumerate(lines):
            finite = [value for value in line.values if math.isfinite(value)] or [0.0]
            least, most = min(finite), max(finite)
            colour = _COLOURS[place]
            yield (
                f'<text x="{_LEFT + 400 * place}" y="{top - 8:.0f}" fill="{colour}">'
                f"{escape(line.name)}: {least:.3g} to {most:.3g}</text>"
            )
            points = []
            for step, value in zip(self.steps, line.values, strict=True):
                if math.isfinite(value):
                    height = (value - least) / (most - least) if most > least else 0.5
                    points.append(f"{self.x(step):.1f},{top + _PANEL * (1 - height):.1f}")
            yield f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}"/>'
        yield (
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top + _PANEL:.0f}" '
            f'y2="{top + _PANEL:.0f}" stroke="#ddd"/>'
        )

    def steps_below(self, panels: int) -> Iterator[str]:
        """Numbers of steps, below everything."""
        y = self.top_of(panels) - _GAP + 18
        first, last = self.steps[0], self.steps[-1]
        for part in range(5):
            step = first + (last - first) * part // 4
            yield f'<text x="{self.x(step):.1f}" y="{y:.0f}" text-anchor="middle">{step}</text>'


def _colour(load: float) -> str:
    """White for an even share, towards blue for nothing, and towards red for twice as much."""
    if not math.isfinite(load):
        return "#888"
    distance = max(-1.0, min(1.0, load - 1))
    faded = round(255 * (1 - 0.8 * abs(distance)))
    return f"rgb(255,{faded},{faded})" if distance > 0 else f"rgb({faded},{faded},255)"
