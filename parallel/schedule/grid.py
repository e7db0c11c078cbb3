"""A schedule as text, one row a rank: for errors and logs.

Takes a schedule and the cell to point at, gives lines of aligned columns. Column n holds the n-th action of every rank:
position in the list, not time.
"""

from __future__ import annotations

from parallel.schedule.action import Schedule

CUT = "..."
"""Stands for the cells left out at either end of a row."""


def format_grid(schedule: Schedule, mark: tuple[int, int] | None = None, around: int | None = None) -> str:
    """The grid of ``schedule``.

    Args:
        mark: (rank, position) of the cell to show as ``>>2F0<<``.
        around: show this many columns on each side of the mark; without a mark, of the first column. None shows all.

    Returns:
        Lines without a newline at the end.
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
