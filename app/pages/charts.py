"""Line charts as inline SVG: axes, ticks, legend and a mark at the extreme value, drawn crisp and small by ourselves.

Takes series of numbers (NaN is a gap); gives SVG text without colours: the page's style sheet has them, so that one
drawing serves light, dark and paper. Coordinates are in the units of the view box, ``WIDTH`` x ``HEIGHT``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 480.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 18.0, 24.0, 40.0
"""Margins: room for tick labels at the larger letters that phones get."""

MAX_POINTS = 400
"""A longer series is thinned to the extremes of as many columns: no peak is lost and the file stays small."""

LOG_RATIO = 50.0
"""Positive values that span more than this are drawn on a logarithmic axis."""

SMALLEST = 1e-290
"""An extreme nearer to zero is taken for zero: the powers of ten of its axis would leave the range of float64."""

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One line: ``x`` and ``y`` float64 (n,); ``colour`` is the number of the style sheet's colour.

    ``kind``: line; faint, a line that stays behind the others; dashed; dots, a line with a mark at every value.
    """

    name: str
    x: Values
    y: Values
    colour: int
    kind: Literal["line", "faint", "dashed", "dots"] = "line"

    @property
    def finite(self) -> NDArray[np.bool_]:
        return np.isfinite(self.x) & np.isfinite(self.y)


@dataclass(frozen=True)
class Axis:
    """From values to view-box units: ``low`` maps to ``start``, ``high`` to ``end``."""

    low: float
    high: float
    start: float
    end: float
    ticks: Sequence[float] = field(default_factory=tuple)
    log: bool = False

    def place(self, values: Values) -> Values:
        if self.log:
            values, low, high = np.log10(values), math.log10(self.low), math.log10(self.high)
        else:
            low, high = self.low, self.high
        placed: Values = self.start + (values - low) / (high - low) * (self.end - self.start)
        return placed

    def place_one(self, value: float) -> float:
        return float(self.place(np.array([value]))[0])


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    y_label: str,
    mark: Literal["min", "max"] | None = None,
    from_zero: bool = False,
    x_label: str = "step",
) -> str:
    """A figure with its title, legend and drawing; a sentence in place of the drawing when no value is finite.

    Args:
        series: lines, drawn in this order.
        title: of the figure, also what a screen reader says.
        y_label: what is on the y axis, with its unit.
        mark: which extreme value of the last series is marked and labelled.
        from_zero: the y axis begins at 0, as it should for amounts and shares.
    """
    shown = [one for one in series if one.finite.any()]
    head = f"<figcaption><h3>{escape(title)}</h3><span>{escape(y_label)}</span>{_legend(shown)}</figcaption>"
    if not shown:
        return f'<figure class="chart">{head}<p class="none">No values.</p></figure>'
    x_axis = _x_axis(np.concatenate([one.x[one.finite] for one in shown]))
    y_axis = _y_axis(np.concatenate([one.y[one.finite] for one in shown]), from_zero)
    parts = [*_frame(x_axis, y_axis, x_label)]
    for one in shown:
        parts += _drawn(one, x_axis, y_axis)
    if mark is not None:
        parts += _marked(shown, mark, x_axis, y_axis)
    body = "".join(parts)
    return (
        f'<figure class="chart">{head}<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" '
        f'aria-label="{escape(title)}">{body}</svg></figure>'
    )


def format_value(value: float, digits: int = 4) -> str:
    """A number as a reader would write it: ``digits`` digits, whole numbers in full, powers of ten for the extremes."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size and (size < 1e-3 or (size >= 1e6 and not isinstance(value, int))):
        return f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
    if size >= 1e4:
        return f"{value:,.0f}".replace("-", "−").replace(",", "\u2009")
    text = f"{value:.0f}" if size >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    return text.replace("-", "−")


def nice_ticks(low: float, high: float, most: int) -> list[float]:
    """Two to ``most`` (at least 6) round numbers from ``low`` to ``high``: steps of 1, 2 or 5 times a power of ten."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(factor for factor in (1, 2, 5, 10, 20) if (high - low) / (step * factor) <= most - 1)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _x_axis(x: Values) -> Axis:
    low, high = float(x.min()), float(x.max())
    if low == high:
        low, high = low - 1, high + 1
    ticks = [t for t in nice_ticks(low, high, 6) if t == int(t)]  # half a step does not exist
    return Axis(low, high, LEFT, WIDTH - RIGHT, ticks)


