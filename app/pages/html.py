"""A self-contained HTML page: style sheet, tables, cards and numbers with units.

Takes plain values; gives HTML that is also well-formed XML. Nothing is fetched and nothing runs: no script, no font, no
link. Light and dark follow the reader's system, paper is always light, wide tables scroll on a phone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from app.pages.charts import format_value

STYLE = """
:root { color-scheme: light dark; --ground: #f5f6f8; --card: #ffffff; --ink: #181c21; --soft: #58626e; --line: #dfe3e8;
  --good: #19754c; --fair: #8f5a00; --bad: #b3261e;
  --c0: #2160c4; --c1: #c2500f; --c2: #19805a; --c3: #7648bd; --c4: #b02f78; --c5: #6b7480; }
@media screen and (prefers-color-scheme: dark) {
  :root { --ground: #13161a; --card: #1b1f25; --ink: #e7eaee; --soft: #9ba5b1; --line: #30363f;
    --good: #63cb9b; --fair: #e3b25a; --bad: #ff8b82;
    --c0: #78aeff; --c1: #f2965a; --c2: #5fcb9c; --c3: #b89ef5; --c4: #f08bc0; --c5: #98a2ae; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", "Noto Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 32px 20px 56px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 12px; }
h3 { font-size: 15px; margin: 0; font-weight: 600; }
p { margin: 6px 0; } .soft, .none { color: var(--soft); }
.top { display: flex; flex-wrap: wrap; gap: 12px; align-items: center; }
.status { font-weight: 600; padding: 1px 12px; border: 1.5px solid; border-radius: 99px; }
.good { color: var(--good); } .fair { color: var(--fair); } .bad { color: var(--bad); }
.grid { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 168px), 1fr)); }
.grid.cards { margin-top: 22px; }
.grid.charts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); }
.grid.pictures { grid-template-columns: repeat(auto-fill, minmax(150px, 1fr)); }
.card, figure { background: var(--card); border: 1px solid var(--line); border-radius: 10px; margin: 0;
  padding: 14px 16px; break-inside: avoid; min-width: 0; }
.card { padding: 13px 14px; } .card b { display: block; font-size: 25px; line-height: 1.25; font-weight: 650;
  font-variant-numeric: tabular-nums; }
.card b small { font-size: 13px; font-weight: 500; } .card p { margin: 0; font-size: 13.5px; }
.notice { border-left: 4px solid var(--bad); margin-top: 18px; overflow-wrap: anywhere; white-space: pre-wrap; }
figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 10px; margin-bottom: 6px; }
figcaption span { color: var(--soft); font-size: 13px; }
figcaption ul { display: flex; flex-wrap: wrap; gap: 2px 14px; list-style: none; margin: 0; padding: 0; font-size: 13px;
  width: 100%; color: var(--soft); }
figcaption li::before { content: ""; display: inline-block; width: 14px; height: 3px; margin-right: 6px;
  vertical-align: middle; border-radius: 2px; background: var(--series); }
figcaption li.faint::before { opacity: .4; } figcaption li.dashed::before { width: 20px;
  background: linear-gradient(90deg, var(--series) 40%, transparent 40% 60%, var(--series) 60%); }
figcaption li b { color: var(--ink); font-variant-numeric: tabular-nums; }
.c0 { --series: var(--c0); } .c1 { --series: var(--c1); } .c2 { --series: var(--c2); }
.c3 { --series: var(--c3); } .c4 { --series: var(--c4); } .c5 { --series: var(--c5); }
svg { display: block; width: 100%; height: auto; overflow: visible; }
.chart svg text { font-size: 11.5px; fill: var(--soft); font-variant-numeric: tabular-nums; }
.chart svg text.value { fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px;
  stroke-linejoin: round; }
