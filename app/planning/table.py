"""A plan as people read it: a row for each strategy, fastest first, and the largest tile of each.

Takes rows; prints tables. What does not fit says how many bytes it misses, what cannot run says why.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from app.settings.console import print_table
from parallel.plan.largest_tile import LargestTile
from parallel.plan.plan import PlanRow, best_of
from parallel.strategy import Strategy
from parallel.units import bytes_text


def print_rows(rows: Sequence[PlanRow], best: PlanRow | None) -> None:
    """The best candidate of each strategy."""
    print_table(
        "strategies, best candidate of each",
        ("strategy", "ranks", "m", "fits", "images/s", "waiting", "peak bytes a rank", ""),
        [_line(row, "<- plan" if row is best else "") for row in _best_of_each(rows)],
    )


def print_largest(found: Sequence[LargestTile], limits: Sequence[str], memory: int) -> None:
    """The largest tile of each strategy, as it is and with what it may do to need less; the largest first.

    Args:
        limits: what stands in the way of twice the tile, of each.
    """
    lines = sorted(zip(found, limits, strict=True), key=lambda pair: -pair[0].tile)
    print_table(
        f"largest tile within {bytes_text(memory)} a rank",
        ("strategy", "tile px", "m", "peak bytes of the fullest rank", "images/s", "next size", "at twice the tile"),
        [(*_largest_line(one), limit) for one, limit in lines],
    )


def _best_of_each(rows: Sequence[PlanRow]) -> list[PlanRow]:
    """Fastest first; then those that do not fit, nearest first; then those that cannot run."""
    found = []
    for name in dict.fromkeys(row.strategy.name for row in rows):
        own = [row for row in rows if row.strategy.name == name]
        found.append(best_of(own) or min(own, key=lambda row: (bool(row.refused), row.over_bytes)))
    return sorted(found, key=lambda row: (bool(row.refused), row.over_bytes, -(row.images_per_second or 0.0)))


def _line(row: PlanRow, mark: str) -> Sequence[str]:
    candidate = row.strategy
    if row.refused:
        return (candidate.name, "", "", "no", "", "", "", row.refused)
    return (
        f"{candidate.name} {candidate.savings}".rstrip(),
        _mesh(candidate),
        str(candidate.m),
        "yes" if row.fits else f"{bytes_text(row.over_bytes)} over",
        "" if row.images_per_second is None else f"{row.images_per_second:.3g}",
        "" if row.bubble is None else f"{100 * row.bubble:.0f} %",
        " ".join(_runs([bytes_text(size) for size in row.peak_bytes])),
        mark,
    )


def _mesh(candidate: Strategy) -> str:
    """Groups and seats, the grid of the teams on them, and shares that are not equal."""
    if candidate.shares:
        counts = ",".join(str(len(share)) for share in candidate.shares)
        return f"{_mesh(dataclasses.replace(candidate, shares=()))} shares {counts}"

    if not candidate.splits:
        return str(candidate.ranks)
    teams = f" of {candidate.grids[0]}" if candidate.grids else ""
    return f"{candidate.groups} x {candidate.depth}{teams}"


def _runs(texts: Sequence[str]) -> list[str]:
    """Sizes of many ranks, equal neighbours put together, no more than six."""
    runs = [(text, len(list(equal))) for text, equal in itertools.groupby(texts)]
    words = [text if n == 1 else f"{n} x {text}" for text, n in runs]
    return words if len(words) <= 6 else [*words[:3], "...", *words[-2:]]


def _largest_line(found: LargestTile) -> Sequence[str]:
    after = found.next_row
    over = f"{bytes_text(after.over_bytes)} over" if after is not None else ""
    if found.row is None:
        return (found.name, "none", "", "", "", over)
    row = found.row
    speed = "" if row.images_per_second is None else f"{row.images_per_second:.3g}"
    peak = bytes_text(max(row.peak_bytes))
    return (f"{found.name} {row.strategy.savings}".rstrip(), str(found.tile), str(row.strategy.m), peak, speed, over)