def _y_axis(y: Values, from_zero: bool) -> Axis:
    low, high = (0.0 if abs(end) < SMALLEST else float(end) for end in (y.min(), y.max()))
    bottom, top = HEIGHT - BOTTOM, TOP
    if from_zero:
        low = min(low, 0.0)
    elif low > 0 and high / low > LOG_RATIO:
        tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return Axis(10.0 ** tens[0], 10.0 ** tens[-1], bottom, top, [10.0**ten for ten in tens], log=True)
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        spread = abs(low) or 1.0
        low, high = low if from_zero else low - spread / 2, high + spread / 2
    ticks = nice_ticks(low, high, 6)
    step = ticks[1] - ticks[0]
    # Out to the next tick, so that the line keeps clear of the frame.
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Axis(low, high, bottom, top, nice_ticks(low, high, 8))


def _frame(x_axis: Axis, y_axis: Axis, x_label: str) -> Iterator[str]:
    for tick in y_axis.ticks:
        y = y_axis.place_one(tick)
        yield f'<line class="grid" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8:g}" y="{y:.1f}" dy=".34em" text-anchor="end">{format_value(tick)}</text>'
    base = HEIGHT - BOTTOM
    yield f'<line class="axis" x1="{LEFT:g}" x2="{WIDTH - RIGHT:g}" y1="{base:g}" y2="{base:g}"/>'
    for tick in x_axis.ticks:
        x = x_axis.place_one(tick)
        yield f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{base:g}" y2="{base + 4:g}"/>'
        yield f'<text x="{x:.1f}" y="{base + 17:g}" text-anchor="middle">{format_value(tick)}</text>'
    yield f'<text x="{WIDTH - RIGHT:g}" y="{HEIGHT - 6:g}" text-anchor="end">{escape(x_label)}</text>'


def _drawn(one: Series, x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    x, y = _thinned(one)
    px, py = x_axis.place(x), y_axis.place(y)
    path, pen_down, alone = [], False, []
    known = np.isfinite(py)
    for i in range(len(px)):
        if known[i]:
            path.append(f"{'L' if pen_down else 'M'}{px[i]:.1f} {py[i]:.1f}")
            if not pen_down and (i + 1 == len(px) or not known[i + 1]):
                alone.append(i)
        pen_down = bool(known[i])
    yield f'<path class="{one.kind} c{one.colour}" d="{"".join(path)}"/>'
    # A single value has no line; validations are few, and each deserves its mark.
    for i in range(len(px)) if one.kind == "dots" and len(px) <= 60 else alone:
        if known[i]:
            note = f"<title>{escape(one.name)}: {format_value(y[i])} at step {format_value(x[i])}</title>"
            yield f'<circle class="dot c{one.colour}" cx="{px[i]:.1f}" cy="{py[i]:.1f}" r="3.2">{note}</circle>'


def _thinned(one: Series) -> tuple[Values, Values]:
    """The series, or for a long one the extremes of each of ``MAX_POINTS / 2`` columns, in their order."""
    if len(one.x) <= MAX_POINTS:
        return one.x, one.y
    keep: list[int] = []
    for column in np.array_split(np.arange(len(one.x)), MAX_POINTS // 2):
        known = column[one.finite[column]]
        rows = known if len(known) else column
        keep += sorted({int(rows[np.argmin(one.y[rows])]), int(rows[np.argmax(one.y[rows])])})
    return one.x[keep], one.y[keep]


def _marked(shown: Sequence[Series], mark: Literal["min", "max"], x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    """A ring around the extreme value of the last series, its label where fewer values lie under it."""
    one = shown[-1]
    rows = np.flatnonzero(one.finite)
    at = int(rows[np.argmin(one.y[rows]) if mark == "min" else np.argmax(one.y[rows])])
    x, y = x_axis.place_one(float(one.x[at])), y_axis.place_one(float(one.y[at]))
    label = f"{mark} {format_value(float(one.y[at]))}"
    half = 4.0 * len(label)
    text_x = min(max(x, LEFT + half), WIDTH - RIGHT - half)
    placed_x = np.concatenate([x_axis.place(s.x[s.finite]) for s in shown])
    placed_y = np.concatenate([y_axis.place(s.y[s.finite]) for s in shown])
    beside = placed_y[np.abs(placed_x - text_x) < half]
    above, below = (int(np.count_nonzero(np.abs(beside - middle) < 9)) for middle in (y - 14, y + 14))
    upward = (above <= below and y - 20 > 0) or y + 20 > HEIGHT - BOTTOM
    yield f'<circle class="mark c{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
    text_y = y - 9 if upward else y + 18
    yield f'<text class="value" x="{text_x:.1f}" y="{text_y:.1f}" text-anchor="middle">{label}</text>'


def _legend(series: Sequence[Series]) -> str:
    """Name and last value of each line."""
    entries = (
        f'<li class="c{one.colour} {one.kind}">{escape(one.name)}'
        + ("" if one.kind == "faint" else f" <b>{format_value(float(one.y[one.finite][-1]))}</b>")
        + "</li>"
        for one in series
    )
    return f"<ul>{''.join(entries)}</ul>" if series else ""
