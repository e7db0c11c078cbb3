"""One case, run once: ``app.train`` in processes of its own, and what became of it.

Takes a case, the arguments that all cases share, and a folder; gives a ``Trial``. Running out of memory is a result: of
the device's, as torch or a limit told; where the host's ran out, the kernel kills a rank, which is another.
The folder keeps the run's files but its checkpoint, so that a benchmark that was broken off continues where it was.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from app.benchmark.case import Case
from app.launch.host import memory_kills
from app.settings.data_file import write_json
from parallel.comm.launch import kill_tree

Status = Literal["ok", "out-of-memory", "killed", "cannot", "failed"]

SHARED = ("tiles.parquet", "splits.csv", "failed_slides.csv")
"""Files of a prepared folder that a run takes over."""

OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|MemoryError|can't allocate memory|ALLOC_FAILED", re.I)
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a process that signal 9 ended, or of a launcher that tells of one."""

FAULT = re.compile(r"error: (.*)")


@dataclass(frozen=True)
class Trial:
    """Result of one run of a case.

    Attributes:
        reason: why it is not ok.
        summary: the run's ``summary.json``.
        losses: of each step.
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
        shared: arguments of ``app.train`` that are the same for every case.
        prepared: a folder with the tiles of this size, found and divided once for all cases.
        timeout_s: after which the run is ended and counts as failed.
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
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # of parameters that nobody asked for
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
        return Trial("ok", "", summary, _losses(folder / "metrics.csv"), wall_s)
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
    """Return the likely cause of a signal 9."""
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


def _losses(path: Path) -> tuple[float, ...]:
    with path.open(newline="") as file:
        return tuple(float(row["loss"]) for row in csv.DictReader(file))
