"""What is wrong with a schedule, where, and the message that says so.

Takes the faults that ``check`` found; gives one error with all of them and the grid, the first faulty cell marked.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel.schedule.action import Action, Schedule
from parallel.schedule.grid import format_grid

SHOWN = 20
"""Faults spelled out in the message; the rest are counted. All are in ``ScheduleError.faults``."""
AROUND = 6
"""Columns of the grid on each side of the marked cell."""


@dataclass(frozen=True, slots=True)
class ScheduleFault:
    """One thing that is wrong.

    Attributes:
        text: the rule that is broken.
        rank: where; None when no rank is to blame, as for a microbatch that nobody computes.
        position: in the rank's list of actions; None when nothing stands there, as for a missing action.
        action: what stands there, or what is missing.
    """

    text: str
    rank: int | None = None
    position: int | None = None
    action: Action | None = None

    def __str__(self) -> str:
        where = [] if self.rank is None else [f"rank {self.rank}"]
        where += [] if self.position is None else [f"position {self.position}"]
        where += [] if self.action is None else [str(self.action)]
        return ": ".join([", ".join(where), self.text] if where else [self.text])


class ScheduleError(ValueError):
    """A schedule that cannot be run, or would not compute what the model is.

    Attributes:
        faults: all of them, those in a cell of the grid first, from left to right.
    """

    def __init__(self, schedule: Schedule, faults: list[ScheduleFault]) -> None:
        self.faults = tuple(
            sorted(faults, key=lambda f: (f.position is None, f.position or 0, -1 if f.rank is None else f.rank))
        )
        first = self.faults[0]
        mark = None if first.rank is None or first.position is None else (first.rank, first.position)
        lines = [f"the schedule cannot be run, {len(faults)} {'fault' if len(faults) == 1 else 'faults'}:"]
        lines += [f"  {fault}" for fault in self.faults[:SHOWN]]
        if len(faults) > SHOWN:
            lines.append(f"  and {len(faults) - SHOWN} more")
        super().__init__("\n".join([*lines, format_grid(schedule, mark, AROUND)]))
