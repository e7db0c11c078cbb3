"""``shares.csv`` of a run folder: from which step on which rank computes which microbatch, true over every resume.

Takes the shares in force when a run starts and whenever they change; gives a file with which ``--shares`` repeats them.
A run whose beginning nobody wrote down has no line of step 0, and is not taken for shares that could be repeated.
"""

from __future__ import annotations

import csv
from pathlib import Path

from app.training.run_folder import CsvLog
from parallel.schedule.shares import CHANGING, Changes, Shares, read_changes, rows_of


class SharesLog:
    """The file as one run writes it; the first rank has one.

    Args:
        path: of the file; what it says of steps that are computed again is dropped.
        step: steps done when the run starts.
        shares: in force then.
    """

    def __init__(self, path: Path, step: int, shares: Shares) -> None:
        self._log = CsvLog(path, CHANGING)
        self._log.cut_after(step)
        if _last_rows(path) != [list(map(str, row[1:])) for row in rows_of(step, shares)]:
            self._log.cut_after(step - 1)
            self.add(step, shares)

    def add(self, step: int, shares: Shares) -> None:
        """``shares`` are in force once ``step`` steps are done."""
        for row in rows_of(step, shares):
            self._log.add(dict(zip(CHANGING, row, strict=True)))


def _last_rows(path: Path) -> list[list[str]]:
    """Microbatch and group of the last step that the file knows of."""
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [row[1:] for row in rows if row[0] == rows[-1][0]]


def says(path: Path, changes: Changes) -> bool:
    """Return whether the file is there with this content: a run that replays its own file leaves it as it is, since a
    later attempt reads it."""
    if not path.exists():
        return False
    try:
        return read_changes(path.read_text()) == changes
    except ValueError:
        return False


def changes_in(path: Path) -> int | None:
    """Return the number of changes of the shares over the whole run; None: it was not recorded."""
    if not path.exists():
        return None
    with path.open(newline="") as file:
        return max(0, len({row[0] for row in csv.reader(file)}) - 2)
