"""The rows of a benchmark as cells, for its page and for the terminal: a table for each tile size and number of ranks.

Takes rows of ``bench.json``.
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
    """Print a table for each tile size and number of ranks."""
    for tile, ranks in dict.fromkeys((row["tile_px"], row["ranks"]) for row in rows):
        alike = [row for row in rows if (row["tile_px"], row["ranks"]) == (tile, ranks)]
        batch, m = alike[0]["global_batch"], alike[0]["microbatches"]
        title = f"{tile} px, {ranks} {'rank' if ranks == 1 else 'ranks'}, {batch} tiles a step in {m} microbatches"
        print_table(title, HEADERS, [_shortened(cells(row)) for row in alike])


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what stands under ``HEADERS``; of a row that did not run, how it ended and the reason."""
    name = row["strategy"] + (f" ({row['chosen']})" if row.get("chosen") else "")
    if row["status"] != "ok":
        return (name, row["status"], *[""] * (len(HEADERS) - 3), row["reason"])
    low, high = row["images_per_second_range"]
    bubble = "" if row["bubble"] is None else f"{100 * row['bubble']:.0f} % ({100 * row['bubble_predicted']:.0f} %)"
    return (
        name,
        _number(row["images_per_second"]),
        f"{_number(low)}-{_number(high)}",
        _number(row["images_per_second_no_data"]),
        f"{100 * row['data_wait_fraction']:.1f} %",
        bubble,
        bytes_text(max(row["bytes_sent"])) if row["bytes_sent"] else "",
        bytes_text(max(row["device_bytes"] or row["peak_memory_bytes"])),
        row["claim"],
    )


def _shortened(line: tuple[str, ...]) -> tuple[str, ...]:
    return line if len(line[-1]) <= SHORT or line[2] else (*line[:-1], line[-1][: SHORT - 1] + "…")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
