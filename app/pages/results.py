"""Tables and sentences of a run's report: classes, slides, splits, the forecast of its plan, and what to try next.

Takes the rows of ``predictions.csv`` and ``splits.csv``, or the files of a run; returns tables, without rows where
there is nothing to say.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from app.pages.html import Table, format_setting, format_value
from app.pages.run_files import Rows, RunFiles, number_in
from app.settings.fields import arguments_for, flag_of, with_values
from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors
from parallel.units import bytes_text, seconds_text
from pipelines.labels.class_names import patient_note

SLIDES_SHOWN = 100
"""Rows of the slide table; the slides that came out worst are first, the rest is in ``predictions.csv``."""
CLASSES_SHOWN = 10
"""With more classes the table of confusions no longer fits a page."""
WAIT, IDLE, BUBBLE, FULL = 0.1, 0.1, 0.25, 0.9
"""Shares of the step time and of the memory from which something is advised."""
STAGES = 8
"""Slowest stages whose seconds are compared."""


def class_table(predictions: Rows) -> Table:
    """Return one row per class: slides, and what became of them."""
    dice = _columns(predictions, "dice_")
    if dice:
        values = {name: _numbers(predictions, name) for name in dice}
        rows = [
            (
                name.removeprefix("dice_"),
                str(len(counted)),
                *(f"{f(counted):.3f}" if counted else "–" for f in (statistics.fmean, statistics.median, min, max)),
            )
            for name, counted in values.items()
        ]
        return Table(("class", "slides", "mean Dice", "median", "lowest", "highest"), rows, range(1, 6))
    labelled = [row for row in predictions if row.get("label") and not _unscored(row)]
    classes = sorted({row["label"] for row in labelled} | {row.get("prediction", "") for row in labelled})
    counts = Counter((row["label"], row.get("prediction", "")) for row in labelled)
    shown = classes if len(classes) <= CLASSES_SHOWN else []
    rows = []
    for truth in classes:
        total = sum(counts[truth, other] for other in classes)
        right = counts[truth, truth]
        share = f"{100 * right / total:.0f} %" if total else "–"
        rows.append((truth, str(total), str(right), share, *(str(counts[truth, other]) for other in shown)))
    headers = ("class", "slides", "right", "sensitivity", *(f"said {other}" for other in shown))
    return Table(headers, rows, range(1, len(headers)))


def slide_table(predictions: Rows) -> Table:
    """Return one row per slide, the worst first, and what is to be said of those left out."""
    dice, scores = _columns(predictions, "dice_"), _columns(predictions, "score_")
    if dice:
        ordered = sorted(predictions, key=lambda row: min(_numbers((row,), *dice), default=2.0))
        headers = ["slide", "split", *(f"Dice {name.removeprefix('dice_')}" for name in dice)]
        rows = [
            [row.get("slide", ""), row.get("split", ""), *(_cell(row.get(name, "")) for name in dice)]
            for row in ordered
        ]
        numeric = range(2, len(headers))
    else:
        ordered = sorted(predictions, key=lambda row: (not _wrong(row), -max(_numbers((row,), *scores), default=0.0)))
        headers = ["slide", "split", "label", "prediction", "", "tiles", *(s.removeprefix("score_") for s in scores)]
        rows = [
            [
                *(row.get(name, "") for name in ("slide", "split", "label", "prediction")),
                ("✗\u00a0wrong" if _wrong(row) else "✓") if row.get("label") and not _unscored(row) else "",
                row.get("tiles", ""),
                *(_cell(row.get(name, "")) for name in scores),
            ]
            for row in ordered
        ]
        numeric = range(5, len(headers))
    unscored = sum(map(_unscored, predictions))
    notes = [f"The {SLIDES_SHOWN} worst of {len(rows)} slides; all are in predictions.csv."]
    notes = notes if len(rows) > SLIDES_SHOWN else []
    notes += [f"{unscored} without a score: no tile could be read, see failed_slides.csv."] if unscored else []
    return Table(headers, rows[:SLIDES_SHOWN], numeric, notes)


def split_table(splits: Rows, classes: Sequence[str]) -> Table:
    """Return slides and patients of each split, its slides of each class where slides have a label, and a note where
    patients are unknown.

    Args:
        splits: slide, patient (empty where unknown), label (index into ``classes``), split.
    """
    names = {str(i): name for i, name in enumerate(classes)}
    labels = sorted({row["label"] for row in splits if row.get("label")}, key=lambda text: (len(text), text))
    rows = []
    for split in ("train", "val", "test"):
        inside = [row for row in splits if row.get("split") == split]
        if inside:
            counts = Counter(row.get("label", "") for row in inside)
            named = [row["patient"] for row in inside if row.get("patient")]
            patients = str(len(set(named)))
            if len(named) < len(inside):
                patients = f"{patients} known" if named else "unknown"
            rows.append((split, str(len(inside)), patients, *(str(counts[label]) for label in labels)))
    headers = ("split", "slides", "patients", *(names.get(label, label) for label in labels))
    known = [row["slide"] for row in splits if row.get("patient")]
    note = patient_note(known, [row.get("slide", "") for row in splits])
    return Table(headers, rows, range(1, len(headers)), [] if note is None else [note])


def _columns(rows: Rows, start: str) -> list[str]:
    return [name for name in (rows[0] if rows else {}) if name.startswith(start)]


def _wrong(row: Mapping[str, str]) -> bool:
    return bool(row.get("label")) and row.get("label") != row.get("prediction") and not _unscored(row)


def _unscored(row: Mapping[str, str]) -> bool:
    """No tile of the slide could be read."""
    return row.get("tiles") == "0"


def _numbers(rows: Rows, *names: str) -> list[float]:
    values = [number_in(row.get(name, "")) for row in rows for name in names]
    return [value for value in values if not math.isnan(value)]


def _cell(text: str) -> str:
    value = number_in(text)
    return "–" if math.isnan(value) else f"{value:.3f}"


def forecast_table(files: RunFiles) -> Table:
    """Return planned and measured speed, bytes, waiting and seconds of stages with the deviation in per cent, and where
    the plan's times came from; no rows of a run without a plan."""
    plan, summary = files.plan, files.summary
    if plan.get("strategy") != summary.get("strategy"):  # resumed with another, by name
        plan = {}
    speed, taken = plan.get("images_per_second"), _largest(plan.get("peak_memory_bytes"))
    compared: list[tuple[str, Any, Any, Callable[[Any], str]]] = [
        ("images/s, reading included", speed, summary.get("images_per_second"), format_value),
        ("images/s, fed from memory", speed, summary.get("images_per_second_no_data"), format_value),
        ("tensors on the fullest rank", taken, _largest(summary.get("device_bytes")), bytes_text),
    ]
    pairs = zip(plan.get("stage_seconds") or (), summary.get("stage_seconds") or (), strict=False)
    slowest_first = sorted(enumerate(pairs), key=lambda numbered: -numbered[1][0])
    compared += [(f"stage {k}, a microbatch", *pair, seconds_text) for k, pair in sorted(slowest_first[:STAGES])]
    rows = [
        (name, form(planned), form(measured), f"{100 * (measured / planned - 1):+.0f} %".replace("-", "−"))
        for name, planned, measured, form in compared
        if planned and measured
    ]
    if len(plan.get("stage_seconds") or ()) > 1 and (waited := summary.get("bubble")) is not None:
        expected = plan.get("bubble") or 0.0
        points = f"{100 * (waited - expected):+.0f} points".replace("-", "−")
        rows.append(("waiting for other stages", f"{100 * expected:.0f} %", f"{100 * waited:.0f} %", points))
    notes = []
    if rows and speed:
        error = plan.get("expected_error")
        within = "" if error is None else f"; a layer's time is expected to be within {100 * error:.0f} %"
        notes.append(f"Times of the plan: {plan.get('cost_source')}{within}.")
    return Table(("", "forecast", "measured", "deviation"), rows, (1, 2, 3), notes)


