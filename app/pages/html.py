"""Pages from templates: self-contained HTML that is also well-formed XML, numbers with their units, and line charts.

Takes plain values for a template of ``templates/``; returns the page. Nothing is fetched and nothing runs: no script,
no font, no link; only the page of slides has pictures in files of its own. Light and dark follow the reader's system,
paper is always light, wide tables scroll on a phone. A chart is an SVG picture by matplotlib with its own legend, which
the style sheet inverts on dark pages.
"""

from __future__ import annotations

import base64
import io
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from numpy.typing import NDArray

from app.pages.run_files import Columns
from parallel.units import bytes_text

TEMPLATES = Environment(
    loader=PackageLoader("app.pages"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
"""Escapes all that it is given; a value that a template asks for and does not get is an error."""
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
SCORES = {
    "slide_auc": "Slide AUC",
    "slide_balanced_accuracy": "Slide balanced accuracy",
    "tile_auc": "Tile AUC",
    "tile_balanced_accuracy": "Tile balanced accuracy",
    "dice": "Dice",
    "loss": "Validation loss",
}
"""Scores by their key, the most telling first."""
SMOOTH_FRACTION = 0.05
"""Part of the run over which a noisy curve is averaged for its strong line."""
SETTLING_STEPS = 2
"""First steps that the speed curves leave out, as the speed figures do: they would hide all later ones."""


class Card(NamedTuple):
    """One large figure with its name above and where it comes from below."""

    name: str
    value: str
    unit: str = ""
    note: str = ""


class Table(NamedTuple):
    """Rows of cells under headers, with notes below; the columns ``numeric`` stand to the right."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()
    notes: Sequence[str] = ()


def rendered(template: str, **values: Any) -> str:
    """Return the page of a template with these values."""
    return TEMPLATES.get_template(template).render(values)


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


def format_duration(seconds: float) -> str:
    """``1 h 02 min``, ``3 min 05 s`` or ``4.2 s``."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def format_setting(name: str, value: Any) -> str:
    """A value as a person reads it; the end of ``name`` tells its unit (``_bytes``, ``_s``, ``_fraction``)."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(format_setting(name, one) for one in value) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {format_setting(str(key), one)}" for key, one in value.items())
    if isinstance(value, int | float):
        for end, form in (
            ("_bytes", bytes_text),
            ("_s", format_duration),
            ("_fraction", lambda part: f"{100 * part:.2f} %"),
        ):
            if name.endswith(end):
                return form(value)
        return str(value) if isinstance(value, int) else format_value(value)
    return str(value)


def flattened(values: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    """(name, value) of all values, nested ones under ``outer inner``, underscores as spaces."""
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{above} {key}".strip().replace("_", " ")
        if isinstance(value, Mapping) and value:
            pairs += flattened(value, name)
        else:
            shown = name.removesuffix(" bytes")
            pairs.append((shown, format_setting(str(key), value)))
    return pairs


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
    linear: bool = False,
    last: bool = True,
) -> Chart:
    """Return a chart of those series that have a finite value.

    Args:
        y_label: what is on the y axis, with its unit.
        sizes: ticks of an x axis on which doubling is a step; the values are positive, on a logarithmic axis, too.
        mark: which extreme value of the last series is marked and labelled.
        from_zero: the y axis begins at 0, as it should for amounts and shares, unless it is logarithmic.
        linear: the y axis is never logarithmic, as for shares, however small the least.
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
        if sizes or (not linear and low > 0 and high > LOG_RATIO * low):
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


def curves(metrics: Columns, validation: Columns, pictures: bool = False) -> list[Chart]:
    """Return the charts that ``metrics.csv`` and ``validation.csv`` have values for; ``pictures``: see `score_name`."""
    charts = []
    if _has(metrics, "step", "loss"):
        drawn = _smoothed("training", metrics["step"], metrics["loss"], 0)
        if _has(validation, "step", "loss"):
            drawn.append(Series("validation", validation["step"], validation["loss"], 1, "dots"))
        charts.append(line_chart(drawn, title="Loss", y_label="per tile", mark="min"))
    scores = [key for key in validation if key not in ("step", "loss") and np.isfinite(validation[key]).any()]
    scores = [key for key in scores if not (pictures and key.startswith("tile_"))]
    if scores:
        drawn = [
            Series(score_name(key, pictures), validation["step"], validation[key], i, "dots")
            for i, key in enumerate(scores)
        ]
        drawn.append(drawn.pop(next((i for i, key in enumerate(scores) if key in ("slide_auc", "dice")), 0)))
        title, unit = "Validation scores", "0 to 1"
        charts.append(line_chart(drawn, title, unit, mark="max", from_zero=True, linear=True))
    settled = {name: v[SETTLING_STEPS:] if len(v) > SETTLING_STEPS else v for name, v in metrics.items()}
    if _has(settled, "step", "images_per_second"):
        drawn = _smoothed("images/s", settled["step"], settled["images_per_second"], 2)
        charts.append(line_chart(drawn, title="Throughput", y_label="images/s", from_zero=True))
    if _has(settled, "step", "step_s", "data_wait_s"):
        drawn = [
            Series("whole step", settled["step"], settled["step_s"], 0),
            Series("of it waiting for data", settled["step"], settled["data_wait_s"], 1),
        ]
        charts.append(line_chart(drawn, title="Time of a step", y_label="seconds", from_zero=True))
    if _has(metrics, "step", "lr"):
        drawn = [Series("learning rate", metrics["step"], metrics["lr"], 3)]
        charts.append(line_chart(drawn, title="Learning rate", y_label="per step", mark="max", from_zero=True))
    return charts


def _smoothed(name: str, step: Values, value: Values, colour: int) -> list[Series]:
    """A noisy curve: each step faint, the mean of its neighbours strong. Of a short run, the steps alone."""
    window = round(len(value) * SMOOTH_FRACTION)
    if window < 2:
        return [Series(name, step, value, colour)]
    known = np.isfinite(value)
    sums, counts = (np.convolve(v, np.ones(window), "same") for v in (np.where(known, value, 0.0), known * 1.0))
    mean = np.where(known, sums / np.maximum(counts, 1), np.nan)
    return [
        Series(f"{name}, each step", step, value, colour, "faint"),
        Series(f"{name}, mean of {window} steps", step, mean, colour),
    ]


def _has(columns: Columns, *names: str) -> bool:
    return all(name in columns and len(columns[name]) > 0 for name in names)


def score_name(key: str, pictures: bool = False) -> str:
    """Return the name of the score ``key``; ``pictures``: of whole pictures, each of which is one tile, no slide."""
    if pictures and key in SCORES:
        return SCORES[key].replace("Slide", "Picture").replace("Tile", "Picture")
    return SCORES.get(key, f"Dice {key.removeprefix('dice_')}" if key.startswith("dice_") else key.replace("_", " "))
