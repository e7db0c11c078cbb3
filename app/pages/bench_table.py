"""All rows of a benchmark in full: what was measured, and the claim that it supports.

Takes rows in the order of the file; gives a table per model, tile side and number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from app.pages.bench_file import Bench, Result
from app.pages.bench_groups import range_text
from app.pages.charts import format_value
from app.pages.html import format_bytes

STYLE = """
.full { font-size: 13px; } .full th, .full td { padding: 5px 7px; }
.full thead th { white-space: normal; vertical-align: bottom; line-height: 1.25; }
.full td.claim { min-width: 190px; line-height: 1.35; }
.full tbody.group th { background: var(--ground); font-weight: 600; }
@media (max-width: 600px) { .full { min-width: 860px; } .full tbody:not(.group) th, .full thead th:first-child {
  position: sticky; left: 0; background: var(--card); max-width: 120px; } }
@media print { .full { font-size: 9.5px; } .full th, .full td { padding: 3px 4px; } .full td.claim { min-width: 100px; }
  .full tbody { break-inside: avoid; } .table:has(.full) { overflow: visible; } }
"""

COLUMNS = (
    "strategy",
    "images/s",
    "range",
    "fed from memory",
    "data wait",
    "bubble",
    "predicted",
    "tensors, fullest rank",
    "resident, fullest rank",
    "sent a step",
    "loss",
    "claim",
)


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
    if one.microbatches is not None:
        parts.append(f"{one.microbatches} microbatch{'' if one.microbatches == 1 else 'es'}")
    if one.scaling:
        parts.append(f"{one.scaling} scaling")
    return " · ".join(parts)


def _row(one: Result) -> str:
    name = f"<th>{escape(one.strategy + (f' ({one.chosen})' if one.chosen else ''))}</th>"
    if not one.ran:
        word, why = one.end, one.reason
        told = f'<b class="bad">{escape(word)}</b>{escape(": " + why if why else "")}'
        return f'<tr>{name}<td colspan="{len(COLUMNS) - 1}">{told}</td></tr>'
    cells = (
        _speed(one.images_per_second),
        range_text(one),
        _speed(one.no_data),
        _share(one.data_wait),
        _share(one.bubble),
        _share(one.bubble_predicted),
        _most(one.counted),
        _most(one.resident),
        _most(one.sent),
        {True: "same", False: "differs!", None: ""}[one.loss_matches],
    )
    figures = "".join(f"<td{_kind(i)}>{escape(text)}</td>" for i, text in enumerate(cells, 1))
    return f'<tr>{name}{figures}<td class="claim">{escape(one.claim)}</td></tr>'


def _kind(column: int) -> str:
    return ' class="n"' if 0 < column < len(COLUMNS) - 2 else ""


def _speed(value: float | None) -> str:
    return "" if value is None else format_value(value, 3)


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _most(sizes: Sequence[float]) -> str:
    return format_bytes(max(sizes)) if sizes else ""
