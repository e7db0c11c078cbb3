"""A rank is killed and not replaced: does the run go on with fewer, to the numbers of the run that nobody disturbed?

Takes nothing (slides are made); gives one line per launcher, with ``--write`` in LOST.md beside this file. Four ranks
train; one is killed for good, together with the agent that would start it again. Those that are left go on from the
last checkpoint. Then the same run is asked for more steps, on four ranks again. Losses of all steps are held against
those of four ranks that nobody disturbed: whoever computes them, they are sums in another order at most.

    python -m benchmarks.faults.lost [--only=REGEX] [--steps 60] [--write]
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from app import synth
from benchmarks.faults.starts import ROOT, ProcessRun, environment, rank_of, rows_of
from benchmarks.results import markdown_table, parser_of, results, write_results

OUT = ROOT / "bench-data" / "fault_drill_lost"
README = Path(__file__).with_name("LOST.md")
RANKS, LEFT, RESTARTS, EVERY, TOLERANCE = 4, 3, 3, 10, 1e-4
SETTINGS = (
    *("--model", "resnet18", "--tile", "256", "--batch", "12", "--microbatches", "6", "--parallel", "ddp"),
    # Px of empty glass are all alike, and cross the corner of a ReLU together; Adam divides rounding by its size.
    *("--min-tissue", "1", "--optimizer", "sgd", "--lr", "1e-4"),
    *("--device", "cpu", "--augment", "device", "--seed", "7", "--twin-steps=0", "--validation", "0"),
    *("--checkpoint-every", str(EVERY)),
)
WITHIN_S = 900.0
HEADER = ["started by", "killed at step", "ranks of the attempts", "s lost", "steps on 4 ranks again", "losses off by"]


@dataclass(frozen=True)
class Lost:
    """What became of a run.

    Attributes:
        at_step: the last that was done when the rank was killed.
        ranks: of each attempt.
        lost_s: against four ranks that nobody disturbed.
        error: of the loss of any step, relative.
    """

    name: str
    at_step: int
    ranks: tuple[int, ...]
    lost_s: float
    more_steps: int
    error: float

    @property
    def as_asked(self) -> bool:
        return self.ranks == (RANKS, LEFT) and self.error <= TOLERANCE

    def row(self) -> list[str]:
        attempts = ", then ".join(map(str, self.ranks))
        return [self.name, str(self.at_step), attempts, f"{self.lost_s:.1f}", str(self.more_steps), f"{self.error:.1e}"]


class Agents:
    """Torchrun's agents, one rank each, as on as many machines; each has printed into a file of its own."""

    def __init__(self, settings: Sequence[str], out: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torchrun = str(Path(sys.executable).with_name("torchrun"))
        command = [torchrun, "--nnodes", f"{LEFT}:{RANKS}", "--nproc-per-node", "1", "--max-restarts", str(RESTARTS)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", out.name]
        self._files = [out.with_suffix(f".{agent}.txt") for agent in range(RANKS)]
        self._processes = []
        for agent, file in enumerate(self._files):
            meet = f"is_host={agent == 0},last_call_timeout=5,join_timeout=60"
            words = [*command, "--rdzv-conf", meet, "-m", "app.train", *settings, "--out", str(out)]
            with file.open("w") as printed:
                self._processes.append(
                    subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=printed, stderr=subprocess.STDOUT)
                )

    def over(self) -> bool:
        return self._processes[0].poll() is not None

    def lose(self, rank: psutil.Process) -> None:
        """The agent first: it would start its rank again. The first agent holds what the others meet at."""
        agent = rank.parent()
        assert agent is not None
        assert agent.pid != self._processes[0].pid
        for process in (agent, rank):
            process.send_signal(signal.SIGKILL)

    def wait(self, timeout_s: float) -> int:
        end_s = time.monotonic() + timeout_s
        try:
            codes = [process.wait(max(0.1, end_s - time.monotonic())) for process in self._processes]
        finally:
            for process in self._processes:
                process.kill()
        return max(code for code in codes if code != -signal.SIGKILL)

    def printed(self) -> str:
        return "\n".join(file.read_text() for file in self._files)


class OurRanks(ProcessRun):
    """``--ranks`` with ``min-ranks``."""

    def __init__(self, settings: Sequence[str], out: Path) -> None:
        more = ("--ranks", str(RANKS), "--max-restarts", str(RESTARTS), f"--min-ranks={LEFT}")
        super().__init__([sys.executable, "-m", "app.train", *settings, *more, "--out", str(out)], out)

    def lose(self, rank: psutil.Process) -> None:
        rank.send_signal(signal.SIGKILL)


STARTS = {
    f"torchrun --nnodes {LEFT}:{RANKS}": Agents,
    f"--ranks {RANKS} --min-ranks={LEFT}": OurRanks,
}


def _ended(run: Agents | OurRanks) -> None:
    if code := run.wait(WITHIN_S):
        raise RuntimeError(f"exit code {code}\n{run.printed()}")


def _loses_a_rank(run: Agents | OurRanks, out: Path, step: int) -> int:
    end_s = time.monotonic() + WITHIN_S
    while len(rows_of(out)) < step:
        if run.over() or time.monotonic() > end_s:
            raise RuntimeError(f"the run did not come as far as step {step}:\n{run.printed()}")
        time.sleep(0.01)
    done = int(rows_of(out)[-1]["step"])
    # Ranks of torchrun are numbered as the agents came: the first agent's is not always rank 0.
    for number in (RANKS - 1, RANKS - 2):
        with contextlib.suppress(AssertionError):
            run.lose(rank_of(out, number))
            return done
    raise RuntimeError("no rank could be lost")


def drills(only: str, slides: Path, steps: int) -> Iterator[Lost]:
    """One for each start."""
    for name, start in STARTS.items():
        if not re.search(only, name):
            continue
        folder = OUT / re.sub(r"\W+", "-", name).strip("-")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        whole, lost = folder / "undisturbed", folder / "lost"
        settings, more = ["--slides", str(slides), *SETTINGS, "--steps"], steps + EVERY
        begun_s = time.monotonic()
        _ended(start([*settings, str(steps)], whole))
        whole_s = time.monotonic() - begun_s
        begun_s = time.monotonic()
        run = start([*settings, str(steps)], lost)
        at_step = _loses_a_rank(run, lost, steps // 2)
        _ended(run)
        lost_s = time.monotonic() - begun_s - whole_s
        ranks = tuple(json.loads((lost / "attempts.json").read_text())["ranks"])
        for out in (whole, lost):
            _ended(start([*settings, str(more), "--resume", "--extend"], out))
        assert json.loads((lost / "summary.json").read_text())["ranks"] == RANKS
        losses = [[float(row["loss"]) for row in rows_of(out)] for out in (whole, lost)]
        assert len(losses[0]) == len(losses[1]) == more
        error = max(abs(found - expected) / expected for expected, found in zip(*losses, strict=True))
        yield Lost(name, at_step, ranks, lost_s, EVERY, error)


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--only", default="", help="regular expression of launchers")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--write", action="store_true", help="put the table into LOST.md")
    arguments = parser.parse_args()
    slides = OUT / "slides"
    if not slides.exists():
        synth.main([str(slides), "--slides", "4", "--size", "2048", "--task", "classify"])
    found = []
    for row in drills(arguments.only, slides, arguments.steps):
        found.append(row)
        print(" | ".join(row.row()), flush=True)
    met = sum(row.as_asked for row in found)
    summary = f"**{met} of {len(found)} went on with {LEFT} ranks, to the losses of {RANKS}.**\n"
    print(summary)
    if arguments.write:
        table = markdown_table(HEADER, [row.row() for row in found])
        write_results(README, results("python -m benchmarks.faults.lost --write", table, summary))
    sys.exit(met < len(found))


if __name__ == "__main__":
    main()
