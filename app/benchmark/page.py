"""Report of a benchmark: every row of ``bench.json`` in a table, on the terminal and on a page with charts of speed.

Takes the folder of an ``app.bench`` that is finished or still running; writes ``report.html`` into it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.pages.html import Chart, Series, Table, flattened, line_chart, rendered
from app.settings.cli import RunError, print_table
from parallel.units import bytes_text, number_text
from pipelines.slides.whole_files import write_text

HEADERS = ("strategy", "images/s", "range", "from memory", "data wait", "bubble", "sent", "fullest rank", "claim")
SHORT = 90
"""Characters of a reason on the terminal; the whole of it is in ``bench.json``."""
NAME = "bench.json"
WORK = ("tile_px", "ranks", "global_batch")
LABELS = {"tile_px": "tile side, px", "ranks": "ranks"}


def print_bench(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table for each tile size and number of ranks."""
    for tile, ranks in dict.fromkeys((row["tile_px"], row["ranks"]) for row in rows):
        alike = [row for row in rows if (row["tile_px"], row["ranks"]) == (tile, ranks)]
        batch, m = alike[0]["global_batch"], alike[0]["microbatches"]
        title = f"{tile} px, {ranks} {'rank' if ranks == 1 else 'ranks'}, {batch} tiles a step in {m} microbatches"
        lines = [cells(row) for row in alike]
        cut = [(*line[:-1], f"{line[-1][: SHORT - 1]}…") if len(line[-1]) > SHORT else line for line in lines]
        print_table(title, HEADERS, [line if line[2] else short for line, short in zip(lines, cut, strict=True)])


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what stands under ``HEADERS``; of a row that did not run, how it ended and the reason."""
    name = row["strategy"] + (f" ({row['chosen']})" if row.get("chosen") else "")
    if row["status"] != "ok":
        return (name, row["status"], *[""] * (len(HEADERS) - 3), row["reason"])
    low, high = row["images_per_second_range"]
    bubble = "" if row["bubble"] is None else f"{100 * row['bubble']:.0f} % ({100 * row['bubble_predicted']:.0f} %)"
    return (
        name,
        number_text(row["images_per_second"], ".3g"),
        f"{number_text(low, '.3g')}-{number_text(high, '.3g')}",
        number_text(row["images_per_second_no_data"], ".3g"),
        f"{100 * row['data_wait_fraction']:.1f} %",
        bubble,
        bytes_text(max(row["bytes_sent"])) if row["bytes_sent"] else "",
        bytes_text(max(row["device_bytes"] or row["peak_memory_bytes"])),
        row["claim"],
    )


def write_page(folder: Path) -> Path:
    """Write ``report.html`` into the benchmark's folder and give its path.

    Raises:
        RunError: ``folder`` has no ``bench.json``, or it cannot be understood.
        OSError: the page cannot be written.
    """
    path = folder / NAME
    try:
        bench = json.loads(path.read_text(encoding="utf-8"))
        page = render(bench, folder)
    except FileNotFoundError:
        raise RunError(f"{path} is not there: give the --out folder of app.bench") from None
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as fault:
        raise RunError(f"{path} is not as app.bench writes it ({fault!r}): run app.bench again") from fault
    return write_text(folder / "report.html", page)


def render(bench: Mapping[str, Any], folder: Path) -> str:
    rows, out = bench["rows"], str(folder)  # not the --out of the settings: the folder may have been moved
    again = f"{bench['command']} --out {shlex.quote(out + '-again')}"  # of two --out the last counts
    headers = ("model", "tile px", "ranks", "tiles a step", HEADERS[0], HEADERS[-1], *HEADERS[1:-1])
    table = []
    for row in rows:
        strategy, *figures, claim = cells(row)
        table.append((row["model"], *(str(row[key]) for key in WORK), strategy, claim, *figures))
    return rendered(
        "bench.html.j2",
        what=[bench["created"][:16].replace("T", " "), *dict.fromkeys(row["model"] for row in rows)],
        charts=[*charts(rows, "tile_px", "ranks"), *charts(rows, "ranks", "tile_px")],
        table=Table(headers, table, (1, 2, 3, *range(6, len(headers)))),
        commands=[again, "# this page alone, from bench.json", f"python -m app.report {shlex.quote(out)}"],
        settings=flattened(bench["settings"]),
        environment=flattened(bench["environment"]),
    )


def charts(rows: Sequence[Mapping[str, Any]], x: str, fixed: str) -> list[Chart]:
    """Return charts of images/s over ``x``, one for each model and value of ``fixed`` with two values of ``x``.

    Args:
        rows: of ``bench.json``; those that did not run, or whose loss is not the reference's, are left out.
        x: ``tile_px`` or ``ranks``.
    """
    measured = [row for row in rows if row["status"] == "ok" and row["loss_matches"] is not False]
    looks = {strategy: number for number, strategy in enumerate(dict.fromkeys(row["strategy"] for row in rows))}
    drawn = []
    for model, value in dict.fromkeys((row["model"], row[fixed]) for row in measured):
        alike = [row for row in measured if (row["model"], row[fixed]) == (model, value)]
        sizes = sorted({row[x] for row in alike})
        lines = []
        for strategy in dict.fromkeys(row["strategy"] for row in alike):
            points = sorted((row[x], row["images_per_second"]) for row in alike if row["strategy"] == strategy)
            across, speed = np.array(points, np.float64).T
            lines.append(Series(strategy, across, speed, looks[strategy], "dots"))
        if len(sizes) > 1:
            title = f"{model}, {LABELS[fixed]}: {value}"
            drawn.append(line_chart(lines, title, "images/s", x_label=LABELS[x], sizes=sizes, last=False))
    return drawn
