"""``pushes.csv`` of a run folder: every update of a parameter server, true over every resume.

With it ``--replay`` repeats the run, and the report shows how stale gradients were.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from app.training.run_folder import CsvLog
from parallel.schedule.pushes import Push


class PushLog:
    """The file as one run writes it; there is none before the first update.

    Args:
        path: of the file; updates of steps that are repeated are dropped.
        step: steps done when the run starts.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        if path.exists():
            CsvLog(path, Push._fields).cut_after(step - 1)  # the log counts steps from 0

    def add(self, pushes: Sequence[Push]) -> None:
        for push in pushes:
            CsvLog(self._path, Push._fields).add(push._asdict())


def staleness_in(path: Path) -> dict[int, int] | None:
    """Return how many updates of the run had each staleness, rising; None: there is no parameter server."""
    if not path.exists():
        return None
    with path.open(newline="") as file:
        counts = Counter(int(row["staleness"]) for row in csv.DictReader(file))
    return dict(sorted(counts.items()))
