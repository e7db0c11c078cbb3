"""Throughput over the tile side and over the number of ranks: one line per strategy.

Takes groups and rows of one model; gives figures. The tile from which a data-parallel strategy no longer fits is
marked: what goes on beyond it is what splitting the model is for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.pages.bench_file import Result
from app.pages.bench_groups import RowGroup
from app.pages.charts import COLOURS, MARKERS, Chart, Event, Series, line_chart


def over_tiles(row_groups: Sequence[RowGroup], looks: dict[str, int]) -> list[Chart]:
    """Two figures per number of ranks that ran on two tile sides or more: images/s, and megapixels/s.

    Args:
        found: of one model.
        looks: strategy -> its place among all of the benchmark.
    """
    figures = []
    for ranks in sorted({group.ranks for group in row_groups}):
        of_ranks = [group for group in row_groups if group.ranks == ranks]
        if len(of_ranks) < 2:
            continue
        sizes, events = [group.tile_px for group in of_ranks], _limits(of_ranks)
        name = of_ranks[0].ranks_text
        for title, unit, scale, log in (
            (f"Images over tile side, {name}", "images per second, logarithmic", 0.0, True),
            (f"Pixels over tile side, {name}", "megapixels per second", 1e-6, False),
        ):
            lines = [
                _line(
                    strategy,
                    [
                        (one.tile_px, one.speed * (scale * one.tile_px**2 if scale else 1.0))
                        for group in of_ranks
                        for one in group.ran
                        if one.strategy == strategy and one.speed > 0
                    ],
                    look,
                )
                for strategy, look in looks.items()
            ]
            if all(len(line.x) < 2 for line in lines):
                continue  # the bars say as much
            figures.append(
                line_chart(
                    *(lines, title, unit),
                    x_label="tile side, px",
                    sizes=sizes,
                    events=events,
                    from_zero=not log,
                    log=log,
                )
            )
    return figures


def over_ranks(results: Sequence[Result], looks: dict[str, int]) -> list[Chart]:
    """A figure per kind of scaling and tile side that was measured on two numbers of ranks or more.

    Args:
        results: of one model.
        looks: as above.
    """
    figures = []
    keys = sorted({(one.tile_px, one.scaling) for one in results if one.scaling})
    for tile, kind in keys:
        rows = [one for one in results if one.tile_px == tile and one.scaling == kind]
        ran = [one for one in rows if one.ran and one.loss_matches is not False]
        if len({one.ranks for one in ran}) < 2:
            continue
        what = {"weak": "as many tiles a rank", "strong": "the same tiles in all"}.get(kind, "")
        title = f"{kind.capitalize()} scaling, {tile} px tiles"
        lines = [_over_ranks(strategy, look, ran) for strategy, look in looks.items() if strategy != "single"]
        if "ddp" not in looks:
            lines.append(_over_ranks("single", looks.get("single", 0), ran))
        sizes = [one.ranks for one in rows]
        unit = f"images per second; {what}" if what else "images per second"
        figures.append(line_chart([_ideal(ran), *lines], title, unit, x_label="ranks", sizes=sizes, from_zero=True))
    return figures


def _limits(row_groups: Sequence[RowGroup]) -> list[Event]:
    """Where whole-model strategies run out of memory: those that do at the same tile on one line."""
    first: dict[str, int] = {}
    for group in row_groups:
        for one in group.unfit:
            first.setdefault(one.strategy, group.tile_px)
    at: dict[int, list[str]] = {}
    for strategy, tile in first.items():
        at.setdefault(tile, []).append(strategy)
    return [Event(tile, f"from {tile} px out of memory: {', '.join(names)}") for tile, names in at.items()]


def _over_ranks(strategy: str, look: int, ran: Sequence[Result]) -> Series:
    """``single`` is what ``ddp`` is on one rank."""
    names = ("single", "ddp") if strategy == "ddp" else (strategy,)
    return _line(strategy, sorted((one.ranks, one.speed) for one in ran if one.strategy in names), look)


def _ideal(ran: Sequence[Result]) -> Series:
    """From the fastest row on the fewest ranks, in proportion to the ranks."""
    fewest, most = min(one.ranks for one in ran), max(one.ranks for one in ran)
    start = max((one for one in ran if one.ranks == fewest), key=lambda one: one.speed)
    x = np.array([fewest, most], np.float64)
    return Series(f"in proportion to the ranks, from {start.strategy}", x, start.speed * x / fewest, 0, "ideal")


def _line(strategy: str, points: Sequence[tuple[float, float]], look: int) -> Series:
    """A line whose colour and marks are those of its strategy on all charts."""
    x, y = np.array(points, np.float64).reshape(-1, 2).T
    return Series(strategy, x, y, look % COLOURS, "dots", tuple(MARKERS)[look % len(MARKERS)])
