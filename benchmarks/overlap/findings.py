"""What can be said of settings that were run: which help, which help together, and which fight.

Takes the images/s of every repeat of every setting; gives a row for each setting, and sentences. Speeds are medians of
the repeats. Two speeds differ when their medians lie further apart than the repeats of either; closer than that, or
with one repeat, nothing is claimed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.overlap.settings import Setting, label

COLUMNS = ("on", "images/s", "range", "x nothing on", "x best of them alone", "verdict")
HELPS, HURTS, SAME = "helps", "hurts", "no difference"
TOGETHER, FIGHT, IDLE = "beats the best of them alone", "fight", "no better than nothing on"
UNKNOWN = "one repeat says nothing"

Speeds = Sequence[float]
"""Images/s of each repeat; none of a setting that did not run."""


def difference(first: Speeds, second: Speeds) -> int | None:
    """Return 1 when ``first`` is faster, -1 when it is slower, 0 when their medians lie no further apart than the
    repeats of one of them; None when one of them has fewer than two repeats."""
    if min(len(first), len(second)) < 2:
        return None
    apart = statistics.median(first) - statistics.median(second)
    if abs(apart) <= max(max(speeds) - min(speeds) for speeds in (first, second)):
        return 0
    return 1 if apart > 0 else -1


def rows_of(measured: Mapping[Setting, Speeds]) -> list[dict[str, Any]]:
    """Return a row for each setting, in the order given; ratios are None where something was not measured."""
    return [_row(on, measured) for on in measured]


def _row(on: Setting, measured: Mapping[Setting, Speeds]) -> dict[str, Any]:
    speeds, off = measured[on], measured[()]
    alone = [measured.get((knob,), ()) for knob in on]
    best = max(alone, key=statistics.median) if len(on) > 1 and all(alone) else ()
    return {
        "label": label(on),
        "on": len(on),
        "speeds": list(speeds),
        "speed": statistics.median(speeds) if speeds else None,
        "times_off": statistics.median(speeds) / statistics.median(off) if speeds and off else None,
        "times_best": statistics.median(speeds) / statistics.median(best) if speeds and best else None,
        "verdict": _verdict(len(on), speeds, off, best),
    }


def _verdict(on: int, speeds: Speeds, off: Speeds, best: Speeds) -> str:
    if not speeds:
        return "did not run"
    if on == 0:
        return "what the others are held against"
    against = best if on > 1 else off
    if not against:
        return "nothing to be held against"
    beside = difference(speeds, against)
    if beside is None:
        return UNKNOWN
    if on == 1 or beside == 0:
        return {1: HELPS, 0: SAME, -1: HURTS}[beside]
    if beside < 0:
        return FIGHT
    return TOGETHER if off and difference(speeds, off) == 1 else IDLE


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``row`` as text, under ``COLUMNS``."""
    speeds = row["speeds"]
    return (
        row["label"],
        f"{row['speed']:.3g}" if speeds else "-",
        f"{min(speeds):.3g}-{max(speeds):.3g}" if speeds else "",
        *("" if row[key] is None else f"{row[key]:.3g}" for key in ("times_off", "times_best")),
        row["verdict"],
    )


def findings(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what can be said of all settings: which help, which help together, which fight, and the fastest."""
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
    ran = [row for row in rows if row["speeds"]]
    if ran:
        best = max(ran, key=lambda row: row["speed"])
        ratio = "" if best["times_off"] is None else f", {best['times_off']:.2f} times that of nothing on"
        told.append(f"Fastest: {best['label']}, {best['speed']:.3g} images/s{ratio}.")
        fewer = [row for row in ran if row["on"] < best["on"] and difference(row["speeds"], best["speeds"]) == 0]
        if fewer:
            fewest = min(fewer, key=lambda row: row["on"])
            told.append(f"Not slower beyond what repeats differ by, with fewer on: {fewest['label']}.")
    return told
