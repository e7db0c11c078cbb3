"""What a benchmark found, in sentences that can be checked against its table, and four figures.

Takes the groups of comparable rows; gives words. "Faster" is said only of ranges of repeats that do not overlap; a
strategy whose loss is not the reference's takes no part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from app.pages.bench_file import Bench, Result
from app.pages.bench_groups import RowGroup, apart, by_model, range_text
from app.pages.bench_panels import times_baseline
from app.pages.html import Card, Table, format_duration, format_value
from parallel.units import bytes_text

Verdict = Literal["faster", "level", "slower", "only", "baseline", "unheld", "none"]
"""Of a group, the best of the others against the baseline. faster, slower: ranges apart; level: not apart, or only one
repeat; only: the baseline ran out of memory and another ran; baseline: no other ran; unheld: nothing to be held
against; none: nothing ran."""


def lead(row_groups: Sequence[RowGroup]) -> str:
    """The main finding, counted over all groups."""
    counts = Counter(verdict(group)[0] for group in row_groups)
    if not row_groups:
        return "Nothing was measured yet."
    if counts["none"] == len(row_groups):
        return "Nothing could be measured: no strategy ran on any of these tiles. Each row says why."
    held = counts["faster"] + counts["level"] + counts["slower"]
    parts = []
    if held:
        parts.append(
            f"Of {_count(held, 'comparison')} with the data-parallel baseline, another strategy was faster in "
            f"{counts['faster']}, slower in {counts['slower']}, and not to be told apart in {counts['level']}."
        )
    if counts["only"]:
        parts.append(
            f"In {_count(counts['only'], 'more case' if held else 'case')}, the data-parallel baseline did not fit "
            "the memory and another strategy did."
        )
    if counts["none"]:
        parts.append(f"In {counts['none']}, nothing ran.")
    alone = "Only the data-parallel baseline was measured, and nothing beside it."
    unheld = "No data-parallel baseline was measured beside these strategies."
    return " ".join(parts) or (alone if counts["baseline"] else unheld)


def findings(row_groups: Sequence[RowGroup], limit: int | None) -> dict[str, tuple[Table, list[str]]]:
    """Return for each model a table of sentences, one per tile side and ranks, and the limits of data parallelism."""
    headers = ("tile side", "ranks", "found")
    return {
        model: (
            Table(headers, [(f"{group.tile_px} px", str(group.ranks), sentence(group, limit)) for group in of_model]),
            list(data_parallel_limits(of_model)),
        )
        for model, of_model in by_model(row_groups).items()
    }


def verdict(group: RowGroup) -> tuple[Verdict, Result | None]:
    """How the group ended, and its best row beside the baseline."""
    baseline = group.baseline
    others = [one for one in group.ran if one is not baseline]
    best = others[0] if others else None
    if baseline is None:
        if best is None:
            return "none", None
        return ("only" if group.unfit else "unheld"), best
    if best is None:
        return "baseline", None
    if not apart(best, baseline):
        return "level", best
    return ("faster" if best.speed > baseline.speed else "slower"), best


def sentence(group: RowGroup, limit: int | None) -> str:
    """What a group shows."""
    kind, best = verdict(group)
    baseline = group.baseline
    if best is None or baseline is None:
        if kind == "baseline" and baseline is not None:
            return f"{baseline.strategy} runs at {_speed(baseline)}; no other strategy ran."
        within = f" in {bytes_text(limit)} a rank" if limit is not None else ""
        unfit = ", ".join(one.strategy for one in group.unfit)
        lost = f"{unfit} {'does' if len(group.unfit) == 1 else 'do'} not fit{within}; " if unfit else ""
        if best is None:
            return f"{lost}nothing ran." if lost else "nothing ran."
        return f"{lost}{best.strategy} is the fastest that ran, {_speed(best)}."
    times = times_baseline(best, group)
    ratio = f"{format_value(times, 3)} × {baseline.strategy}" if times is not None else ""
    if kind == "faster":
        return f"{best.strategy} is the fastest: {_speed(best)}, {ratio} with {_speed(baseline)}."
    if kind == "slower":
        return (
            f"{baseline.strategy} is the fastest: {_speed(baseline)}; next is {best.strategy}, {_speed(best)}, {ratio}."
        )
    why = "their ranges overlap" if apart(best, baseline) is False else "without repeats no difference can be told"
    return f"{best.strategy}: {_speed(best)}, {ratio} with {_speed(baseline)}; {why}."


def data_parallel_limits(row_groups: Sequence[RowGroup]) -> Iterator[str]:
    """For each number of ranks: how far each whole-model strategy gets that runs out of memory."""
    for ranks in sorted({group.ranks for group in row_groups}):
        of_ranks = [group for group in row_groups if group.ranks == ranks]
        largest: dict[int, list[str]] = {}
        for strategy in dict.fromkeys(one.strategy for group in of_ranks for one in group.unfit):
            fits = [group.tile_px for group in of_ranks for one in group.ran if one.strategy == strategy]
            largest.setdefault(max(fits, default=0), []).append(strategy)
        parts = [
            f"{' and '.join(names)} {'fits' if len(names) == 1 else 'fit'} " + (f"up to {tile} px" if tile else "none")
            for tile, names in sorted(largest.items())
        ]
        if parts:
            yield f"Of the tiles tried, on {_count(ranks, 'rank')}: {', '.join(parts)}."


def figures(bench: Bench, row_groups: Sequence[RowGroup]) -> list[Card]:
    """Cards: best ratio, what fits alone, rows by their end, duration."""
    cards = []
    ratios = [
        (times, best, group)
        for group in row_groups
        for kind, best in [verdict(group)]
        if kind in ("faster", "level", "slower") and best is not None
        if (times := times_baseline(best, group)) is not None
    ]
    if ratios:
        times, best, group = max(ratios, key=lambda row_groups: row_groups[0])
        name = group.baseline.strategy if group.baseline else ""
        note = f"{best.strategy}, {group.model}, {group.tile_px} px, {group.ranks_text}"
        cards.append(Card("Best against the baseline", format_value(times, 3), f"× {name}", note))
    alone = [
        (group.tile_px, best)
        for group in row_groups
        for kind, best in [verdict(group)]
        if kind == "only" and best and not any(one.family == "whole" for one in group.ran)
    ]
    if alone:
        tile, best = max(alone, key=lambda row_groups: row_groups[0])
        note = f"{best.strategy}, {best.model}, {format_value(best.speed, 3)} images/s"
        cards.append(Card("Largest tile beyond data parallelism", str(tile), "px", note))
    ends = Counter("measured" if one.ran else one.end for one in bench.results)
    rest = ", ".join(f"{count} {end}" for end, count in ends.items() if end != "measured")
    if bench.results:
        cards.append(
            Card("Rows measured", str(ends["measured"]), f"of {len(bench.results)}", rest or "all of them ran")
        )
    if bench.wall_s is not None:
        cards.append(Card("The whole benchmark took", format_duration(bench.wall_s)))
    return cards


def odd_losses(bench: Bench) -> list[str]:
    """Return the rows whose loss is not the reference's."""
    return [f"{one.strategy} ({one.model}, {one.tile_px} px)" for one in bench.results if one.loss_matches is False]


def _speed(one: Result) -> str:
    spread = range_text(one)
    return f"{format_value(one.speed, 3)} images/s" + (f" ({spread})" if spread else "")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
