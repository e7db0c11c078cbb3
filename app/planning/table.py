"""A plan as people read it: a row for each strategy, fastest first, and the largest tile of each.

Takes rows; prints tables. What does not fit says how many bytes it misses.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from app.settings.cli import print_table
from parallel.cost.cluster import Cluster
from parallel.plan.largest_tile import LIMIT, LargestTile
from parallel.plan.plan import PlanRow, best_of
from parallel.strategy import Strategy
from parallel.units import bytes_text

LONG_STEP_S = 3600.0
"""Steps that take longer are marked in the table of largest tiles."""
WAYS = ("by data parallelism", "with recomputation, offload or splitting", "in boxes")
"""Of training ever larger tiles."""
WAYS_OF_ONE = ("as they are", "with recomputation or offload", "in boxes")
"""Those of one rank."""


def print_rows(rows: Sequence[PlanRow], best: PlanRow | None) -> None:
    """Print the best candidate of each strategy, the chosen one first."""
    print_table(
        "strategies, best candidate of each",
        ("strategy", "ranks", "m", "fits", "images/s", "peak bytes a rank", ""),
        [_line(row, "<- plan" if row is best else "") for row in best_of_each(rows, best)],
    )


def print_largest(found: Sequence[LargestTile], limits: Sequence[str], cluster: Cluster) -> None:
    """Print the largest tile of each strategy, as it is and with what it may do to need less; the largest first, and
    those whose step takes more than ``LONG_STEP_S`` after all others.

    Args:
        limits: what stands in the way of twice the tile, of each.
    """
    lines = sorted(zip(found, limits, strict=True), key=lambda pair: (_is_long(pair[0].row), -pair[0].tile))
    print_table(
        f"largest tile within {bytes_text(cluster.memory_bytes)} and {bytes_text(round(cluster.host_bytes))} of host "
        "memory a rank",
        ("strategy", "tile px", "m", "peak bytes", "host bytes", "images/s", "s/step", "next size", "twice the tile"),
        [(*_largest_line(one, cluster), limit) for one, limit in lines],
    )
    if any(_is_long(one.row) for one in found):
        print("  !: a step takes more than an hour")
    print(f"\n{what_tiles_need(found)}")


def what_tiles_need(found: Sequence[LargestTile]) -> str:
    """Return up to which side in px tiles train by data parallelism, then by whatever else keeps them whole, then in
    boxes: each with the strategy that reaches furthest, and left out where the one before it reaches as far."""
    ways = WAYS_OF_ONE if {one.name for one in found if one.row} == {"single"} else WAYS
    words, reached = [], 0
    for family, way in enumerate(ways):
        own = [one for one in found if one.row is not None and _family(one.row.strategy) == family]
        best = max(own, key=lambda one: (one.tile, one.name != "single"), default=None)
        if best is not None and best.row is not None and best.tile > reached:
            reached = best.tile
            words.append(f"up to {reached} px {way} ({_short(best.row.strategy)})")
    return f"tiles train {', '.join(words)}" if words else "no tile fits, whatever is done"


def _family(strategy: Strategy) -> int:
    return 2 if strategy.policy.stream is not None else int(strategy.splits or strategy.policy.saves)


def _short(strategy: Strategy) -> str:
    return f"{strategy.name} {strategy.policy_text}".rstrip()


def best_of_each(rows: Sequence[PlanRow], plan: PlanRow | None) -> list[PlanRow]:
    """Return the best row of each strategy: the plan first, then the fastest; then those that do not fit, the nearest
    first; then those that cannot run."""
    found = []
    for name in dict.fromkeys(row.strategy.name for row in rows):
        own = [row for row in rows if row.strategy.name == name]
        found.append(best_of(own) or min(own, key=lambda row: (bool(row.refused), row.over_bytes)))
    found.sort(key=lambda row: (row is not plan, bool(row.refused), row.over_bytes, -(row.images_per_second or 0.0)))
    return found


def _line(row: PlanRow, mark: str) -> Sequence[str]:
    candidate = row.strategy
    if row.refused:
        return (candidate.name, "", "", "no", "", "", "")
    return (
        _short(candidate),
        _mesh(candidate),
        str(candidate.m),
        "yes" if row.fits else f"{bytes_text(row.over_bytes)} over",
        "" if row.images_per_second is None else f"{row.images_per_second:.3g}",
        " ".join(_runs([bytes_text(size) for size in row.peak_bytes])),
        mark,
    )


def _mesh(candidate: Strategy) -> str:
    """Return groups and teams, the grid of the teams, and shares that are not equal."""
    mesh = str(candidate.ranks)
    if candidate.splits:
        teams = f" of {candidate.grid}" if candidate.grid else ""
        mesh = f"{candidate.groups} x {candidate.group_ranks if candidate.ways > 1 else candidate.depth}{teams}"
    return mesh + (f" shares {','.join(str(len(share)) for share in candidate.shares)}" if candidate.shares else "")


def _runs(texts: Sequence[str]) -> list[str]:
    """Return sizes of many ranks, equal neighbours as one, no more than six."""
    runs = [(text, len(list(equal))) for text, equal in itertools.groupby(texts)]
    words = [text if n == 1 else f"{n} x {text}" for text, n in runs]
    return words if len(words) <= 6 else [*words[:3], "...", *words[-2:]]


def _is_long(row: PlanRow | None) -> bool:
    return row is not None and (row.step_s or 0.0) > LONG_STEP_S


def _largest_line(found: LargestTile, cluster: Cluster) -> Sequence[str]:
    """Return the cells of a row, but for the limit of twice the tile."""
    row = found.row
    if row is None:
        return (found.name, "none", "", "", "", "", "", _next_size(found, cluster))
    return (
        _short(row.strategy),
        str(found.tile),
        str(row.strategy.m),
        bytes_text(max(row.peak_bytes)),
        bytes_text(row.host_bytes) if row.host_bytes else "",
        "" if row.images_per_second is None else f"{row.images_per_second:.3g}",
        "" if row.step_s is None else f"{row.step_s:{'.3g' if row.step_s < 1000 else '.0f'}}{' !' * _is_long(row)}",
        _next_size(found, cluster),
    )


def _next_size(found: LargestTile, cluster: Cluster) -> str:
    """Return by how much the next tile side misses the memory, or that the search ended."""
    row = found.next_row
    if row is None:
        return f"the search ends at {LIMIT} px" if found.tile == LIMIT else "cannot run"
    on_device = max(row.peak_bytes, default=0) - cluster.usable_bytes
    return f"{bytes_text(row.over_bytes)} over{' on the host' * (row.over_bytes > max(0, on_device))}"
