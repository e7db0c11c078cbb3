"""``python -m app.report``: the page of a run or of a benchmark, written anew from its folder; of several runs, a page
that compares them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from app.benchmark.page import NAME, write_page
from app.pages.run_page import write_comparison, write_report
from app.settings.cli import run_command


@dataclass(frozen=True)
class ReportCommand:
    """Write the report of a run or of a benchmark anew, from the files in its folder; of several runs, a page that
    compares them."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folder of app.train, or folder of app.bench: its report.html is written. Several run folders: they are
    compared."""
    out: Path = Path("compare.html")
    """Page that compares several runs; the report of one stays in its folder."""

    def validate(self) -> list[str]:
        benches = [run for run in self.runs if (run / NAME).is_file()]
        if not self.runs:
            return ["a report needs a run folder; none was given. Give the --out folder of app.train or app.bench"]
        if benches and len(self.runs) > 1:
            return [f"a benchmark is reported alone; {benches[0]} was given with {len(self.runs) - 1} more folders"]
        return []


def report(command: ReportCommand) -> None:
    runs = [run.resolve() if run.name in ("", "..") else run for run in command.runs]  # pages show the names
    if len(runs) > 1:
        print(write_comparison(runs, command.out))
    elif (runs[0] / NAME).is_file():
        print(write_page(runs[0]))
    else:
        print(write_report(runs[0]))


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(ReportCommand, report, argv, prog="python -m app.report")


if __name__ == "__main__":
    sys.exit(main())
