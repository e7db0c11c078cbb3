"""The table of a benchmark on a terminal: a line for each row, and beneath it what can be claimed.

Takes rows of ``bench.json``; prints them, by tile size and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.settings.console import print_table
from parallel.units import bytes_text

HEADERS = ("strategy", "images/s", "range", "from memory", "data wait", "bubble", "sent", "fullest rank", "claim")
SHORT = 90
"""Characters of a reason on the terminal; the whole of it is in ``bench.json``."""


def print_bench(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table for each tile size and number of ranks."""
    for tile, ranks in dict.fromkeys((row["tile_px"], row["ranks"]) for row in rows):
        own = [row for row in rows if (row["tile_px"], row["ranks"]) == (tile, ranks)]
        batch, m = own[0]["global_batch"], own[0]["microbatches"]
        told = f"{tile} px, {ranks} {'rank' if ranks == 1 else 'ranks'}, {batch} tiles a step in {m} microbatches"
        print_table(told, HEADERS, [_line(row) for row in own])


def _line(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = row["strategy"] + (f" ({row['chosen']})" if row.get("chosen") else "")
    if row["status"] != "ok":
        reason = row["reason"] if len(row["reason"]) <= SHORT else row["reason"][: SHORT - 1] + "…"
        return (name, row["status"], "", "", "", "", "", "", reason)
    low, high = row["images_per_second_range"]
    bubble = "" if row["bubble"] is None else f"{100 * row['bubble']:.0f} % ({100 * row['bubble_predicted']:.0f} %)"
    held = row["device_bytes"] or row["peak_memory_bytes"]
    return (
        name,
        _number(row["images_per_second"]),
        f"{_number(low)}-{_number(high)}",
        _number(row["images_per_second_no_data"]),
        f"{100 * row['data_wait_fraction']:.1f} %",
        bubble,
        bytes_text(max(row["bytes_sent"])) if row["bytes_sent"] else "",
        bytes_text(max(held)),
        row["claim"],
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
