"""The ways of starting a run that start it again: torchrun, ``--ranks`` with ``--max-restarts``, and Slurm's requeue.

Takes settings and a run folder; gives the run under way. Jobs are those of a Slurm on this machine, if it is installed:
``preemptible.sbatch``, which asks for the requeue itself when a rank is killed, or for which somebody else asks.
"""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from tests.helpers.slurm import ENDED, Slurm, missing_programs, running_slurm

ROOT = Path(__file__).parents[2]
PREEMPTIBLE = ROOT / "configs" / "slurm" / "preemptible.sbatch"
RANKS, RESTARTS = 2, 3
KILLED, REQUEUED = "rank 1, `kill -9`", "the job, `scontrol requeue`"


class StartedRun(Protocol):
    """A run under way."""

    def over(self) -> bool: ...

    def wait(self, timeout_s: float) -> int:
        """Exit code; ends it and raises TimeoutError when it takes too long."""

    def requeue(self) -> None: ...

    def end(self) -> None: ...

    def printed(self) -> str: ...


@dataclass(frozen=True)
class Start:
    """One way.

    Attributes:
        killed: what a drill kills.
        command: before the settings of ``app.train``; for a job of ``slurm``, options of sbatch and the script.
        more: settings of its own.
    """

    name: str
    killed: str
    command: tuple[str, ...]
    more: tuple[str, ...] = ()
    slurm: Slurm | None = None

    @property
    def requeues(self) -> bool:
        """The job is killed, not a rank."""
        return self.killed == REQUEUED

    def begin(self, settings: Sequence[str], out: Path) -> StartedRun:
        words = [*self.command, *settings, *self.more]
        return JobRun(self.slurm, words, out) if self.slurm else ProcessRun([*words, "--out", str(out)], out)


def find_starts(stack: ExitStack) -> list[Start]:
    """All that can be used here; a Slurm that is started for them ends with ``stack``."""
    torchrun = str(Path(sys.executable).with_name("torchrun"))
    ours = (sys.executable, "-m", "app.train")
    found = [
        Start(
            f"torchrun --max-restarts {RESTARTS}",
            KILLED,
            (torchrun, "--nproc-per-node", str(RANKS), "--max-restarts", str(RESTARTS), "-m", "app.train"),
        ),
        Start(
            f"--ranks {RANKS} --max-restarts {RESTARTS}",
            KILLED,
            ours,
            ("--ranks", str(RANKS), "--max-restarts", str(RESTARTS)),
        ),
    ]
    if not missing_programs():
        slurm = stack.enter_context(running_slurm())
        found += [Start("preemptible.sbatch", kill, (str(PREEMPTIBLE),), (), slurm) for kill in (KILLED, REQUEUED)]
    return found


class ProcessRun:
    """A command on this machine."""

    def __init__(self, words: Sequence[str], out: Path) -> None:
        self._printed = out.with_suffix(".txt")
        with self._printed.open("w") as file:
            self._process = subprocess.Popen(
                words, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )

    def over(self) -> bool:
        return self._process.poll() is not None

    def wait(self, timeout_s: float) -> int:
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired as fault:
            self.end()
            raise TimeoutError(f"not over within {timeout_s:g} s:\n{self.printed()}") from fault

    def requeue(self) -> None:
        raise NotImplementedError("only Slurm has a queue")

    def end(self) -> None:
        """The launcher hands the signal on to its ranks."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(40)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def printed(self) -> str:
        return self._printed.read_text()


class JobRun:
    """A batch job."""

    def __init__(self, slurm: Slurm, words: Sequence[str], out: Path) -> None:
        self._slurm = slurm
        self._printed = out.with_suffix(".txt")
        variables = {**environment(), "RUN": str(out), "RANKS": str(RANKS)}
        self._job = slurm.submit("--output", self._printed, *words, cwd=ROOT, environment=variables)

    def over(self) -> bool:
        return self._slurm.job(self._job)["JobState"] in ENDED

    def wait(self, timeout_s: float) -> int:
        try:
            return int(self._slurm.wait(self._job, timeout_s) != "COMPLETED")
        except AssertionError as fault:
            self.end()
            raise TimeoutError(f"{fault}\n{self.printed()}") from fault

    def requeue(self) -> None:
        done = self._slurm.run("scontrol", "requeue", self._job)
        assert done.returncode == 0, done.stderr

    def end(self) -> None:
        self._slurm.run("scancel", self._job)

    def printed(self) -> str:
        return self._printed.read_text() if self._printed.exists() else "the job has printed nothing"


def environment() -> dict[str, str]:
    """One thread a rank, as the ranks share a machine."""
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    return {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}


def rows_of(out: Path) -> list[dict[str, str]]:
    """The steps in ``metrics.csv`` that are written whole."""
    path = out / "metrics.csv"
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return list(csv.DictReader(whole.splitlines()))


def rank_of(out: Path, rank: int) -> psutil.Process:
    """The process of ``rank`` of the run in ``out``.

    Raises:
        LookupError: there is none.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "app.train" not in words or str(out) not in words or "srun" in words[0]:
                continue
            environment = process.environ()
            if process.name() == f"rank {rank}" or environment.get("RANK", environment.get("SLURM_PROCID")) == str(
                rank
            ):
                return process
    raise LookupError(f"no process of rank {rank} of {out} was found")
