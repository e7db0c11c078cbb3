"""Line charts by matplotlib, each an SVG picture with its own legend.

Takes series of numbers (NaN is a gap); returns ``Chart``s for a template, which shows them as images. The style sheet
inverts them on dark pages.
"""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.pages.html import format_value

SIZE = (6.0, 3.6)
"""Width and height in inches of 72 px."""
COLOURS = ("#2160c4", "#c2500f", "#19805a", "#7648bd", "#b02f78", "#6b7480")
MARKERS = "os^Dv"
"""With the colours they distinguish thirty lines."""
LOG_RATIO = 50.0
"""Positive values that span more than this are drawn on a logarithmic axis."""
MOST_MARKS = 60
"""A line with more values than this has no mark at each of them."""

STYLES: dict[str, dict[str, Any]] = {"faint": {"alpha": 0.4, "linewidth": 1.2}, "ideal": {"linestyle": "--"}}
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megatile",
    "path.simplify_threshold": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.alpha": 0.4,
    "legend.frameon": False,
    "font.size": 11.0,
}

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Series:
    """One line: ``x`` and ``y`` float64 (n,); ``colour``: its number, which chooses the mark, too.

    ``kind``: line; faint, behind the others; dots, with a mark at every value; ideal, dashed.
    """

    name: str
    x: Values
    y: Values
    colour: int
    kind: Literal["line", "faint", "dots", "ideal"] = "line"

    @property
    def finite(self) -> NDArray[np.bool_]:
        return np.isfinite(self.x) & np.isfinite(self.y)


class Chart(NamedTuple):
    """A figure: ``svg`` is its picture in base64, empty where no value is finite; ``alt`` says what is on it."""

    title: str
    unit: str
    svg: str
    alt: str


def line_chart(
    series: Sequence[Series],
    title: str,
    y_label: str,
    *,
    x_label: str = "step",
    sizes: Collection[float] = (),
    mark: Literal["min", "max"] | None = None,
    from_zero: bool = False,
    log: bool = False,
    last: bool = True,
) -> Chart:
    """Return a chart of those series that have a finite value.

    Args:
        series: lines, drawn in this order.
        title: of the figure, also what a screen reader says.
        y_label: what is on the y axis, with its unit.
        x_label: what is on the x axis.
        sizes: ticks of an x axis on which doubling is a step.
        mark: which extreme value of the last series is marked and labelled.
        from_zero: the y axis begins at 0, as it should for amounts and shares.
        log: a logarithmic y axis whatever the values, which are positive.
        last: the legend has the last value of each line.
    """
    shown = [line for line in series if line.finite.any()]
    if not shown:
        return Chart(title, y_label, "", title)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs about fonts, which are the browser's
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(SETTINGS):
        figure = Figure(figsize=SIZE, dpi=72, layout="constrained")
        axes = figure.add_subplot(xlabel=x_label)
        values = np.concatenate([line.y[line.finite] for line in shown])
        low, high = values.min(), values.max()
        if log or (low > 0 and high > LOG_RATIO * low):
            axes.set_yscale("log")
        elif from_zero:
            axes.set_ylim(bottom=min(low, 0.0), top=1.05 * high if high > 0 else 1.0)
        if sizes:
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(sizes), [format_value(size) for size in sizes])
            axes.minorticks_off()
        for line in shown:
            end = f" {format_value(float(line.y[line.finite][-1]))}" if last and line.kind != "faint" else ""
            look: dict[str, Any] = {
                "color": COLOURS[line.colour % len(COLOURS)],
                "label": line.name + end,
                **STYLES.get(line.kind, {}),
            }
            known = np.pad(line.finite, 1)
            alone = line.finite & ~known[:-2] & ~known[2:]  # a value between gaps has no line
            marked = line.finite if line.kind == "dots" and len(line.x) <= MOST_MARKS else alone
            if marked.any():
                look |= {"marker": MARKERS[line.colour % len(MARKERS)], "markevery": np.flatnonzero(marked).tolist()}
            axes.plot(line.x, line.y, **look)
        if mark is not None:
            end_of = shown[-1]
            at = int((np.nanargmin if mark == "min" else np.nanargmax)(np.where(end_of.finite, end_of.y, np.nan)))
            place, text = (end_of.x[at], end_of.y[at]), f"{mark} {format_value(float(end_of.y[at]))}"
            axes.plot(*place, "o", markersize=8, fillstyle="none", color=COLOURS[end_of.colour % len(COLOURS)])
            axes.annotate(text, place, (0, 8), textcoords="offset points", ha="center", weight="bold")
        figure.legend(loc="outside upper left", ncols=2)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None}, transparent=True)
    points = [f"{line.name}: {_points(line)}" for line in shown] if sizes else []
    return Chart(title, y_label, base64.b64encode(picture.getvalue()).decode(), ". ".join([title, *points]))


def _points(line: Series) -> str:
    pairs = zip(line.x[line.finite], line.y[line.finite], strict=True)
    return ", ".join(f"{format_value(y)} at {format_value(x)}" for x, y in pairs)
