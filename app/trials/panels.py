"""What the bars of a benchmark show: images per second, memory per rank, and where the time of a step goes.

Takes the groups of one model; gives a figure per tile side, with a block per number of ranks. Rows that did not run are
there with their reason: that a strategy does not fit is a result.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from app.charts import format_value
from app.page import format_bytes, format_duration
from app.trials.bars import Bar, Block, Key, Part, bar_figure
from app.trials.bench_file import PARTS, Result
from app.trials.groups import Group, range_text

FAMILIES = {
    "whole": (0, "model whole on each rank: one process, or data parallel"),
    "torch": (5, "model split by torch.distributed.pipelining"),
    "split": (1, "model split by this project's engine"),
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

WORDS = {"out-of-memory": "out of memory", "cannot": "cannot run", "failed": "failed"}
"""Status of a row that was not measured, as a reader would say it."""


def speed_panels(found: Sequence[Group]) -> list[str]:
    """Images per second, with the range of the repeats and the data-parallel baseline as a line."""
    return [
        bar_figure(
            f"{tile} px tiles",
            f"images per second, {_repeats(of_tile)}",
            [_speed_block(group) for group in of_tile],
            [*_families(of_tile), *_ranges(of_tile), *_baselines(of_tile)],
        )
        for tile, of_tile in _by_tile(found)
    ]


def memory_panels(found: Sequence[Group], limit: int | None) -> list[str]:
    """The most memory of each rank, one bar a rank, with the limit as a line; nothing where no row has any."""
    figures = []
    for tile, of_tile in _by_tile(found):
        results = [one for group in of_tile for one in group.results]
        if not any(one.counted or one.resident for one in results):
            continue
        counted = any(one.counted for one in results)
        what = "tensors of each rank at most, counted" if counted else "growth of each rank's resident memory at most"
        most = max(max(one.counted or one.resident, default=0) for one in results)
        line = limit if limit is not None and limit <= FAR * most else None
        keys = _families(of_tile)
        if limit is not None:
            beyond = "" if line is not None else ", far beyond these bars"
            keys.append(
                Key(f"limit of a rank, {format_bytes(limit)}{beyond}", "limit" if line is not None else "area", 5)
            )
        blocks = [
            Block(group.ranks_text, group.batch_text, tuple(_memory_bar(one, counted) for one in group.results), line)
            for group in of_tile
        ]
        figures.append(bar_figure(f"{tile} px tiles", what, blocks, keys, line_look="limit"))
    return figures


def time_panels(found: Sequence[Group]) -> list[str]:
    """A median step, cut into what its time goes into. Nothing for tiles of which it is not known."""
    figures = []
    for tile, of_tile in _by_tile(found):
        blocks = [
            Block(group.ranks_text, group.batch_text, tuple(_time_bar(one) for one in group.results if one.time))
            for group in of_tile
        ]
        keys = [Key(PART_NAMES[part], "area", PART_COLOURS[part]) for part in PARTS]
        known = [block for block in blocks if block.bars]
        figures.append(bar_figure(f"{tile} px tiles", "seconds of a median step", known, keys))
    return [figure for figure in figures if figure]


def _speed_block(group: Group) -> Block:
    baseline = group.baseline
    note = group.batch_text
    if baseline is not None:
        line = f"line: {baseline.strategy}, {format_value(baseline.speed, 3)} images/s"
        note = f"{note} · {line}" if note else line
    bars = tuple(_speed_bar(one, group) for one in group.results)
    return Block(group.ranks_text, note, bars, baseline.speed if baseline else None)


def _speed_bar(one: Result, group: Group) -> Bar:
    name = one.strategy + (f" ({one.chosen})" if one.chosen else "")
    if not group.batch_text and one.global_batch is not None:
        name += f", {one.global_batch} tiles a step"
    if not one.ran:
        return Bar(name, reason=(WORDS.get(one.status, one.status), one.reason))
    notes = [range_text(one)]
    if (times := times_text(one, group)) and one is not group.baseline:
        notes.append(times)
    if one.loss_matches is False:
        notes.append("another loss!")
    return Bar(
        name,
        format_value(one.speed, 3),
        ((Part(one.speed, FAMILIES[one.family][0]),),),
        " · ".join(note for note in notes if note),
        one.range if range_text(one) else (),
    )


def times_text(one: Result, group: Group) -> str:
    """``1.08 × ddp``: speed over that of the baseline; empty where there is none."""
    times = times_baseline(one, group)
    name = group.baseline.strategy if group.baseline else one.baseline
    return "" if times is None or not name else f"{format_value(times, 3)} × {name}"


def times_baseline(one: Result, group: Group) -> float | None:
    """Speed over that of the baseline, as the row has it or counted here."""
    if one.times_baseline is not None:
        return one.times_baseline
    baseline = group.baseline
    return one.speed / baseline.speed if one.ran and baseline is not None and baseline.speed > 0 else None


def _memory_bar(one: Result, counted: bool) -> Bar:
    if not one.ran:
        return Bar(one.strategy, reason=(WORDS.get(one.status, one.status), one.reason))
    sizes = one.counted or one.resident
    if not sizes:
        return Bar(one.strategy, reason=("not known", "its memory was not recorded"))
    shown = sizes if len(sizes) <= MANY_RANKS else (max(sizes), min(sizes))
    notes = []
    if len(sizes) > 1:
        texts = [format_bytes(size) for size in sizes]
        notes.append("each rank" if len(set(texts)) == 1 else "fullest rank; all: " + ", ".join(_runs(texts)))
    if counted:
        told = format_bytes(max(one.resident)) if one.resident else ""
        notes.append((f"resident {told}" if told else "") if one.counted else "resident, not counted")
    colour = FAMILIES[one.family][0]
    bars = tuple((Part(size, colour),) for size in shown)
    return Bar(one.strategy, format_bytes(max(sizes)), bars, " · ".join(note for note in notes if note))


def _time_bar(one: Result) -> Bar:
    whole = sum(one.time.values())
    shares = [f"{part} {100 * seconds / whole:.0f} %" for part, seconds in one.time.items()] if whole else []
    parts = tuple(Part(seconds, PART_COLOURS[part]) for part, seconds in one.time.items())
    return Bar(one.strategy, format_duration(whole), (parts,), below=", ".join(shares))


def _by_tile(found: Iterable[Group]) -> Iterator[tuple[int, list[Group]]]:
    for tile, of_tile in itertools.groupby(found, key=lambda group: group.tile_px):
        yield tile, list(of_tile)


def _families(found: Iterable[Group]) -> list[Key]:
    there = {one.family for group in found for one in group.results if one.ran}
    return [Key(text, "area", colour) for family, (colour, text) in FAMILIES.items() if family in there]


def _ranges(found: Iterable[Group]) -> list[Key]:
    there = any(range_text(one) for group in found for one in group.results if one.ran)
    return [Key("lowest to highest repeat", "span")] if there else []


def _baselines(found: Iterable[Group]) -> list[Key]:
    there = any(group.baseline for group in found)
    return [Key("data-parallel baseline", "line")] if there else []


def _repeats(found: Iterable[Group]) -> str:
    counts = {len(one.repeats) for group in found for one in group.results if one.repeats}
    return f"median of {max(counts)} repeats" if counts and max(counts) > 1 else "one repeat"


def _runs(texts: Sequence[str]) -> list[str]:
    """Texts of many ranks, equal neighbours put together, no more than six."""
    runs = [(text, len(list(equal))) for text, equal in itertools.groupby(texts)]
    words = [text if n == 1 else f"{n} × {text}" for text, n in runs]
    return words if len(words) <= 6 else [*words[:3], "…", *words[-2:]]
