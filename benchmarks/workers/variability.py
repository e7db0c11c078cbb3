"""How much the time of a microbatch varies from step to step and worker to worker, what it costs, and what causes it.

Takes nothing (slides are made); gives, for two ranks that train a real model on real files, the coefficient of
variation of every worker's microbatches, by the clock and by the processor, and the part of the time that ranks wait
for each other before gradients are summed. Then the same with one possible cause taken away at a time.

    python -m benchmarks.workers.variability [--steps 200] [--write]
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app import synth
from app.launch.place import RankPlace
from app.launch.signals import Interrupt
from app.launch.watchdog import Watchdog
from app.settings.checkpoint import CheckpointSettings
from app.settings.run import DataSettings, ModelSettings, RunConfig, ScoreSettings, SplitSettings, StrategySettings
from app.training.dataset import prepare
from app.training.loop import TrainingLoop
from app.training.run_folder import RunFolder
from app.training.session import Session, build_session
from benchmarks.machine import measured_on
from benchmarks.ranks import run_on_ranks
from benchmarks.results import markdown_table, parser_of, publish, results
from parallel.comm.communicator import Communicator
from parallel.engine.engine import Engine
from parallel.engine.step import StepResult
from parallel.profile.malloc import keep_freed_memory
from parallel.schedule.action import Action, Kind
from pipelines.catalog.failures import FailedSlides
from pipelines.tiles.index_settings import IndexSettings

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data"
WORLD, BATCH, WARM_UP = 2, 4, 3
CAUSES = {
    "none": "as it runs",
    "reading": "no tile read: one batch held in memory",
    "cores": "each rank on a core of its own",
    "heap": "freed memory given back, as glibc does",
    "checkpoints": "no checkpoint written",
    "collector": "Python's collector off",
}
"""What is taken away or changed, and how it is called in the table."""

PUBLISHED = ((1.9, 2.5, 2.5), (2.3, 1.4, 1.4), (1.5, 1.8, 1.8))
"""Seconds of a CPU and two GPUs in three batches (Choi 2019, Leveraging Heterogeneity and Data-Parallelism)."""


class RecordingLoop(TrainingLoop):
    """A training loop that keeps what each step took."""

    def __init__(self, session: Session, folder: RunFolder, cause: str) -> None:
        super().__init__(session, folder, Interrupt())
        self.results: list[StepResult] = []
        if cause == "reading":
            self._tiles.keep(self._tiles.next())

    def _finish_step(self, result: StepResult, replaced: int, step_s: float, wait_s: float) -> bool:
        self.results.append(result)
        return super()._finish_step(result, replaced, step_s, wait_s)


def measure(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    """A run of one rank: seconds of its microbatches by the clock and by the processor, and the idle parts of all."""
    cause = argument["cause"]
    if cause == "cores":
        os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[communicator.rank]})
    if cause != "heap":
        keep_freed_memory()
    if cause == "collector":
        gc.disable()
    every = 10**9 if cause == "checkpoints" else 5
    config = RunConfig(
        DataSettings(Path(argument["slides"])),
        index=IndexSettings(tile=argument["tile"]),
        split=SplitSettings(validation=0.0),
        net=ModelSettings(model="resnet18"),
        strategy=StrategySettings(parallel="ddp", ranks=WORLD, batch=BATCH, microbatches=BATCH),
        score=ScoreSettings(),
        checkpoint=CheckpointSettings(checkpoint_every=every),
        steps=argument["steps"],
        twin_steps=0,
    )
    folder = RunFolder(Path(argument["folder"]))
    if communicator.rank:
        communicator.barrier()  # the first rank indexes the slides, and the others read that
    dataset = prepare(config, folder, lambda _: None)
    if not communicator.rank:
        communicator.barrier()
    session = build_session(
        config,
        config.strategy.to_strategy("cpu"),
        dataset,
        RankPlace(communicator, torch.device("cpu")),
        FailedSlides(folder.failed_slides),
        Watchdog(communicator.rank, stuck_s=config.strategy.timeout_s),
    )
    processor = _processor_seconds(session)
    loop = RecordingLoop(session, folder, cause)
    outcome = loop.run()
    return {
        "seconds": [each for result in loop.results[WARM_UP:] for _, each in result.seconds],
        "processor": processor[-sum(len(result.seconds) for result in loop.results[WARM_UP:]) :],
        "idle": outcome.idle.fractions,
        "step_s": statistics.median(outcome.throughput.step_s[WARM_UP:]),
    }


def _processor_seconds(session: Session) -> list[float]:
    """Seconds of the processor that the computing thread takes for each microbatch, as they come."""
    engine, kept = session.engine, []
    assert isinstance(engine, Engine)
    computing = engine._computing
    begun_s: dict[int, float] = {}

    @contextlib.contextmanager
    def timed(position: int, action: Action) -> Iterator[None]:
        begun_s.setdefault(action.i, time.thread_time())
        with computing(position, action):
            yield
        if action.kind is Kind.BACKWARD:
            kept.append(time.thread_time() - begun_s.pop(action.i))

    engine._computing = timed  # type: ignore[method-assign]
    return kept


def variation(seconds: Sequence[float]) -> float:
    """Coefficient of variation."""
    return float(np.std(seconds) / np.mean(seconds))


def published() -> tuple[float, float]:
    """The mean coefficient of variation of the study's workers, and the idle part of their time."""
    table = np.array(PUBLISHED)
    steps = table.max(axis=1)
    idle = (steps[:, None] - table).sum() / (steps.sum() * table.shape[1])
    return float((table.std(axis=0) / table.mean(axis=0)).mean()), float(idle)


