"""Does every model split? Classifiers of torchvision and U-Nets over timm, in 2 and 4 stages, beside the plain step.

Takes nothing; gives two rows a model in ``bench-data/model_zoo.csv`` as they come, so that it may be stopped and
continued, and the table in the README. Exit code 0 when all passed.

    python -m benchmarks.model_zoo.run [--only NAME ...] [--again | --known] [--write]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from benchmarks.model_zoo.table import DEPTHS, Row, append, read, row_of, summary
from benchmarks.model_zoo.zoo import Entry, all_entries
from benchmarks.results import results, write_results

ROOT = Path(__file__).parents[2]
CSV = ROOT / "bench-data" / "model_zoo.csv"


def measured(entry: Entry, limit_s: float) -> list[Row]:
    """The rows of ``entry``, computed by a process of its own; those that it did not come to say how it ended."""
    command = [sys.executable, "-m", "benchmarks.model_zoo.measure", json.dumps(asdict(entry))]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s)
        said, why = done.stdout, f"exit code {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode() if isinstance(late.stdout, bytes) else ""
        why = f"not done within {limit_s:g} s"
    rows = [row_of(json.loads(line)) for line in said.splitlines() if line.startswith("{")]
    missing = set(DEPTHS) - {row.depth for row in rows}
    note = " ".join(why.split())
    lost = [
        Row(entry.model, depth, "died", entry.dtype, entry.tile, entry.tiles, note=note) for depth in sorted(missing)
    ]
    return rows + lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="these models, as in the table")
    parser.add_argument("--again", action="store_true", help="also those that the file already has")
    parser.add_argument("--known", action="store_true", help="compute nothing, sum up what the file has")
    parser.add_argument("--limit", type=float, default=1800, metavar="S", help="seconds for a model; default 1800")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    arguments = parser.parse_args()
    every = list(all_entries())
    if unknown := set(arguments.only) - {entry.model for entry in every}:
        parser.error(f"no such models in the table: {', '.join(sorted(unknown))}; names are as in torchvision:resnet18")
    wanted = [entry for entry in every if not arguments.only or entry.model in arguments.only]
    known = set() if arguments.again else {name for name, row in read(CSV).items() if row.status == "passed"}
    for entry in wanted:
        if arguments.known or all((entry.model, depth) in known for depth in DEPTHS):
            continue
        begun = time.perf_counter()
        for row in measured(entry, arguments.limit):
            append(CSV, row)
            took = time.perf_counter() - begun
            print(f"{row.status:8}{row.largest:9.1e}{took:7.1f} s  {row.model} {row.depth}  {row.note}", flush=True)
    last = read(CSV)
    rows = [last[entry.model, depth] for entry in wanted for depth in DEPTHS if (entry.model, depth) in last]
    text = results("python -m benchmarks.model_zoo.run --write", summary(rows, len(wanted)))
    print(f"\n{text}")
    if arguments.write:
        write_results(Path(__file__).with_name("README.md"), text)
    sys.exit(any(row.status != "passed" for row in rows))


if __name__ == "__main__":
    main()
