"""A rank is killed in the midst of a step: does the run go on by itself, to the weights of the undisturbed run?

Takes nothing (slides are made); gives one line per launcher and kill, with ``--write`` in the README beside this file.
Undisturbed and disturbed runs alternate, so that the seconds lost are of the same machine at the same time.

    python -m benchmarks.faults.drill [--only=REGEX] [--kills 3] [--steps 60] [--under spatial] [--write]
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from app import synth
from benchmarks.faults.starts import Start, StartedRun, find_starts, rank_of, rows_of
from benchmarks.results import markdown_table, parser_of, results, write_results

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "fault_drill"
README = Path(__file__).with_name("README.md")

EVERY = 10
SETTINGS = (
    *("--model", "resnet18", "--tile", "128", "--batch", "8", "--microbatches", "4"),
    *("--device", "cpu", "--augment", "device", "--seed", "7", "--twin-steps=0", "--validation", "0"),
    *("--checkpoint-every", str(EVERY)),
)
WAYS = {"master": ("--parallel", "master"), "spatial": ("--parallel", "spatial", "--grid", "2x1")}
COMES_WITHIN_S, ENDS_WITHIN_S = 600.0, 900.0
"""To the step in which it is killed, and to its end: on a busy machine, too."""

DEATH = re.compile(r"^rank \d+ .* at step (\d+)(?: in (\S+): |, between actions)")
RESTART = re.compile(r"restarted \(attempt \d+\): continuing from step (\d+)(?:; (\d+) more)?")
HEADER = ["started by", "undisturbed, s", "killed", "at step", "resumed from step", "steps done again"]
HEADER += ["s lost", "final weights equal"]


@dataclass(frozen=True)
class Drill:
    """What became of a run that was disturbed.

    Attributes:
        step: in which it was killed; action: of the rank's list, or where else it was.
        resumed: step of the checkpoint that it went on from; None if it did not restart.
        again: steps after it that had been done.
        lost_s: against the undisturbed run before it.
        equal: its last checkpoint holds the same parameters and running statistics, bit for bit.
    """

    start: str
    undisturbed_s: float
    killed: str
    step: int
    action: str
    resumed: int | None
    again: int
    lost_s: float
    equal: bool

    @property
    def as_asked(self) -> bool:
        # A checkpoint is being written beside the next steps; until it is on the disk, the one before is the last.
        return self.equal and self.resumed is not None and self.step - self.resumed < 2 * EVERY

    def row(self) -> list[str]:
        at = f"{self.step}, in `{self.action}`" if self.action else str(self.step)
        resumed = "did not restart" if self.resumed is None else str(self.resumed)
        cells = [self.start, f"{self.undisturbed_s:.1f}", self.killed, at, resumed, str(self.again)]
        return [*cells, f"{self.lost_s:.1f}", "yes" if self.equal else "**no**"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    state: dict[str, dict[str, torch.Tensor]] = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    return state["model"]


def run_to_end(start: Start, settings: Sequence[str], out: Path) -> float:
    """Seconds of a run that nobody disturbs."""
    begun_s = time.monotonic()
    run = start.begin(settings, out)
    code = run.wait(ENDS_WITHIN_S)
    if code:
        raise RuntimeError(f"{start.name}: exit code {code}\n{run.printed()}")
    return time.monotonic() - begun_s


def drill(start: Start, settings: Sequence[str], out: Path, at_step: int, undisturbed: tuple[float, Path]) -> Drill:
    """One run, disturbed once while it is in a step after ``at_step``."""
    undisturbed_s, reference = undisturbed
    begun_s = time.monotonic()
    run = start.begin(settings, out)
    _await_step(run, at_step, out)
    step_s = statistics.median(float(row["step_s"]) for row in rows_of(out))
    time.sleep(step_s / 2)
    if start.requeues:
        done = rows_of(out)
        run.requeue()
        step, action = int(done[-1]["step"]) + 1, ""
    else:
        rank_of(out, 1).send_signal(signal.SIGKILL)
        step, action = 0, ""
    code = run.wait(ENDS_WITHIN_S)
    lost_s = time.monotonic() - begun_s - undisturbed_s
    if code:
        raise RuntimeError(f"{start.name}: exit code {code}\n{run.printed()}")
    if not start.requeues:
        death = DEATH.search((out / "fault.txt").read_text())
        assert death, (out / "fault.txt").read_text()
        step, action = int(death[1]), death[2] or "no action"
    restart = RESTART.search((out / "run.log").read_text())
    found, expected = weights(out), weights(reference)
    equal = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    resumed, again = (int(restart[1]), int(restart[2] or 0)) if restart else (None, 0)
    return Drill(start.name, undisturbed_s, start.killed, step, action, resumed, again, lost_s, equal)


def _await_step(run: StartedRun, step: int, out: Path) -> None:
    end_s = time.monotonic() + COMES_WITHIN_S
    while len(rows_of(out)) < step:
        if run.over() or time.monotonic() > end_s:
            run.end()
            raise RuntimeError(f"the run did not come as far as step {step}:\n{run.printed()}")
        time.sleep(0.01)


def drills(
    starts: Sequence[Start], way: Sequence[str], slides: Path, steps: int, kills: int, seed: int
) -> Iterator[Drill]:
    """``kills`` of each start, at steps drawn with ``seed`` from the middle of the run."""
    moments = random.Random(seed)
    settings = ["--slides", str(slides), "--steps", str(steps), *SETTINGS, *way]
    for start in starts:
        for kill in range(kills):
            folder = OUT / re.sub(r"\W+", "-", f"{start.name} {start.killed} {kill}").strip("-")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            whole_s = run_to_end(start, settings, folder / "undisturbed")
            at_step = moments.randrange(EVERY + 1, steps - EVERY)
            yield drill(start, settings, folder / "disturbed", at_step, (whole_s, folder / "undisturbed"))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="regular expression of launcher and kill")
    parser.add_argument("--kills", type=int, default=3, help="of each launcher")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--under", choices=WAYS, default="master", help="how two ranks compute the model")
    arguments = parser.parse_args()
    slides = OUT / "slides"
    if not slides.exists():
        synth.main([str(slides), "--slides", "4", "--size", "1024", "--task", "classify"])
    found = []
    with ExitStack() as stack:
        starts = [start for start in find_starts(stack) if re.search(arguments.only, f"{start.name} {start.killed}")]
        for one in drills(starts, WAYS[arguments.under], slides, arguments.steps, arguments.kills, arguments.seed):
            found.append(one)
            print(" | ".join(one.row()), flush=True)
    met = sum(one.as_asked for one in found)
    summary = f"**{met} of {len(found)} went on by themselves from the last checkpoint, to the same weights.**\n"
    table = markdown_table(HEADER, [one.row() for one in found])
    print(summary)
    if arguments.write:
        under = arguments.under
        more = "" if under == "master" else f" --under {under} --kills {arguments.kills} --steps {arguments.steps}"
        text = results(f"python -m benchmarks.faults.drill{more} --write", table, summary)
        write_results(README, text, "teams" if under == "spatial" else "drill")
    sys.exit(met < len(found))


if __name__ == "__main__":
    main()
