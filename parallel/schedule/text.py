"""Schedules as text: grids for errors and logs, CSV files, messages of a wrong schedule and of a rank that failed.

One row a rank, one cell an action. Column n holds the n-th action of every rank: position in the list, not time. The
log of asynchronous SGD says which gradients were applied in which order, to which version of the parameters: all to
repeat a run.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import NamedTuple

from parallel.schedule.action import Action, Kind, Schedule

CUT = "..."
"""Stands for the cells left out at either end of a row."""


def format_grid(schedule: Schedule, mark: tuple[int, int] | None = None, around: int | None = None) -> str:
    """Return the grid of ``schedule``, without a newline at the end.

    Args:
        mark: (rank, position) of the cell to show as ``>>2F0<<``.
        around: show this many columns on each side of the mark; without a mark, of the first column. None shows all.
    """
    centre = mark[1] if mark else 0
    first = 0 if around is None else max(0, centre - around)
    last = max(map(len, schedule.values()), default=0) if around is None else centre + around + 1
    rows = {
        rank: [f">>{action}<<" if (rank, n) == mark else str(action) for n, action in enumerate(actions)][first:last]
        for rank, actions in schedule.items()
    }
    widths = [
        max(len(row[n]) for row in rows.values() if n < len(row))
        for n in range(max(map(len, rows.values()), default=0))
    ]
    digits = len(str(max(rows, default=0)))
    lines = []
    for rank in sorted(rows):
        cells = [text.ljust(width) for text, width in zip(rows[rank], widths, strict=False)]
        before = [CUT] if first else []
        after = [CUT] if len(schedule[rank]) > last else []
        lines.append(" ".join([f"rank {rank:>{digits}} |", *before, *cells, *after]).rstrip())
    return "\n".join(lines)


def to_csv(schedule: Schedule) -> str:
    """Return ``schedule`` as text that ``from_csv`` reads back to the same."""
    assert sorted(schedule) == list(range(len(schedule))), "rows are ranks, counted from 0"
    return "".join(",".join(map(str, schedule[rank])) + "\n" for rank in range(len(schedule)))


def from_csv(text: str) -> Schedule:
    """Return the schedule in ``text``; row n, counted from 0, is rank n.

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
                faults.append(f"schedule: row {rank + 1} (rank {rank}), column {column}: {fault}")
    if not any(schedule.values()) and not faults:
        faults.append("schedule: no actions: write one row for each rank, in cells such as 0F0,0B0")
    if faults:
        raise ValueError("\n".join(faults))
    return schedule


SHOWN = 20
"""Faults spelled out in the message; the rest are counted. All are in ``ScheduleError.faults``."""
AROUND = 6
"""Columns of the grid on each side of the marked cell."""


