"""Does every model split, exactly? Each in 2 and 4 stages and recomputed, beside the plain step.

Takes nothing; gives three rows a model in ``bench-data/model_zoo.csv`` as they come, so that it may be stopped and
continued, and the tables in the README. Exit code 0 when no model was computed wrongly, failed or did not end.

    python -m benchmarks.model_zoo.run [--only PATTERN ...] [--deep | --grid] [--again | --known] [--jobs N] [--write]
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import multiprocessing
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import psutil

from benchmarks.model_zoo.grid import grid_entries
from benchmarks.model_zoo.table import FAULTS, Row, append, grid_summary, read, summary, totals
from benchmarks.model_zoo.zoo import Entry, all_entries
from benchmarks.results import parser_of, results, write_results

ROOT = Path(__file__).parents[2]
CSV = ROOT / "bench-data" / "model_zoo.csv"
PRELOADED = (
    "benchmarks.model_zoo.measure",
    "torchvision",
    "timm",
    "segmentation_models_pytorch",
    "monai.networks.nets",
)
"""Imported once, by the process that the others are forked from: it takes longer than most models."""

MOST_BYTES = 14 << 30
"""Resident memory of the process of a model, watched."""


@functools.cache
def context() -> ForkServerContext:
    """Where a process for each model comes from."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(list(PRELOADED))
    return server


def compute(entry: Entry, sends: Connection) -> None:
    """In a process of its own: the rows of ``entry``, sent as they come."""
    import torch

    from benchmarks.model_zoo.measure import rows_of

    torch.set_num_threads(1)
    for row in rows_of(entry):
        sends.send(row)


def measured(entry: Entry, limit_s: float) -> list[Row]:
    """The rows of ``entry``; those that its process did not come to say how it ended."""
    receives, sends = context().Pipe(duplex=False)
    process = context().Process(target=compute, args=(entry, sends), daemon=True)
    process.start()
    sends.close()
    rows: list[Row] = []
    status, note = _followed(process, receives, rows, limit_s)
    process.kill()
    process.join()
    if status == "died":
        note = f"exit code {process.exitcode}"
    done = {row.way for row in rows}
    lost = Row(entry.name, entry.ways[0], entry.library, status, entry.dtype, entry.tile, entry.tiles, note=note)
    return rows + [lost.at(way) for way in entry.ways if way not in done]


def _followed(process: ForkServerProcess, receives: Connection, rows: list[Row], limit_s: float) -> tuple[str, str]:
    """Add to ``rows`` what the process sends; how it ended, and why."""
    begun = time.monotonic()
    taken = psutil.Process(process.pid)
    with receives:
        while time.monotonic() < begun + limit_s:
            try:
                if receives.poll(0.2):
                    rows.append(receives.recv())
                elif taken.memory_info().rss > MOST_BYTES:
                    return "large", f"took more than {MOST_BYTES >> 30} GiB"
            except (EOFError, psutil.NoSuchProcess):
                process.join(5)
                return "died", ""
    return "late", f"not done within {limit_s:g} s"


def _wanted(arguments: argparse.Namespace) -> list[Entry]:
    every = list(grid_entries() if arguments.grid else all_entries())
    if not arguments.only:
        return [entry for entry in every if arguments.deep or not entry.deep]
    return [entry for entry in every if any(fnmatch.fnmatchcase(entry.name, only) for only in arguments.only)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="these models, such as 'smp:*'")
    parser.add_argument("--deep", action="store_true", help="also the larger members of torchvision's families")
    parser.add_argument(
        "--grid", action="store_true", help="pipelines and spatial teams, even and odd tiles, in place of the zoo"
    )
    parser.add_argument("--again", action="store_true", help="also those that the file already has as exact")
    parser.add_argument("--known", action="store_true", help="compute nothing, sum up what the file has")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="seconds for a model; default 600")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="models at once, a core each; default 1")
    parser.add_argument("--csv", type=Path, default=CSV, metavar="FILE", help="where rows are kept")
    arguments = parser.parse_args()
    wanted = _wanted(arguments)
    if not wanted:
        parser.error(f"no model of the table is like {', '.join(arguments.only)}; names are as in torchvision:resnet18")
    known = {} if arguments.again else {key: row for key, row in read(arguments.csv).items() if row.status == "exact"}
    left = [entry for entry in wanted if not all((entry.name, way) in known for way in entry.ways)]
    begun = time.monotonic()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for rows in pool.map(functools.partial(measured, limit_s=arguments.limit), [] if arguments.known else left):
            for row in rows:
                append(arguments.csv, row)
                at = time.monotonic() - begun
                print(f"{at:7.0f} s  {row.status:8}{row.largest:9.1e}  {row.model} {row.way}  {row.note}", flush=True)
    last = read(arguments.csv)
    rows = [last[entry.name, way] for entry in wanted for way in entry.ways if (entry.name, way) in last]
    if arguments.grid:
        text = results("python -m benchmarks.model_zoo.run --grid --write", grid_summary(rows, wanted[0].ways))
        print(f"\n{text}")
    else:
        text = results("python -m benchmarks.model_zoo.run --again --write", summary(rows, len(wanted)))
        print(f"\n{text}\n{totals(rows)}")
    if arguments.write:
        write_results(Path(__file__).with_name("README.md"), text, *(["grid"] if arguments.grid else []))
    sys.exit(any(row.status in FAULTS for row in rows))


if __name__ == "__main__":
    main()
