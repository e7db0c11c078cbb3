"""Runs of a case of a benchmark, and its row: the median of its repeats and its claim against data parallelism.

A trial is one run of ``app.train`` in processes of its own. Running out of memory is a result: of the device, as torch
or a limit reports it; of the host, as the kernel kills a rank. The folder keeps the run's files but its checkpoint, so
that an interrupted benchmark continues. Speeds are medians over the repeats, with the slowest and the fastest; a claim
refers to data parallelism on the same number of ranks, with the same tiles, batch and memory.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.benchmark.command import Case, StrategySpec
from app.launch.host import memory_kills
from app.settings.fields import write_json
from parallel.comm.launch import kill_tree
from parallel.strategy import DELAYED, STALE

Status = Literal["ok", "out-of-memory", "killed", "cannot", "failed"]

SHARED = ("tiles.parquet", "splits.csv", "failed_slides.csv")
"""Files of a prepared folder that a run takes over."""
OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory|ALLOC_FAILED", re.I)
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process that signal 9 ended, or of a launcher that tells of one."""
FAULT = re.compile(r"error: (.*)")
Row = dict[str, Any]
LOSS_TOLERANCE = {"fp32": 1e-4, "tf32": 2.5e-3, "bf16": 2e-2}
"""Relative difference of first losses on as many ranks, by precision. Most agree in every digit; FSDP2, which gathers
weights to other places in memory, differs by 2e-5 for a ResNet-50 on tiles of 512 px. TF32 rounds to three bits more
than bf16."""
OTHER_RANKS = {"fp32": 1e-3, "tf32": 2.5e-3, "bf16": 2e-2}
"""The same between numbers of ranks. On a CPU they have other numbers of threads, which sum in another order: the loss
of a ResNet-50 fresh from its weights then differs by up to 5e-4, and is itself as far from that in float64."""
WORDS = {"out-of-memory": "out of memory", "killed": "killed by signal 9", "cannot": "cannot run"}
"""Status of a row that was not measured, as its claim has it."""
ENDED = {"out-of-memory": "is out of memory", "killed": "was killed", "cannot": "cannot run", "failed": "failed"}
"""Status of a baseline that was not measured, as a claim has it."""
MEDIANS = (
    *("images_per_second", "images_per_second_no_data", "pixels_per_second"),
    *("data_wait_fraction", "bubble", "bubble_predicted"),
)
LISTS = ("peak_memory_bytes", "device_bytes")