def advice(files: RunFiles) -> list[str]:
    """Return what to try next, most urgent first."""
    return [*_of_memory(files), *_of_reading(files.summary), *_of_waiting(files)]


def _of_memory(files: RunFiles) -> Iterator[str]:
    summary = files.summary
    limit, taken = _limit(files), _largest(summary.get("device_bytes"))
    if summary.get("status") == "failed" and re.search("out of memory", summary.get("error") or ""):
        yield f"Memory ran out. Try {_smaller(files)}; `python -m app.plan --largest-tile` says what fits."
    elif limit and taken and taken >= FULL * limit:
        share = format_setting("_fraction", taken / limit)
        yield f"Tensors took {share} of {bytes_text(limit)}: for larger tiles or batches try {_smaller(files)}."


def _smaller(files: RunFiles) -> str:
    """The next two ways of needing less memory that the run did not use and that go together, cheapest first."""
    summary = files.summary
    ways = (
        ("microbatches", summary.get("global_batch"), summary.get("microbatches") != summary.get("global_batch")),
        ("recompute", "block", summary.get("recompute", "none") == "none"),
        ("offload", "overlap", summary.get("offload", "none") == "none"),
        ("stream", str((summary.get("stream_px") or 1024) // 2), True),
        ("ranks", 2 * summary.get("ranks", 1), not (files.environment.get("launcher") or {}).get("started_by")),
    )
    chosen: dict[str, Any] = {}
    for name, value, is_unused in ways:
        if is_unused and len(chosen) < 2 and _is_accepted(files, chosen | {name: value}):
            chosen[name] = value
    flags = [f"{flag_of(name)} {value}" for name, value in chosen.items()]
    return ", then ".join(flags) or "--parallel auto on more ranks"


class _OnAskedRanks(StrategySettings):
    """Settings held against the ranks that they ask for: this may be a rank of the run, which has fewer."""

    @property
    def world(self) -> int:
        return self.ranks


def _is_accepted(files: RunFiles, changed: Mapping[str, Any]) -> bool:
    """Return whether ``app.train`` accepts the settings of the run with others ``changed``."""
    of_run = {name: value for name, value in files.config.items() if name not in ("schedule", "replay")}  # paths
    of_run |= {"ranks": files.summary.get("ranks", 1), **changed}
    return not strategy_errors(with_values(_OnAskedRanks(), of_run))


def _of_reading(summary: Mapping[str, Any]) -> Iterator[str]:
    waited, cache = summary.get("data_wait_fraction") or 0.0, summary.get("tile_cache")
    if waited < WAIT:
        return
    begin = f"Reading was the limit: {format_setting('_fraction', waited)} of the step time waited for tiles."
    if summary.get("tile_px") == "slide":
        yield f"{begin} Try --read-ahead=4GiB, or a coarser --mpp."
    elif not cache:
        yield (
            f"{begin} Try --cache DIR on a local disk, which keeps tiles for the epochs that follow, or "
            "--read-ahead=4GiB."
        )
    elif cache.get("full"):
        yield f"{begin} The cache is full: raise --cache-bytes."
    elif cache["misses"] > cache["hits"]:
        yield f"{begin} Most tiles were not in the cache yet; a second epoch, or a second run, reads them from there."
    else:
        yield f"{begin} Tiles came from the cache: put --cache on a faster disk, or try --read-ahead=4GiB."


def _of_waiting(files: RunFiles) -> Iterator[str]:
    summary = files.summary
    idle, bubble = summary.get("idle_fraction") or [], summary.get("bubble") or 0.0
    m, batch = summary.get("microbatches") or 1, summary.get("global_batch") or 1
    if idle and max(idle) - min(idle) >= IDLE:
        changed = {"parallel": summary.get("strategy"), "shares": "auto", "microbatches": batch}
        if _is_accepted(files, changed):
            yield (
                f"Some ranks waited up to {format_setting('_fraction', max(idle))} of the step time for slower ones: "
                f"try {' '.join(arguments_for(changed))}."
            )
    if bubble >= BUBBLE and 2 * m <= batch:
        more = _is_accepted(files, {"microbatches": 2 * m})
        planned = _is_accepted(files, {"parallel": "auto"})
        ways = [f"--microbatches {2 * m}, which fills more of it"] * more + ["--parallel auto"] * planned
        if ways:
            yield (
                f"Ranks of the pipeline waited {format_setting('_fraction', bubble)} of a step for each other: try "
                f"{', or '.join(ways)}."
            )


def _limit(files: RunFiles) -> int | None:
    """Bytes that a rank may take: as asked, or as the smallest GPU has."""
    gpus = [gpu.get("memory_bytes") for gpu in files.environment.get("gpus") or ()]
    on_gpu = str(files.summary.get("device", "")).startswith("cuda")
    limit: int | None = files.summary.get("memory_limit_bytes")
    return limit or (min(filter(None, gpus), default=None) if on_gpu else None)


def _largest(of_ranks: list[int | None] | None) -> int:
    return max((size or 0 for size in of_ranks or ()), default=0)
