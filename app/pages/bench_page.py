"""The page of a benchmark: one self-contained HTML file made from ``bench.json`` and the pictures it names.

Takes a folder of ``app.bench``, whatever it has come to so far; writes ``report.html`` into it: what was found, in
sentences; bars of speed, memory and time; lines over tile side and ranks; timelines; the full table; how to repeat it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from app.pages import bars, lines
from app.pages import bench_table as full_table
from app.pages import bench_timelines as timelines
from app.pages.bench_file import Bench, read_bench
from app.pages.bench_groups import by_model, groups
from app.pages.bench_headline import figures, findings, headline
from app.pages.bench_panels import memory_keys, memory_panels, speed_keys, speed_panels, time_keys, time_panels
from app.pages.bench_sizes import over_ranks, over_tiles
from app.pages.html import document, facts_in_two, flattened, save, section

STYLE = """
.lead { font-size: 18px; line-height: 1.45; margin: 14px 0 4px; max-width: 860px; }
.findings { margin: 18px 0; } .findings:first-of-type { margin-top: 0; } .findings td:nth-child(-n + 2) {
  white-space: nowrap; font-variant-numeric: tabular-nums; }
.model { margin: 22px 0 10px; } .model:first-of-type { margin-top: 0; }
.grid.panels { grid-template-columns: repeat(auto-fill, minmax(min(100%, 500px), 1fr)); align-items: start; }
@media (max-width: 600px) { .lead { font-size: 16px; } }
@media print { .grid.panels { display: block; } .grid.panels figure { margin-bottom: 12px; break-inside: auto; }
  .bars ol { break-inside: avoid; } .chart svg text { font-size: 13.5px; } }
"""


def write_page(folder: Path) -> Path:
    """Write ``report.html`` into the benchmark's folder and give its path.

    Raises:
        RunError: ``folder`` has no ``bench.json``, or it cannot be understood.
        OSError: the page cannot be written.
    """
    return save(folder / "report.html", render(read_bench(folder)))


def render(bench: Bench) -> str:
    """The page."""
    found = groups(bench.results)
    looks = {strategy: number for number, strategy in enumerate(dict.fromkeys(one.strategy for one in bench.results))}
    models = by_model(found)
    speeds = {model: speed_panels(of_model) for model, of_model in models.items()}
    sizes = {model: over_tiles(of_model, looks) for model, of_model in models.items()}
    memory = {model: memory_panels(of_model, bench.limit_bytes) for model, of_model in models.items()}
    times = {model: time_panels(of_model) for model, of_model in models.items()}
    scaling = {model: over_ranks([o for o in bench.results if o.model == model], looks) for model in models}
    cards = figures(bench, found)
    parts = [
        headline(bench, found),
        f'<section class="grid cards">{"".join(cards)}</section>' if cards else "",
        section("What was found", *findings(found, bench.limit_bytes)),
        section("Images per second", *_keyed(speed_keys(found), _of_models(speeds, "panels"))),
        section("Where data parallelism stops fitting", *_of_models(sizes, "charts")),
        section("Memory of each rank", *_keyed(memory_keys(found, bench.limit_bytes), _of_models(memory, "panels"))),
        section("Where the time goes", *_keyed(time_keys(), _of_models(times, "panels"))),
        section("Over the number of ranks", *_of_models(scaling, "charts")),
        section("What each rank does in a step", timelines.timelines(found, bench.folder)),
        section("All rows", full_table.full_table(bench)),
        section("Run it again", f"<pre>{escape(_commands(bench))}</pre>"),
        section("Settings", facts_in_two(flattened(bench.settings))),
        section("Environment", facts_in_two(flattened(bench.environment))),
    ]
    style = STYLE + bars.STYLE + lines.STYLE + timelines.STYLE + full_table.STYLE
    return document("Strategies compared · MegaTile", "\n".join(part for part in parts if part), style)


def _of_models(drawn: dict[str, list[str]], kind: str) -> Sequence[str]:
    """The figures of each model in a grid, under the model's name where there are several."""
    shown = {model: parts for model, parts in drawn.items() if parts}
    named = len(drawn) > 1
    return [
        (f'<h3 class="model">{escape(model)}</h3>' if named else "")
        + f'<div class="grid {kind}">{"".join(parts)}</div>'
        for model, parts in shown.items()
    ]


def _keyed(keys: Sequence[bars.Key], figures: Sequence[str]) -> Sequence[str]:
    """Figures under their legend; nothing without figures."""
    return [bars.legend(keys), *figures] if figures else []


def _commands(bench: Bench) -> str:
    again = f"# this page alone, from bench.json\npython -m app.report {shlex.quote(bench.folder.resolve().name)}"
    return f"{bench.command}\n{again}" if bench.command else again
