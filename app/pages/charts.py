"""Line charts by matplotlib, as drawings without colours and letters of their own: the page's style sheet has them.

Takes series of numbers (NaN is a gap); gives ``Chart``s for a template. Each colour is drawn as one that nothing else
has and then written as the variable of the style sheet, so that one drawing serves light, dark and paper.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.pages.html import format_value

if TYPE_CHECKING:  # half a second, and only needed to draw
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 480.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 18.0, 24.0, 40.0
"""Units of the view box, and margins: room for tick labels at the larger letters that phones get."""

LETTER, LINE = 7.4, 17.0
"""Width to allow for a letter and height of a line of text, at the larger letters that phones get."""

COLOURS = 6
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆", "v": "▼"}
"""Marks, by matplotlib's names, and as the legend has them. With the colours they tell thirty lines apart."""

VARIABLES = ("c0", "c1", "c2", "c3", "c4", "c5", "soft", "line", "bad", "card")
INKS = {name: f"#0000{n:02x}" for n, name in enumerate(VARIABLES, 1)}
"""Variable of the style sheet -> what stands for it while it is drawn."""

LOG_RATIO = 50.0
"""Positive values that span more than this are drawn on a logarithmic axis."""

SMALLEST = 1e-290
"""An extreme nearer to zero is taken for zero: the powers of ten of its axis would leave the range of float64."""

Values = NDArray[np.float64]

STYLES: dict[str, dict[str, Any]] = {
    "faint": {"linewidth": 1.2, "alpha": 0.4},
    "ideal": {"linewidth": 1.5, "linestyle": (0, (4.5, 3.5))},
}


@dataclass(frozen=True)
class Series:
    """One line: ``x`` and ``y`` float64 (n,); ``colour`` is the number of the style sheet's colour.

    ``kind``: line; faint, a line that stays behind the others; dots, a line with a mark at every value, the ``marker``
    of ``MARKERS`` where several lines have to be told apart; ideal, what others are held against.
    """

    name: str
    x: Values
    y: Values
    colour: int
    kind: Literal["line", "faint", "dots", "ideal"] = "line"
    marker: str = ""

    @property
    def glyph(self) -> str:
        """Its mark in the legend."""
        return MARKERS.get(self.marker, "")

    @property
    def last(self) -> str:
        """The last value that there is."""
        return format_value(float(self.y[self.finite][-1]))

    @property
    def finite(self) -> NDArray[np.bool_]:
        return np.isfinite(self.x) & np.isfinite(self.y)


