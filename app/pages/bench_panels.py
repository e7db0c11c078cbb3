"""What the bars of a benchmark show: images per second, memory per rank, and where the time of a step goes.

Takes the groups of one model; gives a figure per tile side, with a block per number of ranks. Rows that did not run are
there with their reason: that a strategy does not fit is a result.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from app.pages.bars import Bar, BarBlock, BarFigure, BarPart, Key
from app.pages.bench_file import PARTS, WORDS, Result
from app.pages.bench_groups import RowGroup, range_text
from app.pages.html import format_duration, format_value
from parallel.units import bytes_text

FAMILIES = {
    "whole": (0, "model whole on each rank: one process, or data parallel"),
    "split": (1, "model or tile split by this project's engine"),
}
"""Family -> number of its colour and what it is."""

PART_NAMES = {
    "compute": "compute",
    "transfer": "transfer between ranks",
    "bubble": "bubble: waiting for other ranks",
    "data": "waiting for tiles",
}
PART_COLOURS = {"compute": 0, "transfer": 3, "bubble": 5, "data": 1}

MANY_RANKS = 8
"""Ranks that still have a bar each; of more, the fullest and the emptiest are drawn."""

FAR = 3.0
"""A limit this many times above all bars is told, not drawn: the bars would shrink to nothing."""

SHORT = 110
"""Characters of a reason beside the bars; the whole of it is in the table."""


def speed_panels(row_groups: Sequence[RowGroup]) -> list[BarFigure]:
    """Images per second, with the range of the repeats and the data-parallel baseline as a line."""
    return [
        BarFigure(f"{tile} px tiles", f"images per second, {_repeats(of_tile)}", [_speed_block(one) for one in of_tile])
        for tile, of_tile in _by_tile(row_groups)
    ]


def speed_keys(row_groups: Iterable[RowGroup]) -> list[Key]:
    """What the bars of ``speed_panels`` look like."""
    groups = list(row_groups)
    keys = _families(groups)
    if any(range_text(one) for group in groups for one in group.ran):
        keys.append(Key("lowest to highest repeat", "span"))
    return [*keys, Key("data-parallel baseline", "line")] if any(group.baseline for group in groups) else keys


def memory_panels(row_groups: Sequence[RowGroup], limit: int | None) -> list[BarFigure]:
    """The most memory of each rank, one bar a rank, with the limit as a line; nothing where no row has any."""
    figures = []
    for tile, of_tile in _by_tile(row_groups):
        results = [one for group in of_tile for one in group.results]
        if not any(one.counted or one.resident for one in results):
            continue
        counted = any(one.counted for one in results)
        what = "tensors at most, counted" if counted else "growth of resident memory at most"
        most = max(max(one.counted or one.resident, default=0) for one in results)
        line = limit if limit is not None and limit <= FAR * most else None
        if limit is not None and line is None:
            what += f"; the limit, {bytes_text(limit)}, is far beyond these bars"
        blocks = [
            BarBlock(group.ranks_text, group.batch_text, tuple(_memory_bars(group, counted)), line) for group in of_tile
        ]
        figures.append(BarFigure(f"{tile} px tiles", what, blocks, line_look="limit"))
    return figures


def memory_keys(row_groups: Iterable[RowGroup], limit: int | None) -> list[Key]:
    """What the bars of ``memory_panels`` look like."""
    keys = _families(row_groups)
    return keys if limit is None else [*keys, Key(f"limit of a rank, {bytes_text(limit)}", "limit")]


def time_panels(row_groups: Sequence[RowGroup]) -> list[BarFigure]:
    """A median step, cut into what its time goes into; nothing for tiles of which it is not known."""
    figures = []
    for tile, of_tile in _by_tile(row_groups):
        blocks = [
            BarBlock(group.ranks_text, group.batch_text, tuple(_time_bar(one) for one in group.results if one.time))
            for group in of_tile
        ]
        if known := [block for block in blocks if block.bars]:
            figures.append(BarFigure(f"{tile} px tiles", "seconds of a median step", known))
    return figures


def time_keys() -> list[Key]:
    """What the bars of ``time_panels`` look like."""
    return [Key(PART_NAMES[part], "area", PART_COLOURS[part]) for part in PARTS]


def _speed_block(group: RowGroup) -> BarBlock:
    baseline = group.baseline
    note = group.batch_text
    if baseline is not None:
        line = f"line: {baseline.strategy}, {format_value(baseline.speed, 3)} images/s"
        note = f"{note} · {line}" if note else line
    ran = [_speed_bar(one, group) for one in group.results if one.ran]
    return BarBlock(group.ranks_text, note, (*ran, *_ended(group, reasons=True)), baseline.speed if baseline else None)


def _speed_bar(one: Result, group: RowGroup) -> Bar:
    name = name_of(one)
    if not group.batch_text and one.global_batch is not None:
        name += f", {one.global_batch} tiles a step"
    notes = [] if one is group.baseline else [times_text(one, group)]
    if one.loss_matches is False:
        notes.append("another loss!")
    return Bar(
        name,
        format_value(one.speed, 3),
        ((BarPart(one.speed, FAMILIES[one.family][0]),),),
        " · ".join(note for note in notes if note),
        one.range if range_text(one) else (),
    )


def _ended(group: RowGroup, *, reasons: bool) -> Iterator[Bar]:
    """A line for all that ran out of memory, and one for each other row that did not run."""
    unfit = [name_of(one) for one in group.results if one.status == "out-of-memory"]
    if unfit:
        yield Bar("", reason=(WORDS["out-of-memory"], ", ".join(unfit)))
    for one in group.results:
        if not one.ran and one.status != "out-of-memory":
            why = textwrap.shorten(one.reason, SHORT, placeholder=" …") if reasons else ""
            yield Bar(name_of(one), reason=(one.end, why))


def times_text(one: Result, group: RowGroup) -> str:
    """``1.08 × ddp``: speed over that of the baseline; empty where there is none."""
    times = times_baseline(one, group)
    name = group.baseline.strategy if group.baseline else one.baseline
    return "" if times is None or not name else f"{format_value(times, 3)} × {name}"


def times_baseline(one: Result, group: RowGroup) -> float | None:
    """Speed over that of the baseline, as the row has it or counted here."""
    if one.times_baseline is not None:
        return one.times_baseline
    baseline = group.baseline
    return one.speed / baseline.speed if one.ran and baseline is not None and baseline.speed > 0 else None


def _memory_bars(group: RowGroup, counted: bool) -> Iterator[Bar]:
    for one in group.results:
        if one.ran and (sizes := one.counted or one.resident):
            shown = sizes if len(sizes) <= MANY_RANKS else (max(sizes), min(sizes))
            notes = []
            if len(sizes) > 1:
                least, most = bytes_text(min(sizes)), bytes_text(max(sizes))
                notes.append("each rank" if least == most else f"least {least}")
            if counted and not one.counted:
                notes.append("resident")
            bars = tuple((BarPart(size, FAMILIES[one.family][0]),) for size in shown)
            yield Bar(name_of(one), bytes_text(max(sizes)), bars, " · ".join(notes))
        elif one.ran:
            yield Bar(name_of(one), reason=("not known", "its memory was not recorded"))
    yield from _ended(group, reasons=False)


def _time_bar(one: Result) -> Bar:
    whole = sum(one.time.values())
    shares = [f"{part} {100 * seconds / whole:.0f} %" for part, seconds in one.time.items()] if whole else []
    parts = tuple(BarPart(seconds, PART_COLOURS[part]) for part, seconds in one.time.items())
    return Bar(name_of(one), format_duration(whole), (parts,), below=", ".join(shares))


def _by_tile(row_groups: Iterable[RowGroup]) -> Iterator[tuple[int, list[RowGroup]]]:
    for tile, of_tile in itertools.groupby(row_groups, key=lambda group: group.tile_px):
        yield tile, list(of_tile)


def _families(row_groups: Iterable[RowGroup]) -> list[Key]:
    there = {one.family for group in row_groups for one in group.results if one.ran}
    return [Key(text, "area", colour) for family, (colour, text) in FAMILIES.items() if family in there]


def _repeats(row_groups: Iterable[RowGroup]) -> str:
    counts = {len(one.repeats) for group in row_groups for one in group.results if one.repeats}
    return f"median of {max(counts)} repeats" if counts and max(counts) > 1 else "one repeat"


def name_of(one: Result) -> str:
    """Return its strategy, and what was made of what that leaves open."""
    return one.strategy + (f" ({one.chosen})" if one.chosen else "")