.chart line { stroke-width: 1; } .chart line.grid { stroke: var(--line); } .chart line.axis { stroke: var(--soft); }
.chart svg path { fill: none; stroke: var(--series); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.chart svg path.faint { stroke-width: 1.2; opacity: .4; } .chart svg path.dashed { stroke-dasharray: 7 5; }
circle.dot { fill: var(--series); } circle.mark { fill: var(--card); stroke: var(--series); stroke-width: 2; }
.timeline { overflow-x: auto; margin: 10px 0; break-inside: avoid; } .timeline svg { min-width: 680px; }
.table { overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  margin: 10px 0; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { padding: 6px 14px; text-align: left; border-top: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; border-top: 0; white-space: nowrap; }
tbody th { font-weight: 500; } .facts td { overflow-wrap: anywhere; } td { overflow-wrap: break-word; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.facts td { font-variant-numeric: tabular-nums; } .facts th { width: 42%; }
.facts tr:first-child > * { border-top: 0; }
.pair { display: grid; gap: 0 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr));
  align-items: start; }
.pictures img { display: block; width: 100%; height: 150px; object-fit: contain; }
.pictures figure { padding: 10px; } .pictures figcaption { margin: 8px 0 0; font-size: 13px; overflow-wrap: anywhere; }
pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px; margin: 10px 0;
  font: 13px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre-wrap;
  overflow-wrap: anywhere; }
footer { margin-top: 40px; color: var(--soft); font-size: 13px; }
@media (min-width: 900px) { .charts.five { grid-template-columns: repeat(6, 1fr); }
  .five figure { grid-column: span 3; } .five figure:nth-child(n + 3) { grid-column: span 2; }
  .five figure:nth-child(n + 3) svg text { font-size: 15px; } }
@media (max-width: 600px) { main { padding: 20px 12px 40px; } h1 { font-size: 23px; }
  .chart svg text { font-size: 14px; } .card, figure { padding: 12px; } th, td { padding: 6px 10px; }
  .facts th { width: 48%; } .grid.cards { grid-template-columns: 1fr 1fr; gap: 10px; } .card b { font-size: 23px; } }
@media print { body { background: none; font-size: 13px; } main { max-width: none; padding: 0; }
  h2, h3 { break-after: avoid; } .timeline svg { min-width: 0; } tr { break-inside: avoid; }
  .grid.charts { grid-template-columns: 1fr 1fr; } }
"""

UNIT_STEPS = ("B", "KiB", "MiB", "GiB", "TiB")


def document(title: str, body: str, style: str = "") -> str:
    """The whole page around ``body``; ``style``: rules of its own drawings, after those of every page."""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f'<meta name="color-scheme" content="light dark"/><title>{escape(title)}</title>'
        f"<style>{STYLE}{style}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it; nothing when there is nothing under it."""
    inner = "\n".join(part for part in parts if part)
    return f"<section><h2>{escape(title)}</h2>\n{inner}\n</section>" if inner else ""


def card(name: str, value: str, unit: str = "", note: str = "") -> str:
    """One large figure with its name above and where it comes from below."""
    small = f" <small>{escape(unit)}</small>" if unit else ""
    below = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f'<div class="card"><p class="soft">{escape(name)}</p><b>{escape(value)}{small}</b>{below}</div>'


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[int] = ()) -> str:
    """Rows of text cells under ``headers``; the columns ``numeric`` stand to the right. Empty without rows."""
    kind = [' class="n"' if i in numeric else "" for i in range(len(headers))]
    head = "".join(f"<th{k}>{escape(text)}</th>" for k, text in zip(kind, headers, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{k}>{escape(cell)}</td>" for k, cell in zip(kind, row, strict=True)) + "</tr>"
        for row in rows
    ]
    if not lines:
        return ""
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and values, one pair a line. Empty without pairs."""
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in pairs)
    return f'<div class="table"><table class="facts"><tbody>{lines}</tbody></table></div>' if lines else ""


def pair(left: str, right: str) -> str:
    """Two parts side by side, one below the other on a phone."""
    return f'<div class="pair">{left}{right}</div>' if left or right else ""


def facts_in_two(pairs: Sequence[tuple[str, str]]) -> str:
    """Names and values in two tables side by side."""
    half = (len(pairs) + 1) // 2
    return pair(facts(pairs[:half]), facts(pairs[half:]))


def save(path: Path, page: str) -> Path:
    """Write ``page`` to ``path`` as a whole or not at all, and give the path."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def format_bytes(count: float) -> str:
    """``1.5 GiB``."""
    power = min(len(UNIT_STEPS) - 1, int(math.log(max(count, 1), 1024)))
    amount = count / 1024**power
    return f"{amount:.0f} {UNIT_STEPS[power]}" if amount >= 999.5 else f"{amount:.3g} {UNIT_STEPS[power]}"


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
        for end, form in (("_bytes", format_bytes), ("_s", format_duration), ("_fraction", _percent)):
            if name.endswith(end):
                return form(value)
        return str(value) if isinstance(value, int) else format_value(value)
    return str(value)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


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
