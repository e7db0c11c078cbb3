"""All rows of a benchmark in full: figures on one line, the claim that they support on the next.

Takes rows in the order of the file; gives a table per model, tile side and number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app.charts import format_value
from app.page import format_bytes, format_percent
from app.trials.bench_file import Bench, Result
from app.trials.groups import range_text
from app.trials.panels import WORDS

STYLE = """
.full { font-size: 13.5px; } .full th, .full td { padding: 5px 9px; } .full thead th { white-space: normal; }
.full thead th { vertical-align: bottom; line-height: 1.25; }
.full tbody tr.more td { border-top: 0; padding-top: 0; color: var(--soft); }
.full tbody tr.more td.claim { max-width: 0; }
.full tbody.group th { background: var(--ground); font-weight: 600; }
.full tbody { break-inside: avoid; }
@media (max-width: 600px) { .full { min-width: 860px; } }
@media print { .full { font-size: 9.5px; } .full th, .full td { padding: 3px 4px; }
  .table:has(.full) { overflow: visible; } }
"""

COLUMNS = (
    "strategy",
    "micro\u00adbatches",
    "images/s",
    "range",
    "against baseline",
    "fed from memory",
    "Mpx/s",
    "data wait",
    "bubble (predicted)",
    "fullest rank",
    "sent a step",
    "loss",
)
"""Of the figures; soft hyphens let narrow columns break."""


def full_table(bench: Bench) -> str:
    """The table; empty without rows."""
    if not bench.results:
        return ""
    head = "".join(f"<th{_kind(i)}>{escape(name)}</th>" for i, name in enumerate(COLUMNS))
    body: list[str] = []
    before = ""
    for one in bench.results:
        title = _title(one)
        if title != before:
            body.append(f'<tbody class="group"><tr><th colspan="{len(COLUMNS)}">{escape(title)}</th></tr></tbody>')
            before = title
        body.append(f"<tbody>{_row(one)}</tbody>")
    return f'<div class="table"><table class="full"><thead><tr>{head}</tr></thead>{"".join(body)}</table></div>'


def _title(one: Result) -> str:
    parts = [one.model, f"{one.tile_px} px", f"{one.ranks} {'rank' if one.ranks == 1 else 'ranks'}"]
    if one.global_batch is not None:
        parts.append(f"{one.global_batch} {'tile' if one.global_batch == 1 else 'tiles'} a step")
    if one.scaling:
        parts.append(f"{one.scaling} scaling")
    return " · ".join(parts)


def _row(one: Result) -> str:
    cells = "".join(f"<td{_kind(i)}>{escape(text)}</td>" for i, text in enumerate(_figures(one)) if i)
    if not one.ran:
        word, why = WORDS.get(one.status, one.status), one.reason
        cells = (
            f'<td class="n">{_whole(one.microbatches)}</td><td colspan="{len(COLUMNS) - 2}">'
            f'<b class="bad">{escape(word)}</b>{escape(": " + why if why else "")}</td>'
        )
    claim = f'<tr class="more"><td class="claim" colspan="{len(COLUMNS)}">{escape(one.claim)}</td></tr>'
    name = one.strategy + (f" ({one.chosen})" if one.chosen else "")
    return f"<tr><th>{escape(name)}</th>{cells}</tr>" + (claim if one.claim and one.ran else "")


def _figures(one: Result) -> Sequence[str]:
    pixels = None if one.images_per_second is None else one.images_per_second * one.tile_px**2 / 1e6
    bubble = _share(one.bubble) + (f" ({_share(one.bubble_predicted)})" if one.bubble_predicted is not None else "")
    fullest = one.counted or one.resident
    times = "" if one.times_baseline is None else f"{format_value(one.times_baseline, 3)} × {one.baseline or ''}"
    return (
        one.strategy,
        _whole(one.microbatches),
        _speed(one.images_per_second),
        range_text(one),
        times,
        _speed(one.no_data),
        _speed(pixels),
        _share(one.data_wait),
        bubble,
        format_bytes(max(fullest)) if fullest else "",
        format_bytes(max(one.sent)) if one.sent else "",
        {True: "same", False: "differs!", None: ""}[one.loss_matches],
    )


def _kind(column: int) -> str:
    return ' class="n"' if 0 < column < len(COLUMNS) - 1 else ""


def _whole(value: int | None) -> str:
    return "" if value is None else str(value)


def _speed(value: float | None) -> str:
    return "" if value is None else format_value(value, 3)


def _share(value: float | None) -> str:
    return "" if value is None else format_percent(value)
