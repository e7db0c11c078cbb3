"""The results of a benchmark, read for its page: ``bench.json`` in, rows with empty values for what is not there out.

Takes a folder of ``app.bench``, finished or still growing; a value that is null, not finite or of another type than it
should be is a missing one, not an error. Only a row that does not say what it is of cannot be shown.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.settings.cli import RunError
from app.settings.sizes import bytes_of
from parallel.strategy import WHOLE

NAME = "bench.json"

WORDS = {"out-of-memory": "out of memory", "killed": "killed by signal 9", "cannot": "cannot run"}
"""Status of a row that was not measured, as a reader would say it."""

PARTS = ("compute", "transfer", "bubble", "data")
"""What the time of a step goes into."""


@dataclass(frozen=True)
class Result:
    """One row: a strategy, with the settings that tell it from others, on tiles of one side and a number of ranks.

    ``chosen``: what was made of what it leaves open, a planner's strategy or the grid of its teams.
    Speeds in images/s, ``time`` in seconds by part of the step, memory and messages in bytes by rank; () or {} where
    nothing is known.
    """

    model: str
    strategy: str
    chosen: str | None
    ranks: int
    tile_px: int
    global_batch: int | None
    microbatches: int | None
    scaling: str | None
    status: str
    reason: str
    images_per_second: float | None
    range: tuple[float, ...]
    repeats: tuple[float, ...]
    no_data: float | None
    data_wait: float | None
    bubble: float | None
    bubble_predicted: float | None
    sent: tuple[float, ...]
    resident: tuple[float, ...]
    counted: tuple[float, ...]
    time: Mapping[str, float]
    loss_matches: bool | None
    baseline: str | None
    times_baseline: float | None
    claim: str
    schedule_svg: str | None

    @property
    def ran(self) -> bool:
        """It was measured."""
        return self.status == "ok" and self.images_per_second is not None

    @property
    def end(self) -> str:
        """Why it was not measured, in words."""
        return "not measured" if self.status == "ok" else WORDS.get(self.status, self.status)

    @property
    def speed(self) -> float:
        """Images/s of a row that ran."""
        assert self.images_per_second is not None, "asked of a row that ran"
        return self.images_per_second

    @property
    def family(self) -> str:
        """``whole``: each rank has the model; ``split``: it is split over them."""
        base = re.split("[ ,]", self.chosen or self.strategy)[0]
        return "whole" if base in WHOLE else "split"


@dataclass(frozen=True)
class Bench:
    """A benchmark and its rows, in the order of the file."""

    folder: Path
    command: str
    created: str
    wall_s: float | None
    environment: Mapping[str, Any]
    settings: Mapping[str, Any]
    results: tuple[Result, ...]

    @property
    def limit_bytes(self) -> int | None:
        """Memory that a rank may take; None where no limit was set."""
        memory = self.settings.get("memory")
        if isinstance(memory, str):
            return bytes_of(memory)
        return memory if isinstance(memory, int) and memory > 0 else None


def read_bench(folder: Path) -> Bench:
    """Read ``bench.json`` of ``folder``.

    Raises:
        RunError: it is not there, cannot be understood, or has a row without model, strategy, ranks or tile side.
    """
    path = folder / NAME
    if not path.is_file():
        raise RunError(
            f"a benchmark's page is made from {NAME}; {path} is not there. Give the --out folder of app.bench"
        )
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as fault:
        raise RunError(f"{path} cannot be read: {fault}. Run app.bench again") from fault
    if not isinstance(loaded, dict):
        raise RunError(f"{path} must hold names and values; found a {type(loaded).__name__}. Run app.bench again")
    rows = loaded.get("rows") or []
    return Bench(
        folder=folder,
        command=_text(loaded.get("command")),
        created=_text(loaded.get("created")),
        wall_s=_number(loaded.get("wall_s")),
        environment=_mapping(loaded.get("environment")),
        settings=_mapping(loaded.get("settings")),
        results=tuple(_result(row, number, path) for number, row in enumerate(rows)),
    )


def _result(row: Any, number: int, path: Path) -> Result:
    row = _mapping(row)
    ranks, tile = _whole(row.get("ranks")), _whole(row.get("tile_px"))
    if not row.get("model") or not row.get("strategy") or ranks is None or tile is None:
        raise RunError(f"{path}: row {number} must have model, strategy, ranks and tile_px; got {_brief(row)}")
    return Result(
        model=str(row["model"]),
        strategy=str(row["strategy"]),
        chosen=row.get("chosen") or None,
        ranks=ranks,
        tile_px=tile,
        global_batch=_whole(row.get("global_batch")),
        microbatches=_whole(row.get("microbatches")),
        scaling=row.get("scaling") or None,
        status=_text(row.get("status")) or "unknown",
        reason=_text(row.get("reason")),
        images_per_second=_number(row.get("images_per_second")),
        range=_numbers(row.get("images_per_second_range")),
        repeats=_numbers(row.get("images_per_second_repeats")),
        no_data=_number(row.get("images_per_second_no_data")),
        data_wait=_number(row.get("data_wait_fraction")),
        bubble=_number(row.get("bubble")),
        bubble_predicted=_number(row.get("bubble_predicted")),
        sent=_numbers(row.get("bytes_sent")),
        resident=_numbers(row.get("peak_memory_bytes")),
        counted=_numbers(row.get("device_bytes")),
        time=_times(_mapping(row.get("time"))),
        loss_matches=row["loss_matches"] if isinstance(row.get("loss_matches"), bool) else None,
        baseline=row.get("baseline") or None,
        times_baseline=_number(row.get("times_baseline")),
        claim=_text(row.get("claim")),
        schedule_svg=row.get("schedule_svg") or None,
    )


def _times(numbers: Mapping[str, Any]) -> Mapping[str, float]:
    return {part: seconds for part in PARTS if (seconds := _number(numbers.get(part))) is not None and seconds >= 0}


def _number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if known else None


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 and not isinstance(value, bool) else None


def _numbers(values: Any) -> tuple[float, ...]:
    """All of a list of numbers, () where one is missing: which rank it was of would be lost."""
    numbers = [_number(value) for value in values] if isinstance(values, list) else []
    known = tuple(value for value in numbers if value is not None)
    return known if len(known) == len(numbers) else ()


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _brief(row: Mapping[str, Any]) -> str:
    names: Sequence[str] = ("model", "strategy", "ranks", "tile_px")
    return ", ".join(f"{name} {row.get(name)!r}" for name in names)
