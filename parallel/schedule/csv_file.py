"""Schedules as CSV files: one row a rank, one cell an action, as in the tables of the papers.

Takes and gives text; reading and writing the file is left to the caller. Empty cells are idle time to the eye and mean
nothing. What a schedule says is not judged here; that is what ``check`` is for.
"""

from __future__ import annotations

import csv
import io

from parallel.schedule.action import Action, Schedule


def to_csv(schedule: Schedule) -> str:
    """``schedule`` as text that ``from_csv`` reads back to the same."""
    assert sorted(schedule) == list(range(len(schedule))), "rows are ranks, counted from 0"
    return "".join(",".join(map(str, schedule[rank])) + "\n" for rank in range(len(schedule)))


def from_csv(text: str, where: str = "schedule") -> Schedule:
    """The schedule in ``text``; row n, counted from 0, is rank n.

    Args:
        where: what to call the text in errors, a path for example.

    Raises:
        ValueError: a cell is no action, or there is none at all; names every such cell by row and column, from 1.
    """
    schedule: Schedule = {}
    faults = []
    for rank, row in enumerate(csv.reader(io.StringIO(text.removeprefix("\ufeff")))):
        schedule[rank] = []
        for column, cell in enumerate(row, start=1):
            if not cell.strip():
                continue
            try:
                schedule[rank].append(Action.parse(cell))
            except ValueError as fault:
                faults.append(f"{where}: row {rank + 1} (rank {rank}), column {column}: {fault}")
    if not any(schedule.values()) and not faults:
        faults.append(f"{where}: no actions: write one row for each rank, in cells such as 0F0,0B0")
    if faults:
        raise ValueError("\n".join(faults))
    return schedule