@dataclass(frozen=True)
class Trial:
    """Result of one run of a case.

    Attributes:
        reason: why it is not ok.
        wall_s: from start to end of the processes.
    """

    status: Status
    reason: str = ""
    summary: dict[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    wall_s: float = 0.0

    def save(self, path: Path) -> None:
        write_json(path, asdict(self), nan=True)

    @classmethod
    def load(cls, path: Path) -> Trial:
        """Return the trial that ``save`` wrote."""
        found = json.loads(path.read_text())
        return cls(**{**found, "losses": tuple(found["losses"])})


def run_trial(case: Case, shared: Sequence[str], prepared: Path, folder: Path, timeout_s: float) -> Trial:
    """Run ``case`` once; what is left goes to ``folder``, ``trial.json`` last.

    Args:
        prepared: a folder with the tiles of this size, found and divided once for all cases.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in SHARED:
        if (prepared / name).exists():
            shutil.copyfile(prepared / name, folder / name)
    command = [sys.executable, "-m", "app.train", *shared, *case.arguments, "--out", str(folder)]
    begun, kills = time.monotonic(), memory_kills()
    code = _run(command, folder / "output.txt", timeout_s)
    trial = _trial_of(code, folder, time.monotonic() - begun, timeout_s, kills)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # of parameters that are not used
    trial.save(folder / "trial.json")
    return trial


def _run(command: list[str], output: Path, timeout_s: float) -> int | None:
    """Exit code; None when it took too long. Nothing of it is left running."""
    with output.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_tree(process)


def _trial_of(code: int | None, folder: Path, wall_s: float, timeout_s: float, kills: int | None) -> Trial:
    output = (folder / "output.txt").read_text(errors="replace")
    fault = folder / "fault.txt"
    told = output + (fault.read_text(errors="replace") if fault.exists() else "")
    summary: dict[str, Any] = {}
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
    if code == 0 and summary.get("status") == "completed":
        with (folder / "metrics.csv").open(newline="") as file:
            return Trial("ok", "", summary, tuple(float(row["loss"]) for row in csv.DictReader(file)), wall_s)
    if code is None:
        return Trial("failed", f"not done after {timeout_s:g} s; its output is {folder / 'output.txt'}", {}, (), wall_s)
    if code in KILLED or any(f"exit code {dead}" in told for dead in KILLED):
        return Trial("killed", _who_killed(kills, memory_kills()), summary, (), wall_s)
    reasons = FAULT.findall(told)
    reason = reasons[0] if reasons else (told.strip().splitlines() or [f"exit code {code}"])[-1]
    if OUT_OF_MEMORY.search(told):
        lines = [line.strip() for line in told.splitlines() if OUT_OF_MEMORY.search(line)]
        return Trial("out-of-memory", lines[-1], summary, (), wall_s)
    return Trial("cannot" if code == 2 else "failed", reason, summary, (), wall_s)


def _who_killed(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return (
            "a rank was ended by signal 9, probably by the kernel as the host's memory ran out; it keeps no count here "
            "that would tell: `dmesg` may. Use fewer ranks, a smaller --tile, or a host with more memory"
        )
    if after > before:
        return (
            "a rank was ended by signal 9: the host's memory ran out, and the kernel killed for it "
            f"(its count of such kills rose by {after - before}); use fewer ranks, a smaller --tile, or a host with "
            "more memory"
        )
    return (
        "a rank was ended by signal 9, and not for lack of memory: the kernel's count of such kills stands at "
        f"{after}. Somebody, or a scheduler, ended it"
    )


def row_of(case: Case, model: str, trials: Sequence[Trial], scaling: str | None) -> Row:
    """The row of ``case``, without what follows from other rows.

    Args:
        trials: its repeats; the worst decides the status.
        scaling: weak or strong where several numbers of ranks are compared.
    """
    worst = next((trial for trial in trials if trial.status != "ok"), trials[0])
    good = [trial.summary for trial in trials if trial.status == "ok"] if worst.status == "ok" else []
    speeds = [summary["images_per_second"] for summary in good]
    settings = case.settings
    team = str(settings.team) if settings.team else None
    return {
        "model": model,
        "strategy": case.label,
        "parallel": case.strategy.name,
        "delayed": case.strategy.name in STALE,
        "ranks": case.ranks,
        "stages": settings.depth if settings.depth > 1 else None,
        "grid": team,
        "tile_px": case.tile,
        "global_batch": case.batch,
        "microbatches": case.microbatches,
        "scaling": scaling,
        "status": worst.status,
        "reason": worst.reason,
        **{key: _median([summary.get(key) for summary in good]) for key in MEDIANS},
        "images_per_second_range": [min(speeds), max(speeds)] if speeds else None,
        "images_per_second_repeats": speeds,
        **{key: _largest([summary.get(key) for summary in good]) for key in LISTS},
        "bytes_sent": _largest([summary.get("sent_bytes") for summary in good]),
        "time": _seconds(good),
        "precision": good[0]["precision"] if good else None,
        "chosen": _chosen(case.strategy, team, good),
        "losses": list(trials[0].losses) if good else [],
        "wall_s": sum(trial.wall_s for trial in trials),
    }


def _chosen(strategy: StrategySpec, team: str | None, good: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the plan's choice, or the default grid of teams, where the strategy leaves it open."""
    if strategy.name == "auto":
        return str(good[0]["strategy"]) if good else None
    return None if strategy.grid else team


def compare(rows: Sequence[Row]) -> None:
    """Add to each row the comparison with the others: its loss, its baseline and its claim."""
    for row in rows:
        alike = [other for other in rows if _work(other) == _work(row)]
        row["loss_difference"], row["loss_matches"] = _loss(row, alike)
        plain = "ddp" if row["ranks"] > 1 else "single"
        key = plain, row["ranks"]
        base = next((other for other in alike if (other["strategy"], other["ranks"]) == key), None)
        row["baseline"] = row["times_baseline"] = None
        if base is not None and base is not row:
            row["baseline"] = plain
            if row["status"] == base["status"] == "ok":
                row["times_baseline"] = row["images_per_second"] / base["images_per_second"]
        row["claim"] = _claim(row, base, alike)
        if row["delayed"] and row["status"] == "ok":
            row["claim"] += f"; {DELAYED}"


def _work(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values that rows must share to be compared."""
    return tuple(row[key] for key in ("model", "tile_px", "global_batch", "microbatches"))


def _loss(row: Mapping[str, Any], alike: Sequence[Mapping[str, Any]]) -> tuple[float | None, bool | None]:
    """Return the relative difference of the first loss from the reference, and whether it is rounding."""
    told = [other for other in alike if other["losses"] and not other["delayed"]]
    if not row["losses"] or row["delayed"] or told[0] is row:
        return None, None
    nearest = next(other for other in told if other["ranks"] == row["ranks"])
    reference, tolerance = (told[0], OTHER_RANKS) if nearest is row else (nearest, LOSS_TOLERANCE)
    first, own = reference["losses"][0], row["losses"][0]
    difference = abs(own - first) / max(abs(first), 1e-12)
    return difference, difference <= tolerance[row["precision"]]


def _claim(row: Mapping[str, Any], base: Mapping[str, Any] | None, alike: Sequence[Mapping[str, Any]]) -> str:
    if row["status"] != "ok":
        return str(WORDS.get(row["status"], row["status"]))
    if row["loss_matches"] is False:
        more = "more than rounding is expected to"
        return f"nothing is claimed: its first loss differs by {row['loss_difference']:.1e}, {more}"
    speed = f"{row['images_per_second']:.3g} images/s"
    if base is row:
        return f"{speed}: the baseline"
    if base is None:
        return f"{speed}; no data-parallel baseline was run"
    if base["status"] != "ok":
        return f"{speed} where {base['strategy']} {ENDED[base['status']]}{_beside_saving(row, base, alike)}"
    return speed_beside(row, base)


def speed_beside(row: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    """Return how many times as fast as ``base`` a row is, and whether the ranges of their repeats overlap."""
    ratio = row["images_per_second"] / base["images_per_second"]
    low, high = row["images_per_second_range"]
    base_low, base_high = base["images_per_second_range"]
    told = f"{ratio:.2f}x {base['strategy']}" + (f" on {base['ranks']} ranks" if base["ranks"] > 1 else "")
    if len(row["images_per_second_repeats"]) < 2:
        return f"{told}, measured once"
    apart = low > base_high or high < base_low
    return told + (", ranges apart" if apart else ", ranges overlap")


def _beside_saving(row: Mapping[str, Any], base: Mapping[str, Any], alike: Sequence[Mapping[str, Any]]) -> str:
    """Return the ratio to the fastest data-parallel row that fits, where plain data parallelism does not fit; or ""."""
    kind = base["parallel"], base["ranks"], "ok"
    fitting = [other for other in alike if (other["parallel"], other["ranks"], other["status"]) == kind]
    best = max(fitting, key=lambda other: other["images_per_second"], default=row)
    if best is row:
        return ""
    return f"; {row['images_per_second'] / best['images_per_second']:.2f}x {best['strategy']}"


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _largest(values: Sequence[Sequence[int] | None]) -> list[int] | None:
    """Return the largest value of all repeats by rank."""
    known = [value for value in values if value]
    return [max(one) for one in zip(*known, strict=True)] if known else None


def _seconds(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float | None] | None:
    """Return the seconds of a step by part (compute, bubble, transfer, data) in the repeat with the median speed."""
    if not summaries:
        return None
    summary = sorted(summaries, key=lambda one: one["images_per_second"])[len(summaries) // 2]
    step = summary["global_batch"] / summary["images_per_second"]
    data = step * (summary["data_wait_fraction"] or 0.0)
    parts = summary.get("step_seconds")
    if not parts:
        if summary.get("stages", 1) > 1 or summary.get("grid"):
            return None
        return {"compute": step - data, "bubble": None, "transfer": None, "data": data}
    rest = max(0.0, step - data - parts["compute"] - parts["bubble"])
    return {"compute": parts["compute"], "bubble": parts["bubble"], "transfer": rest, "data": data}
