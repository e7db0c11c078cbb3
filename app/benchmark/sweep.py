"""What a sweep says: which knobs help, which help together, and which fight.

Takes knobs and the images/s of every repeat of every setting; gives a row for each setting, text lines, and what can be
said in sentences. Speeds are medians of the repeats. Two speeds differ when their medians lie further apart than the
repeats of either; closer than that, or with one repeat, nothing is claimed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.benchmark.knobs import Knob, Setting, alone, on_in

NOTHING = "nothing on"
COLUMNS = ("on", "images/s", "range", "x nothing on", "x best knob", "verdict")

HELPS, HURTS, SAME = "helps", "hurts", "no difference"
TOGETHER, FIGHT, IDLE = "beats its best knob", "fight", "no better than nothing on"
UNKNOWN = "one repeat says nothing"


@dataclass(frozen=True)
class Measured:
    """A setting that was run.

    Attributes:
        images_per_second: of each repeat; empty when it did not run.
        reason: why it did not.
    """

    setting: Setting
    images_per_second: tuple[float, ...] = ()
    reason: str = ""

    @property
    def speed(self) -> float:
        """Median of the repeats."""
        return statistics.median(self.images_per_second)

    @property
    def spread(self) -> float:
        """From the slowest to the fastest repeat."""
        return max(self.images_per_second) - min(self.images_per_second)


def difference(first: Measured, second: Measured) -> int | None:
    """1 when ``first`` is faster, -1 when it is slower, 0 when their medians lie no further apart than the repeats of
    one of them; None when one of them has fewer than two repeats."""
    if min(len(first.images_per_second), len(second.images_per_second)) < 2:
        return None
    apart = first.speed - second.speed
    if abs(apart) <= max(first.spread, second.spread):
        return 0
    return 1 if apart > 0 else -1


def sweep_rows(knobs: Sequence[Knob], measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """A row for each setting, as ``bench.json`` keeps it, in the order given.

    ``times_off`` is the ratio to nothing on, ``best_knob`` the fastest of the setting's knobs alone and
    ``times_best_knob`` the ratio to it, each None where something was not measured. ``verdict`` of one knob: helps,
    hurts or no difference, beside nothing on. Of several: that they beat the best of them alone, and nothing on; that
    they fight, being slower than it; that they beat it and still not nothing on; or no difference.

    Args:
        measured: all settings that were to be run, nothing on among them.
    """
    found = {one.setting: one for one in measured}
    off = found[tuple((knob.flag, knob.off) for knob in knobs)]
    return [_row(knobs, one, off, found) for one in measured]


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """``rows`` as aligned columns, and what they say in sentences."""
    lines = [COLUMNS, *map(sweep_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
    return [*(line.rstrip() for line in aligned), *sweep_findings(rows)]


def sweep_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """``row`` as text, under ``COLUMNS``."""
    low, high = row["images_per_second_range"] or (None, None)
    return (
        row["label"],
        _number(row["images_per_second"]),
        "" if low is None else f"{_number(low)}-{_number(high)}",
        _ratio(row["times_off"]),
        _ratio(row["times_best_knob"]),
        row["verdict"],
    )


def sweep_findings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What can be said of all settings: which knobs help, which help together, which fight, and the fastest."""
    if any(row["verdict"] == UNKNOWN for row in rows):
        return ["With one repeat nothing can be said of what helps: measure twice or more."]
    told = []
    for verdict, said in (
        (HELPS, "Alone, what helps"),
        (HURTS, "Alone, what hurts"),
        (TOGETHER, "Together faster than the best of them alone"),
        (FIGHT, "Together slower than the best of them alone"),
    ):
        names = [row["label"] for row in rows if row["verdict"] == verdict]
        told.append(f"{said}: {'; '.join(names) or 'none'}.")
    known = [row for row in rows if row["images_per_second"] is not None]
    if known:
        best = max(known, key=lambda row: row["images_per_second"])
        ratio = "" if best["times_off"] is None else f", {_ratio(best['times_off'])} times that of nothing on"
        told.append(f"Fastest: {best['label']}, {_number(best['images_per_second'])} images/s{ratio}.")
        alike = [row for row in known if row is not best and _within(row, best)]
        if alike:
            fewest = min(alike, key=lambda row: len(row["on"]))
            if len(fewest["on"]) < len(best["on"]):
                told.append(f"Not slower beyond what repeats differ by, with fewer on: {fewest['label']}.")
    return told


def _row(knobs: Sequence[Knob], one: Measured, off: Measured, found: Mapping[Setting, Measured]) -> dict[str, Any]:
    on = on_in(knobs, one.setting)
    best = _best([found.get(alone(knobs, pair)) for pair in on]) if len(on) > 1 else None
    ran = bool(one.images_per_second)
    return {
        "knobs": dict(one.setting),
        "on": dict(on),
        "label": _label(on),
        "images_per_second": one.speed if ran else None,
        "images_per_second_range": [min(one.images_per_second), max(one.images_per_second)] if ran else None,
        "images_per_second_repeats": list(one.images_per_second),
        "times_off": one.speed / off.speed if ran and off.images_per_second else None,
        "best_knob": _label(on_in(knobs, best.setting)) if best else None,
        "times_best_knob": one.speed / best.speed if ran and best else None,
        "verdict": _verdict(len(on), one, off, best),
        "reason": one.reason,
    }


def _best(singles: Sequence[Measured | None]) -> Measured | None:
    """The fastest; None when one of them did not run, as it might have been."""
    ran = [one for one in singles if one is not None and one.images_per_second]
    return max(ran, key=lambda one: one.speed) if len(ran) == len(singles) else None


def _verdict(on: int, one: Measured, off: Measured, best: Measured | None) -> str:
    if not one.images_per_second:
        return "did not run"
    if on == 0:
        return "what the others are held against"
    against = best if on > 1 else off
    if against is None or not against.images_per_second:
        return "nothing to be held against"
    beside = difference(one, against)
    if beside is None:
        return UNKNOWN
    if on == 1 or beside == 0:
        return {1: HELPS, 0: SAME, -1: HURTS}[beside]
    if beside < 0:
        return FIGHT
    return TOGETHER if off.images_per_second and difference(one, off) == 1 else IDLE


def _within(row: Mapping[str, Any], best: Mapping[str, Any]) -> bool:
    """``row`` is not slower than ``best`` as far as repeats tell."""
    repeats = [Measured((), tuple(each["images_per_second_repeats"])) for each in (row, best)]
    return difference(*repeats) == 0


def _label(on: Sequence[tuple[str, str]]) -> str:
    return " + ".join(f"{flag.removeprefix('--')} {value}" for flag, value in on) or NOTHING


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
