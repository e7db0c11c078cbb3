"""All rows of a benchmark in full: what was measured, and the claim that it supports.

Takes rows in the order of the file; gives a table per model, tile side and number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from app.pages.bench_file import Bench, Result
from app.pages.bench_groups import range_text
from app.pages.bench_panels import name_of
from app.pages.html import format_value
from parallel.units import bytes_text

COLUMNS = (
    "strategy",
    "images/s",
    "range",
    "fed from memory",
    "data wait",
    "bubble",
    "predicted",
    "tensors, fullest rank",
    "resident, fullest rank",
    "sent a step",
    "loss",
    "claim",
)


class FullRow(NamedTuple):
    """A row: its cells and the claim, or ``ended``: a word and a reason why there are none."""

    name: str
    ended: tuple[str, str] | None
    cells: Sequence[str]
    claim: str


def full_table(bench: Bench) -> list[tuple[str, list[FullRow]]]:
    """Return the rows that follow each other under one title."""
    return [(title, [_row(one) for one in alike]) for title, alike in itertools.groupby(bench.results, _title)]


def _title(one: Result) -> str:
    parts = [one.model, f"{one.tile_px} px", f"{one.ranks} {'rank' if one.ranks == 1 else 'ranks'}"]
    if one.global_batch is not None:
        parts.append(f"{one.global_batch} {'tile' if one.global_batch == 1 else 'tiles'} a step")
    if one.microbatches is not None:
        parts.append(f"{one.microbatches} microbatch{'' if one.microbatches == 1 else 'es'}")
    if one.scaling:
        parts.append(f"{one.scaling} scaling")
    return " · ".join(parts)


def _row(one: Result) -> FullRow:
    cells = (
        _speed(one.images_per_second),
        range_text(one),
        _speed(one.no_data),
        _share(one.data_wait),
        _share(one.bubble),
        _share(one.bubble_predicted),
        _most(one.counted),
        _most(one.resident),
        _most(one.sent),
        {True: "same", False: "differs!", None: ""}[one.loss_matches],
    )
    return FullRow(name_of(one), None if one.ran else (one.end, one.reason), cells, one.claim)


def _speed(value: float | None) -> str:
    return "" if value is None else format_value(value, 3)


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _most(sizes: Sequence[float]) -> str:
    return bytes_text(max(sizes)) if sizes else ""