@dataclass(frozen=True, slots=True)
class ScheduleFault:
    """One thing that is wrong: the rule that is broken, and where.

    Attributes:
        rank: None when no rank is to blame, as for a microbatch that no rank computes.
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


AROUND_FAULT = 4
"""Cells of the grid shown on each side of the failing one."""

_DOES = {
    Kind.FORWARD: "forward pass of microbatch {i} through stage {k}{replica}",
    Kind.BACKWARD: "backward pass of microbatch {i} through stage {k}{replica}",
    Kind.BACKWARD_INPUT: "backward pass of microbatch {i} through stage {k}{replica}, gradients of its inputs",
    Kind.BACKWARD_WEIGHT: "backward pass of microbatch {i} through stage {k}{replica}, gradients of its parameters",
    Kind.RECOMPUTE: "second forward pass of microbatch {i} through stage {k}{replica}, to recompute what it saves",
    Kind.OFFLOAD: "moving what microbatch {i} keeps of stage {k}{replica} to the host",
    Kind.PREFETCH: "bringing back from the host what microbatch {i} keeps of stage {k}{replica}",
    Kind.SEND_FORWARD: "sending what stage {k}{replica} made of microbatch {i} to stage {peer}",
    Kind.RECEIVE_FORWARD: "receiving what stage {peer} made of microbatch {i} for stage {k}{replica}",
    Kind.SEND_BACKWARD: "sending gradients of microbatch {i} from stage {k}{replica} back to stage {peer}",
    Kind.RECEIVE_BACKWARD: "receiving gradients of microbatch {i} from stage {peer} for stage {k}{replica}",
    Kind.UPDATE: "update of stage {k}{replica} with the gradients of microbatch {i}",
    Kind.REDUCE: "summing the gradients of stage {k}{replica} over the ranks that hold a copy of it",
}


def describe_action(action: Action, replicas: bool = False) -> str:
    """Return ``action`` in words.

    Args:
        replicas: name the replica even when it is the first.
    """
    replica = f" of replica {action.replica}" if replicas or action.replica else ""
    return _DOES[action.kind].format(i=action.microbatch, k=action.stage, replica=replica, peer=action.peer)


def describe_fault(
    schedule: Schedule | None, rank: int, position: int | None, step: int, shapes: str, reason: str, advice: str = ""
) -> str:
    """Return the message of a run in which ``rank`` failed: what happened and where, advice, the grid around the cell.

    Args:
        schedule: what the ranks do in a step; None where a step is not made of actions (data parallelism).
        position: of the action in ``schedule[rank]``; None or -1 when the rank was at none.
        step: from 0, shown from 1 as in the run's other output; -1 before the first.
        shapes: of the action's tensors, such as "inputs (2, 256, 64, 64) float32"; may be empty.
        reason: what follows "rank 2", such as "was killed (signal 9)".
        advice: what the user can do about it.
    """
    where = f"at step {step + 1}" if step >= 0 else "before the first step"
    head = f"rank {rank} {reason} {where}"
    if schedule is None or position is None or position < 0:
        if schedule is not None and step >= 0:
            head += ", between actions"
        return "\n".join(filter(None, (head, advice)))
    action = schedule[rank][position]
    replicas = any(other.replica for actions in schedule.values() for other in actions)
    head += f" in {action}: {describe_action(action, replicas)}" + (f", {shapes}" if shapes else "")
    return "\n".join(filter(None, (head, advice, format_grid(schedule, mark=(rank, position), around=AROUND_FAULT))))


class Push(NamedTuple):
    """One update of the parameters.

    Attributes:
        step: of the training loop, from 0; all workers have the same parameters when it begins and when it ends.
        push: number within the step, from 0: the version of the parameters that it updates.
        worker: rank that computed the gradient.
        minibatch: of the step.
        pulled: version of the parameters that the gradient belongs to.
        staleness: updates between ``pulled`` and this one.
        learning_rate: of this update.
    """

    step: int
    push: int
    worker: int
    minibatch: int
    pulled: int
    staleness: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class PushRule:
    """Rule by which the server treats pushes.

    Attributes:
        staleness: minibatches that a worker may be ahead of the slowest, S. 0: rounds, whose pushes all belong to the
            parameters from before the round.
        by_staleness: the learning rate of a push is divided by 1 + its staleness (Zhang et al. 2016), instead of by W.
        replayed: pushes of an earlier run, in order, to apply in place of those that arrive; one worker computes them.
    """

    staleness: int = 4
    by_staleness: bool = False
    replayed: tuple[Push, ...] = ()


def read_pushes(text: str) -> tuple[Push, ...]:
    """Return the pushes of a log, a CSV file with the fields of ``Push`` as columns.

    Raises:
        ValueError: other columns, what is not a number, or a push that stands out of order or pulled a later version.
    """
    head, *rows = [row for row in csv.reader(io.StringIO(text.removeprefix("\ufeff"))) if row] or [[]]
    if tuple(head) != Push._fields:
        raise ValueError(f"its first line is {','.join(Push._fields)}; got {','.join(head) or 'nothing'}")
    pushes: list[Push] = []
    for row in rows:
        try:
            step, number, worker, minibatch, pulled, staleness = map(int, row[:-1])
            push = Push(step, number, worker, minibatch, pulled, staleness, float(row[-1]))
        except ValueError:
            raise ValueError(f"a line is {len(head)} numbers, {', '.join(head)}; got {','.join(row)}") from None
        last = pushes[-1] if pushes else Push(-1, -1, 0, 0, 0, 0, 0.0)
        follows = (push.step, push.push) in ((last.step, last.push + 1), (last.step + 1, 0))
        if not follows or not 0 <= push.pulled <= push.push:
            raise ValueError(f"pushes are logged in order, from step 0 on, after what they pulled; got {','.join(row)}")
        pushes.append(push)
    if not pushes:
        raise ValueError("it has no pushes")
    return tuple(pushes)