def report(found: dict[str, list[list[dict[str, Any]]]], tile: int, steps: int) -> str:
    """The table of the README."""
    study, idle = published()
    rows = [("three batches of a CPU and two GPUs (Choi 2019)", f"{study:.1%}", "", f"{idle:.1%}", "1.9")]
    for cause, runs in found.items():
        own = [rank for run in runs for rank in run]
        rows.append(
            (
                CAUSES[cause],
                f"{statistics.median(variation(rank['seconds']) for rank in own):.1%}",
                f"{statistics.median(variation(rank['processor']) for rank in own):.1%}",
                f"{statistics.median(statistics.mean(run[0]['idle']) for run in runs):.1%}",
                f"{statistics.median(run[0]['step_s'] for run in runs):.3f}",
            )
        )
    about = (
        f"ResNet-18, {WORLD} ranks of one thread, {BATCH} tiles of {tile} px a step, one a microbatch; {steps} steps "
        f"as it runs, in turns with {steps // 4} of each of the others, {len(next(iter(found.values())))} rounds. "
        "Medians over ranks and rounds.\n"
    )
    head = ("workers", "varies, by the clock", "by the processor", "idle before the sum", "seconds of a step")
    return results("python -m benchmarks.workers.variability --write", about, markdown_table(head, rows))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tile", type=int, default=256, help="px")
    parser.add_argument("--steps", type=int, default=200, help="as it runs; a quarter of them of the others")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--causes", nargs="+", choices=CAUSES, default=list(CAUSES), help="to take away; none: nothing")
    arguments = parser.parse_args()
    slides = OUT / "variability"
    synth.main([str(slides), "--slides", "4", "--size", "4096", "--task", "classify"])
    found: dict[str, list[list[dict[str, Any]]]] = {cause: [] for cause in arguments.causes}
    for turn, cause in itertools.product(range(arguments.rounds), found):
        with tempfile.TemporaryDirectory() as folder:
            steps = WARM_UP + (arguments.steps if cause == "none" else arguments.steps // 4)
            asked = {
                "cause": cause, "slides": str(slides), "tile": arguments.tile, "steps": steps, "folder": folder
            }  # fmt: skip
            found[cause].append(run_on_ranks(WORLD, "benchmarks.workers.variability:measure", asked))
        idle = statistics.mean(found[cause][-1][0]["idle"])
        print(f"round {turn + 1}, {CAUSES[cause]}: idle {idle:.1%}", flush=True)
    (OUT / "variability.json").write_text(json.dumps({"found": found, "environment": measured_on()}) + "\n")
    text = report(found, arguments.tile, arguments.steps)
    publish(__file__, text, arguments.write, "variability")


if __name__ == "__main__":
    main()
