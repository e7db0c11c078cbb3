"""A chart with a line per strategy over a size that doubles: tile sides or ranks. Colour and mark tell lines apart.

Takes a few points per line; gives a figure in the manner of ``app.pages.charts``, with the sizes themselves as ticks,
evenly spaced where they double, and vertical lines where something happens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from app.pages.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, format_value, nice_ticks

MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "M-3.6 -3.6H3.6V3.6H-3.6Z",
    "M0 -4.8L4.6 3.4H-4.6Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 4.8L4.6 -3.4H-4.6Z",
)
"""Outlines around (0, 0): circle, square, triangle, diamond, triangle upside down."""

COLOURS = 6
"""Of the page; with five marks, thirty lines differ."""

LETTER = 7.4
"""Width to allow for a letter, in units of the view box, at the larger letters that phones get."""

STEP = 17.0
"""Height of a line of text."""

STYLE = """
.lines path.mark { fill: var(--series); stroke: var(--card); stroke-width: 1; }
.lines path.event { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 2 4; }
.lines svg text.event { fill: var(--bad); paint-order: stroke; stroke: var(--card); stroke-width: 5px; }
.lines figcaption li::before { content: none; }
.lines figcaption li svg { display: inline-block; width: 22px; height: 10px; margin-right: 6px;
  vertical-align: middle; }
.lines figcaption li.faint::before { content: ""; width: 22px; height: 0; border-radius: 0; background: none;
  border-top: 1.5px dashed var(--soft); opacity: 1; }