class Event(NamedTuple):
    """Something that is so from ``x`` on."""

    x: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A figure; ``drawing``: inside of an SVG of ``WIDTH`` x ``HEIGHT``, empty where no value is finite."""

    title: str
    unit: str
    series: Sequence[Series]
    drawing: str
    said: str


def line_chart(
    series: Sequence[Series],
    title: str,
    y_label: str,
    *,
    x_label: str = "step",
    sizes: Collection[float] = (),
    events: Sequence[Event] = (),
    mark: Literal["min", "max"] | None = None,
    from_zero: bool = False,
    log: bool = False,
) -> Chart:
    """Return a chart of those series that have a finite value.

    Args:
        series: lines, drawn in this order.
        title: of the figure, also what a screen reader says.
        y_label: what is on the y axis, with its unit.
        x_label: what is on the x axis.
        sizes: ticks of an x axis on which doubling is a step; one without a value is a result, too.
        events: vertical lines with their text above.
        mark: which extreme value of the last series is marked and labelled.
        from_zero: the y axis begins at 0, as it should for amounts and shares.
        log: a logarithmic y axis whatever the values, which are positive.
    """
    shown = [line for line in series if line.finite.any()]
    if not shown:
        return Chart(title, y_label, (), "", title)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # of fonts and where it keeps them: letters are the page's
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": "megatile"}]):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, frameon=False)
        high = HEIGHT - BOTTOM - TOP - LINE * max(0, len(events) - 1)
        axes = figure.add_axes((LEFT / WIDTH, BOTTOM / HEIGHT, (WIDTH - LEFT - RIGHT) / WIDTH, high / HEIGHT))
        axes.patch.set_visible(False)
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.spines["bottom"].set_color(INKS["soft"])
        values = np.concatenate([np.column_stack([line.x, line.y])[line.finite] for line in shown])
        _x_axis(axes, values[:, 0], sizes)
        _y_axis(axes, values[:, 1], from_zero, log)
        figure.text(1 - RIGHT / WIDTH, 6 / HEIGHT, x_label, ha="right")
        # The last one highest: no line then crosses the words of one that begins to the left of it.
        for row, event in enumerate(sorted(events, key=lambda event: -event.x)):
            _draw_event(axes, event, HEIGHT - TOP + 9 - LINE * row)
        for line in shown:
            _draw(axes, line, x_label)
        if mark is not None:
            _mark(axes, shown[-1], mark, values)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    said = [f"{title}, {y_label}, over {x_label}", *map(_spoken, shown), *(event.text for event in events)]
    return Chart(title, y_label, shown, _inside(text.getvalue()), ". ".join(said) if sizes else title)


def _x_axis(axes: Axes, x: Values, sizes: Collection[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    every = sorted({*x, *sizes})
    low, high = every[0], every[-1]
    if sizes:
        low, high = (low / 2, high * 2) if low == high else (low, high)
        room = (high / low) ** 0.06  # so that the first and last marks keep clear of the frame
        axes.set_xscale("log")
        axes.set_xlim(low / room, high * room)
        labels, free_from = [], 0.0  # numbers that there is room for
        for size in every:
            at, half = axes.transData.transform((size, 1.0))[0], LETTER * len(format_value(size)) / 2
            labels.append(format_value(size) if at - half >= free_from else "")
            free_from = at + half + 4 if labels[-1] else free_from
        axes.set_xticks(every, labels)
        axes.minorticks_off()
    else:
        low, high = (low - 1, high + 1) if low == high else (low, high)
        ticks = MaxNLocator(5, steps=[1, 2, 5, 10], integer=True).tick_values(low, high)
        axes.set_xticks(ticks, map(format_value, ticks))
        axes.set_xlim(low, high)
    axes.tick_params(axis="x", length=4, color=INKS["soft"], pad=4)


def _y_axis(axes: Axes, y: Values, from_zero: bool, log: bool) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high = (0.0 if abs(end) < SMALLEST else float(end) for end in (y.min(), y.max()))
    low = min(low, 0.0) if from_zero else low
    if log or (low > 0 and high / low > LOG_RATIO):
        axes.set_yscale("log")
        subs = (1.0, 2.0, 5.0) if high / low < LOG_RATIO else (1.0,)
        ticks = LogLocator(subs=subs, numticks=999).tick_values(low / 10, high * 10)
        first = int(np.searchsorted(ticks, low * (1 + 1e-9), "right")) - 1
        ticks = ticks[first : max(int(np.searchsorted(ticks, high * (1 - 1e-9))), first + 1) + 1]
    else:
        if high - low <= 1e-9 * max(abs(low), abs(high)):
            spread = abs(low) or 1.0
            low, high = low if from_zero else low - spread / 2, high + spread / 2
        ticks = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low, high)
    axes.set_yticks(ticks, map(format_value, ticks))
    axes.minorticks_off()
    axes.set_ylim(ticks[0], ticks[-1])  # out to the next tick, so that the line keeps clear of the frame
    axes.tick_params(axis="y", length=0, pad=8)
    axes.grid(axis="y", color=INKS["line"], linewidth=1, clip_on=False)


def _draw(axes: Axes, line: Series, x_label: str) -> None:
    colour = INKS["soft" if line.kind == "ideal" else f"c{line.colour}"]
    look = {"linewidth": 2.0, **STYLES.get(line.kind, {})}
    axes.plot(line.x, line.y, color=colour, clip_on=False, gid=f"series {line.kind}", **look)
    # A single value has no line; validations are few, and each deserves its mark.
    known = np.pad(line.finite, 1)
    marked = line.finite if line.kind == "dots" and len(line.x) <= 60 else line.finite & ~known[:-2] & ~known[2:]
    for x, y in zip(line.x[marked], line.y[marked], strict=True):
        note = f"note {line.name}: {format_value(y)} ({x_label}: {format_value(x)})"
        (dot,) = axes.plot(x, y, line.marker or "o", color=colour, markersize=8, clip_on=False, gid=note)
        dot.set(markeredgecolor=INKS["card"], markeredgewidth=1)


def _draw_event(axes: Axes, event: Event, text_y: float) -> None:
    x = axes.transData.transform((event.x, 1.0))[0]
    half = min(LETTER * len(event.text) / 2, WIDTH / 2)
    top = (text_y - 4 - BOTTOM) / axes.bbox.height
    axes.axvline(event.x, 0, top, color=INKS["bad"], linewidth=1.5, linestyle=(0, (2, 2)), clip_on=False)
    place = (min(max(x, half), WIDTH - half), text_y)
    axes.annotate(event.text, place, xycoords="figure points", ha="center", gid="event", annotation_clip=False)


def _mark(axes: Axes, line: Series, mark: Literal["min", "max"], values: Values) -> None:
    """A ring around the extreme value of a series, its label where fewer of all ``values`` lie under it."""
    at = int((np.nanargmin if mark == "min" else np.nanargmax)(np.where(line.finite, line.y, np.nan)))
    (ring,) = axes.plot(line.x[at], line.y[at], "o", color=INKS[f"c{line.colour}"], markersize=8, clip_on=False)
    ring.set(markerfacecolor=INKS["card"], markeredgewidth=2)
    text = f"{mark} {format_value(float(line.y[at]))}"
    half = 4.0 * len(text)
    x, y = axes.transData.transform((line.x[at], line.y[at]))
    middle = min(max(x, LEFT + half), WIDTH - RIGHT - half)
    placed = axes.transData.transform(values)
    beside = placed[np.abs(placed[:, 0] - middle) < half, 1]
    above, below = (np.count_nonzero(np.abs(beside - y - off) < 9) for off in (14, -14))
    upward = (above <= below and y + 20 < HEIGHT) or y - 20 < BOTTOM
    place = (middle, y + (9 if upward else -18))
    axes.annotate(text, place, xycoords="figure points", ha="center", gid="value", annotation_clip=False)


def _inside(svg: str) -> str:
    """What stands in matplotlib's SVG, without ids, fonts and styles that would reach beyond it."""
    svg = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    svg = re.sub(r"<metadata>.*?</metadata>|<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="note ([^"]*)">', r"<g><title>\1</title>", svg)
    svg = re.sub(r'<g id="(series \w+|value|event)">', r'<g class="\1">', svg)
    svg = re.sub(r'(?<=<g) id="[^"]*"', "", svg)
    svg = re.sub(r'<text style="[^"]*text-anchor: (\w+)[^"]*"(.*?) transform="[^"]*"', r'<text text-anchor="\1"\2', svg)
    svg = re.sub(r' (d|x|y)="[^"]*"', lambda places: re.sub(r"(\.\d)\d+", r"\1", places[0]), svg)
    for name, ink in INKS.items():
        svg = svg.replace(ink, f"var(--{name})")
    return re.sub(r">\s+<", "><", svg).replace("xlink:href", "href").strip()


def _spoken(line: Series) -> str:
    points = zip(line.x[line.finite], line.y[line.finite], strict=True)
    return f"{line.name}: " + ", ".join(f"{format_value(y)} at {format_value(x)}" for x, y in points)
