"""Compare the steps of every strategy with the plain step, for every kind of model.

Takes the name of a table: schedules, keeping (recomputation and offload), teams (tiles divided among ranks, or computed
in boxes), zoo (models of libraries), deep (larger ones), families (of timm, on even and odd tiles). Rows are added to
``bench-data/exactness_TABLE.jsonl`` as they come, so that a run may be stopped and continued. Exit code 1 if a cell is
inexact or has failed.

    python -m benchmarks.exactness.run [schedules] [--only WORD ...] [--again | --known] [--jobs N] [--write]
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.exactness.cells import TABLES, Cell
from benchmarks.exactness.measure import ERRORS, FAULTS, Row, largest, measured
from benchmarks.results import OUT, finish, markdown_table, parser_of, publish, results

STATUSES = ("passed", "refused", *FAULTS)
PAGES = {"zoo": "ZOO.md", "deep": "ZOO.md", "families": "ZOO.md"}


def read(path: Path) -> dict[str, Row]:
    """Return the last row of each cell in the file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {row["cell"]: row for row in map(json.loads, lines)}


def summary(rows: Sequence[Row], wanted: int) -> str:
    """Return a table of models by ways, counts, and every cell that did not pass.

    Args:
        wanted: cells that were to be computed; there may be fewer rows.
    """
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = [
        (model, *(_entry(row for row in rows if (row["model"], row["way"]) == (model, way)) for way in ways))
        for model in dict.fromkeys(row["model"] for row in rows)
    ]
    counts = ", ".join(f"{sum(row['status'] == status for row in rows)} {status}" for status in STATUSES)
    computed = f"{wanted} cells" if len(rows) == wanted else f"{len(rows)} of {wanted} cells"
    worst = [
        f"{dtype}: " + ", ".join(f"{error} {max(row[error] for row in done):.1e}" for error in ERRORS)
        for dtype in ("float64", "float32")
        if (done := [row for row in rows if row["dtype"] == dtype and "loss" in row])
    ]
    parts = [
        "Largest relative error (cells passed of all):\n",
        markdown_table(("model", *ways), lines),
        f"{computed}: {counts}. Largest errors, {'; '.join(worst)}.\n",
    ]
    others = [(row["cell"], row["status"], row["note"].replace("|", "/")) for row in rows if row["status"] != "passed"]
    return "\n".join([*parts, *([markdown_table(("cell", "status", "why"), others)] if others else [])])


def _entry(rows: Iterable[Row]) -> str:
    every = list(rows)
    if not every:
        return ""
    errors = [error for row in every if math.isfinite(error := largest(row))]
    passed = sum(row["status"] == "passed" for row in every)
    return f"{max(errors):.1e} ({passed} of {len(every)})" if errors else every[0]["status"]


def chosen(table: str, only: Iterable[str]) -> list[Cell]:
    """Return the cells of ``table`` whose description has all of the parts ``only``."""
    return [cell for cell in TABLES[table]() if set(only) <= set(str(cell).split(" / "))]


def _launch(cell: Cell) -> tuple[str, int, str]:
    """Return what cells that run in the same processes have in common."""
    return cell.over, cell.ranks if cell.over != "threads" else 1, cell.factory


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("table", nargs="?", choices=TABLES, default="schedules")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="cells with all of these: resnet18 gloo")
    parser.add_argument("--again", action="store_true", help="also those that the file already has")
    parser.add_argument("--known", action="store_true", help="compute nothing, sum up what the file has")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="seconds for a cell; default 600")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models at once, a core each; default 1")
    arguments = parser.parse_args()
    wanted = chosen(arguments.table, arguments.only)
    if not wanted:
        parser.error(f"--only names no cell: a cell is described as '{next(TABLES[arguments.table]())}'")
    path = OUT / f"exactness_{arguments.table}.jsonl"
    found = {} if arguments.again else {name: row for name, row in read(path).items() if row["status"] != "failed"}
    left = [] if arguments.known else [cell for cell in wanted if str(cell) not in found]
    groups = [list(group) for _, group in itertools.groupby(sorted(left, key=_launch), key=_launch)]
    OUT.mkdir(exist_ok=True)
    with ThreadPoolExecutor(arguments.jobs) as pool, path.open("a") as file:
        for rows in pool.map(lambda cells: list(measured(cells, arguments.limit)), groups):
            for row in rows:
                file.write(json.dumps(row) + "\n")
                file.flush()
                print(f"{row['status']:8}{largest(row):9.1e}{row['seconds']:7.1f} s  {row['cell']}  {row['note']}")
    found = read(path)
    rows = [found[str(cell)] for cell in wanted if str(cell) in found]
    page = PAGES.get(arguments.table, "README.md")
    publish(__file__, results(summary(rows, len(wanted))), arguments.write, arguments.table, page)
    finish(row["cell"] for row in rows if row["status"] in FAULTS)


if __name__ == "__main__":
    main()