.lines path.ideal { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 7 5; }
"""


@dataclass(frozen=True)
class Line:
    """Points of one strategy, (size, value), and its place among all: the same strategy looks the same everywhere."""

    name: str
    points: tuple[tuple[float, float], ...]
    look: int
    ideal: bool = False


@dataclass(frozen=True)
class Event:
    """Something that is so from size ``x`` on."""

    x: float
    text: str


def lines_figure(
    title: str,
    unit: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    sizes: Iterable[float],
    events: Sequence[Event] = (),
    log: bool = False,
) -> str:
    """The figure; empty where no line has a point.

    Args:
        title: also what a screen reader says.
        unit: what is on the y axis, with its unit.
        lines: the ideal one is dashed and has no marks.
        x_label: what is on the x axis.
        sizes: all ticks of the x axis: one without a point is a result, too.
        events: vertical lines with their text above.
        log: a logarithmic y axis; otherwise it begins at 0.
    """
    drawn = [line for line in lines if line.points]
    if not drawn:
        return ""
    top = TOP + STEP * max(0, len(events) - 1)
    x_axis = _x_axis(sorted({*sizes, *(x for line in drawn for x, _ in line.points)}))
    values = [y for line in drawn for _, y in line.points]
    y_axis = _log_axis(values, top) if log else _zero_axis(values, top)
    parts = [*_frame(x_axis, y_axis, x_label, top)]
    # The last one highest: no line then crosses the words of one that begins to the left of it.
    for row, event in enumerate(sorted(events, key=lambda event: -event.x)):
        parts += _event(event, x_axis, TOP - 9 + STEP * row)
    for line in drawn:
        parts += _line(line, x_axis, y_axis, x_label)
    legend = "".join(_key(line) for line in drawn)
    said = f"{title}, {unit}, over {x_label}. " + ". ".join(_spoken(line) for line in drawn)
    said += "".join(f". {event.text}" for event in events)
    return (
        f'<figure class="chart lines"><figcaption><h3>{escape(title)}</h3><span>{escape(unit)}</span><ul>{legend}</ul>'
        f'</figcaption><svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{escape(said, quote=True)}">'
        f"{''.join(parts)}</svg></figure>"
    )


def _x_axis(sizes: Sequence[float]) -> Axis:
    low, high = sizes[0], sizes[-1]
    if low == high:
        low, high = low / 2, high * 2
    room = (high / low) ** 0.06  # so that the first and last marks keep clear of the frame
    return Axis(low / room, high * room, LEFT, WIDTH - RIGHT, sizes, log=True)


def _zero_axis(values: Sequence[float], top: float) -> Axis:
    ticks = nice_ticks(0.0, max(values) or 1.0, 6)
    high = math.ceil((max(values) or 1.0) / ticks[1] - 1e-9) * ticks[1]
    return Axis(0.0, high, HEIGHT - BOTTOM, top, nice_ticks(0.0, high, 8))


def _log_axis(values: Sequence[float], top: float) -> Axis:
    """From the round number below the lowest to that above the highest; 1, 2, 5 and 10 are round."""
    low, high = min(values), max(values)
    tens = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    round_ones = [factor * 10.0**ten for ten in tens for factor in (1, 2, 5)]
    first = max(one for one in round_ones if one <= low * (1 + 1e-9))
    last = min(one for one in round_ones if one >= high * (1 - 1e-9) and one > first)
    ticks = [one for one in round_ones if first <= one <= last]
    if len(ticks) > 7:
        ticks = [one for one in ticks if math.log10(one) % 1 < 1e-9 or math.log10(one) % 1 > 1 - 1e-9]
    return Axis(first, last, HEIGHT - BOTTOM, top, ticks, log=True)


def _frame(x_axis: Axis, y_axis: Axis, x_label: str, top: float) -> Iterator[str]:
    for tick in y_axis.ticks:
        y = y_axis.place_one(tick)
        yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8:g}" y="{y:.1f}" dy=".34em" text-anchor="end">{format_value(tick)}</text>'
    base = HEIGHT - BOTTOM
    yield f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{base:g}" y2="{base:g}"/>'
    free_from = 0.0
    for tick in x_axis.ticks:
        x, text = x_axis.place_one(tick), format_value(tick)
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base:g}" y2="{base + 4:g}"/>'
        half = LETTER * len(text) / 2
        if x - half >= free_from:
            yield f'<text x="{x:.1f}" y="{base + 17:g}" text-anchor="middle">{text}</text>'
            free_from = x + half + 4
    yield f'<text x="{WIDTH - RIGHT:g}" y="{HEIGHT - 6:g}" text-anchor="end">{escape(x_label)}</text>'


def _event(event: Event, x_axis: Axis, text_y: float) -> Iterator[str]:
    x = x_axis.place_one(event.x)
    half = min(LETTER * len(event.text) / 2, WIDTH / 2)
    middle = min(max(x, half), WIDTH - half)
    yield f'<path class="event" d="M{x:.1f} {text_y + 4:.1f}V{HEIGHT - BOTTOM:g}"/>'
    yield f'<text class="event" x="{middle:.1f}" y="{text_y:.1f}" text-anchor="middle">{escape(event.text)}</text>'


def _line(line: Line, x_axis: Axis, y_axis: Axis, x_label: str) -> Iterator[str]:
    placed = [(x_axis.place_one(x), y_axis.place_one(y)) for x, y in line.points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
    if line.ideal:
        yield f'<path class="ideal" d="{path}"/>'
        return
    colour = line.look % COLOURS
    if len(placed) > 1:
        yield f'<path class="c{colour}" d="{path}"/>'
    for (x, y), (size, value) in zip(placed, line.points, strict=True):
        note = f"<title>{escape(line.name)}: {format_value(value)} at {format_value(size)} {escape(x_label)}</title>"
        mark = MARKS[line.look % len(MARKS)]
        yield f'<path class="mark c{colour}" transform="translate({x:.1f} {y:.1f})" d="{mark}">{note}</path>'


def _key(line: Line) -> str:
    if line.ideal:
        return f'<li class="faint">{escape(line.name)}</li>'
    colour = line.look % COLOURS
    drawing = (
        f'<svg viewBox="-11 -5 22 10" aria-hidden="true"><path class="c{colour}" d="M-11 0H11"/>'
        f'<path class="mark c{colour}" d="{MARKS[line.look % len(MARKS)]}"/></svg>'
    )
    return f"<li>{drawing}{escape(line.name)}</li>"


def _spoken(line: Line) -> str:
    points = ", ".join(f"{format_value(y)} at {format_value(x)}" for x, y in line.points)
    return f"{line.name}: {points}"
