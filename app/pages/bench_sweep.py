"""Sweeps on the page of a benchmark: what was varied, what can be said of it, and every setting with its speed.

Takes sweeps as ``bench.json`` has them; gives HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from app.pages.charts import format_value
from app.pages.html import table

COLUMNS = ("on", "images/s", "range", "times nothing on", "times its best knob", "verdict")


def sweep_parts(sweeps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """For each a heading, its findings, the knobs, and its table."""
    for sweep in sweeps:
        ranks = sweep["ranks"]
        title = f"{sweep['model']}, {sweep['strategy']} on {ranks} {'rank' if ranks == 1 else 'ranks'}, "
        yield f'<h3 class="model">{escape(title)}{sweep["tile_px"]} px</h3>'
        yield "".join(f"<p>{escape(finding)}</p>" for finding in sweep["findings"])
        knobs = (
            f"{knob['name']} {', '.join(knob['on'])} ({knob['off']} is off): {knob['what']}" for knob in sweep["knobs"]
        )
        yield f'<p class="soft">{escape("; ".join(knobs))}.</p>'
        yield table(COLUMNS, [_cells(row) for row in sweep["rows"]], numeric=range(1, 5))


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = row["images_per_second_range"] or (None, None)
    return (
        row["label"],
        _number(row["images_per_second"]),
        "" if low is None else f"{_number(low)}\u2013{_number(high)}",
        _number(row["times_off"]),
        _number(row["times_best_knob"]),
        row["reason"] or row["verdict"],
    )


def _number(value: float | None) -> str:
    return "" if value is None else format_value(value, 3)
