"""The page of a benchmark: one self-contained HTML file made from ``bench.json`` and the pictures it names.

Takes a folder of ``app.bench``, whatever it has come to so far; writes ``report.html`` into it: what was found, in
sentences; bars of speed, memory and time; lines over tile side and ranks; timelines; the full table; how to repeat it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from app.pages.bench_file import Bench, read_bench
from app.pages.bench_groups import by_model, groups
from app.pages.bench_headline import figures, findings, lead, odd_losses
from app.pages.bench_panels import memory_keys, memory_panels, speed_keys, speed_panels, time_keys, time_panels
from app.pages.bench_sizes import over_ranks, over_tiles
from app.pages.bench_table import COLUMNS, full_table
from app.pages.bench_timelines import timelines
from app.pages.html import flattened, rendered, save


def write_page(folder: Path) -> Path:
    """Write ``report.html`` into the benchmark's folder and give its path.

    Raises:
        RunError: ``folder`` has no ``bench.json``, or it cannot be understood.
        OSError: the page cannot be written.
    """
    return save(folder / "report.html", render(read_bench(folder)))


def render(bench: Bench) -> str:
    """Return the page."""
    row_groups, limit = groups(bench.results), bench.limit_bytes
    models = by_model(row_groups)
    looks = {strategy: number for number, strategy in enumerate(dict.fromkeys(one.strategy for one in bench.results))}
    shown, folded = timelines(row_groups, bench.folder)
    what = (bench.created[:16].replace("T", " "), *dict.fromkeys(one.model for one in bench.results))
    return rendered(
        "bench.html.j2",
        what=[word for word in what if word],
        lead=lead(row_groups),
        odd_losses=odd_losses(bench),
        cards=figures(bench, row_groups),
        models=findings(row_groups, limit),
        speed=(speed_keys(row_groups), {model: speed_panels(rows) for model, rows in models.items()}),
        memory=(memory_keys(row_groups, limit), {model: memory_panels(rows, limit) for model, rows in models.items()}),
        time=(time_keys(), {model: time_panels(rows) for model, rows in models.items()}),
        over_tiles={model: over_tiles(rows, looks) for model, rows in models.items()},
        over_ranks={model: over_ranks([o for o in bench.results if o.model == model], looks) for model in models},
        shown=shown,
        folded=folded,
        columns=COLUMNS,
        rows=full_table(bench),
        commands=_commands(bench),
        settings=flattened(bench.settings),
        environment=flattened(bench.environment),
    )


def _commands(bench: Bench) -> list[str]:
    again = f"python -m app.report {shlex.quote(bench.folder.resolve().name)}"
    return [*filter(None, [bench.command]), "# this page alone, from bench.json", again]
